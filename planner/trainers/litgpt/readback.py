"""LitGPT: the YAML of litgpt finetune and litgpt pretrain, and commands with it or with options alone."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.layout import Recompute
from planner.model import ModelSpec
from planner.trainer_options import spell
from planner.trainers.litgpt.copies import FULLY_SHARDED, Copy, copy_of, writes_scores_out
from planner.trainers.litgpt.fabric_programs import is_one, of_program
from planner.trainers.litgpt.own_defaults import lay_under
from planner.trainers.litgpt.own_models import built, called, of_a_checkout, strange
from planner.trainers.litgpt.precisions import FROZEN, PRECISIONS, adapters_on, of_a_quantised_head
from planner.trainers.reading.commands import launched, with_files
from planner.trainers.reading.configuration import Reading, built_as, reduced_last
from planner.trainers.reading.fine_tuning import optimizer
from planner.trainers.reading.given import Given, Question, setting_of_a_fork
from planner.trainers.reading.interpolation import override
from planner.trainers.reading.kernels import softcapped
from planner.trainers.reading.named_models import named_model
from planner.trainers.reading.programs import program_file
from planner.trainers.reading.settings import Settings, file_settings
from planner.trainers.reading.values import read_text
from planner.trainers.reading.versions import newer

QUIET = re.compile(
    r"(data|eval|log|optimizer|model_config)\..*|data|out_dir|resume|seed|logger(_name)?|tokenizer_dir|initial_checkpoint_dir|lora_alpha"
    r"|initial_\w+|access_token|save_\w+"
    r"|train\.(save_\w+|log_\w+|lr_\w+|epochs?|epoch_size|max_(tokens|steps|time|norm)|(min_)?lr(_\w+)?|learning_rate|weight_decay|beta\d|seed"
    r"|decay_lr|tie_embeddings|wsds?_\w+|warmup_\w+)"
)
RECOMPUTES = tuple(f"{part}{one}_checkpointing" for one in ("activation", "gradient") for part in ("", "train."))
"""Switches of forks whose names say what they do."""
SURE = 8192
"""Up to which LitGPT's block_size is the longest sequence of the published model; of Mistral 7B it has 4,096.  [config.py]"""
OWN = {"train", "model_name", "checkpoint_dir", "model_config", "lora_r", "precision", "devices"}
"""Sections and settings that a YAML of LitGPT has; others are workflows that run its commands."""
PROGRAM = r"(?:\S*/)?litgpt(?:/__main__\.py)?|(?:\S*/)?litgpt/(?:pretrain|finetune/\w+)\.py|(?:\S*/)?(?:pretrain|finetune)/\w+\.py"


def read(path: Path, said: Given) -> Reading:
    """The job of a file. Raises PlannerError."""
    if path.suffix in (".yaml", ".yml"):
        data = file_settings(path, "a configuration of LitGPT")
        if not data.keys() & OWN:
            raise PlannerError(f"{path}: commands of litgpt and none of its settings; put the one that trains into a script")
        return parse(Settings(path, said.filled(data), said=said), said.num_gpus)
    if path.suffix == ".py":
        if not is_one(read_text(path)):
            raise PlannerError(f"{path}: a program of LitGPT whose batch stands elsewhere; import its YAML or its command")
        return of_program(path, {}, said)
    own = re.search(r"(litgpt/pretrain|(finetune|pretrain)/\w+)\.py", read_text(path)) is not None
    found = launched(path, said, PROGRAM, "" if own else r"(pretrain|finetune)\w*")
    by_file = found.program.endswith(".py") and not found.program.endswith("__main__.py")
    if by_file:
        file = program_file(path, found.program)
        if file is not None and is_one(read_text(file)):
            nodes = re.search(r"\b(?:lightning|fabric) +run\b(?:[^\n]|\\\n)*?--num[-_]nodes[= ]+(\S+)", read_text(path))
            if nodes is not None and nodes[1].isdecimal():
                found.settings.setdefault("num_nodes", int(nodes[1]))
            elif nodes is not None:  # of how many nodes is not known, so of how many GPUs neither
                found.settings["devices"] = "auto"
            reading = of_program(file, found.settings, said)
            return dataclasses.replace(reading, notes=(*reading.notes, *found.notes))
        if not re.search(r"litgpt/(pretrain|finetune/\w+)\.py", found.program):
            what = "is not there" if file is None else "is none of Lit-GPT's"
            raise PlannerError(f"{path}: its program {found.program} {what}, and constants of it say the batch; put it there")
    loose = list(found.words)
    if by_file:
        stem = Path(found.program).stem
        kind = stem if stem == "pretrain" else f"finetune_{stem}"
    else:
        kind = loose.pop(0)
    if kind == "finetune":  # the method was a word of its own; since 0.4 it is LoRA where none is said
        named = loose.pop(0) if loose and loose[0] in ("lora", "full", "adapter", "adapter_v2") else "lora"
        kind = f"finetune_{named}"
    if kind not in ("pretrain", "finetune_lora", "finetune_full"):
        raise PlannerError(f"{path}: litgpt {kind} is not modelled; pretrain, finetune_lora and finetune_full are")
    words = {name: found.settings.pop(name) for name in list(found.settings) if "." in name}
    data = override(dict(with_files(path, found, said).data), words)
    if loose and not loose[0].endswith((".yaml", ".yml")):
        data["model_name" if kind == "pretrain" else "checkpoint_dir"] = loose[0]
    if kind == "finetune_lora":
        data.setdefault("lora_r", 8)
    each = found.visible or found.node_gpus
    reading = parse(Settings(path, said.filled(data), said=said), said.num_gpus, pretrain=kind == "pretrain", each=each)
    return dataclasses.replace(reading, notes=(*reading.notes, *found.notes))


