"""verl: the actor's update in the Hydra overrides of a script; generation and the critic are not in the plan."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.cost.parameters import total_parameters
from planner.errors import PlannerError, shown
from planner.layout import CpMethod, Recompute
from planner.model import ModelSpec
from planner.trainer_options import spell
from planner.trainers.megatron.recompute_words import of_dense_layers, recompute
from planner.trainers.reading.commands import Launch, launched
from planner.trainers.reading.configuration import Reading, reduced_last
from planner.trainers.reading.fine_tuning import adapter_targets, layers_beside
from planner.trainers.reading.given import Given, OtherStepError, Question
from planner.trainers.reading.interpolation import extended, override, resolved
from planner.trainers.reading.megatron_degrees import degrees
from planner.trainers.reading.named_models import named_model
from planner.trainers.reading.programs import program_file
from planner.trainers.reading.settings import Settings, parsed
from planner.trainers.reading.values import not_priced, percent, quotient, read_text
from planner.trainers.reading.versions import newer, project_root
from planner.trainers.verl.sft_words import by_tokens, kernel, of_tokens, own_kernel, require_adam, require_priced
from planner.trainers.verl.usual import is_sft, own_sft, usual
from planner.units import GIB

PROGRAM = (
    r"(verl\.(?:trainer|experimental)|recipe)\.[\w.]+|\w+\.trainer\.(?:fsdp_)?sft_trainer|[\w.]+\.fsdp_sft_trainer"
    r"|\S*verl/trainer/\w+\.py|\S*main_(\w+_)?ppo(\.py)?"
)
LENGTHS = ("max_prompt_length", "max_response_length")
OWN = re.compile(r"main_\w+_ppo|fully_async_main|one_step_off")
"""Programs that make their own rounds of verl's parts."""
READ_HERE = re.compile(
    r"actor_rollout_ref\.(actor\.(megatron|fsdp_config)\.(?!dist_ckpt|use_dist|dist_checkpointing|wrap_policy|forward_prefetch|seed).*"
    r"|model\.(override_config|tiled_mlp)\..*)|model\.fsdp_config\..*|engine\..*"
)
"""Of what is left these settings may change the actor's update; all others are generation, reward and logging."""
OWN_STEP = re.compile(
    r"(?!(actor_rollout_ref|critic|data|trainer|algorithm|reward_model|ray_init|hydra)\.)\w+\.\w*(loss|distill|teacher)\w*"
)
"""Keys of sections that verl does not have, by words that say that a program adds to the loss."""
OWN_TERM = re.compile(r"(\w+\.)*\w*(regulari[sz]|distill|teacher)\w*\.(enabled?|use) = ")
"""Switches of sections that a fork's SFT trainer adds to the loss, which keep a second model."""
GROUPS = ("engine", "model", "optim")
"""Files of hydra that a word without a dot chooses: engine=fsdp."""
LONG = {"cn": "config_name", "cp": "config_path", "cd": "config_path", "config_dir": "config_path"}
"""Options of hydra that name a configuration; --config-dir adds a folder where it is looked for."""
WAITS = "weights and optimizer states that wait on the host between steps are on the GPU in the update"
HALF = ("bf16", "bfloat16", "fp16", "float16")
COMPUTED = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "float32": "fp32", "fp32": "fp32"}
"""engine.dtype -> precision.  [verl, workers/config/engine.py]"""
ANOTHER = re.compile(r"(?<![a-z])(dpo|sft|kto|orpo|simpo|rm|reward)(?![a-z])")
"""Steps in the name of a program that takes verl's keys for the model alone."""
OFFLOAD = "weights and optimizer states that wait on the host during generation are on the GPU in the update"


