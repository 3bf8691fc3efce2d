"""What of a frozen base in 4 or 8 bits lies in more, as nothing quantises it, and adapters on experts that one tensor holds."""

import re
from collections.abc import Iterator

from planner.cost.parameters import count_parameters
from planner.cost.state_dtypes import FROZEN_BYTES
from planner.errors import PlannerError, shown
from planner.model import ModelSpec, load_model
from planner.trainers.reading.given import Question
from planner.trainers.reading.layer_names import listed
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.versions import newer
from planner.units import GIB, GIGA

FEWER = ("nf4", "nf4_dq", "int8")
PREPARES = ("prepare_model_for_kbit_training", "prepare_model_for_int8_training")
"""Of PEFT, the second before its version 0.10: what is neither int8 nor Params4bit becomes fp32.  [peft, utils/other.py]"""
PARAMETERS = ("lora_target_parameters", "target_parameters")
"""Arguments that list tensors with adapters."""
ONE_TENSOR = re.compile(r"gpt[-_]?oss|llama-?4", re.IGNORECASE)
"""Models whose experts are one tensor in transformers 4 too.  [modeling_gpt_oss.py, modeling_llama4.py]"""
FUSES, PREPARES_NO_MORE = (5,), (0, 27)
"""Versions: of transformers whose experts are one tensor, of TRL whose trainers leave frozen weights as they were loaded.
[transformers, integrations/moe.py; trl/models/utils.py: prepare_peft_model]"""
MXFP4 = re.compile("mxfp4", re.IGNORECASE)


def of_base(
    given: Settings, trainer: str, model: ModelSpec | None, frozen: str, loading: str, everywhere: bool
) -> tuple[dict[str, str], tuple[str, ...]]:  # fmt: skip
    """(options of the trainer, notes) of a job with adapters; ``loading``: 'half' where DeepSpeed casts to half precision
    what is in fp32, 'sharded' where FSDP or ZeRO 3 load the base; ``everywhere``: adapters are on all linear layers.
    [deepspeed, runtime/engine.py: _configure_distributed_model]"""
    spec = spec_of(given, model)
    casts = False if loading == "half" else _casts(given, trainer, loading == "sharded")
    quantises = given.flag("quantize_moe_experts")
    notes = [*_of_tables(given, trainer, spec, frozen, casts)]
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
    if new is False:
        return {"frozen_experts": "linear"}, tuple(notes)
    if everywhere and not on_tensors:
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
    if given.flag(PREPARES[0]):
        return True
    if sharded or trainer not in ("axolotl", "trl"):
        return False
    if trainer == "axolotl":
        return True
    new = newer(given.path, "trl", PREPARES_NO_MORE)
    return not new if new is not None else True if "max_seq_length" in given.data else None


def _of_tables(given: Settings, trainer: str, spec: ModelSpec | None, frozen: str, casts: bool | None) -> Iterator[str]:
    """Note about tables and norms, which are priced in half precision. For pairs axolotl leaves adapters to TRL, whose preparation
    is not the one that it patches.  [axolotl, loaders/model.py: _load_adapters]"""
    pairs = trainer == "axolotl" and bool(given.get("rl")) and newer(given.path, "trl", PREPARES_NO_MORE) is not True
    if frozen not in FEWER or casts is False or (trainer == "axolotl" and not pairs):
        return
    who = "TRL before 0.27" if pairs or not casts else PREPARES[0]
    text = f"embedding, head and norms are priced in bf16, and {who} casts them to fp32: memory then comes out too low"
    if spec is None:
        yield text
    elif (more := 2.0 * ((counts := count_parameters(spec)).input_embedding + counts.head) / GIB) >= 0.1:
        yield f"{text} by {more:.1f} GiB"
