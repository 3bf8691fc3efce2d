"""The kinds of work that a layer is made of, and the sizes that one rank sees: what layers.py builds its lists from."""

from functools import cached_property

import numpy as np

from planner.arrays import Floats
from planner.cost.layer.routing import busiest
from planner.layout import Layout, Module, Recompute
from planner.model import ModelSpec
from planner.record import record
from planner.trainer import Trainer
from planner.workload import LOW_PRECISIONS, Workload

Number = Floats | float

NEVER = Module(0)
REPEATED = Module.EVERY_SECOND_MATMUL
"""On every operator that per-operator recompute repeats, wholly or the ``share`` of it: every second product, norms, element-wise
operators and grouped expert products (``cost.layer.save_list``)."""


@record
class Operator:
    """One kernel, or a few that belong together."""

    name: str
    """Name within the layer."""
    module: Module = NEVER
    """Units of selective recompute that repeat it."""
    saved: Number = 0.0
    """Bytes kept for the backward pass, freed when its module is recomputed."""
    kept: Number = 0.0
    """Bytes kept for the backward pass whatever module is recomputed (full recompute frees them)."""
    launches: tuple[Number, Number] = (1.0, 1.0)
    """Kernels launched forward and backward."""
    captured: bool = True
    """A CUDA graph of the layer holds it; not what depends on how many tokens each expert gets."""
    waits: bool = False
    """The host waits here until the GPU is done with it."""
    share: float = 1.0
    """Part of it that EVERY_SECOND_MATMUL repeats."""
    ends: bool = False
    """The last of a layer: the backward pass needs its inputs, not its output, so recompute may stop before it."""
    kept_by_recompute: bool = False
    """Full recompute does not repeat it, and what it keeps stays."""
    repeats: float = 1.0
    """Equal ones that it stands for: seconds and FLOP are of one, bytes and launches of all."""
    forward_only: bool = False
    """Its weights and inputs are frozen: no backward pass."""
    again: bool = False
    """It runs once more in the backward pass, whatever is recomputed."""


@record
class Gemm(Operator):
    """Y[m, n] = X[m, k] W[k, n], ``groups`` times; backward dX (dgrad) and, where W is trained, dW (wgrad)."""

    m: Number
    """Rows: tokens (of one group)."""
    n: Number
    """Columns."""
    k: Number
    """Inner dimension."""
    groups: Number = 1.0
    """Equal GEMMs in one launch: local experts, or heads of unfused attention."""
    trained: bool = True
    """W is a weight that gets a gradient."""
    low_precision: bool = True
    """Runs in fp8 or fp4 when the workload does."""
    quantised: tuple[bool, bool] = (False, False)
    """Its input, and its output gradient, come out of the kernel before in the precision that it needs."""
    gathered: tuple[Number, Number] = (1.0, 1.0)
    """Ranks from which its input, and its output gradient, are gathered after each has quantised its own rows."""
    useful: Number = 1.0
    """Part of its FLOP that counts as the model's: less than 1 where a busy expert rank stands for all."""
    activations: bool = False
    """W is an activation too (unfused attention): both gradients are dgrad-like."""


@record
class Attention(Operator):
    """Fused softmax(Q K^T) V; causal."""

    heads: Number
    """Query heads of one rank."""
    kv_heads: Number
    """Key-value heads of one rank."""
    documents: Number
    """Documents of one sequence, each with queries and keys of its own."""
    seq_q: Number
    """Queries of one document on one rank."""
    seq_kv: Number
    """Keys they attend to, causality not counted."""
    head_dim: float = 0.0
    """Width of its heads where it is not the text model's: an image encoder's, not causal and without windows."""


@record
class MemoryBound(Operator):
    """An operator that only moves bytes."""

    kind: str
    """Class of operator in the hardware profile."""
    forward: Number
    """Bytes read and written forward."""
    backward: Number
    """Bytes read and written backward."""


@record
class Scan(Operator):
    """The chunked scan of linear attention: kernels that work on all chunks at once, and one from chunk to chunk."""

    forward: Number
    """Bytes read and written forward by kernels that work on all chunks at once."""
    backward: Number
    """The same backward."""
    carried: tuple[Number, Number]
    """Bytes that the kernels read and write which carry a state from chunk to chunk, forward and backward."""
    steps: tuple[Number, Number]
    """Chunks that they pass one after the other, forward and backward; 0 where a state is only scaled and added to."""
    products: tuple[Number, Number]
    """FLOP of matrix products that take time in addition to the bytes, forward and backward."""
    flop: Number
    """FLOP forward."""


