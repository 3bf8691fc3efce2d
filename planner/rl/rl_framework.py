"""What an RL framework can do, and what it does when nothing is said, by version: profiles/rl/NAME.yaml.

    name: verl
    title: verl (Hydra, Ray)
    repository: verl-project/verl
    oldest: "0.1"
    newest: "0.9.1"
    facts:
      placements:
      - {since: "0.1", value: [{mode: colocated, sync: [ipc]}], source: 'file of the repository, version, date'}

A fact has a history: the entry that holds is the last whose ``since`` is not after the version that is asked for. Before its first
entry a fact is not there: no placement, no back end, or the empty value of its type.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import field, replace
from functools import cache
from typing import Annotated, Any

from planner import library
from planner.errors import PlannerError, UnknownNameError, listed
from planner.record import record
from planner.rl.rl_layout import ASYNCHRONOUS, MODES, SYNC_METHODS
from planner.schema import Bytes, Line, Name, Text, check_keys, fields_of, one_of, read, value_of, within
from planner.trainer_options import number_of
from planner.units import plural

PHASES = ("prepare", "generate", "reward", "logprob", "reference", "critic", "train", "critic_train", "sync", "switch", "wait")
"""Phases whose times a framework prints, named as those of a plan: ``logprob`` of the policy under training, ``reference`` of the
frozen one, ``critic`` values of the value model, ``switch`` moves memory between training and generation, ``wait`` is time in which
the trainer has no answers."""
BACKENDS = ("fsdp", "megatron", "deepspeed", "archon")
PACKINGS = ("none", "balanced", "first_fit")
"""none: sequences are padded; balanced: equal tokens up to a limit; first_fit: the fewest bins of a limit."""
STATES = ("weights", "gradients", "optimizer", "reference")
CHOICES = ("fixed", "whole", "each")
"""fixed: states of training wait on the host as the framework has it; whole: all of them or none; each: by state."""
ENGINES = ("vllm", "sglang", "trtllm")
CRITICS = ("actor", "own")
"""A value model on the actor's GPUs, or on a pool of its own."""
Steps = Annotated[int, within(0, ASYNCHRONOUS)]


@record
class OfferedPlacement:
    """One way to place generation and training that a framework has."""

    mode: Annotated[str, one_of(MODES)]
    """As in ``rl_layout.MODES``."""
    staleness: tuple[Steps, Steps] = (0, 0)
    """Fewest and most steps that generation runs ahead."""
    partial: bool = False
    """New weights may enter while answers are generated."""
    sync: tuple[Annotated[str, one_of(*SYNC_METHODS)], ...]
    """How weights travel; the first is the framework's own choice."""
    program: Line = ""
    """What is started for it, where it is not the usual program."""
    critic: tuple[Annotated[str, one_of(*CRITICS)], ...] = ()
    """Where a value model may be trained; empty: the framework trains none."""

    def holds(self, mode: str, staleness: int) -> bool:
        """Whether it is this placement."""
        return mode == self.mode and self.staleness[0] <= staleness <= self.staleness[1]


@record
class TrainingBackend:
    """A back end of training, and the trainer of profiles/trainers that prices it."""

    name: Annotated[str, one_of(*BACKENDS)]
    trainer: Name


@record
class RolloutEngine:
    """An engine that generates."""

    name: Annotated[str, one_of(*ENGINES)]
    version: Name
    """That the framework's version is built with."""

    @property
    def label(self) -> str:
        """name@version."""
        return f"{self.name}@{self.version}"


@record
class LogNames:
    """What the framework's log calls the times of a step, in seconds."""

    step: tuple[Line, ...] = ()
    """Time of the whole step; empty: it prints none, and the phases are added up."""
    phases: Mapping[str, tuple[Line, ...]]
    """Of PHASES; the times under all of its names that a step prints are added up."""
    overlapped: frozenset[Annotated[str, one_of(*PHASES)]] = frozenset()
    """Phases that run beside the step where generation runs ahead, and are no part of its time then."""

    @classmethod
    def from_dict(cls, data: object, *, where: str) -> LogNames:
        """From a file. Raises PlannerError."""
        found = check_keys(data, ("step", "phases", "overlapped"), where, required=("phases",))
        phases = check_keys(found["phases"], PHASES, f"{where}: phases")
        names = tuple[Line, ...]
        return cls(
            step=value_of(names, found.get("step", []), where, "step"),
            phases={name: value_of(names, one, where, name) for name, one in phases.items()},
            overlapped=value_of(frozenset[Annotated[str, one_of(*PHASES)]], found.get("overlapped", []), where, "overlapped"),
        )  # fmt: skip


