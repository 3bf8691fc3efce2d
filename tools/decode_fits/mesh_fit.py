"""The mesh of a kernel: factors on its law at a few nodes, near one and smooth where rows say little, times rising with every size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.sparse import coo_matrix, identity, vstack
from scipy.sparse.linalg import lsqr

from planner.curves import Column
from planner.serving.curves.kernel_tables import Kernel
from tools.decode_fits.measured import Data

SMOOTH, NEAR = 0.15, 0.05
"""Weights of a difference between neighbours, and of a distance from one, to that of a row."""
Matrix = Any
"""Of scipy.sparse."""


def fit_mesh(law: Kernel, data: Data, axes: dict[str, tuple[float, ...]]) -> Kernel:
    """The law with a mesh: the factors at the nodes that fit best, least absolute relative error by reweighting."""
    nodes = {name: np.array(values, float) for name, values in axes.items()}
    at_nodes = _time(law, dict(zip(nodes, np.meshgrid(*nodes.values(), indexing="ij"), strict=True)))
    matrix, target = interpolation(law, data, nodes, at_nodes)
    smooth, near = differences(at_nodes.shape), NEAR * identity(at_nodes.size)
    wanted = np.concatenate([np.zeros(smooth.shape[0]), np.full(at_nodes.size, NEAR)])
    confidence, factor = np.ones(len(target)), np.ones(at_nodes.size)
    for _ in range(8):
        system = vstack([matrix.multiply(confidence[:, None]), smooth, near]).tocsr()
        factor = lsqr(system, np.concatenate([confidence * target, wanted]), x0=factor, iter_lim=200)[0]
        confidence = 1.0 / np.sqrt(np.maximum(np.abs(matrix @ factor - target), 0.03))
        confidence /= np.sqrt(np.median(confidence**2))
    support = np.asarray(np.abs(matrix).sum(axis=0)).ravel().reshape(at_nodes.shape) + 0.05
    times = isotonic(np.clip(factor, 0.2, 5.0).reshape(at_nodes.shape) * at_nodes, support)
    return replace(law, axes=nodes, percent=np.round(100.0 * times / at_nodes, 0))


def _time(law: Kernel, sizes: dict[str, Column]) -> Column:
    """Seconds of the law alone, without the bounds of the device."""
    return law._sum(law._terms(sizes))


def interpolation(law: Kernel, data: Data, nodes: dict[str, Column], at_nodes: Column) -> tuple[Matrix, Column]:
    """(matrix, target): of every row the factors' weights, and what they should add up to; outside the mesh the law adds its own."""
    inside = {
        name: np.clip(values, nodes[name][0], nodes[name][-1]) if name in nodes else values
        for name, values in data.sizes.items()
    }
    beyond = np.maximum(_time(law, data.sizes) - _time(law, inside), 0.0)
    count = len(data.seconds)
    row, node, weight = weights_at(nodes, inside, count)
    values = weight * at_nodes.ravel()[node] / data.seconds[row]
    return coo_matrix((values, (row, node)), shape=(count, at_nodes.size)).tocsr(), 1.0 - beyond / data.seconds


def weights_at(axes: dict[str, Column], sizes: dict[str, Column], count: int) -> tuple[Column, Column, Column]:
    """Of the linear interpolation: (row, node, weight) of every corner of every row's cell, as one list."""
    rows, nodes, weights = [np.arange(count)], [np.zeros(count, int)], [np.ones(count)]
    for name, values in axes.items():
        if values.size == 1:
            continue
        x = np.clip(np.broadcast_to(sizes[name], (count,)), values[0], values[-1])
        below = np.clip(np.searchsorted(values, x, side="right") - 1, 0, values.size - 2)
        share = (x - values[below]) / (values[below + 1] - values[below])
        rows, nodes, weights = (
            [one for r in rows for one in (r, r)],
            [node * values.size + below + side for node in nodes for side in (0, 1)],
            [weight * (share if side else 1.0 - share) for weight in weights for side in (0, 1)],
        )
    return np.concatenate(rows), np.concatenate(nodes), np.concatenate(weights)


def differences(shape: tuple[int, ...]) -> Matrix:
    """Of nodes next to each other, one row a pair."""
    order = np.arange(int(np.prod(shape))).reshape(shape)
    long = [axis for axis in range(len(shape)) if shape[axis] > 1]
    low = np.concatenate([np.delete(order, -1, axis).ravel() for axis in long])
    high = np.concatenate([np.delete(order, 0, axis).ravel() for axis in long])
    pair, values = np.arange(low.size), np.full(low.size, SMOOTH)
    return coo_matrix(
        (np.concatenate([values, -values]), (np.tile(pair, 2), np.concatenate([low, high]))), shape=(low.size, order.size)
    )


def isotonic(times: Column, weight: Column) -> Column:
    """Times at the nodes made rising along every axis, by pooling neighbours that fall; a few sweeps over the axes."""
    for _ in range(6):
        for axis in range(times.ndim):
            moved, support = np.moveaxis(times, axis, -1), np.moveaxis(weight, axis, -1)
            for line in np.ndindex(moved.shape[:-1]):
                moved[line] = pooled(moved[line].copy(), support[line])
    return times


def pooled(values: Column, weight: Column) -> Column:
    """Pool adjacent violators on the logarithm."""
    blocks: list[list[float]] = []
    for value, w in zip(np.log(values), weight, strict=True):
        blocks.append([value, w, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            value2, w2, n2 = blocks.pop()
            value1, w1, n1 = blocks.pop()
            blocks.append([(value1 * w1 + value2 * w2) / (w1 + w2), w1 + w2, n1 + n2])
    return np.exp(np.concatenate([np.full(int(n), value) for value, _, n in blocks]))


def between(data: Data, first: str, second: str) -> Data:
    """The rows, and others half-way in both sizes: (a, b) as the geometric mean of (2 a, b / 2) and (a / 2, 2 b), where it is missing.

    Attention turns from waiting to reading at so many cached tokens, the product of both: along equal products it is smooth, while a
    straight line from 512 to 2,048 tokens of context passes a third above the corner.
    """
    names = sorted(data.sizes)
    known: dict[tuple[float, ...], list[float]] = {}
    for row in zip(*(data.sizes[name] for name in names), data.seconds, strict=True):
        known.setdefault(tuple(row[:-1]), []).append(row[-1])

    def moved(key: tuple[float, ...], up: float) -> tuple[float, ...]:
        return tuple(value * {first: up, second: 1.0 / up}.get(name, 1.0) for name, value in zip(names, key, strict=True))

    added = {}
    for key, times in known.items():
        middle, other = moved(key, 0.5), moved(key, 0.25)
        if other in known and middle not in known:
            added[middle] = float(np.sqrt(np.median(times) * np.median(known[other])))
    rows = np.array([[*key, seconds] for key, seconds in added.items()]).reshape(-1, len(names) + 1)
    sizes = {name: np.concatenate([data.sizes[name], rows[:, place]]) for place, name in enumerate(names)}
    return Data(sizes, np.concatenate([data.seconds, rows[:, -1]]), data.said)
