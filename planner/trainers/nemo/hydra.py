"""NeMo 1, its launcher and NeMo-Aligner: the section ``model`` of their YAML as arguments of Megatron-LM, which NeMo runs."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, shown
from planner.trainer import load_trainer
from planner.trainer_options import spell
from planner.trainers.megatron.arguments import ask_for, of_mapping
from planner.trainers.megatron.readback import reading_of
from planner.trainers.nemo.places import preset_of_recipe
from planner.trainers.reading.commands import launched
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.fine_tuning import adapter_targets, layers_beside
from planner.trainers.reading.given import Given, Question
from planner.trainers.reading.interpolation import override, resolved
from planner.trainers.reading.named_models import named_model
from planner.trainers.reading.settings import Settings, beside, file_settings, parsed
from planner.trainers.reading.shell import is_open
from planner.trainers.reading.values import not_priced

SAME = (
    "micro_batch_size", "global_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "max_position_embeddings", "num_layers", "hidden_size",
    "ffn_hidden_size", "num_attention_heads", "kv_channels", "hidden_dropout", "attention_dropout", "position_embedding_type",
    "sequence_parallel", "moe_router_topk", "moe_grouped_gemm", "make_vocab_size_divisible_by",
    "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "cp_comm_type", "enable_cuda_graph", "external_cuda_graph",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "use_tp_pp_dp_mapping",
    "moe_token_dispatcher_type",
)  # fmt: skip
"""Keys that Megatron-LM calls the same."""
OTHER = {
    "encoder_seq_length": "seq_length", "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "activations_checkpoint_granularity": "recompute_granularity", "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers", "num_moe_experts": "num_experts", "qkv_bias": "add_qkv_bias",
    "ub_tp_comm_overlap": "tp_comm_overlap", "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers", "override_vocab_size": "vocab_size",
}  # fmt: skip
"""Keys that it calls otherwise."""
NOT_PRICED = (
    "fp32_residual_connection", "distribute_saved_activations", "num_micro_batches_with_partial_activation_checkpoints",
    "activations_checkpoint_layers_per_pipeline", "hierarchical_context_parallel_sizes", "num_distributed_optimizer_instances",
)  # fmt: skip
"""Keys that decide memory or degrees and that no plan has."""
FAST = ("mcore_gpt", "transformer_engine", "use_flash_attention")
"""Keys of which one must be on for attention that keeps no scores.  [megatron/attention.py, CoreAttention]"""
ACTIVATIONS = {"swiglu": "swiglu", "geglu": "quick_geglu", "squared-relu": "squared_relu"}
DISTRIBUTED = ("distributed_fused_adam", "mcore_distributed_optim")
FOREIGN = re.compile(
    r"(bert|t5|ul2|retro|bart|griffin|mamba|jamba|hyena|siglip|clip|vit|diffusion|neva|speechllm|salm|distill|prune|ptq|quantization|inference"
    r"|reward|_rm|ppo|grpo|reinforce|rloo|kto|spin|self_taught|critic)(?![a-z])"
)
"""Words in the name of a file or of a job whose training is another one."""
PROGRAM = r"\S*(megatron_gpt_(pretraining|continue_training|finetuning|peft_tuning|sft)|train_gpt_(sft|dpo))\.py"
LAUNCHER = r"\S*launcher_scripts/main\.py"
STAGES = ("training", "peft", "fine_tuning")
"""Stages of NeMo's launcher that train a model, each with a folder of configurations of its own."""
USUAL = {
    "megatron_gpt_pretraining": "megatron_gpt_config", "megatron_gpt_continue_training": "megatron_gpt_config",
    "megatron_gpt_finetuning": "megatron_gpt_finetuning_config", "megatron_gpt_peft_tuning": "megatron_gpt_finetuning_config",
    "megatron_gpt_sft": "megatron_gpt_finetuning_config", "gpt_sft": "gpt_sft", "gpt_dpo": "gpt_dpo",
}  # fmt: skip
"""Programs, and the configuration that each takes by itself."""
READ = re.compile(
    r"model\.(seed|tokenizer\..*|data\..*|optim\..*|nsys_profile\..*|native_amp_\w+|init_method_std|use_scaled_init_method|normalization"
    r"|layernorm_epsilon|do_layer_norm_weight_decay|p(re|ost)_process|persist_layer_norm|bias\w*|activation|headscale|transformer_\w+"
    r"|openai_gelu|normalize_attention_scores|rotary_\w+|attention_type|share_\w+|\w*p2p_comm|num_query_groups|grad_\w+|gradient_\w+"
    r"|masked_\w+|get_attention_\w+|apply_\w+|resume_\w+|use_cpu_\w+|onnx_safe|apex_\w+|sync_batch_comm|fp8\w*|reduce_amax|use_emha"
    r"|mcore_\w+|megatron_amp_O2|hysteresis|name|use_flash_attention|defer_\w+|ub_\w+|overlap_\w+|batch_p2p|restore_from_path|save_\w+"
    r"|answer_only_loss|peft\..*|fsdp\w*|wgrad_deferral_limit|seq_len_interpolation_factor|dist_ckpt_\w+|hidden_size|precision|dpo\..*"
    r"|sft\..*|nccl_\w+|sharp|gc_interval|virtual_pipeline_model_parallel_size|activations_checkpoint_(granularity|method|num_layers)"
    r"|use_te_\w+|expert_\w+|encoder_seq_length|num_moe_experts|qkv_bias|attention_\w+|ffn_dropout|kv_channels|moe_aux_\w+|tp_comm_\w+"
    r"|transformer_engine|external_cuda_graph_off|cpu_offloading_\w+|megatron_timer_kwargs\..*|dynamic_\w+|loss_mask|log_\w+|make_vocab\w+|load_\w+|mup\w*)"
)
"""Keys that are read here, or that change neither time nor memory."""


