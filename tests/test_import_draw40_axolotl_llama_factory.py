"""What files of people with axolotl and LLaMA-Factory showed: short files of the same shape, each failed before."""

import json
from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.layout import CpMethod
from planner.trainers.reading import read
from planner.trainers.reading.given import Given

AXOLOTL = (
    "base_model: Qwen/Qwen3-8B\ndatasets: [{path: a}]\nsequence_len: 2048\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n"
    "optimizer: adamw_8bit\n"
)
FACTORY = (
    "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\ndo_train: true\nfinetuning_type: full\ncutoff_len: 2048\ntemplate: qwen3\n"
    "per_device_train_batch_size: 2\nbf16: true\n"
)
PLUGINS = (
    "plugins:\n  - axolotl.integrations.liger.LigerPlugin\n  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin\n"
    "liger_fused_linear_cross_entropy: true\n"
)


@pytest.mark.parametrize(("kind", "states"), [("AdamW", "adam"), ("Lion", "lion"), ("OneBitAdam", "adam")])
def test_the_optimizer_of_deepspeed_counts(tmp_path: Path, kind: str, states: str) -> None:
    """transformers builds that of the arguments where the configuration of DeepSpeed names none."""
    zero = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}
    written(tmp_path, json.dumps({**zero, "optimizer": {"type": kind, "params": {"lr": "auto"}}}), "ds.json")
    found = read(written(tmp_path, AXOLOTL + "deepspeed: ds.json\n"), None, Given(num_gpus=4))
    assert found.optimizer == states
    assert f"the optimizer {kind.lower()} of DeepSpeed's configuration counts" in " ".join(found.notes)
    written(tmp_path, json.dumps(zero), "ds.json")
    assert read(tmp_path / "job.yaml", None, Given(num_gpus=4)).optimizer == "adam_8bit"


def test_a_loss_kernel_writes_no_logits_where_none_are_read(tmp_path: Path) -> None:
    assert "loss=fused_linear" in read(written(tmp_path, AXOLOTL + PLUGINS), None, Given(num_gpus=1)).trainer
    found = read(written(tmp_path, AXOLOTL + PLUGINS + "rl: dpo\n"), None, Given(num_gpus=1))
    assert (found.objective, "loss=" in found.trainer) == ("dpo", False)


def test_a_plugin_that_is_on_by_itself(tmp_path: Path) -> None:
    text = AXOLOTL + "flash_attention: true\nplugins: [axolotl.integrations.densemixer.DenseMixerPlugin]\n"
    with pytest.raises(PlannerError, match="every token through all experts is not modelled"):
        read(written(tmp_path, text), None, Given(num_gpus=1))
    found = read(written(tmp_path, text.replace("adamw_8bit", "adamw_torch") + "dense_mixer: false\n"), None, Given(num_gpus=1))
    assert found.notes == ()


def test_no_of_yaml_is_no_distribution(tmp_path: Path) -> None:
    written(tmp_path, "distributed_type: NO\nmixed_precision: bf16\nnum_processes: 1\n", "one.yaml")
    found = read(written(tmp_path, FACTORY + "# accelerate launch --config_file one.yaml src/train.py job.yaml\n"), None, Given())
    assert (found.num_gpus, found.fields["zero"], asked_for(found)) == (1, 0, [])


def test_a_program_that_the_shell_looks_for(tmp_path: Path) -> None:
    written(tmp_path, FACTORY + "fp8: true\n")
    written(tmp_path, "distributed_type: MULTI_GPU\nmixed_precision: fp8\nnum_processes: 4\n", "four.yaml")
    command = "accelerate launch --config_file four.yaml $(which llamafactory-cli) train job.yaml\n"
    found = read(written(tmp_path, command, "run.sh"), None, Given())
    assert (found.trainer, found.precision, found.num_gpus, found.global_batch_size) == ("llama-factory", "fp8", 4, 8)


@pytest.mark.parametrize("more", ["", "do_eval: true\n", "do_analysis: true\n"])
def test_a_file_that_trains_nothing_is_refused(tmp_path: Path, more: str) -> None:
    text = FACTORY.replace("do_train: true", "do_train: false") + more
    with pytest.raises(PlannerError, match="nothing is trained; --set do_train=true"):
        read(written(tmp_path, text), None, Given(num_gpus=1))


def test_products_in_8_bits_over_weights_in_16_are_named(tmp_path: Path) -> None:
    found = read(written(tmp_path, FACTORY.replace("bf16", "pure_bf16") + "fp8: true\n"), None, Given(num_gpus=1))
    assert (found.precision, "fp8 with weights in 16 bits" in " ".join(found.notes)) == ("bf16_true", True)


