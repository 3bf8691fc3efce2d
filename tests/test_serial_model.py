"""The serial model that split runs are held to: it trains, a split run that is wrong differs from it, and transformers agree."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fresh import fresh

from planner.cost.parameters import total_parameters

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="NOT RUN: torch, of the extra 'test', is not installed"
)
pytestmark = needs_torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For tiny tensors more threads only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def serial(name: str, **changes: Any) -> Any:
    """The serial model of a model of tests.proofs.parity, with its parameters made, in fp64."""
    import torch

    from planner.lab.run.serial_model import SerialModel
    from planner.lab.run.training import initial
    from tests.proofs.parity import MODELS

    found = SerialModel(
        dataclasses.replace(MODELS[name], **changes), lambda name, shape: initial(name, shape, torch.float64)
    )
    found.logits(torch.arange(16).view(1, 16))
    return found


@pytest.mark.parametrize("name", ["llama", "gqa", "qwen", "tied", "gpt", "moe", "shared", "mla"])
def test_later_tokens_do_not_change_earlier_ones_and_every_parameter_learns(name: str) -> None:
    import torch

    one = serial(name)
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[:, 9:] = 63 - other[:, 9:]
    here, there = (one.logits(given[:, :16]).detach() for given in (tokens, other))
    assert (here[:, :9] - there[:, :9]).abs().max() < 1e-12 < 1e-3 < (here[:, 9:] - there[:, 9:]).abs().max()
    before = {name: weight.detach().clone() for name, weight in one.weights.items()}
    losses = one.train([tokens] * 5, 0.1, 0.5)[::2]
    assert losses[-1] < 0.95 * losses[0]
    still = [name for name, weight in one.weights.items() if torch.equal(weight.detach(), before[name])]
    unseen = [name for name in still if not name.endswith("attention.k.bias")]  # softmax does not see the bias of keys
    assert unseen == [], "a router or an expert that is cut off"
    assert sum(weight.numel() for weight in one.weights.values()) == total_parameters(one.model)


def test_it_has_nothing_of_the_model_that_it_judges() -> None:
    from planner.lab.run import serial_model, serial_rounding

    allowed = {"math", "collections.abc", "dataclasses", "typing", "torch", "torch.autograd",
               "planner.model", "planner.lab.run.serial_rounding"}
    for module in (serial_model, serial_rounding):
        assert module.__file__ is not None
        with open(module.__file__, encoding="utf-8") as file:
            text = file.read()
        assert {line.split()[1] for line in text.splitlines() if line.startswith(("import ", "from "))} <= allowed
        assert "float8" not in text


@pytest.mark.proof
def test_every_sabotage_is_seen() -> None:
    """Twenty-three changes of a split job, each of which makes it not equal; without them the same splits are equal."""
    code = "import json; from tests.proofs.sabotage import rows\nfor row in rows(): print(json.dumps(row))"
    rows = [json.loads(line) for line in fresh(code).splitlines() if line.startswith("{")]
    wrong, right = ([row for row in rows if (row["sabotage"] == "nothing") == same] for same in (False, True))
    assert len(wrong) == 23 and len(right) == 12
    for row in wrong:
        assert not row["equal"] and row["expected"] in row["why"], row
    assert all(row["equal"] and row["why"] == "" for row in right), right


# ------------------------------------------------------------------------------------------------ transformers

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "attn_implementation": "eager",
}  # fmt: skip
WITNESSES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "Llama", {"num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 48}),
    ("gqa", "Qwen2", {"num_key_value_heads": 2, "intermediate_size": 48}),
    ("qwen", "Qwen3", {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}),
    ("moe", "Qwen3Moe", {
        "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 8,
        "num_experts_per_tok": 2, "norm_topk_prob": False,
    }),
    ("mla", "DeepseekV3", {
        "num_key_value_heads": 4, "intermediate_size": 48, "first_k_dense_replace": 4, "q_lora_rank": 16, "kv_lora_rank": 8,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "rope_interleave": False,
    }),
)  # fmt: skip
"""Model of tests.proofs.parity (the MoE with norms of queries and keys), class of transformers, and its sizes."""
NAMES = (
    ("embedding.", "model.embed_tokens."), ("attention_norm.", "input_layernorm."), ("mlp_norm.", "post_attention_layernorm."),
    ("attention.q_norm.", "self_attn.q_norm."), ("attention.k_norm.", "self_attn.k_norm."), ("attention.q_down_norm.",
    "self_attn.q_a_layernorm."), ("attention.kv_down_norm.", "self_attn.kv_a_layernorm."), ("attention.q_down.",
    "self_attn.q_a_proj."), ("attention.q_up.", "self_attn.q_b_proj."), ("attention.kv_down.", "self_attn.kv_a_proj_with_mqa."),
    ("attention.kv_up.", "self_attn.kv_b_proj."), ("attention.out.", "self_attn.o_proj."), ("attention.", "self_attn."),
    ("mlp.router", "mlp.gate.weight"), ("head.weight", "lm_head.weight"),
)  # fmt: skip


def name_of(ours: str) -> str:
    """A parameter's name in transformers."""
    found = next((ours.replace(a, b) for a, b in NAMES if a in ours), ours)
    if ours == "norm.weight" or ours.endswith("router"):
        return f"model.{found}"
    for one in ("q", "k", "v", "gate", "up", "down"):
        found = found.replace(f"self_attn.{one}.", f"self_attn.{one}_proj.").replace(f"mlp.{one}.", f"mlp.{one}_proj.")
    return f"model.{found}" if found.startswith("layers.") else found


