"""Training steps of one rank: its stages, how their modules are split, their schedule, gradients, clipping, the optimizer.

DTensor for tensor parallelism, fully_shard or replicate for data parallelism.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, parallel
from torch.nn import functional

from planner.lab.reference import transformer
from planner.lab.reference.fused_operators import VocabularyLoss
from planner.lab.reference.split import Split
from planner.lab.reference.transformer import FORWARD, Experts, Place, angles
from planner.lab.reference.virtual_stage import Part
from planner.lab.run.host_states import HostStates
from planner.lab.run.tensor_parallel import quantise, split_tensors

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def tokens(split: Split, step: int) -> Tensor:
    """Made-up sequences of one step, the same on every rank: (global batch, length + 1), one longer for each prediction module."""
    seed = torch.Generator().manual_seed(1000 + step)
    shape = (split.global_batch_size, split.sequence_length + 1 + split.model.mtp_layers)
    return torch.randint(split.model.vocab_size, shape, generator=seed)


def initial(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Weights of a parameter by its name: normal with standard deviation 0.02 times a power of its size; norms about 1."""
    seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.empty(shape, dtype=dtype).normal_(0.0, 1.0, generator=seed)
    if "norm" in name:
        return drawn * 0.1 + (0.0 if name.endswith("bias") else 1.0)
    return drawn * (0.1 if name.endswith("bias") else shape[-1] ** -0.5)


def part_of_sequence(split: Split, rank: int) -> Tensor:
    """Positions of a context-parallel rank: chunks r and 2 c - 1 - r of 2 c, so that causal work is even."""
    if split.cp == 1:
        return torch.arange(split.sequence_length)
    chunks = torch.arange(split.sequence_length).chunk(2 * split.cp)
    return torch.cat([chunks[rank], chunks[2 * split.cp - 1 - rank]])


def locate(place: Place, split: Split, rank: int, device: torch.device) -> Place:
    """Says where a context-parallel rank is in the sequence."""
    place.positions = part_of_sequence(split, rank).to(device)
    width = split.model.qk_rope_head_dim if split.model.is_mla else split.model.head_dim
    if split.model.position == "rope":
        dtype = torch.float64 if split.precision == "fp64" else torch.float32
        place.cosine, place.sine = angles(place.positions, width, dtype)
    return place


