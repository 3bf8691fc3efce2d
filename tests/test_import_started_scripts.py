"""Scripts that start an experiment of Primus, what a branch of a script settles, and the layers of an older Megatron."""

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


def test_a_proxy_of_a_model_has_the_layers_that_it_says(tmp_path: Path) -> None:
    line = f"{RUN} --num_layers 4 --mtp_num_layers None --recompute_granularity full --recompute_method block"
    found = read(written(tmp_path, f"{line} --recompute_num_layers 2"))
    assert found.model.num_layers == 4 and not any("not taken" in one for one in found.notes)


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


SEVERAL = """#!/bin/bash
MODEL=$1
MBS=$2
if [ "$MODEL" = "gpt2" ]; then
torchrun --nproc_per_node 4 pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 \\
    --micro-batch-size $MBS --global-batch-size 64 --fp16 --vocab-size 50257
elif [ "$MODEL" = "bert" ]; then
torchrun --nproc_per_node 4 pretrain_bert.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 \\
    --micro-batch-size $MBS --global-batch-size 32 --fp16 --recompute-method uniform
else
torchrun --nproc_per_node 4 pretrain_t5.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size $MBS \\
    --global-batch-size 16 --encoder-seq-length 512 --decoder-seq-length 128 --pipeline-model-parallel-split-rank 1 --fp16
fi
"""


def test_encoders_of_the_same_script_ask_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SEVERAL)
    with pytest.raises(OpenQuestionsError, match="MBS") as asked:
        import_config(path)
    assert "split" not in str(asked.value) and "vocab" not in str(asked.value)
    plan = import_config(path, settings=["ARGS=gpt2 4"])
    assert (plan.layout.dp, plan.layout.micro_batch_size, plan.layout.num_microbatches) == (4, 4, 4)


def test_an_option_of_another_branch_may_be_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    more = BRANCHES.replace('13B" ]]; then\n', '13B" ]]; then\nMORE=(--num-odd-experts 4)\n')
    path.write_text(more.replace("--bf16", "--bf16 ${MORE[@]}"))
    plan = import_config(path, settings=["SIZE=7B", "num_odd_experts=false"])
    assert plan.layout.micro_batch_size == 4
    with pytest.raises(PlannerError, match="no variable or setting"):
        import_config(path, settings=["SIZE=7B", "num_even_experts=false"])


def test_an_optimizer_on_the_host_without_the_configuration_has_a_note(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "deepspeed --num_gpus 8 pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 "
        "--micro-batch-size 4 --global-batch-size 64 --fp16 --vocab-size 50257 --deepspeed --zero-stage 2 --cpu-optimizer "
        "--deepspeed_config other.json\n"
    )
    plan = import_config(path)
    assert plan.layout.offload_optimizer == 100 and any("on the host, by --cpu-optimizer" in one for one in plan.notes)


OF_2023 = """torchrun --nproc_per_node 4 pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \\
    --seq-length 1024 --micro-batch-size 4 --global-batch-size 64 --fp16 --vocab-size 50257 --max-position-embeddings 1024 WORDS
"""


@pytest.mark.parametrize(
    ("words", "unfused"),
    [("--data-impl mmap", True), ("", False), ("--data-impl mmap --use-flash-attn", False),
     ("--data-impl mmap --transformer-impl transformer_engine", False), ("--data-impl mmap --use-mcore-models", False)],
)  # fmt: skip
def test_words_of_an_older_megatron_have_its_layers(tmp_path: Path, words: str, unfused: bool) -> None:
    path = tmp_path / "run.sh"
    path.write_text(OF_2023.replace("WORDS", words))
    assert any("attention unfused: --data-impl" in one for one in import_config(path).notes) == unfused


def test_mpirun_by_its_path_starts_a_script_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(OF_2023.replace("torchrun --nproc_per_node 4", "python").replace("WORDS", "$@"))
    path = tmp_path / "mpi.sh"
    words = "--map-by ppr:4:node -np 4 --tag-output -x A=1"
    path.write_text(f"CMD=${{1:-train.sh}}\n/opt/mpirun {words} ${{CMD}} --tensor-model-parallel-size 2\n")
    layout = import_config(path).layout
    assert (layout.tp, layout.dp, layout.num_microbatches) == (2, 2, 8)


OFFLOADED = """#!/bin/bash
OFFLOAD="true"
cat <<EOT > ds_config.json
{
  "train_micro_batch_size_per_gpu": 2,
  "zero_optimization": {
    "stage": 3$(if [ "${OFFLOAD}" = "true" ]; then echo ',
    "offload_optimizer": {"device": "cpu", "ratio": 0.5}'; fi)
  },
  "fp16": {"enabled": true}
}
EOT
deepspeed --num_gpus 8 pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --fp16 \\
    --micro-batch-size 2 --global-batch-size 64 --vocab-size 50257 --deepspeed --no-pipeline-parallel \\
    --deepspeed_config ds_config.json --zero-stage 3
"""


@pytest.mark.parametrize(("offload", "share"), [("true", 50), ("false", 0)])
def test_a_block_within_a_configuration_that_a_script_writes(tmp_path: Path, offload: str, share: int) -> None:
    (tmp_path / "ds_config.json").write_text('{"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}}')
    path = tmp_path / "run.sh"
    path.write_text(OFFLOADED.replace('OFFLOAD="true"', f'OFFLOAD="{offload}"'))
    layout = import_config(path).layout
    assert (layout.zero, layout.micro_batch_size, layout.offload_optimizer) == (3, 2, share)
