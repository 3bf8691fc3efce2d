"""Stages of a pipeline as torchtitan cuts and deals them.  [distributed/pipeline_parallel.py; until 2025-07 pipelining_utils.py]"""

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.layout import Schedule
from planner.model import ModelSpec
from planner.trainers.bundle.fully_shard import SCHEDULES
from planner.trainers.reading.values import quotient, uneven, whole_number


def pipeline(path: Path, parallel: Mapping[str, Any], pp: int, model: ModelSpec | None) -> tuple[Schedule, int, dict[str, int]]:
    """Schedule, virtual stages per rank, and the uneven ends. Raises PlannerError."""
    if pp == 1:
        return Schedule.ONE_F_ONE_B, 1, {}
    if file := parallel["pipeline_parallel_schedule_csv"]:
        sets = "--set parallelism.pipeline_parallel_schedule_csv=null imports the job with the one that is named"
        raise PlannerError(f"{path}: parallelism.pipeline_parallel_schedule_csv is {shown(file)}: a schedule of its own; {sets}")
    names = {name.lower(): one for one, name in SCHEDULES.items()}
    name = str(parallel["pipeline_parallel_schedule"])
    if name.lower().replace("_", "") not in names:
        raise PlannerError(
            f"{path}: parallelism.pipeline_parallel_schedule is {shown(name)}; the planner prices {', '.join(SCHEDULES.values())}"
        )
    schedule = names[name.lower().replace("_", "")]  # of 2024: interleaved_1f1b
    counts = _said(path, parallel, model)
    if counts is None:
        stages = _number_of_stages(path, parallel, pp, model, schedule)
        counts = _dealt(path, parallel, stages, model) if model is not None else None
        if counts is None:
            return schedule, stages // pp, {}
    chunks = quotient(len(counts), pp, f"{path}: the stages of the model by the pipeline degree")
    v_shaped = schedule in (Schedule.ZBV, Schedule.DUALPIPE_V)
    owners = [*range(pp), *reversed(range(pp))] if v_shaped else [i % pp for i in range(len(counts))]
    held = [sum(count for count, owner in zip(counts, owners, strict=True) if owner == rank) for rank in range(pp)]
    return schedule, chunks, uneven(held)


def _said(path: Path, parallel: Mapping[str, Any], model: ModelSpec | None) -> list[int] | None:
    """Layers of every stage where the file says which modules it has, or before which layers it is cut; None = it does not."""
    if stages := parallel["module_fqns_per_model_part"]:
        return [sum(str(module).startswith("layers.") for module in stage) for stage in stages]
    points = parallel["pipeline_parallel_split_points"]
    points = points.split(",") if isinstance(points, str) else points
    if not points or model is None:
        return None
    numbers = [re.fullmatch(r"layers\.(\d{1,4})", str(one).strip()) for one in points]
    cuts = [0, *(int(one[1]) for one in numbers if one is not None), model.num_layers]
    if None in numbers or cuts != sorted(cuts):
        raise PlannerError(f"{path}: pipeline_parallel_split_points is {shown(points)}; layers in their order, layers.8, are read")
    return [after - before for before, after in pairwise(cuts)]


def _less(path: Path, parallel: Mapping[str, Any]) -> list[int]:
    """Layers that embedding and head count as."""
    return [whole_number(parallel[f"pipeline_parallel_{end}_stage_less_layers"], f"{path}: {end}_stage_less_layers", least=0)
            for end in ("first", "last")]  # fmt: skip


def _number_of_stages(
    path: Path, parallel: Mapping[str, Any], pp: int, model: ModelSpec | None, schedule: Schedule
) -> int:
    """Stages of all ranks: by layers of each, else one or two of a rank, as its schedule has them."""
    each = parallel["pipeline_parallel_layers_per_stage"]
    if each is None or model is None:
        return pp if schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B) else 2 * pp
    count = -(-(model.num_layers + sum(_less(path, parallel))) // whole_number(each, f"{path}: pipeline_parallel_layers_per_stage"))
    quotient(count, pp, f"{path}: virtual stages of {each} layers by the pipeline degree")
    return count


def _dealt(path: Path, parallel: Mapping[str, Any], stages: int, model: ModelSpec) -> list[int] | None:
    """Layers of every stage: embedding and head count as layers of the first and last one, what does not divide goes to the
    first ones; None where nothing is left for one of them. [_generate_llm_fqn_per_model_part]"""
    first, last = _less(path, parallel)
    each, more = divmod(model.num_layers + first + last, stages)
    counts = [each + (i < more) for i in range(stages)]
    counts[0], counts[-1] = counts[0] - first, counts[-1] - last
    return counts if each >= max(first, last, 1) else None
