"""Programs and notebooks in Python that hand settings to a trainer which takes them from a file: json.dump(args, ...), yaml.dump, a
text that is written, and the arguments of its functions. Nothing is executed."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.trainers import load
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.running import Running
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.shell.text import shown_text
from planner.trainers.reading.values import read_text

STARTS = {
    "llama-factory": re.compile(r"\bllamafactory-cli[\\\"', ]+train\b|\brun_exp\("),
    "axolotl": re.compile(
        r"\baxolotl[\\\"', ]+train\b|\baxolotl\.cli\.train\b"
        r"|(?m:(?:^|\\n|\")[ \t]*from +axolotl\.[\w.]+ +import [^\n]*\b(load_cfg|DictDefault)\b)"
    ),
    "ms-swift": re.compile(r"\b(sft|pt|rlhf)_main\("),
}
"""Trainer -> what starts it, as a command or as a function."""
OWN = {"llama-factory": {"dataset", "finetuning_type"}, "axolotl": {"base_model", "datasets"}, "ms-swift": {"model"}}
"""Settings that such a mapping has, and those of an export or of a chat have not."""
DUMPS = ("dump", "safe_dump", "dumps", "write", "write_text", "safe_load", "run_exp")
CHECKS = ("load_cfg", "validate_config")
"""Functions of axolotl that take its settings as a mapping: where a program calls them, they count alone."""
SHOWN = re.compile(r"(?m)^[^#\n]{0,200}\bCUDA_VISIBLE_DEVICES[\\\"'\]]*\s*=\s*[\\\"']*(\d(?:,\d)*)(?![\d,])")
ARGUMENTS = {
    "TrainArguments": "sft", "SftArguments": "sft", "PretrainArguments": "pt", "PtArguments": "pt", "RLHFArguments": "rlhf",
}  # fmt: skip
"""Classes of ms-swift -> what they start."""


def starts(text: str) -> str | None:
    """The trainer that a program starts so; None = none."""
    return next((one for one, start in STARTS.items() if start.search(text)), None)


def read(path: Path, name: str, said: Given) -> Reading:
    """The job of the settings that a program hands to the trainer of that name. Raises PlannerError."""
    found = [one for one in _mappings(Running(path, said), name) if one[0] or OWN[name] <= one[1].keys()]
    if not found:
        what = "settings that are not followed to here; import the file that it names or writes, with --set for what it changes"
        raise PlannerError(f"{path}: it starts {name} with {what}")
    mode, data = found[0]
    settings, parse = Settings(path, said.filled(data), said=said), load(name, "readback").parse
    text = read_text(path)
    own = name == "axolotl" or "llamafactory-cli" in text  # a command that starts as many processes as there are GPUs
    shown = {len(one.split(",")) for one in SHOWN.findall(text)}
    gpus = said.num_gpus or (shown.pop() if len(shown) == 1 and (own or shown == {1}) else None)
    more = {"script": True} if name == "llama-factory" and own else {}
    reading: Reading = parse(settings, *([mode] if name == "ms-swift" else []), gpus, **more)
    several = (f"of {len(found)} settings of trainings, the first are read",) * any(one != found[0] for one in found)
    return dataclasses.replace(reading, notes=(*several, *reading.notes))


def _mappings(script: Running, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what it starts, settings) of the calls that may run, in the order of the text."""
    for call in script.calls(*CHECKS) or script.calls(*DUMPS, *ARGUMENTS):
        if (mode := ARGUMENTS.get(last_name(call.func))) is not None:
            yield mode, script.keywords(call)
            continue
        value = script.value(call.args[0]) if call.args else None
        if isinstance(value, str) and re.search(r"(?m)^(base_model|finetuning_type|stage):", value):
            try:
                value = library.parse_yaml(value, shown_text(name))
            except PlannerError:
                continue
        if isinstance(value, dict):
            made = script.calls("DictDefault") if last_name(call.func) in CHECKS else []
            later = [script.set_on(one) for one in made]  # cfg.micro_batch_size = 2
            if len(made) > 1 and any(later):
                what = "several DictDefault that are changed later; import a file with the settings of one training"
                raise PlannerError(f"{script.path}: {what}")
            own = script.keywords(call) if last_name(call.func) in CHECKS else {}
            value = {**value, **(later[0] if later else {}), **own}
            yield "", {str(key): one for key, one in value.items()}
