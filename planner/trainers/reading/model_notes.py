"""What a plan leaves out, or prices too high, of some models that configurations name."""

import re
from collections.abc import Sequence
from typing import Any

from planner.errors import PlannerError
from planner.model import ModelSpec
from planner.trainers.reading.kernels import num_joint_layers
from planner.trainers.reading.layer_names import EVERY, listed
from planner.trainers.reading.settings import Settings
from planner.units import GIB, GIGA

TOWERS = {"gemma-3-4b": 0.42, "gemma-3-12b": 0.42, "gemma-3-27b": 0.42}
"""Presets of text alone whose uploads have an image encoder -> billions of weights that it has.  [config.json of the uploads]"""
ENCODERS = re.compile(
    r"(^|[/_-])((distil|xlm-|al|de|big|camem|mobile|modern|neo|sci|bio|fin|legal|tiny|clinical|pho)?(roberta|berta?)|multilingual-e5)(-|$)|(^|/)(electra|xlnet|m?bart|pegasus|marian|opus-mt|m?t5|flan-t5|byt5|codet5"
    r"|longformer|led|bge|e5(?!-mistral)|gte|whisper|all-minilm)-|(^|/)flan-ul2$"
)
"""Names of models that are no decoders of text."""
SINGLE = re.compile(r"gpt[-_]?oss", re.IGNORECASE)
"""Models whose experts and router are tensors and no linear layers, which adapters on linear layers leave alone: those of attention
are left.  [transformers, modeling_gpt_oss.py; peft, target_parameters names such tensors]"""
MIXER = re.compile("in_proj|out_proj|x_proj|dt_proj|linear_attn|mixer|mamba")
"""Parts of names of linear layers of linear attention."""
OF_ITS_OWN = ("mamba2", "gated_delta_net")
"""Kinds of linear attention whose linear layers are not called q_proj to o_proj.  [transformers, models/*/modeling_*.py]"""


def of_model(model: ModelSpec | None, said: Any, targets: str, rank: int) -> tuple[str, ...]:
    """Notes about an image encoder that no preset has, and about adapters on the linear attention of a hybrid, which are priced
    although those that are ``said`` are on other layers."""
    if model is None:
        return ()
    notes = []
    if model.vision is None and (size := TOWERS.get(model.name)) is not None:
        what = f"the image encoder of {model.name}, {size} B weights beside its text model"
        notes.append(f"{what}, is not priced: memory comes out too low where it is loaded")
    words = [str(one) for one in listed(said or "")]
    named = not any(MIXER.search(one) or EVERY.fullmatch(one) for one in words)
    if named and rank and targets == "all" and model.linear is not None and model.linear.kind in OF_ITS_OWN:
        layers = f"{model.linear.num_layers} layers of linear attention"
        notes.append(f"adapters are priced on the {layers} too, which none of the names says: memory comes out too high")
    return tuple(notes)


def of_joint_layers(model: ModelSpec | None, name: str | None, targets: str, rank: int) -> tuple[str, ...]:
    """Note about layers of a model that are several in one, which PEFT gives one adapter and a plan as many as they stand for."""
    joint = num_joint_layers(model, name or "") if model is not None else 0
    if model is None or not joint or not rank or model.is_mla:
        return ()
    apart = joint if targets == "all" and model.gated else 2
    more = 16.0 * rank * apart * model.hidden_size * model.num_layers / GIB
    what = f"query, key and value of {model.name} are one layer, which PEFT gives one adapter; priced as one for each"
    return (f"{what}: memory comes out too high by up to {more:.1f} GiB",) if more >= 0.1 else ()


def of_trained_images(model: ModelSpec | None, frozen_by: str) -> tuple[str, ...]:
    """Note about an image encoder that a trainer trains with all else, where no plan of text has it trained."""
    if model is None or model.vision is None:
        return ()
    billions = model.vision.parameters / GIGA
    what = "the image encoder is trained too, and priced frozen: memory comes out too low by gradients and states of"
    return (f"{what} {billions:.2f} billion weights; {frozen_by} freezes it",)


OF_GPT_J = ("fc_in", "fc_out", "wte")
"""Layers of GPT-J and CodeGen that people list for all models, after an example of TRL: PEFT adapts those of a list that are there.
[trl, examples/research_projects/stack_llama_2/scripts/dpo_llama2.py; peft, tuners/tuners_utils.py: inject_adapter]"""


APART = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Layers that a model whose layers are joined does not have: the last two where its gate and up are one too."""


def of_absent_layers(given: Settings, names: Sequence[str], label: str | None, model: ModelSpec | None) -> tuple[str, ...]:
    """Note about layers listed under one of some ``names`` that the model does not have, which are taken out of the list. Raises
    PlannerError where none is left, as PEFT does.  [peft, tuners/tuners_utils.py: inject_adapter]"""
    name = next((one for one in names if given.get(one) is not None), "")
    tails = {str(one): str(one).rpartition(".")[2].lower() for one in listed(given.get(name) or "")}
    if model is None:
        return ()
    joint = {2: APART[:3], 3: APART}.get(num_joint_layers(model, label or ""), ()) if not model.is_mla else ()
    gone = [one for one, tail in tails.items() if tail in joint]
    if {"fc_in", "q_proj"} <= {*tails.values()} and not re.search(r"(?i)gpt-?j|codegen", f"{label} {model.name}"):
        gone += [one for one, tail in tails.items() if tail in OF_GPT_J or (model.gated and tail == "out_proj")]
    if not gone:
        return ()
    if len(gone) == len(tails):
        why = "whose query, key and value are one layer: PEFT does not start with these names"
        raise PlannerError(f"{given.where(name)}: {', '.join(gone)} are none of the layers of {model.name}, {why}")
    given.data = {**given.data, name: [one for one in tails if one not in gone]}
    return (f"adapters on {', '.join(gone)}: {model.name} has no such layers, which PEFT passes over",)


FEW = 1000
"""Tokens that change no plan."""


def as_built(given: Settings, model: ModelSpec | None, tokens: int) -> tuple[dict[str, int], tuple[str, ...]]:
    """(Fields of a model as its program has it, notes): rows of added tokens, and no prediction modules, which transformers leaves
    in the checkpoint.  [modeling_deepseek_v3.py: _keys_to_ignore_on_load_unexpected]"""
    rows, notes = of_added_tokens(given, model, tokens)
    if model is None or not model.mtp_layers:
        return rows, notes
    what = f"{model.name} without its prediction modules (MTP), which transformers does not build"
    return {**rows, "mtp_layers": 0}, (*notes, what)


def of_added_tokens(given: Settings, model: ModelSpec | None, tokens: int) -> tuple[dict[str, int], tuple[str, ...]]:
    """(Vocabulary of a model with the tokens that its program adds, note); ``tokens`` of a forward pass."""
    count = given.get("added_tokens")
    if count in (None, False):
        return {}, ()
    if isinstance(count, int) and count is not True and model is not None:
        rows = model.vocab_size + count
        what = f"tables and scores are priced with {rows:,} rows, {count:,} of them tokens that the program adds"
        return {"vocab_size": rows}, (what,)
    by = ""
    if model is not None:
        tables = 16.0 * model.hidden_size * (1 if model.tied_embeddings else 2)
        by = f" by up to {FEW * (tables + 14.0 * tokens) / GIB:.2f} GiB for each {FEW:,} of them"
    more = f"{count:,} tokens" if count is not True else "tokens"
    what = f"the program adds {more} and resizes the tables, which are priced with the rows of the model"
    return {}, (f"{what}: memory comes out too low{by}; --set added_tokens=N prices them",)
