"""What a sweep over all arguments that Megatron and its forks ever had showed: defaults, old names, words beside a plan."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from import_files import written
from samples import job

from planner.cost.memory import states
from planner.cost.pipeline.partition import split_stages, stage_parameters
from planner.cost.state_dtypes import stored_as
from planner.errors import PlannerError
from planner.layout import CpMethod, Layout, Module, Recompute
from planner.trainer import load_trainer
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given, OpenQuestionsError

SIZES = "--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048"
SIZES += " --micro-batch-size 1 --global-batch-size 64 --vocab-size 32000"


def script(folder: Path, arguments: str, program: str = "pretrain_gpt.py", **given: Any) -> Reading:
    text = f"torchrun --nproc_per_node 8 --nnodes 2 {program} {SIZES} {arguments}\n"
    return read(written(folder, text, "train.sh"), None, Given(**given))


def asks(folder: Path, arguments: str) -> list[str]:
    with pytest.raises(OpenQuestionsError) as error:
        script(folder, arguments)
    return [one.name for one in error.value.questions]


# ---------------------------------------------------------------------------------------------------------------- recompute


@pytest.mark.parametrize(
    ("arguments", "mode", "layers"),
    [
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 0", Recompute.NONE, 0),
        ("--recompute-granularity full --recompute-method block", Recompute.FULL, 1),  # 1 by default until 2023
        ("--recompute-method block --recompute-num-layers 2", Recompute.NONE, 0),  # the granularity decides
        ("--activations-checkpoint-method uniform", Recompute.FULL, 0),  # until 2022 the method did
        ("--activations-checkpoint-method block --activations-checkpoint-num-layers 3", Recompute.FULL, 3),
    ],
)
def test_how_many_layers_are_repeated(arguments: str, mode: Recompute, layers: int, tmp_path: Path) -> None:
    found = script(tmp_path, f"--bf16 {arguments}")
    assert (found.fields["recompute"], found.fields.get("recompute_layers", 0)) == (mode, layers)
    old = "activations-checkpoint" in arguments
    assert found.trainer.startswith("megatron-2021") == old


def test_layers_of_a_rank_and_not_of_a_virtual_stage(tmp_path: Path) -> None:
    stages = "--bf16 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4"
    block = f"{stages} --recompute-granularity full --recompute-method block --recompute-num-layers 2"
    assert script(tmp_path, block).fields["recompute_layers"] == 4
    assert script(tmp_path, f"{block} --enable-recompute-layers-per-pp-rank").fields["recompute_layers"] == 2


def test_modules_that_dense_layers_do_not_have_are_left_out(tmp_path: Path) -> None:
    found = script(tmp_path, "--bf16 --recompute-granularity selective --recompute-modules core_attn layernorm moe_act")
    assert found.fields["recompute_modules"] == Module.CORE_ATTENTION
    assert any("layernorm, moe_act: nothing in a dense model" in one for one in found.notes)
    alone = script(tmp_path, "--bf16 --recompute-granularity selective --recompute-modules layernorm")
    assert alone.fields["recompute"] == Recompute.NONE


# ----------------------------------------------------------------------------------------------------- layers and precision


def test_query_groups_are_one_by_default(tmp_path: Path) -> None:
    found = script(tmp_path, "--bf16 --group-query-attention")
    assert found.model is not None and found.model.num_kv_heads == 1


def test_an_output_gate_has_weights(tmp_path: Path) -> None:
    plain, gated = (script(tmp_path, f"--bf16 {one}").model for one in ("", "--attention-output-gate"))
    assert plain is not None and gated is not None and (plain.attention_gate, gated.attention_gate) == (False, True)


def test_positions_that_nobody_knows_are_asked_for(tmp_path: Path) -> None:
    assert asks(tmp_path, "--bf16 --position-embedding-type xpos") == ["position_embedding_type"]


def test_a_window_of_forks_counts_the_own_token(tmp_path: Path) -> None:
    found = script(tmp_path, "--bf16 --sliding-window 1024")
    assert found.model is not None and found.model.window == 1024


def test_fp32_where_no_flag_says_another_precision(tmp_path: Path) -> None:
    """Adam: weight 4, gradient 4, moments 8 bytes, the moments over the ranks of the distributed optimizer."""
    found = script(tmp_path, "--use-distributed-optimizer --use-flash-attn")
    assert found.precision == "fp32" and "attention_kernel=unfused" in found.trainer
    assert to_plan(found, {"hardware": "h100-sxm"}).layout.zero == 1
    one = job("gpt", load_trainer(found.trainer), precision="fp32")
    for zero, of_moments in ((0, 8.0), (1, 8.0 / 16)):
        given = Layout(zero=zero, dp=16)
        parameters = stage_parameters(one.workload, given, split_stages(one.workload.model, given), one.trainer.kernels)
        held = states.state_bytes(one.workload, stored_as(one.workload, one.trainer), given, parameters)
        each = [float(np.max(held[one]) / np.max(parameters.all)) for one in ("weights", "gradients", "optimizer_states")]
        assert each == pytest.approx([4.0, 4.0, of_moments], rel=1e-3)


def test_fused_attention_does_not_compute_in_fp32(tmp_path: Path) -> None:
    found = script(tmp_path, "")
    with pytest.raises(PlannerError, match="trainer megatron does not train in fp32"):
        to_plan(found, {"hardware": "h100-sxm", "trainer": "megatron"})


def test_fp8_over_weights_in_fp32_is_asked_about(tmp_path: Path) -> None:
    assert asks(tmp_path, "--fp8-format hybrid") == ["bf16"]


def test_attention_in_fp8(tmp_path: Path) -> None:
    assert "fp8_attention=on" in script(tmp_path, "--bf16 --fp8-format hybrid --fp8-dot-product-attention").trainer


# ------------------------------------------------------------------------------------------------------ states and degrees


def test_what_megatron_fsdp_shards_is_asked_for(tmp_path: Path) -> None:
    """--data-parallel-sharding-strategy was no_shard by default until March 2026."""
    assert asks(tmp_path, "--bf16 --use-megatron-fsdp") == ["data_parallel_sharding_strategy"]
    said = {"data_parallel_sharding_strategy": "no_shard"}
    assert script(tmp_path, "--bf16 --use-megatron-fsdp", settings=said).fields["zero"] == 0


def test_muon_that_is_distributed_shards_by_layers(tmp_path: Path) -> None:
    found = script(tmp_path, "--bf16 --optimizer dist_muon")
    assert (found.optimizer, found.fields["zero"]) == ("muon", 1)


def test_experts_cut_over_ranks_of_both_degrees(tmp_path: Path) -> None:
    experts = "--bf16 --num-experts 8 --disable-bias-linear --tensor-model-parallel-size 2 --sequence-parallel"
    found = script(tmp_path, f"{experts} --expert-model-parallel-size 2 --moe-extended-tp")
    assert (found.fields["ep"], found.fields["etp"]) == (1, 4)


def test_methods_of_context_parallelism_together_are_one_question(tmp_path: Path) -> None:
    for said in ("p2p a2a", "a2a+p2p --hierarchical-context-parallel-sizes 2 2"):
        assert asks(tmp_path, f"--bf16 --context-parallel-size 4 --cp-comm-type {said}") == ["cp_comm_type"]
    same = script(tmp_path, "--bf16 --context-parallel-size 4 --cp-comm-type a2a a2a")
    assert same.fields["cp_method"] == CpMethod.A2A


def test_context_parallelism_of_mindspeed_is_ulysses_by_default(tmp_path: Path) -> None:
    found = script(tmp_path, "--bf16 --context-parallel-size 2 --use-fused-rmsnorm")
    assert found.fields["cp_method"] == CpMethod.A2A
    assert any("ulysses_cp_algo by default" in one for one in found.notes)
    ring = script(tmp_path, "--bf16 --context-parallel-size 2 --use-fused-rmsnorm --use-cp-send-recv-overlap")
    assert ring.fields["cp_method"] == CpMethod.RING


# -------------------------------------------------------------------------------------------------------- words beside a plan


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        ("--rampup-batch-size 16 16 1000", "the batch grows to --global-batch-size"),
        ("--fp8-format hybrid --first-last-layers-bf16", "all layers are priced in the low precision"),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear", "priced with its logits in memory"),
        ("--output-logit-dtype fp32", "logits are priced in 16 bits"),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", "keeps all in fp32"),
    ],
)
def test_a_note_says_what_a_plan_has_instead(arguments: str, note: str, tmp_path: Path) -> None:
    precision = "" if "--fp16" in arguments else "--bf16"
    assert any(note in one for one in script(tmp_path, f"{precision} {arguments}").notes)


@pytest.mark.parametrize(
    "word", ["freeze-all-layers", "random-ltd", "o2-optimizer", "teacher-load /t", "load-teacher /t", "export-kd-teacher-load /t",
             "lora-r 8 --lora-modules-to-save output_layer", "outer-dp-sharding-strategy optim"],
)  # fmt: skip
def test_words_that_decide_memory_are_refused_by_name(word: str, tmp_path: Path) -> None:
    name = word.rpartition("--")[2].split()[0].replace("-", "_")
    with pytest.raises(PlannerError, match=f"--set {name}="):
        script(tmp_path, f"--bf16 --{word}")


@pytest.mark.parametrize("word", ["use_swift_optimizer", "tt_diffusion"])
def test_switches_of_forks_are_asked_about_whatever_they_sound_like(word: str, tmp_path: Path) -> None:
    assert asks(tmp_path, f"--bf16 --{word.replace('_', '-')}") == [word]


def test_words_of_forks_stand_in_the_first_message(tmp_path: Path) -> None:
    text = f"torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES} --bf16 --tensor-model-parallel-size $TP --kaibab-mixing\n"
    with pytest.raises(OpenQuestionsError) as error:
        read(written(tmp_path, text, "a.sh"))
    assert [one.name for one in error.value.questions] == ["TP", "kaibab_mixing"]
    with pytest.raises(PlannerError, match="--norm-recompute decides memory"):
        read(written(tmp_path, text.replace("kaibab-mixing", "norm-recompute"), "b.sh"))


def test_layers_for_multi_token_prediction_of_forks(tmp_path: Path) -> None:
    found = script(tmp_path, "--bf16 --position-embedding-type rope --use-multi-token-prediction --mtp-depth 2 --rms-norm")
    assert found.model is not None and (found.model.mtp_layers, found.model.norm) == (2, "rmsnorm")


# --------------------------------------------------------------------------------------------------- the Megatron around it

PARSER = """
def add(parser):
    group = parser.add_argument_group(title='x')
    group.add_argument('--transformer-impl', default='{impl}', choices=['local', 'transformer_engine'])
    group.add_argument('--hidden-dropout', type=float, default=0.0)
    group.add_argument('--attention-dropout', type=float, default=0.0)
    group.add_argument('--recompute-granularity', type=str, default=None)
    group.add_argument('--use-distributed-optimizer', action='store_true', default=True)
    group.add_argument('--data-parallel-sharding-strategy', type=str, default='optim_grads')
