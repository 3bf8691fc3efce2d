"""Every field of torchtitan's configurations by itself, TOML and Python: what it makes of it, or a sentence that names it."""

from pathlib import Path

import pytest
from import_files import written

from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError

TOML = """
[model]
name = "{name}"
flavor = "{flavor}"
{model}
[optimizer]
name = "AdamW"
{optimizer}
[training]
local_batch_size = 8
seq_len = 2048
{training}
[parallelism]
data_parallel_shard_degree = 4
tensor_parallel_degree = 2
pipeline_parallel_degree = {pp}
{parallelism}
[activation_checkpoint]
{recompute}
{more}
"""
USUAL = {"name": "llama3", "flavor": "8B", "model": "", "optimizer": "", "training": "", "pp": "1", "parallelism": "", "more": "",
         "recompute": 'mode = "full"'}  # fmt: skip


def _read(folder: Path, said: Given | None = None, **parts: str) -> Reading:
    return read(written(folder, TOML.format(**{**USUAL, **parts}), "a.toml"), None, said or Given())


@pytest.mark.parametrize(("pp", "words", "ends"), [
    ("2", "", (0, 0)), ("4", "", (8, 7)), ("2", "pipeline_parallel_first_stage_less_layers = 4", (15, 0)),
    ("2", 'pipeline_parallel_split_points = ["layers.10"]', (10, 0)),
    ("2", 'pipeline_parallel_split_points = "layers.10"', (10, 0)),
    ("2", f'module_names_per_model_chunk = [["layers.0"], {[f"layers.{i}" for i in range(1, 32)]}]', (1, 0)),
    ("2", "module_fqns_per_model_part = []", (0, 0)),
])  # fmt: skip
def test_layers_of_stages(tmp_path: Path, pp: str, words: str, ends: tuple[int, int]) -> None:
    """32 layers, of which torchtitan counts embedding and head as one each: 8, 9, 8 and 7 on four stages."""
    fields = _read(tmp_path, pp=pp, parallelism=words).fields
    assert (fields.get("first_stage_layers", 0), fields.get("last_stage_layers", 0), fields["vpp"]) == (*ends, 1)


def test_a_schedule_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="pipeline_parallel_schedule_csv is 'own.csv'.*--set parallelism.pipeline_parallel"):
        _read(tmp_path, pp="2", parallelism='pipeline_parallel_schedule_csv = "own.csv"')


def test_kernels_of_primus_make_no_other_layers(tmp_path: Path) -> None:
    found = _read(tmp_path, model='converters = ["primus_turbo"]')
    assert found.precision == "bf16" and "primus_turbo" in " ".join(found.notes)
    assert _read(tmp_path, model='converters = ["primus_turbo", "float8"]').precision == "fp8"


@pytest.mark.parametrize(("converters", "why"), [
    ('["lora"]', "'lora' is not priced"), ('["quantize.linear.nvfp4_qat"]', "nvfp4_qat' is not priced"),
    ('["quantize.grouped_mm.float8"]', "experts without the linear layers"),
])  # fmt: skip
def test_converters_that_are_not_priced(tmp_path: Path, converters: str, why: str) -> None:
    with pytest.raises(PlannerError, match=f"{why}.*--set model.converters="):
        _read(tmp_path, model=f"converters = {converters}")
    assert _read(tmp_path, Given(settings={"model.converters": "[]"}), model=f"converters = {converters}").precision == "bf16"


def test_layers_that_stay_in_16_bits_are_said(tmp_path: Path) -> None:
    fp8 = {"model": 'converters = ["float8"]'}
    found = _read(tmp_path, **fp8, more='[float8]\nfilter_fqns = ["attention", "output"]')
    assert found.precision == "fp8" and any("hold attention stay in 16 bits" in one for one in found.notes)
    assert _read(tmp_path, **fp8, more='[float8]\nfilter_fqns = ["output"]').notes == ()
    gathered = _read(tmp_path, **fp8, more="[float8]\nenable_fsdp_float8_all_gather = true").notes
    assert gathered == ("FSDP gathers weights in 8 bits; priced in 16",)
    rowwise = '[quantize.dense.float8]\nrecipe_name = "rowwise"'
    assert _read(tmp_path, model='converters = ["quantize.dense.float8"]', more=rowwise).precision == "fp8_row"
    experts = _read(tmp_path, **fp8, name="deepseek_v3", flavor="16B")
    assert any("experts stay in 16 bits" in one for one in experts.notes)


