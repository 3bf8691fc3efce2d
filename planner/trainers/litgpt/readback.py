"""LitGPT: the YAML of litgpt finetune and litgpt pretrain, and commands with it or with options alone."""

import dataclasses
import re
from pathlib import Path

from planner.errors import PlannerError, shown
from planner.layout import Recompute
from planner.trainer_options import spell
from planner.trainers.reading.commands import launched, with_files
from planner.trainers.reading.configuration import Reading, built_as
from planner.trainers.reading.fine_tuning import adapter_targets, adapters_on_tables, optimizer
from planner.trainers.reading.given import Given, setting_of_a_fork
from planner.trainers.reading.interpolation import override
from planner.trainers.reading.named_models import named_model
from planner.trainers.reading.settings import Settings, beside, file_settings
from planner.trainers.reading.values import quotient, read_text
from planner.trainers.reading.versions import newer

QUIET = re.compile(
    r"(data|eval|log|optimizer|train)\..*|data|out_dir|resume|seed|logger_name|tokenizer_dir|initial_checkpoint_dir|lora_alpha|initial_\w+"
    r"|access_token|save_\w+"
)
PRECISIONS = {"bf16-true": "bf16_true", "bf16-mixed": "bf16", "16-mixed": "fp16", "32-true": "fp32"}
FROZEN = {"bnb.nf4": "nf4", "bnb.nf4-dq": "nf4_dq", "bnb.int8-training": "int8"}
LORA_DEFAULTS = {"query": True, "key": False, "value": True, "projection": False, "mlp": False}


def read(path: Path, said: Given) -> Reading:
    """The job of a file. Raises PlannerError."""
    if path.suffix in (".yaml", ".yml"):
        return parse(Settings(path, said.filled(file_settings(path, "a configuration of LitGPT")), said=said), said.num_gpus)
    found = launched(path, said, r"(?:\S*/)?litgpt", r"(pretrain|finetune)\w*")
    kind, *loose = found.words
    if kind == "finetune":  # the method was a word of its own; since 0.4 it is LoRA where none is said
        named = loose.pop(0) if loose and loose[0] in ("lora", "full", "adapter", "adapter_v2") else "lora"
        kind = f"finetune_{named}"
    if kind not in ("pretrain", "finetune_lora", "finetune_full"):
        raise PlannerError(f"{path}: litgpt {kind} is not modelled; pretrain, finetune_lora and finetune_full are")
    words = {name: found.settings.pop(name) for name in list(found.settings) if "." in name}
    data = override(dict(with_files(path, found, said).data), words)
    if loose:
        data["model_name" if kind == "pretrain" else "checkpoint_dir"] = loose[0]
    if kind == "finetune_lora":
        data.setdefault("lora_r", 8)
    each = found.visible or found.node_gpus
    reading = parse(Settings(path, said.filled(data), said=said), said.num_gpus, pretrain=kind == "pretrain", each=each)
    return dataclasses.replace(reading, notes=(*reading.notes, *found.notes))


