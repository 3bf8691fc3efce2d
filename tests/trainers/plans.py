"""Plans that the search itself finds: what every exporter has to write. Deterministic; made once per session."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache

from planner import library
from planner.cluster import Cluster
from planner.defaults import Request, resolve
from planner.hardware import load_hardware
from planner.layout import Recompute
from planner.plan_file import Plan, predict
from planner.search import Pins, search
from planner.trainer import load_trainer
from planner.trainers.bundle.target import ExportJob


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One search of the set."""

    model: str
    gpus: int
    trainer: str = "megatron"
    hardware: str = "h100-sxm"
    precision: str = "bf16"
    optimizer: str = "adam"
    sequence: int | None = None
    batch: int | None = None
    top: int = 4
    """Plans that are kept."""
    pins: tuple[tuple[str, int], ...] = ()
    """Fixed fields of the layout."""


ONE = (("micro_batch_size", 1),)
TP8 = (("tp", 8),)
TP1_ONE, TP2_ONE, TP8_ONE = ((("tp", tp), *ONE) for tp in (1, 2, 8))  # the largest searches, narrowed to be fast
FULL = (("recompute", int(Recompute.FULL)),)
WANTED: tuple[Wanted, ...] = (
    # Megatron, dense: 8 to 4096 GPUs, uneven pipelines (llama-405b has 126 layers), context parallelism, offload, fp8.
    Wanted(model="llama-3.1-8b", gpus=8, top=8),
    Wanted(model="llama-3.1-8b", gpus=64, sequence=131072, batch=64),
    Wanted(model="llama-3.1-8b", gpus=16, precision="fp8"),
    Wanted(model="llama-3.1-8b", gpus=32, optimizer="adam_bf16"),
    Wanted(model="llama-3.1-8b", gpus=32, optimizer="muon"),
    Wanted(model="llama-3.1-8b", gpus=8, precision="fp16", hardware="a100-sxm-80gb"),
    Wanted(model="llama-3.1-70b", gpus=8, top=6),
    Wanted(model="llama-3.1-70b", gpus=64, top=8),
    Wanted(model="llama-3.1-70b", gpus=64, hardware="b200-sxm", precision="mxfp8"),
    Wanted(model="llama-3.1-70b", gpus=128, precision="fp8_block"),
    Wanted(model="llama-3.1-70b", gpus=256, pins=FULL),
    Wanted(model="llama-3.1-70b", gpus=64, pins=(("pp", 8), ("first_stage_layers", 8), ("last_stage_layers", 6))),
    Wanted(model="llama-3.1-405b", gpus=1024, top=8, pins=(("pp", 16), *TP8_ONE)),
    Wanted(model="llama-3.1-405b", gpus=4096, pins=(("pp", 16), ("cp", 2), *TP8_ONE)),
    Wanted(
        model="llama-3.1-405b",
        gpus=2048,
        precision="fp8",
        sequence=131072,
        batch=256,
        pins=(("pp", 8), ("cp", 8), *TP8_ONE),
    ),
    Wanted(model="llama-3.1-405b", gpus=576, hardware="gb200-nvl72", precision="nvfp4", pins=TP8_ONE),
    Wanted(model="qwen2.5-7b", gpus=8),
    Wanted(model="qwen2.5-72b", gpus=128, pins=ONE),
    Wanted(model="qwen3-32b", gpus=64),
    Wanted(model="gpt3-175b", gpus=1024, hardware="a100-sxm-80gb", pins=(("pp", 8), *TP8)),
    Wanted(model="mt-nlg-530b", gpus=2240, hardware="a100-sxm-80gb", batch=1920, pins=(("pp", 35), *TP8_ONE)),
    Wanted(model="nemotron-4-340b", gpus=1024, pins=(("pp", 8), *TP8)),
    Wanted(model="mistral-large-123b", gpus=256, pins=TP8),
    Wanted(model="llama-3.1-70b", gpus=64, optimizer="sgd"),
    Wanted(model="llama-3.1-70b", gpus=96, batch=384),
    # Megatron, mixtures of experts.
    Wanted(model="mixtral-8x7b", gpus=64, top=8, pins=ONE),
    Wanted(model="mixtral-8x22b", gpus=128, pins=(("pp", 4), *TP2_ONE)),
    Wanted(model="qwen3-30b-a3b", gpus=32, top=6, pins=ONE),
    Wanted(model="qwen3-235b-a22b", gpus=256, top=8, pins=(("pp", 8), *TP2_ONE)),
    Wanted(model="qwen3-235b-a22b", gpus=256, precision="fp8_block", pins=(("pp", 4), *TP2_ONE)),
    Wanted(model="deepseek-v2-lite", gpus=16),
    Wanted(model="deepseek-v3", gpus=1024, top=6, pins=TP2_ONE),
    Wanted(model="deepseek-v3", gpus=2048, top=6, pins=TP1_ONE),
    Wanted(model="deepseek-v3", gpus=256, hardware="gb200-nvl72", precision="mxfp8", pins=TP1_ONE),
    Wanted(model="kimi-k2", gpus=2048, pins=TP2_ONE),
    Wanted(model="gpt-oss-20b", gpus=8),
    Wanted(model="gpt-oss-120b", gpus=64, pins=ONE),
    Wanted(model="glm-4.5-air", gpus=128, pins=TP2_ONE),
    # What the search can do and seldom finds: experts with tensor parallelism, other orders, no sharding, more vpp.
    Wanted(model="mixtral-8x7b", gpus=64, pins=(("tp", 4), ("etp", 4), *ONE)),
    Wanted(model="llama-3.1-70b", gpus=64, pins=(("order", 1), ("pp", 4), ("cp", 1), *TP8_ONE)),
    Wanted(model="llama-3.1-8b", gpus=8, pins=(("zero", 0), ("tp", 2))),
    Wanted(model="llama-3.1-70b", gpus=64, pins=(("vpp", 10), ("pp", 4), ("recompute", 2), ("recompute_layers", 10))),
    Wanted(model="llama-3.1-8b", gpus=32, sequence=32768, pins=(("cp", 4), ("cp_method", 1))),
    Wanted(model="llama-3.1-8b", gpus=32, sequence=32768, pins=(("cp", 4), ("cp_method", 2))),
    # AMD's GPUs, for Primus.
    Wanted(model="llama-3.1-8b", gpus=8, hardware="mi300x", top=6),
    Wanted(model="llama-3.1-70b", gpus=64, hardware="mi300x", pins=TP8_ONE),
    # NeMo's recipes: collectives during GEMMs, delayed scaling.
    Wanted(model="llama-3.1-70b", gpus=64, trainer="nemo", pins=TP8),
    Wanted(model="llama-3.1-8b", gpus=8, trainer="nemo", precision="fp8"),
    # Megatron-Bridge's performance recipes: gradients in bf16.
    Wanted(model="llama-3.1-70b", gpus=64, trainer="megatron-bridge", hardware="b200-sxm", precision="mxfp8"),
    Wanted(model="llama-3.1-8b", gpus=16, trainer="megatron-bridge", optimizer="adam_bf16"),
    # Gemma: norms after attention and MLP, softcaps, windows.
    Wanted(model="gemma-2-9b", gpus=16, trainer="megatron-bridge", top=2, pins=(("cp", 1), ("tp", 2), *ONE)),
    Wanted(model="gemma-3-27b", gpus=64, trainer="megatron-bridge", top=2, pins=(("tp", 4), ("pp", 2), *ONE)),
    # torchtitan: ZeRO 2 and 3, HSDP, pipelines with every schedule, all-gathered context.
    Wanted(model="llama-3.1-8b", gpus=8, trainer="torchtitan", top=8),
    Wanted(model="llama-3.1-8b", gpus=64, trainer="torchtitan", sequence=65536, batch=64),
    Wanted(model="llama-3.1-70b", gpus=256, trainer="torchtitan", top=8, pins=TP8),
    Wanted(model="llama-3.1-405b", gpus=512, trainer="torchtitan", top=6, pins=TP8),
    Wanted(model="llama-3.1-405b", gpus=2048, trainer="torchtitan", precision="fp8", pins=(("pp", 8), *TP8_ONE)),
    Wanted(model="qwen3-30b-a3b", gpus=64, trainer="torchtitan", pins=ONE),
    Wanted(model="deepseek-v3", gpus=1024, trainer="torchtitan", pins=(("tp", 8), ("pp", 8), ("micro_batch_size", 1))),
    Wanted(model="llama-3.1-8b", gpus=64, trainer="torchtitan", pins=(("dp_shard", 8), ("dp", 64))),
    Wanted(model="llama-3.1-70b", gpus=128, trainer="torchtitan", pins=(("schedule", 4), ("pp", 4), ("tp", 8))),
    # DeepSpeed and FSDP: no pipeline.
    Wanted(model="llama-3.1-8b", gpus=8, trainer="deepspeed", top=6),
    Wanted(model="llama-3.1-70b", gpus=64, trainer="deepspeed", top=6),
    Wanted(model="llama-3.1-70b", gpus=8, trainer="deepspeed"),
    Wanted(model="qwen2.5-7b", gpus=16, trainer="deepspeed", precision="fp16", hardware="a100-sxm-80gb"),
    Wanted(model="llama-3.1-8b", gpus=8, trainer="fsdp", top=6),
    Wanted(model="llama-3.1-70b", gpus=128, trainer="fsdp", top=6),
    Wanted(model="llama-3.1-8b", gpus=16, trainer="axolotl", sequence=131072, batch=16, pins=(("cp", 8), *ONE)),
    Wanted(model="mistral-7b", gpus=32, trainer="fsdp"),
    # nanotron, MaxText, AutoModel, InternEvo.
    Wanted(model="llama-3.1-8b", gpus=16, trainer="nanotron", top=6),
    Wanted(model="llama-3.1-70b", gpus=128, trainer="nanotron", top=6),
    Wanted(model="llama-3.1-8b", gpus=16, trainer="maxtext", top=4),
    Wanted(model="mixtral-8x7b", gpus=64, trainer="maxtext", top=4),
    Wanted(model="qwen3-30b-a3b", gpus=32, trainer="maxtext", top=4),
    Wanted(model="llama-3.1-70b", gpus=64, trainer="maxtext", top=4),
    Wanted(model="llama-3.1-70b", gpus=64, trainer="colossalai", top=6),
    Wanted(model="qwen2.5-7b", gpus=24, trainer="colossalai", batch=240),
    Wanted(model="mixtral-8x7b", gpus=64, trainer="colossalai", top=6),
    Wanted(model="qwen3-30b-a3b", gpus=32, trainer="automodel", pins=ONE),
    Wanted(model="qwen3-30b-a3b", gpus=32, trainer="megatron-fsdp", pins=ONE, top=2),
    Wanted(model="llama-2-7b", gpus=64, trainer="internevo"),
    # All sizes once more, small: the layouts that only small models reach.
    Wanted(model="llama-3.2-1b", gpus=8, top=6),
    Wanted(model="qwen3-0.6b", gpus=16, top=6),
    Wanted(model="gpt3-1.3b", gpus=64, hardware="a100-sxm-40gb"),
    Wanted(model="phi-4", gpus=48, batch=960),
)
WANTED += tuple(  # trainers that nothing above names: a new one is here by itself
    Wanted(model="llama-3.1-8b", gpus=8, trainer=name, precision=load_trainer(name).legal.precisions[0], top=2)
    for name in library.names("trainers")
    if name not in {one.trainer for one in WANTED}
)


