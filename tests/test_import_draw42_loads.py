"""What forks of verl's SFT trainer load, which FSDP offloads, loops over files of settings, pairs without a reference model."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError

RUN = (
    "torchrun --nproc_per_node=2 -m verl.trainer.fsdp_sft_trainer data.train_batch_size=64 "
    "model.partial_pretrain=Qwen/Qwen3-0.6B {}\n"
)
CONFIG = """data: {{train_batch_size: 256, micro_batch_size_per_gpu: 4}}
model:
  {{partial_pretrain: none, enable_gradient_checkpointing: false, lora_rank: 0, {more}
    fsdp_config: {{{inner}cpu_offload: false, offload_params: false}}}}
optim: {{lr: 1e-5}}
trainer: {{total_epochs: 1}}
"""
TRAINER = """
class Trainer:
    def build(self):
        {before}
        self.model = AutoModelForCausalLM.from_pretrained(path, config=config, torch_dtype={dtype}, attn_implementation=kernel)
        if self.lora:
            self.model = get_peft_model(self.model, LoraConfig(**words))
            {cast}
"""
BY_MODEL = 'torch_dtype = to_dtype(self.config.model.get("torch_dtype", default))'
BY_FSDP = 'torch_dtype = self.config.model.fsdp_config.get("model_dtype", "fp32")'


def _verl(folder: Path, words: str, *, dtype: str = "torch_dtype", before: str = "pass", cast: str = "pass", more: str = "",
          inner: str = "") -> Reading:  # fmt: skip
    written(folder, TRAINER.format(dtype=dtype, before=before, cast=cast), "verl/trainer/fsdp_sft_trainer.py")
    written(folder, CONFIG.format(more=more, inner=inner), "verl/trainer/config/sft_trainer.yaml")
    return read(written(folder, RUN.format(words), "run.sh"))


@pytest.mark.parametrize(("trainer", "words", "precision", "said"), [
    ({"dtype": "torch.float32"}, "", "bf16", ""),
    ({"dtype": "torch.float32"}, "+model.fsdp_config.model_dtype=bf16", "bf16", "model_dtype is not read"),
    ({"dtype": "torch.bfloat16"}, "", "bf16_true", "loads torch.bfloat16"),
    ({"before": BY_MODEL, "more": "torch_dtype: bfloat16,"}, "", "bf16_true", "model.torch_dtype of the verl around"),
    ({"before": BY_MODEL, "more": "torch_dtype: bfloat16,"}, "++model.torch_dtype=float32", "bf16", ""),
    ({"before": BY_FSDP, "inner": "model_dtype: bfloat16, "}, "", "bf16_true", ""),
    ({"before": BY_FSDP, "inner": "model_dtype: fp32, "}, "model.fsdp_config.model_dtype=bf16", "bf16_true", ""),
])  # fmt: skip
def test_what_the_trainer_around_loads(tmp_path: Path, trainer: dict[str, str], words: str, precision: str, said: str) -> None:
    found = _verl(tmp_path, words, **trainer)
    notes = " ".join(found.notes)
    assert found.precision == precision and (said in notes if said else "verl around" not in notes)


def test_adapters_over_weights_of_16_bits_that_nobody_casts(tmp_path: Path) -> None:
    lora = "model.lora_rank=8"
    apart = _verl(tmp_path, lora, dtype="torch.float16")
    assert (apart.precision, apart.frozen_weights) == ("bf16", "bf16") and "priced as bf16" in " ".join(apart.notes)
    whole = _verl(tmp_path, lora, before=BY_FSDP, inner="model_dtype: bf16, ", cast="self.model = self.model.to(torch_dtype)")
    assert (whole.precision, whole.frozen_weights) == ("bf16_true", "bf16")


@pytest.mark.parametrize(("words", "host"), [
    ("model.fsdp_config.cpu_offload=True +model.strategy=fsdp", 0), ("model.fsdp_config.offload_params=True", 0),
    ("model.fsdp_config.cpu_offload=True model.fsdp_config.offload_params=True +model.strategy=fsdp", 1),
    ("model.fsdp_config.cpu_offload=True", 1),
])  # fmt: skip
def test_which_switches_offload_in_verls_sft(tmp_path: Path, words: str, host: int) -> None:
    assert _verl(tmp_path, words).fields["offload_parameters"] == host


RECIPE = """model_name_or_path: meta-llama/Meta-Llama-3-8B
torch_dtype: bfloat16
per_device_train_batch_size: {micro}
max_seq_length: 1024
bf16: true
"""
LOOP = """for part in facts stories; do
    accelerate launch --num_processes 8 scripts/run_cpt.py recipes/cpt_${part}.yaml --output_dir=out/$part
