"""Every field of nanotron's configurations by itself: what the trainer makes of it, or a sentence that names it."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError

LLAMA = (
    "is_llama_config: true, hidden_size: 1024, num_hidden_layers: 8, num_attention_heads: 16, num_key_value_heads: 8, "
    "intermediate_size: 2816, vocab_size: 32000, max_position_embeddings: 4096, tie_word_embeddings: true"
)
JOB = """
general: {project: p}
parallelism: {dp: 4, pp: 1, tp: 2, tp_mode: REDUCE_SCATTER, tp_linear_async_communication: true%(parallel)s}
model: {dtype: bfloat16, make_vocab_size_divisible_by: %(rows)s, model_config: {%(sizes)s}%(model)s}
optimizer: {zero_stage: %(zero)s, accumulate_grad_in_fp32: true, optimizer_factory: {name: %(name)s}%(optimizer)s}
tokens: {sequence_length: %(length)s, micro_batch_size: 2, batch_accumulation_per_replica: 4, train_steps: 10%(tokens)s}
data_stages: [%(stages)s]
%(more)s
"""
USUAL = {
    "parallel": "", "rows": "1", "sizes": LLAMA, "model": "", "zero": "1", "name": "adamW", "optimizer": "", "length": "4096",
    "tokens": "", "stages": "{name: a, start_training_step: 1, data: {seed: 1}}", "more": "",
}  # fmt: skip


def _read(folder: Path, said: Given | None = None, **parts: str) -> Reading:
    return read(written(folder, JOB % {**USUAL, **parts}), None, said or Given())


@pytest.mark.parametrize(
    ("stage", "level", "said"), [("0", 0, False), ("1", 1, False), ("2", 1, True), ("3", 1, True), ("null", 0, False)]
)
def test_any_zero_stage_of_nanotron_shards_the_optimizer_alone(tmp_path: Path, stage: str, level: int, said: bool) -> None:
    found = _read(tmp_path, zero=stage)
    assert found.fields["zero"] == level
    assert any("is stage 1 in nanotron" in one for one in found.notes) is said


@pytest.mark.parametrize(("rows", "sizes", "padded"), [
    ("1", LLAMA, None), ("1000", LLAMA, None), ("128", LLAMA.replace("32000", "32001"), 32256),
    ("1", LLAMA.replace("32000", "50257"), 50258),
])  # fmt: skip
def test_rows_of_the_vocabulary_are_padded(tmp_path: Path, rows: str, sizes: str, padded: int | None) -> None:
    assert _read(tmp_path, rows=rows, sizes=sizes).architecture.get("vocab_size") == padded


def test_stages_of_the_data_have_lengths_of_their_own(tmp_path: Path) -> None:
    one = "{name: a, start_training_step: 1, sequence_length: 8192, data: {seed: 1}}"
    assert _read(tmp_path, stages=one).sequence_length == 8192
    both = f"{USUAL['stages']}, {one.replace('name: a', 'name: b')}"
    found = _read(tmp_path, stages=both)
    assert (found.sequence_length, asked_for(found)) == (None, ["--sequence-length S"])
    assert "4096 and 8192 tokens" in found.questions[0].about
    assert asked_for(_read(tmp_path, Given(sequence_length=8192), stages=both)) == []


def test_a_stage_with_a_batch_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="data_stages have 'micro_batch_size'"):
        _read(tmp_path, stages="{name: a, start_training_step: 1, data: {seed: 1}, micro_batch_size: 1}")


@pytest.mark.parametrize(("parts", "name"), [
    ({"model": ", lora: {r: 8}"}, "model.lora"), ({"tokens": ", segment_length: 1024"}, "tokens.segment_length"),
    ({"optimizer": ", master_weight_dtype: bfloat16"}, "optimizer.master_weight_dtype"),
    ({"tokens": ", global_batch_size: 64"}, "tokens.global_batch_size"),
    ({"more": "infini_attention: {segment_length: 64}"}, "infini_attention"), ({"more": "fp8: {enabled: true}"}, "fp8"),
    ({"more": "distillation: {teacher: x}"}, "distillation"), ({"more": "phases: {ref_model: x}"}, "phases"),
])  # fmt: skip
def test_words_of_a_fork_that_decide_are_refused_by_name(tmp_path: Path, parts: dict[str, str], name: str) -> None:
    with pytest.raises(PlannerError, match=f"{name} is .*--set {name}=null"):
        _read(tmp_path, **parts)
    assert _read(tmp_path, Given(settings={name: "null"}), **parts).num_gpus == 8


def test_other_words_of_a_fork_are_listed(tmp_path: Path) -> None:
    found = _read(tmp_path, optimizer=", update_clipping: true", more="z_loss: {enabled: true}\nslurm: {nodes: 1}")
    assert found.unread == ("z_loss", "optimizer.update_clipping")


def test_degrees_of_forks_that_split_nothing(tmp_path: Path) -> None:
    assert _read(tmp_path, parallel=", sp: 1, expert_tensor_parallel_size: 1").num_gpus == 8
    with pytest.raises(PlannerError, match="expert_tensor_parallel_size is 2"):
        _read(tmp_path, parallel=", expert_tensor_parallel_size: 2")
    with pytest.raises(PlannerError, match="tp_mode is 'SEQUENCE'"):
        read(written(tmp_path, (JOB % USUAL).replace("REDUCE_SCATTER", "SEQUENCE")))


@pytest.mark.parametrize(("parts", "sentence"), [
    ({"parallel": ", tp_recompute_allgather: false"}, "gathered inputs stay"), ({"name": "sgd"}, "no momentum"),
    ({"optimizer": ", torch_adam_is_fused: false"}, "one by one"),
    ({"sizes": f"{LLAMA}, _use_doc_masking: true"}, "ends at documents"),
    ({"sizes": f"{LLAMA}, _attn_implementation: eager"}, "'eager' is priced as flash_attention_2"),
])  # fmt: skip
def test_what_is_taken_for_what(tmp_path: Path, parts: dict[str, str], sentence: str) -> None:
    assert any(sentence in one for one in _read(tmp_path, **parts).notes)
    assert _read(tmp_path).notes == ()


def test_sizes_that_the_file_leaves_out_are_nanotrons(tmp_path: Path) -> None:
    found = _read(tmp_path, sizes="num_hidden_layers: 8, hidden_size: 1024, num_attention_heads: 16, vocab_size: null").model
    assert found is not None and (found.ffn_size, found.vocab_size, found.num_kv_heads) == (11008, 32000, 16)
    found = _read(tmp_path, sizes=f"{LLAMA}, attention_bias: true").model
    assert found is not None and not found.qkv_bias  # which Llama of nanotron does not have
    found = _read(tmp_path, sizes=f"{LLAMA.replace('llama', 'qwen2')}, sliding_window_size: 512").model
    assert found is not None and (found.window, found.num_windowed_layers) == (512, 8)


def test_mistral_has_the_sizes_of_llama(tmp_path: Path) -> None:
    found = _read(tmp_path, sizes=f"{LLAMA.replace('llama', 'mistral')}, sliding_window_size: 512, attn_pdrop: 0.0")
    assert found.model is not None and (found.model.num_kv_heads, found.model.window, asked_for(found)) == (8, 512, [])


def test_starcoder_2(tmp_path: Path) -> None:
    sizes = "is_starcoder2_config: true, hidden_size: 3072, num_attention_heads: 24, num_hidden_layers: 30, vocab_size: 49152"
    found = _read(tmp_path, sizes=f"{sizes}, grouped_query: true, num_kv_heads: 2, intermediate_size: 12288, rope_theta: 10000")
    assert found.model is not None and asked_for(found) == []
    model = found.model
    assert (model.num_kv_heads, model.ffn_size, model.norm, model.linear_bias) == (2, 12288, "layernorm", True)
    alone = _read(tmp_path, sizes=sizes).model
    assert alone is not None and (alone.num_kv_heads, alone.ffn_size) == (1, 12288)


def test_numbers_that_a_file_leaves_open_are_asked_together(tmp_path: Path) -> None:
    text = (JOB % USUAL).replace("dp: 4", "dp: null").replace("micro_batch_size: 2, ", "")
    with pytest.raises(OpenQuestionsError) as caught:
        read(written(tmp_path, text))
    assert [one.name for one in caught.value.questions] == ["parallelism.dp", "tokens.micro_batch_size"]
    settings = {"parallelism.dp": "4", "tokens.micro_batch_size": "2"}
    assert read(written(tmp_path, text), None, Given(settings=settings)).global_batch_size == 32


PROGRAM = """
import os
from nanotron.config import Config, LlamaConfig, ParallelismArgs, TokensArgs, ModelArgs, OptimizerArgs, AdamWOptimizerArgs
LENGTH = 2048
sizes = LlamaConfig(hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, intermediate_size=2816, vocab_size=32000)
optimizer = OptimizerArgs(zero_stage=1, accumulate_grad_in_fp32=True, optimizer_factory=AdamWOptimizerArgs(adam_eps=1e-8))
parallelism = ParallelismArgs(dp={dp}, pp=2, tp=2, pp_engine=OneForwardOneBackwardPipelineEngine(),
    tp_mode=TensorParallelLinearMode.REDUCE_SCATTER, tp_linear_async_communication=True)
