"""How a job of Hugging Face's Trainer is split: DeepSpeed's JSON and fsdp of TrainingArguments."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.layout import CpMethod, Recompute
from planner.record import record
from planner.trainers.reading.given import Question
from planner.trainers.reading.settings import JSON, Settings, below, beside, file_settings
from planner.trainers.reading.shell.text import is_open
from planner.trainers.reading.values import percent

STRATEGIES = {
    "full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "hybrid_shard": 3, "hybrid_shard_zero2": 2,
    "1": 3, "2": 2, "3": 0, "4": 3, "5": 2, "true": 3, "false": 2,
}  # fmt: skip
"""fsdp_sharding_strategy and fsdp_reshard_after_forward -> state sharding.  [accelerate, utils/dataclasses.py]"""
FSDP_WORDS = (*STRATEGIES, "auto_wrap", "offload")
"""What ``fsdp`` of TrainingArguments holds.  [transformers, FSDPOption]"""
HOST_STATES, HOST_ALL = {"offload_optimizer": 100}, {"offload_parameters": 1}
PRESETS: dict[str, dict[str, int]] = {
    **{f"zero{stage}": {"zero": stage} for stage in range(4)},
    **{f"default-zero{stage}": {"zero": stage} for stage in (2, 3)},  # swift until 2
    **{f"zero2{one}offload": {"zero": 2, **HOST_STATES} for one in "_-"}, "zero3_offload": {"zero": 3, **HOST_ALL},
    **{f"ds_z{stage}_config.json": {"zero": stage} for stage in (0, 2, 3)},
    "ds_z2_offload_config.json": {"zero": 2, **HOST_STATES}, "ds_z3_offload_config.json": {"zero": 3, **HOST_ALL},
    "ds_z2_autotp_config.json": {"zero": 2, "tp": 2}, "ds_z3_fp8_config.json": {"zero": 3, **HOST_STATES},
    "deepspeed_configs/zero1.json": {"zero": 1}, "deepspeed_configs/zero1_torch_compile.json": {"zero": 1},
    "deepspeed_configs/zero2.json": {"zero": 2, **HOST_STATES},
    "deepspeed_configs/zero2_torch_compile.json": {"zero": 2, **HOST_STATES},
    "deepspeed_configs/zero3.json": {"zero": 3}, "deepspeed_configs/zero3_bf16.json": {"zero": 3},
    "deepspeed_configs/zero3_bf16_cpuoffload_all.json": {"zero": 3, **HOST_ALL},
}  # fmt: skip
"""Names whose file is known: words of ms-swift (swift/config), files of LLaMA-Factory (examples/deepspeed) and of axolotl
(deepspeed_configs), whose zero2 keeps optimizer states on the host.  [main of the three, 2026-11]"""
BUCKET = 500_000_000
"""reduce_bucket_size, where nothing is said.  [runtime/zero/config.py]"""
BOTH = "which is not modelled: offload both or neither"
QUIET_ZERO = re.compile(
    r"(.*\.)?(overlap_comm|contiguous_gradients|sub_group_size|reduce_bucket_size|reduce_scatter|allgather_\w+|stage3_\w+"
    r"|round_robin_gradients|pin_memory|buffer_\w+|fast_init|ignore_unused_parameters|elastic_checkpoint|use_multi_rank_bucket\w*"
    r"|load_from_fp32_weights|cpu_offload_use_pin_memory|zero_allow_untested_optimizer|zero_force_ds_cpu_optimizer|gradient_clipping|steps_per_print"
    r"|wall_clock_breakdown|moe\..*|scheduler\..*|optimizer\.params\..*|gradient_predivide_factor|prescale_gradients|communication_data_type"
    r"|(fp16|bf16)\.(?!\w*(master_weights|optimizer_states))\w+|zero_hpz_partition_size|comms_logger\..*|flops_profiler\..*|checkpoint\..*|logging\..*|compile\..*"
    r"|(tensorboard|wandb|csv_monitor)\..*|tensor_parallel\.partition_config\..*|hybrid_engine\.(?!enabled)\w+)"
)
"""Keys of DeepSpeed that change neither the layout nor, by more than a bucket, its memory."""


@record
class Sharding:
    """What says how a job is split, in the planner's words; None = the file does not say."""

    kind: str = "ddp"
    """'ddp', 'fsdp', 'deepspeed' or 'megatron'."""
    fields: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Fields of Layout other than dp, the batch, and recompute where nothing is said."""
    num_gpus: int | None = None
    gpus_per_node: int | None = None
    micro_batch_size: int | None = None
    accumulation: int | None = None
    batch: int | None = None
    """Sequences per step."""
    precision: str | None = None
    """Of mixed precision; 'no' = none."""
    optimizer: str | None = None
    """As DeepSpeed names it."""
    keeps_optimizer: bool = False
    """States on the host stay those of the optimizer that the trainer made."""
    compiled: bool = False
    """The launcher compiles the model."""
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Which document said it, where that is not the file itself."""
    hybrid: bool = False
    """Replicas of groups that are as large as a node."""
    version: int = 0
    """Of FSDP; 0 = not said."""
    buffers: int = 0
    """Elements of the buffers that DeepSpeed reduces gradients through."""


