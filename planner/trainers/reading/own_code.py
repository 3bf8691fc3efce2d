"""What the program of a command does itself: its calls of transformers and PEFT, with the options that the command gives it.
Nothing is executed."""

import ast
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.trainers.reading.accelerators import STEPS, is_handed_on
from planner.trainers.reading.configuration import NEEDED
from planner.trainers.reading.derived import classes_of, kinds_of
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.idle_words import idle_words
from planner.trainers.reading.lengths import IDLE, cuts, unused
from planner.trainers.reading.own_classes import UNSLOTH, adds_layers, held_classes, model_loads
from planner.trainers.reading.own_flow import passed_over
from planner.trainers.reading.own_parts import (
    SIZES,
    attention_put,
    held_by,
    of_own_switch,
    other_sizes,
    parts_of,
    put_by,
)
from planner.trainers.reading.own_passes import classes_made, held
from planner.trainers.reading.own_programs import is_of_unsloth
from planner.trainers.reading.programs import (
    program_file,
    require_transformers,
    shards_itself,
    takes_training_arguments,
    usual_options,
)
from planner.trainers.reading.python import Script
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.running import WithModules
from planner.trainers.reading.script_parts import BATCH, CHECKPOINTS, cut_length, derived_from, switched_on
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.shell.text import gap, is_open
from planner.trainers.reading.steps import objective_of
from planner.trainers.reading.training_arguments import DOUBLED, LENGTHS, MODES, RANKS, TARGETS, WHOLE
from planner.trainers.reading.training_arguments import SWITCHES as ADAPTERS
from planner.trainers.reading.training_scripts import (
    CONFIGS,
    FOREIGN,
    TRAINERS,
    adapters,
    loaded_by_trainer,
    model_arguments,
    own_steps,
    require_known_adapters,
    require_language_model,
    require_ours,
)
from planner.trainers.reading.unsloth_parts import of_parser
from planner.trainers.reading.values import read_text
from planner.trainers.reading.wrapped_loops import known_loop, loop_of

OFF = ("bf16", "fp16", "gradient_checkpointing", "do_eval", "deepspeed", "fsdp", "load_in_8bit", "load_in_4bit")
"""Arguments of transformers that a program asks for and that are off where nothing is said."""
ASKED = (BATCH, "gradient_accumulation_steps")
"""Arguments that a program computes: they are asked for where it cannot be followed."""
MERGES = ("merge_and_unload", "merge_adapter")


class Program(WithModules):
    """A program with the options of its command."""

    def __init__(self, file: Path, options: Mapping[str, Any], gpus: int | None = None) -> None:
        said = {name: str(value) for name, value in options.items() if value is not None and (name, value) != ("local_rank", -1)}
        super().__init__(file, Given(num_gpus=gpus, settings=said))

    def _of_attribute(self, node: ast.Attribute) -> Any:
        """What the program itself puts over an option or its default, above and under conditions that are met: if args.qlora:
        args.lora = True."""
        here = [one for one in self._attributes.get(ast.unparse(node), ()) if one.home is self._home.get(id(node))]
        above = [one.value for one in here if one.line < node.lineno and one.value is not None]
        met = next((one for one in reversed(above) if self._holds(self._under.get(id(one), ((), ""))[0]) is not False), None)
        sure = met is not None and self._holds(self._under.get(id(met), ((), ""))[0])
        return self._value(met) if met is not None and sure else super()._of_attribute(node)


