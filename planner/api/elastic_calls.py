"""Questions about jobs whose machines come and go, from Python: ``resilience``, ``reshape``, ``watch``; the same as the commands
of those names."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.api.elastic_jobs import AROUND, elastic_job, save_data, seconds_of
from planner.api.reshape_calls import MixedReshaped, Reshaped, reshape
from planner.api.results import Answer, File, Plan, Progress, silent
from planner.errors import PlannerError, shown
from planner.keywords import require_known

if TYPE_CHECKING:

    from planner.api.mixed_calls import MixedPlan
    from planner.elastic.resilience import Resilience
    from planner.questions.watch.watched import Watched

@dataclass(frozen=True, repr=False)
class Resilient(Answer["Resilience"]):
    """What failures cost a plan; ``found.answers`` hold goodput, days and dollars, best first."""

    found: Resilience

    def save(self, path: File) -> None:
        """Write a picture (.png, .svg, .pdf), a page (.html) or JSON (.json). Raises PlannerError."""
        from planner.library import write_whole
        from planner.questions.resilience.show import draw

        output = Path(path)
        if output.suffix in (".png", ".svg", ".pdf"):
            draw(self.found, output)
        elif output.suffix == ".json":
            write_whole(output, json.dumps(self.to_dict(), indent=2) + "\n")
        elif output.suffix == ".html":
            title = html.escape(f"Resilience of {self.found.job.model}")
            write_whole(output, f"<!doctype html><meta charset='utf-8'><title>{title}</title>{self._repr_html_()}\n")
        else:
            raise PlannerError(f"{output}: name a file that ends in .png, .svg, .pdf, .html or .json")


def resilience(plan: Plan | MixedPlan | File, *, progress: Progress = silent, **said: Any) -> Resilient:
    """What failures cost a plan: ``resilience("plan.yaml", mtbf="900h", days=30, spares=2)``.

    Keywords are the flags of ``plan resilience``: ``mtbf`` of one node, ``days`` of training, ``spares``, ``repair``, ``shortage``,
    ``restart``, ``interval``, ``synchronous``, ``spot``, ``price``, ``trace`` and ``cluster`` files. Times are text with a unit or
    seconds. Raises PlannerError.
    """
    from planner.elastic.availability import read_trace
    from planner.elastic.replays import replayed, traced_kind
    from planner.elastic.resilience import SHORTAGE, Asked
    from planner.elastic.resilience import resilience as answer
    from planner.questions.resilience.show import print_resilience

    known = (*AROUND, "days", "repair", "shortage", "restart", "interval", "trace")
    require_known("resilience", said, known)
    job = elastic_job(plan, said)
    days, shortage = said.get("days"), said.get("shortage")
    for flag, value in (("--days", days), ("--shortage", shortage)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6):
            raise PlannerError(f"{flag} is {shown(value)}; it must be a number above 0 and below a million")
    asked = Asked(
        days=30.0 if days is None else float(days),
        repair=seconds_of(said.get("repair"), "--repair", "24h"),
        shortage=SHORTAGE if shortage is None else float(shortage),
        restart=seconds_of(said.get("restart"), "--restart", "90s"),
        interval=seconds_of(said.get("interval"), "--interval", "10min"),
    )  # fmt: skip
    trace = None if said.get("trace") is None else read_trace(Path(said["trace"]))
    if trace is not None:
        traced_kind(job.failures())
    found = answer(job, asked, progress)
    if trace is not None:
        found = replace(found, replay=replayed(found, trace, progress))
    return Resilient(found, print_resilience)


@dataclass(frozen=True, repr=False)
class Watching(Answer["Watched"]):
    """A running job at one moment; ``found.findings`` and ``found.actions``."""

    found: Watched

    def parts(self, width: int) -> list[Any]:
        """What is drawn live, for rich: all of ``show`` but what was assumed, for a terminal of ``width`` columns."""
        from planner.questions.watch.show import parts

        return list(parts(self.found, width))

    def save(self, path: File) -> str:
        """Write the best new plan, or order of experts, that pays, as YAML or JSON; returns what it is, '' where none pays and
        nothing was written. Raises PlannerError."""
        for one in self.found.actions:
            if one.pays and one.plan is not None:
                save_data(Path(path), one.plan)
                return one.what
        return ""


def watch(
    plan: Plan | MixedPlan | File, *logs: File, url: str | None = None, progress: Progress = silent, before: Watching | None = None,
    **said: Any,
) -> Watching:
    """What holds a running job up, and what would pay: ``watch("plan.yaml", "ranks.csv", "gpus.csv")``.

    ``logs``: training logs, tables of ranks' times, of experts, of nvidia-smi or dcgmi dmon; ``url``: a Prometheus endpoint.
    ``before``: the look before, whose plan with the measured speeds is kept while they are the same. Keywords: ``remaining``,
    ``spares``, ``price`` and a ``cluster`` file. Raises PlannerError.
    """
    from planner.elastic.mixed_elastic_job import MixedElasticJob
    from planner.elastic.observed import observe
    from planner.questions.watch.mixed_watched import watched_mixed
    from planner.questions.watch.show import print_watched
    from planner.questions.watch.watched import REMAINING, watched

    require_known("watch", said, (*AROUND, "remaining"))
    remaining = seconds_of(said.get("remaining"), "--remaining", "24h") or REMAINING
    last, paths = None if before is None else before.found, [Path(one) for one in logs]
    job = elastic_job(plan, said)
    work = job.plan.workload
    seen = observe(paths, url, work.global_batch_size, work.tokens, job.num_gpus)
    if isinstance(job, MixedElasticJob):
        return Watching(watched_mixed(job, seen, remaining, progress, last), print_watched)
    return Watching(watched(job, seen, remaining, progress, last), print_watched)


__all__: Sequence[str] = ["MixedReshaped", "Reshaped", "Resilient", "reshape", "resilience", "watch"]
