"""How a row's deployment was split: what it states, what follows from the number of GPUs, and what has to be assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.errors import PlannerError
from planner.hardware import HardwareProfile
from planner.model import ModelSpec
from planner.record import record
from planner.serving.runs.methods import dies, pools_of, tensor_group
from planner.serving.runs.run_schema import ServingRow

MOST_GPUS = 1_000_000
WIDE = 8
"""GPUs of one worker up to which it is tensor parallel when a row does not say: a node."""


@record
class Degrees:
    """Degrees of one pool; the fields of ``ServingLayout`` of the same names."""

    tp: int = 1
    pp: int = 1
    replicas: int = 1
    attn_dp: int = 1
    ep: int = 1
    moe_tp: int = 1
    dcp: int = 1

    @property
    def ranks(self) -> int:
        """GPUs of one stage."""
        return self.tp * self.attn_dp

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas."""
        return self.ranks * self.pp * self.replicas


@record
class Split:
    """What a row says of its layout."""

    layouts: tuple[Degrees, ...] = ()
    """The layout, or those that may have run; () = disaggregated, or nothing is stated."""
    prefill: Degrees | None = None
    decode: Degrees | None = None
    stated: bool = True
    """Nothing was assumed that changes the answer."""
    assumed: tuple[str, ...] = ()


def split_of(row: ServingRow, model: ModelSpec, hardware: HardwareProfile) -> Split:
    """The layout of a row. Raises PlannerError where its numbers contradict each other."""
    each = dies(str(row.get("hardware.gpu")))
    count = each * row.get("hardware.count") if row.get("hardware.count") else None
    if row.get("decode") is not None or row.get("prefill") is not None:
        both = {name: dict(row.get(name) or {}) for name in ("prefill", "decode")}
        most = WIDE if max(map(_each, both.values())) <= WIDE else 1
        whole = pools_of(row).get("whole", ())
        pools = [_pool(one, model, name, MOST_GPUS if name in whole else most) for name, one in both.items()]
        (prefill, first), (decode, second) = pools
        if count and prefill.num_gpus + decode.num_gpus != count:
            first += (f"workers of {prefill.num_gpus} + {decode.num_gpus} GPUs, {count} stated",)
        return Split(prefill=prefill, decode=decode, assumed=first + second, stated=not first + second)
    given = dict(row.get("parallel") or {})
    given |= {"tp": each * given["tp"]} if given.get("tp") else {}
    if given.get("tp") is None and given.get("attn_dp") is None and given.get("dp") is None:
        return Split(stated=False, assumed=("layout: the best of the search",))
    if tensor_group(row):
        given |= {"tp": int(given.get("tp") or 1) * int(given.get("attn_dp") or 1), "attn_dp": 1}
    base, assumed = _repaired(given, model, hardware)
    replicas = _replicas(row, count, given, base, model)
    layouts = _experts(row, given, {**base, "replicas": replicas}, model)
    assumed += ("split of experts: the best of those the engine takes",) if len(layouts) > 1 else ()
    assumed += () if count else (f"{layouts[0].num_gpus} GPUs",)
    return Split(layouts=layouts, assumed=assumed, stated=not assumed)


def _repaired(
    given: Mapping[str, Any], model: ModelSpec, hardware: HardwareProfile
) -> tuple[dict[str, int], tuple[str, ...]]:
    """tp, pp, attn_dp and dcp; where tp is that of attention times that of experts, beyond the node, tp alone."""
    found = {key: int(given.get(key) or 1) for key in ("tp", "pp", "attn_dp", "dcp")}
    tp, ep, moe_tp = found["tp"], given.get("ep") or 1, given.get("moe_tp") or 1
    if model.is_moe and ep == moe_tp > 1 and tp == ep * moe_tp and tp > hardware.gpus_per_node:
        return {**found, "tp": ep}, (f"tp {ep}: {tp} is tp x ep, beyond the node",)
    if model.is_moe and int(given.get("dp") or 1) > 1 and found["attn_dp"] == 1:
        found["attn_dp"] = int(given["dp"])
    return found, ()


