"""Questions of serving from Python: ``serve``, ``serve_estimate``, ``serve_compare``; the same as ``plan serve`` and its
companions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from planner.api.results import Answer, File, Progress, Result, silent
from planner.errors import PlannerError
from planner.keywords import flag_of, require_known

if TYPE_CHECKING:
    from rich.console import Console

    from planner.questions.serve.show_kinds import ServedKinds
    from planner.questions.serve.show_several import Changed, ComparedPlans, ComparedSplits
    from planner.serving import serve_plan
    from planner.serving.serving_answer import Answered
    from planner.serving.serving_changes import Change
    from planner.serving.serving_question import ServeRequest
    from planner.serving.serving_rows import ServeRow

ASKED = (
    "model", "gpus", "nodes", "hardware", "intra_node", "network_bandwidth", "engine", "weights", "cache", "input", "output",
    "ttft",
    "tpot", "percentile", "rate", "concurrency", "offline", "static", "prefix_hit", "speculation", "disaggregated", "price",
)  # fmt: skip
"""Keywords of every question of serving: the flags in Python spelling."""
LAYOUT = ("tp", "pp", "replicas", "attn_dp", "ep", "moe_tp", "dcp", "max_batch", "max_tokens", "gpu_weights")
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
        from planner.serving.serving_rows import rates_of_plan, row_of_plan

        return row_of_plan(self.priced, rates_of_plan(self.file, self.price))

    @property
    def priced(self) -> serve_plan.ServePlan:
        """The plan with its estimate; priced now where its file holds none."""
        from planner.serving.plan_pricing import price_again

        return self.file if self.file.prediction is not None else price_again(self.file)

    @property
    def why(self) -> str:
        """Why this deployment and not the next."""
        return self.file.why

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``plan serve estimate --json`` prints."""
        from planner.questions.serve.show import plan_data

        return plan_data(self.priced, self.price)

    def show(self, console: Console) -> None:
        """Print all of it on a console of rich."""
        from planner.questions.serve.show import print_plan

        print_plan(console, self.priced, self.price)

    def save(self, path: File) -> None:
        """Write the plan file, whole or not at all. Raises PlannerError."""
        self.file.save(Path(path))

    def report(
        self,
        path: File | None = None,
        *,
        format: str | None = None,
        chart: str | None = None,
        price: float | None = None,
        progress: Progress = silent,
    ) -> str | bytes:
        """The plan to look at, written to ``path`` where one is given: html, markdown, json, or png of one ``chart``.

        The format follows from the ending of the path, else it is html. Raises PlannerError.
        """
        from planner.questions.report.show import write_report
        from planner.questions.serve.serve_document import serve_report

        rate = self.price if price is None else price
        return write_report(path, (format, chart), lambda kind: serve_report(self.file, kind, chart, rate, progress))


@dataclass(frozen=True, repr=False)
class ServePlans(Result, Sequence[ServePlan]):
    """The best deployments of a question, best first; empty when nothing starts or keeps the limits, and then ``why`` says by how
    much."""

    found: Answered
    ways: tuple[Change, ...] = ()
    """Changes that would serve, where nothing does."""

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
        if self.found.kept:
            return first
        would = "; ".join(one.change for one in self.ways) or "no single change of those that were tried"
        return f"nothing serves that: the nearest: {first} What would serve: {would}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what ``plan serve --json`` prints."""
        from planner.questions.serve.show import answer_data

        return answer_data(self.found, self.ways)

    def show(self, console: Console) -> None:
        """Print the tables on a console of rich."""
        from planner.questions.serve.show import print_answer

        print_answer(console, self.found, self.ways)


