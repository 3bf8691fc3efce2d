"""Starts the ranks of one machine with torchrun and waits for them; and one of these ranks. No torch in this process."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.lab.launch.place import Place, place_from
from planner.lab.launch.state import State, from_file

DIRECTORY = "PLANNER_RUN_DIRECTORY"
"""Set for the ranks: where they leave their state and last words."""
POLL = 0.1
AFTER_LAST_WORDS = 5.0
"""Seconds that torchrun has to end after a rank has reported; it would wait half a minute for one that is stopped."""
STOP_SECONDS = 15.0
"""After Ctrl-C the ranks have this long to write what they have; then they are ended."""


class InterruptedRunError(PlannerError):
    """The user stopped the ranks; they have written what they had."""


def need_torch() -> None:
    """Raises PlannerError where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise PlannerError(
            "measuring needs torch, which is not installed here; install it: pip install 'planner[torch]'"
        )


def count_by_torch() -> int:
    """GPUs that torch sees, asked in a process of its own: for devices whose driver has no nvidia-smi."""
    if importlib.util.find_spec("torch") is None:
        return 0
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    text = done.stdout.strip().splitlines()
    return int(text[-1]) if done.returncode == 0 and text and text[-1].isdecimal() else 0


def run_here(module: str, settings: str, ranks: int, directory: Path, show: Callable[[State], object]) -> float:
    """Runs ``python -m MODULE settings.json`` on ``ranks`` processes of this machine; seconds that it took.

    ``directory`` must be empty; the settings and what the ranks leave lie in it: pid-R and done-R of each rank, state.json,
    failure.txt. Raises PlannerError with the last words of the ranks when one of them failed, InterruptedRunError after
    Ctrl-C. All processes have ended when this returns or raises.
    """
    begun = time.monotonic()
    (directory / "settings.json").write_text(settings, encoding="utf-8")
    with (directory / "torchrun.log").open("wb") as log, termination_interrupts():
        process = subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                "--max-restarts=0", f"--monitor-interval={POLL}", "-m", module, str(directory / "settings.json"),
            ],
            stdout=log, stderr=log, env=_environment(directory), start_new_session=True,
        )  # fmt: skip
        try:
            _wait(process, directory, show)
        except KeyboardInterrupt:
            _stop(process)
            raise InterruptedRunError("stopped") from None
        finally:
            with interrupts_ignored():
                _end(process, directory)
    _judge(process.returncode, directory, ranks)
    return time.monotonic() - begun


def _wait(process: subprocess.Popen[bytes], directory: Path, show: Callable[[State], object]) -> None:
    """Until torchrun has ended, or some time after the last words of its ranks: it waits long for one that is stopped."""
    spoken = None
    while process.poll() is None:
        show(from_file(directory / "state.json"))
        time.sleep(POLL)
        if spoken is None and (directory / "failure.txt").is_file():
            spoken = time.monotonic()
        if spoken is not None and time.monotonic() - spoken > AFTER_LAST_WORDS:
            return


def _environment(directory: Path) -> dict[str, str]:
    """That of this process, with the way to this package, and one thread per rank unless the user says otherwise."""
    package = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(part for part in (package, os.environ.get("PYTHONPATH", "")) if part)
    environment = {**os.environ, DIRECTORY: str(directory), "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    environment["TMPDIR"] = str(directory)  # what torch leaves behind goes with it
    environment["PYTHONSAFEPATH"] = "1"  # a directory named planner where the user stands is not this package
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return environment


@contextlib.contextmanager
def termination_interrupts() -> Iterator[None]:
    """A SIGTERM to this process ends the ranks too, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ctrl-C is not heard: processes that are ended here are all ended, those that are started here never hear it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C for torchrun, which hands it to its ranks; a second one ends the waiting for them."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        process.wait(timeout=STOP_SECONDS)


def _end(process: subprocess.Popen[bytes], directory: Path) -> None:
    """Nothing that was started stays behind: torchrun, and its ranks, which have sessions of their own."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for file in directory.glob("pid-*"):
        pid = int(file.read_text(encoding="utf-8") or 0)
        with contextlib.suppress(OSError):
            if pid and str(directory).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def _judge(code: int, directory: Path, ranks: int) -> None:
    """Raises PlannerError unless every rank came to its end."""
    missing = [rank for rank in range(ranks) if not (directory / f"done-{rank}").is_file()]
    if code == 0 and not missing:
        return
    words = directory / "failure.txt"
    if words.is_file():
        raise PlannerError(words.read_text(encoding="utf-8").strip())
    doing = from_file(directory / "state.json").doing or "the start"
    log = (directory / "torchrun.log").read_text(encoding="utf-8", errors="replace")
    last = [line.strip() for line in log.splitlines() if "Error" in line or "Signal" in line]
    why = f": {last[-1][:300]}" if last else ""
    raise PlannerError(f"rank {', '.join(map(str, missing))} ended early during {doing} (exit code {code}){why}")


# ------------------------------------------------------------------------------------------------ one rank


def as_rank(command: str, settings: str, work: Callable[[str, Place], object]) -> int:
    """Does ``work(text of the settings, place)``; a PlannerError becomes the last words for the process that started torchrun.

    ``command`` is the one that a user should have started instead. Returns the exit code.
    """
    place = place_from(os.environ)
    if place is None or DIRECTORY not in os.environ:
        raise SystemExit(f"this is one rank of `plan {command}`; start that, or torchrun")
    directory = Path(os.environ[DIRECTORY])
    library.write_whole(directory / f"pid-{place.rank}", str(os.getpid()))
    try:
        work(Path(settings).read_text(encoding="utf-8"), place)
    except PlannerError as error:
        if not (directory / "failure.txt").exists():
            library.write_whole(directory / "failure.txt", str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
