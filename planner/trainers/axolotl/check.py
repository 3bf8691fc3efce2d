"""axolotl's own schema with the capabilities of the target GPU, made strict, and its mesh, on an exported folder."""

import os
from pathlib import Path
from typing import Any

from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking import Checked, Request
from planner.trainers.checking import setting_names as names
from planner.trainers.checking.import_standins import settle_torch, stand_in

NEEDED = ("torch", "transformers", "axolotl", "pydantic")
ABSENT = (
    "triton", "ring_flash_attn", "axolotl_contribs_lgpl", "axolotl_contribs_mit", "lm_eval", "bitsandbytes", "posthog",
    "fire", "art", "wandb", "colorama", "evaluate", "addict",
)  # fmt: skip
"""What its modules import and its schema never calls."""


def asks(job: ExportJob) -> dict[str, Any]:
    """The machines."""
    return {"nodes": job.num_nodes, "per_node": job.gpus_per_node}


def one(asked: Request, answer: Checked) -> None:
    """How far the trainer goes with one folder."""
    os.chdir(asked["folder"])
    settle_torch()
    stand_in(*ABSENT)
    import yaml
    from axolotl.integrations.liger.args import LigerArgs
    from axolotl.utils.distributed import _get_parallel_config_kwargs
    from axolotl.utils.schemas.config import AxolotlConfigWCapabilities
    from axolotl.utils.schemas.fsdp import FSDPConfig

    layout, world = asked["layout"], asked["world"]
    for name in ("axolotl.yaml", "axolotl-smoke.yaml"):
        data: dict[str, Any] = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
        plugins = set(LigerArgs.model_fields) if "plugins" in data else set()
        _known(name, {key: value for key, value in data.items() if key not in plugins}, AxolotlConfigWCapabilities)
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
            answer.same("context parallel size", sizes.get("cp_size", 1), layout["cp"])
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


def known_names(root: Path) -> dict[str, names.Names]:
    """Keys of its YAML file, of fsdp_config and of an entry of datasets."""
    schemas = root / "axolotl" / "utils" / "schemas"
    found: names.Names = {}
    for path in sorted(schemas.glob("*.py")):
        if path.stem not in ("fsdp", "datasets"):
            found |= names.fields(path)
    found |= names.fields(root / "axolotl" / "integrations" / "liger" / "args.py")
    data = names.fields(schemas / "datasets.py")
    return {"config": found, "fsdp_config": names.fields(schemas / "fsdp.py", "FSDPConfig"), "datasets": data}


def used_names(folder: Path) -> names.Uses:
    """(section, name) of everything that the exported folder sets."""
    for file in ("axolotl.yaml", "axolotl-smoke.yaml"):
        data = names.load(folder / file)
        yield from (("config", name) for name in data)
        yield from (("fsdp_config", name) for name in data.get("fsdp_config", {}))
        yield from (("datasets", name) for one in data["datasets"] for name in one)
