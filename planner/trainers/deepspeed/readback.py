"""DeepSpeed: ds_config.json."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.layout import CpMethod, Recompute
from planner.trainers.reading.configuration import NEEDED, Reading
from planner.trainers.reading.given import Given, Question, ask, value_of
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
_BARE = re.compile(r"(?<=:)(\s*)(?!(?:True|False|None|NaN|Infinity)\b)([A-Z]\w{1,60})(?=\s*[,}\n])")
"""A word of a template, in whose place a script puts a value."""
_PLACE = re.compile(r"\$\{(\w+)\}")
"""The same as this reader keeps it."""
PLACES = {
    **dict.fromkeys(KNOWN[:3], ()), "zero_optimization.stage": ("0", "1", "2", "3"),
    **dict.fromkeys(("bf16.enabled", "fp16.enabled"), ("true", "false")),
}  # fmt: skip
"""Keys that decide, which a template may leave to its script -> their values."""


def read(path: Path, given: Given) -> Reading:
    """The layout of a DeepSpeed configuration. Raises PlannerError.

    Recompute and the sequence length stand in the script: they are taken from a training.json next to the file, as the
    export writes it, else they are asked for.
    """
    data, num_gpus = _data(path, given), given.num_gpus
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
    script = path.with_name("training.json")
    settings = json_mapping(script, read_text(script), "training.json") if script.is_file() else {}
    arguments = _block(script, settings, "training_arguments")
    length, said = settings.get("sequence_length"), given.setting("gradient_checkpointing")
    questions = []
    if said is None and not arguments:
        about = "recompute, which stands in the script"
        questions = [Question(name="gradient_checkpointing", about=about, choices=("true", "false"))]
    if open_ := [*_places(data), *_open(given, micro, steps, batch, dp)]:  # one sentence asks for all
        needed = {"model": given.model, "sequence_length": given.sequence_length or length}
        ask(str(path), [*open_, *questions, *(NEEDED[name] for name, value in needed.items() if value is None)])
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
    if length is not None:
        length = whole_number(length, f"{script}: sequence_length")
    notes = [*_auto_precision(path, data), *_beside(data)]
    optimizer = _optimizer(path, data) or NAMES.get(str(arguments.get("optim")), "adam")
    if said is not None:
        fields["recompute"] = int(Recompute.NONE if said.lower() in ("false", "no", "0", "none") else Recompute.FULL)
    elif arguments:
        fields["recompute"] = int(Recompute.FULL if arguments.get("gradient_checkpointing") else Recompute.NONE)
        fields["offload_activations"] = int(bool(settings.get("offload_activations")))
    return Reading(
        trainer="deepspeed", fields=fields, num_gpus=tp * cp * dp, global_batch_size=micro * steps * dp,
        sequence_length=length, precision=_precision(path, data),
        optimizer=optimizer, unread=tuple(unknown), notes=tuple(notes),
        questions=tuple(questions),
    )  # fmt: skip


def _data(path: Path, given: Given) -> dict[str, Any]:
    """What the file says; the bare words of a template as ${WORD}, or as the user says them."""
    text, what = read_text(path), "a DeepSpeed configuration"
    try:
        return given.filled(json_mapping(path, text, what))
    except PlannerError:
        words = {one[2]: given.setting(one[2]) for one in _BARE.finditer(text)}
        if not words:
            raise
    values = {one: f"${{{one}}}" if said is None else value_of(said) for one, said in words.items()}
    text = _BARE.sub(lambda one: one[1] + json.dumps(values[one[2]]), text)
    others = {name: value for name, value in given.settings.items() if name not in words}
    return given.with_settings(others).filled(json_mapping(path, text, what))


def _places(data: Mapping[str, Any]) -> list[Question]:
    """Questions for what a template leaves to its script."""
    found = []
    for key, choices in PLACES.items():
        section, _, name = key.rpartition(".")
        block = data.get(section) if section else data
        place = _PLACE.fullmatch(str(block.get(name))) if isinstance(block, Mapping) else None
        found += [Question(name=place[1], about=key, choices=choices)] if place is not None else []
    return found


def _open(given: Given, micro: int | None, steps: int | None, batch: int | None, dp: int | None) -> list[Question]:
    """Questions for batch keys that are 'auto' or missing, and for the number of GPUs where it does not follow from them."""
    found = []
    if micro is None and (batch is None or (steps is None and given.global_batch_size is not None)):
        about = "train_micro_batch_size_per_gpu is 'auto' or missing: sequences per forward pass"
        found.append(Question(name="--micro-batch-size M", about=about))
    if dp is None and None in (micro, steps, batch):
        shared = f": they share {batch // micro} micro batches" if batch and micro and batch > 1 else ""
        found.append(Question(name="--gpus N", about=f"the number of GPUs does not follow from the batch keys{shared}"))
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
    if _PLACE.fullmatch(str(value)):
        return 1  # asked for
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


def _beside(data: Mapping[str, Any]) -> list[str]:
    """A note on sections that change the step: lengths that grow, tokens or layers that are dropped, weights that are pruned."""
    names = ("curriculum_learning", "data_efficiency", "compression_training", "progressive_layer_drop", "elasticity")
    on = [one for one in names if re.search(r'"enabled": (true|"\$)', json.dumps(data.get(one)))]
    return [f"{', '.join(on)}: not in the plan, which is of the whole model, batch and length"] * bool(on)


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
