"""What import reads since draw 38: questions at once, ranks alone, passes of own trainers."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given, OpenQuestionsError

RECIPE = """
model_name_or_path: Qwen/Qwen2.5-7B
dataset_name: d
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: true
bf16: true
torch_dtype: bfloat16
max_length: 2048
deepspeed: zero2
lora_r: 16
"""


def test_a_rank_alone_makes_no_adapters_in_trl_and_is_asked_about(tmp_path: Path) -> None:
    """get_peft_config gives None where use_peft is false, which it is by itself.  [trl/trainer/utils.py]"""
    file = written(tmp_path, RECIPE)
    assert "use_peft" in asked_for(read(file, "trl", Given(num_gpus=8)))
    for answer, rank in (("true", 16), ("false", 0)):
        found = read(file, "trl", Given(num_gpus=8, settings={"use_peft": answer}))
        assert ("use_peft" not in asked_for(found), found.lora_rank) == (True, rank)


OWN_ADAPTERS = """
import argparse
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
parser = argparse.ArgumentParser()
parser.add_argument("--lora_r", type=int, default=8)
args = parser.parse_args()
peft_config = LoraConfig(r=args.lora_r, target_modules="all-linear")
SFTTrainer("Qwen/Qwen2.5-7B", args=SFTConfig(per_device_train_batch_size=2), train_dataset=d, peft_config=peft_config).train()
"""


def test_a_program_that_makes_adapters_of_a_rank_itself_is_not_asked(tmp_path: Path) -> None:
    written(tmp_path, OWN_ADAPTERS, "sft.py")
    found = read(written(tmp_path, "accelerate launch --num_processes 4 sft.py --lora_r 32\n", "run.sh"), None, Given())
    assert ("use_peft" not in asked_for(found), found.lora_rank) == (True, 32)


PROGRAM = """
from trl import SFTConfig, SFTTrainer
from transformers import AutoModelForCausalLM
class Own(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
%s
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", torch_dtype="bfloat16")
args = SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, gradient_checkpointing=True, bf16=True)
Own(model=model, args=args, train_dataset=d).train()
"""
ONCE = {
    "branches": "if self.w:\n    return model(**inputs).loss\nreturn super().compute_loss(model, inputs)",
    "other branch": "if self.w:\n    out = model(**inputs)\nelse:\n    out = model(input_ids=inputs['x'])\nreturn out.loss",
    "weights": "out = model(**inputs)\nreturn (out.loss * self.weights(inputs)).mean()",
}
SEVERAL = {
    "second pass": "first = model(**inputs)\nwith torch.no_grad():\n    other = self.model(**inputs)\nreturn kl(first, other)",
    "over its own": "loss = super().compute_loss(model, inputs)\nreturn loss + model(**inputs['kept']).loss",
    "loop": "losses = []\nfor part in inputs:\n    losses.append(model(**part).loss)\nreturn sum(losses)",
    "another model": "return model(**inputs).loss + self.base_model(**inputs).loss",
}


def _program(folder: Path, body: str, settings: dict[str, str] | None = None) -> Reading:
    text = PROGRAM % "\n".join(" " * 8 + line for line in body.splitlines())
    return read(written(folder, text, "tune.py"), None, Given(num_gpus=1, settings=settings or {}))


@pytest.mark.parametrize("body", SEVERAL.values(), ids=SEVERAL)
def test_an_own_trainer_that_runs_the_model_several_times_is_a_question(tmp_path: Path, body: str) -> None:
    found = _program(tmp_path, body)
    assert asked_for(found)[:1] == ["compute_loss"]
    with pytest.raises(OpenQuestionsError, match="compute_loss=false"):
        to_plan(found)
    assert "compute_loss" not in asked_for(_program(tmp_path, body, {"compute_loss": "false"}))


@pytest.mark.parametrize("body", ONCE.values(), ids=ONCE)
def test_an_own_trainer_with_one_pass_is_read(tmp_path: Path, body: str) -> None:
    assert "compute_loss" not in asked_for(_program(tmp_path, body))


def test_an_own_trainer_behind_a_command_is_a_question_too(tmp_path: Path) -> None:
    written(tmp_path, PROGRAM % "        return model(**inputs).loss + model(**inputs).loss", "tune.py")
    command = "accelerate launch --num_processes 4 tune.py --per_device_train_batch_size 2\n"
    found = read(written(tmp_path, command, "run.sh"), None, Given())
    assert "compute_loss" in asked_for(found)


ENVIRONMENT = """
from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer
from core.utils import get_env
BATCH, RANK = get_env("BATCH_SIZE", 2, int), get_env("LORA_R", default=16)
model, tokenizer = FastLanguageModel.from_pretrained(model_name="unsloth/Qwen2.5-7B", max_seq_length=get_env("LENGTH", 8192, int))
model = FastLanguageModel.get_peft_model(model, r=RANK)
SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=BATCH, gradient_accumulation_steps=4)).train()
"""


def test_an_own_function_over_the_environment_gives_its_default_or_the_answer(tmp_path: Path) -> None:
    file = written(tmp_path, ENVIRONMENT, "tune.py")
    found = read(file, None, Given())
    assert (found.fields["micro_batch_size"], found.lora_rank, found.sequence_length) == (2, 16, 8192)
    said = read(file, None, Given(settings={"BATCH_SIZE": "4", "LORA_R": "64"}))
    assert (said.fields["micro_batch_size"], said.lora_rank) == (4, 64)


MANY = """
from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer
from project import length, batch, steps, optim, rank, dropout, bits, name, kept
model, tokenizer = FastLanguageModel.from_pretrained(model_name=name, max_seq_length=length(), load_in_4bit=bits())
model = FastLanguageModel.get_peft_model(model, r=rank(), lora_dropout=dropout(), use_gradient_checkpointing="unsloth")
args = SFTConfig(per_device_train_batch_size=batch(), gradient_accumulation_steps=steps(), optim=optim(), bf16=kept(), fp16=kept())
SFTTrainer(model=model, args=args).train()
"""


def test_all_that_is_open_stands_in_one_sentence_and_is_answered_by_its_words(tmp_path: Path) -> None:
    """More than eight questions, one of them by the keyword of a library that has another name here: r."""
    file = written(tmp_path, MANY, "tune.py")
    found = read(file, None, Given())
    with pytest.raises(OpenQuestionsError) as caught:
        to_plan(found)
    assert len(caught.value.questions) > 8
    assert all(one.name in str(caught.value) for one in caught.value.questions)
    answers = {one.name: one.choices[0] if one.choices else "4" for one in caught.value.questions if not one.name.startswith("-")}
    answered = read(file, None, Given(settings={**answers, "lora_dropout": "0", "max_length": "1024", "r": "32"}))
    assert (answered.lora_rank, asked_for(answered)) == (32, [])


LOADED = """
from trl import SFTConfig, SFTTrainer
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B")%s
%s
args = SFTConfig(per_device_train_batch_size=2, gradient_checkpointing=True, bf16=False, fp16=False, max_length=1024)
SFTTrainer(model=model, args=args, train_dataset=d).train()
"""


@pytest.mark.parametrize(
    ("turned", "precision"), [(".half().cuda()", "bf16_true"), (".cuda()", "fp32"), (".to(0).bfloat16()", "bf16_true")]
)
def test_a_model_is_turned_into_another_dtype_where_it_is_loaded(tmp_path: Path, turned: str, precision: str) -> None:
    """Its weights are trained in 16 bits, which is what bf16_true stands for."""
    assert read(written(tmp_path, LOADED % (turned, ""), "tune.py"), None, Given(num_gpus=1)).precision == precision


FROZEN = {
    "all but some": "for name, p in model.named_parameters():\n    p.requires_grad = 'norm' in name",
    "layers": "for layer in model.model.layers[:8]:\n    layer.requires_grad_(False)",
}
TRAINED = {
    "of an encoder": "for p in vision_tower.parameters():\n    p.requires_grad = False",
    "of a reference": "reference.requires_grad_(False)",
    "switched on": "for p in model.parameters():\n    p.requires_grad = True",
    "never": "FREEZE = False\nif FREEZE:\n    for p in model.parameters():\n        p.requires_grad = False",
    "class that is not made": "class Own:\n    def __init__(self):\n        self.w.requires_grad = False",
    "under adapters": "for p in model.parameters():\n    p.requires_grad = False\npeft = LoraConfig(r=8)",
}


@pytest.mark.parametrize("body", FROZEN.values(), ids=FROZEN)
def test_a_program_that_freezes_a_part_of_its_model_is_a_question(tmp_path: Path, body: str) -> None:
    file = written(tmp_path, LOADED % ("", body), "tune.py")
    assert "requires_grad" in asked_for(read(file, None, Given(num_gpus=1)))
    assert "requires_grad" not in asked_for(read(file, None, Given(num_gpus=1, settings={"requires_grad": "false"})))


@pytest.mark.parametrize("body", TRAINED.values(), ids=TRAINED)
def test_what_is_frozen_elsewhere_is_no_question(tmp_path: Path, body: str) -> None:
    assert "requires_grad" not in asked_for(read(written(tmp_path, LOADED % ("", body), "tune.py"), None, Given(num_gpus=1)))


OWN_CLASS = """
import torch
%s
def train(model, data):
    settings = SFTConfig(per_device_train_batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters())
