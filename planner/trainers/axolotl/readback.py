"""axolotl: its YAML."""

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path

from planner.errors import PlannerError, shown
from planner.layout import CpMethod
from planner.trainers import load
from planner.trainers.axolotl.unpriced import (
    ask_what_is_open,
    has_plugin,
    notes,
    of_images,
    of_lora_kernels,
    of_tables,
    quantises,
    require_modelled,
)
from planner.trainers.reading import base_weights, fine_tuning
from planner.trainers.reading.accelerate_file import accelerate_named
from planner.trainers.reading.commands import Launch, launched, with_files
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.fine_tuning import FineTuning, adapter_targets, optimizer, quantised
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.guides import over_recipe
from planner.trainers.reading.kernels import KERNELS, of_packing
from planner.trainers.reading.named_models import named_model
from planner.trainers.reading.settings import Settings, file_settings
from planner.trainers.reading.sharding import Sharding, from_arguments
from planner.trainers.reading.values import read_text
from planner.trainers.reading.versions import newer

QUIET = re.compile(
    rf"{fine_tuning.QUIET.pattern}|datasets.*|test_datasets.*|chat_template.*|num_epochs|model_type|processor_type|sample_packing\w*"
    r"|pad_to_(sequence_len|multiple_of)|train_on_inputs|\w*_steps|\w+_per_epoch|loss_watchdog_\w+|eot_tokens.*|adapter|is_\w+_derived_model"
    r"|flash_optimum|local_rank|debug|tokens.*|skip_prepare_dataset|lora_fan_in_fan_out|lora_(mlp|qkv|o|embedding)_kernel|lora_modules_to_save.*"
    r"|liger_\w+|cosine_\w+|torchdistx_path|gptq_\w+|use_tensorboard|rl_beta|trl.*|dpo_\w+|auto_resume_from_checkpoints"
    r"|curriculum_sampling|save_first_step|total_num_tokens|fsdp|fsdp_version|gradient_checkpointing_kwargs.*|hf_use_auth_token|float16"
    r"|experimental_skip_move_to_device|scaling_softmax|flash_attn_\w+|accelerator_config.(dispatch_batches|even_batches|use_seedable_sampler|non_blocking|gradient_accumulation_kwargs.*)|use_wandb|eta_min|revision_of_model"
    r"|flash_attention|bfloat16|fp16|image_\w+|rl|ddp_\w+|batch_flattening|device_map|type_of_model|bnb_config_kwargs.*"
    r"|bnb_4bit_\w+|quantization_config.*|freeze_mm_modules|expert_parallel_(num_nvl_bytes|token_capacity)"
)
OBJECTIVES = {"dpo": "dpo", "ipo": "dpo"}
OF_A_RANK = "batch_size is that of one GPU, as since axolotl 0.3; 0.1 and 0.2 divide its accumulation by the GPUs"
"""[scripts/finetune.py until 0.2: gradient_accumulation_steps // world_size]"""
USUAL_LENGTH = 512
"""[axolotl, utils/schemas/config.py, sequence_len]"""
OTHER_FORMS = ("max_length", "max_seq_length", "grad_accum", "target_modules", "lora_rank", "per_device_train_batch_size")
"""Settings that axolotl has under other names: with none of its data, a file with these is of a project's own program."""


def read(path: Path, said: Given) -> Reading:
    """The job of a file. Raises PlannerError."""
    if path.suffix in (".yaml", ".yml", ".json"):
        data = file_settings(path, "a configuration of axolotl")
        other = [one for one in OTHER_FORMS if one in data and not ("datasets" in data or "pretraining_dataset" in data)]
        if other:
            why = "no setting of axolotl; import the script that starts the program that reads it"
            raise PlannerError(f"{path}: {', '.join(other)}: {why}")
        command = rf"^#[^\n]*\baxolotl[^\n]*{re.escape(path.name)}[^\n]*--deepspeed[= ]+(\S+)"
        launch = re.search(command, read_text(path), re.MULTILINE)
        if launch is not None and data.get("deepspeed") is None:  # what launches it, in a comment
            data["deepspeed"] = launch[1]
        data, over = over_recipe(path, data, said, r"axolotl train")
        reading = parse(Settings(path, said.filled(data), said=said), said.num_gpus)
        return dataclasses.replace(reading, notes=(*over, *reading.notes))
    if path.suffix in (".py", ".ipynb"):
        return load("trl", "dumped").read(path, "axolotl", said)
    found = launched(path, said, r"axolotl|axolotl\.cli\.train|scripts/finetune\.py")
    given = with_files(path, found, said)
    off = [one for one, value in given.data.items() if re.match(r"no_[a-z]", one) and value is True]
    if off:  # --no-sample-packing  [cli/utils/args.py]
        data = {one: value for one, value in given.data.items() if one not in off}
        given = Settings(path, {**data, **{one[3:]: False for one in off}}, said=said)
    own = _processes(given, found)
    return parse(given, said.num_gpus or found.num_gpus or own, found.sharding)


