"""Ranks for the tests of the profiler: processes forked from one server that has imported torch, and what they do."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import queue
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "planner.lab.profile.worker"])
NEW_NETWORK = 0x40000000
"""CLONE_NEWNET."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def together(
    n: int, function: Callable[..., Any], *arguments: Any, local: int = 0, address: str = "127.0.0.1",
    spaces: tuple[str, ...] = (), missing: tuple[int, ...] = (), stopped: int = 0,
) -> dict[int, Any]:  # fmt: skip
    """Runs ``function(place, say, *arguments)`` on n ranks; what each said last, by rank. ``spaces`` are network
    namespaces, one per rank; ``missing`` ranks are not started; so many are ``stopped`` and never end."""
    port, answers = free_port(), CONTEXT.Queue()
    ranks = [
        CONTEXT.Process(
            target=_run, args=(rank, n, local or n, address, port, spaces, answers, function, arguments), daemon=True
        )
        for rank in range(n) if rank not in missing
    ]  # fmt: skip
    for one in ranks:
        one.start()
    until = time.monotonic() + 120.0
    said: dict[int, Any] = {}
    while time.monotonic() < until and sum(one.is_alive() for one in ranks) > stopped:
        _drain(answers, said)
    _drain(answers, said)
    for one in ranks:
        if one.is_alive() and one.pid:
            os.kill(one.pid, signal.SIGKILL)
        one.join()
    return said


def _drain(answers: Any, said: dict[int, Any]) -> None:
    try:
        while True:
            rank, value = answers.get(timeout=0.05)
            said[rank] = value
    except queue.Empty:
        return


