"""LLaMA-Factory: its YAML file over DeepSpeed's JSON or accelerate's FSDP file."""

from planner import library
from planner.trainers.accelerate.export import LAUNCHER
from planner.trainers.bundle.quoting import Expression, filled_yaml, json_text, run_of
from planner.trainers.bundle.target import ExportJob, Rendered
from planner.trainers.transformers.training_run import (
    OPTIMIZERS,
    back_end,
    front_end_refusals,
    on_deepspeed,
    smoke_data,
)


def refusals(job: ExportJob) -> list[str]:
    """What LLaMA-Factory or the back end below it cannot run, with its rule."""
    found = front_end_refusals(job, "LLaMA-Factory")
    if job.workload.frozen_weights == "int8" and job.layout.zero >= (3 if on_deepspeed(job) else 1):
        found.append("frozen_weights int8: LLaMA-Factory shards bases in 4 bits alone; use nf4, or zero 0")
    if job.layout.offload_activations:
        found.append("offload_activations: LLaMA-Factory has no setting for it; set it to false")
    return found


def render(job: ExportJob) -> Rendered:
    """llama_factory.yaml, the file of the library below, and data for the smoke run.

    Model and data come from the command line, which is merged over the YAML file [hparams/parser.py: read_args].
    """
    deepspeed, below = on_deepspeed(job), back_end(job).config(job)
    optimizer = OPTIMIZERS[job.workload.optimizer]
    config = filled_yaml(job, "llama_factory", "llama_factory.txt", deepspeed=deepspeed, optimizer=optimizer)
    pairs = {"ranking": True, "columns": {name: name for name in ("prompt", "chosen", "rejected")}}
    smoke = pairs if job.workload.objective == "dpo" else {"columns": {"prompt": "text"}}
    files = {
        "llama_factory.yaml": library.dump_yaml(config),
        **({"ds_config.json": json_text(below)} if deepspeed else {"accelerate.yaml": library.dump_yaml(below)}),
        "make_smoke_data.py": smoke_data(job),
        "data/dataset_info.json": json_text({"smoke": {"file_name": "smoke.jsonl", **smoke}}),
    }
    launcher = Expression("" if deepspeed else " ".join(LAUNCHER))
    return run_of(job, "llama_factory", files, deepspeed=deepspeed, launcher=launcher)
