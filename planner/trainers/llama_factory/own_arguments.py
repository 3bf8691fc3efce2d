"""Arguments of LLaMA-Factory that count under others alone, or that change memory or time by a part no plan has a word for.
[LLaMA-Factory 0.1 to 0.9.5: hparams, model/adapter.py, model/patcher.py, train/trainer_utils.py]"""

import dataclasses
import re
from pathlib import Path

from planner.errors import PlannerError
from planner.layout import CpMethod
from planner.model import ModelSpec
from planner.trainer_options import spelled
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Question
from planner.trainers.reading.kernels import KERNELS, of_packing
from planner.trainers.reading.model_notes import of_trained_images
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.sharding import Sharding
from planner.trainers.reading.values import read_text
from planner.trainers.reading.versions import newer
from planner.units import GIB

NEW_TOKENS = ("resize_vocab", "add_tokens", "add_special_tokens", "new_special_tokens", "new_special_tokens_config")
"""With one of them, and no additional_target, adapters train embedding and head as a whole."""
ATTENTION = {**KERNELS, "disabled": "eager", "off": "eager", "true": "fa2"}
"""flash_attn -> attention_kernel."""
USUAL = ("auto", "false", "")
IDLE = (
    r"(galore|apollo|badam)_\w+|freeze_(trainable|extra)_\w+|num_layer_trainable|name_module_trainable|export_\w+|offload_folder"
    r"|quantization_device_map|kt_\w+|cpu_infer|(reward|ppo|kto|oft|vllm|sglang|profiler)_\w+|module_dropout|use_(cache|audio_in_video)"
)
"""Settings of optimizers, steps and exports that are off: what switches them on is refused before."""
SAID_ELSEWHERE = {
    "shift_attn": "priced as whole attention: time comes out too long",
    "auto_find_batch_size": "per_device_train_batch_size is smaller where memory runs out",
    "upcast_lmhead_output": "not priced: logits lie in fp32, memory comes out too low",
}
"""Settings that change memory or time by a part that a plan has no word for -> what is priced."""
GOES_ON = "adapter_name_or_path: adapters go on from there, and their rank and targets count where they are others"
"""Note about adapters that are not new."""


LENGTH, OLD_LENGTH = 2048, 1024
"""Tokens at which sequences are cut where nothing is said: since 0.9.1, and before."""
STORED = re.compile(r"(?i)gptq|awq|aqlm|int[48]\b|w[48]a16|fp8|mxfp4|gpt-?oss(?!.*(bf16|bnb))")
"""Names of weights that are published in fewer bits, whatever quantization_bit says.  [model_utils/quantization.py]"""
NOT_PATCHED = re.compile(
    r"(?i)smollm-?3|exaone-?4|hunyuan|minitron|nemotron-4|olmo-?3|qwen-?3-?vl|llama-?4|gemma-?4|internvl|pixtral|falcon-?h1|glm-?4\.[5-9]v"
)
"""Models that Liger patches, and LLaMA-Factory's own table of them does not have.  [model_utils/liger_kernel.py]"""


OWN_CODE = re.compile(r"(?i)chatglm|glm-?4-9b(?!-(hf|chat-hf|0414))|baichuan(?!-m2)|xverse|aquila|(^|/)qwen-(1_8|7|14|72)b")
"""Models whose code of their own chooses the kernel of attention."""


def since(path: Path, *version: int) -> bool | None:
    """Whether the project takes LLaMA-Factory from a version on, by any of its names, the last of which it had until 0.7; None = it
    does not say."""
    found = (newer(path, one, version) for one in ("llamafactory", "LLaMA-Factory", "LlamaFactory", "llmtuner"))
    named = version >= (0, 8) and re.search(r"\bllmtuner\b", read_text(path)) is not None
    return next((one for one in found if one is not None), False if named else None)


def before(given: Settings, old: bool, *version: int) -> bool | None:
    """Whether LLaMA-Factory is from before a version; ``old``: where nothing says one."""
    known = since(given.path, *version)
    return (True if old else None) if known is None else not known


def eager(given: Settings, old: bool) -> tuple[bool, tuple[str, ...]]:
    """(Whether attention keeps its scores because flash_attn is not on, note): 0.5.2 to 0.6 took eager then, and transformers
    before 4.36, which 0.1 to 0.3 used, had no other; ``old``: its program is that of before 0.7.1.  [model/patcher.py]"""
    other_code = OWN_CODE.search(given.label("model_name_or_path")) is not None or given.flag("use_unsloth")
    if str(given.get("flash_attn", "auto")).lower() not in USUAL or not before(given, old, 0, 7) or other_code:
        return False, ()
    of_class = since(given.path, 0, 4) and since(given.path, 0, 5, 2) is False
    known = since(given.path, 0, 7) is not None
    what = "flash_attn is not on: LLaMA-Factory before 0.7 takes eager attention then, which keeps its scores"
    other = "" if known else "; --set flash_attn=sdpa prices torch's, which 0.4.0 to 0.5.1 and 0.7 have"
    return not of_class, () if of_class else (what + other,)