def preset(name: str) -> Sharding | None:
    """The DeepSpeed configuration that a name stands for. Raises PlannerError for one of axolotl's that is not modelled."""
    parts = Path(name.lower()).parts
    if parts and parts[-1] in ("zero3_bf16_cpuoffload_params.json", "zero3-offload"):  # the second of swift 2
        raise PlannerError(f"{name} keeps weights on the host and states on the GPU; {BOTH}")
    found = next((PRESETS[key] for key in ("/".join(parts[-2:]), parts[-1] if parts else "") if key in PRESETS), None)
    return None if found is None else Sharding(kind="deepspeed", fields=found)


ENGINES = ("zero3", "zero2", "zero1", "zero3_offload", "zero2_offload")
"""Presets that stand for a file of DeepSpeed which is not there."""


def deepspeed(value: Any, path: Path, where: str, given: Settings | None = None) -> Sharding:
    """A DeepSpeed configuration: the mapping itself, a file, or a name that says all. One that is not there is asked for among the
    questions of ``given``, or raises PlannerError."""
    if isinstance(value, Mapping):
        return _deepspeed(Settings(path, value, f"{where}: "))
    name = str(value)
    file = beside(path, name) or (below(path, name) if name.endswith(JSON) else None)
    if file is not None:
        return _deepspeed(Settings(file, file_settings(file, "a DeepSpeed configuration")))
    found = preset(name)
    if found is None and given is not None:
        about = f"{shown(name)} is not beside it; or put the file there"
        given.ask(Question(name=where, about=about, choices=ENGINES))
        return Sharding(kind="deepspeed", fields={"zero": 3})
    if found is None:
        raise PlannerError(
            f"{path}: {where} names {shown(name)}, which is not beside it; put the file there, or say --set {where}=zero3 (zero1, "
            "zero2, zero2_offload, zero3_offload)"
        )
    if name.endswith(JSON):
        own = f"{Path(name).name} is not there: taken as the file of that name which comes with its trainer"
        found = dataclasses.replace(found, notes=(*found.notes, own))
    return found


def _deepspeed(given: Settings) -> Sharding:
    zero = given.section("zero_optimization")
    stage = zero.size("stage", 0, least=0)
    optimizer, weights = (_device(zero, f"offload_{what}") for what in ("optimizer", "param"))
    # weights on the host are for stage 3 alone  [runtime/zero/config.py, offload_param]
    fields = {"zero": stage, **on_host(given, optimizer, weights if stage == 3 else "none", zero)}
    for name in ("zero_hpz_partition_size", "mics_shard_size"):
        if zero.size(name, 1, least=-1) > 1:
            raise PlannerError(f"{zero.where(name)}: hierarchical partitions of weights are not modelled")
    if (tp := given.section("tensor_parallel").size("autotp_size", 1, least=0)) > 1:
        fields["tp"] = tp
    if (sp := given.size("sequence_parallel_size")) > 1:
        fields |= {"cp": sp, "cp_method": int(CpMethod.A2A)}
    precision = next((one for one in ("bf16", "fp16") if given.section(one).get("enabled") is True), None)
    kind = given.section("optimizer").get("type")
    numbers = [
        None if given.get(name) in (None, "auto") else given.number(name)
        for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    ]
    return Sharding(
        kind="deepspeed", fields=fields, micro_batch_size=numbers[0], accumulation=numbers[1], batch=numbers[2],
        precision=precision, optimizer=None if kind is None else str(kind).lower(), notes=_state_dtypes(given),
        keeps_optimizer=given.get("zero_force_ds_cpu_optimizer") is False, buffers=_buffers(zero, stage),
        unread=tuple(one for one in given.left() if not QUIET_ZERO.fullmatch(one.split(" = ")[0].removeprefix("deepspeed: "))),
    )  # fmt: skip


