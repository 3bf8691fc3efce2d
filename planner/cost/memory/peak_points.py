"""Peak memory of the device: the program point of a step at which most is alive.

One rule for every trainer: the peak is the largest of a list of program points, each with what is alive there as activations,
gradients and workspace. Which points there are depends on how gradients come (``Trainer.stored.gradients``): in buffers
that are there from start to end (``buffered_points``), or made by the backward pass unit by unit and given back after the update:

FSDP2 (torch 2.13) gathers, computes and reduces unit by unit: a layer (its routed experts are a unit of their own), the
embedding, the final norm with the head. What is alive changes from one program point to the next, and maxima of
different points do not add up. Bytes, per rank; A activations of k microbatches in flight, a of one layer, w = 2
bytes per gathered weight, r per reduced gradient, g = 4 per gradient that is kept, U, E, H parameters of a layer, embedding,
head; N of the stage, d ranks that share states, G = g N / d:

without a pipeline (zero 3: weights gathered are the layer's and the next one's; below: all that are not yet dropped)
    forward      A + what the last layer has on top                   + w 2 U        or w (N + U)
    head         A + logits                                           + w 2 H        or w (N + H)
    loss         A + logits and their gradient                        + 0            or w N
    head, back   A + gradient of the logits + w H + T h               + w (H + U)    or w N
    reduced      A + (w + r) H + g H / d                              + w U          or w (N - H)
    first layer  A + its transient + r H + g H / d                    + w 2 U        or w (N - H)
    next layer   A - a + its transient + r U + new gradients          + w 2 U        or w (N - H - U)
    its end      A - a + r U + max(w U, new gradients)                + w U          or w (N - H - U)
    last layer   a + its transient + r U + new gradients              + w (U + E)
    embedding    w E + max(r E, r U)                                  + G
    update       what it makes of all weights at once (``states.update_bytes``)
    and G more everywhere from the second microbatch on, r N where gradients are ``deferred``. With replicas what was
    all-reduced stays until the next pass.
pipeline (weights stay gathered, of many virtual stages a few; unsharded gradients add up: r N + w N, until the last pass)
    backward     A - output + transient + receive buffers, before the first gradients (all k in flight) and with all
                 of them (k, where a microbatch has been through)
    embedding    A - one microbatch + w E whole
    end          r (largest of the units that come first)
    Where weight gradients come later, a microbatch keeps all its activations and the output gradient of every linear layer.
Attention that holds more in its backward pass than its gradients (``OwnTerms.attention_gradient_bytes``) has that on top of what is
left of its layer, all but the inner tensors of the MLP; so have gradients of scores that lie in memory.
The gradient of a row-wise split embedding is whole on every rank of tensor parallelism (``whole_table_gradient``).
[torch 2.13, _fully_shard: _fsdp_param_group, _fsdp_collectives; distributed.pipelining, stage: fwd_cache,
backward_maybe_with_nosync, run_post_backward; read off the fake run of planner.lab.run.memory_tracker, 2026-11]
"""

import numpy as np

from planner.arrays import Floats
from planner.cost.layer.adapters import brought_experts
from planner.cost.layer.attention_layer import score_gradients
from planner.cost.layer.linear_layer import backward_bytes
from planner.cost.layer.operators import Shard, kept_logit_bytes, logit_bytes, loss_share
from planner.cost.memory.autocast import head_copies
from planner.cost.memory.states import (
    StageBytes,
    bucket_bytes,
    copied_shard,
    stage_output_bytes,
    update_bytes,
)
from planner.cost.pipeline.partition import (
    StageParameters,
    Stages,
    column,
    experts_outside,
    gathered_at_once,
    gathered_bytes,
    gathered_parameters,
    layer_bytes,
    shard_groups,
)  # fmt: skip
from planner.cost.price.stage_times import StageTimes
from planner.cost.state_dtypes import dequantised, whole_bytes
from planner.hardware import HardwareProfile
from planner.layout import Layout, Recompute, Schedule, is_v_shaped
from planner.record import record
from planner.trainer import Trainer
from planner.workload import Workload