"""


@pytest.mark.parametrize("where", ["beside", "in it"])
def test_a_class_of_the_project_with_the_name_of_a_library_s_is_refused(tmp_path: Path, where: str) -> None:
    own = "class SFTConfig:\n    per_device_train_batch_size: int = 8\n"
    written(tmp_path, own, "pkg/config.py")
    text = OWN_CLASS % (own if where == "in it" else "from .config import SFTConfig")
    with pytest.raises(PlannerError, match="SFTConfig is not the one of TRL"):
        read(written(tmp_path, text, "pkg/sft.py"), "trl", Given(num_gpus=1))


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("torchrun --nproc_per_node 4 src/train.py --num_layers 8 --train_batch_size 1", "no word of LLaMA-Factory"),
        ("torchrun --nproc_per_node 8 -m training.train -- --scale 411m_1x --logs /tmp/logs", "no word of a training"),
        ("torchrun --nproc_per_node 4 own.py --hidden 8", "trains with Megatron Core"),
    ],
)
def test_programs_of_other_trainers_are_refused(tmp_path: Path, command: str, says: str) -> None:
    written(tmp_path, "from megatron.core import parallel_state\nimport torch\n", "own.py")
    reader = "llama-factory" if "src/train.py" in command else "transformers"
    with pytest.raises(PlannerError, match=says):
        read(written(tmp_path, f"{command}\n", "run.sh"), reader, Given())


def test_the_length_of_a_file_that_a_program_of_its_own_reads_is_asked_for(tmp_path: Path) -> None:
    text = "per_device_train_batch_size: 4\nbf16: true\ngradient_checkpointing: true\ndeepspeed: zero2\n"
    own = written(tmp_path, f"{text}precision: bf16\n")
    assert "--sequence-length S" in asked_for(read(own, "trl", Given(num_gpus=8)))
    assert "--sequence-length S" not in asked_for(read(own, "trl", Given(num_gpus=8, sequence_length=4096)))
    assert "--sequence-length S" not in asked_for(read(written(tmp_path, text), "trl", Given(num_gpus=8)))


def test_the_file_of_deepspeed_under_its_launcher_s_word_is_read(tmp_path: Path) -> None:
    written(tmp_path, '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}', "ds.json")
    command = "deepspeed --num_gpus=8 tune.py --deepspeed_config ds.json --model_name_or_path gpt2 --per_device_train_batch_size 12"
    found = read(written(tmp_path, f"{command} --block_size 1024\n", "run.sh"), None, Given())
    assert (found.trainer.partition("+")[0], found.fields["zero"]) == ("deepspeed", 2)


REGISTRY = """
from torchtitan.components.optimizer import default_adamw
def llama3_%s() -> Trainer.Config:
    return Trainer.Config(
        training=TrainingConfig(local_batch_size=1, seq_len=4096), parallelism=ParallelismConfig(tensor_parallel_degree=%d),
    )
