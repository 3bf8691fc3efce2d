"""Megatron-Bridge: a Python file that returns a ConfigContainer, every dimension written out."""

from __future__ import annotations

from planner.layout import NAMES, Order, Recompute, Schedule
from planner.trainers.bundle.target import ExportJob, Rendered, Setting, Target
from planner.trainers.megatron import core_settings as mcore
from planner.trainers.megatron.export import SMOKE_STEPS, header, overlaps_tensor, smoke_batch, window_pattern

Fields = dict[str, str]
"""Name of a field -> Python expression."""

VERSIONS = ">=0.6,<0.7"
SOURCE = "NVIDIA-NeMo/Megatron-Bridge 0.6.2: models/gpt_provider.py, training/config.py, training/mixed_precision.py"
ACTIVATIONS = {"silu": "F.silu", "gelu": "F.gelu", "relu": "F.relu", "relu2": "squared_relu"}


def model_fields(job: ExportJob) -> Fields:
    """Fields of GPTModelProvider (MLAModelProvider) that say what the model is."""
    m = job.model
    fields: Fields = {
        "num_layers": str(m.num_layers), "hidden_size": str(m.hidden_size), "ffn_hidden_size": str(m.ffn_size),
        "num_attention_heads": str(m.num_heads), "seq_length": str(job.workload.sequence_length),
        "vocab_size": str(mcore.vocab_rows(job)), "should_pad_vocab": "False",
        "position_embedding_type": repr("yarn" if m.scaled_rope else {"learned": "learned_absolute"}.get(m.position, m.position)),
        "normalization": repr("RMSNorm" if m.norm == "rmsnorm" else "LayerNorm"),
        "activation_func": ACTIVATIONS[m.activation], "gated_linear_unit": str(m.gated),
        "bias_activation_fusion": str((m.activation, m.gated) in (("silu", True), ("gelu", True)) or m.linear_bias),
        "add_bias_linear": str(m.linear_bias), "add_qkv_bias": str(m.qkv_bias or m.linear_bias),
        "share_embeddings_and_output_weights": str(m.tied_embeddings), "hidden_dropout": "0.0", "attention_dropout": "0.0",
    }  # fmt: skip
    if m.activation == "relu" or (m.activation == "relu2"):
        fields["bias_activation_fusion"] = "False"
    if m.clamped_activation:  # as models/gpt_oss/gpt_oss_bridge.py
        fields |= {"activation_func": "quick_gelu", "activation_func_clamp_value": "7.0", "glu_linear_offset": "1.0"}
    if m.scaled_rope:  # the provider has no defaults for these
        fields |= {
            "yarn_rotary_scaling_factor": "32.0", "yarn_original_max_position_embeddings": "4096", "yarn_beta_fast": "32.0",
            "yarn_beta_slow": "1.0", "yarn_correction_range_round_to_int": "False",
        }  # fmt: skip
    if m.expert_bias:  # TEGroupedMLP asserts this
        fields["bias_dropout_fusion"] = "False"
    if m.is_mla:
        fields |= {
            "multi_latent_attention": "True", "q_lora_rank": str(m.q_lora_rank or None),
            "kv_lora_rank": str(m.kv_lora_rank), "qk_layernorm": "True",
            "qk_head_dim": str(m.qk_nope_head_dim), "qk_pos_emb_head_dim": str(m.qk_rope_head_dim),
            "v_head_dim": str(m.v_head_dim), "rope_type": "'yarn'",
        }  # fmt: skip
    else:
        fields |= {
            "kv_channels": str(m.head_dim),
            "num_query_groups": str(m.num_kv_heads),
            "qk_layernorm": str(m.qk_norm),
        }
    if m.window:
        fields["window_size"] = f"({m.window}, 0)"
        if m.num_windowed_layers < m.num_layers:
            fields["window_attn_skip_freq"] = window_pattern(m.num_layers, m.num_windowed_layers)
    if m.mtp_layers:
        fields |= {"mtp_num_layers": str(m.mtp_layers), "mtp_enabled": "True"}
    return fields | (_expert_fields(job) if m.is_moe else {})


