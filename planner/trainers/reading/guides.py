"""The command of accelerate that launches a recipe, as a document beside the recipe gives it."""

import re
from collections.abc import Iterator
from pathlib import Path

from planner.record import record
from planner.trainers.reading.values import read_text

MOST_SCRIPTS = 20
"""Scripts beside a recipe that are looked through."""


@record
class Guide:
    """What the first command says that launches a file."""

    file: str
    """The configuration of accelerate."""
    document: str
    """The end of the path of the document that has the command."""
    counts: dict[str, int | None]
    """num_processes and num_machines, where the command has these options; None = with what is no number above 0."""
    others: int = 0
    """Commands of the same document that launch the file in another way."""

    def __str__(self) -> str:
        """As a note says it."""
        said = "".join(f" --{name} {value}" for name, value in self.counts.items() if value)
        more = f", the first of its {self.others + 1} ways to launch it" if self.others else ""
        return f"launched with {self.file}{said} by a command in {self.document}{more}"


def guide(path: Path) -> Guide | None:
    """The command that launches a recipe: in its own comment, in a script beside it, or in a README.md of its folder or of the one
    above. None = there is none."""
    if path.suffix not in (".yaml", ".yml", ".json"):
        return None
    path = path.resolve()
    above = [folder / "README.md" for folder in (path.parent, path.parent.parent)]
    documents = [path, *sorted(path.parent.glob("*.sh"))[:MOST_SCRIPTS], *(one for one in above if one.is_file())]
    if _launched_otherwise(path):
        documents.remove(path)
    for document in documents:
        commands = re.findall(r"accelerate +launch[^\n]*", _joined(document))
        named = [one for one in commands if document == path or _names(one, path, document)]
        ways = list(dict.fromkeys(way for one in named for way in _way(one)))
        if ways:
            file, processes, machines = ways[0]
            said = {"num_processes": processes, "num_machines": machines}
            counts = {name: int(text) or None if text.isdecimal() else None for name, text in said.items() if text is not None}
            return Guide(file=file, document="/".join(document.parts[-2:]), counts=counts, others=len(ways) - 1)
    return None


def _joined(path: Path) -> str:
    """The text of a file without the breaks of its long commands."""
    return re.sub(r"\\\n[ #]*", " ", read_text(path))


def _way(command: str) -> Iterator[tuple[str, str | None, str | None]]:
    """(configuration of accelerate, text of --num_processes, of --num_machines) of a command that names the first."""
    file = re.search(r"--config_file[= ]+[\"']?([\w./-]+\.(?:ya?ml|json))", command)
    if file is not None:
        found = (re.search(rf"--num[_-]{name}[= ]+[\"']?([^\s\"']+)", command) for name in ("processes", "machines"))
        processes, machines = (one[1][:20] if one is not None else None for one in found)
        yield file[1], processes, machines


def _names(command: str, path: Path, document: Path) -> bool:
    """Whether a command names a file: by a path that is the end of the file's path as a whole. The file's name alone counts in a
    document of its folder; a path on the author's machine from the folder of the document on."""
    inner = path.relative_to(document.parent).parts
    for word in re.split(r"[\s\"'`=]+", command):
        parts = [one for one in word.strip(",;()").split("/") if one not in ("", ".")]
        if not parts or parts[-1] != path.name:
            continue
        open_ = max((i + 1 for i, one in enumerate(parts) if re.search(r"[$~{}<>]", one)), default=0)
        if word.startswith("/") or open_:  # from a root that is not here
            ends = [(document.parent.name, *inner)] + ([inner] if open_ and len(parts) - open_ == len(inner) else [])
            if any(tuple(parts[open_:][-len(end) :]) == end for end in ends):
                return True
        elif len(parts) >= len(inner) and tuple(parts) == path.parts[-len(parts) :]:
            return True
    return False


def _launched_otherwise(path: Path) -> bool:
    """Whether a comment of a recipe starts it by another command than accelerate's, which then starts another file."""
    ends = ["/".join(path.parts[one:]) for one in range(1, len(path.parts) - 1)]
    lines = [line for line in _joined(path).splitlines() if line.lstrip().startswith("#")]
    named = [line for line in lines if re.search(r"[\w-]+ ", line) and any(word in ends for word in line.split())]
    return bool(named) and not any("accelerate" in line for line in named)
