"""Trainers that a project derives from those of TRL and transformers: what their methods do in a step that no plan has, and
methods of a step of which nothing is understood."""

import ast
import builtins
import re
from collections.abc import Iterator, Mapping, Sequence, Set

from planner.cost.parameters import total_parameters
from planner.errors import listed
from planner.model import ModelSpec
from planner.trainers.reading.derived import calls_above, classes_of, lineage, methods_of, own_functions
from planner.trainers.reading.kernels import ALL_SCORES, OWN_LOSS
from planner.trainers.reading.own_classes import OF_SCORES, is_model
from planner.trainers.reading.own_passes import STEPS, classes_made, held, of_helpers, passes
from planner.trainers.reading.python_text import FAR, Function, last_name
from planner.trainers.reading.running import Running
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.versions import newer
from planner.units import GIB

OWN_METHODS, OWN_SCORES = "own_methods", "own_scores"
"""What is found, as arguments of the program: lines of a word and a place; passes over the scores of the vocabulary."""
LOSSES = ("compute_loss", "get_batch_loss_metrics", "concatenated_forward")
DECIDING = (
    *LOSSES, "training_step", "_inner_training_loop", "train", "create_accelerator_and_postprocess", "_wrap_model",
    "_prepare_inputs", "optimizer_step", "get_train_dataloader",
)  # fmt: skip
"""Methods of transformers' and TRL's trainers that decide what a step is."""
CALLED = {
    "compute_loss": LOSSES[1:], "get_batch_loss_metrics": LOSSES[2:], "training_step": ("compute_loss",),
    "get_train_dataloader": ("prepare", "DataLoader", "get_dataloader"), "_prepare_inputs": ("_prepare_input",),
    "_inner_training_loop": ("training_step",), "create_accelerator_and_postprocess": ("Accelerator",),
}  # fmt: skip
"""What a method that does not call the one above calls where it is the step that is known."""
BATCH = re.compile(r"(self\.)?_?(args\.)?(_?train_batch_size|per_device_train_batch_size)")
KEEPS = {
    "around": "is around the model, with a pass of its own",
    "graph": "takes gradients of its own",
    "text": "generates text",
    "handed": "hands the scores to what is not read here",
    "weights": "keeps a copy of weights",
    "penalty": "adds a term over the weights, of which it keeps differences",
    "gradients": "copies gradients",
    "hooks": "sets hooks, which may keep activations",
}
"""What is found in a method, or of the model that a trainer is given, and what a note says of it."""
OF_SIZE = ("weights", "penalty", "gradients")
"""Those of the size of the weights."""
OF_WEIGHTS = re.compile(r"\b(named_)?parameters\(\)|\bstate_dict\(\)")
GIVEN = re.compile(r"(\w+\.)?\w*logits\w*(\[.*\])?|outputs?")
"""Scores, as a loss gives them on."""
OF_TRAINERS = re.compile(r"accelerator|label_smoother|model|state|args|log\b|store_metrics|_?metrics")
OF_LIBRARIES = re.compile(
    r"[A-Z]\w*|super|selective_log_softmax|entropy_from_logits|log\w*probs_from_logits|(fixed_)?cross_entropy|(log_)?softmax|logsumexp|pad\w*"
)
"""What a trainer of transformers and TRL has, and functions of theirs and of torch, that are given scores."""
BY_ROWS = (0, 15)
"""Version of TRL whose DPO takes scores row by row.  [trl/trainer/dpo_trainer.py: concatenated_forward]"""
LEAST = 0.1
"""GiB below which nothing is said."""
QUIET = re.compile(r"return_outputs|logging_steps|not \w+(\.\w+)*\.training|train_eval == .eval")
"""Conditions of what no step of the training does, or of what only logs."""
WITHOUT = re.compile(r"no_grad|inference_mode")
SCORES = re.compile(r"cross_entropy(_loss)?|log_softmax|softmax|logsumexp")


