"""Writes the real output of the commands that the README quotes into the README."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
QUOTE = re.compile(r"(<!-- output of: (plan [^\n]*?) -->\n```text\n)(.*?)(```\n)", re.DOTALL)


def output_of(command: str) -> str:
    """What a command prints when piped; trailing blanks cut, and the search's own seconds left out."""
    words = shlex.split(command)[1:]
    # Without nvidia-smi on the path, so that the text is the same on a machine with a GPU.
    result = subprocess.run(
        [sys.executable, "-m", "cli", *words], cwd=ROOT, capture_output=True, text=True, check=True, env={"PATH": ""}
    )
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines))
    return re.sub(r"; \d+\.\d+ s$", "", text.strip(), flags=re.MULTILINE) + "\n"


def updated(text: str) -> str:
    """The README with every quoted output as it is now."""
    return QUOTE.sub(lambda match: match[1] + output_of(match[2]) + match[4], text)


@click.command(help=__doc__)
def main() -> None:
    """Run the commands and write their output."""
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
