"""Expands words of a shell script: variables, defaults, arithmetic, arrays. Commands in them are gaps."""

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from planner.errors import PlannerError
from planner.trainers.reading.shell.arithmetic import OUTER, arithmetic
from planner.trainers.reading.shell.queries import queried
from planner.trainers.reading.shell.scanning import skipped, word_end
from planner.trainers.reading.shell.text import MAYBE, gap, is_open, roots

MOST_TEXT = 1_000_000
"""Characters that a value may have: scripts can double a text in each line."""
Value = str | list[str]
_SPECIAL = {"?": "0", "$": "1", "!": "1", "-": ""}
"""What a command left, and numbers of processes: nothing that runs here fails."""
_PARAMETER = re.compile(r"([A-Za-z_]\w*|\d{1,3}|[@*#?$!-])(?:\[([^\]]{0,200})\])?", re.DOTALL)
_LIST = re.compile(r"\$(?:@|\{\w+\[@\]|\{@)")
"""What is no field at all where it has no elements."""
DEEPEST = 64
"""Words inside of words of an expansion."""
_PLAIN = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")


class Variables:
    """Variables of a script. What the user gave stays, whatever the script assigns."""

    def __init__(self, where: str, given: Mapping[str, str], usual: Mapping[str, str]) -> None:
        """``given`` by the user; ``usual``: values that the launcher would set."""
        self.where, self.given = where, dict(given)
        self.values: dict[str, Value] = {**usual, **given}
        self.mentioned: set[str] = set()
        self.positions: list[str] = []
        self.unset: set[str] = set()
        """Names whose value is an argument of the script, of which there is none."""
        self.depth = 0
        """Words inside of words that are expanded now."""
        self.assumed: set[str] = set()
        """Names that were taken as not set."""
        self.output: Callable[[list[str]], str | None] = lambda _: None
        """What a function of the script writes, from its name and arguments; None = it is none, or it is not known."""

    def get(self, name: str) -> Value | None:
        """The value of a variable; None = never set."""
        if name in _SPECIAL:
            return _SPECIAL[name]
        self.mentioned.add(name)
        if name in self.given:
            return self.given[name]
        if name.isdigit() and name != "0":
            place = int(name) - 1
            return self.positions[place] if place < len(self.positions) else None
        return self.values.get(name)

    def text(self, name: str) -> str | None:
        """The same as one text."""
        value = self.get(name)
        return " ".join(value) if isinstance(value, list) else value

    def put(self, name: str, value: Value) -> None:
        """Assigns, unless the user said another value. Raises PlannerError for a text without end."""
        self.mentioned.add(name)
        if name in self.given:
            return
        if len(value if isinstance(value, str) else " ".join(value)) > MOST_TEXT:
            raise PlannerError(f"{self.where}: the value of {name} grows beyond {MOST_TEXT} characters")
        self.values[name] = value

    def copy(self) -> "Variables":
        """For a branch that may not be taken."""
        other = Variables(self.where, self.given, {})
        other.values, other.mentioned, other.positions = dict(self.values), self.mentioned, self.positions
        other.unset, other.assumed, other.output = set(self.unset), self.assumed, self.output
        return other


_NESTED = re.compile(r"(?:\$\{[^${}]*)" + f"{{{DEEPEST + 1}}}")
"""Too deep at once: each level would look for its end through all that is left."""


