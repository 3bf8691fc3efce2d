"""Recipes of public projects that were read otherwise than their files say: MLPerf, NeMo, Megatron-Bridge, torchtune, verl."""

from pathlib import Path

import pytest
from import_files import written

from planner.errors import PlannerError
from planner.model import ModelSpec
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given, OpenQuestionsError

MLPERF = (
    "model:\n  tensor_model_parallel_size: ${oc.decode:${oc.env:TP,1}}\n"
    "  virtual_pipeline_model_parallel_size: ${oc.decode:${oc.env:INTERLEAVED_PIPELINE,12}} # interleaved\n"
    "  sequence_parallel: ${oc.decode:${oc.env:SP,False}}\n  fp8: ${oc.decode:${oc.env:FP8,False}}\n"
    "  fp8_params: ${oc.decode:${oc.env:FP8,False}}\n  cpu_offloading: ${oc.decode:${oc.env:CPU_OFFLOADING,False}}\n"
    "  cpu_offloading_num_layers: ${oc.decode:${oc.env:CPU_OFFLOADING_NUM_LAYERS,20}}\n"
)
"""The YAML of an implementation: what each variable is where no script sets it."""


def _read(file: Path, **settings: str) -> Reading:
    return read(file, None, Given(settings=settings))


def _values(found: Reading, *names: str) -> list[object]:
    return [found.fields.get(name, getattr(found, name, None)) for name in names]


def _adapters(folder: Path, text: str, place: str = "llama2_70b_lora", conf: str = MLPERF) -> Path:
    if conf:
        written(folder / place, conf, "src/conf/peft.yaml")
    return written(folder / place, f"export DGXNNODES=1\nexport DGXNGPU=8 MINIBS=1\n{text}\n", "config_MI300X_1x8x1.sh")


def test_recompute_of_mlperfs_adapters_by_its_short_names(tmp_path: Path) -> None:
    found = _read(_adapters(tmp_path, "export FP8=True TP=1\nexport ACG=full && export ACM=block && export ACL=21"))
    assert _values(found, "recompute", "recompute_layers", "precision", "frozen_weights") == [2, 21, "fp8", "fp8"]
    assert found.fields.get("offload_layers", 0) == 0  # cpu_offloading is off


def test_what_mlperfs_adapters_run_with(tmp_path: Path) -> None:
    said = "export FP8=True FP8_DPA=1 TP=2 SP=0 LAYER_CUDA_GRAPH=1"
    found = _read(_adapters(tmp_path, said, "llama2_70b"))  # llama2_70b is trained with adapters alone
    assert _values(found, "lora_rank", "lora_targets", "sequence_parallel") == [16, "attention", 0]
    assert found.trainer == "nemo+adapter_dropout=on+fp8_attention=on+cuda_graphs=layers+tp_overlap=off"
    found = _read(_adapters(tmp_path, "export FP8=False TP=2 SP=1 TP_COMM_OVERLAP=True LORA_DIM=32 LORA_DROPOUT=0.0"))
    assert _values(found, "lora_rank", "sequence_parallel", "trainer", "precision") == [32, 1, "nemo", "bf16"]


def test_virtual_stages_of_mlperf_that_no_script_sets(tmp_path: Path) -> None:
    text = "export DGXNNODES=64 MINIBS=64 TENSOR_MODEL_PARALLEL=4 PIPELINE_MODEL_PARALLEL=8 MICRO_BATCH_SIZE=1 FP8=True\n"
    file = written(tmp_path / "gpt3", text, "config_DGXH100_64x8x64x4x8.sh")
    with pytest.raises(OpenQuestionsError, match="--set INTERLEAVED_PIPELINE=VALUE"):
        _read(file)
    assert _read(file, INTERLEAVED_PIPELINE="0").fields["vpp"] == 1
    written(tmp_path / "gpt3", MLPERF, "conf/custom.yaml")
    assert _read(file).fields["vpp"] == 12
    written(tmp_path / "gpt3", f"{text}export FP8_PARAM_GATHER=True\n", file.name)
    assert "fp8_param_gather=on" in _read(file).trainer