def _expert_fields(job: ExportJob) -> Fields:
    m, layout = job.model, job.layout
    backend = mcore.FLEX_BACKENDS.get(job.trainer.kernels.expert_dispatch)
    fields: Fields = {
        "num_moe_experts": str(m.num_experts), "moe_router_topk": str(m.top_k), "moe_ffn_hidden_size": str(m.expert_ffn_size),
        "moe_layer_freq": mcore.moe_layer_pattern(m), "expert_model_parallel_size": str(layout.ep),
        "expert_tensor_parallel_size": str(layout.etp), "moe_grouped_gemm": "True", "moe_permute_fusion": "True",
        "moe_router_dtype": "'fp32'", "moe_router_load_balancing_type": "'aux_loss'", "moe_aux_loss_coeff": "0.001",
        "moe_router_pre_softmax": str(m.top_k == 1), "moe_token_dispatcher_type": repr("flex" if backend else "alltoall"),
    }  # fmt: skip
    if m.shared_expert_ffn_size:
        fields["moe_shared_expert_intermediate_size"] = str(m.shared_expert_ffn_size)
    return fields | ({"moe_flex_dispatcher_backend": repr(backend)} if backend else {})


def parallel_fields(job: ExportJob) -> Fields:
    """Fields of the model provider that say how it is split, recomputed and computed."""
    layout = job.layout
    stages = int(layout.pp) > 1
    fields: Fields = {
        "tensor_model_parallel_size": str(layout.tp), "pipeline_model_parallel_size": str(layout.pp),
        "context_parallel_size": str(layout.cp), "sequence_parallel": str(bool(layout.sequence_parallel)),
        "pipeline_model_parallel_layout": repr(mcore.pipeline_layout(job)) if stages else "None",
        "virtual_pipeline_model_parallel_size": str(int(layout.vpp)) if int(layout.vpp) > 1 else "None",
        "cp_comm_type": repr(mcore.CP_TYPES[int(layout.cp_method)]),
        "attention_backend": f"AttnBackend.{mcore.attention_backend(job)}", "cross_entropy_loss_fusion": str(mcore.fused_loss(job)),
        "cross_entropy_fusion_impl": "'te'", "gradient_accumulation_fusion": "True",
    }  # fmt: skip
    mode = int(layout.recompute)
    if mode == Recompute.SELECTIVE:
        return fields | {
            "recompute_granularity": "'selective'",
            "recompute_modules": repr(mcore.recompute_modules(job)),
        }
    if mode == Recompute.FULL:
        return fields | {
            "recompute_granularity": "'full'", "recompute_method": "'block'",
            "recompute_num_layers": str(mcore.layers_to_recompute(job)),
        }  # fmt: skip
    return fields | {"recompute_granularity": "None"}


