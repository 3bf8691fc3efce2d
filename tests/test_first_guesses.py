"""What a newcomer types first: names of devices and repositories, lengths, rates, help."""

import math
import re
from io import StringIO
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from rich.console import Console

import planner
from planner import library, units
from planner.commands.main import MEANT, main
from planner.commands.plans import search
from planner.defaults import Request, resolve
from planner.errors import PlannerError
from planner.hardware.names import profile_named
from planner.schema import Number, value_of
from planner.terminal import tables
from planner.trainers.targets import load_target
from planner.workload import usual_name

DEVICES = {
    "h100": "h100-sxm", "H100": "h100-sxm", "H100_SXM": "h100-sxm", "h100-pcie": "h100-pcie", "a100": "a100-sxm-80gb",
    "A100-40GB": "a100-sxm-40gb", "h800": "h800-sxm", "gb200": "gb200-nvl72", "b300": "b300-sxm", "mi300": "mi300x",
    "4090": "rtx-4090", "rtx4090": "rtx-4090", "RTX 6000 Ada": "rtx-6000-ada", "H20": "h20-sxm", "gh200": "gh200-96gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm", "./mine.yaml": "./mine.yaml",
}  # fmt: skip


@pytest.mark.parametrize("name", DEVICES)
def test_devices_by_the_names_that_people_use(name: str) -> None:
    assert profile_named(name) == DEVICES[name]


@pytest.mark.parametrize("name", library.names("hardware"))
def test_every_profile_has_its_own_name_in_any_spelling(name: str) -> None:
    assert profile_named(name) == profile_named(name.upper()) == profile_named(name.replace("-", "")) == name


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("rtx", "hardware 'rtx' may be rtx-2080-ti, rtx-3090, "),
        ("h100-sxn", "unknown hardware 'h100-sxn'; known, nearest first: h100-sxm"),  # a word that is not understood
        ("l40", "unknown hardware 'l40'; known, nearest first: l40s"),  # another device than an L40S
        ("RTX 2080", "unknown hardware 'RTX 2080'; known, nearest first: rtx-2080-ti"),
        ("A100-64GB", "unknown hardware 'A100-64GB'; known, nearest first: a100-sxm-"),
        ("MI300A", "unknown hardware 'MI300A'; known, nearest first: mi300x"),
        ("tpu-v5p", "tpu-v5p: TPUs and Trainium are not modelled"),
        ("", "unknown hardware ''"),
    ],
)
def test_devices_that_are_not_known(name: str, sentence: str) -> None:
    with pytest.raises(PlannerError) as caught:
        profile_named(name)
    assert str(caught.value).startswith(sentence)


def test_what_a_name_is_taken_for_is_said() -> None:
    def said(hardware: str) -> list[str]:
        found = resolve(Request(model="llama-8b", num_gpus=8, hardware=hardware)).assumptions
        return [f"{one.value}: {one.why}" for one in found if one.what == "hardware"]

    assert said("a100") == ["a100-sxm-80gb: what 'a100' usually is"]
    assert said("H100_SXM") == said("h100-sxm") == []


def printed(*words: str) -> str:
    result = CliRunner().invoke(main, list(words), prog_name="plan")
    assert result.exit_code in (0, 2), result.output
    return result.output


SMALL = ("--model", "llama-8b", "--hardware", "h100", "--global-batch-size", "64", "--top", "3")


