"""nanotron: its YAML file, also as a script starts its program with it."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, shown
from planner.layout import Recompute, Schedule
from planner.model import ModelSpec
from planner.trainer_options import spell
from planner.trainers.nanotron import WRITES
from planner.trainers.nanotron.architecture import model_of, notes_of, own_layers, replaced_losses, rows_of
from planner.trainers.nanotron.program import data_of
from planner.trainers.nanotron.sections import NOTHING, laid_into, lengths_of, require_priced
from planner.trainers.reading.commands import launched, with_files
from planner.trainers.reading.configuration import NEEDED, Reading
from planner.trainers.reading.given import CONFIG_FILE, Given, Question, ask
from planner.trainers.reading.settings import beside
from planner.trainers.reading.shell.text import is_open, roots
from planner.trainers.reading.twice import given_twice
from planner.trainers.reading.values import read_text, stage_ends, whole_number

PARALLELISM = ("dp", "pp", "tp", "pp_engine", "tp_mode", "tp_linear_async_communication", "tp_recompute_allgather",
               "recompute_layer", "expert_parallel_size", "context_parallel_size")  # fmt: skip
UNPRICED = {"expert_parallel_size": "whose ranks compute the same tokens", "context_parallel_size": "which is not priced"}
"""Degrees that must be 1, and why.  [nanotron, parallel/context.py]"""
ENGINES = {"1f1b": Schedule.ONE_F_ONE_B, "afab": Schedule.GPIPE}
OPTIMIZERS = {"adamw": "adam", "adam": "adam", "sgd": "sgd"}
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


SELECTIVE = (
    "parallelism.recompute_granularity {} does no more than the recompute of attention's scores, which flash attention does by "
    "itself: nothing else is recomputed"
)
"""Until 0.2 nanotron reads the word, selective or full, and does nothing by it.
[nanotron 0.1, models/llama.py, CoreAttention.checkpoint_attention]"""
OF_DATA = ("data_stages.data.", "data_stages.name", "data_stages.start_training_step")
"""Keys of the stages of the data that decide nothing: all but the length of sequences."""
DEALT = "pp_layer_partition"
"""Layers of each stage, a list: of forks, in the place of the split by cost."""
PROGRAM = r"\S*train\w*\.py"
"""Programs that take such a file with --config-file."""


def read(path: Path, given: Given) -> Reading:
    """The layout, batch and sizes of the model. Raises PlannerError with file and key."""
    if path.suffix.lower() == ".py":
        data = data_of(path, given)
        reading = parse(path, given.filled(data), given)
        return dataclasses.replace(reading, notes=(*reading.notes, *_stand_in(data, given)))
    if path.suffix.lower() in (".yaml", ".yml"):
        data, notes = _of_file(path)
        reading = parse(path, given.filled(data), given)
        return dataclasses.replace(reading, notes=(*reading.notes, *notes, *_stand_in(data, given)))
    found = launched(path, given, PROGRAM)
    named = str(found.settings.get("config_file", ""))
    writes = beside(path, str(Path(named).with_suffix(".py")), (".py",)) if named and beside(path, named) is None else None
    if writes is not None and re.search(WRITES, read_text(writes), re.MULTILINE) and given.setting(CONFIG_FILE) is None:
        reading = parse(path, given.filled(data_of(writes, given)), given, found.num_gpus)
        reading = dataclasses.replace(reading, notes=(f"{named} is not there: read as {writes.name} writes it", *reading.notes))
    else:
        reading = parse(path, laid_into(with_files(path, found, given, ("config_file",)).data), given, found.num_gpus)
    return dataclasses.replace(reading, notes=(*reading.notes, *found.notes))


def _of_file(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The mapping in a file, and what was taken for what: of a part that decides nothing and is given twice the last counts, as in
    PyYAML, which nanotron reads it with. Raises PlannerError for any other key."""
    try:
        return library.read_yaml(path), ()
    except PlannerError as error:
        keys = given_twice(library.read_text(path)) if "is given twice" in str(error) else []
        if not keys or not all(one.partition(".")[0] in NOTHING or one.startswith(OF_DATA) for one in keys):
            raise
    return library.parse_yaml(library.read_text(path), str(path), last=True), (f"{', '.join(keys)}: given twice, the last counts",)


