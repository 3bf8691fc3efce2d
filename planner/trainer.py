"""Trainer: what a training framework allows, stores, fuses, sends and costs on the host. All of it data in ``profiles/trainers``.

A file holds the facts of all records side by side, each under its own name. What one framework alone does is no fact: it is a
term of its folder in ``planner.trainers`` (``terms``), which the cost model adds up (``cost.own_terms``).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner import library, schema
from planner.errors import PlannerError, nearest_first, shown
from planner.record import record
from planner.trainer_options import (
    Choices,
    choices_of,
    facts_at,
    newest_of,
    options_of,
    require_value,
    signed,
    spelled,
)
from planner.trainer_records import Host, Kernels, Legal, Stored, Traffic

RECORDS: dict[str, type] = {"legal": Legal, "stored": Stored, "kernels": Kernels, "traffic": Traffic, "host": Host}
MERGED = ("passes", "copy_bytes", "host_factors")
"""Facts that are mappings of which a file, or a change, may give a part."""


@record
class Trainer:
    """One generation of a training framework."""

    name: schema.Name
    """Name of the file."""
    title: schema.Text
    """Name and versions for people."""
    code_base: str
    """The code that runs: trainers that share it share their error bars."""
    source: schema.Text
    """Where these facts come from."""
    legal: Legal
    stored: Stored
    kernels: Kernels
    traffic: Traffic
    host: Host
    terms: tuple[Any, ...] = ()
    """What it alone does: a ``cost.own_terms.OwnTerms`` of each of the named folders of ``planner.trainers``."""
    choices: Choices = dataclasses.field(default_factory=Choices, compare=False)
    """Its version, options, defaults and recipes."""

    @property
    def label(self) -> str:
        """Its name with the version and the options that it was named with."""
        written = self.choices.written
        return self.name + written.removeprefix(spelled(written)[0]) if written else self.name

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Optimizers that it has."""
        return tuple(self.stored.optimizer_bytes)

    def states_of(self, optimizer: str) -> float:
        """Bytes per parameter of an optimizer's states and master weights. Raises PlannerError for one that it does not have."""
        if optimizer not in self.stored.optimizer_bytes:
            raise PlannerError(f"trainer {self.name} has no optimizer {optimizer}; it knows {', '.join(self.optimizers)}")
        return self.stored.optimizer_bytes[optimizer]

    def fact(self, name: str) -> Any:
        """A fact by the name that files give it. Raises KeyError."""
        return getattr(getattr(self, RECORD_OF[name]), name)

    def replace(self, **changes: Any) -> Trainer:
        """The trainer with some facts changed, each under its own name. Raises TypeError for a name that is no fact.

        Mappings of MERGED are changed key by key, sets also by ``+name`` and ``-name``. ``terms`` is a mapping as in files, whose
        fields go over those that it has.
        """
        for name in {key[1:] for key in changes if key[0] in "+-"}:
            changes[name] = sorted(signed(changes.get(name, self.fact(name)), changes, name))
        changes = {key: value for key, value in changes.items() if key[0] not in "+-"}
        present = {key: self.fact(key) for key in MERGED if key in changes}
        if "terms" in changes:
            present["terms"] = {one.folder(): dataclasses.asdict(one) for one in self.terms}
        mine: dict[str, dict[str, Any]] = {name: {} for name in ("", *RECORDS)}
        for key, value in merge_changes(present, changes).items():
            if key == "terms":
                value = tuple(terms_class(folder)(**values) for folder, values in value.items())
            elif isinstance(value, list):  # of data as files hold it
                value = (frozenset if isinstance(self.fact(key), frozenset) else tuple)(value)
            mine[RECORD_OF.get(key, "")][key] = value
        top = mine.pop("")
        records = {name: dataclasses.replace(getattr(self, name), **values) for name, values in mine.items()}
        return dataclasses.replace(self, **top, **records)

    def with_option(self, name: str, value: str) -> Trainer:
        """The trainer with one of its options set. Raises PlannerError."""
        require_value(name, value, self.choices.options, f"trainer {self.name}")
        return self.with_facts(self.choices.options[name][value])

    def with_facts(self, facts: Mapping[str, Any]) -> Trainer:
        """The trainer with some facts changed, written as files hold them. Raises PlannerError."""
        return self.replace(**{key: self._read(key, value) for key, value in facts.items()})

    def _read(self, key: str, value: Any) -> Any:
        """A fact as a file holds it."""
        if key[0] in "+-" and isinstance(value, list):  # part of a set
            return self._read(key[1:], value)
        if key not in RECORD_OF:  # terms
            return value
        return schema.value_of(schema.fields_of(RECORDS[RECORD_OF[key]])[0][key], value, f"trainer {self.name}", key)

    def option(self, name: str) -> str:
        """The value of an option: the first whose facts hold; '' where none does."""
        values = self.choices.options.get(name, {})
        return next((value for value, facts in values.items() if all(self._has(*one) for one in facts.items())), "")

    def _has(self, key: str, value: Any) -> bool:
        """Whether a fact of an option holds."""
        if key[0] in "+-":
            return all((one in self.fact(key[1:])) == (key[0] == "+") for one in value)
        if key == "terms":
            mine = {one.folder(): one for one in self.terms}
            return all(getattr(mine[one], name) == x for one, fields in value.items() for name, x in fields.items())
        if key in MERGED:
            return all(self.fact(key).get(one, 1.0) == number for one, number in value.items())
        if key == "unfused":  # but for words that other options switch
            facts = [one for values in self.choices.options.values() for one in values.values()]
            apart = {word for one in facts for way in ("+unfused", "-unfused") for word in one.get(way, ())}
            return {*self.fact(key)} - apart == {*self._read(key, value)} - apart
        return bool(self.fact(key) == self._read(key, value))


