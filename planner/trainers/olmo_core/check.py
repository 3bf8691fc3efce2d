"""OLMo-core's own configuration classes, world mesh and model, made by the exported script."""

import importlib
import itertools
import os
import sys
from pathlib import Path
from typing import Any

from planner.cost.parameters import total_parameters
from planner.layout import Layout
from planner.trainers.bundle.target import ExportJob, group_of
from planner.trainers.checking import Checked, Request
from planner.trainers.checking.import_standins import hide, pretend_ranks, settle_torch, stand_in

NEEDED = ("torch", "numpy", "olmo_core", "dataclass_extensions", "bettermap")


def asks(job: ExportJob) -> dict[str, Any]:
    """Parameters of the model, virtual stages, the length of a sample."""
    stages = [len(layers) for _, _, layers in job.virtual_stages()]
    return {"total": round(total_parameters(job.model)), "stages": stages, "length": job.workload.sequence_length}


def prepare() -> None:
    """Once, before the first folder."""
    settle_torch()
    stand_in("triton")
    hide("cached_path")  # downloads


def one(asked: Request, answer: Checked) -> None:
    """How far the trainer goes with one folder."""
    os.chdir(asked["folder"])
    sys.path.insert(0, asked["folder"])
    sys.modules.pop("olmo_train", None)
    importlib.invalidate_caches()
    try:
        script = importlib.import_module("olmo_train")
    finally:
        sys.path.remove(asked["folder"])
    module, layout = script.train_module_config(3e-4), asked["layout"]
    dataset, loader = script.data_config(["data/smoke.npy"], "work")
    script.trainer_config("output", 3, True)
    answer.reached("parsed")
    length, dp = asked["length"], layout["dp"]
    answer.same("length", (dataset.sequence_length, module.max_sequence_length), (length, length))
    answer.same("global batch", loader.global_batch_size, asked["batch"] * length)
    rounds, left = divmod(loader.global_batch_size, module.rank_microbatch_size * dp)
    answer.same("microbatches", (rounds, left), (layout["num_microbatches"], 0))
    answer.same("recompute", 2 * (module.ac_config is not None), layout["recompute"])
    _stages(asked, module, answer)
    answer.reached("validated")
    _mesh(asked, module, answer)
    answer.reached("groups built")
    model = script.model_config().build(init_device="meta")
    answer.same("parameters of the model", sum(each.numel() for each in model.parameters()), asked["total"])
    answer.reached("model built")
    for name in ("run.sh", "smoke.sh"):
        if "olmo_train.py" not in Path(name).read_text(encoding="utf-8"):
            raise ValueError(f"{name} does not start olmo_train.py")


def _stages(asked: Request, module: Any, answer: Checked) -> None:
    """Layers of every virtual stage, as the pipeline's own split points say."""
    layers = sum(asked["stages"])
    ends = [0, *(module.pp_config.get_split_points(layers) if module.pp_config else []), layers]
    answer.same("layers per stage", [b - a for a, b in itertools.pairwise(ends)], asked["stages"])


def _mesh(asked: Request, module: Any, answer: Checked) -> None:
    """The last rank's groups on OLMo-core's world mesh are those that the plan was priced with."""
    from olmo_core.distributed import parallel

    last, layout = asked["world"] - 1, Layout(**asked["layout"])
    pretend_ranks(last, asked["world"])
    parallel._WORLD_MESH = None
    parts = {"dp": module.dp_config, "tp": module.tp_config, "pp": module.pp_config}
    mesh = parallel.build_world_mesh(**parts, device_type="cpu")
    found = {"dp": parallel.get_dp_mesh(mesh)}
    found |= {"tp": parallel.get_tp_mesh(mesh)} if module.tp_config else {}
    found |= {"pp": parallel.get_pp_mesh(mesh)} if module.pp_config else {}
    for name, each in found.items():
        answer.same(f"{name} group of the last rank", sorted(each.mesh.flatten().tolist()), group_of(layout, name, last))
    sharded = parallel.get_dp_model_mesh(mesh).mesh.shape[-1]
    answer.same("shard group", sharded, asked["shard"])