def parse(path: Path, data: Mapping[str, Any], given: Given, started: int | None = None) -> Reading:
    """The job that settings describe; ``started``: processes of the command that starts it. Raises PlannerError."""
    num_gpus = given.num_gpus or started
    parallel, tokens = _section(path, data, "parallelism"), _section(path, data, "tokens")
    optimizer, model = _section(path, data, "optimizer"), _section(path, data, "model")
    asked: list[Question] = []
    dp, pp, tp = (_number(path, parallel, "parallelism", name, asked) for name in ("dp", "pp", "tp"))
    micro = _number(path, tokens, "tokens", "micro_batch_size", asked)
    steps = _number(path, tokens, "tokens", "batch_accumulation_per_replica", asked)
    length = _number(path, tokens, "tokens", "sequence_length", asked) if given.sequence_length is None else given.sequence_length
    model_spec = model_of(model, path)
    if asked:
        ask(str(path), [*asked, *(own_layers(model, given) or [NEEDED["model"]] * (model_spec is None and given.model is None))])
    if num_gpus is not None and num_gpus != dp * pp * tp:
        who = "--gpus says" if given.num_gpus else "its command starts"
        raise PlannerError(f"{path}: dp {dp} x pp {pp} x tp {tp} = {dp * pp * tp} GPUs, but {who} {num_gpus}")
    for name, why in UNPRICED.items():
        if parallel.get(name, 1) != 1:
            sets = f"--set parallelism.{name}=1 imports the job without"
            raise PlannerError(f"{path}: parallelism.{name} is {shown(parallel[name])}, {why} in nanotron; {sets}")
    _refuse_own(path, parallel)
    unread = require_priced(path, data)
    engine = str(parallel.get("pp_engine") or "afab").lower()
    if engine not in ENGINES:
        raise PlannerError(f"{path}: parallelism.pp_engine is {engine}; nanotron knows {', '.join(ENGINES)}")
    mode = str(parallel.get("tp_mode") or "ALL_REDUCE").upper()
    if mode not in ("ALL_REDUCE", "REDUCE_SCATTER"):
        raise PlannerError(f"{path}: parallelism.tp_mode is {shown(mode)}; nanotron knows ALL_REDUCE and REDUCE_SCATTER")
    split = mode == "REDUCE_SCATTER"
    level = whole_number(optimizer.get("zero_stage") or 0, f"{path}: optimizer.zero_stage", least=0)
    fields = {
        "tp": tp, "pp": pp, "dp": dp, "micro_batch_size": micro, "num_microbatches": steps,
        "schedule": int(ENGINES[engine] if pp > 1 else Schedule.ONE_F_ONE_B), "sequence_parallel": int(split and tp > 1),
        "zero": min(level, 1),
        "recompute": int(Recompute.FULL if parallel.get("recompute_layer") else Recompute.NONE),
    }  # fmt: skip
    dealt = _dealt(path, parallel, pp, model_spec.num_layers if model_spec is not None else None)
    waits = split and tp > 1 and not parallel.get("tp_linear_async_communication")
    lengths = lengths_of(data) or [length]
    questions = list(own_layers(model, given))
    if len(lengths) > 1 and given.sequence_length is None:
        about = f"stages of the data have {' and '.join(str(one) for one in lengths)} tokens"
        questions.append(dataclasses.replace(NEEDED["sequence_length"], about=about))
    return Reading(
        trainer=spell("nanotron", ({"tp_overlap": "off"} if waits else {}) | ({"stage_layers": "listed"} if dealt else {})),
        fields=fields | dealt, num_gpus=dp * pp * tp,
        global_batch_size=micro * steps * dp,
        sequence_length=lengths[0] if len(lengths) == 1 else None, architecture=rows_of(model, tp),
        precision=_precision(path, model, optimizer), optimizer=_optimizer(path, optimizer), model=model_spec,
        questions=tuple(questions), unread=unread,
        notes=(*_notes(parallel, optimizer, split and tp > 1), *notes_of(model, tp),
               *([] if dealt else _early_head(model_spec, pp))),
    )  # fmt: skip


def _early_head(model: ModelSpec | None, pp: int) -> list[str]:
    """What is said where the layers before the head do not exceed the share of all stages but the last: the head lies on one of
    these.  [nanotron, models/base.py, build_model; models/llama.py, get_block_compute_costs]"""
    if pp == 1 or model is None:
        return []
    each = model.hidden_size * (4 * model.attention_output_size + 3 * model.ffn_size)
    before, head = model.num_layers * each, model.vocab_size * model.hidden_size
    if before * pp > (before + head) * (pp - 1):
        return []
    return [
        "nanotron deals blocks to stages by their multiplications, and the head has so many that it lies before the last stage, "
        "which then has no weights and receives logits; the plan has the head on the last stage: time of sending logits is missing"
    ]


def _notes(parallel: Mapping[str, Any], optimizer: Mapping[str, Any], split: bool) -> list[str]:
    """What was taken for what; ``split``: activations are shared out between tensor parallel ranks."""
    words = {**optimizer, **_factory(optimizer)}
    sgd, stage = str(words.get("name")).lower() == "sgd", optimizer.get("zero_stage") or 0
    kept = split and parallel.get("tp_linear_async_communication") and parallel.get("tp_recompute_allgather") is False
    single = words.get("torch_adam_is_fused") is False and not sgd
    return [
        *[SELECTIVE.format(one) for one in (str(parallel.get("recompute_granularity")).lower(),) if one in ("selective", "full")],
        *[f"optimizer.zero_stage {stage} is stage 1 in nanotron, which shards the optimizer's states alone"] * (stage > 1),
        *["tp_recompute_allgather is false: gathered inputs stay until the backward pass, and are not in the memory"] * bool(kept),
        *["torch_adam_is_fused is false: weights are updated one by one; priced as one kernel"] * single,
        *["sgd has no momentum in nanotron; priced with it, so optimizer states come out too large"] * sgd,
    ]


