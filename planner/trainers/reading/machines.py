"""Machines other than GPUs, by the words of a file of any trainer: what is to be said of a plan that prices GPUs in their place."""

import re
from dataclasses import replace
from pathlib import Path

from planner.errors import PlannerError
from planner.hardware.names import profile_named
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import OtherMachineError
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.shell.starting import batch_options
from planner.trainers.reading.values import read_text

NAMES = {
    "tpu": "TPUs", "xla": "TPUs", "npu": "NPUs", "ascend": "NPUs", "xpu": "GPUs of Intel (xpu)", "hpu": "Gaudi (hpu)",
    "gaudi": "Gaudi (hpu)", "habana": "Gaudi (hpu)", "mps": "Apple GPUs (mps)", "neuron": "Trainium", "trainium": "Trainium",
    "dcu": "DCUs of Hygon",
}  # fmt: skip
"""Words of folders and of values -> the machines that they are of."""
_ANY = "|".join(NAMES)
_FOLDER = re.compile(r"(?i)(?:^|[_\W])(tpu|npu|ascend|xpu|hpu|gaudi|habana|mps|trainium|dcu)(?:$|[_\W]|\d)")
_VALUE = re.compile(
    rf"(?im)^[^#\n]{{0,200}}?(?:device|backend|accelerator|platform|distributed_type)(?:_?type)?[\"']?[ \t]*(?::|=|[ \t])[ \t]*"
    rf"[\"']?(?:multi_)?({_ANY})\b(?![^\n]*\bif\b)"
)
"""device: xpu, backend = "tpu", --device npu, distributed_type: MULTI_HPU; not what a program chooses by what is there."""
_SWITCH = re.compile(rf"(?im)^[^#\n]{{0,200}}?\b(?:use_)?({_ANY})(?:_device)?[\"']?[ \t]*[:=][ \t]*[\"']?true\b")
"""use_xpu: true, xla: true."""
_PATCHES = {
    "torch_npu": "npu", "habana_frameworks": "hpu", "optimum.habana": "hpu", "ipex_llm": "xpu",
    "intel_extension_for_pytorch": "xpu",
}  # fmt: skip
"""Modules that put a trainer on another machine, with kernels and formats of low bits of their own."""


def _modules(*names: str) -> str:
    return "|".join(map(re.escape, names))


def _imports(kind: str) -> str:
    """An import of a module of one machine."""
    return rf"^(?:import|from) +(?:{_modules(*(one for one, of in _PATCHES.items() if of == kind))})\b"


_SIGNS = (
    ("tpu", r"^(?:import|from) +torch_(?:tpu|xla)\b|\bTPU\w{0,60}Config\b|^\[tpu\w*\]"
            r"|\buse_splash_attention\w{0,40}[ \t]*=[ \t]*true|\bPJRT_DEVICE=TPU"),
    ("npu", _imports("npu") + r"|^[ \t]*(?:export +)?(?:ASCEND|HCCL)_\w+=|ascend-toolkit\S{0,100}set_env"
            r"|^(?![ \t]*#).*--distributed-backend[ =]hccl"),
    ("hpu", _imports("hpu") + r"|\buse_habana\b[^\n]{0,4}true|^[ \t]*(?:export +)?PT_HPU_\w+="),
    ("xpu", _imports("xpu") + r"|^[ \t]*(?:export +)?(?:ZE_AFFINITY_MASK|ONEAPI_DEVICE_SELECTOR|CCL_ZE_\w+)="),
    ("dcu", r"^#SBATCH +--gres[= ]dcu\b|^(?![ \t]*#).*\bhipprof\b"),
    ("neuron", r"^(?:import|from) +(?:neuronx_distributed|optimum\.neuron|torch_neuronx)\b|^[ \t]*(?:export +)?NEURON_\w+="),
)  # fmt: skip
"""What only files of these machines have: modules, classes, variables of their runtimes."""
MOST_PARTS = 5
"""Parts of a path that are looked at, from its end."""


def other_machines(path: Path, found: Reading) -> tuple[str, ...]:
    """A note where a file is for machines that are no GPUs of NVIDIA or AMD, and names no hardware that a plan has."""
    kind = None if found.hardware else _kind(path, "\n".join([read_text(path), *found.unread]))
    if kind is None:
        return _by_a_program(path) if found.hardware is None and path.suffix in _SETTINGS else ()
    return (f"it is for {NAMES[kind]}: the GPUs of this plan are a stand-in, with kernels of GPUs; --hardware names others",)


_SETTINGS = (".yaml", ".yml", ".json", ".toml")
_PATCHED = re.compile(rf"^(?:import|from) +({_modules(*_PATCHES)})\b", re.MULTILINE)
MOST_BESIDE = 20


def _by_a_program(path: Path) -> tuple[str, ...]:
    """A note where a program in the folder of a file of settings imports one of them."""
    programs = sorted(path.resolve().parent.glob("*.py"))[:MOST_BESIDE]
    for file in programs:
        if (found := _PATCHED.search(read_text(file))) is not None:
            kind = NAMES[_PATCHES[found[1]]]
            what = f"{file.name} next to it imports {found[1]}: if that trains, it is for {kind}: this plan's GPUs are a stand-in"
            why = "its own formats of low bits are not priced, and where its attention keeps all scores memory comes out too low"
            return (f"{what}: {why}",)
    return ()


_NAMED = re.compile(r"(?:^|,)(?:gpu:)?([A-Za-z][\w.-]*):\d")
"""The name in --gres=gpu:a100:4 and in --gpus-per-node=mi250:8."""


def by_batch(path: Path, found: Reading) -> Reading:
    """A reading with the GPUs that a script asks its batch system for by name, where nothing else names them."""
    asked = batch_options(read_text(path)) if found.hardware is None else {}
    for option in ("gres", "gpus-per-node", "gpus-per-task", "gpus"):
        if (named := _NAMED.search(asked.get(option, ""))) is None:
            continue
        try:
            profile = profile_named(named[1])
        except PlannerError:  # a partition's own word, or a card that is not in the library
            return found
        note = f"hardware {profile}: by #SBATCH --{option}={asked[option]}; --hardware names another"
        return replace(found, hardware=profile, notes=(*found.notes, note))
    return found


def _kind(path: Path, text: str) -> str | None:
    """The word of NAMES that a file is of: its own words first, then its folders and name."""
    for kind, sign in _SIGNS:
        if re.search(sign, text, re.MULTILINE):
            return kind
    both = path.suffix == ".py" and "cuda" in text  # a program that runs on either
    if not both and (said := _VALUE.search(text) or _SWITCH.search(text)):
        return said[1].lower()
    there = next((one for part in path.parts[-MOST_PARTS:] if (one := _FOLDER.search(part))), None)
    return there[1].lower() if there else None


def require_gpus(given: Settings) -> None:
    """Raises OtherMachineError where arguments of transformers say that it trains on something else."""
    for name in ("use_cpu", "no_cuda", "use_mps_device"):
        if given.flag(name):
            what = f"it trains on {'Apple GPUs' if 'mps' in name else 'CPUs'}, which no plan is for"
            raise OtherMachineError(f"{given.where(name)}: {what}; --set {name}=false imports the job for GPUs")
