"""What calls of the API give back: plans, one or several, their estimates, and answers to questions about them."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar, Unpack, overload

from planner.errors import PlannerError
from planner.layout import Layout
from planner.record import record
from planner.units import GIB

if TYPE_CHECKING:  # rich is imported when something is printed
    from rich.console import Console

    from planner import plan_file
    from planner.advice import Advice
    from planner.api.token_budget import Training
    from planner.assumption import Assumption
    from planner.defaults import ResolvedJob
    from planner.gains import Gain
    from planner.plan_file import Prediction
    from planner.search import Finding
    from planner.trainers.bundle.folder import ExportFiles

T = TypeVar("T")
File = str | PathLike[str]
Progress = Callable[[str], None]
"""Called with what is looked at now."""


def silent(_: str) -> None:
    """No progress is shown."""


class Spent(TypedDict, total=False):
    """What the costs of a report are of; None = not said."""

    tokens: str | float | None
    price: float | None


COLUMNS = 140
"""Width of a result as text: that of the command line where no person reads along."""


class Result:
    """What a call gives back. ``print`` shows the tables of the command line, a notebook shows them as HTML."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``--json`` prints."""
        raise NotImplementedError

    def show(self, console: Console) -> None:
        """Print the tables on a console of rich."""
        raise NotImplementedError

    def __str__(self) -> str:
        text = io.StringIO()
        self.show(_console(text, color_system=None))
        return text.getvalue().rstrip("\n")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        console = _console(io.StringIO(), record=True)
        self.show(console)
        style = "white-space: pre; overflow-x: auto; line-height: 1.3"
        return console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')


def _console(text: io.StringIO, **options: Any) -> Console:
    """A console that writes a text: no terminal or notebook is looked for."""
    from rich.console import Console

    return Console(file=text, width=COLUMNS, highlight=False, force_terminal=False, force_jupyter=False, **options)


@dataclass(frozen=True, repr=False)
class Answer(Result, Generic[T]):
    """The answer to one question about plans, profiles or runs."""

    found: T
    """What was computed, as the question's own type."""
    printed: Callable[[Console, T], None]
    """Prints it."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``--json`` prints."""
        found: Any = self.found
        return found if isinstance(found, dict) else found.to_dict()

    def show(self, console: Console) -> None:
        """Print the tables on a console of rich."""
        self.printed(console, self.found)


@record
class Estimate:
    """Predicted time and memory of one plan, in seconds and bytes."""

    prediction: Prediction
    """The same as the plan file says it, in seconds and GiB."""
    step_time: float
    """Seconds of one optimizer step."""
    step_time_range: tuple[float, float]
    """Nine of ten measured steps lie within."""
    step_time_median: float | None
    """Half of the measured steps took longer, seconds."""
    first_runs: tuple[float, float, float] | None
    """Seconds of a user's own run before it is tuned: the quarters, the median between."""
    time: dict[str, float]
    """Seconds by part; they sum to ``step_time``."""
    hidden: dict[str, float]
    """Seconds of communication behind computation, not part of the step time."""
    tokens_per_second_per_gpu: float
    mfu: float
    """Model FLOP utilisation, 0 to 1: causal attention halved, head counted, recompute not counted."""
    bubble_share: float
    """Idle time of the pipeline over the step time."""
    memory: float
    """Bytes: the peak of the device on the stage with the highest."""
    memory_range: tuple[float, float]
    """Nine of ten measured peaks lie within."""
    memory_parts: dict[str, float]
    """Bytes by component; they sum to ``memory``."""
    memory_limit: float
    """Bytes that the driver reports as usable."""
    memory_stage: str
    """Pipeline stage of the peak: first, middle or last."""
    out_of_memory_probability: float
    host_memory: float
    """Bytes of host memory per GPU for offloaded states."""


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
        found = self.file.prediction
        low, high = found.memory_peak_range_gib
        return Estimate(
            prediction=found, step_time=found.step_time_s, step_time_range=found.step_time_range_s,
            step_time_median=found.step_time_median_s, first_runs=found.first_runs_s, time=found.time_s,
            hidden=found.hidden_s, tokens_per_second_per_gpu=found.tokens_per_second_per_gpu, mfu=found.mfu,
            bubble_share=found.bubble_share, memory=found.memory_peak_gib * GIB, memory_range=(low * GIB, high * GIB),
            memory_parts={name: value * GIB for name, value in found.memory_gib.items()},
            memory_limit=found.memory_limit_gib * GIB, memory_stage=found.memory_stage,
            out_of_memory_probability=found.out_of_memory_probability,
            host_memory=found.host_memory_gib_per_gpu * GIB,
        )  # fmt: skip

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
        """Print step time, memory and assumptions on a console of rich."""
        from planner.terminal import plan_tables, tables

        plan_tables.print_prediction(console, self.file)
        if self.assumed:
            console.print()
            console.print(tables.assumptions_table(self.assumed))

    def save(self, path: File) -> None:
        """Write the plan file, whole or not at all. Raises PlannerError."""
        self.file.save(Path(path))

    def export(
        self, trainer: str, folder: File, *, launcher: str = "torchrun", cluster: File | None = None, force: bool = False
    ) -> Exported:  # fmt: skip
        """Write the plan as a folder that a trainer runs. Raises PlannerError where the trainer cannot run it.

        ``cluster``: a cluster file, in whose regions SkyPilot may start it. ``force`` replaces a folder that is not empty.
        """
        from planner.cluster_file import read_cluster
        from planner.trainers.bundle.folder import make_bundle, write_bundle
        from planner.trainers.bundle.launchers import LAUNCHERS
        from planner.trainers.bundle.nearest import require_expressible
        from planner.trainers.bundle.target import ExportJob
        from planner.trainers.checking.child import check_folder
        from planner.trainers.targets import load_target

        if launcher not in LAUNCHERS:
            raise PlannerError(f"unknown launcher '{launcher}'; known: {', '.join(LAUNCHERS)}")
        target, job = load_target(trainer), ExportJob.of(self.file)
        require_expressible(target, job, Path(self.name or "plan.yaml"))
        bundle = make_bundle(target, job, launcher, read_cluster(Path(cluster)) if cluster is not None else None)
        write_bundle(bundle, Path(folder), force=force)
        return Exported.of(self, trainer, folder, bundle, lambda: check_folder(trainer, job, Path(folder)).text())

    def report(
        self,
        path: File | None = None,
        *,
        format: str | None = None,
        chart: str | None = None,
        processes: int = 1,
        progress: Callable[[str], None] = lambda _: None,
        **budget: Unpack[Spent],
    ) -> str | bytes:
        """The plan to look at, written to ``path`` where one is given: html, markdown, json, trace, or png of one ``chart``.

        The format follows from the ending of the path, else it is html. More ``processes`` are faster; a script then guards
        its main module as ``multiprocessing`` asks. Costs are those of ``tokens`` ('15T'; a trillion) at ``price`` USD per
        GPU-hour. Raises PlannerError.
        """
        from planner.api.token_budget import read_budget
        from planner.keywords import require_known
        from planner.questions.report.show import report_of, write_report
        from planner.questions.report.subject import Spending

        require_known("report", budget, ("tokens", "price"))
        asked = read_budget(budget.get("tokens") or "1T", None, budget.get("price"))
        spending = None if asked is None else Spending(tokens=asked.tokens, price=asked.price)
        return write_report(path, (format, chart), lambda kind: report_of(self.file, kind, chart, processes, progress, spending))


