"""Targets that the search alone does not reach widely: plans made by hand, read by the trainers' own code.

One process per trainer: its import takes most of the time. Where a package is missing, the test says NOT CHECKED.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from planner.layout import Layout, Module
from planner.model import ModelSpec, load_model
from planner.trainers.bundle.folder import make_bundle, write_bundle
from planner.trainers.bundle.target import LEVELS, ExportJob
from planner.trainers.checking.child import check_many
from planner.trainers.targets import load_target
from tests.trainer_samples import plan_of

SECOND = int(Module.EVERY_SECOND_MATMUL)


def job(trainer: str, model: str = "llama-3.1-8b", work: Any = None, **layout: int) -> ExportJob:
    """A job of 8 GPUs and 16 microbatches unless told otherwise, without a search."""
    fields = {"dp": 8, "num_microbatches": 16, **layout}
    return ExportJob.of(plan_of(trainer, Layout(**fields), model=load_model(model), **(work or {})))


@dataclass(frozen=True)
class Cases:
    """What one target is given."""

    package: str
    """What must be importable."""
    jobs: tuple[tuple[Any, ...], ...]
    """Trainer, model, workload, layout."""
    wrong: tuple[tuple[str, str, str], ...]
    """File of the first job's folder, an expression that stands in it, and what replaces it: refused then."""
    level: str = ""
    """Level that all reach; default the target's."""


