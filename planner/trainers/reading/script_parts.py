"""What Python scripts say beside their trainer: lengths, dtypes, checkpointing, and mappings that are handed on whole."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planner.trainers.reading.base_weights import CAST, PREPARES
from planner.trainers.reading.derived import classes_of
from planner.trainers.reading.given import Given, Question, value_of
from planner.trainers.reading.own_flow import LOOKS, Flow
from planner.trainers.reading.python import Script
from planner.trainers.reading.python_text import default_of, fields_of, last_name, option_names
from planner.trainers.reading.running import Running
from planner.trainers.reading.shell.text import gap, is_open

BATCH = "per_device_train_batch_size"
LENGTHS = ("max_length", "max_seq_length")


def in_a_mapping(script: Script, call: ast.Call, data: Mapping[str, Any]) -> dict[str, Any]:
    """What decides time or memory beside the batch where a configuration is given a mapping whole that is not known here."""
    if not held(script, call):
        return {}
    long = last_name(call.func) in ("SFTConfig", "DPOConfig") and not any(one in data for one in LENGTHS)
    return {name: gap([name]) for name in ("optim", "fp16", *(LENGTHS[:1] if long else ())) if name not in data}


_ABOUT = "the dtype another module loads weights in; or say --set load_in_4bit=true"
OF_ANOTHER = Question(name="torch_dtype", about=_ABOUT, choices=("bfloat16", "float32"))


def made_elsewhere(said: Given) -> dict[str, Any]:
    """What is asked of a model that another module makes: its dtype, unless its bits are said, and whether it has adapters."""
    bits = said.setting("load_in_4bit")
    of_it = {"torch_dtype": gap(["torch_dtype"])} if bits is None else {"load_in_4bit": value_of(bits)}
    return {**of_it, "use_peft": gap(["use_peft"])}


def held(script: Script, call: ast.Call) -> bool:
    """Whether keywords of a call stand in a mapping that is not followed to here."""
    words, named = script.keywords(call), {one.arg for one in call.keywords}
    return any(one.startswith("**") or (one == BATCH and one not in named and is_open(str(words[one]))) for one in words)


SHOWS = ("print", "info", "debug", "warning", "log", "format", "generate", "GenerationConfig", "pipeline", "init")
"""Calls that cut nothing that is trained on: they show, name or generate."""


def length_variables(script: Script) -> list[ast.Assign]:
    """Assignments of a length that the script reads again, other than to show it or to generate with it."""
    made = [one for one in ast.walk(script.tree) if isinstance(one, ast.Assign) and last_name(one.targets[0]) in LENGTH_NAMES]
    read = {last_name(one) for one in _read(script)} if made else set()
    return [one for one in made if last_name(one.targets[0]) in read]


def length_options(script: Script) -> list[ast.expr]:
    """Where a script takes the length from an option of argparse, other than to show it or to generate with it."""
    named = {name for call in script.calls("add_argument") for name in option_names(call)} & {*LENGTH_NAMES}
    return [one for one in _read(script) if isinstance(one, ast.Attribute) and one.attr in named] if named else []


def _read(script: Script) -> Iterator[ast.Name | ast.Attribute]:
    """Names and attributes that a script reads, but where it shows them or generates with them."""
    waiting: list[ast.AST] = [script.tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and last_name(node.func) in SHOWS):
            continue
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node
        waiting += ast.iter_child_nodes(node)


def cut_length(script: Script) -> dict[str, Any]:
    """The length at which the tokenizer cuts, where it is one; else the one that a variable names."""
    idle = _never_made(script)
    calls = [one for one in script.calls("tokenizer", "tokenize", "encode_plus", "processor") if id(one) not in idle]
    given = [script.keywords(one) for one in calls]
    cut = [one["max_length"] for one in given if one.get("truncation") and isinstance(one.get("max_length"), int)]
    if not cut:
        named = length_variables(script)
        cut = [value for one in named if isinstance(value := script.value(one.value), int) and value > 1]
    if not cut:  # what a class or function of the script is given for it
        own = {one.name for one in ast.walk(script.tree) if isinstance(one, ast.ClassDef | ast.FunctionDef)}
        may = [one for one in script.calls(*own) if any(word.arg in (None, *LENGTH_NAMES) for word in one.keywords)]
        every = (words.get(name) for words in map(script.keywords, may) for name in LENGTH_NAMES)
        cut = [one for one in every if isinstance(one, int) and one > 1]
    if not cut:
        cut = [value for one in length_options(script) if isinstance(value := script.value(one), int) and value > 1]
    return {"max_length": cut[0]} if cut and len(set(cut)) == 1 else {}


def _never_made(script: Script) -> set[int]:
    """Ids of what stands in classes of the script that nothing names."""
    named = {one.id for one in ast.walk(script.tree) if isinstance(one, ast.Name)} | set(script.names_used())
    classes = (one for one in ast.walk(script.tree) if isinstance(one, ast.ClassDef) and one.name not in named)
    return {id(part) for one in classes for part in ast.walk(one)}


LENGTH_NAMES = ("max_length", "max_seq_length", "max_seq_len", "seq_length", "sequence_length", "block_size", "cutoff_len")
"""Variables that scripts keep the length of a sequence in."""
CHECKPOINTS = ("gradient_checkpointing_enable", *PREPARES)


def switched_on(script: Script) -> bool:
    """Whether checkpointing is switched on by a call on the model; PEFT does so for a quantised one.  [peft, utils/other.py]"""
    prepared = [script.keywords(one) for one in script.calls(*PREPARES)]
    fewer = re.search(r"quantization_config|load_in_(\d|k)\w*bit|BitsAndBytes", ast.unparse(script.tree)) is not None
    on = fewer and any(one.get("use_gradient_checkpointing", True) is True for one in prepared)
    return on or bool(script.calls("gradient_checkpointing_enable"))


def on_one_gpu(loads: Sequence[ast.Call]) -> bool:
    """Whether a model is loaded whole to a GPU by its number, the same in every process: device_map={"": 0}, "cuda:0"."""
    given = [one.value for call in loads[:1] for one in call.keywords if one.arg == "device_map"]
    places = [one.values[0] if isinstance(one, ast.Dict) and len(one.values) == 1 else one for one in given]
    known = [one.value for one in places if isinstance(one, ast.Constant)]
    return any(re.fullmatch(r"(cuda:)?\d+", str(one)) and not isinstance(one, bool) for one in known)


OF_A_MODEL = {"quantization_config", "torch_dtype", "dtype", "load_in_4bit", "load_in_8bit", "attn_implementation"}
"""What a model is loaded with, and a tokenizer is not."""


def trained(script: Script, loads: list[ast.Call]) -> list[ast.Call]:
    """Models that are loaded without those that stay on the host, to be merged with adapters, where others are there; of classes
    that variables hold, without those that no trainer is given where it is given another: an encoder of images, a reward."""
    loads = [one for one in loads if script.keywords(one).get("device_map") != "cpu"] or loads
    trainers = [one for one in ast.walk(script.tree) if isinstance(one, ast.Call) and last_name(one.func).endswith("Trainer")]
    given = {ast.unparse(word) for one in trainers for word in (*one.args, *(word.value for word in one.keywords))}
    made = [one for one in ast.walk(script.tree) if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) in given]
    own = {id(one.value) for one in made} & {id(one) for one in loads}
    held = {id(one) for one in loads if last_name(getattr(one.func, "value", one))[:1].islower()}
    return [one for one in loads if not own or id(one) in own or id(one) not in held]


TURNED = {"half": "float16", "bfloat16": "bfloat16", "float": "float32"}
"""Methods of a module that turn its weights into another dtype."""


def turned(script: Running, load: ast.Call) -> dict[str, Any]:
    """The dtype that a model is turned into: from_pretrained(...).half(), model.to(torch.bfloat16), also where a function is given
    it or another name holds it; not that of a part: model.lm_head.float()."""
    flow = Flow(script, load=load)
    made = [one for one in ast.walk(script.tree) if isinstance(one, ast.Assign) and _inner(one.value, load) is load]
    holds = [ast.unparse(one.targets[0]) for one in made]
    found: dict[str, Any] = {}
    for call in script.calls(*TURNED, "to"):
        inner = _inner(call.func, load)
        if any(isinstance(one, ast.Call) and getattr(one.func, "id", "") in holds for one in ast.walk(call.func)):
            continue  # what a pass of the model gives: model(**batch).loss.float()
        if inner is not load and not _holds(inner, holds, flow, call, load):
            continue
        named = _turns_into(script, call)
        found = {"dtype": named} if named is not None else found
    return found | _one_by_one(script, load, holds, flow) | ({CAST: True} if _casts_adapters(script) else {})


def _holds(node: ast.AST, names: Sequence[str], flow: Flow, at: ast.expr | ast.For, load: ast.Call) -> bool:
    """Whether a name holds the model that is loaded: one that the load is assigned to, behind it, or another that it goes on in."""
    named = isinstance(node, ast.Name) and node.id in names
    elsewhere = isinstance(node, ast.expr) and flow.script.home_of(node) != flow.script.home_of(load)
    return (named and at.lineno >= load.lineno) or (flow.holds(node) and (elsewhere or at.lineno >= load.lineno))


def _casts_adapters(script: Running) -> bool:
    """Whether a program turns its adapters into bf16, as that of QLoRA does: if isinstance(module, LoraLayer): module.to(...)."""
    tests = (one for one in ast.walk(script.tree) if isinstance(one, ast.If))
    layers = [one for one in tests if re.search(r"isinstance\(.*(LoraLayer|BaseTunerLayer)", ast.unparse(one.test))]
    calls = (one for test in layers for part in test.body for one in ast.walk(part) if isinstance(one, ast.Call))
    made = [one for one in calls if last_name(one.func) == "to" and _turns_into(script, one) == "bfloat16"]
    return any(script.may_run(one) for one in made)


def _turns_into(script: Script, call: ast.Call) -> str | None:
    """The dtype that half(), float() or to(...) turns something into."""
    given = [*call.args, *(one.value for one in call.keywords if one.arg == "dtype")]
    named = TURNED.get(last_name(call.func)) if not call.args else None
    return named or next((value for one in given if (value := script.value(one)) in TURNED.values()), None)


def _one_by_one(script: Running, load: ast.Call, holds: Sequence[str], flow: Flow) -> dict[str, Any]:
    """The dtype that a loop turns all weights of a model into: param.data = param.data.to(torch.float32). Of those that are trained
    these are all before adapters are made, and no base behind; adapters that another function makes may be there."""
    adapted = script.calls("get_peft_model", "add_adapter")
    found: dict[str, Any] = {}
    for loop in (one for one in ast.walk(script.tree) if isinstance(one, ast.For)):
        calls = (one.func for one in ast.walk(loop.iter) if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute))
        over = next((one.value for one in calls if one.attr in ("parameters", "named_parameters")), None)
        behind = any(script.home_of(one) != script.home_of(loop.iter) or one.lineno < loop.lineno for one in adapted)
        some = "requires_grad" in ast.unparse(loop.iter) and behind
        if over is None or some or not _holds(over, holds, flow, loop, load):
            continue
        trained = [one for one in loop.body if isinstance(one, ast.If) and ast.unparse(one.test).endswith(".requires_grad")]
        inner = [] if behind else [part for one in trained if not isinstance(one.test, ast.UnaryOp) for part in one.body]
        for one in (*loop.body, *inner):  # not under other conditions, which are of norms mostly
            if isinstance(one, ast.Assign) and isinstance(one.value, ast.Call) and ast.unparse(one.targets[0]).endswith(".data"):
                named = _turns_into(script, one.value) if script.may_run(one.value) else None
                found = {"dtype": named} if named is not None else found
    return found


def _inner(node: ast.AST, load: ast.Call) -> ast.AST:
    """What a chain of methods starts with: the load itself, a name, or a part of an object."""
    method = True
    while node is not load and (isinstance(node, ast.Call) or (method and isinstance(node, ast.Attribute))):
        node, method = (node.func, True) if isinstance(node, ast.Call) else (node.value, False)
    return node


LIBRARIES = ("transformers", "trl", "peft", "unsloth", "unsloth_zoo", "bitsandbytes", "torch", "accelerate", "datasets", "typing")
HELPS = re.compile("lora|peft|adapter|quantiz|quantis|bnb|bitsandbytes|kbit|4bit")
"""Parts of names of functions that make adapters or bits."""
OF_BITS = re.compile("quantiz|quantis|bnb|bitsandbytes|4bit")
"""Those of bits alone."""


def helped(script: Script) -> bool:
    """Whether a script hands its model to functions from modules of its project that do more than look at it, or takes adapters or
    bits from there, by the names of what it takes, and makes none here."""
    taken = [one.name.lower() for node in ast.walk(script.tree) if isinstance(node, ast.ImportFrom)
             and (node.module or "").partition(".")[0] not in LIBRARIES for one in node.names]  # fmt: skip
    calls = (one for one in ast.walk(script.tree) if isinstance(one, ast.Call) and any(last_name(it) == "model" for it in one.args))
    if any(re.fullmatch(LOOKS, one) is None for one in {last_name(one.func).lower() for one in calls} & {*taken}):
        return True
    if not script.calls("BitsAndBytesConfig") and any(OF_BITS.search(one) for one in taken):
        return True
    made = script.calls("LoraConfig") or (script.calls("BitsAndBytesConfig") and not script.calls("get_peft_model"))
    return not made and any(HELPS.search(one) for one in taken)


OF_ADAPTERS = re.compile(r"(?!(AutoPeft|Peft)\w*)\w*(Lora|LoRA|Dora|DoRA|Adapter)\w{0,8}Config")
"""Classes of a project's own that configure adapters, by their names."""