RECORD_OF = {name: record for record, kind in RECORDS.items() for name in schema.fields_of(kind)[0]}
"""Record of every fact that has one."""
TEXTS = ("name", "title", "code_base", "source")
FACTS = (*TEXTS, *RECORD_OF, "terms")
"""Every fact, as files name it."""
OTHER_KEYS = ("options", "version", "versions", "defaults", "recipes")
"""What files say in addition to facts (``trainer_options``)."""


def known_as(text: str) -> str:
    """A trainer as it is written, with its own name in place of one of ``trainer_aliases.yaml`` or of another spelling."""
    name, *_ = spelled(text)
    if name in library.names("trainers") or "," in name:  # two names are not one that is spelt otherwise
        return text
    others = library.read_yaml(library.profiles_directory() / "trainer_aliases.yaml")
    plain = {re.sub(r"\W|_", "", one.lower()): one for one in library.names("trainers")}
    plain |= {re.sub(r"\W|_", "", one.lower()): trainer for one, trainer in others.items()}
    return text.replace(name, plain.get(re.sub(r"\W|_", "", name.lower()), name), 1)


def load_trainer(text: str) -> Trainer:
    """A trainer of the library by name, or of a user's own file by path: ``NAME[@VERSION][+OPTION=VALUE...]``.

    Raises PlannerError."""
    return _read(text) if library.is_file_name(spelled(text)[0]) else _of_library(text)


def _read(text: str) -> Trainer:
    path = library.find("trainers", spelled(text)[0])
    return trainer_from_dict({**_data(text), "name": path.stem}, where=str(path), written=text)


@functools.cache
def _of_library(text: str) -> Trainer:
    """Read once: what runs a mixed plan is asked of hundreds of layouts, and reading takes 5 ms each."""
    return _read(text)


