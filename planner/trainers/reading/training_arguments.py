"""Arguments of transformers' Trainer and of the trainers of TRL, as their scripts take them: in YAML or as options."""

import dataclasses
import re
from typing import Any

from planner.errors import PlannerError, shown
from planner.record import record
from planner.trainers.reading import fine_tuning, new_models
from planner.trainers.reading.accelerate_file import said_or_asked, unread_precision
from planner.trainers.reading.argument_words import (
    length_of,
    loss_of,
    notes_of,
    of_outputs,
    of_pairs,
    options_of,
    prepared,
    spelled,
)
from planner.trainers.reading.base_weights import PREPARES
from planner.trainers.reading.by_release import dtype_of_load, fill_in, in_half, upcasts
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.fine_tuning import (
    LIKE_IT,
    OPTIMIZERS,
    FineTuning,
    adapter_targets,
    optimizer,
    quantised,
)
from planner.trainers.reading.given import Question, value_of
from planner.trainers.reading.settings import SWITCHED, Settings
from planner.trainers.reading.sharding import Sharding, casts_all
from planner.trainers.reading.shell.text import is_open
from planner.trainers.reading.steps import objective_of
from planner.trainers.reading.versions import newer

QUIET = re.compile(
    rf"{fine_tuning.QUIET.pattern}|assistant_only_loss|completion_only_loss|packing\w*|padding_free|beta|loss_type|max_prompt_length"
    r"|max_completion_length|precompute_ref\w*|loss_weights.*|label_smoothing|gradient_checkpointing_kwargs.*|bnb_4bit_\w+|use_cpu"
    r"|pad_\w+|text_column|eos_token|attn_implementation|pack_\w+|rpo_alpha|lora_task_type|lora_modules_to_save.*|ref_\w+|sync_ref_model"
    r"|decontaminate|use_logits_to_keep|bos_token|is_decoder|config|token|auto_insert_empty_system_msg|preprocessing_num_workers"
    r"|fsdp_transformer_layer_cls_to_wrap|aux_loss_enabled|router_aux_loss_coef|use_auth_token|project|dataset_mixer.*|instruct_\w+"
)
@record
class Habits:
    """What a script does where its arguments say nothing."""

    trainer: str
    bf16: bool
    recompute: bool
    length: int | None
    """None = asked for."""
    own: bool = False
    """A program of somebody's own, which loads and adapts its model as it likes."""


TRL_CHECKPOINTS = (0, 20)
"""Version of TRL that checkpoints by itself."""
TRL = Habits(trainer="trl", bf16=True, recompute=True, length=1024)
"""[trl/trainer/base_config.py, sft_config.py]"""
FROZEN = ("tune_mm_mlp_adapter", "freeze_backbone", "freeze_llm", "freeze_language_model", "freeze_model")
"""Switches of programs that keep the language model as it is."""
OWN_OPTIMIZER = re.compile(r"(?:own_|my_)?optim(?:izer)?(?:_?(?:type|name|class))?|opt_type")
"""What programs call the optimizer that they make themselves, whatever optim of transformers says."""
QUANTISED = ("q_lora", "use_qlora", "qlora", "enable_qlora")
SWITCHES = ("use_peft", "use_lora", "lora_enable", "use_peft_lora", *QUANTISED)
"""What programs call the switch of adapters, and of adapters of a quantised model."""
OWN_SWITCH = re.compile(
    r"(use_|enable_|with_|is_|do_|train_|apply_|add_)?(lora|peft|adapters?)(_enabled?|_training|_tuning|_finetun\w+)?"
)
"""Words like them."""
MODES = ("train_mode", "finetuning_type", "train_type", "tuner_type", "peft_method", "peft_type", "tuning_type")
"""What programs call the way they train: lora, qlora or full."""
WHOLE = ("full_finetune", "full_finetuning")
BITS = ("bits", "quant_bit", "load_in_kbits", "load_in_bits", "quantization")
DOUBLED = ("use_bnb_nested_quant", "use_nested_quant", "double_quant", "bnb_4bit_use_double_quant")
RANKS = ("lora_r", "lora_rank", "r")
TARGETS = ("lora_target_modules", "lora_target", "target_modules", "lora_modules", "lora_trainable", "trainable")
ALL_LINEAR = ("lora_target_linear", "lora_target_all_linear_layers", "lora_all_linear")
"""Switches for adapters on all linear layers."""
MODELS = (
    "model_name_or_path", "model_name", "model_path", "model_id", "base_model", "pretrained_model_name_or_path", "pretrained_model",
)  # fmt: skip
STEPS = ("gradient_accumulation_steps", "gradient_accumulate_every", "accumulate_grad_batches", "grad_accum_steps")
"""Forward passes per step, as programs call them."""
MICRO = ("micro_train_batch_size", "micro_batch_size")
"""Sequences per forward pass, where a batch of a GPU is several."""
BATCHES = ("per_device_train_batch_size", "per_gpu_train_batch_size", "per_device_batch_size", "train_bsz_per_gpu",
           "batch_size_per_gpu", "batch_size_per_device", "batch_size_training")  # fmt: skip
