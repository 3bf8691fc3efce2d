"""What import reads since draw 31: files that an engine takes, words of forks, launchers; with files of our own."""

import json
from pathlib import Path

import pytest
from import_files import written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import to_plan
from planner.trainers.reading.given import Given, OpenQuestionsError

MEGATRON = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --vocab-size 32000 "
    "--micro-batch-size 2 --global-batch-size 16 --deepspeed --deepspeed_config ds.json"
)
FACTORY = (
    "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: lora\ncutoff_len: 1024\nper_device_train_batch_size: 2\n"
    "gradient_accumulation_steps: 4\nbf16: true\n"
)


def _asked(file: Path, given: Given | None = None) -> str:
    with pytest.raises(OpenQuestionsError) as error:
        read(file, None, given or Given())
    return str(error.value)


def test_the_file_of_deepspeed_decides_for_megatron_deepspeed(tmp_path: Path) -> None:
    words = f"torchrun --nproc_per_node 8 pretrain_gpt.py {MEGATRON}"
    file = written(tmp_path, f"{words} --bf16", "run.sh")
    assert "--set deepspeed_config=FILE (DeepSpeed's, it is 'ds.json', which is not there" in _asked(file)
    assert read(file, None, Given(settings={"zero_stage": "2"})).fields["zero"] == 2
    flag = read(written(tmp_path, f"{words} --bf16 --zero-stage 3", "b.sh"), None, Given())
    assert flag.fields["zero"] == 3 and any("configuration is not there: nothing is offloaded" in one for one in flag.notes)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    written(tmp_path, json.dumps({"zero_optimization": zero, "fp16": {"enabled": True}}), "ds.json")
    found = read(file, None, Given())
    assert (found.precision, found.fields["zero"], found.fields["offload_optimizer"]) == ("fp16", 2, 100)
    assert any("fp16 by DeepSpeed's configuration, which goes before --bf16" in one for one in found.notes)
    written(tmp_path, json.dumps({"train_batch_size": 64, "zero_optimization": {"stage": 1}}), "ds.json")
    assert "--global-batch-size B (DeepSpeed's configuration says 64, --global-batch-size 16)" in _asked(file)
    assert read(file, None, Given(global_batch_size=64)).global_batch_size == 64


@pytest.mark.parametrize("there", [True, False])
def test_a_file_of_deepspeed_that_sed_makes_of_a_template(tmp_path: Path, there: bool) -> None:
    if there:
        text = '{"train_batch_size": BATCH, "zero_optimization": {"stage": ZERO_STAGE}, "fp16": {"enabled": HALF}}'
        written(tmp_path, text, "template.json")
    edit = 'sed "s/BATCH/16/" template.json | sed "s/ZERO_STAGE/${STAGE}/" | sed "s#HALF#true#g" > ds.json'
    file = written(tmp_path, f"STAGE=1\n{edit}\ntorchrun --nproc_per_node 8 pretrain_gpt.py {MEGATRON} --fp16\n", "run.sh")
    assert read(file, None, Given()).fields["zero"] == 1


def test_resource_sets_of_jsrun_are_gpus(tmp_path: Path) -> None:
    launcher = "jsrun --nrs 6 --tasks_per_rs 1 --gpu_per_rs 1 --rs_per_host 6"
    file = written(tmp_path, f"{launcher} python pretrain_gpt.py {MEGATRON} --fp16", "run.sh")
    found = read(file, None, Given(settings={"zero_stage": "0"}))
    assert found.num_gpus == 6 and not any("rs" in one for one in found.unread)


def test_a_gated_layer_of_a_fork_is_refused(tmp_path: Path) -> None:
    words = f"torchrun --nproc_per_node 8 pretrain_gpt.py {MEGATRON} --zero-stage 0 --fp16"
    with pytest.raises(PlannerError, match="--swi-glu decides memory"):
        read(written(tmp_path, f"{words} --swi-glu", "run.sh"), None, Given())
    assert read(written(tmp_path, f"{words} --no-bias-swiglu-fusion", "run.sh"), None, Given()).num_gpus == 8


