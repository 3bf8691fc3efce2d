"""The Python module that torchtitan is started with: model, training and parallelism, every dimension written out."""

from __future__ import annotations

import json
from collections.abc import Mapping

from planner.layout import Recompute, Schedule
from planner.model import ModelSpec
from planner.trainers.bundle.fully_shard import SCHEDULES
from planner.trainers.bundle.target import ExportJob

CONVERTERS = {"fp8": "Float8LinearConverter", "mxfp8": "MXFP8LinearConverter"}
"""Converters of torchtitan.components.quantization, by precision."""


def stages(job: ExportJob) -> list[list[str]]:
    """Names of the modules of every virtual stage, in the order that the data passes them."""
    found = [[f"layers.{i}" for i in layers] for _, _, layers in job.virtual_stages()]
    found[0].insert(0, "tok_embeddings")
    found[-1] += ["norm", "lm_head"]
    return found


def config_module(job: ExportJob) -> str:
    """Text of plan_config.py: model, training and parallelism, every dimension written out."""
    layout, work = job.layout, job.workload
    piped = int(layout.pp) > 1
    local = int(layout.micro_batch_size) * (int(layout.num_microbatches) if piped else 1)
    shard = int(layout.shard)
    parallel = {
        "data_parallel_replicate_degree": int(layout.dp) // shard,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "always" if int(layout.zero) == 3 else "never",
        "tensor_parallel_degree": int(layout.tp),
        "enable_sequence_parallel": bool(layout.sequence_parallel) or int(layout.tp) == 1,
        "context_parallel_degree": int(layout.cp),
        "context_parallel_load_balancer": "headtail",
        "pipeline_parallel_degree": int(layout.pp),
        "pipeline_parallel_schedule": SCHEDULES[Schedule(int(layout.schedule))],
        "pipeline_parallel_microbatch_size": int(layout.micro_batch_size),
        "expert_parallel_degree": int(layout.ep),
    }
    kept = {Recompute.NONE: "None", Recompute.SELECTIVE: "SelectiveAC.Config()", Recompute.FULL: "FullAC.Config()"}
    training = {
        "local_batch_size": local, "global_batch_size": work.global_batch_size, "seq_len": work.sequence_length,
        "steps": 1000, "dtype": "float32",
        "mixed_precision_param": "float32" if work.precision == "fp32" else "bfloat16",
        "mixed_precision_reduce": "float32", "disable_cuda_graphs": True,
    }  # fmt: skip
    return _TEXT.format(
        title=f"{job.model.name} on {job.cluster.num_gpus} GPUs, for torchtitan >=0.3,<0.4.",
        imports="\n".join(_imports(job)),
        model="\n".join(_model(job.model, max(job.model.max_sequence_length, work.sequence_length))),
        stages=("STAGES = [\n" + "".join(f"    {json.dumps(one)},\n" for one in stages(job)) + "]") if piped else "STAGES = None",
        training=_arguments(training), parallel=_arguments(parallel),
        recompute=kept[Recompute(int(layout.recompute))],
        converters=_CONVERT.format(name=CONVERTERS[work.precision],
                                   arguments=_CONVERTER_ARGUMENTS[work.precision]) if work.precision in CONVERTERS else "",
    )  # fmt: skip


def _arguments(values: Mapping[str, object]) -> str:
    return "".join(f"            {name}={value!r},\n" for name, value in values.items())


def _imports(job: ExportJob) -> list[str]:
    model, lines = job.model, []
    helpers = ["get_attention_config", "make_ffn_config"]
    if model.is_moe:
        helpers += ["make_moe_config", "make_routed_experts_config", "make_router_config"]
    if model.is_mla:
        lines.append("from torchtitan.models.deepseek_v3 import make_mla_attention_config")
    else:
        helpers += ["make_gqa_config"]
    name, prefix, apply = _family(model)
    lines += [f"from torchtitan.models.{name}.parallelize import {apply}",
              f"from torchtitan.models.{name}.model import {prefix}Model as Model",
              f"from torchtitan.models.{name}.model import {prefix}TransformerBlock as Block",
              f"from torchtitan.models.{name}.state_dict_adapter import {prefix}StateDictAdapter as Adapter"]  # fmt: skip
    if model.is_moe:
        lines.append("from torchtitan.components.optimizer import register_moe_load_balancing_hook")
    if job.workload.precision in CONVERTERS:
        lines.append(f"from torchtitan.components.quantization import {CONVERTERS[job.workload.precision]}")
    lines.append(f"from torchtitan.models.common.config_utils import {', '.join(sorted(helpers))}")
    return sorted(lines)


