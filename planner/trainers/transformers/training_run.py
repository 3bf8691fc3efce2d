"""What the targets around Hugging Face share: config.json of the model, the arguments of transformers, the script."""

from __future__ import annotations

import json
from typing import Any

from planner.layout import Recompute
from planner.model import ModelSpec
from planner.trainers.bundle.environment import GROWING_SEGMENTS
from planner.trainers.bundle.target import ExportJob, Rendered, Setting

OPTIMIZERS = {"adam": "adamw_torch_fused", "adam_8bit": "adamw_torch_8bit", "sgd": "sgd"}
"""transformers.training_args.OptimizerNames, by optimizer."""
INSTALL = "pip install 'transformers>=5.23,<6' 'accelerate>=1.15,<2' 'torch>=2.13' datasets"


def family(model: ModelSpec) -> str:
    """The model_type of transformers that has this architecture with sizes alone; empty = none of those known here."""
    plain = (
        model.norm == "rmsnorm" and model.position == "rope" and model.gated and model.activation == "silu"
        and model.norms_per_layer == 2 and not model.parallel_attention and not model.embedding_norm
        and not model.num_windowed_layers and not model.mtp_layers and not model.is_mla and not model.linear_bias
        and not model.expert_bias and not model.router_bias
    )  # fmt: skip
    if not plain:
        return ""
    if not model.is_moe:
        return {(False, False): "llama", (True, False): "qwen2", (False, True): "qwen3"}.get(
            (model.qkv_bias, model.qk_norm), ""
        )
    every = model.num_dense_layers == 0 and model.moe_layer_interval == 1 and not model.shared_expert_ffn_size
    if not every or model.qkv_bias:
        return ""
    return "qwen3_moe" if model.qk_norm else "mixtral"


LAYERS = {
    "llama": "LlamaDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "qwen3_moe": "Qwen3MoeDecoderLayer",
    "mixtral": "MixtralDecoderLayer",
}
"""Class of one transformer layer, by model_type."""


def model_config(model: ModelSpec, sequence_length: int) -> dict[str, Any]:
    """config.json of a model whose family is known."""
    kind = family(model)
    data: dict[str, Any] = {
        "model_type": kind, "num_hidden_layers": model.num_layers, "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim,
        "intermediate_size": model.ffn_size, "vocab_size": model.vocab_size, "hidden_act": "silu",
        "max_position_embeddings": max(model.max_sequence_length, sequence_length),
        "tie_word_embeddings": model.tied_embeddings,
    }  # fmt: skip
    if kind == "mixtral":
        data |= {"num_local_experts": model.num_experts, "num_experts_per_tok": model.top_k,
                 "intermediate_size": model.expert_ffn_size}  # fmt: skip
    if kind == "qwen3_moe":
        data |= {"num_experts": model.num_experts, "num_experts_per_tok": model.top_k, "decoder_sparse_step": 1,
                 "moe_intermediate_size": model.expert_ffn_size, "mlp_only_layers": [], "norm_topk_prob": True}  # fmt: skip
    return data


def shared_refusals(job: ExportJob) -> list[str]:
    """What transformers' Trainer does not have, whatever shards the model."""
    work, found = job.workload, []
    if work.optimizer not in OPTIMIZERS:
        found.append(f"optimizer {work.optimizer} is none of transformers' here; use one of {', '.join(OPTIMIZERS)}")
    if int(job.layout.recompute) == Recompute.SELECTIVE:
        found.append("recompute selective: checkpoints of transformers cover whole layers; use full or none")
    return found


def training_arguments(job: ExportJob) -> dict[str, Any]:
    """Arguments of transformers.TrainingArguments that the plan decides, every one written out."""
    layout, work = job.layout, job.workload
    return {
        "per_device_train_batch_size": int(layout.micro_batch_size),
        "gradient_accumulation_steps": int(layout.num_microbatches),
        "bf16": work.precision in ("bf16", "fp8"),
        "fp16": work.precision == "fp16",
        "optim": OPTIMIZERS[work.optimizer],
        **({"optim_args": "momentum=0.9"} if work.optimizer == "sgd" else {}),
        "torch_compile": False,
        "ddp_find_unused_parameters": False,
    }


