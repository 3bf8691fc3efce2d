"""Plans that a trainer must refuse: the planner's sentence and the trainer's own, about the same thing.

Every plan is legal but for the fields that are named. The files are written all the same and given to the trainer's own
code. Sentences of the planner's checks around it ("the trainer says ..., the plan ...") do not count: none is here.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest

from planner.defaults import Request, resolve
from planner.errors import PlannerError
from planner.layout import CpMethod, Layout, Schedule
from planner.plan_file import Plan
from planner.rules import check
from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking import Checked
from planner.trainers.checking.child import check_many
from planner.trainers.targets import load_target
from tests.trainers.plans import EVEN, Wanted, found

PACKAGES = {
    "megatron": "megatron", "megatron-bridge": "megatron.bridge", "torchtitan": "torchtitan", "deepspeed": "deepspeed",
    "accelerate": "accelerate", "nanotron": "nanotron", "verl": "verl", "maxtext": "maxtext",
}  # fmt: skip
LEAST = 30
"""Refusals that are compared."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan that cannot be."""

    model: str
    gpus: int
    fields: dict[str, int]
    """What is changed in a plan of data parallelism alone."""
    ours: str
    """Part of the planner's sentence."""
    theirs: str
    """Part of the trainer's."""
    batch: int = 768
    sequence: int | None = None
    precision: str = "bf16"

    def job(self, trainer: str) -> ExportJob:
        """The plan, without a price: it cannot be run."""
        request = Request(model=self.model, num_gpus=self.gpus, hardware="h100-sxm", trainer=trainer,
                          global_batch_size=self.batch, sequence_length=self.sequence, precision=self.precision)  # fmt: skip
        work = resolve(request).job.workload
        degrees = [self.fields.get(name, 1) for name in ("tp", "pp", "cp")]
        free = max(self.gpus // (degrees[0] * degrees[1] * degrees[2]), 1)
        layout = Layout(**{**EVEN, "dp": free, **self.fields})
        if "num_microbatches" not in self.fields:
            each = int(layout.dp) * int(layout.micro_batch_size)
            layout = layout.replace(num_microbatches=max(self.batch // each, 1))
        some = found(Wanted(model="llama-3.1-8b", gpus=8, top=8))[0].prediction
        return ExportJob.of(
            Plan(
                workload=work, hardware="h100-sxm", num_gpus=self.gpus, trainer=trainer, layout=layout, prediction=some
            )
        )


SPLIT = {"sequence_parallel": 1}
MEGATRON = (
    Case(model="llama-3.1-8b", gpus=24, fields={"tp": 3, **SPLIT},
         ours="32 attention heads", theirs="num_attention_heads (32) must be a multiple"),
    Case(model="qwen2.5-0.5b", gpus=7, batch=224, fields={"tp": 7, **SPLIT},
         ours="2 key-value heads", theirs="num_query_groups (2) must be a multiple"),
    Case(model="gpt-oss-20b", gpus=8, batch=256, fields={"tp": 2, "etp": 2, **SPLIT},
         ours="experts have biases", theirs="only supported when ETP==1"),
    Case(model="llama-3.1-8b", gpus=8, batch=256, fields={"recompute": 1, "recompute_modules": 4},
         ours="recompute of mlp_activation", theirs="moe_act in recompute_modules"),
    Case(model="llama-3.1-8b", gpus=8, batch=256, fields={"recompute": 1, "recompute_modules": 32},
         ours="mla_up_projection needs MLA", theirs="mla_up_proj in recompute_modules"),
)  # fmt: skip
"""Rules of Megatron Core's own configuration, which both say in the same words."""
CASES: dict[str, tuple[Case, ...]] = {
    "megatron": (
        *MEGATRON,
        Case(model="llama-3.1-8b", gpus=8, batch=256, fields={"tp": 3, "dp": 2, **SPLIT},
             ours="= 6 GPUs, but the job has 8", theirs="world size (8) is not divisible"),
        Case(model="mixtral-8x7b", gpus=24, fields={"ep": 3},
             ours="ep 3 does not divide the 8 experts", theirs="Number of experts should be a multiple"),
        Case(model="llama-3.1-8b", gpus=24, fields={"cp": 3}, sequence=8192,
             ours="does not divide by 2 x cp 3", theirs="multiple of 2 * context-parallel-size"),
        Case(model="llama-3.1-8b", gpus=8, batch=256, fields={"micro_batch_size": 3},
             ours="must be a multiple of 24", theirs="must be divisible by"),
        Case(model="mixtral-8x7b", gpus=8, batch=256, fields={"tp": 2, "ep": 8, "etp": 2, **SPLIT},
             ours="must divide tp x cp x dp", theirs="divisible"),
        Case(model="llama-3.1-8b", gpus=8, batch=256, fields={"pp": 2, "cp": 2, "order": 1},
             ours="cp 2 must be 1 without experts", theirs="pp-last rank ordering"),
        Case(model="gpt3-1.3b", gpus=8, batch=256, fields={}, sequence=4096,
             ours="learned 2048 positions", theirs="max_position_embeddings (2048)"),
    ),
    "megatron-bridge": (
        *MEGATRON,
        Case(model="llama-3.1-8b", gpus=8, batch=256, fields={"tp": 3, "dp": 2, **SPLIT},
             ours="= 6 GPUs, but the job has 8", theirs="world size (8) is not divisible"),
        Case(model="llama-3.1-8b", gpus=24, fields={"cp": 3}, sequence=8192,
             ours="does not divide by 2 x cp 3", theirs="divisible by 2 * context parallel size"),
        Case(model="llama-3.1-8b", gpus=8, batch=256, fields={"micro_batch_size": 3},
             ours="must be a multiple of 24", theirs="must be divisible by"),
    ),
    "torchtitan": (
        Case(model="llama-3.1-8b", gpus=16, fields={"tp": 16, "zero": 3, **SPLIT},
             ours="8 key-value heads", theirs="must divide n_kv_heads (8)"),
        Case(model="llama-3.1-8b", gpus=24, fields={"tp": 3, "zero": 3, **SPLIT},
             ours="32 attention heads", theirs="must divide n_heads (32)"),
        Case(model="llama-3.2-1b", gpus=16, fields={"pp": 2, "zero": 2},
             ours="ties its embeddings", theirs="Weight tying is not supported"),
        Case(model="llama-3.1-8b", gpus=16, fields={"tp": 4, "dp": 3, "zero": 3, **SPLIT},
             ours="= 12 GPUs, but the job has 16", theirs="!= WORLD_SIZE(16)"),
        Case(model="llama-3.1-8b", gpus=16, batch=16, fields={"pp": 8, "vpp": 2, "zero": 2, "schedule": int(Schedule.DUALPIPE_V)},
             ours="dualpipe_v at least 2 pp", theirs="8 microbatches and 16 stages"),
        Case(model="llama-3.1-8b", gpus=16, batch=44, fields={"pp": 4, "vpp": 2, "zero": 2, "schedule": int(Schedule.INTERLEAVED)},
             ours="11 microbatches", theirs="number of microbatches to be a multiple of the number of rounds"),
        Case(model="mixtral-8x7b", gpus=16, fields={"ep": 3, "zero": 3},
             ours="must divide dp_shard 16", theirs="mesh_sizes=(1, 1, 5, 3)"),
        Case(model="qwen3-30b-a3b", gpus=16, fields={"ep": 16, "dp_shard": 8, "zero": 3},
             ours="must divide dp_shard 8", theirs="mesh_sizes=(1, 2, 0, 16)"),
    ),
    "deepspeed": (
        Case(model="llama-3.1-8b", gpus=16, fields={"num_microbatches": 3},
             ours="= 48 sequences, but the global batch is 768", theirs="768 != 1 * 3 * 16"),
        Case(model="llama-3.1-8b", gpus=16, batch=64, fields={"micro_batch_size": 3},
             ours="must be a multiple of 48", theirs="64 != 3 * 1 * 16"),
        Case(model="llama-3.1-8b", gpus=16, fields={"zero": 2, "offload_optimizer": 50},
             ours="with ZeRO 3 only", theirs="Partial offloading only supported for ZeRO Stage 3"),
        Case(model="mixtral-8x7b", gpus=16, fields={"ep": 3}, ours="ep 3 does not divide", theirs="must divide the stage size"),
        Case(model="mixtral-8x7b", gpus=16, fields={"tp": 2, "ep": 2, "offload_optimizer": 100},
             ours="offload when experts take ranks from tensor parallelism", theirs="offload with AutoEP+AutoTP folding"),
        Case(model="mixtral-8x7b", gpus=16, fields={"tp": 2, "ep": 2, "cp": 2, "cp_method": int(CpMethod.A2A)},
             ours="there is none of all three", theirs="mutually exclusive"),
    ),
    "accelerate": (
        Case(model="llama-3.1-8b", gpus=16, fields={"dp": 8, "zero": 3},
             ours="= 8 GPUs, but the job has 16", theirs="total_size (8) does not match num_processes (16)"),
        Case(model="llama-3.1-8b", gpus=16, fields={"dp_shard": 1, "zero": 3},
             ours="a shard group of more than one rank", theirs="no dimension for FSDP to shard across"),
    ),
    "nanotron": (
        Case(model="llama-3.1-8b", gpus=24, fields={"tp": 3}, ours="32 attention heads", theirs="must be divisible by tp (3)"),
        Case(model="llama-3.1-8b", gpus=16, fields={"tp": 16}, ours="must be >= tp", theirs="must be >= tp (16)"),
    ),
    "verl": (
        Case(model="llama-3.1-8b", gpus=16, batch=56, fields={"num_microbatches": 3},
             ours="no multiple of dp x micro batch = 16", theirs="minimal possible batch size (16)"),
        Case(model="llama-3.1-8b", gpus=16, batch=64, fields={"micro_batch_size": 3},
             ours="no multiple of dp x micro batch = 48", theirs="minimal possible batch size (48)"),
        Case(model="llama-3.1-8b", gpus=16, fields={"tp": 3, "pp": 3, "dp": 1, **SPLIT},
             ours="= 9 GPUs, but the job has 16", theirs="must be divisible by model_parallel_size (9)"),
    ),
    "maxtext": (
        Case(model="llama-3.1-8b", gpus=16, fields={"zero": 3}, precision="fp8",
             ours="fp8 with 48 microbatches", theirs="not compatible with gradient accumulation"),
        Case(model="mixtral-8x7b", gpus=16, fields={"zero": 3, "ep": 3},
             ours="ep 3 does not divide", theirs="does not match the product of the ICI parallelism 15"),
    ),
}  # fmt: skip
"""Heads, key-value heads, layers, experts, virtual stages, context, batch, ranks, recompute, offload, precision."""


def needs(name: str) -> None:
    """Skip, loudly, without the trainer."""
    try:
        there = importlib.util.find_spec(PACKAGES[name]) is not None
    except ModuleNotFoundError:  # the package around it
        there = False
    if not there:
        pytest.skip(f"NOT CHECKED: {PACKAGES[name]} is not installed here")


def our_sentences(name: str, job: ExportJob) -> list[str]:
    """What the planner says of a plan."""
    sentences = load_target(name).refusals(job)
    try:
        check(job.rules_job, job.layout)
    except PlannerError as error:
        sentences.append(str(error))
    return sentences


def trainer_says(name: str, jobs: list[ExportJob], folder: Path) -> list[Checked]:
    """The trainer's own code on plans that it cannot run."""
    pairs = []
    for number, job in enumerate(jobs):
        for path, text in load_target(name).render(job).files.items():
            (folder / str(number) / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / str(number) / path).write_text(text)
        pairs.append((job, folder / str(number)))
    return check_many(name, pairs)


def test_there_are_enough() -> None:
    """Those of nanotron, which has to be cloned, are not counted; nor the rules that two targets share."""
    assert sum(len(cases) for name, cases in CASES.items() if name != "nanotron") - len(MEGATRON) >= LEAST


@pytest.mark.parametrize("name", CASES)
def test_what_the_planner_refuses_the_trainer_refuses(name: str, tmp_path: Path) -> None:
    needs(name)
    cases = CASES[name]
    jobs = [case.job(load_target(name).trainers[0]) for case in cases]
    for case, job in zip(cases, jobs, strict=True):
        said = our_sentences(name, job)
        assert any(case.ours in one for one in said), (case, said)
    answers = trainer_says(name, jobs, tmp_path)
    if all(not one.level and not one.problem and one.missing for one in answers):  # a package that it needs
        pytest.skip(answers[0].text())
    for case, one in zip(cases, answers, strict=True):
        assert not one.missing, one.text()
        assert case.theirs in one.problem, (case, one.text())
        assert "the trainer says" not in one.problem  # that would be a comparison of the planner's own check