def _buffers(zero: Settings, stage: int) -> int:
    """Elements that are allocated for gradients on their way, whole whatever is trained; auto is the square of the hidden size, of
    no weight.  [runtime/zero/stage_1_and_2.py: setup_buckets; stage3.py: __ipg_bucket_flat_buffer; transformers,
    integrations/deepspeed.py: trainer_config_finalize]"""
    said = zero.get("reduce_bucket_size", BUCKET)
    known = isinstance(said, int | float) and 0 <= said < 1e15
    if not stage or not known or (stage < 3 and zero.get("contiguous_gradients") is False):
        return 0
    return int(said) * (2 if stage < 3 and zero.get("overlap_comm") is True else 1)


def _state_dtypes(given: Settings) -> tuple[str, ...]:
    """Dtypes of states other than those that are priced.  [runtime/bf16_optimizer.py; runtime/constants.py]"""
    halves = (f"{kind}_{what}" for kind in ("bf16", "fp16") for what in ("master_weights_and_grads", "optimizer_states"))
    found = [one for one in halves if given.section(one[:4]).get(one) is True]
    notes = [f"{one}: states are priced in fp32: memory comes out too high" for one in found]
    if str(given.section("data_types").get("grad_accum_dtype", "bf16")).lower() in ("fp32", "float32"):
        notes.append("data_types.grad_accum_dtype: gradients are priced in 16 bits: memory comes out too low")
    if given.get("moe") is not None:
        notes.append("moe: no section that DeepSpeed reads: it spreads no experts by it")
    return tuple(notes)


def _device(zero: Settings, name: str) -> str:
    place = zero.section(name)
    for one in ("nvme_path", "ratio"):
        place.get(one)
    older = zero.flag("cpu_offload" if name == "offload_optimizer" else "cpu_offload_params")  # before DeepSpeed 0.3.16
    return str(place.get("device", "cpu" if older else "none")).lower()


def on_host(given: Settings, optimizer: str, weights: str, zero: Settings) -> dict[str, int]:
    """Fields of what waits in host memory. Raises PlannerError for what is not modelled."""
    if "nvme" in (optimizer, weights):
        raise PlannerError(f"{given.path}: DeepSpeed offloads to nvme, which is not modelled; device cpu is")
    if weights != "none" and optimizer == "none":
        raise PlannerError(f"{given.path}: weights are offloaded and optimizer states are not; {BOTH}")
    if weights != "none":
        return {"offload_parameters": 1}
    if optimizer == "none":
        return {}
    share = zero.section("offload_optimizer").get("ratio", 1.0)
    return {"offload_optimizer": percent(share, f"{given.path}: offload_optimizer.ratio")}


RESHARDS = (
    "reshard_after_forward is not said: ZeRO 3, as accelerate takes it; the Trainer of transformers 5 takes false, which keeps "
    "weights whole from the forward pass on"
)
"""[transformers, training_args.py: _process_fsdp_args]"""


def fsdp_section(part: Settings, prefix: str = "", strategy: str | None = None, version: int = 0) -> Sharding:
    """Settings of FSDP, with or without the prefix that accelerate gives them; ``version`` that stands beside them. Raises
    PlannerError."""
    version = int(part.number(f"{prefix}version", 0, least=0) or part.number("version", 0, least=0) or version)
    reshard = part.first(f"{prefix}reshard_after_forward", "reshard_after_forward")
    named = part.first(f"{prefix}sharding_strategy", "sharding_strategy")
    named = strategy or named  # the words beside the section go first  [transformers, training_args.py]
    # Version 1 keeps its strategy under either name; version 2 has only the yes or no.
    word = str(reshard if reshard is not None and (version == 2 or named is None) else named or "full_shard").lower()
    if word not in STRATEGIES:
        raise PlannerError(f"{part.where('sharding_strategy')} is {shown(word)}; a plan knows {', '.join(STRATEGIES)}")
    fields = {"zero": STRATEGIES[word]}
    if any(part.flag(name) for name in (f"{prefix}offload_params", "offload_params", "cpu_offload")):
        fields["offload_parameters"] = 1
    if any(part.flag(name) for name in (f"{prefix}activation_checkpointing", "activation_checkpointing")):
        fields["recompute"] = int(Recompute.FULL)
    hybrid = word in ("hybrid_shard", "hybrid_shard_zero2", "4", "5")
    return Sharding(kind="fsdp", fields=fields, hybrid=hybrid, version=version)