def _number(path: Path, data: Mapping[str, Any], section: str, name: str, asked: list[Question]) -> int:
    """A whole number; asked for where it is not said, or hangs on what is not."""
    value = data.get(name)
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value):
        value = int(value)
    if value is None or (isinstance(value, str) and (is_open(value) or not value.strip())):
        open_ = roots(value) if isinstance(value, str) else []
        asked += [Question(name=one, about=f"{section}.{name}") for one in open_ or [f"{section}.{name}"]]
        return 1
    return whole_number(value, f"{path}: {section}.{name}")


def _refuse_own(path: Path, parallel: Mapping[str, Any]) -> None:
    """Raises PlannerError for words of a fork: nanotron has no others here, and they deal layers or say what is recomputed."""
    for name in (one for one, value in parallel.items() if one not in (*PARALLELISM, DEALT) and value not in (None, False, [], {})):
        if name == "recompute_granularity" and str(parallel[name]).lower() in ("selective", "full"):
            continue  # of 2024: read with a note
        if parallel[name] == 1 and parallel[name] is not True and (name == "sp" or str(name).endswith("_size")):
            continue  # a degree of forks that splits nothing
        said = f"{path}: parallelism.{name} is {shown(parallel[name])}, which no plan of nanotron has"
        raise PlannerError(f"{said}; --set parallelism.{name}=null imports the job without it")


def _dealt(path: Path, parallel: Mapping[str, Any], pp: int, total: int | None) -> dict[str, int]:
    """Layers of the first and the last stage, where a fork's list says them. Raises PlannerError for other lists."""
    layers = parallel.get(DEALT)
    if layers in (None, False, [], {}):
        return {}
    where = f"{path}: parallelism.{DEALT} {shown(layers)}"
    sets = f"--set parallelism.{DEALT}=null imports the job without it"
    if not isinstance(layers, list) or len(layers) != pp or not all(type(one) is int and one > 0 for one in layers):
        raise PlannerError(f"{where} is not a list of {pp} numbers of layers; {sets}")
    if sum(layers) != (total or sum(layers)):
        raise PlannerError(f"{where} is not the {total} layers of the model; {sets}")
    stage_ends(layers, where)
    return {"first_stage_layers": layers[0], "last_stage_layers": layers[-1]} if pp > 1 else {}


def _section(path: Path, data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    if not isinstance(found, Mapping):
        raise PlannerError(f"{path}: the section '{name}' is missing; this is not a nanotron configuration")
    return found


def _precision(path: Path, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> str:
    """Of weights and matrix products, over fp32 masters; bf16 without them is all there is of weights, gradients and moments.
    [nanotron, helpers.py, init_optimizer_and_grad_accumulator: OptimizerFromGradientAccumulator, or torch's alone]
    Raises PlannerError for what a plan of nanotron does not have."""
    kind = str(model.get("dtype") or "bfloat16").removeprefix("torch.")
    if kind not in PRECISIONS:
        raise PlannerError(f"{path}: model.dtype is {shown(kind)}; a plan of nanotron knows {', '.join(PRECISIONS)}")
    if PRECISIONS[kind] != "fp32" and optimizer.get("accumulate_grad_in_fp32") is False:
        if PRECISIONS[kind] == "bf16":
            return "bf16_true"
        raise PlannerError(
            f"{path}: optimizer.accumulate_grad_in_fp32 is false: no fp32 master weights, and gradients and moments in {kind}, "
            "which is not priced; --set optimizer.accumulate_grad_in_fp32=true imports the job with them"
        )
    return PRECISIONS[kind]


def _factory(optimizer: Any) -> Mapping[str, Any]:
    """The section of the optimizer that names it; empty where there is none."""
    found = optimizer.get("optimizer_factory") if isinstance(optimizer, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _stand_in(data: Mapping[str, Any], given: Given) -> list[str]:
    """What a plan says of a fork's optimizer and loss whose place others take, as the user says."""
    losses = replaced_losses(data.get("model"), given)
    name = str(_factory(data.get("optimizer")).get("name") or "adamW")
    said = given.setting("optimizer.optimizer_factory.name")
    if said is None or name.lower() in OPTIMIZERS:
        return losses
    muon = "; muon has one momentum of a matrix where Adam has two states, so optimizer states come out too large"
    return [*losses, f"the file's optimizer {name} is priced as {said}" + muon * (name.lower() == "muon")]


def _optimizer(path: Path, optimizer: Mapping[str, Any]) -> str:
    name = str(_factory(optimizer).get("name") or "adamW")
    if name.lower() not in OPTIMIZERS:
        sets = "--set optimizer.optimizer_factory.name=adamW imports the job with that"
        raise PlannerError(f"{path}: optimizer.optimizer_factory.name is {shown(name)}; nanotron has adamW and sgd; {sets}")
    return OPTIMIZERS[name.lower()]
