"""What several test files need."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner, Result

import cli


def pytest_addoption(parser: pytest.Parser) -> None:
    """Flags of this suite."""
    parser.addoption("--whole-parity", action="store_true", help="run every combination of planner.validator.parity")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes (-n) a file stays in one of them: what its tests share is made once."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


@pytest.fixture(autouse=True)
def no_local_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests give the same answer on a machine with a GPU."""
    monkeypatch.setattr("planner.detect.which", lambda _: None)


@pytest.fixture
def run():
    """Runs the command line in this process: run("--model", "llama-8b", ...) -> click's Result."""

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(cli.main, list(arguments), prog_name="plan")

    return invoke
