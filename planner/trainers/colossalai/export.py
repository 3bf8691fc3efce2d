"""Colossal-AI: arguments of HybridParallelPlugin or, with experts, MoeHybridParallelPlugin, and a script around them."""

from planner.trainers.bundle.model_config import family, model_config
from planner.trainers.bundle.quoting import filled_yaml, json_text, refused, run_of, template
from planner.trainers.bundle.target import ExportJob, Rendered, unknown_choices

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "gpt2", "opt")
"""Families with a policy for causal language models [shardformer/policies/auto_policy.py] that transformers itself defines."""
ROWS = 64
"""make_vocab_size_divisible_by."""


def refusals(job: ExportJob) -> list[str]:
    """What the plugins refuse, run into, or change without saying so, with their rule."""
    unknown = unknown_choices(job, "Colossal-AI", ("adam", "sgd"), ("bf16", "fp16", "fp32"))
    return unknown + refused(job, "colossalai", family=family(job.model), families=FAMILIES)


def render(job: ExportJob) -> Rendered:
    """plan.json with every argument that the plan decides or whose default would change it, model/config.json, train.py."""
    rows = ROWS * job.layout.tp
    files = {
        "plan.json": json_text(filled_yaml(job, "colossalai", "plan.txt", rows=ROWS)),
        "model/config.json": json_text(model_config(job.model)), "train.py": template("colossalai", "colossalai_train.txt"),
    }  # fmt: skip
    return run_of(job, "colossalai", files, {"vocab_rows": -(-job.model.vocab_size // rows) * rows})
