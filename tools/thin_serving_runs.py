"""Thins files of serving runs to those that come with planner: python tools/thin_serving_runs.py SOURCE [TARGET].

A file of at most WHOLE bytes is kept whole. Of a larger one every family (model x device x engine) keeps, of each layout and pair of
lengths, the rows at the lowest, a middle and the highest load, without copies of other rows and repetitions; a family that has more
than MOST of them keeps MOST that are evenly spread over its list. The header is kept, with a line that says so.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from planner.serving.runs.run_schema import ServingRow, read_serving_file  # noqa: E402

WHOLE = 40_000
MOST = 20
SAID = "# Thinned by tools/thin_serving_runs.py: of {before:,} rows {after:,}, all families.\n"


def kept(rows: list[ServingRow]) -> set[str]:
    """Ids of the rows that stay."""
    families: dict[object, dict[object, list[ServingRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        family = tuple(map(str, (row.get("model"), row.get("hardware.gpu"), row.get("engine.name"))))
        split = [row.get(name) for name in ("parallel", "prefill", "decode", "precision", "options")]
        families[family][str([split, row.get("load.isl"), row.get("load.osl"), row.get("load.kind")])].append(row)
    found: set[str] = set()
    for groups in families.values():
        chosen = [row for group in groups.values() for row in _three(group)]
        step = max(len(chosen) / MOST, 1.0)
        found |= {chosen[int(number * step)].id for number in range(int(len(chosen) / step))}
    return found


def _three(rows: list[ServingRow]) -> list[ServingRow]:
    """The lowest, a middle and the highest load, the best flagged row of each load."""
    loads: dict[float, ServingRow] = {}
    for row in sorted(rows, key=lambda one: (any(flag.startswith("same") for flag in one.flags), len(one.flags))):
        loads.setdefault(float(row.get("load.value") or 0.0), row)
    ordered = [loads[value] for value in sorted(loads)]
    return list({one.id: one for one in (ordered[0], ordered[len(ordered) // 2], ordered[-1])}.values())


@click.command(help=__doc__)
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("target", default=ROOT / "profiles" / "serving-runs", type=click.Path(path_type=Path))
def main(source: Path, target: Path) -> None:
    """Every file of a folder."""
    target.mkdir(exist_ok=True)
    for path in sorted(source.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        if len(text) > WHOLE:
            rows = read_serving_file(path)
            stay, lines = kept(rows), text.splitlines(keepends=True)
            start = next(number for number, line in enumerate(lines) if line.startswith("rows:"))
            body = [line for line in lines[start + 1 :] if line[line.index("{id: ") + 5 :].partition(",")[0].strip("'\"") in stay]
            assert len(body) == len(stay), path
            note = next(number for number, line in enumerate(lines) if not line.startswith("#"))
            head = [*lines[:note], SAID.format(before=len(rows), after=len(stay)), *lines[note : start + 1]]
            text = "".join([*head, *body])
        (target / path.name).write_text(text, encoding="utf-8")
        print(f"{path.name}: {len(text):,} bytes")


if __name__ == "__main__":
    main()