done
accelerate launch --num_processes 8 scripts/run_sft.py recipes/sft.yaml
"""
PROGRAM = "from trl import SFTTrainer\n\ntrainer = SFTTrainer(model=args.model_name_or_path, args=training_args)\ntrainer.train()\n"


def _looped(folder: Path, **settings: str) -> Reading:
    for name, micro in (("cpt_facts", 8), ("cpt_stories", 4), ("sft", 2)):
        written(folder, RECIPE.format(micro=micro), f"recipes/{name}.yaml")
    for name in ("cpt", "sft"):
        written(folder, PROGRAM, f"scripts/run_{name}.py")
    return read(written(folder, LOOP, "run.sh"), None, Given(settings=settings))


def test_a_loop_over_recipes_is_as_many_trainings(tmp_path: Path) -> None:
    assert asked_for(_looped(tmp_path))[:1] == ["which_training"]
    found = [_looped(tmp_path, which_training=one).fields["micro_batch_size"] for one in ("1", "2", "3")]
    assert found == [8, 4, 2]


def test_pairs_whose_trainer_takes_no_reference_model(tmp_path: Path) -> None:
    trainer = (
        "from transformers import Trainer\n\n\nclass OurDPOTrainer(Trainer):\n"
        "    def __init__(self, model=None, args=None, {more}tokenizer=None):\n        super().__init__(model=model, args=args)\n"
    )
    start = "from ours.trainer import OurDPOTrainer\n\ntrainer = OurDPOTrainer(model, args=training_args)\ntrainer.train()\n"
    written(tmp_path, RECIPE.format(micro=2) + "beta: 0.1\nmax_length: 1024\n", "recipes/dpo.yaml")
    written(tmp_path, start, "scripts/run_dpo.py")
    for more, objective in (("", "lm"), ("ref_model=None, ", "dpo")):
        written(tmp_path, trainer.format(more=more), "ours/trainer.py")
        script = written(tmp_path, "accelerate launch --num_processes 8 scripts/run_dpo.py recipes/dpo.yaml\n", "run.sh")
        assert read(script).objective == objective


QUANTISED = "load_in_8bit: true\nuse_peft: true\nlora_r: 8\nlora_target_modules: [q_proj, v_proj]\n"
ENGINE = "distributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: bf16\ndeepspeed_config: {zero_stage: 2%s}\n"


def test_deepspeed_brings_back_what_the_preparation_for_few_bits_casts(tmp_path: Path) -> None:
    file = written(tmp_path, RECIPE.format(micro=2) + QUANTISED, "sft.yaml")
    engine = written(tmp_path, ENGINE % ", bf16_enabled: true, offload_param_pin_memory: true", "zero2.yaml")
    cast = read(file, None, Given(num_gpus=2, settings={"accelerate": str(engine)}))
    plain = read(file, None, Given(num_gpus=2, settings={"fsdp": "no_shard"}))
    assert "unquantised" not in cast.trainer and ("unquantised" in plain.trainer or "casts them to fp32" in " ".join(plain.notes))
    assert not [one for one in cast.unread if "pin_memory" in one or "bf16_enabled" in one]


def test_the_distilled_model_whose_head_is_no_copy_of_its_embedding(tmp_path: Path) -> None:
    text = RECIPE.replace("meta-llama/Meta-Llama-3-8B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B").format(micro=1)
    found = read(written(tmp_path, text, "sft.yaml"), None, Given(num_gpus=1, settings={"fsdp": "no_shard"}))
    assert found.model is not None and not found.model.tied_embeddings


@pytest.mark.parametrize("launcher", ["accelerate launch", "python -m accelerate.commands.launch"])
def test_the_readme_of_a_project_launches_a_recipe_three_folders_below(tmp_path: Path, launcher: str) -> None:
    written(tmp_path, ENGINE % "", "recipes/engines/zero2.yaml")
    command = f"```\n{launcher} --config_file recipes/engines/zero2.yaml \\\n  scripts/run_sft.py {{}} --max_seq_length=4096\n```\n"
    for named, length in (("recipes/own/sft/config.yaml", 4096), ("recipes/other/sft/config.yaml", 1024), ("config.yaml", 1024)):
        written(tmp_path, command.format(named), "README.md")
        found = read(written(tmp_path, RECIPE.format(micro=2), "recipes/own/sft/config.yaml"))
        assert found.sequence_length == length and ("accelerate" in asked_for(found)) == (length == 1024)


CHOSEN = """from transformers import AutoModelForCausalLM
from trl import SFTTrainer


class OneTrainer(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        return model(**inputs).loss


class OtherTrainer(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        for name, param in model.named_parameters():
            if "facts" in name:
                param.requires_grad = False
        return model(**inputs).loss + model(**inputs["facts"]).loss


model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
model.add_adapter(get_peft_config(args), adapter_name="own")
trainer_class = {choice}
trainer = trainer_class(model=model, args=training_args)
trainer.train()
"""


@pytest.mark.parametrize(("choice", "asked"), [
    ("OneTrainer if args.one else OtherTrainer", ["compute_loss"]), ("OneTrainer", []), ("OtherTrainer", ["compute_loss"]),
])  # fmt: skip
def test_a_trainer_of_several_passes_that_a_variable_holds(tmp_path: Path, choice: str, asked: list[str]) -> None:
    written(tmp_path, RECIPE.format(micro=2) + "use_peft: true\nlora_r: 8\nlora_target_modules: [q_proj]\n", "recipes/sft.yaml")
    written(tmp_path, CHOSEN.replace("{choice}", choice), "scripts/run_sft.py")
    script = written(tmp_path, "accelerate launch --num_processes 8 scripts/run_sft.py recipes/sft.yaml\n", "run.sh")
    try:
        found = asked_for(read(script))
    except OpenQuestionsError as error:
        found = [one.name for one in error.questions]
    assert [one for one in found if one in ("compute_loss", "requires_grad")] == asked
