"""What torchtitan, nanotron and OLMo-core do by release or without a word, and how torchtitan's own script starts it."""

from pathlib import Path

import pytest
from import_files import written
from test_import_olmo_core import SCRIPT, USUAL

from planner.errors import PlannerError
from planner.layout import Recompute, Schedule
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError

TOML = '[model]\nname = "llama3"\nflavor = "8B"\n[activation_checkpoint]\nmode = "full"\n'
OLD = f"{TOML}[training]\nbatch_size = 16\nseq_len = 2048\ndata_parallel_shard_degree = 2\n"
PIPES = "[experimental]\npipeline_parallel_degree = 4\n"
REGISTRY = """
from torchtitan.config import ParallelismConfig, TrainingConfig

def llama3_8b() -> Trainer.Config:
    return Trainer.Config(
        loss=ChunkedCELoss.Config({chunks}),
        hf_assets_path="./assets/hf/Llama-3.1-8B",
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=1, seq_len=8192),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
    )
"""


def _read(folder: Path, text: str, name: str = "a.toml", said: Given | None = None) -> Reading:
    return read(written(folder, text, name), None, said or Given(num_gpus=8))


def _asked(folder: Path, text: str, name: str = "run.sh", said: Given | None = None) -> list[str]:
    with pytest.raises(OpenQuestionsError) as caught:
        _read(folder, text, name, said or Given())
    return [one.name for one in caught.value.questions]


def test_microbatches_of_the_first_pipelines(tmp_path: Path) -> None:
    """As many as stages until 2025-04; of one sequence since then."""
    fields = _read(tmp_path, OLD + PIPES).fields
    assert (fields["micro_batch_size"], fields["num_microbatches"]) == (4, 4)
    fields = _read(tmp_path, f"{OLD}{PIPES}pipeline_parallel_microbatches = 8\n").fields
    assert (fields["micro_batch_size"], fields["num_microbatches"]) == (2, 8)
    between = f"{TOML}[training]\nbatch_size = 16\n[parallelism]\npipeline_parallel_degree = 4\n"
    answer = "parallelism.pipeline_parallel_microbatch_size"
    assert _asked(tmp_path, between, "a.toml", Given(num_gpus=8)) == [answer]
    assert _read(tmp_path, between, said=Given(num_gpus=8, settings={answer: "4"})).fields["num_microbatches"] == 4
    assert _read(tmp_path, between.replace("batch_size", "local_batch_size")).fields["num_microbatches"] == 16


def test_names_of_2024(tmp_path: Path) -> None:
    points = 'pipeline_parallel_schedule = "interleaved_1f1b"\n'
    assert _read(tmp_path, OLD + PIPES + points).fields["schedule"] == int(Schedule.INTERLEAVED)
    assert _read(tmp_path, f"{OLD}fp8_linear = true\n").precision == "fp8"
    assert _read(tmp_path, f"{OLD}fp8_linear = false\n").precision == "bf16"
    compiled = _read(tmp_path, f"{OLD}compile = true\n")  # the loss is not
    assert compiled.trainer == "torchtitan@0.0.2" and any("priced uncompiled" in one for one in compiled.notes)


@pytest.mark.parametrize("script", [
    "NGPU=4 CONFIG_FILE=./titan/llama3_8b.toml ./run_train.sh --parallelism.tensor_parallel_degree 2\n",
    "export NGPU=4\nexport CONFIG_FILE=./titan/llama3_8b.toml\nbash run_llama_train.sh --parallelism.tensor_parallel_degree 2\n",
])  # fmt: skip
def test_torchtitans_own_script_need_not_be_there(tmp_path: Path, script: str) -> None:
    assert _asked(tmp_path, script) == ["config_file"]
    written(tmp_path, f"{TOML}[training]\nlocal_batch_size = 3\n[parallelism]\n", "titan/llama3_8b.toml")
    found = _read(tmp_path, script, "run.sh", Given())
    assert found.num_gpus == 4 and {"tp": 2, "dp": 2, "micro_batch_size": 3}.items() <= found.fields.items()


