"""What stands at the end of a path: pipes, devices, links, files too long, nested too deep, cut off by Ctrl-C or a full disk."""

from __future__ import annotations

import ast
import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile import numbers, put
from sentences import sentence

from planner import library
from planner.api import Plan, estimate
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.model import load_model
from planner.plan_file import load_plan, plan_from_dict
from planner.questions.calibrate.sources import read_measured
from planner.runs import read_runs
from planner.trainer import load_trainer
from planner.trainers import reading
from planner.trainers.logs import Given, read_log

ROOT = Path(__file__).resolve().parent.parent
READERS: dict[str, Any] = {
    "model": (".yaml", lambda path: load_model(str(path))), "config": (".json", lambda path: load_model(str(path))),
    "plan": (".yaml", load_plan), "layout": (".yaml", lambda path: estimate(path, model="llama-8b", gpus=8)),
    "hardware": (".yaml", lambda path: load_hardware(str(path))), "trainer": (".yaml", lambda path: load_trainer(str(path))),
    "runs": (".yaml", lambda path: read_runs([path])), "log": (".log", read_log),
    "measured": (".yaml", lambda path: read_measured([path], "h100-sxm", given=Given())),
    "import sh": (".sh", reading.read), "import yaml": (".yaml", reading.read), "import json": (".json", reading.read),
    "import toml": (".toml", reading.read), "import py": (".py", reading.read),
}  # fmt: skip
"""Every reader of a user's file, and the ending that it takes."""
CUT = 10_000
SMALL = ("--model", "llama-8b", "--gpus", "8")


