"""Do the equations of an RL step tell what a real one takes? A tiny policy on gloo, colocated and split, by processor time.

    python -m tests.proofs.rl_step                  # both placements
    python -m tests.proofs.rl_step --rounds 12

The policy's own times stand in place of the curves of hardware: a decode by batch and context, prompts, forward and backward of a
row by its tokens, the optimizer, a tensor that is sent. planner.rl puts them together: answers through engines with their tail,
packing, micro batches, weight sync, the step of both pools. Curves and steps take turns, as the speed of a shared core changes; a
pool is timed while the other waits, as in a step. The order in which answers of each length come is drawn anew in each round. Times
are processor time of a process, so that waiting does not count.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from planner.arrays import Floats
from planner.model import load_model
from planner.rl.answer_lengths import AnswerLengths
from planner.rl.generation import _Flow
from planner.rl.packing import packed
from planner.rl.rl_layout import Placement
from planner.rl.rl_plan import PHASES
from planner.rl.rl_step import Step, _ahead, _in_turn
from planner.rl.rl_workload import RlWorkload
from tests.proofs.forked_ranks import run_ranks
from tests.proofs.tiny_policy import LONGEST, VOCAB, Engine, Policy, Row, log_probs, loss_of, packed_rows, row_of

BOUND = 0.15
"""Largest median error of a phase, and of the step, that is right."""
PROMPT, SLOTS, EACH, CAPACITY, ROUNDS = 16, 8, 40, LONGEST, 7
"""Tokens of a prompt, places of an engine, answers of an engine, tokens of a packed row, turns of curves and step."""
BATCHES, CONTEXTS, TOKENS = (1, 2, 4, 8), (20, 72), (32, 80, 128)
POOL = 2
"""Ranks of each pool."""
REACH = 8
"""Decodes before and after a context that are timed together."""
LIMIT = 600.0
"""Seconds of a placement at most, on a machine that others use too; alone it takes some twenty."""
SENT = 3
"""Times that weights are sent: once takes so little that the processor's clock is coarse."""
COMPARED = ("generate", "logprob", "train", "sync")


def workload() -> RlWorkload:
    """What both sides of the comparison know of the answers: their distribution, not this round's lengths."""
    answers = AnswerLengths.lognormal(30.0, 90.0, float(LONGEST - PROMPT))
    return RlWorkload(
        model=load_model("qwen3-8b"), prompts=POOL * EACH // 8, samples=8, prompt_length=PROMPT, answers=answers,
        max_length=LONGEST, reference=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Curves:
    """Processor seconds of the policy's parts on one rank."""

    decode: Floats
    """(batch, context)."""
    prompts: tuple[float, float]
    """One, and as many as there are places."""
    forward: Floats
    """Of a row by its tokens."""
    both: Floats
    """Forward and backward."""
    optimizer: float
    """With the sum of gradients over ranks."""
    tensor: float
    """Of sending one tensor of one element."""
    element: float
    """Of each further element."""


class MeasuredFlow(_Flow):
    """Answers through engines whose decode is measured and not priced."""

    def __init__(self, work: RlWorkload, curves: Curves) -> None:
        self.work, self.curves, self.speed = work, curves, 1.0
        self.each, self.places = np.array([float(EACH)]), np.array([float(SLOTS)])
        one, all_ = curves.prompts
        self.prompts = np.array([all_ + (EACH - SLOTS) * one])

    def decode(self, rows: Any, batch: Floats, context: Floats) -> Floats:
        """Linear between the measured points."""
        by_batch = [np.interp(batch, BATCHES, column) for column in self.curves.decode.T]
        share = np.clip((np.asarray(context) - CONTEXTS[0]) / (CONTEXTS[1] - CONTEXTS[0]), 0.0, 1.5)
        return np.asarray(by_batch[0] + share * (by_batch[1] - by_batch[0]))


def predicted(curves: Curves, engines: list[Curves], sizes: list[int], split: bool) -> Step:
    """The step by planner's equations on measured curves: means over ranks, of engines those of the slowest."""
    work = workload()
    flows = [MeasuredFlow(work, one) for one in engines]
    rows = packed(work, POOL, float(CAPACITY))
    forward, both = (float(np.interp(rows.tokens, TOKENS, one)) for one in (curves.forward, curves.both))
    phases: dict[str, Floats] = {name: np.zeros(1) for name in PHASES}
    phases["generate"] = np.max([one.seconds(work.answers) + one.prompts for one in flows], axis=0)
    phases["logprob"] = np.array([rows.microbatches * forward])
    phases["train"] = np.array([rows.microbatches * both + curves.optimizer])
    phases["sync"] = np.array([len(sizes) * curves.tensor + sum(sizes) * curves.element])
    mode = "split" if split else "colocated"
    gpus = POOL
    return _in_turn(Placement(mode=mode, train_gpus=gpus, generate_gpus=gpus, sync="tensor" if split else "ipc"), phases)


def ahead(step: Step) -> float:
    """The same phases one step ahead: the slower pool decides."""
    place = Placement(mode="split", train_gpus=POOL, generate_gpus=POOL, staleness=1, sync="tensor")
    return float(_ahead(place, step.phases).seconds[0])


# ------------------------------------------------------------------------------------------------ one rank


def spent(work: Callable[[], object], times: int = 1) -> float:
    """Processor seconds of each of ``times`` calls, mean."""
    begun = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - begun) / times


