"""NeMo AutoModel: its YAML recipes."""

import re
from dataclasses import replace
from pathlib import Path

from planner.errors import PlannerError, shown
from planner.layout import CpMethod, Recompute, Schedule
from planner.model import ModelSpec
from planner.trainer_options import spell
from planner.trainers.automodel.recipe_file import settings_of
from planner.trainers.reading.configuration import Reading, reduced_last
from planner.trainers.reading.fine_tuning import adapter_targets, layers_beside, optimizer, quantised
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.named_models import named_model
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.values import not_priced, quotient

QUIET = re.compile(
    r"recipe|seed|benchmark\..*|step_scheduler\..*|dist_env\..*|rng\..*|checkpoint\..*|loss_fn\..*|(validation_)?(dataset|dataloader)s?\..*"
    r"|lr_scheduler\..*|ci\..*|wandb\..*|mlflow\..*|comet\..*|slurm\..*|skypilot\..*|tokenizer.*|optimizer\..*|packed_sequence\..*"
    r"|clip_grad_norm\..*|max_grad_norm|model\.(?!text_config|config\.num_hidden|num_hidden).*|processor.*|freeze_config\..*|moe_metrics.*|autopipeline\..*|qat\..*"
    r"|distributed\.(pipeline\.\w+|moe\.\w+|defer_\w+|multimodal.*|dp_size|enable_async.*|patch_\w+|_target_)|peft\..*|fp8\..*"
    r"|quantization\..*|profiling\..*|compile\..*|distributed\.mp_policy\.(_target_|output_dtype|cast_forward_inputs)"
)
SCHEDULES = {
    "1f1b": Schedule.ONE_F_ONE_B, "interleaved1f1b": Schedule.INTERLEAVED, "gpipe": Schedule.GPIPE,
    "zbvzerobubble": Schedule.ZBV,
}  # fmt: skip
FP8 = {
    "tensorwise": "fp8", "current": "fp8", "rowwise": "fp8_row", "rowwise_with_gw_hp": "fp8_row", "block": "fp8_block",
    "mxfp8": "mxfp8",
}  # fmt: skip


EAGER = (
    "Liger's kernels, which layers of transformers have otherwise, are off with tp or cp above 1, and without use_liger_kernel: "
    "memory comes out too low by 4 bytes for each token and hidden element of a norm, and 2 for each of SwiGLU"
)
"""[_transformers/kernel_patches.py, _apply_preload_overrides]"""
BY_PARTS = (
    "attention, MLP and norms of a layer are recomputed each by itself, so four inputs of a layer are kept and the plan has one: "
    "6 bytes more for each token, layer and hidden unit"
)
"""What activation checkpointing means in dense models.  [components/distributed/activation_checkpointing.py, parallelizer.py]"""
KEEP = "keep all that they compute, which the plan has recomputed: memory comes out too low"
LEAN = (("FusedLinearC", "fused_linear"), ("ChunkedC", "bf16"), ("TEParallelC", "in_place"))
"""Losses that hold no logits of all tokens, or none in fp32, and the option that is like each.  [components/loss]"""


def read(path: Path, said: Given) -> Reading:
    """The job of a file, or of a command that starts one. Raises PlannerError."""
    given, started, notes = settings_of(path, said)
    found = parse(given, said.num_gpus or started)
    return replace(found, notes=(*notes, *found.notes))