def test_deepspeed_of_a_recipe_goes_before_fsdp_of_its_launcher(tmp_path: Path) -> None:
    written(tmp_path, "distributed_type: FSDP\nnum_processes: 4\nfsdp_config:\n  fsdp_offload_params: true\n", "fsdp.yaml")
    written(tmp_path, json.dumps({"zero_optimization": {"stage": 2}}), "ds.json")
    accelerate = "# accelerate launch --config_file fsdp.yaml src/train.py OTHER/a.yaml\n"
    own = f"{FACTORY}deepspeed: ds.json\n"
    launched = read(written(tmp_path, own + accelerate.replace("OTHER", "full"), "full/a.yaml"), None, Given())
    assert (launched.trainer, launched.fields["zero"], launched.num_gpus) == ("deepspeed", 2, 4)
    here = "# FORCE_TORCHRUN=1 llamafactory-cli train full/a.yaml 2>&1 | tee log\n"
    other = read(written(tmp_path, own + here + accelerate.replace("OTHER", "lora"), "full/a.yaml"), None, Given())
    assert other.num_gpus is None and other.trainer == "deepspeed"


def test_unsloth_of_llama_factory_keeps_activations_on_the_host(tmp_path: Path) -> None:
    found = read(written(tmp_path, f"{FACTORY}use_unsloth: true\n", "a.yaml"), None, Given(num_gpus=1))
    assert found.fields["offload_activations"] == 1 and not found.questions
    without = f"{FACTORY}use_unsloth: true\ndisable_gradient_checkpointing: true\n"  # unsloth is told to all the same
    assert read(written(tmp_path, without, "a.yaml"), None, Given(num_gpus=1)).fields["offload_activations"] == 1


def test_a_switch_of_a_fork_of_llama_factory_is_a_question(tmp_path: Path) -> None:
    file = written(tmp_path, f"{FACTORY}use_fisher: true\nuse_swanlab: true\n", "a.yaml")
    assert [one.name for one in read(file, None, Given(num_gpus=1)).questions] == ["use_fisher"]
    assert not read(file, None, Given(num_gpus=1, settings={"use_fisher": "false"})).questions


TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
[parallelism]
tensor_parallel_degree = 2
"""


def test_eight_bits_of_a_fork_of_torchtitan_are_refused(tmp_path: Path) -> None:
    own = TITAN.replace("[parallelism]", "te_float8_autocast = FLAG\n[parallelism]")
    with pytest.raises(PlannerError, match="training.te_float8_autocast decides memory"):
        read(written(tmp_path, own.replace("FLAG", "true"), "a.toml"), None, Given(num_gpus=8))
    assert read(written(tmp_path, own.replace("FLAG", "false"), "a.toml"), None, Given(num_gpus=8)).precision == "bf16"


def test_what_a_loop_decides_is_one_question_each(tmp_path: Path) -> None:
    written(tmp_path, TITAN, "a.toml")
    loop = (
        'for AC in none full; do for NAME in plain low; do\nif [ $NAME == "low" ]; then\n  MORE="--model.converters=float8"\n'
        'else\n  MORE="--training.compile"\nfi\ntorchrun --nproc_per_node 8 train.py --job.config_file a.toml $MORE '
        "--activation_checkpoint.mode $AC\ndone; done\n"
    )
    file = written(tmp_path, loop, "run.sh")
    assert {one.split("=")[0] for one in _asked(file).split("--set ")[1:]} == {"NAME", "AC"}
    found = read(file, None, Given(settings={"NAME": "low", "AC": "none"}))
    assert (found.precision, found.num_gpus) == ("fp8", 8)


def test_arguments_of_a_trainer_that_nothing_trains_with(tmp_path: Path) -> None:
    text = (
        "from transformers import AutoModelForCausalLM, TrainingArguments\n"
        "model = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-8B')\n"
        "optimizer = make_optimizer(model, TrainingArguments(output_dir='a', learning_rate=1e-5))\n"
    )
    with pytest.raises(PlannerError, match="builds arguments of a trainer and starts no training"):
        read(written(tmp_path, text, "look.py"), None, Given(num_gpus=1))


def test_the_rank_of_adapters_as_peft_calls_it(tmp_path: Path) -> None:
    text = "model_name_or_path: Qwen/Qwen3-8B\nper_device_train_batch_size: 1\nmax_length: 1024\nbf16: true\nuse_peft: true\nr: 4\n"
    file = written(tmp_path, f"{text}gradient_checkpointing: true\ngradient_accumulation_steps: 1\n", "sft.yaml")
    assert read(file, None, Given(num_gpus=1)).lora_rank == 4


TRAIN = (
    "--model_name_or_path Qwen/Qwen3-8B --gradient_accumulation_steps 4 --bf16 True --model_max_length 1024 --deepspeed zero2 "
    "--gradient_checkpointing True"
)
LORA = "--stage sft --do_train --finetuning_type lora --model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 2 --bf16"


def test_options_by_their_beginnings_are_taken_as_argparse_takes_them(tmp_path: Path) -> None:
    program = (
        "from transformers import HfArgumentParser, Trainer, TrainingArguments\nHfArgumentParser((TrainingArguments,))\n"
        "Trainer()\n"
    )
    written(tmp_path, program, "train.py")
    file = written(tmp_path, f"deepspeed --num_gpus 4 train.py {TRAIN} --per_device_train_batch 2\n", "run.sh")
    found = read(file, None, Given())
    assert (found.fields["micro_batch_size"], found.global_batch_size) == (2, 32)
    written(tmp_path, f"{program}per_device_train_batch = 'another option'\n", "train.py")
    assert read(file, None, Given()).fields["micro_batch_size"] == 8


def test_a_model_class_of_the_project_is_asked_for(tmp_path: Path) -> None:
    written(tmp_path, "class Qwen3ForCausalLM(Base):\n    pass\n", "layers.py")
    program = (
        "from transformers import HfArgumentParser, Trainer, TrainingArguments\nfrom WHERE import Qwen3ForCausalLM\n"
        "args = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()[0]\n"
        "Trainer(model=Qwen3ForCausalLM.from_pretrained(args.model_name_or_path), args=args).train()\n"
    )
    file = written(tmp_path, f"deepspeed --num_gpus 4 train.py {TRAIN} --per_device_train_batch_size 2\n", "run.sh")
    written(tmp_path, program.replace("WHERE", "layers"), "train.py")
    assert "train.py builds Qwen3ForCausalLM of its project" in _asked_later(file)
    assert not read(file, None, Given(model="qwen3-8b")).questions
    written(tmp_path, program.replace("WHERE", "transformers"), "train.py")
    assert not read(file, None, Given()).questions


def _asked_later(file: Path) -> str:
    return "; ".join(str(one) for one in read(file, None, Given()).questions)


def test_the_vocabulary_of_gpt2_is_not_taken_for_another_tokenizer(tmp_path: Path) -> None:
    words = (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 40 --hidden-size 5120 --num-attention-heads 40 --seq-length 2048 "
        "--max-position-embeddings 2048 --micro-batch-size 4 --global-batch-size 64 --bf16 --tokenizer-type KIND"
    )
    other = written(tmp_path, words.replace("KIND", "GPTSentencePieceTokenizer"), "run.sh")
    assert "GPTSentencePieceTokenizer is not GPT-2's, whose 50257 gpt3-13b" in _asked(other)
    found = read(written(tmp_path, words.replace("KIND", "GPT2BPETokenizer"), "b.sh"), None, Given())
    assert found.model is not None and found.model.vocab_size == 50257


def test_the_length_of_an_older_llama_factory_than_the_one_beside_it(tmp_path: Path) -> None:
    written(tmp_path, "    cutoff_len: int = field(\n    default=2048,\n)\n", "src/llm/hparams/data_args.py")
    file = written(tmp_path, f"CUDA_VISIBLE_DEVICES=0 python src/train_bash.py {LORA}\n", "run.sh")
    written(tmp_path, "", "src/train.py")
    assert read(file, None, Given()).sequence_length == 1024
    written(tmp_path, "", "src/train_bash.py")
    assert read(file, None, Given()).sequence_length == 2048


def test_gpus_of_a_launcher_and_gpus_shown_that_disagree_are_asked_for(tmp_path: Path) -> None:
    yaml = "distributed_type: MULTI_GPU\nnum_machines: MACHINES\nnum_processes: 16\nmixed_precision: bf16\n"
    command = f"CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch --config_file a.yaml src/train.py {LORA}\n"
    written(tmp_path, yaml.replace("MACHINES", "2"), "a.yaml")
    file = written(tmp_path, command, "run.sh")
    assert "--gpus N (16 by its launcher, 8 on a node, and 4 are shown to it)" in _asked_later(file)
    written(tmp_path, yaml.replace("MACHINES", "4"), "a.yaml")
    assert read(file, None, Given()).num_gpus == 16


def test_the_first_of_several_trainings_is_named_in_a_note(tmp_path: Path) -> None:
    written(tmp_path, FACTORY, "a.yaml")
    written(tmp_path, FACTORY.replace("stage: sft", "stage: dpo"), "b.yaml")
    both = "torchrun --nproc_per_node 4 src/train.py a.yaml\ntorchrun --nproc_per_node 4 src/train.py b.yaml\n"
    file = written(tmp_path, both, "run.sh")
    assert "of 2 commands that train, the first is read" in read(file, None, Given()).notes


def test_words_that_decide_memory_are_refused_in_every_front_end(tmp_path: Path) -> None:
    axolotl = "base_model: Qwen/Qwen3-8B\nadapter: lora\nmicro_batch_size: 2\nsequence_len: 1024\nlora_target_linear: true\n"
    file = written(tmp_path, f"{axolotl}peft_use_dora: true\n", "axolotl.yaml")
    with pytest.raises(PlannerError, match="peft_use_dora decides memory"):
        read(file, "axolotl", Given(num_gpus=1))
    known = "quantize_moe_experts: true\nmodel_quantization_config: Mxfp4Config\nmodel_quantization_config_kwargs:\n  dequantize: "
    assert read(written(tmp_path, f"{axolotl}{known}true\n", "axolotl.yaml"), "axolotl", Given(num_gpus=1)).lora_rank == 8
    with pytest.raises(PlannerError, match="model_quantization_config decides|model_quantization_config.* decide"):
        read(written(tmp_path, f"{axolotl}{known}false\n", "axolotl.yaml"), "axolotl", Given(num_gpus=1))


def test_a_file_that_merges_adapters_trains_nothing(tmp_path: Path) -> None:
    text = "model_name_or_path: Qwen/Qwen3-8B\nadapter_name_or_path: saves\nfinetuning_type: lora\nexport_dir: out\n"
    with pytest.raises(PlannerError, match="export_dir without do_train"):
        read(written(tmp_path, text, "export.yaml"), "llama-factory", Given(num_gpus=1))
    assert read(written(tmp_path, f"{text}do_train: true\n", "a.yaml"), "llama-factory", Given(num_gpus=1)).lora_rank == 8


def test_weights_alone_on_the_host_by_a_name_of_axolotl(tmp_path: Path) -> None:
    text = "base_model: Qwen/Qwen3-8B\nmicro_batch_size: 2\nsequence_len: 1024\ndeepspeed: deepspeed_configs/NAME\n"
    file = written(tmp_path, text.replace("NAME", "zero3_bf16_cpuoffload_params.json"), "axolotl.yaml")
    with pytest.raises(PlannerError, match="keeps weights on the host and states on the GPU"):
        read(file, "axolotl", Given(num_gpus=8))
    file = written(tmp_path, text.replace("NAME", "zero3_bf16_cpuoffload_all.json"), "axolotl.yaml")
    assert read(file, "axolotl", Given(num_gpus=8)).fields["offload_parameters"] == 1


def test_settings_of_a_program_of_its_own_are_no_recipe_of_trl(tmp_path: Path) -> None:
    text = "model: Qwen/Qwen3-8B\nper_device_train_batch_size: 2\nmax_length: 1024\nlearning_rate: 1e-5\nloss: sft\n"
    with pytest.raises(PlannerError, match="it says model where a recipe of TRL says model_name_or_path"):
        read(written(tmp_path, text, "sft.yaml"), "trl", Given(num_gpus=1))


def test_llama3_of_torchtitan_has_a_head_of_its_own_while_configurations_are_toml(tmp_path: Path) -> None:
    text = TITAN.replace("8B", "1B").replace("tensor_", "pipeline_")
    text = text.replace('"llama3"', '"llama3"\ntokenizer_path = "Llama-3.2-1B"')
    found = read(written(tmp_path, text, "a.toml"), None, Given(num_gpus=8))
    assert found.model is not None and not found.model.tied_embeddings
    assert to_plan(found, {"hardware": "h100-sxm"}).layout.pp == 2
    other = text.replace('"llama3"', '"qwen3"').replace("Llama-3.2-1B", "Qwen3-1.7B").replace("1B", "1.7B")
    tied = read(written(tmp_path, other, "b.toml"), None, Given(num_gpus=8))
    assert tied.model is not None and tied.model.tied_embeddings


def test_a_job_of_a_scheduler_is_no_recipe_of_trl(tmp_path: Path) -> None:
    text = "target:\n  name: cluster\njobs:\n- name: a\n  command:\n  - accelerate launch sft.py --per_device_train_batch_size 2\n"
    with pytest.raises(PlannerError, match="the job of a scheduler that starts 'accelerate launch'"):
        read(written(tmp_path, text, "job.yaml"), "trl", Given(num_gpus=8))


def test_the_first_of_several_trainings_is_named_for_programs_too(tmp_path: Path) -> None:
    words = "--model_name_or_path Qwen/Qwen3-8B --max_length 1024 --bf16 --per_device_train_batch_size"
    for program in ("sft.py", "own.py"):
        file = written(tmp_path, "".join(f"torchrun --nproc_per_node 4 {program} {words} {n}\n" for n in (1, 2)), "run.sh")
        assert "of 2 commands that train, the first is read" in read(file, None, Given()).notes


def test_accumulation_over_a_pipeline_of_torchtitan_is_several_passes(tmp_path: Path) -> None:
    text = TITAN.replace("tensor_", "pipeline_").replace("local_batch_size = 1", "local_batch_size = 8\nglobal_batch_size = SIZE")
    one = f"{text}pipeline_parallel_schedule = 'NAME'\ndata_parallel_shard_degree = 2\n".replace("SIZE", "16")
    assert not read(written(tmp_path, one.replace("NAME", "GPipe"), "a.toml"), None, Given()).notes
    four = one.replace("= 16", "= 64")
    notes = read(written(tmp_path, four.replace("NAME", "1F1B"), "a.toml"), None, Given()).notes
    assert any("a step is 4 passes of the pipeline with 8 microbatches each" in said for said in notes)
    with pytest.raises(PlannerError, match="GPipe keeps activations of all microbatches of a pass"):
        read(written(tmp_path, four.replace("NAME", "GPipe"), "a.toml"), None, Given())
