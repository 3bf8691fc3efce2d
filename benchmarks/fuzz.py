"""A million spoiled files and flags: every one is read, or refused in one sentence; no traceback, no hang.

python benchmarks/fuzz.py --inputs 1000000 --output fuzz.json      # Ctrl-C keeps what is done; the same command goes on
python benchmarks/fuzz.py --kind plan --seed 4711                  # one input again, with its traceback
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fuzzing import KINDS, one  # noqa: E402

from planner import library  # noqa: E402

EVERY = 1000
"""Inputs between two looks at the clock."""


def kind_of(number: int) -> str:
    """The kind of an input by its number: all kinds in every thousand."""
    rest = number * 611 % 1000  # coprime: spreads them
    for kind, (_, share) in KINDS.items():
        if rest < share:
            return kind
        rest -= share
    return next(iter(KINDS))


def state_of(output: Path | None) -> dict[str, Any]:
    """What an earlier run has done."""
    if output is None or not output.exists():
        return {"next": 0, "found": {}, "failures": [], "seconds": 0.0}
    return dict(library.parse_json(library.read_text(output), str(output)))


def run(first: int, inputs: int, output: Path | None) -> dict[str, Any]:
    """Inputs from where the last run ended; the first of each number is its seed."""
    state = state_of(output)
    number = max(state["next"], first)
    found, begun = Counter(state["found"]), time.monotonic() - state["seconds"]
    last = first + inputs

    def keep() -> None:
        state.update(next=number, found=dict(found), seconds=time.monotonic() - begun)
        if output is not None:
            library.write_whole(output, json.dumps(state, indent=1))

    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        while number < last:
            kind = kind_of(number)
            try:
                found[f"{kind}: {one(kind, number, Path(folder))}"] += 1
            except (Exception, SystemExit) as error:
                found[f"{kind}: failure"] += 1
                frame = traceback.extract_tb((error.__cause__ or error).__traceback__)[-1]
                said = f"{type(error).__name__}: {error} at {frame.filename}:{frame.lineno}"
                state["failures"] = [*state["failures"], [kind, number, said[:500]]][:200]
                print(f"\n{kind} {number}: {said[:300]}", file=sys.stderr)
            number += 1
            if number % EVERY == 0:
                keep()
                rate = (number - first) / (time.monotonic() - begun)
                left = (last - number) / rate / 60
                failed = sum(count for name, count in found.items() if name.endswith("failure"))
                print(
                    f"\r{number:,} inputs, {failed} failures, {rate:.0f}/s, {left:.0f} min left ",
                    end="",
                    file=sys.stderr,
                    flush=True,
                )
    keep()
    return state


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first: several runs side by side")
    parser.add_argument("--output", type=Path, help="keep what is done in this JSON file, and go on from it")
    parser.add_argument("--kind", choices=list(KINDS), help="with --seed: this input alone")
    parser.add_argument("--seed", type=int)
    asked = parser.parse_args()
    if asked.kind and asked.seed is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(one(asked.kind, asked.seed, Path(folder)))
        return
    state = run(asked.first, asked.inputs, asked.output)
    print("\n" + "\n".join(f"{count:9,}  {name}" for name, count in sorted(state["found"].items())))
    print(
        f"{state['next'] - asked.first:,} inputs in {state['seconds']:.0f} s; peak "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB"
    )
    sys.exit(1 if state["failures"] else 0)


if __name__ == "__main__":
    main()
