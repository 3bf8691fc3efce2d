"""What a training run costs: time, GPU-hours, dollars and energy, each with the source and date of its rate."""

import math
from typing import Any

from planner.errors import PlannerError
from planner.hardware import HardwareProfile, Price
from planner.record import record
from planner.units import KILO, MEGA

HOUR, DAY = 3600.0, 86400.0
"""Seconds."""
LEFT_OUT = (
    "time: checkpoints, evaluation, failures and restarts",
    "dollars: storage, traffic, idle reservation, taxes and discounts",
    "energy: hosts, network and storage, and cooling unless --pue says",
)
"""What none of the figures holds."""


@record
class Basis:
    """Where one rate comes from."""

    what: str
    """Name of the rate."""
    value: str
    """The rate with its unit."""
    source: str
    """Document, price list or flag."""
    date: str
    """Date of that source; '' where it states none."""


@record
class Rates:
    """What one GPU costs by the hour and draws."""

    usd_per_gpu_hour: float | None
    """Dollars; None where the profile has no price and none was given."""
    watts: float
    """Board power limit (TDP) of one GPU."""
    power_share: float
    """Mean power of the run over the limit, 0 to 1."""
    pue: float
    """Energy of the building over that of the machines in it, from 1."""
    basis: tuple[Basis, ...]
    """One entry for every rate above."""
    price: Price | None
    """The price with its source."""
    other_prices: tuple[Price, ...]
    """The profile's further prices: they differ by a factor of 2 to 3 between providers."""

    @property
    def kwh_per_gpu_hour(self) -> float:
        """TDP x power share x PUE."""
        return self.watts * self.power_share * self.pue / KILO


@record
class Costs:
    """Totals of one training run."""

    tokens: float
    """Tokens to train on."""
    steps: int
    """Optimizer steps: tokens over tokens per step, rounded up."""
    seconds: float
    """Steps x step time."""
    gpu_hours: float
    """GPUs x hours."""
    usd: float | None
    """GPU-hours x price; None without a price."""
    kwh: float
    """GPU-hours x TDP x power share x PUE: an upper bound where the power share is 1."""

    @property
    def days(self) -> float:
        """The run's time in days."""
        return self.seconds / DAY

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Dollars for a million of the tokens asked for."""
        return None if self.usd is None else self.usd / self.tokens * MEGA

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json, the derived values too."""
        return {**vars(self), "days": self.days, "usd_per_million_tokens": self.usd_per_million_tokens}


def rates_of(
    hardware: HardwareProfile, *, price: float | None = None, power_share: float = 1.0, pue: float = 1.0
) -> Rates:
    """The rates of a profile: its first price, or the ``price`` given in USD per GPU-hour; its TDP.

    A power share of 1 takes every GPU at its power limit all the time. Sustained matrix multiplication runs there (the
    profile's sustained_clock is below 1 because of it), a GPU that waits for the network does not: an upper bound for
    the GPUs themselves. Raises PlannerError when a given rate is out of range.
    """
    for flag, value, low, high in (("--power-share", power_share, 0.0, 1.0), ("--pue", pue, 1.0, 3.0)):
        if not low <= value <= high or value == 0.0:
            raise PlannerError(f"{flag} is {value:g}; it must lie between {low:g} and {high:g}, and above 0")
    if price is not None and not (math.isfinite(price) and price > 0):
        raise PlannerError(f"--price is {price:g}; it must be dollars per GPU and hour, above 0")
    listed = hardware.prices[0] if hardware.prices else None
    given = Price(usd_per_hour=price, kind="given", date="", source="--price") if price is not None else listed
    basis = [_price_basis(given, hardware)]
    basis += [
        Basis(what="power of a GPU", value=f"{hardware.tdp:g} W, the limit of the board", date="", source=_documents(hardware)),
        Basis(what="share of that power", value=f"{power_share:g}", date="", source=(
            "assumed: an upper bound, a waiting GPU draws less" if power_share == 1.0 else "--power-share")),
        Basis(what="PUE", value=f"{pue:g}", date="", source="cooling left out" if pue == 1.0 else "--pue"),
    ]  # fmt: skip
    return Rates(
        usd_per_gpu_hour=None if given is None else given.usd_per_hour, watts=hardware.tdp, power_share=power_share,
        pue=pue, basis=tuple(basis), price=given, other_prices=() if price is not None else hardware.prices[1:],
    )  # fmt: skip


def _price_basis(price: Price | None, hardware: HardwareProfile) -> Basis:
    if price is None:
        missing = f"profile {hardware.name} lists none; give --price"
        return Basis(what="price of a GPU-hour", value="unknown", source=missing, date="")
    value = f"{price.usd_per_hour:g} USD"
    source = price.source if price.source == "--price" else f"{price.kind}: {price.source}"
    return Basis(what="price of a GPU-hour", value=value, source=source, date=price.date)


def _documents(hardware: HardwareProfile) -> str:
    """Where a profile's TDP comes from; the commits in it stand for a date."""
    if {"tdp", "tdp_w"} & set(hardware.unverified):
        return "general knowledge, not checked in a document"
    return str(hardware.sources.get("specs", f"profile {hardware.name}"))


def costs(rates: Rates, *, num_gpus: int, step_time_s: float, tokens_per_step: float, tokens: float) -> Costs:
    """Totals of training on ``tokens`` tokens.

    steps = ceil(tokens / tokens per step); hours = steps x step time / 3600; USD = GPUs x hours x price;
    kWh = GPUs x hours x TDP x power share x PUE. Left out: ``LEFT_OUT``.
    """
    if not (math.isfinite(tokens) and tokens >= 1):
        raise PlannerError(f"tokens to train on: {tokens:g}; it must be at least 1, like 15T")
    steps = math.ceil(tokens / tokens_per_step)
    seconds = steps * step_time_s
    gpu_hours = num_gpus * seconds / HOUR
    price = rates.usd_per_gpu_hour
    return Costs(
        tokens=tokens, steps=steps, seconds=seconds, gpu_hours=gpu_hours, kwh=gpu_hours * rates.kwh_per_gpu_hour,
        usd=None if price is None else gpu_hours * price,
    )  # fmt: skip


def usd_per_million_tokens(rates: Rates, num_gpus: int, tokens_per_second: float) -> float | None:
    """Dollars for a million tokens at a steady rate; None without a price."""
    price = rates.usd_per_gpu_hour
    return None if price is None else price * num_gpus / HOUR / tokens_per_second * MEGA


def kwh_per_million_tokens(rates: Rates, num_gpus: int, tokens_per_second: float) -> float:
    """The same for energy."""
    return rates.kwh_per_gpu_hour * num_gpus / HOUR / tokens_per_second * MEGA
