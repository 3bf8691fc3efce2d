"""What of a trainer its user may choose, and what its software chooses: options, versions, defaults and published recipes.

A trainer is written ``NAME[@VERSION][+OPTION=VALUE...]``: ``megatron-bridge@26.06+expert_dispatch=deepep``. Its file lists under

    options    names of ``profiles/trainer_options.yaml`` with the values that its software knows, or with facts per value
    versions   version -> facts that differ from the newest's, which is the last one and the default; each holds until the next
    defaults   what it takes where a job does not say: recompute, zero, etp, ...
    recipes    version -> what the published recipes of that version say, by model family, GPU and precision

Facts of a set may be changed by ``+name`` and ``-name``: what is added, what is taken away.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import field
from typing import Annotated, Any

from planner import library, schema
from planner.errors import PlannerError, UnknownNameError, nearest_first, shown
from planner.record import record

NEEDS = ("experts", "adapters", "bits", "fp8", "mxfp8", "tensor", "main_gradients", "pairs", "gelu", "layer_norm")
"""Where an option matters."""
DEFAULTS = (
    "zero", "pipelined_zero", "etp", "recompute", "lora_rank", "lora_targets", "mtp", "microbatches", "stages", "modules",
)  # fmt: skip
"""What a trainer may have defaults of: state sharding, and the most of it in a pipeline; expert tp ('1' or 'tp'); recompute, as
a row says it; adapters; prediction modules that train along; microbatches ('pp': as many as stages); layers of each pipeline chunk
by their number; modules before and after the layers that are dealt to stages like layers."""
_SPELLED = re.compile(r"(?P<name>[^@+]+?)(?:@(?P<version>[^@+]*))?(?P<options>(?:\+[^+=]*=[^+=]*)*)")


@record
class Option:
    """One option by the table."""

    what: schema.Text
    """For people."""
    needs: tuple[Annotated[str, schema.one_of(*NEEDS)], ...] = ()
    """Where it matters, all of them; empty = everywhere."""
    arch: tuple[str, ...] = ()
    """Architectures that have its values beyond the first; empty = all."""
    open: tuple[str, ...] | None = None
    """Values that a run which does not state it may well have; None = all."""
    values: dict[str, dict[str, Any]]
    """Value -> the facts that it stands for."""


@record
class Recipe:
    """What a published recipe of the software says of one kind of job."""

    model: str = ""
    """Expression for the model's name."""
    hardware: str = ""
    """Expression for the profile's name."""
    precision: str = ""
    """Expression for the precision."""
    adapters: bool | None = None
    """Adapters alone are trained; None = whatever is."""
    options: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)


@record
class Choices:
    """What a trainer's file says in addition to its facts, at one version."""

    written: str = ""
    """The trainer as it was named, with version and options."""
    version: str = ""
    """Version that the facts are those of; '' where the file names none."""
    versions: tuple[str, ...] = ()
    """Versions from which on facts differ, oldest first."""
    options: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Option -> value -> facts."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    recipes: tuple[Recipe, ...] = ()
    """The first that matches a job counts."""

    def recipe(self, model: str, hardware: str, precision: str, *, adapters: bool) -> Recipe:
        """The recipe of a job; an empty one where there is none."""
        texts = {"model": model, "hardware": hardware, "precision": precision}
        for one in self.recipes:
            same = one.adapters is None or one.adapters == adapters
            if same and all(re.search(getattr(one, name), text, re.IGNORECASE) for name, text in texts.items()):
                return one
        return Recipe()


@functools.cache
def table() -> dict[str, Option]:
    """Every option by name."""
    data = library.read_yaml(library.profiles_directory() / "trainer_options.yaml")
    return {
        name: schema.read(Option, {**one, "values": values_of(one["values"])}, f"trainer_options.yaml: {name}")
        for name, one in data.items()
    }


def values_of(data: Mapping[Any, Any]) -> dict[str, Any]:
    """A mapping by value, whose names YAML may have read as true, false or a number."""
    return {text_of(key): one for key, one in data.items()}


