"""Scripts that take their options apart in a loop, go into a folder, start others with mpirun; words and GPUs of such jobs."""

from pathlib import Path

import pytest

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given
from tests.import_files import asked_for, written

SIZES = "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --max-position-embeddings 2048 --bf16 --vocab-size 32000"
WORDS = f"{SIZES} --seq-length 2048 --micro-batch-size 1 --global-batch-size 64"
EXPERTS = "--num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 512 --expert-model-parallel-size 8"
APART = """
for one in $*
do
    if [[ $one == --data* ]]; then
        data=${one#*=}
    elif [[ $one == --bind* ]]; then
        bind=${one#*=}
    elif [[ $one == --backend* ]]; then
        backend=${one#*=}
    elif [[ $one == --profiling* ]]; then
        profiling=${one#*=}
    fi
done
export BACKEND=${backend:-"mpirun"}
DIST="--rank $OMPI_COMM_WORLD_RANK --world-size $OMPI_COMM_WORLD_SIZE --local-rank $LOCAL_RANK --dist-url tcp://${1}:${2}"
ARGS=(--tensor-model-parallel-size 2 --data-path ${data} %s)
if [[ "$BACKEND" == "mpirun" ]]; then
    APP="python -u pretrain_gpt.py ${ARGS[@]} ${DIST}"
else
    APP="torchrun --nproc_per_node 8 pretrain_gpt.py ${ARGS[@]}"
fi
if [[ $profiling == "hip" ]]; then
    APP="hipprof -d out --hip-trace ${APP}"
fi
${bind} ${LOCAL_RANK} ${APP}
"""


def _job(folder: Path, text: str, name: str = "run.sh", **given: str) -> Reading:
    return read(written(folder, text, name), None, Given(settings=given))


def test_options_taken_apart_in_a_loop_keep_their_defaults(tmp_path: Path) -> None:
    found = read(written(tmp_path, APART % WORDS, "run.sh"), None, Given(num_gpus=16))
    assert (found.fields["tp"], found.num_gpus, found.global_batch_size) == (2, 16, 64)
    assert found.unread == () and any("DCUs" in one for one in found.notes)
    again = _job(tmp_path, APART % WORDS)
    assert again.num_gpus is None and asked_for(again) == []  # GPUs alone are asked for, once


def test_a_loop_that_starts_trainings_asks_for_its_word(tmp_path: Path) -> None:
    text = f'for SIZE in "$@"; do\n  torchrun --nproc_per_node 8 pretrain_gpt.py {WORDS} --tensor-model-parallel-size $SIZE\ndone\n'
    with pytest.raises(PlannerError, match="SIZE"):
        _job(tmp_path, text)


def test_a_script_is_found_where_another_one_went(tmp_path: Path) -> None:
    inner = f"TP=$1\ntorchrun --nproc_per_node 8 pretrain_gpt.py {WORDS} --tensor-model-parallel-size $TP\n"
    written(tmp_path / "jobs" / "small", inner, "inner.sh")
    assert _job(tmp_path, "cd jobs/small\nsh inner.sh \\\n4 \\\n", "start.sh").fields["tp"] == 4


def test_a_script_reads_another_one_where_it_went(tmp_path: Path) -> None:
    written(tmp_path / "jobs" / "small", "TP=4\n", "sizes.sh")
    run = f"torchrun --nproc_per_node 8 pretrain_gpt.py {WORDS} --tensor-model-parallel-size $TP\n"
    assert _job(tmp_path, f"cd jobs/small\nsource ./sizes.sh\n{run}").fields["tp"] == 4


def test_mpirun_starts_a_script_on_every_rank(tmp_path: Path) -> None:
    written(tmp_path, f"python pretrain_gpt.py {WORDS} --tensor-model-parallel-size 4 --dist_url tcp://$1\n", "one_rank.sh")
    head = "#!/bin/bash\n#SBATCH -N 4\n#SBATCH --ntasks-per-node=4\nnp=$(wc -l < hosts)\n"
    found = _job(tmp_path, f"{head}mpirun -np $np --bind-to none `pwd`/one_rank.sh $first\n", "all.sh")
    assert (found.fields["tp"], found.num_gpus) == (4, 16)


TWO = (
    'mpiexec -n ${NUM} --ppn 1 sh -c "torchrun --nproc_per_node=4 --nnodes=${NUM} pretrain_gpt.py %s'
    ' --global-batch-size ${ALL}"\n'
)


