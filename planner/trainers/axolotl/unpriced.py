"""Settings of axolotl that decide memory or time and that a plan has no word for: refused, asked for, or named in a note.
[axolotl 0.2 to 0.19, utils/schemas, integrations]"""

import re

from planner.cost.parameters import count_parameters
from planner.errors import PlannerError
from planner.model import ModelSpec
from planner.trainers.reading.argument_words import BY_WHOLE
from planner.trainers.reading.given import Question
from planner.trainers.reading.model_notes import of_trained_images
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.versions import newer
from planner.units import GIB

FOREIGN = {
    **dict.fromkeys(("relora", "relora_steps"), "restarts of adapters"),
    **dict.fromkeys(("unfrozen_parameters", "lisa_step_interval"), "training some of the weights"),
    **dict.fromkeys(("reward_model", "process_reward_model"), "a reward model"),
    "diffusion": "another step", "ebft": "another step", "kd_trainer": "distillation", "hatchery": "training on other machines",
    "qat": "quantisation that is simulated", "use_onebitllms": "linear layers in one bit", "use_mora": "MoRA", "mora": "MoRA",
    "peft_layer_replication": "layers that are repeated", "dense_mixer": "every token through all experts",
    **dict.fromkeys(("grokfast_alpha", "grokfast_lamb"), "an average of the gradients"),
    **dict.fromkeys(
        ("gemma4_fp8_nonexpert", "gemma4_nf4_nonexpert", "dsv4_fp8_nonexpert_mode", "nvfp4_merge_aware"), "a base in fewer bits"
    ),
}  # fmt: skip
"""Settings with what they stand for."""
PLUGINS = {
    "spectrum": "training some of the weights", "kd": "distillation", "grokfast": "an average of the gradients",
    "diffusion": "another step", "llm_compressor": "masks over the weights", "mora": "MoRA", "nemo_gym": "another step",
    "hatchery": "training on other machines",
}  # fmt: skip
"""Parts of axolotl's own plugins that a file switches on by naming them, with what they stand for."""
KNOWN_PLUGINS = ("liger", "cut_cross_entropy", "kernels", "lm_eval", "expert_parallel", "swanlab", "densemixer")
"""Those that change kernels and what is written, or nothing without a setting of theirs."""
SIZES = re.compile(
    r"num_\w*(layers|heads|experts|experts_per_tok)|(hidden|\w*intermediate|vocab)_size|head_dim|tie_word_embeddings|n_(layer|embd|head)"
    r"|layer_types|architectures"
)
"""Fields of a model's configuration that decide what is built."""
OVERRIDES = ("overrides_of_model_config", "model_config_overrides", "model_config")
SAID_ELSEWHERE = {
    "gptq": "weights lie in 4 bits: priced as nf4",
    "tiled_mlp": "not priced: what a layer needs at once comes out too high",
    "s2_attention": "priced as whole attention: time comes out too long",
    "peft_trainable_token_indices": "not priced: the rows that are trained beside adapters are few",
    "lora_rank_pattern": "not priced: all adapters have lora_r",
    "lora_model_dir": "adapters go on from there, and its rank and targets count where they are others",
    **dict.fromkeys(("gpu_memory_limit", "max_memory"), "not priced: the model is taken to fit into it"),
    "sweep": "each of its trainings changes settings, and those of the file alone are read",
    "auto_find_batch_size": "micro_batch_size is smaller where memory runs out",
    "precompute_ref_log_probs": "priced as if the reference model ran in every step: time and memory come out too high",
    "rl_adapter_ref_model": "a reference model of its own, which is not priced: memory comes out too low by its weights",
    "dpo_use_liger_kernel": "priced as the loss of torch: memory comes out too high",
    "trainer_cls": "a trainer of its own, which is not read",
    "quantization_config": "no setting of axolotl, which drops it: adapter, load_in_4bit and load_in_8bit count",
    **dict.fromkeys(("model_kwargs", "overrides_of_model_kwargs"), "not read: how the weights are loaded is not in the plan"),
    **dict.fromkeys(
        ("deepcompile", "use_kernels", "use_scattermoe", "use_sonicmoe", "flash_attn_fuse_mlp", "flash_attn_fuse_qkv",
         "flash_attn_rms_norm", "flash_optimum"), "not priced: time comes out too long",
    ),
    **dict.fromkeys(
        ("chunked_cross_entropy", "flash_attn_cross_entropy", "unsloth_cross_entropy_loss"),
        "priced as the loss of torch: memory comes out too high",
    ),
}  # fmt: skip
"""Settings that change memory or time by a part that a plan has no word for -> what is priced."""
OF_ADAPTERS = ("lora_r", "lora_target_linear", "lora_target_modules")
LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
LIGER = ("liger_fused_linear_cross_entropy", "liger_cross_entropy")