def changed_trainer(data: Mapping[str, Any], *, where: str) -> Trainer:
    """The trainer that ``extends`` names with other facts (``changes_of``), under its own name. Raises PlannerError."""
    whole, base = _with_base(data, where), spelled(str(data.get("extends")))[0]
    return trainer_from_dict({**whole, "name": Path(base).stem}, where=where)


def _data(text: str, depth: int = 0) -> dict[str, Any]:
    """What the file of a trainer says, at a version and with options."""
    name, version, options = spelled(text)
    path = library.find("trainers", name)
    data = _with_base(_shaped(library.read_yaml(path), str(path)), str(path), depth)
    if "versions" in data:
        data["version"] = version or newest_of(schema.mapping(data["versions"], f"{path}: versions"))
    at_version = _shaped(facts_at(data, version, f"trainer {path.stem}"), f"{path}: versions")
    data = merge_changes(data, at_version)
    known = options_of(data, str(path))
    for option, value in options.items():
        require_value(option, value, known, f"trainer {path.stem}")
        data = merge_changes(data, _shaped(known[option][value], f"{path}: option {option}"))
    return data


def _with_base(data: Mapping[str, Any], where: str, depth: int = 0) -> dict[str, Any]:
    """Facts over those of the trainer that ``extends`` names (an older or derived generation, or a version).

    A file with a code base of its own has versions and recipes of its own."""
    own = {key: value for key, value in data.items() if key != "extends"}
    if "extends" not in data:
        return own
    base = data["extends"]
    if not isinstance(base, str) or depth > 3:
        raise PlannerError(f"{where}: extends is {shown(base)}; it must name a trainer, at most four levels deep")
    dropped = ("version", "versions", "recipes") if "code_base" in own else ("versions",)
    return merged({key: value for key, value in _data(base, depth + 1).items() if key not in dropped}, own)


def changes_of(trainer: Trainer, before: Trainer) -> dict[str, Any]:
    """What a trainer has otherwise than another, as plain data that ``changed_trainer`` reads."""
    now, then = to_dict(trainer), to_dict(before)
    return {key: value for key, value in now.items() if value != then[key]}


def to_dict(trainer: Trainer) -> dict[str, Any]:
    """Every fact as plain data, as a file holds it."""
    data = {key: getattr(trainer, key) for key in TEXTS}
    for name, kind in RECORDS.items():
        data |= schema.plain(getattr(trainer, name), kind)
    return data | {"terms": {one.folder(): schema.plain(one) for one in trainer.terms}}


def merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Facts over those of a base; mappings of MERGED, options and defaults key by key, sets by ``+name`` and ``-name`` too."""
    data = {**base, **{key: value for key, value in own.items() if key[0] not in "+-" or key[1:] not in base}}
    for name in {key[1:] for key in own if key[0] in "+-" and key[1:] in base}:
        data[name] = sorted(signed(data[name], own, name))
    for key in (*MERGED, "options", "defaults"):
        if isinstance(base.get(key), Mapping) and isinstance(own.get(key), Mapping):
            data[key] = {**base[key], **own[key]}
    return data


def merge_changes(*changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes as ``Trainer.replace`` takes them, later ones over earlier ones; fields of a term one by one."""
    data: dict[str, Any] = {}
    for one in changes:
        terms = {**(data.get("terms") or {})}
        for folder, values in one.get("terms", {}).items():
            terms[folder] = {**terms.get(folder, {}), **values}
        data = merged(data, one) | ({"terms": terms} if terms else {})
    return data


