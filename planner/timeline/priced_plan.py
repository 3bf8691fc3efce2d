"""A plan priced again, with the parts of its estimate: timelines, comparisons and diagnoses start from it."""


from planner.cost.estimate import PARTS, Estimate
from planner.cost.pipeline.partition import Stages, assign_layers
from planner.cost.pipeline.schedule_walk import StageDurations
from planner.cost.pipeline.schedules import sends_overlap
from planner.cost.price.stage_times import StageTimes
from planner.cost.refine import durations, price_exactly
from planner.cost.unique_stages import Gathered, StageTable
from planner.errors import PlannerError
from planner.layout import Layout
from planner.plan_file import Plan
from planner.record import record
from planner.rules import Job, check, check_workload

SAME = 1e-6
"""A plan file and its new price may differ by this part: rounding of another processor."""


@record
class Priced:
    """One layout of one job, refined on the timeline of its pipeline."""

    job: Job
    """Workload, cluster and trainer."""
    layout: Layout
    """The layout, as plain integers."""
    assigned: Layout
    """The same with the layers of the first and the last stage filled in where the trainer assigns them by cost."""
    estimate: Estimate
    """Its estimate, columns of length 1."""
    shared: Gathered
    """The parts of the estimate by the three kinds of stages: first, middle, last; arrays of shape (3, 1)."""
    contents: Stages
    """What the three stages hold, (1, 3)."""
    times: StageTimes
    """Seconds per microbatch of the three stages, (3, 1)."""

    @property
    def step_time(self) -> float:
        """Seconds of one optimizer step."""
        return float(self.estimate.step_time[0])

    @property
    def memory_peak(self) -> float:
        """Peak of the device, bytes."""
        return float(self.estimate.memory_peak[0])

    @property
    def pipeline_seconds(self) -> float:
        """Seconds from the first forward to the last backward pass: the slowest stage's passes and the bubble."""
        passes = sum(float(self.estimate.time[part][0]) for part in PARTS[:8])  # compute to bubble
        return passes + int(self.layout.num_microbatches) * float(self.shared.slowest["waiting"][0])

    @property
    def send(self) -> tuple[float, float]:
        """Seconds of one send that a pass waits for, and of one that is overlapped; one of them is 0."""
        each = float(self.shared.send[0]) / int(self.assigned.vpp)
        return (0.0, each) if float(sends_overlap(self.job.trainer, self.assigned)) else (each, 0.0)

    def durations(self, times: StageTimes) -> StageDurations:
        """Seconds per microbatch of every virtual stage, in model order, from such times of the three kinds of stages."""
        if int(self.assigned.pp) == 1:
            return StageDurations(forward=times.forward[0], backward=times.backward[0], weight=times.weight[0])
        return durations(self.job.workload, self.assigned, self.contents, times)


def estimate_of(job: Job, layout: Layout) -> Estimate:
    """The estimate of one layout as plans are priced: the closed form, then the walked schedule for its idle time."""
    [found] = price_exactly(job.workload, job.cluster, job.trainer, [layout])
    return found


def price(job: Job, layout: Layout) -> Priced:
    """Price one layout, and keep the parts of its estimate."""
    assigned = assign_layers(job.workload.model, job.trainer, layout).row(0)
    table = StageTable(job.workload, job.cluster, job.trainer, Layout.stack([assigned]))
    contents, times = table.content(0)
    return Priced(
        job=job, layout=layout, assigned=assigned, estimate=estimate_of(job, layout), shared=table.take(slice(0, 1)),
        contents=contents, times=times,
    )  # fmt: skip


def job_of(plan: Plan) -> Job:
    """The job of a plan, its profile and its trainer read again."""
    return Job(workload=plan.workload, cluster=plan.cluster(), trainer=plan.load_trainer())


def price_plan(plan: Plan, *, where: str = "the plan") -> Priced:
    """Price a plan again. Raises PlannerError when its layout is not legal, or when that does not give what the plan says, as its
    profile, its trainer file or the cost model changed since."""
    job = job_of(plan)
    try:
        check_workload(job.workload, job.cluster, job.trainer)
        check(job, plan.layout)
    except PlannerError as error:
        raise PlannerError(f"{where}: {error}") from error
    priced = price(job, plan.layout)
    said, now = plan.prediction.step_time_s, priced.step_time
    if abs(said - now) > SAME * now:
        raise PlannerError(
            f"{where} says {said:.6g} s per step, but this planner prices its layout at {now:.6g} s: a profile, a trainer file "
            "or the cost model changed since it was made; price it again with 'plan estimate PLAN --output PLAN'"
        )
    return priced