def parse(given: Settings, num_gpus: int | None = None) -> Reading:
    """The job that settings describe. Raises PlannerError."""
    if re.search(r"[dD]iffusion|Retriev|BiEncoder|Classif|KD|Eagle|DFlash", str(given.get("recipe", ""))):
        raise PlannerError(f"{given.where('recipe')} is {shown(given.get('recipe'))}, which is no training of a language model")
    if wrong := [one for one in ("qat.enabled", "peft.use_dora") if given.flag(one)]:
        raise not_priced(str(given.path), wrong, wrong)
    split, batches, peft = given.section("distributed"), given.section("step_scheduler"), given.section("peft")
    pipe = given.section("autopipeline") if given.get("autopipeline") is not None else split.section("pipeline")  # until 0.3
    made = re.search(r"(ddp|megatron_fsdp|nvfsdp)\.\w+$", str(split.get("_target_", "")))  # of its first releases
    strategy = str(split.get("strategy") or (made[1] if made else "fsdp2"))
    if strategy not in ("fsdp2", "ddp"):
        raise PlannerError(f"{split.where('strategy')} is {strategy}, which is not modelled in AutoModel; fsdp2 and ddp are")
    name = given.get("model.pretrained_model_name_or_path") or given.get("model.config.pretrained_model_name_or_path")
    name = name or (given.get("model.config") if isinstance(given.get("model.config"), str) else None)
    model, notes = named_model(str(name), given.path) if name else (None, ())
    fields = _degrees(split, pipe, model, strategy)
    notes += by_parts("activation_checkpointing: ", fields, model, ", unless a release of 2026 wraps whole layers of transformers")
    plain = fields["tp"] * fields["cp"] > 1 or not given.flag("model.use_liger_kernel", True)
    dense = model is None or not model.is_moe  # mixtures are AutoModel's own
    notes += (EAGER,) * (plain and dense and fields["recompute"] == Recompute.NONE)
    batch, micro = batches.size("global_batch_size", 32), batches.size("local_batch_size", 1)
    if fields["pp"] > 1:
        micro = pipe.size("pp_microbatch_size")
    gpus = num_gpus
    if gpus is not None:
        dp = quotient(gpus, fields["tp"] * fields["cp"] * fields["pp"], f"{given.path}: GPUs by tp, cp and pp")
        fields |= {"dp": dp, "num_microbatches": quotient(batch, micro * dp, f"{given.path}: global_batch_size by micro batches")}
        if (replicas := _size(split, "dp_replicate_size")) > 1:
            fields["dp_shard"] = quotient(dp, replicas, f"{given.path}: dp by dp_replicate_size")
    fields["micro_batch_size"] = micro
    adapters = given.get("peft") is not None
    waits = split.flag("defer_fsdp_grad_sync", True)
    return reduced_last(Reading(
        trainer=_trainer(given), fields=fields, model=model, model_name=str(name or ""), num_gpus=gpus, global_batch_size=batch,
        sequence_length=_length(given), precision=_precision(given), optimizer=_optimizer(given),
        lora_rank=peft.size("dim", 8) if adapters else 0,
        lora_targets=_targets(peft) if adapters else "all",
        frozen_weights=_frozen(given) if adapters else None,
        unread=tuple(one for one in given.left() if not QUIET.fullmatch(one.split(" = ")[0])),
        notes=(*notes, *(_beside(peft) if adapters else _other_bytes(given))),
    ), waits)  # fmt: skip


def by_parts(start: str, fields: dict[str, int], model: ModelSpec | None, end: str = "") -> tuple[str, ...]:
    """A note on what activation checkpointing recomputes, which goes by the names and kinds of a model's modules; where most keep
    what they compute, ``fields`` recompute nothing. Expert parallelism wraps whole layers.
    [components/distributed/parallelizer.py: DefaultParallelizationStrategy, NemotronHParallelizationStrategy]"""
    if fields["recompute"] != Recompute.FULL or fields["ep"] > 1:
        return ()
    if model is not None and model.linear is not None and model.linear.num_mlp_layers:  # its blocks are a mixer or an MLP
        if not model.is_moe:
            return (f"{start}blocks of Mamba and MLP are recomputed as a whole; blocks of attention {KEEP}",)
        fields["recompute"] = int(Recompute.NONE)
        what = "blocks of Mamba alone are recomputed, those of experts and attention keep all that they compute"
        return (f"{start}{what}; the plan recomputes nothing: memory comes out too high by what Mamba keeps, time too low",)
    other = ""
    if model is not None and model.linear is not None:
        other = f"; layers whose linear attention is not called self_attn (linear_attn, mamba, mixer) {KEEP}"
    elif model is not None and model.is_moe:
        other = f"; experts in a module that is not called mlp (block_sparse_moe, feed_forward) {KEEP}"
    return (f"{start}{BY_PARTS}{end}{other}",)


