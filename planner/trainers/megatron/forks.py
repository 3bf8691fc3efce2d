"""Arguments of forks of Megatron-LM (MindSpeed-LLM, MegaBlocks, BigCode's, Megatron-DeepSpeed): what they mean in Megatron's own
words, and which of them decide memory or degrees and cannot be said in a plan."""

import re
from typing import Any

from planner.errors import PlannerError, shown
from planner.trainers.megatron import deepspeed_experts
from planner.trainers.megatron.arguments import Arguments, listed_arguments, unknown
from planner.trainers.megatron.around import UNTIL_2023
from planner.trainers.megatron.sizes import OTHER_MODELS, own_layers
from planner.trainers.reading.configuration import NEEDED
from planner.trainers.reading.fine_tuning import OPTIMIZERS, adapter_targets, layers_beside
from planner.trainers.reading.given import Given, OtherStepError, Question
from planner.trainers.reading.shell import is_open
from planner.trainers.reading.values import MOST_LAYERS, not_priced, stage_ends

OWN_LENGTH = re.compile(r"(train|sft|tune)\w*_seq(uence)?_?len(gth)?|seq(uence)?_?len(gth)?_(train|sft|tune)\w*")
"""Words of forks for the length of sequences."""
RENAMED = {
    "moe_intermediate_size": "moe_ffn_hidden_size", "moe_num_experts": "num_experts", "moe_top_k": "moe_router_topk",
    "overlapped_distributed_optimizer": "use_distributed_optimizer", "causal_lm": "untie_embeddings_and_output_weights",
    "no_tie_embed_logits": "untie_embeddings_and_output_weights", "t5_swiglu": "swiglu",
    "multi_head_latent_attention": "multi_latent_attention", "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
}  # fmt: skip
RMS_NORM = ("RMSNorm", "use_rms_norm", "rms_norm", "use_rmsnorm", "rmsnorm")
"""Switches of forks for it."""
ACTIVATIONS = {"swiglu": "swiglu", "squaredrelu": "squared_relu", "gelu": ""}
"""activation_func of Megatron's YAML -> its switch on command lines.  [training/yaml_arguments.py]"""
GATED = {"swiglu": "swiglu", "geglu": "quick_geglu"}
"""--glu-activation of BigScience -> the switch of Megatron for the same shapes."""
CP_ALGORITHMS = {"ulysses_cp_algo": "a2a", "megatron_cp_algo": "p2p", "kvallgather_cp_algo": "all_gather"}
"""--context-parallel-algo of MindSpeed -> Megatron's communication."""
RECOMPUTED = {"recompute_activation_function": "moe_act", "recompute_norm": "layernorm"}
"""Switches of MindSpeed -> names after --recompute-modules.  [MindSpeed, docs/features/activation-function-recompute.md]"""
MINDSPEED = (
    "use_fused_rmsnorm", "use_fused_swiglu", "use_fused_rotary_pos_emb", "use_mc2", "use_ascend_mc2", "use_ascend_coc",
    "reuse_fp32_param", "swap_attention", "recompute_in_advance", "is_instruction_dataset", "jit_compile", "attention_mask_type",
    "cp_attention_mask_type", "moe_tp_extend_ep", "moe_alltoall_overlap_comm", "noop_layers", "padded_base_length",
    "cut_max_seqlen",
)  # fmt: skip
"""Arguments that MindSpeed alone has."""
NOT_PRICED = (
    "swap_attention", "reuse_fp32_param", "recompute_in_advance", "tp_2d", "moe_zero_memory", "schedules_method", "kd",
    "num_layers_teacher", "mos", "peft_type", "moe_data_distributed", "expert_interval", "full_attention_interval",
    "checkpoint_in_cpu", "num_zero_experts", "fp32_residual_connection",
    "activation_func_fp8_input_store", "mtp_use_repeated_layer", "embedding_weights_in_fp32", "logits_load_dir", "moe_paged_stash",
    "enable_mhc_connections", "standalone_embedding_stage", "perform_rl_step",
    "num_microbatches_with_partial_activation_checkpoints",
    "enable_dsa_indexer", "enable_mhc", "kv_compress", "random_ltd", "freeze_all_layers", "o2_optimizer", "export_kd_teacher_load",
    "load_teacher", "lora_modules_to_save", *RECOMPUTED,
)  # fmt: skip
LANGUAGE_MODEL = ("pt", "pretrain", "sft")
OTHER_STEPS = {
    "dpo": "DPO", "simpo": "SimPO", "orm": "a reward model", "prm": "a reward model", "rm": "a reward model", "ppo": "PPO",
    "grpo": "GRPO", "ray_ppo": "PPO", "ray_grpo": "GRPO", "ray_online_dpo": "DPO", "distill": "distillation",
}  # fmt: skip
"""--stage of MindSpeed-LLM.  [tasks/posttrain/launcher.py]"""
DECIDES = re.compile(
    r".*(offload|swap_|qlora|recompute|checkpoint_acti|parallel_size|parallelism|shard|zero_stage|freeze|frozen|teacher|"
    r"quantiz|_nf4|galore|num_experts|noop|layer_list|mask_only|sparsity|prun(e|ing)|disaggregat|low_rank|gradient_(accumulation_steps|checkpointing)|grad_comp|compress|"
    r"(tensor|pipeline|context|data|expert|sequence|model)_parallel|zero_?bubble|dualpipe|use_dpp|(pipe|pp|vpp)_?(schedule|method)|"
    r"mtp_(steps|repeat\w*|only)|only_mtp|capacity_bins|lora|adapter|(^|_)dora|(?<!r)outer_|diloco|local_sgd|inner_steps|subgroup|moving_average|relora).*|(.*_)?ema(_.*)?"
    r"|((use|enable)_)?(muon|sophia\w*|soap|shampoo|lion|adafactor|ademamix|came)"
    r"|(.*_)?(swi|ge|re)?_?glu(_.*)?"
)
"""Names of arguments that no list of this reader has, and that decide memory or degrees by their words."""
HARMLESS = re.compile(
    r"(?!.*(teacher|student|load_in_\d|save_(activ|mem|tensor))).*(algo|save|(?<!off)load|print|log(?!it)|path|dir|(?<!dif)fusion|filter|export|debug|target_|alpha|"
    r"dropout|rl_|rollout|sglang|vllm|num_shards|per_tok|answer_loss|json_(file|key)).*"
)

