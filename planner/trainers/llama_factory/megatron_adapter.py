"""LLaMA-Factory over Megatron Core (USE_MCA=1): its own arguments and those of mcore_adapter.
[alibaba/ROLL, mcore_adapter/training_args.py; LLaMA-Factory, train/mca/workflow.py]"""

import re
from typing import Any

from planner.errors import PlannerError, shown
from planner.layout import CpMethod
from planner.trainer_options import spell
from planner.trainers.megatron.recompute_words import recompute
from planner.trainers.megatron.trainer_words import GRADIENT_OF_LOGITS, loss_fusion
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Question
from planner.trainers.reading.megatron_degrees import degrees, states_on_the_host
from planner.trainers.reading.named_models import named_model
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.values import quotient

DEGREES = tuple(f"{one}_parallel_size" for one in ("tensor_model", "pipeline_model", "expert_model", "virtual_pipeline_model"))
"""Arguments that the other trainers of LLaMA-Factory do not have."""
SWITCHES = ("use_distributed_optimizer", "use_mca", "use_megatron_bridge", "use_packed_sequences")
BRIDGE = (
    "use_megatron_bridge", "mixed_precision", "use_packed_sequences", "megatron_pretrained_checkpoint", "export_hf_on_finish",
    "extra_config",
)  # fmt: skip
"""Arguments of its other way over Megatron, USE_MEGATRON_BRIDGE=1.  [hparams/megatron_bridge_args.py]"""
NOT_PRICED = (
    "pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "moe_layer_recompute", "moe_expert_capacity_factor", "mtp_num_layers", "cuda_graph_impl", "fp8", "fp8_recipe", "fp8_param",
    "freeze_language_model", "use_badam", "use_galore", "use_apollo",
)  # fmt: skip
"""What mcore_adapter takes and decides layers, memory or time otherwise than is read here."""
IN_A_BLOCK = re.compile(
    r"max_sequence_length|max_position_embeddings|position_embedding_type|rotary_\w+|rope_\w+|mrope_\w+|init_method_std"
)
"""Keys of additional_configs, which go into the model's configuration, that change neither memory nor degrees."""
QUIET = re.compile(
    r"bias_activation_fusion|apply_rope_fusion|overlap_\w+|moe_grouped_gemm|moe_aux_loss_coeff|variable_seq_lengths|delay_grad_reduce"
    r"|calculate_per_token_loss|sequence_packing|ddp_\w+|distrib_optim_\w+|ckpt_\w+|save_hf_model|check_for_nan_\w+|optim"
    r"|moe_shared_expert_overlap|moe_router_dtype|masked_softmax_fusion|use_mca|transformer_impl"
    r"|moe_permute_fusion|gradient_accumulation_fusion|use_cpu_initialization|tp_comm_\w+"
)


def over_megatron(given: Settings) -> bool:
    """Whether the arguments say a degree of Megatron's, or switch on what it alone has."""
    return any(given.get(one) is not None for one in DEGREES) or any(given.flag(one) for one in SWITCHES)


def parse(given: Settings, objective: str, length: int, quiet: re.Pattern[str], num_gpus: int | None) -> Reading:
    """The job; ``length`` at which sequences are cut, ``quiet``: settings of LLaMA-Factory that decide nothing. Raises
    PlannerError."""
    if (bridge := next((one for one in BRIDGE if given.get(one) not in (None, False)), None)) is not None:
        what = "LLaMA-Factory over Megatron-Bridge is not read; import it as one of its recipes"
        raise PlannerError(f"{given.where(bridge)}: {what}")
    if given.get("finetuning_type", "lora") != "full" or objective != "lm":
        raise PlannerError(f"{given.path}: of LLaMA-Factory over Megatron (MCA) pt and sft of all weights are read")
    found = [one for one in NOT_PRICED if given.get(one) not in (None, False, 0)]
    found += _of_the_block(given.get("additional_configs"))
    if given.get("recompute_method") not in (None, "uniform") or given.size("recompute_num_layers", 1) > 1:
        found.append("recompute_num_layers")
    name = given.label("model_name_or_path")
    model, notes = named_model(name, given.path) if name else (None, ())
    fields, asked = _layout(given), _asked(given)
    steps = given.size("gradient_accumulation_steps", 1)
    batch = fields["micro_batch_size"] * steps  # of one replica: to_plan asks for the GPUs first
    if num_gpus is not None:
        dp = quotient(num_gpus, fields["tp"] * fields["cp"] * fields["pp"], f"{given.path}: GPUs by the degrees")
        fields |= {"dp": dp, "num_microbatches": steps}
        batch *= dp
    trainer = _trainer(given)
    of_loss = (GRADIENT_OF_LOGITS,) * ("loss_fusion=on" in trainer)
    return Reading(
        trainer=trainer,
        fields=fields, model=model, model_name=name, sequence_length=length, global_batch_size=batch, num_gpus=num_gpus,
        precision=_precision(given), optimizer=_optimizer(given), notes=(*notes, *_dispatch(given, fields), *of_loss),
        questions=(*map(_not_priced, found), *asked),
        unread=tuple(one for one in given.left() if not re.fullmatch(rf"{quiet.pattern}|{QUIET.pattern}", one.split(" = ")[0])),
    )  # fmt: skip


