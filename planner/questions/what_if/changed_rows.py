"""The best plan of a job with one thing changed, compared with that of the job as it is, and why it helps or does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from planner.cost.estimate import PARTS
from planner.costs import Costs, Rates, costs, kwh_per_million_tokens, rates_of, usd_per_million_tokens
from planner.defaults import ResolvedJob
from planner.errors import PlannerError
from planner.explain import PART_TEXT, layout_text
from planner.hardware import HardwareProfile
from planner.layout import Layout
from planner.plan_file import Prediction
from planner.questions.best_plan import Best, best_of
from planner.questions.what_if.changes import Variant
from planner.record import record
from planner.search import Pins, plan_key

NOTICED = 0.005
"""A change of throughput below this share is called none."""
WORTH_SAYING = 0.003
"""Parts that move by less than this share of the base's time are not named."""
_TRAFFIC = ("tensor_communication", "context_communication", "expert_communication", "pipeline_communication",
            "data_communication")  # fmt: skip
BOUND_BY = {
    "network": _TRAFFIC,
    "network_latency": _TRAFFIC,
    "scale_up": _TRAFFIC,
    "compute": ("compute", "recompute"),
    "memory_bandwidth": ("compute", "recompute", "optimizer"),
}
"""Parts of the step that a change of hardware can shorten."""


@record
class Pricing:
    """How the rows are priced."""

    price: float | None = None
    """USD per GPU-hour for every hardware; None = the profile's own."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """USD per GPU-hour of single profiles, by name."""
    power_share: float = 1.0
    pue: float = 1.0
    tokens: float | None = None
    """Tokens to train on; None = costs are given per million tokens only."""

    def rates(self, name: str, hardware: HardwareProfile) -> Rates:
        """Rates of one profile, asked for by the name that the user gave."""
        price = self.prices.get(name, self.price)
        return rates_of(hardware, price=price, power_share=self.power_share, pue=self.pue)


@record
class Row:
    """One job and its best plan."""

    label: str
    """What was changed."""
    changed: tuple[str, ...]
    """The flags that were changed."""
    model: str
    hardware: str
    num_gpus: int
    sequence_length: int
    global_batch_size: int
    fits: bool = False
    why: str
    """What the change does, and why; why nothing fits."""
    least_step_time_s: float | None = None
    """Seconds that a step takes at the least, of hardware that was not searched to the end: no plan on it can be the cheapest."""
    least_usd_per_million_tokens: float | None = None
    """What that costs."""
    by_price: bool = False
    """It answers which hardware is the cheapest."""
    missed: bool = False
    """It fits, but misses the goal."""
    layout: Layout | None = None
    """The best layout; None where nothing fits."""
    same_layout: bool = False
    """It is the plan of the base: the same degrees and memory options."""
    prediction: Prediction | None = None
    """None where nothing fits."""
    throughput: float | None = None
    """Tokens per second and GPU over the base's; None where one of them does not fit."""
    rates: Rates | None = None
    usd_per_million_tokens: float | None = None
    kwh_per_million_tokens: float | None = None
    costs: Costs | None = None
    """Totals, where the number of tokens was said."""

    @property
    def searched(self) -> bool:
        """Whether it fits, and what is best, was looked for."""
        return self.least_step_time_s is None

    @property
    def tokens_per_second(self) -> float | None:
        """Of all GPUs."""
        return None if self.prediction is None else self.prediction.tokens_per_second_per_gpu * self.num_gpus

    def none(self, label: str, why: str) -> Row:
        """The row as the answer 'there is none'."""
        named = {name: getattr(self, name) for name in ("changed", "model", "hardware", "num_gpus", "sequence_length",
                                                        "global_batch_size", "rates")}  # fmt: skip
        return Row(**named, label=f"{label}: none", why=why)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        keys = ("label", "model", "hardware", "num_gpus", "sequence_length", "global_batch_size", "why", "same_layout",
                "throughput", "usd_per_million_tokens", "kwh_per_million_tokens", "tokens_per_second", "searched",
                "least_step_time_s", "least_usd_per_million_tokens")  # fmt: skip
        return {
            **{key: getattr(self, key) for key in keys},
            "fits": self.fits if self.searched else None,
            "changed": list(self.changed),
            "layout": None if self.layout is None else self.layout.to_dict(),
            "layout_text": None if self.layout is None else layout_text(self.layout),
            "estimate": None if self.prediction is None else vars(self.prediction),
            "price": None if self.rates is None else vars(self.rates.basis[0]),
            "costs": None if self.costs is None else self.costs.to_dict(),
        }


