"""Cards and their number by names of MLPerf's files and by what Modal is asked for; unsloth's uploads in 4 bits."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.trainers.reading import read
from planner.trainers.reading.given import Given

AXOLOTL = (
    "base_model: Qwen/Qwen3-8B\ndatasets: [{path: a}]\nsequence_len: 2048\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n"
    "bf16: true\n"
)
RUNS = """
import modal
app = modal.App()
CARD = "T4"

@app.function(gpu=CARD)
def shows(name: str):
    print(name)

@app.function(image=None, gpu={})
def work(name: str):
    subprocess.run(f"axolotl train /configs/{{name}}", shell=True)

work.spawn("job.yaml")
"""


@pytest.mark.parametrize(("asks", "card", "gpus"), [
    ('"H200:4"', "h200-sxm", 4), ('"h100"', "h100-sxm", 1), ('modal.gpu.A100(size="80GB", count=2)', "a100-sxm-80gb", 2),
    ('["B200:2", "H100:2"]', "b200-sxm", 2), ('f"H200:{many}"', "h200-sxm", None), ("ASKED", None, None),
])  # fmt: skip
def test_the_container_that_modal_runs_a_training_in(tmp_path: Path, asks: str, card: str | None, gpus: int | None) -> None:
    written(tmp_path, RUNS.format(asks), "main.py")
    found = read(written(tmp_path / "configs", AXOLOTL))
    assert (found.hardware, found.num_gpus) == (card, gpus)
    said = f"hardware {card}: by gpu= of main.py, which {f'asks Modal for {gpus}' if gpus else 'Modal runs'}"
    assert (said in found.notes) is (card is not None)
    assert read(tmp_path / "configs/job.yaml", None, Given(num_gpus=8)).num_gpus == 8


def test_a_program_that_trains_in_a_container_of_modal(tmp_path: Path) -> None:
    program = """
import modal
from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer

@modal.App().function(gpu="h200")
def train():
    model, _ = FastLanguageModel.from_pretrained(model_name="unsloth/Qwen3-8B", max_seq_length=1024)
    model = FastLanguageModel.get_peft_model(model, r=4, target_modules=["q_proj"], use_gradient_checkpointing="unsloth")
    SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2, max_steps=9, bf16=True), train_dataset=None).train()
"""
    found = read(written(tmp_path, program, "main.py"))
    assert (found.hardware, found.num_gpus, asked_for(found)) == ("h200-sxm", 1, [])
    uploads = [one for one in found.notes if "memory comes out too low by 1.5 bytes for each of their weights" in one]
    assert len(uploads) == 1
    other = program.replace("unsloth/Qwen3-8B", "unsloth/Qwen3-8B-bnb-4bit")
    assert uploads[0] not in read(written(tmp_path, other, "main.py")).notes


def test_a_card_with_its_number_in_the_name_of_an_mlperf_configuration(tmp_path: Path) -> None:
    lines = "export DGXNNODES=4 MINIBS=4 TENSOR_MODEL_PARALLEL=2 PIPELINE_MODEL_PARALLEL=1 MICRO_BATCH_SIZE=1 FP8=True\n"
    found = read(written(tmp_path / "gpt3", lines, "config_H200x8_NODEx4_MINBSx4.sh"))
    assert (found.hardware, found.num_gpus) == ("h200-sxm", 32)
    assert any("gradients of embeddings are in fp32: memory comes out too low by some 0.6 GiB" in one for one in found.notes)
