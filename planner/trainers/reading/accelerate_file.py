"""How accelerate splits the job that it launches: its YAML, the options of its command, and which of them stands where."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from planner.errors import PlannerError, shown
from planner.layout import CpMethod, Module, Recompute
from planner.trainers.reading.given import Given, OtherMachineError, Question
from planner.trainers.reading.guides import guide
from planner.trainers.reading.launch_options import overlaid
from planner.trainers.reading.settings import Settings, beside, file_settings
from planner.trainers.reading.sharding import BUCKET, Sharding, deepspeed, from_arguments, fsdp_section, on_host
from planner.trainers.reading.shell.text import is_open
from planner.trainers.reading.values import Written

OR_SAY = (
    "or say --set deepspeed=zero3 (zero2, ...), --set fsdp=full_shard, or --set fsdp=no_shard where every GPU holds the whole model"
)
"""What answers the question for a configuration of accelerate as well."""
QUIET_ACCELERATE = re.compile(
    r"compute_environment|debug|downcast_bf16|machine_rank|main_\w+|rdzv_\w+|same_network|tpu_\w+|mpirun_config\..*"
    r"|enable_cpu_affinity|deepspeed_config\.(offload_\w+_(nvme_path|pin_memory)|bf16_enabled|deepspeed_\w+|zero3_\w+|gradient_clipping|seq_parallel_communication_data_type)"
    r"|fsdp_config\.fsdp_(auto_wrap_policy|transformer_layer_cls_to_wrap|backward_prefetch\w*|forward_prefetch|state_dict_type"
    r"|sync_module_states|use_orig_params|cpu_ram_efficient_loading|min_num_params|mixed_precision_policy)|dynamo_config\..*"
    r"|parallelism_config\.parallelism_config_(\w+_backend|\w+_strategy|sp_\w+|cp_\w+)|megatron_lm_config.megatron_lm_gradient_clipping|commands|command_file|tpu_name|tpu_zone"
)


_OF_THE_NODE = re.compile(r"^[ \t]*(num_|main_|machine_rank)\w*:.*", re.MULTILINE)


def file_of(path: Path, name: str, documents: Mapping[str, str]) -> Path | None:
    """The configuration that a command names: the one that its script writes before, else one beside it. What it leaves open of
    nodes and processes is not said; None = not there, or more of it is open."""
    if (text := documents.get(name, documents.get(name.removeprefix("./")))) is None:
        return beside(path, name)
    made = Written(path.parent / Path(name).name)
    made.text = _OF_THE_NODE.sub(lambda line: "" if is_open(line[0]) else line[0], text)
    return None if is_open(made.text) else made


def accelerate(path: Path, options: Mapping[str, list[str]] = MappingProxyType({}), said: Given | None = None) -> Sharding:
    """What the YAML of accelerate says, under the ``options`` of its launch command. Raises PlannerError."""
    return of_accelerate(path, overlaid(file_settings(path, "a configuration of accelerate", last=True), options), said)


def of_accelerate(path: Path, data: Mapping[str, Any], said: Given | None = None) -> Sharding:
    """The same of its mapping. Raises PlannerError."""
    if "zero_optimization" in data and "distributed_type" not in data:
        return _of_the_engine(path, data)
    kind = str(data.get("distributed_type") or "NO").upper().rpartition(".")[2]  # YAML's NO is false
    data, own = _handed_on(data)
    idle = [one for one, owner in OF_A_KIND.items() if owner != kind and data.get(one)]
    given = Settings(path, {name: value for name, value in data.items() if name not in idle}, said=said)
    given.get("distributed_type")
    precision = str(given.get("mixed_precision", "no")).lower()
    processes, machines = given.number("num_processes", least=-1) or 0, given.size("num_machines")
    unheard = given.flag("use_cpu") and kind in (*OF_A_KIND.values(), "MULTI_GPU")
    if given.flag("cpu") or (given.flag("use_cpu") and not unheard):
        raise OtherMachineError(f"{given.where('use_cpu')}: it trains on CPUs, which no plan is for")
    ids = str(given.get("gpu_ids", "all"))
    if processes < 1 and re.fullmatch(r"\d+(\s*,\s*\d+)*", ids):
        processes = len(ids.split(","))
    backend = str(given.section("dynamo_config").get("dynamo_backend") or given.get("dynamo_backend", "no"))
    readers = {"DEEPSPEED": _deepspeed_yaml, "MEGATRON_LM": _megatron_yaml}
    if kind == "FSDP":
        found = fsdp_section(given.section("fsdp_config"), "fsdp_")
    elif kind in readers:
        found = readers[kind](given)
    elif kind in ("NO", "MULTI_GPU"):
        found = Sharding(fields={"zero": 0})
    else:
        raise PlannerError(f"{given.where('distributed_type')} is {kind}; a plan knows FSDP, DEEPSPEED, MEGATRON_LM, MULTI_GPU")
    gpus = 1 if kind == "NO" else max(processes, 0) or None
    fields = {**found.fields, **_parallelism(given)}
    unread = tuple(one for one in given.left() if not QUIET_ACCELERATE.fullmatch(one.split(" = ")[0]))
    return dataclasses.replace(
        found, num_gpus=gpus, gpus_per_node=gpus // machines if gpus and machines else None, fields=fields,
        precision=found.precision or precision, unread=(*found.unread, *unread), compiled=backend.lower() != "no",
        notes=(*found.notes, *([UNWRAPPED] if kind == "FSDP" and _unwrapped(given) else []),
               *(f"{one} of {path.name} does nothing: distributed_type is {kind}" for one in idle),
               *([f"{', '.join(own)} of {path.name} does nothing: {HANDED_ON}"] if own else []),
               *([f"use_cpu of {path.name} does nothing: the launcher of {kind} does not hand it on"] if unheard else [])),
    )  # fmt: skip


HANDED_ON = "accelerate hands on zero_stage, offload_optimizer_device and the like, and no section of DeepSpeed's own"


def _handed_on(data: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The configuration of accelerate without what its launcher drops: sections of DeepSpeed's own JSON in deepspeed_config, whose
    names become options of the command one by one; and their names.  [accelerate, commands/launch.py: _validate_launch_command]"""
    part = data.get("deepspeed_config")
    own = [name for name, value in part.items() if isinstance(value, Mapping)] if isinstance(part, Mapping) else []
    if not own or not isinstance(part, Mapping):
        return data, []
    left = {name: value for name, value in part.items() if name not in own}
    return {**data, "deepspeed_config": left}, [f"deepspeed_config.{name}" for name in own]