"""Sequences per GPU and forward pass, as programs call them."""
OF_A_STEP, OF_A_PASS = "train_batch_size", "micro_train_batch_size"
"""Sequences of a step and of a GPU's forward pass: what OpenRLHF and programs after it say, both of them.  [cli/train_sft.py]"""
LENGTHS = ("max_length", "max_seq_length", "model_max_length", "block_size", "max_seq_len", "model_max_len", "seq_length",
           "cutoff_len", "total_max_len", "max_len", "context_length")  # fmt: skip
PAIRS = (
    ("max_source_length", "max_target_length"), ("source_max_len", "target_max_len"), ("max_input_length", "max_output_length"),
    ("max_prompt_seq_len", "max_answer_seq_len"),
)  # fmt: skip
"""Lengths of question and answer, which are one sequence."""
OLD_TRL = Habits(trainer="trl", bf16=False, recompute=False, length=1024)
"""With TrainingArguments, or before 0.20: SFTTrainer takes the defaults of transformers, and cuts at max_seq_length."""
UNSLOTH = Habits(trainer="unsloth", bf16=True, recompute=False, length=2048)
TRANSFORMERS = Habits(trainer="fsdp", bf16=False, recompute=False, length=None, own=True)
"""[transformers/training_args.py]"""
HABITS = {"trl": TRL, "old trl": OLD_TRL, "transformers": TRANSFORMERS, "unsloth": UNSLOTH}
"""By what a program is."""


