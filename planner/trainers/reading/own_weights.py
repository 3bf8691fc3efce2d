"""Which weights a program trains or holds: parts of a model that it freezes itself, where it makes no adapters, and a model of
its own for reference, where it makes some; and moving averages, which may be of the weights."""

import ast
import re
from collections import deque
from collections.abc import Iterator, Sequence

from planner.cost.parameters import total_parameters
from planner.errors import shown
from planner.model import ModelSpec
from planner.trainers.reading.given import Given, Question, value_of
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.running import Running
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.shell.text import is_open
from planner.units import GIB

ADAPTED = ("LoraConfig", "get_peft_model", "prepare_model_for_kbit_training", "add_adapter")
"""Calls after which all but adapters is frozen, which is what adapters mean."""
OTHERS = re.compile(r"ref|teacher|reward|vision|visual|tower|image|audio|vae|encoder|old|critic|judge|draft|oracle", re.IGNORECASE)
"""Names of what is no part of the model that is trained."""
NAME = "requires_grad"
REFERENCE = "ref_model"


def question(script: Running, said: Given) -> Question | None:
    """What is asked of a program that freezes a part of its model; None = it freezes none, or the user says that it is imported
    with all weights trained."""
    loads = [last_name(getattr(one.func, "value", one)) for one in script.calls("from_pretrained")]
    frozen = None if script.calls(*ADAPTED) or "PeftModel" in loads else next(_frozen(script), None)
    if frozen is None or said.setting(NAME) is not None or value_of(said.setting("use_peft") or "") is True:
        return None
    own = own_adapters(script)
    what = "freezes a part of the weights, which is not priced; false imports it with all trained"
    if own is not None:
        what = f"freezes all but {shown(own)}, adapters that the program makes itself and which are not read; {AS_LORA}, or false"
        what += " imports it with all trained"
    about = f"{shown(ast.unparse(frozen)[:60])} {what}"
    return Question(name=NAME, about=about, choices=("false",))


AS_LORA = (
    "instead --set use_peft=true --set lora_r=N --set lora_target_modules=q_proj,v_proj,... --set torch_dtype=bfloat16, all of "
    "them, prices it as LoRA"
)


def own_adapters(script: Running) -> str | None:
    """The class of a program that is LoRA written by hand: by its name, with layers or weights of its own."""
    made = (one for one in ast.walk(script.tree) if isinstance(one, ast.ClassDef) and re.search("lora", one.name, re.IGNORECASE))
    parts = r"\b(Linear|Embedding|Parameter)\("
    return next((one.name for one in made if re.search(parts, ast.unparse(one)) and script.calls(one.name)), None)


def reference(script: Running, said: Given) -> Question | None:
    """What is asked of a program that hands DPO another model for reference although it trains adapters; None = it does not, or
    the user says that it is imported without."""
    if said.setting(REFERENCE) is not None or not script.calls(*ADAPTED):
        return None
    for call in script.calls("DPOTrainer"):
        given = [*call.args[1:2], *(one.value for one in call.keywords if one.arg == REFERENCE)]
        if any(_loaded(script, one) for one in given):
            what = "DPOTrainer holds a second model for reference beside adapters, which is not priced"
            about = f"{what}; false imports it with the frozen weights for reference"
            return Question(name=REFERENCE, about=about, choices=("false",))
    return None


def _loaded(script: Running, node: ast.expr) -> bool:
    """Whether what is given is a model that a call makes; of a name, by the last of its assignments that may run."""
    if isinstance(node, ast.Call):
        return True
    made = [one for one in ast.walk(script.tree) if isinstance(one, ast.Assign)]
    held = [one.value for one in made if ast.unparse(one.targets[0]) == ast.unparse(node)]
    ways = [way for one in held for way in ((one.body, one.orelse) if isinstance(one, ast.IfExp) else (one,))]
    return isinstance(max(filter(script.may_run, ways), key=lambda one: one.lineno, default=None), ast.Call)


def _frozen(script: Running) -> Iterator[ast.stmt]:
    """Statements that may run and take weights out of the training."""
    return (node for node, value, _ in _decided(script) if not _trains(value))


def _decided(script: Running) -> Iterator[tuple[ast.stmt, ast.expr, list[ast.expr]]]:
    """Statements that may run and say whether weights are trained, what they say, and of what."""
    waiting: deque[tuple[ast.AST, str, ast.expr | None]] = deque([(script.tree, "", None)])
    while waiting:
        node, home, loop = waiting.popleft()  # with the innermost class around it, and what the innermost loop goes over
        home, loop = node.name if isinstance(node, ast.ClassDef) else home, node.iter if isinstance(node, ast.For) else loop
        waiting += ((child, home, loop) for child in ast.iter_child_nodes(node))
        if isinstance(node, ast.Assign | ast.Expr) and (said := _said(node)) is not None:
            place = [one for one in (said[0], loop) if one is not None]
            if not any(OTHERS.search(ast.unparse(one)) for one in place) and script.may_run(said[1], home):
                yield node, said[1], place


