"""Bytes that torch.distributed.checkpoint reads for another split, against the arithmetic of ``plan reshape``."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.elastic.shards import items_of, places_of, saved_of
from planner.layout import Layout
from planner.model import load_model
from planner.trainer import load_trainer
from planner.workload import Workload

ROWS = 24
"""Rows of a tensor: every number of ranks below divides them."""


def cuts(ranks: int) -> list[tuple[int, int]]:
    """First row and number of rows of every shard."""
    return [(rank * ROWS // ranks, ROWS // ranks) for rank in range(ranks)]


@pytest.mark.proof
@pytest.mark.parametrize(("old", "new"), [(4, 3), (3, 4), (4, 2), (2, 4), (6, 4), (8, 6), (1, 3)])
def test_torch_reads_whole_stored_shards(old: int, new: int, tmp_path: Path) -> None:
    """The read items of torch's own planner for each new rank, each with the length of the stored shard that it names: that is what
    FileSystemReader loads before it narrows. Their sum over the rank's own rows is the amplification."""
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    def chunk(first: int, rows: int) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size([first, 0]), sizes=torch.Size([rows, 5]))

    properties = TensorProperties(dtype=torch.float32)
    stored = TensorStorageMetadata(properties=properties, size=torch.Size([ROWS, 5]), chunks=[chunk(*one) for one in cuts(old)])
    workload = Workload(model=load_model("llama-3.2-1b"), sequence_length=128, global_batch_size=24)
    trainer = load_trainer("fsdp")
    before, after = (places_of(workload, trainer, Layout(dp=ranks, zero=3)) for ranks in (old, new))
    rows = next(one for one in items_of(saved_of(workload, trainer), after, before) if one.kind == "rows")
    for rank, (first, count) in enumerate(cuts(new)):
        items = create_read_items_for_chunk_list("w", stored, [chunk(first, count)])
        read = sum(cuts(old)[one.storage_index.index][1] for one in items)
        assert sum(one.lengths[0] for one in items) == count
        assert rows.read()[rank] / rows.own()[rank] == pytest.approx(read / count)