def read(path: Path, said: Given) -> Reading:
    """The job of a script, or of a whole configuration in YAML. Raises PlannerError."""
    if path.suffix in (".yaml", ".yml"):
        data = said.filled(extended(path, "a configuration of verl", known=("ppo_trainer", "ppo_megatron_trainer")))
        if isinstance(data.get("model"), dict) and "partial_pretrain" in data["model"]:  # of its SFT trainer
            alone = Launch(program="fsdp_sft_trainer", settings={}, words=[], sharding=None, num_gpus=None)
            return _sft(Settings(path, resolved(data), said=said), alone, said.num_gpus)
        if "actor_rollout_ref" not in data:
            raise PlannerError(f"{path}: it has no section actor_rollout_ref: verl's other configurations are not read")
        given = Settings(path, resolved(data), said=said)
        for name in LENGTHS:  # what it extends may not be there, and verl's own 512 are hardly meant
            if given.section("data").get(name) is None:
                given.ask(Question(name=f"data.{name}", about="tokens"))
        return _by_release(_actor(given, said.num_gpus, "megatron" in path.stem), path)
    try:
        found = launched(path, said, PROGRAM)
    except PlannerError:  # a program of its own, known by its overrides
        try:
            found = launched(path, said, r"[^\s=]+\.py", r"(?s)[+~]*\w+(\.\w+)+=.*", modules=True)
        except PlannerError:  # behind options of its own
            found = launched(path, said, r"[^\s=]*train\w*\.py")
        if not any(one.startswith("actor_rollout_ref.") for one in found.words) and not is_sft(found):
            raise
        step = ANOTHER.search(re.split(r"[./]", found.program.removesuffix(".py"))[-1])
        if step is not None and (own := own_sft(path, found.program) if step[0] == "sft" else ()):
            found = dataclasses.replace(found, notes=(*found.notes, *own))
        elif step is not None:
            what = f"{shown(found.program)} is no program of verl, and its step is {step[0]} by its name"
            raise OtherStepError(f"{path}: {what}: it trains by keys of its own, which are not read") from None
    found = dataclasses.replace(found, settings={LONG.get(name, name): value for name, value in found.settings.items()})
    pairs = [one.lstrip("+~").partition("=") for one in found.words if "=" in one]
    words = {key: parsed(value) for key, _, value in pairs if key not in GROUPS}
    known, stands, notes = usual(path, found, words)
    notes = (*found.notes, *notes)
    given = Settings(path, resolved(said.filled(override(known, {**words, **stands}))), said=said)
    if given.section("worker").data:
        raise PlannerError(f"{path}: its section worker is EasyR1's, whose configuration is not read; actor_rollout_ref is verl's")
    named = found.settings.get("config_name")
    if named and not given.section("actor_rollout_ref").data and "sft" not in found.program:
        raise PlannerError(f"{path}: it names the configuration {shown(named)}, which is not there; import that file")
    if given.flag("distillation.enabled"):
        raise PlannerError(f"{path}: distillation.enabled: distillation from a teacher is not modelled")
    if given.flag("trainer.val_only"):
        raise PlannerError(f"{path}: trainer.val_only: it evaluates a model and trains nothing")
    if "sft_trainer" in found.program or given.get("model.partial_pretrain") is not None:
        reading = _sft(given, found, said.num_gpus)
        reading = _by_release(reading, path) if by_tokens(found) else reading
        return dataclasses.replace(reading, notes=(*reading.notes, *notes))
    engine = next((one.rpartition("=")[2] for one in found.words if re.match(r"[+~]*(\w+@)?model_engine=", one)), "dp")
    if engine not in ("dp", "megatron"):
        raise PlannerError(f"{path}: model_engine={engine} is not modelled; dp, which is FSDP, and megatron are")
    megatron = engine == "megatron" or "megatron" in str(found.settings.get("config_name", ""))
    reading = _by_release(_actor(given, said.num_gpus, megatron, OWN.search(found.program) is not None), path)
    return dataclasses.replace(reading, notes=(*reading.notes, *notes))


DEFERS, ENGINE = (0, 9), "verl/workers/engine/fsdp/transformer_impl.py"
"""Version of verl whose FSDP engine reduces gradients with the last micro batch, and where it does.  [_gradient_sync_context]"""


def _by_release(job: Reading, path: Path) -> Reading:
    """The job as the version of verl, or its source beside the file, reduces gradients; a note where that is not known."""
    last, new, root = reduced_last(job, job.trainer.startswith("verl")), newer(path, "verl", DEFERS), project_root(path)
    if (root / "verl/workers").is_dir():
        new = (root / ENGINE).is_file() and "set_requires_gradient_sync" in read_text(root / ENGINE)
    if new is not None or last.trainer == job.trainer:
        return last if new else job
    shards = job.fields.get("dp_shard") or job.fields.get("dp", 1)
    size = 4.0 * total_parameters(job.model) * (1.0 - 1.0 / shards) / GIB if isinstance(job.model, ModelSpec) else 0.0
    by = f" by up to {size:.1f} GiB" if size else ""
    what = "verl since 0.9 keeps gradients whole until the last micro batch, and they are priced as sharded after each, as before"
    return dataclasses.replace(job, notes=(*job.notes, f"{what}: with it memory comes out too low{by}"))


