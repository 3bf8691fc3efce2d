"""Experts of Megatron-DeepSpeed, deepspeed.moe.MoE, in Megatron's own words.

[Megatron-DeepSpeed, megatron/arguments.py and megatron/model/transformer.py: get_num_experts_per_layer, ParallelTransformerLayer]
"""

import math
import re

from planner.errors import PlannerError, shown
from planner.trainer import load_trainer
from planner.trainers.megatron.arguments import RENAMED, Arguments, known_arguments
from planner.trainers.reading.shell import is_open
from planner.trainers.reading.values import not_priced

EVERY = 2
"""--expert-interval by default: every second layer has experts."""
LEAST = 4
"""--moe-min-capacity by default, which the cost model counts with."""
QUIET = (
    "moe_loss_coeff", "moe_eval_capacity_factor", "create_moe_param_group", "disable_moe_top2_2nd_expert_sampling",
    "moe_top2_2nd_expert_sampling", "moe_train_capacity_factor", "moe_min_capacity", "expert_interval",
)  # fmt: skip
"""What is read here or changes neither time nor memory."""
OF_EXPERTS = ("mlp_type", "disable_moe_token_dropping", "moe_token_dropping", "use_tutel", "enable_expert_tensor_parallelism")
"""How experts run."""
OWN_WORDS = re.compile(r".*(expert|moe|(^|_)(ep|edp)(_|$)|pft|gating|router).*")
"""Arguments of forks that say how experts run."""


def is_deepspeed(found: Arguments) -> bool:
    """Whether DeepSpeed's engine trains."""
    return bool(found.get("deepspeed") or found.get("deepspeed_config") or found.get("zero_stage") is not None)


def take(found: Arguments) -> None:
    """Says DeepSpeed's experts in Megatron's words, ``found.dense_masks`` being their capacity factor. Raises PlannerError for
    those that are not priced."""
    given = found.get("num_experts")
    listed = [str(one) for one in given] if isinstance(given, list) else [str(given)]
    if not is_deepspeed(found) or any(is_open(one) for one in listed):
        return
    for old, new in RENAMED.items() if found.dumped else ():
        if old in found:
            found.setdefault(new, found.pop(old))
    if given is None or all(one in ("0", "1") for one in listed):
        for one in (*QUIET, *OF_EXPERTS):  # say nothing of dense layers
            found.pop(one, None)
        return
    if len(set(listed)) > 1:
        raise PlannerError(f"{found.where}: --num-experts is {' '.join(listed)[:80]}; a plan knows the same number in all")
    found["num_experts"] = listed[0]
    _refuse(found)
    interval = found.number("expert_interval", EVERY, least=1)
    found |= {"moe_layer_freq": str(interval), "expert_tensor_parallel_size": "1"}
    found.setdefault("moe_router_topk", "1")
    found.dense_masks = _factor(found)
    _least_capacity(found)
    for one in QUIET:
        found.pop(one, None)
    found.notes.append(
        "experts: DeepSpeed's own layer, whose dense masks take memory and time; since August 2026 (#8195) it gathers by index"
    )


def _refuse(found: Arguments) -> None:
    """Raises PlannerError for experts that the masks do not describe."""
    if found.number("zero_stage") > 2:
        raise PlannerError(f"{found.where}: DeepSpeed's experts do not run with ZeRO 3 (runtime/engine.py: MoE not supported)")
    said = {
        "mlp_type": found.get("mlp_type") == "residual",
        "disable_moe_token_dropping": found.get("disable_moe_token_dropping"),
        "moe_token_dropping": found.get("moe_token_dropping") is False,  # as a dump has it
        "use_tutel": found.get("use_tutel"),
        "enable_expert_tensor_parallelism": found.number("tensor_model_parallel_size", 1) > 1
        and found.get("enable_expert_tensor_parallelism"),
        "ds_sequence_parallel_size": found.number("ds_sequence_parallel_size", 1) > 1,
    }
    wrong = [name for name, here in said.items() if here]
    held, quiet, counted = known_arguments()
    if not found.dumped:
        wrong += [
            name for name, value in found.items()
            if OWN_WORDS.fullmatch(name) and name not in (*QUIET, *said, *counted) and value not in (False, None, "0", "false")
            and not (held.fullmatch(name) or quiet.fullmatch(name) or name.startswith(("log_", "no_")))
        ]  # fmt: skip
    if wrong:
        raise not_priced(found.where, [found.spelled(one) for one in wrong], wrong)
    for one in said:
        found.pop(one, None)


def _factor(found: Arguments) -> str:
    """The capacity factor as the trainer's option spells it. Raises PlannerError."""
    given = str(found.get("moe_train_capacity_factor", "1"))
    known = [one for one in load_trainer("megatron-deepspeed").choices.options["expert_masks"] if one != "off"]
    factor = float(given) if re.fullmatch(r"\d{1,4}(\.\d{0,4})?", given) else 0.0
    if (said := next((one for one in known if float(one) == factor), None)) is None:
        raise PlannerError(
            f"{found.where}: --moe-train-capacity-factor is {shown(given)}; capacity factors {', '.join(known)} are priced: --set "
            "moe_train_capacity_factor=1 imports the job with another one"
        )
    return said


def _least_capacity(found: Arguments) -> None:
    """Raises PlannerError where --moe-min-capacity gives experts another capacity than the default would."""
    names = ("micro_batch_size", "seq_length", "num_experts", "moe_router_topk", "moe_min_capacity")
    given = found.get("moe_min_capacity")
    if given is None or any(not str(found.get(one)).isdigit() for one in names):
        return
    micro, length, experts, top_k, least = (int(str(found[one])) for one in names)
    room = math.ceil(micro * length * float(found.dense_masks) * top_k / experts)
    if max(room, least) != max(room, LEAST):
        raise PlannerError(
            f"{found.where}: --moe-min-capacity {least} decides the capacity of {experts} experts for {micro * length} tokens, and "
            f"only {LEAST} is priced; --set moe_min_capacity={LEAST} imports the job with it"
        )
