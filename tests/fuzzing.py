"""Files and flags with random mistakes: each is read, or refused in one sentence. ``one(kind, seed)`` makes and reads one."""

from __future__ import annotations

import json
import random
import shlex
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import yaml
from click.testing import CliRunner
from hostile import HOSTILE, put

from planner import api, library
from planner.commands import main as cli
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.model import load_model
from planner.questions.calibrate.sources import read_measured
from planner.questions.hardware.numbers import shown_profile
from planner.runs import read_runs
from planner.trainer import load_trainer
from planner.trainers.logs import Given

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 20.0
"""Seconds of this processor after which an input counts as a hang; 15 times that where it waits."""
LONG_SENTENCE = 3000
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 8, 31, 4097, 65536, 2**31, 2**53, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0,
    1e-9, 1e15, 1e308,
    float("nan"), float("inf"), [], {}, [[]], [1, 2], {"a": 1}, {1: 2}, {"": {}}, "1", "8", "auto", "3 GB/s", "1e400 s", "-1 ms",
    "nan", "0x10", "2026-01-01", "llama-8b", "h100-sxm", "megatron", "bf16", "fp8",
)  # fmt: skip
RUNNER = CliRunner()


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of nested data below its root."""
    if path:
        yield path
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from places(value, (*path, key))


def value(rng: random.Random) -> Any:
    """Something that hardly belongs there."""
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(HOSTILE)
    return (
        rng.choice(VALUES)
        if kind < 0.85
        else rng.choice((rng.randrange(1, 10**6), rng.uniform(-2.0, 1e4), 2 ** rng.randrange(80)))
    )


def spoiled(data: Any, rng: random.Random) -> Any:
    """Data with one to three mistakes: another value, a key gone, twice under another name, or that of a neighbour."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        everywhere = list(places(data))
        if not everywhere:
            return data
        path = rng.choice(everywhere)
        act, parent = rng.random(), data
        for key in path[:-1]:
            parent = parent[key]
        if act < 0.7 or not isinstance(parent, dict):
            data = put(data, path, value(rng))
        elif act < 0.8:
            data = put(data, path[:-1], {key: one for key, one in parent.items() if key != path[-1]})
        elif act < 0.9:
            data = put(data, path[:-1], {**parent, str(value(rng))[:50]: parent[path[-1]]})
        else:
            data = put(data, path, parent[rng.choice(list(parent))])
    return data


def scratched(text: str, rng: random.Random) -> bytes:
    """A text with mistakes that no data has: cut off, a piece twice, signs, bytes that are no text."""
    act, at = rng.random(), rng.randrange(len(text) + 1)
    to = min(len(text), at + rng.randrange(1, 40))
    if act < 0.25:
        text = text[:at] + rng.choice(HOSTILE)[:2000] + text[at:]
    elif act < 0.4:
        text = text[:at]
    elif act < 0.55:
        text = text[:to] + text[at:]
    elif act < 0.7:
        text = text[:at] + text[to:]
    elif act < 0.85:
        text = text[:at] + rng.choice("0123456789-+.eE\"'[]{}()<>:,;#&*!|>%@`$=~\n\t\\ ") + text[at + 1 :]
    data = text.encode("utf-8", "surrogatepass")
    return data if act < 0.95 else data[:at] + bytes([rng.randrange(256)]) + data[at:]


def file_of(folder: Path, name: str, data: Any, rng: random.Random) -> Path:
    """A spoiled file of data (YAML, JSON) or of text."""
    path = folder / name
    if not isinstance(data, str):
        if rng.random() < 0.85:
            data = spoiled(data, rng)
        data = json.dumps(data) if path.suffix == ".json" else _yaml(data)
        path.write_bytes(scratched(data, rng) if rng.random() < 0.1 else data.encode("utf-8", "surrogatepass"))
    else:
        for _ in range(rng.randrange(1, 3)):
            path.write_bytes(scratched(data, rng))
    return path


def _yaml(data: Any) -> str:
    try:
        return str(yaml.dump(data, Dumper=yaml.CSafeDumper, sort_keys=False))
    except UnicodeEncodeError:  # half of a pair: JSON can write it, and YAML reads that
        return json.dumps(data)


# ------------------------------------------------------------------------------------------------ what is read


@cache
def stored(kind: str) -> tuple[Any, ...]:
    """Whole data of a kind, shipped or of the tests."""
    if kind == "config":
        return tuple(json.loads((ROOT / "tests/data/hugging_face_configs.json").read_text()).values())
    files = sorted((library.profiles_directory() / kind).glob("*.yaml"))
    if kind == "runs":  # the smallest: some hold hundreds of rows
        files = sorted(files, key=lambda path: path.stat().st_size)[:12]
    return tuple(library.read_yaml(path) for path in files)