def casts_all(sharding: Sharding, precision: str) -> bool:
    """Whether DeepSpeed's engine turns all weights into half precision, frozen ones too.  [runtime/engine.py:
    _configure_distributed_model]"""
    return sharding.kind == "deepspeed" and precision in ("bf16", "fp16")


# ----------------------------------------------------------------------------------------------------- TrainingArguments


def _own_deepspeed(given: Settings) -> Sharding:
    """A program that writes its configuration of DeepSpeed itself, by --zero_stage and --offload (DeepSpeed-Chat)."""
    if given.data.get("zero_stage", given.usual.get("zero_stage")) is None:
        given.ask(Question(name="zero_stage", about="its own configuration of DeepSpeed", choices=("0", "1", "2", "3")))
    stage = given.size("zero_stage", 3, least=0)
    host = (HOST_ALL if stage == 3 else HOST_STATES) if given.flag("offload") else {}
    return Sharding(kind="deepspeed", fields={"zero": stage, **host})


def from_arguments(given: Settings, by_fsdp: bool = False, usual: str = "") -> Sharding | None:
    """What ``deepspeed``, ``fsdp`` and ``fsdp_config`` of TrainingArguments say; None = nothing. ``by_fsdp``: the second does
    nothing without the first; ``usual``: the first beside it, where it is not said.  [transformers, training_args.py] Raises
    PlannerError."""
    path = str(given.data.get("deepspeed") or "")
    there = is_open(path) and beside(given.path, path.rpartition("/")[2]) is not None  # copied to a folder of the run
    named = path.rpartition("/")[2] if there else given.get("deepspeed", choices=ENGINES)
    if named is None and isinstance(given.data.get("deepspeed_config"), str):  # as DeepSpeed's own launcher calls it
        named = given.get("deepspeed_config")
    if named is True or (named is None and given.get("zero_stage") is not None):
        return _own_deepspeed(given)
    if named not in (None, False):
        return deepspeed(named, given.path, f"{given.place}deepspeed", given)
    words, section = given.get("fsdp"), given.get("fsdp_config")
    if words == "no_shard" and section is None and given.said is not None and "fsdp" in given.said.settings:
        return Sharding()  # the answer to how a job is split: plain data parallel, whose weights keep the dtype they are loaded in
    text = " ".join(map(str, words)) if isinstance(words, list) else str(words or "")
    if text.lower() in ("", "false", "none") and (section is None or by_fsdp):
        return None
    text = text or usual
    unknown = next((one for one in text.replace(",", " ").lower().split() if one not in FSDP_WORDS), None)
    if unknown is not None and section is None:
        known = ", ".join(one for one in FSDP_WORDS if not one.isdigit())
        raise PlannerError(f"{given.where('fsdp')} is {shown(unknown)}; a plan knows {known}")
    if isinstance(section, str):
        file = beside(given.path, section)
        if file is None:
            raise PlannerError(
                f"{given.where('fsdp_config')} names {shown(section)}, which is not beside it; put the file there"
            )
        part = Settings(file, file_settings(file, "settings of FSDP"))
        inner = part.data.get("fsdp_config")
        if isinstance(inner, Mapping):  # swift: {"fsdp": ..., "fsdp_config": {...}}
            text, part = f"{text} {part.data.get('fsdp') or ''}", part.section("fsdp_config")
    else:
        part = given.section("fsdp_config")
    strategy = next((one for one in reversed(STRATEGIES) if re.search(rf"\b{one}\b", text) and not one.isdigit()), None)
    version = int(given.number("fsdp_version", 0, least=0) or 0)
    found = fsdp_section(part, "fsdp_", None if strategy in ("true", "false") else strategy, version)
    second = 2 in (version, part.number("fsdp_version"), part.number("version"))
    if second and found.fields["zero"] == 3 and part.first("fsdp_reshard_after_forward", "reshard_after_forward") is None:
        found = dataclasses.replace(found, notes=(*found.notes, RESHARDS))
    if re.search(r"\boffload\b", text):
        found = dataclasses.replace(found, fields={**found.fields, "offload_parameters": 1})
    return found
