"""Kinds of facts of an engine: values by card, graphs, own all-reduce, accounting of memory; generations of devices."""

from __future__ import annotations

from dataclasses import field
from functools import cache
from typing import Annotated

import numpy as np

from planner.arrays import Floats, unique
from planner.hardware import HardwareProfile
from planner.linear_attention import KINDS as LINEAR_KINDS
from planner.record import record
from planner.schema import Bytes, Line, Name, Positive, keys, one_of, within
from planner.serving.serving_layout import WEIGHTS

HOST = ("step", "sequence", "streamed", "relayed", "launch", "exposed", "response", "prompt_token", "first_token")
"""Host times: of one step; of one sequence in it, and what of that is the response with its token, which only a stream sends; of
its token on the way from one pipeline stage's host to the next; of one kernel outside a graph, and what of that the GPU waits for
however long it takes itself; of a response with its tokens in the one process of a server that sends them all (0: not measured);
before its first token, of one prompt token (tokeniser) and of a request (client, server)."""
SCHOOLS = ("share_of_total", "reserve", "share_of_free")
HOST_WEIGHTS = ("none", "streams", "computes")
PARTS = ("context", "group", "graphs")
FORMATS = tuple(dict.fromkeys((*WEIGHTS, "fp8_cache")))
GENERATIONS = ("Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell", "CDNA2", "CDNA3", "CDNA4")
"""Architectures of NVIDIA and AMD, oldest first; those of a profile begin with one of these."""
KINDS = ("latent", "sparse", "sinks", "chunked", *LINEAR_KINDS)
"""What a model may have that not every engine runs: MLA, an indexer, attention sinks, chunked attention, linear attention."""
DEGREES = ("attn_dp", "dcp")
"""Degrees that not every engine has: attention data parallelism, and the cache of a sequence split by position."""
Count = Annotated[float, within(0, 1e9)]
FUSING = ("norm", "all_reduce", "attention", "activation")
"""Kernels that may quantise what they write: norms, norms that an all-reduce does, attention, the activation of an MLP."""


@record
class Case:
    """A value, and the card and layout that it is for."""

    value: float = 0.0
    """Sequences, tokens or a share."""
    size: Bytes = 0.0
    """Bytes, in place of ``value``."""
    memory: Bytes = 0.0
    """Least memory of the device."""
    arch: tuple[Line, ...] = ()
    """Generations of the device; empty = any."""
    never: tuple[Name, ...] = ()
    """Beginnings of names of devices that it is not for."""
    gpus: Annotated[int, within(1, 1e6)] = 1
    """Least number of GPUs of a stage, or of an engine, as the method that reads it counts."""

    def suits(self, hardware: HardwareProfile) -> bool:
        """Whether it is for this device."""
        right = not self.arch or generation(hardware) in self.arch
        name = hardware.name.lower()
        return right and hardware.usable_memory >= self.memory and not any(name.startswith(one) for one in self.never)


Cases = tuple[Case, ...]


@record
class Fused:
    """Kernels that quantise what they write for the product after them."""

    models: Annotated[str, one_of(("all", "plain"))]
    """plain: without norms of queries and keys, latent attention and experts."""
    kernels: tuple[Annotated[str, one_of(FUSING)], ...]


@record
class ReducedNorms:
    """Norms and residual sums that the all-reduce before them does."""

    models: Annotated[str, one_of(("none", "plain", "all"))] = "none"
    """plain: as in ``Fused``."""
    arch: tuple[Line, ...] = ()
    """Generations of the device; empty = any."""


@record
class Fusion:
    """What kernels do beside their own work."""

    quantised: Annotated[dict[str, Fused], keys(WEIGHTS, required=False)] = field(default_factory=dict)
    """Formats whose inputs the kernel before quantises; in all others a kernel of its own does it."""
    norms: ReducedNorms = field(default_factory=ReducedNorms)
    experts: Annotated[dict[str, Cases], keys(WEIGHTS, required=False)] = field(default_factory=dict)
    """Format -> kernels of a mixture, one after the other, where it is more than the measured one has (FUSED_LAUNCHES)."""
    gathered: tuple[Annotated[str, one_of(WEIGHTS)], ...] = ()
    """Formats of experts whose tokens are quantised to it before ranks of attention gather them; all others in 16 bits."""


@record
class Messages:
    """The engine's own all-reduce on some devices: the largest message by number of GPUs."""

    arch: tuple[Line, ...] = ()
    """Architectures as profiles write them, or vendors; empty = any."""
    sizes: dict[str, Bytes]
    """GPUs -> bytes."""


