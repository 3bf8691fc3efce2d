"""Mutation test of planner/cost, planner/rules and planner/curves: ``python tools/mutants.py --sample 300 --seed 20261122``.

mutmut makes the mutants (arithmetic, comparison, boolean and number sites inside functions; no strings, annotations or
calls). pytest collects the tests once. Each mutant is a fork of that process: the code objects of the mutated module are
replaced, then the tests that reach the mutated function run, shortest first, until one fails. ``--first`` and
``--last`` take a part of the sample.
"""

from __future__ import annotations

import argparse
import ast
import collections
import difflib
import functools
import gc
import importlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import libcst
import pytest
from libcst.metadata import MetadataWrapper
from mutmut.mutation import file_mutation, mutators
from mutmut.mutation.pragma_handling import IgnoredCode

ROOMS = ("planner/cost", "planner/rules", "planner/curves")
TESTS = [
    *sorted(str(path) for path in Path("tests").glob("test_cost_*.py")),
    *(f"tests/test_{name}.py" for name in (
        "rules", "overlap", "agreement", "fsdp", "gradient_sums", "cluster", "hardware", "calibrated_constants",
        "cost", "timeline", "search", "what_if", "readme", "accuracy_gate", "api", "generalises", "trainer_folders",
    )),
]  # fmt: skip
OPERATORS = [
    (libcst.BaseNumber, mutators.operator_number), (libcst.Name, mutators.operator_name),
    (libcst.UnaryOperation, mutators.operator_remove_unary_ops), (libcst.CSTNode, mutators.operator_keywords),
    (libcst.CSTNode, mutators.operator_swap_op),
]  # fmt: skip
SLOWER = 5.0  # a mutant that takes this many times the seconds of its tests, and 20 more, of a processor is killed
Site = tuple[str, libcst.Module, file_mutation.Mutation]
Mutant = tuple[str, str]  # the file and its changed source


def sites_of(path: str) -> list[Site]:
    """Every mutant of one file."""
    tree = MetadataWrapper(libcst.parse_module(Path(path).read_text()))
    visitor = file_mutation.MutationVisitor(OPERATORS, IgnoredCode(set(), set(), set()))
    tree.visit(visitor)
    return [(path, tree.module, one) for one in visitor.mutations if one.contained_by_top_level_function is not None]


def mutant_of(site: Site) -> Mutant:
    """The changed source of a site."""
    path, module, one = site
    tree = file_mutation.deep_replace(module, one.original_node, one.mutated_node)
    assert isinstance(tree, libcst.Module)
    return path, tree.code


def codes_of(code: CodeType) -> dict[str, CodeType]:
    """The functions of a module's or class's code by qualified name."""
    found = {one.co_qualname: one for one in code.co_consts if isinstance(one, CodeType)}
    inner = [codes_of(one) for name, one in found.items() if not name.endswith("<lambda>") and one.co_flags & 2 == 0]
    return functools.reduce(dict.__or__, inner, found)


def changed_lines(path: str, source: str) -> tuple[int, str]:
    """The line of a mutant and the changed text."""
    before, after = Path(path).read_text().splitlines(), source.splitlines()
    steps = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    at, end, new, new_end = next(step[1:] for step in steps if step[0] != "equal")
    return at + 1, f"{' '.join(before[at:end]).strip()}  ->  {' '.join(after[new:new_end]).strip()}"


def function_at(path: str, line: int) -> str:
    """``file:function`` or ``file:Class.method`` whose body has the line; empty for defaults and class bodies."""
    name, body = path + ":", ast.parse(Path(path).read_text()).body
    while True:
        found = [
            one for one in body if isinstance(one, (ast.ClassDef, ast.FunctionDef)) and line <= (one.end_lineno or 0)
        ]
        if not found or line < found[0].body[0].lineno:
            return ""
        name, body = name + found[0].name, found[0].body
        if isinstance(found[0], ast.FunctionDef):
            return name
        name += "."


def put(path: str, source: str) -> None:
    """Replace the code of every function of a module by that of its mutant, and forget what functions remember."""
    module = importlib.import_module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    codes = codes_of(compile(source, module.__file__ or path, "exec"))
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__module__ == module.__name__ and one.__qualname__ in codes:
            one.__code__ = codes[one.__qualname__]
    for one in gc.get_objects():
        if type(one) is functools._lru_cache_wrapper and one.__module__.startswith("planner."):
            one.cache_clear()