"""


def test_which_function_and_what_it_leaves_open_are_one_question(tmp_path: Path) -> None:
    file = written(tmp_path, REGISTRY % ("one", 2) + REGISTRY % ("two", 4), "config_registry.py")
    with pytest.raises(OpenQuestionsError) as caught:
        read(file, "torchtitan", Given())
    assert [one.name for one in caught.value.questions][:2] == ["config", "--gpus N"]


TANGLED = """
from trl import SFTConfig, SFTTrainer
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", torch_dtype="bfloat16")
def one(args):
    other(args=args.inner)
def other(args):
    if args.deep:
        SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2, max_length=512), train_dataset=d).train()
    else:
        one(args=args.outer)
"""


def test_functions_that_give_each_other_their_arguments_are_read(tmp_path: Path) -> None:
    """Such a program ended the interpreter's stack."""
    assert read(written(tmp_path, TANGLED, "tune.py"), None, Given(num_gpus=1)).fields["micro_batch_size"] == 2


OWN_MODEL = """
def llama3_175m() -> Trainer.Config:
    return Trainer.Config(
        hf_assets_path="./assets/hf/Llama-3.1-8B", model_spec=%s,
        training=TrainingConfig(local_batch_size=1, seq_len=4096), parallelism=ParallelismConfig(tensor_parallel_degree=2),
    )
"""


@pytest.mark.parametrize(
    ("spec", "asked"), [("_own_registry()", True), ('model_registry("175M")', True), ('model_registry("8B")', False)]
)
def test_the_assets_of_a_tokenizer_are_no_model(tmp_path: Path, spec: str, asked: bool) -> None:
    """A project that builds a small model takes the tokenizer of a large one."""
    found = read(written(tmp_path, OWN_MODEL % spec, "config_registry.py"), "torchtitan", Given(num_gpus=8))
    assert (found.model is None) is asked


BY_SIZE = """
if [ "$SIZE" = "7b" ]; then MICRO=16; else MICRO=4; fi
torchrun --nproc_per_node 8 tune.py --model_name_or_path $BASE --per_device_train_batch_size $MICRO --bf16 --block_size 1024
"""


