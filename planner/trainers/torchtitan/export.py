"""torchtitan: a Python module with one function per run, and the command line that starts it."""

from planner.layout import Module, Schedule
from planner.model import ModelSpec
from planner.trainers.bundle.fully_shard import beyond_llama, shared_refusals
from planner.trainers.bundle.quoting import Expression
from planner.trainers.bundle.run_file import run_of
from planner.trainers.bundle.target import ExportJob, Rendered, unknown_choices, unknown_modules
from planner.trainers.torchtitan.config_module import CONVERTERS, config_module

OPTIMIZERS = ("adam",)
MASK_BLOCK = 128
"""Tokens of a block of FlexAttention's mask (_DEFAULT_SPARSE_BLOCK_SIZE of torch), which context-parallel ranks share out whole."""


def refusals(job: ExportJob) -> list[str]:
    """What torchtitan 0.3 cannot run, with its rule."""
    return [*_model_refusals(job.model), *_layout_refusals(job), *_batch_refusals(job)]


def _model_refusals(model: ModelSpec) -> list[str]:
    """Its decoder layers: RMS norms, rotary positions, SwiGLU, no biases; GQA or MLA; experts with or without shared ones."""
    found = beyond_llama(model, biases=model.linear_bias or model.qkv_bias or model.expert_bias or model.router_bias,
                         query_and_key_norms_with_MLA=model.qk_norm and model.is_mla)  # fmt: skip
    if not found:
        return []
    return [
        f"{model.name} has {', '.join(found)}, and the decoder layers that this export builds from torchtitan.models.common "
        "have RMS norms, rotary positions, SwiGLU and no biases; write its model module, or plan for another trainer"
    ]


def _layout_refusals(job: ExportJob) -> list[str]:
    layout, model, found = job.layout, job.model, []
    tp, cp, shard = layout.tp, layout.cp, job.shard
    if layout.pp > 1 and model.tied_embeddings:
        found.append(
            f"{model.name} ties its embeddings, and with pp {layout.pp} they lie on two stages: weight tying is not "
            "supported with pipeline parallelism [Decoder.Config.update_from_config]; use pp 1"
        )
    if tp > 1 and not model.is_mla and model.num_kv_heads % tp:
        found.append(
            f"tp {tp} must divide the {model.num_kv_heads} key-value heads [Decoder.Config.update_from_config]; use a divisor"
        )
    if model.is_moe and layout.ep == 1 and tp > 1:
        found.append(
            f"ep 1 with tp {tp} splits every expert over tp [moe_sharding.expert_param_placement_dense], which the plan did "
            "not price (etp 1); use ep > 1 or tp 1"
        )
    if model.is_moe and shard * cp * tp % layout.ep:
        found.append(
            f"ep {layout.ep} must divide dp_shard {shard} x cp {cp} x tp {tp} = {shard * cp * tp}, whose ranks it borrows "
            "[ParallelDims]; choose a larger dp_shard"
        )
    return [*found, *_sequence_refusals(job), *shared_refusals(job)]


def _sequence_refusals(job: ExportJob) -> list[str]:
    """Parts of the sequence: blocks of FlexAttention's mask over cp, and both halves of a rank's chunks over tp."""
    tp, cp, length = job.layout.tp, job.layout.cp, job.workload.sequence_length
    found = []
    if cp > 1 and length % (MASK_BLOCK * cp):
        found.append(
            f"{length} tokens are not a multiple of cp {cp} x {MASK_BLOCK}, the blocks that FlexAttention's mask is shared out in "
            f"[torch.distributed.tensor, _create_cp_block_mask]; use {-(-length // (MASK_BLOCK * cp)) * MASK_BLOCK * cp} tokens, "
            "or a smaller cp"
        )
    split = tp if job.layout.sequence_parallel else 1
    if cp > 1 and length % (2 * cp * split):
        found.append(
            f"{length} tokens are not a multiple of 2 x cp {cp} x tp {split} [Trainer.__init__]; use a multiple of {2 * cp * split}"
        )
    return found


def _batch_refusals(job: ExportJob) -> list[str]:
    layout, work = job.layout, job.workload
    found = unknown_choices(job, "torchtitan", OPTIMIZERS, ("bf16", "fp32", *CONVERTERS))
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