SWITCH = re.compile(r"(use|enable)_\w+")
HOW = re.compile(r"(\w{5,}?)(_fallback)?_mode")
"""How a feature runs, which says nothing where its switch, use_X or enable_X, is off beside it."""


def translate(found: Arguments, gpus: int | None) -> None:
    """Says arguments of forks in Megatron's words; ``gpus`` of the job, None = not known. Raises PlannerError for those that decide
    memory or degrees and have none."""
    deepspeed_experts.take(found)
    deepspeed_experts.of_pipeline_engine(found)
    if found.dumped:
        return
    if found.pop("router_gating_in_fp32", None):  # of MindSpeed
        found.setdefault("moe_router_dtype", "fp32")
    if str(found.get("glu_activation")) in GATED:  # of BigScience, with the width that is said, or 4 hidden sizes
        if not is_open(str(found.get("hidden_size"))):
            found.setdefault("ffn_hidden_size", str(4 * found.number("hidden_size")))
        found[GATED[found.pop("glu_activation")]] = True
    if str(found.get("activation_func")).lower() in ACTIVATIONS:
        word = ACTIVATIONS[str(found.pop("activation_func")).lower()]
        found |= {word: True} if word else {}
    switches = [found.pop(one, None) for one in RMS_NORM]
    if any(switches) or found.get("norm_dtype") == "RMSNorm":
        found["normalization"] = "RMSNorm"
    if found.pop("use_multi_token_prediction", None):  # of Pai and MooreThreads, with DeepSeek's layers
        depth = [found.pop(one, None) for one in ("num_mtp_predictor", "mtp_depth")]
        found.setdefault("mtp_num_layers", next((one for one in depth if one is not None), "1"))
    if any(found.pop(one, None) for one in ("fp8_hybrid", "fp8_e4m3")):  # until 2023
        found["fp8"] = "hybrid"
    if found.get("overlapped_distributed_optimizer"):
        found["overlap_grad_reduce"] = True
    for name, usual in RENAMED.items():
        if name in found:
            found.setdefault(usual, found.pop(name))
    _step(found)
    _stages(found)
    _experts(found)
    _expert_ranks(found, gpus)
    _memory(found)
    spec = found.get("spec")
    if re.match(r"local\b|.*_layer_local", " ".join(map(str, spec)) if isinstance(spec, list) else str(spec)):
        found.setdefault("transformer_impl", "local")
    legacy = any(found.get(one) for one in ("use_legacy_models", *UNTIL_2023))
    if found.get("use_legacy_models") and found.get("use_flash_attn") and not found.get("deepspeed"):
        found.notes.append("layers are Megatron's own with flash attention, priced as Transformer Engine's (transformer_impl)")
    if found.get("transformer_impl") == "local" and found.get("use_flash_attn") and (legacy or of_mindspeed(found)):
        del found["transformer_impl"]  # its kernels take the place of local ones  [mindspeed, fusion_attention_feature.py]
    algorithm = found.pop("context_parallel_algo", None)
    cut = str(found.get("context_parallel_size", "1"))
    ring = ("use_cp_send_recv", "use_fused_ring", "cp_window")
    said = "cp_comm_type" in found or any(one.startswith(ring) for one in found if found[one])
    if algorithm is None and cut.isdigit() and int(cut) > 1 and not said and of_mindspeed(found):
        algorithm = "ulysses_cp_algo"
        found.notes.append("context parallelism a2a: MindSpeed's --context-parallel-algo is ulysses_cp_algo by default")
    if algorithm is not None and found.number("context_parallel_size", 1) > 1:
        if str(algorithm) not in CP_ALGORITHMS:
            known = ", ".join(CP_ALGORITHMS)
            raise PlannerError(f"{found.where}: context_parallel_algo is {shown(algorithm)}; a plan knows {known}")
        found["cp_comm_type"] = [CP_ALGORITHMS[str(algorithm)]]
    window = found.pop("sliding_window", None)  # of MindSpeed and Pai; it counts the own token
    if window is not None and str(window).isdigit() and int(str(window)) and found.get("window_size") is None:
        found["window_size"] = str(int(str(window)) - 1)
    if found.get("attention_head_type") == "multiquery":
        found |= {"group_query_attention": True, "num_query_groups": "1"}
    refuse(found)


