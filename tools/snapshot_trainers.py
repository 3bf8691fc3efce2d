"""Records the names of a trainer's settings, with their types, from the source in its published package.

\b
    pip download --no-deps verl==0.9.1 && unzip verl-0.9.1*.whl -d verl
    python tools/snapshot_trainers.py verl verl/ > tests/trainers/snapshots/verl.json

Those of trainers whose parser nothing runs go into planner/trainers/NAME/names.json, which --check uses.

Only names and types are kept. LLaMA-Factory takes arguments of transformers as well: unpack that package (5.6.0, the newest
that it allows) into the same folder. What was recorded came from colossalai 0.5.0, llamafactory 0.9.5, axolotl 0.19.0,
verl 0.9.1, maxtext 0.2.5, vllm 0.33.0 and sglang 0.5.23 on 2026-11-21.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from planner.trainers import having, load

TRAINERS = [name for name in having("check") if hasattr(load(name, "check"), "known_names")]


def version(root: Path, package: str) -> str:
    """Version in the package's metadata."""
    files = [*root.glob(f"{package}-*.dist-info/METADATA"), *root.glob("PKG-INFO")]
    found = re.search(r"^Version: (\S+)", files[0].read_text(encoding="utf-8"), re.M) if files else None
    if found is None:
        raise SystemExit(f"{root}: no metadata of {package}; unpack its wheel or source package there")
    return found.group(1)


@click.command(help=__doc__)
@click.argument("name", type=click.Choice(TRAINERS))
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(name: str, folder: Path) -> None:
    """Print the file."""
    package = having("check")[name].PACKAGE
    data = {"package": package, "version": version(folder, package), "settings": load(name, "check").known_names(folder)}
    json.dump(data, sys.stdout, indent=0, sort_keys=True)
    print()


if __name__ == "__main__":
    main()
