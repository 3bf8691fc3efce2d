"""Scripts that start an experiment of Primus, and questions that the branch of a script settles."""

from pathlib import Path

import pytest

from planner import import_config
from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.given import OpenQuestionsError

EXPERIMENT = """
work_group: ${PRIMUS_TEAM:amd}
exp_name: ${PRIMUS_EXP_NAME:llama}
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: llama3.1_8B.yaml
    overrides:
      micro_batch_size: 2
      global_batch_size: ${GBS:128}
      seq_length: 8192
      tensor_model_parallel_size: ${TP:1}
      overlap_grad_reduce: true
"""
START = """#!/bin/bash
source ../settings.env
NAME=$(hostname)
export PRIMUS_EXP_NAME="llama-$NAME"
export TP=2
LINE
"""
RUN = "EXP=configs/llama.yaml bash ./examples/run_pretrain.sh --micro_batch_size $MBS --seq_length 4096"
BRANCHES = """#!/bin/bash
SIZE=$1
if [[ $SIZE == "7B" ]]; then
ARGS=(--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --micro-batch-size 4)
fi
if [[ $SIZE == "13B" ]]; then
ARGS=(--num-layers 40 --hidden-size 5120 --num-attention-heads 40 --seq-length 4096 --micro-batch-size 1)
fi
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py ${ARGS[@]} --global-batch-size 64 --bf16 \\
    --tensor-model-parallel-size 2 --vocab-size 32000
"""


def written(tmp_path: Path, line: str, experiment: str = EXPERIMENT) -> Path:
    (tmp_path / "configs").mkdir()
    (tmp_path / "train").mkdir()
    (tmp_path / "settings.env").write_text("MBS=1\n")
    (tmp_path / "configs" / "llama.yaml").write_text(experiment)
    path = tmp_path / "train" / "start.sh"
    path.write_text(START.replace("LINE", line))
    return path


@pytest.mark.parametrize(
    ("line", "micro", "length", "dp", "batch"),
    [
        (RUN, 1, 4096, 4, 128),
        (f"GPUS_PER_NODE=4 NNODES=2 GBS=64 {RUN}", 1, 4096, 4, 64),
        ("primus-cli slurm srun -N 2 -- train pretrain --config configs/llama.yaml --global_batch_size 64", 2, 8192, 8, 64),
        ("torchrun --nnodes 1 primus/cli/main.py train pretrain --config configs/llama.yaml micro_batch_size=4", 4, 8192, 4, 128),
        ("export EXP=configs/llama.yaml\nRUN=examples/run_pretrain.sh\n[ -f $P/$RUN ] || RUN=examples/train.sh\n"
         "bash $RUN --micro_batch_size 4 --seq_length 2048\npython test.py --micro-batch-size 9 --seq-length 1", 4, 2048, 4, 128),
    ],
)  # fmt: skip
def test_a_script_of_primus_is_its_experiment_under_its_options(
    tmp_path: Path, line: str, micro: int, length: int, dp: int, batch: int
) -> None:
    path = written(tmp_path, line)
    layout = import_config(path).layout
    assert (layout.tp, layout.dp, layout.micro_batch_size, layout.zero) == (2, dp, micro, 1)
    assert layout.num_microbatches * layout.micro_batch_size * layout.dp == batch
    found = read(path)
    assert (found.sequence_length, found.precision) == (length, "bf16")


def test_an_experiment_that_is_not_there_is_asked_for(tmp_path: Path) -> None:
    run = "bash examples/run_slurm_pretrain.sh --micro_batch_size 4"
    path = written(tmp_path, f"export EXP=$OUT/other.yaml\nsed -i s/2/4/ $EXP\n{run}")
    with pytest.raises(OpenQuestionsError, match="config_file=FILE"):
        import_config(path)
    plan = import_config(path, settings=[f"config_file={tmp_path / 'configs' / 'llama.yaml'}"])
    assert plan.layout.micro_batch_size == 4
    assert any("may change it" in one for one in plan.notes)


def test_variables_of_the_experiment_that_the_script_leaves_open_are_asked(tmp_path: Path) -> None:
    with pytest.raises(OpenQuestionsError, match="set BATCH=VALUE .GBS of llama.yaml"):
        import_config(written(tmp_path, f"GBS=$BATCH {RUN}"))


def test_what_a_branch_says_is_not_asked_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(BRANCHES)
    with pytest.raises(OpenQuestionsError, match="SIZE=7B") as asked:
        import_config(path)
    assert not any(one in str(asked.value) for one in ("--model", "--micro-batch-size M", "--sequence-length"))
    plan = import_config(path, settings=["SIZE=13B"])
    assert (plan.layout.micro_batch_size, plan.layout.num_microbatches) == (1, 16)


@pytest.mark.parametrize("word", ["--ssh_port 2222", "--enable_each_rank_log logs", "--save_pid"])
def test_options_of_the_launcher_are_no_arguments(tmp_path: Path, word: str) -> None:
    path = tmp_path / "train.sh"
    path.write_text(
        f"deepspeed --num_nodes 1 --num_gpus 8 {word} pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32"
        " --seq-length 2048 --micro-batch-size 4 --global-batch-size 64 --bf16 --vocab-size 32000 --enable-gpt-oss\n"
    )
    try:
        plan = import_config(path)
    except PlannerError as error:
        raise AssertionError(str(error)) from error
    assert not any("ssh" in one or "pid" in one or "gpt_oss" in one for one in plan.unread)
