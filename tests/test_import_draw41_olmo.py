"""Members of enumerations that a program of OLMo-core makes of a value: an option's default, what is said, what is open."""

from pathlib import Path

import pytest

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

PROGRAM = """
import argparse
from olmo_core.config import DType

def build(opts):
    return TransformerTrainModuleConfig(
        rank_microbatch_size=4096, max_sequence_length=2048, optim=AdamWConfig(lr=1e-3),
        dp_config=TransformerDataParallelConfig(name=DataParallelType(opts.sharing), param_dtype=DType({dtype}), shard_degree=4),
    )

model = TransformerConfig.olmo2_190M(vocab_size=50304)
loader = NumpyDataLoaderConfig(global_batch_size=65536)
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default=DType.bfloat16.value)
    parser.add_argument("--sharing", default="hsdp")
    parser.add_argument("--other", required=True)
    build(parser.parse_args())
"""


def _read(folder: Path, dtype: str = "opts.dtype", said: dict[str, str] | None = None) -> Reading:
    (folder / "train.py").write_text(PROGRAM.format(dtype=dtype))
    return read(folder / "train.py", None, Given(num_gpus=8, settings=said or {}))


def test_a_member_made_of_an_option(tmp_path: Path) -> None:
    found = _read(tmp_path)
    assert (found.precision, found.fields["dp"], found.fields["dp_shard"]) == ("bf16", 8, 4)
    assert _read(tmp_path, said={"dtype": "float32"}).precision == "fp32"


def test_what_a_member_waits_for_is_asked_first(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match=r"--set other=bfloat16\|float32"):
        _read(tmp_path, "opts.other")
    assert _read(tmp_path, "opts.other", {"other": "bfloat16"}).precision == "bf16"
