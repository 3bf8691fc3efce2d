"""The reference transformer: a plan's model as torch modules that work on what one rank holds.

Layers take and give tokens of this rank alone, (batch, tokens / tp, hidden). Tensor parallelism is laid over the modules
from outside (lab/run/training.py); the norms, attention over a context-parallel group and the exchange of experts know their
groups because they work on parts of tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd, wait_tensor
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from planner.lab.reference.attention_kernel import RAN, attend_by
from planner.lab.reference.eight_bits import QuantisedLinear, remembers
from planner.lab.reference.flash_attention import FlashAttention, SavedAttention
from planner.lab.reference.fused_operators import ACTIVATIONS, OPS, exact
from planner.lab.reference.local_part import whole
from planner.lab.reference.split import Split
from planner.model import ModelSpec

THETA = 500000.0
"""Base of the rotary positions; plans do not say it, and neither time nor memory depend on it."""
EPSILON = 1e-6


class ForwardPass:
    """Entered where layers and the loss run, also when recompute runs them again: the memory tracker reads how deep."""

    depth = 0
    """Forward passes that are running."""

    def __enter__(self) -> None:
        ForwardPass.depth += 1

    def __exit__(self, *_: object) -> None:
        ForwardPass.depth -= 1


FORWARD = ForwardPass()


@dataclass
class Place:
    """What a rank's modules share: which part of the sequence it has, and its groups (None: of one)."""

    cosine: Tensor | None = None
    """Of the rotary positions of this rank's part of the sequence, (1, tokens, 1, width / 2)."""
    sine: Tensor | None = None
    """The same."""
    positions: Tensor | None = None
    """Numbers of the tokens of this rank's part of the sequence."""
    context: Any = None
    """Process group of context parallelism."""
    experts: Any = None
    """Process group of expert parallelism."""
    attention: str = "best"
    """Kernel that attention is priced as."""


