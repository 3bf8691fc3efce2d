"""Jobs whose ranks are forked processes of the exported PyTorch script: torch is imported once, ranks start in a second.

``python -m tests.proofs.elastic_ranks`` reads one JSON job per line from its input, forks its ranks and answers with a line.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import select
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any


def _rank(asked: dict[str, Any], rank: int, port: int) -> None:
    """One process: the script of a folder as torchrun would start it; every sample that it reads goes to a file."""
    folder, words, world, log = (asked[name] for name in ("folder", "words", "world", "log"))
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    code = 1
    try:
        os.chdir(folder)
        sys.path.insert(0, folder)
        places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank}
        os.environ |= {name: str(value) for name, value in places.items()}
        warnings.filterwarnings("ignore")
        logging.getLogger("torch").setLevel(logging.ERROR)
        script: Any = importlib.import_module("train")
        row, read = script.Tokens.row, os.open(f"{log}.samples-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

        def recorded(self: Any, sample: int) -> Any:
            os.write(read, f"{sample}\n".encode())
            return row(self, sample)

        script.Tokens.row = recorded
        if asked.get("sleep"):
            step = script.Run.step

            def slow(self: Any, *given: Any) -> Any:
                time.sleep(asked["sleep"])
                return step(self, *given)

            script.Run.step = slow
        sys.argv = words
        script.main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        if code and error.code is not None and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    """Forks what it is asked for until its input ends; a job ends when all ranks have, or 5 s after the first that failed, as
    with torchrun, which ends the others."""
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel
    from torch.distributed.checkpoint import state_dict  # noqa: F401

    from tests.proofs.forked_ranks import free_port

    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        port, ranks = free_port(), []
        for rank in range(asked["world"]):
            ranks.append(os.fork())
            if not ranks[-1]:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                if asked.get("limit"):
                    import resource

                    resource.setrlimit(resource.RLIMIT_FSIZE, (asked["limit"], asked["limit"]))
                _rank(asked, rank, port)
        print(json.dumps({"ranks": ranks}), flush=True)
        codes: dict[int, int] = {}
        failed = 0.0
        while len(codes) < len(ranks):
            for pid in set(ranks) - set(codes):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    failed = failed or (time.monotonic() if codes[pid] else 0.0)
            if failed and time.monotonic() - failed > 5:
                for pid in set(ranks) - set(codes):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        print(json.dumps({"codes": [codes[one] for one in ranks]}), flush=True)


class Forks:
    """The process that forks, and the jobs that it is given."""

    def __init__(self) -> None:
        import subprocess

        root = Path(__file__).resolve().parents[2]
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        words = [sys.executable, "-m", "tests.proofs.elastic_ranks"]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=root
        )

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)

    def start(self, folder: Path, world: int, words: list[str], log: Path, **more: Any) -> list[int]:
        """Starts the ranks of a job; their process ids."""
        assert self.process.stdin is not None
        asked = {"folder": str(folder), "world": world, "words": words, "log": str(log), **more}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return list(self._answer()["ranks"])

    def ended(self, seconds: float | None = None) -> list[int] | None:
        """Waits for the job, at most so long; exit codes by rank, negative ones are signals; None while it runs."""
        assert self.process.stdout is not None
        if seconds is not None and not select.select([self.process.stdout], [], [], seconds)[0]:
            return None
        return list(self._answer()["codes"])

    def run(self, folder: Path, world: int, words: list[str], log: Path, **more: Any) -> list[int]:
        """A job from its start to its end."""
        self.start(folder, world, words, log, **more)
        return self.ended() or []

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process that forks ranks has ended"
        return dict(json.loads(line))


class ForkedGroup:
    """A job of forked ranks as an attempt of the loop of ``plan run``."""

    def __init__(self, forks: Forks, folder: Path, world: int, log: Path, words: list[str], **more: Any) -> None:
        self.forks, self.log, self.struck, self._seen = forks, log, 0, 0
        self.struck_at = 0.0
        self._codes: list[int] | None = None
        log.write_bytes(b"")
        self.ranks = forks.start(folder, world, words, log, **more)

    @property
    def code(self) -> int | None:
        """The first exit code that is not 0; None while ranks run."""
        if self._codes is None:
            self._codes = self.forks.ended(0)
        return None if self._codes is None else next((one for one in self._codes if one), 0)

    def lines(self) -> list[str]:
        """Whole lines since the last call."""
        over = self.code is not None
        new = self.log.read_bytes()[self._seen :]
        end = len(new) if over else new.rfind(b"\n") + 1
        self._seen += end
        return new[:end].decode().splitlines()

    def ask(self) -> None:
        """SIGTERM to every rank."""
        self._signal(signal.SIGTERM)

    def end(self) -> None:
        """SIGKILL to every rank that is left, until all have ended."""
        while self.code is None:
            self._signal(signal.SIGKILL)
            time.sleep(0.05)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


if __name__ == "__main__":
    serve()