def text_of(value: Any) -> str:
    """A value as it is written: on and off are what YAML reads as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def spelled(text: str) -> tuple[str, str, dict[str, str]]:
    """(name or path, version or '', options) of a trainer as it is written. Raises PlannerError."""
    if text.endswith((".yaml", ".yml")) or os.path.isfile(text):
        return text, "", {}
    found = _SPELLED.fullmatch(text)
    if found is None or found["version"] == "":
        raise PlannerError(f"trainer {shown(text)}: write it NAME, NAME@VERSION or NAME@VERSION+OPTION=VALUE")
    pairs = [one.partition("=") for one in found["options"].split("+") if one]
    return found["name"], found["version"] or "", {name: value for name, _, value in pairs}


def spell(text: str, options: Mapping[str, str]) -> str:
    """A trainer as it is written, with further options, which go over those that it has."""
    name, version, own = spelled(text)
    more = "".join(f"+{key}={value}" for key, value in {**own, **options}.items())
    return f"{name}{'@' if version else ''}{version}{more}"


def read_options(given: Any) -> dict[str, str]:
    """Options of a keyword or of flags: a mapping, a text or texts ``NAME=VALUE``. Raises PlannerError."""
    if isinstance(given, Mapping):
        return {str(name): text_of(value) for name, value in given.items()}
    texts = [given] if isinstance(given, str) else list(given)
    for text in texts:
        if not isinstance(text, str) or not re.fullmatch(r"\w+=[\w.-]+", text):
            raise PlannerError(f"--option {text!s:.60}: options are written NAME=VALUE, like --option expert_dispatch=deepep")
    return dict(text.split("=") for text in texts)


def number_of(version: str) -> tuple[int, ...]:
    """A version as numbers that can be compared. Raises PlannerError."""
    parts = re.fullmatch(r"[vr]?(\d{1,9}(?:\.\d{1,9})*)", version.strip()) if isinstance(version, str) else None
    if parts is None:
        raise PlannerError(f"version {shown(version)} is not a number like 26.06; in a file it must be in quotes")
    return tuple(int(one) for one in parts[1].split("."))


def at_version(stated: Iterable[str], version: str) -> str:
    """The stated version whose facts hold at another: the last one not after it, the first for all before it."""
    known = sorted(stated, key=number_of)
    asked = number_of(version)
    return next((one for one in reversed(known) if number_of(one) <= asked), known[0])


def newest_of(versions: Iterable[str]) -> str:
    """The newest of the stated versions; '' where none is stated."""
    return max(versions, key=number_of, default="")


def options_of(data: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Option -> value -> facts of a file. Raises PlannerError."""
    own: dict[str, dict[str, Any]] = {}
    for name, values in schema.mapping(data.get("options", {}), f"{where}: options").items():
        if name not in table():
            raise PlannerError(f"{where}: option {shown(name)} is not known; nearest: {nearest_first(str(name), table())[0]}")
        if values is not None:  # else an option of the trainer that it extends, which it has not
            own[name] = _own(name, values, where) if isinstance(values, Mapping) else _meant(name, values, where)
    return own


def choices_of(data: Mapping[str, Any], where: str, written: str) -> Choices:
    """What a trainer's file says in addition to its facts; those of the version lie over the data already. Raises PlannerError."""
    own, version = options_of(data, where), text_of(data.get("version", ""))
    recipes = schema.mapping(data.get("recipes", {}), f"{where}: recipes")
    versions = schema.mapping(data.get("versions", {}), f"{where}: versions")
    stated = [one for one in recipes if version and number_of(one) <= number_of(version)]
    rows = recipes[max(stated, key=number_of)] if stated else []
    if not isinstance(rows, list):
        raise PlannerError(f"{where}: recipes of a version are {shown(rows)}; they must be a list")
    return Choices(
        written=written, version=version, options=own, versions=tuple(sorted(versions, key=number_of)),
        defaults=schema.check_keys(data.get("defaults", {}), DEFAULTS, f"{where}: defaults"),
        recipes=tuple(_recipe(one, own, f"{where}: recipes") for one in rows),
    )  # fmt: skip


def _recipe(data: Any, known: Mapping[str, Any], where: str) -> Recipe:
    one = dict(schema.mapping(data, where))
    chosen = schema.mapping(one.get("options", {}), f"{where}: options")
    one["options"] = {str(name): text_of(value) for name, value in chosen.items()}
    for name, value in one["options"].items():
        require_value(name, value, known, where)
    schema.check_keys(one.get("defaults", {}), DEFAULTS, where)
    found = schema.read(Recipe, one, where)
    for text in (found.model, found.hardware, found.precision):
        try:
            re.compile(text)
        except re.error as error:
            raise PlannerError(f"{where}: {shown(text)} is no regular expression ({error})") from error
    return found


def _own(name: str, values: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Values with facts of the trainer's own."""
    return {key: dict(schema.mapping(facts, f"{where}: option {name}")) for key, facts in values_of(values).items()}


def _meant(name: str, values: Any, where: str) -> dict[str, Any]:
    """Values of a list with the facts of the table."""
    meaning = table()[name].values
    if not isinstance(values, list):
        raise PlannerError(f"{where}: option {name} is {shown(values)}; it must be a list of values, or facts by value")
    found = [text_of(one) for one in values]
    for one in found:
        if one not in meaning:
            raise PlannerError(f"{where}: option {name} has no value {shown(one)}; it has {', '.join(meaning)}")
    return {one: meaning[one] for one in found}


def facts_at(data: Mapping[str, Any], version: str, where: str) -> dict[str, Any]:
    """Facts of a file that differ at a version; none where it is the newest or not said. Raises PlannerError."""
    stated = schema.mapping(data.get("versions", {}), f"{where}: versions")
    if not version:
        return {}
    if not stated:
        raise PlannerError(f"{where}: this trainer has no versions; leave @{version} out")
    return dict(schema.mapping(stated[at_version(stated, version)], f"{where}: versions"))


def require_value(option: str, value: str, known: Mapping[str, Mapping[str, Any]], who: str) -> None:
    """Raise PlannerError for an option, or a value of it, that a trainer does not have."""
    if option not in known:
        have = ", ".join(nearest_first(option, known)) or "none at all"
        raise PlannerError(f"{who} has no option {shown(option)}; it has, nearest first: {have}")
    if value not in known[option]:
        raise UnknownNameError(f"{option} of {who}", value, known[option])


def signed(before: Collection[str], changes: Mapping[str, Any], name: str) -> set[str]:
    """A set with what ``+name`` and ``-name`` say of it."""
    return ({*before} | {*changes.get(f"+{name}", ())}) - {*changes.get(f"-{name}", ())}
