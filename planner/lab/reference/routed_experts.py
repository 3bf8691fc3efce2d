"""Routed experts of one rank: sort tokens by expert, exchange them with the ranks that hold the experts, multiply, bring back."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd, wait_tensor

from planner.lab.reference.fused_operators import ACTIVATIONS, Grouped, SwiGlu
from planner.model import ModelSpec


class Experts(nn.Module):
    """The experts of this rank: every ep-th part of them, whole."""

    def __init__(self, model: ModelSpec, ep: int, fused: bool) -> None:
        super().__init__()
        self.ep, self.num_experts, here = ep, model.num_experts, model.num_experts // ep
        h, width = model.hidden_size, model.expert_ffn_size
        self.fused = fused and model.activation == "silu"
        self.activation = ACTIVATIONS[model.activation]
        self.gate = nn.Parameter(torch.empty(here, width, h)) if model.gated else None
        self.up = nn.Parameter(torch.empty(here, width, h))
        self.down = nn.Parameter(torch.empty(here, h, width))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor, group: Any, balanced: bool) -> Tensor:
        """x (tokens, hidden); weights and chosen experts (tokens, top_k). The weighted sum of what the experts put out."""
        tokens, top_k = chosen.shape
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(order))
        copies = x[order // top_k]
        if self.ep > 1:
            out = self._exchanged(copies, counts, group, balanced)
        else:
            rows = [tokens * top_k // self.num_experts] * self.num_experts if balanced else counts.tolist()
            out = self._multiply(copies, rows)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        every = out[back].view(tokens, top_k, -1)
        return torch.bmm(weights.to(x.dtype)[:, None], every)[:, 0]

    def _exchanged(self, copies: Tensor, counts: Tensor, group: Any, balanced: bool) -> Tensor:
        """Rows go to the ranks of their experts, lie there by expert, and come back."""
        here = self.num_experts // self.ep
        theirs = wait_tensor(all_to_all_single(counts, None, None, group))
        each = copies.shape[0] // self.num_experts
        table, sent = [[each] * here] * self.ep, [each * here] * self.ep
        if not balanced:
            table, sent = theirs.view(self.ep, here).tolist(), counts.view(self.ep, here).sum(1).tolist()
        got = [sum(row) for row in table]
        mine = wait_tensor(all_to_all_single_autograd(copies, got, sent, group))
        by_expert = self._by_expert(table, mine.device)
        out = self._multiply(mine[by_expert], [sum(row[e] for row in table) for e in range(here)])
        back = torch.empty_like(by_expert)
        back[by_expert] = torch.arange(len(by_expert), device=by_expert.device)
        return wait_tensor(all_to_all_single_autograd(out[back], sent, got, group))

    @staticmethod
    def _by_expert(table: list[list[int]], device: torch.device) -> Tensor:
        """Places of the received rows, which lie by sender and then by expert, in the order of the experts."""
        starts, place = {}, 0
        for sender, row in enumerate(table):
            for expert, rows in enumerate(row):
                starts[expert, sender] = (place, rows)
                place += rows
        parts = [torch.arange(start, start + rows, device=device) for _, (start, rows) in sorted(starts.items())]
        return torch.cat(parts)

    def _multiply(self, x: Tensor, rows: list[int]) -> Tensor:
        """The MLP of each expert on its rows."""
        up = Grouped.apply(x, self.up, rows)
        if self.gate is None:
            return Grouped.apply(self.activation(up), self.down, rows)
        gate = Grouped.apply(x, self.gate, rows)
        inner = SwiGlu.apply(gate, up) if self.fused else self.activation(gate) * up
        return Grouped.apply(inner, self.down, rows)
