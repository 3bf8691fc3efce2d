"""Small traces in the shape that torch.profiler writes: kernels on streams, who launched them, steps, process groups."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

GEMM, FLASH, NORM = (
    "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT",
    "void flash::flash_fwd_kernel<Traits>(Params)",
    "triton_red_fused_norm_0",
)
ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float>>(int)"
NCCL = {
    "allreduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_allgather_base": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_reduce_scatter_base": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "all_to_all": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "send": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
}  # fmt: skip


class Made:
    """A trace that is written event by event; times in microseconds of the trace."""

    def __init__(
        self, rank: int = 0, world: int = 8, device: str = "NVIDIA H100 80GB HBM3", base: float = 4.5e12
    ) -> None:
        self.rank, self.world, self.device, self.base = rank, world, device, base
        self.events: list[Any] = []
        self.groups: dict[str, list[int]] = {}
        self.number = 100

    def step(self, number: int, start: float, length: float) -> None:
        self._event("user_annotation", f"ProfilerStep#{number}", start, length, pid=1, tid=1, args={"External id": 1})

    def kernel(
        self, name: str, start: float, length: float, *, stream: int = 7, launched: float | None = None, **args: Any
    ) -> None:
        self.number += 1
        calls = start - 5 if launched is None else launched
        self._event(
            "cuda_runtime", "cudaLaunchKernel", calls, 2, pid=1, tid=1, args={"correlation": self.number, "cbid": 211}
        )
        args = {"device": self.rank % 8, "stream": stream, "correlation": self.number, **args}
        self._event(
            "gpu_memcpy" if name.startswith("Memcpy") else "kernel",
            name,
            start,
            length,
            pid=self.rank % 8,
            tid=stream,
            args=args,
        )

    def collective(
        self,
        op: str,
        ranks: list[int],
        start: float,
        length: float,
        *,
        elements: int = 1 << 20,
        about: str = "undefined",
        **more: Any,
    ) -> None:
        name = (
            str(len(self.groups))
            if ranks not in self.groups.values()
            else next(k for k, v in self.groups.items() if v == ranks)
        )
        self.groups[name] = ranks
        out = (
            elements * len(ranks)
            if op == "_allgather_base"
            else elements // len(ranks)
            if op == "_reduce_scatter_base"
            else elements
        )
        self.kernel(NCCL[op], start, length, stream=20, **{
            "Collective name": op, "In msg nelems": elements, "Out msg nelems": out, "Group size": len(ranks), "dtype": "BFloat16",
            "Process Group Name": name, "Process Group Description": about, "Process Group Ranks": str(ranks), **more,
        })  # fmt: skip

    def _event(self, category: str, name: str, start: float, length: float, **more: Any) -> None:
        self.events.append({"ph": "X", "cat": category, "name": name, "ts": self.base + start, "dur": length, **more})

    def document(self) -> dict[str, Any]:
        groups = [
            {"pg_name": name, "pg_desc": "undefined", "pg_size": len(ranks), "ranks": ranks}
            for name, ranks in self.groups.items()
        ]
        return {
            "schemaVersion": 1, "deviceProperties": [{"id": self.rank % 8, "name": self.device}],
            "distributedInfo": {"backend": "nccl", "rank": self.rank, "world_size": self.world, "pg_config": groups},
            "displayTimeUnit": "ms", "baseTimeNanoseconds": 1, "traceEvents": self.events, "traceName": "made.json",
        }  # fmt: skip

    def write(self, path: Path) -> Path:
        text = json.dumps(self.document()).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path


def training(
    rank: int = 0,
    *,
    scale: float = 1.0,
    steps: int = 4,
    hidden: bool = True,
    gap: float = 0.0,
    wait: float = 0.0,
    **said: Any,
) -> Made:
    """Steps of 1000 us (times ``scale``): GEMM 600, attention 100, norms 50, optimizer 50; the all-gather of 8 ranks, 200 us, lies
    under the GEMM or, not ``hidden``, behind it with ``wait`` more; a ``gap`` in which the host is late."""
    made, at = Made(rank, **said), 0.0
    everyone = list(range(made.world))
    for number in range(steps):
        made.step(number, at - 6, 10)
        made.kernel(GEMM, at, 600 * scale)
        made.collective(
            "_allgather_base",
            everyone,
            at + (100 if hidden else 600) * scale,
            200 * scale + wait,
            elements=1 << 22,
            about="mesh_fsdp",
        )
        now = at + 600 * scale + (0 if hidden else 200 * scale + wait)
        for name, length in ((FLASH, 100), (NORM, 50), (ADAM, 50)):
            made.kernel(name, now, length * scale, launched=at)
            now += length * scale
        made.kernel("Memcpy HtoD (Pinned -> Device)", now, 20 * scale, stream=30, launched=at)
        now += 20 * scale + gap
        at = now
    return made