class Norm(nn.Module):
    """RMS norm or layer norm over the last dimension."""

    def __init__(self, size: int, kind: str, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.quantised = False
        """Its output goes into linear layers in 8 bits."""
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if kind == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        """Any shape that ends in the size."""
        weight = whole(self.weight)
        if self.bias is not None:
            return functional.layer_norm(x, weight.shape, weight, whole(self.bias), EPSILON)
        if self.fused:
            y = _rms_norm(x, weight)
            return remembers(y, _rms_norm, x, weight) if self.quantised else y
        wide = exact(x)  # in at least single precision  [transformers, LlamaRMSNorm]
        return weight * (wide * (wide.square().mean(-1, keepdim=True) + EPSILON).rsqrt()).to(x.dtype)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As one operator."""
    return OPS.rms_norm(x, weight, EPSILON)[0]


def angles(positions: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times theta^(-2 i / width), (1, tokens, 1, width / 2)."""
    half = width // 2
    rates = THETA ** (-torch.arange(half, device=positions.device, dtype=dtype) / half)
    turned = torch.outer(positions.to(dtype), rates)[None, :, None]
    return turned.cos(), turned.sin()


class Attention(nn.Module):
    """Grouped-query attention on the heads of this rank."""

    def __init__(self, model: ModelSpec, place: Place, fused: bool) -> None:
        super().__init__()
        self.place, self.width, self.fused, self.rotary = place, model.head_dim, fused, model.position == "rope"
        bias = model.qkv_bias or model.linear_bias
        self.q = nn.Linear(model.hidden_size, model.query_size, bias=bias)
        self.k = nn.Linear(model.hidden_size, model.key_size, bias=bias)
        self.v = nn.Linear(model.hidden_size, model.value_size, bias=bias)
        self.out = nn.Linear(model.attention_output_size, model.hidden_size, bias=model.linear_bias)
        self.q_norm = Norm(model.head_dim, "rmsnorm", fused) if model.qk_norm else None
        self.k_norm = Norm(model.head_dim, "rmsnorm", fused) if model.qk_norm else None

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, tokens, hidden), tokens of all tensor-parallel ranks."""
        q, k, v = (one(x).unflatten(-1, (-1, self.width)) for one in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            q, k = rotary(q, self.place, self.fused), rotary(k, self.place, self.fused)
        return self.out(attend(q, k, v, self.place).flatten(2))


def rotary(x: Tensor, place: Place, fused: bool) -> Tensor:
    """Rotary embedding of (batch, tokens, heads, width)."""
    assert place.cosine is not None and place.sine is not None
    if fused:
        return OPS.rotate(x, place.cosine, place.sine)
    cosine, sine = place.cosine.to(x.dtype), place.sine.to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
    """Causal attention of (batch, tokens, heads, width) over the whole sequence."""
    if q.is_cuda and place.context is None:  # FlashAttention is the processor's, and that of context parallelism
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        return attend_by(place.attention, q, k, v).transpose(1, 2)
    if q.is_cuda:
        RAN["context parallel",] = "flash"
    out = FlashAttention.apply(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), place.context)
    return out.transpose(1, 2)


class LatentAttention(nn.Module):
    """MLA: queries, keys and values from compressed vectors; the down projections are whole on every rank.

    Under tensor parallelism every gradient of a compressed vector is the part of this rank's heads; parts are summed where
    weights and input are shared.

    [DeepSeek-V2, arXiv 2405.04434, section 2.1]
    """

    def __init__(self, model: ModelSpec, place: Place, fused: bool) -> None:
        super().__init__()
        self.place, self.fused = place, fused
        self.nope, self.rope, self.value = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
        h, a, rank = model.hidden_size, model.num_heads, model.q_lora_rank
        self.rank = model.kv_lora_rank
        self.q_down = nn.Linear(h, rank, bias=False) if rank else None
        self.q_down_norm = Norm(rank, "rmsnorm", fused) if rank else None
        self.q_up = nn.Linear(rank or h, a * model.head_dim, bias=False)
        self.kv_down = nn.Linear(h, model.kv_lora_rank + self.rope, bias=False)
        self.kv_down_norm = Norm(model.kv_lora_rank, "rmsnorm", fused)
        self.kv_up = nn.Linear(model.kv_lora_rank, a * (self.nope + self.value), bias=False)
        self.out = nn.Linear(a * self.value, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, tokens, hidden), tokens of all tensor-parallel ranks."""
        if isinstance(x, DTensor):
            x = x.to_local(grad_placements=[Partial()])
        narrow = x
        if self.q_down is not None and self.q_down_norm is not None:
            narrow = self.q_down_norm(_local(x, self.q_down))
        q = _local(narrow, self.q_up).unflatten(-1, (-1, self.nope + self.rope))
        kv, key = _local(x, self.kv_down).split([self.rank, self.rope], -1)
        kv = _local(self.kv_down_norm(kv), self.kv_up).unflatten(-1, (-1, self.nope + self.value))
        key = rotary(key[:, :, None], self.place, self.fused).expand(-1, -1, q.shape[2], -1)
        q = torch.cat([q[..., : self.nope], rotary(q[..., self.nope :], self.place, self.fused)], -1)
        k = torch.cat([kv[..., : self.nope], key], -1)
        return self.out(attend(q, k, kv[..., self.nope :].contiguous(), self.place).flatten(2))


def _local(x: Tensor, linear: nn.Linear) -> Tensor:
    """A linear layer, of what this rank has of both."""
    return linear(x) if isinstance(linear, QuantisedLinear) else functional.linear(x, whole(linear.weight))


