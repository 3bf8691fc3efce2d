"""Questions about mixed clusters from Python: ``load_mixed``, ``mixed_what_if``; the same as ``plan --cluster``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from planner.api.results import Answer, Exported, File, Progress, Result, silent
from planner.errors import PlannerError
from planner.keywords import JOB, SEARCHED, layout_values, request_fields, require_known

if TYPE_CHECKING:
    from rich.console import Console

    from planner.mixed import mixed_plan
    from planner.mixed.mixed_changes import MixedChanges
    from planner.mixed.mixed_question import MixedAnswer


@dataclass(frozen=True, repr=False)
class MixedPlan(Result):
    """One mixed plan, priced."""

    file: mixed_plan.MixedPlan
    """The plan as its file holds it: workload, cluster, trainer, layout, prediction."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what its file holds, and what crosses between its sites."""
        crossing = self.file.between_sites()
        return {**self.file.to_dict(), **({} if crossing is None else {"between_sites": crossing.to_dict()})}

    def show(self, console: Console) -> None:
        """Print all of it on a console of rich."""
        from planner.questions.mixed.mixed_show import print_plan

        print_plan(console, self.file)

    def save(self, path: File) -> None:
        """Write the plan file, whole or not at all. Raises PlannerError."""
        self.file.save(Path(path))

    def report(
        self, path: File | None = None, *, format: str | None = None, chart: str | None = None, tokens: str | float | None = None,
        progress: Progress = silent,
    ) -> str | bytes:  # fmt: skip
        """The plan to look at, written to ``path`` where one is given: html, markdown, json, trace, or png of one ``chart``.

        The format follows from the ending of the path, else it is html. Costs are those of ``tokens`` ('15T'; a trillion).
        Raises PlannerError.
        """
        from planner.api.token_budget import read_budget
        from planner.questions.mixed.mixed_document import mixed_report
        from planner.questions.report.show import write_report
        from planner.questions.report.subject import Spending

        asked = read_budget(tokens or "1T", None, None)
        spending = Spending() if asked is None else Spending(tokens=asked.tokens)
        return write_report(
            path, (format, chart), lambda kind: mixed_report(self.file, kind, chart, spending, progress)
        )

    def export(self, trainer: str, folder: File, *, force: bool = False) -> Exported:
        """Write the plan as a folder that a trainer runs. Raises PlannerError where it cannot run it, naming the nearest plan
        that it can.

        ``force`` replaces a folder that is not empty.
        """
        from planner.mixed.export.export_job import MixedExport
        from planner.mixed.export.mixed_check import check_text
        from planner.mixed.export.mixed_folder import mixed_bundle
        from planner.trainers.bundle.folder import write_bundle

        mixed = MixedExport(job=self.file.job(), layout=self.file.layout, trainer=self.file.trainer)
        bundle = mixed_bundle(mixed, trainer, self.to_dict())
        write_bundle(bundle, Path(folder), force=force)
        return Exported.of(self, trainer, folder, bundle, lambda: check_text(mixed, trainer, Path(folder)))


