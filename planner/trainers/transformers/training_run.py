"""What the targets around Hugging Face share: config.json of the model, the arguments of transformers, the script, and what
its front ends have below them."""

import json
import warnings
from pathlib import Path
from typing import Any

from planner.layout import Recompute
from planner.model import ModelSpec
from planner.trainer_options import spelled
from planner.trainers import load
from planner.trainers.bundle import model_config
from planner.trainers.bundle.quoting import Expression, filled_text, json_text, refused, run_of, template
from planner.trainers.bundle.target import ExportJob, Rendered, library_trainer
from planner.trainers.checking.setting_names import flags
from planner.trainers.checking.started import own_words, started
from planner.workload import Workload

OPTIMIZERS = {
    "adam": "adamw_torch_fused", "adam_8bit": "adamw_torch_8bit", "paged_adam": "paged_adamw_32bit",
    "paged_adam_8bit": "paged_adamw_8bit", "adafactor": "adafactor", "lion": "lion_32bit", "sgd": "sgd",
}  # fmt: skip
"""transformers.training_args.OptimizerNames, by optimizer."""
LAYERS = {
    "llama": "LlamaDecoderLayer", "qwen2": "Qwen2DecoderLayer", "qwen3": "Qwen3DecoderLayer",
    "qwen3_moe": "Qwen3MoeDecoderLayer", "mixtral": "MixtralDecoderLayer",
}  # fmt: skip
"""Class of one transformer layer, by model_type: the families that the script was run with."""
LIGER = {"fused_linear_cross_entropy": True, "cross_entropy": False, "rope": False, "rms_norm": False, "swiglu": False}
"""Head and loss of Liger, and none of its other kernels.  [transformers, integrations/liger.py]"""
QUANTISED = ("int8", "nf4", "nf4_dq")
"""Bases that bitsandbytes quantises while they are loaded."""
SMOKE_STEPS = 3
"""Optimizer steps of a smoke run."""


def family(model: ModelSpec) -> str:
    """The model_type of LAYERS that has exactly this architecture; empty = none."""
    kind = model_config.family(model)
    return kind if kind in LAYERS else ""


def shared_refusals(job: ExportJob) -> list[str]:
    """What transformers' Trainer does not have, whatever shards the model."""
    found, options = [], spelled(job.plan.trainer)[2]
    if job.layout.recompute == Recompute.SELECTIVE:
        found.append("recompute selective: checkpoints of transformers cover whole layers; use full or none")
    if options.get("loss") == "chunked":
        found.append("option loss=chunked: transformers' Trainer has all logits at once, or Liger's loss; use loss=fused_linear")
    if options.get("expert_masks", "off") != "off":
        found.append("option expert_masks: models of transformers have no layers of deepspeed.moe, only Megatron-DeepSpeed has")
    if options.get("dropout") == "on":
        found.append("option dropout=on: layers of Megatron-DeepSpeed have it; those of transformers are made without")
    return found


def training_arguments(job: ExportJob) -> dict[str, Any]:
    """Arguments of transformers.TrainingArguments that the plan decides, every one written out."""
    layout, work = job.layout, job.workload
    return {
        "per_device_train_batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.num_microbatches,
        "bf16": work.precision in ("bf16", "fp8"),  # else in weights alone, without autocast
        "fp16": work.precision == "fp16",
        "optim": OPTIMIZERS[work.optimizer],
        **({"optim_args": "momentum=0.9"} if work.optimizer == "sgd" else {}),
        **({"use_liger_kernel": True, "liger_kernel_config": LIGER} if job.trainer.stored.loss == "fused_linear" else {}),
        "torch_compile": False,
        "ddp_find_unused_parameters": False,
    }


def _loaded(work: Workload) -> str:
    """Dtype of the model as it is loaded: that of activations where nothing of it is trained in mixed precision."""
    pure = work.precision == "bf16_true" or (work.lora_rank and work.precision != "fp32")
    return ("float16" if work.precision == "fp16" else "bfloat16") if pure else "float32"