def read(path: Path, said: Given) -> Reading:
    """The job of a file. Raises PlannerError, OpenQuestionsError for what it does not say."""
    return parse(path, path.stem, file_settings(path, "a configuration of NeMo"), said)


def of_command(path: Path, said: Given) -> Reading:
    """The job of a command with overrides, over the configuration that it names: in its folder, or as NeMo publishes it. Raises
    PlannerError."""
    found = launched(path, said, PROGRAM)
    program = re.sub(r"^train_", "", found.program.rpartition("/")[2].removesuffix(".py"))
    named = str(found.settings.get("config_name") or USUAL.get(program, "")).removesuffix(".yaml")
    folder = str(found.settings.get("config_path") or "conf")
    known = library.read_yaml(Path(__file__).with_name("configurations.yaml"))
    file = beside(path, f"{folder}/{named}.yaml")
    if file is None and named not in known:
        names = ", ".join(known)
        raise PlannerError(f"{path}: its configuration {shown(named or program)} is neither in its folder nor one of {names}")
    base = file_settings(file, "a configuration of NeMo") if file is not None else known[named]
    pairs = (one.partition("=") for one in found.words if "=" in one)
    words = {key.lstrip("+~"): parsed(re.sub(r"""^(["'])(.*)\1$""", r"\2", value)) for key, _, value in pairs}  # Hydra's quotes
    reading = parse(path, program, override(base, words), said, counted="trainer.devices" in words)
    return dataclasses.replace(reading, notes=(*reading.notes, *found.notes))


def of_launcher(path: Path, said: Given) -> Reading:
    """The job of NeMo's launcher: launcher_scripts/main.py training=llama/llama3_8b training.trainer.num_nodes=8. Raises
    PlannerError."""
    found = launched(path, said, LAUNCHER)
    words = {key.lstrip("+~"): parsed(value) for key, mark, value in (one.partition("=") for one in found.words) if mark}
    stages = words.get("stages", ["training"])
    stage = next((one for one in STAGES if one in (stages if isinstance(stages, list) else [str(stages)])), None)
    named = str(words.get(stage or "") or "")
    if stage is None or not named:
        why = "training=llama/llama3_8b stages=[training] would be one"
        raise PlannerError(f"{path}: it starts no stage of NeMo's launcher that trains, by its name: {why}")
    file = beside(path, f"launcher_scripts/conf/{stage}/{named}.yaml")
    if file is None:
        raise PlannerError(f"{path}: its configuration launcher_scripts/conf/{stage}/{shown(named)}.yaml is not there")
    over = {
        key.removeprefix(f"{stage}."): value for key, value in words.items()
        if key.startswith(f"{stage}.") and not ("tokenizer" in key and is_open(str(value)))  # its place on the author's machine
    }  # fmt: skip
    reading = parse(path, file.stem, override(file_settings(file, "a configuration of NeMo"), over), said)
    return dataclasses.replace(reading, notes=(*reading.notes, *found.notes))


