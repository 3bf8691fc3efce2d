"""Node lists of schedulers as a cluster file: SLURM (``sinfo``, ``scontrol show nodes``, slurm.conf) and Kubernetes (``kubectl
get nodes``).

What a list says decides: names, GPUs of a node, zones, spot nodes. Bandwidth between zones stands in none, and is asked for in
a note.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from planner import library
from planner.cluster_file import MOST_NODES, SITE, ClusterFile, NodeKind
from planner.errors import PlannerError, UnknownNameError, listed, shown
from planner.hardware.names import profile_named
from planner.record import record
from planner.schema import Name, value_of
from planner.units import plural

AWAY = ("DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "MAINT", "INVAL", "NOT_RESPONDING", "UNKNOWN", "NO_RESPOND",
        "POWERED_DOWN", "FUTURE", "REBOOT", "BLOCKED")  # fmt: skip
"""States of SLURM in which a node takes no job."""
GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
PRODUCTS = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "k8s.amazonaws.com/accelerator",
)
"""Labels that name a node's GPU, the most exact first."""
ZONES = ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone")
SPOT = {"cloud.google.com/gke-spot": "true", "karpenter.sh/capacity-type": "spot", "eks.amazonaws.com/capacityType": "spot",
        "kubernetes.azure.com/scalesetpriority": "spot"}  # fmt: skip
"""Label and value of a node that may be taken away."""
COMMANDS = "'sinfo -N -o \"%N %G %T\"', 'scontrol show nodes' or 'kubectl get nodes -o json'"
HOSTS_SAID = 6


@record
class ListedNode:
    """One node of a list."""

    name: str
    product: str
    """GPU by the list's own word; "" where it has none."""
    gpus: int
    zone: str = ""
    spot: bool = False
    away: str = ""
    """Why it takes no job; "" where it does."""