@record
class Peak:
    """The largest program point of each stage, (3, N)."""

    activations: Floats
    """Bytes kept for the backward pass, at that point."""
    gradients: Floats
    """Bytes of accumulated gradients, at that point."""
    workspace: Floats
    """All else."""
    largest_activations: Floats
    """Most bytes kept for the backward pass at any point."""
    pooled: Floats
    """Blocks that stay reserved, free, at that point: gradients that reductions put out, buffers of gathered weights."""


def shape_parts(
    workload: Workload, trainer: Trainer, layout: Layout, stages: Stages, times: StageTimes
) -> dict[str, Floats]:
    """Bytes of a stage that depend on the shapes of its layers, (3, N) each.

    Stored by its last layer; brought back by recompute; on top of that while its backward pass, and while its forward pass runs;
    stored by the final norm, and by norm, loss and input of prediction modules; of these in the last one's backward; logits;
    logits and all that is alive at the peak of the loss; one stage's output; outputs kept less inputs that lie in receive buffers,
    both per microbatch; T h, an output gradient; logits that stay through the backward pass; what is left of the last layer when
    its largest unit is reduced; output gradients of all its linear layers.
    """
    stored, working, head_saved = times.last_layer, times.working, times.loss
    model, e = workload.model, workload.element
    shard = Shard(workload=workload, trainer=trainer, layout=layout, ep_stride=1.0)
    rows = shard.tokens * model.hidden_size * e
    boundary, inner = rows / shard.split, shard.tokens * model.ffn_size / shard.tp * e
    down = float(model.ffn_size) * model.hidden_size / shard.tp * gathered_bytes(workload)
    if workload.lora_rank:  # no gradient of it; where its dtype is none that is multiplied, the weight itself brought to one
        down = down * dequantised(workload)
    scattered = np.where(shard.split > 1, rows, 0.0)
    matrices = model.num_mlp_matrices
    transient = down + boundary + np.maximum(inner + scattered, (matrices - 1.0) * inner)
    scanned = boundary + shard.tokens * backward_bytes(model.linear, e) / shard.tp if model.linear else 0.0
    mlp = inner * matrices  # which the layer saved, and which are gone when attention's gradients come
    forward = rows + boundary
    qkv = shard.tokens * (model.query_size + model.key_size + model.value_size) / shard.tp * e
    waiting = (qkv + 2.0 * rows + (matrices - 1.0) * inner) * stages.dense.T
    after = np.zeros_like(stored)
    has_moe = stages.moe.T > 0
    transient, forward = (np.broadcast_to(one, has_moe.shape) for one in (transient, forward))
    if model.is_moe:
        copies, wide = shard.expert_rows * model.routed_size * e, shard.expert_rows * model.expert_ffn_size / shard.etp * e
        moe = boundary + np.maximum(2.0 * copies, (matrices - 1.0) * wide) + brought_experts(shard)
        transient = np.where(has_moe, np.maximum(moe, transient * (stages.dense.T > 0)), transient)
        copied = np.where(shard.ep > 1, 4.0, 1.0) * copies
        waiting = waiting + (qkv + rows + copies + (matrices - 1.0) * wide) * stages.moe.T
        routed = 2.0 * copies + matrices * wide
        mlp = np.where(has_moe, routed, mlp)
        after = np.where(has_moe, np.maximum(stored + working - routed, 0.0), after)
        forward = np.where(has_moe, np.maximum(copied, forward * (stages.dense.T > 0)), forward)
    attention = sum(term.attention_gradient_bytes(shard) for term in trainer.terms) + score_gradients(shard) - mlp
    transient = np.maximum(np.maximum(transient, scanned), attention)
    at_head = np.minimum(stages.head.T, 1.0)
    columns = model.vocab_size / shard.tp * loss_share(shard)
    logits, loss = shard.tokens * columns * e, shard.tokens * columns * logit_bytes(shard)
    later = np.maximum(stages.head.T - 1.0, 0.0)  # prediction modules, whose logits the main loss finds stored
    whole = np.asarray(layout.recompute) == Recompute.NONE
    joined = 2.0 * np.where(shard.split > 1, rows, boundary)  # what a module's projection reads; before it comes an embedding
    predicted = head_saved - loss + logits + (each := boundary + whole * joined)
    parts = {
        "layer": stored, "working": working, "transient": transient, "forward": forward,
        "norm": (head_saved - loss) * at_head + predicted * later,
        "ahead": predicted * np.maximum(later - 1.0, 0.0) + (each + ~whole * (joined + boundary)) * np.minimum(later, 1.0),
        "logits": logits * at_head, "loss": loss * at_head,
        "boundary": boundary, "outputs": _outputs(layout, stages) * boundary, "rows": rows,
        "kept_logits": shard.tokens * columns * kept_logit_bytes(shard) * at_head, "after": after, "waiting": waiting,
    }  # fmt: skip
    return {name: np.broadcast_to(one, has_moe.shape) for name, one in parts.items()}


