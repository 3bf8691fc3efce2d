"""A row in the planner's words: a run of (workload, cluster, trainer, layout, measured), or the reason why not."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from planner.cluster import Cluster
from planner.error_bars import SLOW, kind_of
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.layout import Layout
from planner.model import ModelSpec
from planner.runs.hardware import hardware_of
from planner.runs.job import lora_rank_of, model_of, optimizer_of, precision_of, trainer_of
from planner.runs.measured import Measured, measured_of
from planner.runs.planned import planned_fields
from planner.runs.row_layout import layout_of
from planner.runs.rows import Row, UnsupportedError, read_rows
from planner.trainer import Trainer
from planner.workload import Workload, peak_dtype


@dataclass(frozen=True, kw_only=True)
class Run:
    """A row in the planner's words; the first four are None when ``unsupported`` gives a reason."""

    source: str
    id: str
    family: str
    """Group of sources in the report."""
    title: str = ""
    """What the source is."""
    where: str = ""
    """Where it was published."""
    stated: bool
    """The row states its model, its degrees and its batch."""
    set_aside: str = ""
    """Why it counts in no summary, though it is listed; '' = it counts."""
    of_plan: bool = False
    """It is what a plan measured (``planned``): the planner's own words, nothing derived."""
    slow_network: bool = False
    """The job's own benchmark of its network reached less than half of the line rate."""
    unsupported: str = ""
    """Why the planner cannot price it; '' = it can."""
    assumptions: tuple[str, ...] = ()
    """What was filled in because neither the row nor its framework says it."""
    workload: Workload | None = None
    cluster: Cluster | None = None
    trainer: Trainer | None = None
    layout: Layout | None = None
    measured: Measured = field(default_factory=Measured)

    @property
    def representative(self) -> bool:
        """It counts: somebody measured it, with software that worked as it should."""
        return not self.set_aside

    @property
    def kind(self) -> str:
        """Kind of run, which chooses its error bar; '' where it cannot be priced."""
        if self.workload is None or self.cluster is None:
            return ""
        return SLOW if self.slow_network else kind_of(self.workload, self.cluster.hardware)


def read_runs(paths: Sequence[str | Path] | None = None) -> list[Run]:
    """All rows of the paths (default: the shipped ones) as runs. Raises PlannerError for files that are broken."""
    return share([to_run(row) for row in read_rows(paths)])


def share(runs: Sequence[Run]) -> list[Run]:
    """The runs with equal models and trainers of plans made one object each: runs that share them are priced in one call."""
    known: list[Any] = []

    def one(value: Any) -> Any:
        found = next((other for other in known if type(other) is type(value) and other == value), None)
        known.extend([] if found is not None else [value])
        return value if found is None else found

    def shared(run: Run) -> Run:
        if run.workload is None or not run.of_plan:
            return run
        return replace(run, workload=run.workload.replace(model=one(run.workload.model)), trainer=one(run.trainer))

    return [shared(run) for run in runs]


def to_run(row: Row, *, hardware: str = "", model: ModelSpec | None = None) -> Run:
    """One row as a run, or with the reason why it is not supported; never raises for a row that was read.

    ``hardware`` (a profile's name or file) and ``model`` stand for what the row says of them.
    """
    of_plan = row.get("plan") is not None
    missing, network = [] if of_plan else _missing(row), "not measured"
    try:
        profile, network = hardware_of(row, hardware)
        run = planned_fields(row, profile) if of_plan else _map(row, profile, missing, model)
    except UnsupportedError as reason:
        run = {"unsupported": str(reason)}
    except PlannerError as error:
        run = {"unsupported": f"not a valid run: {error}"}
    broken = "before the pipeline fix" in row.notes
    reasons = {
        "it ran before a fix of its pipeline engine, which waited in a poll": broken,
        "every collective was checked on the host first, a debug mode": network == "checked",
    }
    return Run(
        source=row.source, id=row.id, family=row.family("before the pipeline fix" if broken else f"network {network}"),
        title=str(row.about.get("title") or ""), where=str(row.about.get("where") or ""), stated=not missing,
        set_aside=next((reason for reason, holds in reasons.items() if holds), ""), of_plan=of_plan,
        slow_network=network == "slow", **run,
    )  # fmt: skip


