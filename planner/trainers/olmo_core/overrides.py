"""Options that scripts of OLMo-core take over their configuration, --train_module.rank_microbatch_size=16384, and the commands that
start a script with them.  [ai2-olmo-core 3.0: config.py, Config.merge; internal/experiment.py; launch/beaker.py]"""

import ast
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.trainers.olmo_core import FORM
from planner.trainers.olmo_core.parallel_parts import NODE
from planner.trainers.reading.commands import launched, processes
from planner.trainers.reading.given import Given, Question, value_of
from planner.trainers.reading.programs import MOST_PROGRAMS, program_file
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.settings import parsed
from planner.trainers.reading.shell import evaluate, is_open, options, roots, words_of
from planner.trainers.reading.values import read_text

TOP = ("train_module", "model", "dataset", "data_loader", "trainer", "launch")
"""Sections of a configuration."""
NUMBERS = {
    "train_module.rank_microbatch_size": "rank_microbatch_size", "data_loader.global_batch_size": "global_batch_size",
    "model.vocab_size": "vocab_size",
}  # fmt: skip
"""What is read by a name of its own."""
LENGTHS = ("dataset.sequence_length", "data_loader.sequence_length", "train_module.max_sequence_length")
CLASSES = {
    "dp_config": "TransformerDataParallelConfig", "tp_config": "TransformerTensorParallelConfig",
    "cp_config": "TransformerContextParallelConfig", "ep_config": "TransformerExpertParallelConfig",
    "pp_config": "TransformerPipelineParallelConfig", "ac_config": "TransformerActivationCheckpointingConfig",
    "float8_config": "Float8Config",
}  # fmt: skip
MODULES = ("TransformerTrainModuleConfig", "TransformerPipelineTrainModuleConfig")
OPTIMIZERS = re.compile(r"\w*(Adam\w*|Lion|Muon|Dion|Adafactor)Config")
QUIET = re.compile(
    r"(trainer|launch)\..*|dataset\.(?!sequence_length).*|data_loader\.(?!global_batch_size|sequence_length).*"
    r"|train_module\.(scheduler|z_loss_multiplier|max_grad_norm|label_ignore_index|state_dict|load_key|optim\.(?!dtype)).*"
    r"|model\.(.*\.)?(backend|use_flash|attn_backend|theta|init_\w+|eps|fused\w*|layer_norm\w*|name)"
)
"""Options that change neither time nor memory, or that no plan holds."""


def read_as(said: Given) -> Given:
    """What is said with OLMo-core's names as well as with those that are asked for."""
    named = {name: text for name, text in said.settings.items() if name.partition(".")[0] in TOP and "." in name}
    if not named:
        return said
    said.used.update(named)
    numbers = {NUMBERS[name]: _whole(text) for name, text in named.items() if name in NUMBERS}
    lengths = [_whole(named[name]) for name in LENGTHS if name in named]
    length = next((int(one) for one in lengths if re.fullmatch(r"\d{1,9}", one)), None)
    nodes, each = named.get("launch.num_nodes"), named.get("launch.num_gpus", str(NODE))
    gpus = int(nodes) * int(each) if nodes and re.fullmatch(r"\d{1,5}", nodes) and re.fullmatch(r"\d{1,5}", each) else None
    return dataclasses.replace(
        said, settings={**numbers, **said.settings}, sequence_length=said.sequence_length or length, num_gpus=said.num_gpus or gpus
    )


def _whole(text: str) -> str:
    """A number without underscores."""
    return text.replace("_", "") if re.fullmatch(r"\d[\d_]*", text) else text


def laid_over(tree: ast.Module, settings: Mapping[str, str]) -> ast.Module:
    """The tree of a script with the keywords that options change; what is changed inside of a model stands as an assignment behind
    all, as the script would do it itself."""
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call)]
    for name, text in settings.items():
        top, _, rest = name.partition(".")
        if top not in ("train_module", "model") or name in (*NUMBERS, *LENGTHS) or QUIET.fullmatch(name):
            continue
        part, _, inner = rest.partition(".")
        value = ast.parse(repr(value_of(text)), mode="eval").body
        if top == "model" and rest == "n_layers":
            _set([one for one in calls if last_name(getattr(one.func, "value", one)) == "TransformerConfig"], rest, value)
        elif top == "model":
            _behind(tree, name, text)
        elif not inner:
            _set([one for one in calls if last_name(one.func) in MODULES], part, value)
        else:
            owners = (last_name(one.func) for one in calls)
            fits = [one for one, owner in zip(calls, owners, strict=True)
                    if (OPTIMIZERS.fullmatch(owner) if part == "optim" else _makes(one, CLASSES.get(part)))]  # fmt: skip
            if not fits and not _made(calls, part, inner, value):
                _behind(tree, name, text)
            _set(fits, inner, value)
    return tree


def _behind(tree: ast.Module, name: str, text: str) -> None:
    """An assignment behind all, as the script makes it of an option."""
    line = max((getattr(one, "lineno", 1) for one in ast.walk(tree)), default=1) + 1
    late = ast.parse(f"config.{name} = {value_of(text)!r}").body if re.fullmatch(r"\w+(\.\w+)*", name) else []
    tree.body += [ast.increment_lineno(one, line) for one in late]


