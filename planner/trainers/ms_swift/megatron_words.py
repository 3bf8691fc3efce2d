"""Words of megatron sft that change its trainer, its model or what is trained, and those that no plan has."""

import re
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, shown
from planner.layout import CpMethod
from planner.model import ModelSpec
from planner.trainer_options import spell
from planner.trainers.megatron.core_settings import BY_MOMENTS, CP_METHODS, RECIPES
from planner.trainers.megatron.trainer_words import changes, loss_fusion
from planner.trainers.reading.given import Question, setting_of_a_fork
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.values import not_priced
from planner.trainers.reading.versions import named_version

TRAINER = "ms-swift-megatron"
SIZES = {
    "num_layers": "num_layers", "hidden_size": "hidden_size", "ffn_hidden_size": "ffn_size", "num_attention_heads": "num_heads",
    "num_query_groups": "num_kv_heads", "kv_channels": "head_dim", "padded_vocab_size": "vocab_size",
}  # fmt: skip
OF_EXPERTS = {
    "num_experts": "num_experts", "moe_ffn_hidden_size": "expert_ffn_size", "moe_router_topk": "top_k",
    "moe_shared_expert_intermediate_size": "shared_expert_ffn_size",
}  # fmt: skip
"""Sizes that go before those of config.json.  [swift/megatron/arguments, until 3: MegatronArguments]"""
SOME_WEIGHTS = (
    "freeze_parameters", "freeze_parameters_ratio", "freeze_parameters_regex", "trainable_parameters", "trainable_parameters_regex",
)  # fmt: skip
NO_PLAN: dict[str, tuple[str, str]] = {
    "fp8_param_gather": ("weights that lie in 8 bits are not modelled for ms-swift", "false"),
    "mtp_shared_weights": ("one module that predicts all further tokens is not modelled", "false"),
    "reference_free": ("preferences without a reference model are not modelled", "false"),
    "main_params_dtype": ("the optimizer's own copy of the weights in another type is not modelled", "fp32"),
    "sequence_packing_scheduler": ("context parallelism that changes from pack to pack is not modelled", "null"),
    "target_regex": ("layers with adapters by a pattern; null = by target_modules, all linear ones if unsaid", "null"),
}
"""Words that no plan has: why, and the value without."""
QUIET_VALUES = ("", "none", "null", "false", "fp32", "dp_balanced")


def built_sizes(given: Settings, model: ModelSpec | None) -> dict[str, Any]:
    """Fields of the model that the arguments set, whatever its config.json has."""
    names = SIZES if model is None or not model.is_moe else {**SIZES, **OF_EXPERTS}
    said = {field: given.number(name) for name, field in names.items()}
    fields: dict[str, Any] = {field: value for field, value in said.items() if value is not None}
    untied = given.get("untie_embeddings_and_output_weights")
    if untied is not None:
        fields["tied_embeddings"] = not given.flag("untie_embeddings_and_output_weights")
    return fields


def require_whole(given: Settings) -> None:
    """Raises PlannerError for a choice of weights by their names; asks about what no plan has."""
    some = [one for one in SOME_WEIGHTS if given.get(one) not in (None, [], 0, 0.0, "0")]
    if some:
        raise not_priced(str(given.path), some, some)
    for name, (why, without) in NO_PLAN.items():
        value = given.get(name)
        eights = name != "fp8_param_gather" or given.get("fp8_format") is not None
        if eights and value is not None and str(value).lower() not in QUIET_VALUES:
            given.ask(Question(name=name, about=f"{why}; {without} imports the job without it", choices=(without,)))


def trainer(given: Settings, model: ModelSpec | None) -> str:
    """The trainer with the options that the arguments set."""
    backend, router = str(given.get("attention_backend", "flash")), str(given.get("moe_router_dtype", "fp32"))
    local = given.get("transformer_impl") == "local"
    said = {
        "gradient_dtype": "bf16" if str(given.get("main_grads_dtype", "fp32")) == "bf16" else "",
        "gradient_overlap": "on" if given.flag("overlap_grad_reduce") else "off",
        "tp_overlap": "on" if given.flag("tp_comm_overlap") else "off",
        "transformer_impl": "local" if local else "",
        "attention_kernel": "unfused" if backend in ("unfused", "local") and not local else "",
        "loss_fusion": cross_entropy(given)[0],
        "dropout": "on" if any(_above_zero(given, one) for one in ("hidden_dropout", "attention_dropout")) else "off",
    }
    if model is None or model.is_moe:
        deep = given.flag("moe_enable_deepep") or given.get("moe_token_dispatcher_type") == "flex"
        said |= {
            "expert_dispatch": "deepep" if deep else "", "router_dtype": "fp32" if router in ("fp32", "fp64") else "bf16",
            "expert_overlap": "on" if given.flag("overlap_moe_expert_parallel_comm") else "",
        }  # fmt: skip
    return spell(TRAINER, {key: value for key, value in said.items() if value and changes(TRAINER, key, value)})


