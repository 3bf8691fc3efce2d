"""Plan: the chosen layout with its inputs, its estimate and what was assumed; to YAML and back."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from planner import library
from planner.assumption import Assumption
from planner.cluster import Cluster
from planner.cost.estimate import HIDDEN, PARTS, Estimate
from planner.cost.memory.states import COMPONENTS
from planner.error_bars import OWN_RUN, QUANTITIES, Kind, error_bar, kind_of
from planner.errors import NoMappingError, PlannerError
from planner.hardware import load_hardware
from planner.layout import Layout
from planner.record import record
from planner.rules import Job
from planner.schema import Bandwidth, Count, Number, Positive, Text, check_keys, keys, one_of, plain, read
from planner.trainer import Trainer, load_trainer
from planner.units import GIB
from planner.workload import Workload

VERSION = 2
"""Format of plan files. A file of another format is refused."""
STAGE_NAMES = ("first", "middle", "last")


@record
class Prediction:
    """An estimate of one layout as plain numbers: what plan files, tables and --json show."""

    step_time_s: Positive
    """Seconds of one optimizer step."""
    step_time_range_s: tuple[Positive, Positive]
    """Nine of ten measured steps lie within, by the residuals of published runs like it."""
    step_time_range_basis: str
    """Which runs those were."""
    tokens_per_second_per_gpu: Positive
    mfu: Positive
    """Model FLOP utilisation: causal attention halved, head counted, recompute not counted."""
    bubble_share: Number
    """Idle time of the pipeline over the step time."""
    time_s: Annotated[dict[str, Number], keys(PARTS)]
    """Seconds by part; they sum to step_time_s."""
    hidden_s: Annotated[dict[str, Number], keys(HIDDEN)]
    """Seconds of communication behind computation, not part of the step time."""
    memory_gib: Annotated[dict[str, Number], keys(COMPONENTS)]
    """GiB per GPU by component on the stage with the highest peak."""
    memory_peak_gib: Positive
    """Sum of memory_gib: the peak of the device."""
    memory_peak_range_gib: tuple[Positive, Positive]
    """Nine of ten measured peaks lie within, by the residuals of published runs like it."""
    memory_limit_gib: Positive
    """What the driver reports as usable."""
    memory_stage: Annotated[str, one_of(STAGE_NAMES)]
    """Pipeline stage of the peak: first, middle or last."""
    out_of_memory_probability: Number
    host_memory_gib_per_gpu: Number
    """Host memory for offloaded states."""
    step_time_median_s: Positive | None = None
    """Half of the measured steps took longer, by the same residuals; None in files of before."""
    first_runs_s: tuple[Positive, Positive, Positive] | None = None
    """What a user's own run takes before it is tuned: half of them lie between the first and the last, half above the second."""
    first_runs_basis: str = ""
    """Which users' runs those were."""

    @property
    def exposed_s(self) -> dict[str, float]:
        """Exposed communication by kind, seconds per step."""
        return {
            name.removesuffix("_communication"): value for name, value in self.time_s.items() if "communication" in name
        }


def predict(
    found: Estimate, job: Job, kind: Kind, index: int = 0, unstated: Mapping[str, Sequence[float]] | None = None
) -> Prediction:
    """Plain numbers of one candidate of an estimate; ``kind`` of run as in ``error_bars.kind_of``.

    ``unstated``: what options that were not stated would change, as ``options.Unstated.ratios``; it widens the intervals.
    """
    step, peak = float(found.step_time[index]), float(found.memory_peak[index]) / GIB
    times, memory = (
        error_bar(name, job.trainer, job.cluster.hardware, kind).widened((unstated or {}).get(name, ())) for name in QUANTITIES
    )
    first = error_bar("step_time", job.trainer, job.cluster.hardware, kind_of(job.workload, job.trainer, OWN_RUN))
    return Prediction(
        step_time_s=step,
        step_time_range_s=times.interval(step),
        step_time_range_basis=times.basis,
        tokens_per_second_per_gpu=float(found.tokens_per_second_per_gpu[index]),
        mfu=float(found.mfu[index]),
        bubble_share=float(found.bubble_share[index]),
        time_s={name: float(found.time[name][index]) for name in PARTS},
        hidden_s={name: float(found.hidden[name][index]) for name in HIDDEN},
        memory_gib={name: float(found.memory[name][index]) / GIB for name in COMPONENTS},
        memory_peak_gib=peak,
        memory_peak_range_gib=memory.interval(peak),
        memory_limit_gib=found.usable_memory / GIB,
        memory_stage=STAGE_NAMES[int(found.stage[index])],
        out_of_memory_probability=float(found.out_of_memory_probability[index]),
        host_memory_gib_per_gpu=float(found.host_memory[index]) / GIB,
        step_time_median_s=times.middle * step,
        first_runs_s=(first.half[0] * step, first.middle * step, first.half[1] * step),
        first_runs_basis=first.basis,
    )