def parse(
    given: Settings, habits: Habits, num_gpus: int | None = None, sharding: Sharding | None = None, script: str = "",
    notes: tuple[str, ...] = (),
) -> Reading:
    """The job that arguments describe; ``sharding`` and ``script`` of the launcher. Raises PlannerError."""
    if given.said is not None and (answer := given.said.setting("gradient_checkpointing")) is not None:
        given.data = {**given.data, "gradient_checkpointing": answer == "unsloth" or value_of(answer)}
    if made := new_models.put_apart(given):
        habits, notes = TRANSFORMERS, (*notes, *made)
    fill_in(given, given.label(*MODELS))
    given.data = spelled(given.data)
    objective = objective_of(given, script)
    habits, dated = _dated(given, habits, sharding)
    for name in FROZEN:
        if given.flag(name):
            raise PlannerError(
                f"{given.path}: {name} trains a part of the model, which is not priced; --set {name}=false imports the job with "
                "all of it"
            )
    adapters, bits = _adapters(given), _bits(given)
    doubled = any(_switches(given, *DOUBLED))
    checkpoints = _switches(given, "gradient_checkpointing", "use_gradient_checkpointing")
    recompute = any(checkpoints) if checkpoints else habits.recompute
    own_loop = given.usual.get("shards_itself") is True
    found, asked = said_or_asked(given, sharding, launched=(bool(script) and not own_loop) or num_gpus == 1)
    mixed = _precision(given, habits, False, found)
    undated = dtype_of_load(given, script, found, mixed, adapters) if not bits else ()
    whole = adapters and not bits and given.flag(PREPARES[0])  # PEFT casts all that nothing quantises
    half = not whole and in_half(_dtype(given), given.label(*MODELS))
    micro, pieces = _micro(given)
    alone, paired = of_pairs(given, adapters) if objective == "dpo" else (False, ())  # both sequences of a pair in one pass
    step = given.number(OF_A_STEP) if says_both(given) else None
    precision = _precision(given, habits, half and not (bits and prepared(given, found, habits is OLD_TRL)), found)
    engine = casts_all(found, precision)
    usual = "full" if found.kind == "deepspeed" else "chunked"
    loss, noted = loss_of(given, objective, not habits.recompute, usual) if habits.trainer == "trl" else ("", ())
    wide = habits.trainer == "trl" and found.kind != "deepspeed" and (mixed != "fp32" or precision == "fp32")
    options = of_outputs(given, found.kind == "deepspeed", mixed != "fp32") | options_of(given, objective, micro, wide)
    options |= ({"compile": "on"} if found.compiled else {}) | ({"loss": loss} if loss else {})
    return fine_tuning.reading(FineTuning(
        given=given, trainer=habits.trainer, model=given.label(*MODELS, *(("pretrain",) if step else ())),
        micro_batch_size=2 * micro if alone else micro, batch=step,
        accumulation=None if step else pieces * _steps(given, found),
        sequence_length=length_of(given, objective, _length(given), habits.length),
        precision=precision, half_weights=half, recompute=recompute, offload_activations=given.flag("activation_offloading"),
        optimizer=optimizer(given, given.get("optim", "adamw_torch_fused", choices=LIKE_IT), "optim"),
        lora_rank=next((rank for one in RANKS if (rank := given.number(one, least=0))), 16) if adapters else 0,
        # Without names PEFT takes query and value for most architectures.  [peft, utils/constants.py]
        lora_targets=adapter_targets(_targets(given) or ["q_proj", "v_proj"]),
        frozen_weights=quantised(bits, doubled) if bits else "bf16" if half or engine else "fp32",
        objective="lm" if alone else objective, sharding=found, num_gpus=num_gpus, options=options, quiet=QUIET,
        upcasts=upcasts(given, mixed != "fp32"),
        questions=(
            *asked, *given.late, *dated, *undated, *_own_precision(given),
            *(one for one in _about_adapters(given, script, adapters, habits)
              if one.name != "torch_dtype" or not (engine or undated or whole)),
            *_own_bits(given, bits), *_own_batch(given), *unread_precision(given, habits.bf16), *_own_optimizer(given),
        ),
        notes=(*notes, *paired, *noted, *notes_of(given, objective, adapters, precision, half or found.kind == "deepspeed")),
    ))  # fmt: skip


def _dated(given: Settings, habits: Habits, sharding: Sharding | None) -> tuple[Habits, tuple[Question, ...]]:
    """(Habits of the version of TRL that the project pins, what is asked where it pins none): SFTConfig and DPOConfig checkpoint
    and compute in bf16 by themselves since 0.20.  [trl/trainer/base_config.py, release notes of 0.20]"""
    if dataclasses.replace(habits, own=False) != TRL:
        return habits, ()
    checkpoints = any(given.get(one) is not None for one in ("gradient_checkpointing", "use_gradient_checkpointing"))
    unsaid = [] if checkpoints else ["gradient_checkpointing"]
    launched = _own_word(given) or (sharding.precision if sharding else None)
    if launched not in ("bf16", "fp16") and given.get("bf16") is None and given.get("fp16") is None:
        unsaid.append("bf16")
    new = newer(given.path, "trl", TRL_CHECKPOINTS) if unsaid else True
    if new is None:
        about = "its default differs by version"
        return habits, tuple(Question(name=one, about=about, choices=("true", "false")) for one in unsaid)
    return (habits if new else dataclasses.replace(habits, bf16=False, recompute=False)), ()


def says_both(given: Settings) -> bool:
    """Whether the batch of a step and that of a forward pass are said, and no batch of a GPU."""
    own = any(given.data.get(one) is not None for one in (*BATCHES, *STEPS))
    return not own and all(given.data.get(one) is not None for one in (OF_A_STEP, OF_A_PASS))


