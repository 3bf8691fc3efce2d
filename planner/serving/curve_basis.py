"""Where the kernels come from that a plan is priced by: measured on its device, scaled from another, or derived."""

from __future__ import annotations

from dataclasses import replace

from planner.errors import listed
from planner.serving.plan_pricing import served_of
from planner.serving.serve_plan import ServePlan

MEASURED = "measured"


def curve_basis(plan: ServePlan) -> dict[str, str]:
    """Operators of a plan in words, and where their curves come from; of several kinds of GPU the name of each before it."""
    kinds = list(dict.fromkeys(one.hardware for one in plan.stages)) or [plan.hardware]
    return {
        f"{kind}: {operator}" if len(kinds) > 1 else operator: said
        for kind in kinds for operator, said in _of_device(replace(plan, hardware=kind)).items()
    }  # fmt: skip


def _of_device(plan: ServePlan) -> dict[str, str]:
    model, one, curves = plan.model, plan.precision, served_of(plan).curves
    routed, known = one.experts or one.weights, {**curves.provenance, "gemm": curves.hardware.measured["gemm"]}
    used = {"matrix products of decodes": ("linear", one.weights), "matrix products of prompts": ("gemm", "")}
    if model.is_moe:
        used["experts"] = ("experts", routed)
    used["attention of decodes"] = ("decode_mla" if model.is_mla else "decode_attention", "")
    if model.linear:
        used["linear attention"] = ("linear_update", "")
    used["attention of prompts"] = ("sparse_prefill" if model.is_sparse else "prefill_attention", "")
    if any(int(pool.tp) > 1 for pool in plan.pools().values()):
        used["all-reduces"] = ("all_reduce", "")
    if model.is_moe and any(int(pool.ep) > 1 and int(pool.attn_dp) > 1 for pool in plan.pools().values()):
        used["exchange of experts"] = ("exchange", "")
    found = {}
    for words, (operator, form) in used.items():
        base = known[operator].partition(", backward")[0].removeprefix("forward ").replace("; ", ", ")
        derived = known.get(f"{operator} {form}", "")
        found[words] = base if not derived else derived if base == MEASURED else f"{derived}, {base}"
    return found


def basis_text(basis: dict[str, str]) -> str:
    """The same in one line, operators of one origin together."""
    by_origin: dict[str, list[str]] = {}
    for operator, said in basis.items():
        by_origin.setdefault("measured on this device" if said == MEASURED else said, []).append(operator)
    parts = [f"{listed(operators, 'and')} {said}" for said, operators in by_origin.items()]
    return f"Curves: {'; '.join(parts)}."
