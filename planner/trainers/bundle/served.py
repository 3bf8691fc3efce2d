"""What the servers share: refusals, the place of a node in its server, what was counted."""

from collections.abc import Callable

from planner.trainers.bundle.model_config import config_text
from planner.trainers.bundle.serving import Serving, serving
from planner.trainers.bundle.target import ExportJob, Rendered, Setting
from planner.units import GIB

VENDORS = ("NVIDIA", "AMD")


def served(job: ExportJob, flags: Callable[[Serving, str], list[str]], package: str) -> Rendered:
    """The words of one server, once with the trained weights and once with random ones."""
    one, config = serving(job), config_text(job.model)
    assert one is not None, "refusals come first"
    smoke = flags(one, "./model" if config else "$MODEL")
    model = Setting(None, "Trained model in Hugging Face format: a folder, or a name on the hub.")
    return Rendered(
        files={"model/config.json": config} if config else {}, entry=tuple(flags(one, "$MODEL")),
        smoke=(*smoke, "--load-format", "dummy", "--skip-tokenizer-init"), prepare=server_place(one), start="node",
        keeps_ranks=False, variables={"MODEL": model}, notes=serving_notes(job, one), install=(f"pip install '{package}'",),
    )  # fmt: skip


def serving_refusals(job: ExportJob, name: str) -> list[str]:
    """What neither server can serve: no room, no device, layers that are no whole part of a node."""
    hardware = job.cluster.hardware
    if hardware.vendor not in VENDORS:
        return [f"{name} is exported for {' and '.join(VENDORS)} GPUs, and {hardware.name} is from {hardware.vendor}"]
    if serving(job) is None:
        return [
            f"{job.cluster.num_gpus} x {hardware.usable_memory / GIB:.0f} GiB do not hold the bf16 weights of "
            f"{job.model.name} and the KV cache of one sequence of {job.workload.sequence_length} tokens with a tensor "
            f"parallel degree that divides its {job.model.num_heads} heads; plan for more GPUs"
        ]
    return []


def server_place(one: Serving) -> tuple[str, ...]:
    """Shell lines that say which node of its server this one is; the servers are groups of neighbouring nodes."""
    idle = f"# {one.servers} servers of {one.nodes} nodes: nodes beyond them stay idle."
    used = (idle, f'[ "$NODE_RANK" -lt {one.servers * one.nodes} ] || exit 0')
    if one.nodes == 1:
        return used
    if one.servers == 1:
        return (*used, 'export SERVER_NODE_RANK="$NODE_RANK" SERVER_ADDR="$MASTER_ADDR"')
    return (
        *used,
        f"export SERVER_NODE_RANK=$(( NODE_RANK % {one.nodes} ))",
        f': "${{SERVER_ADDR:?set SERVER_ADDR to the address of the first of the {one.nodes} nodes of this server}}"',
        "export SERVER_ADDR",
    )


def serving_notes(job: ExportJob, one: Serving) -> tuple[str, ...]:
    """What was counted, how many servers there are, what serving does not take from the plan."""
    where = f"{one.nodes} nodes" if one.nodes > 1 else "one node"
    notes = [
        f"{one.servers} server{'s' if one.servers > 1 else ''} of {one.tp * one.pp * one.dp} GPUs on {where} each: tp "
        f"{one.tp}, pp {one.pp}, dp {one.dp}, experts over {one.ep} ranks; {one.text}.",
        "Serving does not use the training layout of the plan: it takes its model, its GPUs and its sequence length.",
        "Speed was not priced: measure it with your requests.",
    ]
    idle = job.cluster.num_gpus - one.servers * one.nodes * job.gpus_per_node
    if idle:
        notes.append(f"{idle} of the {job.cluster.num_gpus} GPUs are left over and stay idle.")
    if one.servers > 1:
        notes.append("The servers do not know each other: put a router or a load balancer in front of them.")
    return tuple(notes)
