"""The settings of a recipe of Megatron-Bridge, or of NeMo before it, as a job."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.layout import CpMethod, Order, Recompute, Schedule
from planner.model import ModelSpec
from planner.runs.job import chunk_layers
from planner.trainer import load_trainer
from planner.trainer_options import spell
from planner.trainers.megatron.core_settings import BY_MOMENTS, CP_METHODS
from planner.trainers.megatron.recompute_words import of_dense_layers, recompute
from planner.trainers.megatron.trainer_words import (
    FSDP_IN_8_BITS,
    GRADIENT_OF_LOGITS,
    REMAINDERS,
    STATE_TYPES,
    loss_fusion,
)
from planner.trainers.megatron_bridge import effective
from planner.trainers.megatron_bridge.decisive import MATTERS, require_priced, without_layers
from planner.trainers.reading.configuration import Reading, batch_that_divides
from planner.trainers.reading.fine_tuning import adapter_targets
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.megatron_degrees import degrees, forced_balance, padded_experts, states_on_the_host
from planner.trainers.reading.model_notes import of_trained_images
from planner.trainers.reading.named_models import named_model
from planner.trainers.reading.settings import Settings, parsed
from planner.trainers.reading.shell.text import is_open
from planner.trainers.reading.values import not_priced, quotient, stage_ends

CAPACITY = ("model.moe_expert_capacity_factor", "model.moe_pad_expert_input_to_capacity")
SHARDS = ("dist.use_torch_fsdp2", "strategy.fsdp", "ddp.use_custom_fsdp")
"""Settings that hand weights to an FSDP that a plan of these trainers does not hold; the second and third are NeMo's."""


