"""Megatron-Bridge: a Python file that returns a ConfigContainer, every dimension written out."""

from planner.layout import Order
from planner.trainers.bundle.quoting import Expression, filled_text, python_fields, run_of
from planner.trainers.bundle.target import ExportJob, Rendered
from planner.trainers.megatron import core_settings as mcore
from planner.trainers.megatron.export import SMOKE_STEPS, header, smoke_batch
from planner.trainers.megatron_bridge import gemma
from planner.workload import LOW_PRECISIONS

ACTIVATIONS = {"silu": "F.silu", "gelu": "F.gelu", "relu": "F.relu", "relu2": "squared_relu"}
OPTIMIZERS = ("adam", "adam_bf16", "adam_8bit", "sgd")
"""The common recipe builds Adam or SGD."""
FLAGS_ONLY = ("max_position_embeddings", "padded_vocab_size", "group_query_attention")
"""Flags of Megatron-LM that are no fields of the provider."""
TYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp8": "torch.uint8"}


def model_fields(job: ExportJob) -> mcore.Fields:
    """Fields of GPTModelProvider (MLAModelProvider) that say what the model is."""
    m = job.model
    fused = (m.activation, m.gated) in (("silu", True), ("gelu", True)) or m.linear_bias
    fields = {**mcore.sizes(job), **mcore.attention(m), **mcore.experts(job), **mcore.constants(m)}
    fields |= {
        "vocab_size": mcore.vocab_rows(job), "should_pad_vocab": False, "activation_func": Expression(ACTIVATIONS[m.activation]),
        "gated_linear_unit": m.gated, "bias_activation_fusion": fused and m.activation not in ("relu", "relu2"),
        "add_bias_linear": m.linear_bias, "add_qkv_bias": m.qkv_bias or m.linear_bias,
        "share_embeddings_and_output_weights": m.tied_embeddings,
    }  # fmt: skip
    if m.clamped_activation:  # as models/gpt_oss/gpt_oss_bridge.py
        clamped = {
            "activation_func": Expression("quick_gelu"),
            "activation_func_clamp_value": 7.0,
            "glu_linear_offset": 1.0,
        }
        fields |= clamped
    if m.scaled_rope and not m.constants:  # the provider has no defaults for these
        fields |= {
            "yarn_rotary_scaling_factor": 32.0, "yarn_original_max_position_embeddings": 4096, "yarn_beta_fast": 32.0,
            "yarn_beta_slow": 1.0, "yarn_correction_range_round_to_int": False,
        }  # fmt: skip
    if m.expert_bias:  # TEGroupedMLP asserts this
        fields["bias_dropout_fusion"] = False
    if m.mtp_layers:
        fields |= {"mtp_num_layers": m.mtp_layers, "mtp_enabled": True}
    if gemma.generation(m):
        fields |= gemma.fields(m)
        fields = {name: value for name, value in fields.items() if value is not None}
    return {name: value for name, value in fields.items() if name not in FLAGS_ONLY}


def parallel_fields(job: ExportJob) -> mcore.Fields:
    """Fields of the model provider that say how it is split, recomputed and computed."""
    return {
        **mcore.degrees(job), "virtual_pipeline_model_parallel_size": job.layout.vpp if job.layout.vpp > 1 else None,
        "cp_comm_type": mcore.CP_TYPES[job.layout.cp_method],
        "attention_backend": Expression(f"AttnBackend.{mcore.attention_backend(job)}"),
        **mcore.cross_entropy(job), "gradient_accumulation_fusion": True, **mcore.recompute(job), **mcore.kernels(job),
        "fp8_dot_product_attention": job.trainer.kernels.attention_dtype == "fp8" and job.workload.precision in LOW_PRECISIONS,
        **({"cpu_offloading": True} if job.layout.offload_activations else {}),
    }  # fmt: skip


