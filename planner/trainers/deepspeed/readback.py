"""DeepSpeed: ds_config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.layout import CpMethod, Recompute
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, Question, ask
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
    export writes it, else they are asked for.
    """
    data, num_gpus = given.filled(json_mapping(path, read_text(path), "a DeepSpeed configuration")), given.num_gpus
    zero = _block(path, data, "zero_optimization")
    tp = whole_number(_block(path, data, "tensor_parallel").get("autotp_size", 1) or 1, f"{path}: autotp_size")
    cp = whole_number(data.get("sequence_parallel_size", 1), f"{path}: sequence_parallel_size")
    micro, steps, batch = (_number(path, data, key) for key in KNOWN[1:3] + KNOWN[:1])
    if given.micro_batch_size or given.global_batch_size:  # they go before, and accumulation follows from them
        micro, steps, batch = given.micro_batch_size or micro, None, given.global_batch_size or batch
    dp = (
        None
        if num_gpus is None
        else quotient(num_gpus, tp * cp, f"{path}: GPUs by autotp_size x sequence_parallel_size")
    )
    if open_ := _open(given, micro, steps, batch, dp):
        ask(str(path), open_)
    of_replica = batch if batch is None or given.global_batch_size else quotient(batch, tp, f"{path}: train_batch_size")
    micro, steps, dp = _batch(path, micro, steps, of_replica, dp)
    experts = _block(path, data, "expert_parallel")
    ep = experts.get("autoep_size", 1) if experts.get("enabled") else 1
    offload = _block(path, zero, "offload_optimizer")
    ratio = percent(offload.get("ratio", 1.0), f"{path}: offload_optimizer.ratio")
    share = 0 if offload.get("device", "none") == "none" else ratio
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
    notes: list[str] = []
    notes += _auto_precision(path, data)
    optimizer = _optimizer(path, data) or NAMES.get(str(arguments.get("optim")), "adam")
    said, questions = given.setting("gradient_checkpointing"), []
    if said is not None:
        fields["recompute"] = int(Recompute.NONE if said.lower() in ("false", "no", "0", "none") else Recompute.FULL)
    elif arguments:
        fields["recompute"] = int(Recompute.FULL if arguments.get("gradient_checkpointing") else Recompute.NONE)
        fields["offload_activations"] = int(bool(settings.get("offload_activations")))
    else:
        about = "recompute, which stands in the script"
        questions = [Question(name="gradient_checkpointing", about=about, choices=("true", "false"))]
    return Reading(
        trainer="deepspeed", fields=fields, num_gpus=tp * cp * dp, global_batch_size=micro * steps * dp,
        sequence_length=length, precision=_precision(path, data),
        optimizer=optimizer, unread=tuple(unknown), notes=tuple(notes),
        questions=tuple(questions),
    )  # fmt: skip


def _open(given: Given, micro: int | None, steps: int | None, batch: int | None, dp: int | None) -> list[Question]:
    """Questions for batch keys that are 'auto' or missing, and for the number of GPUs where it does not follow from them."""
    found = []
    if micro is None and (batch is None or (steps is None and given.global_batch_size is not None)):
        about = "train_micro_batch_size_per_gpu is 'auto' or missing: sequences per forward pass"
        found.append(Question(name="--micro-batch-size M", about=about))
    if dp is None and None in (micro, steps, batch):
        found.append(Question(name="--gpus N", about="the number of GPUs does not follow from the batch keys"))
    return found


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
        assert micro is not None and steps is not None and batch is not None, "asked for before"
        dp = quotient(batch, micro * steps, what)
    if micro is None:
        assert batch is not None, "asked for before"
        micro = quotient(batch, (steps or 1) * dp, what)
    if steps is None:
        steps = 1 if batch is None else quotient(batch, micro * dp, what)
    if batch is not None and micro * steps * dp != batch:
        raise PlannerError(
            f"{path}: train_batch_size is {batch}, but {micro} per GPU x {steps} accumulation steps x {dp} replicas = "
            f"{micro * steps * dp}"
        )
    return micro, steps, dp


def _auto_precision(path: Path, data: Mapping[str, Any]) -> list[str]:
    if "auto" not in [str(_block(path, data, one).get("enabled")) for one in ("bf16", "fp16")]:
        return []
    return [f"precision: 'auto' leaves it to the script; {_precision(path, data)} is taken"]


def _precision(path: Path, data: Mapping[str, Any]) -> str:
    said = {name: str(_block(path, data, name).get("enabled", False)).lower() for name in ("bf16", "fp16")}
    for wanted in ("true", "auto"):
        for name in ("bf16", "fp16"):
            if said[name] == wanted:
                return name
    return "fp32"


def _optimizer(path: Path, data: Mapping[str, Any]) -> str | None:
    kind = _block(path, data, "optimizer").get("type")
    if kind is None:
        return None
    if str(kind).lower() not in OPTIMIZERS:
        raise PlannerError(f"{path}: optimizer.type is {kind}; the planner knows {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[str(kind).lower()]
