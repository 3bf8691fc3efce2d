"""Scripts that configure a training with OLMo-core: degrees, batches in tokens, models of its factories, what is asked for."""

from pathlib import Path

import pytest
from trainer_samples import plan_of

from planner.errors import PlannerError
from planner.layout import Layout, Recompute
from planner.trainers.bundle.folder import make_bundle
from planner.trainers.bundle.target import ExportJob
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given, OpenQuestionsError
from planner.trainers.targets import load_target

SCRIPT = """
import argparse
from functools import partial
from olmo_core.internal.experiment import build_config, main

LENGTH = 2048
BATCH = 2**18

def build_model(common):
    return {model}

def build_module(common):
    {before}
    config = TransformerTrainModuleConfig(
        rank_microbatch_size={micro},
        max_sequence_length=common.max_sequence_length,
        optim={optim},
        compile_model=True,
        dp_config=TransformerDataParallelConfig({dp}),
        {more}
    )
    {after}
    return config

if __name__ == "__main__":
    main(partial(build_config, global_batch_size=BATCH, max_sequence_length=LENGTH, model_config_builder=build_model))
"""
USUAL = {
    "model": "TransformerConfig.olmo2_190M(vocab_size=common.tokenizer.padded_vocab_size())",
    "micro": "2 * common.max_sequence_length", "optim": "SkipStepAdamWConfig(lr=1e-3)",
    "dp": "name=DataParallelType.fsdp, param_dtype=DType.bfloat16, reduce_dtype=DType.float32",
    "more": "", "before": "", "after": "",
}  # fmt: skip
HSDP = "name=DataParallelType.hsdp, param_dtype=DType.bfloat16"


def _read(folder: Path, gpus: int = 16, said: Given | None = None, **parts: str) -> Reading:
    (folder / "train.py").write_text(SCRIPT.format(**{**USUAL, **parts}))
    return read(folder / "train.py", None, said or Given(num_gpus=gpus))


def _asked(folder: Path, said: Given | None = None, **parts: str) -> list[str]:
    with pytest.raises(OpenQuestionsError) as caught:
        _read(folder, 16, said, **parts)
    return [one.name for one in caught.value.questions]


def test_batches_in_tokens_and_a_factory(tmp_path: Path) -> None:
    found = _read(tmp_path)
    assert (found.sequence_length, found.global_batch_size, found.precision, found.optimizer) == (2048, 128, "bf16", "adam")
    fields = {"dp": 16, "micro_batch_size": 2, "num_microbatches": 4, "zero": 3, "dp_shard": 0, "recompute": 0}
    assert fields.items() <= found.fields.items()
    model = found.model
    assert model is not None and (model.num_layers, model.hidden_size, model.ffn_size, model.vocab_size) == (12, 768, 3072, 100352)
    assert to_plan(found).layout.dp == 16


@pytest.mark.parametrize(
    ("said", "shard"),
    [("", 8), (", shard_degree=4", 4), (", num_replicas=8", 2), (", num_replicas=get_world_size() // 4", 4),
     (", num_replicas=max(1, get_world_size() // 2) if get_world_size() > 1 else 1", 2)],
)
def test_groups_that_share_the_weights(tmp_path: Path, said: str, shard: int) -> None:
    """Without a word hsdp has one replica a node of 8 GPUs."""
    found = _read(tmp_path, dp=HSDP + said)
    assert (found.fields["dp"], found.fields["dp_shard"]) == (16, shard)
    assert any("one replica a node" in one for one in found.notes) == (not said)