def container_fields(job: ExportJob) -> Fields:
    """Assignments to the container: batch, optimizer, sharding, overlap, precision."""
    layout, work = job.layout, job.workload
    shards = mcore.shards_states(job)
    many = int(layout.dp) * int(layout.cp) > 1
    reduce = many and "gradients" in job.trainer.traffic.overlap
    gather = reduce and int(layout.zero) == 1 and "parameters" in job.trainer.traffic.overlap
    form, recipe = mcore.precision_recipe(job)
    half = "torch.float16" if work.precision == "fp16" else "torch.bfloat16"
    narrow = f", fp4={form!r}, fp4_recipe={recipe!r}" if recipe == "nvfp4" else f", fp8={form!r}, fp8_recipe={recipe!r}"
    fields: Fields = {
        "train.micro_batch_size": str(layout.micro_batch_size), "train.global_batch_size": str(work.global_batch_size),
        "dataset.seq_length": str(work.sequence_length),
        "dist.use_tp_pp_dp_mapping": str(int(layout.order) == Order.TP_CP_EP_PP_DP),
        "ddp.use_distributed_optimizer": str(shards), "ddp.overlap_grad_reduce": str(reduce),
        "ddp.overlap_param_gather": str(gather), "ddp.grad_reduce_in_fp32": str(mcore.sums_in_fp32(job)),
        "ddp.average_in_collective": "False",
        "optimizer.optimizer": repr({"adam_bf16": "adam", "adam_8bit": "adam"}.get(work.optimizer, work.optimizer)),
        "optimizer.use_distributed_optimizer": str(shards), "optimizer.overlap_param_gather": str(gather),
        "mixed_precision": f"MixedPrecisionConfig({'fp16' if work.precision == 'fp16' else 'bf16'}=True, params_dtype={half}, "
                           f"pipeline_dtype={half}, grad_reduce_in_fp32={mcore.sums_in_fp32(job)}{narrow if recipe else ''})",
    }  # fmt: skip
    if mcore.lean_optimizer(job):
        moments = {"adam_bf16": "torch.bfloat16", "adam_8bit": "torch.uint8"}.get(work.optimizer, "torch.float32")
        fields |= {
            "optimizer.use_precision_aware_optimizer": "True", "optimizer.main_params_dtype": "torch.float32",
            "optimizer.main_grads_dtype": "torch.float32" if mcore.sums_in_fp32(job) else half, "optimizer.exp_avg_dtype": moments,
            "optimizer.exp_avg_sq_dtype": moments,
        }  # fmt: skip
    if int(layout.offload_optimizer):
        fields["optimizer.optimizer_cpu_offload"] = "True"
        fields["optimizer.optimizer_offload_fraction"] = f"{int(layout.offload_optimizer) / 100:g}"
    if overlaps_tensor(job.trainer) and layout.sequence_parallel:
        fields["comm_overlap"] = "CommOverlapConfig(tp_comm_overlap=True)"
    return fields


