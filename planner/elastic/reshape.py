"""``plan reshape``: the best plan on another number of GPUs, the move counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.assumption import Assumption
from planner.costs import DAY
from planner.elastic.best_layout import Found, choices, resolved_plan
from planner.elastic.elastic_job import ElasticJob
from planner.elastic.engine_recipes import Recipe, recipe_of
from planner.elastic.failing_job import FailingJob
from planner.elastic.failure_answers import interval_of
from planner.elastic.move_costs import Way, ways_of
from planner.elastic.moves import Move, move_of, nesting
from planner.elastic.shards import places_of, saved_of
from planner.errors import PlannerError
from planner.explain import layout_text
from planner.layout import Layout
from planner.plan_file import Plan
from planner.record import record
from planner.units import format_bytes, format_seconds
from planner.workload import Workload

CANDIDATES = 12
"""Layouts, fastest first, whose move is priced."""
EQUAL = 0.01
"""Totals nearer than this are equal: then degrees that nest are preferred."""
OTHER_BATCH = 0.1
"""A plan with another batch must be this much faster: with the same one the loss goes on as it was."""
UNLIKE = 2.0
"""A checkpoint so many times as large, or as small, as the plan's states is doubted."""
REMAINING = DAY
OF_FAILURES = ("failures", "saves", "spares", "rate with")
"""What assumptions begin with that say how old the last checkpoint is."""


@record
class Wanted:
    """What was asked beside the plan."""

    gpus: int
    """GPUs from now on."""
    drain: float | None = None
    """Seconds of warning; None = the move is planned."""
    lost: bool = False
    """GPUs were lost without a warning: from the last checkpoint."""
    remaining: float = REMAINING
    """Seconds of training, at the plan's rate, that are left."""
    step: int | None = None
    """Step that the run has reached."""


@record
class Candidate:
    """One layout with its move."""

    layout: Layout
    gpus: int
    """GPUs that work."""
    batch: int
    """Sequences per step."""
    step_time: float
    """Seconds."""
    move: Move
    ways: tuple[Way, ...]
    total: float
    """Seconds until the remaining samples are trained, the move included."""
    nests: dict[str, bool]
    """By degree that changes: the finer divides the coarser."""

    @property
    def nested(self) -> bool:
        """All degrees that change nest."""
        return all(self.nests.values())

    def way(self, key: str) -> Way:
        """One way of the move."""
        return next(one for one in self.ways if one.key == key)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "layout": self.layout.to_dict(), "gpus": self.gpus, "global_batch_size": self.batch, "step_time_s": self.step_time,
            "total_s": self.total, "nests": self.nests, "move": self.move.to_dict(), "ways": [one.to_dict() for one in self.ways],
        }  # fmt: skip


@record
class PayBack:
    """What the move has to compete with."""

    against: str
    """The alternative, in words."""
    seconds: float | None
    """From when on the move is ahead; None = never."""
    steps: int | None
    """The same in new steps."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return vars(self)


@record
class Reshape:
    """The move from a plan to another number of GPUs."""

    job: ElasticJob
    wanted: Wanted
    plan: Plan
    """The new plan."""
    best: Candidate
    others: tuple[Candidate, ...]
    """What else was priced, best first."""
    way: Way
    """The way that is taken."""
    pay_back: PayBack
    drain: tuple[float, bool] | None
    """Seconds that the save needs after a warning, and whether that is enough; None without a warning."""
    recipe: Recipe
    kept: tuple[str, ...]
    """What stays as it is, and what has to be carried over."""
    assumptions: tuple[Assumption, ...]
    checkpoint: str = ""
    """What was recognised of a folder: format, tensors, bytes, degrees; '' without one."""

    @property
    def other_job(self) -> str:
        """Why the checkpoint may be another job's; '' where it may not."""
        computed, held = saved_of(self.job.plan.workload, self.job.plan.load_trainer()).size, self.job.saved.size
        if held >= computed / UNLIKE and held <= computed * UNLIKE:
            return ""
        return f"it holds {format_bytes(held)}, the states of the plan are {format_bytes(computed)}: is it of this run?"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        drain = None if self.drain is None else {
            "warning_s": self.wanted.drain, "needed_s": self.drain[0], "enough": self.drain[1],
        }  # fmt: skip
        return {
            "from": {"gpus": self.job.plan.num_gpus, "layout": self.job.plan.layout.to_dict(), "step_time_s": self.job.step_time},
            "to": self.best.to_dict(), "way": self.way.to_dict(), "pay_back": self.pay_back.to_dict(), "drain": drain,
            "recipe": self.recipe.to_dict(), "kept": list(self.kept), "checkpoint": self.checkpoint,
            "others": [one.to_dict() for one in self.others],
            "assumptions": [vars(one) for one in self.assumptions],
        }  # fmt: skip

    def recipe_document(self) -> dict[str, Any]:
        """What the new run needs to know of the old one: engine, flags, positions."""
        job = self.job
        old = {"gpus": job.num_gpus, "layout": job.plan.layout.to_dict(), "global_batch_size": job.plan.workload.global_batch_size}
        new = {"gpus": self.best.gpus, "layout": self.best.layout.to_dict(), "global_batch_size": self.best.batch}
        return recipe_of_move(old, new, self.wanted.step, self.recipe, self.kept)