def plugins(given: Settings) -> list[str]:
    """Modules of the plugins that a file names."""
    said = given.get("plugins") or []
    return [str(one) for one in (said if isinstance(said, list) else [said])]


def has_plugin(given: Settings, part: str) -> bool:
    """Whether a plugin of axolotl's is named: its settings are of no schema without it, and dropped."""
    return any(part in one.lower() for one in plugins(given))


def require_modelled(given: Settings) -> None:
    """Raises PlannerError for settings and plugins that stand for what no plan has."""
    for name, what in FOREIGN.items():
        if given.get(name) not in (None, False, [], {}, 0):
            raise PlannerError(
                f"{given.where(name)}: {what} is not modelled; a plan trains all weights or adapters on all layers; "
                f"--set {name}=null imports the job without"
            )
    for one in plugins(given):
        part = re.sub(r"^axolotl\.integrations\.", "", one).partition(".")[0].lower()
        if one.startswith("axolotl.integrations.") and part in PLUGINS:
            raise PlannerError(f"{given.where('plugins')} has {one[:80]}: {PLUGINS[part]} is not modelled")
    if has_plugin(given, "densemixer") and given.flag("dense_mixer", True):
        raise PlannerError(f"{given.where('plugins')} has DenseMixerPlugin: {FOREIGN['dense_mixer']} is not modelled")
    kind = f"{given.get('model_type', '')} {given.get('type_of_model', '')}"
    if re.search(r"For(Sequence|Token)Classification", kind):
        raise PlannerError(f"{given.where('model_type')} is {kind.strip()[:80]}: a classifier is no language model")


def of_images(given: Settings, model: ModelSpec | None) -> tuple[str, ...]:
    """Note about the image encoder, which is trained with all else unless it is frozen by name.  [axolotl, train.py]"""
    return () if given.get("adapter") or given.flag("freeze_mm_modules") else of_trained_images(model, "freeze_mm_modules")


def of_tables(model: ModelSpec | None) -> tuple[str, ...]:
    """Note about embedding, head and norms of a model that is trained as a whole without a kernel of flash attention: axolotl keeps
    their weights, gradients and states in fp32.  [loaders/model.py: _configure_embedding_dtypes]"""
    text = "axolotl keeps embedding, head and norms in fp32 without flash attention, 16 bits are priced: memory comes out too low"
    if model is None:
        return (text,)
    counts = count_parameters(model)
    return (f"{text} by up to {8.0 * (counts.input_embedding + counts.head) / GIB:.1f} GiB",)


def notes(given: Settings) -> tuple[str, ...]:
    """What a plan leaves out of the settings that are there."""
    found = [f"{name}: {what}" for name, what in SAID_ELSEWHERE.items() if given.get(name) not in (None, False, "", 0, [], {})]
    for name in LIGER:
        if given.flag(name) and not has_plugin(given, "liger"):
            found.append(f"{name} counts with LigerPlugin among the plugins alone, which is not there")
        elif name == "liger_cross_entropy" and given.flag(name):
            found.append(f"{name}: priced as the loss of torch: memory comes out too high")
    own = [one for one in plugins(given) if not any(part in one.lower() for part in KNOWN_PLUGINS)]
    found += [f"plugin {one[:80]} is not read: what it changes is not in the plan" for one in own]
    if not given.get("adapter") and any(given.get(one) for one in OF_ADAPTERS):
        found.append("adapter is not set, so all weights are trained, whatever lora_r and lora_target_* say")
    if given.get("rl") in ("dpo", "ipo") and newer(given.path, "axolotl", OF_ROWS) is not True:
        found.append(BY_WHOLE)
    return tuple(found)


OF_ROWS = (0, 7)
"""Version of axolotl that is installed with TRL 0.15.  [requirements.txt]"""


