"""What the settings of an engine say: degrees, precision, options, drafted tokens. What is not said stays None."""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from planner.errors import PlannerError, shown
from planner.model import ModelSpec
from planner.serving.flags.flag_check import recorded
from planner.serving.readback.server_commands import PROGRAMS, Server
from planner.serving.serving_weights import draft_head
from planner.trainers.reading.given import Given, Question, value_of
from planner.trainers.reading.settings import Settings

CACHES = {
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "fp8_ds_mla": "fp8",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
}
FORMATS = {
    "fp8": "fp8", "modelopt": "fp8", "modelopt_fp8": "fp8", "w8a8_fp8": "fp8", "fp8_per_tensor": "fp8", "fp8_per_channel": "fp8",
    "fp8_per_block": "fp8_block", "deepseek_v4_fp8": "fp8_block", "modelopt_fp4": "nvfp4", "nvfp4_online": "nvfp4",
    "nvfp4_per_token": "nvfp4", "mxfp4": "mxfp4", "gpt_oss_mxfp4": "mxfp4", "awq": "int4", "awq_marlin": "int4", "gptq": "int4",
    "gptq_marlin": "int4", "auto_awq": "int4", "auto_gptq": "int4", "w8a8_int8": "int8", "int8_per_channel_weight_only": "int8",
}  # fmt: skip
"""--quantization -> format of the weights. Others (compressed-tensors, quark, torchao) hold several: the model's name tells."""
NAMES = (
    (r"nvfp4|modelopt-?fp4|[-_]fp4\b", "nvfp4"), (r"mxfp4|gpt-oss", "mxfp4"), (r"fp8[-_]?block", "fp8_block"),
    (r"(?<!kv)[-_]fp8|\bfp8", "fp8"), (r"awq|gptq|int4|w4a16|4bit", "int4"), (r"int8|w8a8", "int8"),
    (r"deepseek-(v3|r1)|kimi-k2", "fp8_block"),
)  # fmt: skip
"""What stands in the name of a model whose weights are in a format."""
DECIDES = re.compile(
    r"parallel|offload|cache|graph|compil|backend|quant|dtype|spec|batch|token|seq|prefill|chunk|lora|eplb|dbo|overlap|async|mamba|block|moe"
)
"""Words in the names of settings that may change time or memory."""
NEAR = 0.85
"""How like a setting that decides one must be that an engine does not know, so that the former is asked for."""
_READ = {
    "vllm": "model tensor_parallel_size pipeline_parallel_size data_parallel_size enable_expert_parallel max_num_seqs "
    "decode_context_parallel_size max_num_batched_tokens max_model_len gpu_memory_utilization kv_cache_dtype quantization dtype "
    "enforce_eager enable_prefix_caching enable_chunked_prefill speculative_config kv_transfer_config tokenizer_mode "
    "kv_events_config distributed_executor_backend data_parallel_size_local data_parallel_rpc_port "
    "data_parallel_address data_parallel_backend",
    "sglang": "model_path tp_size pp_size dp_size attn_dp_size enable_dp_attention ep_size dcp_size max_running_requests "
    "chunked_prefill_size context_length mem_fraction_static kv_cache_dtype quantization dtype disable_cuda_graph "
    "disable_radix_cache speculative_algorithm speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens "
    "speculative_draft_model_path disaggregation_mode disaggregation_transfer_backend stream_interval",
    "trtllm": "model model_path tensor_parallel_size pipeline_parallel_size moe_expert_parallel_size moe_tensor_parallel_size "
    "enable_attention_dp max_batch_size max_num_tokens max_seq_len enable_chunked_prefill free_gpu_memory_fraction kv_cache_config "
    "kv_cache_dtype cuda_graph_config speculative_config cache_transceiver_config disable_overlap_scheduler backend gpus_per_node "
    "max_beam_width",
}  # fmt: skip


@dataclass
class Stated:
    """What one server's command says, in the planner's words."""

    degrees: dict[str, int] = field(default_factory=dict)
    """Fields of ServingLayout, replicas but for copies."""
    batch: int | None = None
    """Sequences in one step of one engine."""
    tokens: int | None = None
    """Token budget of a step of one attention rank."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of EngineOptions."""
    cache: str | None = None
    quantization: str = ""
    dtype: str = ""
    draft: dict[str, Any] = field(default_factory=dict)
    """depth, and draft_parameters where they are known; {} = none."""
    stream: int = 0
    """Traffic.stream, where each token by itself would cost its server time that is known."""
    unread: list[str] = field(default_factory=list)
    noise: list[str] = field(default_factory=list)


