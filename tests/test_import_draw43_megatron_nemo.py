"""What trains with Megatron's layers under another name: MindSpeed's kernels, commands of NeMo 1, recipes of benchmarks."""

import json
from pathlib import Path

import pytest
from import_files import written

from planner.trainer import load_trainer
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError
from planner.trainers.reading.shell.queries import queried

MINDSPEED = """torchrun --nproc_per_node 8 {program} --num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 4096 \\
    --micro-batch-size 1 --global-batch-size 8 --padded-vocab-size 32000 --bf16 --transformer-impl local \\
    --no-masked-softmax-fusion --max-position-embeddings 4096 --tokenizer-type NullTokenizer --vocab-size 32000 {more}
"""
NEMO_1 = """torchrun --nproc_per_node=1 NeMo/examples/nlp/language_modeling/tuning/megatron_gpt_finetuning.py {devices} \\
    model.megatron_amp_O2=True model.restore_from_path=${{MODEL}} model.global_batch_size=2 model.micro_batch_size=1 \\
    model.peft.peft_scheme=lora
"""


@pytest.mark.parametrize(
    ("program", "more", "attention"),
    [
        ("posttrain_gpt.py", "--use-flash-attn", "flash"), ("posttrain_gpt.py", "", "unfused"),
        ("pretrain_gpt.py", "--use-flash-attn --use-fused-rmsnorm", "flash"), ("pretrain_gpt.py", "--use-flash-attn", "unfused"),
    ],
)  # fmt: skip
def test_flash_attention_of_mindspeed_beside_local_layers(tmp_path: Path, program: str, more: str, attention: str) -> None:
    found = read(written(tmp_path, MINDSPEED.format(program=program, more=more), "tune.sh"))
    assert load_trainer(found.trainer).kernels.attention == attention
    assert any("attention is unfused" in one for one in found.notes) == (attention == "unfused")


def test_words_of_mindspeed_about_how_states_and_data_come_need_no_answer(tmp_path: Path) -> None:
    more = "--swap-optimizer --swap-optimizer-times 32 --no-pad-to-seq-lengths"
    found = read(written(tmp_path, MINDSPEED.format(program="posttrain_gpt.py", more=more), "tune.sh"))
    assert found.fields["offload_optimizer"] == 100 and not found.questions
    assert found.unread == ("--no-pad-to-seq-lengths",)


def _notebook(folder: Path, *cells: str, **said: str) -> Reading:
    made = [{"cell_type": "code", "source": one} for one in cells]
    return read(written(folder, json.dumps({"cells": made}), "tune.ipynb"), None, Given(**said))


def test_a_command_of_nemo_1_in_a_cell_of_a_shell(tmp_path: Path) -> None:
    command = NEMO_1.format(devices="trainer.devices=1")
    found = _notebook(tmp_path, "import torch", f"%%bash\nMODEL=$(find models -name '*.nemo')\n{command}", model="llama-3.1-8b")
    assert (found.num_gpus, found.global_batch_size, found.lora_rank, found.lora_targets) == (1, 2, 32, "qkv")
    assert not found.questions


def test_one_device_counts_where_the_command_says_it(tmp_path: Path) -> None:
    given = Given(model="llama-3.1-8b", settings={"MODEL": "a.nemo"})
    said = read(written(tmp_path, NEMO_1.format(devices="trainer.devices=1"), "tune.sh"), None, given)
    assert said.num_gpus == 1
    assert read(written(tmp_path, NEMO_1.format(devices=""), "tune.sh"), None, given).num_gpus is None


def test_frozen_weights_in_fp32_are_asked_about_with_the_model(tmp_path: Path) -> None:
    text = """trainer: {devices: 1, num_nodes: 1, precision: bf16-mixed}
model:
  {tensor_model_parallel_size: 1, micro_batch_size: 4, global_batch_size: 128, megatron_amp_O2: false,
   restore_from_path: gpt.nemo, data: {train_ds: {max_seq_length: 2048}}, peft: {peft_scheme: lora}}
"""
    with pytest.raises(OpenQuestionsError, match=r"model\.megatron_amp_O2=true .*--model NAME .*--gpus N"):
        read(written(tmp_path, text, "tuning_config.yaml"), "nemo")


