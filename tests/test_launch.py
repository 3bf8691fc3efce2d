"""Starting ranks: where mpirun puts them, why they ended, what NCCL says, and the second start without multicast."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.errors import PlannerError
from planner.lab.launch import torchrun as launch
from planner.lab.launch.nccl import in_words, of_nccl, without_multicast
from planner.lab.launch.place import commands, place_from
from planner.lab.launch.watch import Watch

TORCHRUN = """
W1122 20:53:42 torch/distributed/run.py:774] Setting OMP_NUM_THREADS
Traceback (most recent call last):
  File "meeting.py", line 51, in meet
    torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
ZeroDivisionError: integer modulo by zero
[rank1]: Traceback (most recent call last):
[rank1]:   File "x.py", line 1, in <module>
[rank1]: planner.lab.CudaError: no device
W1122 20:53:44 torch/distributed/elastic/multiprocessing/api.py:908] Sending process 24833 closing signal SIGTERM
torch.distributed.elastic.multiprocessing.api.SignalException: Process 24832 got signal: 15
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  traceback : Signal 15 (SIGTERM) received by PID 24832
"""


def test_the_cause_is_pythons_last_exception_of_a_rank() -> None:
    assert launch.cause(TORCHRUN) == "[rank1]: planner.lab.CudaError: no device"
    without = TORCHRUN.replace("[rank1]: planner.lab.CudaError: no device", "")
    assert launch.cause(without) == "ZeroDivisionError: integer modulo by zero"
    signals = ["Signal 7 (SIGBUS) received by PID 3", "traceback : Signal 15 (SIGTERM) received by PID 2"]
    assert [launch.cause(f"ended\n{one}") for one in signals] == signals
    assert launch.cause("all is well") == ""


def test_what_failed_on_a_fake_rank_is_said_in_one_line() -> None:
    """torch raises again from what failed, with an empty message or the whole schedule."""
    def failing() -> None:
        try:
            raise ValueError("a tensor of 3 rows is not 4\nand more")
        except ValueError as error:
            try:
                raise RuntimeError("\n".join(["2F0 1F1"] * 600)) from error
            except RuntimeError as wrapped:
                raise AssertionError from wrapped

    with pytest.raises(AssertionError) as failed:
        failing()
    assert launch.cause_in_words(failed.value).startswith(f"ValueError: a tensor of 3 rows is not 4 ({__file__}, line ")
    with pytest.raises(KeyError) as bare:
        {}["x"]
    assert launch.cause_in_words(bare.value).startswith("KeyError: 'x' (")


def agent(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Path:
    """Started instead of torchrun; a fresh folder for its ranks."""
    (folder / "agent").write_text(f"#!{sys.executable}\n{code}\n")
    (folder / "agent").chmod(0o755)
    monkeypatch.setattr(launch.sys, "executable", str(folder / "agent"))
    monkeypatch.setattr(launch.tempfile, "tempdir", str(folder))
    (folder / "ranks").mkdir()
    return folder / "ranks"


def test_what_ranks_printed_is_kept_when_they_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "NCCL WARN Bootstrap : no socket interface found"
    folder = agent(tmp_path, monkeypatch, f"import sys\nprint({words!r})\nprint('ValueError: no')\nsys.exit(1)")
    with pytest.raises(PlannerError) as failed:
        launch.run_here("module", "{}", 2, folder, lambda _: None)
    said = str(failed.value)
    assert said.startswith("rank 0, 1 ended early during the start (exit code 1): ValueError: no; all that the ranks printed")
    log = Path(said.split()[-1])
    assert log.parent == tmp_path and words in log.read_text(), "the folder of the ranks is deleted, this is not"


def test_ranks_find_this_package_and_keep_compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their TMPDIR goes with them; torch would compile everything anew in each run."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    found = launch._environment(tmp_path)
    package, other = found["PYTHONPATH"].split(os.pathsep)
    assert (Path(package) / "planner" / "lab" / "launch" / "torchrun.py").is_file() and other == "/somewhere"
    assert found["TMPDIR"] == str(tmp_path) and not found["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))
    assert found["NCCL_DEBUG"] == "WARN"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert [launch._environment(tmp_path)[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "NCCL_DEBUG")] == ["/mine", "INFO"]


# ------------------------------------------------------------------------------------------------ NCCL

NVLS = """NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.29.7
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 'the operation cannot be performed'
"""


class Store:
    """What a watch that ends needs."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)

    def add(self, key: str, count: int) -> int:
        return count


