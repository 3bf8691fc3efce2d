"""What the blocks of a layer share: norms, residuals, linear layers, and tensor-parallel collectives around them."""

import dataclasses

import numpy as np

from planner.cost.layer.adapters import ADAPTER_SCALE_BYTES, adapters_of, dequantise, read_again
from planner.cost.layer.operators import (
    NEVER,
    REPEATED,
    Collective,
    Gemm,
    MemoryBound,
    Number,
    Operator,
    Shard,
)
from planner.layout import Module


def scale_adapters(operators: list[Operator], each: float, shard: Shard) -> list[Operator]:
    """Operators whose adapters move other bytes per output and pass than ADAPTER_SCALE_BYTES to scale it."""
    if each == ADAPTER_SCALE_BYTES:
        return operators
    found = list(operators)
    for number, one in enumerate(operators):
        if isinstance(one, MemoryBound) and one.name.endswith("_lora_add"):
            outputs = one.forward / (3 * shard.element + ADAPTER_SCALE_BYTES)
            more = outputs * (each - ADAPTER_SCALE_BYTES)
            found[number] = dataclasses.replace(one, forward=one.forward + more, backward=one.backward + more)
    return found


def norm(
    shard: Shard, name: str, *readers: str, inside: Module | None = None, first: bool = False, rows: Number | None = None
) -> Operator:
    """One norm: reads and writes T_s h forward, three times that backward.

    Keeps its input (the residual stream); its output is kept as the input of the next linear layer: T_s h, or T h where
    the trainer saves the gathered input.  [Korthikanti 2022, section 4.1: 4 s b h for two norms]
    ``readers``: those layers; frozen ones keep nothing, and neither does a frozen norm of plain operations keep what it scales.
    Per-operator recompute keeps the input of the ``first`` of a layer alone.
    ``rows``: of its output that are kept, where its readers take others.
    ``inside``: with Transformer Engine the norm belongs to the linear layer behind it, and is repeated with that module only.
    """
    model, e = shard.model, shard.element
    values = shard.tokens_split * model.hidden_size
    if rows is None:
        rows = shard.tokens if shard.trainer.stored.gathered_inputs else shard.tokens_split
    kernels = shard.trainer.kernels
    passes, width = kernels.norm_passes, kernels.saved_norm_bytes
    if model.norm != "rmsnorm":  # torch has a kernel for it; with casts of 2 + 4 and 4 + 2 around it where autocast runs it in fp32
        passes, width = (5.0, 4.0) if "layer_norm" in kernels.unfused and e < 4 else (1.0, 2.0)
    fused = inside is not None and shard.trainer.kernels.transformer_engine
    width = min(width, 4.0) if shard.workload.lora_rank else width
    return MemoryBound(
        name=name, kind="norm", module=(inside if fused and inside is not None else Module.NORM) | REPEATED,
        forward=2 * values * e * passes, backward=3 * values * e * passes,
        kept=values * e * np.where(shard.listed > 0, float(first), width / 2),
        saved=rows * model.hidden_size * shard.input_element * read_again(shard, *readers),
        launches=(passes, 2 * passes),
    )  # fmt: skip


def residual(shard: Shard, name: str, *, ends: bool = False) -> Operator:
    """Dropout and residual addition: two reads and a write forward; backward the dropout mask is applied, and the
    gradient of the branch added to that of the residual: a read more within the norm, two reads and a write apart."""
    values, e, passes = (
        shard.tokens_split * shard.model.hidden_size,
        shard.element,
        shard.trainer.kernels.elementwise_passes,
    )
    mask = shard.dropout
    added = 3.0 if "gradient_sum" in shard.trainer.kernels.unfused else 1.0
    return MemoryBound(
        name=name, kind="elementwise", forward=(3 * e + mask) * values * passes,
        backward=(added * e + mask * (e + 1)) * values * passes, kept=mask * values, module=REPEATED, ends=ends,
        launches=(passes, passes * (mask + 0.5)),
    )  # fmt: skip


def tp_pair(shard: Shard, name: str, column: str, row: str, module: Module, *, ends: bool = False) -> list[Collective]:
    """Tensor-parallel collectives around a column-parallel and a row-parallel layer.

    With sequence parallelism: all-gather before, reduce-scatter after, and the mirror image backward, where the input
    of the column-parallel layer is gathered again for its weight gradient, unless the trainer saved it gathered or only
    adapters are trained. Without: an all-reduce after (forward) and one before (backward).  Size T h elements each.
    [Korthikanti 2022, section 4.2.2; TransformerEngine, layernorm_linear.py: nothing is gathered for frozen weights]
    What is gathered is the input or the output gradient of a linear layer: quantised first where inputs are kept in
    fp8 [TransformerEngine, gather_along_first_dim with a quantizer]; sums travel in bf16. Pipelined with its GEMM, a
    gather starts on the rank's own piece; of a reduce-scatter the last piece is never hidden.
    """
    size = shard.tokens * shard.model.hidden_size * shard.element
    linear = column not in ("", "logits")
    gathered = shard.tokens * shard.model.hidden_size * (shard.gathered_element if linear else shard.element)
    on = np.asarray(shard.layout.sequence_parallel) == 1
    split, whole = np.where(on, shard.tp, 1.0), np.where(on, 1.0, shard.tp)

    def one(suffix: str, op: str, n: Number, backward: bool, overlap: str, overlaps_with: str) -> Collective:
        repeats = module | REPEATED if suffix == "gather" else module
        return Collective(
            name=f"{name}_{suffix}", group="tp", op=op, size=gathered if op == "all_gather" else size, n=n,
            stride=1.0, backward=backward, module=repeats,
            overlap=overlap, overlaps_with=overlaps_with, chunked=overlap == "tp" and op != "all_gather",
            ends=ends and suffix in ("scatter", "reduce"),
        )  # fmt: skip

    gather_again = [] if shard.trainer.stored.gathered_inputs or (linear and shard.workload.lora_rank) else [
        one("gather_again", "all_gather", split, True, "tp_backward", f"{column}.dgrad")
    ]  # fmt: skip
    return [
        one("gather", "all_gather", split, False, "tp", f"{column}.forward"),
        one("scatter", "reduce_scatter", split, False, "tp", f"{row}.forward"),
        one("gather_gradient", "all_gather", split, True, "tp", f"{row}.dgrad"),
        *gather_again,
        one("scatter_gradient", "reduce_scatter", split, True, "tp_backward", f"{column}.wgrad"),
        one("reduce", "all_reduce", whole, False, "tp", f"{row}.forward"),
        one("reduce_gradient", "all_reduce", whole, True, "tp_backward", f"{column}.wgrad"),
    ]


