"""One command of Megatron in many ways of the shell: each is read, or asked about in one message."""

from pathlib import Path

import pytest
from import_files import written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError

SIZES = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096"
SIZES += " --vocab-size 32000 --bf16"
RUN = f"torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py {SIZES}"
REST = "--tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --micro-batch-size $MBS --global-batch-size $GBS"


@pytest.mark.parametrize(
    ("before", "command"),
    [
        ("let TP=2*2\nlet PP=1 PP+=1\nMBS=2; GBS=128", f"{RUN} {REST}"),
        ("TP=4; PP=2\n(( MBS = $TP / $PP ))\n(( GBS = MBS * 64 ))", f"{RUN} {REST}"),
        ("declare -A T=([7b]=4 [70b]=8)\ndeclare -A P\nP[\"7b\"]=2\nS=7b\nMBS=2; GBS=128",
         f"{RUN} {REST.replace('$TP', '${T[$S]}').replace('$PP', '${P[$S]}')}"),
        ("A=''\nfor one in 'tensor-model-parallel-size 4' 'pipeline-model-parallel-size 2'; do A+=\" --$one\"; done",
         f"{RUN} $A --micro-batch-size 2 --global-batch-size 128"),
        ("TP=4; PP=2; MBS=2\nGBS=$(python3 -c \"print(2 * 64)\")", f"{RUN} {REST}"),
        ("TP=1; PP=2; MBS=2; GBS=128\nSET=$(getopt -o t: --long tp:,pp: -- \"$@\")\neval set -- \"$SET\"\nwhile true; do\n"
         "case \"$1\" in --tp) TP=$2; shift 2;; --) shift; break;; esac\ndone\nTP=$((TP * 4))", f"{RUN} {REST}"),
        ("PP=2; MBS=2; GBS=128\nA=(--tensor-model-parallel-size 4)\n"
         "TP=$(echo \"${A[@]}\" | grep -oP '(?<=--tensor-model-parallel-size )\\d+')", f"{RUN} {REST}"),
    ],
)  # fmt: skip
def test_what_the_shell_calculates(before: str, command: str, tmp_path: Path) -> None:
    found = read(written(tmp_path, f"#!/bin/bash\n{before}\n{command}\n", "train.sh"))
    assert [found.fields[one] for one in ("tp", "pp", "micro_batch_size")] == [4, 2, 2]
    assert (found.global_batch_size, found.num_gpus) == (128, 16)


@pytest.mark.parametrize("counted", [
    "nvidia-smi -L | wc -l", "nvidia-smi --list-gpus 2>/dev/null | wc -l",
    "nvidia-smi --query-gpu=name --format=csv,noheader | wc -l",
    'python -c "import torch; print(torch.cuda.device_count())"',
])  # fmt: skip
def test_gpus_that_a_job_counts_are_those_that_it_asks_for(tmp_path: Path, counted: str) -> None:
    command = RUN.replace("--nproc_per_node 8 --nnodes 2", "--nproc_per_node $NGPU")
    text = f"NGPU=$({counted})\n{command} --micro-batch-size 2 --global-batch-size 128\n"
    assert read(written(tmp_path, f"#!/bin/bash\n#SBATCH --gres=gpu:4\n{text}", "job.sh")).num_gpus == 4
    assert read(written(tmp_path, text, "alone.sh")).num_gpus is None



def test_a_loop_that_starts_trainings_stays_a_question(tmp_path: Path) -> None:
    text = f"PP=1; MBS=1; GBS=64\nfor TP in 8 4; do\n{RUN} {REST}\ndone\n"
    with pytest.raises(OpenQuestionsError) as error:
        read(written(tmp_path, text, "train.sh"))
    assert [(one.name, one.choices) for one in error.value.questions] == [("TP", ("8", "4"))]
    left = f"PP=1; MBS=1; GBS=64\nfor TP in 8 4; do\nif [ -d /x ]; then break; fi\ndone\n{RUN} {REST}\n"
    with pytest.raises(OpenQuestionsError):
        read(written(tmp_path, left, "left.sh"))


