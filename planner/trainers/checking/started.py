"""What the scripts of an exported folder really start: bash expands them, and programs that only write down what they get
stand in place of torchrun and the others."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

STARTERS = ("torchrun", "accelerate", "python", "ray")
FIRST = {"NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
"""Place of the first node."""
LIMIT = 60.0
"""Seconds that a script may take; each takes a fraction of one."""
_RECORD = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open({place!r}, 'w'))"


def started(
    folder: Path, script: str, program: str = "torchrun", said: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Words and environment of ``program`` when a script of the folder starts it; other programs do nothing.

    ``said``: variables of the user; None: what the scripts ask for is made up, for the first node. Raises RuntimeError with what a
    script said when it stops before.
    """
    if said is None:
        texts = [(folder / name).read_text(encoding="utf-8") for name in (script, "environment.sh")]
        said = {name: "x" for text in texts for name in re.findall(r"\$\{(\w+):\?", text)} | FIRST
    with tempfile.TemporaryDirectory() as place:
        seen = Path(place) / "seen.json"
        for name in {program, *STARTERS}:
            stub = Path(place) / name
            text = _RECORD.format(place=str(seen)) if name == program else "pass"
            stub.write_text(f"#!{sys.executable}\n{text}\n", encoding="utf-8")
            stub.chmod(0o755)
        path = f"{place}{os.pathsep}/usr/bin{os.pathsep}/bin"
        done = subprocess.run(
            ["bash", script], cwd=folder, capture_output=True, text=True, timeout=LIMIT, check=False,
            env={"PATH": path, "HOME": place, **said},
        )  # fmt: skip
        if done.returncode or not seen.exists():
            raise RuntimeError(done.stderr.strip() or f"{script} ended with {done.returncode} and started nothing")
        words, variables = json.loads(seen.read_text(encoding="utf-8"))
        return words, variables


def own_words(words: list[str], script: str) -> list[str]:
    """Words behind the one that names the trainer's program."""
    return words[next(number for number, word in enumerate(words) if word.endswith(script)) + 1 :]
