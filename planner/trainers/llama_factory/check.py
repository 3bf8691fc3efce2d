"""LLaMA-Factory's own argument parser on an exported folder, with the checks of the library below it."""

import os
from pathlib import Path

from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking import Checked, Request
from planner.trainers.checking import setting_names as names
from planner.trainers.checking.import_standins import pretend_ranks

NEEDED = ("torch", "transformers", "llamafactory", "omegaconf", "peft")


def environment(_: ExportJob) -> dict[str, str]:
    """Versions of libraries are not looked at."""
    return {"DISABLE_VERSION_CHECK": "1"}


def one(asked: Request, answer: Checked) -> None:
    """The parser builds transformers' arguments, which join the (pretended) ranks; precision needs a GPU and is left out."""
    os.chdir(asked["folder"])
    os.environ.update(
        FORCE_TORCHRUN="1",
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE=str(asked["world"]),
        MASTER_ADDR="localhost",
        MASTER_PORT="0",
    )
    pretend_ranks(0, asked["world"])
    from llamafactory.hparams.parser import _parse_train_args
    from omegaconf import OmegaConf

    words = OmegaConf.from_cli(["model_name_or_path=model", "dataset=smoke", "max_steps=3", "use_cpu=true"])
    data = OmegaConf.to_container(OmegaConf.merge(OmegaConf.load("llama_factory.yaml"), words))
    precision = {name: data.pop(name) for name in ("bf16", "fp16", "deepspeed") if name in data}
    model, texts, training, tuning, _ = _parse_train_args({**data, "bf16": False, "fp16": False})
    answer.reached("parsed")
    layout = asked["layout"]
    batch = training.per_device_train_batch_size * training.gradient_accumulation_steps * layout["dp"]
    answer.same("global batch", batch, asked["batch"])
    answer.same("one precision at most", precision.get("bf16", False) and precision.get("fp16", False), False)
    answer.same("packed text", (texts.packing, tuning.stage), (True, "pt"))
    if "deepspeed" in precision:
        answer.same("recompute", not model.disable_gradient_checkpointing, layout["recompute"] == 2)
        answer.same("DeepSpeed's file", Path(precision["deepspeed"]).is_file(), True)


def known_names(root: Path) -> dict[str, names.Names]:
    """Its own arguments, and those of transformers, whose package must be unpacked into the same folder."""
    found: names.Names = {}
    for file in ("training_args.py", "training_args_seq2seq.py"):
        found |= names.fields(root / "transformers" / file)
    for name in ("model_args", "data_args", "training_args", "finetuning_args", "generating_args"):
        found |= names.fields(root / "llamafactory" / "hparams" / f"{name}.py")
    return {"arguments": found}


def used_names(folder: Path) -> names.Uses:
    """(section, name) of everything that the exported folder sets."""
    yield from (("arguments", name) for name in names.load(folder / "llama_factory.yaml"))
    yield from (("arguments", name) for name in names.script_settings(folder))
