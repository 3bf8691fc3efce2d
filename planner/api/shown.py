"""How results are shown: the tables of the command line as text, HTML for a notebook, plain data."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:  # rich is imported when something is printed
    from rich.console import Console


class Plain(Protocol):
    """Numbers that give plain data."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""


T = TypeVar("T", bound="Plain | dict[str, Any]")
COLUMNS = 140
"""Width of a result as text: that of the command line where no person reads along."""


class Result:
    """What a call gives back. ``print`` shows the tables of the command line, a notebook shows them as HTML."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``--json`` prints."""
        raise NotImplementedError

    def show(self, console: Console) -> None:
        """Print the tables on a console of rich."""
        raise NotImplementedError

    def __str__(self) -> str:
        text = io.StringIO()
        self.show(_console(text, color_system=None))
        return text.getvalue().rstrip("\n")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        console = _console(io.StringIO(), record=True)
        self.show(console)
        style = "white-space: pre; overflow-x: auto; line-height: 1.3"
        return console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')


def _console(text: io.StringIO, **options: Any) -> Console:
    """A console that writes a text: no terminal or notebook is looked for."""
    from rich.console import Console

    return Console(file=text, width=COLUMNS, highlight=False, force_terminal=False, force_jupyter=False, **options)


@dataclass(frozen=True, repr=False)
class Answer(Result, Generic[T]):
    """The answer to one question about plans, profiles or runs."""

    found: T
    """What was computed, as the question's own type."""
    printed: Callable[[Console, T], None]
    """Prints it."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``--json`` prints."""
        plain: dict[str, Any] = self.found if isinstance(self.found, dict) else self.found.to_dict()
        return plain

    def show(self, console: Console) -> None:
        """Print the tables on a console of rich."""
        self.printed(console, self.found)
