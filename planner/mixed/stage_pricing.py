"""Seconds and bytes of pipeline stages of any contents on one kind of GPU, many at once, by that kind's own curves."""

from __future__ import annotations

import dataclasses
import functools
from functools import cached_property

import numpy as np

from planner.arrays import Floats, NDArray
from planner.cluster import Cluster
from planner.cost.estimate import HIDDEN, PARTS
from planner.cost.memory.allocator import stage_memory
from planner.cost.memory.states import COMPONENTS
from planner.cost.pipeline.partition import Stages, experts_share
from planner.cost.pipeline.schedules import flight_columns
from planner.cost.price.compute import model_passes
from planner.cost.price.data_parallel import data_parallel, data_slowdown
from planner.cost.unique_stages import GatheredOnDemand, Given, StageTable
from planner.layout import Layout
from planner.mixed.mixed_job import MixedJob
from planner.model import ModelSpec
from planner.record import record
from planner.search import SAFE

Place = tuple[int, int, int]
"""Stages of a pipeline, number of one of them, microbatches that pass it."""
RATE = 1.702
"""Slope of the logistic law that stands for a normal one, as ``cost.estimate`` has it."""


def stage_contents(model: ModelSpec, start: Floats, layers: Floats, first: Floats, last: Floats, vpp: int = 1) -> Stages:
    """What stages hold that begin behind ``start`` layers and have ``layers`` of them; all arrays (N, 3).

    With ``vpp`` chunks only the first, of layers / vpp, begins there: the others lie behind the leading dense layers.
    Of the layers behind the leading dense ones each counts as the mean of those with and without experts, as in
    ``partition.split_stages``; prediction modules sit on the last stage.
    """
    lead = np.clip(model.num_dense_layers - start, 0.0, layers / vpp) if model.is_moe else np.zeros_like(layers)
    more = last * model.mtp_layers * model.layers_per_mtp
    moe, chunk_moe = ((part - lead) * experts_share(model) for part in (layers, layers / vpp))
    moe = moe + more * bool(model.num_moe_layers)
    return Stages(
        dense=layers + more - moe, moe=moe, embedding=first, head=(1.0 + model.mtp_layers) * last, weight=np.ones_like(layers),
        first_dense=layers / vpp - chunk_moe, first_moe=chunk_moe,
    )  # fmt: skip