@record
class RlFramework:
    """One framework at one version."""

    name: Name
    version: Name
    title: Line = ""
    repository: Line = ""
    note: Text = ""
    """What was assumed of an unknown version."""
    placements: tuple[OfferedPlacement, ...]
    """The usual one first."""
    backends: tuple[TrainingBackend, ...]
    """The usual one first."""
    rollouts: tuple[RolloutEngine, ...]
    """The usual one first."""
    packing: Annotated[str, one_of(*PACKINGS)] = "none"
    """How sequences become micro batches."""
    offloaded: frozenset[Annotated[str, one_of(*STATES)]] = frozenset()
    """States of training that wait on the host while colocated GPUs generate."""
    offload_choice: Annotated[str, one_of(CHOICES)] = "fixed"
    """Whether settings say what of it waits on the host."""
    engine_sleeps: bool = False
    """Weights and cache of the engine leave colocated GPUs while they train."""
    cache_share: Annotated[float, within(0.05, 1.0)] = 0.6
    """Engine's share of memory by default where pools are colocated."""
    cache_share_alone: Annotated[float, within(0.05, 1.0)] = 0.9
    """The same on GPUs of its own."""
    in_process: bool = False
    """Where generation is synchronous the engine runs in the framework's process: its host times are not hidden."""
    max_batch: Annotated[int, within(0, 1_000_000)] = 0
    """Sequences that an engine runs at once; 0 = the engine's own default."""
    max_batch_ahead: Annotated[int, within(0, 1_000_000)] = 0
    """The same where generation runs ahead of training; 0 = as ``max_batch``."""
    micro_batch: Annotated[int, within(0, 65536)] = 0
    """Sequences of a forward pass where nothing is packed; 0 = it has to be said."""
    bucket: Bytes = 0.0
    """Bytes that are gathered for one broadcast of weights; 0 = not said."""
    recomputes_logprobs: bool = True
    """Log-probs of the policy are computed by the trainer before the update, and not taken from the engine."""
    recomputes_logprobs_async: bool = True
    """The same where generation runs ahead."""
    reference: bool = True
    """A frozen reference runs in GRPO when nothing is said."""
    resamples: bool = False
    """In its synchronous DAPO groups without a gradient are sampled again; elsewhere they stay in the batch."""
    log: LogNames
    sources: Mapping[str, str] = field(default_factory=dict)
    """Fact -> where it was read, with the version it holds from."""

    @property
    def label(self) -> str:
        """name@version."""
        return f"{self.name}@{self.version}"

    @property
    def trainer(self) -> str:
        """Trainer of the library whose code runs updates and log-probs."""
        return self.backends[0].trainer

    @property
    def trainers(self) -> tuple[str, ...]:
        """Other trainers that it can use."""
        return tuple(one.trainer for one in self.backends[1:])

    @property
    def engine(self) -> str:
        """Engine and version that generate."""
        return self.rollouts[0].label

    @property
    def engines(self) -> tuple[str, ...]:
        """Other engines that it can use."""
        return tuple(one.label for one in self.rollouts[1:])

    def no_place(self, gpus: int, train_gpus: int, generate_gpus: int) -> str:
        """Why no pools of so many GPUs can be made, 0 = a pool's size is left open."""
        for flag, pool in (("--train-gpus", train_gpus), ("--generate-gpus", generate_gpus)):
            if pool > gpus:
                return f"{flag} is {pool}, of {plural(gpus, 'GPU')} in all; change {flag} or --gpus"
        if gpus == 1 and "colocated" not in self.modes:
            return f"{self.label} trains and generates on GPUs of their own; give it 2 or more"
        return (
            f"{self.label} has no placement on {plural(gpus, 'GPU')} with the pools, mode and staleness asked for; change "
            "--train-gpus, --generate-gpus, --mode, --staleness or --gpus"
        )

    @property
    def modes(self) -> tuple[str, ...]:
        """Placements that it has, the usual one first."""
        return tuple(dict.fromkeys(one.mode for one in self.placements))

    @property
    def staleness(self) -> int:
        """Most steps that generation may run ahead."""
        return max(one.staleness[1] for one in self.placements)

    @property
    def partial(self) -> bool:
        """Weights are updated while answers are generated, in some placement where generation runs ahead."""
        return any(one.partial for one in self.placements)

    @property
    def sync(self) -> Mapping[str, str]:
        """Usual method of weight sync by mode."""
        return {one.mode: one.sync[0] for one in reversed(self.placements)}

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods of weight sync that it has."""
        return tuple(dict.fromkeys(method for one in self.placements for method in one.sync))

    @property
    def packs(self) -> bool:
        """Sequences are packed up to the largest length; else each is padded to the longest of its micro batch."""
        return self.packing != "none"

    def offloading(self, said: Collection[str]) -> RlFramework:
        """With these states on the host while colocated GPUs generate. Raises PlannerError where it cannot be told so."""
        states, able = frozenset(said), self.offloaded
        if "weights" in states and "gradients" in able:
            states |= {"gradients"}  # wherever it can be said they go with the weights
        ways = {"fixed": states == able, "whole": states in (able, frozenset()), "each": states <= able}
        if not ways[self.offload_choice]:
            have = ", ".join(one for one in STATES if one in able) or "nothing"
            how = {"fixed": "which no setting changes", "whole": "or none of it", "each": "or some of it"}[self.offload_choice]
            raise PlannerError(f"{self.label} moves {have} to the host between training and generation, {how}")
        return replace(self, offloaded=states)

    def backend_of(self, trainer: str) -> TrainingBackend:
        """The back end that a trainer of profiles/trainers prices, whatever its options. Raises PlannerError."""
        named = re.split(r"[@:+]", trainer)[0]
        for one in self.backends:
            if named == re.split(r"[@:+]", one.trainer)[0]:
                return one
        have = listed([one.trainer for one in self.backends])
        raise PlannerError(f"{self.label} runs plans of trainer {have}, and this one was priced for {trainer}")

    def rollout(self, name: str = "") -> RolloutEngine:
        """An engine by name, or the usual one. Raises PlannerError."""
        for one in self.rollouts:
            if name.partition("@")[0] in ("", one.name):
                return one
        raise PlannerError(f"{self.label} generates with {listed([one.name for one in self.rollouts])}, not with {name}")

    def placement(self, mode: str, staleness: int) -> OfferedPlacement:
        """The placement of that mode and staleness. Raises PlannerError with what there is."""
        for one in self.placements:
            if one.holds(mode, staleness):
                return one
        have = "; ".join(dict.fromkeys(map(_said, self.placements)))
        raise PlannerError(f"{self.label} has no placement that is {mode} with staleness {staleness}; it has {have}")


def _said(one: OfferedPlacement) -> str:
    least, most = one.staleness
    steps = f"{least}" if least == most else f"{least} and more" if most == ASYNCHRONOUS else f"{least} to {most}"
    return f"{one.mode} with staleness {steps}"


@record
class Dated:
    """One entry of a fact's history."""

    since: Name
    """First version that it holds for."""
    value: Any
    source: Line
    """Where it was read: file of the repository, version, date."""


