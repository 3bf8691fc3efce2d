"""Variables of MLPerf's configurations that decide precision, memory or degrees: what they say, and which of them are not read."""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence

from planner.errors import PlannerError, shown
from planner.model import ModelSpec
from planner.trainers.reading.given import Question
from planner.trainers.reading.shell import Script, is_open

ATTENTION = ("FP8_DPA", "NVTE_DPA_FP8_RECIPE")
FOUR_BITS = ("PRE_QUANTIZED_MODEL", "FP4_PARAM")
"""What has frozen weights in NVFP4 where products are: cast once at the start, or loaded as such.
[llama2_70b_lora, custom_callbacks.py: _pre_quantize_model]"""
HEALING = ("HEALING_ITER", "HEALING_PRECISION")
"""From which step on products are in another precision, and in which."""
SWITCHED_OFF = {
    "use_distributed_optimizer": ("USE_DIST_OPTIMIZER", "USE_DISTRIBUTED_OPTIMIZER"),
    "overlap_grad_reduce": ("OVERLAP_GRAD_REDUCE", "DDP_OVERLAP_GRAD_REDUCE", "OVERLAP_GRAD_SYNC"),
}  # fmt: skip
"""Arguments that are on unless one of these variables says no."""
LENGTHS = ("MAX_SEQLEN", "SEQ_LENGTH", "SEQ_LEN", "ENCODER_SEQ_LENGTH")
LAYERS = ("OVERWRITTEN_NUM_LAYERS", "NUM_LAYERS")
SIZES = {"HIDDEN_SIZE": "hidden_size", "NUM_ATTENTION_HEADS": "num_heads", "FFN_HIDDEN_SIZE": "ffn_size"}
"""Sizes of the model, which is another one where they are not those of the benchmark."""
EIGHT_BITS = ("FP8_ACTIVATION", "FP8_ACT")
"""Whether the input of the activation waits for the backward pass in 8 bits."""
OTHERS = (
    *LENGTHS, *LAYERS, *SIZES, *EIGHT_BITS, "DISTRIBUTE_SAVED_ACTIVATIONS", "PRECISION", "USE_DISTRIBUTED_OPTIMIZER",
    "FP4", "FP8", "FP4_RECIPE", "FP8_RECIPE", "SP", "SEQ_PARALLEL", "USE_DIST_OPTIMIZER", "CPU_OFFLOADING", "CUDA_GRAPH_SCOPE",
    "STORE_GPU", "USE_TE_OPS", "NVTE_CUTEDSL_FUSED_GROUPED_MLP", "CE_FUSION_IMPL", "CROSS_ENTROPY_LOSS_FUSION", "LORA",
    "LORA_DIM",
)  # fmt: skip
READ = (*ATTENTION, *FOUR_BITS, *HEALING, *OTHERS)
"""Variables that are read here or by the reader, beside those that are arguments of Megatron."""
DECIDES = re.compile(
    r".*(QUANTIZED|HEALING|DPA|OFFLOAD|RECOMPUTE|PARALLEL|SHARD|FSDP|CAPACITY|LAYERS_BF16|IN_BF16|STORE_GPU).*|(FP4|FP8|MXFP8)_.*"
)
"""Words of variables that look like precision, memory or degrees."""
QUIET = re.compile(
    r"TOKENIZERS_PARALLELISM|.*(AMAX|MARGIN|INTERVAL|FP8_HYBRID|FP8_E4M3|FP8_FORMAT|USE_TE_DPA|WARMUP|STATS).*|NVTE_(FP8_DPA_BWD|NVFP4)"
    r".*|.*_LOG_.*|FP4_PARAM_GATHER|REUSE_GRAD_BUF_FOR_MXFP8_PARAM_AG|WG_SHARDING.*|.*SHARDING_(PLAN|THRESHOLD|PARTITION)"
)
"""Those of them that change neither time nor memory of a step: formats of scales, warm-up before the run, logs."""
DEGREE = re.compile(r"\w*(PARALLEL|PARALLEL_SIZE)")
NONE = ("", "0", "false", "none", "null")


def true(text: str | None) -> bool:
    """Whether a variable switches something on."""
    return str(text).lower() in ("true", "1")


def fp8_attention(values: Mapping[str, str]) -> bool:
    """Whether attention is in fp8: beside products in NVFP4 where a recipe of its own is named for it.
    [Transformer Engine, dot_product_attention.py: NVTE_DPA_FP8_RECIPE, F16 for none]"""
    recipe = values.get("NVTE_DPA_FP8_RECIPE", "")
    low = true(values.get("FP8")) or (true(values.get("FP4")) and recipe != "")
    return true(values.get("FP8_DPA")) and low and recipe.upper() != "F16"


def frozen_in_four_bits(values: Mapping[str, str]) -> bool:
    """Whether frozen weights lie in NVFP4."""
    return true(values.get("FP4")) and any(true(values.get(name)) for name in FOUR_BITS)


def length(values: Mapping[str, str]) -> int | None:
    """Tokens of a sequence, where a variable says them."""
    return next((int(values[one]) for one in LENGTHS if re.fullmatch(r"[1-9]\d{1,7}", values.get(one, ""))), None)