def _outputs(layout: Layout, stages: Stages) -> Floats:
    """Outputs that a pipeline keeps for each microbatch, less the inputs that receive buffers hold, (3, N).

    Every virtual stage but the last keeps its output, every one but the first has its input in a buffer. Of a V's first rank
    2 p - 1 of the 2 p parts in flight are of the first virtual stage, and as many of the last rank's are behind the turn.
    """
    pp = np.asarray(layout.pp, dtype=float)
    plain = stages.embedding.T - np.minimum(stages.head.T, 1.0)
    ends = (2.0 - 2.0 / pp) * np.stack([np.ones_like(pp), (pp <= 2.0).astype(float), np.ones_like(pp)])
    return np.where(pp > 1, np.where(is_v_shaped(layout.schedule), ends, plain), 0.0)


def state_parts(
    workload: Workload, trainer: Trainer, layout: Layout, stages: Stages, parameters: StageParameters
) -> dict[str, Floats]:
    """Bytes of a stage that depend on how its states are split, (3, N) each.

    Weights gathered of all of it, of a layer, of a layer without its experts, of the unit that a layer gathers last, of the head
    and the embedding; buffers of reduction of a layer without its experts and of its larger unit, that unit's gradients before;
    the same of head and embedding; the embedding's gradient; 1 where units are wrapped: reductions put gradients out;
    sharded gradients of a layer, the head, all; 1 where those stay with accumulated ones; accumulated gradients; DDP's buckets; 1
    where weights are dropped after the forward pass; 1 in a pipeline; its receive buffers; an update; copies; ``_further_parts``.
    """
    model = workload.model
    gathered, layer, ranks = gathered_bytes(workload), layer_bytes(workload, trainer), column(layout.dp) * column(layout.cp)
    plain = (trainer.stored.weight_bytes == gathered) | (workload.lora_rank > 0)
    alone = (column(layout.num_gpus) == 1) & plain & (column(layout.offload_parameters) == 0)  # as it lies, not wrapped
    new, kept = trainer.traffic.gradient_reduce_bytes, trainer.stored.gradient_bytes
    zero, pipelined, reduced = column(layout.zero), (column(layout.pp) > 1).astype(float), new * ~alone
    shard, expert_shard = (np.where(zero >= 2, one, 1.0) for one in shard_groups(layout, trainer))
    dense, expert = parameters.trained(workload)
    own = kept if workload.lora_whole == "none" else whole_bytes(workload, trainer)[1]  # of tables trained with adapters
    sent = 1.0 if workload.lora_whole == "none" else own / new
    dense = dense + parameters.whole * (own / kept - 1.0)
    tables, heads = (sent * workload.trains(one) for one in ("embedding", "head"))
    learned = parameters.adapters / np.maximum(parameters.all, 1.0) if workload.lora_rank else 1.0
    outside = experts_outside(layout, trainer)
    several, unit = (stages.moe > 0) & (outside == 0), parameters.largest_dense_unit
    experts = parameters.largest_expert_unit * several
    table = model.vocab_size * float(model.hidden_size) / column(layout.tp)
    head, first = np.minimum(stages.head, 1.0) * (1.0 - stages.embedding * model.tied_embeddings) * table, stages.embedding * table
    whole = first * (column(layout.tp) if trainer.stored.whole_table_gradient else 1.0)
    gathers = zero >= trainer.stored.weight_sharding_level
    cast = ~gathers & (trainer.stored.weight_bytes > gathered) & (workload.lora_rank == 0)
    on = ((gathers & ~alone) | cast).astype(float)
    new_layer, host = (unit / shard + experts / expert_shard) * kept * learned, column(layout.offload_parameters) > 0
    new_all = np.where(host, new_layer, (dense / shard + expert / expert_shard) * kept)  # copied out unit by unit
    replicated, micro = (shard_groups(layout)[0] < ranks).astype(float), column(layout.num_microbatches)
    unsharded = (pipelined > 0) | ((zero >= 2) & (trainer.stored.gradients == "deferred"))
    accumulated = np.where(unsharded, (dense + expert + (whole - first) * tables) * new, new_all * ~host)
    frozen = sum(term.frozen_gradients() for term in trainer.terms) * (workload.lora_rank > 0) * (micro > 1)
    accumulated = accumulated + frozen * parameters.all * on
    largest, of_largest = np.maximum(unit, experts), np.where(experts > unit, expert_shard, shard)
    parts = {
        "gathered": (gathered_parameters(workload, trainer, parameters) - outside * parameters.expert * layer) * on,
        "layer_weights": (unit + experts) * layer * on + copied_shard(workload, trainer, layout, unit + experts),
        "dense_weights": unit * layer * on, "last_weights": np.where(several, experts, unit) * layer * on,
        "head_weights": head * gathered * on + copied_shard(workload, trainer, layout, head),
        "table_weights": first * gathered * on + copied_shard(workload, trainer, layout, first),
        "dense_reduced": unit * reduced * learned, "largest_reduced": largest * reduced * learned,
        "largest_gradients": largest * gathered * learned, "head_reduced": head * reduced * heads,
        "table_reduced": first * reduced * tables, "table_gradient": whole * gathered * workload.trains("embedding"),
        "new_layer": new_layer, "new_head": head / shard * own * (heads > 0), "new_all": new_all, "kept_new": replicated,
        "accumulated": accumulated, "wrapped": 1.0 - alone, "buckets": bucket_bytes(workload, trainer, layout, parameters),
        "resharded": ((zero >= 3) & (pipelined == 0)).astype(float), "pipelined": pipelined,
        "received": stage_output_bytes(workload, layout) * micro * _received(layout, stages) * pipelined,
        "updating": update_bytes(workload, trainer, layout, parameters), **_further_parts(workload, trainer, layout, stages, head),
        "copied": largest * (of_largest == 1.0) * reduced * learned,
    }  # fmt: skip
    most = sum(term.most_gathered() for term in trainer.terms)
    parts["gathered"] = gathered_at_once(most, layout, parts["gathered"], (head + first) * gathered * on)
    return {name: np.broadcast_to(one, dense.shape).T for name, one in parts.items()}


