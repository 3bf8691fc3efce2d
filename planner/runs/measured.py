"""What a row measured, in base units; a printed TFLOP/s or MFU becomes a step time by the formula of its source."""

from collections.abc import Callable
from dataclasses import dataclass

from planner import units
from planner.cost.parameters import active_parameters
from planner.hardware import HardwareProfile
from planner.layout import Layout, Recompute
from planner.model import ModelSpec
from planner.runs.rows import Row
from planner.workload import Workload, peak_dtype


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured, in base units; None = not measured."""

    step_time: float | None = None
    """Seconds of one optimizer step."""
    memory: float | None = None
    """Peak of one GPU, bytes."""
    memory_kind: str = ""
    """'allocated', 'reserved' or 'device'."""
    first_stage: bool = False
    """The peak is that of rank 0, which is on the first stage; else of the stage with the highest."""
    fits: bool | None = None
    """It ran (True) or ran out of GPU memory (False)."""


def _matmul(model: ModelSpec) -> float:
    """Parameters that multiply each token: layers with the active experts, and the head; no embedding table."""
    return active_parameters(model, input_embedding=False)


def _core(model: ModelSpec, length: int) -> float:
    """FLOP per token of scores and their product with the values, whole square, 3 passes: 6 L s a (d + d_v)."""
    full = model.num_full_attention_layers * length + model.num_windowed_layers * min(2 * model.window, length)
    return 6.0 * full * model.num_heads * (model.head_dim + model.value_head_size)


def _narayanan(model: ModelSpec, length: int) -> float:
    h, layers = model.hidden_size, model.num_layers
    return 72.0 * layers * h * h * (1 + length / (6 * h)) + 6.0 * h * model.vocab_size


def _palm(model: ModelSpec, length: int) -> float:
    return 6.0 * active_parameters(model) + _core(model, length)


def _causal(model: ModelSpec, length: int) -> float:
    return 6.0 * _matmul(model) + _core(model, length) / 2


def _full(model: ModelSpec, length: int) -> float:
    return 6.0 * _matmul(model) + _core(model, length)


FORMULAS: dict[str, tuple[str, Callable[[ModelSpec, int], float]]] = {
    "narayanan": ("72 L h^2 (1 + s/6h + V/12Lh), recomputed 96 L h^2 (1 + s/6h + V/16Lh) [SC'21 eq. 3]", _narayanan),
    "palm": ("6 N + 12 L a d s, N active, with the embedding [PaLM, appendix B]", _palm),
    "causal": ("6 N_matmul + 6 L a d s: half of the attention square", _causal),
    "full": ("6 N_matmul + 12 L a d s: the whole attention square", _full),
}
"""FLOP per token behind a printed TFLOP/s or MFU, by name: the equation, and what it gives without recompute."""


def flop_per_token(formula: str, model: ModelSpec, length: int, *, recomputed: bool = False) -> float:
    """FLOP per token by a formula of FORMULAS. Full recompute adds a forward pass of the layers, a third of theirs."""
    flop = FORMULAS[formula][1](model, length)
    head = 6.0 * model.hidden_size * model.vocab_size
    return flop + (flop - head) / 3 if recomputed else flop


def _step_seconds(row: Row, workload: Workload, layout: Layout, hardware: HardwareProfile) -> float | None:
    """Seconds per step: printed, from tokens/s, from TFLOP/s, or from MFU, in this order; 0 counts as not printed."""
    printed, speed = row.get("measured.step_s"), row.get("measured.tokens_per_s_per_gpu")
    if printed:
        return float(printed)
    tokens = workload.tokens / int(layout.num_gpus)
    if speed:
        return float(tokens / speed)
    rate, mfu = row.get("measured.tflops_per_gpu"), row.get("measured.mfu")
    if not rate and not mfu:
        return None
    counted = bool(rate) and str(row.get("measured.tflops_kind") or "").startswith("hardware")
    recomputed = counted and int(layout.recompute) == Recompute.FULL
    formula = str(row.entry.get("flops", "causal"))
    flop = flop_per_token(formula, workload.model, workload.sequence_length, recomputed=recomputed)
    if workload.lora_rank:
        flop *= 4.0 / 6.0  # no weight gradients of frozen weights
    flops = rate * units.TERA if rate else mfu * hardware.peak(peak_dtype(workload.precision))
    return float(tokens * flop / flops)


def measured_of(row: Row, workload: Workload, layout: Layout, hardware: HardwareProfile) -> Measured:
    """Step time, peak memory and whether it fitted, as the row prints them or as they follow from what it prints."""
    step = _step_seconds(row, workload, layout, hardware)
    memory, kind, oom = (
        row.get("measured.mem_gb"),
        str(row.entry.get("memory", "allocated")),
        row.get("measured.oom"),
    )
    match = row.note(r"peak allocated|reserved (?=GiB)|nvidia-smi")
    if match:
        kind = {"peak allocated": "allocated", "nvidia-smi": "device"}.get(match.group(0), "reserved")
    unit = units.GIGA if "GB = 1e9" in row.remarks else units.GIB
    ran = bool(step or memory)
    return Measured(
        step_time=None if oom else step, memory=memory * unit if memory and not oom else None,
        memory_kind=kind if memory and not oom else "", first_stage=bool(row.entry.get("first_stage")),
        fits=False if oom else True if ran else None,
    )  # fmt: skip
