"""Launches of the kernels of a step: what engines fuse, what overlaps, what waits, and what padded rows cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.hardware import load_hardware
from planner.serving.curves import decode_curves
from planner.serving.engine import load_engine
from planner.serving.engine_facts import Shortfall
from planner.serving.result import StepTime
from planner.serving.serving_layout import ServingLayout
from planner.serving.step import Pass, step_time
from tests.serve_samples import served

DENSE = served()


def test_dependent_launches_hide_the_gaps_between_kernels() -> None:
    """From TensorRT-LLM 1.2 and Hopper on: seven gaps a layer less, and four floors of a graph in place of those of a stream."""
    layout, work = ServingLayout(tp=1, max_batch=64), Pass(batch=4.0, context=512.0)
    model, h100 = DENSE.model, DENSE.hardware

    def between(engine: str, hardware: str) -> float:
        one = served(model.name, hardware, engine, "bf16")
        return float(step_time(one, layout, work).memory_bound)

    saved = model.num_layers * (7.0 * h100.graph_launch_floor + 4.0 * (h100.launch_floor - h100.graph_launch_floor))
    assert between("trtllm@1.1", "h100-sxm") - between("trtllm@1.2", "h100-sxm") == pytest.approx(saved)
    assert between("trtllm@1.1", "a100-sxm-80gb") == between("trtllm@1.2", "a100-sxm-80gb")


def _parts(engine: str, tp: int, weights: str = "bf16", model: str = DENSE.model.name) -> StepTime:
    one = served(model, "b200-sxm", engine, weights)
    return step_time(one, ServingLayout(tp=tp, max_batch=64), Pass(batch=4.0, context=512.0))


def test_an_all_reduce_does_the_norms_after_it() -> None:
    """vLLM 0.11 on Blackwell, two norms a layer: their launches and the gaps before them are saved in a tensor group alone."""
    hardware, layers = load_hardware("b200-sxm"), DENSE.model.num_layers
    saved = 2.0 * layers * (hardware.launch_floor + hardware.graph_launch_floor)
    found = [float(_parts("vllm@0.10", n).memory_bound - _parts("vllm@0.11", n).memory_bound) for n in (1, 4)]
    assert found == pytest.approx([0.0, saved])


def test_the_input_of_a_product_is_quantised_by_the_kernel_before_or_by_one_of_its_own() -> None:
    """nvfp4 of TensorRT-LLM: norms quantise inside an all-reduce, attention always, the activation never."""
    curves, m = decode_curves(load_hardware("b200-sxm"), "trtllm"), DENSE.model
    for tp in (1, 4):
        columns = (m.query_size + 2.0 * m.key_size) / tp
        products = ((columns, m.hidden_size, tp > 1), (m.hidden_size, m.query_size / tp, True),
                    (2.0 * m.ffn_size / tp, m.hidden_size, tp > 1), (m.hidden_size, m.ffn_size / tp, False))  # fmt: skip
        time = sum(float(curves.linear_time(4.0, n, k, "nvfp4", fused=fused)) for n, k, fused in products)
        assert float(_parts("trtllm@1.1", tp, "nvfp4").linear) == pytest.approx(m.num_layers * time)


def test_norms_over_all_heads_are_summed_over_the_group() -> None:
    """MiniMax-M2: one all-reduce of two fp32 sums for each token and layer; none on one GPU, none where each head has its own."""
    one = served("minimax-m2", "b200-sxm", "vllm@0.19", "bf16")
    apart = replace(one, model=replace(one.model, qk_norm_spans="head"))
    work = Pass(batch=4.0, context=512.0)
    for tp in (1, 4):
        layout = ServingLayout(tp=tp, moe_tp=tp, max_batch=64)
        both = (float(step_time(x, layout, work).communication) for x in (one, apart))
        small = float(decode_curves(one.hardware, "vllm").all_reduce_time(4.0 * 8.0, tp, "graph", "vllm")) if tp > 1 else 0.0
        assert next(both) - next(both) == pytest.approx(one.model.num_layers * small)


@pytest.mark.parametrize(("model", "weights"), [("llama-3.1-8b", "fp8"), ("deepseek-v3", "fp8_block")])
def test_padded_rows_have_no_keys(model: str, weights: str) -> None:
    """TensorRT-LLM 1.1 pads 130 sequences to 256: products and norms take all rows, attention reads the cache of 130."""
    one, layout = served(model, "h200-sxm", "trtllm@1.1", weights), ServingLayout(tp=8, moe_tp=8, max_batch=512)
    some, all_ = (step_time(one, layout, Pass(batch=batch, context=8192.0)) for batch in (130.0, 256.0))
    assert float(some.memory_bound) == float(all_.memory_bound)
    assert float(some.attention) < 0.6 * float(all_.attention)


def test_padded_rows_go_to_no_expert_where_experts_are_spread() -> None:
    """SGLang's topk gives them the expert -1: a graph of 768 rows pads products, not experts and what is sent to them."""
    own = served("deepseek-v3", "gb200-nvl72", "sglang@0.5.5", "fp8_block")
    wide = replace(own, engine=replace(own.engine, graphs=replace(own.engine.graphs, grid=((512.0, 0.0),))))
    work = Pass(batch=24.0 * 8.0, context=4096.0)
    spread = ServingLayout(attn_dp=24, ep=24, moe_tp=1, max_batch=24 * 512)
    few, many = (step_time(one, spread, work) for one in (own, wide))
    assert float(many.linear) > 1.5 * float(few.linear)
    assert float(many.communication) == float(few.communication)
    shared = float(many.experts) - float(few.experts)  # shared experts are a dense MLP of all rows
    unmasked = replace(wide, engine=replace(wide.engine, graphs=replace(wide.engine.graphs, masked=False)))
    assert shared < 0.5 * (float(step_time(unmasked, spread, work).experts) - float(few.experts))


