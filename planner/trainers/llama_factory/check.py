"""LLaMA-Factory's own argument parser on an exported folder, with the checks of the library below it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking import Checked
from planner.trainers.checking.child import Answer, Request, ask, request, serve
from planner.trainers.checking.import_standins import pretend_ranks


def check(job: ExportJob, folder: Path) -> Checked:
    """How far LLaMA-Factory goes with one folder."""
    return check_many([(job, folder)])[0]


def check_many(pairs: Sequence[tuple[ExportJob, Path]]) -> list[Checked]:
    """The same for many."""
    requests = [request(job, folder, batch=job.workload.global_batch_size) for job, folder in pairs]
    needed = ("torch", "transformers", "llamafactory", "omegaconf", "peft")
    return ask(
        "llama-factory", "planner.trainers.llama_factory.check", needed, requests, {"DISABLE_VERSION_CHECK": "1"}
    )


def _one(asked: Request, answer: Answer) -> None:
    """The parser builds transformers' arguments, which join the (pretended) ranks; precision needs a GPU and is left out."""
    os.chdir(asked["folder"])
    os.environ.update(
        FORCE_TORCHRUN="1",
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE=str(asked["world"]),
        MASTER_ADDR="localhost",
        MASTER_PORT="0",
    )
    pretend_ranks(0, asked["world"])
    from llamafactory.hparams.parser import _parse_train_args
    from omegaconf import OmegaConf

    words = OmegaConf.from_cli(["model_name_or_path=model", "dataset=smoke", "max_steps=3", "use_cpu=true"])
    data = OmegaConf.to_container(OmegaConf.merge(OmegaConf.load("llama_factory.yaml"), words))
    precision = {name: data.pop(name) for name in ("bf16", "fp16", "deepspeed") if name in data}
    model, texts, training, tuning, _ = _parse_train_args({**data, "bf16": False, "fp16": False})
    answer.reached("parsed")
    layout = asked["layout"]
    batch = training.per_device_train_batch_size * training.gradient_accumulation_steps * layout["dp"]
    answer.same("global batch", batch, asked["batch"])
    answer.same("one precision at most", precision.get("bf16", False) and precision.get("fp16", False), False)
    answer.same("packed text", (texts.packing, tuning.stage), (True, "pt"))
    if "deepspeed" in precision:
        answer.same("recompute", not model.disable_gradient_checkpointing, layout["recompute"] == 2)
        answer.same("DeepSpeed's file", Path(precision["deepspeed"]).is_file(), True)


if __name__ == "__main__":
    serve(_one)