def _of_the_engine(path: Path, data: Mapping[str, Any]) -> Sharding:
    """DeepSpeed's own configuration in the place of that of accelerate, which refuses names that it does not know."""
    given = Settings(path, {name: data.get(name) for name in ("num_processes", "num_machines")})
    found = deepspeed({name: value for name, value in data.items() if name not in given.data}, path, "accelerate")
    text = f"{path.name} is a configuration of DeepSpeed, with which accelerate does not start: taken for what DeepSpeed is given"
    return dataclasses.replace(found, num_gpus=given.number("num_processes"), notes=(*found.notes, text))


OF_A_KIND = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
"""Sections of accelerate and the distributed_type that takes them."""
UNWRAPPED = "without auto_wrap_policy every GPU gathers all weights at once, priced layer by layer: memory comes out too low"
"""Note about FSDP of one unit."""


def _unwrapped(given: Settings) -> bool:
    """Whether the configuration of accelerate has FSDP gather the whole model as one unit.  [accelerate, utils/dataclasses.py]"""
    part = given.section("fsdp_config").data
    policy = str(part.get("fsdp_auto_wrap_policy", part.get("auto_wrap_policy", "NO_WRAP")))
    return policy.upper() in ("NO_WRAP", "NONE") and not part.get("fsdp_transformer_layer_cls_to_wrap")


def said_or_asked(given: Settings, sharding: Sharding | None, *, launched: bool) -> tuple[Sharding, tuple[Question, ...]]:
    """How a job is split by its launcher, by the configuration of accelerate or by its own arguments; where none says it, plain
    data parallel if it is known how the job is ``launched``, else that and a question."""
    found = sharding or accelerate_named(given)
    own = isinstance(given.data.get("deepspeed"), str) and found is not None and found.kind in ("deepspeed", "fsdp")
    own = own or (found is not None and found.kind == "fsdp" and bool(given.data.get("fsdp")))
    if found is None or found.kind == "ddp" or own:
        found = _over(found, from_arguments(given, by_fsdp=True))
    alone = ", not needed with --gpus 1" * (given.said is not None and given.said.num_gpus is None)
    about = f"the configuration of accelerate that launches it{alone}; {OR_SAY}"
    asked = () if found is not None or launched else (Question(name="accelerate", choices=("FILE",), about=about),)
    split = _parallelism(given) if isinstance({**given.usual, **given.data}.get("parallelism_config"), Mapping) else {}
    return dataclasses.replace(found or Sharding(), fields={**(found.fields if found else {}), **split}), asked


def _over(launched: Sharding | None, own: Sharding | None) -> Sharding | None:
    """What the arguments of a program say over its launcher, which counts processes: deepspeed and fsdp are set up whatever
    the configuration of accelerate says, and deepspeed before fsdp.  [transformers, training_args.py; accelerate, state.py]"""
    if launched is None or own is None:
        return own or launched
    fields = {**launched.fields, **own.fields} if launched.kind == own.kind == "fsdp" else own.fields
    version = max(own.version, launched.version) if launched.kind == own.kind == "fsdp" else own.version
    notes = [one for one in launched.notes if own.kind != "fsdp" or one != UNWRAPPED]
    return dataclasses.replace(
        own, num_gpus=launched.num_gpus, gpus_per_node=launched.gpus_per_node, precision=own.precision or launched.precision,
        unread=(*launched.unread, *own.unread), notes=(*notes, *own.notes), fields=fields, version=version,
    )  # fmt: skip