def test_a_batch_that_a_variable_decides_is_asked_for_by_that_variable_alone(tmp_path: Path) -> None:
    found = read(written(tmp_path, BY_SIZE, "run.sh"), "transformers", Given())
    assert "SIZE" in asked_for(found)
    assert "per_device_train_batch_size" not in asked_for(found)


OPEN_ADAPTERS = """
import argparse
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
args, training_args = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, torch_dtype=args.torch_dtype)
if args.adapted(model):
    model = get_peft_model(model, LoraConfig(r=args.lora_r, target_modules=args.lora_target_modules))
Trainer(model=model, args=training_args).train()
"""


def test_adapters_and_what_hangs_on_them_are_asked_for_together(tmp_path: Path) -> None:
    written(tmp_path, OPEN_ADAPTERS, "tune.py")
    command = "torchrun --nproc_per_node 8 tune.py --model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 1 --bf16\n"
    names = asked_for(read(written(tmp_path, command, "run.sh"), None, Given()))
    assert {"use_peft", "lora_target_modules", "torch_dtype"} <= set(names)


def test_optimizer_states_that_zenflow_splits_are_refused(tmp_path: Path) -> None:
    zero = '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"topk_ratio": 0.1}}}'
    written(tmp_path, zero, "ds.json")
    command = "deepspeed --num_gpus=2 tune.py --deepspeed ds.json --model_name_or_path gpt2 --per_device_train_batch_size 1\n"
    with pytest.raises(PlannerError, match="zenflow"):
        read(written(tmp_path, command, "run.sh"), None, Given())


BY_PLACE = """
HIDDEN=4096
SEQ=$1
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size $HIDDEN --num-attention-heads 32 --bf16 \\
  --seq-length $SEQ --max-position-embeddings $SEQ --micro-batch-size $2 --global-batch-size 64 --tokenizer-model ja.model \\
  --tokenizer-type SentencePieceTokenizer --tensor-model-parallel-size 2 --reuse-grad-buf-for-mxfp8-param-ag
"""


def test_words_behind_a_script_and_its_vocabulary_are_one_sentence(tmp_path: Path) -> None:
    """The length alone was open, so that the model could not be read and its tokenizer was asked about in a second sentence."""
    file = written(tmp_path, BY_PLACE, "run.sh")
    with pytest.raises(OpenQuestionsError) as caught:
        read(file, None, Given())
    assert [one.name for one in caught.value.questions] == ["ARGS", "vocab_size"]
    found = read(file, None, Given(settings={"ARGS": "2048 1", "vocab_size": "50000"}))
    assert (found.sequence_length, found.fields["micro_batch_size"], found.num_gpus) == (2048, 1, 16)


ELSEWHERE = """
import trl
from transformers import AutoModelForCausalLM
from project.experiment import load
job = load()
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", torch_dtype="bfloat16")
trl.DPOTrainer(model=model, %strain_dataset=job.data()).train()
"""


def test_the_arguments_of_a_trainer_that_another_module_makes_are_asked_for(tmp_path: Path) -> None:
    """Without a configuration in sight its defaults were taken; a trainer that is given none has them."""
    found = read(written(tmp_path, ELSEWHERE % "args=job.training_args, ", "tune.py"), None, Given(num_gpus=1))
    assert {"per_device_train_batch_size", "gradient_accumulation_steps", "max_length"} <= set(asked_for(found))
    assert "per_device_train_batch_size" not in asked_for(read(written(tmp_path, ELSEWHERE % "", "b.py"), None, Given(num_gpus=1)))


def test_names_that_are_not_known_are_listed_in_words(tmp_path: Path) -> None:
    program = PROGRAM % "        return model(**inputs).loss"
    text = program.replace("bf16=True)", "bf16=True, **{**{names().key: 1}})")
    assert not any("\ue000" in one for one in read(written(tmp_path, text, "tune.py"), None, Given(num_gpus=1)).unread)


def test_a_precision_in_keywords_that_are_not_followed_is_asked_for(tmp_path: Path) -> None:
    text = (PROGRAM % "        return model(**inputs).loss").replace("bf16=True)", "**precision_of(gpu))")
    assert "bf16" in asked_for(read(written(tmp_path, text, "tune.py"), None, Given(num_gpus=1)))


def test_a_training_on_cpus_is_refused(tmp_path: Path) -> None:
    text = BY_PLACE.replace("$2", "1").replace("$1", "1024").replace("--bf16", "--no-cuda --cpu-torch-adam")
    file = written(tmp_path, text, "run.sh")
    with pytest.raises(PlannerError, match="trains on CPUs"):
        read(file, None, Given())
    assert read(file, None, Given(settings={"no_cuda": "false", "vocab_size": "50000", "cpu_torch_adam": "false"})).num_gpus == 16
