"""Questions of serving from Python: ``serve``, ``serve_estimate``, ``serve_compare``; the same as ``plan serve`` and its
companions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from planner.api.results import File, Result
from planner.errors import PlannerError
from planner.keywords import require_known

if TYPE_CHECKING:
    from rich.console import Console

    from planner.serving import serve_plan
    from planner.serving.serving_answer import Answered
    from planner.serving.serving_question import ServeRequest
    from planner.serving.serving_rows import ServeRow

ASKED = (
    "model", "gpus", "nodes", "hardware", "intra_node", "network_bandwidth", "engine", "weights", "cache", "input", "output",
    "ttft",
    "tpot", "percentile", "rate", "concurrency", "offline", "static", "prefix_hit", "speculation", "disaggregated", "price",
)  # fmt: skip
"""Keywords of every question of serving: the flags in Python spelling."""
LAYOUT = ("tp", "pp", "replicas", "attn_dp", "ep", "moe_tp", "dcp", "max_batch", "max_tokens")
"""Fields of a deployment's layout."""


@dataclass(frozen=True, repr=False)
class ServePlan(Result):
    """One deployment, priced."""

    file: serve_plan.ServePlan
    """The plan as its file holds it: model, hardware, engine, precision, layout, traffic, limits, prediction."""
    price: float | None = None
    """Dollars per GPU-hour; None = of the profile."""

    @property
    def row(self) -> ServeRow:
        """Its numbers, as the table shows them: seconds, GiB, dollars."""
        from planner.costs import rates_of
        from planner.hardware import load_hardware
        from planner.serving.serving_rows import row_of_plan

        return row_of_plan(self.file, rates_of(load_hardware(self.file.hardware), price=self.price))

    @property
    def why(self) -> str:
        """Why this deployment and not the next."""
        return self.file.why

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``plan serve estimate --json`` prints."""
        from planner.questions.serve.show import plan_data

        return plan_data(self.file, self.price)

    def show(self, console: Console) -> None:
        """Print all of it on a console of rich."""
        from planner.questions.serve.show import print_plan

        print_plan(console, self.file, self.price)

    def save(self, path: File) -> None:
        """Write the plan file, whole or not at all. Raises PlannerError."""
        self.file.save(Path(path))


@dataclass(frozen=True, repr=False)
class ServePlans(Result, Sequence[ServePlan]):
    """The best deployments of a question, best first; empty when nothing starts or keeps the limits, and then ``why`` says by how
    much."""

    found: Answered

    def __len__(self) -> int:
        return len(self.found.best) if self.found.kept else 0

    @overload
    def __getitem__(self, index: int) -> ServePlan: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ServePlan]: ...
    def __getitem__(self, index: int | slice) -> ServePlan | Sequence[ServePlan]:
        price = self.found.question.request.price
        plans = [ServePlan(one, price) for one in self.found.best[: len(self)]]
        if isinstance(index, int) and not plans:
            raise PlannerError(self.why)
        return plans[index]

    def __iter__(self) -> Iterator[ServePlan]:
        return iter(self[:])

    @property
    def why(self) -> str:
        """Why the first is the first; where nothing serves, by how much the nearest misses."""
        first = self.found.best[0].why
        return first if self.found.kept else f"nothing serves that: the nearest {first}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``plan serve --json`` prints."""
        from planner.questions.serve.show import answer_data

        return answer_data(self.found)

    def show(self, console: Console) -> None:
        """Print the tables on a console of rich."""
        from planner.questions.serve.show import print_answer

        print_answer(console, self.found)


def serve(*, top: int = 3, progress: Callable[[str], None] = lambda _: None, **keywords: Any) -> ServePlans:
    """The best deployments of a model: ``serve(model="llama-70b", gpus=8, ttft="500ms", tpot="30ms")``.

    Without limits and load the best for throughput, for both, and for one user; with limits those that answer most within them;
    with ``rate`` or ``concurrency`` those with the shortest answers at that load. Fields of a layout that are given stay. Raises
    PlannerError.
    """
    from planner.serving.serving_answer import answer
    from planner.serving.serving_question import ask

    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= 100:
        raise PlannerError(f"top is {top!r}; it must be a whole number from 1 to 100")
    return ServePlans(answer(ask(request_of("serve", keywords)), top, progress))


def request_of(call: str, keywords: dict[str, Any], further: Sequence[str] = ()) -> ServeRequest:
    """Keywords as a request. Raises PlannerError for those that a call does not take."""
    from planner.serving.serving_question import ServeRequest

    require_known(call, keywords, (*ASKED, *LAYOUT, *further))
    said = {name: keywords[name] for name in ASKED if keywords.get(name) is not None}
    return ServeRequest(**said, layout={name: keywords[name] for name in LAYOUT if keywords.get(name) is not None})


def serve_estimate(**keywords: Any) -> ServePlan:
    """One deployment, priced: ``serve_estimate(model="qwen3-32b", gpus=2, tp=2, concurrency=64, engine="vllm@0.33")``.

    What is left out follows from the rest: replicas from the GPUs, one engine at its newest version. Raises PlannerError.
    """
    from planner.serving.one_deployment import one_plan

    return ServePlan(one_plan(request_of("serve_estimate", keywords)), keywords.get("price"))
