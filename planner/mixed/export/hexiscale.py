"""HexiScale (FlashFlex): pipelines of their own stages, each a tensor parallel group, as flags of llama_train.py.

Read in Relaxed-System-Lab/FlashFlex, commit 5ee1726b: llama/arguments.py, hexiscale/process_args.py (update_args, validate_args),
llama_train.py. Its package has no releases and its configuration knows four Llama models at 4096 tokens; gradients of pipelines are
averaged without a weight, so shares must be equal.
"""

from __future__ import annotations

import json
from typing import Any

from planner.mixed.export.export_job import MixedExport
from planner.trainers.bundle.quoting import shell_command
from planner.trainers.bundle.target import Rendered, Setting

SOURCE = "Relaxed-System-Lab/FlashFlex 5ee1726b"
SIZES = {
    "llama-7b": (4096, 32, 11008),
    "llama-13b": (5120, 40, 13824),
    "llama-30b": (6656, 52, 17920),
    "llama-70b": (8192, 64, 28672),
}
"""Of --model_size: hidden size, heads, MLP width; layers are a flag of their own."""
LENGTH = 4096
"""Tokens of a sequence: update_args sets them, whatever --seq_length says."""
SHARDING = {0: "ddp", 2: "zero2", 3: "zero3"}
SCHEDULES = {"gpipe": "Gpipe", "1f1b": "1F1B"}


def refusals(mixed: MixedExport) -> list[str]:
    """What its training script has not."""
    work, model = mixed.workload, mixed.workload.model
    found = [] if _size(mixed) else [f"{model.name}: it has {', '.join(SIZES)} with standard layers alone"]
    if work.sequence_length != LENGTH:
        found.append(f"sequences of {work.sequence_length} tokens, and its script sets {LENGTH}")
    if work.precision not in ("bf16", "fp16", "fp32"):
        found.append(f"precision {work.precision}; it has bf16, fp16 and fp32")
    if work.optimizer not in ("adam", "sgd"):
        found.append(f"optimizer {work.optimizer}; it has adam and sgd")
    if work.lora_rank or work.objective != "lm":
        found.append("adapters or another objective than next-token prediction")
    if any(stage.recompute_layers for one in mixed.layout.pipelines for stage in one.stages):
        found.append("recompute of some layers of a stage; --checkpoint-layers is of all or none")
    return found


def _size(mixed: MixedExport) -> str:
    """Its name of the model; "" where it has none."""
    model = mixed.workload.model
    if model.is_moe or model.is_mla or model.norm != "rmsnorm" or model.tied_embeddings:
        return ""
    same = [name for name, size in SIZES.items() if size == (model.hidden_size, model.num_heads, model.ffn_size)]
    return same[0] if same else ""


def words(mixed: MixedExport) -> list[str]:
    """Flags of llama_train.py that follow from the plan."""
    layout, work = mixed.layout, mixed.workload
    replicas = [one for one in layout.pipelines for _ in range(one.count)]
    places = [[list(stage.ranks) for stage in mixed.placement.of_replica(number)] for number in range(layout.replicas)]
    flags: dict[str, list[Any]] = {
        "--model_size": [_size(mixed)], "--total-layer-num": [work.model.num_layers], "--mixed_precision": [work.precision],
        "--hetero_configs": [json.dumps([[stage.tp for stage in one.stages] for one in replicas])],
        "--layer_partitions": [json.dumps([[stage.layers for stage in one.stages] for one in replicas])],
        "--pp_layouts": [json.dumps(places)],
        "--global_bsz_size": [one.sequences for one in replicas], "--chunks": [one.num_microbatches for one in replicas],
        "--accum-iter": [1], "--pipeline-type": [SCHEDULES[layout.schedule]], "--default_dp_type": [SHARDING[layout.zero]],
        "--optimizer-type": [work.optimizer],
    }  # fmt: skip
    found = [str(word) for flag, values in flags.items() for word in (flag, *values)] + ["--use-flash-attn"]
    if work.precision != "fp32":
        found.append(f"--{work.precision}")
    if layout.pipelines[0].stages[0].recompute == "full":
        found.append("--checkpoint-layers")
    return found


def other_samples(mixed: MixedExport) -> list[int]:
    """Replicas of which an end would load another replica's samples.

    Its data loader takes for a rank the last pipeline that begins at or below it; labels come from the loader of the last stage.
    [llama_train.py: get_distributed_dataloader, train_step; heterogeneous_pipeline.py: 1F1B]
    """
    places = [mixed.placement.of_replica(number) for number in range(mixed.layout.replicas)]
    heads = [min(stages[0].ranks) for stages in places]

    def loaded(rank: int) -> int:
        return max((number for number, head in enumerate(heads) if head <= rank), default=0)

    return [
        number for number, stages in enumerate(places)
        if any(loaded(rank) != number for end in (stages[0], stages[-1]) for rank in end.ranks)
    ]  # fmt: skip


def render(mixed: MixedExport) -> Rendered:
    """One script around the flags."""
    lines = [
        "# shellcheck shell=bash disable=SC2034",
        "# Flags of HexiScale's llama_train.py, sourced by run.sh.",
        "ARGUMENTS=(",
    ]
    wrong = other_samples(mixed)
    mend = (
        f"Its data loader gives pipelines {', '.join(map(str, wrong))} the labels of other pipelines, as their ranks do not "
        "follow each other: before training, let place_rank of get_distributed_dataloader (llama_train.py) be the pipeline of "
        "pp_layouts that has the rank. Times are not touched by it.",
    )
    files = {
        "arguments.sh": "\n".join([*lines, "    " + shell_command(words(mixed)).replace(" \\\n    ", "\n    "), ")"])
        + "\n"
    }
    return Rendered(
        files=files, entry=("$HEXISCALE/llama_train.py", "${ARGUMENTS[@]}", "--run-iter", "$STEPS"),
        smoke=("$HEXISCALE/llama_train.py", "${ARGUMENTS[@]}", "--run-iter", "5"),
        prepare=("# shellcheck disable=SC1091", "source ./arguments.sh", 'cd "$HEXISCALE"'),
        variables={
            "HEXISCALE": Setting(None, "folder of a checkout of Relaxed-System-Lab/FlashFlex"), "STEPS": Setting("1000", "steps"),
        },
        notes=(
            "HexiScale has no releases: the flags were read in one commit, and were not run here.",
            "Its example reads made-up sequences (llama/sudo_dataset.py); put your data set in its place.",
            *(mend if wrong else ()),
        ),
        install=(
            "git clone https://github.com/Relaxed-System-Lab/FlashFlex && git -C FlashFlex checkout 5ee1726b",
            "export HEXISCALE=$PWD/FlashFlex",
            "# torch 2.3 and flash-attn 2.4.2, as in nvcr.io/nvidia/pytorch:24.02-py3",
        ),
    )  # fmt: skip
