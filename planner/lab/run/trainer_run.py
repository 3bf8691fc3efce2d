"""The user's own trainer: export the plan, run some steps, read the log, compare.

The trainer runs ``smoke.sh`` of its export: synthetic data, the plan's parallelism, here with the plan's whole batch and as
many steps as were asked for. Nothing of this package is loaded by it; what it prints is all that is known.
"""

import dataclasses
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner import library
from planner.detect import asked_driver
from planner.errors import PlannerError
from planner.lab.launch.state import Pace, State
from planner.lab.launch.torchrun import Ended, ask_torch, run_watched
from planner.lab.run.levels import PREDICTED
from planner.lab.run.record import time_row
from planner.plan_file import Plan
from planner.record import record
from planner.runs.mapping import columns
from planner.timeline.priced_plan import estimate_of, job_of
from planner.trainers.bundle.folder import make_bundle, write_bundle
from planner.trainers.bundle.nearest import require_expressible
from planner.trainers.bundle.target import ExportJob, Target
from planner.trainers.logs import MOST_BYTES, parse_log
from planner.trainers.reading.log_facts import Log, Steady, steady
from planner.trainers.targets import load_target
from planner.units import GIB, parse

TRAINERS = ("torchtitan", "megatron")
START = 1200.0
"""Seconds that a trainer may take until its first step: imports, building the model, compiling, tuning of kernels."""
LEAST_WARM_UP = 2
_SAME = (
    "parallel.gpus", "parallel.tp", "parallel.pp", "parallel.cp", "parallel.dp", "parallel.ep", "batch.global", "model.seq",
    "model.hidden", "model.layers", "model.heads",
)  # fmt: skip
"""What a log and a plan must have in common where the log says it."""
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|HIP out of memory|CUDA error: out of memory")
_RANK = re.compile(r"\[rank(\d+)\]|\[Rank (\d+)\]|GPU (\d+) has a total capacity")
_IN_USE = re.compile(r"this process has ([\d.]+ [GM]iB) memory in use")
_SIGNAL = re.compile(r"(?:exitcode\s*:\s*-(\d+)|Signal (\d+) \((SIG\w+)\) received)")
_ROOT_RANK = re.compile(r"Root Cause.*?rank\s*:\s*(\d+)", re.DOTALL)
_ERROR = re.compile(r"(?:^|[\s:])((?:\w+\.)*\w*(?:Error|Exception)): (.+)$", re.MULTILINE)
_STEP = re.compile(r"(?<!validate )\bstep:\s*(\d+)|iteration\s+(\d+)\s*/")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@record
class TrainerRun:
    """How a trainer is started and read."""

    trainer: str
    """Of TRAINERS."""
    steps: int = 10
    """Measured steps."""
    warm_up: int = 5
    """Steps before them, at least LEAST_WARM_UP."""
    timeout: float = 60.0
    """Seconds for one step, or ten times its prediction where that is more; the first step has START more."""
    command: str = ""
    """Run in the exported folder instead of ``bash smoke.sh``: a launcher of many nodes, a container."""
    log: Path | None = None
    """A log that exists already: nothing is started."""
    keep_log: Path | None = None
    """Where the log is kept; None = nowhere."""

    @property
    def all_steps(self) -> int:
        """Steps that the trainer runs."""
        return self.warm_up + self.steps

    def silence(self, plan: Plan) -> float:
        """Seconds after which a trainer that has printed no further step has hung."""
        return max(self.timeout, PREDICTED * plan.prediction.step_time_s)


