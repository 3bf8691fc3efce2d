"""The distinct stages, sends and groups of a batch of layouts, priced once and gathered for any of its candidates."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from planner.arrays import Floats, NDArray
from planner.cluster import Cluster, strides
from planner.cost.layer.operators import Shard
from planner.cost.memory import peak_points, states
from planner.cost.memory.autocast import stage_more
from planner.cost.own_terms import until_flush
from planner.cost.pipeline import partition
from planner.cost.pipeline.partition import StageParameters, Stages, stage_positions
from planner.cost.pipeline.schedules import flight_columns, in_flight
from planner.cost.price import state_traffic
from planner.cost.price.communication import hop_seconds
from planner.cost.price.deduplicate import distinct
from planner.cost.price.layer_costs import SHAPE_FIELDS, ShapePrices
from planner.cost.price.stage_times import StageSeconds, StageTimes, layer_hooks, stage_times, stages_first
from planner.cost.state_dtypes import stored_as
from planner.layout import Layout, is_v_shaped
from planner.record import record
from planner.trainer import Trainer
from planner.workload import Workload

STAGE_FIELDS = (
    *SHAPE_FIELDS, "order", "pp", "zero", "first_stage_layers", "last_stage_layers", "recompute_layers", "offload_activations",
    "offload_layers",
)  # fmt: skip
SEND_FIELDS = ("tp", "pp", "cp", "dp", "ep", "micro_batch_size", "sequence_parallel", "order", "vpp", "schedule")
FLIGHT_FIELDS = ("pp", "vpp", "num_microbatches", "schedule")


@record
class Gathered(StageSeconds, states.StageBytes, state_traffic.UpdateSeconds):
    """What many candidates share, gathered for N of them. Arrays are (3, N), the three stages first, unless stated:
    operations with a column of N are then contiguous, several times faster than with the stages last."""

    send: Floats
    """Seconds to hand one microbatch to the next stage, all its virtual stages together, (N,)."""


class Table:
    """Columns of distinct rows and the row of each candidate, priced when they are first asked for."""

    def __init__(self, price: Callable[[], tuple[dict[str, Any], NDArray[np.intp]]]) -> None:
        self._price = price

    @functools.cached_property
    def priced(self) -> tuple[dict[str, Any], NDArray[np.intp]]:
        """Both."""
        return self._price()

    def of(self, rows: NDArray[np.intp], places: int) -> "Table":
        """Some of the candidates, so many times."""
        return Table(lambda: (self.priced[0], np.tile(self.priced[1][rows], places)))


class GatheredOnDemand(Gathered):
    """The same, each column priced and gathered when it is first asked for: of many candidates few columns may be wanted."""

    def __init__(self, tables: list[Table], stages: slice = slice(None)) -> None:
        """``tables``: the last is that of ``flight_columns``, those before it in the order in which a name is looked for;
        ``stages``: which of the three are gathered."""
        self.__dict__.update(tables=tables, stages=stages)

    def __getattr__(self, name: str) -> Any:
        """Only of what is not there yet."""
        if name in Gathered.__dataclass_fields__:
            for table in self.tables:
                columns, rows = table.priced
                if name in columns:
                    one = columns[name]
                    found = _OnDemand(one, rows, self.stages) if isinstance(one, dict) else _some(one, rows, self.stages)
                    self.__dict__[name] = found
                    return found
        raise AttributeError(name)

    def some(self, rows: NDArray[np.intp], stages: slice) -> "GatheredOnDemand":
        """Some of the stages of some candidates."""
        return GatheredOnDemand([table.of(rows, 1) for table in self.tables], stages)

    def placed(self, rows: NDArray[np.intp], flights: dict[str, Floats], stages: slice) -> "GatheredOnDemand":
        """Some of the stages of some candidates at each of some places of a pipeline, places first.

        ``flights``: ``flight_columns`` of these.
        """
        places = next(iter(flights.values())).shape[-1]
        kept = [table.of(rows, places) for table in self.tables[:-1]]
        return GatheredOnDemand([*kept, Table(lambda: (flights, np.repeat(np.arange(places), len(rows))))], stages)


class _OnDemand(dict[str, Any]):
    """Columns in a dictionary of their own, likewise."""

    def __init__(self, columns: dict[str, Any], rows: NDArray[np.intp], stages: slice) -> None:
        super().__init__()
        self.columns, self.rows, self.stages = columns, rows, stages

    def __missing__(self, name: str) -> Any:
        self[name] = _some(self.columns[name], self.rows, self.stages)
        return self[name]


def _some(column: Floats, rows: NDArray[np.intp], stages: slice) -> Floats:
    """Rows of a column, (N,) or (3, N); of the latter some stages."""
    return np.asarray((column if column.ndim == 1 else column[stages]).take(rows, axis=-1))


@record
class Given:
    """Stages whose contents are given, as pipelines of unlike stages have them: three for each row of a layout."""

    stages: Stages
    positions: Floats
    """Numbers of the stages in their pipelines, (N, 3)."""
    number: NDArray[np.integer]
    """Equal for rows of equal contents and positions, (N,)."""
    traffic: Cluster
    """The GPUs with the links that gradients and weights go over."""


class StageTable:
    """The distinct stages, sends and groups of a batch of layouts, priced; gathers them for any of its rows. ``middle``
    is the number of the middle stage; 0: what stands for all of them, the microbatches in flight of stage 1. Where stages are
    ``given``, ``send`` is 0: what a hop costs depends on both of its ends. ``shapes``: those of the same job that were priced."""

    def __init__(
        self, workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout, middle: int = 0,
        given: Given | None = None, shapes: ShapePrices | None = None,
    ) -> None:  # fmt: skip
        trainer = stored_as(workload, trainer)
        layout = partition.assign_layers(workload.model, trainer, layout) if given is None else layout
        v_shaped = np.asarray(is_v_shaped(layout.schedule)).astype(np.int64)
        expert_stride = np.where(np.asarray(layout.ep) > 1, np.asarray(strides(layout)["ep"]), 1)
        hooked = (layer_hooks(trainer, layout) > 0).astype(np.int64)
        held = _chunks(workload, layout, v_shaped, middle) if given is None else given.number
        contents, content_rows = distinct(layout, STAGE_FIELDS, v_shaped, expert_stride, hooked, held)
        stages = _stages_of(workload, contents, content_rows, middle, given)
        blocks = (shapes or ShapePrices(workload, cluster, trainer)).blocks(contents)
        parameters = partition.stage_parameters(workload, contents, stages, trainer.kernels)
        adding = state_traffic.accumulation_seconds(workload, cluster, trainer, contents, parameters)
        times = stage_times(workload.model, cluster, trainer, contents, stages, blocks, adding)
        self._content = contents, content_rows, stages, times

        def parts(some: Layout, rows: NDArray[np.intp]) -> tuple[Stages, StageParameters]:
            if some is contents:  # few candidates are not sorted out
                return stages, parameters
            own = _stages_of(workload, some, rows, middle, given)
            return own, partition.stage_parameters(workload, some, own, trainer.kernels)

        def positions(some: Layout, rows: NDArray[np.intp]) -> Floats:
            return stage_positions(some, max(middle, 1)) if given is None else given.positions[_representatives(some, rows)]

        def content_table() -> tuple[dict[str, Any], NDArray[np.intp]]:
            return _content_columns(workload, trainer, contents, stages, times), content_rows

        def space_table() -> tuple[dict[str, Any], NDArray[np.intp]]:
            some, rows = distinct(layout, _space_fields(trainer), v_shaped, held)
            return _space_columns(workload, cluster, trainer, some, parts(some, rows), positions(some, rows)), rows

        def state_table() -> tuple[dict[str, Any], NDArray[np.intp]]:
            some, rows = distinct(layout, state_traffic.TRAFFIC_FIELDS, v_shaped, held)
            traffic = cluster if given is None else given.traffic.of_rows(_representatives(some, rows))
            return _state_columns(workload, traffic, trainer, some, parts(some, rows)), rows

        def flight_table() -> tuple[dict[str, Any], NDArray[np.intp]]:
            some, rows = distinct(layout, FLIGHT_FIELDS, *(() if given is None else (held,)))
            return flight_columns(until_flush(trainer, some), positions(some, rows)), rows

        self._tables = [
            Table(content_table), Table(lambda: _sends(workload, cluster, trainer, layout, given)), Table(space_table),
            Table(state_table), Table(flight_table),
        ]  # fmt: skip

    def take(self, rows: slice) -> Gathered:
        """Everything of some candidates."""
        columns: dict[str, Any] = {}
        for table in self._tables:
            priced, numbers = table.priced
            columns |= taken_rows(priced, numbers[rows])
        return Gathered(**columns)

    def on_demand(self) -> GatheredOnDemand:
        """Everything of all candidates, column by column as it is asked for."""
        return GatheredOnDemand(self._tables)

    def ends(self, rows: slice) -> tuple[Floats, Floats]:
        """Seconds of embedding and head in the forward and in the backward pass of some candidates, (3, N) each."""
        _, numbers, _, times = self._content
        return times.ends_forward.take(numbers[rows], axis=-1), times.ends_backward.take(numbers[rows], axis=-1)

    def content(self, row: int) -> tuple[Stages, StageTimes]:
        """Contents (1, 3) and times (3, 1) of the stages of one candidate."""
        _, rows, stages, times = self._content
        here = rows[row : row + 1]
        held = Stages(**{name: one[here] for name, one in vars(stages).items()})
        return held, StageTimes(**taken_rows(vars(times), here))


KEPT_FIELDS = tuple(name for name in state_traffic.TRAFFIC_FIELDS if not name.endswith("stage_layers"))
"""Fields that ``kept_bytes`` depends on."""


def kept_bytes(workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout) -> tuple[Floats, Floats]:
    """Bytes that every split of the layers over the stages and all recompute leave to the fullest stage, (N,): on the device, and
    in host memory per GPU. Without the price of anything else.

    Weights, gradients where they lie in buffers, optimizer states, what is lost between them, communicators and context. The
    fullest of p stages holds at least the mean, a p-th of the layers (embedding and head left out where p > 1). A stage in the
    middle stands for those with the mean of experts rounded up, which makes it lighter where a dense layer is the heavier one:
    so the lighter of two counts, that of the model and one with experts in every layer.
    """
    trainer, model = stored_as(workload, trainer), workload.model
    pp = partition.column(layout.pp)
    ends, none = (pp == 1).astype(float), np.zeros_like(pp)
    found = []
    for moe in {model.num_moe_layers, model.num_layers * (model.num_moe_layers > 0)}:
        held = Stages(
            dense=none + (model.num_layers - moe) / pp, moe=none + moe / pp, embedding=ends, head=ends * (1.0 + model.mtp_layers),
            weight=none, first_dense=none, first_moe=none,
        )  # fmt: skip
        found.append(_kept_bytes(workload, cluster, trainer, layout, held))
    device, host = (functools.reduce(np.minimum, one)[:, 0] for one in zip(*found, strict=True))
    return device + cluster.hardware.context_memory, host


def _kept_bytes(
    workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout, stages: Stages
) -> tuple[Floats, Floats]:
    """Of stages that are given, (N, 1) each, without the context."""
    parameters = partition.stage_parameters(workload, layout, stages, trainer.kernels)
    states_held = states.state_bytes(workload, trainer, layout, parameters)
    held = states.on_device(workload, layout, states_held)
    alive = held["weights"] + held["gradients"] * (not trainer.stored.gradients_on_demand) + held["optimizer_states"]
    device = alive * (1.0 + trainer.stored.fragmentation) + states.communicator_bytes(cluster, layout, trainer)
    return device, states.host_bytes(workload, trainer, layout, parameters, states_held)


def _representatives(some: Layout, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """A candidate of every distinct row; ``rows``: the distinct row of each candidate."""
    found = np.empty(len(some), dtype=np.intp)
    found[rows] = np.arange(len(rows))
    return found


def _stages_of(
    workload: Workload, some: Layout, rows: NDArray[np.intp], middle: int, given: Given | None
) -> Stages:
    """What the stages of distinct layouts hold."""
    if given is None:
        return partition.split_stages(workload.model, some, middle)
    own = _representatives(some, rows)
    return Stages(**{name: one[own] for name, one in vars(given.stages).items()})


def _sends(
    workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout, given: Given | None
) -> tuple[dict[str, Any], NDArray[np.intp]]:  # fmt: skip
    """Seconds of a hand-over; 0 where stages are given."""
    if given is not None:
        return {"send": np.zeros(1)}, np.zeros(len(layout), dtype=np.intp)
    sends, rows = distinct(layout, SEND_FIELDS)
    return {"send": send_seconds(workload, cluster, trainer, sends)}, rows


def taken_rows(columns: dict[str, Any], rows: NDArray[np.intp]) -> dict[str, Any]:
    """Some rows of every column, also of those in a dictionary of their own."""
    return {
        name: taken_rows(one, rows) if isinstance(one, dict) else one.take(rows, axis=-1) for name, one in columns.items()
    }


def _content_columns(
    workload: Workload, trainer: Trainer, layout: Layout, stages: Stages, times: StageTimes
) -> dict[str, Any]:
    layers = np.maximum(stages.dense + stages.moe, 2.0)
    moved = state_traffic.offloaded_layers(layout, layers)  # but two layers, whose copies are under way
    resident = np.where(moved > 0, np.minimum((layers - moved + 2.0) / layers, 1.0), np.inf)
    kept = np.zeros((len(layout), 1))
    for term in trainer.terms:
        kept = kept + term.stored_bytes(workload, layout)
    more, brought = stage_more(workload, trainer, layout, stages)
    parts = (
        peak_points.shape_parts(workload, trainer, layout, stages, times) if trainer.stored.gradients_on_demand else {}
    )
    parts |= {"working": parts["working"] + brought.T} if parts else {}
    return {
        "slowest": times.slowest,
        "forward": times.forward,
        "backward": times.backward,
        "stored": times.saved + times.embedding_saved + kept.T + more.T,
        "first_chunk_more": times.first_chunk_more,
        "resident": stages_first(resident),
        "transient": np.maximum(times.working + brought.T, times.loss),
        "shape_parts": parts,
    }


def _state_columns(
    workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout, held: tuple[Stages, StageParameters]
) -> dict[str, Floats]:
    stages, parameters = held
    reduce, gather, (reduced_last, gathered_first) = state_traffic.reduce_and_gather(
        workload, cluster, trainer, layout, stages, parameters
    )
    held_bytes = states.state_bytes(workload, trainer, layout, parameters)
    outward, inward = state_traffic.host_copy_seconds(cluster, layout, held_bytes)
    optimizer, offload = state_traffic.optimizer_seconds(workload, cluster, trainer, layout, parameters)
    fresh = step_end = pooled = np.zeros_like(parameters.dense)
    for term in trainer.terms:
        more = term.end_bytes(workload, layout, parameters)
        fresh, step_end, pooled = fresh + more[0], step_end + more[1], pooled + more[2]
    columns = {
        **states.on_device(workload, layout, held_bytes),
        "host": states.host_bytes(workload, trainer, layout, parameters, held_bytes),
        "fresh": fresh, "step_end": step_end, "pooled": pooled,
        "buffers": states.communicator_bytes(cluster, layout, trainer),
        "reduce": reduce + outward, "gather": gather + inward,
        "copies": state_traffic.copy_seconds(cluster, trainer, layout, parameters),
        "reference": (gather + inward) * (partition.column(layout.zero) >= 3) * (workload.forwards - 1.0),
        "reduced_last": reduced_last, "gathered_first": gathered_first,
        "optimizer": optimizer, "offload": offload,
        "host_sum": state_traffic.host_sum_seconds(cluster, trainer, layout, held_bytes),
    }  # fmt: skip
    return {name: stages_first(values) for name, values in columns.items()}


def _space_columns(
    workload: Workload,
    cluster: Cluster,
    trainer: Trainer,
    layout: Layout,
    held: tuple[Stages, StageParameters],
    positions: Floats,
) -> dict[str, Any]:
    workspace = states.workspace_bytes(workload, cluster, trainer, layout, *held)
    launched = most = waiting = busy = np.zeros((len(layout), 1))
    flights = in_flight(layout, positions) if trainer.terms else launched
    for term in trainer.terms:
        found = term.record_stream_bytes(workload, layout, held[0], flights)
        if found is not None:
            launched, most, waiting, busy = found
    columns = {
        "workspace": workspace,
        "held_launched": launched,
        "held_most": most,
        "held_waiting": waiting,
        "held_busy": busy,
    }
    parts = peak_points.state_parts(workload, trainer, layout, *held) if trainer.stored.gradients_on_demand else {}
    return {name: stages_first(values) for name, values in columns.items()} | {"state_parts": parts}


def _space_fields(trainer: Trainer) -> tuple[str, ...]:
    """Fields that decide the workspace; the number of microbatches only where each has its buffers."""
    fields: tuple[str, ...] = (
        "tp", "cp", "ep", "etp", "dp", "dp_shard", "pp", "micro_batch_size", "zero", "first_stage_layers",
        "last_stage_layers", "offload_parameters",
    )  # fmt: skip
    if trainer.stored.gradients_on_demand:
        fields = (*fields, "vpp", "schedule", "sequence_parallel")
    if trainer.terms:
        return (*fields, "num_microbatches", "schedule", "vpp")
    return (*fields, "num_microbatches") if trainer.stored.gradients_on_demand else fields


def _chunks(workload: Workload, layout: Layout, v_shaped: NDArray[np.int64], middle: int) -> NDArray[np.intp]:
    """A number for every way in which virtual stages differ: by leading dense layers, few ways of cutting a model move them, and
    by a remainder of layers; so that most layouts with other chunks stay equal."""
    cuts, rows = distinct(layout, ("pp", "vpp", "first_stage_layers", "last_stage_layers"), v_shaped)
    held, vpp = partition.split_stages(workload.model, cuts, middle), partition.column(cuts.vpp)
    first, whole = np.hstack([held.first_dense, held.first_moe]), np.hstack([held.dense, held.moe])
    even = np.all(np.abs(first * vpp - whole) < partition.TIE, axis=-1, keepdims=True)
    differs = ~even & (vpp > 1) & ~np.reshape(is_v_shaped(cuts.schedule), (-1, 1))
    cut = np.hstack([held.moe, np.where(differs, np.hstack([first, vpp]), 0.0)])
    _, number = np.unique(cut, axis=0, return_inverse=True)
    return number.reshape(-1)[rows]


def send_seconds(workload: Workload, cluster: Cluster, trainer: Trainer, layout: Layout) -> Floats:
    """Seconds to hand one microbatch's activations to the next stage, once per virtual stage, shape (N,).

    T_s h elements with sequence parallelism; without it each tensor-parallel rank sends its 1/t and the receivers gather
    the whole inside the node.  [Narayanan 2021, section 4.1] A trainer may send T h from each rank; nothing is gathered then.
    """
    shard = Shard(workload=workload, trainer=trainer, layout=layout, ep_stride=1.0)
    pp = np.asarray(layout.pp, dtype=float)
    if np.all(pp == 1):
        return np.zeros(len(layout))
    whole = shard.tokens * workload.model.hidden_size * shard.element
    split = np.asarray(layout.sequence_parallel) == 1
    unsplit = any(term.sends_whole_tensors() for term in trainer.terms) & ~split
    more = sum(term.sent_bytes(workload) for term in trainer.terms)
    send = hop_seconds(cluster, whole / np.where(unsplit, 1.0, shard.tp) + more, pp, np.asarray(strides(layout)["pp"]))
    gather = np.where(split | unsplit, 0.0, cluster.collective_time("all_gather", whole, shard.tp, 1.0))
    return np.where(pp > 1, send + gather, 0.0) * np.asarray(layout.vpp, dtype=float)
