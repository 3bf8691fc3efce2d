"""What all front ends of Hugging Face's Trainer share: batches, adapters, dtypes and sharding become one reading."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from planner.errors import PlannerError, shown
from planner.layout import Recompute
from planner.model import ModelSpec
from planner.record import record
from planner.trainer import load_trainer
from planner.trainer_options import spell
from planner.trainers.reading import base_weights, by_release, kernels, model_notes, own_layers, own_methods
from planner.trainers.reading.base_weights import PARAMETERS
from planner.trainers.reading.configuration import Reading, reduced_last
from planner.trainers.reading.given import Question
from planner.trainers.reading.layer_names import ALL, TABLES, joint_layers, linear_layers, listed, unknown_layers
from planner.trainers.reading.machines import require_gpus
from planner.trainers.reading.model_notes import ENCODERS, SINGLE, of_absent_layers, of_joint_layers, of_model
from planner.trainers.reading.named_models import named_model
from planner.trainers.reading.own_weights import COPIES, of_methods, second_copies
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.sharding import Sharding, casts_all
from planner.trainers.reading.trained_whole import of_no_layer, trained_whole
from planner.trainers.reading.values import not_priced, quotient, switch_of

OPTIMIZERS = {
    "adam": "adam", "adamw": "adam", "adamw_torch": "adam", "adamw_torch_fused": "adam", "adamw_hf": "adam",
    "adamw_apex_fused": "adam", "adamw_anyprecision": "adam", "stable_adamw": "adam", "torch.optim.adamw": "adam",
    "adamw_torch_xla": "adam", "adamw_torch_npu_fused": "adam", "schedule_free_adamw": "adam", "optimi_adamw": "adam",
    "adopt_adamw": "adam", "ao_adamw_8bit": "adam_8bit", "ao_adamw_fp8": "adam_8bit", "lion_pytorch": "lion",
    "torch.optim.adam": "adam", "fusedadam": "adam", "cpuadam": "adam", "deepspeedcpuadam": "adam",
    "adamw_8bit": "adam_8bit", "adamw_bnb_8bit": "adam_8bit", "adamw_torch_8bit": "adam_8bit", "adamw8bit": "adam_8bit",
    "adam8bit": "adam_8bit", "paged_adamw": "paged_adam", "paged_adamw_32bit": "paged_adam", "pagedadamw": "paged_adam",
    "paged_adamw_8bit": "paged_adam_8bit", "pagedadamw8bit": "paged_adam_8bit", "adafactor": "adafactor",
    "lion": "lion", "lion_32bit": "lion", "sgd": "sgd", "muon": "muon",
}  # fmt: skip
"""Optimizers by their names in transformers, DeepSpeed, torch and bitsandbytes.  [transformers, training_args.py]"""
LIKE_IT = ("adamw_torch", "adamw_8bit", "adafactor", "lion", "sgd")
"""Names that stand for what states take."""
BY_CLASS = ("fsdp", "trl", "ms-swift", "llama-factory")
"""Trainers that leave the kernel of attention to the model's class, where nothing names it."""
OF_TRAINER = (*BY_CLASS, "axolotl", "unsloth")
"""Trainers over that of transformers, which accelerate wraps."""
ATTENTION = {"qkv": ("q", "k", "v"), "attention": ("q", "k", "v", "o"), "qv": ("q", "v")}
WITH_ADAPTERS = {**ATTENTION, "all": ALL}
"""Linear layers of a dense model by lora_targets."""
DECIDES = re.compile(
    r"lora_dim|(\w+_)?ema(_\w+)?|(\w+_)?reference_model(_name|_path|_name_or_path)?|\w+_ref_model|.*(lisa|relora|medusa|teacher|distill|parallel_mode|tune_(vi|mm_)|device_map|galore|badam|apollo|lomo|zenflow|customi[sz]ed_optim|quanti[sz]|[48]_?bit|kbits|quant_bit|freeze|frozen|offload|adalora|dora"
    r"|layers_to_transform|prefix_tuning|prompt_tuning|pre_seq_len|virtual_tokens|soft_prompt|ia3|spectrum|(sequence|context|tensor|pipeline|expert)_parallel|\b([stcpe]p|dp_(shard|replicate))_size"
    r"|tp_plan|every_n_layers|load_in_fp8|qat_scheme|distributed_config|sharded_ddp|mp_parameters|tpu_num_cores|layer_replication|use_qalora|bdlora|velora|monteclora|arrow_config"
    r"|master_weights|optimizer_states|mics_shard|torch_autocast\.enabled|(elasticity|curriculum_learning|progressive_layer_drop"
    r"|random_ltd)\.enabled|sparse_attention|custom_fsdp|precision_aware|last_pipeline_num|virtual_pipeline|recompute_num_layers).*"
)
"""Words of arguments that nobody here reads and that decide memory or degrees."""
ENCODER = re.compile(r"freeze_?v(ision\w*|it\w*)?|freeze_(moe_)?(gate|router)s?")
"""Switches of an image encoder, which is not in the plan."""
QUIET = re.compile(
    r"(.*\.)?(output_dir|overwrite_output_dir|logging_\w+|save_\w+|eval\w*|do_\w+|report_to|run_name|seed|data_seed|learning_rate"
    r"|lr_.*|warmup_\w+|weight_decay|adam_\w+|max_grad_norm|num_train_epochs|max_steps|push_to_hub|hub_\w+|log_level\w*|\w*dataset.*"
    r"|dataloader_\w+|ddp_timeout|sync_each_batch|ddp_find_unused_parameters|remove_unused_columns|resume_from_checkpoint|trust_remote_code"
    r"|chat_template\w*|model_revision|per_device_eval_batch_size|disable_tqdm|load_best_model_at_end|metric_for_best_model"
    r"|greater_is_better|group_by_length|tf32|special_tokens.*|preprocessing_num_workers|plot_loss|max_samples|template|system"
    r"|wandb\w*|lora_alpha|lora_bias|use_rslora|peft_use_rslora|loraplus\w*|trackio\w*|swanlab\w*|mlflow\w*|neftune\w*|strict|use_mlflow"
    r"|truncation\w*|tokenizer\w*|cache_dir|use_fast_tokenizer|streaming|shuffle\w*|val_\w+|split\w*|columns\w*|model_author|model_name"
    r"|load_from_cache_file|resize_\w+|user\w*|role\w*|tool\w*|stop\w*|early_stopping\w*|average_tokens_across_devices|label_names|\w+_inference"
    r"|by_trainer|casts_adapters|loaded_without_dtype|adapters_stay_half|own_(loss|methods|scores)|by_hand|apply_liger_kernel)"
)
"""Settings that change neither time nor memory of a step."""


