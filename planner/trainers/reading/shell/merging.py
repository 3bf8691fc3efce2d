"""What is known behind branches of which one is taken."""

import re
from collections.abc import Sequence

from planner.trainers.reading.shell.expansion import Value, Variables
from planner.trainers.reading.shell.text import MAYBE, OPTION, gap, maybe, roots


def merged(before: Variables, outcomes: list[Variables], names: list[str]) -> Variables:
    """Variables behind branches of which one is taken: what they agree on, gaps, and words that stand under a condition."""
    result = before.copy()
    result.positions = outcomes[-1].positions
    result.unset = set().union(*(one.unset for one in outcomes))
    for name in dict.fromkeys(key for one in outcomes for key in one.values):
        values = [one.values.get(name) for one in outcomes]
        first = values[0]
        if all(value == first for value in values) and first is not None:
            result.values[name] = first
        elif (program := _program(values)) is not None:
            result.values[name] = program
        elif any(_has_options(value) for value in values) or all(isinstance(value, list) for value in values):
            result.values[name] = _joined_options([value or "" for value in values], names or [name], before.values.get(name))
        else:
            inner = [one for value in values if isinstance(value, str) for one in roots(value)]
            result.values[name] = gap([*names, *inner] or [name])
    return result


def _program(values: list[Value | None]) -> str | None:
    """The program that all values are, wherever it lies: one of them its bare name, as which prints it, or all in folders called
    bin, where an empty value, which starts nothing, does not count. None = another thing, or another program."""
    there = [one for one in values if one]
    texts = [one for one in there if isinstance(one, str) and re.fullmatch(r"(\S*/)?[A-Za-z][\w.-]*", one)]
    names = {one.rpartition("/")[2] for one in texts}
    if len(names) != 1 or len(texts) != len(there):
        return None
    lies = all(re.search(r"(^|/)bin/[^/]*$", one) for one in texts)
    bare = len(there) == len(values) and any("/" not in one for one in texts)
    return texts[0] if bare or lies else None


def _has_options(value: Value | None) -> bool:
    words = [value] if isinstance(value, str) else value or []
    return any(OPTION.search(one) or MAYBE in one for one in words)


def _joined_options(values: list[Value], names: list[str], before: Value | None) -> Value:
    """Options that all have, and those of each branch under its condition; ``before``: what stood there before the branches."""
    if any(isinstance(value, list) for value in values):
        lists = [[value] if isinstance(value, str) and value else list(value) for value in values]
        same = _shared(lists)
        return [*lists[0][:same], *(word for one in lists for word in maybe(names, one[same:]))]
    texts = [str(value) for value in values]
    known = str(before or "").strip()
    if OPTION.search(known) and all(known in text for text in texts):  # a branch may put a launcher before it
        parts = [text.partition(known) for text in texts]
        heads, tails = ([maybe(names, [part[i].strip()]) for part in parts if part[i].strip()] for i in (0, 2))
        return " ".join(word for words in ([*heads, [known], *tails]) for word in words)
    start = texts[0][: _shared(texts)]
    if any(text[len(start) : len(start) + 1].strip() for text in texts):
        start = start[: len(start.rstrip()) if start[-1:].isspace() else max(start.rfind(" "), 0)]
    rest = [" ".join(maybe(names, [text[len(start) :].strip()])) for text in texts if text[len(start) :].strip()]
    return " ".join([start, *rest])


def _shared(values: Sequence[Sequence[str]]) -> int:
    """Length of what all of them begin with."""
    return next((i for i, ones in enumerate(zip(*values, strict=False)) if len(set(ones)) > 1), min(map(len, values)))
