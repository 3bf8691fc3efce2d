"""What a submission ran with: by the round in its path, else by the image in its Dockerfile."""

import dataclasses
import re
from pathlib import Path

from planner.cost.parameters import count_parameters
from planner.trainer_options import spell, spelled
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.values import read_text
from planner.units import GIB

ROUND = re.compile(r"(?:mlperf|training|results)[a-z_.-]*v(\d)[._]\d(?!\d)", re.IGNORECASE)
"""training_results_v3.0, mlperf_training_v4_1."""
IMAGE = re.compile(r"nvcr\.io/\S*?(?:pytorch|nemo):(\d\d)\.\d\d")
ROUNDS = {"3": "23.09", "4": "24.04"}
"""Round -> NeMo, as published rows of it are priced; later ones have the newest.  [profiles/frameworks.yaml]"""
YEARS = {"23": "23.09", "24": "24.04"}
"""The same by the year of NVIDIA's image."""
OWN_OPTIMIZER = "23.09"
"""NeMo until 1.20, where embeddings have an optimizer of their own.  [NeMo 1.17 and 1.20, core/optim/distributed_adam.py]"""


def on_version(reading: Reading, path: Path) -> Reading:
    """The reading with the NeMo of its round, and with what that holds beside the plan."""
    name, said, options = spelled(reading.trainer)
    version = _version(path)
    if name != "nemo" or said or not version:
        return reading
    notes = (*reading.notes, f"trainer nemo {version}: by the round or the image of the submission", *_embeddings(reading, version))
    return dataclasses.replace(reading, trainer=spell(f"nemo@{version}", options), notes=notes)


def _version(path: Path) -> str:
    rounds = ROUND.findall(str(path.absolute()))
    if rounds:
        return ROUNDS.get(rounds[-1], "")
    files = (folder / "Dockerfile" for folder in path.absolute().parents[:2])
    image = IMAGE.search(next((read_text(one) for one in files if one.is_file()), ""))
    return YEARS.get(image[1], "") if image else ""


def _embeddings(reading: Reading, version: str) -> tuple[str, ...]:
    """A note on AdamW of embeddings, W + G + O = 16 bytes on each rank of the first and the last stage, where the plan has 2 and
    a share of 12; other master weights are remainders of 16 bits."""
    if version != OWN_OPTIMIZER or reading.model is None or reading.lora_rank or reading.precision not in ("bf16", "fp8"):
        return ()
    counts, ranks = count_parameters(reading.model), reading.fields
    rows = counts.input_embedding / ranks["tp"] + counts.position_embedding
    more = (14.0 - 12.0 / max((reading.num_gpus or 1) // (ranks["tp"] * ranks["pp"]), 1)) * rows / GIB
    return (
        "embeddings have an fp32 AdamW of their own in NeMo until 1.20, whole on each rank of the first and the last stage: up to "
        f"{more:.1f} GiB more there; other master weights are 16-bit remainders, 2 bytes less for each that a rank has states of",
    )
