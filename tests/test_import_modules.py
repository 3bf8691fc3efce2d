"""Programs whose training stands in modules of their project, and scripts whose functions write arguments."""

from pathlib import Path
from typing import Any

import pytest

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError

LLAMA = "--model_name_or_path meta-llama/Llama-2-7b-hf --bf16 True --per_device_train_batch_size 2 --model_max_length 2048"
MAIN = '''
import argparse
import torch
from own.models import load
from own.steps import trainer_of

parser = argparse.ArgumentParser()
parser.add_argument("--with_adapters", action="store_true")
parser.add_argument("--kind", default="supervised")
args = parser.parse_args()
model = load(args)
trainer_of(args.kind, model).train()
'''
MODELS = '''
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

RANK = 32

def load(args):
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, torch_dtype=torch.bfloat16)
    if args.kind == "bare":
        return model
    return adapted(model) if args.with_adapters else model

def adapted(model):
    return get_peft_model(model, LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"]))
'''
STEPS = '''
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

def trainer_of(kind, model):
    if kind == "rewards":
        return GRPOTrainer(model, args=GRPOConfig())
    return SFTTrainer(model, args=SFTConfig(gradient_checkpointing=True, per_device_train_batch_size=4))
'''


def project(folder: Path, package: str = "own") -> None:
    for name, text in {"train.py": MAIN, f"{package}/models.py": MODELS, f"{package}/steps.py": STEPS}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def script(folder: Path, words: str, before: str = "", program: str = "train.py", **given: Any) -> Reading:
    (folder / "run.sh").write_text(f"{before}\ntorchrun --nproc_per_node 8 {program} {words}\n")
    return read(folder / "run.sh", None, Given(**given))


@pytest.mark.parametrize("package", ["own", "src/own"])
def test_what_modules_of_a_program_do_counts_as_its_own(tmp_path: Path, package: str) -> None:
    project(tmp_path, package)
    found = script(tmp_path, LLAMA)
    assert (found.precision, found.lora_rank, found.fields["micro_batch_size"]) == ("bf16_true", 0, 2)
    with pytest.raises(PlannerError, match="GRPO is not modelled"):
        script(tmp_path, f"{LLAMA} --kind rewards")


def test_a_word_for_adapters_that_nobody_knows_is_asked_for(tmp_path: Path) -> None:
    found = script(tmp_path, f"{LLAMA} --adapter_style small")
    assert [one.name for one in found.questions] == ["use_peft"]
    assert script(tmp_path, f"{LLAMA} --enable_lora true --lora_r 8 --torch_dtype bfloat16 --lora_target all-linear").lora_rank == 8
    assert script(tmp_path, f"{LLAMA} --enable_lora false").lora_rank == 0


@pytest.mark.parametrize(("words", "what"), [
    (f"{LLAMA} --objective grpo_clipped", "GRPO"), (f"{LLAMA} --stage rm", "reward training"),
])  # fmt: skip
def test_a_word_for_the_step_decides_it(tmp_path: Path, words: str, what: str) -> None:
    with pytest.raises(PlannerError, match=f"{what} is not modelled"):
        script(tmp_path, words)


def test_openrlhf_trains_reward_models_too(tmp_path: Path) -> None:
    words = "--pretrain meta-llama/Llama-2-7b-hf --train_batch_size 16 --micro_train_batch_size 2 --max_len 1024 --bf16"
    (tmp_path / "run.sh").write_text(f"deepspeed --module openrlhf.cli.train_rm {words} --zero_stage 2\n")
    with pytest.raises(PlannerError, match="reward training is not modelled"):
        read(tmp_path / "run.sh", None, Given())


def test_deepspeed_of_a_program_goes_before_a_launcher_that_shards_nothing(tmp_path: Path) -> None:
    (tmp_path / "several.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 4\n")
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    (tmp_path / "run.sh").write_text(f"accelerate launch --config_file several.yaml train.py {LLAMA} --deepspeed zero.json\n")
    found = read(tmp_path / "run.sh", None, Given())
    assert (found.trainer, found.fields["zero"], found.num_gpus) == ("deepspeed", 2, 4)


