"""Kernels that arguments of Hugging Face's trainers name: those of attention, and those of Liger, which it has for some models."""

import re
from collections.abc import Mapping
from pathlib import Path

from planner import library
from planner.errors import listed, shown
from planner.hugging_face import table
from planner.model import ModelSpec
from planner.trainer import load_trainer
from planner.trainers.reading.base_weights import of_file, spec_of
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.values import read_text
from planner.trainers.reading.versions import installs, newer, project_root
from planner.units import GIB

KERNELS = {"flash_attention_2": "fa2", "flash_attn": "fa2", "fa2": "fa2", "sdpa": "best", "eager": "eager",
           "kernels-community/flash-attn": "fa2", "kernels-community/flash-attn2": "fa2"}  # fmt: skip
"""attn_implementation -> attention_kernel."""
USUAL = ("", "none", "auto")
SWITCHES = ("use_liger_kernel", "use_liger", "enable_liger_kernel", "liger_fused_linear_cross_entropy")
OF_AXOLOTL, PATCHES_ALL = SWITCHES[3], (0, 13)
"""Its switch, and the release of axolotl whose own patch is for models too that Liger has none for.  [integrations/liger]"""
OF_LAYERS = ("liger_rms_norm", "liger_glu_activation", "liger_swiglu", "apply_liger_kernel")
"""Switches of axolotl for kernels within a layer, and what a program calls for them."""
OWN_LOSS, IN_PIECES, ALL_SCORES = "own_loss", "fused", "scores"
"""Of a program whose model or trainer computes its loss itself: what is kept of the scores; none by a loss that fuses, or all."""
OWN_LOSSES = ("use_dft_loss", "use_eaft_loss", "use_eaft", "label_smoothing_factor")
"""Losses that take the labels from the model, which then returns the scores.  [transformers, trainer.py: compute_loss]"""
PATCHES_ADAPTED = (4, 49)
"""Version of transformers whose Trainer hands the model below adapters to Liger.  [transformers, trainer.py]"""
OTHERS = re.compile(
    r"gpt-?3|starcoder-?2|starchat-?2|codegen2-|stablelm|phi-?3.*(moe|small)|phi-?4.*(flash|multimodal)|phi-\w+-moe|internlm|xverse|aquila"
    r"|minicpm(-llama3-v)?|pangu|telechat|(^|/)orion-|skywork-(13b|moe)|minimax|megatron|mt-nlg|grok|dbrx|jamba|mamba(-codestral)?|rwkv"
    r"|deepseek-?(v2|v3|r1(?!-distill)|moe|coder-v2)|kimi(?!-dev)|moonlight|ernie|command-[ar]|c4ai|aya-(23|expanse)|seed-oss|exaone-?3"
    r"|granite(?!.*code)|olmoe|olmo-[17]b|nemotron-(3(?!40)|h|super|ultra|51b)|nemotron-nano-\w+-v2|(^|/)qwen-(vl|audio)|qwen1\.5-moe|qwen2-57b"
    r"|qwen[\d.]+-(audio|omni)|glm-?(4\.[5-9](?!v)|5)|recurrentgemma|t5-?gemma|gemma-?3n|ministral-3-|mistral-(small-3\.[12]|large-3)"
)
"""Names of models whose model_type is none of those that Liger patches, nor one of the table of classes."""
PATCHED = re.compile(
    r"llama|vicuna|alpaca|(^|/)yi-|qwen|qwq|mistral|mixtral|ministral|codestral|(?<!stablelm-)zephyr|gemma"
    r"|phi-?[34]|olmo-?[23]|smollm|gpt-?oss|deepseek-(llm|coder|math|r1-distill)|hunyuan|nemotron|exaone-?4|falcon-?(3|h1)|kimi-dev"
    r"|glm.*(0414|4-32b)|glm-?4\.\dv|skywork-or1|baichuan-m2|granite-[38]b-code|codegen25"
)
"""Names of models whose model_type is one of them."""


def other_attention(said: object) -> tuple[str, ...]:
    """Note about a kernel of attention that no plan has."""
    kernel = str(said if said is not None else "").lower()
    known = kernel in KERNELS or kernel in USUAL
    return () if known else (f"attention by {kernel[:40]} is priced as the kernel of the trainer's default",)


SAID = ("attn_implementation", "_attn_implementation", "attn_impl", "flash_attn")
"""Arguments that name the kernel of attention."""
OF_OTHERS = re.compile(r"flash_?attn|flash_?attention|xformers|bettertransformer|scaled_dot_product|memory_efficient", re.I)
"""What the code of a program says that puts another attention into a model."""
MOST_PROGRAMS = 40
FIRST, NEVER = "4.36", "none"
"""The version whose classes have torch's attention; the word of those that never got it."""


