"""vLLM: the command line that serves the plan's model on the plan's GPUs."""

from planner.trainers.bundle.serving import served, serving_refusals
from planner.trainers.bundle.target import ExportJob, Rendered


def refusals(job: ExportJob) -> list[str]:
    """What vLLM cannot serve here."""
    return serving_refusals(job, "vLLM")


def render(job: ExportJob) -> Rendered:
    """The flags, once with the trained weights and once with random ones."""
    return served(job, "vllm")
