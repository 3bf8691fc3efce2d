"""How far the requests of a closed loop start and end together.

Requests of equal length that start together end together, and their successors arrive at once, wave after wave. Lengths that vary
over w = sqrt(12 Var[O]) tokens spread the N ends over w decodes; after k independent waves over sqrt(k) w, at most over all O.
n = N / spread prompts then arrive per decode, where requests that are out of step would bring N / O.

    prompts stop the decodes    all that waited continue together: ``bulk_of``
    prompts share the passes    a train of passes with n prompts each, at most as many as fit the token budget; a request waits for
                                the pass in progress and shares its own with those that arrived meanwhile: ``train_of``
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.record import record
from planner.serving.engine_passes import Engine


@record
class Bulk:
    """Requests of an engine whose prompts stop the decodes."""

    size: Any
    """Requests that end in the same decode, whose next prompts come at once."""
    packed: Any
    """Those of them whose prompts share a pass."""
    share: Any
    """Part of all prompts' time that falls into the decodes of a request."""


def bulk_of(engine: Engine, requests: Any) -> Bulk:
    """A prompt holds up all but those of its own passes and of later ones of the same bulk.

    Between two looks for requests each other one ends with the chance interval / O: a request meets (N - 1) interval / O of them.
    """
    requests = np.maximum(requests, 1.0)
    seldom = engine.seldom(requests)
    looks = np.minimum(seldom / np.maximum(engine.output, 1.0), 1.0)
    together = np.where(seldom > 1.0, 1.0 + (requests - 1.0) * looks, 1.0)
    size = np.clip(np.maximum(requests / np.maximum(engine.width, 1.0), together), 1.0, requests)
    packed = np.clip(np.floor(engine.budget / engine.input) * engine.dp, 1.0, size)
    return Bulk(size=size, packed=packed, share=(requests - size + 0.5 * (size - packed)) / requests)


@record
class Train:
    """Requests of an engine that mixes prompts with decodes."""

    own: Any
    """Prompts in the pass that ends a request's own prompt, with it."""
    ahead: Any
    """Prompts in the pass that is in progress when it arrives."""
    share: Any
    """Part of all prompts' time that falls into the decodes of a request: not that of its own pass."""
    packed: Any
    """Prompts of a pass that has any, where they stand ready: whole ones, unless the engine cuts them."""


def train_of(engine: Engine, requests: Any, batch: Any) -> Train:
    """``requests`` in flight of which ``batch`` decode: n prompts a pass, those that fit at most, and those that came meanwhile."""
    requests = np.maximum(requests, 1.0)
    fit = engine.room(batch) * engine.dp / engine.input
    together = np.minimum(engine.prompts_per_decode(requests), fit)
    own = np.clip(1.0 + together * (requests - 1.0) / requests, 1.0, np.maximum(np.minimum(fit, requests), 1.0))
    share = np.maximum(requests - own, 0.0) / requests
    # where passes take prompts seldom, one with prompts is over before the next may take one
    ahead = np.where(engine.seldom(requests) > 1.0, 0.0, together * share)
    packed = together if engine.served.engine.chunked_prefill else np.floor(together)
    return Train(own=own, ahead=ahead, share=share, packed=np.maximum(packed, 1.0))
