"""Profiles by the names that people know the devices by: h100, A100-40GB, 4090, 'RTX 6000 Ada'."""

import re
from collections.abc import Collection
from functools import cache

from planner import library
from planner.detect import beside_device, not_modelled, profile_of
from planner.errors import PlannerError, UnknownNameError, listed

OVER = " over "
"""Between the name of a profile and another link inside a node."""
_BESIDE = re.compile(r"(?i:nvidia|amd|tesla|geforce|instinct|quadro|gpus?|graphics|dgx|hgx|sxm\d?|oam|hbm\d?e?|\d+ ?gi?b?|\d+x|gb)")
"""Words next to the name of a device that do not make it another one; what else stands there is not understood."""
_SIZE = re.compile(r"(\d+) ?GB", re.IGNORECASE)
OTHER_CARD = {"ti", "ada"}
"""Words of a name without which it is that of another card: an RTX 2080 is no RTX 2080 Ti."""
SAME_SIZE = 0.1
"""Part by which a memory size in a name may differ from the profile's: 141 GB are sold as 144."""


def profile_named(name: str) -> str:
    """The library name of a profile: its own name in any case and spelling, the name of a device, or a part of one name alone.

    Files are returned as they are, another link inside a node (OVER) stays. Raises PlannerError for a device that is not modelled,
    UnknownNameError for any other name.
    """
    name, over, link = name.partition(OVER)
    return f"{_profile_named(name)}{over}{link}"


def _profile_named(name: str) -> str:
    if name in (known := library.names("hardware")) or library.is_file_name(name):
        return name
    plain = _plain(name)
    same = [one for one in known if _plain(one) == plain]
    if why := not_modelled(name):
        raise PlannerError(why)
    spaced = re.sub(r"[-_ ]+", " ", name).strip()
    device = profile_of(spaced)
    parts = [one for one in known if plain in _parts(one)]
    usual = device and _sizes_agree(spaced, device) and all(map(_BESIDE.fullmatch, beside_device(spaced).split()))
    found = same or ([device] if device and usual else []) or parts
    if len(found) > 1 and not same:
        raise PlannerError(f"hardware '{name}' may be {listed(found)}; say which")
    if not found or (found == parts and _plain(name) not in _parts(found[0], but=OTHER_CARD)):
        raise UnknownNameError("hardware", name, known)
    return found[0]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _parts(profile: str, but: Collection[str] = ()) -> set[str]:
    """Runs of whole words of a profile's name: rtx, rtx4090, 4090; but not l40 of l40s, which is another device. None that stops
    before a word of ``but``."""
    words = profile.split("-")
    ends = [last for last in range(1, len(words) + 1) if not {*words[last : last + 1]} & {*but}]
    return {"".join(words[first:last]) for last in ends for first in range(last)}


@cache
def _memory(profile: str) -> float:
    """Memory of a profile in GB, as it is sold."""
    data = library.read_yaml(library.find("hardware", profile))
    return float(str(data.get("memory", "0 GB")).split()[0])


def _sizes_agree(name: str, profile: str) -> bool:
    """Whether a memory size in the name is the profile's: an A100 of 64 GB is neither that of 40 nor that of 80."""
    said = _SIZE.search(name)
    return said is None or abs(float(said[1]) / (_memory(profile) or 1.0) - 1.0) <= SAME_SIZE
