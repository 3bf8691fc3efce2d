"""Conditions of a shell script: true, false, or None where they depend on what the script does not say."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from planner.trainers.reading.shell.expansion import Variables, calculated, expanded, joined
from planner.trainers.reading.shell.text import CLOSE, MAYBE, OPEN, is_open, roots

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b, "-ne": lambda a, b: a != b, "-lt": lambda a, b: a < b, "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b, "-ge": lambda a, b: a >= b,
}  # fmt: skip
_ANY = re.compile(f"{OPEN}[^{CLOSE}]*{CLOSE}")
_PART = re.compile(rf"(?<=[^\s{CLOSE}]){_ANY.pattern}|{_ANY.pattern}(?=[^\s{OPEN}])")
"""What is not known of a word, such as a folder: it holds no option."""
_BINARY = (*_NUMBERS, "=", "==", "!=", "=~", "<", ">", "-ef", "-nt", "-ot")


@dataclass
class Verdict:
    """What a condition says, and the variables that would decide it."""

    value: bool | None
    names: list[str] = field(default_factory=list)

    def inverted(self) -> "Verdict":
        """Of ``!``."""
        return Verdict(None if self.value is None else not self.value, self.names)


def both(left: Verdict, right: Verdict) -> Verdict:
    """Of ``&&``."""
    if left.value is False or right.value is False:
        return Verdict(False)
    if left.value and right.value:
        return Verdict(True)
    return Verdict(None, [name for one in (left, right) if one.value is None for name in one.names])


def either(left: Verdict, right: Verdict) -> Verdict:
    """Of ``||``."""
    return both(left.inverted(), right.inverted()).inverted()


def judged(tokens: list[str], variables: Variables, choices: dict[str, list[str]], *, double: bool) -> Verdict:
    """What the expression between brackets says. ``tokens`` as written; ``double``: [[ ]], whose words are not split and whose
    right sides are patterns; ``choices`` gets the values that unknown variables are compared with."""
    return _Condition(tokens, variables, double, choices).verdict()


class _Condition:
    """The expression between brackets."""

    def __init__(self, tokens: list[str], variables: Variables, double: bool, choices: dict[str, list[str]]) -> None:
        self.variables, self.double, self.choices, self.place = variables, double, choices, 0
        self.tokens: list[str] = []
        for token in tokens:
            if token in ("&&", "||", "!", "(", ")", "<", ">"):
                self.tokens.append(token)
            else:
                self.tokens += [joined(token, variables)] if double else expanded(token, variables)

    def verdict(self) -> Verdict:
        """Of the whole; what cannot be read is not known."""
        found = self.any_of()
        return found if self.place >= len(self.tokens) else Verdict(None, found.names)

    def next(self) -> str | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def any_of(self) -> Verdict:
        found = self.all_of()
        while self.next() in ("||", "-o"):
            self.place += 1
            found = either(found, self.all_of())
        return found

    def all_of(self) -> Verdict:
        found = self.one()
        while self.next() in ("&&", "-a"):
            self.place += 1
            found = both(found, self.one())
        return found

    def one(self) -> Verdict:
        token = self.next()
        if token is None:
            return Verdict(False)
        self.place += 1
        following = self.next()
        if token == "!":
            return self.one().inverted()
        if token == "(" and self.double:
            found = self.any_of()
            self.place += self.next() == ")"
            return found
        if not self.double and token in _BINARY and following is not None and following not in _BINARY:
            self.place += 1
            return Verdict(False)  # what stood before is empty: an error of [, which is not true
        if following in _BINARY and self.place + 1 < len(self.tokens):
            right = self.tokens[self.place + 1]
            self.place += 2
            return self.compared(token, str(following), right)
        if (
            re.fullmatch(r"-[a-zA-Z]", token)
            and following is not None
            and following not in ("&&", "||", "-a", "-o", ")")
        ):
            self.place += 1
            return self.unary(token, following)
        return Verdict(None, roots(token)) if is_open(token) else Verdict(bool(token))

    def unary(self, operator: str, text: str) -> Verdict:
        if operator in ("-z", "-n"):
            there = Verdict(None, roots(text)) if is_open(text) else Verdict(bool(text))
            if is_open(text) and all(
                name in self.variables.unset or name not in self.variables.values for name in roots(text)
            ):
                there = Verdict(
                    bool(re.sub("\ue000[^\ue001]*\ue001", "", text))
                )  # neither the environment nor an argument says it
                self.variables.assumed.update(roots(text))
            return there if operator == "-n" else there.inverted()
        if operator == "-v":
            return Verdict(text in self.variables.values)
        return Verdict(None)

    def compared(self, left: str, operator: str, right: str) -> Verdict:
        if right == "" and operator in ("=", "==", "!="):  # as -z and -n say it
            return self.unary("-n" if operator == "!=" else "-z", left)
        if operator == "=~" and re.fullmatch(r"--\w[\w-]*", right) and MAYBE not in left:
            left = _PART.sub("", left)
            left = right if right in _ANY.sub("", left) else left
        if is_open(left) or is_open(right) or MAYBE in left + right:
            names = roots(left) + roots(right)
            if len(names) == 1 and operator != "=~" and not (is_open(left) and is_open(right)):
                self.choices.setdefault(names[0], []).append(right if is_open(left) else left)
            return Verdict(None, names)
        if operator in _NUMBERS:
            numbers = [calculated(one, self.variables) if one.strip() else "0" for one in (left, right)]
            if any(is_open(one) for one in numbers):
                return Verdict(None)
            return Verdict(_NUMBERS[operator](int(numbers[0]), int(numbers[1])))
        if operator in ("=", "==", "!="):
            same = fnmatchcase(left, right) if self.double and len(left) < 1000 else left == right
            return Verdict(same == (operator != "!="))
        if operator == "=~":
            literal = re.fullmatch(r"(\^?)([\w ./,:-]*)(\$?)", right)
            if literal is None:
                return Verdict(None)
            start, middle, end = literal.groups()
            whole = left == middle if start and end else left.startswith(middle) if start else left.endswith(middle)
            return Verdict(whole if start or end else middle in left)
        if operator in ("<", ">"):
            return Verdict(left < right if operator == "<" else left > right)
        return Verdict(None)


def searched(words: list[str], text: str) -> Verdict:
    """Whether ``echo TEXT | grep -q PATTERN`` finds it; not known for patterns that are more than letters."""
    plain = [one for one in words if not re.fullmatch(r"-[a-zA-Z]+|--", one)] or [""]
    pattern = words[words.index("--") + 1] if "--" in words[:-1] else plain[0]
    if is_open(text) or is_open(pattern):
        return Verdict(None, roots(text + pattern))
    if not re.fullmatch(r"[\w\s=,:/.@%+-]+", pattern) or set(words) & {"-v", "-c", "-f"}:
        return Verdict(None)
    fold = any(re.fullmatch(r"-[a-zA-Z]*i[a-zA-Z]*", one) for one in words)
    return Verdict((pattern.lower() in text.lower()) if fold else pattern in text)