def cross_entropy(given: Settings) -> tuple[str, tuple[str, ...]]:
    """(loss_fusion, what was taken for what): by default Transformer Engine's from 4.0 to 4.3, with Transformer Engine 2.8.
    [megatron_args.py, _init_megatron_args]"""
    low, high = named_version(given.path, "ms-swift") or ((), ())
    third = given.data.get("train_type") is not None or bool(high and high < (4,))  # in which it is off unless it is said
    word, fused = given.get("cross_entropy_fusion_impl"), given.flag("cross_entropy_loss_fusion", not third)
    if word is not None or not fused:
        return "in_place" if fused and word == "te" else loss_fusion(fused, word), ()
    if third or low >= (4, 4):
        return "native", ()
    if low >= (4,) and high and high < (4, 4):
        said = ".".join(map(str, low))
        return "in_place", (f"ms-swift {said}: cross_entropy_fusion_impl te, the default until 4.3 with Transformer Engine 2.8",)
    return "native", (
        "cross_entropy_fusion_impl is not said: native, as from ms-swift 4.4 on, 10 bytes a logit; te, the default of 4.0 to 4.3 "
        "(--set cross_entropy_fusion_impl=te), keeps 2",
    )


def _above_zero(given: Settings, name: str) -> bool:
    return str(given.get(name, "0")).strip("0.") != ""


def precision(given: Settings) -> str:
    """What products are computed in. Raises PlannerError."""
    dtype = str(given.get("torch_dtype", "bfloat16"))
    if given.get("fp4_format") is not None:
        raise PlannerError(f"{given.where('fp4_format')}: products in 4 bits are not modelled for ms-swift; --set fp4_format=null")
    if given.get("fp8_format") is None and given.get("fp8") is None:
        if given.flag("fp16") or dtype in ("float16", "fp16"):
            return "fp16"
        single = dtype in ("float32", "fp32") and not given.flag("bf16")  # autocast in fp16 unless fp16 is false
        return "bf16" if not single else "fp16" if given.get("fp16") is None else "fp32"
    recipe = str(given.get("fp8_recipe", "delayed"))
    known = {"delayed": "fp8", **{name: one for one, (_, name) in RECIPES.items() if one != "nvfp4"}}
    if recipe not in known:
        raise PlannerError(f"{given.where('fp8_recipe')} is {shown(recipe)}; a plan knows {', '.join(known)}")
    return known[recipe]


def optimizer(given: Settings) -> tuple[str, tuple[str, ...]]:
    """(the optimizer with the type of its states, what was taken for what)."""
    name = str(given.get("optimizer", "adam")).removeprefix("dist_")
    if not given.flag("use_precision_aware_optimizer"):
        return BY_MOMENTS.get((name, "fp32"), name), ()
    first, second = (str(given.get(one, "fp32")) for one in ("exp_avg_dtype", "exp_avg_sq_dtype"))
    note = (f"exp_avg_sq_dtype {second} is priced as exp_avg_dtype {first}",) * (first != second)
    return BY_MOMENTS.get((name, first), name), note


def ring(given: Settings) -> CpMethod:
    """How keys and values of other ranks come. Raises PlannerError."""
    method = given.get("cp_comm_type", ["p2p"])
    word = str(method[0] if isinstance(method, list) and method else method)
    if word not in CP_METHODS:
        raise PlannerError(f"{given.where('cp_comm_type')} is {shown(word)}; a plan knows {', '.join(CP_METHODS)}")
    return CpMethod(CP_METHODS[word])


def with_extra(given: Settings) -> Settings:
    """The settings with those of Megatron Core that megatron_extra_kwargs holds as JSON."""
    for name in ("megatron_extra_kwargs", "extra_megatron_kwargs"):
        more = given.data.get(name)
        if isinstance(more, str) and more.strip().startswith("{"):
            more = library.parse_json(more, given.where(name))
        if isinstance(more, dict):
            given.asked.add(f"{given.place}{name}")
            given = Settings(given.path, {**more, **given.data}, given.place, given.asked, given.said)
    return given


def of_a_fork(given: Settings, quiet: re.Pattern[str]) -> tuple[Question, ...]:
    """What is asked about words that no version of ms-swift has."""
    known = set(str(library.read_yaml(Path(__file__).with_name("known_arguments.yaml"))["names"]).split())
    left = [one.partition(" = ")[0::2] for one in given.left()]
    strange = [(one, value) for one, value in left if one.split(".")[0] not in known and not quiet.fullmatch(one)]
    return tuple(setting_of_a_fork(one, "ms-swift", "false" if value == "True" else "null") for one, value in strange)