@record
class FineTuning:
    """A job as a front end says it, with the front end's defaults filled in."""

    given: Settings
    trainer: str
    """Of the planner, over FSDP or one device."""
    model: str | None
    micro_batch_size: int
    """Sequences per GPU and forward pass."""
    accumulation: int | None
    """None = what makes ``batch``."""
    batch: int | None = None
    """Least sequences per step where nothing else says it."""
    sequence_length: int | None
    precision: str
    """Of the computation: bf16, fp16, fp32, fp8."""
    half_weights: bool
    """Weights are loaded, and outside of FSDP and DeepSpeed also trained, in 16 bits."""
    optimizer: str
    recompute: bool
    offload_activations: bool = False
    lora_rank: int = 0
    lora_targets: str = "all"
    lora_whole: str = ""
    """Tables that the trainer trains as a whole by itself; empty = those that the file names."""
    frozen_weights: str = "bf16"
    objective: str = "lm"
    options: Mapping[str, str] = field(default_factory=dict)
    """Of the trainer, by name; those that it does not have are left out."""
    sharding: Sharding = field(default_factory=Sharding)
    num_gpus: int | None = None
    upcasts: bool = True
    """FSDP keeps trained weights in fp32 whatever they were loaded in."""
    quiet: re.Pattern[str] = QUIET
    notes: tuple[str, ...] = ()
    questions: tuple[Question, ...] = ()

    @property
    def tokens(self) -> int:
        """Of a forward pass; 0 = not known."""
        length = (self.given.said.sequence_length if self.given.said is not None else None) or self.sequence_length or 0
        return self.micro_batch_size * length * (2 if self.objective == "dpo" else 1)


