"""The tree of a shell script."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Simple:
    """Assignments and words as they are written, quotes and all; texts of its here-documents."""

    assignments: list[tuple[str, str | None, bool, "str | list[str]"]] = field(default_factory=list)
    """(name, subscript, added to what is there, word or words of an array)."""
    words: list[str] = field(default_factory=list)
    documents: list[tuple[str, bool]] = field(default_factory=list)
    """(text, variables in it stay as they are)."""
    target: str = ""
    """File that its output goes to."""
    appends: bool = False
    """Whether it goes behind what that file has."""
    input: str | None = None
    """Word behind <<<, which it reads."""
    source: str = ""
    """File that it reads."""
    line: int = 0


@dataclass
class Branch:
    """``if``, ``&&``, ``||``: conditions with what they lead to; None = else."""

    arms: list[tuple["Nodes | None", "Nodes"]]
    joint: str = ""
    """'&&' or '||'."""


@dataclass
class Case:
    """``case``."""

    word: str
    arms: list[tuple[list[str], "Nodes"]]


@dataclass
class Loop:
    """``for`` with its words, or ``while`` with its condition."""

    body: "Nodes"
    name: str = ""
    words: list[str] | None = None
    condition: "Nodes | None" = None


@dataclass
class Function:
    """A definition."""

    name: str
    body: "Nodes"


@dataclass
class Test:
    """``[[ ]]`` with its tokens, or ``(( ))`` with its expression; ``!`` before it."""

    tokens: list[str] = field(default_factory=list)
    expression: str | None = None


@dataclass
class Not:
    """``!``."""

    body: "Nodes"


@dataclass(frozen=True)
class Command:
    """A command that the script would run, its words expanded."""

    words: list[str]
    under: tuple[str, ...] = ()
    """Variables that decide whether it runs; () = it does."""
    seen: str = ""
    """CUDA_VISIBLE_DEVICES when it runs; '' = not set by then."""
    batch: Mapping[str, str] = field(default_factory=dict)
    """Options of the job that it runs in."""


Node = Simple | Branch | Case | Loop | Function | Test | Not
Nodes = Sequence[Node]
