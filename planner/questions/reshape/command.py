"""``plan reshape``: the best plan on another number of GPUs, the move counted."""

import sys
from pathlib import Path
from typing import Any

import click

from planner.terminal.flags import emit, progress

NOTHING_FITS = 1


@click.command()
@click.argument("file", metavar="PLAN", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--gpus", type=int, metavar="N", help="GPUs from now on.")
@click.option("--nodes", type=int, metavar="N", help="Nodes in place of --gpus: all their GPUs.")
@click.option("--drain", metavar="TIME", help="Warning before machines go, like 120s: is it long enough to save?")
@click.option("--lost", is_flag=True, help="Machines went without a warning: from the last checkpoint.")
@click.option("--remaining", metavar="TIME", help="Training that is left, like 3days: what a move must pay for itself in. [24h]")
@click.option("--step", type=int, metavar="N", help="Step that the run has reached: where its data goes on.")
@click.option("--mtbf", metavar="TIME", help="Between two failures of one node; decides how old the last checkpoint is.")
@click.option("--synchronous", is_flag=True, help="Training stops for the whole of a save.")
@click.option(
    "--cluster", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Cluster file: storage of checkpoints; of a mixed plan the nodes that it goes on with, in place of a number.",
)  # fmt: skip
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the new plan.",
)  # fmt: skip
@click.option(
    "--recipe", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write the resharding recipe (.yaml or .json): engine, flags, positions.",
)  # fmt: skip
@click.option(
    "--checkpoint", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Of the run: torch.distributed.checkpoint, Megatron, DeepSpeed, safetensors; its real bytes and step count.",
)  # fmt: skip
@click.option(
    "--run", "to", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Rewrite --checkpoint in the new split with its own engine, and check every tensor.",
)  # fmt: skip
@click.option("--to", "target", metavar="NAME", help="Trainer to export for, as of 'plan export --to'; with --export.")
@click.option(
    "--export", "folder", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Folder for torchrun --nnodes MIN:MAX: a plan for every number of nodes between the two.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output instead of tables.")
def reshape(
    file: Path, as_json: bool, output: Path | None, recipe: Path | None, to: Path | None, target: str | None, folder: Path | None,
    **flags: Any,
) -> None:
    """The best plan on another number of GPUs, counting the move: bytes that ranks read and send, seconds, pay-back time.

    PLAN is the plan that runs, of --output. The new plan keeps the global batch, or says by how much it differs. Layouts are
    ranked by the time until the remaining samples are trained, the move included; of equals those whose degrees divide the old
    ones or are multiples are preferred, as no stored shard is then read twice.

    \b
    Examples:
      plan reshape run.yaml --gpus 48
      plan reshape run.yaml --gpus 48 --drain 120s --output next.yaml --recipe recipe.yaml
      plan reshape run.yaml --nodes 7 --lost --cluster cluster.yaml
      plan reshape run.yaml --gpus 128 --remaining 3days --step 12000 --json
      plan reshape run.yaml --gpus 48 --to torchtitan --export elastic/
      plan reshape mixed.yaml --cluster left.yaml --lost
      plan reshape run.yaml --gpus 48 --checkpoint run/checkpoints --run resharded --output next.yaml
    """
    from planner import api

    if (target is None) != (folder is None):
        raise click.UsageError("an export needs --to, the trainer, and --export, the folder")
    if to is not None and flags["checkpoint"] is None:
        raise click.UsageError("--run rewrites a checkpoint: say which with --checkpoint DIR")
    with progress("looking for layouts") as say:
        found = api.reshape(file, progress=say, **flags)
    if found.fits:
        for path, write in ((output, found.save), (recipe, found.save_recipe)):
            if path is not None:
                write(path)
                click.echo(f"wrote {path}", err=True)
    if found.fits and target is not None and folder is not None:
        click.echo(f"wrote {folder}: {', '.join(found.export(target, folder))}", err=True)
    emit(found, as_json)
    if found.fits and to is not None:
        done = found.reshard(flags["checkpoint"], to, progress=lambda line: click.echo(line, err=True))
        click.echo(
            f"{done.tensors} tensors, {done.values:,} values: names, shapes, values and sums are those of {done.old.path}; "
            f"written to {done.new.path}", err=True,
        )  # fmt: skip
    if not found.fits:
        sys.exit(NOTHING_FITS)
