"""Classes of models that a program loads: those of transformers, and those that the program derives from them itself, with the
layers that these add and the losses that they compute."""

import ast
import re
from collections.abc import Iterator, Sequence

from planner.trainers.reading.derived import calls_above, classes_of, lineage, methods_of
from planner.trainers.reading.kernels import ALL_SCORES, IN_PIECES
from planner.trainers.reading.python import Script
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.running import Running
from planner.trainers.reading.script_parts import OF_A_MODEL

UNSLOTH = ("FastLanguageModel", "FastModel", "FastVisionModel")
MODELS = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForVision2Seq", "AutoLigerKernelForCausalLM", *UNSLOTH)
DECODERS = ("ForCausalLM", "LMHeadModel")
"""Ends of names of decoders."""
OTHER_MODELS = re.compile("For(SequenceClassification|TokenClassification|QuestionAnswering|MaskedLM|Seq2SeqLM)$")
"""Classes of models that are no decoders."""
BESIDE = re.compile(
    r"(?i)peft|pipeline|autoencoder|vae|unet|transformer\w*2d|vision|image|audio|clip|siglip|encoder|tokenizer|processor|config|reward"
    r"|scheduler|adapter|embedding|controlnet|whisper|bert|t5|^AutoModel$|^(cls|self)$|trainer|sentence|valuehead|teacher"
)
"""Parts of names of what is loaded beside a language model, or over one."""
FUSED = re.compile(
    r"LigerFusedLinearCrossEntropy(Loss|Function)|LigerForCausalLMLoss|liger_fused_linear_cross_entropy|(fused_)?linear_cross_entropy"
    r"|Linear(CrossEntropy|_?CE)\w*Loss|cce_patch"
)
"""Losses that multiply by the head themselves and keep no scores.  [Liger-Kernel, cut_cross_entropy, torchtune]"""
KEPT = "kept"


def owner(call: ast.Call) -> str:
    """The class of Class.from_pretrained."""
    value = getattr(call.func, "value", None)
    return getattr(value, "id", getattr(value, "attr", ""))


def is_model(name: str, made: dict[str, ast.ClassDef]) -> bool:
    """Whether a class is a language model: by its name, or by what it is made from."""
    return any(one in MODELS or one.endswith(DECODERS) for one in (name, *lineage(name, made)[1]))


def _loads_model(call: ast.Call, made: dict[str, ast.ClassDef]) -> bool:
    """Whether from_pretrained is of a language model; a class that a variable holds is one by what it is given."""
    own, held = owner(call), OF_A_MODEL & {one.arg for one in call.keywords}
    return is_model(own, made) or (bool(held) and own[:1].islower())


def known_loads(script: Script, calls: Sequence[ast.Call]) -> list[ast.Call]:
    """Those of some calls of from_pretrained that load a language model for certain."""
    made = classes_of(script.tree) if calls else {}
    return [one for one in calls if _loads_model(one, made)]


def model_loads(script: Script, calls: Sequence[ast.Call] | None = None) -> list[ast.Call]:
    """Calls of from_pretrained that load a language model. Where none is of a class that is known, those that say a dtype, a kernel
    of attention or bits, and are of nothing beside one."""
    calls = script.calls("from_pretrained") if calls is None else calls
    known = known_loads(script, calls)
    rest = (one for one in calls if not (BESIDE.search(owner(one)) or OTHER_MODELS.search(owner(one))))
    return known or [one for one in rest if not OF_A_MODEL.isdisjoint(script.keywords(one))]


def held_classes(script: Script, call: ast.Call) -> list[str]:
    """The classes that a model may be loaded as: the one that is named, or those that a variable is given."""
    name = owner(call)
    puts = [one for one in ast.walk(script.tree) if isinstance(one, ast.Assign) and last_name(one.targets[0]) == name]
    ways = [one.value for one in puts if isinstance(one.value, ast.Name | ast.Attribute)]
    ways = [one for one in ways if not isinstance(script, Running) or script.may_run(one)]
    return [last_name(one) for one in ways] or [name]


