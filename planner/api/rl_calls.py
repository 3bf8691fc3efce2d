"""Questions of RL from Python: ``plan_rl`` and ``estimate_rl``; the same as ``plan rl`` and ``plan rl estimate``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from planner.api.results import File, Progress, Result, silent
from planner.errors import PlannerError
from planner.keywords import require_known

if TYPE_CHECKING:
    from rich.console import Console

    from planner.rl import rl_plan
    from planner.rl.rl_answer import Answered
    from planner.rl.rl_question import RlRequest

ASKED = (
    "model", "gpus", "nodes", "hardware", "cluster", "framework", "trainer", "engine", "algorithm", "prompts", "samples",
    "keep_rate", "prompt_length", "answers", "max_length", "train_batch", "epochs", "reference", "critic", "reward_model",
    "reward_time", "turns", "tool_time", "tool_tokens", "speculation", "precision", "weights", "cache", "lora_rank", "mode",
    "staleness", "train_gpus", "generate_gpus", "critic_gpus", "sync", "memory_share", "offload", "calibrated", "network_bandwidth",
    "price", "actor", "rollout",
)  # fmt: skip
"""Keywords of every question of RL: the flags in Python spelling."""


@dataclass(frozen=True, repr=False)
class RlPlan(Result):
    """One placement of RL, priced."""

    file: rl_plan.RlPlan
    """The plan as its file holds it."""
    price: float | None = None
    """Dollars per GPU-hour; None = of the profile."""

    @property
    def step_time(self) -> float:
        """Seconds of a step."""
        assert self.file.prediction is not None
        return float(self.file.prediction.step_s)

    @property
    def fits(self) -> bool:
        """Every phase fits."""
        assert self.file.prediction is not None
        return self.file.prediction.fits

    @property
    def why(self) -> str:
        """Why this placement and not the next."""
        return self.file.why

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``plan rl estimate --json`` prints."""
        from planner.questions.rl.rl_tables import plan_data

        return plan_data(self.file, self.price)

    def show(self, console: Console) -> None:
        """Print all of it on a console of rich."""
        from planner.questions.rl.rl_tables import print_plan

        print_plan(console, self.file, self.price)

    def save(self, path: File) -> None:
        """Write the plan file, whole or not at all. Raises PlannerError."""
        self.file.save(Path(path))

    def report(
        self, path: File | None = None, *, format: str | None = None, chart: str | None = None, price: float | None = None,
        progress: Progress = silent,
    ) -> str | bytes:  # fmt: skip
        """The plan to look at, written to ``path`` where one is given: html, markdown, json, trace, or png of one ``chart``.

        The format follows from the ending of the path, else it is html. Raises PlannerError.
        """
        from planner.questions.report.show import write_report
        from planner.questions.rl.rl_document import rl_report

        rate = self.price if price is None else price
        return write_report(path, (format, chart), lambda kind: rl_report(self.file, kind, chart, rate, progress))


@dataclass(frozen=True, repr=False)
class RlPlans(Result, Sequence[RlPlan]):
    """The best placements of a question, best first; empty when nothing fits, and then ``why`` says by how much."""

    found: Answered
    price: float | None = None

    def __len__(self) -> int:
        return len(self.found.plans) if self.found.fit else 0

    @overload
    def __getitem__(self, index: int) -> RlPlan: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RlPlan]: ...
    def __getitem__(self, index: int | slice) -> RlPlan | Sequence[RlPlan]:
        plans = [RlPlan(one, self.price) for one in self.found.plans[: len(self)]]
        if isinstance(index, int) and not plans:
            raise PlannerError(self.why)
        return plans[index]

    @property
    def why(self) -> str:
        """Why the first is the first; where nothing fits, by how much the nearest misses."""
        return self.found.why

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``plan rl --json`` prints."""
        from planner.questions.rl.rl_tables import answer_data

        return answer_data(self.found, self.price)

    def show(self, console: Console) -> None:
        """Print the tables on a console of rich."""
        from planner.questions.rl.rl_tables import print_answer

        print_answer(console, self.found, self.price)


def plan_rl(*, top: int = 3, progress: Progress = silent, **keywords: Any) -> RlPlans:
    """The best placements of RL: ``plan_rl(model="qwen3-32b", gpus=64, framework="nemo-rl", answers="mean=3200,p99=8192")``.

    Raises PlannerError.
    """
    from planner.rl.rl_answer import answer

    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= 100:
        raise PlannerError(f"top is {top!r}; it must be a whole number from 1 to 100")
    return RlPlans(answer(_request("plan_rl", keywords), top, progress), keywords.get("price"))


def estimate_rl(base: RlPlan | File | None = None, /, **keywords: Any) -> RlPlan:
    """One placement, priced: ``estimate_rl(model="qwen3-32b", gpus=64, mode="split", train_gpus=32, actor="tp=4,pp=4")``.

    ``base`` is a plan or its file; keywords replace what it says. Raises PlannerError.
    """
    from planner.rl.rl_answer import estimate

    request = _request("estimate_rl", keywords)
    plan = base.file if isinstance(base, RlPlan) else None if base is None else Path(base)
    return RlPlan(estimate(plan, request), keywords.get("price"))


def _request(call: str, keywords: dict[str, Any]) -> RlRequest:
    """Keywords as a request. Raises PlannerError for those that a call does not take."""
    from planner.rl.rl_question import RlRequest

    require_known(call, keywords, ASKED)
    return RlRequest(**{name: value for name, value in keywords.items() if value is not None})


def load_rl(path: File) -> RlPlan:
    """The plan of an RL plan's file. Raises PlannerError when it is damaged, or newer than this planner."""
    from planner.rl.rl_plan import load_rl_plan

    return RlPlan(load_rl_plan(Path(path)))


__all__ = ["RlPlan", "RlPlans", "estimate_rl", "load_rl", "plan_rl"]