def of_mindspeed(found: Arguments) -> bool:
    """Whether it is MindSpeed by arguments or a program that nobody else has."""
    own = any(one in found for one in MINDSPEED) or "mindspeed" in str(found.get("spec"))
    return own or re.search(r"(posttrain_gpt|pretrain_\w+_npu)\.py", found.program) is not None


def until_2020(found: Arguments) -> None:
    """Says arguments of Megatron-LM 1.1.5 and of its pipeline of DeepSpeed in later words.
    [DeepSpeedExamples, Megatron-LM-v1.1.5-3D_parallelism, arguments.py]"""
    if "batch_size" in found and not ("micro_batch_size" in found or "global_batch_size" in found):
        found["micro_batch_size"] = found.pop("batch_size")
    method = found.get("activations_checkpoint_method")  # until 2022 it alone decides
    if method is not None:
        found.setdefault("recompute_method", method)
        found.setdefault("recompute_granularity", "full")
    stages = found.pop("pipe_parallel_size", None)
    if stages not in (None, "0"):
        found.setdefault("pipeline_model_parallel_size", stages)
    if str(found.get("tensor_model_parallel_size", "1")) == "1":
        for name in ("partition_activations", "distribute_saved_activations"):  # over ranks of tensor parallelism
            found.pop(name, None)


def of_checkpoint(found: Arguments, given: Given) -> None:
    """Asks for the degrees that a checkpoint says, whatever the arguments are.  [checkpointing.py, load_args_from_checkpoint]"""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    if found.dumped or not (found.get("use_checkpoint_args") and found.pop("use_mp_args_from_checkpoint_args", None)):
        return
    for name in names if found.get("num_experts") else names[:2]:
        if name not in given.settings:
            about = "as the checkpoint has it, by --use-mp-args-from-checkpoint-args"
            found.questions.append(Question(name=name, about=about))


