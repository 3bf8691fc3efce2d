"""Options of a command over nanotron's file: laid into its sections, asked for where they are open."""

from pathlib import Path

import pytest

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

YAML = """
parallelism: {dp: 1, pp: 1, tp: 4}
tokens: {sequence_length: 2048, micro_batch_size: 1, batch_accumulation_per_replica: 1, train_steps: 10}
optimizer: {zero_stage: 0, optimizer_factory: {name: adamW}, accumulate_grad_in_fp32: true}
model:
  dtype: bfloat16
  model_config: {is_llama_config: true, hidden_size: 1024, intermediate_size: 2816, num_hidden_layers: 8, num_attention_heads: 16,
                 num_key_value_heads: 16, vocab_size: 32000, max_position_embeddings: 2048, tie_word_embeddings: true}
"""
STARTS = "torchrun --nnodes=$NNODES --nproc_per_node=$EACH -- own/train_it.py --run x \\\n  --config-file it.yaml --lr 1e-3 "
OVER = "--micro-batch-size 2 --batch-accumulation-per-replica $((64 / (2 * WORLD))) --tp 1 --pp 1 --dp $WORLD"


def _read(folder: Path, over: str = OVER, before: str = "NNODES=2\nEACH=4", **said: str) -> Reading:
    (folder / "it.yaml").write_text(YAML)
    (folder / "own").mkdir()
    (folder / "own" / "train_it.py").write_text("from nanotron.trainer import DistributedTrainer\n")
    script = folder / "run.sh"
    script.write_text(f"{before}\nWORLD=$((NNODES * EACH))\n{STARTS}{over}\n")
    return read(script, None, Given(settings=said))


def test_options_are_laid_over_the_file(tmp_path: Path) -> None:
    found = _read(tmp_path)
    assert [found.fields[one] for one in ("tp", "dp", "micro_batch_size", "num_microbatches")] == [1, 8, 2, 4]
    assert found.num_gpus == 8 and {"tp", "dp", "micro_batch_size"}.isdisjoint(found.unread)


def test_what_an_option_waits_for_is_asked_at_once(tmp_path: Path) -> None:
    with pytest.raises(PlannerError) as error:
        _read(tmp_path, before="NNODES=`wc -l < $NODES`\nEACH=$(nvidia-smi -L | wc -l)")
    assert "--set NNODES=VALUE" in str(error.value) and "--set EACH=VALUE" in str(error.value)
    assert "\ue000" not in str(error.value)


@pytest.mark.parametrize("option", ["--cp 2", "--ep 2", "--tensor-parallel-size 2"])
def test_other_degrees_are_never_just_listed(tmp_path: Path, option: str) -> None:
    with pytest.raises(PlannerError, match="which no plan of nanotron has"):
        _read(tmp_path, f"{OVER} {option}")


def test_an_optimizer_in_the_place_of_a_forks_is_noted(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(YAML.replace("adamW", "muon"))
    with pytest.raises(PlannerError, match="name=adamW"):
        read(file, None, Given())
    notes = read(file, None, Given(settings={"optimizer.optimizer_factory.name": "adamW"})).notes
    assert any("muon is priced as adamW" in one and "too large" in one for one in notes)
