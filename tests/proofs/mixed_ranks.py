"""What the exported script for unlike stages and unequal shares computes and how long it takes, on forked ranks of gloo.

The files are those that ``plan export`` writes: what users get is what is run here.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.proofs.forked_ranks import run_ranks
from tests.proofs.sleeping import Sleeper, _first_in_line


def _script(folder: str) -> Any:
    """The exported script, imported."""
    sys.path.insert(0, folder)
    import mixed_train

    return mixed_train


def _plan(folder: str, **changed: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "plan.json").read_text()) | changed
    return found


def world_of(plan: dict[str, Any]) -> int:
    """Ranks of a plan.json."""
    return sum(len(stage["ranks"]) for one in plan["replicas"] for stage in one["stages"])


def serial(plan: dict[str, Any]) -> dict[str, Any]:
    """The same job on one rank: one replica of one stage that takes the whole batch a sequence at a time."""
    stage = {
        "layers": list(range(plan["model"]["num_layers"])),
        "ranks": [0],
        "recompute": "none",
        "recompute_layers": 0,
    }
    share = {"micro_batch_size": 1, "num_microbatches": plan["global_batch_size"], "loss_scale": 1.0, "first_row": 0}
    return plan | {"tp": 1, "zero": 0, "replicas": [share | {"stages": [stage]}]}


# ------------------------------------------------------------------------------------------------ gradients


def _gradients(folder: str, changed: dict[str, Any], alone: bool) -> dict[str, Any]:
    """Loss, and the gradient of every weight that this rank holds, whole."""
    script, plan = _script(folder), _plan(folder, **changed)
    run = script.Stage(serial(plan) if alone else plan, torch.device("cpu"))
    rows = run.share["micro_batch_size"] * run.share["num_microbatches"]
    inputs, targets = script.train.Tokens(plan, None).rows(run.share["first_row"], rows, torch.device("cpu"))
    loss = run.gradients(inputs, targets)
    dist.all_reduce(loss)
    found = {}
    for name, one in run.part.named_parameters():
        grad = one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
        found[name] = grad.tolist()
    return {"loss": float(loss) / (len(run.plan["replicas"]) * run.plan["tp"]), "gradients": found}


def largest_difference(folder: str, **changed: Any) -> dict[str, Any]:
    """Of loss and gradients between the plan on its ranks and the same job on one rank, in float64.

    ``weights``: weights compared; ``gradient``: the largest difference of a gradient over the largest gradient of its weight.
    """
    changed = {"precision": "fp64", **changed}
    (whole,) = run_ranks(_gradients, 1, folder, changed, True)
    ranks = run_ranks(_gradients, world_of(_plan(folder, **changed)), folder, changed, False)
    worst, seen = 0.0, set()
    for one in ranks:
        for name, grad in one["gradients"].items():
            mine, theirs = (
                torch.tensor(grad, dtype=torch.float64),
                torch.tensor(whole["gradients"][name], dtype=torch.float64),
            )
            worst = max(worst, float((mine - theirs).abs().max() / theirs.abs().max()))
            seen.add(name)
    missing = sorted(set(whole["gradients"]) - seen)
    return {
        "loss": abs(ranks[0]["loss"] / whole["loss"] - 1.0),
        "gradient": worst,
        "weights": len(seen),
        "missing": missing,
    }


# ------------------------------------------------------------------------------------------------ times


def asleep(script: Any, seconds: dict[str, tuple[float, float]]) -> None:
    """Layers of the script's model sleep: forward and backward seconds by kind of the stage that holds them, and compute
    nothing."""

    class Layer(nn.Module):
        def __init__(self, model: dict[str, Any], recompute: str) -> None:
            super().__init__()
            self.recompute = recompute
            self.sleeper: Any = None
            self.unused = nn.Parameter(torch.empty(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.sleeper(x) + 0.0 * self.unused

    script.train.Layer = Layer


def _timed(folder: str, seconds: dict[str, tuple[float, float]], steps: int) -> list[tuple[float, float, float]]:
    """Of every timed step: start, end of this rank's own passes, end of the step with the reduced gradients."""
    script, plan = _script(folder), _plan(folder, precision="fp32", zero=0, compile=False)
    asleep(script, seconds)
    run = script.Stage(plan, torch.device("cpu"))
    stage = run.share["stages"][run.number]
    forward, backward = seconds[stage["kind"]]
    sleepers = []
    for layer in run.part.layers.values():  # what comes into the first layer has a gradient too: that of the embedding
        layer.sleeper = Sleeper(forward, backward, 0.0)
        sleepers.append(layer.sleeper)
    inputs, targets = script.train.Tokens(plan, None).rows(
        run.share["first_row"], run.share["micro_batch_size"] * run.share["num_microbatches"], torch.device("cpu")
    )
    passes: list[float] = []
    reduce = run.schedule._stage.perform_reduce_grad

    def noted(factor: int) -> None:
        passes.append(time.monotonic())
        reduce(factor)

    run.schedule._stage.perform_reduce_grad = noted
    found = []
    gc.collect()
    gc.disable()
    for number in range(1 + steps):
        for one in sleepers:
            one.awake = number == 0
        dist.barrier()
        start = time.monotonic()
        run.gradients(inputs, targets)
        found.append((start, passes[-1], time.monotonic()))
    gc.enable()
    return found[1:]


def step_times(folder: str, seconds: dict[str, tuple[float, float]], steps: int = 2) -> dict[str, Any]:
    """Median seconds of a step until the last rank has ended its passes, and until each replica has."""
    plan = _plan(folder)
    with _first_in_line():
        ranks = run_ranks(_timed, world_of(plan), folder, seconds, steps)
    begun = [min(one[step][0] for one in ranks) for step in range(steps)]
    replicas = []
    for one in plan["replicas"]:
        mine = [rank for stage in one["stages"] for rank in stage["ranks"]]
        replicas.append(_median([max(ranks[rank][step][1] for rank in mine) - begun[step] for step in range(steps)]))
    return {"step": max(replicas), "replicas": replicas}


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


# ------------------------------------------------------------------------------------------------ training


def _losses(folder: str, steps: int, alone: bool) -> list[list[float]]:
    script, plan = _script(folder), _plan(folder, precision="fp64")
    run, tokens = script.Stage(serial(plan) if alone else plan, torch.device("cpu")), script.train.Tokens(plan, None)
    return [list(run.step(tokens, number)) for number in range(steps)]


def losses(folder: str, steps: int) -> dict[str, list[list[float]]]:
    """Loss and norm of the gradient of some steps of training in float64: of the plan's ranks, and of one rank alone."""
    (alone,) = run_ranks(_losses, 1, folder, steps, True)
    return {"alone": alone, "ranks": run_ranks(_losses, world_of(_plan(folder)), folder, steps, False)[0]}
