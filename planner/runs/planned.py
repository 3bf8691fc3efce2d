"""The run of a plan: what it trained in the planner's own words, written as a document of runs and read back exactly.

The columns of the schema (model, parallel, batch, ...) cannot say everything that a plan says: schedules, uneven stages,
a model's norms. A row that comes from a plan therefore carries ``plan`` (workload, trainer, layout), which counts; the columns
are there too, for people and for tools, and must say the same.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner import library
from planner.cluster import Cluster
from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.layout import Layout, Recompute, module_names
from planner.model import ModelSpec
from planner.plan_file import Plan
from planner.runs.measured import Measured, measured_of
from planner.runs.rows import Row, UnsupportedError, rows_from_dict
from planner.trainer import Trainer, changed_trainer, load_trainer
from planner.units import GIB, GIGA
from planner.workload import Workload

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
    trainer = library.find("trainers", plan.trainer)
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
        "source": {"id": "plan-validate", "title": "plan validate", "where": where or None, "quality": "own", "date": date or None},
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


def model_columns(model: ModelSpec) -> dict[str, Any]:
    """A model in the fields of a row."""
    found: dict[str, Any] = {
        "name": model.name, "hidden": model.hidden_size, "layers": model.num_layers, "heads": model.num_heads,
        "kv_heads": model.num_kv_heads, "head_dim": model.head_dim, "ffn": model.ffn_size, "gated": model.gated,
        "vocab": model.vocab_size, "tied_embeddings": model.tied_embeddings,
    }  # fmt: skip
    if model.is_moe:
        found |= {"experts": model.num_experts, "topk": model.top_k, "moe_ffn": model.expert_ffn_size}
    return found


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


def planned_fields(row: Row, hardware: HardwareProfile) -> dict[str, Any]:
    """Fields of Run for a row of a plan. Raises UnsupportedError and PlannerError with the reason."""
    workload, trainer, layout = planned(row)
    measured = replace(measured_of(row, workload, layout, hardware), first_stage=False)
    if measured.step_time is None and measured.memory is None and measured.fits is None:
        raise UnsupportedError("no step time, memory or out-of-memory result was measured")
    cluster = Cluster(hardware=hardware, num_gpus=int(layout.num_gpus))
    return {"workload": workload, "cluster": cluster, "trainer": trainer, "layout": layout, "measured": measured}
