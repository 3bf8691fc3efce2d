"""What tables do not hold, each with its source: hosts, networks, clocks, kernels and rates of devices."""

from __future__ import annotations

from typing import Any

# name in the library -> device in the tables. MI250X is planned per GCD (one rank), see its notes.
MEASURED = {
    "a100-sxm-80gb": "A100-SXM-80GB", "h100-sxm": "H100-SXM", "h200-sxm": "H200-SXM", "b200-sxm": "B200-SXM",
    "b300-sxm": "B300-SXM", "gb200-nvl72": "GB200-NVL72", "gb300-nvl72": "GB300-NVL72", "rtx-pro-6000": "RTX-PRO-6000",
    "l40s": "L40S",
}  # fmt: skip
# name -> (device, relative of compute, relative of NVLink, relative of PCIe, relative of the network)
RELATED = {
    "h100-pcie": ("H100-PCIe", "h100-sxm", "h100-sxm", "rtx-pro-6000", "h100-sxm"),
    "h100-nvl": ("H100-NVL", "h100-sxm", "h100-sxm", "rtx-pro-6000", "h100-sxm"),
    "h100-sxm-96gb": ("H100-SXM", "h100-sxm", "h100-sxm", None, "h100-sxm"),
    "h800-sxm": ("H800-SXM", "h100-sxm", "h100-sxm", None, "h100-sxm"),
    "a100-sxm-40gb": ("A100-SXM-40GB", "a100-sxm-80gb", "a100-sxm-80gb", None, "a100-sxm-80gb"),
    "a100-pcie-80gb": ("A100-PCIe-80GB", "a100-sxm-80gb", "a100-sxm-80gb", "rtx-pro-6000", "a100-sxm-80gb"),
    "v100-sxm2-16gb": ("V100-SXM2-16GB", "a100-sxm-80gb", "a100-sxm-80gb", None, "a100-sxm-80gb"),
    "v100-sxm2-32gb": ("V100-SXM2-32GB", "a100-sxm-80gb", "a100-sxm-80gb", None, "a100-sxm-80gb"),
    "l4": ("L4", "l40s", None, "rtx-pro-6000", "h100-sxm"),
    "a10g": ("A10G", "a100-sxm-80gb", None, "rtx-pro-6000", "h100-sxm"),
    "rtx-3090": ("RTX-3090", "a100-sxm-80gb", "a100-sxm-80gb", "rtx-pro-6000", "h100-sxm"),
    "rtx-4090": ("RTX-4090", "l40s", None, "rtx-pro-6000", "h100-sxm"),
    "rtx-5090": ("RTX-5090", "rtx-pro-6000", None, "rtx-pro-6000", "h100-sxm"),
    "mi250x": ("MI250X", "a100-sxm-80gb", "mi300x", None, None),
    "mi300x": ("MI300X", "h100-sxm", None, None, "mi355x"),
    "mi325x": ("MI325X", "h100-sxm", "mi300x", None, "mi355x"),
    "mi355x": ("MI355X", "b200-sxm", "mi300x", None, None),
    "gaudi2": ("Gaudi2", "h100-sxm", "h100-sxm", None, "h100-sxm"),
    "gaudi3": ("Gaudi3", "h100-sxm", "h100-sxm", None, "h100-sxm"),
}
# Multiplied as fp16, not bf16, which Volta's tensor cores do not take: 57.3, 78.2, 95.7, 97.4, 89.4 TFLOP/s at 1024, 2048, 4096, 8192, 10240
# cubed; the curve gives 60, 64, 90, 92, 91. V100S, a PCIe card of 250 W, reaches 89 of its 130.
V100 = "torch 2.7 matmul, fp16, 8192 cubed on V100-SXM2-16GB (zzc0721/torch-performance-test-data issue 140, February 2026)"
# Burst rate of the best shape (TFLOP/s) where only that was measured: it replaces the relative's efficiency.
BEST_RATE: dict[str, tuple[dict[str, float], str]] = {
    "a100-pcie-80gb": ({"bf16": 252.9}, "mamf: 300 W limit"),
    "mi300x": ({"bf16": 708.0, "fp8": 1273.0}, "amd-maf"),
    "mi325x": ({"bf16": 843.0, "fp8": 1519.0}, "amd-maf"),
    "mi355x": ({"bf16": 1565.0}, "mamf"),
    "gaudi2": ({"bf16": 418.7, "fp8": 826.5}, "mamf"),
    "gaudi3": ({"bf16": 1243.0, "fp8": 1290.0}, "mamf"),
    "v100-sxm2-16gb": ({"bf16": 97.4}, V100),
    "v100-sxm2-32gb": ({"bf16": 97.4}, V100),
    "rtx-3090": ({"bf16": 69.8}, "community torch matmul 76.5 (boost clock), limited to 0.98 of the nominal peak"),
    "rtx-4090": ({"bf16": 161.9}, "community torch matmul 160-173 (boost clock), limited to 0.98 of the nominal peak"),
    "rtx-5090": ({"bf16": 205.3}, "community torch matmul 224-236 (boost clock), limited to 0.98 of the nominal peak"),
}
# Attention efficiency where the device's own nominal peak makes the relative's fraction wrong.
ATTENTION_RATE: dict[str, tuple[tuple[float, float], str]] = {
    "rtx-3090": ((0.9, 0.60), "fractions of RTX 4090 (GeForce peaks are halved for fp32 accumulation)"),
    "rtx-4090": ((0.92, 0.60), "tvm-tl: 151 forward, 99 backward TFLOP/s at head size 128, causal, of 165"),
    "rtx-5090": ((0.9, 0.60), "fractions of RTX 4090 (GeForce peaks are halved for fp32 accumulation)"),
    "mi300x": ((0.40, 0.31), "H100 fractions x 0.65, the ratio of the GEMM fractions of the two"),
    "mi325x": ((0.48, 0.37), "H100 fractions x 0.77, the ratio of the GEMM fractions of the two"),
}
# AOTriton, the flash attention that PyTorch picks by itself on ROCm, over the best kernel (AITER, Composable Kernel), by pass.
# MI355X, TFLOP/s at 4k, 8k and 16k tokens, head size 128, 16 heads, causal (HazyResearch/HipKittens @f09e968, analysis/attn, November 2025):
#   forward   AITER 1069 1173 1247, AOTriton 422 630 762: 2.5 to 1.6, 1.86 at 8k
#   backward  AITER  877 1034 1109, AOTriton 143 224 259 (301 to 312 where nothing is masked): 6.1 to 4.3, 4.6 at 8k
# MI300X, forward: AITER is 1.18 to 1.62 times as fast, five lengths and two head sizes (midiareshadi.github.io/blog/attn-dsl-bench,
# 2026), 1.4 the middle. Backward was not measured there: AOTriton at the part of the peak that it reaches on MI355X (0.089 at 8k; its
# forward pass reaches 0.25 and 0.29), over ATTENTION_RATE at 8k. Composable Kernel on MI300X: 0.15 of the peak (ROCm/flash-attention
# issue 142).
AOTRITON = {
    "mi300x": {"forward": 1.4, "backward": 3.3}, "mi325x": {"forward": 1.4, "backward": 3.9},
    "mi355x": {"forward": 1.86, "backward": 4.6},
}  # fmt: skip
AOTRITON_SOURCE = (
    "fa2: AOTriton, the flash attention of PyTorch on ROCm, over AITER; MI355X measured forward and backward (HazyResearch/HipKittens "
    "@f09e968), MI300X forward (midiareshadi.github.io/blog/attn-dsl-bench), its backward at the part of the peak of MI355X"
)
PCIE = {"Gen3": 15.75, "Gen4": 31.5, "Gen5": 63.0, "Gen6": 121.0}  # GB/s, x16, one direction, after line coding
# Host memory per node and its bandwidth: usual configurations of such servers, an assumption in every file.
HOST = {
    "Volta": (768, 256.0), "Ampere": (2048, 409.6), "Ada": (1024, 409.6), "Hopper": (2048, 614.4),
    "Blackwell": (2048, 716.8), "Blackwell Ultra": (2048, 819.2), "grace": (960, 1024.0), "box": (512, 409.6),
}  # fmt: skip
# NIC line rate per GPU in Gb/s (typical_nic of specs.yaml over the GPUs of a node), and GPUs per node.
NETWORK = {
    "v100-sxm2-16gb": (12.5, 8, "100 Gb/s per node of 8 (AWS p3dn)"), "v100-sxm2-32gb": (100, 8, "DGX-2: 8x100G IB"),
    "a100-sxm-40gb": (200, 8, "DGX: 8x200G IB; AWS p4d has 4x100G per node: 50 Gb/s per GPU"),
    "a100-sxm-80gb": (200, 8, "8x200G IB; AWS p4de has 50 Gb/s per GPU"),
    "a100-pcie-80gb": (50, 8, "varies; assumed 2x200G per node of 8"),
    "h100-sxm": (400, 8, "8x400G IB or RoCE; AWS p5 32x100G EFA; GCP A3 Mega 8x200G"),
    "h100-sxm-96gb": (400, 8, "as h100-sxm"),
    "h100-pcie": (50, 8, "varies; assumed 2x200G per node of 8"), "h100-nvl": (50, 8, "varies; assumed 2x200G per node of 8"),
    "h800-sxm": (400, 8, "8x400G IB"), "h200-sxm": (400, 8, "8x400G IB or RoCE; AWS p5en 3200G EFA"),
    "b200-sxm": (400, 8, "8x400G IB or RoCE; AWS p6-b200 3200G EFA"), "b300-sxm": (800, 8, "8x800G ConnectX-8"),
    "gb200-nvl72": (400, 4, "1x400G per GPU, 4 GPUs per tray"), "gb300-nvl72": (800, 4, "1x800G per GPU, 4 GPUs per tray"),
    "l40s": (25, 8, "200 Gb/s per node of 8; AWS g6e 100G"), "l4": (12.5, 8, "100 Gb/s per node of 8"),
    "a10g": (10, 4, "AWS g5.12xlarge: 40 Gb/s, 4 GPUs; g5.48xlarge: 100 Gb/s, 8 GPUs"),
    "rtx-3090": (6.25, 4, "none; 25 Gb/s Ethernet per box of 4 assumed"),
    "rtx-4090": (3.125, 8, "none; 25 Gb/s Ethernet per box of 8 assumed"),
    "rtx-5090": (3.125, 8, "none; 25 Gb/s Ethernet per box of 8 assumed"),
    "rtx-pro-6000": (50, 8, "varies; assumed 2x200G per node of 8"),
    "mi250x": (100, 8, "Frontier: 4x200G Slingshot per node of 4 packages = 8 GCDs"),
    "mi300x": (400, 8, "8x400G RoCE"), "mi325x": (400, 8, "8x400G"), "mi355x": (400, 8, "8x400G Pollara or CX7"),
    "gaudi2": (300, 8, "3x100G per card"), "gaudi3": (600, 8, "3x200G per card"),
}  # fmt: skip
# wgrad (NT-acc32) less the mean of forward and dgrad of the same shape, over 6 n k bytes / nominal bandwidth, median of the
# shapes with 1.5k to 5k tokens: B200 0.68 (93 shapes), A100 PCIe 0.64 (57 shapes; simumax). Relative to the GEMM that is
# 13 percent at 2k tokens, 7 at 4k and 3 above 8k on B200.
ACCUMULATE = 0.67
# Hopper's and Ada's fp8 tensor cores add up in fewer bits; outside the forward pass partial sums are promoted to fp32
# registers: 1.1 to 1.2 x the time (pytorch/ao issue 2377, H100), the middle. Blackwell has no such mode
# (TransformerEngine PR 2748), AMD's always adds in fp32 (pytorch PR 123987).
PRECISE_ACCUMULATION = {"Hopper": {"fp8": 1.15}, "Ada": {"fp8": 1.15}}
# Dense products in mxfp8 over those with one scale per tensor, operands quantised before, 12 products of one layer on B300:
# 7.161 of 6.812 ms (TransformerEngine @1609c89, docs/examples/gemm_profiling, June 2026).
BLOCK_SCALING = {"Blackwell": {"mxfp8": 1.05}, "Blackwell Ultra": {"mxfp8": 1.05}}
# nvfp4: the tables' products (TensorRT-LLM's CUTLASS kernel) lose a quarter of their rate from 8192 to 16384 in each dimension,
# cuBLAS, which Transformer Engine calls, nothing (B300: 131.94, 1044.08, 8775.88 us at 8192, 16384, 32768 cubed, cuBLAS 13.8;
# CUTLASS 129.69, 1177.26: vincentzed/gemm3, docs/benchmarks.md). So shapes follow the constants alone, without the grid, and the
# rate is that of cuBLAS where it was measured, operands quantised before: (m, n, k), seconds, and clock of the measurement
# (1 = burst; a loop of seconds runs at the sustained one).
#   B200   8192 cubed: 5.37 PFLOP/s (pytorch/ao PR 2427, June 2025), 5.24 (cuBLAS 13.3, DeepGEMM PR 348, June 2026) and 5.57
#          (13.0, cfregly/ai-performance-engineering @5b4df50, September 2026): the middle one. 4096 cubed 4.46, 6144 5.50 there
#   GB300  8192 cubed: 7.307 PFLOP/s (cuBLASLt, CUDA 13.1, "Outperforming cuBLAS on NVFP4", cudaforfun, August 2026)
#   B300   15872 tokens, 4096 x 12288, 4096 x 4096, 4096 x 16384, 16384 x 4096, three passes: 3.764 ms in a loop (Transformer
#          Engine's tutorial, as above); after pauses one product of 8192 cubed reaches 8.33 PFLOP/s
#   GB200  not measured: B200's x 1.083, the ratio of their fp8 constants
TUTORIAL_LAYER = [(15872, 12288, 4096), (15872, 4096, 4096), (15872, 16384, 4096), (15872, 4096, 16384)]
CUBLAS_NVFP4: dict[str, tuple[list[tuple[int, int, int]], float, str]] = {
    "b200-sxm": ([(8192, 8192, 8192)], 2 * 8192**3 / 5.37e15, "burst"),
    "gb200-nvl72": ([(8192, 8192, 8192)], 2 * 8192**3 / (5.37e15 * 1.083), "burst"),
    "gb300-nvl72": ([(8192, 8192, 8192)], 2 * 8192**3 / 7.307e15, "burst"),
    "b300-sxm": (
        [shape for m, n, k in TUTORIAL_LAYER for shape in ((m, n, k), (m, k, n), (n, k, m))], 3.764e-3, "sustained",
    ),
}  # fmt: skip
CUBLAS_SOURCE = (
    "rate of cuBLAS with quantised operands, shapes by the constants alone: B200 pytorch/ao PR 2427, DeepGEMM PR 348, "
    "cfregly/ai-performance-engineering @5b4df50; GB300 cudaforfun.substack.com (outperforming cuBLAS on NVFP4); B300 "
    "TransformerEngine @1609c89 docs/examples/gemm_profiling; GB200 as B200; constants from aic-trt"
)
# Rate of tensor-core work in a training run over its rate in a short burst: the power limit. Set on runs that are nearly
# all computation (tp 1, no pipeline); the other rows of those pages were seen too, so they are no blind test (docs/log):
#   Hopper            DGX Cloud 25.04 llama3.1 8b bf16 on H100 at 700 W, 5 runs; H200 alike, smaller limits may fall lower
#   Blackwell         Megatron-Bridge 25.09 and 25.11 llama3 8b fp8-cs on GB200; B200 alike (its 8b runs would give 0.86). GEMMs
#                     in a loop on one B200 reach 0.73 (SimuMax): a box with less cooling may fall to that
#   Blackwell Ultra   0.87 as suggested before; Megatron-Bridge 25.11 llama3 8b on GB300 agrees within 5 percent
#   CDNA              MLPerf 5.1 on 8 MI300X (LoRA of 70B) and 8 MI355X (8B), eight systems; beside power it stands for kernels that
#                     fill 304 and 256 units worse than the one shape that was measured
SUSTAINED = {"Hopper": 0.812, "Blackwell": 0.82, "Blackwell Ultra": 0.87, "CDNA": 0.83}  # others 0.95