@record
class ReadCluster:
    """A cluster file and what was left out of it."""

    cluster: ClusterFile
    hosts: Mapping[str, tuple[str, ...]]
    """Names in the list, by kind, in the order of the file's node-0, node-1, ..."""
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The cluster file, with the hosts and the notes."""
        return {
            "cluster": self.cluster.to_dict(), "hosts": {kind: list(names) for kind, names in self.hosts.items()},
            "notes": list(self.notes),
        }  # fmt: skip

    def text(self) -> str:
        """The file, with the hosts as comments."""
        head = ["# Nodes of the list, in the order of node-0, node-1, ..."]
        head += [f"# {kind}: {', '.join(names)}" for kind, names in self.hosts.items()]
        head += [f"# {note}" for note in self.notes]
        return "\n".join([*head, library.dump_yaml(self.cluster.to_dict())])


def cluster_of(path: Path, hardware: Mapping[str, str] | None = None) -> ReadCluster:
    """The cluster of a node list. ``hardware``: profile by the list's word for a GPU; under "" of nodes that do not say theirs.

    Raises PlannerError with one sentence for what cannot be read, for unknown GPUs and for a list without any.
    """
    nodes = read_nodes(library.read_text(path), path.name)
    if not nodes:
        raise PlannerError(f"{path.name}: no node stands in it; give the output of {COMMANDS}")
    if len(nodes) > MOST_NODES:
        raise PlannerError(f"{path.name}: {len(nodes)} nodes; at most {MOST_NODES} are planned")
    used = [one for one in nodes if one.gpus and not one.away]
    notes = []
    if away := [one for one in nodes if one.gpus and one.away]:
        why = listed(sorted({one.away for one in away}), "and")
        notes.append(f"left out, as they take no job ({why}): {_few([one.name for one in away])}")
    if without := [one for one in nodes if not one.gpus]:
        notes.append(f"{plural(len(without), 'node')} without a GPU left out")
    if not used:
        raise PlannerError(f"{path.name}: none of its {plural(len(nodes), 'node')} has a GPU that takes a job")
    _check_words(hardware or {}, [one.product for one in used], path.name)
    known = {word: _profile(word, hardware or {}, path.name) for word in dict.fromkeys(one.product for one in used)}
    notes += [
        f"GPUs called {word} are taken as {name}; --hardware {word}=PROFILE says otherwise"
        for word, name in known.items()
        if word
    ]
    cluster, hosts = _grouped(used, known, path.name)
    if len(cluster.sites) > 1:
        notes.append(
            "zones have no links here: add 'links' with bandwidth and latency between them, else the slower network of two kinds "
            "is taken"
        )
    return ReadCluster(cluster=cluster, hosts=hosts, notes=tuple(notes))


def read_nodes(text: str, where: str) -> list[ListedNode]:
    """The nodes of a list, each once. Raises PlannerError."""
    if text.lstrip()[:1] in "{[" and text.strip():
        nodes = _of_data(library.parse_json(text, where), where)
    elif re.search(r"^\s*(?:- )?apiVersion:", text, re.MULTILINE):
        nodes = _of_data(library.parse_yaml(text, where), where)
    elif re.search(r"^\s*NodeName=", text, re.MULTILINE | re.IGNORECASE):
        nodes = list(_of_scontrol(text, where))
    else:
        nodes = list(_of_table(text, where))
    once: dict[str, ListedNode] = {}
    for one in nodes:
        value_of(Name, one.name, where, "the name of a node")
        once.setdefault(one.name, one)  # sinfo names a node once for every partition
    return list(once.values())


# ------------------------------------------------------------------------------------------------ SLURM


def _of_scontrol(text: str, where: str) -> Iterator[ListedNode]:
    """``scontrol show nodes``, also one line a node, and NodeName lines of slurm.conf."""
    for block in re.split(r"(?im)^\s*(?=NodeName=)", text):
        fields = {key.lower(): value for key, value in re.findall(r"(?:^|\s)(\w+)=(\S*)", block)}
        if "nodename" not in fields or fields["nodename"].upper() == "DEFAULT":
            continue
        yield from _slurm(fields["nodename"], fields.get("gres", ""), fields.get("state", ""), where)


def _of_table(text: str, where: str) -> Iterator[ListedNode]:
    """``sinfo`` with its headings, NODELIST, GRES and perhaps STATE; without (-h) where its lines have these in this order."""
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and all(re.fullmatch(r"\s*\S+\s+(gpu:\S+|\(null\))(\s+\S+)?\s*", line) for line in lines):
        lines = [" ".join(("NODELIST", "GRES", "STATE")[: len(lines[0].split())]), *lines]
    place = next((number for number, line in enumerate(lines) if "NODELIST" in line.upper().split()), None)
    if place is None:
        raise PlannerError(f"{where}: not a node list that is known; give the output of {COMMANDS}")
    heads = lines[place].upper().split()
    if "GRES" not in heads:
        raise PlannerError(f'{where}: sinfo says no GRES, the GPUs of a node; list with sinfo -N -o "%N %G %T"')
    for line in lines[place + 1 :]:
        cells = line.split()
        if len(cells) != len(heads):
            raise PlannerError(f"{where}: {shown(line[:80])} has {len(cells)} cells under {len(heads)} headings")
        row = dict(zip(heads, cells, strict=True))
        yield from _slurm(row["NODELIST"], row["GRES"], row.get("STATE", row.get("STATELONG", "")), where)


def _slurm(names: str, gres: str, state: str, where: str) -> Iterator[ListedNode]:
    """Nodes of one hostlist with the same GPUs and state."""
    words = {word.strip("*~#!%$@^-").upper() for word in re.split(r"[+,]", state)}
    away = sorted(word.lower() for word in words if word in AWAY or word.rstrip("*") in AWAY)
    if state.endswith("*") and not away:
        away = ["not responding"]
    product, gpus = _gres(gres, where)
    for name in hostlist(names, where):
        yield ListedNode(name=name, product=product, gpus=gpus, away=" ".join(away))


def _gres(text: str, where: str) -> tuple[str, int]:
    """Type and number of the GPUs in ``gpu:a100:8(S:0-1),nvme:1``; ("", 0) without any. Raises PlannerError."""
    found: list[tuple[str, int]] = []
    for one in re.sub(r"\([^)]*\)", "", "" if text.strip().lower() in ("(null)", "n/a") else text).split(","):
        parts = one.strip().split(":")
        if parts[0].lower() != "gpu":
            continue
        if len(parts) > 3 or not (parts[-1].isdecimal() and len(parts[-1]) <= 4):
            raise PlannerError(f"{where}: {shown(one[:80])} is not gpu:TYPE:COUNT or gpu:COUNT, as Gres gives GPUs")
        if int(parts[-1]):
            found.append((parts[1] if len(parts) == 3 else "", int(parts[-1])))
    if len({kind for kind, _ in found}) > 1:
        raise PlannerError(
            f"{where}: a node has GPUs of several types ({listed([kind or 'no type' for kind, _ in found], 'and')}); a node of a "
            "cluster file has one: name the part that the job takes"
        )
    return (found[0][0], sum(count for _, count in found)) if found else ("", 0)


def hostlist(text: str, where: str) -> list[str]:
    """Names of ``n[001-003,7],login1``: numbers keep their zeros.  [man scontrol, show hostnames]"""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        some = [""]
        for fixed, inner in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
            ends = [fixed] if fixed else [number for one in inner.split(",") for number in _numbers(one, where)]
            if len(some) * len(ends) > MOST_NODES:
                raise PlannerError(f"{where}: {shown(text[:80])} names more than {MOST_NODES} nodes")
            some = [one + end for one in some for end in ends]
        names += some
        if len(names) > MOST_NODES:
            raise PlannerError(f"{where}: {shown(text[:80])} names more than {MOST_NODES} nodes")
    return names


def _numbers(text: str, where: str) -> list[str]:
    first, _, last = text.partition("-")
    if not (first.isdecimal() and (last.isdecimal() or not last) and len(text) <= 20):
        raise PlannerError(f"{where}: {shown(text[:80])} is not a number or a range, as brackets of node names hold")
    if not last:
        return [first]
    if int(last) - int(first) >= MOST_NODES:
        raise PlannerError(f"{where}: {shown(text)} names more than {MOST_NODES} nodes")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


# ------------------------------------------------------------------------------------------------ JSON


def _of_data(data: Any, where: str) -> list[ListedNode]:
    """Kubernetes' list of nodes, or ``scontrol show nodes --json``."""
    if not isinstance(data, dict):
        raise PlannerError(f"{where}: not a node list that is known; give the output of {COMMANDS}")
    rows = data.get("items", data.get("nodes", [data] if data.get("kind") == "Node" else None))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise PlannerError(f"{where}: not a node list that is known; give the output of {COMMANDS}")
    if "items" not in data and "nodes" in data:
        return [node for row in rows for node in _slurm_row(row, where)]
    return [_kubernetes(row, where) for row in rows]


