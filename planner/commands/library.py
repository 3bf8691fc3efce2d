"""``plan models``, ``plan trainers``: what the library holds."""

from __future__ import annotations

import click

from planner.commands.common import console


@click.command()
def models() -> None:
    """List the model presets."""
    from planner.report.library import models_table

    console().print(models_table())


@click.command()
def trainers() -> None:
    """List the trainers."""
    from planner.report.library import trainers_table

    console().print(trainers_table())
