"""What of a frozen base in 4 or 8 bits lies in more, as nothing quantises it, and adapters on experts that one tensor holds."""

import re
from pathlib import Path

from planner import library
from planner.cost.parameters import count_parameters, total_parameters
from planner.cost.state_dtypes import FROZEN_BYTES
from planner.errors import PlannerError, shown
from planner.model import ModelSpec, load_model
from planner.record import record
from planner.trainers.reading.given import Question
from planner.trainers.reading.layer_names import listed
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.versions import newer
from planner.units import GIB, GIGA

FEWER = ("nf4", "nf4_dq", "int8")
PREPARES = ("prepare_model_for_kbit_training", "prepare_model_for_int8_training")
"""Of PEFT, the second before its version 0.10: what is neither int8 nor Params4bit becomes fp32.  [peft, utils/other.py]"""
CAST = "casts_adapters"
"""What a program does that turns its adapters into bf16, and tables back into it."""
STAY, AUTOCASTS, AS_BASE = "adapters_stay_half", (0, 12), (0, 6)
"""What a program says that has PEFT leave adapters as they are, and the versions since which it makes them fp32 by itself, and
gives them the dtype of their base: before it they are fp32, as torch makes them.  [peft, tuners/lora.py: update_layer]"""
PARAMETERS = ("lora_target_parameters", "target_parameters")
"""Arguments that list tensors with adapters."""
ONE_TENSOR = re.compile(r"gpt[-_]?oss|llama-?4", re.IGNORECASE)
"""Models whose experts are one tensor in transformers 4 too.  [modeling_gpt_oss.py, modeling_llama4.py]"""
CONVERTED = re.compile(
    r"mixtral|minimax[-_]?m2|qwen3(?![._]5)(?!.*vl).*(moe|next|a\d+b)|deepseek[-_]?(v2|v3|r1)|dots1|dots\.llm1|ernie.*(moe|a\d+b)"
    r"|glm-?4(\.[5-7]|_moe)|olmoe|hunyuan.*(moe|a\d+b)|kimi[-_]k2|longcat|solar[-_]open", re.IGNORECASE,
)  # fmt: skip
"""Models whose experts have adapters where linear layers of the names that they had in transformers 4 are adapted.
[transformers 5, conversion_mapping.py: _MODEL_TO_CONVERSION_PATTERN]"""
OF_EXPERTS = ({"gate_proj", "up_proj", "down_proj"}, {"w1", "w2", "w3"})
"""Those names; of all-linear and of patterns since the second version.  [peft, utils/transformers_weight_conversion.py]"""
CONVERTS, CONVERTS_ALL = (0, 19), (0, 20)
FUSES, PREPARES_NO_MORE = (5,), (0, 27)
"""Versions: of transformers whose experts are one tensor, of TRL whose trainers leave frozen weights as they were loaded.
[transformers, integrations/moe.py; trl/models/utils.py: prepare_peft_model]"""
BRINGS_BACK, IN_FULL, IN_HALF, IN_HALF_PAIRS = (0, 7, 5), (0, 9), (0, 26), (0, 29)
"""Versions of TRL: that bring tables back to bf16 under bf16 with a base in 4 bits, as long as they prepare them, and adapters with
them; that bring back tables alone; that cast adapters to bf16 with a base in 4 or 8 bits, DPO since 0.29.
[trl/trainer/utils.py: peft_module_casting_to_bf16; trl/trainer/sft_trainer.py]"""
LORA_DTYPE = (4, 5)
"""Version of ms-swift since which PEFT leaves adapters as lora_dtype says.  [swift/tuners/peft.py: _cast_adapter_dtype_hook]"""
OWN_ADAPTERS = ("unsloth", "automodel", "torchtune", "litgpt", "prime-rl")
"""Trainers whose adapters are not PEFT's, or are another model's."""
LINEARIZED = "llama4_linearized_experts"
"""Argument of axolotl, which makes layers of the experts of llama-4.  [monkeypatch/models/llama4]"""
MXFP4 = re.compile("mxfp4", re.IGNORECASE)


@record
class Adapted:
    """What of a job with adapters decides what its base and they lie in."""

    trainer: str
    frozen: str
    """Dtype of the base."""
    precision: str
    rank: int
    sharded: bool
    """FSDP or ZeRO 3 load the base."""
    everywhere: bool
    """Adapters are on all linear layers."""
    engine: bool
    """DeepSpeed turns all weights into half precision."""
    tokens: int = 0
    """Of a forward pass; 0 = not known."""
    recompute: bool = True
    """Layers keep their inputs alone."""
    named: tuple[str, ...] = ()
    """What its adapters are on, as the file says it."""
    pairs: bool = False
    """It learns from preferences."""
    upcasts: bool = True
    """FSDP trains adapters in fp32 whatever they lie in."""