def _replicas(
    row: ServingRow, count: int | None, given: Mapping[str, Any], base: Mapping[str, int], model: ModelSpec
) -> int:
    """Whole copies: as stated, else GPUs over those of one engine, else what the batch of one rank says."""
    engine = base["tp"] * base["pp"] * base["attn_dp"]
    batch, value = row.get("load.batch_per_rank"), row.get("load.value")
    if not model.is_moe and given.get("dp"):
        engine_copies = int(given["dp"])
    elif count and base["tp"] == (given.get("tp") or 1):
        engine_copies = max(int(count) // engine, 1)
        if engine > count:
            raise PlannerError(f"tp x pp x attention dp is {engine}, but there are {count} GPUs")
    elif batch and value and not count:
        engine_copies = max(round(value / (batch * base["attn_dp"])), 1)
    else:
        engine_copies = 1
    if engine * engine_copies > MOST_GPUS:
        raise PlannerError(f"{engine * engine_copies:,} GPUs are more than the {MOST_GPUS:,} that are read")
    return engine_copies


def _experts(row: ServingRow, given: Mapping[str, Any], base: dict[str, int], model: ModelSpec) -> tuple[Degrees, ...]:
    """The split of experts: as stated, as follows from one degree, else as engines start; offline the best that may be meant."""
    one = Degrees(**base)
    if not model.is_moe:  # attention data parallelism of a dense model is that of whole copies
        return (replace(one, attn_dp=1, replicas=one.replicas * one.attn_dp),)
    ep, moe_tp = given.get("ep"), given.get("moe_tp")
    if ep is None and moe_tp is not None:
        ep = max(one.ranks // int(moe_tp), 1)
    if ep is None:
        spread = [_with(base, ep=1), _with(base, ep=one.ranks)]
        if row.get("load.kind") == "offline" and one.tp > 1 and one.attn_dp == 1:
            return (*spread, _with({**base, "tp": 1, "attn_dp": one.tp}, ep=one.ranks))
        return (spread[0],)
    if one.ranks % int(ep):
        raise PlannerError(f"ep {ep} does not divide the {one.ranks} GPUs of a stage")
    return (_with(base, ep=int(ep)),)


def _with(base: Mapping[str, int], *, ep: int) -> Degrees:
    """Degrees whose experts are spread over ep ranks and cut in as many parts as fill the stage."""
    return Degrees(**{**base, "ep": ep, "moe_tp": base["tp"] * base["attn_dp"] // ep})


def _each(given: Mapping[str, Any]) -> int:
    """GPUs of a worker of a pool; 1 where the pool's are not stated."""
    return max(int(given.get("gpus") or 1) // max(int(given.get("workers") or 0), 1), 1)


def _pool(given: Mapping[str, Any], model: ModelSpec, name: str, most: int) -> tuple[Degrees, tuple[str, ...]]:
    """Workers of one phase; what is not stated from the GPUs of the pool. ``most``: GPUs of a worker up to which it is tensor
    parallel."""
    found = {key: int(given.get(key) or 1) for key in ("tp", "pp", "attn_dp", "dcp")}
    found, workers, assumed = _workers(given, found, model, name, most)
    engine = found["tp"] * found["pp"] * found["attn_dp"]
    if engine * workers > MOST_GPUS:
        raise PlannerError(f"{name}: {engine * workers:,} GPUs are more than the {MOST_GPUS:,} that are read")
    found["replicas"], ranks = workers, found["tp"] * found["attn_dp"]
    if not model.is_moe:
        return Degrees(**found), assumed
    ep = int(given.get("ep") or max(ranks // int(given.get("moe_tp") or ranks), 1))
    ep = ranks if assumed and ranks > most else ep
    if ranks % ep:
        raise PlannerError(f"{name}: ep {ep} does not divide the {ranks} GPUs of a stage")
    return _with(found, ep=ep), assumed


def _workers(
    given: Mapping[str, Any], found: dict[str, int], model: ModelSpec, name: str, most: int
) -> tuple[dict[str, int], int, tuple[str, ...]]:
    """Degrees and number of workers: where the degrees leave most GPUs idle, a worker spans its GPUs, up to ``most`` of them by
    tensor parallelism, more by attention data parallelism with experts spread over all; as the engines' recipes do.

    Where a worker of one pool is wider than WIDE, the recipes spread both pools so: 2 workers of 8 and 1 of 32 are DEP8 and DEP32.
    [SemiAnalysisAI/InferenceX .github/configs/nvidia-master.yaml; ai-dynamo/dynamo gb200-fp8/disagg/*max-tpt.sh]
    """
    engine = found["tp"] * found["pp"] * found["attn_dp"]
    workers, gpus = int(given.get("workers") or 0), int(given.get("gpus") or 0)
    if not gpus:
        return found, max(workers, 1), () if workers else (f"1 {name} worker",)
    each = _each(given)
    if given.get("workers") == 0 and engine == gpus > WIDE:  # no worker spans a pool whose workers are not known
        return {**found, "tp": WIDE}, gpus // WIDE, (f"{gpus // WIDE} {name} workers of {WIDE} GPUs",)
    if engine == each:
        return found, max(workers, 1), ()
    if engine > 1 or each == 1 or not model.is_moe:
        copies = max(gpus // engine, 1)
        return found, copies, (f"{copies} {name} workers of {engine} GPUs",)
    spread = int(given.get("ep") or 1)
    if spread > 1 and most < MOST_GPUS:
        found = {**found, "attn_dp": spread}
    else:
        found = {**found, **({"tp": each} if each <= most else {"attn_dp": each})}
    engine = found["tp"] * found["attn_dp"]
    return found, max(gpus // engine, 1), (f"{name} workers of {engine} GPUs",)
