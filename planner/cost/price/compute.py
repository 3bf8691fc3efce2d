"""Operators to seconds and FLOP: measured curves of the hardware profile, at the sustained clock."""


import numpy as np

from planner.arrays import Floats
from planner.cost.layer.operators import Attention, GatheredRows, Gemm, MemoryBound, Number, Operator, Scan, Shard
from planner.cost.price.deduplicate import distinct_values, stacked
from planner.cost.price.gathering import gathered_seconds
from planner.hardware import HardwareProfile
from planner.layout import Module, Recompute
from planner.record import record
from planner.trainer_records import Casts
from planner.workload import LOW_PRECISIONS, Workload

NO_CASTS = Casts(inputs=0.0)
GRAPH_LAUNCHES = 1.0
"""Launches per layer and pass when a CUDA graph holds it."""


FA1_SLOWDOWN = 1.75
"""Time of flash attention 1 over version 2 on an A100: forward and backward, causal, head size 128, 2k to 8k tokens.

[Dao 2023, arXiv 2307.08691, section 4.1: 1.7 to 3 times as fast as FlashAttention, the lower end at these sizes]
"""


ALIGNED = 8
"""Elements of 2 bytes in the 16 that a tensor core's operand must be aligned to.

[NVIDIA, Matrix Multiplication Background, tensor core requirements; cuBLAS of 2022 and before, strided batches]
"""
MISALIGNED_EFFICIENCY = 0.51
"""Part of the fp32 rate of the ordinary cores that a batched GEMM reaches whose operands are not aligned.

Three pairs of runs of BLOOM's prequel that differ in the number of heads alone (rows 055 and 056, 090 and 091, 092 and 093; head
size 144 and 108): 38, 44 and 39 s more for 4.2e14 to 4.5e14 FLOP of attention, 9.8 to 10.0 of 19.5 TFLOP/s in all three. Head
sizes 150 and 450 there and 145 on V100 were not used.
"""
SCAN_BANDWIDTH = (0.75, 20e9)
"""What the kernels of a chunked scan move, bytes/s: at most this part of the memory bandwidth, and this per multiprocessor.

Between two sets of kernels on L40S, RTX PRO 6000, H100, H200, B200, B300, GB200, GB300 (from 4k tokens, median over 952 and 4,440
shapes): 0.80 and 21.5e9 fit the faster one within 7 %, 16 % more time the slower, which is the one that training uses. Causal
convolutions reach as much. [tables of linear attention of serving engines, 2026-11, chunk_gated_delta_rule, causal_conv1d_fn]
"""
SCAN_BACKWARD = 1.2
"""Time per byte of the backward pass of a scan over that of its forward pass: GB200, gated delta net, 96 heads of 8k tokens take
4.74 ms both passes and 1.27 forward, 16 heads of 16k 3.62 and 1.03, 64 heads of 4k 5.96 and 1.58: 1.15 to 1.22. [fla, README]
"""
MAMBA_PRODUCTS = 1.1e12
"""FLOP/s per multiprocessor of the products of Mamba-2, without the time of their bytes: the chunk scan of mamba_ssm reaches 91
TFLOP/s on H800 (80 heads of 64, states of 128, chunks of 256, 8k to 32k tokens), 0.36 ns per token and head, 0.14 of them bytes.
[tilelang, benchmark/mamba2, the baseline of Triton 3.5, mamba-ssm 2.2.6]"""
SCAN_STEP = 1.7e-6
"""Seconds of one chunk of 64 tokens in the kernel of a delta rule that carries the state: with 2 to 4 heads and one sequence
the whole scan takes 24 to 33 ns per token on all eight devices; 32 heads take less than twice as long. [the same tables]"""
KIMI_SLOWDOWN = 1.25
"""Time per byte of the scan of Kimi delta attention over that of the gated delta net: 1.1 to 1.3 on the same eight devices, which
is 2.0 to 2.3 times as long per token and head. [the same tables, chunk_kda]"""
RATE_SPREAD = 0.02
"""Standard deviation of the sustained rate of GPUs of one kind in one job, over their mean.

Calibrated on how the step time grows with the number of GPUs at a constant share of work per GPU, never on its level: series
of one model and layout on 8 to 2304 H100 of DGX Cloud 24.11, 25.03 and 25.04 (32 series; median 0.018 in bf16, 0.03 in fp8).
Measured spreads of power-limited GPUs in five clusters: 8 % between the slowest and the fastest, a sigma of 0.013 to 0.02
[Sinha 2022, "Not All GPUs Are Created Equal", SC22].
"""
RATE_GROUP = 8.0
"""GPUs whose slowest one the sustained clock of a profile describes: a node, the smallest job that it was read off."""


