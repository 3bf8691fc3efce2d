"""What an engine may run: predicates on columns of layouts, each with a sentence for one layout, from the same numbers.

A rule is a function that yields where it holds, a value or a column, and then, of one layout that breaks it, the sentence with the
remedy. Rules of one engine name it; what differs between versions is a fact of the engine (profiles/engines).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np

from planner.arrays import NDArray
from planner.hardware import HardwareProfile
from planner.layout import divisors
from planner.model import ModelSpec
from planner.record import record
from planner.serving.engine import Engine
from planner.serving.engine_facts import FORMATS
from planner.serving.serving_layout import Precision, ServingLayout
from planner.serving.serving_weights import host_bytes
from planner.units import GIB

BLOCK = 128
"""Weights that share a scale along one side: fp8_block, and groups of int4."""
NAMES = {
    "latent": "latent attention (MLA)", "sparse": "sparse attention with an indexer", "sinks": "attention sinks",
    "chunked": "chunked attention", "mamba2": "Mamba-2 layers", "gated_delta_net": "gated delta net layers",
    "kimi_delta_attention": "Kimi delta attention layers",
}  # fmt: skip
"""How a sentence calls the kinds of ``engine_facts.KINDS``."""


@record
class ServingJob:
    """What the rules look at besides the layout."""

    model: ModelSpec
    hardware: HardwareProfile
    engine: Engine
    precision: Precision

    @property
    def title(self) -> str:
        """The engine with its version."""
        return f"{self.engine.name} {self.engine.version}"


Judge = Callable[[ServingJob, Any], Iterator[Any]]


@record
class ServingRule:
    """A condition that every layout meets, of some engines."""

    name: str
    """Short name."""
    engines: tuple[str, ...]
    """Engines that have it; empty = all."""
    judge: Judge
    """Yields where the rule holds, a value or a column; then, of one layout that breaks it, the sentence."""


def rule(name: str, *engines: str) -> Callable[[Judge], ServingRule]:
    """Makes a rule of the function below it."""
    return lambda judge: ServingRule(name=name, engines=engines, judge=judge)


def _divisors(number: int) -> str:
    return ", ".join(map(str, divisors(number)[:16]))


# ------------------------------------------------------------------------------------- the device, the model, the formats


@rule("vendor")
def _vendor(job: ServingJob, _: Any) -> Iterator[Any]:
    yield job.hardware.vendor in job.engine.vendors
    yield (
        f"{job.engine.name} runs on {' and '.join(job.engine.vendors)} GPUs, and {job.hardware.name} is from "
        f"{job.hardware.vendor}; choose another engine or GPU"
    )


def kinds_of(model: ModelSpec) -> tuple[str, ...]:
    """What of ``engine_facts.KINDS`` a model has."""
    has = {
        "latent": model.is_mla,
        "sparse": model.is_sparse,
        "sinks": model.attention_sinks,
        "chunked": model.chunked_attention,
    }
    linear = (model.linear.kind,) if model.linear else ()
    return (*(name for name, there in has.items() if there), *linear)


@rule("model")
def _model(job: ServingJob, _: Any) -> Iterator[Any]:
    missing = [NAMES[kind] for kind in kinds_of(job.model) if kind not in job.engine.kinds]
    yield not missing
    yield f"{job.model.name} has {' and '.join(missing)}, which {job.title} does not run; choose a newer version or another engine"


@rule("formats")
def _formats(job: ServingJob, _: Any) -> Iterator[Any]:
    one = job.precision
    asked = {"weights": one.weights, "experts": one.experts, "attention": one.attention}
    missing = {
        where: form for where, form in asked.items()
        if form and not job.engine.runs(form, job.hardware) and not (where == "experts" and not job.model.is_moe)
    }  # fmt: skip
    if one.cache == "fp8" and not job.engine.runs("fp8_cache", job.hardware):
        missing["cache"] = "fp8"
    yield job.hardware.vendor not in job.engine.vendors or not missing
    runs = (
        ", ".join(form for form in FORMATS if form != "fp8_cache" and job.engine.runs(form, job.hardware))
        or "none of its formats"
    )
    said = " and ".join(f"{form} {where}" for where, form in missing.items())
    yield f"{job.title} does not run {said} on {job.hardware.name} ({job.hardware.arch}); it runs {runs} there"


# -------------------------------------------------------------------------------------------------------------- attention


@rule("heads")
def _heads(job: ServingJob, at: Any) -> Iterator[Any]:
    heads = job.model.num_heads
    yield heads % at.tp == 0
    yield f"tp {at.tp} does not divide the {heads} heads of {job.model.name}; give a tp of {_divisors(heads)}"


@rule("key-value heads")
def _kv_heads(job: ServingJob, at: Any) -> Iterator[Any]:
    kv = job.model.num_kv_heads
    yield job.model.is_mla | (kv % at.tp == 0) | (at.tp % kv == 0)
    yield (
        f"tp {at.tp} neither divides the {kv} key-value heads of {job.model.name} nor is a multiple of them; give a tp of "
        f"{_divisors(kv)} or a multiple of {kv}"
    )


@rule("linear heads")
def _linear_heads(job: ServingJob, at: Any) -> Iterator[Any]:
    linear = job.model.linear
    heads = linear.value_heads if linear else 0
    yield heads % at.tp == 0
    yield f"tp {at.tp} does not divide the {heads} value heads of linear attention of {job.model.name}; give a divisor of {heads}"


@rule("decode context")
def _context(job: ServingJob, at: Any) -> Iterator[Any]:
    kv, heads = job.model.num_kv_heads, job.model.num_heads
    repeats = at.tp % at.dcp == 0 if job.model.is_mla else (at.tp % (kv * at.dcp) == 0) & (heads // kv % at.dcp == 0)
    yield (at.dcp == 1) | (("dcp" in job.engine.degrees) & repeats)
    if "dcp" not in job.engine.degrees:
        yield f"{job.title} does not split the cache of a sequence: dcp {at.dcp} must be 1"
    elif job.model.is_mla:
        yield f"dcp {at.dcp} does not divide tp {at.tp}; give a divisor"
    else:
        yield (
            f"dcp {at.dcp} splits what tp repeats: tp {at.tp} must be a multiple of {kv} key-value heads x dcp, and dcp divide the "
            f"{heads // kv} queries of each; give a larger tp or dcp 1"
        )


@rule("attention data parallelism")
def _spread_attention(job: ServingJob, at: Any) -> Iterator[Any]:
    yield (at.attn_dp == 1) | ("attn_dp" in job.engine.degrees)
    yield f"{job.title} has no attention data parallelism: attn_dp {at.attn_dp} must be 1; choose a newer version"


@rule("attention of TensorRT-LLM", "trtllm")
def _attention_dp(_: ServingJob, at: Any) -> Iterator[Any]:
    yield (at.attn_dp == 1) | (at.tp == 1)
    yield (
        f"TensorRT-LLM has one attention rank on each GPU under attention data parallelism: tp {at.tp} x attn_dp {at.attn_dp} is "
        f"tp 1 x attn_dp {at.tp * at.attn_dp}, or tp {at.tp * at.attn_dp} without"
    )


# ----------------------------------------------------------------------------------------------------- layers and experts


@rule("stages")
def _stages(job: ServingJob, at: Any) -> Iterator[Any]:
    yield at.pp <= job.model.num_layers
    yield f"pp {at.pp} is more than the {job.model.num_layers} layers of {job.model.name}; give at most that"


@rule("MLP")
def _mlp(job: ServingJob, at: Any) -> Iterator[Any]:
    width = job.model.ffn_size if job.model.num_plain_layers else job.model.shared_expert_ffn_size
    least = BLOCK if job.precision.weights == "int4" or (_blocks(job, job.precision.weights)) else 1
    yield (width % at.tp == 0) & ((at.tp == 1) | (width // at.tp % least == 0))
    each = f" into multiples of the {BLOCK} that share a scale" if least > 1 else ""
    yield f"tp {at.tp} does not divide the MLP width {width} of {job.model.name}{each}; give a smaller tp"


def _blocks(job: ServingJob, form: str) -> bool:
    return form == "fp8_block" and not job.engine.splits_blocks


@rule("experts over ranks")
def _expert_ranks(job: ServingJob, at: Any) -> Iterator[Any]:
    yield (not job.model.is_moe) | (at.ep * at.moe_tp == at.tp * at.attn_dp)
    yield (
        f"ep {at.ep} x moe_tp {at.moe_tp} is not tp {at.tp} x attn_dp {at.attn_dp}: experts are spread over the ranks of a stage; "
        f"give ep x moe_tp = {at.tp * at.attn_dp}"
    )


@rule("number of experts")
def _experts(job: ServingJob, at: Any) -> Iterator[Any]:
    number = job.model.num_experts
    yield (not job.model.is_moe) | (at.ep <= number)
    yield f"ep {at.ep} is more than the {number} experts of {job.model.name}; give at most that"


@rule("width of experts")
def _expert_width(job: ServingJob, at: Any) -> Iterator[Any]:
    width, form = job.model.expert_ffn_size, job.precision.experts or job.precision.weights
    least = BLOCK if _blocks(job, form) else 1
    yield (not job.model.is_moe) | ((width % at.moe_tp == 0) & ((at.moe_tp == 1) | (width // at.moe_tp % least == 0)))
    each = f" into multiples of the {BLOCK} that share a scale" if least > 1 else ""
    yield f"moe_tp {at.moe_tp} does not divide the expert width {width} of {job.model.name}{each}; give a larger ep"


@rule("experts of vLLM", "vllm")
def _expert_degrees(job: ServingJob, at: Any) -> Iterator[Any]:
    ranks = at.tp * at.attn_dp
    yield (not job.model.is_moe) | (at.ep == 1) | (at.ep == ranks)
    yield (
        f"vLLM spreads experts over all tp x dp = {ranks} ranks or splits each over them, ep {at.ep} is between; "
        f"give ep {ranks} (--enable-expert-parallel) or ep 1"
    )


@rule("dense model")
def _dense(job: ServingJob, at: Any) -> Iterator[Any]:
    yield job.model.is_moe | ((at.ep == 1) & (at.attn_dp == 1) & ((at.moe_tp == 1) | (at.moe_tp == at.tp)))
    yield (
        f"{job.model.name} has no routed experts, so that ep, moe_tp and attn_dp are 1; here they are {at.ep}, {at.moe_tp} and "
        f"{at.attn_dp}: give replicas for more copies"
    )


# ------------------------------------------------------------------------------------------------------------ host memory


@rule("weights in host memory")
def _host_weights(job: ServingJob, at: Any) -> Iterator[Any]:
    kind = job.engine.host_weights
    alone = (kind == "streams") | ((kind == "computes") & job.model.is_moe & (at.ep == 1) & (at.attn_dp == 1))
    yield (at.gpu_weights == 100) | alone
    if kind == "none":
        yield f"{job.title} keeps no weights in host memory: gpu_weights {at.gpu_weights} must be 100"
    else:
        yield (
            f"{job.title} computes routed experts of one tensor group on the CPU: gpu_weights {at.gpu_weights} needs routed "
            f"experts, ep 1 and attn_dp 1, and {job.model.name} has ep {at.ep} and attn_dp {at.attn_dp}; give gpu_weights 100 or "
            "split experts by moe_tp"
        )


@rule("room in host memory")
def _host_room(job: ServingJob, at: Any) -> Iterator[Any]:
    model, hardware = job.model, job.hardware
    each = host_bytes(model, job.engine, job.precision, at, model.num_layers, model.num_moe_layers) / at.pp
    whole = each * np.minimum(at.num_gpus, hardware.gpus_per_node)
    yield whole <= hardware.host_memory
    used = np.minimum(at.num_gpus, hardware.gpus_per_node)
    yield (
        f"{100 - at.gpu_weights} % of the weights on {int(used)} GPU(s) are {whole / GIB:.0f} GiB, and a node of {hardware.name} "
        f"has {hardware.host_memory / GIB:.0f} GiB of host memory; keep more on the GPUs"
    )


# ------------------------------------------------------------------------------------------------------- batch and budget


def most_sequences(engine: Engine, layout: ServingLayout) -> Any:
    """What ``max_batch`` may be at most: vLLM wants room for a token of every sequence in the budget of a step."""
    return np.asarray(layout.max_tokens) * layout.attn_dp if engine.name == "vllm" else np.iinfo(np.int64).max


def usual_batch(engine: Engine, hardware: HardwareProfile, layout: ServingLayout) -> Any:
    """The engine's own ``max_batch`` beside ``max_tokens``: vLLM lowers it to what starts.  [vllm/engine/arg_utils.py,
    max_num_seqs]"""
    return np.minimum(engine.default_max_batch(hardware, layout), most_sequences(engine, layout))


@rule("budget of a step", "vllm")
def _budget(job: ServingJob, at: Any) -> Iterator[Any]:
    yield at.max_batch <= most_sequences(job.engine, at)
    each = -(-at.max_batch // at.attn_dp)
    yield (
        f"max_tokens {at.max_tokens} is less than the {each} sequences of a rank, each of which decodes a token in a step: vLLM "
        "does not start; raise max_tokens or lower max_batch"
    )


# ---------------------------------------------------------------------------------------------------------------- lengths


def longest_of(model: ModelSpec) -> int:
    """Tokens of a sequence that engines take at most: as published, or as far as yarn stretches the first length.  [vLLM
    config/model.py, _get_and_verify_max_len; the linear factor of Gemma and that of llama3 are in the published length]"""
    scaling = model.constants.rope_scaling if model.constants else None
    stretched = scaling.original_length * scaling.factor if scaling and scaling.kind == "yarn" else 0.0
    return max(model.max_sequence_length, int(stretched))


def too_long(model: ModelSpec, tokens: int) -> str:
    """Why no engine starts for sequences of so many tokens; '' where it does."""
    if tokens <= longest_of(model):
        return ""
    return (
        f"requests of up to {tokens} tokens are longer than the {longest_of(model)} positions of {model.name}, which engines "
        "refuse; plan with a shorter --input or --output, or with a config.json whose rope_scaling (yarn) reaches that far"
    )


RULES: tuple[ServingRule, ...] = (
    _vendor, _model, _formats, _heads, _kv_heads, _linear_heads, _context, _attention_dp, _stages, _mlp, _expert_ranks, _experts,
    _expert_width, _expert_degrees, _dense, _host_weights, _host_room, _budget,
)  # fmt: skip
"""In the order in which they are said."""


def violations(
    model: ModelSpec, hardware: HardwareProfile, engine: Engine, precision: Precision, layout: ServingLayout
) -> list[str]:
    """Sentences of the rules that one layout breaks; none when it is legal."""
    job = ServingJob(model=model, hardware=hardware, engine=engine, precision=precision)
    found, at = [], _columns(layout)
    for one in rules_of(engine):
        holds, sentence = one.judge(job, at)
        if not np.all(holds):
            found.append(str(sentence))
    return found


def legal(
    model: ModelSpec, hardware: HardwareProfile, engine: Engine, precision: Precision, layout: ServingLayout
) -> NDArray[np.bool_]:
    """Mask of the layouts that break no rule."""
    job = ServingJob(model=model, hardware=hardware, engine=engine, precision=precision)
    at = _columns(layout)
    mask = np.ones(np.broadcast_shapes(*(np.shape(getattr(at, one.name)) for one in fields(at))), dtype=bool)
    for one in rules_of(engine):
        mask = mask & next(one.judge(job, at))
    return mask


def fills_nodes(gpus: Any, per_node: Any) -> Any:
    """Whether engines of so many GPUs stand in a node or on whole ones, as launchers start them: equal processes on equal nodes."""
    return (gpus <= per_node) | (gpus % per_node == 0)


def rules_of(engine: Engine) -> list[ServingRule]:
    """The rules that an engine has."""
    return [one for one in RULES if not one.engines or engine.name in one.engines]


def _columns(layout: ServingLayout) -> ServingLayout:
    return replace(layout, **{one.name: np.asarray(getattr(layout, one.name)) for one in fields(layout)})