class Runner:
    """Runs the mutants in place of pytest's own loop."""

    def __init__(self, mutants: dict[int, Mutant], longest: float, memory: Path) -> None:
        """Tests that take ``longest`` seconds at most; ``memory`` keeps their times and what they reach."""
        self.mutants, self.longest, self.memory, self.failed, self.survived = mutants, longest, memory, "", 0
        self.skipped = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Remember the failed test."""
        self.failed = self.failed or (report.nodeid if report.failed else "")

    def reach(self, session: pytest.Session) -> dict[str, tuple[float, list[str]]]:
        """Seconds of each test without mutants, and the functions of the rooms that it enters."""
        known = json.loads(self.memory.read_text()) if self.memory.exists() else {}
        here = str(Path.cwd()) + "/"
        for item in session.items:
            if item.nodeid in known:
                continue
            seen: set[CodeType] = set()
            start = time.perf_counter()
            sys.setprofile(lambda frame, event, _, seen=seen: seen.add(frame.f_code) if event == "call" else None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            sys.setprofile(None)
            if self.failed:
                raise pytest.UsageError(f"{self.failed} fails without a mutant")
            names = {f"{one.co_filename.removeprefix(here)}:{one.co_qualname.split('.<')[0]}" for one in seen}
            known[item.nodeid] = (time.perf_counter() - start, sorted(one for one in names if one.startswith(ROOMS)))
        self.memory.parent.mkdir(parents=True, exist_ok=True)
        self.memory.write_text(json.dumps(known))
        return known

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """One fork per mutant."""
        known, kills = self.reach(session), collections.Counter[str]()
        for number, (path, source) in self.mutants.items():
            line, text = changed_lines(path, source)
            where = function_at(path, line)
            if not where:
                print(
                    f"{number} {path}:{line} | {text} | not run: no body of a function", file=sys.__stderr__, flush=True
                )
                self.skipped += 1
                continue
            able = [
                one for one in session.items if where in known[one.nodeid][1] and known[one.nodeid][0] < self.longest
            ]
            chosen = sorted(able, key=lambda one: known[one.nodeid][0] / (1 + kills[one.nodeid]))
            start = time.perf_counter()
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                signal.setitimer(signal.ITIMER_PROF, 20.0 + SLOWER * sum(known[one.nodeid][0] for one in chosen))
                put(path, source)
                for item in chosen:
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                    if self.failed:
                        break
                os.write(writing, self.failed.encode())
                os._exit(0)
            os.close(writing)
            status = os.waitpid(child, 0)[1]
            by = os.read(reading, 9999).decode() or ("a crash or the time limit" if status else "")
            os.close(reading)
            self.survived += not by
            kills[by] += 1
            verdict = f"killed by {by}" if by else f"SURVIVED {len(chosen)} tests"
            took = time.perf_counter() - start
            print(f"{number} {path}:{line} | {text} | {verdict} | {took:.1f} s", file=sys.__stderr__, flush=True)
        run = len(self.mutants) - self.skipped
        print(f"{run - self.survived} of {run} killed", file=sys.__stderr__)
        return True


def main() -> None:
    """Make the mutants, choose the sample, run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=20261122)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=None)
    parser.add_argument("--only", type=int, nargs="*", help="these numbers of the sample")
    parser.add_argument("--longest", type=float, default=100.0, help="seconds; longer tests are left out")
    parser.add_argument(
        "--memory", type=Path, default=Path("build/mutants.json"), help="what tests reach; made if absent"
    )
    parser.add_argument("--pytest", action="append", default=[], help="one more argument of pytest")
    given = parser.parse_args()
    sys.path.insert(0, str(Path.cwd()))
    files = sorted(str(path) for room in ROOMS for path in Path(room).rglob("*.py"))
    every = [one for path in files for one in sites_of(path)]
    sample = [mutant_of(one) for one in random.Random(given.seed).sample(every, given.sample)]
    print(f"{len(every)} mutants of {len(files)} files, {len(sample)} sampled", file=sys.stderr, flush=True)
    chosen = given.only or range(len(sample))[given.first : given.last]
    runner = Runner({one: sample[one] for one in chosen}, given.longest, given.memory)
    pytest.main(["-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "-s", *TESTS, *given.pytest], plugins=[runner])


if __name__ == "__main__":
    main()
