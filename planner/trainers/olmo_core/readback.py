"""OLMo-core: the Python script that configures a training, read as sections of torchtitan, whose trainer prices it.

Batches are counted in tokens. Weights, gradients and states lie in fp32, FSDP computes in param_dtype; without replicas named,
hsdp has one a node.  [ai2-olmo-core 2.5 and 3.0: train/train_module/transformer/config.py, distributed/parallel/*.py]
"""

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, shown
from planner.layout import Recompute
from planner.trainers.olmo_core.assignments import require_unchanged
from planner.trainers.olmo_core.cookbook import LENGTHS, OlmoScript
from planner.trainers.olmo_core.models import MOST_CALLS, model_of
from planner.trainers.olmo_core.overrides import NUMBERS, read_as, started
from planner.trainers.olmo_core.parallel_parts import (
    NODE,
    known,
    launched_on,
    notes_of,
    parallel_of,
    replicas_of,
    stages_of,
    word,
)
from planner.trainers.reading.built_parts import Parts
from planner.trainers.reading.configuration import NEEDED, Reading
from planner.trainers.reading.given import Given, OpenQuestionsError, Question, ask, value_of
from planner.trainers.reading.python_text import UNNAMED, last_name
from planner.trainers.reading.shell.text import is_open, roots, shown_text
from planner.trainers.reading.values import quotient
from planner.trainers.torchtitan.readback import reading_of

MODULE = "TransformerTrainModuleConfig"
PIPELINE = "TransformerPipelineTrainModuleConfig"
"""What configured a pipeline until 2.0."""
FIELDS = (
    "rank_microbatch_size", "max_sequence_length", "optim", "max_grad_norm", "scheduler", "compile_model", "compile_loss",
    "float8_config", "pp_config", "dp_config", "tp_config", "cp_config", "ep_config", "ac_config", "z_loss_multiplier",
    "state_dict_save_opts", "state_dict_load_opts", "load_key_mapping", "autocast_precision", "label_ignore_index",
    "freeze_params", "freeze_experts",
)  # fmt: skip
"""Fields of that class in all its versions."""
USUAL_LENGTH = 4096
"""Tokens of a sequence where the call that builds all says none.  [internal/experiment.py, build_config]"""
OPTIMIZERS = {"AdamWConfig": "AdamW", "SkipStepAdamWConfig": "AdamW", "AdamConfig": "Adam"}


