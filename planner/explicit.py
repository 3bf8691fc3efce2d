"""One layout that a user wrote down: read, completed with what follows from the rest, checked and priced."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from planner import library
from planner.assumption import Assumption
from planner.cost.refine import price_exactly
from planner.defaults import Request, ResolvedJob, resolve
from planner.errors import PlannerError
from planner.layout import Layout, Recompute, Schedule, is_v_shaped, module_names
from planner.plan_file import Plan, plan_from_dict
from planner.rules import Job, check
from planner.space import usual_modules

DERIVED = ("dp", "num_microbatches", "dp_shard")
"""Fields that follow from the others: taken from a file only when no flag changes what they follow from."""


def explicit_plan(base: Plan | Path | None, values: dict[str, int], said: dict[str, Any]) -> Plan:
    """The plan of one explicit layout: that of a plan or of a file, with what flags replace.

    ``base`` is a plan, or the path of a plan file or of a YAML mapping of layout fields; ``values`` are layout fields from flags,
    ``said`` the fields of Request from flags. Raises PlannerError when something is missing or the layout
    is not legal.
    """
    fields: dict[str, int] = {}
    if isinstance(base, Path):
        data, where = library.read_yaml(base), str(base)
        if "planner_plan" in data:
            base = plan_from_dict(data, where=where)
        else:
            layout = Layout.from_dict(data, where=where)
            fields = {name: int(getattr(layout, name)) for name in data}
    given = dict(said)
    if isinstance(base, Plan):
        changed = bool(values) or bool({"num_gpus", "nodes"} & given.keys()) or "global_batch_size" in given
        whole = base.layout.columns()
        fields = {name: int(value) for name, value in whole.items() if not (changed and name in DERIVED)}
        given = {
            **vars(base.workload), "hardware": base.hardware, "trainer": base.trainer,
            "num_gpus": 0 if "nodes" in given else base.num_gpus,
            "network_bandwidth": base.network_bandwidth, **given,
        }  # fmt: skip
    fields |= values
    if "model" not in given:
        raise PlannerError("which model? give --model, or a plan file that names one")
    if not {"num_gpus", "nodes"} & given.keys():
        if "dp" not in fields:
            raise PlannerError("how many GPUs? give --gpus, or --dp so that tp x pp x dp x cp says it")
        given["num_gpus"] = fields.get("tp", 1) * fields.get("pp", 1) * fields["dp"] * fields.get("cp", 1)
    resolved = resolve(Request(**given))
    said_recompute = {"recompute", "recompute_modules", "recompute_layers"} & fields.keys()
    usual = {} if said_recompute else usual_recompute(resolved.job)
    layout, assumed = complete(resolved.job, fields | usual)
    if usual:
        trainer, full = resolved.job.trainer, usual["recompute"] == Recompute.FULL
        why = f"what {f'{trainer.name} {trainer.choices.version}'.rstrip()} takes for such a job"
        what = ", ".join(["full"] if full else module_names(usual["recompute_modules"]))
        assumed = (*assumed, Assumption("recompute", what, why, "--recompute none"))
    check(resolved.job, layout)
    return price_plan(resolved, layout, assumed)


def usual_recompute(job: Job) -> dict[str, int]:
    """Fields of the recompute that the trainer, or its published recipe for such a job, takes by default; {} = none."""
    work, choices = job.workload, job.trainer.choices
    recipe = choices.recipe(work.model.name, job.cluster.hardware.name, work.precision, adapters=work.lora_rank > 0)
    mode, _, modules = str({**choices.defaults, **recipe.defaults}.get("recompute", "none")).partition(": ")
    if mode == "none":
        return {}
    said = {"recompute": mode} | ({"recompute_modules": modules.split(", ")} if modules else {})
    layout = Layout.from_dict(said, where=f"trainer {job.trainer.name}: recompute")
    return {name: int(getattr(layout, name)) for name in said}


def price_plan(resolved: ResolvedJob, layout: Layout, assumed: tuple[Assumption, ...] = ()) -> Plan:
    """The plan of a legal layout, its pipeline on its timeline."""
    job = resolved.job
    [refined] = price_exactly(job.workload, job.cluster, job.trainer, [layout])
    [unstated] = resolved.unstated([layout]).ratios()
    plan = resolved.plan(layout, refined, "priced as given, not searched", unstated, assumed)
    if layout.ep > 1:
        return plan
    return replace(plan, assumptions=tuple(one for one in plan.assumptions if one.what != "expert imbalance"))  # all on every rank


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
            assumed.append(Assumption("state sharding", f"zero {values['zero']}", why, "--zero"))
    if "schedule" not in values:
        values["schedule"] = int(Schedule.INTERLEAVED if values.get("vpp", 1) > 1 else Schedule.ONE_F_ONE_B)
    if is_v_shaped(values["schedule"]):
        values.setdefault("vpp", 2)
    legal = job.trainer.legal
    if "etp" not in values and job.model.is_moe and not legal.etp and legal.expert_parallel != "folded":
        values["etp"] = tp
    if values.get("recompute_modules") and "recompute" not in values:
        values["recompute"] = int(Recompute.SELECTIVE)
    if values.get("recompute") == Recompute.SELECTIVE and not values.get("recompute_modules"):
        values["recompute_modules"] = modules = usual_modules(job.trainer, job.model)
        chosen = ", ".join(module_names(modules))
        assumed.append(Assumption("recompute modules", chosen, "the cheapest ones", "--recompute-modules"))
    return Layout(**values), tuple(assumed)