def rendered(
    job: ExportJob,
    own: dict[str, str],
    arguments: dict[str, Any],
    *,
    more: dict[str, Any],
    notes: tuple[str, ...],
    install: tuple[str, ...],
    options: tuple[str, ...] = (),
    launcher: tuple[str, ...] = (),
) -> Rendered:
    """The script with training.json around a file of the target's own: what is behind transformers differs, this does not.

    ``more``: further settings of training.json; ``options``: words after the script; ``launcher``: words before it, of a
    launcher that starts one process per GPU itself.
    """
    training = {
        "training_arguments": arguments,
        "sequence_length": job.workload.sequence_length,
        "attention": "sdpa",
        "lora_rank": job.workload.lora_rank,
        "offload_activations": False,
        **more,
    }
    return Rendered(
        files={**own, "training.json": _json(training), **_files(job)},
        entry=(*launcher, *_words(*options)),
        smoke=(*launcher, *_words(*options, smoke=True)),
        start="node" if launcher else "torchrun",
        environment={"PYTORCH_CUDA_ALLOC_CONF": GROWING_SEGMENTS},
        variables=_smoke_variables(_variables(job)),
        notes=(*_notes(job), *notes),
        install=(INSTALL, *install),
    )


def _files(job: ExportJob) -> dict[str, str]:
    """The script and, where the family is known, config.json of the model."""
    found = {"train.py": TRAIN}
    if family(job.model):
        found["model/config.json"] = _json(model_config(job.model, job.workload.sequence_length))
    return found


def _variables(job: ExportJob) -> dict[str, Setting]:
    """What the user sets."""
    known = bool(family(job.model))
    why = "folder or hub name of the model: its config.json, and weights to start from where START=weights"
    return {
        "MODEL": Setting(value="./model" if known else None, why=why),
        "START": Setting(value="config", why="'config' starts from random weights, 'weights' from those of MODEL"),
        "DATASET": Setting(value=None, why="folder or hub name of a data set with a column 'text'"),
        "TOKENIZER": Setting(value=None, why="folder or hub name of the tokenizer"),
        "STEPS": Setting(value="1000", why="optimizer steps"),
    }


def _words(*options: str, smoke: bool = False) -> tuple[str, ...]:
    """Arguments of the script."""
    common = ("--settings", "training.json", "--model", "$MODEL", *options)
    if smoke:
        return ("train.py", *common, "--smoke")
    return (
        "train.py",
        *common,
        "--start",
        "$START",
        "--dataset",
        "$DATASET",
        "--tokenizer",
        "$TOKENIZER",
        "--steps",
        "$STEPS",
    )


def _smoke_variables(found: dict[str, Setting]) -> dict[str, Setting]:
    """Data and tokenizer are needed by the run, not by the smoke run: they get a default that says so."""
    return {
        name: Setting(value="" if one.value is None and name in ("DATASET", "TOKENIZER") else one.value, why=one.why)
        for name, one in found.items()
    }


def _notes(job: ExportJob) -> list[str]:
    """What the user has to know about all of them."""
    found = [
        "train.py also runs TRL's SFTTrainer with the same arguments: add --sft.",
        "Attention is torch's scaled_dot_product_attention, which picks flash attention 2 on the GPUs of the plan.",
    ]
    if not family(job.model):
        found.append(f"The planner writes no config.json for {job.model.name}: set MODEL to one that has it.")
    elif int(job.layout.recompute) == Recompute.NONE:
        found.append(
            "model/config.json says nothing of the base of the rotary positions: set rope_theta to your model's."
        )
    return found


def _json(data: Any) -> str:
    return json.dumps(data, indent=2) + "\n"


