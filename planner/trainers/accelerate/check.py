"""accelerate's launcher parser and plugins, transformers' and TRL's arguments on an exported folder."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking import Checked, Request
from planner.trainers.checking.import_standins import pretend_ranks
from planner.trainers.transformers.training_run import accepted_arguments, check_script_words

NEEDED = ("torch", "accelerate", "transformers", "trl")


def asks(job: ExportJob) -> dict[str, Any]:
    """The machines."""
    return {"nodes": job.num_nodes}


def one(asked: Request, answer: Checked) -> None:
    """How far the trainer goes with one folder."""
    import torch

    os.chdir(asked["folder"])
    from accelerate import ParallelismConfig
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    for name in [name for name in os.environ if name.startswith(("FSDP_", "PARALLELISM_", "ACCELERATE_"))]:
        del os.environ[name]
    layout, zero = asked["layout"], asked["layout"]["zero"]
    torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 8)
    try:
        _known_keys(launch_command_parser())
        check_script_words("accelerate")
        place = ("--machine_rank", str(asked["nodes"] - 1), "--main_process_ip", "first", "--main_process_port", "29500")
        parser = launch_command_parser()
        arguments, *_ = _validate_launch_command(parser.parse_args(["--config_file", "accelerate.yaml", *place, "train.py"]))
        environment = prepare_multi_gpu_env(arguments)
    finally:
        torch.cuda.is_available, torch.cuda.device_count = (lambda: False), (lambda: 0)
    answer.reached("parsed")
    answer.same("processes", arguments.num_processes, asked["world"])
    if asked["nodes"] > 1:
        answer.same("rank of the last node", _node_rank(arguments), asked["nodes"] - 1)
    os.environ.update(environment)
    if zero:
        plugin = FullyShardedDataParallelPlugin()
        answer.same("reshard after forward", plugin.reshard_after_forward, zero == 3)
        answer.same("activation checkpointing", plugin.activation_checkpointing, layout["recompute"] == 2)
        answer.same("fsdp version", plugin.fsdp_version, 2)
        _wrapped(plugin)
        sizes = ParallelismConfig()
        # What it asks an Accelerator of FSDP2, which cannot be made without its processes.
        facts = {"is_fsdp2": True, "multi_device": False, "distributed_type": "FSDP", "is_main_process": True}
        sizes._validate_accelerator(SimpleNamespace(num_processes=asked["world"], **facts))
        answer.same("product of the sizes", sizes.total_size, asked["world"])
    found = accepted_arguments(with_trl=True)
    batch = found.per_device_train_batch_size * found.gradient_accumulation_steps * layout["dp"]
    answer.same("global batch", batch, asked["batch"])
    answer.reached("validated")
    if zero and asked["world"] > 1:
        pretend_ranks(asked["world"] - 1, asked["world"])
        mesh: Any = sizes.build_device_mesh("cpu")
        shard, last = asked["shard"] * layout["cp"], asked["world"] - 1  # states are sharded over context-parallel ranks too
        group = sorted(mesh["dp_shard_cp"].mesh.flatten().tolist())
        answer.same("shard group of the last rank", group, list(range(last - shard + 1, last + 1)))
        answer.reached("groups built")


def _known_keys(parser: Any) -> None:
    """Keys below the two groups of the file become arguments of the launcher; those that are none are passed over in silence."""
    import yaml

    data = yaml.safe_load(Path("accelerate.yaml").read_text(encoding="utf-8"))
    known = set(vars(parser.parse_args(["train.py"])))
    unknown = [key for group in ("fsdp_config", "parallelism_config") for key in data.get(group, {}) if key not in known]
    if unknown:
        raise ValueError(f"accelerate.yaml: unknown keys {', '.join(unknown)}")


def _wrapped(plugin: Any) -> None:
    """The plugin finds the class to wrap in one layer of the exported model. Raises ValueError."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if not Path("model", "config.json").is_file():
        return
    config = AutoConfig.from_pretrained("./model")
    config.num_hidden_layers = 1
    with torch.device("meta"):
        plugin.set_auto_wrap_policy(AutoModelForCausalLM.from_config(config))


def _node_rank(arguments: Any) -> int | None:
    """The rank that torch's elastic agent gives this node; None where it sorts nodes itself."""
    import torch.distributed.run as torch_run
    from accelerate.utils import _filter_args

    arguments = _filter_args(arguments, torch_run.get_args_parser(), ["train.py"])
    launch, *_ = torch_run.config_from_args(arguments)
    return launch.rdzv_configs["rank"] if launch.rdzv_backend == "static" else None
