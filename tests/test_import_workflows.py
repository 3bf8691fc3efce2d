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


CHART = """
resources: {limits: {"nvidia.com/gpu": 8}, nnodes: 2, nproc_per_node: 8}
inline_script:
  - |
    cat > /tmp/launch.yaml <<EOF
    distributed_type: FSDP
    mixed_precision: bf16
    num_machines: $PET_NNODES
    num_processes: $((PET_NNODES * PET_NPROC_PER_NODE))
    main_process_ip: $PET_MASTER_ADDR
    fsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
    EOF
pre_script:
  - export RUN="--nnodes $PET_NNODES --nproc_per_node $PET_NPROC_PER_NODE --node_rank $PET_NODE_RANK"
  - cd $PLACE
train:
  env:
    - {name: MODEL, value: /data/Llama-2-7b-hf}
    - {name: LOGS, value: "/logs/{{ .Release.Name }}"}
    - {name: PLACE, value: /etc/programs}
"""


def test_the_lines_and_variables_around_a_command_of_a_chart(tmp_path: Path) -> None:
    sizes = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --micro-batch-size 2 --vocab-size 1000"
    lines = CHART.replace("  - cd", f"  - export SIZES='{sizes}'\n  - cd") + "  command: [torchrun]\n"
    found = read(written(tmp_path, f"{lines}  args: [$RUN, pretrain_gpt.py, $SIZES, '--fp16 2>&1 | tee $LOGS']\n"))
    assert (found.num_gpus, found.sequence_length, found.fields["micro_batch_size"]) == (16, 512, 2)
    args = TRAINS.replace("meta-llama/Llama-2-7b-hf", "$MODEL").replace(" --bf16 True", "").replace(" ", ", ")
    launched = f"{CHART}  command: [accelerate]\n  args: [launch, --config_file, /tmp/launch.yaml, {args}, '> $LOGS']\n"
    found = read(written(tmp_path, launched))
    assert (found.num_gpus, found.fields["zero"], found.precision) == (16, 3, "bf16") and asked_for(found) == []


def test_a_container_of_one_gpu_and_the_processes_that_the_operator_tells_torchrun(tmp_path: Path) -> None:
    pod = "kind: Job\ncontainers:\n- resources: {limits: {nvidia.com/gpu: 1}}\n  command: [python, "
    assert read(written(tmp_path, f"{pod}{TRAINS.replace(' ', ', ')}]\n")).num_gpus == 1
    told = JOB.replace(", --nproc_per_node=8", "").replace("spec:\n", "spec:\n  nprocPerNode: \"4\"\n", 1)
    assert read(written(tmp_path, told)).num_gpus == 4


PROGRAM = """
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf", torch_dtype="bfloat16")
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
arguments = TrainingArguments("o", per_device_train_batch_size=2, bf16=True, gradient_checkpointing=True, max_steps=9)
Trainer(model=model, args=arguments, train_dataset=None).train()
"""


@pytest.mark.parametrize("there", [True, False])
def test_the_program_that_a_chart_puts_into_its_image(tmp_path: Path, there: bool) -> None:
    (tmp_path / "LICENSE").touch()
    place = tmp_path / "charts/a/programs/text"
    place.mkdir(parents=True)
    (place / "sft.py").write_text(PROGRAM if there else "", encoding="utf-8")
    words = "text/sft.py, --hf_model_id=Qwen/Qwen3-8B, --per_device_train_batch_size=2, '2>&1 | tee $LOGS'"
    if not there:
        words = words.replace("text", "elsewhere")
    found = read(written(tmp_path, f"{CHART}  command: [torchrun]\n  args: [$RUN, {words}]\n"))
    if there:
        assert (found.lora_rank, found.num_gpus) == (4, 16)
    else:
        assert {"gradient_checkpointing", "use_peft", "--sequence-length S"} <= {one.partition("=")[0] for one in asked_for(found)}
