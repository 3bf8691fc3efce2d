"""Programs of Lit-GPT before it had settings: batch, adapters and devices are constants of the module and arguments of setup."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.layout import Recompute
from planner.trainers.litgpt.own_models import called
from planner.trainers.litgpt.precisions import FROZEN, PRECISIONS, adapters_on, of_a_quantised_head
from planner.trainers.reading.configuration import Reading, built_as
from planner.trainers.reading.fine_tuning import optimizer
from planner.trainers.reading.given import Given, Question, setting_of_a_fork, value_of
from planner.trainers.reading.named_models import named_model
from planner.trainers.reading.python_text import computed, last_name, tree_of
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.values import quotient, read_text

DEVICES = ("devices", "num_of_devices", "num_devices")
NODES = ("num_nodes", "nodes", "num_of_nodes")
STEPS = ("gradient_accumulation_iters", "gradient_accumulation_steps")
SHARDING = {"FULL_SHARD": 3, "HYBRID_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "DDP": 0}

OPTIMIZERS = re.compile(r"\boptim\.\w+$|(^|\.)((Fused)?AdamW?|Lion|Adafactor|SGD)$")
DECIDES = re.compile(
    r".*(freeze|frozen|distill|teacher|(^|_)ema(_|$)|relora|lisa|galore|dora|prun|parallel|offload|checkpointing).*"
)
"""Constants of a project's own that decide memory or degrees."""
POLICIES = ("activation_checkpointing_policy", "activation_checkpointing")


def is_one(text: str) -> bool:
    """Whether a program is one of Lit-GPT's: its modules, Fabric, and constants that say how much a step takes."""
    own = re.search(r"^[ \t]*(from|import) lit_?gpt\b", text, re.MULTILINE)
    return own is not None and "Fabric(" in text and re.search(r"^gradient_accumulation_\w+ *=", text, re.MULTILINE) is not None


def of_program(file: Path, options: Mapping[str, Any], said: Given) -> Reading:
    """The job of such a program under the options of its command. Raises PlannerError."""
    tree, text = tree_of(file), read_text(file)
    known = _constants(tree, options, said)
    given = Settings(file, known, said=said)
    if re.search(r"^[ \t]*from lit_?gpt\.(adapter\w*|rmt|quantize) import GPT", text, re.MULTILINE) or "adapter" in file.stem:
        raise PlannerError(f"{file}: prompt adapters are not modelled; LoRA, full fine-tuning and pre-training are")
    devices = next((given.number(one) for one in DEVICES if known.get(one) not in (None, "auto")), None)
    nodes = next((given.size(one) for one in NODES if known.get(one) is not None), 1)
    gpus = said.num_gpus or (devices * nodes if devices else None)
    micro, steps = given.size("micro_batch_size"), next((given.number(one) for one in STEPS if known.get(one) is not None), None)
    if steps is None:
        given.ask(Question(name=STEPS[0], about=f"what {file.name} computes of its batch"))
    lora = known.get("lora_r") is not None
    sharding, again = _strategy(tree, file)
    fields = {"micro_batch_size": micro, "num_microbatches": steps or 1, "zero": 0, "recompute": int(Recompute.NONE)}
    if gpus is not None:
        fields |= {"dp": gpus}
        if gpus > 1:
            fields |= {"zero": SHARDING[sharding], "recompute": int(Recompute.FULL if again else Recompute.NONE)}
            if sharding == "HYBRID_SHARD" and nodes > 1:
                fields["dp_shard"] = quotient(gpus, nodes, f"{file}: GPUs by nodes")
    name = str(known.get("checkpoint_dir") or known.get("model_name") or "")
    model, notes = named_model(name, file) if name else (None, ())
    model = model or (called(name) if name else None)
    length = _length(given, known)
    if length is None and model is not None and not known.get("checkpoint_dir") and (own := called(name)) is not None:
        length = own.max_sequence_length  # pre-training cuts its data by the block_size of the model
    tables = {"tied_embeddings": False}
    precision, quantize = str(known.get("precision") or "bf16-mixed"), known.get("quantize")
    if quantize not in (None, *FROZEN):
        raise PlannerError(f"{given.where('quantize')} is {shown(quantize)}; a plan knows {', '.join(FROZEN)}")
    targets, noted = adapters_on(given, lora)
    strange = [one for one, value in known.items() if DECIDES.fullmatch(one.lower()) and value not in (None, False, 0, "")]
    wide = FROZEN.get(str(quantize), "bf16" if precision == "bf16-true" else "fp32")
    model = built_as(model, tables) if model else None
    return Reading(
        trainer="litgpt@0.1", architecture=tables, fields=fields, model=model, model_name=name,
        num_gpus=gpus, global_batch_size=micro * (steps or 1) * (gpus or 1), sequence_length=length,
        precision=given.choice("precision", PRECISIONS, "bf16-mixed"), optimizer=_optimizer(given, tree, quantize is not None),
        lora_rank=given.size("lora_r", 8) if lora else 0, lora_targets=targets, frozen_weights=wide if lora else None,
        questions=tuple(setting_of_a_fork(one, "Lit-GPT") for one in strange),
        notes=(f"read as the constants of {file.name} and its setup() say", *notes, *noted,
               *of_a_quantised_head(wide if lora else None, PRECISIONS.get(precision, precision), model)),
    )  # fmt: skip


