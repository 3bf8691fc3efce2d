"""One site of an exported job with local updates, on gloo: ``python -m tests.proofs.local_updates SITE CONFIG LIGHTHOUSE``.

CONFIG is the exported diloco_config.py. Its settings go into torchft as torchtitan hands them on; the weights after the first
average are compared with those by hand. Prints the largest difference.
"""

from __future__ import annotations

import ast
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RATE, OUTER_RATE, MOMENTUM = 0.05, 0.7, 0.9
"""Of the inner steps (made up), and of the outer optimizer. [torchtitan.experiments.torchft.manager: maybe_semi_sync_training]"""
LATE = 2.0
"""Seconds that the second site comes later to the first average: the first waits."""


def settings(config: Path) -> dict[str, Any]:
    """The arguments of FaultTolerance in the exported file."""
    calls = [one for one in ast.walk(ast.parse(config.read_text())) if isinstance(one, ast.Call)]
    own = next(one for one in calls if isinstance(one.func, ast.Name) and one.func.id == "FaultTolerance")
    return {str(one.arg): ast.literal_eval(one.value) for one in own.keywords}


def fragments_of(count: int) -> torch.nn.Sequential:
    """A model of so many fragments."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(count))).double()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, site: int, number: int) -> None:
    """An inner step on the site's own data."""
    optimizer.zero_grad()
    data = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * number + site))
    (model(data) - data.cumsum(1)).square().mean().backward()
    optimizer.step()


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All of them, copied."""
    return torch.cat([one.detach().reshape(-1).clone() for one in model.parameters()])


def by_hand(said: dict[str, Any]) -> list[torch.Tensor]:
    """Weights of the first fragment after the first average, on every site: a Nesterov step along the mean of what the sites moved,
    mixed with the steps that were done meanwhile."""
    count, sent, final = said["num_fragments"], list[torch.Tensor](), list[torch.Tensor]()
    between, delay = said["sync_steps"] // count, said.get("fragment_sync_delay", 0)
    start = weights(fragments_of(count)[0])
    for site in range(said["group_size"]):
        model = fragments_of(count)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for number in range(between):
            step(model, optimizer, site, number)
            if number == between - delay - 1:
                sent.append(weights(model[0]))
        final.append(weights(model[0]))
    moved = start - torch.stack(sent).mean(0)
    average = start - OUTER_RATE * (1.0 + MOMENTUM) * moved
    return [torch.lerp(average, one, said.get("fragment_update_alpha", 0.0)) for one in final]


def train(site: int, config: Path, lighthouse: str) -> None:
    """Inner steps until the first average is done."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    said = settings(config)
    assert said["enable"] and said["semi_sync_method"] == "diloco" and said["replica_id"] == site
    count = said["num_fragments"]
    model, store = fragments_of(count), dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(milliseconds=said["process_group_timeout_ms"])),
        min_replica_size=said["min_replica_size"], load_state_dict=None, state_dict=None, use_async_quorum=False,
        replica_id=f"torchtitan_ft_{site}", store_addr="localhost", store_port=store.port, rank=0, world_size=1,
        lighthouse_addr=lighthouse,
    )  # fmt: skip
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    outer = [torch.optim.SGD(one.parameters(), lr=OUTER_RATE, momentum=MOMENTUM, nesterov=True) for one in model]
    averaging = DiLoCo(
        manager, list(model), inner, outer, sync_every=said["sync_steps"], should_quantize=said["should_quantize"],
        fragment_sync_delay=said.get("fragment_sync_delay", 0), fragment_update_alpha=said.get("fragment_update_alpha", 0.0),
    )  # fmt: skip
    time.sleep(LATE * site)
    with averaging:
        for number in range(said["sync_steps"] // count):
            step(model, inner, site, number)
    kept, difference = manager.current_step(), float((weights(model[0]) - by_hand(said)[site]).abs().max())
    sys.stdout.write(f"averages {kept} difference {difference:.3g}\n")
    sys.stdout.flush()
    time.sleep(LATE)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    train(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
