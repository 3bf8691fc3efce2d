"""What draw 40 showed of settings that a script writes in several steps: short files of the same shape."""

from pathlib import Path

import pytest
from import_files import written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError
from planner.trainers.reading.shell import evaluate

FIRST = """cat > "$CFG" << YAML
base_model: Qwen/Qwen3-8B
datasets: [{path: a, type: alpaca}]
sequence_len: 2048
micro_batch_size: 2
YAML
"""
SECOND = """cat >> "$CFG" << YAML

gradient_accumulation_steps: 8
bf16: true
gradient_checkpointing: true
YAML
"""
TRAINS = "axolotl train $CFG --launcher python\n"


def _script(folder: Path, between: str, **settings: str) -> Reading:
    text = f'#!/bin/bash\nCFG="conf/run.yaml"\n{FIRST}{between}{TRAINS}'
    return read(written(folder, text, "run.sh"), "axolotl", Given(settings=settings))


def test_what_is_appended_stands_behind_what_was_written(tmp_path: Path) -> None:
    found = _script(tmp_path, SECOND)
    assert (found.model_name, found.sequence_length, found.num_gpus) == ("Qwen/Qwen3-8B", 2048, 1)
    assert (found.fields["micro_batch_size"], found.fields["num_microbatches"], found.fields["recompute"]) == (2, 8, 2)


@pytest.mark.parametrize(
    "line",
    [
        'echo "gradient_accumulation_steps: 8" >> $CFG', "printf 'gradient_accumulation_steps: %s\\n' 8 >> $CFG",
        "tee -a $CFG << EOF\ngradient_accumulation_steps: 8\nEOF",
        "cat >> $CFG 2>/dev/null << EOF\ngradient_accumulation_steps: 8\nEOF",
        'echo "gradient_accumulation_steps: 1" >> $CFG\nsed -i "s/^gradient_accum\\(.*\\): .*/x/;s/^a//" other.yaml\n'
        'sed -i "s/_steps: .*/_steps: 8/" $CFG',
    ],
)  # fmt: skip
def test_other_ways_to_append_and_to_edit(tmp_path: Path, line: str) -> None:
    found = _script(tmp_path, f"{line}\n")
    assert (found.fields["micro_batch_size"], found.fields["num_microbatches"]) == (2, 8)


def test_what_is_written_again_is_another_file(tmp_path: Path) -> None:
    assert dict(evaluate("echo a >> x\necho b > x\necho c >> x", "a.sh", {}).documents)["x"] == "b\nc"


def test_a_file_of_the_project_that_is_copied_and_edited(tmp_path: Path) -> None:
    written(tmp_path, "base_model: Qwen/Qwen3-8B\ndatasets: [{path: a, type: alpaca}]\nmicro_batch_size: 1\n", "base.yaml")
    text = 'cp base.yaml run.yaml\nsed -i "s|batch_size: 1|batch_size: 4|" run.yaml\necho "sequence_len: 1024" >> run.yaml\n'
    found = read(written(tmp_path, f"{text}axolotl train run.yaml\n", "run.sh"), "axolotl", Given())
    assert (found.fields["micro_batch_size"], found.sequence_length) == (4, 1024)


def test_an_edit_that_is_not_followed_is_asked_about(tmp_path: Path) -> None:
    with pytest.raises(OpenQuestionsError, match="config_file=FILE .what the script writes into 'conf/run.yaml'"):
        _script(tmp_path, 'sed -i "/^micro_batch_size/d" $CFG\n')


def test_what_one_arm_of_an_open_condition_appends_waits_for_its_variable(tmp_path: Path) -> None:
    arms = 'case "$METHOD" in\n  long) echo "sequence_len: 8192" >> $CFG;;\n  short) echo "lora_r: 4" >> $CFG;;\nesac\n'
    with pytest.raises(OpenQuestionsError, match=r"METHOD=long\|short"):
        _script(tmp_path, arms)
    appended = 'if [ "$LONG" = 1 ]; then\n  echo "gradient_accumulation_steps: 8" >> $CFG\nfi\n'
    with pytest.raises(OpenQuestionsError, match="LONG="):
        _script(tmp_path, appended)
    assert _script(tmp_path, appended, LONG="1").fields["num_microbatches"] == 8
    assert _script(tmp_path, appended, LONG="0").fields["num_microbatches"] == 1


def test_a_reference_model_of_a_plugin_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="own_reference_model"):
        _script(tmp_path, f'{SECOND}echo "own_reference_model: Qwen/Qwen3-8B" >> $CFG\n')
