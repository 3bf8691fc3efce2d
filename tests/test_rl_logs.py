"""Logs of RL frameworks, as their own code prints them: phases of every step, and the doctor of an RL plan."""

from __future__ import annotations

import dataclasses
import json

import pytest

from planner.errors import PlannerError
from planner.rl.phase_factors import fit_factors, load_factors, write_factors
from planner.rl.rl_doctor import compare_log
from planner.rl.rl_framework import PHASES
from planner.rl.rl_log import parse_rl_log
from planner.rl.rl_plan import PHASES as PLANNED
from planner.rl.rl_plan import RlPrediction
from tests.rl_samples import rl_plan

STEPS = ((20.0, 60.0), (11.0, 31.0), (10.0, 30.0), (12.0, 32.0), (10.0, 30.0), (11.0, 29.0))
"""Seconds of training and generation of six steps; the first is a warm-up."""


def verl(train: float, gen: float, step: int) -> str:
    """concat_dict_to_str of utils/logger/aggregate_logger.py, with numbers of numpy as pformat writes them."""
    return (
        f"(TaskRunner pid=7) step:{step} - actor/loss:0.1 - timing_s/gen:{gen} - timing_s/old_log_prob:np.float64(4.0) - "
        f"timing_s/ref:3.5 - timing_s/update_actor:{train} - timing_s/update_weights:1.5 - timing_s/step:{gen + train + 9.0} - "
        "timing_per_token_ms/gen:0.01"
    )


def nemo_rl(train: float, gen: float, step: int) -> str:
    """Timing of grpo.py."""
    total = gen + train + 8.0
    lines = [("generation", gen), ("policy_training", train), ("policy_and_reference_logprobs", 6.0), ("weight_sync", 2.0)]
    text = "\n".join(f"  • {name}: {value:.2f}s ({100 * value / total:.1f}%)" for name, value in lines)
    return f"\n⏱️ Timing:\n  • Total step time: {total:.2f}s\n{text}"


def openrlhf(train: float, gen: float, step: int) -> str:
    """logger.info of ppo_trainer.py."""
    status = {"reward": 0.4, "timing/make_experience": 6.0, "timing/ppo_train": train, "timing/broadcast": 2.0}
    status |= {"timing/generation": gen, "timing/step_total": gen + train + 8.0}
    return f"2026-08-13 10:00:0{step} INFO     ✨ Global step {step}: {status}"


def slime(train: float, gen: float, step: int) -> str:
    """log_perf_data and log_rollout_data: two lines a step."""
    first = {"rollout/response_len/mean": 1200.0, "perf/rollout_time": gen}
    second = {"perf/train_wait_time": gen + 2.0, "perf/log_probs_time": 4.0, "perf/actor_train_time": train,
              "perf/update_weights_time": 2.0, "perf/train_time": train + 6.0, "perf/step_time": gen + train + 8.0}
    return f"perf {step}: {first}\n(MegatronTrainRayActor pid=1) perf {step}: {second}"


def areal(train: float, gen: float, step: int) -> str:
    """tabulate of stats_logger.py, fancy_grid."""
    cells = {"rollout": gen, "recompute_logp": 4.0, "train_step": train, "update_weights": 2.0}
    row = " │ ".join(f"timeperf/{name} │ {value:.4e}" for name, value in cells.items())
    return f"\x1b[37m20260521 StatsLogger INFO: Stats (1/1):\x1b[0m\n╒════╕\n│ {row} │\n╘════╛"


def trl(train: float, gen: float, step: int) -> str:
    """What the asynchronous trainer hands to transformers' log."""
    found = {"loss": "0.01", "perf/fwd_bwd_s": f"{train - 1.0}", "perf/optimizer_s": "1.0", "perf/rollout_wait_s": f"{gen}"}
    return str({**found, "perf/step_s": f"{gen + train}", "epoch": "0.1"})


def prime_rl(train: float, gen: float, step: int) -> str:
    """metrics.jsonl of monitors/file.py."""
    found = {"step": step, "time": 1.7e9, "time/step": gen + train + 2.0, "time/wait_for_batch": gen, "time/load_data": 0.0}
    return json.dumps({**found, "time/broadcast_weights": 2.0, "time/forward_backward": train})


WRITERS = {
    "verl": verl, "nemo-rl": nemo_rl, "openrlhf": openrlhf, "slime": slime, "areal": areal, "trl": trl, "prime-rl": prime_rl,
}  # fmt: skip


