"""The residual stream is fp32 where autocast runs over weights in fp32."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from samples import MODELS, job, priced

from planner.layout import Layout, Recompute


def activations(trainer: str = "fsdp", name: str = "gqa", work: dict[str, Any] | None = None, **layout: Any) -> float:
    found = priced(job(name, trainer, gpus=layout.get("dp", 1), **(work or {})), Layout(**layout))
    return float(found.memory["activations"][0])


def rows(name: str = "gqa") -> float:
    one = job(name, "fsdp", gpus=1).workload
    return float(one.sequence_length * MODELS[name].hidden_size)


def test_recomputed_layers_keep_their_inputs_in_fp32() -> None:
    """2 T h more for each of L layers, and up to 8 T h of the one brought back; nothing where weights are gathered in bf16."""
    model = MODELS["gqa"]
    full = {"dp": 2, "recompute": int(Recompute.FULL), "num_microbatches": 2}
    more = activations(zero=0, **full) - activations(zero=2, **full)
    assert 0 <= more / rows() - 2 * model.num_layers <= 8
    alone = {"dp": 1, "zero": 0, "recompute": int(Recompute.FULL)}
    pure = activations(work={"precision": "bf16_true"}, **alone)
    assert 0 <= (activations(**alone) - pure) / rows() - 2 * model.num_layers <= 8


def test_layers_that_are_kept_hold_ten_bytes_more() -> None:
    """Two norms 2 + 2, casts of query, key and value 4, of gate and up 2: counted with hooks on transformers' LlamaForCausalLM."""
    kept = {"dp": 2, "num_microbatches": 2}
    more = activations(zero=0, **kept) - activations(zero=2, **kept)
    assert more == pytest.approx(10 * MODELS["gqa"].num_layers * rows(), rel=0.05)


@pytest.mark.parametrize("trainer", ["deepspeed", "megatron", "torchtune", "unsloth", "verl", "prime-rl", "fms-fsdp"])
def test_trainers_without_autocast_keep_a_stream_in_half_precision(trainer: str) -> None:
    one = job("gqa", trainer, gpus=1, **({"precision": "bf16_true"} if trainer == "torchtune" else {}))
    layout = Layout(recompute=int(Recompute.FULL))
    half = dataclasses.replace(one, trainer=one.trainer.replace(weight_bytes=2.0))
    assert np.array_equal(*(priced(each, layout).memory["activations"] for each in (one, half)))


def test_adapters_on_a_base_in_fp32_have_such_a_stream() -> None:
    full = {"dp": 1, "zero": 0, "recompute": int(Recompute.FULL)}
    low, wide = (activations(work={"lora_rank": 8, "frozen_weights": one}, **full) for one in ("bf16", "fp32"))
    assert wide - low == pytest.approx(2 * MODELS["gqa"].num_layers * rows(), rel=0.1)