def test_block_scaled_products_wait_for_the_kernel_before() -> None:
    """DeepGEMM on Blackwell is launched without dependent launch: an engine that has it gains nothing there."""
    layout, work = ServingLayout(tp=8, moe_tp=8, max_batch=64), Pass(batch=8.0, context=1024.0)

    def between(weights: str, version: str) -> float:
        return float(step_time(served("deepseek-v3", "b200-sxm", f"trtllm@{version}", weights), layout, work).memory_bound)

    assert between("fp8_block", "1.2") == pytest.approx(between("fp8_block", "1.1"))
    assert between("nvfp4", "1.2") < 0.5 * between("nvfp4", "1.1")


def test_a_mixture_of_nine_kernels_takes_nine_launches() -> None:
    """fp8 experts of TensorRT-LLM 1.1 on Blackwell: five kernels more than the measured four, a gap after each of the nine."""
    layout, work = ServingLayout(tp=8, moe_tp=8, max_batch=64), Pass(batch=8.0, context=1024.0)
    old, new = (served("deepseek-v3", "b200-sxm", f"trtllm@{version}", "fp8_block") for version in ("1.1", "1.2"))
    longer = float(step_time(old, layout, work).experts) - float(step_time(new, layout, work).experts)
    hardware = old.hardware
    each = 5.0 * hardware.launch_floor + 9.0 * hardware.graph_launch_floor
    assert longer == pytest.approx(old.model.num_moe_layers * each)


def test_a_bias_per_expert_leaves_loads_to_chance() -> None:
    """DeepSeek-V3 as it is touches nearly all experts of a batch of 128; with a plain router a third of them stay idle."""
    balanced = served("deepseek-v3", "h200-sxm", "sglang", "fp8_block")
    known = balanced.model.constants
    assert known is not None and known.router is not None and known.router.expert_bias
    router = replace(known.router, expert_bias=False)
    skewed = replace(balanced, model=replace(balanced.model, constants=replace(known, router=router)))
    layout, work = ServingLayout(tp=8, moe_tp=8, max_batch=128), Pass(batch=128.0, context=1024.0)
    times = [float(step_time(one, layout, work).experts) for one in (balanced, skewed)]
    assert times[0] > 1.2 * times[1]


def test_answers_to_a_few_prompts_are_not_balanced_by_a_bias() -> None:
    """A bias balances over all that a model sees: related requests load experts as behind a plain router; RL asks so."""
    mixed = served("deepseek-v3", "h200-sxm", "sglang", "fp8_block")
    plain = served("qwen3-235b-a22b", "h200-sxm", "sglang", "fp8_block")
    assert (mixed.skewed, replace(mixed, related=True).skewed, plain.skewed) == (False, True, True)
    layout, work = ServingLayout(tp=8, moe_tp=8, max_batch=128), Pass(batch=128.0, context=1024.0)
    related, chance = (float(step_time(one, layout, work).experts) for one in (replace(mixed, related=True), mixed))
    assert related < chance / 1.2