class Mlp(nn.Module):
    """down(act(gate(x)) up(x)), or down(act(up(x)))."""

    def __init__(self, model: ModelSpec, width: int, fused: bool) -> None:
        super().__init__()
        h, bias = model.hidden_size, model.linear_bias
        self.fused = fused and model.gated and model.activation == "silu"
        self.activation = ACTIVATIONS[model.activation]
        self.gate = nn.Linear(h, width, bias=bias) if model.gated else None
        self.up = nn.Linear(h, width, bias=bias)
        self.down = nn.Linear(width, h, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, tokens, hidden)."""
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        if self.fused:
            gate, up = self.gate(x), self.up(x)
            inner = OPS.swiglu(gate, up)
            return self.down(remembers(inner, OPS.swiglu, gate, up) if isinstance(self.down, QuantisedLinear) else inner)
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """The routed experts of this rank, every ep-th part of them, whole: tokens are sorted by expert, exchanged with the ranks that
    hold the experts, multiplied and brought back."""

    def __init__(self, split: Split, place: Place) -> None:
        super().__init__()
        model, self.place, self.balanced = split.model, place, split.balanced
        self.ep, self.num_experts, here = split.ep, model.num_experts, model.num_experts // split.ep
        h, width = model.hidden_size, model.expert_ffn_size
        self.fused = split.fused and model.activation == "silu"
        self.activation = ACTIVATIONS[model.activation]
        self.gate = nn.Parameter(torch.empty(here, width, h)) if model.gated else None
        self.up = nn.Parameter(torch.empty(here, width, h))
        self.down = nn.Parameter(torch.empty(here, h, width))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x (tokens, hidden); weights and chosen experts (tokens, top_k). The weighted sum of what the experts put out."""
        tokens, top_k = chosen.shape
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(order))
        copies = x[order // top_k]
        if self.ep > 1:
            out = self._exchanged(copies, counts)
        else:
            out = self._multiply(copies, torch.full_like(counts, tokens * top_k // self.num_experts) if self.balanced else counts)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        every = out[back].view(tokens, top_k, -1)
        return torch.bmm(weights.to(x.dtype)[:, None], every)[:, 0]

    def _exchanged(self, copies: Tensor, counts: Tensor) -> Tensor:
        """Rows go to the ranks of their experts, lie there by expert, and come back. The host waits once, for the sizes of the
        exchange, which torch's all-to-all takes from it."""
        here, group = self.num_experts // self.ep, self.place.experts
        theirs = wait_tensor(all_to_all_single(counts, None, None, group))
        each = copies.shape[0] // self.num_experts
        table, sent = [[each] * here] * self.ep, [each * here] * self.ep
        if not self.balanced:
            table, sent = theirs.view(self.ep, here).tolist(), counts.view(self.ep, here).sum(1).tolist()
        got = [sum(row) for row in table]
        mine = wait_tensor(all_to_all_single_autograd(copies, got, sent, group))
        theirs = torch.full_like(theirs, each) if self.balanced else theirs
        by_expert = _by_expert(theirs, here, mine.shape[0])
        out = self._multiply(mine[by_expert], theirs.view(self.ep, here).sum(0))
        back = torch.empty_like(by_expert)
        back[by_expert] = torch.arange(len(by_expert), device=by_expert.device)
        return wait_tensor(all_to_all_single_autograd(out[back], sent, got, group))

    def _multiply(self, x: Tensor, counts: Tensor) -> Tensor:
        """The MLP of each expert on its rows, so many of each."""
        up = OPS.grouped(x, self.up, counts)
        if self.gate is None:
            return OPS.grouped(self.activation(up), self.down, counts)
        gate = OPS.grouped(x, self.gate, counts)
        inner = OPS.swiglu(gate, up) if self.fused else self.activation(gate) * up
        return OPS.grouped(inner, self.down, counts)


def _by_expert(sizes: Tensor, here: int, rows: int) -> Tensor:
    """Places of the received rows, which lie by sender and then by expert, in the order of the experts; ``sizes`` of each of these
    parts. Three operators however many experts there are: a host that has to ask for each of them bounds the pass."""
    experts = torch.arange(here, device=sizes.device).repeat(sizes.numel() // here)
    return experts.repeat_interleave(sizes, output_size=rows).argsort(stable=True)


class Mixture(nn.Module):
    """Routed experts, and those that every token visits. The router works on the tokens of this rank."""

    def __init__(self, model: ModelSpec, split: Split, place: Place) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.empty(model.num_experts, model.hidden_size))
        self.top_k, self.experts = model.top_k, Experts(split, place)
        width = model.shared_expert_ffn_size
        self.shared = Mlp(model, width, split.fused) if width else None

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, tokens of this rank, hidden)."""
        rows = x.flatten(0, 1)
        logits = functional.linear(rows, whole(self.router))
        weights, chosen = exact(logits).softmax(-1).topk(self.top_k, -1)
        out = self.experts(rows, weights, chosen).view_as(x)
        return out if self.shared is None else out + self.shared(x)


# FSDP's hooks around the experts of a layer open ranges of the profiler, not as often when the layer is repeated; to checkpoint
# they are operations like others, and it would miss some.  [torch 2.13, utils/checkpoint.py: _CachedTorchDispatchMode]
SAC_IGNORED_OPS.update(
    getattr(packet, overload)
    for packet in (torch.ops.profiler._record_function_enter_new, torch.ops.profiler._record_function_exit)
    for overload in packet.overloads()
)


KEPT = ("flash_attention", "joined_attention", "reduce_scatter_tensor", "all_to_all_single", "topk")
"""Operations, by parts of their names, that selective recompute keeps in addition to matrix products."""


@cache
def _always_kept(function: Any) -> bool:
    """By its name; asked for every operation of a layer."""
    return any(name in str(function) for name in KEPT)


def every_second_matmul(model: ModelSpec) -> Any:
    """Contexts of selective recompute: attention, reduce-scatters, all-to-alls and every other matrix product are kept.

    The product of a router, by the shape of its weight, is repeated and not counted; its choices are kept.
    [torchtitan, the save list of its per-operator mode; force_recompute_mm_shapes_by_fqns: moe.router.gate]
    """
    router = {model.hidden_size, model.num_experts}
    seen = {False: 0, True: 0}
    aten = torch.ops.aten
    products = (aten.mm.default, aten.linear.default, aten.addmm.default, OPS.fp8_product.default)

    def policy(ctx: Any, function: Any, *given: Any, **_: Any) -> Any:
        if function in products and set(given[1].shape) != router:
            seen[ctx.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if seen[ctx.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if _always_kept(function) else CheckpointPolicy.PREFER_RECOMPUTE

    forward, again = create_selective_checkpoint_contexts(policy)
    return forward, _with_saved_attention(again)


@contextmanager
def _with_saved_attention(again: Any) -> Iterator[None]:
    with again, SavedAttention():
        yield


def recomputed(split: Split, run: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """A layer's forward pass; its recompute is none, selective or full."""
    if split.recompute == "none":
        return run(*given)
    extra = {"context_fn": partial(every_second_matmul, split.model)} if split.recompute == "selective" else {}
    found: Tensor = checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False, **extra)
    return found


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, split: Split, number: int, place: Place) -> None:
        super().__init__()
        model, fused = split.model, split.fused
        self.split = split
        self.attention_norm = Norm(model.hidden_size, model.norm, fused)
        self.attention = (LatentAttention if model.is_mla else Attention)(model, place, fused)
        self.mlp_norm = Norm(model.hidden_size, model.norm, fused)
        moe = model.is_moe_layer(number)
        self.mlp: nn.Module = Mixture(model, split, place) if moe else Mlp(model, model.ffn_size, fused)

    def run(self, x: Tensor) -> Tensor:
        """The layer itself."""
        with FORWARD:
            x = x + self.attention(self.attention_norm(x))
            return x + self.mlp(self.mlp_norm(x))

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, tokens of this rank, hidden)."""
        return recomputed(self.split, self.run, x)