INNER = f"TP=$1\nN=$(wc -l < hosts)\nif [ ! -d build ]; then python setup.py build_ext; fi\n{RUN.replace('2', '$N', 1)}"
INNER += " --tensor-model-parallel-size $TP --micro-batch-size $2 --global-batch-size $3\n"


def started(folder: Path, outer: str) -> Reading:
    written(folder, INNER, "run_pretrain.sh")
    return read(written(folder, f"#!/bin/bash\n# pkill -f torchrun\n{outer}\n", "dist.sh"))


@pytest.mark.parametrize(
    "outer",
    [
        "cmd=\"bash -c 'cd /w; bash run_pretrain.sh 4 2 128\"\nfor host in $(cat hosts); do\nssh -f -n $host $cmd\" &'\"\ndone",
        "cmd=\"bash -c 'cd /w; bash run_pretrain.sh 4 2 128\"\nrun=$cmd\" > log 2>&1'\"\neval $run",
    ],
)
def test_a_script_that_starts_another_is_read_by_what_that_starts(outer: str, tmp_path: Path) -> None:
    """Its own text names a launcher in a comment alone, which any trainer may have."""
    found = started(tmp_path, outer)
    assert (found.fields["tp"], found.fields["micro_batch_size"], found.global_batch_size) == (4, 2, 128)


def test_what_a_command_writes_is_no_argument_of_the_script(tmp_path: Path) -> None:
    text = f"TP=$1\nPP=$2\nMBS=$3\nGBS=$(count_them)\n{RUN} {REST}\n"
    with pytest.raises(OpenQuestionsError) as error:
        read(written(tmp_path, text, "train.sh"))
    assert [one.name for one in error.value.questions] == ["ARGS", "GBS"]
    found = read(written(tmp_path, text, "train.sh"), None, Given(settings={"ARGS": "4 2 2", "GBS": "128"}))
    assert (found.fields["tp"], found.global_batch_size) == (4, 128)


def test_a_configuration_of_deepspeed_that_waits_for_an_argument_is_not_asked_for(tmp_path: Path) -> None:
    written_there = 'cat <<EOT > ds.json\n{"train_batch_size": $B, "fp16": {"enabled": true}}\nEOT\n'
    text = f"B=$1\n{written_there}{RUN} --micro-batch-size 1 --global-batch-size $B --deepspeed --deepspeed_config ds.json\n"
    with pytest.raises(OpenQuestionsError) as error:
        read(written(tmp_path, text, "train.sh"))
    assert [one.name for one in error.value.questions] == ["B"]
    found = read(written(tmp_path, text, "train.sh"), None, Given(settings={"B": "32"}))
    assert (found.fields["zero"], found.global_batch_size, found.precision) == (0, 32, "fp16")


def test_what_is_declared_already_keeps_its_value(tmp_path: Path) -> None:
    text = "P=(--tensor-model-parallel-size 4)\ndeclare -p P >/dev/null 2>&1 || P=(--tensor-model-parallel-size 8)\n"
    text += "declare -p Q >/dev/null 2>&1 || Q=(--pipeline-model-parallel-size 2)\n"
    found = read(written(tmp_path, f"{text}{RUN} --micro-batch-size 1 --global-batch-size 64 ${{P[@]}} ${{Q[@]}}\n", "train.sh"))
    assert (found.fields["tp"], found.fields["pp"]) == (4, 2)


def test_gpus_of_a_job_that_a_here_document_submits(tmp_path: Path) -> None:
    job = f"python pretrain_gpt.py {SIZES} --micro-batch-size 1 --global-batch-size 64"
    text = "NODES=${NODES:-2}\nTASKS=4\nsbatch <<EOF\n#!/bin/bash\n#SBATCH --nodes=$NODES\n#SBATCH --ntasks-per-node=$TASKS\n"
    assert read(written(tmp_path, f'{text}srun bash -c "{job}"\nEOF\n', "submit.sh")).num_gpus == 8


def test_scripts_by_their_path_from_the_root_of_a_repository(tmp_path: Path) -> None:
    written(tmp_path, "ARGS='--tensor-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 64'\n", "lib/common.sh")
    found = read(written(tmp_path, f". lib/common.sh\n{RUN} $ARGS\n", "runs/train.sh"))
    assert found.fields["tp"] == 4