def test_lengths_batches_rates_and_nodes_as_people_write_them() -> None:
    text = printed("--model", "llama-8b", "--nodes", "4", "--sequence-length", "128k", "--global-batch-size", "4M",
                   "--network", "100Gbps", "--cp", "8", "--tp", "4", "--top", "1")  # fmt: skip
    assert text.startswith("llama-3.1-8b on 32 x h100-sxm, sequences of 131,072 tokens, 32 per step")
    assert "4,194,304 tokens in sequences of 131072" in " ".join(text.split())
    text = printed("--model", "llama-8b", "--gpus", "2,048", "--tp", "2", "--micro-batch-size", "1", "--top", "1")
    assert text.startswith("llama-3.1-8b on 2,048 x h100-sxm")
    assert units.parse("100Gbps", "bytes/s") == units.parse("100 Gbit/s", "bytes/s") == 12.5e9


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--nodes", "4", "--gpus", "8"), "4 nodes of h100-sxm have 32 GPUs, not 8"),
        (("--gpus", "8", "--sequence-length", "12x"), "'12x' is not a whole number; write it like 8192, 128k or 1M"),
        (("--gpus", "8", "--global-batch-size", "1k"), "1,024 tokens are less than one sequence of 8192"),
        (("--gpus", "13", "--global-batch-size", "512"), "8 or 16 GPUs, or a --global-batch-size of 507 would do"),
        (("--gpus", "2000", "--tp", "8", "--global-batch-size", "999"), "the nearest is 1000"),
    ],
)
def test_what_cannot_be_is_said_with_what_can(words: tuple[str, ...], sentence: str) -> None:
    assert sentence in " ".join(printed("--model", "llama-8b", "--hardware", "h100", *words).split())


@pytest.mark.parametrize("words", [("-h",), ("help",), ("search", "-h"), ("help", "search")])
def test_help_by_every_name(words: tuple[str, ...]) -> None:
    assert printed(*words).startswith("Usage: plan")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["--mo"], "--model"), (["--model", "qwen3-2"], "qwen3-235b-a22b"), (["--gpus", "8", "--hardware", "h1"], "h100-sxm"),
        (["estimate", "--precision", "mx"], "mxfp8"), (["wh"], "what-if"), (["--trainer", "torch"], "torchtitan"),
        (["export", "p.yaml", "--to", "mega"], "megatron-bridge"), (["export", "p.yaml", "--launcher", "s"], "slurm"),
        (["what-if", "p.yaml", "--hardware", "b2"], "b200-sxm"), (["hardware", "show", "h1"], "h100-sxm"),
        (["calibrate", "--trainer", "torch"], "torchtitan"), (["profile", "--model", "qwen3-2"], "qwen3-235b-a22b"),
        (["serve", "--engine", "v"], "vllm"), (["export", "s.yaml", "--to", "trt"], "trtllm"),
    ],
)  # fmt: skip
def test_a_shell_completes_flags_and_names_of_the_default_command_too(typed: list[str], offered: str) -> None:
    found = ShellComplete(main, {}, "plan", "_PLAN_COMPLETE").get_completions(typed[:-1], typed[-1])
    assert offered in [one.value for one in found]


def test_the_table_comes_first_a_line_for_each_plan() -> None:
    lines = printed(*SMALL, "--gpus", "8").splitlines()
    assert lines[1].startswith("Best plans") and max(map(len, lines[:8])) <= 140
    rows = [line.split() for line in lines[5:8]]
    assert [row[0] for row in rows] == ["1", "2", "3"] and all(row[-1] == "%" for row in rows)
    text = "\n".join(lines)
    assert text.index("Best plans") < text.index("Why the first") < text.index("Assumed")
    assert "count as equal to 1: less than" in text and "m: microbatches per step" in text


def test_the_faster_plan_that_the_search_holds_back_is_named() -> None:
    """Below a tenth of the time, optimizer states on the host are an alternative with its risk, not the choice."""
    plans = planner.plan(model="llama-70b", gpus=32, hardware="h100-sxm")
    [held] = [one for one in plans.faster if one.flag.startswith("--offload-optimizer")]
    moved = planner.plan(model="llama-70b", gpus=32, hardware="h100-sxm", offload_optimizer=100)[0].estimate
    assert held.step_time_s == pytest.approx(moved.step_time, rel=0.01) and 0.01 < held.gain < 0.1
    assert "runs out with a chance of" in held.what and not plans[0].layout.offload_optimizer


