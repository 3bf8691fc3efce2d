"""What questions about jobs whose machines come and go share: the plan with what flags and a cluster file say around it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.api.results import File, Plan
from planner.errors import PlannerError, shown
from planner.units import parse

if TYPE_CHECKING:
    from planner.api.mixed_calls import MixedPlan
    from planner.elastic.elastic_job import ElasticJob, Surroundings
    from planner.elastic.mixed_elastic_job import MixedElasticJob

AROUND = ("mtbf", "spares", "price", "spot", "synchronous", "cluster")
"""Keywords about what a plan file does not say."""


def elastic_job(
    plan: Plan | MixedPlan | File, said: Mapping[str, Any], size: float | None = None, *, other_nodes: bool = False
) -> ElasticJob | MixedElasticJob:
    """A plan of one kind of node, or of several, with storage, failures, spares and prices: of flags, else of the cluster file.

    ``size``: bytes of a checkpoint that was looked into; ``other_nodes``: the cluster file of a mixed plan holds other nodes than
    its own. Raises PlannerError.
    """
    from planner.api.mixed_calls import MixedPlan, load_mixed
    from planner.api.plan_kinds import plan_kind
    from planner.cluster_file import read_cluster
    from planner.elastic.elastic_job import ElasticJob, Surroundings, surroundings_of
    from planner.elastic.mixed_elastic_job import MixedElasticJob, as_said_by
    from planner.plan_file import load_plan

    if not isinstance(plan, (Plan, MixedPlan)):
        kind = plan_kind(plan)
        if kind == "rl":
            raise PlannerError(_of_rl(plan))
        plan = load_mixed(plan) if kind == "mixed" else Plan(load_plan(Path(plan)))
    cluster = None if said.get("cluster") is None else read_cluster(Path(said["cluster"]))
    if isinstance(plan, MixedPlan):
        mixed = plan.file if cluster is None or other_nodes else as_said_by(plan.file, cluster)
        around = Surroundings(storage=mixed.cluster.storage, spares=mixed.cluster.spares)
        return MixedElasticJob(plan=mixed, around=_flagged(around, said), checkpoint_bytes=size)
    around = surroundings_of(cluster, plan.file.cluster().hardware)
    return ElasticJob(plan=plan.file, around=_flagged(around, said), checkpoint_bytes=size)


def _of_rl(path: File) -> str:
    """What to ask instead of an RL plan: the policy's training holds all that a failure loses; engines get weights from it."""
    from planner.rl.rl_plan import load_rl_plan

    plan = load_rl_plan(Path(path))
    return (
        f"{path} is an RL plan, whose engines keep nothing that a failure could lose; ask for the training of its policy: "
        f"plan --model {plan.workload.model.name} --hardware {plan.hardware} --gpus {plan.placement.train_gpus} "
        f"--trainer {plan.trainer} --output train.yaml"
    )


def seconds_of(value: Any, flag: str, like: str) -> float | None:
    """A time with its unit, or seconds."""
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return parse(f"{float(value)!r} s", "seconds", what=flag, like=like)
    return parse(str(value), "seconds", what=flag, like=like)


def _flagged(found: Surroundings, said: Mapping[str, Any]) -> Surroundings:
    """Surroundings with what flags say. Raises PlannerError."""
    changes: dict[str, Any] = {}
    if said.get("mtbf") is not None:
        changes["mtbf"] = seconds_of(said["mtbf"], "--mtbf", "900h")
    spares = said.get("spares")
    if spares is not None:
        if isinstance(spares, bool) or not isinstance(spares, int) or not 0 <= spares <= 2**18:
            raise PlannerError(f"--spares is {shown(spares)}; it must be a whole number from 0 to {2**18}")
        changes["spares"] = spares
    price = said.get("price")
    if price is not None:
        changes["price"] = parse(f"{price} USD/h", "USD/h", what="--price", like="2.69")
    if said.get("synchronous"):
        changes["asynchronous"] = False
    if said.get("spot"):
        changes["spot"] = True
    return replace(found, **changes)


def save_data(path: Path, data: Mapping[str, Any]) -> None:
    """Write plain data as YAML or JSON. Raises PlannerError."""
    from planner import library

    if path.suffix not in (".yaml", ".yml", ".json"):
        raise PlannerError(f"{path}: name a file that ends in .yaml or .json")
    text = json.dumps(data, indent=2) + "\n" if path.suffix == ".json" else library.dump_yaml(dict(data))
    library.write_whole(path, text)


__all__ = ["AROUND", "elastic_job", "save_data", "seconds_of"]
