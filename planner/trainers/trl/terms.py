"""What TRL alone does: its loss multiplies every piece by an fp32 copy of the head."""

from dataclasses import dataclass

from planner.cost.own_terms import OwnTerms
from planner.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Terms(OwnTerms):
    """Terms of TRL."""

    def head_bytes(self, trainer: Trainer) -> float:
        """The head in fp32, 4, which autocast casts back for the product, 2.  [trl/trainer/sft_trainer.py, _chunk: w.float()]"""
        return 6.0 if trainer.stored.loss == "chunked" else 0.0
