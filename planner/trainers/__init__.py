"""Trainers, one folder each, found by their files: adding one touches nothing else.

export.py makes a folder a target of ``plan export``, readback.py a form that ``plan import`` reads, log.py one that ``plan
calibrate`` reads, check.py runs the trainer's own code on an export. The folder's ``__init__`` declares plain data:

PLACE     place in lists, and the order in which forms and logs are tried
TITLE     of the target for people, with the form of its configuration
TRAINERS  names in profiles/trainers whose plans the target runs as they were priced; None = all
PACKAGE   on the package index, and the VERSIONS that the export was checked against
LEVEL     of bundle.target.LEVELS, and the SOURCE where its rules were read
WRITES    of bundle.target.STORED: facts about memory that its configuration says
OPTIONS   of the trainer (profiles/trainer_options.yaml) that its configuration says
NO_WORD   optimizers and precisions of those trainers that the target refuses on purpose
READ_FIRST its form is tried before the others: words of another trainer stand in it
READ_LAST its form is tried after the others: its words stand in files of theirs
FORM      endings of its configuration files, and an expression that stands in them
"""

import importlib
from functools import cache
from pathlib import Path
from typing import Any

SERVERS = ("vllm", "sglang", "trtllm", "dynamo")
"""Words after --from of ``plan import`` that are no trainers: what starts a server, which planner.serving.readback reads."""

@cache
def having(part: str) -> dict[str, Any]:
    """Trainers that have a module of this name, in the order of PLACE: name -> the declarations of its folder."""
    paths = [path for place in __path__ for path in Path(place).glob(f"*/{part}.py")]
    found = [importlib.import_module(f"{__name__}.{path.parent.name}") for path in paths]
    return {
        one.__name__.rpartition(".")[2].replace("_", "-"): one
        for one in sorted(found, key=lambda one: (one.PLACE, one.__name__))
    }


def load(name: str, part: str) -> Any:
    """A module of a trainer: its exporter, its reader, its check."""
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}.{part}")
