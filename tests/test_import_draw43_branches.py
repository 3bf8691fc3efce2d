"""Branches of a program that local names of its options decide."""

from __future__ import annotations

import ast

import pytest

from planner.trainers.reading.branches import taken_branches
from planner.trainers.reading.given import MOST_SHOWN, Given, Question

PROGRAM = """
parser.add_argument("--size", default="small")
parser.add_argument("--other", default="none")
parser.add_argument("--deep", action="store_true")
def configure(args):
    size = args.size
    {}
    if {}:
        taken()
    else:
        left()
"""


@pytest.mark.parametrize(("test", "says"), [
    ("size == 'small' or size == 'small_instruct'", "taken"),
    ("size == 'big' or size == 'small'", "taken"),
    ("size == 'small' and args.other == 'all'", "left"),
    ("size in ('big', 'huge')", "left"),
    ("size not in ['big', 'huge']", "taken"),
    ("size == 'small' or unknown()", "taken"),
    ("size == 'big' and unknown()", "left"),
    ("size == 'big' or unknown()", ""),
    ("size in sizes", ""),
    ("not (args.deep or size == 'big')", "taken"),
])  # fmt: skip
def test_local_names_of_options_decide_branches(test: str, says: str) -> None:
    text = ast.unparse(taken_branches(ast.parse(PROGRAM.format("pass", test)), Given(), []))
    assert [one for one in ("taken()", "left()") if one in text] == ([f"{says}()"] if says else ["taken()", "left()"])


@pytest.mark.parametrize("more", ["size = size + 'x'", "size = args.other", "size += 'x'", "for size in names: pass"])
def test_a_name_that_is_something_else_too_decides_nothing(more: str) -> None:
    text = ast.unparse(taken_branches(ast.parse(PROGRAM.format(more, "size == 'small'")), Given(), []))
    assert "taken()" in text and "left()" in text


def test_what_is_said_goes_before_the_default_and_no_choice_falls_off() -> None:
    said, defaults = Given(settings={"size": "big"}), list[str]()
    text = ast.unparse(taken_branches(ast.parse(PROGRAM.format("pass", "size in ['big']")), said, defaults))
    assert "left()" not in text and "size" not in defaults
    assert "h|i" in str(Question(name="x", choices=tuple("abcdefghi")))
    many = str(Question(name="x", choices=tuple(map(str, range(3 * MOST_SHOWN)))))
    assert many.endswith("|7|...")