NEMO_1 = "python /opt/NeMo/examples/nlp/language_modeling/{} trainer.devices=$GPUS trainer.num_nodes=$NODES \\\n    {}\n"


def test_a_job_whose_name_has_another_ending_and_keeps_its_command(tmp_path: Path) -> None:
    command = NEMO_1.format(
        "tuning/megatron_gpt_finetuning.py",
        "model.restore_from_path=/models/llama3-70b.nemo model.tensor_model_parallel_size=4 model.micro_batch_size=1 "
        'model.global_batch_size=8 model.peft.peft_scheme="lora" ++model.optim.name="fused_adam"',
    )
    text = f"#!/bin/bash\n#SBATCH --nodes=1\nGPUS=4\nNODES=1\nread -r -d '' cmd <<EOF\n  {command}\nEOF\n"
    found = _read(written(tmp_path, f"{text}srun singularity run --nv nemo.simg $cmd\n", "sft.slrm"))
    assert _values(found, "tp", "num_gpus", "global_batch_size", "lora_rank", "lora_targets") == [4, 4, 8, 32, "qkv"]
    assert "tp_overlap=off" in found.trainer  # ub_tp_comm_overlap of NeMo 1 is false


def test_overlap_of_nemo_1_where_its_yaml_says_so(tmp_path: Path) -> None:
    overrides = "model.tensor_model_parallel_size=2 model.sequence_parallel=true model.ub_tp_comm_overlap=true"
    text = f"GPUS=8 NODES=1\n{NEMO_1.format('megatron_gpt_pretraining.py', overrides)}"
    assert "tp_overlap" not in _read(written(tmp_path, f"{text}\n", "pretrain.sh")).trainer


def test_a_variable_of_a_nemo_1_job_can_be_answered(tmp_path: Path) -> None:
    text = NEMO_1.format("megatron_gpt_pretraining.py", "model.micro_batch_size=2").replace("$NODES", "$NNODE")
    file = written(tmp_path, f"GPUS=8\n{text}", "gpt.sh")
    assert "NNODE" in [one.name for one in _read(file).questions]
    assert _read(file, NNODE="2").num_gpus == 16


def test_dpo_of_nemo_aligner_asks_for_all_at_once(tmp_path: Path) -> None:
    text = "python Aligner/examples/nlp/gpt/train_gpt_dpo.py trainer.devices=8 trainer.num_nodes=1 +model.global_batch_size=8\n"
    with pytest.raises(OpenQuestionsError, match=r"--model NAME .*--sequence-length S"):
        _read(written(tmp_path, text, "dpo.sh"))


@pytest.mark.parametrize(
    "config",
    [
        "@dataclass\nclass Small(llm.Llama3Config8B):\n    num_layers: int = 4\n\n\nmodel = llm.LlamaModel(Small())\n",
        "model = run.Config(llm.LlamaModel, config=run.Config(llm.Llama3Config8B, num_layers=4))\n",
    ],
)
def test_sizes_of_its_own_in_a_script_of_nemo_2(tmp_path: Path, config: str) -> None:
    text = (
        f"from nemo import lightning as nl\nfrom nemo.collections import llm\nimport nemo_run as run\n{config}"
        "strategy = nl.MegatronStrategy(tensor_model_parallel_size=1)\ntrainer = nl.Trainer(devices=1, strategy=strategy)\n"
        "data = llm.SquadDataModule(seq_length=2048, micro_batch_size=2, global_batch_size=8)\n"
        "llm.finetune(model=model, data=data, trainer=trainer)\n"
    )
    file = written(tmp_path, text, "ft.py")
    found = _read(file)
    assert isinstance(found.model, ModelSpec) and found.model.num_layers == 4 and not found.questions
    own = written(tmp_path, text.replace("num_layers", "hidden_size"), "own.py")
    assert [one.name for one in _read(own).questions] == ["--model NAME"]
    whole = written(tmp_path, text.replace("num_layers: int = 4", "seed: int = 4").replace("num_layers=4", ""), "whole.py")
    assert not _read(whole).questions