def rendered(
    job: ExportJob, own: dict[str, str], training: dict[str, Any], *, launcher: tuple[str, ...] = (), deepspeed: str = ""
) -> Rendered:
    """The script with training.json around a file of the target's own: what is behind transformers differs, this does not.

    ``training``: settings of training.json; ``launcher``: words before the script, of one that starts a process per GPU itself;
    ``deepspeed``: its versions, where it is below.
    """
    work, kind = job.workload, family(job.model)
    settings = {
        "training_arguments": training.pop("training_arguments"), "sequence_length": work.sequence_length,
        "attention": "sdpa", "lora_rank": work.lora_rank, "dtype": _loaded(work), "offload_activations": False,
        "autocast_adapters": work.precision != "bf16_true", **training,
    }  # fmt: skip
    files = {**own, "training.json": json_text(settings), "train.py": template("transformers", "transformers_train.txt")}
    if kind:
        files["model/config.json"] = model_config.config_file(job)
    return run_of(
        job, "transformers", files, family=kind, launcher=Expression(" ".join(launcher)),
        start="node" if launcher else "torchrun",
        options=Expression("--deepspeed ds_config.json" if deepspeed else ""), deepspeed=Expression(deepspeed),
    )  # fmt: skip


def on_deepspeed(job: ExportJob) -> bool:
    """Whether DeepSpeed is the library below the front end; else it is FSDP by accelerate."""
    return library_trainer(job.plan.trainer) == "deepspeed"


def back_end(job: ExportJob) -> Any:
    """The exporter of the library below."""
    return load("deepspeed" if on_deepspeed(job) else "accelerate", "export")


def front_end_refusals(job: ExportJob, name: str) -> list[str]:
    """What no front end around transformers' Trainer can say, then what the library below it refuses, but for the base of adapters
    and the objective, which are the front end's own."""
    found = refused(job, "transformers", front_end=name)
    said = {one.split(":")[0] for one in found}
    if job.workload.frozen_weights in QUANTISED:
        said.add(f"frozen_weights {job.workload.frozen_weights}")
    said.add("objective dpo")
    return [*found, *_of_experts(job, name), *(one for one in back_end(job).refusals(job) if one.split(":")[0] not in said)]


def _of_experts(job: ExportJob, name: str) -> list[str]:
    """Options about experts under adapters that a front end does not write."""
    work, trainer = job.workload, job.trainer
    if not work.lora_rank or not work.model.is_moe:
        return []
    found = []
    if (value := trainer.option("frozen_experts")) == "linear" or (value == "quantised" and name != "axolotl"):
        found.append(f"option frozen_experts {value}: the export to {name} has experts as transformers 5 has them; choose half")
    if trainer.option("expert_adapters") == "on" and name != "axolotl":
        found.append(f"option expert_adapters on: the export to {name} writes adapters on linear layers alone; choose off")
    return found


def smoke_data(job: ExportJob) -> str:
    """Script that writes enough random text for the smoke run: a word is at least one token."""
    lines = -(-SMOKE_STEPS * job.workload.tokens // 512)
    return filled_text(job, "transformers/make_smoke_data.txt", steps=SMOKE_STEPS, lines=lines)


def check_script_words(program: str = "torchrun") -> None:
    """run.sh and smoke.sh of the folder here give train.py options that it has. Raises ValueError."""
    folder = Path()
    if not (folder / "run.sh").is_file():
        return
    known = flags(folder / "train.py")
    for script in ("run.sh", "smoke.sh"):
        words = own_words(started(folder, script, program)[0], "train.py")
        unknown = [word for word in words if word.startswith("--") and word not in known]
        if unknown:
            raise ValueError(f"{script}: unknown options {', '.join(unknown)} of train.py")


def accepted_arguments(*, with_trl: bool = False) -> Any:
    """transformers' own object of the arguments in training.json, which TRL accepts too; without precision, which needs a GPU."""
    from transformers import TrainingArguments

    settings = json.loads(Path("training.json").read_text(encoding="utf-8"))
    on_cpu = {**settings["training_arguments"], "bf16": False, "fp16": False, "use_cpu": True, "output_dir": "output"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if with_trl:
            from trl import SFTConfig

            SFTConfig(max_length=settings["sequence_length"], packing=True, **on_cpu)
        return TrainingArguments(**on_cpu)
