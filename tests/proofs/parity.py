"""The table of combinations that train like one process: ``python -m tests.proofs.parity``, on CPU processes of this machine.

``--subset`` runs the part of it that the tests run, ``--json`` is for programs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch

from planner.errors import PlannerError
from planner.lab.reference.split import SCHEDULES, Split, virtual_stages
from planner.lab.run.parity import Truth, of_rank
from planner.layout import NAMES, Layout
from planner.model import ModelSpec
from tests.proofs.forked_ranks import run_ranks


def tiny(**changes: Any) -> ModelSpec:
    """A small Llama with changes."""
    sizes: dict[str, Any] = {
        "name": "tiny", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "ffn_size": 48,
        "vocab_size": 64, "max_sequence_length": 64,
    }  # fmt: skip
    return ModelSpec(**sizes | changes)


EXPERTS: dict[str, Any] = {"num_experts": 8, "top_k": 2, "expert_ffn_size": 24}
MODELS: dict[str, ModelSpec] = {
    "llama": tiny(),
    "gqa": tiny(num_kv_heads=2, qkv_bias=True),
    "qwen": tiny(num_kv_heads=2, qk_norm=True),
    "tied": tiny(tied_embeddings=True),
    "gpt": tiny(gated=False, activation="gelu", norm="layernorm", position="learned", num_position_embeddings=64, linear_bias=True),
    "moe": tiny(**EXPERTS),
    "shared": tiny(**EXPERTS, num_shared_experts=1, shared_expert_ffn_size=24, num_dense_layers=1),
    "later": tiny(mtp_layers=1),
    "v3": tiny(
        head_dim=12, q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, mtp_layers=2,
        **EXPERTS, num_shared_experts=1, shared_expert_ffn_size=24, num_dense_layers=1,
    ),
    "mla": tiny(head_dim=12, q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
}  # fmt: skip


def combination(model: str, **fields: Any) -> Split:
    """A split of a small model; ``schedule`` by its number in Layout."""
    names = ("tp", "pp", "dp", "cp", "ep", "vpp", "schedule", "first_stage_layers", "last_stage_layers")
    layout = Layout(**{name: fields[name] for name in names if name in fields})
    return Split(**{
        "model": MODELS[model], "sequence_length": 16, "micro_batch_size": 1, "num_microbatches": 2, "precision": "fp64",
        "clip": 0.5, "dp_shard": int(layout.dp), "stages": virtual_stages(MODELS[model].num_layers, layout),
        **{name: value for name, value in fields.items() if name not in names},
        **{name: int(getattr(layout, name)) for name in ("tp", "pp", "dp", "cp", "ep")},
        "schedule": SCHEDULES[layout.schedule],  # type: ignore[index]
    })  # fmt: skip


def compare(split: Split) -> dict[str, Any]:
    """Both runs of one combination and their largest differences."""
    truth = Truth(split)
    ranks = run_ranks(of_rank, split.world, split)
    return truth.judged([truth.differences(one) for one in ranks])


GPIPE, INTERLEAVED, ZB, ZBV, DUALPIPE = 0, 2, 3, 4, 5
TABLE: tuple[tuple[str, dict[str, Any]], ...] = (
    # tensor parallelism, alone and with replicas and shards
    ("llama", {"tp": 2}),
    ("gqa", {"tp": 2, "fused": True}),
    ("qwen", {"tp": 2, "recompute": "selective"}),
    ("llama", {"tp": 4, "fused": True, "recompute": "full"}),
    ("gpt", {"tp": 2, "dp": 2, "zero": 2}),
    ("tied", {"tp": 2, "dp": 2, "zero": 3, "recompute": "full"}),
    ("llama", {"tp": 2, "dp": 2, "zero": 0}),
    ("llama", {"tp": 2, "dp": 4, "dp_shard": 2, "zero": 3, "fused": True}),
    # data parallelism: every level of sharding, HSDP, accumulation
    ("llama", {"dp": 2, "zero": 0, "num_microbatches": 3}),
    ("llama", {"dp": 2, "zero": 1, "num_microbatches": 3, "fused": True}),
    ("tied", {"dp": 2, "zero": 2, "num_microbatches": 3}),
    ("gqa", {"dp": 2, "zero": 3, "num_microbatches": 3, "micro_batch_size": 2, "recompute": "selective"}),
    ("gpt", {"dp": 4, "zero": 3, "recompute": "full"}),
    ("llama", {"dp": 4, "dp_shard": 2, "zero": 2}),
    ("llama", {"dp": 4, "dp_shard": 2, "zero": 1, "num_microbatches": 3}),
    ("llama", {"dp": 8, "dp_shard": 4, "zero": 3, "fused": True}),
    # pipelines: every schedule, with shards and recompute
    ("llama", {"pp": 2, "schedule": GPIPE, "num_microbatches": 4}),
    ("llama", {"pp": 2, "num_microbatches": 4, "fused": True}),
    ("llama", {"pp": 4, "num_microbatches": 6, "recompute": "full"}),
    ("llama", {"pp": 2, "first_stage_layers": 1, "num_microbatches": 3}),
    ("llama", {"pp": 2, "vpp": 2, "schedule": INTERLEAVED, "num_microbatches": 4}),
    ("gqa", {"pp": 2, "schedule": ZB, "num_microbatches": 4}),
    ("llama", {"pp": 2, "vpp": 2, "schedule": ZBV, "num_microbatches": 4}),
    ("llama", {"pp": 2, "vpp": 2, "schedule": DUALPIPE, "num_microbatches": 4}),
    ("llama", {"pp": 2, "dp": 2, "zero": 2, "num_microbatches": 4}),
    ("llama", {"pp": 2, "dp": 2, "zero": 3, "num_microbatches": 4, "recompute": "full"}),
    ("llama", {"pp": 2, "dp": 2, "zero": 0, "num_microbatches": 4}),
    ("llama", {"pp": 2, "dp": 2, "zero": 2, "schedule": GPIPE, "num_microbatches": 3}),
    ("llama", {"pp": 2, "dp": 2, "vpp": 2, "zero": 2, "schedule": INTERLEAVED, "num_microbatches": 4, "recompute": "selective"}),
    ("llama", {"pp": 2, "dp": 2, "vpp": 2, "zero": 2, "schedule": ZBV, "num_microbatches": 4, "fused": True}),
    ("llama", {"pp": 2, "dp": 4, "dp_shard": 2, "zero": 2, "num_microbatches": 2}),
    # tensor parallelism in a pipeline
    ("llama", {"tp": 2, "pp": 2, "dp": 2, "zero": 2, "num_microbatches": 4}),
    ("gqa", {"tp": 2, "pp": 2, "dp": 2, "zero": 3, "num_microbatches": 3, "fused": True, "recompute": "full"}),
    ("llama", {"tp": 2, "pp": 2, "dp": 2, "zero": 0, "num_microbatches": 3}),
    ("llama", {"tp": 2, "pp": 2, "vpp": 2, "schedule": ZBV, "num_microbatches": 4, "fused": True}),
    ("llama", {"tp": 2, "pp": 2, "dp": 2, "vpp": 2, "zero": 2, "schedule": INTERLEAVED, "num_microbatches": 4}),
    ("gqa", {"tp": 2, "pp": 4, "num_microbatches": 4}),
    # context parallelism
    ("llama", {"cp": 2}),
    ("gqa", {"cp": 4, "fused": True, "recompute": "full"}),
    ("gqa", {"cp": 2, "dp": 2, "zero": 3, "recompute": "selective"}),
    ("qwen", {"cp": 2, "tp": 2, "fused": True}),
    ("gpt", {"cp": 2, "tp": 2, "dp": 2, "zero": 2}),
    ("llama", {"cp": 2, "pp": 2, "dp": 2, "zero": 2, "num_microbatches": 3}),
    ("llama", {"cp": 2, "tp": 2, "pp": 2, "num_microbatches": 2, "fused": True}),
    # experts
    ("moe", {"dp": 2, "zero": 2}),
    ("moe", {"ep": 2, "dp": 2, "zero": 3, "fused": True}),
    ("shared", {"ep": 4, "dp": 4, "zero": 2, "recompute": "full"}),
    ("moe", {"ep": 2, "dp": 4, "zero": 3, "num_microbatches": 3}),
    ("moe", {"ep": 2, "dp": 4, "dp_shard": 2, "zero": 2}),
    ("shared", {"ep": 4, "tp": 2, "dp": 2, "zero": 3, "fused": True}),
    ("moe", {"ep": 2, "pp": 2, "dp": 2, "zero": 2, "num_microbatches": 3}),
    ("moe", {"ep": 4, "cp": 2, "tp": 2, "fused": True}),
    ("shared", {"ep": 8, "cp": 2, "dp": 2, "tp": 2, "zero": 2}),
    ("moe", {"ep": 2, "dp": 8, "zero": 3}),
    # latent attention
    ("mla", {"dp": 2, "zero": 3}),
    ("mla", {"tp": 2, "dp": 2, "zero": 2, "fused": True}),
    ("mla", {"tp": 2, "cp": 2, "fused": True, "recompute": "full"}),
    # passes in bf16, see Truth
    ("gqa", {"tp": 2, "dp": 2, "zero": 3, "num_microbatches": 3, "precision": "bf16", "fused": True}),
    ("llama", {"pp": 2, "dp": 2, "zero": 2, "num_microbatches": 4, "precision": "bf16"}),
    ("qwen", {"cp": 2, "dp": 2, "zero": 1, "precision": "bf16", "recompute": "full"}),
    # optimizer states in host memory; experts whose layers are repeated in part
    ("llama", {"dp": 2, "zero": 3, "host_states": 100}),
    ("gqa", {"tp": 2, "pp": 2, "num_microbatches": 4, "host_states": 50}),
    ("shared", {"ep": 2, "dp": 2, "zero": 3, "recompute": "selective", "fused": True}),
    # multi-token prediction: on one stage, and behind a pipeline whose first stage has the same embedding
    ("later", {"tp": 2, "dp": 2, "zero": 3, "fused": True}),
    ("later", {"cp": 2, "pp": 2, "schedule": ZB, "num_microbatches": 4}),
    ("later", {"pp": 2, "dp": 2, "zero": 2, "num_microbatches": 4, "precision": "bf16", "fused": True}),
    ("v3", {"pp": 2, "vpp": 2, "schedule": INTERLEAVED, "num_microbatches": 4, "fused": True}),
    ("v3", {"pp": 2, "dp": 2, "ep": 2, "zero": 2, "num_microbatches": 4, "recompute": "full"}),
    # linear layers in 8 bits; scales are of 8 values where there are blocks
    ("gqa", {"tp": 2, "fused": True, "linear": "fp8"}),
    ("gpt", {"tp": 2, "dp": 2, "zero": 2, "micro_batch_size": 2, "linear": "fp8"}),
    ("llama", {"tp": 2, "fused": True, "recompute": "selective", "linear": "fp8"}),
    ("llama", {"tp": 2, "pp": 2, "schedule": ZB, "num_microbatches": 4, "fused": True, "linear": "fp8"}),
    ("qwen", {"cp": 2, "tp": 2, "fused": True, "linear": "fp8_row"}),
    ("gqa", {"dp": 2, "zero": 3, "num_microbatches": 3, "linear": "fp8_row"}),
    ("mla", {"dp": 2, "zero": 3, "fused": True, "linear": "fp8_block", "scale_block": 8}),
    ("mla", {"tp": 2, "fused": True, "recompute": "full", "linear": "fp8"}),
    ("shared", {"ep": 2, "tp": 2, "zero": 3, "linear": "fp8_row"}),
    ("later", {"tp": 2, "pp": 2, "num_microbatches": 4, "fused": True, "linear": "mxfp8", "scale_block": 8}),
    ("gqa", {"tp": 2, "dp": 2, "zero": 3, "num_microbatches": 3, "precision": "bf16", "fused": True, "linear": "fp8"}),
)  # fmt: skip
"""Combinations up to 8 processes: model of MODELS and what differs from one process."""
SUBSET = (1, 9, 11, 13, 20, 21, 22, 29, 31, 42, 44, 45, 51, 55, 57, 60, 62, 66, 68, 72)
"""Rows of TABLE that the tests run."""


def describe(fields: dict[str, Any]) -> str:
    """A combination in words."""
    words = {**fields, **({"schedule": NAMES["schedule"][fields["schedule"]]} if "schedule" in fields else {})}
    return " ".join(f"{name} {value}" if value is not True else name for name, value in words.items())


def main(arguments: list[str] | None = None) -> int:
    """The table; 1 when a combination differs or fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.parity", description=__doc__.split("\n\n")[0])
    parser.add_argument("--subset", action="store_true", help="only what the tests run")
    parser.add_argument("--row", type=int, action="append", help="only this row, from 0; may be repeated")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = options.row or (SUBSET if options.subset else range(len(TABLE)))
    failed = 0
    for row in rows:
        name, fields = TABLE[row]
        started = time.perf_counter()
        try:
            found = compare(combination(name, **fields))
        except PlannerError as error:
            found = {"equal": False, "error": str(error)}
        failed += not found["equal"]
        found = {
            "row": row,
            "model": name,
            "split": describe(fields),
            "seconds": round(time.perf_counter() - started, 1),
        } | found
        if options.json:
            print(json.dumps(found), flush=True)
        else:
            result = found.get("error") or (
                f"{found['parameters']} parameters, {found['values']} values: error {found['parameter_error']:.1e}, "
                f"loss {found['loss_error']:.1e}, norm {found['norm_error']:.1e}  {found['why']}"
            )
            verdict = "equal" if found["equal"] else "WRONG"
            print(f"{row:3} {name:7} {found['split']:80} {found['seconds']:5.1f} s  {verdict}  {result}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