def parse(path: Path, name: str, data: dict[str, Any], said: Given, counted: bool = False) -> Reading:
    """The job of a configuration; ``name`` of its file or program; ``counted``: a command says its devices. Raises PlannerError."""
    followed = set(said.used)  # variables of a script
    given = Settings(path, resolved(said.filled(data)), said=said)
    said.used.difference_update(one for one in said.settings if "." not in one and one not in data and one not in followed)
    name = f"{name} {given.data.get('name', '')}".lower()
    if (other := FOREIGN.search(name)) is not None:
        word = other[1].strip("_")
        raise PlannerError(f"{path}: {word} in its name: only the training of GPT models, SFT, LoRA and DPO are read")
    model, trainer = given.section("model"), given.section("trainer")
    if not {"tensor_model_parallel_size", "micro_batch_size", "encoder_seq_length"} & model.data.keys():
        raise PlannerError(f"{path}: its section model has no sizes of a training with Megatron")
    if model.flag("fsdp"):
        raise PlannerError(f"{path}: model.fsdp is torch's FSDP over NeMo's layers, which is not read; --set model.fsdp=false")
    refused = [f"model.{one}" for one in NOT_PRICED if model.get(one) not in (None, False, 0, "", [])]
    if refused:
        raise not_priced(str(path), refused, refused)
    found = of_mapping(_arguments(model, trainer), str(path), said)
    for key, value in list(found.items()):
        if value == "???":
            del found[key]
            if not key.startswith("tokenizer"):
                ask_for(found, key, (key,), None)
    if {"use_cpu_initialization", "mcore_gpt"} & model.data.keys() and found.get("num_layers") and not any(map(model.flag, FAST)):
        found["attention_backend"] = "unfused"  # layers of NeMo's own
        found.notes.append(f"attention unfused: none of {', '.join(f'model.{one}' for one in FAST)} is on")
    called = preset_of_recipe(str(given.get("run.name") or path.stem).replace("megatron_", "").replace("_config", ""))
    if called is not None:
        found["tokenizer_model"] = called  # its vocabulary, where it has these sizes
    devices, nodes = (trainer.get(one) for one in ("devices", "num_nodes"))
    sure = all(isinstance(one, int) and not isinstance(one, bool) and one > 0 for one in (devices, nodes))
    example = not counted and devices == nodes == 1  # what examples say for 'as you like'
    found.num_gpus = devices * nodes if sure and not example else None
    if said.model is None and not found.get("num_layers"):
        label = model.label("restore_from_path") or given.section("pretrained_checkpoint").label("restore_from_path")
        named, _ = named_model(re.sub(r"\.nemo$", "", label.rpartition("/")[2]), path)
        if named is not None:
            said = dataclasses.replace(said, model=named)
    scheme = _scheme(model.section("peft"))
    if scheme == "lora" and _keeps_fp32(model) and (found.get("bf16") or found.get("fp16")):
        about = "false keeps the frozen weights in fp32, which is not modelled; true takes 2 bytes less for each"
        model.ask(Question(name="model.megatron_amp_O2", about=about, choices=("true",)))
    return _with_nemo(given, reading_of(found, said), name)


def _scheme(peft: Settings) -> str:
    """What is trained beside or instead of the weights. Raises PlannerError for what is not modelled."""
    scheme = str(peft.get("peft_scheme", "none")).lower()
    if scheme not in ("none", "lora", "null"):
        raise PlannerError(
            f"{peft.where('peft_scheme')} is {shown(scheme)}, which is not modelled; say --set model.peft.peft_scheme=lora or =null"
        )
    return scheme


def _keeps_fp32(model: Settings) -> bool:
    """Whether weights stay in fp32 under autocast."""
    return not model.flag("megatron_amp_O2") and "megatron_amp_O2" in model.data


