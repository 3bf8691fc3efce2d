"""What import reads since the draws 28 and 29: each test is one mechanism, with files of our own."""

import json
from pathlib import Path

import pytest
from import_files import written

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


def test_torchtitan_recomputes_every_nth_layer(tmp_path: Path) -> None:
    for option, how, layers in (("'4'", Recompute.FULL, 4), ("'1'", Recompute.FULL, 0), ("'99'", Recompute.NONE, 0)):
        text = f"{TITAN}selective_ac_option = {option}\n"
        found = read(written(tmp_path, text, "a.toml"), None, Given(num_gpus=16))
        assert (found.fields["recompute"], found.fields.get("recompute_layers", 0)) == (how, layers)
        assert found.trainer == "torchtitan@0.1+compile=off"
    default = read(written(tmp_path, TITAN.replace("batch_size", "local_batch_size"), "a.toml"), None, Given(num_gpus=16))
    assert default.fields["recompute_layers"] == 8 and default.trainer == "torchtitan@0.2+compile=off"
    one_stage = TITAN.replace("parallel_degree = 2", "parallel_degree = 1")
    files = [written(tmp_path, f"{one_stage}selective_ac_option = '{n}'\n", f"{n}.toml") for n in (1, 2, 4)]
    kept = [to_plan(read(one, None, Given(num_gpus=16))).prediction.memory_gib["activations"] for one in files]
    assert 2 * kept[0] < kept[1] < kept[2]  # GiB: 32, 16 and 8 of 32 layers again


def test_a_part_of_the_layers_is_every_nth_in_torchtitan(tmp_path: Path) -> None:
    plan = to_plan(read(written(tmp_path, f"{TITAN}selective_ac_option = '2'\n", "a.toml"), None, Given(num_gpus=16)))
    job = Job(workload=plan.workload, cluster=plan.cluster(), trainer=plan.load_trainer())
    check(job, plan.layout)
    with pytest.raises(PlannerError, match="recompute_layers 12"):
        check(job, plan.layout.replace(recompute_layers=12))


def test_a_batch_that_replicas_cannot_share_is_asked_for(tmp_path: Path) -> None:
    words = (
        "torchrun --nproc_per_node 6 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 "
        "--max-position-embeddings 512 --micro-batch-size 2 --global-batch-size 512 --bf16 --vocab-size 32000"
    )
    file = written(tmp_path, words, "run.sh")
    with pytest.raises(OpenQuestionsError, match=r"--global-batch-size B \(512 by the file, which micro batch 2 x dp 6 does not"):
        import_config(file)
    assert to_plan(read(file, None, Given(global_batch_size=516))).workload.global_batch_size == 516


def test_paged_states_under_deepspeed_are_priced_as_those_of_the_gpu(tmp_path: Path) -> None:
    written(tmp_path, json.dumps({"zero_optimization": {"stage": 2}}), "ds.json")
    words = f"deepspeed --num_gpus 4 train.py {TRAINER} --deepspeed ds.json --optim paged_adamw_32bit"
    found = read(written(tmp_path, words, "run.sh"), None, Given())
    assert found.optimizer == "adam" and any("paged states are priced on the GPU" in one for one in found.notes)


