"""What if: costs by hand, one thing changed at a time, the other direction against full scans, the command as users meet it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.costs import costs, rates_of
from planner.defaults import Request, ResolvedJob, resolve
from planner.errors import PlannerError
from planner.keywords import flag_of
from planner.plan_file import load_plan
from planner.questions import best_plan as best
from planner.questions.best_plan import best_of, on_cluster, resolved_of
from planner.questions.report import scaling
from planner.questions.what_if import inverse as limits
from planner.questions.what_if.changes import INPUTS, Value, Variant, apply, base_variant, read_values
from planner.questions.what_if.inverse import Goal, Question, counts, fewest_gpus, largest_batch, longest_sequence
from planner.questions.what_if.rows import Pricing, row_of
from planner.search import Pins
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


# ------------------------------------------------------------------------------------------------ the other direction


def question(job: ResolvedJob, goal: Goal | None = None, **changes: Any) -> Question:
    base = base_variant(job)
    pricing = Pricing(tokens=goal.tokens if goal else None, price=2.0)
    first, _ = row_of(base, None, None, pricing)
    values: dict[str, Any] = {"base": base, "first": first, "pins": None, "pricing": pricing, "goal": goal or Goal()}
    return Question(**{**values, "say": lambda _: None, **changes})


def test_a_batch_with_a_suffix_counts_tokens() -> None:
    """As with ``plan``: 4M is 4 x 1024 x 1024 tokens."""
    base = base_variant(resolve(Request(model="llama-8b", num_gpus=64, hardware="h100-sxm", sequence_length=8192)))
    found = [apply(base, value) for value in read_values("global_batch_size", ["1M..4M", "64"])]
    assert [one.request.global_batch_size for one in found] == [128, 256, 512, 64]
    assert found[0].label == "global batch size 128 (1048576 tokens)" and found[-1].label == "global batch size 64"


def test_counts_are_what_people_order() -> None:
    found = list(counts(HARDWARE["h100-sxm"]))
    assert found[:7] == [1, 2, 4, 8, 16, 24, 32] and 8 * 16 in found and 8 * 18 in found and 8 * 17 not in found
    assert found == sorted(found) and len(set(found)) == len(found)
    steps = [(b - a) / a for a, b in itertools.pairwise(found) if a >= 128]
    assert max(steps) <= 0.126
    assert next(counts(HARDWARE["h100-sxm"], 100)) == 104


@pytest.mark.parametrize("days", [None, 40.0, 6.0])
def test_fewest_gpus_is_what_a_scan_of_every_size_finds(days: float | None) -> None:
    job = resolve(Request(model="llama-8b", num_gpus=8, hardware="a100-sxm-40gb", trainer="fsdp", global_batch_size=48))
    goal = Goal(tokens=2e9 if days is None else 4e10, days=days)
    ask = question(job, goal)
    tried: list[str] = []
    answer = fewest_gpus(dataclasses.replace(ask, say=tried.append))
    for count in counts(job.job.cluster.hardware):
        row = ask.row(apply(ask.base, Value(flag="gpus", text=str(count), number=count)))[1]
        if not goal.missed(row):
            break
    assert answer.fits and answer.label == f"fewest GPUs: {count}" and answer.num_gpus == count
    assert answer.prediction == row.prediction


def test_an_awkward_number_of_gpus_hides_no_better_one_above_it() -> None:
    """512 sequences share out badly over 24 nodes and well over 32: the throughput of the one says nothing of the other's."""
    job = resolve(Request(model="llama-8b", num_gpus=64, hardware="h100-sxm", global_batch_size=512))
    row = fewest_gpus(question(job, Goal(tokens=15e12, days=76.0)))
    assert row.num_gpus == 256 and row.costs is not None and row.costs.days < 76.0


@pytest.mark.parametrize(
    ("model", "trainer", "batch"), [("llama-8b", "megatron", 48), ("mixtral-8x7b", "fsdp", None), ("gpt3-13b", "megatron", 100)]
)
def test_no_number_of_gpus_is_faster_per_gpu_than_the_power_of_two_below(
    model: str, trainer: str, batch: int | None
) -> None:
    """Of plans without a memory limit, which is all that the powers of two know."""
    request = Request(model=model, num_gpus=8, hardware="a100-sxm-80gb", trainer=trainer, global_batch_size=batch)
    roomy = question(resolve(request), free_batch=batch is None)
    roomy = dataclasses.replace(roomy, base=apply(roomy.base, Value(flag="memory", text="x100", factor=100.0)))
    powers = {size: limits._power(roomy, size) for size in (1, 4, 8, 16, 32)}
    rates = {}
    for count in (1, 2, 8, 24, 32, 40, 48):
        found, _ = roomy.with_count("gpus", count)
        if found is not None and found.tokens_per_second is not None:
            rates[count] = found.tokens_per_second / count
            for size, power in powers.items():
                assert count < size or rates[count] <= power.rate / size, (count, size)
    assert len(rates) >= 5 and {1, 8, 32} <= set(rates)