def _bridge(folder: Path, text: str, recipe: str = "llama3_8b_pretrain_config", gpus: int = 8) -> Reading:
    file = written(folder, f"train: {{train_iters: 10}}\n{text}", "override.yaml")
    return read(file, "megatron-bridge", Given(num_gpus=gpus, settings={"recipe": recipe}))


def test_what_a_yaml_over_a_recipe_of_megatron_bridge_says_as_a_whole(tmp_path: Path) -> None:
    text = "dataset: {sequence_length: 4096}\nmixed_precision: bf16_with_fp8_current_scaling_mixed\n"
    found = _bridge(tmp_path, text)
    assert _values(found, "sequence_length", "precision", "lora_rank") == [4096, "fp8", 0]
    text = "peft: {_target_: megatron.bridge.peft.lora.LoRA, dim: 8}\nmixed_precision: {grad_reduce_in_fp32: false}\n"
    found = _bridge(tmp_path, text)
    assert _values(found, "lora_rank", "frozen_weights") == [8, "bf16"]
    assert "gradient_dtype=bf16" in found.trainer
    assert _bridge(tmp_path, "peft: null\n", "llama3_8b_peft_config").lora_rank == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dist: {use_torch_fsdp2: true}\n", "dist.use_torch_fsdp2"),
        ("ConfigContainer:\n  train: {micro_batch_size: 1}\n", "its section 'ConfigContainer' is none of Megatron-Bridge's"),
        ("perf_matrix:\n  h100: {num_gpus_8: {tp: 2}}\n", "its section 'perf_matrix' is none of Megatron-Bridge's"),
    ],
)
def test_sections_of_a_yaml_over_a_recipe_that_no_plan_has(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(PlannerError, match=says):
        _bridge(tmp_path, text)
    with pytest.raises(PlannerError, match=says):  # before a recipe is asked for
        read(written(tmp_path, text, "own.yaml"), "megatron-bridge", Given())


FORK = (
    "from megatron.bridge.training.config import ConfigContainer, TrainingConfig, GPTDatasetConfig\n\n\n"
    "def pretrain_config(tensor_parallelism: int = 4, seq_length: int = 2048, global_batch_size: int = 64):\n"
    "    model_cfg = Llama3ModelProvider8B(tensor_model_parallel_size=tensor_parallelism)\n"
    "    return ConfigContainer(model=model_cfg, mixed_precision='bf16_mixed',\n"
    "        train=TrainingConfig(global_batch_size=global_batch_size, micro_batch_size=2),\n"
    "        dataset=GPTDatasetConfig(sequence_length=seq_length))\n"
)


def test_a_recipe_that_a_fork_of_megatron_bridge_holds(tmp_path: Path) -> None:
    text = (
        "from megatron.bridge.recipes.llama.llama3_8b import pretrain_config\n\n\ndef check_config(cfg):\n    assert cfg\n\n\n"
        "def main():\n    cfg: ConfigContainer = pretrain_config()\n    cfg.dataset.sequence_length = 4096\n"
        "    cfg.train.micro_batch_size = 1\n"
    )
    file = written(tmp_path, text, "examples/own/pretrain_own.py")
    with pytest.raises(PlannerError, match="'pretrain_config' is not among the published ones"):
        _read(file)
    written(tmp_path, FORK, "src/megatron/bridge/recipes/llama/llama3_8b.py")
    read_ = read(file, None, Given(model="llama-3-8b", num_gpus=8))
    assert _values(read_, "tp", "dp", "sequence_length", "global_batch_size", "micro_batch_size") == [4, 2, 4096, 64, 1]
    file.write_text(f"{text}    cfg = OmegaConf.merge(cfg, OmegaConf.load(args.config_file or 'own.yaml'))\n")
    written(tmp_path, "model: {tensor_model_parallel_size: 2}\ntrain: {global_batch_size: 16}\n", "examples/own/conf/own.yaml")
    assert _values(read(file, None, Given(model="llama-3-8b", num_gpus=8)), "tp", "global_batch_size") == [2, 16]


def test_a_program_that_names_arguments_of_megatron_is_no_shell_script(tmp_path: Path) -> None:
    text = 'HELP = """\n    --tensor-model-parallel-size 4 --num-layers 32\n"""\nprint((1))\n'
    with pytest.raises(PlannerError, match="a Python program that names arguments of Megatron"):
        _read(written(tmp_path, text, "launch.py"))


def test_the_update_of_torchtune_is_in_the_backward_pass_where_its_yaml_says_so(tmp_path: Path) -> None:
    text = (
        "model: {_component_: torchtune.models.llama3.llama3_8b}\ntokenizer: {max_seq_len: 2048}\nbatch_size: 1\ndtype: bf16\n"
        "optimizer: {_component_: torch.optim.AdamW}\ngradient_accumulation_steps: 1\nenable_activation_checkpointing: true\n"
        "dataset: {_component_: torchtune.datasets.alpaca_dataset}\n"
    )
    found = []
    for said in ("", "optimizer_in_bwd: true\n"):
        reading = read(written(tmp_path, text + said, "full.yaml"), None, Given(num_gpus=4))
        found.append(to_plan(reading).prediction.memory_peak_gib)
    assert found[0] > found[1] + 1  # 8 billion gradients of 2 bytes over 4 ranks wait for the update


TRAINER = "torchrun --nproc_per_node=2 -m {}.trainer.fsdp_sft_trainer"
SFT = TRAINER + " model.partial_pretrain=Qwen/Qwen3-0.6B data.train_batch_size=64 {}\n"


def test_micro_batches_of_verl_that_all_ranks_share(tmp_path: Path) -> None:
    file = written(tmp_path, SFT.format("verl", "data.micro_batch_size=8"), "own/run.sh")
    assert _values(_read(file), "micro_batch_size", "num_microbatches", "recompute") == [4, 8, 2]
    around = "data: {{micro_batch_size{}: 4, max_length: 2048}}\nmodel: {{enable_gradient_checkpointing: false}}\n"
    written(tmp_path, around.format(""), "verl/trainer/config/sft_trainer.yaml")
    assert _values(_read(file), "micro_batch_size", "sequence_length", "recompute") == [4, 2048, 0]
    written(tmp_path, around.format("_per_gpu"), "verl/trainer/config/sft_trainer.yaml")  # verl since 0.2 reads this word alone
    assert _read(file).fields["micro_batch_size"] == 4
    each = written(tmp_path, SFT.format("verl", "data.micro_batch_size_per_gpu=8"), "own/run.sh")
    assert _read(each).fields["micro_batch_size"] == 8


def test_the_sft_trainer_of_a_renamed_verl(tmp_path: Path) -> None:
    words = "data.micro_batch_size_per_gpu=4 ulysses_sequence_parallel_size=2"
    found = _read(written(tmp_path, SFT.format("own_verl", words), "run.sh"))
    assert _values(found, "trainer", "cp", "micro_batch_size", "num_gpus") == ["verl+attention_kernel=fa2", 2, 4, 2]


@pytest.mark.parametrize(
    ("said", "compiled"),
    [
        ("", False), ("compile=CompileConfig(),", False), ("compile=CompileConfig(enable=True),", True),
        ("compile=CompileConfig(enable=True, components=['loss']),", False), ("compile=held,", True),
    ],
)  # fmt: skip
def test_a_configuration_of_torchtitan_compiles_what_it_says(tmp_path: Path, said: str, compiled: bool) -> None:
    text = (
        f"def llama3_8b():\n    held = CompileConfig(enable=True)\n    return Trainer.Config({said}\n"
        "        hf_assets_path='./assets/hf/Llama-3.1-8B', model_spec=model_registry('8B'),\n"
        "        training=TrainingConfig(local_batch_size=1, seq_len=8192),\n"
        "        parallelism=ParallelismConfig(data_parallel_shard_degree=4, tensor_parallel_degree=2))\n"
    )
    assert ("compile=off" not in _read(written(tmp_path, text, "llama3/config_registry.py")).trainer) == compiled
    text = text.replace(f"return Trainer.Config({said}", "config = Trainer.Config(")
    changed = written(tmp_path, f"{text}    config.compile.enable = {compiled}\n    return config\n", "llama3/config_registry.py")
    assert ("compile=off" not in _read(changed).trainer) == compiled


def test_nemo_rl_over_megatron_overlaps_no_tensor_parallelism(tmp_path: Path) -> None:
    text = (
        "policy:\n  model_name: Qwen/Qwen3-8B\n  train_global_batch_size: 32\n  train_micro_batch_size: 1\n"
        "  max_total_sequence_length: 2048\n  precision: bfloat16\n  dtensor_cfg: {enabled: false}\n"
        "  megatron_cfg: {enabled: true, tensor_model_parallel_size: 2, sequence_parallel: true}\n"
        "sft: {max_num_steps: 10}\ncluster: {gpus_per_node: 8, num_nodes: 1}\n"
    )
    assert "tp_overlap=off" in _read(written(tmp_path, text, "sft.yaml")).trainer


def test_a_job_of_nemos_launcher(tmp_path: Path) -> None:
    text = (
        "python3 ${HERE}/launcher_scripts/main.py training=own/small \\\n  stages=[training] training.trainer.num_nodes=2 \\\n"
        '  training.model.tokenizer.model=${TOK} training.model.global_batch_size=64 training.run.name="own"\n'
    )
    job = written(tmp_path, text, "examples/run.sh")
    with pytest.raises(PlannerError, match="launcher_scripts/conf/training/'own/small'.yaml is not there"):
        _read(job)
    config = (
        "trainer: {num_nodes: 1, devices: 8, precision: bf16}\nmodel:\n  micro_batch_size: 2\n  global_batch_size: 8\n"
        "  tensor_model_parallel_size: 4\n  pipeline_model_parallel_size: 1\n  encoder_seq_length: 2048\n  num_layers: 12\n"
        "  hidden_size: 768\n  num_attention_heads: 12\n  ub_tp_comm_overlap: true\n  tokenizer: {type: GPT2BPETokenizer}\n"
    )
    written(tmp_path, config, "launcher_scripts/conf/training/own/small.yaml")
    found = _read(job)
    assert _values(found, "tp", "num_gpus", "global_batch_size", "micro_batch_size") == [4, 16, 64, 2]
    assert "tp_overlap" not in found.trainer and not found.questions
    with pytest.raises(PlannerError, match="it starts no stage of NeMo's launcher that trains"):
        _read(written(tmp_path, text.replace("[training]", "[conversion]"), "examples/convert.sh"))


@pytest.mark.parametrize(
    ("words", "added", "overlaps"),
    [
        ("", "", False), ("performance_mode=True", "", True),
        ("", "recipe.trainer.callbacks.append(run.Config(MegatronCommOverlapCallback, tp_comm_overlap=True))\n", True),
    ],
)  # fmt: skip
def test_overlap_of_nemo_2_is_a_callback(tmp_path: Path, words: str, added: str, overlaps: bool) -> None:
    text = f"from nemo.collections import llm\nimport nemo_run as run\nrecipe = llm.llama3_70b.pretrain_recipe({words})\n{added}"
    assert ("tp_overlap=off" not in _read(written(tmp_path, f"{text}run.run(recipe)\n", "train.py")).trainer) == overlaps


def test_stages_of_nemo_2_that_count_the_embedding_and_the_loss(tmp_path: Path) -> None:
    text = "# nemo:25.09\nfrom nemo.collections import llm\nrecipe = llm.llama31_405b.pretrain_recipe(num_nodes=72)\n"
    found = _read(written(tmp_path, text, "train.py"))
    assert _values(found, "first_stage_layers", "last_stage_layers") == [15, 15]
    changed = f"{text}recipe.trainer.strategy.account_for_loss_in_pipeline_split = False\nrecipe.model.config.mtp_num_layers = 2\n"
    with pytest.raises(PlannerError, match="model.mtp_num_layers is 2"):
        _read(written(tmp_path, changed, "other.py"))


def test_layers_of_megatron_bridge_that_predict_more_tokens(tmp_path: Path) -> None:
    found = _bridge(tmp_path, "model: {mtp_num_layers: 0}\n", "deepseek_v3_pretrain_config", 2048)
    usual = _bridge(tmp_path, "model: {}\n", "deepseek_v3_pretrain_config", 2048)
    assert [one.model.mtp_layers for one in (found, usual) if one.model is not None] == [0, 1]


def test_a_program_of_a_library_without_a_reader_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, "from olmo_core.config import DType\n\n\ndef build():\n    return DType\n", "OLMo2-1B.py")
    with pytest.raises(PlannerError, match="a program of OLMo-core, of whose programs this one is not read"):
        _read(file)


