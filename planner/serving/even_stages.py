"""What the stages of a pipeline on one kind of GPU wait for: the last one, which has the head too, and each other's hosts.

tau_p = l / L (T - head - sends) + head with the l = ceil(L / p) layers of the longest stage, and g groups of sequences in flight:
the pass of a group takes max(T, g tau_p), as in ``chain``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.serving.result import StepTime
from planner.serving.serving_layout import ServingLayout


def wait_for_head(parts: StepTime, layout: ServingLayout, work: Any, *, layers: int, sends: Floats) -> Floats:
    """max(g tau_p - T, 0) of a ``Pass``: g = min(B, p) of one that decodes, p of one with prompts, whose groups all wait."""
    stages, head, total = np.asarray(layout.pp, dtype=np.float64), np.asarray(parts.head), np.asarray(parts.total)
    prompts = np.asarray(work.prompts, dtype=np.float64) * np.asarray(work.prompt_tokens, dtype=np.float64)
    groups = np.where(prompts > 0.0, stages, np.clip(np.asarray(work.batch), 1.0, stages))
    last = np.ceil(layers / stages) / layers * (total - head - sends) + head
    return np.where(stages > 1.0, np.maximum(groups * last - total, 0.0), 0.0)


def relays(layout: ServingLayout) -> Floats:
    """p (p - 1): the tokens of a group pass the hosts of all stages one after the other, p - 1 hops, and so do those of the other
    groups between two passes of one.

    [TensorRT-LLM 1.0 _torch/pyexecutor/py_executor.py, _executor_loop_pp, stage 2: "send/recv chain: (pp_size - 1) -> 0 -> 1 ->
    ... -> (pp_size - 2)", a pickled object received and sent on]
    """
    stages = np.asarray(layout.pp, dtype=np.float64)
    return stages * (stages - 1.0)
