"""axolotl's own schema with the capabilities of the target GPU, made strict, and its mesh, on an exported folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking import Checked
from planner.trainers.checking.child import Answer, Request, ask, request, serve
from planner.trainers.checking.import_standins import settle_torch, stand_in

ABSENT = (
    "triton", "ring_flash_attn", "axolotl_contribs_lgpl", "axolotl_contribs_mit", "lm_eval", "bitsandbytes", "posthog",
    "fire", "art", "wandb", "colorama", "evaluate", "addict",
)  # fmt: skip
"""What its modules import and its schema never calls."""


def check(job: ExportJob, folder: Path) -> Checked:
    """How far axolotl goes with one folder."""
    return check_many([(job, folder)])[0]


def check_many(pairs: Sequence[tuple[ExportJob, Path]]) -> list[Checked]:
    """The same for many."""
    requests = [
        request(job, folder, batch=job.workload.global_batch_size, nodes=job.num_nodes, per_node=job.gpus_per_node)
        for job, folder in pairs
    ]
    return ask("axolotl", "planner.trainers.axolotl.check", ("torch", "transformers", "axolotl", "pydantic"), requests)


def _one(asked: Request, answer: Answer) -> None:
    os.chdir(asked["folder"])
    settle_torch()
    stand_in(*ABSENT)
    import yaml
    from axolotl.utils.distributed import _get_parallel_config_kwargs
    from axolotl.utils.schemas.config import AxolotlConfigWCapabilities
    from axolotl.utils.schemas.fsdp import FSDPConfig

    layout, world = asked["layout"], asked["world"]
    for name in ("axolotl.yaml", "axolotl-smoke.yaml"):
        data: dict[str, Any] = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
        _known(name, data, AxolotlConfigWCapabilities)
        _known(f"{name}: fsdp_config", data.get("fsdp_config", {}), FSDPConfig)
        able = {
            "bf16": True,
            "tf32": True,
            "fp8": True,
            "n_gpu": asked["per_node"],
            "n_node": asked["nodes"],
            "compute_capability": "sm_90",
        }
        found = AxolotlConfigWCapabilities(**data, capabilities=able, env_capabilities={"torch_version": "2.11.0"})
        answer.reached("parsed")
        answer.same(
            "global batch", found.micro_batch_size * found.gradient_accumulation_steps * layout["dp"], asked["batch"]
        )
        answer.same("one of FSDP and DeepSpeed", bool(found.fsdp_config) and bool(found.deepspeed), False)
        if found.fsdp_config:
            sizes = _get_parallel_config_kwargs(
                world,
                found.tensor_parallel_size,
                found.context_parallel_size,
                found.dp_shard_size,
                found.dp_replicate_size,
                True,
            )
            answer.same("replicas", sizes.get("dp_replicate_size", 1), layout["dp"] // asked["shard"])
            answer.same("shard group", sizes.get("dp_shard_size", 1), asked["shard"])
    answer.reached("validated")


def _known(where: str, data: dict[str, Any], schema: Any) -> None:
    """The schema drops unknown keys silently: every key must be one of its fields or their aliases."""
    names = set(schema.model_fields)
    for field in schema.model_fields.values():
        alias = field.validation_alias or field.alias
        names |= set(getattr(alias, "choices", [alias])) if alias else set()
    unknown = sorted(set(data) - names)
    if unknown:
        raise ValueError(f"{where}: unknown keys {', '.join(unknown)}")


if __name__ == "__main__":
    serve(_one)