def test_of_several_trainings_one_is_read(tmp_path: Path) -> None:
    written(tmp_path, f"{TOML}[training]\nlocal_batch_size = 2\n[parallelism]\n", "a.toml")
    run = "NGPU=8 CONFIG_FILE=a.toml ./run_train.sh --parallelism.tensor_parallel_degree={}\n"
    script = run.format("2 --training.seq_len 4096") + run.format(4)
    found = _read(tmp_path, script, "run.sh", Given())
    assert (found.fields["tp"], found.sequence_length) == (2, 4096) and "of 2 commands that train" in found.notes[-1]
    found = _read(tmp_path, script, "run.sh", Given(settings={"which_training": "2"}))
    assert (found.fields["tp"], found.sequence_length) == (4, 2048)


def test_a_function_of_torchtitans_registry_that_is_not_there(tmp_path: Path) -> None:
    script = "MODULE=llama3 CONFIG={} ./run_train.sh --parallelism.data_parallel_shard_degree 4 --training.seq_len 8192\n"
    few = ["training.local_batch_size", "activation_checkpoint.mode"]
    assert _asked(tmp_path, script.format("llama3_8b")) == few
    assert _asked(tmp_path, script.format("llama3_70b")) == [*few, "parallelism.tensor_parallel_degree"]
    said = Given(settings={"training.local_batch_size": "1", "activation_checkpoint.mode": "selective"})
    found = _read(tmp_path, script.format("llama3_8b"), "run.sh", said)
    assert (found.fields["micro_batch_size"], found.sequence_length, found.trainer) == (1, 8192, "torchtitan+compile=off")
    assert found.model is not None and found.model.name == "llama-3.1-8b" and "is not there" in found.notes[0]


def test_what_is_compiled_and_what_tokens_make(tmp_path: Path) -> None:
    for parts, said in (('["loss"]', "10 bytes less"), ('["model"]', "10 bytes more"), ('["model", "loss"]', "")):
        notes = " ".join(_read(tmp_path, f"{TOML}[parallelism]\n[compile]\nenable = true\ncomponents = {parts}\n").notes)
        assert said in notes and bool(notes) == bool(said)
    module = REGISTRY.format(chunks="").replace("local_batch_size=1, seq_len=8192", "max_context_length=8192")
    found = _read(tmp_path, module, "llama3/config_registry.py")  # of 16384 tokens
    assert (found.sequence_length, found.fields["micro_batch_size"]) == (8192, 2)
    compiled = "compile=CompileConfig(enable=True, components=['loss']),\n        parallelism="
    found = _read(tmp_path, module.replace("parallelism=", compiled), "llama3/config_registry.py")
    assert "10 bytes less" in " ".join(found.notes)


def test_a_configuration_that_0_2_saved(tmp_path: Path) -> None:
    text = """{"model": {"name": "llama3", "flavor": "8B"}, "training": {"local_batch_size": 2}, "compile": {"enable": false},
        "parallelism": {"data_parallel_shard_degree": -1}, "activation_checkpoint": {"mode": "full"}}"""
    found = _read(tmp_path, text, "a.json")
    assert found.fields["recompute"] == int(Recompute.FULL) and found.trainer == "torchtitan+compile=off"
    assert found.model is not None and found.model.name == "llama-3.1-8b"


def test_pieces_of_a_loss(tmp_path: Path) -> None:
    for chunks, said in (("num_chunks=16", True), ("num_chunks=8", False), ("", False)):
        notes = _read(tmp_path, REGISTRY.format(chunks=chunks), "llama3/config_registry.py").notes
        assert any("in 16 pieces" in one for one in notes) is said


NANOTRON = """
model: {{dtype: bfloat16, model_config: {{is_qwen2_config: true, hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 16,
  num_attention_heads: 32, vocab_size: 128256 {model}}}}}
optimizer: {{accumulate_grad_in_fp32: true, zero_stage: 0}}
parallelism: {{dp: 4, pp: 1, tp: 2 {parallel}}}
tokens: {{batch_accumulation_per_replica: 4, micro_batch_size: 2, sequence_length: 4096}}
"""