"""


def test_defaults_of_the_megatron_around_a_script(tmp_path: Path) -> None:
    file = "megatron/training/arguments.py"
    written(tmp_path, PARSER.replace("{impl}", "local"), file)
    found = script(tmp_path, "--bf16")
    assert found.fields["zero"] == 1 and "attention_kernel=unfused" in found.trainer and "dropout" not in found.trainer
    assert any("--use-distributed-optimizer True by default in the Megatron around it" in one for one in found.notes)
    assert "unfused" not in script(tmp_path, "--bf16 --use-flash-attn").trainer
    assert script(tmp_path, "--bf16 --use-megatron-fsdp").fields["zero"] == 2
    written(tmp_path, PARSER.replace("{impl}", "transformer_engine"), file)
    assert "unfused" not in script(tmp_path, "--bf16").trainer


def test_hybrid_models_are_asked_for_and_other_architectures_refused(tmp_path: Path) -> None:
    with pytest.raises(OpenQuestionsError) as error:
        script(tmp_path, "--bf16 --hybrid-layer-pattern *E*E", program="pretrain_hybrid.py")
    assert [one.name for one in error.value.questions] == ["--model NAME"]
    with pytest.raises(PlannerError, match="pretrain_bert.py is an architecture"):
        script(tmp_path, "--bf16", program="pretrain_bert.py")


def test_layers_of_modellink_are_those_of_mindspeed(tmp_path: Path) -> None:
    found = script(tmp_path, "--bf16 --spec modellink.tasks.models.spec.deepseek_spec layer_spec")
    assert found.model is not None and found.model.num_layers == 16


def test_gradients_in_bf16_under_megatron_fsdp(tmp_path: Path) -> None:
    found = script(tmp_path, "--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim --grad-reduce-in-bf16")
    assert "gradient_dtype=bf16" in found.trainer and not any("in fp32" in one for one in found.notes)