def _memory(found: Arguments) -> None:
    """What MindSpeed keeps elsewhere or computes again.  [MindSpeed, docs/features/swap-optimizer.md, reuse-fp32-param.md]"""
    if found.pop("swap_optimizer", None):
        found["optimizer_cpu_offload"] = True
        found.pop("swap_optimizer_times", None)  # in how many parts they come
        found.notes.append("swap-optimizer: states wait on the host and are updated on the device; priced as updated on the host")
    if found.get("reuse_fp32_param") and found.get("use_distributed_optimizer"):
        del found["reuse_fp32_param"]
        found.notes.append("reuse-fp32-param saves 2 / dp bytes per parameter, which the plan counts")
    if found.get("moe_layer_recompute") and found.get("recompute_granularity") != "full":  # until it became a module's name
        del found["moe_layer_recompute"]
        before = found.get("recompute_modules") or ["core_attn"]
        found |= {"recompute_granularity": "selective", "recompute_modules": [*before, *(["moe"] if "moe" not in before else [])]}
    modules = [module for name, module in RECOMPUTED.items() if found.get(name)]
    limited = [name for name in found if name.startswith("recompute_activation_function_")]
    if modules and not limited and not any(found.get(f"recompute_{one}") for one in ("granularity", "method", "num_layers")):
        found |= {"recompute_granularity": "selective", "recompute_modules": modules}
        for name in RECOMPUTED:
            found.pop(name, None)


