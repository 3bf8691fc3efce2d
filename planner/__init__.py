"""Planner: how to lay out the training of a large language model over GPUs, by an explained cost model.

``planner.plan(model="llama-70b", gpus=8)`` is ``plan --model llama-70b --gpus 8``; docs/api.md shows the rest. The names below
are those of ``planner.api``, imported when one is asked for: ``import planner`` costs next to nothing.
"""

# ruff: noqa: F403, F405
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.api import *
else:

    def __getattr__(name: str) -> object:
        """A name of the API, looked up once."""
        if name not in __all__:
            raise AttributeError(f"module 'planner' has no attribute '{name}'")
        from planner import api

        globals()[name] = getattr(api, name)
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "Accuracy", "Answer", "Changes", "Estimate", "Exported", "Imported", "MixedPlan", "MixedPlans", "Plan", "PlannerError",
    "Plans", "Reshaped", "Resilient", "Result", "RlPlan", "RlPlans", "ServePlan", "ServePlans", "accuracy", "calibrate",
    "cluster_of_nodes", "compare", "compare_profiles", "doctor", "estimate", "estimate_rl", "import_config", "load", "load_mixed",
    "load_rl", "load_serve", "mixed_what_if", "plan", "plan_kind", "plan_mixed", "plan_rl", "plot_profile", "reshape",
    "resilience", "sensitivity", "serve", "serve_cheapest", "serve_cluster", "serve_compare", "serve_estimate", "serve_what_if",
    "show_profile", "validate_mixed", "watch", "what_if",
]  # fmt: skip
