"""nanotron: its YAML file, read by run_train.py of the repository."""

from __future__ import annotations

from typing import Any

from planner import library
from planner.layout import NAMES, Recompute, Schedule
from planner.model import ModelSpec
from planner.trainers.bundle.fully_shard import beyond_llama
from planner.trainers.bundle.target import ExportJob, Rendered, Setting, unknown_choices

ENGINES = {Schedule.GPIPE: "afab", Schedule.ONE_F_ONE_B: "1f1b"}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
FACTORIES: dict[str, dict[str, Any]] = {
    "adam": {"name": "adamW", "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "torch_adam_is_fused": True},
    "sgd": {"name": "sgd"},
}
"""optimizer_factory, by optimizer."""
LEARNING_RATE = 3e-4


def refusals(job: ExportJob) -> list[str]:
    """What nanotron cannot run, with its rule."""
    layout, model, found = job.layout, job.model, unknown_choices(job, "nanotron", FACTORIES, DTYPES)
    has = beyond_llama(model, experts=model.is_moe, MLA=model.is_mla, query_and_key_norms=model.qk_norm)
    if model.head_dim * model.num_heads != model.hidden_size:
        has.append(f"heads of {model.head_dim}")
    if has:
        found.append(
            f"{model.name} has {', '.join(has)}, and nanotron's LlamaConfig and Qwen2Config say dense layers with RMS norms, "
            "rotary positions, SwiGLU and heads of hidden size / heads; use another trainer"
        )
    if model.num_kv_heads < layout.tp or model.num_kv_heads % layout.tp:
        found.append(
            f"tp {layout.tp}: num_key_value_heads ({model.num_kv_heads}) must be >= tp and divide by it [Config]"
        )
    if layout.cp > 1 or layout.ep > 1:
        found.append(f"cp {layout.cp}, ep {layout.ep}: the plan's trainer has neither; use 1")
    if layout.vpp > 1 or layout.schedule not in ENGINES:
        found.append(
            f"schedule {NAMES['schedule'][layout.schedule]} with vpp {layout.vpp}: pp_engine is afab (gpipe) or 1f1b, without "
            "virtual stages"
        )
    if layout.first_stage_layers or layout.last_stage_layers:
        found.append(
            "first_stage_layers and last_stage_layers: nanotron deals blocks by its own cost estimate; leave both at 0"
        )
    if layout.zero not in (0, 1):
        found.append(
            f"zero {layout.zero}: zero_stage is 0 or 1; larger numbers are accepted and shard no more [optimizer/zero.py]"
        )
    if layout.recompute == Recompute.SELECTIVE or layout.recompute_layers:
        found.append("recompute of a part: recompute_layer covers every layer whole; use full or none")
    return found


def config(job: ExportJob, *, smoke: bool = False) -> dict[str, Any]:
    """The YAML file; the smoke run has no data set, so nanotron makes data up."""
    layout, work, model = job.layout, job.workload, job.model
    steps = 5 if smoke else 1000
    split = bool(layout.sequence_parallel)
    kind = "is_qwen2_config" if model.qkv_bias else "is_llama_config"
    text = {"hf_dataset_or_datasets": "@DATASET@", "hf_dataset_splits": "train", "text_column_name": "text"}
    data: dict[str, Any] = {
        "general": {"project": "plan", "run": "plan", "seed": 42, "ignore_sanity_checks": True},
        "parallelism": {
            "dp": layout.dp, "pp": layout.pp, "tp": layout.tp,
            "pp_engine": ENGINES[Schedule(layout.schedule)], "tp_mode": "REDUCE_SCATTER" if split else "ALL_REDUCE",
            "tp_linear_async_communication": split, "tp_recompute_allgather": True,
            "recompute_layer": layout.recompute == Recompute.FULL,
            "expert_parallel_size": 1, "context_parallel_size": 1,
        },
        "model": {
            "dtype": DTYPES[work.precision], "init_method": {"std": 0.02}, "make_vocab_size_divisible_by": 1,
            "ddp_bucket_cap_mb": 25, "model_config": model_config(model, kind, work.sequence_length),
        },
        "tokens": {
            "sequence_length": work.sequence_length, "train_steps": steps,
            "micro_batch_size": layout.micro_batch_size,
            "batch_accumulation_per_replica": layout.num_microbatches, "val_check_interval": -1,
        },
        "optimizer": {
            "zero_stage": layout.zero, "accumulate_grad_in_fp32": True, "clip_grad": 1.0, "weight_decay": 0.1,
            "optimizer_factory": FACTORIES[work.optimizer],
            "learning_rate_scheduler": {
                "learning_rate": LEARNING_RATE, "lr_warmup_steps": 2, "lr_warmup_style": "linear",
                "lr_decay_style": "cosine", "min_decay_lr": LEARNING_RATE / 10,
            },
        },
        "checkpoints": {"checkpoints_path": "checkpoints", "checkpoint_interval": 500, "save_final_state": not smoke},
        "data_stages": [{
            "name": "stage", "start_training_step": 1,
            "data": {"dataset": None if smoke else text, "seed": 42, "num_loading_workers": 1},
        }],
        "logging": {"iteration_step_info_interval": 1 if smoke else 10, "log_level": "info", "log_level_replica": "info"},
    }  # fmt: skip
    if not smoke:
        data["tokenizer"] = {"tokenizer_name_or_path": "@TOKENIZER@"}
    return data


def model_config(model: ModelSpec, kind: str, sequence_length: int) -> dict[str, Any]:
    """Sizes in the words of LlamaConfig or Qwen2Config."""
    return {
        kind: True, "hidden_size": model.hidden_size, "intermediate_size": model.ffn_size, "hidden_act": "silu",
        "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads, "vocab_size": model.vocab_size,
        "max_position_embeddings": max(model.max_sequence_length, sequence_length),
        "tie_word_embeddings": model.tied_embeddings, "attention_bias": model.qkv_bias, "rope_theta": 500000.0,
        "rope_interleaved": False, "rms_norm_eps": 1e-5,
    }  # fmt: skip


def render(job: ExportJob) -> Rendered:
    """nanotron.yaml and smoke.yaml."""
    name = {False: "nanotron.yaml", True: "smoke.yaml"}
    waits = job.layout.tp > 1 and not job.layout.sequence_parallel
    return Rendered(
        files={name[smoke]: library.dump_yaml(config(job, smoke=smoke)) for smoke in (False, True)},
        entry=("$NANOTRON/run_train.py", "--config-file", "run.yaml"),
        smoke=("$NANOTRON/run_train.py", "--config-file", "smoke.yaml"),
        prepare=('sed "s|@DATASET@|$DATASET|; s|@TOKENIZER@|$TOKENIZER|" nanotron.yaml > run.yaml',),
        environment={
            "CUDA_DEVICE_MAX_CONNECTIONS": Setting(
                "1",
                "Launches kernels in order, so that collectives of tensor parallelism start before their GEMM.",
            )
        },
        variables={
            "NANOTRON": Setting(None, "clone of github.com/huggingface/nanotron: run_train.py is not in the package"),
            "DATASET": Setting("", "hub name of the data set; the smoke run needs none"),
            "TOKENIZER": Setting("", "hub name of the tokenizer; the smoke run needs none"),
        },
        notes=(
            *(
                (
                    "Tensor-parallel all-reduces are not asynchronous: tp_mode REDUCE_SCATTER (sequence_parallel) hides a part.",
                )
                if waits
                else ()
            ),
            "nanotron deals layers to pipeline ranks by its own cost estimate, as the plan was priced.",
            "Its repository moves slowly: checked against commit 2411b02, best effort.",
            "The planner does not know the base of the rotary positions: rope_theta is 500000; set your model's.",
            "examples/llama/convert_hf_to_nanotron.py of the repository converts weights from Hugging Face.",
        ),
        install=("git clone https://github.com/huggingface/nanotron && pip install -e nanotron flash-attn",),
    )
