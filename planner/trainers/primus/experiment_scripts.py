"""Scripts that start an experiment of Primus: EXP or --config names its file, further options go over its overrides."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import shown
from planner.trainers.megatron.arguments import decides
from planner.trainers.reading.given import CONFIG_FILE, Given, Question, ask
from planner.trainers.reading.settings import beside, parsed
from planner.trainers.reading.shell import Script, evaluate, is_open, options, words_of
from planner.trainers.reading.shell.text import gap, roots, shown_text
from planner.trainers.reading.values import read_text

_SCRIPT = r"\brun_(?:slurm_|local_|k8s_)?pretrain(?:_cli)?\.sh"
PROGRAM = re.compile(rf"(\S*/)?{_SCRIPT}\.own|(pre|post)train|(\S*/)?primus/train\.py")
"""What stands before the options of the experiment: its scripts, the command of its client, its older program."""
PLACE = re.compile(r".*(path|dir|folder)|tokenizer_model|save|load|workspace|exp_name|user_name|work_group")
"""Keys of an experiment that decide neither time nor memory: a variable there needs no value."""
DUMPS, EDITORS, IN_PLACE = re.compile(r"\byaml\.(safe_)?dump\b"), re.compile(r"\b(yq|sed)(?=\s)"), re.compile(r"\s-i\b")
"""Commands that may change the file before it is read."""


def started(path: Path, said: Given) -> tuple[Path, Given, dict[str, Any], tuple[str, ...]]:
    """(The experiment of a script, what is said with values of the script's variables, overrides of its command, notes). Raises
    PlannerError, OpenQuestionsError for what is open."""
    text = read_text(path)
    own = re.sub(_SCRIPT, r"\g<0>.own", text)  # a name that is no file's: its own long scripts are not followed
    script = evaluate(own, str(path), said.settings, path.parent)
    said.used.update(said.settings.keys() & script.variables.mentioned)
    words = [one.words[max(places) + 1 :] for one in script.commands if (places := _places(one.words))]
    words = words or [one.words for one in script.commands if one.words[0] in ("bash", "sh") and _deciding(one.words) > 1]
    over, waiting = _overrides(words[-1] if words else [])
    named = over.pop("config", None) or over.pop("exp", None) or script.variables.text("EXP") or gap(["EXP"])
    answer = said.setting(CONFIG_FILE)
    file = beside(path, answer or str(named), (".yaml", ".yml")) if answer or not is_open(str(named)) else None
    if file is None:
        about = f"its experiment {shown(shown_text(str(named)))} is not there; or import that file"
        waiting.append(Question(name=CONFIG_FILE, about=about, choices=("FILE",)))
    filled, open_ = _of_variables(script, file, said)
    before = [one.words[: max(places)] for one in script.commands if (places := _places(one.words))]
    gpus = said.num_gpus or _gpus(script, before[-1] if before else [])
    waiting += open_ + [Question(name="--gpus N", about="how many GPUs run it")] * (gpus is None)
    if waiting or file is None:
        ask(str(path), list({one.name: one for one in waiting}.values()))
    note = f"{file.name}: the script may change it before Primus reads it (sed, yq or Python), which is not followed"
    several = "it starts several trainings; the last is read" if len({tuple(one) for one in words}) > 1 else ""
    notes = tuple(one for one in (note if _edits(text) else "", several) if one)
    return file, dataclasses.replace(said.with_settings(filled), num_gpus=gpus), over, notes


def _edits(text: str) -> bool:
    """Whether a script writes YAML, or has an editor of files with -i somewhere behind it."""
    editor = EDITORS.search(text)
    return DUMPS.search(text) is not None or (editor is not None and IN_PLACE.search(text, editor.end()) is not None)


def _places(words: list[str]) -> list[int]:
    return [place for place, word in enumerate(words) if PROGRAM.fullmatch(word)]


def _deciding(words: list[str]) -> int:
    return sum(decides(name.replace("-", "_")) for name, _, _ in options(words_of(words)))


def _overrides(words: list[str]) -> tuple[dict[str, Any], list[Question]]:
    """Options by name, nested where they have dots; questions for those that decide and are open."""
    found: dict[str, Any] = {}
    waiting: list[Question] = []
    pairs = [(name, values) for name, values, _ in options(words_of(words))]
    pairs += [(pair[1], [pair[2]]) for word in words if (pair := re.fullmatch(r"([\w.]+)=(.*)", word))]
    for name, values in pairs:
        *sections, last = name.replace("-", "_").split(".")
        value = values[0] if values else "true"
        if is_open(value) and last not in ("config", "exp"):
            if decides(last) or sections:
                waiting += [Question(name=one, about=f"--{name}") for one in roots(value)]
            continue
        part = found
        for one in sections:
            part = part.setdefault(one, {})
        part[last] = None if value in ("None", "null") else parsed(value)
    return found, waiting


def _of_variables(script: Script, file: Path | None, said: Given) -> tuple[Mapping[str, str], list[Question]]:
    """What is said, with the script's values of variables that the experiment takes from its environment."""
    found, waiting = dict(said.settings), []
    lines = [one.partition(":") for one in read_text(file).splitlines()] if file is not None else []
    deciding = "\n".join(value for key, _, value in lines if not PLACE.fullmatch(key.strip()))
    for name in dict.fromkeys(re.findall(r"\$\{(\w+)", deciding)):
        value = script.variables.text(name)
        if name in found or value is None:
            continue
        if is_open(value):
            waiting += [Question(name=one, about=f"{name} of {file.name if file else ''}") for one in roots(value)]
        else:
            found[name] = value
    return found, waiting


def _gpus(script: Script, before: list[str]) -> int | None:
    """NNODES nodes of GPUS_PER_NODE each, 1 of 8 as examples/run_pretrain.sh has them, or those of what starts it; None = open."""
    flags = {name: values[0] for name, values, _ in options(words_of(before)) if values}
    said = (flags.get("N"), flags.get("nodes"), script.variables.text("NNODES"), script.batch.get("nodes"), "1")
    texts = [next(one for one in said if one), script.variables.text("GPUS_PER_NODE") or "8"]
    return int(texts[0]) * int(texts[1]) if all(re.fullmatch(r"[1-9]\d{0,4}", one) for one in texts) else None
