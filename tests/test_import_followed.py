"""What the draw 25 of people's configurations showed: each test is one mechanism, with files of our own."""

from pathlib import Path

import pytest

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.given import Given, OpenQuestionsError

MEGATRON = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 "
    "--global-batch-size 16 --bf16"
)
TRAINER = (
    "--model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1 --gradient_accumulation_steps 4 --bf16 True "
    "--model_max_length 1024"
)


def _script(folder: Path, text: str, name: str = "run.sh") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_adapters_that_are_not_quantised_are_adapters(tmp_path: Path) -> None:
    words = f"accelerate launch --num_processes 1 -m tune.sft {TRAINER} --peft_method lora --lora_r 8 --use_qlora False"
    found = read(_script(tmp_path, words), None, Given(settings={"torch_dtype": "bfloat16", "lora_target_modules": "all-linear"}))
    assert (found.lora_rank, found.frozen_weights) == (8, "bf16")
    whole = f"accelerate launch --num_processes 1 -m tune.sft {TRAINER} --peft_method full --use_qlora False"
    assert read(_script(tmp_path, whole), None, Given()).lora_rank == 0


def test_a_script_behind_a_variable_says_what_it_starts(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    _script(tmp_path / "scripts", f"torchrun --nproc_per_node 4 train.py {TRAINER} --fsdp full_shard\n", "one.sh")
    text = 'ROOT="$(cd "$(dirname "$0")/.." && pwd)"\nfor S in 1 2; do bash "${ROOT}/scripts/one.sh" "$S"; done\n'
    found = read(_script(tmp_path / "scripts", text, "all.sh"), None, Given())
    assert (found.num_gpus, found.fields["zero"], found.fields["dp"]) == (4, 3, 4)


def test_a_model_that_a_program_of_megatron_bridge_builds_itself(tmp_path: Path) -> None:
    text = (
        "from megatron.bridge.training.config import ConfigContainer\n"
        "def create_config(model_id: str = 'Qwen/Qwen3-8B'):\n"
        "    bridge = AutoBridge.from_hf_pretrained(model_id)\n"
        "    provider = bridge.to_megatron_provider()\n"
        "    provider.tensor_model_parallel_size = 2\n"
        "    provider.pipeline_model_parallel_size = 2\n"
        "    provider.seq_length = 4096\n"
        "    train = TrainingConfig(micro_batch_size=2, global_batch_size=32)\n"
        "    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=USED)\n"
        "    return ConfigContainer(train=train, model=provider, ddp=ddp)\n"
    )
    file = _script(tmp_path, text.replace("USED", "True"), "own.py")
    found = read(file, None, Given(num_gpus=8))
    assert found.model is not None and found.model.name == "qwen3-8b" and found.sequence_length == 4096
    assert [found.fields[one] for one in ("tp", "pp", "dp", "zero", "micro_batch_size", "num_microbatches")] == [2, 2, 2, 1, 2, 8]
    file = _script(tmp_path, text.replace("ddp = ", "_ = ").replace("ddp=ddp", ""), "own.py")
    found = read(file, None, Given(num_gpus=8))
    assert found.fields["zero"] == 0 and "gradient_dtype=bf16" in found.trainer


def test_what_megatron_bridge_saved_with_a_checkpoint(tmp_path: Path) -> None:
    head = "_target_: megatron.bridge.training.config.ConfigContainer\n"
    text = (
        f"{head}mixed_precision: {{_target_: m.MixedPrecisionConfig, bf16: true, fp8: null, fp8_recipe: tensorwise}}\n"
        "model: {hf_model_id: Qwen/Qwen3-8B, num_layers: 36, hidden_size: 4096, tensor_model_parallel_size: 4, seq_length: 4096,\n"
        "  sequence_parallel: true, pipeline_model_parallel_size: 1, virtual_pipeline_model_parallel_size: null}\n"
        "train: {global_batch_size: 64, micro_batch_size: 2}\ndataset: {sequence_length: 4096}\n"
        "optimizer: {optimizer: adam, exp_avg_dtype: {_call_: false, _target_: torch.float32}}\n"
        "ddp: {use_distributed_optimizer: true, grad_reduce_in_fp32: true}\n"
        "peft: {_target_: megatron.bridge.peft.lora.LoRA, dim: 8}\n"
    )
    found = read(_script(tmp_path, text, "run_config.yaml"), None, Given(num_gpus=8))
    assert found.model is not None and found.model.name == "qwen3-8b" and (found.lora_rank, found.precision) == (8, "bf16")
    assert [found.fields[one] for one in ("tp", "dp", "micro_batch_size", "num_microbatches", "zero")] == [4, 2, 2, 16, 1]
    with pytest.raises(PlannerError, match="saved where weights were converted, not trained"):
        read(_script(tmp_path, f"{head}model: {{hf_model_id: Qwen/Qwen3-8B}}\ntrain: null\n", "run_config.yaml"), None, Given())


def test_a_backslash_at_the_very_end_of_a_script(tmp_path: Path) -> None:
    words = f"torchrun --nproc_per_node 2 train.py {TRAINER} --fsdp full_shard --use_liger_kernel \\"
    assert "loss=fused_linear" in read(_script(tmp_path, words), None, Given()).trainer


def test_frozen_weights_of_mlperf_in_fp8(tmp_path: Path) -> None:
    (tmp_path / "llama2_70b_lora").mkdir()
    values = {"DGXNNODES": 2, "DGXNGPU": 8, "MINIBS": 1, "TP": 4, "CP": 2, "FP8": True, "SP": 1, "MBS": 1}
    text = "".join(f"export {name}={value}\n" for name, value in values.items())
    file = _script(tmp_path / "llama2_70b_lora", text, "config_DGXH100_2x8x1xtp4pp1cp2.sh")
    with pytest.raises(OpenQuestionsError, match="--set FP8_PARAMS=True|False"):
        read(file, None, Given())
    for said, frozen in (("True", "fp8"), ("False", "bf16")):
        assert read(file, None, Given(settings={"FP8_PARAMS": said})).frozen_weights == frozen


def test_a_worker_that_a_script_writes_and_srun_starts(tmp_path: Path) -> None:
    text = (
        "#SBATCH --nodes=2\ncat > /home/me/worker.sh << 'EOT'\nif [ \"$NODE_RANK\" -eq 0 ]; then\n"
        f"  torchrun --nnodes 2 --nproc_per_node 8 train.py {TRAINER} --fsdp full_shard\n  CODE=$?\n"
        "  exit $CODE\nelse\n  exit $CODE\nfi\n"
        "EOT\nchmod +x /home/me/worker.sh\nsrun --ntasks-per-node=1 /home/me/worker.sh\n"
    )
    found = read(_script(tmp_path, text), None, Given())
    assert (found.num_gpus, found.fields["zero"]) == (16, 3)


def test_nemo_rl_by_the_command_that_starts_it(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "own.yaml").write_text(
        "policy:\n  model_name: Qwen/Qwen3-8B\n  train_global_batch_size: 32\n  train_micro_batch_size: 1\n"
        "  max_total_sequence_length: 2048\n  precision: bfloat16\n  dtensor_cfg: {enabled: true, tensor_parallel_size: 2}\n"
        "sft: {max_num_steps: 10}\ncluster: {gpus_per_node: 8, num_nodes: 1}\n"
    )
    words = "uv run examples/run_sft.py --config configs/own.yaml cluster.num_nodes=2 policy.train_micro_batch_size=2\n"
    found = read(_script(tmp_path, words), None, Given())
    assert [found.fields[one] for one in ("tp", "dp", "micro_batch_size", "num_microbatches")] == [2, 8, 2, 2]
    with pytest.raises(OpenQuestionsError, match="config_file=FILE"):
        read(_script(tmp_path, "uv run examples/run_sft.py --config elsewhere.yaml\n"), None, Given())


def test_layers_of_a_fork_of_torchtitan_are_refused(tmp_path: Path) -> None:
    text = (
        '[model]\nname = "llama3"\nflavor = "8B"\n[model.OWN]\nrank = 8\n[training]\nlocal_batch_size = 1\nseq_len = 2048\n'
        '[parallelism]\ndata_parallel_shard_degree = 8\n[activation_checkpoint]\nmode = "full"\n'
    )
    with pytest.raises(PlannerError, match="model.shared_attn decides memory .* --set model.shared_attn=false imports"):
        read(_script(tmp_path, text.replace("OWN", "shared_attn"), "a.toml"), None, Given())
    assert read(_script(tmp_path, text.replace("OWN", "tokens"), "a.toml"), None, Given()).num_gpus == 8


def test_the_vocabulary_of_the_file_goes_before_that_of_the_model_it_is_like(tmp_path: Path) -> None:
    from planner import api

    sizes = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 2048 --swiglu "
        "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 16 --bf16 --tensor-model-parallel-size 8"
    )
    file = _script(tmp_path, f"torchrun --nproc_per_node 8 pretrain_llama.py {sizes} --pad-vocab-size-to 50176\n")
    assert api.import_config(file, model="llama-2-7b").file.workload.model.vocab_size == 50176
    file = _script(tmp_path, f"torchrun --nproc_per_node 8 pretrain_llama.py {sizes} --pad-vocab-size-to 32128\n")
    assert api.import_config(file, model="llama-2-7b").file.workload.model.vocab_size == 32000


