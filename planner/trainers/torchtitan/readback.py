"""torchtitan: a Python configuration module, a TOML file of 0.2, a saved JSON configuration, or a command line."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.layout import CpMethod, Module, Recompute, Schedule
from planner.model import ModelSpec
from planner.trainer_options import spell
from planner.trainers.bundle.fully_shard import SCHEDULES
from planner.trainers.reading.configuration import Reading, model_asked
from planner.trainers.reading.fine_tuning import adapter_targets, adapters_on_tables
from planner.trainers.reading.given import MOST_SHOWN, Given, OpenQuestionsError, Question, ask
from planner.trainers.reading.values import left_over, not_priced, quotient, read_text, whole_number
from planner.trainers.torchtitan.casting import cast_of
from planner.trainers.torchtitan.flavors import spec_of
from planner.trainers.torchtitan.forms import EAGER_LOSS, sections
from planner.trainers.torchtitan.loads import is_room, loads_of
from planner.trainers.torchtitan.own_registry import of_products
from planner.trainers.torchtitan.own_words import notes_of, of_apart, of_default_type, of_its_kind, of_muon, of_stand_in
from planner.trainers.torchtitan.python_modules import Sections
from planner.trainers.torchtitan.stages import pipeline

DEFAULTS: dict[str, dict[str, Any]] = {
    "parallelism": {
        "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": -1, "fsdp_reshard_after_forward": "default",
        "tensor_parallel_degree": 1, "context_parallel_degree": 1, "pipeline_parallel_degree": 1,
        "pipeline_parallel_schedule": "1F1B", "pipeline_parallel_microbatch_size": 1, "pipeline_parallel_microbatches": None,
        "num_pp_microbatches": 1,
        "pipeline_parallel_layers_per_stage": None, "pipeline_parallel_first_stage_less_layers": 1,
        "pipeline_parallel_last_stage_less_layers": 1, "pipeline_parallel_split_points": None,
        "pipeline_parallel_schedule_csv": None, "context_parallel_rotate_method": "allgather",
        "expert_parallel_degree": 1, "module_fqns_per_model_part": None,
        "enable_async_tensor_parallel": False, "expert_tensor_parallel_degree": None, "expert_parallel_comm_backend": "standard",
        "enable_sequence_parallel": True, "disable_loss_parallel": False,
    },
    "training": {
        "local_batch_size": 8, "global_batch_size": -1, "seq_len": 2048, "enable_cpu_offload": False, "dtype": "float32",
        "mixed_precision_param": "bfloat16", "mixed_precision_reduce": "float32",
        "num_tokens_per_microbatch_per_dp_rank": None, "num_tokens_per_train_step": -1,
        "max_context_length": None, "gradient_accumulation_steps": 1, "enable_float8_linear": False,
    },
}  # fmt: skip
"""Keys that decide the layout and the batch, with torchtitan's defaults."""
QUIET = ("context_parallel_load_balancer", "context_parallel_ptrr_mask_key", "spmd_backend", "steps", "enable_compiled_autograd",
         "disable_cuda_graphs", "max_norm", "gc_freq", "gc_debug", "warmup_steps", "dataset",
         "dataset_path", "seed", "deterministic", "enable_fsdp_symm_mem", "data_parallel_type", "debug_moe_force_load_balance",
         "pipeline_parallel_expert_parallel_overlap")  # fmt: skip
"""Keys that a plan has a fixed answer for, or that change neither time nor memory."""

DECIDES = re.compile(
    r"float8|fp[48]|mxfp|[48]_?bit|quant|lora|galore|offload|frozen|freeze|(recompute|checkpoint)|parallel_(degree|size)|micro_?batch"
    r"|accum(ulat|_|$)|batch_size|teacher|distill|(^|[._])ema([._]|$)|dtype|precision"
    r"|ulysses|context_parallel_(type|impl)|tp2ep"
)
"""Words of a fork's own keys of these sections that decide memory, precision or degrees."""
OF_EVALUATION = re.compile(r"\w+\.(e?val|validation|evaluation)_")
"""Keys that are about no step of the training."""


def read(path: Path, said: Given | None = None) -> Reading:
    """The layout of a torchtitan configuration; the number of GPUs where data_parallel_shard_degree is -1. Raises PlannerError."""
    said = said or Given()
    try:
        return reading_of(path, sections(path, read_text(path), said), said)
    except OpenQuestionsError as error:
        which = error.questions[0]
        if which.name != "config" or len(error.questions) > 1:
            raise
        ask(str(path), [which, *_of_its_functions(path, said, which.choices)])


