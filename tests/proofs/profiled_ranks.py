"""Two ranks of gloo train a little under torch.profiler: python -m tests.proofs.profiled_ranks RANK FOLDER STORE."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule


def train(rank: int, folder: Path, store: Path) -> None:
    """Seven steps, four of them recorded."""
    torch.set_num_threads(1)
    met = torch.distributed.FileStore(str(store), 2)
    torch.distributed.init_process_group("gloo", store=met, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)))
    optimizer = torch.optim.AdamW(model.parameters())
    plan = schedule(wait=1, warmup=1, active=4, repeat=1)

    def write(done: profile) -> None:
        done.export_chrome_trace(str(folder / f"trace{rank}.json.gz"))

    with profile(activities=[ProfilerActivity.CPU], schedule=plan, record_shapes=True, on_trace_ready=write) as profiler:
        for _ in range(7):
            optimizer.zero_grad()
            model(torch.randn(64, 256)).sum().backward()
            optimizer.step()
            profiler.step()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    train(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
