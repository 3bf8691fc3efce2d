"""Cluster files: shown, drawn, and made of the node lists of schedulers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.api.results import Answer, File
from planner.errors import PlannerError

if TYPE_CHECKING:
    from rich.console import Console

    from planner.questions.hardware.node_lists import ReadCluster

__all__ = ["cluster_of_nodes"]


def is_cluster_file(name: File) -> bool:
    """Whether it names a file with ``nodes``, which no hardware profile has."""
    from planner import library

    path = Path(fspath(name))
    if not (library.is_file_name(fspath(name)) and library.is_file(path)):
        return False
    try:
        return "nodes" in library.read_yaml(path)
    except PlannerError:
        return False


def show_cluster(name: File) -> Answer[dict[str, Any]]:
    """Nodes, links and what is assumed of a cluster file. Raises PlannerError."""
    from planner.cluster_file import read_cluster
    from planner.questions.hardware.cluster_show import print_cluster, shown_cluster

    return Answer(shown_cluster(read_cluster(Path(name))), print_cluster)


def plot_cluster(name: File, picture: Path) -> None:
    """Draw a cluster file to a .png, .svg or .pdf file. Raises PlannerError."""
    from planner.cluster_file import read_cluster
    from planner.questions.hardware.cluster_picture import draw_cluster
    from planner.questions.hardware.cluster_show import shown_cluster

    if not picture.parent.is_dir():
        raise PlannerError(f"{picture}: cannot be written, there is no directory {picture.parent}")
    draw_cluster(shown_cluster(read_cluster(Path(name))), picture, Path(name).stem)


def cluster_of_nodes(
    file: File, *, hardware: Mapping[str, str] | Sequence[str] = (), output: File | None = None
) -> Answer[ReadCluster]:
    """The cluster file of a node list: ``sinfo``, ``scontrol show nodes`` or ``kubectl get nodes -o json``.

    ``hardware``: profile by the list's word for a GPU, under "" of nodes that do not say theirs; or texts like 'a100=PROFILE'.
    ``output``: where it is written. Raises PlannerError.
    """
    from planner.library import write_whole
    from planner.questions.hardware.cluster_show import print_cluster, shown_cluster
    from planner.questions.hardware.node_lists import cluster_of, given_hardware

    read = cluster_of(Path(file), hardware if isinstance(hardware, Mapping) else given_hardware(hardware))
    if output is not None:
        write_whole(Path(output), read.text())

    def show(out: Console, found: ReadCluster) -> None:
        print_cluster(out, shown_cluster(found.cluster))
        for note in found.notes:
            out.print(f"note: {note}", markup=False)

    return Answer(read, show)