def _said(node: ast.Assign | ast.Expr) -> tuple[ast.expr, ast.expr] | None:
    """Of what, and which, in requires_grad = ..., requires_grad_(...), a list of these, and setattr(..., "requires_grad", ...)."""
    if isinstance(node, ast.Assign):
        target = node.targets[0]
        return (target.value, node.value) if isinstance(target, ast.Attribute) and target.attr == NAME else None
    call = node.value.elt if isinstance(node.value, ast.ListComp) else node.value
    if not isinstance(call, ast.Call):
        return None
    if last_name(call.func) == "setattr" and [getattr(one, "value", None) for one in call.args[1:2]] == [NAME]:
        return call.args[0], call.args[-1]
    owner = node.value if isinstance(node.value, ast.ListComp) else getattr(call.func, "value", call)
    return (owner, [*call.args, call][0]) if last_name(call.func) == f"{NAME}_" else None


def _trains(value: ast.expr) -> bool:
    """Whether this says that weights are trained: True, or requires_grad_() with nothing."""
    bare = isinstance(value, ast.Call) and last_name(value.func) == f"{NAME}_"
    return bare or (isinstance(value, ast.Constant) and value.value is not False)


TABLES = {"embed_tokens": r"(?<!output_)embed(?!_?out)|wte", "lm_head": r"lm_head|output_(embeddings|layer)|embed_out"}
"""Tables of the vocabulary as modules_to_save names them -> parts of names by which programs choose them."""


def beside_adapters(script: Running) -> list[str]:
    """Tables that a program trains as a whole although it makes adapters: "lm_head" in name: param.requires_grad = True; not before
    it makes them, as PEFT then freezes all else.  [peft, tuners/tuners_utils.py: _mark_only_adapters_as_trainable]"""
    found: list[str] = []
    made = {script.home_of(one): one.lineno for one in script.calls("get_peft_model")}
    for _, value, place in _decided(script):
        behind = value.lineno > made.get(script.home_of(value), 0)
        near = [*place, *script.conditions(value, met=True)[-1:]] if behind and _trains(value) else []
        words = [text for one in near if not re.search(r"\bnot\b", text := ast.unparse(one))]
        said = (str(script.value(part)) for one in near for part in ast.walk(one) if isinstance(part, ast.Attribute))
        words += [one for one in said if not is_open(one)]
        found += [name for name, table in TABLES.items() if re.search(table, " ".join(words))]
    return list(dict.fromkeys(found))


COPIES = re.compile(r"(\w+_)?ema(_\w+)?")
"""Words of a moving average: of the weights, which is a second copy of them, or of a loss or a metric."""


def second_copies(given: Settings, unread: Sequence[str]) -> list[Question]:
    """What is asked about moving averages that are no switch which is on: whether they are of the weights, one for each."""
    found = [one.partition(" = ") for one in unread]
    named = [name for name, _, value in found if COPIES.fullmatch(name.lower()) and value not in ("True", "False", "None")]
    if given.said is None or any(given.said.setting(one) is not None for one in named):
        return []
    about = "whether it keeps a second copy of the weights, which is not priced, or averages something else"
    return [Question(name=one, about=about, choices=("false", "true")) for one in named]


KEPT_BESIDE = re.compile(r"(\w+_)?(ewc|fisher|lwf|agem|synaptic_intelligence)(_\w+)?|prev(ious)?_task_(model|checkpoint)(_\w+)?")
"""Words of methods against forgetting, which hold weights of before."""


def of_methods(unread: Sequence[str], spec: ModelSpec | None, precision: str) -> tuple[str, ...]:
    """Note about such a method of a program or fork: EWC holds Fisher information, weights and copies of gradients, LwF the model
    of before and its scores."""
    named = [name for one in unread if KEPT_BESIDE.fullmatch((name := one.partition(" = ")[0]).lower())]
    if not named:
        return ()
    each = (2.0 if precision == "bf16_true" else 4.0) * total_parameters(spec) / GIB if spec is not None else 0.0
    by = f" by up to {each:.1f} GiB for each copy of the weights" if spec is not None else ""
    what = "what a method against forgetting holds (EWC up to three copies of the weights, LwF one and its scores) is not priced"
    return (f"{named[0]}: {what}: memory comes out too low{by}",)
