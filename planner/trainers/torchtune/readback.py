"""torchtune: the YAML of its recipes, and commands (tune run) with overrides of published ones."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, nearest_first, shown
from planner.layout import CpMethod, Recompute
from planner.trainer_options import spell
from planner.trainers.reading.commands import launched
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.fine_tuning import adapter_targets, optimizer
from planner.trainers.reading.given import Given, Question, setting_of_a_fork
from planner.trainers.reading.interpolation import override, resolved
from planner.trainers.reading.named_models import named_model
from planner.trainers.reading.settings import Settings, beside, file_settings, parsed
from planner.trainers.reading.values import quotient

QUIET = re.compile(
    r"(tokenizer|dataset|dataset_val|checkpointer|ref_checkpointer|lr_scheduler|metric_logger|profiler|optimizer|collate_fn|loss"
    r"|tensor_parallel_plan|model)\..*"
    r"|output_dir|seed|shuffle|epochs|max_steps_per_epoch|clip_grad_norm|log_\w+|device|resume_from_checkpoint|save_\w+|batch_size_val"
    r"|run_val_\w+|custom_sharded_layers|cudnn_\w+|use_distributed_state_dict|optimizer_in_bwd|low_cpu_ram|fsdp.*|ac_\w+|enable_async\w*"
)
PART = "activation|gradient|attention|attn|expert|moe|layer|block|mlp|ffn"
DECIDES = re.compile(
    r"\w*parallel\w*|\w+_degree|\w*expert_\w+|native_\w+|\w*shard\w*|\w*offload\w*|\w*(recompute|remat)\w*"
    rf"|checkpoint_\w*({PART})\w*|\w*({PART})s?\w*checkpoint\w*|\w*checkpointing\w*"
)
"""Settings that say a degree, sharding or recompute by their names, where torchtune itself does not have them."""
KNOWN = re.compile(
    r"custom_sharded_layers|(save|load|(enable_)?async)_\w+|\w*(checkpointer|tokenizer|dataset)\w*(\..*)?"
    r"|(tensor_parallel_plan|lr_scheduler|metric_logger|profiler|optimizer|collate_fn|loss)\..*|model\.expert_(hidden_)?(dim|size)"
)
"""Others like them that decide neither."""
NONE = ("1", "1.0", "'1'", "'none'", "'None'", "'null'", "'false'", "'False'")
"""Values with which such a setting changes nothing."""
DEVICES = ("cuda", "hpu")
"""What profiles of --hardware are of: torch calls GPUs of AMD cuda too."""
NAME = re.compile(r"torchtune\.models\.(?P<family>\w+)\.(?P<kind>q?lora_)?(?P<name>\w+)")
SIZES = {"0_5b": "0.5b", "1_5b": "1.5b", "0_6b": "0.6b", "1_7b": "1.7b"}
DTYPES = {"bf16": "bf16_true", "fp32": "fp32", "float32": "fp32", "bfloat16": "bf16_true"}


def read(path: Path, said: Given) -> Reading:
    """The job of a file. Raises PlannerError."""
    if path.suffix in (".yaml", ".yml"):
        data = file_settings(path, "a recipe of torchtune")
        return parse(Settings(path, resolved(said.filled(data)), said=said), path.name, said.num_gpus)
    found = launched(path, said, r"(?:\S*/)?tune", "run")
    words = {name: value if isinstance(value, list) else [value] for name, value in found.settings.items()}
    named, recipe = (str(words.get("config", [""])[0]), next((one for one in _loose(words, found.words) if one != "run"), ""))
    over = {key.lstrip("+~"): parsed(value) for key, mark, value in (one.partition("=") for one in found.words) if mark}
    data = override(_configuration(path, named), over)
    counts = (words.get("nproc_per_node"), words.get("nnodes", [1]))
    each, nodes = (one[0] if one and isinstance(one[0], int) else None for one in counts)
    gpus = said.num_gpus or (each * nodes if each and nodes else None)
    reading = parse(Settings(path, resolved(said.filled(data)), said=said), f"{recipe} {named}", gpus)
    return dataclasses.replace(reading, notes=(*reading.notes, *found.notes))


def _loose(words: Mapping[str, list[Any]], before: list[str]) -> list[str]:
    """Words that are no values of the launcher's options: the recipe."""
    return [*before, *(str(one) for name, values in words.items() if name != "config" for one in values[1:])]


