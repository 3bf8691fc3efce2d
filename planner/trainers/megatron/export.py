"""Megatron-LM: the arguments of ``pretrain_gpt.py``, grouped, every dimension written out."""

import shlex
from typing import Any

from planner import library
from planner.cost.state_dtypes import quantised_weights
from planner.layout import Order
from planner.trainers.bundle.quoting import comment, run_of
from planner.trainers.bundle.target import ExportJob, Rendered
from planner.trainers.megatron import core_settings as mcore

Words = tuple[str, ...]
"""A flag and its values."""
SMOKE_STEPS = 10
"""Steps of the smoke run: past the first ones, which allocate."""
Groups = dict[str, list[Words]]
"""What arguments say together -> flags with their values, in order."""
STRATEGIES = {1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
"""--data-parallel-sharding-strategy of Megatron-FSDP, by zero."""
FLAGS = {
    "num_moe_experts": "num_experts", "layernorm_epsilon": "norm_epsilon", "rope_scaling": "use_rope_scaling",
    "yarn_rotary_scaling_factor": "rotary_scaling_factor", "yarn_mscale": "mscale", "yarn_mscale_all_dim": "mscale_all_dim",
}  # fmt: skip
"""Flags that are not called like the field."""


def arguments(job: ExportJob) -> Groups:
    """All arguments that follow from the plan; data, learning rate and checkpoints are the user's."""
    batch = {"micro_batch_size": job.layout.micro_batch_size, "global_batch_size": job.workload.global_batch_size}
    mapping = {
        "use_tp_pp_dp_mapping": job.layout.order == Order.TP_CP_EP_PP_DP, "tp_comm_overlap": mcore.overlaps_tensor(job),
        "overlap_moe_expert_parallel_comm": mcore.overlaps_experts(job),
    }  # fmt: skip
    kernels = {
        "transformer_impl": "transformer_engine", "attention_backend": mcore.attention_backend(job),
        "no_bias_dropout_fusion": job.model.expert_bias,  # TEGroupedMLP with biases asserts this
        **mcore.cross_entropy(job), **mcore.kernels(job),
    }  # fmt: skip
    groups = {
        "Model": _model(job), "Constants of the model": _constants(job), "Attention": mcore.attention(job.model),
        "Experts": mcore.experts(job),
        "Parallelism": mcore.degrees(job) | mapping, "Batch": batch, "Recompute": mcore.recompute(job),
        "Data parallel states and optimizer": _optimizer(job) | _sharding(job), "Precision": _precision(job),
        "Kernels that the plan was priced with": kernels,
    }  # fmt: skip
    return {title: words for title, fields in groups.items() if (words := _words(fields))}


def _words(fields: mcore.Fields) -> list[Words]:
    """Fields of Megatron Core as flags: True is a bare flag, False and None are the default and left out."""
    return [
        (f"--{FLAGS.get(name, name).replace('_', '-')}", *_values(value))
        for name, value in fields.items()
        if value is not None and value is not False
    ]


def _values(value: Any) -> list[str]:
    if isinstance(value, list):
        return value
    if isinstance(value, tuple):
        return [",".join(map(str, value))]
    return [] if value is True else [str(value)]


def _model(job: ExportJob) -> mcore.Fields:
    m, fields = job.model, mcore.sizes(job)
    if m.clamped_activation:  # gpt-oss: x sigmoid(1.702 x) of the clamped gate times the clamped rest plus one
        fields |= {"quick_geglu": True, "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0}
    elif flag := mcore.ACTIVATION_FLAGS.get((m.activation, m.gated)):
        fields[flag] = True
    return fields | {
        "disable_bias_linear": not m.linear_bias, "add_qkv_bias": m.qkv_bias,
        "untie_embeddings_and_output_weights": not m.tied_embeddings, "mtp_num_layers": m.mtp_layers or None,
    }  # fmt: skip


def _constants(job: ExportJob) -> mcore.Fields:
    """Without what has no flag: the turns of YaRN in latent attention, whose defaults are DeepSeek's."""
    fields = mcore.constants(job.model)
    if fields.pop("yarn_correction_range_round_to_int", True) is False:
        fields["no_yarn_correction_range_round_to_int"] = True
    no_flag = ("original_max_position_embeddings", "beta_fast", "beta_slow")
    return {name: value for name, value in fields.items() if name not in no_flag}


def _optimizer(job: ExportJob) -> mcore.Fields:
    name, moments = mcore.OPTIMIZERS[job.workload.optimizer]
    reduce, gather = mcore.overlaps(job)
    fields: mcore.Fields = {
        "optimizer": name, "use_distributed_optimizer": mcore.shards_states(job), "overlap_grad_reduce": reduce,
        "overlap_param_gather": gather,
    }  # fmt: skip
    if mcore.lean_optimizer(job):
        fields |= {
            "use_precision_aware_optimizer": True, "main_params_dtype": "fp32",
            "main_grads_dtype": "fp32" if mcore.sums_in_fp32(job) else "bf16", "exp_avg_dtype": moments,
            "exp_avg_sq_dtype": moments,
        }  # fmt: skip
    return fields | mcore.offload(job) | {"sgd_momentum": 0.9 if name == "sgd" else None}


def _sharding(job: ExportJob) -> mcore.Fields:
    """Megatron-FSDP: what is sharded, and dtypes of its buffers, which "auto" would derive from the weights'."""
    if not mcore.fully_sharded(job):
        return {}
    sums = "fp32" if mcore.sums_in_fp32(job) else "bf16"
    return {
        "use_megatron_fsdp": True, "data_parallel_sharding_strategy": STRATEGIES[job.layout.zero],
        "use_distributed_optimizer": True, "init_model_with_meta_device": True, "ckpt_format": "fsdp_dtensor",
        "megatron_fsdp_main_params_dtype": "fp32",
        "megatron_fsdp_main_grads_dtype": sums, "megatron_fsdp_grad_comm_dtype": sums,
    }  # fmt: skip


def _precision(job: ExportJob) -> mcore.Fields:
    precision, wide = job.workload.precision, mcore.sums_in_fp32(job)
    form, recipe = mcore.precision_recipe(job)
    kind = "fp4" if recipe == "nvfp4" else "fp8"
    return {
        "fp16": precision == "fp16", "bf16": precision not in ("fp16", "fp32"), "accumulate_allreduce_grads_in_fp32": wide,
        "grad_reduce_in_bf16": not wide and precision != "fp16", f"{kind}_format": form or None, f"{kind}_recipe": recipe or None,
        "fp8_param_gather": quantised_weights(job.workload, job.trainer),
    }  # fmt: skip


def refusals(job: ExportJob) -> list[str]:
    """What Megatron-LM cannot run, with its rule."""
    return mcore.refusals(job, "Megatron-LM")


def _shell_array(name: str, groups: Groups) -> list[str]:
    """Lines of a bash array, one flag a line."""
    lines = [f"{name}=("]
    for title, flags in groups.items():
        lines.append(f"    # {title}")
        lines += [f"    {' '.join([words[0], *map(shlex.quote, words[1:])])}" for words in flags]
    return [*lines, ")"]


def smoke_batch(job: ExportJob) -> int:
    """Sequences per step of a smoke run: two rounds of the pipeline, which is enough for the memory of its peak."""
    layout = job.layout
    rounds = min(layout.num_microbatches, 2 * layout.pp)
    return rounds * layout.micro_batch_size * layout.dp


def _smoke(job: ExportJob) -> Groups:
    fields = {
        "mock_data": True, "tokenizer_type": "NullTokenizer", "train_iters": SMOKE_STEPS, "global_batch_size": smoke_batch(job),
        "eval_iters": 0, "lr": "1e-5", "log_interval": 1, "log_throughput": True, "seed": 1234,
    }  # fmt: skip
    return {"Synthetic data, a few steps; the batch replaces the one above": _words(fields)}


def header(job: ExportJob) -> str:
    """What the arguments do not say, for ``plan import``."""
    plan = job.plan
    return comment(
        f"# plan: {plan.num_gpus} GPUs, hardware {plan.hardware}, trainer {plan.trainer}, model {job.model.name}"
    )


def _script(job: ExportJob) -> str:
    head = [
        "# shellcheck shell=bash disable=SC2034",
        "# Arguments of Megatron-LM's pretrain_gpt.py, sourced by the launch scripts.",
        header(job),
        "",
    ]
    return "\n".join([*head, *_shell_array("ARGUMENTS", arguments(job)), "", *_shell_array("SMOKE", _smoke(job))]) + "\n"


def _yaml(job: ExportJob) -> str:
    """The arguments as a mapping, in the form of Megatron-LM's own test recipes: ENV_VARS and MODEL_ARGS."""
    values = {words[0]: " ".join(words[1:]) or True for flags in arguments(job).values() for words in flags}
    variables = {name: one.value for name, one in mcore.environment(job).items()}
    document = {"ENV_VARS": variables, "MODEL_ARGS": values}
    head = (
        "# The arguments of arguments.sh as a mapping, in the form of Megatron-LM's test recipes; not for --yaml-cfg.\n"
    )
    return f"{head}{header(job)}\n{library.dump_yaml(document)}"


def render(job: ExportJob) -> Rendered:
    """The arguments as a bash array and as a mapping."""
    rows, alone = mcore.vocab_rows(job), mcore.alone(job) and mcore.shards_states(job)
    files = {"arguments.sh": _script(job), "arguments.yaml": _yaml(job)}
    more = {"environment": mcore.environment(job), "vocab_rows": rows}
    return run_of(
        job, "megatron", files, more, steps=SMOKE_STEPS, batch=smoke_batch(job), rows=rows, shards_alone=alone,
        fully_sharded=mcore.fully_sharded(job),
    )  # fmt: skip
