"""``plan rl``: where to train and where to generate in RL; the best placements, or one priced."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from planner.keywords import flag_of
from planner.library import require_folder
from planner.terminal.flags import ALSO, JOB_FLAGS, SearchGroup, completed, emit, progress

NOTHING_FITS = 1
"""Exit code: no placement fits."""
YAML_FILE = click.Path(dir_okay=False, path_type=Path)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output instead of tables.")
OUTPUT = click.option("--output", type=YAML_FILE, metavar="FILE", help="Write the best plan to a YAML file.")
OF_JOB = {one[0]: one for one in JOB_FLAGS}
"""Flags that a job of training has too."""
QUESTION: tuple[tuple[str, Any, str, str], ...] = (
    OF_JOB["model"],
    ("gpus", int, "N", "GPUs of all pools."),
    OF_JOB["nodes"],
    OF_JOB["hardware"],
    ("cluster", str, "FILE", "Cluster file: of two kinds the faster one trains, the other generates."),
    ("framework", str, "NAME", "verl, nemo-rl, openrlhf, trl, slime, areal, prime-rl, with @VERSION. [verl]"),
    ("trainer", str, "NAME", "Trainer of the library that prices updates. [of the framework]"),
    ("engine", str, "NAME", "vllm or sglang, with @VERSION. [of the framework]"),
    ("algorithm", str, "NAME", "grpo, dapo, gspo, rloo, reinforce++, ppo, dpo, online-dpo. [grpo]"),
    ("prompts", int, "N", "Prompts of a step. [64]"),
    ("samples", int, "N", "Answers to a prompt. [of the algorithm]"),
    ("keep_rate", str, "X", "Share of prompts with a gradient; others are sampled again. [0.5 with dapo, else 1]"),
    ("prompt_length", str, "N", "Tokens of a prompt, mean. [512]"),
    ("answers", str, "LIST", "Tokens of answers: mean=3200,p99=8192, 3200, fixed:2048, @file of lengths. [2048]"),
    ("max_length", str, "N", "Tokens of prompt and answer at most. [8192, or twice the 99th percentile]"),
    ("train_batch", int, "N", "Answers of an optimizer step. [all of a step]"),
    ("epochs", int, "N", "Passes over the answers of a step. [1]"),
    ("critic", str, "NAME", "Model of the critic (ppo). [the policy]"),
    ("reward_model", str, "NAME", "Model that scores answers. [a rule]"),
    ("reward_time", str, "TIME", "Time of rewards after the last answer, like 10s. [0]"),
    ("turns", int, "N", "Turns of an answer, a tool call between two of them. [1]"),
    ("tool_time", str, "TIME", "Time of a tool call. [0]"),
    ("tool_tokens", str, "N", "Tokens that a tool call adds. [0]"),
    ("speculation", str, "LIST", "depth=3,acceptance=0.7[,draft=1B]: drafted tokens per step, share accepted."),
    OF_JOB["precision"],
    ("weights", str, "NAME", "Rollout's weights: bf16, fp8, fp8_block, ... [bf16]"),
    ("cache", str, "NAME", "Rollout's keys and values: bf16, fp8. [bf16]"),
    ("lora_rank", int, "N", "Rank of adapters; 0 trains every weight. [0]"),
    ("mode", str, "LIST", "colocated, split, hybrid; several with commas. [those of the framework]"),
    ("staleness", str, "RANGE", "Steps that generation may run ahead: 0, 1, 0..8, any. [0..8]"),
    ("train_gpus", int, "N", "GPUs that train. [searched]"),
    ("generate_gpus", int, "N", "GPUs that generate. [searched]"),
    ("critic_gpus", int, "N", "GPUs of a pool of the critic alone; 0: on the actor's. [searched]"),
    ("sync", str, "NAME", "ipc, reshard, bucketed, tensor, rdma, delta, disk. [of the framework]"),
    ("actor", str, "LIST", "Fields of the actor's layout: tp=4,pp=2,recompute=full. [searched]"),
    ("rollout", str, "LIST", "Fields of the rollout's layout: tp=4,max_batch=256. [searched]"),
    ("memory_share", float, "X", "Engine's share of the memory, like 0.6. [of the framework]"),
    ("offload", str, "LIST", "States on the host while it generates: weights,optimizer,reference, none. [of the framework]"),
    ("calibrated", str, "FILE", "Factors of phases that 'plan calibrate --rl' wrote."),
    ("price", float, "USD", "Dollars per GPU-hour. [of the profile]"),
    OF_JOB["network_bandwidth"],
)
"""Flags of a question of RL: keyword of the API, type, value and help."""
MEANT = {
    "--samples": "n rollout-n generations num-generations group-size samples-per-prompt",
    "--keep-rate": "dynamic-sampling filter-groups accept-rate kept",
    "--prompts": "batch batch-size train-batch-size rollout-batch-size num-prompts",
    "--answers": "response response-length output osl completion-length max-response-length",
    "--prompt-length": "input isl max-prompt-length prompt", "--max-length": "max-model-len context seq-length max-seq-length",
    "--train-batch": "mini-batch ppo-mini-batch-size global-batch-size", "--mode": "placement colocate colocated split",
    "--staleness": "async off off-policy max-age", "--weights": "quantization rollout-precision",
    "--actor": "tp pp dp cp ep train", "--rollout": "rollout-tp infer-tp vllm-tp gen", "--memory-share": "gpu-memory-utilization",
    "--model": "m model-path", "--gpus": "g gpu num-gpus ngpus", "--hardware": "device accelerator card",
}  # fmt: skip
"""Flags by what frameworks call them."""


def question_options(function: Callable[..., None]) -> Callable[..., None]:
    """Flags that say what is trained, where, and what is fixed."""
    function = click.option("--reference/--no-reference", default=None, help="Log-probs of a frozen reference.")(function)
    for name, kind, value, text in reversed(QUESTION):
        complete = completed(name) if name in ("model", "hardware") else None
        function = click.option(
            flag_of(name), *ALSO.get(name, ()), name, type=kind, metavar=value, help=text, shell_complete=complete
        )(function)
    return function


@click.group(cls=SearchGroup, meant=MEANT)
def rl() -> None:
    """Where to train and where to generate in RL: placement, pools, layouts, staleness; the step by phase."""


@rl.command()
@question_options
@click.option("--top", type=click.IntRange(1, 100), default=3, show_default=True, help="Plans to print.")
@OUTPUT
@JSON
def search(top: int, output: Path | None, as_json: bool, **flags: Any) -> None:
    """Where to train and where to generate in RL: placement, pools, layouts of both sides, staleness.

    Every size of the pools and every legal layout of trainer and engine is priced: generation with its length tail, log-probs,
    updates with few microbatches, weight sync and memory switches. Flags pin what they name. plan rl estimate prices one placement.

    \b
    Examples:
      plan rl --model qwen3-32b --gpus 64
      plan rl --model qwen3-32b --gpus 64 --prompts 64 --samples 32 --answers mean=3200,p99=8192 --staleness 0..8
      plan rl --model deepseek-v3 --gpus 512 --framework nemo-rl --output rl.yaml
      plan rl --model qwen3-8b --gpus 16 --algorithm ppo --framework openrlhf --mode colocated
      plan rl --model qwen3-14b --cluster cluster.yaml --answers @lengths.txt
    """
    from planner import api

    require_folder(output)
    with progress("searching") as say:
        found = api.plan_rl(top=top, progress=say, **flags)
    _write(found[0] if found else None, output)
    emit(found, as_json)
    if not found:
        sys.exit(NOTHING_FITS)


@rl.command()
@click.argument("file", required=False, type=YAML_FILE)
@question_options
@OUTPUT
@JSON
def estimate(file: Path | None, output: Path | None, as_json: bool, **flags: Any) -> None:
    """One placement, priced: its phases, idle shares, memory of every phase.

    FILE is a plan of --output; flags replace what it says. What is not said of the layouts is chosen as the search does.

    \b
    Examples:
      plan rl estimate rl.yaml --staleness 1
      plan rl estimate --model qwen3-32b --gpus 64 --mode split --train-gpus 32 --actor tp=4,pp=4 --rollout tp=4 --staleness 1
      plan rl estimate --model llama-3.1-8b --gpus 16 --framework nemo-rl --mode colocated --actor pp=2 --rollout tp=1
    """
    from planner import api

    found = api.estimate_rl(file, **flags)
    _write(found, output)
    emit(found, as_json)
    if not found.fits:
        sys.exit(NOTHING_FITS)


def _write(plan: Any, output: Path | None) -> None:
    """Write the plan where asked for."""
    if output is not None and plan is None:
        click.echo(f"nothing fits, so {output} was not written", err=True)
    elif output is not None:
        plan.save(output)
        click.echo(f"wrote {output}", err=True)
