"""The program of a copy of LitGPT around a configuration: how it shards over several GPUs and whether it compiles, which forks
change while the settings stay the same."""

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.layout import Recompute
from planner.trainers.litgpt.fabric_programs import POLICIES, SHARDING
from planner.trainers.reading.given import Question
from planner.trainers.reading.python_text import fields_of, last_name, tree_or_none
from planner.trainers.reading.settings import Settings, beside

FULLY_SHARDED = "ModelParallelStrategy"
CHOICES = {"fsdp": {}, "ddp": {"zero": 0, "dp_shard": 0, "recompute": int(Recompute.NONE)}}
"""Strategies by Fabric's names, and what each says over LitGPT's own."""


@dataclass(frozen=True)
class Copy:
    """What such a program says; nothing where there is none."""

    strategies: frozenset[str] = frozenset()
    fields: dict[str, int] = field(default_factory=dict)
    """Of Layout on several GPUs, over those of LitGPT's own program."""
    compiles: bool | None = None
    """None = it is not known, or hangs on a setting."""
    notes: tuple[str, ...] = ()


def copy_of(given: Settings, program: str) -> Copy:
    """What the copy of a program says: pretrain, finetune/lora, finetune/full. What nobody reads is asked."""
    names = [f"litgpt/{program}.py", *([f"{program}.py"] if "/" in program else [])]
    file = next((one for name in names if (one := beside(given.path, name, (".py",)))), None)
    tree = tree_or_none(file)
    if file is None or tree is None:
        return Copy()
    named = ((one, last_name(one.func)) for one in ast.walk(tree) if isinstance(one, ast.Call))
    made = [one for one, name in named if name.endswith("Strategy") and not name.startswith("Thunder")]  # of its extension
    kinds = frozenset(last_name(one.func) for one in made)
    fields, said = _fields(given, made, program), _compiles(tree)
    what = ["every GPU holds the whole model (DDP)"] if kinds == {"DDPStrategy"} else []
    if "recompute" in fields and fields["recompute"] != _usual(program) and kinds == {"FSDPStrategy"}:
        what.append("blocks are recomputed" if fields["recompute"] else "nothing is recomputed")
    if said is not None and said is not (program == "pretrain"):
        what.append("it compiles the model" if said else "it does not compile the model")
    notes = (f"{program}.py beside it: {', '.join(what)}",) if what else ()
    return Copy(kinds, fields, said, notes)


def _usual(program: str) -> int:
    """What LitGPT's own program recomputes under FSDP: all blocks in fine-tuning."""
    return int(Recompute.NONE if program == "pretrain" else Recompute.FULL)


def _fields(given: Settings, made: list[ast.Call], program: str) -> dict[str, int]:
    kinds = {last_name(one.func) for one in made}
    if kinds == {"DDPStrategy"}:
        return CHOICES["ddp"]
    if not made or kinds & {FULLY_SHARDED}:
        return {}
    if kinds != {"FSDPStrategy"}:
        answer = str(given.get("strategy") or "")
        if answer not in CHOICES:
            about = f"{program}.py beside it makes {', '.join(sorted(kinds))}"
            given.ask(Question(name="strategy", about=about, choices=tuple(CHOICES)))
        return CHOICES.get(answer, {})
    words = [{one.arg: _said(given, one.value) for one in call.keywords} for call in made]
    if len(words) > 1 or None in words[0]:  # one of several, or with keywords that stand elsewhere
        return {}
    policy = next((words[0][one] for one in POLICIES if one in words[0]), None)
    again = policy is not None and not (isinstance(policy, ast.Constant) and policy.value is None)
    word = words[0].get("sharding_strategy")
    name: Any = word.value if isinstance(word, ast.Constant) else last_name(word) if word is not None else "FULL_SHARD"
    sharded = {"zero": SHARDING[name], **({} if name == "HYBRID_SHARD" else {"dp_shard": 0})} if name in SHARDING else {}
    return {**sharded, "recompute": int(Recompute.FULL if again else Recompute.NONE)}


def _said(given: Settings, node: ast.expr) -> ast.expr:
    """What stands in the place of a setting of the copy's own, fsdp.strategy, or hangs on one, x if fsdp.again else y: by the file,
    or by the default of the class in litgpt/args.py that has such a field."""
    test = node.test if isinstance(node, ast.IfExp) else node
    if not (isinstance(test, ast.Attribute) and isinstance(test.value, ast.Name)):
        return node
    tree = tree_or_none(beside(given.path, "litgpt/args.py", (".py",))) or ast.Module([], [])
    classes = [one for one in tree.body if isinstance(one, ast.ClassDef)]
    usual = next((value for one in classes for name, value in fields_of(one) if name == test.attr), None)
    if usual is None:
        return node
    said = given.get(f"{test.value.id}.{test.attr}")
    value = usual if said is None else ast.Constant(said)
    if not isinstance(node, ast.IfExp):
        return value
    return node.body if isinstance(value, ast.Constant) and str(value.value).lower() in ("true", "1") else node.orelse


def _compiles(tree: ast.Module) -> bool | None:
    """Whether the model is compiled; None where that hangs on a condition."""

    def calls(node: ast.AST) -> bool:
        return any(isinstance(one, ast.Call) and ast.unparse(one.func) in ("torch.compile", "compile", "thunder.jit", "jit")
                   for one in ast.walk(node))  # fmt: skip

    if not calls(tree):
        return False
    return None if any(calls(one) for one in ast.walk(tree) if isinstance(one, ast.If | ast.IfExp)) else True


FUSED = re.compile(r"scaled_dot_product_attention|flex_attention|memory_efficient_attention|flash_attn\w*")


def writes_scores_out(path: Path) -> bool:
    """Whether the copy's model.py computes attention by a softmax of its own, and by no kernel that keeps no matrix of scores."""
    tree = tree_or_none(beside(path, "litgpt/model.py", (".py",)))
    if tree is None:
        return False
    calls = [one.func for one in ast.walk(tree) if isinstance(one, ast.Call)]
    if any(FUSED.fullmatch(last_name(one)) and not ast.unparse(one).startswith("self.") for one in calls):
        return False
    classes = [one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and "Attention" in one.name]
    within = (last_name(one.func) for part in classes for one in ast.walk(part) if isinstance(one, ast.Call))
    return "softmax" in set(within)
