"""Tasks that run commands, in YAML: of SkyPilot, of Kubernetes, of a workflow. They are read as the script of their commands."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.trainers.reading.values import Written, read_text

RUNS = ("run", "command", "args", "script", "commands")
"""Keys under which commands stand."""
BEFORE = ("before_script", "inline_script", "pre_script", "prologue", "setup_commands")
"""Lines that the same shell runs before the command, as charts name them, in this order."""
SAYS = ("env", "envs", "env_vars", "environment", "environment_variables")
"""Keys under which variables of the shell stand."""
OF_KUBERNETES = re.compile(r"\$\(([A-Z_][A-Z0-9_]*)\)")
"""How a manifest names a variable of the container."""
COUNTS = ("replicas", "parallelism", "completions", "numNodes", "nodes")
"""Keys of Kubernetes for how many nodes run the same."""
GPUS = ("nvidia.com/gpu", "amd.com/gpu")
"""Its resources for the GPUs that a container sees."""
MOST = 5000
"""Parts of a file that are looked at."""
STARTS = re.compile(
    r"(?:^|[\s;&|(/])(?:torchrun|accelerate\s+launch|deepspeed|tune\s+run|litgpt\s+\w|llamafactory-cli|swift\s+(?:sft|pt)|axolotl\s"
    r"|python3?\s+(?:-m\s+)?\S*(?:train|tun|sft|dpo|litgpt)\S*)"
)
"""What starts a training, by the words that launchers have."""


def script_of(path: Path) -> Path | None:
    """The commands of such a file as a script of that name with .sh; None = it is none."""
    if path.suffix.lower() not in (".yaml", ".yml"):
        return None
    for text in re.split(r"^---[ \t]*$", read_text(path), flags=re.MULTILINE):
        try:
            data = library.parse_yaml(text, str(path)) if any(f"{one}:" in text for one in RUNS) else {}
        except PlannerError:
            return None
        parts = list(islice(_mappings(data), MOST))
        texts = [one for one in dict.fromkeys(_commands(parts)) if STARTS.search(one)]
        before = "\n".join(str(one) for name in BEFORE for part in parts for one in _listed(part.get(name))) if texts else ""
        if texts and (lines := _on_its_nodes(parts, "\n".join(texts), before)):
            script = Written(f"{path}.sh")
            text = "\n".join(["#!/bin/bash", *_variables(parts), before, lines, ""])
            script.text = re.sub(r"(?<!\$)\{\{[^{}]*\}\}", lambda one: re.sub(r"\s", "", one[0]), text)  # one word of a template
            return script
    return None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if isinstance(value, str) else []


def _on_its_nodes(parts: Sequence[Mapping[str, Any]], lines: str, before: str) -> str:
    """The commands as a job of Kubernetes runs them, which tells torchrun how many nodes there are, and how many GPUs one has; '' =
    that is not known."""
    nodes, each, told = _pods(parts)
    text = f"{before}\n{lines}"
    said = re.search(r"nnodes|num_machines|num_nodes|hostfile", text) is not None
    if nodes > 1 and not said and told != "nnodes" and not (told and "torchrun " in lines):
        return ""
    given = "torchrun " + f"--nnodes {nodes} " * (nodes > 1 and not said)
    return lines.replace("torchrun ", given + f"--nproc_per_node {each} " * bool(told and each and "nproc" not in text))


def _numbers(parts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[int]:
    """Whole numbers under some keys, in the order of the file."""
    return [int(part[one]) for part in parts for one in names if re.fullmatch(r"[1-9]\d{0,3}", str(part.get(one)))]


def _pods(parts: Sequence[Mapping[str, Any]]) -> tuple[int, int | None, str]:
    """(Nodes of a job, processes of one, None = that is open, the key by which an operator of PyTorchJob or a chart over it tells
    torchrun of both, '' = nothing does)."""
    counts, charts = _numbers(parts, COUNTS), _numbers(parts, ("nnodes",))
    told = "replicas" if any("pytorchReplicaSpecs" in part for part in parts) else "nnodes" if charts and not counts else ""
    nodes = sum(counts) if told == "replicas" else max(counts or charts, default=1)
    each = {*_numbers(parts, ("nproc_per_node", "nprocPerNode"))} or {*_numbers(parts, GPUS)}
    return nodes, min(each) if len(each) == 1 else None, told


def _mappings(node: Any) -> Iterator[Mapping[str, Any]]:
    """A mapping and those inside it, in the order of the file."""
    if isinstance(node, Mapping):
        yield node
    for one in node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ():
        yield from _mappings(one)


def _commands(parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Commands in the order of the file: blocks of lines, lists of lines, and lists of words, of which 'sh -c' runs the last."""
    for part in parts:
        words = [str(one) for name in ("command", "args") if isinstance(part.get(name), list) for one in part[name]]
        if words:
            shell = any(re.fullmatch(r"-\w*c", one) for one in words[:4])
            line = any(re.search(r"\$(?!\()|[|>]|^-\S+\s", one) for one in words)  # a chart makes a line of a shell of them
            plain = OF_KUBERNETES.sub(r"${\1}", " ".join(words)) if line else OF_KUBERNETES.sub(r"""'"${\1}"'""", shlex.join(words))
            yield words[-1] if shell or "\n" in words[-1] else plain
        for name in RUNS:
            if isinstance(part.get(name), str):
                yield part[name]
            elif name in ("commands", "script") and isinstance(part.get(name), list):
                yield "\n".join(map(str, part[name]))


def _said(parts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Variables that the file says, as a mapping, as a list of names with values or of A=b; not those that differ between parts."""
    found: dict[str, set[str]] = {}
    for value in (part[name] for part in parts for name in SAYS if name in part):
        pairs: list[Any] = list(value.items()) if isinstance(value, Mapping) else []
        for one in value if isinstance(value, list) else ():
            pairs.append((one.get("name"), one.get("value")) if isinstance(one, Mapping) else str(one).partition("=")[::2])
        for name, text in pairs:
            if isinstance(text, str | int | float) and re.fullmatch(r"[A-Za-z_]\w*", str(name)):
                found.setdefault(str(name), set()).add(str(text))
    return {name: texts.pop() for name, texts in found.items() if len(texts) == 1}


def _variables(parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What the task says of the shell's variables, and of its nodes and GPUs as an operator, a container or SkyPilot tells them."""
    yield from (f"export {name}={shlex.quote(value)}" for name, value in _said(parts).items())
    count, processes, told = _pods(parts)
    if len(seen := {*_numbers(parts, GPUS)}) == 1:
        yield f"export CUDA_VISIBLE_DEVICES={','.join(map(str, range(*seen)))}"
    for name, number in {"NPROC_PER_NODE": processes, "NNODES": count, "NODE_RANK": 0}.items() if told else ():
        yield f"export PET_{name}={number} {name}={number}" if number is not None else ""
    data, resources = parts[0], parts[0].get("resources")
    each = re.search(r":(\d+)$", str(resources.get("accelerators", ""))) if isinstance(resources, Mapping) else None
    if each is not None and isinstance(data.get("run"), str):
        nodes = data.get("num_nodes", 1)
        yield f"export SKYPILOT_NUM_GPUS_PER_NODE={each[1]} SKYPILOT_NUM_NODES={nodes} SKYPILOT_NODE_RANK=0"
