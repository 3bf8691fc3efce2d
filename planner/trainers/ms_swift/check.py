"""ms-swift's own arguments, of transformers' side and of Megatron's, on an exported folder."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

from planner.trainers.bundle.model_config import model_config
from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking import Checked, Request
from planner.trainers.checking.import_standins import (
    hide,
    modern_typing,
    pretend_gpu,
    pretend_ranks,
    settle_torch,
    stand_in,
)
from planner.trainers.ms_swift.export import on_megatron

NEEDED = ("torch", "transformers", "peft", "datasets", "modelscope", "swift")
ABSENT = ("triton", "transformer_engine", "flash_attn", "oss2", "aiohttp", "nltk", "rouge", "openai")
"""What its modules import and its arguments never call."""


def asks(job: ExportJob) -> dict[str, Any]:
    """The side, the model as a stand-in for the user's folder, and what the arguments must say."""
    return {
        "megatron": on_megatron(job), "model": model_config(job.model), "length": job.workload.sequence_length,
        "lora_rank": job.workload.lora_rank, "capability": [9, 0],
    }  # fmt: skip


def prepare() -> None:
    """Once, before the first folder."""
    settle_torch()
    modern_typing()
    stand_in(*ABSENT)
    hide("mcore_bridge")  # converts weights; it patches layers of Transformer Engine when it is imported
    pretend_gpu(9, 0)


def one(asked: Request, answer: Checked) -> None:
    """How far the trainer goes with one folder."""
    os.chdir(asked["folder"])
    if asked["model"] is None:
        answer.missing = "no family of transformers known here has the plan's model, and the arguments ask for its config.json"
        return
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(asked["world"]), LOCAL_WORLD_SIZE="8", MASTER_ADDR="localhost")
    settings = yaml.safe_load(Path("ms_swift.yaml").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(asked["model"]), encoding="utf-8")
        settings |= {"model": folder, "dataset": ["data/smoke.jsonl"], "output_dir": f"{folder}/output", "add_version": False,
                     "model_type": asked["model"]["model_type"], "template": "dummy"}  # fmt: skip
        (_megatron if asked["megatron"] else _transformers)(asked, settings, answer)


def _words(settings: dict[str, Any]) -> list[str]:
    """Words of the command line, as cli/main.py makes them of the file."""
    words = []
    for name, value in settings.items():
        several = [str(each) for each in value] if isinstance(value, list) else None
        words += [f"--{name}", *(several or [json.dumps(value) if isinstance(value, dict) else str(value)])]
    return words


def _parsed(kind: Any, settings: dict[str, Any]) -> Any:
    from transformers import HfArgumentParser

    try:
        found, rest = HfArgumentParser([kind]).parse_args_into_dataclasses(_words(settings), return_remaining_strings=True)
    except SystemExit as error:
        raise ValueError("the parser refused a value") from error
    if rest:
        raise ValueError(f"unknown arguments: {' '.join(rest)}")
    return found


def _transformers(asked: Request, settings: dict[str, Any], answer: Checked) -> None:
    """SftArguments or PretrainArguments with transformers' own arguments behind them; precision needs a GPU and is left out."""
    from swift.arguments import PretrainArguments, SftArguments

    layout, precision = asked["layout"], (settings.pop("bf16"), settings.pop("fp16"))
    pretend_ranks(0, asked["world"])
    kind = SftArguments if asked["lora_rank"] else PretrainArguments
    found = _parsed(kind, {**settings, "bf16": False, "fp16": False, "use_cpu": True, "max_steps": 3})
    answer.reached("parsed")
    train = found.training_args
    batch = train.per_device_train_batch_size * train.gradient_accumulation_steps * layout["dp"]
    answer.same("global batch", batch, asked["batch"])
    answer.same("context parallelism", found.sequence_parallel_size, layout["cp"])
    answer.same("length", (found.max_length, found.packing), (asked["length"], True))
    answer.same("one precision at most", all(precision), False)
    answer.same("FSDP2", bool(found.fsdp), layout["zero"] > 0)
    shards: dict[str, Any] = (getattr(found, "fsdp_config", None) or {}) if found.fsdp else {}
    answer.same("reshard after forward", bool(shards.get("reshard_after_forward")), layout["zero"] == 3)
    checkpoints = bool(shards.get("activation_checkpointing") or train.gradient_checkpointing)
    answer.same("recompute", checkpoints, layout["recompute"] == 2)
    _adapters(asked, found, answer)
    answer.reached("validated")


def _megatron(asked: Request, settings: dict[str, Any], answer: Checked) -> None:
    """MegatronSftArguments or MegatronPretrainArguments; initialize_megatron, which needs GPUs, only gives the world."""
    from swift.megatron.arguments import MegatronPretrainArguments, MegatronSftArguments, megatron_args

    layout = asked["layout"]
    megatron_args.initialize_megatron = lambda args: setattr(args, "world_size", asked["world"])
    megatron_args.require_version = lambda *_: None
    pretend_ranks(0, asked["world"])
    kind = MegatronSftArguments if asked["lora_rank"] else MegatronPretrainArguments
    kind._init_output_dir = lambda self: None
    found = _parsed(kind, {**settings, "train_iters": 3})
    answer.reached("parsed")
    answer.same("microbatches", found.num_microbatches, layout["num_microbatches"])
    answer.same("global batch", found.global_batch_size, asked["batch"])
    answer.same("length", (found.seq_length, found.packing), (asked["length"], True))
    degrees = {"tp": found.tensor_model_parallel_size, "pp": found.pipeline_model_parallel_size,
               "cp": found.context_parallel_size, "dp": found.data_parallel_size,
               "vpp": found.virtual_pipeline_model_parallel_size or 1, "ep": found.expert_model_parallel_size}  # fmt: skip
    answer.same("degrees", degrees, {name: layout[name] for name in degrees})
    answer.same("sequence parallelism", found.sequence_parallel, bool(layout["sequence_parallel"]))
    answer.same("sharding", found.use_distributed_optimizer, layout["zero"] == 1)
    answer.same("recompute", found.recompute_granularity, [None, "selective", "full"][layout["recompute"]])
    _adapters(asked, found, answer)
    answer.reached("validated")


def _adapters(asked: Request, found: Any, answer: Checked) -> None:
    rank = found.lora_rank if found.tuner_type == "lora" else 0
    answer.same("rank of the adapters", rank, asked["lora_rank"])