class Meshes:
    """The ranks of a job as grids: pp, replicas, shards, cp and tp (fastest); for experts pp, replicas, shards and ep."""

    def __init__(self, split: Split, device: str) -> None:
        self.split = split
        shape = (split.pp, split.dp // split.dp_shard, split.dp_shard, split.cp, split.tp)
        self.all = init_device_mesh(device, shape, mesh_dim_names=("pp", "replica", "shard", "cp", "tp"))
        self.dense = self._data(self.all, ("shard", "cp"))
        self.expert = self.dense
        self.experts: DeviceMesh | None = None
        if split.model.is_moe:
            inner = split.dp_shard * split.cp * split.tp // split.ep
            tiled = (split.pp, split.dp // split.dp_shard, inner, split.ep)
            self.experts = init_device_mesh(device, tiled, mesh_dim_names=("pp", "replica", "expert_shard", "ep"))
            self.expert = self._data(self.experts, ("expert_shard",))

    def _data(self, mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
        """The mesh over which gradients are summed and states are sharded."""
        replicas = self.split.dp // self.split.dp_shard
        if self.split.zero == 0:
            return mesh["replica", *names]._flatten(f"all_{names[0]}")
        inner = mesh[names]._flatten(f"flat_{names[0]}") if len(names) > 1 else mesh[names[0]]
        return inner if replicas == 1 else DeviceMesh._concatenate([mesh["replica"], inner])

    def group(self, name: str) -> Any:
        """Process group of one dimension; None where it has one rank."""
        mesh = self.experts if name == "ep" else self.all
        return mesh.get_group(name) if mesh is not None and mesh[name].size() > 1 else None


def shard_states(part: Part, split: Split, meshes: Meshes) -> None:
    """Shards (or replicas) of weights in their own precision, gathered in the one that computes; gradients are sums."""
    half = split.precision == "bf16"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32 if half else None,
        cast_forward_inputs=False,
    )  # fmt: skip
    if split.zero == 0:
        unit: Any = partial(replicate, mp_policy=policy)
    else:
        unit = partial(fully_shard, mp_policy=policy, reshard_after_forward=split.zero == 3)
    first, ends = ([one for one in many if one is not None] for many in ((part.embedding,), (part.norm, part.head)))
    tied = part.embedding is not None and part.head is not None and part.head.weight is part.embedding.weight
    for modules in ([*first, *ends],) if tied else (first, ends):
        if modules and not split.one_root and not (part.ahead and part.head in modules):  # a head that runs often is the root's
            unit(modules, mesh=meshes.dense)
    for layer in part.every_layer():
        alone = layer in part.layers.values()  # else one unit with its prediction module
        if isinstance(layer.mlp, transformer.Mixture):
            more = split.zero and split.dp_shard * split.cp * split.tp // split.ep * split.ep > split.model.num_experts
            placed = {"shard_placement_fn": lambda _: Shard(1)} if more else {}  # more ranks than experts: their rows are sharded
            unit(layer.mlp.experts, mesh=meshes.expert, **placed)
        if alone:
            unit(layer, mesh=meshes.dense)
    for module in part.ahead:
        unit(module, mesh=meshes.dense)
    unit(part, mesh=meshes.dense, **({"reshard_after_forward": False} if split.one_root and split.zero else {}))
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


class Run:
    """The parts of this rank and how they take a step. The process group must exist."""

    def __init__(self, split: Split, device: torch.device, meshes: Meshes | None = None) -> None:
        """Modules split over the ranks, without memory: ``allocate`` gives it to them. ``meshes`` of a run with the same
        degrees are used again: every one has communicators of its own."""
        self.split, self.device = split, device
        self.meshes = meshes or Meshes(split, device.type)
        self.rank = {name: self.meshes.all.get_local_rank(name) for name in ("pp", "replica", "shard", "cp", "tp")}
        self.place = Place(context=self.meshes.group("cp"), experts=self.meshes.group("ep"), attention=split.attention)
        self.mine = split.stages_of(self.rank["pp"])
        self.parts = [self._part(number) for number in self.mine]
        self.has_first, self.has_last = 0 in self.mine, len(split.stages) - 1 in self.mine
        self.replica = self.rank["replica"] * split.dp_shard + self.rank["shard"]
        self.span: Callable[..., AbstractContextManager[None]] = lambda *_: nullcontext()
        """Put around passes (kind, stage, microbatch), clipping and the update; a clock replaces it."""
        self.optimizers: list[Any] = []
        self.stages: list[Any] = []
        self.schedule = self._schedule() if split.pp > 1 else None

    def _part(self, number: int) -> Part:
        split, before = self.split, torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if split.precision == "fp64" else torch.float32)
        with torch.device("meta"):
            part = Part(split, number, self.place)
        torch.set_default_dtype(before)
        if split.linear:
            quantise(part, split, self.meshes.group("tp"))
        if split.tp > 1:
            split_tensors(part, self.meshes.all["tp"])
        if split.model.tied_embeddings and part.head is not None and part.embedding is not None:
            part.head.weight = part.embedding.weight
        shard_states(part, split, self.meshes)
        return part

    def allocate(self, *, fill: bool = True) -> Run:
        """Memory for weights, their values when asked for, and the optimizers."""
        locate(self.place, self.split, self.rank["cp"], self.device)
        for part in self.parts:
            part.to_empty(device=self.device)
        if fill:
            self._fill()
        self.optimizers = [self._optimizer(part) for part in self.parts]
        return self

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, int | None]]:
        """Names and parameters of all parts; of routed experts which of the ranks that hold them this is."""
        for part in self.parts:
            experts = {id(p) for m in part.modules() if isinstance(m, Experts) for p in m.parameters()}
            for name, parameter in part.named_parameters():
                mesh = self.meshes.experts if id(parameter) in experts else None
                yield name, parameter, None if mesh is None else mesh.get_local_rank("ep")

    def _fill(self) -> None:
        """The same weights whatever the split; each rank draws a whole tensor and keeps its part."""
        with torch.no_grad():
            for name, parameter, number in self.parameters():
                ep = 1 if number is None else self.split.ep
                shape = (parameter.shape[0] * ep, *parameter.shape[1:])
                drawn = initial(name, shape, parameter.dtype).chunk(ep)[number or 0]
                if isinstance(parameter, DTensor):
                    drawn = distribute_tensor(
                        drawn.to(self.device), parameter.device_mesh, parameter.placements, src_data_rank=None
                    )
                parameter.copy_(drawn)

    def fill_by_shard(self) -> Run:
        """Random weights, each rank draws only its own part; parts that several ranks hold are the same on all of them."""
        with torch.no_grad():
            for name, parameter, number in self.parameters():
                where = [] if number is None else [number]
                shard = parameter.data
                if isinstance(parameter, DTensor):
                    mesh, placements = parameter.device_mesh, parameter.placements
                    where += [mesh.get_local_rank(i) for i, one in enumerate(placements) if not one.is_replicate()]
                    shard = parameter.to_local()
                if "norm" in name:
                    shard.fill_(0.0 if name.endswith("bias") else 1.0)
                    continue
                seed = torch.Generator(device=shard.device).manual_seed(zlib.crc32(f"{name} {where}".encode()))
                shard.normal_(0.0, 0.02 if name.endswith("bias") else parameter.shape[-1] ** -0.5, generator=seed)
        return self

    def _optimizer(self, part: nn.Module) -> Any:
        """Adam as one kernel for all tensors, without temporary memory; DTensor has no such SGD."""
        rate = self.split.learning_rate
        if self.split.optimizer == "sgd":
            make: Any = partial(torch.optim.SGD, lr=rate, momentum=0.9)
        else:
            make = partial(torch.optim.AdamW, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        share = self.split.host_states / 100.0
        return HostStates(part.parameters(), share, make) if share else make(part.parameters())

    def examples(self, number: int) -> tuple[Tensor, Tensor]:
        """Input and output of a stage, without memory."""
        split, model = self.split, self.split.model
        dtype = DTYPES[split.precision]
        hidden = (split.micro_batch_size, split.local_tokens, model.hidden_size)
        logits = (split.micro_batch_size, split.sequence_length // split.cp, model.vocab_size // split.tp)
        first, last = number == 0, number == len(split.stages) - 1
        inputs = torch.empty(logits[:2] if first else hidden, dtype=torch.int64 if first else dtype, device="meta")
        return inputs, torch.empty(logits if last else hidden, dtype=dtype, device="meta")

    def _schedule(self) -> Any:
        split = self.split
        kind = get_schedule_class(split.schedule)
        for number, part in zip(self.mine, self.parts, strict=True):
            inputs, outputs = self.examples(number)
            self.stages.append(
                PipelineStage(part, number, len(split.stages), self.device, input_args=inputs.requires_grad_(number > 0),
                              output_args=outputs.requires_grad_(), group=self.meshes.all.get_group("pp"))
            )  # fmt: skip
        stages = self.stages if issubclass(kind, PipelineScheduleMulti) else self.stages[0]
        return kind(stages, split.num_microbatches, loss_fn=self.loss, scale_grads=False)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross entropies of this rank's tokens over the tokens of the global batch: losses and gradients of ranks add up.

        Of targets (batch, tokens, 1 + modules) the first: prediction modules have taken theirs in the forward pass.
        """
        count = self.split.global_batch_size * self.split.sequence_length
        targets = targets[..., 0] if targets.dim() > 2 else targets
        with FORWARD:
            if self.split.fused:
                return VocabularyLoss.apply(logits, targets, 1.0 / count, self.meshes.group("tp"))
            if self.split.tp > 1:
                logits = DTensor.from_local(logits, self.meshes.all["tp"], [Shard(-1)], run_check=False)
            wide = logits if logits.dtype == torch.float64 else logits.float()
            total = functional.cross_entropy(wide.flatten(0, 1), targets.flatten(0, 1), reduction="none")
            total = total.sum() / count
            return total.to_local() if isinstance(total, DTensor) else total

    def data(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of this rank's sequences, the part of them that it has."""
        rows = self.split.global_batch_size // self.split.dp
        mine = tokens(self.split, step)[self.replica * rows : (self.replica + 1) * rows].to(self.device)
        positions = part_of_sequence(self.split, self.rank["cp"]).to(self.device)
        following = [mine[:, positions + 1 + k] for k in range(1 + self.split.model.mtp_layers)]
        return mine[:, positions], torch.stack(following, -1) if len(following) > 1 else following[0]

    def gradients(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Both passes over the batch of this replica; the sum of its losses, where the head is."""
        found: list[Tensor] = []
        last = self.parts[-1]
        last.following, last.later_losses, last.loss = list(targets.chunk(self.split.num_microbatches)), [], self.loss
        with parallel.loss_parallel() if self.split.tp > 1 and not self.split.fused else nullcontext():
            if self.schedule is not None:
                self.schedule.step(
                    *((inputs,) if self.has_first else ()), target=targets if self.has_last else None,
                    losses=found if self.has_last else None, return_outputs=False,
                )  # fmt: skip
            else:
                count = self.split.num_microbatches
                pairs = list(zip(inputs.chunk(count), targets.chunk(count), strict=True))
                for number, (x, y) in enumerate(pairs):
                    self._sync(self.split.zero > 1 or number == count - 1)
                    with self.span("F", 0, number):
                        logits = self.parts[0](x)
                        loss = self.loss(logits, y)
                    if not self.split.keeps_outputs:
                        self._drop(logits)
                        del logits
                    with self.span("B", 0, number):
                        loss.backward()
                    found.append(loss.detach())
        self._add_copies()
        found += last.later_losses
        return torch.stack(found).sum() if found else torch.zeros((), device=self.device, dtype=torch.float32)

    def _drop(self, logits: Tensor) -> None:
        """Logits that nobody holds. A loss in plain kernels is in fp32, no tensor of which fits into their block: they go when
        their gradient is there."""
        if not self.split.fused:
            held = [logits]
            logits.register_hook(lambda _: held.clear())

    def _copied(self) -> nn.Parameter | None:
        """The embedding where another rank of the pipeline has it too: the first, and the last one's prediction modules."""
        if self.split.pp == 1 or not self.split.model.mtp_layers or not (self.has_first or self.has_last):
            return None
        return next(part.embedding.weight for part in self.parts if part.embedding is not None)

    def _add_copies(self) -> None:
        """The gradient of an embedding that two ranks have is the sum of theirs.  [Megatron Core, finalize_model_grads.py]"""
        if (parameter := self._copied()) is None:
            return
        assert isinstance(parameter.grad, DTensor)
        mine, group = parameter.grad.to_local(), self.meshes.all.get_group("pp")
        theirs, peer = torch.empty_like(mine), dist.get_global_rank(group, self.split.pp - 1 if self.has_first else 0)
        pair = [dist.P2POp(dist.isend, mine, peer, group), dist.P2POp(dist.irecv, theirs, peer, group)]
        for one in dist.batch_isend_irecv(pair):
            one.wait()
        mine += theirs

    def _sync(self, last: bool) -> None:
        """Whether the next backward pass reduces gradients and frees gathered weights."""
        part = self.parts[0]
        assert isinstance(part, FSDPModule)
        part.set_is_last_backward(last)
        part.set_requires_gradient_sync(last)
        part.set_reshard_after_backward(last or self.split.zero == 3)

    def step(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """One optimizer step: loss of this rank, and the norm of the gradient over all ranks."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        with self.span("passes"):
            loss = self.gradients(inputs, targets)
        with self.span("clip"):
            norm = self.clip()
        with self.span("optimizer"):
            for optimizer in self.optimizers:
                optimizer.step()
        return loss, norm

    def total_loss(self, loss: Tensor) -> float:
        """Loss of the global batch: every tensor-parallel rank of the last stage holds the same."""
        total = loss.detach().double().reshape(1)
        dist.all_reduce(total)
        return float(total) / self.split.tp

    def clip(self) -> Tensor:
        """Scale gradients so that their norm over all ranks is at most ``split.clip``; the norm before."""
        grads, holders = [], []  # of this rank, and how many ranks hold the same
        copied = self._copied()
        for parameter in (one for part in self.parts for one in part.parameters() if one.grad is not None):
            grad = parameter.grad
            assert isinstance(grad, DTensor)
            same = (n for n, one in zip(grad.device_mesh.shape, grad.placements, strict=True) if one.is_replicate())
            grads.append(grad.to_local())
            holders.append(math.prod(same) * (2 if parameter is copied else 1))
        wide = torch.float64 if self.split.precision == "fp64" else torch.float32
        norms = torch.stack(torch._foreach_norm(grads)).to(wide)
        total = (norms.square() / torch.tensor(holders, dtype=wide, device=self.device)).sum()
        dist.all_reduce(total)
        norm = total.sqrt()
        torch._foreach_mul_(grads, (self.split.clip / (norm + 1e-6)).clamp(max=1.0))
        return norm
