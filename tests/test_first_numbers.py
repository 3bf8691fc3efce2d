"""Numbers that somebody reads first: they say something for a small job too, and are of the same thing everywhere."""

import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import planner

TUNED: dict[str, Any] = {"model": "llama-8b", "gpus": 4, "hardware": "rtx-4090", "lora_rank": 16, "frozen_weights": "nf4"}


def test_a_small_job_has_hours_cents_and_kilowatt_hours() -> None:
    found = planner.plan(**TUNED, trainer="llama-factory", tokens="5M")
    (text, _) = found.training.sentences()
    costs = found.training.costs
    assert f": {costs.seconds / 3600:.3g} hours, " in text and f", {costs.usd:.2f} USD at" in text
    assert f"at most {costs.kwh:.4g} kWh." in text


def test_a_large_job_has_days_and_megawatt_hours() -> None:
    found = planner.plan(model="llama-8b", gpus=64, hardware="h100-sxm", tokens="1T")
    (text, _) = found.training.sentences()
    costs = found.training.costs
    assert f"{costs.days:.3g} days, " in text and f", {costs.usd:,.0f} USD at" in text and " MWh." in text


def test_a_batch_of_preference_pairs_counts_both_sequences(tmp_path: Path) -> None:
    """The tokens that the header's throughput and the folder of the export count."""
    found = planner.plan(**TUNED, trainer="llama-factory", objective="dpo", global_batch_size="32k")
    said = {one.what: one.value for one in found.assumed}["global batch"]
    work = found[0].file.workload
    assert work.sequence_length == 2048 and work.global_batch_size == 8 and said == "8 pairs (32,768 tokens)"
    usual = planner.plan(**TUNED, trainer="llama-factory", objective="dpo")
    assert "8 pairs (32.77K tokens)" in [one.value for one in usual.assumed]
    usual[0].export("llama-factory", tmp_path / "run")
    assert "| pairs | 8 per step, two sequences of 2048 tokens each |" in (tmp_path / "run/README.md").read_text()


def exported(folder: Path, **said: Any) -> dict[str, str]:
    """Files of the folder that accelerate runs."""
    planner.plan(**{**TUNED, "frozen_weights": "bf16"} | said)[0].export("accelerate", folder)
    return {one.name: one.read_text() for one in folder.iterdir() if one.is_file()}


def test_fine_tuning_starts_from_weights_and_runs_what_was_priced(tmp_path: Path) -> None:
    """Adapters on random weights are of no use; a loss in pieces is SFTTrainer's alone."""
    files = exported(tmp_path / "trl", trainer="trl")
    assert 'START="${START:-weights}"' in files["environment.sh"] and "--sft" in files["run.sh"]
    assert "--sft" not in files["smoke.sh"] and "pip install 'trl>=1.16,<2'" in files["README.md"]
    whole = exported(tmp_path / "fsdp", trainer="fsdp", gpus=8, hardware="h100-sxm", lora_rank=0)
    assert 'START="${START:-config}"' in whole["environment.sh"] and "--sft" not in whole["run.sh"]


def test_a_run_without_data_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = exported(tmp_path / "trl", trainer="trl")["train.py"]
    names = ("AutoConfig", "AutoModelForCausalLM", "Trainer", "TrainingArguments", "set_seed")
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(**dict.fromkeys(names)))
    monkeypatch.setattr(sys, "argv", ["train.py", "--settings", "training.json", "--model", "m", "--dataset", ""])
    found: dict[str, Any] = {"__name__": "train", "__doc__": ""}
    exec(compile(script, "train.py", "exec"), found)
    said = StringIO()
    with pytest.raises(SystemExit), redirect_stderr(said):
        found["main"]()
    assert "no --dataset: set DATASET to a folder or hub name of a data set" in said.getvalue()


def test_a_fine_tuning_that_recomputes_to_fit_names_what_needs_less_memory() -> None:
    """Logits in pieces leave room for twice the micro batch, which no layout of the list has."""
    job = {**TUNED, "model": "qwen3-8b", "frozen_weights": "bf16", "sequence_length": 4096, "trainer": "axolotl"}
    found = planner.plan(**job)
    said = {one.flag: one for one in found.faster}
    pieces = planner.plan(**job, options={"loss": "fused_linear"})[0]
    assert said["--option loss=fused_linear"].step_time_s == pytest.approx(float(pieces.estimate.step_time))
    assert "--lora-rank 16 --frozen-weights nf4" in said and "--option compile=on" in said
    assert len(said) == len(found.faster), "no flag twice"
