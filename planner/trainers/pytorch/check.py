"""The exported PyTorch script itself, on one rank of a pretended world: its mesh, its stages, its model on the meta device."""

import json
import os
from pathlib import Path
from typing import Any

from planner.cost.parameters import total_parameters
from planner.layout import Layout
from planner.trainers.bundle.target import ExportJob, group_of
from planner.trainers.checking import Checked, Request
from planner.trainers.checking.import_standins import imported, pretend_ranks

NEEDED = ("torch",)


def asks(job: ExportJob) -> dict[str, Any]:
    """Parameters of the model, and the length of a sample."""
    return {"total": round(total_parameters(job.model)), "length": job.workload.sequence_length}


def one(asked: Request, answer: Checked) -> None:
    """How far the script goes with its plan.json."""
    os.chdir(asked["folder"])
    plan, layout, world = json.loads(Path("plan.json").read_text(encoding="utf-8")), asked["layout"], asked["world"]
    script = imported(asked["folder"])
    answer.reached("parsed")
    answer.same("global batch", plan["micro_batch_size"] * plan["num_microbatches"] * plan["dp"], asked["batch"])
    answer.same("length", plan["sequence_length"], asked["length"])
    for name in ("zero", "tp", "pp", "dp"):
        answer.same(name, plan[name], layout[name])
    answer.same("recompute", ["none", "selective", "full"].index(plan["recompute"]), layout["recompute"])
    answer.same("layers", sorted(i for one in plan["stages"] for i in one["layers"]), [*range(plan["model"]["num_layers"])])
    answer.reached("validated")
    pretend_ranks(world - 1, world)
    run = started(script, plan)
    ranks = {"tp": run.mesh["tp"].mesh, "pp": run.mesh["pp"].mesh, "dp": run.mesh["dp_replicate", "dp_shard"].mesh}
    for name, mesh in ranks.items():
        found = sorted(mesh.flatten().tolist())
        answer.same(f"{name} group of the last rank", found, group_of(Layout(**layout), name, world - 1))
    answer.reached("groups built")
    answer.same("parameters of the model", parameters(script, plan), asked["total"])
    answer.reached("model built")


def started(script: Any, plan: dict[str, Any]) -> Any:
    """What a rank holds before its first step, without values of its weights."""
    import torch

    script.fill = lambda part, device: None
    return script.Run(plan, torch.device("cpu"))


def parameters(script: Any, plan: dict[str, Any]) -> int:
    """Parameters of all stages that the script builds, on the meta device; tied ones count once."""
    import torch

    stages, total = plan["stages"], 0
    for i, stage in enumerate(stages):
        with torch.device("meta"):
            part = script.Part(plan, stage["layers"], first=i == 0, last=i == len(stages) - 1)
        total += sum(one.numel() for one in part.parameters())
    return total - plan["model"]["tied_embeddings"] * plan["model"]["vocab_size"] * plan["model"]["hidden_size"]
