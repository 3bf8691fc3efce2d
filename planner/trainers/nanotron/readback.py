"""nanotron: its YAML file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, shown
from planner.layout import Recompute, Schedule
from planner.model import ModelSpec, from_hugging_face
from planner.trainers.reading.configuration import Reading, known_model
from planner.trainers.reading.given import Given
from planner.trainers.reading.values import left_over, whole_number

PARALLELISM = ("dp", "pp", "tp", "pp_engine", "tp_mode", "tp_linear_async_communication", "tp_recompute_allgather",
               "recompute_layer", "expert_parallel_size", "context_parallel_size")  # fmt: skip
SECTIONS = ("general", "parallelism", "model", "tokens", "optimizer", "checkpoints", "data_stages", "logging", "tokenizer",
            "lighteval", "profiler", "metrics_logging", "s3_upload")  # fmt: skip
ENGINES = {"1f1b": Schedule.ONE_F_ONE_B, "afab": Schedule.GPIPE}
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "double": "fp32"}


def read(path: Path, given: Given) -> Reading:
    """The layout, batch and sizes of the model. Raises PlannerError with file and key."""
    data, num_gpus = given.filled(library.read_yaml(path)), given.num_gpus
    parallel, tokens = _section(path, data, "parallelism"), _section(path, data, "tokens")
    optimizer, model = _section(path, data, "optimizer"), _section(path, data, "model")
    dp, pp, tp = (whole_number(parallel.get(name), f"{path}: parallelism.{name}") for name in ("dp", "pp", "tp"))
    if num_gpus is not None and num_gpus != dp * pp * tp:
        raise PlannerError(f"{path}: dp {dp} x pp {pp} x tp {tp} = {dp * pp * tp} GPUs, but --gpus says {num_gpus}")
    for name in ("expert_parallel_size", "context_parallel_size"):
        if parallel.get(name, 1) != 1:
            raise PlannerError(
                f"{path}: parallelism.{name} is {shown(parallel[name])}; the planner's nanotron has 1 only"
            )
    engine = str(parallel.get("pp_engine") or "afab").lower()
    if engine not in ENGINES:
        raise PlannerError(f"{path}: parallelism.pp_engine is {engine}; nanotron knows {', '.join(ENGINES)}")
    micro = whole_number(tokens.get("micro_batch_size"), f"{path}: tokens.micro_batch_size")
    steps = whole_number(tokens.get("batch_accumulation_per_replica"), f"{path}: tokens.batch_accumulation_per_replica")
    split = str(parallel.get("tp_mode") or "ALL_REDUCE").upper() == "REDUCE_SCATTER"
    fields = {
        "tp": tp, "pp": pp, "dp": dp, "micro_batch_size": micro, "num_microbatches": steps,
        "schedule": int(ENGINES[engine] if pp > 1 else Schedule.ONE_F_ONE_B), "sequence_parallel": int(split and tp > 1),
        "zero": whole_number(optimizer.get("zero_stage", 0), f"{path}: optimizer.zero_stage", least=0),
        "recompute": int(Recompute.FULL if parallel.get("recompute_layer") else Recompute.NONE),
    }  # fmt: skip
    factory = optimizer.get("optimizer_factory") or {}
    return Reading(
        trainer="nanotron", fields=fields, num_gpus=dp * pp * tp, global_batch_size=micro * steps * dp,
        sequence_length=whole_number(tokens.get("sequence_length"), f"{path}: tokens.sequence_length"),
        precision=PRECISIONS.get(str(model.get("dtype", "bfloat16")), "bf16"),
        optimizer="sgd" if factory.get("name") == "sgd" else "adam", model=_model(model, path),
        unread=(*left_over(data, SECTIONS), *left_over(parallel, PARALLELISM, "parallelism.")),
    )  # fmt: skip


def _section(path: Path, data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    if not isinstance(found, Mapping):
        raise PlannerError(f"{path}: the section '{name}' is missing; this is not a nanotron configuration")
    return found


def _model(model: Mapping[str, Any], path: Path) -> ModelSpec | None:
    """The architecture, from the sizes in the file as config.json of transformers."""
    sizes = model.get("model_config")
    if not isinstance(sizes, Mapping) or not (sizes.get("is_llama_config") or sizes.get("is_qwen2_config")):
        return None
    kind = "qwen2" if sizes.get("is_qwen2_config") and sizes.get("attention_bias") else "llama"
    return known_model(from_hugging_face({**sizes, "model_type": kind}, source=str(path)))