def run_trainer(
    plan: Plan, file: Path, asked: TrainerRun, show: Callable[[State], object] = lambda _: None
) -> dict[str, Any]:
    """What a trainer measures of a plan, as levels give it. Raises PlannerError before anything starts where it cannot run;
    after that every end is a result. The limits are said before the start; ``show`` gets each new step."""
    if asked.trainer not in TRAINERS:
        raise PlannerError(f"--trainer {asked.trainer}: plans are validated with {' or '.join(TRAINERS)}")
    target = load_target(asked.trainer)
    job = ExportJob.of(plan)
    if asked.log is not None:
        log = library.read_text(asked.log, most=MOST_BYTES, errors="replace")
        return _found(plan, asked, log, Ended(code=0, hung=False, text=log), str(asked.log))
    require_expressible(target, job, file)
    if not asked.command:
        require_runnable(target, job)
    print(limits(plan, asked), file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="plan-validate-") as name:
        folder = Path(name) / "run"
        write_bundle(make_bundle(_with_steps(target, job, asked), job, "torchrun"), folder)
        words = shlex.split(asked.command) if asked.command else ["bash", "smoke.sh"]
        pace, silence, steps = Pace(asked.trainer, asked.all_steps, skip=1), asked.silence(plan), 0
        deadline = time.monotonic() + START + silence
        show(pace.at("until the first step", 0))

        def look(text: str) -> float:
            """A new part of the log: every new step moves the deadline."""
            nonlocal deadline, steps
            last = last_step(text)
            if last is not None and last > steps:
                steps, deadline = last, time.monotonic() + silence
                show(pace.at("steps", last))
            return deadline

        try:
            ended = run_watched(words, look, folder=folder)
        except OSError as error:
            raise PlannerError(f"--trainer-command {words[0]}: cannot be started ({error.strerror})") from error
    if asked.keep_log is not None:
        library.write_whole(asked.keep_log, ended.text)
    return _found(plan, asked, ended.text, ended, str(asked.keep_log or ""))


def limits(plan: Plan, asked: TrainerRun) -> str:
    """Said before the start."""
    return (
        f"{asked.trainer}: {asked.all_steps} steps, about {asked.all_steps * plan.prediction.step_time_s:.3g} s as predicted; the "
        f"first may take {START / 60:.0f} min, each further one {asked.silence(plan):.3g} s, then it counts as hung"
    )


def require_runnable(target: Target, job: ExportJob) -> None:
    """Raise PlannerError with what is missing to run the trainer on this machine, before anything is started."""
    elsewhere = "or run the export where the GPUs are and give its log with --trainer-log (or say --trainer-command)"
    if job.num_nodes > 1:
        raise PlannerError(
            f"the plan has {job.num_nodes} nodes and this would start one of them: say with --trainer-command how smoke.sh is "
            "started on all (srun, mpirun), or run the export and give its log with --trainer-log"
        )
    _require_installed(target)
    gpus, has_timeout, torch = _probe()
    if gpus < job.cluster.num_gpus:
        none = f"torch sees {gpus} GPUs here" if gpus else f"{target.name} trains on GPUs only and torch sees none here"
        raise PlannerError(
            f"{none}; the plan needs {job.cluster.num_gpus}: use a smaller plan or another machine, {elsewhere}"
        )
    if target.name == "torchtitan" and not has_timeout:
        raise PlannerError(
            f"torchtitan {target.versions} calls torch.distributed.set_timeout after its first step, and torch {torch} has not got "
            "it: install the torch that your torchtitan was released with (its docs/release.md)"
        )


def _require_installed(target: Target) -> None:
    if shutil.which("torchrun") is None:
        raise PlannerError("torchrun is not on the PATH: activate the environment of the trainer, or pip install torch")
    if target.name == "torchtitan":
        from importlib.util import find_spec

        if find_spec("torchtitan") is None:
            raise PlannerError("torchtitan is not installed here; install it with: pip install 'torchtitan>=0.3,<0.4'")
        return
    checkout = os.environ.get("MEGATRON_LM", "")
    if not checkout or not (Path(checkout) / "pretrain_gpt.py").is_file():
        said = f"MEGATRON_LM is {checkout}, where no pretrain_gpt.py lies" if checkout else "MEGATRON_LM is not set"
        raise PlannerError(
            f"{said}: fetch Megatron-LM with git clone --branch core_r0.19.0 https://github.com/NVIDIA/Megatron-LM, export "
            "MEGATRON_LM=$PWD/Megatron-LM, and pip install --no-build-isolation 'transformer-engine[pytorch]'"
        )


