"""vLLM: the command line that serves the plan's model on the plan's GPUs."""

import dataclasses

from planner.trainers.bundle.served import served, serving_refusals
from planner.trainers.bundle.serving import STEP_TOKENS, UTILISATION, Serving
from planner.trainers.bundle.target import ExportJob, Rendered
from planner.trainers.vllm import VERSIONS


def refusals(job: ExportJob) -> list[str]:
    """What vLLM cannot serve here."""
    return serving_refusals(job, "vLLM")


def flags(one: Serving, model: str) -> list[str]:
    """Words of ``vllm serve`` for one server."""
    words = [
        "vllm", "serve", model, "--tensor-parallel-size", str(one.tp), "--pipeline-parallel-size", str(one.pp),
        "--data-parallel-size", str(one.dp), "--dtype", "bfloat16", "--max-model-len", str(one.length),
        "--max-num-seqs", str(max(one.sequences, 1)), "--max-num-batched-tokens", str(max(STEP_TOKENS, one.length)),
        "--gpu-memory-utilization", f"{UTILISATION:g}", "--distributed-executor-backend", "mp",
    ]  # fmt: skip
    if one.ep > 1:
        words.append("--enable-expert-parallel")
    if one.nodes > 1:
        words += [
            "--nnodes", str(one.nodes), "--node-rank", "$SERVER_NODE_RANK", "--master-addr", "$SERVER_ADDR",
            "--master-port", "$MASTER_PORT", "${headless[@]}",
        ]  # fmt: skip
    return words


_HEADLESS = (
    "# The first node of a server answers requests, the others compute for it.",
    'if [ "$SERVER_NODE_RANK" = 0 ]; then headless=(); else headless=(--headless); fi',
)


def render(job: ExportJob) -> Rendered:
    """The flags, once with the trained weights and once with random ones."""
    found = served(job, flags, f"vllm{VERSIONS}")
    many = "--nnodes" in found.entry
    return dataclasses.replace(found, prepare=(*found.prepare, *_HEADLESS)) if many else found
