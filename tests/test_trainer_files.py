"""Files of trainers: those of the library, what extends them, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sentences import sentence

from planner import library
from planner.errors import shown
from planner.trainer import OTHER_KEYS, load_trainer, merged, trainer_from_dict


def trainer_data(name: str = "megatron") -> dict[str, Any]:
    """A whole trainer file, bases joined."""
    data: dict[str, Any] = {}
    path: Path | None = library.find("trainers", name)
    while path is not None:
        found = library.read_yaml(path)
        base = found.pop("extends", None)
        data = merged(found, data)
        path = library.find("trainers", base) if base else None
    return {**data, "name": name}


@pytest.mark.parametrize("name", library.names("trainers"))
def test_trainer_of_the_library(name: str) -> None:
    trainer = load_trainer(name)
    assert trainer == trainer_from_dict(trainer_data(name), where=name)
    assert trainer.title and trainer.source
    assert set(trainer.legal.zero_with_pp) <= set(trainer.legal.zero)
    assert set(trainer.optimizers) <= set(trainer.stored.optimizer_bytes)
    assert ("selective" in trainer.legal.recompute) == bool(trainer.legal.recompute_modules)
    assert trainer.legal.pp == bool(trainer.legal.schedules)
    assert trainer.replace(tp=False).legal.tp is False


def test_trainer_extends(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: megatron\nhost_time: 3 us\n")
    mine = load_trainer(str(tmp_path / "mine.yaml"))
    assert mine == load_trainer("megatron").replace(name="mine", host_time=3e-6)
    loop = tmp_path / "loop.yaml"
    loop.write_text(f"extends: {loop}\n")
    assert sentence(load_trainer, str(loop)) == (
        f"{loop}: extends is {shown(str(loop))}; it must name a trainer, at most four levels deep"
    )
    loop.write_text("extends: [megatron]\n")
    assert "extends is ['megatron']; it must name a trainer" in sentence(load_trainer, str(loop))
    loop.write_text("extends: megatorn\n")
    assert sentence(load_trainer, str(loop)).startswith("unknown trainer 'megatorn'; known, nearest first: megatron")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host_tme": "3 us"}, "t: unknown key 'host_tme'; nearest: host_time"),
        ({"tp": 1}, "t: tp is 1; it must be true or false"),
        ({"title": [3]}, "t: title is [3]; it must be a text"),
        ({"attention": "fast"}, "t: attention is 'fast'; it must be one of flash, unfused"),
        ({"schedules": "1f1b"}, "t: schedules is '1f1b'; it must be a list"),
        ({"schedules": [1]}, "t: schedules is [1]; it must be a list of gpipe, 1f1b, "),
        ({"schedules": ["2f2b"]}, "t: schedules is ['2f2b']; it must be a list of gpipe, 1f1b, "),
        ({"overlap": ["tps"]}, "t: overlap is ['tps']; it must be a list of tp_backward, tp, "),
        ({"zero": [True]}, "t: zero is [True]; it must be a list of zero levels"),
        ({"zero": [4]}, "t: zero is [4]; it must be a list of zero levels from 0 to 3"),
        (
            {"optimizer_bytes": {"adam": "12"}},
            "t: optimizer_bytes adam is '12'; it must be a number that is not negative",
        ),
        ({"terms": {"nanotorn": {}}}, "t: terms of 'nanotorn' are not known; nearest: nanotron"),
        ({"terms": {"nanotron": {}}}, "t: terms of nanotron: missing keys 'fresh_gradient_bytes', "),
        ({"host_time": 7}, "t: host_time: '7' has no unit; write it like 2.5 us"),
        ({"passes": {"norm": -1}}, "t: passes norm is -1; it must be a number above 0"),
        ({"passes": {"nrm": 2}}, "t: passes: unknown key 'nrm'; nearest: norm"),
        ({"sequence_divisor": 1.5}, "t: sequence_divisor is 1.5; it must be a whole number"),
        ({"bucket_parameters": 0}, "t: bucket_parameters is 0; it must be a number above 0"),
        ({"memory_error": 0.0}, "t: memory_error is 0.0; it must be a number above 0"),
    ],
)
def test_trainer_refuses(change: dict[str, Any], message: str) -> None:
    assert sentence(trainer_from_dict, trainer_data() | change, where="t").startswith(message)


def test_trainer_needs_every_key() -> None:
    data = trainer_data()
    for key in data.keys() - {"terms", *OTHER_KEYS}:
        cut = {name: value for name, value in data.items() if name != key}
        assert sentence(trainer_from_dict, cut, where="t") == f"t: missing key '{key}'"
    assert sentence(trainer_from_dict, 3, where="t") == "t: expected a mapping of keys to values, found int"