@record
class Plan:
    """One layout for one job, with everything needed to price, export or run it again."""

    workload: Workload
    hardware: str
    """Library name or path of the hardware profile."""
    num_gpus: Count
    trainer: str
    """Library name or path of the trainer."""
    layout: Layout
    prediction: Prediction
    network_bandwidth: Bandwidth | None = None
    """Bytes/s per GPU, one direction, where it is not the profile's."""
    assumptions: tuple[Assumption, ...] = ()
    why: Text = ""
    """Why this layout and not the next."""

    def cluster(self) -> Cluster:
        """The cluster, its profile read again."""
        hardware = load_hardware(self.hardware)
        if self.network_bandwidth:
            hardware = dataclasses.replace(hardware, network_bandwidth=self.network_bandwidth)
        return Cluster(hardware=hardware, num_gpus=self.num_gpus)

    def kind(self) -> Kind:
        """Kind of run, which chooses its error bar."""
        return kind_of(self.workload, self.load_trainer())

    def load_trainer(self) -> Trainer:
        """The trainer, read again."""
        return load_trainer(self.trainer)

    def to_dict(self) -> dict[str, Any]:
        """Plain data in the form of a plan file."""
        return {
            "planner_plan": VERSION,
            "workload": self.workload.to_dict(),
            "cluster": {
                "hardware": self.hardware,
                "num_gpus": self.num_gpus,
                "network_bandwidth": None if self.network_bandwidth is None else f"{self.network_bandwidth!r} B/s",
            },
            "trainer": self.trainer,
            "layout": self.layout.to_dict(),
            "estimate": plain(self.prediction),
            "why": self.why,
            "assumptions": plain(self.assumptions),
        }

    def save(self, path: Path) -> None:
        """Write the plan file, whole or not at all."""
        library.write_whole(path, library.dump_yaml(self.to_dict()))


def read_plan(path: Path) -> dict[str, Any]:
    """The mapping in a file that is given as a plan. Raises PlannerError, which says so where it is a log or a table."""
    try:
        return library.read_yaml(path)
    except NoMappingError as error:
        raise PlannerError(
            f"{error}; it is no plan, which --output of plan writes; where a command takes other files too, the plan stands first"
        ) from None


def load_plan(path: Path) -> Plan:
    """Read a plan file. Raises PlannerError with file and key when it is damaged, or newer than this planner."""
    return plan_from_dict(read_plan(path), where=str(path))


def plan_from_dict(data: Mapping[str, Any], *, where: str = "plan") -> Plan:
    """A plan from plain data. Raises PlannerError."""
    version = library.version_of(data, "plan", VERSION, where=where)
    if version < VERSION:
        raise PlannerError(
            f"{where}: the plan has the older format {version}, this planner reads {VERSION}; make it again with --output"
        )
    found = dict(check_keys(data, _KEYS, where, required=_KEYS, hint="; the file is damaged or cut off"))
    cluster = check_keys(found.pop("cluster"), _CLUSTER_KEYS, f"{where}: cluster", required=_CLUSTER_KEYS)
    del found["planner_plan"]
    found["prediction"] = read(Prediction, found.pop("estimate"), f"{where}: estimate")
    return read(Plan, {**found, **cluster}, where)


_KEYS = ("planner_plan", "workload", "cluster", "trainer", "layout", "estimate", "why", "assumptions")
_CLUSTER_KEYS = ("hardware", "num_gpus", "network_bandwidth")
