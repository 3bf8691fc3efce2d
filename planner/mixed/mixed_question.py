"""The question ``plan --cluster``: the best mixed plans, beside them each kind alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from planner.assumption import Assumption
from planner.cluster_file import ClusterFile
from planner.defaults import TRAINER, TRAINER_WITHOUT_FLASH, Request, resolve
from planner.errors import PlannerError, listed, shown
from planner.keywords import flag_of
from planner.layout import NAMES
from planner.mixed.known_links import linked
from planner.mixed.local_search import search_local
from planner.mixed.mixed_axes import MixedPins
from planner.mixed.mixed_job import MixedJob
from planner.mixed.mixed_layout import Outer
from planner.mixed.mixed_plan import MixedPlan, job_of, priced_plan, trainer_for
from planner.mixed.mixed_search import MixedFinding, kinds_of, least_states, memory_of
from planner.mixed.one_kind import Alone, alone_of
from planner.mixed.run_limits import limited, run_as_well, search_within
from planner.record import record
from planner.rules import NO_FLASH_ATTENTION, check_workload
from planner.units import format_bytes
from planner.units import format_seconds as seconds_text

PINNED = ("tp", "micro_batch_size", "recompute", "zero", "schedule", "vpp", "cp", "ep", "offload_optimizer")
"""Fields of a layout that a mixed search can pin."""
SAID_BY_CLUSTER = ("hardware", "num_gpus", "nodes", "network_bandwidth", "intra_node")
LOCAL = "Local updates: each site steps alone. That is another algorithm than averaging gradients every step: compare losses."
LITTLE = 0.05
"""What a kind adds to the throughput below which leaving it out is advised: less than the next change of the job moves."""


@record
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
            "without": {kind: one.step_time for kind, (_, one) in finding.without.items()},
            "runs_on": [who_runs(one) for one in self.plans],
            "search": {"candidates": finding.candidates, "cut": finding.cut, "could_be_faster_by": finding.gap,
                       "cpu_seconds": finding.seconds},
        }  # fmt: skip


def _data(plan: MixedPlan) -> dict[str, Any]:
    """A plan as its file holds it, and what crosses between its sites."""
    crossing = plan.between_sites()
    return {**plan.to_dict(), **({} if crossing is None else {"between_sites": crossing.to_dict()})}


@record
class Wanted:
    """Which plans are asked for."""

    top: int = 3
    """How many."""
    outer: Outer | None = None
    """Local updates; the best plan with them then stands first, before those that average gradients every step."""
    runnable: bool = False
    """Only plans that an export of the trainer runs as they are."""


def ask_mixed(
    cluster: ClusterFile, said: Mapping[str, Any], layout: Mapping[str, int], wanted: Wanted,
    progress: Callable[[str], None] = lambda _: None,
) -> MixedAnswer:  # fmt: skip
    """The best plans of a job on a cluster; ``said``: fields of a request, ``layout``: fields that are fixed.

    Raises PlannerError where the flags say the cluster too, or fix what is not searched here.
    """
    job, trainer, assumptions = mixed_job(cluster, said)
    pins = limited(pins_of(layout), trainer) if wanted.runnable else pins_of(layout)
    finding = search_within(job, trainer, pins, wanted.top, progress)
    alone = list[Alone]()
    for kind in job.kinds:
        progress(f"{kind} alone")
        alone.append(alone_of(job, kind, layout))
    alone.sort(key=lambda one: one.step_time_s or float("inf"))
    verdict = _verdict(job, finding, alone)
    found = [one for one, _ in finding.best]
    if finding.mixed is not None and finding.mixed[0] not in found:
        found.append(finding.mixed[0])
    progress(f"what {trainer} runs")
    found += run_as_well(job, trainer, finding, found, pins)
    why = f"{verdict} {_certificate(finding)}"
    plans = tuple(priced_plan(job, trainer, one, assumptions, why, pins) for one in found)
    if wanted.outer is not None:
        local = search_local(job, wanted.outer, pins_of(layout), progress).layout
        plans = (priced_plan(job, trainer, local, assumptions, LOCAL, pins), *plans)
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


def _verdict(job: MixedJob, finding: MixedFinding, alone: Sequence[Alone]) -> str:
    """Whether mixing pays, against the fastest kind alone and without each kind, and what the others are good for instead."""
    best = next((one for one in alone if one.step_time_s), None)
    if finding.mixed is None:
        return _no_room(job) if best is None else f"No plan over several kinds fits; use {_by_itself(job, best)}."
    layout, mixed = finding.mixed
    used = [one for one in job.kinds if one in kinds_of(layout)]
    instead = {one.kind: _instead(one) for one in alone}
    little = _little(finding, alone, used, mixed.step_time)
    weak = f" {'; '.join(little.values())}. {_sentence(instead, little)}." if little else ""
    if best is None or best.step_time_s is None:
        return f"No kind has room for it alone: they are needed together.{weak}"
    gain, own = best.step_time_s / mixed.step_time - 1.0, _by_itself(job, best)
    others = [one for one in used if one != best.kind] or [best.kind]
    what, one = listed(others, "and"), len(others) == 1
    if gain <= 0.0:
        text = f"Mixing does not pay: with {what} the best plan takes {seconds_text(mixed.step_time)}, {best.kind} alone "
        return f"{text}{seconds_text(best.step_time_s)}: use {own}. {_sentence(instead, others)}."
    if gain < LITTLE:
        text = f"{what} {'adds' if one else 'add'} {100 * gain:.1f} % to {best.kind} alone: leave {'it' if one else 'them'} out"
        return f"{text} and use {own}. {_sentence(instead, others)}."
    left = [kind for kind in job.kinds if kind not in used]
    text = f"{listed(used, 'and')} together are {100 * gain:.1f} % faster than {best.kind} alone"
    text += f", with {listed(left, 'and')} left out" if left else ""
    spare = [kind for kind in (*left, *others) if kind not in little and kind != best.kind]
    return f"{text}.{weak}" + (f" {_sentence(instead, spare)}." if spare else "")


def _little(finding: MixedFinding, alone: Sequence[Alone], used: list[str], step: float) -> dict[str, str]:
    """Of three kinds or more those that add little, each in words: the best plan without it is nearly as fast."""
    found = dict[str, str]()
    for kind in used if len(used) > 2 else ():
        rest = [one.step_time_s for one in alone if one.kind != kind and one.step_time_s]
        rest += [finding.without[kind][1].step_time] if kind in finding.without else []
        if rest and min(rest) / step - 1.0 < LITTLE:
            found[kind] = (
                f"{kind} adds {100 * max(min(rest) / step - 1.0, 0.0):.1f} %: without it a step takes {seconds_text(min(rest))}, "
                "so leave it out (plan what-if --without)"
            )
    return found


def _by_itself(job: MixedJob, one: Alone) -> str:
    """A kind, and how it is planned alone."""
    node = job.cluster.node_kind(one.kind)
    return f"{one.kind} alone (plan --hardware {node.hardware} --gpus {one.gpus})"


def _instead(one: Alone) -> str:
    """What a kind is good for by itself."""
    if one.tokens_per_second is None:
        return one.instead
    return f"alone would train it at {one.tokens_per_second:,.0f} tokens/s, as a job of its own"


def _sentence(instead: Mapping[str, str], kinds: Iterable[str]) -> str:
    """That of some kinds."""
    return "; ".join(f"{kind} {instead[kind]}" for kind in kinds)


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
