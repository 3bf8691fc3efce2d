"""What routing adds to a layer of experts: copies of tokens, and how they travel between ranks.

The experts' own matrix products are in layers.py. Two ways to bring a token to its experts [Megatron Core MoE, arXiv
2504.14960, section 3; megatron/core/transformer/moe/token_dispatcher.py]:

all-to-all     each of the K copies is made first, sent, and sorted by local expert after it arrived;
deduplicated   a token is sent once to each rank that holds some of its experts, and copied there (DeepEP, HybridEP).
"""

import numpy as np

from planner.arrays import Floats
from planner.cost.layer.adapters import read_again
from planner.cost.layer.eager_kernels import eager
from planner.cost.layer.operators import REPEATED, Collective, MemoryBound, Number, Operator, Shard
from planner.layout import Module
from planner.workload import LOW_PRECISIONS

DISPATCH_UNITS = {"alltoall": 0.0, "deduplicated": 32.0, "deepep": 20.0}
"""Multiprocessors of the exchange: moe_hybridep_num_sms of Megatron-Bridge's performance recipes, moe_deepep_num_sms of
Megatron Core; NCCL's channels depend on the network."""
DEEPEP_BANDWIDTH = 320e9
"""Bytes/s that DeepEP's kernels move over NVLink with 20 multiprocessors (Megatron's default), about 16 GB/s each, however
fast the link: B200, 8 GPUs, 24 of them 400 GB/s; GB200, 8 and 16 GPUs, 16 and 24 of them 280 to 410.
[README of the branch hybrid-ep]
"""


def distinct_share(places: Number, copies: float) -> Floats:
    """Distinct places among ``copies`` random ones, per copy: P (1 - (1 - 1/P)^K) / K.

    The K experts of a token are different ones, but many share a place; drawn independently the mean is the same to 1
    percent from 32 experts up.
    """
    places = np.maximum(np.asarray(places, dtype=float), 1.0)
    return places * (1.0 - (1.0 - 1.0 / places) ** copies) / copies


def sent_once(shard: Shard) -> bool:
    """A token travels once per rank that needs it."""
    return shard.trainer.kernels.expert_dispatch != "alltoall"


def before_experts(shard: Shard) -> list[Operator]:
    """Copies of tokens on their way to the experts.

    All-to-all: K copies are made (a read and a write of each, C = T_s K h), and sorted where several ranks send, N rows.
    Deduplicated: rows arrive once per rank, a share d of N, and are copied into the order of the experts: (1 + d) N.
    """
    model, e, rows = shard.model, shard.element, shard.expert_rows * shard.model.routed_size
    exchanged = shard.ep > 1
    if sent_once(shard):
        arrived = distinct_share(shard.ep, float(model.top_k))
        made: Number = np.where(exchanged, 0.0, 2.0 * rows * e)
        sorted_ = np.where(exchanged, (1.0 + arrived) * rows * e, 0.0)
    else:
        made = 2.0 * shard.tokens_split * model.top_k * model.routed_size * e
        sorted_ = 2.0 * rows * e * exchanged
    inputs = rows * shard.input_element * read_again(shard, "experts_up")
    here: Number = np.where(exchanged, 0.0, inputs + _weighted(shard))
    arrived_rows: Number = np.where(exchanged, inputs, 0.0)
    found: list[Operator] = [
        MemoryBound(name="permute", kind="permute", module=Module.MOE | REPEATED, forward=made, backward=made,
                    saved=here, launches=(3.0, 2.0), captured=False),
        MemoryBound(name="sort", kind="permute", module=Module.MOE, forward=sorted_, backward=sorted_,
                    saved=arrived_rows, launches=(2.0, 2.0), captured=False),
    ]  # fmt: skip
    return found + _padding(shard, "pad")


def after_experts(shard: Shard) -> list[Operator]:
    """The way back: sorted again, N rows in and out, and summed over the K copies of a token, C in; or summed per rank
    first, N rows in and d N out, where tokens travel once."""
    model, e, rows = shard.model, shard.element, shard.expert_rows * shard.model.routed_size
    copies = shard.tokens_split * model.top_k * model.routed_size * e
    moved: Number = 2.0 * rows * e + copies
    kept: Number = np.where(shard.ep > 1, _weighted(shard), 0.0)
    if sent_once(shard):
        moved = np.where(shard.ep > 1, (1.0 + distinct_share(shard.ep, float(model.top_k))) * rows * e, 2.0 * rows * e)
    found = expert_bias(shard, shard.expert_rows)
    found += _padding(shard, "unpad")
    found.append(MemoryBound(name="unpermute", kind="permute", module=Module.MOE, forward=moved, backward=moved,
                             saved=kept, launches=(4.0, 4.0), captured=False))  # fmt: skip
    return found


def expert_loop(shard: Shard, local: Number) -> list[Operator]:
    """What a loop over experts launches for each in addition to its products: forward 11 kernels, backward 13.

    Forward: its tokens looked up, 4, for which the host waits; their rows and weights gathered, 2; activation and product 2, times
    the weights 1, added to the output 1, a cast. Backward: rows of the gradient 1, three products and a sum, activation 2, rows put
    back 4, zeros for them 2. Bytes are those of permutation and activation. The time of the rank's experts is at least what the
    host takes for them (``launches`` behind routing).  [transformers 4.57, Qwen3MoeSparseMoeBlock.forward; from 5.0 on grouped]
    """
    if "expert_loop" not in shard.trainer.kernels.unfused:
        return []
    return [MemoryBound(name="expert_loop", kind="copy", module=Module.MOE, forward=0.0, backward=0.0, captured=False,
                        launches=(11.0 * local, 13.0 * local))]  # fmt: skip


