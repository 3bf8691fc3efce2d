"""Launch files against the launchers' own code: bash, torchrun's parser, the TrainJob schema made strict, SkyPilot's task."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from planner.trainers.checking.started import started


def started_words(folder: Path, script: str, program: str, environment: Mapping[str, str]) -> list[str]:
    """What a script starts ``program`` with, once the shell has expanded everything."""
    return started(folder, script, program, environment)[0]


def torchrun_place(words: list[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What torchrun makes of its words: nodes, processes per node, rank of the node, rendezvous, the script's own words."""
    from torch.distributed.run import config_from_args, get_args_parser

    kept = dict(os.environ)
    os.environ.update(environment or {})
    try:
        arguments = get_args_parser().parse_args(words)
        if arguments.standalone:
            arguments.rdzv_backend, arguments.rdzv_endpoint = "c10d", "localhost:0"
        config, program, script = config_from_args(arguments)
    finally:
        os.environ.clear()
        os.environ.update(kept)
    return {
        "nodes": (config.min_nodes, config.max_nodes), "processes": config.nproc_per_node, "backend": config.rdzv_backend,
        "endpoint": config.rdzv_endpoint, "rank": config.rdzv_configs.get("rank"), "restarts": config.max_restarts,
        "program": program, "script": script,
    }  # fmt: skip


def strict(schema: Any) -> Any:
    """A JSON schema that refuses unknown keys, which the API server would drop silently."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "actual_instance" in schema.get("properties", {}):  # how the generated model writes a number or a text
        return {"type": ["number", "string"]}
    closed = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


@cache
def _train_job_schema() -> Any:
    """The validator of TrainJobs, made once: the schema is large."""
    from jsonschema.validators import validator_for
    from kubeflow_trainer_api import models

    schema = strict(models.TrainerV1alpha1TrainJob.model_json_schema(by_alias=True))
    validator = validator_for(schema)
    validator.check_schema(schema)
    return validator(schema)


def check_train_job(text: str) -> None:
    """The TrainJob of a file against the schema and the model of kubeflow-trainer-api. Raises what they raise."""
    import yaml
    from jsonschema.exceptions import best_match
    from kubeflow_trainer_api import models

    job = next(one for one in yaml.safe_load_all(text) if one["kind"] == "TrainJob")
    wrong = best_match(_train_job_schema().iter_errors(job))
    if wrong is not None:
        raise wrong
    read = models.TrainerV1alpha1TrainJob.from_dict(job)
    if read is None or read.to_dict() != job:
        raise ValueError("the API's own model reads the job and gives another one back")


def check_sky_task(text: str, environment: Mapping[str, str]) -> Any:
    """SkyPilot's task of a file, with the variables that the user gives at launch. Raises what SkyPilot raises."""
    import sky
    import yaml

    data = yaml.safe_load(text)
    return sky.Task.from_yaml_config(data, env_overrides=list(environment.items()))