def of_class(
    given: Settings, options: Mapping[str, str], name: str, known: ModelSpec | None, by_class: bool
) -> tuple[dict[str, str], tuple[str, ...]]:
    """(Options, notes): attention as the class of the model has it in the version of transformers that is pinned, where nothing
    names a kernel; ``by_class``: the trainer leaves it to the class. Eager attention keeps its scores."""
    said = any(str(given.first(one) or "").lower() not in USUAL for one in SAID)
    if said or not by_class or "attention_kernel" in options or not (name or known):
        return dict(options), ()
    spec = spec_of(given, known)
    kind, own_code = of_file(spec)
    if own_code and given.flag("trust_remote_code"):
        return dict(options), ()
    kind, since = _since(kind, (name, spec.name if spec else ""))
    new = None if since == NEVER else newer(given.path, "transformers", _version(since))
    if (eager := table()["classes"].get(kind, {}).get("eager")) and newer(given.path, "transformers", _version(eager)) is False:
        return dict(options), ()
    called = kind or shown(name or (spec.name if spec else ""))
    other = given.attention_put if given.attention_put is not None else _of_others(given.path)
    if since == NEVER or (new is False and not other):
        why = "has torch's attention for it in no version" if since == NEVER else f"before {since} has no other for it by itself"
        what = f"{called} takes eager attention, which keeps its scores: transformers {why}"
        return {**options, "attention_kernel": "eager"}, (what,)
    if new is not None or since == FIRST or _version(since) < BY_ITSELF:
        return dict(options), ()
    what = f"transformers before {since} keeps the scores of attention of {called}, which are not priced"
    return dict(options), (f"{what}; --set attn_implementation=eager prices them",)


BY_ITSELF = (4, 39)
"""Version of transformers before which none is supposed where a project pins none."""


def in_halves(given: Settings, name: str, known: ModelSpec | None, tokens: int) -> tuple[str, ...]:
    """Note about a class whose scores stay in half precision under DeepSpeed, which has no autocast; ``tokens`` of a forward pass,
    0 = not known."""
    spec = spec_of(given, known)
    kind, _ = _since(of_file(spec)[0], (name, spec.name if spec else ""))
    since = str(table()["classes"].get(kind, {}).get("halves", ""))
    if not since or newer(given.path, "transformers", _version(since)) is not False:
        return ()
    more = 8.0 * tokens * spec.vocab_size / GIB if spec is not None else 0.0
    by = f" by up to {more:.1f} GiB" if more else ""
    what = f"transformers before {since} leaves scores over the vocabulary of {kind} in half precision under DeepSpeed"
    return (f"{what}, and they are priced in fp32 too: memory comes out too high{by}",)


def of_packing(name: str, rows: int, tokens: int) -> tuple[str, ...]:
    """Note about the mask of packed sequences, which every kernel but flash attention takes whole, in 16 bits; ``name``: what packs
    them; ``rows`` of so many ``tokens``."""
    size = 2.0 * rows * tokens**2 / GIB
    what = f"{name} without flash attention: its mask is not priced: memory comes out too low by {size:.1f} GiB"
    return (what,) * (size >= 0.1)


def softcapped(model: ModelSpec | None, batch: int, length: int | None, again: bool) -> tuple[dict[str, str], tuple[str, ...]]:
    """(Option of the trainer, note) of a model whose scores are capped, where no kernel does that: of a score tanh keeps 2 bytes
    beside softmax in fp32 and its copy; ``again``: layers are recomputed, and one is alive.
    [litgpt/model.py, scaled_dot_product_attention; torchtune/models/gemma2/_attention.py]"""
    if model is None or model.constants is None or not model.constants.attention_softcap:
        return {}, ()
    more = 2.0 * batch * float(length or 0) ** 2 * model.num_heads * (1 if again else model.num_layers) / GIB
    text = f"attention of {model.name} caps its scores, which are written out"
    return {"attention_kernel": "eager"}, (f"{text}: up to {more:.1f} GiB of them on top of the plan" if more else text,)


FOREACH = ("adamw_torch", "adamw", "adam")
"""Names of torch's Adam that say no kernel, which is foreach then: optim of transformers, classes of torch in a loop."""
FUSES = (("torch", (2, 8)), ("transformers", (4, 50)))
"""Versions before which transformers takes adamw_torch where no optimizer is named; since then adamw_torch_fused.
[training_args.py: default_optim; the second at the earliest]"""