@record
class GatheredRows(Operator):
    """A kernel that is bound by its FLOP, at a part of the peak, or by the rate at which it gathers single rows."""

    flop: tuple[Number, Number]
    """Forward and backward, what is repeated counted."""
    gathered: tuple[Number, Number]
    """Bytes of rows that all heads of one pass read together, forward and backward."""
    efficiency: float
    """Part of the peak of ``dtype``."""
    dtype: str = "bf16"
    """What its FLOP are computed in."""
    model_flop: Number
    """FLOP forward that count as the model's."""
    heads: Number = 1.0
    """Query heads of one rank; so many passes gather as the device needs for them."""


@record
class Collective:
    """One collective of a layer and microbatch."""

    name: str
    group: str
    """tp, cp or ep: the part of the breakdown."""
    op: str
    """Operation as the hardware profile names it."""
    size: Number
    """Bytes as nccl-tests counts them: the full buffer."""
    n: Number
    """Ranks in the group; 1 costs nothing."""
    stride: Number
    """Distance between neighbouring ranks of the group."""
    backward: bool
    """Runs in the backward pass; else in the forward pass, and again when its module is recomputed."""
    count: Number = 1.0
    """How many times."""
    module: Module = NEVER
    """Units of selective recompute that repeat it."""
    overlap: str = ""
    """Name of the trainer's overlap that can hide it; '' = never hidden."""
    overlaps_with: str = ""
    """The work it hides behind: 'operator.forward', '.dgrad', '.wgrad', or 'layer' for half of the pass."""
    ends: bool = False
    """As of an operator: nothing that the backward pass needs comes after it."""
    copies: float = 0.0
    """Of an all-to-all: experts of each token, drawn at random, when it is sent once to each place that holds some of
    them; 0 = ``size`` is sent as it is."""
    units: float = 0.0
    """Multiprocessors that its kernels take; 0 = not known."""
    bandwidth: float = float("inf")
    """Bytes/s that its kernels cannot pass inside a node, whatever the link."""
    neighbours: float = 0.0
    """Routed experts of the model where the ``copies`` of a token go to neighbouring ones instead of random ones."""
    kept_by_recompute: bool = False
    """Full recompute does not repeat it."""
    chunked: bool = False
    """Split in n pieces pipelined with its GEMM: one piece is never hidden."""


@record
class Shard:
    """Sizes that one rank sees, as float columns of the distinct shapes of a search."""

    workload: Workload
    trainer: Trainer
    layout: Layout
    ep_stride: Number

    @property
    def model(self) -> ModelSpec:
        """The model of the workload."""
        return self.workload.model

    @cached_property
    def tp(self) -> Floats:
        """t."""
        return np.asarray(self.layout.tp, dtype=float)

    @cached_property
    def cp(self) -> Floats:
        """c."""
        return np.asarray(self.layout.cp, dtype=float)

    @cached_property
    def ep(self) -> Floats:
        """e."""
        return np.asarray(self.layout.ep, dtype=float)

    @cached_property
    def etp(self) -> Floats:
        """Tensor parallel degree of the experts."""
        return np.asarray(self.layout.etp, dtype=float)

    @cached_property
    def batch(self) -> Floats:
        """b: sequences."""
        return np.asarray(self.layout.micro_batch_size, dtype=float) * self.workload.sequences

    @cached_property
    def split(self) -> Floats:
        """t where sequence parallelism splits norms and residuals, else 1."""
        return np.where(np.asarray(self.layout.sequence_parallel) == 1, self.tp, 1.0)

    @cached_property
    def tokens(self) -> Floats:
        """T = b s / c."""
        return self.batch * self.workload.sequence_length / self.cp

    @cached_property
    def tokens_split(self) -> Floats:
        """T_s: T / t with sequence parallelism, else T."""
        return self.tokens / self.split

    @cached_property
    def listed(self) -> Floats:
        """1 where recompute goes by the save list (``cost.layer.save_list``), else 0."""
        modules = np.asarray(self.layout.recompute_modules) & REPEATED
        return ((np.asarray(self.layout.recompute) == Recompute.SELECTIVE) & (modules != 0)).astype(float)

    @property
    def dropout(self) -> float:
        """1 where the model's own dropout is on; under adapters it is theirs."""
        return float(self.trainer.stored.dropout and not self.workload.lora_rank)

    @property
    def element(self) -> float:
        """Bytes of one activation."""
        return self.workload.element

    @property
    def input_element(self) -> float:
        """Bytes of one saved input of a linear layer: 1 in fp8, half and a scale byte per 16 in fp4."""
        precision = self.workload.precision
        if precision not in LOW_PRECISIONS or "saved_inputs" not in self.trainer.kernels.fp8:
            return self.element
        return 0.5625 if precision == "nvfp4" else 1.0

    @property
    def gathered_element(self) -> float:
        """Bytes of one element of what tensor parallelism gathers for a linear layer."""
        return 1.0 if "gathers" in self.trainer.kernels.fp8 and self.workload.precision == "fp8" else self.input_element

    @property
    def quantising_ranks(self) -> Number:
        """Ranks that share the cast of what is gathered for a linear layer: t with sequence parallelism and gathers in fp8."""
        return self.split if self.gathered_element < self.element else 1.0

    @property
    def kv_heads(self) -> Floats:
        """Key-value heads of one rank: k / t, at least one (replicated)."""
        return np.maximum(self.model.num_kv_heads / self.tp, 1.0)

    @cached_property
    def expert_rows(self) -> Floats:
        """Token copies that one rank's experts process: the busiest rank's, T / t K etp imbalance.

        Routed tokens are first split over tp (sequence parallelism); a balanced all-to-all gives every rank as many
        copies as it sent, and the etp ranks that share experts see each other's. Without sequence parallelism etp = tp
        and all of these ranks hold the same tokens: T K.
        """
        return self.tokens / self.tp * self.model.top_k * self.etp * self.busiest

    @cached_property
    def busiest(self) -> Floats:
        """Tokens of the busiest expert rank over the mean."""
        return busiest(self.workload, self.ep)