def test_a_program_that_imports_the_model_of_a_family(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    program = tmp_path / "finetune_own.py"
    file = _script(tmp_path, f"deepspeed --num_gpus 8 finetune_own.py {MEGATRON} --vocab-size 32000\n")
    program.write_text("from megatron.model import LlamaModel, LlamaModelPipe\n")
    with pytest.raises(OpenQuestionsError, match="finetune_own.py builds layers that its arguments do not tell"):
        read(file, None, Given())
    program.write_text("from megatron.model import GPTModel, GPTModelPipe\n")
    assert read(file, None, Given()).num_gpus == 8


def test_checkpointing_under_a_question_that_every_model_answers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from transformers import HfArgumentParser, Trainer, AutoModelForCausalLM\n"
        "def main(args):\n    model = AutoModelForCausalLM.from_pretrained(args.model)\n"
        "    if hasattr(model, 'gradient_checkpointing_enable'):\n        model.gradient_checkpointing_enable()\n"
        "    Trainer(model=model)\nmain(HfArgumentParser(A).parse_args())\n"
    )
    found = read(_script(tmp_path, f"torchrun --nproc_per_node 2 train.py {TRAINER} --fsdp full_shard\n"), None, Given())
    assert found.fields["recompute"] == 2


def test_the_configuration_of_verls_sft_trainer(tmp_path: Path) -> None:
    text = (
        "data:\n  train_batch_size: 64\n  micro_batch_size_per_gpu: 4\n  max_length: 2048\n"
        "model:\n  partial_pretrain: Qwen/Qwen3-8B\n"
        "  enable_gradient_checkpointing: False\n  lora_rank: 0\nulysses_sequence_parallel_size: 2\n"
    )
    found = read(_script(tmp_path, text, "sft_trainer.yaml"), None, Given(num_gpus=8))
    assert [found.fields[one] for one in ("cp", "dp", "micro_batch_size", "num_microbatches", "recompute")] == [2, 4, 4, 4, 0]