def take_program(given: Settings, path: Path, program: str, gpus: int | None = None) -> None:
    """What the program of a command takes or does, where the command says nothing or whatever it says; ``gpus``: processes."""
    file = program_file(path, program)
    require_transformers(path, file, given.data)
    _require_no_hydra(given, path, file)
    usual = usual_options(file)
    given.data = _spelled_out(given.data, usual, file)
    decided = any(given.data.get(one) is not None for one in (*ADAPTERS, *MODES, *RANKS, *WHOLE))
    by_rank = decided and not any(given.data.get(one) is not None for one in (*ADAPTERS, *MODES, *WHOLE))
    code = _followed(file, {**usual, **given.data}, gpus)
    own = {} if code is None else {**own_code(code, decided, by_rank), **loop_of(code, path)}
    given.late += own.pop("loop_questions", [])
    idle = set() if code is None else idle_words(code)
    whole = set() if code is None or not _trains_all(code) else {*ADAPTERS, *MODES, *RANKS, *TARGETS}
    said = given.said.settings.keys() if given.said is not None else set()
    gone = set() if code is None or is_of_unsloth(file) else unused(code, ({*usual, *given.data} & {*LENGTHS}) - said)
    told = tuple(IDLE.format(one, code.path.name) for one in sorted(gone & given.data.keys())) if code is not None else ()
    usual = {name: value for name, value in usual.items() if name not in idle | whole | gone}
    given.data = {name: value for name, value in given.data.items() if name not in whole | gone}
    given.data = {name: gap([name]) if name in idle and value is not None else value for name, value in given.data.items()}
    if code is not None and given.said is not None:
        given.late += own_steps(code, given.said)
    if code is not None and given.said is not None and given.said.model is None and (name := _own_model(code)):
        about = f"{code.path.name} builds {name} of its project, whose layers its arguments do not tell; the nearest preset"
        given.ask(Question(name="--model NAME", about=about))
    if code is not None:
        usual = _take_calls(given, code, file, usual, bool(own.get("use_bnb_nested_quant", True)))
        if "wrapped" in own:
            objective_of(given, program)  # another step is told of first
            given.program_notes = (*given.program_notes, *known_loop(code, True))
    if given.data.get("deepspeed") in (None, True, False) and (name := _engine_file(given)) is not None and _has_engine(file):
        given.data = {**given.data, "deepspeed": given.get(name)}
    elsewhere = file is None or (code is not None and not code.calls("from_pretrained", *TRAINERS))
    if elsewhere and given.data.get(BATCH) is None and _has_own_names(given.data):
        given.data = {**given.data, "gradient_checkpointing": gap(["gradient_checkpointing"])}
    if code is not None and cuts(code) and not any(one in LENGTHS for one in (*usual, *given.data, *own)):
        own |= cut_length(code)
    if "wrapped" in own and isinstance(own.get(STEPS), int):
        given.asked |= {one for one in given.data if "accum" in one}
    if given.data.get("deepspeed") is True and isinstance(own.get("deepspeed"), Mapping):  # made by the program, as its options say
        given.data = {name: value for name, value in given.data.items() if name != "deepspeed"}
    if shards_itself(file) and "wrapped" not in own:
        own["shards_itself"] = True
    if file is None and not decided and any(OWN_MODEL.fullmatch(one) for one in given.data):  # its other defaults are its own
        given.data = {**{name: gap([name]) for name in ("use_peft", "gradient_checkpointing")}, **given.data}
        given.late += [] if any(one in LENGTHS for one in given.data) else [NEEDED["sequence_length"]]
    elif file is None and not decided and (named := re.search(r"(?<![a-z])q?lora(?![a-z])", program.lower())):
        own["use_qlora" if named[0] == "qlora" else "use_peft"] = True  # its name is all there is
    by_unsloth = code is not None and any(of_unsloth(one) for one in code.calls("from_pretrained"))
    replaced = of_parser(code) if code is not None and by_unsloth else {}
    lengths = any(one in LENGTHS for one in (*usual, *given.data, *own)) or given.said is None or given.said.sequence_length
    if code is not None and not lengths and any(HANDS_ON.search(ast.unparse(one)) for one in code.calls("from_pretrained")):
        about = f"{code.path.name} hands max_seq_length to unsloth, which nobody says: samples are cut at what the model can take"
        given.late.append(dataclasses.replace(NEEDED["sequence_length"], about=about))
    if by_unsloth:  # what the program says under its options, whatever these are called
        own_words = (*(ADAPTERS if own.get("use_peft") is True else ()), "load_in_4bit", "load_in_8bit")
        given.data = {name: value for name, value in given.data.items() if name not in own_words or own.get(name, value) == value}
    given.usual = {**({BATCH: 8, **replaced} if takes_training_arguments(file) else {}), **usual, **own}
    given.asked |= set() if code is None else read_by(code, given.data)
    given.program_notes = (*given.program_notes, *told)


OWN_MODEL = re.compile(r"(hf_|base_|pretrained_)?model(_id|_path|_dir)?")
"""Names of programs of one's own for the model: arguments of transformers and TRL have another."""
HANDS_ON = re.compile(r"\bFast\w*Model\..*\bmax_seq_length=\w+\.max_seq_length\b")
"""A load of unsloth whose length is an argument; None is that of the model.  [unsloth, models/llama.py: from_pretrained]"""


