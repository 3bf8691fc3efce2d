"""What a script of OLMo-core changes after it has built its configuration, and what its text does not show: refused."""

import ast
import re

from planner.errors import PlannerError
from planner.trainers.olmo_core.models import MOST_CALLS
from planner.trainers.reading.built_parts import Parts
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.values import not_priced

DECIDES = re.compile(r"(^|\.)(autocast_precision|optim|(pp|dp|tp|cp|ep|ac|float8)_config(\..+)?)$")
"""Attributes that make another training of one that is built."""
AGAIN = re.compile(rf"{DECIDES.pattern}|(^|\.)(rank_microbatch_size|global_batch_size)$|^-*(model|dataset)\.")
"""The same among the words of a replace() or merge()."""
_KINDS = "(Pipeline)?TrainModule|(Data|Tensor|Context|Expert|Pipeline)Parallel|ActivationCheckpointing"
PARTS = re.compile(rf"(Transformer({_KINDS})|Float8|\w*AdamW?)Config")
"""Classes whose keywords decide the plan."""


def require_unchanged(script: Parts) -> None:
    """Raises PlannerError for what makes another training of the one that is built."""
    changed = [f"{place} in line {line}" for place, line in script.changed().items() if DECIDES.search(place)]
    if changed:
        raise PlannerError(f"{script.path}: {', '.join(changed)[:200]} is set after its configuration is built, which is not read")
    for call in script.every_call():
        name = last_name(call.func)
        if again := next((one for one in _said_again(call, name) if AGAIN.search(one.partition("=")[0])), None):
            what = f"{name} in line {call.lineno} sets {again[:80]}"
            raise PlannerError(f"{script.path}: {what} after its configuration is built, which is not read")
        if PARTS.fullmatch(name) and any(one.arg is None for one in call.keywords):
            raise PlannerError(f"{script.path}: {name[:80]} takes options of a mapping, which are not read")
    frozen = [one.value for call in script.every_call() for one in call.keywords if one.arg in ("freeze_params", "freeze_experts")]
    if any(script.value(one) not in (None, [], False) for one in frozen) and script.said.setting("freeze_params") != "false":
        raise not_priced(str(script.path), ["freeze_params"], ["freeze_params"])


def _said_again(call: ast.Call, name: str) -> list[str]:
    """Words of a replace(), and the texts in the list of a merge()."""
    if name == "replace":
        return [str(one.arg) for one in call.keywords]
    lists = [one.elts for one in call.args[:1] if isinstance(one, ast.List | ast.Tuple)] if name == "merge" else []
    return [str(one.value) for some in lists for one in some[:MOST_CALLS] if isinstance(one, ast.Constant)]
