"""What a plan leaves out, or prices too high, of some models that configurations name."""

import re
from typing import Any

from planner.model import ModelSpec
from planner.trainers.reading.layer_names import EVERY, listed
from planner.units import GIGA

TOWERS = {"gemma-3-4b": 0.42, "gemma-3-12b": 0.42, "gemma-3-27b": 0.42}
"""Presets of text alone whose uploads have an image encoder -> billions of weights that it has.  [config.json of the uploads]"""
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


def of_trained_images(model: ModelSpec | None, frozen_by: str) -> tuple[str, ...]:
    """Note about an image encoder that a trainer trains with all else, where no plan of text has it trained."""
    if model is None or model.vision is None:
        return ()
    billions = model.vision.parameters / GIGA
    what = "the image encoder is trained too, and priced frozen: memory comes out too low by gradients and states of"
    return (f"{what} {billions:.2f} billion weights; {frozen_by} freezes it",)