def rank_order(shard: Shard, name: str, module: Module) -> list[Operator]:
    """Copies around the collectives of ``tp_pair``: out of the gathered buffer and into the one that is scattered.

    A tensor (batch, sequence, hidden) gathered over its second dimension arrives in rank order and is copied once,
    read and written; before a reduce-scatter likewise. Forward and backward alike.  [torch, _functional_collectives.py]
    Pipelined with its GEMM, a reduce-scatter reads all partial sums once to add them, and the gathered input is brought
    into order for the weight gradient alone.  [torch, _symmetric_memory] Launches are left out: large tensors.
    """
    on = (np.asarray(shard.layout.sequence_parallel) == 1) & (shard.tp > 1)
    if not shard.trainer.kernels.tp_copies or not np.any(on):
        return []
    values = np.where(on, shard.tokens * shard.model.hidden_size, 0.0)
    gathered, scattered = 2.0 * shard.gathered_element, 2.0 * shard.element
    if "tp" in shard.trainer.traffic.overlap:
        return [MemoryBound(name=f"{name}_rank_order", kind="copy", forward=values * scattered / 2.0,
                            backward=values * (gathered + scattered / 2.0), launches=(0.0, 0.0))]  # fmt: skip
    return [MemoryBound(name=f"{name}_rank_order", kind="copy", forward=values * (gathered + scattered),
                        backward=values * (gathered + scattered), module=module | REPEATED, launches=(0.0, 0.0),
                        share=gathered / (gathered + scattered))]  # fmt: skip


def input_gradient_sum(shard: Shard, name: str, more: float, rows: Number, *, reader: str) -> list[Operator]:
    """Input gradients of linear layers that read one tensor, ``more`` of them beyond the first, added up.

    Each is what a GEMM put out. Plain torch adds them one by one: two reads and a write, 3 ``more`` rows h. Compiled, the sum is
    made by its ``reader``: the backward pass of the 'norm' reads each ``norm_passes`` times, a 'copy' once. Where ranks gathered
    the norm's output, the sum is copied into rank order and reduce-scattered; no GEMM puts it out, so none is pipelined with it
    and the copy reads and writes all, twice what ``rank_order`` counts then.
    [torch 2.13: the code that inductor makes of a layer; _inductor/fx_passes/micro_pipeline_tp.py, _find_producer_matmul]
    """
    trainer, size = shard.trainer, rows * shard.model.hidden_size * shard.element
    if not more:
        return []
    if "gradient_sum" in trainer.kernels.unfused:
        return [MemoryBound(name=f"{name}_gradient_sum", kind="elementwise", forward=0.0 * size, backward=3.0 * more * size,
                            launches=(0.0, more))]  # fmt: skip
    scattered = (np.asarray(shard.layout.sequence_parallel) == 1) & (shard.tp > 1) & (reader == "norm")
    once = scattered | (reader == "copy")
    whole = np.where(scattered & ("tp" in trainer.traffic.overlap) & trainer.kernels.tp_copies, 1.0, 0.0)
    return [MemoryBound(name=f"{name}_gradient_sum", kind="elementwise", forward=0.0 * size, launches=(0.0, 0.0),
                        backward=(more * np.where(once, 1.0, trainer.kernels.norm_passes) + whole) * size)]  # fmt: skip


def linear(shard: Shard, name: str, m: Number, n: Number, k: Number, **more: object) -> list[Operator]:
    """A linear layer; frozen, with its low-rank adapters, when only those are trained."""
    groups, module = more.get("groups", 1.0), more.get("module", NEVER)
    frozen = shard.workload.lora_rank > 0
    gemm = Gemm(name=name, m=m, n=n, k=k, trained=not frozen, **{"launches": (1.0, 2.0), **more})  # type: ignore[arg-type]
    if not frozen:
        return [gemm]
    return [
        *dequantise(shard, name, n, k, groups, module), gemm, *adapters_of(shard, name, m, n, k, groups),  # type: ignore[arg-type]
    ]  # fmt: skip
