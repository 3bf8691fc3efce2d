"""torchtitan: a Python configuration module, a TOML file of 0.2, a saved JSON configuration, or a command line."""

import ast
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, shown
from planner.layout import CpMethod, Module, Recompute, Schedule
from planner.trainers.bundle.fully_shard import SCHEDULES
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given
from planner.trainers.reading.values import json_mapping, left_over, quotient, read_text, uneven, whole_number
from planner.trainers.torchtitan.export import CONVERTERS

DEFAULTS: dict[str, dict[str, Any]] = {
    "parallelism": {
        "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": -1, "fsdp_reshard_after_forward": "default",
        "tensor_parallel_degree": 1, "context_parallel_degree": 1, "pipeline_parallel_degree": 1,
        "pipeline_parallel_schedule": "1F1B", "pipeline_parallel_microbatch_size": 1,
        "pipeline_parallel_layers_per_stage": None, "expert_parallel_degree": 1, "module_fqns_per_model_part": None,
    },
    "training": {"local_batch_size": 8, "global_batch_size": -1, "seq_len": 2048, "enable_cpu_offload": False},
}  # fmt: skip
"""Keys that decide the layout and the batch, with torchtitan's defaults."""
QUIET = ("enable_sequence_parallel", "context_parallel_load_balancer", "spmd_backend", "steps", "dtype",
         "mixed_precision_param", "mixed_precision_reduce", "disable_cuda_graphs", "max_norm", "gc_freq",
         "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")  # fmt: skip
"""Keys that a plan has a fixed answer for, or that change neither time nor memory."""


def read(path: Path, said: Given) -> Reading:
    """The layout of a torchtitan configuration; the number of GPUs where data_parallel_shard_degree is -1. Raises PlannerError."""
    given = said.filled(_sections(path, read_text(path)))
    num_gpus = said.num_gpus
    other = given.get("other", {})
    parallel, training = ({**known, **given.get(name, {})} for name, known in DEFAULTS.items())
    unread = [one for name, known in DEFAULTS.items() for one in left_over(given.get(name, {}), (*known, *QUIET), f"{name}.")]

    def degree(key: str) -> int:
        return whole_number(parallel[key], f"{path}: parallelism.{key}")

    tp, cp, pp, ep = (degree(f"{name}_parallel_degree") for name in ("tensor", "context", "pipeline", "expert"))
    replicate, shard = degree("data_parallel_replicate_degree"), parallel["data_parallel_shard_degree"]
    if shard == -1:
        if num_gpus is None:
            raise PlannerError(
                f"{path}: parallelism.data_parallel_shard_degree is -1; say the number of GPUs with --gpus"
            )
        shard = quotient(num_gpus, replicate * tp * cp * pp, f"{path}: GPUs by the degrees that are given")
    dp = replicate * whole_number(shard, f"{path}: parallelism.data_parallel_shard_degree")
    local = whole_number(training["local_batch_size"], f"{path}: training.local_batch_size")
    batch = training["global_batch_size"]
    batch = local * dp if batch == -1 else whole_number(batch, f"{path}: training.global_batch_size")
    micro = degree("pipeline_parallel_microbatch_size") if pp > 1 else local
    schedule, chunks, split = _pipeline(path, parallel, pp)
    recompute = other.get("recompute", Recompute.SELECTIVE)
    kept = parallel["fsdp_reshard_after_forward"]
    if kept == "default":  # torchtitan: never with a pipeline, else always
        kept = "never" if pp > 1 else "always"
    fields = {
        "tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep, "vpp": chunks, "schedule": int(schedule),
        "dp_shard": shard if shard != dp else 0, "micro_batch_size": micro,
        "num_microbatches": quotient(batch, micro * dp, f"{path}: the global batch by micro batches of all replicas"),
        "sequence_parallel": int(tp > 1), "zero": 3 if kept == "always" else 2, "recompute": int(recompute),
        "recompute_modules": int(Module.EVERY_SECOND_MATMUL) if recompute == Recompute.SELECTIVE else 0,
        "offload_parameters": int(str(training["enable_cpu_offload"]).lower() != "false"),
        **({"cp_method": int(CpMethod.ALLGATHER)} if cp > 1 else {}), **split,
    }  # fmt: skip
    return Reading(
        trainer="torchtitan", fields=fields, num_gpus=tp * cp * pp * dp, global_batch_size=batch,
        sequence_length=whole_number(training["seq_len"], f"{path}: training.seq_len"),
        precision=other.get("precision", "fp32" if training.get("mixed_precision_param") == "float32" else "bf16"),
        optimizer="adam", unread=tuple(unread), notes=tuple(f"recompute: {one}" for one in other.get("notes", ())),
    )  # fmt: skip


