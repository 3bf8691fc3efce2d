"""Options of a job's trainer that its user did not state: what is assumed, and what the other values would cost or gain."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner import library
from planner.assumption import Assumption
from planner.cost.estimate import Estimate, estimate
from planner.cost.state_dtypes import in_fewer_bits
from planner.layout import Layout, Schedule
from planner.record import record
from planner.rules import Job, runs_attention
from planner.trainer import Trainer, load_trainer
from planner.trainer_options import Recipe, number_of, table
from planner.workload import LOW_PRECISIONS, Workload

Ratios = Mapping[str, Sequence[float]]
"""'step_time' and 'memory' with another value of an option over those with its own."""


@record
class Alternative:
    """A job with another value of one option, or another precision."""

    option: str
    value: str
    flag: str
    """The flag that chooses it."""
    what: str
    """What the option is, for people."""
    job: Job


_OF_ANY_JOB = {"tensor", "main_gradients", "gelu", "layer_norm"}
"""Needs that leave an option one of the common ones: ordinary models and layouts meet them."""


def matters(option: str, workload: Workload, num_gpus: int) -> bool:
    """Whether an option can make a difference to a job, by what the table says that it needs."""
    given = {
        "experts": workload.model.is_moe, "adapters": workload.lora_rank > 0, "tensor": num_gpus > 1,
        "bits": in_fewer_bits(workload),
        "fp8": workload.precision in LOW_PRECISIONS, "mxfp8": workload.precision == "mxfp8",
        "main_gradients": workload.precision != "fp16",
        "pairs": workload.objective == "dpo", "gelu": workload.model.activation == "gelu" and not workload.model.gated,
        "layer_norm": workload.model.norm == "layernorm",
    }  # fmt: skip
    return all(given[need] for need in table()[option].needs)


def relevant(job: Job, said: Collection[str] = ()) -> Iterator[str]:
    """Options of the job's trainer that matter for it and were not stated."""
    for option in job.trainer.choices.options:
        if option not in said and matters(option, job.workload, job.cluster.num_gpus):
            yield option


def alternatives(job: Job, said: Collection[str] = ()) -> Iterator[Alternative]:
    """The job under every other value that an option which was not stated may well have on this hardware."""
    arch = job.cluster.hardware.arch
    for option in relevant(job, said):
        entry, values = table()[option], list(job.trainer.choices.options[option])
        possible = values if not entry.arch or arch.startswith(entry.arch) else values[:1]
        for value in possible:
            if value != job.trainer.option(option) and (entry.open is None or value in entry.open):
                changed = replace(job, trainer=job.trainer.with_option(option, value))
                if not runs_attention(changed.trainer, arch):
                    continue
                flag = f"--option {option}={value}"
                yield Alternative(option=option, value=value, flag=flag, what=entry.what, job=changed)


@record
class Unstated:
    """Layouts of a job, priced as it is and under each other value of the options that were not stated."""

    job: Job
    layouts: Sequence[Layout]
    columns: Layout
    """The layouts; and the first with two virtual stages where it has a pipeline without, which some values need."""
    now: Estimate
    others: Sequence[tuple[Alternative, Estimate]]
    """Of the columns; one that an alternative does not allow is priced all the same."""

    def ratios(self) -> list[Ratios]:
        """What each other value would change, for every layout."""
        others = [found for _, found in self.others]
        times = np.array([found.step_time / self.now.step_time for found in others]).reshape(len(others), len(self.columns))
        peaks = np.array([found.memory_peak / self.now.memory_peak for found in others]).reshape(times.shape)
        return [
            {"step_time": tuple(map(float, times[:, number])), "memory": tuple(map(float, peaks[:, number]))}
            for number in range(len(self.layouts))
        ]


def priced(jobs: Iterable[Alternative], columns: Layout) -> list[tuple[Alternative, Estimate]]:
    """Layouts under each of some jobs."""
    return [(one, estimate(one.job.workload, one.job.cluster, one.job.trainer, columns)) for one in jobs]


def unstated(job: Job, layouts: Sequence[Layout], said: Collection[str] = ()) -> Unstated:
    """Layouts under each other value of the options that were not stated; ``said``: those that the user or the recipe states."""
    first = layouts[0]
    more = [first.replace(vpp=2, schedule=int(Schedule.INTERLEAVED))] if int(first.pp) > 1 and int(first.vpp) == 1 else []
    columns = Layout.stack([*layouts, *more])
    now = estimate(job.workload, job.cluster, job.trainer, columns)
    return Unstated(job=job, layouts=layouts, columns=columns, now=now, others=priced(alternatives(job, said), columns))


def _whose(trainer: Trainer) -> str:
    """The trainer with the version whose options its file knows: of a newer one, those of the newest."""
    version = trainer.choices.version
    newest = load_trainer(trainer.name).choices.version if version and trainer.name in library.names("trainers") else version
    if version != newest and number_of(version) > number_of(newest):
        return f"{trainer.name} {newest} ({version} is newer than what is known)"
    return f"{trainer.name} {version}".rstrip()


def assumed_options(job: Job, said: Collection[str], recipe: Recipe) -> list[Assumption]:
    """What is taken for options that were not stated: one line for each that this job in particular needs, one for the others."""
    trainer, choices = job.trainer, job.trainer.choices
    whose = _whose(trainer)
    found, others = list[Assumption](), list[str]()
    for option in relevant(job, said):
        now = trainer.option(option) or "of its own"
        if option in recipe.options:
            why = f"published recipe of {whose} for {job.model.name} on {job.cluster.hardware.name}"
        else:
            why = f"{whose}'s default: {table()[option].what}"
        if {*table()[option].needs} - _OF_ANY_JOB or option in recipe.options:
            other = next((value for value in choices.options[option] if value != now), now)
            found.append(Assumption(option.replace("_", " "), now, why, f"--option {option}={other}"))
        else:
            others.append(f"{option} {now}")
    if others:
        found.append(Assumption("options", ", ".join(others), f"{whose}'s defaults", "--option NAME=VALUE"))
    return found
