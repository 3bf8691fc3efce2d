"""axolotl: its YAML file, with FSDP2 settings of its own or DeepSpeed's JSON."""

from planner import library
from planner.layout import Recompute
from planner.trainers.bundle.quoting import filled_yaml, json_text, run_of
from planner.trainers.bundle.target import ExportJob, Rendered
from planner.trainers.deepspeed import export as deepspeed
from planner.trainers.transformers.training_run import OPTIMIZERS, front_end_refusals, on_deepspeed, smoke_data


def refusals(job: ExportJob) -> list[str]:
    """What axolotl or the library below it cannot run, with its rule."""
    found = front_end_refusals(job, "axolotl")
    if job.workload.precision == "bf16_true" and not on_deepspeed(job):
        found.append("precision bf16_true: the export to axolotl writes mixed precision; choose bf16")
    if job.workload.objective == "dpo" and job.workload.frozen_weights != "bf16" and job.layout.zero and not on_deepspeed(job):
        found.append("objective dpo on a quantised base: axolotl has no FSDP2 for it; use zero 0, or frozen_weights bf16")
    if job.layout.offload_activations and job.layout.recompute != Recompute.FULL:
        found.append(
            "offload_activations without recompute full: axolotl moves the inputs of checkpointed layers; use recompute full"
        )
    return found


def render(job: ExportJob) -> Rendered:
    """axolotl.yaml, its smoke variant, and DeepSpeed's file where the plan is one of DeepSpeed."""
    below, files = on_deepspeed(job), {}
    for file, smoke in (("axolotl.yaml", False), ("axolotl-smoke.yaml", True)):
        # Unknown keys are accepted silently, so the tests compare every key here with the schema.
        config = filled_yaml(
            job, "axolotl", "axolotl.txt", smoke=smoke, deepspeed=below, optimizer=OPTIMIZERS[job.workload.optimizer]
        )
        files[file] = library.dump_yaml(config)
    files["make_smoke_data.py"] = smoke_data(job)
    if below:
        files["ds_config.json"] = json_text(deepspeed.config(job))
    return run_of(job, "axolotl", files, deepspeed=below)