def test_nanotron_says_what_its_loss_holds_and_what_its_word_for_recompute_does(tmp_path: Path) -> None:
    more = ", z_loss_enabled: true, moe_config: {num_experts: 8}"
    found = _read(tmp_path, NANOTRON.format(model=more, parallel=", recompute_granularity: full"), "a.yaml")
    said = "\n".join(found.notes)
    assert found.fields["recompute"] == 0 and all(
        one in said for one in ("6 bytes more of a token", "recompute_granularity full", "1/2 of their weights")
    )
    assert _read(tmp_path, NANOTRON.format(model="", parallel=""), "a.yaml").notes == ()


def test_a_single_process_of_olmo_core_has_no_mixed_precision(tmp_path: Path) -> None:
    written(tmp_path, SCRIPT.format(**{**USUAL, "model": "TransformerConfig.olmo2_190M(vocab_size=50304)"}), "train.py")
    for mode, gpus, precision in (("train_single", 1, "fp32"), ("train", 8, "bf16")):
        run = f"torchrun --nproc-per-node=8 train.py {mode} run1 cluster\n"
        found = _read(tmp_path, run, "run.sh", Given())
        assert (found.num_gpus, found.precision) == (gpus, precision)


def test_a_loss_of_olmo_core_that_holds_no_logits(tmp_path: Path) -> None:
    model = "TransformerConfig.olmo2_190M(vocab_size=50304)"
    fused = "loss = LMLossImplementation.fused_linear"
    notes = _read(tmp_path, SCRIPT.format(**{**USUAL, "model": model, "before": fused}), "train.py").notes
    assert any("fused_linear holds no logits: 4 bytes less" in one for one in notes)


@pytest.mark.parametrize("script", [
    "CONFIG=configs/7b.yaml bash run_train.sh\n", "export CONFIG=llama7b; export MODULE=gcc\nsrun bash scripts/run_train.sh\n",
    "CONFIG_FILE=ds.yaml ./run_train.sh\n", "MODULE=llama3 CONFIG=configs/7b.yaml bash run_train.sh\n",
])  # fmt: skip
def test_a_script_of_its_name_alone_is_not_torchtitans(tmp_path: Path, script: str) -> None:
    with pytest.raises(PlannerError) as caught:
        _read(tmp_path, script, "run.sh", Given())
    assert "config_registry" not in str(caught.value) and "config_file" not in str(caught.value)


@pytest.mark.parametrize(("words", "sizes"), [
    ("local_batch_size=2, seq_len=2048, max_context_length=4096", (2048, 2)),
    ("local_batch_size=2, max_context_length=4096", (2048, 2)), ("max_context_length=4096", (4096, 4)),
])  # fmt: skip
def test_a_length_beside_the_words_of_versions_without_it(tmp_path: Path, words: str, sizes: tuple[int, int]) -> None:
    module = REGISTRY.format(chunks="").replace("local_batch_size=1, seq_len=8192", words)
    found = _read(tmp_path, module, "llama3/config_registry.py")
    assert (found.sequence_length, found.fields["micro_batch_size"]) == sizes
    said = "max_context_length 4096 is no word of the version that has local_batch_size"
    assert any(said in one for one in found.notes) is ("local" in words)


def test_a_length_of_no_tokens_is_refused(tmp_path: Path) -> None:
    module = REGISTRY.format(chunks="").replace("local_batch_size=1, seq_len=8192", "max_context_length=0")
    with pytest.raises(PlannerError, match=r"training\.max_context_length"):
        _read(tmp_path, module, "llama3/config_registry.py")


def test_components_are_those_of_the_keyword(tmp_path: Path) -> None:
    for words, said in (
        ("enable=True, backend=\"enable=True components=['loss']\"", False), ("components=['loss'], enable=True", True),
    ):  # fmt: skip
        compiled = f"compile=CompileConfig({words}),\n        parallelism="
        found = _read(tmp_path, REGISTRY.format(chunks="").replace("parallelism=", compiled), "llama3/config_registry.py")
        assert any("10 bytes less" in one for one in found.notes) is said


@pytest.mark.parametrize("word", ["fp8_linear", "enable_float8_linear"])
def test_the_note_on_float8_names_the_word_of_the_file(tmp_path: Path, word: str) -> None:
    value = '"dynamic"' if word == "fp8_linear" else "true"
    found = _read(tmp_path, f"{TOML}[training]\n{word} = {value}\n[parallelism]\n")
    assert found.precision == "bf16" and any(one.startswith(f"{word} is no word of the version") for one in found.notes)