def _configuration(path: Path, name: str) -> dict[str, Any]:
    """A file that a command names, or a published one. Raises PlannerError."""
    if (file := beside(path, name)) is not None:
        return file_settings(file, "a recipe of torchtune")
    known = library.read_yaml(Path(__file__).with_name("configs.yaml"))
    if name.removesuffix(".yaml") not in known:
        near = ", ".join(nearest_first(name, known)[:3])
        raise PlannerError(f"{path}: configuration {shown(name)} is neither a file in its folder nor a published one, like {near}")
    return dict(known[name.removesuffix(".yaml")])


def parse(given: Settings, called: str, num_gpus: int | None = None) -> Reading:
    """The job that settings describe; ``called``: its file or its recipe. Raises PlannerError."""
    for name, what in (("quantizer", "quantisation-aware training or quantisation"), ("teacher_model", "distillation"),
                       ("policy_model", "PPO"), ("ppo_epochs", "PPO"), ("grpo_samples", "GRPO")):  # fmt: skip
        if given.get(name) is not None:
            raise PlannerError(f"{given.where(name)}: {what} is not modelled; fine-tuning and DPO are")
    if given.get("batch_size") is None or given.get("optimizer") is None:
        raise PlannerError(f"{given.path}: batch_size or optimizer is missing: this recipe trains nothing")
    if given.flag("model.use_dora"):
        raise PlannerError(f"{given.where('model.use_dora')}: DoRA is not modelled; LoRA is")
    part, single = given.section("model"), "single_device" in called
    component = NAME.fullmatch(str(part.get("_component_")))
    kind, model_name = _name(component) if component else ("", str(part.get("_component_")))
    model, notes = named_model(model_name, given.path)
    gpus = 1 if single else num_gpus
    if single and num_gpus not in (None, 1):
        raise PlannerError(f"{given.path}: a recipe of a single device, but --gpus says {num_gpus}")
    micro, steps = given.size("batch_size"), given.size("gradient_accumulation_steps", 1)
    tp, cp, replicas = (given.size(name) for name in ("tensor_parallel_dim", "context_parallel_dim", "data_parallel_replicate_dim"))
    gpus = gpus if single else _of_shards(given, tp * cp * replicas, gpus)
    whole = all(given.flag(one, True) for one in ("fsdp_reshard_after_forward", "fsdp.reshard_after_forward"))
    fields = {
        "tp": tp, "cp": cp, "micro_batch_size": micro, "num_microbatches": steps, "zero": 3 if whole else 2, "sequence_parallel": 0,
        "recompute": _recompute(given, modes=not (kind or single)),
        "offload_activations": int(given.flag("enable_activation_offloading")),
        "offload_parameters": int(given.flag("fsdp_cpu_offload") or given.flag("fsdp.cpu_offload")),
        **({"cp_method": int(CpMethod.ALLGATHER)} if cp > 1 else {}),
    }  # fmt: skip
    batch = micro * steps  # of one replica: to_plan asks for the GPUs first
    if gpus is not None:
        fields["dp"] = quotient(gpus, tp * cp, f"{given.path}: GPUs by tensor_parallel_dim x context_parallel_dim")
        batch = micro * steps * fields["dp"]
        if fields["dp"] * cp == 1:
            fields["zero"] = 0
        if replicas > 1:
            fields["dp_shard"] = quotient(fields["dp"], replicas, f"{given.path}: dp by data_parallel_replicate_dim")
    loss, strange = str(given.get("loss._component_", "")), _of_a_fork(given)
    return Reading(
        trainer=_trainer(given, bool(kind)), fields=fields, model=model, model_name=model_name, num_gpus=gpus,
        global_batch_size=batch, sequence_length=_length(given), precision=given.choice("dtype", DTYPES, "bf16"),
        optimizer=_optimizer(given), lora_rank=part.size("lora_rank", 8) if kind else 0,
        lora_targets=_targets(part) if kind else "all",
        frozen_weights=("nf4_dq" if kind == "qlora_" or part.flag("quantize_base") else "bf16") if kind else None,
        objective="dpo" if "DPOLoss" in loss or "dpo" in called else "lm",
        unread=tuple(one for one in given.left() if not QUIET.fullmatch(one.split(" = ")[0])), notes=notes, questions=strange,
    )  # fmt: skip


