"""A row in the planner's words: a run of (workload, cluster, trainer, layout, measured), or the reason why not.

The columns of the schema (model, parallel, batch, ...) cannot say everything that a plan says: schedules, uneven stages,
a model's norms. A row that comes from a plan (``document_of_plan``) therefore carries ``plan`` (workload, trainer, layout), which
counts; the columns are there too, for people and for tools, and must say the same.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from planner import library
from planner.cluster import Cluster
from planner.error_bars import OWN_RUN, UNLISTED, Kind, kind_of
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.layout import Layout, Recompute, module_names
from planner.model import ModelSpec
from planner.plan_file import Plan
from planner.record import record
from planner.runs.hardware import hardware_of
from planner.runs.job import adapters_of, expert_imbalance_of, layout_of, objective_of, optimizer_of
from planner.runs.left_open import layouts_left_open
from planner.runs.measured import Measured, measured_of
from planner.runs.row_models import completed, model_columns, model_of
from planner.runs.rows import Row, UnsupportedError, frameworks, read_rows, rows_from_dict
from planner.runs.software import precision_of, recipe_of, trainer_of
from planner.trainer import Trainer, changed_trainer, load_trainer
from planner.trainer_options import spelled
from planner.units import GIB, GIGA
from planner.workload import Workload, peak_dtype


@record
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
    made_for: str = ""
    """Kind of run as its source states it, one of ``error_bars.KINDS``; '' = the workload tells."""
    stated: bool
    """The row states its model, its degrees and its batch."""
    set_aside: str = ""
    """Why it counts in no summary, though it is listed; '' = it counts."""
    of_plan: bool = False
    """It is what a plan measured (``planned``): the planner's own words, nothing derived."""
    listed: bool = True
    """Its framework is one that the planner knows."""
    unsupported: str = ""
    """Why the planner cannot price it; '' = it can."""
    assumptions: tuple[str, ...] = ()
    """What was filled in because neither the row nor its framework says it."""
    workload: Workload | None = None
    cluster: Cluster | None = None
    trainer: Trainer | None = None
    options: tuple[str, ...] = ()
    """Options of the trainer that the row, or the recipe of its version, states; the others are open (``options.alternatives``)."""
    layout: Layout | None = None
    others: tuple[Layout, ...] = ()
    """Further layouts that it may have run with, where the row leaves the micro batch or the virtual stages open."""
    measured: Measured = field(default_factory=Measured)

    @property
    def representative(self) -> bool:
        """It counts: somebody measured it, with software that worked as it should."""
        return not self.set_aside

    @property
    def campaign(self) -> str:
        """What its source is a part of: all that one paper or repository published of one kind was measured together."""
        return f"{self.publication or self.source}, {self.made_for}".removesuffix(", ")

    @property
    def publication(self) -> str:
        """Number of the paper, or owner and name of the repository, that it was published in; '' where the text names none."""
        found = re.search(r"arXiv (\d{4}\.\d{4,5})", self.where) or re.search(
            r"\b(?:repository|GitHub|file of) ([\w.-]+/[\w.-]+)", self.where
        )
        return found[1] if found else ""

    @property
    def user(self) -> str:
        """Kind of user, one of ``error_bars.KINDS``; '' where it cannot be priced."""
        if self.workload is None or self.trainer is None:
            return ""
        return kind_of(self.workload, self.trainer, self.made_for).user

    @property
    def kind(self) -> Kind | None:
        """Kind of run, which chooses its error bar; None where it cannot be priced."""
        if self.workload is None or self.trainer is None:
            return None
        return kind_of(self.workload, self.trainer, self.made_for if self.listed else UNLISTED)


def read_runs(
    paths: Sequence[str | Path] | None = None, *, generic: bool = False, unlisted: bool = False
) -> list[Run]:
    """All rows of the paths (default: the shipped ones) as runs. Raises PlannerError for files that are broken.

    ``generic``: each framework as the newest version of its trainer, without what recipes and sources add to the row.
    ``unlisted``: each as if it were in no table.
    """
    return share([to_run(replace(row, generic=generic or unlisted, unlisted=unlisted)) for row in read_rows(paths)])


def share(runs: Sequence[Run]) -> list[Run]:
    """The runs with equal models and trainers of plans made one object each: runs that share them are priced in one call."""
    known: list[Any] = []

    def one(value: Any) -> Any:
        if value not in known:
            known.append(value)
        return known[known.index(value)]

    return [
        replace(run, workload=run.workload.replace(model=one(run.workload.model)), trainer=one(run.trainer))
        if run.workload and run.of_plan else run
        for run in runs
    ]  # fmt: skip