def parse(given: Settings, num_gpus: int | None = None, pretrain: bool | None = None, each: int | None = None) -> Reading:
    """The job that settings describe; ``pretrain`` where a command says it; ``each``: GPUs that a node shows to it, which 'auto'
    takes. Raises PlannerError."""
    train = given.section("train")
    pretrain = given.get("model_name") is not None if pretrain is None else pretrain
    name = str(given.get("model_name") or given.get("checkpoint_dir"))
    model, notes = named_model(name, given.path)
    if given.get("model_config"):  # goes before the name: Config(**model_config)
        model, name = None, f"{name} with its model_config"
    # lm_head is a weight of its own where pretrain.py does not tie it, whatever the published model has.
    tables = {"tied_embeddings": train.flag("tie_embeddings") and pretrain}
    model = built_as(model, tables) if model is not None else None
    devices, nodes = given.get("devices", "auto" if pretrain else 1), given.size("num_nodes")
    each = each if devices == "auto" else given.size("devices")
    gpus = num_gpus or (each * nodes if each else None)
    batch, micro = train.size("global_batch_size", 512 if pretrain else 16), train.size("micro_batch_size", 4 if pretrain else 1)
    adapters = given.get("lora_r") is not None
    if given.get("adapter_prompt_length") is not None or "adapter" in given.path.stem.split("-"):
        raise PlannerError(f"{given.path}: prompt adapters are not modelled; LoRA and full fine-tuning are")
    quantize = given.get("quantize")
    if quantize is not None and quantize not in FROZEN:
        raise PlannerError(f"{given.where('quantize')} is {shown(quantize)}; a plan knows {', '.join(FROZEN)}")
    precision = given.get("precision") or "bf16-mixed"
    if quantize is not None and ("mixed" in str(precision) or (gpus or nodes) > 1):  # [litgpt, finetune/lora.py: setup]
        why = f"with precision {precision}" if "mixed" in str(precision) else f"on {gpus} GPUs" if gpus else f"on {nodes} nodes"
        raise PlannerError(
            f"{given.where('quantize')} is {shown(quantize)}, which LitGPT refuses {why}: one GPU with --set precision=bf16-true "
            "trains so; --set quantize=null imports the job without it"
        )
    fields = {"micro_batch_size": micro, "zero": 0, "recompute": int(Recompute.NONE)}
    if gpus is not None:
        # On several devices every block is wrapped and recomputed; pre-training does not and shards in a node.
        steps = quotient(batch, micro * gpus, f"{given.path}: global_batch_size by micro batches")
        fields |= {"dp": gpus, "num_microbatches": steps}
        if gpus > 1:
            fields |= {"zero": 3, "recompute": int(Recompute.NONE if pretrain else Recompute.FULL)}
            if pretrain and nodes > 1:
                fields["dp_shard"] = gpus // nodes
    options = {"compile": "on"} if pretrain else {}
    if adapters and given.above_zero("lora_dropout", 0.05):
        options["adapter_dropout"] = "on"
    named = [one for one, on in LORA_DEFAULTS.items() if given.flag(f"lora_{one}", on)]
    short = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "projection": "o_proj", "mlp": "up_proj"}
    called, noted = _of_lora(given.path) if adapters and gpus != 1 else ("litgpt", ())
    if adapters and given.flag("lora_head"):
        noted = (*noted, adapters_on_tables(["lm_head"]))
    wide = "bf16" if given.get("precision") == "bf16-true" else "fp32"  # mixed: fabric.init_module makes the base in fp32
    reading = Reading(
        trainer=spell(called, options), architecture=tables, fields=fields, model=model, model_name=name,
        num_gpus=gpus, global_batch_size=batch,
        sequence_length=train.number("max_seq_length"), precision=given.choice("precision", PRECISIONS, "bf16-mixed"),
        optimizer=_optimizer(given), lora_rank=given.size("lora_r", 8) if adapters else 0,
        lora_targets=adapter_targets([short[one] for one in named]) if adapters else "all",
        frozen_weights=(FROZEN[quantize] if quantize else wide) if adapters else None,
        notes=(*notes, *noted),
    )  # fmt: skip
    unread = [one.partition(" = ")[0::2] for one in given.left()]
    unread = [(name, value) for name, value in unread if not QUIET.fullmatch(name)]
    strange = tuple(setting_of_a_fork(name, "LitGPT") for name, _ in unread if "." not in name)
    return dataclasses.replace(reading, unread=tuple(f"{name} = {value}" for name, value in unread), questions=strange)


FLAT, FULLY_SHARDED = r"\bFSDPStrategy\(", r"\bModelParallelStrategy\("
"""How finetune/lora.py shards over several GPUs: up to 0.5.10, and from 0.5.11 on."""


def _of_lora(path: Path) -> tuple[str, tuple[str, ...]]:
    """(the trainer, what was taken for what): frozen weights have gradients in the older LoRA alone."""
    file = next((one for name in ("litgpt/finetune/lora.py", "finetune/lora.py") if (one := beside(path, name, (".py",)))), None)
    text = read_text(file) if file is not None else ""
    if re.search(FULLY_SHARDED, text):
        return "litgpt", ()
    if re.search(FLAT, text):
        return "litgpt@0.5", ("finetune/lora.py beside it shards flat parameters: LoRA of LitGPT before 0.5.11",)
    known = newer(path, "litgpt", (0, 5, 11))
    if known is None:
        return "litgpt", ("LoRA on several GPUs as LitGPT has it from 0.5.11 on: fully_shard, frozen weights without gradients",)
    return ("litgpt", ()) if known else ("litgpt@0.5", ("the project takes LitGPT before 0.5.11: LoRA shards flat parameters",))


def _optimizer(given: Settings) -> str:
    named = given.get("optimizer", "AdamW")
    if isinstance(named, dict):
        named = str(given.section("optimizer").get("class_path", "AdamW"))
    return optimizer(given, str(named).rpartition(".")[2], "optimizer")
