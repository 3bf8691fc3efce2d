"""nanotron: its YAML file, also as a script starts its program with it."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, shown
from planner.layout import Recompute, Schedule
from planner.model import ModelSpec, from_hugging_face
from planner.trainer_options import spell
from planner.trainers.reading.commands import launched, with_files
from planner.trainers.reading.configuration import Reading, known_model
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.twice import given_twice
from planner.trainers.reading.values import left_over, whole_number

PARALLELISM = ("dp", "pp", "tp", "pp_engine", "tp_mode", "tp_linear_async_communication", "tp_recompute_allgather",
               "recompute_layer", "expert_parallel_size", "context_parallel_size")  # fmt: skip
SECTIONS = ("general", "parallelism", "model", "tokens", "optimizer", "checkpoints", "data_stages", "logging", "tokenizer",
            "lighteval", "profiler", "metrics_logging", "s3_upload")  # fmt: skip
UNPRICED = {"expert_parallel_size": "whose ranks compute the same tokens", "context_parallel_size": "which is not priced"}
"""Degrees that must be 1, and why.  [nanotron, parallel/context.py]"""
ENGINES = {"1f1b": Schedule.ONE_F_ONE_B, "afab": Schedule.GPIPE}
OPTIMIZERS = {"adamw": "adam", "adam": "adam", "sgd": "sgd"}
MODEL_WORDS = (
    r"is_\w+_config|head_dim|(bos|eos|pad)_token_id|hidden_(act|size)|initializer_range|intermediate_size|max_position_embeddings"
    r"|num_(attention_heads|hidden_layers|key_value_heads)|attention_bias|pretraining_tp|rms_norm_eps|rope_\w+|tie_word_embeddings"
    r"|use_cache|vocab_size|_\w+|z_loss_\w+|log_attn_probs|moe_\w+|num_experts_per_tok(en)?|no_rope_layer"
)
"""Words of its Llama and Qwen2, whose layers are those of transformers.  [config/models_config.py]"""
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "double": "fp32"}


SELECTIVE = (
    "parallelism.recompute_granularity selective is the recompute of attention's scores, which flash attention does by itself: no "
    "more than that is recomputed"
)
"""Until 0.2 nanotron reads the word and does nothing by it.  [nanotron 0.1, models/llama.py, CoreAttention.checkpoint_attention]"""
NOTHING = ("general", "checkpoints", "logging", "lighteval", "profiler", "metrics_logging", "s3_upload", "kill_switch_path",
           "experiment_logger")  # fmt: skip
"""Parts that decide nothing of a plan."""


PROGRAM = r"\S*run_train\w*\.py"
"""Programs that take such a file with --config-file."""


def read(path: Path, given: Given) -> Reading:
    """The layout, batch and sizes of the model. Raises PlannerError with file and key."""
    if path.suffix.lower() in (".yaml", ".yml"):
        data, notes = _of_file(path)
        reading = parse(path, given.filled(data), given)
        return dataclasses.replace(reading, notes=(*reading.notes, *notes))
    found = launched(path, given, PROGRAM)
    reading = parse(path, with_files(path, found, given, ("config_file",)).data, given, found.num_gpus)
    return dataclasses.replace(reading, notes=(*reading.notes, *found.notes))


def _of_file(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The mapping in a file, and what was taken for what: of a part that decides nothing and is given twice the last counts, as in
    PyYAML, which nanotron reads it with. Raises PlannerError for any other key."""
    try:
        return library.read_yaml(path), ()
    except PlannerError as error:
        keys = given_twice(library.read_text(path)) if "is given twice" in str(error) else []
        if not keys or any(one.partition(".")[0] not in NOTHING for one in keys):
            raise
    return library.parse_yaml(library.read_text(path), str(path), last=True), (f"{', '.join(keys)}: given twice, the last counts",)


def parse(path: Path, data: Mapping[str, Any], given: Given, started: int | None = None) -> Reading:
    """The job that settings describe; ``started``: processes of the command that starts it. Raises PlannerError."""
    num_gpus = given.num_gpus or started
    parallel, tokens = _section(path, data, "parallelism"), _section(path, data, "tokens")
    optimizer, model = _section(path, data, "optimizer"), _section(path, data, "model")
    dp, pp, tp = (whole_number(parallel.get(name), f"{path}: parallelism.{name}") for name in ("dp", "pp", "tp"))
    if num_gpus is not None and num_gpus != dp * pp * tp:
        who = "--gpus says" if given.num_gpus else "its command starts"
        raise PlannerError(f"{path}: dp {dp} x pp {pp} x tp {tp} = {dp * pp * tp} GPUs, but {who} {num_gpus}")
    for name, why in UNPRICED.items():
        if parallel.get(name, 1) != 1:
            sets = f"--set parallelism.{name}=1 imports the job without"
            raise PlannerError(f"{path}: parallelism.{name} is {shown(parallel[name])}, {why} in nanotron; {sets}")
    _refuse_own(path, parallel)
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
    notes = (SELECTIVE,) if str(parallel.get("recompute_granularity")).lower() == "selective" else ()
    waits = split and tp > 1 and not parallel.get("tp_linear_async_communication")
    return Reading(
        trainer=spell("nanotron", {"tp_overlap": "off"} if waits else {}), fields=fields, num_gpus=dp * pp * tp,
        global_batch_size=micro * steps * dp,
        sequence_length=whole_number(tokens.get("sequence_length"), f"{path}: tokens.sequence_length"),
        precision=_precision(path, model, optimizer), optimizer=_optimizer(path, optimizer), model=_model(model, path),
        questions=_own_layers(model, given), unread=tuple(left_over(data, SECTIONS)), notes=notes,
    )  # fmt: skip


