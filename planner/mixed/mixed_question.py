"""The question ``plan --cluster``: the best mixed plans, beside them each kind alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.cluster_file import ClusterFile
from planner.defaults import NO_FLASH_ATTENTION, TRAINER, TRAINER_WITHOUT_FLASH, Request, resolve
from planner.errors import PlannerError, listed, shown
from planner.keywords import flag_of
from planner.layout import NAMES
from planner.mixed.known_links import linked
from planner.mixed.local_search import search_local
from planner.mixed.mixed_axes import MixedPins
from planner.mixed.mixed_job import MixedJob
from planner.mixed.mixed_layout import Outer
from planner.mixed.mixed_plan import MixedPlan, job_of, priced_plan, trainer_for
from planner.mixed.mixed_search import MixedFinding, kinds_of, least_states, memory_of, search_mixed
from planner.plan_file import Assumption
from planner.rules import check_workload
from planner.search import search
from planner.units import format_bytes
from planner.units import format_seconds as seconds_text

PINNED = ("tp", "micro_batch_size", "recompute", "zero", "schedule", "cp", "ep")
"""Fields of a layout that a mixed search can pin."""
SAID_BY_CLUSTER = ("hardware", "num_gpus", "nodes", "network_bandwidth", "intra_node")
LOCAL = "Local updates: each site steps alone. That is another algorithm than averaging gradients every step: compare losses."
LITTLE = 0.05
"""What a kind adds to the throughput below which leaving it out is advised: less than the next change of the job moves."""


@dataclass(frozen=True, kw_only=True)
class Alone:
    """One kind, training the same job by itself."""

    kind: str
    gpus: int
    step_time_s: float | None
    """None where nothing fits."""
    tokens_per_second: float | None
    layout: str
    """In words; '' where nothing fits."""


@dataclass(frozen=True, kw_only=True)
class MixedAnswer:
    """The best mixed plans of a job."""

    job: MixedJob
    plans: tuple[MixedPlan, ...]
    """Best first; empty where nothing fits."""
    alone: tuple[Alone, ...]
    """Each kind by itself, fastest first."""
    finding: MixedFinding
    verdict: str
    """Whether mixing pays."""
    assumptions: tuple[Assumption, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``--json`` prints."""
        from planner.mixed.export.who_runs import who_runs

        finding = self.finding
        return {
            "fits": bool(self.plans), "verdict": self.verdict, "plans": [_data(one) for one in self.plans],
            "alone": [vars(one) for one in self.alone],
            "runs_on": [who_runs(one) for one in self.plans],
            "search": {"candidates": finding.candidates, "cut": finding.cut, "could_be_faster_by": finding.gap,
                       "cpu_seconds": finding.seconds},
        }  # fmt: skip


def _data(plan: MixedPlan) -> dict[str, Any]:
    """A plan as its file holds it, and what crosses between its sites."""
    crossing = plan.between_sites()
    return {**plan.to_dict(), **({} if crossing is None else {"between_sites": crossing.to_dict()})}


def ask_mixed(
    cluster: ClusterFile, said: Mapping[str, Any], layout: Mapping[str, int], top: int = 3,
    progress: Callable[[str], None] = lambda _: None, outer: Outer | None = None,
) -> MixedAnswer:  # fmt: skip
    """The best plans of a job on a cluster; ``said``: fields of a request, ``layout``: fields that are fixed.

    ``outer``: local updates; the best plan with them then stands first, before those that average gradients every step.

    Raises PlannerError where the flags say the cluster too, or fix what is not searched here.
    """
    job, trainer, assumptions = mixed_job(cluster, said)
    finding = search_mixed(job, pins_of(layout), top, progress=progress)
    alone = [_alone(job, kind, progress) for kind in job.kinds]
    alone.sort(key=lambda one: one.step_time_s or float("inf"))
    verdict = _verdict(job, finding, alone)
    found = [one for one, _ in finding.best]
    if finding.mixed is not None and finding.mixed[0] not in found:
        found.append(finding.mixed[0])
    plans = tuple(priced_plan(job, trainer, one, assumptions, f"{verdict} {_certificate(finding)}") for one in found)
    if outer is not None:
        local = search_local(job, outer, pins_of(layout), progress).layout
        plans = (priced_plan(job, trainer, local, assumptions, LOCAL), *plans)
    return MixedAnswer(
        job=job, plans=plans, alone=tuple(alone), finding=finding, verdict=verdict, assumptions=assumptions
    )


