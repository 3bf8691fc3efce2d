"""Programs that TRL and unsloth publish, by their names, where they do not lie beside what starts them."""

from pathlib import Path
from typing import Any

from planner.trainers.reading.given import Given, value_of
from planner.trainers.reading.programs import program_file
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.training_arguments import BATCHES, HABITS, LENGTHS, MODELS, STEPS, Habits
from planner.trainers.reading.unsloth_parts import UPLOADS, unsloth_checkpointing

BATCH, STEP, LENGTH = BATCHES[0], STEPS[0], LENGTHS[0]
CLI = "unsloth-cli.py"
OLD = {"batch_size": (BATCH, 64), "seq_length": (LENGTH, 512), "peft_lora_r": ("lora_r", 64)}
"""Options of TRL's sft.py until 0.7, before it took those of transformers, and their defaults.  [examples/scripts/sft.py]"""


def of_published(given: Settings, path: Path, program: str, said: Given) -> Habits | None:
    """Puts what such a program takes where its command says nothing into the settings; None = it is none of them."""
    name, data = program.rpartition("/")[2], dict(given.data)
    if program_file(path, program) is not None:
        return None
    if name == CLI:
        given.data = _cli(data, said)
        return HABITS["unsloth"]
    if name not in ("sft.py", "sft_trainer.py") or "model_name" not in data or not OLD.keys() & data.keys():
        return None
    for word, (ours, usual) in OLD.items():
        if word != "peft_lora_r" or value_of(str(data.get("use_peft", "false"))) is True:
            data[ours] = data.pop(word, usual)
    bits = any(data.get(one) is True for one in ("load_in_4bit", "load_in_8bit"))
    given.data = {STEP: 16, "loss_type": "nll", "lora_dropout": 0.0, **({"torch_dtype": "bfloat16"} if bits else {}), **data}
    return HABITS["old trl"]


def _cli(data: dict[str, Any], said: Given) -> dict[str, Any]:
    """Arguments of unsloth's command line; without --load_in_4bit it takes the upload in 16 bits.  [unsloth-cli.py]"""
    four = data.get("load_in_4bit") is True
    model = str(data.get(MODELS[1], "unsloth/llama-3-8b"))
    word = data.pop("use_gradient_checkpointing", "unsloth")
    return {
        BATCH: 2, STEP: 4, LENGTH: data.pop("max_seq_length", 2048), "optim": "adamw_8bit", "use_peft": True,
        "lora_r": data.pop("r", 16), "lora_target_modules": "all-linear", "lora_dropout": 0.0, "use_bnb_nested_quant": True,
        **unsloth_checkpointing(said, word), **data, "torch_dtype": "bfloat16", "load_in_4bit": four,
        MODELS[1]: model if four else UPLOADS.sub("", model),
    }  # fmt: skip