@pytest.mark.parametrize(("mode", "ring"), [("", True), ("sequence_parallel_mode: ulysses\n", False)])
def test_sequences_that_a_fork_cuts(tmp_path: Path, mode: str, ring: bool) -> None:
    text = FACTORY + f"sequence_parallel_size: 4\n{mode}deepspeed: ds_z3_config.json\n"
    found = read(written(tmp_path, text), None, Given(num_gpus=8))
    cut = {one: found.fields[one] for one in ("cp", "cp_method", "dp")}
    assert (cut, found.global_batch_size) == ({"cp": 4, "cp_method": int(CpMethod.A2A), "dp": 2}, 4)
    assert ("zigzag-ring over DeepSpeed is priced as Ulysses" in " ".join(found.notes), asked_for(found)) == (ring, [])


def test_a_configuration_of_deepspeed_that_its_script_writes(tmp_path: Path) -> None:
    """Its stage is no stage of LLaMA-Factory, and no file of axolotl's of that name is meant."""
    written(tmp_path, AXOLOTL + "deepspeed: deepspeed_configs/zero3.json\n")
    engine = json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, indent=2)
    script = f"if [ ! -f d ]; then\ncat > deepspeed_configs/zero3.json << 'EOF'\n{engine}\nEOF\nfi\n"
    script += "accelerate launch --num_processes 4 -m axolotl.cli.train job.yaml\n"
    found = read(written(tmp_path, script, "run.sh"), None, Given())
    assert (found.fields["zero"], found.fields["offload_optimizer"], found.num_gpus) == (3, 100, 4)


def test_a_file_that_comes_with_the_trainer_is_named(tmp_path: Path) -> None:
    found = read(written(tmp_path, AXOLOTL + "deepspeed: deepspeed_configs/zero3.json\n"), None, Given(num_gpus=4))
    assert "zero3.json is not there: taken as the file of that name which comes with its trainer" in found.notes


@pytest.mark.parametrize(("named", "targets"), [
    (r"'.*self_attn.*(q|k|v|o)_proj'", "attention"), (r"'.*\.(q_proj|v_proj)$'", "qv"),
    (r"'.*(self_attn|mlp).(up|gate|q|o)_proj'", "all"),
])  # fmt: skip
def test_layers_that_an_expression_names(tmp_path: Path, named: str, targets: str) -> None:
    text = AXOLOTL + f"adapter: lora\nlora_r: 8\nlora_target_modules: {named}\n"
    assert read(written(tmp_path, text), None, Given(num_gpus=1)).lora_targets == targets


def test_words_of_fsdp_go_before_its_section(tmp_path: Path) -> None:
    text = AXOLOTL + "fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}\n"
    assert read(written(tmp_path, text), None, Given(num_gpus=4)).fields["zero"] == 3