def _slurm_row(row: Mapping[str, Any], where: str) -> Iterator[ListedNode]:
    state = row.get("state", "")
    words = "+".join(map(str, state)) if isinstance(state, list) else str(state)
    yield from _slurm(str(row.get("name", "")), str(row.get("gres") or ""), words, where)


def _kubernetes(row: Mapping[str, Any], where: str) -> ListedNode:
    """One Node: product labels of the GPU operator or of the cloud, allocatable GPUs, zone."""
    meta, status, spec = (_mapping(row.get(key)) for key in ("metadata", "status", "spec"))
    labels = {key: str(value) for key, value in _mapping(meta.get("labels")).items()}
    name = str(meta.get("name", ""))
    if not name:
        raise PlannerError(f"{where}: an item has no metadata.name; give the output of 'kubectl get nodes -o json'")
    room = _mapping(status.get("allocatable")) or _mapping(status.get("capacity"))
    counts = [str(room[key]) for key in GPU_RESOURCES if key in room]
    if wrong := [one for one in counts if not (one.isdecimal() and len(one) <= 4)]:
        raise PlannerError(f"{where}: {name} has {shown(wrong[0][:80])} GPUs, which is not a whole number")
    product = next((labels[key] for key in PRODUCTS if labels.get(key)), "")
    return ListedNode(
        name=name, product=product, gpus=sum(map(int, counts)), zone=next((labels[key] for key in ZONES if labels.get(key)), ""),
        spot=any(labels.get(key, "").lower() == value for key, value in SPOT.items()), away=_not_ready(spec, status),
    )  # fmt: skip


