"""Words of forks: recompute in an older spelling, a loss of their own."""

from pathlib import Path

import pytest
from import_files import written

from planner.layout import Recompute
from planner.trainer import load_trainer
from planner.trainers.megatron import log
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

MEGATRON = """
deepspeed --num_gpus 8 pretrain_gpt.py --deepspeed --zero-stage 0 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 \\
    --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 \\
    --micro-batch-size 1 --global-batch-size 64 --vocab-size 32000 --bf16 {more}
"""
NANOTRON = """
parallelism: {{dp: 2, pp: 1, tp: 1}}
tokens: {{sequence_length: 2048, micro_batch_size: 1, batch_accumulation_per_replica: 1, train_steps: 10}}
optimizer: {{zero_stage: 0, optimizer_factory: {{name: adamW}}, accumulate_grad_in_fp32: true}}
model:
  dtype: bfloat16
  model_config: {{is_llama_config: true, hidden_size: 1024, intermediate_size: 2816, num_hidden_layers: 8, num_attention_heads: 16,
                 num_key_value_heads: 16, vocab_size: 32000, max_position_embeddings: 2048, tie_word_embeddings: true, {more}}}
"""


def _megatron(folder: Path, more: str) -> Reading:
    return read(written(folder, MEGATRON.format(more=more), "train.sh"), None, Given())


def _nanotron(folder: Path, more: str, model: str | None = None, **settings: str) -> Reading:
    return read(written(folder, NANOTRON.format(more=more)), None, Given(model=model, settings=settings))


@pytest.mark.parametrize(
    ("more", "recompute", "dropped"),
    [
        ("--checkpoint-activations --checkpoint-activations-granularity=selective", Recompute.SELECTIVE, ""),
        ("--checkpoint-activations-granularity selective", Recompute.SELECTIVE, ""),
        ("--checkpoint-activations --checkpoint-activations-granularity full", Recompute.FULL, ""),
        ("--checkpoint-activations-granularity full", Recompute.NONE, "full does nothing without"),
        ("--checkpoint-activations --recompute-granularity full --recompute-method uniform", Recompute.FULL, ""),
        ("--checkpoint-activations --recompute-granularity selective", Recompute.FULL, "granularity selective: dropped"),
        (
            "--checkpoint-activations --checkpoint-activations-granularity selective --recompute-granularity full",
            Recompute.SELECTIVE, "dropped, --checkpoint-activations-granularity selective goes before it",
        ),
    ],
)  # fmt: skip
def test_the_older_spelling_of_recompute_goes_before(tmp_path: Path, more: str, recompute: Recompute, dropped: str) -> None:
    found = _megatron(tmp_path, more)
    assert found.fields["recompute"] == recompute
    notes = " ".join(found.notes)
    assert dropped in notes if dropped else "dropped" not in notes


def test_the_older_spelling_of_recompute_in_a_log() -> None:
    dump = "  checkpoint_activations .......................... True\n  checkpoint_activations_granularity .............. {}\n"
    assert [log.read(dump.format(one)).facts["recompute"] for one in ("selective", "full")] == ["selective", "full"]


def test_the_parser_around_has_no_default_of_megatrons_later_words(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    own = "parser.add_argument('--checkpoint-activations-granularity', type=str, default='full')\n"
    (tmp_path / "megatron" / "arguments.py").write_text(own)
    assert _megatron(tmp_path, "").fields["recompute"] == Recompute.NONE


def test_arguments_of_forks_that_decide_nothing_are_not_asked_for(tmp_path: Path) -> None:
    found = _megatron(tmp_path, "--use_hpu --no-scaled-init --ext-lr-steps 4096 --no-seq-len-plus-one-tokens")
    assert {"use_hpu", "no_scaled_init", "ext_lr_steps"} <= set(found.noise)


@pytest.mark.parametrize(("value", "kernel"), [("true", "flash"), ("false", "unfused")])
def test_fused_attention_of_habanas_fork_keeps_no_scores(tmp_path: Path, value: str, kernel: str) -> None:
    found = _megatron(tmp_path, f"--no-masked-softmax-fusion --use-fused-sdpa {value}")
    assert load_trainer(found.trainer).kernels.attention == kernel


@pytest.mark.parametrize(
    ("more", "word", "answer"),
    [
        ("loss_function: sparse15, loss_alpha: 1.5, loss_topk: 512", "loss_function", "cross_entropy"),
        ("use_focal_loss: true", "use_focal_loss", "false"),
        ("loss_gamma: 2.0", "loss_gamma", "null"),
    ],
)
def test_a_loss_of_a_fork_is_asked_for_as_a_loss(tmp_path: Path, more: str, word: str, answer: str) -> None:
    for model in (None, "llama-2-7b"):
        asked = _nanotron(tmp_path, more, model).questions
        assert [(one.name, one.choices) for one in asked] == [(word, (answer,))] and "a loss of this fork" in asked[0].about
    found = _nanotron(tmp_path, more, **{word: answer})
    assert found.model is not None and found.model.num_layers == 8 and not found.questions
    assert any(f"{word} " in one and "buffers of its own are not in the memory" in one for one in found.notes)


def test_layers_of_a_fork_are_asked_for_beside_its_loss(tmp_path: Path) -> None:
    model, loss = _nanotron(tmp_path, "loss_function: sparse15, num_memory_slots: 64, loss_mtp_weight: 0.1").questions
    assert "has 'num_memory_slots', 'loss_mtp_weight'" in model.about and loss.name == "loss_function"


def test_cross_entropy_by_its_name_is_no_other_loss(tmp_path: Path) -> None:
    assert not _nanotron(tmp_path, "loss_function: cross_entropy, loss_reduction: mean").questions