@dataclass(frozen=True, repr=False)
class Imported(Plan):
    """What people run today, as a plan."""

    unread: tuple[str, ...] = ()
    """Settings that a plan does not hold, each with its value."""
    noise: tuple[str, ...] = ()
    """Names of settings that change neither time nor memory."""
    notes: tuple[str, ...] = ()
    """What was taken for what."""


@record
class Exported:
    """A plan of any kind as a folder that was written."""

    plan: Any
    trainer: str
    """Trainer, engine or framework of ``plan export --to``."""
    folder: Path
    files: tuple[str, ...]
    """Relative to the folder."""
    notes: tuple[str, ...]
    """Differences between the plan and what the trainer does, and what it still needs."""
    warnings: tuple[str, ...]
    """What to know before it runs."""
    _checks: Callable[[], str] = field(repr=False)

    @classmethod
    def of(cls, plan: Any, trainer: str, folder: File, made: ExportFiles, checks: Callable[[], str]) -> Exported:
        """Of files that were written; ``checks`` asks the trainer's own code."""
        said: dict[str, Any] = {"notes": made.notes, "warnings": made.warnings, "_checks": checks}
        return cls(plan=plan, trainer=trainer, folder=Path(folder), files=tuple(sorted(made.files)), **said)

    def check(self) -> str:
        """What the trainer's own parser says about the folder, where it is installed."""
        return self._checks()


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
    faster: tuple[Gain, ...] = ()
    """Options that were not stated, and precisions, that would make the first plan faster."""
    training: Training | None = None
    """What all tokens take with the first plan, where they were said."""

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
            "advice": [vars(one) for one in self.advice],
            "faster": [vars(one) for one in self.faster],
            **({"training": self.training.to_dict()} if self.training else {}),
        }  # fmt: skip

    def show(self, console: Console) -> None:
        """Print the job, its assumptions, the plans, why, memory and advice on a console of rich."""
        from rich.markup import escape

        from planner.explain import layout_text
        from planner.terminal import plan_tables, tables

        job, finding, first = self.resolved.job, self.finding, self.attempts[0]
        console.print(plan_tables.job_text(job.workload, job.cluster, job.trainer), markup=False)
        plans = [one.file for one in self.attempts]
        console.print(plan_tables.plans_table(plans, finding.fit, console.width))
        if finding.fit:
            if equal := plan_tables.equal_text(plans):
                console.print(equal)
            found = first.file.prediction
            basis = found.step_time_range_basis
            console.print(f"[bold]The first:[/bold] {escape(layout_text(first.layout))}.")
            console.print(f"Its step: {plan_tables.range_text(found)}, by the errors on {basis}.")
            console.print(plan_tables.first_runs_text(found))
            for sentence in self.training.sentences() if self.training else ():
                console.print(sentence, markup=False)
            console.print(f"[bold]Why the first:[/bold] {escape(first.why)}")
            for gain in self.faster:
                where = f"; with {gain.layout}" if gain.layout else ""
                console.print(f"Faster with {gain.flag}: -{100 * gain.gain:.1f} % ({gain.what}{where})", markup=False)
        else:
            console.print(f"[bold red]Nothing fits.[/bold red] The best attempt {first.why}.")
        console.print()
        plan_tables.print_memory(console, first.file.prediction)
        if self.advice:
            console.print(plan_tables.advice_table(list(self.advice)))
            for change in self.advice:
                console.print(f"  {change.change}:\n    {change.command}", soft_wrap=True, markup=False)
        elif not finding.fit:
            console.print(
                "No single change of those tried makes it fit: combine a smaller model, more GPUs and adapters."
            )
        console.print()
        console.print(tables.assumptions_table(self.assumed))
        console.print(
            f"[dim]{finding.searched:,} layouts, {finding.legal:,} looked at and legal, {finding.priced:,} priced, "
            f"{finding.fitting:,} fit; {finding.seconds:.2f} s[/dim]"
        )