def serve(*, top: int = 3, fewest_gpus: bool = False, progress: Progress = silent, **keywords: Any) -> ServePlans:
    """The best deployments of a model: ``serve(model="llama-70b", gpus=8, ttft="500ms", tpot="30ms")``.

    Without limits and load the best for throughput, for both, and for one user; with limits those that answer most within them;
    with ``rate`` or ``concurrency`` those with the shortest answers at that load; with ``fewest_gpus`` on as few GPUs as do. Fields
    of a layout that are given stay. Raises PlannerError.
    """
    from planner.serving.fewest_gpus import fewest_of_others, on_fewest
    from planner.serving.serving_answer import answer
    from planner.serving.serving_changes import ways_out
    from planner.serving.serving_question import ask

    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= 100:
        raise PlannerError(f"top is {top!r}; it must be a whole number from 1 to 100")
    request = request_of("serve", keywords)
    question = on_fewest(request, progress) if fewest_gpus else ask(request)
    found = answer(question, top, progress)
    if fewest_gpus:
        found = replace(found, others=tuple(fewest_of_others(question, progress)))
    return ServePlans(found, () if found.kept else tuple(ways_out(found, progress)))


def serve_cluster(cluster: File, *, progress: Progress = silent, **keywords: Any) -> Answer[ServedKinds]:
    """A model on the nodes of a cluster file: ``serve_cluster("cluster.yaml", model="llama-70b", ttft="2s", tpot="50ms")``.

    Every kind alone, replicas on all kinds with the routing share of each, and prompts on one kind with answers on another. Raises
    PlannerError.
    """
    from planner.cluster_file import read_cluster
    from planner.mixed.known_links import linked
    from planner.questions.serve.show_kinds import ServedKinds, print_kinds
    from planner.serving.kinds_answer import serve_kinds

    for name in ("gpus", "nodes", "hardware", "intra_node", "network_bandwidth", "price", "disaggregated"):
        if keywords.get(name) is not None:
            raise PlannerError(f"{flag_of(name)} stands beside a cluster file, which says it of every kind; leave it out")
    nodes, notes = linked(read_cluster(Path(cluster)), needed=False)
    found = serve_kinds(request_of("serve_cluster", keywords), nodes, progress)
    return Answer(ServedKinds(replace(found, notes=(*found.notes, *notes))), print_kinds)


def request_of(call: str, keywords: dict[str, Any], further: Sequence[str] = ()) -> ServeRequest:
    """Keywords as a request. Raises PlannerError for those that a call does not take."""
    from planner.serving.serving_question import ServeRequest

    require_known(call, keywords, (*ASKED, *LAYOUT, *further))
    said = {name: keywords[name] for name in ASKED if keywords.get(name) is not None}
    said |= {name: keywords[name] for name in further if keywords.get(name) is not None}
    return ServeRequest(**said, layout={name: keywords[name] for name in LAYOUT if keywords.get(name) is not None})


def serve_estimate(base: ServePlan | File | None = None, /, **keywords: Any) -> ServePlan:
    """One deployment, priced: ``serve_estimate(model="qwen3-32b", gpus=2, tp=2, concurrency=64, engine="vllm@0.33")``.

    What is left out follows from the rest: replicas from the GPUs, one engine at its newest version. ``base`` is a plan or its
    file; keywords replace what it says. Raises PlannerError.
    """
    from planner.serving.one_deployment import one_plan, said_by

    price = keywords.get("price")
    if base is None:
        return ServePlan(one_plan(request_of("serve_estimate", keywords, ("prefill",))), price)
    require_known("serve_estimate", keywords, (*ASKED, *LAYOUT, "prefill"))
    plan = (base if isinstance(base, ServePlan) else load_serve(base)).file
    said, kept = said_by(plan, keywords)
    found = one_plan(replace(request_of("serve_estimate", said, ("prefill",)), fixed=plan.precision))
    return ServePlan(replace(found, assumptions=(*kept, *found.assumptions)), price)


