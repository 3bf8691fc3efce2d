"""A project's own program beside a Megatron script: its layers, args_defaults, and arguments that only label a run."""

from pathlib import Path

import pytest

from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

SCRIPT = (
    "torchrun --nproc_per_node 8 pretrain_own.py --num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048"
    " --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 16 --vocab-size 32000 --bf16 --swiglu {words}\n"
)
PROGRAM = """
from megatron.training import pretrain
from own_model import OwnModel
from own.parts.words import add_own
if __name__ == "__main__":
    defaults = {"recompute_granularity": "selective", "swiglu": True, "num_layers": None}
    pretrain(data, model, kind, step, extra_args_provider=add_own, args_defaults=defaults)
"""
LAYERS = """
class OwnLayer(ParallelTransformerLayer):
    def __init__(self, config):
        args = get_args()
        assert args.transformer_impl == "local", "not with the other"
        self.norm = RMSNorm(args.hidden_size)
"""
WORDS = """
def add_own(parser):
    group = parser.add_argument_group(title="{title}")
    group.add_argument("--own-tester", default="x")
    return parser
"""


def _read(folder: Path, words: str = "", layers: str = LAYERS, title: str = "Metrics-Client") -> Reading:
    (folder / "own" / "parts").mkdir(parents=True)
    for name, text in {"pretrain_own": PROGRAM, "own_model": layers, "own/parts/words": WORDS.format(title=title)}.items():
        (folder / f"{name}.py").write_text(text)
    script = folder / "run.sh"
    script.write_text(SCRIPT.format(words=words))
    return read(script, None, Given())


def test_own_layers_keep_scores_without_flash_attention(tmp_path: Path) -> None:
    found = _read(tmp_path)
    assert "attention_kernel=unfused" in found.trainer
    assert any(one.startswith("attention unfused") for one in found.notes)
    assert any("--normalization RMSNorm" in one for one in found.notes)
    assert found.fields["recompute"] and any("by args_defaults" in one for one in found.notes)


@pytest.mark.parametrize("words", ["--use-flash-attn", "--transformer-impl transformer_engine"])
def test_what_the_script_says_of_attention_counts(tmp_path: Path, words: str) -> None:
    assert "unfused" not in _read(tmp_path, words).trainer


def test_layers_that_say_nothing_change_nothing(tmp_path: Path) -> None:
    assert "unfused" not in _read(tmp_path, layers="class OwnModel:\n    pass\n").trainer


def test_an_argument_of_a_group_of_logging_is_listed(tmp_path: Path) -> None:
    assert "own_tester" in "".join(_read(tmp_path, "--own-tester me").unread).replace("-", "_")


def test_an_argument_of_another_group_is_asked_about(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="own_tester=false"):
        _read(tmp_path, "--own-tester me", title="Model")


def test_what_a_program_sets_by_itself_goes_before_its_script(tmp_path: Path) -> None:
    text = "def model_provider():\n    args = get_args()\n    args.recompute_granularity = 'full'\n    args.swiglu = False\n"
    (tmp_path / "pretrain_own.py").write_text(text + PROGRAM)
    (tmp_path / "run.sh").write_text(SCRIPT.format(words="--recompute-method uniform"))
    found = read(tmp_path / "run.sh", None, Given())
    assert found.fields["recompute"] == Recompute.FULL and found.model is not None and not found.model.gated
    assert any("--swiglu False: pretrain_own.py sets it" in one for one in found.notes)
