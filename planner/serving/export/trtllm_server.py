"""TensorRT-LLM: the file after ``trtllm-serve --config``, the words around it, and what stands before several engines.

[tensorrt_llm/llmapi/llm_args.py: TorchLlmArgs and the classes in it refuse keys that they do not know;
examples/disaggregated/README.md]
"""

import math
from typing import Any

from planner.serving.export.serve_job import ModelNames, Pool, ServeJob

PROGRAM = ("trtllm-serve",)
CHECKED = "trtllm-serve"
ROUTER, ROUTER_PROGRAM = "", ()
INSTALL = "# TensorRT-LLM comes as a container: nvcr.io/nvidia/tensorrt-llm/release, pip name tensorrt_llm{pin}"
ROUTER_INSTALL = "apt-get install nginx"
BLOCK = 32
"""Tokens of a block of its cache, of which max_num_tokens is a multiple."""
CACHE = {"": "auto", "bf16": "bfloat16", "fp16": "float16", "fp8": "fp8"}


def refusals(job: ServeJob) -> list[str]:
    """What its configuration cannot say."""
    found = []
    for pool in job.pools:
        one = pool.layout
        if int(one.dcp) > 1:
            found.append(
                f"TensorRT-LLM has no split of the cache in decode, and the {pool.name} layout has dcp {one.dcp}; choose dcp 1"
            )
        if int(one.attn_dp) > 1 and int(one.tp) > 1:
            found.append(
                f"TensorRT-LLM has one attention rank on each GPU of a stage or none, and the {pool.name} layout has tp {one.tp} x "
                f"attn_dp {one.attn_dp}; choose tp 1, or attn_dp 1"
            )
    return found


def config(job: ServeJob, pool: Pool, names: ModelNames) -> dict[str, Any]:
    """The configuration of one engine."""
    one, options, model = pool.layout, job.plan.options, job.plan.model
    chunked = options.chunked_prefill if options.chunked_prefill is not None else job.engine.chunked_prefill
    tokens = math.ceil(int(one.max_tokens) / BLOCK) * BLOCK
    found: dict[str, Any] = {"tensor_parallel_size": int(one.ranks), "pipeline_parallel_size": int(one.pp)}
    if model.is_moe:
        found |= {"moe_expert_parallel_size": int(one.ep), "moe_tensor_parallel_size": int(one.moe_tp)}
    if int(one.attn_dp) > 1:
        found["enable_attention_dp"] = True
    if pool.nodes > 1:
        found["gpus_per_node"] = pool.gpus_per_node
    found |= {
        "max_batch_size": pool.rank_batch, "max_num_tokens": tokens, "max_seq_len": job.length,
        "enable_chunked_prefill": bool(chunked or tokens < job.plan.traffic.input.longest),
        "kv_cache_config": {
            "dtype": CACHE[job.cache], "enable_block_reuse": options.prefix_caching is not False,
            "free_gpu_memory_fraction": job.memory_share(pool) or 0.9,
        },
        "cuda_graph_config": None if options.eager else {"enable_padding": True, "max_batch_size": pool.rank_batch},
    }  # fmt: skip
    if job.speculation is not None:
        found["speculative_config"] = _speculation(job, names)
    if job.disaggregated:
        found["disable_overlap_scheduler"] = pool.name == "prefill"
        found["cache_transceiver_config"] = {
            "backend": "NIXL",
            "max_tokens_in_buffer": math.ceil(job.length / BLOCK) * BLOCK,
        }
    return found


def _speculation(job: ServeJob, names: ModelNames) -> dict[str, Any]:
    assert job.speculation is not None
    depth = job.speculation.depth
    if job.own_draft:
        return {"decoding_type": "MTP", "num_nextn_predict_layers": depth}
    if job.speculation.draft_parameters == 0:
        return {"decoding_type": "NGram", "max_draft_len": depth, "max_matching_ngram_size": 4}
    return {"decoding_type": "Draft_Target", "max_draft_len": depth, "speculative_model": names.draft}


def command(job: ServeJob, pool: Pool) -> tuple[list[str], list[str]]:
    """(shell lines before it, words) of one engine in its script; beyond a node MPI starts it from the first one."""
    drafted = job.speculation is not None and not job.own_draft and job.speculation.draft_parameters > 0
    file, before, launcher = f"{pool.name}.config.yaml", [], list[str]()
    if drafted:
        file = "$config"
        before.append(f'config="$(mktemp)"; sed "s|\\$DRAFT_MODEL|$DRAFT_MODEL|" {pool.name}.config.yaml > "$config"')
    if pool.nodes > 1:
        before.append('[ "$ENGINE_RANK" = 0 ] || exec sleep infinity  # MPI of the first node starts what runs here')
        launcher = [
            "mpirun",
            "-n",
            str(pool.gpus),
            "--host",
            "$ENGINE_HOSTS",
            "--map-by",
            f"ppr:{pool.gpus_on_node}:node",
        ]
        launcher += ["trtllm-llmapi-launch"]
    return before, [*launcher, *PROGRAM, "$MODEL", "--config", file, "--host", "0.0.0.0", "--port", "$PORT", "$@"]


def router(job: ServeJob) -> list[str]:
    """Words of what stands before the engines: its own server before two pools, else a proxy."""
    if job.disaggregated:
        return ["trtllm-serve", "disaggregated", "--config", "$config"]
    return ["nginx", "-c", "$config", "-g", "daemon off;"]
