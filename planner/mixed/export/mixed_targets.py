"""The trainers that run mixed plans: what each asks of a layout, and its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from planner.errors import PlannerError, UnknownNameError
from planner.layout import Order
from planner.mixed.export import flagscale, hexiscale, torch_bundle, torchft_sites
from planner.mixed.export.cut_job import cut_job, in_order
from planner.mixed.export.export_job import MixedExport
from planner.mixed.export.placement import Placement
from planner.mixed.export.runnable import Limits, nearest, reasons
from planner.mixed.mixed_estimate import check_mixed
from planner.mixed.mixed_layout import INTERLEAVED, MixedLayout
from planner.record import record
from planner.trainers.bundle.target import Rendered
from planner.trainers.targets import load_target

REPLICAS_ALIKE = Limits(
    equal_tp=True, equal_cuts=True, equal_shares=True, equal_recompute=True, cp=True, ep=True, offload=True, hsdp=True,
    schedules=("gpipe", "1f1b", INTERLEAVED),
)  # fmt: skip
"""Trainers of one kind of GPU, which know uneven stages; what else each cannot do its own exporter says."""
ONE_KIND = {"megatron": (0, 1), "megatron-bridge": (0, 1), "torchtitan": (2, 3)}
"""With the state sharding that each has."""
ORDERS = {"tp-cp-dp-pp": Order.TP_CP_EP_DP_PP, "tp-cp-pp-dp": Order.TP_CP_EP_PP_DP}


@record
class MixedRendered:
    """The files of one trainer, how they are started, and on which nodes."""

    rendered: Rendered
    jobs: Mapping[str, tuple[MixedLayout, Placement]]
    """What runs where: one job without a name, or one for every site that steps alone."""


@record
class MixedTarget:
    """One trainer that mixed plans are exported to."""

    name: str
    """Name after --to."""
    title: str
    trainers: tuple[str, ...]
    """Trainers of profiles/trainers whose plans it runs as they were priced."""
    limits: Limits
    source: str
    """Version or commit in which its options were read."""
    reasons: Callable[[MixedExport], list[str]]
    """What of the workload it cannot run."""
    render: Callable[[MixedExport], MixedRendered]
    """Raises PlannerError where no order of nodes gives every rank its GPU."""


def mixed_target(name: str, mixed: MixedExport) -> MixedTarget:
    """The target of a name; torchtitan's depends on whether sites step alone. Raises UnknownNameError."""
    found = TARGETS.get(name)
    if found is None:
        raise UnknownNameError("target of a mixed plan", name, TARGETS)
    return TORCHFT if name == "torchtitan" and mixed.layout.outer else found


def refused(target: MixedTarget, mixed: MixedExport) -> list[str]:
    """Why a target does not run a layout: what it has not, else what of the workload, else where the ranks would lie; none = it
    runs."""
    try:
        check_mixed(mixed.job, mixed.layout)
        found = reasons(mixed.layout, target.limits) or target.reasons(mixed)
        if not found:
            target.render(mixed)
    except PlannerError as error:
        return [str(error)]
    return found


def nearest_run(target: MixedTarget, mixed: MixedExport) -> tuple[MixedLayout | None, list[str]]:
    """The nearest layout that a target runs, workload and nodes included; None, and why, where the nearest is refused as well."""
    near = nearest(mixed.layout, target.limits)
    why = [] if near is None else refused(target, replace(mixed, layout=near))
    return (None if why else near), why


def _one_kind(name: str, limits: Limits) -> MixedTarget:
    """A trainer of one kind with uneven stages."""
    target = load_target(name)

    def reasons(mixed: MixedExport) -> list[str]:
        return list(target.refusals(cut_job(mixed)))

    return MixedTarget(
        name=name, title=target.title, trainers=target.trainers, limits=limits, source=f"{target.package} {target.versions}",
        reasons=reasons, render=partial(_render_one_kind, name),
    )  # fmt: skip


def _render_one_kind(name: str, mixed: MixedExport) -> MixedRendered:
    """Its own exporter's files, with the cut of the mixed plan; the order of ranks that the nodes allow."""
    target, wrong = load_target(name), PlannerError("")
    for order in ORDERS.values():
        job = cut_job(mixed, order)
        if target.refusals(job):
            continue
        try:
            return MixedRendered(rendered=target.render(job), jobs={"": (mixed.layout, in_order(mixed, order))})
        except PlannerError as error:
            wrong = error
    raise PlannerError(f"{name}: {wrong}")


def _whole(files: Callable[[MixedExport], Rendered], mixed: MixedExport) -> MixedRendered:
    return MixedRendered(rendered=files(mixed), jobs={"": (mixed.layout, mixed.placement)})


TARGETS = {
    "pytorch": MixedTarget(
        name="pytorch", title="PyTorch alone (fully_shard over the copies of every layer, pipelining)",
        trainers=("torchtitan", "fsdp"), source="torch 2.13.0",
        limits=Limits(equal_tp=True, zero=(0, 1, 2)), reasons=torch_bundle.refusals, render=partial(_whole, torch_bundle.render),
    ),
    **{name: _one_kind(name, replace(REPLICAS_ALIKE, zero=zero)) for name, zero in ONE_KIND.items()},
    "flagscale": MixedTarget(
        name="flagscale", title="FlagScale (YAML of its runner)", trainers=("megatron",), source=flagscale.SOURCE,
        limits=Limits(equal_cuts=True, equal_kinds=True, equal_shares=True, no_selective=True, cp=True, ep=True, zero=(0, 1),
                      schedules=("1f1b",)),
        reasons=flagscale.refusals,
        render=lambda mixed: MixedRendered(rendered=flagscale.render(mixed), jobs={"": (mixed.layout, in_order(mixed))}),
    ),
    "hexiscale": MixedTarget(
        name="hexiscale", title="HexiScale (FlashFlex; flags of llama_train.py)", trainers=("fsdp",), source=hexiscale.SOURCE,
        limits=Limits(equal_recompute=True, no_selective=True, equal_shares=True, zero=(0, 2, 3)),
        reasons=hexiscale.refusals, render=partial(_whole, hexiscale.render),
    ),
}  # fmt: skip
"""By the name after --to."""
TORCHFT = MixedTarget(
    name="torchtitan", title="torchtitan with torchft (local updates of sites)", trainers=("torchtitan",),
    source=torchft_sites.SOURCE,
    limits=Limits(outer=True, cp=True, ep=True), reasons=torchft_sites.refusals,
    render=lambda mixed: MixedRendered(
        rendered=torchft_sites.render(mixed),
        jobs={one.site: (one.mixed.layout, in_order(one.mixed)) for one in torchft_sites.sites(mixed)},
    ),
)  # fmt: skip
