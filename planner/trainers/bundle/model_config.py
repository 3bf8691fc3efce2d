"""A model's architecture as the config.json of Hugging Face transformers: what front ends and servers read sizes from.

Every file written here is read back with planner.hugging_face before it is given out: the family whose file means exactly
the plan's model is taken, and no file is written when there is none.
"""

from functools import lru_cache
from typing import Any

from planner.errors import PlannerError
from planner.model import ModelSpec, from_hugging_face, to_dict
from planner.trainers.bundle.quoting import json_text, yaml_from
from planner.trainers.bundle.target import ExportJob

_NOT_ARCHITECTURE = ("name", "source", "published_parameters", "published_active_parameters", "quantised")


@lru_cache(maxsize=64)
def model_config(model: ModelSpec) -> dict[str, Any] | None:
    """The config.json that describes exactly this model; None when no family of transformers known here does."""
    wanted = _architecture(model)
    for kind, keys in yaml_from("bundle", "families.yaml.j2", {"m": model}).items():
        config = {"architectures": [keys.pop("class")], "model_type": kind, "dtype": "bfloat16", **keys}
        try:
            if _architecture(from_hugging_face(config)) == wanted:
                return config
        except PlannerError:
            continue
    return None


def config_file(job: ExportJob) -> str:
    """Text of the config.json, whose longest sequence is at least the job's; a job whose model has no family has none."""
    longest = max(job.model.max_sequence_length, job.workload.sequence_length)
    return json_text({**(model_config(job.model) or {}), "max_position_embeddings": longest})


def family(model: ModelSpec) -> str | None:
    """Name of the family (model_type); None as for model_config."""
    config = model_config(model)
    return None if config is None else str(config["model_type"])


def _architecture(model: ModelSpec) -> dict[str, Any]:
    """Without the width of dense layers where there are none."""
    skipped = _NOT_ARCHITECTURE if model.num_plain_layers else (*_NOT_ARCHITECTURE, "ffn_size")
    return {key: value for key, value in to_dict(model).items() if key not in skipped}