def _take_calls(given: Settings, code: Program, file: Path | None, usual: dict[str, Any], nested: bool) -> dict[str, Any]:
    """What the calls of a program make of its model and its trainer, whatever its command says; its defaults without those that it
    hands to nobody. ``nested``: what it quantises with may be quantised again."""
    kinds = {*TRAINERS, *derived_from(code, TRAINERS)}
    variables = {one: names for one, names in held(code).items() if code.calls(one)}
    away = {one for names in variables.values() for one in names if one.endswith("Trainer")} - kinds - classes_of(code.tree).keys()
    trainers = code.calls(*kinds, *(one for one, names in variables.items() if not (kinds | away).isdisjoint(names)))
    what = f"which {code.path.name} trains with, is not there: what it changes of the step is not in the plan"
    given.program_notes = (*passed_over(code, trainers, SIZES), *(f"{one}, {what}" for one in sorted(away)))
    single = () if nested else DOUBLED  # its command may say what it hands to nobody
    parts = parts_of(code, trainers, model_loads(code))
    single = (*single, "use_liger") if of_own_switch(code, parts) else single
    usual = {name: value for name, value in usual.items() if name not in single}
    data = {name: value for name, value in given.data.items() if name not in single}
    given.data = {**data, **parts, **put_by(code, code.calls(*TRAINERS))}
    given.late += other_sizes(code, given.said) if given.said is not None else []
    built = {last_name(one.func).startswith("DPO") for one in code.calls(*TRAINERS)}
    made = [classes_made(variables, one) for one in trainers]
    derived = (kinds_of(code.tree, names) for names in made)
    built |= {True for kinds in derived if any(one.startswith("DPO") for one in kinds)}
    given.built = "" if len(built) != 1 else "dpo" if True in built else "lm"
    lean = [one for one in code.calls("from_pretrained") if of_unsloth(one)]
    here = is_of_unsloth(file)
    loads = [last_name(getattr(one.func, "value", one)) for one in lean if here or code.runs(one)]
    given.attention_put = attention_put(code, model_loads(code))
    given.calls = frozenset((*(name for names in made for name in names), *loads))
    if "gradient_checkpointing" in given.data and _checkpoints(code):
        given.data = {**given.data, "gradient_checkpointing": True}
    return usual


def _has_own_names(data: Mapping[str, Any]) -> bool:
    """Whether a program has a name of its own for its batch, and none that says whether it checkpoints."""
    own = any(re.fullmatch(r"(train_|micro_)?(batch_?size(_training)?|bsz)", one) for one in data)
    return own and not any("checkpointing" in one for one in data)


def _trains_all(program: Program) -> bool:
    """Whether a program that builds its trainer and loads its model makes no adapters, whatever words it takes for them, nor hands
    the model to a function that is not there, which may."""
    loads = model_loads(program)
    makes = r"(?i)\b(\w*lora\w*|\w*peft\w*|\w*adapters?)\(|\bpeft\w*=|\bPeftModel|\bunsloth"
    trains = bool(loads and program.calls(*TRAINERS)) and re.search(makes, _without_classes(program.tree)) is None
    return trains and not any(is_handed_on(program, one) for one in ast.walk(program.tree) if isinstance(one, ast.Assign))


def _without_classes(tree: ast.Module) -> str:
    """The text of what is no class of settings."""
    return "\n".join(ast.unparse(one) for one in tree.body if not (isinstance(one, ast.ClassDef) and one.decorator_list))


def _engine_file(given: Settings) -> str | None:
    """The option that names the configuration of DeepSpeed, beside none of transformers: as deepspeed.add_config_arguments has it,
    behind its switch, or as a program calls it that reads the file itself."""
    found = [one for one in given.data if ENGINE_FILES.fullmatch(one) and isinstance(given.data[one], str)]
    return next((one for one in found if one != "deepspeed_config" or given.get("deepspeed") is True), None)


ENGINE_FILES = re.compile(r"deepspeed_config(_path|_file)?|ds_config(uration)?(_path|_file)?|ds_file")


def _has_engine(file: Path | None) -> bool:
    """Whether a program may hand a configuration of DeepSpeed to its engine: one that is there and never does has none."""
    return file is None or re.search(r"deepspeed\.initialize\(|Trainer\(|Accelerator\(", read_text(file)) is not None


ABBREVIATED = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "gradient_checkpointing")
"""Arguments of transformers that people write by their beginnings."""