def logit_bytes(shard: Shard) -> float:
    """Bytes per logit that are alive at the peak: ``Trainer.logit_bytes``, which is that of half precision.

    fp32: the compiled loss, 2 + 2 there, keeps logits and gradient 4 + 4; others need no fp32 copy, and so 2 less where logits in
    half precision lie beside it, unless they are held: then they are 4.  [seen in the fake run of torch 2.13: 8 bytes]
    """
    alive = shard.trainer.stored.logit_bytes
    if shard.element < 4 or not alive:
        return alive
    held = shard.trainer.stored.loss == "kept" and alive == EAGER_LOSS
    return max(8.0, alive - alive % 4.0) + 4.0 * held


EAGER_LOSS = 14.0
"""Bytes per logit of a loss in plain kernels: logits 2, log softmax 4, the gradients of what it picks and of the logits 4 + 4."""


def kept_logit_bytes(shard: Shard) -> float:
    """Bytes per logit that the outputs of the model hold until the backward pass has ended."""
    if shard.trainer.stored.loss != "kept":
        return 0.0
    return max(shard.element, shard.trainer.stored.logit_bytes - EAGER_LOSS)


LOSS_PIECE = 256.0
"""Tokens of one piece of a chunked loss.  [TRL, sft_trainer.py: _CHUNKED_LM_HEAD_CHUNK_SIZE]"""
LOSS_WORDS = 2048.0
"""Words of one piece of the vocabulary.  [prime-rl, configs: auto_setup_fused_lm_head_chunk_size]"""
LOSS_PIECES = 8.0
"""Pieces of torchtitan's chunked loss.  [torchtitan, components/loss.py: ChunkedLossWrapper.Config.num_chunks]"""


def loss_share(shard: Shard) -> Number:
    """Part of the logits that is there at once: all, one of LOSS_PIECES, a piece of LOSS_PIECE tokens, or of T h / V where the loss
    is fused.

    [Liger-Kernel, ops/fused_linear_cross_entropy.py: T / ceil(V / h) tokens]
    """
    if shard.trainer.stored.loss == "pieces":
        return 1.0 / LOSS_PIECES
    if shard.trainer.stored.loss == "chunked":
        return np.minimum(LOSS_PIECE / shard.tokens, 1.0)
    words = {"fused_linear": float(shard.model.hidden_size), "vocabulary": LOSS_WORDS}.get(shard.trainer.stored.loss)
    return min(words / shard.model.vocab_size, 1.0) if words else 1.0


def loss_bytes(shard: Shard) -> float:
    """Bytes per logit that the cross entropy reads and writes, in each pass.

    Half precision: 2 + 4 times ``loss_passes``. fp32: plain kernels do without the cast, 2 + 4 less; one kernel moves 4 + 4.
    [torch 2.13, F.cross_entropy of logits.float(): log_softmax reads and writes fp32, backward reads both and writes]
    """
    passes = shard.trainer.kernels.loss_passes
    if shard.element < 4:
        return 6.0 * passes
    return 8.0 if passes < 2 else 6.0 * passes - 6.0