def of_series(given: Settings, name: str, known: ModelSpec | None, trainer: str) -> dict[str, str]:
    """Options for what runs as several plain kernels: Adam of torch, and the activation of older classes."""
    said = given.first("optim", "optimizer")
    unsaid = said is None and trainer in ("fsdp", "trl", "llama-factory", "ms-swift") and not given.usual.get("own_loop")
    older = unsaid and any(newer(given.path, *one) is False for one in FUSES)
    found = {"optimizer_kernel": "foreach"} if older or str(said).lower() in FOREACH else {}
    spec = spec_of(given, known)
    kind = _since(of_file(spec)[0], (name, spec.name if spec else ""))[0]
    half = trainer == "deepspeed" or ("wrapped" in given.usual and not given.usual.get("autocast"))
    if half and spec is not None and spec.norm == "layernorm":
        found["autocast"] = "off"
    if table()["classes"].get(kind, {}).get("gelu"):
        found["activation_kernel"] = "plain_half" if half else "plain"
    return found


PIECES = (2025, 9)
"""Version of unsloth since which its loss is taken so."""


def of_free_memory(given: Settings, known: ModelSpec | None, tokens: int) -> tuple[str, ...]:
    """Note about unsloth's loss, whose pieces of the scores in fp32 are as large as free memory allows; ``tokens`` of a forward
    pass.  [unsloth_zoo/fused_losses/cross_entropy_loss.py: _get_chunk_multiplier]"""
    spec = spec_of(given, known)
    more = min(4.0 * tokens * (spec.vocab_size - spec.hidden_size) / GIB, 4.0) if spec is not None else 0.0
    if more < 0.3 or newer(given.path, "unsloth", PIECES) is False:
        return ()
    what = "unsloth's loss takes pieces of the scores that fill half of the free memory, up to 4 GiB, and small ones are priced"
    return (f"{what}: the peak comes out too low by up to {more:.1f} GiB where so much is free",)


def _since(kind: str | None, names: tuple[str, ...]) -> tuple[str, str]:
    """(model_type, '' = none of the table; the version since which its class takes torch's attention). The name that a file says
    goes before that of the preset which is like it: the class stays that of the file."""
    rows: Mapping[str, Mapping[str, str]] = table()["classes"]
    by_name = (one for each in names for one, row in rows.items() if re.search(row["names"], bare(each)))
    found = kind if kind is not None else next(by_name, "")
    return found, str(rows.get(found, {}).get("sdpa", FIRST))


def num_joint_layers(spec: ModelSpec, name: str = "") -> int:
    """Layers that the joint ones of a model's class stand for, less as many: 0 = it has none; ``name`` in the file."""
    return int(table()["classes"].get(_since(of_file(spec)[0], (name, spec.name))[0], {}).get("joint", 0))


def class_of(name: str) -> Mapping[str, str]:
    """What the table says of the class of a model, by its name; empty = nothing."""
    found: Mapping[str, str] = table()["classes"].get(_since(None, (name,))[0], {})
    return found


def bare(name: str) -> str:
    """A name in small letters, without the owner of a repository."""
    name = name[-200:].lower()
    owner, _, rest = name.partition("/")
    return rest if owner.strip(".~") and rest and "/" not in rest else name


def patched(name: str) -> bool | None:
    """Whether Liger patches the model of a name, by the last family in it, which is the one that others are distilled into; None =
    the name says none."""
    called = bare(name)
    rows = {kind: row["names"] for kind, row in table()["classes"].items() if kind not in table()["liger"].split()}
    of_others = max((one.end() for each in (OTHERS, *rows.values()) for one in re.finditer(each, called)), default=-1)
    own = max((one.end() for one in PATCHED.finditer(called)), default=-1)
    return None if own == of_others == -1 else own > of_others


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.split("."))


def _of_others(path: Path) -> bool:
    """Whether a file, or a program in its folder or at the root of its project, puts another attention into a model."""
    folders = dict.fromkeys((path.resolve().parent, project_root(path)))
    files = [path, *(one for folder in folders for one in sorted(folder.glob("*.py"))[:MOST_PROGRAMS])]
    return any(library.is_file(one) and OF_OTHERS.search(read_text(one)) is not None for one in files)


