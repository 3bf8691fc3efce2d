"""A serve plan with its hardware, as pools of engines: what every exporter looks at."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np

from planner.errors import PlannerError
from planner.hardware import HardwareProfile, load_hardware
from planner.record import record
from planner.serving.engine import Engine, load_engine
from planner.serving.plan_pricing import memory_of_chain
from planner.serving.serve_plan import ServePlan, ServeStage
from planner.serving.serving_layout import ServingLayout
from planner.serving.serving_memory import serving_memory
from planner.serving.serving_rules import fills_nodes, longest_of, too_long, violations
from planner.serving.serving_weights import draft_head, host_bytes
from planner.serving.traffic import Speculation

HEADROOM = 64
"""Tokens beyond the longest prompt and answer that a sequence may have: those of a chat template, and of prompts that a client
writes as text and the server cuts into other tokens."""
NATIVE = (("gpt-oss", "mxfp4"), ("deepseek-v3", "fp8_block"), ("deepseek-r1", "fp8_block"), ("kimi-k2", "fp8_block"))
"""Beginnings of names of models whose published weights are in a low precision, and which."""
ROUTER_PORT, FIRST_PORT = 8000, 8100
"""Where clients send requests; where the engines behind a router listen, one port each on a node."""


@record
class Pool:
    """Engines of one kind."""

    name: str
    """serve (prompts and answers), prefill or decode: the name of its script."""
    layout: ServingLayout
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        """GPUs of one engine."""
        return int(self.layout.engine_gpus)

    @property
    def engines(self) -> int:
        """Engines of this kind."""
        return int(self.layout.replicas)

    @property
    def nodes(self) -> int:
        """Nodes of one engine."""
        return math.ceil(self.gpus / self.gpus_per_node)

    @property
    def gpus_on_node(self) -> int:
        """GPUs of one engine on each of its nodes."""
        return min(self.gpus, self.gpus_per_node)

    @property
    def rank_batch(self) -> int:
        """Sequences in one step of one attention rank at most."""
        return math.ceil(int(self.layout.max_batch) / int(self.layout.attn_dp))

    @property
    def all_experts_spread(self) -> bool:
        """Experts over all ranks of a stage, none of them split."""
        return int(self.layout.ep) == int(self.layout.ranks)


@record
class Place:
    """One engine's share of one node."""

    node: int
    pool: str
    first_gpu: int
    gpus: int
    slot: int
    """Number among the engines of the node: ports are counted by it."""
    rank: int
    """Number of the node within the engine."""
    leader: int
    """Node of rank 0."""


@record
class ModelNames:
    """How files name the model: variables in scripts, names in manifests."""

    model: str = "$MODEL"
    draft: str = "$DRAFT_MODEL"
    quantization: tuple[str, ...] = ("${quantization[@]}",)
    """Words that say how weights are quantised while they are loaded; the array of the script."""


