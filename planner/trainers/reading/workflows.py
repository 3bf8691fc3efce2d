"""Tasks that run commands, in YAML: of SkyPilot, of Kubernetes, of a workflow. They are read as the script of their commands."""

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.trainers.reading.values import Written, read_text

RUNS = ("run", "command", "args", "script", "commands")
"""Keys under which commands stand."""
COUNTS = ("replicas", "parallelism", "completions", "numNodes", "nodes")
"""Keys of Kubernetes for how many nodes run the same."""
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
        texts = [one for one in dict.fromkeys(_commands(data)) if STARTS.search(one)]
        if texts and (lines := _on_its_nodes(data, "\n".join(texts))):
            script = Written(f"{path}.sh")
            script.text = "\n".join(["#!/bin/bash", *_variables(data), lines, ""])
            return script
    return None


def _on_its_nodes(data: Mapping[str, Any], lines: str) -> str:
    """The commands as a job of Kubernetes runs them, which tells torchrun how many nodes there are; '' = that is not known."""
    parts = list(islice(_mappings(data), MOST))
    counts = [part[name] for part in parts for name in COUNTS if isinstance(part.get(name), int)]
    together = any("pytorchReplicaSpecs" in part for part in parts)
    nodes = sum(counts) if together else max(counts, default=1)
    if nodes <= 1 or re.search(r"nnodes|num_machines|num_nodes|hostfile", lines):
        return lines
    return lines.replace("torchrun ", f"torchrun --nnodes {nodes} ") if together and "torchrun " in lines else ""


def _mappings(node: Any) -> Iterator[Mapping[str, Any]]:
    """A mapping and those inside it, in the order of the file."""
    if isinstance(node, Mapping):
        yield node
    for one in node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ():
        yield from _mappings(one)


def _commands(data: Any) -> Iterator[str]:
    """Commands in the order of the file: blocks of lines, lists of lines, and lists of words, of which 'sh -c' runs the last."""
    for part in islice(_mappings(data), MOST):
        words = [str(one) for name in ("command", "args") if isinstance(part.get(name), list) for one in part[name]]
        if words:
            shell = any(re.fullmatch(r"-\w*c", one) for one in words[:4])
            yield words[-1] if shell or "\n" in words[-1] else shlex.join(words)
        for name in RUNS:
            if isinstance(part.get(name), str):
                yield part[name]
            elif name in ("commands", "script") and isinstance(part.get(name), list):
                yield "\n".join(map(str, part[name]))


def _variables(data: Mapping[str, Any]) -> Iterator[str]:
    """What the task says of the shell's variables, and of its nodes as SkyPilot tells them."""
    envs = data.get("envs")
    for name, value in envs.items() if isinstance(envs, Mapping) else ():
        if isinstance(value, str | int | float) and re.fullmatch(r"\w+", str(name)):
            yield f"export {name}={shlex.quote(str(value))}"
    resources = data.get("resources")
    each = re.search(r":(\d+)$", str(resources.get("accelerators", ""))) if isinstance(resources, Mapping) else None
    if each is not None and isinstance(data.get("run"), str):
        nodes = data.get("num_nodes", 1)
        yield f"export SKYPILOT_NUM_GPUS_PER_NODE={each[1]} SKYPILOT_NUM_NODES={nodes} SKYPILOT_NODE_RANK=0"