def of_lora_kernels(given: Settings, old_fsdp: bool, model: ModelSpec | None, tokens: int) -> tuple[str, ...]:
    """Note about fused kernels of adapters, which axolotl switches on by itself where nothing is said of them, from 0.10 on without
    lora_dropout and from 0.16 on with it: the MLP's keeps gate, up and its input, and not what torch keeps of each adapter.
    [utils/schemas/config.py: check_auto_enable_lora_kernels]"""
    said = [one for one in LORA_KERNELS if given.get(one) is not None]
    on = [one for one in said if given.flag(one)]
    by_itself, release = not said, ""
    if by_itself:
        needs = (0, 16) if given.above_zero("lora_dropout", 0.0) else (0, 10)
        known = newer(given.path, "axolotl", needs)
        kept_away = given.get("rl") or given.flag("trust_remote_code") or old_fsdp
        by_itself = known is not False and not kept_away and not (given.get("adapter") == "lora" and given.flag("load_in_8bit"))
        release = "" if known else f" from axolotl {needs[0]}.{needs[1]} on"
    if not given.get("adapter") or not (on or by_itself):
        return ()
    kept = given.get("gradient_checkpointing", False) in (False, "false", None)
    names = {"gate_proj", "up_proj", "down_proj"} - {*str(given.get("lora_target_modules")).replace("'", " ").split()}
    mlp = model is not None and model.gated and not model.is_moe and (by_itself or "lora_mlp_kernel" in on)
    mlp = mlp and (not names or given.flag("lora_target_linear"))
    less = 4.0 * tokens * model.ffn_size * model.num_layers / GIB if model is not None and mlp and not given.get(SWIGLU) else 0.0
    size = f" by {less:.1f} GiB and more" if less else ""  # the activation and the product, which it computes again
    what = f"memory comes out too high{size}" if kept else "time comes out too long"
    how = f"({', '.join(on)})" if on else f"are on by themselves{release} and"
    return (f"axolotl's fused kernels of adapters {how} are not priced: {what}",)


SWIGLU = "liger_glu_activation"
"""The switch of a kernel that keeps neither by itself."""
STORED = re.compile(r"(?i)4[-_]?bit|bnb|nf4|gptq|awq")
"""Names of weights that are in few bits already."""


def quantises(given: Settings) -> bool:
    """Whether load_in_4bit counts: with adapter: lora until 0.12 alone, in fp4 without double quantisation; later releases leave
    the base in 16 bits then.  [utils/models.py, loaders/model.py, _set_quantization_config]"""
    if given.get("adapter") != "lora" or STORED.search(given.label("base_model")):
        return True
    known = newer(given.path, "axolotl", (0, 13))
    if known is None and (given.said is None or given.said.setting("load_in_4bit") is None):
        about = "with adapter: lora axolotl reads it until 0.12 (true); 0.13 and later leave the base in 16 bits (false)"
        given.ask(Question(name="load_in_4bit", about=about, choices=("true", "false")))
    return not known


def ask_what_is_open(given: Settings) -> None:
    """Asks for what axolotl refuses to start without, and for what changes memory and one answer settles."""
    adapter, targets = given.get("adapter"), (*OF_ADAPTERS[1:], "lora_target_parameters", "lora_model_dir")
    if given.get("batch_size") and given.get("gradient_accumulation_steps"):
        about = "axolotl does not start with it beside gradient_accumulation_steps; null imports the job with those"
        given.ask(Question(name="batch_size", about=about, choices=("null",)))
    if adapter == "qlora" and not given.flag("load_in_4bit"):
        about = "adapter is qlora, which axolotl does not start without it"
        given.ask(Question(name="load_in_4bit", about=about, choices=("true",)))
    if adapter and not any(given.get(one) for one in targets):
        about = "no layers are named for the adapters, and axolotl does not start without"
        given.ask(Question(name="lora_target_linear", about=about, choices=("true",)))
    if given.get("selective_checkpointing") not in (None, False):
        about = "what it keeps beside the inputs of layers is not priced; false imports the job with full recompute"
        given.ask(Question(name="selective_checkpointing", about=about, choices=("false",)))
    for name in OVERRIDES:
        block = given.get(name)
        sizes = [str(one) for one in block if SIZES.fullmatch(str(one))] if isinstance(block, dict) else []
        if sizes and not (given.said is not None and given.said.model is not None):
            about = f"{name} changes {', '.join(sizes)[:80]}: the nearest preset, or a config.json with them"
            given.ask(Question(name="--model NAME", about=about))
