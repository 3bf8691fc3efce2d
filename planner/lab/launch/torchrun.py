"""Starts the ranks of one machine with torchrun and waits for them; and one of these ranks. No torch in this process."""

import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.lab.launch.children import POLL, run_watched
from planner.lab.launch.place import Place, place_from
from planner.lab.launch.state import State, from_file

DIRECTORY = "PLANNER_RUN_DIRECTORY"
"""Set for the ranks: where they leave their state and last words."""
AFTER_LAST_WORDS = 5.0
"""Seconds that torchrun has to end after a rank has reported; it would wait half a minute for one that is stopped."""


class InterruptedRunError(PlannerError):
    """The user stopped the ranks; they have written what they had."""


def need_torch() -> None:
    """Raises PlannerError where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise PlannerError(
            "measuring needs torch, which is not installed here; install it: pip install 'planner[torch]'"
        )


def ask_torch(expressions: str) -> list[Any] | None:
    """The values of some expressions with torch imported, in a process of its own; None where torch does not work."""
    words = [sys.executable, "-c", f"import json, torch, torch.distributed; print(json.dumps([{expressions}]))"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True, stdin=subprocess.DEVNULL)
        return list(json.loads(done.stdout.strip().splitlines()[-1]))
    return None


def count_by_torch() -> int:
    """GPUs that torch sees: for devices whose driver has no nvidia-smi."""
    return int((ask_torch("torch.cuda.device_count()") or [0])[0])


def run_here(module: str, settings: str, ranks: int, directory: Path, show: Callable[[State], object]) -> float:
    """Runs ``python -m MODULE settings.json`` on ``ranks`` processes of this machine; seconds that it took.

    ``directory`` must be empty; the settings and what the ranks leave lie in it: pid-R and done-R of each rank, state.json,
    failure.txt. Raises PlannerError with the last words of the ranks when one of them failed, InterruptedRunError after
    Ctrl-C. All processes have ended when this returns or raises.
    """
    begun, state, words = time.monotonic(), directory / "state.json", directory / "failure.txt"
    (directory / "settings.json").write_text(settings, encoding="utf-8")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
        "--max-restarts=0", f"--monitor-interval={POLL}", "-m", module, str(directory / "settings.json"),
    ]  # fmt: skip

    def deadline() -> float:
        with contextlib.suppress(OSError):
            return time.monotonic() - time.time() + words.stat().st_mtime + AFTER_LAST_WORDS
        return math.inf

    ended = run_watched(
        command, lambda _: show(from_file(state)), deadline, environment=_environment(directory), ask=signal.SIGINT
    )
    if ended.interrupted:
        raise InterruptedRunError("stopped")
    missing = [rank for rank in range(ranks) if not (directory / f"done-{rank}").is_file()]
    if ended.code == 0 and not missing:
        return time.monotonic() - begun
    if words.is_file():
        raise PlannerError(words.read_text(encoding="utf-8").strip())
    errors = [line.strip() for line in ended.text.splitlines() if "Error" in line or "Signal" in line]
    last = [line for line in errors if "ChildFailedError" not in line] or errors  # torchrun's own, of which a rank is the cause
    raise PlannerError(
        f"rank {', '.join(map(str, missing))} ended early during {from_file(state).doing or 'the start'} "
        f"(exit code {ended.code}){f': {last[-1][:300]}' if last else ''}"
    )


def _environment(directory: Path) -> dict[str, str]:
    """That of this process, with the way to this package, and one thread per rank unless the user says otherwise."""
    package = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(part for part in (package, os.environ.get("PYTHONPATH", "")) if part)
    return {
        "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, DIRECTORY: str(directory), "PYTHONPATH": paths,
        "TMPDIR": str(directory),  # what torch leaves behind goes with it
        "PYTHONSAFEPATH": "1",  # a directory named planner where the user stands is not this package
    }  # fmt: skip


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