def container_fields(job: ExportJob) -> mcore.Fields:
    """Assignments to the container: batch, optimizer, sharding, overlap, precision."""
    layout, work = job.layout, job.workload
    shards, wide, (reduce, gather) = mcore.shards_states(job), mcore.sums_in_fp32(job), mcore.overlaps(job)
    form, recipe = mcore.precision_recipe(job)
    name, moments = mcore.OPTIMIZERS[work.optimizer]
    half = Expression("torch.float16" if work.precision == "fp16" else "torch.bfloat16")
    kind = "fp4" if recipe == "nvfp4" else "fp8"
    narrow = f", {kind}={form!r}, {kind}_recipe={recipe!r}" if recipe else ""
    fields: mcore.Fields = {
        "train.micro_batch_size": layout.micro_batch_size, "train.global_batch_size": work.global_batch_size,
        "dataset.seq_length": work.sequence_length, "dist.use_tp_pp_dp_mapping": layout.order == Order.TP_CP_EP_PP_DP,
        "ddp.use_distributed_optimizer": shards, "ddp.overlap_grad_reduce": reduce, "ddp.overlap_param_gather": gather,
        "ddp.grad_reduce_in_fp32": wide, "ddp.average_in_collective": False, "optimizer.optimizer": name,
        "optimizer.use_distributed_optimizer": shards, "optimizer.overlap_param_gather": gather,
        "mixed_precision": Expression(
            f"MixedPrecisionConfig({'fp16' if work.precision == 'fp16' else 'bf16'}=True, params_dtype={half}, "
            f"pipeline_dtype={half}, grad_reduce_in_fp32={wide}{narrow})"
        ),
    }  # fmt: skip
    if mcore.lean_optimizer(job):
        full, state = Expression(TYPES["fp32"]), Expression(TYPES[moments])
        fields |= {
            "optimizer.use_precision_aware_optimizer": True, "optimizer.main_params_dtype": full,
            "optimizer.main_grads_dtype": full if wide else half, "optimizer.exp_avg_dtype": state,
            "optimizer.exp_avg_sq_dtype": state,
        }  # fmt: skip
    fields |= {f"optimizer.{name}": value for name, value in mcore.offload(job).items()}
    overlaps = {
        "tp_comm_overlap": mcore.overlaps_tensor(job), "overlap_moe_expert_parallel_comm": mcore.overlaps_experts(job)
    }  # fmt: skip
    if any(overlaps.values()):
        said = ", ".join(f"{name}=True" for name, on in overlaps.items() if on)
        fields["comm_overlap"] = Expression(f"CommOverlapConfig({said})")
    return fields


def _program(job: ExportJob) -> str:
    provider = ("MLAModelProvider", "mla_provider") if job.model.is_mla else ("GPTModelProvider", "gpt_provider")
    provider = gemma.PROVIDERS.get(gemma.generation(job.model), provider)
    return filled_text(
        job, "megatron_bridge/bridge_config.txt", provider=provider[0], module=provider[1], header=header(job),
        fields=python_fields({**model_fields(job), **parallel_fields(job)}, 8),
        container="".join(f"    cfg.{name} = {value!r}\n" for name, value in container_fields(job).items()),
        steps=SMOKE_STEPS, batch=smoke_batch(job),
    )  # fmt: skip


def refusals(job: ExportJob) -> list[str]:
    """What Megatron-Bridge cannot run, with its rule."""
    found = mcore.refusals(job, "Megatron-Bridge", OPTIMIZERS)
    if gemma.generation(job.model):
        found = [one for one in found if "norms per layer" not in one]
    return found + gemma.refusals(job)


def render(job: ExportJob) -> Rendered:
    """plan_config.py."""
    more = {"environment": mcore.environment(job), "vocab_rows": mcore.vocab_rows(job)}
    files = {"plan_config.py": _program(job)}
    return run_of(job, "megatron_bridge", files, more, steps=SMOKE_STEPS, batch=smoke_batch(job))