def log_of(name: str, steps: int = len(STEPS)) -> str:
    """The log of a framework."""
    return "\n".join(WRITERS[name](*one, number) for number, one in enumerate(STEPS[:steps], 1)) + "\n"


@pytest.mark.parametrize("name", WRITERS)
def test_phases_of_every_framework(name):
    found = parse_rl_log(log_of(name), "x.log")
    assert found.framework == name and len(found.steps) == 6 and set(found.phases) <= set(PHASES)
    assert found.phases["train"] == pytest.approx(10.5)  # median of 10, 12, 10, 11
    waited = found.phases.get("generate", found.phases.get("wait"))
    assert waited == pytest.approx(30.0)
    other = {"verl": 9.0, "prime-rl": 2.0, "trl": 0.0, "areal": 6.0}.get(name, 8.0)
    assert found.step == pytest.approx(40.0 + other, abs=0.51)
    assert found.notes == () and parse_rl_log(log_of(name), "x.log", name) == found


def test_a_short_log_counts_whole_and_says_so():
    found = parse_rl_log(log_of("verl", 2), "x.log")
    assert found.phases["train"] == pytest.approx(15.5)
    assert found.notes == ("the log has 2 steps, too few to leave the first ones out",)


def test_what_is_no_log_is_a_sentence():
    with pytest.raises(PlannerError, match="x.log: no phase times of areal, nemo-rl"):
        parse_rl_log("nothing here: 3\n", "x.log")
    with pytest.raises(PlannerError, match="no phase times of slime were found"):
        parse_rl_log(log_of("verl"), "x.log", "slime")
    with pytest.raises(PlannerError):
        parse_rl_log("timing_s/step:1e99\n", "x.log")


def priced(staleness: int | None = None, **phases: float):
    """A plan with a made-up prediction."""
    each = dict.fromkeys(PLANNED, 0.0) | {"generate": 20.0, "logprob": 4.0, "reference": 3.5, "train": 10.0, "sync": 1.5} | phases
    parts = each | {"wait": 0.0}
    if staleness:
        parts |= {"generate": 0.0, "wait": 5.0}
    found = RlPrediction(
        step_s=sum(parts.values()), parts_s=parts, phases_s=each, idle={"train": 0.0, "generate": 0.0}, tokens_per_s_per_gpu=1.0,
        memory_gib={}, memory_limit_gib={"train": 80.0, "generate": 80.0}, memory_risk={}, running=1.0, tail_s=0.0,
        longest_tokens=1.0, staleness=0.0, microbatches=1.0, packed=1.0, sync_bytes=1.0,
    )  # fmt: skip
    return dataclasses.replace(rl_plan("verl", staleness), prediction=found)


def test_doctor_names_the_largest_gap():
    found = compare_log(priced(), parse_rl_log(log_of("verl"), "x.log"))
    assert found.largest is not None and found.largest.phase == "generate" and found.largest.gap == pytest.approx(10.0)
    assert "answers are longer" in found.cause
    assert found.step.predicted == pytest.approx(39.0) and found.unmeasured == ()
    rows = {one.phase: one for one in found.rows}
    assert rows["train"].error == pytest.approx(10.0 / 10.5 - 1.0)
    plain = found.to_dict()
    assert plain["largest"] == "generate" and plain["phases"]["sync"]["predicted"] == 1.5
    quick = compare_log(priced(generate=30.0), parse_rl_log(log_of("verl"), "x.log"))
    assert quick.cause == ""


def test_doctor_folds_what_a_framework_prints_together():
    """OpenRLHF's make_experience holds log-probs, reference, critic and rewards."""
    found = compare_log(priced(reward=1.0), parse_rl_log(log_of("openrlhf"), "x.log"))
    row = next(one for one in found.rows if one.phase == "logprob")
    assert row.predicted == pytest.approx(4.0 + 3.5 + 1.0) and "reference" in row.covers
    assert "the log is of openrlhf, the plan of verl" in found.notes
    left = compare_log(priced(reward=1.0), parse_rl_log(log_of("verl"), "x.log"))
    assert left.unmeasured == ("reward",)


