"""Kills ranks of real jobs at random moments and counts what comes out: ``python -m benchmarks.elastic_faults --kills 200``.

Jobs of 3 and 4 gloo ranks on this machine's processors, in float64, all splits of ``tests/proofs/elastic_faults.py``. Each job is
struck several times, goes on by the loop of ``plan run``, and is held against one that nobody struck: loss of every step, every
parameter and optimizer state, every sample that was read, and the steps that a failure cost against the bound.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from planner.lab.elastic.same_tensors import compare
from tests.proofs.elastic_faults import LAYOUTS, Strike, kill, kill_in_save, kill_one, plan_of, run_job
from tests.proofs.elastic_ranks import ForkedGroup, Forks

PAIRS = (("fsdp 4", "fsdp 3"), ("tp 2 x fsdp 2", "pp 3"), ("pp 2 x tp 2", "fsdp 3"))
PER_JOB = 8


def kill_two(chance: random.Random, longest: float) -> Strike:
    """Both ranks of a node at once."""
    inner = kill_one(chance, longest)

    def strike(group: ForkedGroup, log: Path) -> None:
        inner(group, log)
        if group.struck:
            kill(group, *range(len(group.ranks) - 2, len(group.ranks)))

    return strike


def main() -> None:
    """Prints a line per job, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance, counts, kinds = random.Random(options.seed), Counter[str](), ("any moment", "any moment", "in a save", "node of two")
    root = Path(tempfile.mkdtemp(prefix="plan-faults-"))
    with Forks() as forks:
        sound = {name: run_job(forks, root / f"sound-{number}", [plan_of(name)], every=0) for number, name in enumerate(LAYOUTS)}
        one = next(iter(sound.values()))
        for name, other in sound.items():
            same = compare(one.final(), other.final(), 1e-12)
            print(json.dumps({"sound": name, "code": other.code, "largest": same.largest, "differences": same.differences[:3]}))
        while counts["kills"] < options.kills:
            pair, kind = chance.choice(PAIRS), kinds[counts["jobs"] % len(kinds)]
            shrinks, folder, launched = chance.random() < 0.5, root / f"job-{counts['jobs']}", [0]

            def strike(group: ForkedGroup, log: Path) -> None:
                made = {"in a save": lambda: kill_in_save(chance, chance.randint(1, 2)),
                        "node of two": lambda: kill_two(chance, 4.0)}.get(kind, lambda: kill_one(chance, 4.0))  # noqa: B023
                made()(group, log)

            def gpus() -> int:
                launched[0] += 1  # noqa: B023
                return 4 if launched[0] % 2 or not shrinks else 3  # noqa: B023

            trial = run_job(forks, folder, [plan_of(name) for name in pair], strike=strike, strikes=PER_JOB, gpus=gpus)
            counts["jobs"] += 1
            counts["attempts"] += len(trial.logs)
            counts["kills"] += sum(group.struck > 0 for group in trial.groups)
            counts["torn, skipped"] += sum("is torn, skipped" in line for line in trial.said)
            lost = trial.lost()
            counts["lost more than stated"] += sum(steps > most for steps, most in lost)
            found = {"job": counts["jobs"], "kind": kind, "splits": pair, "shrinks": shrinks, "code": trial.code, "lost": lost,
                     "seconds": round(trial.seconds, 1)}  # fmt: skip
            if trial.code == 0:
                counts["samples"] += trial.check_data()
                same = compare(one.final(), trial.final(), 1e-12)
                loss = max(abs(trial.losses()[step] - value) for step, value in one.losses().items())
                counts["not equal"] += bool(same.differences) or loss > 1e-12
                found |= {"largest": same.largest, "loss": loss}
            else:
                counts["did not finish"] += 1
            print(json.dumps(found), flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(dict(counts)))
    shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