def of_base(given: Settings, job: Adapted, model: ModelSpec | None) -> tuple[dict[str, str], tuple[str, ...]]:
    """(options of the trainer, notes) of a job with adapters."""
    trainer, frozen = job.trainer, job.frozen
    spec = spec_of(given, model)
    quantises, casts = given.flag("quantize_moe_experts"), False if job.engine else _casts(given, trainer, job.sharded)
    back = _brings_back(given, trainer, frozen, job.precision)
    rest, said = _of_rest(given, job, spec, casts, back)
    notes = list(said)
    if spec is None or not spec.is_moe:
        return rest, tuple(notes)
    count = count_parameters(spec).expert * spec.num_experts * spec.num_moe_layers
    if trainer == "unsloth":  # whose uploads of gpt-oss have them as layers
        low = count * (2.0 - FROZEN_BYTES.get(frozen, 2.0)) / GIB
        text = "experts are priced as quantised layers; where one tensor holds them in bf16 memory comes out too low"
        text += f" by {low:.1f} GiB"
        return {}, (*notes, *([text] if frozen in FEWER and _fuses(given) is not False else []))
    on_tensors = any(given.get(one) for one in PARAMETERS)
    new = True if ONE_TENSOR.search(spec.name) or quantises or on_tensors else _fuses(given)
    new = new and not given.flag(LINEARIZED)
    if new is False:
        return {**rest, "frozen_experts": "linear"}, tuple(notes)
    other = "; in transformers 4 they are layers with adapters, which --set transformers=4 prices" if new is None else ""
    if not on_tensors and _converts(given, job, spec):
        options, text = _on_all_experts(spec, job.rank, "with transformers 5 PEFT since 0.19 gives tensors of experts adapters too")
        rest, notes = {**rest, **options}, [*notes, text + other]
    elif job.everywhere and not on_tensors:
        text = "experts are one tensor in transformers 5 and have no adapters, which the other linear layers have"
        notes.append(text + other)
    if frozen not in FEWER:
        return rest, tuple(notes)
    if quantises:
        return {**rest, "frozen_experts": "quantised"}, tuple(notes)
    value, bytes_each = ("fp32", 4.0) if casts else ("half", 2.0)
    why = f", which {PREPARES[0]} turns them into" if casts else ""
    fewer = f"{'8' if frozen == 'int8' else '4'} bits"
    text = f"experts are one tensor in transformers 5, which {fewer} do not reach: priced in {'fp32' if casts else 'bf16'}{why}"
    if new is None:
        more = count * (bytes_each - FROZEN_BYTES[frozen]) / GIB
        about = f"its version: until 4 experts are layers in {fewer}, since 5 one tensor that is not quantised, {more:.1f} GiB more"
        given.ask(Question(name="transformers", about=about, choices=("4", "5")))
    notes.append(text)
    if casts is None:
        notes.append(f"TRL before 0.27 casts such experts to fp32: memory then comes out too low by {2.0 * count / GIB:.1f} GiB")
    return {**rest, "frozen_experts": value}, tuple(notes)


def on_experts(given: Settings, model: ModelSpec | None, rank: int) -> tuple[dict[str, str], tuple[str, ...]]:
    """(options of the trainer, notes) where adapters are named on tensors: those of experts have one of gate and up and one of down
    each, whatever linear layers have some beside them. Options are empty where none is priced.  [peft, ParamWrapper]"""
    words = [str(one) for name in PARAMETERS for one in listed(given.get(name) or "") if one]
    spec, named = spec_of(given, model), shown(", ".join(words))
    if not words or not rank:
        return {}, ()
    if not any(re.search("expert|gate_up_proj|down_proj", one) for one in words) or (spec is not None and not spec.is_moe):
        return {}, (f"adapters on the tensors {named} (target_parameters) are not priced: memory comes out too low",)
    options, what = _on_all_experts(spec, rank, f"adapters on {named} (target_parameters)")
    return options, (what,)


def _on_all_experts(spec: ModelSpec | None, rank: int, why: str) -> tuple[dict[str, str], str]:
    """(option of the trainer, note) of adapters on tensors of all experts."""
    what = f"{why}: priced on gate and up together and on down of every expert"
    if spec is not None:
        each = rank * (2.0 * spec.routed_size + spec.expert_ffn_size * spec.num_mlp_matrices)
        count = each * spec.num_experts * spec.num_moe_layers
        what += f", {count / GIGA:.2f} billion weights"
    rest = spec is not None and (spec.shared_expert_ffn_size > 0 or spec.num_plain_layers > 0)
    return {"expert_adapters": "on"}, f"{what}, and on attention" + (", shared experts and dense layers" if rest else "")