def test_times_below_a_second_never_print_as_powers_of_ten() -> None:
    assert [tables.seconds(value) for value in (0.9996, 0.99949, 0.0123)] == ["1 s", "999 ms", "12.3 ms"]


def test_tokens_and_days_on_plan_itself() -> None:
    """Without a number of GPUs the fewest that meet the deadline; with one what it takes; dollars by hand."""
    found = planner.plan(model="llama-8b", hardware="h100", tokens="2T", days=30, price=2.0, top=1)
    training = found.training
    assert training is not None and training.costs.days <= 30
    gpus, step = training.num_gpus, found[0].estimate.step_time
    work = found.resolved.job.workload
    hours = math.ceil(2e12 / work.tokens) * step * gpus / 3600
    assert training.costs.gpu_hours == pytest.approx(hours) and training.costs.usd == pytest.approx(2.0 * hours)
    assert [one.value for one in found.assumed if one.what == "GPUs"] == [str(gpus)]
    fewer = planner.plan(model="llama-8b", hardware="h100", gpus=gpus // 2 // 8 * 8, tokens="2T", days=30, top=1)
    assert fewer.training is not None and "more of them do less each, so that more are needed" in fewer.training.sentences()[0]


def test_the_fewest_gpus_go_before_the_number_that_is_given() -> None:
    text = printed("--model", "llama-8b", "--gpus", "64", "--tokens", "200B", "--days", "30", "--fewest-gpus", "--tp", "1")
    assert text.startswith("llama-3.1-8b on 8 x h100-sxm") and "the fewest h100-sxm that" in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--days", "30"), "--days needs the number of tokens to train on: add --tokens, like --tokens 15T"),
        (("--gpus", "8", "--tokens", "15Q"), "'15Q' has the unit 'Q'"),
        (("--tokens", "15T"), "which job? --gpus, or --nodes, is missing"),
        (("--fewest-gpus", "--days", "30"), "--fewest-gpus is of one kind of GPU and of a deadline: add --tokens and --days"),
        (("--tokens", "15T", "--days", "-1"), "--days is -1.0; it must be a number above 0"),
        (("--tokens", "900T", "--days", "0.01"), "no number of GPUs trains 900T tokens in 0.01 days"),
    ],
)
def test_budgets_that_cannot_be(words: tuple[str, ...], sentence: str) -> None:
    assert sentence in " ".join(printed("--model", "llama-8b", "--hardware", "h100", *words).split())


def test_the_cheapest_hardware_passes_over_cards_that_the_trainer_cannot_use() -> None:
    cards = ["v100-sxm2-16gb", "h100-sxm", "h200-sxm"]
    found = planner.what_if(model="llama-8b", gpus=64, tokens="1T", days=30, cheapest=True, hardware=["h100-sxm", *cards])
    rows = {row.hardware: row for row in found.found.rows[1:]}
    assert not rows["v100-sxm2-16gb"].fits and "has no flash attention kernel" in rows["v100-sxm2-16gb"].why
    assert rows["h100-sxm"].fits and rows["h200-sxm"].fits


@pytest.mark.parametrize(
    ("word", "flag"),
    [("--context", "--sequence-length"), ("--gbs", "--global-batch-size"), ("--world_size", "--gpus"),
     ("--qlora", "--frozen-weights"), ("--load-in-4bit", "--frozen-weights"), ("-g", "--gpus"), ("-m", "--model")],
)  # fmt: skip
def test_flags_of_other_tools_name_the_one_that_is_meant(word: str, flag: str) -> None:
    assert f"Did you mean '{flag}'?" in printed("--model", "llama-8b", word, "8")


def test_several_names_where_one_is_taken_are_pointed_at_what_if() -> None:
    for flag, name in (("--hardware", "h100,a100"), ("--model", "llama-8b,llama-70b"), ("--trainer", "megatron,torchtitan")):
        words = {"--model": "llama-8b", "--gpus": "8", flag: name}
        text = printed(*(one for pair in words.items() for one in pair))
        assert f"one {flag[2:]} at a time, plan what-if compares several" in text
    assert "at a time" not in printed("--model", "llama-8c", "--gpus", "8")