def test_degrees(tmp_path: Path) -> None:
    found = _read(tmp_path, more="tp_config=TransformerTensorParallelConfig(degree=2),")
    assert {"tp": 2, "dp": 8, "sequence_parallel": 1}.items() <= found.fields.items()
    found = _read(tmp_path, more="cp_config=TransformerContextParallelConfig.zig_zag(degree=4),")
    assert {"cp": 4, "dp": 4}.items() <= found.fields.items() and any("ring" in one for one in found.notes)
    pipeline = "pp_config=TransformerPipelineParallelConfig(degree=4, schedule=PipelineScheduleType.{}),"
    found = _read(tmp_path, more=pipeline.format("single_1F1B"))
    assert {"pp": 4, "dp": 4, "micro_batch_size": 2, "num_microbatches": 16, "zero": 2, "vpp": 1}.items() <= found.fields.items()
    found = _read(tmp_path, more=pipeline.format("interleaved_1F1B"))
    assert (found.fields["pp"], found.fields["vpp"]) == (4, 2)  # 1, 2, 2, 2, 2, 1, 1, 1 layers are 3 each
    assert "first_stage_layers" not in found.fields
    split = "pp_config=TransformerPipelineParallelConfig(degree=4, schedule=PipelineScheduleType('1F1B'), split_points={}),"
    assert _read(tmp_path, more=split.format([2, 5, 8])).fields["first_stage_layers"] == 2
    with pytest.raises(PlannerError, match="pipeline ranks with 1, 5, 3, 3 layers"):
        _read(tmp_path, more=split.format([1, 6, 9]))
    with pytest.raises(PlannerError, match="split_points"):
        _read(tmp_path, more=split.format([9, 6, 3]))
    with pytest.raises(PlannerError, match="ulysses is not modelled"):
        _read(tmp_path, more="cp_config=TransformerContextParallelConfig.ulysses(degree=2),")
    with pytest.raises(PlannerError, match="ddp"):
        _read(tmp_path, dp="name=DataParallelType.ddp")


def test_experts_lie_over_the_ranks_that_share_the_weights(tmp_path: Path) -> None:
    small = "TransformerConfig.smallmoe(vocab_size=50304)"
    found = _read(tmp_path, dp=HSDP, model=small, more="ep_config=TransformerExpertParallelConfig(degree=-1),")
    assert (found.fields["ep"], found.fields["dp_shard"]) == (8, 8)
    model = found.model
    assert model is not None and (model.num_experts, model.top_k, model.shared_expert_ffn_size) == (32, 4, 1536)


@pytest.mark.parametrize(
    ("said", "recompute"),
    [
        ("TransformerActivationCheckpointingConfig()", Recompute.FULL),
        ("TransformerActivationCheckpointingConfig(TransformerActivationCheckpointingMode.full)", Recompute.FULL),
        ("TransformerActivationCheckpointingConfig(mode=Mode.selected_blocks, block_interval=1)", Recompute.FULL),
        ("None", Recompute.NONE),
    ],
)
def test_recompute_of_every_block_or_of_none(tmp_path: Path, said: str, recompute: Recompute) -> None:
    assert _read(tmp_path, more=f"ac_config={said},").fields["recompute"] == int(recompute)


@pytest.mark.parametrize("mode", ["selected_modules, modules=['blocks.*.feed_forward']", "budget, activation_memory_budget=0.5"])
def test_recompute_in_between_is_asked_for(tmp_path: Path, mode: str) -> None:
    more = f"ac_config=TransformerActivationCheckpointingConfig(mode=Mode.{mode}),"
    assert _asked(tmp_path, more=more) == ["ac_config"]
    said = Given(num_gpus=16, settings={"ac_config": "full"})
    assert _read(tmp_path, said=said, more=more).fields["recompute"] == int(Recompute.FULL)


def test_precisions(tmp_path: Path) -> None:
    assert _read(tmp_path, dp="name=DataParallelType.fsdp").precision == "fp32"
    assert _read(tmp_path, dp="name=DataParallelType.fsdp", more="autocast_precision=DType.bfloat16,").precision == "bf16"
    assert _read(tmp_path, more="float8_config=Float8Config(enabled=False),").precision == "bf16"
    assert _read(tmp_path, more="float8_config=Float8Config(ao=AOFloat8LinearConfig.recommended()),").precision == "fp8"
    assert _read(tmp_path, more="float8_config=Float8Config(ao_recipe=AOFloat8LinearRecipe.rowwise),").precision == "fp8_row"
    half = "TransformerConfig.olmo2_190M(vocab_size=512, dtype=DType.bfloat16)"
    assert _read(tmp_path, model=half).precision == "bf16_true"
    assert _read(tmp_path, dp=USUAL["dp"].replace("float32", "bfloat16")).notes[-1].startswith("dp_config.reduce_dtype bfloat16")


