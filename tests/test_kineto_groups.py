"""Traces of torch.profiler: intervals by hand, names of kernels, groups of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from made_traces import ADAM, FLASH, GEMM, NCCL, NORM

from planner.kineto.groups import kinds_of
from planner.kineto.kernel_names import (
    ATTENTION,
    COMMUNICATION,
    COPY,
    ELEMENTWISE,
    OPTIMIZER,
    OTHER,
    family_of,
    op_of,
    short_name,
)
from planner.kineto.kernel_names import GEMM as PRODUCT
from planner.kineto.rank_trace import Collective
from planner.kineto.spans import covered, gaps, outside, shared, union
from planner.layout import Layout, Order

# ------------------------------------------------------------------------------------------------ intervals


def test_union_gaps_and_what_is_outside_by_hand() -> None:
    nested = [(5, 6), (0, 4), (1, 2), (3, 5), (8, 9), (9, 9)]
    assert union(nested).tolist() == [[0, 6], [8, 9]] and covered(nested) == 7
    assert gaps(nested, 0, 10).tolist() == [[6, 8], [9, 10]] and gaps([], 1, 2).tolist() == [[1, 2]]
    assert gaps(nested, -1, 3).tolist() == [[-1, 0]]
    assert outside([(0, 4), (6, 9)], [(1, 2), (8, 20)]) == 5 and outside([], [(0, 1)]) == 0 and covered([]) == 0


def test_kinds_that_run_together_share_the_time() -> None:
    found = shared({"a": [(0, 4)], "b": [(2, 6)], "c": []}, [(3, 5)])
    assert found == {"a": 2 + 0.5, "b": 0.5 + 1, "c": 0.0} and sum(found.values()) == outside([(0, 6)], [(3, 5)])
    assert shared({"a": []}) == {"a": 0.0}


def test_shares_sum_to_the_union_of_random_pieces() -> None:
    draw = np.random.default_rng(5)
    for _ in range(20):
        kinds = {
            n: (lambda start: np.column_stack([start, start + draw.uniform(0, 3, len(start))]))(draw.uniform(0, 50, 30))
            for n in range(4)
        }
        under = np.column_stack([draw.uniform(0, 25, 9), draw.uniform(25, 50, 9)])[:3]
        assert sum(shared(kinds, under).values()) == pytest.approx(outside(np.concatenate([*kinds.values()]), under))


# ------------------------------------------------------------------------------------------------ names and groups


@pytest.mark.parametrize(
    ("family", "names"),
    [
        (PRODUCT, [GEMM, "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn", "Cijk_Alik_Bljk_BBS_BH_Bias_MT256x256x64",
                   "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(Params)", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n",
                   "void cublasLt::splitKreduce_kernel<32, 16>()", "triton_mm", "volta_sgemm_128x64_nn"]),
        (ATTENTION, [FLASH, "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16",
                     "fmha_cutlassF_bf16_aligned_64x128_rf_sm80",
                     "void ck_tile::kentry<FmhaFwdKernel>()", "aiter::fmha_bwd_hd128_bf16"]),
        (COMMUNICATION, [*NCCL.values(), "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "rccl_main_kernel",
                         "void deep_ep::dispatch<8>()"]),
        (OPTIMIZER, [ADAM, "void te::multi_tensor_adam::kernel()", "void multi_tensor_apply_kernel<L2Norm<float>>()"]),
        (ELEMENTWISE, [NORM, "void at::native::vectorized_elementwise_kernel<4>()", "void at::native::reduce_kernel<512>()",
                       "void rmsnorm_bwd()", "CatArrayBatchedCopy"]),
        (COPY, ["Memcpy HtoD (Pinned -> Device)", "Memset (Device)"]),
        (OTHER, ["my_kernel", ""]),
    ],
)  # fmt: skip
def test_families_of_kernels(family: int, names: list[str]) -> None:
    if family == ELEMENTWISE:
        names = [name for name in names if "_mm_" not in name]
    assert {name: family_of(name) for name in names} == dict.fromkeys(names, family)


def test_names_of_collectives() -> None:
    names = ("_allgather_base", "reduce_scatter_tensor_coalesced", "allreduce_coalesced", "all_to_allv", "batch_isend_irecv")
    assert [op_of(name) for name in names] == [
        "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv",
    ]  # fmt: skip
    assert [op_of(NCCL[name]) for name in ("allreduce", "_reduce_scatter_base", "send")] == [
        "all_reduce",
        "reduce_scatter",
        "send_recv",
    ]
    assert (
        short_name("void at::native::(anonymous namespace)::vectorized_elementwise_kernel<4, F>(int)")
        == "vectorized_elementwise_kernel"
    )
    assert short_name("void cutlass::Kernel2<cutlass_80_tensorop_gemm>(P)") == "cutlass_80_tensorop_gemm"


def kind(layout: Layout, ranks: tuple[int, ...] = (), op: str = "all_reduce", about: str = "", size: int = 0) -> str:
    return kinds_of(layout)(Collective(op=op, about=about, size=size or len(ranks), ranks=ranks))


def test_groups_are_told_by_their_ranks() -> None:
    layout = Layout(tp=2, cp=2, dp=2, pp=2)
    assert [kind(layout, ranks) for ranks in ((0, 1), (1, 3), (0, 4), (0, 8), (0, 2, 4, 6), tuple(range(16)))] == [
        "tensor", "context", "data", "pipeline", "data", "other",
    ]  # fmt: skip
    inside = layout.replace(order=Order.TP_CP_EP_PP_DP)
    assert [kind(inside, ranks) for ranks in ((0, 4), (0, 8))] == ["pipeline", "data"]
    experts = Layout(dp=8, ep=4)
    assert kind(experts, (0, 1, 2, 3), "all_to_all") == "expert" and kind(experts, (0, 4)) == "data"
    assert kind(Layout(dp=8, ep=8), tuple(range(8)), "all_to_all") == "expert", "the same ranks as data parallel"
    assert kind(Layout(dp=8, ep=8), tuple(range(8)), "all_gather") == "data"
    outer = Layout(dp=4, pp=2, ep=2, order=Order.TP_CP_DP_PP_EP)
    assert kind(outer, (0, 4), "all_to_all") == "expert" and kind(outer, (0, 2), "send_recv") == "pipeline"
    assert kind(outer, (0, 1, 4, 5)) == "data"


def test_groups_are_told_by_description_and_size() -> None:
    layout = Layout(tp=2, dp=2, pp=2)
    said = {
        "TENSOR_MODEL_PARALLEL_GROUP": "tensor", "mesh_tp": "tensor", "mesh_fsdp": "data", "mesh_dp_shard_cp": "data",
        "mesh_ep": "expert",
        "EXPERT_DATA_PARALLEL_GROUP": "data", "EXPERT_MODEL_PARALLEL_GROUP": "expert", "PIPELINE_MODEL_PARALLEL_GROUP": "pipeline",
        "DATA_PARALLEL_GROUP_WITH_CP": "data", "CONTEXT_PARALLEL_GROUP": "context", "mesh_pp": "pipeline",
    }  # fmt: skip
    assert {about: kind(layout, about=about) for about in said} == said
    assert kind(layout, op="send_recv", size=2) == "pipeline" and kind(layout, size=2) == "other", (
        "tp and dp are both 2"
    )
    assert kind(Layout(tp=4, dp=2), size=4) == "tensor" and kind(Layout(dp=8)) == "data"
    assert kind(layout, (0, 99)) == "other", "ranks that the plan has not"
