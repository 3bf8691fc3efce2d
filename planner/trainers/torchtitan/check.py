"""torchtitan's ConfigManager, ParallelDims, model and pipeline split on an exported folder."""

import contextlib
import importlib
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

from planner.cost.parameters import total_parameters
from planner.layout import Layout, Recompute
from planner.trainers.bundle.target import ExportJob, group_of
from planner.trainers.checking import Checked, Request
from planner.trainers.checking.import_standins import pretend_gpu, pretend_ranks, settle_torch, stand_in
from planner.trainers.checking.started import own_words, started

NEEDED = ("torch", "torchtitan", "tyro")
RECOMPUTE = {Recompute.NONE: "NoneType", Recompute.SELECTIVE: "SelectiveAC.Config", Recompute.FULL: "FullAC.Config"}
"""Class of config.activation_checkpoint."""


def asks(job: ExportJob) -> dict[str, Any]:
    """Virtual stages and parameters of the model, which are counted on the meta device where ``deep`` asks for it."""
    stages = job.virtual_stages()
    return {
        "stages": [len(layers) for _, _, layers in stages], "ranks": [rank for rank, _, _ in stages],
        "total": round(total_parameters(job.model)),
    }  # fmt: skip


def prepare() -> None:
    """Once, before the first folder."""
    settle_torch()
    stand_in("triton")


def one(asked: Request, answer: Checked) -> None:
    """How far the trainer goes with one folder."""
    pretend_gpu(*asked["capability"])
    sys.path.insert(0, asked["folder"])
    sys.modules.pop("plan_config", None)
    importlib.invalidate_caches()
    os.chdir(asked["folder"])
    from torchtitan.tools import utils

    # Imported by name where it is asked, so every module that holds it has to answer for the GPU of the plan.
    capable = "has_cuda_capability"
    for module in [utils, *(one for name, one in sys.modules.items() if "torchtitan.components.quantization" in name)]:
        if hasattr(module, capable):
            setattr(module, capable, lambda major, minor: [major, minor] <= asked["capability"])
    if asked["precision"] in ("fp8", "mxfp8") and importlib.util.find_spec("torchao") is None:
        answer.missing = "torchao is not installed here, and the plan trains in 8 bits"
        return
    words = {run: ["--module", "plan_config", "--config", config] for run, config in (("run", "plan"), ("smoke", "smoke"))}
    if Path(asked["folder"], "run.sh").is_file():
        words = {run: own_words(started(Path(asked["folder"]), f"{run}.sh")[0], "torchtitan.train") for run in words}
    try:
        _parsed(words["smoke"])
        config = _parsed(words["run"])
    finally:
        sys.path.remove(asked["folder"])
    answer.reached("parsed")
    dims = _validate(asked, config, answer)
    answer.reached("validated")
    pretend_ranks(asked["world"] - 1, asked["world"])
    dims.build_mesh()
    if dims.pp_enabled:
        _schedule(config, dims)
    for name in ("tp", "cp", "dp", "pp", "ep"):
        mesh = dims.get_optional_mesh("batch" if name == "dp" else name)
        if mesh is not None:
            ranks = group_of(Layout(**asked["layout"]), name, asked["world"] - 1)
            answer.same(f"{name} group of the last rank", sorted(mesh.mesh.flatten().tolist()), ranks)
    answer.reached("groups built")
    if asked.get("deep"):
        import torch

        with torch.device("meta"):
            model = config.model_spec.model.build()
        count = sum(one.numel() for one in model.parameters())
        answer.same("parameters of the model", count, asked["total"])
        answer.reached("model built")


def _parsed(words: list[str]) -> Any:
    """The configuration of a command line. Raises ValueError with what the parser prints before it leaves."""
    from torchtitan.config import ConfigManager

    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            return ConfigManager().parse_args(words)
    except SystemExit as error:
        said = " ".join(re.findall(r"[\w.,:'-]+", printed.getvalue()))
        raise ValueError(said or "the parser refused the command line") from error


def _validate(asked: Request, config: Any, answer: Checked) -> Any:
    """The checks that Trainer.__init__ makes before it builds anything, by torchtitan's own functions."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.pipeline_parallel import _get_pp_rank_to_stage_indices_mapping as mapping

    layout, parallel, training = asked["layout"], config.parallelism, config.training
    dims = ParallelDims.from_config(parallel, asked["world"])
    config.model_spec.model.update_from_config(config=config)
    divisor = (dims.tp if parallel.enable_sequence_parallel else 1) * (2 * dims.cp if dims.cp > 1 else 1)
    if training.seq_len % divisor:
        raise ValueError(f"sequence length {training.seq_len} must be divisible by {divisor}")
    replicas = dims.dp_replicate * dims.dp_shard
    steps, left = divmod(training.global_batch_size, training.local_batch_size * replicas)
    if left:
        raise ValueError("the global batch must be a multiple of the local batch times the data-parallel degree")
    if layout["zero"] and asked["shard"] > 1:
        wanted = "always" if layout["zero"] == 3 else "never"
        answer.same("reshard after forward", parallel.fsdp_reshard_after_forward, wanted)
    answer.same("recompute", type(config.activation_checkpoint).__qualname__, RECOMPUTE[layout["recompute"]])
    answer.same("global batch", training.global_batch_size, asked["batch"])
    parts = training.local_batch_size // parallel.pipeline_parallel_microbatch_size if dims.pp_enabled else 1
    answer.same("microbatches", steps * parts, layout["num_microbatches"])
    if dims.pp_enabled:
        split = parallel.module_fqns_per_model_part
        layers = [sum(name.startswith("layers.") for name in part) for part in split]
        answer.same("layers per stage", layers, asked["stages"])
        held = [mapping(rank, dims.pp, parallel.pipeline_parallel_schedule, len(split)) for rank in range(dims.pp)]
        owners = {stage: rank for rank, mine in enumerate(held) for stage in mine}
        answer.same("rank of every stage", [owners[stage] for stage in range(len(split))], asked["ranks"])
        single = issubclass(get_schedule_class(parallel.pipeline_parallel_schedule), PipelineScheduleSingle)
        if single != (len(split) == dims.pp):
            raise ValueError(f"{parallel.pipeline_parallel_schedule} with {len(split)} stages on {dims.pp} ranks")
    return dims


def _schedule(config: Any, dims: Any) -> None:
    """The schedule that torchtitan builds, around stages that hold nothing: its own rules for stages and microbatches."""
    import torch
    from torch.distributed.pipelining import PipelineStage
    from torchtitan.distributed.pipeline_parallel import _build_pipeline_schedule
    from torchtitan.distributed.pipeline_parallel import _get_pp_rank_to_stage_indices_mapping as mapping

    parallel, mesh = config.parallelism, dims.get_mesh("pp")
    number = len(parallel.module_fqns_per_model_part)
    mine = mapping(mesh.get_local_rank(), dims.pp, parallel.pipeline_parallel_schedule, number)
    device, group = torch.device("cpu"), mesh.get_group()
    stages = [PipelineStage(torch.nn.Identity(), stage, number, device, group=group) for stage in mine]
    _build_pipeline_schedule(
        parallelism=parallel, local_batch_size=config.training.local_batch_size, stages=stages, loss_fn=torch.nn.Identity()
    )  # fmt: skip