def _probe() -> tuple[int, bool, str]:
    """(GPUs that torch sees, whether it has distributed.set_timeout, its version)."""
    found = ask_torch("torch.cuda.device_count(), hasattr(torch.distributed, 'set_timeout'), torch.__version__")
    if found is None:
        raise PlannerError("torch cannot be imported here; install it with: pip install 'torch~=2.13.0'")
    return int(found[0]), bool(found[1]), str(found[2])


def _with_steps(target: Target, job: ExportJob, asked: TrainerRun) -> Target:
    """The target whose smoke run has the plan's whole batch and as many steps as were asked for."""
    steps = str(asked.all_steps)
    more = {
        "torchtitan": ("--training.steps", steps, "--metrics.log_freq", "1"),
        "megatron": ("--train-iters", steps, "--global-batch-size", str(job.workload.global_batch_size)),
    }[target.name]
    rendered = target.render(job)
    changed = dataclasses.replace(rendered, smoke=(*rendered.smoke, *more))
    return dataclasses.replace(target, render=lambda _: changed)


def _found(plan: Plan, asked: TrainerRun, text: str, ended: Ended, where: str) -> dict[str, Any]:
    """The log as levels give what they found."""
    outcome, failure = judge(ended)
    log, speed, file = None, None, where or "the trainer's log"
    try:
        log = parse_log(text, file)
        _require_same_job(plan, log, file)
        speed = steady(log, file, warm_up=asked.warm_up)
    except PlannerError as error:
        if asked.log is not None:
            raise
        if outcome == "completed":
            outcome = "failed"
            failure = _failure(None, "reading the log", str(error))
    on_cpu = re.search(r"INFO - CPU capacity:", text) is not None  # torchtitan's own words
    name = "CPU" if on_cpu else (log.gpu if log else "") or next(iter(asked_driver().names), "")
    return {
        "rung": "trainer",
        "why": f"--trainer {asked.trainer}: " + ("its log was given" if asked.log is not None else "the plan's export was run"),
        "trainer": plan.load_trainer().name, "layout": plan.layout.to_dict(), "num_gpus": plan.num_gpus, "changes": [],
        "outcome": outcome, "failure": failure,
        "device": {"name": name, "kind": "cpu" if on_cpu else "cuda", "pressure": None},
        "limits": None if asked.log is not None else limits(plan, asked), "log": where or None,
        "trainer_command": None if asked.log is not None else asked.command or "bash smoke.sh",
        "steps": {"warm": asked.warm_up, "measured": speed.steps if speed else 0},
        **compared(plan, log, speed), "stages": [], "parity": None,
    }  # fmt: skip


def _require_same_job(plan: Plan, log: Log, where: str) -> None:
    wanted = columns(plan.workload, plan.layout)
    for path in _SAME:
        group, _, key = path.partition(".")
        said, mine = log.facts.get(path), wanted[group][key]
        if said is not None and said != mine:
            raise PlannerError(f"{where}: the log is not of this plan: it has {key} {said}, the plan {mine}")


# ------------------------------------------------------------------------------------------------ the log


def last_step(text: str) -> int | None:
    """Number of the last step in a part of a log; None without one."""
    steps = [int(one or other) for one, other in _STEP.findall(_ANSI.sub("", text))]
    return max(steps, default=None)


def judge(ended: Ended) -> tuple[str, dict[str, Any] | None]:
    """(outcome, failure) of a run, by how it ended and what it printed."""
    text = _ANSI.sub("", ended.text)
    step = last_step(text)
    phase = "before the first step" if step is None else f"after step {step}"
    if _OUT_OF_MEMORY.search(text):
        return "out_of_memory", _out_of_memory(text, phase)
    if ended.interrupted:
        return "interrupted", _failure(None, phase, f"stopped {phase}; the trainer and its processes were ended")
    if ended.hung:
        return "hung", _failure(None, phase, f"nothing was printed in time {phase}; it was ended")
    if ended.code == 0:
        return "completed", None
    root = _ROOT_RANK.search(text)
    rank = int(root.group(1)) if root else None
    signal = _SIGNAL.search(text[root.start() :] if root else text)
    number = -ended.code if ended.code < 0 else int(signal.group(1) or signal.group(2)) if signal else 0
    error = _ERROR.findall(text)
    if number and number != 15:
        who = "the command" if rank is None else f"rank {rank}"
        return "lost_rank", _failure(rank, phase, f"{who} was ended by signal {number} {phase}")
    last = next((f"{kind}: {what}" for kind, what in error if "ChildFailedError" not in kind), "")
    words = last.strip()[:300] or f"it ended with exit code {ended.code}"
    return "failed", _failure(rank, phase, f"{'' if rank is None else f'rank {rank}, '}{phase}: {words}")