def without_config(script: Script, trainers: Sequence[ast.Call], unsloth: bool) -> dict[str, Any]:
    """Arguments of adapters whose configuration is not made here: another module makes it, or it lies beside weights that are
    loaded to go on with."""
    loaded = _loaded(script, "PeftModel", *WITH_BASE)
    first = min((one.lineno for one in trainers), default=0)
    loaded = [] if script.calls("merge_and_unload", "merge_adapter") else [one for one in loaded if one.lineno < first]
    trains = any(script.keywords(one).get("is_trainable") is True for one in loaded)
    if trains or (script.calls("get_peft_model") and not unsloth):
        return {"use_peft": True, **OF_FOLDER}
    given = [script.keywords(one).get("peft_config") for one in trainers]
    given += [one for one in script.names_used() if OF_ADAPTERS.fullmatch(one) and script.calls(one)]
    return {"use_peft": gap(["use_peft"])} if loaded or any(one is not None for one in given) else {}


def loaded_or_made(script: Script, made: ast.Call) -> dict[str, Any]:
    """That adapters to go on with are loaded in one branch, and new ones ``made`` in another; what they are is asked where the
    model is loaded with them. Beside new ones in the same branch they are merged.  [trl/trainer/dpo_trainer.py]"""
    whole = [one for one in _loaded(script, *WITH_BASE) if script.keywords(one).get("is_trainable") is True]
    if whole and isinstance(script, Running) and not script.settled(made, whole[0]):
        return dict(OF_FOLDER)
    loaded = _loaded(script, "PeftModel")
    return {"goes_on_or_new": True} if any(script.keywords(one).get("is_trainable") is True for one in loaded) else {}


