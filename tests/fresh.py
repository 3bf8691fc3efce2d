"""Fresh processes that have imported torch and the ranks' modules and done nothing else, forked from one that waits.

Ranks are forked, which a process that has computed must not do, so that many tests run a script in a process of its own. Importing
torch takes such a process longer than most of the scripts: one process per session of pytest has imported it, and forks.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SERVER = """
import json, os, sys, traceback
import planner.lab.run.full_rank, planner.lab.run.meta, tests.proofs.parity, planner.lab.run.workers

for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        os.setsid()
        for name, number in (("out", 1), ("error", 2)):
            os.dup2(os.open(asked[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv, code = ["-c", *asked["words"]], 1
        try:
            exec(asked["code"], sys.modules["__main__"].__dict__)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1 if end.code else 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def _server() -> subprocess.Popen[str]:
    """The process that waits; it ends when its input does."""
    command = [sys.executable, "-c", SERVER]
    server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    return server


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def fresh(code: str, *words: str, limit: int = 300) -> str:
    """What a script prints in such a process, as ``python -c`` would run it; fails when it does, or takes longer than ``limit``."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        files = {name: f"{folder}/{name}" for name in ("out", "error")}
        server.stdin.write(json.dumps({"code": code, "words": words, **files}) + "\n")
        server.stdin.flush()
        late = threading.Timer(limit, _end, [int(server.stdout.readline())])
        late.start()
        status = int(server.stdout.readline())
        late.cancel()
        out, error = (Path(file).read_text(encoding="utf-8") for file in files.values())
    assert status == 0, f"exit code {status}: {error[-3000:]}"
    return out