def _spelled_out(data: Mapping[str, Any], usual: Mapping[str, Any], file: Path | None) -> dict[str, Any]:
    """Options of a command by their whole names: argparse takes the beginning that one option alone has for that option."""
    text = read_text(file) if file is not None else "Parser"
    names = {*usual, *ABBREVIATED}
    found: dict[str, Any] = {}
    for name, value in data.items():
        whole = [one for one in names if one.startswith(name)]
        own = name in names or re.search(rf"\b{re.escape(name)}\b", text) is not None
        short = "Parser" in text and len(name) >= SHORTEST and len(whole) == 1 and not own and whole[0] not in data
        found[whole[0] if short else name] = value
    return found


SHORTEST = 4
"""Letters of a beginning that is taken for an option."""


def _own_model(program: Program) -> str | None:
    """The class of a language model that a program loads and its project defines, with layers of its own."""
    defined = {one.name for one in ast.walk(program.tree) if isinstance(one, ast.ClassDef)}
    named = (name for one in model_loads(program) for name in held_classes(program, one))
    return next((one for one in named if one in defined and adds_layers(program, one)), None)


def _require_no_hydra(given: Settings, path: Path, file: Path | None) -> None:
    """Raises PlannerError for a program whose settings stand in a configuration of hydra, under sections of its own."""
    name = given.get("config_name")
    if name is not None and file is not None and "@hydra.main" in read_text(file):
        said = f"{file.name} takes its settings from {shown(name)} of hydra, under sections of its own, which are not read"
        raise PlannerError(f"{path}: {said}")


def _followed(file: Path | None, options: Mapping[str, Any], gpus: int | None) -> Program | None:
    """A program under the options of its command; None where it is not there or is no Python."""
    try:
        text = read_text(file) if file is not None else ""
        off = [one for one in OFF if re.search(rf"^[ \t]+{one} = ", text, re.MULTILINE) is None]  # no variable of its own
        return Program(file, {**dict.fromkeys(off, False), **options}, gpus) if file is not None else None
    except PlannerError:
        return None


def of_unsloth(call: ast.Call) -> bool:
    """Whether a function of unsloth's classes is called."""
    return last_name(getattr(call.func, "value", call)) in UNSLOTH


def own_code(program: Program, decided: bool, by_rank: bool = False) -> dict[str, Any]:
    """Arguments that a program gives the libraries itself, as command lines name them; empty where it does not say.
    ``decided``: the command says whether adapters are trained; ``by_rank``: it says their rank alone."""
    require_known_adapters(program)
    require_ours(program, program.calls(*TRAINERS))
    _require_language_model(program)
    found: dict[str, Any] = {}
    made = program.calls(*CONFIGS)
    for call in ([one for one in made if any(word.arg == BATCH for word in one.keywords)] or made)[:1]:
        found |= program.keywords(call)
    trains = [one for one in program.calls("train") if "train" in ast.unparse(getattr(one.func, "value", one))]  # no model.train()
    loads = model_loads(program)
    loads = [one for one in loads if not program.behind(one, trains)] or loads  # one that is loaded then is merged, say
    loads = list({ast.unparse(one): one for one in reversed(loads)}.values())[::-1]  # once more where the first one fails
    sure = [one for one in loads if program.runs(one)]
    if len(sure) == 1 or len(loads) == 1:
        found |= model_arguments(program, sure or loads, of_unsloth((sure or loads)[0]), [])
    elif not loads:
        found |= loaded_by_trainer(program)
    if _checkpoints(program):
        found["gradient_checkpointing"] = True
    if _precomputes(program):
        found["without_reference"] = True
    known = {name: value for name, value in found.items() if value is not None and (name in ASKED or not _open(value))}
    if not program.calls(*TRAINERS) and switched_on(program):  # of a loop, under what is not known
        known.setdefault("gradient_checkpointing", gap(["gradient_checkpointing"]))
    return known | _own_adapters(program, decided, by_rank)


def _checkpoints(program: Program) -> bool:
    """Whether a call on the model switches checkpointing on, which no argument switches off again."""
    return switched_on(program) and any(program.runs(one) for one in program.calls(*CHECKPOINTS))


def _precomputes(program: Program) -> bool:
    """DPO whose trainer is given no reference model and has its log probabilities already, or takes none: one of the project's
    over the Trainer.  [TRL, DPOTrainer.__init__]"""
    own = [one for one in ast.walk(program.tree) if isinstance(one, ast.ClassDef) and one.name.endswith("DPOTrainer")]
    if any(_takes_no_reference(one) and program.calls(one.name) for one in own):
        return True
    made = [(program.keywords(one), one.args[1:2]) for one in program.calls("DPOTrainer")]
    return any(
        words.get("precompute_ref_log_probs") is True and words.get("ref_model") is None
        and all(program.value(one) is None for one in second) for words, second in made
    )  # fmt: skip