PARTS = {"sequence_parallel": 1}
PURE = {"precision": "bf16_true"}
AMD = {"hardware": "mi300x"}
LLAMA, QWEN_MOE = "llama-3.1-8b", "qwen3-30b-a3b"
CASES = {
    "automodel": Cases(
        "nemo_automodel",
        (
            ("automodel", LLAMA, {}, {"zero": 3}),
            ("automodel", LLAMA, {}, {"zero": 2, "tp": 2, "dp": 4, "sequence_parallel": 1, "recompute": 2}),
            ("automodel", LLAMA, {}, {"zero": 2, "pp": 2, "vpp": 2, "schedule": 2, "dp": 4}),
            ("automodel", LLAMA, {}, {"zero": 3, "cp": 2, "dp": 4, "recompute": 1, "recompute_modules": SECOND}),
            ("automodel", QWEN_MOE, {}, {"zero": 3, "ep": 8, "cp": 2, "dp": 4}),
            ("automodel", QWEN_MOE, {}, {"zero": 2, "ep": 4, "pp": 2, "dp": 4}),
            ("automodel", LLAMA, {}, {"zero": 3, "dp_shard": 4}),
            ("automodel", LLAMA, {"lora_rank": 16}, {"zero": 3}),
            ("automodel", "gpt-oss-20b", {}, {"zero": 3, "ep": 8}),
            ("automodel", "qwen2.5-7b", {"precision": "fp8"}, {"zero": 3}),
        ),
        (
            ("automodel.yaml", "global_batch_size: 128", "global_batch_size: 256"),
            ("automodel.yaml", "reshard_after_forward: true", "reshard_after_forward: false"),
            ("automodel.yaml", "distributed:", "distribute:"),
            ("automodel.yaml", "tp_size: 1", "tp_sizes: 1"),
            ("automodel-smoke.yaml", "tp_size: 1", "tp_size: 2"),
            ("automodel-smoke.yaml", "seq_len", "seqlen"),
            ("model/config.json", '"num_hidden_layers": 32', '"num_hidden_layers": 31'),
        ),
        "model built",
    ),
    "ms-swift": Cases(
        "swift",
        (
            ("ms-swift", LLAMA, {}, {"zero": 3, "recompute": 2}),
            ("ms-swift", LLAMA, {}, {"zero": 2}),
            ("ms-swift", LLAMA, {}, {"zero": 3, "cp": 2, "dp": 4, "cp_method": 1}),
            ("ms-swift", LLAMA, {"lora_rank": 8}, {"zero": 0, "recompute": 2}),
            ("ms-swift", "qwen3-32b", {"lora_rank": 8, "frozen_weights": "nf4_dq"}, {"zero": 0}),
            ("ms-swift-megatron", LLAMA, {}, {"zero": 1, "tp": 2, "pp": 2, "vpp": 2, "schedule": 2, "dp": 2, **PARTS}),
            ("ms-swift-megatron", QWEN_MOE, {"lora_rank": 8}, {"zero": 1, "ep": 8}),
            ("ms-swift-megatron", "qwen2.5-7b", {}, {"zero": 1, "cp": 2, "dp": 4, "recompute": 2}),
            ("ms-swift-megatron", LLAMA, {"optimizer": "adam_bf16"}, {"zero": 1, "recompute": 1, "recompute_modules": 1}),
        ),
        (
            ("ms_swift.yaml", "gradient_accumulation_steps: 16", "gradient_accumulation_steps: 8"),
            ("fsdp.json", '"reshard_after_forward": true', '"reshard_after_forward": false'),
            ("fsdp.json", '"activation_checkpointing": true', '"activation_checkpointing": false'),
            ("ms_swift.yaml", "max_length", "max_lengths"),
            ("ms_swift.yaml", "packing: true", "packing: false"),
            ("ms_swift.yaml", "attn_impl: flash_attn", "attn_impl: sdpa"),
        ),
    ),
    "torchtune": Cases(
        "torchtune",
        (
            ("torchtune", LLAMA, PURE, {"zero": 3}),
            ("torchtune", LLAMA, PURE, {"zero": 2, "recompute": 2}),
            ("torchtune", "qwen2.5-7b", {**PURE, "lora_rank": 8, "frozen_weights": "nf4_dq"}, {"zero": 3}),
            ("torchtune", "llama-3.2-1b", {"precision": "fp32"}, {"zero": 3}),
            ("torchtune", "llama-2-7b", PURE, {"zero": 0, "dp": 1, "num_microbatches": 1}),
            ("torchtune", "llama-3.1-70b", PURE, {"zero": 3, "recompute": 2, "offload_parameters": 1}),
        ),
        (
            ("torchtune.yaml", "batch_size: 1", "batch_size: 2"),
            ("torchtune.yaml", "fsdp_reshard_after_forward: true", "fsdp_reshard_after_forward: false"),
            ("torchtune.yaml", "custom_sharded_layers", "custom_shard"),
            ("torchtune.yaml", "num_layers: 32", "num_layers: 31"),
            ("torchtune.yaml", "fused", "fuse"),
            ("smoke.sh", "full_finetune_distributed", "lora_finetune_distributed"),
            ("run.sh", "max_steps_per_epoch=", "max_step="),
        ),
    ),
    "lightning": Cases(
        "lightning",
        (
            ("torchtitan", LLAMA, {}, {"zero": 3, "tp": 2, "dp": 4, **PARTS}),
            ("torchtitan", LLAMA, {}, {"zero": 2, "recompute": 1, "recompute_modules": SECOND}),
            ("fsdp", "llama-3.2-1b", {}, {"zero": 3, "recompute": 2}),
            ("torchtitan", "qwen2.5-7b", {"precision": "fp32"}, {"zero": 3}),
        ),
        (
            ("plan.json", '"tp": 2', '"tp": 4'),
            ("plan.json", '"num_microbatches": 16', '"num_microbatches": 8'),
            ("plan.json", '"zero": 3', '"zero": 2'),
            ("plan.json", '"ffn_size": 14336', '"ffn_size": 14335'),
            ("lightning_train.py", "accumulate_grad_batches=", "accumulate_batches="),
            ("lightning_train.py", "data_parallel_size=", "data_size="),
        ),
    ),
    "olmo-core": Cases(
        "olmo_core",
        (
            ("torchtitan", LLAMA, {}, {"zero": 3, "tp": 2, "dp": 4, **PARTS}),
            ("torchtitan", LLAMA, {}, {"zero": 2, "pp": 2, "vpp": 2, "schedule": 2, "dp": 4}),
            ("torchtitan", LLAMA, {}, {"zero": 2, "pp": 2, "dp": 4, "first_stage_layers": 15, "last_stage_layers": 17}),
            ("torchtitan", LLAMA, {}, {"zero": 3, "dp_shard": 4}),
            ("torchtitan", "qwen3-32b", {}, {"zero": 3, "recompute": 2}),
            ("fsdp", "llama-2-7b", {}, {"zero": 3, "recompute": 2}),
        ),
        (
            ("olmo_train.py", r"rank_microbatch_size=1 \*", "rank_microbatch_size=2 *"),
            ("olmo_train.py", r"TensorParallelConfig\(degree=2", "TensorParallelConfig(degree=4"),
            ("olmo_train.py", "n_layers=32", "n_layers=31"),
            ("olmo_train.py", "hidden_size=14336", "hidden_size=14335"),
            ("olmo_train.py", "max_grad_norm", "max_norm"),
        ),
    ),
    "primus": Cases(
        "primus",
        (
            ("megatron", LLAMA, AMD, {"zero": 1}),
            ("megatron", LLAMA, AMD, {"zero": 1, "tp": 2, "pp": 2, "vpp": 2, "schedule": 2, "dp": 2, **PARTS}),
            ("megatron", LLAMA, AMD, {"tp": 8, "dp": 1, **PARTS}),  # 128256 rows are no multiple of 8 x 128
            ("megatron", LLAMA, AMD, {"zero": 1, "cp": 2, "dp": 4, "recompute": 2}),
            ("megatron", LLAMA, AMD, {"zero": 1, "pp": 4, "dp": 2, "first_stage_layers": 7, "last_stage_layers": 7}),
            ("megatron", LLAMA, {**AMD, "precision": "fp16", "optimizer": "sgd"}, {"zero": 1}),
            ("megatron", LLAMA, AMD, {"zero": 1, "offload_optimizer": 100}),
            ("megatron", "qwen2.5-7b", {**AMD, "precision": "fp8"}, {"zero": 1}),
            ("megatron", "gpt3-13b", {**AMD, "sequence_length": 2048}, {"zero": 1, "tp": 2, "dp": 4, **PARTS}),
            ("megatron", "phi-3-mini", AMD, {"zero": 1}),
            ("megatron", QWEN_MOE, AMD, {"zero": 1, "ep": 8, "recompute": 1, "recompute_modules": int(Module.MOE)}),
            ("megatron", "deepseek-v3", AMD, {"zero": 1, "ep": 8}),
            ("megatron", "gpt-oss-20b", AMD, {"zero": 1, "ep": 8}),
        ),
        (
            ("primus.yaml", "layernorm_epsilon", "norm_epsilon"),
            ("primus.yaml", "rotary_base: 500000", "rotary_base: 10000"),
            ("primus.yaml", "overlap_grad_reduce: true", "overlap_grad_reduce: false"),
            ("primus.yaml", "tensor_model_parallel_size: 1", "tensor_model_parallel_size: 2"),
            ("primus.yaml", "num_layers: 32", "num_layer: 32"),
            ("primus.yaml", "global_batch_size: 128", "global_batch_size: 256"),
            ("primus.yaml", "model: language_model.yaml", "model: language_modell.yaml"),
            ("primus.yaml", "overrides:", "override:"),
            ("primus-smoke.yaml", "mock_data", "mock_date"),
            ("primus-smoke.yaml", r"make_vocab_size_divisible_by: \d+", "micro_batch_size: 3"),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_plan_is_accepted_and_what_is_wrong_is_not(name: str, tmp_path: Path) -> None:
    cases = CASES[name]
    if importlib.util.find_spec(cases.package) is None:
        pytest.skip(f"NOT CHECKED: {cases.package} is not installed here")
    target = load_target(name)
    jobs = [job(trainer, model, work, **layout) for trainer, model, work, layout in cases.jobs]
    assert not [one for each in jobs for one in target.refusals(each)]
    pairs = []
    for number, each in enumerate([*jobs, *[jobs[0]] * len(cases.wrong)]):
        write_bundle(make_bundle(target, each, "torchrun"), tmp_path / str(number))
        pairs.append((each, tmp_path / str(number)))
    for (_, folder), (file, old, new) in zip(pairs[len(jobs) :], cases.wrong, strict=True):
        text = (folder / file).read_text()
        assert re.search(old, text), (file, old)
        (folder / file).write_text(re.sub(old, new, text))
    results = check_many(name, pairs, deep=True)
    if all(not one.level and not one.problem and one.missing for one in results):  # a package that it needs
        pytest.skip(results[0].text())
    least = LEVELS.index(cases.level or target.level)
    said = [f"{case}: {one.text()}" for one, case in zip(results, cases.jobs, strict=False)
            if one.problem or LEVELS.index(one.level or LEVELS[0]) < least]  # fmt: skip
    assert not said
    for one, wrong in zip(results[len(jobs) :], cases.wrong, strict=True):
        assert one.problem, (wrong, one.text())


def test_lightning_trains_as_the_script_does(tmp_path: Path) -> None:
    """tp 2 x dp 2 on 4 processes of this machine: the losses and norms of train.py, which trains as one process does."""
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("NOT CHECKED: lightning is not installed here")
    model = ModelSpec(name="tiny", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=64,
                      vocab_size=128, max_sequence_length=64)  # fmt: skip
    layout = Layout(tp=2, dp=2, micro_batch_size=2, num_microbatches=2, zero=3, sequence_parallel=1)
    tiny = ExportJob.of(plan_of("torchtitan", layout, model=model, sequence_length=32))
    for name, text in load_target("lightning").render(tiny).files.items():
        (tmp_path / name).write_text(text)
    said = []
    for script in ("train.py", "lightning_train.py"):
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", script]
        done = subprocess.run(
            [*words, "--device", "cpu", "--steps", "3"], cwd=tmp_path, capture_output=True, text=True, timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        said.append(re.findall(r"step \d loss ([\d.]+) gradient ([\d.]+)", done.stdout))
    assert len(said[0]) == 3 and said[0] == said[1]