def read(path: Path, said: Given) -> Reading:
    """The training of a script, or of a command that starts one. Raises PlannerError, OpenQuestionsError for what its text does not
    say."""
    if path.suffix != ".py":
        return _of_command(path, said)
    said = read_as(said)
    script, said, launched, length, usual = _followed(path, said)
    asked: list[Question] = [] if length is not None else [NEEDED["sequence_length"]]
    module = _module(script)
    if said.num_gpus is not None:
        require_unchanged(script)
    words = {one.arg: one.value for one in module.keywords if one.arg}
    model = model_of(script)
    spec = said.spec() or model.spec
    if spec is None:
        asked.append(replace(NEEDED["model"], about=model.about))
    elif model.vocab_size is None and said.model is None:
        asked.append(Question(name="vocab_size", about="rows of the tables; its tokenizer is not read"))
    micro = _number(script, [one for name, one in words.items() if name == "rank_microbatch_size"], "rank_microbatch_size", asked)
    batch = _number(script, _batches(script), "global_batch_size", asked)
    parts = {name: _part(script, words[name], name, asked) for name in words if name.endswith("_config") or name == "optim"}
    parallel = parallel_of(script, parts, asked)
    recompute = _recompute(script, parts.get("ac_config"), asked)
    precision = _low_precision(script, parts.get("float8_config"), asked)
    computes = word(parts.get("dp_config"), "param_dtype", script=script)
    computes = known(computes or word(module, "autocast_precision", script=script), ("bfloat16", "float32"), asked)
    if said.num_gpus is None:
        shared = f"; a step has {batch // micro} micro batches, which data parallel ranks share" if batch > 1 < micro else ""
        asked.append(replace(NEEDED["num_gpus"], about=f"{NEEDED['num_gpus'].about}{shared}"))
    if asked or length is None or said.num_gpus is None or spec is None:
        ask(str(path), list({one.name: one for one in asked}.values()))
    notes = (*model.notes, *notes_of(script, parts, parallel),
             *[f"{said.num_gpus} GPUs, with which the script launches itself"] * bool(launched),
             *[f"sequences of {length} tokens, OLMo-core's default"] * usual)  # fmt: skip
    parallel |= replicas_of(path, parallel, said.num_gpus)
    training: dict[str, Any] = {
        "local_batch_size": quotient(micro, length, f"{path}: rank_microbatch_size by sequences of {length} tokens"),
        "global_batch_size": quotient(batch, length, f"{path}: global_batch_size by sequences of {length} tokens"),
        "seq_len": length, **({"dtype": "bfloat16"} if model.half else {}),
    }  # fmt: skip
    if parallel.get("pipeline_parallel_degree", 1) > 1:  # one pass of the pipeline has all microbatches
        parallel["module_fqns_per_model_part"] = stages_of(script, parts["pp_config"], parallel, spec)
        parallel["pipeline_parallel_microbatch_size"] = training["local_batch_size"]
        ranks = parallel["data_parallel_replicate_degree"] * parallel["data_parallel_shard_degree"]
        each = quotient(training["global_batch_size"], ranks, f"{path}: the global batch by data parallel ranks")
        training["local_batch_size"] = each
    if computes not in ("bfloat16", "float32", "None", None):
        raise PlannerError(f"{path}: it computes in {shown(computes)}; bfloat16 and float32 are read")
    training["mixed_precision_param"] = "bfloat16" if computes == "bfloat16" else "float32"
    other = {
        "recompute": recompute, "optimizer": _optimizer(script, parts.get("optim")), "precision": precision,
        "compile": "compile_model" in words and script.value(words["compile_model"]) is True,
    }  # fmt: skip
    given = said if said.model is not None else replace(said, model=spec)
    found = reading_of(path, {"parallelism": parallel, "training": training, "other": other}, given)
    return replace(
        found, model=None if said.model is not None else spec, unread=(*found.unread, *_unread(script)),
        architecture={} if model.vocab_size is None else {"vocab_size": model.vocab_size},
        notes=(*found.notes, *notes, *_other_bytes(script, parts, other["compile"] is True)),
    )  # fmt: skip


def _of_command(path: Path, said: Given) -> Reading:
    """The program that a command starts, under its options; what both leave open is asked in one sentence."""
    program, over, notes, asked = started(path, said)
    try:
        found = read(program, over)
    except OpenQuestionsError as error:
        names = {one.about.removeprefix("--") for one in asked}
        ask(str(path), [*asked, *(one for one in error.questions if one.name not in {NUMBERS.get(name) for name in names})])
    except PlannerError:
        if asked:
            ask(str(path), asked)
        raise
    if asked:
        ask(str(path), asked)
    return replace(found, notes=(*notes, *found.notes))


def _followed(path: Path, said: Given) -> tuple[Parts, Given, int | None, int | None, bool]:
    """A script that knows its GPUs and length: (it, what is said, GPUs that it launches itself on, tokens, OLMo-core's default)."""
    script: Parts = OlmoScript(path, said)
    launched = launched_on(script) if said.num_gpus is None else None
    said = said if launched is None else replace(said, num_gpus=launched)
    length, usual = _length(script, _module(script), said)
    held = dict.fromkeys(LENGTHS, str(length)) if length is not None else {}  # attributes of this name hold it
    # what hangs on the number of GPUs is not asked for beside it
    knowing = replace(said, settings={**held, **said.settings}, num_gpus=said.num_gpus or NODE)
    return OlmoScript(path, knowing), said, launched, length, usual