def stated_by(server: Server, model: ModelSpec, settings: Settings) -> Stated:
    """One server's settings. Raises PlannerError for values of a wrong type."""
    found: Stated = _ENGINES[server.engine](settings, model)
    for key in _READ[server.engine].split():
        settings.asked.add(key)
    known = recorded(server.engine)["programs"][PROGRAMS[server.engine]]
    config = recorded("trtllm")["programs"]["trtllm-serve --config"] if server.engine == "trtllm" else {}
    for text in settings.left():
        name = text.partition(" = ")[0].partition(".")[0]
        there = f"--{name.replace('_', '-')}" in known or f"--{name}" in known or name in config
        near = difflib.get_close_matches(name, _READ[server.engine].split(), n=1, cutoff=NEAR)
        if not there and near and near[0] not in server.settings and near[0] not in settings.data:
            choices = (str(settings.data.get(name, "")),)
            settings.ask(Question(name=near[0], about=f"{shown(name)} is no setting of {server.engine}", choices=choices))
        (found.unread if DECIDES.search(name) or not there else found.noise).append(text)
    return found


def _vllm(one: Settings, model: ModelSpec) -> Stated:
    tp, pp, dp = (one.size(f"{name}_parallel_size") for name in ("tensor", "pipeline", "data"))
    groups = dp if model.is_moe else 1
    spread = one.flag("enable_expert_parallel") and model.is_moe
    degrees = {
        "tp": tp,
        "pp": pp,
        "attn_dp": groups,
        "replicas": 1 if model.is_moe else dp,
        "dcp": one.size("decode_context_parallel_size"),
    }
    degrees |= {"ep": tp * groups, "moe_tp": 1} if spread else {"ep": 1, "moe_tp": tp * groups if model.is_moe else 1}
    batch = one.number("max_num_seqs")
    return Stated(
        degrees=degrees, batch=None if batch is None else batch * groups, tokens=one.number("max_num_batched_tokens"),
        options=_options(one, "gpu_memory_utilization", "max_model_len") | {
            "prefix_caching": _maybe(one, "enable_prefix_caching"), "chunked_prefill": _maybe(one, "enable_chunked_prefill"),
            "eager": one.flag("enforce_eager"),
        },
        cache=_cache(one.get("kv_cache_dtype")), quantization=str(one.get("quantization", "")), dtype=str(one.get("dtype", "")),
        draft=_vllm_draft(one, model),
    )  # fmt: skip


def _drafting(one: Settings) -> Settings | None:
    """What says how tokens are drafted; None where nothing does. Raises PlannerError for what is no mapping."""
    held = one.data.get("speculative_config")
    if isinstance(held, dict):
        return one.section("speculative_config")
    if held is None or str(held).strip().lower() in ("", "none", "null"):
        return None
    raise PlannerError(
        f"{one.path}: speculative_config {shown(held)} is no mapping in JSON; quote it, as a shell takes its quotation marks and "
        "braces away"
    )


def _vllm_draft(one: Settings, model: ModelSpec) -> dict[str, Any]:
    part = _drafting(one)
    if part is None:
        return {}
    depth, method, name = part.size("num_speculative_tokens"), str(part.get("method", "")), str(part.get("model", ""))
    return {
        "depth": depth,
        "draft_parameters": _draft_size(method or ("eagle" if "eagle" in name.lower() else ""), model),
    }