def _micro(given: Settings) -> tuple[int, int]:
    """(sequences per forward pass, forward passes of what programs call the batch of a GPU)."""
    if says_both(given):
        return given.size(OF_A_PASS), 1
    whole = given.size(next((one for one in BATCHES if given.get(one) is not None), BATCHES[0]), 8)
    name = next((one for one in MICRO if given.get(one) is not None), None)
    micro = given.size(name, whole) if name else whole
    return (micro, whole // micro) if micro < whole and whole % micro == 0 else (whole, 1)


def _steps(given: Settings, sharding: Sharding) -> int:
    """Forward passes per step; Megatron of accelerate has its own number of them, whatever else is said, and so has DeepSpeed in a
    loop of the program's own.  [accelerate, utils/dataclasses.py: MegatronLMPlugin; accelerator.py: _prepare_deepspeed]"""
    said = given.size(next((one for one in STEPS if given.get(one) is not None), STEPS[0]), 1)
    counts = sharding.kind == "megatron" or (sharding.kind == "deepspeed" and given.usual.get("own_loop"))
    return sharding.accumulation or said if counts else said


def _precision(given: Settings, habits: Habits, half: bool, sharding: Sharding | None) -> str:
    """Of the computation; what the launcher says counts where the arguments say nothing.  [transformers, training_args.py]"""
    if (own := _own_word(given)) is not None and given.get("bf16") is None and given.get("fp16") is None:
        return "fp32" if own == "no" else own
    if given.flag("fp16") or (given.get("zero_stage") is not None and _dtype(given) in ("fp16", "float16")):
        return "fp16"
    if half and not given.flag("bf16", habits.bf16):
        return "fp16" if _dtype(given) in ("fp16", "float16") else "bf16"
    if given.flag("bf16", habits.bf16):
        return "bf16"
    launched = sharding.precision if sharding else None  # no false of the arguments takes it back
    return launched if launched in ("bf16", "fp16", "fp8") else "fp32"


def _own_word(given: Settings) -> str | None:
    """The precision as accelerate calls it, among the settings of a program: bf16, fp16 or no; None = it does not say it."""
    word = str(given.get("mixed_precision", "")).lower()
    return word if word in ("bf16", "fp16", "no") else None


def _switches(given: Settings, *names: str) -> list[bool]:
    """What those of some switches say that are there."""
    return [given.flag(name) for name in names if given.get(name, choices=SWITCHED) is not None]


def _adapters(given: Settings) -> bool:
    """Whether adapters are trained: by a switch, by that of full fine-tuning, or because a rank is said."""
    if any(given.data.get(name) in (0, "0") for name in RANKS):  # PEFT takes none: its program makes none then
        return False
    own = [one for one in given.data if OWN_SWITCH.fullmatch(one) and str(given.data[one]).lower() in ("true", "false")]
    mode = str(given.first(*MODES, default="")).lower()
    switches = [one for one in (*SWITCHES, *own) if not (mode and one in QUANTISED and not given.flag(one))]
    if said := _switches(given, *switches):  # adapters that are not quantised are adapters still
        return any(said)
    if mode not in ("", "lora", "qlora", "full"):
        raise PlannerError(f"{given.path}: {mode} is not modelled; lora, qlora and full are")
    if mode:
        return mode.endswith("lora")
    if (whole := next((name for name in WHOLE if given.get(name) is not None), None)) is not None:
        return not given.flag(whole)
    return any(given.data.get(name) is not None for name in RANKS)


def _own_precision(given: Settings) -> tuple[Question, ...]:
    """Of a program that writes its configuration of DeepSpeed itself, where its arguments do not say it."""
    said = any(given.get(one) is not None for one in ("fp16", "bf16", "dtype", "torch_dtype"))
    if not said and given.usual.get("shards_itself") is True:
        about = "whether its own loop computes in bf16; or say --set fp16=true"
        return (Question(name="bf16", about=about, choices=("true", "false")),)
    own = "zero_stage" in {*given.data, *given.usual} or given.data.get("deepspeed") is True
    if said or not own or given.get("deepspeed") not in (None, True):
        return ()
    about = "whether its own configuration of DeepSpeed computes in fp16; or say --set bf16=true"
    return (Question(name="fp16", about=about, choices=("true", "false")),)


def _own_batch(given: Settings) -> tuple[Question, ...]:
    """Batch and accumulation of a program that has words of its own for them."""
    asked = []
    for names, others, word in ((BATCHES, MICRO, "batch_?size|bsz"), (STEPS, (), "accum")):
        own = [one for one in given.data if re.search(word, one) and not re.search("eval|val|test|dev|infer|gen|data|map", one)]
        if own and own[0] not in given.asked and all(given.data.get(one) is None for one in (*names, *others)):
            asked.append(Question(name=names[0], about=f"its program calls something {own[0]}"))
    return tuple(asked)


def _own_optimizer(given: Settings) -> tuple[Question, ...]:
    """The optimizer of a program that has a word of its own for it, where that is none of Adam's."""
    own = [one for one in given.data if OWN_OPTIMIZER.fullmatch(one) and one != "optim" and isinstance(given.data[one], str)]
    if not own or given.data.get("optim") is not None or (known := OPTIMIZERS.get(given.data[own[0]].lower())) == "adam":
        return ()
    about = f"its program calls something {own[0]}, which is {shown(given.data[own[0]])}; one whose states are like it"
    return (Question(name="optim", about=about, choices=(given.data[own[0]],) if known else LIKE_IT),)


def _about_adapters(given: Settings, script: str, adapters: bool, habits: Habits) -> tuple[Question, ...]:
    """What a program of its own decides about adapters."""
    own = any(given.data.get(one) is not None for one in OWN_WORDS) and given.data.get("use_peft") is None
    if adapters:
        elsewhere = _adapters_elsewhere(given)
        asked = _own_adapters(given, script) if own or elsewhere or habits.own else ()
        return asked if habits.own or habits.trainer != "trl" or _says_adapters(given) else (UNSAID, *asked)
    return _own_switch(given, script)


def _adapters_elsewhere(given: Settings) -> bool:
    """Whether a program itself is read that is given its adapters by another module: it says no rank."""
    return given.path.suffix in (".py", ".ipynb") and all(given.data.get(one) is None for one in RANKS)


UNSAID = Question(name="use_peft", about="TRL makes no adapters of a rank without it", choices=SWITCHED)
"""Asked where a rank is said alone.  [trl/trainer/utils.py, get_peft_config]"""


def _says_adapters(given: Settings) -> bool:
    """Whether something else than a rank says that adapters are trained."""
    return any(given.get(one) is not None for one in (*SWITCHES, *MODES, *WHOLE, *filter(OWN_SWITCH.fullmatch, given.data)))


OWN_WORDS = tuple(one for one in (*SWITCHES, "target_modules") if one != "use_peft")
"""Words of adapters that the scripts of TRL do not have: their program is another, which loads its weights as it likes."""
LOADED = re.compile(r"(\w+_)?(lora|peft|adapters?)(_(model|weights?|name|name_or|ckpt|checkpoint))?(_(path|dir|ckpt|checkpoint))?")
"""Adapters that a program goes on with."""


def _own_switch(given: Settings, script: str) -> tuple[Question, ...]:
    """Whether adapters are trained, where words of a program are about them and none says it."""
    if any(given.get(one) is not None for one in (*SWITCHES, *MODES, *WHOLE)) or "lora_dim" in given.data:  # its own rank
        return ()
    waits = any(is_open(str(given.data.get(one, given.usual.get(one)))) for one in SWITCHES)
    if (script or _adapters_elsewhere(given)) and waits:  # asked already, and what hangs on it
        return _own_adapters(given, script)
    own = [name for one in given.left() if re.search("lora|peft|adapter", name := one.partition(" = ")[0])]
    loaded = [one for one in own if LOADED.fullmatch(one) and not re.search("output|save|merge|export|target", one)]
    own = [one for one in own if not (fine_tuning.QUIET.fullmatch(one) or re.search("dropout|alpha|bias|path|dir|merge|init", one))]
    if not (own or loaded):
        return ()
    switch = Question(name="use_peft", about=f"its program calls something {(own or loaded)[0]}", choices=("true", "false"))
    return (switch,) if own else (switch, *_own_adapters(given, script))  # what it goes on with is nowhere else


def _own_bits(given: Settings, bits: int) -> tuple[Question, ...]:
    """How a program that has a word of its own for bits quantises."""
    if bits != 4 or not any(str(given.data.get(one)) == "4" for one in BITS) or _switches(given, *DOUBLED):
        return ()
    about = "whether its program quantises the scales of its 4 bits too"
    return (Question(name="bnb_4bit_use_double_quant", about=about, choices=("true", "false")),)


def _own_adapters(given: Settings, script: str) -> tuple[Question, ...]:
    """What a program of its own decides about adapters, where its arguments do not say it."""
    program = script.rpartition("/")[2] or "its program"
    about, loads = f"which linear layers {program} adapts", f"the dtype {program} loads frozen weights in"
    targets = Question(name="lora_target_modules", about=about, choices=("all-linear", "q_proj,v_proj"))
    dtype = Question(name="torch_dtype", about=f"{loads}; or say --set load_in_4bit=true", choices=("bfloat16", "float32"))
    rank = Question(name="lora_r", about=f"rank of the adapters of {program}")
    ranks = () if any(given.data.get(one) is not None for one in RANKS) or given.first(*RANKS) is not None else (rank,)
    said = _dtype(given) != "float32" or given.first("dtype", "torch_dtype") is not None
    named = _targets(given) is not None or any(given.data.get(one) is not None for one in TARGETS)  # what is open is asked already
    asked = (() if named else (targets,), () if said or _bits(given) else (dtype,))
    return (*ranks, *asked[0], *asked[1])


def _targets(given: Settings) -> Any:
    """Linear layers with adapters, None = not said."""
    return "all-linear" if any(_switches(given, *ALL_LINEAR)) else given.first(*TARGETS)


def _bits(given: Settings) -> int:
    """Bits of frozen weights that bitsandbytes holds; 0 = it does not."""
    count = next((bits for one in BITS if (bits := re.sub("[-_]?bits?$", "", str(given.get(one, "")))) in ("4", "8")), "")
    switches = _switches(given, *QUANTISED)
    if any(switches) or str(given.first(*MODES, default="")).lower() == "qlora":
        loads = [bits for bits in (4, 8) if given.flag(f"load_in_{bits}bit")]
        return int(count or (*loads, 4)[0])
    if switches:  # a default of 4 bits waits for the switch
        return next((bits for bits in (4, 8) if given.data.get(f"load_in_{bits}bit") and given.flag(f"load_in_{bits}bit")), 0)
    named = [bits for bits in (4, 8) if given.flag(f"load_in_{bits}bit") | given.flag(f"use_{bits}bit_quantization")]
    return named[0] if named else int(count or 0)


def _length(given: Settings) -> int | None:
    """What the command says goes before what the program takes by itself."""
    for source in (given.data, given.usual):
        for name in LENGTHS:
            if source.get(name) is not None and (found := given.number(name)) is not None:
                return found
        for pair in PAIRS:
            if all(source.get(one) is not None or given.usual.get(one) is not None for one in pair):
                return sum(given.size(one) for one in pair)
    return None


DTYPES = ("bfloat16", "float32", "float16")
"""Dtypes that a model is loaded in."""


def _dtype(given: Settings) -> str:
    """Dtype that weights are loaded in; float32 where nothing is said.  [TRL, model_config.py]"""
    inner = given.get("model_init_kwargs")
    own = given.section("model_init_kwargs").first("dtype", "torch_dtype") if isinstance(inner, dict) else None
    said = [given.get(name, choices=DTYPES) for name in ("dtype", "torch_dtype")]
    named = next((one for one in said if one is not None), None)
    return str(named or own or "float32").lower().removeprefix("torch.")
