"""Requests of a closed loop one by one through an engine that mixes prompts with decodes: the oracle of the queues of serving.

A pass takes a token of every running sequence, then prompts in order of arrival, cut at the token budget. A finished request's
successor arrives a turn later. Only the seconds of passes are the model's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

TURN = 0.003
"""Seconds between a last token and the next request."""
Seconds = Callable[[int, float], float]
"""Of a pass of so many decodes and prompt tokens."""


@dataclass
class Loop:
    """One run of ``waves`` times ``requests`` requests; lengths uniform in [low x, x] (``low`` 1: all equal)."""

    seconds: Seconds
    requests: int
    budget: int
    lengths: tuple[int, int]
    low: float = 1.0
    waves: int = 10
    seed: int = 0
    first: dict[int, float] = field(default_factory=dict)
    end: dict[int, float] = field(default_factory=dict)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Seconds between two tokens, and how many there were."""

    def run(self) -> tuple[float, float]:
        """Mean time to first token and per output token, seconds."""
        rng = np.random.default_rng(self.seed)
        total = self.requests * self.waves
        inputs, outputs = (np.round(rng.uniform(self.low * x, x, total)).astype(int) for x in self.lengths)
        arrivals = [(0.001 * one, one) for one in range(self.requests)]
        sent, queue, chunks, running = {}, list[int](), list[list[int]](), list[tuple[int, int]]()
        clock, count, following = 0.0, 0, self.requests
        while arrivals or queue or chunks or running:
            while arrivals and arrivals[0][0] <= clock:
                at, one = heapq.heappop(arrivals)
                sent[one] = at
                queue.append(one)
            if not (queue or chunks or running):
                clock = arrivals[0][0]
                continue
            chunks += [[one, int(inputs[one])] for one in queue]
            queue.clear()
            room, done = self.budget - len(running), list[int]()
            for chunk in chunks:
                taken = min(chunk[1], max(room, 0))
                chunk[1], room = chunk[1] - taken, room - taken
                done += [chunk[0]] if not chunk[1] else []
            chunks = [chunk for chunk in chunks if chunk[1]]
            tokens = self.budget - len(running) - room
            steps = 1
            if not tokens and running:  # nothing happens before the next end or arrival
                each = self.seconds(len(running), 0)
                until = (arrivals[0][0] - clock) / each if arrivals else np.inf
                steps = max(int(min(running[0][0] - count, np.ceil(until))), 1)
            passes = self.seconds(len(running), tokens)
            self.gaps.append((passes, steps * len(running)))
            clock, count = clock + steps * passes, count + steps
            for one in done:
                self.first[one] = clock
                heapq.heappush(running, (count + int(outputs[one]) - 1, one))
            while running and running[0][0] <= count:
                one = heapq.heappop(running)[1]
                self.end[one] = clock
                if following < total:
                    heapq.heappush(arrivals, (clock + TURN, following))
                    following += 1
        waits = [self.first[one] - sent[one] for one in self.end]
        paces = [(self.end[one] - self.first[one]) / max(int(outputs[one]) - 1, 1) for one in self.end]
        return float(np.mean(waits)), float(np.mean(paces))

    def gap(self, level: float) -> float:
        """The gap that a share ``level`` of all gaps is not above, after the first wave."""
        found = np.array(sorted(self.gaps[len(self.gaps) // self.waves :]))
        return float(found[np.searchsorted(np.cumsum(found[:, 1]), level * found[:, 1].sum()), 0])
