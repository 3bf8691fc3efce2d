"""Parts of a torchtitan configuration in Python beside its degrees: optimizer, loss, converters, what the model's registry is told.

[torchtitan b5bcd76: components/optimizer, components/loss.py, components/quantization, models/*/__init__.py]
"""

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.trainers.reading.python_text import last_name
from planner.trainers.torchtitan.export import CONVERTERS

GROUPED = ("Float8GroupedExpertsConverter", "MXFP8GroupedExpertsConverter", "Float8GroupedMMConverter", "MXFP8GroupedMMConverter")
"""Converters of the grouped products of experts."""
OLD = {"MXLinearConverter": "mxfp8", "MXConverter": "mxfp8", "Float8Converter": "fp8"}
ADAPTERS = "LoRAConverter.Config"
CHUNKS = ("ChunkedLossWrapper", "ChunkedCELoss", "ChunkedCrossEntropyLoss")


def part_of(path: Path, call: ast.Call, function: str, given: Mapping[str, ast.expr], found: dict[str, dict[str, Any]]) -> None:
    """What one call says. Raises PlannerError for what is not priced."""
    other, owner = found["other"], function.removesuffix(".Config").rpartition(".")[2]
    parts_of(path, given, found)
    if owner.endswith("Converter") and function.endswith(".Config") and not function.endswith(ADAPTERS):
        precision = {**{name: one for one, name in CONVERTERS.items()}, **OLD}.get(owner)
        if precision is None and owner not in GROUPED:
            raise PlannerError(f"{path}: line {call.lineno}: {function} is not priced in torchtitan; choose another")
        rowwise = "recipe_name" in given and "rowwise" in ast.unparse(given["recipe_name"])
        other["grouped"] = other.get("grouped", False) or owner in GROUPED
        if precision is not None:
            other["precision"] = "fp8_row" if rowwise and precision == "fp8" else precision
    if isinstance(even := given.get("moe_force_load_balance"), ast.Constant):
        other["balanced"] = even.value
    if function.rpartition(".")[2] == "model_registry":
        said = {name: node.value for name, node in given.items() if isinstance(node, ast.Constant)}
        flavor = call.args[0] if call.args else given.get("flavor")
        if isinstance(flavor, ast.Constant):
            other["flavor"] = str(flavor.value)
        other["mtp_layers"] = said.get("num_mtp_layers") or 0
        other["capacity"] = said.get("non_blocking_capacity_factor")
        backend = {"expert_parallel_comm_backend": said["moe_comm_backend"]} if said.get("moe_comm_backend") else {}
        folded = {"enable_async_tensor_parallel": True} if said.get("tp_gemm_backend") == "dist_gemm" else {}
        other["registry"] = {**backend, **folded}


def parts_of(path: Path, given: Mapping[str, ast.expr], found: dict[str, dict[str, Any]]) -> None:
    """Optimizer and loss, where a call or an assignment says them. Raises PlannerError."""
    other = found["other"]
    if (loss := given.get("loss")) is not None:
        called = re.sub(r"\.Config$", "", ast.unparse(loss.func)) if isinstance(loss, ast.Call) else ""
        other["loss"] = "pieces" if called.rpartition(".")[2] in CHUNKS else ""
        count = re.search(r"\bnum_chunks=(\d{1,4})\b", ast.unparse(loss))
        if other["loss"] and count and count[1] != "8":
            what = f"the loss comes in {count[1]} pieces, and is priced in 8"
            other["notes"].append(f"{what}: logits of a piece have 8/{count[1]} the size")
    if isinstance(made := given.get("optimizer"), ast.Call):
        owner = ast.unparse(made.func).removesuffix(".Config").rpartition(".")[2]
        if "InBackward" in owner:
            raise PlannerError(f"{path}: line {made.lineno}: {owner} updates weights in the backward pass, which is not priced")
        named = [one.value for call in ast.walk(made) if isinstance(call, ast.Call) for one in call.keywords
                 if one.arg in ("name", "optimizer_name")]  # fmt: skip
        names = {str(one.value) if isinstance(one, ast.Constant) else last_name(one) for one in named}
        plain = owner.removeprefix("default_") if owner.startswith("default_") else "AdamW"
        if len(names) > 1 and {one.lower() for one in names} != {"muon", "adamw"}:
            raise PlannerError(f"{path}: line {made.lineno}: optimizers {', '.join(sorted(names))} of one model are not priced")
        other["optimizer"] = "Muon" if len(names) > 1 else next(iter(names), plain)


def finish(path: Path, found: dict[str, dict[str, Any]]) -> None:
    """What the registry of the model was told goes to the degrees. Raises PlannerError for low precision of the experts alone."""
    other = found["other"]
    found.setdefault("parallelism", {}).update(other.pop("registry", {}))
    if other.get("grouped") and "precision" not in other:
        raise PlannerError(f"{path}: low precision of the experts without the linear layers is not priced; choose another function")
