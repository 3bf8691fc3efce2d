"""Keywords of the API: the flags of ``plan`` in Python spelling, read as a request and as fields of a layout."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from planner.errors import PlannerError, nearest_first, shown
from planner.layout import FIELDS, Layout, Recompute

if TYPE_CHECKING:
    from planner.model import ModelSpec


class JobKeywords(TypedDict, total=False):
    """What is trained and where; None = not said, as if the keyword were missing."""

    model: str | os.PathLike[str] | ModelSpec | None
    """Preset, config.json, directory, hub id, or the model itself."""
    gpus: int | None
    """Of the whole job."""
    nodes: int | None
    """Nodes of the hardware, in place of ``gpus``."""
    hardware: str | os.PathLike[str] | None
    """Profile or YAML file."""
    trainer: str | os.PathLike[str] | None
    """Trainer or YAML file, with @VERSION where it has versions."""
    options: Mapping[str, str] | Sequence[str] | str | None
    """Options of the trainer: {'expert_dispatch': 'deepep'}, or ['expert_dispatch=deepep']."""
    sequence_length: int | str | None
    """Tokens: 8192, or '128k'."""
    global_batch_size: int | str | None
    """Sequences per optimizer step; with a suffix ('4M') tokens."""
    precision: str | None
    optimizer: str | None
    lora_rank: int | None
    lora_targets: str | None
    lora_whole: str | None
    frozen_weights: str | None
    objective: str | None
    """'lm' or 'dpo'."""
    document_length: int | None
    """Tokens of a mean packed document."""
    image_tokens: int | None
    """Tokens of a sequence that stand for images."""
    image_encoder: str | None
    expert_imbalance: float | None
    """Tokens of the busiest expert rank over the mean."""
    network_bandwidth: str | float | None
    """Per GPU, one direction: '400 Gb/s', or bytes/s."""
    intra_node: str | None
    """Link inside a node: 'pcie', 'PCIe 4.0 x8', 'nvlink', or a rate per GPU in one direction."""


class Keywords(JobKeywords, total=False):
    """A job, and the fields of a layout that are fixed."""

    tp: int | None
    pp: int | None
    dp: int | None
    cp: int | None
    ep: int | None
    etp: int | None
    vpp: int | None
    dp_shard: int | None
    micro_batch_size: int | None
    """Sequences."""
    num_microbatches: int | None
    sequence_parallel: bool | None
    cp_method: str | None
    zero: int | None
    schedule: str | None
    order: str | None
    recompute: str | None
    recompute_layers: int | None
    recompute_modules: str | Sequence[str] | None
    """['mlp', 'norm'], or 'mlp,norm'."""
    offload_optimizer: int | None
    """Percent of the optimizer states."""
    offload_activations: bool | None
    offload_layers: int | None
    offload_parameters: bool | None
    first_stage_layers: int | None
    last_stage_layers: int | None


JOB = tuple(JobKeywords.__annotations__)
WHOLE_NUMBERS = ("gpus", "nodes", "sequence_length", "global_batch_size", "lora_rank", "document_length", "image_tokens")
COUNTS = ("sequence_length", "global_batch_size")
"""Of these, those that are written with a suffix too."""
NUMBERS = {"expert_imbalance": (int, float), "network_bandwidth": (str, int, float)}
SEARCHED = tuple(name for name in FIELDS if name not in ("num_microbatches", "order"))
"""Fields of a layout that a search can pin."""
LOGGED = ("tp", "pp", "cp", "ep", "vpp", "micro_batch_size", "zero", "recompute")
"""Fields of a layout that the log of a run may leave open."""


_FLAGS = {"num_gpus": "gpus", "options": "option"}
"""Fields whose flag is called otherwise."""


def flag_of(name: str) -> str:
    """A field as it is written on the command line."""
    return f"--{_FLAGS.get(name, name).replace('_', '-')}"


def require_known(call: str, keywords: Iterable[str], known: Sequence[str]) -> None:
    """Raise PlannerError for a keyword that a call does not take."""
    for name in keywords:
        if name not in known:
            raise PlannerError(f"{call}() takes no '{name}'; nearest: {', '.join(nearest_first(name, known)[:3])}")


def request_fields(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that describe the job and are not None, by field of Request. Raises PlannerError."""
    from planner.model import ModelSpec
    from planner.trainer_options import read_options
    from planner.units import parse, parse_count

    fields: dict[str, Any] = {}
    for name in JOB:
        value = keywords.get(name)
        if value is None:
            continue
        if name == "options":
            fields |= {name: read_options(value)} if value else {}
            continue
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        whole = name in WHOLE_NUMBERS
        if name in COUNTS and isinstance(value, str):
            value, suffix = parse_count(value, what=flag_of(name))
            name = "global_batch_tokens" if suffix and name == "global_batch_size" else name
        kinds = (int,) if whole else NUMBERS.get(name, (str, ModelSpec) if name == "model" else (str,))
        if isinstance(value, bool) or not isinstance(value, kinds):
            right = "whole number" if whole else "text or a number"
            raise PlannerError(f"{name} is {shown(value)}; it must be a {right}")
        fields["num_gpus" if name == "gpus" else name] = value
    if "network_bandwidth" in fields:
        rate = fields["network_bandwidth"]
        text = rate if isinstance(rate, str) else f"{float(rate)!r} B/s"
        fields["network_bandwidth"] = bandwidth = parse(text, "bytes/s", what="--network-bandwidth")
        if bandwidth <= 0:
            raise PlannerError("--network-bandwidth must be above zero")
    return fields


PART_OF = {
    "recompute_layers": ("recompute", int(Recompute.FULL)), "recompute_modules": ("recompute", int(Recompute.SELECTIVE)),
    "offload_layers": ("offload_activations", 1),
}  # fmt: skip
"""Fields of a layout that mean something with one value of another field alone: who says the first means the second."""


def layout_values(keywords: Mapping[str, Any]) -> dict[str, int]:
    """The fields of a layout among the keywords, as integers, with what they are a part of. Raises PlannerError."""
    values: dict[str, int] = {}
    for name in FIELDS:
        value = keywords.get(name)
        if value is not None:
            plain = list(value) if isinstance(value, tuple) else value
            checked = Layout.from_dict({name: plain}, where=flag_of(name))
            values[name] = int(getattr(checked, name))
    for name, (of, meant) in PART_OF.items():
        if values.get(name):
            values.setdefault(of, meant)
    return values


def command_line(keywords: Mapping[str, Any], command: str = "plan") -> str:
    """The keywords as the command line that gives them to a command."""
    from planner.model import ModelSpec
    from planner.trainer_options import read_options

    words = [command]
    for name, value in keywords.items():
        if value is None:
            continue
        flag = flag_of(name)
        if name == "options":
            words += [word for option, chosen in read_options(value).items() for word in (flag, f"{option}={chosen}")]
            continue
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
            continue
        if isinstance(value, ModelSpec):
            value = value.name
        if name == "network_bandwidth" and not isinstance(value, str):
            value = f"{value!r} B/s"
        text = ",".join(value) if isinstance(value, (list, tuple)) else str(value)
        words += [flag, shlex.quote(text)]
    return " ".join(words)
