"""Memory of imported jobs of transformers against what a step of its own classes allocates, counted on fake tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="NOT CHECKED: transformers is not installed")
pytest.importorskip("accelerate", reason="NOT CHECKED: accelerate is not installed")

from planner.trainers.reading import read
from planner.trainers.reading.configuration import to_plan
from planner.trainers.reading.given import Given
from planner.units import GIB
from tests.trainers.fake_step import Case, peak

PROGRAM = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("./model", dtype=torch.{dtype}, attn_implementation="{kernel}")
{adapters}
args = TrainingArguments(output_dir="out", bf16=True, per_device_train_batch_size={batch}, optim="adamw_torch",
                         gradient_checkpointing={recompute}, gradient_checkpointing_kwargs={{"use_reentrant": False}})
Trainer(model=model, args=args, train_dataset=data).train()
"""
ADAPTERS = 'model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))'
ALLOCATED = ("weights", "gradients", "optimizer_states", "activations", "workspace")
"""Parts of a prediction that torch allocates."""
SIZES = {
    "hidden_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
DENSE = {**SIZES, "intermediate_size": 11008}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**DENSE, "hidden_act": "silu"}, "qwen3": {**DENSE, "head_dim": 128, "hidden_act": "silu"},
    "phi": {**SIZES, "num_key_value_heads": 32, "intermediate_size": 16384, "hidden_act": "gelu_new"},
    "gpt_neox": {**SIZES, "intermediate_size": 16384, "hidden_act": "gelu", "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "mixtral": {**DENSE, "num_local_experts": 8, "num_experts_per_tok": 2, "router_jitter_noise": 0.0, "sliding_window": None},
    "qwen3_moe": {
        **SIZES, "hidden_size": 2048, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 32,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "gpt_oss": {
        **SIZES, "hidden_size": 2880, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 16, "num_experts_per_tok": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "how"), [
    ("llama", {}), ("llama", {"dtype": "float32"}), ("llama", {"recompute": True}), ("llama", {"adapters": True}),
    ("llama", {"eager": True}), ("llama", {"adapters": True, "recompute": True}), ("qwen3", {}), ("qwen3", {"adapters": True}),
    ("phi", {}), ("phi", {"adapters": True}), ("gpt_neox", {"adapters": True}), ("mixtral", {"adapters": True}),
    ("gpt_oss", {"adapters": True}), ("qwen3_moe", {}),
    ("qwen3_moe", {"adapters": True}), ("qwen3_moe", {"adapters": True, "recompute": True}),
])  # fmt: skip
def test_a_step_allocates_what_the_plan_says(tmp_path: Path, name: str, how: dict[str, Any]) -> None:
    """Within a tenth of all that is alive at the peak: six layers, where one layer's passing tensors count five times as much."""
    case = Case({"model_type": name, **MODELS[name]}, **how)
    (tmp_path / "model.json").write_text(json.dumps(case.config))
    (tmp_path / "requirements.txt").write_text("transformers==5.23.0\ntorch==2.13.0\n")
    program = PROGRAM.format(
        dtype=case.dtype, kernel="eager" if case.eager else "sdpa", adapters=ADAPTERS * case.adapters, batch=case.batch,
        recompute=case.recompute,
    )  # fmt: skip
    (tmp_path / "train.py").write_text(program)
    said = Given(num_gpus=1, model=str(tmp_path / "model.json"), sequence_length=case.length)
    asked = {"hardware": "h200", "model": said.model, "sequence_length": said.sequence_length}
    memory = to_plan(read(tmp_path / "train.py", None, said), asked).prediction.memory_gib
    planned, counted = sum(memory[one] for one in ALLOCATED), peak(case) / GIB
    print(f"{name} {how}: {planned:.2f} GiB planned, {counted:.2f} counted, {100 * (planned / counted - 1):+.1f} %")
    assert planned == pytest.approx(counted, rel=0.1)
