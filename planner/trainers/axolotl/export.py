"""axolotl: its YAML file, with FSDP2 settings of its own or DeepSpeed's JSON."""

from planner import library
from planner.layout import Recompute
from planner.trainers.bundle.quoting import filled_yaml, json_text, run_of
from planner.trainers.bundle.target import ExportJob, Rendered, library_trainer
from planner.trainers.deepspeed import export as deepspeed
from planner.trainers.transformers.training_run import OPTIMIZERS, front_end_refusals, on_deepspeed, smoke_data


def refusals(job: ExportJob) -> list[str]:
    """What axolotl or the library below it cannot run, with its rule."""
    found, layout = front_end_refusals(job, "axolotl"), job.layout
    if layout.cp > 1 and not on_deepspeed(job):
        found = [one for one in found if not one.startswith(f"cp {layout.cp}:")] + _context_refusals(job)
    if (half := half_adapters(job)) and job.workload.frozen_weights != "bf16":
        found.append(f"{half} on a quantised base: axolotl leaves adapters in the dtype of one in bf16; choose frozen_weights bf16")
    if job.workload.objective == "dpo" and job.workload.frozen_weights != "bf16" and job.layout.zero and not on_deepspeed(job):
        found.append("objective dpo on a quantised base: axolotl has no FSDP2 for it; use zero 0, or frozen_weights bf16")
    if job.layout.offload_activations and job.layout.recompute != Recompute.FULL:
        found.append(
            "offload_activations without recompute full: axolotl moves the inputs of checkpointed layers; use recompute full"
        )
    return found


def half_adapters(job: ExportJob) -> str:
    """What of the job says that adapters are in half precision; '' = they are not, or there are none."""
    if not job.workload.lora_rank:
        return ""
    option = "option adapter_dtype half" if job.trainer.kernels.half_adapters else ""
    return "precision bf16_true" if job.workload.precision == "bf16_true" else option


def _context_refusals(job: ExportJob) -> list[str]:
    """What its context parallelism cannot run.  [utils/schemas/validation.py: check_context_parallel_size; ring_flash_attn]"""
    layout, found = job.layout, []
    if library_trainer(job.plan.trainer) != "axolotl":
        found.append(
            f"cp {layout.cp} with trainer {job.trainer.name}: axolotl cuts a sequence in contiguous pieces, of which the last"
            " has most to attend to, and only trainer axolotl prices that; plan for it, or use cp 1"
        )
    if layout.micro_batch_size > 1:
        found.append(
            f"micro_batch_size {layout.micro_batch_size} with cp {layout.cp}: ring-flash-attn takes one row of packed samples; use"
            " --micro-batch-size 1"
        )
    if job.workload.objective == "dpo":
        found.append(f"objective dpo with cp {layout.cp}: pairs are not packed, and axolotl takes another ring for them; use cp 1")
    return found


def render(job: ExportJob) -> Rendered:
    """axolotl.yaml, its smoke variant, and DeepSpeed's file where the plan is one of DeepSpeed."""
    below, files = on_deepspeed(job), {}
    for file, smoke in (("axolotl.yaml", False), ("axolotl-smoke.yaml", True)):
        # Unknown keys are accepted silently, so the tests compare every key here with the schema.
        config = filled_yaml(
            job, "axolotl", "axolotl.txt", smoke=smoke, deepspeed=below, optimizer=OPTIMIZERS[job.workload.optimizer],
            half=half_adapters(job),
        )  # fmt: skip
        files[file] = library.dump_yaml(config)
    files["make_smoke_data.py"] = smoke_data(job)
    if below:
        files["ds_config.json"] = json_text(deepspeed.config(job))
    return run_of(job, "axolotl", files, deepspeed=below)