def _pipeline(path: Path, parallel: Mapping[str, Any], pp: int) -> tuple[Schedule, int, dict[str, int]]:
    """Schedule, virtual stages per rank, and the uneven ends."""
    if pp == 1:
        return Schedule.ONE_F_ONE_B, 1, {}
    names = {name.lower(): one for one, name in SCHEDULES.items()}
    name = str(parallel["pipeline_parallel_schedule"])
    if name.lower() not in names:
        raise PlannerError(
            f"{path}: parallelism.pipeline_parallel_schedule is {shown(name)}; the planner prices {', '.join(SCHEDULES.values())}"
        )
    schedule = names[name.lower()]
    stages = parallel["module_fqns_per_model_part"]
    if stages is None:
        return schedule, 1 if schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B) else 2, {}
    counts = [sum(str(module).startswith("layers.") for module in stage) for stage in stages]
    chunks = quotient(len(counts), pp, f"{path}: parallelism.module_fqns_per_model_part by the pipeline degree")
    v_shaped = schedule in (Schedule.ZBV, Schedule.DUALPIPE_V)
    owners = [*range(pp), *reversed(range(pp))] if v_shaped else [i % pp for i in range(len(counts))]
    held = [sum(count for count, owner in zip(counts, owners, strict=True) if owner == rank) for rank in range(pp)]
    return schedule, chunks, uneven(held)


# ------------------------------------------------------------------------------------------------ forms of the file


def _sections(path: Path, text: str) -> dict[str, dict[str, Any]]:
    """Sections parallelism and training, and what the rest says about recompute and precision, under 'other'."""
    if path.suffix == ".py":
        return _python(path, text)
    if path.suffix == ".toml":
        data = library.parse_toml(text, str(path))
        mode = data.get("activation_checkpoint", {}).get("mode", "selective")
        return {**_plain(data), "other": {"recompute": _mode(path, mode)}}
    if path.suffix == ".json":
        data = json_mapping(path, text, "a configuration saved by torchtitan")
        if "parallelism" not in data:
            raise PlannerError(f"{path}: not a configuration saved by torchtitan: the section 'parallelism' is missing")
        return {**_plain(data), "other": {"notes": ("the file does not name its policy; selective is taken",)}}
    return _flags(path, text)


def _plain(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: dict(data.get(name) or {}) for name in ("parallelism", "training")}


def _mode(path: Path, mode: object) -> Recompute:
    modes = {"none": Recompute.NONE, "selective": Recompute.SELECTIVE, "full": Recompute.FULL}
    if mode not in modes:
        raise PlannerError(f"{path}: activation checkpointing '{mode}' is not one of {', '.join(modes)}")
    return modes[str(mode)]


def _python(path: Path, text: str) -> dict[str, dict[str, Any]]:
    """A configuration module is read, not run: keywords of ParallelismConfig and TrainingConfig, constants of the module."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise PlannerError(f"{path}: line {error.lineno}: not Python: {error.msg}") from error
    constants = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found: dict[str, dict[str, Any]] = {"other": {}}
    wanted = {"ParallelismConfig": "parallelism", "TrainingConfig": "training"}
    for node in (one for one in ast.walk(tree) if isinstance(one, ast.Call)):
        function = ast.unparse(node.func)
        given = {one.arg: one.value for one in node.keywords if one.arg}
        section = wanted.get(function.split(".")[-1])
        if section and section not in found:
            found[section] = {key: _constant(path, value, constants, key) for key, value in given.items()}
        if "activation_checkpoint" in given:
            found["other"]["recompute"] = _policy(path, given["activation_checkpoint"])
        for precision, converter in CONVERTERS.items():
            if function.startswith(f"{converter}."):
                found["other"]["precision"] = precision
    if "parallelism" not in found:
        raise PlannerError(
            f"{path}: no ParallelismConfig(...) in this module; give the file with the configuration function"
        )
    return found


def _policy(path: Path, node: ast.expr) -> Recompute:
    text = ast.unparse(node)
    for name, mode in (("FullAC", Recompute.FULL), ("SelectiveAC", Recompute.SELECTIVE), ("None", Recompute.NONE)):
        if text.startswith(name):
            return mode
    raise PlannerError(
        f"{path}: line {node.lineno}: activation_checkpoint={text}; the planner knows FullAC, SelectiveAC, None"
    )


def _constant(path: Path, node: ast.expr, constants: Mapping[str, ast.expr], key: str) -> Any:
    if isinstance(node, ast.Name) and node.id in constants:
        node = constants[node.id]
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise PlannerError(
            f"{path}: line {node.lineno}: {key} is {ast.unparse(node)}, which is computed; write its value to read it back"
        ) from error


def _flags(path: Path, text: str) -> dict[str, dict[str, Any]]:
    """--parallelism.tensor_parallel_degree 4 (or =4, or with dashes) in a script or a log."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise PlannerError(f"{path}: not a command line: {error}") from error
    found: dict[str, dict[str, Any]] = {"parallelism": {}, "training": {}, "other": {}}
    for i, word in enumerate(words):
        match = re.fullmatch(r"--(parallelism|training)\.([\w-]+)(?:=(.*))?", word)
        if match:
            section, key, value = match[1], match[2].replace("-", "_"), match[3]
            value = words[i + 1] if value is None and i + 1 < len(words) else value
            found[section][key] = int(value) if re.fullmatch(r"-?\d{1,15}", value or "") else value
        if word.startswith(("activation-checkpoint:", "activation_checkpoint:")):
            found["other"]["recompute"] = _mode(path, word.split(":", 1)[1])
    if not found["parallelism"]:
        raise PlannerError(f"{path}: no --parallelism flag, no TOML, JSON or Python: not a torchtitan configuration")
    return found