def parse(given: Settings, num_gpus: int | None = None, pretrain: bool | None = None, each: int | None = None) -> Reading:
    """The job that settings describe; ``pretrain`` where a command says it; ``each``: GPUs that a node shows to it, which 'auto'
    takes. Raises PlannerError."""
    train, by_command = given.section("train"), pretrain is not None
    pretrain = given.get("model_name") is not None if pretrain is None else pretrain
    if given.get("adapter_prompt_length") is not None or "adapter" in given.path.stem.split("-"):
        raise PlannerError(f"{given.path}: prompt adapters are not modelled; LoRA and full fine-tuning are")
    model, name, notes = _model(given)
    # lm_head is a weight of its own where pretrain.py does not tie it, whatever the published model has.
    tables = {"tied_embeddings": train.flag("tie_embeddings") and pretrain}
    model = built_as(model, tables) if model is not None else None
    words = {one for one, value in given.data.items() if value is not None and (one.startswith("lora_") or one == "quantize")}
    adapters = "lora_r" in words if pretrain else bool(words)
    if adapters and pretrain:
        raise PlannerError(f"{given.path}: adapters while pre-training, which LitGPT does not have; finetune_lora is modelled")
    if not (adapters or pretrain or by_command):
        notes = (*notes, "none of lora_r, quantize is said: full fine-tuning")
    program = "pretrain" if pretrain else "finetune/lora" if adapters else "finetune/full"
    notes += lay_under(given, train, program)
    each = each if given.get("devices", "auto" if pretrain else 1) in ("auto", -1, "-1") else given.size("devices")
    nodes = given.size("num_nodes")
    gpus = num_gpus or (each * nodes if each else None)
    fields, batch, shared = _batch(given, train, pretrain, gpus, nodes)
    copy = copy_of(given, program)
    if gpus != 1:
        fields |= copy.fields
    again = given.first(*RECOMPUTES)
    if again is not None:
        fields["recompute"] = int(Recompute.FULL if str(again).lower() in ("true", "1") else Recompute.NONE)
    torch = given.data.get("compiler") in ("torch", None) and given.get("compiler") == "torch"  # of its extension for Thunder
    compiles = pretrain or torch if copy.compiles is None else copy.compiles
    options = {"compile": "on"} if given.flag("compile", compiles) else {}
    if adapters and given.above_zero("lora_dropout", 0.05):
        options["adapter_dropout"] = "on"
    trainer, noted = _of_lora(given.path, copy) if adapters and gpus != 1 else ("litgpt", ())
    if writes_scores_out(given.path):
        options["attention_kernel"] = "eager"
        noted = (*noted, "model.py beside it writes attention out: matrices of scores are kept, further uses of them not priced")
    targets, of_layers = adapters_on(given, adapters)
    length = train.number("max_seq_length")
    whole = model is not None and (given.get("model_config") is not None or model.max_sequence_length <= SURE)
    if length is None and pretrain and model is not None and whole:
        length, notes = model.max_sequence_length, (*notes, f"max_seq_length is not said: block_size {model.max_sequence_length}")
    cut = length or (given.said.sequence_length if given.said is not None else None)
    capped, kept = softcapped(model, fields["micro_batch_size"], cut, bool(fields["recompute"]))
    options |= capped
    frozen = _frozen(given, gpus, nodes) if adapters else None
    precision = given.choice("precision", PRECISIONS, "bf16-mixed")
    reading = Reading(
        trainer=spell(trainer, options), architecture=tables, fields=fields, model=model, model_name=name,
        num_gpus=gpus, global_batch_size=batch, sequence_length=length,
        precision=precision,
        optimizer=_optimizer(given, adapters), lora_rank=given.size("lora_r", 8) if adapters else 0, lora_targets=targets,
        frozen_weights=frozen,
        notes=(*notes, *shared, *copy.notes, *noted, *kept, *of_layers, *of_a_quantised_head(frozen, precision, model)),
    )  # fmt: skip
    return _with_the_rest(given, reduced_last(reading))  # no_backward_sync of Fabric