def test_sizes_of_llama_like(tmp_path: Path) -> None:
    sizes = "d_model=512, n_layers=6, n_heads=8, n_kv_heads=2, vocab_size=1000, hidden_size_multiplier=1.5"
    model = _read(tmp_path, model=f"TransformerConfig.llama_like({sizes})").model
    assert model is not None and (model.ffn_size, model.num_kv_heads, model.head_dim, model.qk_norm) == (2048, 2, 64, False)
    inner = "feed_forward=FeedForwardConfig(hidden_size=1280, bias=False), qk_norm=True, use_head_qk_norm=True"
    model = _read(tmp_path, model=f"TransformerConfig.llama_like({sizes}, {inner})").model
    assert model is not None and (model.ffn_size, model.qk_norm_spans) == (1280, "head")
    window = "sliding_window=SlidingWindowAttentionConfig(pattern=[1024, -1], force_full_attention_on_first_layer=False)"
    model = _read(tmp_path, model=f"TransformerConfig.llama_like({sizes}, {window})").model
    assert model is not None and (model.window, model.num_windowed_layers) == (1024, 3)
    assert _asked(tmp_path, model=f"TransformerConfig.llama_like({sizes}, gate=GateConfig())") == ["--model NAME"]


@pytest.mark.parametrize(
    ("call", "name"),
    [("olmo2_7B", "olmo-2-7b"), ("olmo2_1B_v2", "olmo-2-1b"), ("olmo2_32B", "olmo-2-32b"), ("llama2_7B", "llama-2-7b"),
     ("llama3_8B", "llama-3-8b"), ("olmo3_7B", "olmo-3-7b"), ("olmo3_32B", "olmo-3-32b"), ("olmo2_13B", "olmo-2-13b")],
)  # fmt: skip
def test_factories_are_the_presets(tmp_path: Path, call: str, name: str) -> None:
    rows = {"llama-2-7b": 32000, "llama-3-8b": 128256, "olmo-3-7b": 100278, "olmo-3-32b": 100278}.get(name, 100352)
    model = _read(tmp_path, model=f"TransformerConfig.{call}(vocab_size={rows})").model
    assert model is not None and model.name == name
    model = _read(tmp_path, model=f"TransformerConfig.{call}(vocab_size={rows}, n_layers=4)").model
    assert model is not None and (model.name, model.num_layers) == (call, 4)


@pytest.mark.parametrize(
    ("parts", "asked"),
    [
        ({"micro": "micro", "before": "micro = 4096\n    if common.launch:\n        micro *= 2"}, "micro"),
        ({"before": "global BATCH\n    if DEBUG:\n        BATCH = 4096"}, "BATCH"),
        ({"model": "TransformerConfig.olmo2_190M(vocab_size=TokenizerConfig.from_hf('a/b').padded_vocab_size())"}, "vocab_size"),
        ({"model": "TransformerConfig.ngpt_271M(vocab_size=512)"}, "--model NAME"),
        ({"after": "model = olmo2_190M()\n    model.block_pattern = ['gdn', 'attn']"}, "--model NAME"),
        ({"after": "other = my_model(vocab_size=512)"}, "--model NAME"),
        ({"more": "tp_config=TransformerTensorParallelConfig(degree=int(sys.argv[1])),"}, "tp_degree"),
        ({"more": "tp_config=TransformerTensorParallelConfig(degree=2) if common.wide else None,"}, "wide"),
        ({"more": "float8_config=Float8Config(enabled=common.float8),"}, "float8_enabled"),
    ],
)
def test_what_the_text_does_not_say_is_asked_for(tmp_path: Path, parts: dict[str, str], asked: str) -> None:
    assert _asked(tmp_path, **parts) == [asked]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"optim": "LionConfig(lr=1)"}, "optim is 'LionConfig'"),
        ({"optim": "AdamWConfig(dtype=DType.bfloat16)"}, "moments in bf16"),
        ({"after": "config.ac_config = None"}, "ac_config in line .* is set after"),
        ({"after": "config.dp_config.shard_degree = 4"}, "shard_degree in line .* is set after"),
        ({"after": "other = TransformerTrainModuleConfig(rank_microbatch_size=1)"}, "2 times TransformerTrainModuleConfig"),
        ({"model": "TransformerConfig.olmo2_190M(vocab_size=512, freeze_params=['embeddings.*'])"}, "freeze_params"),
        ({"after": "config = replace(config, ac_config=None)"}, "replace.* ac_config"),
        ({"after": "config.merge(['--train_module.tp_config.degree=2'])"}, "merge.* --train_module.tp_config"),
        ({"more": "**options,"}, "options"),
        ({"dp": "**options"}, "options"),
        ({"micro": "1000"}, "rank_microbatch_size by sequences"),
        ({"dp": "name=DataParallelType.hsdp, num_replicas=3"}, "does not divide"),
    ],
)
def test_what_makes_another_training_is_refused(tmp_path: Path, parts: dict[str, str], said: str) -> None:
    with pytest.raises(PlannerError, match=said):
        _read(tmp_path, **parts)