def test_what_zero_sends_in_fewer_bits_is_read_and_said(tmp_path: Path) -> None:
    zero = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    written(tmp_path, json.dumps({"zero_optimization": zero}), "ds.json")
    file = written(tmp_path, f"deepspeed --num_gpus 4 train.py {TRAINER} --deepspeed ds.json", "run.sh")
    found = read(file, None, Given())
    assert found.fields["zero"] == 3 and any("priced in 16" in one for one in found.notes)
    written(tmp_path, json.dumps({"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}}), "ds.json")
    with pytest.raises(PlannerError, match="zero_quantized_nontrainable_weights decide"):
        read(file, None, Given())


def test_a_file_that_variables_name_is_asked_for_in_plain_text(tmp_path: Path) -> None:
    file = written(tmp_path, "accelerate launch src/sft.py --config recipes/$MODEL/sft.yaml $MORE\n", "run.sh")
    with pytest.raises(OpenQuestionsError) as error:
        read(file, None, Given())
    assert "'recipes/${MODEL}/sft.yaml', which is not there" in str(error.value)


def test_dpo_of_megatron_is_no_language_model_step(tmp_path: Path) -> None:
    words = (
        "torchrun --nproc_per_node 8 PROGRAM --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 "
        "--max-position-embeddings 512 --micro-batch-size 2 --global-batch-size 16 --bf16 --vocab-size 32000"
    )
    with pytest.raises(PlannerError, match="dpo_training.py trains with DPO, whose step is not modelled in Megatron"):
        read(written(tmp_path, words.replace("PROGRAM", "dpo_training.py"), "run.sh"), None, Given())
    assert read(written(tmp_path, words.replace("PROGRAM", "train.py"), "run.sh"), None, Given()).num_gpus == 8


BRANCHES = (
    f"NUM_GPUS=${{NUM_GPUS:-1}}\nif [ $NUM_GPUS -gt 1 ]; then\n  accelerate launch --num_processes $NUM_GPUS --use_deepspeed "
    f"--deepspeed_config_file ds.json train.py {TRAINER}\nelse\n  python train.py {TRAINER}\nfi\n"
)


def test_gpus_are_the_number_that_a_script_branches_on(tmp_path: Path) -> None:
    written(tmp_path, json.dumps({"zero_optimization": {"stage": 2}}), "ds.json")
    file = written(tmp_path, BRANCHES, "run.sh")
    four, one = (read(file, None, Given(num_gpus=count)) for count in (4, 1))
    assert (four.trainer, four.fields["zero"], four.fields["dp"]) == ("deepspeed", 2, 4)
    assert (one.trainer, one.fields["zero"], one.fields["dp"]) == ("fsdp", 0, 1)
    assert not any("NUM_GPUS" in said for said in four.unread)
    nodes = written(tmp_path, f"NNODES=2\n{BRANCHES}", "run.sh")  # of a node, and not of the job
    assert read(nodes, None, Given(num_gpus=4)).trainer == "fsdp"


DPO = """from trl import DPOConfig, DPOTrainer, HfArgumentParser
args, = HfArgumentParser((DPOConfig,)).parse_args_into_dataclasses()
ref_model = REFERENCE
trainer = DPOTrainer(args.model_name_or_path, ref_model, args=args, precompute_ref_log_probs=KNOWN)
"""


def test_dpo_without_a_reference_model_in_memory(tmp_path: Path) -> None:
    words = f"accelerate launch --num_processes 2 --use_deepspeed --zero_stage 3 run_dpo.py {TRAINER} --gradient_checkpointing True"
    found = []
    for reference, known in (("None", "True"), ("args.model_name_or_path", "True"), ("None", "False")):
        written(tmp_path, DPO.replace("REFERENCE", reference).replace("KNOWN", known), "run_dpo.py")
        found.append(read(written(tmp_path, words, "run.sh"), None, Given()))
    assert [(one.objective, one.fields["micro_batch_size"]) for one in found] == [("lm", 2), ("dpo", 1), ("dpo", 1)]
    assert any("not in memory" in one for one in found[0].notes)
    also = read(written(tmp_path, f"{words} --precompute_ref_log_probs True", "run.sh"), None, Given())
    assert also.objective == "dpo" and any("too long" in one for one in also.notes)


def test_of_a_key_that_is_given_twice_and_decides_nothing_the_last_counts(tmp_path: Path) -> None:
    text = "base_model: Qwen/Qwen3-8B\nlearning_rate: 1e-4\nmicro_batch_size: 2\nsequence_len: 2048\nlearning_rate: 2e-4\n"
    found = read(written(tmp_path, text, "a.yml"), None, Given(num_gpus=1))
    assert found.fields["micro_batch_size"] == 2
    assert any("the last counts = 'learning_rate'" in one for one in found.unread)
    tokens = "special_tokens: {bos_token: a}\ndatasets: [{path: a}]\nspecial_tokens:\ndatasets: [{path: b}]\n"
    assert read(written(tmp_path, text + tokens, "a.yml"), None, Given(num_gpus=1)).fields["micro_batch_size"] == 2
    with pytest.raises(PlannerError, match="is given twice"):
        read(written(tmp_path, f"{text}micro_batch_size: 4\n", "a.yml"), "axolotl", Given(num_gpus=1))


def test_sections_of_ones_own_are_not_taken_for_llama_factory(tmp_path: Path) -> None:
    text = "model:\n  name: a\ndeepspeed:\n  stage: 2\n"
    with pytest.raises(PlannerError, match="sections of its own"):
        read(written(tmp_path, text, "a.yaml"), None, Given())


def test_a_step_that_is_called_sft_is_one_whatever_stands_beside_it(tmp_path: Path) -> None:
    text = "model_name_or_path: Qwen/Qwen3-8B\nper_device_train_batch_size: 1\nmax_seq_length: 512\nbf16: true\nbeta: 0.1\n"
    given = Given(num_gpus=1)
    found = [read(written(tmp_path, f"{text}algorithm: {word}\n", "a.yaml"), None, given).objective for word in ("sft", "dpo")]
    assert found == ["lm", "dpo"]


def test_torchtitan_stages_by_their_layers(tmp_path: Path) -> None:
    text = TITAN.replace("parallel_degree = 2", "parallel_degree = 4\npipeline_parallel_schedule = 'Interleaved1F1B'")
    for each, first, chunks in ((4, 0, 2), (3, 1, 3), (2, 0, 4)):  # 32 layers, of which the ends count more
        stages = f"pipeline_parallel_layers_per_stage = {each}\npipeline_parallel_first_stage_less_layers = {first}\n"
        stages += f"pipeline_parallel_last_stage_less_layers = {first}\n[activation_checkpoint]"
        found = read(written(tmp_path, text.replace("[activation_checkpoint]", stages), "a.toml"), None, Given(num_gpus=8))
        assert found.fields["vpp"] == chunks


def test_a_program_that_downloads_is_no_training(tmp_path: Path) -> None:
    file = written(tmp_path, "python tools/download_assets.py --repo_id a/b\npython -m pytest tests -q\n", "run.sh")
    with pytest.raises(PlannerError, match="no command that trains was found"):
        read(file, "transformers", Given())
    trained = f"torchrun --nproc_per_node 2 own/merge_and_tune.py {TRAINER}\n"
    file = written(tmp_path, f"python tools/download_assets.py --repo_id a/b\n{trained}", "run.sh")
    assert read(file, None, Given()).num_gpus == 2


MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 16 --bf16 --vocab-size 32000"
)


def test_master_weights_in_fp16_are_one_question_with_the_rest(tmp_path: Path) -> None:
    states = "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype fp16 --exp-avg-sq-dtype fp16"
    text = f"{MEGATRON.replace(' --vocab-size 32000', '')} {states} --main-params-dtype fp16"
    file = written(tmp_path, text, "run.sh")
    with pytest.raises(OpenQuestionsError, match=r"--set vocab_size.*--set main_params_dtype=fp32 \(.*2 bytes more") as error:
        read(file, None, Given())
    assert {one.name for one in error.value.questions} == {"main_params_dtype", "vocab_size"}
    found = read(file, None, Given(settings={"main_params_dtype": "fp32", "vocab_size": "32000"}))
    assert found.optimizer == "adam_bf16"


def test_a_length_of_a_forks_own_is_asked_for(tmp_path: Path) -> None:
    file = written(tmp_path, f"{MEGATRON} --seq-length-train 1024", "run.sh")
    with pytest.raises(OpenQuestionsError, match=r"--sequence-length S \(--seq-length-train is 1024, and --seq-length 2048\)"):
        read(file, None, Given())
    assert read(file, None, Given(sequence_length=1024)).sequence_length == 1024
    assert read(written(tmp_path, f"{MEGATRON} --seq-length-train 2048", "run.sh"), None, Given()).sequence_length == 2048


DTYPES = """import argparse
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
parser = argparse.ArgumentParser()
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--fp16", action="store_true")
args = parser.parse_args()
if args.bf16:
    dtype = torch.bfloat16
elif args.fp16:
    dtype = torch.float16
else:
    dtype = torch.float32
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", torch_dtype=dtype)
Trainer(model=model, args=TrainingArguments(per_device_train_batch_size=1, bf16=args.bf16))
"""


def test_a_dtype_that_options_of_the_command_choose(tmp_path: Path) -> None:
    written(tmp_path, DTYPES, "own_train.py")
    words = "torchrun --nproc_per_node 2 own_train.py --per_device_train_batch_size 1 --gradient_checkpointing --max_length 512"
    found = [read(written(tmp_path, f"{words} {option}", "run.sh"), None, Given()).precision for option in ("--bf16", "")]
    assert found == ["bf16_true", "fp32"]


def test_the_all_reduce_of_megatron_that_runs_beside_the_gradient_decides_nothing(tmp_path: Path) -> None:
    for name in ("--async-tensor-model-parallel-allreduce", "--no-async-tensor-model-parallel-allreduce"):
        assert read(written(tmp_path, f"{MEGATRON} {name}", "run.sh"), None, Given()).num_gpus == 8


def test_the_activation_of_megatrons_yaml_is_that_of_its_switch(tmp_path: Path) -> None:
    text = "language_model:\n  num_layers: 4\n  hidden_size: 768\n  num_attention_heads: 8\n  activation_func: swiglu\n"
    text += "model_parallel:\n  tensor_model_parallel_size: 1\n  bf16: true\n"
    text += "seq_length: 512\nmicro_batch_size: 1\nglobal_batch_size: 8\npadded_vocab_size: 1024\n"
    model = read(written(tmp_path, text, "a.yaml"), None, Given(num_gpus=8)).model
    assert model is not None and (model.activation, model.ffn_size) == ("silu", 2048)  # 4 h 2 / 3 in units of 64
    plain = read(written(tmp_path, text.replace("swiglu", "gelu"), "a.yaml"), None, Given(num_gpus=8)).model
    assert plain is not None and (plain.activation, plain.ffn_size) == ("gelu", 3072)


def test_an_architecture_of_a_forks_own_is_asked_for_with_the_rest(tmp_path: Path) -> None:
    words = "--experimental-attention-variant gated_delta_net --seq-length-train 1024 --use-precision-aware-optimizer"
    own = written(tmp_path, f"{MEGATRON.replace('--vocab-size 32000', '')} {words} --main-params-dtype fp16", "run.sh")
    with pytest.raises(OpenQuestionsError, match="experimental-attention-variant is an architecture") as asked:
        read(own, None, Given())
    assert all(one in str(asked.value) for one in ("--model NAME", "--sequence-length S", "--set main_params_dtype=fp32"))
    assert "vocab_size" not in str(asked.value)  # the preset says it
    given = Given(model="qwen2.5-7b", sequence_length=1024, settings={"main_params_dtype": "fp32"})
    assert read(own, None, given).sequence_length == 1024