def straggling(num_gpus: object) -> Floats:
    """How much longer the slowest of N GPUs computes than the slowest of a node; everybody waits for it.

    Ranks meet in every collective and every optimizer step, so a job runs at the rate of its slowest GPU. The slowest of N
    lies E(N) = sqrt(2 ln N) - (ln ln N + ln 4 pi - 2 gamma) / (2 sqrt(2 ln N)) standard deviations below the mean (maximum
    of N normal variables, within 0.1 from N = 8):  sigma (E(N) - E(8)), nothing up to one node.
    """
    return RATE_SPREAD * (_extreme(num_gpus) - _extreme(RATE_GROUP))


def _extreme(num_gpus: object) -> Floats:
    """Mean of the largest of N normal variables, in standard deviations; of those of a node where there are fewer."""
    n = np.maximum(np.asarray(num_gpus, dtype=float), RATE_GROUP)
    root = np.sqrt(2.0 * np.log(n))
    return np.asarray(root - (np.log(np.log(n)) + np.log(4.0 * np.pi) - 2.0 * np.euler_gamma) / (2.0 * root))


def stage_straggling(num_gpus: object, pp: object, seconds: Floats, computed: Floats) -> Floats:
    """``straggling_of`` pipelines of N GPUs whose p - 2 middle stages are alike, shape (N,).

    ``seconds``: of a microbatch on the first, a middle and the last stage, (3, N).
    """
    gpus, stages = np.asarray(num_gpus, dtype=float), np.maximum(np.asarray(pp, dtype=float), 1.0)
    if np.all(stages == 1.0):
        return straggling(gpus)
    counts = np.stack([np.ones_like(stages), np.maximum(stages - 2.0, 0.0), np.where(stages > 1.0, 1.0, 0.0)])
    return straggling_of(counts * gpus / stages, seconds, computed)


def straggling_of(gpus: Floats, seconds: Floats, computed: Floats) -> Floats:
    """How much the slowest GPU adds to the step of a pipeline, over the computation C of its slowest stage, shape (N,).

    A stage with less to do than the slowest one waits for it; its slow GPUs hold nobody up until that slack is used. Of n_k
    GPUs on stages with slack u_k = (max T - T_k) / (sigma C), as many pass a level z as of n_k exp(-u_k z - u_k^2 / 2) on the
    slowest stage (ratio of the tails of two normal densities u_k apart). So

        sigma (E(n) - E(8)),   n = sum of n_k exp(-u_k z - u_k^2 / 2),   z = E(n)

    Equal stages: n = N, as without a pipeline. ``gpus``: n_k of each stage; ``seconds``: T of a microbatch there, (stages, N) both.
    """
    real = np.where(gpus > 0.0, seconds, 0.0)
    slack = (real.max(axis=0) - real) / (np.maximum(computed, np.finfo(float).tiny) * RATE_SPREAD)
    fixed = -0.5 * slack * slack

    def passing(level: Floats) -> Floats:
        return np.asarray((gpus * np.exp(fixed - slack * level)).sum(axis=0))

    level = _extreme(passing(np.full(np.shape(computed), np.sqrt(2.0 * np.log(RATE_GROUP)))))
    level = 0.5 * (level + _extreme(passing(level)))
    return straggling(passing(level))


@record
class Work:
    """GPU seconds of one operator and microbatch."""

    forward: Number = 0.0
    dgrad: Number = 0.0
    wgrad: Number = 0.0
    flop: Number = 0.0
    """FLOP of the forward pass; attention counts the causal half once."""


def price(operators: list[Operator], shard: Shard, hardware: HardwareProfile) -> dict[str, Work]:
    """Seconds of every operator by its name; GEMMs of one kind are looked up together."""
    found: dict[str, Work] = {}
    for low_precision in (True, False):
        alike = [one for one in operators if isinstance(one, Gemm) and one.low_precision == low_precision]
        plain = [one for one in alike if np.ndim(one.groups) == 0 and one.groups == 1.0]
        found |= _gemms(plain, shard, hardware, low_precision)
        found |= {one.name: _grouped(one, shard, hardware) for one in alike if one.name not in found}
    found |= {one.name: _other(one, shard, hardware) for one in operators if one.name not in found}
    return found | {
        one.name: _all_of(one, found[one.name], shard) for one in operators if one.repeats != 1.0 or one.forward_only
    }


