"""What one step of RL works on: algorithm, prompts and samples, lengths, and what runs beside the policy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Annotated, Any

from planner import model as models
from planner.errors import PlannerError, UnknownNameError
from planner.model import ModelSpec
from planner.record import record
from planner.rl.answer_lengths import AnswerLengths
from planner.schema import Line, check, plain_fields, read, within
from planner.serving.traffic import Speculation


@record
class Algorithm:
    """What an algorithm runs in a step."""

    what: str
    critic: bool = False
    """A value model of the policy's size is trained and evaluated."""
    reference: bool = False
    """Log-probs of a frozen reference are part of the loss."""
    samples: int = 16
    """Usual answers to a prompt."""
    offline: bool = False
    """Answers are recorded: nothing is generated, scored or synchronised."""
    generated: float = 1.0
    """Answers that a round of sampling has for one that is trained on."""
    keep_rate: float = 1.0
    """Share of prompts whose group of answers is trained on where nobody says it."""
    fewest: int = 1
    """Answers to a prompt that its advantages need."""


ALGORITHMS: Mapping[str, Algorithm] = {
    "grpo": Algorithm(what="group-relative advantages, KL to a reference", reference=True, fewest=2),
    "dapo": Algorithm(
        what="GRPO without KL; groups without a gradient are sampled again", generated=3.0, keep_rate=0.5, fewest=2
    ),
    "gspo": Algorithm(what="GRPO with ratios of whole sequences", reference=True, fewest=2),
    "rloo": Algorithm(what="leave-one-out baseline, KL to a reference", reference=True, samples=4, fewest=2),
    "reinforce++": Algorithm(what="REINFORCE with a batch baseline, KL to a reference", reference=True, samples=4),
    "ppo": Algorithm(what="a value model gives advantages, KL to a reference", critic=True, reference=True, samples=1),
    "dpo": Algorithm(what="recorded pairs of answers, the loss of DPO", reference=True, samples=2, offline=True, fewest=2),
    "online-dpo": Algorithm(what="two sampled answers a prompt, the loss of DPO", reference=True, samples=2, fewest=2),
}
"""GRPO [arXiv 2402.03300], DAPO [2503.14476; its recipe's gen_prompt_bsz is three times the batch], GSPO [2507.18071], RLOO
[2402.14740], REINFORCE++ [2501.03262], PPO [2203.02155], DPO [2305.18290], online DPO [2402.04792]."""


