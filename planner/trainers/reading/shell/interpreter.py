"""Follows a shell script: assignments, branches, functions. It records commands and runs none of them."""

import os.path
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from planner import library
from planner.errors import PlannerError
from planner.trainers.reading.given import ARGUMENTS
from planner.trainers.reading.shell.built_in import (
    MOST_ROUNDS,
    Script,
    StopError,
    called_from_above,
    in_turn,
    keyed,
    let,
    read_into,
    recorded,
    refer,
    remote_text,
)
from planner.trainers.reading.shell.conditions import Verdict, both, either, judged, searched
from planner.trainers.reading.shell.expansion import Value, Variables, added_to, calculated, expanded, joined
from planner.trainers.reading.shell.grammar import parse
from planner.trainers.reading.shell.merging import merged
from planner.trainers.reading.shell.starting import (
    at_end,
    batch_options,
    before_file,
    job_of,
    launcher_variables,
    of_written,
    place_of_file,
    script_near,
    script_place,
    with_program,
    without_env,
    without_places,
)  # fmt: skip
from planner.trainers.reading.shell.text import CLOSE, cleaned, gap, is_open, quoted_words, roots, started_inside
from planner.trainers.reading.shell.tree import Branch, Case, Command, Function, Loop, Nodes, Not, Simple, Test
from planner.trainers.reading.shell.written import hand_on, of_arms, record
from planner.trainers.reading.values import read_text

MOST_STEPS = 20_000
DEEPEST = 24
"""Functions that call functions, scripts inside of scripts."""
_DECLARE = ("export", "declare", "local", "readonly", "typeset", "env")
_QUIET = ("echo", "printf", "cat", "mkdir", "cd", "rm", "cp", "ls", "set", "read", "wait", "trap", "sleep", "chmod", "grep", "sed")
_SILENT = ("mkdir", "cd", "set", "wait", "trap", "sleep", "chmod", "return", "shift", "unset", "local", "[", "test")
"""Commands that write nothing."""


def evaluate(text: str, where: str, given: Mapping[str, str], directory: Path | None = None) -> Script:
    """Follows a script. ``given``: variables whose values the user says, which no assignment changes; ``directory``: where the
    scripts lie that it reads. Raises PlannerError for what is no script, and for one that grows without end."""
    text = cleaned(text)
    variables = Variables(where, given, launcher_variables(batch := batch_options(text)))
    follower = _Follower(where, variables, directory)
    follower.script.batch = batch
    text = without_places(text, variables.text)
    if ARGUMENTS in given:
        follower.variables.positions = quoted_words(given[ARGUMENTS])
        follower.variables.mentioned.add(ARGUMENTS)
    follower.run(parse(text, where))
    return follower.script