@pytest.mark.parametrize("word", ['state_dtype = "bfloat16"', "use_bf16 = true"])
def test_words_for_types_of_the_optimizer_are_asked(tmp_path: Path, word: str) -> None:
    name = f"optimizer.{word.partition(' ')[0]}"
    with pytest.raises(OpenQuestionsError, match=f"--set {name}=false .no setting of torchtitan"):
        _read(tmp_path, optimizer=word)
    assert _read(tmp_path, Given(settings={name: "false"}), optimizer=word).num_gpus == 8


def test_words_of_forks_for_layers_and_passes(tmp_path: Path) -> None:
    found = _read(tmp_path, model="precondition_mlp = true\npower_iter = 5", training="grad_accumulation_steps = 4")
    assert found.fields["num_microbatches"] == 4
    assert any("words of [model] that torchtitan does not have, not in the plan: precondition_mlp" in one for one in found.notes)


@pytest.mark.parametrize(("parts", "sentence"), [
    ({"parallelism": "disable_loss_parallel = true"}, "logits of the whole vocabulary"),
    ({"training": "enable_loss_parallel = false"}, "logits of the whole vocabulary"),
    ({"parallelism": 'context_parallel_degree = 2\ncontext_parallel_rotate_method = "alltoall"'}, "in a ring"),
    ({"parallelism": 'expert_parallel_degree = 4\nexpert_parallel_comm_backend = "own"', "name": "deepseek_v3", "flavor": "16B"},
     "priced as an all-to-all"),
    ({"training": 'mixed_precision_reduce = "bfloat16"'}, "priced in float32"), ({"training": "loss_chunks = 8"}, "in chunks"),
    ({"optimizer": 'implementation = "for-loop"'}, "one by one"), ({"name": "simple_fsdp.llama3"}, "compiler's passes"),
    ({"recompute": 'mode = "selective"\nselective_ac_option = "op"\nper_op_sac_force_recompute_mm_shapes_by_fqns = ["w1"]'},
     "products that it names"),
])  # fmt: skip
def test_what_is_taken_for_what(tmp_path: Path, parts: dict[str, str], sentence: str) -> None:
    assert any(sentence in one for one in _read(tmp_path, **parts).notes)
    assert _read(tmp_path).notes == ()


def test_words_of_other_versions(tmp_path: Path) -> None:
    assert _read(tmp_path, training='fsdp_reshard_after_forward = "never"').fields["zero"] == 2
    assert _read(tmp_path, parallelism="expert_tensor_parallel_degree = 2").num_gpus == 8  # without experts it says nothing
    for flavor in ("8B_flex_attn", "8B_varlen"):
        model = _read(tmp_path, flavor=flavor).model
        assert model is not None and model.name == "llama-3.1-8b"
    alone = TOML.format(**{**USUAL, "training": 'data_parallel_type = "ddp"'}).replace("tensor_parallel_degree = 2", "")
    assert read(written(tmp_path, alone, "b.toml")).fields["zero"] == 0
    with pytest.raises(PlannerError, match="mixed_precision_param is 'float16'"):
        _read(tmp_path, training='mixed_precision_param = "float16"')


def test_a_mode_between_is_asked_with_the_rest(tmp_path: Path) -> None:
    parts = {"recompute": 'mode = "memory_budget"\nmemory_budget = 0.5', "flavor": "own"}
    with pytest.raises(OpenQuestionsError) as caught:
        _read(tmp_path, **parts)
    assert [one.name for one in caught.value.questions] == ["activation_checkpoint.mode", "--model NAME"]
    said = Given(model="llama-8b", settings={"activation_checkpoint.mode": "full"})
    assert _read(tmp_path, said, **parts).fields["recompute"] == Recompute.FULL


PYTHON = """
def llama3_8b():
    spec = model_registry("8B"{registry})
    return Trainer.Config(
        loss={loss}, model_spec=spec, optimizer={optimizer}, hf_assets_path="./assets/own",
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank={tokens}, max_context_length=4096, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(data_parallel_shard_degree=8, tensor_parallel_degree=2),
        activation_checkpoint={recompute}, compile=CompileConfig(enable=True{compile}),
    )

def llama3_8b_late():
    config = llama3_8b()
    {late}
    return config
"""
MODULE = {"registry": "", "loss": "CrossEntropyLoss.Config()", "optimizer": "default_adamw(lr=1e-4)", "tokens": "2 * 4096",
          "recompute": "SelectiveAC.Config()", "compile": "", "late": "config.training.steps = 10"}  # fmt: skip


