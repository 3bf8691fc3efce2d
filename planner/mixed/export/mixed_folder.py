"""A mixed plan as a folder that runs: the trainer's files, a launch script per node count, the plan itself and a README."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.mixed.export.export_job import MixedExport
from planner.mixed.export.mixed_targets import MixedRendered, MixedTarget, mixed_target, nearest_run, refused
from planner.mixed.export.placement import Placement, UsedNode
from planner.mixed.export.runnable import refusal
from planner.mixed.export.torchft_sites import site_folder
from planner.mixed.mixed_estimate import check_mixed, estimate_mixed
from planner.mixed.mixed_layout import MixedLayout
from planner.trainers.bundle.folder import Bundle
from planner.trainers.bundle.launchers import RUNS
from planner.trainers.bundle.quoting import shell_command, text_from
from planner.trainers.bundle.target import Rendered
from planner.units import GIB

_HERE = "planner.mixed.export"
MOST_RANKS = 4
"""Groups of ranks that a cell lists."""


def mixed_bundle(mixed: MixedExport, to: str, plan: Mapping[str, Any]) -> Bundle:
    """All files of a mixed plan for one trainer; ``plan``: its file, as plain data.

    Raises PlannerError that says why the trainer cannot run it and names the nearest plan that it can.
    """
    target = mixed_target(to, mixed)
    check_mixed(mixed.job, mixed.layout)
    if found := refused(target, mixed):
        near, more = nearest_run(target, mixed)
        raise PlannerError(refusal(target.title.split(" (")[0], mixed.layout, list(dict.fromkeys([*found, *more])), near))
    made = target.render(mixed)
    warnings = _warnings(target, mixed)
    rendered = made.rendered
    files = dict(rendered.files)
    files["environment.sh"] = text_from(
        "bundle/environment.sh.j2", rendered=rendered, environment=dict(rendered.environment)
    )  # fmt: skip
    for number, (name, (_, placement)) in enumerate(made.jobs.items()):
        folder, up = (f"{site_folder(number)}/", "..") if name else ("", ".")
        files |= {f"{folder}{run}.sh": _script(rendered, run, placement.nodes, up) for run in RUNS}
    files["plan.yaml"] = library.dump_yaml(dict(plan))
    files["README.md"] = _readme(target, mixed, made, warnings, files)
    return Bundle(files=files, rendered=rendered, notes=tuple(rendered.notes), warnings=tuple(warnings))


def _warnings(target: MixedTarget, mixed: MixedExport) -> list[str]:
    name = mixed.job.trainer.name
    if name in target.trainers:
        return []
    return [
        f"the plan was priced for trainer {name}, and {target.name} runs plans of {' or '.join(target.trainers)} as priced: "
        "the cut and the shares hold, times and memory are those of the other trainer"
    ]


def _script(rendered: Rendered, run: str, nodes: tuple[UsedNode, ...], up: str) -> str:
    entry = rendered.entry if run == "run" else rendered.smoke
    own = None if rendered.start == "torchrun" else rendered.start
    words = (
        entry if own else (*_torchrun(len(nodes)), *(("-m", "--", *entry[1:]) if entry[0] == "-m" else ("--", *entry)))
    )
    return text_from(
        f"{_HERE}/run.sh.j2", what=RUNS[run], run=run, nodes=nodes, rendered=rendered, command=shell_command(words),
        own_launcher=own,
        up=up,
    )  # fmt: skip


def _torchrun(nodes: int) -> tuple[str, ...]:
    """One process per GPU in use; nodes may start unequal numbers of them, with fixed ranks."""
    if nodes == 1:
        return (
            "torchrun",
            "--standalone",
            "--nnodes",
            "1",
            "--nproc-per-node",
            "$GPUS_PER_NODE",
            "--max-restarts",
            "0",
        )
    return (
        "torchrun", "--nnodes", str(nodes), "--node-rank", "$NODE_RANK", "--nproc-per-node", "$GPUS_PER_NODE", "--rdzv-backend",
        "static", "--rdzv-endpoint", "$MASTER_ADDR:$MASTER_PORT", "--max-restarts", "0",
    )  # fmt: skip


def _readme(
    target: MixedTarget, mixed: MixedExport, made: MixedRendered, warnings: list[str], files: Mapping[str, str]
) -> str:  # fmt: skip
    layout, stages, shares = mixed.layout, list[tuple[str, ...]](), list[tuple[str, ...]]()
    for site, (own, placement) in made.jobs.items():
        stages += [(site, *row) for row in _stages(own, placement)] if site else _stages(own, placement)
        shares += [(site, *row) for row in _shares(own)] if site else _shares(own)
    return text_from(
        f"{_HERE}/README.mixed.md.j2", model=mixed.workload.model, title=target.title, target=target.name, source=target.source,
        kinds=" and ".join(f"{layout.gpus_of(kind)} x {kind}" for kind in mixed.job.kinds if layout.gpus_of(kind)),
        rendered=made.rendered, scripts=[name for name in files if name.endswith(("run.sh", "smoke.sh"))], stages=stages,
        shares=shares, jobs=made.jobs, sites="" not in made.jobs, warnings=warnings, expected=_expected(mixed),
    )  # fmt: skip


def _stages(layout: MixedLayout, placement: Placement) -> list[tuple[str, ...]]:
    """Cells of the table of stages."""
    rows = list[tuple[str, ...]]()
    for number, one in enumerate(layout.pipelines):
        for position, stage in enumerate(one.stages):
            ranks = [place.ranks for place in placement.stages if (place.pipeline, place.stage) == (number, position)]
            text = ", ".join(f"{some[0]}-{some[-1]}" if len(some) > 1 else str(some[0]) for some in ranks[:MOST_RANKS])
            again = f"{stage.recompute} of {stage.recompute_layers}" if stage.recompute_layers else stage.recompute
            rows.append((
                str(number), str(one.count), str(position), stage.kind, str(stage.layers), str(stage.tp), again,
                text + (", ..." if len(ranks) > MOST_RANKS else ""),
            ))  # fmt: skip
    return rows


def _shares(layout: MixedLayout) -> list[tuple[str, ...]]:
    """Cells of the table of shares."""
    return [
        (str(number), str(one.num_microbatches), str(one.micro_batch_size),
         f"{100 * one.count * one.sequences / layout.global_batch_size:.1f} %", f"{scale:.6g}")
        for number, (one, scale) in enumerate(zip(layout.pipelines, layout.loss_scales(), strict=True))
    ]  # fmt: skip


def _expected(mixed: MixedExport) -> dict[str, str]:
    """Time and memory as priced; what sites lose to averages is not in a step."""
    found = estimate_mixed(mixed.job, mixed.layout)
    rows = {
        "step": f"{found.step_time:.3f} s", "model FLOP utilisation": f"{100 * found.mfu:.1f} %",
        "GPU time lost between stages": f"{100 * found.between_stages:.1f} %",
        "GPU time lost between replicas": f"{100 * found.between_replicas:.1f} %",
    }  # fmt: skip
    for kind in dict.fromkeys(stage.kind for stage in found.stages):
        fullest = max((one for one in found.stages if one.kind == kind), key=lambda one: one.memory_peak)
        rows[f"memory of the fullest {kind}"] = (
            f"{fullest.memory_peak / GIB:.1f} of {fullest.usable_memory / GIB:.1f} GiB"
        )
    return rows
