"""How arguments of Megatron-LM are written: a script, a YAML mapping, or the dump of arguments in a training log."""

import ast
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, shown
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.shell import Script, is_open, options, roots, shown_text, words_of
from planner.trainers.reading.shell.text import gap
from planner.trainers.reading.values import MOST, whole_number

DUMPED = re.compile(r"^(?:.*?:)?\s*(\w+) \.{2,} (.*?)\s*$")
"""A line of _print_args: two spaces, the name, dots, the value; logs may put a rank before it."""
RENAMED = {
    "fp8_format": "fp8", "fp4_format": "fp4", "norm_epsilon": "layernorm_epsilon", "num_moe_experts": "num_experts",
    "model_parallel_size": "tensor_model_parallel_size", "moe_expert_parallel_size": "expert_model_parallel_size",
    "checkpoint_num_layers": "recompute_num_layers", "activations_checkpoint_num_layers": "recompute_num_layers",
    "recompute_activations_num_layers": "recompute_num_layers", "moe_topk": "moe_router_topk", "topk": "moe_router_topk",
}  # fmt: skip
"""Flags whose name in the dump differs, and names of older versions."""
SHARES = re.compile(r"(?=.*expert).*(_pool|(^|_)(share|tied?|reuse)(_|$))")
"""Words of forks' own arguments by which layers share their experts."""
LISTS = ("recompute_modules", "cp_comm_type", "rampup_batch_size")
"""Flags that take several values."""


SWITCHED_OFF = {
    "add_bias_linear": "disable_bias_linear", "share_embeddings_and_output_weights": "untie_embeddings_and_output_weights",
    "masked_softmax_fusion": "no_masked_softmax_fusion", "bias_gelu_fusion": "no_bias_gelu_fusion",
    "bias_swiglu_fusion": "no_bias_swiglu_fusion", "bias_dropout_fusion": "no_bias_dropout_fusion",
    "gradient_accumulation_fusion": "no_gradient_accumulation_fusion", "apply_rope_fusion": "no_rope_fusion",
}  # fmt: skip
"""Fields that are true by themselves -> the flag that switches them off, which a mapping says as false."""


