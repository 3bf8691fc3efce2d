"""The residual stream is fp32 where autocast runs over weights in fp32."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from samples import MODELS, job, legal_layouts, priced

from planner.cost.state_dtypes import whole_bytes
from planner.layout import Layout, Recompute
from planner.trainer import load_trainer


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


def adapted(options: str = "", recompute: int = Recompute.NONE, zero: int = 0, gpus: int = 1, **work: Any) -> dict[str, float]:
    """Bytes of a job with adapters on a base in 4 bits, by component."""
    work = {"lora_rank": 64, "frozen_weights": "nf4", **work}
    layout = Layout(dp=gpus, zero=zero, recompute=int(recompute), num_microbatches=32 // gpus)
    found = priced(job("gqa", load_trainer(f"fsdp+loss=full{options}"), gpus=gpus, **work), layout)
    return {name: float(one[0]) for name, one in found.memory.items()}


def test_norms_in_fp32_of_a_base_in_four_bits_make_its_layers_pass_fp32_on() -> None:
    """Gate, up and SiLU's output, 2 T f more each; recomputed 2 T h a layer, and 8 T f - 2 T h where one is brought back."""
    model = MODELS["gqa"]
    inner, layers = rows() * model.ffn_size / model.hidden_size, model.num_layers
    plain, norms = adapted(), adapted("+unquantised=norms")
    assert norms["activations"] - plain["activations"] == pytest.approx(6 * inner * layers, rel=1e-6)
    assert norms["weights"] == plain["weights"]
    kept, less = (adapted(one, Recompute.FULL)["activations"] for one in ("+unquantised=norms", ""))
    assert 0 <= kept - less - 2 * rows() * (layers - 1) <= 8 * inner + 2 * rows()
    for zero in (2, 3):  # gathered in bf16
        assert adapted("+unquantised=norms", zero=zero, gpus=8) == adapted(zero=zero, gpus=8)
    assert adapted("+unquantised=norms", frozen_weights="bf16") == adapted(frozen_weights="bf16")


def test_tables_in_fp32_lie_in_two_bytes_more_and_their_head_is_cast() -> None:
    model = MODELS["gqa"]
    table = float(model.vocab_size * model.hidden_size)
    plain, whole = adapted(), adapted("+unquantised=fp32")
    norms = adapted("+unquantised=norms")
    tables = 2.0 * table * (1 + (not model.tied_embeddings))
    assert whole["weights"] - plain["weights"] == pytest.approx(tables, rel=0.01)
    assert whole["activations"] == norms["activations"]
    assert whole["workspace"] - norms["workspace"] == pytest.approx(2.0 * table, rel=0.01)


@pytest.mark.parametrize(("optimizer", "states"), [("adam", 8.0), ("adam_8bit", None), ("paged_adam", None), ("sgd", 4.0)])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_adapters_in_half_precision(optimizer: str, states: float | None, precision: str) -> None:
    """Weights 2 for 4; states as torch has them of their parameter, as bitsandbytes has them 32 or 8 bits wide."""
    plain, half = (adapted(one, optimizer=optimizer, precision=precision) for one in ("", "+adapter_dtype=half"))
    size = (plain["weights"] - half["weights"]) / 2.0
    each = (plain["optimizer_states"] - half["optimizer_states"]) / size
    assert size > 0 and each == pytest.approx(states / 2.0 if states else 0.0, abs=0.02)


def test_adapters_in_half_precision_share_the_input_of_their_layer() -> None:
    """PEFT casts nothing: query, key and value read one tensor, gate and up one, and the output of attention is there: 8 T h less,
    counted with hooks; but each casts an input in fp32."""
    plain, half = adapted(), adapted("+adapter_dtype=half")
    assert plain["activations"] - half["activations"] == pytest.approx(8 * rows() * MODELS["gqa"].num_layers, rel=1e-6)
    wide, both = adapted("+unquantised=norms"), adapted("+unquantised=norms+adapter_dtype=half")
    assert wide["activations"] == both["activations"]


def test_tables_trained_beside_them_are_in_half_precision_too() -> None:
    work = job("gqa", "fsdp", gpus=1, lora_rank=8, lora_whole="both", frozen_weights="nf4").workload
    assert whole_bytes(work, load_trainer("fsdp")) == (4.0, 4.0, 8.0)
    assert whole_bytes(work, load_trainer("fsdp+adapter_dtype=half")) == (2.0, 2.0, 4.0)
    whole, same = (priced(job("gqa", load_trainer(f"fsdp{one}"), gpus=1), Layout()) for one in ("", "+adapter_dtype=half"))
    assert all(np.array_equal(one, same.memory[name]) for name, one in whole.memory.items())  # without adapters


@pytest.mark.parametrize("options", ["+adapter_dtype=half", "+unquantised=norms", "+unquantised=fp32+adapter_dtype=half"])
def test_many_layouts_cost_what_each_does_alone(options: str) -> None:
    one = job("gqa", load_trainer(f"trl{options}"), lora_rank=16, frozen_weights="nf4")
    layouts = legal_layouts("gqa", "fsdp", 8, 32, 24)
    whole = priced(one, layouts)
    assert len({*np.asarray(layouts.zero).tolist()}) > 1 and len({*np.asarray(layouts.recompute).tolist()}) > 1
    for number in range(len(layouts)):
        single = priced(one, layouts.row(number))
        assert all(np.array_equal(part[number], single.memory[name][0]) for name, part in whole.memory.items())


@pytest.mark.parametrize(("experts", "rows"), [("linear", 1.0), ("half", 0.0)])
def test_experts_pass_fp32_on_where_each_is_a_linear_layer(experts: str, rows: float) -> None:
    """6 T K f more a layer of them; one tensor of all is multiplied in half precision."""
    model, moe = MODELS["moe"], {"lora_rank": 8, "frozen_weights": "nf4"}
    assert model.is_moe and not model.shared_expert_ffn_size
    trainers = [load_trainer(f"fsdp+loss=full+frozen_experts={experts}+unquantised={one}") for one in ("half", "norms")]
    each = [priced(job("moe", one, gpus=1, **moe), Layout(num_microbatches=32)).memory["activations"][0] for one in trainers]
    tokens = job("moe", "fsdp", gpus=1).workload.sequence_length
    wide = model.num_dense_layers * model.ffn_size + rows * model.num_moe_layers * model.top_k * model.expert_ffn_size
    assert each[1] - each[0] == pytest.approx(6.0 * tokens * wide, rel=1e-6)


def test_words_that_an_option_adds_leave_the_others_as_they_were() -> None:
    """"compile off" read "compile of its own" beside an option that adds a word to what is not fused."""
    trainer = load_trainer("trl+unquantised=fp32+adapter_dtype=half")
    assert [trainer.option(one) for one in ("compile", "unquantised", "adapter_dtype")] == ["off", "fp32", "half"]