def test_bf16_on_a_card_without_it_is_said() -> None:
    older = resolve(Request(model="llama-3.1-8b", num_gpus=8, hardware="v100", precision="bf16"))
    said = {one.what: one for one in older.assumptions}
    assert "has no bf16" in said["precision"].why and said["precision"].flag == "--precision fp16"
    newer = resolve(Request(model="llama-3.1-8b", num_gpus=8, hardware="a100", precision="bf16"))
    assert "precision" not in {one.what for one in newer.assumptions}


def test_a_flag_is_named_with_its_help_and_only_where_the_command_has_it() -> None:
    assert "nf4" in printed("--model", "llama-8b", "--qlora").partition("Did you mean")[2]
    assert "Did you mean" not in printed("doctor", "plan.yaml", "--engine", "vllm")


@pytest.mark.parametrize(
    ("word", "flags"),
    [("--qlora", "--lora-rank 16 --frozen-weights nf4"), ("--dpo", "--objective dpo"), ("--load_in_8bit", "--frozen-weights int8")],
)
def test_a_word_with_a_value_of_its_own_is_shown_as_it_is_typed_here(word: str, flags: str) -> None:
    text = printed("--model", "llama-8b", "--gpus", "1", word)
    like = text.partition(" Like: ")[2].split()
    assert flags in " ".join(like)
    assert "rror: " not in printed("estimate", "--model", "llama-8b", "--gpus", "8", "--trainer", "trl", *like)


@pytest.mark.parametrize(
    "words", [("report",), ("reshape", "--gpus", "4"), ("resilience", "--model", "llama-8b"), ("validate", "--gpus", "8")]
)
def test_commands_of_plan_files_say_where_one_comes_from(words: tuple[str, ...]) -> None:
    text = printed(*words)
    assert f"First plan --model llama-8b --gpus 8 --output plan.yaml, then plan {words[0]} plan.yaml." in text
    assert "plan.yaml" not in printed("import")


def test_what_stands_in_the_place_of_a_plan_or_of_a_log_is_named(tmp_path: Path) -> None:
    ranks, log = tmp_path / "ranks.csv", tmp_path / "train.log"
    ranks.write_text("rank,step_s\n0,1.0\n")
    log.write_text("a line\n")
    for words in (("watch", str(ranks), "plan.yaml", "--once"), ("resilience", str(log)), ("compare", str(log), str(ranks))):
        assert "it is no plan, which --output of plan writes" in printed(*words)
    asked = planner.estimate_rl(model="qwen3-4b", gpus=4, hardware="h100-sxm", mode="colocated", rollout="tp=1", actor="tp=1")
    asked.save(tmp_path / "rl.yaml")
    for time in ("100s", "14.2", "9 min"):
        assert "give --measured with the log of its framework" in printed("doctor", str(tmp_path / "rl.yaml"), "--measured", time)


def test_a_folder_that_is_not_there_is_said_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("load", "plan_rl"):
        monkeypatch.setattr(planner.api, name, lambda *_, **__: pytest.fail("worked before it looked"))
    (tmp_path / "plan.yaml").write_text("planner_plan: 1\n")
    missing = str(tmp_path / "nowhere" / "page.html")
    assert "there is no directory" in printed("report", str(tmp_path / "plan.yaml"), "--output", missing)
    assert "there is no directory" in printed("rl", "--model", "qwen3-4b", "--gpus", "4", "--output", missing)