def trainer_from_dict(data: Mapping[str, Any], *, where: str, written: str = "") -> Trainer:
    """A trainer from plain data; every fact must be there, known and of its kind. Raises PlannerError."""
    data = schema.check_keys(data, (*FACTS, *OTHER_KEYS), where, required=[key for key in FACTS if key != "terms"])
    texts = {key: schema.value_of(schema.fields_of(Trainer)[0][key], data[key], where, key) for key in TEXTS}
    records: dict[str, Any] = {
        name: schema.read(kind, {key: data[key] for key in schema.fields_of(kind)[0]}, where)
        for name, kind in RECORDS.items()
    }
    _require_habits(records["legal"], records["stored"], where)
    terms = _terms(data.get("terms", {}), where)
    for name, values in options_of(data, where).items():
        for value, facts in values.items():
            _require_facts(facts, records, {one.folder() for one in terms}, f"{where}: option {name} {value}")
    return Trainer(**texts, **records, terms=terms, choices=choices_of(data, where, written))


def _require_habits(legal: Legal, stored: Stored, where: str) -> None:
    """Raise PlannerError where a job of fine-tuning is by default what the trainer cannot run."""
    own = legal.fine_tuning
    for name, value, known in (
        ("frozen_weights", own.frozen_weights, legal.frozen_weights), ("optimizer", own.optimizer, tuple(stored.optimizer_bytes)),
    ):  # fmt: skip
        if value and value not in known:
            raise PlannerError(f"{where}: fine_tuning: {name} is {shown(value)}; it must be of {', '.join(known)}")


def _require_facts(facts: Mapping[str, Any], records: Mapping[str, Any], terms: set[str], where: str) -> None:
    """Raise PlannerError for what an option would change and the trainer does not have, or not as such a value."""
    for key, value in _shaped(facts, where).items():
        if key == "terms":
            schema.check_keys(value, terms, where)
            for folder, fields in value.items():
                kinds = schema.fields_of(terms_class(folder))[0]
                for field, one in schema.check_keys(fields, kinds, f"{where}: terms of {folder}").items():
                    schema.value_of(kinds[field], one, where, field)
            continue
        name = key.lstrip("+-") if key not in RECORD_OF else key
        schema.check_keys({name: value}, RECORD_OF, where)
        if key == name and key not in MERGED:
            schema.value_of(schema.fields_of(RECORDS[RECORD_OF[key]])[0][key], value, where, key)
        elif key != name and not isinstance(getattr(records[RECORD_OF[name]], name), frozenset | tuple):
            raise PlannerError(f"{where}: {key} is of a set, and {name} is none; give it whole")


def _shaped(data: Mapping[Any, Any], where: str) -> Mapping[str, Any]:
    """Facts, if each can be laid over another: names, lists of what a set gets or loses, parts of mappings. Raises PlannerError."""
    for key, value in data.items():
        if not isinstance(key, str) or not key:
            raise PlannerError(f"{where}: unknown key {shown(key)}; it must be a name")
        if key[0] in "+-" and not (isinstance(value, list) and all(isinstance(one, (str, int, float)) for one in value)):
            raise PlannerError(f"{where}: {key} is {shown(value)}; it must be a list of names")
        if key in (*MERGED, "terms"):
            schema.mapping(value, f"{where}: {key}")
    for folder, values in data.get("terms", {}).items():
        schema.mapping(values, f"{where}: terms of {shown(folder)}")
    return data


def _terms(data: object, where: str) -> tuple[Any, ...]:
    """The terms of the named folders. Raises PlannerError."""
    found = []
    for folder, values in schema.mapping(data, f"{where}: terms").items():
        if folder not in term_folders():
            nearest = nearest_first(str(folder), term_folders())[0]
            raise PlannerError(f"{where}: terms of {shown(folder)} are not known; nearest: {nearest}")
        found.append(schema.read(terms_class(folder), values, f"{where}: terms of {folder}"))
    return tuple(found)


def terms_class(folder: str) -> Any:
    """The class of the terms of one folder."""
    return importlib.import_module(f"planner.trainers.{folder}.terms").Terms


@functools.cache
def term_folders() -> tuple[str, ...]:
    """Folders of ``planner.trainers`` that hold terms."""
    folder = Path(__file__).resolve().parent / "trainers"
    return tuple(sorted(path.parent.name for path in folder.glob("*/terms.py")))
