"""ms-swift: commands (swift sft, megatron sft, ...) in scripts, and their YAML."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from planner.errors import PlannerError, shown
from planner.layout import CpMethod
from planner.model_names import preset_of
from planner.trainers.ms_swift.earlier_adapters import goes_on
from planner.trainers.ms_swift.megatron_commands import parse_megatron
from planner.trainers.ms_swift.megatron_words import of_a_fork
from planner.trainers.reading import fine_tuning
from planner.trainers.reading.accelerate_file import said_or_asked
from planner.trainers.reading.commands import launched, with_files
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.fine_tuning import FineTuning, adapter_targets, optimizer, quantised
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.kernels import KERNELS, other_attention
from planner.trainers.reading.layer_names import listed
from planner.trainers.reading.settings import Settings, beside, file_settings, rooted
from planner.trainers.reading.sharding import Sharding
from planner.trainers.reading.shell.text import shown_text
from planner.trainers.reading.values import read_text
from planner.trainers.reading.versions import newer

QUIET = re.compile(
    rf"{fine_tuning.QUIET.pattern}|max_length|packing\w*|custom_register_path|padding_free|gradient_checkpointing_kwargs.*|vit_\w+|aligner_lr|freeze_vit"
    r"|freeze_aligner|torch_dtype|model_type|use_hf|add_version|create_checkpoint_symlink|bnb_4bit_\w+|quant_method|lora_dtype|agent_template|loss_scale"
    r"|attn_impl|lazy_tokenize|label_smoothing|beta|rpo_alpha|sft_alpha|loss_type|max_pixels|loss_weights|new_special_tokens|check_model"
    r"|deepspeed_autotp_size|use_chat_template|response_prefix|enable_thinking|add_non_thinking_prefix|router_aux_loss_coef|max_epochs"
    r"|external_plugins|callbacks|use_logits_to_keep|modules_to_save.*|enable_dft_loss|rope_scaling|norm_bbox|ignore_data_skip|task_type"
    r"|train_dataloader_shuffle|cached_\w+|write_batch_size|model_kwargs|init_weights|metric|acc_strategy|optim_args|merge_lora"
    r"|ddp_backend|accelerator_config.*"
)
PROGRAM = (
    r"(?:\S*/)?(?:swift|megatron)|\S*swift/cli/(?:_megatron/)?(?:sft|rlhf|pt)(?:\.py)?|\S*\bllm_(?:sft|pt|dpo|rlhf)\.py"
    r"|swift\.cli\.(?:_megatron\.)?(?:sft|rlhf|pt)|\S*swift/cli/(?:_megatron/)?main\.py|swift\.cli\.(?:_megatron\.)?main"
)
OBJECTIVES = {"dpo": "dpo"}
MODES = ("sft", "pt", "rlhf", "dpo")
MEGATRON = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "context_parallel_size",
    "micro_batch_size", "global_batch_size", "recompute_granularity",
)  # fmt: skip
"""Arguments of megatron sft alone."""


def read(path: Path, said: Given) -> Reading:
    """The job of a file. Raises PlannerError."""
    if path.suffix in (".yaml", ".yml", ".json"):
        given = Settings(path, said.filled(file_settings(path, "arguments of ms-swift")), said=said)
        mode, gpus = "rlhf" if given.get("rlhf_type") else "sft", said.num_gpus or _of_env(given)
        over_megatron = any(one in given.data for one in MEGATRON)
        return parse_megatron(given, mode, gpus) if over_megatron else parse(given, mode, gpus)
    own = re.search(r"swift[./]cli|\bllm_(sft|pt|dpo|rlhf)\.py", text := read_text(path)) is not None
    found = launched(path, said, PROGRAM, "" if own else "|".join(MODES))
    by_name = re.sub(r"\.py$", "", found.program).rpartition("/")[2].rpartition(".")[2].removeprefix("llm_")
    mode = next((word for word in found.words if word in MODES), by_name).replace("dpo", "rlhf")  # of its own until 2.1
    given = with_files(path, found, said)
    gpus = said.num_gpus or _of_env(given) or (None if _nodes_are_elsewhere(text, said) else found.num_gpus)
    if "megatron" in found.program:
        return parse_megatron(given, mode, gpus)
    stated = said.num_gpus or (found.sharding or Sharding()).num_gpus
    if (found.visible or 1) > (found.num_gpus or 1) and stated is None:
        raise PlannerError(
            f"{path}: {found.num_gpus or 1} processes see {found.visible} GPUs: layers spread over GPUs by device_map are not "
            "modelled; set NPROC_PER_NODE, or say --gpus N where every GPU has a process"
        )
    reading = parse(given, mode, gpus, found.sharding)
    alone = (ALONE,) if found.num_gpus is None and (gpus or 1) > 1 and LAUNCHED.search(text) is None else ()
    return dataclasses.replace(reading, notes=(*reading.notes, *found.notes, *alone, *_of_its_environment(text)))


LAUNCHED = re.compile(r"NPROC_PER_NODE|torchrun|\b(deepspeed|accelerate)\s|distributed[./](run|launch)")
ALONE = "NPROC_PER_NODE is not said: a process for each GPU, as it starts them; without it one process spreads its layers over all"


def _of_its_environment(text: str) -> tuple[str, ...]:
    """Note about variables that are about adapters and that a script gives its command alone: a fork reads them."""
    found = re.findall(r"^(?:export )?[ \t]*((?:PEFT|LORA|ADAPTER)_[A-Z_]+)=[\"']?([\w.-]+)", text, re.MULTILINE)
    used = {*re.findall(r"\$\{?(\w+)", text), *re.findall(r"\w+", " ".join(re.findall(r"\$\(\(([^)\n]{0,200})", text)))}
    own = dict.fromkeys(f"{name}={value}" for name, value in found if name not in used)
    what = "no variable of ms-swift, so one of a fork: what it makes of the adapters is not in the plan"
    return tuple(f"{shown(one)}: {what}" for one in list(own)[:4])


def _of_env(given: Settings) -> int | None:
    """GPUs by the section ENV of a file, which becomes the environment.  [swift/cli/main.py]"""
    part = given.section("ENV")
    for one in part.data:
        part.get(one)
    each = part.number("NPROC_PER_NODE")
    return each * part.size("NNODES") if each else None


def _nodes_are_elsewhere(text: str, said: Given) -> bool:
    """Whether a script names its nodes, or its own place among them, without a value: then it is not one of a single node."""
    if "NNODES" in said.settings or re.search(r"\bNNODES=|\bnnodes\b", text):
        return False
    return re.search(r"\$\{?(NNODES|NODE_RANK)\}?(?!\w|:)", text) is not None


def parse(given: Settings, mode: str, num_gpus: int | None = None, sharding: Sharding | None = None) -> Reading:
    """The job that arguments over transformers describe. Raises PlannerError."""
    old = _of_version_2(given)
    whole = old and mode == "pt"  # [swift 2, llm/utils/argument.py: PtArguments]
    tuner = str(given.first("tuner_type", "train_type", "sft_type", default="full" if whole else "lora"))
    if tuner not in ("lora", "full"):
        raise PlannerError(f"{given.where('tuner_type')} is {shown(tuner)}, which is not modelled; lora and full are")
    _require_modelled(given, mode)
    objective = given.choice("rlhf_type", OBJECTIVES, "dpo") if mode == "rlhf" else "lm"
    dtype, published = _dtype(given, old)
    precision, dtype = _precision(given, dtype, old, tuner)
    found, optim = _sharding(given, sharding), _optimizer(given)
    micro = given.number("per_device_train_batch_size") or given.size("batch_size")
    steps, gpus = given.number("gradient_accumulation_steps"), num_gpus or found.num_gpus
    if steps is None and gpus:  # by all processes, whatever splits a sequence  [swift/trainers/arguments.py]
        steps = max(1, -(-16 // (micro * gpus)))
    targets, noted = _targets(given, old and tuner == "lora" and not whole)
    options, of_liger = _options(given, mode)
    noted += (*published, *_of_plugins(given), *other_attention(given.get("attn_impl")), *of_liger)
    noted += _of_prompts(given, mode, old, "loss" in options)
    length = given.number("packing_length") if given.flag("packing") else None
    cut = None if str(given.get("max_length")) == "-1" else given.number("max_length", 2048 if old else None)
    job = fine_tuning.reading(FineTuning(
        given=given, trainer="ms-swift", model=_model(given, old),
        micro_batch_size=micro, accumulation=steps, batch=16,
        sequence_length=length or cut,
        precision=precision, half_weights=dtype != "float32",
        optimizer=optim,
        recompute=given.flag("gradient_checkpointing", True), lora_rank=_rank(given) if tuner == "lora" else 0,
        lora_targets=targets, frozen_weights=_frozen(given, dtype, tuner),
        objective=objective, num_gpus=num_gpus, sharding=found, options=options, quiet=QUIET, notes=noted,
    ))  # fmt: skip
    switches = [one for one in of_a_fork(given, QUIET) if one.choices == ("false",) and not fine_tuning.DECIDES.fullmatch(one.name)]
    return dataclasses.replace(job, questions=(*job.questions, *(one for one in switches if one not in job.questions)))


IN_FP32 = re.compile(r"(^|/)(gemma-2-\d+b|tinyllama-1\.1b-intermediate-\S*)$", re.IGNORECASE)
"""Models whose published config.json names float32."""
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "AUTO": "bfloat16"}


def _dtype(given: Settings, old: bool) -> tuple[str, tuple[str, ...]]:
    """(What weights are loaded in, what was taken for what): since 3 it is that of config.json where nothing is said.
    [base_args/model_args.py, _init_torch_dtype; model/model_meta.py]"""
    said = given.first("torch_dtype", "dtype")  # the second until swift 2
    name = given.label("model") if said is None and not old else ""
    file = beside(given.path, f"{name}/config.json") if name else None
    inside = file_settings(file, "a model") if file is not None else {}
    found = str(inside.get("dtype") or inside.get("torch_dtype") or ("float32" if IN_FP32.search(name) else ""))
    if found in ("float16", "float32"):
        return found, (f"torch_dtype is not said: {found}, as config.json of {shown(name)} has it",)
    return SHORT.get(str(said), str(said or "bfloat16")), ()


def _precision(given: Settings, dtype: str, old: bool, tuner: str) -> tuple[str, str]:
    """(precision, dtype of the weights): since 3 weights in fp32 are trained under autocast in fp16 where nothing says otherwise; 2
    takes fp32 weights under it where all are trained.  [base_args/model_args.py, _init_mixed_precision; 2: select_dtype]"""
    half = dtype == "float16" or given.flag("fp16") or (dtype == "float32" and not old and given.get("fp16") is None)
    if half and not given.flag("bf16"):
        return "fp16", "float32" if old and tuner == "full" else dtype
    return "fp32" if dtype == "float32" and not given.flag("bf16") else "bf16", dtype


SECOND = ("sft_type", "model_id_or_path", "quantization_bit", "lora_target_modules", "lora_dropout_p", "check_dataset_strategy")
"""Words of swift 1 and 2 that 3 does not have."""
NOT_MODELLED = (
    "use_galore", "use_dora", "freeze_llm", "freeze_parameters_ratio", "lisa_activated_layers", "trainable_parameters",
    "trainable_parameters_regex", "trainable_modules", "additional_trainable_parameters",
)  # fmt: skip
OWN_OPTIMIZERS = ("adamw", "lorap", "multimodal", "default")
"""Words of ``optimizer`` that only set rates of learning apart."""


def _require_modelled(given: Settings, mode: str) -> None:
    """Raises PlannerError, or asks, for what no plan has."""
    for name in NOT_MODELLED:
        if given.get(name) not in (None, False, 0, 0.0, []):
            raise PlannerError(f"{given.where(name)} is not modelled; a plan trains all weights or adapters on all layers")
    if (task := given.get("task_type")) in ("seq_cls", "embedding", "reranker", "generative_reranker"):
        raise PlannerError(f"{given.where('task_type')}: a step without a loss over the vocabulary is not modelled")
    if task not in (None, "causal_lm"):
        about = f"{shown(task)} is none of ms-swift, so of a fork, which may hold more; causal_lm imports it as plain training"
        given.ask(Question(name="task_type", about=about, choices=("causal_lm",)))
    if given.size("zero_hpz_partition_size") > 1:
        raise PlannerError(f"{given.where('zero_hpz_partition_size')}: hierarchical partitions of weights are not modelled")
    if given.get("train_backend") == "megatron":
        raise PlannerError(f"{given.where('train_backend')} is megatron: of swift 2, which is not read; --set train_backend=null")
    asked = [(one, "layers with adapters by a pattern; null = all linear layers") for one in ("target_regex", "lora_target_regex")]
    if given.get("tuner_backend") == "unsloth":
        asked.append(("tuner_backend", "unsloth keeps other activations than peft, which imports the job"))
    if given.flag("use_tiled_mlp"):
        asked.append(("use_tiled_mlp", "MLPs that are computed and recomputed in pieces are not modelled"))
    asked += [(one, "no reference model is not modelled; false imports the job with it")
              for one in ("reference_free", "ref_model_free") if mode == "rlhf" and given.flag(one)]  # fmt: skip
    for name, about in asked:
        if given.get(name) is not None:
            without = {"tuner_backend": "peft", "target_regex": "null", "lora_target_regex": "null"}.get(name, "false")
            given.ask(Question(name=name, about=about, choices=(without,)))


KEEPS = (3, 5)
"""Version since which the scores of prompts are left out.  [swift/trainers/mixin.py: get_use_logits_to_keep]"""
PROMPTS = (
    "scores are priced for all tokens; since 3.5 ms-swift takes those of answers alone (use_logits_to_keep), or from the first "
    "answer of a batch on, where the model can: memory comes out too high where prompts are long"
)


def _of_prompts(given: Settings, mode: str, old: bool, fused: bool) -> tuple[str, ...]:
    """Note about scores of tokens that no loss is taken of; in pretraining there are none, and fused losses keep no scores."""
    said = given.get("use_logits_to_keep")
    split = (given.number("sequence_parallel_size") or 1) > 1 or given.get("loss_scale") == "all"
    new = not old and newer(given.path, "ms-swift", KEEPS) is not False
    leaves = new and not split if said is None else said in (True, "true")
    return (PROMPTS,) if leaves and mode in ("sft", "rlhf") and not fused else ()


def _of_version_2(given: Settings) -> bool:
    """Whether it is swift 1 or 2, with other defaults: by its words, or by the version that the project pins."""
    return any(given.data.get(one) is not None for one in SECOND) or newer(given.path, "ms-swift", (3,)) is False


def _model(given: Settings, old: bool) -> str:
    """What names the model: in swift 1 and 2 its type too, qwen2-0_5b-instruct, where the path says none that is known."""
    named, kind = given.label("model", "model_id_or_path"), given.get("model_type")
    if not old or not isinstance(kind, str) or not re.fullmatch(r"[\w.-]{1,100}", kind) or preset_of(named):
        return named
    if beside(given.path, f"{named}/config.json") is not None:
        return named
    called = re.sub(r"(?<=\d)_(?=\d)", ".", kind).replace("1half", "1.5")
    return called if preset_of(called) or not named else named


def _rank(given: Settings) -> int:
    """Rank of the adapters: that of those it goes on with where it is not said."""
    goes_on(given, "adapters")
    return given.size("lora_rank", 8)


def _targets(given: Settings, old: bool) -> tuple[str, tuple[str, ...]]:
    """Layers with adapters; swift 1 and 2 take those of queries, keys and values by default.  [swift/llm/utils/model.py, LoRATM]"""
    named = given.first("target_modules", "lora_target_modules", default="DEFAULT" if old else "all-linear")
    words = named if isinstance(named, list) else str(named).replace(",", " ").split()
    if words == ["DEFAULT"]:
        return "qkv", ("adapters on q, k, v: the DEFAULT of swift before 3",)
    return adapter_targets(named if words != ["ALL"] else "all-linear"), ()


PLUGINS = ("external_plugins", "custom_register_path")
REGISTERS = re.compile(r"\b(register_model|ModelMeta)\(|TRAINER_MAPPING|\b(loss|optimizers?)_map(ping)?\b|\w*Trainer\b|patch_\w+\(")
"""What in a plugin changes more than the data: models, trainers, losses, optimizers."""


def _of_plugins(given: Settings) -> tuple[str, ...]:
    """Note about code of a project that swift loads before it trains, unless it is there and registers data alone."""
    named = {name: str(one) for name in PLUGINS for one in listed(given.data.get(name) or "") if one}
    files = {name: beside(given.path, rooted(one), (".py",)) for name, one in named.items()}
    own = [name for name, file in files.items() if file is None or REGISTERS.search(read_text(file))]
    what = "code of a project that swift loads, which is not read: a model, loss or optimizer that it registers is not in the plan"
    return tuple(f"{name} {shown(shown_text(named[name]))}: {what}" for name in own)


EIGHT = ("fp8", "eetq", "hqq")
"""Methods that are of 8 bits where none are said; the last two in swift 2."""


def _frozen(given: Settings, dtype: str, tuner: str) -> str:
    """Dtype of the base under adapters. Raises PlannerError for fewer bits than a plan has, or for quantised weights that train."""
    name = "quant_bits" if given.get("quant_bits") is not None else "quantization_bit"
    bits = given.number(name, 0, 0, 8) or (8 if given.get("quant_method") in EIGHT else 0)
    if bits and (bits not in (4, 8) or tuner == "full"):
        why = "weights in bits are not trained without adapters" if bits in (4, 8) else "a plan knows 4 and 8"
        raise PlannerError(f"{given.where(name)} is {bits}: {why}; --set {name}=null imports the job without")
    double = given.flag("bnb_4bit_use_double_quant", True) and given.get("quant_method", "bnb") == "bnb"
    return quantised(bits, double) if bits else "fp32" if dtype == "float32" else "bf16"


def _optimizer(given: Settings) -> str:
    own = given.get("optimizer")
    if own == "muon":
        return "muon"
    if own is not None and own not in OWN_OPTIMIZERS:
        about = f"{shown(str(own))} is a plugin; null = that of optim"
        given.ask(Question(name="optimizer", about=about, choices=("null", "muon")))
    return optimizer(given, given.get("optim", "adamw_torch_fused"), "optim")


def _sharding(given: Settings, sharding: Sharding | None) -> Sharding:
    """DeepSpeed by swift's words, FSDP, tensor and sequence parallelism."""
    if given.get("fsdp") == "fsdp2":
        found = Sharding(kind="fsdp", fields={"zero": 3, "recompute": 2})  # swift/config/fsdp2.json
    else:
        found, _ = said_or_asked(_with_its_file(given), sharding, launched=True)
    fields = dict(found.fields)
    if (tp := given.size("deepspeed_autotp_size")) > 1:
        fields["tp"] = tp
    if (sp := given.size("sequence_parallel_size")) > 1:
        fields |= {"cp": sp, "cp_method": int(CpMethod.A2A)}
    return dataclasses.replace(found, fields=fields)


