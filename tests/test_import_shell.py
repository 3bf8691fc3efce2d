"""Shell scripts are followed, never run: what their last command would get, and which variables it waits for."""

import random
import time
from pathlib import Path

import pytest
from import_files import written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.given import Given
from planner.trainers.reading.shell import ends_early, evaluate, options, roots, shown_text, words_of
from planner.trainers.reading.shell.text import started_inside


def arguments(text: str, directory: Path | None = None, **given: str) -> dict[str, str]:
    """Options of the last command that a script would run, their values joined; ' ?NAME' under a condition."""
    script = evaluate(text, "train.sh", given, directory)
    words = words_of(script.commands[-1].words)
    return {
        name: shown_text(" ".join(values)) + "".join(f" ?{one}" for one in under)
        for name, values, under in options(words)
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("X=8\nrun --x $X", "8"),
        ("run --x ${X:-8}", "8"),
        ("X=4\nrun --x ${X:-8}", "4"),
        (": ${X:=16}\nrun --x $X", "16"),
        ('export X="a b"\nrun --x "$X"', "a b"),
        ("A=3; B=$((A * 2 + $A))\nrun --x $B", "9"),
        ("A=7\nrun --x $((A / 2 > 2 ? 1 : 0))", "1"),
        ("A=$(expr 4 \\* 6)\nrun --x $A", "24"),
        ("A=6\nX=`expr $A / 2`\nrun --x=$X", "3"),
        ("A=(1 2 3)\nrun --x ${A[1]} --y", "2"),
        ("A=(--x 1)\nA+=(--y 2)\nrun ${A[@]:-}", None),
        ("X=--x\nY=5\nrun $X $Y", "5"),
        ('ARGS=" --x 1 \\\n  --y 2"\nARGS+=" --x 3"\nrun $ARGS', "3"),
        ('ARGS=\'--x 1 --y "2 3"\'\neval "run $ARGS"', "1"),
        ("if [ 3 -gt 2 ]; then X=1; else X=2; fi\nrun --x $X", "1"),
        ("SIZE=7B\ncase $SIZE in 1B) X=1 ;; 7B | 8B) X=7 ;; *) exit 1 ;; esac\nrun --x $X", "7"),
        (
            'if [[ "$SIZE" == "7B" ]]; then X=1\nelif [[ $SIZE = 8B ]]; then X=1; else echo no; exit 1; fi\nrun --x $X',
            "1",
        ),
        ('[ -z "$X" ] && X=5\nrun --x $X', "5"),
        ('[[ -n "${X}" ]] || X=6\nrun --x $X', "6"),
        ("if [ $# -lt 3 ]; then echo usage; exit 1; fi\nX=${1:-9}\nrun --x $X", "9"),
        ("f() { X=$1; }\nf 12\nrun --x $X", "12"),
        ("function g {\n local N=$1\n run --x $N\n}\ng 13", "13"),
        ("CMD='run --x 4'\nsrun -l bash -c \"launch $CMD\"", "4"),
        ("#SBATCH --nodes=24\nrun --x $((SLURM_NNODES * 8))", "192"),
        ("for X in 5; do run --x $X; done", "5"),
        ("while [[ $# -gt 0 ]]; do X=$1; shift; done\nX=${X:-2}\nrun --x $X", "2"),
        ("cat > a.json <<EOF\n{'--x': 1, \"open\n(EOF\nEOF\nX=2\nrun --x $X", "2"),
        ("X=Llama-70B\nrun --x ${X##*-} # ${none", "70B"),
        ("X=a.b\nrun --x ${X%.*}${X/b/c}${X^^}", "aa.cA.B"),
        ("run --x 1 2>&1 | tee log.txt", "1"),
        ("time -p run --x 1 > out.txt &", "1"),
        ('run --y $(cat x | grep -c "a)b") --x 3', "3"),
    ],
)
def test_what_a_script_says(text: str, value: str | None) -> None:
    if value is not None:
        scripts = text.split(" | tee")
        assert arguments(scripts[0] if len(scripts) > 1 else text)["x"] == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("run --x $PP_SIZE", "${PP_SIZE}"),
        ("TP=$1\nrun --x $TP", "${TP}"),
        ("N=$(nvidia-smi -L | wc -l)\nrun --x $((N * 2))", "${N}"),
        ("X=1\nif [ $MODEL = big ]; then X=2; fi\nrun --x $X", "${MODEL}"),
        ("X=1\nif [ -f weights ]; then X=2; fi\nrun --x $X", "${X}"),
        ("case $SIZE in 7B) X=1 ;; 13B) X=2 ;; esac\nrun --x $X", "${SIZE}"),
        ("A=(--x 1)\nif [ $FSDP = 1 ]; then A+=(--fsdp 2); fi\nrun ${A[@]}", "1"),
        ("for TP in 1 2 4; do run --x $TP; done", "${TP}"),
    ],
)
def test_what_it_does_not_say_is_named(text: str, value: str) -> None:
    assert arguments(text)["x"] == value


def test_what_stands_under_a_condition_says_so() -> None:
    text = "A=(--x 1)\nif [ $FSDP = 1 ]; then A+=(--fsdp 2); else A+=(--ddp); fi\nrun ${A[@]}"
    assert arguments(text) == {"x": "1", "fsdp": "2 ?FSDP", "ddp": " ?FSDP"}
    assert arguments(text, FSDP="1") == {"x": "1", "fsdp": "2"} and arguments(text, FSDP="0") == {"x": "1", "ddp": ""}
    quoted = 'A="--x 1"\nif [ $FSDP = 1 ]; then A="$A --fsdp 2"; fi\nrun $A'
    assert arguments(quoted) == {"x": "1", "fsdp": "2 ?FSDP"}


