"""What Transformer Engine's copies of weights in 8 bits take beside what a plan counts."""

from planner.cost.parameters import count_parameters, total_parameters
from planner.cost.state_dtypes import RUNS_AS_IT_LIES, quantised_weights
from planner.plan_file import Plan
from planner.units import GIB

ONE_LAYOUT = ("Hopper", "Ada")
"""GPUs whose products in fp8 take one layout of an operand alone.  [Transformer Engine, is_non_tn_fp8_gemm_supported]"""


def noted(before: tuple[str, ...], plan: Plan) -> tuple[str, ...]:
    """Notes, and one on the copy by columns for the backward pass: of scales of blocks everywhere, of one of a tensor on some GPUs.
    [Transformer Engine, pytorch/module/linear.py: weight_quantizer.set_usage(columnwise); 0.8, module.py: set_fp8_weights]"""
    trainer, work, layout, arch = plan.load_trainer(), plan.workload, plan.layout, plan.cluster().hardware.arch
    twice = work.precision in ("fp8_block", "mxfp8") or (work.precision == "fp8" and arch in ONE_LAYOUT)
    one = quantised_weights(work, trainer) or (work.lora_rank and work.precision in RUNS_AS_IT_LIES.get(work.frozen_weights, ()))
    if one or not twice or "weight_copies" not in trainer.kernels.fp8 or layout.zero > 1:
        return before
    model, counts = work.model, count_parameters(work.model)
    experts = model.num_moe_layers * model.num_experts * counts.expert
    dense = total_parameters(model) - experts - counts.input_embedding - counts.position_embedding - counts.head
    size = (dense / layout.tp + experts / max(layout.ep * layout.etp, 1)) / layout.pp / GIB
    where = f" on {arch}" if work.precision == "fp8" else ""
    said = f"{work.precision}: Transformer Engine keeps linear weights by rows and by columns{where}, the plan by rows alone"
    return (*before, *[f"{said}: weights take up to {size:.1f} GiB more on each GPU"] * (size >= 1.0))
