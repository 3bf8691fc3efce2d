"""One layout that a user wrote down: read, completed with what follows from the rest, checked and priced."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner import library
from planner.cost.refine import price_exactly
from planner.defaults import Request, ResolvedJob, resolve
from planner.errors import PlannerError
from planner.layout import Layout, Recompute, Schedule, is_v_shaped, module_names
from planner.plan_file import Assumption, Plan, plan_from_dict, predict
from planner.rules import Job, check
from planner.space import usual_modules

DERIVED = ("dp", "num_microbatches", "dp_shard")
"""Fields that follow from the others: taken from a file only when no flag changes what they follow from."""


@dataclass(frozen=True, kw_only=True)
class LayoutFile:
    """What a user's file says."""

    values: dict[str, int]
    """Layout fields."""
    plan: Plan | None
    """The plan, when the file is one; then also the workload, cluster and trainer."""


def read_layout_file(path: Path) -> LayoutFile:
    """A plan file, or a YAML mapping of layout fields. Raises PlannerError."""
    data = library.read_yaml(path)
    if "planner_plan" in data:
        plan = plan_from_dict(data, where=str(path))
        return LayoutFile(values={name: int(value) for name, value in plan.layout.columns().items()}, plan=plan)
    checked = Layout.from_dict(data, where=str(path))
    return LayoutFile(values={name: int(getattr(checked, name)) for name in data}, plan=None)


def explicit_plan(file: LayoutFile | None, values: dict[str, int], said: dict[str, Any]) -> Plan:
    """The plan of one explicit layout: a file's values, replaced by those of flags.

    ``values`` are layout fields from flags, ``said`` the fields of Request from flags (None = not said). Raises
    PlannerError when something is missing or the layout is not legal.
    """
    base = dict(file.values) if file else {}
    if values or any(said.get(name) is not None for name in ("num_gpus", "global_batch_size")):
        base = {name: value for name, value in base.items() if name not in DERIVED or file is None or file.plan is None}
    fields = {**base, **values}
    request = _request(file.plan if file else None, fields, said)
    resolved = resolve(request)
    layout, assumed = complete(resolved.job, fields)
    check(resolved.job, layout)
    return price_plan(resolved, layout, assumed)


def price_plan(resolved: ResolvedJob, layout: Layout, assumed: tuple[Assumption, ...] = ()) -> Plan:
    """The plan of a legal layout, its pipeline on its timeline."""
    job = resolved.job
    [refined] = price_exactly(job.workload, job.cluster, job.trainer, [layout])
    return Plan(
        workload=job.workload, hardware=resolved.hardware, num_gpus=job.cluster.num_gpus, trainer=resolved.trainer,
        layout=layout, prediction=predict(refined, job, resolved.kind),
        network_bandwidth=resolved.network_bandwidth, assumptions=(*resolved.assumptions, *assumed),
        why="priced as given, not searched",
    )  # fmt: skip


def _request(plan: Plan | None, fields: dict[str, int], said: dict[str, Any]) -> Request:
    """The flags, then the plan's workload and cluster, then what the degrees imply."""
    given = {name: value for name, value in said.items() if value is not None}
    if plan is not None:
        work = plan.workload
        from_plan = {name: getattr(work, name) for name in ("model", "sequence_length", "global_batch_size", "precision",
                     "optimizer", "lora_rank", "expert_imbalance", "lora_targets", "document_length")}  # fmt: skip
        given = {**from_plan, "hardware": plan.hardware, "trainer": plan.trainer, "num_gpus": plan.num_gpus,
                 "network_bandwidth": plan.network_bandwidth, **given}  # fmt: skip
    if "model" not in given:
        raise PlannerError("which model? give --model, or a plan file that names one")
    if "num_gpus" not in given:
        if "dp" not in fields:
            raise PlannerError("how many GPUs? give --gpus, or --dp so that tp x pp x dp x cp says it")
        given["num_gpus"] = fields.get("tp", 1) * fields.get("pp", 1) * fields["dp"] * fields.get("cp", 1)
    return Request(**given)


def complete(job: Job, fields: dict[str, int]) -> tuple[Layout, tuple[Assumption, ...]]:
    """A whole layout from the fields that were given, and what was assumed for the others."""
    values, assumed = dict(fields), []
    tp, pp, cp = (values.get(name, 1) for name in ("tp", "pp", "cp"))
    gpus, batch = job.cluster.num_gpus, job.workload.global_batch_size
    if "dp" not in values:
        if gpus % (tp * pp * cp):
            raise PlannerError(
                f"tp {tp} x pp {pp} x cp {cp} = {tp * pp * cp} does not divide {gpus} GPUs; change a degree"
            )
        values["dp"] = gpus // (tp * pp * cp)
    if "num_microbatches" not in values:
        each = values["dp"] * values.get("micro_batch_size", 1)
        values["num_microbatches"] = max(batch // each, 1)
    if "sequence_parallel" not in values:
        values["sequence_parallel"] = int(tp > 1 and job.trainer.legal.sequence_parallel != "never")
    if "zero" not in values:
        levels = job.trainer.legal.zero if pp == 1 else job.trainer.legal.zero_with_pp or (0,)
        values["zero"] = max(levels) if values["dp"] * cp > 1 else min(levels)
        if values["dp"] * cp > 1:
            why = f"the most that trainer {job.trainer.name} shards here"
            assumed.append(Assumption(what="state sharding", value=f"zero {values['zero']}", why=why, flag="--zero"))
    if "schedule" not in values:
        values["schedule"] = int(Schedule.INTERLEAVED if values.get("vpp", 1) > 1 else Schedule.ONE_F_ONE_B)
    if is_v_shaped(values["schedule"]):
        values.setdefault("vpp", 2)
    if (
        "etp" not in values
        and job.model.is_moe
        and not job.trainer.legal.etp
        and job.trainer.legal.expert_parallel != "folded"
    ):
        values["etp"] = tp
    if values.get("recompute_modules") and "recompute" not in values:
        values["recompute"] = int(Recompute.SELECTIVE)
    if values.get("recompute") == Recompute.SELECTIVE and not values.get("recompute_modules"):
        values["recompute_modules"] = modules = usual_modules(job.trainer, job.model)
        assumed.append(
            Assumption(
                what="recompute modules",
                value=", ".join(module_names(modules)),
                why="the cheapest ones",
                flag="--recompute-modules",
            )
        )
    return Layout(**values), tuple(assumed)