@pytest.mark.parametrize(("model", "evenly"), [("qwen3_30b_a3b", 1.0), ("llama3_8b", None)])
def test_recipes_of_benchmarks_balance_experts_by_force(tmp_path: Path, model: str, evenly: float | None) -> None:
    command = f"python scripts/performance/setup_experiment.py --gpu gb200 --model_recipe_name {model} --num_gpus 8"
    assert read(written(tmp_path, f"{command} --compute_dtype bf16\n", "run.sh")).expert_imbalance == evenly


TABLE = """#!/bin/bash
WORKSPACE=$(dirname "$(readlink -f "$0")")
MODEL=${MODEL:-moe-b}
declare -A SIZES=(
    [moe-a]="1 2 8  4"
    [moe-b]="  2 4 8  7"
)
choose() {
    local -n table=$1
    if [[ -v table[$2] ]]; then
        local row=(${table[$2]})
    else
        return 1
    fi
    export TP=${TP:-${row[0]}} PP=${PP:-${row[1]}} GROUPED=true VPP=${row[3]}
}
choose SIZES ${MODEL}
envsubst < ${WORKSPACE}/models/${MODEL}.yaml > ${WORKSPACE}/models/${MODEL}.yaml.tmp
ARGS="--num-layers-per-virtual-pipeline-stage 1 $(yq '... comments="" | .MODEL_ARGS | to_entries | .[] |
    select(.value != "false") | with(select(.value == "true"); .value = "") |
    [.key + " " + .value] | join("")' ${WORKSPACE}/models/${MODEL}.yaml.tmp | tr '\\n' ' ')"
if [[ ${VPP} -gt 1 ]]; then
    if [[ ! "${ARGS}" =~ "--pipeline-model-parallel-layout" ]] && \\
       [[ ! "${ARGS}" =~ "--num-layers-per-virtual-pipeline-stage" ]]; then
        ARGS="${ARGS} --num-virtual-stages-per-pipeline-rank ${VPP}"
    fi
fi
sbatch <<EOF
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
srun python ${WORKSPACE}/Megatron-LM/pretrain_gpt.py ${ARGS}
EOF
"""
OPTIONS = """MODEL_ARGS:
  --tensor-model-parallel-size: ${TP}
  --pipeline-model-parallel-size: ${PP}
  --sequence-parallel: true
  --use-distributed-optimizer: false
  --swiglu: ${GROUPED}
  --num-layers: 28
  --hidden-size: 1024
  --num-attention-heads: 16
  --seq-length: 4096
  --micro-batch-size: 1
  --global-batch-size: 64
  --tokenizer-type: NullTokenizer
  --vocab-size: 32000
  --save: ${WORKSPACE}/checkpoints
  --bf16: true
"""


def test_a_table_by_its_reference_and_options_of_a_yaml_as_words(tmp_path: Path) -> None:
    for model in ("moe-a", "moe-b"):
        written(tmp_path / "models", OPTIONS, f"{model}.yaml")
    found = read(written(tmp_path, TABLE, "submit.sh"))
    assert [found.fields[one] for one in ("tp", "pp", "vpp", "zero")] == [2, 4, 7, 0]
    assert found.fields["sequence_parallel"] and found.num_gpus == 16
    other = read(tmp_path / "submit.sh", None, Given(settings={"MODEL": "moe-a"}))
    assert [other.fields[one] for one in ("tp", "pp", "vpp")] == [1, 2, 14]
    written(tmp_path, "ARGS:\n  --swiglu: null\n  --bf16: true\n  --seq-length: 4096\n  --fp16: false\n", "a.yaml")
    command = """yq '.ARGS | to_entries | .[] | [.key + " " + .value] | join("")' a.yaml"""
    words = queried(command, str(tmp_path / "submit.sh"), lambda text: text)
    assert words is not None and words.split() == ["--swiglu", "--bf16", "--seq-length", "4096"]
