"""``plan run``'s loop with real ranks that are killed: what is lost, what is read, what comes out."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.cluster import Cluster
from planner.cost.estimate import estimate
from planner.error_bars import kind_of
from planner.hardware import load_hardware
from planner.lab.elastic import loop
from planner.lab.elastic.loop import Job, keep_training
from planner.lab.elastic.run_flags import ADAPTERS, Saving, command_line
from planner.lab.elastic.worlds import World
from planner.layout import Layout
from planner.model import ModelSpec
from planner.plan_file import Plan, predict
from planner.rules import Job as RulesJob
from planner.trainer import load_trainer
from planner.trainers.bundle.elastic_folder import folder_name, write_worlds
from planner.trainers.bundle.target import ExportJob
from planner.trainers.targets import load_target
from planner.workload import Workload
from tests.proofs.elastic_ranks import ForkedGroup, Forks

BATCH = 12
Strike = Callable[[ForkedGroup, Path], None]
"""Does harm to a group; called in a thread once it has started, given its log."""


@dataclass(kw_only=True)
class Trial:
    """One job from its start to its end, and what its logs say."""

    folder: Path
    code: int | str = -1
    """Exit code of the loop, or its sentence."""
    said: list[str] = field(default_factory=list)
    """Lines of the loop."""
    seconds: float = 0.0
    groups: list[ForkedGroup] = field(default_factory=list)
    """The attempts."""

    @property
    def logs(self) -> list[str]:
        """Of the attempts, in their order."""
        files = sorted(self.folder.glob("attempt-*.log"), key=lambda one: int(one.stem[8:]))
        return [one.read_text() for one in files]

    def losses(self) -> dict[int, float]:
        """Loss by step, as it was computed last."""
        return {int(step): float(loss) for log in self.logs for step, loss in re.findall(r"^step (\d+) loss (\S+)", log, re.M)}

    def final(self) -> Path:
        """The newest checkpoint."""
        return max((self.folder / "checkpoints").glob("step-*"))

    def lost(self) -> list[tuple[int, int]]:
        """(steps done again, the most that it may be) of each attempt after the first.

        The bound: from the last whole checkpoint until the next save began, at most ``every`` or as long as the last save took; and
        the steps since then, during which the save was under way.
        """
        found = []
        for before, after in zip(self.logs, self.logs[1:], strict=False):
            last = max((int(one) for one in re.findall(r"^step (\d+) loss", before, re.M)), default=_resumed(before))
            if re.search(r"^(step \d+ loss|resumed)", after, re.M):
                found.append((max(last - _resumed(after), 0), _bound(before, last)))
        return found

    def check_data(self) -> int:
        """Asserts that every attempt read each sample once, without a gap, from where its checkpoint ends; how many were read."""
        read = 0
        for number, log in enumerate(self.logs, 1):
            samples: dict[int, int] = {}
            for file in self.folder.glob(f"attempt-{number}.log.samples-*"):
                for line in set(file.read_text().split()):  # ranks of one replica read the same
                    samples[int(line)] = samples.get(int(line), 0) + 1
            start = _resumed(log) * BATCH
            steps = len(re.findall(r"^step \d+ loss", log, re.M))
            done = [one for one in samples if one < start + steps * BATCH]
            assert sorted(done) == list(range(start, start + steps * BATCH)), f"attempt {number} from {start}, {steps} steps"
            # the step that was cut short, and one that was done and not printed, where rank 0 was killed
            assert max(samples, default=0) < start + (steps + 2) * BATCH
            read += len(samples)
        return read


def _resumed(log: str) -> int:
    found = re.search(r"^resumed at step (\d+)", log, re.M)
    return int(found[1]) if found else 0


def _bound(log: str, last: int) -> int:
    whole, took, begun, step = _resumed(log), 0, None, _resumed(log)
    for line in log.splitlines():
        if found := re.match(r"step (\d+) loss", line):
            step = int(found[1])
        elif found := re.match(r"saving step-(\d+)", line):
            begun = int(found[1])
        elif found := re.match(r"checkpoint step-(\d+) whole", line):
            whole, took, begun = int(found[1]), step - int(found[1]), None
    return max(EVERY, took) + (last - begun if begun is not None and begun > whole else 0) + 1


EVERY = 4
TINY: dict[str, Any] = {
    "name": "tiny", "num_layers": 3, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 64,
    "vocab_size": 128, "max_sequence_length": 64,
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "fsdp 4": (4, {"dp": 4, "zero": 3, "num_microbatches": 3}),
    "fsdp 3": (3, {"dp": 3, "zero": 3, "num_microbatches": 4}),
    "tp 2 x fsdp 2": (4, {"tp": 2, "dp": 2, "zero": 3, "num_microbatches": 3, "micro_batch_size": 2, "sequence_parallel": 1}),
    "pp 3": (3, {"pp": 3, "zero": 2, "num_microbatches": 6, "micro_batch_size": 2}),
    "pp 2 x tp 2": (4, {"pp": 2, "tp": 2, "zero": 2, "num_microbatches": 6, "micro_batch_size": 2, "sequence_parallel": 1}),
}
"""Splits of one small job: number of ranks, and fields of the layout."""


def plan_of(name: str) -> Plan:
    """The plan of one of LAYOUTS."""
    gpus, fields = LAYOUTS[name]
    model = ModelSpec(**TINY)
    work = Workload(model=model, sequence_length=32, global_batch_size=BATCH, precision="fp32")
    trainer, cluster = load_trainer("torchtitan"), Cluster(hardware=load_hardware("h100-sxm"), num_gpus=gpus)
    layout = Layout(**fields)
    found = estimate(work, cluster, trainer, layout)
    prediction = predict(found, RulesJob(workload=work, cluster=cluster, trainer=trainer), kind_of(work, trainer))
    return Plan(workload=work, hardware="h100-sxm", num_gpus=gpus, trainer="torchtitan", layout=layout, prediction=prediction)


def run_job(
    forks: Forks, folder: Path, plans: list[Plan], *, steps: int = 30, every: int = EVERY, strike: Strike | None = None,
    strikes: int = 10**9, gpus: Callable[[], int] | None = None, **more: Any,
) -> Trial:  # fmt: skip
    """The loop with forked ranks of the exported script, in float64; ``strike`` is called for the first so many attempts.

    ``more``: watched (``gpus`` is asked while it runs, too), restarts, silence, limit (bytes of a file, of attempts that are
    struck), sleep (seconds of a step).
    """
    loop.AGAIN, loop.LOOK = 0.05, 0.3
    trial, adapter = Trial(folder=folder), ADAPTERS["pytorch"]
    folder.mkdir(parents=True, exist_ok=True)
    worlds = {plan.num_gpus: World(plan=plan, changed="") for plan in plans}
    words = ("train.py", "--device", "cpu", "--double", "--steps", str(steps))

    def line(*_: Any) -> str:
        saving = Saving(folder=str(folder / "checkpoints"), interval=0.0, steps=every, step_time=1.0, keep=2, timeout=30.0)
        return command_line(adapter, words, (), saving)

    jobs = [ExportJob.of(plan) for plan in plans]
    write_worlds(load_target(adapter.target), jobs, folder / "worlds", line, force=True)
    threads: list[threading.Thread] = []

    def launch(ranks: int, log: Path) -> ForkedGroup:
        limit = more.get("limit") if len(threads) < strikes else None
        sleep = more.get("sleep", 0.0)
        group = ForkedGroup(
            forks, folder / "worlds" / folder_name(ranks), ranks, log, shlex.split(line()), limit=limit, sleep=sleep
        )
        trial.groups.append(group)
        if len(threads) < strikes:
            threads.append(threading.Thread(target=strike or (lambda *_: None), args=(group, log), daemon=True))
            threads[-1].start()
        return group

    job = Job(
        worlds=worlds, start=folder / "worlds" / "worker.sh", folder=folder, adapter=adapter,
        gpus=gpus or (lambda: max(worlds)), grace=20.0, first=60.0, silence=more.get("silence", 30.0),
        watched=more.get("watched", False), restarts=more.get("restarts", 10), launch=launch,
    )  # fmt: skip
    begun = time.monotonic()
    try:
        trial.code = keep_training(job, trial.said.append)
    except Exception as error:
        trial.code = str(error)
    trial.seconds = time.monotonic() - begun
    return trial


# ------------------------------------------------------------------------------------------------ what is done to them


def kill_one(chance: random.Random, longest: float, starting: float = 0.25) -> Strike:
    """SIGKILL of any rank at any moment of so many seconds after its first step; of a share of them after its start."""
    moment, place, early = chance.uniform(0.0, longest), chance.random(), chance.random() < starting

    def strike(group: ForkedGroup, log: Path) -> None:
        while not early and group.code is None and not re.search("^step", log.read_text(), re.M):
            time.sleep(0.01)
        time.sleep(moment)
        if group.code is None:
            kill(group, int(place * len(group.ranks)))

    return strike


def kill_in_save(chance: random.Random, saves: int = 1) -> Strike:
    """SIGKILL of any rank within the first moments of a save."""

    def strike(group: ForkedGroup, log: Path) -> None:
        while group.code is None and len(re.findall("^saving", log.read_text(), re.M)) < saves:
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 0.12))
        if group.code is None:
            kill(group, chance.randrange(len(group.ranks)))

    return strike


def kill(group: ForkedGroup, *ranks: int) -> None:
    """SIGKILL; ``struck`` counts it."""
    group.struck, group.struck_at = group.struck + 1, time.time()
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(group.ranks[rank], signal.SIGKILL)
