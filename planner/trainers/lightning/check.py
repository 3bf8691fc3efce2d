"""Lightning's own strategy and Trainer, and the script's model, on an exported folder."""

import ast
import inspect
import json
import os
from pathlib import Path
from typing import Any

from planner.cost.parameters import total_parameters
from planner.layout import Layout
from planner.trainers.bundle.target import ExportJob, group_of
from planner.trainers.checking import Checked, Request
from planner.trainers.checking.import_standins import imported, pretend_ranks

NEEDED = ("torch", "lightning", "lightning_utilities", "torchmetrics")


def asks(job: ExportJob) -> dict[str, Any]:
    """Parameters of the model, and the length of a sample."""
    return {"total": round(total_parameters(job.model)), "length": job.workload.sequence_length}


def one(asked: Request, answer: Checked) -> None:
    """How far the trainer goes with one folder."""
    os.chdir(asked["folder"])
    import lightning
    import torch
    from lightning.fabric.strategies.model_parallel import _setup_device_mesh
    from lightning.pytorch.strategies import ModelParallelStrategy

    plan, layout, last = json.loads(Path("plan.json").read_text(encoding="utf-8")), asked["layout"], asked["world"] - 1
    source = ast.parse(Path("lightning_train.py").read_text(encoding="utf-8"))
    for name, kind in (("Trainer", lightning.Trainer), ("ModelParallelStrategy", ModelParallelStrategy)):
        _takes(source, name, kind)
    answer.reached("parsed")
    answer.same("global batch", plan["micro_batch_size"] * plan["num_microbatches"] * plan["dp"], asked["batch"])
    answer.same("length", plan["sequence_length"], asked["length"])
    answer.same("zero", plan["zero"], layout["zero"])
    answer.same("recompute", ["none", "selective", "full"].index(plan["recompute"]), layout["recompute"])
    answer.reached("validated")
    pretend_ranks(last, asked["world"])
    mesh = _setup_device_mesh(plan["dp"], plan["tp"], asked["world"], torch.device("cpu"))
    for name, axis in (("tp", "tensor_parallel"), ("dp", "data_parallel")):
        ranks = sorted(mesh[axis].mesh.flatten().tolist())
        answer.same(f"{name} group of the last rank", ranks, group_of(Layout(**layout), name, last))
    answer.reached("groups built")
    answer.same("parameters of the model", _parameters(plan, asked["folder"]), asked["total"])
    answer.reached("model built")


def _takes(source: ast.Module, name: str, kind: Any) -> None:
    """A call in the script has only keywords that Lightning's class takes."""
    calls = [node for node in ast.walk(source) if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name]
    known = inspect.signature(kind.__init__).parameters
    unknown = [word.arg for call in calls for word in call.keywords if word.arg not in known]
    if unknown or not calls:
        raise ValueError(f"{name} takes no {', '.join(map(str, unknown))}" if unknown else f"{name} is not called")


def _parameters(plan: dict[str, Any], folder: str) -> int:
    """Parameters of the model that the script builds, on the meta device."""
    import torch

    script = imported(folder)
    with torch.device("meta"):
        part = script.Part(plan, plan["stages"][0]["layers"], first=True, last=True)
    if plan["model"]["tied_embeddings"]:
        part.head.weight = part.embedding.weight
    return sum(one.numel() for one in part.parameters())