def test_what_is_for_other_numbers_of_gpus_does_not_count(tmp_path: Path) -> None:
    after = "if get_world_size() >= 1024:\n        config.rank_microbatch_size //= 2"
    assert _read(tmp_path, after=after).fields["micro_batch_size"] == 2
    assert _asked(tmp_path, Given(num_gpus=1024), after=after) == ["rank_microbatch_size"]
    assert _asked(tmp_path, Given(), after=after) == ["--gpus N"]


def test_scripts_of_2025(tmp_path: Path) -> None:
    """One call of main with the parts, 4096 tokens where it says none, and a class of its own for pipelines."""
    text = """
from olmo_core.internal.experiment import CommonComponents, main

def model(common):
    return TransformerConfig.olmo2_190M(vocab_size=common.tokenizer.padded_vocab_size())

def module(common):
    return TransformerPipelineTrainModuleConfig(
        rank_microbatch_size=2 * 4096, max_sequence_length=common.dataset.effective_sequence_length, optim=AdamWConfig(lr=1e-3),
        pp_config=TransformerPipelineParallelConfig(degree=2, schedule=PipelineScheduleType.single_1F1B),
        dp_config=TransformerDataParallelConfig(name=DataParallelType.fsdp, param_dtype=DType.bfloat16),
    )

main(global_batch_size=128 * 4096, model_config_builder=model, train_module_config_builder=module)
"""
    (tmp_path / "train.py").write_text(text)
    found = read(tmp_path / "train.py", None, Given(num_gpus=8))
    assert (found.sequence_length, found.global_batch_size) == (4096, 128)
    assert {"pp": 2, "dp": 4, "micro_batch_size": 2, "num_microbatches": 16}.items() <= found.fields.items()
    assert any("4096 tokens" in one for one in found.notes)


def test_gpus_that_the_script_launches_itself_on(tmp_path: Path) -> None:
    after = "launch = build_launch_config(num_nodes=2, name=name)"
    found = _read(tmp_path, said=Given(), after=after)
    assert found.num_gpus == 16 and any("16 GPUs" in one for one in found.notes)
    assert _read(tmp_path, said=Given(num_gpus=8), after=after).num_gpus == 8
    assert _read(tmp_path, said=Given(), after=after.replace("name=", "num_gpus=4, name=")).num_gpus == 8
    assert _asked(tmp_path, Given(), after=after.replace("2", "nodes")) == ["--gpus N"]


def test_a_script_that_starts_one_is_read_with_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from olmo_core.config import DType\n" + SCRIPT.format(**USUAL))
    (tmp_path / "run.sh").write_text("torchrun --nproc_per_node=8 train.py my-run\n")
    assert read(tmp_path / "run.sh", None, Given()).num_gpus == 8


def test_a_factory_that_an_option_names(tmp_path: Path) -> None:
    before = "parser.add_argument('--model-factory', default='llama2_271M')\n"
    before += "    factory = getattr(TransformerConfig, opts.model_factory)"
    found = _read(tmp_path, before=before, after="model = factory(vocab_size=512)", model="None")
    assert found.model is not None and (found.model.name, found.model.hidden_size) == ("llama2_271M", 1024)
    assert any("model_factory" in one for one in found.notes)
    assert _asked(tmp_path, before=before, after="model = own_model(vocab_size=512)", model="None") == ["--model NAME"]


@pytest.mark.parametrize(
    "length", ["opts.sequence_length or 4096", "opts.sequence_length if opts.sequence_length is not None else 4096"]
)
def test_the_cookbook_and_the_length_of_an_option(tmp_path: Path, length: str) -> None:
    text = """
from olmo_core.internal import cookbook

def build(opts):
    length = LENGTH
    tokenizer = TokenizerConfig.dolma2()
    model = TransformerConfig.olmo3_190M(vocab_size=tokenizer.padded_vocab_size()).with_rope_scaling(scaling)
    module = cookbook.configure_train_module(
        max_sequence_length=length, rank_microbatch_size=length, learning_rate=1e-4, scheduler=s, float8_enabled=True, cp_degree=2,
        dp_shard_degree=2,
    )
    data = NumpyFSLDatasetConfig.glob("*.npy", sequence_length=length)
    return NumpyDataLoaderConfig(global_batch_size=64 * length)
"""
    (tmp_path / "train.py").write_text(text.replace("LENGTH", length))
    found = read(tmp_path / "train.py", None, Given(num_gpus=16))
    assert (found.sequence_length, found.global_batch_size, found.precision) == (4096, 64, "fp8")
    fields = {"cp": 2, "dp": 8, "dp_shard": 2, "micro_batch_size": 1, "num_microbatches": 8, "recompute": 0}
    assert fields.items() <= found.fields.items()
    assert found.model is not None and (found.model.window, found.model.num_windowed_layers) == (4096, 9)
    found = read(tmp_path / "train.py", None, Given(num_gpus=16, sequence_length=8192))
    assert (found.sequence_length, found.global_batch_size) == (8192, 64)