def test_what_is_missing_is_named_with_a_line_that_works() -> None:
    assert "It is used like: plan first-day --output first-day" in printed("first-day")
    like = "plan export plan.yaml --to megatron --output run/"
    assert f"Error: --output missing, like: {like}" in printed("export", "plan.yaml", "--to", "megatron")
    assert f"Error: the plan file, --to, --output missing, like: {like}" in printed("export")
    lines = {"compare": "today.yaml plan.yaml", "import": "run.sh --output today.yaml", "calibrate": "a.yaml b.yaml"}
    for command, line in lines.items():
        assert f"It is used like: plan {command} {line}" in printed(command)
    assert "plan first-day --output first-day measures and checks" in printed("profile", "--check")


def test_groups_name_what_a_word_was_meant_for_and_have_help() -> None:
    assert "It is a model: plan serve --model llama-8b --gpus 8." in printed("serve", "llama-8b")
    assert "Nearest: estimate" in printed("rl", "estimat")
    assert printed("serve", "help") == printed("serve", "--help")


def test_changes_of_a_deployment_are_whole_at_any_width() -> None:
    found = planner.serve_what_if(model="llama-8b", gpus=2, hardware="h100-sxm", ttft="500ms", tpot=["15ms", "30ms"])
    for width in (80, 100, 120, 140):
        out = StringIO()
        found.show(Console(width=width, file=out))
        assert "30ms" in out.getvalue() and "…" not in out.getvalue(), width


@pytest.mark.proof
def test_degrees_of_sharding_are_in_the_legend_where_they_are_shown() -> None:
    job = {"model": "llama-70b", "gpus": 8, "hardware": "h100-sxm", "trainer": "torchtune", "lora_rank": 16}
    for plans, named in ((planner.plan(**job, top=3), True), (planner.plan(**job, top=3, zero=2, dp_shard=8), False)):
        out = StringIO()
        plans.show(Console(width=140, file=out))
        assert ("zero: stage, and the ranks that shard" in out.getvalue()) is named


def test_nothing_is_installed_by_the_name_of_this_project() -> None:
    """An index may hold another project of that name: extras are those of the checkout, else the library is named."""
    root = Path(planner.__file__).parents[1]
    for file in [root / "README.md", *(root / "docs").glob("*.md"), *(root / "planner").rglob("*.py")]:
        assert not re.search(r"pip install\s+['\"]?planner\b", file.read_text(encoding="utf-8")), file


def test_every_word_of_another_tool_means_a_flag_of_the_search() -> None:
    flags = {flag for one in search.params for flag in one.opts}
    words = " ".join(MEANT.values()).split()
    assert flags >= MEANT.keys() and len(words) == len(set(words)) and not {f"--{word}" for word in words} & flags


@pytest.mark.proof
def test_no_heading_of_the_plans_is_cut_at_any_width() -> None:
    found = planner.plan(model="llama-70b", gpus=64, hardware="h100-sxm", tp=8, top=3)
    for width in range(78, 125):
        out = StringIO()
        found.show(Console(width=width, file=out))
        best = out.getvalue().partition("Best plans")[2].partition("communication")[0]
        assert "runs out" in best and "…" not in best, width


@pytest.mark.parametrize(
    ("word", "hint"),
    [("llama-8b", "It is a model: plan --model llama-8b --gpus 8."), ("llama-8b 8 h100", "It is a model: plan --model llama-8b"),
     ("estimat", "Nearest: estimate"), ("x" * 300, "Nearest: "), (" ", "Nearest: ")],
)  # fmt: skip
def test_a_word_that_is_no_command_says_what_it_was_meant_for(word: str, hint: str) -> None:
    assert hint in printed(word)


def test_a_trainer_without_a_target_names_those_that_take_its_plans() -> None:
    with pytest.raises(PlannerError, match="'fsdp', which is a trainer; its plans are written for .*accelerate"):
        load_target("fsdp")
    for name in ("unsloth", "litgpt"):  # what serves its model trains nothing
        with pytest.raises(PlannerError, match=f"writes the training of trainer {name}, only .*vllm.* to serve its model"):
            load_target(name)
    with pytest.raises(PlannerError, match="written for accelerate$"):
        load_target("trl")