def _program(job: ExportJob) -> str:
    provider = ("MLAModelProvider", "mla_provider") if job.model.is_mla else ("GPTModelProvider", "gpt_provider")
    lines = [
        '"""The plan as Megatron-Bridge takes it. ``config()`` is the whole configuration; run under torchrun it trains."""',
        "", "import os", "import sys", "", "import torch", "import torch.nn.functional as F",
        "from megatron.bridge.models." + f"{provider[1]} import {provider[0]}",
        "from megatron.bridge.recipes.common import _pretrain_common",
        "from megatron.bridge.training.comm_overlap import CommOverlapConfig",
        "from megatron.bridge.training.mixed_precision import MixedPrecisionConfig",
        "from megatron.core.activations import squared_relu", "from megatron.core.fusions.fused_bias_geglu import quick_gelu",
        "from megatron.core.transformer.enums import AttnBackend",
        "", header(job), "", "", "def config(smoke=False):",
        '    """The plan; ``smoke``: synthetic data, a few steps, the same parallelism."""', "    cfg = _pretrain_common()",
        f"    cfg.model = {provider[0]}(",
        *(f"        {name}={value}," for name, value in {**model_fields(job), **parallel_fields(job)}.items()), "    )",
        *(f"    cfg.{name} = {value}" for name, value in container_fields(job).items()),
        '    cfg.train.train_iters = int(os.environ.get("TRAIN_ITERS", "1000"))',
        '    cfg.optimizer.lr = float(os.environ.get("LEARNING_RATE", "1e-4"))', "    cfg.optimizer.min_lr = 0.0",
        '    cfg.checkpoint.save = cfg.checkpoint.load = os.environ.get("CHECKPOINTS", "checkpoints")',
        "    if smoke or not os.environ.get(\"TOKENIZER\"):", '        cfg.tokenizer.tokenizer_type = "NullTokenizer"',
        "        cfg.tokenizer.vocab_size = cfg.model.vocab_size", "    else:",
        '        cfg.tokenizer.tokenizer_model = os.environ["TOKENIZER"]', "    if smoke:",
        f"        cfg.train.train_iters, cfg.train.global_batch_size = {SMOKE_STEPS}, {smoke_batch(job)}",
        "        cfg.validation.eval_iters, cfg.checkpoint.save, cfg.checkpoint.load = 0, None, None",
        "        cfg.logger.log_interval = 1", "        cfg.scheduler.lr_warmup_iters = 0", "    else:",
        '        cfg.dataset.blend = ([os.environ["DATA_PATH"]], None)', "    return cfg", "", "",
        'if __name__ == "__main__":', "    from megatron.bridge.training.gpt_step import forward_step",
        "    from megatron.bridge.training.pretrain import pretrain", "",
        '    pretrain(config(smoke="--smoke" in sys.argv[1:]), forward_step)',
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _refusals(job: ExportJob) -> list[str]:
    m, found = job.model, mcore.refusals(job)
    if m.gated and m.activation.startswith("relu"):
        found.append(f"{m.name} has a gated {m.activation}, which Megatron Core's fused MLP does not know")
    length = job.workload.sequence_length
    if m.position == "learned" and length != m.num_position_embeddings:
        found.append(
            f"sequences of {length} tokens, but {m.name} learned {m.num_position_embeddings} positions, and Megatron-Bridge makes "
            f"the table as long as the sequences [GPTModelProvider.provide]; train with --sequence-length "
            f"{m.num_position_embeddings}, or use --to megatron"
        )
    schedule = int(job.layout.schedule)
    if schedule not in (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED):
        found.append(f"schedule {NAMES['schedule'][schedule]}: Megatron Core runs 1f1b and interleaved_1f1b")
    if job.workload.optimizer not in ("adam", "adam_bf16", "adam_8bit", "sgd"):
        found.append(f"optimizer {job.workload.optimizer}: the common recipe builds Adam or SGD; use --to megatron")
    return found


def _render(job: ExportJob) -> Rendered:
    notes = [
        "run.sh also needs DATA_PATH (prefix of a data set of tools/preprocess_data.py) and TOKENIZER; smoke.sh neither.",
        "Rotary base, norm epsilon, initialisation and the router's score function keep Megatron Core's defaults: they change "
        "neither time nor memory; set them for your model.",
        "The precision recipe is written out: Bridge's own recipes keep the first and last layer in bf16 and gather fp8 weights, "
        "which the plan was not priced with.",
        "Hugging Face weights: AutoBridge.from_hf_pretrained(...) imports and exports them.",
        f"smoke.sh runs {SMOKE_STEPS} steps of {smoke_batch(job)} sequences instead of {job.workload.global_batch_size}.",
    ]
    return Rendered(
        files={"plan_config.py": _program(job)}, entry=("plan_config.py",), smoke=("plan_config.py", "--smoke"),
        environment=mcore.environment(job),
        variables={
            "TRAIN_ITERS": Setting(value="1000", why="Optimizer steps; the plan does not say how many."),
            "LEARNING_RATE": Setting(value="1e-4", why="Peak learning rate; it does not change time or memory."),
            "CHECKPOINTS": Setting(value="checkpoints", why="Folder of checkpoints, which load into any layout."),
        },
        notes=tuple(notes), vocab_rows=mcore.vocab_rows(job),
        install=("pip install 'megatron-bridge>=0.6,<0.7'  # Python 3.12; or the NeMo container, which has it",),
    )  # fmt: skip


TARGET = Target(
    name="megatron-bridge", title="Megatron-Bridge (Python configuration)", trainers=("megatron-bridge", "megatron", "nemo"),
    versions=VERSIONS, package="megatron-bridge", level="validated", source=SOURCE, refusals=_refusals, render=_render,
    writes=("gradient_bytes", "gradient_reduce_bytes"),
)  # fmt: skip
