"""What Megatron-Bridge makes of its settings before it starts: sections that overwrite others.

The section of mixed precision overwrites the fields of the same name of the model, the optimizer and the gradients' buffers, that
of overlapped communication those of the same name after it; a distributed optimizer that one of two sections asks for is on.
[training/config.py: runtime_config_update; training/mixed_precision.py: update_config_with_precision_overrides;
training/comm_overlap.py: setup]
"""

from typing import Any

from planner.trainers.megatron.trainer_words import SHARDED
from planner.trainers.reading.given import Question
from planner.trainers.reading.settings import Settings
from planner.workload import FP8_WEIGHTS

PRECISIONS = (
    ("mxfp8", "mxfp8"), ("fp8_mx", "mxfp8"), ("fp8_sc", "fp8_block"), ("nvfp4", "nvfp4"), ("subchannel", "fp8_block"),
    ("blockwise", "fp8_block"), ("fp8", "fp8"), ("fp16", "fp16"), ("bf16", "bf16"),
)  # fmt: skip
"""Words in the names of precision recipes.  [training/mixed_precision.py]"""
KINDS = {"tensorwise": "fp8", "delayed": "fp8", "mxfp8": "mxfp8", "blockwise": "fp8_block"}
MIXED = "mixed_precision"
OFF = ("none", "false", "null", "")
FIELDS = (
    "grad_reduce_in_fp32", "fp8", "fp8_recipe", "fp8_param", "fp8_param_gather", "fp4", "fp16", "fp8_dot_product_attention",
    "fp8_multi_head_attention",
)  # fmt: skip
"""Fields of the section of mixed precision that are read."""


def with_fields(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with these fields, None = not said; one that is taken back is none."""
    names = {f"{MIXED}.{one}" for one in FIELDS}
    said = {one: "none" if one in names and value is None else value for one, value in settings.items()}
    return {**dict.fromkeys(sorted(names)), **said}


def precision(given: Settings) -> str:
    """Precision of linear layers: that of the section of mixed precision, or of the model where there is none."""
    name = str(given.get(MIXED, "bf16_mixed")).lower()
    found = next((kind for word, kind in PRECISIONS if word in name.replace("bf16_with_", "")), "bf16")
    place = MIXED if given.data.get(MIXED, "") is not None else "model"
    fp8, fp4, recipe = (given.get(f"{place}.{one}") for one in ("fp8", "fp4", "fp8_recipe"))
    if fp8 is None and recipe is not None and found in KINDS.values():
        fp8 = "hybrid"
    if fp8 is not None and str(fp8).lower() in OFF and found in KINDS.values():
        found = "fp16" if "fp16" in name else "bf16"
    elif fp8 is not None and str(fp8).lower() not in OFF:
        said = str(given.choice(f"{place}.fp8_recipe", KINDS, "tensorwise")) if recipe is not None else None
        found = said or (found if found in KINDS.values() else "fp8")
    if fp4 is not None:
        found = "nvfp4" if str(fp4).lower() not in OFF else "bf16" if found == "nvfp4" else found
    if found == "bf16" and given.flag(f"{place}.fp16"):
        return "fp16"
    return found


def weights_in_fp8(given: Settings) -> bool:
    """Whether the weights lie in 8 bits, as all of its fp8 recipes but that by blocks have them."""
    kind = precision(given)
    usual = kind in ("fp8", "mxfp8")
    words = [f"{MIXED}.{one}" for one in ("fp8_param_gather", "fp8_param")]
    said = [given.flag(one) for one in words if given.get(one) is not None]
    return kind in FP8_WEIGHTS and (said[0] if said else usual)


def gradients_in_fp32(given: Settings) -> tuple[bool, tuple[str, ...]]:
    """Whether gradients are added up in fp32, and a note where the word for it in the section ddp is overwritten."""
    said = given.flag("ddp.grad_reduce_in_fp32", True)
    if given.data.get(MIXED, "") is None:
        return said, ()
    found = given.flag(f"{MIXED}.grad_reduce_in_fp32", "fp16" not in str(given.data.get(MIXED, "")).lower())
    note = f"ddp.grad_reduce_in_fp32={str(said).lower()} is overwritten: the section mixed_precision says {str(found).lower()}"
    return found, (note,) if "ddp.grad_reduce_in_fp32" in given.data and said is not found else ()


def overlaps_gradients(given: Settings) -> bool:
    """Whether gradients are reduced during the backward pass."""
    said = given.flag("ddp.overlap_grad_reduce", True)
    if not (_has_overlap(given) and shards_states(given)):
        return said
    return given.flag("comm_overlap.overlap_grad_reduce", True)


def overlaps(given: Settings, name: str) -> bool:
    """Whether something overlaps by the section for it, or by the model where there is no such section."""
    model = given.flag(f"model.{name}")
    return given.flag(f"comm_overlap.{name}") if _has_overlap(given) else model


def _has_overlap(given: Settings) -> bool:
    """Whether there is a section of overlapped communication."""
    return any(name.startswith("comm_overlap.") and value is not None for name, value in given.data.items())


def shards_states(given: Settings) -> bool:
    """Whether the distributed optimizer is on, by either section; the optimizer of all recipes has it."""
    ddp, own = given.flag("ddp.use_distributed_optimizer", True), given.flag("optimizer.use_distributed_optimizer", True)
    return ddp or own


FSDP = ("ddp.use_megatron_fsdp", "dist.use_megatron_fsdp")


def sharding(given: Settings) -> int:
    """What is sharded, as zero: by Megatron-FSDP what it is told, else the optimizer's states; asks where nothing says it.
    [training/config.py, _validate_and_apply_megatron_fsdp_v1_configs]"""
    if not sum(given.flag(one) for one in FSDP):
        return int(shards_states(given))
    name = "ddp.data_parallel_sharding_strategy"
    if given.get(name) is None:
        about = "what Megatron-FSDP shards: by default nothing until March 2026, everything since"
        given.ask(Question(name=name, about=about, choices=("no_shard", "optim_grads_params")))
    return int(given.choice(name, SHARDED, "optim_grads_params"))