def _module(script: Parts) -> ast.Call:
    """The one configuration of a training that the script builds."""
    every = script.calls(MODULE, PIPELINE)
    if not every:
        raise PlannerError(f"{script.path}: no {MODULE} is built here; import the script that builds it")
    if len(every) > 1:
        raise PlannerError(f"{script.path}: {len(every)} times {MODULE}, which one is trained is not read")
    return every[0]


def _length(script: Parts, module: ast.Call, said: Given) -> tuple[int | None, bool]:
    """Tokens of a sequence: what the user, the module's or the data's configuration, or the call that builds both says; None where
    the data have others than the module. And whether it is OLMo-core's default."""
    every = [one for one in script.every_call() if re.match(r"(partial|main|build_config|CommonComponents)$|Numpy", _class(one))]
    both = ([module], every[:MOST_CALLS])
    every_word = ([one.value for call in calls for one in call.keywords if one.arg in LENGTHS] for calls in both)
    known = [[one for one in map(script.value, some) if isinstance(one, int) and not isinstance(one, bool)] for some in every_word]
    if said.sequence_length is not None or any(place.rpartition(".")[2] in LENGTHS for place in script.changed() if "." in place):
        return said.sequence_length, False
    if known[0] and known[1] and known[0][0] not in known[1]:
        return None, False
    built = any(one.arg == "train_module_config_builder" for call in every for one in call.keywords)
    said_none = not any(one.arg in LENGTHS for call in every for one in call.keywords)
    found = next(iter([*known[0], *known[1]]), None)
    return (USUAL_LENGTH, True) if found is None and built and said_none else (found, False)


def _class(call: ast.Call) -> str:
    """The class that a call makes an object of: NumpyFSLDatasetConfig.glob too."""
    owner = last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    return owner if owner[:1].isupper() else last_name(call.func)


def _batches(script: Parts) -> list[ast.expr]:
    """Tokens of a step, where calls say them and do not hand on what they were given."""
    named = [one.value for call in script.every_call() for one in call.keywords if one.arg == "global_batch_size"]
    return ([one for one in named if last_name(one) != "global_batch_size"] or named)[:MOST_CALLS]


def _number(script: Parts, nodes: list[ast.expr], name: str, asked: list[Question]) -> int:
    """A number of tokens; what is not known, or is several numbers, is asked for by its name."""
    said = script.said.setting(name)
    values = [int(said)] if said and re.fullmatch(r"\d{1,15}", said) else [script.value(one) for one in nodes]
    known = [one for one in values if isinstance(one, int | float) and not isinstance(one, bool)]
    read_here = [ast.unparse(one).partition(".")[2] for one in nodes if isinstance(one, ast.Attribute)]
    again = [place for place in script.changed() if place.rpartition(".")[2] == name and place not in read_here]
    if wrong := [one for one in known if not 0 < one < 10**15 or one != int(one)]:
        raise PlannerError(f"{script.path}: {name} is {shown(wrong[0])}; it must be a number of tokens")
    if len(set(known)) == 1 and (said or not again):
        return int(known[0])
    open_ = list(dict.fromkeys(name for one in values if isinstance(one, str) and is_open(one) for name in roots(one)))
    one = open_[0] if len(open_) == 1 and open_[0].isidentifier() and not known else name
    if one not in LENGTHS:  # which --sequence-length answers
        other = one != name and not any(isinstance(node, ast.Name | ast.Attribute) for node in nodes)
        about = f"the tokens of {name} are {ast.unparse(nodes[0])[:80]}" if other else f"tokens: {name}"
        asked.append(Question(name=one, about=about, choices=tuple(str(one) for one in dict.fromkeys(known))))
    return 1