class Expansion:
    """One word becomes fields."""

    def __init__(self, variables: Variables, split: bool = True) -> None:
        self.variables, self.split = variables, split
        self.fields: list[str] = []
        self.current: str | None = None

    def add(self, text: str, quoted: bool) -> None:
        """Text to the field at hand; blanks of unquoted text end it."""
        if quoted or not self.split:
            self.current = (self.current or "") + text
            return
        for piece in re.findall(r"\s+|[^\s]+", text):
            if piece.isspace():
                self.end()
            else:
                self.current = (self.current or "") + piece

    def end(self) -> None:
        """Ends the field at hand."""
        if self.current is not None:
            self.fields.append(self.current)
        self.current = None

    def word(self, raw: str, quoted: bool = False) -> None:
        """Adds a word as it is written. Raises PlannerError where expansions nest without end."""
        self.variables.depth += 1
        if self.variables.depth > DEEPEST or _NESTED.search(raw):
            raise PlannerError(f"{self.variables.where}: expansions inside of expansions, more than {DEEPEST} deep")
        self.characters(raw, quoted)
        self.variables.depth -= 1

    def characters(self, raw: str, quoted: bool) -> None:
        """The same, one character or expansion after the other."""
        i = 0
        while i < len(raw):
            here = raw[i]
            if here == "\\" and i + 1 < len(raw):
                follower = raw[i + 1]
                kept = quoted and follower not in '$`"\\\n'
                self.add(("\\" if kept else "") + ("" if follower == "\n" else follower), True)
                i += 2
            elif here == "'" and not quoted:
                end = _closing(raw, i)
                self.add(raw[i + 1 : end - 1], True)
                i = end
            elif here == '"' and not quoted:
                end = _closing(raw, i)
                inner = raw[i + 1 : end - 1]
                self.word(inner, quoted=True)
                if self.current is None and not _LIST.search(inner):
                    self.current = ""
                i = end
            elif here == "`":
                end = _closing(raw, i)
                self.add(self.command(raw[i + 1 : end - 1]), quoted)
                i = end
            elif here == "$" and i + 1 < len(raw):
                i = self.dollar(raw, i, quoted)
            else:
                self.add(here, True)
                i += 1

    def dollar(self, raw: str, i: int, quoted: bool) -> int:
        """An expansion that begins here; the place behind it."""
        follower = raw[i + 1]
        if follower == "'" and not quoted:
            end = _closing(raw, i)
            self.add(raw[i + 2 : end - 1], True)
            return end
        if follower in "({":
            end = _closing(raw, i)
            inner = raw[i + 2 : end - 1]
            if follower == "{":
                self.parameter(inner, quoted)
            elif raw.startswith("$((", i) and inner.endswith(")"):
                self.add(calculated(inner[1:-1], self.variables), quoted)
            else:
                self.add(self.command(inner), quoted)
            return end
        match = _PLAIN.match(raw, i + 1)
        if match is None:
            self.add("$", True)
            return i + 1
        self.values(match.group(), None, quoted)
        return match.end()

    def values(self, name: str, subscript: str | None, quoted: bool) -> None:
        """The value of a variable; "${A[@]}" is as many fields as A has elements."""
        value = self.variables.positions if name in "@*" else self.variables.get(name)
        if name == "#":
            value = str(len(self.variables.positions))
        if isinstance(value, list):
            if subscript not in ("@", "*") and name not in "@*":
                value = _element(self.variables, value, subscript)
            elif not quoted or subscript == "@" or name == "@":
                for number, one in enumerate(value):
                    if number:
                        self.end()
                    self.add(one, quoted)
                return
            else:
                value = " ".join(value)
        elif subscript not in (None, "@", "*", "0"):
            value = self.variables.text(f"{name}[{joined(subscript or '', self.variables)}]")
        self.add(gap([name]) if value is None else value, quoted)

    def parameter(self, inner: str, quoted: bool) -> None:
        """``${...}``."""
        variables = self.variables
        count = re.fullmatch(r"#(\w+)(\[[@*]\])?", inner)
        if count and inner != "#":
            value = variables.get(count[1])
            written = isinstance(value, list) and bool(value) and all(re.fullmatch("\ue000.*\ue001", one) for one in value)
            value = value.split() if count[2] and isinstance(value, str) else value
            names = [] if written else [count[1]]  # of what a command writes the count is asked for
            self.add(gap(names) if value is None or written or MAYBE in str(value) else str(len(value)), quoted)
            return
        places = re.fullmatch(r"!(\w+)\[[@*]\]", inner)
        if places and isinstance(value := variables.get(places[1]), list) and MAYBE not in str(value):
            self.add(" ".join(map(str, range(len(value)))), False)
            return
        indirect = re.fullmatch(r"!(\w+)", inner)
        if indirect:
            name = variables.text(indirect[1])
            inner = name if name and re.fullmatch(r"\w+", name) else indirect[1]
        match = _PARAMETER.match(inner)
        if match is None:
            self.add(gap([]), quoted)
            return
        name, subscript, rest = match[1], match[2], inner[match.end() :]
        if not rest:
            self.values(name, subscript, quoted)
            return
        place = f"{name}[{subscript}]" if subscript not in (None, "@", "*") else name
        operator = re.match(r":?[-=+?]", rest)
        if operator is None:
            text = variables.text(place)
            changed = None if text is None or is_open(text) else _changed(text, rest, variables)
            self.add(gap(roots(text or "") or [name]) if changed is None else changed, quoted)
            return
        value = variables.positions or None if name in "@*" else variables.get(place)
        there = bool(value) if operator[0].startswith(":") else value is not None
        if operator[0].endswith("+"):
            if there:
                self.word(rest[operator.end() :], quoted)
        elif there:
            self.values(name, subscript, quoted)
        elif operator[0].endswith("?"):
            self.add(gap([name]), quoted)
        else:
            text = joined(rest[operator.end() :], variables)
            if operator[0].endswith("="):
                variables.put(name, text)
            self.add(text, quoted)

    def command(self, text: str) -> str:
        """The output of a command: that of echo and expr can be told, of others not."""
        words = text.split()
        if words[:1] == ["expr"]:
            return calculated(" ".join(words[1:]).replace("\\*", "*"), self.variables)
        if words[:1] == ["if"] and (said := self.variables.output(["if", text])) is not None:
            return said
        written = re.fullmatch(r"\s*cat\s*<<-?\s*(['\"]?)(\w+)\1[ \t]*\n(.*?)\n?[ \t]*\2\s*", text, re.DOTALL)
        if written:  # a here-document
            return written[3] if written[1] else document(written[3], self.variables)
        bc = re.fullmatch(r"\s*echo\s+(.*?)\s*\|\s*bc\s*", text, re.DOTALL)
        if bc:
            return calculated(bc[1].strip("\"'"), self.variables)
        if (counted := _COUNTED.fullmatch(text)) is not None:
            listed = joined(counted[1], self.variables)
            return gap(roots(listed)) if is_open(listed) else str(len(listed.split(counted[2] or counted[3])))
        if (value := queried(text, self.variables.where, lambda raw: joined(raw, self.variables))) is not None:
            return value
        if (reflowed := _REFLOWED.fullmatch(text)) is not None:
            return " ".join(fields(reflowed[1], self.variables))
        if words and not re.search(r"[|;&<>`]|\$\(", text):
            if words[0] == "echo":
                return " ".join(fields(text, self.variables)[1:])
            if (written_by := self.variables.output(fields(text, self.variables))) is not None:
                return written_by
        return gap(_unset(text, self.variables))


