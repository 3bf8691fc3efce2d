"""How long sampled answers are: a distribution as shares of lengths, from mean and p99, from observed lengths, or a histogram."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any

import numpy as np

from planner import library, schema
from planner.arrays import Floats
from planner.errors import PlannerError, shown
from planner.record import record
from planner.schema import within
from planner.units import parse_count

SPREAD = 0.6
"""Standard deviation of ln(length) where only the mean is said: the longest of a hundred answers is four times the median."""
NORMAL = NormalDist()
LEVELS = np.concatenate([np.linspace(0.0, 0.99, 100), 1.0 - np.logspace(-2.0, -7.0, 51)[1:], [1.0]])
"""Ends of the shares of a continuous distribution: one hundredths, and ten to a factor of ten in the tail."""
MOST_SHARES = 400
"""Lengths that observed ones are gathered into."""
_VALUE = r"['\"]?\s*[:=]\s*['\"]?(\d+(?:\.\d+)?)"
LOGGED = {
    "mean": re.compile(rf"(?:response_length/mean|completions/mean_length|mean_gen_tokens_per_sample){_VALUE}"),
    "longest": re.compile(rf"(?:response_length/max|completions/max_length|max_gen_tokens_per_sample){_VALUE}"),
}
"""What logs of verl, TRL and NeMo RL call the mean and the longest answer of a step."""
Length = Annotated[float, within(1, 1e8)]


@record
class AnswerLengths:
    """Tokens of an answer: its turns together, prompts and what tools return not counted."""

    lengths: tuple[Length, ...]
    """Ascending."""
    shares: tuple[Annotated[float, within(0, 1)], ...]
    """Of each length; they sum to 1."""
    said: str = ""
    """As a user wrote it, where that says it all: mean=3200,p99=8192."""

    def __post_init__(self) -> None:
        schema.check(self)
        lengths, shares = np.asarray(self.lengths), np.asarray(self.shares)
        if not len(lengths) or len(lengths) != len(shares):
            raise PlannerError(f"answers have {len(lengths)} lengths and {len(shares)} shares; give one share to each length")
        if np.any(np.diff(lengths) < 0) or abs(float(shares.sum()) - 1.0) > 1e-6:
            raise PlannerError("lengths of answers must rise and their shares sum to 1")

    @cached_property
    def mean(self) -> float:
        """E[x]."""
        return float(np.dot(self.lengths, self.shares))

    @cached_property
    def squared(self) -> float:
        """E[x^2]."""
        return float(np.dot(np.square(self.lengths), self.shares))

    @property
    def most(self) -> float:
        """The longest that occurs."""
        return float(self.lengths[-1])

    def survival(self, tokens: Any) -> Floats:
        """P(x > tokens), linear between the lengths."""
        below = np.cumsum(self.shares) - 0.5 * np.asarray(self.shares)
        if self.lengths[0] == self.lengths[-1]:
            return np.where(np.asarray(tokens) < self.lengths[0], 1.0, 0.0)
        return 1.0 - np.interp(np.asarray(tokens, dtype=float), self.lengths, below, left=0.0, right=1.0)

    def longest_of(self, number: Any) -> Floats:
        """Expected maximum of ``number`` answers, sum of x (F(x)^n - F(x-)^n); a number or a column."""
        n = np.maximum(np.asarray(number, dtype=float), 1.0)[..., None]
        ends = np.minimum(np.cumsum(self.shares), 1.0)
        powers = ends**n
        powers[..., -1] = 1.0
        steps = np.diff(powers, prepend=0.0, axis=-1)
        return np.asarray((steps * np.asarray(self.lengths)).sum(axis=-1))

    def quantile(self, level: float) -> float:
        """The length below which this share of the answers is."""
        middles = np.cumsum(self.shares) - 0.5 * np.asarray(self.shares)
        return float(np.interp(level, middles, self.lengths))

    def sample(self, number: int) -> Floats:
        """``number`` lengths at the middles of equal shares: what a batch of that many looks like."""
        ends = np.cumsum(self.shares)
        return np.asarray(self.lengths)[np.minimum(np.searchsorted(ends, (np.arange(number) + 0.5) / number), len(ends) - 1)]

    def cut(self, most: float) -> AnswerLengths:
        """Longer ones end at ``most``: a sampler that has reached its largest length."""
        if most >= self.most:
            return self
        kept = np.minimum(self.lengths, most)
        return _gathered(kept, np.asarray(self.shares))

    @classmethod
    def lognormal(cls, mean: float, p99: float | None, most: float) -> AnswerLengths:
        """Lognormal y cut at ``most``: x = min(y, most) with the given mean and 99th percentile. Raises PlannerError.

        E[min(y, c)] = e^(m + s^2/2) N((ln c - m - s^2) / s) + c N((m - ln c) / s), solved for m and s by bisection; without a 99th
        percentile s is SPREAD.
        """
        top = most * (1.0 - 1e-9)
        if not 1.0 <= mean <= most:
            raise PlannerError(f"answers have a mean of {mean:g} tokens and at most {most:g}; give a mean from 1 to that")
        said = f"mean={mean:g}" + (f",p99={p99:g}" if p99 is not None else "")
        if mean >= 0.999 * most or (p99 is not None and p99 <= mean * 1.001):
            if p99 is not None and p99 < mean * 0.999:
                raise PlannerError(f"answers have a 99th percentile of {p99:g} tokens below their mean of {mean:g}")
            return cls(lengths=(mean,), shares=(1.0,), said=said)
        limit = NORMAL.inv_cdf(0.99)
        if p99 is None or p99 >= top:
            spread, middle = SPREAD, _bisected(lambda m: _cut_mean(m, SPREAD, most), mean, math.log(1e-3), math.log(most) + 12.0)
        else:
            spread = -_bisected(lambda s: _cut_mean(math.log(p99) + limit * s, -s, most), mean, -4.0, -1e-4)
            middle = math.log(p99) - limit * spread
        levels = (LEVELS[1:] + LEVELS[:-1]) / 2.0
        values = np.exp(middle + spread * np.array([NORMAL.inv_cdf(float(one)) for one in levels]))
        found = _gathered(np.clip(values, 1.0, most), np.diff(LEVELS))
        return cls(lengths=found.lengths, shares=found.shares, said=said)

    @classmethod
    def of(cls, samples: Sequence[float]) -> AnswerLengths:
        """As observed. Raises PlannerError when there are none."""
        if not len(samples):
            raise PlannerError("no lengths of answers are given")
        values = np.sort(np.asarray(samples, dtype=float))
        if len(values) > MOST_SHARES:  # the longest stays alone
            parts = [*np.array_split(values[:-1], MOST_SHARES - 1), values[-1:]]
            return _gathered(np.array([one.mean() for one in parts]), np.array([float(len(one)) for one in parts]))
        return _gathered(values, np.full(len(values), 1.0 / len(values)))

    def to_dict(self) -> Any:
        """Plain data: what was said with its largest length, else pairs of length and share."""
        if self.said:
            return {"said": self.said, "most": self.most}
        return [[length, share] for length, share in zip(self.lengths, self.shares, strict=True)]

    @classmethod
    def from_dict(cls, data: object, *, where: str = "answers") -> AnswerLengths:
        """From ``to_dict``. Raises PlannerError."""
        if isinstance(data, Mapping):
            found = schema.check_keys(data, ("said", "most"), where, required=("said", "most"))
            most = schema.value_of(Length, found["most"], where, "most")
            return read_answers(schema.value_of(str, found["said"], where, "said"), most)
        pairs = schema.value_of(tuple[tuple[float, float], ...], data, where, "answers")
        return _gathered(np.array([one for one, _ in pairs]), np.array([one for _, one in pairs]))


def _gathered(lengths: Floats, shares: Floats) -> AnswerLengths:
    """Equal lengths as one, ascending; shares normalised."""
    if not len(lengths) or not float(shares.sum()) > 0.0:
        raise PlannerError("lengths of answers have no shares; give at least one length with a share above 0")
    values, at = np.unique(lengths, return_inverse=True)
    sums = np.bincount(at.reshape(-1), weights=shares)
    return AnswerLengths(lengths=tuple(values.tolist()), shares=tuple((sums / sums.sum()).tolist()))


def _cut_mean(middle: float, spread: float, most: float) -> float:
    """E[min(y, most)] of a lognormal; a negative spread stands for its size."""
    s, c = abs(spread), math.log(most)
    below = math.exp(min(middle + s * s / 2.0, 700.0)) * NORMAL.cdf((c - middle - s * s) / s)
    return below + most * NORMAL.cdf((middle - c) / s)


def _bisected(function: Any, target: float, low: float, high: float) -> float:
    """Where a rising function reaches ``target``; the nearer end where it does not."""
    for _ in range(80):
        half = 0.5 * (low + high)
        low, high = (half, high) if function(half) < target else (low, half)
    return 0.5 * (low + high)


def read_answers(text: object, most: float) -> AnswerLengths:
    """Answers as a user says them: ``3200``, ``mean=3200,p99=8192``, ``fixed:2048``, ``@lengths.txt``. Raises PlannerError.

    A file holds a length on every line, or a length and how many answers have it; or a JSON list of numbers or of such pairs; or it
    is a log that prints mean (and longest) answers, of which the median step is taken.
    """
    if isinstance(text, AnswerLengths):
        return text.cut(most)
    said = str(text).strip()
    if said.startswith("@"):
        return lengths_of_file(Path(said[1:])).cut(most)
    if said.startswith("fixed:"):
        length = _tokens(said[6:])
        found = AnswerLengths(lengths=(length,), shares=(1.0,))
        return found.cut(most)
    parts = dict(re.findall(r"\s*(\w+)\s*=\s*([^,]+?)\s*(?:,|$)", said))
    if not parts:
        return AnswerLengths.lognormal(_tokens(said), None, most)
    if unknown := sorted(parts.keys() - {"mean", "p99", "max"}):
        raise PlannerError(f"--answers: {shown(unknown[0])} is not known; write mean=3200,p99=8192, a number, or @file")
    if "mean" not in parts:
        raise PlannerError(f"--answers {shown(said)} names no mean; write it like mean=3200,p99=8192")
    most = min(most, _tokens(parts["max"])) if "max" in parts else most
    return AnswerLengths.lognormal(_tokens(parts["mean"]), _tokens(parts["p99"]) if "p99" in parts else None, most)


def _tokens(text: str) -> float:
    return float(parse_count(text.strip(), what="--answers")[0])


def lengths_of_file(path: Path) -> AnswerLengths:
    """Lengths of a file, one a line or with how often they occur; a JSON list; or a framework's log. Raises PlannerError."""
    text = library.read_text(path, most=20_000_000)
    if means := [float(one) for one in LOGGED["mean"].findall(text)]:
        ends = [float(one) for one in LOGGED["longest"].findall(text)]
        mean = float(np.median(means))
        return AnswerLengths.lognormal(mean, None, max([*ends, mean] if ends else [4.0 * mean]))
    if text.lstrip().startswith("["):
        data = library.parse_json(text, str(path))
        rows = [one if isinstance(one, list) else [one] for one in data] if isinstance(data, list) else []
    else:
        rows = library.fields_of_lines(text)
    values, counts = list[float](), list[float]()
    for number, row in enumerate(rows, 1):
        try:
            value, count = (float(one) for one in (*row, 1.0)[:2])
        except (TypeError, ValueError):
            value = count = math.nan
        if not (1.0 <= value <= 1e8 and 0.0 < count <= 1e12 and len(row) <= 2):
            raise PlannerError(f"{path}: entry {number} is {shown(row)}; it must be a length in tokens, or a length and how often")
        values.append(value)
        counts.append(count)
    if not values:
        raise PlannerError(f"{path} holds no lengths")
    if len(set(counts)) == 1:
        return AnswerLengths.of(values)
    return _gathered(np.array(values), np.array(counts))