def parse(path: Path, said: Given, settings: dict[str, Any], gpus: int | None, trainer: str = "megatron-bridge",
          notes: tuple[str, ...] = ()) -> Reading:  # fmt: skip
    """The job that the settings of a recipe describe, of Megatron-Bridge or of NeMo before it. Raises PlannerError."""
    for name in list(said.settings):
        if "." in name or name in settings:
            settings[name] = parsed(str(said.setting(name)))
    hf = _named(path, settings)
    model, noted = named_model(hf, path) if hf else (None, ())
    settings = effective.with_fields(settings)
    require_priced(path, settings)
    settings, model, asked, own = without_layers(settings, model, said.model is not None)
    said.questions.extend(asked)
    given = Settings(path, settings, said=said)
    given.label("model.hf") if "model.hf" in settings else ""
    model = _with_tables(given, said, model)
    if trainer == "nemo" and (ahead := given.number("model.mtp_num_layers", 0, 0)):
        where = given.where("model.mtp_num_layers")
        raise PlannerError(f"{where} is {ahead}: layers that predict more tokens are not priced in NeMo; 0 imports the job")
    shards = [one for one in (*SHARDS, *effective.FSDP * (trainer == "nemo")) if given.get(one) not in (None, "", False, "false")]
    if shards:
        raise not_priced(str(path), shards, shards)
    if not given.data.get("model.tensor_model_parallel_size") and "model.hf" not in settings:
        why = "a function of another module that is not there makes it, or it starts none; import the file of the recipe"
        raise PlannerError(f"{path}: no recipe of Megatron-Bridge was found in this file: {why}")
    fields = _layout(given, said.spec() or model, trainer)
    batch, micro = given.size("train.global_batch_size", 32), given.size("train.micro_batch_size", 1)
    fields["micro_batch_size"] = micro
    split = fields["tp"] * fields["cp"] * fields["pp"]
    if gpus is not None and gpus % split and said.num_gpus is None:
        given.ask(Question(name="--gpus N", about=f"{gpus} by the file, which tp x pp x cp = {split} does not divide"))
        gpus = None
    if gpus is not None:
        fields["dp"] = dp = quotient(gpus, split, f"{path}: GPUs by the degrees")
        question = batch_that_divides(batch, micro, dp)
        fields |= {"num_microbatches": batch // (micro * dp)} if question is None else {}
        plain = all(one.name.startswith("--") for one in said.questions)  # other answers may change it
        if question is not None and said.global_batch_size is None and plain:
            said.questions.append(question)
    peft = given.get("peft")
    if peft not in (None, "lora", "LoRA", "none", "None"):
        raise PlannerError(f"{path}: peft is {shown(peft)}, which is not modelled; lora is")
    adapters = peft in ("lora", "LoRA")
    for name in ("dim", "target_modules", "dropout"):  # beside the scheme by its name
        settings.setdefault(f"peft.{name}", None)
    evenly = padded_experts(given.data.get(CAPACITY[0]), given.data.get(CAPACITY[1]), fields["ep"])
    for name in CAPACITY if evenly is not None else ():
        given.get(name)
    (length, packed), (options, changed) = _length(given), _trainer(given, trainer)
    noted = (*noted, *of_dense_layers(_core(given), fields, said.spec() or model))
    return Reading(
        trainer=options, fields=fields, model=model, model_name=hf, num_gpus=gpus, global_batch_size=batch,
        sequence_length=length, precision=effective.precision(given), optimizer=_optimizer(given),
        lora_rank=given.size("peft.dim", 32) if adapters else 0,
        lora_targets=_targets(given) if adapters else "all",
        frozen_weights=_frozen(given) if adapters else None,
        expert_imbalance=evenly or forced_balance(given.get("model.moe_router_force_load_balancing")),
        unread=tuple(one for one in given.left() if MATTERS.fullmatch(one.split(" = ")[0])),
        notes=(*noted, *own, *notes, *packed, *changed, *(_adapters(given) if adapters else _images(given, said.spec() or model))),
    )  # fmt: skip


def _images(given: Settings, model: ModelSpec | None) -> tuple[str, ...]:
    """Note about the image encoder that the bridge of such a model builds, and trains.  [qwen_vl/*_provider.py]"""
    frozen = given.flag("model.freeze_vision_model")
    return () if frozen else of_trained_images(model, "model.freeze_vision_model")


def _with_tables(given: Settings, said: Given, model: ModelSpec | None) -> ModelSpec | None:
    """The model with one table for embedding and head, or with two, and with layers that predict further tokens, where a script
    says so over the model of its recipe; asks for it where it is given another window."""
    tied = given.get("model.share_embeddings_and_output_weights")
    further, window = given.number("model.mtp_num_layers", 0, 0), given.get("model.window_size")
    if model is None:
        return None
    if "model.window_size" in given.data and bool(window) != bool(model.window) and said.model is None:
        about = f"model.window_size {shown(str(window))} makes it a model of its own: a preset or a config.json like it"
        given.ask(Question(name="--model NAME", about=about))
    changes: dict[str, Any] = {} if tied not in (True, False) or tied == model.tied_embeddings else {"tied_embeddings": tied}
    if "model.mtp_num_layers" in given.data and further != model.mtp_layers:
        changes["mtp_layers"] = further
    return dataclasses.replace(model, **changes, published_parameters=0.0) if changes else model


def _named(path: Path, settings: dict[str, Any]) -> str:
    """What the model is called, without asking for it yet."""
    name = settings.get("model.hf")
    return Settings(path, {"model.hf": name}).label("model.hf") if isinstance(name, str) and not is_open(name) else ""


PACKED = ("dataset.packed_sequence_specs.packed_sequence_size", "dataset.offline_packing_specs.packed_sequence_size",
          "dataset.packed_sequence_size")  # fmt: skip


def _length(given: Settings) -> tuple[int | None, tuple[str, ...]]:
    """(Tokens of a sequence, a note): what samples are packed into, where that is said."""
    length = given.number("model.seq_length") or given.number("dataset.seq_length")
    given.get("dataset.seq_length")
    sizes = [given.number(one, None, -1) for one in PACKED]
    off = given.data.get("dataset.packed_sequence_specs", 0) is None and given.data.get("dataset.offline_packing_specs", 0) is None
    size = next((one for one in sizes if one is not None and one > 0), None)
    if size is None or size == length or off:
        return length, ()
    return size, (f"samples are packed into sequences of {size} tokens",)


def _frozen(given: Settings) -> str:
    return "fp8" if effective.weights_in_fp8(given) else "bf16"


def _adapters(given: Settings) -> tuple[str, ...]:
    """Notes about adapters that are priced otherwise than they are made."""
    named, notes = given.get("peft.target_modules"), []
    names = [str(one) for one in named] if isinstance(named, list) else []
    if any("*" in one or re.search(r"layers?\.\d", one) for one in names):
        notes.append(f"adapters on {', '.join(names)[:80]} alone: priced on every layer")
    if names and adapter_targets(named) == "all" and not {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"} <= set(names):
        notes.append(f"adapters on {', '.join(names)[:80]} alone are priced as on all linear layers")
    if given.above_zero("peft.dropout"):
        notes.append("peft.dropout: the masks of dropout beside adapters are not in the plan")
    return tuple(notes)


def _targets(given: Settings) -> str:
    """Without names LoRA takes all linear layers.  [peft/lora.py]"""
    named = given.get("peft.target_modules")
    return adapter_targets(named) if named else "all"


EXPERTS_CUT = "model.expert_tensor_parallel_size"


def _experts_cut(given: Settings, model: ModelSpec | None, held: Mapping[str, int], trainer: str) -> int:
    """Tensor parallelism of experts. Where nothing sets it, it is tp in Megatron Core, and Megatron-Bridge has changed its mind.
    [model_parallel_config.py, __post_init__; Megatron-Bridge 0.6, models/transformer_config.py]"""
    tp, ep = held["tp"], held["ep"]
    if given.data.get(EXPERTS_CUT, 1) is not None or not (ep > 1 if model is None else model.is_moe):
        return held["etp"]
    if trainer != "nemo" and tp > 1 and ep > 1:
        about = "unset: tp until Megatron-Bridge 0.5, 1 since 0.6"
        given.ask(Question(name=EXPERTS_CUT, about=about, choices=(str(tp), "1")))
    return tp


def _layout(given: Settings, model: ModelSpec | None, trainer: str) -> dict[str, int]:
    held = degrees(given, "model.")
    held["etp"] = _experts_cut(given, model, held, trainer)
    if held["pp"] == 1:  # a recipe keeps its virtual stages when its pipeline is taken away
        held |= {"vpp": 1, "schedule": int(Schedule.ONE_F_ONE_B)}
    elif (chunks := _chunks(given)) and len(chunks) % held["pp"] == 0:  # the layout says how many virtual stages there are
        held |= {"vpp": len(chunks) // held["pp"]}
        held["schedule"] = int(Schedule.INTERLEAVED if held["vpp"] > 1 else Schedule.ONE_F_ONE_B)
    ends = {end: given.size(f"model.num_layers_in_{end}_pipeline_stage", 0, 0) for end in ("first", "last")}
    counted = {
        end: given.flag(f"model.account_for_{part}_in_pipeline_split") for end, part in (("first", "embedding"), ("last", "loss"))
    }  # fmt: skip
    if model is not None and any(counted.values()):  # the embedding or the loss takes the place of a layer
        share = (model.num_layers + sum(counted.values())) // held["pp"]
        ends |= {end: share - 1 for end, one in counted.items() if one}
    if held["pp"] == 1:
        ends = dict.fromkeys(ends, 0)
    elif model is not None and not any(ends.values()):
        ends = _laid_out(given, model.num_layers, held["pp"], held["vpp"])
    return {
        **held, "sequence_parallel": int(given.flag("model.sequence_parallel") and held["tp"] > 1),
        "zero": effective.sharding(given),
        "first_stage_layers": ends["first"], "last_stage_layers": ends["last"],
        **({"cp_method": int(_method(given))} if held["cp"] > 1 else {}), **_recompute(given, held["vpp"]),
        **states_on_the_host(given, "optimizer."), **_activations_on_the_host(given),
        **({"order": int(Order.TP_CP_EP_PP_DP)} if given.flag("dist.use_tp_pp_dp_mapping") else {}),
    }  # fmt: skip


def _method(given: Settings) -> CpMethod:
    """How context parallelism sends, p2p where nothing is said. Raises PlannerError for one that no plan has."""
    named = given.get("model.cp_comm_type", "p2p")
    if named not in CP_METHODS:
        raise PlannerError(f"{given.where('model.cp_comm_type')} is {shown(named)}; a plan knows {', '.join(CP_METHODS)}")
    return CP_METHODS[named]


def _chunks(given: Settings) -> list[int]:
    """Layers of each virtual stage by the layout that is written, [] without one."""
    written = given.get("model.pipeline_model_parallel_layout")
    if isinstance(written, list) and all(isinstance(one, list) for one in written):
        return [one.count("decoder") for one in written]
    return chunk_layers(written) if isinstance(written, str) and written else []


def _laid_out(given: Settings, layers: int, pp: int, vpp: int) -> dict[str, int]:
    """Layers of the first and last stage by the layout that is written; where none is and they do not divide, the recipe has one of
    its own, whose last stage takes what is left.  [recipes/deepseek/deepseek_v3.py, recipes/kimi/kimi_k2.py]"""
    chunks = _chunks(given)
    if chunks and (len(chunks) % pp or sum(chunks) != layers):
        where = given.where("model.pipeline_model_parallel_layout")
        raise PlannerError(f"{where} has {len(chunks)} stages and {sum(chunks)} layers; the job has {pp} ranks and {layers} layers")
    if len(chunks) == pp * vpp and sum(chunks) == layers:
        ends = stage_ends([sum(chunks[rank::pp]) for rank in range(pp)], given.where("model.pipeline_model_parallel_layout"))
        return {name.removesuffix("_stage_layers"): count for name, count in ends.items()}
    most = -(-layers // (pp * vpp)) * vpp
    last = layers - most * (pp - 1)
    return {"first": most, "last": last} if layers % (pp * vpp) and last > 0 else {"first": 0, "last": 0}


def _activations_on_the_host(given: Settings) -> dict[str, int]:
    layers = given.number("model.cpu_offloading_num_layers", 0, 0)
    wanted = given.flag("model.cpu_offloading") and given.flag("model.cpu_offloading_activations", True)
    return {"offload_activations": 1, "offload_layers": layers} if wanted and layers else {}


def _recompute(given: Settings, vpp: int) -> dict[str, int]:
    fields = recompute(_core(given), "none")
    method, layers = given.get("model.recompute_method"), given.number("model.recompute_num_layers", 0, 0)
    part = fields["recompute"] == Recompute.FULL and method == "block"
    return {**fields, "recompute_layers": layers * vpp} if part and layers else fields


def _core(given: Settings) -> Settings:
    """Settings of the model as a section of their own."""
    own = {name.removeprefix("model."): value for name, value in given.data.items() if name.startswith("model.")}
    return Settings(given.path, own, "model.", given.asked, given.said)


def _trainer(given: Settings, trainer: str) -> tuple[str, tuple[str, ...]]:
    """(The trainer with its options, notes on what it overwrites)."""
    flex = given.get("model.moe_token_dispatcher_type") == "flex" or given.flag("model.moe_enable_deepep")
    backend = str(given.get("model.moe_flex_dispatcher_backend", "deepep"))
    graphs = given.get("model.cuda_graph_impl", "none") not in ("none", None)
    graphs = graphs or given.flag("model.enable_cuda_graph") or given.flag("model.external_cuda_graph")
    wide, notes = effective.gradients_in_fp32(given)
    if trainer == "nemo":  # its plugin has said it
        wide, notes = given.flag("ddp.grad_reduce_in_fp32", True), ()
    attention = given.flag("mixed_precision.fp8_dot_product_attention") or given.flag("mixed_precision.fp8_multi_head_attention")
    options = {
        "gradient_dtype": "fp32" if wide else "bf16",
        "expert_dispatch": backend if flex and backend in ("deepep", "hybridep") else "alltoall",
        "expert_overlap": "on" if effective.overlaps(given, "overlap_moe_expert_parallel_comm") else "off",
        "cuda_graphs": "layers" if graphs else "none",
        "tp_overlap": "on" if effective.overlaps(given, "tp_comm_overlap") else "off",
        "fused_experts": "on" if given.flag("model.use_transformer_engine_op_fuser") else "off",
        "fp8_attention": "on" if attention else "off",
    }  # fmt: skip
    if effective.shards_states(given) and not given.get("peft") and effective.weights_in_fp8(given):
        options["fp8_param_gather"] = "on"
    if str(given.get("model.transformer_impl")) == "local":
        options["transformer_impl"] = "local"
    if not effective.overlaps_gradients(given):
        options["gradient_overlap"] = "off"
    options["loss_fusion"] = loss_fusion(
        given.flag("model.cross_entropy_loss_fusion", True), given.get("model.cross_entropy_fusion_impl")
    )
    if str(given.get("model.attention_backend")) in ("unfused", "local"):
        options["attention_kernel"] = "unfused"
    if any(given.above_zero(f"model.{one}_dropout") for one in ("hidden", "attention")):
        options["dropout"] = "on"
    if trainer == "nemo":  # what its profile does not know by itself; its overlap is a habit of its recipes
        usual = {"expert_dispatch": "alltoall", "cuda_graphs": "none", "expert_overlap": "off", "fp8_attention": "off"}
        more = ("gradient_overlap", "loss_fusion", "dropout", "attention_kernel", "fp8_param_gather")
        options = {name: options[name] for name in ("gradient_dtype", *usual, *more) if options.get(name) != usual.get(name)}
        if given.size("model.tensor_model_parallel_size") > 1 and not given.flag("comm_overlap.tp_comm_overlap"):
            options["tp_overlap"] = "off"
        if given.above_zero("peft.dropout") and given.get("peft"):
            options["adapter_dropout"] = "on"
    aware = given.data.get("optimizer.use_precision_aware_optimizer") in (True, "true", "True")
    thin = aware and effective.precision(given) == "bf16" and not given.flag("optimizer.optimizer_cpu_offload")
    notes = (*notes, *(GRADIENT_OF_LOGITS,) * (options.get("loss_fusion") == "on"), *(REMAINDERS,) * thin)
    if effective.sharding(given) > 1:
        trainer, known = "megatron-fsdp", load_trainer("megatron-fsdp").choices.options
        notes = (*notes, *(FSDP_IN_8_BITS,) * ("fp8_param_gather" in options))
        options = {name: value for name, value in options.items() if value in known.get(name, {})}
    return spell(trainer, options), notes


def _optimizer(given: Settings) -> str:
    name = str(given.get("optimizer.optimizer", "adam")).removeprefix("dist_")
    aware = given.flag("optimizer.use_precision_aware_optimizer")
    named = [str(given.get(f"optimizer.{one}") or "fp32") for one in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")]
    states, second, main = [STATE_TYPES.get(one, one) if aware else "fp32" for one in named]
    if main == "fp16":
        about = "master weights in fp16 are not modelled; in fp32 each that a rank holds takes 2 bytes more than it does"
        given.ask(Question(name="optimizer.main_params_dtype", about=about, choices=("fp32",)))
        main = "fp32"
    if main != "fp32" or (second != states and "optimizer.exp_avg_sq_dtype" in given.data):
        where = given.where("optimizer.main_params_dtype" if main != "fp32" else "optimizer.exp_avg_sq_dtype")
        types = f"moments in {states} and {second}, master weights in {main}"
        raise PlannerError(f"{where}: {types}; a plan knows master weights in fp32 and one type for both moments")
    return BY_MOMENTS.get((name, states), name)