def adds_layers(script: Script, name: str) -> bool:
    """Whether a class of a program has layers of its own: what its constructor makes that is no loss, or all of them."""
    own, others = lineage(name, classes_of(script.tree))
    if not any(one.endswith(DECODERS) for one in others):
        return True
    starts = (part for one in own for part in one.body if isinstance(part, ast.FunctionDef) and part.name == "__init__")
    made = (one for start in starts for one in ast.walk(start) if isinstance(one, ast.Assign) and isinstance(one.value, ast.Call))
    kept = [one.value for one in made if isinstance(one.targets[0], ast.Attribute) and isinstance(one.value, ast.Call)]
    return any(last_name(one.func)[:1].isupper() and not re.search("Loss|Entropy|Config", last_name(one.func)) for one in kept)


def own_loss(script: Running, loads: Sequence[ast.Call], trainers: Sequence[ast.Call]) -> str | None:
    """What is kept of the scores where classes of a program compute the loss themselves, of its model or of its trainer: IN_PIECES
    by a loss that is known to keep none, KEPT by one that is not, ALL_SCORES by one that takes them from the model; None = the loss
    is that of transformers.  [transformers, trainer.py: compute_loss_func takes the labels from the model]"""
    made = classes_of(script.tree)
    if any(script.may_run(one) for one in script.calls("cce_patch")):
        return IN_PIECES
    of_trainers = {last_name(one.func) for one in trainers}
    if of_trainers and all(_fuses(lineage(one, made)[0], ("compute_loss",)) for one in of_trainers):
        return IN_PIECES
    every = [lineage(name, made)[0] for load in loads[:1] for name in held_classes(script, load)]
    own = [_fuses(one, ("forward", "loss_function", "compute_loss")) for one in every if any(_losses(one))]
    if own:
        return IN_PIECES if all(own) and len(own) == len(every) else KEPT
    losses = [one for name in of_trainers for _, one in methods_of(lineage(name, made)[0], ("compute_loss",))]
    if any(OF_HEAD.search(ast.unparse(one)) for one in losses):
        return KEPT
    handed = any(script.keywords(one).get("compute_loss_func") is not None for one in trainers)
    return ALL_SCORES if handed or any(OF_SCORES.search(ast.unparse(one)) and not calls_above(one) for one in losses) else None


OF_HEAD = re.compile(r"lm_head\.weight|get_output_embeddings|logits_to_keep")
"""What a loss names that multiplies by the head itself."""
OF_SCORES = re.compile(r"\.logits\b|[\[(]['\"]logits['\"][\])]")
"""What a loss names that the model makes all scores for."""
WHOLE, SPLIT = re.compile(r"\blm_head\("), re.compile(r"chunk|split|\bfor \w+ in range|checkpoint\(")
"""A pass that makes all scores at once, and words of one in pieces."""


def _losses(classes: Sequence[ast.ClassDef]) -> Iterator[ast.FunctionDef]:
    """Forward passes that compute a loss and do not leave that to the class above."""
    for one in (part for made in classes for part in made.body if isinstance(part, ast.FunctionDef) and part.name == "forward"):
        text = ast.unparse(one)
        above = re.search(r"\bsuper\(\w*(, *self)?\)\.forward\((?!.*labels=None)", text)
        whole = WHOLE.search(text) and not SPLIT.search(text)
        if not (above or whole) and re.search(r"\bloss\b.* = ", text):
            yield one


def _fuses(classes: Sequence[ast.ClassDef], methods: Sequence[str]) -> bool:
    """Whether methods of some classes call a loss that keeps no scores: by its name, or as what their constructors made."""
    parts = [part for made in classes for part in made.body if isinstance(part, ast.FunctionDef)]
    starts = [one for part in parts if part.name == "__init__" for one in ast.walk(part) if isinstance(one, ast.Assign)]
    fused = {last_name(one.targets[0]) for one in starts if FUSED.fullmatch(last_name(getattr(one.value, "func", one)))}
    called = [one.func for part in parts if part.name in methods for one in ast.walk(part) if isinstance(one, ast.Call)]
    names = {last_name(one) for one in called} | {last_name(one.value) for one in called if isinstance(one, ast.Attribute)}
    return any(FUSED.fullmatch(one) or one in fused for one in names)
