"""The same question with something changed, each with its best plan: what if, hardware by price, ways out where nothing serves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planner import library
from planner.errors import PlannerError, shown
from planner.hardware import load_hardware
from planner.keywords import flag_of
from planner.record import record
from planner.serving.fewest_gpus import fewest_gpus
from planner.serving.published import precision_text
from planner.serving.serve_plan import ServePlan
from planner.serving.serving_answer import Answered, best_plan
from planner.serving.serving_inputs import lengths_text
from planner.serving.serving_question import Question, ServeRequest, ask
from planner.serving.serving_search import splits

Progress = Callable[[str], None]
CHANGED = (
    "gpus", "hardware", "engine", "weights", "cache", "input", "output", "rate", "concurrency", "ttft", "tpot", "prefix_hit",
    "speculation", "intra_node", "network_bandwidth",
)  # fmt: skip
"""What may be changed: keywords of a question."""
SEPARATED = ("gpus", "hardware", "engine", "weights", "cache", "rate", "concurrency", "ttft", "tpot", "prefix_hit")
"""Of these several values may stand in one text, with commas."""
GROWN = (2, 4, 8)
"""Times as many GPUs as were asked for, tried where nothing keeps the limits and no load is asked for."""
ON_GPU = (90, 75, 50, 25, 10)
"""Percent of the weights that stay on GPUs, tried where nothing starts with all of them."""
FASTER_MEMORY = 1.2
"""Hardware is a way out where its memory is larger or faster than that of the question by this factor."""
MOST_WAYS = 4
"""Other hardware that is tried."""


@record
class Change:
    """The question with something changed, and its best plan."""

    change: str
    """In words."""
    flag: str
    """What is typed for it."""
    question: Question
    plan: ServePlan | None
    """None: nothing is legal, or nothing starts."""
    kept: bool = False
    """The plan keeps the limits, and keeps up."""
    why_not: str = ""
    """Why there is no plan, or by how much it misses."""


def changed(change: str, flag: str, request: ServeRequest, objective: str = "offline") -> Change:
    """The best plan of a changed request, main format alone."""
    question = ask(request)
    plan = best_plan(question, objective)
    if plan is None:
        legal = any(np.size(splits(one, question.task)[0].tp) for one in question.served())
        why = "does not fit into memory" if legal else "no split is legal there"
        return Change(change=change, flag=flag, question=question, plan=None, why_not=why)
    kept = plan.keeps_limits
    return Change(change=change, flag=flag, question=question, plan=plan, kept=kept, why_not="" if kept else plan.why)


# ------------------------------------------------------------------------------------------------ what if


def values_of(name: str, said: Any) -> list[Any]:
    """The values of a flag: several texts, each with commas where its values have none; 8..64 doubles. Raises PlannerError."""
    texts = list(said) if isinstance(said, (list, tuple)) else [said]
    found: list[Any] = []
    for text in texts:
        parts = str(text).split(",") if name in SEPARATED and isinstance(text, str) else [text]
        for part in parts:
            ends = re.fullmatch(r"\s*(\d{1,7})\s*\.\.\s*(\d{1,7})\s*", part) if isinstance(part, str) else None
            if ends is not None:
                low, high = int(ends[1]), int(ends[2])
                if not 1 <= low <= high:
                    raise PlannerError(
                        f"{flag_of(name)} {part.strip()} goes down; write it like 8..64, which doubles"
                    )
                found += [low * 2**n for n in range(32) if low * 2**n <= high]
            elif part not in (None, ""):
                found.append(part.strip() if isinstance(part, str) else part)
    if name == "gpus":
        for one in found:
            if not re.fullmatch(r"\d{1,9}", str(one)):
                raise PlannerError(f"--gpus is {shown(one)}; it must be a whole number")
        found = [int(one) for one in found]
    return found


def what_if(
    base: ServeRequest,
    changes: Mapping[str, Sequence[Any]],
    objective: str,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[Change], bool]:
    """The question as it is, then with every value of every change, each with its best plan; and whether all was looked at: Ctrl-C
    ends it with what was found."""
    progress("as it is")
    rows = list[Change]()
    try:
        rows.append(changed("as it is", "", base, objective))
        for name, value in ((name, value) for name, values in changes.items() for value in values):
            flag = flag_of(name)
            text = value if not hasattr(value, "mean") else lengths_text(value)
            progress(f"{flag} {text}")
            said: dict[str, Any] = {name: value}
            said |= {"nodes": None} if name == "gpus" else {}
            said |= {"rate": {"concurrency": None}, "concurrency": {"rate": None}}.get(name, {})
            rows.append(
                changed(f"{flag[2:].replace('-', ' ')} {text}", f"{flag} {text}", replace(base, **said), objective)
            )
    except KeyboardInterrupt:
        return rows, False
    return rows, True


def request_of_plan(plan: ServePlan) -> ServeRequest:
    """The question that a plan answers: its split is open, its load too where a search chose it. Raises PlannerError for stages on
    several kinds."""
    plan.require_one_kind("a search or what-if of a serve plan")
    traffic, limits = plan.traffic, plan.limits
    load: dict[str, Any] = {} if plan.chosen_for else {traffic.load: traffic.value}
    return ServeRequest(
        model=plan.model, gpus=plan.gpus, hardware=plan.hardware, engine=plan.engine, weights=None, input=traffic.input,
        output=traffic.output, ttft=None if np.isinf(limits.ttft) else limits.ttft,
        tpot=None if np.isinf(limits.tpot) else limits.tpot,
        percentile=limits.percentile, prefix_hit=traffic.prefix_hit, speculation=traffic.speculation, fixed=plan.precision,
        **load,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ ways out


def ways_out(found: Answered, progress: Progress = lambda _: None) -> list[Change]:
    """Changes that serve what the question does not: quantised formats, more GPUs, faster or larger devices; each with its
    price."""
    question, request = found.question, found.question.request
    ways = [
        Change(change=precision_text(plan.precision), flag=_format_flags(plan), question=question, plan=plan, kept=True)
        for plan in found.others
        if plan.keeps_limits
    ]
    for share in () if found.fit else ON_GPU:
        progress(f"{100 - share} % of the weights in host memory")
        text = f"{100 - share} % on the host"
        one = changed(text, f"--gpu-weights {share}", replace(request, layout={**request.layout, "gpu_weights": share}))
        if one.kept:
            ways.append(one)
            break
    for gpus in _more_gpus(question, progress):
        progress(f"{gpus} GPUs")
        one = changed(f"{gpus} GPUs", f"--gpus {gpus}", replace(request, gpus=gpus, nodes=None))
        if one.kept:
            ways.append(one)
            break
    for name in _stronger(question):
        progress(name)
        ways.append(
            _on_hardware(request, name, progress) if request.any_number
            else changed(name, f"--hardware {name}", replace(request, hardware=name, intra_node=None))
        )  # fmt: skip
    return [one for one in ways if one.kept]


def _more_gpus(question: Question, progress: Progress) -> list[int]:
    """Numbers of GPUs that may serve: the fewest that serve a load, else some times as many."""
    if not question.task.loaded:
        return [factor * question.gpus for factor in GROWN]
    if question.request.gpus is None and question.request.nodes is None:
        return []
    fewest = fewest_gpus(ask(replace(question.request, gpus=None, nodes=None, any_number=True)), progress)
    return [fewest] if fewest else []


def _format_flags(plan: ServePlan) -> str:
    return f"--weights {plan.precision.weights} --cache {plan.precision.cache}"


def _stronger(question: Question) -> list[str]:
    """Priced hardware of the same vendor with more or faster memory, the cheapest first."""
    mine = question.hardware
    found = []
    for name in library.names("hardware"):
        one = load_hardware(name)
        better = (
            max(one.usable_memory / mine.usable_memory, one.memory_bandwidth / mine.memory_bandwidth) >= FASTER_MEMORY
        )
        worse = min(one.usable_memory / mine.usable_memory, one.memory_bandwidth / mine.memory_bandwidth) < 1.0
        if one.prices and one.vendor == mine.vendor and better and not worse:
            found.append((one.prices[0].usd_per_hour, name))
    return [name for _, name in sorted(found)[:MOST_WAYS]]


# ------------------------------------------------------------------------------------------------ hardware by price


def cheapest(
    request: ServeRequest, names: Iterable[str], progress: Progress = lambda _: None
) -> tuple[list[Change], bool]:
    """Hardware by price: dollars an hour where a load is given, on the fewest GPUs of each that serve it; else dollars of a million
    tokens on the GPUs of the question. What cannot serve comes last. And whether all was looked at: Ctrl-C ends it with what was
    found."""
    rows, complete = list[Change](), True
    try:
        for name in names:
            progress(name)
            rows.append(_on_hardware(request, name, progress))
    except KeyboardInterrupt:
        complete = False
    return sorted(rows, key=lambda row: (not row.kept, dollars(row))), complete


def _on_hardware(request: ServeRequest, name: str, progress: Progress) -> Change:
    """The best deployment on other hardware; under a load on the fewest GPUs of it."""
    one = replace(request, hardware=name, intra_node=None, any_number=request.gpus is None)
    question = ask(one)
    if question.task.loaded:
        gpus = fewest_gpus(question, lambda text: progress(f"{name}: {text}"))
        if gpus is None:
            most = changed(name, f"--hardware {name}", one)
            return replace(most, plan=None, why_not=f"does not serve it on up to {question.gpus} GPUs: {most.why_not}")
        one = replace(one, gpus=gpus, nodes=None, any_number=False)
    return changed(name, f"--hardware {name}", one)


def dollars(row: Change) -> float:
    """What a change costs: by the hour under a load, else for a million tokens; infinite where nothing is known."""
    price = row.question.rates.usd_per_gpu_hour
    if row.plan is None or price is None or row.plan.prediction is None:
        return float("inf")
    hourly = price * row.plan.gpus
    return hourly if row.question.task.loaded else hourly / max(row.plan.prediction.output_tokens_per_second, 1e-12)


def priced_hardware() -> list[str]:
    """All hardware that has a price."""
    return [name for name in library.names("hardware") if load_hardware(name).prices]