def _run(
    rank: int, n: int, local: int, address: str, port: int, spaces: tuple[str, ...], answers: Any,
    function: Callable[..., Any], arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    if spaces:
        with open(f"/run/netns/{spaces[rank]}", "rb") as space:
            assert ctypes.CDLL(None, use_errno=True).setns(space.fileno(), NEW_NETWORK) == 0
        os.environ["GLOO_SOCKET_IFNAME"] = f"v{spaces[rank]}"
    from planner.lab.launch.place import Place
    from planner.lab.profile.rank_groups import quiet

    quiet()
    place = Place(
        rank=rank, world=n, local_rank=rank % local, node=rank // local, address=address, port=port, agent_store=False
    )

    def say(value: Any) -> None:
        answers.put((rank, value))

    function(place, say, *arguments)
    answers.close()
    answers.join_thread()


def joined(place: Any, say: Callable[[Any], None], timeout: float = 20.0) -> Any:
    """The ranks; a failure is said, by the one rank that reports."""
    from planner.lab.profile.rank_groups import join

    def ended(sentence: str) -> None:
        say(sentence)
        time.sleep(0.3)  # the queue's thread sends it

    return join(place, "cpu", timeout, ended)


# ------------------------------------------------------------------------------------------------ what ranks do


def every_operation(place: Any, say: Callable[[Any], None], sizes: tuple[int, ...]) -> None:
    """Every operation in every pattern, both types: {label: (median, bus bandwidth, repetitions)}."""
    from planner.lab.profile.collective_timing import measure_collective
    from planner.lab.profile.patterns import OPERATIONS, PAIRS, asked_patterns, collective_point
    from planner.lab.profile.rank_groups import Buffers

    ranks = joined(place, say)
    buffers = Buffers(max(sizes), "cpu")
    found = {}
    for pattern in asked_patterns(ranks.world):
        for op in OPERATIONS:
            if op in PAIRS and pattern.n != 2:
                continue
            for dtype, size in zip(("fp32", "bf16"), sizes, strict=True):
                point = collective_point(op, pattern, size, dtype, ranks.local)
                one = measure_collective(point, ranks, buffers, 0.005)
                assert one is not None
                found[point.label] = (one.median, one.details["bus_bandwidth"], one.repetitions)
    ranks.watch.done()
    say(found)


def few_communicators(place: Any, say: Callable[[Any], None]) -> None:
    """Every pattern there and back twice where few may be formed at once: (most patterns, groups of the library, limits said)."""
    import torch.distributed as dist

    from planner.lab.profile import rank_groups
    from planner.lab.profile.collective_timing import measure_collective
    from planner.lab.profile.patterns import Pattern, collective_point

    rank_groups.MOST_COMMUNICATORS = 2
    ranks = joined(place, say)
    limits: list[Any] = []
    again = ranks.watch.again
    ranks.watch.again = lambda seconds=None: (limits.append(seconds), again(seconds))[1]  # type: ignore[method-assign]
    patterns = [Pattern(n=2, stride=1), Pattern(n=2, stride=2), Pattern(n=4, stride=1)]
    buffers, formed, open_ = rank_groups.Buffers(4096, "cpu"), [], []
    for pattern in [*patterns, *patterns[::-1]] * 2:
        point = collective_point("all_reduce", pattern, 4096, "fp32", ranks.local)
        assert measure_collective(point, ranks, buffers, 0.002) is not None
        formed.append(sorted((one.n, one.stride) for one in ranks.groups))
        open_.append(len(dist.distributed_c10d._world.pg_map))
    ranks.watch.done()
    say((formed, max(open_), max(one for one in limits if one)))


def wrong_data(place: Any, say: Callable[[Any], None]) -> None:
    """An all-reduce that loses one element on the last rank."""
    import torch.distributed as dist

    from planner.errors import PlannerError
    from planner.lab.profile.collective_timing import measure_collective
    from planner.lab.profile.patterns import Pattern, collective_point
    from planner.lab.profile.rank_groups import Buffers

    ranks = joined(place, say)
    true = dist.all_reduce

    def broken(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        result = true(tensor, *arguments, **keywords)
        if place.rank == place.world - 1 and tensor.numel() > 100:
            tensor[5] += 1.0
        return result

    dist.all_reduce = broken
    point = collective_point("all_reduce", Pattern(n=place.world, stride=1), 4096, "fp32", place.world)
    try:
        measure_collective(point, ranks, Buffers(4096, "cpu"), 0.01)
    except PlannerError as error:
        say(str(error))
    dist.all_reduce = true
    ranks.watch.done()


def lacks_an_operation(place: Any, say: Callable[[Any], None], path: str) -> None:
    """The whole run of a rank where the library has no all-to-all; what the journal of rank 0 holds."""
    import torch.distributed as dist

    from planner.lab.profile import worker
    from planner.lab.profile.points import Settings

    def none_such(*_: Any, **__: Any) -> Any:
        raise RuntimeError("ProcessGroup does not support alltoall_base\nand more")

    dist.all_to_all_single = none_such
    wanted = Settings(output=path, device="cpu", budget=2.0, only=("collectives",), largest=4096.0, timeout=20.0)
    worker.work(wanted, place)
    say("ended")


def cannot_finish(place: Any, say: Callable[[Any], None], path: str) -> None:
    """The whole run of a rank, at whose end the first one cannot write the profile."""
    from planner.errors import PlannerError
    from planner.lab.launch.torchrun import DIRECTORY
    from planner.lab.profile import worker
    from planner.lab.profile.points import Settings

    def finish() -> None:
        raise PlannerError("no room for the profile")

    os.environ[DIRECTORY] = str(Path(path).parent)
    wanted = Settings(output=path, device="cpu", budget=0.1, only=("collectives",), largest=2048.0, timeout=20.0)
    worker.work(wanted, place, finish=finish)
    say("ended well")


def loses_a_rank(place: Any, say: Callable[[Any], None], how: str) -> None:
    """Collectives for ever; after some of them the last rank dies, stops or leaves."""
    from planner.lab.profile.collective_timing import measure_collective
    from planner.lab.profile.patterns import Pattern, collective_point
    from planner.lab.profile.rank_groups import Buffers

    ranks = joined(place, say, timeout=2.0)
    buffers = Buffers(2**16, "cpu")
    point = collective_point("all_reduce", Pattern(n=place.world, stride=1), 2**16, "fp32", place.world)
    try:
        for turn in range(10**6):
            if turn == 3 and place.rank == place.world - 1 and how != "breaks":
                if how == "leaves":
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
            if turn == 3 and how == "breaks" and place.rank == 1:
                raise MemoryError("no room for 64 KiB")
            measure_collective(point, ranks, buffers, 0.005)
    except Exception as error:
        ranks.watch.fail(error)


def is_terminated(place: Any, say: Callable[[Any], None], died: bool, inside: bool) -> None:
    """The launcher ends ranks 0 and 1, which talk to nobody, after the last rank ``died``, or all of them; when they wait
    ``inside`` of a library, Python's own handlers do not run."""
    from planner.lab.launch.meeting import open_store
    from planner.lab.launch.watch import heed_signals

    ranks = joined(place, say)
    heed_signals(ranks.watch)
    last = signal.SIGKILL if died and place.rank == place.world - 1 else signal.SIGTERM
    with ranks.watch.doing("a product of 8 x 8", [place.rank]):
        threading.Timer(0.3, os.kill, (os.getpid(), last)).start()
        if inside:
            open_store(place).get("never said")
        time.sleep(10.0)


def comes_alone(place: Any, say: Callable[[Any], None]) -> None:
    """The other ranks never come."""
    from planner.errors import PlannerError
    from planner.lab.profile.rank_groups import join

    try:
        join(place, "cpu", 5.0, say, wait=1.0)
    except PlannerError as error:
        say(str(error))


def both_timings(place: Any, say: Callable[[Any], None], sizes: tuple[int, ...]) -> None:
    """[(size, bus bandwidth by the profiler, bandwidth by the lecture)]; the lecture's way is written out here.

    CS336 (Stanford), lecture on parallelism: warm up, synchronise, time one all-reduce, then
    sent bytes = S 2 (n - 1), bandwidth = sent bytes / (n duration).
    """
    import torch
    import torch.distributed as dist

    from planner.lab.profile.collective_timing import measure_collective
    from planner.lab.profile.patterns import Pattern, collective_point
    from planner.lab.profile.rank_groups import Buffers

    ranks = joined(place, say)
    buffers = Buffers(max(sizes), "cpu")
    found = []
    for size in sizes:
        point = collective_point("all_reduce", Pattern(n=place.world, stride=1), size, "fp32", 1)
        one = measure_collective(point, ranks, buffers, 0.25)
        assert one is not None
        data = torch.zeros(size // 4)
        dist.all_reduce(data)
        durations = []
        for _ in range(5):
            dist.barrier()
            start = time.time()
            dist.all_reduce(data)
            durations.append(time.time() - start)
        n = dist.get_world_size()
        sent = data.element_size() * data.numel() * 2 * (n - 1)
        found.append((size, one.details["bus_bandwidth"], sent / (n * statistics.median(durations))))
    ranks.watch.done()
    say(found)


def beside(place: Any, say: Callable[[Any], None]) -> None:
    """Overlap of every collective that has an asynchronous form."""
    from planner.lab.profile.overlap_timing import measure_overlap
    from planner.lab.profile.patterns import overlap_points
    from planner.lab.profile.rank_groups import Buffers

    ranks = joined(place, say)
    buffers = Buffers(2**18, "cpu")
    found = {}
    for point in overlap_points(ranks.world, ranks.local, 2**18, "fp32", 1.0):
        one = measure_overlap(point, ranks, buffers, 0.05)
        found[f"{point['op']} {point['of']}"] = one.to_dict()
    ranks.watch.done()
    say(found)


def pressure() -> float:
    """Percent of the last ten seconds in which some process waited for a core."""
    try:
        line = Path("/proc/pressure/cpu").read_text(encoding="utf-8").splitlines()[0]
    except OSError:
        return 0.0
    return float(line.split("avg10=")[1].split()[0])


class FakeCuda:
    """torch with a CPU in the place of the GPU: events read the host's clock (in milliseconds, as CUDA's do)."""

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing, "an event without timing cannot be read"
            self.at = 0.0

        def record(self, stream: Any = None) -> None:
            self.at = time.perf_counter()

        def query(self) -> bool:
            return False  # the device is as far as the host: it is never ahead of it

        def elapsed_time(self, end: Any) -> float:
            return (end.at - self.at) * 1000.0

    def __init__(self) -> None:
        from types import SimpleNamespace

        self.synchronised = 0

        def synchronize() -> None:
            self.synchronised += 1

        self.cuda = SimpleNamespace(
            Event=self.Event, synchronize=synchronize, _sleep=lambda cycles: time.sleep(cycles * 1e-9)
        )

    def __getattr__(self, name: str) -> Any:
        import torch

        found = getattr(torch, name)
        if name not in ("zeros", "ones"):
            return found
        return lambda *shape, device, **keywords: found(*shape, **keywords)


def as_on_a_gpu(place: Any, say: Callable[[Any], None]) -> None:
    """The code for device events between processes, on gloo with a stand-in for torch.cuda; streams: ``virtual_cuda``."""
    from planner.lab.profile import collective_timing as collectives
    from planner.lab.profile import device_timing, rank_groups
    from planner.lab.profile.patterns import Pattern, collective_point
    from planner.lab.profile.rank_groups import Ranks

    ranks = joined(place, say)
    fake: Any = FakeCuda()
    collectives.torch = device_timing.torch = fake
    buffers = rank_groups.Buffers(2**18, "cpu")
    ranks.device = "cuda"
    Ranks.backend = property(lambda _: "gloo")
    found = {}
    for op in ("all_reduce", "send_recv"):
        point = collective_point(op, Pattern(n=2, stride=1), 2**16, "fp32", 2)
        found[op] = collectives.measure_collective(point, ranks, buffers, 0.05)
    assert fake.synchronised > 10
    ranks.watch.done()
    say({name: (one.median, one.clock) for name, one in found.items()})


def forms(place: Any, say: Callable[[Any], None]) -> None:
    """Forms of collectives on gloo with a stand-in for torch.cuda: times, and NCCL_ALGO when each group was formed."""
    import torch.distributed as dist

    from planner.lab.profile import collective_forms, collective_timing, device_timing, rank_groups
    from planner.lab.profile.patterns import form_points
    from planner.lab.profile.rank_groups import Ranks

    ranks = joined(place, say)
    fake: Any = FakeCuda()
    collective_forms.torch = collective_timing.torch = device_timing.torch = fake
    buffers = rank_groups.Buffers(2**14, "cpu")
    ranks.device = "cuda"
    Ranks.backend = property(lambda _: "gloo")
    formed, gone, real, destroy = [], [], dist.new_group, dist.destroy_process_group

    def new_group(*members: Any, **more: Any) -> Any:
        formed.append(os.environ.get("NCCL_ALGO"))
        return real(*members, **more)

    def destroyed(group: Any) -> None:
        gone.append(group)
        destroy(group)

    collective_forms.dist.new_group, collective_forms.dist.destroy_process_group = new_group, destroyed
    found = {}
    for point in form_points(2, 2, [2**10, 2**14], "fp32", 0.5):
        if point["form"] in ("in_place", "no_nvls", "eager"):
            one = collective_forms.measure_form(point, ranks, buffers, 0.01)
            found[point["form"], point["op"], point["size"]] = one.median
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    try:
        collective_forms.measure_form(
            point.of("collective_form", **point.values | {"form": "no_nvls"}), ranks, buffers, 0.01
        )
    except collective_timing.NotMeasuredError as error:
        found["refused"] = str(error)
    ranks.watch.done()
    say((found, formed, len(gone), "NCCL_ALGO" in os.environ))


def health_with_a_slow_node(place: Any, say: Callable[[Any], None], path: str) -> None:
    """The whole check of four nodes of one rank of which the third takes 15 ms longer for everything that it sends or reduces."""
    import torch.distributed as dist

    from planner.lab.profile import health
    from planner.lab.profile.points import Settings

    if place.rank == 2:
        for name in ("all_reduce", "batch_isend_irecv"):
            true = getattr(dist, name)

            def late(*arguments: Any, true: Any = true, **keywords: Any) -> Any:
                time.sleep(0.015)
                return true(*arguments, **keywords)

            setattr(dist, name, late)
    settings = Settings(output=path, device="cpu", budget=1.0, timeout=20.0, largest=2.0**16, health=True)
    found = health.work(settings, place)
    say(found and found["sentences"])
