"""Arguments of transformers and TRL that stand for others, and those that change a step in a way that no plan holds."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.trainers.reading.base_weights import PREPARES
from planner.trainers.reading.kernels import ALL_SCORES, IN_PIECES, KERNELS, OWN_LOSS, other_attention
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
    "fast_inference": "the engine of vLLM that fast_inference starts beside the training takes the share of the GPU that "
    "gpu_memory_utilization says, half by itself: not priced, memory comes out too low",
    "unsloth_tiled_mlp": "an MLP in pieces (unsloth_tiled_mlp) is priced whole: what a layer needs at once comes out too high",
    "finetune_vision_layers": "adapters on the image encoder and what it keeps for its backward pass are not priced",
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
    if any(_on(found.pop(one, None)) for one in ("enable_fsdp", "use_fsdp")):  # of loops that wrap their model themselves
        named = re.search("(full|hybrid|no)_shard|shard_grad_op", str(found.pop("sharding_strategy", "")).lower())
        host = " offload" * _on(found.pop("fsdp_cpu_offload", None))
        found.setdefault("fsdp", f"{named[0] if named else 'full_shard'} auto_wrap{host}")
    if _on(found.pop("pure_bf16", None)):
        found.setdefault("torch_dtype", "bfloat16")
    if _on(found.pop("adafactor", None)):
        found["optim"] = "adafactor"
    if any(found.pop(one, None) not in (None, "", False) for one in COMPILES):
        found["torch_compile"] = True
    if (newest := found.pop("activation_checkpointing", None)) is not None:  # since transformers 5.2x, before the other
        found["gradient_checkpointing"] = newest
    if (older := found.pop("per_gpu_train_batch_size", None)) is not None:  # goes before the other, until transformers 5
        found["per_device_train_batch_size"] = older
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


IN_HALF = ("frozen layers compute in {} (bnb_4bit_compute_dtype) and are priced in fp32 as all else: the step comes out too long, "
           "and memory too high where the trainer has bf16 on (--set bf16=true)")  # fmt: skip


def notes_of(given: Settings, objective: str, adapters: bool, precision: str, half: bool) -> tuple[str, ...]:
    """Notes about arguments that no plan holds; ``half``: weights are loaded, or held by an engine, in 16 bits."""
    off: tuple[Any, ...] = (None, False, 0, "0", "false", "False", {}, [])
    found = [text for name, text in SAYS.items() if given.get(name) not in off]
    found += other_attention(given.get("attn_implementation"))
    found += [BY_HAND] * (adapters and given.flag("by_hand"))
    found += [KEPT_ITSELF] * (given.get(OWN_LOSS) not in (None, IN_PIECES, ALL_SCORES))
    computes = str(given.get("bnb_4bit_compute_dtype", "")).removeprefix("torch.")
    if adapters and precision == "fp32" and computes in ("bfloat16", "float16") and given.flag("load_in_4bit"):
        found.append(IN_HALF.format(computes))
    words = given.data.get("fsdp")
    text = " ".join(map(str, words)) if isinstance(words, list) else str(words or "")
    if "shard" in text and not re.search("auto_wrap|no_shard", text) and "wrap" not in str(given.data.get("fsdp_config")):
        found.append(UNWRAPPED)
    if objective == "dpo" and adapters and given.flag("force_use_ref_model"):
        found.append("the whole reference model of force_use_ref_model is not priced beside adapters: memory comes out too low")
    pairs = objective == "dpo"
    found += [HANDBOOK] * (pairs and bool(given.data.get("dataset_mixer")) and given.get("optim") is None)
    if pairs and not adapters and precision in ("bf16", "fp16") and not half:
        found.append(WIDE)
    if pairs and given.flag("use_liger_kernel") and not given.flag("use_liger_loss"):
        found += [IN_PAIRS] * (newer(given.path, "trl", LIGER_PAIRS) is None)
    passed = given.flag("precompute_ref_log_probs")
    sure = newer(given.path, "trl", IN_TILES) is not None or newer(given.path, "trl", VIEWS) is not True
    sure = sure and newer(given.path, "trl", BY_ROWS) is not None and copies_pairs(given.path) is not None
    if pairs and not sure and not (passed or fuses(given, objective)):
        found.append(BY_WHOLE)
    template = str(given.get("chat_template_path") or "x.jinja")
    if adapters and not template.endswith((".jinja", ".j2")) and "lm_head" not in str(given.get("lora_modules_to_save")):
        found.append(CLONED)
    if given.get("goes_on") and pairs and newer(given.path, "trl", REFERENCE_COPY) is not False:
        found.append(COPIED)
    return tuple(found)


BY_HAND = (
    "the program makes its adapters itself: priced are PEFT's of the rank and on the layers that are said, without what it may put "
    "on experts"
)
KEPT_ITSELF = (
    "a class of the program computes the loss of its model itself: all scores are priced, and memory comes out too high where it "
    f"keeps none; --set {OWN_LOSS}={IN_PIECES} prices that"
)
CLONED = (
    "where the tokenizer of chat_template_path has tokens that the model's has not, TRL trains the head as a whole beside "
    "adapters, which is not priced: --set lora_modules_to_save=lm_head prices it"
)
"""[trl/trainer/sft_trainer.py: added_tokens, since 0.20]"""
HANDBOOK = "the alignment-handbook until 0.3 takes RMSprop for DPO without optim: 4 bytes a weight less than Adam, which is priced"
"""[src/alignment/configs.py: DPOConfig]"""
WIDE = (
    "the reference model lies in fp32, as weights that are trained do, and is priced in 16 bits: memory comes out too low by 2 "
    "bytes for each of its weights"
)
"""[trl/scripts/dpo.py: torch_dtype; trl/trainer/dpo_trainer.py: create_reference_model]"""
BEFORE = (0, 29)
"""Version of TRL since which DPOTrainer makes a reference model beside log probabilities that are there before."""
PAIRS_ALONE = "pairs are read as two sequences each: the reference model is not in memory, its log probabilities are there before"
PASSED_BEFORE = "the reference model's pass, done before the training, is priced in every step too: the step comes out too long"
IN_MEMORY = "TRL before 0.29 holds no such model then, where the program hands none over: memory comes out too high by its weights"


def of_pairs(given: Settings, adapters: bool) -> tuple[bool, tuple[str, ...]]:
    """(Whether pairs of DPO are as two sequences of a language model, with no other model in memory; notes)."""
    if given.flag("without_reference"):
        return True, (PAIRS_ALONE,)
    if not given.flag("precompute_ref_log_probs"):
        return False, ()
    holds = adapters or not given.built or newer(given.path, "trl", BEFORE) is True  # scripts of TRL hand it over
    return False, (PASSED_BEFORE, *(() if holds else (IN_MEMORY,)))


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


KEPT = (
    "all scores are kept, as in TRL before 1.7; since then its loss is taken in pieces, and memory comes out too high: "
    "--set loss_type=chunked_nll prices that"
)


def loss_of(given: Settings, objective: str, old: bool, usual: str) -> tuple[str, tuple[str, ...]]:
    """(option loss of TRL's trainers, '' = what is ``usual``, notes): all scores at once in DPO, in older versions, and where
    loss_type says so."""
    found, notes = _loss(given, objective, old)
    if usual == "chunked":
        return "" if found == usual else found, notes
    found = usual if notes else found
    return "" if found == usual else found, (KEPT,) if notes else ()


LIGER_PAIRS = (0, 25)
"""Version of TRL whose DPOTrainer takes Liger's loss by use_liger_kernel; since 0.19 it does so by use_liger_loss.
[trl/trainer/dpo_trainer.py: LigerFusedLinearDPOLoss]"""
IN_PAIRS = (
    "use_liger_kernel fuses the loss of DPO since TRL 0.25; before, all scores are kept and memory comes out too low: "
    "--set use_liger_kernel=false prices that"
)


def fuses(given: Settings, objective: str) -> bool:
    """Whether Liger's loss is the one of the trainer."""
    own = given.get(OWN_LOSS)
    if own in (IN_PIECES, ALL_SCORES):
        return own == IN_PIECES and objective != "dpo"
    said = [given.flag(one) for one in ("use_liger_kernel", "use_liger", "use_liger_loss")]
    said[1] = said[1] and own is None  # else an option of the program, which says what its class does
    off = given.get("liger_kernel_config.fused_linear_cross_entropy") is False
    theirs = given.calls is None or given.built == "dpo"  # no trainer of the program's own
    if objective == "dpo" and theirs and newer(given.path, "trl", IN_TILES) is True:
        return True
    return any(said) and not off and (objective != "dpo" or said[2] or newer(given.path, "trl", LIGER_PAIRS) is not False)


def of_outputs(given: Settings, engine: bool, mixed: bool) -> dict[str, str]:
    """Option loss of a loop that still holds what the model gave out: accelerate gives it out in fp32 where it casts by autocast.
    [accelerate, utils/operations.py: convert_outputs_to_fp32]"""
    if not given.usual.get("keeps_outputs"):
        return {}
    return {"loss": "kept_fp32" if mixed and not engine and "wrapped" not in given.usual else "kept"}


def options_of(given: Settings, objective: str, pairs: int, wide: bool) -> dict[str, str]:
    """Options of the trainer that the file sets; DPOTrainer takes all dropout out by itself.  [trl/trainer/dpo_config.py]
    ``pairs`` of a forward pass; ``wide``: scores are fp32, as accelerate gives them out where it casts by autocast."""
    usual = 0.0 if given.flag("by_hand") else 0.05
    drops = given.above_zero("lora_dropout", usual) and (objective != "dpo" or not given.flag("disable_dropout", True))
    options = {"adapter_dropout": "on"} if drops else {}
    kernel = str(given.get("attn_implementation", "")).lower()
    if kernel in KERNELS:
        options["attention_kernel"] = KERNELS[kernel]
    if fuses(given, objective):
        options["loss"] = "fused_linear"
    elif objective == "dpo" and newer(given.path, "trl", BY_ROWS) is False:
        beside = not (given.flag("precompute_ref_log_probs") or newer(given.path, "trl", ROLLED) is True)
        held = newer(given.path, "trl", FREES_LOGITS) is False
        options["pair_loss"] = "whole" if not beside else "held" if held else "shifted"
    elif objective == "dpo" and not given.flag("precompute_ref_log_probs") and copies_pairs(given.path) is True:
        options["pair_loss"] = "copied_wide" if wide else {1: "whole", 2: "copied_two"}.get(pairs, "copied")
    elif objective == "dpo" and wide:
        options["pair_loss"] = "whole"  # as many bytes: backward logits, their gradient by rows and together, 4 each
    if given.flag("torch_compile"):
        options["compile"] = "on"
    return options


FREES_LOGITS, ROLLED, BY_ROWS = (0, 12), (0, 14), (0, 15)
"""Versions of TRL whose DPO holds fewer scores at once (option pair_loss).  [trl/trainer/dpo_trainer.py: concatenated_forward]"""
COPIES, VIEWS, IN_TILES = (0, 29), (1, 6), (1, 15)
"""Versions of TRL since which DPO copies the scores that it shifts, does so no more, and takes them in tiles over the head, which
is priced as Liger's loss.  [trl/trainer/dpo_trainer.py: _compute_loss; trl/kernels/chunked_logprob.py]"""


def copies_pairs(path: Path) -> bool | None:
    """Whether the TRL that a project pins holds copies of the scores of both models; None = some of its versions may."""
    new, over = newer(path, "trl", COPIES), newer(path, "trl", VIEWS)
    return False if new is False or over is True else True if new and over is False else None


BY_WHOLE = (
    "scores of pairs are priced as TRL takes them from 0.15 to 0.28 and from 1.6 to 1.14, 8 bytes each or 12 in fp32; before it "
    "held up to 20, and from 0.29 to 1.5 up to 17, those of the reference with them: memory comes out too low by up to 12 bytes "
    "for each of 2 x batch x length x vocabulary; since 1.15 it holds a part of them, and memory comes out too high"
)


def _loss(given: Settings, objective: str, old: bool) -> tuple[str, tuple[str, ...]]:
    if fuses(given, objective):
        return "fused_linear", ()
    if given.get(OWN_LOSS) == ALL_SCORES:
        return "full", ()
    named = str(given.get("loss_type", "")).lower()
    new = newer(given.path, "trl", CHUNKS)
    if objective == "dpo" or named in ("nll", "dft") or (old and (new is False or "max_seq_length" in given.data)):
        return "full", ()
    if named == "chunked_nll":
        return "chunked", ()
    if old and new is None:  # arguments of transformers, which any version takes
        return "full", (KEPT,)
    return ("full" if new is False else "chunked"), ((BY_VERSION,) if new is None else ())


DPO_LENGTH = (0, 14)
"""Version of TRL since which DPO cuts at 1024 by itself.  [trl/trainer/dpo_config.py]"""


def length_of(given: Settings, objective: str, said: int | None, usual: int | None) -> int | None:
    """Tokens at which TRL cuts: what is ``said``, else its habit, which null takes away; prompt and completion that are cut apart
    are no longer than both. None = it has to be asked for."""
    whole = said is None and "max_length" in given.data and given.data["max_length"] is None
    if objective != "dpo":
        return None if whole else said or usual
    names = ("max_prompt_length", "max_completion_length")
    parts = [given.number(one) for one in names] if all(given.data.get(one) is not None for one in names) else []
    both = sum(one for one in parts if one) if parts and all(parts) else None
    unsaid = None if whole or newer(given.path, "trl", DPO_LENGTH) is False else usual
    return min(one for one in (said, both) if one) if said or both else unsaid
