"""Programs and notebooks that write the settings of LLaMA-Factory or axolotl into a file, and ms-swift's functions."""

import json
from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given, OpenQuestionsError

FACTORY = """import json
args = dict(
    stage="sft", do_train=True, model_name_or_path="Qwen/Qwen3-8B", dataset="a", template="qwen3", finetuning_type="lora",
    lora_target="all", lora_rank=16, per_device_train_batch_size=2, gradient_accumulation_steps=4, cutoff_len=1024, bf16=True,
)
json.dump(args, open("train.json", "w"), indent=2)
"""
EXPORT = """args = dict(model_name_or_path="Qwen/Qwen3-8B", template="qwen3", finetuning_type="lora", export_dir="out")
json.dump(args, open("merge.json", "w"), indent=2)
"""
AXOLOTL = {
    "base_model": "Qwen/Qwen3-8B", "adapter": "lora", "lora_r": 16, "lora_target_linear": True, "sequence_len": 1024,
    "micro_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": True, "datasets": [{"path": "a", "type": "alpaca"}],
}  # fmt: skip
SWIFT = """from swift.llm import TrainArguments, sft_main
sft_main(TrainArguments(
    model="Qwen/Qwen3-8B", train_type="lora", lora_rank=16, dataset=["a"], max_length=1024, per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
))
"""
RUN = 'import os\nos.system("llamafactory-cli train train.json")\n'


def _notebook(folder: Path, *cells: str) -> Path:
    made = [{"cell_type": "code", "source": one.splitlines(keepends=True), "metadata": {}, "outputs": []} for one in cells]
    return written(folder, json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}, indent=1), "job.ipynb")


def _read(path: Path) -> Reading:
    """The job on one GPU, which is that of the mappings above."""
    found = read(path, None, Given(num_gpus=1))
    assert found.model is not None and not asked_for(found)
    sizes = [found.fields[one] for one in ("micro_batch_size", "num_microbatches")]
    assert (found.model.name, found.lora_rank, found.sequence_length, sizes) == ("qwen3-8b", 16, 1024, [2, 4])
    return found


def test_a_notebook_of_llama_factory(tmp_path: Path) -> None:
    path = _notebook(tmp_path, FACTORY, "%cd LLaMA-Factory\n!llamafactory-cli train train.json\n", EXPORT)
    assert not any("settings of" in one for one in _read(path).notes)
    assert read(path).num_gpus is None and not asked_for(read(path))
    shown = read(_notebook(tmp_path, FACTORY, "!CUDA_VISIBLE_DEVICES=0,1 llamafactory-cli train train.json\n"))
    assert shown.num_gpus == 2


@pytest.mark.parametrize(
    "text",
    [
        f"{FACTORY}{RUN}{EXPORT}",
        f"import subprocess\nimport yaml\nwith open('a.yml', 'w') as out:\n    yaml.dump({AXOLOTL!r}, out)\n"
        'subprocess.run(["axolotl", "train", "a.yml"])\n',
        "text = '''\n" + "\n".join(f"{name}: {json.dumps(value)}" for name, value in AXOLOTL.items()) + "\n'''\n"
        "with open('a.yml', 'w') as out:\n    out.write(text)\nprint('accelerate launch -m axolotl.cli.train a.yml')\n",
        SWIFT,
    ],
)  # fmt: skip
def test_programs_that_hand_settings_on(tmp_path: Path, text: str) -> None:
    _read(written(tmp_path, text, "job.py"))


def test_two_trainings_of_a_program_have_a_note(tmp_path: Path) -> None:
    other = FACTORY.replace("lora_rank=16", "lora_rank=64")
    found = _read(written(tmp_path, f"{FACTORY}{other}{RUN}", "job.py"))
    assert "of 2 settings of trainings, the first are read" in found.notes


def test_settings_of_a_program_that_are_not_known(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="settings that are not followed to here; import the file that it names or writes"):
        read(written(tmp_path, f"import json\njson.dump(made(), open('train.json', 'w'))\n{RUN}", "job.py"))
    open_one = FACTORY.replace("per_device_train_batch_size=2", "per_device_train_batch_size=int(input())")
    with pytest.raises(OpenQuestionsError, match="per_device_train_batch_size"):
        to_plan(read(written(tmp_path, open_one + RUN, "job.py"), None, Given(num_gpus=1)))


DICT = f"""from axolotl.cli.config import load_cfg
from axolotl.train import train
from axolotl.utils.dict import DictDefault

def main():
    config = DictDefault({", ".join(f"{name}={value!r}" for name, value in {**AXOLOTL, "micro_batch_size": 8}.items())})
    config.lora_r = 16
    config["micro_batch_size"] = 2
    train(cfg=load_cfg(config))

main()
"""


@pytest.mark.parametrize("text", [DICT, DICT.replace("DictDefault(b", "DictDefault(dict(b").replace("}])", "}]))")])
@pytest.mark.parametrize("name", [None, "axolotl"])
def test_a_program_that_hands_a_mapping_to_axolotl(tmp_path: Path, text: str, name: str | None) -> None:
    found = read(written(tmp_path, text, "train.py"), name, Given(num_gpus=1))
    assert (found.lora_rank, found.sequence_length, found.fields["micro_batch_size"]) == (16, 1024, 2)
    with pytest.raises(PlannerError, match="not followed to here; import the file that it names"):
        read(written(tmp_path, 'from axolotl.cli.config import load_cfg\nload_cfg("job.yaml")\n', "train.py"), name)