def _frozen(given: Settings) -> str:
    bits = given.section("quantization")
    four, eight = bits.flag("load_in_4bit"), bits.flag("load_in_8bit")
    whole = "fp32" if _dtype(given) in FULL else "bf16"
    return quantised(4 if four else 8, bits.flag("bnb_4bit_use_double_quant")) if four or eight else whole


def _size(part: Settings, name: str) -> int:
    value = part.get(name)
    return 1 if value in (None, "none", "None", -1) else part.size(name)


def _degrees(split: Settings, pipe: Settings, model: ModelSpec | None, strategy: str) -> dict[str, int]:
    """Fields of Layout from the section distributed."""
    tp, cp, pp, ep = (_size(split, f"{name}_size") for name in ("tp", "cp", "pp", "ep"))
    mode = str(split.get("activation_checkpointing", False)).lower()
    if mode not in ("true", "false", "full", "none"):
        about = f"it is {shown(mode)}, which has no plan that is the same; which is nearer"
        split.ask(Question(name=f"{split.place}activation_checkpointing", about=about, choices=("true", "false")))
    keep = split.get("moe.reshard_after_forward" if ep > 1 else "reshard_after_forward")
    if ep > 1 and keep is None and split.get("reshard_after_forward") is not None:  # of dense models alone; people mix them up
        name, about = f"{split.place}moe.reshard_after_forward", "distributed.reshard_after_forward is not that of mixtures"
        keep = split.said.setting(name) if split.said is not None else None
        if keep is None:
            split.ask(Question(name=name, about=about, choices=("true", "false")))
        keep = keep == "true"
    # Layers are kept gathered in a pipeline, and in mixtures with expert parallelism unless the section moe says otherwise.
    gathered = not keep if keep is not None else pp > 1 or ep > 1
    fields = {
        "tp": tp, "cp": cp, "pp": pp, "ep": ep, "zero": 0 if strategy == "ddp" else 2 if gathered else 3,
        "sequence_parallel": int(split.flag("sequence_parallel") and tp > 1),
        "recompute": int(Recompute.FULL if mode in ("true", "full") else Recompute.NONE),
        "offload_parameters": int(any(split.section("offload_policy").get(one) is not None for one in ("_target_", "pin_memory"))),
    }  # fmt: skip
    if cp > 1:
        fields["cp_method"] = int(CpMethod.RING)
    if pp > 1:
        schedule = pipe.choice("pp_schedule", SCHEDULES, "1f1b")
        fields |= {"schedule": int(schedule), "vpp": _chunks(pipe, model, pp) if schedule == Schedule.INTERLEAVED else 1}
        if schedule == Schedule.ZBV:
            fields["vpp"] = 2
    return fields


