"""``plan run``: a plan trained to its end, whatever happens to the machines."""

import sys
from pathlib import Path
from typing import Any

import click

PATH = click.Path(path_type=Path)


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("file", metavar="PLAN", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("command", metavar="[-- COMMAND...]", nargs=-1, type=click.UNPROCESSED)
@click.option("--to", "folder", type=PATH, required=True, metavar="DIR", help="Exports, logs and checkpoints of the job lie here.")
@click.option("--checkpoints", type=PATH, metavar="DIR", help="Where checkpoints lie instead; all nodes see it. [DIR/checkpoints]")
@click.option("--gpus", "counts", metavar="MIN:MAX", help="GPUs of one node with which it goes on. [half : all of the plan]")
@click.option("--nnodes", metavar="MIN:MAX", default="1:1", help="Nodes; start this command on each. [1:1]")
@click.option("--nproc-per-node", type=click.IntRange(1, 4096), metavar="N", help="Ranks of a node. [by the plan]")
@click.option("--rdzv-endpoint", metavar="HOST:PORT", help="The node that keeps the rendezvous, where there are several.")
@click.option("--rdzv-id", default="plan-run", metavar="NAME", help="Name of the job for the rendezvous. [plan-run]")
@click.option("--rdzv-conf", metavar="K=V,...", help="Of torchrun: last_call_timeout, read_timeout. [torchrun's]")
@click.option("--world", metavar="FILE|CMD", help="A file with the number of GPUs to use now, or a command that prints it.")
@click.option("--notice", metavar="FILE|CMD", help="Save and stop when the file is there, or when the command ends with 0.")
@click.option("--interval", default="auto", metavar="TIME|auto", help="Between checkpoints; auto: Daly's, by --mtbf. [auto]")
@click.option("--every", type=click.IntRange(1, 10**9), metavar="STEPS", help="Steps between checkpoints instead.")
@click.option("--mtbf", metavar="TIME", help="Mean time between failures of a node, for the interval. [by the hardware]")
@click.option("--cluster", type=PATH, metavar="FILE", help="Storage and mtbf of this cluster file, for the interval.")
@click.option("--keep", type=click.IntRange(1, 1000), default=2, metavar="K", help="Whole checkpoints that stay. [2]")
@click.option("--grace", default="60s", metavar="TIME", help="From a signal or notice until everything is ended. [60s]")
@click.option("--first-step", default="20min", metavar="TIME", help="An attempt without a step by then has hung. [20min]")
@click.option("--silence", default="10min", metavar="TIME", help="So long without a step (10 times the plan's) has hung. [10min]")
@click.option("--restarts", type=click.IntRange(0, 10**6), default=3, metavar="N", help="Failures in a row without progress. [3]")
@click.option("--target", type=click.Choice(["pytorch", "megatron", "torchtitan"]), help="Whose flags COMMAND takes. [by its name]")
@click.option("--print-commands", is_flag=True, help="Export, print what would be started, and stop.")
def run(file: Path, command: tuple[str, ...], folder: Path, print_commands: bool, **flags: Any) -> None:
    """Train a plan to its end: torchrun starts it, checkpoints are written while it trains, and when GPUs fail, are taken away
    or come back it goes on with the best plan for what is there: the same batch and data, from the last whole checkpoint.

    COMMAND is the program that torchrun starts, with its arguments, without torchrun: train.py (the PyTorch script of the export,
    also what runs without a COMMAND), pretrain_gpt.py of Megatron-LM, or -m torchtitan.train. Its split and its flags for
    checkpoints are added. The plans for all numbers of GPUs are searched and exported before the start.

    Ctrl-C, SIGTERM, SIGUSR1 (sbatch --signal=B:USR1@120) and --notice save and end within --grace; the same command goes on from
    there. At a failure at most the time since the last whole checkpoint is lost: the interval and the time of one save. Exit
    codes: 0 finished, 130 after Ctrl-C, 143 after SIGTERM or a notice, 2 wrong input or failures that repeat without progress.

    \b
    Examples:
      plan --model llama-8b --gpus 8 --trainer torchtitan --output plan.yaml
      plan run plan.yaml --to run -- train.py --data tokens.bin --steps 10000
      plan run plan.yaml --to run --gpus 4:8 --world gpus.txt -- train.py --steps 10000
      plan run plan.yaml --to run --notice 'curl -sf http://169.254.169.254/latest/meta-data/spot/instance-action' -- train.py
      plan run plan.yaml --to run --nnodes 6:8 --rdzv-endpoint node0:29400 -- $MEGATRON_LM/pretrain_gpt.py --data-path data
      plan run plan.yaml --to run --mtbf 900h --keep 3 -- -m torchtitan.train --training.steps 10000
      plan run plan.yaml --to run --print-commands
    """
    from planner.lab.elastic.attempt import torchrun
    from planner.lab.elastic.loop import keep_training
    from planner.lab.elastic.setting_up import Asked, set_up
    from planner.plan_file import load_plan
    from planner.trainers.bundle.elastic_folder import folder_name

    if not print_commands:
        from planner.lab.launch.torchrun import need_torch

        need_torch("plan run")
    said = (lambda line: click.echo(line, err=True)) if not print_commands else (lambda line: None)
    with_units = {name: value for name, value in flags.items() if value is not None}
    ready = set_up(Asked(plan=load_plan(file), command=command, folder=folder, **with_units), said)
    job = ready.job
    for line in ready.lines:
        click.echo(line, err=not print_commands)
    if print_commands:
        ranks = ready.ranks
        click.echo("starts " + " ".join(["torchrun", *torchrun(job.meeting, ranks, job.start, job.grace)[3:]]))
        for gpus, world in sorted(job.worlds.items()):
            text = (job.start.parent / folder_name(gpus) / "rank.sh").read_text(encoding="utf-8").partition("\nexec ")[2]
            words = text.replace("\\\n", " ").removesuffix(' "$@"\n').split()
            click.echo(f"each of {gpus} ranks ({world.words}): {' '.join(words)}")
        return
    with ready.alone():
        code = keep_training(job, lambda line: click.echo(line, err=False))
    if code:
        sys.exit(code)


