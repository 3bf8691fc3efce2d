"""Units at the border: text with a unit in YAML and flags, plain floats in base units inside.

Base units are bytes, bytes/s, FLOP, FLOP/s, seconds, watts and USD. Powers of 1000 and 1024 appear in this file only.
"""

import math
import re

from planner.errors import PlannerError, shown

KIB, MIB, GIB, TIB = (1024.0**n for n in range(1, 5))
KILO, MEGA, GIGA, TERA, PETA, EXA = (1000.0**n for n in range(1, 7))
MILLI = 1e-3
MICRO = 1e-6

_DECIMAL = {"": 1.0, "k": KILO, "K": KILO, "M": MEGA, "G": GIGA, "T": TERA, "P": PETA, "E": EXA}
_BINARY = {"Ki": KIB, "Mi": MIB, "Gi": GIB, "Ti": TIB}

_UNITS: dict[str, dict[str, float]] = {
    "bytes": {f"{p}B": f for p, f in {**_DECIMAL, **_BINARY}.items()},
    "bytes/s": {
        **{f"{p}B/s": f for p, f in {**_DECIMAL, **_BINARY}.items()},
        **{f"{p}{bits}": f / 8 for p, f in _DECIMAL.items() for bits in ("b/s", "bps", "bit/s", "bE")},
    },
    "FLOP/s": {f"{p}FLOP/s": f for p, f in _DECIMAL.items()},
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "days": 86400.0},
    "watts": {"W": 1.0, "kW": KILO, "MW": MEGA},
    "USD/h": {"USD/h": 1.0},
    "USD/byte": {f"USD/{p}B": 1.0 / f for p, f in {**_DECIMAL, **_BINARY}.items()},
    "tokens": {"": 1.0, "K": KILO, "M": MEGA, "B": GIGA, "T": TERA, "Ki": KIB, "Mi": MIB},
}
_EXAMPLES = {
    "bytes": "79.6 GiB",
    "bytes/s": "400 Gb/s or 3.35 TB/s",
    "FLOP/s": "989.4 TFLOP/s",
    "seconds": "2.5 us",
    "watts": "700 W",
    "USD/h": "2.69 USD/h",
    "USD/byte": "0.02 USD/GB",
    "tokens": "4M",
}
_NUMBER = re.compile(r"^\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)\s*$")


def parse(text: object, dimension: str, *, what: str = "value", like: str | None = None) -> float:
    """A positive quantity in base units from text such as ``79.6 GiB``.

    ``dimension`` is one of bytes, bytes/s, FLOP/s, seconds, watts, USD/h, USD/byte, tokens; ``like``: example for the
    sentence of an error.
    Raises PlannerError when the unit is missing or of another dimension, or when the number is negative or not finite.
    """
    units = _UNITS[dimension]
    text = text if isinstance(text, str) and len(text) <= 60 else shown(text)
    match = _NUMBER.match(text)
    if match is None:
        raise PlannerError(f"{what}: {shown(str(text))} is not a quantity; write it like {like or _EXAMPLES[dimension]}")
    number, unit = float(match.group(1)), match.group(2)
    if unit not in units:
        problem = "has no unit" if unit == "" else f"has the unit {shown(unit)}, which does not measure {dimension}"
        raise PlannerError(f"{what}: {shown(str(text))} {problem}; write it like {like or _EXAMPLES[dimension]}")
    value = number * units[unit]
    if not math.isfinite(value) or value < 0:
        raise PlannerError(f"{what}: {shown(str(text))} must be finite and not negative")
    return value


_COUNT = re.compile(r"^\s*(\d+\.?\d*|\.\d+)\s*([kKmMgG]i?)?\s*$")
_COUNTED = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def parse_count(text: object, *, what: str) -> tuple[int, bool]:
    """A whole number from text such as ``8192``, ``128k`` or ``4M``, and whether it had a suffix.

    Of lengths and batches in tokens k is 1024 and M 1024 x 1024, as in 8k, 128k and 1M of contexts. Raises PlannerError.
    """
    text = text if isinstance(text, str) and len(text) <= 60 else shown(text)
    match = _COUNT.match(text)
    number = float(match[1]) * _COUNTED[(match[2] or "").rstrip("i").lower()] if match else 0.5
    if match is None or number != int(number):
        raise PlannerError(f"{what}: {shown(text)} is not a whole number; write it like 8192, 128k or 1M")
    return int(number), bool(match[2])


def parse_amount(text: str, *, what: str) -> float:
    """A large number as people write it: 15T, 2M, 250k, $2M. Raises PlannerError below 1."""
    plain = text.strip().removeprefix("$").removesuffix("USD").strip()
    value = parse(f"{plain[:-1]}K" if plain.endswith("k") else plain, "tokens", what=what)
    if value < 1:
        raise PlannerError(f"{what}: {shown(text)} must be at least 1")
    return value


def format_bytes(value: float) -> str:
    """Bytes as text that ``parse`` reads back: 85520809984.0 -> '79.65 GiB'."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(value) >= factor:
            return f"{value / factor:.4g} {unit}" if abs(value) < 1000 * factor else f"{value / factor:.0f} {unit}"
    return f"{value:.0f} B"


def format_seconds(value: float) -> str:
    """Seconds as text that ``parse`` reads back: 0.0123 -> '12.3 ms'."""
    if value >= 1:
        return f"{value:.3g} s" if value < 999.5 else f"{value:.0f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms" if value < 0.9995 else "1 s"
    return f"{value * 1e6:.3g} us"


def format_count(value: float) -> str:
    """A large count, short: 70553706496 -> '70.6B'."""
    for unit, factor in (("T", TERA), ("B", GIGA), ("M", MEGA), ("K", KILO)):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.4g}"


def format_energy(kwh: float) -> str:
    """Kilowatt-hours, short: 187_900 -> '187.9 MWh'."""
    for unit, factor in (("GWh", MEGA), ("MWh", KILO)):
        if kwh >= factor:
            return f"{kwh / factor:.4g} {unit}"
    return f"{kwh:.4g} kWh"


def format_days(seconds: float) -> str:
    """How long a run takes: '5.2 hours' below two days, '30.3 days', '1,204 days'."""
    days = seconds / _UNITS["seconds"]["days"]
    if days < 2:
        return f"{24 * days:.3g} hours"
    return f"{days:.3g} days" if days < 1000 else f"{days:,.0f} days"


def plural(number: float, word: str) -> str:
    """'1 cell', '3 cells'."""
    return f"{number:,.0f} {word}" + ("" if number == 1 else "s")
