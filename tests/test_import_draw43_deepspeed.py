"""Megatron-DeepSpeed since 2023: experts under the pipeline engine, SwitchMLP, its own layers, and words without a switch."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import job

from planner.cost.layer import transformer_layer as layers
from planner.cost.layer.operators import Shard
from planner.errors import PlannerError
from planner.layout import Layout
from planner.trainer import load_trainer
from planner.trainers.reading import read
from planner.trainers.reading.configuration import to_plan

WORDS = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --vocab-size 32000 "
    "--micro-batch-size 2 --global-batch-size 16 --deepspeed --deepspeed_config ds.json --zero-stage 1"
)
PIPE = "self.specs.append(LayerSpec(ParallelTransformerLayerPipe, config, layer_number=i{}))\nself.specs.append(LayerSpec(Head))\n"
EXPERTS = "--num-experts 8 --moe-expert-parallel-size 4 --topk 2 --expert-interval 1"


def _read(folder: Path, words: str, before: str = "") -> Any:
    file = folder / "run.sh"
    file.write_text(f"{before}torchrun --nproc_per_node 8 pretrain_gpt.py {WORDS} {words}\n")
    return read(file, None)


def _with_pipe(folder: Path, more: str) -> None:
    (folder / "megatron/model").mkdir(parents=True, exist_ok=True)
    (folder / "megatron/model/gpt_model.py").write_text(PIPE.format(more))


def test_the_pipeline_engine_drops_experts_unless_its_layers_get_them(tmp_path: Path) -> None:
    for built in (None, "", ", num_experts=experts"):
        if built is not None:
            _with_pipe(tmp_path, built)
        found = _read(tmp_path, f"--fp16 {EXPERTS}")
        assert found.model.is_moe is bool(built)
        said = [one for one in found.notes if "--num-experts 8 and --moe-expert-parallel-size 4 count for nothing" in one]
        assert len(said) == (not built)
        assert built or (found.trainer == "megatron-deepspeed" and found.fields.get("ep", 1) == 1)
    _with_pipe(tmp_path, "")
    (tmp_path / "pretrain_gpt.py").write_text("model = GPTModel(config)\n")
    assert _read(tmp_path, f"--fp16 {EXPERTS}").fields["ep"] == 4  # a program without the pipeline's model
    (tmp_path / "pretrain_gpt.py").write_text("model = GPTModelPipe(config)\n")
    assert not _read(tmp_path, f"--fp16 {EXPERTS}").model.is_moe
    assert _read(tmp_path, f"--fp16 --no-pipeline-parallel {EXPERTS}").fields["ep"] == 4
    for words in (("--nproc_per_node 8", "--nproc_per_node 1"), ("--no-pipeline-parallel", "")):
        (tmp_path / "run.sh").write_text((tmp_path / "run.sh").read_text().replace(*words))
    assert int(to_plan(read(tmp_path / "run.sh"), {}).layout.dp) == 1


@pytest.mark.parametrize("pipe", ["", "--no-pipeline-parallel"])
def test_experts_of_switch_mlp_are_whole_on_every_rank(tmp_path: Path, pipe: str) -> None:
    found = _read(tmp_path, f"--fp16 --num-experts-switch 4 --num-experts 8 --moe-expert-parallel-size 4 --topk 2 {pipe}")
    model = found.model
    assert (model.num_experts, model.top_k, model.moe_layer_interval, model.expert_ffn_size) == (4, 2, 1, 2048)
    assert (found.fields["ep"], found.trainer) == (1, "megatron-deepspeed")
    assert any("--num-experts-switch: 4 whole MLPs in every layer and on every rank, 2 for a token" in one for one in found.notes)
    assert int(to_plan(found, {}).layout.ep) == 1
    assert _read(tmp_path, "--fp16 --num-experts-switch 4").model.top_k == 1
    assert not _read(tmp_path, "--fp16 --num-experts-switch 1").model.is_moe


def test_layers_since_2023_keep_what_they_repeat_and_copy() -> None:
    """Bytes a token: e (a - k) 2 d of keys and values, e a d of the output where a microbatch has two sequences, e f of SiLU."""
    work = job("gpt", "megatron-deepspeed").workload
    work = work.replace(model=dataclasses.replace(work.model, num_heads=16, num_kv_heads=4, gated=True, activation="silu"))

    def kept(version: str, kernel: str = "fa2", **layout: int) -> float:
        trainer = load_trainer(f"megatron-deepspeed+attention_kernel={kernel}+deepspeed_layers={version}")
        shard = Shard(workload=work, trainer=trainer, layout=Layout(**layout), ep_stride=1.0)
        return float(sum(np.max(one.saved) + np.max(one.kept) for one in layers.layer(shard, moe=False)[0]))

    model = work.model
    for micro, tp in ((1, 1), (2, 1), (1, 2)):
        tokens = work.sequence_length * micro
        more = 2.0 * (12 * 2 * model.head_dim + (micro > 1) * 16 * model.head_dim + model.ffn_size) / tp
        found = kept("2023", micro_batch_size=micro, tp=tp) - kept("2022", micro_batch_size=micro, tp=tp)
        assert found == pytest.approx(tokens * more)
    found = kept("2023", "unfused", micro_batch_size=2) - kept("2022", "unfused", micro_batch_size=2)
    assert found == pytest.approx(2.0 * 2 * work.sequence_length * (12 * 2 * model.head_dim + model.ffn_size))


def test_words_since_2023_take_its_layers_and_sequence_parallelism(tmp_path: Path) -> None:
    assert _read(tmp_path, "--bf16").trainer == "megatron-deepspeed"
    assert _read(tmp_path, "--bf16 --swiglu --glu-activation swiglu").trainer.endswith("+deepspeed_layers=2023")
    found = _read(tmp_path, "--bf16 --sequence-parallel --tensor-model-parallel-size 2")
    assert "+deepspeed_layers=2023" in found.trainer and int(to_plan(found, {}).layout.sequence_parallel) == 1
    plain = _read(tmp_path, "--bf16 --swiglu --num-key-value-heads 2 --no-pipeline-parallel --zero-stage 2")
    kept = [one for one in plain.notes if "keys and values: Megatron-DeepSpeed repeats them for all query heads" in one]
    two = "--num-key-value-heads 2 --no-pipeline-parallel --zero-stage 2 --tensor-model-parallel-size 2"
    wide = _read(tmp_path, f"--bf16 --swiglu {two}")
    half = [one for one in wide.notes if "keys and values: Megatron-DeepSpeed repeats" in one]
    assert [int(re.findall(r"by (\d+) bytes", one)[0]) for one in (*kept, *half)] == [1536, 768]


def test_how_a_feature_runs_is_not_asked_where_it_is_off(tmp_path: Path) -> None:
    off = _read(tmp_path, "--bf16 --use-torch-fancy-graphs=0 --fancy-graphs-fallback-mode=nothing")
    assert not off.questions
    with pytest.raises(PlannerError, match="fancy_graphs_fallback_mode=false"):
        _read(tmp_path, "--bf16 --use-torch-fancy-graphs=1 --fancy-graphs-fallback-mode=nothing")


def test_a_configuration_made_by_sed_is_followed_or_said(tmp_path: Path) -> None:
    sed = 'sed "s/CONFIG_STAGE/1/" {}/ds_TEMPLATE.json | sed "s/CONFIG_LEAST/64/" > ds.json\n'
    found = _read(tmp_path, "--fp16", sed.format("$TREE/examples"))
    said = "made by sed of 'ds_TEMPLATE.json', which is not found from here: only its stage is read"
    assert any(said in one for one in found.notes)
    (tmp_path / "ds_TEMPLATE.json").write_text(
        '{"train_batch_size": 16, "zero_optimization": {"stage": CONFIG_STAGE}, "fp16": {"enabled": true}, '
        '"curriculum_learning": {"enabled": true, "min_difficulty": CONFIG_LEAST}, "data_types": {"grad_accum_dtype": "fp32"}}'
    )
    found = _read(tmp_path, "--fp16", sed.format("."))
    said = "DeepSpeed's configuration: curriculum_learning.enabled = True is not in the plan; sequences are short at first"
    assert any(said in one for one in found.notes)
    assert any(one.startswith("data_types.grad_accum_dtype: gradients are priced in 16 bits") for one in found.notes)
    (tmp_path / "examples/small").mkdir(parents=True)
    (tmp_path / "ds_TEMPLATE.json").rename(tmp_path / "examples/small/ds_TEMPLATE.json")
    found = _read(tmp_path, "--fp16", sed.format("$HOME/project/examples/small"))  # by the end of a path on another machine
    assert any(said in one for one in found.notes)