@record
class RlWorkload:
    """One step of RL, without saying where or how it runs."""

    model: ModelSpec
    """The policy."""
    algorithm: Line = "grpo"
    """One of ALGORITHMS."""
    prompts: Annotated[int, within(1, 2**22)] = 64
    """Prompts of a step."""
    samples: Annotated[int, within(1, 2**16)] = 16
    """Answers to each."""
    prompt_length: Annotated[float, within(1, 1e7)] = 512
    """Tokens of a prompt, mean."""
    answers: AnswerLengths
    """Tokens of an answer."""
    max_length: Annotated[int, within(2, 1e8)] = 8192
    """Tokens of prompt and answer at most: what a sequence is packed to."""
    train_batch: Annotated[int, within(0, 2**24)] = 0
    """Answers of one optimizer step; 0 = all of the step."""
    epochs: Annotated[int, within(1, 64)] = 1
    """Passes over the answers of a step."""
    generated: Annotated[float, within(1, 100)] = 1.0
    """Answers that a round of sampling has for one that is trained on."""
    keep_rate: Annotated[float, within(0.001, 1)] = 1.0
    """Share of prompts whose answers are neither all right nor all wrong; of the others there is no gradient, and further rounds
    sample until a batch is full (dynamic sampling)."""
    reference: bool = True
    """Log-probs of a frozen reference are part of the loss."""
    critic: ModelSpec | None = None
    """The value model; None: none."""
    reward_model: ModelSpec | None = None
    """A model that scores answers; None: a rule."""
    reward_s: Annotated[float, within(0, 1e5)] = 0.0
    """Seconds that rewards take after the last answer (sandboxes, rules on hosts)."""
    turns: Annotated[int, within(1, 10_000)] = 1
    """Turns of an answer; between two of them a tool runs."""
    tool_s: Annotated[float, within(0, 1e5)] = 0.0
    """Seconds of a tool call, mean."""
    tool_tokens: Annotated[float, within(0, 1e7)] = 0.0
    """Tokens that a tool call adds to the context, mean."""
    speculation: Speculation | None = None
    """Draft tokens in generation."""
    precision: Line = "bf16"
    """Of training, as ``workload.PRECISIONS``."""
    lora_rank: Annotated[int, within(0, 65536)] = 0
    """Rank of adapters; 0 = every weight is trained."""

    def __post_init__(self) -> None:
        check(self)
        if self.algorithm not in ALGORITHMS:
            raise UnknownNameError("algorithm", self.algorithm, ALGORITHMS)
        if self.algorithm in ("dpo", "online-dpo") and self.samples != 2:
            raise PlannerError(f"samples is {self.samples}, and {self.algorithm} compares pairs of answers; it must be 2")
        if self.prompt_length + self.answers.most > self.max_length * (1.0 + 1e-9) + 1.0:
            raise PlannerError(
                f"prompts of {self.prompt_length:g} tokens and answers of up to {self.answers.most:g} exceed max_length "
                f"{self.max_length}; raise --max-length or cut the answers"
            )
        if self.samples < (fewest := ALGORITHMS[self.algorithm].fewest):
            raise PlannerError(
                f"{self.algorithm} with {self.samples} answer to a prompt: answers to one prompt are compared, and the advantage "
                f"of a single one is zero; set samples to {fewest} or more, or take reinforce++ or ppo"
            )
        if self.train_batch > self.trained:
            raise PlannerError(
                f"train_batch is {self.train_batch}, but a step trains on {self.trained} answers; lower it or sample more"
            )
        if self.train_batch and self.trained % self.train_batch:
            raise PlannerError(f"train_batch {self.train_batch} does not divide the {self.trained} answers of a step")

    @property
    def waits(self) -> bool:
        """Whether answers wait for tools between their turns."""
        return self.turns > 1 and self.tool_s > 0.0

    @property
    def offline(self) -> bool:
        """Answers are recorded and not generated."""
        return ALGORITHMS[self.algorithm].offline

    @property
    def trained(self) -> int:
        """Answers that a step trains on."""
        return self.prompts * self.samples

    @property
    def sampled(self) -> float:
        """Answers of a round of sampling."""
        return self.trained * self.generated

    @property
    def rounds(self) -> float:
        """Expected rounds until a batch is full: 1 + the sum over r of P(of r rounds' prompts fewer than a batch are kept).

        Of r N prompts a binomial number is kept, here with its normal approximation.  [DAPO, arXiv 2503.14476, equation 11]
        """
        kept, found, missing, tried = self.keep_rate, 1.0, 1.0, 0.0
        while kept < 1.0 and missing > 1e-6:
            tried += self.prompts * self.generated
            missing = NormalDist(tried * kept, math.sqrt(tried * kept * (1.0 - kept))).cdf(self.prompts - 0.5)
            found += missing
        return found

    @property
    def updates(self) -> int:
        """Optimizer steps of a step."""
        return self.epochs * (self.trained // self.train_batch if self.train_batch else 1)

    @property
    def context_tokens(self) -> float:
        """Tokens of a prompt and of what tools add, mean."""
        return self.prompt_length + (self.turns - 1) * self.tool_tokens

    @property
    def tokens(self) -> float:
        """Tokens that a step trains on, prompts included."""
        return self.trained * (self.context_tokens + self.answers.mean)

    def replace(self, **changes: Any) -> RlWorkload:
        """With some fields changed. Raises PlannerError."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; ``from_dict`` reads it back."""
        found = plain_fields(self)
        for name in ("model", "critic", "reward_model"):
            if name in found:
                found[name] = models.to_dict(getattr(self, name))
        return found

    @classmethod
    def from_dict(cls, data: object, *, where: str = "workload") -> RlWorkload:
        """From plain data. Raises PlannerError."""
        return read(cls, data, where)
