"""The exported PyTorch script as the program of ``plan run``, whose steps wait for a number in a file: what happens at which step
is then the test's to say, however slow the machine is. A rank that is asked to save and end waits no longer."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

GATE = "PLANNER_TEST_GATE"
"""Variable with the file: steps up to its number are done."""


def main() -> None:
    """Runs train.py of the folder that torchrun's script has gone to."""
    sys.path.insert(0, os.getcwd())
    script, saves = importlib.import_module("train"), importlib.import_module("saves")
    gate, asked = Path(os.environ[GATE]), [False]
    step, heard, said = script.Run.step, saves.Saves._heard, saves.Saves.said

    def gated(self: Any, tokens: Any, samples: int, said: list[float]) -> Any:
        while samples // self.plan["global_batch_size"] >= int(gate.read_text() or 0) and not asked[0]:
            time.sleep(0.02)
        return step(self, tokens, samples, said)

    def noted(self: Any, *given: Any) -> None:
        asked[0] = True
        heard(self, *given)

    def written(self: Any) -> list[float]:  # a checkpoint is whole one step after the one that it was begun at
        while self.begun is not None and self.files is None and not self.error:
            time.sleep(0.01)
        return list(said(self))

    script.Run.step, saves.Saves._heard, saves.Saves.said = gated, noted, written
    script.main()
    script.leave()


if __name__ == "__main__":
    try:
        main()
    except Exception:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
