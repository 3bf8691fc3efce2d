"""SGLang: the command line that serves the plan's model on the plan's GPUs."""

import math

from planner.trainers.bundle.served import served, serving_refusals
from planner.trainers.bundle.serving import STEP_TOKENS, UTILISATION, Serving
from planner.trainers.bundle.target import ExportJob, Rendered
from planner.trainers.sglang import VERSIONS

PORT = 30000


def refusals(job: ExportJob) -> list[str]:
    """What SGLang cannot serve here."""
    return serving_refusals(job, "SGLang")


def flags(one: Serving, model: str, moe: bool) -> list[str]:
    """Words that start one server.

    ``--tp-size`` counts all ranks of a stage: attention data parallel groups (``--attn-dp-size``) are cut out of it, and
    the experts are spread over it. Copies of a dense model are ``--dp-size``, each with tp-size ranks of its own.
    """
    attention = one.dp if moe else 1
    fraction = (one.weights + one.cache) / one.budget * UTILISATION
    words = [
        "python", "-m", "sglang.launch_server", "--model-path", model, "--tp-size", str(one.tp * attention),
        "--pp-size", str(one.pp), "--dp-size", str(1 if moe else one.dp), "--attn-dp-size", str(attention),
        "--ep-size", str(one.ep), "--dtype", "bfloat16", "--context-length", str(one.length),
        "--max-running-requests", str(one.sequences * one.dp), "--chunked-prefill-size", str(STEP_TOKENS * attention),
        "--mem-fraction-static", f"{math.ceil(100 * min(max(fraction, 0.5), UTILISATION)) / 100:.2f}", "--nnodes", str(one.nodes),
    ]  # fmt: skip
    if one.nodes > 1:
        words += ["--node-rank", "$SERVER_NODE_RANK", "--dist-init-addr", "$SERVER_ADDR:$MASTER_PORT"]
    return [*words, "--host", "0.0.0.0", "--port", str(PORT)]


def render(job: ExportJob) -> Rendered:
    """The flags, once with the trained weights and once with random ones."""
    return served(job, lambda one, model: flags(one, model, job.model.is_moe), f"sglang{VERSIONS}")