def _model(given: Settings) -> tuple[ModelSpec | None, str, tuple[str, ...]]:
    """(the model, what the file calls it, what was taken for what): model_config goes before the name."""
    name = given.label("model_name", "checkpoint_dir")
    config = given.get("model_config")
    if isinstance(config, Mapping):
        config = config.get("init_args", config)
        own = built(config, str(config.get("name") or Path(name).name or "own")) if isinstance(config, Mapping) else None
        more = strange(config) if isinstance(config, Mapping) else []
        return own, f"{name} with {', '.join(more)[:80] or 'the sizes'} of its model_config", ()
    if config:
        return None, f"{name} with its model_config", ()
    model, notes = named_model(name, given.path)
    if model is None and re.fullmatch(r"[\w.+/~-]{1,300}", name) and (model := called(name)) is not None:
        notes = (f"model {model.name}: sizes of LitGPT's own list",)
    if model is None and (model := of_a_checkout(name, given.path)) is not None:
        notes = (f"model {model.name}: sizes of litgpt/config.py beside it",)
    return model, name, notes


def _batch(
    given: Settings, train: Settings, pretrain: bool, gpus: int | None, nodes: int
) -> tuple[dict[str, int], int, tuple[str, ...]]:
    """(fields of Layout, sequences per step, notes): LitGPT shares the batch out and drops what is left over; up to 0.5.7 over
    the GPUs of one node.  [litgpt/args.py, TrainArgs.batch_size, gradient_accumulation_iters]"""
    _ask_for_empty(train)
    batch, micro = train.size("global_batch_size", 512 if pretrain else 16), train.size("micro_batch_size", 4 if pretrain else 1)
    fields = {"micro_batch_size": micro, "zero": 0, "recompute": int(Recompute.NONE)}
    if gpus is None:
        return fields, batch, ()
    by_node = nodes > 1 and newer(given.path, "litgpt", (0, 5, 8)) is False and gpus % nodes == 0
    steps = batch // (gpus // nodes if by_node else gpus) // micro
    if not steps:
        where = f"{given.path}: train.global_batch_size {batch} is less than micro_batch_size {micro} on each of {gpus} GPUs"
        raise PlannerError(f"{where}, which LitGPT refuses; say --gpus N with fewer or --set train.micro_batch_size=M")
    # On several devices every block is wrapped and recomputed; pre-training does not and shards in a node.
    fields |= {"dp": gpus, "num_microbatches": steps}
    if gpus > 1:
        fields |= {"zero": 3, "recompute": int(Recompute.NONE if pretrain else Recompute.FULL)}
        if pretrain and nodes > 1 and gpus % nodes == 0:
            fields["dp_shard"] = gpus // nodes
    real = steps * micro * gpus
    why = "by its versions before 0.5.8 it is that of a node" if by_node else "what is left over is dropped"
    notes = (f"global_batch_size is {batch}: {steps} micro batches of {micro} on {gpus} GPUs make {real}; {why}",) * (real != batch)
    if nodes > 1 and not by_node and newer(given.path, "litgpt", (0, 5, 8)) is None:
        notes = (*notes, "the batch is shared out over all nodes, as LitGPT does from 0.5.8 on; before, it was that of a node")
    return fields, real, notes


