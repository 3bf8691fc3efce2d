"""GPUs as a driver and torch report them: slow, hidden, divided, of another size, of a driver too old; never taken for a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fresh import fresh
from made_machine import H100, MadeGpus, row

from planner import detect
from planner.defaults import Request, resolve
from planner.detect import profile_of
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.lab.launch.gpus import gpus_here
from planner.lab.launch.meeting import _seen_by_first, _unlike, allow_connections, own_gpu
from planner.lab.launch.place import Place
from planner.lab.run.levels import machine_here
from planner.units import MIB


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeGpus:
    monkeypatch.setattr(detect, "QUICK", 0.3)
    monkeypatch.setattr("planner.lab.launch.gpus.PATIENT", 1.0)
    return MadeGpus(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("device", "profile"),
    [
        ("NVIDIA GH200 480GB", "gh200-96gb"), ("NVIDIA GH200 144G HBM3e", None), ("NVIDIA L40", None), ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"), ("NVIDIA A100-PCIE-40GB", None), ("NVIDIA A100-SXM-64GB", None), ("NVIDIA A10", None),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"), ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"), ("NVIDIA H200 NVL", None),
        ("Tesla V100-PCIE-16GB", None), ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"), ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA H100 NVL", "h100-nvl"), ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("AMD Instinct MI300A", None), ("AMD Instinct MI325X", "mi325x"),
        ("NVIDIA B300 SXM6 AC", "b300-sxm"), ("8xH100", "h100-sxm"), ("A100-40G", "a100-sxm-40gb"), ("NVIDIA A100X", None),
    ],
)  # fmt: skip
def test_names_count_as_whole_words(device: str, profile: str | None) -> None:
    assert profile_of(device) == profile


# MiB that nvidia-smi reports, from its published outputs, per profile.
SIZES = [
    ("h100-sxm", 81559), ("h200-sxm", 143771), ("b200-sxm", 183359), ("a100-sxm-40gb", 40960), ("a100-sxm-80gb", 81920),
    ("gh200-96gb", 97871), ("v100-sxm2-16gb", 16160), ("l4", 23034), ("rtx-4090", 24564), ("t4", 15360), ("mi300x", 196592),
]  # fmt: skip


@pytest.mark.parametrize(("profile", "mib"), SIZES)
def test_what_drivers_report_is_within_the_bound_and_other_sizes_are_not(profile: str, mib: int) -> None:
    usable = float(load_hardware(profile).usable_memory)
    assert not detect.memory_is_off(mib * MIB, usable)
    assert detect.memory_is_off(0.5 * mib * MIB, usable) and not detect.memory_is_off(0.0, usable)


def test_a_default_waits_two_seconds_and_says_so(made: MadeGpus) -> None:
    made.nvidia_smi(row(*H100), sleep=3.0)
    assert detect.asked_driver(0.3).problem == "nvidia-smi did not answer within 0.3 s"
    made.nvidia_smi(row(*H100), sleep=0.1)
    found = detect.asked_driver(5.0)
    assert found.names == (H100[0],) and found.memory == (81559 * MIB,) and found.version == "580.65.06"


def default_hardware() -> tuple[str, str]:
    found = resolve(Request(model="llama-8b", num_gpus=8))
    [assumed] = [one for one in found.assumptions if one.what == "hardware"]
    return str(assumed.value), assumed.why


def test_the_default_hardware_is_the_card_with_its_memory(made: MadeGpus) -> None:
    made.nvidia_smi(*[row("NVIDIA A100-SXM4-40GB", 40960)] * 8)
    assert default_hardware() == ("a100-sxm-40gb", "found here: NVIDIA A100-SXM4-40GB")
    made.nvidia_smi(row("NVIDIA H20-3e", 144384))
    name, why = default_hardware()
    assert name == "h100-sxm" and "the local NVIDIA H20-3e has 141 GiB, h20-sxm of the library 95.1 GiB" in why
    made.nvidia_smi("Unable to determine the device handle for GPU 0000:1B:00.0", code=9)
    assert "nvidia-smi ended with exit code 9 and says: Unable to determine the device handle" in default_hardware()[1]
    made.nvidia_smi(row(*H100, mig="Enabled"))
    assert "the local NVIDIA H100 80GB HBM3 MIG is not in the library" in default_hardware()[1]


def said_by(made: MadeGpus, device: str | None = None) -> str:
    with pytest.raises(PlannerError) as failed:
        gpus_here(device)
    return str(failed.value)


def test_torch_without_cuda_is_said_with_its_remedy(made: MadeGpus) -> None:
    made.nvidia_smi(*[row(*H100)] * 8)
    made.torch([], version="2.13.0+cpu", cuda=None, error="Torch not compiled with CUDA enabled")
    said = said_by(made)
    assert "the driver 580.65.06 reports 8 x NVIDIA H100 80GB HBM3 here, and torch 2.13.0+cpu is built for the CPU alone" in said
    assert "install a build for CUDA 13 (https://pytorch.org/get-started/locally), or measure the CPU with --device cpu" in said
    made.nvidia_smi(row(*H100, driver="550.54.15"))
    made.torch([], cuda="13.0", error="The NVIDIA driver on your system is too old (found version 12040).")
    said = said_by(made)
    assert "built for CUDA 13.0, which needs a driver of version 580 or above" in said and "a build for CUDA 12 (" in said
    made.nvidia_smi(row(*H100))
    made.torch([], error="Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized")
    assert "Error 802: system not yet initialized): the NVSwitches are not set up: `systemctl status nvidia-fabric" in said_by(made)


def test_a_silent_tool_is_never_a_machine_without_gpus(made: MadeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    made.nvidia_smi(row(*H100), sleep=5.0)
    made.files("nvidia0", "nvidia1")
    said = said_by(made)
    assert "nvidia-smi did not answer within 1 s although" in said and "dev/nvidia1 are there" in said and "--device cpu" in said
    made.nvidia_smi("garbage\x1b[31m, , ,")
    assert "says: garbage[31m, , , although" in said_by(made)
    made.nvidia_smi(*[row(*H100)] * 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "torch sees none of it with CUDA_VISIBLE_DEVICES='': unset or correct it" in said_by(made)
    assert gpus_here("cpu").count == 0, "the CPU was asked for"


def test_a_slow_tool_does_not_matter_to_a_torch_that_sees_them(made: MadeGpus) -> None:
    made.nvidia_smi(*[row(*H100)] * 8, sleep=5.0)
    made.torch([H100] * 4)
    here = machine_here(None, {})
    assert (here.device, here.gpus, here.name, here.gpu_memory) == ("cuda", 4, H100[0], (81559 * MIB,)), "as torch counts"


def test_an_amd_gpu_needs_no_flag(made: MadeGpus) -> None:
    made.files("kfd")
    made.torch([("AMD Instinct MI300X", 196592)] * 8, cuda=None)
    assert machine_here(None, {}).gpus == 8


def asked_of(run: Any, *flags: str) -> str:
    done = run("profile", "--output", "x.yaml", *flags)
    assert done.exit_code == 2, done.output
    return " ".join(str(done.output).split())


def test_profile_counts_and_knows_its_gpus(run: Any, made: MadeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(settings: Any, ranks: int, _: object) -> float:
        raise PlannerError(f"{settings.device} with {ranks} ranks for {settings.budget:g} s")

    monkeypatch.setattr("planner.lab.profile.command.profile_here", measured)
    made.nvidia_smi(*[row(*H100)] * 8)
    made.torch([H100] * 2)
    assert "cuda with 2 ranks for 600 s" in asked_of(run), "eight are in the machine, the job sees two"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    said = asked_of(run, "--ranks", "4")
    assert "4 ranks: each needs a GPU of its own, and torch sees 2 GPUs here with CUDA_VISIBLE_DEVICES=2,3" in said
    made.torch([("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9728)])
    assert "no profile of 'NVIDIA H100 80GB HBM3 MIG 1g.10gb'; give --hardware" in asked_of(run)
    made.torch([("NVIDIA GH200 480GB", 147456)])
    assert "NVIDIA GH200 480GB has 144.0 GiB of memory here and 94.5 GiB in the library's gh200-96gb" in asked_of(run)
    assert "cuda with 1 ranks" in asked_of(run, "--hardware", "gh200-96gb")


TOPOLOGY = "\tGPU0\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \tNV18\tPIX\t0-47\nGPU1\tNV18\t X \tSYS\t0-47\nNIC0\tPIX\tSYS\t X"


def test_conditions_of_a_node_are_in_the_profile(made: MadeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.lab.profile import node_state as conditions

    gpu = "345 MHz, 1980 MHz, 2619 MHz, 0x0000000000000001, {} W, 700.00 W, 31, Enabled, Disabled, Default"
    made.answers(("--query-gpu=*", "\n".join([gpu.format("700.00"), gpu.format("500.00")])), ("topo*", TOPOLOGY))
    monkeypatch.setattr(conditions, "NICS", made.folder / "nics")
    port = made.folder / "nics" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    for name, value in (("rate", "400 Gb/sec (4X NDR)"), ("link_layer", "InfiniBand"), ("state", "4: ACTIVE")):
        (port / name).write_text(f"{value}\n")
    found = conditions.conditions("cuda", {"NCCL_ALGO": "Ring", "HOME": "/secret", "CUDA_VISIBLE_DEVICES": "0,1"})
    assert found["power.limit"] == "700.00 W, 500.00 W" and found["ecc.mode.current"] == "Enabled"
    assert found["topology"] == "GPU0 X NV18 PIX 0-47 | GPU1 NV18 X SYS 0-47 | NIC0 PIX SYS X"
    assert found["infiniband"] == "mlx5_0 400 Gb/sec (4X NDR) InfiniBand 4: ACTIVE"
    assert found["environment"] == "CUDA_VISIBLE_DEVICES=0,1 NCCL_ALGO=Ring"
    assert "power.limit" not in conditions.conditions("cpu", {}), "no GPU was asked for"
    made.answers(("--query-gpu=*", "garbage"))
    assert "power.limit" not in conditions.conditions("cuda", {})


def test_a_node_in_another_state_is_named() -> None:
    from planner.lab.profile.node_state import unlike

    same = {"power.limit": "700.00 W", "ecc.mode.current": "Enabled", "temperature.gpu": "31"}
    nodes = {"a": same, "b": {**same, "temperature.gpu": "40"}, "c": {**same, "power.limit": "500.00 W"}}
    assert unlike(nodes) == ["nodes differ in power.limit: c 500.00 W, the others 700.00 W"] and unlike({"a": same}) == []


# ------------------------------------------------------------------------------------------------ ranks


def place(rank: int, world: int = 8, local: int | None = None) -> Place:
    return Place(
        rank=rank, world=world, local_rank=rank if local is None else local, node=0, address="a", port=1, agent_store=False
    )


def test_every_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [own_gpu(place(rank), 8) for rank in range(8)] == list(range(8))
    assert own_gpu(place(5), 1) == 0, "srun shows each task its own"
    with pytest.raises(PlannerError, match="rank 13 is number 5 on its node .from 0., and torch sees 4 GPUs there: start as many"):
        own_gpu(place(13, 16, local=5), 4)
    with pytest.raises(PlannerError, match="torch sees 0 GPUs there"):
        own_gpu(place(0), 0)


class Store(dict[str, bytes]):
    """What a meeting needs of a store."""

    def add(self, _: str, __: int) -> int:
        return len(self)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self[key] for key in keys]


def test_two_ranks_on_one_gpu_are_refused_when_they_meet() -> None:
    def store(*gpus: str) -> Store:
        texts = (f'{{"node": 0, "host": "a", "name": "H100", "gpu": "{gpu}"}}' for gpu in gpus)
        return Store({f"here/{rank}": text.encode() for rank, text in enumerate(texts)})

    found = _seen_by_first(store("x", "y"), place(0, 2), 1.0)
    assert isinstance(found, list) and [one["gpu"] for one in found] == ["x", "y"]
    said = _seen_by_first(store("x", "y", "x"), place(0, 3), 1.0)
    assert "ranks 0 and 2 on a have the same GPU (H100, x): 3 ranks were started there" in said
    assert isinstance(_seen_by_first(store("", ""), place(0, 2), 1.0), list), "processors have no such name"
    other = store("x", "y")
    other["here/1"] = other["here/1"].replace(b"H100", b"A100")
    said = _seen_by_first(other, place(0, 2), 1.0)
    assert isinstance(said, list) and "the ranks have different devices: rank 0 (a) has H100, rank 1 (a) has A100" in _unlike(said)


LAZY = """
import os, sys, tempfile
import torch.distributed as dist
from planner.lab.launch import meeting

