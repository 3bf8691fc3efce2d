"""What DeepSpeed alone does: ZeRO 3 gathers one unit more ahead; ZeRO 1 and 2 keep a copy of weights in fp32 too."""

from dataclasses import dataclass

from planner.cost.layer.operators import Number
from planner.cost.own_terms import OwnTerms
from planner.cost.pipeline.partition import StageParameters, column, host_share
from planner.layout import Layout
from planner.workload import Workload

COPY_BYTES = 4.0


@dataclass(frozen=True, kw_only=True)
class Terms(OwnTerms):
    """ZeRO 3's prefetch; the copy that ZeRO 1 and 2 update."""

    units_ahead: float
    """Units whose gathered weights are alive in addition to the current one and the next."""

    def prefetched_units(self) -> float:
        """As the file says."""
        return self.units_ahead

    def workspace_bytes(self, workload: Workload, layout: Layout, parameters: StageParameters) -> Number:
        """In half precision states count their master weights; in fp32 a rank clones its part all the same, except under ZeRO 3.
        [DeepSpeed, runtime/zero/stage_1_and_2.py: single_partition_of_fp32_groups; stage3.py: _create_fp32_partitions]"""
        zero = column(layout.zero)
        cloned = (workload.precision == "fp32") & (zero >= 1) & (zero <= 2)
        return COPY_BYTES * parameters.updated(workload, layout) * cloned * (1.0 - host_share(workload, layout))
