"""The steps of the first day on a machine: commands, their limits of time and what each needs of those before it.

No step may take longer than eight minutes, and all limits together are below the half hour, so that a step is left out only
where --budget is shorter. The runs are small: 32k tokens per GPU and step are enough for steady clocks, seconds for an 8B model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path

from planner.errors import PlannerError
from planner.plan_file import load_plan
from planner.record import record

MOST_SECONDS = 480.0
"""Of one step."""
PROFILE = "profile.yaml"
TINY = {
    "name": "tiny", "num_layers": 4, "hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "ffn_size": 256,
    "vocab_size": 512, "max_sequence_length": 256,
}  # fmt: skip
"""Model of the dry form."""
TINY_FILE = "tiny.yaml"
SMALL, MEDIUM = ("llama-3.2-1b", "qwen3-0.6b", "gpt3-125m"), ("llama-3.1-8b", "llama-3.2-3b", "llama-3.2-1b")
"""Models of the two plans: the first that fits the GPUs here."""
WHOLE_NODE = 8
"""GPUs that the medium plan is made for where none fits those here: one rank of it still runs alone on one GPU."""
SEQUENCE, SEQUENCES = 4096, 8
"""Tokens of a sequence, and sequences per GPU and step."""
DRY_RANKS = 2
ON_DEVICE = ("--no-offload-parameters", "--no-offload-activations", "--offload-optimizer", "0")
"""The torch model keeps weights and activations on the GPU, and host memory is no part of what is compared with the driver."""

Words = tuple[str, ...]


@record
class Step:
    """One process, or several of which the first that succeeds counts."""

    name: str
    """Also of its log."""
    what: str
    """In words, for a person."""
    limit: float
    """Seconds."""
    commands: tuple[Words, ...]
    """Tried in turn; ``plan`` and ``python`` as the first word are this package's own."""
    makes: str
    """File in the folder that it writes."""
    needs: tuple[str, ...] = ()
    """Files of steps before, without which it is left out."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """What a word of the commands becomes where there is no file of that name."""
    obstacle: Callable[[Path], str] = lambda _: ""
    """Why it cannot be done with what lies in the folder; "" = it can."""


def steps_of(gpus: int, hardware: str) -> list[Step]:
    """Those of a machine with GPUs; ``hardware``: the library's profile of them."""
    small = tuple((model, gpus) for model in SMALL)
    medium = (*((model, gpus) for model in MEDIUM[:-1]), *((model, WHOLE_NODE) for model in MEDIUM))
    found = [
        _machine("cuda", 45),
        Step(
            name="profile", what="a short hardware profile", limit=450, makes=PROFILE,
            commands=((*_plan("profile", PROFILE, "--resume --budget 4m"), "--hardware", hardware, *_models(SMALL[0], MEDIUM[0])),),
        ),
        _planned("small", small, hardware),
        _validated("small", "rank", 120, "one rank of it alone: memory against the driver, passes"),
        _low_precision("cuda", 90, {PROFILE: hardware}),
        _validated("small", "full", 300, "it and two other layouts on all GPUs", "--top", "3", gpus=gpus),
        _planned("medium", medium, hardware),
        _validated("medium", "rank", 240, "one rank of it alone: memory against the driver, passes"),
        _validated("medium", "full", 300, "it on all GPUs", gpus=gpus),
    ]  # fmt: skip
    return found if gpus == 1 else [*found, _health(120)]


