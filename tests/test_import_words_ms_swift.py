"""ms-swift as it reads its own arguments: what it builds, splits and recomputes over Megatron; what no plan has on either side."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.layout import Module, Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given

MEGATRON = (
    "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --tensor_model_parallel_size 2 --pipeline_model_parallel_size 2 "
    "--expert_model_parallel_size 2 --sequence_parallel true --micro_batch_size 1 --global_batch_size 16 --max_length 4096 "
)
SWIFT = (
    "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-7B-Instruct --torch_dtype bfloat16 --per_device_train_batch_size 2 "
    "--gradient_accumulation_steps 4 --max_length 4096 --deepspeed zero2 "
)


def _read(folder: Path, text: str, **said: str) -> Reading:
    return read(written(folder, f"{text}\n", "go.sh"), None, Given(settings=said))


@pytest.mark.parametrize(("words", "vpp", "first", "last"), [
    ("--num_layers_per_virtual_pipeline_stage 6", 4, 0, 0), ("--num_virtual_stages_per_pipeline_rank 2", 2, 0, 0),
    ("--virtual_pipeline_model_parallel_size 3", 3, 0, 0), ("--account_for_embedding_in_pipeline_split true", 1, 23, 0),
    ("--account_for_embedding_in_pipeline_split true --account_for_loss_in_pipeline_split true", 1, 24, 24),
    (f"--pipeline_model_parallel_layout 'E{'t' * 23}|{'t' * 25}L'", 1, 23, 25),
])  # fmt: skip
def test_stages_of_megatron_sft(tmp_path: Path, words: str, vpp: int, first: int, last: int) -> None:
    fields = _read(tmp_path, MEGATRON + words).fields
    assert (fields["vpp"], fields["first_stage_layers"], fields["last_stage_layers"]) == (vpp, first, last)
    assert (fields["schedule"] == 2) is (vpp > 1)


@pytest.mark.parametrize(("words", "layers"), [
    ("--recompute_method block --recompute_num_layers 6", 6), ("--recompute_method block --recompute_num_layers 24", 0),
    ("--recompute_method uniform --recompute_num_layers 1", 0),
])  # fmt: skip
def test_layers_that_are_recomputed(tmp_path: Path, words: str, layers: int) -> None:
    fields = _read(tmp_path, f"{MEGATRON} --recompute_granularity full {words}").fields
    assert (fields["recompute"], fields.get("recompute_layers", 0)) == (Recompute.FULL, layers)


def test_recompute_in_units_is_noted(tmp_path: Path) -> None:
    found = _read(tmp_path, f"{MEGATRON} --recompute_granularity full --recompute_method uniform --recompute_num_layers 4")
    assert any(one.startswith("full recompute in units of 4 layers is taken as unit by unit") for one in found.notes)


@pytest.mark.parametrize(("words", "option"), [
    ("--overlap_grad_reduce true", ""), ("", "gradient_overlap=off"), ("--tp_comm_overlap true", "tp_overlap=on"),
    ("--attention_backend unfused", "attention_kernel=unfused"), ("--moe_router_dtype none", "router_dtype=bf16"),
    ("--transformer_impl local", "transformer_impl=local"), ("--attention_dropout 0.1", "dropout=on"),
])  # fmt: skip
def test_options_of_megatron_core(tmp_path: Path, words: str, option: str) -> None:
    trainer = _read(tmp_path, MEGATRON + words).trainer
    assert option in trainer and ("gradient_overlap" in trainer) is ("overlap_grad" not in words)


def test_sizes_of_arguments_go_before_the_model(tmp_path: Path) -> None:
    found = _read(tmp_path, f"{MEGATRON} --num_layers 24 --moe_router_topk 4")
    assert found.model is not None and (found.model.num_layers, found.model.top_k) == (24, 4)
    assert any("with num_layers, top_k of the arguments" in one for one in found.notes)
    own = _read(tmp_path, MEGATRON.replace("Qwen/Qwen3-30B-A3B", "/models/own") + "--num_layers 24")
    assert to_plan(own, {"model": "qwen3-30b-a3b"}).workload.model.num_layers == 24
    assert not any("of the arguments" in one for one in _read(tmp_path, f"{MEGATRON} --num_layers 48").notes)


@pytest.mark.parametrize("words", [
    "--freeze_parameters_ratio 0.5", "--trainable_parameters mlp", "--freeze_parameters_regex '.*mlp.*'", "--fp4_format e2m1",
])  # fmt: skip
@pytest.mark.parametrize("job", [MEGATRON, SWIFT + "--train_type full "])
def test_weights_that_are_chosen_are_refused(tmp_path: Path, job: str, words: str) -> None:
    if "fp4" in words and "swift sft" in job:
        return
    with pytest.raises(PlannerError, match=words.split()[0].removeprefix("--")):
        _read(tmp_path, job + words)


@pytest.mark.parametrize(("words", "name", "without"), [
    ("--target_regex '.*q_proj'", "target_regex", "null"), ("--mtp_shared_weights true", "mtp_shared_weights", "false"),
    ("--fp8_format hybrid --fp8_param_gather true", "fp8_param_gather", "false"), ("--own_split 4", "own_split", "null"),
    ("--main_params_dtype fp16", "main_params_dtype", "fp32"),
    ("--sequence_packing_scheduler default_dynamic_cp", "sequence_packing_scheduler", "null"),
])  # fmt: skip
def test_words_of_megatron_sft_that_no_plan_has_are_asked_about(tmp_path: Path, words: str, name: str, without: str) -> None:
    assert asked_for(_read(tmp_path, MEGATRON + words)) == [name]
    assert asked_for(_read(tmp_path, MEGATRON + words, **{name: without})) == []


def test_words_that_megatron_sft_has_are_not(tmp_path: Path) -> None:
    words = "--dataloader_num_workers 8 --no_save_optim true --moe_token_drop_policy probs --log_interval 5"
    assert asked_for(_read(tmp_path, MEGATRON + words)) == []


def test_experts_padded_to_their_capacity(tmp_path: Path) -> None:
    found = _read(tmp_path, f"{MEGATRON} --moe_expert_capacity_factor 1.5 --moe_pad_expert_input_to_capacity true")
    assert found.expert_imbalance == 1.5
    drops = _read(tmp_path, f"{MEGATRON} --moe_expert_capacity_factor 1.5")
    assert drops.expert_imbalance is None and any("tokens above the capacity are dropped" in one for one in drops.notes)


def test_adapters_that_it_goes_on_with(tmp_path: Path) -> None:
    found = _read(tmp_path, f"{MEGATRON} --adapters /runs/last --lora_rank 32")
    assert (found.lora_rank, found.frozen_weights) == (32, "bf16")
    assert asked_for(_read(tmp_path, f"{MEGATRON} --adapters /runs/last")) == ["lora_rank"]
    assert asked_for(_read(tmp_path, f"{SWIFT} --adapters /runs/last")) == ["lora_rank"]


def test_tables_trained_whole_over_megatron(tmp_path: Path) -> None:
    found = _read(tmp_path, f"{MEGATRON} --tuner_type lora --modules_to_save word_embeddings output_layer")
    assert found.lora_whole == "both" or "embedding" in found.lora_whole


def test_muon_shards_no_states(tmp_path: Path) -> None:
    assert _read(tmp_path, f"{MEGATRON} --optimizer muon").fields["zero"] == 0


def test_settings_of_megatron_core_in_json(tmp_path: Path) -> None:
    found = _read(tmp_path, f"""{MEGATRON} --megatron_extra_kwargs '{{"transformer_impl": "local"}}'""")
    assert "transformer_impl=local" in found.trainer


@pytest.mark.parametrize(("pinned", "etp"), [("ms-swift==3.7.3", 2), ("ms-swift==3.10.0", 1), ("", 1)])
def test_experts_are_split_by_the_default_of_the_version(tmp_path: Path, pinned: str, etp: int) -> None:
    written(tmp_path, f"{pinned}\n", "requirements.txt")
    assert _read(tmp_path, MEGATRON).fields["etp"] == etp


@pytest.mark.parametrize("file", ["README.md", "Dockerfile", "install.sh", ""])
def test_the_version_that_a_project_or_the_script_itself_installs(tmp_path: Path, file: str) -> None:
    install = "pip install -U 'ms-swift[llm]==3.7.3' deepspeed\n"
    written(tmp_path, f"# Setup\n{install}", file or "other.md")
    assert _read(tmp_path, f"{'' if file else install}{MEGATRON}").fields["etp"] == 2
    written(tmp_path, "# Setup\nor try ms-swift==3.7.3\n", file or "other.md")
    assert _read(tmp_path, f"# try ms-swift==3.7.3\n{MEGATRON}").fields["etp"] == 1


def test_recompute_that_repeats_nothing_in_dense_layers(tmp_path: Path) -> None:
    words = f"{MEGATRON} --recompute_granularity selective --recompute_modules core_attn layernorm"
    dense = _read(tmp_path, words.replace("Qwen3-30B-A3B", "Qwen3-8B"))
    assert dense.fields["recompute_modules"] == Module.CORE_ATTENTION and "recompute of layernorm: nothing" in " ".join(dense.notes)
    assert _read(tmp_path, words).fields["recompute_modules"] == Module.CORE_ATTENTION | Module.NORM
    alone = _read(tmp_path, words.replace("Qwen3-30B-A3B", "Qwen3-8B").replace("core_attn layernorm", "layernorm"))
    assert alone.fields["recompute"] == Recompute.NONE


@pytest.mark.parametrize(("dtype", "precision"), [("float16", "fp16"), ("float32", "fp16"), ("bfloat16", "bf16")])
def test_dtypes_over_megatron(tmp_path: Path, dtype: str, precision: str) -> None:
    assert _read(tmp_path, f"{MEGATRON} --torch_dtype {dtype}").precision == precision


def test_accumulation_counts_all_processes(tmp_path: Path) -> None:
    job = SWIFT.replace("--gradient_accumulation_steps 4 ", "").replace("batch_size 2", "batch_size 1")
    assert _read(tmp_path, job).fields["num_microbatches"] == 2
    found = _read(tmp_path, f"{job} --sequence_parallel_size 4")
    assert (found.fields["dp"], found.fields["num_microbatches"], found.global_batch_size) == (2, 2, 4)


def test_packs_are_as_long_as_is_said(tmp_path: Path) -> None:
    assert _read(tmp_path, f"{SWIFT} --packing true --packing_length 16384").sequence_length == 16384
    assert _read(tmp_path, f"{SWIFT} --packing true").sequence_length == 4096


def test_swift_before_3_has_its_own_defaults(tmp_path: Path) -> None:
    job = "NPROC_PER_NODE=8 swift sft --sft_type lora --model_id_or_path qwen/Qwen1.5-7B --dtype bf16"
    found = _read(tmp_path, job)
    assert (found.sequence_length, found.lora_targets) == (2048, "qkv")
    assert _read(tmp_path, f"{job} --lora_target_modules ALL").lora_targets == "all"


@pytest.mark.parametrize(("words", "says"), [
    ("--train_type full --quant_bits 4", "not trained without adapters"), ("--quant_bits 3", "a plan knows 4 and 8"),
    ("--zero_hpz_partition_size 8", "hierarchical"), ("--use_dora true", "use_dora"), ("--train_backend megatron", "of swift 2"),
])  # fmt: skip
def test_what_no_plan_has_over_transformers(tmp_path: Path, words: str, says: str) -> None:
    with pytest.raises(PlannerError, match=says):
        _read(tmp_path, f"{SWIFT} {words}")


@pytest.mark.parametrize(("words", "name", "without"), [
    ("--tuner_backend unsloth", "tuner_backend", "peft"), ("--target_regex '.*q_proj'", "target_regex", "null"),
    ("--optimizer galore", "optimizer", "null"),
])  # fmt: skip
def test_what_is_asked_over_transformers(tmp_path: Path, words: str, name: str, without: str) -> None:
    assert asked_for(_read(tmp_path, f"{SWIFT} {words}")) == [name]
    assert asked_for(_read(tmp_path, f"{SWIFT} {words}", **{name: without})) == []


def test_liger_by_its_older_word(tmp_path: Path) -> None:
    assert "loss=fused_linear" in _read(tmp_path, f"{SWIFT} --use_liger true").trainer


@pytest.mark.parametrize("start", [
    "NPROC_PER_NODE=8 python -m swift.cli.main sft", "NPROC_PER_NODE=8 python swift/cli/main.py sft",
    "torchrun --nproc_per_node 8 swift/cli/sft.py",
])  # fmt: skip
def test_its_programs_by_any_name(tmp_path: Path, start: str) -> None:
    found = _read(tmp_path, SWIFT.replace("NPROC_PER_NODE=8 swift sft", start) + "--train_type full")
    assert found.model is not None and found.fields["recompute"] == Recompute.FULL
    assert (found.num_gpus, found.fields["zero"]) == (8, 2)


def test_its_deepspeed_goes_before_a_launcher_that_shards_nothing(tmp_path: Path) -> None:
    written(tmp_path, "distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf16\n", "acc.yaml")
    start = "accelerate launch --config_file acc.yaml swift/cli/sft.py"
    found = _read(tmp_path, SWIFT.replace("NPROC_PER_NODE=8 swift sft", start))
    assert found.trainer.startswith("deepspeed") and (found.num_gpus, found.fields["zero"]) == (8, 2)


def test_fsdp_in_a_file_of_its_own(tmp_path: Path) -> None:
    shards = '{"fsdp": "full_shard auto_wrap offload", "fsdp_config": {"fsdp_version": 2, "activation_checkpointing": true}}'
    written(tmp_path, shards, "fsdp.json")
    found = _read(tmp_path, SWIFT.replace("--deepspeed zero2", "--fsdp ./fsdp.json --train_type full"))
    assert (found.fields["zero"], found.fields["offload_parameters"], found.fields["recompute"]) == (3, 1, Recompute.FULL)


def test_a_file_says_its_environment_and_its_side(tmp_path: Path) -> None:
    megatron = "model: Qwen/Qwen3-30B-A3B\ntuner_type: full\ntensor_model_parallel_size: 2\nsequence_parallel: true\n"
    found = read(written(tmp_path, f"{megatron}max_length: 4096\nENV: {{NPROC_PER_NODE: 8, NNODES: 2, MAX_PIXELS: 1003520}}\n"))
    assert found.trainer.startswith("ms-swift-megatron") and asked_for(found) == []
    assert (found.num_gpus, found.fields["tp"], found.fields["dp"]) == (16, 2, 8)
    swift = "model: Qwen/Qwen2.5-7B-Instruct\ntuner_type: lora\nmax_length: 4096\ndeepspeed: zero2\nENV: {NPROC_PER_NODE: 4}\n"
    found = read(written(tmp_path, swift))
    assert (found.num_gpus, found.fields["zero"], found.unread) == (4, 2, ())
