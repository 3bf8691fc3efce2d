"""What import reads since the draws 28 and 29: each test is one mechanism, with files of our own."""

import json
from pathlib import Path

import pytest

from planner import import_config
from planner.errors import PlannerError
from planner.layout import Recompute
from planner.rules import Job, check
from planner.trainers.reading import read
from planner.trainers.reading.configuration import to_plan
from planner.trainers.reading.given import Given, OpenQuestionsError

TRAINER = (
    "--model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1 --gradient_accumulation_steps 4 --bf16 True "
    "--model_max_length 1024"
)
TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
batch_size = 1
seq_len = 4096
[parallelism]
pipeline_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
"""


def _file(folder: Path, text: str, name: str = "run.sh") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_torchtitan_recomputes_every_nth_layer(tmp_path: Path) -> None:
    for option, how, layers in (("'4'", Recompute.FULL, 4), ("'1'", Recompute.FULL, 0), ("'99'", Recompute.NONE, 0)):
        text = f"{TITAN}selective_ac_option = {option}\n"
        found = read(_file(tmp_path, text, "a.toml"), None, Given(num_gpus=16))
        assert (found.fields["recompute"], found.fields.get("recompute_layers", 0)) == (how, layers)
        assert found.trainer == "torchtitan@0.1+compile=off"
    default = read(_file(tmp_path, TITAN.replace("batch_size", "local_batch_size"), "a.toml"), None, Given(num_gpus=16))
    assert default.fields["recompute_layers"] == 8 and default.trainer == "torchtitan@0.2+compile=off"
    one_stage = TITAN.replace("parallel_degree = 2", "parallel_degree = 1")
    files = [_file(tmp_path, f"{one_stage}selective_ac_option = '{n}'\n", f"{n}.toml") for n in (1, 2, 4)]
    kept = [to_plan(read(one, None, Given(num_gpus=16))).prediction.memory_gib["activations"] for one in files]
    assert 2 * kept[0] < kept[1] < kept[2]  # GiB: 32, 16 and 8 of 32 layers again


def test_a_part_of_the_layers_is_every_nth_in_torchtitan(tmp_path: Path) -> None:
    plan = to_plan(read(_file(tmp_path, f"{TITAN}selective_ac_option = '2'\n", "a.toml"), None, Given(num_gpus=16)))
    job = Job(workload=plan.workload, cluster=plan.cluster(), trainer=plan.load_trainer())
    check(job, plan.layout)
    with pytest.raises(PlannerError, match="recompute_layers 12"):
        check(job, plan.layout.replace(recompute_layers=12))


def test_a_batch_that_replicas_cannot_share_is_asked_for(tmp_path: Path) -> None:
    words = (
        "torchrun --nproc_per_node 6 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 "
        "--max-position-embeddings 512 --micro-batch-size 2 --global-batch-size 512 --bf16 --vocab-size 32000"
    )
    file = _file(tmp_path, words)
    with pytest.raises(OpenQuestionsError, match=r"--global-batch-size B \(512 by the file, which micro batch 2 x dp 6 does not"):
        import_config(file)
    assert to_plan(read(file, None, Given(global_batch_size=516))).workload.global_batch_size == 516


def test_paged_states_under_deepspeed_are_priced_as_those_of_the_gpu(tmp_path: Path) -> None:
    _file(tmp_path, json.dumps({"zero_optimization": {"stage": 2}}), "ds.json")
    words = f"deepspeed --num_gpus 4 train.py {TRAINER} --deepspeed ds.json --optim paged_adamw_32bit"
    found = read(_file(tmp_path, words), None, Given())
    assert found.optimizer == "adam" and any("paged states are priced on the GPU" in one for one in found.notes)


def test_what_zero_sends_in_fewer_bits_is_read_and_said(tmp_path: Path) -> None:
    zero = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    _file(tmp_path, json.dumps({"zero_optimization": zero}), "ds.json")
    file = _file(tmp_path, f"deepspeed --num_gpus 4 train.py {TRAINER} --deepspeed ds.json")
    found = read(file, None, Given())
    assert found.fields["zero"] == 3 and any("priced in 16" in one for one in found.notes)
    _file(tmp_path, json.dumps({"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}}), "ds.json")
    with pytest.raises(PlannerError, match="zero_quantized_nontrainable_weights decide"):
        read(file, None, Given())


def test_a_file_that_variables_name_is_asked_for_in_plain_text(tmp_path: Path) -> None:
    file = _file(tmp_path, "accelerate launch src/sft.py --config recipes/$MODEL/sft.yaml $MORE\n")
    with pytest.raises(OpenQuestionsError) as error:
        read(file, None, Given())
    assert "'recipes/${MODEL}/sft.yaml', which is not there" in str(error.value)
