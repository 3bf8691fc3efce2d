"""``plan models``, ``plan trainers``: what the library holds."""

import click

from planner.terminal.flags import console


@click.command()
def models() -> None:
    """List the model presets."""
    from planner.terminal.library_tables import models_table

    console().print(models_table())


@click.command()
def trainers() -> None:
    """List the trainers."""
    from planner.terminal.library_tables import trainers_table

    console().print(trainers_table())
