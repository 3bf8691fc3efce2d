"""Settings of torchtune that change the trainer of a plan, those that its recipes refuse, and those that it does not have."""

import re
from pathlib import Path

from planner.errors import PlannerError
from planner.layout import CpMethod
from planner.model import ModelSpec
from planner.trainers.reading.given import Question, setting_of_a_fork
from planner.trainers.reading.settings import Settings, beside
from planner.trainers.reading.values import read_text
from planner.trainers.reading.versions import newer
from planner.units import GIB

QUIET = re.compile(
    r"(tokenizer|dataset|dataset_val|checkpointer|ref_checkpointer|lr_scheduler|metric_logger|profiler|optimizer|collate_fn|loss"
    r"|tensor_parallel_plan|model|dataloader|share_weights)\..*"
    r"|output_dir|seed|shuffle|epochs|max_steps_per_epoch|clip_grad_norm|log_\w+|device|resume_from_checkpoint|save_\w+|batch_size_val"
    r"|run_val_\w+|custom_sharded_layers|cudnn_\w+|use_distributed_state_dict|optimizer_in_bwd|low_cpu_ram|fsdp.*|ac_\w+|enable_async\w*"
    r"|collate_fn|datasets|activation_offloading_use_streams|memory_efficient_fsdp_wrap|enable_expandable_segments|enable_fsdp"
    r"|context_parallel_rotate_method|fused|enable_kv_cache|fp8_recipe_name|enable_fp8_training"
)
PART = "activation|gradient|attention|attn|expert|moe|layer|block|mlp|ffn"
DECIDES = re.compile(
    r"\w*parallel\w*|\w+_degree|\w*expert_\w+|native_\w+|\w*shard\w*|\w*offload\w*|\w*(recompute|remat)\w*"
    rf"|checkpoint_\w*({PART})\w*|\w*({PART})s?\w*checkpoint\w*|\w*checkpointing\w*"
    r"|\w*(fp8|fp4|int8|int4|[48]_?bit|quant|freeze|frozen|trainable|dora|adapter|zero_stage|deepspeed|distill|teacher|prun|dropout)\w*"
    r"|(\w+_)?(ema|lora|lisa|relora|precision|dtype|mtp|moe)(_\w+)?|(\w+_)?(accumulation|accum)_\w+|micro_batch\w*|global_batch\w*"
    r"|(\w+_)?seq(uence)?_len(gth)?|early_exit_loss"
)
"""Settings that say a degree, a batch, a dtype, what is trained, sharding or recompute by their names, where torchtune does not
have them."""
KNOWN = re.compile(
    r"custom_sharded_layers|(save|load|(enable_)?async)_\w+|\w*(checkpointer|tokenizer|dataset)\w*(\..*)?|activation_offloading_use_streams"
    r"|(tensor_parallel_plan|lr_scheduler|metric_logger|profiler|optimizer|collate_fn|loss|dataloader)\..*|model\..*"
    r"|context_parallel_rotate_method|\w*generat\w*|max_seq_len(gth)?|fp8_recipe_name"
)
"""Others like them that decide neither."""
NONE = ("1", "1.0", "'1'", "'none'", "'None'", "'null'", "'false'", "'False'")
"""Values with which such a setting changes nothing."""
DEVICES = ("cuda", "hpu")
"""What profiles of --hardware are of: torch calls GPUs of AMD cuda too."""
LOSSES = {
    "LinearCrossEntropyLoss": "", "CEWithChunkedOutputLoss": "", "CrossEntropyLoss": "full",
    "DPOLoss": "", "RSOLoss": "", "IPOLoss": "",
}  # fmt: skip
"""Losses by their classes: '' = in pieces as the trainer has it, or of DPO."""
MUCH = 0.25
"""GiB from which there is a note: some percent of the smallest jobs."""
PREFERENCES = ("DPOLoss", "RSOLoss", "IPOLoss")
"""Losses of pairs over a reference model."""


def loss_option(given: Settings) -> dict[str, str]:
    """Option of the trainer that the loss means. Raises PlannerError, or asks, for one that is none of a language model."""
    named = str(given.get("loss._component_") or "")
    word = named.rpartition(".")[2]
    if not word or word in LOSSES:
        found = LOSSES.get(word, "")
        return {"loss": found} if found else {}
    if named.startswith("torchtune."):
        raise PlannerError(f"{given.where('loss')}._component_ is {word}, which is not modelled; cross entropy and DPO are")
    about = f"{word} is a loss of the project's own; one that is like it"
    given.ask(Question(name="loss._component_", about=about, choices=("LinearCrossEntropyLoss", "CrossEntropyLoss", "DPOLoss")))
    return {}


def of_own_loss(given: Settings) -> tuple[str, ...]:
    """Note about a loss of a project's own that has the name of one of torchtune's."""
    named = str(given.get("loss._component_") or "")
    word = named.rpartition(".")[2]
    if word not in LOSSES or named.partition(".")[0] in ("torch", "torchtune", word):
        return ()
    return (f"loss {named} is the project's own: taken for torchtune's {word}, and what it keeps of the scores may differ",)