def test_which_starts_ms_swift_by_its_path(tmp_path: Path) -> None:
    words = "torchrun --nproc_per_node 2 $(which swift) sft --model Qwen/Qwen3-8B --train_type lora --max_length 1024\n"
    found = read(_script(tmp_path, words), None, Given())
    assert (found.trainer.partition("+")[0], found.num_gpus, found.lora_rank) == ("ms-swift", 2, 8)


def test_a_file_of_sizes_that_a_line_of_a_table_names(tmp_path: Path) -> None:
    sizes = {"num-layers": "num_layers", "hidden-size": "hidden", "num-attention-heads": "heads", "seq-length": "length"}
    words = " ".join(f"--{flag} $(yq '.training.{key}' $model_config)" for flag, key in sizes.items())
    text = (
        "IFS=',' read -r task model_config < <(sed \"${SLURM_ARRAY_TASK_ID}q;d\" <(tail -n +2 $1))\n"
        f"torchrun --nproc_per_node 4 pretrain_gpt.py {words} --max-position-embeddings 512 --micro-batch-size 1 "
        "--tokenizer-type HFTokenizer --tokenizer-model $TOKENIZER --bf16\n"
    )
    (tmp_path / "one.yaml").write_text("training: {num_layers: 4, hidden: 512, heads: 8, length: 512}\n")
    file = _script(tmp_path, text)
    with pytest.raises(OpenQuestionsError, match="--set model_config=VALUE .*; --set vocab_size=VALUE"):
        read(file, None, Given())
    found = read(file, None, Given(settings={"model_config": "one.yaml", "vocab_size": "32000"}))
    assert found.model is not None and (found.model.num_layers, found.sequence_length) == (4, 512)