_COUNTED = re.compile(
    r"""\s*echo\s+("?\$\{?\w+\}?"?)\s*\|\s*(?:awk\s+-F\s*['"]?([,: ])['"]?\s+'\{\s*print\s+NF;?\s*\}'"""
    r"""|tr\s+['"]?([,: ])['"]?\s+['"]\\n['"]\s*\|\s*(?:wc\s+-l|grep\s+-c\s+['"]?[.^]['"]?))\s*"""
)
"""How many parts a list has, as scripts count the GPUs that they name."""
_BLANKS = r"(?:\\n|\\s|\\\+|\[?\[:space:\]\]?|[ \t*+^$])+"
_REFLOWED = re.compile(
    rf"""\s*echo\s+([^|;&<>`()]+?)(?:\s*\|\s*(?:xargs|tr\s+(?:-s\s+)?(['"]){_BLANKS}\2(?:\s+['"] ['"])?"""
    rf"""|sed\s+(?:-[eEr]\s+)?(['"])s/{_BLANKS}/ ?/g?\3))+\s*"""
)
"""A text whose line ends and blanks alone are changed, as scripts make one line of many."""


def _unset(text: str, variables: Variables) -> list[str]:
    """Nothing: the output of a command depends on the machine, so that the variable it is assigned to is asked for."""
    variables.mentioned.update(re.findall(r"\$\{?([A-Za-z_]\w*)", text))
    return []


def _closing(raw: str, i: int) -> int:
    """Behind what opens here; the grammar has seen that it closes."""
    end = skipped(raw, i)
    return end if end > 0 else len(raw) + 1


