"""``plan serve``: how to serve a model; the best deployments, one priced, several compared, one thing changed."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from planner.keywords import flag_of
from planner.terminal.flags import ALSO, JOB_FLAGS, SearchGroup, completed, emit, progress

NOTHING_SERVES, INTERRUPTED = 1, 130
"""Exit codes: nothing starts or keeps the limits; stopped with Ctrl-C, what was found is printed."""
YAML_FILE = click.Path(dir_okay=False, path_type=Path)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output instead of tables.")
OF_JOB = {one[0]: one for one in JOB_FLAGS}
"""Flags that a job of training has too."""
QUESTION: tuple[tuple[str, Any, str, str], ...] = (
    OF_JOB["model"],
    ("gpus", int, "N", "GPUs to use at most."),
    OF_JOB["nodes"],
    OF_JOB["hardware"],
    ("engine", str, "NAME", "vllm, sglang, trtllm, with @VERSION; several with commas. [all, newest]"),
    (
        "weights",
        str,
        "NAME",
        "bf16, fp16, fp8, fp8_block, nvfp4, mxfp4, int4 (AWQ, GPTQ), int8. [as published, and others]",
    ),
    ("cache", str, "NAME", "Keys and values: bf16, fp16, fp8. [of the engine]"),
    ("input", str, "N", "Prompt tokens: 2048, 8k, uniform:800-1000, @file of lengths. [2048]"),
    ("prefix_hit", str, "X", "Part of the prompts that the prefix cache holds: 0.3, 30%. [0]"),
    (
        "speculation",
        str,
        "LIST",
        "depth=3,acceptance=0.7[,draft=1B]: drafted tokens per step, share accepted, draft model.",
    ),
    ("concurrency", str, "N", "Requests in flight (closed loop)."),
    ("rate", str, "R", "Requests that arrive: 5/s, 300/min (open loop)."),
    ("ttft", str, "TIME", "Limit on the time to first token, like 500ms."),
    ("tpot", str, "TIME", "Limit on the time per output token after the first, like 30ms."),
    ("percentile", str, "P", "What the limits hold for: mean, p50, p90, p99. [mean]"),
    ("price", float, "USD", "Dollars per GPU-hour. [of the profile]"),
    ("intra_node", str, "LINK", "Link inside a node: pcie, nvlink, '200 GB/s'. [of the profile]"),
    OF_JOB["network_bandwidth"],
)
"""Flags of a question of serving: keyword of the API, type, value and help."""
LAYOUT: tuple[tuple[str, str], ...] = (
    ("tp", "Tensor parallel ranks of attention and dense layers."), ("pp", "Pipeline stages."), ("replicas",
    "Independent engines."),
    ("attn_dp", "Data-parallel ranks of attention in one engine."), ("ep", "Expert parallel ranks."),
    ("moe_tp", "Tensor parallel ranks inside an expert."), ("dcp", "Ranks that share out the cache by position in decode."),
    ("max_batch", "Sequences in one step of an engine at most. [of the engine]"),
    ("max_tokens", "Tokens of one step of a rank at most (chunk size). [of the engine]"),
    ("gpu_weights", "Percent of layers' weights, or of experts, on GPUs; the rest in host memory. [100]"),
)  # fmt: skip


def question_options(function: Callable[..., None]) -> Callable[..., None]:
    """Flags that say what is served, where, and what is asked of it."""
    for name, text in reversed(LAYOUT):
        function = click.option(flag_of(name), name, type=int, metavar="N", help=text)(function)
    for name, kind, value, text in reversed(QUESTION):
        complete = completed(name) if name in ("model", "hardware", "engine") else None
        function = click.option(
            flag_of(name), *ALSO.get(name, ()), name, type=kind, metavar=value, help=text, shell_complete=complete
        )(function)
    return function


MEANT = {
    "--model": "m model-name model-id model-path served-model-name",
    "--input": "isl input-len input-length input-tokens prompt prompt-len prompt-tokens random-input-len",
    "--output": "osl output-len output-length output-tokens max-tokens-out max-new-tokens random-output-len",
    "--tp": "tensor-parallel tensor-parallel-size tp-size", "--pp": "pipeline-parallel pipeline-parallel-size pp-size",
    "--replicas": "dp dp-size data-parallel data-parallel-size workers",
    "--attn-dp": "enable-dp-attention attn-dp-size attention-dp",
    "--ep": "expert-parallel ep-size enable-expert-parallel", "--dcp": "decode-context-parallel-size",
    "--max-batch": "max-num-seqs max-running-requests max-batch-size batch batch-size", "--rate": "request-rate qps rps",
    "--max-tokens": "max-num-batched-tokens chunked-prefill-size max-num-tokens chunk", "--concurrency": "max-concurrency users",
    "--cache": "kv-cache-dtype kv-dtype kv", "--weights": "quantization quantisation dtype precision",
    "--engine": "backend framework trainer",
    "--hardware": "gpu device system accelerator card", "--gpus": "g total-gpus num-gpus ngpus world-size", "--tpot": "itl latency",
    "--prefix-hit": "prefix prefix-cache cache-hit", "--speculation": "speculative speculative-config mtp eagle",
}  # fmt: skip
"""Flags by what engines and other tools call them."""


@click.group(cls=SearchGroup, meant=MEANT)
def serve() -> None:
    """How to serve a model: engine, split, format and load, with latency, throughput, memory and price."""


OUTPUT = click.option(
    "--output", "outputs", metavar="N|FILE", multiple=True,
    help="Generated tokens, like --input [256]; what ends in .yaml is the file that the plan is written to.",
)  # fmt: skip


def lengths_and_file(outputs: tuple[str, ...]) -> tuple[str | None, Path | None]:
    """Lengths and file of --output, which may stand twice. Raises click.UsageError."""
    files = [one for one in outputs if one.endswith((".yaml", ".yml")) and not one.startswith("@")]
    lengths = [one for one in outputs if one not in files]
    if len(files) > 1 or len(lengths) > 1:
        raise click.UsageError("--output stands once for tokens and once for a .yaml file")
    return lengths[0] if lengths else None, Path(files[0]) if files else None


@serve.command()
@question_options
@click.option("--disaggregated", is_flag=True, help="Two pools alone, for prompts and for answers.")
@click.option("--aggregated", is_flag=True, help="No deployment of two pools.")
@click.option(
    "--fewest-gpus", is_flag=True, help="On as few GPUs as serve the load within the limits; --gpus is the most."
)
@click.option("--cheapest", is_flag=True, help="Hardware by price: the values of --hardware, or all that has a price.")
@click.option(
    "--cluster", type=YAML_FILE, metavar="FILE", help="Nodes of several kinds and sites, in place of --hardware and --gpus."
)
@click.option("--top", type=click.IntRange(1, 100), default=3, show_default=True, help="Plans of every purpose.")
@OUTPUT
@JSON
def search(
    top: int, cheapest: bool, cluster: Path | None, outputs: tuple[str, ...], as_json: bool, disaggregated: bool, aggregated: bool,
    **flags: Any,
) -> None:  # fmt: skip
    """How to serve a model: engine, split, format and load, for throughput, for one user, and between.

    Without limits and load: the best for most tokens/s (offline), for one user (interactive), and between (balanced). With
    --ttft and --tpot: what answers most within them. With --rate or --concurrency: the shortest answers at that load. Flags
    of a layout pin it. Further questions: plan serve estimate, plan serve compare, plan serve what-if.

    \b
    Examples:
      plan serve --model llama-70b --gpus 8
      plan serve --model llama-70b --gpus 8 --input 2048 --output 256 --ttft 500ms --tpot 30ms
      plan serve --model llama-70b --gpus 8 --ttft 500ms --tpot 30ms --percentile p99 --rate 5/s --output serve.yaml
      plan serve --model deepseek-v3 --gpus 32 --hardware h200-sxm --engine sglang --concurrency 256
      plan serve --model llama-70b --fewest-gpus --rate 50/s --ttft 1s --tpot 50ms
      plan serve --model llama-70b --cluster cluster.yaml --ttft 2s --tpot 50ms
      plan serve --model llama-70b --cheapest --hardware h100,h200,b200 --rate 5/s --ttft 1s
    """
    from planner import api

    if disaggregated and aggregated:
        raise click.UsageError("--disaggregated and --aggregated are two answers to one question; leave both out to compare them")
    flags["disaggregated"] = True if disaggregated else False if aggregated else None
    length, file = lengths_and_file(outputs)
    if cluster is not None:
        _on_cluster(cluster, length, file, as_json, {**flags, "cheapest": cheapest or None})
        return
    if cheapest:
        _cheapest(length, file, as_json, flags)
        return
    with progress("searching") as say:
        found = api.serve(top=top, progress=say, output=length, **flags)
    if file is not None and found:
        found[0].save(file)
        click.echo(f"wrote {file}", err=True)
    emit(found, as_json)
    if not found:
        if file is not None:
            click.echo(f"nothing serves that, so {file} was not written", err=True)
        sys.exit(NOTHING_SERVES)


def _rows(answer: Any, as_json: bool) -> None:
    """Print rows; exit as there are any that serve, and as all were looked at."""
    found = answer.found
    emit(answer, as_json)
    if not found.complete:
        click.echo(f"interrupted: {len(found.rows)} rows were found, the others were not looked at", err=True)
        sys.exit(INTERRUPTED)
    if not any(one.kept for one in found.rows):
        sys.exit(NOTHING_SERVES)


def _on_cluster(cluster: Path, length: str | None, file: Path | None, as_json: bool, flags: dict[str, Any]) -> None:
    """The nodes of a cluster file."""
    from planner import api

    for name in ("fewest_gpus", "cheapest"):
        if flags.pop(name):
            raise click.UsageError(f"{flag_of(name)} stands beside --cluster, whose nodes are all in use; leave one out")
    with progress("searching") as say:
        found = api.serve_cluster(cluster, progress=say, output=length, **flags)
    if file is not None:
        found.found.save(file)
        click.echo(f"wrote {file}", err=True)
    emit(found, as_json)
    if not found.found.found.kept:
        sys.exit(NOTHING_SERVES)


def _cheapest(length: str | None, file: Path | None, as_json: bool, flags: dict[str, Any]) -> None:
    """Hardware by price."""
    from planner import api

    if file is not None:
        raise click.UsageError("--cheapest compares hardware and writes no plan; plan the one it names with --output")
    names = [one.strip() for one in (flags.pop("hardware") or "").split(",") if one.strip()]
    flags.pop("fewest_gpus")
    with progress("pricing hardware") as say:
        found = api.serve_cheapest(*names, progress=say, output=length, **flags)
    _rows(found, as_json)


@serve.command()
@click.argument("file", required=False, type=YAML_FILE)
@question_options
@click.option(
    "--prefill", metavar="LIST", help="A pool for the prompts: tp=4,replicas=2; the other flags are the answers'."
)
@OUTPUT
@JSON
def estimate(file: Path | None, outputs: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """One deployment, priced: latencies, rates, the decode step and memory in parts.

    FILE is a plan of --output; flags replace what it says. What is left out follows: replicas from --gpus, experts over all ranks
    of a stage, batch and chunk of the engine, 32 requests in flight at every engine.

    \b
    Examples:
      plan serve estimate serve.yaml --concurrency 128
      plan serve estimate --model qwen3-32b --gpus 2 --tp 2 --concurrency 64 --input 1024 --output 1024 --engine vllm@0.33
      plan serve estimate --model llama-70b --tp 4 --replicas 2 --weights fp8 --cache fp8 --rate 3/s
      plan serve estimate --model llama-70b --gpus 16 --prefill tp=4,replicas=2 --tp 8 --rate 3/s --input 8k
      plan serve estimate --model deepseek-v3 --hardware h200 --tp 1 --attn-dp 8 --ep 8 --engine sglang
    """
    from planner import api

    length, written = lengths_and_file(outputs)
    found = api.serve_estimate(file, output=length, **flags)
    if written is not None:
        found.save(written)
        click.echo(f"wrote {written}", err=True)
    emit(found, as_json)


@serve.command()
@click.argument("files", nargs=-1, metavar="[A.yaml B.yaml ...]", type=YAML_FILE)
@question_options
@click.option(
    "--split", "splits", multiple=True, metavar="LIST", help="A split to compare: tp=4,pp=2; may be repeated."
)
@OUTPUT
@JSON
def compare(
    files: tuple[Path, ...], splits: tuple[str, ...], outputs: tuple[str, ...], as_json: bool, **flags: Any
) -> None:
    """Splits of one model compared: throughput, memory, communication, and which cannot run and why.

    Without --split: every one of tensor ranks, pipeline stages and replicas that takes all GPUs. FILES are plans of --output
    instead.

    \b
    Examples:
      plan serve compare --model llama-70b --gpus 8 --hardware a100
      plan serve compare --model llama-70b --gpus 8 --split tp=8 --split tp=4,pp=2 --split tp=2,pp=4 --concurrency 64
      plan serve compare today.yaml best.yaml
    """
    from planner import api

    length, file = lengths_and_file(outputs)
    if file is not None:
        raise click.UsageError("a comparison writes no plan; --output is the number of generated tokens here")
    said = {name: value for name, value in {**flags, "output": length}.items() if value is not None}
    emit(api.serve_compare(*files, **said, **({"splits": splits} if splits else {})), as_json)


def changed_options(function: Callable[..., None]) -> Callable[..., None]:
    """The flags of a question, most with any number of values."""
    for name, kind, value, text in reversed((*QUESTION, ("output", str, "N", "Generated tokens, likewise. [256]"))):
        once = name in ("model", "nodes", "price")
        function = click.option(
            flag_of(name), *ALSO.get(name, ()), name, type=kind if once else str, multiple=not once, metavar=value, help=text
        )(function)  # fmt: skip
    return function


@serve.command("what-if")
@click.argument("file", required=False, type=YAML_FILE)
@changed_options
@click.option(
    "--objective", type=click.Choice(["offline", "balanced", "interactive"]),
    help="What plans are the best for where there is neither load nor limit. [of the plan, else balanced]",
)  # fmt: skip
@JSON
def what_if(file: Path | None, objective: str | None, as_json: bool, **changes: Any) -> None:
    """The same question with one thing changed, the best deployment each.

    The base is FILE, a plan of --output: then every value of a flag is a change, a row of its own. Without a file the first value
    of each flag describes the base. Several values: repeat the flag, or separate them by commas; --gpus 8..64 doubles.

    \b
    Examples:
      plan serve what-if serve.yaml --hardware h200,b200 --gpus 16,32 --weights fp8
      plan serve what-if --model llama-70b --gpus 8 --ttft 500ms --tpot 30ms --tpot 50ms --prefix-hit 0,0.5
    """
    from planner import api

    with progress("searching") as say:
        found = api.serve_what_if(file, objective=objective, progress=say, **changes)
    _rows(found, as_json)
