"""torchtitan: a Python module with one function per run, and the command line that starts it."""

import json

from planner.layout import Module, Schedule
from planner.model import ModelSpec
from planner.trainers.bundle.fully_shard import SCHEDULES, beyond_llama, shared_refusals
from planner.trainers.bundle.quoting import Expression, comment, filled_text, refused, run_of
from planner.trainers.bundle.target import ExportJob, Rendered, unknown_choices, unknown_modules
from planner.trainers.torchtitan import VERSIONS

OPTIMIZERS = ("adam",)
CONVERTERS = {"fp8": "Float8LinearConverter", "mxfp8": "MXFP8LinearConverter"}
"""Converters of torchtitan.components.quantization, by precision."""
_CONVERTER_ARGUMENTS = {
    "fp8": 'recipe_name="rowwise", filter_fqns=["lm_head", "router.gate"]',
    "mxfp8": 'fqns=["layers"]',
}
MASK_BLOCK = 128
"""Tokens of a block of FlexAttention's mask (_DEFAULT_SPARSE_BLOCK_SIZE of torch), which context-parallel ranks share out whole."""


def refusals(job: ExportJob) -> list[str]:
    """What torchtitan 0.3 cannot run, with its rule."""
    m, layout, work = job.model, job.layout, job.workload
    beyond = beyond_llama(m, biases=m.linear_bias or m.qkv_bias or m.expert_bias or m.router_bias,
                          query_and_key_norms_with_MLA=m.qk_norm and m.is_mla)  # fmt: skip
    found = refused(
        job, "torchtitan", beyond=beyond, length=work.sequence_length, mask_block=MASK_BLOCK,
        split=layout.tp if layout.sequence_parallel else 1,
    )  # fmt: skip
    found += shared_refusals(job) + unknown_choices(job, "torchtitan", OPTIMIZERS, ("bf16", "bf16_true", "fp32", *CONVERTERS))
    return found + unknown_modules(job, "torchtitan", Module.EVERY_SECOND_MATMUL)


def _family(model: ModelSpec) -> dict[str, str]:
    """Package of torchtitan.models, prefix of its classes, its parallelize function."""
    if model.is_mla:
        return {"package": "deepseek_v3", "prefix": "DeepSeekV3", "apply": "parallelize_deepseekv3"}
    if model.is_moe or model.qk_norm:
        return {"package": "qwen3", "prefix": "Qwen3", "apply": "parallelize_qwen3"}
    return {"package": "llama3", "prefix": "Llama3", "apply": "parallelize_llama"}


def _config_module(job: ExportJob) -> str:
    """Text of plan_config.py: model, training and parallelism, every dimension written out."""
    m, precision = job.model, job.workload.precision
    stages = [[f"layers.{i}" for i in layers] for _, _, layers in job.virtual_stages()]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "lm_head"]
    has_experts = f"index >= {m.num_dense_layers}"
    if m.moe_layer_interval > 1:
        interval = m.moe_layer_interval
        has_experts += f" and (index - {m.num_dense_layers}) % {interval} == {interval - 1}"

    def feed_forward(width: int) -> str:
        return f"make_ffn_config(dim={m.hidden_size}, hidden_dim={width}, w1_param_init=INIT, w2w3_param_init=out)"

    return filled_text(
        job, "torchtitan/plan_config.py.j2", name=comment(m.name), literal=repr(m.name), stages=map(json.dumps, stages),
        title=comment(f"{m.name} on {job.cluster.num_gpus} GPUs, for torchtitan {VERSIONS}."), feed_forward=feed_forward,
        has_experts=has_experts, schedule_name=SCHEDULES[Schedule(job.layout.schedule)], converter=CONVERTERS.get(precision),
        converter_arguments=_CONVERTER_ARGUMENTS.get(precision), **_family(m),
    )  # fmt: skip


def render(job: ExportJob) -> Rendered:
    """``plan_config.py`` with the functions ``plan`` and ``smoke``."""
    extra = Expression(" torchao" if job.workload.precision in CONVERTERS else "")
    files = {"plan_config.py": _config_module(job)}
    return run_of(job, "torchtitan", files, extra=extra)
