"""What a timeline is made of: slices on the streams of pipeline ranks."""

from dataclasses import dataclass

from planner.cost.estimate import PARTS

STREAMS = ("compute", "host", "tensor", "context", "expert", "pipeline", "data", "offload")
"""What one rank runs at the same time: kernels, waiting for the host, communication by group, copies to the host."""
STREAM_OF_PART = {part: part.removesuffix("_communication") for part in PARTS} | {
    "recompute": "compute", "bubble": "compute", "stragglers": "compute", "optimizer": "compute", "overhead": "host",
}  # fmt: skip
"""The stream on which each part of the step time runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Something on one stream of one rank."""

    kind: str
    """F, B, I, W, recompute; what is none of them in words: 'send', 'gather weights', 'optimizer'."""
    part: str
    """Part of the step time that it counts for, one of PARTS."""
    hidden: bool = False
    """It runs during computation and is no part of the step time."""

    @property
    def stream(self) -> str:
        """One of STREAMS."""
        return STREAM_OF_PART[self.part]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice(Drawn):
    """Something that runs on one rank."""

    rank: int
    """Pipeline rank."""
    start: float
    """Seconds from the start of the step."""
    end: float
    """Seconds from the start of the step."""
    stage: int = -1
    """Virtual stage in model order; -1 = the whole rank."""
    microbatch: int = -1
    """-1 = none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece(Drawn):
    """A part of every action of one stage and kind."""

    offset: float
    """Seconds from the start of the action."""
    seconds: float
    """How long it takes."""


def stage_kind(rank: int, pp: int) -> int:
    """Kind of stage, as the cost model prices them, of a rank: 0 first, 1 middle, 2 last."""
    return 0 if rank == 0 else 2 if rank == pp - 1 else 1


def rank_of_kind(kind: int, pp: int) -> int:
    """The rank that a kind of stage is priced at: the first, the second, the last."""
    return min((0, 1, pp - 1)[kind], pp - 1) if pp > 2 or kind != 1 else 0
