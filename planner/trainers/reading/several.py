"""A script that starts several trainings: which of them is read, and what is asked where they differ in what decides."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from planner.errors import PlannerError, shown
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import WHICH_TRAINING, Given, Question, note_of_several
from planner.trainers.reading.shell.text import shown_text

MOST = 8
"""Trainings that are compared."""
ASIDE = ("notes", "unread", "noise", "questions", "model_name", "hardware")
"""What of two readings may differ in trainings that cost the same."""
LONGEST = 60


def compared(path: Path, reader: Callable[[Path, Given], Reading], said: Given, first: Reading) -> Reading:
    """The reading of a script's training with the note that there are others, and with a question where those that are read too
    differ from it in what decides time or memory."""
    trainings = said.trainings
    if len(trainings) < 2:
        return first
    first = dataclasses.replace(first, notes=tuple(dict.fromkeys([*first.notes, *note_of_several(said)])))
    if WHICH_TRAINING in said.settings:
        return first
    differ: dict[int, list[str]] = {}
    for place in range(1, min(len(trainings), MOST)):
        if trainings[place] in trainings[:place]:
            continue
        other = dataclasses.replace(
            said, settings={**said.settings, WHICH_TRAINING: str(place + 1)}, used=set(), questions=[], choices={}, trainings=[]
        )
        try:
            found = reader(path, other)
        except PlannerError:  # the note says that it is not read
            continue
        said.used.update(other.used - {WHICH_TRAINING})
        if names := _different(first, found):
            differ[place] = names
    if not differ:
        return first
    names = list(dict.fromkeys(name for some in differ.values() for name in some))
    texts = [shown_text(trainings[place]) for place in (0, *differ)]
    apart = next((at for at, some in enumerate(zip(*texts, strict=False)) if len(set(some)) > 1), 0)
    option, word = (texts[0][:apart].rfind(one) + 1 for one in (" -", " "))
    start = 0 if max(map(len, texts)) <= LONGEST else option if apart - option < LONGEST // 2 else word  # 0: they are told whole
    told = ", ".join(f"{place + 1} {shown(text[start:][:LONGEST])}" for place, text in zip((0, *differ), texts, strict=True))
    about = f"which of its trainings, which differ in {', '.join(names[:6])}: {told}"
    question = Question(name=WHICH_TRAINING, about=about, choices=tuple(str(place + 1) for place in (0, *differ)))
    return dataclasses.replace(first, questions=(question, *first.questions))


def _different(one: Reading, other: Reading) -> list[str]:
    """Names of what differs; a model that only one of them names may be what the other has trained."""
    unknown = ("model", "architecture") if None in (one.model, other.model) else ()
    names = [each.name for each in dataclasses.fields(Reading) if each.name not in (*ASIDE, *unknown, "fields")]
    found = [name for name in names if getattr(one, name) != getattr(other, name)]
    keys = dict.fromkeys([*one.fields, *other.fields])
    return found + [key for key in keys if one.fields.get(key) != other.fields.get(key)]