def expert_bias(shard: Shard, rows: Number) -> list[Operator]:
    """Biases of the second linear layers of the experts. DeepEP and HybridEP carry router weights in fp32.

    Backward also adds the gradients of both biases of every expert to the accumulated ones, a kernel each.
    [megatron/core/distributed: DistributedDataParallel._make_backward_post_hook]
    """
    if not shard.model.expert_bias or "expert_bias" not in shard.trainer.kernels.unfused:
        return []
    row = "expert_bias" if shard.trainer.kernels.expert_dispatch == "alltoall" else "expert_bias_fp32"
    local = np.maximum(shard.model.num_experts / shard.ep, 1.0)
    return [eager(shard, row, rows * shard.model.routed_size, "expert_bias", module=Module.MOE | REPEATED, captured=False,
                  launches=(2.0 * local + 1.0, 6.0 * local + 1.0))]  # fmt: skip


def _weighted(shard: Shard) -> Number:
    """Outputs of the experts, N h, kept for the gradient of the routing weights.

    Per-operator recompute keeps what the second all-to-all put out and sorts it again, which is as much; where nothing is
    exchanged it repeats the experts. So does it with the sorted input.
    """
    rows = shard.tokens_split * shard.model.top_k * shard.model.routed_size * shard.element
    return rows * shard.trainer.stored.weighted_experts


def _padding(shard: Shard, name: str) -> list[Operator]:
    """Rows of every expert padded to the block of the precision, or cut again: each row read and written once.

    [Megatron Core, experts.py: Fp8Padding before and Fp8Unpadding after the experts, unless the router pads]
    """
    aligned = shard.trainer.host.static_experts or "expert_padding" not in shard.trainer.kernels.unfused
    if aligned or shard.workload.precision not in LOW_PRECISIONS:
        return []
    moved = 2.0 * shard.expert_rows * shard.model.routed_size * shard.element
    return [MemoryBound(name=name, kind="copy", module=Module.MOE, forward=moved, backward=moved, captured=False,
                        launches=(1.0, 1.0))]  # fmt: skip


def joined(shard: Shard) -> list[Operator]:
    """What the branches of one input cost in addition: the outputs of experts and shared experts added (two reads, a
    write); gradients of router, experts and shared experts added; the router's input cast to fp32 and read, its gradient
    written and cast back: 10 times the size of a half-precision input.
    [Megatron Core, moe_utils.py: RouterGatingLinearFunction with moe_router_dtype fp32]
    """
    model, trainer = shard.model, shard.trainer
    size = shard.tokens_split * model.hidden_size * shard.element
    shared = float(model.shared_expert_ffn_size > 0)
    sums = (1.0 + shared) * ("gradient_sum" in trainer.kernels.unfused)
    router = 10.0 * ("router_fp32" in trainer.kernels.unfused)
    return [MemoryBound(name="joined", kind="elementwise", forward=3.0 * shared * size,
                        backward=(3.0 * sums + router) * size, launches=(shared, sums))]  # fmt: skip


def expert_exchange(shard: Shard) -> list[Collective]:
    """All-to-all of token copies before and after the experts, all-gather and reduce-scatter over etp; both ways.

    The busiest rank's share decides the time of the all-to-all, as it does the experts'. Where tokens are sent once per
    place, not per expert, see ``communication.dispatch_seconds``.
    """
    h, e = float(shard.model.routed_size), shard.element
    received = shard.expert_rows * h * e
    copies = shard.tokens_split * shard.model.top_k * h * e
    busiest = copies * shard.busiest
    once = sent_once(shard)
    most = DEEPEP_BANDWIDTH if shard.trainer.kernels.expert_dispatch == "deepep" else np.inf
    units = DISPATCH_UNITS[shard.trainer.kernels.expert_dispatch]

    def one(name: str, op: str, size: Number, n: Number, stride: Number, backward: bool) -> Collective:
        return Collective(name=name, group="ep", op=op, size=size, n=n, stride=stride, backward=backward,
                          copies=float(shard.model.top_k) if once and op == "all_to_all" else 0.0, bandwidth=most, units=units,
                          module=Module.MOE,
                          overlap="ep" if op == "all_to_all" else "", overlaps_with="layer")  # fmt: skip

    # What travels with the tokens: a router weight for each copy, and before all how many copies go where.
    weights = 4.0 * shard.tokens_split * shard.model.top_k
    more = [] if once else [
        one("dispatch_weights", "all_to_all", weights, shard.ep, shard.ep_stride, False),
        one("dispatch_weights_gradient", "all_to_all", weights, shard.ep, shard.ep_stride, True),
        one("dispatch_counts", "all_gather", 8.0 * shard.model.num_experts * shard.ep, shard.ep, shard.ep_stride, False),
    ]  # fmt: skip
    exchanges = more
    for backward in (False, True):
        suffix = "_gradient" if backward else ""
        exchanges += [
            one(f"dispatch{suffix}", "all_to_all", busiest, shard.ep, shard.ep_stride, backward),
            one(f"combine{suffix}", "all_to_all", busiest, shard.ep, shard.ep_stride, backward),
            one(f"expert_gather{suffix}", "all_gather", received, shard.etp, 1.0, backward),
            one(f"expert_scatter{suffix}", "reduce_scatter", received, shard.etp, 1.0, backward),
        ]
    return exchanges
