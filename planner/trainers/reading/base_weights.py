"""What of a frozen base in 4 or 8 bits lies in more, as nothing quantises it, and adapters on experts that one tensor holds."""

import re
from collections.abc import Iterator

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
STAY, AUTOCASTS = "adapters_stay_half", (0, 12)
"""What a program says that has PEFT leave adapters as they are, and the version since which it makes them fp32 by itself."""
PARAMETERS = ("lora_target_parameters", "target_parameters")
"""Arguments that list tensors with adapters."""
ONE_TENSOR = re.compile(r"gpt[-_]?oss|llama-?4", re.IGNORECASE)
"""Models whose experts are one tensor in transformers 4 too.  [modeling_gpt_oss.py, modeling_llama4.py]"""
FUSES, PREPARES_NO_MORE = (5,), (0, 27)
"""Versions: of transformers whose experts are one tensor, of TRL whose trainers leave frozen weights as they were loaded.
[transformers, integrations/moe.py; trl/models/utils.py: prepare_peft_model]"""
BRINGS_BACK, IN_FULL, IN_HALF = (0, 7, 5), (0, 9), (0, 26)
"""Versions of TRL: that bring tables back to bf16 under bf16 with a base in 4 bits, as long as they prepare them, and adapters with
them; that bring back tables alone; that cast adapters to bf16 with a base in 4 or 8 bits, DPO since 0.29.
[trl/trainer/utils.py: peft_module_casting_to_bf16; trl/trainer/sft_trainer.py]"""
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


def of_base(given: Settings, job: Adapted, model: ModelSpec | None) -> tuple[dict[str, str], tuple[str, ...]]:
    """(options of the trainer, notes) of a job with adapters."""
    trainer, frozen = job.trainer, job.frozen
    spec = spec_of(given, model)
    quantises, casts = given.flag("quantize_moe_experts"), False if job.engine else _casts(given, trainer, job.sharded)
    back = _brings_back(given, trainer, frozen, job.precision)
    notes = [*_of_tables(given, job, spec, False if back else casts), *_of_residuals(given, job, spec, casts)]
    if spec is None or not spec.is_moe:
        return {}, tuple(notes)
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
        return {"frozen_experts": "linear"}, tuple(notes)
    if job.everywhere and not on_tensors:
        text = "experts are one tensor in transformers 5 and have no adapters, which the other linear layers have"
        other = "; in transformers 4 they are layers with adapters, which --set transformers=4 prices"
        notes.append(text + (other if new is None else ""))
    if frozen not in FEWER:
        return {}, tuple(notes)
    if quantises:
        return {"frozen_experts": "quantised"}, tuple(notes)
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
    return {"frozen_experts": value}, tuple(notes)


def on_experts(given: Settings, model: ModelSpec | None, rank: int) -> tuple[dict[str, str], tuple[str, ...]]:
    """(options of the trainer, notes) where adapters are named on tensors: those of experts have one of gate and up and one of down
    each, whatever linear layers have some beside them. Options are empty where none is priced.  [peft, ParamWrapper]"""
    words = [str(one) for name in PARAMETERS for one in listed(given.get(name) or "") if one]
    spec, named = spec_of(given, model), shown(", ".join(words))
    if not words or not rank:
        return {}, ()
    if not any(re.search("expert|gate_up_proj|down_proj", one) for one in words) or (spec is not None and not spec.is_moe):
        return {}, (f"adapters on the tensors {named} (target_parameters) are not priced: memory comes out too low",)
    what = f"adapters on {named} (target_parameters): priced on gate and up together and on down of every expert"
    if spec is not None:
        each = rank * (2.0 * spec.routed_size + spec.expert_ffn_size * spec.num_mlp_matrices)
        count = each * spec.num_experts * spec.num_moe_layers
        what += f", {count / GIGA:.2f} billion weights"
    rest = spec is not None and (spec.shared_expert_ffn_size > 0 or spec.num_plain_layers > 0)
    beside = ", and on attention" + (", shared experts and dense layers" if rest else "")
    return {"expert_adapters": "on"}, (f"{what}{beside}",)


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


def _caster(given: Settings) -> str:
    """What casts frozen weights to fp32, or leaves them in it."""
    return PREPARES[0] if given.flag(PREPARES[0]) else "torch_dtype float32" if _in_fp32(given) else "TRL before 0.27"


def _brings_back(given: Settings, trainer: str, frozen: str, precision: str) -> bool:
    """Whether tables that were cast to fp32 are in bf16 again: by the program, or by TRL, which does so where it casts itself."""
    if given.flag(CAST):
        return True
    known = precision == "bf16" and frozen.startswith("nf4") and newer(given.path, "trl", BRINGS_BACK) is not False
    return known and trainer == "trl" and (not given.flag(PREPARES[0]) or (_old(given) and given.flag("by_trainer")))


def _old(given: Settings) -> bool:
    """Whether a job is known to be of TRL before adapters on a quantised base are in bf16, by its version or its words."""
    return newer(given.path, "trl", IN_HALF) is False or "max_seq_length" in given.data


