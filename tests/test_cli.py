"""The command line as its users meet it: the main job, its JSON, wrong input, nothing fits, plan files."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from planner import library
from planner.commands import main as cli
from planner.plan_file import load_plan

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("--model", "llama-8b", "--gpus", "8", "--global-batch-size", "64")


def test_main_job_prints_assumptions_plans_reason_and_memory(run):
    result = run("--model", "llama-70b", "--gpus", "8")
    assert result.exit_code == 0
    for text in ("--hardware", "--sequence-length", "--global-batch-size", "--optimizer", "Best plans", "Why the first:",
                 "The runner-up", "optimizer states on the host", "driver context", "chance of running out"):  # fmt: skip
        assert text in result.output, text
    assert "\x1b[" not in result.output  # no colours when piped


def test_json_shows_what_the_table_shows_and_parts_sum_to_the_total(run):
    result = run(*SMALL, "--json", "--top", "3")
    document = json.loads(result.stdout)
    assert set(document) == {"workload", "cluster", "trainer", "assumptions", "plans", "searched", "advice", "faster"}
    assert [plan["rank"] for plan in document["plans"]] == [1, 2, 3]
    assert {"layouts", "legal", "fit", "seconds"} <= set(document["searched"])
    times = [plan["estimate"]["step_time_s"] for plan in document["plans"]]
    assert times == sorted(times)
    for plan in document["plans"]:
        one = plan["estimate"]
        assert sum(one["time_s"].values()) == pytest.approx(one["step_time_s"], rel=1e-12)
        assert sum(one["memory_gib"].values()) == pytest.approx(one["memory_peak_gib"], rel=1e-12)
        assert one["out_of_memory_probability"] <= 0.05
        assert one["tokens_per_second_per_gpu"] == pytest.approx(64 * 8192 / 8 / one["step_time_s"])
        low, high = one["step_time_range_s"]
        assert low < one["step_time_s"] < high and low < one["step_time_median_s"] < high
        first = one["first_runs_s"]
        assert first == sorted(first) and first[1] > one["step_time_s"] and "own run" in one["first_runs_basis"]
        assert plan["why"]
    table = run(*SMALL, "--top", "3").output
    assert "Half of the first runs of users, not yet tuned, take" in " ".join(table.split())
    assert f"{document['plans'][0]['estimate']['tokens_per_second_per_gpu']:,.0f}" in table


def test_plan_file_loads_back_equal_and_prices_the_same(run, tmp_path):
    path = tmp_path / "plan.yaml"
    result = run(*SMALL, "--output", str(path), "--json")
    assert result.exit_code == 0
    plan = load_plan(path)
    again = tmp_path / "again.yaml"
    plan.save(again)
    assert load_plan(again) == plan
    best = json.loads(result.stdout)["plans"][0]
    assert plan.layout.to_dict() == best["layout"]
    priced = json.loads(run("estimate", str(path), "--json").stdout)
    assert priced["layout"] == best["layout"]
    assert priced["estimate"]["step_time_s"] == pytest.approx(best["estimate"]["step_time_s"], rel=1e-9)
    assert priced["estimate"]["memory_gib"] == pytest.approx(best["estimate"]["memory_gib"], rel=1e-9)


def test_estimate_prices_flags_and_files(run, tmp_path):
    layout = tmp_path / "layout.yaml"
    layout.write_text("tp: 2\nmicro_batch_size: 2\nrecompute: full\n")
    from_file = json.loads(run("estimate", str(layout), *SMALL, "--json").stdout)
    from_flags = json.loads(
        run("estimate", *SMALL, "--tp", "2", "--micro-batch-size", "2", "--recompute", "full", "--json").stdout
    )
    assert from_file == from_flags
    assert from_file["layout"]["dp"] == 4
    assert from_file["layout"]["num_microbatches"] == 8
    assert from_file["estimate"]["time_s"]["recompute"] > 0
    table = run("estimate", str(layout), *SMALL).output
    for text in ("Step time", "recompute", "step", "peak of the device", "nine of ten runs"):
        assert text in table


def test_pins_hold_in_every_plan(run):
    document = json.loads(run(*SMALL, "--tp", "2", "--micro-batch-size", "1", "--recompute", "full", "--json").stdout)
    for plan in document["plans"]:
        assert (plan["layout"]["tp"], plan["layout"]["micro_batch_size"], plan["layout"]["recompute"]) == (2, 1, "full")


@pytest.mark.proof
def test_nothing_fits_says_by_how_much_and_every_advice_works(run):
    result = run("--model", "llama-70b", "--gpus", "4", "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert "misses by" in document["plans"][0]["why"]
    assert not any(plan["fits"] for plan in document["plans"])
    changes = " ".join(one["change"] for one in document["advice"])
    assert "GPUs of this kind" in changes
    assert "LoRA" in changes
    for one in document["advice"][:2]:
        words = shlex.split(one["command"])
        assert words[0] == "plan"
        advised = run(*words[1:], "--json")
        assert advised.exit_code == 0, one["command"]
        assert json.loads(advised.stdout)["plans"][0]["estimate"]["step_time_s"] == pytest.approx(one["step_time_s"])
    text = run("--model", "llama-70b", "--gpus", "4").output
    assert "Nothing fits." in text
    assert document["advice"][0]["command"] in text.replace("\n", " ").replace("  ", " ")


WRONG = [
    (("--model", "lama-70b", "--gpus", "8"), "unknown model 'lama-70b'; known, nearest first: llama-70b"),
    (
        ("--model", "llama-8b", "--gpus", "8", "--hardware", "h10-sxm"),
        "unknown hardware 'h10-sxm'; known, nearest first: h100-sxm",
    ),
    (
        ("--model", "llama-8b", "--gpus", "8", "--trainer", "megatro"),
        "unknown trainer 'megatro'; known, nearest first: megatron",
    ),
    (("--model", "llama-8b", "--gpus", "0"), "number of GPUs is 0"),
    (("--model", "llama-8b", "--gpus", "-8"), "number of GPUs is -8"),
    (("--model", "llama-8b", "--gpus", "99999999"), "number of GPUs is 99999999"),
    (("--model", "llama-8b", "--gpus", "8", "--sequence-length", "0"), "sequence_length is 0"),
    (("--model", "llama-8b", "--gpus", "8", "--global-batch-size", "0"), "global_batch_size is 0"),
    (("--model", "llama-8b", "--gpus", "8", "--precision", "fp7"), "unknown precision 'fp7'"),
    (("--model", "llama-8b", "--gpus", "8", "--optimizer", "adamw9"), "unknown optimizer 'adamw9'"),
    (("--model", "llama-8b", "--gpus", "8", "--tp", "0"), "tp is 0; it must be a whole number from 1"),
    (("--model", "llama-8b", "--gpus", "8", "--tp", "3"), "tp 3 does not divide 8 GPUs"),
    (("--model", "llama-8b", "--gpus", "8", "--tp", "8", "--trainer", "fsdp"), "trainer degrees"),
    (("--model", "llama-8b", "--gpus", "8", "--zero", "3"), "trainer megatron knows zero 0, 1"),
    (("--model", "llama-8b", "--gpus", "8", "--ep", "2"), "has no experts"),
    (
        ("--model", "llama-8b", "--gpus", "8", "--hardware", "v100-sxm2-32gb", "--trainer", "megatron"),
        "no flash attention",
    ),
    (("--model", "llama-8b", "--gpus", "8", "--dp", "8", "--global-batch-size", "7"), "the nearest is 8"),
    (("--model", "llama-8b", "--gpus", "8", "--network-bandwidth", "400"), "has no unit"),
    (("--model", "llama-8b", "--gpus", "8", "--recompute-modules", "mpl"), "unknown module 'mpl'"),
    (("--model", "llama-8b", "--gpus", "8", "--hardware", "a100-sxm-80gb", "--precision", "fp8"), "no fp8"),
    (("--model", "nothing/config.json", "--gpus", "8"), "nothing/config.json"),
    (("estimate", "--gpus", "8"), "which model?"),
    (("estimate", "--model", "llama-8b"), "how many GPUs?"),
    (("estimate", "--model", "llama-8b", "--gpus", "8", "--tp", "3"), "does not divide 8 GPUs"),
    (("estimate", "--model", "llama-8b", "--gpus", "16", "--tp", "16", "--trainer", "torchtitan"), "key-value heads"),
    (
        ("estimate", "--model", "llama-8b", "--gpus", "8", "--global-batch-size", "12", "--micro-batch-size", "2"),
        "nearest is 16",
    ),
    (("estimate", "missing.yaml", "--model", "llama-8b"), "missing.yaml"),
]


@pytest.mark.parametrize(("arguments", "sentence"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_wrong_input_gets_one_sentence_and_exit_code_2(run, arguments, sentence):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert sentence in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1


def test_damaged_and_newer_plan_files_are_refused(run, tmp_path):
    path = tmp_path / "plan.yaml"
    assert run(*SMALL, "--output", str(path)).exit_code == 0
    whole = path.read_text()
    data = yaml.safe_load(whole)
    cases = {
        "newer": (library.dump_yaml({**data, "planner_plan": 99}), "version 99"),
        "cut": (whole[: len(whole) // 2], "plan.yaml"),
        "unknown key": (library.dump_yaml({**data, "colour": "red"}), "unknown key 'colour'"),
        "no layout": (library.dump_yaml({k: v for k, v in data.items() if k != "layout"}), "missing key 'layout'"),
        "bad degree": (library.dump_yaml({**data, "layout": {**data["layout"], "tp": 0}}), "tp is 0"),
        "not yaml": ("tp: [1, 2\n\tx", "line"),
        "list": ("- 1\n- 2\n", "expected a mapping"),
        "text number": (
            library.dump_yaml({**data, "cluster": {**data["cluster"], "num_gpus": "8"}}),
            "num_gpus is '8'",
        ),
    }
    for name, (text, sentence) in cases.items():
        path.write_text(text)
        result = run("estimate", str(path))
        assert result.exit_code == 2, name
        assert sentence in result.stderr, (name, result.stderr)
        assert len(result.stderr.strip().splitlines()) == 1, name


def test_a_plan_is_written_before_its_tables_are_read(run, tmp_path, monkeypatch):
    """plan ... --output plan.yaml | head: a reader who has seen enough takes nothing away."""
    monkeypatch.setattr("planner.api.Plans.show", lambda *_: (_ for _ in ()).throw(BrokenPipeError))
    assert run(*SMALL, "--output", str(tmp_path / "plan.yaml")).exit_code != 0
    assert load_plan(tmp_path / "plan.yaml").num_gpus == 8


def test_unwritable_output_is_one_sentence(run):
    result = run(*SMALL, "--output", "/proc/nowhere/plan.yaml")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr


def test_help_has_examples_and_unknown_commands_name_the_nearest(run):
    for arguments in (("--help",), ("search", "--help"), ("estimate", "--help"), ("accuracy", "--help")):
        assert "Examples:" in run(*arguments).output
    result = run("estimat")
    assert result.exit_code == 2
    assert "estimate" in result.stderr


def test_the_list_of_commands_imports_none_of_them(run):
    code = (
        "import sys\nfrom planner.commands import main as cli\ntry:\n    cli.main(['--help'])\nexcept SystemExit:\n    "
    )
    code += "print([name for name in ('numpy', 'yaml', 'rich') if name in sys.modules], file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stderr.strip() == "[]"
    for name, (_, text) in cli.COMMANDS.items():
        assert f" {name} {text} " in f"{' '.join(result.stdout.split())} "
        assert run(name, "--help").output.startswith(f"Usage: plan {name} ")


def test_lists_name_everything_in_the_library(run):
    for command, kind in (("models", "models"), ("hardware", "hardware"), ("trainers", "trainers")):
        output = run(command).output
        for name in library.names(kind):
            assert name in output


def test_narrow_terminals_and_colours_are_handled():
    """A real terminal of 60 columns: nothing is wider, and colours are on."""
    script = "from planner.commands import main as cli; cli.main(['--model', 'llama-8b', '--gpus', '8', '--top', '2'])"
    command = f"stty cols 60 2>/dev/null; COLUMNS=60 TERM=xterm-256color {shlex.quote(sys.executable)} -c {shlex.quote(script)}"
    result = subprocess.run(
        ["script", "-qec", command, "/dev/null"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    if result.returncode == 127:
        pytest.skip("no 'script' program to make a terminal")
    assert "\x1b[" in result.stdout
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", result.stdout)
    assert max(len(line.rstrip("\r")) for line in plain.splitlines()) <= 60


def test_bare_plan_imports_neither_torch_nor_scipy_nor_matplotlib():
    script = (
        "import sys\nfrom planner.commands import main as cli\n"
        "try:\n    cli.main(['--model', 'llama-8b', '--gpus', '8', '--json'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'scipy', 'matplotlib', 'jinja2') if m in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stderr.strip().splitlines()[-1] == "[]"
