"""Workload: what is trained. Model, sequence length, global batch, precision, optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from planner import model as models
from planner.errors import PlannerError, UnknownNameError
from planner.model import ModelSpec
from planner.record import record
from planner.schema import Rule, check, read, within
from planner.trainer_records import WORDS

PRECISIONS: dict[str, str] = {
    "bf16": "bf16 compute, fp32 master weights",
    "fp16": "fp16 compute with loss scaling, fp32 master weights",
    "fp32": "fp32 everywhere",
    "bf16_true": "bf16 everywhere: weights, gradients and optimizer states, no fp32 master weights",
    "fp8": "fp8 linear layers, one scale per tensor (current or delayed), rest bf16",
    "fp8_row": "fp8 linear layers, one scale per row of tokens or weights, rest bf16",
    "fp8_block": "fp8 linear layers, one scale per block of 128, rest bf16",
    "mxfp8": "fp8 linear layers, one scale per 32 values, rest bf16",
    "nvfp4": "fp4 linear layers, two-level scales, rest bf16",
}
LOW_PRECISIONS = ("fp8", "fp8_row", "fp8_block", "mxfp8", "nvfp4")
"""Precisions whose linear layers run in 8 or 4 bits."""
FP8_WEIGHTS = ("fp8", "fp8_block", "mxfp8")
"""Those in which trained weights can lie as they are multiplied."""
OPTIMIZERS: dict[str, str] = {
    "adam": "Adam, fp32 master weights and both moments in fp32",
    "adam_bf16": "Adam, fp32 master weights, both moments in bf16",
    "adam_8bit": "Adam, fp32 master weights, both moments in 8 bit",
    "paged_adam": "Adam, fp32 master weights, both moments in fp32 pages of host memory",
    "paged_adam_8bit": "Adam, fp32 master weights, both moments in 8 bit in pages of host memory",
    "adafactor": "Adafactor, fp32 master weights, second moments by rows and columns, no first moment",
    "lion": "Lion, fp32 master weights and one momentum in fp32",
    "muon": "Muon, fp32 master weights and one momentum in fp32",
    "sgd": "SGD with momentum in fp32, fp32 master weights",
}
PAGED = ("paged_adam", "paged_adam_8bit")
"""Optimizers whose states are pages that live in host memory and come to the GPU for the update."""
CALLED = {
    "bfloat16": "bf16", "bf16_mixed": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "fp4": "nvfp4",
    "adamw": "adam", "adamw_torch": "adam", "adamw_8bit": "adam_8bit", "paged_adamw": "paged_adam",
    "paged_adamw_8bit": "paged_adam_8bit",
}  # fmt: skip
"""Precisions and optimizers by what people call them; decoupled weight decay takes no memory."""
OBJECTIVES: dict[str, str] = {
    "lm": "next-token prediction (pre-training, supervised fine-tuning)",
    "dpo": "direct preference optimization: pairs of sequences, and a forward pass of a frozen reference model",
}
LORA_TARGETS: dict[str, tuple[str, ...]] = {
    "all": (),
    "attention": ("qkv", "attention_out", "mla_down", "mla_q_up"),
    "qkv": ("qkv", "mla_down", "mla_q_up"),
    "qv": ("qkv", "mla_q_up"),
}
"""Linear layers with adapters by their names in the cost model; () = all of them. qv: of the projections query and value alone."""
LORA_WHOLE: dict[str, tuple[str, ...]] = {
    "none": (), "embedding": ("embedding",), "head": ("head",), "both": ("embedding", "head"),
}  # fmt: skip
"""Tables that are trained as a whole beside adapters, each in a copy of its own (peft: modules_to_save)."""
IMAGE_ENCODERS = {"frozen": "forward only, no gradients and no states", "trained": "as the text model"}
"""What happens to an image encoder."""
FROZEN_WEIGHTS = WORDS["frozen_weights"]
"""How linear layers of a frozen base lie in memory; embedding, head and norms stay as they are."""

IMBALANCE = "a number from 1 to 1024, or 0 for that of a trained router"


def usual_name(text: str) -> str:
    """A precision or an optimizer as it is called here; what is not known stays."""
    name = text.lower().replace("-", "_")
    return CALLED.get(name, name)


@record
class Workload:
    """One training job, without saying where or how it runs."""

    model: ModelSpec
    """Architecture."""
    sequence_length: Annotated[int, within(1, 2**27)]
    """Tokens per sequence."""
    global_batch_size: Annotated[int, within(1, 2**24)]
    """Samples per optimizer step: sequences, or pairs of them (``objective``)."""
    precision: str = "bf16"
    """One of PRECISIONS."""
    optimizer: str = "adam"
    """One of OPTIMIZERS."""
    lora_rank: Annotated[int, within(0, 65536)] = 0
    """Rank of the low-rank adapters; 0 = every weight is trained."""
    lora_targets: str = "all"
    """Linear layers that carry adapters, one of LORA_TARGETS."""
    lora_whole: str = "none"
    """Tables that are trained as a whole beside adapters, one of LORA_WHOLE."""
    frozen_weights: str = "bf16"
    """Dtype of frozen linear layers under adapters, one of FROZEN_WEIGHTS."""
    document_length: int = 0
    """Tokens of a mean document where several are packed into a sequence and attend to themselves only; 0 = one fills it."""
    image_tokens: int = 0
    """Tokens of a sequence that an image encoder makes; 0 = text only, its weights are there all the same."""
    image_encoder: str = "frozen"
    """Whether an image encoder is trained, one of IMAGE_ENCODERS."""
    expert_imbalance: Annotated[float, Rule(most=1024.0, kept=True, says=IMBALANCE)] = 1.0
    """Tokens of the busiest expert rank over the mean; 1 = balanced by force, as in benchmarks; 0 = as a router trained with a
    balancing loss leaves it, by the number of experts on a rank (``cost.layer.routing``)."""
    independent_choices: ClassVar[float] = 0.0
    """Choices of experts in a microbatch that are independent of each other, where expert_imbalance is 0; 0 = as under a balancing
    loss (``cost.layer.routing``)."""
    objective: str = "lm"
    """What is minimised, one of OBJECTIVES. In DPO a sample is a chosen and a rejected sequence, which run as one batch of two, and
    the same forward pass goes through a frozen reference model.  [Rafailov 2023, arXiv 2305.18290, equation 7]"""

    def __post_init__(self) -> None:
        check(self)
        choices: dict[str, Mapping[str, object]] = {
            "precision": PRECISIONS,
            "optimizer": OPTIMIZERS,
            "lora_targets": LORA_TARGETS,
            "lora_whole": LORA_WHOLE,
            "frozen_weights": FROZEN_WEIGHTS,
            "objective": OBJECTIVES,
            "image_encoder": IMAGE_ENCODERS,
        }
        for field, known in choices.items():
            if getattr(self, field) not in known:
                raise UnknownNameError(field, getattr(self, field), known)
        if self.frozen_weights != "bf16" and not self.lora_rank:
            raise PlannerError(
                f"frozen_weights is {self.frozen_weights}, but without adapters every weight is trained; give --lora-rank too"
            )
        if self.lora_whole != "none" and not self.lora_rank:
            raise PlannerError(
                f"lora_whole is {self.lora_whole}, but without adapters every weight is trained; give --lora-rank too"
            )
        if 0.0 < self.expert_imbalance < 1.0:
            raise PlannerError(f"expert_imbalance is {self.expert_imbalance}; it must be {IMBALANCE}")
        if self.image_tokens < 0 or self.image_tokens > self.sequence_length:
            raise PlannerError(
                f"image_tokens is {self.image_tokens}; it must be a whole number from 0 to the {self.sequence_length} tokens of a "
                "sequence"
            )
        if self.image_tokens and self.model.vision is None:
            raise PlannerError(f"image_tokens is {self.image_tokens}, but {self.model.name} has no image encoder; leave it out")
        if self.trains_images and (self.lora_rank or self.model.vision is None):
            why = "adapters are on the text model alone" if self.lora_rank else f"{self.model.name} has none"
            raise PlannerError(f"image_encoder is trained, but {why}; leave it frozen")
        if self.document_length > self.sequence_length:
            raise PlannerError(
                f"document_length is {self.document_length}; it must be a whole number from 0 to the {self.sequence_length} "
                "tokens of a sequence"
            )

    @property
    def trains_images(self) -> bool:
        """The image encoder gets gradients."""
        return self.image_encoder == "trained"

    def trains(self, table: str) -> bool:
        """A table, "embedding" or "head", gets gradients: always, but under adapters only where it is trained as a whole."""
        return not self.lora_rank or table in LORA_WHOLE[self.lora_whole]

    @property
    def element(self) -> float:
        """Bytes of one activation."""
        return 4.0 if self.precision == "fp32" else 2.0

    @property
    def tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.sequence_length * self.global_batch_size * self.sequences

    @property
    def sequences(self) -> int:
        """Sequences of one sample."""
        return 2 if self.objective == "dpo" else 1

    @property
    def forwards(self) -> float:
        """Forward passes for each backward pass: that of the reference model comes on top."""
        return 2.0 if self.objective == "dpo" else 1.0

    @property
    def reference(self) -> bool:
        """A reference model has weights of its own; under adapters the base with adapters switched off is one.
        [TRL, dpo_trainer.py: ref_model; torchtune, recipes/lora_dpo_distributed.py: disable_adapter]"""
        return self.objective == "dpo" and not self.lora_rank

    def replace(self, **changes: Any) -> Workload:
        """The workload with some fields changed. Raises PlannerError."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for YAML or JSON; ``from_dict`` reads it back."""
        return {**vars(self), "model": models.to_dict(self.model)}

    @staticmethod
    def from_dict(data: object, *, where: str = "workload") -> Workload:
        """A workload from plain data. Raises PlannerError that names the key and what is allowed."""
        return read(Workload, data, where)


