"""axolotl: its YAML file, with FSDP2 settings of its own or DeepSpeed's JSON."""

from __future__ import annotations

import json
from typing import Any

from planner import library
from planner.layout import Recompute
from planner.trainers.accelerate import export as accelerate
from planner.trainers.bundle.target import ExportJob, Rendered, Setting, Target, library_trainer
from planner.trainers.deepspeed import export as deepspeed
from planner.trainers.transformers.fine_tuning import MODEL, SMOKE_PREPARE, SMOKE_STEPS, shared_refusals, smoke_data
from planner.trainers.transformers.training_run import OPTIMIZERS

OWN_OPTIMIZERS = {**OPTIMIZERS, "adam_8bit": "ao_adamw_8bit"}
"""adamw_torch_8bit is checked to work with FSDP2 only under axolotl's own name [utils/schemas/validation.py]."""


def refusals(job: ExportJob) -> list[str]:
    """What axolotl or the library below it cannot run, with its rule."""
    layout, work = job.layout, job.workload
    found = shared_refusals(job, "axolotl", offloads_activations=True)
    below = _back_end(job).refusals(job)
    found += [one for one in below if not any(one.split(":")[0] == known.split(":")[0] for known in found)]
    if work.precision not in ("bf16", "fp16", "fp32", "fp8"):
        found.append(
            f"precision {work.precision}: axolotl trains in bf16, fp16, fp32 or fp8 [AxolotlInputConfig]; use one of them"
        )
    if int(layout.offload_activations) and int(layout.recompute) != Recompute.FULL:
        found.append(
            "offload_activations without recompute full: axolotl moves the inputs of checkpointed layers; use recompute full"
        )
    return found


def _back_end(job: ExportJob) -> Any:
    """The module whose rules hold below axolotl."""
    return deepspeed if library_trainer(job.plan.trainer) == "deepspeed" else accelerate


def config(job: ExportJob, *, smoke: bool = False) -> dict[str, Any]:
    """axolotl.yaml. Unknown keys are accepted silently, so every key here is held against the schema in the tests."""
    layout, work = job.layout, job.workload
    data: dict[str, Any] = {
        "base_model": "./model-link",
        "reinit_weights": smoke,
        "datasets": [
            {
                "path": "data/smoke.jsonl" if smoke else "./data-link",
                "type": "completion",
                "ds_type": "json",
                "field": "text",
            }
        ],
        "dataset_prepared_path": "prepared-smoke" if smoke else "prepared",
        "sequence_len": work.sequence_length,
        "sample_packing": True,
        "pad_to_sequence_len": True,
        "attn_implementation": "flash_attention_2",
        "micro_batch_size": int(layout.micro_batch_size),
        "gradient_accumulation_steps": int(layout.num_microbatches),
        "max_steps": SMOKE_STEPS if smoke else 1000,
        "bf16": work.precision in ("bf16", "fp8"),
        "fp16": work.precision == "fp16",
        "fp8": work.precision == "fp8",
        "tf32": False,
        "optimizer": OWN_OPTIMIZERS[work.optimizer],
        "learning_rate": deepspeed.LEARNING_RATE,
        "lr_scheduler": "cosine",
        "max_grad_norm": 1.0,
        "tensor_parallel_size": 1,
        "context_parallel_size": 1,
        "logging_steps": 1,
        "output_dir": "smoke-output" if smoke else "output",
        "save_strategy": "no" if smoke else "steps",
    }
    if work.lora_rank:
        data |= {
            "adapter": "lora",
            "lora_r": work.lora_rank,
            "lora_alpha": 2 * work.lora_rank,
            "lora_target_linear": True,
        }
    full = int(layout.recompute) == Recompute.FULL
    if full:
        data["activation_offloading"] = bool(layout.offload_activations)
    return {**data, **_sharding(job, full)}


def _sharding(job: ExportJob, full: bool) -> dict[str, Any]:
    """DeepSpeed's file, FSDP2 with its mesh, or plain replicas. FSDP and DeepSpeed together would be accepted silently."""
    layout = job.layout
    checkpoint = {
        "gradient_checkpointing": full,
        **({"gradient_checkpointing_kwargs": {"use_reentrant": False}} if full else {}),
    }
    if _back_end(job) is deepspeed:
        return {**checkpoint, "deepspeed": "ds_config.json"}
    if not int(layout.zero):
        return checkpoint
    shard = int(layout.shard)
    return {
        "fsdp_version": 2,
        "fsdp_config": {
            "reshard_after_forward": int(layout.zero) == 3,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": "SHARDED_STATE_DICT",
            "offload_params": False,
            "cpu_ram_efficient_loading": False,
            "activation_checkpointing": full,
        },
        "dp_shard_size": shard,
        "dp_replicate_size": int(layout.dp) // shard,
    }


def render(job: ExportJob) -> Rendered:
    """axolotl.yaml, its smoke variant, and DeepSpeed's file where the plan is one of DeepSpeed."""
    sharded = _back_end(job) is deepspeed
    files = {
        "axolotl.yaml": library.dump_yaml(config(job)), "axolotl-smoke.yaml": library.dump_yaml(config(job, smoke=True)),
        "make_smoke_data.py": smoke_data(job),
    }  # fmt: skip
    if sharded:
        files["ds_config.json"] = json.dumps(deepspeed.config(job), indent=2) + "\n"
    return Rendered(
        files=files,
        entry=("-m", "axolotl.cli.train", "axolotl.yaml"),
        smoke=("-m", "axolotl.cli.train", "axolotl-smoke.yaml"),
        prepare=(
            "# The file names these links, so that it does not change with the place of model and data.",
            'ln -sfn "$MODEL" model-link',
            'ln -sfn "$DATASET" data-link',
            *SMOKE_PREPARE,
        ),
        environment={"AXOLOTL_DO_NOT_TRACK": Setting(value="1", why="No telemetry from your cluster.")},
        variables={
            "MODEL": Setting(value=MODEL.value, why="Folder of the model: config.json, tokenizer and weights."),
            "DATASET": Setting(value="data", why="Folder with *.jsonl files, one text a line under the key 'text'."),
        },
        notes=(
            "Packed samples of the full length are what was priced; the number of steps and the learning rate are placeholders.",
            "Several versions of libraries are pinned by axolotl: use an environment of its own.",
        ),
        install=(f"pip install 'axolotl{TARGET.versions}'", *(("pip install 'deepspeed>=0.16'",) if sharded else ())),
    )


TARGET = Target(
    name="axolotl",
    title="axolotl (YAML, FSDP2 or DeepSpeed)",
    trainers=("fsdp", "deepspeed"),
    versions=">=0.19,<0.20",
    package="axolotl",
    level="validated",
    source="axolotl 0.19.0: utils/schemas/config.py, utils/schemas/fsdp.py, utils/schemas/validation.py, utils/distributed.py",
    refusals=refusals,
    render=render,
)
