"""One replica group of torchft on gloo: ``python -m tests.proofs.replica_groups GROUP LIGHTHOUSE STEPS``; a line per step."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def train(group: str, lighthouse: str, steps: int) -> None:
    """Gradient descent on a small model; gradients are averaged over the groups that are there. Prints step, participants, whether
    the step was kept, and the sum of the weights."""
    from torchft import Manager, Optimizer, ProcessGroupGloo

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)), min_replica_size=1, load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()}, replica_id=f"group-{group}-",
        store_addr="localhost", store_port=store.port, rank=0, world_size=1, lighthouse_addr=lighthouse,
        timeout=timedelta(seconds=10), quorum_timeout=timedelta(seconds=30),
    )  # fmt: skip
    optimizer = Optimizer(manager, inner)
    while manager.current_step() < steps:
        optimizer.zero_grad()
        seed = torch.Generator().manual_seed(1000 * manager.current_step() + int(group))
        x = torch.randn(4, 8, dtype=torch.float64, generator=seed)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            assert parameter.grad is not None
            manager.allreduce(parameter.grad).wait()
        before = manager.current_step()
        optimizer.step()
        total = sum(float(one.detach().sum()) for one in model.parameters())
        kept = manager.current_step() > before
        sys.stdout.write(f"step {before} groups {manager.num_participants()} kept {int(kept)} sum {total:.15g}\n")
        sys.stdout.flush()
        time.sleep(0.05)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