# Part of the memory bandwidth per class of operation, with the rows behind it (bytes the algorithm must move / time).
_H100_MEMORY = {
    "norm_forward": (0.81, "liger fused_add_rms_norm 2709 of 3350 GB/s"),
    "norm_backward": (0.72, "H200 cuDNN rms_norm backward 3441 of 4800; Liger on H100 reaches 0.32-0.53, eager 0.11"),
    "elementwise": (0.90, "H100 PCIe STREAM triad 1832 of 2039; vidur residual add 3247 of 3350 is partly L2"),
    "swiglu": (0.90, "as STREAM triad (2 reads, 1 write); the old vLLM kernel reaches 0.58"),
    "rope": (0.75, "A100 Liger 1539 of 2039; the old vLLM kernel reaches 0.47 here"),
    "cross_entropy": (0.63, "A100 Liger fused, fp32 logits, 1293 of 2039"),
    "optimizer": (0.72, "fused AdamW: 0.65-0.80 at 28 B per parameter; torch fused 2117 GB/s on the HBM2e part"),
    "quantize": (0.90, "aic-trt fp8-quantize 3011 of 3350; the amax pass alone 0.36"),
    "permute": (0.50, "B200 simumax 4000 of 8000"),
    "copy": (0.84, "H100 PCIe STREAM scale 1704 of 2039"),
}
MEMORY: dict[str, dict[str, tuple[float, str]]] = {
    "h100-sxm": _H100_MEMORY,
    "a100-sxm-80gb": _H100_MEMORY | {
        "norm_forward": (0.69, "liger rms_norm 1409 of 2039"),
        "norm_backward": (0.71, "liger layer_norm forward 1666, both 1523: backward about 1450; rms_norm bf16 only 0.28-0.31"),
        "elementwise": (0.86, "STREAM triad 1759 of 2039; vidur residual add 1798"),
        "swiglu": (0.86, "as STREAM triad (2 reads, 1 write); the old vLLM kernel reaches 0.49"),
        "quantize": (0.85, "as copy; no fp8"), "copy": (0.85, "STREAM scale 1732 of 2039"),
    },
    "h200-sxm": _H100_MEMORY | {
        "norm_forward": (0.78, "cudnn-fe cuDNN rms_norm 3728 of 4800"),
        "norm_backward": (0.72, "cudnn-fe cuDNN rms_norm 3441 of 4800; torch.compile 0.36"),
        "elementwise": (0.74, "STREAM triad 3534 of 4800"), "swiglu": (0.74, "as STREAM triad"),
        "rope": (0.74, "as STREAM triad"), "quantize": (0.84, "aic-trt fp8-quantize 4052 of 4800"),
        "copy": (0.66, "STREAM scale 3165 of 4800"),
    },
    "gb200-nvl72": _H100_MEMORY | {
        "norm_forward": (0.74, "cudnn-fe cuDNN rms_norm 5943 of 8000"),
        "norm_backward": (0.62, "cudnn-fe cuDNN rms_norm 4922 of 8000; torch.compile 0.28"),
        "elementwise": (0.67, "B200 simumax element-wise 5328 of 8000"), "swiglu": (0.67, "as element-wise"),
        "rope": (0.67, "as element-wise"), "cross_entropy": (0.32, "B200 simumax 2597 of 8000 (fused 2236)"),
        "optimizer": (0.65, "lower end of 0.65-0.80; torch foreach, which makes several passes, 2412-2837 of 8000"),
        "quantize": (0.58, "aic-trt fp8-quantize 4656 of 8000"), "copy": (0.67, "as element-wise"),
    },
    "l40s": _H100_MEMORY | {
        "elementwise": (0.93, "L40 STREAM triad 803 of 864"), "swiglu": (0.93, "as STREAM triad"),
        "quantize": (0.79, "aic-trt fp8-quantize 684 of 864"), "copy": (0.94, "L40 STREAM scale 816 of 864"),
    },
}  # fmt: skip
MEMORY |= {
    "b200-sxm": MEMORY["gb200-nvl72"] | {"quantize": (0.55, "aic-trt fp8-quantize 4363 of 8000")},
    "b300-sxm": MEMORY["gb200-nvl72"], "gb300-nvl72": MEMORY["gb200-nvl72"], "rtx-pro-6000": MEMORY["l40s"],
}  # fmt: skip