NANOTRON = (
    "general: {project: own}\ntokens: {micro_batch_size: 2, batch_accumulation_per_replica: 4, sequence_length: 2048}\n"
    "optimizer: {zero_stage: 0}\nmodel:\n  dtype: bfloat16\n  model_config: {is_qwen2_config: true, _use_qk_norm: true,\n"
    "    vocab_size: 4096, hidden_size: 512, num_attention_heads: 8, num_key_value_heads: 8, num_hidden_layers: 8,\n"
    "    intermediate_size: 1024, max_position_embeddings: 2048, tie_word_embeddings: false,\n"
    "    hidden_act: silu, rms_norm_eps: 1.0e-6, rope_theta: 10000.0}\n"
    "parallelism: {dp: 1, pp: 2, pp_engine: 1f1b, tp: 2, tp_mode: REDUCE_SCATTER, tp_linear_async_communication: "
)


def test_words_of_nanotron_that_decide_a_layout(tmp_path: Path) -> None:
    found = _read(written(tmp_path, f"{NANOTRON}true}}\n", "run.yaml"))
    assert found.trainer == "nanotron" and isinstance(found.model, ModelSpec) and found.model.qk_norm
    assert _read(written(tmp_path, f"{NANOTRON}false}}\n", "run.yaml")).trainer == "nanotron+tp_overlap=off"
    file = written(tmp_path, f"{NANOTRON}true, pp_layer_partition: [3, 5]}}\n", "run.yaml")
    found = _read(file)
    assert (found.fields["first_stage_layers"], found.fields["last_stage_layers"]) == (3, 5)
    assert _read(file, **{"parallelism.pp_layer_partition": "null"}).fields["pp"] == 2


