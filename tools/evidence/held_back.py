"""Every source predicted as if it had never been seen: constants fitted again without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.questions.accuracy.prediction import Pair
from tools.evidence.constants import Constant, constants, predict_with
from tools.evidence.refit import Refit, refit


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """One source that constants were calibrated on."""

    source: str
    refits: dict[str, Refit]
    """The constants that it had a part in, as they are without it."""


def held_back_pairs(
    pairs: Sequence[Pair], listed: Sequence[Constant] | None = None
) -> tuple[list[Pair], list[LeftOut]]:
    """The same runs in the same order, each predicted with the constants that its own source had no part in.

    Runs of sources on which nothing was calibrated keep their prediction. Also what became of the constants of each
    source that was left out.
    """
    listed = constants() if listed is None else listed
    answers = list(pairs)
    runs = [pair.run for pair in pairs]
    sources = sorted({source for one in listed for source in one.sources})
    left = []
    for source in sources:
        refits = refit(listed, runs, without=source)
        concerned = [one for one in listed if source in one.sources]
        places = [number for number, pair in enumerate(pairs) if pair.run.source == source]
        values = {one.name: refits[one.name].value for one in concerned}
        unseen = predict_with([runs[i] for i in places], concerned, values)
        for number, predicted in zip(places, unseen, strict=True):
            answers[number] = Pair(run=runs[number], predicted=predicted)
        left.append(LeftOut(source=source, refits={one.name: refits[one.name] for one in concerned}))
    return answers, left
