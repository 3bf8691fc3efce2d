"""Rules of the degrees: their product, and what tensor parallelism divides."""

from collections.abc import Iterator
from typing import Any

from planner.rules.rule import Job, divides, divisors_text, rule


@rule("GPUs")
def _gpus(job: Job, x: Any) -> Iterator[Any]:
    gpus = job.cluster.num_gpus
    yield x.num_gpus == gpus
    yield (
        f"tp {x.tp} x pp {x.pp} x dp {x.dp} x cp {x.cp} = {x.num_gpus} GPUs, but the job has {gpus}; choose degrees whose "
        f"product is {gpus}"
    )


@rule("trainer degrees")
def _trainer_degrees(job: Job, x: Any) -> Iterator[Any]:
    tensor = (x.tp == 1) | job.legal.tp
    yield tensor & ((x.pp == 1) | job.legal.pp)
    yield (
        f"{'pp' if tensor else 'tp'} {x.pp if tensor else x.tp}: trainer {job.trainer.name} has no "
        f"{'pipeline' if tensor else 'tensor'} parallelism; set it to 1 or choose another trainer (plan trainers)"
    )


@rule("heads")
def _heads(job: Job, x: Any) -> Iterator[Any]:
    heads = job.model.num_heads
    yield divides(x.tp, heads)
    yield (
        f"tp {x.tp} does not divide the {heads} attention heads of {job.model.name}; tp may be {divisors_text(heads)}"
    )


@rule("key-value heads")
def _kv_heads(job: Job, x: Any) -> Iterator[Any]:
    heads, replicates = job.model.num_kv_heads, job.legal.kv_replication
    fits = divides(x.tp, heads) | ((x.tp % heads == 0) & replicates)
    remedy = (
        "it must divide them or be a multiple of them"
        if replicates
        else f"trainer {job.trainer.name} does not replicate them, so tp must divide {heads}"
    )
    yield fits | job.model.is_mla
    yield f"tp {x.tp} does not fit the {heads} key-value heads of {job.model.name}: {remedy}"


@rule("MLP width")
def _mlp_width(job: Job, x: Any) -> Iterator[Any]:
    width, expert = job.model.ffn_size, job.model.expert_ffn_size
    yield divides(x.tp, width) & (divides(x.etp, expert) | (not job.model.is_moe))
    yield (
        f"the MLP width ({width}, experts {expert}) does not divide by tp {x.tp} (experts: etp {x.etp}); choose a smaller degree"
    )


@rule("linear attention")
def _linear_attention(job: Job, x: Any) -> Iterator[Any]:
    """Heads of linear attention are split by tensor and, for the scan, by context parallelism, where the trainer can.
    [Megatron Core, mamba_context_parallel.py: groups are repeated where the context-parallel ranks are more]"""
    m, legal = job.model.linear, job.legal
    yield (m is None) or (
        ((x.tp == 1) | legal.tp_with_linear_attention) & ((x.cp == 1) | legal.cp_with_linear_attention)
        & divides(x.tp, m.key_heads) & divides(x.tp * x.cp, m.value_heads)
    )  # fmt: skip
    if m is not None and ((x.tp > 1 and not legal.tp_with_linear_attention) or (x.cp > 1 and not legal.cp_with_linear_attention)):
        how = "tensor" if x.tp > 1 and not legal.tp_with_linear_attention else "context"
        yield f"trainer {job.trainer.name} has no {how} parallelism for layers with linear attention; set {how[0]}p to 1"
    elif m is not None:
        yield (
            f"tp {x.tp} must divide the {m.key_heads} key heads (groups), and tp x cp {x.tp * x.cp} the {m.value_heads} value "
            f"heads of linear attention of {job.model.name}; choose smaller degrees"
        )


DEGREES = (_gpus, _trainer_degrees, _heads, _kv_heads, _linear_attention, _mlp_width)
