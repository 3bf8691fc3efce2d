"""NeMo AutoModel: a YAML recipe for a run and one for a smoke run, and the model as config.json."""

from planner import library
from planner.layout import Module, Schedule
from planner.trainers.bundle.fully_shard import SCHEDULES, shared_refusals
from planner.trainers.bundle.model_config import config_file, family
from planner.trainers.bundle.quoting import filled_yaml, refused, run_of
from planner.trainers.bundle.target import ExportJob, Rendered, unknown_choices, unknown_modules

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe")
"""Families whose models are its own (registry.py: MODEL_ARCH_MAPPING): they take the back ends that are written."""
PRECISIONS = ("bf16", "bf16_true", "fp32", "fp8", "fp8_row")
DISPATCHERS = {"deepep": "deepep", "deduplicated": "hybridep"}
"""BackendConfig.dispatcher, by how the plan's experts are reached."""


def refusals(job: ExportJob) -> list[str]:
    """What AutoModel cannot run, with its rule."""
    found = unknown_choices(job, "NeMo AutoModel", ("adam",), PRECISIONS) + shared_refusals(job)
    found += unknown_modules(job, "NeMo AutoModel", Module.EVERY_SECOND_MATMUL)
    return found + refused(job, "automodel", family=family(job.model), families=FAMILIES, dispatchers=DISPATCHERS)


def _parts(job: ExportJob) -> list[list[str]]:
    """Modules of every virtual stage, in the order of the data; all have the rotary embedding."""
    parts = [[f"model.layers.{i}" for i in layers] for _, _, layers in job.virtual_stages()]
    parts[0].insert(0, "model.embed_tokens")
    parts[-1] += ["model.norm", "lm_head"]
    return [[*part, "model.rotary_emb"] for part in parts]


def render(job: ExportJob) -> Rendered:
    """automodel.yaml, automodel-smoke.yaml, model/config.json."""
    files = {"model/config.json": config_file(job)}
    for name, smoke in (("automodel.yaml", False), ("automodel-smoke.yaml", True)):
        config = filled_yaml(
            job, "automodel", "automodel.txt", smoke=smoke, schedule_name=SCHEDULES[Schedule(job.layout.schedule)],
            parts=_parts(job), dispatcher=DISPATCHERS.get(job.trainer.kernels.expert_dispatch),
        )  # fmt: skip
        files[name] = library.dump_yaml(config)
    return run_of(job, "automodel", files)
