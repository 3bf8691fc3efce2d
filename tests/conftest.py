"""What several test files need."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from click.testing import CliRunner, Result

from planner.commands import main as cli
from planner.questions.accuracy.prediction import Pair, pairs_of
from planner.questions.accuracy.serving_errors import ServingPair
from planner.questions.accuracy.training_and_serving import serving_pairs, shipped_serving
from planner.runs import Run, read_runs

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
"""Byte code is kept, here and in what tests start: compiling planner and its tests takes each process 20 s, in every run again."""

hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.register_profile("search")
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
"""A commit gives the same answer every time; HYPOTHESIS_PROFILE=search tries other examples in every run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Flags of this suite."""
    parser.addoption("--whole-parity", action="store_true", help="run every combination of tests.proofs.parity")


def pytest_collection() -> None:
    """What collecting makes stays until the end: nothing of it is looked through for what could be freed, then or later."""
    gc.disable()


def pytest_collection_finish() -> None:
    """From then on what many objects make is looked through rarely: syntax trees of all files take three times as long with it."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    gc.enable()


TIMED = ("test_proofs.py", "test_profiler_run.py", "test_profiler_links.py")
"""Files whose ranks are timed: one of them at a time."""


RUNS = ("test_accuracy_gate.py", "test_readme.py", "test_runs.py", "test_runs_report.py")
"""Files that need all published runs: one process reads and predicts them once."""


PLANS = ("test_export.py", "tests/test_front_ends.py")
"""Files that need the plans of all searches of trainers.plans: one process searches once."""


LONGEST = (
    "timed", "tests/test_elastic_proofs.py", "tests/test_serial_model.py", "tests/test_calibrated_constants.py",
    "tests/test_first_day.py", "runs", "plans", "tests/test_validate_ends.py", "tests/test_validate.py",
    "tests/test_validate_full.py", "tests/test_export_torch.py", "tests/test_validate_alone.py",
    "tests/test_validate_rank.py", "tests/test_validate_top.py", "tests/test_search.py", "tests/test_doctor.py",
    "tests/test_report.py", "tests/test_sensitivity.py", "tests/test_cheapest.py", "tests/test_calibrate.py",
    "tests/test_rl_search.py", "tests/test_cli.py", "tests/test_extend.py", "tests/test_import.py",
    "tests/test_serving_several.py", "tests/test_report_browser.py", "tests/test_report_page.py", "tests/test_compare.py",
    "tests/test_what_if_limits.py", "tests/test_mixed_commands.py", "tests/test_cost_stored.py", "tests/test_timeline.py",
)  # fmt: skip
"""What takes longest, that first: at the end no process waits for another's last file. The rest follows by number of tests."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes (-n) a file stays in one of them: what its tests share is made once."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            groups = {"timed": TIMED, "runs": RUNS, "plans": PLANS}
            return next((name for name, files in groups.items() if file.endswith(files)), file)

        def _assign_work_unit(self, node: Any) -> None:
            for scope in reversed(LONGEST):
                if scope in self.workqueue:
                    self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def every_run() -> list[Run]:
    """All published runs."""
    return read_runs()


@pytest.fixture(scope="session")
def every_pair(every_run: list[Run]) -> list[Pair]:
    """All published runs with their predictions."""
    return pairs_of(every_run)


@pytest.fixture(scope="session")
def every_serving_pair() -> list[ServingPair]:
    """All serving runs that come along, with their predictions."""
    return serving_pairs(shipped_serving())


@pytest.fixture(scope="session")
def runs(every_run: list[Run]) -> dict[str, Run]:
    """All published runs by ``source/id``."""
    return {f"{run.source}/{run.id}": run for run in every_run}


@pytest.fixture(autouse=True)
def no_local_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests give the same answer on a machine with a GPU, and for a user who has set defaults."""
    monkeypatch.delenv("PLAN_HARDWARE", raising=False)
    monkeypatch.delenv("PLAN_TRAINER", raising=False)
    monkeypatch.setattr("planner.detect.which", lambda _: None)


@pytest.fixture
def run():
    """Runs the command line in this process: run("--model", "llama-8b", ...) -> click's Result."""

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(cli.main, list(arguments), prog_name="plan")

    return invoke


def may_limit() -> bool:
    """Whether network namespaces and a limited link can be made here."""
    found = [any(os.access(f"{folder}/{tool}", os.X_OK) for folder in os.get_exec_path()) for tool in ("ip", "tc")]
    return os.geteuid() == 0 and all(found)


@pytest.fixture
def slow_link() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a link of 100 Mbit/s."""
    if not may_limit():
        pytest.skip("a rate-limited link needs root, ip and tc")
    names = (f"pa{os.getpid() % 10000}", f"pb{os.getpid() % 10000}")
    script = [f"ip netns add {name}" for name in names]
    script.append(f"ip link add v{names[0]} netns {names[0]} type veth peer name v{names[1]} netns {names[1]}")
    for number, name in enumerate(names):
        script += [
            f"ip -n {name} addr add 10.211.7.{number + 1}/24 dev v{name}", f"ip -n {name} link set v{name} up",
            f"ip -n {name} link set lo up",
            f"tc -n {name} qdisc add dev v{name} root tbf rate 100mbit burst 32kb latency 400ms",
        ]  # fmt: skip
    try:
        for line in script:
            done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no rate-limited link here: {line}: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.fixture(params=["some", pytest.param("all", marks=pytest.mark.proof)])
def searched(request: pytest.FixtureRequest) -> Any:
    """Plans of searches as export jobs: a part with every trainer, and among the proofs all of them."""
    from trainers.plans import SOME, WANTED, jobs

    return jobs(SOME if request.param == "some" else WANTED)
