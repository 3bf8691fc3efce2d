"""torchtune: one YAML file for a published recipe, every dimension of the model written out."""

from planner import library
from planner.layout import Module
from planner.model import ModelSpec
from planner.trainers.bundle.launchers import torchrun
from planner.trainers.bundle.model_config import family
from planner.trainers.bundle.quoting import Expression, filled_yaml, refused, run_of
from planner.trainers.bundle.target import ExportJob, Rendered, unknown_choices, unknown_modules
from planner.trainers.transformers.training_run import smoke_data

OPTIMIZERS = {"adam": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}
BUILDERS = {"llama": "llama3", "mistral": "mistral", "qwen2": "qwen2"}
"""Package of torchtune.models with a builder of any size, by family."""
MODEL_TYPES = {"llama3": "LLAMA3", "llama3_1": "LLAMA3", "llama3_2": "LLAMA3_2", "mistral": "MISTRAL", "qwen2": "QWEN2"}
"""How the checkpointer names weights, by package."""
LARGE_VOCABULARY = 100_000
"""Llama's tokenizers from 3 on have more entries, those before fewer."""


def builder(model: ModelSpec) -> str:
    """The package whose builder makes exactly this model; empty = none."""
    found = BUILDERS.get(family(model) or "", "")
    scaling = model.constants.rope_scaling if model.constants else None
    if found == "llama3" and model.tied_embeddings:
        return "llama3_2" if scaling is None or scaling.kind == "llama3" else ""
    if found == "llama3" and scaling is not None:
        return "llama3_1" if scaling.kind == "llama3" else ""
    return found if found == "qwen2" or not model.tied_embeddings else ""


def recipe(job: ExportJob) -> str:
    """Name after ``tune run``."""
    kind = "lora" if job.workload.lora_rank else "full"
    return f"{kind}_finetune_{'single_device' if job.cluster.num_gpus == 1 else 'distributed'}"


def refusals(job: ExportJob) -> list[str]:
    """What torchtune cannot run, with its rule."""
    found = unknown_choices(job, "torchtune", OPTIMIZERS, ("bf16_true", "fp32"))
    found = [one for one in found if not one.startswith("frozen_weights nf4_dq")]  # quantize_base
    found += unknown_modules(job, "torchtune", Module(0))
    return found + refused(job, "torchtune", builder=builder(job.model), builders=sorted(set(BUILDERS)))


def render(job: ExportJob) -> Rendered:
    """torchtune.yaml and data for the smoke run."""
    package, alone = builder(job.model), job.cluster.num_gpus == 1
    config = filled_yaml(
        job, "torchtune", "torchtune.txt", package=package, model_type=MODEL_TYPES[package], alone=alone,
        optimizer=OPTIMIZERS[job.workload.optimizer], tokenizer=_tokenizer(job.model, package),
    )  # fmt: skip
    launcher = "" if alone else " ".join(torchrun(job)[1:])
    files = {"torchtune.yaml": library.dump_yaml(config), "make_smoke_data.py": smoke_data(job)}
    return run_of(job, "torchtune", files, recipe=Expression(recipe(job)), launcher=Expression(launcher), package=package)


def _tokenizer(model: ModelSpec, package: str) -> str:
    if package.startswith("llama3"):
        return "llama3.llama3_tokenizer" if model.vocab_size > LARGE_VOCABULARY else "llama2.llama2_tokenizer"
    return f"{package}.{package}_tokenizer"
