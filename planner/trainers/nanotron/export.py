"""nanotron: its YAML file, read by run_train.py of the repository."""

from typing import Any

from planner import library
from planner.layout import Schedule
from planner.trainers.bundle.fully_shard import beyond_llama
from planner.trainers.bundle.quoting import filled_yaml, refused, run_of
from planner.trainers.bundle.target import ExportJob, Rendered, unknown_choices

ENGINES = {Schedule.GPIPE: "afab", Schedule.ONE_F_ONE_B: "1f1b"}
DTYPES = {"bf16": "bfloat16", "bf16_true": "bfloat16", "fp16": "float16", "fp32": "float32"}
FACTORIES: dict[str, dict[str, Any]] = {
    "adam": {"name": "adamW", "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "torch_adam_is_fused": True},
    "sgd": {"name": "sgd"},
}
"""optimizer_factory, by optimizer."""


def refusals(job: ExportJob) -> list[str]:
    """What nanotron cannot run, with its rule."""
    model = job.model
    beyond = beyond_llama(model, experts=model.is_moe, MLA=model.is_mla, query_and_key_norms=model.qk_norm)
    if model.head_dim * model.num_heads != model.hidden_size:
        beyond.append(f"heads of {model.head_dim}")
    return unknown_choices(job, "nanotron", FACTORIES, DTYPES) + refused(job, "nanotron", beyond=beyond)


def config(job: ExportJob, *, smoke: bool = False) -> dict[str, Any]:
    """The YAML file; the smoke run has no data set, so nanotron makes data up."""
    work = job.workload
    return filled_yaml(
        job, "nanotron", "nanotron.txt", engine=ENGINES[Schedule(job.layout.schedule)], dtype=DTYPES[work.precision],
        factory=FACTORIES[work.optimizer], smoke=smoke,
    )  # fmt: skip


def render(job: ExportJob) -> Rendered:
    """nanotron.yaml and smoke.yaml."""
    files = {
        name: library.dump_yaml(config(job, smoke=name == "smoke.yaml")) for name in ("nanotron.yaml", "smoke.yaml")
    }
    return run_of(job, "nanotron", files)