# FlashAttention 1 in Triton of before MLIR (llm-foundry 2023, attn_impl triton), time over that of the best kernel: least
# squares on the bf16 llm-foundry rows in which attention is above 30 percent of the step, 30 of A100 (residual 3 percent, one
# factor fits 512 to 65536 tokens and head sizes 64 and 128) and 28 of H100. FlashAttention-2 paper, section 4.1: 1.3-2.5 x.
TRITON = {"Ampere": {"forward": 1.13, "backward": 1.86}, "Hopper": {"forward": 2.35, "backward": 3.35}}


# The package flash-attn, version 2, over the best kernel at its sustained clock: its products are mma.sync, which reach a third of the
# peak and below, far from the power limit, so it keeps its own clock. Hopper: rates of flash_attention_2.py at 16k tokens. B200:
# 361.6 TFLOP/s forward (head size 128, 8k tokens: pytorch-labs/tritonbench PR 171), 334 backward (64, 16k: Dao-AILab/flash-attention
# issue 1589); the rate of A100 per multiprocessor and clock gives 370 and 337.
FLASH_ATTN = {
    "h100-sxm": {"forward": 1.63, "backward": 1.68}, "h200-sxm": {"forward": 1.63, "backward": 1.68},
    "b200-sxm": {"forward": 2.77, "backward": 2.39}, "gb200-nvl72": {"forward": 3.82, "backward": 3.39},
    "b300-sxm": {"forward": 4.01, "backward": 3.42}, "gb300-nvl72": {"forward": 4.67, "backward": 3.99},
}  # fmt: skip