@pytest.mark.proof
@pytest.mark.parametrize(("name", "kind", "sizes"), WITNESSES)
def test_transformers_give_the_same_loss_and_gradients(name: str, kind: str, sizes: dict[str, Any]) -> None:
    """A second witness: Hugging Face's own code with the same weights, in fp64."""
    transformers = pytest.importorskip("transformers", reason="NOT RUN: transformers is not installed")
    import torch

    one = serial(name, **({"qk_norm": True} if name == "moe" else {}))
    config = getattr(transformers, f"{kind}Config")(**SIZES, **sizes)
    config._experts_implementation = "eager"  # grouped products have no fp64
    other = getattr(transformers, f"{kind}ForCausalLM")(config).double().eval()
    theirs = dict(other.named_parameters())
    ours = {name_of(key): key for key in one.weights if ".experts." not in key}
    made = {key: one.weights[ours[key]] for key in theirs if key in ours}
    for layer in range(one.model.num_layers if one.model.is_moe else 0):
        at = f"layers.{layer}.mlp.experts."
        gate, up, down = (one.weights[f"{at}{part}"] for part in ("gate", "up", "down"))
        made |= {f"model.{at}gate_up_proj": torch.cat([gate, up], 1), f"model.{at}down_proj": down}
    assert set(made) == set(theirs) and len(ours) == len(one.weights) - 3 * one.model.num_moe_layers
    with torch.no_grad():
        for key, parameter in theirs.items():
            parameter.copy_(made[key])
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(2))
    logits = other(input_ids=tokens[:, :16]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    mine = one.loss(tokens)
    mine.backward()
    assert abs((mine - loss).item()) < 1e-6 * loss.item()  # transformers' norms, router and angles are in fp32 whatever the model
    for key, value in ours.items():
        mine_, theirs_ = one.weights[value].grad, theirs[key].grad
        assert (mine_ - theirs_).abs().max() < 1e-4 * theirs_.abs().max().clamp(min=1e-6), key


def test_received_rows_are_put_by_expert_with_as_many_operators_whatever_their_number() -> None:
    """Two senders, three experts here: rows lie s0e0 s0e0 s0e2 | s1e0 s1e1 s1e1 s1e2."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from planner.lab.reference.transformer import _by_expert

    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Count.seen += 1
            return func(*args, **(kwargs or {}))

    assert _by_expert(torch.tensor([2, 0, 1, 1, 2, 1]), 3, 7).tolist() == [0, 1, 3, 4, 5, 2, 6]
    with Count():
        _by_expert(torch.full((256,), 4), 64, 1024)
    assert Count.seen <= 12