def test_a_list_that_a_command_writes_is_not_counted(tmp_path: Path) -> None:
    start = f"torchrun --nproc_per_node 2 train.py {TRAINER} --fsdp full_shard"
    text = f'FOUND=($(ls -td out/*))\nif [ ${{#FOUND[@]}} -ge 2 ]; then\n  {start}\nfi\n'
    assert read(_script(tmp_path, text), None, Given()).num_gpus == 2


def test_an_unsloth_program_under_the_options_of_its_command(tmp_path: Path) -> None:
    (tmp_path / "tune.py").write_text(
        "import argparse\nfrom unsloth import FastLanguageModel\nfrom trl import SFTTrainer, SFTConfig\n"
        "parser = argparse.ArgumentParser()\nparser.add_argument('--model', default='unsloth/Qwen3-4B')\n"
        "parser.add_argument('--batch-size', type=int, default=2)\nparser.add_argument('--rank', type=int, default=16)\n"
        "parser.add_argument('--tokens', type=int, default=1024)\nargs = parser.parse_args()\n"
        "model, tok = FastLanguageModel.from_pretrained(model_name=args.model, max_seq_length=args.tokens, load_in_4bit=True)\n"
        "model = FastLanguageModel.get_peft_model(model, r=args.rank)\n"
        "SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=args.batch_size, gradient_accumulation_steps=4))\n"
    )
    words = "CUDA_VISIBLE_DEVICES=1 python -u tune.py --model unsloth/Qwen3-8B --batch-size 8 --rank 32 --tokens 512\n"
    found = read(_script(tmp_path, words), None, Given())
    assert found.model is not None and found.model.name == "qwen3-8b" and found.trainer.startswith("unsloth")
    assert (found.lora_rank, found.sequence_length, found.num_gpus) == (32, 512, 1)
    assert (found.fields["micro_batch_size"], found.fields["num_microbatches"]) == (8, 4)


def test_a_split_over_one_rank_is_none(tmp_path: Path) -> None:
    start = f"torchrun --nproc_per_node 2 train.py {TRAINER} --fsdp full_shard --sequence_parallel_size"
    assert read(_script(tmp_path, f"{start} 1\n"), None, Given()).num_gpus == 2
    with pytest.raises(PlannerError, match="sequence_parallel_size decides memory or degrees"):
        read(_script(tmp_path, f"{start} 8\n"), None, Given())


def test_hosts_of_deepspeed(tmp_path: Path) -> None:
    words = f"train.py {TRAINER} --deepspeed ds.json\n"
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    cases = {"--include a:0,1@b:0,1": 4, "--hostfile there": 16, "--hostfile elsewhere": None, "--num_gpus 4": 4}
    (tmp_path / "there").write_text("one slots=8\ntwo slots=8  # the second\n\n")
    for launcher, gpus in cases.items():
        text = f"export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7\ndeepspeed {launcher} {words}"
        assert read(_script(tmp_path, text), None, Given()).num_gpus == gpus, launcher
    lora = "deepspeed --hostfile elsewhere src/train.py --stage sft --finetuning_type lora --model_name_or_path Qwen/Qwen3-8B\n"
    found = read(_script(tmp_path, f"export CUDA_VISIBLE_DEVICES=0,1\n{lora}"), "llama-factory", Given())
    assert found.num_gpus is None


def test_simpo_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "model_name_or_path: Qwen/Qwen3-8B\nper_device_train_batch_size: 2\ngamma_beta_ratio: 1.6\nbeta: 2.0\n"
    file = _script(tmp_path, text, "config.yaml")
    monkeypatch.setattr("planner.trainers.reading.through", lambda *_: pytest.fail("no program of its project changes the step"))
    with pytest.raises(PlannerError, match="SIMPO is not modelled"):
        read(file, None, Given())