@pytest.mark.parametrize(
    "layout",
    [{"zero": 3, "tp": 2, "dp": 4}, {"zero": 3, "dp_shard": 4, "recompute": 2},
     {"zero": 2, "pp": 2, "vpp": 2, "schedule": 2, "dp": 4}, {"zero": 2, "pp": 2, "dp": 4, "first_stage_layers": 15},
     {"zero": 2, "pp": 2, "dp": 4, "schedule": 0}],
)  # fmt: skip
def test_what_the_planner_exports_is_read_as_the_same_plan(tmp_path: Path, layout: dict[str, int]) -> None:
    fields = {"dp": 8, "num_microbatches": 16, "sequence_parallel": int("tp" in layout), **layout}
    plan = plan_of("torchtitan", Layout(**fields))
    files = make_bundle(load_target("olmo-core"), ExportJob.of(plan), "torchrun").files
    (tmp_path / "olmo_train.py").write_text(files["olmo_train.py"])
    again = to_plan(read(tmp_path / "olmo_train.py", None, Given(num_gpus=plan.num_gpus)))
    assert again.layout == plan.layout
    assert (again.workload.sequence_length, again.workload.global_batch_size, again.workload.precision) == (
        plan.workload.sequence_length, plan.workload.global_batch_size, plan.workload.precision,
    )  # fmt: skip
    sizes = ("num_layers", "hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "qk_norm")
    assert [getattr(again.workload.model, one) for one in sizes] == [getattr(plan.workload.model, one) for one in sizes]


@pytest.mark.parametrize(
    "text",
    [
        "TransformerTrainModuleConfig(rank_microbatch_size=" + "(" * 150 + "1" + ")" * 150 + ")",
        "TransformerTrainModuleConfig(rank_microbatch_size=" + "-" * 5000 + "1)",
        "TransformerTrainModuleConfig(rank_microbatch_size=" + "f(" * 90 + ")" * 90 + ", dp_config=dp)\ndp = dp",
        "TransformerTrainModuleConfig(rank_microbatch_size=9**9**9, dp_config=dp_of())\ndef dp_of():\n    return dp_of()",
        "TransformerTrainModuleConfig(**options)",
        "x" + ".y(1)" * 3000 + "\nTransformerTrainModuleConfig(ac_config=1 if a else 2)",
        "import os\nos.system('touch ran')\nTransformerTrainModuleConfig(optim=os.system('touch ran'))",
        "".join(f"a{i + 1} = a{i} + a{i}\n" for i in range(90)) + "TransformerTrainModuleConfig(rank_microbatch_size=a90)",
        "TransformerTrainModuleConfig()\n" + "f = getattr(TransformerConfig, n)\n" * 3000 + "f(vocab_size=1)\n" * 3000,
        "TransformerConfig.llama_like(d_model=0, n_layers=-1, n_heads=0, vocab_size=True)\nTransformerTrainModuleConfig()",
        "cookbook.configure_train_module(rank_microbatch_size=1, max_sequence_length=" + "g(" * 80 + ")" * 80 + ")",
    ],
)
def test_hostile_text_ends_in_a_sentence_and_never_runs(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(f"import olmo_core\n{text}\n")
    with pytest.raises(PlannerError):
        read(Path("train.py"), None, Given(num_gpus=8))
    assert not Path("ran").exists()


def test_windows_that_a_model_has_not_are_no_change_of_it_where_they_are_set_to_none(tmp_path: Path) -> None:
    cleared = "built = build_model(None)\n    built.block.attention.sliding_window = {}"
    job = _read(tmp_path, before=cleared.format("None"))
    assert job.model is not None and job.questions == ()
    assert "--model NAME" in _asked(tmp_path, before=cleared.format("128"))
