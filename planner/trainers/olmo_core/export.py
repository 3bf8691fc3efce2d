"""OLMo-core: a Python file of its configuration classes, every dimension written out, that trains when torchrun starts it."""

from itertools import accumulate

from planner.layout import Module, Schedule
from planner.trainers.bundle.fully_shard import SCHEDULES, beyond_llama, shared_refusals
from planner.trainers.bundle.quoting import comment, filled_text, refused, run_of
from planner.trainers.bundle.target import ExportJob, Rendered, unknown_choices, unknown_modules


def refusals(job: ExportJob) -> list[str]:
    """What OLMo-core cannot run, with its rule."""
    m = job.model
    found = unknown_choices(job, "OLMo-core", ("adam",), ("bf16", "fp32")) + unknown_modules(job, "OLMo-core", Module(0))
    beyond = beyond_llama(m, experts=m.is_moe, MLA=m.is_mla, biases_of_queries=m.qkv_bias)
    return found + refused(job, "olmo_core", beyond=beyond) + shared_refusals(job)


def render(job: ExportJob) -> Rendered:
    """olmo_train.py."""
    stages = [len(layers) for _, _, layers in job.virtual_stages()]
    text = filled_text(
        job, "olmo_core/olmo_train.py.j2", splits=list(accumulate(stages))[:-1], name=comment(job.model.name),
        schedule_name=SCHEDULES[Schedule(job.layout.schedule)],
    )  # fmt: skip
    return run_of(job, "olmo_core", {"olmo_train.py": text})