class _Follower:
    def __init__(self, where: str, variables: Variables, directory: Path | None) -> None:
        self.where, self.directory, self.went = where, directory, directory
        self.script = Script(variables)
        self.functions: dict[str, Nodes] = {}
        self.steps = self.depth = 0
        variables.output = self.output
        self.written: list[str] | None = None
        """What the function at hand has written so far, where its output is wanted; None = it is not, or it is not known."""

    @property
    def variables(self) -> Variables:
        return self.script.variables

    # ----------------------------------------------------------------------------------------------------------- blocks

    def run(self, nodes: Nodes) -> None:
        """Follows commands up to an ``exit``."""
        with suppress(StopError):
            self.follow(nodes)

    def follow(self, nodes: Nodes) -> None:
        for node in nodes:
            self.steps += 1
            if self.steps > MOST_STEPS:
                raise PlannerError(f"{self.where}: more than {MOST_STEPS} commands when it is followed; give it in a shorter form")
            match node:
                case Simple():
                    self.simple(node)
                case Branch():
                    self.branch(node)
                case Case():
                    self.case(node)
                case Loop():
                    self.loop(node)
                case Function(name=name, body=body):
                    self.functions[name] = body
                case Not(body=body):
                    self.follow(body)
                case Test(expression=str() as expression):
                    let([expression], self.variables)

    def branch(self, node: Branch) -> None:
        arms: list[tuple[Verdict, Nodes]] = []
        for condition, body in node.arms:
            verdict = Verdict(True) if condition is None else self.condition(condition)
            if condition is not None:
                self.inside(condition)
            arms.append((verdict, body))
        self.arms(arms)

    def inside(self, condition: Nodes) -> None:
        """Commands and assignments that stand in a condition: of '||' and '&&' mostly."""
        for node in condition:
            if isinstance(node, Not):
                self.inside(node.body)
            elif isinstance(node, Branch) or (isinstance(node, Simple) and node.words[:1] not in (["["], ["test"])):
                self.follow([node])

    def case(self, node: Case) -> None:
        word = joined(node.word, self.variables)
        patterns = [[joined(one, self.variables) for one in some] for some, _ in node.arms]
        bodies = [body for _, body in node.arms]
        if is_open(word):
            names = roots(word)
            for one in names[:1]:
                known = self.script.choices.setdefault(one, [])
                known += [text for some in patterns for text in some if not re.search(r"[*?\[]", text)]
            default = [Verdict(True) if "*" in some else Verdict(None, names) for some in patterns]
            self.arms(list(zip(default, bodies, strict=True)))
            return
        for some, body in zip(patterns, bodies, strict=True):
            if len(word) < 1000 and any(fnmatchcase(word, one) for one in some):
                self.arms([(Verdict(True), body)])
                return

    def arms(self, arms: list[tuple[Verdict, Nodes]]) -> None:
        """Follows the arm that is taken; where that is not known all that may be, and joins what they leave."""
        names: list[str] = []
        outcomes: list[tuple[Variables, list[Command]]] = []
        closed, written = False, list(self.written or ())
        before, texts = list(self.script.documents), list[list[tuple[str, str]]]()
        for verdict, body in arms:
            if verdict.value is False:
                continue
            self.script.documents = list(before)
            variables, commands, failed = self.aside(body)
            names += verdict.names
            texts.append(self.script.documents)
            if not failed:
                outcomes.append((variables, commands))
            if verdict.value is True:
                closed = bool(outcomes)
                break
        if not closed:
            outcomes.append((self.variables, []))
            texts.append(before)
        self.script.documents = [*before, *(text for some in texts for text in some[len(before) :])]
        if len(outcomes) == 1:
            self.script.variables = outcomes[0][0]
            self.script.commands += outcomes[0][1]
            return
        self.written = None if self.written != written else self.written
        self.script.documents += of_arms(texts, names)
        for _, commands in outcomes:
            self.script.commands += [replace(one, under=(*names, *one.under) or ("",)) for one in commands]
        self.script.variables = merged(self.variables, [variables for variables, _ in outcomes], names)

    def aside(self, body: Nodes) -> tuple[Variables, list[Command], bool]:
        """(variables, commands, whether it fails) of a block that may not be taken."""
        before, kept, failed = self.variables, self.script.commands, False
        self.script.variables, self.script.commands = before.copy(), []
        try:
            self.follow(body)
        except StopError as stopped:
            failed = stopped.failed
        found = self.variables, self.script.commands, failed
        self.script.variables, self.script.commands = before, kept
        return found

    def loop(self, node: Loop) -> None:
        if node.condition is not None or node.words is None:  # it reads the script's arguments, or waits, or tries again
            for _ in range(MOST_ROUNDS if node.condition and self.variables.positions else 0):
                left = list(self.variables.positions)
                if self.condition(node.condition or []).value is False or not left:
                    return
                self.follow(node.body)
                if self.variables.positions == left:
                    return
            if node.condition and self.condition(node.condition).value is False:
                return
            self.script.commands += self.aside(node.body)[1] if node.condition is not None else []
            return
        words = [one for raw in node.words for one in expanded(raw, self.variables)]
        if not words and not self.depth and any(re.search(r"\$[@*]", raw) for raw in node.words):
            apart = all(isinstance(one, Branch | Case) for one in node.body) and not self.aside(node.body)[1]
            words = [] if apart else [gap([node.name])]  # who calls the script says them; of options none are given
        if not words:
            return
        if in_turn(words, node, bool(len(words) > 1 and self.aside(node.body)[1]), self.variables):
            for one in words:
                self.variables.put(node.name, one)
                self.follow(node.body)
            return
        if len(words) > 1:
            self.script.choices.setdefault(node.name, []).extend(words)
        told = len(words) == 1 and (not is_open(words[0]) or roots(words[0]))
        self.variables.put(node.name, words[0] if told else gap([node.name]))
        self.follow(node.body)

    # ------------------------------------------------------------------------------------------------------- conditions

    def condition(self, nodes: Nodes) -> Verdict:
        """Of the last command of a list."""
        if not nodes:
            return Verdict(True)
        node, variables, choices = nodes[-1], self.variables, self.script.choices
        match node:
            case Not(body=body):
                return self.condition(body).inverted()
            case Test(expression=str() as expression):
                value = calculated(expression.replace('"', ""), variables)
                return Verdict(None, roots(value)) if is_open(value) else Verdict(value != "0")
            case Test(tokens=tokens):
                return judged(tokens, variables, choices, double=True)
            case Branch(arms=[(condition, body)], joint=joint) if joint and condition is not None:
                first, second = self.condition(condition), self.condition(body)
                return both(first, second) if joint == "&&" else either(first.inverted(), second)
            case Simple(words=["grep", *words]) if len(nodes) > 1 and isinstance(before := nodes[-2], Simple):
                echoed = before.words[1:] if before.words[:1] == ["echo"] else ["$(unknown)"]
                text = " ".join(joined(one, variables) for one in echoed)
                return searched([one for raw in words for one in expanded(raw, variables)], text)
            case Simple(words=["declare", "-p", name]):
                return Verdict(name in variables.values)
            case Simple(words=["[", *tokens, "]"]) | Simple(words=["test", *tokens]):
                return judged(tokens, variables, choices, double=False)
            case Simple(words=words) if words[:1] == ["export"] or not (words or re.search(r"[$][(]|`", str(node.assignments))):
                return Verdict(True)  # an assignment does not fail
            case Simple(words=[word]):
                return Verdict({"true": True, ":": True, "false": False}.get(text := joined(word, variables)), roots(text))
        return Verdict(None)

    def simple(self, node: Simple) -> None:
        for name, subscript, added, raw in node.assignments:
            self.assign(name, subscript, added, raw)
            refer(node.words, name, self.variables)
            self.nested(started_inside(raw))
        given, words = without_env([one for raw in node.words for one in expanded(raw, self.variables)])
        hand_on(given, words, self.script)
        record(node, words, self.script, self.directory)
        if not words or words[0] in _DECLARE or words[0] in ("[", "test"):
            return
        name, rest = words[0], words[1:]
        if name in ("echo", "printf") and not node.target and self.written is not None:
            self.written += [" ".join(rest)]
        elif name not in _SILENT and name not in self.functions:
            self.written = None
        if node.documents and re.search(r"^(sbatch|salloc|qsub|bsub|bash|sh)(?!\S)| (ba|z)?sh( -\w+)*$", " ".join(words)):
            self.behind(before_file(words, len(words)), partial(self.submitted, self.script.documents[-1][1], words))
        self.went = self.directory / rest[0] if name == "cd" and self.directory and rest else self.went
        if (place := place_of_file(words)) >= 0 and (file := script_near(self.directory, words[place], self.went)) is not None:
            self.behind(before_file(words, place), partial(self.started, file, words, place))
        self.script.edits += [rest] * (name == "sed")
        if name in ("exit", "return"):
            raise StopError(failed=bool(rest) and rest[0] != "0" and not is_open(rest[0]))
        if name in ("source", "."):
            self.source(rest[0] if rest else "")
        elif name == "eval":
            self.nested(" ".join(rest))
        elif name in self.functions:
            self.call(name, rest)
        elif name == "set" and "--" in rest:
            self.variables.positions = rest[rest.index("--") + 1 :]
        elif name == "shift":
            self.variables.positions = self.variables.positions[int(rest[0]) if rest and re.fullmatch(r"\d{1,9}", rest[0]) else 1 :]
        elif name == "unset":
            for one in rest:
                self.variables.values.pop(one, None)
        elif name == "read":
            read_into(node, rest, self.script.documents[-1][1] if node.documents else None, self.variables)
        elif name == "let":
            let(rest, self.variables)
        elif name not in _QUIET:
            self.command(words)

    def behind(self, before: list[str], run: Callable[[], None]) -> None:
        """Runs what a command starts: what that records stands behind the command's own words."""
        inner = len(self.script.commands)
        run()
        self.script.commands[inner:] = [replace(one, words=[*before, *one.words]) for one in self.script.commands[inner:]]

    def command(self, words: list[str]) -> None:
        """Records a command that has options or a file of settings; of ``srun bash -c '...'`` what the text says, behind it."""
        if text := remote_text(words):
            self.nested(text)
            return
        if place := script_place(words):
            self.behind(words[: place - 2], partial(self.nested, words[place]))
            return
        if (inner := of_written(words, dict(self.script.documents))) is not None:
            self.behind(inner[0], partial(self.submitted, inner[1], words))
            return
        words = with_program(words, self.directory, self.went, self.variables.text)
        kept = self.script.commands if recorded(words) else self.script.bare
        kept.append(Command(words, seen=self.variables.text("CUDA_VISIBLE_DEVICES") or "", batch=self.script.batch))

    def submitted(self, text: str, words: list[str]) -> None:
        """Follows what a here-document gives to a batch system; its options are those of the job."""
        self.script.batch = job_of(text, words, self.script.batch, self.variables.put)
        self.nested(text)

    def nested(self, text: str) -> None:
        """Follows a text as a script of its own."""
        self.deeper(parse(text, self.where))

    def call(self, name: str, arguments: list[str]) -> None:
        positions, self.variables.positions = self.variables.positions, arguments
        self.deeper(self.functions[name])
        self.variables.positions = positions

    def output(self, words: list[str]) -> str | None:
        """What a function writes, or a block behind "if"; what it assigns and starts is its own."""
        self.functions |= {"if": parse(words[1], self.where)} if words[:1] == ["if"] else {}
        if not words or words[0] not in self.functions or self.depth >= DEEPEST:
            texts = {one.removeprefix("./"): text for one, text in self.script.documents if words[:1] == ["cat"]}
            return texts.get(words[-1].removeprefix("./")) if words else None
        before, outer, commands = self.variables, self.written, self.script.commands
        self.script.variables, self.script.commands, self.written = before.copy(), [], []
        try:
            self.call(words[0], words[1:])
            found = self.written
        finally:
            self.script.variables, self.script.commands, self.written = before, commands, outer
        return None if found is None else "\n".join(found)

    def deeper(self, nodes: Nodes) -> None:
        """Follows a function or another script; one that calls itself again and again is left alone."""
        if self.depth >= DEEPEST:
            return
        self.depth += 1
        try:
            self.follow(nodes)
        except StopError as stopped:
            if stopped.failed:
                raise
        finally:
            self.depth -= 1

    def source(self, name: str) -> None:
        """Follows a script that lies where this one does; what its path begins with may be unknown."""
        rest = name.rpartition(CLOSE)[2].lstrip("/") if is_open(name) else name
        path = self.directory / rest if self.directory and rest and not os.path.isabs(rest) else Path(rest or "?")
        if self.directory and rest and not library.is_file(path):  # as the author's machine has it, or of a folder above
            path = (at_end(self.directory, path) if os.path.isabs(rest) else script_near(self.directory, name, self.went)) or path
        path = path if self.directory is None or library.is_file(path) else called_from_above(self.directory, rest) or path
        if self.directory is None or not library.is_file(path):
            if rest:
                self.script.missing.append(rest)
            return
        self.deeper(parse(cleaned(read_text(path)), str(path)))

    def started(self, file: Path, words: list[str], place: int) -> None:
        """Follows a script that is started with arguments; what it assigns is its own."""
        text, before, kept = cleaned(read_text(file)), dict(self.variables.values), (self.variables.positions, self.script.batch)
        self.script.batch = job_of(text, words[:place], self.script.batch, self.variables.put)
        self.variables.positions = words[place + 1 :]
        self.deeper(parse(text, str(file)))
        self.variables.values, (self.variables.positions, self.script.batch) = before, kept

    def assign(self, name: str, subscript: str | None, added: bool, raw: str | list[str]) -> None:
        variables = self.variables
        if isinstance(raw, list):
            if keyed(name, raw, variables):
                return
            value: Value = [one for word in raw for one in expanded(word, variables)]
        else:
            value = joined(raw, variables)
        if subscript is not None:
            variables.put(f"{name}[{joined(subscript, variables)}]", value)
            return
        if added and (before := variables.get(name)) is not None:
            value = added_to(before, value)
        if isinstance(value, str) and re.fullmatch("\ue000[\\d,]*\ue001", value):
            variables.unset |= {name} if re.search(r"\d", value) else set()  # what a command writes, no caller says
            value = gap([name])
        variables.put(name, value)
