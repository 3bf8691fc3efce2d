"""Tasks in YAML that run commands: SkyPilot, Kubernetes, dstack; read as the script of their commands."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.trainers.reading import read

TRAINS = "train.py --model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 2 --bf16 True --output_dir o"
SKY = f"""
resources: {{accelerators: "H100:8"}}
num_nodes: 2
envs: {{STEPS: 3}}
setup: |
  pip install litgpt torchtune
run: |
  torchrun --nproc_per_node $SKYPILOT_NUM_GPUS_PER_NODE --nnodes $SKYPILOT_NUM_NODES --node_rank $SKYPILOT_NODE_RANK {TRAINS} \\
    --fsdp full_shard --gradient_accumulation_steps $STEPS
"""
CONTAINER = f"""
          containers:
          - command: [torchrun, --nproc_per_node=8]
            args: [{TRAINS.replace(" ", ", ")}, --fsdp, full_shard auto_wrap]
"""
POD = f"replicas: 1\n      template:\n        spec:{CONTAINER}"
JOB = f"kind: PyTorchJob\nspec:\n  pytorchReplicaSpecs:\n    Master:\n      {POD}"


@pytest.mark.parametrize("text", [
    "run: |\n  litgpt finetune_lora EleutherAI/pythia-410m --lora_r 4\n",
    "type: task\ncommands:\n- pip install litgpt\n- litgpt finetune_lora EleutherAI/pythia-410m --lora_r 4\n",
    "setup: {command: pip install x}\ntune: {command: python -m litgpt finetune_lora EleutherAI/pythia-410m --lora_r 4}\n",
    "kind: ConfigMap\n---\nkind: Job\nspec:\n- command: [/bin/sh, -c]\n  args:\n  - |\n    cd /w\n"
    "    litgpt finetune_lora EleutherAI/pythia-410m --lora_r 4\n",
])  # fmt: skip
def test_commands_of_a_task(tmp_path: Path, text: str) -> None:
    found = read(written(tmp_path, text))
    assert (found.trainer.partition("+")[0], found.lora_rank, found.num_gpus) == ("litgpt", 4, 1)
    assert found.model is not None and found.model.name == "pythia-410m"


def test_skypilot_says_nodes_and_gpus(tmp_path: Path) -> None:
    found = read(written(tmp_path, SKY))
    assert (found.num_gpus, found.fields["num_microbatches"], found.fields["zero"]) == (16, 3, 3) and asked_for(found) == []


def test_a_job_of_pytorch_runs_on_all_its_replicas(tmp_path: Path) -> None:
    assert read(written(tmp_path, JOB)).num_gpus == 8
    worker = POD.replace("replicas: 1", "replicas: 3")
    assert read(written(tmp_path, f"{JOB}    Worker:\n      {worker}")).num_gpus == 32


def test_of_how_many_nodes_other_jobs_are_is_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(PlannerError):
        read(written(tmp_path, f"kind: Job\nspec:\n    parallelism: 4\n    a:\n        spec:{CONTAINER}"))


def test_an_override_makes_a_section_that_the_published_file_leaves_out(tmp_path: Path) -> None:
    tune = "tune run --nproc_per_node 8 lora_finetune_distributed --config llama3_1/8B_lora dataset=torchtune.datasets.own"
    assert read(written(tmp_path, f"run: |\n  {tune} tokenizer.max_seq_len=2048\n")).num_gpus == 8
