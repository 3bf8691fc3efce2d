"""For every rule a layout that breaks it alone, and the words of its sentence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from samples import TRAINERS, job

from planner.layout import CpMethod, Layout, Module, Recompute, Schedule
from planner.rules import Job
from planner.trainer import load_trainer


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A layout of 8 GPUs (dp 8, 4 microbatches, changed as said) that breaks exactly one rule."""

    rule: str
    layout: dict[str, int]
    says: tuple[str, ...]
    job: dict[str, Any] = field(default_factory=dict)


SP = {"sequence_parallel": 1}
PIPE = {"pp": 4, "dp": 2, "num_microbatches": 16}
CASES = [
    Broken(
        rule="weights in 8 bits",
        layout={"dp": 8, "num_microbatches": 4, "zero": 0},
        job={"trainer": load_trainer("megatron+fp8_param_gather=on"), "precision": "fp8"},
        says=("fp8_param_gather with zero 0 in fp8", "zero 1", "--option fp8_param_gather=off"),
    ),
    Broken(
        rule="GPUs", layout={"dp": 4, "num_microbatches": 8}, says=("dp 4", "= 4 GPUs", "job has 8", "product is 8")
    ),
    Broken(
        rule="trainer degrees",
        layout={"tp": 2, "dp": 4, "num_microbatches": 8},
        job={"trainer": "fsdp"},
        says=("trainer fsdp", "tp 2", "no tensor parallelism", "set it to 1"),
    ),
    Broken(
        rule="trainer degrees",
        layout=PIPE,
        job={"trainer": TRAINERS["megatron"].replace(schedules=())},
        says=("no pipeline parallelism", "another trainer"),
    ),
    Broken(
        rule="heads",
        layout={"tp": 3, "dp": 1, "num_microbatches": 32} | SP,
        job={"gpus": 3, "model_name": "mla", "sequence": 4098},
        says=("tp 3", "16 attention heads", "tp may be 1, 2, 4, 8, 16"),
    ),
    Broken(
        rule="key-value heads",
        layout={"tp": 8, "dp": 1, "num_microbatches": 32} | SP,
        job={"trainer": "torchtitan"},
        says=("tp 8", "4 key-value heads", "must divide 4"),
    ),
    Broken(
        rule="linear attention",
        layout={"cp": 2, "dp": 4, "num_microbatches": 8},
        job={"trainer": TRAINERS["megatron"].replace(allows=("tp_with_cp",)), "model_name": "hybrid"},
        says=("megatron has no context parallelism for layers with linear attention", "set cp to 1"),
    ),
    Broken(
        rule="linear attention",
        layout={"tp": 4, "dp": 2, "num_microbatches": 16} | SP,
        job={"model_name": "hybrid"},
        says=("tp 4 must divide the 2 key heads", "tp x cp 4 the 8 value heads", "smaller degrees"),
    ),
    Broken(
        rule="layers",
        layout={"pp": 3, "dp": 1, "num_microbatches": 32},
        job={"gpus": 3},
        says=("8 layers", "3 pipeline stages", "choose pp from 1, 2, 4, 8", "first and last stage layers"),
    ),
    Broken(
        rule="layers",
        layout=PIPE | {"first_stage_layers": 7},
        says=("first_stage_layers 7", "so that the rest divides"),
    ),
    Broken(
        rule="layers", layout=PIPE | {"first_stage_layers": 2}, job={"trainer": "nanotron"}, says=("trainer nanotron",)
    ),
    Broken(
        rule="virtual stages",
        layout=PIPE | {"vpp": 4, "schedule": Schedule.INTERLEAVED},
        says=("vpp 4", "4 stages", "8 layers", "same number"),
    ),
    Broken(rule="schedule", layout=PIPE | {"vpp": 2}, says=("schedule 1f1b", "vpp 2", "needs pp > 1 and vpp > 1")),
    Broken(
        rule="schedule",
        layout=PIPE | {"schedule": Schedule.ZB_H1},
        says=("schedule zb_h1", "knows 1f1b, interleaved_1f1b"),
    ),
    Broken(
        rule="microbatches",
        layout={"pp": 4, "dp": 2, "num_microbatches": 18, "vpp": 2, "schedule": Schedule.INTERLEAVED},
        job={"batch": 36},
        says=("18 microbatches", "pp 4", "multiple of pp", "change micro_batch_size"),
    ),
    Broken(
        rule="microbatches",
        layout={"pp": 4, "dp": 2, "num_microbatches": 9, "vpp": 2, "schedule": Schedule.INTERLEAVED},
        job={"batch": 18, "trainer": "torchtitan"},
        says=("9 microbatches",),
    ),
    Broken(
        rule="microbatches",
        layout={"pp": 4, "dp": 2, "num_microbatches": 4, "vpp": 2, "schedule": Schedule.DUALPIPE_V, "zero": 2},
        job={"batch": 8, "trainer": "torchtitan"},
        says=("dualpipe_v", "at least 2 pp"),
    ),
    Broken(
        rule="batch",
        layout={"micro_batch_size": 3},
        says=(
            "micro_batch_size 3 x 4 microbatches x dp 8 = 96 sequences",
            "batch is 32",
            "multiple of 24",
            "nearest is 24",
        ),
    ),
    Broken(
        rule="context parallel",
        layout={"cp": 2, "dp": 4, "num_microbatches": 8},
        job={"trainer": "torchtitan"},
        says=("cp 2 with method ring", "knows allgather"),
    ),
    Broken(
        rule="context parallel",
        layout={"cp": 8, "dp": 1, "tp": 4, "num_microbatches": 32, "cp_method": CpMethod.A2A} | SP,
        job={"gpus": 32},
        says=("cp 8 with method a2a", "divide the 4 heads"),
    ),
    Broken(
        rule="sequence",
        layout={"cp": 4, "dp": 2, "num_microbatches": 16},
        job={"sequence": 4100},
        says=("4100 tokens", "2 x cp 4", "choose a length"),
    ),
    Broken(
        rule="sequence", layout={"tp": 8, "dp": 1, "num_microbatches": 32} | SP, job={"sequence": 4100}, says=("tp 8",)
    ),
    Broken(
        rule="context parallel kernels",
        layout={"cp": 2, "dp": 4, "num_microbatches": 8},
        job={"model_name": "window"},
        says=("cp 2 with method ring", "sliding windows with a2a or allgather only"),
    ),
    Broken(
        rule="context parallel kernels",
        layout={"cp": 2, "dp": 4, "num_microbatches": 8, "cp_method": CpMethod.ALLGATHER},
        job={"model_name": "mla"},
        says=("MLA as a ring only",),
    ),
    Broken(
        rule="low precision",
        layout={},
        job={"sequence": 4100, "precision": "fp8"},
        says=("fp8 needs hidden size", "multiples of 16", "or bf16"),
    ),
    Broken(
        rule="host optimizer",
        layout={"zero": 0, "offload_optimizer": 50},
        says=("offload_optimizer 50 and zero 0", "use zero 1"),
    ),
    Broken(
        rule="offload",
        job={"precision": "fp16"},
        layout={"zero": 1, "offload_optimizer": 50},
        says=("megatron offloads optimizer states, but not in fp16",),
    ),
    Broken(
        rule="host optimizer",
        layout={"zero": 0},
        job={"optimizer": "adam_bf16"},
        says=("optimizer adam_bf16", "use zero 1"),
    ),
    Broken(
        rule="recompute layers",
        layout=PIPE | {"vpp": 2, "schedule": Schedule.INTERLEAVED, "recompute": Recompute.FULL, "recompute_layers": 1},
        says=("recompute_layers 1 with vpp 2", "multiple of 2", "nearest is 2"),
    ),
    Broken(
        rule="recompute modules",
        layout={"recompute": Recompute.SELECTIVE, "recompute_modules": int(Module.NORM)},
        says=("part of Transformer Engine's linear layers", "choose mlp"),
    ),
    Broken(
        rule="sequence parallel",
        job={"trainer": "torchtitan"},
        layout={"tp": 2, "dp": 4, "num_microbatches": 8},
        says=("sequence_parallel False with tp 2", "uses it always"),
    ),
    Broken(
        rule="sequence parallel",
        layout=SP,
        job={"trainer": "nanotron"},
        says=("sequence_parallel True with tp 1", "only with tp > 1"),
    ),
    Broken(
        rule="experts",
        layout={"ep": 3, "dp": 3, "num_microbatches": 11},
        job={"model_name": "moe", "gpus": 3, "batch": 33},
        says=("ep 3", "16 experts", "ep may be 1, 2, 4, 8, 16"),
    ),
    Broken(
        rule="expert parallel",
        layout={"ep": 16},
        job={"model_name": "moe"},
        says=("ep 16 and etp 1", "dp 8", "ep x etp must divide tp x cp x dp"),
    ),
    Broken(
        rule="expert parallel",
        layout={"tp": 2, "dp": 4, "num_microbatches": 8, "ep": 2, "etp": 2} | SP,
        job={"model_name": "moe", "trainer": "torchtitan"},
        says=("etp must be 1",),
    ),
    Broken(
        rule="expert parallel",
        layout={"ep": 2},
        job={"model_name": "moe", "trainer": "nanotron"},
        says=("no expert parallelism",),
    ),
    Broken(rule="expert parallel", layout={"etp": 2}, says=("gqa has no experts", "both must be 1")),
    Broken(
        rule="rank order",
        layout=PIPE | {"order": 1, "ep": 2},
        job={"model_name": "moe"},
        says=("with pp 4", "ep 2 x etp 1", "tp 1 x cp 1", "use order tp-cp-ep-dp-pp"),
    ),
    Broken(
        rule="experts with tp",
        layout={"tp": 2, "etp": 2, "dp": 4, "num_microbatches": 8},
        job={"model_name": "moe", "trainer": "nanotron"},
        says=("tp 2", "sequence_parallel: true"),
    ),
    Broken(
        rule="expert overlap",
        layout={**PIPE, "ep": 2},
        job={"model_name": "moe", "trainer": TRAINERS["megatron"].with_option("expert_overlap", "on")},
        says=("pp 4, vpp 1", "virtual stages (vpp 2)", "--option expert_overlap=off"),
    ),
    Broken(
        rule="experts in shards",
        layout={"dp_shard": 2, "ep": 4, "zero": 3},
        job={"model_name": "moe", "trainer": "torchtitan"},
        says=("ep 4 must divide dp_shard 2 x cp 1 x tp 1", "larger dp_shard"),
    ),
    Broken(
        rule="whole experts",
        layout={"tp": 2, "dp": 4, "num_microbatches": 8, "zero": 3} | SP,
        job={"model_name": "moe", "trainer": "torchtitan"},
        says=("ep 1 with tp 2", "use ep > 1 or tp 1"),
    ),
    Broken(
        rule="tied embeddings",
        layout=PIPE | {"zero": 3},
        job={"model_name": "gpt", "trainer": "torchtitan"},
        says=("ties its embeddings", "pp 4", "use pp 1"),
    ),
    Broken(
        rule="offload with split experts",
        layout={"tp": 2, "dp": 4, "ep": 2, "zero": 1, "num_microbatches": 8, "offload_optimizer": 100},
        job={"model_name": "moe", "trainer": "deepspeed"},
        says=("tp 2 and ep 2", "use tp 1 or no offload"),
    ),
    Broken(
        rule="tp with cp",
        layout={"tp": 2, "cp": 2, "dp": 2, "num_microbatches": 16, "cp_method": CpMethod.A2A},
        job={"trainer": "deepspeed"},
        says=("tp 2 with cp 2", "none of all three"),
    ),
    Broken(
        rule="partial offload",
        layout={"zero": 2, "offload_optimizer": 50},
        job={"trainer": "deepspeed"},
        says=("offload_optimizer 50 with zero 2", "from zero 3 on", "use 100"),
    ),
    Broken(
        rule="split backward",
        layout={"pp": 4, "dp": 2, "num_microbatches": 16, "vpp": 2, "schedule": Schedule.ZBV, "zero": 3},
        job={"trainer": "torchtitan"},
        says=("schedule zbv with zero 3", "without an error", "use zero 2"),
    ),
    Broken(
        rule="recompute in split backward",
        layout={
            "pp": 4,
            "dp": 2,
            "num_microbatches": 16,
            "vpp": 2,
            "schedule": Schedule.ZBV,
            "zero": 2,
            "recompute": Recompute.FULL,
        },
        job={"trainer": "torchtitan"},
        says=("schedule zbv with full recompute", "more memory than it saves", "schedule 1f1b"),
    ),
    Broken(rule="sharding", layout={"zero": 3}, says=("zero 3 with pp 1", "knows zero 0, 1")),
    Broken(
        rule="sharding",
        layout=PIPE | {"zero": 2},
        job={"trainer": TRAINERS["torchtitan"].replace(zero_with_pp=(3,), name="mine")},
        says=("zero 2 with pp 4", "trainer mine", "with a pipeline 3"),
    ),
    Broken(rule="shard group", layout={"dp_shard": 4}, says=("dp_shard 4", "dp 8", "leave dp_shard at 0")),
    Broken(
        rule="shard group",
        layout={"dp_shard": 3, "zero": 3},
        job={"trainer": "torchtitan"},
        says=("dp_shard 3 must divide dp 8",),
    ),
    Broken(
        rule="recompute",
        layout={"recompute": Recompute.SELECTIVE},
        says=("recompute selective", "modules none", "selective needs modules"),
    ),
    Broken(
        rule="recompute",
        layout={"recompute": Recompute.FULL, "recompute_layers": 2},
        job={"trainer": "nanotron"},
        says=("recompute_layers 2", "knows none, full"),
    ),
    Broken(
        rule="recompute modules",
        layout={"recompute": Recompute.SELECTIVE, "recompute_modules": int(Module.MOE)},
        says=("gqa does not have", "moe", "need experts"),
    ),
    Broken(
        rule="offload",
        layout={"offload_optimizer": 50},
        job={"trainer": "torchtitan"},
        says=("offload_optimizer 50", "offloads no optimizer states alone", "with offload_parameters"),
    ),
    Broken(
        rule="activations on the host",
        layout={"offload_activations": 1},
        job={"trainer": "deepspeed"},
        says=("activations with full recompute",),
    ),
    Broken(
        rule="weights on the host",
        layout={"offload_parameters": 1},
        says=("trainer megatron keeps its weights on the GPU",),
    ),
    Broken(
        rule="weights on the host",
        layout={"offload_parameters": 1, "zero": 2},
        job={"trainer": "deepspeed"},
        says=("offload_parameters with zero 2", "use zero 3"),
    ),
]


def sample(case: Broken) -> tuple[Job, Layout]:
    return job(**case.job), Layout(**{"dp": 8, "num_microbatches": 4, **case.layout})


def zero_of(one: Job, layout: Layout) -> Layout:
    """The layout with a sharding level that the trainer has, unless sharding is what the case is about."""
    return layout if layout.zero or 0 in one.trainer.legal.zero else layout.replace(zero=max(one.trainer.legal.zero))