def recomputes(given: Settings) -> bool:
    """Whether layers keep their inputs alone: unsloth and transformers' Trainer switch it on again, gemma-3n goes without.
    [model_utils/unsloth.py; model/patcher.py: patch_model]"""
    without = given.flag("disable_gradient_checkpointing") or re.search(r"(?i)gemma-?3n", given.label("model_name_or_path"))
    return given.flag("gradient_checkpointing") or given.flag("use_unsloth") or not without


def compiled(given: Settings) -> bool:
    """Whether the model is compiled: naming a backend or a mode says so too.  [transformers, training_args.py]"""
    named = any(given.get(f"torch_compile_{one}") is not None for one in ("backend", "mode"))
    return given.flag("torch_compile") or named


def require_a_training(given: Settings) -> None:
    """Raises PlannerError for a file that predicts, evaluates or analyses."""
    said = [f"{one} without do_train" for one in ("do_predict", "do_eval") if given.flag(one)]
    said += ["do_train: false"] * ("do_train" in given.data)
    if said and not given.flag("do_train"):
        raise PlannerError(f"{given.path}: {said[0]}: nothing is trained; --set do_train=true imports it as a training")


def over_sequences(given: Settings, split: Sharding) -> tuple[Sharding, tuple[str, ...]]:
    """Sequences that forks cut over GPUs, by a ring unless they say Ulysses, and what was taken for what.
    [360-LLaMA-Factory, hparams/model_args.py]"""
    size, mode = given.size("sequence_parallel_size"), str(given.get("sequence_parallel_mode", "zigzag-ring"))
    if size == 1:
        return split, ()
    ring = mode != "ulysses" and split.kind != "deepspeed"
    fields = {**split.fields, "cp": size, "cp_method": int(CpMethod.RING if ring else CpMethod.A2A)}
    note = f"sequence_parallel_size: {mode[:40]} over DeepSpeed is priced as Ulysses"
    return dataclasses.replace(split, fields=fields), () if ring or mode == "ulysses" else (note,)


def length(given: Settings, usual: int | None) -> tuple[int, tuple[str, ...]]:
    """(Tokens at which sequences are cut, note); before cutoff_len, the prompt and the answer by themselves. ``usual``: where
    nothing is said; None = by the release."""
    parts = [given.number(one) for one in ("max_source_length", "max_target_length")]
    if given.get("cutoff_len") is None and parts[0] is not None:
        return parts[0] + (0 if given.get("stage") == "pt" else parts[1] or 512), ()
    new = since(given.path, 0, 9, 1)
    found = given.size("cutoff_len", usual or (OLD_LENGTH if new is False else LENGTH))
    answered = given.said is not None and given.said.sequence_length is not None
    open_ = usual is None and new is None and given.get("cutoff_len") is None and not answered
    return found, (f"cutoff_len is not said: {LENGTH} tokens, as since LLaMA-Factory 0.9.1; before, {OLD_LENGTH}",) * open_


def bits(given: Settings, kind: str) -> int | None:
    """Bits of the frozen base; None = 16. Raises PlannerError for what LLaMA-Factory does not start, or a plan does not know."""
    found = given.number("quantization_bit", most=8)
    if found is not None and STORED.search(given.label("model_name_or_path")):
        return None
    if found is not None and kind != "lora":
        why = f"weights in {found} bits are not trained; finetuning_type is {kind}"
        raise PlannerError(f"{given.where('quantization_bit')}: {why}; --set quantization_bit=null imports the job without")
    if found not in (None, 4, 8):
        raise PlannerError(f"{given.where('quantization_bit')}: weights in {found} bits are not priced; 4 and 8 are")
    return found


def whole_tables(given: Settings, old: bool) -> str:
    """Tables that are trained as a whole because rows are added, since 0.7, one of LORA_WHOLE."""
    added = not before(given, old, 0, 7) and any(given.get(one) not in (None, False, "") for one in NEW_TOKENS)
    return "both" if added and given.get("additional_target") is None else ""


def ask_what_is_open(given: Settings) -> None:
    """Asks for what one answer settles."""
    if given.get("parallelism_config") not in (None, False):
        about = "degrees of accelerate beside DeepSpeed or FSDP, which are not read; false imports the job without"
        given.ask(Question(name="parallelism_config", about=about, choices=("false",)))