@pytest.mark.parametrize(
    ("said", "meant"),
    [({"precision": "BF16"}, {"precision": "bf16"}), ({"precision": "bfloat16"}, {"precision": "bf16"}),
     ({"optimizer": "AdamW"}, {"optimizer": "adam"}), ({"optimizer": "adamw-torch"}, {"optimizer": "adam"})],
)  # fmt: skip
def test_precisions_and_optimizers_by_what_people_call_them(said: dict[str, str], meant: dict[str, str]) -> None:
    job = {"model": "llama-8b", "gpus": 8, "hardware": "h100-sxm", "tp": 8, "pp": 1, "cp": 1, "micro_batch_size": 1}
    assert planner.estimate(**job, **said).to_dict() == planner.estimate(**job, **meant).to_dict()
    with pytest.raises(PlannerError, match="unknown optimizer 'shampoo'"):
        planner.estimate(**job, optimizer="shampoo")


def test_targets_are_listed_by_name() -> None:
    from planner.terminal.library_tables import target_lines

    names = [line.split()[0] for line in target_lines() if "; plans of " in line]
    assert names == sorted(names) and {"megatron", "primus"} <= set(names)


def test_numbers_beyond_all_bounds_are_told_the_bound() -> None:
    with pytest.raises(PlannerError, match=r"step_time_s is 18446744073709551616; it must be a number.*, and at most 1e\+15$"):
        value_of(Number, 2**64, "plan.yaml: prediction", "step_time_s")


@pytest.mark.parametrize(("said", "meant"), [("fp4", "nvfp4"), ("bf16-mixed", "bf16"), ("BFloat16", "bf16"), ("adamw", "adam")])
def test_precisions_and_optimizers_by_the_names_that_people_use(said: str, meant: str) -> None:
    assert usual_name(said) == meant


def test_defaults_of_the_environment_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAN_HARDWARE", "A100-40GB")
    monkeypatch.setenv("PLAN_TRAINER", "fsdp2")
    found = resolve(Request(model="llama-8b", num_gpus=8))
    said = {one.what: (one.value, one.why) for one in found.assumptions}
    assert said["hardware"] == ("a100-sxm-40gb", "PLAN_HARDWARE of the environment") and found.hardware == "a100-sxm-40gb"
    assert said["trainer"] == ("fsdp", "PLAN_TRAINER of the environment")
    stated = resolve(Request(model="llama-8b", num_gpus=8, hardware="h100-sxm", trainer="megatron"))
    assert stated.hardware == "h100-sxm" and not {"hardware", "trainer"} & {one.what for one in stated.assumptions}
    monkeypatch.setenv("PLAN_HARDWARE", "abacus")
    assert "unknown hardware 'abacus'" in printed("--model", "llama-8b", "--gpus", "8")


def test_models_are_listed_by_words_of_their_names() -> None:
    assert {"llama-3.1-70b", "llama-2-70b"} <= set(printed("models", "Llama", "70b").split())
    assert "mixtral-8x7b" not in printed("models", "llama") and "mixtral-8x7b" in printed("models")
    assert "unknown model 'abacus'" in printed("models", "abacus")


def test_a_measured_step_without_a_unit_is_seconds(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.yaml")
    planner.plan(model="llama-3.2-1b", gpus=8, hardware="h100-sxm", global_batch_size=64, top=1)[0].save(path)
    said = [printed("doctor", path, "--measured", text) for text in ("8.1", "8.1s")]
    assert "measured 8.1 s" in said[0] and said[0] == said[1]


@pytest.mark.proof
def test_many_experts_name_the_exchange_that_their_authors_used() -> None:
    """The trainer's default is a plain all-to-all; the answer says what DeepEP would save."""
    plans = planner.plan(model="deepseek-v3", gpus=256, hardware="h800-sxm", top=1)
    gains = {one.flag: one.gain for one in plans.faster}
    assert gains["--option expert_dispatch=deepep"] > 0.05
