"""Rules for what a strict reading of files of Megatron, its forks, nanotron, LitGPT and torchtitan found beside a plan."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from import_files import written

from planner.cost.memory import states
from planner.cost.pipeline.partition import split_stages, stage_parameters
from planner.cost.state_dtypes import stored_as
from planner.errors import PlannerError
from planner.layout import Layout
from planner.trainer import load_trainer
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given, OpenQuestionsError
from planner.workload import Workload

SIZES = "--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048"
STEP = "--micro-batch-size 1 --global-batch-size 64 --vocab-size 32000 --bf16"


def script(folder: Path, text: str, **given: Any) -> Reading:
    return read(written(folder, text, "train.sh"), None, Given(**given))


def asked(folder: Path, text: str, **given: Any) -> list[str]:
    with pytest.raises(OpenQuestionsError) as error:
        script(folder, text, **given)
    return [one.name for one in error.value.questions]


def megatron(arguments: str, launcher: str = "torchrun --nproc_per_node 8") -> str:
    return f"{launcher} pretrain_gpt.py {SIZES} {STEP} {arguments}\n"


# ------------------------------------------------------------------------------------------------------------- Megatron


def test_dropout_of_megatron_stays_with_zero_2(tmp_path: Path) -> None:
    found = script(tmp_path, megatron("--deepspeed --zero-stage 2"))
    assert found.trainer.startswith("deepspeed") and load_trainer(found.trainer).stored.dropout
    none = script(tmp_path, megatron("--deepspeed --zero-stage 2 --attention-dropout 0 --hidden-dropout 0.0"))
    assert not load_trainer(none.trainer).stored.dropout and "dropout" not in none.trainer


YAML = """
language_model:
  num_layers: 16
  hidden_size: 1024
  num_attention_heads: 16
  add_bias_linear: {bias}
  tokenizer_type: GPTSentencePieceTokenizer
model_parallel:
  tensor_model_parallel_size: 1