def found_in(script: Running, trainers: Sequence[ast.Call]) -> dict[str, list[str] | int]:
    """What the classes of some trainers do in a step that no plan has."""
    made, lines, scores = classes_of(script.tree), dict[str, None](), 0
    puts = [(ast.unparse(one.targets[0]), last_name(one.value.func)) for one in ast.walk(script.tree)
            if made and isinstance(one, ast.Assign) and isinstance(one.value, ast.Call)]  # fmt: skip
    forwards = {name.rpartition(".")[2]: own_functions([made[kind]]).get("forward") for name, kind in puts if kind in made}
    losses = {name.rpartition(".")[2] for name, kind in puts if kind == "CrossEntropyLoss"}
    for variable in (ast.unparse(word.value) for call in trainers for word in call.keywords if word.arg == "model"):
        kind = next((each for name, each in reversed(puts) if name == variable), "")
        own, others = lineage(kind, made)
        if "forward" in own_functions(own) and "Module" in others and not is_model(kind, made):  # no class of transformers
            lines[f"around {kind} (line {made[kind].lineno % FAR})"] = None
    variables = held(script)
    for name in dict.fromkeys(name for one in trainers for name in classes_made(variables, one)):
        classes = lineage(name, made)[0]
        named = {**{one: forward for one, forward in forwards.items() if forward}, **script.functions, **own_functions(classes)}
        for each, one in methods_of(classes, DECIDING):
            place = f"{each.name}.{one.name} (line {one.lineno % FAR})"
            lines |= dict.fromkeys([f"{word} {place}" for word in _kept(one, named, losses)])
            if not (calls_above(one) or _understood(one, named)):
                lines[f"unknown {place}"] = None
            if one.name == "compute_loss":
                scores = max(scores, _scores(one, named, losses))
            if one.name == "concatenated_forward" and not calls_above(one) and _scores(one, named, losses):
                lines[f"pairs {place}"] = None
    return {**({OWN_METHODS: list(lines)} if lines else {}), **({OWN_SCORES: scores} if scores else {})}


def _understood(method: ast.FunctionDef, named: Mapping[str, Function]) -> bool:
    """Whether a method that replaces another one runs the model or hands the step on as that does."""
    calls = [one for one in _reached(method, named) if isinstance(one, ast.Call)]
    handed = any(last_name(one.func) in CALLED.get(method.name, ()) for one in calls)
    if method.name == "get_train_dataloader":
        sizes = [word.value for one in calls for word in one.keywords if word.arg == "batch_size"]
        pairs = (pair for one in ast.walk(method) if isinstance(one, ast.Dict) for pair in zip(one.keys, one.values, strict=True))
        sizes += [value for key, value in pairs if getattr(key, "value", None) == "batch_size"]
        return handed and all(BATCH.fullmatch(ast.unparse(one)) for one in sizes)
    runs = method.name in (*LOSSES, *STEPS)
    return handed or (runs and (passes(method.body) > 0 or passes(method.body, of_helpers(named)) > 0))


def _kept(method: ast.FunctionDef, named: Mapping[str, Function], losses: Set[str]) -> Iterator[str]:
    """Words of KEEPS for what a method does, with functions of the program that it calls."""
    free: set[int] = set()
    for node in _reached(method, named):
        free |= {id(one) for one in ast.walk(node)} if _has_no_gradient(node) else set()
        text = ast.unparse(node) if isinstance(node, ast.For | ast.ListComp | ast.DictComp | ast.GeneratorExp) else ""
        if isinstance(node, ast.Call):
            name, owner = last_name(node.func), ast.unparse(getattr(node.func, "value", node.func))
            on = {word.arg for word in node.keywords if isinstance(word.value, ast.Constant) and word.value.value is True}
            if not on.isdisjoint({"create_graph", "retain_graph"}) or f"{owner}.{name}" in ("torch.autograd.grad", "autograd.grad"):
                yield "graph"
            elif method.name == "compute_loss" and name not in {*named, *losses} and _hands_scores(node):
                yield "handed"
            elif name == "generate" and re.search("model|self", owner):
                yield "text"
            elif name == "deepcopy" and node.args and re.search(r"\bmodel$|state_dict\(\)$", ast.unparse(node.args[0])):
                yield "weights"
            elif re.fullmatch(r"register_(full_)?(forward|backward)(_pre)?_hook", name):
                yield "hooks"
        elif OF_WEIGHTS.search(text) and ".grad" in text:
            yield from ["gradients"] * bool(re.search(r"\.grad(\.\w+\(\))*\.(clone|view|flatten|reshape)\(", text))
        elif OF_WEIGHTS.search(text) and re.search(r"\.clone\(|\.copy\(", text):
            yield "weights"
        elif OF_WEIGHTS.search(text) and id(node) not in free and re.search(r"\*\* ?2|\bpow\(|\bnorm\(|\babs\(|mse_loss\(", text):
            yield "penalty"


def _has_no_gradient(node: ast.AST) -> bool:
    """Whether what stands in a block, or is done by a function, keeps nothing for a backward pass."""
    said = [one.context_expr for one in node.items] if isinstance(node, ast.With) else getattr(node, "decorator_list", [])
    return any(WITHOUT.search(ast.unparse(one)) for one in said)


def _hands_scores(call: ast.Call) -> bool:
    """Whether the scores are given to a function, or to what a trainer holds, that is no part of torch or transformers."""
    first, _, rest = ast.unparse(call.func).partition(".")
    own = first not in dir(builtins) if not rest else first == "self" and OF_TRAINERS.match(rest) is None
    given = (*call.args, *(one.value for one in call.keywords))
    return own and OF_LIBRARIES.fullmatch(last_name(call.func)) is None and any(GIVEN.fullmatch(ast.unparse(one)) for one in given)


