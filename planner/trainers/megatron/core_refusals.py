"""What Megatron Core cannot run, for every target that is built on it: the rules of refusals.yaml, and what they look at."""

from collections.abc import Collection

from planner.layout import Recompute, module_names
from planner.trainers.bundle.quoting import refused
from planner.trainers.bundle.target import ExportJob, unknown_choices
from planner.trainers.megatron.core_settings import (
    ACTIVATION_FLAGS,
    MODULES,
    OPTIMIZERS,
    PRECISIONS,
    alone,
    lean_optimizer,
    precision_recipe,
)


def refusals(
    job: ExportJob, who: str, optimizers: Collection[str] = tuple(OPTIMIZERS), precisions: Collection[str] = PRECISIONS
) -> list[str]:
    """What Megatron Core, and ``who`` builds on it, cannot run of this job, each with the rule's place."""
    layout, partition = job.layout, job.layers_per_chunk()
    parts, multiple = len(partition[0]), 32 if job.workload.precision == "mxfp8" else 16
    return unknown_choices(job, who, optimizers, precisions) + refused(
        job, "megatron", who=who, parts=parts, multiple=multiple, per_stage=min(sum(rank) for rank in partition),
        nearest_layers=max(parts, round(layout.recompute_layers / parts) * parts),
        selected=module_names(layout.recompute_modules) if layout.recompute == Recompute.SELECTIVE else [],
        known_modules={module_names(int(module))[0]: name for module, name in MODULES.items()},
        recipe=precision_recipe(job)[1], lean=lean_optimizer(job), alone=alone(job), uneven_sizes=_uneven(job, multiple),
        has_flag=(job.model.activation, job.model.gated) in ACTIVATION_FLAGS,
    )  # fmt: skip


def _uneven(job: ExportJob, multiple: int) -> list[str]:
    """Sides of matrices on one rank that are no multiple."""
    model, layout, tp = job.model, job.layout, job.layout.tp
    tokens = job.workload.sequence_length * layout.micro_batch_size // layout.cp
    sizes = {
        "hidden size": model.hidden_size, "attention width per rank": model.attention_output_size / tp,
        "tokens per rank": tokens / (tp if layout.sequence_parallel else 1),
    }  # fmt: skip
    if model.num_plain_layers:
        sizes["MLP width per rank"] = model.ffn_size / tp
    if model.is_moe:
        sizes["expert width per rank"] = model.expert_ffn_size / layout.etp
    return [f"{name} {size:g}" for name, size in sizes.items() if size % multiple]