WITH_BASE = ("AutoPeftModelForCausalLM", "AutoPeftModel")
"""Classes that load adapters and the model below them from the folder of the adapters."""
OF_FOLDER: dict[str, Any] = {"goes_on": True, **{name: gap([name]) for name in ("lora_r", "lora_target_modules")}}
"""Adapters whose configuration lies there."""


def _loaded(script: Script, *names: str) -> list[ast.Call]:
    """Calls that load adapters, by their classes."""
    return [one for one in script.calls("from_pretrained") if last_name(getattr(one.func, "value", one)) in names]


def builds_a_model(script: Script) -> bool:
    """Whether a script makes its model from a configuration: new weights in the dtype of torch, and no adapters beside its own."""
    made = [one for one in ast.walk(script.tree) if isinstance(one, ast.Call)]
    own = any(re.search("(LMHeadModel|ForCausalLM)$", last_name(one.func)) for one in made)
    return (own or bool(script.calls("from_config"))) and not any(HELPS.search(one.lower()) for one in script.names_used())


def on_cpus(script: Script) -> dict[str, Any]:
    """use_cpu of a script that hides all GPUs from itself."""
    made = [one for one in ast.walk(script.tree) if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Subscript)]
    place = re.compile(r"os\.environ\[.CUDA_VISIBLE_DEVICES.\]")
    seen = [script.value(one.value) for one in made if place.fullmatch(ast.unparse(one.targets[0]))]
    return {"use_cpu": True} if seen and all(str(one) in ("-1", "") for one in seen) else {}