def _of_its_functions(path: Path, said: Given, names: tuple[str, ...]) -> list[Question]:
    """What the functions of a module leave open, so that it is asked together with which of them is meant."""
    found: list[Question] = []
    for name in names[:MOST_SHOWN]:
        try:
            read(path, replace(said, settings={**said.settings, "config": name}, questions=[], used=set()))
        except OpenQuestionsError as error:
            found += error.questions
        except PlannerError:
            continue
    return list({one.name: one for one in found}.values())


def _require_language_model(path: Path, unread: list[str]) -> None:
    """Raises PlannerError for a configuration of a diffusion model, which torchtitan trains too, and for a masked language model
    of a fork, whose attention sees both sides."""
    if any(one.endswith(("img_size", "classifier_free_guidance_prob")) for one in unread):
        raise PlannerError(f"{path}: it trains a model of images; torchtitan's language models are read")
    if masked := next((one for one in unread if re.search(r"\.(mlm|mask)_(probability|prob|ratio)$", one)), None):
        raise PlannerError(f"{path}: {masked} makes it a masked language model, whose attention is not causal: not modelled")


def reading_of(path: Path, given: Sections, said: Given) -> Reading:
    """The layout that sections say, whatever form they came in. Raises PlannerError."""
    other = given.get("other", {})
    parallel, training = ({**known, **given.get(name, {})} for name, known in DEFAULTS.items())
    types, asked = of_default_type(path, training, said)
    quiet = (*QUIET, *types, *["hybridep"] * is_room(parallel.get("hybridep")))
    unread = [one for name, known in DEFAULTS.items() for one in left_over(given.get(name, {}), (*known, *quiet), f"{name}.")]
    _require_language_model(path, unread)
    switched = [one for one in unread if str(given[one.split(".")[0]][one.split(".")[1]]).lower() not in ("false", "none", "")]
    if wrong := [one for one in switched if DECIDES.search(one) and not _is_usual(one, training) and not OF_EVALUATION.match(one)]:
        raise not_priced(str(path), wrong, wrong)

    def degree(key: str) -> int:
        return whole_number(parallel[key], f"{path}: parallelism.{key}")

    tp, cp, pp, ep = (degree(f"{name}_parallel_degree") for name in ("tensor", "context", "pipeline", "expert"))
    replicate, shard = degree("data_parallel_replicate_degree"), parallel["data_parallel_shard_degree"]
    questions = [*_questions(path, parallel, other, tp), *asked]
    spec, own = said.spec() or spec_of(other), other.get("own_settings")
    if own and "expert_parallel_degree" not in given.get("parallelism", {}) and spec is not None and spec.is_moe:
        about = f"{shown(own)} has settings of its own, among them the degree of experts"
        questions.append(Question(name="parallelism.expert_parallel_degree", about=about))
    gpus = said.num_gpus or given.get("started", {}).get("gpus")
    if shard == -1 and gpus is None:
        questions.append(_of_gpus(str(given.get("started", {}).get("each", ""))))
    if questions:
        ask(str(path), [*questions, *([] if spec or said.model else [model_asked(str(other.get("called") or ""))])])
    if shard == -1:
        shard = quotient(gpus or 1, replicate * tp * cp * pp, f"{path}: GPUs by the degrees that are given")
    dp = replicate * whole_number(shard, f"{path}: parallelism.data_parallel_shard_degree")
    older = _of_older_words(given.get("training", {}), training)
    length, micro, batch = _batch(path, parallel, training, said, pp=pp, dp=dp)
    schedule, chunks, split = pipeline(path, parallel, pp, spec)
    passed = (*older, *_passes(path, parallel, training, schedule, (pp, micro, batch // dp)))
    loads, room = loads_of(given, {**other, **parallel}, spec, ep)
    kept = parallel["fsdp_reshard_after_forward"]
    if kept == "default":  # torchtitan: never with a pipeline, else always
        kept = "never" if pp > 1 else "always"
    if kept not in ("always", "never"):
        raise PlannerError(f"{path}: parallelism.fsdp_reshard_after_forward is {shown(kept)}; a plan knows default, always, never")
    whole = _replicas(path, other, (replicate, dp // replicate), (tp, cp, pp))
    level = 0 if whole else 3 if kept == "always" else 2
    precision, cast = cast_of(path, _precision(path, training, other), other, (tp * pp, cp * ep, dp), replicate)
    fields = {
        "tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep, "vpp": chunks, "schedule": int(schedule),
        "dp_shard": shard if shard != dp and not whole else 0, "micro_batch_size": micro,
        "num_microbatches": quotient(batch, micro * dp, f"{path}: the global batch by micro batches of all replicas"),
        "sequence_parallel": int(tp > 1), "zero": level, **_recompute(other, spec, pp, chunks),
        "offload_parameters": int(str(training["enable_cpu_offload"]).lower() != "false"),
        **({"cp_method": int(CpMethod.ALLGATHER)} if cp > 1 else {}), **split,
    }  # fmt: skip
    passed += (*of_stand_in(path, said, spec, training["dtype"], tp * pp * cp * dp // replicate), *of_apart(switched, replicate))
    products = of_products(other, spec, micro * length / cp, 4.0 if precision == "fp32" else 2.0, tp)
    return Reading(
        trainer=_trainer(parallel, other, whole), fields=fields, num_gpus=tp * cp * pp * dp, global_batch_size=batch,
        sequence_length=length, model_name=str(other.get("called") or ""), model=spec_of(other) if said.model is None else None,
        precision=precision, optimizer=_optimizer(path, other), unread=tuple(unread),
        architecture=_ahead(other, spec), expert_imbalance=loads, questions=of_muon(other), **_adapters(path, training, other),
        notes=(*other.get("notes", ()), *products, *passed, *room, *cast, *_beside(parallel, training, other, spec, unread)),
    )  # fmt: skip


def _of_gpus(each: str) -> Question:
    """How many GPUs there are, where those of ``each`` node may be said by what starts it."""
    more = f"; it starts {each} on each node: a multiple of {each}" if re.fullmatch(r"[2-9]|[1-9]\d", each) else ""
    return Question(name="--gpus N", about=f"parallelism.data_parallel_shard_degree is -1{more}")


def _adapters(path: Path, training: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """What a LoRAConverter means: adapters on all linear layers, or those that it names, over a base of the dtype of the weights.
    [torchtitan b5bcd76, components/lora.py]"""
    if "adapters" not in other:
        return {}
    named, frozen = other["adapters"].get("target_modules"), "bf16" if training["dtype"] == "bfloat16" else "fp32"
    targets = adapter_targets(named) if named else "all"
    rank = whole_number(other["adapters"].get("rank", 8), f"{path}: LoRAConverter.rank")
    return {"lora_rank": rank, "lora_targets": targets, "frozen_weights": frozen}


def _beside(
    parallel: Mapping[str, Any], training: Mapping[str, Any], other: Mapping[str, Any], spec: ModelSpec | None, unread: list[str]
) -> list[str]:
    """What is taken for what, with adapters on the head, and words of forks for chunks of the loss, whose number may be any."""
    named = other["adapters"].get("target_modules") if "adapters" in other else ()
    chunks = any(re.search(r"chunk\w*_?(ce|loss|cross)|(ce|loss|cross_entropy)_?\w*chunk", one) for one in unread)
    said = "logits come in chunks, and the memory holds them whole"
    head = [adapters_on_tables(["lm_head"])] * (named is None or "lm_head" in named)
    return [*notes_of(parallel, training, other, spec), *head, *[said] * chunks]


def _ahead(other: Mapping[str, Any], spec: ModelSpec | None) -> dict[str, int]:
    """Layers of multi-token prediction: built by a word of torchtitan's registry alone, whatever the published model has."""
    layers = other.get("mtp_layers") or 0
    return {"mtp_layers": layers} if layers or (spec is not None and spec.mtp_layers) else {}


def _is_usual(name: str, training: Mapping[str, Any]) -> bool:
    """Whether it is the word of a fork for mixed precision, with the type that torchtitan's own word says."""
    said = {"bf16": "bfloat16", "fp32": "float32"}.get(str(training.get("mixed_precision")), training.get("mixed_precision"))
    return name == "training.mixed_precision" and said == training["mixed_precision_param"]


def _replicas(path: Path, other: Mapping[str, Any], groups: tuple[int, int], degrees: tuple[int, int, int]) -> bool:
    """Whether replicas are those of DDP, each with all states: until 0.2 where nothing is sharded. Later versions have FSDP2 with
    groups of one rank.  [torchtitan 0.2, models/llama3/infra/parallelize.py: apply_ddp] ``groups``: replicas and ranks of each;
    ``degrees``: tp, cp, pp. Raises PlannerError for what that version starts in no way."""
    (replicate, shard), (tp, cp, pp) = groups, degrees
    if not other.get("toml") or replicate == 1 or shard > 1 or cp > 1:
        return False
    if tp * pp > 1:
        what = f"DDP, replicate {replicate} without shards, runs in torchtitan until 0.2 alone, not with tp {tp} and pp {pp}"
        sets = (f"data_parallel_{name}_degree={number}" for name, number in (("replicate", 1), ("shard", replicate)))
        raise PlannerError(f"{path}: {what}; {' '.join(f'--set parallelism.{one}' for one in sets)} imports the job with FSDP")
    return True


def _passes(
    path: Path, parallel: Mapping[str, Any], training: Mapping[str, Any], schedule: Schedule, sizes: tuple[int, int, int]
) -> tuple[str, ...]:
    """What is to be said where a step is several passes of the pipeline, as accumulation makes it; ``sizes``: stages, sequences of
    a microbatch and of a replica's step. Raises PlannerError where each pass keeps activations of its own microbatches alone.
    [torchtitan/trainer.py, train_step]"""
    pp, micro, each = sizes
    tokens = training["num_tokens_per_microbatch_per_dp_rank"] is not None
    local = micro * int(parallel["num_pp_microbatches"]) if tokens else int(training["local_batch_size"])
    if pp == 1 or each <= local:
        return ()
    said = f"a step is {each // local} passes of the pipeline with {max(local // micro, 1)} microbatches each"
    if schedule == Schedule.GPIPE:
        what = f"{said}, and {SCHEDULES[schedule]} keeps activations of all microbatches of a pass: a plan has one pass"
        raise PlannerError(f"{path}: {what}; --set training.global_batch_size=-1 imports a step of one")
    return (f"{said}; priced as one pass: its bubble comes out too small",)


def _questions(path: Path, parallel: Mapping[str, Any], other: Mapping[str, Any], tp: int) -> list[Question]:
    """What decides memory and a plan of torchtitan cannot say. Raises PlannerError."""
    etp = parallel["expert_tensor_parallel_degree"]
    experts = whole_number(parallel["expert_parallel_degree"], f"{path}: parallelism.expert_parallel_degree")
    if etp not in (None, 1) and experts > 1:  # without it experts lie over tensor parallel ranks whatever it says
        sets = "--set parallelism.expert_tensor_parallel_degree=1 imports the job with that"
        raise PlannerError(f"{path}: parallelism.expert_tensor_parallel_degree is {shown(etp)}; a plan has 1 only; {sets}")
    if tp > 1 and str(parallel["enable_sequence_parallel"]).lower() == "false":
        sets = "--set parallelism.enable_sequence_parallel=true imports the job with it"
        raise PlannerError(f"{path}: parallelism.enable_sequence_parallel is false; a plan has it with tp > 1; {sets}")
    found = [*other.get("questions", ()), *of_its_kind(path, other)]
    if not re.fullmatch(r"[1-9]\d{0,3}", other.get("layers", "1")):
        about = f"it is {shown(other['layers'])}; op, or n for every n-th layer"
        found.append(Question(name="activation_checkpoint.selective_ac_option", about=about, choices=("op", "2")))
    return found


def _recompute(other: Mapping[str, Any], model: ModelSpec | None, pp: int, chunks: int) -> dict[str, int]:
    """Every n-th layer of a rank is full recompute of that many.  [distributed/activation_checkpoint.py, _apply_layer_sac]"""
    how = other.get("recompute", Recompute.SELECTIVE)
    if "layers" not in other:
        modules = int(Module.EVERY_SECOND_MATMUL) if how == Recompute.SELECTIVE else 0
        return {"recompute": int(how), "recompute_modules": modules}
    every, held = int(other["layers"]), max((model.num_layers if model else 0) // pp, 1)
    covered = held // every // chunks * chunks
    if every == 1 or not covered:
        return {"recompute": int(Recompute.FULL if every == 1 else Recompute.NONE)}
    return {"recompute": int(Recompute.FULL), "recompute_layers": covered}


def _trainer(parallel: Mapping[str, Any], other: Mapping[str, Any], whole: bool) -> str:
    said = {"compile": "off" if other.get("compile") is False else "", "data_parallel": "ddp" if whole else ""}
    said["loss"] = str(other.get("loss") or "")
    said["tp_overlap"] = "on" if str(parallel["enable_async_tensor_parallel"]).lower() == "true" else ""
    backend = str(parallel["expert_parallel_comm_backend"])
    said["expert_dispatch"] = backend if backend in ("deepep", "hybridep") else ""
    version = f"@{other['version']}" if "layers" in other or other.get("version") == EAGER_LOSS else ""
    return spell(f"torchtitan{version}", {name: value for name, value in said.items() if value})


def _of_older_words(said: Mapping[str, Any], training: dict[str, Any]) -> tuple[str, ...]:
    """Leaves max_context_length out where the file counts in sequences, as versions do that do not have it; a note says so."""
    length, sizes = training["max_context_length"], [one for one in ("local_batch_size", "seq_len") if one in said]
    if length is None or not sizes or any(one.startswith("num_tokens_") for one in said):
        return ()
    training["max_context_length"] = None
    what = f"training.max_context_length {shown(length)} is no word of the version that has {' and '.join(sizes)}"
    return (f"{what}: it counts for nothing, and a sequence is {shown(training['seq_len'])} tokens (seq_len)",)


def _batch(
    path: Path, parallel: Mapping[str, Any], training: Mapping[str, Any], said: Given, *, pp: int, dp: int
) -> tuple[int, int, int]:
    """(tokens per sequence, sequences per forward pass, sequences per step); since 0.4 batches are counted in tokens."""
    tokens = training["num_tokens_per_microbatch_per_dp_rank"]
    if tokens is not None or training["max_context_length"] is not None or training["num_tokens_per_train_step"] != -1:
        tokens = whole_number(
            16384 if tokens is None else tokens, f"{path}: training.num_tokens_per_microbatch_per_dp_rank"
        )
        most = training["max_context_length"]
        length = whole_number(2048 if most is None else most, f"{path}: training.max_context_length")
        length = min(said.sequence_length or length, tokens)
        micro = quotient(
            tokens, length, f"{path}: training.num_tokens_per_microbatch_per_dp_rank by the sequence of {length} tokens"
        )
        steps = (
            whole_number(parallel["num_pp_microbatches"], f"{path}: parallelism.num_pp_microbatches") if pp > 1 else 1
        )
        total = training["num_tokens_per_train_step"]
        batch = micro * steps * dp if total == -1 else quotient(
            whole_number(total, f"{path}: training.num_tokens_per_train_step"), length, f"{path}: tokens of a step by its sequences"
        )  # fmt: skip
        return length, said.micro_batch_size or micro, said.global_batch_size or batch
    local = whole_number(said.micro_batch_size or training["local_batch_size"], f"{path}: training.local_batch_size")
    batch = said.global_batch_size or training["global_batch_size"]
    steps = whole_number(training["gradient_accumulation_steps"], f"{path}: training.gradient_accumulation_steps")
    batch = local * dp * steps if batch == -1 else whole_number(batch, f"{path}: training.global_batch_size")
    micro = local
    if pp > 1:
        count = parallel["pipeline_parallel_microbatches"]  # of 2024: their number, by default one per stage
        micro = whole_number(
            parallel["pipeline_parallel_microbatch_size"], f"{path}: parallelism.pipeline_parallel_microbatch_size"
        )
        if count is not None:
            count = whole_number(count, f"{path}: pipeline_parallel_microbatches")
            micro = quotient(local, count, f"{path}: the local batch by its microbatches")
    return whole_number(training["seq_len"], f"{path}: training.seq_len"), micro, batch


def _precision(path: Path, training: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """training.dtype bfloat16 keeps weights, gradients and states in bf16, without fp32 copies. Raises PlannerError."""
    low = other.get("precision")
    if str(training["dtype"]) == "bfloat16":
        if low:
            raise PlannerError(
                f"{path}: training.dtype bfloat16 with {low} linear layers: a plan knows bf16 states with bf16 layers alone; "
                "leave the dtype or the converters out with --set training.dtype=float32 or --set model.converters=[]"
            )
        return "bf16_true"
    if str(training["dtype"]) != "float32":
        raise PlannerError(f"{path}: training.dtype is {shown(training['dtype'])}; torchtitan knows float32 and bfloat16")
    if training["mixed_precision_param"] not in ("bfloat16", "float32"):
        what = f"training.mixed_precision_param is {shown(training['mixed_precision_param'])}"
        raise PlannerError(f"{path}: {what}; torchtitan knows float32 and bfloat16")
    return low or ("fp32" if training["mixed_precision_param"] == "float32" else "bf16")


def _optimizer(path: Path, other: Mapping[str, Any]) -> str:
    name = str(other.get("optimizer", "AdamW"))
    known = {"adam": "adam", "adamw": "adam", "muon": "muon", "distmuon": "muon"}
    if name.lower() not in known:
        raise PlannerError(f"{path}: optimizer.name is {shown(name)}; the planner's torchtitan knows Adam, AdamW and Muon")
    return known[name.lower()]
