"""Deployments as columns: what a search is about, its rows with what they are compared by, and one row alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields, is_dataclass, replace
from typing import Any

import numpy as np

from planner.arrays import Floats, NDArray, spread
from planner.record import record
from planner.serving.candidates import DEGREES
from planner.serving.result import ServingEstimate
from planner.serving.served import Served
from planner.serving.serving_layout import ServingLayout
from planner.serving.traffic import Limits, Traffic

COLUMNS = ("load", "total", "user", "ttft", "tpot", "e2e", "score", "requests")
OBJECTIVES = ("offline", "balanced", "interactive")
"""The two ends of the front and its knee: most tokens/s; largest product of tokens/s and tokens/s per user; most tokens/s per
user."""
COUNTS = ("looked_at", "legal", "fitting")
LATE = 1e6
"""What a queue that grows counts more than a limit that is broken."""


@record
class Task:
    """What a search is about; engines and formats come with ``Served``."""

    gpus: int
    """GPUs to use at most."""
    traffic: Traffic
    """Lengths; and the load where it is given, else None in ``loaded``."""
    loaded: bool
    """The load of ``traffic`` is asked for; else loads are varied."""
    limits: Limits
    pins: Mapping[str, int] = field(default_factory=dict)
    """Fields of a layout that stay, replicas too."""

    @property
    def limited(self) -> bool:
        """A limit is set."""
        return bool(np.isfinite(self.limits.ttft) or np.isfinite(self.limits.tpot))

    @property
    def priced_traffic(self) -> Traffic:
        """``traffic``; where no load is asked for, of requests in flight, whose number the rows have."""
        return self.traffic if self.loaded else replace(self.traffic, load="concurrency")

    @property
    def objectives(self) -> tuple[str, ...]:
        """What rows are compared by: all, or the first where a load or limits say what is best."""
        return OBJECTIVES[:1] if self.loaded or self.limited else OBJECTIVES


@record
class Priced:
    """Columns of deployments, priced: all of COLUMNS for the whole deployment."""

    served: tuple[Served, ...]
    source: NDArray[np.intp]
    """Which of ``served``."""
    layout: ServingLayout
    """Columns, replicas included."""
    prefill: ServingLayout | None = None
    """Columns of the pool of prompts; None: aggregated."""
    columns: Mapping[str, Floats]
    """load: requests in flight, or requests/s; total: output tokens/s; user: output tokens/s of a request; ttft, tpot: the figure
    that the limits are about, seconds; e2e: mean; score: ``score_of``; requests: requests/s."""
    estimates: tuple[ServingEstimate, ...] = ()
    """Of columns, without the parts of the step."""
    place: NDArray[np.intp]
    """(rows, 2): which of ``estimates``, and the row in it."""
    looked_at: int = 0
    """Layouts before rules and memory."""
    legal: int = 0
    fitting: int = 0

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]

    def take(self, rows: Any) -> Priced:
        """Some rows."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        prefill = None if self.prefill is None else self.prefill.take(rows)
        return replace(
            self, source=self.source[rows], place=self.place[rows], layout=self.layout.take(rows), prefill=prefill,
            columns=columns,
        )  # fmt: skip

    @classmethod
    def of(
        cls, one: Served, layout: ServingLayout, found: ServingEstimate, columns: Mapping[str, Floats],
        counts: Mapping[str, Any], prefill: ServingLayout | None = None,
    ) -> Priced:  # fmt: skip
        """Rows of one engine and format that start."""
        keep = np.flatnonzero(np.isfinite(columns["total"]))
        every = np.zeros(len(columns["total"]), dtype=np.intp)
        place = np.stack([every, np.arange(len(every))], axis=1)
        whole = cls(
            served=(one,), source=every, layout=layout, prefill=prefill, columns=columns, estimates=(found,), place=place, **counts
        )
        return whole.take(keep)

    @classmethod
    def nothing(cls, one: Served, layout: ServingLayout, counts: Mapping[str, Any]) -> Priced:
        """No rows."""
        columns = {name: np.zeros(0) for name in (*COLUMNS, "split")}
        none = np.zeros(0, dtype=np.intp)
        place = np.zeros((0, 2), dtype=np.intp)
        return cls(served=(one,), source=none, layout=layout.take(none), prefill=None, columns=columns, place=place, **counts)

    def deployments(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        """Numbers that tell deployments apart, for some rows: engine, format and split; loads of one have the same."""
        pools = [self.layout] if self.prefill is None else [self.layout, self.prefill]
        names = [broadcast(getattr(one, name), len(self))[rows] for one in pools for name in (*DEGREES, "replicas")]
        return np.stack([self.source[rows], *names], axis=1)


@record
class Choice:
    """One deployment with its load."""

    served: Served
    layout: ServingLayout
    """Integers."""
    prefill: ServingLayout | None = None
    """The pool of prompts where there are two."""
    traffic: Traffic
    """With the load at which it is shown."""
    found: ServingEstimate
    """Scalars."""
    limits: Limits = field(default_factory=Limits)

    @property
    def num_gpus(self) -> int:
        """GPUs of all pools."""
        return int(self.layout.num_gpus) + (int(self.prefill.num_gpus) if self.prefill else 0)

    @property
    def score(self) -> float:
        """As ``score_of``; at most 1 where it keeps up and its limits are met."""
        return float(score_of(self.found, self.limits, self.traffic.rate))

    @property
    def meets(self) -> bool:
        """It starts, keeps up, and keeps its limits."""
        return bool(np.all(np.asarray(self.found.fits))) and self.score <= 1.0

    @property
    def total(self) -> float:
        """Output tokens/s."""
        return float(np.asarray(self.found.output_tokens_per_second))

    @property
    def user(self) -> float:
        """Output tokens/s of one request while it is answered."""
        return 1.0 / float(np.asarray(self.found.tpot.mean))


def score_of(found: ServingEstimate, limits: Limits, rate: float | None) -> Any:
    """Largest of TTFT and TPOT over their limits, 0 without limits; where fewer requests/s are answered than arrive, ``rate``, LATE
    times what arrives over what is answered."""
    shares = [
        np.asarray(one.of(limits.percentile)) / limit if np.isfinite(limit) else 0.0
        for one, limit in ((found.ttft, limits.ttft), (found.tpot, limits.tpot))
    ]
    kept = np.maximum(shares[0], shares[1])
    if rate is None:
        return kept
    short = rate / np.maximum(found.requests_per_second, 1e-30)
    return np.where(np.asarray(found.saturated), LATE * np.maximum(short, 1.0), kept)


def broadcast(value: Any, count: int) -> NDArray[Any]:
    """A number or a column as a column of ``count`` rows."""
    return spread(value, (count,))


def columns_of(found: ServingEstimate, task: Task, load: Any, split: Any = None) -> dict[str, Floats]:
    """The columns of ``Priced`` from an estimate of rows; what does not start has none that is finite."""
    limits, count = task.limits, len(load)
    columns = {
        "load": load, "total": found.output_tokens_per_second, "user": 1.0 / np.asarray(found.tpot.mean),
        "ttft": found.ttft.of(limits.percentile), "tpot": found.tpot.of(limits.percentile), "e2e": found.e2e.mean,
        "score": score_of(found, limits, task.priced_traffic.rate), "requests": found.requests_per_second,
        "split": np.arange(count) if split is None else split,
    }  # fmt: skip
    columns = {name: np.array(broadcast(value, count), dtype=np.float64) for name, value in columns.items()}
    columns["total"] = np.where(broadcast(found.fits, count), columns["total"], np.nan)
    return columns


def below(first: Priced, second: Priced) -> Priced:
    """Two tables of the same engine and format as one."""
    both = joined([first, second])
    return replace(both, served=first.served, source=np.zeros(len(both), dtype=np.intp))


def joined(tables: Sequence[Priced]) -> Priced:
    """Tables of several engines and formats as one."""
    sources = np.concatenate([one.source + at for at, one in enumerate(tables)])
    layout = _joined_layouts([(one.layout, len(one)) for one in tables])
    columns = {name: np.concatenate([one.columns[name] for one in tables]) for name in tables[0].columns}
    prefill = _joined_layouts([(one.prefill, len(one)) for one in tables if one.prefill is not None and len(one)])
    sums = {name: sum(getattr(one, name) for one in tables) for name in COUNTS}
    assert layout is not None
    served, estimates = tuple(one.served[0] for one in tables), [one.estimates for one in tables]
    before = np.cumsum([0, *map(len, estimates)])
    place = np.concatenate([np.add(one.place, (before[at], 0)) for at, one in enumerate(tables)])
    return Priced(
        served=served, source=sources, layout=layout, prefill=prefill, columns=columns, estimates=sum(estimates, ()), place=place,
        **sums,
    )  # fmt: skip


def _joined_layouts(parts: Sequence[tuple[ServingLayout, int]]) -> ServingLayout | None:
    """Columns of several tables below each other; None without any."""
    if not parts:
        return None
    names = vars(ServingLayout())
    return ServingLayout(
        **{name: np.concatenate([broadcast(getattr(one, name), count) for one, count in parts]) for name in names}
    )


def traffic_of(table: Priced, task: Task, row: int) -> Traffic:
    """The traffic of a row, its load included."""
    return replace(task.priced_traffic, value=float(table["load"][row]))


def estimate_row(found: Any, row: int) -> Any:
    """One row of an estimate of columns, its fields numbers."""
    if is_dataclass(found) and not isinstance(found, type):
        return type(found)(**{one.name: estimate_row(getattr(found, one.name), row) for one in fields(found)})
    value = np.asarray(found)
    return found if value.ndim == 0 else value.reshape(-1)[row if value.size > 1 else 0]


def estimate_rows(several: Sequence[Any], place: NDArray[np.intp]) -> Any:
    """Rows of several estimates as one of columns; ``place`` (rows, 2) as in ``Priced``."""
    first = several[0]
    if is_dataclass(first) and not isinstance(first, type):
        return type(first)(
            **{one.name: estimate_rows([getattr(each, one.name) for each in several], place) for one in fields(first)}
        )
    return np.array([estimate_row(several[at], row) for at, row in place])