def _of_the_block(block: Any) -> list[str]:
    """additional_configs with the keys that may decide memory or degrees, where it has such keys or is no mapping."""
    if block in (None, False) or block == {}:
        return []
    if not isinstance(block, dict):
        return ["additional_configs"]
    keys = [str(one) for one in block if not re.fullmatch(rf"{IN_A_BLOCK.pattern}|{QUIET.pattern}", str(one))]
    return [f"additional_configs.{', '.join(keys)[:80]}"] if keys else []


def _not_priced(name: str) -> Question:
    """What is asked about an argument that a plan cannot say; a key of a block is left out with its block."""
    what = "decides memory or degrees and is not priced; false imports the job without"
    block, _, key = name.partition(".")
    return Question(name=block, about=f"{key}: {what}" if key else what, choices=("false",))


def _trainer(given: Settings) -> str:
    """Megatron Core with the options that the arguments set."""
    loss = loss_fusion(given.flag("cross_entropy_loss_fusion"), given.get("cross_entropy_fusion_impl"))
    overlap = {"gradient_overlap": "on" if given.flag("overlap_grad_reduce") else "off"}
    return spell("megatron", {**overlap, **({"loss_fusion": loss} if loss != "off" else {})})


def _layout(given: Settings) -> dict[str, int]:
    held = degrees(given)
    return {
        **held, "micro_batch_size": given.size("per_device_train_batch_size", 8),
        "sequence_parallel": int(given.flag("sequence_parallel") and held["tp"] > 1),
        "zero": int(given.flag("use_distributed_optimizer")), **recompute(given, usual="none"),
        **states_on_the_host(given, usual=0.0),
        **({"cp_method": int(CpMethod.RING)} if held["cp"] > 1 else {}),
    }  # fmt: skip


def _asked(given: Settings) -> tuple[Question, ...]:
    """What the two ways over Megatron take by themselves, each another value."""
    if given.get("use_distributed_optimizer") is not None:
        return ()
    about = "off over MCA, on over Megatron-Bridge, and the file does not say which of them it is for"
    return (Question(name="use_distributed_optimizer", about=about, choices=("true", "false")),)


def _precision(given: Settings) -> str:
    if not (given.flag("bf16") or given.flag("pure_bf16") or given.flag("fp16")):
        raise PlannerError(f"{given.path}: neither bf16 nor fp16: fp32 over Megatron is not priced")
    return "fp16" if given.flag("fp16") else "bf16"


def _optimizer(given: Settings) -> str:
    name = str(given.get("optimizer", "adam"))
    if name not in ("adam", "sgd"):
        raise PlannerError(f"{given.where('optimizer')} is {shown(name)}; mcore_adapter has adam and sgd")
    return name


def _dispatch(given: Settings, fields: dict[str, Any]) -> tuple[str, ...]:
    """A note where experts gather all tokens, which is what mcore_adapter does by itself."""
    gathers = given.get("moe_token_dispatcher_type", "allgather") == "allgather"
    note = "tokens are gathered by all ranks of the experts; priced as sent to their experts alone"
    return (note,) if gathers and fields["ep"] > 1 else ()