def _converts(given: Settings, job: Adapted, spec: ModelSpec) -> bool:
    """Whether PEFT gives adapters to tensors of experts because layers of theirs, as they were, are named."""
    if not CONVERTED.search(of_file(spec)[0] or spec.name) or job.trainer in OWN_ADAPTERS:
        return False
    everything = any(re.search(r"^all-linear$|[*+|\\(]", one) for one in job.named)
    listed_all = any(one <= {each.rpartition(".")[2] for each in job.named} for one in OF_EXPERTS)
    found_all = not job.named and job.everywhere and bool(spec.shared_expert_ffn_size or spec.num_plain_layers)
    since = CONVERTS_ALL if everything else CONVERTS
    return (everything or listed_all or found_all) and newer(given.path, "peft", since) is not False


def stored_in_fewer(given: Settings, model: ModelSpec | None, name: str, frozen: str) -> tuple[str, ...]:
    """Note about a checkpoint that lies in MXFP4, as OpenAI publishes gpt-oss, where the file does not say that it is brought to
    half precision."""
    spec = spec_of(given, model)
    lies = MXFP4.search(spec.quantised if spec is not None else "") or (ONE_TENSOR.search(name) and re.match(r"openai/", name))
    if not lies or frozen in FEWER or given.flag("model_quantization_config_kwargs.dequantize") or given.flag("dequantize"):
        return ()
    return ("the checkpoint lies in mxfp4, and weights are priced in bf16, to which Mxfp4Config(dequantize=True) brings them",)


def spec_of(given: Settings, model: ModelSpec | None) -> ModelSpec | None:
    """The model that is priced: what the user says goes before the file."""
    said = given.said.model if given.said is not None else None
    try:
        return load_model(said) if isinstance(said, str) else said or model
    except PlannerError:  # said where the plan is made
        return model


def of_file(spec: ModelSpec | None) -> tuple[str | None, bool]:
    """(model_type of the config.json that a model was read from, whether it names code of its own)."""
    source = spec.source.rpartition("; ")[2] if spec is not None else ""
    file = Path(source) if source.endswith(".json") else None
    if file is None or not library.is_file(file):
        return None, False
    data = library.parse_json(library.read_text(file), str(file))
    return str(data.get("model_type")), bool(data.get("auto_map"))


def _fuses(given: Settings) -> bool | None:
    """Whether experts are one tensor, by the version of transformers; None = not known."""
    if (said := re.match(r"\d{1,3}", str(given.get("transformers")))) is not None:
        return int(said[0]) >= FUSES[0]
    return newer(given.path, "transformers", FUSES)


def _casts(given: Settings, trainer: str, sharded: bool) -> bool | None:
    """Whether frozen weights that nothing quantises are cast to fp32; None = by the version of TRL, which is not known. axolotl
    brings norms and tables back.  [axolotl, loaders/model.py: _prepare_model_for_quantization; monkeypatch/peft/utils.py]"""
    if given.flag(PREPARES[0]) or _in_fp32(given):
        return True
    if sharded or trainer not in ("axolotl", "trl"):
        return False
    if trainer == "axolotl":
        return True
    new = newer(given.path, "trl", PREPARES_NO_MORE)
    return not new if new is not None else True if "max_seq_length" in given.data else None


def _in_fp32(given: Settings) -> bool:
    """Whether a base is loaded in fp32, so that what nothing quantises stays in it."""
    return str(given.first("dtype", "torch_dtype")).removeprefix("torch.") == "float32"


def _brings_back(given: Settings, trainer: str, frozen: str, precision: str) -> bool:
    """Whether tables that were cast to fp32 are in bf16 again: by the program, or by TRL, which does so where it casts itself."""
    if given.flag(CAST):
        return True
    known = precision == "bf16" and frozen.startswith("nf4") and newer(given.path, "trl", BRINGS_BACK) is not False
    return known and trainer == "trl" and (not given.flag(PREPARES[0]) or (_old(given) and given.flag("by_trainer")))


def _old(given: Settings) -> bool:
    """Whether a job is known to be of TRL before adapters on a quantised base are in bf16, by its version or its words."""
    return newer(given.path, "trl", IN_HALF) is False or "max_seq_length" in given.data


