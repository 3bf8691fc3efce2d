"""A policy of two attention layers in plain torch, an engine with continuous batching, and rows of packed answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

VOCAB, HIDDEN, HEADS, LAYERS, LONGEST = 512, 192, 4, 2, 128
"""Sizes; LONGEST tokens of prompt and answer."""
HEAD = HIDDEN // HEADS


class Layer(nn.Module):
    """Attention and a gated MLP; who calls it says what queries attend to."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of (N, HIDDEN), each (N, HEADS, HEAD)."""
        q, k, v = self.qkv(self.one(x)).view(-1, 3, HEADS, HEAD).unbind(1)
        return q, k, v

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """What follows attention."""
        x = x + self.out(attended.reshape(-1, HIDDEN))
        return x + self.down(silu(self.up(self.two(x))))


class Policy(nn.Module):
    """Next token from the tokens before."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LONGEST, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        """Logits (T, VOCAB) of a packed row: tokens and their places (T,), who sees whom (T, T)."""
        x = self.tokens(tokens) + self.places(places)
        for layer in self.layers:
            q, k, v = (one.transpose(0, 1) for one in layer.heads(x))
            x = layer.rest(x, scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1))
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Row:
    """Answers in one row."""

    tokens: Tensor
    places: Tensor
    mask: Tensor
    """(T, T): the same answer, and not later."""


def row_of(answers: Sequence[Tensor]) -> Row:
    """Answers one behind the other."""
    tokens = torch.cat(list(answers))
    places = torch.cat([torch.arange(len(one)) for one in answers])
    owner = torch.repeat_interleave(torch.arange(len(answers)), torch.tensor([len(one) for one in answers]))
    order = torch.arange(len(tokens))
    return Row(tokens, places, (owner[:, None] == owner[None]) & (order[:, None] >= order[None]))


def packed_rows(answers: Sequence[Tensor], capacity: int) -> list[Row]:
    """First fit, longest first."""
    bins: list[list[Tensor]] = []
    for one in sorted(answers, key=len, reverse=True):
        place = next((each for each in bins if sum(map(len, each)) + len(one) <= capacity), None)
        if place is None:
            bins.append([one])
        else:
            place.append(one)
    return [row_of(each) for each in bins]


def log_probs(policy: Policy, row: Row) -> Tensor:
    """Of every token but the first, given those before."""
    logits = policy(row.tokens, row.places, row.mask)
    return torch.log_softmax(logits[:-1], dim=-1).gather(1, row.tokens[1:, None])[:, 0]


class Engine:
    """Samples answers with up to ``slots`` at once; a slot is given to the next prompt as soon as its answer has ended."""

    def __init__(self, policy: Policy, slots: int) -> None:
        self.policy, self.slots = policy, slots
        shape = (slots, HEADS, LONGEST, HEAD)
        self.keys = [torch.zeros(shape) for _ in range(LAYERS)]
        self.values = [torch.zeros(shape) for _ in range(LAYERS)]

    @torch.no_grad()
    def prefill(self, prompts: Tensor, first: int) -> None:
        """Caches of prompts (m, P) into the slots from ``first`` on."""
        count, length = prompts.shape
        x = (self.policy.tokens(prompts) + self.policy.places(torch.arange(length))).view(-1, HIDDEN)
        for number, layer in enumerate(self.policy.layers):
            q, k, v = (one.view(count, length, HEADS, HEAD).transpose(1, 2) for one in layer.heads(x))  # type: ignore[operator]
            self.keys[number][first : first + count, :, :length] = k
            self.values[number][first : first + count, :, :length] = v
            attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            x = layer.rest(x, attended)  # type: ignore[operator]

    @torch.no_grad()
    def decode(self, tokens: Tensor, places: Tensor) -> Tensor:
        """The next token of the first n slots, whose last tokens (n,) stand at these places (n,)."""
        count, span = len(tokens), int(places.max()) + 1
        x = self.policy.tokens(tokens) + self.policy.places(places)
        seen = (torch.arange(span) <= places[:, None])[:, None, None]
        rows = torch.arange(count)
        for number, layer in enumerate(self.policy.layers):
            q, k, v = layer.heads(x)  # type: ignore[operator]
            self.keys[number][rows, :, places], self.values[number][rows, :, places] = k, v
            keys, values = self.keys[number][:count, :, :span], self.values[number][:count, :, :span]
            x = layer.rest(x, scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=seen)[:, :, 0])  # type: ignore[operator]
        chances = torch.softmax(self.policy.head(self.policy.norm(x)), dim=-1)
        return torch.multinomial(chances, 1)[:, 0]

    def sample(self, prompts: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Answers of these lengths to prompts (n, P), each with its prompt."""
        waiting, done, prompt = list(range(len(lengths))), list[Tensor](), prompts.shape[1]
        running: list[int] = []
        written = [list(one) for one in prompts.tolist()]
        while waiting or running:
            new = waiting[: self.slots - len(running)]
            if new:
                del waiting[: len(new)]
                self.prefill(prompts[new], len(running))
                running += new
            self.turn([written[one] for one in running])
            for slot in range(len(running) - 1, -1, -1):
                one = running[slot]
                if len(written[one]) - prompt >= lengths[one]:
                    done.append(torch.tensor(written[one]))
                    self._free(slot, len(running) - 1)
                    running[slot] = running[-1]
                    running.pop()
        return done

    def turn(self, written: list[list[int]]) -> None:
        """One more token for the answers in the first slots, as lists of tokens."""
        last = torch.tensor([one[-1] for one in written])
        places = torch.tensor([len(one) - 1 for one in written])
        for one, token in zip(written, self.decode(last, places).tolist(), strict=True):
            one.append(token)

    def _free(self, slot: int, last: int) -> None:
        """The last running answer moves into the slot that has become free."""
        if slot != last:
            for cache in (*self.keys, *self.values):
                cache[slot] = cache[last]


def parameters_of(policy: Policy) -> int:
    """Number of weights."""
    return sum(one.numel() for one in policy.parameters())


def loss_of(policy: Policy, row: Row, old: Tensor, advantage: float) -> Tensor:
    """The clipped ratio of PPO and GRPO, with one advantage for the row."""
    ratio = torch.exp(log_probs(policy, row) - old)
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean() / math.sqrt(HIDDEN)
