"""Plans, one or several, and their estimates, as the API gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from planner.api.shown import Result
from planner.errors import PlannerError
from planner.layout import Layout
from planner.units import GIB

if TYPE_CHECKING:  # rich is imported when something is printed
    from rich.console import Console

    from planner import plan_file
    from planner.advice import Advice
    from planner.defaults import ResolvedJob
    from planner.plan_file import Assumption, Prediction
    from planner.search import Finding


@dataclass(frozen=True)
class Estimate:
    """Predicted time and memory of one plan, in seconds and bytes."""

    prediction: Prediction
    """The same as the plan file says it, in seconds and GiB."""

    @property
    def step_time(self) -> float:
        """Seconds of one optimizer step."""
        return self.prediction.step_time_s

    @property
    def step_time_range(self) -> tuple[float, float]:
        """Seconds; nine of ten measured steps lie within."""
        return self.prediction.step_time_range_s

    @property
    def time(self) -> dict[str, float]:
        """Seconds by part; they sum to ``step_time``."""
        return self.prediction.time_s

    @property
    def hidden(self) -> dict[str, float]:
        """Seconds of communication behind computation, not part of the step time."""
        return self.prediction.hidden_s

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens/s per GPU."""
        return self.prediction.tokens_per_second_per_gpu

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation, 0 to 1: causal attention halved, head counted, recompute not counted."""
        return self.prediction.mfu

    @property
    def bubble_share(self) -> float:
        """Idle time of the pipeline over the step time."""
        return self.prediction.bubble_share

    @property
    def memory(self) -> float:
        """Bytes: the peak of the device on the stage with the highest."""
        return self.prediction.memory_peak_gib * GIB

    @property
    def memory_range(self) -> tuple[float, float]:
        """Bytes; nine of ten measured peaks lie within."""
        low, high = self.prediction.memory_peak_range_gib
        return low * GIB, high * GIB

    @property
    def memory_parts(self) -> dict[str, float]:
        """Bytes by component; they sum to ``memory``."""
        return {name: value * GIB for name, value in self.prediction.memory_gib.items()}

    @property
    def memory_limit(self) -> float:
        """Bytes that the driver reports as usable."""
        return self.prediction.memory_limit_gib * GIB

    @property
    def memory_stage(self) -> str:
        """Pipeline stage of the peak: first, middle or last."""
        return self.prediction.memory_stage

    @property
    def out_of_memory_probability(self) -> float:
        """Chance that the device runs out of memory, 0 to 1."""
        return self.prediction.out_of_memory_probability

    @property
    def host_memory(self) -> float:
        """Bytes of host memory per GPU for offloaded states."""
        return self.prediction.host_memory_gib_per_gpu * GIB


@dataclass(frozen=True, repr=False)
class Plan(Result):
    """One layout for one job, priced."""

    file: plan_file.Plan
    """The plan as its file holds it: workload, hardware, number of GPUs, trainer, layout, prediction."""
    name: str = ""
    """The path that it was read from; '' where it was not."""

    @property
    def layout(self) -> Layout:
        """The layout; its fields are integers, ``to_dict`` says them in words."""
        return self.file.layout

    @property
    def estimate(self) -> Estimate:
        """Predicted time and memory, in seconds and bytes."""
        return Estimate(self.file.prediction)

    @property
    def why(self) -> str:
        """Why this layout and not the next."""
        return self.file.why

    @property
    def assumed(self) -> tuple[Assumption, ...]:
        """What was not said: what, value, why, and the flag that changes it."""
        return self.file.assumptions

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``plan estimate --json`` prints."""
        document = {"layout": self.layout.to_dict(), "estimate": vars(self.file.prediction)}
        return {"assumptions": [vars(one) for one in self.assumed], **document}

    def show(self, console: Console) -> None:
        """Print assumptions, step time and memory on a console of rich."""
        from planner.terminal import tables as table

        if self.assumed:
            console.print(table.assumptions_table(self.assumed))
        table.print_prediction(console, self.file)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan file, whole or not at all. Raises PlannerError."""
        self.file.save(Path(path))

    def export(
        self, trainer: str, folder: str | PathLike[str], *, launcher: str = "torchrun", force: bool = False
    ) -> Exported:
        """Write the plan as a folder that a trainer runs. Raises PlannerError where the trainer cannot run it.

        ``force`` replaces a folder that is not empty.
        """
        from planner.trainers.bundle.folder import make_bundle, write_bundle
        from planner.trainers.bundle.launchers import LAUNCHERS
        from planner.trainers.bundle.nearest import require_expressible
        from planner.trainers.bundle.target import ExportJob
        from planner.trainers.targets import load_target

        if launcher not in LAUNCHERS:
            raise PlannerError(f"unknown launcher '{launcher}'; known: {', '.join(LAUNCHERS)}")
        target, job = load_target(trainer), ExportJob.of(self.file)
        require_expressible(target, job, Path(self.name or "plan.yaml"))
        bundle = make_bundle(target, job, launcher)
        write_bundle(bundle, Path(folder), force=force)
        return Exported(
            self, trainer, Path(folder), tuple(sorted(bundle.files)), bundle.rendered.notes, bundle.warnings
        )

    def report(
        self,
        path: str | PathLike[str] | None = None,
        *,
        format: str | None = None,
        chart: str | None = None,
        processes: int = 1,
        progress: Callable[[str], None] = lambda _: None,
    ) -> str | bytes:
        """The plan to look at, written to ``path`` where one is given: html, markdown, json, trace, or png of one ``chart``.

        The format follows from the ending of the path, else it is html. More ``processes`` are faster; a script then guards
        its main module as ``multiprocessing`` asks. Raises PlannerError.
        """
        from planner import library
        from planner.questions.report.show import format_of, report_of

        output = None if path is None else Path(path)
        made = report_of(self.file, format_of(format, output, chart), chart, processes, progress)
        if output is not None:
            library.write_whole(output, made)
        return made


@dataclass(frozen=True, repr=False)
class Imported(Plan):
    """What people run today, as a plan."""

    unread: tuple[str, ...] = ()
    """Settings that a plan does not hold, each with its value."""
    notes: tuple[str, ...] = ()
    """What was taken for what."""


@dataclass(frozen=True)
class Exported:
    """A folder that was written."""

    plan: Plan
    trainer: str
    folder: Path
    files: tuple[str, ...]
    """Relative to the folder."""
    notes: tuple[str, ...]
    """Differences between the plan and what the trainer does, and what it still needs."""
    warnings: tuple[str, ...]
    """What to know before it runs."""

    def check(self) -> str:
        """What the trainer's own parser says about the folder, where it is installed."""
        from planner.trainers.bundle.target import ExportJob
        from planner.trainers.checking.child import check_folder

        return check_folder(self.trainer, ExportJob.of(self.plan.file), self.folder).text()


