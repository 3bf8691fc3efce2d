"""Starts the ranks of one machine with torchrun, or another command, and waits for it; and one of these ranks.

What a command starts ends with it, whatever sessions it opened. No torch in this process.
"""

import contextlib
import getpass
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from planner import library
from planner.errors import PlannerError
from planner.lab.launch.place import Place, place_from
from planner.lab.launch.state import State, from_file
from planner.record import record

DIRECTORY = "PLANNER_RUN_DIRECTORY"
"""Set for the ranks: where they leave their state and last words."""
AFTER_LAST_WORDS = 5.0
"""Seconds that torchrun has to end after a rank has reported; it would wait half a minute for one that is stopped."""
MARK = "PLANNER_TRIAL"
"""Variable in the environment of everything that the command starts: finds children that opened sessions of their own. A command
inside of a command adds its mark to the outer one's."""
POLL = 0.1
EXCEPTION = re.compile(r"(?:\[rank\d+\]:\s*)?(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit)\b(?::|$)")
"""The last line of a traceback of Python; torch writes the rank before it."""
PRINTED = "all that the ranks printed is in"
AFTERWARDS = ("ChildFailedError", "SignalException", "Signal 15 (SIGTERM)")
"""What torchrun and the ranks that it ends say of the failure of another one."""
GRACE = 15.0
"""Seconds that the command has to end in order after Ctrl-C; a second one ends it at once."""


class InterruptedRunError(PlannerError):
    """The user stopped the ranks; they have written what they had."""


class FailedRanksError(PlannerError):
    """Ranks did not come to their end; ``log``: the file that keeps what they printed, "" = none."""

    def __init__(self, sentence: str, log: str) -> None:
        super().__init__(sentence + (f"; {PRINTED} {log}" if log else ""))
        self.log = log


def need_torch(what: str = "measuring", release: str = "") -> None:
    """Raises PlannerError where torch is not installed, or another release of it than the one that is needed."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        needed = f"{what} needs torch {release}".rstrip()
        raise PlannerError(f"{needed}, which is not installed here; install it: pip install 'torch~=2.13.0'") from None
    if release and not found.startswith(f"{release}."):
        raise PlannerError(
            f"{what} was written for torch {release} and found {found}; install it with: pip install 'torch~={release}.0'"
        )


def ask_torch(expressions: str, before: str = "") -> list[Any] | None:
    """The values of some expressions with torch imported, and the code ``before`` run, in a process of its own; None where torch
    does not work or is silent for two minutes."""
    code = f"import json, torch, torch.distributed\n{before}\nprint(json.dumps([{expressions}]))"
    words = [sys.executable, "-c", code]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=120, check=True, stdin=subprocess.DEVNULL, env=with_package()
        )
        return list(json.loads(done.stdout.strip().splitlines()[-1]))
    return None


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

    def look(_: str) -> float:
        show(from_file(state))
        with contextlib.suppress(OSError):
            return time.monotonic() - time.time() + words.stat().st_mtime + AFTER_LAST_WORDS
        return math.inf

    ended = run_watched(command, look, environment=_environment(directory), ask=signal.SIGINT)
    if ended.interrupted:
        raise InterruptedRunError("stopped")
    missing = [rank for rank in range(ranks) if not (directory / f"done-{rank}").is_file()]
    if ended.code == 0 and not missing:
        return time.monotonic() - begun
    log = _kept_log(ended.text)
    if words.is_file():
        raise FailedRanksError(words.read_text(encoding="utf-8").strip(), log)
    last = cause(ended.text)
    raise FailedRanksError(
        f"rank {', '.join(map(str, missing))} ended early during {from_file(state).doing or 'the start'} "
        f"(exit code {ended.code}){f': {last}' if last else ''}",
        log,
    )


def cause(text: str) -> str:
    """Why ranks ended, out of all that they printed: the last exception of Python that is not torchrun's own about a rank and not
    the end of a rank that was ended because of another; else the last line about an error or a signal; "" for none."""
    lines = [line.strip() for line in text.splitlines()]
    raised = [line for line in lines if EXCEPTION.match(line) and not any(word in line for word in AFTERWARDS)]
    spoken = [line for line in lines if "Error" in line or "Signal" in line]
    own = [line for line in spoken if not any(word in line for word in AFTERWARDS)]
    return next((found[-1][:300] for found in (raised, own, spoken) if found), "")


def _kept_log(text: str) -> str:
    """Keeps what the ranks printed, libraries too; the file, "" where there is nothing or no room."""
    if not text.strip():
        return ""
    with contextlib.suppress(OSError):
        handle, name = tempfile.mkstemp(prefix="plan-ranks-", suffix=".log")
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        return name
    return ""


def with_package() -> dict[str, str]:
    """The environment of this process with the way to this package."""
    package = str(Path(__file__).resolve().parents[3])
    paths = os.pathsep.join(part for part in (package, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}  # a directory planner where the user stands is not this one


def _environment(directory: Path) -> dict[str, str]:
    """That of a rank: one thread and NCCL's warnings unless the user says otherwise."""
    return {
        "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "NCCL_DEBUG": "WARN",
        "TORCHINDUCTOR_CACHE_DIR": inductor_cache(), **with_package(), DIRECTORY: str(directory),
        "TMPDIR": str(directory),  # what torch leaves behind goes with it
    }  # fmt: skip


