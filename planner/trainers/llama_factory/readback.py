"""LLaMA-Factory: the YAML or JSON of llamafactory-cli."""

import dataclasses
import re
from functools import cache
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.trainers.llama_factory import megatron_adapter, of_plugins, own_arguments
from planner.trainers.reading import fine_tuning
from planner.trainers.reading.accelerate_file import said_or_asked
from planner.trainers.reading.base_weights import spec_of
from planner.trainers.reading.commands import Launch, launched, with_files
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.fine_tuning import FineTuning, adapter_targets, optimizer, quantised
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.guides import over_recipe
from planner.trainers.reading.settings import Settings, beside, file_settings
from planner.trainers.reading.settings_files import require_no_sections
from planner.trainers.reading.sharding import Sharding
from planner.trainers.reading.values import read_text, switch_of

OBJECTIVES = {"pt": "lm", "sft": "lm", "dpo": "dpo"}
NO_REFERENCE = ("orpo", "simpo")
FOREIGN = {
    "use_galore": "GaLore", "use_apollo": "APOLLO", "use_badam": "BAdam", "use_adam_mini": "Adam-mini", "use_adammini": "Adam-mini",
    "use_dora": "DoRA",
    "mixture_of_depths": "mixture of depths", "use_llama_pro": "LLaMA Pro",
    "use_hyper_parallel": "HyperParallel",
    "use_kt": "KTransformers", "use_asft_loss": "the reference model of ASFT",
    "freeze_language_model": "training the image encoder alone", "train_mm_proj_only": "training the projector of images alone",
}  # fmt: skip
"""Settings that change what is stored, and that the planner has no word for."""

QUIET = re.compile(
    rf"{fine_tuning.QUIET.pattern}|{own_arguments.IDLE}|cutoff_len|overwrite_cache|image_\w+|video_\w+|audio_\w+|use_reentrant_gc|pref_\w+|packing|neat_packing"
    r"|freeze_vision_tower|freeze_multi_modal_projector|freeze_language_model|gradient_checkpointing(_kwargs.*)?|dpo_\w+|mask_history"
    r"|include_\w+|compute_accuracy|quantization_method|quantization_type|use_dft_loss|use_asft_loss|use_eaft_loss|asft_\w+|eaft_\w+"
    r"|pissa_\w+|ray_\w+|resources_per_worker.*|placement_strategy|buffer_size|dispatch_batches|enable_thinking|train_on_prompt"
    r"|ref_model|use_(v1_kernels|fast_tokenizer|swanlab|kv_cache|exp2|messages_format|cpu|legacy_prediction_loop|auth_token|reentrant|mps_device|ipex)|low_cpu_mem_usage|additional_target|create_new_adapter|adapter_name_or_path"
)
"""Settings that decide nothing of a plan: checkpointing, say, stands in disable_gradient_checkpointing alone."""


PROGRAM = r"(?:\S*/)?(?:llamafactory-cli|lmf|llamafactory[./](?:launcher|cli)(?:\.py)?|src/train(?:_bash)?\.py)"
NO_TRAINING = r"(?!(?:export|chat|api|eval|webchat|webui|env|version|help)$)(?s:.*)"
"""A word behind llamafactory-cli that may start a training."""
OWN_LAUNCHER = re.compile(r"llamafactory-cli|lmf|launcher|cli")
OWN = {"stage", "finetuning_type", "cutoff_len", "model_name_or_path", "per_device_train_batch_size", "dataset", "template"}
"""Settings of which a configuration of LLaMA-Factory has one."""


WORDS = {"stage", "finetuning_type", "template", "cutoff_len", "dataset_dir", "lora_target", "model_name_or_path"}
"""Of which a command that starts src/train.py has one, where that is the program of LLaMA-Factory."""


STARTED = ("train", "sft", "dpo", "rm")
"""Words behind llamafactory-cli that train."""


