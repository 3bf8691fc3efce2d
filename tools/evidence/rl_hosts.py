"""Host times of RL steps (profiles/rl_phases.yaml) fitted again without a source, and judged on it.

    python -m tools.evidence.rl_hosts

A step is priced three times for each row; in between generation is linear in both host times of a decode, and learners in theirs.
Coordinate descent by factors of 2 down to 1.25 on the mean of min(|ln(predicted / measured)|, 0.5), from ``START``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner import library
from planner.questions.accuracy.beyond import shipped_beyond
from planner.rl.host_times import HostTimes, host_times
from planner.rl.published import GROUPS
from planner.rl.published_steps import AskedStep, asked_step
from planner.rl.rl_step import RolloutSide, TrainSide, rollout_side, sampler_of, step_of, train_side
from planner.schema import mapping

GRACE = "gb*"
START = HostTimes(sample=3e-5, hosts_step=2e-3, stall=1e-3, token=1e-6, step=4.0, learners={GRACE: 1.0})
NAMES = ("sample", "hosts_step", "stall", "token", "step", GRACE)
MOST = 0.5
"""Errors beyond this count as this: what no host time explains."""


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A row without host times, and what a second of each adds to its generation."""

    name: str
    measured: float
    asked: AskedStep
    train: TrainSide
    rollout: RolloutSide
    slopes: dict[str, list[float]]
    """Of seconds and steady, by host time of a decode."""

    def ratio(self, host: HostTimes) -> float:
        """Predicted over measured."""
        slower = host.slower(self.asked.job.hardware.name)
        train = replace(self.train, seconds={name: one * slower for name, one in self.train.seconds.items()})
        hosts = host.hosts_step * host.slower(self.asked.job.generate_hardware.name)
        times = {"sample": host.sample, "hosts_step": hosts, "stall": host.stall}
        more = [sum(seconds * self.slopes[name][k] for name, seconds in times.items()) for k in (0, 1)]
        was = self.rollout.generation
        generation = replace(was, seconds=was.seconds + more[0], steady=was.steady + more[1])
        job = self.asked.job.replace(host=host)
        step = step_of(job, self.asked.place, train, replace(self.rollout, generation=generation))
        return float(np.ravel(step.seconds)[0]) / self.measured


def priced_rows() -> dict[str, list[Priced]]:
    """Measured steps of the shipped files by source."""
    found: dict[str, list[Priced]] = {}
    for file in (one for one in shipped_beyond() if one.parent.name == "rl"):
        document = library.read_yaml(file)
        for row in document["rows"]:
            if "step_s" in row.get("measured", {}) and not row.get("suspect"):
                full = {**row, **{name: mapping(row.get(name) or {}, name) for name in GROUPS}}
                found.setdefault(document["source"]["id"], []).append(_priced(full, str(document.get("framework"))))
    return found


def _priced(row: Mapping[str, Any], framework: str) -> Priced:
    asked = asked_step(row, framework, str(row["id"]))
    none = HostTimes(sample=0.0, hosts_step=0.0, stall=0.0, token=0.0, step=0.0, learners={GRACE: 1.0})

    def rollout(host: HostTimes) -> RolloutSide:
        job = asked.job.replace(host=host)
        return rollout_side(job, asked.place, sampler_of(job, asked.place, asked.rollout))

    base, slopes = rollout(none), dict[str, list[float]]()
    for name in ("sample", "hosts_step", "stall"):
        longer: dict[str, Any] = {name: 1e-3}
        other = rollout(replace(none, **longer)).generation
        slopes[name] = [
            float(np.ravel(getattr(other, part) - getattr(base.generation, part))[0]) / 1e-3 for part in ("seconds", "steady")
        ]
    train = train_side(asked.job.replace(host=none), asked.place, asked.layout)
    return Priced(
        name=str(row["id"]), measured=float(row["measured"]["step_s"]), asked=asked, train=train, rollout=base, slopes=slopes
    )


def errors(rows: Iterable[Priced], host: HostTimes) -> np.ndarray:
    """Predicted / measured - 1 of each row."""
    return np.array([one.ratio(host) for one in rows]) - 1.0


def fitted(rows: list[Priced], host: HostTimes = START) -> HostTimes:
    """The host times of these rows."""

    def cost(one: HostTimes) -> float:
        return float(np.mean(np.minimum(np.abs(np.log1p(errors(rows, one))), MOST)))

    best = cost(host)
    for step in (2.0, 1.5, 1.25):
        moved = True
        while moved:
            moved = False
            for name in NAMES:
                for factor in (step, 1.0 / step):
                    tried = _times(host, name, factor)
                    if (now := cost(tried)) < best - 1e-5:
                        best, host, moved = now, tried, True
    return host


def _times(host: HostTimes, name: str, factor: float) -> HostTimes:
    if name == GRACE:
        return replace(host, learners={GRACE: min(max(host.learners[GRACE] * factor, 0.5), 4.0)})
    longer: dict[str, Any] = {name: getattr(host, name) * factor}
    return replace(host, **longer)


def main() -> None:
    """The table of docs/log/rl.md."""
    rows = priced_rows()
    everything = [one for some in rows.values() for one in some]
    for name, fit, judged in [
        ("the library's", host_times(), everything),
        *((f"all but {out}", fitted([one for source, some in rows.items() if source != out for one in some]), rows[out]) for out in rows),
    ]:
        sizes = np.abs(errors(judged, fit))
        values = ", ".join(f"{key} {getattr(fit, key, None) or fit.learners[key]:.3g}" for key in NAMES)
        print(f"{name}: {values}: median {np.median(sizes):.1%}, 90 % below {np.percentile(sizes, 90):.1%} of {len(sizes)}")


if __name__ == "__main__":
    main()
