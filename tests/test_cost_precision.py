"""Layers in low precision: who quantises what, what scales cost, what norms cost."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from samples import HARDWARE, TRAINERS, job
from test_cost_layers import shard_of

from planner.cluster import Cluster
from planner.cost.estimate import Estimate, estimate
from planner.cost.layer import transformer_layer as layers
from planner.cost.layer.operators import Gemm, MemoryBound, Shard
from planner.cost.pipeline.partition import split_stages, stage_parameters
from planner.cost.price.compute import price
from planner.layout import Layout
from planner.rules.table import RULES
from planner.trainer import load_trainer


@pytest.mark.parametrize(
    ("hardware", "precision", "bytes_each"),
    [
        (
            "h100-sxm",
            "fp8",
            (5.0 / 4 + 2.0, 6.0),
        ),  # amax 2, cast 2 + 1 on a quarter of the rows; transposed copy of all
        ("b200-sxm", "fp8", (5.0 / 4, 5.0)),  # no transposed copy
        ("b200-sxm", "mxfp8", (4.1 / 4, 4.1)),
        ("b200-sxm", "nvfp4", (5.2 / 4, 5.2)),
    ],
)
def test_each_rank_quantises_its_rows_of_what_is_gathered(
    hardware: str, precision: str, bytes_each: tuple[float, float]
) -> None:
    """The up projection's input is gathered in fp8, its output gradient is the rank's own; the down projection's the other way."""
    work, profile = job("gqa", precision=precision).workload, HARDWARE[hardware]
    layout = Layout(tp=4, sequence_parallel=1)
    shard = Shard(workload=work, trainer=TRAINERS["megatron"], layout=layout, ep_stride=1.0)
    gemms = {one.name: one for one in layers.layer(shard, moe=False)[0] if isinstance(one, Gemm)}
    times = price(list(gemms.values()), shard, profile)
    bare = {name: dataclasses.replace(one, quantised=(True, True)) for name, one in gemms.items()}
    alone = price(list(bare.values()), shard, profile)
    gathered, own = bytes_each
    for name, (x, dy) in {"mlp_up": (gathered, own), "mlp_down": (own, gathered)}.items():
        one = gemms[name]
        forward = np.max(times[name].forward - alone[name].forward)
        dgrad = np.max(times[name].dgrad - alone[name].dgrad)
        assert forward == pytest.approx(profile.memory_time(x * np.max(one.m) * np.max(one.k), "quantize"))
        assert dgrad == pytest.approx(profile.memory_time(dy * np.max(one.m) * np.max(one.n), "quantize"))


def test_a_scale_per_block_costs_what_was_measured() -> None:
    """5 % on dense products where the profile says so, nothing on those of experts, which were not measured."""
    profile = HARDWARE["b300-sxm"]
    shards = [
        Shard(
            workload=job("moe", precision=precision).workload,
            trainer=TRAINERS["megatron"],
            layout=Layout(),
            ep_stride=1.0,
        )
        for precision in ("fp8", "mxfp8")
    ]
    found = []
    for shard in shards:
        gemms = [
            dataclasses.replace(one, quantised=(True, True))
            for one in layers.layer(shard, moe=True)[0]
            if isinstance(one, Gemm)
        ]
        found.append(price(gemms, shard, profile))
    tensor, block = found
    assert np.max(block["attention_out"].forward) == pytest.approx(1.05 * np.max(tensor["attention_out"].forward))
    assert np.max(block["experts_up"].forward) == pytest.approx(np.max(tensor["experts_up"].forward))


def test_norms_of_queries_and_keys_run_like_the_norms_of_the_layer() -> None:
    """R = T (a + k) d w: one kernel 2 R / 3 R, and saved R; plain operations 9 times that in 18 launches, and 3 R saved."""
    model = dataclasses.replace(shard_of("gqa").model, qk_norm=True)
    for trainer, passes, saved in (("megatron", 1.0, 1.0), ("fsdp", 9.0, 3.0)):
        shard = shard_of("gqa", trainer)
        shard = dataclasses.replace(shard, workload=shard.workload.replace(model=model))
        one = next(each for each in layers.layer(shard, moe=False)[0] if each.name == "qk_norm")
        size = float(shard.tokens) * (model.num_heads + model.num_kv_heads) * model.head_dim * 2
        assert (one.forward, one.backward, one.saved) == (2 * size * passes, 3 * size * passes, saved * size)
        assert one.launches == (2 * passes, 4 * passes)


