"""Gemma: in Megatron-Bridge by its own providers, elsewhere refused by name."""

from __future__ import annotations

import pytest
from trainers.plans import EVEN, Wanted, changed, found

from planner.layout import CpMethod
from planner.model import ModelSpec, load_model
from planner.trainers.bundle.model_config import model_config
from planner.trainers.bundle.target import ExportJob
from planner.trainers.megatron_bridge import gemma
from planner.trainers.targets import load_target


def job_of(name: str, **fields: int) -> ExportJob:
    return ExportJob.of(changed(found(Wanted(model=name, gpus=8, top=1))[0], **(EVEN | fields)))


WRITTEN = {
    "gemma-2b": ("GemmaModelProvider(", "activation_func=fast_gelu", "layernorm_zero_centered_gamma=True"),
    "gemma-2-2b": ("Gemma2ModelProvider(", "window_size=(4095, 0)", "query_pre_attn_scalar=256", "attn_logit_softcapping=50.0"),
    "gemma-3-1b": ("Gemma3ModelProvider(", "window_size=512", "rotary_base=(10000, 1000000)", "interleaved_attn_pattern=(5, 1)"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_bridge_builds_it_with_its_own_provider(name: str) -> None:
    job, target = job_of(name), load_target("megatron-bridge")
    assert target.refusals(job) == []
    text = target.render(job).files["plan_config.py"]
    assert [word for word in WRITTEN[name] if word not in text] == []
    assert "window_attn_skip_freq" not in text and "GPTModelProvider" not in text
    assert load_target("megatron").refusals(job)  # norms, or scaled embeddings


def test_scores_are_scaled_as_published() -> None:
    """google/gemma_pytorch: 144 and 168, the hidden size over the heads of the largest two, not the width of a head."""
    assert gemma.fields(load_model("gemma-2-27b"))["query_pre_attn_scalar"] == 144
    assert gemma.fields(load_model("gemma-3-27b"))["softmax_scale"] == pytest.approx(168**-0.5)
    assert gemma.fields(load_model("gemma-3-4b"))["softmax_scale"] == pytest.approx(1 / 16)
    config = model_config(load_model("gemma-3-27b"))
    assert config is not None and config["query_pre_attn_scalar"] == 168


def test_what_its_providers_cannot_run() -> None:
    def said(job: ExportJob) -> str:
        return " ".join(load_target("megatron-bridge").refusals(job))

    assert "has the softcap, raises with context parallelism" in said(job_of("gemma-2-2b", cp=2, dp=4))
    assert "a2a or allgather alone" in said(job_of("gemma-3-1b", cp=2, dp=4, cp_method=int(CpMethod.RING)))
    assert "scaled" not in said(job_of("gemma-2b"))
    assert "for which Megatron-LM has no flag" in " ".join(load_target("megatron").refusals(job_of("gemma-2b")))


@pytest.mark.parametrize(("name", "which"), [("gemma-2b", 1), ("gemma-2-27b", 2), ("gemma-3-12b", 3), ("llama-3.1-8b", 0)])
def test_the_generation_is_read_from_the_architecture(name: str, which: int) -> None:
    model: ModelSpec = load_model(name)
    assert gemma.generation(model) == which
    assert (str((model_config(model) or {})["model_type"]).startswith("gemma")) == bool(which)


def test_a_window_counts_its_own_token() -> None:
    """sliding_window of config.json counts it; Transformer Engine's window does not."""
    job = ExportJob.of(found(Wanted(model="gpt-oss-20b", gpus=8, top=1))[0])
    assert "--window-size 127,0" in load_target("megatron").render(job).files["arguments.sh"]