def _of_shards(given: Settings, others: int, gpus: int | None) -> int | None:
    """GPUs, where the ranks that share a copy of the weights are counted; -1 is all there are. Raises PlannerError for others."""
    shards = given.number("data_parallel_shard_dim", -1, -1)
    if shards is None or shards < 1:
        return gpus
    if gpus not in (None, shards * others):
        where = given.where("data_parallel_shard_dim")
        raise PlannerError(f"{where} is {shards}: with the other degrees {shards * others} GPUs, but it runs on {gpus}")
    return shards * others


def _recompute(given: Settings, modes: bool) -> int:
    """``modes``: its recipe has ac_mode, which excludes enable_activation_checkpointing: with both nothing is recomputed.
    [recipes/full_finetune_distributed.py]"""
    mode, every, old = given.get("ac_mode"), given.get("ac_option"), given.flag("enable_activation_checkpointing")
    if mode in (None, "none") or old or not modes:
        return int(Recompute.FULL if old and (mode is None or not modes) else Recompute.NONE)
    if mode == "full" or str(every) == "1":
        return int(Recompute.FULL)
    about = f"{shown(mode)} with ac_option {shown(every)} recomputes some layers, which is not modelled; all of them or none"
    given.ask(Question(name="ac_mode", about=about, choices=("full", "none")))
    return int(Recompute.NONE)


def _of_a_fork(given: Settings) -> tuple[Question, ...]:
    """What decides memory or degrees: settings that torchtune does not have, and a device that no profile is of."""
    left = [one.partition(" = ")[0::2] for one in given.left()]
    found = [
        setting_of_a_fork(name, "torchtune", "false" if value[:1] not in "-0123456789" else "1")
        for name, value in left
        if any(map(DECIDES.fullmatch, name.split("."))) and not KNOWN.fullmatch(name) and value not in NONE
    ]  # fmt: skip
    device = str(given.get("device") or "cuda")
    if device.partition(":")[0] not in DEVICES:
        about = f"no profile of --hardware is of {shown(device)}; cuda imports the job as it would run on one"
        found.append(Question(name="device", about=about, choices=("cuda",)))
    return tuple(found)


def _name(component: re.Match[str]) -> tuple[str, str]:
    """('', 'lora_' or 'qlora_', the model as the hub would call it)."""
    name = component["name"]
    for text, dotted in SIZES.items():
        name = name.replace(text, dotted)
    own = component["family"].removesuffix("_moe")
    family = re.sub(r"(llama|qwen|gemma|phi)(\d)", r"\1-\2" if not own.startswith("qwen") else r"\1\2", own).replace("_", ".")
    rest = name.removeprefix(own).strip("_").removesuffix("_instruct").removesuffix("_base").replace("_", "-")
    return component["kind"] or "", f"{family}-{rest}".replace("phi-4-14b", "phi-4").replace("phi-3-mini", "phi-3-mini")


def _length(given: Settings) -> int | None:
    """Where texts are cut, or packs are as long; None = as long as the longest of a batch."""
    return given.number("tokenizer.max_seq_len") or given.number("dataset.max_seq_len")


def _optimizer(given: Settings) -> str:
    part = given.section("optimizer")
    name = str(part.get("_component_")).rpartition(".")[2]
    if str(part.get("_component_")).startswith("torchao") and name == "AdamW4bit":
        raise PlannerError(f"{part.where('_component_')} is {shown(name)}, which is not modelled")
    return optimizer(part, name, "_component_")


def _targets(part: Settings) -> str:
    named = list(part.get("lora_attn_modules") or [])
    return "all" if part.flag("apply_lora_to_mlp") else adapter_targets(named)


def _trainer(given: Settings, adapters: bool) -> str:
    options = {"compile": "on"} if given.get("compile") not in (None, False) else {}
    if not adapters:  # its recipes of adapters have no such word
        options["optimizer_in_backward"] = "on" if given.flag("optimizer_in_bwd") else "off"
    return spell("torchtune", options)