def inductor_cache() -> str:
    """Where torch keeps compiled kernels unless it is set otherwise: not in the ranks' own TMPDIR, which goes with them."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container whose user has no name
        user = f"uid_{os.getuid()}"
    return str(Path(tempfile.gettempdir()) / f"torchinductor_{re.sub(r'[^A-Za-z0-9._-]', '_', user)}")


# ------------------------------------------------------------------------------------------------ a command


@record
class Ended:
    """How a command ended."""

    code: int
    """Exit code; negative = the signal that ended it."""
    hung: bool
    """It was ended here because its deadline had passed."""
    text: str
    """All that it printed, both streams."""
    interrupted: bool = False
    """The user stopped it."""


def run_watched(
    words: list[str], look: Callable[[str], float], *, folder: Path | None = None,
    environment: Mapping[str, str] | None = None, ask: signal.Signals = signal.SIGTERM,
) -> Ended:  # fmt: skip
    """Run a command until it ends, or until its deadline has passed.

    ``look`` is given what it has printed since, whole lines, often none, and gives the deadline in monotonic seconds. ``ask`` is
    the signal that asks it to end after Ctrl-C.
    Raises OSError when it cannot be started. Nothing that was started stays behind, after Ctrl-C neither.
    """
    mark = f"{os.environ.get(MARK, '')}{os.urandom(8).hex()}"
    environment = {**(environment or os.environ), MARK: mark, "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile() as log, termination_interrupts():
        process = subprocess.Popen(
            words, cwd=folder, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )  # fmt: skip
        hung, interrupted, seen = False, False, 0
        try:
            while process.poll() is None and not hung:
                time.sleep(POLL)
                new = os.pread(log.fileno(), 1 << 20, seen)
                end = new.rfind(b"\n") + 1
                seen += end
                deadline = look(new[:end].decode("utf-8", errors="replace"))
                hung = process.poll() is None and time.monotonic() > deadline
        except KeyboardInterrupt:
            interrupted = True
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired, KeyboardInterrupt):
                os.killpg(process.pid, ask)
                process.wait(timeout=GRACE)
        finally:
            with interrupts_ignored():
                end_all(process, mark)
        log.seek(0)
        text = log.read().decode("utf-8", errors="replace")
        look(text)
        return Ended(code=process.returncode, hung=hung, text=text, interrupted=interrupted)


def end_all(process: subprocess.Popen[bytes], mark: str) -> None:
    """End by force what is left of the command, and everything that carries its mark."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end_marked(mark)


def end_marked(mark: str) -> None:
    """End by force everything that carries a mark. Looks twice: a process that is just replaced by another program (exec) shows
    no environment."""
    wanted = f"{MARK}={mark}".encode()
    for pause in (0.0, POLL):
        time.sleep(pause)
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if any(one.startswith(wanted) for one in entry.read_bytes().split(b"\0")):
                    os.kill(int(entry.parent.name), signal.SIGKILL)


@contextlib.contextmanager
def _handled(number: signal.Signals, handler: Any) -> Iterator[None]:
    """A signal goes to a handler, where this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def termination_interrupts() -> contextlib.AbstractContextManager[None]:
    """A SIGTERM to this process ends what it has started too, as Ctrl-C does."""
    return _handled(signal.SIGTERM, signal.default_int_handler)


def interrupts_ignored() -> contextlib.AbstractContextManager[None]:
    """Ctrl-C is not heard: processes that are ended here are all ended, those that are started here never hear it."""
    return _handled(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C is heard when this ends: what is started here is whole until then and never hears it, as the mask is inherited."""
    heard: list[int] = []
    with _handled(signal.SIGINT, lambda number, _: heard.append(number)):  # another thread may get it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if heard:
        signal.raise_signal(signal.SIGINT)


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


def leave(code: int) -> NoReturn:
    """Ends a rank without Python's own end: a thread of gloo that drops the tensors of its last collective only then asks for an
    interpreter that is ending, which aborts the process (SIGABRT)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def cause_in_words(error: BaseException) -> str:
    """One line on what failed, and where. torch wraps what fails inside of a stage, with the whole schedule for a message."""
    while error.__cause__ is not None:
        error = error.__cause__
    where = traceback.extract_tb(error.__traceback__)[-1]
    said = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {said} ({where.filename}, line {where.lineno})"

