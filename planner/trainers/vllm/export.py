"""vLLM: the command line that serves the plan's model on the plan's GPUs."""

from planner.trainers.bundle.serving import exporter

refusals, render = exporter("vllm", "vLLM")
