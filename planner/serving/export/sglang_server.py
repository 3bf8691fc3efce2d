"""SGLang: words of ``python -m sglang.launch_server``, and its router.

--tp-size counts all ranks of a stage: attention data parallel groups (--attn-dp-size) are cut out of it, and the experts are spread
over it. Largest batch and chunk are those of all groups together. [sglang 0.5.23 arg_groups/parallel_hook.py: dp attention divides
chunked_prefill_size; pd_disaggregation_hook.py: max_running_requests]
"""

from planner.serving.export.serve_job import ModelNames, Pool, ServeJob

PROGRAM = ("python", "-m", "sglang.launch_server")
CHECKED = "sglang.launch_server"
ROUTER, ROUTER_PROGRAM = "sglang-router", ("python", "-m", "sglang_router.launch_router")
INSTALL = "pip install 'sglang{pin}'"
ROUTER_INSTALL = "pip install sglang-router"
CACHE = {"": "auto", "bf16": "bf16", "fp16": "auto", "fp8": "fp8_e4m3"}
HOST_METHODS = {"fp8": "FP8", "fp8_block": "FP8", "int4": "RAWINT4", "int8": "AMXINT8"}
"""Formats of experts on the CPU as KTransformers calls them; BF16 for all others."""


def refusals(_: ServeJob) -> list[str]:
    """What its flags cannot say: nothing. Ranks of a stage beyond ep split each expert where --moe-dp-size is 1, as it is."""
    return []


def words(job: ServeJob, pool: Pool, names: ModelNames) -> list[str]:
    """Words behind ``sglang.launch_server --model-path MODEL`` without addresses and ranks."""
    one, options, groups = pool.layout, job.plan.options, int(pool.layout.attn_dp)
    found = ["--tp-size", str(one.ranks)]
    if int(one.pp) > 1:
        found += ["--pp-size", str(one.pp)]
    if groups > 1 and job.before(0, 5, 23):
        found += ["--dp-size", str(groups), "--enable-dp-attention"]  # as it was called before; 0.5.23 still takes it
    elif groups > 1:
        found += ["--attn-dp-size", str(groups)]
    if job.plan.model.is_moe and int(one.ep) > 1:
        found += ["--ep-size", str(one.ep)]
    if int(one.dcp) > 1:
        found += ["--dcp-size", str(one.dcp)]
    chunk = -1 if options.chunked_prefill is False else int(one.max_tokens) * groups
    found += ["--max-running-requests", str(pool.rank_batch * groups), "--chunked-prefill-size", str(chunk)]
    found += [
        "--context-length",
        str(job.length),
        "--dtype",
        job.dtype,
        "--kv-cache-dtype",
        CACHE[job.cache],
    ]
    found += names.quantization
    if job.host_bytes(pool):
        kept = job.plan.model.num_experts * int(one.gpu_weights) // 100
        method = HOST_METHODS.get(job.plan.precision.experts or job.plan.precision.weights, "BF16")
        found += ["--kt-num-gpu-experts", str(kept), "--kt-method", method, "--kt-weight-path", names.model]
    if (share := job.memory_share(pool)) is not None:
        found += ["--mem-fraction-static", f"{share:g}"]
    if options.prefix_caching is False:
        found.append("--disable-radix-cache")
    if options.eager:
        found.append("--disable-cuda-graph")
    if (steps := job.stream_interval(pool)) > 1:
        found += ["--stream-interval", str(steps)]
    if job.speculation is not None:
        found += _speculation(job, names)
    if job.disaggregated:
        found += ["--disaggregation-mode", pool.name, "--disaggregation-transfer-backend", "nixl"]
    return found


def _speculation(job: ServeJob, names: ModelNames) -> list[str]:
    """The numbers of steps, branches and drafted tokens go together: all of them or none."""
    assert job.speculation is not None
    depth = job.speculation.depth
    if job.speculation.draft_parameters == 0:
        return ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(depth + 1)]
    other = "EAGLE3" if job.head_drafts else "STANDALONE"
    kind = ["EAGLE"] if job.own_draft else [other, "--speculative-draft-model-path", names.draft]
    numbers = ["--speculative-num-steps", str(depth), "--speculative-eagle-topk", "1"]
    return ["--speculative-algorithm", *kind, *numbers, "--speculative-num-draft-tokens", str(depth + 1)]


def command(job: ServeJob, pool: Pool) -> tuple[list[str], list[str]]:
    """(shell lines before it, words) of one engine in its script."""
    found = [*PROGRAM, "--model-path", "$MODEL", *words(job, pool, ModelNames())]
    before = []
    if pool.name == "prefill":
        before.append("bootstrap=$(( 8998 + ENGINE_SLOT ))")
        found += ["--disaggregation-bootstrap-port", "$bootstrap"]
    if pool.nodes > 1:
        found += [
            "--nnodes",
            str(pool.nodes),
            "--node-rank",
            "$ENGINE_RANK",
            "--dist-init-addr",
            "$ENGINE_ADDR:$MASTER_PORT",
        ]
    return before, [*found, "--host", "0.0.0.0", "--port", "$PORT", "$@"]


def router(job: ServeJob) -> list[str]:
    """Words behind the router's program; ``urls``, ``prefill`` and ``decode`` are arrays of its script."""
    ends = ["--host", "0.0.0.0", "--port", "$PORT", "--policy", "round_robin"]
    if job.disaggregated:
        return ["--pd-disaggregation", "${prefill[@]}", "${decode[@]}", *ends]
    return ["--worker-urls", "${urls[@]}", *ends]
