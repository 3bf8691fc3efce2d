"""Texts in a Python newer than the interpreter's: quotes of an f-string inside its own braces, which are of 3.12."""

import ast
import re
import sys

VERSION = " {}.{}, which reads it".format(*sys.version_info)
_STARTS = re.compile(r"#[^\n]*|([A-Za-z]{0,2})(\"\"\"|'''|\"|')")
"""A comment, or what opens a string."""
_PREFIX = re.compile(r"(?<![A-Za-z0-9_])[A-Za-z]{1,2}$")
OTHER = {'"': "'", "'": '"'}


def parsed(text: str) -> ast.Module:
    """The syntax tree of a text. Raises as ast.parse does."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        if not error.msg.startswith("f-string") or (older := with_older_quotes(text)) is None:
            raise
        return ast.parse(older)


def with_older_quotes(text: str) -> str | None:
    """The same text, each character in its place, with the other quotes around strings inside an f-string of the same quotes; None
    where that is not enough.  [PEP 701]"""
    swaps: dict[int, str] = {}
    at = 0
    while (start := _STARTS.search(text, at)) is not None:
        at = start.end()
        if start[2] is not None:
            end = _end(text, at, start[2], "f" in start[1].lower(), swaps)
            if end is None:
                return None
            at = end
    found = list(text)
    for place, quote in swaps.items():
        found[place] = quote
    return "".join(found) if swaps else None


def _end(text: str, at: int, quote: str, formatted: bool, swaps: dict[int, str]) -> int | None:
    """Where a string that is open at ``at`` ends, with what must change inside it; None where it does not end, or cannot change."""
    depth = 0
    while at < len(text):
        one = text[at]
        if depth and one in OTHER:
            inner = one * 3 if text.startswith(one * 3, at) else one
            prefix = _PREFIX.search(text[max(at - 3, 0) : at])
            end = _end(text, at + len(inner), inner, prefix is not None and "f" in prefix[0].lower(), swaps)
            if end is None or (one == quote[0] and not _swapped(text, at, end, inner, swaps)):
                return None
            at = end
        elif depth:
            depth += (one in "{[(") - (one in ")]}")
            at += 1
        elif text.startswith(quote, at):
            return at + len(quote)
        elif one == "\\" or (formatted and text.startswith("{{", at)):
            at += 2
        else:
            depth = int(formatted and one == "{")
            at += 1
    return None


def _swapped(text: str, start: int, end: int, quote: str, swaps: dict[int, str]) -> bool:
    """Gives a string the other quotes; False where its text does not allow that."""
    other = OTHER[quote[0]]
    last = next(reversed(swaps), -1)  # the furthest, as texts are read in order
    if len(quote) > 1 or last > start or other in text[start:end] or "\\" in text[start:end]:
        return False
    swaps |= {start: other, end - 1: other}
    return True
