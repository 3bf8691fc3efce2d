"""Machines other than GPUs, by the words of a file of any trainer: what is to be said of a plan that prices GPUs in their place."""

import ast
import re
from dataclasses import replace
from pathlib import Path

from planner.errors import PlannerError
from planner.hardware.names import profile_named
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import OtherMachineError
from planner.trainers.reading.python_text import keyword, last_name, tree_or_none
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


_TRAINS = re.compile(r"\.train\(|Trainer\(|\b(axolotl|torchrun|accelerate|deepspeed|tune run|llamafactory-cli)\b")


def of_modal(path: Path) -> tuple[str | None, int | None, str]:
    """(Profile, GPUs, the program that says them) of the container that Modal runs a training in, @app.function(gpu="H100:4"): of
    a program, or of one that names a file of settings, next to it or above; where two differ none."""
    folder = path.resolve().parent
    near = sorted([*folder.glob("*.py"), *folder.parent.glob("*.py")])[:MOST_BESIDE] if path.suffix in _SETTINGS else []
    files = [path] if path.suffix == ".py" else [one for one in near if one.is_file() and path.name.encode() in one.read_bytes()]
    said: dict[tuple[str, int | None], str] = {}
    for file in (one for one in files if b"modal" in one.read_bytes()):
        tree = tree_or_none(file) or ast.Module(body=[], type_ignores=[])
        held = {ast.unparse(one.targets[0]): one.value for one in tree.body if isinstance(one, ast.Assign)}
        homes = (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.ClassDef) and one.decorator_list)
        for home in (one for one in homes if _TRAINS.search(ast.unparse(one))):
            calls = [one for one in home.decorator_list if isinstance(one, ast.Call)]
            alone = all(last_name(one.func) != "clustered" for one in calls)
            for value in (one for call in calls for one in keyword(call, "gpu")):
                card, count = _container(ast.unparse(held.get(ast.unparse(value), value)))
                said[card, count if alone else None] = file.name
    (card, count), name = next(iter(said.items())) if len(said) == 1 else (("", None), "")
    try:
        return profile_named(card) if card else None, count, name
    except PlannerError:
        return None, count, name


def _container(text: str) -> tuple[str, int | None]:
    """(Card, number) of what Modal is asked for: 'H100:4', modal.gpu.A100(size='80GB', count=2), the first of a list."""
    text = text.strip("[]()").split("', ")[0] if text[:1] in "[(" else text
    card, size = re.search(r"^f?'([\w-]+)|\bgpu\.(\w+)", text), re.search(r"size='(\w+)'", text)
    count = re.search(r"(?:count=|:)([^,')]+)", text)
    if card is None:
        return "", None
    name, number = (card[1] or card[2]) + (f"-{size[1]}" if size else ""), count[1] if count else "1"
    return name, int(number) if number.isdecimal() else None


def on_modal(path: Path, found: Reading) -> Reading:
    """The reading on the card that Modal is asked for."""
    card, count, name = of_modal(path)
    if card is None or found.hardware:
        return found
    number = f", which asks Modal for {count}" if count else ", which Modal runs"
    return replace(found, hardware=card, notes=(*found.notes, f"hardware {card}: by gpu= of {name}{number}"))