def test_a_vocabulary_of_another_model_is_asked_for(tmp_path: Path) -> None:
    start = f"torchrun --nproc_per_node 2 pretrain_gpt.py {MEGATRON} --merge-file merges.txt --vocab-file"
    with pytest.raises(OpenQuestionsError, match="'code-small/vocab.json' is a tokenizer that is not read"):
        read(_script(tmp_path, f"{start} /models/code-small/vocab.json\n"), None, Given())
    found = read(_script(tmp_path, f"{start} /models/gpt2-medium/vocab.json\n"), None, Given())
    assert found.model is not None and found.model.vocab_size == 50257


def test_a_masked_language_model_of_a_fork_of_torchtitan(tmp_path: Path) -> None:
    text = (
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nbatch_size = 1\nseq_len = 2048\nmlm_probability = 0.3\n'
        'data_parallel_shard_degree = 8\ntensor_parallel_degree = 2\n[activation_checkpoint]\nmode = "full"\n'
    )
    file = _script(tmp_path, text, "a.toml")
    with pytest.raises(PlannerError, match="mlm_probability makes it a masked language model"):
        read(file, None, Given())
    file.write_text(text.replace("mlm_probability = 0.3\n", ""))
    start = "srun torchrun --nnodes 2 --nproc_per_node 8 train.py --job.config_file a.toml"
    words = f"{start} --training.shuffle_seed $((RANDOM % 9))\n"
    found = read(_script(tmp_path, words), None, Given())  # degrees where they stood in 2024
    assert (found.fields["tp"], found.fields["dp"], found.num_gpus) == (2, 8, 16)


def test_a_moving_average_is_asked_about_and_refused_where_it_is_of_the_weights(tmp_path: Path) -> None:
    text = "model_name_or_path: Qwen/Qwen3-8B\nper_device_train_batch_size: 2\nbf16: true\ngradient_checkpointing: true\n"
    text += "ema_eta: 0.2\n"
    asked = read(_script(tmp_path, text, "config.yaml"), None, Given(settings={"fsdp": "full_shard"}, num_gpus=8)).questions
    assert [one.name for one in asked] == ["ema_eta"] and "second copy of the weights" in asked[0].about
    with pytest.raises(PlannerError, match="ema_eta decides memory"):
        read(_script(tmp_path, text, "config.yaml"), None, Given(settings={"fsdp": "full_shard", "ema_eta": "true"}, num_gpus=8))
    plain = text.replace("ema_eta", "schema_path")
    assert read(_script(tmp_path, plain, "config.yaml"), None, Given(settings={"fsdp": "full_shard"}, num_gpus=8)).num_gpus == 8