def _further_parts(
    workload: Workload, trainer: Trainer, layout: Layout, stages: Stages, head: Floats
) -> dict[str, Floats]:
    """Weights of the root unit, which is not dropped after its forward pass; 1 where updates follow each gradient; copies of the
    head; its gradient that the pieces of a loss add up, and a piece's.  [torch 2.13, _runtime_utils.py: _post_forward_reshard]
    """
    micro, trained = column(layout.num_microbatches), float(workload.trains("head"))
    table = workload.model.vocab_size * float(workload.model.hidden_size) / column(layout.tp)
    both = np.minimum(stages.head, 1.0) * (1.0 - stages.embedding * workload.model.tied_embeddings) + stages.embedding
    wrapped = column(layout.dp) * column(layout.cp) > 1
    summed = gathered_bytes(workload) + trainer.traffic.gradient_reduce_bytes
    return {
        "root": both * table * gathered_bytes(workload) * wrapped * (trainer.traffic.root_units > 1),
        "released": np.where((micro == 1) & (column(layout.pp) == 1), float(trainer.stored.gradients == "released"), 0.0),
        "head_copies": np.minimum(stages.head, 1.0) * table * head_copies(workload, trainer, layout),
        "head_pieces": head * summed * trained * (trainer.stored.loss in ("chunked", "fused_linear", "vocabulary")),
    }