TO_THE_HOST = re.compile(r"\b\w*(?:logits|scores|chunk)\w*\.(?:cpu\(\)|to\(\s*(?:torch\.device\()?[\"']cpu)")
"""Scores that a recipe takes to the host."""
TAKEN = (
    "; it takes the scores to the host, and the plan has them on the GPU: memory comes out too high by up to {:.0f} bytes for each "
    "of 2 x batch x length x vocabulary"
)


def held_by_the_loss(given: Settings, trainer: str, tokens: int, model: ModelSpec | None) -> tuple[str, ...]:
    """Note on what the losses of all pieces keep for the backward pass, where it is much: they are added up before it; the older
    loss is given the bf16 logits of all pieces besides.
    [modules/loss; torch 2.13, saved tensors of F.cross_entropy, compiled and not]"""
    compiled, older = "compile=on" in trainer, str(given.get("loss._component_")).endswith("CEWithChunkedOutputLoss")
    held = (2.0 if compiled else 6.0 if older else 4.0) * tokens * (model.vocab_size if model else 0) / GIB
    if held < MUCH or "loss=" in trainer:
        return ()
    what = "bf16 logits" if compiled else f"an fp32 log softmax{' and bf16 logits' * older}"
    return (f"the pieces of the loss keep {what} of all tokens until the backward pass: up to {held:.1f} GiB on top of the plan",)


def repeated_heads(trainer: str, tokens: int, model: ModelSpec | None) -> tuple[str, ...]:
    """Note on keys and values, which are repeated for all heads of the queries and kept so, where layers are neither recomputed nor
    compiled, and it is much; the plan has them as they were.  [modules/attention.py, expand(...).flatten(1, 2)]"""
    if model is None or model.is_mla or "compile=" in trainer:
        return ()
    more = 2.0 * tokens * model.num_layers * (model.num_heads / model.num_kv_heads - 1) * (model.key_size + model.value_size) / GIB
    return (f"keys and values are kept once for every head: up to {more:.1f} GiB on top of the plan",) if more >= MUCH else ()


def compile_option(given: Settings, adapters: bool) -> dict[str, str]:
    """What is compiled: yes or no, or a section that says it part by part; up to 0.2 the model alone."""
    loss = True
    if isinstance(given.data.get("compile"), dict):
        part = given.section("compile")
        for one in ("optimizer_step", "scale_grads"):
            part.get(one)
        model, loss = part.flag("model", True), part.flag("loss", True)
    else:
        model = given.flag("compile")
    if not model:
        return {}
    return {"compile": "on" if loss and _compiles_the_loss(given, adapters) else "model"}


def _compiles_the_loss(given: Settings, adapters: bool) -> bool:
    """Whether the recipes around a file, or the version that its project pins, compile the loss with the model: from 0.3 on.
    [training/_compile.py, compile_loss]"""
    kind = "lora" if adapters else "full"
    names = (f"recipes/{kind}_finetune_{one}.py" for one in ("single_device", "distributed"))
    files = [file for name in names if (file := beside(given.path, name, (".py",))) is not None]
    texts = [text for file in files if "compile" in (text := read_text(file))]
    if texts:
        return any(OF_THE_LOSS.search(text) for text in texts)
    return newer(given.path, "torchtune", (0, 3)) is not False


OF_THE_LOSS = re.compile(r"compile_loss|loss\w*\s*=\s*torch\.compile|loss\w*\.compile\(|torch\.compile\(\s*(self\.)?_?loss")
"""How recipes compile a loss."""


def require_allowed(given: Settings, single: bool, adapters: bool) -> None:
    """Raises PlannerError for what the recipes themselves refuse; those of adapters read fewer settings.
    [recipes/full_finetune_distributed.py, __init__]"""
    if given.flag("optimizer_in_bwd") and not adapters:
        steps, clips = given.size("gradient_accumulation_steps", 1), given.get("clip_grad_norm")
        if steps > 1 or clips is not None:
            what = f"gradient_accumulation_steps {steps}" if steps > 1 else f"clip_grad_norm {clips}"
            raise PlannerError(
                f"{given.where('optimizer_in_bwd')}: torchtune refuses it with {what}; --set optimizer_in_bwd=false, or "
                f"--set {what.partition(' ')[0]}={'1' if steps > 1 else 'null'}"
            )
    if given.flag("enable_activation_offloading") and not given.flag("enable_activation_checkpointing"):
        where = given.where("enable_activation_offloading")
        raise PlannerError(f"{where}: torchtune refuses it without enable_activation_checkpointing; --set one of them")
    if given.flag("optimizer.amsgrad"):
        about = "a third state, the largest second moment, which no plan has; false imports the job without it"
        given.ask(Question(name="optimizer.amsgrad", about=about, choices=("false",)))
    if given.flag("enable_fp8_training") and not single and not adapters:
        about = "products in FP8 are not modelled for torchtune; false imports the job without them"
        given.ask(Question(name="enable_fp8_training", about=about, choices=("false",)))