def several_trainings(script: Script, configs: Sequence[ast.Call], trainers: Sequence[ast.Call]) -> list[str]:
    """Notes about trainings beside the one that is read."""
    more = len(configs) > 1
    first = [f"of {len(configs)} configurations of a trainer, the first is read (line {configs[0].lineno})"] if more else []
    return first + ["its trainer is made in a loop: one of those trainings is priced"] * _in_a_loop(script, trainers)


def that_counts(script: Script, configs: list[ast.Call], trainers: Sequence[ast.Call]) -> list[ast.Call]:
    """Configurations without those that the last one under the same name has replaced where the trainer is made."""
    made = [one for one in ast.walk(script.tree) if isinstance(one, ast.Assign)]
    held = {id(one.value): one.targets[0].id for one in made if isinstance(one.targets[0], ast.Name)}
    given = [word.value for call in trainers[:1] for word in call.keywords if word.arg == "args"]
    same = [one for one in configs if given and held.get(id(one)) == getattr(given[0], "id", "") and one.lineno < given[0].lineno]
    if len(same) < 2 or not isinstance(script, Running) or len({script.home_of(one) for one in (*same, *trainers[:1])}) > 1:
        return configs
    sure = max((one.lineno for one in same if not script.conditions(one)), default=0)
    return [one for one in configs if one not in same or one.lineno >= sure]