@dataclass(frozen=True, repr=False)
class Plans(Result, Sequence[Plan]):
    """The best plans of a job, best first; empty when nothing fits, and then ``why`` and ``advice`` say what would."""

    resolved: ResolvedJob
    """The job with its defaults."""
    finding: Finding
    """The search."""
    attempts: tuple[Plan, ...]
    """The plans; where nothing fits, those that miss by the least."""
    advice: tuple[Advice, ...]
    """Changes that would make the job fit, where nothing does."""

    def __len__(self) -> int:
        return len(self.attempts) if self.finding.fit else 0

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Plan]: ...
    def __getitem__(self, index: int | slice) -> Plan | Sequence[Plan]:
        if not self.finding.fit and not isinstance(index, slice):
            raise PlannerError(self.why)
        return self.attempts[: len(self)][index]

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.attempts[: len(self)])

    @property
    def assumed(self) -> tuple[Assumption, ...]:
        """What was not said: what, value, why, and the flag that changes it."""
        return self.resolved.assumptions

    @property
    def why(self) -> str:
        """Why the first is the first; where nothing fits, by how much, and what would."""
        first = self.attempts[0].why
        if self.finding.fit:
            return first
        would = "; ".join(one.change for one in self.advice) or "no single change of those that were tried"
        return f"nothing fits: the best attempt {first}. What would fit: {would}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``plan --json`` prints."""
        resolved, finding, job = self.resolved, self.finding, self.resolved.job
        plans = [
            {"rank": rank, "fits": finding.fit, "layout": plan.layout.to_dict(), "estimate": vars(plan.file.prediction),
             "why": plan.why}
            for rank, plan in enumerate(self.attempts, 1)
        ]  # fmt: skip
        return {
            "workload": job.workload.to_dict(),
            "cluster": {"hardware": resolved.hardware, "num_gpus": job.cluster.num_gpus},
            "trainer": resolved.trainer,
            "assumptions": [vars(one) for one in resolved.assumptions],
            "plans": plans,
            "searched": {
                "layouts": finding.searched, "legal": finding.legal, "priced": finding.priced, "fit": finding.fitting,
                "refused": finding.refused, "seconds": finding.seconds,
            },
            "advice": [one.to_dict() for one in self.advice],
        }  # fmt: skip

    def show(self, console: Console) -> None:
        """Print the job, its assumptions, the plans, why, memory and advice on a console of rich."""
        from rich.markup import escape

        from planner.terminal import tables as table

        job, finding, first = self.resolved.job, self.finding, self.attempts[0]
        console.print(
            f"[bold]{escape(job.model.name)}[/bold] on {job.cluster.num_gpus} x {escape(job.cluster.hardware.name)}, "
            f"sequences of {job.workload.sequence_length} tokens, {job.workload.global_batch_size} per step, "
            f"{job.workload.precision}, {job.workload.optimizer}, trainer {escape(job.trainer.name)}"
        )
        console.print(table.assumptions_table(self.assumed))
        table.print_plans(console, [one.file for one in self.attempts], finding.fit)
        if finding.fit:
            low, high = (table.seconds(value) for value in first.estimate.step_time_range)
            basis = first.file.prediction.step_time_range_basis
            console.print(f"Step of the first: {low} to {high} for nine of ten runs, by the errors on {basis}.")
            console.print(f"[bold]Why the first:[/bold] {escape(first.why)}")
        else:
            console.print(f"[bold red]Nothing fits.[/bold red] The best attempt {first.why}.")
        console.print()
        table.print_memory(console, first.file.prediction)
        if self.advice:
            console.print(table.advice_table(list(self.advice)))
            for one in self.advice:
                console.print(f"  {one.change}:\n    {one.command}", soft_wrap=True, markup=False)
        elif not finding.fit:
            console.print(
                "No single change of those tried makes it fit: combine a smaller model, more GPUs and adapters."
            )
        console.print(
            f"[dim]{finding.searched:,} layouts, {finding.legal:,} looked at and legal, {finding.priced:,} priced, "
            f"{finding.fitting:,} fit; {finding.seconds:.2f} s[/dim]"
        )
