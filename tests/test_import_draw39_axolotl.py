"""axolotl's files as they are written: adapters on part of the layers, lengths under a removed name, CPUs."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

FILE = """
base_model: meta-llama/Llama-3.1-8B
datasets: [{path: alpaca}]
adapter: lora
lora_r: 16
lora_target_modules: [q_proj, k_proj, v_proj, o_proj, down_proj, up_proj]
micro_batch_size: 2
"""


def test_layers_without_adapters_that_are_priced_with_them_are_named(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(FILE + "sequence_len: 2048\n")
    said = run("import", str(tmp_path / "job.yaml"), "--gpus", "1").stderr
    assert "adapters on q, k, v, o, up, down alone are priced as all, so gate too" in said
    (tmp_path / "job.yaml").write_text(FILE.replace("down_proj, up_proj", "gate_proj, down_proj, up_proj"))
    read = run("import", str(tmp_path / "job.yaml"), "--gpus", "1")
    said = read.stderr
    assert "alone are priced" not in said
    job = "llama-3.1-8b on 1 x h100-sxm, sequences of 512 tokens, 2 per step (1.024K tokens), bf16, adam, adapters of rank 16"
    assert f"{job} on a base in bf16, trainer axolotl" in " ".join(read.stdout.split())
    assert "sequences of 512 tokens, axolotl's default" in said


def test_a_removed_name_of_the_length_is_asked_for(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(FILE + "max_packed_sequence_len: 256\n")
    asked = run("import", str(tmp_path / "job.yaml"), "--gpus", "1")
    assert asked.exit_code == 2
    assert "--set sequence_len=N" in asked.stderr
    for answer in (("--set", "sequence_len=256"), ("--sequence-length", "256")):
        assert run("import", str(tmp_path / "job.yaml"), "--gpus", "1", *answer).exit_code == 0


@pytest.mark.parametrize("word", ["use_cpu", "no_cuda"])
def test_a_job_on_cpus_is_refused(run: Callable[..., Result], tmp_path: Path, word: str) -> None:
    (tmp_path / "job.yaml").write_text(FILE + f"{word}: true\n")
    refused = run("import", str(tmp_path / "job.yaml"), "--gpus", "1")
    assert refused.exit_code == 2
    assert f"--set {word}=false" in refused.stderr
    assert run("import", str(tmp_path / "job.yaml"), "--gpus", "1", "--set", f"{word}=false").exit_code == 0