@record
class PricedStages:
    """Stages of one kind, three in each of N rows; all arrays (3, N)."""

    job: MixedJob
    kind: str
    layout: Layout
    """What is around them: a row each, with the whole data parallel degree."""
    stages: GatheredOnDemand
    """Of the cost model, on a GPU as fast as the profile."""
    ends: tuple[Floats, Floats]
    """Likewise the seconds of embedding and head alone, forward and backward."""

    @property
    def slow(self) -> float:
        """Measured time over that of the profile."""
        return self.job.slowdown[self.kind]

    @property
    def forward(self) -> Floats:
        """Seconds of a microbatch's forward pass, without sends."""
        return self.slow * self.stages.forward

    @property
    def backward(self) -> Floats:
        """Seconds of its backward pass, recompute included."""
        return self.slow * self.stages.backward

    def parts(self) -> dict[str, Floats]:
        """Seconds of a microbatch by part, of the stages of the first of the three columns, (N,) each.

        The slowest of the three is meant: they must be equal, as ``priced_rows`` makes them.
        """
        return {name: self.slow * self.stages.slowest[name] for name in PARTS[:6]} | {
            "waiting": self.slow * self.stages.slowest["waiting"]
        }

    def hidden(self) -> dict[str, Floats]:
        """Seconds of hidden communication of a microbatch, likewise."""
        return {name: self.stages.slowest[f"{name}_hidden"] for name in HIDDEN[:3]}

    def flop(self) -> Floats:
        """Model FLOP of a microbatch on all stages and ranks of a pipeline, (N,)."""
        ranks = np.asarray(self.layout.tp, dtype=float) * np.asarray(self.layout.cp) * np.asarray(self.layout.pp)
        return np.asarray(self.stages.slowest["flop"] * ranks * model_passes(self.job.workload))

    def step_end(self, hops: Floats | float = 0.0) -> dict[str, Floats]:
        """Seconds at the end of a step by part: exposed traffic of gradients and weights, hidden traffic, update, host.

        ``hops``: seconds that a pass waits for sends, a window that traffic hides in as well.
        """
        trainer, cluster = self.job.trainers[self.kind], self.job.clusters[self.kind]
        window = self.forward + hops / 2.0, self.backward + hops / 2.0
        slowdown = data_slowdown(cluster, self.layout)
        exposed, hidden = data_parallel(trainer, self.layout, self.stages, *window, slowdown)
        return {"exposed": exposed, "hidden": hidden, **self.update()}

    def update(self) -> dict[str, Floats]:
        """Of these the update and the host."""
        offload = self.stages.on_host(np.asarray(self.layout.num_microbatches, dtype=float))
        return {"optimizer": self.slow * self.stages.optimizer, "offload": offload}

    @cached_property
    def memory(self) -> tuple[dict[str, Floats], Floats]:
        """Bytes at the peak by component, and what of them the allocator gives back when it has to."""
        hardware = self.job.clusters[self.kind].hardware
        trainer = self.job.trainers[self.kind]
        found, given, _ = stage_memory(trainer, self.stages, hardware, self.stages.slowest["host_share"])
        return {**found, "context": np.full_like(given, hardware.context_memory)}, given

    @cached_property
    def out_of_memory(self) -> Floats:
        """Chance that a card of the kind runs out: logistic in ln(usable / needed) over the error of the memory model."""
        found, given = self.memory
        needed = np.sum([found[name] for name in COMPONENTS], axis=0) - given
        hardware, error = self.job.clusters[self.kind].hardware, self.job.trainers[self.kind].stored.memory_error
        z = np.log(hardware.usable_memory / needed) / error
        return np.asarray(1.0 / (1.0 + np.exp(np.clip(RATE * z, -700.0, 700.0))))

    @cached_property
    def fits(self) -> NDArray[np.bool_]:
        """The chance to run out is at most SAFE, and the node's host memory holds what is offloaded."""
        cluster = self.job.clusters[self.kind]
        host = self.stages.host * min(cluster.hardware.gpus_per_node, cluster.num_gpus)
        return np.asarray((self.out_of_memory <= SAFE) & (host <= cluster.hardware.host_memory))

    def some(self, rows: NDArray[np.intp], columns: slice) -> PricedStages:
        """Some rows and columns of the stages where they are; (columns, rows)."""
        return dataclasses.replace(self, layout=self.layout.take(rows), stages=self.stages.some(rows, columns))

    def placed(
        self, rows: NDArray[np.intp], places: tuple[Place, ...], schedule: tuple[int, int], columns: slice = slice(None)
    ) -> PricedStages:  # fmt: skip
        """Some of the stages at other places of a pipeline, where other numbers of microbatches wait; (3, places x rows), or
        (columns, places x rows). ``schedule``: its number and the virtual stages."""
        calls = [term.flush() for term in self.job.trainers[self.kind].terms if term.flush()]
        flights = _flights(places, *schedule, min(calls, default=0))
        return dataclasses.replace(self, stages=self.stages.placed(rows, flights, columns))


@functools.lru_cache(maxsize=4096)
def _flights(places: tuple[Place, ...], schedule: int, vpp: int, call: int) -> dict[str, Floats]:
    """``flight_columns`` of places of a pipeline that runs empty after ``call`` microbatches (0: at the end), (3, places)."""
    pp, position, microbatches = np.array(places).T
    at = Layout(
        pp=pp, num_microbatches=np.minimum(microbatches, call or microbatches), schedule=np.full(len(places), schedule),
        vpp=np.full(len(places), vpp),
    )  # fmt: skip
    return flight_columns(at, np.repeat(position[:, None].astype(float), 3, axis=1))


def price_stages(
    job: MixedJob, kind: str, layout: Layout, held: tuple[Stages, NDArray[np.integer]], positions: Floats,
    traffic: Cluster | None = None,
) -> PricedStages:  # fmt: skip
    """Price stages of one kind; ``positions`` are (N, 3), N the rows of ``layout``.

    ``held``: their contents, (N, 3), and a number that is equal for rows of equal contents and positions. ``traffic``: the links
    that gradients and weights go over; None: those of the kind.
    """
    cluster, rows, (contents, number) = job.clusters[kind], len(layout), held
    layout = layout.replace(**{name: np.broadcast_to(np.asarray(one), (rows,)) for name, one in layout.columns().items()})
    given = Given(stages=contents, positions=positions, number=number, traffic=traffic or cluster)
    table = StageTable(job.workload, cluster, job.trainers[kind], layout, given=given)
    return PricedStages(job=job, kind=kind, layout=layout, stages=table.on_demand(), ends=table.ends(slice(0, rows)))
