"""What TRL alone does: its loss multiplies every piece by an fp32 copy of the head, and that of DPO has scores by its version."""

from dataclasses import dataclass

from planner.cost.own_terms import OwnTerms
from planner.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Terms(OwnTerms):
    """Terms of TRL."""

    pair_logits: float = 0.0
    """Bytes per logit of DPO before 0.15 (option ``pair_loss``); 0: those of today."""

    def head_bytes(self, trainer: Trainer) -> float:
        """The head in fp32, 4, which autocast casts back for the product, 2.  [trl/trainer/sft_trainer.py, _chunk: w.float()]"""
        return 6.0 if trainer.stored.loss == "chunked" else 0.0

    def pair_bytes(self) -> float:
        """Of all pairs at once, with those of the reference.  [trl/trainer/dpo_trainer.py: concatenated_forward]"""
        return self.pair_logits
