"""Words of a program's own, which nobody here reads, that say which weights are trained, or that its layers quantise."""

import re
from collections.abc import Sequence

from planner.cost.parameters import count_parameters, total_parameters
from planner.errors import shown
from planner.model import ModelSpec
from planner.trainers.reading.given import Question
from planner.trainers.reading.layer_names import listed
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.trained_whole import LAYERS
from planner.units import GIB

OFF = ("false", "none", "null", "no", "off", "0", "", "[]", "{}")
WEIGHTS = re.compile(
    r"(use_)?selective(?!_?scan|_?log|_?checkpoint|_?recompute|_?ac)\w*|selected_(layers|modules|params|parameters)\w*|only_(train|tune|update)\w*"
    r"|(\w+_)?(trainable|train|tune|tuned|unfreeze|unfrozen|update|updated)_(layers?|modules?|params|parameters|blocks|parts)(_\w+)?"
)
"""Words that say which weights are trained."""
NAMED = re.compile(rf"({LAYERS.pattern}|lm_head|embed_tokens|(model\.)?layers\.\d+.*)")
"""Names of layers in a list."""
ELSEWHERE = re.compile(r"skip|ignore|exclude|lora|quant|optim_target|(?<![a-z])(no|not)_(?!grad|train|tune|update)")
"""Names of lists for something else: what quantisation or weight decay leave out, what adapters or an optimizer take."""
BITS = re.compile(
    r"(w|a|kv|act|weights?|activations?|inputs?|cache|n|num|model)_?(q_?)?n?bits?|(qat|fake_?quant)(_\w+)?|(use_)?ste(_(quant|bit)\w*)?"
    r"|(\w+_)?(fake_?quant|bitlinear)(_\w+)?"
)
"""Words of layers that quantise while they train."""


def _which_weights(given: Settings, unread: Sequence[str], rank: int) -> list[Question]:
    """What is asked about words that say which weights are trained, of a job without adapters: one for all of them."""
    found = [one.partition(" = ")[0::2] for one in unread]
    named = [one for one, value in found if WEIGHTS.fullmatch(one.lower()) or _lists_layers(one, value)]
    answers = {} if given.said is None else given.said.settings
    settled = any(str(value).lower() in OFF for name, value in answers.items() if name in named or WEIGHTS.fullmatch(name.lower()))
    named = [one for one in named if str(given.data.get(one)).lower() not in OFF]
    if rank or settled or not named:
        return []
    what = "may train a part of the weights, which is not priced; null imports the job with all of them"
    about = f"{shown(', '.join(named[:4]))} {what}"
    return [Question(name=named[0], about=about, choices=("null",))]


def _lists_layers(name: str, value: str) -> bool:
    """Whether a word that nobody reads has a list of names of layers, and of nothing else."""
    words = [str(one).strip("[]'\" ") for one in listed(value)]
    listed_here = value.startswith("[") and bool(words) and all(NAMED.fullmatch(one) for one in words)
    return listed_here and ELSEWHERE.search(name.lower()) is None


def asked_and_noted(
    given: Settings, unread: Sequence[str], rank: int, spec: ModelSpec | None
) -> tuple[list[Question], tuple[str, ...]]:
    """(Questions, notes) about words of a program's own; ``rank`` of adapters."""
    return _which_weights(given, unread, rank), _fewer_bits(unread, spec)


def _fewer_bits(unread: Sequence[str], spec: ModelSpec | None) -> tuple[str, ...]:
    """Note about layers that quantise while they train, by words of their bits: copies of weights and inputs that they keep."""
    found = [one.partition(" = ")[0::2] for one in unread]
    off = (*OFF, "16", "32")
    given = [(one, value.strip("'\"").lower()) for one, value in found if BITS.fullmatch(one.rpartition(".")[2].lower())]
    named = [one for one, value in given if value not in off]
    if not named:
        return ()
    by = ""
    if spec is not None and not spec.is_moe:
        counts = count_parameters(spec)
        more = 2.0 * (total_parameters(spec) - counts.input_embedding - counts.head) / GIB
        by = f" by up to {more:.1f} GiB of weights, and by inputs"
    what = "words of layers of the project's own that quantise while they train, whose copies of weights and inputs are not priced"
    return (f"{shown(', '.join(named[:4]))}: {what}: memory comes out too low{by}",)