micro_batch_size: 2
global_batch_size: 64
seq_length: 2048
max_position_embeddings: 2048
bf16: True
"""


def over_yaml(folder: Path, bias: bool, more: str = "", **given: Any) -> Reading:
    written(folder, YAML.replace("{bias}", str(bias)), "gpt.yaml")
    return script(folder, f"torchrun --nproc_per_node 8 pretrain_gpt.py --yaml-cfg gpt.yaml {more}\n", **given)


def test_nothing_of_the_command_counts_beside_yaml_cfg(tmp_path: Path) -> None:
    more = "--micro-batch-size 8 --tensor-model-parallel-size 2 --vocab-size 50000 --vocab-file gpt2-vocab.json --merge-file m.txt"
    found = over_yaml(tmp_path, True, more, settings={"vocab_size": "32000"})
    assert (found.fields["tp"], found.fields["micro_batch_size"], found.num_gpus) == (1, 2, 8)
    note = next(one for one in found.notes if one.startswith("--yaml-cfg"))
    assert "--tensor-model-parallel-size" in note and "--micro-batch-size" in note
    with pytest.raises(OpenQuestionsError) as error:
        over_yaml(tmp_path, True, more)
    assert [one.name for one in error.value.questions] == ["vocab_size"]
    quiet = over_yaml(tmp_path, True, "--micro-batch-size 2", settings={"vocab_size": "32000"})
    assert not any(one.startswith("--yaml-cfg") for one in quiet.notes)


def test_false_of_what_is_true_by_default(tmp_path: Path) -> None:
    said = {"vocab_size": "32000"}
    models = [over_yaml(tmp_path, bias, settings=said).model for bias in (True, False)]
    assert [one is not None and one.linear_bias for one in models] == [True, False]
    written(tmp_path, YAML.replace("{bias}", "false"), "alone.yaml")
    alone = read(tmp_path / "alone.yaml", "megatron", Given(settings=said, num_gpus=8))
    assert alone.model is not None and not alone.model.linear_bias


def test_gpt2_by_its_files_only_of_its_own_tokenizer(tmp_path: Path) -> None:
    rows = f"{SIZES} --micro-batch-size 1 --global-batch-size 64 --bf16 --vocab-file gpt2-vocab.json"
    other = f"torchrun --nproc_per_node 8 pretrain_gpt.py {rows} --tokenizer-type NullTokenizer\n"
    assert asked(tmp_path, other) == ["vocab_size"]
    found = script(tmp_path, f"torchrun --nproc_per_node 8 pretrain_gpt.py {rows}\n")
    assert found.model is not None and found.model.vocab_size == 50257


COUNTED = "G=$(nvidia-smi --list-gpus | wc -l)\ntorchrun --nproc_per_node $G --nnodes 1"


def test_tasks_are_no_count_of_torchruns_processes(tmp_path: Path) -> None:
    head = "#!/bin/bash\n#SBATCH <OPTIONS> --nodes=128 --ntasks-per-node=8\n"
    assert script(tmp_path, head + "WORLD_SIZE=1\n" + megatron("", COUNTED)).num_gpus is None
    real = "#!/bin/bash\n#SBATCH --gpus-per-node=4 --ntasks-per-node=1\n"
    assert script(tmp_path, real + megatron("", COUNTED)).num_gpus == 4
    assert script(tmp_path, head + megatron("", "srun python")).num_gpus == 1024


def test_torchrun_without_a_count_is_one_process(tmp_path: Path) -> None:
    found = script(tmp_path, megatron("", "torchrun"))
    assert found.num_gpus == 1 and any("one process" in one for one in found.notes)
    assert script(tmp_path, megatron("", "torchrun --standalone")).num_gpus == 1
    assert script(tmp_path, megatron("", "torchrun --nnodes 2")).num_gpus == 2
    assert script(tmp_path, megatron("", "torchrun $DISTRIBUTED")).num_gpus is None


def test_torch_softmax_is_noted_where_attention_is_unfused(tmp_path: Path) -> None:
    def notes(more: str) -> list[str]:
        found = script(tmp_path, megatron(f"--no-masked-softmax-fusion {more}"))
        return [one for one in found.notes if "softmax" in one]

    assert "4 bytes each" in notes("--deepspeed --zero-stage 1")[0]
    assert notes("--attention-backend unfused") and not notes("")
    assert not notes("--deepspeed --zero-stage 1 --use-flash-attn")
    noise = script(tmp_path, megatron("--no-masked-softmax-fusion --attention-backend unfused")).noise
    assert "no_masked_softmax_fusion" not in noise


def test_a_refusal_names_unknown_flags_too(tmp_path: Path) -> None:
    with pytest.raises(PlannerError) as error:
        script(tmp_path, megatron("--quantize-everything 4 --wobble-twice"))
    assert "--set wobble_twice=false" in str(error.value) and "--set quantize_everything=false" in str(error.value)


def test_a_forks_way_to_recompute_is_asked_for(tmp_path: Path) -> None:
    assert asked(tmp_path, megatron("--recompute-granularity full --recompute-method chunk --recompute-num-layers 1")) == [
        "recompute_method"
    ]


def test_whole_nodes_of_grid_engine(tmp_path: Path) -> None:
    text = "#!/bin/sh\n#$ -l node_f=3\nmpirun -np $((NHOSTS * 4))"
    assert script(tmp_path, megatron("--deepspeed", f"{text} python").replace("size 64", "size 60")).num_gpus == 12


# ------------------------------------------------------------------------------------------------------------- nanotron

NANOTRON = """
parallelism: {dp: 2, pp: 2, tp: 1, pp_engine: 1f1b%s}
model:
  dtype: bfloat16
  model_config: {is_llama_config: true, hidden_size: 1024, intermediate_size: 4096, num_hidden_layers: 16, num_attention_heads: 16,
    num_key_value_heads: 16, vocab_size: 32000, max_position_embeddings: 2048, hidden_act: silu, tie_word_embeddings: false}
tokens: {sequence_length: 2048, micro_batch_size: 1, batch_accumulation_per_replica: 4}
optimizer: {zero_stage: %d, accumulate_grad_in_fp32: %s, optimizer_factory: {name: adamW}}
data_stages:
- name: stage
  start_training_step: 1
  data: {dataset: {hf_dataset_splits: train%s}, seed: 1}
