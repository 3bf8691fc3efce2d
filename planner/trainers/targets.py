"""Exporters: one module per trainer, found by name and imported when it is asked for."""

from __future__ import annotations

import importlib

from planner.errors import UnknownNameError
from planner.trainers.bundle.target import Target

TARGETS: dict[str, str] = {
    "megatron": "megatron",
    "megatron-bridge": "megatron_bridge",
    "torchtitan": "torchtitan",
    "deepspeed": "deepspeed",
    "accelerate": "accelerate",
    "nanotron": "nanotron",
    "pytorch": "pytorch",
    "colossalai": "colossalai",
    "llama-factory": "llama_factory",
    "axolotl": "axolotl",
    "verl": "verl",
    "maxtext": "maxtext",
    "vllm": "vllm",
    "sglang": "sglang",
}
"""Name after --to -> folder of planner.trainers whose export module defines its TARGET."""


def load_target(name: str) -> Target:
    """The target of a name. Raises UnknownNameError."""
    if name not in TARGETS:
        raise UnknownNameError("target", name, TARGETS)
    found: Target = importlib.import_module(f"planner.trainers.{TARGETS[name]}.export").TARGET
    return found


def targets_of(trainer: str) -> list[str]:
    """Names of the targets that run a trainer's plans as they were priced."""
    return [name for name in TARGETS if trainer in load_target(name).trainers]