def _in_a_loop(script: Script, trainers: Sequence[ast.Call]) -> bool:
    """Whether a loop makes a trainer, itself or by a function that does."""
    makes = {id(one) for one in trainers}
    functions = [one for one in ast.walk(script.tree) if isinstance(one, ast.FunctionDef)]
    names = {one.name for one in functions if any(id(part) in makes for part in ast.walk(one))}
    loops = (part for one in ast.walk(script.tree) if isinstance(one, ast.For | ast.While) for part in ast.walk(one))
    return any(isinstance(one, ast.Call) and (id(one) in makes or last_name(one.func) in names) for one in loops)


def derived_from(script: Script, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Classes of the script that are made from some classes, through others of it -> their own fields with their values."""
    made = {name: one for name, one in classes_of(script.tree).items() if name not in names}
    below: dict[str, list[str]] = {}
    for name, one in made.items():
        for base in one.bases:
            below.setdefault(last_name(base), []).append(name)
    known, waiting = set(names), list(names)
    while waiting:
        fresh = set(below.get(waiting.pop(), ())) - known
        known |= fresh
        waiting += fresh
    return {
        name: {field: script.value(default_of(value)) for field, value in fields_of(one) if value is not None}
        for name, one in made.items() if name in known
    }  # fmt: skip


def lists_all_linear(script: Script, node: ast.expr) -> bool:
    """Whether targets are what a function gives that lists all linear layers, by its name, or a variable that holds them."""
    made = [one for one in ast.walk(script.tree) if isinstance(one, ast.Assign) and isinstance(node, ast.Name)]
    held = [one.value for one in made if ast.unparse(one.targets[0]) == getattr(node, "id", "")]
    return any("all_linear" in ast.unparse(one)[:200] for one in (node, *held) if isinstance(one, ast.Call | ast.Name))
