"""How to serve a plan's model on the plan's GPUs: the fewest GPUs per copy that hold the weights and a stated KV cache.

Memory and what is legal are those of ``planner.serving``; speed is not priced here, ``plan serve`` does that. What the engine's own
accounting leaves for its cache must hold SEQUENCES full sequences, without raising its share of the memory.
"""

from collections.abc import Callable
from functools import partial

from planner.layout import divisors
from planner.record import record
from planner.serving.engine import load_engine
from planner.serving.serving_layout import Precision, ServingLayout
from planner.serving.serving_memory import serving_memory
from planner.serving.serving_rules import legal
from planner.serving.traffic import Lengths, Traffic
from planner.trainers.bundle.model_config import model_config
from planner.trainers.bundle.quoting import json_text, run_of
from planner.trainers.bundle.target import ExportJob, Rendered
from planner.units import GIB

VENDORS = ("NVIDIA", "AMD")
STEP_TOKENS = 8192
"""Tokens that one step of the server computes at most."""
SEQUENCES = (16, 8, 4, 2, 1)
"""Sequences of full length per copy of the model whose KV cache must fit: the first number that does is stated."""


@record
class Serving:
    """Layout of one server: ``tp * pp * dp`` GPUs."""

    tp: int
    """Tensor parallel degree of attention and dense layers."""
    pp: int
    """Pipeline stages."""
    dp: int
    """Copies of the attention layers in this server, each with its own sequences."""
    ep: int
    """Ranks over which experts are spread: tp * dp, or 1 for a dense model."""
    nodes: int
    """Nodes of one server."""
    servers: int
    """Servers on the plan's GPUs, independent of each other."""
    sequences: int
    """Sequences of ``length`` tokens that each copy holds at once."""
    length: int
    """Tokens of a sequence, prompt and answer."""
    weights: float
    """Bytes of weights on the fullest GPU."""
    cache: float
    """Bytes of the stated KV cache on a GPU."""
    step: float
    """Bytes that the server keeps for a step, graphs, runtime and communicators, or leaves free."""
    budget: float
    """Memory of the device, bytes."""


def serving(job: ExportJob, server: str = "vllm") -> Serving | None:
    """The layout with the fewest GPUs per copy; None when not even all of the plan's GPUs hold the weights.

    A dense model: tp within a node as small as fits, copies fill the node; beyond a node, pipeline stages of whole nodes.
    A mixture of experts: one server fills the node, experts over all its GPUs, attention over as few as fit.
    """
    per_node, nodes = job.gpus_per_node, 1
    while nodes * per_node <= job.cluster.num_gpus:
        for sequences in SEQUENCES:
            for tp, pp, dp in _options(job, per_node, nodes):
                if one := held(job, server, (tp, pp, dp, nodes), sequences):
                    return one
        nodes *= 2
    return None


def _options(job: ExportJob, per_node: int, nodes: int) -> list[tuple[int, int, int]]:
    """tp, pp and dp of one server on ``nodes`` nodes, fewest GPUs per copy first."""
    model = job.model
    tps = [tp for tp in divisors(per_node) if model.num_heads % tp == 0]
    if nodes > 1:
        return [(tp, nodes * per_node // tp, 1) for tp in tps[::-1][:1] if nodes * per_node // tp <= model.num_layers]
    spread = [tp for tp in tps if not model.is_moe or model.num_experts % per_node == 0 or tp == per_node]
    return [(tp, 1, per_node // tp) for tp in spread]


def held(job: ExportJob, server: str, degrees: tuple[int, int, int, int], sequences: int) -> Serving | None:
    """A layout of tp, pp, dp and nodes with the cache of ``sequences`` full sequences; None where it is illegal or too large."""
    tp, pp, dp, nodes = degrees
    model, hardware, engine = job.model, job.cluster.hardware, load_engine(server)
    length = min(job.workload.sequence_length, model.max_sequence_length)
    ep = tp * dp if model.is_moe and model.num_experts % (tp * dp) == 0 else 1
    copies, groups = (1, dp) if model.is_moe else (dp, 1)
    layout = ServingLayout(
        tp=tp, pp=pp, replicas=copies, attn_dp=groups, ep=ep, moe_tp=tp * dp // ep if model.is_moe else 1,
        max_batch=sequences * groups, max_tokens=STEP_TOKENS,
    )  # fmt: skip
    if not legal(model, hardware, engine, Precision(), layout):
        return None
    traffic = Traffic(input=Lengths.fixed(max(length - 1, 1)), output=Lengths.fixed(1))
    found = serving_memory(model, hardware, engine, Precision(), layout, traffic)
    cache = sequences * (float(found.bytes_per_token) * length + float(found.bytes_per_sequence))
    if found.raised or cache > float(found.cache):
        return None
    return Serving(
        tp=tp, pp=pp, dp=dp, ep=ep, nodes=nodes, sequences=sequences, length=length,
        servers=max(job.cluster.num_gpus // job.gpus_per_node // nodes, 1), weights=float(found.weights), cache=cache,
        step=found.usable - float(found.weights) - float(found.cache), budget=found.usable,
    )  # fmt: skip


def serving_refusals(job: ExportJob, server: str, name: str) -> list[str]:
    """What neither server can serve: no room, no device, layers that are no whole part of a node."""
    hardware = job.cluster.hardware
    if hardware.vendor not in VENDORS:
        return [f"{name} is exported for {' and '.join(VENDORS)} GPUs, and {hardware.name} is from {hardware.vendor}"]
    if serving(job, server) is None:
        return [
            f"{job.cluster.num_gpus} x {hardware.usable_memory / GIB:.0f} GiB do not hold the bf16 weights of "
            f"{job.model.name} and the KV cache of one sequence of {job.workload.sequence_length} tokens with a tensor "
            f"parallel degree that divides its {job.model.num_heads} heads; plan for more GPUs"
        ]
    return []


def served(job: ExportJob, server: str) -> Rendered:
    """How one server is started, once with the trained weights and once with random ones: run.txt in its folder."""
    config = model_config(job.model)
    files = {"model/config.json": json_text(config)} if config else {}
    return run_of(
        job,
        server,
        files,
        one=serving(job, server),
        config=config,
        step_tokens=STEP_TOKENS,
        gib=GIB,
        utilisation=load_engine(server).accounting.share,
    )


def exporter(server: str, name: str) -> tuple[Callable[[ExportJob], list[str]], Callable[[ExportJob], Rendered]]:
    """What export.py of a server has: refusals and render; ``server`` is its folder."""
    return partial(serving_refusals, server=server, name=name), partial(served, server=server)
