"""From a search to its plans: each with the reason for its place, advice where none fits, an error where none is legal."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from planner.api.results import Plan, Plans
from planner.assumption import Assumption
from planner.cost.estimate import Estimate
from planner.defaults import Request, ResolvedJob, resolve
from planner.errors import PlannerError, listed
from planner.explain import differences, misses_by, why_first
from planner.explicit import complete
from planner.keywords import command_line, layout_values, request_fields
from planner.layout import divisors
from planner.rules import Job, allowed, check
from planner.search import Finding, Pins, search
from planner.space import base_layouts
from planner.trainer_options import read_options, spelled

ASKED_FOR_GAINS = 5
"""Layouts that are asked what would make them faster, also where fewer plans are shown: the answer does not hang on how many."""


def plans_of(
    resolved: ResolvedJob, pins: Pins, top: int, keywords: Mapping[str, Any], progress: Callable[[str], None]
) -> Plans:
    """The ``top`` best plans of a job; ``keywords`` are what its user said, for the command lines of the advice."""
    most = max(top, ASKED_FOR_GAINS)
    finding = search(resolved.job, pins, most)
    _require_legal(resolved, finding, pins)
    resolved, finding = _with_loss_in_pieces(resolved, finding, pins, keywords, most)
    from planner.advice import advise, fewer_gpus, off_the_host
    from planner.gains import gains, held_back

    def ask(changes: Mapping[str, Any]) -> tuple[Job, Pins]:
        said = changed_keywords(keywords, changes)
        return resolve(Request(**request_fields(said))).job, Pins(values=layout_values(said))

    def command(**changes: Any) -> str:
        return command_line(changed_keywords(keywords, changes))

    advice, faster, unstated = [], [], resolved.unstated(finding.layouts)
    if not finding.fit:
        needed = float(finding.estimates[0].memory_needed[0])
        advice = advise(
            resolved.job, needed, ask, command,
            lambda tried: progress(f"nothing fits; looking for the cheapest changes: {tried}"),
        )  # fmt: skip
    else:
        faster = held_back(finding) + gains(unstated)
        first = finding.layouts[0]
        rate = resolved.job.workload.tokens / float(finding.estimates[0].step_time[0])
        faster = fewer_gpus(resolved.job, rate, ask) + faster
        if int(first.offloads) or (resolved.job.fine_tunes and int(first.recompute)):
            leaner = off_the_host(resolved.job, rate, ask)
            faster = [one for one in faster if one.flag not in {other.flag for other in leaner}] + leaner
    attempts = [
        Plan(resolved.plan(layout, found, _why(finding, found), ratios))
        for layout, found, ratios in zip(finding.layouts[:top], finding.estimates, unstated.ratios(), strict=False)
    ]
    return Plans(
        resolved=resolved, finding=finding, attempts=tuple(attempts), advice=tuple(advice), faster=tuple(faster)
    )


def changed_keywords(keywords: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """What a user said with something changed; options are added to those that are there."""
    options = {**read_options(keywords.get("options") or {}), **changes.get("options", {})}
    return {**keywords, **changes, **({"options": options} if options else {})}


def _with_loss_in_pieces(
    resolved: ResolvedJob, finding: Finding, pins: Pins, keywords: Mapping[str, Any], top: int
) -> tuple[ResolvedJob, Finding]:  # fmt: skip
    """A fine-tuning job whose loss the user left open: piece by piece where all logits at once do not fit, or only with something
    on the host and slower. Then that is assumed; else the job and its finding as they are."""
    from planner.advice import loss_in_pieces

    value, stated = loss_in_pieces(resolved.job), "loss" in spelled(resolved.trainer)[2]
    if stated or not value or not resolved.job.fine_tunes or (finding.fit and not int(finding.layouts[0].offloads)):
        return resolved, finding
    leaner = resolve(Request(**request_fields(changed_keywords(keywords, {"options": {"loss": value}}))))
    found = search(leaner.job, pins, top)
    if not found.fit or (finding.fit and found.estimates[0].step_time[0] >= finding.estimates[0].step_time[0]):
        return resolved, finding
    why = "head and loss piece by piece, as Liger and TRL do; all logits at once do not fit"
    why += ", or slower with other things on the host" if finding.fit else ""
    assumed = Assumption("loss", value, why, f"--option loss={resolved.job.trainer.stored.loss}")
    return dataclasses.replace(leaner, assumptions=(*leaner.assumptions, assumed)), found


def _why(finding: Finding, found: Estimate) -> str:
    """Why a layout of a finding has its place."""
    first = finding.estimates[0]
    if not finding.fit:
        return misses_by(found)
    if found is first:
        return why_first(finding)
    pays, saves = differences(found, first)
    behind = 100 * (float(found.step_time[0] / first.step_time[0]) - 1)
    parts = [*pays[:2], *(f"saves {one}" for one in saves[:1])]
    return f"{behind:.1f} % slower than the first: {'; '.join(parts) or 'no part differs much'}"


def _require_legal(resolved: ResolvedJob, finding: Finding, pins: Pins) -> None:
    """Raise PlannerError when no layout meets the rules, with the rules that refuse most and what is nearest and legal."""
    if finding.layouts:
        return
    job, values = resolved.job, pins.values
    if odd := pins.indivisible(job.cluster.num_gpus):
        raise PlannerError(f"{odd}; choose degrees whose product does")
    if values:  # the rule that the pinned values break on the one layout that they and the defaults make
        check(job, complete(job, values)[0])
    if not finding.searched:
        raise PlannerError(
            f"no layout of {job.cluster.num_gpus} GPUs shares out a global batch of {job.workload.global_batch_size} sequences "
            f"with the pinned degrees; {_nearest(job, pins)}choose a --global-batch-size that divides by a data parallel degree, "
            "or unpin a degree"
        )
    refused = ", ".join(f"{name} ({count})" for name, count in list(finding.refused.items())[:4])
    raise PlannerError(
        f"none of the {finding.searched} layouts is legal for {job.model.name} on {job.cluster.num_gpus} GPUs with trainer "
        f"{job.trainer.name}; rules that refuse most: {refused or 'the pinned degrees leave no layout'}; {_nearest(job, pins)}"
        "unpin a degree, or change the number of GPUs or the batch"
    )


TRIED = 24
"""Numbers of GPUs, and of sequences, that are tried from the nearest on when none of a job's layouts is legal."""