def with_liger(
    given: Settings, options: Mapping[str, str], name: str, known: ModelSpec | None, trainer: str, adapters: bool = False
) -> tuple[dict[str, str], tuple[str, ...]]:
    """(Options of the trainer, notes): without Liger's loss where the switch says it and Liger does not patch the model. ``known``:
    the model that the configuration itself means by ``name``."""
    kept = {} if load_trainer(trainer).stored.loss == "full" else {"loss": "full"}
    rest = {one: value for one, value in options.items() if one != "loss"}
    own = next((one for one in OWN_LOSSES if given.get(one) not in (None, False, 0, "0", "false", "False")), None)
    if own is not None and options.get("loss") == "fused_linear":
        return {**rest, **kept}, (f"{own}: a loss of its own, for which all scores are kept",)
    switch = next((one for one in SWITCHES if given.data.get(one) is not None), None)
    if given.get(OWN_LOSS) == IN_PIECES or switch is None or options.get("loss") != "fused_linear":
        return dict(options), ()
    spec = spec_of(given, known)
    fused, why = _fused(given, name, known, spec)
    if adapters and switch == SWITCHES[0] and newer(given.path, "transformers", PATCHES_ADAPTED) is False:
        fused, why = False, "transformers before 4.49 patches no model that has adapters"
    if fused is not False:
        called = f"{switch}: Liger's loss is priced for {shown(name)}; it counts for models that Liger patches alone"
        return dict(options), () if fused or not name else (called,)
    if switch == OF_AXOLOTL and newer(given.path, "axolotl", PATCHES_ALL) is not False:
        return dict(options), (f"{switch}: {why} and axolotl before 0.13 keeps all scores: memory then comes out too low",)
    return {**rest, **kept}, (f"{switch}: {why}, so all scores are kept",)


def of_layers(given: Settings, known: ModelSpec | None, tokens: float) -> tuple[str, ...]:
    """Note about Liger's norms and SwiGLU in layers that keep all: they save 2 of 6 bytes of what a norm is given and compute the
    activation again; ``tokens`` of a forward pass.  [Liger-Kernel, ops/rms_norm.py, ops/swiglu.py]"""
    spec, whole = spec_of(given, known), any(given.flag(one) for one in (*SWITCHES[:3], OF_LAYERS[3]))
    plugin = "liger" in str(given.get("plugins", "")).lower()  # of axolotl, without which its switches count for nothing
    norms, activation = (whole or (plugin and any(given.flag(one) for one in some)) for some in (OF_LAYERS[:1], OF_LAYERS[1:3]))
    linear = _of_linear_attention(given, spec, tokens)
    if not (norms or activation) or spec is None or spec.is_moe:
        return linear
    more = tokens * spec.num_layers * (8.0 * spec.hidden_size * norms + 2.0 * spec.ffn_size * (activation and spec.gated)) / GIB
    of = listed(["norms"] * norms + ["SwiGLU"] * activation, "and")
    what = f"Liger's {of}: priced as those of torch, memory comes out too high by up to {more:.1f} GiB"
    return (*linear, *((what,) * (more >= 0.1)))


IN_TORCH = 85.0
"""Bytes that a gated delta rule in plain operations of torch keeps of a token and value channel beside those of kernels.
[transformers 5.23, modeling_qwen3_next.py: torch_chunk_gated_delta_rule; counted on fake tensors, 2026-11]"""
KERNELS_OF_LINEAR = ("flash-linear-attention", "fla-core", "causal-conv1d", "fla")
"""Packages that bring them."""


def _of_linear_attention(given: Settings, spec: ModelSpec | None, tokens: float) -> tuple[str, ...]:
    """Note about layers of linear attention, which transformers runs in plain operations where no package brings kernels."""
    if spec is None or spec.linear is None or spec.linear.kind == "mamba2" or installs(given.path, *KERNELS_OF_LINEAR):
        return ()
    size = IN_TORCH * tokens * spec.linear.num_layers * spec.linear.value_heads * spec.linear.value_head_dim / GIB
    what = "layers of linear attention are priced with the kernels of flash-linear-attention; without that package they run in"
    return (f"{what} plain operations, which keep up to {size:.1f} GiB more",)


def _fused(given: Settings, name: str, known: ModelSpec | None, spec: ModelSpec | None) -> tuple[bool | None, str]:
    """(Whether Liger fuses the loss of the model, None = not known; why not)."""
    kind, own_code = of_file(spec)
    remote = given.flag("trust_remote_code")
    if kind is not None and kind not in table()["liger"].split():
        return False, f"Liger does not fuse the loss of model_type {shown(kind)}"
    if own_code and remote:
        return False, f"Liger does not patch {shown(name or kind)}, whose code is its own (auto_map)"
    by_name = {one: patched(one) for one in (spec.name if spec else "", name)}  # what is known or answered goes before
    said, fused = next(((one, each) for one, each in by_name.items() if each is not None), ("", None))
    if kind is None and fused is False:
        return False, f"Liger does not fuse the loss of {shown(said if by_name[name] is not False else name)}, by its name"
    if remote and name and known is None and not by_name[name]:
        text = "Liger does not patch code that is loaded with trust_remote_code; --set trust_remote_code=false prices its loss"
        return False, f"{text}, as for a class of transformers"
    return (True if kind is not None or (fused and by_name[name] is not False) else None), ""