def recipe_of_move(
    old: dict[str, Any], new: dict[str, Any], step: int | None, recipe: Recipe, kept: tuple[str, ...]
) -> dict[str, Any]:
    """What a run needs to know of the one before: where its data goes on, in samples; ``step``: that the old one has reached."""
    samples = None if step is None else step * int(old["global_batch_size"])
    return {
        "planner_reshape": 1, "from": old, "to": new, "samples": samples,
        "step": None if samples is None else samples // int(new["global_batch_size"]),
        "engine": recipe.to_dict(), "carry": list(kept),
    }  # fmt: skip


def _candidate(job: ElasticJob, wanted: Wanted, found: Found, number: int, *, exchange: bool) -> Candidate:
    """One layout of a choice with its move; with what nodes would send each other where ``exchange``."""
    layout, step_time = found.layouts[number], float(found.estimates[number].step_time[0])
    trainer, old = job.plan.load_trainer(), job.places
    new = places_of(found.resolved.job.workload, trainer, layout)
    left = range(min(wanted.gpus, job.plan.num_gpus)) if wanted.lost else None
    move = move_of(job.saved, old, new, job.node_ranks, left, exchange=exchange)
    shared, interval = recipe_of(trainer).shared_reads, interval_of(job)
    ways = ways_of(job, move, layout, step_time=step_time, interval=interval, shared_reads=shared)
    way = next(each for each in ways if each.key == ("failed" if wanted.lost else "planned"))
    rate = job.plan.workload.global_batch_size / job.step_time
    total = wanted.remaining * rate / (found.batch / step_time) + way.seconds
    return Candidate(
        layout=layout, gpus=found.gpus, batch=found.batch, step_time=step_time, move=move, ways=tuple(ways), total=total,
        nests=nesting(old, new),
    )  # fmt: skip


def pay_back_of(rates: tuple[float, float], step_time: float, way: Way, back: float | None, against: str) -> PayBack:
    """From when on the move is ahead of staying (more GPUs), t_move / (1 - r_old/r_new), or of waiting until the machines are back:
    two moves, there and back, against none. ``rates``: samples/s before and after; ``back``: seconds of the move back, None =
    staying is what it competes with."""
    old, new = rates
    if back is None and new <= old:
        return PayBack(against=against, seconds=None, steps=None)
    seconds = way.seconds / (1.0 - old / new) if back is None else way.seconds + back
    return PayBack(against=against, seconds=seconds, steps=int(seconds / step_time) + 1)


def _pay_back(job: ElasticJob, wanted: Wanted, best: Candidate, way: Way) -> PayBack:
    """Against staying, where no GPU is lost, or against waiting for those that are."""
    rates = job.plan.workload.global_batch_size / job.step_time, best.batch / best.step_time
    if wanted.gpus >= job.num_gpus and not wanted.lost:
        return pay_back_of(rates, best.step_time, way, None, f"staying on {job.num_gpus} GPUs")
    against = f"waiting until {job.num_gpus} GPUs are there again"
    return pay_back_of(rates, best.step_time, way, best.way("planned").seconds, against)


def drain_of(job: FailingJob, warning: float | None) -> tuple[float, bool] | None:
    """The running step ends, then all is saved while training stands: t_step + t_save against the warning."""
    if warning is None:
        return None
    whole = job.times.behind or job.times.stall
    needed = job.step_time + whole
    return needed, needed <= warning


