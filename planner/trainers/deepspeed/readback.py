"""DeepSpeed: ds_config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.layout import CpMethod, Recompute
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given
from planner.trainers.reading.values import json_mapping, left_over, percent, quotient, read_text, whole_number

KNOWN = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization", "bf16",
    "fp16", "optimizer", "tensor_parallel", "sequence_parallel_size", "expert_parallel",
)  # fmt: skip
QUIET = ("gradient_clipping", "steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer", "scheduler",
         "zero_force_ds_cpu_optimizer")  # fmt: skip
"""Keys that change neither time nor memory."""
ZERO = ("stage", "overlap_comm", "contiguous_gradients", "reduce_bucket_size", "reduce_scatter", "allgather_partitions",
        "allgather_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
        "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save",
        "offload_optimizer", "offload_param", "round_robin_gradients")  # fmt: skip
OPTIMIZERS = {"adam": "adam", "adamw": "adam", "sgd": "sgd", "muon": "muon"}

NAMES = {"adamw_torch_fused": "adam", "adamw_torch": "adam", "adamw_torch_8bit": "adam_8bit", "sgd": "sgd"}
"""Optimizers of transformers."""


def read(path: Path, given: Given) -> Reading:
    """The layout of a DeepSpeed configuration. Raises PlannerError.

    Recompute and the sequence length stand in the script: they are taken from a training.json next to the file, as the
    export writes it, else no recompute is assumed and said.
    """
    data, num_gpus = given.filled(json_mapping(path, read_text(path), "a DeepSpeed configuration")), given.num_gpus
    zero = _block(path, data, "zero_optimization")
    tp = whole_number(_block(path, data, "tensor_parallel").get("autotp_size", 1) or 1, f"{path}: autotp_size")
    cp = whole_number(data.get("sequence_parallel_size", 1), f"{path}: sequence_parallel_size")
    micro, steps, batch = (_number(path, data, key) for key in KNOWN[1:3] + KNOWN[:1])
    dp = (
        None
        if num_gpus is None
        else quotient(num_gpus, tp * cp, f"{path}: GPUs by autotp_size x sequence_parallel_size")
    )
    micro, steps, dp = _batch(
        path, micro, steps, None if batch is None else quotient(batch, tp, f"{path}: train_batch_size"), dp
    )
    experts = _block(path, data, "expert_parallel")
    ep = experts.get("autoep_size", 1) if experts.get("enabled") else 1
    offload = _block(path, zero, "offload_optimizer")
    share = (
        0
        if offload.get("device", "none") == "none"
        else percent(offload.get("ratio", 1.0), f"{path}: offload_optimizer.ratio")
    )
    unknown = left_over(data, KNOWN + QUIET) + left_over(zero, ZERO, "zero_optimization.")
    fields = {
        "tp": tp, "cp": cp, "dp": dp, "micro_batch_size": micro, "num_microbatches": steps,
        "offload_optimizer": share, "offload_parameters": 0, **_weights(path, zero, offload),
        "zero": whole_number(zero.get("stage", 0), f"{path}: zero_optimization.stage", least=0),
        "ep": whole_number(ep, f"{path}: expert_parallel.autoep_size"), "recompute": int(Recompute.NONE),
        "sequence_parallel": 0, **({"cp_method": int(CpMethod.A2A)} if cp > 1 else {}),
    }  # fmt: skip
    script = path.with_name("training.json")
    settings = json_mapping(script, read_text(script), "training.json") if script.is_file() else {}
    arguments = _block(script, settings, "training_arguments")
    length = settings.get("sequence_length")
    if length is not None:
        length = whole_number(length, f"{script}: sequence_length")
    notes = []
    optimizer = _optimizer(path, data) or NAMES.get(str(arguments.get("optim")), "adam")
    if arguments:
        fields["recompute"] = int(Recompute.FULL if arguments.get("gradient_checkpointing") else Recompute.NONE)
        fields["offload_activations"] = int(bool(settings.get("offload_activations")))
    else:
        notes = [
            "recompute stands in the script (gradient_checkpointing); none is taken: say --recompute full where it is on"
        ]
    return Reading(
        trainer="deepspeed", fields=fields, num_gpus=tp * cp * dp, global_batch_size=micro * steps * dp,
        sequence_length=length, precision=_precision(path, data),
        optimizer=optimizer, unread=tuple(unknown), notes=tuple(notes),
    )  # fmt: skip


def _block(path: Path, data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = data.get(key) or {}
    if not isinstance(found, Mapping):
        raise PlannerError(f"{path}: {key} is {shown(found)}; it must be a mapping")
    return found


def _weights(path: Path, zero: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, int]:
    """Weights on the host, where optimizer states then are as well."""
    device, states = _block(path, zero, "offload_param").get("device", "none"), optimizer.get("device", "none")
    if "nvme" in (device, states):
        raise PlannerError(f"{path}: zero_optimization offloads to nvme, which is not modelled; device cpu is")
    if device == "none":
        return {}
    if states == "none":
        raise PlannerError(f"{path}: offload_param without offload_optimizer keeps states on the GPU, which is not modelled")
    return {"offload_parameters": 1, "offload_optimizer": 0}


def _number(path: Path, data: Mapping[str, Any], key: str) -> int | None:
    value = data.get(key)
    if value is None or value == "auto":
        return None
    return whole_number(value, f"{path}: {key}")


def _batch(path: Path, micro: int | None, steps: int | None, batch: int | None, dp: int | None) -> tuple[int, int, int]:
    """Micro batch, accumulation and replicas from what is given: batch = micro x steps x dp."""
    what = f"{path}: train_batch_size by the other batch keys"
    if dp is None:
        if micro is None or steps is None or batch is None:
            raise PlannerError(f"{path}: the number of GPUs does not follow from the batch keys; say it with --gpus")
        dp = quotient(batch, micro * steps, what)
    if micro is None:
        if batch is None:
            raise PlannerError(f"{path}: train_micro_batch_size_per_gpu and train_batch_size are missing or 'auto'")
        micro = quotient(batch, (steps or 1) * dp, what)
    if steps is None:
        steps = 1 if batch is None else quotient(batch, micro * dp, what)
    if batch is not None and micro * steps * dp != batch:
        raise PlannerError(
            f"{path}: train_batch_size is {batch}, but {micro} per GPU x {steps} accumulation steps x {dp} replicas = "
            f"{micro * steps * dp}"
        )
    return micro, steps, dp


def _precision(path: Path, data: Mapping[str, Any]) -> str:
    for name in ("bf16", "fp16"):
        if _block(path, data, name).get("enabled") is True:
            return name
    return "fp32"


def _optimizer(path: Path, data: Mapping[str, Any]) -> str | None:
    kind = _block(path, data, "optimizer").get("type")
    if kind is None:
        return None
    if str(kind).lower() not in OPTIMIZERS:
        raise PlannerError(f"{path}: optimizer.type is {kind}; the planner knows {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[str(kind).lower()]