class Rank:
    """A process of one pool, or of both."""

    def __init__(self, split: bool) -> None:
        self.split, self.rank = split, dist.get_rank()
        self.trains, self.generates = not split or self.rank < POOL, not split or self.rank >= POOL
        torch.manual_seed(7)  # every rank begins with the same weights
        self.policy = Policy()
        rollout = Policy()
        rollout.load_state_dict(self.policy.state_dict())
        self.engine = Engine(rollout, SLOTS)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-4)
        self.trainers = dist.new_group(list(range(POOL)))
        self.draw = np.random.default_rng(100 + self.rank)

    def decode_curve(self) -> Floats:
        """Every batch at every context."""
        found = np.zeros((len(BATCHES), len(CONTEXTS)))
        for i, batch in enumerate(BATCHES):
            for j, context in enumerate(CONTEXTS):

                def step(batch: int = batch, context: int = context) -> None:
                    """Turns of the engine's loop, one place further each time, as answers grow."""
                    written = [[0] * (context - REACH) for _ in range(batch)]
                    for _ in range(2 * REACH):
                        self.engine.turn(written)

                found[i, j] = spent(step) / (2 * REACH)
        return found

    def row_curves(self) -> tuple[Floats, Floats]:
        """Rows of two answers, each of other tokens and another length, as in a step."""
        forward, both = [], []
        for tokens in TOKENS:
            sizes = [(tokens // 2 + more, tokens // 2) for more in (-3, -1, 0, -2, -4, 1)]
            rows = [row_of([torch.randint(0, VOCAB, (one,)) for one in pair]) for pair in sizes]
            old: list[Tensor] = []
            with torch.no_grad():
                look = lambda rows=rows, old=old: old.extend(log_probs(self.policy, row) for row in rows)  # noqa: E731
                forward.append(spent(look) / len(rows))
            both.append(spent(lambda rows=rows, old=old: self.learn(rows, old)) / len(rows))
        self.optimizer.zero_grad(set_to_none=False)
        return np.array(forward), np.array(both)

    def learn(self, rows: list[Row], old: list[Tensor]) -> None:
        """Forward and backward of every row, a micro batch each."""
        for row, before in zip(rows, old, strict=True):
            loss_of(self.policy, row, before, 1.0).backward()

    def update(self) -> None:
        """Gradients over the ranks that train, then the optimizer."""
        for one in self.policy.parameters():
            if one.grad is not None:
                dist.all_reduce(one.grad, group=self.trainers)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def send(self, tensors: list[Tensor], into: list[Tensor]) -> None:
        """Tensor by tensor: a copy where both live on one rank, else a broadcast of the first rank that trains."""
        with torch.no_grad():
            for one, other in zip(tensors, into, strict=True):
                if self.split:
                    dist.broadcast(one.data if self.trains else other.data, src=0)
                else:
                    other.copy_(one)

    def send_curve(self) -> tuple[float, float]:
        """A tensor of one element, and each further one."""
        size, count = 100_000, len(list(self.policy.parameters()))
        found = []
        for elements in (1, size):
            tensors, into = [torch.zeros(elements) for _ in range(count)], [torch.zeros(elements) for _ in range(count)]
            dist.barrier()
            found.append(spent(lambda tensors=tensors, into=into: self.send(tensors, into), SENT) / count)
        return found[0], max(found[1] - found[0], 0.0) / size

    def curves(self) -> Curves:
        """All parts; ranks that do not do one have zeros."""
        dist.barrier()
        decode, prompts = np.zeros((len(BATCHES), len(CONTEXTS))), (0.0, 0.0)
        forward = both = np.zeros(len(TOKENS))
        optimizer = 0.0
        if self.generates:
            decode = self.decode_curve()
            many = torch.randint(0, VOCAB, (SLOTS, PROMPT))
            prompts = spent(lambda: self.engine.prefill(many[:1], 0), 4), spent(lambda: self.engine.prefill(many, 0), 4)
        dist.barrier()
        if self.trains:
            forward, both = self.row_curves()
            optimizer = spent(self.update, 2)
        dist.barrier()
        tensor, element = self.send_curve()
        return Curves(decode, prompts, forward, both, optimizer, tensor, element)

    def step(self) -> dict[str, float]:
        """One step: processor seconds by phase."""
        found = dict.fromkeys(COMPARED, 0.0)
        answers: list[Tensor] = []
        if self.generates:
            mine = workload().answers.sample(POOL * EACH)[self.rank % POOL :: POOL]  # dealt evenly
            lengths = [max(round(float(one)), 1) for one in self.draw.permutation(mine)]
            prompts = torch.randint(0, VOCAB, (EACH, PROMPT))
            found["generate"] = spent(lambda: answers.extend(self.engine.sample(prompts, lengths)))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, answers)
        if self.trains:
            mine = everyone[POOL + self.rank] if self.split else answers
            rows, old = packed_rows(mine, CAPACITY), list[Tensor]()
            with torch.no_grad():
                found["logprob"] = spent(lambda: old.extend(log_probs(self.policy, row) for row in rows))

            found["train"] = spent(lambda: (self.learn(rows, old), self.update()))
        dist.barrier()
        found["sync"] = spent(lambda: self.send(*self.weights()), SENT)
        self.verify()
        return found

    def weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """Of the trainer and of the engine, in one order."""
        return list(self.policy.parameters()), list(self.engine.policy.parameters())

    def verify(self) -> None:
        """After a sync every tensor of every engine is the trainer's, bit by bit; and training has changed it."""
        own = self.policy if self.trains else None
        rollout = self.engine.policy if self.generates else None
        marks = [
            {name: hashlib.sha256(one.detach().numpy().tobytes()).hexdigest() for name, one in policy.named_parameters()}
            for policy in (own, rollout)
            if policy is not None
        ]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, marks)
        known = [mark for marks in everyone for mark in marks]
        for name in known[0]:
            if len({mark[name] for mark in known}) != 1:
                raise AssertionError(f"tensor {name} differs between ranks after the weight sync")