def _not_ready(spec: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    if spec.get("unschedulable") is True:
        return "cordoned"
    conditions = status.get("conditions")
    ready = (
        [one for one in conditions if isinstance(one, dict) and one.get("type") == "Ready"]
        if isinstance(conditions, list)
        else []
    )
    return "" if all(one.get("status") == "True" for one in ready) else "not ready"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


# ------------------------------------------------------------------------------------------------ kinds


def _grouped(
    nodes: Sequence[ListedNode], known: Mapping[str, str], where: str
) -> tuple[ClusterFile, dict[str, tuple[str, ...]]]:
    """Kinds of equal nodes, in the order in which they first appear; ``known``: profile by the list's word."""
    groups: dict[tuple[str, int, str, bool], list[str]] = {}
    for one in nodes:
        groups.setdefault((known[one.product], one.gpus, one.zone or SITE, one.spot), []).append(one.name)
    names = _kind_names(list(groups))
    kinds = tuple(
        NodeKind(
            kind=name, hardware=profile, count=len(hosts), gpus=gpus, spot=spot,
            site=value_of(Name, site, where, "the name of a zone"),
        )
        for name, ((profile, gpus, site, spot), hosts) in zip(names, groups.items(), strict=True)
    )  # fmt: skip
    return ClusterFile(nodes=kinds), dict(zip(names, map(tuple, groups.values()), strict=True))


def _check_words(hardware: Mapping[str, str], products: Sequence[str], where: str) -> None:
    """Raises PlannerError where a profile is given for GPUs that are not in the list: it would change nothing."""
    if unknown := [word for word in hardware if word not in products]:
        found = listed([shown(word[:80]) if word else "GPUs without a name" for word in dict.fromkeys(products)], "and")
        meant = f"GPUs called {shown(unknown[0][:80])}" if unknown[0] else "nodes that do not say their GPU"
        raise PlannerError(f"--hardware: {where} has no {meant}; it has {found}; write --hardware TYPE=PROFILE with such a TYPE")


def _profile(product: str, hardware: Mapping[str, str], where: str) -> str:
    """Profile of a GPU by the list's word. Raises PlannerError that says how to name it."""
    if product in hardware:
        return profile_named(hardware[product])
    if not product:
        raise PlannerError(
            f"{where}: its nodes do not say which GPU they have; name it with --hardware, like --hardware h100-sxm"
        )
    text = re.sub(r"-(?:SHARED|MIG-.*)$", lambda found: " MIG" if "MIG" in found[0] else "", product).replace("_", "-")
    for one in dict.fromkeys((text, re.sub(r"-\d+g.*$", "", text))):
        if library.is_file_name(one):  # a list names no file here
            break
        try:
            return profile_named(one)
        except UnknownNameError:
            continue
        except PlannerError as error:
            raise PlannerError(f"{where}: {error}; say which with --hardware {product}=PROFILE") from error
    raise PlannerError(
        f"{where}: no profile is known for GPUs called {shown(product[:80])}; name one with --hardware {product}=PROFILE"
    )


def _kind_names(groups: Sequence[tuple[str, int, str, bool]]) -> list[str]:
    """The profile, with what sets its kinds apart: GPUs of a node, zone, spot; then a number."""
    names = []
    for profile, gpus, site, spot in groups:
        same = [one for one in groups if one[0] == profile]
        more = [f"{gpus} GPUs"] if len({one[1] for one in same}) > 1 else []
        more += [site] if len({one[2] for one in same}) > 1 else []
        more += ["spot"] if spot and not all(one[3] for one in same) else []
        names.append(" ".join([Path(profile).stem, *more]))
    seen: Counter[str] = Counter()
    for number, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1 or name in {one[2] for one in groups}:
            names[number] = f"{name} {seen[name]}"
    return names


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:HOSTS_SAID]) + (f" and {len(names) - HOSTS_SAID} more" if len(names) > HOSTS_SAID else "")


def given_hardware(said: Sequence[str]) -> dict[str, str]:
    """``--hardware``: TYPE=PROFILE, or a PROFILE alone for nodes that do not say their GPU."""
    pairs = [one.partition("=") for one in said]
    return {name if sign else "": profile if sign else name for name, sign, profile in pairs}
