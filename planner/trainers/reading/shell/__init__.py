"""Shell scripts as far as their assignments go: variables, arrays, arithmetic, branches. Nothing is ever executed."""

from planner.trainers.reading.shell.built_in import Script
from planner.trainers.reading.shell.grammar import ends_early
from planner.trainers.reading.shell.interpreter import evaluate
from planner.trainers.reading.shell.text import is_open, options, roots, shown_text, words_of
from planner.trainers.reading.shell.tree import Command

__all__ = ["Command", "Script", "ends_early", "evaluate", "is_open", "options", "roots", "shown_text", "words_of"]