def dry_steps() -> list[Step]:
    """The same road on this processor with a tiny model, seconds per step; the numbers mean nothing."""
    cpu, short = ("--device", "cpu"), ("--steps", "2", "--warmup", "1")
    words = _plan("profile", PROFILE, f"--resume --budget 3s --ranks {DRY_RANKS} --model {TINY_FILE}")
    job = ("--precision", "fp32", "--sequence-length", "128", "--global-batch-size", "4")
    plan = ("plan", "--model", TINY_FILE, "--gpus", str(DRY_RANKS), "--hardware", PROFILE, *job, "--trainer", "torchtitan")
    return [
        _machine("cpu", 45),
        Step(name="profile", what="a short hardware profile", limit=120, makes=PROFILE, commands=((*words, *cpu),)),
        Step(
            name="small-plan", what="the search for the plan of a tiny model", limit=30, makes="small.yaml", needs=(PROFILE,),
            commands=((*plan, "--top", "1", "--output", "small.yaml"),),
        ),
        _validated("small", "rank", 120, "one rank of it alone", "--rank", "0", *short, *cpu),
        _low_precision("cpu", 60, {}),
        _validated("small", "full", 120, "it on all ranks", *short, *cpu, "--no-parity", gpus=DRY_RANKS),
        _health(90, *cpu, "--ranks", str(DRY_RANKS)),
    ]  # fmt: skip


def _plan(command: str, output: str, words: str = "") -> Words:
    return "plan", command, "--output", output, *words.split()


def _models(*names: str) -> Words:
    return tuple(word for name in names for word in ("--model", name))


def _machine(device: str, limit: float) -> Step:
    words = ("python", "-m", "planner.lab.first_day.machine", "--device", device, "--output", "machine.yaml")
    what = "driver, torch, CUDA, NCCL, clocks, power, ECC, topology"
    return Step(name="machine", what=what, limit=limit, makes="machine.yaml", commands=(words,))


def _low_precision(device: str, limit: float, instead: Mapping[str, str]) -> Step:
    module = ("python", "-m", "planner.lab.first_day.low_precision")
    words = (*module, "--device", device, "--hardware", PROFILE, "--output", "fp8.yaml")
    return Step(
        name="fp8", what="products in fp8 and fp4 against bf16", limit=limit, makes="fp8.yaml", commands=(words,), instead=instead,
        needs=() if instead else (PROFILE,),
    )  # fmt: skip


def _health(limit: float, *more: str) -> Step:
    return Step(
        name="health", what="pairs of GPUs, the slow one by bisection", limit=limit, makes="health.yaml",
        commands=((*_plan("profile", "health.yaml", "--health"), *more),),
    )  # fmt: skip


def _planned(name: str, sizes: tuple[tuple[str, int], ...], hardware: str) -> Step:
    """The search for the first of some (model, GPUs) that fits."""
    file = f"{name}.yaml"

    def words(model: str, gpus: int) -> Words:
        batch = ("--sequence-length", str(SEQUENCE), "--global-batch-size", str(SEQUENCES * gpus))
        job = ("plan", "--model", model, "--gpus", str(gpus), "--hardware", PROFILE, "--trainer", "torchtitan", *batch)
        return (*job, *ON_DEVICE, "--top", "1", "--output", file)

    return Step(
        name=f"{name}-plan", what=f"the search for a {name} plan that fits, with the fresh profile", limit=45, makes=file,
        commands=tuple(words(model, gpus) for model, gpus in sizes), instead={PROFILE: hardware},
    )  # fmt: skip


def _validated(name: str, rung: str, limit: float, what: str, *more: str, gpus: int = 0) -> Step:
    """A level of ``plan validate`` on a plan of a step before; ``gpus`` that the plan must be for, 0 = any number."""
    plan, file = f"{name}.yaml", f"{name}-{rung}.yaml"

    def obstacle(folder: Path) -> str:
        try:
            planned = load_plan(folder / plan).num_gpus
        except PlannerError as error:
            return str(error)
        here = "is 1" if gpus == 1 else f"are {gpus}"
        return f"the {name} plan is for {planned} GPUs and there {here} here" if gpus and planned != gpus else ""

    words = ("plan", "validate", plan, "--rung", rung, "--output", file, *more)
    return Step(
        name=f"{name}-{rung}", what=f"the {name} plan, {what}", limit=limit, makes=file, commands=(words,), needs=(plan,),
        obstacle=obstacle,
    )  # fmt: skip