def _received(layout: Layout, stages: Stages) -> Floats:
    """Receive buffers of a microbatch: activations from before and gradients from behind, for each virtual stage, (N, 3)."""
    virtual = np.where(column(layout.schedule) == Schedule.INTERLEAVED, column(layout.vpp), 1.0)
    plain = 2.0 * virtual - stages.embedding - np.minimum(stages.head, 1.0)
    ends = np.where(np.array([False, True, False]) & (column(layout.pp) > 2.0), 4.0, 2.0)
    return np.where(is_v_shaped(np.asarray(layout.schedule)[..., None]), ends, plain)


def on_demand_peak(stages: StageBytes, library_workspace: float) -> Peak:
    """The largest of the program points named above, with the workspace that libraries keep."""
    s, t = stages.shape_parts, stages.state_parts
    stored = stages.stored * np.minimum(stages.resident, 1.0) + s["outputs"]
    alone = t["pipelined"] == 0
    total, most = np.full_like(stored, -1.0), np.zeros_like(stored)
    activations, gradients, workspace = parts = [np.zeros_like(stored) for _ in range(3)]
    for where, points in ((alone, _alone), (~alone, _pipelined)):
        for point in points(stored, stages, s, t) if np.any(where) else []:
            size = np.where(where, point[0] + point[1] + point[2], -1.0)
            more = size > total
            total = np.where(more, size, total)
            for kept, one in zip(parts, point, strict=True):
                np.copyto(kept, one, where=more)
            np.copyto(most, np.maximum(most, point[0]), where=where)
    largest_buffer = np.maximum(np.maximum(t["layer_weights"], t["head_weights"]), t["table_weights"])
    buffers = largest_buffer - np.where(t["resharded"] > 0, t["layer_weights"], 0.0)
    gradients = gradients + t["buckets"]
    return Peak(
        activations=activations, gradients=gradients, workspace=workspace + library_workspace,
        largest_activations=most,
        pooled=np.maximum(stages.gradients - gradients * alone, 0.0) * (1.0 - t["released"]) * t["wrapped"] + buffers,
    )  # fmt: skip


Point = tuple[Floats, Floats, Floats]
"""Bytes of activations kept, of accumulated gradients, of all else."""


def _alone(stored: Floats, stages: StageBytes, s: dict[str, Floats], t: dict[str, Floats]) -> list[Point]:
    """The program points of a step without a pipeline."""
    dropped, share = t["resharded"] > 0, stages.accumulated_share
    gradients = share * t["accumulated"]
    stays = 1.0 - t["released"]
    again = stays * np.where(share > 0, t["kept_new"], 1.0)  # new gradients stay: the first ones, or those of replicas
    rest = t["gathered"] - t["head_weights"]
    layer, head, table = t["layer_weights"], t["head_weights"], t["table_weights"]
    brought, back, held = stored + s["ahead"] + s["working"], s["transient"], s["kept_logits"]
    weights = np.where(dropped, layer + t["dense_weights"] + t["root"], rest)
    later = np.where(dropped, layer + t["dense_weights"] + t["root"], rest - layer)
    one_left = stored - s["layer"] + s["after"]
    reducing = t["largest_reduced"] + np.maximum(t["largest_gradients"], t["new_layer"] + t["copied"])
    ends, new_head = t["new_all"] - t["new_layer"], stays * t["new_head"]
    root = np.where(dropped, t["root"], 0.0)  # stays from its forward pass to its backward pass
    own_rows = np.where(t["table_gradient"] > table, table, 0.0)  # a copy of this rank's part of the whole gradient
    return [
        (stored, gradients, root + s["forward"] + np.where(dropped, layer + t["last_weights"], rest + t["last_weights"])),
        (stored + s["norm"] + s["logits"], gradients, np.where(dropped, np.maximum(2.0 * head, root), t["gathered"] + head)),
        (stored + s["norm"] + s["loss"], gradients, t["head_copies"] + np.where(dropped, root, t["gathered"])),
        (stored + s["norm"] + s["logits"] + held, gradients, t["head_pieces"] + t["head_copies"] +
         head + s["rows"] + np.where(dropped, np.maximum(head, root) + t["dense_weights"], t["gathered"])),
        (stored + held, gradients, root + head + t["head_reduced"] + t["new_head"] + np.where(dropped, t["dense_weights"], rest)),
        (brought + held, gradients, back + t["head_reduced"] + new_head + weights),
        (brought + held - s["layer"], gradients,
         back + t["dense_reduced"] + again * t["new_head"] + np.maximum(again, t["released"]) * t["new_layer"] + later),
        (one_left + held, gradients, t["largest_gradients"] + t["head_reduced"] + new_head + weights),
        (one_left + held, gradients, reducing + new_head + np.where(dropped, t["dense_weights"] + t["root"], rest - layer)),
        (held + s["layer"] + s["working"], gradients + again * ends, back + t["dense_reduced"] + layer + np.maximum(table, root)),
        (held, gradients + again * t["new_all"],
         np.maximum(table + t["table_reduced"], t["table_gradient"] + own_rows + t["dense_reduced"] + table)),
        (held, stays * t["new_all"], stays * t["updating"]),
    ]  # fmt: skip


