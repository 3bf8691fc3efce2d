"""Variables that a script hands to the program it starts, places of the machine in paths, and environments that are no training."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.trainers.reading import read
from planner.trainers.reading.given import Given, OpenQuestionsError

PROGRAM = """
import os
from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer
def env_int(name, usual):
    return int(os.getenv(name, str(usual)))
name = os.getenv("MODEL_ID", "unsloth/Llama-3.2-1B")
model, tokenizer = FastLanguageModel.from_pretrained(name, max_seq_length=1024, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=env_int("RANK_OF_IT", 16))
args = SFTConfig(output_dir="out", per_device_train_batch_size=env_int("BATCH", 2), gradient_accumulation_steps=4)
SFTTrainer(model=model, args=args, train_dataset=rows).train()
"""
WRAPPER = """
BATCH=${BATCH:-1}
while [[ $# -gt 0 ]]; do
  case "$1" in
    --model) MODEL_ID="$2"; shift 2;;
    --bs) BATCH="$2"; shift 2;;
  esac
done
NGPU="$(awk -F, '{print NF}' <<< "$GPUS")"
SEEN=("SINGULARITYENV_MODEL_ID=$MODEL_ID" "SINGULARITYENV_BATCH=$BATCH" "SINGULARITYENV_NGPU=$NGPU")
env "${SEEN[@]}" singularity exec --nv image.sif bash -lc "
  python -m venv /scratch/$USER/venv
  torchrun --standalone --nproc_per_node=\\$NGPU /scratch/$USER/tune/tune.py
"
"""


@pytest.mark.parametrize(
    "command",
    [
        "export BATCH=8\nexport MODEL_ID=Qwen/Qwen2.5-7B RANK_OF_IT=64\npython tune.py",
        "BATCH=8 MODEL_ID=Qwen/Qwen2.5-7B RANK_OF_IT=64 python tune.py",
        "env BATCH=8 MODEL_ID=Qwen/Qwen2.5-7B RANK_OF_IT=64 python tune.py",
        "docker run -e BATCH=8 -e MODEL_ID=Qwen/Qwen2.5-7B --env RANK_OF_IT=64 image python tune.py",
        "apptainer exec --nv --env BATCH=8,MODEL_ID=Qwen/Qwen2.5-7B,RANK_OF_IT=64 image.sif python tune.py",
        "export APPTAINERENV_BATCH=8\nenv APPTAINERENV_MODEL_ID=Qwen/Qwen2.5-7B APPTAINERENV_RANK_OF_IT=64 "
        "apptainer exec image.sif python tune.py",
    ],
)
def test_a_program_sees_what_its_script_exports(tmp_path: Path, command: str) -> None:
    written(tmp_path, PROGRAM, "tune.py")
    found = read(written(tmp_path, f"{command}\n", "run.sh"), None, Given())
    assert (found.model_name, found.fields["micro_batch_size"], found.lora_rank) == ("Qwen/Qwen2.5-7B", 8, 64)


def test_what_is_not_exported_is_not_seen(tmp_path: Path) -> None:
    written(tmp_path, PROGRAM, "tune.py")
    found = read(written(tmp_path, "BATCH=8\npython tune.py\n", "run.sh"), None, Given())
    assert (found.fields["micro_batch_size"], found.lora_rank) == (2, 16)


@pytest.mark.parametrize(("batch", "gpus"), [("#SBATCH --gres=gpu:2\n", 2), ("", None)])
def test_a_wrapper_that_starts_a_container(tmp_path: Path, batch: str, gpus: int | None) -> None:
    written(tmp_path, PROGRAM, "tune.py")
    written(tmp_path, WRAPPER, "wrapper.sh")
    text = f"#!/bin/bash\n{batch}./wrapper.sh --model Qwen/Qwen2.5-7B --bs 4\n"
    found = read(written(tmp_path, text, "run.sbatch"), None, Given())
    assert (found.model_name, found.fields["micro_batch_size"], found.num_gpus) == ("Qwen/Qwen2.5-7B", 4, gpus)
    assert asked_for(found) == []


@pytest.mark.parametrize(
    ("word", "asked"),
    [("$(pick_config)", True), ("$USER/notes", False), ("$HOME/conf/sft.yaml", True), ("$RECIPE", True)],
)
def test_a_word_that_may_be_the_file_of_settings_is_asked_for(tmp_path: Path, word: str, asked: bool) -> None:
    """A place of the machine is none; what a command puts out has no name, and is asked for as the file."""
    program = "from trl import SFTConfig, SFTTrainer, TrlParser\nTrlParser((SFTConfig,)).parse_args_and_config()\n"
    written(tmp_path, program, "sft.py")
    script = written(tmp_path, f"accelerate launch sft.py {word} --model_name_or_path Qwen/Qwen2.5-7B --max_length 512\n", "run.sh")
    try:
        names = asked_for(read(script, None, Given()))
    except OpenQuestionsError as open_questions:
        names = [one.name for one in open_questions.questions]
    assert bool({"config_file", "HOME", "RECIPE"} & {*names}) == asked, names
