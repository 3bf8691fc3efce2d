"""Lightning: a Trainer with ModelParallelStrategy; model, sharding and data are those of the script without a framework."""

from planner.trainers.bundle.quoting import json_text, refused, run_of, template
from planner.trainers.bundle.target import ExportJob, Rendered
from planner.trainers.pytorch import export as pytorch


def refusals(job: ExportJob) -> list[str]:
    """What the script has not, and what ModelParallelStrategy's mesh of two axes cannot say."""
    own = [one.replace("the export to PyTorch", "the export to Lightning") for one in pytorch.refusals(job)]
    return own + refused(job, "lightning")


def render(job: ExportJob) -> Rendered:
    """lightning_train.py around train.py, and plan.json."""
    files = {
        "lightning_train.py": template("lightning", "lightning_train.txt"),
        "train.py": template("pytorch", "pytorch_train.txt"), "plan.json": json_text(pytorch.settings(job), indent=1),
    }  # fmt: skip
    return run_of(job, "lightning", files)