def work(split: bool, rounds: int) -> list[tuple[Curves, dict[str, float]]]:
    """Turns of curves and steps on one rank; the first is a warm-up."""
    rank = Rank(split)
    return [(rank.curves(), rank.step()) for _ in range(rounds + 1)][1:]


def resharded() -> int:
    """Weight sync between shards of two kinds: ranks that train hold rows, engines hold columns.

    Every engine receives the boxes where its columns meet the rows of a trainer, point to point, and ends with exactly its part.
    Returns the number of tensors that were checked.
    """
    rank, checked = dist.get_rank(), 0
    torch.manual_seed(7)
    for name, whole in Policy().named_parameters():
        if whole.dim() != 2:
            continue
        rows, columns = whole.detach().tensor_split(POOL, dim=0), whole.detach().tensor_split(POOL, dim=1)
        if rank < POOL:
            boxes = [one.contiguous() for one in rows[rank].tensor_split(POOL, dim=1)]
            for one in [dist.isend(box, POOL + engine) for engine, box in enumerate(boxes)]:
                one.wait()
            continue
        mine = columns[rank - POOL]
        boxes = [torch.empty(len(part), mine.shape[1]) for part in rows]
        for one in [dist.irecv(box, trainer) for trainer, box in enumerate(boxes)]:
            one.wait()
        if not torch.equal(torch.cat(boxes), mine):
            raise AssertionError(f"tensor {name} of engine {rank - POOL} is not its part after the weight sync")
        checked += 1
    return checked


