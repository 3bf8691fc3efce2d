"""The one exception family shown to users: a sentence, never a traceback."""

import re
from collections.abc import Iterable
from itertools import takewhile


class PlannerError(Exception):
    """What was asked, why it cannot be, and what to change; the command line prints it and exits with code 2.

    Of a value of a file that is too long to read, only its beginning and its end are in the sentence (``bounded``).
    """

    def __init__(self, sentence: str = "") -> None:
        super().__init__(bounded(sentence))


class NoMappingError(PlannerError):
    """A file in YAML holds a text, a list or a number where a mapping is asked for."""


class UnknownNameError(PlannerError):
    """A name that is not in the library; the message lists what exists, nearest first, of many the first few."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        said = f"'{name}'" if name.isprintable() and len(name) <= 200 else shown(name)
        nearest = nearest_first(name, known)
        more = len(nearest) - FEW if len(nearest) > FEW + 2 else 0
        text = ", ".join(nearest[: FEW if more else None])
        rest = f" and {more} more" + (f" ('plan {LISTED_BY[kind]}')" if kind in LISTED_BY else "") if more else ""
        several = kind in LISTED_BY and "," in name and all(one.strip() for one in name.split(","))
        one = f"; one {kind} at a time, plan what-if compares several" if several else ""
        super().__init__(f"unknown {kind} {said}{one}; known, nearest first: {text}{rest}")


FEW = 8
"""Names that a message lists when there are many."""
LISTED_BY = {"model": "models", "hardware": "hardware", "trainer": "trainers"}
"""Command that lists all names of a kind."""


LONG_WORD, LONG_SENTENCE = 300, 2900
"""Characters beyond which a word, or a sentence, is cut; no path or name that people write is as long as the first."""


def bounded(sentence: str) -> str:
    """A sentence without the middle of words that are too long, nor its own: whoever wrote it may have forgotten ``shown``."""
    words = re.sub(rf"\S{{{LONG_WORD},}}", lambda word: f"{word.group()[:57]}...{word.group()[-57:]}", sentence)
    half = LONG_SENTENCE // 2
    return words if len(words) <= LONG_SENTENCE else f"{words[:half]} ... {words[-half + 5:]}"


def shown(value: object) -> str:
    """A value for a message: as Python writes it, cut when long; some integers and nested data cannot be written."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more than 4300 digits
        return "too large to show"
    return text if len(text) <= 60 else f"{text[:57]}..."


def listed(names: Iterable[str], word: str = "or") -> str:
    """Names as alternatives: a, b or c; or, with another word, together."""
    *some, last = names
    return f"{', '.join(some)} {word} {last}" if some else last


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """The known names, sorted by likeness to ``name`` (most alike first, ties alphabetically); an equal beginning counts too."""
    import difflib

    name = name[:100]  # the time to compare grows with the square of the length

    def distance(candidate: str) -> tuple[float, str]:
        ratio = difflib.SequenceMatcher(None, name.lower(), candidate.lower()).ratio()
        begun = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(name.lower(), candidate.lower(), strict=False)))
        return -ratio - begun / max(len(name), 1), candidate

    return sorted(known, key=distance)


CONTROL = "\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff"
"""For a class of a regular expression: control characters but tab and line feed, separators of lines, marks that turn the
direction of text, halves of surrogate pairs. No text of a file has them: they end comments of scripts and fool terminals."""


def printable(text: str) -> str:
    """Text whose characters do not steer a terminal: control characters as Python writes them."""
    return re.sub(f"[{CONTROL}]", lambda sign: repr(sign.group())[1:-1], text)