def _actor(given: Settings, num_gpus: int | None, megatron: bool, own_rounds: bool = False) -> Reading:
    if own := [one.partition(" = ")[0] for one in given.left() if OWN_STEP.fullmatch(one.partition(" = ")[0])]:
        raise not_priced(str(given.path), own, own)
    actor, model = given.section("actor_rollout_ref").section("actor"), given.section("actor_rollout_ref").section("model")
    if actor.get("strategy", "fsdp") not in ("fsdp", "fsdp2", "megatron"):
        raise PlannerError(f"{actor.where('strategy')} is {shown(actor.get('strategy'))}; a plan knows fsdp, fsdp2 and megatron")
    megatron = megatron or actor.get("strategy") == "megatron"
    name = model.label("path")
    spec, notes = named_model(name, given.path) if name else (None, ())
    gpus = num_gpus or given.section("trainer").size("n_gpus_per_node", 8) * given.section("trainer").size("nnodes")
    samples = given.section("actor_rollout_ref").section("rollout").size("n")
    data = given.section("data")
    mini = actor.size("ppo_mini_batch_size", 256)
    if not own_rounds:  # an update has no more than one round of generation
        agents = given.section("actor_rollout_ref").section("rollout").size("n_agent")  # of forks: answers outside of n
        mini = min(mini, data.size("train_batch_size", mini) * agents)
    batch = mini * samples
    length = data.size("max_prompt_length", 512) + data.size("max_response_length", 512)
    core = actor.section("megatron")
    fields = {**_megatron(core), **_offloaded(actor)} if megatron else _fsdp(actor, model)
    notes = (*notes, *of_dense_layers(core.section("override_transformer_config"), fields, spec))
    length += -length % (2 * fields["cp"]) if fields["cp"] > 1 else 0  # padded so that every rank has as many tokens
    dp = quotient(gpus, fields["tp"] * fields["cp"] * fields["pp"], f"{given.path}: GPUs by the degrees")
    each = quotient(batch, dp, f"{given.path}: ppo_mini_batch_size x rollout.n by data parallel ranks")
    micro, more = _micro(actor, each, length, fields["cp"], dp)
    steps = quotient(each, micro, f"{given.path}: sequences of a rank by micro batches")
    fields |= {"dp": dp, "micro_batch_size": micro, "num_microbatches": steps}
    if not megatron and (size := actor.section("fsdp_config").size("fsdp_size", -1, -1)) > 0 and size < gpus:
        fields["dp_shard"] = quotient(size, fields["cp"], f"{given.path}: fsdp_size by the Ulysses degree")
    rank, targets, beside = _adapters(model)
    part = actor.section("megatron" if megatron else "fsdp_config")
    loads = [part.flag(f"{what}_offload") for what in ("param", "optimizer", "grad")]
    ahead, foreseen = _mtp(model, spec, megatron)
    critic = ("the critic is not in the plan",) if given.section("critic").data else ()
    return Reading(
        trainer=_trainer(part, model, megatron), fields=fields, model=spec, model_name=name, num_gpus=gpus,
        global_batch_size=batch, sequence_length=length, precision=_precision(actor, megatron, rank), lora_rank=rank,
        architecture={"mtp_layers": ahead},
        lora_targets=targets,
        frozen_weights=("bf16" if megatron or _half(actor) else "fp32") if rank else None,
        unread=tuple(one for one in given.left() if READ_HERE.fullmatch(one.split(" = ")[0])),
        notes=(*notes, "the update of the actor alone: generation and log probabilities run before it", *more, *foreseen, *critic,
               *((OFFLOAD,) if any(loads) else ()), *beside),
    )  # fmt: skip


def _adapters(model: Settings) -> tuple[int, str, tuple[str, ...]]:
    """(rank, one of LORA_TARGETS, what was taken for what)."""
    rank = model.size("lora_rank", 0, 0) or model.section("lora").size("rank", 0, 0)
    named = model.get("target_modules", "all-linear")
    targets = adapter_targets(named) if rank else "all"
    return rank, targets, layers_beside(named, targets) if rank else ()


