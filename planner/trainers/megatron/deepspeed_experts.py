"""Experts of Megatron-DeepSpeed, deepspeed.moe.MoE, in Megatron's own words.

[Megatron-DeepSpeed, megatron/arguments.py and megatron/model/transformer.py: get_num_experts_per_layer, ParallelTransformerLayer]
"""

import math
import re
from pathlib import Path

from planner.errors import PlannerError, shown
from planner.trainer import load_trainer
from planner.trainers.megatron.arguments import RENAMED, Arguments, known_arguments
from planner.trainers.reading.settings import beside
from planner.trainers.reading.shell import is_open
from planner.trainers.reading.shell.text import CLOSE
from planner.trainers.reading.values import not_priced, read_text

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
PIPE = re.compile(r"LayerSpec\(\s*ParallelTransformerLayerPipe\b((?:(?!LayerSpec\().){0,2000})", re.DOTALL)
"""What the pipeline engine builds a layer from.  [megatron/model/gpt_model.py, GPTModelPipe]"""
HANDS_EXPERTS_ON = re.compile(
    r"(disable_)?moe_top2_2nd.*|moe_(num_)?capacity_bins.*|use_torch_compile.*|use_fused_sdpa.*|cache_fp8.*|verify_checkpoint.*|hpu_.*|fp8_e5m2"
)
"""Arguments of Megatron-DeepSpeed since March 2024, and of Habana's, whose pipeline hands experts on.  [gpt_model.py, #373]"""
OF_EXPERTS_ALONE = ("num_experts", "expert_model_parallel_size", "moe_expert_parallel_size", "moe_router_topk", "topk")


def is_deepspeed(found: Arguments) -> bool:
    """Whether DeepSpeed's engine trains."""
    return bool(found.get("deepspeed") or found.get("deepspeed_config") or found.get("zero_stage") is not None)


def _has_stages(found: Arguments) -> bool:
    """Whether its pipeline engine trains, of one stage too. It does not run with ZeRO above 1, nor with Ulysses, nor where a fork's
    own program has no such layers."""
    ulysses = str(found.get("ds_sequence_parallel_size", "1")) not in ("0", "1")
    if not is_deepspeed(found) or found.get("no_pipeline_parallel", found.dumped) or found.number("zero_stage") > 1 or ulysses:
        return False
    program = _program(found)
    started = beside(Path(found.where), str(program), (".py",)) if program.suffix == ".py" else None
    return started is None or "Pipe(" in read_text(started)


def _program(found: Arguments) -> Path:
    """What is started; of a folder that is not known, by its end."""
    behind = found.program.rpartition(CLOSE)[2]
    return Path(f"/{behind.lstrip('/')}" if CLOSE in found.program else behind)


def of_pipeline_engine(found: Arguments) -> None:
    """Leaves out what DeepSpeed's pipeline engine does not take: virtual stages, and other recompute of layers than a uniform one,
    before which --checkpoint-activations goes.  [megatron/model/gpt_model.py, GPTModelPipe; transformer.py]"""
    _older_recompute(found)
    if str(found.pop("use_fused_sdpa", "")).lower() in ("true", "1"):  # of Habana's fork, which keeps no scores either
        found.setdefault("use_flash_attn", True)
    if not _has_stages(found):
        return
    lost = [one for one in VIRTUAL if found.get(one)]
    if found.get("recompute_granularity") == "full" and found.get("recompute_method") != "uniform":
        lost.append("recompute_granularity")
    for one in lost:
        what = f"{found.spelled(one)} {found.pop(one)}: not taken by DeepSpeed's pipeline engine, nor by the plan"
        found.notes.append(f"{what}{UNIFORM if one == 'recompute_granularity' else ''}")


def _older_recompute(found: Arguments) -> None:
    """Lets --checkpoint-activations go before Megatron's later words, in a granularity of its own that Habana's fork has: selective
    stands alone, full does nothing without it.  [Habana, megatron/model/transformer.py, checkpoint_core_attention]"""
    whole, own = found.get("checkpoint_activations"), found.pop("checkpoint_activations_granularity", None)
    if not whole and own != "selective":
        unused = f"--checkpoint-activations-granularity {own} does nothing without --checkpoint-activations"
        found.notes += [unused] * (own is not None and not found.dumped)
        return
    kept = {"recompute_granularity": own or "full", "recompute_method": "uniform", "recompute_activations": False}
    given = {one: value for one in kept if (value := found.pop(one, None)) not in (None, kept[one])}
    if own == "selective":
        found["recompute_granularity"] = own
    before = "--checkpoint-activations" + f"-granularity {own}" * (own is not None)
    found.notes += [f"{found.spelled(one)} {value}: dropped, {before} goes before it" for one, value in given.items()]


UNIFORM = ", so no layer is recomputed; --recompute-method uniform or --checkpoint-activations does it"
VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")


def take(found: Arguments) -> None:
    """Says DeepSpeed's experts in Megatron's words, ``found.dense_masks`` being their capacity factor. Raises PlannerError for
    those that are not priced."""
    if _switch(found):
        return
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
    if _in_dense_pipeline(found):
        _drop(found)
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


def _switch(found: Arguments) -> bool:
    """Says Megatron's SwitchMLP in its later words: so many whole MLPs in every layer of every rank, which go before --num-experts.
    False without it.
    [megatron/model/transformer.py, SwitchMLP; ParallelTransformerLayer]"""
    given = found.get("num_experts_switch")
    if given in (None, False) or is_open(str(given)):
        return False
    count = found.number("num_experts_switch", 1, least=1)
    top_k = found.get("topk") or found.get("moe_router_topk") or "1"
    for one in ("num_experts_switch", *OF_EXPERTS_ALONE, *QUIET, *OF_EXPERTS):
        found.pop(one, None)
    if count == 1:
        return True
    found |= {"num_experts": str(count), "moe_router_topk": top_k, "moe_layer_freq": "1", "expert_model_parallel_size": "1"}
    found.notes.append(
        f"--num-experts-switch: {count} whole MLPs in every layer and on every rank, {top_k} for a token, without a balancing "
        "loss; priced as Megatron's experts gathered by index"
    )
    return True


def _in_dense_pipeline(found: Arguments) -> bool:
    """Whether DeepSpeed's pipeline engine trains, whose layers get no number of experts unless the code around the script hands it
    on."""
    if not _has_stages(found):
        return False
    places = (_program(found).parent / "megatron/model/gpt_model.py", Path("megatron/model/gpt_model.py"))
    file = next((one for place in places if (one := beside(Path(found.where), str(place), (".py",)))), None)
    if file is None and any(HANDS_EXPERTS_ON.fullmatch(one) for one in found):
        return False
    built = PIPE.findall(read_text(file)) if file is not None else []
    return not any("num_experts" in one for one in built)


def _drop(found: Arguments) -> None:
    """Leaves out experts that are never built, with a note."""
    named = " and ".join(
        f"{written} {' '.join(value) if isinstance(value, list) else value}"
        for name, written in (("num_experts", "--num-experts"), ("expert_model_parallel_size", "--moe-expert-parallel-size"))
        if (value := found.get(name)) is not None
    )
    for one in list(found):
        if one in (*OF_EXPERTS_ALONE, *OF_EXPERTS) or (OWN_WORDS.fullmatch(one) and "teacher" not in one):
            del found[one]
    found.notes.append(
        f"experts: dropped, {named} count for nothing: without --no-pipeline-parallel DeepSpeed's pipeline engine trains, whose "
        "layers (GPTModelPipe) are all dense until April 2024; --set no_pipeline_parallel=true imports the job with its experts"
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
