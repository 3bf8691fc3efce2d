"""How to serve a plan's model on the plan's GPUs: the fewest GPUs per copy that hold the weights and a stated KV cache.

Serving needs two bytes per weight and the keys and values of the sequences under way, not states and activations of a
training step, so it has a layout of its own. What is counted, per GPU:

weights     2 (sharded / tp + replicated + experts / (ep or tp)) / pp, embedding and head over tp on their stages
KV cache    per token and layer 2 k d 2 bytes over min(tp, k): key-value heads are repeated above k ranks; with latent
            attention 2 (rank + rope) bytes on every rank [vLLM and SGLang hold the compressed state whole on each]
step        the widest tensors of STEP_TOKENS tokens: residual stream, MLP over tp, fp32 logits of the sequences
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from planner.cost.parameters import count_parameters
from planner.model import ModelSpec
from planner.rules import divisors
from planner.trainers.bundle.model_config import model_config
from planner.trainers.bundle.quoting import json_text, run_of
from planner.trainers.bundle.target import ExportJob, Rendered, layer_parameters
from planner.units import GIB

VENDORS = ("NVIDIA", "AMD")
UTILISATION = 0.90
"""Part of the device memory that the server may use: --gpu-memory-utilization and, for SGLang, what mem-fraction aims at."""
WEIGHT_BYTES = 2.0
"""bf16, as the checkpoint of the training run."""
STEP_TOKENS = 8192
"""Tokens that one step of the server computes at most."""
SEQUENCES = (16, 8, 4, 2, 1)
"""Sequences of full length per copy of the model whose KV cache must fit: the first number that does is stated."""


@dataclass(frozen=True, kw_only=True)
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
    """Bytes of activations, runtime and communicators."""
    budget: float
    """Bytes that the server may use."""


def serving(job: ExportJob) -> Serving | None:
    """The layout with the fewest GPUs per copy; None when not even all of the plan's GPUs hold the weights.

    A dense model: tp within a node as small as fits, copies fill the node; beyond a node, pipeline stages of whole nodes.
    A mixture of experts: one server fills the node, experts over all its GPUs, attention over as few as fit.
    """
    per_node, nodes = job.gpus_per_node, 1
    while nodes * per_node <= job.cluster.num_gpus:
        for one in (one for sequences in SEQUENCES for one in _options(job, per_node, nodes, sequences)):
            if one.weights + one.cache + one.step <= one.budget:
                return one
        nodes *= 2
    return None


def _options(job: ExportJob, per_node: int, nodes: int, sequences: int) -> list[Serving]:
    """Layouts of one server on ``nodes`` nodes, fewest GPUs per copy first."""
    model = job.model
    legal = [tp for tp in divisors(per_node) if legal_tp(model, tp)]
    if nodes > 1:
        stages = [(tp, nodes * per_node // tp) for tp in legal[::-1][:1] if nodes * per_node // tp <= model.num_layers]
        return [_layout(job, tp, pp, 1, nodes, sequences) for tp, pp in stages]
    spread = [tp for tp in legal if not model.is_moe or model.num_experts % per_node == 0 or tp == per_node]
    return [_layout(job, tp, 1, per_node // tp, 1, sequences) for tp in spread]


def legal_tp(model: ModelSpec, tp: int) -> bool:
    """Heads divide by tp, key-value heads divide or are repeated evenly, MLP widths divide.

    [vLLM: ModelConfig.verify_with_parallel_config and the attention layers of its models; SGLang's models likewise]
    """
    kv = model.num_kv_heads
    heads = model.num_heads % tp == 0 and (model.is_mla or kv % tp == 0 or tp % kv == 0)
    widths = [model.ffn_size, *([model.shared_expert_ffn_size] if model.shared_expert_ffn_size else [])]
    return heads and all(width % tp == 0 for width in widths)


def _layout(job: ExportJob, tp: int, pp: int, dp: int, nodes: int, sequences: int) -> Serving:
    model, hardware = job.model, job.cluster.hardware
    length = min(job.workload.sequence_length, model.max_sequence_length)
    ep = tp * dp if model.is_moe and model.num_experts % (tp * dp) == 0 else 1
    return Serving(
        tp=tp, pp=pp, dp=dp, ep=ep, nodes=nodes, sequences=sequences, length=length,
        servers=max(job.cluster.num_gpus // job.gpus_per_node // nodes, 1), weights=weight_bytes(model, tp, pp, dp, ep),
        cache=cache_bytes(model, tp, pp, sequences, length),
        step=_step_bytes(model, tp, dp, ep, sequences)
        + hardware.context_memory + hardware.workspace_memory + hardware.communicator_memory * ((tp > 1) + (ep > 1)),
        budget=UTILISATION * hardware.usable_memory,
    )  # fmt: skip


def weight_bytes(model: ModelSpec, tp: int, pp: int, dp: int, ep: int) -> float:
    """Bytes of weights on the fullest GPU. Without expert parallelism experts are cut over all tp dp ranks."""
    counts = count_parameters(model)
    dense, sparse = layer_parameters(model, tp, ep if ep > 1 else tp * dp)
    stages = [range(rank * model.num_layers // pp, (rank + 1) * model.num_layers // pp) for rank in range(pp)]
    layers = [sum(sparse if model.is_moe_layer(i) else dense for i in stage) for stage in stages]
    layers[0] += counts.input_embedding / tp + counts.position_embedding
    layers[-1] += (counts.head or (counts.input_embedding if pp > 1 else 0.0)) / tp + counts.final_norm
    return WEIGHT_BYTES * max(layers)


def cache_bytes(model: ModelSpec, tp: int, pp: int, sequences: int, length: int) -> float:
    """Bytes of keys and values of ``sequences`` full sequences on one GPU of the stage with the most layers."""
    if model.is_mla:
        per_token = 2.0 * (model.kv_lora_rank + model.qk_rope_head_dim)
    else:
        per_token = 2.0 * (model.key_size + model.value_size) / min(tp, model.num_kv_heads)
    windowed = model.num_windowed_layers * min(model.window, length) if model.window else 0
    tokens = (model.num_layers - model.num_windowed_layers) * length + windowed
    share = -(-model.num_layers // pp) / model.num_layers
    return sequences * per_token * tokens * share


def _step_bytes(model: ModelSpec, tp: int, dp: int, ep: int, sequences: int) -> float:
    """Residual stream and its norm, the two halves of a gated MLP and their product, experts' inputs, fp32 logits."""
    tokens = float(STEP_TOKENS)
    mlp = 3.0 * model.ffn_size / tp
    if model.is_moe:
        visits = model.top_k * dp / ep if ep > 1 else float(model.top_k)
        mlp = max(mlp, visits * (2.0 * model.hidden_size + 3.0 * model.expert_ffn_size / (1 if ep > 1 else tp * dp)))
    return 2.0 * tokens * (2.0 * model.hidden_size + mlp) + 4.0 * 2.0 * sequences * model.vocab_size


def serving_refusals(job: ExportJob, name: str) -> list[str]:
    """What neither server can serve: no room, no device, layers that are no whole part of a node."""
    hardware = job.cluster.hardware
    if hardware.vendor not in VENDORS:
        return [f"{name} is exported for {' and '.join(VENDORS)} GPUs, and {hardware.name} is from {hardware.vendor}"]
    if serving(job) is None:
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
        job, server, files, one=serving(job), config=config, step_tokens=STEP_TOKENS, utilisation=UTILISATION, gib=GIB
    )


def exporter(server: str, name: str) -> tuple[Callable[[ExportJob], list[str]], Callable[[ExportJob], Rendered]]:
    """What export.py of a server has: refusals and render; ``server`` is its folder."""
    return partial(serving_refusals, name=name), partial(served, server=server)