def _family(model: ModelSpec) -> tuple[str, str, str]:
    """(package, prefix of its classes, its parallelize function) of torchtitan.models."""
    if model.is_mla:
        return "deepseek_v3", "DeepSeekV3", "parallelize_deepseekv3"
    if model.is_moe or model.qk_norm:
        return "qwen3", "Qwen3", "parallelize_qwen3"
    return "llama3", "Llama3", "parallelize_llama"


def _model(model: ModelSpec, longest: int) -> list[str]:
    """Lines of the functions ``layer`` and ``model``."""
    rope = model.qk_rope_head_dim if model.is_mla else model.head_dim
    kind = "CosSinRoPE" if _family(model)[0] == "qwen3" else "ComplexRoPE"
    lines = [
        f"ROPE = {kind}.Config(dim={rope}, max_seq_len={longest}, theta=THETA)",
        "", "",
        "def layer(index: int) -> Block.Config:",
        '    """One transformer layer."""',
        '    out = {"weight": partial(nn.init.trunc_normal_, std=depth_scaled_std(0.02, index))}',
    ]  # fmt: skip
    if model.is_mla:
        lines += [
            "    attention = make_mla_attention_config(",
            f"        layer_id=index, dim={model.hidden_size}, n_heads={model.num_heads}, q_lora_rank={model.q_lora_rank},",
            f"        kv_lora_rank={model.kv_lora_rank}, qk_nope_head_dim={model.qk_nope_head_dim},",
            f"        qk_rope_head_dim={model.qk_rope_head_dim}, v_head_dim={model.v_head_dim}, attn_backend=ATTENTION,",
            "        linear_init=INIT, norm_init=ONES, depth_init=lambda _: out, rope=ROPE,",
            "    )",
        ]
    else:
        norm = f"RMSNorm.Config(normalized_shape={model.head_dim}, param_init=ONES)" if model.qk_norm else "None"
        lines += [
            "    attention = make_gqa_config(",
            f"        dim={model.hidden_size}, n_heads={model.num_heads}, n_kv_heads={model.num_kv_heads}, "
            f"head_dim={model.head_dim},",
            "        wqkv_param_init=INIT, wo_param_init=out, inner_attention=get_attention_config(ATTENTION), fuse_qkv=True,",
            f"        rope=ROPE, qk_norm={norm},",
            "    )",
        ]
    moe = ["", *_experts(model)] if model.is_moe else []
    dense = f"make_ffn_config(dim={model.hidden_size}, hidden_dim={model.ffn_size}, w1_param_init=INIT, w2w3_param_init=out)"
    holds = _moe_condition(model)
    lines += [*moe,
        "    return Block.Config(",
        "        attention=attention,",
        f"        attention_norm=RMSNorm.Config(normalized_shape={model.hidden_size}, param_init=ONES),",
        f"        ffn_norm=RMSNorm.Config(normalized_shape={model.hidden_size}, param_init=ONES),",
        *([f"        feed_forward=None if {holds} else {dense},", f"        moe=moe if {holds} else None,"]
          if model.is_moe else [f"        feed_forward={dense},"]),
        "    )",
    ]  # fmt: skip
    return [*lines, "", "", *_spec(model)]


def _moe_condition(model: ModelSpec) -> str:
    """Which layers have experts, as an expression over ``index``."""
    if model.moe_layer_interval > 1:
        after = f"(index - {model.num_dense_layers})"
        last = model.moe_layer_interval - 1
        return f"index >= {model.num_dense_layers} and {after} % {model.moe_layer_interval} == {last}"
    return f"index >= {model.num_dense_layers}"


def _experts(model: ModelSpec) -> list[str]:
    shared = (
        f"make_ffn_config(dim={model.hidden_size}, hidden_dim={model.shared_expert_ffn_size}, w1_param_init=INIT, "
        "w2w3_param_init=out)"
        if model.shared_expert_ffn_size
        else "None"
    )
    return [
        "    moe = make_moe_config(",
        f"        num_experts={model.num_experts},",
        f"        router=make_router_config(dim={model.hidden_size}, num_experts={model.num_experts}, top_k={model.top_k},",
        '                                  gate_param_init=INIT, score_func="softmax", route_norm=True),',
        "        routed_experts=make_routed_experts_config(",
        f"            dim={model.hidden_size}, hidden_dim={model.expert_ffn_size}, num_experts={model.num_experts}, "
        f"top_k={model.top_k},",
        '            param_init={"w1_EFD": INIT["weight"], "w2_EDF": out["weight"], "w3_EFD": INIT["weight"]},',
        '            comm_backend="standard",',
        "        ),",
        f"        shared_experts={shared},",
        "    )",
    ]