@record
class Graphs:
    """Batches for which a CUDA graph is captured."""

    grid: tuple[tuple[Count, Count], ...]
    """[from, step], ascending: sizes from ``from`` in steps of ``step`` until the next entry begins; a step of 0 doubles."""
    most: Cases
    """Largest size by card and GPUs of a stage."""
    per_sequence: Positive = 1e9
    """The largest size is at most this times the largest batch of a rank."""
    own: bool = False
    """The largest size is captured itself where it is not on the grid."""
    pieces: bool = False
    """A decode is cut at attention: the host launches a graph and the kernels of attention for every layer."""
    masked: bool = False
    """Rows that a graph pads go to no expert where experts are spread over ranks."""
    dependent: tuple[Name, ...] = ()
    """Oldest generation of each vendor on which kernels are launched before the one before has drained."""
    waiting: Annotated[dict[str, tuple[Name, ...]], keys(WEIGHTS, required=False)] = field(default_factory=dict)
    """Formats whose products are launched without that -> generations: they wait for the kernel before, and the next for them."""

    def sizes(self, most: float) -> Floats:
        """All sizes up to ``most``."""
        return _captured(self.grid, most)


@cache
def _captured(grid: tuple[tuple[float, float], ...], most: float) -> Floats:
    """Sizes on the grid up to ``most``: every step of every engine asks for them."""
    found: list[float] = []
    ends = [one[0] for one in grid[1:]] + [most + 1.0]
    for (start, step), end in zip(grid, ends, strict=True):
        size = start
        while size < min(end, most + 1.0):
            found.append(size)
            size += step or size
    return unique(np.asarray(found or [0.0], dtype=np.float64))


@record
class Accounting:
    """How an engine decides on the room for its cache, and what it takes itself.

    share_of_total   cache = share x memory - weights - activations - ``counts`` (vLLM)
    reserve          cache = (memory - context - group) (1 - reserve / memory) - weights (SGLang)
    share_of_free    cache = share x (memory - weights - activations - context - group - graphs) (TensorRT-LLM)
    """

    school: Annotated[str, one_of(SCHOOLS)]
    """Which of the three."""
    share: Annotated[float, within(0, 1)] = 0.0
    """Part of the memory, or of what is free."""
    counts: frozenset[Annotated[str, one_of(PARTS)]] = frozenset()
    """share_of_total: parts that come out of the share; the others come out of what it leaves."""
    context: Bytes
    """Context of the device and kernels that are loaded."""
    group: Bytes
    """Communicators and workspaces of an engine of several GPUs."""
    rank: Bytes = 0.0
    """Buffers of the engine's own all-reduce for each GPU of the tensor group."""
    logits: Positive
    """Bytes for each logit of a batch while it samples."""
    sampled: Positive = 1e9
    """Sequences of that batch at most; the run that measures the peak of vLLM samples the largest batch."""
    graph: Bytes
    """A captured size, for each layer."""


@record
class Reserve:
    """What SGLang leaves free: the sum of these, at least ``least``; all but the first and last are added up in MiB there."""

    share: Cases = ()
    """Part of the memory by card and GPUs of an engine."""
    constant: Cases = ()
    """Bytes by card."""
    gpu: Cases = ()
    """Bytes for each GPU of an engine, by card."""
    token: Bytes = 0.0
    """For each token of a step, of at least 2,048."""
    sequence: Bytes = 0.0
    """For each sequence of the largest graph."""
    spread: tuple[Bytes, Bytes] = (0.0, 0.0)
    """With attention data parallelism, for each sequence of the largest graph and attention rank: up to 300, and above."""
    spread_constant: Bytes = 0.0
    """With attention data parallelism."""
    draft: Bytes = 0.0
    """With a draft model."""
    least: Cases = ()
    """Bytes by card."""


@record
class Shortfall:
    """By how much an engine falls short of the measured kernels on some devices, as its published runs show."""

    layer: Cases = ()
    """Seconds of every layer with experts that no kernel explains, the same at any batch; layers of other kinds were not seen."""
    spread: Cases = ()
    """The same of a step of decodes with attention data parallelism: their tokens come from all ranks."""
    launch: Cases = ()
    """Seconds of the host for a kernel outside a graph, where its own CPUs take longer than ``host``."""
    start: Annotated[dict[str, Cases], keys(WEIGHTS, required=False)] = field(default_factory=dict)
    """Format of weights -> seconds that the first prompts of a server take longer: kernels that are built, loaded or compiled when
    they are first called, and that no prompt before the measured ones has called."""
    prompts: Cases = ()
    """Part of the rate of products and attention that prompts reach; no case: all of it."""
    arrivals: Cases = ()
    """Two pools: bytes/s at which caches arrive one after the other while decodes stop; no case: behind the decodes."""
    products: Annotated[dict[str, Cases], keys(WEIGHTS, required=False)] = field(default_factory=dict)
    """Format of weights -> part of the rate that products of many rows reach."""


def is_amd(name: str) -> bool:
    """Whether a generation is of AMD."""
    return name.startswith("CDNA")


def generation(hardware: HardwareProfile) -> str:
    """Architecture of a device as GENERATIONS names it; empty for another."""
    return next((one for one in GENERATIONS if hardware.arch.startswith(one)), "")


def by_card(cases: Cases, hardware: HardwareProfile, gpus: object) -> Floats:
    """The value of the first case that holds; 0 where none does. ``gpus``: a number or a column."""
    ranks = np.asarray(gpus)
    found = np.zeros(ranks.shape)
    for case in reversed(cases):  # the first that holds is written last
        if case.suits(hardware):
            found = np.where(ranks >= case.gpus, case.value or case.size, found)
    return found
