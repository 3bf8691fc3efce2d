"""torchtitan: a Python module with one function per run, and the command line that starts it."""

from planner.layout import Module, Schedule
from planner.trainers.bundle.fully_shard import beyond_llama, shared_refusals
from planner.trainers.bundle.quoting import Expression, refused
from planner.trainers.bundle.run_file import run_of
from planner.trainers.bundle.target import ExportJob, Rendered, unknown_choices, unknown_modules
from planner.trainers.torchtitan.config_module import CONVERTERS, config_module

OPTIMIZERS = ("adam",)
MASK_BLOCK = 128
"""Tokens of a block of FlexAttention's mask (_DEFAULT_SPARSE_BLOCK_SIZE of torch), which context-parallel ranks share out whole."""


def refusals(job: ExportJob) -> list[str]:
    """What torchtitan 0.3 cannot run, with its rule."""
    m, layout, work = job.model, job.layout, job.workload
    beyond = beyond_llama(m, biases=m.linear_bias or m.qkv_bias or m.expert_bias or m.router_bias,
                          query_and_key_norms_with_MLA=m.qk_norm and m.is_mla)  # fmt: skip
    found = refused(
        job, "torchtitan", beyond=beyond, length=work.sequence_length, mask_block=MASK_BLOCK,
        split=layout.tp if layout.sequence_parallel else 1,
    )  # fmt: skip
    found += shared_refusals(job) + unknown_choices(job, "torchtitan", OPTIMIZERS, ("bf16", "fp32", *CONVERTERS))
    found += unknown_modules(job, "torchtitan", Module.EVERY_SECOND_MATMUL)
    if work.lora_rank:
        found.append(f"lora_rank {work.lora_rank}: the plan trains adapters, and this export trains every weight")
    rounds = max(1, layout.num_microbatches // layout.pp)
    if layout.schedule == Schedule.INTERLEAVED and layout.num_microbatches % rounds:
        found.append(
            f"{layout.num_microbatches} microbatches over pp {layout.pp} make {rounds} rounds, which must divide them "
            "[ScheduleInterleaved1F1B]; use a multiple of pp"
        )
    return found


def render(job: ExportJob) -> Rendered:
    """``plan_config.py`` with the functions ``plan`` and ``smoke``."""
    precision = job.workload.precision
    note = "0.3 scales fp8 by row, not by tensor as the plan was priced; steps take a little longer."
    extra = Expression(" torchao" if precision in CONVERTERS else "")
    files = {"plan_config.py": config_module(job)}
    return run_of(job, "torchtitan", files, {"notes": (note,) if precision == "fp8" else ()}, extra=extra)