def _constants(tree: ast.Module, options: Mapping[str, Any], said: Given) -> dict[str, Any]:
    """Numbers, texts and switches of the module's top level and of setup()'s arguments, with what is said for them."""
    known: dict[str, Any] = {}

    def put(name: str, node: ast.expr | None) -> None:
        text = said.setting(name)
        value = value_of(text) if text is not None else options[name] if name in options else _value(node, known)
        known[name] = int(value) if isinstance(value, float) and value.is_integer() else value

    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            put(node.targets[0].id, node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            put(node.target.id, node.value)
        elif isinstance(node, ast.FunctionDef) and node.name == "setup":
            names = [one.arg for one in node.args.args]
            for name, default in zip(reversed(names), reversed(node.args.defaults), strict=False):
                put(name, default)
    return known | ({"num_nodes": options["num_nodes"]} if "num_nodes" in options else {})


def _value(node: ast.expr | None, known: Mapping[str, Any]) -> Any:
    """The value of an expression of literals, names and arithmetic; None = not known."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return known.get(node.id)
        case ast.UnaryOp(op=ast.USub()):
            found = _value(node.operand, known)
            return -found if isinstance(found, int | float) else None
        case ast.BinOp():
            return computed(node.op, _value(node.left, known), _value(node.right, known))
        case ast.Call(args=[one]) if last_name(node.func) in ("Path", "int"):
            found = _value(one, known)
            return int(found) if last_name(node.func) == "int" and isinstance(found, int | float) else found
    return None


def _strategy(tree: ast.Module, file: Path) -> tuple[str, bool]:
    """(how it shards over several GPUs, whether blocks are recomputed then). Raises PlannerError for other strategies."""
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and last_name(one.func).endswith("Strategy")]
    kinds = {last_name(one.func) for one in calls}
    if kinds == {"DDPStrategy"}:
        return "DDP", False
    other = sorted(kinds - {"FSDPStrategy", "XLAStrategy"})
    found = [one for one in calls if last_name(one.func) == "FSDPStrategy"]
    words = [{str(word.arg): word.value for word in one.keywords} for one in found]
    said = {tuple(ast.dump(one[name]) if name in one else "" for name in ("sharding_strategy", *POLICIES)) for one in words}
    if other or len(said) != 1:
        what = ", ".join(other) or ("several of FSDP" if found else "none by name")
        raise PlannerError(f"{file}: its strategy over several GPUs is {what}; one FSDPStrategy is read")
    one = words[0]
    if (host := one.get("cpu_offload")) is not None and not (isinstance(host, ast.Constant) and host.value in (False, None)):
        raise PlannerError(f"{file}: cpu_offload of its FSDPStrategy is not modelled for LitGPT")
    word, policy = one.get("sharding_strategy"), next((one[name] for name in POLICIES if name in one), None)
    name = word.value if isinstance(word, ast.Constant) else last_name(word) if word is not None else "FULL_SHARD"
    if name not in SHARDING:
        raise PlannerError(f"{file}: sharding_strategy is {shown(str(name))}; a plan knows {', '.join(SHARDING)}")
    return str(name), policy is not None and not (isinstance(policy, ast.Constant) and policy.value is None)


def _length(given: Settings, known: Mapping[str, Any]) -> int | None:
    names = ("override_max_seq_length", "max_seq_length", "max_seq_len", "block_size")
    return next((given.number(one) for one in names if isinstance(known.get(one), int)), None)


def _optimizer(given: Settings, tree: ast.Module, quantised: bool) -> str:
    """The optimizer that it makes; those of bitsandbytes are of quantised weights where it makes others too."""
    calls = [ast.unparse(one.func) for one in ast.walk(tree) if isinstance(one, ast.Call)]
    made = [one for one in dict.fromkeys(calls) if OPTIMIZERS.search(one)]
    of_bits = [one for one in made if re.match(r"(bnb|bitsandbytes)\.", one)]
    made = (of_bits if quantised else [one for one in made if one not in of_bits]) or made
    names = list(dict.fromkeys(one.rpartition(".")[2] for one in made))
    said = given.said.setting("optimizer") if given.said is not None else None
    if len(names) == 1 or said:
        return optimizer(given, said or names[0], "optimizer")
    given.ask(Question(name="optimizer", about="which of those that it makes", choices=tuple(names) or ("adamw",)))
    return "adam"
