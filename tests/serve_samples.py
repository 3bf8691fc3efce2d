"""A serve plan that tests change as they like."""

from typing import Any

from planner.hardware import load_hardware
from planner.model import load_model
from planner.serving.engine import load_engine
from planner.serving.serve_plan import ServePlan
from planner.serving.served import Served
from planner.serving.serving_layout import Precision, ServingLayout
from planner.serving.traffic import Lengths, Traffic


def sample_plan(model: str = "llama-3.1-70b", **changes: Any) -> ServePlan:
    """Two engines of four H100 that hold 64 requests of 1,024 + 256 tokens."""
    told: dict[str, Any] = {
        "model": load_model(model), "hardware": "h100-sxm", "gpus": 8, "engine": "vllm@0.33", "precision": Precision(weights="fp8"),
        "layout": ServingLayout(tp=4, replicas=2, max_batch=256, max_tokens=8192),
        "traffic": Traffic(input=Lengths.fixed(1024), output=Lengths.fixed(256), value=64.0),
    }  # fmt: skip
    return ServePlan(**{**told, **changes})


def served(model: str = "llama-3.1-70b", hardware: str = "h100-sxm", engine: str = "vllm", weights: str = "fp8") -> Served:
    """What a step is priced for."""
    return Served(
        model=load_model(model), hardware=load_hardware(hardware), engine=load_engine(engine), precision=Precision(weights=weights)
    )