def serve_cheapest(*hardware: str, progress: Progress = silent, **keywords: Any) -> Answer[Changed]:
    """Hardware by price: ``serve_cheapest("h100-sxm", "b200-sxm", model="llama-70b", rate="5/s", ttft="1s")``; without names all
    that has a price. Under a load by dollars an hour on the fewest GPUs that serve it; else, with ``gpus``, by those of a million
    tokens. Raises PlannerError."""
    from planner.questions.serve.show_several import Changed, printed
    from planner.serving.serving_changes import cheapest, priced_hardware

    request = request_of("serve_cheapest", keywords)
    if request.gpus is None and request.rate is None and request.concurrency is None:
        raise PlannerError("which is cheapest for what? give --gpus, or a load: --rate, like 5/s, or --concurrency")
    return Answer(Changed(*cheapest(request, hardware or priced_hardware(), progress)), printed)


def serve_compare(
    *plans: ServePlan | File, splits: Sequence[str] = (), **keywords: Any
) -> Answer[ComparedSplits] | Answer[ComparedPlans]:
    """Splits compared: ``serve_compare(model="llama-70b", gpus=8, hardware="a100", splits=["tp=8", "tp=4,pp=2"])``.

    Without ``splits`` every one of tensor ranks, stages and replicas that takes all GPUs; with plans or their files those instead.
    At the load that is given, else each at the load at which it answers most. Raises PlannerError.
    """
    from planner.questions.serve.show_several import ComparedPlans, ComparedSplits, printed
    from planner.serving.compared_splits import compare_splits

    if plans:
        require_known("serve_compare", keywords, ("price",))
        read = [one if isinstance(one, ServePlan) else load_serve(one) for one in plans]
        return Answer(ComparedPlans([one.priced for one in read]), printed)
    return Answer(ComparedSplits(*compare_splits(request_of("serve_compare", keywords), splits)), printed)


def load_serve(path: File) -> ServePlan:
    """The plan of a serve plan's file. Raises PlannerError when it is damaged, or newer than this planner."""
    from planner.serving.serve_plan import load_serve_plan

    return ServePlan(load_serve_plan(Path(path)))


def serve_what_if(
    base: ServePlan | File | None = None,
    /,
    *,
    objective: str | None = None,
    progress: Progress = silent,
    **changes: Any,
) -> Answer[Changed]:
    """The same question with one thing changed, the best plan each: ``serve_what_if(plan, hardware=["h200-sxm"], gpus=[16, 32])``.

    With a plan or its file every value is a change; without, the first value of each keyword describes the question. Where there
    is neither load nor limit, plans are the best for ``objective``: that of the plan, else balanced. Raises PlannerError.
    """
    from planner.questions.serve.show_several import Changed, printed
    from planner.serving.priced_table import OBJECTIVES
    from planner.serving.serving_changes import CHANGED, request_of_plan, values_of, what_if

    require_known("serve_what_if", changes, (*ASKED, *LAYOUT))
    if objective is not None and objective not in OBJECTIVES:
        raise PlannerError(f"objective is {objective!r}; it must be {', '.join(OBJECTIVES)}")
    given = {name: values_of(name, value) for name, value in changes.items() if value not in (None, (), [])}
    fixed = {name: values[0] for name, values in given.items() if name not in CHANGED and values}
    varied = {name: values for name, values in given.items() if name in CHANGED and values}
    if base is None:
        first = {name: values[0] for name, values in varied.items()}
        request = request_of("serve_what_if", {**fixed, **first})
        varied = {name: values[1:] for name, values in varied.items()}
    else:
        plan = base if isinstance(base, ServePlan) else load_serve(base)
        objective = objective or (plan.file.chosen_for if plan.file.chosen_for in OBJECTIVES else None)
        request = replace(request_of_plan(plan.file), price=fixed.get("price", plan.price))
    return Answer(Changed(*what_if(request, varied, objective or "balanced", progress)), printed)


__all__ = [
    "ServePlan", "ServePlans", "load_serve", "serve", "serve_cheapest", "serve_cluster", "serve_compare",
    "serve_estimate", "serve_what_if",
]  # fmt: skip
