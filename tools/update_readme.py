"""Writes into the README the output of the commands that it quotes, and the errors that the pages on accuracy show."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
QUOTE = re.compile(r"(<!-- output of: (plan [^\n]*?) -->\n```text\n)(.*?)(```\n)", re.DOTALL)


FIGURES = {
    r"step time is ([\d.]+) % as a mean": ("accuracy.md", "Step time", "all", "mean over sources"),
    r"\(pre-training ([\d.]+) %": ("accuracy.md", "Step time", "pre-training", "mean over sources"),
    r"fine-tuning ([\d.]+) %": ("accuracy.md", "Step time", "fine-tuning", "mean over sources"),
    r"users' own runs ([\d.]+) %": ("accuracy.md", "Step time", "own run", "mean over sources"),
    r"and ([\d.]+) % as the median over runs": ("accuracy.md", "Step time", "all", "median over runs"),
    r"that of memory ([\d.]+) %": ("accuracy.md", "Memory", "all", "mean over sources"),
    r"of memory [\d.]+ % and ([\d.]+) %": ("accuracy.md", "Memory", "all", "median over runs"),
    r"steps of RL ([\d.]+) %": ("accuracy.md", "Mixed", "rl | step_s", "median error"),
    r"updates ([\d.]+) % over": ("accuracy.md", "Mixed", "rl | train_s", "median error"),
    r"weight syncs ([\d.]+) %": ("accuracy.md", "Mixed", "rl | sync_s", "median error"),
    r"mixed or GH200 nodes ([\d.]+) %": ("accuracy.md", "Mixed", "heterogeneous | step_s", "median error"),
    r"memory there ([\d.]+) %": ("accuracy.md", "Mixed", "heterogeneous | memory_gb", "median error"),
    r"between regions ([\d.]+) %": ("accuracy.md", "Mixed", "geo | gb_per_s", "median error"),
    r"changes of layout ([\d.]+) %": ("accuracy.md", "Mixed", "elastic | reconfigure_s", "median error"),
    r"token is ([\d.]+) % off": ("serving.md", "How far", "TPOT, closed loop, dense", "mean error"),
    r"and ([\d.]+) % for experts": ("serving.md", "How far", "TPOT, closed loop, experts", "mean error"),
    r"first token ([\d.]+) %": ("serving.md", "How far", "TTFT below saturation", "mean error"),
    r"offline throughput ([\d.]+) and": ("serving.md", "How far", "offline throughput, dense", "median"),
    r"offline throughput [\d.]+ and ([\d.]+) %": ("serving.md", "How far", "offline throughput, experts", "median"),
}
"""Where the README's figures stand: page in docs, section, start of the row, column."""


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


def cell(page: str, section: str, row: str, column: str) -> float:
    """The number in one cell of a page's table."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").split(f"## {section}", 1)[1]
    lines = [line.strip("| ") for line in text.splitlines() if line.startswith("|")]
    heads = [head.strip() for head in lines[0].split("|")]
    found = next(line for line in lines if line.startswith(f"{row} |"))
    # A row's first cells may be empty in the heading: columns are counted from the right.
    return float(found.split("|")[heads.index(column) - len(heads)].strip().rstrip(" %"))


def with_figures(text: str) -> str:
    """The README with the errors that the pages show; a sentence that is not found is an error."""
    for pattern, place in FIGURES.items():
        words = re.compile(pattern.replace(" ", r"\s"))
        match = words.search(text)
        if match is None:
            raise ValueError(f"the README has no {pattern!r} any more: change tools/update_readme.py")
        digits = len(match[1].partition(".")[2])
        text = f"{text[: match.start(1)]}{cell(*place):.{digits}f}{text[match.end(1) :]}"
    return text


def updated(text: str) -> str:
    """The README with every quoted output and every figure as they are now."""
    return with_figures(QUOTE.sub(lambda match: match[1] + output_of(match[2]) + match[4], text))


@click.command(help=__doc__)
def main() -> None:
    """Run the commands and write their output."""
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
