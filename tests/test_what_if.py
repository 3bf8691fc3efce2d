"""What if: costs by hand, one thing changed at a time, the command as users meet it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import api
from planner.costs import costs, rates_of
from planner.defaults import Request, ResolvedJob, resolve
from planner.errors import PlannerError
from planner.keywords import flag_of
from planner.plan_file import load_plan
from planner.questions import best_plan as best
from planner.questions.best_plan import best_of, on_cluster, resolved_of
from planner.questions.report import scaling
from planner.questions.what_if.changed_rows import Pricing, row_of
from planner.questions.what_if.changes import INPUTS, Variant, apply, base_variant, read_values
from tests.samples import HARDWARE, MODELS

SMALL = ("--model", "llama-3.2-1b", "--gpus", "8", "--global-batch-size", "64")


def resolved(gpus: int = 16, **changes: Any) -> ResolvedJob:
    """A small job that is searched in a few hundredths of a second."""
    request: dict[str, Any] = {"model": MODELS["gqa"], "hardware": "h100-sxm", "sequence_length": 4096,
                               "global_batch_size": 64, "precision": "bf16", "optimizer": "adam"}  # fmt: skip
    return resolve(Request(**{**request, "num_gpus": gpus, "trainer": "megatron", **changes}))


JOB = resolved()


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from click.testing import CliRunner

    from planner.commands import main as cli

    path = tmp_path_factory.mktemp("plans") / "plan.yaml"
    arguments = [*SMALL, "--hardware", "h100-sxm", "--output", str(path)]
    assert CliRunner().invoke(cli.main, arguments, prog_name="plan").exit_code == 0
    return path


# ------------------------------------------------------------------------------------------------ costs


def test_costs_by_hand() -> None:
    hardware = HARDWARE["h100-sxm"]
    rates = rates_of(hardware, price=2.5, power_share=0.8, pue=1.2)
    one = costs(rates, num_gpus=64, step_time_s=10.0, tokens_per_step=4e6, tokens=1e12 + 1)
    assert one.steps == 250_001  # the last step is a whole one
    assert one.seconds == 2_500_010.0 and one.days == pytest.approx(28.935, abs=0.001)
    assert one.gpu_hours == pytest.approx(64 * 2_500_010 / 3600)
    assert one.usd == pytest.approx(2.5 * one.gpu_hours)
    assert one.kwh == pytest.approx(one.gpu_hours * 0.7 * 0.8 * 1.2)  # 700 W
    assert one.usd_per_million_tokens == pytest.approx(one.usd / 1e6, rel=1e-5)
    listed = rates_of(hardware)
    assert listed.usd_per_gpu_hour == hardware.prices[0].usd_per_hour and listed.other_prices == hardware.prices[1:]
    assert [(basis.what, bool(basis.source)) for basis in listed.basis] == [
        ("price of a GPU-hour", True), ("power of a GPU", True), ("share of that power", True), ("PUE", True),
    ]  # fmt: skip
    assert listed.basis[0].date == hardware.prices[0].date
    unpriced = costs(rates_of(HARDWARE["gaudi2"]), num_gpus=8, step_time_s=1.0, tokens_per_step=1e6, tokens=1e9)
    assert unpriced.usd is None and unpriced.usd_per_million_tokens is None and unpriced.kwh > 0


@pytest.mark.parametrize("wrong", [{"price": 0.0}, {"price": float("nan")}, {"power_share": 1.2}, {"power_share": 0.0},
                                   {"pue": 0.9}, {"pue": float("inf")}])  # fmt: skip
def test_rates_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(PlannerError, match="--price|--power-share|--pue"):
        rates_of(HARDWARE["h100-sxm"], **wrong)


# ------------------------------------------------------------------------------------------------ scaling


def test_scaling_is_the_search_of_every_size() -> None:
    job = resolved(16)
    assert scaling.sizes(16, 8) == [8, 16, 32, 64] and scaling.sizes(24, 8) == [8, 16, 24, 48, 96]
    assert scaling.sizes(8, 8) == [1, 2, 4, 8, 16, 32]
    large = scaling.sizes(4096, 8)
    assert large[0] == 8 and large[-3:] == [4096, 8192, 16384] and len(large) == scaling.BELOW + 3
    found = [scaling.at_size(job, count) for count in (8, 16, 32)]
    own = best_of(job).prediction
    assert [one.resolved.job.cluster.num_gpus for size in found for one in size] == [8, 8, 16, 16, 32, 32]
    assert [weak.resolved.job.workload.global_batch_size for _, weak in found] == [32, 64, 128]
    assert found[1][0].prediction == found[1][1].prediction == own
    for count, (strong, _) in zip((8, 16, 32), found, strict=True):
        again = best_of(on_cluster(job, num_gpus=count)).prediction
        assert again is not None and strong.prediction == again
        assert strong.tokens_per_second == pytest.approx(64 * 4096 / again.step_time_s)
    small, _ = scaling.at_size(resolve(Request(model="llama-70b", num_gpus=8, hardware="h100-sxm")), 1)
    assert not small.fits and "misses by" in small.why_not


# ------------------------------------------------------------------------------------------------ changes


def variants(base: Variant, flag: str, text: str) -> list[Variant]:
    return [apply(base, value) for value in read_values(flag, [text])]


def test_values_are_read_as_numbers_factors_ranges_and_names() -> None:
    base = base_variant(resolved(16))
    assert [one.request.num_gpus for one in variants(base, "gpus", "4..20,x2,512")] == [4, 8, 16, 20, 32, 512]
    double, absolute = variants(base, "network", "x2, 200 Gb/s")
    usual = HARDWARE["h100-sxm"].network_bandwidth
    assert double.request.network_bandwidth == 2 * usual and absolute.request.network_bandwidth == 25e9
    [more] = variants(base, "memory", "x1.5")
    assert more.resolved().job.cluster.hardware.usable_memory == pytest.approx(1.5 * HARDWARE["h100-sxm"].usable_memory)
    [exact] = variants(base, "memory", "141 GiB")
    assert exact.resolved().job.cluster.hardware.usable_memory == pytest.approx(141 * 2**30)
    [faster] = variants(base, "compute", "x2")
    assert faster.resolved().job.cluster.hardware.peak("bf16") == 2 * HARDWARE["h100-sxm"].peak("bf16")
    both = apply(double, read_values("precision", ["fp8"])[0])
    assert both.label == "network x2 (800 Gb/s per GPU), precision fp8"
    assert (both.request.precision, both.request.network_bandwidth) == ("fp8", 2 * usual)
    again = base.resolved()
    assert again.job.workload == resolved(16).job.workload
    assert all(one.flag.startswith("--option") for one in again.assumptions[1:])
    [deepep] = variants(base, "options", "expert_dispatch=deepep")
    assert (
        deepep.resolved().job.trainer.kernels.expert_dispatch == "deepep"
        and deepep.label == "options expert_dispatch=deepep"
    )


@settings(max_examples=60, deadline=None)
@given(
    flag=st.sampled_from([one for one in INPUTS if one not in ("model", "hardware", "trainer")]),
    text=st.one_of(
        st.text(max_size=20), st.from_regex(r"[x0-9.,e kGBTi/s-]{0,12}", fullmatch=True), st.just("9" * 5000)
    ),
)
def test_any_text_is_read_or_refused_with_a_sentence(flag: str, text: str) -> None:
    base = base_variant(JOB)
    try:
        found = [apply(base, value) for value in read_values(flag, [text])]
    except PlannerError as error:
        assert flag_of(flag).strip("-").split("-")[0] in str(error) or flag.split("_")[0] in str(error)
        return
    for variant in found:
        assert variant.changed == (flag,) and variant.label


@pytest.mark.parametrize(("flag", "better"), [("network", "x2"), ("scale_up", "x2"), ("memory", "x1.5"), ("compute", "x1.5"),
                                              ("memory_bandwidth", "x2"), ("network_latency", "x0.5")])  # fmt: skip
@pytest.mark.parametrize("model", ["gqa", "moe"])
def test_better_hardware_is_never_slower(flag: str, better: str, model: str) -> None:
    base = base_variant(resolved(32, model=MODELS[model]))
    first, row = row_of(base, None, None, Pricing())
    [variant] = variants(base, flag, better)
    _, changed = row_of(variant, first, None, Pricing())
    assert row.prediction is not None and changed.prediction is not None
    assert changed.prediction.step_time_s <= row.prediction.step_time_s * 1.0001
    assert changed.throughput is not None and changed.throughput >= 0.9999 and changed.why


def test_rows_say_why() -> None:
    base = base_variant(resolved(8))
    first, row = row_of(base, None, None, Pricing(tokens=1e9))
    assert row.why == "the job as it is" and row.costs is not None and row.costs.tokens == 1e9

    def why(flag: str, text: str) -> str:
        [variant] = variants(base, flag, text)
        return row_of(variant, first, None, Pricing())[1].why

    assert why("network", "x2") == "no effect, the same plan: the job stays inside one node"
    assert "exposed communication is" in why("scale_up", "x1.1")
    assert why("memory", "x1.5").endswith("the same plan: memory does not bind")
    assert "of computation" in why("compute", "x2") and why("compute", "x2").startswith("saves")
    assert "does not train in fp16" in row_of(variants(base, "precision", "nvfp4")[0], first, None, Pricing())[1].why \
        or "fp4" in why("precision", "nvfp4")  # fmt: skip
    assert "no flash attention kernel" in why("hardware", "v100-sxm2-32gb")
    assert "longer than the 8192 tokens" in why("sequence_length", "16384")


def test_a_batch_with_a_suffix_counts_tokens() -> None:
    """As with ``plan``: 4M is 4 x 1024 x 1024 tokens."""
    base = base_variant(resolve(Request(model="llama-8b", num_gpus=64, hardware="h100-sxm", sequence_length=8192)))
    found = [apply(base, value) for value in read_values("global_batch_size", ["1M..4M", "64"])]
    assert [one.request.global_batch_size for one in found] == [128, 256, 512, 64]
    assert found[0].label == "global batch size 128 (1048576 tokens)" and found[-1].label == "global batch size 64"


# ------------------------------------------------------------------------------------------------ the command


def test_json_holds_what_the_table_shows(run: Any, plan_file: Path) -> None:
    arguments = ("what-if", str(plan_file), "--network", "x2", "--gpus", "16", "--precision", "fp8", "--hardware",
                 "v100-sxm2-32gb", "--tokens", "1T", "--together")  # fmt: skip
    document = json.loads(run(*arguments, "--json").stdout)
    assert document["complete"] is True and len(document["rows"]) == 6
    table = run(*arguments).output
    from planner.questions.what_if.show import money
    from planner.terminal.tables import seconds

    for row in document["rows"]:
        assert row["label"] in table and row["why"][:60] in table.replace("\n", "")
        if not row["fits"]:
            continue
        one, cost = row["estimate"], row["costs"]
        line = next(line for line in table.splitlines() if line.strip().startswith(row["label"]))
        for text in (seconds(one["step_time_s"]), f"{one['tokens_per_second_per_gpu']:,.0f}", f"{one['memory_peak_gib']:.1f}",
                     money(row["usd_per_million_tokens"])):  # fmt: skip
            assert text in line
        assert f"{cost['days']:,.1f}" in table and money(cost["usd"]) in table
        assert one["tokens_per_second_per_gpu"] * row["num_gpus"] == pytest.approx(row["tokens_per_second"])
    assert document["rows"][0]["label"] == "base" and document["rows"][1]["fits"] is False
    assert document["rows"][0]["price"]["date"] and "2025" in table
    plan = load_plan(plan_file)
    assert document["rows"][0]["estimate"]["step_time_s"] == pytest.approx(plan.prediction.step_time_s)
    assert resolved_of(plan).job.workload == plan.workload


def test_flags_describe_the_base_first_then_changes(run: Any, plan_file: Path) -> None:
    from_flags = run("what-if", *SMALL, "--precision", "bf16,fp8", "--gpus", "x2", "--json")
    from_file = run("what-if", str(plan_file), "--precision", "fp8", "--gpus", "x2", "--json")
    mine, theirs = (json.loads(result.stdout)["rows"] for result in (from_flags, from_file))
    assert [row["label"] for row in mine] == ["base", "gpus 16 (x2)", "precision fp8"]
    assert mine == theirs
    pinned = json.loads(run("what-if", *SMALL, "--tp", "4", "--network", "x2", "--json").stdout)["rows"]
    assert [row["layout"]["tp"] for row in pinned] == [4, 4]


def test_sweep_is_drawn_whole_or_not_at_all(run: Any, plan_file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "sweep.png"
    result = run("what-if", str(plan_file), "--gpus", "1..16", "--plot", str(picture))
    assert result.exit_code == 0 and f"wrote {picture}" in result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    drawn = result.stdout.split("Tokens/s/GPU over gpus")[1].strip().split("\n\n")[0]
    bars = [line.split() for line in drawn.splitlines()]
    assert [int(words[0]) for words in bars] == [1, 2, 4, 8, 16]
    assert all(words[1].startswith("####") for words in bars)
    lengths, rates = [len(words[1]) for words in bars], [float(words[2].replace(",", "")) for words in bars]
    assert lengths == [round(max(lengths) * rate / max(rates)) for rate in rates]
    refused = run("what-if", str(plan_file), "--gpus", "4,16", "--plot", str(tmp_path / "no" / "x.png"))
    assert refused.exit_code == 2 and "no such directory" in refused.stderr and not refused.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.png"]


WRONG = {
    "--network x0": "'x0' must be a factor above 0",
    "--network x-1": "'x-1' must be a factor above 0",
    "--network xfast": "'xfast' is not a factor; write it like x2",
    "--network 400": "'400' has no unit",
    "--network 3GiB": "does not measure bytes/s",
    "--hardware b201": "unknown hardware 'b201'; known, nearest first: b200-sxm",
    "--trainer megatrom": "unknown trainer 'megatrom'; known, nearest first: megatron",
    "--precision fp9": "unknown precision 'fp9'; known, nearest first: fp8",
    "--gpus 4096..64": "runs backwards; write 64..4096",
    "--gpus 4,096": "'096' is not a whole number",
    "--gpus 0": "must be a whole number from 1",
    "--gpus x0.3": "8 times 0.3 is no whole number",
    "--gpus 8,": "a value is missing next to a comma",
    "--sequence-length 128x": "'128x' is not a whole number",
    "--global-batch-size 4k": "--global-batch-size: 4k tokens are less than one sequence of 8192",
    "--global-batch-size 64..4M": "counts sequences at one end and tokens at the other",
    "--compute 2": "write it like x1.5",
    "--days 30 --fewest-gpus": "--days needs the number of tokens",
    "--tokens 1T --days 30": "add --fewest-gpus or --cheapest",
    "--tokens 1T --days -3 --fewest-gpus": "--days is -3; it must be above 0",
    "--tokens 15Q --network x2": "'15Q' has the unit 'Q'",
    "--price free --network x2": "is not dollars per GPU-hour",
    "--price h201=2 --network x2": "unknown hardware 'h201'; known, nearest first: h20-sxm",
    "--pue 0.5 --network x2": "--pue is 0.5",
    "--network x2 --plot x.png": "--plot draws a sweep",
    "--network x2 --together": "--together needs changes of two flags",
    "": "nothing to change: give a change such as --network x2",
}


@pytest.mark.parametrize("flags", WRONG)
def test_wrong_input_is_one_sentence(flags: str, run: Any, plan_file: Path) -> None:
    result = run("what-if", str(plan_file), *flags.split())
    assert result.exit_code == 2 and WRONG[flags] in result.stderr
    assert result.stderr.startswith("error: ") and "Traceback" not in result.output and not result.stdout


def test_a_job_is_needed_and_a_plan_file_must_be_one(run: Any, tmp_path: Path) -> None:
    assert "--model is missing" in run("what-if", "--network", "x2").stderr
    assert "--gpus is missing" in run("what-if", "--model", "llama-8b").stderr
    broken = tmp_path / "broken.yaml"
    broken.write_text("tp: 2\n")
    result = run("what-if", str(broken), "--network", "x2")
    assert result.exit_code == 2 and "not a plan file" in result.stderr


def test_missing_price_and_missing_fit_are_said(run: Any, plan_file: Path) -> None:
    result = run("what-if", str(plan_file), "--tokens", "1T", "--hardware", "gaudi2", "--memory", "1 GiB")
    assert "gaudi2: unknown per GPU-hour (profile gaudi2 lists none; give --price)" in result.output
    assert "no plan" in result.output and "misses by" in result.output and result.exit_code == 0
    nothing = run("what-if", "--model", "llama-70b", "--gpus", "1", "--network", "x2")
    assert nothing.exit_code == 1


def test_ctrl_c_prints_what_was_found(run: Any, plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    search = best.search

    def interrupted(*arguments: Any, **more: Any) -> Any:
        asked.append("search")
        if len(asked) > 3:
            raise KeyboardInterrupt
        return search(*arguments, **more)

    monkeypatch.setattr(best, "search", interrupted)
    result = run("what-if", str(plan_file), "--gpus", "16,32,64,128")
    assert result.exit_code == 130 and "3 rows were found" in result.stderr
    assert "gpus 32" in result.stdout and "gpus 64" not in result.stdout
    asked.clear()
    longest = run("what-if", str(plan_file), "--longest-sequence", "--json")
    document = json.loads(longest.stdout)
    assert longest.exit_code == 130 and document["complete"] is False
    assert document["rows"][-1]["label"] == "longest sequence: 16384 so far"
    monkeypatch.setattr(best, "search", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    nothing = run("what-if", str(plan_file), "--gpus", "16")
    assert nothing.exit_code == 130 and "before anything was found" in nothing.stderr


def test_degrees_that_do_not_divide_the_gpus_are_the_reason() -> None:
    found = api.what_if(model="llama-8b", gpus=16, hardware="h100-sxm", network=["x2"], tp=3).found
    assert {one.why for one in found.rows} == {"tp 3 does not divide 16 GPUs"}