def _takes_no_reference(made: ast.ClassDef) -> bool:
    """Whether a class is a Trainer whose own __init__ has no place for a reference model."""
    starts = [one.args for one in made.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    names = {one.arg for each in starts for one in (*each.args, *each.kwonlyargs)}
    alone = [last_name(one) for one in made.bases] == ["Trainer"] and "model" in names
    return alone and not any("ref" in one.split("_") for one in names) and not any(one.kwarg for one in starts)


def _require_language_model(program: Program) -> None:
    """Raises PlannerError for a program whose step is another one, by what it builds whatever its options are."""
    for call in program.calls(*FOREIGN):
        if program.runs(call):
            name = FOREIGN[last_name(call.func)]
            raise PlannerError(f"{program.path}: {name} is not modelled; supervised fine-tuning and DPO are")
    require_language_model(program)


_OF_UPLOAD = re.compile(r"\bis_adapter_model\(")
"""Whether what a name stands for are adapters."""


def _own_adapters(program: Program, decided: bool, by_rank: bool) -> dict[str, Any]:
    """Adapters that a program makes or loads; a question where its conditions are not known and the command says nothing."""
    lean = [one for one in program.calls("get_peft_model") if of_unsloth(one)]
    lean = [one for one in lean if program.runs(one)] or ([] if program.calls("LoraConfig") else lean)
    made = lean or program.calls("LoraConfig")
    loaded = [] if program.calls(*MERGES) else [
        one for one in program.calls("from_pretrained") if last_name(getattr(one.func, "value", one)) == "PeftModel"
    ]  # fmt: skip
    if program.calls("get_peft_config"):  # use_peft of TRL says it, whose default is false; an upload of adapters is the exception
        loaded = [one for one in loaded if not any(map(_OF_UPLOAD.search, map(ast.unparse, program.conditions(one))))]
    if not (made or loaded):
        return {}
    sure = [one for one in made if program.runs(one) or any(program.either(one, other) for other in loaded)]
    sure = sure or [one for one in loaded if program.runs(one)]
    found = adapters(program, bool(lean), [] if lean else sure or made) if (sure or made) and (sure or made)[0] in made else {}
    known = {name: value for name, value in found.items() if not _open(value) and name != "use_peft"}
    if decided and not (sure and (by_rank or _always(program, sure))):
        return known
    return known | {"use_peft": True if sure else gap(["use_peft"])}


def _always(program: Program, made: list[ast.Call]) -> bool:
    """Whether a trainer is given adapters that are made, or they are put on the model, whatever the options of the command are."""
    if any(program.runs(one) and not program.conditions(one) for one in program.calls("get_peft_model")):
        return True
    puts = [one for one in ast.walk(program.tree) if isinstance(one, ast.Assign)]
    kept = [last_name(one.targets[0]) for one in puts]
    names = [last_name(one.targets[0]) for one in puts if one.value in made and not program.conditions(one.value)]
    given = [one.value for call in program.calls(*TRAINERS) for one in call.keywords if one.arg == "peft_config"]
    return any(one in made or (isinstance(one, ast.Name) and one.id in names and kept.count(one.id) == 1) for one in given)


def read_by(program: Program, options: Mapping[str, Any]) -> set[str]:
    """Options that the program passes on to the libraries, whatever it calls them, also in calls that are not made, or makes such
    calls under."""
    takers = ("LoraConfig", "get_peft_model", "BitsAndBytesConfig", *CONFIGS, "from_pretrained", "Accelerator", "DataLoader")
    calls = Script.calls(program, *takers)
    given_on = [word for one in Script.calls(program, "initialize") for word in one.keywords]
    engines = [held_by(program, one.value) for one in given_on if str(one.arg).startswith("config")]
    calls += [one for one in engines if isinstance(one, ast.Call)]
    given: list[ast.AST] = [node for call in calls for node in (*call.args, *(one.value for one in call.keywords))]
    given += [node for call in calls for test in program.conditions(call) for node in ast.walk(test)]
    words = [one for one in given if isinstance(one, ast.Attribute | ast.Name)]
    return {last_name(one) for one in words} & set(options)


def _open(value: Any) -> bool:
    return any(isinstance(one, str) and is_open(one) for one in (value if isinstance(value, list) else [value]))
