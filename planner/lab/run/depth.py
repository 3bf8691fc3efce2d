"""A deep stage from two shallow ones, exactly: every program point's memory is a straight line in the number of layers.

A rank whose stages have many equal layers is run twice with few of them. Between two layers (in the forward and in the backward
pass of each microbatch) the most that was alive is noted. From one depth to the other the same point, counted from the
first or from the last layer, differs by what each layer in between adds: stored activations, weights gathered, gradients.
The peak of the deep stage is the largest of these lines at its depth. Points in the middle lie between both ends.
A stage whose layers are not of one kind from some layer on, or few, is run whole.
"""

import dataclasses
import itertools
from typing import Any

from planner.lab.reference.split import Split

SHALLOW = (3, 5)
"""Equal layers of a stage in both runs: the first and the last two are kept apart."""


def depths(split: Split, stage: int) -> tuple[Split, Split, float] | None:
    """Both shallow jobs and how many times their difference the deep one lies beyond the second; None to run it whole."""
    mine = split.stages_of(stage)
    equal = min(_equal_layers(split, number) for number in mine)
    if equal <= sum(SHALLOW):
        return None

    def shallow(keep: int) -> Split:
        stages = tuple(
            dataclasses.replace(one, layers=one.layers[: len(one.layers) - equal + keep]) if number in mine else one
            for number, one in enumerate(split.stages)
        )
        return dataclasses.replace(split, stages=stages)

    first, second = SHALLOW
    return shallow(first), shallow(second), (equal - second) / (second - first)


def _equal_layers(split: Split, number: int) -> int:
    """Layers at the end of a virtual stage that are of one kind."""
    kinds = [split.model.is_moe_layer(layer) for layer in split.stages[number].layers]
    count = len(list(itertools.takewhile(lambda kind: kind == kinds[-1], reversed(kinds))))
    return count if len(kinds) - count <= split.model.num_dense_layers else 0


def place(layer: int, layers: int) -> int | None:
    """Where a layer is, from either end: 0, -2, -1; None in the middle."""
    return 0 if layer == 0 else layer - layers if layer >= layers - 2 else None


def beyond(first: Any, second: Any, times: float) -> Any:
    """The deep stage's measurement from both shallow ones."""
    points = {
        key: dataclasses.replace(
            value, parts=_line(first.points[key].parts, value.parts, times), held=_line(first.points[key].held, value.held, times)
        )
        for key, value in second.points.items()
        if key in first.points  # three layers have no middle
    }  # fmt: skip
    return dataclasses.replace(
        second, points=points, parameters=_line(first.parameters, second.parameters, times),
        collectives=[_often(first.collectives, one, times) for one in second.collectives],
        seconds=max(first.seconds, second.seconds), host_bytes=_line(first.host_bytes, second.host_bytes, times),
    )  # fmt: skip


def _line(first: Any, second: Any, times: float) -> Any:
    """A number, or those of a dict, where the straight line through both has it."""
    if isinstance(second, dict):
        return {name: _line(first[name], value, times) for name, value in second.items()}
    return round(second + (second - first) * times)


def _often(first: list[dict[str, Any]], one: dict[str, Any], times: float) -> dict[str, Any]:
    """A collective with how often it runs, which is a line too."""
    before = next((other["times"] for other in first if {**other, "times": one["times"]} == one), one["times"])
    return {**one, "times": _line(before, one["times"], times)}