def _part(script: Parts, node: ast.expr, name: str, asked: list[Question]) -> ast.Call | None:
    """The call that makes a part; None where there is none. What its condition hangs on is asked for."""
    made = script.made(node)
    if isinstance(made, ast.IfExp) and name == "optim":  # two of the same moments
        ways = [script.made(one) for one in (made.body, made.orelse)]
        if len({OPTIMIZERS.get(last_name(getattr(one, "func", made))) for one in ways}) == 1:
            made = ways[0]
    if isinstance(made, ast.Call) or (isinstance(made, ast.Constant) and made.value is None):
        return made if isinstance(made, ast.Call) else None
    value = script.value(made.test) if isinstance(made, ast.IfExp) else ""
    open_ = [one for one in roots(value if isinstance(value, str) else "") if one != UNNAMED]
    if not open_:
        raise PlannerError(f"{script.path}: {name} is {shown(ast.unparse(made)[:80] if made else None)}, which is not read")
    asked += [Question(name=one, about=f"{name} hangs on it; null is none") for one in open_]
    return None


def _recompute(script: Parts, call: ast.Call | None, asked: list[Question]) -> Recompute:
    """Every block, or none; what is chosen in between is asked for."""
    mode = "none" if call is None else shown_text(word(call, "mode", 0, script) or "full")
    words = script.keywords(call) if call is not None else {}
    if 1 in (words.get("block_interval"), words.get("activation_memory_budget")):
        mode = {"selected_blocks": "full", "budget": "none"}.get(mode, mode)
    said = mode if mode in ("full", "none") else script.said.setting("ac_config")
    if said not in ("full", "none"):
        about = f"{mode} has no plan that is the same; which is nearer"
        asked.append(Question(name="ac_config", about=about, choices=("full", "none")))
    return Recompute.FULL if said == "full" else Recompute.NONE


def _optimizer(script: Parts, call: ast.Call | None) -> str:
    name = last_name(call.func) if call is not None else "AdamWConfig"
    if name not in OPTIMIZERS:
        raise PlannerError(f"{script.path}: optim is {shown(name)}; of OLMo-core's optimizers those of Adam are priced")
    if word(call, "dtype", script=script) == "bfloat16":
        raise PlannerError(f"{script.path}: optim.dtype is bfloat16: moments in bf16 beside fp32 weights are not priced")
    return OPTIMIZERS[name]


def _low_precision(script: Parts, call: ast.Call | None, asked: list[Question]) -> str | None:
    """fp8 where it is switched on.  [float8/__init__.py: enabled is true unless it is said]"""
    words = script.keywords(call) if call is not None else {"enabled": False}
    answer = script.said.setting("float8_enabled")
    switched = words.get("enabled", True) if answer is None else value_of(answer)
    if not isinstance(switched, bool):
        asked.append(Question(name="float8_enabled", about="float8_config.enabled", choices=("true", "false")))
    if switched is not True:
        return None
    recipe = word(call, "ao_recipe", script=script)
    if recipe not in (None, "None", "rowwise", "tensorwise") or words.get("ao_mx") is not None:
        kind = shown(shown_text(recipe or "ao_mx"))
        raise PlannerError(f"{script.path}: float8_config is {kind}; tensorwise and rowwise are read")
    return "fp8_row" if recipe == "rowwise" else "fp8"


def _unread(script: Parts) -> tuple[str, ...]:
    """What a plan does not hold."""
    module = _module(script)
    own = [one for one, value in script.keywords(module).items() if one not in FIELDS and value not in (None, False)]
    return tuple(f"{last_name(module.func)}.{one}" for one in own)


def _other_bytes(script: Parts, parts: dict[str, ast.Call | None], compiled: bool) -> tuple[str, ...]:
    """What the memory of a plan has otherwise."""
    reduced = word(parts.get("dp_config"), "reduce_dtype", script=script) == "bfloat16"
    fewer = f"{4 if compiled else 14} bytes less of a token and entry of the vocabulary"
    ahead = script.keywords(data).get("prefetch_factor") if (data := parts.get("dp_config")) is not None else None
    return (
        *[f"dp_config.prefetch_factor {shown(ahead)}: so many layers more lie gathered, 2 bytes of each weight"] * bool(ahead),
        *["dp_config.reduce_dtype bfloat16: gradients are reduced in it, and priced in float32"] * reduced,
        *[f"lm_head.loss_implementation fused_linear holds no logits: {fewer}"] * ("fused_linear" in script.names_used()),
    )
