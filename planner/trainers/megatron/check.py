"""Megatron-LM's own code on an exported folder: arguments, validation, process groups, layers, parameters."""

import json
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.trainers.bundle.process_groups import GROUPS, group_of
from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking import Checked
from planner.trainers.checking.child import run_child
from planner.trainers.megatron.core_settings import environment, vocab_rows

CAPABILITY = {"Volta": (7, 0), "Ampere": (8, 0), "Ada": (8, 9), "Hopper": (9, 0), "Blackwell": (10, 0)}
"""Compute capability by architecture: the validator's rules depend on it."""
MANY = 24
"""Cases from which two processes share the work."""
MODEL_RANKS = 4
"""Pipeline stages whose model is built: first, last and some between."""


def check_many(cases: list[tuple[ExportJob, list[str]]], *, level: str = "model built") -> list[Checked]:
    """Megatron's code on many argument lists in one process, which imports it once."""
    if len(cases) >= MANY:
        with ThreadPoolExecutor(2) as pool:  # two processes of their own
            halves = pool.map(lambda part: _check_here(part, level), (cases[0::2], cases[1::2]))
        first, second = (iter(half) for half in halves)
        return [next(first if number % 2 == 0 else second) for number in range(len(cases))]
    return _check_here(cases, level)


def dump_arguments(cases: list[tuple[ExportJob, list[str]]]) -> list[str]:
    """What rank 0 prints of its arguments at the start of a log, after Megatron's own validation. Raises RuntimeError."""
    asked = [{**_question(job, words, "validated"), "rank": 0, "dump": True} for job, words in cases]
    answers = _answers(asked)
    if isinstance(answers, str):
        raise RuntimeError(answers)
    for one in answers:
        if one["problem"]:
            raise RuntimeError(one["problem"])
    return [one["dump"] for one in answers]


def _check_here(cases: list[tuple[ExportJob, list[str]]], level: str) -> list[Checked]:
    answers = _answers([_question(job, words, level) for job, words in cases])
    if isinstance(answers, str):
        return [Checked(target="megatron", missing=answers) for _ in cases]
    return [_judged(job, answer, level) for (job, _), answer in zip(cases, answers, strict=True)]


def _answers(questions: list[dict[str, Any]]) -> list[dict[str, Any]] | str:
    """What the worker answers, or why it does not."""
    done = run_child(("planner.trainers.megatron.check_worker",), json.dumps(questions), len(questions))
    if isinstance(done, str):
        return done
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        if "No module named" in said:
            return f"{said.split(': ', 1)[-1]}; install megatron-core, or set PYTHONPATH to a Megatron-LM checkout"
        return said
    answers: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return answers


def words_of(folder: Path) -> list[str]:
    """The words of the array ARGUMENTS in a folder that the export wrote. Raises PlannerError."""
    path = folder / "arguments.sh"
    try:
        words = shlex.split(path.read_text(encoding="utf-8"), comments=True)
    except (OSError, ValueError) as error:
        raise PlannerError(f"{path}: cannot be read ({error})") from error
    if "ARGUMENTS=(" not in words or ")" not in words:
        raise PlannerError(f"{path}: the array ARGUMENTS is missing")
    start = words.index("ARGUMENTS=(") + 1
    return words[start : words.index(")", start)]


def _question(job: ExportJob, words: list[str], level: str) -> dict[str, Any]:
    arch = job.cluster.hardware.arch
    if job.model.is_mla and not job.model.q_lora_rank and level == "model built":
        level = "groups built"  # Megatron's plain layers cannot build it: its query norm needs Transformer Engine
    capability = next((value for name, value in CAPABILITY.items() if arch.startswith(name)), (9, 0))
    return {
        "arguments": [*words, "--mock-data", "--tokenizer-type", "NullTokenizer", "--train-iters", "10", "--lr", "1e-5"],
        "environment": {name: one.value for name, one in environment(job).items()},
        "world": job.cluster.num_gpus, "rank": probe_rank(job), "capability": capability, "level": level,
        "model_ranks": [stage * _stage_stride(job) for stage in model_stages(job)],
    }  # fmt: skip


def probe_rank(job: ExportJob) -> int:
    """A rank whose place in every group is neither first nor last where the group is large enough."""
    return int(job.layout.num_gpus) * 5 // 8


def model_stages(job: ExportJob) -> list[int]:
    """Pipeline stages whose model is built."""
    pp = job.layout.pp
    return sorted({0, pp - 1, pp // 2, min(1, pp - 1)})[:MODEL_RANKS]


def _stage_stride(job: ExportJob) -> int:
    ranks = group_of(job.layout, "pp", 0)
    return ranks[1] - ranks[0] if len(ranks) > 1 else 0


def _judged(job: ExportJob, answer: dict[str, Any], level: str) -> Checked:
    """The trainer's answers against the planner's: groups of a rank, layers per virtual stage, parameters per rank."""
    if answer["problem"]:
        return Checked(target="megatron", level=answer["level"], problem=answer["problem"])
    problems = []
    expected: dict[str, Any] = {"microbatches": job.layout.num_microbatches}
    expected["groups"] = {name: group_of(job.layout, name, probe_rank(job)) for name in GROUPS}
    if not job.model.is_moe:  # Megatron then calls all ranks of a stage expert data parallel, whatever tp is
        for name in ("etp", "ep", "edp"):
            expected["groups"].pop(name)
            answer.get("groups", {}).pop(name, None)
    expected["layers"] = job.layers_per_chunk()
    counts = job.parameters(vocab_rows(job))
    expected["parameters"] = [counts[stage] for stage in model_stages(job)]
    details = []
    for name, mine in expected.items():
        if name in answer and answer[name] != mine:
            problems.append(f"{name}: the trainer has {answer[name]}, the plan {mine}")
        elif name in answer:
            details.append(f"{name} as planned")
    if problems:
        return Checked(target="megatron", level=answer["level"], problem="; ".join(problems))
    return Checked(target="megatron", level=answer["level"], details=tuple(details))