"""


def nanotron(folder: Path, parallel: str = "", zero: int = 0, fp32: str = "true", data: str = "") -> Reading:
    return read(written(folder, NANOTRON % (parallel, zero, fp32, data), "config.yaml"), "nanotron", Given())


@pytest.mark.parametrize("zero", [0, 1])
def test_nanotron_without_fp32_gradients_is_bf16_alone(tmp_path: Path, zero: int) -> None:
    found = nanotron(tmp_path, zero=zero, fp32="false")
    assert found.precision == "bf16_true" and nanotron(tmp_path, zero=zero).precision == "bf16"
    assert found.model is not None
    trainer, layout = load_trainer("nanotron"), Layout(dp=2, zero=zero)
    work = Workload(model=found.model, sequence_length=2048, global_batch_size=4, precision="bf16_true")
    parameters = stage_parameters(work, layout, split_stages(found.model, layout), trainer.kernels)
    held = states.state_bytes(work, stored_as(work, trainer), layout, parameters)
    each = [float(np.max(held[name]) / np.max(parameters.all)) for name in ("weights", "gradients", "optimizer_states")]
    assert each == pytest.approx([2.0, 2.0 + 2.0, 4.0 / (1 + zero)], rel=1e-3)  # gradients, and the buckets of DDP


def test_layers_of_nanotrons_stages_by_a_list(tmp_path: Path) -> None:
    for first, last in ((8, 8), (11, 5)):
        found = nanotron(tmp_path, f", pp_layer_partition: [{first}, {last}]")
        plan, fields = to_plan(found), found.fields
        assert np.max(plan.layout.first_stage_layers) == first and found.trainer == "nanotron+stage_layers=listed"
        assert (fields["first_stage_layers"], fields["last_stage_layers"]) == (first, last)
    with pytest.raises(PlannerError, match="not a list of 2"):
        nanotron(tmp_path, ", pp_layer_partition: [4, 4, 8]")
    with pytest.raises(PlannerError, match="not the 16 layers"):
        nanotron(tmp_path, ", pp_layer_partition: [4, 4]")


def test_a_key_of_the_data_may_stand_twice(tmp_path: Path) -> None:
    found = nanotron(tmp_path, data=", hf_dataset_config_name: a, hf_dataset_config_name: b")
    assert any("hf_dataset_config_name" in one and "the last counts" in one for one in found.notes)
    with pytest.raises(PlannerError, match="given twice"):
        nanotron(tmp_path, ", dp: 4")


# --------------------------------------------------------------------------------------------------- LitGPT, torchtitan

LITGPT = """
checkpoint_dir: checkpoints/microsoft/phi-2
precision: bf16-true
devices: 1
lora_r: 8
lora_query: true
lora_key: {key}
lora_value: true
lora_projection: {key}
lora_mlp: {key}
train: {{global_batch_size: 8, micro_batch_size: 1, max_seq_length: 512}}
{more}
"""


def litgpt(folder: Path, key: bool = False, more: str = "") -> Reading:
    text = LITGPT.format(key=str(key).lower(), more=more)
    return read(written(folder, text, "lora.yaml"), "litgpt", Given())


def test_litgpt_pages_states_beside_quantised_weights(tmp_path: Path) -> None:
    assert litgpt(tmp_path).optimizer == "adam"
    assert litgpt(tmp_path, more="quantize: bnb.nf4").optimizer == "paged_adam"
    named = "quantize: bnb.nf4\noptimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.1}}"
    assert litgpt(tmp_path, more=named).optimizer == "paged_adam"


@pytest.mark.parametrize(("key", "rows"), [(False, 2), (True, 3)])
def test_litgpts_adapters_of_one_projection(tmp_path: Path, key: bool, rows: int) -> None:
    found = litgpt(tmp_path, key)
    assert found.model is not None
    model = found.model
    work = Workload(
        model=model, sequence_length=512, global_batch_size=8, precision="bf16_true", lora_rank=8, lora_targets=found.lora_targets
    )
    layout, kernels = Layout(), load_trainer(found.trainer).kernels
    parameters = stage_parameters(work, layout, split_stages(model, layout), kernels)
    h, f, before = 2560, 10240, rows * 2560
    each = before + 2 * h if rows == 2 else before + 3 * h + 2 * h + 2 * (h + f)
    assert float(parameters.adapters.flat[0]) == 32 * 8 * each


def test_torchtitan_states_in_the_dtype_of_the_weights(tmp_path: Path) -> None:
    text = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
state_dtype = "bfloat16"
[training]
local_batch_size = 1
seq_len = 2048
dtype = "%s"
[parallelism]
data_parallel_shard_degree = 8
"""
    same = read(written(tmp_path, text % "bfloat16", "run.toml"), "torchtitan", Given(num_gpus=8))
    assert same.precision == "bf16_true"
    with pytest.raises(OpenQuestionsError) as error:
        read(written(tmp_path, text % "float32", "run.toml"), "torchtitan", Given(num_gpus=8))
    assert [one.name for one in error.value.questions] == ["optimizer.state_dtype"]