def test_hardware_that_cannot_meet_the_deadline_says_how_long_it_would_take() -> None:
    ask = question(
        resolve(Request(model="llama-8b", num_gpus=8, hardware="l4")), Goal(tokens=15e12, days=3.0), free_batch=True
    )
    row = fewest_gpus(ask)
    assert not row.fits and re.fullmatch(
        r"none found; \d+ GPUs take at the least [\d.]+ days, 3 are allowed", row.why
    ), row.why


def test_the_fewest_gpus_name_a_cheaper_power_of_two() -> None:
    """64 sequences share out badly over the 40 GPUs that a deadline asks for."""
    ask = question(resolve(Request(model="llama-8b", num_gpus=8, hardware="h100-sxm", global_batch_size=64)))
    rows = {
        count: ask.row(apply(ask.base, Value(flag="gpus", text=str(count), number=count)))[1] for count in (40, 48, 64)
    }
    rates = {
        count: row.prediction.tokens_per_second_per_gpu for count, row in rows.items() if row.prediction is not None
    }
    need = 0.999 * rates[40] * 40
    goal = Goal(tokens=1e12, days=1e12 / need / 86400)
    row = fewest_gpus(dataclasses.replace(ask, goal=goal, pricing=Pricing(tokens=1e12, price=2.0)))
    assert row.num_gpus == 40
    saved = 1 - rates[40] / rates[64]
    assert (f"; 64 GPUs need {100 * saved:.0f} % fewer GPU-hours" in row.why) == (saved > limits.CHEAPER)
    assert saved > limits.CHEAPER, "the job of this test should share out badly over 40 GPUs"


def test_no_number_of_gpus_meets_a_budget_below_the_cost_of_the_fastest_plan() -> None:
    ask = question(resolved(8), Goal(tokens=1e12, budget=10.0))
    row = fewest_gpus(ask)
    assert not row.fits and row.label == "fewest GPUs: none" and "USD, 10 are allowed" in row.why
    with pytest.raises(PlannerError, match="--days needs the number of tokens"):
        Goal(days=3.0)


def test_longest_sequence_fits_and_no_longer_one_of_a_scan_does() -> None:
    job = resolve(Request(model="llama-8b", num_gpus=2, hardware="h100-sxm", global_batch_size=8))
    ask = question(job)
    row = longest_sequence(ask)
    assert row.fits and row.label == f"longest sequence: {row.sequence_length}"
    piece = (1 << (row.sequence_length.bit_length() - 1)) // limits.PIECES

    def fits(tokens: int) -> bool:
        return ask.row(apply(ask.base, Value(flag="sequence_length", text=str(tokens), number=tokens)))[1].fits

    scan = [
        tokens
        for tokens in range(row.sequence_length - 3 * piece, row.sequence_length + 6 * piece, piece)
        if fits(tokens)
    ]
    assert scan == [row.sequence_length - n * piece for n in (3, 2, 1, 0)]
    assert not fits(4 * row.sequence_length)


def test_largest_micro_batch_is_what_a_scan_of_divisors_finds() -> None:
    ask = question(resolve(Request(model="llama-8b", num_gpus=2, hardware="h100-sxm", global_batch_size=24)))
    row = largest_batch(ask)
    assert row.layout is not None and row.label == f"largest micro batch: {row.layout.micro_batch_size}"
    fitting = [b for b in (1, 2, 3, 4, 6, 8, 12, 24)
               if best_of(ask.base.resolved(), Pins(values={"micro_batch_size": b})).fits]  # fmt: skip
    assert max(fitting) == row.layout.micro_batch_size < 24
    same = largest_batch(question(resolved(8, global_batch_size=1)))  # the base again: nothing changed
    assert same.label == "largest micro batch: 1" and same.why == "no effect, the same plan"
    with pytest.raises(PlannerError, match="which --micro-batch-size pins"):
        largest_batch(dataclasses.replace(ask, pins=Pins(values={"micro_batch_size": 1})))


def test_cheapest_is_sorted_by_cost_and_meets_the_deadline(run: Any) -> None:
    result = run("what-if", *SMALL, "--tokens", "100B", "--days", "9", "--cheapest", "--hardware",
                 "h100-sxm,l40s,gaudi2,a100-sxm-80gb", "--price", "a100-sxm-80gb=1.5", "--json")  # fmt: skip
    rows = json.loads(result.stdout)["rows"][1:]
    assert {row["hardware"] for row in rows} == {"h100-sxm", "l40s", "gaudi2", "a100-sxm-80gb"}
    dollars = [row["costs"]["usd"] for row in rows]
    assert dollars[-1] is None and rows[-1]["hardware"] == "gaudi2"  # no price: last
    assert dollars[:-1] == sorted(dollars[:-1]) and all(row["costs"]["days"] <= 9 for row in rows)
    [a100] = [row for row in rows if row["hardware"] == "a100-sxm-80gb"]
    assert a100["costs"]["usd"] == pytest.approx(1.5 * a100["costs"]["gpu_hours"])
    assert a100["price"]["source"] == "--price"
    assert "Prices come from 3 lists" in json.loads(result.stdout)["warning"]


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
    monkeypatch.setattr(best, "search", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    nothing = run("what-if", str(plan_file), "--gpus", "16")
    assert nothing.exit_code == 130 and "before anything was found" in nothing.stderr
