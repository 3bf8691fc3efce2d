"""Shell scripts as far as their assignments go: variables, arrays, arithmetic, branches. Nothing is ever executed."""

from planner.trainers.reading.shell.interpreter import Command, Script, evaluate
from planner.trainers.reading.shell.text import is_open, options, roots, shown_text, words_of

__all__ = ["Command", "Script", "evaluate", "is_open", "options", "roots", "shown_text", "words_of"]