_FIXED = ("name", "version", "title", "repository", "note", "sources")
FACTS = tuple(name for name in fields_of(RlFramework)[0] if name not in _FIXED)
"""Facts that a file may give."""


def framework_names() -> list[str]:
    """Frameworks of the library, sorted."""
    return library.names("rl")


def load_framework(name: str) -> RlFramework:
    """A framework by "name" (its newest known version) or "name@version".

    A newer version takes the facts of the newest that is known, and the note says so. Raises UnknownNameError, PlannerError.
    """
    wanted, _, version = name.strip().partition("@")
    wanted = wanted.strip().lower().replace("_", "-")
    if wanted not in framework_names():
        raise UnknownNameError("RL framework", wanted, framework_names())
    return _load(wanted, version.strip().removeprefix("v"))


@cache
def _load(name: str, version: str) -> RlFramework:
    path = library.find("rl", name)
    known = ("name", "title", "repository", "oldest", "newest", "facts")
    data = check_keys(library.read_yaml(path), known, path.name, required=known)
    facts = check_keys(data["facts"], FACTS, f"{path.name}: facts", required=("placements", "backends", "rollouts", "log"))
    newest, oldest = (value_of(Name, data[key], path.name, key) for key in ("newest", "oldest"))
    asked, note = version or newest, ""
    if number_of(asked) > number_of(newest):
        note = f"{name} {asked} is not known; what it does is taken from {newest}"
    elif number_of(asked) < number_of(oldest):
        raise PlannerError(f"{name} {asked} is older than {oldest}, the first version that is known")
    values, sources = dict[str, Any](), dict[str, str]()
    for fact, entries in facts.items():
        history = value_of(tuple[Dated, ...], entries, f"{path.name}: facts", fact)
        if [number_of(one.since) for one in history] != sorted(number_of(one.since) for one in history):
            raise PlannerError(f"{path.name}: facts: {fact}: entries must stand in the order of their versions")
        held = [one for one in history if number_of(one.since) <= number_of(asked)]
        if held:
            values[fact], sources[fact] = held[-1].value, f"since {held[-1].since}: {held[-1].source}"
    fixed = {key: data[key] for key in ("name", "title", "repository")}
    found = read(RlFramework, {**fixed, "version": asked, "note": note, **values}, path.name)
    return replace(found, sources=sources)