def _refuse_own(path: Path, parallel: Mapping[str, Any]) -> None:
    """Raises PlannerError for words of a fork: nanotron has no others here, and they deal layers or say what is recomputed."""
    for name in (one for one, value in parallel.items() if one not in PARALLELISM and value not in (None, False, [], {})):
        if name == "recompute_granularity" and str(parallel[name]).lower() == "selective":
            continue  # of 2024: read with a note
        said = f"{path}: parallelism.{name} is {shown(parallel[name])}, which no plan of nanotron has"
        raise PlannerError(f"{said}; --set parallelism.{name}=null imports the job without it")


def _section(path: Path, data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    if not isinstance(found, Mapping):
        raise PlannerError(f"{path}: the section '{name}' is missing; this is not a nanotron configuration")
    return found


def _precision(path: Path, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> str:
    """Of weights and matrix products, over fp32 masters. Raises PlannerError for what a plan of nanotron does not have."""
    kind = str(model.get("dtype") or "bfloat16").removeprefix("torch.")
    if kind not in PRECISIONS:
        raise PlannerError(f"{path}: model.dtype is {shown(kind)}; a plan of nanotron knows {', '.join(PRECISIONS)}")
    if PRECISIONS[kind] != "fp32" and optimizer.get("accumulate_grad_in_fp32") is False:
        raise PlannerError(
            f"{path}: optimizer.accumulate_grad_in_fp32 is false: no fp32 master weights, and gradients and moments in {kind}, "
            "which is not priced; --set optimizer.accumulate_grad_in_fp32=true imports the job with them"
        )
    return PRECISIONS[kind]


def _optimizer(path: Path, optimizer: Mapping[str, Any]) -> str:
    factory = optimizer.get("optimizer_factory")
    name = str((factory if isinstance(factory, Mapping) else {}).get("name") or "adamW")
    if name.lower() not in OPTIMIZERS:
        sets = "--set optimizer.optimizer_factory.name=adamW imports the job with that"
        raise PlannerError(f"{path}: optimizer.optimizer_factory.name is {shown(name)}; nanotron has adamW and sgd; {sets}")
    return OPTIMIZERS[name.lower()]


def _own_layers(model: Mapping[str, Any], given: Given) -> tuple[Question, ...]:
    """What is asked about words of the model that nanotron's own do not have: its reader refuses such keys, so a fork has them."""
    sizes = model.get("model_config")
    odd = [name for name, value in (sizes.items() if isinstance(sizes, Mapping) else ()) if value not in (None, False)
           and not re.fullmatch(MODEL_WORDS, str(name))]  # fmt: skip
    if not odd or given.model is not None:
        return ()
    about = f"layers of this fork: model_config has {', '.join(shown(one) for one in odd[:3])}; a model that is like it"
    return (Question(name="--model NAME", about=about),)


def _model(model: Mapping[str, Any], path: Path) -> ModelSpec | None:
    """The architecture, from the sizes in the file as config.json of transformers; None where they are not read, and it is asked
    for. Raises PlannerError for one that is no transformer."""
    sizes = model.get("model_config")
    if not isinstance(sizes, Mapping):
        return None
    if sizes.get("is_mamba_config"):
        raise PlannerError(f"{path}: model.model_config has is_mamba_config: Mamba is not priced; transformers are")
    if (experts := sizes.get("moe_num_experts")) and sizes.get("is_llamoe_config"):
        return known_model(from_hugging_face({**sizes, "model_type": "mixtral", "num_local_experts": experts}, source=str(path)))
    if not (sizes.get("is_llama_config") or sizes.get("is_qwen2_config")):
        return None
    bias = bool(sizes.get("is_qwen2_config") and sizes.get("attention_bias"))
    if not sizes.get("moe_config"):
        kind = "qwen3" if sizes.get("_use_qk_norm") else "qwen2" if bias else "llama"
        heads = whole_number(sizes.get("num_attention_heads"), f"{path}: model_config.num_attention_heads")
        head = {"head_dim": whole_number(sizes.get("hidden_size"), f"{path}: model_config.hidden_size") // heads}
        return known_model(from_hugging_face({**head, **sizes, "model_type": kind}, source=str(path)))
    mixed = from_hugging_face({**sizes, "model_type": "qwen2_moe", **_experts(sizes, path)}, source=str(path))
    return known_model(dataclasses.replace(mixed, qkv_bias=bias))


def _experts(sizes: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Experts of nn/moe.py in the words of Qwen's config.json.  [config/models_config.py, MoEConfig]"""
    given = sizes["moe_config"]
    if not isinstance(given, Mapping):
        raise PlannerError(f"{path}: model_config.moe_config is {shown(given)}; it must be a section of settings")
    if given.get("layers", [-1]) != [-1]:
        raise PlannerError(f"{path}: moe_config.layers is {shown(given['layers'])}; only experts in all layers, [-1], are read")
    shared = given.get("shared_expert_intermediate_size", 5632) if given.get("enable_shared_expert") else 0
    return {
        "num_experts": given.get("num_experts", 8), "num_experts_per_tok": given.get("top_k", 2),
        "moe_intermediate_size": given.get("moe_intermediate_size", 1408), "shared_expert_intermediate_size": shared,
    }  # fmt: skip