@pytest.mark.parametrize(("part", "note"), [
    ({"data_types": {"grad_accum_dtype": "fp32"}}, "gradients are priced in 16 bits"),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "states are priced in fp32"),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, ""),
])  # fmt: skip
def test_dtypes_of_states_that_deepspeed_is_told(tmp_path: Path, part: dict[str, object], note: str) -> None:
    written(tmp_path, json.dumps({"zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}, **part}), "ds.json")
    found = read(written(tmp_path, AXOLOTL + "flash_attention: true\ndeepspeed: ds.json\n"), None, Given(num_gpus=4))
    assert (note in " ".join(found.notes), bool(found.notes)) == (True, bool(note))


def test_groups_smaller_than_all_ranks_are_refused(tmp_path: Path) -> None:
    written(tmp_path, json.dumps({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}), "ds.json")
    with pytest.raises(PlannerError, match="mics_shard_size: hierarchical partitions"):
        read(written(tmp_path, AXOLOTL + "deepspeed: ds.json\n"), None, Given(num_gpus=8))


SECTIONS = "model: Qwen/Qwen3-0.6B\nmodel_class: llm\ntrain_dataset: a\nmicro_batch_size: 1\ndist_config: {name: fsdp2}\n"
OVER_MEGATRON = FACTORY + "tensor_model_parallel_size: 2\npipeline_model_parallel_size: 2\nuse_distributed_optimizer: true\n"


@pytest.mark.parametrize(("text", "asked"), [
    (SECTIONS + "gradient_accumulation_steps: 4\n", ["gradient_accumulation_steps"]),
    (SECTIONS + "dist_config_of_mine: 2\n", ["dist_config_of_mine"]), (SECTIONS, []), (OVER_MEGATRON, []),
    (OVER_MEGATRON + "num_layers_in_first_pipeline_stage: 10\n", ["num_layers_in_first_pipeline_stage"]),
    (OVER_MEGATRON + "use_megatron_fsdp: true\nexp_avg_dtype: bf16\n", ["use_megatron_fsdp", "exp_avg_dtype"]),
])  # fmt: skip
def test_words_that_a_parser_does_not_take_are_asked_for(tmp_path: Path, text: str, asked: list[str]) -> None:
    assert asked_for(read(written(tmp_path, text), None, Given(num_gpus=8))) == asked


def test_what_plugins_say_besides(tmp_path: Path) -> None:
    text = SECTIONS + "flash_attn: flash_attention_3\npeft_config: {name: lora, adapter_name_or_path: x}\n"
    said = " ".join(read(written(tmp_path, text), None, Given(num_gpus=8)).notes)
    assert "attention by flash_attention_3 is priced" in said and "adapters go on from there" in said
    with pytest.raises(PlannerError, match="a classifier is no language model"):
        read(written(tmp_path, SECTIONS.replace("model_class: llm", "model_class: cls")), None, Given(num_gpus=8))


def test_a_comment_that_starts_the_file_says_how_it_is_launched(tmp_path: Path) -> None:
    text = "# usage:\n#   llamafactory-cli train configs/job.yaml\n" + FACTORY + "train_size: 0.8\n"
    assert asked_for(read(written(tmp_path, text), None, Given())) == []
    assert asked_for(read(written(tmp_path, FACTORY), None, Given())) == ["accelerate"]


@pytest.mark.parametrize(("command", "gpus", "batch"), [
    ("axolotl train job.yaml --launcher torchrun -- --nproc_per_node=2 --nnodes=2", 4, 32),
    ("axolotl train job.yaml --num-processes 4", 4, 32), ("CUDA_VISIBLE_DEVICES=0,1 axolotl train job.yaml", 2, 16),
    ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch scripts/finetune.py job.yaml", 2, 16),
    ("CUDA_VISIBLE_DEVICES=0,1 python -m axolotl.cli.train job.yaml", None, 8),
])  # fmt: skip
def test_processes_of_axolotl(tmp_path: Path, command: str, gpus: int | None, batch: int) -> None:
    written(tmp_path, AXOLOTL)
    found = read(written(tmp_path, command + "\n", "run.sh"), None, Given())
    assert (found.num_gpus, found.global_batch_size, found.unread) == (gpus, batch, ())


def test_which_trainer_llama_factory_takes_stands_in_the_environment(tmp_path: Path) -> None:
    written(tmp_path, FACTORY)
    found = read(written(tmp_path, "USE_MCA=1 NPROC_PER_NODE=8 llamafactory-cli train job.yaml\n", "run.sh"), None, Given())
    assert (found.trainer.partition("+")[0], asked_for(found)) == ("megatron", ["use_distributed_optimizer"])
    written(tmp_path, OVER_MEGATRON)
    with pytest.raises(PlannerError, match="over Megatron-Bridge is not read"):
        read(written(tmp_path, "export USE_MEGATRON_BRIDGE=1\nllamafactory-cli train job.yaml\n", "run.sh"), None, Given())


def test_a_word_over_the_file_that_names_another(tmp_path: Path) -> None:
    written(tmp_path, FACTORY)
    script = written(tmp_path, "llamafactory-cli train job.yaml deepspeed=examples/deepspeed/ds_z3_config.json\n", "run.sh")
    assert read(script, None, Given(num_gpus=4)).fields["zero"] == 3
    assert read(written(tmp_path, "lmf train job.yaml\n", "run.sh"), None, Given(num_gpus=4)).fields["zero"] == 0


def test_what_deepspeed_has_not_is_said_at_once(tmp_path: Path) -> None:
    """Before, after an answer to the first message."""
    found = read(written(tmp_path, FACTORY + "fp8: true\ndeepspeed: ds_z2_config.json\n"), None, Given())
    assert (found.precision, "fp8 of deepspeed is priced with products in bf16" in " ".join(found.notes)) == ("bf16", True)
    with pytest.raises(PlannerError, match="optimizer muon is not modelled over deepspeed"):
        read(written(tmp_path, FACTORY + "use_muon: true\ndeepspeed: ds_z2_config.json\n"), None, Given())


@pytest.mark.parametrize(("more", "precision", "states"), [
    ("adafactor: true\n", "bf16", "adafactor"), ("fp8_enable_fsdp_float8_all_gather: true\n", "fp8", "adam"),
    ("fsdp: full_shard\n", "bf16", "adam"),
])  # fmt: skip
def test_arguments_that_switch_others(tmp_path: Path, more: str, precision: str, states: str) -> None:
    found = read(written(tmp_path, FACTORY + more), None, Given(num_gpus=4))
    assert (found.precision, found.optimizer) == (precision, states)


def test_weights_in_16_bits_stay_so_without_mixed_precision(tmp_path: Path) -> None:
    text = FACTORY.replace("bf16: true", "pure_bf16: true") + "fsdp: full_shard auto_wrap\n"
    assert read(written(tmp_path, text), None, Given(num_gpus=4)).precision == "bf16_true"


@pytest.mark.parametrize(("name", "frozen"), [("Int8", "int8"), ("Int4", "nf4")])
def test_weights_that_were_published_in_fewer_bits(tmp_path: Path, name: str, frozen: str) -> None:
    text = FACTORY.replace("Qwen/Qwen3-8B", f"Qwen/Qwen2.5-7B-Instruct-GPTQ-{name}").replace("type: full", "type: lora")
    assert read(written(tmp_path, text), None, Given(num_gpus=1)).frozen_weights == frozen
