"""Words of nanotron's sections, of all its versions; what a fork adds to them is listed, or refused where it decides memory.

nanotron's own reader takes no key that its dataclasses do not have.  [nanotron, config/config.py, get_config_from_dict]
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.trainers.reading.shell.text import shown_text

NOTHING = ("general", "checkpoints", "logging", "lighteval", "profiler", "metrics_logging", "s3_upload", "kill_switch_path",
           "experiment_logger", "slurm", "validation", "data", "eval", "wandb")  # fmt: skip
"""Parts that decide nothing of a plan."""
SECTIONS = ("parallelism", "model", "tokens", "optimizer", "data_stages", "tokenizer", *NOTHING)
KNOWN = {
    "model": r"model_config|init_method|dtype|make_vocab_size_divisible_by|ddp_bucket_cap_mb",
    "optimizer": r"optimizer_factory|zero_stage|weight_decay\w*|clip_grad|accumulate_grad_in_fp32|learning_rate_scheduler|adam_\w+"
                 r"|torch_adam_is_fused|finetuning",
    "tokens": r"sequence_length|train_steps|micro_batch_size|batch_accumulation_per_replica|val_\w+|limit_\w+",
}  # fmt: skip
DECIDES = re.compile(
    r"lora|peft|adapter|freez|frozen|quant|fp[48]|[48]_?bit|dtype|precision|offload|distill|teacher|ref(erence)?_model"
    r"|batch|accumul|segment|infini|recompute|activation_ckpt|galore|muon|(^|[._])ema([._]|$)|attention|memory|parallel|chosen|rejected"
)
"""Words of forks that decide memory, precision, degrees or the step."""
OPTIONS = {
    "dp": "parallelism", "pp": "parallelism", "tp": "parallelism", "pp_engine": "parallelism", "tp_mode": "parallelism",
    "recompute_layer": "parallelism", "expert_parallel_size": "parallelism", "context_parallel_size": "parallelism",
    "micro_batch_size": "tokens", "batch_accumulation_per_replica": "tokens", "sequence_length": "tokens",
    "zero_stage": "optimizer", "accumulate_grad_in_fp32": "optimizer",
}  # fmt: skip
"""Options that a project's own program has over the file -> the section whose word of that name they set."""
DEGREES = re.compile(r"(tp|pp|dp|cp|ep|sp|tensor|pipeline|data|context|expert)(_(degree|size|world_size|model_parallel_size))?")
"""Options of such a program that can only be degrees."""
STAGE = ("name", "start_training_step", "data", "sequence_length")
DEEPEST = 6
"""Sections in sections that are looked into."""


def require_priced(path: Path, data: Mapping[str, Any]) -> tuple[str, ...]:
    """What stands in the file and in no nanotron, to be listed. Raises PlannerError for words of a fork that decide the plan."""
    found: list[str] = []
    for name, value in data.items():
        if name not in SECTIONS and value not in (None, False, {}, []):
            if DEGREES.fullmatch(str(name)) or any(DECIDES.search(one) for one in (str(name), *_inner(value))):
                raise _refused(path, str(name), value)
            found.append(str(name))
    for section, known in KNOWN.items():
        part = data.get(section)
        for name, value in part.items() if isinstance(part, Mapping) else ():
            if value in (None, False, {}, []) or re.fullmatch(known, str(name)):
                continue
            if any(DECIDES.search(one) for one in (str(name), *_inner(value))):
                raise _refused(path, f"{section}.{name}", value)
            found.append(f"{section}.{name}")
    stages = data.get("data_stages")
    every = [str(name) for one in (stages if isinstance(stages, list) else ()) if isinstance(one, Mapping) for name in one]
    if own := next((name for name in every if name not in STAGE and DECIDES.search(name)), None):
        raise PlannerError(f"{path}: data_stages have {shown(own)}, which no stage of nanotron has and no plan says")
    for name in _inner(stages):
        if name in ("chosen_text_column_name", "rejected_text_column_name", "teacher_logits"):
            raise PlannerError(f"{path}: data_stages have {name}: a step of a fork with another loss than a language model's")
    return tuple(found)


def laid_into(data: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the options of the command in their sections, as a program with such options lays them over its file."""
    found = {name: dict(value) if isinstance(value, Mapping) else value for name, value in data.items()}
    for name, section in OPTIONS.items():
        if name in found and isinstance(found.get(section), dict):
            found[section][name] = found.pop(name)
    return found


def _inner(value: Any, depth: int = 0) -> list[str]:
    """Names of settings inside of a section that are switched on."""
    if isinstance(value, list) and depth < DEEPEST:
        return [name for one in value for name in _inner(one, depth + 1)]
    if not isinstance(value, Mapping) or depth > DEEPEST:
        return []
    on = {str(name): one for name, one in value.items() if one not in (None, False, {}, [])}
    return [*on, *(name for one in on.values() for name in _inner(one, depth + 1))]


def _refused(path: Path, name: str, value: Any) -> PlannerError:
    said = f"{path}: {name} is {shown(shown_text(value) if isinstance(value, str) else value)}, which no plan of nanotron has"
    return PlannerError(f"{said}; --set {name}=null imports the job without it")


def lengths_of(data: Mapping[str, Any]) -> list[int]:
    """Tokens of a sequence in each stage of the data, in their order, where stages say it: one that says none has those of the
    tokens.  [nanotron, config/config.py, DatasetStageArgs.sequence_length; run_train.py]"""
    stages = data.get("data_stages")
    tokens = data.get("tokens")
    usual = tokens.get("sequence_length") if isinstance(tokens, Mapping) else None
    some = [one.get("sequence_length") or usual for one in stages if isinstance(one, Mapping)] if isinstance(stages, list) else []
    return list(dict.fromkeys(one for one in some if isinstance(one, int) and not isinstance(one, bool)))
