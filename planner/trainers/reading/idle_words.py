"""Arguments of transformers that a program takes and never hands to its trainer."""

import ast
import re

from planner.trainers.reading.parsed_words import PARSERS
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.running import Running
from planner.trainers.reading.script_parts import BATCH
from planner.trainers.reading.training_scripts import CONFIGS

HANDED_ON = ("gradient_checkpointing", "gradient_accumulation_steps", "bf16", "fp16", "optim")
"""Arguments of transformers that do nothing where a program does not hand them to its trainer."""


def idle_words(program: Running) -> set[str]:
    """Those of them that a program uses nowhere, although it spells out all that its trainer is given."""
    made = program.calls(*CONFIGS)
    spelled = any(word.arg == BATCH for one in made for word in one.keywords)
    parsed = {last_name(node) for one in program.calls(*PARSERS) for node in ast.walk(one) if isinstance(node, ast.Name)}
    derived = {one.name for one in ast.walk(program.tree) if isinstance(one, ast.ClassDef) and one.bases}
    whole = any(word.arg is None for one in made for word in one.keywords) or not parsed.isdisjoint({*CONFIGS, *derived})
    if not spelled or whole or re.search(r"\b(vars|asdict)\(|__dict__|getattr\(\w*arg", ast.unparse(program.tree)):
        return set()
    nodes = list(ast.walk(program.tree))
    used = {one.attr for one in nodes if isinstance(one, ast.Attribute)}
    used |= {str(one.arg) for one in nodes if isinstance(one, ast.keyword)}
    used |= {one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    return set(HANDED_ON) - used - {one.value for one in nodes if isinstance(one, ast.Constant) and isinstance(one.value, str)}
