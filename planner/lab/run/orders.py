"""What the ranks of level ``full`` get to do, and what each leaves behind while it goes: files of this machine or the store."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner import library
from planner.lab.run.plan_question import Question, question
from planner.plan_file import plan_from_dict


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The same on every rank."""

    plan: dict[str, Any]
    """Content of the plan file."""
    device: str
    """"cpu" or "cuda"."""
    steps: int
    """Steps that are measured."""
    warmup: int
    """Steps before them."""
    timeout: float
    """Seconds after which a step has hung."""
    parity: bool
    """Compare a tiny model with one process first."""
    trace: str
    """File of the trace; "" = none."""

    def question(self) -> Question:
        """The plan as it is run and priced."""
        return question(plan_from_dict(self.plan))

    def to_json(self) -> str:
        """Text that ``from_json`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Orders:
        """What ``to_json`` wrote."""
        return cls(**json.loads(text))


class Ledger:
    """What each rank has found so far, written after every step: it outlives the rank.

    In files where the ranks were started here, else in the store that they share.
    """

    def __init__(self, directory: str | None, store: Any = None) -> None:
        self.directory, self.store = Path(directory) if directory else None, store

    def put(self, rank: int, entry: dict[str, Any]) -> None:
        """Replaces what the rank left before."""
        text = json.dumps(entry)
        if self.directory is not None:
            library.write_whole(self.directory / f"rank-{rank}.json", text)
        else:
            self.store.set(f"rank/{rank}", text)

    def read(self, world: int, store: Any = None) -> list[dict[str, Any]]:
        """Of every rank that has left something. ``store``: a client for this thread."""
        found = (self._text(rank, store or self.store) for rank in range(world))
        return [json.loads(text) for text in found if text]

    def _text(self, rank: int, store: Any) -> str:
        if self.directory is None:
            return str(store.get(f"rank/{rank}").decode()) if store.check([f"rank/{rank}"]) else ""
        with contextlib.suppress(OSError):
            return (self.directory / f"rank-{rank}.json").read_text(encoding="utf-8")
        return ""