def _mtp(model: Settings, spec: ModelSpec | None, megatron: bool) -> tuple[int, tuple[str, ...]]:
    """Layers that predict further tokens, which verl takes out of a model unless they are trained, and what is said of them.
    [verl, workers/megatron_workers.py: num_nextn_predict_layers = 0; models/mcore/mtp_patch.py, weight_converter.py: one layer]"""
    part = model.section("mtp")
    on, trained, detached = (part.flag(name) for name in ("enable", "enable_train", "detach_encoder"))
    if not on:
        return 0, ()
    if not (megatron and trained):
        why = "its layer is loaded and not trained, which is not priced" if megatron else "verl has it over Megatron alone"
        raise PlannerError(f"{part.where('enable')} is true: {why}; --set {part.place}enable=false imports the job without")
    ends = f"{part.place}detach_encoder ends the gradient of the MTP layer at the hidden states; priced as if it went on"
    unknown = spec is None or not spec.mtp_layers
    taken = f"{part.place}enable: one MTP layer like the last layer, the number that verl converts"
    return (spec.mtp_layers if spec else 0) or 1, (*((taken,) if unknown else ()), *((ends,) if detached else ()))


def _micro(actor: Settings, each: int, length: int, cp: int, dp: int) -> tuple[int, tuple[str, ...]]:
    """Sequences per forward pass, and what was taken for what."""
    if actor.flag("use_dynamic_bsz"):
        tokens = actor.size("ppo_max_token_len_per_gpu", 16384) * cp
        most = max(tokens // length, 1)
        micro = max(one for one in range(1, min(most, each) + 1) if each % one == 0)
        return micro, (f"micro batches of up to {tokens} tokens are read as {micro} sequences of {length} tokens",)
    given = actor.number("ppo_micro_batch_size_per_gpu")
    if given is None and (whole := actor.number("ppo_micro_batch_size")) is not None:
        given = max(whole // dp, 1)
    if given is None:
        actor.ask(Question(name=f"{actor.place}ppo_micro_batch_size_per_gpu", about="sequences per forward pass"))
    return min(given or 1, each), ()


def _fsdp(actor: Settings, model: Settings) -> dict[str, int]:
    part = actor.section("fsdp_config")
    sp = max(actor.size("ulysses_sequence_parallel_size"), part.size("ulysses_sequence_parallel_size"))
    second = "fsdp2" in (actor.get("strategy"), part.get("strategy"))  # FSDP1 reads neither word below  [workers/engine/fsdp]
    whole, host = not part.flag("reshard_after_forward", True), part.flag("offload_policy")
    return {
        "tp": 1, "pp": 1, "cp": sp, "zero": 2 if second and whole else 3, "offload_parameters": int(second and host),
        "recompute": int(Recompute.FULL if model.flag("enable_gradient_checkpointing", True) else Recompute.NONE),
        "offload_activations": int(model.flag("enable_activation_offload")),
        **({"cp_method": int(CpMethod.A2A)} if sp > 1 else {}),
    }  # fmt: skip


def _megatron(part: Settings) -> dict[str, int]:
    core = part.section("override_transformer_config")
    held = degrees(part, etp=part.size("tensor_model_parallel_size"))
    fields = {
        **held, "sequence_parallel": int(part.flag("sequence_parallel", True) and held["tp"] > 1),
        "zero": int(part.flag("use_distributed_optimizer", True)),
        "first_stage_layers": core.size("num_layers_in_first_pipeline_stage", 0, 0),
        "last_stage_layers": core.size("num_layers_in_last_pipeline_stage", 0, 0), **_recompute(core),
    }  # fmt: skip
    if held["ep"] == 1 and part.get("expert_tensor_parallel_size") is None:
        fields.pop("etp")
    return fields


def _offloaded(actor: Settings) -> dict[str, int]:
    """Optimizer states that are updated on the host.  [Megatron's optimizer_cpu_offload]"""
    own = actor.section("optim").section("override_optimizer_config")
    if not own.flag("optimizer_cpu_offload"):
        return {}
    return {"offload_optimizer": percent(own.get("optimizer_offload_fraction", 1.0), own.where("optimizer_offload_fraction"))}


def _recompute(core: Settings) -> dict[str, int]:
    core.first("recompute_method", "recompute_num_layers")
    return recompute(core, usual="none")


def _half(actor: Settings) -> bool:
    return str(actor.section("fsdp_config").get("model_dtype", "fp32")).lower() in ("bf16", "bfloat16")


def _precision(actor: Settings, megatron: bool, rank: int) -> str:
    dtype = str(actor.section("megatron" if megatron else "fsdp_config").get("dtype", "bfloat16"))
    if megatron or rank or not _half(actor):
        return "fp16" if dtype in ("float16", "fp16") else "bf16"
    return "bf16_true"


def _trainer(
    part: Settings, model: Settings, megatron: bool, engines: bool = False, attention: str = "", *, shifts: bool = False
) -> str:
    if not megatron:
        own = model.section("override_config")
        lean = model.flag("use_fused_kernels")
        flash = engines and not lean
        model.flag("use_liger")  # norms, rotary embedding and SwiGLU: without labels its loss does not run, and logits are written
        loss = {"loss": "fused_linear"} if lean else {"loss": "flash"} if flash else {"loss": "shifted"} if shifts else {}
        return spell("verl", {**loss, "attention_kernel": kernel(own, attention)})
    ddp: Mapping[str, Any] = part.section("override_ddp_config").data
    core = part.section("override_transformer_config")
    options = {"gradient_dtype": "bf16"} if ddp.get("grad_reduce_in_fp32") is False else {}
    if core.get("moe_token_dispatcher_type") == "flex" or core.flag("moe_enable_deepep"):
        options["expert_dispatch"] = "deepep"
    return spell("megatron", options)


def _sft(given: Settings, found: Launch, num_gpus: int | None) -> Reading:
    """The job of its SFT trainer, over FSDP or Megatron. Raises PlannerError for other engines."""
    engine = next((one.rpartition("=")[2] for one in found.words if re.match(r"[+~]*(model_)?engine=", one)), "fsdp")
    if engine not in ("fsdp", "fsdp2", "megatron"):
        raise PlannerError(f"{given.path}: engine={engine} is not modelled; fsdp and megatron are")
    require_adam(given)
    if engine == "megatron" or "tensor_model_parallel_size" in given.section("engine").data:
        return _sft_megatron(given, found, num_gpus)
    if own := [one.partition(" = ")[0] for one in given.left() if OWN_TERM.match(one)]:
        raise not_priced(str(given.path), own, own)
    model, data = given.section("model"), given.section("data")
    name = model.label("partial_pretrain", "path")
    spec, notes = named_model(name, given.path) if name else (None, ())
    gpus = num_gpus or _gpus(given, found)
    config = given.section("engine" if given.section("engine").data or "sft_trainer" in found.program.split(".")[-1:] else "model")
    config = config if config.place == "engine." else config.section("fsdp_config")
    sp = max(given.size("ulysses_sequence_parallel_size"), config.size("ulysses_sequence_parallel_size"))
    first = config.place == "engine." and "fsdp2" not in (engine, config.get("strategy"))  # FSDP1, the engine's default
    (rank, targets, beside), batch = _adapters(model), data.size("train_batch_size", 256)
    micro, more = of_tokens(data, sp, (gpus or 0) // sp, batch, by_tokens(found))
    fields = {
        "cp": sp, "micro_batch_size": micro, "zero": 3 if config.flag("reshard_after_forward", True) or first else 2,
        **({"cp_method": int(CpMethod.A2A)} if sp > 1 else {}),
        "recompute": int(Recompute.FULL if model.flag("enable_gradient_checkpointing", True) else Recompute.NONE),
        "offload_parameters": int(_on_the_host(config, model) and not first),
        "offload_activations": int(model.flag("enable_activation_offload")),
    }  # fmt: skip
    if config.get("strategy") not in (None, "fsdp", "fsdp2"):
        raise PlannerError(f"{config.where('strategy')} is {shown(config.get('strategy'))}; a plan knows fsdp and fsdp2")
    waits = (WAITS,) if True in {config.flag(f"{what}_offload") for what in ("param", "optimizer")} else ()  # any() asks for one
    if gpus is not None:
        dp = quotient(gpus, sp, f"{given.path}: GPUs by ulysses_sequence_parallel_size")
        fields |= {"dp": dp, "num_microbatches": quotient(batch, micro * dp, f"{given.path}: train_batch_size by micro batches")}
    if gpus is not None and config.place == "engine." and 0 < (size := config.size("fsdp_size", -1, -1)) < fields["dp"] * sp:
        fields["dp_shard"] = quotient(size, sp, f"{given.path}: engine.fsdp_size by the Ulysses degree")
    ahead, foreseen = _mtp(model, spec, megatron=False)
    half = str(config.get("model_dtype", "fp32")).lower() in HALF
    whole = half and (model.flag("cast_adapters", True) or not rank)  # else adapters in fp32 over weights of 16 bits
    computed = config.choice("dtype", COMPUTED, "bfloat16")
    attention, said = own_kernel(program_file(given.path, found.program), model, sp)
    return Reading(
        trainer=_trainer(config, model, False, by_tokens(found), attention, shifts=sp == 1 and micro > 1), fields=fields,
        model=spec, model_name=name, num_gpus=gpus, global_batch_size=batch, sequence_length=data.size("max_length", 1024),
        precision="bf16_true" if whole and computed == "bf16" else computed, lora_rank=rank, lora_targets=targets,
        frozen_weights=("bf16" if half else "fp32") if rank else None,
        notes=(*notes, *more, *said, *foreseen, *waits, *require_priced(given), *beside),
        architecture={"mtp_layers": ahead},
        unread=tuple(one for one in given.left() if READ_HERE.fullmatch(one.split(" = ")[0])),
    )  # fmt: skip


def _gpus(given: Settings, found: Launch) -> int | None:
    """GPUs by the launcher, or by the settings that the trainer over Ray starts its workers with."""
    if not found.program.endswith("sft_trainer_ray"):
        return found.num_gpus
    return given.section("trainer").size("n_gpus_per_node") * given.section("trainer").size("nnodes")


def _on_the_host(config: Settings, model: Settings) -> bool:
    """Whether FSDP keeps weights on the host: cpu_offload turns it on, and the first FSDP needs offload_params too.
    [trainer/fsdp_sft_trainer.py: CPUOffload(offload_params=...)]"""
    both, first = config.flag("offload_params"), str(model.get("strategy", "")) == "fsdp"
    return config.flag("offload_policy") or (config.flag("cpu_offload") and (both or not first))


def _sft_megatron(given: Settings, found: Launch, num_gpus: int | None) -> Reading:
    """The job of the SFT trainer over Megatron."""
    model, data, engine = given.section("model"), given.section("data"), given.section("engine")
    name = model.label("path", "partial_pretrain")
    spec, notes = named_model(name, given.path) if name else (None, ())
    gpus, batch = num_gpus or _gpus(given, found), data.size("train_batch_size", 256)
    rank, targets, beside = _adapters(model)
    if rank and (kind := str(model.section("lora").get("type", "lora"))) not in ("lora", "canonical_lora"):
        raise PlannerError(f"{model.where('lora.type')} is {shown(kind)}; adapters of LoRA are priced")
    fields = {**_megatron(engine), **_offloaded(given)}
    notes = (*notes, *of_dense_layers(engine.section("override_transformer_config"), fields, spec))
    ranks = (gpus or 0) // (fields["tp"] * fields["cp"] * fields["pp"])
    micro, more = of_tokens(data, fields["cp"], ranks, batch, by_tokens(found))
    length = data.size("max_length", 1024)
    length += -length % (2 * fields["cp"]) if fields["cp"] > 1 else 0
    fields["micro_batch_size"] = micro
    if gpus is not None:
        dp = quotient(gpus, fields["tp"] * fields["cp"] * fields["pp"], f"{given.path}: GPUs by the degrees")
        fields |= {"dp": dp, "num_microbatches": quotient(batch, micro * dp, f"{given.path}: train_batch_size by micro batches")}
    ahead, foreseen = _mtp(model, spec, megatron=True)
    waits = (OFFLOAD,) if True in {engine.flag(f"{what}_offload") for what in ("param", "optimizer", "grad")} else ()  # so too
    return Reading(
        trainer=_trainer(engine, model, True), fields=fields, model=spec, model_name=name, num_gpus=gpus, global_batch_size=batch,
        sequence_length=length, precision="fp16" if str(engine.get("dtype")) in ("float16", "fp16") else "bf16", lora_rank=rank,
        lora_targets=targets,
        frozen_weights="bf16" if rank else None, architecture={"mtp_layers": ahead},
        notes=(*notes, *more, *foreseen, *waits, *require_priced(given), *beside),
        unread=tuple(one for one in given.left() if READ_HERE.fullmatch(one.split(" = ")[0])),
    )  # fmt: skip
