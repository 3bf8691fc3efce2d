"""Colossal-AI: arguments of HybridParallelPlugin or, with experts, MoeHybridParallelPlugin, and a script around them."""

from typing import Any

from planner.layout import Order, Recompute, Schedule
from planner.trainers.bundle.model_config import config_text, family
from planner.trainers.bundle.quoting import filled, filled_yaml, json_text
from planner.trainers.bundle.run_file import run_of
from planner.trainers.bundle.target import ExportJob, Rendered, unknown_choices

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "gpt2", "opt")
"""Families with a policy for causal language models [shardformer/policies/auto_policy.py] that transformers itself defines."""
STYLES: dict[int, str] = {Schedule.ONE_F_ONE_B: "1f1b", Schedule.INTERLEAVED: "interleaved"}
OPTIMIZERS = ("adam", "sgd")
PRECISIONS = ("bf16", "fp16", "fp32")
ROWS = 64
"""make_vocab_size_divisible_by."""


def refusals(job: ExportJob) -> list[str]:
    """What the plugins refuse, run into, or change without saying so, with their rule."""
    return [*_degree_refusals(job), *_training_refusals(job)]


def _degree_refusals(job: ExportJob) -> list[str]:
    layout, model, found = job.layout, job.model, []
    tp, cp, pp, kv = layout.tp, layout.cp, layout.pp, job.model.num_kv_heads
    if layout.zero > (1 if pp > 1 or model.is_moe else 2):
        rule = (
            "zero stage must be 0 or 1 with a pipeline"
            if pp > 1
            else "the MoE plugin turns 2 into 1"
            if model.is_moe
            else "0, 1 or 2"
        )
        found.append(f"zero {layout.zero} with pp {pp}: {rule} [hybrid_parallel_plugin.py]; use zero 1")
    if cp > 1 and tp > 1:
        found.append(
            f"cp {cp} with tp {tp}: the mesh is (dp, pp, tp, sp), sequence ranks are next to each other and tensor ranks apart, "
            "which is not what was priced; use one of them"
        )
    if cp > 1 and layout.sequence_parallel:
        found.append(
            "cp with sequence_parallel: one sequence_parallelism_mode at a time (all_to_all or split_gather); use tp 1"
        )
    if tp > 1 and kv % tp:
        found.append(
            f"tp {tp}: the policies assert that the {kv} key-value heads divide by it [policies/llama.py]; choose a divisor"
        )
    if cp > 1 and (model.num_heads % cp or kv % cp):
        found.append(
            f"cp {cp}: all_to_all deals {model.num_heads} heads and {kv} key-value heads to the ranks; choose a common divisor"
        )
    if model.is_moe and pp > 1 and (cp > 1 or layout.sequence_parallel):
        found.append(
            "experts with pp and sequence parallelism: not implemented [policies/mixtral.py]; use pp 1 or tp 1"
        )
    if layout.order == Order.TP_CP_DP_PP_EP:
        found.append(
            "rank order tp-cp-dp-pp-ep: experts lie next to tp in the mesh of the plugin; price with --order tp-cp-ep-dp-pp"
        )
    if layout.dp_shard not in (0, layout.dp):
        found.append(f"dp_shard {layout.dp_shard}: ZeRO shards over all {layout.dp} ranks; use 0")
    if family(model) not in FAMILIES:
        found.append(f"{model.name}: no policy of Shardformer for its layers; there are some for {', '.join(FAMILIES)}")
    return found


def _training_refusals(job: ExportJob) -> list[str]:
    layout, work, found = job.layout, job.workload, unknown_choices(job, "Colossal-AI", OPTIMIZERS, PRECISIONS)
    pp, microbatches = layout.pp, layout.num_microbatches
    if pp > 1 and layout.schedule not in STYLES:
        found.append(
            "the schedule is none of pp_style 1f1b and interleaved (zbv needs a table of its own); use one of them"
        )
    if layout.schedule == Schedule.INTERLEAVED and microbatches % pp:
        found.append(
            f"{microbatches} microbatches on {pp} stages: the interleaved schedule asserts that they divide [interleaved_pp.py]; "
            f"the nearest is {max(1, round(microbatches / pp)) * pp}"
        )
    if layout.recompute == Recompute.SELECTIVE or layout.recompute_layers:
        found.append(
            "recompute of modules or of a part of the layers: exported is gradient checkpointing of all layers; use full or none"
        )
    if layout.offload_optimizer or layout.offload_activations:
        found.append("offload: cpu_offload keeps all states on the host, which was not priced; plan without offload")
    if work.lora_rank:
        found.append(f"lora_rank {work.lora_rank}: the plugin's LoRA is not exported; plan without --lora-rank")
    return found


def plugin(job: ExportJob) -> dict[str, Any]:
    """Arguments of the plugin, every one that the plan decides and those whose defaults would change it."""
    layout, piped, moe = job.layout, job.layout.pp > 1, job.model.is_moe
    stages = [len(layers) for _, _, layers in job.virtual_stages()]
    mode = "all_to_all" if layout.cp > 1 else "split_gather" if layout.sequence_parallel else None
    found: dict[str, Any] = filled_yaml(
        job, "colossalai", "plugin.txt", split=mode is not None, mode=mode, style=STYLES.get(layout.schedule, "1f1b"),
        microbatches=layout.num_microbatches if piped else None, chunks=len(stages) // layout.pp,
        stages=stages if piped else None, overlap=layout.zero > 0 and not moe, rows=ROWS,
        sends="pipeline" in job.trainer.traffic.overlap,
    )  # fmt: skip
    outside = layout.order == Order.TP_CP_EP_PP_DP
    return found | ({"ep_size": layout.ep, "moe_dp_outside": outside} if moe else {"dp_outside": outside})


def render(job: ExportJob) -> Rendered:
    """plan.json with the arguments, model/config.json with the sizes, train.py."""
    layout, work = job.layout, job.workload
    settings = {
        "plugin": plugin(job), "moe": job.model.is_moe, "micro_batch_size": layout.micro_batch_size,
        "num_microbatches": layout.num_microbatches, "sequence_length": work.sequence_length,
        "recompute": layout.recompute == Recompute.FULL, "optimizer": work.optimizer,
    }  # fmt: skip
    rows = ROWS * layout.tp
    files = {
        "plan.json": json_text(settings), "model/config.json": config_text(job.model) or "",
        "train.py": filled("colossalai", "colossalai_train.txt"),
    }  # fmt: skip
    return run_of(job, "colossalai", files, {"vocab_rows": -(-job.model.vocab_size // rows) * rows})