def read(path: Path, said: Given) -> Reading:
    """The job of a file. Raises PlannerError."""
    if path.suffix in (".yaml", ".yml", ".json"):
        data = _own_section(file_settings(path, "a configuration of LLaMA-Factory"))
        if of_plugins.in_sections(data):
            return of_plugins.parse(Settings(path, said.filled(data), said=said), said.num_gpus)
        _require_own(path, data)
        # a comment that starts it with the command line of LLaMA-Factory: torchrun, and no configuration of accelerate
        command = rf"^#[^\n]{{0,80}}\bllamafactory-cli train [^\n]{{0,200}}\b{re.escape(path.name)}"
        started = re.search(command, read_text(path), re.MULTILINE) is not None
        data, notes = over_recipe(path, data, said, r"llamafactory-cli train")
        reading = parse(Settings(path, said.filled(data), said=said), said.num_gpus, script=started)
        return dataclasses.replace(reading, notes=(*notes, *reading.notes))
    found = launched(path, said, PROGRAM, NO_TRAINING)
    there = [beside(path, f"src/{one}.py", (".py",)) is not None for one in ("train_bash", "train")]
    newer = there == [False, True] or _own_length(path) is None  # what lies beside it, than the command
    old = found.program.endswith("train_bash.py") and newer
    settings = with_files(path, found, said)
    on = re.findall(r"^[^#\n]*?\b(USE_MCA|USE_MEGATRON_BRIDGE)=[\"']?(?:1|true|y)\b", read_text(path), re.MULTILINE | re.IGNORECASE)
    if on:  # which trainer is meant stands in the environment alone  [launcher.py; extras/misc.py, is_env_enabled]
        settings = Settings(path, {**settings.data, **{one.lower(): True for one in on}}, said=said)
    if of_plugins.in_sections(dict(settings.data)):
        reading = of_plugins.parse(settings, _gpus(said, found), next((one for one in found.words if one in STARTED), "sft"))
        return dataclasses.replace(reading, notes=(*found.notes, *reading.notes))
    if found.program.endswith("train.py") and not WORDS & settings.data.keys():
        what = f"its program {found.program[:200]} is given no word of LLaMA-Factory"
        raise PlannerError(f"{path}: {what}: {', '.join(sorted(WORDS))}")
    length, bash = own_arguments.OLD_LENGTH if old else None, found.program.endswith("train_bash.py")
    reading = parse(settings, _gpus(said, found), found.sharding, script=True, length=length, old=bash)
    return dataclasses.replace(reading, notes=(*found.notes, *reading.notes))


def _gpus(said: Given, found: Launch) -> int | None:
    """GPUs of a command; asked for where its launcher counts others on a node than it shows."""
    shard, each = found.sharding, found.visible
    if each is None and OWN_LAUNCHER.search(found.program) and (found.nodes or 1) == 1:
        each = found.node_gpus  # as many processes as there are GPUs  [launcher.py]
    if each is not None and OWN_LAUNCHER.search(found.program) and "NNODES" in found.environment:
        nodes = found.environment["NNODES"]  # torchrun on each of them
        each = each * int(nodes) if re.fullmatch(r"[1-9]\d{0,4}", nodes) else None
    if said.num_gpus or found.num_gpus or shard is None or shard.num_gpus is None or found.visible is None:
        return said.num_gpus or found.num_gpus or each
    several = shard.gpus_per_node not in (None, shard.num_gpus)
    if several and shard.gpus_per_node != found.visible:
        about = f"{shard.num_gpus} by its launcher, {shard.gpus_per_node} on a node, and {found.visible} are shown to it"
        said.questions.append(Question(name="--gpus N", about=about))
    return shard.num_gpus if several else found.visible


def _own_length(path: Path) -> int | None:
    """The length that the LLaMA-Factory takes in whose folder a file lies."""
    for folder in list(path.resolve().parents)[:6]:
        for file in sorted(folder.glob("src/*/hparams/data_args.py"))[:1]:
            found = re.search(r"\bcutoff_len: [^=\n]{1,80}=\s*field\(\s*default=(\d{1,7}),", read_text(file))
            return int(found[1]) if found else None
    return None


def _require_own(path: Path, data: dict[str, Any]) -> None:
    """Raises PlannerError for the file of a scheduler whose commands start LLaMA-Factory, and for one that LLaMA Board saved."""
    if "top.finetuning_type" in data and "train.cutoff_len" in data:
        what = "a form that LLaMA Board saves, its web interface (top.*, train.*), which llamafactory-cli train does not read"
        raise PlannerError(f"{path}: {what}; import the training_args.yaml that it writes into the folder of a run, or its command")
    if not any(not isinstance(data[one], dict) for one in OWN & data.keys() - {"stage"}):
        require_no_sections(path, data)
    if not OWN & data.keys():
        text = read_text(path)
        if re.search(r"llamafactory|src/train", text) is None:
            raise PlannerError(f"{path}: its settings stand in sections of its own, and none is one of LLaMA-Factory's")
        started = re.search(r"(?:llamafactory-cli\s+train|src/train(?:_bash)?\.py)\s+([\w./-]+\.(?:ya?ml|json))", text)
        file = started[1] if started else "the file that its command names"
        raise PlannerError(f"{path}: it starts LLaMA-Factory and holds none of its settings; import {file}")


