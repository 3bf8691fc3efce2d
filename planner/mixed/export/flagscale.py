"""FlagScale: process meshes of unlike chips on Megatron Core, as the two YAML files of its runner.

Read in flagos-ai/FlagScale, commit 16a2dd5b: flagscale/train/arguments.py (FSTrainArguments.pre_validate_args), the patch of
megatron/training/arguments.py, flagscale/runner/utils.py (flatten_dict_to_args), flagscale/runner/runner_train.py (device
types of the
hostfile), flagscale/train/hetero/parallel_context.py (RankMapper).
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from planner import library
from planner.errors import listed
from planner.mixed.export.cut_job import CutJob, cut_job, in_order
from planner.mixed.export.export_job import MixedExport
from planner.mixed.mixed_layout import Stage
from planner.trainers.bundle.target import Rendered, Setting
from planner.trainers.megatron import core_settings as mcore
from planner.trainers.megatron.export import SMOKE_STEPS, arguments

SOURCE = "flagos-ai/FlagScale 16a2dd5b"
MODEL = ("Model", "Constants of the model", "Attention", "Experts", "Batch")
"""Groups of Megatron's arguments that stand in its section ``model``; the others in ``system``."""
REPLACED = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "pipeline-model-parallel-layout", "context-parallel-size",
            "expert-model-parallel-size", "recompute-granularity", "recompute-method", "recompute-num-layers",
            "recompute-modules")  # fmt: skip
"""Arguments that the meshes say."""


