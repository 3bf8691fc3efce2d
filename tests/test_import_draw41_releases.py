"""What a blind draw showed: readings under each release, chunks of llama4, kernels of Primus, bins of NeMo-RL, own recipes."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from import_files import NEMO_RL, written

from planner.trainers.megatron_bridge import recipe_releases
from planner.trainers.reading import modules, read
from planner.trainers.reading.given import Given, OpenQuestionsError
from planner.trainers.reading.python_text import tree_of

SFT = NEMO_RL + """  dtensor_cfg: {enabled: true, tensor_parallel_size: 1}
  megatron_cfg: {enabled: false}
  WORD: {enabled: ENABLED, train_mb_tokens: TOKENS}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
TUNE = """
model: {_component_: torchtune.models.llama4.lora_llama4_scout_17b_16e, lora_attn_modules: [q_proj, v_proj], lora_rank: 16}
tokenizer: {_component_: torchtune.models.llama4.llama4_transform, max_seq_len: 16384}
dataset: {_component_: torchtune.datasets.alpaca_dataset}
optimizer: {_component_: torch.optim.AdamW}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
batch_size: 2
dtype: bf16
enable_activation_checkpointing: true
"""
TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 8
seq_len = 2048
[parallelism]
data_parallel_shard_degree = 8
[primus_turbo]
enable_primus_turbo = true
use_turbo_attention = true
use_turbo_float8_linear = true
use_moe_fp8 = false
"""


@pytest.mark.parametrize(("start", "times"), [("same", 1), ("other", 2)])
def test_a_program_is_read_anew_only_where_its_recipe_is_another_one(tmp_path: Path, start: str, times: int) -> None:
    def known_in(release: str) -> recipe_releases.Known:
        return {"same": {"train.global_batch_size": 8}, "other": {"train.global_batch_size": 16 if release == "1.0" else 32}}

    of = recipe_releases.Releases(
        library="Megatron-Bridge", names=("1.0", "1.1", "main"), containers=(), pinned=re.compile("x(1.0)"), known_in=known_in,
        of_numbers=lambda major, minor, patch: f"{major}.{minor}",
    )  # fmt: skip
    made: list[Mapping[str, Any]] = []

    def read_with(_: Given, known: recipe_releases.Known) -> Mapping[str, Any]:
        made.append({**dict(known)[start], "train.micro_batch_size": 1})
        return made[-1]

    said = Given()
    recipe_releases.chosen(said, (written(tmp_path, "", "a.py"),), read_with, of)
    assert len(made) == times and [one.choices for one in said.questions] == [("1.0", "main")] * (times - 1)


def test_a_module_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "def a():\n    pass\n\ndef b():\n    pass\n\ndef c():\n    pass\n", "parts.py")
    program = written(tmp_path, "from parts import a, b, c\na()\nb()\nc()\n", "train.py")
    tree, seen = tree_of(program), []
    monkeypatch.setattr(modules, "tree_of", lambda file: seen.append(file) or tree_of(file))
    assert len(modules.with_modules(tree, program).body) == 7 and len(seen) == 1


def test_builders_of_llama4_attend_in_chunks(tmp_path: Path) -> None:
    model = read(written(tmp_path, TUNE, "job.yaml"), None, Given(num_gpus=8)).model
    assert model is not None and (model.window, model.chunked_attention) == (8192, True) and model.num_windowed_layers == 36
    other = TUNE.replace("llama4.lora_llama4_scout_17b_16e", "mistral.lora_mistral_7b")
    model = read(written(tmp_path, other, "other.yaml"), None, Given(num_gpus=8)).model
    assert model is not None and not model.window and not model.chunked_attention


def test_kernels_of_primus_are_noted_without_their_converter(tmp_path: Path) -> None:
    found = read(written(tmp_path, TITAN, "a.toml"), None, Given())
    assert "primus_turbo: its kernels are priced as torchtitan's" in found.notes
    for word in ("use_moe_fp8 = false", "enable_attention_float8 = false"):
        more = TITAN.replace("use_moe_fp8 = false\n", "") + word.replace("false", "true")
        with pytest.raises(OpenQuestionsError, match="primus_turbo=false"):
            read(written(tmp_path, more, "b.toml"), None, Given())


@pytest.mark.parametrize("word", ["sequence_packing", "dynamic_batching"])
@pytest.mark.parametrize("tokens", ["2048", "4096", "${mul:1,2}"])
def test_bins_of_samples(tmp_path: Path, word: str, tokens: str) -> None:
    text = SFT.replace("WORD", word).replace("TOKENS", tokens if tokens.isdigit() else f'"{tokens}"')
    notes = read(written(tmp_path, text.replace("ENABLED", "true"), "sft.yaml"), None, Given()).notes
    assert any(one.startswith(f"{word}: the batch counts samples") and "time comes out too long" in one for one in notes)
    notes = read(written(tmp_path, text.replace("ENABLED", "false"), "off.yaml"), None, Given()).notes
    assert not any("the batch counts samples" in one for one in notes)


def test_a_recipe_of_the_projects_own_beside_its_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "recipes" / "configs"
    folder.mkdir(parents=True)
    text = TUNE.replace("llama4.lora_llama4_scout_17b_16e", "llama3_1.lora_llama3_1_8b")
    plain = "from torchtune import training\n"
    for name, program, said in (
        ("tool_sft", plain, "tool_sft.py is the project's own"), ("joined", f"{plain}torch.cat(logits)\n", "joins the logits"),
        ("lora_finetune_distributed", plain, ""), ("other", "import transformers\n", ""),
    ):  # fmt: skip
        written(folder.parent, program, f"{name}.py")
        notes = " ".join(read(written(folder, text, f"{name}.yaml"), None, Given(num_gpus=8)).notes)
        assert said in notes and ("project's own" in notes) is bool(said)