TRAIN = '''"""Trains a causal language model with transformers.Trainer, or TRL's SFTTrainer with --sft.

What the plan decided stands in training.json; the launcher and its configuration file say how it is split over GPUs.
"""

import argparse
import json

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, set_seed


class Synthetic(torch.utils.data.Dataset):
    """Random tokens: the smoke run needs no data."""

    def __init__(self, rows: int, length: int, vocab: int) -> None:
        self.tokens = torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Packed(torch.utils.data.IterableDataset):
    """Documents of a data set, one after the other, cut into sequences of one length."""

    def __init__(self, name: str, tokenizer: str, length: int) -> None:
        from datasets import load_dataset
        from transformers import AutoTokenizer

        self.documents = load_dataset(name, split="train", streaming=True)
        self.tokenizer, self.length = AutoTokenizer.from_pretrained(tokenizer), length

    def __iter__(self):
        held = []
        for document in self.documents:
            held += [*self.tokenizer(document["text"])["input_ids"], self.tokenizer.eos_token_id]
            while len(held) >= self.length:
                tokens, held = torch.tensor(held[: self.length]), held[self.length :]
                yield {"input_ids": tokens, "labels": tokens}


def build(options: argparse.Namespace, settings: dict) -> torch.nn.Module:
    """The model, from its config alone or with its weights."""
    attention = settings["attention"]
    if options.start == "weights":
        model = AutoModelForCausalLM.from_pretrained(options.model, attn_implementation=attention, dtype=torch.float32)
    else:
        config = AutoConfig.from_pretrained(options.model)
        config.use_cache = False
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    if settings["lora_rank"]:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=settings["lora_rank"], target_modules="all-linear"))
    return model


def offload_checkpoints(model: torch.nn.Module) -> None:
    """The inputs of checkpointed layers wait in host memory between forward and backward."""
    for layer in model.modules():
        inner = getattr(layer, "_gradient_checkpointing_func", None)
        if inner is None:
            continue

        def saved_on_host(*arguments, inner=inner, **named):
            with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
                return inner(*arguments, **named)

        layer._gradient_checkpointing_func = saved_on_host


def main() -> None:
    """Reads the settings, builds, trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--start", choices=("config", "weights"), default="config")
    parser.add_argument("--deepspeed")
    parser.add_argument("--dataset")
    parser.add_argument("--tokenizer")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--sft", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="no GPU: for a test of the script")
    options = parser.parse_args()
    with open(options.settings) as file:
        settings = json.load(file)
    set_seed(1)
    arguments = {
        "output_dir": "output", "max_steps": options.steps, "logging_steps": 1 if options.smoke else 10,
        "save_strategy": "no" if options.smoke else "steps", "save_steps": 500, "report_to": "none", "learning_rate": 3e-4,
        **settings["training_arguments"],
    }
    if options.cpu:
        arguments |= {"use_cpu": True, "bf16": False, "fp16": False, "optim": "adamw_torch"}
    if options.deepspeed:
        arguments["deepspeed"] = options.deepspeed
    if settings.get("parallelism"):
        from accelerate import ParallelismConfig

        arguments["parallelism_config"] = ParallelismConfig(**settings["parallelism"])
    length = settings["sequence_length"]
    if options.sft:
        from trl import SFTConfig, SFTTrainer

        config = SFTConfig(max_length=length, packing=True, **arguments)
    else:
        config = TrainingArguments(**arguments)
    model = build(options, settings)
    if options.smoke:
        rows = config.per_device_train_batch_size * config.gradient_accumulation_steps * config.world_size
        data = Synthetic(rows, length, model.config.vocab_size)
    elif options.sft:
        from datasets import load_dataset

        data = load_dataset(options.dataset, split="train")
    else:
        data = Packed(options.dataset, options.tokenizer, length)
    if options.sft:
        from transformers import AutoTokenizer

        trainer = SFTTrainer(model=model, args=config, train_dataset=data,
                             processing_class=AutoTokenizer.from_pretrained(options.tokenizer))
    else:
        trainer = Trainer(model=model, args=config, train_dataset=data)
    if settings["offload_activations"]:
        model.gradient_checkpointing_enable(config.gradient_checkpointing_kwargs)
        offload_checkpoints(model)
    trainer.train()


if __name__ == "__main__":
    main()
'''
