"""What a submission ran with: by the round in its path, else by the image in its Dockerfile."""

import dataclasses
import re
from pathlib import Path

from planner.cost.parameters import count_parameters
from planner.trainer_options import spell, spelled
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.values import read_text
from planner.units import GIB

ROUND = re.compile(r"(?:mlperf[a-z_.-]*|results_)v(\d)[._]\d(?!\d)", re.IGNORECASE)
"""training_results_v3.0, mlperf_training_v4_1."""
IMAGE = re.compile(r"nvcr\.io/\S*?(?:pytorch|nemo):(\d\d)\.\d\d")
VERSIONS = {"3": "23.09", "4": "24.04", "23": "23.09", "24": "24.04"}
"""Round, or year of NVIDIA's image -> NeMo, as published rows are priced; later ones: the newest.  [profiles/frameworks.yaml]"""


def on_version(reading: Reading, path: Path) -> Reading:
    """The reading with the NeMo of its round, and with what that holds beside the plan."""
    name, said, options = spelled(reading.trainer)
    found = ROUND.findall(str(path.absolute()))
    if not found:
        files = (folder / "Dockerfile" for folder in path.absolute().parents[:2])
        found = IMAGE.findall(next((read_text(one) for one in files if one.is_file()), ""))[:1]
    version = VERSIONS.get(found[-1]) if found else None
    if name != "nemo" or said or version is None:
        return reading
    notes = (*reading.notes, f"trainer nemo {version}: by the round or the image of the submission")
    notes += _embeddings(reading) if version == VERSIONS["3"] else ()
    return dataclasses.replace(reading, trainer=spell(f"nemo@{version}", options), notes=notes)


def _embeddings(reading: Reading) -> tuple[str, ...]:
    """A note on AdamW of embeddings, W + G + O = 16 bytes on each rank of the first and the last stage, where the plan has 2 and
    a share of 12; other master weights are remainders of 16 bits.  [NeMo 1.17 and 1.20, core/optim/distributed_adam.py]"""
    if reading.model is None or reading.lora_rank or reading.precision not in ("bf16", "fp8"):
        return ()
    counts, tp = count_parameters(reading.model), reading.fields["tp"]
    rows, ranks = counts.input_embedding / tp + counts.position_embedding, (reading.num_gpus or 1) // (tp * reading.fields["pp"])
    more = (14.0 - 12.0 / max(ranks, 1)) * rows / GIB
    return (
        "embeddings have an fp32 AdamW of their own in NeMo until 1.20, whole on each rank of the first and the last stage: up to "
        f"{more:.1f} GiB more there; other master weights are 16-bit remainders, 2 bytes less for each that a rank has states of",
    )
