"""The load of a plan in the words of ``vllm bench serve`` or ``sglang.bench_serving``: what is measured is what was predicted.

vLLM draws lengths from [n (1 - r), n (1 + r)], SGLang from [r n, n] with one r for prompts and answers; requests are the plan's
concurrency or its Poisson rate, and answers ignore the end-of-sequence token.  [vllm 0.33 benchmarks/datasets: RandomDataset;
sglang 0.5.23 benchmark/datasets/common.py: compute_random_lens]
"""

import json
import math

from planner.record import record
from planner.serving.export.serve_job import ServeJob
from planner.serving.serve_plan import uniform_ends
from planner.serving.traffic import Lengths, Traffic

WAVES = 10
"""Requests over requests in flight where the plan does not say how long a run is."""
SECONDS = 120.0
"""Length of a run at a rate."""
FEWEST = 32
"""Requests of a run at least."""
WIDEST = 0.99
VLLM, SGLANG = "vllm bench serve", "sglang.bench_serving"


@record
class Bench:
    """One benchmark."""

    checked: str
    """Program, by the name of its flags in the record."""
    program: tuple[str, ...]
    words: tuple[str, ...]
    """Behind the program."""
    notes: tuple[str, ...] = ()


def ends_of(lengths: Lengths) -> tuple[float, float]:
    """Smallest and largest length: of other distributions those of the uniform one with the same mean and variance,
    mean (1 +- sqrt(3 Var / mean^2)), as far as it stays above zero."""
    ends = uniform_ends(lengths)
    if ends is not None:
        return ends
    half = min(math.sqrt(3.0 * lengths.variation), WIDEST) * lengths.mean
    return max(lengths.mean - half, 1.0), lengths.mean + half


def requests_of(traffic: Traffic) -> int:
    """Requests that a run sends."""
    if traffic.load == "rate":
        return max(math.ceil(traffic.value * SECONDS), FEWEST)
    if traffic.load in ("offline", "static"):
        return max(math.ceil(traffic.value), 1)
    return max(math.ceil(traffic.value * (traffic.waves or WAVES)), FEWEST)


def bench_of(job: ServeJob) -> Bench:
    """The benchmark of the plan's engine, where its words can say the load; else vLLM's, which drives any server."""
    traffic, notes = job.plan.traffic, []
    for name, one in (("prompt", traffic.input), ("answer", traffic.output)):
        if uniform_ends(one) is None:
            low, high = ends_of(one)
            notes.append(
                f"{name} lengths of the plan are not uniform (mean {one.mean:.0f}, longest {one.longest:.0f}): the benchmark "
                f"draws uniform ones of the same mean, from {low:.0f} to {high:.0f}"
            )
    if job.speculation is not None:
        notes.append(
            f"drafts after random prompts are accepted less often than the {job.speculation.acceptance:g} of the plan: measure "
            "with your own prompts (--dataset-name custom --dataset-path FILE), or compare the steps alone"
        )
    ratios = [ends_of(one)[0] / ends_of(one)[1] for one in (traffic.input, traffic.output)]
    if job.plan.engine_name == "sglang" and abs(ratios[0] - ratios[1]) < 1e-3 and not traffic.prefix_hit:
        return Bench(
            checked=SGLANG,
            program=("python", "-m", SGLANG),
            words=(*_sglang(traffic, ratios[0]), *_load(traffic)),
            notes=tuple(notes),
        )
    return Bench(
        checked=VLLM, program=tuple(VLLM.split()), words=(*_vllm(traffic), *_load(traffic)), notes=tuple(notes)
    )


def _vllm(traffic: Traffic) -> list[str]:
    prefix = round(traffic.prefix_hit * traffic.input.mean)
    (low, high), (first, last) = ends_of(traffic.input), ends_of(traffic.output)
    tokens, answer = max(round((low + high) / 2) - prefix, 1), round((first + last) / 2)
    ratios = {
        "input": min(round((high - low) / 2 / tokens, 4), WIDEST), "output": min(round((last - first) / 2 / answer, 4), WIDEST),
    }  # fmt: skip
    ratio = f"{ratios['input']:g}" if ratios["input"] == ratios["output"] else json.dumps(ratios)
    return [
        "--backend", "openai", "--base-url", "$URL", "--model", "$MODEL", "--dataset-name", "random",
        "--random-input-len", str(tokens), "--random-output-len", str(answer), "--random-range-ratio", ratio,
        *(("--random-prefix-len", str(prefix)) if prefix else ()), "--ignore-eos", "--percentile-metrics", "ttft,tpot,itl,e2el",
        "--metric-percentiles", "50,90,99", "--save-result", "--result-filename", "bench.json",
    ]  # fmt: skip


def _sglang(traffic: Traffic, ratio: float) -> list[str]:
    return [
        "--backend", "sglang-oai", "--base-url", "$URL", "--model", "$MODEL",
        "--dataset-name", "random-ids", "--random-input-len", str(round(ends_of(traffic.input)[1])),
        "--random-output-len", str(round(ends_of(traffic.output)[1])), "--random-range-ratio", f"{round(ratio, 4):g}",
        "--output-file", "bench.json",
    ]  # fmt: skip


def _load(traffic: Traffic) -> list[str]:
    found = ["--num-prompts", str(requests_of(traffic))]
    if traffic.load == "rate":
        return [*found, "--request-rate", f"{traffic.value:g}"]
    if traffic.load == "offline":
        return found
    return [*found, "--max-concurrency", str(max(round(traffic.value), 1))]
