"""Numbers that somebody reads first: they say something for a small job too, and are of the same thing everywhere."""

from pathlib import Path
from typing import Any

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
    assert f"{costs.days:,.1f} days, " in text and f", {costs.usd:,.0f} USD at" in text and " MWh." in text


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
