"""The user's own trainer: export the plan, run some steps, read the log, compare.

The trainer runs ``smoke.sh`` of its export: synthetic data, the plan's parallelism, here with the plan's whole batch and as
many steps as were asked for. Nothing of this package is loaded by it; what it prints is all that is known.
"""

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner import library
from planner.detect import local_device
from planner.errors import PlannerError
from planner.lab.launch.children import Ended, run_watched
from planner.lab.launch.state import Pace, State
from planner.lab.run.trainer_log import compared, judge, last_step
from planner.plan_file import Plan
from planner.runs.planned import columns
from planner.trainers.bundle.folder import make_bundle, write_bundle
from planner.trainers.bundle.nearest import require_expressible
from planner.trainers.bundle.target import ExportJob, Target
from planner.trainers.logs import parse_log
from planner.trainers.reading.log_facts import Log, steady
from planner.trainers.targets import load_target

TRAINERS = ("torchtitan", "megatron")
START = 1200.0
"""Seconds that a trainer may take until its first step: imports, building the model, compiling, tuning of kernels."""
LEAST_WARM_UP = 2
_PROBE = (
    "import json, torch, torch.distributed as d; "
    "print(json.dumps([torch.cuda.device_count(), hasattr(d, 'set_timeout'), torch.__version__]))"
)


@dataclass(frozen=True, kw_only=True)
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
        return max(self.warm_up, LEAST_WARM_UP) + self.steps

    def silence(self, plan: Plan) -> float:
        """Seconds after which a trainer that has printed no further step has hung."""
        return max(self.timeout, 10.0 * plan.prediction.step_time_s)


def run_trainer(
    plan: Plan, file: Path, asked: TrainerRun, show: Callable[[State], object] = lambda _: None,
    say: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """What a trainer measures of a plan, as levels give it. Raises PlannerError before anything starts where it cannot run;
    after that every end is a result. ``say`` gets the limits before the start, ``show`` each new step."""
    target = _target(asked.trainer)
    job = ExportJob.of(plan)
    if asked.log is not None:
        log = _read(asked.log)
        return _found(plan, asked, log, Ended(code=0, hung=False, text=log), str(asked.log))
    require_expressible(target, job, file)
    if not asked.command:
        require_runnable(target, job)
    say(limits(plan, asked))
    with tempfile.TemporaryDirectory(prefix="plan-validate-") as name:
        folder = Path(name) / "run"
        write_bundle(make_bundle(_with_steps(target, job, asked), job, "torchrun"), folder)
        words = shlex.split(asked.command) if asked.command else ["bash", "smoke.sh"]
        progress = _Progress(asked, show, time.monotonic() + START + asked.silence(plan), asked.silence(plan))
        try:
            ended = run_watched(words, progress.look, progress.deadline, folder=folder)
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
    """(GPUs that torch sees, whether it has distributed.set_timeout, its version), asked in a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        gpus, has_timeout, version = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        raise PlannerError("torch cannot be imported here; install it with: pip install 'planner[torch]'") from None
    return int(gpus), bool(has_timeout), str(version)


def _target(name: str) -> Target:
    if name not in TRAINERS:
        raise PlannerError(f"--trainer {name}: plans are validated with {' or '.join(TRAINERS)}")
    return load_target(name)


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


class _Progress:
    """Follows the log while the trainer runs: says the step, and moves the deadline with every new one."""

    def __init__(self, asked: TrainerRun, show: Callable[[State], object], until: float, silence: float) -> None:
        self._show, self._until, self._silence = show, until, silence
        self._pace = Pace(asked.trainer, asked.all_steps, skip=1)
        self._seen = 0
        show(self._pace.at("until the first step", 0))

    def look(self, text: str) -> None:
        """A new part of the log."""
        last = last_step(text)
        if last is not None and last > self._seen:
            self._seen = last
            self._until = time.monotonic() + self._silence
            self._show(self._pace.at("steps", self._seen))

    def deadline(self) -> float:
        """Until when the next step must be there, on the monotonic clock."""
        return self._until


def _found(plan: Plan, asked: TrainerRun, text: str, ended: Ended, where: str) -> dict[str, Any]:
    """The log as levels give what they found."""
    outcome, failure = judge(ended)
    log, speed = None, None
    try:
        log = parse_log(text, where or "the trainer's log")
        _require_same_job(plan, log, where or "the trainer's log")
        speed = steady(log, where or "the trainer's log", warm_up=max(asked.warm_up, LEAST_WARM_UP))
    except PlannerError as error:
        if asked.log is not None:
            raise
        if outcome == "completed":
            outcome = "failed"
            failure = {"rank": None, "phase": "reading the log", "sentence": str(error), "allocated_gib": None}
    return {
        "rung": "trainer",
        "why": f"--trainer {asked.trainer}: " + ("its log was given" if asked.log is not None else "the plan's export was run"),
        "trainer": plan.load_trainer().name, "layout": plan.layout.to_dict(), "num_gpus": plan.num_gpus, "changes": [],
        "outcome": outcome, "failure": failure, "device": _device(text, log),
        "limits": None if asked.log is not None else limits(plan, asked), "log": where or None,
        "trainer_command": None if asked.log is not None else asked.command or "bash smoke.sh",
        "steps": {"warm": max(asked.warm_up, LEAST_WARM_UP), "measured": speed.steps if speed else 0},
        **compared(plan, log, speed), "stages": [], "parity": None,
    }  # fmt: skip


def _device(text: str, log: Log | None) -> dict[str, Any]:
    """What the trainer ran on, by its own words where it says them."""
    if re.search(r"INFO - CPU capacity:", text):
        return {"name": "CPU", "kind": "cpu", "pressure": None}
    return {"name": (log.gpu if log else "") or local_device() or "", "kind": "cuda", "pressure": None}


_SAME = (
    "parallel.gpus", "parallel.tp", "parallel.pp", "parallel.cp", "parallel.dp", "parallel.ep", "batch.global", "model.seq",
    "model.hidden", "model.layers", "model.heads",
)  # fmt: skip
"""What a log and a plan must have in common where the log says it."""


def _require_same_job(plan: Plan, log: Log, where: str) -> None:
    wanted = columns(plan.workload, plan.layout)
    for path in _SAME:
        group, _, key = path.partition(".")
        said, mine = log.facts.get(path), wanted[group][key]
        if said is not None and said != mine:
            raise PlannerError(f"{where}: the log is not of this plan: it has {key} {said}, the plan {mine}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise PlannerError(f"{path}: cannot be read ({error.strerror})") from error
