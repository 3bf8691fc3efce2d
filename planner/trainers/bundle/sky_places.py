"""Where SkyPilot may start a job: the kinds of a cluster file that have the plan's shape, each in its region and at its price."""

from __future__ import annotations

import re
from pathlib import Path

from planner.cluster_file import SITE, ClusterFile, NodeKind
from planner.errors import PlannerError, listed, shown
from planner.trainers.bundle.target import ExportJob

CLOUDS = (
    ("gcp", re.compile(r"[a-z]+-[a-z]+\d+")), ("aws", re.compile(r"[a-z]{2}(-gov)?-[a-z]+-\d")),
    ("azure", re.compile(
        r"((north|south|east|west|central)+(us|europe|asia|india)|"
        r"(uk|france|germany|japan|korea|australia|brazil|canada|sweden|norway|switzerland|uae|italy|poland|spain)"
        r"(north|south|east|west|central)+)\d?"
    )),
)  # fmt: skip
"""Regions by how the clouds write them: us-central1, us-east-1, eastus2."""
ZONES = {"gcp": re.compile(r"-([a-f])$"), "aws": re.compile(r"(?<=\d)([a-f])$")}
INFRA = re.compile(r"[a-z0-9]+(/[a-z0-9*-]+){0,2}")
"""SkyPilot's own spelling: CLOUD/REGION/ZONE. [docs.skypilot.co, reference/yaml-spec, infra; read 2026-11-23]"""


def places(job: ExportJob, cluster: ClusterFile) -> tuple[dict[str, object], ...]:
    """``any_of`` entries of a SkyPilot task, without doubles: ``infra``, None where the site is no region, and ``use_spot``.

    Raises PlannerError where no kind has the plan's GPUs and enough nodes, and for a site that is none of
    several regions.
    """
    same = [one for one in cluster.nodes if _fits(job, one)]
    if not same:
        held = listed([f"{one.count} nodes of {one.gpus_per_node} x {one.profile.name} ({one.kind})" for one in cluster.nodes])
        raise PlannerError(
            f"the plan needs {job.num_nodes} nodes with {job.gpus_per_node} x {job.cluster.hardware.name}, and the cluster has "
            f"{held}; a SkyPilot task starts on equal nodes of one place"
        )
    found = list[dict[str, object]]()
    for one in same:
        infra = infra_of(one.site)
        if infra is None and len({kind.site for kind in same}) > 1:
            raise PlannerError(
                f"the site {shown(one.site)} is no region that SkyPilot knows; name sites like us-east-1, us-central1 or "
                "aws/us-east-1"
            )
        entry: dict[str, object] = {"infra": infra, "use_spot": one.spot}
        if entry not in found:
            found.append(entry)
    return tuple(found)


def _fits(job: ExportJob, kind: NodeKind) -> bool:
    """The kind has the plan's GPUs, at least as many per node, and as many nodes."""
    same = Path(kind.profile.name).name == Path(job.cluster.hardware.name).name
    return same and kind.gpus_per_node == job.cluster.hardware.gpus_per_node and kind.count >= job.num_nodes


def infra_of(site: str) -> str | None:
    """CLOUD/REGION or CLOUD/REGION/ZONE of a site; None where it names no region."""
    if "/" in site:
        return site if INFRA.fullmatch(site) else None
    for cloud, region in CLOUDS:
        zone = ZONES[cloud].search(site) if cloud in ZONES else None
        plain = site[: zone.start()] if zone else site
        if site != SITE and region.fullmatch(plain):
            return f"{cloud}/{plain}" + (f"/{site}" if zone else "")
    return None