@dataclass(frozen=True, repr=False)
class MixedPlans(Result, Sequence[MixedPlan]):
    """The best mixed plans of a job, best first; empty when nothing fits."""

    found: MixedAnswer

    def __len__(self) -> int:
        return len(self.found.plans)

    @overload
    def __getitem__(self, index: int) -> MixedPlan: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[MixedPlan]: ...
    def __getitem__(self, index: int | slice) -> MixedPlan | Sequence[MixedPlan]:
        plans = [MixedPlan(one) for one in self.found.plans]
        if isinstance(index, int) and not plans:
            raise PlannerError(self.found.verdict)
        return plans[index]

    def __iter__(self) -> Iterator[MixedPlan]:
        return iter(self[:])

    @property
    def why(self) -> str:
        """Whether mixing pays, and what each kind is good for alone."""
        return self.found.verdict

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``plan --cluster --json`` prints."""
        return self.found.to_dict()

    def show(self, console: Console) -> None:
        """Print the tables on a console of rich."""
        from planner.questions.mixed.mixed_show import print_answer

        print_answer(console, self.found)


def mixed_plans(
    cluster: File, top: int, progress: Progress, keywords: dict[str, Any], outer: str | None = None, runnable: bool = False
) -> MixedPlans | dict[str, Any]:  # fmt: skip
    """The best plans on the nodes of a cluster file; of one with one kind at one speed the keywords of the ordinary question.

    ``outer``: local updates between sites, METHOD:EVERY[:BITS[:FRAGMENTS]], like diloco:100:8. ``runnable``: only plans that an
    export of the trainer runs as they are.
    """
    from planner.cluster_file import read_cluster
    from planner.mixed.known_links import read_outer
    from planner.mixed.mixed_question import SAID_BY_CLUSTER, Wanted, ask_mixed

    require_known("plan", keywords, (*JOB, *SEARCHED))
    read, said = read_cluster(Path(cluster)), request_fields(keywords)
    only = read.uniform
    plain = only is not None and only.network is None and only.gpus in (0, int(only.profile.gpus_per_node))
    if outer is None and plain and only is not None and not any(said.get(name) for name in SAID_BY_CLUSTER):
        return {**keywords, "hardware": only.hardware, "gpus": only.num_gpus}
    local = None if outer is None else read_outer(outer)
    wanted = Wanted(top=top, outer=local, runnable=runnable)
    return MixedPlans(ask_mixed(read, said, layout_values(keywords), wanted, progress))


def load_mixed(path: File) -> MixedPlan:
    """The plan of a mixed plan's file. Raises PlannerError when it is damaged, or newer than this planner."""
    from planner.mixed.mixed_plan import load_mixed_plan

    return MixedPlan(load_mixed_plan(Path(path)))


def mixed_what_if(
    base: MixedPlan | File, /, *, without: Sequence[str] = (), slowdown: Sequence[str] = (), link: Sequence[str] = (),
    progress: Progress = silent,
) -> Answer[MixedChanges]:  # fmt: skip
    """A mixed plan with one thing changed, as it stands and planned again: ``mixed_what_if("mixed.yaml", without=["t4"])``.

    ``slowdown``: 'node-3=1.4'; ``link``: 'us-east,us-west=2Gb/s'. Raises PlannerError.
    """
    from planner.mixed.mixed_changes import mixed_what_if as answer
    from planner.questions.mixed.mixed_show import print_changes

    plan = base if isinstance(base, MixedPlan) else load_mixed(base)
    return Answer(answer(plan.file, without=without, slowdown=slowdown, link=link, progress=progress), print_changes)


@dataclass(frozen=True, repr=False)
class MixedValidation(Result):
    """The unlike stages of a mixed plan, each run as one of its ranks would, compared with their prices."""

    found: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``--json`` prints."""
        return self.found

    def show(self, console: Console) -> None:
        """Print the table on a console of rich, and what is not checked."""
        from planner.lab.run.mixed_stages import lines
        from planner.terminal.tables import table

        console.print(f"level {self.found['rung']}: every unlike stage of the plan, as one of its ranks runs it")
        for change in self.found["changes"]:
            console.print(f"changed to compare: {change}", markup=False)
        headings = (
            "stage", "kind", ">layers", ">tp", "recompute", "~predicted, GiB", "~measured, GiB", "~error",
            "passes, predicted / measured",
        )  # fmt: skip
        console.print(table(*headings, rows=lines(self.found)))
        for one in self.found["unchecked"]:
            console.print(f"not checked here: {one}", markup=False)

    def save(self, path: File) -> None:
        """Write it as YAML. Raises PlannerError."""
        from planner import library

        library.write_whole(Path(path), library.dump_yaml({"planner_mixed_validation": 1, **self.found}))


def validate_mixed(
    plan: MixedPlan | File, *, rung: str = "auto", device: str | None = None, steps: int = 5, warmup: int = 2,
    progress: Progress = silent,
) -> MixedValidation:  # fmt: skip
    """Run every unlike stage of a mixed plan alone, on fake tensors or on this machine's device, and compare it with its price.

    Raises PlannerError for levels that need all ranks.
    """
    from planner.lab.run.mixed_stages import validate_stages

    read = plan if isinstance(plan, MixedPlan) else load_mixed(plan)
    return MixedValidation(validate_stages(read.file, rung, device, steps=(warmup, steps), say=progress))


__all__ = ["MixedPlan", "MixedPlans", "load_mixed", "mixed_what_if", "validate_mixed"]