def _out_of_memory(text: str, phase: str) -> dict[str, Any]:
    """Rank and GiB of the first rank that ran out."""
    at = _OUT_OF_MEMORY.search(text)
    line = text[text.rfind("\n", 0, at.start()) + 1 : (text.find("\n", at.end()) + 1) or None] if at else ""
    who, used = _RANK.search(line), _IN_USE.search(line)
    rank = next((int(one) for one in who.groups() if one is not None), None) if who else None
    size = None if used is None else parse(used.group(1), "bytes", what="memory in use") / GIB
    held = "" if size is None else f" with {size:.2f} GiB in use"
    return _failure(
        rank, phase, f"{'a rank' if rank is None else f'rank {rank}'} ran out of GPU memory {phase}{held}", size
    )


def _failure(rank: int | None, phase: str, sentence: str, allocated: float | None = None) -> dict[str, Any]:
    return {"rank": rank, "phase": phase, "sentence": sentence, "allocated_gib": allocated}


def compared(plan: Plan, log: Log | None, speed: Steady | None) -> dict[str, Any]:
    """Times, memory and rates of a log, and what the plan predicts."""
    seconds, rows = None if speed is None else seconds_of(plan, speed), []
    if speed is not None and seconds is not None:
        step, interval = plan.prediction.step_time_s, plan.prediction.step_time_range_s
        rows.append(time_row("step", step, seconds, interval=interval) | {"spread": speed.spread})
    return {
        "times": rows, "ranks": [] if log is None or not log.memory_gib else [_peak(plan, log)],
        "rates": None if log is None else _rates(plan, log, seconds),
    }  # fmt: skip


def seconds_of(plan: Plan, speed: Steady) -> float | None:
    """Seconds per optimizer step: printed, or from the printed rate."""
    rate = speed.tokens_per_second_per_gpu
    return speed.seconds or (plan.workload.tokens / plan.num_gpus / rate if rate else None)


def _peak(plan: Plan, log: Log) -> dict[str, Any]:
    """The highest peaks that the log prints, each compared with the same kind on the stage with the highest prediction."""
    found = estimate_of(job_of(plan), plan.layout)
    predicted = {"allocated": found.memory_allocated, "reserved": found.memory_reserved, "device": found.memory_peak}
    sizes = {log.memory_kind or "allocated": log.memory_gib or 0.0, **log.other_memory_gib}
    rows = []
    for kind, measured in sizes.items():
        one = float(predicted[kind][0]) / GIB
        low, high = (one / plan.prediction.memory_peak_gib * bound for bound in plan.prediction.memory_peak_range_gib)
        rows.append({
            "what": kind, "predicted_gib": one, "measured_gib": measured, "error": one / measured - 1.0, "bound": None,
            "interval": [low, high], "inside": low <= measured <= high,
        })  # fmt: skip
    return {"rank": None, "stage": None, "memory": rows}


def _rates(plan: Plan, log: Log, seconds: float | None) -> dict[str, Any]:
    tokens, mfu, step = plan.workload.tokens, plan.prediction.mfu, plan.prediction.step_time_s
    losses = [one.loss for one in sorted(log.steps, key=lambda one: one.number) if one.loss]
    return {
        "tokens_per_second": {"predicted": tokens / step, "measured": None if seconds is None else tokens / seconds},
        "mfu": {"predicted": mfu, "measured": None if seconds is None else mfu * step / seconds},
        "loss": [losses[0], losses[-1]] if losses else None,
        "loss_of_chance": math.log(plan.workload.model.vocab_size),  # ln V: where random weights begin
    }  # fmt: skip