def work(rank, world, path):
    dist.init_process_group("gloo", store=dist.FileStore(path, world), rank=rank, world_size=world)
    found = [None] * world
    dist.all_gather_object(found, rank)
    dist.barrier()
    assert found == list(range(world))
    names = [os.readlink(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{one}")]
    dist.barrier()
    os._exit(int(sum(name.startswith("socket") for name in names)))

meeting.MESH = int(sys.argv[1])
meeting.allow_connections(16)
path, ranks = tempfile.mktemp(), []
for rank in range(16):
    if not (child := os.fork()):
        work(rank, 16, path)
    ranks.append(child)
print(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks))
"""


@pytest.mark.proof
def test_many_ranks_are_not_connected_all_with_all() -> None:
    """16 ranks: a mesh has a socket for each other rank; connected when first used, some log2 of them."""
    mesh, lazy = (int(fresh(LAZY, most)) for most in ("16", "15"))
    assert mesh >= 15 and lazy <= 10


def test_open_files_are_enough_or_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    limits, raised = [(1024, 4096)], []
    monkeypatch.setattr("planner.lab.launch.meeting.resource.getrlimit", lambda _: limits[0])
    monkeypatch.setattr("planner.lab.launch.meeting.resource.setrlimit", lambda _, pair: raised.append(pair))
    allow_connections(8)
    allow_connections(1024)
    assert raised == [(1280, 4096)], "as far as is needed, and where it is"
    with pytest.raises(PlannerError, match="each of 8192 ranks .* about 8448 open files; the limit here is 4096: ulimit -Hn 8448"):
        allow_connections(8192)