def _own_section(data: dict[str, Any]) -> dict[str, Any]:
    """The section that holds the settings of LLaMA-Factory, where a file has more than these."""
    names = {"stage", "finetuning_type", "cutoff_len", "model_name_or_path"}
    inner = [one for one in data.values() if isinstance(one, dict) and len(names & one.keys()) > 1]
    return inner[0] if len(inner) == 1 and not names & data.keys() else data


def parse(
    given: Settings, num_gpus: int | None = None, sharding: Sharding | None = None, *, script: bool = False,
    length: int | None = None, old: bool = False,
) -> Reading:  # fmt: skip
    """The job that settings describe; ``sharding`` of the launcher, which a ``script`` names; ``length`` that its version takes
    where nothing is said; ``old``: its program is that of before 0.7.1. Raises PlannerError."""
    for name, what in FOREIGN.items():
        if given.flag(name) if name != "mixture_of_depths" else given.get(name):
            raise PlannerError(f"{given.where(name)}: {what} is not modelled")
    if given.get("export_dir") is not None and not given.flag("do_train"):
        raise PlannerError(f"{given.path}: export_dir without do_train: it merges adapters, and nothing is trained")
    own_arguments.require_a_training(given)
    kind = str(given.get("finetuning_type", "lora"))
    if kind not in ("lora", "full"):
        raise PlannerError(f"{given.where('finetuning_type')} is {shown(kind)}, which is not modelled; lora and full are")
    objective = given.choice("stage", OBJECTIVES, "sft")
    cut, of_length = own_arguments.length(given, length or _own_length(given.path))
    if megatron_adapter.over_megatron(given):
        over = megatron_adapter.parse(given, objective, cut, QUIET, num_gpus)
        return dataclasses.replace(over, questions=(*over.questions, *_of_a_fork(given, over.unread)))
    if str(given.get("pref_loss", "sigmoid")) in NO_REFERENCE and objective == "dpo":
        raise PlannerError(f"{given.where('pref_loss')} has no reference model, which is not modelled; sigmoid, hinge and ipo are")
    half, single = given.flag("pure_bf16"), given.flag("bf16")
    precision = "bf16" if half or single else "fp16" if given.flag("fp16") else "fp32"
    if given.flag("fp8") or given.flag("fp8_enable_fsdp_float8_all_gather"):  # which switches it on  [hparams/parser.py]
        given.get("fp8_backend")
        precision = "fp8"
    own_arguments.ask_what_is_open(given)
    bits = own_arguments.bits(given, kind)
    double = given.flag("double_quantization", True)
    if num_gpus is None and (workers := given.number("ray_num_workers")) is not None:  # Ray starts them, as torchrun would
        num_gpus, script = workers, True
    kept, unsloth = own_arguments.recomputes(given), given.flag("use_unsloth")
    split, asked = said_or_asked(given, sharding, launched=script or unsloth or num_gpus == 1)
    if precision == "fp32" and kind == "lora" and not (split.kind == "deepspeed" and split.fields.get("zero") == 3):
        precision = "bf16"  # a frozen model is loaded and computes in its own half precision  [model/patcher.py]
    split, sliced = own_arguments.over_sequences(given, split)
    other = "muon" if given.flag("use_muon") else "adafactor" if given.flag("adafactor") else None
    options, of_options = _options(given, objective, old)
    found = FineTuning(
        given=given, trainer="llama-factory", model=given.label("model_name_or_path"),
        micro_batch_size=given.size("per_gpu_train_batch_size", given.size("per_device_train_batch_size", 8)),
        accumulation=given.size("gradient_accumulation_steps", 1),
        sequence_length=cut, precision=precision,
        half_weights=half, upcasts=not half or single or split.precision in ("bf16", "fp16"),
        optimizer=other or optimizer(given, given.get("optim", "adamw_torch"), "optim"),
        recompute=kept, offload_activations=kept and (given.flag("use_unsloth_gc") or unsloth),
        lora_rank=given.size("lora_rank", 8) if kind == "lora" else 0,
        lora_targets=adapter_targets(given.get("lora_target", "all")),
        frozen_weights=quantised(bits, double) if bits else "fp32" if precision == "fp32" else "bf16",
        lora_whole=own_arguments.whole_tables(given, old), objective=objective, num_gpus=num_gpus, sharding=split,
        options=options, quiet=QUIET, questions=asked,
        notes=(*own_arguments.notes(given, objective, kind == "lora", split.kind, old), *of_length, *of_options, *sliced),
    )  # fmt: skip
    reading = fine_tuning.reading(found)
    priced = own_arguments.of_model(given, reading, spec_of(given, reading.model))
    asked = (*reading.questions, *_of_a_fork(given, reading.unread))
    return dataclasses.replace(reading, questions=asked, notes=(*reading.notes, *priced))


