"""Primus with its Megatron back end: an experiment whose overrides are Megatron's arguments, every dimension written out."""

from typing import Any

from planner import library
from planner.trainers.bundle.quoting import Expression, filled_yaml, refused, run_of
from planner.trainers.bundle.target import ExportJob, Rendered
from planner.trainers.megatron import core_settings as mcore
from planner.trainers.megatron.export import SMOKE_STEPS, arguments, smoke_batch

OPTIMIZERS = ("adam", "adam_bf16", "sgd")
RENAMED = {"fp8_format": "fp8", "norm_epsilon": "layernorm_epsilon"}
TURNED = {
    "disable_bias_linear": "add_bias_linear", "no_bias_dropout_fusion": "bias_dropout_fusion",
    "no_yarn_correction_range_round_to_int": "yarn_correction_range_round_to_int",
}  # fmt: skip
"""Flags that turn a key off."""
LISTS = ("recompute_modules", "window_size", "window_attn_skip_freq")
"""Flags that may have several words, or one that commas part: a list, also of one."""
OFF = {
    "use_distributed_optimizer": False, "swiglu": False, "add_bias_linear": True, "bf16": False, "sequence_parallel": False,
    "untie_embeddings_and_output_weights": False, "add_position_embedding": True,
}  # fmt: skip
"""Keys whose default is not Megatron-LM's: said where no flag is."""
EXTRA = {"enable_primus_turbo": False, "gradient_accumulation_fusion": False}
"""As its own experiments: apex, which fuses the accumulation, is seldom built for ROCm."""


def overrides(job: ExportJob) -> dict[str, Any]:
    """Megatron's arguments as Primus's keys."""
    found: dict[str, Any] = {}
    for words in (one for flags in arguments(job).values() for one in flags):
        name = words[0][2:].replace("-", "_")
        if name in TURNED:
            found[TURNED[name]] = False
        else:
            several = [part for word in words[1:] for part in word.strip("[]").split(",")]
            found[RENAMED.get(name, name)] = [_value((one,)) for one in several] if name in LISTS else _value(words[1:])
    rows = found.pop("padded_vocab_size", None) or job.model.vocab_size
    # Primus has no key for the rows as they are: Megatron pads to a multiple of this times tp.
    return {**OFF, **found, **EXTRA, "vocab_size": rows, "make_vocab_size_divisible_by": rows // job.layout.tp}


def _value(words: tuple[str, ...]) -> Any:
    """One word as the number that it is; several stay a list."""
    if len(words) != 1:
        return [_value((one,)) for one in words] or True
    for kind in (int, float):
        try:
            return kind(words[0])
        except ValueError:
            continue
    return words[0]


def refusals(job: ExportJob) -> list[str]:
    """What Primus cannot run, with its rule."""
    return mcore.refusals(job, "Megatron-LM", OPTIMIZERS, ("bf16", "fp16", "fp8")) + refused(job, "primus")


def render(job: ExportJob) -> Rendered:
    """primus.yaml and primus-smoke.yaml."""
    common = {
        **overrides(job), "mock_data": False, "train_iters": Expression("${TRAIN_ITERS:1000}"),
        "lr": Expression("${LEARNING_RATE:1.0e-4}"), "lr_decay_style": "cosine", "eval_iters": 0,
        "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": Expression("${TOKENIZER}"),
        "train_data_path": Expression("${DATA_PATH}"), "save": Expression("${CHECKPOINTS:checkpoints}"),
        "ckpt_format": "torch_dist",
    }  # fmt: skip
    smoke = {
        **common, "mock_data": True, "train_iters": SMOKE_STEPS, "global_batch_size": smoke_batch(job),
        "tokenizer_type": "NullTokenizer", "lr": 1e-5,
    }  # fmt: skip
    for name in ("tokenizer_model", "train_data_path", "save"):
        smoke[name] = None
    files = {
        f"{file}.yaml": library.dump_yaml(filled_yaml(job, "primus", "primus.txt") | {"modules": {"pre_trainer": {
            "framework": "megatron", "config": "pre_trainer.yaml", "model": "language_model.yaml",
            "overrides": {name: str(one) if isinstance(one, Expression) else one for name, one in given.items()},
        }}})
        for file, given in (("primus", common), ("primus-smoke", smoke))
    }  # fmt: skip
    more = {"environment": mcore.environment(job), "vocab_rows": mcore.vocab_rows(job)}
    return run_of(job, "primus", files, more, steps=SMOKE_STEPS)