def test_processes_that_a_variable_says_are_not_those_of_the_file(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config: {fsdp_version: 2}\n"
    (tmp_path / "fsdp.yaml").write_text(text)
    start = f"train.py {TRAINER}\n"
    file = _script(tmp_path, f"accelerate launch --config_file fsdp.yaml --num_processes $WORLD_SIZE {start}")
    assert read(file, None, Given()).num_gpus is None
    assert read(_script(tmp_path, f"accelerate launch --config_file fsdp.yaml {start}"), None, Given()).num_gpus == 8


def test_a_key_that_is_off_twice_is_off(tmp_path: Path) -> None:
    text = "base_model: Qwen/Qwen3-8B\nadapter: qlora\nload_in_4bit: true\nlora_r: 8\nlora_target_linear: true\n"
    text += "micro_batch_size: 2\ngradient_accumulation_steps: 2\nsequence_len: 512\nbf16: true\n"
    text += "optimizer: adamw_torch\nflash_attention: true\n"
    given = Given(num_gpus=1)
    found = read(_script(tmp_path, f"lora_fan_in_fan_out: false\n{text}lora_fan_in_fan_out:\n", "a.yml"), "axolotl", given)
    assert found.lora_rank == 8
    with pytest.raises(PlannerError, match="'lora_r' is given twice"):
        read(_script(tmp_path, f"{text}lora_r: 16\n", "a.yml"), "axolotl", given)


def test_weights_that_were_converted_for_megatron_core(tmp_path: Path) -> None:
    words = (
        "NPROC_PER_NODE=8 megatron sft --load /models/Qwen3-30B-A3B-mcore --tensor_model_parallel_size 2 --sequence_parallel true "
        "--expert_model_parallel_size 8 --micro_batch_size 1 --global_batch_size 16 --max_length 4096 --bf16 true\n"
    )
    found = read(_script(tmp_path, words), None, Given())
    assert found.model is not None and found.model.name == "qwen3-30b-a3b"


def test_weights_on_the_host_are_for_stage_3_alone(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\ndeepspeed_config:\n  zero_stage: STAGE\n"
    text += "  offload_optimizer_device: cpu\n  offload_param_device: cpu\n"
    flags = "--use_deepspeed --num_processes 8 --offload_optimizer_device cpu --offload_param_device cpu --zero_stage"
    for stage, field in ((2, "offload_optimizer"), (3, "offload_parameters")):
        (tmp_path / "ds.yaml").write_text(text.replace("STAGE", str(stage)))
        for launcher in ("--config_file ds.yaml", f"{flags} {stage}"):
            found = read(_script(tmp_path, f"accelerate launch {launcher} train.py {TRAINER}\n"), None, Given())
            host = {name for name, value in found.fields.items() if name.startswith("offload") and value}
            assert (found.fields["zero"], host) == (stage, {field}), launcher


def test_the_answer_for_checkpointing_is_taken_wherever_it_is_asked(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("transformers==4.57.1\n")
    text = (
        "from trl import SFTConfig, SFTTrainer\nfrom transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-8B')\n"
        "SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2, bf16=True, max_length=512)).train()\n"
    )
    file = _script(tmp_path, text, "a.py")
    shared = {"fsdp": "no_shard"}
    assert [one.name for one in read(file, None, Given(settings=shared, num_gpus=1)).questions] == ["gradient_checkpointing"]
    for answer, recompute in (("true", 2), ("false", 0)):
        found = read(file, None, Given(settings={**shared, "gradient_checkpointing": answer}, num_gpus=1))
        assert (found.questions, found.fields["recompute"]) == ((), recompute)
    words = "python run_sft.py --model_name_or_path Qwen/Qwen3-8B --bf16 True --per_device_train_batch_size 1\n"
    found = read(_script(tmp_path, words), None, Given(settings={"gradient_checkpointing": "false"}))
    assert (found.questions, found.fields["recompute"]) == ((), 0)


def test_training_with_simulated_rounding_is_another_step(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="quantisation-aware training is not modelled"):
        read(_script(tmp_path, f"torchrun --nproc_per_node 2 finetune_qat.py {TRAINER} --fsdp full_shard\n"), None, Given())


def test_settings_that_stand_in_a_configuration_of_hydra(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    program = "import hydra\nfrom trl import DPOTrainer\n@hydra.main(config_path='conf')\ndef main(cfg):\n"
    program += "    DPOTrainer(cfg.trainer)\n"
    (tmp_path / "own" / "dpo.py").write_text(program)
    file = _script(tmp_path, "cd own\naccelerate launch --multi_gpu --num_processes 2 dpo.py --config-name=small\n")
    with pytest.raises(PlannerError, match="dpo.py takes its settings from 'small' of hydra"):
        read(file, None, Given())


def test_a_loss_over_attentions_is_another_step(tmp_path: Path) -> None:
    text = (
        "from trl import SFTConfig, SFTTrainer\nclass Own(SFTTrainer):\n    def compute_loss(self, model, inputs):\n"
        "        outputs = model(**inputs, output_attentions=True)\n        return outputs.loss\n"
        "args = SFTConfig(per_device_train_batch_size=2, bf16=True, gradient_checkpointing=True)\n"
        "Own(model='Qwen/Qwen3-8B', args=args).train()\n"
    )
    with pytest.raises(PlannerError, match="the loss of Own is over attentions or another model"):
        read(_script(tmp_path, text, "a.py"), None, Given(settings={"fsdp": "no_shard"}, num_gpus=1))
    plain = text.replace("output_attentions=True", "use_cache=False")
    found = read(_script(tmp_path, plain, "a.py"), None, Given(settings={"fsdp": "no_shard"}, num_gpus=1))
    assert found.fields["micro_batch_size"] == 2
