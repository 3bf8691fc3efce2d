"""Reads the text of a shell script as a tree of commands."""

import re
from typing import NoReturn

from planner.errors import PlannerError
from planner.trainers.reading.shell.scanning import closed, word_end
from planner.trainers.reading.shell.tree import Branch, Case, Function, Loop, Node, Nodes, Not, Simple, Test

DEEPEST = 64
"""Blocks inside of blocks."""
_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({_NAME})(?:\[([^\]\s]{{1,200}})\])?(\+?)=")
_REDIRECTION = re.compile(r"(?:\d{0,3}|&|\{\w+\})(<<<|<<-?|>>|>&|<&|>\||<>|>|<)")
_OPTION = r"(?:--?[A-Za-z]|[+~]{0,2}\w{1,80}\.[\w.]{1,200}=)"
_COMMENTED_OUT = re.compile(rf"\\\n(?:[ \t]*+(?:#[^\n]*)?\n)++(?:(?=[ \t]+{_OPTION})()|)")
"""Options of a command that are commented out, or empty lines: they end it too, which nobody means before an option, where the
group is found. Lines before something else are passed over in one go, or each '#...\\' in them would start the search again."""
_BLANK_BEHIND = re.compile(rf"\\[ \t]+\n(?=[ \t]*--|[ \t]+{_OPTION})")
"""Blanks behind the sign that goes on: they end a command, which nobody means before an option."""
_ENDS = ("then", "else", "elif", "fi", "do", "done", "esac", "}", ")", ";;", ";&", ";;&")


_REMARK = re.compile(r"`[ \t]*#[^`\n]*`")
"""A command that is nothing but a remark, between options: `# why`."""


def ends_early(text: str) -> bool:
    """Whether a shell ends a command before options that are read as its own; lines of an array or in quotes end none."""
    text = re.sub(r"^[ \t]*#.*", "#", _REMARK.sub("", text), flags=re.MULTILINE)
    found = [one for form in (_BLANK_BEHIND, _COMMENTED_OUT) for one in form.finditer(text)]
    places = [one.start() for one in found if one[one.re.groups] is not None]
    return not all(_inside(text, one) for one in places)


def _inside(text: str, end: int) -> bool:
    """Whether an array or quotes of an assignment are open there."""
    if text.rfind("=(", 0, end) > text.rfind(")", 0, end):
        return True
    return any((last := text.rfind(quote, 0, end)) > 0 and text[last - 1] == "=" for quote in "\"'")


def parse(text: str, where: str) -> list[Node]:
    """The commands of a script. Raises PlannerError with file and line."""
    text = _REMARK.sub("", _BLANK_BEHIND.sub("\\\n", text))
    text = _COMMENTED_OUT.sub(lambda one: one[0] if one[1] is None else "\\\n", text)
    parser = _Parser(text, where)
    nodes = parser.commands(())
    if parser.position < len(text):
        parser.stop(f"'{text[parser.position : parser.position + 10].split()[0]}' closes nothing")
    return nodes


