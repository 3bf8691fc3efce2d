"""What a row measured, in base units; a printed TFLOP/s or MFU becomes a step time by the formula of its source."""


from planner import units
from planner.cost.parameters import active_parameters
from planner.hardware import HardwareProfile
from planner.layout import Layout, Recompute
from planner.model import ModelSpec
from planner.record import record
from planner.runs.rows import Row
from planner.workload import Workload, peak_dtype


@record
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


FORMULAS: dict[str, tuple[bool, float]] = {
    "narayanan": (False, 1.0),  # 72 L h^2 (1 + s/6h + V/12Lh), recomputed 96 L h^2 (1 + s/6h + V/16Lh) [SC'21 eq. 3]
    "palm": (True, 1.0),  # 6 N + 12 L a d s, N active, with the embedding [PaLM, appendix B]
    "causal": (False, 0.5),  # 6 N_matmul + 6 L a d s: half of the attention square
    "full": (False, 1.0),  # 6 N_matmul + 12 L a d s: the whole attention square
}
"""FLOP per token behind a printed TFLOP/s or MFU, by name: whether N counts the embedding table, and the part of the square."""


def flop_per_token(formula: str, model: ModelSpec, length: int, *, recomputed: bool = False) -> float:
    """FLOP per token by a formula of FORMULAS. Full recompute adds a forward pass of the layers, a third of theirs."""
    embedding, share = FORMULAS[formula]
    h, head = model.hidden_size, 6.0 * model.hidden_size * model.vocab_size
    if formula == "narayanan":  # counts the weights of a GPT, whatever the model has
        flop = 72.0 * model.num_layers * h * h * (1 + length / (6 * h)) + head
    else:  # scores and their product with the values in three passes: 6 L s a (d + d_v)
        seen = model.num_full_attention_layers * length + model.num_windowed_layers * min(2 * model.window, length)
        square = 6.0 * seen * model.num_heads * (model.head_dim + model.value_head_size)
        flop = 6.0 * active_parameters(model, input_embedding=embedding) + share * square
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
    memory, oom, kind = row.get("measured.mem_gb"), row.get("measured.oom"), str(row.entry.get("memory", "allocated"))
    match = row.note(r"peak allocated|reserved (?=GiB)|nvidia-smi")
    if match:
        kind = {"peak allocated": "allocated", "nvidia-smi": "device"}.get(match.group(0), "reserved")
    unit = units.GIGA if "GB = 1e9" in row.notes else units.GIB
    ran = bool(step or memory)
    return Measured(
        step_time=None if oom else step, memory=memory * unit if memory and not oom else None,
        memory_kind=kind if memory and not oom else "", first_stage=bool(row.entry.get("first_stage")),
        fits=False if oom else True if ran else None,
    )  # fmt: skip
