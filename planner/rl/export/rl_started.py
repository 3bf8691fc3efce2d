"""What every target of an RL plan is made of: facts for templates, settings, how a folder is started, flags and TOML."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from planner.record import record
from planner.rl.export.framework_job import FrameworkJob
from planner.rl.rl_framework import STATES
from planner.trainers.bundle.quoting import yaml_from
from planner.trainers.megatron import core_settings as mcore

HERE = "planner.rl.export"
Settings = dict[str, Any]
"""Name of a setting -> value, or nested."""
Variable = tuple[str, str | None, str]
"""Name of a shell variable, its default (None: it must be set), what it is."""
MODEL: Variable = ("MODEL", None, "Folder or hub name of the model in Hugging Face format")
PROMPTS: Variable = ("TRAIN_FILES", None, "Prompts with what rewards need, in the form that the framework reads")
ESTIMATORS: Mapping[str, Mapping[str, str]] = {
    "verl": {
        "grpo": "grpo", "dapo": "grpo", "gspo": "grpo", "rloo": "rloo", "reinforce++": "reinforce_plus_plus", "ppo": "gae",
    },
    "nemo-rl": {"grpo": "grpo", "dapo": "grpo", "gspo": "grpo", "reinforce++": "reinforce_plus_plus", "ppo": "gae"},
    "openrlhf": {
        "grpo": "group_norm", "dapo": "group_norm", "gspo": "group_norm", "rloo": "rloo", "reinforce++": "reinforce_baseline",
        "ppo": "gae",
    },
    "trl": {"grpo": "grpo", "dapo": "dapo", "gspo": "grpo"},
    "slime": {"grpo": "grpo", "dapo": "grpo", "gspo": "gspo", "reinforce++": "reinforce_plus_plus_baseline", "ppo": "ppo"},
    "areal": {"grpo": "grpo", "dapo": "grpo", "gspo": "grpo", "ppo": "ppo"},
    "prime-rl": {"grpo": "grpo"},
}  # fmt: skip
"""Framework -> algorithm of a plan -> its word for how advantages are made."""


@record
class Started:
    """The files of one framework and how they are started."""

    settings: Mapping[str, Any]
    """Names that are held against those of the framework; nested, or flat with dots or dashes."""
    files: Mapping[str, str]
    """Name in the folder -> text."""
    entry: tuple[str, ...]
    """Words that start it; ``$NAME`` and ``${NAME[@]}`` are expanded."""
    prepare: tuple[str, ...] = ()
    """Shell lines before it."""
    ray: bool = True
    """It runs on a Ray cluster, which the script starts where there are several nodes; else every node runs the words."""
    starts_ray: bool = False
    """A cluster is started on one node as well."""
    once: bool = False
    """It is started once, on a machine that submits jobs, and not on every node."""
    variables: tuple[Variable, ...] = (MODEL, PROMPTS)
    install: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@record
class RlTarget:
    """One framework."""

    title: str
    render: Callable[[FrameworkJob], Started]
    refusals: Callable[[FrameworkJob], list[str]] = field(default=lambda _: [])
    """Sentences on what it cannot run."""
    kinds: bool = False
    """Pools may be of unlike GPUs: it is said which nodes generate."""
    weights: tuple[str, ...] = ("bf16",)
    """Formats of the rollout's weights that it makes of the trainer's."""
    caches: tuple[str, ...] = ("bf16",)
    """Formats of the rollout's keys and values that can be asked for."""


def facts(job: FrameworkJob) -> Settings:
    """What templates may name."""
    place, layout, precision = job.plan.placement, job.layout, job.plan.layouts.rollout_precision
    nodes, gpus = job.train_pool
    out_nodes, out_gpus = job.rollout_pool
    core = mcore.recompute(job.actor) if job.backend.name == "megatron" else {}
    unset = ("recompute_modules", "recompute_method", "recompute_num_layers", "recompute_granularity")
    chunk = dict.fromkeys(unset) | core
    return {
        **{name: value for name, value in layout.to_dict().items() if name != "order"}, "shard": int(layout.shard),
        "job": job, "work": job.work, "model": job.work.model, "backend": job.backend.name, "engine": job.engine.name,
        "rollout": job.rollout, "train_nodes": nodes, "train_gpus": gpus, "rollout_nodes": out_nodes, "rollout_gpus": out_gpus,
        "critic_nodes": job.critic_pool[0], "critic_gpus": job.critic_pool[1], "critic_apart": place.critic_gpus > 0,
        "hybrid": place.mode == "hybrid", "weights": precision.weights, "cache": precision.cache,
        "critic": job.work.critic is not None, "sync": place.sync, "partial": place.partial,
        **{f"waits_{one}": place.mode != "split" and one in job.framework.offloaded for one in STATES},
        "estimator": ESTIMATORS[job.framework.name].get(job.work.algorithm, ""), "bucket": int(job.framework.bucket),
        "fully_async": place.staleness > 1 or place.partial or "fully_async" in job.offered.program, "transformer": chunk,
        "engine_nodes": max(-(-int(job.rollout.engine_gpus) // job.per_node), 1), "zero": int(layout.zero),
    }  # fmt: skip


def settings_of(job: FrameworkJob, file: str, **more: Any) -> Settings:
    """The data in a template of this folder."""
    return yaml_from(HERE, file, {**facts(job), **more})


def flag_words(settings: Mapping[str, Any]) -> list[str]:
    """Flags of a command line: True is a bare flag, False and None are left out."""
    found: list[str] = []
    for name, value in settings.items():
        if value is True:
            found.append(name)
        elif value is not None and value is not False:
            found += [name, *(map(str, value) if isinstance(value, list) else [str(value)])]
    return found


def toml_text(data: Mapping[str, Any], place: str = "") -> str:
    """TOML of nested plain data; a text is written as JSON writes it, which TOML's basic strings are."""
    plain = {key: one for key, one in data.items() if not _is_table(one)}
    lines = [f"{key} = {_toml(value)}" for key, value in plain.items() if value is not None]
    text = (f"[{place}]\n" if place and (lines or not data) else "") + "".join(f"{line}\n" for line in lines)
    for key, value in data.items():
        inner = f"{place}.{key}" if place else key
        if isinstance(value, Mapping):
            text += toml_text(value, inner)
        elif _is_table(value):
            text += "".join(toml_text(one, inner).replace(f"[{inner}]\n", f"[[{inner}]]\n", 1) for one in value)
    return text


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(one, Mapping) for one in value))


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


