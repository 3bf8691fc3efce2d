"""Floors 0 to 2: errors, library, layout, workload; any data at all. Every sentence that a user may see."""

from __future__ import annotations

import datetime
import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from sentences import HUGE, sentence
from test_trainer_files import trainer_data

from planner import library, units
from planner.errors import PlannerError, UnknownNameError, nearest_first, shown
from planner.layout import (
    BOOLEANS,
    FIELDS,
    LARGEST,
    MAY_BE_ZERO,
    NAMES,
    Layout,
    Module,
    Schedule,
    module_mask,
    module_names,
)
from planner.model import load_model
from planner.trainer import Trainer, trainer_from_dict
from planner.workload import Workload, default_global_batch_size

LLAMA = load_model("llama-3-8b")


# ------------------------------------------------------------------------------------------------ errors


def test_nearest_first() -> None:
    assert nearest_first("h100", ["mi300x", "a100-sxm-80gb", "h100-sxm"])[0] == "h100-sxm"
    assert nearest_first("X", ["b", "a"]) == ["a", "b"]
    assert str(UnknownNameError("trainer", "megatrn", ["fsdp", "megatron"])) == (
        "unknown trainer 'megatrn'; known, nearest first: megatron, fsdp"
    )
    assert isinstance(UnknownNameError("a", "b", []), PlannerError)


def test_shown() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert (shown("a"), shown(1.5), shown(loop)) == ("'a'", "1.5", "[[...]]")
    assert shown("x" * 100) == "'" + "x" * 56 + "..."
    assert shown([HUGE]) == "too large to show"


# ------------------------------------------------------------------------------------------------ library


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: [1, 2\nc: 3\n", "{path} line 3: did not find expected ',' or ']'"),
        (b"a: 1\n b: 2\n", "{path} line 2: mapping values are not allowed in this context"),
        (b'name: x\ntext: "cut off', "{path} line 2: found unexpected end of stream"),
        (b"- 1\n- 2\n", "{path}: expected a mapping of keys to values, found list"),
        (b"", "{path}: expected a mapping of keys to values, found nothing"),
        (b"just text", "{path}: expected a mapping of keys to values, found str"),
        (b"tp: 2\npp: 1\ntp: 4\n", "{path} line 3: 'tp' is given twice"),
        (b"day: 2024-13-45", "{path}: not valid YAML (month must be in 1..12)"),
        (b"a: \x00", "{path}: not YAML"),
    ],
)
def test_broken_yaml_says_where(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    assert sentence(library.read_yaml, path) == message.format(path=path)


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\xff\xfe", bytes(range(256)), b"a: !!int ''", b"!!timestamp no",
                                     b"a: !!bool x", b"a: " + b"9" * 5000, b"a: " + b"[" * 5000])  # fmt: skip
def test_no_file_is_a_traceback(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "odd.yaml"
    path.write_bytes(content)
    assert sentence(library.read_yaml, path).startswith(str(path))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert sentence(library.read_yaml, tmp_path / "no.yaml").startswith(f"{tmp_path / 'no.yaml'}: cannot be read (")
    assert sentence(library.find, "trainers", "mine.yaml") == "no such file: mine.yaml"
    assert sentence(library.find, "hardware", "h100-sxn").startswith(
        "unknown hardware 'h100-sxn'; known, nearest first: h100-sxm, "
    )
    assert sentence(library.find, "trainers", "x" * 5000).startswith("unknown trainer")
    assert "cannot be read (File name too long)" in sentence(library.find, "trainers", f"./{'x' * 5000}")
    assert library.find("trainers", "megatron").is_file()
    assert set(library.names("trainers")) >= {"megatron", "torchtitan", "deepspeed"}


@given(st.dictionaries(st.text(max_size=8), st.one_of(st.integers(), st.text(max_size=8), st.booleans()), max_size=4))
def test_dump_reads_back(data: dict[str, Any]) -> None:
    assert yaml.safe_load(library.dump_yaml(data)) == data


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException
) -> None:
    path = tmp_path / "plan.yaml"
    library.write_whole(path, "old")

    def fail(*_: object) -> None:
        raise stop

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises((KeyboardInterrupt, PlannerError)) as found:
            library.write_whole(path, "new")
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["plan.yaml"]
    if isinstance(stop, OSError):
        assert str(found.value) == f"{path}: cannot be written (No space left on device)"