def accelerate_named(given: Settings) -> Sharding | None:
    """The configuration of accelerate that ``--set accelerate=FILE`` names, or the launch command in a comment of the file, in a
    script beside it or above, or in a README.md; None = nobody names one. One that is not there is asked for."""
    said, named = given.get("accelerate"), guide(given.path)
    name = said or (named.file if named is not None else None)
    if name is None:
        return None
    file = beside(given.path, str(name))
    if file is None and given.said is not None and {"deepspeed", "fsdp"} & given.said.settings.keys():
        return None
    if file is None:
        by = f" by a command in {named.document}" if named is not None and not said else ""
        about = f"its path: it is launched with {shown(name)}{by}, a configuration of accelerate that is not there; {OR_SAY}"
        given.ask(Question(name="accelerate", choices=("FILE",), about=about))
        return Sharding(kind="fsdp", fields={"zero": 3})
    if named is None or file.name != Path(named.file).name:  # the user says another one
        return accelerate(file, said=given.said)
    found = accelerate(file, said=given.said)
    return dataclasses.replace(counted(found, named.counts), notes=(*found.notes, str(named)))


def counted(found: Sharding, counts: Mapping[str, int | None]) -> Sharding:
    """What the options num_processes and num_machines of accelerate say over its configuration; None = not known.
    [accelerate, commands/launch.py: _validate_launch_command]"""
    if not counts:
        return found
    gpus = counts.get("num_processes", found.num_gpus)
    machines = found.num_gpus // found.gpus_per_node if found.num_gpus and found.gpus_per_node else None
    machines = counts.get("num_machines", machines)
    each = gpus // machines if gpus and machines and gpus % machines == 0 else None
    return dataclasses.replace(found, num_gpus=gpus, gpus_per_node=each)


def _parallelism(given: Settings) -> dict[str, int]:
    """Fields of the section parallelism_config."""
    sizes, fields = given.section("parallelism_config"), {}
    tp, cp, sp, replicas, shards = (
        max(sizes.size(f"{prefix}{name}_size", least=-1) for prefix in ("parallelism_config_", ""))
        for name in ("tp", "cp", "sp", "dp_replicate", "dp_shard")
    )
    if tp > 1:
        fields["tp"] = tp
    if cp > 1 or sp > 1:
        method = CpMethod.A2A if sp > 1 else CpMethod.ALLGATHER
        fields |= {"cp": max(cp, sp), "cp_method": int(method)}
    if replicas > 1 and shards > 1:
        fields["dp_shard"] = shards
    return fields


def _deepspeed_yaml(given: Settings) -> Sharding:
    part = given.section("deepspeed_config")
    said = given.said.setting("deepspeed_config_file") if given.said is not None else None
    file = said or part.get("deepspeed_config_file")
    if file is not None:
        return deepspeed(file, given.path, "deepspeed_config_file", given if given.said is not None else None)
    optimizer, weights = (
        str(part.get(f"offload_{what}_device", "none")).lower() for what in ("optimizer", "param")
    )
    stage = part.size("zero_stage", 2, least=0)
    fields = {"zero": stage, **on_host(given, optimizer, weights if stage == 3 else "none", Settings(given.path, {}))}
    steps = part.get("gradient_accumulation_steps")
    number = None if steps in (None, "auto") else part.number("gradient_accumulation_steps")
    return Sharding(kind="deepspeed", fields=fields, accumulation=number, buffers=BUCKET if stage else 0)


def _megatron_yaml(given: Settings) -> Sharding:
    part = given.section("megatron_lm_config")
    tp, pp, cp, ep = (
        part.size(f"megatron_lm_{name}")
        for name in ("tp_degree", "pp_degree", "context_parallel_size", "expert_model_parallel_size")
    )
    mode = "selective" if part.flag("megatron_lm_recompute_activations") else "none"
    mode = str(part.get("megatron_lm_recompute_granularity", mode))
    fields = {
        "tp": tp, "pp": pp, "cp": cp, "zero": int(part.flag("megatron_lm_use_distributed_optimizer")),
        "sequence_parallel": int(part.flag("megatron_lm_sequence_parallelism") and tp > 1),
        "recompute": {"full": int(Recompute.FULL), "selective": int(Recompute.SELECTIVE)}.get(mode, int(Recompute.NONE)),
        **({"recompute_modules": int(Module.CORE_ATTENTION)} if mode == "selective" else {}), **({"ep": ep} if ep > 1 else {}),
    }  # fmt: skip
    return Sharding(kind="megatron", fields=fields, accumulation=part.number("megatron_lm_num_micro_batches"))


def unread_precision(given: Settings, by_habit: bool) -> tuple[Question, ...]:
    """The precision, where it stands in a configuration of accelerate that is not there; ``by_habit``: bf16 where none is said."""
    file = given.data.get("accelerate")
    said = any(given.get(one) is not None for one in ("fp16", "bf16", "dtype", "torch_dtype"))
    if by_habit or said or file is None or beside(given.path, str(file)) is not None:
        return ()
    about = "whether the configuration of accelerate computes in bf16; or say --set fp16=true"
    return (Question(name="bf16", about=about, choices=("true", "false")),)
