"""The Python module that torchtitan is started with: model, training and parallelism, every dimension written out."""

import json

from planner.layout import Recompute, Schedule
from planner.model import ModelSpec
from planner.trainers.bundle.fully_shard import SCHEDULES
from planner.trainers.bundle.quoting import comment, filled, python_fields
from planner.trainers.bundle.target import ExportJob
from planner.trainers.torchtitan import VERSIONS

CONVERTERS = {"fp8": "Float8LinearConverter", "mxfp8": "MXFP8LinearConverter"}
"""Converters of torchtitan.components.quantization, by precision."""
_CONVERTER_ARGUMENTS = {
    "fp8": 'recipe_name="rowwise", filter_fqns=["lm_head", "router.gate"]',
    "mxfp8": 'fqns=["layers"]',
}


def stages(job: ExportJob) -> list[list[str]]:
    """Names of the modules of every virtual stage, in the order that the data passes them."""
    found = [[f"layers.{i}" for i in layers] for _, _, layers in job.virtual_stages()]
    found[0].insert(0, "tok_embeddings")
    found[-1] += ["norm", "lm_head"]
    return found


def config_module(job: ExportJob) -> str:
    """Text of plan_config.py: model, training and parallelism, every dimension written out."""
    layout, work, m = job.layout, job.workload, job.model
    piped, shard = layout.pp > 1, job.shard
    parallel = {
        "data_parallel_replicate_degree": layout.dp // shard, "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
        "tensor_parallel_degree": layout.tp, "enable_sequence_parallel": bool(layout.sequence_parallel) or layout.tp == 1,
        "context_parallel_degree": layout.cp, "context_parallel_load_balancer": "headtail",
        "pipeline_parallel_degree": layout.pp, "pipeline_parallel_schedule": SCHEDULES[Schedule(layout.schedule)],
        "pipeline_parallel_microbatch_size": layout.micro_batch_size, "expert_parallel_degree": layout.ep,
    }  # fmt: skip
    training = {
        "local_batch_size": layout.micro_batch_size * (layout.num_microbatches if piped else 1),
        "global_batch_size": work.global_batch_size, "seq_len": work.sequence_length, "steps": 1000, "dtype": "float32",
        "mixed_precision_param": "float32" if work.precision == "fp32" else "bfloat16",
        "mixed_precision_reduce": "float32", "disable_cuda_graphs": True,
    }  # fmt: skip
    kept = {Recompute.NONE: "None", Recompute.SELECTIVE: "SelectiveAC.Config()", Recompute.FULL: "FullAC.Config()"}
    parts = "STAGES = [\n" + "".join(f"    {json.dumps(one)},\n" for one in stages(job)) + "]"
    package, _, apply = _family(m)
    return filled(
        "torchtitan", "plan_config.txt",
        title=comment(f"{m.name} on {job.cluster.num_gpus} GPUs, for torchtitan {VERSIONS}."), imports="\n".join(_imports(job)),
        stages=parts if piped else "STAGES = None", training=python_fields(training, 12), parallel=python_fields(parallel, 12),
        recompute=kept[Recompute(layout.recompute)], converters=_convert(work.precision),
        rope="CosSinRoPE" if package == "qwen3" else "ComplexRoPE",
        rotary=str(m.qk_rope_head_dim if m.is_mla else m.head_dim), longest=str(max(m.max_sequence_length, work.sequence_length)),
        attention=_attention(m), mlp=_mlp(m), width=str(m.hidden_size), rows=str(m.vocab_size), layers=str(m.num_layers),
        name=comment(m.name), literal=repr(m.name), tied=str(m.tied_embeddings), apply=apply,
        table="skip_param_init" if m.tied_embeddings else "partial(nn.init.normal_, std=1.0)",
        hook="register_moe_load_balancing_hook" if m.is_moe else "None",
    )  # fmt: skip


def _convert(precision: str) -> str:
    """Lines that turn the linear layers to the precision of the plan; empty where they stay in bf16 or fp32."""
    if precision not in CONVERTERS:
        return ""
    call = f"{CONVERTERS[precision]}.Config({_CONVERTER_ARGUMENTS[precision]}, model_compile_enabled=True)"
    return f"    for one in ({call},):\n        config = one.build().convert(config)\n"


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


def _attention(model: ModelSpec) -> str:
    """The configuration of attention and, with experts, of those, as lines of the function ``layer``."""
    if model.is_mla:
        found = f"""    attention = make_mla_attention_config(
        layer_id=index, dim={model.hidden_size}, n_heads={model.num_heads}, q_lora_rank={model.q_lora_rank},
        kv_lora_rank={model.kv_lora_rank}, qk_nope_head_dim={model.qk_nope_head_dim},
        qk_rope_head_dim={model.qk_rope_head_dim}, v_head_dim={model.v_head_dim}, attn_backend=ATTENTION,
        linear_init=INIT, norm_init=ONES, depth_init=lambda _: out, rope=ROPE,
    )"""
    else:
        norm = f"RMSNorm.Config(normalized_shape={model.head_dim}, param_init=ONES)" if model.qk_norm else "None"
        found = f"""    attention = make_gqa_config(
        dim={model.hidden_size}, n_heads={model.num_heads}, n_kv_heads={model.num_kv_heads}, head_dim={model.head_dim},
        wqkv_param_init=INIT, wo_param_init=out, inner_attention=get_attention_config(ATTENTION), fuse_qkv=True,
        rope=ROPE, qk_norm={norm},
    )"""
    return f"{found}\n\n{_experts(model)}" if model.is_moe else found


def _feed_forward(model: ModelSpec, width: int) -> str:
    return f"make_ffn_config(dim={model.hidden_size}, hidden_dim={width}, w1_param_init=INIT, w2w3_param_init=out)"


def _mlp(model: ModelSpec) -> str:
    """The arguments feed_forward and moe of a layer."""
    dense = _feed_forward(model, model.ffn_size)
    if not model.is_moe:
        return f"        feed_forward={dense},"
    holds = _moe_condition(model)
    return f"        feed_forward=None if {holds} else {dense},\n        moe=moe if {holds} else None,"


def _moe_condition(model: ModelSpec) -> str:
    """Which layers have experts, as an expression over ``index``."""
    if model.moe_layer_interval > 1:
        after = f"(index - {model.num_dense_layers})"
        last = model.moe_layer_interval - 1
        return f"index >= {model.num_dense_layers} and {after} % {model.moe_layer_interval} == {last}"
    return f"index >= {model.num_dense_layers}"


def _experts(model: ModelSpec) -> str:
    width = model.shared_expert_ffn_size
    return f"""    moe = make_moe_config(
        num_experts={model.num_experts},
        router=make_router_config(dim={model.hidden_size}, num_experts={model.num_experts}, top_k={model.top_k},
                                  gate_param_init=INIT, score_func="softmax", route_norm=True),
        routed_experts=make_routed_experts_config(
            dim={model.hidden_size}, hidden_dim={model.expert_ffn_size}, num_experts={model.num_experts}, top_k={model.top_k},
            param_init={{"w1_EFD": INIT["weight"], "w2_EDF": out["weight"], "w3_EFD": INIT["weight"]}},
            comm_backend="standard",
        ),
        shared_experts={_feed_forward(model, width) if width else "None"},
    )"""