def _early(given: Settings, job: Adapted) -> bool | None:
    """Whether TRL is one of those that cast adapters with the tables, by its version; None = not known."""
    itself = not given.flag(PREPARES[0]) or given.flag("by_trainer")
    if job.trainer != "trl" or not job.frozen.startswith("nf4") or job.precision != "bf16" or not _old(given) or not itself:
        return False
    since, until = newer(given.path, "trl", BRINGS_BACK), newer(given.path, "trl", IN_FULL)
    return False if since is False or until is True else None if None in (since, until) else True


def of_adapters(given: Settings, job: Adapted, model: ModelSpec | None) -> tuple[dict[str, str], tuple[str, ...]]:
    """(options of the trainer, note) about adapters in half precision, where the version of TRL decides and is not known."""
    half = newer(given.path, "peft", AUTOCASTS) is False and newer(given.path, "peft", AS_BASE) is not False
    stay = given.flag(STAY) or (half and job.trainer in ("fsdp", "trl"))
    stay = job.frozen == "bf16" and (stay or given.data.get("peft_autocast_adapter_dtype") is False)
    said = given.data.get("lora_dtype") in ("bfloat16", "float16") and newer(given.path, "ms-swift", LORA_DTYPE)
    release = newer(given.path, "trl", since := IN_HALF_PAIRS if job.pairs else IN_HALF)
    new = job.trainer == "trl" and job.frozen in FEWER and (release if release is not None or not _old(given) else False)
    early = _early(given, job)
    if job.engine or (job.sharded and job.upcasts):
        return {}, ()
    if given.flag(CAST) or stay or said or early or new:
        return {"adapter_dtype": "half"}, ()
    spec, by = spec_of(given, model), ""
    if early is False and new is False:
        return {}, ()
    if spec is not None:
        each = 2.0 * (2.0 * spec.hidden_size + spec.query_size + spec.key_size)
        layers = spec.num_mlp_matrices * (spec.hidden_size + spec.ffn_size) if job.everywhere and not spec.is_moe else 0.0
        more = 4.0 * job.rank * (each + layers) * spec.num_layers / GIB  # weights and gradients, whatever the optimizer keeps
        by = f" by {more:.{1 if more >= 0.1 else 2}f} GiB or more"
        if _small(job, spec, more):
            return {}, ()
    which = "0.7.5 to 0.8" if early is None else f"since {since[0]}.{since[1]}"
    who = f"TRL {which}, where that is its version, casts adapters beside such a base to bf16"
    return {}, (f"{who}, and they are priced in fp32: memory then comes out too high{by}",)


def _of_rest(
    given: Settings, job: Adapted, spec: ModelSpec | None, casts: bool | None, back: bool
) -> tuple[dict[str, str], tuple[str, ...]]:
    """(option of the trainer, note) about tables and norms that are cast to fp32, or norms alone where tables come ``back``:
    autocast has neither embedding nor norms on its list. For pairs axolotl leaves adapters to TRL, whose preparation is not the one
    that it patches.  [torch, autocast_mode.h; axolotl, loaders/model.py: _load_adapters]"""
    if job.frozen in FEWER and not job.engine and given.flag("upcast_layernorm"):  # of LLaMA-Factory
        return {"unquantised": "norms"}, ()
    pairs = job.trainer == "axolotl" and bool(given.get("rl")) and newer(given.path, "trl", PREPARES_NO_MORE) is not True
    if not _prepared(job, casts) or (job.trainer == "axolotl" and not pairs):
        return {}, ()
    if casts and not pairs:
        return {"unquantised": "norms" if back else "fp32"}, ()
    what = "norms" if back else "embedding, head and norms"
    text = f"{what} are priced in {job.precision}, and TRL before 0.27 casts them to fp32: memory then comes out too low"
    if spec is None:
        return {}, (text,)
    tables = 0.0 if back else (counts := count_parameters(spec)).input_embedding + counts.head + spec.vocab_size * spec.hidden_size
    inner = (spec.num_mlp_matrices + float(job.recompute)) * spec.ffn_size
    passed = spec.num_layers * spec.hidden_size + inner if job.recompute else spec.num_layers * inner
    more = 2.0 * (tables + job.tokens * passed) / GIB
    return {}, () if _small(job, spec, more) else (f"{text} by {more:.1f} GiB, as layers then pass fp32 on",)


def _prepared(job: Adapted, casts: bool | None) -> bool:
    """Whether frozen weights may be cast to fp32 beside others in fewer bits, in a job that is priced in half precision."""
    return job.frozen in FEWER and casts is not False and job.precision in ("bf16", "fp16")


def _small(job: Adapted, spec: ModelSpec, more: float) -> bool:
    """Whether some GiB are a fiftieth of what the driver and the frozen weights alone take."""
    return more < (1.0 + FROZEN_BYTES.get(job.frozen, 2.0) * total_parameters(spec) / GIB) / 50