def _sglang(one: Settings, model: ModelSpec) -> Stated:
    ranks, pp, dp = one.size("tp_size"), one.size("pp_size"), one.size("dp_size")
    groups = one.size("attn_dp_size")
    if one.flag("enable_dp_attention"):
        groups, dp = dp, 1
    if ranks % groups:
        raise PlannerError(
            f"{one.path}: tp_size {ranks} does not divide by the {groups} groups of attention data parallelism"
        )
    ep = one.size("ep_size") if model.is_moe else 1
    if ranks % ep:
        raise PlannerError(f"{one.path}: tp_size {ranks} does not divide by ep_size {ep}")
    degrees = {
        "tp": ranks // groups,
        "pp": pp,
        "attn_dp": groups,
        "replicas": dp,
        "ep": ep,
        "dcp": one.size("dcp_size"),
    }
    degrees["moe_tp"] = ranks // ep if model.is_moe else 1
    chunk = one.number("chunked_prefill_size", least=-1)
    options = _options(one, "mem_fraction_static", "context_length")
    options |= {
        "prefix_caching": False if one.flag("disable_radix_cache") else None,
        "eager": one.flag("disable_cuda_graph"),
    }
    options["chunked_prefill"] = False if chunk is not None and chunk <= 0 else None
    return Stated(
        degrees=degrees, batch=one.number("max_running_requests"), tokens=max(chunk // groups, 1) if chunk and chunk > 0 else None,
        options=options, cache=_cache(one.get("kv_cache_dtype")), quantization=str(one.get("quantization", "")),
        dtype=str(one.get("dtype", "")), draft=_sglang_draft(one, model), stream=one.number("stream_interval") or 1,
    )  # fmt: skip


def _sglang_draft(one: Settings, model: ModelSpec) -> dict[str, Any]:
    method = str(one.get("speculative_algorithm", "")).lower()
    if not method:
        return {}
    depth = one.number("speculative_num_steps") or (one.number("speculative_num_draft_tokens") or 2) - 1
    own = method in ("eagle", "nextn") and one.get("speculative_draft_model_path") is None
    return {"depth": max(depth, 1), "draft_parameters": _draft_size("mtp" if own else method, model)}


def _trtllm(one: Settings, model: ModelSpec) -> Stated:
    ranks, pp = one.size("tensor_parallel_size"), one.size("pipeline_parallel_size")
    whole = one.flag("enable_attention_dp")
    ep, split = one.number("moe_expert_parallel_size"), one.number("moe_tensor_parallel_size")
    ep = ep or (ranks // split if split else 1)
    if not ep or ranks % ep:
        raise PlannerError(f"{one.path}: tensor_parallel_size {ranks} does not divide by moe_expert_parallel_size {ep}")
    degrees = {"tp": 1 if whole else ranks, "pp": pp, "attn_dp": ranks if whole else 1, "ep": ep if model.is_moe else 1}
    degrees["moe_tp"] = ranks // ep if model.is_moe else 1
    cache = one.section("kv_cache_config")
    share = cache.get("free_gpu_memory_fraction", one.get("free_gpu_memory_fraction"))
    batch = one.number("max_batch_size")
    options = {
        "memory_share": share, "max_length": one.number("max_seq_len"), "chunked_prefill": _maybe(one, "enable_chunked_prefill"),
        "prefix_caching": _maybe(cache, "enable_block_reuse"),
        "eager": "cuda_graph_config" in one.data and one.data["cuda_graph_config"] is None,
    }  # fmt: skip
    draft = {}
    part = _drafting(one)
    if part is not None:
        method = str(part.get("decoding_type", "")).lower()
        depth = part.number("num_nextn_predict_layers") or part.size("max_draft_len")
        draft = {"depth": depth, "draft_parameters": _draft_size(method, model)}
    return Stated(
        degrees=degrees, batch=None if batch is None else batch * degrees["attn_dp"], tokens=one.number("max_num_tokens"),
        options=options, cache=_cache(cache.get("dtype", one.get("kv_cache_dtype"))), draft=draft,
    )  # fmt: skip


_ENGINES: dict[str, Callable[[Settings, ModelSpec], Stated]] = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}


def _options(one: Settings, share: str, length: str) -> dict[str, Any]:
    return {
        "memory_share": one.get(share),
        "max_length": None if one.get(length) in ("auto", -1) else one.number(length, least=2),
    }


def _maybe(one: Settings, name: str) -> bool | None:
    return None if one.get(name) is None else one.flag(name)


def _cache(value: Any) -> str | None:
    """Format of keys and values; None = by the engine's default."""
    return None if value in (None, "", "auto") else CACHES.get(str(value), str(value))


def _draft_size(method: str, model: ModelSpec) -> float | None:
    """Parameters that are read for a drafted token: 0 of a lookup, a layer and the head of a head that drafts; None = unknown."""
    if "ngram" in method or method in ("suffix", "prompt_lookup"):
        return 0.0
    if any(one in method for one in ("mtp", "eagle", "nextn", "medusa")):
        return draft_head(model)
    return None


def weights_of(stated: Stated, model_text: str, said: Given, ask: Callable[[Question], None]) -> str:
    """Format of the weights: as the user says, by --quantization, by the model's name, else by --dtype; asked where it is open."""
    if (given := said.setting("weights")) is not None:
        return str(value_of(given))
    by_name = next((kind for form, kind in NAMES if re.search(form, model_text.lower())), "")
    if stated.quantization:
        known = FORMATS.get(stated.quantization) or by_name
        if not known:
            ask(
                Question(
                    name="weights",
                    about=f"their format under {stated.quantization}",
                    choices=("fp8", "int4", "int8", "nvfp4"),
                )
            )
        return known or "bf16"
    return by_name or {"float16": "fp16", "half": "fp16"}.get(stated.dtype, "bf16")