def kernels(arch: str, name: str = "") -> dict[str, Any]:
    """Which attention kernels a trainer may name."""
    triton = {"triton": TRITON[arch]} if arch in TRITON else {}
    own = {"flash_attn": FLASH_ATTN[name]} if name in FLASH_ATTN else {}
    if arch in ("Hopper",):
        return {"same_as_best": ["fa3", "cudnn"], "slowdown": triton | own}
    if arch.startswith("Blackwell") and "(" not in arch:
        # FlashAttention 4 of 2026 on B200: 1605 TFLOP/s, up to 1.3 times cuDNN 9.13 [together.ai/blog/flashattention-4]
        return {"same_as_best": ["cudnn"], "slowdown": {"fa4": {"forward": 0.77, "backward": 0.77}} | own}
    return {"same_as_best": ["fa2", "cudnn"], "slowdown": triton}


COMMON_SOURCES = {
    "specs": "stas00/ml-engineering @744d01e (CC-BY-SA-4.0, facts only); ai-dynamo/aiconfigurator @095f58a system yaml "
    "(Apache-2.0); vendor datasheets through those; usable_memory from public runtime logs",
    "sustained_clock": "Hopper 0.812 from llama3.1 8b bf16 on H100 in three releases of DGX Cloud (24.11, 25.03, 25.04; 15 runs); Blackwell 0.82 from Megatron-Bridge 25.09 and 25.11 llama3 8b fp8-cs on GB200"
    "; CDNA 0.83 from MLPerf 5.1 on MI300X and MI355X; Blackwell Ultra 0.87 and others 0.95 suggested, A100 PCIe burst 253, sustained 230 TFLOP/s (MooreThreads/SimuMax @4dcaae5)",
    "launch_floor": "gpu-benches @1c36d50, back-to-back kernels on A100 and H200",
    "memory_overheads": "stas00/ml-engineering (context 0.47-0.92 GiB), nccl issues 964, 864, 1685, 2363, 986; PyTorch PR 120925",
}
