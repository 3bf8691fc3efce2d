"""ms-swift: one YAML file for ``swift`` over transformers and FSDP2, or for ``megatron`` over Megatron Core."""

from typing import Any

from planner import library
from planner.layout import Module
from planner.trainers.bundle.quoting import Expression, filled_yaml, json_text, refused, run_of
from planner.trainers.bundle.target import ExportJob, Rendered, library_trainer, unknown_modules
from planner.trainers.megatron import core_settings as mcore
from planner.trainers.transformers.training_run import OPTIMIZERS, front_end_refusals, smoke_data

MEGATRON_OPTIMIZERS = ("adam", "adam_bf16", "adam_8bit", "sgd")
EXPERTS = (
    "expert_model_parallel_size", "expert_tensor_parallel_size", "moe_grouped_gemm", "moe_permute_fusion",
    "moe_token_dispatcher_type",
)  # fmt: skip
"""Of Megatron Core's fields for experts those that are arguments; all others come from the model's config.json."""


def on_megatron(job: ExportJob) -> bool:
    """Whether the plan is one of Megatron Core; else of transformers' Trainer."""
    return library_trainer(job.plan.trainer) == "ms-swift-megatron"


def refusals(job: ExportJob) -> list[str]:
    """What ms-swift or the library below it cannot run, with its rule."""
    if on_megatron(job):
        found = mcore.refusals(job, "ms-swift", MEGATRON_OPTIMIZERS)
    else:
        found = [one for one in front_end_refusals(job, "ms-swift") if not one.startswith(f"cp {job.layout.cp}:")]
        found += unknown_modules(job, "ms-swift", Module(0))
    return found + refused(job, "ms_swift", on_megatron=on_megatron(job))


def _megatron(job: ExportJob) -> dict[str, Any]:
    """Arguments of ``megatron pt`` that are Megatron Core's own fields."""
    reduce, gather = mcore.overlaps(job)
    experts, moments = mcore.experts(job), mcore.OPTIMIZERS[job.workload.optimizer]
    form, recipe = mcore.precision_recipe(job)
    kind = "fp4" if recipe == "nvfp4" else "fp8"
    recompute = mcore.recompute(job)
    fields = {
        **mcore.degrees(job), **{name: experts[name] for name in EXPERTS if name in experts}, **recompute,
        "use_distributed_optimizer": mcore.shards_states(job), "overlap_grad_reduce": reduce, "overlap_param_gather": gather,
        **mcore.offload(job), "optimizer": moments[0], "main_grads_dtype": "fp32" if mcore.sums_in_fp32(job) else "bf16",
        "use_precision_aware_optimizer": mcore.lean_optimizer(job), "exp_avg_dtype": moments[1], "exp_avg_sq_dtype": moments[1],
        "attention_backend": mcore.attention_backend(job),
        "recompute_granularity": recompute["recompute_granularity"] or "none", **mcore.cross_entropy(job),
    }  # fmt: skip
    fields |= {f"{kind}_format": form, f"{kind}_recipe": recipe} if form else {}
    if job.model.is_moe:
        fields["moe_router_dtype"] = experts["moe_router_dtype"] or "none"
        backend = experts.get("moe_flex_dispatcher_backend")
        fields |= {"megatron_extra_kwargs": {"moe_flex_dispatcher_backend": backend}} if backend else {}
    plain = {name: float(value) if isinstance(value, Expression) else value for name, value in fields.items()}
    return {name: value for name, value in plain.items() if value is not None}


def render(job: ExportJob) -> Rendered:
    """ms_swift.yaml, fsdp.json where FSDP2 shards, and data for the smoke run."""
    megatron = on_megatron(job)
    config = filled_yaml(
        job, "ms_swift", "ms_swift.txt", on_megatron=megatron,
        optimizer="" if megatron else OPTIMIZERS[job.workload.optimizer],
    )  # fmt: skip
    files = {"make_smoke_data.py": smoke_data(job)}
    if megatron:
        config |= _megatron(job)
    elif job.layout.zero:
        files["fsdp.json"] = json_text(filled_yaml(job, "ms_swift", "fsdp.txt"))
    files["ms_swift.yaml"] = library.dump_yaml(config)
    more = {"environment": mcore.environment(job)} if megatron else {}
    return run_of(job, "ms_swift", files, more, tool=Expression("megatron" if megatron else "swift"), on_megatron=megatron)