def test_keywords_that_a_script_gets_from_elsewhere_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from trl import SFTConfig, SFTTrainer\nfrom elsewhere import common\nwords = common()\n"
        "SFTTrainer('meta-llama/Llama-2-7b-hf', args=SFTConfig(max_length=2048, **words)).train()\n"
    )
    given = Given(settings={"fsdp": "no_shard"}, num_gpus=1)
    names = {one.name for one in read(tmp_path / "train.py", None, given).questions}
    assert {"per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "bf16"} <= names


WRITES = '''
arguments() {
    local batch=$1
    if [ -n "$2" ]; then
        batch=$2
    fi
    echo "
        --per_device_train_batch_size ${batch} \\
        --gradient_accumulation_steps 8"
}
words=$(arguments 4 16)
'''


def test_what_a_function_of_a_script_writes_is_read(tmp_path: Path) -> None:
    model = "--model_name_or_path meta-llama/Llama-2-7b-hf --bf16 True --model_max_length 2048"
    found = script(tmp_path, f"{model} ${{words}}", WRITES)
    assert (found.fields["micro_batch_size"], found.fields["num_microbatches"]) == (16, 8)


def test_what_a_function_writes_under_an_open_condition_is_not_taken_for_known(tmp_path: Path) -> None:
    before = WRITES.replace('-n "$2"', '"$(hostname)" = a').replace("echo", "[ \"$(date)\" = a ] && echo other; echo")
    with pytest.raises(PlannerError):
        script(tmp_path, "--model_name_or_path meta-llama/Llama-2-7b-hf --bf16 True --model_max_length 2048 $(arguments 4)", before)


@pytest.mark.parametrize("word", ["--forward-disaggregating", "--split-tensor-parallel 2", "--grad-compress-rank 8"])
def test_words_of_forks_that_split_or_compress_are_not_left_out(tmp_path: Path, word: str) -> None:
    words = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024"
    batch = "--micro-batch-size 4 --global-batch-size 64 --vocab-size 50257 --train-iters 9"
    (tmp_path / "run.sh").write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {words} {batch} {word}\n")
    with pytest.raises(PlannerError, match="not priced"):
        read(tmp_path / "run.sh", None, Given())


OWN_FORM = "training: {batch: 3, steps: 4}\nmodel: {path: meta-llama/Llama-2-7b-hf}\n"
READS_IT = '''
import sys, yaml
from trl import SFTConfig, SFTTrainer

config = yaml.safe_load(open(sys.argv[1]))
args = SFTConfig(per_device_train_batch_size=config["training"]["batch"], gradient_accumulation_steps=config["training"]["steps"],
                 max_length=LENGTH, gradient_checkpointing=True, bf16=True)
SFTTrainer(config["model"]["path"], args=args).train()
'''


def own_form(folder: Path, **programs: str) -> Path:
    (folder / "README.md").write_text("A project.")
    for name, length in programs.items():
        (folder / f"{name}.py").write_text(READS_IT.replace("LENGTH", length))
    (folder / "configs").mkdir()
    (folder / "configs" / "job.yaml").write_text(OWN_FORM)
    return folder / "configs" / "job.yaml"


def test_a_file_in_a_form_of_its_own_is_read_as_its_program_takes_it(tmp_path: Path) -> None:
    found = read(own_form(tmp_path, train="2048", again="2048"), None, Given(settings={"fsdp": "no_shard"}, num_gpus=2))
    assert (found.fields["micro_batch_size"], found.fields["num_microbatches"], found.sequence_length) == (3, 4, 2048)
    assert any("train.py" in one or "again.py" in one for one in found.notes)


def test_which_of_several_programs_reads_a_file_is_asked(tmp_path: Path) -> None:
    path = own_form(tmp_path, first="2048", second="4096")
    said = {"fsdp": "no_shard"}
    found = read(path, None, Given(settings=said, num_gpus=2))
    assert [one.choices for one in found.questions] == [("first.py", "second.py")]
    found = read(path, None, Given(settings={**said, "program": "second.py"}, num_gpus=2))
    assert (found.sequence_length, found.questions) == (4096, ())


def test_a_file_that_no_program_trains_from_stays_unread(tmp_path: Path) -> None:
    path = own_form(tmp_path, train="2048")
    (tmp_path / "train.py").write_text(READS_IT.replace("trl", "lightning.pytorch as pl").replace("SFTTrainer(", "pl.Trainer("))
    with pytest.raises(PlannerError):
        read(path, None, Given())


@pytest.mark.parametrize("how", ["import lightning.pytorch as pl\n", "import pytorch_lightning as pl\n"])
def test_a_trainer_of_another_library_is_not_read(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(f"{how}trainer = pl.Trainer(max_epochs=3)\ntrainer.fit('model')\n")
    with pytest.raises(PlannerError, match=r"pl.Trainer is not the one of TRL or transformers"):
        read(tmp_path / "train.py", "trl", Given())


def test_a_batch_that_is_not_followed_from_the_file_is_asked_for(tmp_path: Path) -> None:
    path = own_form(tmp_path, train="2048")
    (tmp_path / "train.py").write_text(
        READS_IT.replace("LENGTH", "2048").replace('per_device_train_batch_size=config["training"]["batch"], ', "")
    )
    assert "per_device_train_batch_size" in {one.name for one in read(path, None, Given(settings={"fsdp": "no_shard"})).questions}


def test_a_program_whose_parts_stand_in_modules_reads_a_file(tmp_path: Path) -> None:
    path = own_form(tmp_path)
    (tmp_path / "src" / "own").mkdir(parents=True)
    whole = READS_IT.replace("LENGTH", "2048").replace("sys.argv[1]", "path")
    steps = "".join(f"    {line}\n" for line in whole.splitlines()[4:])
    steps = steps.replace("    config = yaml.safe_load(open(path))\n", "")
    (tmp_path / "src" / "own" / "steps.py").write_text(f"from trl import SFTConfig, SFTTrainer\ndef run(config):\n{steps}")
    (tmp_path / "src" / "own" / "files.py").write_text(
        "import yaml\ndef load_config(path):\n    with open(path) as file:\n        return yaml.safe_load(file)\n"
    )
    (tmp_path / "main.py").write_text(
        "import sys\nfrom own.files import load_config\nfrom own.steps import run\n"
        "if __name__ == '__main__':\n    run(load_config(sys.argv[1]))\n"
    )
    found = read(path, None, Given(settings={"fsdp": "no_shard"}, num_gpus=2))
    assert (found.fields["micro_batch_size"], found.fields["num_microbatches"]) == (3, 4)


@pytest.mark.parametrize(("pin", "recomputes"), [("trl==0.8.6", False), ("trl[vllm]>=0.21", True), ("trl~=0.19.0", False)])
def test_the_version_that_a_project_pins_decides_what_trl_does_by_itself(tmp_path: Path, pin: str, recomputes: bool) -> None:
    (tmp_path / "requirements.txt").write_text(f"torch\n{pin}\npeft\n")
    found = script(tmp_path, LLAMA.replace("--bf16 True ", "").replace("model_max", "max"), program="sft.py")
    assert (found.fields["recompute"] > 0, found.precision, found.questions) == (recomputes, "bf16" if recomputes else "fp32", ())


def test_mixed_precision_among_the_settings_of_a_program_says_it(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("trl==0.8.6\n")
    (tmp_path / "job.yaml").write_text(
        "model_name_or_path: meta-llama/Llama-2-7b-hf\nper_device_train_batch_size: 2\nmax_length: 2048\nmixed_precision: bf16\n"
    )
    found = read(tmp_path / "job.yaml", None, Given(settings={"fsdp": "no_shard"}, num_gpus=1))
    assert (found.precision, found.fields["recompute"]) == ("bf16", 0)


@pytest.mark.parametrize("pin", ["", "trl>=0.9", "trl"])
def test_without_a_version_what_trl_does_by_itself_is_asked_for(tmp_path: Path, pin: str) -> None:
    (tmp_path / "requirements.txt").write_text(f"{pin}\n")
    found = script(tmp_path, LLAMA.replace("model_max", "max"), program="sft.py")
    assert [one.name for one in found.questions] == ["gradient_checkpointing"]


@pytest.mark.parametrize(("words", "what"), [
    ("--query_max_len 512 --passage_max_len 256", "contrastive training"), ("--num_ppo_epochs 4 --kl_coef 0.2", "PPO"),
])  # fmt: skip
def test_arguments_that_another_step_has_are_not_left_out(tmp_path: Path, words: str, what: str) -> None:
    with pytest.raises(PlannerError, match=f"{what} is not modelled"):
        script(tmp_path, f"{LLAMA} {words}")


def test_arguments_in_a_document_that_read_keeps_are_read(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "MODEL=meta-llama/Llama-2-7b-hf\nread -r -d '' words <<EOF\nopenrlhf.cli.train_sft \\\n   --pretrain $MODEL \\\n"
        "   --train_batch_size 64 --micro_train_batch_size 4 --max_len 2048 --bf16 --zero_stage 2\nEOF\n"
        'if [[ ${1} != "slurm" ]]; then\n    deepspeed --num_gpus 8 --module $words\nfi\n'
    )
    found = read(tmp_path / "run.sh", None, Given())
    assert (found.fields["zero"], found.fields["micro_batch_size"], found.fields["num_microbatches"]) == (2, 4, 2)
    assert found.num_gpus == 8


def test_a_trainer_whose_name_is_in_a_variable_is_known(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        'BIN="${BIN:-swift}"\n"${BIN}" sft --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --per_device_train_batch_size 1 '
        "--torch_dtype bfloat16 --max_length 2048\n"
    )
    assert read(tmp_path / "run.sh", None, Given(num_gpus=1)).fields["recompute"] > 0  # swift checkpoints by itself


@pytest.mark.parametrize(("pattern", "tp"), [("--few", 1), ("--many", 4)])
def test_what_a_script_looks_for_in_a_text_of_its_own_is_known(tmp_path: Path, pattern: str, tp: int) -> None:
    (tmp_path / "run.sh").write_text(
        'MODE=" --few --loud "\nTP=4\nif echo "$MODE" | grep -q -- "' + pattern + '"; then\n    TP=1\nfi\n'
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
        "--max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 64 --vocab-size 50257 --bf16 "
        "--tensor-model-parallel-size $TP\n"
    )
    assert read(tmp_path / "run.sh", None, Given()).fields.get("tp", 1) == tp


def test_a_tokenizer_of_the_weights_says_no_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 31 --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 "
        "--max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 64 --bf16 --patch-tokenizer-type LLamaTokenizer\n"
    )
    with pytest.raises(OpenQuestionsError) as asked:
        read(tmp_path / "run.sh", None, Given())
    assert [one.name for one in asked.value.questions] == ["vocab_size"]


def test_a_loss_that_a_program_adds_to_verl_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "python -m recipe.own.main_own actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct data.train_batch_size=64 "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 own.embedder_loss_weight=0.1 trainer.n_gpus_per_node=8\n"
    )
    with pytest.raises(PlannerError, match="own.embedder_loss_weight decides memory"):
        read(tmp_path / "run.sh", None, Given())


def test_no_shard_as_an_answer_is_plain_data_parallel(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "model_name_or_path: meta-llama/Llama-2-7b-hf\nper_device_train_batch_size: 2\nmax_length: 2048\nbf16: true\n"
        "torch_dtype: bfloat16\ngradient_checkpointing: true\n"
    )
    found = read(tmp_path / "job.yaml", None, Given(settings={"fsdp": "no_shard"}, num_gpus=4))
    assert (found.fields["zero"], found.precision) == (0, "bf16_true")


def test_the_rows_of_such_a_tokenizer_are_asked_for_with_the_rest(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "LAYERS=$1\ntorchrun --nproc_per_node 8 pretrain_gpt.py --num-layers $LAYERS --hidden-size 4096 --num-attention-heads 32 "
        "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 64 --bf16 "
        "--patch-tokenizer-type LLamaTokenizer\n"
    )
    with pytest.raises(OpenQuestionsError) as asked:
        read(tmp_path / "run.sh", None, Given())
    assert {one.name for one in asked.value.questions} == {"LAYERS", "vocab_size"}
    assert read(tmp_path / "run.sh", None, Given(settings={"LAYERS": "31", "vocab_size": "64000"})).model.vocab_size == 64000  # type: ignore[union-attr]


def test_megatron_of_accelerate_has_its_own_number_of_micro_batches(tmp_path: Path) -> None:
    (tmp_path / "several.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MEGATRON_LM\nnum_processes: 2\nmixed_precision: bf16\n"
        "megatron_lm_config: {megatron_lm_tp_degree: 2, megatron_lm_num_micro_batches: 3}\n"
    )
    (tmp_path / "run.sh").write_text(f"accelerate launch --config_file several.yaml train.py {LLAMA}\n")
    found = read(tmp_path / "run.sh", None, Given())
    assert (found.fields["tp"], found.fields["num_microbatches"], found.global_batch_size) == (2, 3, 6)


def test_deepspeed_over_a_file_that_names_none_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "several.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\n")
    (tmp_path / "run.sh").write_text(f"accelerate launch --config_file several.yaml --use_deepspeed train.py {LLAMA}\n")
    assert [one.name for one in read(tmp_path / "run.sh", None, Given()).questions] == ["deepspeed"]
    assert read(tmp_path / "run.sh", None, Given(settings={"deepspeed": "zero2"})).fields["zero"] == 2


def test_a_large_folder_is_not_walked_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.trainers.reading import file_readers

    path = own_form(tmp_path, train="2048")
    (tmp_path / "many").mkdir()
    for number in range(30):
        (tmp_path / "many" / f"{number}.py").write_text("")
    monkeypatch.setattr(file_readers, "MOST_ENTRIES", 3)
    assert [one.name for one in file_readers.programs_of(path, Given())] == ["train.py"]
    assert sum(1 for _ in file_readers._files(tmp_path, ".py")) == 1


@pytest.mark.parametrize("before", ["nohup", "taskset -c 0-7", "uv run", "numactl --cpunodebind=0"])
def test_what_stands_before_python_does_not_hide_the_gpu_that_is_shown(tmp_path: Path, before: str) -> None:
    (tmp_path / "run.sh").write_text(f"CUDA_VISIBLE_DEVICES=3 {before} python train.py {LLAMA}\n")
    assert read(tmp_path / "run.sh", None, Given()).num_gpus == 1