def mixed_job(cluster: ClusterFile, said: Mapping[str, Any]) -> tuple[MixedJob, str, tuple[Assumption, ...]]:
    """The job of a request on a cluster, the name of its trainer, what was assumed. Raises PlannerError."""
    if twice := [name for name in SAID_BY_CLUSTER if said.get(name)]:
        raise PlannerError(f"--cluster says the nodes, and so does {flag_of(twice[0])}; leave one of them out")
    if "model" not in said:
        raise PlannerError("which job? --model is missing")
    cluster, notes = linked(cluster)
    profiles = [one.profile for one in cluster.nodes]
    old = [one for one in profiles if one.arch in NO_FLASH_ATTENTION]
    chosen = said.get("trainer") or (TRAINER_WITHOUT_FLASH if len(old) == len(profiles) else TRAINER)
    precision = said.get("precision") or ("fp16" if any("bf16" not in one.peak_flops for one in profiles) else None)
    first = cluster.nodes[0]
    request = Request(**{
        **said, "hardware": first.hardware, "num_gpus": cluster.num_gpus, "trainer": trainer_for(chosen, first.profile.arch),
        "precision": precision,
    })  # fmt: skip
    resolved = resolve(request)
    kept = tuple(one for one in resolved.assumptions if one.flag not in ("--hardware", "--network-bandwidth", "--hardware FILE"))
    if not said.get("trainer"):
        why = "the default" if len(old) < len(profiles) else f"{old[0].name} has no flash attention"
        kept = (Assumption("trainer", chosen, why, "--trainer"), *kept)
    for note in notes:
        ends, _, why = note.partition(": ")
        kept = (*kept, Assumption("link", ends, why, "links in the cluster file"))
    job = job_of(resolved.job.workload, cluster, chosen)
    for kind in job.kinds:
        check_workload(job.workload, job.clusters[kind], job.trainers[kind])
    return job, chosen, kept


def pins_of(layout: Mapping[str, int]) -> MixedPins:
    """What the user fixed. Raises PlannerError for what is not searched on mixed clusters."""
    if other := [name for name in layout if name not in PINNED]:
        raise PlannerError(
            f"{flag_of(other[0])} is not fixed on mixed clusters, where every kind has its own stages and shares; "
            f"{listed([flag_of(name) for name in PINNED])} can be"
        )
    named: dict[str, Any] = {name: NAMES[name][value] if name in NAMES else value for name, value in layout.items()}
    return MixedPins(**named)


def _alone(job: MixedJob, kind: str, progress: Callable[[str], None]) -> Alone:
    """One kind by itself: the ordinary search, with the schedules that it has, and equal pipelines where no degrees divide."""
    from planner.explain import layout_text

    progress(f"{kind} alone")
    tokens, gpus = float(job.workload.tokens), job.clusters[kind].num_gpus
    uniform = job.uniform(kind)
    found = search(uniform, top=1, only_fitting=True)
    if found.fit:
        step = float(found.estimates[0].step_time[0]) * job.slowdown[kind]
        return Alone(
            kind=kind, gpus=gpus, step_time_s=step, tokens_per_second=tokens / step, layout=layout_text(found.layouts[0])
        )
    own = search_mixed(job.only(kind), top=1)
    if own.best:
        layout, estimate = own.best[0]
        return Alone(
            kind=kind, gpus=gpus, step_time_s=estimate.step_time, tokens_per_second=tokens / estimate.step_time,
            layout=shape_text(layout),
        )  # fmt: skip
    return Alone(kind=kind, gpus=gpus, step_time_s=None, tokens_per_second=None, layout="")


def shape_text(layout: Any) -> str:
    """A mixed layout in words: pipelines with their stages by kind."""
    said = []
    for one in layout.pipelines:
        runs: list[list[Any]] = []
        for stage in one.stages:
            if runs and (runs[-1][0].kind, runs[-1][0].tp) == (stage.kind, stage.tp):
                runs[-1].append(stage)
            else:
                runs.append([stage])
        stages = " > ".join(f"{len(run)} x {run[0].kind} tp {run[0].tp} ({sum(s.layers for s in run)} layers)" for run in runs)
        said.append(f"{one.count} x [{stages}], {one.num_microbatches} x {one.micro_batch_size}")
    return "; ".join(said)


