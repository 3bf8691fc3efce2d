"""Records names, types and choices of an RL framework's settings from its source: a checkout, or the folder of an unpacked wheel.

\b
    python tools/snapshot_rl.py verl wheel/ verl 0.9.1 > planner/rl/export/flags/verl.json

Nothing else is kept. TRL takes arguments of transformers as well: put that package into the same folder. What was recorded
came from the wheels verl 0.9.1, openrlhf 0.11.2, areal 1.0.4 and trl 1.16.0 (transformers 5.10.4), and from NVIDIA-NeMo/RL 7ea279ab,
THUDM/slime 624b824a and PrimeIntellect-ai/prime-rl 559b4477 (0.8.0), which are on no package index, on 2026-11-23.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from planner.rl.export.known_names import READERS


@click.command(help=__doc__)
@click.argument("name", type=click.Choice(sorted(READERS)))
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("package")
@click.argument("version")
def main(name: str, folder: Path, package: str, version: str) -> None:
    """Print the file."""
    data = {"package": package, "version": version, "settings": READERS[name][1](folder)}
    json.dump(data, sys.stdout, indent=0, sort_keys=True)
    print()


if __name__ == "__main__":
    main()
