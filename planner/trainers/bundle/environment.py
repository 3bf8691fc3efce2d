"""Environment variables of a run, each with its reason: what the plan was priced with, and what only the site knows."""

from planner import units
from planner.trainers.bundle.target import ExportJob, Rendered, Setting

GROWING_SEGMENTS = Setting("expandable_segments:True", "Gathered weights come and go: less fragmentation.")
"""PYTORCH_CUDA_ALLOC_CONF of trainers that gather weights layer by layer."""


def environment(job: ExportJob, rendered: Rendered) -> dict[str, Setting]:
    """Variables of the run: what the trainer asks for comes last and wins. A value of None is the site's to fill in.

    TORCH_NCCL_AVOID_RECORD_STREAMS is left out on purpose: it has been the default since torch 2.7 and is ignored with a
    warning [pytorch/pytorch#194701]; older builds that take it for send and receive gave wrong losses with virtual
    pipeline stages [NVIDIA/Megatron-LM#1586].
    """
    found: dict[str, Setting] = {}
    if rendered.start == "torchrun":
        found |= _processes(job)
    if job.cluster.hardware.vendor in ("NVIDIA", "AMD"):
        found |= _collectives(job)
    return {**found, **dict(rendered.environment)}


def _processes(job: ExportJob) -> dict[str, Setting]:
    """Host threads and the allocator of torch."""
    offloaded = job.layout.offload_optimizer
    threads = (
        Setting(
            f"$(( $(nproc) / {job.gpus_per_node} ))",
            f"{offloaded} % of the optimizer states are updated on the host: each process gets its share of the cores.",
        )
        if offloaded
        else Setting("1", "One thread per process, as torchrun would set it: nothing large runs on the host.")
    )
    found = {"OMP_NUM_THREADS": threads}
    if job.cluster.hardware.vendor == "NVIDIA":
        found["PYTORCH_CUDA_ALLOC_CONF"] = Setting(
            "expandable_segments:True",
            f"Memory was priced with {100 * job.trainer.stored.fragmentation:.0f} % of fragmentation: segments that grow keep it "
            "there. torch 2.9 and later also read it as PYTORCH_ALLOC_CONF.",
        )
    return found


def _collectives(job: ExportJob) -> dict[str, Setting]:
    """NCCL (RCCL reads the same names)."""
    hardware = job.cluster.hardware
    found = {
        "NCCL_DEBUG": Setting("WARN", "A communicator that cannot be built says why in the log; nothing else is printed.")
    }  # fmt: skip
    switched = hardware.vendor == "NVIDIA" and hardware.scale_up_domain >= 8
    if switched and hardware.arch.startswith(("Hopper", "Blackwell")):
        found["NCCL_NVLS_ENABLE"] = Setting(
            "2",
            "All-reduce inside the NVLink domain was measured with the reductions of the switch; 2 uses them where they "
            "work, whatever the site's nccl.conf says.",
        )
    if hardware.vendor == "NVIDIA" and hardware.scale_up_domain > hardware.gpus_per_node and job.num_nodes > 1:
        found["NCCL_MNNVL_ENABLE"] = Setting(
            "1",
            f"The plan was priced with NVLink across nodes (domains of {hardware.scale_up_domain:.0f} GPUs): switched off, "
            "this traffic would go over the network. NCCL stops when the IMEX service does not work.",
        )
    if job.num_nodes > 1:
        rate = 8.0 * hardware.network_bandwidth / units.GIGA
        found["NCCL_SOCKET_IFNAME"] = Setting(
            None,
            "Interface between the nodes, like =ens1f0, when NCCL picks a wrong one (look for NET/Socket).",
        )
        found["NCCL_IB_HCA"] = Setting(
            None,
            f"Network cards, like =mlx5_0,mlx5_1, when some are for storage: the plan counts on {rate:.0f} Gb/s per GPU.",
        )
    return found
