"""Files of settings that a Python script reads: yaml.safe_load(open(path)), OmegaConf.load(path), load_config(path)."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.trainers.reading.given import CONFIG_FILE, Given
from planner.trainers.reading.settings import beside, file_settings
from planner.trainers.reading.shell.text import CLOSE, gap, is_open, roots

READS = re.compile(
    r"(\w*yaml\w*|YAML\(.*\))\.(safe_load|load|full_load|unsafe_load)|json\.loads?|toml\w*\.loads?|OmegaConf\.load"
    r"|(?!get_mixed_precision)(\w+\.)*_?(load|read|parse|get)_(\w+_)?(config|cfg|settings|params|yaml|json|toml)(uration)?(_file|_from_\w+)?"
)
"""Functions that give what a file of settings says."""
PASSES = re.compile(
    r"(\w+\.)*(open|read|read_text|resolve|absolute|expanduser|abspath|realpath|to_container|create|deepcopy|as_posix)"
)
"""Functions that give what they are given, or what they are of, as far as a file of settings goes."""
HOLDERS = ("Namespace", "SimpleNamespace", "DictConfig", "EasyDict", "edict", "Box", "Munch", "AttrDict")
"""Classes that hold a mapping as it is."""
ENDINGS = (".yaml", ".yml", ".json", ".toml")


OF_THE_MODEL = {"r", "lora_r", "target_modules", "load_in_4bit", "load_in_8bit", "model_name_or_path", "max_seq_length"}
"""Keys of sections that decide the job beside the arguments of a trainer."""


def require_no_sections(path: Path, data: Mapping[str, Any]) -> None:
    """Raises PlannerError where sections of its own say what a program makes of the model."""
    if apart := [name for name, one in data.items() if isinstance(one, Mapping) and OF_THE_MODEL & one.keys()]:
        what = f"its sections {', '.join(apart)} say what a program of its own makes of the model"
        raise PlannerError(f"{path}: {what}; import that program")


class FileSettings(dict[str, Any]):
    """What a file of settings says, or a section of it."""


def settings_in(script: Path, name: Any, said: Given) -> Any:
    """What the file says that a script at ``script`` reads, or the one that ``said`` names in its place; a gap where it is not
    there."""
    answer = said.setting(CONFIG_FILE)
    text = str(name) if answer is None else answer
    known = re.sub(f".*{CLOSE}[/\\\\]*", "", text)  # what is open is its root
    file = beside(script, known, ENDINGS) if known.lower().endswith(ENDINGS) else None
    if file is None:
        if answer is not None:
            raise PlannerError(f"--set {CONFIG_FILE}: {known[:200]} is no file in YAML, JSON or TOML")
        return gap([CONFIG_FILE])
    return FileSettings(file_settings(file, "a file of settings"))


def waits(value: Any) -> bool:
    """Whether a value is what a file would say that is not there."""
    return isinstance(value, str) and CONFIG_FILE in roots(value)


def reads(node: ast.Call, name: str, value: Any) -> bool:
    """Whether a call reads a file of settings; ``value`` of its first argument."""
    named = isinstance(value, str) and (is_open(value) or value.lower().endswith(ENDINGS))
    return named and READS.fullmatch(name or ast.unparse(node.func)[:200]) is not None
