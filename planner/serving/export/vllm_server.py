"""vLLM: words of ``vllm serve``, and its router. [vllm 0.33 engine/arg_utils.py, config/parallel.py, entrypoints/cli/serve.py]"""

import json
import math

from planner.serving.export.serve_job import ModelNames, Pool, ServeJob
from planner.units import GIB

PROGRAM = ("vllm", "serve")
CHECKED = "vllm serve"
"""Name of its flags in the record."""
ROUTER, ROUTER_PROGRAM = "vllm-router", ("vllm-router",)
"""Name of its flags in the record, and its words."""
INSTALL = "pip install 'vllm{pin}'"
ROUTER_INSTALL = "pip install vllm-router"
CACHE = {"": "auto", "bf16": "bfloat16", "fp16": "float16", "fp8": "fp8"}


def refusals(job: ServeJob) -> list[str]:
    """What its flags cannot say."""
    found = []
    for pool in job.pools:
        one = pool.layout
        if job.plan.options.chunked_prefill is False and int(one.max_tokens) < job.length:
            found.append(
                f"without chunked prefill vLLM needs a step of at least the {job.length} tokens of a sequence, and the {pool.name} "
                f"layout has {one.max_tokens}; raise max_tokens, or leave chunked_prefill on"
            )
        if job.plan.model.is_moe and int(one.ep) > 1 and not pool.all_experts_spread:
            found.append(
                f"vLLM spreads experts over all {one.ranks} ranks of a stage or over none, and the {pool.name} layout has "
                f"ep {one.ep}; choose ep {one.ranks} or ep 1"
            )
        if pool.nodes > 1 and int(one.attn_dp) > 1 and int(one.tp) * int(one.pp) > pool.gpus_per_node:
            found.append(
                f"an attention rank of tp {one.tp} x pp {one.pp} does not fit into a node of {pool.gpus_per_node} GPUs with "
                f"attn_dp {one.attn_dp}; choose tp x pp of at most {pool.gpus_per_node}"
            )
    return found


def words(job: ServeJob, pool: Pool, names: ModelNames) -> list[str]:
    """Words behind ``vllm serve MODEL`` without addresses and ranks."""
    one, options, plan = pool.layout, job.plan.options, job.plan
    found = ["--tensor-parallel-size", str(one.tp)]
    if int(one.pp) > 1:
        found += ["--pipeline-parallel-size", str(one.pp)]
    if int(one.attn_dp) > 1:
        found += ["--data-parallel-size", str(one.attn_dp)]
    if plan.model.is_moe and int(one.ep) > 1:
        found += ["--enable-expert-parallel"]
    if int(one.dcp) > 1:
        found += ["--decode-context-parallel-size", str(one.dcp)]
    found += ["--max-num-seqs", str(pool.rank_batch), "--max-num-batched-tokens", str(one.max_tokens)]
    found += ["--max-model-len", str(job.length), "--dtype", job.dtype, "--kv-cache-dtype", CACHE[job.cache]]
    found += names.quantization
    if on_host := job.host_bytes(pool):
        found += ["--cpu-offload-gb", f"{math.ceil(10.0 * on_host / GIB) / 10.0:g}"]
    if (share := job.memory_share(pool)) is not None:
        found += ["--gpu-memory-utilization", f"{share:g}"]
    for name, value in (
        ("enable-prefix-caching", options.prefix_caching),
        ("enable-chunked-prefill", options.chunked_prefill),
    ):
        if value is not None:
            found.append(f"--{name}" if value else f"--no-{name}")
    if options.eager:
        found.append("--enforce-eager")
    if job.speculation is not None:
        found += ["--speculative-config", json.dumps(_speculation(job, names))]
    if job.disaggregated:
        found += ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})]
    return found


def _speculation(job: ServeJob, names: ModelNames) -> dict[str, object]:
    assert job.speculation is not None
    depth = {"num_speculative_tokens": job.speculation.depth}
    if job.own_draft:
        return {"method": "mtp", **depth}
    if job.speculation.draft_parameters == 0:
        return {"method": "ngram", **depth, "prompt_lookup_max": 4}
    return {"model": names.draft, **depth}


def command(job: ServeJob, pool: Pool) -> tuple[list[str], list[str]]:
    """(shell lines before it, words) of one engine in its script."""
    before, found = [], [*PROGRAM, "$MODEL", *words(job, pool, ModelNames())]
    if job.disaggregated:
        before.append('export VLLM_NIXL_SIDE_CHANNEL_HOST="${ENGINE_HOST:-127.0.0.1}"')
        before.append("export VLLM_NIXL_SIDE_CHANNEL_PORT=$(( 5600 + 64 * ENGINE_SLOT ))")
    if pool.nodes > 1:
        before += ['headless=(); [ "$ENGINE_RANK" = 0 ] || headless=(--headless)']
        if int(pool.layout.attn_dp) > 1:
            local = int(pool.layout.attn_dp) // pool.nodes
            before.append(
                f'first=(); [ "$ENGINE_RANK" = 0 ] || first=(--data-parallel-start-rank $(( ENGINE_RANK * {local} )))'
            )
            found += ["--data-parallel-size-local", str(local), "--data-parallel-address", "$ENGINE_ADDR"]
            found += ["--data-parallel-rpc-port", "$MASTER_PORT", "${first[@]}"]
        else:
            found += [
                "--distributed-executor-backend",
                "mp",
                "--nnodes",
                str(pool.nodes),
                "--node-rank",
                "$ENGINE_RANK",
            ]
            found += ["--master-addr", "$ENGINE_ADDR", "--master-port", "$MASTER_PORT"]
        found.append("${headless[@]}")
        before.append('where=(); [ "$ENGINE_RANK" != 0 ] || where=(--host 0.0.0.0 --port "$PORT")')
        return before, [*found, "${where[@]}", "$@"]
    return before, [*found, "--host", "0.0.0.0", "--port", "$PORT", "$@"]


def router(job: ServeJob) -> list[str]:
    """Words behind the router's program; ``urls``, ``prefill`` and ``decode`` are arrays of its script."""
    ends = ["--host", "0.0.0.0", "--port", "$PORT", "--policy", "round_robin"]
    if job.disaggregated:
        return ["--vllm-pd-disaggregation", "${prefill[@]}", "${decode[@]}", *ends]
    return ["--worker-urls", "${urls[@]}", *ends]