def to_run(row: Row, *, hardware: str = "", model: ModelSpec | None = None) -> Run:
    """One row as a run, or with the reason why it is not supported; never raises for a row that was read.

    ``hardware`` (a profile's name or file) and ``model`` stand for what the row says of them.
    """
    of_plan = row.get("plan") is not None
    row = row if of_plan else completed(row)
    missing, network = [] if of_plan else _missing(row), "not measured"
    try:
        profile, network = hardware_of(row, hardware)
        run = _fields(row, profile, missing, model)
    except UnsupportedError as reason:
        run = {"unsupported": str(reason)}
    except PlannerError as error:
        run = {"unsupported": f"not a valid run: {error}"}
    broken = "before the pipeline fix" in row.notes
    reasons = {
        "it ran before a fix of its pipeline engine, which waited in a poll": broken,
        "every collective was checked on the host first, a debug mode": network == "checked",
        "its own benchmark reads less than half of the network that its source states": network == "slow",
    }
    return Run(
        source=row.source, id=row.id, family=row.family("before the pipeline fix" if broken else f"network {network}"),
        title=str(row.about.get("title") or ""), where=str(row.about.get("where") or ""),
        made_for=row.made_for, stated=not missing,
        set_aside=next((reason for reason, holds in reasons.items() if holds), ""), of_plan=of_plan,
        listed=of_plan or not row.entry.get("unknown"), **run,
    )  # fmt: skip


_NEEDED = (
    "model.hidden", "model.layers", "model.heads", "model.seq", "parallel.tp", "parallel.pp", "batch.global",
    "batch.micro",
)  # fmt: skip


def _missing(row: Row) -> list[str]:
    """Fields without which a layout is not determined; what follows from the others does not count."""
    get = row.get
    further = {
        "model.ffn": not get("model.ffn") and not get("model.moe_ffn"),
        "parallel.vpp": (get("parallel.pp") or 1) > 1 and get("parallel.vpp") is None,
        "model.gated": get("model.gated") is None,
        "parallel.dp": not get("parallel.gpus") and not get("parallel.dp"),
        "parallel.ep": get("model.experts") and not get("parallel.ep"),
    }
    return [path for path in _NEEDED if not get(path)] + [path for path, missing in further.items() if missing]


def _fields(row: Row, hardware: HardwareProfile, missing: list[str], stated: ModelSpec | None) -> dict[str, Any]:
    """Fields of Run for a row that can be priced. Raises UnsupportedError and PlannerError with the reason."""
    assumptions = list[str]()
    of_plan = row.get("plan") is not None
    workload, trainer, layout = planned(row) if of_plan else _from_columns(row, missing, stated, assumptions)
    others = () if of_plan else layouts_left_open(row, layout, workload.model)
    hardware.peak(peak_dtype(workload.precision))
    measured = measured_of(row, workload, layout, hardware)
    if measured.step_time is None and measured.memory is None and measured.fits is None:
        how = "measured" if of_plan else "published"
        raise UnsupportedError(f"no step time, memory or out-of-memory result was {how}")
    return {
        "workload": workload, "cluster": Cluster(hardware=hardware, num_gpus=int(layout.num_gpus)), "trainer": trainer,
        "options": () if of_plan else tuple({**recipe_of(row).options, **row.options}), "layout": layout, "others": others,
        "measured": replace(measured, first_stage=False) if of_plan else measured,
        "assumptions": tuple(assumptions),
    }  # fmt: skip


def _from_columns(
    row: Row, missing: list[str], stated: ModelSpec | None, assumptions: list[str]
) -> tuple[Workload, Trainer, Layout]:
    """What a published row trained; guesses are added to ``assumptions``. Raises UnsupportedError with the reason."""
    _refuse_unmodelled(row)
    if row.entry.get("unknown"):
        trainer = row.entry["trainer"]
        assumptions.append(f"framework '{row.framework}' is not in profiles/frameworks.yaml: priced as {trainer}")
    filled = {"batch.micro", "parallel.vpp"} | (set() if row.get("measured.step_s") else {"batch.global"})
    missing = [path for path in missing if path not in filled]
    if missing:
        kind = "model" if missing[0].startswith("model") else "layout"
        raise UnsupportedError(f"{kind} not stated: {', '.join(path.partition('.')[2] for path in missing)}")
    model = stated or model_of(row)
    layout = layout_of(row, model, assumptions)
    workload = Workload(
        model=model, sequence_length=row.get("model.seq"), global_batch_size=int(layout.global_batch_size),
        precision=precision_of(row), optimizer=optimizer_of(row, assumptions), **adapters_of(row),
        document_length=min(row.get("document_length") or 0, row.get("model.seq")),
        expert_imbalance=expert_imbalance_of(row, model), objective=objective_of(row),
    )  # fmt: skip
    return workload, trainer_of(row), layout


def _refuse_unmodelled(row: Row) -> None:
    """Raises UnsupportedError for what the cost model has no terms for."""
    text = "\n".join((row.notes, row.framework, str(row.get("model.name")), str(row.get("recompute"))))
    for entry in frameworks()["unmodelled"]:
        if entry["match"].search(text):
            raise UnsupportedError(entry["reason"])