def _module(folder: Path, settings: dict[str, str] | None = None, **parts: str) -> Reading:
    file = written(folder, PYTHON.format(**{**MODULE, **parts}), "llama3/config_registry.py")
    return read(file, None, Given(settings={"config": "llama3_8b_late", **(settings or {})}))


def test_the_model_of_a_function_that_changes_another_one(tmp_path: Path) -> None:
    found = _module(tmp_path)
    assert found.model is not None and (found.model.name, found.global_batch_size, found.notes) == ("llama-3.1-8b", 16, ())


@pytest.mark.parametrize(("parts", "optimizer"), [
    ({"optimizer": "default_muon(lr=1e-4)"}, "muon"), ({"optimizer": 'OptimizersContainer.Config(name="Muon")'}, "muon"),
    ({"late": "config.optimizer = default_muon()"}, "muon"), ({"late": "config.optimizer.name = 'Muon'"}, "muon"), ({}, "adam"),
])  # fmt: skip
def test_optimizers_of_a_module(tmp_path: Path, parts: dict[str, str], optimizer: str) -> None:
    assert _module(tmp_path, **parts).optimizer == optimizer


@pytest.mark.parametrize(("parts", "sentence"), [
    ({"optimizer": 'OptimizersContainer.Config(param_groups=[Group(optimizer_name="SGD")])'}, "optimizer.name is 'SGD'"),
    ({"optimizer": "OptimizersInBackwardContainer.Config()"}, "in the backward pass"),
    ({"registry": ", converters=[NVFP4LinearConverter.Config()]"}, "NVFP4LinearConverter.Config is not priced"),
    ({"registry": ", converters=[Float8GroupedExpertsConverter.Config()]"}, "experts without the linear layers"),
])  # fmt: skip
def test_parts_of_a_module_that_are_not_priced(tmp_path: Path, parts: dict[str, str], sentence: str) -> None:
    with pytest.raises(PlannerError, match=sentence):
        _module(tmp_path, **parts)


LORA = ", converters=[LoRAConverter.Config(rank=%s, alpha=64.0%s)]"


def test_adapters_of_a_module(tmp_path: Path) -> None:
    """On all linear layers, the head too, unless it names some; the base has the dtype of training.dtype, float32 by itself."""
    found = _module(tmp_path, registry=LORA % ("32", ""))
    assert (found.lora_rank, found.lora_targets, found.frozen_weights, found.precision) == (32, "all", "fp32", "bf16")
    assert "adapters on 'lm_head' are not priced" in found.notes[0]
    found = _module(tmp_path, registry=LORA % ("8", ', target_modules=["wq", "wv"]'), tokens='4096, dtype="bfloat16"')
    assert (found.lora_rank, found.lora_targets, found.frozen_weights, found.precision) == (8, "qv", "bf16", "bf16_true")
    assert found.notes == ()
    for rank in ("0.5", '"8"', "0"):
        with pytest.raises(PlannerError, match="LoRAConverter.rank is .*; it must be a whole number"):
            _module(tmp_path, registry=LORA % (rank, ""))
    computed = LORA % ('rank_of(os.environ.get("RANK", "32"))', "")
    with pytest.raises(OpenQuestionsError, match="LoRAConverter.rank"):
        _module(tmp_path, registry=computed)
    assert _module(tmp_path, {"LoRAConverter.rank": "64"}, registry=computed).lora_rank == 64


def test_a_command_that_names_the_file_of_the_trainer(tmp_path: Path) -> None:
    written(tmp_path, PYTHON.format(**MODULE), "torchtitan/models/llama3/config_registry.py")
    command = 'CONFIG=llama3_8b\ntorchrun --nproc_per_node=16 torchtitan/train.py --module llama3 --config "${CONFIG}" "$@"\n'
    found = read(written(tmp_path, command, "run.sh"))
    assert (found.trainer, found.num_gpus, found.fields["tp"]) == ("torchtitan", 16, 2)


def test_what_a_module_says_elsewhere(tmp_path: Path) -> None:
    for parts in ({"compile": ", enable_async_tensor_parallel=True"}, {"registry": ', tp_gemm_backend="dist_gemm"'},
                  {"late": "config.compile.enable_async_tensor_parallel = True"}):  # fmt: skip
        assert "tp_overlap=on" in _module(tmp_path, **parts).trainer
    assert "expert_dispatch=hybridep" in _module(tmp_path, registry=', moe_comm_backend="hybridep"').trainer
    assert _module(tmp_path, registry=", num_mtp_layers=1").architecture == {"mtp_layers": 1}
    assert "loss=pieces" in _module(tmp_path, loss="ChunkedLossWrapper.Config(loss_fn=x)").trainer
    layers = _module(tmp_path, recompute='ActivationCheckpointConfig(mode="selective", selective_ac_option="2")').fields
    assert (layers["recompute"], layers["recompute_layers"]) == (Recompute.FULL, 16)
    late = "config = replace(config, parallelism=replace(config.parallelism, tensor_parallel_degree=4))"
    assert _module(tmp_path, late=late).fields["tp"] == 4