def _verdict(job: MixedJob, finding: MixedFinding, alone: Sequence[Alone]) -> str:
    """Whether mixing pays, against the fastest kind alone, and what the others are good for instead."""
    best = next((one for one in alone if one.step_time_s), None)
    if finding.mixed is None:
        return _no_room(job) if best is None else f"No plan over several kinds fits; use {best.kind} alone."
    if best is None or best.step_time_s is None:
        return "No kind has room for it alone: they are needed together."
    others = [one for one in alone if one.kind != best.kind]
    spare = "; ".join(
        f"{one.kind} alone would train it at {one.tokens_per_second:,.0f} tokens/s, as a job of its own"
        if one.tokens_per_second else f"{one.kind} alone has no room for it" for one in others
    )  # fmt: skip
    layout, mixed = finding.mixed
    used = kinds_of(layout)
    gain, more = best.step_time_s / mixed.step_time - 1.0, listed([one.kind for one in others if one.kind in used] or [best.kind])
    if gain <= 0.0:
        text = f"Mixing does not pay: with {more} the best plan takes {seconds_text(mixed.step_time)}, {best.kind} alone "
        return f"{text}{seconds_text(best.step_time_s)}: leave {more} out. {spare}."
    if gain < LITTLE:
        return f"{more} add {100 * gain:.1f} % to {best.kind} alone: leave them out. {spare}."
    left = [one.kind for one in alone if one.kind not in used]
    text = f"{', '.join(one for one in job.kinds if one in used)} together are {100 * gain:.1f} % faster than {best.kind} alone"
    return f"{text}{f', with {listed(left)} left out' if left else ''}. {spare}."


def _no_room(job: MixedJob) -> str:
    """Nothing fits, by how much where one copy of the states is already too large, and what would help."""
    least, memory = least_states(job), memory_of(job)
    why = (
        f": weights and optimizer states take {format_bytes(least)}, all cards together have {format_bytes(memory)}"
        if least > memory else ", with no cut, degree or recompute that was tried"
    )  # fmt: skip
    ways = "" if job.workload.lora_rank else " train adapters (--lora-rank 16),"
    return (
        f"Nothing fits on these nodes{why}. Add nodes,{ways} shorten the sequences, or keep states on the host on one kind alone "
        "(--hardware KIND --gpus N --offload-optimizer 100)."
    )


def _certificate(finding: MixedFinding) -> str:
    """What the search proves."""
    if finding.gap <= 0.0:
        return f"Of {finding.candidates:,} combinations of degrees none is faster."
    return f"Of {finding.candidates:,} combinations of degrees none is faster by more than {100 * finding.gap:.1f} %."


def kind_of_node(cluster: ClusterFile, node: str) -> str:
    """The kind of a node; a kind is its own."""
    return next((one.kind for one in cluster.nodes if node in cluster.names_of(one.kind)), node)


def slowed(cluster: ClusterFile, node: str, factor: float) -> ClusterFile:
    """The cluster with one node, or all of a kind, slower by a factor. Raises PlannerError for a node that it does not have."""
    changed = []
    for one in cluster.nodes:
        if one.kind == node:
            changed.append(replace(one, slowdown={"": factor * one.slowdown.get("", 1.0)}))
            continue
        names = cluster.names_of(one.kind)
        if node in names:
            usual = one.slowdown.get("", 1.0)
            changed.append(replace(one, slowdown={**one.slowdown, node: factor * usual}))
        else:
            changed.append(one)
    if all(one is other for one, other in zip(changed, cluster.nodes, strict=True)):
        every = [name for one in cluster.nodes for name in (one.kind, *cluster.names_of(one.kind))]
        more = ", ..." if len(every) > 6 else ""
        raise PlannerError(f"--slowdown names {shown(node)}; the cluster has {listed(every[:6])}{more}")
    return replace(cluster, nodes=tuple(changed))