# -------------------------------------------------------------------------------- a plan as a row, and back

KINDS = {"allocated": "peak allocated GiB", "reserved": "reserved GiB", "device": "nvidia-smi GiB"}
"""What a measured memory is the peak of, in the words that rows use."""


def document_of_plan(
    plan: Plan, measured: Measured, *, name: str, framework: str, where: str = "", date: str = "", notes: str = "",
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What a plan measured as a document of runs with one row: the schema of profiles/runs, checked as those files are.

    ``name`` is the row's id, ``framework`` what ran it, ``notes`` what is peculiar, ``changes`` what its trainer had otherwise
    than the plan's (``trainer.changes_of``). Raises PlannerError.
    """
    peak = None if measured.memory is None else measured.memory / GIB
    said = {"step_s": measured.step_time, "mem_gb": peak, "oom": True if measured.fits is False else None}
    words = [KINDS[measured.memory_kind]] if peak is not None else []
    # A file of the user's own may lie anywhere: the row has to find it from where it is read.
    trainer = library.find("trainers", spelled(plan.trainer)[0])
    own = trainer.parent != library.profiles_directory() / "trainers"
    named = str(trainer.resolve()) if own else plan.trainer
    ran: str | dict[str, Any] = {**changes, "extends": named} if changes else named
    row = {
        "id": name,
        **columns(plan.workload, plan.layout),
        "measured": {key: value for key, value in said.items() if value is not None},
        "notes": "; ".join([*words, *([notes] if notes else [])]),
        "plan": {"workload": plan.workload.to_dict(), "trainer": ran, "layout": plan.layout.to_dict()},
    }
    network = None if plan.network_bandwidth is None else f"{plan.network_bandwidth * 8 / GIGA:.12g} Gb/s"
    document = {
        "source": {"id": "plan-validate", "title": "plan validate", "where": where or None, "quality": "own",
            "kind": OWN_RUN, "date": date or None},
        "hardware": {"gpu": plan.hardware, "inter_node": network},
        "framework": framework,
        "rows": [row],
    }  # fmt: skip
    [read] = rows_from_dict(document, where="the run of the plan")
    workload, trainer_, layout = planned(read)
    if (workload, trainer_, layout) != (plan.workload, _trainer(ran, "the run of the plan"), plan.layout):
        raise PlannerError("the run of the plan does not read back as the plan that it was made of")
    return document


def columns(workload: Workload, layout: Layout) -> dict[str, Any]:
    """A job and its layout in the fields of a row, as far as these go."""
    return {
        "model": {**model_columns(workload.model), "seq": workload.sequence_length},
        "parallel": {
            "gpus": int(layout.num_gpus), **{key: int(getattr(layout, key)) for key in _DEGREES},
            "sp": bool(layout.sequence_parallel), "shard": int(layout.dp_shard) or None,
        },
        "batch": {"micro": int(layout.micro_batch_size), "global": workload.global_batch_size},
        "precision": workload.precision, "optimizer": workload.optimizer, "recompute": _recompute(layout),
    }  # fmt: skip


_DEGREES = ("tp", "pp", "dp", "cp", "ep", "etp", "vpp", "zero")


def _recompute(layout: Layout) -> str:
    mode = int(layout.recompute)
    if mode == Recompute.FULL:
        return f"{int(layout.recompute_layers)} layers full" if int(layout.recompute_layers) else "full"
    return f"selective: {', '.join(module_names(int(layout.recompute_modules)))}" if mode else "none"


def planned(row: Row) -> tuple[Workload, Trainer, Layout]:
    """What a row of a plan trained. Raises PlannerError, and UnsupportedError where its columns say something else."""
    data, where = row.get("plan"), f"{row.source}/{row.id}: plan"
    if not isinstance(data, Mapping) or any(data.get(key) is None for key in ("workload", "trainer", "layout")):
        raise PlannerError(f"{where}: it must hold workload, trainer and layout")
    workload = Workload.from_dict(data["workload"], where=f"{where}: workload")
    layout = Layout.from_dict(data["layout"], where=f"{where}: layout")
    if int(layout.global_batch_size) != workload.global_batch_size:
        raise PlannerError(
            f"{where}: {layout.num_microbatches} microbatches of {layout.micro_batch_size} on dp {layout.dp} are not the "
            f"{workload.global_batch_size} sequences of its workload"
        )
    for group, value in columns(workload, layout).items():
        for path, mine in (
            {f"{group}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {group: value}
        ).items():
            said = row.get(path)
            if said is not None and said != mine:
                raise UnsupportedError(f"it says {path.partition('.')[2] or path} {said}, its plan {mine}")
    return workload, _trainer(data["trainer"], f"{where}: trainer"), layout


def _trainer(said: Any, where: str) -> Trainer:
    return changed_trainer(said, where=where) if isinstance(said, Mapping) else load_trainer(str(said))
