"""Questions of an import: named by what a user can answer, and answered by it."""

import re
from pathlib import Path

import pytest

from planner.trainers.reading import read
from planner.trainers.reading.given import Given, OpenQuestionsError
from tests.import_files import written

COMMAND = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 4096 --num-attention-heads 32 --bf16"
    " --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 64 --vocab-size 49152"
)


def _asked(path: Path, **settings: str) -> OpenQuestionsError:
    with pytest.raises(OpenQuestionsError) as raised:
        read(path, "megatron", Given(settings=settings))
    return raised.value


def test_a_flag_that_a_variable_names_is_asked_for_by_the_variable(tmp_path: Path) -> None:
    found = _asked(written(tmp_path, f"{COMMAND} --$EXTRA\n", "run.sh"))
    assert [one.name for one in found.questions] == ["EXTRA"] and "--${EXTRA}" in str(found)
    assert not re.search("[\ue000\ue001]", str(found))


def test_an_argument_may_be_left_out_whose_variable_has_its_name(tmp_path: Path) -> None:
    path = written(tmp_path, f'kind="$1"\nCOMMAND="{COMMAND} --kind $kind"\nsrun bash -c "export A=$kind; $COMMAND"\n', "run.sh")
    assert [one.name for one in _asked(path).questions] == ["kind"]
    found = read(path, "megatron", Given(settings={"kind": "false"}))
    assert found.global_batch_size == 64 and not found.unread
