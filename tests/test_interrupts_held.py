"""Ctrl-C while a process is started: it is neither lost nor heard before the process is whole."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from planner.lab.launch.torchrun import interrupts_held


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Ctrl-C raises, also where the tests run in the background of a shell, which starts them with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_heard_when_the_block_ends() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
        reached.append(True)
    assert reached == [True]


def test_without_an_interrupt_nothing_is_raised_and_later_ones_are_heard() -> None:
    with interrupts_held():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_what_is_started_does_not_hear_it() -> None:
    with interrupts_held():
        child = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('whole')"],
                                 stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert child.communicate()[0] == "whole\n" and child.returncode == 0