# ------------------------------------------------------------------------------------------------ both sides


@dataclass(frozen=True)
class Compared:
    """A placement."""

    split: bool
    measured: dict[str, float]
    """Processor seconds by phase, and of the step, and one step ahead: medians of the rounds."""
    predicted: dict[str, float]
    errors: dict[str, float]
    """predicted / measured - 1, the median of the rounds: curves and step of a round see the same machine."""


def joined(every: list[Curves], split: bool) -> Curves:
    """Means over the ranks that have each part."""
    train, generate = (every[:POOL], every[POOL:]) if split else (every, every)

    def mean(ranks: list[Curves], name: str) -> Any:
        return np.mean([getattr(one, name) for one in ranks], axis=0)

    one, all_ = mean(generate, "prompts")
    return Curves(
        mean(generate, "decode"), (float(one), float(all_)), mean(train, "forward"), mean(train, "both"),
        float(mean(train, "optimizer")), float(mean(every, "tensor")), float(mean(every, "element")),
    )  # fmt: skip


def compare(split: bool, rounds: int = ROUNDS) -> Compared:
    """Measure one placement, and predict it: medians of the rounds."""
    found = run_ranks(work, 2 * POOL if split else POOL, split, rounds, limit=LIMIT)
    sizes = [one.numel() for one in Policy().parameters()]
    measured: dict[str, list[float]] = {name: [] for name in (*COMPARED, "step", "ahead")}
    told: dict[str, list[float]] = {name: [] for name in measured}
    for turn in range(rounds):
        steps = [rank[turn][1] for rank in found]
        phases = {name: statistics.mean(one[name] for one in steps if one[name] > 0) for name in COMPARED}
        phases["generate"] = max(one["generate"] for one in steps)
        curves = [rank[turn][0] for rank in found]
        step = predicted(joined(curves, split), curves[POOL:] if split else curves, sizes, split)
        for name in COMPARED:
            measured[name].append(phases[name])
            told[name].append(float(step.phases[name][0]))
        measured["step"].append(sum(phases.values()))
        told["step"].append(float(step.seconds[0]))
        measured["ahead"].append(max(phases["generate"], phases["logprob"] + phases["train"]) + phases["sync"])
        told["ahead"].append(ahead(step))
    ratios = {name: [a / b for a, b in zip(told[name], measured[name], strict=True)] for name in told}
    return Compared(
        split=split, measured={name: statistics.median(one) for name, one in measured.items()},
        predicted={name: statistics.median(one) for name, one in told.items()},
        errors={name: statistics.median(one) - 1.0 for name, one in ratios.items()},
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    for placement in (False, True):
        one = compare(placement, asked.rounds)
        print("split" if placement else "colocated")
        for name, error in one.errors.items():
            print(f"  {name:10s} {one.measured[name]:8.4f} s measured {one.predicted[name]:8.4f} s predicted {100 * error:+6.1f} %")