tokens = TokensArgs(sequence_length=LENGTH * 2, train_steps=10, micro_batch_size=2, batch_accumulation_per_replica=4)
config = Config(general=None, parallelism=parallelism, tokens=tokens, optimizer=optimizer,
    model=ModelArgs(dtype=torch.float16, model_config=sizes))
{late}
config.save_as_yaml("job.yaml")
"""


def test_a_program_that_writes_the_yaml(tmp_path: Path) -> None:
    found = read(written(tmp_path, PROGRAM.format(dp="4", late=""), "job.py"))
    assert {"dp": 4, "pp": 2, "tp": 2, "schedule": 1, "sequence_parallel": 1, "zero": 1}.items() <= found.fields.items()
    assert (found.sequence_length, found.precision, found.global_batch_size, asked_for(found)) == (4096, "fp16", 32, [])
    assert found.model is not None and found.model.num_layers == 8
    late = read(written(tmp_path, PROGRAM.format(dp="4", late="config.parallelism.dp = 8"), "job.py"))
    assert late.fields["dp"] == 8
    with pytest.raises(OpenQuestionsError, match="--set DP="):
        read(written(tmp_path, PROGRAM.format(dp='int(os.environ["DP"])', late=""), "job.py"))


def test_a_script_that_starts_what_a_program_writes(tmp_path: Path) -> None:
    written(tmp_path, PROGRAM.format(dp="2", late=""), "job.py")
    script = "python job.py\ntorchrun --nproc_per_node=8 run_train.py --config-file job.yaml\n"
    found = read(written(tmp_path, script, "a.sh"))
    assert (found.num_gpus, found.fields["dp"]) == (8, 2)
    assert any("as job.py writes it" in one for one in found.notes)


def test_a_script_that_srun_starts_on_every_node(tmp_path: Path) -> None:
    written(tmp_path, JOB % {**USUAL, "sizes": LLAMA}, "jobs/job.yaml")
    node = "torchrun --nproc_per_node 4 --nnodes $COUNT /home/x/own/run_train.py --config-file /home/x/own/jobs/job.yaml\n"
    written(tmp_path, node, "jobs/node.sh")
    batch = "#!/bin/bash\n#SBATCH --nodes=2\nexport COUNT=2\nsrun --ntasks=2 /home/x/own/jobs/node.sh\n"
    batch += '# srun bash -c "torchrun train.py --config-file /home/x/other.yaml"\n'
    found = read(written(tmp_path, batch, "jobs/batch.sh"))
    assert (found.num_gpus, found.fields["dp"]) == (8, 4)