def _spec(model: ModelSpec) -> list[str]:
    apply = _family(model)[2]
    hook = "register_moe_load_balancing_hook" if model.is_moe else "None"
    table = "skip_param_init" if model.tied_embeddings else "partial(nn.init.normal_, std=1.0)"
    h, rows = model.hidden_size, model.vocab_size
    return [
        "def model() -> ModelSpec:",
        f'    """{model.name}: sizes and how torchtitan splits them."""',
        "    config = Model.Config(",
        f"        dim={h}, vocab_size={rows}, enable_weight_tying={model.tied_embeddings},",
        f"        tok_embeddings=Embedding.Config(num_embeddings={rows}, embedding_dim={h},",
        f'                                        param_init={{"weight": {table}}}),',
        f"        norm=RMSNorm.Config(normalized_shape={h}, param_init=ONES),",
        f"        lm_head=Linear.Config(in_features={h}, out_features={rows}, param_init=INIT),",
        f"        layers=[layer(index) for index in range({model.num_layers})],",
        "    )",
        "    config = converted(config)",
        f"    return ModelSpec(name={(model.name)!r}, flavor='plan', model=config, parallelize_fn={apply},",
        f"                     pipelining_fn=pipeline_llm, post_optimizer_build_fn={hook}, state_dict_adapter=Adapter)",
    ]


_CONVERTER_ARGUMENTS = {
    "fp8": 'recipe_name="rowwise", filter_fqns=["lm_head", "router.gate"]',
    "mxfp8": 'fqns=["layers"]',
}
_CONVERT = """    for one in ({name}.Config({arguments}, model_compile_enabled=True),):
        config = one.build().convert(config)
"""
_TEXT = '''"""{title}

``--module plan_config --config plan`` trains, ``--config smoke`` runs five steps on synthetic text with the same
parallelism. Every dimension is written out; the command line overrides any of them, like
``--parallelism.tensor_parallel_degree 4``.
"""

import random
from dataclasses import dataclass
from functools import partial

import torch.nn as nn
from datasets import Dataset
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: F401
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm  # noqa: F401
from torchtitan.models.common.param_init import depth_scaled_std, skip_param_init  # noqa: F401
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer
{imports}

THETA = 500000.0
"""Base of the rotary positions: set the one of your model."""
ATTENTION = "flex"
INIT = {{"weight": partial(nn.init.trunc_normal_, std=0.02), "bias": nn.init.zeros_}}
ONES = {{"weight": nn.init.ones_}}
{stages}
"""Modules of every virtual stage of the pipeline."""
{model}


def converted(config: Model.Config) -> Model.Config:
    """The model with its linear layers in the precision of the plan."""
{converters}    return config


def plan() -> Trainer.Config:
    """The run of the plan."""
    spec = model()
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        optimizer=default_adamw(lr=3e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=200),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        metrics=MetricsProcessor.Config(log_freq=10),
        checkpoint=CheckpointManager.Config(enable=True, interval=500, folder="checkpoint"),
        activation_checkpoint={recompute},
        compile=CompileConfig(enable=True, components=["model", "loss"]),
        training=TrainingConfig(
{training}        ),
        parallelism=ParallelismConfig(
{parallel}            module_fqns_per_model_part=STAGES,
        ),
    )


class SyntheticTokenizer(BaseTokenizer):
    """Bytes as tokens: the smoke run needs no files."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to say."""

    def __init__(self, config: Config, **_: object) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, text: str, **_: object) -> list[int]:
        """A token per byte."""
        return list(text.encode())

    def decode(self, tokens: list[int], **_: object) -> str:
        """Back to text."""
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        """Bytes."""
        return 256


def _synthetic(path: str) -> Dataset:
    words = random.Random(0)
    texts = [" ".join(str(words.randrange(1000)) for _ in range(2000)) for _ in range(256)]
    return Dataset.from_dict({{"text": texts}})


DATASETS["plan_synthetic"] = DatasetConfig(path="", loader=_synthetic, sample_processor=lambda sample: sample["text"])


def smoke() -> Trainer.Config:
    """Five steps on synthetic text, nothing saved, the same parallelism."""
    config = plan()
    config.hf_assets_path = "."
    config.tokenizer = SyntheticTokenizer.Config()
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="plan_synthetic")
    config.training.steps = 5
    config.lr_scheduler.warmup_steps = 1
    config.metrics.log_freq = 1
    config.checkpoint.enable = False
    return config
'''
