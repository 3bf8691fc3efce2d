"""The training run that a split one is held to: a transformer of one process in plain torch, weights by name, its own gradient
descent.

It shares no code with planner/lab/reference, so that what is wrong there in both a split and a whole run (a causal mask that is
missing, a router without a gradient) is seen. Attention is a whole matrix of scores, experts are a loop over all tokens.
[Llama: arXiv 2302.13971; MLA: arXiv 2405.04434, section 2.1; routing: arXiv 2401.04088, equation 1, of a softmax over all]
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from planner.lab.run.serial_rounding import RoundedProduct, Rounding
from planner.model import ModelSpec

ROTARY_BASE, EPSILON, MOMENTUM = 500000.0, 1e-6, 0.9
Draw = Callable[[str, tuple[int, ...]], Tensor]
"""Makes the first values of a parameter of a name and a shape."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "relu": lambda x: x.clamp(min=0.0),
    "relu2": lambda x: x.clamp(min=0.0) ** 2,
}


@dataclass
class SerialModel:
    """A model whose parameters come into being when they are first used; ``rounded``: its passes are in bf16."""

    model: ModelSpec
    draw: Draw
    rounded: bool = False
    eight_bits: tuple[Rounding, frozenset[str]] | None = None
    """How linear layers of such last words of their names round their operands to 8 bits."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Parameters, in the precision of the update."""

    def weight(self, name: str, *shape: int) -> Tensor:
        """A parameter as the passes see it."""
        if name not in self.weights:
            self.weights[name] = self.draw(name, shape).requires_grad_()
        found = self.weights[name]
        return found.bfloat16() if self.rounded else found

    def wide(self, x: Tensor) -> Tensor:
        """What norms, the router and the loss compute in."""
        return x.float() if self.rounded else x

    def linear(self, x: Tensor, name: str, out: int, bias: bool = False) -> Tensor:
        """x W^T + b of (..., in)."""
        weight = self.weight(f"{name}.weight", out, x.shape[-1])
        if self.eight_bits is not None and name.rpartition(".")[2] in self.eight_bits[1]:
            rows = RoundedProduct.apply(x.flatten(0, -2), weight, self.eight_bits[0])
            y = rows.unflatten(0, x.shape[:-1])
        else:
            y = x @ weight.T
        return y + self.weight(f"{name}.bias", out) if bias else y

    def norm(self, x: Tensor, name: str, kind: str = "rmsnorm") -> Tensor:
        """RMS norm or layer norm over the last dimension."""
        scale, y = self.weight(f"{name}.weight", x.shape[-1]), self.wide(x)
        if kind == "rmsnorm":
            return (y / (y.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()).to(x.dtype) * scale
        y = y - y.mean(-1, keepdim=True)
        shift = self.weight(f"{name}.bias", x.shape[-1])
        return (y / (y.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()).to(x.dtype) * scale + shift

    def rotated(self, x: Tensor) -> Tensor:
        """(batch, heads, tokens, d): the pair (i, i + d/2) of token t is turned by t base^(-2i/d), as a complex number."""
        half = x.shape[-1] // 2
        rate = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * rate
        wide = self.wide(x)
        turned = torch.complex(wide[..., :half], wide[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], -1).to(x.dtype)

    def attention(self, x: Tensor, name: str) -> Tensor:
        """softmax(q k^T / sqrt(d), causal) v over whole sequences (batch, tokens, hidden)."""
        q, k, v = (self.latent if self.model.is_mla else self.grouped)(x, name)
        scores = self.wide(q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        out = scores.masked_fill(later, -math.inf).softmax(-1).to(v.dtype) @ v
        bias = self.model.linear_bias and not self.model.is_mla
        return self.linear(out.transpose(1, 2).flatten(2), f"{name}.out", self.model.hidden_size, bias)

    def grouped(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (batch, heads, tokens, d); groups of query heads share a key."""
        model, bias = self.model, self.model.qkv_bias or self.model.linear_bias
        counts = {"q": model.num_heads, "k": model.num_kv_heads, "v": model.num_kv_heads}
        found = {}
        for one, heads in counts.items():
            y = self.linear(x, f"{name}.{one}", heads * model.head_dim, bias).unflatten(-1, (heads, model.head_dim))
            y = self.norm(y, f"{name}.{one}_norm") if model.qk_norm and one != "v" else y
            y = y.transpose(1, 2)
            y = self.rotated(y) if model.position == "rope" and one != "v" else y
            found[one] = y.repeat_interleave(model.num_heads // heads, 1)
        return found["q"], found["k"], found["v"]

    def latent(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """The same from compressed vectors, one rotary key for all heads."""
        model, heads, plain, turned = self.model, self.model.num_heads, self.model.qk_nope_head_dim, self.model.qk_rope_head_dim
        narrow = x
        if model.q_lora_rank:
            narrow = self.norm(self.linear(x, f"{name}.q_down", model.q_lora_rank), f"{name}.q_down_norm")
        q = self.linear(narrow, f"{name}.q_up", heads * (plain + turned)).unflatten(-1, (heads, -1)).transpose(1, 2)
        down = self.linear(x, f"{name}.kv_down", model.kv_lora_rank + turned)
        inner = self.norm(down[..., : model.kv_lora_rank], f"{name}.kv_down_norm")
        kv = self.linear(inner, f"{name}.kv_up", heads * (plain + model.v_head_dim)).unflatten(-1, (heads, -1)).transpose(1, 2)
        key = self.rotated(down[:, None, :, model.kv_lora_rank :]).expand(-1, heads, -1, -1)
        q = torch.cat([q[..., :plain], self.rotated(q[..., plain:])], -1)
        return q, torch.cat([kv[..., :plain], key], -1), kv[..., plain:]

    def mlp(self, x: Tensor, name: str, width: int) -> Tensor:
        """down(act(gate x) * (up x)), or down(act(up x))."""
        model, act = self.model, ACTIVATIONS[self.model.activation]
        up = self.linear(x, f"{name}.up", width, model.linear_bias)
        inner = act(self.linear(x, f"{name}.gate", width, model.linear_bias)) * up if model.gated else act(up)
        return self.linear(inner, f"{name}.down", model.hidden_size, model.linear_bias)

    def mixture(self, x: Tensor, name: str) -> Tensor:
        """Sum over the experts of p_e f_e(x), p the softmax of the router where e is among its top k, else 0."""
        model, act, (h, f, many) = self.model, ACTIVATIONS[self.model.activation], (self.model.hidden_size,
            self.model.expert_ffn_size, self.model.num_experts)  # fmt: skip
        every = self.wide(x @ self.weight(f"{name}.router", many, h).T).softmax(-1)
        least = every.topk(model.top_k, -1).values[..., -1:]
        chance = torch.where(every >= least, every, torch.zeros_like(every)).to(x.dtype)
        gates = self.weight(f"{name}.experts.gate", many, f, h) if model.gated else None
        ups, downs = self.weight(f"{name}.experts.up", many, f, h), self.weight(f"{name}.experts.down", many, h, f)
        out = self.mlp(x, f"{name}.shared", model.shared_expert_ffn_size) if model.shared_expert_ffn_size else 0.0
        for e in range(many):
            up = x @ ups[e].T
            inner = act(x @ gates[e].T) * up if gates is not None else act(up)
            out = out + chance[..., e, None] * (inner @ downs[e].T)
        return out

    def layer(self, x: Tensor, name: str, number: int) -> Tensor:
        """x + attention, then + MLP or experts, of the kind of layer ``number``."""
        model = self.model
        x = x + self.attention(self.norm(x, f"{name}.attention_norm", model.norm), f"{name}.attention")
        y = self.norm(x, f"{name}.mlp_norm", model.norm)
        return x + (self.mixture(y, f"{name}.mlp") if model.is_moe_layer(number) else self.mlp(y, f"{name}.mlp", model.ffn_size))

    def states(self, tokens: Tensor) -> Tensor:
        """(batch, tokens, hidden) of token numbers (batch, tokens), normed."""
        model = self.model
        x = self.weight("embedding.weight", model.vocab_size, model.hidden_size)[tokens]
        if model.position == "learned":
            x = x + self.weight("position", model.num_position_embeddings, model.hidden_size)[: tokens.shape[1]]
        for number in range(model.num_layers):
            x = self.layer(x, f"layers.{number}", number)
        return self.norm(x, "norm", model.norm)

    def scores(self, x: Tensor) -> Tensor:
        """Logits (batch, tokens, vocabulary) of normed states."""
        model = self.model
        if model.tied_embeddings:
            return x @ self.weight("embedding.weight", model.vocab_size, model.hidden_size).T
        return self.linear(x, "head", model.vocab_size)

    def logits(self, tokens: Tensor) -> Tensor:
        """(batch, tokens, vocabulary) of token numbers (batch, tokens)."""
        return self.scores(self.states(tokens))

    def deeper(self, x: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """States of the prediction module of a depth from 1, of those before it and the tokens that it is given."""
        model, name = self.model, f"ahead.{depth - 1}"
        looked_up = self.weight("embedding.weight", model.vocab_size, model.hidden_size)[tokens]
        halves = self.norm(x, f"{name}.hidden_norm", model.norm), self.norm(looked_up, f"{name}.token_norm", model.norm)
        y = self.linear(torch.cat(halves, -1), f"{name}.projection", model.hidden_size)
        return self.norm(self.layer(y, f"{name}.layer", model.num_layers - 1), f"{name}.norm", model.norm)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean over the tokens of -ln p(next token), of sequences (batch, tokens + 1).

        With D prediction modules sequences are D longer; the one of depth k is given the k-th token after each and predicts the
        next; 0.1 times the mean of their losses is added.  [DeepSeek-V3, arXiv 2412.19437, equations 21 to 25]
        """
        depths, length = self.model.mtp_layers, tokens.shape[1] - 1 - self.model.mtp_layers
        x, total = self.states(tokens[:, :length]), 0.0
        for k in range(depths + 1):
            x = self.deeper(x, tokens[:, k : k + length], k) if k else x
            chances = self.wide(self.scores(x)).log_softmax(-1)
            one = -chances.gather(-1, tokens[:, k + 1 : k + 1 + length, None]).mean()
            total = total + (0.1 / depths * one if k else one)
        return total

    def train(self, batches: list[Tensor], rate: float, clip: float) -> list[float]:
        """Losses and norms of the gradient; a step of gradient descent with momentum for each batch.

        v = 0.9 v + g min(1, clip / (|g| + 1e-6)),  w = w - rate v
        """
        moved: dict[str, Tensor] = {}
        scalars = []
        for batch in batches:
            loss = self.loss(batch)
            found = dict(zip(self.weights, torch.autograd.grad(loss, list(self.weights.values())), strict=True))
            norm = math.sqrt(sum(float(one.double().pow(2).sum()) for one in found.values()))
            scalars += [float(loss.detach()), norm]
            with torch.no_grad():
                for name, gradient in found.items():
                    scaled = gradient * min(1.0, clip / (norm + 1e-6))
                    moved[name] = MOMENTUM * moved[name] + scaled if name in moved else scaled
                    self.weights[name] -= rate * moved[name]
        return scalars
