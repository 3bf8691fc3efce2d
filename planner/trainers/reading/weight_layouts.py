"""What Transformer Engine's copies of weights in 8 bits take beside what a plan counts."""

from planner.cost.parameters import count_parameters, total_parameters
from planner.cost.state_dtypes import RUNS_AS_IT_LIES, quantised_weights
from planner.plan_file import Plan
from planner.units import GIB

ONE_LAYOUT = ("Hopper", "Ada")
"""GPUs whose products in fp8 take one layout of an operand alone.  [Transformer Engine, is_non_tn_fp8_gemm_supported]"""
LEAST = 1.0
"""GiB below which nothing is said."""


def noted(before: tuple[str, ...], plan: Plan) -> tuple[str, ...]:
    """Notes of a reading, and what its plan leaves out."""
    return (*before, *by_columns(plan))


def by_columns(plan: Plan) -> tuple[str, ...]:
    """A note on the copy by columns, for the backward pass: of scales of blocks everywhere, of one scale of a tensor on some GPUs.
    [Transformer Engine, pytorch/module/linear.py: weight_quantizer.set_usage(columnwise); 0.8, module.py: set_fp8_weights]"""
    trainer, workload, layout = plan.load_trainer(), plan.workload, plan.layout
    arch = plan.cluster().hardware.arch
    twice = workload.precision in ("fp8_block", "mxfp8") or (workload.precision == "fp8" and arch in ONE_LAYOUT)
    as_it_lies = workload.lora_rank and workload.precision in RUNS_AS_IT_LIES.get(workload.frozen_weights, ())
    one = as_it_lies or quantised_weights(workload, trainer)
    if one or not twice or "weight_copies" not in trainer.kernels.fp8 or layout.zero > 1:
        return ()
    model, counts = workload.model, count_parameters(workload.model)
    experts = model.num_moe_layers * model.num_experts * counts.expert
    dense = total_parameters(model) - experts - counts.input_embedding - counts.position_embedding - counts.head
    size = (dense / layout.tp + experts / max(layout.ep * layout.etp, 1)) / layout.pp / GIB
    if size < LEAST:
        return ()
    where = f" on {arch}" if workload.precision == "fp8" else ""
    said = f"{workload.precision}: Transformer Engine keeps linear weights by rows and by columns{where}, the plan by rows"
    return (f"{said} alone: weights take up to {size:.1f} GiB more on each GPU",)
