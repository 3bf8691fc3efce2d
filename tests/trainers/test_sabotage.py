"""Exports that were changed by hand: --check says so, with the trainers' own code. One process per trainer."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest

from planner.layout import Module, Recompute
from planner.trainers.bundle.folder import make_bundle, write_bundle
from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking.child import check_many
from planner.trainers.targets import load_target
from tests.trainers.plans import Wanted, found

PACKAGES = {
    "megatron": "megatron.training", "torchtitan": "torchtitan", "deepspeed": "deepspeed", "accelerate": "trl",
    "megatron-bridge": "megatron.bridge",
}  # fmt: skip
PLANS = {
    "megatron": Wanted(model="deepseek-v2-lite", gpus=16, pins=(("tp", 2), ("pp", 1), ("micro_batch_size", 1)), top=1),
    "torchtitan": Wanted(
        model="llama-3.1-8b", gpus=64, trainer="torchtitan", pins=(("dp_shard", 8), ("dp", 64), ("zero", 3)), top=1
    ),
    "deepspeed": Wanted(model="llama-3.1-8b", gpus=16, trainer="deepspeed", pins=(("cp", 2), ("zero", 3)), top=1),
    "accelerate": Wanted(model="llama-3.1-8b", gpus=16, trainer="fsdp", pins=(("zero", 3),), top=1),
    "megatron-bridge": Wanted(model="llama-3.1-70b", gpus=64, pins=(("tp", 4), ("pp", 4)), top=1),
}  # fmt: skip
SABOTAGES: dict[str, list[tuple[str, str, str, str]]] = {
    "megatron": [
        ("arguments.sh", r"--moe-router-topk ", "--moe-router-top ", "moe-router-top"),
        ("arguments.sh", r" +--sequence-parallel\n", "", "sequence"),
        ("arguments.sh", r" moe_act", "", "recompute"),
        ("arguments.sh", r"--log-throughput", "--log-thruput", "log-thruput"),
        ("run.sh", r"--lr-decay-style", "--lr-decay-stile", "lr-decay-stile"),
        ("environment.sh", r"(CONNECTIONS=)\"1\"", r'\1"8"', "CUDA_DEVICE_MAX_CONNECTIONS"),
        ("arguments.sh", r" +--use-distributed-optimizer\n", "", "istributed"),
        ("arguments.sh", r"(--expert-model-parallel-size) \d+", r"\1 16", "groups"),
    ],
    "megatron-bridge": [
        ("plan_config.py", r"sequence_parallel=True", "sequence_parallel=False", "sequence parallel"),
        ("plan_config.py", r"rotary_base", "rotary_bas", "rotary_bas"),
    ],
    "torchtitan": [
        ("plan_config.py", "fsdp_reshard_after_forward='always'", "fsdp_reshard_after_forward='never'", "reshard"),
        ("plan_config.py", r"activation_checkpoint=\w+(\.Config\(\))?", "activation_checkpoint=SelectiveAC.Config()", "recompute"),
        ("run.sh", r"--training.steps", "--training.stepz", "stepz"),
        ("plan_config.py", r"data_parallel_replicate_degree=8", "data_parallel_replicate_degree=16", ""),
    ],
    "deepspeed": [
        ("ds_config.json", '"gradient_clipping"', '"gradient_clip"', "gradient_clip"),
        ("ds_config.json", '"overlap_comm"', '"overlap_com"', "overlap_com"),
        ("ds_config.json", '"stage": 3', '"stage": 2', "zero stage"),
        ("training.json", '"optim"', '"optimus"', "optimus"),
        ("run.sh", "--dataset", "--datasets", "--datasets"),
    ],
    "accelerate": [
        ("accelerate.yaml", "fsdp_reshard_after_forward", "fsdp_reshard_after_fwd", "fsdp_reshard_after_fwd"),
        ("accelerate.yaml", "LlamaDecoderLayer", "LlamaDecodrLayer", "LlamaDecodrLayer"),
        ("accelerate.yaml", "fsdp_reshard_after_forward: true", "fsdp_reshard_after_forward: false", "reshard"),
        ("run.sh", "--settings", "--setting-file", "--setting-file"),
    ],
}  # fmt: skip
"""By trainer: file, what is replaced in it, by what, and what the check must name."""


def job_of(name: str) -> ExportJob:
    """A plan in which every sabotage has something to change."""
    plan = found(PLANS[name])[0]
    if name == "megatron":
        modules = int(Module.NORM | Module.MLP_ACTIVATION)
        layout = plan.layout.replace(recompute=int(Recompute.SELECTIVE), recompute_modules=modules)
        plan = dataclasses.replace(plan, layout=layout)
    return ExportJob.of(plan)


def installed(package: str) -> bool:
    """Whether a package is there, and the one around it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("name", PACKAGES)
def test_what_was_changed_by_hand_is_seen(name: str, tmp_path: Path) -> None:
    if not installed(PACKAGES[name]):
        pytest.skip(f"NOT CHECKED: {PACKAGES[name]} is not installed here")
    job, folders = job_of(name), []
    bundle = make_bundle(load_target(name), job, "torchrun")
    for number, (file, old, new, _) in enumerate([("plan.yaml", "^", "", ""), *SABOTAGES[name]]):
        folder = tmp_path / str(number)
        write_bundle(bundle, folder)
        text = (folder / file).read_text()
        changed, times = re.subn(old, new, text)
        assert times and (number == 0 or changed != text), f"{file} has no {old}"
        (folder / file).write_text(changed)
        folders.append(folder)
    whole, *rest = check_many(name, [(job, folder) for folder in folders])
    assert not whole.problem and whole.level, whole.text()
    for one, (file, old, _, says) in zip(rest, SABOTAGES[name], strict=True):
        assert says in one.problem and one.problem, f"{file}, {old}: {one.text()}"