def _of_a_fork(given: Settings, unread: tuple[str, ...]) -> list[Question]:
    """What is asked about switches that nobody reads, and about words that LLaMA-Factory does not have, which its parser takes in a
    fork alone: they are losses and metrics, or steps and layers. Words of one switch are asked about by it, unless it is off."""
    known = known_arguments()
    found: dict[str, list[str]] = {}
    for one in unread:
        name, _, value = one.partition(" = ")
        switch = re.fullmatch(r"use_\w+", name) is not None and value == "True" and name not in known
        if switch or (re.fullmatch(r"[A-Za-z]\w*", name) and name not in known and not OF_A_LOG.match(name)):
            by, on = switch_of(name, given.data) or (name, True)
            if on:
                found.setdefault(name if by in known else by, []).append(name)
    asked = []
    for name, words in found.items():
        others = ", ".join(one for one in words if one != name)[:120]
        alone = "a switch" if name.startswith("use_") else "no argument of LLaMA-Factory known here, so one"
        what = f"it switches on {others}, all" if others else alone
        about = f"{what} of this fork; false imports the job without it, where it is no optimizer, adapter or other memory"
        asked.append(Question(name=name, about=about, choices=("false",)))
    return asked


OF_A_LOG = re.compile(
    r"(train|val|test)_size$|eval|save|log|hub|dataloader|ddp|dataset|(train_)?file|valid|test|project|run|wandb|tags?\b|compute_exact|train_sampling"
    r"|(prompt|query|response|chosen|rejected|messages|images)(_(column|field|key))?$|formatting|\w+_tag$"
)
"""Beginnings of words that are about data, metrics and what is written."""


@cache
def known_arguments() -> frozenset[str]:
    """Arguments of LLaMA-Factory since 0.1 and of transformers' Trainer.  [hparams/*.py; training_args.py 4.36 and 4.57]"""
    return frozenset(read_text(Path(__file__).with_name("known_arguments.txt")).split())


def _options(given: Settings, objective: str, old: bool) -> tuple[dict[str, str], tuple[str, ...]]:
    """(Options of the trainer that the file sets, notes). Its own loss kernel, and unsloth's, write no logits where the step needs
    none.  [model/model_utils/liger_kernel.py]"""
    options = {"adapter_dropout": "on"} if given.above_zero("lora_dropout", 0.0) else {}
    kernel = str(given.get("flash_attn", "auto")).lower()
    if kernel in own_arguments.ATTENTION:
        options["attention_kernel"] = own_arguments.ATTENTION[kernel]
    unfused, notes = own_arguments.eager(given, old)
    if unfused:
        options["attention_kernel"] = "eager"
    own, trainers = given.flag("enable_liger_kernel"), given.flag("use_liger_kernel")
    name = given.label("model_name_or_path")
    if own and not trainers and own_arguments.NOT_PATCHED.search(name):
        what = f"enable_liger_kernel: LLaMA-Factory has no patch of Liger's for {name[:80]}: all scores are kept"
        own, notes = False, (*notes, what)
    if given.flag("use_unsloth") and objective == "lm":
        notes = (*notes, "use_unsloth: its loss in pieces is priced; unsloth of before 2024-12 keeps all scores")
    if (own or trainers or given.flag("use_unsloth")) and objective == "lm":
        options["loss"] = "fused_linear"
    if own_arguments.compiled(given):
        options["compile"] = "on"
    if objective == "dpo":
        options["pair_loss"] = "shifted"  # as large over DeepSpeed as its own  [train/dpo/trainer.py]
    return options, notes
