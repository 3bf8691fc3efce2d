"""Arguments of transformers and TRL that stand for others, and those that change a step in a way that no plan holds."""

import re
from collections.abc import Mapping
from typing import Any

from planner.trainers.reading.base_weights import PREPARES
from planner.trainers.reading.kernels import other_attention
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.sharding import Sharding
from planner.trainers.reading.versions import newer

COMPILES = ("torchdynamo", "torch_compile_backend", "torch_compile_mode")
"""What switches torch_compile on by being said.  [transformers, training_args.py: __post_init__]"""
SWITCHED_OFF = ("gradient_checkpointing", "bf16", "fp16", "packing", "use_peft", "use_liger_kernel")
"""Switches that HfArgumentParser has a --no_ of, where they are on by themselves."""
UNWRAPPED = "before transformers 5 fsdp without auto_wrap has every GPU gather all weights at once: memory then comes out too low"
SAYS = {
    "auto_find_batch_size": "auto_find_batch_size halves the batch until it fits, so what runs may be smaller than what is priced",
    "label_smoothing_factor": "label smoothing keeps another copy of the scores in fp32: memory comes out too low",
    "rank_pattern": "rank_pattern gives some adapters another rank, which are priced with that of the others",
    "exclude_modules": "exclude_modules leaves layers without adapters, which are priced with them where their names are targets",
    "offload_embedding": "the embedding in host memory (offload_embedding) is priced on the GPU: memory comes out too high",
    "goes_on_or_new": "it goes on with adapters of a folder where these are there, else with new ones, which are priced; "
    "--set lora_r=N says the rank of those of the folder",
    "use_logits_to_keep": "scores of prompts, which use_logits_to_keep leaves out, are priced: memory comes out too high where "
    "these are long",
    "patched_before": "layer inputs are priced on the GPU, where unsloth keeps them since 2026.2; before, its from_pretrained has "
    "them sent to the host by itself and memory comes out too high: --set activation_offloading=true prices that",
    "trainable_token_indices": "rows of the embedding that are trained (trainable_token_indices) are not priced",
}  # fmt: skip
"""Argument -> what its plan leaves out."""


