"""Seconds and memory of what the pool of a model that learns computes: log-probs (forward passes only) and updates.

An update is the training cost model's step with the microbatches that packing leaves, often fewer than stages: its bubble counts.
Forward passes of m microbatches through p stages take m f + the other stages' f once: sum over all stages + (m - 1) max.
A pipeline hands on tensors of one size, so there every microbatch is as long as the capacity; without one it is as long as what it
holds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from planner.arrays import Floats, NDArray
from planner.cluster import Cluster
from planner.cost.estimate import Estimate, estimate, join
from planner.cost.unique_stages import StageTable
from planner.layout import Layout
from planner.model import ModelSpec
from planner.record import record
from planner.rl.packing import Packed, packed, padded
from planner.rl.rl_workload import RlWorkload
from planner.search import SAFE
from planner.trainer import Trainer
from planner.workload import Workload

ROUND, PIECES = 64, 48
"""Lengths of sequences are priced in steps of ROUND tokens, or of a part in PIECES of the capacity."""


@record
class Update(Workload):
    """An optimizer step of RL: a microbatch is a few answers of one domain, and no loss balances the router, so that all its tokens
    choose their experts as one does."""

    independent_choices: ClassVar[float] = 1.0


@record
class Learner:
    """A model that is trained, or evaluated, on a pool of GPUs."""

    model: ModelSpec
    cluster: Cluster
    trainer: Trainer
    packs: bool = True
    """Sequences are packed."""
    slower: float = 1.0
    """Time over that of the training model."""


@record
class Learning:
    """Log-probs and updates on every layout; columns of length N."""

    forward: Floats
    """Seconds of one forward pass over all answers."""
    update: Floats
    """Seconds of all optimizer steps."""
    estimate: Estimate
    """Of one optimizer step."""
    microbatches: Floats
    """Of an optimizer step and replica."""
    fill: Floats
    """Tokens of a microbatch over what it may hold."""
    weights: Floats
    """Bytes of a GPU for weights."""

    @property
    def fits_alone(self) -> NDArray[np.bool_]:
        """Whether an update has room with nothing else on the GPU."""
        return np.asarray(self.estimate.out_of_memory_probability <= SAFE)

    def take(self, rows: Any) -> Learning:
        """Some rows."""
        columns = {name: value[rows] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return replace(self, estimate=self.estimate.take(rows), **columns)


def microbatches(learner: Learner, layout: Layout, work: RlWorkload) -> list[Packed]:
    """What every layout's replicas work on: by distinct dp and micro batch."""
    dp, micro = (np.broadcast_to(np.asarray(one), (len(layout),)) for one in (layout.dp, layout.micro_batch_size))
    known: dict[tuple[int, int], Packed] = {}
    for pair in zip(dp.tolist(), micro.tolist(), strict=True):
        if pair not in known:
            known[pair] = packed(work, pair[0], float(work.max_length * pair[1])) if learner.packs else padded(work, *pair)
    return [known[pair] for pair in zip(dp.tolist(), micro.tolist(), strict=True)]


def priced(learner: Learner, layout: Layout, work: RlWorkload) -> Learning:
    """Price log-probs and updates on layouts; no legality is checked."""
    packs = microbatches(learner, layout, work)
    pp = np.broadcast_to(np.asarray(layout.pp), (len(layout),))
    cp = np.broadcast_to(np.asarray(layout.cp), (len(layout),))
    lengths = np.array([_length(one, learner.packs, int(p), int(c)) for one, p, c in zip(packs, pp, cp, strict=True)])
    keys = np.stack([lengths, [max(round(one.document / _grain(one)), 1) * _grain(one) for one in packs]], axis=1)
    found, at = np.unique(keys, axis=0, return_inverse=True)
    pieces, order, forwards = [], [], np.zeros(len(layout))
    counts = np.array([one.microbatches for one in packs])
    for number, (length, document) in enumerate(found.tolist()):
        rows = np.flatnonzero(at.reshape(-1) == number)
        some = layout.take(rows) if np.ndim(layout.tp) else layout
        sequences = np.array([packs[row].sequences for row in rows])
        some = some.replace(micro_batch_size=sequences, num_microbatches=counts[rows])
        job = workload_of(learner, work, length, min(document, length), int(counts[rows[0]]))
        pieces.append(estimate(job, learner.cluster, learner.trainer, some))
        forwards[rows] = forward_seconds(job, learner, some) * work.updates / work.epochs
        order.append(rows)
    whole = join(pieces, len(layout)).take(np.argsort(np.concatenate(order)))
    return Learning(
        forward=forwards * learner.slower,
        update=whole.step_time * work.updates * learner.slower,
        estimate=whole,
        microbatches=counts.astype(float),
        fill=np.array([one.tokens / one.capacity for one in packs]),
        weights=whole.memory["weights"],
    )


def _grain(one: Packed) -> int:
    """Step in which documents are priced."""
    return ROUND * max(int(one.capacity // (ROUND * PIECES)), 1)


def _length(one: Packed, packs: bool, pp: int, cp: int) -> int:
    """Tokens that a microbatch's sequences are computed at."""
    whole = one.capacity / one.sequences
    step = ROUND * cp * max(int(whole // (ROUND * cp * PIECES)), 1)
    length = whole if pp > 1 or not packs else one.tokens
    return int(min(max(round(length / step), 1) * step, -(-whole // cp) * cp))


def workload_of(learner: Learner, work: RlWorkload, length: int, document: int, count: int) -> Workload:
    """One optimizer step as the training cost model takes it."""
    return Update(
        model=learner.model, sequence_length=int(length), global_batch_size=max(count, 1), precision=work.precision,
        lora_rank=work.lora_rank, frozen_weights=frozen_weights(learner.trainer, work.lora_rank),
        document_length=int(document) if learner.packs else 0,
        expert_imbalance=0.0 if learner.model.is_moe else 1.0,
    )  # fmt: skip


def frozen_weights(trainer: Trainer, rank: int) -> str:
    """Dtype of a base under adapters, as the trainer has it."""
    return (rank and trainer.legal.fine_tuning.frozen_weights) or "bf16"


def forward_seconds(job: Workload, learner: Learner, layout: Layout) -> Floats:
    """Forward passes of all microbatches of an optimizer step, the pipeline filled once."""
    columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(value)) for value in layout.columns().values()))
    layout = Layout(**dict(zip(layout.columns(), columns, strict=True)))
    table = StageTable(job, learner.cluster, learner.trainer, layout).take(slice(0, len(layout)))
    slowest = table.slowest["forward"] + table.send
    both = table.slowest["forward"] + table.slowest["backward"]
    others = np.maximum(table.slowest["all_stages"] - both, 0.0) * table.slowest["forward"] / np.maximum(both, 1e-12)
    m, pp = np.asarray(layout.num_microbatches, dtype=float), np.asarray(layout.pp, dtype=float)
    return np.asarray(m * slowest + others + (pp - 1.0) * table.send)