class Arguments(dict[str, Any]):
    """Name of an argument, without dashes -> True, False, None, a text or a list of texts."""

    where: str = ""
    """The file."""
    dumped: bool = False
    """They come from a dump, which holds all of them."""
    num_gpus: int | None = None
    """GPUs that the launcher starts."""
    questions: list[Question]
    """What decides time or memory and is not known."""
    notes: list[str]
    program: str = ""
    """What is started with them."""
    documents: list[str]
    """Files that the script writes: configurations of DeepSpeed."""
    engine: dict[str, int]
    """Fields of a layout that the configuration of DeepSpeed says: offload."""
    dense_masks: str = ""
    """Capacity factor of experts that are DeepSpeed's own; empty = they are not."""
    branched: set[str]
    """Names that stand under conditions, for which something is asked."""
    rows: int = 0
    """Rows of the vocabulary that they say of a model which the user names; 0 = those of the model."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.questions, self.notes = where, [], []
        self.documents, self.engine, self.branched = [], {}, set()

    def settled(self, names: Iterable[str]) -> bool:
        """Whether the answer to a question that is asked anyway says them: they stand in the branches that it chooses from."""
        return bool(self.questions) and self.branched.issuperset(names)

    def spelled(self, name: str) -> str:
        """An argument as the file writes it."""
        if is_open(name):
            return "--" + shown_text(name)
        return name if self.dumped else "--" + name.replace("_", "-")

    def number(self, name: str, default: int = 0, *, least: int = 0, most: int = MOST) -> int:
        """A whole number, or the default where it is 0 or not given. Raises PlannerError with the name."""
        value = self.get(name)
        if value is None:
            return default
        text = str(value).replace("_", "") if re.fullmatch(r"\d{1,3}(_\d{3})+", str(value)) else str(value)
        given = int(text) if re.fullmatch(r"-?\d{1,15}", text) else value
        return whole_number(given, f"{self.where}: {self.spelled(name)}", least=least, most=most) or default


@cache
def known_arguments() -> tuple[re.Pattern[str], re.Pattern[str], dict[str, Any]]:
    """(names that a plan holds, names that change nothing, name -> value at which it changes nothing)."""
    return _names("held"), _names("neutral"), _lists()["counted"]


@cache
def listed_arguments() -> re.Pattern[str]:
    """Names that no plan holds and that are reported as unread, without a question."""
    return _names("listed")


def instead_of() -> dict[str, str]:
    """What a plan has in the place of arguments that it does not hold."""
    return dict(_lists()["priced"])


def _lists() -> dict[str, Any]:
    return library.read_yaml(Path(__file__).with_name("known_arguments.yaml"))


def _names(kind: str) -> re.Pattern[str]:
    """One of the lists of regular expressions as one."""
    return re.compile("|".join(f"(?:{one})" for one in str(_lists()[kind]).split()))


def unknown(found: Arguments) -> dict[str, Any]:
    """Arguments that stand in none of ``known_arguments``, with their values; those that are switched off are left out."""
    held, quiet, counted = known_arguments()
    return {
        name: value for name, value in found.items()
        if not (held.fullmatch(name) or quiet.fullmatch(name) or name in counted or value in (False, None, "0", "False", "false"))
    }  # fmt: skip


def decides(name: str) -> bool:
    """Whether an argument changes time or memory, as far as this reader knows."""
    held, _, counted = known_arguments()
    return held.fullmatch(name) is not None or name in counted


def of_dump(text: str, where: str) -> Arguments:
    """The arguments that a training log prints; empty where it prints none."""
    found = Arguments(where)
    lines = [DUMPED.match(line) for line in text.splitlines()]
    found.update({one.group(1): _literal(one.group(2)) for one in lines if one})
    found.dumped = bool(found)
    return found


def _literal(text: str) -> Any:
    """A value as Python printed it; texts stay texts."""
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    if text.startswith("["):
        try:
            return [str(one) for one in ast.literal_eval(text)]
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return text
    return text.removeprefix("torch.")


def of_mapping(data: Mapping[str, Any], where: str, given: Given) -> Arguments:
    """The arguments of a mapping, such as MODEL_ARGS of a functional test; ${NAME} in it is a variable."""
    found = Arguments(where)
    for key, value in data.items():
        name = _name(str(key).lstrip("-"))
        if value is None or isinstance(value, bool):
            if value:
                found[name] = True
            continue
        if isinstance(value, list | tuple):
            words = [_with_variables(str(one), given) for one in value]
        else:
            words = _with_variables(str(value), given).split() if not str(value).startswith("[") else [str(value)]
        found[name] = _value(name, words)
    return found


def of_sections(data: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments in the sections of FlagScale's YAML (system, model, data, and sections inside of them), or of --yaml-cfg, as one
    mapping.  [megatron/training/yaml_arguments.py]"""
    found: dict[str, Any] = {}
    for name, value in data.items():
        found |= of_sections(value) if isinstance(value, Mapping) else {str(name): value}
    for name, flag in SWITCHED_OFF.items():
        if str(found.get(name)).lower() == "false":
            del found[name]
            found[flag] = True
    if found.get("activation_func") == "swiglu":
        found["swiglu"] = True
    if not found.get("cpu_offloading"):  # what it would move
        found = {name: value for name, value in found.items() if not name.startswith("cpu_offloading_")}
    if "num_moe_experts" in found:
        found["num_experts"] = found.pop("num_moe_experts")
    return found


LEAST_OF_FLAT = 5
"""Keys of a YAML that decide something: fewer, and they are not Megatron's."""


def of_flat(text: str, where: str, given: Given) -> Arguments:
    """The arguments of a YAML whose own keys they are, as launchers make flags of it; empty where hardly any key is one."""
    data = library.parse_yaml(text, where)
    found = of_mapping(data, where, given) if isinstance(data, dict) else Arguments(where)
    if sum(map(decides, found)) < LEAST_OF_FLAT or any(isinstance(one, Mapping) for one in data.values()):
        return Arguments(where)
    ask_for_gaps(found, None)
    return found


def mapping_of(text: str, where: str) -> dict[str, Any]:
    """The mapping of arguments in a YAML text. Raises PlannerError."""
    data = library.parse_yaml(text, where)
    data = data.get("MODEL_ARGS", data)
    if not isinstance(data, dict):
        raise PlannerError(f"{where}: expected a mapping of arguments, found {type(data).__name__}")
    return data