def _all_of(operator: Operator, work: Work, shard: Shard) -> Work:
    """What stands for several, and what has no backward pass, whose FLOP an estimate multiplies by passes all the same."""
    times = 1.0 if isinstance(operator, MemoryBound) else operator.repeats
    if not operator.forward_only:
        return Work(
            forward=work.forward * times, dgrad=work.dgrad * times, wgrad=work.wgrad * times, flop=work.flop * times
        )
    return Work(forward=work.forward * times, flop=work.flop * times / model_passes(shard.workload))


def model_passes(workload: Workload) -> float:
    """FLOP of a step over those of one forward pass: that of a reference model, input and weight gradients, of adapters alone the
    former."""
    return workload.forwards + (2.0 if workload.lora_rank == 0 else 1.0)


def _other(operator: Operator, shard: Shard, hardware: HardwareProfile) -> Work:
    if isinstance(operator, Attention):
        return _attention(operator, shard, hardware)
    if isinstance(operator, MemoryBound):
        floor = hardware.launch_floor
        kinds = ("norm_forward", "norm_backward") if operator.kind == "norm" else (operator.kind, operator.kind)
        return Work(
            forward=hardware.memory_time(operator.forward, kinds[0]) + operator.launches[0] * floor,
            dgrad=hardware.memory_time(operator.backward, kinds[1]) + operator.launches[1] * floor,
        )
    if isinstance(operator, Scan):
        return _scan(operator, shard, hardware)
    if isinstance(operator, GatheredRows):
        forward, backward = gathered_seconds(operator, hardware)
        return Work(forward=forward, dgrad=backward, flop=operator.model_flop)
    raise AssertionError(f"operator of unknown kind: {operator.name}")


def _scan(one: Scan, shard: Shard, hardware: HardwareProfile) -> Work:
    """Bytes of the kernels that work on all chunks at once, and of those that carry a state, or their steps if that is longer:

        t = a (bytes / W_s + max(carried / W_s, chunks t_step) + FLOP / R) + launches,   W_s = min(0.75 W, 20e9 multiprocessors)

    a: SCAN_BACKWARD in the backward pass, times KIMI_SLOWDOWN; FLOP: of Mamba-2, in the others they hide behind the bytes.
    """
    linear, (share, each) = shard.model.linear, SCAN_BANDWIDTH
    slower = KIMI_SLOWDOWN if linear is not None and linear.gate_rank else 1.0
    rate = min(share * hardware.memory_bandwidth, each * hardware.compute_units)

    def seconds(together: Number, number: int) -> Number:
        carried = np.maximum(one.carried[number] / rate, one.steps[number] * SCAN_STEP)
        products = one.products[number] / (MAMBA_PRODUCTS * hardware.compute_units)
        return slower * (together / rate + carried + products) + one.launches[number] * hardware.launch_floor

    return Work(forward=seconds(one.forward, 0), dgrad=SCAN_BACKWARD * seconds(one.backward, 1), flop=one.flop)


def gemm_dtype(shard: Shard, low_precision: bool, hardware: HardwareProfile) -> str:
    """Recipe of a GEMM in the hardware profile: that of the precision for linear layers, bf16 for all others."""
    precision = shard.workload.precision
    if precision in LOW_PRECISIONS and low_precision:
        if precision in ("mxfp8", "fp8_row"):  # scales applied inside the tensor core or to sums: ``block_scaling``
            return "fp8"
        return precision
    if precision == "fp32":
        return "tf32" if "tf32" in hardware.peak_flops else "fp32"
    return "bf16"


def _gemms(gemms: list[Gemm], shard: Shard, hardware: HardwareProfile, low_precision: bool) -> dict[str, Work]:
    """Dense GEMMs of one precision, all shapes in one look at the curve."""
    if not gemms:
        return {}
    rows = np.size(shard.tp)
    sides = [[getattr(one, name) for one in gemms] for name in ("m", "n", "k")]
    some, which = distinct_values([one for side in sides for one in side], rows)
    m, n, k = (stacked(side, rows)[:, some] for side in sides)
    dtype = gemm_dtype(shard, low_precision, hardware)
    times = hardware.gemm_times(m, n, k, dtype, True, shard.trainer.stored.gradient_bytes) / hardware.sustained_clock
    if low_precision:
        times = times * hardware.block_scaling.get(shard.workload.precision, 1.0)
    times = times[..., which]
    return {one.name: _gemm(one, shard, hardware, times[:, number]) for number, one in enumerate(gemms)}