def test_nodes_that_a_list_counts_are_asked_for_by_their_number(tmp_path: Path) -> None:
    words = f"{SIZES} --seq-length 2048 --micro-batch-size 1"
    text = f"NODES=($(cat hosts | sort -u))\nNUM=${{#NODES[@]}}\nALL=$((16 * NUM))\n{TWO % words}"
    with pytest.raises(PlannerError, match="--set NUM=VALUE") as caught:
        _job(tmp_path, text)
    assert "NODES=" not in str(caught.value)
    found = _job(tmp_path, text, NUM="2")
    assert (found.num_gpus, found.global_batch_size) == (8, 32)  # ranks of mpiexec start torchrun, of four processes each


@pytest.mark.parametrize(("kind", "width"), [("geglu", 4096), ("swiglu", 4096)])
def test_gated_activations_of_bigscience_are_four_hidden_sizes_wide(tmp_path: Path, kind: str, width: int) -> None:
    words = f"{WORDS} --glu-activation {kind} --no-bias-gelu-fusion --fuse-bias-geglu"
    model = _job(tmp_path, f"torchrun --nproc_per_node 8 pretrain_gpt.py {words}\n").model
    assert model is not None and (model.gated, model.ffn_size) == (True, width)
    assert model.activation == ("gelu" if kind == "geglu" else "silu")


def test_experts_that_are_balanced_by_force_are_priced_so(tmp_path: Path) -> None:
    run = f"torchrun --nproc_per_node 8 pretrain_gpt.py {WORDS} {EXPERTS}"
    assert _job(tmp_path, f"{run}\n").expert_imbalance is None
    assert _job(tmp_path, f"{run} --moe-router-force-load-balancing\n").expert_imbalance == 1.0


@pytest.mark.parametrize(
    ("line", "hardware"),
    [
        ("--gpus-per-node=mi250:8", "mi250x"), ("--gres=gpu:A6000:8", "rtx-a6000"), ("--gres=gpu:volta:8", None),
        ("--gres=gpu:8", None),
    ],
)
def test_gpus_have_the_name_that_the_batch_system_is_asked_for(tmp_path: Path, line: str, hardware: str | None) -> None:
    text = f"#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH {line}\ntorchrun --nproc_per_node 8 pretrain_gpt.py {WORDS}\n"
    found = _job(tmp_path, text)
    assert found.hardware == hardware
    assert any("by #SBATCH" in one for one in found.notes) is (hardware is not None)


def test_memory_that_words_add_is_said(tmp_path: Path) -> None:
    run = f"torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES} --micro-batch-size 2 --global-batch-size 64 --seq-length"
    unfused = _job(tmp_path, f"{run} 2048 --swiglu --no-bias-swiglu-fusion\n").notes
    assert any(one.startswith("--no-bias-swiglu-fusion") for one in unfused)
    masks = [one for one in _job(tmp_path, f"{run} 65536\n").notes if one.startswith("masks of the data loader")]
    assert masks and "8 GiB" in masks[0]
    without = _job(tmp_path, f"{run} 65536 --no-create-attention-mask-in-dataloader\n").notes
    assert not any("masks" in one for one in (*without, *unfused))


FLAT = """
tensor-model-parallel-size: 2
expert-model-parallel-size: 4
micro-batch-size: 1
global-batch-size: 64
bf16: true
recompute-granularity: selective
recompute-modules: "moe_act"
use-distributed-optimizer: true
sequence-parallel: false
"""


def test_a_yaml_of_flags_is_read_with_the_model_that_is_said(tmp_path: Path) -> None:
    said = Given(model="qwen3-30b-a3b", num_gpus=8, sequence_length=2048)
    found = read(written(tmp_path, FLAT, "stage.yaml"), None, said)
    assert (found.fields["tp"], found.fields["ep"], found.fields["zero"], found.global_batch_size) == (2, 4, 1, 64)
    assert found.fields["recompute_modules"] and not any("dense model" in one for one in found.notes)
    with pytest.raises(PlannerError, match="--model NAME"):
        _job(tmp_path, FLAT, "stage.yaml")


@pytest.mark.parametrize(
    "words",
    ["--train-router-only", "--load-in-4bit", "--adam-8bit-states", "--save-activations-on-host", "--context-parallel-degree-2d 4"],
)
def test_words_that_begin_like_harmless_ones_are_not_dropped(tmp_path: Path, words: str) -> None:
    with pytest.raises(PlannerError, match=words.split()[0].strip("-").replace("-", "[-_]")):
        _job(tmp_path, f"torchrun --nproc_per_node 8 pretrain_gpt.py {WORDS} {words}\n")
