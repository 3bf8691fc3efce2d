"""What one virtual stage of the reference transformer holds: its layers, and at the ends embedding, head and the modules of
multi-token prediction."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from planner.lab.reference.local_part import whole
from planner.lab.reference.split import Split
from planner.lab.reference.transformer import FORWARD, Layer, Norm, Place, recomputed

LATER_LOSS = 0.1
"""Factor of the mean loss of prediction modules.  [Megatron-LM, --mtp-loss-scaling-factor]"""


class Ahead(nn.Module):
    """A multi-token-prediction module of depth k: layer(P [norm(h); norm(embedding of token i + k)]), normed.

    h is what the model or the module before puts out, normed; embedding and head are the model's own. Recompute repeats
    the projection with the layer.
    [DeepSeek-V3, arXiv 2412.19437, section 2.2; Megatron Core, multi_token_prediction.py: the final norm comes first]
    """

    def __init__(self, split: Split, place: Place) -> None:
        super().__init__()
        model, self.split = split.model, split
        self.hidden_norm = Norm(model.hidden_size, model.norm, split.fused)
        self.token_norm = Norm(model.hidden_size, model.norm, split.fused)
        self.projection = nn.Linear(2 * model.hidden_size, model.hidden_size, bias=False)
        self.layer = Layer(split, model.num_layers - 1, place)
        self.norm = Norm(model.hidden_size, model.norm, split.fused)

    def run(self, x: Tensor, embedded: Tensor) -> Tensor:
        """Up to the last norm."""
        with FORWARD:
            return self.layer.run(self.projection(torch.cat([self.hidden_norm(x), self.token_norm(embedded)], -1)))

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        """Both (batch, tokens of this rank, hidden)."""
        return self.norm(recomputed(self.split, self.run, x, embedded))


class WithLoss(Function):
    """x as it is, whose backward pass begins that of a loss too: the losses of the modules are taken one after the other, so
    that logits of one have a gradient at a time.  [Megatron Core, multi_token_prediction.py, MTPLossAutoScaler]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype, ctx.device = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), dtype=ctx.dtype, device=ctx.device)


class Part(nn.Module):
    """What one virtual stage holds: some layers, perhaps the embedding, perhaps the norm and the head with the modules that
    predict later tokens, and the embedding once more for those."""

    def __init__(self, split: Split, number: int, place: Place) -> None:
        super().__init__()
        model, first, last = split.model, number == 0, number == len(split.stages) - 1
        self.place, self.is_first = place, first
        embeds = first or (last and model.mtp_layers > 0)
        self.embedding = nn.Embedding(model.vocab_size, model.hidden_size) if embeds else None
        learned = first and model.position == "learned"
        self.position = nn.Parameter(torch.empty(model.num_position_embeddings, model.hidden_size)) if learned else None
        self.layers = nn.ModuleDict({str(i): Layer(split, i, place) for i in split.stages[number].layers})
        self.norm = Norm(model.hidden_size, model.norm, split.fused) if last else None
        self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False) if last else None
        self.ahead = nn.ModuleList(Ahead(split, place) for _ in range(model.mtp_layers if last else 0))
        self.following: list[Tensor] = []
        """Of each microbatch to come the tokens behind its inputs, (batch, tokens, 1 + modules)."""
        self.loss: Callable[[Tensor, Tensor], Tensor] | None = None
        """Of logits and targets."""
        self.later_losses: list[Tensor] = []
        """Of the modules, one for each microbatch that was run, weighted."""

    def every_layer(self) -> Iterator[Layer]:
        """Those of prediction modules too."""
        for one in (*self.layers.values(), *(module.layer for module in self.ahead)):
            assert isinstance(one, Layer)
            yield one

    def forward(self, x: Tensor) -> Tensor:
        """Token numbers or hidden states in, hidden states or logits out."""
        following = self.following.pop(0) if self.ahead else x
        with FORWARD:
            embedded: list[Tensor] = []
            if self.embedding is not None:  # once, as gathered weights are used once
                tokens = [x] * self.is_first + [following[..., k] for k in range(len(self.ahead))]
                embedded = list(self.embedding(torch.cat(tokens)).chunk(len(tokens)))
            if self.is_first:
                x = embedded.pop(0)
            if self.position is not None:
                x = x + self._positions(x.shape[1])
            for layer in self.layers.values():
                x = layer(x)
            if self.head is None or self.norm is None:
                return x
            x = self.norm(x)
            return self.head(self._predicting(x, embedded, following) if self.ahead else x)

    def _predicting(self, x: Tensor, embedded: list[Tensor], following: Tensor) -> Tensor:
        """x with the weighted losses of the prediction modules behind it."""
        assert self.head is not None and self.loss is not None
        state, total = x, []
        for depth, (module, one) in enumerate(zip(self.ahead, embedded, strict=True), 1):
            state = module(state, one)
            loss = self.loss(self.head(state), following[..., depth]) * (LATER_LOSS / len(self.ahead))
            x = WithLoss.apply(x, loss)
            total.append(loss.detach())
        self.later_losses.append(torch.stack(total).sum())
        return x

    def _positions(self, tokens: int) -> Tensor:
        """Rows of the position table for the tokens of this rank."""
        assert self.position is not None and self.place.positions is not None
        table, numbers = whole(self.position), self.place.positions
        if isinstance(self.position, DTensor):
            numbers = numbers.chunk(self.position.device_mesh.size(0))[self.position.device_mesh.get_local_rank(0)]
        return table[numbers[:tokens]]