def peak_dtype(precision: str) -> str:
    """Dtype whose dense peak the MFU of a precision refers to."""
    return {"fp16": "bf16", "bf16_true": "bf16", "mxfp8": "fp8", "fp8_row": "fp8", "fp8_block": "fp8", "nvfp4": "fp4"}.get(
        precision, precision
    )


def default_global_batch_size(model_parameters: float, sequence_length: int, num_gpus: int) -> int:
    """A training-sized batch, in sequences: about 1M tokens for small models, 4M from 3B parameters, 16M from 300B.

    The sizes that published pre-training runs use: GPT-3 0.5M-3.2M tokens [Brown 2020, table 2.1], Llama 2 and 3.1 8B
    4M, Llama 3.1 405B 16M [Dubey 2024, section 3.4.1], DeepSeek-V3 63M at its end. Rounded down to a power of two times the
    odd part of the number of GPUs, so that it divides by every data parallel degree, and, up to 4096 GPUs, never
    fewer sequences than GPUs.
    """
    tokens = 2**20 if model_parameters < 3e9 else 2**22 if model_parameters < 300e9 else 2**24
    odd = num_gpus // (num_gpus & -num_gpus)
    sequences = max(1, tokens // (sequence_length * odd))
    batch = odd << (sequences.bit_length() - 1)
    while batch < num_gpus <= 4096:
        batch *= 2
    return batch
