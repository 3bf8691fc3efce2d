"""Refusals that one word settles: they are asked together with all that the job without it leaves open, as one round is enough."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from planner.errors import PlannerError, shown
from planner.trainers.reading.configuration import NEEDED, Reading, left_open
from planner.trainers.reading.given import Given, OpenQuestionsError, Question

SETS = re.compile(r"--set ([\w.-]{1,100})=(\S{1,100})")
SETTLES = re.compile(r"(--set \S{1,200} ){1,24}imports (the job|a step)\b")
"""How a sentence that refuses says by itself with which words the job is imported."""
MOST_REFUSALS = 8
WITHOUT = ("false", "null", "none", "[]", "0", "1")
"""Answers that import a job without what they are of."""


def settled_by(error: PlannerError) -> dict[str, str]:
    """The words with which a refused job is imported, by the sentence that refuses it; {} = there are none."""
    said = SETTLES.search(str(error))
    return dict(SETS.findall(said[0])) if said is not None else {}


def ask_what_else_is_open(path: Path, reader: Callable[[Path, Given], Reading], said: Given, error: PlannerError) -> None:
    """Raises OpenQuestionsError with what settles a refusal and all that the job is open in then, or the refusal that no word
    settles; returns where there is nothing to add to ``error``."""
    settled: dict[str, str] = {}
    refused: list[str] = []
    found: list[Question] = list(said.questions)
    while (words := settled_by(error)) and not words.keys() & settled.keys() and len(refused) < MOST_REFUSALS:
        refused.append(str(error))
        settled |= words
        trial = replace(said, settings={**said.settings, **settled}, used=set(), questions=[])
        try:
            reading = reader(path, trial)
            found += left_open(reading, {name: getattr(said, name) or getattr(reading, name) for name in NEEDED})
        except OpenQuestionsError as more:
            found += more.questions
        except PlannerError as again:
            error = again
            found += trial.questions
            continue
        found += trial.questions
        break
    else:
        if refused and not settled_by(error) and not found:
            raise error
    others = [one for one in {one.name: one for one in found}.values() if one.name not in settled]
    if refused and (others or len(refused) > 1):
        settles = [Question(name=name, about="it is not priced otherwise", choices=(value,)) for name, value in settled.items()]
        raise OpenQuestionsError(str(path), others, refused, settles)


def refuse_what_stays(path: Path, said: Given, questions: Sequence[Question]) -> None:
    """Raises PlannerError for words that are asked about again, as the user has said that the job has what no plan has: who says
    true where only false imports the job is not asked the same again."""
    on = [one for one in questions if one.name in said.settings and one.choices and set(map(str.lower, one.choices)) <= set(WITHOUT)
          and said.settings[one.name].lower() not in map(str.lower, one.choices)]  # fmt: skip
    if on:
        stays = ", ".join(f"{one.name}={shown(said.settings[one.name])}" for one in on)
        sets = " ".join(f"--set {one.name}={one.choices[0]}" for one in on)
        raise PlannerError(f"{path}: {stays}: not priced, as no plan has what it does; only {sets} imports the job, without it")