def test_doctor_takes_what_no_phase_explains_for_the_host():
    """Steps of verl that are 5 s longer than their phases."""
    lines = [verl(*one, number).replace(f"step:{sum(one) + 9.0}", f"step:{sum(one) + 14.0}") for number, one in enumerate(STEPS)]
    text = "\n".join(lines)
    found = compare_log(priced(prepare=3.0), parse_rl_log(text, "x.log"))
    row = next(one for one in found.rows if one.phase == "prepare")
    assert (row.measured, row.predicted) == pytest.approx((5.0, 3.0), abs=0.51)


def test_doctor_where_generation_runs_ahead():
    """The trainer's log has what it waits for, not what engines take."""
    found = compare_log(priced(1), parse_rl_log(log_of("verl"), "x.log"))
    row = next(one for one in found.rows if one.phase == "generate")
    assert row.predicted == pytest.approx(5.0) and found.unmeasured == ()


def test_command(run, tmp_path):
    plan, log = tmp_path / "rl.yaml", tmp_path / "run.log"
    priced().save(plan)
    log.write_text(log_of("verl"), encoding="utf-8")
    found = run("doctor", str(plan), "--measured", str(log))
    assert found.exit_code == 0 and "Largest gap: generate takes 10" in found.output
    plain = json.loads(run("doctor", str(plan), "--measured", str(log), "--json").stdout)
    assert plain["phases"]["generate"]["measured"] == pytest.approx(30.0)
    assert run("doctor", str(plan)).exit_code == 2
    assert run("doctor", str(plan), "--measured", str(tmp_path / "none.log")).exit_code == 2
    rl_plan().save(plan)
    found = run("doctor", str(plan), "--measured", str(log))
    assert found.exit_code == 2 and "was not priced" in found.output


def test_factors_of_phases_are_measured_over_predicted(tmp_path):
    """Two runs of verl: generation takes 1.5 times and 1.2 times what is predicted, sqrt(1.8) in the mean."""
    one = compare_log(priced(), parse_rl_log(log_of("verl"), "x.log"))
    other = compare_log(priced(generate=25.0), parse_rl_log(log_of("verl"), "x.log"))
    fit = fit_factors([("a.log", one), ("b.log", other)])
    assert fit.found.factors["generate"] == pytest.approx((1.5 * 1.2) ** 0.5)
    assert fit.found.factors["logprob"] == pytest.approx(1.0) and fit.spread["generate"] == pytest.approx((1.2, 1.5))
    assert "reward" not in fit.found.factors
    first = fit.runs[0]
    assert (first.measured, first.before) == pytest.approx((49.0, 39.0), abs=0.51)
    assert abs(first.after - first.measured) < abs(first.before - first.measured)
    write_factors(fit.found, tmp_path / "own.yaml")
    assert load_factors(tmp_path / "own.yaml") == fit.found
    with pytest.raises(PlannerError, match="1 run of RL is given; factors of phases need 2 or more"):
        fit_factors([("a.log", one)])
    with pytest.raises(PlannerError, match="different frameworks: openrlhf and verl"):
        fit_factors([("a.log", one), ("b.log", compare_log(priced(), parse_rl_log(log_of("openrlhf"), "x.log")))])


def test_calibrated_phases_move_the_prediction(run, tmp_path):
    """plan calibrate --rl writes what plan rl estimate --calibrated takes."""
    log = tmp_path / "run.log"
    log.write_text(log_of("verl"), encoding="utf-8")
    for name in ("a", "b"):
        priced().save(tmp_path / f"{name}.yaml")
    words = [word for name in ("a", "b") for word in ("--rl", f"{tmp_path / name}.yaml={log}")]
    found = run("calibrate", *words, "--output", str(tmp_path / "own.yaml"))
    assert found.exit_code == 0, found.output
    base = ("rl", "estimate", str(tmp_path / "a.yaml"), "--json")
    calibrated = ("--calibrated", str(tmp_path / "own.yaml"))
    plain, own = (json.loads(run(*base, *more).stdout)["plan"]["estimate"] for more in ((), calibrated))
    factor = own["phases_s"]["generate"] / plain["phases_s"]["generate"]
    assert factor == pytest.approx(1.5)
    assert sum(own["parts_s"].values()) == pytest.approx(own["step_s"])
    of_trl = ("--framework", "trl", "--trainer", "trl", "--calibrated", str(tmp_path / "own.yaml"))
    assert run("rl", "estimate", str(tmp_path / "a.yaml"), *of_trl).exit_code == 2
    assert run("calibrate", *words, "--hardware", "h100-sxm", "--output", str(tmp_path / "x.yaml")).exit_code == 2