def _chunks(pipe: Settings, model: ModelSpec | None, pp: int) -> int:
    """Virtual stages per rank: of ``layers_per_stage``, rounded to a multiple of the ranks as the file says."""
    each = pipe.number("layers_per_stage")
    if each is None or model is None:
        return 2
    stages = -(-model.num_layers // each)
    up = str(pipe.get("round_virtual_stages_to_pp_multiple", "")) == "up"
    return max(-(-stages // pp) if up else stages // pp, 1)


def _trainer(given: Settings) -> str:
    options = {}
    dispatcher = str(given.get("model.backend.dispatcher", ""))
    if dispatcher in ("deepep", "hybridep"):
        options["expert_dispatch"] = dispatcher
    compiled = given.flag("compile.enabled") or given.flag("distributed.enable_compile")
    options["compile"] = "on" if compiled else "off"  # [components/utils/compile_utils.py: CompileConfig.enabled]
    if given.above_zero("peft.dropout", 0.0):
        options["adapter_dropout"] = "on"
    loss = str(given.get("loss_fn._target_") or given.get("loss_fn.name") or "")
    upcast = given.flag("loss_fn.fp32_upcast", True)  # of MaskedCrossEntropy
    lean = next((option for word, option in LEAN if word in loss), "" if upcast else "bf16")
    if lean and (lean != "bf16" or not compiled):  # compiled, there are fewer bytes already
        options["loss"] = lean
    from planner.trainer import load_trainer

    known = load_trainer("automodel").choices.options
    return spell("automodel", {name: value for name, value in options.items() if value in known.get(name, ())})


def _targets(peft: Settings) -> str:
    named = peft.get("target_modules")
    words = named if isinstance(named, list) else [named]
    return "all" if peft.flag("match_all_linear") or any("*" in str(one) for one in words) or not named else adapter_targets(named)


def _beside(peft: Settings) -> tuple[str, ...]:
    named = peft.get("target_modules")
    words = [str(one).removeprefix("*").removeprefix(".") for one in (named if isinstance(named, list) else [named])]
    plain = named and not peft.flag("match_all_linear") and not {"", "_proj"} & set(words)  # * and *_proj are all
    return layers_beside(words, _targets(peft)) if plain else ()


FULL = ("float32", "fp32")


def _dtype(given: Settings) -> str:
    """What the model is loaded in, bf16 where it names nothing."""
    return str(given.get("model.torch_dtype") or given.get("model.config.torch_dtype") or "bf16").rpartition(".")[2]


def _precision(given: Settings) -> str:
    """Weights are loaded, sharded and updated in the dtype that the model names, bf16 where it names none, and adapters with them.
    [_peft/lora.py: lora_dtype]"""
    if given.flag("fp8.enabled"):
        return str(given.section("fp8").choice("recipe_name", FP8, "tensorwise"))
    inner = given.section("model").data.get("backend")
    if isinstance(inner, dict) and inner.get("te_fp8"):
        return str(given.section("model").section("backend").section("te_fp8").choice("recipe", FP8, "current"))
    masters = given.flag("optimizer.master_weights")
    if str(given.get("distributed.mp_policy.param_dtype") or "").rpartition(".")[2] in FULL:  # what layers are gathered in
        if _dtype(given) not in FULL:
            raise not_priced(str(given.path), ["distributed.mp_policy.param_dtype"], ["distributed.mp_policy.param_dtype"])
        return "fp32"
    dtype = str(given.get("peft.lora_dtype") or "").rpartition(".")[2] or _dtype(given)
    return "bf16" if masters or dtype in FULL else "bf16_true"


def _optimizer(given: Settings) -> str:
    part = given.section("optimizer")
    return optimizer(part, str(part.get("_target_", "torch.optim.Adam")).rpartition(".")[2], "_target_")


def _other_bytes(given: Settings) -> tuple[str, ...]:
    """Bytes of a weight, over the ranks that share it, that the precision of a plan says otherwise."""
    notes, own = [], str(given.get("optimizer._target_") or "").startswith("transformer_engine.")
    masters, low = given.flag("optimizer.master_weights"), _precision(given) not in ("bf16", "bf16_true", "fp32")
    half = _dtype(given) not in FULL and not masters
    if low and half:
        notes.append("weights, gradients and states lie in bf16, and the plan has them in float32: 8 bytes of each weight less")
    moments = [str(given.get(f"optimizer.{one}") or "float32").rpartition(".")[2] for one in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    saved = sum({"float32": 0, "bfloat16": 2, "float16": 2}.get(one, 3) for one in moments) if own else 0
    saved += 2 * (own and masters and given.flag("optimizer.store_param_remainders"))
    if own and half:  # whose moments are in fp32 whatever the weights are
        saved -= 4
    if saved:
        what = f"{abs(saved)} bytes of each weight {'less' if saved > 0 else 'more'}"
        notes.append(f"optimizer: the states of Transformer Engine's Adam are not those of the plan: {what}")
    return tuple(notes)


def _length(given: Settings) -> int | None:
    """Tokens of a sequence: of packs, or what the data set is cut or filled to; None = as long as its texts are."""
    packed = given.section("packed_sequence").size("packed_sequence_size", 0, least=0)
    data = given.section("dataset")
    found = data.first("seq_len", "seq_length", "max_seq_length", "max_length", "sequence_length", default=None)
    return packed or (int(found) if isinstance(found, int) and not isinstance(found, bool) else None)