EVEN = {
    "tp": 1, "pp": 1, "dp": 8, "cp": 1, "vpp": 1, "schedule": 1, "zero": 1, "recompute": 0, "recompute_modules": 0,
    "recompute_layers": 0, "first_stage_layers": 0, "last_stage_layers": 0, "micro_batch_size": 1, "sequence_parallel": 0,
}  # fmt: skip
"""A layout of 8 GPUs with nothing but data parallelism, to change one thing in."""


SOME = tuple(
    one
    for number, one in enumerate(WANTED)
    if number % 4 == 0 or one.trainer not in {before.trainer for before in WANTED[:number]}
)
"""A part with every trainer, for the quick tests; the proofs take them all."""


@cache
def jobs(wanted: tuple[Wanted, ...] = WANTED) -> tuple[ExportJob, ...]:
    """The plans of searches as export jobs, in their order; profiles are read once."""
    hardware, trainers = cache(load_hardware), cache(load_trainer)
    return tuple(
        ExportJob(
            plan=plan,
            cluster=Cluster(hardware=hardware(plan.hardware), num_gpus=plan.num_gpus),
            trainer=trainers(plan.trainer),
        )
        for one in wanted
        for plan in found(one)
    )


@cache
def found(wanted: Wanted) -> tuple[Plan, ...]:
    """The best plans of one search: those that fit, else those that miss by least."""
    request = Request(
        model=wanted.model, num_gpus=wanted.gpus, hardware=wanted.hardware, trainer=wanted.trainer,
        sequence_length=wanted.sequence, global_batch_size=wanted.batch, precision=wanted.precision,
        optimizer=wanted.optimizer,
    )  # fmt: skip
    resolved = resolve(request)
    job = resolved.job
    finding = search(job, Pins(values=dict(wanted.pins)), wanted.top)
    assert finding.layouts, f"{wanted} finds nothing"
    return tuple(
        Plan(
            workload=job.workload, hardware=resolved.hardware, num_gpus=wanted.gpus, trainer=resolved.trainer,
            layout=layout, prediction=predict(estimate, job, resolved.kind), assumptions=resolved.assumptions, why="found",
        )
        for layout, estimate in zip(finding.layouts, finding.estimates, strict=True)
    )  # fmt: skip


def changed(plan: Plan, **fields: int) -> Plan:
    """A plan with fields of its layout changed, legal or not."""
    return dataclasses.replace(plan, layout=plan.layout.replace(**fields))


__all__ = ["EVEN", "WANTED", "Wanted", "changed", "found", "jobs"]