def _early(given: Settings, job: Adapted) -> bool:
    """Whether TRL may be one of those that cast adapters with the tables."""
    between = newer(given.path, "trl", BRINGS_BACK) is not False and newer(given.path, "trl", IN_FULL) is not True
    return between and _old(given) and job.trainer == "trl" and job.frozen.startswith("nf4") and job.precision == "bf16"


def of_adapters(given: Settings, job: Adapted, model: ModelSpec | None) -> tuple[str, ...]:
    """Note about adapters in bf16, which are priced in fp32."""
    who = "its program casts adapters to bf16" if given.flag(CAST) else "TRL since 0.26 casts adapters beside such a base to bf16"
    half = job.frozen == "bf16" and not job.engine and (given.flag(STAY) or newer(given.path, "peft", AUTOCASTS) is False)
    if half and job.trainer in ("fsdp", "trl"):
        who = "PEFT leaves adapters in the dtype of their base (before 0.12, and without autocast_adapter_dtype)"
    elif not job.engine and not job.sharded and _early(given, job):
        since = "" if newer(given.path, "trl", IN_FULL) is False else ", where that is its version,"
        who = f"TRL 0.7.5 to 0.8{since} casts adapters beside 4 bits to bf16"
    elif job.engine or (not given.flag(CAST) and (job.trainer != "trl" or job.frozen not in FEWER or _old(given))):
        return ()
    spec, by = spec_of(given, model), ""
    if spec is not None:
        each = 2.0 * (2.0 * spec.hidden_size + spec.query_size + spec.key_size)
        layers = spec.num_mlp_matrices * (spec.hidden_size + spec.ffn_size) if job.everywhere and not spec.is_moe else 0.0
        more = 4.0 * job.rank * (each + layers) * spec.num_layers / GIB  # weights and gradients, whatever the optimizer keeps
        size = f"{more:.{1 if more >= 0.1 else 2}f} GiB"
        by = f" by up to {size}" if job.sharded else f" by {size} or more"
        if _small(job, spec, more):
            return ()
    return (f"{who}, and they are priced in fp32: memory then comes out too high{by}",)


def _of_tables(given: Settings, job: Adapted, spec: ModelSpec | None, casts: bool | None) -> Iterator[str]:
    """Note about tables and norms, which are priced in half precision where that is the job's. For pairs axolotl leaves adapters to
    TRL, whose preparation is not the one that it patches.  [axolotl, loaders/model.py: _load_adapters]"""
    pairs = job.trainer == "axolotl" and bool(given.get("rl")) and newer(given.path, "trl", PREPARES_NO_MORE) is not True
    if not _prepared(job, casts) or (job.trainer == "axolotl" and not pairs):
        return
    who = "TRL before 0.27" if pairs else _caster(given)
    text = f"embedding, head and norms are priced in {job.precision}, and {who} casts them to fp32: memory then comes out too low"
    if spec is None:
        yield text
    elif not _small(job, spec, more := 2.0 * ((counts := count_parameters(spec)).input_embedding + counts.head) / GIB):
        copy = 2.0 * spec.vocab_size * spec.hidden_size / GIB
        most, what = "up to " if job.sharded else "", f"the copy in {job.precision} that the head's product saves"
        yield f"{text} by {most}{more:.1f} GiB, and by {most}{copy:.1f} GiB for {what}"


def _of_residuals(given: Settings, job: Adapted, spec: ModelSpec | None, casts: bool | None) -> Iterator[str]:
    """Note about what layers save, which is priced in half precision: autocast has neither embedding nor norms on its list, and
    layers in 4 or 8 bits return the dtype of what they are given.  [torch, autocast_mode.h; bitsandbytes, nn/modules.py]"""
    if not _prepared(job, casts) or job.trainer == "axolotl":
        return
    kept = "what layers save" if not job.recompute else "the inputs that layers save"
    text = f"norms that {_caster(given)} casts to fp32 make {kept} fp32, priced in {job.precision}: memory then comes out too low"
    if spec is None or not job.tokens:
        yield text
        return
    each = 2.0 * job.tokens / GIB
    inner = 3.0 * spec.hidden_size + spec.query_size + 2.0 * spec.key_size + (spec.num_mlp_matrices + 1) * spec.ffn_size
    more, passing = each * spec.num_layers * spec.hidden_size, each * inner
    if not job.recompute:
        yield f"{text} by about {more + passing * spec.num_layers:.1f} GiB"
    elif not _small(job, spec, more + passing):
        yield f"{text} by {more:.1f} GiB, and by up to {passing:.1f} GiB within the layer that is recomputed"


def _prepared(job: Adapted, casts: bool | None) -> bool:
    """Whether frozen weights may be cast to fp32 beside others in fewer bits, in a job that is priced in half precision."""
    return job.frozen in FEWER and casts is not False and job.precision in ("bf16", "fp16")


def _small(job: Adapted, spec: ModelSpec, more: float) -> bool:
    """Whether some GiB are a fiftieth of what the driver and the frozen weights alone take."""
    return more < (1.0 + FROZEN_BYTES.get(job.frozen, 2.0) * total_parameters(spec) / GIB) / 50