class _Parser:
    def __init__(self, text: str, where: str) -> None:
        self.text, self.where, self.position, self.depth = text, where, 0, 0
        self.waiting: list[tuple[Simple, str, bool, bool]] = []

    def stop(self, what: str) -> NoReturn:
        line = self.text.count("\n", 0, self.position) + 1
        raise PlannerError(f"{self.where}: line {line}: not a shell script that can be followed: {what}")

    # ------------------------------------------------------------------------------------------------------- characters

    def blanks(self, lines: bool) -> None:
        """Past blanks, comments and continued lines; also past line ends where ``lines``."""
        while self.position < len(self.text):
            here = self.text[self.position]
            if here in " \t" or (here == "\n" and lines):
                self.position += 1
                if here == "\n":
                    self.documents()
            elif self.text.startswith("\\\n", self.position):
                self.position += 2
            elif here == "#":
                end = self.text.find("\n", self.position)
                self.position = len(self.text) if end < 0 else end
            else:
                return

    def documents(self) -> None:
        """Here-documents begin behind the line that names them."""
        for node, end, stripped, literal in self.waiting:
            lines = []
            while self.position < len(self.text):
                stop = self.text.find("\n", self.position)
                line = self.text[self.position : stop if stop >= 0 else len(self.text)]
                self.position = stop + 1 if stop >= 0 else len(self.text)
                line = line.lstrip("\t") if stripped else line
                if line == end:
                    break
                lines.append(line)
            node.documents.append(("\n".join(lines), literal))
        self.waiting = []

    def word(self) -> str:
        end = word_end(self.text, self.position)
        if end < 0:
            self.stop("a quote or bracket is never closed")
        found, self.position = self.text[self.position : end], min(end, len(self.text))
        return found

    def at(self, *marks: str) -> str:
        """The first of these operators that stands here."""
        return next((mark for mark in marks if self.text.startswith(mark, self.position)), "")

    def reserved(self) -> str:
        """The reserved word that stands here, not consumed."""
        match = re.compile(r"(?:[a-z]+|[{}!])(?=[\s;&|()]|$)|\[\[(?=\s)").match(self.text, self.position)
        return match.group() if match else ""

    def expect(self, word: str) -> None:
        self.blanks(lines=True)
        if not self.text.startswith(word, self.position):
            self.stop(f"'{word}' is missing")
        self.position += len(word)

    # --------------------------------------------------------------------------------------------------------- commands

    def commands(self, ends: tuple[str, ...]) -> list[Node]:
        """Commands up to one of the reserved words, which is not consumed."""
        self.depth += 1
        if self.depth > DEEPEST:
            self.stop(f"blocks inside of blocks, more than {DEEPEST} deep")
        found: list[Node] = []
        while True:
            self.blanks(lines=True)
            while self.at(";", "&") and not self.at(";;", ";&", "&&"):
                self.position += 1
                self.blanks(lines=True)
            if self.position >= len(self.text):
                if ends:
                    self.stop(f"'{ends[0]}' is missing")
                break
            here = self.reserved()
            if (here in ends or self.at(";;", ";&") or self.text[self.position] == ")") and ends:
                break
            if here in _ENDS or self.text[self.position] == ")" or self.at(";;"):
                break
            start = self.position
            found += self.chain()
            if self.position == start:
                self.stop(f"'{self.text[start]}' is not expected here")
        self.depth -= 1
        return found

    def chain(self) -> list[Node]:
        """Commands joined by && and ||: each link is a branch on the one before."""
        found = self.pipeline()
        while True:
            self.blanks(lines=False)
            joint = self.at("&&", "||")
            if not joint:
                return found
            self.position += 2
            self.blanks(lines=True)
            follower = self.pipeline()
            condition: Nodes = found if joint == "&&" else [Not(found)]
            found = [Branch([(condition, follower)], joint)]

    def pipeline(self) -> list[Node]:
        found: list[Node] = []
        while True:
            self.blanks(lines=False)
            if self.reserved() == "!":
                self.position += 1
                found.append(Not(self.pipeline()))
            else:
                found += self.command()
            self.blanks(lines=False)
            if not self.at("|") or self.at("||"):
                return found
            self.position += 2 if self.at("|&") else 1
            self.blanks(lines=True)

    def command(self) -> list[Node]:
        kinds = {
            "if": self.branch,
            "case": self.case,
            "for": self.for_loop,
            "while": self.while_loop,
            "until": self.while_loop,
        }
        here = self.reserved()
        if here in kinds:
            self.position += len(here)
            found = [kinds[here]()]
        elif here == "{":
            self.position += 1
            found = self.commands(("}",))
            self.expect("}")
        elif self.at("(("):
            end = closed(self.text, self.position + 1, ")")
            if end < 0:
                self.stop("'((' is never closed")
            found, self.position = [Test(expression=self.text[self.position + 2 : end - 2])], end
        elif self.at("("):
            self.position += 1
            found = self.commands((")",))
            self.expect(")")
        elif here == "[[":
            found = [self.test()]
        elif here == "function":
            self.position += len(here)
            self.blanks(lines=False)
            return [self.function(self.word())]
        else:
            return [self.simple()]
        self.redirections(Simple())
        return found

    def branch(self) -> Node:
        arms: list[tuple[Nodes | None, Nodes]] = []
        while True:
            condition = self.commands(("then",))
            self.expect("then")
            arms.append((condition, self.commands(("elif", "else", "fi"))))
            here = self.reserved()
            self.position += len(here)
            if here == "else":
                arms.append((None, self.commands(("fi",))))
                self.expect("fi")
            if here in ("else", "fi"):
                return Branch(arms)
            if here != "elif":
                self.stop("'fi' is missing")

    def case(self) -> Node:
        self.blanks(lines=True)
        word = self.word()
        self.expect("in")
        arms: list[tuple[list[str], Nodes]] = []
        while True:
            self.blanks(lines=True)
            if self.reserved() == "esac":
                self.position += 4
                return Case(word, arms)
            if self.at("("):
                self.position += 1
            patterns = []
            while True:
                self.blanks(lines=True)
                before = self.position
                patterns.append(self.word())
                self.blanks(lines=True)
                if self.at("|"):
                    self.position += 1
                elif self.at(")"):
                    self.position += 1
                    break
                elif self.position == before or self.position >= len(self.text):
                    self.stop("a pattern of 'case' has no ')'")
            arms.append((patterns, self.commands(("esac",))))
            if mark := self.at(";;&", ";;", ";&"):
                self.position += len(mark)

    def for_loop(self) -> Node:
        self.blanks(lines=False)
        if self.at("(("):
            end = closed(self.text, self.position + 1, ")")
            self.position = end if end > 0 else self.stop("'((' is never closed")
            return Loop(self.loop_body(), condition=[])
        name, words = self.word(), None
        self.blanks(lines=True)
        if self.reserved() == "in":
            self.position += 2
            words = []
            self.blanks(lines=False)
            while self.position < len(self.text) and self.text[self.position] not in ";\n":
                if not (one := self.word()):
                    self.stop(f"'{self.text[self.position]}' is not expected here")
                words.append(one)
                self.blanks(lines=False)
        return Loop(self.loop_body(), name=name, words=words)

    def while_loop(self) -> Node:
        condition = self.commands(("do",))
        return Loop(self.loop_body(), condition=condition)

    def loop_body(self) -> list[Node]:
        self.blanks(lines=True)
        if self.at(";"):
            self.position += 1
        self.expect("do")
        body = self.commands(("done",))
        self.expect("done")
        return body

    def function(self, name: str) -> Node:
        self.blanks(lines=False)
        if self.at("("):
            self.position += 1
            self.expect(")")
        self.blanks(lines=True)
        return Function(name, self.command())

    def test(self) -> Node:
        self.position += 2
        tokens: list[str] = []
        while True:
            self.blanks(lines=True)
            if self.reserved_end():
                self.position += 2
                return Test(tokens)
            if self.position >= len(self.text):
                self.stop("']]' is missing")
            mark = self.at("&&", "||", "(", ")", "<", ">", "|", ";", "&")
            if mark:
                self.position += len(mark)
                tokens.append(mark)
            else:
                tokens.append(self.word())

    def reserved_end(self) -> bool:
        return re.compile(r"\]\](?=[\s;&|)]|$)").match(self.text, self.position) is not None

    def simple(self) -> Node:
        node = Simple(line=self.text.count("\n", 0, self.position) + 1)
        while True:
            self.blanks(lines=False)
            if self.position >= len(self.text) or self.redirections(node):
                if self.position >= len(self.text):
                    return node
                continue
            if self.text[self.position] in "\n;&|)":
                return node
            match = _ASSIGNMENT.match(self.text, self.position)
            declares = node.words[:1] in (["export"], ["declare"], ["local"], ["readonly"], ["typeset"], ["env"])
            if match and (not node.words or declares):
                self.position = match.end()
                value = self.array() if self.at("(") else self.word()
                node.assignments.append((match[1], match[2], bool(match[3]), value))
                continue
            if self.at("("):
                if len(node.words) == 1 and re.match(r"\(\s*\)", self.text[self.position : self.position + 40]):
                    return self.function(node.words[0])
                self.stop("'(' is not expected here")
            node.words.append(self.word())

    def array(self) -> list[str]:
        self.position += 1
        found: list[str] = []
        while True:
            self.blanks(lines=True)
            if self.at(")"):
                self.position += 1
                return found
            if self.position >= len(self.text):
                self.stop("an array has no ')'")
            if not (one := self.word()):
                self.stop(f"'{self.text[self.position]}' is not expected in an array")
            found.append(one)

    def redirections(self, node: Simple) -> bool:
        """Past redirections; what is redirected changes no variable, but here-documents are kept."""
        found = False
        while True:
            self.blanks(lines=False)
            match = _REDIRECTION.match(self.text, self.position)
            if match is None:
                return found
            found, self.position = True, match.end()
            self.blanks(lines=False)
            if match[1] in (">", "<") and self.at("("):  # process substitution
                end = closed(self.text, self.position + 1, ")")
                self.position = end if end > 0 else self.stop("'(' is never closed")
                continue
            word = self.word()
            if match[1] in ("<<", "<<-"):
                mark = re.sub(r"['\"\\]", "", word)
                self.waiting.append((node, mark, match[1] == "<<-", mark != word))
            elif match[1] in (">", ">>") and not match[0].startswith("2"):
                node.target, node.appends = word, match[1] == ">>"
            elif match[1] == "<<<":
                node.input = word
            elif match[1] == "<":
                node.source = word
