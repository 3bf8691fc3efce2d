"""torchtitan with torchft: every site is a job of its own, and the sites average their weights every so many steps.

Read in torchtitan 0.3.0, experiments/torchft: manager.py (TorchFTManager.Config, maybe_semi_sync_training), config/job_config.py
(FaultTolerance), llama3/config_registry.py, README.md.
"""

from __future__ import annotations

import math
from dataclasses import replace

from planner.cluster_file import ClusterFile
from planner.errors import PlannerError, listed
from planner.mixed.export.cut_job import cut_job
from planner.mixed.export.export_job import MixedExport
from planner.mixed.export.runnable import Limits, reasons
from planner.mixed.local_updates import alone, inner_step, local_update, nodes_between, overlapped_steps
from planner.mixed.mixed_layout import Pipeline
from planner.mixed.wide_links import best_ring
from planner.record import record
from planner.trainers.bundle.quoting import text_from
from planner.trainers.bundle.target import Rendered, Setting
from planner.trainers.targets import load_target

SOURCE = "torchtitan 0.3.0, experiments/torchft"
METHODS = {"diloco": "diloco", "streaming_diloco": "diloco", "local_sgd": "local_sgd"}
"""semi_sync_method; DiLoCo in several fragments is streaming DiLoCo."""
BITS = {32: False, 8: True}
"""should_quantize: pseudo-gradients are sent in 8 bits."""
LEAST, START, SLACK = 60.0, 600.0, 2.0
"""Seconds that torchft waits by itself [torchft.Manager], that the first step may take longer than others (assumed), and how much
longer than priced anything may take before a site is given up (assumed)."""
SITE = Limits(equal_tp=True, equal_cuts=True, equal_shares=True, equal_recompute=True, cp=True, ep=True, outer=True)
"""Of the pipelines of one site."""


@record
class SiteJob:
    """What one site runs alone between two averages."""

    site: str
    mixed: MixedExport
    """Its pipelines, and the batch that they take."""


def sites(mixed: MixedExport) -> list[SiteJob]:
    """The pipelines by site. Raises PlannerError where a pipeline lies on two sites."""
    found: dict[str, list[Pipeline]] = {}
    for one in mixed.layout.pipelines:
        names = {mixed.cluster.node_kind(stage.kind).site for stage in one.stages}
        if len(names) > 1:
            raise PlannerError(
                f"a pipeline has stages on {listed(sorted(names), 'and')}, and with local updates every site holds the whole "
                "model; put each pipeline on one site"
            )
        found.setdefault(names.pop(), []).append(one)
    made = []
    for site, pipelines in found.items():
        layout = replace(mixed.layout, pipelines=tuple(pipelines), outer=None)
        work = replace(mixed.workload, global_batch_size=layout.global_batch_size)
        cluster = _of_site(mixed.cluster, site)
        kinds = {one.kind: mixed.job.trainers[one.kind] for one in cluster.nodes}
        job = replace(mixed.job, workload=work, cluster=cluster, trainers=kinds)
        made.append(SiteJob(site=site, mixed=replace(mixed, job=job, layout=layout)))
    return made


def _of_site(cluster: ClusterFile, site: str) -> ClusterFile:
    for one in cluster.nodes:
        if one.site != site:
            cluster = cluster.without(one.kind)
    return cluster


def refusals(mixed: MixedExport) -> list[str]:
    """What torchtitan with torchft has not."""
    outer, titan, found = mixed.layout.outer, load_target("torchtitan"), []
    assert outer is not None
    try:
        every = sites(mixed)
    except PlannerError as error:
        return [str(error)]
    for one in every:
        found += [f"on {one.site}: {text}" for text in reasons(one.mixed.layout, SITE)]
        found += [f"on {one.site}: {text}" for text in titan.refusals(cut_job(one.mixed))] if not found else []
    if len(every) < 2:
        found.append("all pipelines lie on one site, which has nobody to average with; plan without local updates")
    if outer.bits not in BITS:
        found.append(f"averages in {outer.bits} bits; torchft sends {listed(map(str, BITS))}")
    if outer.bits != 32 and outer.method == "local_sgd":
        found.append("local_sgd in 8 bits, which torchft sends whole; use diloco")
    if outer.fragments > 1 and any(len(one.stages) > 1 for one in mixed.layout.pipelines):
        found.append("fragments with a pipeline: torchtitan cuts them of the whole model; use pp 1, or one fragment")
    if outer.every % outer.fragments:
        found.append(
            f"{outer.fragments} fragments must divide the {outer.every} steps between averages [torchft.local_sgd.DiLoCo]"
        )
    return found


def render(mixed: MixedExport) -> Rendered:
    """A folder per site with plan_config.py (torchtitan's export of its part) and diloco_config.py (the averages)."""
    outer, titan, every, files = mixed.layout.outer, load_target("torchtitan"), sites(mixed), dict[str, str]()
    assert outer is not None
    made, (average, meeting) = None, limits(mixed)
    for number, one in enumerate(every):
        made = titan.render(cut_job(one.mixed))
        folder = site_folder(number)
        files |= {f"{folder}/{name}": text for name, text in made.files.items()}
        files[f"{folder}/diloco_config.py"] = text_from(
            "planner.mixed.export/diloco_config.py.j2", outer=outer, method=METHODS[outer.method], quantize=BITS[outer.bits],
            replica=number, replicas=len(every), site=one.site, timeout=average, delay=overlapped_steps(outer),
        )  # fmt: skip
    assert made is not None
    words = tuple("diloco_config" if word == "plan_config" else word for word in made.entry)
    smoke = tuple("diloco_config" if word == "plan_config" else word for word in made.smoke)
    return replace(
        made, files=files, entry=words, smoke=smoke,
        variables={
            **made.variables,
            "TORCHFT_LIGHTHOUSE": Setting(None, "address of the lighthouse, like http://HOST:29510; see README.md"),
        },
        environment={
            **made.environment,
            "TORCHFT_TIMEOUT_SEC": Setting(str(average), "what an average may take; torchft gives up after 60 s by itself"),
            "TORCHFT_QUORUM_TIMEOUT_SEC": Setting(str(meeting), "how long a site waits there for the others; 60 s by itself"),
        },
        notes=(
            *made.notes,
            f"Start the lighthouse once, where every site reaches it: torchft_lighthouse --min_replicas {len(every)} "
            "--quorum_tick_ms 100 --join_timeout_ms 10000",
            f"The sites average every {outer.every} of their own steps; the mean is not weighted, so a site with a smaller batch "
            "counts as much as one with a larger. What local updates do to the loss is the user's to check on a short run.",
        ),
        install=(*made.install, "pip install torchft-nightly  # a Rust extension; wheels for Linux on x86-64"),
    )  # fmt: skip


def limits(mixed: MixedExport) -> tuple[int, int]:
    """Seconds after which torchft gives up an average, and after which a site no longer waits for the others.

    SLACK times what is priced: of the average, and of the steps between two (compiling comes on top of the first).
    """
    job, layout = mixed.job, mixed.layout
    assert layout.outer is not None
    places, step = alone(job, layout), inner_step(job, layout)
    ring = best_ring(job.cluster, places, nodes_between(job, places))
    average = local_update(job, layout.outer, places, ring, step).average
    between = step * layout.outer.every / layout.outer.fragments
    return math.ceil(LEAST + SLACK * average), math.ceil(START + SLACK * between)


def site_folder(number: int) -> str:
    """Of the site of this number."""
    return f"site-{number}"