def _on(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")


def spelled(data: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments under the names that are read: older and newer names of the same ones.  [transformers, training_args.py]"""
    found = dict(data)
    for name in [one for one in found if one.removeprefix("no_") in SWITCHED_OFF and one.startswith("no_") and _on(found[one])]:
        found[name.removeprefix("no_")] = not _on(found.pop(name))
    if _on(found.pop("use_flash_attention_2", None)):  # of transformers before 4.36, and of recipes of that time
        found.setdefault("attn_implementation", "flash_attention_2")
    if _on(found.pop("adafactor", None)):
        found["optim"] = "adafactor"
    if any(found.pop(one, None) not in (None, "", False) for one in COMPILES):
        found["torch_compile"] = True
    if (newest := found.pop("activation_checkpointing", None)) is not None:  # since transformers 5.2x, before the other
        found["gradient_checkpointing"] = newest
    if (older := found.pop("per_gpu_train_batch_size", None)) is not None:  # goes before the other, until transformers 5
        found["per_device_train_batch_size"] = older
    if _on(found.pop("use_liger_loss", None)):
        found["use_liger_kernel"] = True
    inner = found.get("accelerator_config")
    steps = inner.get("gradient_accumulation_kwargs") if isinstance(inner, dict) else None
    if isinstance(steps, dict) and steps.get("num_steps") and found.get("gradient_accumulation_steps") in (None, 1):
        found["gradient_accumulation_steps"] = steps["num_steps"]
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        if isinstance(words := found.get(name), dict) and words.get("every_n_layers") not in (None, 1):
            found["checkpointing_every_n_layers"] = words["every_n_layers"]
    if (adapted := found.pop("lora_target_parameters", None)) is not None:
        found["target_parameters"] = adapted
    return found


def prepared(given: Settings, sharding: Sharding, old: bool) -> bool:
    """Whether tables and norms of a quantised base become fp32, in which all that no mixed precision casts then computes;
    ``old``: of TRL while its trainers did so by themselves, but where weights are sharded.  [peft, utils/other.py]"""
    return given.flag(PREPARES[0]) or (old and sharding.kind != "fsdp" and sharding.fields.get("zero") != 3)


IN_HALF = "frozen layers compute in {} (bnb_4bit_compute_dtype) and are priced in fp32 as all else: the step comes out too long"


def notes_of(given: Settings, objective: str, adapters: bool, precision: str) -> tuple[str, ...]:
    """Notes about arguments that no plan holds."""
    off: tuple[Any, ...] = (None, False, 0, "0", "false", "False", {}, [])
    found = [text for name, text in SAYS.items() if given.get(name) not in off]
    found += other_attention(given.get("attn_implementation"))
    computes = str(given.get("bnb_4bit_compute_dtype", "")).removeprefix("torch.")
    if adapters and precision == "fp32" and computes in ("bfloat16", "float16") and given.flag("load_in_4bit"):
        found.append(IN_HALF.format(computes))
    words = given.data.get("fsdp")
    text = " ".join(map(str, words)) if isinstance(words, list) else str(words or "")
    if "shard" in text and not re.search("auto_wrap|no_shard", text) and "wrap" not in str(given.data.get("fsdp_config")):
        found.append(UNWRAPPED)
    if objective == "dpo" and adapters and given.flag("force_use_ref_model"):
        found.append("the whole reference model of force_use_ref_model is not priced beside adapters: memory comes out too low")
    if given.get("goes_on") and objective == "dpo" and newer(given.path, "trl", REFERENCE_COPY) is not False:
        found.append(COPIED)
    return tuple(found)


REFERENCE_COPY = (0, 29)
COPIED = (
    "TRL since 0.29 holds a frozen copy of adapters that are loaded to be trained on, as the reference, which is not priced: "
    "memory comes out too low by 4 bytes for each of their weights"
)
"""[trl/trainer/dpo_trainer.py: add_adapter("ref")]"""
CHUNKS = (1, 7)
"""Version of TRL whose SFTTrainer takes its loss in pieces by itself.  [trl/trainer/sft_config.py: loss_type]"""
BY_VERSION = (
    "the loss is priced in pieces of the sequence, as TRL takes it since 1.7; --set loss_type=nll prices that of older versions, "
    "which keeps all scores"
)


def loss_of(given: Settings, objective: str, old: bool, usual: str) -> tuple[str, tuple[str, ...]]:
    """(option loss of TRL's trainers, '' = what is ``usual``, notes): all scores at once in DPO, in older versions, and where
    loss_type says so."""
    found, notes = _loss(given, objective, old)
    return "" if found == usual or (notes and usual != "chunked") else found, notes if usual == "chunked" else ()


def _loss(given: Settings, objective: str, old: bool) -> tuple[str, tuple[str, ...]]:
    if given.flag("use_liger_kernel") or given.flag("use_liger"):
        return "fused_linear", ()
    named = str(given.get("loss_type", "")).lower()
    if objective == "dpo" or old or named in ("nll", "dft"):
        return "kept", ()
    if named == "chunked_nll":
        return "chunked", ()
    new = newer(given.path, "trl", CHUNKS)
    return ("kept" if new is False else "chunked"), ((BY_VERSION,) if new is None else ())


DPO_LENGTH = (0, 16)
"""Version of TRL since which DPO cuts at 1024 by itself.  [trl/trainer/dpo_config.py]"""


def length_of(given: Settings, objective: str, said: int | None, usual: int | None) -> int | None:
    """Tokens at which TRL cuts: what is ``said``, else its habit, which null takes away; prompt and completion that are cut apart
    are no longer than both. None = it has to be asked for."""
    whole = said is None and "max_length" in given.data and given.data["max_length"] is None
    if objective != "dpo":
        return None if whole else said or usual
    parts = [given.number(one) for one in ("max_prompt_length", "max_completion_length")]
    both = sum(one for one in parts if one) if all(parts) else None
    unsaid = None if whole or newer(given.path, "trl", DPO_LENGTH) is False else usual
    return min(one for one in (said, both) if one) if said or both else unsaid
