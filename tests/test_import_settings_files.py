"""Settings that Python scripts read from files of their own, and what else scripts of public projects showed."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import PlannerError
from planner.layout import Recompute
from planner.serving.readback.serve_reading import starts_servers
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given, OpenQuestionsError
from planner.trainers.reading.shell import evaluate

PROGRAM = """
import argparse, yaml
from pathlib import Path
from peft import LoraConfig
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

def load(path):
    with open(path) as file:
        return yaml.safe_load(file) or {}

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", DEFAULT)
    args = parser.parse_args()
    cfg = load(Path(args.config))
    OVERRIDE
    model = AutoModelForCausalLM.from_pretrained(cfg["model"]["name"], torch_dtype="bfloat16")
    if cfg["train"].get("checkpointing", False):
        model.gradient_checkpointing_enable()
    lora = LoraConfig(r=int(cfg["lora"]["r"]), target_modules=list(cfg["lora"]["targets"]), lora_dropout=0.0)
    arguments = TrainingArguments(bf16=cfg["train"].get("bf16", True), **cfg["trainer"])
    tokenizer(text, truncation=True, max_length=cfg["train"]["length"])
    Trainer(model=model, args=arguments).train()
"""
SETTINGS = """
model: {name: meta-llama/Llama-3.1-8B}
lora: {r: 24, targets: [q_proj, v_proj]}
train: {checkpointing: CHECKPOINTING, length: 1024}
trainer: {per_device_train_batch_size: 3, gradient_accumulation_steps: 4, learning_rate: 1.0e-4}
"""


DEFAULT = 'default="configs/a.yaml"'


def job(folder: Path, default: str = DEFAULT, override: str = "", checkpointing: str = "true", **given: str) -> Reading:
    (folder / "configs").mkdir(exist_ok=True)
    (folder / "configs" / "a.yaml").write_text(SETTINGS.replace("CHECKPOINTING", checkpointing))
    (folder / "train.py").write_text(PROGRAM.replace("DEFAULT", default).replace("OVERRIDE", override))
    return read(folder / "train.py", None, Given(num_gpus=1, settings=given))


def test_a_script_reads_its_settings_from_a_file(tmp_path: Path) -> None:
    found = job(tmp_path)
    assert found.model is not None and found.model.name == "llama-3.1-8b"
    assert (found.lora_rank, found.lora_targets, found.sequence_length, found.global_batch_size) == (24, "qv", 1024, 12)
    assert found.fields["recompute"] == int(Recompute.FULL)
    assert job(tmp_path, checkpointing="false").fields["recompute"] == int(Recompute.NONE), "under its condition"


def test_a_file_that_is_not_named_is_asked_for_with_the_model(tmp_path: Path) -> None:
    asked = r"say --set config_file=VALUE \(YAML, JSON or TOML that its program reads\); --model NAME \(only where"
    with pytest.raises(OpenQuestionsError, match=asked):
        to_plan(job(tmp_path, "required=True"))
    assert job(tmp_path, "required=True", config_file="configs/a.yaml").lora_rank == 24
    assert job(tmp_path, "required=True", config="configs/a.yaml").lora_rank == 24


def test_what_a_script_puts_over_its_file_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(OpenQuestionsError, match="--set r=VALUE"):
        to_plan(job(tmp_path, override='cfg["lora"]["r"] = choose()'))


@pytest.mark.parametrize(
    "text",
    [
        'env A=1 run --x 3 2>&1 | tail -5', '(cd x && env -u B run --x 3) | tee log', 'tmux new-session -d -s a "run --x 3"',
        'tmux send-keys -t a "cd x && run --x 3" C-m', "ROOT=${ROOT:?}\nbash ${ROOT}/scripts/inner.sh",
        "bash /elsewhere/project/scripts/inner.sh",
    ],
)  # fmt: skip
def test_ways_to_start_a_command(text: str, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "inner.sh").write_text("run --x 3\n")
    words = [one.words[-3:] for one in evaluate(text, "a.sh", {}, tmp_path).commands]
    assert ["run", "--x", "3"] in words


def test_a_command_of_torchtitan_names_a_function_of_the_repository(tmp_path: Path) -> None:
    folder = tmp_path / "torchtitan" / "models" / "llama3"
    folder.mkdir(parents=True)
    (folder / "config_registry.py").write_text(
        "def llama3_8b():\n    return Trainer.Config(hf_assets_path='./assets/hf/Llama-3.1-8B', training=TrainingConfig("
        "local_batch_size=1, seq_len=8192), parallelism=ParallelismConfig(), activation_checkpoint=FullAC.Config())\n"
    )
    script = tmp_path / "run.sh"
    script.write_text("torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config ${CONFIG:-llama3_8b}"
                      " --parallelism.tensor_parallel_degree 2\n")  # fmt: skip
    found = read(script, None, Given())
    assert found.model is not None and found.model.name == "llama-3.1-8b" and found.num_gpus == 8
    assert (found.fields["tp"], found.fields["dp"], found.sequence_length) == (2, 4, 8192)
    assert found.fields["recompute"] == int(Recompute.FULL)


def test_the_sft_trainer_of_verl_over_megatron(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "torchrun --nproc_per_node=16 -m verl.trainer.sft_trainer data.train_batch_size=48 data.micro_batch_size_per_gpu=1 "
        "data.use_dynamic_bsz=False data.max_length=4096 model.path=Qwen/Qwen3-32B engine=megatron "
        "engine.tensor_model_parallel_size=4 engine.pipeline_model_parallel_size=2 engine.context_parallel_size=2 "
        "+engine.override_transformer_config.recompute_granularity=full "
        "+optim.override_optimizer_config.optimizer_cpu_offload=true\n"
    )
    found = read(script, None, Given())
    assert [found.fields[one] for one in ("tp", "pp", "cp", "dp", "num_microbatches")] == [4, 2, 2, 1, 48]
    assert found.fields["offload_optimizer"] == 100 and found.trainer.startswith("megatron")
    script.write_text(script.read_text().replace("engine=megatron", "engine=fsdp").replace("engine.t", "engine.x_t"))
    assert read(script, None, Given()).trainer.startswith("verl")


def test_settings_over_a_recipe_that_is_not_named(tmp_path: Path) -> None:
    file = tmp_path / "over.yaml"
    file.write_text("model:\n  tensor_model_parallel_size: 2\ntrain:\n  train_iters: 20\n  global_batch_size: 8\n")
    with pytest.raises(OpenQuestionsError, match="--set recipe=VALUE"):
        to_plan(read(file, None, Given()))
    found = read(file, None, Given(num_gpus=8, settings={"recipe": "llama3_8b_pretrain_config"}))
    assert (found.fields["tp"], found.global_batch_size) == (2, 8)


def test_a_recipe_with_a_layout_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python run_recipe.py --recipe deepseek_v3_pretrain_1024gpu_h100_bf16_config\n")
    found = read(tmp_path / "run.sh", None, Given(num_gpus=2048))
    assert (found.fields["pp"], found.fields["first_stage_layers"], found.fields["last_stage_layers"]) == (16, 4, 1)


def test_a_step_of_ones_own_is_refused_by_its_word(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    text = "training_method: STEP\nper_device_train_batch_size: 4\nbase_model: meta-llama/Llama-3.1-8B\nbf16: true\n"
    file.write_text(text.replace("STEP", "REFUEL"))
    with pytest.raises(Exception, match="refuel is not modelled"):
        read(file, None, Given())
    file.write_text(text.replace("STEP", "DPO"))
    assert read(file, None, Given()).objective == "dpo"


def test_a_key_twice_with_one_value_is_no_mistake(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model_name_or_path: Qwen/Qwen3-8B\nbf16: true\nbf16: true\nper_device_train_batch_size: 1\n")
    assert read(file, None, Given()).precision == "bf16"
    file.write_text(file.read_text() + "bf16: false\n")
    with pytest.raises(Exception, match="'bf16' is given twice"):
        read(file, None, Given())


def test_a_class_keeps_the_settings_that_it_is_made_with(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
        "class Own:\n"
        "    def __init__(self, config):\n"
        "        self.config = config\n"
        "    def train(self):\n"
        "        self.model = AutoModelForCausalLM.from_pretrained(self.config['name'], torch_dtype='bfloat16')\n"
        "        arguments = TrainingArguments(per_device_train_batch_size=self.config['batch'], bf16=torch.cuda.is_available(),\n"
        "                                      gradient_accumulation_steps=self.config['steps'])\n"
        "        Trainer(model=self.model, args=arguments).train()\n"
        "Own({'name': 'Qwen/Qwen3-8B', 'batch': 3, 'length': 512}).train()\n"
    )
    given = Given(num_gpus=1, sequence_length=512, settings={"steps": "5"})
    found = read(tmp_path / "train.py", None, given)
    assert found.model is not None and found.model.name == "qwen3-8b" and found.precision == "bf16_true"
    assert (found.fields["micro_batch_size"], found.global_batch_size) == (3, 15), "what stands nowhere is answered by its key"


def test_adapters_on_some_layers_are_refused(tmp_path: Path) -> None:
    text = ("from unsloth import FastLanguageModel\nfrom trl import SFTTrainer, SFTConfig\n"
            "model, tokenizer = FastLanguageModel.from_pretrained(model_name='unsloth/Qwen3-8B', max_seq_length=512)\n"
            "model = FastLanguageModel.get_peft_model(model, r=8, layers_to_transform=[30, 31])\n"
            "SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2)).train()\n")  # fmt: skip
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(Exception, match="layers_to_transform decides memory or degrees and is not priced"):
        read(tmp_path / "train.py", None, Given())
    assert read(tmp_path / "train.py", None, Given(settings={"layers_to_transform": "false"})).lora_rank == 8


def test_values_that_a_script_asks_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "model.yaml").write_text("training: {num_layers: 24, rope: null}\n")
    text = "F=./configs/model.yaml\nL=$(yq '.training.num_layers' $F)\n"
    text += "H=$(cat Llama-3.3-70B-Instruct/config.json | jq -r '.hidden_size')\n"
    words = evaluate(f"{text}run --layers $L --hidden $H", str(tmp_path / "a.sh"), {}, tmp_path).commands[-1].words
    assert words == ["run", "--layers", "24", "--hidden", "8192"]
    unknown = evaluate("L=$(yq '.a' nothing.yaml)\nrun --layers $L", str(tmp_path / "a.sh"), {}, tmp_path).commands[-1].words
    assert unknown[-1] != "24"


def test_weights_in_fp8_are_refused_without_the_distributed_optimizer(tmp_path: Path) -> None:
    sizes = ("--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
             "--micro-batch-size 1 --global-batch-size 8 --vocab-size 32000 --swiglu --bf16 --fp8-param-gather")  # fmt: skip
    (tmp_path / "a.sh").write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {sizes} --fp8-format hybrid\n")
    with pytest.raises(Exception, match="--set fp8_param_gather=False imports the job without it"):
        read(tmp_path / "a.sh", None, Given())
    whole = f"torchrun --nproc_per_node 8 pretrain_gpt.py {sizes} --fp8-format hybrid --use-distributed-optimizer\n"
    (tmp_path / "a.sh").write_text(whole)
    found = read(tmp_path / "a.sh", None, Given())
    assert ("fp8_param_gather=on" in found.trainer, found.precision, found.fields["zero"]) == (True, "fp8", 1)
    (tmp_path / "a.sh").write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {sizes}\n")
    assert read(tmp_path / "a.sh", None, Given()).precision == "bf16"


def test_a_recipe_that_is_built_of_functions_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a_1b.py").write_text(
        "LENGTH: int = 8192\n"
        "def model_config(tensor_parallelism: int = 1, context_parallelism: int = 1):\n"
        "    return QwenModelProvider1B(tensor_model_parallel_size=tensor_parallelism, context_parallel_size=context_parallelism)\n"
        "def pretrain_config(tensor_parallelism: int = 2, global_batch_size: int = 64, precision_config='bf16_mixed'):\n"
        "    model_cfg = model_config(tensor_parallelism=tensor_parallelism)\n"
        "    cfg = ConfigContainer(model=model_cfg, mixed_precision=precision_config,\n"
        "        dataset=GPTDatasetConfig(sequence_length=LENGTH),\n"
        "        train=TrainingConfig(global_batch_size=global_batch_size, micro_batch_size=2))\n"
        "    return cfg\n"
        "# megatron.bridge recipes\n"
    )
    said = Given(num_gpus=8, model="qwen2.5-1.5b")
    found = read(tmp_path / "a_1b.py", "megatron-bridge", said)
    assert [found.fields[one] for one in ("tp", "cp", "dp", "micro_batch_size", "num_microbatches")] == [2, 1, 4, 2, 8]
    assert found.sequence_length == 8192
    (tmp_path / "b.py").write_text(
        "from recipes import a_1b\n"
        "def pretrain_config(context_parallelism: int = 4):\n"
        "    config = a_1b.pretrain_config(context_parallelism=context_parallelism, micro_batch_size=1)\n"
        "    return config\n"
    )
    found = read(tmp_path / "b.py", "megatron-bridge", Given(num_gpus=8, model="qwen2.5-1.5b"))
    assert (found.fields["tp"], found.fields["cp"], found.fields["micro_batch_size"], found.global_batch_size) == (2, 4, 1, 64)


def test_a_launcher_that_a_branch_puts_before_a_command(tmp_path: Path) -> None:
    file = tmp_path / "a.sh"
    file.write_text(
        'for one in $*; do if [[ $one == --bind* ]]; then BIND=${one#*=}; fi; done\nDP=$((WORLD / 2))\n'
        'APP="python3 -u pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 512 '
        '--max-position-embeddings 512 --micro-batch-size 1 --tensor-model-parallel-size 2 --bf16 --vocab-size 32000 '
        '--world-size ${WORLD} --global-batch-size $((8 * DP))"\n'
        'if [[ $profiling == torch ]]; then APP+=" --profile"; elif [[ $profiling == other ]]; then APP="prof -d x ${APP}"; fi\n'
        "${BIND} ${APP}\n"
    )
    found = read(file, None, Given(settings={"WORLD": "8"}))
    assert (found.fields["tp"], found.num_gpus, found.global_batch_size) == (2, 8, 32)


def test_a_launcher_does_not_hide_what_its_program_is_told(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    command = "accelerate launch --multi_gpu --num_processes 8 train.py --model_name_or_path Qwen/Qwen2.5-7B --bf16 True \\\n"
    file = tmp_path / "a.sh"
    words = "  --per_device_train_batch_size 1 --model_max_length 2048 --deepspeed ~/project/configs/ds.json"
    file.write_text(command + words)
    found = read(file, None, Given(settings={"use_peft": "false"}))
    assert (found.fields["zero"], found.num_gpus) == (3, 8)


def test_a_batch_script_with_another_ending_goes_to_its_own_reader(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "model_name_or_path: Qwen/Qwen2.5-7B\nstage: sft\nfinetuning_type: full\nenable_liger_kernel: true\nbf16: true\n"
        "cutoff_len: 8192\n"
    )
    file = tmp_path / "a.sbatch"
    file.write_text(
        "python scripts/watch.py --cutoff_len 10 --train_accuracy_batch_size 2 &\n"
        "accelerate launch --num_processes 4 src/train.py a.yaml per_device_train_batch_size=2 deepspeed=zero3\n"
    )
    found = read(file, None, Given(settings={"deepspeed": "zero3"}))
    assert (found.num_gpus, found.fields["zero"], found.fields["micro_batch_size"]) == (4, 3, 2)
    assert "fused_linear" in found.trainer and not found.unread


def test_the_length_that_an_older_llama_factory_takes(tmp_path: Path) -> None:
    words = "--stage sft --model_name_or_path meta-llama/Llama-2-7b-hf --do_train --finetuning_type lora --lora_target all --fp16"
    file = tmp_path / "a.sh"
    file.write_text(f"CUDA_VISIBLE_DEVICES=0 python src/train_bash.py {words}")
    assert read(file, None, Given(num_gpus=1)).sequence_length == 1024
    place = tmp_path / "src" / "llmtuner" / "hparams"
    place.mkdir(parents=True)
    (place / "data_args.py").write_text("class A:\n    cutoff_len: Optional[int] = field(\n        default=512,\n    )\n")
    assert read(file, None, Given(num_gpus=1)).sequence_length == 512


def test_a_quantised_model_without_adapters_is_not_trained(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "from unsloth import FastLanguageModel\nfrom trl import SFTTrainer, SFTConfig\n"
        "model, tokenizer = FastLanguageModel.from_pretrained(model_name='unsloth/Llama-3.2-3B-Instruct', load_in_4bit=True)\n"
        "SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2, max_length=512)).train()\n"
        "print('vllm serve it')\n"
    )
    with pytest.raises(PlannerError, match="loads its model quantised and makes no adapters"):
        read(file)
    assert not starts_servers(file)


def test_sections_of_a_fork_of_torchtitan_are_named(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(
        "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nlocal_batch_size = 2\nseq_len = 2048\n[freezing]\nfreeze = true\n"
        "[activation_checkpoint]\nmode = 'none'\n"
        "[parallelism]\ndata_parallel_shard_degree = 4\n"
    )
    assert "freezing" in " ".join(read(file).notes)


def test_a_program_of_its_own_with_overrides_of_verl_behind_its_options(tmp_path: Path) -> None:
    file = tmp_path / "a.sh"
    file.write_text(
        "python3 scripts/train.py --condition $CONDITION data.train_batch_size=64 data.max_prompt_length=512 "
        "data.max_response_length=512 actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B "
        "actor_rollout_ref.actor.ppo_mini_batch_size=64 "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 actor_rollout_ref.rollout.n=4 custom.path=a/b.py "
        "trainer.n_gpus_per_node=4 trainer.nnodes=1\n"
    )
    found = read(file)
    assert (found.num_gpus, found.fields["micro_batch_size"], found.global_batch_size) == (4, 2, 256)


def test_gpus_that_a_script_shows_behind_its_training(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model_name_or_path: Qwen/Qwen2.5-7B\nstage: sft\nfinetuning_type: full\ndeepspeed: z3.json\n")
    file = tmp_path / "a.sh"
    file.write_text("FORCE_TORCHRUN=1 llamafactory-cli train a.yaml\nexport CUDA_VISIBLE_DEVICES=0\npython -m lm_eval --model hf\n")
    assert read(file, None, Given(settings={"deepspeed": "zero3"})).num_gpus is None
    file.write_text("export CUDA_VISIBLE_DEVICES=0,1\n" + file.read_text())
    assert read(file, None, Given(settings={"deepspeed": "zero3"})).num_gpus == 2


def test_the_method_of_a_program_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "a.sh"
    words = "accelerate launch --num_processes 1 -m mine.train --base_model Qwen/Qwen2.5-7B --per_device_train_batch_size 1 --bf16 "
    file.write_text(words + "--max_seq_len 1024 --peft_method pissa")
    with pytest.raises(PlannerError, match="pissa is not modelled"):
        read(file)
    file.write_text(words + "--max_seq_len 1024 --peft_method lora --lora_r 8 --lora_target_modules q_proj,v_proj")
    assert read(file, None, Given(num_gpus=1, settings={"torch_dtype": "bfloat16"})).lora_rank == 8


def test_a_model_that_something_else_makes_may_have_adapters(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "from transformers import Trainer, TrainingArguments\nfrom mine import build\n_ = TrainingArguments('.')\nmodel = build()\n"
        "args = TrainingArguments('out', per_device_train_batch_size=3, gradient_checkpointing=True, bf16=True)\n"
        "Trainer(model=model, args=args).train()\n"
    )
    open_ = read(file, None, Given(num_gpus=1, model="qwen2.5-7b", sequence_length=1024)).questions
    assert [one.name for one in open_] == ["use_peft", "torch_dtype", "lora_r", "lora_target_modules"]
    said = {"use_peft": "false", "torch_dtype": "float32"}
    found = read(file, None, Given(num_gpus=1, model="qwen2.5-7b", sequence_length=1024, settings=said))
    assert found.fields["micro_batch_size"] == 3 and found.fields["recompute"] == Recompute.FULL