STARTED = re.compile(r"^#.*\btune[ \t]+run\b(.*)$", re.MULTILINE)
"""A command in the comments of a configuration."""
OF_A_KIND = re.compile(r"(?:^|[\s/])(full|lora)_(?:finetune|dpo)_\w+(?:\.py)?(?=\s|$)")
"""Recipes of torchtune by what they train."""


def require_builder(given: Settings, recipe: str | None, adapters: bool) -> None:
    """Raises PlannerError for a recipe of adapters over a builder of whole models, which stops at lora_rank, or the reverse, which
    freezes nothing; asks where only the comments of the file name the recipe.  [recipes/lora_finetune_distributed.py]"""
    lines = [recipe] if recipe is not None else STARTED.findall(read_text(given.path))
    named = [(one[0].strip(" /"), one[1]) for line in lines for one in OF_A_KIND.finditer(line)]
    kind = "lora" if adapters else "full"
    builder = str(given.get("model._component_"))
    if not named or any(of == kind for _, of in named) or not builder.startswith("torchtune.models."):  # of its own, who knows
        return
    has = f"{named[0][0]} is its recipe, and model._component_ a builder {'with' if adapters else 'without'} adapters"
    if recipe is not None:
        raise PlannerError(f"{given.path}: {has}: torchtune refuses it; name the other recipe, or the other builder")
    if given.said is None or given.said.setting("model._component_") is None:
        home, _, name = builder.rpartition(".")
        other = f"{home}.{re.sub('^q?lora_', '', name) if adapters else f'lora_{name}'}"
        given.ask(Question(name="model._component_", about=f"{has}, which torchtune refuses", choices=(builder, other)))


def of_a_fork(given: Settings) -> tuple[Question, ...]:
    """What decides memory or degrees: settings that torchtune does not have, and a device that no profile is of."""
    left = [one.partition(" = ")[0::2] for one in given.left()]
    found = []
    for name, value in left:
        if any(map(DECIDES.fullmatch, name.split("."))) and not KNOWN.fullmatch(name) and value not in NONE:
            head, _, rest = name.partition(".")  # of a section one question
            found.append(setting_of_a_fork(head, "torchtune", "false" if value == "True" and not rest else "null"))
    device = str(given.get("device") or "cuda")
    if device.partition(":")[0] not in DEVICES:
        about = f"no profile of --hardware is of '{device}'; cuda imports the job as it would run on one"
        found.append(Question(name="device", about=about, choices=("cuda",)))
    return tuple({one.name: one for one in found}.values())


DEGREES = {
    "cp": (re.compile(r"\w*(ulysses|sequence_parallel)\w*_(size|degree|dim)"), "context parallelism over heads (Ulysses)"),
    "ep": (re.compile(r"\w*expert\w*_parallel_(size|degree|dim)"), "expert parallelism; tables and head that it may "
           "leave whole on every GPU then are not in the plan, 8 bytes for each of their weights"),
}  # fmt: skip
"""Degrees of forks, within those of data: field -> (its names, what it is)."""


def degrees_of_a_fork(given: Settings, model: ModelSpec | None) -> tuple[dict[str, int], tuple[str, ...]]:
    """(Fields of Layout by settings of a fork that say a degree above 1, notes about them); beside context_parallel_dim, and
    without experts, they are asked for as others of a fork. ``model``: that of the file."""
    model = model or (given.said.spec() if given.said is not None else None)
    fields: dict[str, int] = {}
    notes: list[str] = []
    for field, (names, what) in DEGREES.items():
        found = [one for one in given.data if names.fullmatch(one) and given.data[one] not in (None, "", 1, "1")]
        other = given.size("context_parallel_dim") > 1 if field == "cp" else model is not None and not model.is_moe
        if len(found) == 1 and not other:
            fields |= {field: given.size(found[0]), **({"cp_method": int(CpMethod.A2A)} if field == "cp" else {})}
            notes.append(f"{found[0]} is a setting of a fork of torchtune: read as {what}")
    return fields, tuple(notes)


FREES = re.compile(r"^[ \t]*(?:\w+\.)*set_trainable_params\(", re.MULTILINE)
"""How the recipes of adapters freeze the rest."""
FREEZES = re.compile(r"^[ \t]*[^#\n]*\.requires_grad(_\(\s*(?!True)|[ \t]*=[ \t]*(?!True)\S)", re.MULTILINE)


def of_a_checkout(path: Path, recipe: str | None, adapters: bool) -> tuple[str, ...]:
    """Note about a recipe of torchtune's name in the checkout around a file that trains other weights than torchtune's does."""
    lines = [recipe] if recipe else STARTED.findall(read_text(path))
    name = next((one.group().strip(" /").removesuffix(".py") for line in lines for one in OF_A_KIND.finditer(line)), None)
    file = beside(path, f"recipes/{name}.py", (".py",)) if name else None
    text = read_text(file) if file is not None else ""
    if not text or (FREES.search(text) if adapters else "_dpo_" in str(name) or not FREEZES.search(text)):
        return ()
    does = "calls no set_trainable_params: it trains all weights, and the plan the adapters" if adapters else (
        "sets requires_grad itself: it trains some weights, and the plan all"
    )
    return (f"recipe {name} of the checkout {does}",)
