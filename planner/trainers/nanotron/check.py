"""nanotron's own reader of configurations on an exported folder."""

import os

from planner.trainers.checking import Checked, Request
from planner.trainers.checking.import_standins import hide, settle_torch, stand_in

NEEDED = ("torch", "nanotron", "dacite")
KERNELS = ("flash_attn", "grouped_gemm", "triton", "flash_attn_cuda", "functorch", "apex", "torchtyping", "lighteval",
           "ring_flash_attn")  # fmt: skip
"""What its modules import and a machine without a GPU does not have."""
CIRCULAR = "nanotron.logging"
"""It imports the configuration, which imports it: whichever of the two the published 0.4 starts with fails. Only loggers."""


def prepare() -> None:
    """Once, before the first folder."""
    settle_torch()
    stand_in(*KERNELS)
    hide(CIRCULAR)


def one(asked: Request, answer: Checked) -> None:
    """How far the trainer goes with one folder."""
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
