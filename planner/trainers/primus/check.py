"""Primus' own reader, schema check and builder of arguments on an exported folder, then Megatron's validation of what they build.

Nothing of it needs ROCm. Primus is run from its repository, whose ``third_party/Megatron-LM`` its schema check reads.
"""

import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking import Checked, Request
from planner.trainers.megatron import check as megatron
from planner.trainers.megatron.export import arguments

NEEDED = ("torch", "megatron.core", "megatron.training", "primus.core.launcher.parser")
VARIABLES = {"TOKENIZER": "gpt2", "DATA_PATH": "/data/corpus"}
"""What run.sh asks for."""
OTHERWISE = {"vocab_size", "padded_vocab_size", "_is_global_batch_size_explicitly_specified"}
"""Of Megatron's arguments: Primus has no key for the padded size, and says the rows as the size."""
NEED_KERNELS = ("apply_rope_fusion", "moe_permute_fusion")
"""Arguments that a machine without Transformer Engine refuses; off in the check, and only in the check."""
FILES = ("primus.yaml", "primus-smoke.yaml")


def asks(job: ExportJob) -> dict[str, Any]:
    """What Megatron-LM is asked, and the words of its own export: Primus must build the same of them."""
    words = [word for flags in arguments(job).values() for one in flags for word in one]
    return {**megatron.asks(job), "words": words}


def prepare() -> None:
    """Once, before the first folder."""
    os.environ.update(VARIABLES)
    megatron.prepare()


def one(asked: Request, answer: Checked) -> None:
    """How far the trainer goes with one folder."""
    megatron.in_place_of_rank(_check, asked, answer)


def _check(asked: Request, answer: Checked) -> None:
    from primus.backends.megatron.patches.args.rocm_arg_validation import validate_args_on_rocm

    folder = Path(asked["folder"])
    with TemporaryDirectory() as workspace:
        os.chdir(workspace)  # the reader makes the folder of the experiment
        args, smoke = (_built(folder / name) for name in FILES)
    answer.reached("parsed")
    for name in FILES:
        _known(folder / name)
    _same_as_megatron(asked["words"], args, answer)
    megatron.validated(smoke)
    config = megatron.as_planned(args, asked, answer)
    for built in (smoke, args):
        validate_args_on_rocm(built)
    megatron.placed(args, config, asked, answer)


def _built(path: Path) -> Any:
    """Megatron's arguments as Primus' runtime builds them from an experiment: its presets, the overrides, its patches."""
    from primus.backends.megatron.megatron_adapter import MegatronAdapter
    from primus.core.config.primus_config import load_primus_config
    from primus.core.patches import run_patches
    from primus.core.utils.yaml_utils import merge_namespace

    config = load_primus_config(path)
    (module,) = config.modules
    args = MegatronAdapter().convert_config(module.params)
    more = {"backend_args": args, "primus_config": config, "module_config": module, "runtime_state": None}
    run_patches(backend="megatron", phase="build_args", module_name=module.name, model_name=module.model, extra=more)
    merge_namespace(args, module.params, allow_override=False, excepts=[])
    for name in NEED_KERNELS:
        setattr(args, name, False)
    return args


@cache
def _schema() -> tuple[Any, ...]:
    """What Primus' schema check knows; it reads all of Primus and of Megatron's arguments for it. Raises ValueError."""
    from primus.core.config import schema_check

    root = Path(schema_check.__file__).parents[3]
    upstream = schema_check.SCHEMA_LOADERS["megatron"](root)
    if upstream is None:
        raise ValueError(f"{root}/third_party/Megatron-LM is empty: git submodule update --init third_party/Megatron-LM")
    allowed = schema_check.build_allowlist(root, "megatron")
    scopes = schema_check.extract_model_scopes(root, "megatron", upstream, allowed)
    presets = schema_check.build_model_preset_index(root, "megatron", scopes[0].key)
    return schema_check.extend_schema(root, "megatron", upstream), allowed, scopes, presets


def _known(path: Path) -> None:
    """Primus takes any key in silence; its schema check names those that nothing reads. Raises ValueError."""
    from primus.core.config.schema_check import scan_file

    schema, allowed, scopes, presets = _schema()
    unknown, misplaced = scan_file(path, "megatron", schema, allowed, path.name, scopes, presets)
    if unknown or misplaced:
        dead = [one.key for one in unknown] + [f"{one.key} (of {one.scope.value} models)" for one in misplaced]
        raise ValueError(f"{path.name}: nothing of Primus reads {', '.join(dead)}")


def _same_as_megatron(words: list[str], args: Any, answer: Checked) -> None:
    """Primus builds the arguments that Megatron-LM's own parser makes of the same flags. Raises ValueError."""
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    expected, default = vars(megatron.parsed([*words, *megatron.DATA])), vars(megatron.parsed([*megatron.DATA]))
    found = {name: getattr(args, name, None) for name in expected.keys() - OTHERWISE}
    wrong = [name for name in found if expected[name] != default[name] and _one(found[name]) != _one(expected[name])]
    if wrong:
        said = ", ".join(f"{name} {found[name]!r} instead of {expected[name]!r}" for name in sorted(wrong))
        raise ValueError(f"Primus builds other arguments than Megatron-LM's flags: {said}")
    answer.details.append("arguments as Megatron-LM's flags")
    rows = calculate_padded_vocab_size(args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size)
    answer.same("rows of the vocabulary", rows, expected["padded_vocab_size"] or expected["vocab_size"])


def _one(value: Any) -> Any:
    """A list of one, which Megatron makes of flags that may have several words, as its only value."""
    value = list(value) if isinstance(value, tuple) else value
    return value[0] if isinstance(value, list) and len(value) == 1 else value
