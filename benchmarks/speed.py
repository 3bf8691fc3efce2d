"""How fast the planner is: whole processes against bare imports, searches, layouts per second. Ratios in one run."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from planner.cluster import Cluster  # noqa: E402
from planner.cluster_file import ClusterFile, NodeKind  # noqa: E402
from planner.cost.estimate import estimate  # noqa: E402
from planner.hardware import load_hardware  # noqa: E402
from planner.mixed.mixed_question import Wanted, ask_mixed  # noqa: E402
from planner.model import load_model  # noqa: E402
from planner.rules import Job, allowed  # noqa: E402
from planner.search import Pins, search  # noqa: E402
from planner.serving.candidates import at_loads  # noqa: E402
from planner.serving.serving_answer import answer  # noqa: E402
from planner.serving.serving_question import Question, ServeRequest, ask  # noqa: E402
from planner.serving.serving_search import starting  # noqa: E402
from planner.serving.step import Pass, step_time  # noqa: E402
from planner.space import OFFLOADS, base_layouts, recompute_options, stack  # noqa: E402
from planner.trainer import load_trainer  # noqa: E402
from planner.workload import Workload  # noqa: E402

BARE = [sys.executable, "-c", "import numpy, yaml, click, rich"]
PLAN = [sys.executable, "-m", "cli", "--model", "llama-70b", "--gpus", "8"]
ACCURACY = [sys.executable, "-m", "cli", "accuracy", "--json"]
MOST = 1_000_000
"""Layouts priced in one go at most."""
JOBS = (("llama-405b", 16384, 8192, 2048), ("deepseek-v3", 2048, 4096, 15360), ("gpt-1t", 16384, 2048, 3072))
MIXED_NODES = (("h100", "h100-sxm", 24), ("a100", "a100-sxm-80gb", 24), ("v100", "v100-sxm2-32gb", 16))
"""512 GPUs of three kinds: name, hardware, nodes of eight."""
MIXED_MODELS = (
    "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "gpt3-175b", "mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b",
    "deepseek-v3",
)  # fmt: skip
MIXED_BATCH = 1024
SERVE = [sys.executable, "-m", "cli", "serve", "--model", "llama-70b", "--gpus", "8"]
SERVED: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    ("llama-3.1-8b", 8, "h100-sxm", {}), ("llama-3.1-70b", 8, "h100-sxm", {}), ("llama-3.1-405b", 256, "b200-sxm", {}),
    ("mixtral-8x7b", 64, "h200-sxm", {}), ("qwen3-32b", 256, "b200-sxm", {}), ("qwen3-235b-a22b", 256, "b200-sxm", {}),
    ("qwen3-235b-a22b", 1024, "gb200", {}), ("deepseek-v3", 1024, "h200-sxm", {}), ("gpt-oss-120b", 1024, "b200-sxm", {}),
    ("kimi-k2", 256, "h200-sxm", {}), ("glm-4.6", 64, "h200-sxm", {}), ("glm-4.6", 64, "mi300x", {}),
    ("deepseek-v3", 64, "b200-sxm", {"ttft": "2s", "tpot": "40ms"}), ("qwen3-235b-a22b", 72, "gb200", {"tpot": "20ms"}),
    ("llama-3.1-70b", 64, "h100-sxm", {"concurrency": 256}),
)  # fmt: skip
"""Searches of all engines and formats: model, GPUs, hardware, and what is asked of them."""
STEPPED = (("llama-3.1-70b", "h100-sxm", 8), ("qwen3-235b-a22b", "gb200", 1024), ("deepseek-v3", "h200-sxm", 1024))
STEPS = 8000
"""Steps that are priced in one go."""


def process_seconds(command: list[str], repeats: int) -> list[float]:
    """CPU seconds (user and system) of a command and its children, each repeat."""
    found = []
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return found


def job(name: str, gpus: int, length: int, batch: int) -> Job:
    workload = Workload(model=load_model(name), sequence_length=length, global_batch_size=batch)
    cluster = Cluster(hardware=load_hardware("h100-sxm"), num_gpus=gpus)
    return Job(workload=workload, cluster=cluster, trainer=load_trainer("megatron"))


def layouts_per_second(one: Job, bare: float) -> tuple[float, float, int]:
    """Fully priced layouts of the whole space of a search, per second and per bare-import time; and how many."""
    base = base_layouts(one, Pins())
    legal = base.take(allowed(one, base))
    levers = stack([legal, *(lever.apply(legal, one.model) for lever in recompute_options(one, Pins()))])
    layouts = stack([levers, *(levers.replace(offload_optimizer=share) for share in OFFLOADS)]).take(slice(0, MOST))
    times = []
    for _ in range(3):
        started = time.process_time()
        estimate(one.workload, one.cluster, one.trainer, layouts)
        times.append(time.process_time() - started)
    rate = len(layouts) / min(times)
    return rate, rate * bare, len(layouts)


def mixed_seconds() -> dict[str, float]:
    """CPU seconds of ``plan --cluster`` on three kinds, and of its search alone, by model."""
    cluster = ClusterFile(
        nodes=tuple(NodeKind(kind=kind, hardware=hardware, count=count) for kind, hardware, count in MIXED_NODES)
    )
    figures = {}
    for name in MIXED_MODELS:
        started = time.process_time()
        answer = ask_mixed(cluster, {"model": name, "global_batch_size": MIXED_BATCH}, {}, Wanted())
        figures[f"mixed {name} on {cluster.num_gpus} of {len(MIXED_NODES)} kinds, CPU s"] = time.process_time() - started
        figures[f"mixed {name}, its search alone, CPU s"] = answer.finding.seconds
    return figures


def serving_seconds(repeats: int, bare: float) -> dict[str, float]:
    """``plan serve`` over bare imports, CPU seconds of searches of serving, and steps per second."""
    process_seconds(SERVE, 1)
    figures = {"serve llama-70b on 8 / bare imports": statistics.median(process_seconds(SERVE, repeats)) / bare}
    for name, gpus, hardware, more in SERVED:
        question = ask(ServeRequest(model=name, gpus=gpus, hardware=hardware, **more))
        spent = []
        for _ in range(2):
            started = time.process_time()
            answer(question)
            spent.append(time.process_time() - started)
        figures[" ".join(["serve", name, str(gpus), hardware, *map(str, more.values()), "CPU s"])] = min(spent)
    for name, hardware, gpus in STEPPED:
        question = ask(ServeRequest(model=name, gpus=gpus, hardware=hardware, engine="vllm"))
        figures[f"steps of {name} on {hardware}, per CPU s"] = steps_per_second(question)
    return figures


def steps_per_second(question: Question) -> float:
    """Steps with a prompt in them, of every split and load of a search."""
    one = question.served()[0]
    found = starting(one, question.task)
    rows, load = (np.resize(values, STEPS) for values in at_loads(found.most))
    work = Pass(batch=load.astype(float), context=2304.0, prompts=1.0, prompt_tokens=2048.0)
    times = []
    for _ in range(5):
        started = time.process_time()
        step_time(one, found.layout.take(rows), work)
        times.append(time.process_time() - started)
    return STEPS / min(times)


def measure(repeats: int, accuracy: bool) -> dict[str, float]:
    process_seconds(PLAN, 1)  # writes the byte code that an installed package has
    bare = statistics.median(process_seconds(BARE, repeats))
    figures = {"bare imports, CPU s": bare}
    figures["plan llama-70b on 8 / bare imports"] = statistics.median(process_seconds(PLAN, repeats)) / bare
    for name, gpus, length, batch in JOBS:
        one = job(name, gpus, length, batch)
        started = time.process_time()
        finding = search(one)
        spent = time.process_time() - started
        figures[f"search {name} on {gpus}, CPU s"] = spent
        figures[f"search {name} on {gpus} / bare imports"] = spent / bare
        figures[f"search {name} on {gpus}, layouts of the space"] = finding.searched
        figures[f"search {name} on {gpus}, layouts priced"] = finding.priced
    figures["peak memory of the searches, GiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    figures |= mixed_seconds() | serving_seconds(repeats, bare)
    for name, gpus, length, batch in JOBS:
        rate, relative, count = layouts_per_second(job(name, gpus, length, batch), bare)
        figures[f"price {name} on {gpus}, layouts"] = count
        figures[f"price {name} on {gpus}, layouts per CPU s"] = rate
        figures[f"price {name} on {gpus}, layouts per bare imports"] = relative
    if accuracy:
        spent = process_seconds(ACCURACY, 1)[0]
        figures["accuracy over all runs, CPU s"] = spent
        figures["accuracy over all runs / bare imports"] = spent / bare
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="repeats of the whole processes (default 7)")
    parser.add_argument("--no-accuracy", action="store_true", help="leave out the accuracy command")
    parser.add_argument("--mixed", action="store_true", help="only the searches over a mixed cluster")
    parser.add_argument("--serving", action="store_true", help="only serving: processes, searches, steps")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    np.seterr(all="raise", under="ignore")
    if options.serving:
        figures = serving_seconds(options.repeats, statistics.median(process_seconds(BARE, options.repeats)))
    else:
        figures = mixed_seconds() if options.mixed else measure(options.repeats, not options.no_accuracy)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        print(f"{name:60} {value:14,.3f}" if value < 1000 else f"{name:60} {value:14,.0f}")


if __name__ == "__main__":
    main()