def _with_variables(text: str, given: Given) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        said = given.setting(name)
        return said if said is not None else default[2:] if default else gap([name])

    return re.sub(r"\$\{(\w+)(:-[^}]*)?\}|\$([A-Za-z_]\w*)", value, text)


def _name(name: str) -> str:
    name = name.replace("-", "_")
    return RENAMED.get(name, name)


def _value(name: str, words: list[str]) -> Any:
    return (words if len(words) > 1 or name in LISTS else words[0]) if words else True


def of_words(words: list[str], where: str, script: Script | None = None) -> Arguments:
    """The arguments of a command. What stands under an unknown condition and decides something becomes a question."""
    found = Arguments(where)
    for name, values, under in options(words_of(words)):
        name = _name(name)
        if under:
            if decides(name) and found.get(name) != _value(name, values):
                ask_for(found, name, under, script)
                found.branched.add(name)
            continue
        loose = [one for one in values if _only_open(one)]
        if loose and (len(values) > 1 or name in FLAGS):  # "$EXTRA_ARGS" behind it, which nobody sets, is nothing
            values = [one for one in values if one not in loose]
        found[name] = _value(name, values)
    return found


FLAGS = (
    "bf16", "fp16", "swiglu", "sequence_parallel", "use_distributed_optimizer", "group_query_attention", "disable_bias_linear",
    "untie_embeddings_and_output_weights", "recompute_activations", "checkpoint_activations", "use_megatron_fsdp", "qk_layernorm",
    "use_flash_attn", "overlap_grad_reduce", "overlap_param_gather", "multi_latent_attention", "grad_reduce_in_bf16",
    "use_precision_aware_optimizer", "optimizer_cpu_offload", "tp_comm_overlap", "add_qkv_bias", "moe_grouped_gemm",
)  # fmt: skip
"""Arguments without a value."""


def _only_open(text: str) -> bool:
    return is_open(text) and not re.sub("\ue000[^\ue001]*\ue001", "", text)


def ask_for(found: Arguments, name: str, names: tuple[str, ...], script: Script | None) -> None:
    """A question for the first of these variables, which decides this argument."""
    asked = next((one for one in names if one), name)
    choices = tuple(script.choices.get(asked, ())) if script else ()
    for i, question in enumerate(found.questions):
        if question.name == asked:
            if found.spelled(name) not in question.about.split(", "):
                found.questions[i] = Question(
                    name=asked, about=f"{question.about}, {found.spelled(name)}", choices=choices or question.choices
                )
            return
    found.questions.append(Question(name=asked, about=found.spelled(name), choices=choices))


def ask_for_gaps(found: Arguments, script: Script | None, not_needed: tuple[str, ...] = ()) -> None:
    """Questions for the variables that arguments wait for, where they decide time or memory."""
    for name, value in found.items():
        values = [str(one) for one in (value if isinstance(value, list) else [value])]
        if decides(name) and name not in not_needed and any(is_open(one) for one in values):
            for one in roots(" ".join(values)) or [name]:
                ask_for(found, name, (one,), script)


def take_settings(found: Arguments, given: Given) -> None:
    """Arguments that the user says with --set."""
    _, quiet, _ = known_arguments()
    for setting in given.settings:
        name, taken = _name(setting), setting in given.used
        if not (name in found or decides(name) or quiet.fullmatch(name)):
            continue
        text = str(given.setting(setting))
        without = text.lower() in ("false", "none", "null", "no")
        if taken and not (without and name in found):  # a variable's, unless the argument that shall go is still there
            continue
        if without and name in unknown(found):
            high = ": experts are priced in every layer, and memory comes out too high" * bool(SHARES.match(name))
            found.notes.append(f"without {found.spelled(name)} {shown(found[name])}, as said{high}")
        found.pop(name, None)
        if not without:
            found[name] = True if text.lower() in ("true", "yes", "") else _value(name, text.split())
        found.questions = [one for one in found.questions if _name(one.name) != name]


def readable(found: Arguments) -> None:
    """Gaps that decide nothing as people write them."""
    for name, value in found.items():
        if isinstance(value, str) and is_open(value):
            found[name] = shown_text(value)
        elif isinstance(value, list):
            found[name] = [shown_text(str(one)) for one in value]