def test_experts_that_are_padded_to_their_capacity(tmp_path: Path) -> None:
    sizes = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 2048 --max-position-embeddings 2048"
    words = "--vocab-size 4096 --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8 --micro-batch-size 1 --bf16"
    padded = "--global-batch-size 16 --moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity"
    start = f"torchrun --nproc_per_node 8 pretrain_gpt.py {sizes} {words}"
    found = _read(written(tmp_path, f"{start} {padded}\n", "moe.sh"))
    assert found.expert_imbalance == 1.25 and not found.unread
    dropped = _read(written(tmp_path, f"{start} {padded.rpartition(' ')[0]}\n", "moe.sh"))
    assert dropped.expert_imbalance is None and dropped.unread == ("--moe-expert-capacity-factor 1.25",)
    plan = to_plan(found)
    assert plan.workload.expert_imbalance == 1.25
    text = "model: {moe_expert_capacity_factor: 1.0, moe_pad_expert_input_to_capacity: true}\n"
    assert _bridge(tmp_path, text, "deepseek_v3_pretrain_config", 2048).expert_imbalance == 1.0


def test_frozen_weights_of_nemo_1_in_fp32(tmp_path: Path) -> None:
    words = "model.restore_from_path=/llama2-7b.nemo model.peft.peft_scheme=lora model.megatron_amp_O2=false trainer.precision=bf16"
    command = NEMO_1.format("tuning/megatron_gpt_finetuning.py", words)
    file = written(tmp_path, f"GPUS=8 NODES=1\n{command}", "lora.sh")
    assert [one.name for one in _read(file).questions] == ["model.megatron_amp_O2"]
    assert _read(file, **{"model.megatron_amp_O2": "true"}).frozen_weights == "bf16"