def _made(calls: list[ast.Call], part: str, inner: str, value: ast.expr) -> bool:
    """Whether a part that the script does not build is one of those that are known: it is built with what the option says."""
    modules = [one for one in calls if last_name(one.func) in MODULES]
    said = [word.value for one in modules for word in one.keywords if word.arg == part]
    if part not in CLASSES or "." in inner or any(not (isinstance(one, ast.Constant) and one.value is None) for one in said):
        return False
    _set(modules, part, ast.Call(func=ast.Name(id=CLASSES[part], ctx=ast.Load()), args=[], keywords=[ast.keyword(inner, value)]))
    return True


def _makes(call: ast.Call, name: str | None) -> bool:
    """Whether a call makes an object of a class, by itself or by one of its own functions."""
    return name is not None and name in (last_name(call.func), last_name(getattr(call.func, "value", call.func)))


def _set(calls: list[ast.Call], name: str, value: ast.expr) -> None:
    for call in calls:
        call.keywords = [one for one in call.keywords if one.arg != name]
        placed = [ast.copy_location(one, call) for one in ast.walk(ast.keyword(arg=name, value=value))]
        call.keywords.append(placed[0])  # type: ignore[arg-type]


def started(path: Path, said: Given) -> tuple[Path, Given, tuple[str, ...], list[Question]]:
    """The program that a command of a script starts, what its options say with what the user does, notes, and options that hang on
    what nobody says. Raises PlannerError where no program is there."""
    text = read_text(path)
    script = evaluate(text, str(path), said.settings, path.parent)
    program, name = _program(path, text, [word for one in script.commands for word in one.words])
    run = next((one for one in script.commands if name in one.words), None)
    line = re.search(rf"{re.escape(name)}(.*)", text)
    behind = run.words[run.words.index(name) + 1 :] if run else (line[1] if line else "").split()
    settings: dict[str, Any] = {}
    notes: list[str] = []
    gpus = processes(script, run) if run else None
    if run and any(word.startswith("-") or "=" in word for word in behind):
        found = launched(path, said, re.escape(name))
        plain = (word.partition("=") for word in found.words if "=" in word)  # Config.merge takes them without dashes too
        settings, gpus = {**found.settings, **{key.lstrip("+~"): parsed(value) for key, _, value in plain}}, found.num_gpus
        notes += found.notes
    elif re.search(r"\$[@*]", text):
        notes.append("options that the caller of the script gives it ($@) are not in the plan")
    given = {one: value for one, value in settings.items() if "." not in one or one.partition(".")[0] in TOP}
    deciding = [one for one in given if "." in one and not QUIET.fullmatch(one)]
    unknown = {one: str(given[one]) for one in given if isinstance(given[one], str) and is_open(given[one])}
    waits = {(roots(unknown[one]) or [one])[0]: one for one in deciding if one in unknown and one not in said.settings}
    asked = [Question(name=one, about=f"--{option}") for one, option in waits.items()]
    texts = {one: _text(value) for one, value in given.items() if one not in unknown}
    gpus = said.num_gpus or _by_beaker(run.words if run else [], name) or gpus
    if said.num_gpus is None and {"train_single", "--train-single", "launch"} & set(behind):
        gpus = None if "launch" in behind else 1  # what it launches itself on is its own word
    elif gpus is not None:
        texts = {one: text for one, text in texts.items() if not one.startswith("launch.")}
    if {"train_single", "--train-single"} & set(behind):  # drops both  [internal/experiment.py, script_utils.py]
        texts |= {"train_module.dp_config": "null", "train_module.tp_config": "null"}
        notes.append("train_single: without dp_config it computes in float32, but for autocast_precision")
    shown = [f"--{one}={texts[one]}" for one in deciding if one in texts]
    notes += [f"{program.name} with {', '.join(shown)[:300]}"] * bool(shown)
    return program, dataclasses.replace(said, settings={**texts, **said.settings}, num_gpus=gpus), tuple(notes), asked


def _program(path: Path, text: str, words: list[str]) -> tuple[Path, str]:
    """The program of OLMo-core that a script starts, and the word that names it."""
    names = dict.fromkeys([*words, *re.findall(r"[\w./-]{1,200}\.py\b", text)])
    for name in [one for one in names if one.endswith(".py")][:MOST_PROGRAMS]:
        file = program_file(path, name)
        if file is not None and re.search(FORM[1], read_text(file)):
            return file, name
    raise PlannerError(f"{path}: the program of OLMo-core that it starts is not there; import that program")


def _text(value: Any) -> str:
    return {True: "true", False: "false", None: "null"}.get(value, str(value)) if isinstance(value, bool | None) else str(value)


def _by_beaker(words: list[str], program: str) -> int | None:
    """GPUs that olmo_core.launch.beaker is asked for: --nodes and --gpus before the program."""
    before = words[: words.index(program)] if program in words else []
    if not any("launch.beaker" in word for word in before):
        return None
    said = {name: values[0] for name, values, _ in options(words_of(before)) if values}
    counts = [said.get("nodes", "1"), said.get("gpus", str(NODE))]
    return int(counts[0]) * int(counts[1]) if all(re.fullmatch(r"\d{1,5}", one) for one in counts) else None
