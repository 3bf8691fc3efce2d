"""DeepSpeed's own layer of experts, worked out by hand, and how arguments of Megatron-DeepSpeed say it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import TRAINERS, job

from planner.cost.layer import transformer_layer as layers
from planner.cost.layer.operators import Gemm, MemoryBound, Operator, Shard
from planner.errors import PlannerError
from planner.layout import Layout
from planner.trainer import Trainer, load_trainer
from planner.trainers.bundle.target import ExportJob
from planner.trainers.deepspeed_moe.terms import Terms
from planner.trainers.reading import read
from planner.trainers.reading.configuration import to_plan
from planner.trainers.reading.given import Given
from planner.trainers.targets import load_target

S, H, E = 4096, 1024, 2.0
"""Tokens, width, bytes of an activation."""


def shard_of(trainer: str, top_k: int = 2, **layout: Any) -> Shard:
    work = job("moe", "megatron-deepspeed").workload
    work = work.replace(model=dataclasses.replace(work.model, top_k=top_k))
    return Shard(workload=work, trainer=load_trainer(trainer), layout=Layout(**layout), ep_stride=1.0)


def named(shard: Shard) -> dict[str, Operator]:
    return {one.name: one for one in layers.layer(shard, moe=True)[0]}


@pytest.mark.parametrize(("option", "top_k"), [("1", 1), ("1", 2), ("1.25", 2), ("2", 4)])
def test_masks_products_and_rows_of_a_capacity(option: str, top_k: int) -> None:
    """S E c elements: both masks in bf16 are kept, two products of 2 S E c h FLOP forward and three backward, E c rows."""
    shard = shard_of(f"megatron-deepspeed+expert_masks={option}", top_k, ep=4, dp=4)
    experts = shard.model.num_experts
    slots = experts * math.ceil(S * float(option) * top_k / experts)
    mask, found = S * slots, named(shard)
    dispatch, combine, up = found["expert_dispatch"], found["expert_combine"], found["experts_up"]
    assert isinstance(dispatch, Gemm) and isinstance(combine, Gemm) and isinstance(up, Gemm)
    assert float(np.max(dispatch.m * dispatch.n * dispatch.k)) == mask * H
    assert float(np.max(combine.m * combine.n * combine.k)) == mask * H
    assert (dispatch.trained, dispatch.activations, combine.activations) == (False, False, True)  # 1 and 2 products backward
    assert (dispatch.useful, combine.useful) == (0.0, 0.0)
    assert float(np.max(dispatch.saved)) == E * mask
    assert float(np.max(combine.saved)) == E * mask + E * slots * H  # and what the experts put out
    assert float(np.max(found["expert_chunks"].saved)) == E * slots * H  # what they took
    assert float(np.max(up.m * up.groups)) == pytest.approx(slots)
    assert float(np.max(up.m * up.groups * up.useful)) == pytest.approx(S * top_k)
    kept = 4.0 * S * (experts + H)  # softmax, fp32 input
    kept += {1: 4 * S * (experts + slots / experts), 2: 8 * S * (experts + slots / experts)}.get(top_k, 8 * S * experts + 4 * mask)
    assert float(np.max(found["router"].saved)) == pytest.approx(kept)
    moved = {1: (18, 18), 2: (34, 30)}.get(top_k, (42, 22))
    masks = found["expert_masks"]
    assert isinstance(masks, MemoryBound)
    assert (float(np.max(masks.forward)), float(np.max(masks.backward))) == (moved[0] * mask, moved[1] * mask)
    assert not {"permute", "sort", "unpermute", "expert_bias"} & found.keys()


def test_exchange_of_a_capacity_over_tensor_parallel_ranks() -> None:
    """Every rank sends its 1 / t of E c h; all are gathered after the experts, and gradients before them."""
    shard = shard_of("megatron-deepspeed+expert_masks=1", tp=2, ep=4, dp=4)
    size = E * S * 2 * H
    found = [(one.group, one.op, one.backward, float(np.max(one.size)), float(np.max(one.n)))
             for one in layers.layer(shard, moe=True)[1] if one.name.startswith(("dispatch", "combine"))]  # fmt: skip
    assert sorted(found) == sorted(
        [("ep", "all_to_all", backward, size / 2, 4.0) for backward in (False, False, True, True)]
        + [("tp", "all_gather", backward, size, 2.0) for backward in (False, True)]
    )
    rows = named(shard)["experts_up"]
    assert isinstance(rows, Gemm) and float(np.max(rows.m * rows.groups)) == pytest.approx(S * 2 / 2)


def test_a_capacity_is_four_at_least_and_masks_have_a_workspace() -> None:
    term = Terms(capacity_factor=1.0)
    assert float(term.capacity(64, 128, 1)) == 4 and float(term.capacity(64, 8, 1)) == 8 and float(term.capacity(65, 8, 1)) == 9
    shard = shard_of("megatron-deepspeed+expert_masks=1", ep=4, dp=4)
    empty = np.zeros((1, 3))
    parameters: Any = type("Parameters", (), {"expert": np.array([[0.0, 1.0, 1.0]]), "dense": empty})()
    found = np.asarray(term.workspace_bytes(shard.workload, shard.layout, parameters))
    assert found.tolist() == [[0.0, 8.0 * S * S * 2, 8.0 * S * S * 2]]
    assert float(np.max(Terms().workspace_bytes(shard.workload, shard.layout, parameters))) == 0.0


def test_dense_layers_and_trainers_without_masks_stay_as_they_were() -> None:
    with_masks, plain = shard_of("megatron-deepspeed+expert_masks=1"), shard_of("megatron-deepspeed")
    assert [one.name for one in layers.layer(with_masks, moe=False)[0]] == [one.name for one in layers.layer(plain, moe=False)[0]]
    assert "permute" in named(plain) and "expert_masks" not in named(plain)
    assert 3 not in load_trainer("deepspeed+expert_masks=1").legal.zero and 3 in load_trainer("deepspeed").legal.zero
    assert not load_trainer("deepspeed+expert_masks=1").legal.cp_methods and load_trainer("deepspeed").legal.cp_methods
    known: Trainer = TRAINERS["megatron-deepspeed"]
    assert known.option("expert_masks") == "off"
    assert load_trainer("megatron-deepspeed+expert_masks=1.25").option("expert_masks") == "1.25"


# ------------------------------------------------------------------------------------------------------- arguments

WORDS = (
    "--num-layers 5 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --vocab-size 32000 "
    "--micro-batch-size 2 --global-batch-size 16 --deepspeed --deepspeed_config ds.json --fp16 --zero-stage 1 "
    "--no-pipeline-parallel --create-moe-param-group --moe-loss-coeff 0.01 --moe-min-capacity 4 --moe-eval-capacity-factor 2"
)


def _read(folder: Path, words: str, given: Given | None = None) -> Any:
    file = folder / "run.sh"
    file.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {WORDS} {words}\n")
    return read(file, None, given or Given())


def test_experts_of_megatron_deepspeed(tmp_path: Path) -> None:
    found = _read(tmp_path, "--num-experts 16 --moe-expert-parallel-size 4")
    model = found.model
    assert (model.num_experts, model.top_k, model.moe_layer_interval, model.num_dense_layers) == (16, 1, 2, 0)
    assert [model.is_moe_layer(layer) for layer in range(5)] == [False, True, False, True, False]
    assert (model.expert_ffn_size, model.expert_bias, model.router_bias) == (2048, True, False)
    assert (found.fields["ep"], found.fields["etp"], found.trainer) == (4, 1, "megatron-deepspeed+expert_masks=1")
    assert not found.unread and any("dense masks" in one for one in found.notes)
    every = _read(tmp_path, "--num-experts 16 16 --topk 2 --expert-interval 1 --moe-train-capacity-factor 1.25")
    assert (every.model.top_k, every.model.moe_layer_interval, every.fields["ep"]) == (2, 1, 1)
    assert every.trainer == "megatron-deepspeed+expert_masks=1.25"
    second = _read(tmp_path, "--num-experts 16", Given(settings={"zero_stage": "2"}))
    assert second.trainer.startswith("deepspeed") and "+expert_masks=1" in second.trainer
    split = _read(tmp_path, "--num-experts 16 --tensor-model-parallel-size 2 --moe-expert-parallel-size 8")
    plan = to_plan(split, {})
    assert (int(plan.layout.tp), int(plan.layout.ep), int(plan.layout.etp)) == (2, 8, 1)  # experts over tensor-parallel ranks too
    dense = _read(tmp_path, "--num-experts 1 --expert-interval 2 --mlp-type standard")
    assert not dense.model.is_moe and dense.trainer == "megatron-deepspeed"


@pytest.mark.parametrize(("words", "says"), [
    ("--num-experts 16 32", "--num-experts is 16 32; a plan knows the same number in all"),
    ("--num-experts 16 --mlp-type residual", "--mlp-type"),
    ("--num-experts 16 --disable-moe-token-dropping", "--disable-moe-token-dropping decides"),
    ("--num-experts 16 --use-tutel", "--set use_tutel=false"),
    ("--num-experts 16 --tensor-model-parallel-size 2 --enable-expert-tensor-parallelism", "--enable-expert-tensor-parallelism"),
    ("--num-experts 16 --zero-stage 3", "do not run with ZeRO 3"),
    ("--num-experts 16 --ds-sequence-parallel-size 2", "--ds-sequence-parallel-size"),
    ("--num-experts 16 --moe-train-capacity-factor 1.1", "capacity factors 1, 1.25, 1.5, 2 are priced"),
    ("--num-experts 16 --moe-min-capacity 256", "--moe-min-capacity 256 decides the capacity of 16 experts for 1024 tokens"),
    ("--num-experts 16 --use-pft", "--use-pft decides"),
    ("--num-experts 16 --intra-rank-edp-groups", "--intra-rank-edp-groups decides"),
])  # fmt: skip
def test_experts_that_no_mask_describes_are_refused_by_their_words(tmp_path: Path, words: str, says: str) -> None:
    with pytest.raises(PlannerError) as error:
        _read(tmp_path, words)
    assert says in str(error.value)


def test_words_that_change_nothing_of_the_masks(tmp_path: Path) -> None:
    """A least capacity below what tokens give, expert tensor parallelism without any, and --set without a word."""
    for words in ("--moe-min-capacity 64", "--moe-min-capacity 0", "--enable-expert-tensor-parallelism"):
        assert _read(tmp_path, f"--num-experts 16 {words}").trainer == "megatron-deepspeed+expert_masks=1"
    said = Given(settings={"use_tutel": "false"})
    assert _read(tmp_path, "--num-experts 16 --use-tutel", said).trainer == "megatron-deepspeed+expert_masks=1"


@pytest.mark.parametrize("target", ["deepspeed", "axolotl"])
def test_no_exporter_writes_such_experts_and_says_so(tmp_path: Path, target: str) -> None:
    plan = to_plan(_read(tmp_path, "--num-experts 16", Given(settings={"zero_stage": "2"})), {})
    assert "expert_masks" in " ".join(load_target(target).refusals(ExportJob.of(plan)))


def test_the_dump_of_a_log_says_the_same(tmp_path: Path) -> None:
    values = {
        "deepspeed": True, "zero_stage": 1, "num_layers": 4, "hidden_size": 512, "ffn_hidden_size": 2048, "num_attention_heads": 8,
        "seq_length": 512, "max_position_embeddings": 512, "padded_vocab_size": 32000, "micro_batch_size": 2, "world_size": 8,
        "global_batch_size": 16, "fp16": True, "add_bias_linear": True, "num_experts": [16], "topk": 2, "expert_interval": 1,
        "mlp_type": "standard", "moe_token_dropping": True, "moe_train_capacity_factor": 1.25, "moe_min_capacity": 4,
        "moe_expert_parallel_size": 4, "use_tutel": False, "tensor_model_parallel_size": 1,
    }  # fmt: skip

    def dumped(changed: dict[str, object], given: Given | None = None) -> Any:
        file = tmp_path / "train.log"
        file.write_text("".join(f"  {name} {'.' * (40 - len(name))} {value}\n" for name, value in (values | changed).items()))
        return read(file, "megatron", given or Given())

    found = dumped({})
    assert (found.trainer, found.model.num_experts, found.model.top_k) == ("megatron-deepspeed+expert_masks=1.25", 16, 2)
    assert (found.fields["ep"], found.fields["etp"], found.unread) == (4, 1, ())
    for name, value in (("use_tutel", True), ("moe_token_dropping", False), ("mlp_type", "residual")):
        with pytest.raises(PlannerError, match=f"--set {name}=false imports the job without"):
            dumped({name: value})
        assert dumped({name: value}, Given(settings={name: "false"})).trainer == found.trainer