def test_ranks_of_a_server_gather_the_tokens_for_the_experts() -> None:
    """Attention data parallelism: gather and scatter among eight, the faster of that and direct sends among sixteen. TensorRT-LLM
    quantises before it gathers, to 4 bits and their scales; the results it scatters have 16."""
    one, work = served("deepseek-v3", "b200-sxm", "trtllm@1.1", "nvfp4"), Pass(batch=1024.0, context=1024.0)
    sparse, curves = one.model.num_moe_layers, one.curves
    for ranks in (8, 16):
        found = float(step_time(one, ServingLayout(tp=1, attn_dp=ranks, ep=ranks, max_batch=1024), work).communication)
        size, kinds = 2.0 * 1024.0 * one.model.hidden_size, ("all_gather", "reduce_scatter")
        both = sum(float(one.cluster.collective_time(kind, size, ranks, 1)) for kind in kinds)
        sizes = (1024.0 / ranks, float(one.model.hidden_size), 8.0, 256.0, float(ranks))
        direct = float(curves.dispatch_time(*sizes) + curves.combine_time(*sizes))
        assert direct < both
        small = float(one.cluster.collective_time("all_gather", size * (0.5 + 1 / 16) / 2.0, ranks, 1))
        small = small + float(one.cluster.collective_time("reduce_scatter", size, ranks, 1))
        assert found == pytest.approx(sparse * (small if ranks == 8 else direct)) and small < both
        if ranks == 8:  # blocks of 128 x 128 are quantised after the gather
            other = served("deepseek-v3", "b200-sxm", "trtllm@1.1", "fp8_block")
            found = float(step_time(other, ServingLayout(tp=1, attn_dp=ranks, ep=ranks, max_batch=1024), work).communication)
            assert found == pytest.approx(sparse * both)


def test_the_host_of_short_prompts_is_slower_on_some_devices() -> None:
    """SGLang on B200: 61 layers of DeepSeek-V3 at 55 us a kernel take longer than 64 tokens, and 8,192 tokens longer than they."""
    short, longer = (Pass(batch=1e-6, context=64.0, prompts=1.0, prompt_tokens=n) for n in (64.0, 8192.0))
    one, layout = served("deepseek-v3", "b200-sxm", "sglang", "fp8_block"), ServingLayout(tp=8, moe_tp=8, max_batch=64)
    kernels = 61 * (8 + 6) + 3 * 5 + 58 * 9
    step = one.engine.host["step"]
    assert float(step_time(one, layout, short).total) == pytest.approx(55e-6 * kernels + step, rel=1e-3)
    assert float(step_time(one, layout, longer).host) == pytest.approx(step, rel=1e-3)


def test_products_of_many_rows_reach_a_part_of_the_rate_in_a_format() -> None:
    """Block-scaled fp8 on Blackwell: half the rate from 512 rows on, as measured to 128; other formats and devices as measured."""
    layout = ServingLayout(tp=1, max_batch=64)
    for hardware, weights, part in (("b200-sxm", "fp8_block", 0.5), ("b200-sxm", "fp8", 1.0), ("h200-sxm", "fp8_block", 1.0)):
        one = served(DENSE.model.name, hardware, "trtllm@1.1", weights)
        plain = replace(one, engine=replace(one.engine, shortfall=Shortfall()))
        few, many = (Pass(batch=1e-6, context=64.0, prompts=1.0, prompt_tokens=n) for n in (128.0, 4096.0))
        times = [float(step_time(here, layout, work).linear) for here in (plain, one) for work in (few, many)]
        assert times[2:] == pytest.approx([times[0], times[1] / part])


def test_steps_of_spread_attention_fall_short_by_layers_with_experts() -> None:
    """SGLang on B200, eight ranks: its shortfall of each of 58 layers, of decodes alone and not of tensor parallel ones."""
    one = served("deepseek-v3", "b200-sxm", "sglang@0.5.8", "fp8_block")
    plain = replace(one, engine=replace(one.engine, shortfall=replace(one.engine.shortfall, spread=())))
    spread, whole = ServingLayout(attn_dp=8, ep=8, max_batch=512), ServingLayout(tp=8, moe_tp=8, max_batch=64)
    decodes, prompts = Pass(batch=64.0, context=1024.0), Pass(batch=1e-6, context=64.0, prompts=1.0, prompt_tokens=4096.0)

    def more(layout: ServingLayout, work: Pass) -> float:
        return float(step_time(one, layout, work).total) - float(step_time(plain, layout, work).total)

    assert more(spread, decodes) == pytest.approx(58 * 150e-6)
    assert more(whole, decodes) == 0.0 and more(spread, prompts) == 0.0


def test_sglang_launches_kernels_of_nvfp4_ahead_from_a_version_on() -> None:
    """FlashInfer's on Blackwell; block-scaled fp8 is DeepGEMM, and Hopper has no nvfp4."""
    layout, work = ServingLayout(tp=8, moe_tp=8, max_batch=64), Pass(batch=8.0, context=1024.0)

    def between(weights: str, version: str) -> float:
        return float(step_time(served("deepseek-v3", "b200-sxm", f"sglang@{version}", weights), layout, work).memory_bound)

    assert between("nvfp4", "0.5.6") < 0.5 * between("nvfp4", "0.5.5")
    assert between("fp8_block", "0.5.6") == pytest.approx(between("fp8_block", "0.5.5"))
    assert not load_engine("sglang@0.5.6").overlaps_launches(load_hardware("h100-sxm"), "bf16")
