"""What practice on public fine-tuning configurations before draw 39 showed: short files of the same shape, each failed before."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.given import Given

SFT = """
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", dtype="bfloat16")
args = SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, gradient_checkpointing=True, max_length=2048,
                 bf16=True)
SFTTrainer(model=model, args=args, train_dataset=d, peft_config=LoraConfig(r=8, target_modules="all-linear")).train()
"""
COMMAND = "torchrun --nproc_per_node 2 tune.py --model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 2 --bf16 True\n"
OPTIONS = """
from transformers import HfArgumentParser, TrainingArguments, AutoModelForCausalLM
from trl import %sTrainer
args, training = HfArgumentParser((Own, TrainingArguments)).parse_args_into_dataclasses()
model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
%sTrainer(model=model, args=training).train()
"""


def test_the_trainer_that_a_program_builds_says_its_step(tmp_path: Path) -> None:
    """Whatever its folder is called: one named after a comparison with DPO, or after another step."""
    for folder in ("collapse-dpo", "grpo"):
        found = read(written(tmp_path, SFT, f"{folder}/tune.py"), None, Given(num_gpus=1))
        assert found.objective == "lm"
    for kind, step in (("SFT", "lm"), ("DPO", "dpo")):
        written(tmp_path, OPTIONS % (kind, kind), "collapse-dpo/tune.py")
        found = read(written(tmp_path, COMMAND, "collapse-dpo/run.sh"), None, Given(sequence_length=1024))
        assert found.objective == step


@pytest.mark.parametrize("kind", ["SequenceClassification", "Seq2SeqLM"])
def test_a_program_without_a_language_model_is_refused(tmp_path: Path, kind: str) -> None:
    text = SFT.replace("AutoModelForCausalLM", f"AutoModelFor{kind}")
    with pytest.raises(PlannerError, match=f"AutoModelFor{kind} is no language model"):
        read(written(tmp_path, text, "tune.py"), None, Given(num_gpus=1))


PREPARED = """
from peft import %(prepare)s, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", load_in_8bit=True, torch_dtype="float16")
model = get_peft_model(%(prepare)s(model), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
args = TrainingArguments(per_device_train_batch_size=2, fp16=True%(said)s)
Trainer(model=model, args=args, train_dataset=d).train()
"""


@pytest.mark.parametrize("said", ["", ", gradient_checkpointing=False"])
@pytest.mark.parametrize("prepare", ["prepare_model_for_int8_training", "prepare_model_for_kbit_training"])
def test_what_peft_switches_on_stays_on(tmp_path: Path, prepare: str, said: str) -> None:
    """The older name of the function, and arguments that say no: the trainer switches nothing off.  [peft, utils/other.py]"""
    file = written(tmp_path, PREPARED % {"prepare": prepare, "said": said}, "tune.py")
    found = read(file, None, Given(num_gpus=1, sequence_length=512))
    assert found.fields["recompute"] == 2
    made = OPTIONS % ("SFT", "SFT")
    written(tmp_path, f"{made}fewer = get_quantization_config(args)\nmodel = prepare_model_for_kbit_training(model)\n", "tune.py")
    found = read(written(tmp_path, COMMAND.replace("\n", " --gradient_checkpointing False\n"), "run.sh"), None, Given())
    assert found.fields["recompute"] == 2


HELPER = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
class Pairs(Trainer):
    def nll(self, model, batch):
        return model(**batch).loss
    def compute_loss(self, model, inputs):
        return self.nll(model, inputs["good"]) - %s
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B")
Pairs(model=model, args=TrainingArguments(per_device_train_batch_size=2, bf16=True), train_dataset=d).train()
"""


def test_passes_of_a_function_that_is_given_the_model_count(tmp_path: Path) -> None:
    said = Given(num_gpus=1, sequence_length=512)
    assert "compute_loss" in asked_for(read(written(tmp_path, HELPER % 'self.nll(model, inputs["bad"])', "tune.py"), None, said))
    frozen = read(written(tmp_path, HELPER % "self.nll(self.ref_model, inputs)", "tune.py"), None, said)
    assert "compute_loss" not in asked_for(frozen)


def test_answers_by_a_variable_of_the_program_are_read(tmp_path: Path) -> None:
    """And not listed as what the plan does not hold."""
    text = SFT.replace("r=8", 'r=cfg["my_rank"]').replace("max_length=2048", 'max_length=cfg["cut"]')
    found = read(written(tmp_path, text, "tune.py"), None, Given(num_gpus=1, settings={"my_rank": "16", "cut": "512"}))
    assert (found.lora_rank, found.sequence_length, found.unread) == (16, 512, ())


FORK = "torchrun --nproc_per_node=4 -m own.trainer.fsdp_sft_trainer data.max_length=5000 data.train_batch_size=128 "
FORK += "data.micro_batch_size_per_gpu=1 model.partial_pretrain=Qwen/Qwen2.5-7B model.enable_gradient_checkpointing=True"


def test_the_sft_trainer_of_a_fork_of_verl_is_read(tmp_path: Path) -> None:
    found = read(written(tmp_path, f"{FORK} trainer.kl_regularization.enabled=False\n", "run.sh"), None, Given())
    assert (asked_for(found), found.fields["num_microbatches"], found.sequence_length) == ([], 32, 5000)
    with pytest.raises(PlannerError, match="kl_regularization"):
        read(written(tmp_path, f"{FORK} trainer.kl_regularization.enabled=True\n", "run.sh"), None, Given())


def test_a_program_of_another_step_over_keys_of_verl_is_refused(tmp_path: Path) -> None:
    text = "accelerate launch -m own_sft.trainer.own_dpo_trainer actor_rollout_ref.model.path=Qwen/Qwen2.5-7B dpo.batch_size=16\n"
    with pytest.raises(PlannerError, match="its step is dpo by its name"):
        read(written(tmp_path, text, "run.sh"), None, Given())


def test_the_switch_and_the_file_of_deepspeed_itself(tmp_path: Path) -> None:
    """As its add_config_arguments has them; a program that never starts its engine is not sharded by a file."""
    written(tmp_path, '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}', "ds.json")
    written(tmp_path, "import deepspeed, torch\ndeepspeed.initialize(args=args, model=model)\n", "tune.py")
    command = COMMAND.replace("\n", " --max_length 512 --deepspeed --deepspeed_config ds.json\n")
    found = read(written(tmp_path, command, "run.sh"), None, Given())
    assert (asked_for(found), found.fields["zero"]) == ([], 2)
    written(tmp_path, "import deepspeed, torch\nloss.backward()\n", "tune.py")
    said = Given()
    read(tmp_path / "run.sh", None, said)
    assert "zero_stage" in [one.name for one in said.questions]


ELSEWHERE = """
from trl import SFTConfig, SFTTrainer
def make(model, data):
    args = SFTConfig(per_device_train_batch_size=2, gradient_checkpointing=True, bf16=True, max_length=512)
    return SFTTrainer(model=model, args=args, train_dataset=data)
make(build(), d).train()
"""


def test_adapters_that_another_module_makes_are_asked_about(tmp_path: Path) -> None:
    """With what hangs on them, in one message: a rank and targets were taken by default."""
    file = written(tmp_path, ELSEWHERE, "tune.py")
    asked = ["torch_dtype", "use_peft", "lora_r", "lora_target_modules", "--model NAME"]
    said = Given(num_gpus=1, settings={"fsdp": "no_shard"})
    assert sorted(asked_for(read(file, None, said)))[-4:] == sorted(asked)[-4:]
    answers = {"fsdp": "no_shard", "torch_dtype": "bfloat16", "use_peft": "false"}
    assert asked_for(read(file, None, Given(num_gpus=1, model="llama-8b", settings=answers))) == []
    said = Given(num_gpus=1, model="llama-8b", settings={**answers, "use_peft": "true"})
    assert asked_for(read(file, None, said)) == ["lora_r", "lora_target_modules"]


def test_the_trainer_of_unsloth_without_its_model_is_refused(tmp_path: Path) -> None:
    text = ELSEWHERE.replace("from trl", "from unsloth").replace("SFTConfig", "UnslothTrainingArguments")
    text = text.replace("SFTTrainer", "UnslothTrainer")
    with pytest.raises(PlannerError, match="import the program that calls FastLanguageModel"):
        read(written(tmp_path, text, "tune.py"), None, Given(num_gpus=1))


BY_KEYS = {
    "models.py": """
from unsloth import FastLanguageModel
def load(cfg):
    model, _ = FastLanguageModel.from_pretrained(model_name=cfg.model_name, max_seq_length=cfg.cut, load_in_4bit=True)
    return FastLanguageModel.get_peft_model(model, r=cfg.rank, target_modules=["q_proj", "v_proj"])
""",
    "config.py": """
import yaml
class Config:
    model_name: str = "Qwen/Qwen3-4B"
    cut: int = 512
    rank: int = 64
def load_config(path):
    cfg = Config()
    for key, value in yaml.safe_load(open(path)).items():
        setattr(cfg, key, value)
    return cfg
""",
    "tune.py": """
import argparse
from trl import SFTConfig, SFTTrainer
from models import load
from config import load_config
parser = argparse.ArgumentParser()
parser.add_argument("--config", required=True)
cfg = load_config(parser.parse_args().config)
args = SFTConfig(per_device_train_batch_size=cfg.micro, gradient_accumulation_steps=4, bf16=True, max_length=cfg.cut)
SFTTrainer(model=load(cfg), args=args, train_dataset=d).train()
""",
    "job.yaml": "model_name: unsloth/Qwen3-8B-bnb-4bit\nmicro: 2\nrank: 16\n",
}


def test_a_model_that_a_module_loads_by_a_file_of_settings(tmp_path: Path) -> None:
    """Put into an object key by key: what the file does not say keeps the default of its class."""
    for name, text in BY_KEYS.items():
        written(tmp_path, text, name)
    found = read(tmp_path / "job.yaml", None, Given())
    assert (asked_for(found), found.trainer, found.lora_rank, found.fields["micro_batch_size"]) == ([], "unsloth", 16, 2)
    assert (found.model_name, found.sequence_length) == ("unsloth/Qwen3-8B-bnb-4bit", 512)


def test_targets_that_a_function_lists_by_way_of_a_variable(tmp_path: Path) -> None:
    text = SFT.replace('"all-linear"', "names").replace("args =", "names = find_all_linear_names(model)\nargs =")
    found = read(written(tmp_path, text, "tune.py"), None, Given(num_gpus=1))
    assert (asked_for(found), found.lora_targets) == ([], "all")


@pytest.mark.parametrize("program", ["-m llamafactory.cli train", "src/llamafactory/cli.py train"])
def test_llama_factory_by_its_module(tmp_path: Path, program: str) -> None:
    """Read as a program of transformers it had no recompute, and its bits were refused."""
    command = f"FORCE_TORCHRUN=1 CUDA_VISIBLE_DEVICES=0,1 python {program} --stage sft --do_train --finetuning_type lora "
    words = "--model_name_or_path Qwen/Qwen3-8B --template qwen3 --quantization_bit 4 --cutoff_len 512 --bf16\n"
    found = read(written(tmp_path, command + words, "run.sh"), None, Given())
    assert (asked_for(found), found.num_gpus, found.fields["recompute"], found.frozen_weights) == ([], 2, 2, "nf4_dq")


ENGINE = "torchrun --nproc_per_node=${N} -m verl.trainer.sft_trainer data.train_batch_size=32 data.micro_batch_size_per_gpu=1 "
ENGINE += "data.max_length=512 model.path=Qwen/Qwen3-8B engine=fsdp "


@pytest.mark.parametrize(
    ("words", "fields"),
    [("engine.strategy=fsdp2 engine.reshard_after_forward=false", {"zero": 2}), ("engine.reshard_after_forward=false", {"zero": 3}),
     ("engine.strategy=fsdp2 engine.offload_policy=true", {"offload_parameters": 1}),
     ("engine.offload_policy=true", {"offload_parameters": 0}), ("engine.param_offload=true", {"zero": 3}),
     ("model.enable_activation_offload=true", {"offload_activations": 1})],
)  # fmt: skip
def test_the_engine_of_verls_sft_trainer(tmp_path: Path, words: str, fields: dict[str, int]) -> None:
    """These stood among what the plan does not hold."""
    found = read(written(tmp_path, f"N=8\n{ENGINE}{words}\n", "run.sh"), None, Given())
    assert fields.items() <= found.fields.items() and found.unread == ()
    assert read(written(tmp_path, f"N=8\n{ENGINE}engine.dtype=float16\n", "run.sh"), None, Given()).precision == "fp16"
    assert read(written(tmp_path, f"N=8\n{ENGINE}engine.fsdp_size=4\n", "run.sh"), None, Given()).fields["dp_shard"] == 4


def test_a_pattern_is_no_answer(tmp_path: Path) -> None:
    text = f'N=$(python count.py)\n[[ "$N" =~ ^[1-9][0-9]*$ ]] || exit 1\n{ENGINE.replace("=32", "=$((N * 2))")}\n'
    said = Given()
    read(written(tmp_path, text, "run.sh"), None, said)
    assert [one.choices for one in said.questions if one.name == "N"] == [()]


def test_settings_in_a_namespace_of_the_program(tmp_path: Path) -> None:
    text = SFT.replace("model = Auto", 'from types import SimpleNamespace\ncfg = SimpleNamespace(cut=256, micro=3)\nmodel = Auto')
    text = text.replace("max_length=2048", "max_length=cfg.cut").replace("batch_size=2", "batch_size=cfg.micro")
    found = read(written(tmp_path, text, "tune.py"), None, Given(num_gpus=1))
    assert (asked_for(found), found.sequence_length, found.fields["micro_batch_size"]) == ([], 256, 3)


@pytest.mark.parametrize("word", ["--pre_seq_len 128", "--num_virtual_tokens 20"])
def test_prefixes_that_are_trained_alone_are_refused(tmp_path: Path, word: str) -> None:
    """P-tuning of ChatGLM trains no weight of the model; it stood among what the plan does not hold."""
    file = written(tmp_path, COMMAND.replace("\n", f" --max_length 512 {word}\n"), "run.sh")
    with pytest.raises(PlannerError, match=word.split()[0].strip("-")):
        read(file, None, Given())


NEMO = """
policy:
  model_name: Qwen/Qwen3-0.6B
  train_global_batch_size: 128
  train_micro_batch_size: 4
  max_total_sequence_length: 1024
  precision: bfloat16
  dtensor_cfg: {enabled: true, tensor_parallel_size: 2}
cluster: {gpus_per_node: 4, num_nodes: 1}
"""


@pytest.mark.parametrize("command", ["uv run python", "uv run", "poetry run python"])
def test_a_program_that_a_package_manager_runs(tmp_path: Path, command: str) -> None:
    """With overrides of hydra and no option it was no command."""
    written(tmp_path, NEMO, "sft.yaml")
    file = written(tmp_path, f"{command} examples/run_sft.py policy.train_micro_batch_size=8 cluster.gpus_per_node=8\n", "run.sh")
    found = read(file, None, Given())
    assert (found.num_gpus, found.fields["micro_batch_size"], found.fields["tp"]) == (8, 8, 2)


SECTIONS = "sft_args: {model_name_or_path: Qwen/Qwen2.5-7B, load_in_4bit: true, max_seq_length: 512}\n"
SECTIONS += "lora: {r: 8, target_modules: all-linear}\n"
SECTIONS += "training_args: {per_device_train_batch_size: 8, gradient_checkpointing: true, bf16: true}\n"


def test_sections_of_a_program_beside_the_arguments_of_a_trainer(tmp_path: Path) -> None:
    """They were listed, or refused with an answer that imported the job without adapters."""
    with pytest.raises(PlannerError, match="its sections sft_args, lora say"):
        read(written(tmp_path, SECTIONS, "job.yaml"), None, Given(num_gpus=1))


TUNE = """
model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj], lora_rank: 8, lora_alpha: 16}
tokenizer:
  path: {{model_dir}}/tokenizer.model
  max_seq_len: 512
checkpointer:
  checkpoint_dir: {{model_dir}}
batch_size: %s
gradient_accumulation_steps: 8
optimizer: {_component_: torch.optim.AdamW}
dtype: bf16
enable_activation_checkpointing: true
"""


def test_places_of_a_template(tmp_path: Path) -> None:
    """What a template fills in is a text, and a question where it decides."""
    found = read(written(tmp_path, TUNE % "2", "job.yaml"), "torchtune", Given(num_gpus=1))
    assert (asked_for(found), found.fields["micro_batch_size"], found.sequence_length) == ([], 2, 512)
    said = Given(num_gpus=1)
    read(written(tmp_path, TUNE % "{{batch}}", "job.yaml"), "torchtune", said)
    assert [one.name for one in said.questions] == ["batch_size"]


COMPARED = """
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", dtype="bfloat16")
%s
args = DPOConfig(per_device_train_batch_size=2, gradient_checkpointing=True, max_length=1024, bf16=True)
DPOTrainer(model, ref_model, args=args, train_dataset=d, peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"])).train()
"""


def test_a_second_model_for_reference_beside_adapters_is_asked_about(tmp_path: Path) -> None:
    """Older TRL holds it, and newer wants force_use_ref_model; the reference of adapters is the frozen weights otherwise."""
    second = 'ref_model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B")'
    file = written(tmp_path, COMPARED % second, "tune.py")
    assert asked_for(read(file, None, Given(num_gpus=1))) == ["ref_model"]
    assert not read(file, None, Given(num_gpus=1, settings={"ref_model": "false"})).questions
    for none in ("ref_model = None", f"{second}\nlora = True\nif lora:\n    ref_model = None"):
        assert not read(written(tmp_path, COMPARED % none, "tune.py"), None, Given(num_gpus=1)).questions


@pytest.mark.parametrize("option", ["ds_config_path", "ds_config", "deepspeed_config_file"])
def test_a_file_of_deepspeed_by_a_name_of_the_program(tmp_path: Path, option: str) -> None:
    """A program that hands its engine the file itself."""
    written(tmp_path, STARTED % option, "tune.py")
    text = COMMAND.replace("\n", f" --gradient_accumulation_steps 1 --{option} conf/zero.json\n")
    found = read(written(tmp_path, text, "run.sh"), None, Given(sequence_length=1024))
    assert "deepspeed" in asked_for(found)
    written(tmp_path, '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}', "conf/zero.json")
    found = read(tmp_path / "run.sh", None, Given(sequence_length=1024))
    assert found.fields["zero"] == 3 and found.fields["offload_optimizer"] and not found.unread


STARTED = """
import deepspeed
from transformers import AutoModelForCausalLM
args = parser.parse_args()
model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
engine, *rest = deepspeed.initialize(model=model, config=args.%s)
"""