def _grouped(gemm: Gemm, shard: Shard, hardware: HardwareProfile) -> Work:
    """Equal GEMMs in one launch: the experts of a rank, or the heads of unfused attention."""
    dtype = gemm_dtype(shard, gemm.low_precision, hardware)
    times = [
        hardware.grouped_gemm_time(
            gemm.m,
            gemm.n,
            gemm.k,
            gemm.groups,
            dtype,
            pass_,
            quantised=True,
            gradient_bytes=shard.trainer.stored.gradient_bytes,
        )  # fmt: skip
        for pass_ in ("forward", "dgrad", "wgrad")
    ]
    seconds = np.stack(np.broadcast_arrays(*times)) / hardware.sustained_clock
    if gemm.activations and dtype == "bf16":
        seconds = np.maximum(seconds, _misaligned_seconds(gemm, hardware))
    return _gemm(gemm, shard, hardware, seconds)


def _misaligned_seconds(gemm: Gemm, hardware: HardwareProfile) -> Number:
    """2 m n k g / (P_fp32 e) when rows of an operand do not begin at multiples of 16 bytes, else 0.

    Batches of heads lie behind each other: the head size decides. Such GEMMs leave the tensor cores.
    """
    odd = (np.asarray(gemm.n) % ALIGNED != 0) | (np.asarray(gemm.k) % ALIGNED != 0)
    if not np.any(odd) or "fp32" not in hardware.peak_flops:
        return 0.0
    flop = 2.0 * gemm.m * gemm.n * gemm.k * gemm.groups
    return np.where(odd, flop / (hardware.peak("fp32") * MISALIGNED_EFFICIENCY), 0.0)


def _gemm(gemm: Gemm, shard: Shard, hardware: HardwareProfile, times: Floats) -> Work:
    """2 m n k FLOP each for Y, dX and dW; ``times`` of the three passes at the sustained clock.

    In fp8 and fp4 the GEMM runs on quantised inputs; quantising X (m k) and dY (m n) moves bytes of its own, and so do W
    (n k, half of it in each pass) and sums that are scaled by kernels of their own (dX m k, dW n k) where a trainer does.
    """
    forward, dgrad, wgrad = times
    second: Number = dgrad if gemm.activations else (wgrad if gemm.trained else 0.0)
    each = quantise_bytes(shard, gemm.low_precision)
    if each:
        rows = gemm.m * gemm.groups
        inputs, gradients = (
            (not done) * cast_bytes(each, ranks, shard, hardware)
            for done, ranks in zip(gemm.quantised, gemm.gathered, strict=True)
        )
        forward = forward + hardware.memory_time(inputs * rows * gemm.k, "quantize")
        dgrad = dgrad + hardware.memory_time(gradients * rows * gemm.n, "quantize")
        weights = gemm.n * gemm.k * gemm.groups
        cast = hardware.memory_time(0.5 * _casts(shard).weights * weights, "quantize")
        rescale = _casts(shard).outputs
        dgrad = dgrad + cast + hardware.memory_time(rescale * rows * gemm.k, "elementwise")
        forward = forward + cast
        second = second + hardware.memory_time(rescale * weights * gemm.trained, "elementwise")
    return Work(
        forward=forward, dgrad=dgrad, wgrad=second, flop=2.0 * gemm.m * gemm.n * gemm.k * gemm.groups * gemm.useful
    )


def cast_bytes(each: float, ranks: Number, shard: Shard, hardware: HardwareProfile) -> Number:
    """Bytes per gathered element that one rank moves to quantise X or dY, of which it casts 1 / ``ranks`` of the rows: q / t.

    With one scale per tensor the transposed copy, 1 of the q bytes, is not sent: Blackwell's tensor cores need none, on others
    every rank makes it of all rows after the gather, reading and writing them: (q - 1) / t + 2.
    torchao, which gathers one scale per tensor in fp8 as well, makes the copy on every device (assumed: its kernels take one
    operand by columns).  [TransformerEngine, layernorm_linear.py: the norm's output is quantised, then gathered; base.py,
    grad_output_preprocess; distributed.py, _all_gather_fp8; quantizer.cpp: no transpose where non-TN GEMMs in fp8 are
    supported, capability 10 and 11]
    """
    if shard.workload.precision != "fp8":
        return each / ranks
    if shard.trainer.kernels.transformer_engine and hardware.arch in ("Blackwell", "Blackwell Ultra"):
        return (each - 1.0) / ranks
    return np.where(np.asarray(ranks) > 1.0, (each - 1.0) / ranks + 2.0, each)


def quantise_bytes(shard: Shard, low_precision: bool) -> float:
    """Bytes moved per element of X and of dY to quantise it (0 in bf16)."""
    precision = shard.workload.precision
    return _casts(shard).inputs if low_precision and precision in LOW_PRECISIONS else 0.0


def _casts(shard: Shard) -> Casts:
    """What quantising costs in the precision of the workload."""
    return shard.trainer.kernels.casts.get(shard.workload.precision, NO_CASTS)