def reading(job: FineTuning) -> Reading:
    """The job in the planner's words. Raises PlannerError."""
    shard, where = job.sharding, str(job.given.path)
    require_gpus(job.given)
    trainer = {"deepspeed": "deepspeed", "megatron": "megatron"}.get(shard.kind, job.trainer)
    gpus = job.num_gpus or shard.num_gpus
    fields = {**shard.fields}
    split = fields.get("tp", 1) * fields.get("cp", 1) * fields.get("pp", 1)
    micro, steps = job.micro_batch_size, job.accumulation
    batch = micro * (steps or 1)  # of one replica: to_plan asks for the GPUs first
    if gpus is not None:
        dp = quotient(gpus, split, f"{where}: GPUs by tensor, pipeline and sequence parallel degrees")
        if _splits_batches(job.given):
            micro = quotient(micro, dp, f"{where}: split_batches: the batch of a step by {dp} processes")
        if steps is None:
            steps = -(-(job.batch or 1) // (micro * dp))
        batch = micro * steps * dp
        fields |= {"dp": dp, "num_microbatches": steps, **_of_the_node(shard, gpus, dp)}
        if gpus == split and not (fields.get("offload_parameters") or fields.get("offload_optimizer")):
            fields["zero"] = 0
    fields = {"zero": 0, **fields, "micro_batch_size": micro, "offload_activations": int(job.offload_activations)}
    fields.setdefault("recompute", int(Recompute.FULL if job.recompute else Recompute.NONE))
    mixed = shard.kind in ("deepspeed", "megatron") or (shard.kind == "fsdp" and job.upcasts and job.precision != "fp32")
    half = job.half_weights and not mixed and not job.lora_rank
    precision, low = _precision(job.precision, half, trainer)
    if job.model and ENCODERS.search(job.model.lower().rstrip("/").rpartition("/")[2]):
        raise PlannerError(f"{where}: {job.model} is no decoder: encoders and sequence-to-sequence models are not modelled")
    model, found = named_model(job.model, job.given.path) if job.model else (None, ())
    spec = base_weights.spec_of(job.given, model)
    adapted = "all" if job.given.flag("lora_target_linear") else job.given.first(*ADAPTED)
    by_peft = spec if job.lora_rank and trainer != "unsloth" else None
    if passed := of_absent_layers(job.given, ADAPTED, job.model, by_peft):
        adapted = job.given.first(*ADAPTED)
        job = dataclasses.replace(job, lora_targets=adapter_targets(adapted), notes=(*job.notes, *passed))
    found += of_model(model, adapted, job.lora_targets, job.lora_rank)
    frozen, noted = _frozen(job)
    tensors, apart = _of_tensors(job, model, frozen)
    plain = trainer != "unsloth" and not any(job.given.get(one) for one in PARAMETERS)  # it may give tensors adapters of its own
    single = plain and job.lora_targets == "all" and SINGLE.search(job.model or "") is not None
    (states, paged), (wanted, lean) = _states(*_optimizer(job), trainer, where), _kernels(job, model, trainer)
    built, added = model_notes.as_built(job.given, spec, job.tokens)
    noted = (*noted, *low, *apart, *lean, *added, *own_methods.notes(job.given, spec, precision, job.tokens, trainer))
    options = {name: value for name, value in {**wanted, **tensors}.items() if value in _options(trainer).get(name, ())}
    options = {name: value for name, value in options.items() if job.lora_rank or name != "adapter_dropout"}
    result = Reading(
        trainer=spell(trainer, options), fields=fields, model=model, model_name=str(job.model or ""), architecture=built,
        sequence_length=job.sequence_length, global_batch_size=batch, precision=precision, optimizer=states, num_gpus=gpus,
        lora_targets="all" if not job.lora_rank or "expert_adapters" in tensors else "attention" if single else job.lora_targets,
        lora_whole=(job.lora_whole or trained_whole(job.given)) if job.lora_rank else "none",
        frozen_weights=frozen if job.lora_rank else None, objective=job.objective, lora_rank=job.lora_rank,
        unread=(*shard.unread, *(one for one in job.given.left() if not job.quiet.fullmatch(one.split(" = ")[0]))),
        questions=job.questions, notes=(*found, *noted, *paged, *job.notes, *_sharding_notes(job, gpus), *_adapter_notes(job)),
    )  # fmt: skip
    waits = second_copies(job.given, result.unread)
    _require_priced(result, job.given, [one.name for one in waits])
    own = own_layers.asked_and_noted(job.given, result.unread, job.lora_rank, spec)
    held = by_release.of_wrapper(job.given, job.trainer, shard, result, spec) if job.trainer in OF_TRAINER else ()
    result = reduced_last(result, shard.kind == "fsdp" and job.trainer in OF_TRAINER and not by_release.syncs_each(job.given))
    more = (*own[1], *of_methods(result.unread, spec, result.precision), *held, *job.given.program_notes)
    return dataclasses.replace(result, questions=(*result.questions, *waits[:1], *own[0]), notes=(*result.notes, *more))


def _kernels(job: FineTuning, model: ModelSpec | None, trainer: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """(options, notes) of the kernels that words name, or that the model's class has."""
    name, alone = job.model or "", job.lora_rank > 0 and job.trainer in ("fsdp", "trl")
    wanted, lean = kernels.with_liger(job.given, job.options, name, model, trainer, alone)
    wanted, eager = kernels.of_class(job.given, wanted, name, model, job.trainer in BY_CLASS)
    halves = kernels.in_halves(job.given, name, model, job.tokens) if job.sharding.kind == "deepspeed" else ()
    halves_sent = job.precision != "fp32" or (job.half_weights and "wrapped" in job.given.usual)
    sent = job.given.usual.get("reduce_dtype", "bf16") if job.sharding.kind == trainer == "fsdp" and halves_sent else ""
    wanted |= kernels.of_series(job.given, name, model, trainer) | ({"reduce_dtype": sent} if sent else {})
    kept = not job.recompute and job.sharding.fields.get("recompute") != Recompute.FULL and wanted.get("compile") != "on"
    layers = kernels.of_layers(job.given, model, job.tokens / job.sharding.fields.get("cp", 1)) if kept else ()
    pieces = kernels.of_free_memory(job.given, model, job.tokens) if trainer == "unsloth" and job.objective == "lm" else ()
    if job.options.get("compile") == "on" and "compile" not in _options(trainer):
        halves = (*halves, f"torch.compile is not priced under {trainer}: the step comes out too long")
    return wanted, (*lean, *eager, *halves, *layers, *pieces)


def _of_tensors(job: FineTuning, model: ModelSpec | None, frozen: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """(options of the trainer, notes) about frozen weights and adapters of what is no linear layer."""
    stored = base_weights.stored_in_fewer(job.given, model, str(job.model or ""), frozen if job.lora_rank else "bf16")
    if not job.lora_rank:
        return {}, stored
    sharded = job.sharding.kind == "fsdp" or job.sharding.fields.get("zero") == 3
    recompute = job.recompute or job.sharding.fields.get("recompute") == Recompute.FULL
    words = listed(next((value for one in ADAPTED if (value := job.given.get(one)) is not None), None) or "")
    of = base_weights.Adapted(
        trainer=job.trainer, frozen=frozen, precision=job.precision, rank=job.lora_rank, sharded=sharded,
        named=tuple(map(str, words)), everywhere=job.lora_targets == "all", engine=casts_all(job.sharding, job.precision),
        recompute=recompute, tokens=job.tokens, pairs=job.objective == "dpo", upcasts=job.upcasts,
    )  # fmt: skip
    of_base, halves = base_weights.of_base(job.given, of, model), base_weights.of_adapters(job.given, of, model)
    adapted = base_weights.on_experts(job.given, model, job.lora_rank)
    named = job.trainer == "unsloth" or joint_layers(words) or linear_layers(words) <= {"o", "down"}  # said already
    joint = () if named else of_joint_layers(base_weights.spec_of(job.given, model), job.model, job.lora_targets, job.lora_rank)
    return {**of_base[0], **halves[0], **adapted[0]}, (*stored, *of_base[1], *halves[1], *adapted[1], *joint)


def _splits_batches(given: Settings) -> bool:
    """Whether the batch of a device is what all of them share.  [accelerate, utils/dataclasses.py: DataLoaderConfiguration]"""
    inside = isinstance(given.data.get("accelerator_config"), Mapping) and given.flag("accelerator_config.split_batches")
    return bool(inside) or given.flag("split_batches")


_ONE_RANK = re.compile(r"\w*(parallel|[stcpe]p|dp_(shard|replicate)|mics_shard)\w*size = '?-?1'?")
"""A split over one rank, which splits nothing."""
_FEWER_BITS = re.compile(r"(.*\.)?zero_quantized_(weights|gradients) = True")
"""Of ZeRO++: what is sent is quantised, and what is stored is not.  [DeepSpeed, docs/_tutorials/zeropp.md]"""


def _require_priced(reading: Reading, given: Settings, asked: Sequence[str]) -> None:
    """Raises PlannerError where an argument that nobody reads decides memory or degrees by its words, and stays; not for those that
    are ``asked`` for."""
    names = [one.partition(" = ")[0] for one in reading.unread if not (_ONE_RANK.fullmatch(one) or _FEWER_BITS.fullmatch(one))]
    wrong = [one for one in names if DECIDES.fullmatch(one.lower()) and not ENCODER.fullmatch(one.lower())]
    wrong = [one for one in wrong if (switch_of(one, given.data) or (one, True))[1]]
    said = given.said
    off = ("false", "null", "0")
    settled = said is not None and any(COPIES.fullmatch(one.lower()) and str(said.setting(one)).lower() in off for one in wrong)
    wrong = [one for one in wrong if one not in asked and not (settled and COPIES.fullmatch(one.lower()))]
    wrong = [one for one in wrong if said is None or str(said.setting(one)).lower() not in off]
    if wrong:
        raise not_priced(str(given.path), wrong, wrong)


def _adapter_notes(job: FineTuning) -> tuple[str, ...]:
    """Notes about tables of the vocabulary that have adapters, which are priced on linear layers of the layers alone, and about
    layers without, which are priced with those beside them."""
    said = next((value for one in ADAPTED if (value := job.given.get(one)) is not None), None)
    words = listed(said or "")
    if not words or not job.lora_rank:
        return ()
    tables = sorted({str(one) for one in words if TABLES.search(str(one))})
    notes = [adapters_on_tables(tables)] * (bool(tables) and trained_whole(job.given) == "none")
    more = () if job.given.flag("lora_target_linear") else layers_beside(words, job.lora_targets)
    joint = joint_layers(words)
    apart = f"{shown(', '.join(joint))}: one adapter on a layer that is several in one is priced as one for each of its parts"
    return (*notes, *of_no_layer(job.given), *more, *([apart] * bool(joint)))


def layers_beside(named: Any, targets: str) -> tuple[str, ...]:
    """Note about linear layers without adapters that are priced with those that have them, and about names that are not known;
    ``named`` are those that have."""
    words = listed(named)
    parts, where = linear_layers(words), "all linear layers" if targets == "all" else targets
    if unknown := unknown_layers(words):
        return (f"adapters on {shown(', '.join(unknown))}, no linear layer known here, are priced as on {where}",)
    beside = [one for one in WITH_ADAPTERS.get(targets, ()) if one not in parts]
    have = ", ".join(one for one in WITH_ADAPTERS["all"] if one in parts)
    if not beside or not parts <= set(WITH_ADAPTERS["all"]):
        return ()
    return (f"adapters on {have} alone are priced as {targets}, so {', '.join(beside)} too",)


def adapters_on_tables(named: Sequence[str]) -> str:
    """Note about tables of the vocabulary that have adapters."""
    return f"adapters on {shown(', '.join(named))} are not priced: rank x (hidden size + vocabulary) weights each"


def _frozen(job: FineTuning) -> tuple[str, tuple[str, ...]]:
    """Dtype of frozen weights: a quantised upload says it by its name."""
    fewer = re.search(r"(?<![\d.])[123][-_]?bits?\b", (job.model or "").lower())
    if job.lora_rank and fewer is not None:
        raise PlannerError(f"{job.given.path}: weights of {job.model} lie in fewer than 4 bits, which is not priced")
    eight = re.search(r"(gptq|gguf|awq|w8a16|bnb)\S*(int8|8bits?)|w8a16|[-_]8bit", (job.model or "").lower())
    if job.lora_rank and eight is not None and job.frozen_weights in ("bf16", "fp32"):
        return "int8", (f"weights of {job.model} lie in 8 bits: priced as int8",)
    four_bits = re.search(r"gptq|awq|aqlm|int4|w4a16|nvfp4|bnb-nf4|[-_]4bit", (job.model or "").lower())
    if not job.lora_rank or four_bits is None or job.frozen_weights not in ("bf16", "fp32"):
        return job.frozen_weights, ()
    return "nf4", (f"weights of {job.model} lie in 4 bits: priced as nf4",)


def _precision(said: str, half: bool, trainer: str) -> tuple[str, tuple[str, ...]]:
    """(the precision as the trainer has it, what was taken for what); ``half``: weights, gradients and states lie in 16 bits."""
    found = "bf16_true" if half else said
    if said != "fp8" or (not half and said in load_trainer(trainer).legal.precisions):
        return found, ()
    what = "fp8 with weights in 16 bits and no fp32 copy" if half else f"fp8 of {trainer}"
    return ("bf16_true" if half else "bf16"), (f"{what} is priced with products in bf16: time comes out too long",)


def _optimizer(job: FineTuning) -> tuple[str, tuple[str, ...]]:
    """The optimizer that DeepSpeed's configuration names before that of the arguments, and a note where they differ; over states on
    the host accelerate puts DeepSpeed's Adam in the place of any other than Adam and Lion in fp32.
    [transformers, integrations/deepspeed.py: deepspeed_optim_sched; accelerate, accelerator.py: map_pytorch_optim_to_deepspeed]"""
    shard, said = job.sharding, job.given.said.setting("optim") if job.given.said is not None else None
    host = shard.fields.get("offload_optimizer") or shard.fields.get("offload_parameters")
    if shard.kind == "deepspeed" and shard.optimizer is None and host and not shard.keeps_optimizer:
        text = "states on the host: accelerate puts DeepSpeedCPUAdam with fp32 states in the place of the optimizer that is named"
        return (job.optimizer, ()) if job.optimizer in ("adam", "lion") else ("adam", (text,))
    if shard.kind != "deepspeed" or shard.optimizer is None or said is not None:
        return job.optimizer, ()
    states = optimizer(job.given, shard.optimizer, "optim")
    counts = f"the optimizer {shard.optimizer[:40]} of DeepSpeed's configuration counts, not that of the arguments"
    return states, (counts,) * (states != job.optimizer)


def _states(optimizer: str, notes: tuple[str, ...], trainer: str, where: str) -> tuple[str, tuple[str, ...]]:
    """(the optimizer as the trainer has it, what was taken for what): DeepSpeed shards states of bitsandbytes like others. Raises
    PlannerError for one that it has not."""
    plain = optimizer.removeprefix("paged_")
    known = (own := load_trainer(trainer)).stored.optimizer_bytes
    if plain == "muon" and plain not in known and own.code_base != "deepspeed":
        what = "muon keeps one state of a matrix where Adam, which is priced, has two: memory comes out too high by up to 4 bytes"
        return "adam", (*notes, f"{what} for each weight that is trained")
    if plain not in known and optimizer not in known:
        raise PlannerError(f"{where}: optimizer {optimizer} is not modelled over {trainer}; {', '.join(known)} are")
    if optimizer in known or plain == optimizer:
        return optimizer, notes
    note = "paged states are priced on the GPU: memory comes out too high, by those states at most"
    return plain, (*notes, note)


def _differences(job: FineTuning) -> list[str]:
    """Notes about numbers that a configuration of DeepSpeed and the arguments say differently."""
    shard = job.sharding
    pairs = (("train_micro_batch_size_per_gpu", shard.micro_batch_size, job.micro_batch_size),
             ("gradient_accumulation_steps", shard.accumulation, job.accumulation))  # fmt: skip
    return [
        f"its configuration of DeepSpeed says {name} {theirs}, where {ours} is priced: transformers does not start with two"
        for name, theirs, ours in pairs if shard.kind == "deepspeed" and None not in (theirs, ours) and theirs != ours
        and "wrapped" not in job.given.usual
    ]  # fmt: skip


def _sharding_notes(job: FineTuning, gpus: int | None) -> tuple[str, ...]:
    notes = [*job.sharding.notes, *_differences(job)]
    if job.sharding.kind == "deepspeed" and not job.sharding.fields.get("zero") and job.precision == "bf16":
        notes.append(_of_stage_0(job.optimizer, gpus or 0))
    if job.sharding.kind == "ddp" and (gpus or 0) > 1 and job.given.usual.get("wrapped") != "ddp":
        notes.append("neither deepspeed nor fsdp is named: every GPU holds the whole model (plain data parallel)")
    if any(_FEWER_BITS.fullmatch(one) for one in job.sharding.unread):
        notes.append("what ZeRO++ sends in 4 or 8 bits is priced in 16: communication comes out too long, up to 4 times")
    return tuple(notes)


def _of_stage_0(optimizer: str, gpus: int) -> str:
    """Note about DeepSpeed's BF16_Optimizer: 2 + 2 + 4 bytes of weights and gradients, and states by the number of GPUs.
    [runtime/bf16_optimizer.py]"""
    each = 8.0 - 12.0 / gpus if gpus and optimizer == "adam" else 0.0
    by = f": memory comes out too {'low' if each < 0 else 'high'} by {abs(each):.1f} bytes a trained weight" if each else ""
    what = "at stage 0 in bf16 DeepSpeed shards optimizer states over the GPUs all the same and adds gradients up in fp32"
    return f"{what}, priced whole and in bf16{by}"


def _of_the_node(shard: Sharding, gpus: int, dp: int) -> dict[str, int]:
    """Replicas of groups as large as a node, where the strategy is hybrid."""
    node = shard.gpus_per_node or min(gpus, 8)
    return {"dp_shard": node} if shard.hybrid and dp > node else {}


def _options(trainer: str) -> dict[str, Sequence[str]]:
    return {name: tuple(values) for name, values in load_trainer(trainer).choices.options.items()}


def optimizer(given: Settings, name: Any, setting: str) -> str:
    """The planner's optimizer; asks, by the setting that answers, for one that is not modelled."""
    word = str(name).lower().removeprefix("optimizernames.")
    if word not in OPTIMIZERS:
        given.ask(Question(
            name=f"{given.place}{setting}", about=f"{shown(name)} is not modelled; one whose states are like it", choices=LIKE_IT,
        ))  # fmt: skip
        return "adam"
    return OPTIMIZERS[word]


ADAPTED = ("lora_target_modules", "target_modules", "lora_target", "lora_modules")
"""Arguments that list what has adapters."""


def adapter_targets(names: Any) -> str:
    """One of LORA_TARGETS that holds all of the linear layers named: a list, a text with commas, 'all-linear'."""
    parts = linear_layers(listed(names))
    found = [name for name, letters in ATTENTION.items() if parts <= set(letters)]
    return min(found, key=lambda name: len(ATTENTION[name])) if found and parts else "all"


def quantised(bits: int, double: bool) -> str:
    """Dtype of frozen weights of bitsandbytes."""
    return "int8" if bits == 8 else "nf4_dq" if double else "nf4"
