"""LLaMA-Factory over Megatron Core (mcore_adapter): degrees, states, and what is not read."""

from pathlib import Path

import pytest

from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given

OVER_MEGATRON = """
model_name_or_path: Qwen/Qwen3-30B-A3B
stage: sft
do_train: true
finetuning_type: full
cutoff_len: 4096
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
tensor_model_parallel_size: 2
sequence_parallel: true
pipeline_model_parallel_size: 4
expert_model_parallel_size: 2
use_distributed_optimizer: true
overlap_grad_reduce: true
moe_token_dispatcher_type: alltoall
recompute_granularity: full
"""


def _read(folder: Path, text: str, **said: str) -> Reading:
    """The job on 16 GPUs, with answers to what it asks."""
    (folder / "job.yaml").write_text(text)
    return read(folder / "job.yaml", None, Given(num_gpus=16, settings=said))


def test_llama_factory_over_megatron_is_read_with_its_degrees(tmp_path: Path) -> None:
    """pp 4 x tp 2 of 16 GPUs leave dp 2; a step is 1 x 8 x 2 sequences.  [mcore_adapter, trainer.py]"""
    found = _read(tmp_path, OVER_MEGATRON)
    assert found.trainer.startswith("megatron")
    wanted = {
        "tp": 2, "pp": 4, "ep": 2, "dp": 2, "zero": 1, "recompute": int(Recompute.FULL), "num_microbatches": 8,
        "sequence_parallel": 1,
    }  # fmt: skip
    assert {name: found.fields[name] for name in wanted} == wanted
    assert (found.global_batch_size, found.sequence_length, found.unread) == (16, 4096, ())


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("finetuning_type: full", "finetuning_type: lora", "of all weights"), ("stage: sft", "stage: dpo", "of all weights"),
        ("bf16: true", "bf16: true\nmixed_precision: bf16_mixed", "Megatron-Bridge"), ("bf16: true", "", "fp32 over Megatron"),
        ("bf16: true", "bf16: true\nfp8_recipe: blockwise", "fp8_recipe"),
        ("bf16: true", "bf16: true\nrecompute_num_layers: 4", "recompute_num_layers"),
    ],
)  # fmt: skip
def test_what_it_takes_and_is_not_read_there_is_refused_by_its_word(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(PlannerError, match=says):
        to_plan(_read(tmp_path, OVER_MEGATRON.replace(old, new)))


def test_states_over_megatron_are_asked_for_where_its_two_ways_differ(tmp_path: Path) -> None:
    text = OVER_MEGATRON.replace("use_distributed_optimizer: true\n", "")
    assert [one.name for one in _read(tmp_path, text).questions] == ["use_distributed_optimizer"]
    assert _read(tmp_path, text, use_distributed_optimizer="false").fields["zero"] == 0
