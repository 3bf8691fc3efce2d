"""Inner scripts: those that a script writes and that a container, a shell or their own name starts."""

from pathlib import Path

import pytest
from import_files import written

from planner.trainers.reading import read
from planner.trainers.reading.given import Given

TRAINS = "torchrun --nproc_per_node=$NGPU -m trl.scripts.sft --model_name_or_path Qwen/Qwen2.5-7B --max_length 2048 \\\n  "
TRAINS += "--per_device_train_batch_size $BATCH --dataset_name rows --output_dir out\n"
WRITES = f"""#!/bin/bash
BATCH=4
NGPU=8
INNER="./inner_${{SLURM_JOB_ID}}"
cat > "$INNER" << EOF
#!/bin/bash -e
export RANK=\\$SLURM_PROCID
{TRAINS}EOF
chmod +x "$INNER"
"""


@pytest.mark.parametrize("command", [
    'time srun --ntasks 1 apptainer exec --nv -B "$PWD:/job" image.sif "$INNER"',
    "singularity run -B $PWD:/job image.sif /job/inner_${SLURM_JOB_ID}",
    "sudo docker run --rm -v $PWD:/job image bash /job/inner_${SLURM_JOB_ID}",
    "docker exec -i box bash -lc $INNER", "enroot start --rw -m $PWD:/mnt image bash /mnt/inner_${SLURM_JOB_ID}",
    "srun --container-image=image.sqsh --container-mounts=$PWD:/mnt bash /mnt/inner_${SLURM_JOB_ID}",
    "./inner_${SLURM_JOB_ID}", "nohup $INNER > log 2>&1 &", 'sh -c "$(cat $INNER)"',
    'apptainer exec image.sif bash -c "$(cat inner_${SLURM_JOB_ID})"', "apptainer exec image.sif bash inner.sh",
    "docker run image /mounted/job/inner.sh", f"docker run -i image bash -e << EOF\n{TRAINS}EOF",
])  # fmt: skip
def test_an_inner_script_is_followed(tmp_path: Path, command: str) -> None:
    """Its lines have the variables of the outer script, and the container's own words say nothing of the job."""
    written(tmp_path, TRAINS, "inner.sh")
    found = read(written(tmp_path, f"{WRITES}{command}\n", "job.sh"), None, Given())
    assert (found.fields["micro_batch_size"], found.num_gpus, found.sequence_length) == (4, 8, 2048)


def test_a_file_of_another_kind_is_no_script(tmp_path: Path) -> None:
    text = f"{WRITES}cat > hosts << EOF\nnode1 slots=8\nEOF\nmpirun --hostfile ./hosts -np 8 apptainer exec image.sif $INNER\n"
    assert read(written(tmp_path, text, "job.sh"), None, Given()).fields["micro_batch_size"] == 4


RECIPE = """
model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj, v_proj], lora_rank: 8, lora_alpha: 16}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 1024}
dataset: {_component_: torchtune.datasets.alpaca_dataset}
optimizer: {_component_: torch.optim.AdamW, lr: 1.0e-4}
loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}
batch_size: 2
gradient_accumulation_steps: 1
dtype: bf16
device: cuda
enable_activation_checkpointing: False
"""
JOB = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=4
ROOT=/cluster/home/$USER/course
cat > .inner << EOF
#!/bin/bash
python $ROOT/recipes/lora_finetune_distributed.py --config $ROOT/configs/lora/one.yaml
#tune run --nproc_per_node 2 lora_finetune_distributed --config $ROOT/configs/lora/one.yaml
EOF
srun apptainer exec image.sif ./.inner
"""


def test_tasks_of_srun_are_the_processes(tmp_path: Path) -> None:
    """Paths of the author's machine end in the tree, a comment starts nothing, and each task has a GPU."""
    written(tmp_path, RECIPE, "configs/lora/one.yaml")
    found = read(written(tmp_path, JOB, "day/job.sh"), None, Given())
    assert (found.num_gpus, found.fields["micro_batch_size"], found.lora_rank, found.fields["zero"]) == (8, 2, 8, 3)