def test_write_whole_refuses(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "plan.yaml"
    assert sentence(library.write_whole, missing, "x") == f"{missing}: cannot be written (No such file or directory)"
    assert sentence(library.write_whole, tmp_path / "half.yaml", "\ud800").endswith("(surrogates not allowed)")
    assert "cannot be written" in sentence(library.write_whole, tmp_path / ("y" * 300), "x")
    assert list(tmp_path.iterdir()) == []
    library.write_whole(tmp_path / "a.yaml", "x")
    plain = tmp_path / "plain"
    plain.touch()
    assert (tmp_path / "a.yaml").stat().st_mode == plain.stat().st_mode  # readable by whom the user's umask allows


def test_files_of_the_package_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of the library are; whoever reads one may change what it gets."""
    path = Path(library.__file__).parent / "trainers" / "megatron_bridge" / "recipes.yaml"
    first = library.read_yaml(path)
    monkeypatch.setattr(library, "parse_yaml", lambda *_, **__: pytest.fail("parsed again"))
    library.read_yaml(path)["recipes"].clear()
    assert library.read_yaml(path) == first and first["recipes"]


# ------------------------------------------------------------------------------------------------ layout


def one_field(name: str, largest: int = LARGEST) -> st.SearchStrategy[int]:
    """Any legal value of a field of Layout."""
    if name in NAMES:
        return st.sampled_from(sorted(NAMES[name]))
    if name == "recompute_modules":
        return st.integers(0, 2 * max(Module) - 1)
    if name in BOOLEANS:
        return st.integers(0, 1)
    most = {"zero": 3, "offload_optimizer": 100}.get(name, largest)
    return st.integers(0 if name in MAY_BE_ZERO else 1, most)


def some_layouts(largest: int) -> st.SearchStrategy[Layout]:
    """Any legal layout, no value above ``largest``."""
    fields = {name: one_field(name, largest) for name in FIELDS}
    return st.fixed_dictionaries(fields).map(lambda values: Layout(**values))


layouts = some_layouts(LARGEST)


@given(layouts)
def test_layout_round_trip(layout: Layout) -> None:
    data = layout.to_dict()
    assert Layout.from_dict(data) == layout
    assert Layout.from_dict(yaml.safe_load(library.dump_yaml(data))) == layout


@given(st.lists(some_layouts(4096), min_size=1, max_size=5), st.integers(0, 4))
def test_columns_are_rows(many: list[Layout], number: int) -> None:
    stacked = Layout.stack(many)
    number %= len(many)
    assert len(stacked) == len(many)
    assert stacked.row(number) == many[number]
    assert stacked.take(np.array([number])).row(0) == many[number]
    for name in ("num_gpus", "edp", "shard", "global_batch_size"):
        assert int(np.asarray(getattr(stacked, name))[number]) == int(np.asarray(getattr(many[number], name)))


def test_layout_names() -> None:
    assert module_names(module_mask("mlp, norm,")) == ["norm", "mlp"]
    assert module_mask(["core_attention", "moe"]) == Module.CORE_ATTENTION | Module.MOE
    assert Layout.from_dict({"schedule": "zbv"}).schedule == Schedule.ZBV
    assert len(Layout()) == 1 and len(Layout(tp=np.array([1, 2, 4]))) == 3
    assert Layout(dp=8).replace(dp_shard=4).shard == 4 and Layout(dp=8).shard == 8


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"num_microbatch": 2}, "layout: unknown key 'num_microbatch'; nearest: num_microbatches"),
        ({"microbatch_size": 2}, "layout: unknown key 'microbatch_size'; nearest: micro_batch_size"),
        ({3: 2}, "layout: unknown key '3'; nearest: "),
        ({"tp": "2"}, "layout: tp is '2'; it must be a whole number from 1 to 16777216"),
        ({"tp": 2.0}, "layout: tp is 2.0; it must be a whole number from 1 to 16777216"),
        ({"tp": True}, "layout: tp is True; it must be a whole number from 1 to 16777216"),
        ({"pp": 0}, "layout: pp is 0; it must be a whole number from 1 to 16777216"),
        ({"dp": LARGEST + 1}, "layout: dp is 16777217; it must be a whole number from 1 to 16777216"),
        ({"cp": HUGE}, "layout: cp is too large to show; it must be a whole number from 1 to 16777216"),
        ({"zero": 4}, "layout: zero is 4; it must be a whole number from 0 to 3"),
        ({"offload_optimizer": 101}, "layout: offload_optimizer is 101; it must be a whole number from 0 to 100"),
        ({"sequence_parallel": 1}, "layout: sequence_parallel is 1; it must be true or false"),
        ({"schedule": "2f2b"}, "layout: schedule is '2f2b'; it must be one of gpipe, 1f1b, interleaved_1f1b, zb_h1, zbv"),
        ({"recompute": 2}, "layout: recompute is 2; it must be one of none, selective, full"),
        ({"cp_method": ["ring"]}, "layout: cp_method is ['ring']; it must be one of ring, a2a, allgather"),
        ({"recompute_modules": ["nrm"]}, "layout: recompute_modules: unknown module 'nrm'; known: core_attention, "
         "norm, mlp_activation, mlp, moe, mla_up_projection, shared_experts"),
        ({"recompute_modules": 3}, "layout: recompute_modules must be a list of core_attention, norm, "
         "mlp_activation, mlp, moe, mla_up_projection, shared_experts"),
        ([1], "layout: expected a mapping of keys to values, found list"),
    ],
)  # fmt: skip
def test_layout_refuses(data: Any, message: str) -> None:
    assert sentence(Layout.from_dict, data).startswith(message)


# ------------------------------------------------------------------------------------------------ workload


def test_workload_round_trip() -> None:
    job = Workload(model=LLAMA, sequence_length=8192, global_batch_size=512, precision="fp8", lora_rank=8)
    assert Workload.from_dict(job.to_dict()) == job
    assert job.tokens == 8192 * 512
    assert job.replace(optimizer="sgd").optimizer == "sgd"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequence_length": 0}, "sequence_length is 0; it must be a whole number from 1 to 134217728"),
        ({"sequence_length": True}, "sequence_length is True; it must be a whole number from 1 to 134217728"),
        ({"global_batch_size": 2.5}, "global_batch_size is 2.5; it must be a whole number from 1 to 16777216"),
        ({"global_batch_size": HUGE}, "global_batch_size is too large to show; it must be a whole number"),
        ({"precision": "bf61"}, "unknown precision 'bf61'; known, nearest first: bf16, "),
        ({"precision": ["bf16"]}, "precision is ['bf16']; it must be a text"),
        ({"optimizer": "adamw"}, "unknown optimizer 'adamw'; known, nearest first: adam, "),
        ({"optimizer": None}, "optimizer is None; it must be a text"),
        ({"lora_rank": -1}, "lora_rank is -1; it must be a whole number from 0 to 65536"),
        ({"expert_imbalance": 0.5}, "expert_imbalance is 0.5; it must be a number from 1 to 1024"),
        ({"expert_imbalance": float("nan")}, "expert_imbalance is nan; it must be a number from 1 to 1024"),
        ({"expert_imbalance": True}, "expert_imbalance is True; it must be a number from 1 to 1024"),
        ({"sequence_len": 1}, "unknown key 'sequence_len'; nearest: sequence_length"),
        ({"model": "llama-3-8b"}, "model: expected a mapping of keys to values, found str"),
        ({"model": {"name": "x"}}, "model: missing keys 'num_layers', 'hidden_size'"),
    ],
)
def test_workload_refuses(change: dict[str, Any], message: str) -> None:
    data = Workload(model=LLAMA, sequence_length=8192, global_batch_size=512).to_dict() | change
    assert sentence(Workload.from_dict, data).startswith(f"workload: {message}")


def test_workload_needs_its_keys() -> None:
    data = Workload(model=LLAMA, sequence_length=8192, global_batch_size=512).to_dict()
    for key in ("model", "sequence_length", "global_batch_size"):
        cut = {name: value for name, value in data.items() if name != key}
        assert sentence(Workload.from_dict, cut, where="a.yaml") == f"a.yaml: missing key '{key}'"
    assert sentence(Workload.from_dict, None) == "workload: expected a mapping of keys to values, found nothing"


@pytest.mark.parametrize(
    ("parameters", "length", "gpus", "batch"),
    [
        (1e9, 8192, 8, 128),  # 1M tokens
        (8e9, 8192, 8, 512),  # 4M tokens
        (405e9, 8192, 16384, 2048),  # 16M tokens
        (8e9, 131072, 256, 256),  # not fewer sequences than GPUs
        (8e9, 3000, 1, 1024),  # a power of two below 4M tokens
        (8e9, 2**25, 3, 3),
        (8e9, 8192, 24, 384),  # 3 x 2^7: divides by 24
    ],
)
def test_default_global_batch_size(parameters: float, length: int, gpus: int, batch: int) -> None:
    assert default_global_batch_size(parameters, length, gpus) == batch


@given(st.floats(1e6, 1e13), st.integers(1, 2**20), st.integers(1, 4096))
def test_default_global_batch_size_divides_by_the_gpus(parameters: float, length: int, gpus: int) -> None:
    batch = default_global_batch_size(parameters, length, gpus)
    assert batch % gpus == 0
    assert batch == gpus or batch * length <= 2**24 or batch < 2 * gpus


# ------------------------------------------------------------------------------------------------ any data at all

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 2**30), st.builds(lambda: HUGE), st.floats(), st.text(max_size=12),
    st.sampled_from(["adam", "bf16", "1f1b", "ring", "3 us", "none", "mlp,norm"]), st.just(datetime.date(2026, 1, 1)),
)  # fmt: skip
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars.filter(lambda x: x == x), inner, max_size=3),
    max_leaves=8,
)


def some_of(data: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Data whose keys are mostly right, some values replaced by anything; or anything at all."""
    changed = st.dictionaries(st.sampled_from(sorted(data)) | st.text(max_size=6), anything, max_size=3)
    removed = st.sets(st.sampled_from(sorted(data)), max_size=1)
    whole = st.tuples(changed, removed).map(
        lambda pair: {key: value for key, value in (data | pair[0]).items() if key not in pair[1]}
    )
    return whole | anything


MEGATRON = trainer_data()
JOB = Workload(model=LLAMA, sequence_length=8192, global_batch_size=512).to_dict()


@settings(max_examples=400, deadline=None)
@given(some_of(Layout().to_dict()), some_of(JOB), some_of(MEGATRON), anything, st.sampled_from(sorted(units._UNITS)))
def test_only_planner_errors_come_out(layout: Any, workload: Any, trainer: Any, text: Any, dimension: str) -> None:
    for read in (
        lambda: Layout.from_dict(layout),
        lambda: Workload.from_dict(workload),
        lambda: trainer_from_dict(trainer, where="fuzz"),
        lambda: units.parse(text, dimension),
    ):
        try:
            result = read()
        except PlannerError as error:
            assert str(error).strip()
        else:
            assert isinstance(result, (Layout, Workload, Trainer, float))


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="0123456789.eE+- GMKTkiBbFLOPs/hUSDnu", max_size=14), st.sampled_from(sorted(units._UNITS)))
def test_parse_of_near_misses(text: str, dimension: str) -> None:
    try:
        value = units.parse(text, dimension)
    except PlannerError:
        return
    assert np.isfinite(value) and value >= 0