def other_kernel(kernel: str) -> str:
    """Note about a kernel of attention that no plan has."""
    return f"attention by {kernel[:40]} is priced as the choice of torch"


def notes(given: Settings, objective: str, adapters: bool, kind: str, old: bool) -> tuple[str, ...]:
    """What a plan leaves out of the settings that are there; ``kind`` of sharding; ``old``: its program is that of before 0.7.1."""
    found = [f"{name}: {what}" for name, what in SAID_ELSEWHERE.items() if given.get(name) not in (None, False, "")]
    own = [one for one in ("ref_model", "ref_model_checkpoint", "dpo_ref_model") if given.get(one)]
    if objective == "dpo" and adapters and own:
        found.append(f"{own[0]}: a model of its own beside the base, which is not priced: memory comes out too low by its weights")
    if objective == "dpo" and given.get("ref_model_quantization_bit") is not None:
        found.append("ref_model_quantization_bit: the reference model is priced in 16 bits: memory comes out too high")
    name = next((one for one in ("adapter_name_or_path", "checkpoint_dir") if given.data.get(one)), "")
    if adapters and name and not given.flag("create_new_adapter"):
        found.append(GOES_ON.replace("adapter_name_or_path", name))
    if adapters and given.get("lora_target") is None and before(given, old, 0, 6):
        found.append("lora_target is not said: all linear layers, as LLaMA-Factory 0.6 has it; 0.1 started with q_proj and v_proj")
    if given.get("quantization_bit") is not None and bits(given, "lora") is None:
        found.append("quantization_bit counts for nothing where the weights are published in fewer bits")
    if adapters and whole_tables(given, old):
        found.append("rows are added and additional_target is not said: embedding and head are trained as a whole")
    method = str(given.get("quantization_method", "bnb")).lower()
    if given.get("quantization_bit") is not None and method not in ("bnb", "bitsandbytes"):
        found.append(f"quantization_method {method[:40]} is priced as bitsandbytes")
    kernel = str(given.get("flash_attn", "auto")).lower()
    if kernel not in ATTENTION and kernel not in USUAL:
        found.append(other_kernel(kernel))
    if compiled(given) and kind == "deepspeed":
        found.append("torch_compile is not priced over DeepSpeed: time comes out too long")
    return tuple(found)


def of_model(given: Settings, reading: Reading, spec: ModelSpec | None) -> tuple[str, ...]:
    """Notes about what takes memory by the model and the length: scores of pairs, an image encoder that is trained, tables that
    nothing casts, and the mask of packed sequences.  [model/adapter.py; data/collator.py: prepare_4d_attention_mask]"""
    images = given.get("finetuning_type") == "full" and given.get("freeze_vision_tower") is not None
    found = of_trained_images(spec, "freeze_vision_tower") if images and not given.flag("freeze_vision_tower") else ()
    if given.flag("neat_packing") and "attention_kernel=fa2" not in reading.trainer:
        found += of_packing("neat_packing", reading.fields["micro_batch_size"], reading.sequence_length or 0)
    if given.flag("pure_bf16") and reading.lora_whole != "none":
        count = 0.0 if spec is None else float(spec.vocab_size * spec.hidden_size)
        by = f" by up to {8.0 * count / GIB:.1f} GiB each" if count else ""
        found += (f"pure_bf16: tables that are trained whole are priced in fp32, and lie in bf16: memory comes out too high{by}",)
    return (*found, *of_pairs(reading, spec))


def of_pairs(reading: Reading, spec: ModelSpec | None) -> tuple[str, ...]:
    """Note about the scores of pairs over DeepSpeed: it takes log probabilities of all at once in fp32, and holds scores and log
    softmax of the policy while those of the reference are there: 16 bytes each, where ``stored_as`` has 8.
    [train/dpo/trainer.py: concatenated_forward; train/trainer_utils.py: get_batch_logps]"""
    if reading.objective != "dpo" or spelled(reading.trainer)[0] == "llama-factory":  # which is priced so
        return ()
    text = "LLaMA-Factory's DPO holds scores and their log softmax of policy and reference in fp32: memory comes out too low"
    tokens = 2.0 * reading.fields["micro_batch_size"] * (reading.sequence_length or 0) / reading.fields.get("cp", 1)
    if spec is None or not tokens:
        return (text,)
    more = 8.0 * tokens * spec.vocab_size / reading.fields.get("tp", 1) / GIB
    return (f"{text} by up to {more:.1f} GiB",) * (more >= 0.1)