def _with_its_file(given: Settings) -> Settings:
    """The settings where ``fsdp`` is or names a mapping of both fsdp and fsdp_config.  [swift/arguments/sft_args.py, _init_fsdp]"""
    name = given.data.get("fsdp")
    if isinstance(name, Mapping):
        inside = name
    elif not str(name).endswith(".json"):
        return given
    elif (file := beside(given.path, str(name))) is None:
        raise PlannerError(f"{given.where('fsdp')} names {shown(name)}, which is not beside it; put the file there")
    else:
        inside = file_settings(file, "settings of FSDP")
    given.asked.add("fsdp")
    return Settings(given.path, {**given.data, **inside}, given.place, given.asked, given.said)


OWN_LOSS = ("loss_type", "loss_name", "enable_dft_loss", "enable_channel_loss")
SCALES = {"", "default", "last_round", "all", "ignore_empty_think", "ignore_think_prefix"}
"""Words of ``loss_scale`` that only choose labels."""


def _own_loss(given: Settings, mode: str) -> str:
    """What takes the labels from the model, so that Liger's loss does nothing; "" = nothing.  [trainers/seq2seq_trainer.py,
    compute_loss; rlhf_trainers/dpo_trainer.py, concatenated_forward]"""
    if mode == "rlhf":
        return "DPO"
    found = [one for one in OWN_LOSS if given.get(one) not in (None, False, "false", "False")]
    found += ["label_smoothing_factor"] * given.above_zero("label_smoothing_factor")
    found += ["loss_scale"] * (not SCALES.issuperset(str(given.get("loss_scale") or "").split("+")))
    found += ["sequence_parallel_size"] * ((given.number("sequence_parallel_size") or 1) > 1)
    return found[0] if found else ""


def _options(given: Settings, mode: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """(Options of the trainer that the arguments set, what was taken for what)."""
    notes: tuple[str, ...] = ()
    options = {"adapter_dropout": "on"} if given.above_zero("lora_dropout", 0.05) else {}
    kernel = str(given.get("attn_impl", "")).lower().replace("flash_attention_2", "flash_attn")
    if not kernel and given.get("use_flash_attn") is not None:  # of swift 1 and 2: the other one is eager attention since 2.2
        lean = given.flag("use_flash_attn")
        kernel = "flash_attn" if lean else "eager" if newer(given.path, "ms-swift", (2, 2)) is not False else ""
    if kernel in KERNELS:
        options["attention_kernel"] = KERNELS[kernel]
    if given.flag("use_liger_kernel") or given.flag("use_liger"):
        if own := _own_loss(given, mode):
            notes = (f"use_liger_kernel: with {own} ms-swift computes the loss of all scores itself, which are kept",)
        else:
            options["loss"] = "fused_linear"
    experts = str(given.get("experts_impl", ""))
    return {**options, **({"experts": "loop"} if experts == "eager" else {})}, notes