@cache
def plans() -> tuple[dict[str, Any], ...]:
    """Plan files of several trainers."""
    said = (
        ("llama-8b", 8, "megatron"),
        ("llama-8b", 8, "torchtitan"),
        ("mixtral-8x7b", 64, "megatron"),
        ("llama-8b", 16, "deepspeed"),
    )
    assumed = {"assumptions": [{"what": "a", "value": "b", "why": "c", "flag": "d"}]}
    return tuple(
        api.estimate(model=model, gpus=gpus, trainer=trainer, hardware="h100-sxm", ep=8 if gpus == 64 else None).file.to_dict()
        | assumed
        for model, gpus, trainer in said
    )  # fmt: skip


@cache
def configurations() -> tuple[tuple[str, str], ...]:
    """Names and texts of trainers' configurations: those that plans are exported to, and a command line."""
    from planner.plan_file import plan_from_dict
    from planner.trainers.bundle.target import ExportJob
    from planner.trainers.targets import load_target

    found = []
    for data, targets in ((plans()[0], ("megatron",)), (plans()[1], ("torchtitan",)), (plans()[3], ("deepspeed",))):
        for target in targets:
            files = load_target(target).render(ExportJob.of(plan_from_dict(data))).files
            found += [
                (name.replace("/", "_"), text)
                for name, text in files.items()
                if name.endswith((".sh", ".yaml", ".py", ".json"))
            ]
    words = "train.py --tensor-model-parallel-size 2 --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 512"
    toml = '[parallelism]\ntensor_parallel_degree = 2\n[training]\nseq_len = 4096\n[activation_checkpoint]\nmode = "full"\n'
    return (*found, ("train.sh", words), ("run.toml", toml))


def model_config(rng: random.Random, folder: Path) -> None:
    """A config.json, priced now and then."""
    path = file_of(folder, "config.json", rng.choice(stored("config")), rng)
    _priced(load_model(str(path)), rng, 0.02)


def model_yaml(rng: random.Random, folder: Path) -> None:
    _priced(load_model(str(file_of(folder, "mine.yaml", rng.choice(stored("models")), rng))), rng, 0.05)


def _priced(model: Any, rng: random.Random, share: float) -> None:
    if rng.random() < share:
        api.estimate(model=model, gpus=8, hardware="h100-sxm").to_dict()


def trainer_yaml(rng: random.Random, folder: Path) -> None:
    data = (
        {"extends": "megatron", **rng.choice(stored("trainers"))}
        if rng.random() < 0.5
        else rng.choice(stored("trainers"))
    )
    trainer = load_trainer(str(file_of(folder, "trainer.yaml", data, rng)))
    if rng.random() < 0.05:
        api.estimate(model="llama-8b", gpus=8, hardware="h100-sxm", trainer=str(folder / "trainer.yaml"))
    assert trainer.name


def plan_yaml(rng: random.Random, folder: Path) -> None:
    """A plan file: read, and one command of those that take one."""
    path = file_of(folder, "plan.yaml", rng.choice(plans()), rng)
    plan = api.load(path)
    act = rng.randrange(12)
    if act == 0:
        api.estimate(path).to_dict()
    elif act == 1:
        api.doctor(plan, measured=rng.choice(("14.2s", "1 ms", 3.5)), memory=rng.choice((None, "71GiB"))).to_dict()
    elif act == 2:
        api.compare(plan, api.Plan(api.estimate(model="llama-8b", gpus=8).file)).to_dict()
    elif act == 3:
        plan.export(rng.choice(("megatron", "torchtitan", "deepspeed", "vllm")), folder / "run", force=True)
    elif act == 4:
        plan.report(format="trace")
    elif act == 5:
        RUNNER.invoke(cli.main, ["estimate", str(path)], catch_exceptions=False)


def hardware_yaml(rng: random.Random, folder: Path) -> None:
    profile = load_hardware(str(file_of(folder, "hardware.yaml", rng.choice(stored("hardware")), rng)))
    json.dumps(shown_profile(profile))
    if rng.random() < 0.05:
        api.estimate(model="llama-8b", gpus=16, hardware=str(folder / "hardware.yaml"))


def runs_yaml(rng: random.Random, folder: Path) -> None:
    runs = read_runs([file_of(folder, "runs.yaml", rng.choice(stored("runs")), rng)])
    if rng.random() < 0.02:
        api.accuracy([folder / "runs.yaml"]).to_dict()
    assert isinstance(runs, list)


def log(rng: random.Random, folder: Path) -> None:
    name = rng.choice(sorted(path.name for path in (ROOT / "tests/logs").iterdir()))
    path = file_of(folder, name, (ROOT / "tests/logs" / name).read_text(), rng)
    given = Given(
        model=load_model("llama-8b"),
        facts={"parallel.gpus": 8, "model.seq": 4096, "batch.global": 64, "parallel.tp": 1},
    )
    read_measured([path], "h100-sxm", given=given if rng.random() < 0.7 else Given())
    if rng.random() < 0.2:
        api.import_config(path, model="llama-8b", gpus=8)