def _arguments(model: Settings, trainer: Settings) -> dict[str, Any]:
    """Arguments of Megatron-LM."""
    found = {name: model.get(name) for name in SAME} | {to: model.get(name) for name, to in OTHER.items()}
    data = model.section("data").section("train_ds")
    for name in ("micro_batch_size", "global_batch_size"):
        found[name] = data.get(name) or found[name]
    found["seq_length"] = data.get("max_seq_length") or found["seq_length"]
    groups, activation = model.get("num_query_groups"), str(model.get("activation", "gelu")).removeprefix("fast-")
    if groups is not None and groups != model.get("num_attention_heads"):
        found |= {"group_query_attention": True, "num_query_groups": groups}
    if activation in ACTIVATIONS:
        found[ACTIVATIONS[activation]] = True
    elif activation not in ("gelu", "openai-gelu", "quick-gelu"):
        raise PlannerError(f"{model.where('activation')} is {shown(activation)}; a plan knows gelu, {', '.join(ACTIVATIONS)}")
    full = found["recompute_granularity"] != "selective"  # which takes all layers, whatever their number says  [transformer.py]
    if full and found["recompute_method"] == "block" and not found["recompute_num_layers"]:
        found["recompute_granularity"] = found["recompute_method"] = None  # full, of no layer
    found["normalization"] = "RMSNorm" if "rms" in str(model.get("normalization", "layernorm")).lower() else "LayerNorm"
    found["disable_bias_linear"] = not model.flag("bias", True)
    found["untie_embeddings_and_output_weights"] = not model.flag("share_embeddings_and_output_weights", True)
    precision = str(trainer.get("precision", 32)).lower()
    found |= {"bf16": precision.startswith("bf16"), "fp16": precision.startswith("16")}
    if model.flag("fp8"):
        found |= {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_param_gather": model.flag("fp8_params")}
    if model.flag("cpu_offloading"):
        found["cpu_offloading_num_layers"] = model.get("cpu_offloading_num_layers")
    optim, tokenizer = model.section("optim"), model.section("tokenizer")
    found["use_distributed_optimizer"] = str(optim.get("name", "fused_adam")) in DISTRIBUTED
    if str(optim.get("grad_sync_dtype", "")) in ("bf16", "bfloat16"):
        found["grad_reduce_in_bf16"] = True
    found |= {"tokenizer_type": tokenizer.get("type"), "tokenizer_model": tokenizer.get("model"), "optimizer": _optimizer(optim)}
    if model.data.get("restore_from_path") or data.data:  # the model's own file says it, and models of today have none
        found = {"hidden_dropout": 0.0, "attention_dropout": 0.0} | {name: one for name, one in found.items() if one is not None}
    return {name: value for name, value in found.items() if value is not None and value is not False}


def _optimizer(optim: Settings) -> str:
    name = str(optim.get("name", "fused_adam"))
    if name not in (*DISTRIBUTED, "fused_adam", "megatron_fused_adam", "adam", "adamw"):
        raise PlannerError(f"{optim.where('name')} is {shown(name)}, which is not modelled; say --set model.optim.name=fused_adam")
    return "adam"


def _with_nemo(given: Settings, found: Reading, name: str) -> Reading:
    """The reading under NeMo's profile, with adapters and the objective."""
    _, _, spelled = found.trainer.partition("+")
    options = dict(one.partition("=")[::2] for one in spelled.split("+") if one)
    model = given.section("model")
    low = str(model.section("optim").get("grad_sync_dtype", "")) in ("bf16", "bfloat16")
    options["gradient_dtype"] = "bf16" if low else "fp32"
    options.pop("gradient_overlap", None)  # a habit of NeMo, unless it says no
    if found.fields["tp"] > 1 and not model.flag("ub_tp_comm_overlap"):  # a habit of its recipes, not of its YAML
        options["tp_overlap"] = "off"
    if model.section("optim").get("overlap_grad_sync") is False:
        options["gradient_overlap"] = "off"
    peft = model.section("peft")
    lora, adapters = peft.section("lora_tuning"), _scheme(peft) == "lora"
    if adapters and lora.above_zero("adapter_dropout"):
        options["adapter_dropout"] = "on"
    known = load_trainer("nemo").choices.options
    trainer = spell("nemo", {name: value for name, value in options.items() if value in known.get(name, ())})
    notes = found.notes
    if not adapters and _keeps_fp32(model) and found.precision in ("bf16", "fp16"):
        notes = (*notes, "megatron_amp_O2 is false: autocast over fp32 weights, priced like 16-bit weights with an fp32 copy")
    for name in (*SAME, *OTHER):
        model.get(name)
    unread = (*found.unread, *(one for one in model.left() if not READ.fullmatch(one.split(" = ")[0])))
    named = lora.get("target_modules", ["attention_qkv"])
    targets = adapter_targets(named) if adapters else "all"
    notes = (*notes, *(layers_beside(named, targets) if adapters else ()))
    return dataclasses.replace(
        found, trainer=trainer, notes=notes, unread=unread, objective="dpo" if "dpo" in name or "dpo" in model.data else "lm",
        lora_rank=lora.size("adapter_dim", 32) if adapters else 0, frozen_weights="bf16" if adapters else None,
        lora_targets=targets,
    )  # fmt: skip
