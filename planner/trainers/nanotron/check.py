"""nanotron's own reader of configurations on an exported folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking import Checked
from planner.trainers.checking.child import Answer, Request, ask, request, serve
from planner.trainers.checking.import_standins import hide, settle_torch, stand_in

KERNELS = ("flash_attn", "grouped_gemm", "triton", "flash_attn_cuda", "functorch", "apex", "torchtyping", "lighteval",
           "ring_flash_attn")  # fmt: skip
"""What its modules import and a machine without a GPU does not have."""
CIRCULAR = "nanotron.logging"
"""It imports the configuration, which imports it: whichever of the two the published 0.4 starts with fails. Only loggers."""


def check(job: ExportJob, folder: Path) -> Checked:
    """How far nanotron goes with one folder."""
    return check_many([(job, folder)])[0]


def check_many(pairs: Sequence[tuple[ExportJob, Path]]) -> list[Checked]:
    """The same for many."""
    requests = [request(job, folder, batch=job.workload.global_batch_size) for job, folder in pairs]
    return ask("nanotron", "planner.trainers.nanotron.check", ("torch", "nanotron", "dacite"), requests)


def _one(asked: Request, answer: Answer) -> None:
    from nanotron.config import get_config_from_file

    os.chdir(asked["folder"])
    get_config_from_file("smoke.yaml")
    config = get_config_from_file("nanotron.yaml")
    answer.reached("parsed")
    layout, parallel = asked["layout"], config.parallelism
    answer.same("GPUs", parallel.tp * parallel.pp * parallel.dp, asked["world"])
    answer.same("global batch", config.global_batch_size, asked["batch"])
    answer.same("sequence parallel", parallel.tp_mode.name == "REDUCE_SCATTER", bool(layout["sequence_parallel"]))
    answer.same("zero stage", config.optimizer.zero_stage, layout["zero"])
    answer.same("recompute", parallel.recompute_layer, layout["recompute"] == 2)
    answer.reached("validated")


if __name__ == "__main__":
    settle_torch()
    stand_in(*KERNELS)
    hide(CIRCULAR)
    serve(_one)