def _processes(given: Settings, found: Launch) -> int | None:
    """Processes that axolotl's own command starts: by its options, those behind -- for torchrun, or one for each GPU that is
    shown; python starts one.  [cli/utils/train.py]"""
    if given.get("launcher") == "python":
        return 1
    each, nodes = given.number("nproc_per_node"), given.size("nnodes", given.size("num_machines"))
    counted = given.number("num_processes") or (each * nodes if each else None)
    own = found.program == "axolotl" or re.search(r"\baccelerate\s+launch\b", read_text(given.path)) is not None
    there = found.visible or (found.node_gpus if (found.nodes or 1) == 1 else None)
    return counted or (there if own or found.visible == 1 else None)


def parse(given: Settings, num_gpus: int | None = None, sharding: Sharding | None = None) -> Reading:
    """The job that settings describe; ``sharding`` of the launcher. Raises PlannerError."""
    require_modelled(given)
    if given.flag("model_quantization_config_kwargs.dequantize"):  # weights of the hub in fewer bits, trained in 16
        given.get("model_quantization_config")
    adapter = given.get("adapter")
    if adapter not in (None, "lora", "qlora"):
        raise PlannerError(f"{given.where('adapter')} is {shown(adapter)}, which is not modelled; lora and qlora are")
    objective = given.choice("rl", OBJECTIVES, "ipo") if given.get("rl") else "lm"
    ask_what_is_open(given)
    precision = _precision(given)
    strategy = "full_shard" if _fsdp_version(given) != 2 else ""  # fsdp is true beside fsdp_config  [core/builders/base.py]
    found = sharding or accelerate_named(given) or from_arguments(given, usual=strategy) or Sharding()
    bits = _bits(given)
    if num_gpus is None and given.flag("use_ray"):  # Ray starts them, as torchrun would
        num_gpus = given.number("ray_num_workers")
    micro, steps = given.number("micro_batch_size"), given.number("gradient_accumulation_steps")
    if micro is None and given.get("batch_size") is None:
        given.ask(Question(name="micro_batch_size", about="sequences per GPU and forward pass", choices=("N",)))
    offload = given.get("activation_offloading", False) not in (False, "false")
    checkpoints = given.get("gradient_checkpointing", False)
    length = given.number("sequence_len")
    answered = given.said is not None and given.said.sequence_length is not None
    if length is None and given.get("max_packed_sequence_len") is not None and not answered:
        why = "max_packed_sequence_len is none of axolotl's settings any more"
        given.ask(Question(name="sequence_len", about=why, choices=("N",)))
    rows, padded = _rows(given, USUAL_LENGTH if length is None else length, answered)
    # batch_size is that of a rank: its accumulation is batch_size // micro_batch_size  [utils/config, normalize_config]
    steps = steps or max((given.number("batch_size") or 1) // (micro or 1), 1)
    split, cut = _parallel(given, found, num_gpus)
    spec = base_weights.spec_of(given, named_model(_model(given), given.path)[0])
    return fine_tuning.reading(FineTuning(
        given=given, trainer="axolotl", model=_model(given), micro_batch_size=micro or 1, accumulation=steps,
        sequence_length=rows, precision=precision, half_weights=precision in ("bf16", "fp8"),
        optimizer=optimizer(given, given.get("optimizer", "adamw_torch_fused"), "optimizer"),
        recompute=checkpoints not in (False, "false", None),
        offload_activations=offload or str(checkpoints).startswith("offload") or checkpoints == "unsloth",
        lora_rank=given.size("lora_r", 8) if adapter else 0, lora_targets=_targets(given),
        frozen_weights=quantised(bits, not given.flag("gptq") and _double(given)) if bits else "bf16",
        objective=objective,
        # Its own preparation of FSDP2 shards weights as they were loaded.  [monkeypatch/accelerate/fsdp2.py]
        # bf16: full turns mixed precision off.
        upcasts=_fsdp_version(given) != 2 and str(given.get("bf16")).lower() != "full",
        sharding=split, num_gpus=num_gpus, options=_options(given), quiet=QUIET, notes=(
            *(f"sequences of {USUAL_LENGTH} tokens, axolotl's default",) * (length is None and not answered), *padded,
            *(OF_A_RANK,) * (given.get("batch_size") is not None and newer(given.path, "axolotl", (0, 3)) is not True),
            *of_lora_kernels(given, split.kind == "fsdp" and _fsdp_version(given) != 2, spec, (micro or 1) * rows),
            *(of_packing("sample_packing", micro or 1, rows) if _masks(given) else ()),
            *_offload_notes(given, offload), *cut, *_kernel_notes(given, split.kind), *notes(given),
            *of_images(given, spec),
            *(of_tables(spec) if _leaves_tables(given, split.kind, precision) else ()),
        ),
    ))  # fmt: skip


def _rows(given: Settings, length: int, answered: bool) -> tuple[int, tuple[str, ...]]:
    """Tokens of a row, and what was taken for what: padding goes up to a multiple of 64, with packed samples unless it is turned
    off.  [core/builders/causal.py; rl, streams and flattened batches have collators of their own]"""
    padded = given.flag("pad_to_sequence_len", given.flag("sample_packing"))
    if answered or not padded or any(given.get(one) for one in ("rl", "pretraining_dataset", "batch_flattening")):
        return length, ()
    multiple = given.size("pad_to_multiple_of", 64)
    rows = multiple * math.ceil(length / multiple)
    return rows, (f"rows of {rows} tokens: sequence_len {length}, padded to a multiple of {multiple}",) * (rows != length)


def _model(given: Settings) -> str:
    """The model by its weights, or by base_model_config, which says what is built, where those have a name of their own."""
    name, built = given.label("base_model"), given.label("base_model_config")
    return built if built and named_model(name, given.path)[0] is None else name


def _double(given: Settings) -> bool:
    return given.get("adapter") != "lora" and given.flag("bnb_config_kwargs.bnb_4bit_use_double_quant", True)


def _fsdp_version(given: Settings) -> int:
    part = given.section("fsdp_config") if isinstance(given.data.get("fsdp_config"), Mapping) else Settings(given.path, {})
    return given.number("fsdp_version") or part.number("fsdp_version") or part.number("version") or 1


def _precision(given: Settings) -> str:
    """bf16 is auto where it is not there at all, and auto gives way to fp16; one that is left empty is off.
    [utils/config, resolve_dtype; utils/schemas/config.py]"""
    if given.flag("fp8"):
        return "fp8"
    half = {one: str(given.get(one)).lower() not in ("none", "false", "auto") for one in ("fp16", "bfloat16", "float16")}
    fp16, said = half["fp16"], given.get("bf16")
    if "bf16" not in given.data or str(said).lower() == "auto":
        said = not fp16
    if said not in (None, False, "false") or half["bfloat16"]:
        return "bf16"
    return "fp16" if fp16 or half["float16"] else "fp32"


def _bits(given: Settings) -> int:
    """Bits of the frozen base, 0 = 16. Raises PlannerError where nothing is frozen, as axolotl does."""
    for name, bits in (("load_in_4bit", 4), ("load_in_8bit", 8), ("gptq", 4)):
        if given.flag(name) and not (name == "load_in_4bit" and not quantises(given)):
            if not given.get("adapter"):
                why = "weights in fewer bits without an adapter, which axolotl does not start"
                raise PlannerError(f"{given.where(name)}: {why}; --set adapter=lora or --set {name}=false")
            return bits
    return 4 if given.get("adapter") == "qlora" else 0


def _offload_notes(given: Settings, offload: bool) -> tuple[str, ...]:
    if not offload or not given.get("adapter") or given.get("activation_offloading") == "hidden_states":
        return ()
    what = "priced with full recompute and the inputs of layers on the host, as axolotl had it until 0.16"
    return (f"activation_offloading: {what}; later versions recompute nothing under adapters and move all that layers save",)


def _targets(given: Settings) -> str:
    named, everything = given.get("lora_target_modules"), given.flag("lora_target_linear")
    return "all" if everything or named is None else adapter_targets(named)


def _parallel(given: Settings, found: Sharding, num_gpus: int | None) -> tuple[Sharding, tuple[str, ...]]:
    """Degrees of axolotl's own keys beside what FSDP or DeepSpeed say, and what was taken for what. Raises PlannerError."""
    tp, ep, replicas = (given.size(f"{name}_size") for name in ("tensor_parallel", "expert_parallel", "dp_replicate"))
    shards = given.number("dp_shard_size")
    cp = given.size("context_parallel_size", given.size("sequence_parallel_degree"))
    fields: dict[str, int] = dict(found.fields)
    if tp > 1:
        fields["tp"] = tp
    if ep > 1:
        fields["ep"] = ep
    notes: tuple[str, ...] = ()
    if cp > 1:
        # ring_attn_func: the gathering kernel of Llama 3 with packed samples, a ring without.  [axolotl, utils/schemas/enums.py]
        usual = "varlen_llama3" if given.flag("sample_packing") else "batch_ring"
        function, over = str(given.get("ring_attn_func") or usual), found.kind == "deepspeed"
        fields |= {"cp": cp, "cp_method": int(CpMethod.A2A if over else CpMethod.ALLGATHER)}
        if over:
            notes = ("context parallelism of ring-flash-attn over DeepSpeed is priced as Ulysses",)
        elif function != "varlen_llama3":
            uneven = "the last ranks have most of causal attention, so time comes out too short"
            why = uneven if function == "batch_ring" else "time comes out slightly too long"
            notes = (f"context parallelism is a ring (ring_attn_func {function[:40]}), priced as gathered keys and values: {why}",)
    gpus = tp * replicas * shards * cp if shards else None
    total = num_gpus or found.num_gpus or gpus
    if found.kind == "fsdp" and total and ep == 1:
        rest = total // (tp * cp)  # what dp_shard_size leaves are replicas, and the other way round  [utils/distributed.py]
        group = shards or max(rest // replicas, 1)
        if group < rest:
            fields["dp_shard"] = group
    return Sharding(**{**vars(found), "fields": fields, "num_gpus": found.num_gpus or gpus}), notes


ATTENTION = {
    "xformers_attention": "xformers", "sage_attention": "sage", "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager",
}  # fmt: skip
"""Switches of before attn_implementation, the first that is on counts.  [utils/schemas/enums.py]"""


def _attention(given: Settings) -> str:
    old = [word for name, word in ATTENTION.items() if given.get(name) not in (None, False, "false")]
    return str(given.get("attn_implementation") or next(iter(old), "")).lower()


def _masks(given: Settings) -> bool:
    """Whether packed samples have a mask of their own: each row one, where flash attention does not take their lengths."""
    return given.flag("sample_packing") and _attention(given) in ("sdpa", "eager")


def _by_itself(given: Settings) -> str:
    """The kernel that transformers takes where none is named: one that keeps scores in memory before 4.36."""
    return "eager" if newer(given.path, "transformers", (4, 36)) is False else "sdpa"


def _leaves_tables(given: Settings, kind: str, precision: str) -> bool:
    """Whether embedding, head and norms stay in fp32, to which axolotl brings them, where DeepSpeed casts all."""
    whole = not given.get("adapter") and kind == "ddp" and precision in ("bf16", "fp8")
    return whole and _attention(given) in ("", "sdpa", "eager") and not has_plugin(given, "cut_cross_entropy")


def _kernel_notes(given: Settings, kind: str) -> tuple[str, ...]:
    """Kernels that the trainer of the plan has no word for."""
    kernel, found = _attention(given), []
    if not kernel:
        sdpa = _by_itself(given) == "sdpa"
        best = "transformers (4.36 and later) uses sdpa where the model supports it; with eager, attention scores are kept"
        what = f"{best} and memory comes out too low" if sdpa else "transformers before 4.36 uses eager"
        found.append(f"no attention kernel is named: {what}")
    if kernel and kernel not in KERNELS:
        found.append(f"attention by {kernel[:60]} is priced as flash attention")
    if kind == "deepspeed" and given.get("torch_compile") in (True, "true", "auto"):
        found.append("torch_compile is not priced over DeepSpeed: time comes out too long")
    return tuple(found)


def _options(given: Settings) -> dict[str, str]:
    """Options of the trainer that the file sets."""
    options = {"adapter_dropout": "on"} if given.above_zero("lora_dropout", 0.0) else {}
    liger = given.flag("liger_fused_linear_cross_entropy") and has_plugin(given, "liger")
    fused = liger or (given.flag("cut_cross_entropy", True) and has_plugin(given, "cut_cross_entropy"))
    if fused and not given.get("rl"):  # DPO reads the logits
        options["loss"] = "fused_linear"
    kernel = _attention(given) or _by_itself(given)
    if kernel in KERNELS:
        options["attention_kernel"] = KERNELS[kernel]
    if given.get("torch_compile") in (True, "true", "auto"):
        options["compile"] = "on"
    return options
