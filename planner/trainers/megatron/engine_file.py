"""DeepSpeed's configuration beside the arguments of Megatron-DeepSpeed: its engine takes sharding, offload, precision and batch
from there, whatever the command says.  [deepspeed/runtime/engine.py; runtime/pipe/engine.py, train_batch]"""

import re
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, shown
from planner.trainers.megatron.arguments import Arguments
from planner.trainers.reading.fine_tuning import DECIDES
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.settings import JSON, beside, file_settings
from planner.trainers.reading.sharding import deepspeed
from planner.trainers.reading.shell import Script, is_open, shown_text
from planner.trainers.reading.shell.text import CLOSE
from planner.trainers.reading.values import read_text

_SUBSTITUTED = re.compile(r"s([/|#,])(\w{1,80})\1(.{0,200}?)\1g?")
"""An edit of sed."""
_WRITTEN = re.compile(r"[\"'](zero_optimization|fp16|bf16|train_batch_size|train_micro_batch_size_per_gpu)[\"']\s*:")
"""A key of DeepSpeed's configuration."""
_STAGE = re.compile(r"\"stage\"\s*:\s*\"?(\d)")


def edited(script: Script, directory: Path | None, notes: list[str]) -> list[str]:
    """Templates of DeepSpeed's configuration with what sed of the script puts into their places; of one that is not there, what its
    place for the stage gets, with a note."""
    edits: dict[str, str] = {}
    templates: list[str] = []
    for words in script.edits:
        edits |= {one[2]: one[3] for word in words if (one := _SUBSTITUTED.fullmatch(word))}
        templates += [word for word in words if word.endswith(JSON)]
    ends = ["/" + one.rpartition(CLOSE)[2].lstrip("/") if CLOSE in one else one for one in templates]  # by its end alone
    files = [beside((directory or Path()) / "script", one) for one in ends]
    if edits and not any(files):
        if templates and any(name.endswith("STAGE") for name in edits):
            named = shown(shown_text(templates[-1].rpartition("/")[2]))
            notes.append(
                f"DeepSpeed's configuration is made by sed of {named}, which is not found from here: only its stage is read, and "
                "nothing is offloaded, whatever else it holds"
            )
        return [f'{{"zero_optimization": {{"stage": {value}}}}}' for name, value in edits.items() if name.endswith("STAGE")][:1]
    texts = [read_text(one) for one in files if one is not None]
    places = re.compile("|".join(sorted(map(re.escape, edits), key=len, reverse=True)) or r"(?!)")
    return [places.sub(lambda place: edits[place[0]], text) for text in texts]


def take(found: Arguments, given: Given) -> None:
    """Says in arguments what DeepSpeed's configuration says; leaves a question where it is not there and no argument says the
    stage. Raises PlannerError for what it holds that is not modelled."""
    named = found.get("deepspeed_config")
    if named is None or found.dumped:
        return
    data = _configuration(found, str(named))
    if data is not None:
        _over(found, given, data)
        return
    written = next((one for text in found.documents if (one := _STAGE.search(text))), None)
    if written is not None:
        found.setdefault("zero_stage", written[1])
    elif found.get("zero_stage") is not None:
        host = "optimizer states are on the host, by --cpu-optimizer" if found.get("cpu_optimizer") else "nothing is offloaded"
        found.notes.append(f"DeepSpeed's configuration is not there: {host}, and the rest is as the arguments say it")
    waits = found.questions and any(is_open(text) and _WRITTEN.search(text) for text in found.documents)  # what is open fills it
    if found.get("zero_stage") is None and not waits:
        about = (
            f"DeepSpeed's, it is {shown(shown_text(str(named)))}, which is not there; or say --set zero_stage=0 (1, 2, 3) where it "
            "offloads nothing"
        )
        found.questions = [one for one in found.questions if one.name != "zero_stage"]
        found.questions.append(Question(name="deepspeed_config", about=about, choices=("FILE",)))


def _configuration(found: Arguments, named: str) -> dict[str, Any] | None:
    for text in found.documents:
        try:
            data = library.parse_json(text, found.where)
        except PlannerError:
            continue
        if isinstance(data, dict) and {"zero_optimization", "fp16", "bf16", "train_batch_size"} & data.keys():
            return data
    if any(_WRITTEN.search(text) for text in found.documents):  # the script writes it anew
        return None
    end = named.rpartition(CLOSE)[2].lstrip("/")  # behind a folder that a command finds
    file = beside(Path(found.where), end) if end else None
    return None if file is None else file_settings(file, "a DeepSpeed configuration")


def _over(found: Arguments, given: Given, data: dict[str, Any]) -> None:
    """Replaces arguments by what the engine takes instead."""
    says = deepspeed(data, Path(found.where), "deepspeed_config")
    found.engine = {name: value for name, value in says.fields.items() if name != "zero"}
    off = ("false", "0", "none", "null")
    unread = [one.removeprefix("deepspeed_config: ") for one in says.unread]
    decides = [one for one in unread if DECIDES.fullmatch(one.partition(" = ")[0].lower())]
    decides = [one for one in decides if one.partition(" = ")[2].strip("'").lower() not in off]
    if decides:
        short = "; sequences are short at first, and the plan is of the full length" if "curriculum" in " ".join(decides) else ""
        found.notes.append(f"DeepSpeed's configuration: {', '.join(decides)[:200]} is not in the plan{short}")
    stage, flag = str(says.fields["zero"]), found.get("zero_stage")
    if "zero_optimization" in data or flag is None:
        found["zero_stage"] = stage
        if str(flag or stage) != stage:
            found.notes.append(f"zero {stage} by DeepSpeed's configuration, which goes before --zero-stage {flag}")
    said = "fp16" if found.get("fp16") else "bf16" if found.get("bf16") else ""
    if says.precision and said != says.precision:
        before = f"--{said}" if said else "the arguments"
        found.notes.append(f"{says.precision} by DeepSpeed's configuration, which goes before {before}")
        found.pop(said, None)
        found[says.precision] = True
    full = found.get("bf16") and stage in ("0", "1")  # BF16_Optimizer, whose fp32 gradients are priced
    found.notes += [one for one in says.notes if not (full and one.startswith("data_types.grad_accum_dtype"))]
    own = data.get(said)
    if not says.precision and isinstance(own, dict) and own.get("enabled") is False and said not in given.settings:
        about = f"DeepSpeed's configuration turns {said} off, --{said} on: it starts with neither; false is fp32"
        found.questions.append(Question(name=said, about=about, choices=("true", "false")))
    if given.global_batch_size is None:
        _same(found, "global_batch_size", "--global-batch-size B", says.batch)
    if given.micro_batch_size is None:
        _same(found, "micro_batch_size", "--micro-batch-size M", says.micro_batch_size)


def _same(found: Arguments, name: str, flag: str, value: int | None) -> None:
    """Takes a batch of DeepSpeed's configuration; asks where an argument says another one."""
    if value is None or is_open(str(found.get(name, ""))):
        return
    if str(found.setdefault(name, str(value))) != str(value):
        about = f"DeepSpeed's configuration says {value}, {found.spelled(name)} {found[name]}"
        found.questions.append(Question(name=flag, about=about))