def _pipelined(stored: Floats, stages: StageBytes, s: dict[str, Floats], t: dict[str, Floats]) -> list[Point]:
    """The program points of a step in a pipeline."""
    held, waiting = stages.logits_held, stages.waiting_weights
    always = t["gathered"] + t["received"]
    # The last of those that wait is the one whose pass runs; the first virtual stage has no input gradient to wait behind.
    apart = np.where(t["table_weights"] > 0, 0.0, 0.5)
    done, running = (np.maximum(waiting - part, 0.0) * s["waiting"] for part in (0.0, apart))
    found: list[Point] = []
    for count, part in (
        (stages.in_flight, stages.accumulated_share),
        (stages.accumulated_flight, np.ones_like(stored)),
    ):
        kept = np.minimum(count, stages.resident) / np.minimum(stages.resident, 1.0)
        there = kept * stored + stages.uneven * count / stages.in_flight
        there = there + (np.minimum(held, count) - 1.0) * (s["norm"] + s["logits"]) * (count > 0)
        gradients = part * t["accumulated"]
        logits = s["logits"] > 0
        rest = always + running
        popped = np.where(logits, -s["logits"], s["boundary"])
        found += [
            (there, gradients, done + np.where(waiting > 0, 0.0, s["forward"]) + always),
            (there + s["norm"] + s["loss"], gradients, np.where(logits, t["head_weights"] + s["rows"], 0.0) + rest),
            (there + s["ahead"] - popped + s["working"], gradients, s["transient"] - np.where(logits, 0.0, s["boundary"]) + rest),
            (there + s["ahead"] - popped - s["layer"] + s["after"], gradients, t["largest_gradients"] + rest),
            (np.maximum(there - stored, 0.0), t["accumulated"], t["table_gradient"] + always),
        ]
    first = np.maximum(t["table_reduced"], t["largest_reduced"] + t["copied"])
    return [*found, (np.zeros_like(stored), t["accumulated"], first + t["new_layer"] + always)]


def buffered_points(stages: StageBytes) -> list[Point]:
    """Program points of a step whose gradients lie in buffers from start to end.

    backward pass        microbatches in flight, and the larger of one layer brought back by recompute and the loss; workspace
    a microbatch ends    its fresh gradients in place of its activations
    the step ends        gathered weights in place of all activations
    """
    activations = np.minimum(stages.in_flight, stages.resident) * stages.stored + stages.uneven + stages.transient
    return [
        (activations, stages.gradients, stages.workspace),
        (activations, stages.gradients, stages.fresh - stages.stored - stages.transient),
        (activations, stages.gradients, stages.step_end - activations),
    ]


def peak(trainer: Trainer, stages: StageBytes, hardware: HardwareProfile) -> Peak:
    """The largest program point of each stage."""
    if trainer.stored.gradients_on_demand:
        return on_demand_peak(stages, hardware.workspace_memory)
    running, ended, last = buffered_points(stages)
    before = np.maximum(running[2], ended[2])
    workspace = np.maximum(before, last[2])
    pooled = np.maximum(stages.pooled - (workspace - before), 0.0)
    return Peak(
        activations=running[0], gradients=stages.gradients, workspace=workspace, largest_activations=running[0], pooled=pooled
    )  # fmt: skip