def said_of(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("planner.lab.launch.watch.GRACE", 0.0)
    said: list[str] = []
    watch = Watch(Store(), 0, ["a"], 30.0, ended=said.append, leave=lambda _: None)
    with pytest.raises(type(error)), watch.doing("all_reduce of 4 MiB", [0]):
        try:
            raise error
        except BaseException as raised:
            watch.fail(raised)
            raise
    return said[0]


def test_errors_of_nccl_name_their_cause_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    said = said_of(RuntimeError(NVLS), monkeypatch)
    assert said.startswith("rank 0 (a) failed at all_reduce of 4 MiB: NCCL error in:") and "CUDA error 401" in said
    assert "NCCL_NVLS_ENABLE=0 goes without, and all-reduces inside a node are then slower" in said
    try:
        raise RuntimeError("stage 1 failed") from RuntimeError(NVLS)
    except RuntimeError as wrapped:
        assert "NCCL_NVLS_ENABLE=0" in said_of(wrapped, monkeypatch), "a pipeline's stage wraps it"
    usage = "NCCL error in: x.cpp:1, invalid usage\nncclInvalidUsage: This\nLast error:\nDuplicate GPU detected"
    assert said_of(RuntimeError(usage), monkeypatch).endswith("invalid usage; Duplicate GPU detected")
    room = "NCCL error in: x.cpp:1, unhandled cuda error\nLast error:\nFailed to CUDA malloc 1 bytes: out of memory"
    assert "NVLS" not in in_words(room)
    gone = "NCCL error in: x.cpp:1, remote process exited or there was a network error"
    assert not of_nccl(gone) and "did not end although all ranks are alive" in said_of(RuntimeError(gone), monkeypatch)


def test_a_run_that_fails_at_multicast_is_started_without(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "")  # restored after the test, whatever is set in it
    monkeypatch.delenv("NCCL_NVLS_ENABLE")
    calls: list[tuple[bool, str | None]] = []

    def run(again: bool) -> str:
        calls.append((again, os.environ.get("NCCL_NVLS_ENABLE")))
        if not again:
            raise PlannerError(in_words(NVLS))
        return "measured"

    assert without_multicast(run) == "measured" and calls == [(False, None), (True, "0")]
    assert "once more with NCCL_NVLS_ENABLE=0" in capsys.readouterr().err
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    with pytest.raises(PlannerError, match="goes without"):
        without_multicast(run)
    monkeypatch.delenv("NCCL_NVLS_ENABLE")
    with pytest.raises(PlannerError, match="another"):
        without_multicast(lambda _: fail("another"))


def fail(sentence: str) -> Any:
    raise PlannerError(sentence)


# ------------------------------------------------------------------------------------------------ mpirun


def test_mpirun_places_ranks_and_is_asked_for_the_first_host() -> None:
    ompi = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in (("RANK", 11), ("SIZE", 16))}
    ompi |= {f"OMPI_COMM_WORLD_LOCAL_{name}": str(value) for name, value in (("RANK", 3), ("SIZE", 8))}
    with pytest.raises(PlannerError, match="16 ranks, 8 on this node, and does not say where rank 0 is: mpirun -x MASTER_ADDR"):
        place_from(ompi)
    found = place_from({**ompi, "MASTER_ADDR": "node0"})
    assert found is not None and (found.rank, found.world, found.local_rank, found.node) == (11, 16, 3, 1)
    assert (found.address, found.port, found.agent_store) == ("node0", 29500, False)
    intel = place_from({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    assert intel is not None and (intel.address, intel.node, intel.agent_store) == ("127.0.0.1", 0, False), "one machine"
    assert place_from({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}) is None, "one process is none of many"
    with pytest.raises(PlannerError, match="OMPI_COMM_WORLD_RANK is 'x'; torchrun, srun and mpirun set it to a whole number"):
        place_from({**ompi, "OMPI_COMM_WORLD_RANK": "x"})
    text = commands("profile", 2, 8, ["--no-python", "plan", "profile"])
    assert "mpirun -np 16 --map-by ppr:8:node -x MASTER_ADDR=FIRST_HOST plan profile" in text