def _reached(method: ast.FunctionDef, named: Mapping[str, Function]) -> Iterator[ast.AST]:
    """What a method does where it trains, with functions of the program that it calls, but for steps, which are looked at for
    themselves."""
    waiting: list[ast.AST] = [method]
    seen = {method.name, *DECIDING, *(one for one in named if "neftune" in one)}  # whose noise is no more than embeddings
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and QUIET.search(ast.unparse(node.test)):
            waiting += node.orelse
            continue
        yield node
        name = last_name(node.func) if isinstance(node, ast.Call) else ""
        if name in named and name not in seen:
            seen.add(name)
            waiting.append(named[name])
        waiting += ast.iter_child_nodes(node)


def _scores(method: ast.FunctionDef, named: Mapping[str, Function], losses: Set[str]) -> int:
    """How often a loss takes the scores of the vocabulary and keeps what it makes of them, that of the model itself counted; 0 = it
    leaves them to the model."""
    if not OF_SCORES.search(ast.unparse(method)):
        return 0
    try:
        found = _most(method, {**named, **dict.fromkeys(losses)}, {method.name, *DECIDING})
    except RecursionError:
        return 0
    return len(found) if found - {OF_MODEL} else 0


def _most(node: ast.AST, named: Mapping[str, Function | None], seen: Set[str]) -> frozenset[int]:
    """What takes them in a part of a loss: of branches the one with the most, of what has no gradient nothing. ``named``: functions
    of the program, None = an object that is such a loss."""
    if _has_no_gradient(node):
        return frozenset()
    if isinstance(node, ast.If):
        ways = [node.orelse] if QUIET.search(ast.unparse(node.test)) else [node.body, node.orelse]
        return max((frozenset[int]().union(*(_most(one, named, seen) for one in way)) for way in ways), key=len)
    found = {OF_MODEL} if isinstance(node, ast.Attribute) and node.attr == "loss" and last_name(node.value) != "self" else set()
    name = last_name(getattr(node.func, "func", node.func)) if isinstance(node, ast.Call) else ""
    known = named.get(name)
    if SCORES.fullmatch(name) or (name in named and known is None):
        found.add(id(node))
    elif known is not None and name not in seen:
        inner = _most(known, named, {*seen, name})
        found |= {one if one == OF_MODEL else hash((id(node), one)) for one in inner}  # once for each call
    return frozenset(found).union(*(_most(one, named, seen) for one in ast.iter_child_nodes(node)))


OF_MODEL = -1
"""Stands for the loss of the model."""


def notes(given: Settings, spec: ModelSpec | None, precision: str, tokens: int, trainer: str) -> tuple[str, ...]:
    """Notes about what was found; ``precision`` of the weights, ``tokens`` of a forward pass, by ``trainer``."""
    lines = [str(one).partition(" ")[::2] for one in given.data.get(OWN_METHODS) or []]
    each = (2.0 if precision == "bf16_true" else 4.0) * total_parameters(spec) / GIB if spec is not None else 0.0
    said = []
    for word, what in KEEPS.items():
        if places := [place for one, place in lines if one == word]:
            by = f", up to {each:.1f} GiB where all are trained" if word in OF_SIZE and each else ""
            said.append(f"{listed(places[:3], 'and')} {what}{by}")
    found = [f"{'; '.join(said)}: not in the plan"] * bool(said)
    scores = tokens * (spec.vocab_size if spec is not None else 0)
    unknown = [place for one, place in lines if one == "unknown"]
    if unknown:
        what = "of the program's own, in which no step that is known was found; priced is that of the library"
        found.append(f"{listed(unknown[:4], 'and')}: {what}")
    if given.get(OWN_LOSS) == ALL_SCORES and trainer == "unsloth" and (less := 10.0 * scores / GIB) >= LEAST:
        what = "the loss of the program's trainer keeps all scores, which unsloth's takes in pieces, as priced"
        found.append(f"{what}: memory comes out too low by up to {less:.1f} GiB")
    pairs = [place for one, place in lines if one == "pairs" and newer(given.path, "trl", BY_ROWS)]  # else it is told already
    if pairs and (less := 12.0 * scores / GIB) >= LEAST:
        what = "takes log probabilities of all scores at once, and those of TRL since 0.15 are priced"
        found.append(f"{pairs[0]} {what}: memory comes out too low by up to {less:.1f} GiB")
    more = 4.0 * (int(given.data.get(OWN_SCORES) or 1) - 1) * scores / GIB
    if more >= LEAST:
        what = "the loss of the program's trainer takes the scores of the vocabulary several times, and once is priced"
        found.append(f"{what}: memory comes out too low by up to {more:.1f} GiB")
    return tuple(found)
