"""The step that a program of transformers or TRL trains with, by its words: a language model, DPO or another one."""

import re

from planner.errors import shown
from planner.trainers.reading.given import OtherStepError, Question
from planner.trainers.reading.settings import Settings

NOT_LM = {
    **{name: name.upper() for name in ("orpo", "kto", "grpo", "ppo", "rloo", "cpo", "gkd", "simpo", "lomo", "galore")},
    **dict.fromkeys(("reward", "rm", "prm"), "reward training"), "rl": "reinforcement learning", "kd": "distillation",
    "qat": "quantisation-aware training", **dict.fromkeys(("imagenet", "resnet"), "classification of images"),
    **{name: name.upper() for name in ("gspo", "dapo", "remax")},
}  # fmt: skip
"""What has another step than a language model or DPO, or another optimizer, as words of a path."""


OTHER_STEPS = {
    "contrastive training": re.compile(
        r"(query|passage|doc)_max_len(gth)?|negatives_\w+|num_negatives|infonce\w*|contrastive\w*|embedding_view"
    ),
    "PPO": re.compile(
        r"num_ppo_epochs|ppo_(epochs|mini_\w+)|total_episodes|whiten_(advantages|rewards)|missing_eos_penalty|cliprange_value"
    ),
}
"""Arguments that only another step has."""
METHODS = ("training_method", "train_method", "training_type", "rlhf_type", "method", "algorithm")
"""What programs call the step that they train with: sft, dpo or one of their own."""
STEP_WORDS = re.compile(r"(train\w*_)?(objective|stage|task|trainer|mode|loss_?(type|fn)?)(_type|_name)?|rl_\w+|adv_estimator")
"""What programs call something that may be the step too, where its value says so."""
PAIRED = re.compile(r"(?<![a-z])kto_pair(?![a-z])")
"""A loss of DPOTrainer until TRL 0.8, whose passes are those of all its losses.  [trl/trainer/dpo_trainer.py: dpo_loss]"""
NO_TABLE = re.compile(r"(?i)(\w+\.)?(generative_reranker|reranker|embeddings?|(seq|token)_cls|feature_extraction|question_ans)")
"""Values of task_type, of PEFT and of ms-swift, whose loss is none over the vocabulary."""
SUPERVISED = re.compile(r"sft|lora|full|pt|train|tun|lm|supervised|^na$|none|standard|default")
"""Words that name no step of its own."""


def objective_of(given: Settings, script: str) -> str:
    """lm or dpo. Raises PlannerError for the other trainers of TRL."""
    folder = "" if given.built else given.path.resolve().parent.name  # what a program builds tells more than where it lies
    words = re.split(r"[^a-z0-9]+", PAIRED.sub("", f"{folder}/{given.path.stem}/{script}".lower()))
    foreign = next((NOT_LM[one] for one in words if one in NOT_LM), None)
    if any(given.data.get(one) is not None for one in ("gamma_beta_ratio", "simpo_gamma")):  # said, and no default of its program
        foreign = "SIMPO"
    by = ""
    for name, words_of_step in OTHER_STEPS.items():
        of_it = next((one for one in given.data if words_of_step.fullmatch(one) and given.data[one] not in (None, False)), None)
        if of_it is not None and not foreign:
            foreign, by = name, f", and {of_it} is an argument of it"
    for name in (one for one in given.data if STEP_WORDS.fullmatch(one) and isinstance(given.data[one], str)):
        words_of_it = re.split(r"[^a-z0-9]+", PAIRED.sub("", given.data[name].lower()))
        foreign = foreign or next((NOT_LM[one] for one in words_of_it if one in NOT_LM), None)
    for name in ("task_type", "lora_task_type"):
        if NO_TABLE.fullmatch(str(given.data.get(name) or "")):
            what = f"{given.where(name)} is {shown(given.get(name))}"
            raise OtherStepError(f"{what}: a step without a loss over the vocabulary is not modelled")
    named = str(given.first(*METHODS, default="")).lower()
    if re.fullmatch(r"[a-z_-]{2,20}", named) and SUPERVISED.search(named) is None:
        foreign = foreign or (None if named == "dpo" else NOT_LM.get(named, named))
        words = [*words, named]
    if foreign or given.get("num_generations") is not None or given.get("reward_funcs") is not None:
        grpo = foreign in (None, "GRPO") and given.path.suffix in (".yaml", ".yml")
        also = "; --from rl:trl reads it as an RL plan" if grpo else ""
        raise OtherStepError(f"{given.path}: {foreign or 'GRPO'} is not modelled{by}; supervised fine-tuning and DPO are{also}")
    if named in ("sft", "pt", "pretrain", "clm", "supervised"):  # whatever arguments of other steps stand beside it
        return "lm"
    if given.built == "lm":
        return given.built
    preference = any(given.data.get(one) is not None for one in ("beta", "max_prompt_length", "precompute_ref_log_probs"))
    stem = re.split(r"[^a-z0-9]+", script.rpartition("/")[2].removesuffix(".py").lower())
    supervised = any(one in ("sft", "pt", "clm", "finetune", "pretrain") for one in stem)  # whatever its folder is called
    found = "dpo" if given.built or preference or ("dpo" in words and not supervised) else "lm"
    if found == "dpo":
        _ask_for_the_loss(given)
    return found


LOSSES = ("sigmoid", "hinge", "ipo", "robust", "sppo_hard", "discopop", "apo_zero", "apo_down", "sft", "aot", "aot_unpaired",
          "kto", "bco", "nca", "exo")  # fmt: skip
"""Losses of DPOTrainer, some of them with _pair or _norm behind.  [trl/trainer/dpo_trainer.py: dpo_loss]"""


def _ask_for_the_loss(given: Settings) -> None:
    """Asks about a loss that is none of TRL's: a program of its own may pass other sequences than those of a pair."""
    said = given.get("loss_type", "sigmoid")
    for one in said if isinstance(said, list) else re.split(r"[,\s]+", str(said).strip("[]")):
        word = str(one).strip("'\"")
        if word and re.sub("_(pair|norm)$", "", word.lower()) not in LOSSES:
            what = f"{shown(word)} is no loss of TRL: its program may pass other sequences, which is not priced"
            given.ask(Question(name="loss_type", about=f"{what}; sigmoid imports it as DPO of pairs", choices=("sigmoid",)))