_NEEDED = (
    "model.hidden", "model.layers", "model.heads", "model.seq", "parallel.tp", "parallel.pp", "batch.global",
    "batch.micro",
)  # fmt: skip


def _missing(row: Row) -> list[str]:
    """Fields without which a layout is not determined; what follows from the others does not count."""
    missing = [path for path in _NEEDED if not row.get(path)]
    if not row.get("model.ffn") and not row.get("model.moe_ffn"):
        missing.append("model.ffn")
    if (row.get("parallel.pp") or 1) > 1 and row.get("parallel.vpp") is None:
        missing.append("parallel.vpp")
    if row.get("model.gated") is None:
        missing.append("model.gated")
    if not row.get("parallel.gpus") and not row.get("parallel.dp"):
        missing.append("parallel.dp")
    if row.get("model.experts") and not row.get("parallel.ep"):
        missing.append("parallel.ep")
    return missing


def _map(row: Row, hardware: HardwareProfile, missing: list[str], stated: ModelSpec | None) -> dict[str, Any]:
    """Fields of Run for a row that can be priced. Raises UnsupportedError with the reason."""
    assumptions = list[str]()
    _refuse_unmodelled(row)
    if row.entry.get("unknown"):
        trainer = row.entry["trainer"]
        assumptions.append(f"framework '{row.framework}' is not in profiles/frameworks.yaml: priced as {trainer}")
    missing = [path for path in missing if path != "batch.micro"]
    if missing:
        kind = "model" if missing[0].startswith("model") else "layout"
        raise UnsupportedError(f"{kind} not stated: {', '.join(path.partition('.')[2] for path in missing)}")
    model = stated or model_of(row)
    layout = layout_of(row, model, assumptions)
    precision = precision_of(row)
    workload = Workload(
        model=model, sequence_length=row.get("model.seq"), global_batch_size=row.get("batch.global"),
        precision=precision, optimizer=optimizer_of(row, assumptions), lora_rank=lora_rank_of(row),
        lora_targets=row.recipe.get("lora_targets", "all"),
        document_length=min(row.recipe.get("document_length", 0), row.get("model.seq")),
    )  # fmt: skip
    hardware.peak(peak_dtype(precision))
    measured = measured_of(row, workload, layout, hardware)
    if measured.step_time is None and measured.memory is None and measured.fits is None:
        raise UnsupportedError("no step time, memory or out-of-memory result was published")
    cluster = Cluster(hardware=hardware, num_gpus=int(layout.num_gpus))
    return {
        "workload": workload, "cluster": cluster, "trainer": trainer_of(row), "layout": layout, "measured": measured,
        "assumptions": tuple(assumptions),
    }  # fmt: skip


_UNMODELLED = {
    r"hybrid \(Mamba|^nemotron-3(?!\d)|^nemotron-?h": "the model has Mamba layers, which the planner does not model",
    r"activation offload(ing|\b)": "activations of some layers wait in host memory without recompute; not modelled",
    r"full CPU offload|parameter offload Y|ZeRO-3 offload": "weights live in host memory, which is not modelled",
    r"does not fit \(host memory\)": "it ran out of host memory, not of GPU memory",
    r"for part of the micro-?batches": "recompute of a part of the microbatches is not modelled",
}  # fmt: skip

_ANY_UNMODELLED = re.compile("|".join(_UNMODELLED), re.IGNORECASE | re.MULTILINE)


def _refuse_unmodelled(row: Row) -> None:
    """Raises UnsupportedError for what the cost model has no terms for."""
    text = "\n".join((row.notes, row.framework, str(row.get("model.name")), str(row.get("recompute"))))
    if _ANY_UNMODELLED.search(text):
        for pattern, reason in _UNMODELLED.items():
            if re.search(pattern, text, re.IGNORECASE | re.MULTILINE):
                raise UnsupportedError(reason)