@cache
def samples() -> tuple[dict[str, Any], ...]:
    """The configurations of fine-tuning of test_import_samples, each with the files next to it."""
    return tuple(yaml.safe_load((ROOT / "tests/data/import_samples.yaml").read_text()).values())


def configuration(rng: random.Random, folder: Path) -> None:
    """A trainer's configuration, or one of the files next to it, is spoiled; some are values of ``--set``."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place, settings = Path(name), {}
        if rng.random() < 0.5:
            sample = rng.choice(samples())
            for file, text in sample["files"].items():
                (place / file).parent.mkdir(parents=True, exist_ok=True)
                (place / file).write_text(text)
            spoiled_one = rng.choice(sorted(sample["files"]))
            file_of((place / spoiled_one).parent, Path(spoiled_one).name, sample["files"][spoiled_one], rng)
            path, settings = place / sample["read"], {**sample.get("set", {})}
        else:
            path = file_of(place, *rng.choice(configurations()), rng)
        if settings and rng.random() < 0.3:
            settings[rng.choice(list(settings))] = value(rng)
        said: dict[str, Any] = {"model": "llama-8b", "gpus": 8, "sequence_length": 4096, "global_batch_size": 64}
        given = [f"{key}={one}" for key, one in settings.items()]
        api.import_config(path, hardware="h100-sxm", settings=given, **(said if rng.random() < 0.7 else {}))


COMMANDS = (
    "search",
    "estimate",
    "what-if",
    "sensitivity",
    "doctor",
    "export",
    "import",
    "hardware",
    "compare",
    "calibrate",
)


def flags(rng: random.Random, folder: Path) -> None:
    """Flags of a command with values of all kinds."""
    context = click.Context(cli.main)
    name = rng.choice(COMMANDS)
    command = cli.main.get_command(context, name)
    words = [name] if rng.random() < 0.95 else []
    plan = folder / "a-plan.yaml"
    if not plan.exists():
        plan.write_text(library.dump_yaml(plans()[0]))
    given = [
        "--model",
        "llama-8b",
        "--gpus",
        "8",
        "--tp",
        "8",
        "--pp",
        "1",
        "--cp",
        "1",
        "--micro-batch-size",
        "1",
        "--recompute",
        "none",
    ]
    if name in ("search", "estimate"):
        words += given
    elif rng.random() < 0.8:
        words.append(str(plan))
    options = [one for one in getattr(command, "params", []) if isinstance(one, click.Option)]
    for option in rng.sample(options, min(len(options), rng.choice((1, 1, 2, 3)))):
        if {"--output", "--plot"} & set(option.opts):
            continue
        words.append(rng.choice([*option.opts, *option.secondary_opts]))
        if not option.is_flag:
            choices = list(option.type.choices) if isinstance(option.type, click.Choice) else []
            words.append(rng.choice([str(value(rng)).replace("\0", ""), *choices[:3], "8", "llama-8b"])[:300])
    result = RUNNER.invoke(cli.main, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(shlex.join(words)) from result.exception
    assert result.exit_code in (0, 1, 2), shlex.join(words)
    if result.exit_code == 2:
        raise PlannerError(result.stderr)


KINDS: dict[str, tuple[Callable[[random.Random, Path], None], int]] = {
    "config.json": (model_config, 400), "model": (model_yaml, 170), "trainer": (trainer_yaml, 150), "plan": (plan_yaml, 100),
    "hardware": (hardware_yaml, 50), "runs": (runs_yaml, 40), "log": (log, 40),
    "configuration": (configuration, 45), "flags": (flags, 5),
}  # fmt: skip
"""What is read, and how often in a thousand."""


def one(kind: str, seed: int, folder: Path) -> str:
    """Make and read one input: 'sentence' or 'accepted'. Raises whatever else comes out, and AssertionError for a hang."""
    rng = random.Random(f"{kind} {seed}")

    def hang(*_: Any) -> None:
        raise AssertionError(f"{kind} {seed}: more than {LONGEST} s")

    timers = {signal.ITIMER_PROF: (signal.SIGPROF, LONGEST), signal.ITIMER_REAL: (signal.SIGALRM, 15 * LONGEST)}
    before = {number: signal.signal(number, hang) for number, _ in timers.values()}
    for timer, (_, seconds) in timers.items():
        signal.setitimer(timer, seconds)
    try:
        KINDS[kind][0](rng, folder)
    except PlannerError as error:
        said = str(error)
        assert said.strip() and len(said) < LONG_SENTENCE, f"{kind} {seed}: {len(said)} characters"
        return "sentence"
    finally:
        for timer, (number, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])
    return "accepted"