def test_a_layer_norm_has_casts_around_it_where_an_rms_norm_is_many_kernels() -> None:
    """Under autocast; DeepSpeed's engine has none."""
    for name, passes in (("gpt", 5.0), ("gqa", 9.0)):
        shard = shard_of(name, "fsdp")
        one = next(each for each in layers.layer(shard, moe=False)[0] if each.name == "attention_norm")
        assert isinstance(one, MemoryBound)
        size = float(shard.tokens) * shard.model.hidden_size * 2
        assert (one.forward, one.backward, one.launches[0]) == (2 * size * passes, 3 * size * passes, passes)
        assert float(np.ravel(one.kept)[0]) == size * (2.0 if name == "gpt" else 3.0)
    one = next(each for each in layers.layer(shard_of("gpt", "deepspeed"), moe=False)[0] if each.name == "attention_norm")
    assert isinstance(one, MemoryBound) and one.launches[0] == 1.0 and float(np.ravel(one.kept)[0]) == float(one.forward) / 2


def _with_weights(kind: str, precision: str, layout: Layout, name: str = "gqa") -> Estimate:
    asked = job(name, precision=precision)
    trainer = load_trainer(f"megatron+fp8_param_gather={kind}+gradient_overlap=off")
    return estimate(asked.workload, Cluster(hardware=HARDWARE["h100-sxm"], num_gpus=layout.num_gpus), trainer, layout)


@pytest.mark.parametrize(("precision", "gathered"), [("fp8", 1.0), ("fp8_block", 1.0), ("mxfp8", 2.0)])
def test_weights_in_fp8_lie_twice_and_are_gathered_in_what_they_are(precision: str, gathered: float) -> None:
    """Linear weights of the layers: 1 byte by rows and 1 by columns for bf16 and a copy, 3; tables and norms stay."""
    layout = Layout(dp=8, num_microbatches=2, zero=1)
    plain, quantised = (_with_weights(kind, precision, layout) for kind in ("off", "on"))
    held = stage_parameters(job("gqa").workload, layout, split_stages(job("gqa").model, layout), TRAINERS["megatron"].kernels)
    linear = float(held.linear[0, 0])
    assert linear == pytest.approx(8 * (1024 * 1024 * 2 + 2 * 1024 * 1024 * 4 // 16 + 3 * 1024 * 4096), rel=1e-6)
    assert plain.memory["weights"][0] - quantised.memory["weights"][0] == pytest.approx(linear)
    for part in ("gradients", "optimizer_states", "activations"):
        assert quantised.memory[part] == pytest.approx(plain.memory[part])
    saved = plain.time["data_communication"][0] - quantised.time["data_communication"][0]
    assert (saved > 0.0) == (gathered < 2.0)
    assert plain.step_time[0] - quantised.step_time[0] == pytest.approx(saved)


def test_experts_in_fp8_lie_twice_too() -> None:
    layout = Layout(dp=8, ep=4, num_microbatches=2, zero=1)
    plain, quantised = (_with_weights(kind, "fp8", layout, "moe") for kind in ("off", "on"))
    held = stage_parameters(job("moe").workload, layout, split_stages(job("moe").model, layout), TRAINERS["megatron"].kernels)
    saved = plain.memory["weights"][0] - quantised.memory["weights"][0]
    assert saved == pytest.approx(float(held.linear[0, 0] + held.expert[0, 0])) and held.expert[0, 0] > held.linear[0, 0]


@pytest.mark.parametrize(("precision", "layout", "more", "legal"), [
    ("fp8", Layout(dp=8, zero=1), {}, True), ("fp8", Layout(zero=0), {}, True), ("fp8", Layout(dp=8, zero=0), {}, False),
    ("bf16", Layout(dp=8, zero=1), {}, False), ("nvfp4", Layout(dp=8, zero=1), {}, False),
    ("fp8", Layout(dp=8, zero=1), {"lora_rank": 8}, False),
])  # fmt: skip
def test_weights_in_fp8_need_the_distributed_optimizer(
    precision: str, layout: Layout, more: dict[str, int], legal: bool
) -> None:
    asked = job("gqa", precision=precision, **more)
    asked = dataclasses.replace(asked, trainer=load_trainer("megatron+fp8_param_gather=on"))
    rule = next(one for one in RULES if one.name == "weights in 8 bits")
    assert bool(np.all(rule.holds(asked, layout))) == legal
