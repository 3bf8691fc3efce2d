"""Recipes whose model_init_kwargs are the configuration of a new model: a program of the project's own builds it and hands it to
transformers' Trainer, as TRL's trainers load weights, which have their sizes."""

from collections.abc import Mapping
from typing import Any

from planner.errors import shown
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.own_parts import SIZES
from planner.trainers.reading.settings import Settings
from planner.units import GIB

INITIAL = "model_init_kwargs"
WIDTH = "hidden_size"
"""What no load can change; fewer layers can be loaded."""
DTYPES = ("torch_dtype", "dtype")
OWN_MASK = "keep_window_size"
"""Of Doge, whose layers have a mask for each head.  [transformers, models/doge/modeling_doge.py: prepare_dynamic_mask]"""
MADE = (
    f"{INITIAL} is the configuration of a new model, which a program over transformers' Trainer builds: weights are made in fp32 "
    "whatever dtype it says, and all scores are kept; --set torch_dtype=bfloat16 prices weights in 16 bits"
)


def _inner(data: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = data.get(INITIAL)
    return inner if isinstance(inner, Mapping) else {}


def put_apart(given: Settings) -> tuple[str, ...]:
    """Takes the words of such a configuration out of those of a load, and asks for the model whose sizes they are; notes, where a
    model is built of them."""
    said = given.said or Given()
    given.late += _sizes_asked(given.data, said)
    notes = _notes_of(given)
    given.data = _without_dtype(given.data, said)
    return notes


def _builds(data: Mapping[str, Any]) -> bool:
    """Whether a recipe has the sizes of a model that is not loaded."""
    return _inner(data).get(WIDTH) is not None


def _without_dtype(data: Mapping[str, Any], said: Given) -> dict[str, Any]:
    """A recipe without the dtype of a configuration, which the user may say, and with the kernel of attention that stands there."""
    inner = {name: value for name, value in _inner(data).items() if name not in DTYPES or not _builds(data)}
    kernel = {name: value for name, value in inner.items() if name == "attn_implementation"}
    dtype = {name: said.setting(name) for name in DTYPES if said.setting(name) is not None}
    return {**kernel, **data, **dtype, **({INITIAL: inner} if inner else {})}


def _sizes_asked(data: Mapping[str, Any], said: Given) -> list[Question]:
    """What is asked of a recipe that says sizes of its model."""
    sizes = {name: value for name, value in _inner(data).items() if SIZES.fullmatch(name) or name in OF_TABLES}
    if said.model is not None or not any(SIZES.fullmatch(one) for one in sizes):
        return []
    listed = ", ".join(f"{name} {value if isinstance(value, int | float) else shown(str(value))}" for name, value in sizes.items())
    about = f"{INITIAL} has the sizes of its model, {listed}: a config.json that says them, or the nearest preset"
    return [Question(name="--model NAME", about=about)]


OF_TABLES = ("vocab_size", "tie_word_embeddings", "is_moe", "num_experts_per_tok")


def _notes_of(given: Settings) -> tuple[str, ...]:
    """Notes about such a model."""
    if not _builds(given.data):
        return ()
    inner = _inner(given.data)
    sizes = [inner.get(one) for one in ("num_attention_heads", "max_position_embeddings", "num_hidden_layers")]
    if inner.get(OWN_MASK) is None or not all(isinstance(one, int) for one in sizes):
        return (MADE,)
    heads, length, layers = (int(str(one)) for one in sizes)
    length = min(length, given.number("max_length", length) or length)
    alive = 1 if given.flag("gradient_checkpointing") else layers
    more = 4.0 * given.size("per_device_train_batch_size", 8) * heads * float(length) ** 2 * alive / GIB
    what = f"masks of its own for each head ({OWN_MASK}) are not priced: memory comes out too low by up to {more:.1f} GiB"
    return (MADE, what) if more >= 0.1 else (MADE,)