def test_what_the_user_says_goes_before_what_the_script_assigns() -> None:
    assert arguments("TP=4\nrun --x $TP", TP="8")["x"] == "8"
    assert evaluate("case $S in 7B) X=1 ;; 13B) X=2 ;; esac", "t", {}).choices == {"S": ["7B", "13B"]}


def test_a_script_beside_it_is_followed_too(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text("MODEL_ARGS=(--layers 4)\n")
    text = 'HERE=$(cd -- "$(dirname -- "$0")" && pwd)\nsource "${HERE}/models/small.sh"\nrun "${MODEL_ARGS[@]}" --x 1'
    assert arguments(text, tmp_path) == {"layers": "4", "x": "1"}
    script = evaluate(text, "train.sh", {})
    assert script.missing == ["models/small.sh"] and roots(script.commands[-1].words[1]) == ["MODEL_ARGS"]


def test_nothing_is_run(tmp_path: Path) -> None:
    text = "touch D/a\nX=$(touch D/b; echo 1)\necho `touch D/c` > D/d\neval 'touch D/e'\nbash -c 'touch D/f'"
    evaluate(text.replace("D", str(tmp_path)), "train.sh", {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("X='abc\nrun --x 1", "line 1: not a shell script that can be followed: a quote or bracket is never closed"),
        ("if true; then\nrun", "line 2: not a shell script that can be followed: 'elif' is missing"),
        ("run\ndone", "line 2: not a shell script that can be followed: 'done' closes nothing"),
        ("X=" + "a" * 2000 + "\n" + "X=$X$X\n" * 40, "the value of X grows beyond 1000000 characters"),
        ("{ " * 200, "more than 64 deep"),
        ("f() { f; f; f; }\nf", "more than 20000 commands"),
    ],
)
def test_a_script_that_cannot_be_followed_is_one_sentence(text: str, says: str) -> None:
    began = time.process_time()
    with pytest.raises(PlannerError) as caught:
        evaluate(text, "train.sh", {})
    assert says in str(caught.value) and time.process_time() - began < 5


def test_whatever_a_script_holds_there_is_an_answer_or_a_sentence() -> None:
    """Scripts of pieces in any order: no crash, no hang."""
    pieces = [
        "X=1", "if", "then", "fi", "else", "case $X in", "a)", ";;", "esac", "for Y in 1 2", "; do", "done", "while", "$((", "))",
        "${X:-", "}", "{", "(", ")", "[[ $X", "]]", "[ -z", "]", "&&", "||", "|", "\n", " ", "'", '"', "`", "$(", "<<E\n", "\nE\n",
        "A=(", "A+=(1)", "run --x $X", "${A[@]}", "f() ", "f", "eval $X", "exit 1", "return", "\\", "$", "${!X}", "${#A[@]}",
        "${X//a/b}", "source x", "1/0",
    ]  # fmt: skip
    draw, answered = random.Random(16), 0
    for _ in range(3000):
        text = "".join(draw.choice(pieces) + draw.choice(("", " ", "\n")) for _ in range(draw.randint(1, 25)))
        try:
            for command in evaluate(text, "t", {}).commands:
                list(options(words_of(command.words)))
            answered += 1
        except PlannerError as error:
            assert "\n" not in str(error) and "t" in str(error)
    assert answered > 300


def test_large_texts_are_looked_through_once() -> None:
    """A megabyte of open brackets, and a command of many programs: each took time by a power of its length."""
    brackets = "python train.py --tp 2 \\ \n --pp 2\nA=\"" + "=(" * 500_000 + ')"\n'
    assert ends_early(brackets)
    assert not ends_early("A=" + "=(" * 500_000 + "\\ \n --b)")
    assert started_inside("$(python " + ".py --a " * 900 + ")x") == ""
    assert started_inside("$(srun python train.py -v --tp 2 | tail -1)") == "srun python train.py -v --tp 2 | tail -1"


CAPTURED = (
    "status=0\nout=$(llamafactory-cli train \\\n  --model_name_or_path Qwen/Qwen2.5-7B --stage sft --do_train "
    "--finetuning_type full --cutoff_len 2048 --bf16 --per_device_train_batch_size 1 2>&1) || status=$?\n"
)
"""A command whose output a variable takes."""


@pytest.mark.parametrize(
    ("nodes", "gpus"), [("", 8), ("export NNODES=2\n", 16), ("NNODES=2\n", 8), ("export NNODES=$WORLD\n", None)]
)
def test_a_command_whose_output_is_kept_and_its_nodes(tmp_path: Path, nodes: str, gpus: int | None) -> None:
    """LLaMA-Factory's command starts torchrun on NNODES nodes, of its environment, with the GPUs that are shown."""
    for shown in ("export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7\n", "#SBATCH --gpus-per-node=8\n"):
        assert read(written(tmp_path, f"#!/bin/bash\n{shown}{nodes}{CAPTURED}", "a.sh")).num_gpus == gpus


LOOP = """batch=1
while (( "$#" )); do
  case "$1" in
    --batch) batch="$2"; shift 2;;
    --model) model="$2"; shift 2;;
  esac
done
torchrun train.py --model_name_or_path $model --per_device_train_batch_size $batch --max_length 512
"""


def test_a_script_that_starts_another_with_arguments(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.sh").write_text(LOOP)
    (tmp_path / "run.sh").write_text("batch=7\nbash scripts/train.sh --batch 4 --model Qwen/Qwen3-8B\n")
    found = read(tmp_path / "run.sh", None, Given(num_gpus=8, settings={"deepspeed": "zero2"}))
    assert found.model is not None and (found.model.name, found.fields["micro_batch_size"]) == ("qwen3-8b", 4)