def nested(depth: int) -> Iterator[tuple[str, str]]:
    """Texts nested deeper than any stack."""
    many = depth // 3
    yield ".yaml", "a: " + "[" * depth + "]" * depth
    yield ".yaml", "a: " + "{a: " * depth + "}" * depth
    yield ".yaml", "- " * min(depth, 50_000) + "a"
    yield ".yaml", "".join(f"{' ' * one}a:\n" for one in range(min(depth // 5, 2_000)))
    yield ".json", '{"a": ' + "[" * depth + "]" * depth + "}"
    yield ".json", '{"a": ' * depth + "1" + "}" * depth
    yield ".toml", "[parallelism]\na = " + "[" * depth + "]" * depth
    yield ".toml", "[" + ".".join("a" * many) + "]\nparallelism = 1"
    yield ".py", "parallelism = " + "(" * depth + ")" * depth
    yield ".py", "parallelism = ParallelismConfig(tensor_parallel_degree=" + "-" * depth + "1)"
    yield ".py", "parallelism = " + "a." * depth + "a"
    yield ".sh", "torchrun --x " + "$(" * depth + ")" * depth
    yield ".sh", "--a " + "${a:-" * depth + "}" * depth


@pytest.mark.parametrize("depth", [500, 30_000, pytest.param(400_000, marks=pytest.mark.proof)])
@pytest.mark.parametrize("name", READERS)
def test_no_reader_falls_into_depth(name: str, depth: int, tmp_path: Path) -> None:
    """Each is one sentence; the C parser of YAML would end the interpreter, at some ten thousand levels."""
    ending, read = READERS[name]
    for number, (kind, text) in enumerate(nested(depth)):
        if kind == ending:
            path = tmp_path / f"{number}{ending}"
            path.write_text(text)
            assert len(sentence(read, path)) < 1000


@pytest.mark.parametrize("name", READERS)
def test_every_reader_takes_regular_files_alone(name: str, tmp_path: Path) -> None:
    ending, read = READERS[name]
    for kind, made in (("pipe", "fifo"), ("device", "zero"), ("folder", "folder"), ("link", "loop"), ("long", "long")):
        path = tmp_path / f"{made}{ending}"
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(path)
        else:
            with path.open("wb") as stream:
                stream.truncate((512 << 20) + 1)
        said = sentence(read, path)
        assert len(said) < 600 and (kind in said or kind in ("folder", "link", "long")), said
        if kind == "long":
            assert "larger than the" in said or "MiB" in said


def test_sixteen_mebibytes_are_read_and_a_byte_more_is_not(tmp_path: Path) -> None:
    path = tmp_path / "notes.yaml"
    whole = b"a: 1\n".ljust(16 << 20, b"#")
    path.write_bytes(whole)
    assert library.read_yaml(path) == {"a": 1}
    path.write_bytes(whole + b"#")
    assert "larger than the 16 MiB" in sentence(library.read_yaml, path)


def test_a_mark_of_byte_order_and_windows_lines_are_read(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 2, "vocab_size": 32000,
              "intermediate_size": 11008, "max_position_embeddings": 4096}  # fmt: skip
    (tmp_path / "config.json").write_bytes(
        b"\xef\xbb\xbf" + json.dumps(config, indent=1).replace("\n", "\r\n").encode()
    )
    assert load_model(str(tmp_path)).num_layers == 2
    data = library.dump_yaml({"extends": "h100-sxm"}).replace("\n", "\r\n")
    (tmp_path / "mine.yaml").write_bytes(b"\xef\xbb\xbf" + data.encode())
    assert load_hardware(str(tmp_path / "mine.yaml")).device == load_hardware("h100-sxm").device


def test_a_key_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "hidden_size": 1, "hidden_size": 2}')
    assert sentence(load_model, str(path)).endswith("the key 'hidden_size' is given twice)")


def test_large_integers_are_a_sentence_in_every_number() -> None:
    """Above 2**64 numpy has no type for them."""
    whole = estimate(model="llama-8b", gpus=8).file.to_dict()
    for place, _ in numbers(whole):
        for value in (2**64, -(2**70), 10**400):
            assert len(sentence(plan_from_dict, put(whole, place, value))) < 400, place


def test_values_of_yaml_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "MOST_VALUES", CUT)
    path = tmp_path / "many.yaml"
    path.write_text("a: [" + "1," * 2 * CUT + "]")
    assert "more than 10000 keys and values" in sentence(library.read_yaml, path)


# ------------------------------------------------------------------------------------------------ writing


def test_links_are_followed_and_devices_are_written_into(tmp_path: Path) -> None:
    old, link, inner = tmp_path / "old.yaml", tmp_path / "link.yaml", tmp_path / "inner"
    inner.mkdir()
    old.write_text("before")
    old.chmod(0o600)
    link.symlink_to("old.yaml")
    library.write_whole(link, "after")
    assert link.is_symlink() and old.read_text() == "after" and stat.S_IMODE(old.stat().st_mode) == 0o600
    (tmp_path / "new.yaml").symlink_to(inner / "made.yaml")
    library.write_whole(tmp_path / "new.yaml", "x")
    assert (inner / "made.yaml").read_text() == "x"
    library.write_whole(Path("/dev/null"), "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert (
        sentence(library.write_whole, Path("/dev/full"), "x")
        == "/dev/full: cannot be written (No space left on device)"
    )
    (tmp_path / "null").symlink_to("/dev/null")
    library.write_whole(tmp_path / "null", "x")
    assert (tmp_path / "null").is_symlink() and stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert (
        sentence(library.write_whole, inner, "x") == f"{inner}: cannot be written (it is a folder)" and inner.is_dir()
    )
    (tmp_path / "loop").symlink_to("loop")
    assert "cannot be written (Too many levels" in sentence(library.write_whole, tmp_path / "loop", "x")
    assert sentence(library.write_whole, Path("a\0b"), "x").endswith("cannot be written (embedded null byte)")
    assert sorted(one.name for one in tmp_path.iterdir() if one.name.startswith(".")) == []


def test_a_pipe_and_standard_output_are_written_into(tmp_path: Path) -> None:
    code = "from planner.library import write_whole; from pathlib import Path; print('a', flush=True); "
    code += "write_whole(Path('/dev/stdout'), 'b\\n'); print('c')"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert piped.stdout.split() == ["a", "b", "c"]
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with subprocess.Popen(["cat", str(fifo)], stdout=subprocess.PIPE, text=True) as reader:
        library.write_whole(fifo, "through")
        assert reader.communicate(timeout=60)[0] == "through" and stat.S_ISFIFO(fifo.stat().st_mode)


def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("old")
    true_open = Path.open

    def full(self: Path, *arguments: Any, **named: Any) -> Any:
        stream = true_open(self, *arguments, **named)
        if self.name.startswith(".plan.yaml"):
            stream.close()
            return true_open(Path("/dev/full"), "wb")
        return stream

    monkeypatch.setattr(Path, "open", full)
    assert sentence(library.write_whole, path, "new" * CUT) == f"{path}: cannot be written (No space left on device)"
    assert path.read_text() == "old" and [one.name for one in tmp_path.iterdir()] == ["plan.yaml"]


def test_an_export_follows_links_and_replaces_exports_alone(tmp_path: Path) -> None:
    plan = estimate(model="llama-8b", gpus=8)
    home, link = tmp_path / "home", tmp_path / "link"
    home.mkdir()
    (home / "thesis.tex").write_text("years")
    link.symlink_to("home")
    assert (
        "is no export" in sentence(plan.export, "megatron", link, force=True)
        and (home / "thesis.tex").read_text() == "years"
    )
    (home / "thesis.tex").unlink()
    plan.export("megatron", link)
    plan.export("megatron", link, force=True)
    assert link.is_symlink() and (home / "plan.yaml").is_file()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["home", "link"]
    assert "cannot be written" in sentence(plan.export, "megatron", Path("/dev/null/run"))
    assert "is a file" in sentence(plan.export, "megatron", Path("/dev/null"))


@pytest.mark.parametrize(
    "command",
    [
        ("--help",),
        *(pytest.param(one, marks=pytest.mark.proof) for one in (("models",), ("estimate", *SMALL, "--json"))),
    ],
)
def test_a_full_disk_behind_standard_output_is_one_sentence(command: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "cli.py", *command], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2 and done.stderr == "error: standard output: No space left on device\n"


# ------------------------------------------------------------------------------------------------ Ctrl-C

BEGIN = "import sys; from planner.commands.start import start; print('begun', file=sys.stderr, flush=True); start()"


def interrupted(words: list[str], after: float | None) -> tuple[int, str]:
    """Exit code and standard error of a command that gets Ctrl-C, as its terminal sends it to it and to what it started;
    None = it gets none."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None and process.stderr.readline() == "begun\n"
        time.sleep(after or 0.0)
        if after is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        said = process.stderr.read()
        return process.wait(timeout=120), said


def stop(words: list[str], after: float, output: Path, whole: Any) -> bool:
    """Interrupt a command; whether it was before its end. What it wrote is whole or not there."""
    code, said = interrupted([*words, str(output)], after)
    assert "Traceback" not in said and "KeyboardInterrupt" not in said and "Exception" not in said, (after, said)
    assert code in (0, 130, -signal.SIGINT), (after, code, said)  # the last: while Python ends; 130 in a shell too
    assert [one for one in output.parent.iterdir() if one.name.startswith(".")] == [], after
    if output.exists():
        whole(output)
    return code != 0


def exported(folder: Path) -> None:
    assert {"plan.yaml", "README.md", "run.sh", "arguments.sh"} <= {one.name for one in folder.iterdir()}


def test_an_interrupt_ends_with_130(tmp_path: Path) -> None:
    words = ["--model", "llama-70b", "--gpus", "64", "--output"]
    assert sum(stop(words, after, tmp_path / "plan.yaml", load_plan) for after in (0.05, 0.3)) >= 1


@pytest.mark.proof
def test_an_interrupt_at_any_moment(tmp_path: Path) -> None:
    """At random moments of a search, an export and a page with its worker processes."""
    rng = random.Random(5)
    plan: Plan = estimate(model="llama-8b", gpus=8)
    plan.save(tmp_path / "plan.yaml")
    given = str(tmp_path / "plan.yaml")
    search = ["--model", "llama-8b", "--gpus", "16", "--output"]
    export = ["export", given, "--to", "megatron", "--force", "--output"]
    page = ["report", given, "--output"]
    (tmp_path / "out").mkdir()
    hits = 0
    for words, name, whole in (
        (search, "a.yaml", load_plan), (export, "run", exported), (page, "a.html", lambda path: path.read_text()),
    ):  # fmt: skip
        begun = time.monotonic()
        assert interrupted([*words, str(tmp_path / "out" / name)], None)[0] == 0
        longest = time.monotonic() - begun
        hits += sum(stop(words, rng.uniform(0.0, longest), tmp_path / "out" / name, whole) for _ in range(3))
    assert hits >= 3


def test_an_interrupt_waits_for_the_end_of_a_write(tmp_path: Path) -> None:
    """And comes then. A suite that a shell started in the background ignores interrupts, so the handler is set here."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), library.uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        (tmp_path / "whole").write_text("x")
    assert (tmp_path / "whole").read_text() == "x"
    with pytest.raises(PlannerError):
        library.write_whole(tmp_path / "no" / "file", "x")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_script_is_read_without_pythons_warnings(recwarn: pytest.WarningsRecorder) -> None:
    """They would name a line of '<unknown>' on the user's terminal."""
    library.parse_python(r"pattern = '\d+'; rate = 1if True else 2", "train.py")
    assert not recwarn.list


@pytest.mark.parametrize(
    ("text", "older"),
    [
        ('x = f"{"..."}/{y}"  # don\'t\n', "x = f\"{'...'}/{y}\""),
        ("f'{d['k']!r:>{w}} {{'", "f'{d[\"k\"]!r:>{w}} {{'"),
        ("""x = "it's" + f"{", ".join(a)}\"""", """x = "it's" + f"{', '.join(a)}\""""),
        ('f"{f"{x["a"]}"}"', None),
        ('f"{d["it\'s"]}"', None),
        ('f"{"', None),
    ],
)
def test_quotes_of_a_newer_python(text: str, older: str | None) -> None:
    """Quotes inside the braces of an f-string that has the same, which Python has from 3.12 on."""
    if older is not None:
        assert ast.dump(library.parse_python(text, "train.py")) == ast.dump(ast.parse(older))
    elif sys.version_info < (3, 12) or text == 'f"{"':
        version = "{}.{}".format(*sys.version_info)
        with pytest.raises(PlannerError, match=f"train.py: line 1: not Python {version}, which reads it: "):
            library.parse_python(text, "train.py")