def _expert_ranks(found: Arguments, gpus: int | None) -> None:
    """Ranks that experts are dealt to. MindSpeed's moe-tp-extend-ep: those of tensor parallelism too, none of them cut. MegaBlocks:
    all data parallel ranks, and where these are more than experts, parts of experts.  [megablocks/layers/mpu.py]"""
    if found.pop("moe_extended_tp", None):  # of Megatron Core 0.7 to 0.9: ranks of experts cut them instead
        cut = found.number("expert_model_parallel_size", 1) * found.number("tensor_model_parallel_size", 1)
        found |= {"expert_model_parallel_size": "1", "expert_tensor_parallel_size": str(cut)}
    if found.get("moe_tp_extend_ep"):
        del found["moe_tp_extend_ep"]
        whole = found.number("expert_model_parallel_size", 1) * found.number("tensor_model_parallel_size", 1)
        found |= {"expert_model_parallel_size": str(whole), "expert_tensor_parallel_size": "1"}
    blocks = found.get("moe_expert_model_parallelism") and found.get("num_experts")
    if blocks and found.number("tensor_model_parallel_size", 1) == 1:
        del found["moe_expert_model_parallelism"]
        if gpus is None:
            found.questions.append(NEEDED["num_gpus"])
            return
        ranks = max(gpus // found.number("pipeline_model_parallel_size", 1), 1)
        own = min(ranks, found.number("num_experts"))
        found |= {"expert_model_parallel_size": str(own), "expert_tensor_parallel_size": str(max(ranks // own, 1))}


def _step(found: Arguments) -> None:
    """What is trained, as MindSpeed-LLM's --stage says it. Raises OtherStepError for what is not modelled in Megatron."""
    stage = str(found.get("stage", "")).lower()
    if stage in LANGUAGE_MODEL:
        del found["stage"]
    elif (step := OTHER_STEPS.get(stage)) is not None:
        said = f"--stage {stage} trains with {step}, whose step is not modelled in Megatron; pre-training and fine-tuning are"
        raise OtherStepError(f"{found.where}: {said}")


def _stages(found: Arguments) -> None:
    """Layers of pipeline ranks as MindSpeed says them: one by one, or with places that hold no layer, which its count includes."""
    blocks = found.get("pipeline_model_parallel_method") == "block"  # of Yuan
    name = "pipeline_model_parallel_blocks" if blocks else "num_layer_list"
    listed, empty = found.get(name), found.get("noop_layers")
    if not (listed or empty) or any(is_open(str(one)) for one in (listed, empty, found.get("num_layers"))):
        return
    pp, total = found.number("pipeline_model_parallel_size", 1), found.number("num_layers", most=MOST_LAYERS)
    layers = _numbers(found, name) if listed else []
    if empty:
        without = _numbers(found, "noop_layers")
        chunk = found.number("num_layers_per_virtual_pipeline_stage") or -(-total // pp)
        dense = str(found.get("first_k_dense_replace", 0))
        early = re.fullmatch(r"\d{1,9}", dense) is not None and min(without) < int(dense)
        if listed or early or max(without) >= total or total % (pp * chunk):
            raise PlannerError(f"{found.where}: noop_layers is {shown(empty)}, which does not fit {total} layers on {pp} stages")
        layers = [sum(place // chunk % pp == rank for place in range(total) if place not in without) for rank in range(pp)]
        found |= {"num_layers": str(sum(layers)), "num_virtual_stages_per_pipeline_rank": str(total // (pp * chunk))}
        found.pop("num_layers_per_virtual_pipeline_stage", None)
    if sum(layers) != found.number("num_layers") or len(layers) != pp:
        raise PlannerError(f"{found.where}: {name} {shown(listed)} is not {total} layers on {pp} stages")
    ends = stage_ends(layers, f"{found.where}: {found.spelled(name if listed else 'noop_layers')}")
    for end in ("first", "last"):
        found[f"decoder_{end}_pipeline_num_layers"] = str(ends[f"{end}_stage_layers"])
    for one in (name, "noop_layers"):
        found.pop(one, None)


def _numbers(found: Arguments, name: str) -> list[int]:
    given = found[name]
    text = ",".join(map(str, given)) if isinstance(given, list) else str(given)
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        raise PlannerError(f"{found.where}: {name} is {shown(given)}; whole numbers with commas are understood")
    return [int(one) for one in text.split(",")]


def _experts(found: Arguments) -> None:
    """Leading dense layers and shared experts as MindSpeed-LLM counts them."""
    dense = found.pop("first_k_dense_replace", None)
    if dense is not None and found.get("num_experts") and not is_open(str(found.get("num_layers"))):
        first, layers = max(int(dense), 0) if re.fullmatch(r"-?\d{1,6}", str(dense)) else -1, found.number("num_layers")
        if first < 0 or str(found.get("moe_layer_freq", "1")) not in ("1", "-1") or first > layers:
            raise PlannerError(f"{found.where}: first_k_dense_replace is {shown(dense)}; a whole number of layers is understood")
        found["moe_layer_freq"] = f"([0]*{first}+[1]*{layers - first})" if 0 < first < layers else "1"
    if str(found.get("moe_layer_freq")) == "-1":
        found["moe_layer_freq"] = "1"
    shared = found.pop("n_shared_experts", None)
    if shared is not None and "moe_shared_expert_intermediate_size" not in found and found.get("num_experts"):
        width = found.number("moe_ffn_hidden_size") or found.number("ffn_hidden_size")
        found["n_shared_experts"] = shared
        found["moe_shared_expert_intermediate_size"] = str(found.number("n_shared_experts") * width)
        del found["n_shared_experts"]


def refuse(found: Arguments) -> None:
    """Raises PlannerError for what decides memory or degrees and is not priced, with the words that import the job without it."""
    wrong = [
        name for name, value in unknown(found).items()
        if name in NOT_PRICED or (DECIDES.fullmatch(name) and not HARMLESS.fullmatch(name)) or _other_optimizer(name, value)
    ]  # fmt: skip
    if wrong:
        others = [one for one in strangers(found) if one not in wrong]  # or they are asked about after it
        raise not_priced(found.where, [found.spelled(one) for one in wrong], [*wrong, *others])


def strangers(found: Arguments) -> list[str]:
    """Words that stand in no list and say by no word what they are, which are asked about; none of a dump."""
    layers = {*OTHER_MODELS, *own_layers(found)}
    off = [one for one, value in found.items() if SWITCH.match(one) and str(value).lower() in ("0", "false")]
    return [
        name for name, value in ({} if found.dumped else unknown(found)).items()
        if not (listed_arguments().fullmatch(name) or HARMLESS.fullmatch(name) or OWN_LENGTH.fullmatch(name))
        and not ((how := HOW.fullmatch(name)) and any(one.endswith(how[1]) for one in off))
        and not (is_open(name) or name in layers or ("optimizer" in name and re.fullmatch(r"[a-z][\w-]+", str(value))))
    ]  # fmt: skip


def _other_optimizer(name: str, value: Any) -> bool:
    """Whether an argument that is no list's names an optimizer whose states are not Adam's."""
    word = str(value).lower().replace("-", "_")
    return "optimizer" in name and bool(re.fullmatch(r"[a-z][a-z_0-9]+", word)) and word not in ("true", "none", "default") and (
        OPTIMIZERS.get(word.removeprefix("fused_")) != "adam"
    )


def adapters(found: Arguments) -> tuple[int, str]:
    """(rank, which linear layers) of LoRA as MindSpeed-LLM says it; rank 0 = none."""
    targets = found.get("lora_target_modules", [])
    named = targets if isinstance(targets, list) else [str(targets)]
    rank, where = found.number("lora_r"), adapter_targets(named)
    found.notes += layers_beside(named, where) if rank and named else ()
    return rank, where