def row_of(
    variant: Variant, base: Best | None, pins: Pins | None, pricing: Pricing, rate: float = 0.0, known: Best | None = None
) -> tuple[Best | None, Row]:
    """Search one variant, unless its best plan is ``known``, and compare it with the base. A job that cannot be trained, or not at
    the ``rate`` in tokens per second, is a row that says why, not an error."""
    row = row_asked(variant)
    try:
        resolved = variant.resolved()
    except PlannerError as error:
        return None, dataclasses.replace(row, why=str(error))
    row, work = priced_row(row, resolved, pricing), resolved.job.workload
    found = known or best_of(resolved, pins, rate=rate)
    row = dataclasses.replace(row, fits=found.fits, why=_why(variant, found, base))
    one, reached, total = found.prediction, found.tokens_per_second, None
    if one is None or reached is None:
        return found, row
    rates = row.rates
    assert rates is not None  # those of a row that was priced
    if pricing.tokens is not None:
        total = costs(
            rates, num_gpus=row.num_gpus, step_time_s=one.step_time_s, tokens=pricing.tokens, tokens_per_step=work.tokens
        )
    return found, dataclasses.replace(
        row, layout=found.layout, prediction=one, throughput=_relative(found, base), costs=total,
        same_layout=_same(found, base), usd_per_million_tokens=usd_per_million_tokens(rates, row.num_gpus, reached),
        kwh_per_million_tokens=kwh_per_million_tokens(rates, row.num_gpus, reached),
    )  # fmt: skip


def row_asked(variant: Variant) -> Row:
    """A variant before it is looked at."""
    request = variant.request
    return Row(
        label=variant.label, changed=variant.changed, hardware=str(request.hardware),
        model=request.model if isinstance(request.model, str) else request.model.name, num_gpus=request.num_gpus,
        sequence_length=request.sequence_length or 0, global_batch_size=request.global_batch_size or 0, why="",
    )  # fmt: skip


def priced_row(row: Row, resolved: ResolvedJob, pricing: Pricing) -> Row:
    """With what the job is, and what its hardware costs by the hour."""
    work, rates = resolved.job.workload, pricing.rates(row.hardware, resolved.job.cluster.hardware)
    return dataclasses.replace(row, model=work.model.name, global_batch_size=work.global_batch_size, rates=rates)


def _same(found: Best, base: Best | None) -> bool:
    """The base's plan is the best one here too."""
    if base is None or not base.fits or base.layout is None or found.layout is None:
        return False
    return plan_key(base.layout) == plan_key(found.layout)


def _relative(found: Best, base: Best | None) -> float | None:
    if base is None or not (base.fits and found.fits) or base.prediction is None or found.prediction is None:
        return None
    return found.prediction.tokens_per_second_per_gpu / base.prediction.tokens_per_second_per_gpu


def _why(variant: Variant, found: Best, base: Best | None) -> str:
    """The effect of a change on the GPU time of a token, and the parts that it comes from."""
    if not found.fits:
        return found.why_not
    ratio = _relative(found, base)
    if base is None:
        return "the job as it is"
    if ratio is None or base.prediction is None or found.prediction is None:
        return "fits, which the base does not"
    gone, come = _moved(found.prediction, base.prediction)
    words = []
    work = found.resolved.job.workload
    if "sequence_length" in variant.changed and work.sequence_length > work.model.max_sequence_length:
        most = work.model.max_sequence_length
        words.append(f"longer than the {most} tokens that {work.model.name} was published for")
    if abs(ratio - 1.0) < NOTICED:
        words.append(_no_effect(variant, base, _same(found, base)))
    else:
        words += [f"saves {text}" for text in gone[:2]] + [f"pays {text}" for text in come[:2]]
        if (ratio > 1.0 and not gone) or (ratio < 1.0 and not come):
            words.append("many small parts move")
    return "; ".join(words)


def _moved(found: Prediction, base: Prediction) -> tuple[list[str], list[str]]:
    """Parts whose GPU time per token fell and rose, largest first, in percent of the base's whole time per token."""
    gaps = []
    for part in PARTS:
        then, now = (one.time_s[part] / one.step_time_s / one.tokens_per_second_per_gpu for one in (base, found))
        gaps.append(((now - then) * base.tokens_per_second_per_gpu, PART_TEXT[part]))
    gaps.sort(key=lambda gap: -abs(gap[0]))
    gone = [f"{100 * -gap:.1f} % of {text}" for gap, text in gaps if gap < -WORTH_SAYING]
    come = [f"{100 * gap:.1f} % of {text}" for gap, text in gaps if gap > WORTH_SAYING]
    return gone, come


def _no_effect(variant: Variant, base: Best, same: bool) -> str:
    """Why a change does not help: what it shortens is a small part of the step, or does not bind."""
    changed = variant.changed[-1] if variant.changed else ""
    cluster, one = base.resolved.job.cluster, base.prediction
    plan = "the same plan" if same else "another plan as fast"
    if changed.startswith("network") and cluster.num_gpus <= cluster.domain:
        return f"no effect, {plan}: the job stays inside one node"
    if changed in BOUND_BY and one is not None:
        share = sum(one.time_s[part] for part in BOUND_BY[changed]) / one.step_time_s
        what = "exposed communication is" if changed.startswith(("network", "scale_up")) else "what it shortens is"
        return f"no effect, {plan}: {what} {100 * share:.1f} % of the step"
    if changed == "memory":
        return f"no effect, {plan}: memory does not bind"
    return f"no effect, {plan}"