@record
class ServeJob:
    """A serve plan with what it names loaded."""

    plan: ServePlan
    hardware: HardwareProfile
    engine: Engine
    software: str
    """Version of the engine that will read the words; '' = the newest."""

    @staticmethod
    def of(plan: ServePlan) -> "ServeJob":
        """The job of a plan. Raises PlannerError when hardware or engine is unknown, or the engine cannot run the layout."""
        hardware, engine = load_hardware(plan.hardware), load_engine(plan.engine)
        software = engine.version if engine.file else plan.engine.partition("@")[2]
        job = ServeJob(plan=plan, hardware=hardware, engine=engine, software=software)
        cards = [load_hardware(name) for name in dict.fromkeys(one.hardware for one in plan.stages)] or [hardware]
        problems = [
            problem
            for pool, card in itertools.product(job.pools, cards)
            for problem in violations(plan.model, card, job.engine, plan.precision, replace(pool.layout, replicas=1))
        ] + [
            f"an engine of {pool.gpus} GPUs does not fill nodes of {pool.gpus_per_node}; choose degrees whose product divides by it"
            for pool in job.pools
            if not fills_nodes(pool.gpus, pool.gpus_per_node)
        ]  # fmt: skip
        if long := too_long(plan.model, plan.longest):
            problems.append(long)
        if problems:
            raise PlannerError(f"{plan.engine} cannot run this plan: {'; '.join(dict.fromkeys(problems))}")
        return job

    def before(self, *version: int) -> bool:
        """The engine that will read the words is older than this version."""
        numbers = [int(one) for one in re.findall(r"\d+", self.software)]
        return bool(numbers) and numbers < list(version)

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """The kinds of engines, those of prompts first."""
        per_node = self.gpus_of_rank if self.plan.stages else int(self.hardware.gpus_per_node)
        return tuple(
            Pool(name={"both": "serve"}.get(name, name), layout=layout, gpus_per_node=per_node)
            for name, layout in self.plan.pools().items()
        )

    @property
    def disaggregated(self) -> bool:
        """Prompts are computed by engines of their own."""
        return self.plan.prefill is not None

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Where each engine lies: one after the other, none over the edge of a node that it would fit into."""
        if self.plan.stages:
            return tuple(self._places_by_kind())
        found: list[Place] = []
        node, free, slot = -1, 0, 0
        for pool in self.pools:
            for _ in range(pool.engines):
                leader = node + 1
                for rank in range(pool.nodes):
                    if pool.nodes > 1 or free < pool.gpus:
                        node, free, slot = node + 1, pool.gpus_per_node, 0
                    leader = node if rank == 0 else leader
                    share = {"first_gpu": pool.gpus_per_node - free, "gpus": pool.gpus_on_node}
                    found.append(Place(node=node, pool=pool.name, slot=slot, rank=rank, leader=leader, **share))
                    free, slot = free - pool.gpus_on_node, slot + 1
        return tuple(found)

    @property
    def stages_by_kind(self) -> list[list[ServeStage]]:
        """Stages of one engine on several kinds, those of each kind together."""
        return [list(run) for _, run in itertools.groupby(self.plan.stages, key=lambda one: one.kind)]

    @property
    def gpus_of_rank(self) -> int:
        """GPUs that an engine on several kinds takes of each node, as engines start equal numbers on all: the most that divide what
        it has of each kind, in whole stages."""
        tp, runs = int(self.plan.layout.tp), self.stages_by_kind
        most = min(run[0].gpus_per_node for run in runs) // tp
        return tp * max(n for n in range(1, most + 1) if all(len(run) % n == 0 for run in runs))

    def _places_by_kind(self) -> Iterator[Place]:
        """Nodes of one kind after those of another, in the order of the pipeline; on each as many engines as have room."""
        gpus, first_node, first_rank = self.gpus_of_rank, 0, 0
        for run in self.stages_by_kind:
            ranks, room = len(run) * int(self.plan.layout.tp) // gpus, run[0].gpus_per_node // gpus
            for engine, rank in itertools.product(range(int(self.plan.layout.replicas)), range(ranks)):
                node, share = divmod(engine * ranks + rank, room)
                yield Place(
                    node=first_node + node, pool="serve", slot=engine, first_gpu=share * gpus, gpus=gpus, rank=first_rank + rank,
                    leader=self._leader(engine, gpus),
                )  # fmt: skip
            first_node += math.ceil(int(self.plan.layout.replicas) * ranks / room)
            first_rank += ranks

    def _leader(self, engine: int, gpus: int) -> int:
        """Node of the first rank of an engine on several kinds."""
        run = self.stages_by_kind[0]
        return engine * (len(run) * int(self.plan.layout.tp) // gpus) // (run[0].gpus_per_node // gpus)

    @property
    def num_nodes(self) -> int:
        """Nodes that engines lie on."""
        return max(one.node for one in self.places) + 1

    @property
    def num_engines(self) -> int:
        """Engines of all pools."""
        return sum(pool.engines for pool in self.pools)

    @property
    def routed(self) -> bool:
        """A router stands before the engines."""
        return self.num_engines > 1

    @property
    def speculation(self) -> Speculation | None:
        """Drafted tokens, as the plan declares them."""
        return self.plan.traffic.speculation

    @property
    def own_draft(self) -> bool:
        """The model drafts with prediction modules of its own."""
        return self.speculation is not None and self.speculation.draft_parameters > 0 and self.plan.model.mtp_layers > 0

    @property
    def head_drafts(self) -> bool:
        """What drafts is as large as a layer and a head on top of the model (EAGLE), and no model of its own."""
        said = self.speculation.draft_parameters if self.speculation is not None else 0.0
        return math.isclose(said, draft_head(self.plan.model), rel_tol=0.01)

    def stream_interval(self, pool: Pool) -> int:
        """Steps whose tokens a response holds: as planned, or so many that the process that makes a server's responses is busy at
        most half of the time."""
        traffic, found = self.plan.traffic, self.plan.prediction
        if traffic.stream:
            return math.ceil(traffic.stream)
        if found is None or pool.name == "prefill":
            return 1
        rate = found.output_tokens_per_second / pool.engines / traffic.tokens_per_step
        return max(math.ceil(2.0 * rate * self.engine.host["response"]), 1)

    def memory_share(self, pool: Pool) -> float | None:
        """The engine's flag of memory: as the plan says, or what it must be where the default would not hold one request."""
        if self.plan.options.memory_share is not None:
            return self.plan.options.memory_share
        plan, alone = self.plan, replace(pool.layout, replicas=1)
        if plan.stages:
            held = memory_of_chain(plan)
            return round(float(np.min(held.share)) - 0.0005, 3) if np.any(np.asarray(held.raised)) else None
        found = serving_memory(plan.model, self.hardware, self.engine, plan.precision, alone, plan.traffic)
        return round(float(found.share) - 0.0005, 3) if found.raised else None  # rounded down

    def host_bytes(self, pool: Pool) -> float:
        """Bytes of weights of layers that a GPU of a pool leaves in host memory, stages at their mean."""
        model, one = self.plan.model, pool.layout
        layers, sparse = model.num_layers, model.num_moe_layers
        return float(host_bytes(model, self.engine, self.plan.precision, one, layers, sparse)) / int(one.pp)

    @property
    def length(self) -> int:
        """Tokens that a sequence may grow to."""
        asked = self.plan.options.max_length or self.plan.longest + HEADROOM
        return min(asked, max(longest_of(self.plan.model), self.plan.longest))

    @property
    def dtype(self) -> str:
        """--dtype: of what is not quantised."""
        return {"bf16": "bfloat16", "fp16": "float16"}.get(self.plan.precision.weights, "auto")

    @property
    def cache(self) -> str:
        """Format of the cache; '' where it is what the engine takes for these weights anyway, which its flags call auto."""
        asked = self.plan.precision.cache
        return "" if asked == self.engine.cache_dtype_default(self.plan.precision.weights) else asked

    @property
    def native(self) -> bool:
        """The published weights are in the format of the plan."""
        name, weights = self.plan.model.name.lower(), self.plan.precision.experts or self.plan.precision.weights
        low = next((kind for beginning, kind in NATIVE if name.startswith(beginning)), "")
        return weights == low or (not low and weights in ("bf16", "fp16"))

    @property
    def hub_name(self) -> str | None:
        """The model on the hub, where its published weights can be served in the format of the plan, fp8 made while loading."""
        found = re.search(r"Hugging Face ([\w.-]+/[\w.-]+)", self.plan.model.source)
        return found[1].rstrip(".") if found and (self.native or self.plan.precision.weights == "fp8") else None

    @property
    def quantization(self) -> str:
        """How the published weights are quantised while they are loaded; '' = as they are."""
        return "fp8" if self.plan.precision.weights == "fp8" and not self.native and self.hub_name else ""

    def name_of(self, what: str) -> str:
        """Name for Kubernetes: lower case letters, digits and hyphens, at most 50."""
        model = re.sub(r"[^a-z0-9]+", "-", self.plan.model.name.lower()).strip("-") or "model"
        return f"{model[:30].strip('-')}-{what}"