def test_what_a_module_leaves_open_is_asked_in_one_message(tmp_path: Path) -> None:
    late = "if large:\n        config.parallelism.tensor_parallel_degree = 4"
    parts = {"tokens": "SIZE * 4096", "recompute": "MemoryBudgetAC.Config()", "late": late}
    with pytest.raises(OpenQuestionsError) as caught:
        _module(tmp_path, **parts)
    names = ["SIZE", "activation_checkpoint.mode", "parallelism.tensor_parallel_degree"]
    assert sorted(one.name for one in caught.value.questions) == sorted(names)
    found = _module(tmp_path, dict(zip(names, ("2", "full", "4"), strict=True)), **parts)
    assert (found.fields["tp"], found.fields["recompute"], found.fields["micro_batch_size"]) == (4, Recompute.FULL, 2)


@pytest.mark.parametrize(("words", "fields", "option"), [
    ("activation-checkpoint:full", {"recompute": int(Recompute.FULL)}, ""), ("activation_checkpoint:none", {"recompute": 0}, ""),
    ("--compile.enable --compile.enable_async_tensor_parallel", {"tp": 2}, "tp_overlap=on"),
    ("--training.no-enable-cpu-offload", {"offload_parameters": 0}, ""),
])  # fmt: skip
def test_words_of_a_command_over_a_module(tmp_path: Path, words: str, fields: dict[str, int], option: str) -> None:
    written(tmp_path, PYTHON.format(**MODULE), "torchtitan/models/llama3/config_registry.py")
    script = f"torchrun --nproc_per_node=16 -m torchtitan.train --module llama3 --config llama3_8b {words}\n"
    found = read(written(tmp_path, script, "job.sh"))
    assert fields.items() <= found.fields.items() and option in found.trainer


def test_a_policy_between_of_a_command_is_asked(tmp_path: Path) -> None:
    written(tmp_path, PYTHON.format(**MODULE), "torchtitan/models/llama3/config_registry.py")
    words = "--module llama3 --config llama3_8b activation-checkpoint:memory-budget"
    file = written(tmp_path, f"torchrun --nproc_per_node=16 -m torchtitan.train {words}\n", "job.sh")
    with pytest.raises(OpenQuestionsError, match="--set activation_checkpoint.mode="):
        read(file)
    found = read(file, None, Given(settings={"activation_checkpoint.mode": "full"}))
    assert found.fields["recompute"] == Recompute.FULL


@pytest.mark.parametrize("name", ["ADOPT", "DecoupledAdamW"])
def test_an_optimizer_of_adams_kind_is_asked(tmp_path: Path, name: str) -> None:
    text = TOML.format(**USUAL).replace('"AdamW"', f'"{name}"')
    file = written(tmp_path, text, "a.toml")
    with pytest.raises(OpenQuestionsError, match=f"--set optimizer.name=AdamW .it is '{name}'"):
        read(file)
    assert read(file, None, Given(settings={"optimizer.name": "AdamW"})).optimizer == "adam"
    with pytest.raises(PlannerError, match="optimizer.name=AdamW .it is 'SGD'"):
        read(written(tmp_path, TOML.format(**USUAL).replace('"AdamW"', '"SGD"'), "b.toml"))


def test_replicas_of_torchft_are_said(tmp_path: Path) -> None:
    more = '[fault_tolerance]\nenable = true\nsemi_sync_method = "diloco"'
    assert any("torchft synchronises and 'diloco'" in one for one in _read(tmp_path, more=more).notes)
    assert _read(tmp_path, more=more.replace("true", "false")).notes == ()


@pytest.mark.parametrize(("words", "compiled"), [
    ("--compile.components loss", False), ("--compile.components loss model", True),
    ("--compile.components=loss --compile.components=model", True), ("--compile.components=loss,model", True),
])  # fmt: skip
def test_what_flags_compile(tmp_path: Path, words: str, compiled: bool) -> None:
    written(tmp_path, TOML.format(**USUAL), "a.toml")
    script = f"torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file a.toml --compile.enable {words}\n"
    assert ("compile=off" not in read(written(tmp_path, script, "job.sh")).trainer) is compiled
