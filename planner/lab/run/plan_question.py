"""A plan as the torch model runs it and as it is priced."""

from dataclasses import dataclass

from planner.cluster import Cluster
from planner.errors import PlannerError
from planner.lab.reference.split import LIKE_TORCH, Split, split_of
from planner.layout import CpMethod, Layout, Module, Order, Recompute
from planner.plan_file import Plan
from planner.rules import Job, check
from planner.timeline.priced_plan import Priced, price
from planner.trainer import Trainer, load_trainer
from planner.workload import Workload

POSITIONS = ("first", "middle", "last")
"""The cost model's three kinds of stages."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A plan as the torch model runs it and as it is priced."""

    workload: Workload
    cluster: Cluster
    trainer: Trainer
    layout: Layout
    split: Split
    changes: tuple[str, ...]
    """What was changed so that the torch model can be compared with it, in words; empty for plans of torch's own trainers."""

    @property
    def job(self) -> Job:
        """What is trained, where and by which trainer."""
        return Job(workload=self.workload, cluster=self.cluster, trainer=self.trainer)

    def priced(self, trainer: Trainer | None = None) -> Priced:
        """The layout as the cost model has it, with another trainer where one is given."""
        job = Job(workload=self.workload, cluster=self.cluster, trainer=trainer or self.trainer)
        return price(job, self.layout)


def question(plan: Plan) -> Question:
    """What to run and to price for a plan. Raises PlannerError for what the torch model cannot say anything about."""
    trainer, layout, changes = plan.load_trainer(), plan.layout, []
    if trainer.code_base not in LIKE_TORCH:
        changes.append(f"trainer torchtitan instead of {trainer.name}, whose memory the torch model has not")
        trainer = load_trainer("torchtitan")
        layout, more = _as_torchtitan(layout)
        changes += more
    cluster = plan.cluster()
    try:
        check(Job(workload=plan.workload, cluster=cluster, trainer=trainer), layout)
    except PlannerError as error:
        if not changes:
            raise
        raise PlannerError(
            f"the plan is for trainer {plan.trainer}, whose memory the torch model has not, and as a torchtitan plan it is "
            f"refused: {error}; plan with --trainer torchtitan or fsdp"
        ) from error
    return Question(
        workload=plan.workload, cluster=cluster, trainer=trainer, layout=layout,
        split=split_of(plan.workload, trainer, layout), changes=tuple(changes),
    )  # fmt: skip


def _as_torchtitan(layout: Layout) -> tuple[Layout, list[str]]:
    """The nearest layout that torchtitan has, and what was changed."""
    wanted: dict[str, int] = {
        "zero": max(int(layout.zero), 2), "sequence_parallel": int(int(layout.tp) > 1), "order": int(Order.TP_CP_EP_DP_PP),
    }  # fmt: skip
    if int(layout.cp) > 1:
        wanted["cp_method"] = int(CpMethod.ALLGATHER)
    if int(layout.recompute) == Recompute.SELECTIVE:
        wanted["recompute_modules"] = int(Module.EVERY_SECOND_MATMUL)
    new = layout.replace(**wanted)
    before, after = layout.to_dict(), new.to_dict()
    return new, [f"{name} {after[name]} instead of {before[name]}" for name in wanted if after[name] != before[name]]


def position(stage: int, pp: int) -> int:
    """Which of POSITIONS a pipeline stage is."""
    return 0 if stage == 0 else 2 if stage == pp - 1 else 1