def _element(variables: Variables, value: list[str], subscript: str | None) -> str:
    place = joined(subscript or "0", variables)
    index = arithmetic(place, lambda name: variables.text(name) or "")
    waiting = roots(place if is_open(place) else variables.text(place) or "")
    if index is None and waiting:  # of a loop: which round is meant
        return gap(waiting)
    if index is None or not -len(value) <= index < len(value):
        return gap([]) if value else ""
    return value[index]


def _changed(text: str, rest: str, variables: Variables) -> str | None:
    """Cut, replaced or in other letters; None where the form is not known."""
    if rest in (",,", "^^"):
        return text.lower() if rest == ",," else text.upper()
    piece = re.fullmatch(r":\s*(-?\w+)(?::(-?\w+))?", rest)
    if piece and all(part is None or re.fullmatch(r"-?\d{1,6}", part) for part in piece.groups()):
        start, length = int(piece[1]), piece[2]
        return text[start:] if length is None else text[start:][: int(length)]
    cut = re.fullmatch(r"(##?|%%?)(.*)", rest, re.DOTALL)
    if cut and len(text) < 5000:
        pattern = joined(cut[2], variables)
        front = cut[1].startswith("#")
        cuts = (
            [text[:end] for end in range(len(text) + 1)]
            if front
            else [text[start:] for start in range(len(text), -1, -1)]
        )
        found = [one for one in cuts if fnmatchcase(one, pattern)]
        if not found:
            return text
        length = len(found[-1] if len(cut[1]) == 2 else found[0])
        return text[length:] if front else text[: len(text) - length]
    swapped = re.fullmatch(r"(//?)([^/*?\[]+)(?:/(.*))?", rest, re.DOTALL)
    if swapped:
        old, new = joined(swapped[2], variables), joined(swapped[3] or "", variables)
        return text.replace(old, new, -1 if swapped[1] == "//" else 1) if old else text
    return None


def calculated(expression: str, variables: Variables) -> str:
    """The value of an arithmetic expression, or a gap that names what is missing."""
    text = joined(expression, variables)
    missing, unset = roots(text), list[str]()

    def variable(name: str) -> str:
        value = variables.text(name)
        if value is None and OUTER.fullmatch(name) is None:
            unset.append(name)
        elif value is None or is_open(value):
            missing.extend(roots(value or "") or [name])
            return "1"  # and on, so that all that is missing is named at once
        return value or ""

    result = None if is_open(text) else arithmetic(text, variable)
    return gap(missing or unset) if result is None or missing else str(result)


def fields(raw: str, variables: Variables) -> list[str]:
    """Fields of a word, or of words with blanks between them."""
    expansion = Expansion(variables)
    for word in _raw_words(raw):
        expansion.word(word)
        expansion.end()
    return expansion.fields


def _raw_words(raw: str) -> list[str]:
    words, i = [], 0
    while i < len(raw):
        if raw[i] in " \t\n;&|()<>":
            i += 1
            continue
        end = word_end(raw, i)
        end = len(raw) if end < 0 else end
        words.append(raw[i:end])
        i = end
    return words


def joined(raw: str, variables: Variables) -> str:
    """One text from a word, without splitting: the right side of an assignment."""
    expansion = Expansion(variables, split=False)
    expansion.word(raw)
    expansion.end()
    return " ".join(expansion.fields)


def expanded(raw: str, variables: Variables, *, split: bool = True) -> list[str]:
    """Fields of one word."""
    expansion = Expansion(variables, split)
    expansion.word(raw)
    expansion.end()
    return expansion.fields


def document(text: str, variables: Variables) -> str:
    """A here-document with its variables."""
    expansion = Expansion(variables, split=False)
    expansion.word(text, quoted=True)
    expansion.end()
    return " ".join(expansion.fields)


def added_to(before: Value, value: Value) -> Value:
    """``NAME+=value``: one text more of an array, or a longer text."""
    if isinstance(before, str) and isinstance(value, str):
        return before + value
    return [*([before] if isinstance(before, str) else before), *([value] if isinstance(value, str) else value)]