def _ask_for_empty(train: Settings) -> None:
    """Asks for sizes whose value is left empty: null goes in the place of the default, with which LitGPT stops."""
    for name in ("global_batch_size", "micro_batch_size"):
        if name in train.data and train.data[name] in (None, ""):
            train.ask(Question(name=f"{train.place}{name}", about="it is left empty, which is no default: LitGPT stops there"))


def _frozen(given: Settings, gpus: int | None, nodes: int) -> str:
    """Dtype of the base under adapters. Raises PlannerError where LitGPT refuses to quantise it.  [finetune/lora.py: setup]"""
    precision, quantize = str(given.get("precision") or "bf16-mixed"), given.get("quantize")
    if quantize is None:  # mixed: fabric.init_module makes the base in fp32
        return "bf16" if precision == "bf16-true" else "fp32"
    if quantize not in FROZEN:
        raise PlannerError(f"{given.where('quantize')} is {shown(quantize)}; a plan knows {', '.join(FROZEN)}")
    mixed = "mixed" in precision or precision in ("bf16", "16")
    if mixed or (gpus or nodes) > 1:
        why = f"with precision {precision}" if mixed else f"on {gpus} GPUs" if gpus else f"on {nodes} nodes"
        raise PlannerError(
            f"{given.where('quantize')} is {shown(quantize)}, which LitGPT refuses {why}: one GPU with --set precision=bf16-true "
            "trains so; --set quantize=null imports the job without it"
        )
    return FROZEN[quantize]


def _with_the_rest(given: Settings, reading: Reading) -> Reading:
    """The reading with what nobody read: settings of a fork are asked about, its sections and those of train too."""
    unread = [one.partition(" = ")[0::2] for one in given.left()]
    unread = [(name, value) for name, value in unread if not QUIET.fullmatch(name)]
    strange: dict[str, Question] = {}
    for name, value in unread:
        head, _, rest = name.partition(".")
        one = name if head == "train" or not rest else head
        without = "null" if one != name or value[:1] in "-0123456789" else "false"
        strange.setdefault(one, setting_of_a_fork(one, "LitGPT", without))
    listed = tuple(f"{name} = {value}" for name, value in unread)
    return dataclasses.replace(reading, unread=listed, questions=tuple(strange.values()))


def _of_lora(path: Path, copy: Copy) -> tuple[str, tuple[str, ...]]:
    """(the trainer, what was taken for what): frozen weights have gradients in the older LoRA alone, which shards flat parameters
    up to 0.5.10."""
    if copy.strategies:
        if "FSDPStrategy" not in copy.strategies or FULLY_SHARDED in copy.strategies:
            return "litgpt", ()
        return "litgpt@0.5", ("finetune/lora.py beside it shards flat parameters: LoRA of LitGPT before 0.5.11",)
    known = newer(path, "litgpt", (0, 5, 11))
    if known is None:
        return "litgpt", ("LoRA on several GPUs as LitGPT has it from 0.5.11 on: fully_shard, frozen weights without gradients",)
    return ("litgpt", ()) if known else ("litgpt@0.5", ("the project takes LitGPT before 0.5.11: LoRA shards flat parameters",))


def _optimizer(given: Settings, adapters: bool) -> str:
    """As it is named; beside quantised weights LitGPT makes PagedAdamW of bitsandbytes, whatever AdamW is named."""
    named: Any = given.get("optimizer", "AdamW")
    if isinstance(named, dict):
        part = given.section("optimizer")
        named = part.get("class_path", "AdamW")
        if part.section("init_args").flag("amsgrad"):
            about = "a third state, the largest second moment, which no plan has; false imports the job without it"
            given.ask(Question(name="optimizer.init_args.amsgrad", about=about, choices=("false",)))
    name = str(named).rpartition(".")[2]
    paged = adapters and given.get("quantize") is not None and "AdamW" in name  # [litgpt/utils.py, instantiate_bnb_optimizer]
    return optimizer(given, "PagedAdamW" if paged else name, "optimizer")
