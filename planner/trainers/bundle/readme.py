"""The README of a bundle: what runs, what it was priced for, and the numbers to compare with the trainer's log."""

from typing import Any

from planner.plan_file import Prediction
from planner.trainers.bundle.target import ExportJob, Rendered, Target


def readme(target: Target, job: ExportJob, rendered: Rendered, files: tuple[str, ...], plan_hash: str) -> str:
    """Text of README.md."""
    work, hardware = job.workload, job.cluster.hardware
    title = f"{job.model.name} on {job.cluster.num_gpus} x {hardware.name}, {target.title}"
    parts = [
        f"# {title}\n\nMade by `plan export --to {target.name}` from plan {plan_hash} (`plan.yaml`). Settings were checked against "
        f"{target.package} {target.versions}; with another version, look at them again.",
        _start(job, rendered, files),
        "## What was assumed\n\n" + _table(("", ""), [
            ("sequences", f"{work.global_batch_size} per step, {work.sequence_length} tokens each"),
            *((name, value) for name, value in (("precision", work.precision), ("optimizer", work.optimizer))
              if name not in {one.what for one in job.plan.assumptions}),
            ("nodes", f"{job.num_nodes} of {job.gpus_per_node} GPUs"),
            *((one.what, f"{one.value} ({one.why})") for one in job.plan.assumptions),
        ]),
        "## Layout\n\n" + _table(("setting", "value"), _layout_rows(job)),
        "## What to expect\n\n" + _expected(job.plan.prediction),
        "## Parameters per GPU\n\n" + _parameters(job, rendered),
    ]  # fmt: skip
    if rendered.notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in rendered.notes))
    return "\n\n".join(parts) + "\n"


def _start(job: ExportJob, rendered: Rendered, files: tuple[str, ...]) -> str:
    """How to install, what to set, what to run."""
    needed = [f"- `{name}`: {rendered.variables[name].why}" for name in rendered.needed]
    lines = ["## Start", ""]
    if rendered.install:
        lines += ["```sh", *rendered.install, "```", ""]
    if needed:
        lines += [
            "Set these variables first; the others stand with their defaults in `environment.sh`:",
            "",
            *needed,
            "",
        ]
    scripts = [
        name for name in files if name.endswith((".sh", ".sbatch")) and name not in ("environment.sh", "arguments.sh")
    ]
    lines += [f"Scripts: {', '.join(f'`{name}`' for name in scripts)}." if scripts else ""]
    if "hosts.txt" in files:
        lines += [
            "",
            "`hosts.txt` says which hosts belong together; write them there in that order to fix their ranks.",
        ]
    return "\n".join(lines).rstrip()


def _layout_rows(job: ExportJob) -> list[tuple[str, str]]:
    def text(value: Any) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return ", ".join(value) or "none" if isinstance(value, list) else str(value)

    rows = [(name.replace("_", " "), text(value)) for name, value in job.layout.to_dict().items()]
    return [*rows, ("layers per stage", "; ".join("+".join(map(str, rank)) for rank in job.layers_per_chunk()))]


def _expected(found: Prediction) -> str:
    low, high = found.step_time_range_s
    speed = found.tokens_per_second_per_gpu
    return _table(("", ""), [
        ("step", f"{found.step_time_s:.3f} s; nine of ten runs between {low:.3f} and {high:.3f} s"),
        ("tokens per second and GPU", f"{speed:.0f}; between {speed * found.step_time_s / high:.0f} and "
                                      f"{speed * found.step_time_s / low:.0f}"),
        ("model FLOP utilisation", f"{100 * found.mfu:.1f} %"),
        (f"memory of a GPU of the {found.memory_stage} stage, the fullest",
         f"{found.memory_peak_gib:.1f} of {found.memory_limit_gib:.1f} GiB"),
        *((f"of that, {name.replace('_', ' ')}", f"{value:.2f} GiB") for name, value in found.memory_gib.items()),
        ("chance of running out of memory", f"{100 * found.out_of_memory_probability:.1f} %"),
        ("host memory per GPU", f"{found.host_memory_gib_per_gpu:.1f} GiB"),
    ])  # fmt: skip


def _parameters(job: ExportJob, rendered: Rendered) -> str:
    """Parameters per pipeline rank; equal neighbours share a line."""
    counts, rows, start = job.parameters(rendered.vocab_rows), [], 0
    for rank in range(1, len(counts) + 1):
        if rank == len(counts) or counts[rank] != counts[start]:
            where = f"stage {start}" if rank == start + 1 else f"stages {start} to {rank - 1}"
            rows.append((where, f"{counts[start]:,}"))
            start = rank
    text = "Before states are sharded; the trainer's log must show the same numbers.\n\n"
    return text + _table(("pipeline", "parameters"), rows)


def _table(heads: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    clean = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join([f"| {heads[0]} | {heads[1]} |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in clean)])