def _nearest(job: Job, pins: Pins) -> str:
    """The nearest numbers of GPUs with a legal layout, and the nearest batch, as a part of a remedy; '' where none is near."""

    def legal(gpus: int, batch: int) -> bool:
        workload = job.workload.replace(global_batch_size=batch)
        one = dataclasses.replace(job, workload=workload, cluster=dataclasses.replace(job.cluster, num_gpus=gpus))
        layouts = base_layouts(one, pins)
        return bool(np.size(layouts.tp)) and bool(np.any(allowed(one, layouts)))

    gpus, batch, node = job.cluster.num_gpus, job.workload.global_batch_size, int(job.cluster.hardware.gpus_per_node)
    piece = node if gpus > node else 1
    below = [gpus // piece * piece - n * piece for n in range(TRIED) if gpus // piece - n > 0]
    above = [gpus // piece * piece + n * piece for n in range(1, TRIED)]
    counts = [next((n for n in side if n != gpus and legal(n, batch)), None) for side in (below, above)]
    batches = sorted({max(round(batch / n), 1) * n for n in divisors(gpus)} - {batch}, key=lambda n: (abs(n - batch), n))
    size = next((n for n in batches[:TRIED] if legal(gpus, n)), None)
    found = [f"{listed([str(n) for n in counts if n is not None])} GPUs"] if any(counts) else []
    found += [f"a --global-batch-size of {size}"] if size is not None else []
    return f"{', or '.join(found)} would do; " if found else ""