def with_layers(values: Mapping[str, str], model: ModelSpec) -> ModelSpec:
    """The benchmark's model, with as many layers as a variable says."""
    said = next((int(values[one]) for one in LAYERS if re.fullmatch(r"[1-9]\d{0,3}", values.get(one, ""))), model.num_layers)
    if said == model.num_layers:
        return model
    return dataclasses.replace(model, num_layers=said, published_parameters=0.0, published_active_parameters=0.0)


def other_sizes(values: Mapping[str, str], model: ModelSpec | None) -> list[Question]:
    """Asks for the model where its sizes are not those of the benchmark."""
    numbers = {one: values[one] for one in SIZES if re.fullmatch(r"[1-9]\d{0,6}", values.get(one, ""))}
    differ = [one for one, text in numbers.items() if model is not None and int(text) != getattr(model, SIZES[one])]
    about = f"{', '.join(differ)} make it another one than the benchmark's: a preset or a config.json like it"
    return [Question(name="--model NAME", about=about)] if differ else []


def check_recipe(where: str, values: Mapping[str, str]) -> None:
    """Raises PlannerError for products in four bits of another kind than NVFP4."""
    recipe = values.get("FP4_RECIPE", "")
    if true(values.get("FSDP")):
        raise PlannerError(f"{where}: FSDP: torch's FSDP over these layers is not priced; --set FSDP=False imports it without")
    kind = values.get("PRECISION", "bf16").strip("'\"")
    if not is_open(kind) and not kind.lower().startswith("bf16"):
        raise PlannerError(f"{where}: PRECISION is {shown(kind)}; a plan of these benchmarks has bf16 beside 8 and 4 bits")
    if true(values.get("FP4")) and recipe.lower() not in ("", "nvfp4"):
        raise PlannerError(f"{where}: FP4_RECIPE is {shown(recipe)}; a plan knows nvfp4")


def handed_on(script: Script) -> list[str]:
    """Variables that a script writes, without degrees that a configuration which exports and starts nothing only counts with."""
    helps = bool(script.exported) and not script.commands
    return [one for one in script.variables.values if not (helps and DEGREE.fullmatch(one) and one not in script.exported)]


def strangers(values: Mapping[str, str], written: Collection[str], known: Collection[str]) -> list[str]:
    """Variables that a script writes, look like precision, memory or degrees, and that nothing reads; ``known``: those that are
    arguments of Megatron."""
    return [
        name for name in sorted(written)
        if name in values and DECIDES.fullmatch(name) and not QUIET.fullmatch(name) and name not in READ and name not in known
        and values[name].lower() not in NONE and not is_open(values[name]) and not (DEGREE.fullmatch(name) and values[name] == "1")
    ]  # fmt: skip


def questions(values: Mapping[str, str], found: Sequence[str], lora: bool) -> list[Question]:
    """What is asked about variables that decide degrees or memory and are not priced; ``found``: the strangers."""
    asked = [
        Question(name=name, about="a degree that is not read; 1 imports the job without it", choices=("1",))
        for name in found if DEGREE.fullmatch(name) and values[name].isdigit()
    ]  # fmt: skip
    asked += [
        Question(name=name, about="room for a rank's tokens, not priced; null imports the job without it", choices=("null",))
        for name in found if name.endswith("CAPACITY_FACTOR")
    ]  # fmt: skip
    if true(values.get("DISTRIBUTE_SAVED_ACTIVATIONS")):
        about = "saved activations cut over tensor parallel ranks, not priced; False imports the job without it"
        asked.append(Question(name="DISTRIBUTE_SAVED_ACTIVATIONS", about=about, choices=("False",)))
    if lora and true(values.get("PRE_QUANTIZED_MODEL")) and not true(values.get("FP4")):
        about = "frozen weights in NVFP4 beside products that are not; False imports the job without them"
        asked.append(Question(name="PRE_QUANTIZED_MODEL", about=about, choices=("False",)))
    if lora and frozen_in_four_bits(values) and true(values.get("STORE_GPU")):
        about = "a second copy of the frozen weights on the GPU, which is not priced; False imports the job without it"
        asked.append(Question(name="STORE_GPU", about=about, choices=("False",)))
    return asked


def unread(values: Mapping[str, str], found: Sequence[str], lora: bool) -> tuple[str, ...]:
    """The strangers with their values."""
    more = [] if lora or not true(values.get("PRE_QUANTIZED_MODEL")) else ["PRE_QUANTIZED_MODEL"]
    return tuple(f"{name} = {values[name]}" for name in (*found, *more))


def notes(values: Mapping[str, str], model: ModelSpec | None) -> list[str]:
    """What the plan has otherwise than the job, or the job than the benchmark."""
    eight = [one for one in EIGHT_BITS if true(values.get(one))]
    low = f"{eight[0]}: the input of the activation waits in 8 bits, in the plan in 16" if eight else ""
    changed = model is not None and not model.published_parameters
    said = [one for one in LAYERS if changed and model is not None and values.get(one) == str(model.num_layers)]
    own = f"{said[0]} {values[said[0]]}: all else as the model of the benchmark" if said else ""
    return [one for one in (low, own, *_after(values)) if one]


def _after(values: Mapping[str, str]) -> list[str]:
    """What the steps after the priced ones do otherwise."""
    step = values.get("HEALING_ITER", "")
    if not true(values.get("FP4")) or not re.fullmatch(r"[1-9]\d{0,8}", step):
        return []
    kind = values.get("HEALING_PRECISION") or "FP8_DS"
    return [f"HEALING_ITER: from step {step} on products are in {kind[:20]}; the steps before it are priced"]