def _attention(attention: Attention, shard: Shard, hardware: HardwareProfile) -> Work:
    """Mean over the model's full and windowed layers; backward is one kernel and belongs to the input gradient.

    Chunks are documents of their own: s/w of them with w tokens each.

    In fp8 the backward pass does not skip what lies outside of the window.  [cudnn-frontend, benchmark/sdpa_benchmark_training,
    gpt_oss on GB200 and GB300, cuDNN 9.22: window of 128, 0.47, 1.48, 5.19, 19.4, 74.8 ms from 2k to 32k tokens on GB300]
    """
    model = shard.model
    if attention.head_dim:
        return _image_attention(attention, shard, hardware)
    value_dim = model.attention_output_size / model.num_heads
    # fp32: where a profile measured it, else at the tf32 peak.
    plain = "fp32" if shard.workload.precision == "fp32" else "bf16"
    dtype = shard.trainer.kernels.attention_dtype if shard.workload.precision in LOW_PRECISIONS else plain

    def seconds(pass_: str, window: int) -> Number:
        chunks = np.maximum(attention.seq_kv / window, 1.0) if window and model.chunked_attention else 1.0
        return hardware.attention_time(
            shard.batch * attention.documents * chunks, attention.heads, attention.kv_heads, model.head_dim,
            attention.seq_q / chunks, attention.seq_kv / chunks, True, pass_, dtype, window * (not model.chunked_attention),
            value_dim, attention_kernel(shard, hardware),
        )  # fmt: skip

    windowed = model.num_windowed_layers / model.num_attention_layers if model.window else 0.0

    def mean(pass_: str) -> Number:
        time: Number = 0.0
        if windowed < 1.0:
            time = (1.0 - windowed) * seconds(pass_, 0)
        if windowed > 0.0:
            whole = dtype == "fp8" and pass_ == "backward"
            time = time + windowed * seconds(pass_, 0 if whole else model.window)
        return (
            time * (FA1_SLOWDOWN if shard.trainer.kernels.attention_kernel == "fa1" else 1.0) / hardware.sustained_clock
        )

    keys = np.where(windowed > 0, np.minimum(model.window, attention.seq_kv), attention.seq_kv)
    pairs = attention.seq_q * attention.seq_kv * 0.5
    within = attention.seq_q * keys * (0.5 if model.chunked_attention else 1.0 - 0.5 * keys / attention.seq_kv)
    pairs = (1.0 - windowed) * pairs + windowed * within
    flop = 2.0 * shard.batch * attention.documents * attention.heads * pairs * (model.head_dim + value_dim)
    return Work(forward=mean("forward"), dgrad=mean("backward"), flop=flop)


def _image_attention(one: Attention, shard: Shard, hardware: HardwareProfile) -> Work:
    """Within the images of a microbatch, every patch sees every other."""
    plain = "fp32" if shard.workload.precision == "fp32" else "bf16"
    forward, backward = (
        hardware.attention_time(
            shard.batch * one.documents, one.heads, one.kv_heads, one.head_dim, one.seq_q, one.seq_kv, False, pass_, plain,
            kernel=attention_kernel(shard, hardware),
        ) / hardware.sustained_clock
        for pass_ in ("forward", "backward")
    )  # fmt: skip
    flop = 4.0 * shard.batch * one.documents * one.heads * one.seq_q * one.seq_kv * one.head_dim
    return Work(forward=forward, dgrad=backward, flop=flop)


def attention_kernel(shard: Shard, hardware: HardwareProfile) -> str:
    """The trainer's kernel where the device has it; else the best, as torch picks cuDNN where flash attention 2 is absent."""
    kernel = shard.trainer.kernels.attention_kernel.replace("fa1", "fa2")
    kinds = {kind for kind, _, _ in hardware.attention} | {*hardware.kernels.get("same_as_best", ())}
    return kernel if kernel in kinds | {*hardware.kernels.get("slowdown", {})} else "best"


def repeated(operator_module: int, shard: Shard, share: float = 1.0) -> Floats:
    """1 where the operator runs again in the backward pass, 0 where it does not, ``share`` where a part of it does.

    [Layout.recompute]
    """
    mode, modules = np.asarray(shard.layout.recompute), np.asarray(shard.layout.recompute_modules)
    half = int(Module.EVERY_SECOND_MATMUL)
    found = np.where(mode == int(Recompute.SELECTIVE), modules & operator_module, 0)
    whole = ((found & ~half) != 0) | (mode == int(Recompute.FULL))
    return np.where(whole, 1.0, share * ((found & half) != 0))