def device_type(kind: str) -> str:
    """Name of a kind in hostfile and configuration: letters, digits and signs of one word."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", kind)


def meshes(mixed: MixedExport) -> list[tuple[Stage, int]]:
    """Neighbouring stages of one kind and one tp: the first of them, and how many they are."""
    stages = mixed.layout.pipelines[0].stages
    return [
        (same[0], len(same))
        for same in (list(one) for _, one in groupby(stages, key=lambda stage: (stage.kind, stage.tp)))
    ]


def refusals(mixed: MixedExport) -> list[str]:
    """What it has not beyond Megatron Core; RankMapper sorts all ranks of a device type together, in the order of the meshes."""
    found = [one for one in mcore.refusals(cut_job(mixed), "FlagScale") if "recompute_layers" not in one]
    order = [stage.kind for stage, _ in meshes(mixed)]
    runs = [kind for kind, _ in groupby(order)]
    if twice := sorted({kind for kind in runs if runs.count(kind) > 1}):
        found.append(
            f"{twice[0]} stands in two places of the pipeline, and its ranks are sorted by kind; put its stages side by side"
        )
    first, *_, last = mixed.layout.pipelines[0].stages * 2
    if mixed.workload.model.tied_embeddings and first.tp != last.tp:
        found.append(
            f"tied embeddings with tp {first.tp} in the first and {last.tp} in the last stage, which must be equal"
        )
    if mixed.workload.model.is_moe and len({stage.tp for stage, _ in meshes(mixed)}) > 1:
        found.append("experts with tp that differs between meshes, for which the plan has one expert parallel degree")
    empty = [stage.kind for stage in mixed.layout.pipelines[0].stages if not stage.layers]
    if empty:
        found.append(
            f"a stage of {listed(empty, 'and')} without layers (standalone stages are not supported with meshes)"
        )
    return found


def hetero(mixed: MixedExport) -> dict[str, Any]:
    """The section ``hetero``: a mesh is [tp, cp, ep, dp, pp], all of them in one list."""
    layout, found = mixed.layout, meshes(mixed)
    flat = [size for stage, count in found for size in (stage.tp, layout.cp, layout.ep, layout.replicas, count)]
    types = [device_type(stage.kind) for stage, _ in found]
    return {
        "enable_hetero": True, "hetero_process_meshes": flat,
        "hetero_pipeline_layer_split": [stage.layers for stage in layout.pipelines[0].stages],
        "hetero_device_types": types, "hetero_current_device_type": types[0],
    }  # fmt: skip


def recompute(mixed: MixedExport) -> dict[str, Any]:
    """Recompute by stage: [stages, microbatches, value] each; granularity 1 is on, method 1 is block."""
    pipeline = mixed.layout.pipelines[0]
    if all(stage.recompute == "none" for stage in pipeline.stages):
        return {}
    full = [int(stage.recompute == "full") for stage in pipeline.stages]
    numbers = [
        flag * (stage.recompute_layers or stage.layers) for flag, stage in zip(full, pipeline.stages, strict=True)
    ]
    m = pipeline.num_microbatches
    return {
        "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": max(numbers),
        "recompute_granularity_per_stage_micro_batch": [[1, m, flag] for flag in full],
        "recompute_method_per_stage_micro_batch": [[1, m, 1] for _ in full],
        "recompute_num_layers_per_stage_micro_batch": [[1, m, number] for number in numbers],
    }  # fmt: skip


def train_settings(mixed: MixedExport) -> dict[str, Any]:
    """conf/train/plan.yaml: system, model, data."""
    job: CutJob = cut_job(mixed)
    sections: dict[str, dict[str, Any]] = {"system": {}, "model": {}}
    for title, flags in arguments(job).items():
        section = sections["model" if title in MODEL else "system"]
        for flag, *values in flags:
            name = flag.removeprefix("--")
            if name not in REPLACED:
                section[name.replace("-", "_")] = (
                    True if not values else _typed(values[0]) if len(values) == 1 else [*values]
                )
    pipeline = mixed.layout.pipelines[0]
    sections["system"] |= {
        "tensor_model_parallel_size": pipeline.stages[0].tp, "pipeline_model_parallel_size": len(pipeline.stages),
        "context_parallel_size": mixed.layout.cp, "expert_model_parallel_size": mixed.layout.ep,
        "hetero": hetero(mixed), "recompute": recompute(mixed),
        "logging": {"log_interval": 1, "log_throughput": True}, "checkpoint": {"save_interval": 1000, "ckpt_format": "torch_dist"},
    }  # fmt: skip
    sections["model"] |= {"train_iters": "${oc.env:TRAIN_ITERS}", "lr": "${oc.env:LEARNING_RATE}"}
    data = {"data_path": "${oc.env:DATA_PATH}", "tokenizer": {
        "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "${oc.env:TOKENIZER}"
    }}  # fmt: skip
    return {**sections, "data": data}


def _typed(value: str) -> Any:
    """A number where the text is one: YAML would quote it."""
    return int(value) if re.fullmatch(r"-?\d+", value) else str(value)


def experiment(mixed: MixedExport) -> dict[str, Any]:
    """conf/plan.yaml: what the runner starts."""
    return {
        "defaults": [{"train": "plan"}, "_self_"],
        "experiment": {
            "exp_name": "plan", "exp_dir": "./outputs",
            "task": {"type": "train", "backend": "megatron", "entrypoint": "flagscale/train/train_gpt.py"},
            "runner": {"backend": "torchrun", "rdzv_backend": "static", "hostfile": "${oc.env:HOSTFILE}"},
            "envs": {"CUDA_DEVICE_MAX_CONNECTIONS": 1},
        },
        "action": "run", "hydra": {"run": {"dir": "${experiment.exp_dir}/hydra"}},
    }  # fmt: skip


def render(mixed: MixedExport) -> Rendered:
    """Configuration and hostfile; FlagScale's own runner starts the processes."""
    hosts = [f"ADDRESS-OF-{one.name} slots={one.gpus} type={device_type(one.kind)}" for one in in_order(mixed).nodes]
    files = {
        "conf/plan.yaml": library.dump_yaml(experiment(mixed)), "conf/train/plan.yaml": library.dump_yaml(train_settings(mixed)),
        "hostfile": "\n".join(["# Put the addresses of the nodes in place of the words; the first is the master.", *hosts]) + "\n",
    }  # fmt: skip
    run = ("python", "$FLAGSCALE/run.py", "--config-path", "$PWD/conf", "--config-name", "plan", "action=run")
    return Rendered(
        files=files, entry=run, smoke=(*run, f"train.model.train_iters={SMOKE_STEPS}", "+train.data.mock_data=true"), start="once",
        variables={
            "FLAGSCALE": Setting(None, "folder of a FlagScale checkout with its Megatron-LM built"),
            "DATA_PATH": Setting(None, "prefix of a data set of tools/preprocess_data.py"),
            "TOKENIZER": Setting(None, "a Hugging Face tokenizer"), "TRAIN_ITERS": Setting("1000", "optimizer steps"),
            "LEARNING_RATE": Setting("1e-4", "peak learning rate"),
            "HOSTFILE": Setting("$PWD/hostfile", "addresses of the nodes; kinds by type="),
        },
        notes=(
            "Meshes are [tp, cp, ep, dp, pp]; ranks are sorted by device type in the order of hetero_device_types [RankMapper].",
            "The options were read in one commit; FlagScale's Megatron-LM is older than the one the plan was priced for.",
            "Chips of different vendors need FlagCX, or hetero_use_cpu_communication: true, which the plan was not priced with.",
        ),
        install=(
            "git clone https://github.com/flagos-ai/FlagScale && git -C FlagScale checkout 16a2dd5b",
            "export FLAGSCALE=$PWD/FlagScale",
            "python FlagScale/tools/patch/unpatch.py --backend Megatron-LM",
        ),
    )  # fmt: skip