def carried_over(workload: Workload, batch: int, step: int | None) -> tuple[str, ...]:
    """What a new run has to carry over so that the loss goes on as if nothing had happened. ``batch``: its own; ``step``: that the
    old one has reached."""
    old = workload.global_batch_size
    lines = [f"global batch: {batch} sequences as before" if batch == old else
             f"global batch: {batch} sequences instead of {old}, {100.0 * (batch / old - 1.0):+.1f} %: "
             "no layout shares out the old one over all GPUs; learning rate and schedule are the user's to look at"]  # fmt: skip
    if step is None:
        lines.append(f"data: go on at sample step x {old}, not at a step number of the loader (say --step for the number)")
    else:
        samples = step * old
        lines.append(f"data: go on at sample {samples:,}: step {samples // batch:,} of the new run"
                     + ("" if samples % batch == 0 else f", {samples % batch} samples into it"))  # fmt: skip
    lines.append("random numbers: of the checkpoint where ranks keep their data, else seeded by sample; dropout differs otherwise")
    if workload.precision == "fp16":
        lines.append("loss scale: from the checkpoint")
    return tuple(lines)


def _kept(job: ElasticJob, wanted: Wanted, best: Candidate) -> tuple[str, ...]:
    """What the new run has to carry over, and GPUs that have nothing to do."""
    lines = carried_over(job.plan.workload, best.batch, wanted.step)
    if best.gpus == wanted.gpus:
        return lines
    idle = f"{wanted.gpus - best.gpus} of {wanted.gpus} GPUs stay idle"
    return (*lines, f"{idle}: no layout that shares out the batch over all of them takes less time")


def _why(best: Candidate, way: Way, others: list[Candidate]) -> str:
    """Why this layout, the move counted."""
    text = f"after a move of {format_seconds(way.seconds)}"
    if best.nests:
        names = ", ".join(best.nests)
        read = f"stored shards are read {best.move.amplification:.2f} times"
        text += f"; {names} {'nests' if len(best.nests) == 1 else 'nest'} in the old degrees" if best.nested else f"; {read}"
    faster = [one for one in others if one.step_time < best.step_time]
    if faster:
        part = 100.0 * (best.step_time / faster[0].step_time - 1.0)
        text += f"; {layout_text(faster[0].layout)} is {part:.1f} % faster by the step, but not with its move"
    return text


def reshape(job: ElasticJob, wanted: Wanted, progress: Callable[[str], None] = lambda _: None) -> Reshape | None:
    """The best plan on ``wanted.gpus`` GPUs, counting the move; None where nothing fits. Raises PlannerError."""
    if wanted.gpus < 1:
        raise PlannerError(f"--gpus is {wanted.gpus}; it must be at least 1")
    if wanted.gpus == job.plan.num_gpus and not wanted.lost:
        raise PlannerError(f"the plan runs on {wanted.gpus} GPUs already; give another number to --gpus")
    progress(f"layouts of {wanted.gpus} GPUs")
    found = choices(resolved_plan(job.plan), wanted.gpus, job.plan.layout, CANDIDATES)
    if not found:
        return None
    progress("moves")
    places = [(each, number) for each in found for number in range(len(each.layouts))]
    priced = [_candidate(job, wanted, each, number, exchange=False) for each, number in places]
    every = sorted(priced, key=lambda one: one.total)
    chosen = _chosen(every, job.plan.workload.global_batch_size)
    source, number = next(place for place, one in zip(places, priced, strict=True) if one is chosen)
    best = _candidate(job, wanted, source, number, exchange=True)
    way = best.way("failed" if wanted.lost else "planned")
    others = [one for one in every if one is not chosen]
    estimate = source.estimates[number]
    [ratios] = source.resolved.unstated([best.layout]).ratios()
    plan = source.resolved.plan(best.layout, estimate, _why(best, way, others), ratios)
    return Reshape(
        job=job, wanted=wanted, plan=plan, best=best, others=tuple(others), way=way, pay_back=_pay_back(job, wanted, best, way),
        drain=drain_of(job, wanted.drain), recipe=recipe_of(job.plan.load_trainer()), kept=_kept(job, wanted, best),
        assumptions=said_of_move(job, wanted),
    )  # fmt: skip


def _chosen(every: list[Candidate], batch: int) -> Candidate:
    """The first by its total; one with the same batch where it is not OTHER_BATCH behind, and of equals one whose degrees nest."""
    first = next((one for one in every if one.batch == batch and one.total <= every[0].total * (1.0 + OTHER_BATCH)), every[0])
    equal = (one for one in every if one.batch == first.batch and one.total <= first.total * (1.0 + EQUAL))
    return next((one for one in equal if one.nested), first)


def said_of_move(job: FailingJob, wanted: Wanted) -> tuple[Assumption, ...]:
    """What was not said; failures matter only where the last checkpoint does."""
    found = [one for one in job.assumptions() if wanted.lost or not one.what.startswith(OF_FAILURES)]
    if wanted.remaining == REMAINING:
        found.append(Assumption("training left", "24 h", "assumed: what a move has to pay for itself in", "--remaining"))
    return tuple(found)
