"""DeepSpeedConfig, AutoEP's rules and transformers' arguments on an exported folder."""

import json
import os
from typing import Any

from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking import Checked, Request
from planner.trainers.transformers.training_run import accepted_arguments, check_script_words

NEEDED = ("torch", "deepspeed", "transformers")
PARTS = {"zero_optimization", "sequence_parallel_size", "tensor_parallel", "expert_parallel"}
"""Keys that do not stand among its constants; what they say is compared below."""


def asks(job: ExportJob) -> dict[str, Any]:
    """Whether the model has experts."""
    return {"moe": job.model.is_moe}


def environment(_: ExportJob) -> dict[str, str]:
    """No accelerator is looked for."""
    return {"DS_ACCELERATOR": "cpu"}


def one(asked: Request, answer: Checked) -> None:
    """How far the trainer goes with one folder."""
    import deepspeed.comm as communication
    from deepspeed.runtime.config import DeepSpeedConfig

    os.chdir(asked["folder"])
    communication.get_rank, communication.get_world_size = (lambda *_: 0), (lambda *_: asked["world"])
    layout = asked["layout"]
    with open("ds_config.json", encoding="utf-8") as file:
        data = json.load(file)
    unknown = sorted(set(data) - _known())
    if unknown:
        raise ValueError(f"ds_config.json: unknown keys {', '.join(unknown)}")
    answer.reached("parsed")
    check_script_words()
    found = DeepSpeedConfig(data)
    answer.same("zero stage", int(found.zero_optimization_stage), layout["zero"])
    answer.same("microbatches", found.gradient_accumulation_steps, layout["num_microbatches"])
    answer.same("micro batch", found.train_micro_batch_size_per_gpu, layout["micro_batch_size"])
    answer.same("tensor parallel size", max(found.tensor_parallel_config.autotp_size, 1), layout["tp"])
    answer.same("global batch", found.train_batch_size // layout["tp"], asked["batch"])
    if asked["moe"] and found.expert_parallel_config and found.expert_parallel_config.enabled:
        _experts(asked, found, answer)
    arguments = accepted_arguments()
    answer.same("gradient checkpointing", arguments.gradient_checkpointing, layout["recompute"] == 2)
    answer.same("settings that transformers has otherwise", _mismatches(asked, data, arguments), [])
    answer.reached("validated")


def _known() -> set[str]:
    """Keys of the top, which DeepSpeed reads where they are there and passes over in silence where they are misspelt."""
    from deepspeed.runtime import constants

    return {one for one in vars(constants).values() if isinstance(one, str)} | PARTS


def _mismatches(asked: Request, data: dict[str, Any], arguments: Any) -> list[str]:
    """Settings of the JSON that its own comparison with transformers' arguments finds different."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    type(arguments).world_size = property(lambda _: asked["world"])
    arguments.bf16, arguments.fp16 = (bool(data[name]["enabled"]) for name in ("bf16", "fp16"))
    both = HfTrainerDeepSpeedConfig(data)
    both.trainer_config_process(arguments)
    return list(both.mismatches)


def _experts(asked: Request, found: object, answer: Checked) -> None:
    from deepspeed.module_inject.auto_ep_config import validate_autoep_config
    from deepspeed.module_inject.auto_ep_folding import build_folding_spec, validate_folding_global

    layout, config = asked["layout"], found.expert_parallel_config  # type: ignore[attr-defined]
    tp, sp = layout["tp"], layout["cp"]
    validate_autoep_config(config, asked["world"], 1, tp, sp)
    spec = build_folding_spec(
        world_size=asked["world"], pp_size=1, tp_size=tp, ep_size=config.autoep_size,
        etp_size=config.expert_tensor_parallel_size, mp_mode="tp" if tp > 1 else "sp",
    )  # fmt: skip
    validate_folding_global(
        spec, zero_stage=layout["zero"], sp_size=sp, deepcompile_enabled=False, use_data_before_expert_parallel=False,
        mpu=None, autoep_enabled=True, tp_preset=None, ep_preset=config.preset_model,
        zero_offload_optimizer=layout["offload_optimizer"] > 0 or layout["offload_parameters"],
        zero_offload_param=layout["offload_parameters"],
    )  # fmt: skip
    answer.same("expert data parallel degree", spec.edp_size, asked["world"] // (layout["ep"] * layout["etp"]))
