"""The cost model's memory and the memory tracker's for a table of plans at full size: ``python -m tests.proofs.agreement``.

Measured bytes are written to a file with date, versions and machine, which tests hold the cost model of the day against
without torch; a few rows are measured again there. Every disagreement is an error in one of the two.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.cluster import Cluster
from planner.hardware import load_hardware
from planner.lab.reference.split import split_of
from planner.lab.run.comparison import BOUNDS, memory_row, predicted_memory
from planner.lab.run.levels import Question
from planner.layout import NAMES, CpMethod, Layout, Module, Recompute, Schedule
from planner.model import load_model
from planner.trainer import load_trainer
from planner.workload import Workload

STORED = Path(__file__).with_name("agreement.yaml")
"""What was measured, by the text of the plan."""
SHORT = {"b": "micro_batch_size", "m": "num_microbatches", "shard": "dp_shard"}
"""Words of a plan's text that are not names of layout fields."""
NAMED = ("schedule", "recompute")
"""Layout fields that have names for values."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan and the pipeline rank that is looked at."""

    text: str
    """As it is written in the table."""
    asked: Question
    stage: int


def parse(text: str) -> Row:
    """'model key=value ...': layout fields, and s (tokens per sequence), stage, trainer, layers (to make it shallow)."""
    name, *words = text.split()
    values = dict(word.split("=", 1) for word in words)
    trainer = load_trainer(values.pop("trainer", "torchtitan"))
    length, stage = int(values.pop("s", "8192")), int(values.pop("stage", "0"))
    model = load_model(name)
    if "layers" in values:
        import dataclasses

        model = dataclasses.replace(model, num_layers=int(values.pop("layers")))
    fields = {SHORT.get(key, key): _value(SHORT.get(key, key), value) for key, value in values.items()}
    layout = _layout(fields)
    workload = Workload(model=model, sequence_length=length, global_batch_size=int(layout.global_batch_size))
    asked = Question(
        workload=workload, cluster=Cluster(hardware=load_hardware("h100-sxm"), num_gpus=int(layout.num_gpus)),
        trainer=trainer, layout=layout, split=split_of(workload, trainer, layout), changes=(),
    )  # fmt: skip
    return Row(text=text, asked=asked, stage=stage)


def _value(field: str, value: str) -> int:
    if field not in NAMED:
        return int(value)
    return int(next(number for number, name in NAMES[field].items() if name == value))


def _layout(fields: dict[str, int]) -> Layout:
    """With what goes without saying: torchtitan's kinds of recompute, sequence and context parallelism."""
    pp = fields.get("pp", 1)
    more = {
        "zero": 2, "num_microbatches": pp + 1 if pp > 1 else 1, "sequence_parallel": int(fields.get("tp", 1) > 1),
        "cp_method": int(CpMethod.ALLGATHER), "vpp": 1,
    }  # fmt: skip
    if fields.get("recompute") == Recompute.SELECTIVE:
        more["recompute_modules"] = int(Module.EVERY_SECOND_MATMUL)
    if fields.get("schedule") in (Schedule.INTERLEAVED, Schedule.ZBV, Schedule.DUALPIPE_V):
        more["vpp"] = 2
    return Layout(**{**more, **fields})


def compared(one: Row, held: dict[str, float], peak: float) -> list[dict[str, Any]]:
    """Rows of the table of one plan, as ``plan validate`` has them."""
    predicted = predicted_memory(one.asked, one.stage)
    counted = [name for name in BOUNDS if name == "peak" or name in held]  # nothing of these plans is on the host
    return [memory_row(name, predicted[name], held[name] if name != "peak" else peak) for name in counted]


def measure(one: Row) -> dict[str, Any]:
    """The rank's step on fake tensors."""
    from planner.lab.run.meta import measure_ranks

    split = one.asked.split
    [found] = measure_ranks(split, [one.stage * (split.world // split.pp)])
    assert found is not None
    return {
        "plan": one.text, "held": {name: found.most.held[name] for name in BOUNDS if name in found.most.held},
        "peak": found.most.total,
        "microbatches": found.microbatches, "layers_run": found.layers_run, "seconds": round(found.seconds, 1),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """The table; exit status 1 where something is outside of its bound."""
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.agreement", description=__doc__)
    parser.add_argument(
        "--measure", action="append", metavar="PLAN", help="measure this plan, as the table writes them"
    )
    parser.add_argument("--all", action="store_true", help="measure every stored plan again")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write what was measured")
    parser.add_argument("--json", action="store_true", help="one line of JSON per plan")
    options = parser.parse_args(arguments)
    stored = load()
    texts = options.measure or ([one["plan"] for one in stored] if options.all else [])
    measured = []
    for text in texts:
        measured.append(measure(parse(text)))
        _print(measured[-1], as_json=options.json)
        if options.output:
            write(options.output, measured)
    if not texts:
        for one in stored:
            _print(one, as_json=options.json)
    return int(any(outside(one) for one in measured or stored))


def load(path: Path = STORED) -> list[dict[str, Any]]:
    """Stored measurements."""
    from planner import library

    return list(library.read_yaml(path)["plans"]) if path.exists() else []


def write(path: Path, plans: list[dict[str, Any]]) -> None:
    """Measurements with where they come from."""
    from planner import library
    from planner.lab.run.record import origin

    library.write_whole(path, library.dump_yaml({**origin(), "plans": plans}))


def outside(one: dict[str, Any]) -> list[dict[str, Any]]:
    """What of a stored or fresh measurement the cost model misses."""
    return [found for found in compared(parse(one["plan"]), one["held"], one["peak"]) if not found["inside"]]


def _print(one: dict[str, Any], *, as_json: bool) -> None:
    rows = {found["what"]: found for found in compared(parse(one["plan"]), one["held"], one["peak"])}
    if as_json:
        print(json.dumps({**one, "memory": list(rows.values())}), flush=True)
        return
    activations, peak = rows["activations"], rows["peak"]
    states = (
        "" if all(rows[name]["inside"] for name in ("weights", "gradients", "optimizer_states")) else " states differ"
    )
    print(
        f"{one['plan']:66s} activations {activations['predicted_gib']:7.2f} / {activations['measured_gib']:7.2f} "
        f"{activations['error'] or 0.0:+6.1%}  peak {peak['predicted_gib']:7.2f} / {peak['measured_gib']:7.2f} "
        f"{peak['error']:+6.1%}{states}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
