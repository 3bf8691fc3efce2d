"""Strong and weak scaling: the best plan at every size of the cluster, each searched, several sizes at once."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress

from planner.defaults import ResolvedJob
from planner.lab.launch.torchrun import interrupts_ignored
from planner.plan_file import Plan
from planner.questions.best_plan import Best, best_of, on_cluster, resolved_of, with_job

BEYOND = (2, 4)
"""Multiples of the cluster that are looked at in addition to the cluster itself."""
LARGEST = 2**21
"""GPUs that a cluster may have."""
BELOW = 4
"""Sizes below the cluster that are looked at, evenly in the logarithm."""
Size = tuple[Best, Best]
"""The best plans at one size of the cluster: with the job's global batch, and with one that grows with the GPUs."""


def sizes(num_gpus: int, gpus_per_node: int) -> list[int]:
    """Sizes of the cluster for the scaling picture: one node (within one node 1 GPU) and BELOW - 1 of its doublings below the
    cluster, the cluster, two and four times it."""
    one = gpus_per_node if num_gpus > gpus_per_node else 1
    below = [one << doublings for doublings in range(num_gpus.bit_length()) if one << doublings < num_gpus]
    picked = sorted({round(number * (len(below) - 1) / (BELOW - 1)) for number in range(BELOW)}) if below else []
    beyond = [num_gpus * times for times in BEYOND if num_gpus * times <= LARGEST]
    return [*(below[number] for number in picked), num_gpus, *beyond]


def at_size(resolved: ResolvedJob, count: int) -> Size:
    """The best plan on ``count`` GPUs with the job's B sequences per step on N GPUs, and with B count / N, rounded, at least 1.

    Each is a whole search of its own (0.1 to 3 s).
    """
    workload, there = resolved.job.workload, on_cluster(resolved, num_gpus=count)
    sequences = max(1, round(workload.global_batch_size * count / resolved.job.cluster.num_gpus))
    strong = best_of(there)
    if sequences == workload.global_batch_size:
        return strong, strong
    return strong, best_of(with_job(there, workload=workload.replace(global_batch_size=sequences)))


@contextmanager
def scaled(plan: Plan, processes: int) -> Iterator[Callable[[Callable[[str], None]], list[Size]]]:
    """Begin to search other sizes of the cluster in ``processes``; in this one for 1, or where no other can be had.

    What is yielded waits for all sizes and says which one it waits for. Processes that are left are ended with the block.
    """
    resolved, workers = resolved_of(plan), min(os.cpu_count() or 1, processes)
    counts = sizes(plan.num_gpus, int(resolved.job.cluster.hardware.gpus_per_node))
    pool: ProcessPoolExecutor | None = None
    with suppress(OSError, ValueError):  # no semaphores, no other processes
        if workers > 1:
            pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    others = multiprocessing.active_children()
    largest_first = sorted(counts, key=lambda count: -abs(count - plan.num_gpus // 8))
    with interrupts_ignored():  # the workers start with the first of these
        begun = {count: pool.submit(at_size, resolved, count) for count in largest_first} if pool else {}
    started = [one for one in multiprocessing.active_children() if one not in others]

    def result(progress: Callable[[str], None]) -> list[Size]:
        found = []
        for count in counts:
            progress(f"the best plan of {count:,} GPUs")
            found.append(begun[count].result() if begun else at_size(resolved, count))
        return found

    try:
        yield result
    finally:
        if pool is not None:
            for one in started if not all(size.done() for size in begun.values()) else ():
                one.terminate()  # a search may take minutes yet, and they do not hear Ctrl-C
            pool.shutdown(cancel_futures=True)  # waited for: Python's own end of a pool may write to a closed pipe
