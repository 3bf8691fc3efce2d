"""Every campaign predicted as if it had never been seen: constants fitted again without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.questions.accuracy.prediction import Pair, grouped
from tools.evidence.constants import Constant, constants, predict_with
from tools.evidence.refit import Refit, refit


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """One campaign that constants were calibrated on."""

    campaign: str
    refits: dict[str, Refit]
    """The constants that it had a part in, as they are without it."""


def held_back_pairs(
    pairs: Sequence[Pair], listed: Sequence[Constant] | None = None
) -> tuple[list[Pair], list[LeftOut]]:
    """The same runs in the same order, each predicted with the constants that its own campaign had no part in.

    Runs of campaigns on which nothing was calibrated keep their prediction. Also what became of the constants of each
    campaign that was left out.
    """
    listed = constants() if listed is None else listed
    answers = list(pairs)
    runs = [pair.run for pair in pairs]
    left = []
    for campaign, places in grouped(range(len(pairs)), lambda number: pairs[number].run.campaign).items():
        sources = {runs[number].source for number in places}
        concerned = [one for one in listed if sources & {*one.sources}]
        if not concerned:
            continue
        refits = refit(listed, runs, without=sources)
        values = {one.name: refits[one.name].value for one in concerned}
        unseen = predict_with([runs[number] for number in places], concerned, values)
        for number, predicted in zip(places, unseen, strict=True):
            answers[number] = Pair(run=runs[number], predicted=predicted)
        left.append(LeftOut(campaign=campaign, refits={one.name: refits[one.name] for one in concerned}))
    return answers, left
