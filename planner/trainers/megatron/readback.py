"""Reads Megatron-LM: a script, a mapping of arguments in YAML, or the dump of arguments in a training log."""

import math
import re
from pathlib import Path

from planner.errors import PlannerError, shown
from planner.layout import Order, Recompute, Schedule
from planner.model import ModelSpec
from planner.runs.job import chunk_layers
from planner.trainers.megatron import core_settings, engine_file, forks, python_launcher
from planner.trainers.megatron.arguments import (
    SHARES,
    Arguments,
    ask_for,
    ask_for_gaps,
    instead_of,
    known_arguments,
    mapping_of,
    of_dump,
    of_flat,
    of_mapping,
    of_sections,
    readable,
    take_settings,
    unknown,
)  # fmt: skip
from planner.trainers.megatron.forks import OWN_LENGTH, adapters, refuse, strangers, translate, until_2020
from planner.trainers.megatron.own_program import labels, take_around
from planner.trainers.megatron.recompute_words import nothing_repeated, of_dense
from planner.trainers.megatron.script import of_script
from planner.trainers.megatron.sizes import model_of, rows_will_be_asked
from planner.trainers.megatron.trainer_words import (
    STATE_TYPES,
    has_fsdp,
    optimizer_of,
    precision_of,
    trainer_of,
    units_at_once,
    zero_of,
)
from planner.trainers.reading.configuration import NEEDED, Reading
from planner.trainers.reading.given import Given, Question, ask
from planner.trainers.reading.megatron_degrees import forced_balance, padded_experts
from planner.trainers.reading.shell.text import is_open, roots
from planner.trainers.reading.values import percent, read_text, stage_ends

HEADER = re.compile(r"# plan: (\d+) GPUs, hardware (\S+), trainer (\S+), model (\S+)")
"""What the export writes above its arguments."""
DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "ds_sequence_parallel_size")
METHODS = ("uniform", "block")
CAPACITY = ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity")
NO_FUSION = "no_bias_dropout_fusion"
"""Experts with biases run without this fusion, whatever is said."""
MODULES = {name: module for module, name in core_settings.MODULES.items()}


def read(path: Path, given: Given) -> Reading:
    """The job in a file; the number of GPUs is taken from it where it says one. Raises PlannerError."""
    return parse(read_text(path), str(path), given, path.parent)


def parse(text: str, where: str, given: Given | None = None, directory: Path | None = None) -> Reading:
    """The job in a text; ``directory``: where scripts lie that it reads. Raises PlannerError that names the file and the
    argument, OpenQuestionsError for what it does not say."""
    given = given or Given()
    header = HEADER.search(text)
    found = _arguments(text, where, given, directory)
    return reading_of(found, given, header)


def _arguments(text: str, where: str, given: Given, directory: Path | None) -> Arguments:
    dumped = "--" not in text or re.search(r"^(?:[^\n]*:)?[ \t]*\w+ \.{4,} ", text, re.MULTILINE)
    if dumped and (found := of_dump(text, where)):
        return found
    if re.search(r"^[ \t]*MODEL_ARGS:|^[ \t]*['\"]?--[\w-]+['\"]?:", text, re.MULTILINE):
        found = of_mapping(mapping_of(text, where), where, given)
        ask_for_gaps(found, None)
        return found
    sections = ("language_model", "model_parallel") if re.search(r"^language_model:", text, re.MULTILINE) else ("system", "model")
    if all(re.search(rf"^{one}:", text, re.MULTILINE) for one in sections):  # of --yaml-cfg, or of FlagScale
        found = of_mapping(of_sections(mapping_of(text, where)), where, given)
        ask_for_gaps(found, None)
        return found
    if where.endswith((".yaml", ".yml")) and (flat := of_flat(text, where, given)):
        return flat
    if where.endswith((".py", ".ipynb")):
        starts = python_launcher.STARTS.search(text) is not None
        if starts and where.endswith(".py") and (made := python_launcher.of_launcher(where, given)) is not None:
            return made
        what = "names arguments of Megatron; import the script or file that gives them"
        built = "builds a command of Megatron that is not followed here; put the command that it starts into a shell script"
        raise PlannerError(f"{where}: a Python program that {built if starts else what}")
    return of_script(text, where, given, directory)


def reading_of(found: Arguments, given: Given, header: re.Match[str] | None = None) -> Reading:
    """The job that arguments describe, whatever form they came in. Raises PlannerError."""
    take_settings(found, given)
    until_2020(found)
    take_around(found)
    engine_file.take(found, given)
    for name in ("sequence_length", "global_batch_size", "micro_batch_size"):
        if (value := getattr(given, name)) is not None:
            found["seq_length" if name == "sequence_length" else name] = str(value)
    _strategy(found)
    forks.of_checkpoint(found, given)
    _mixed_methods(found)
    _of_dense_layers(found, given.spec())
    waiting = bool(found.questions)
    if found.get("no_cuda"):
        what = "--no-cuda: it trains on CPUs, which no plan is for; --set no_cuda=false imports the job for GPUs"
        raise PlannerError(f"{found.where}: {what}")
    readable(found)
    world = found.number("world_size") if str(found.get("world_size")).isdigit() else 0
    gpus = given.num_gpus or world or (int(header.group(1)) if header else found.num_gpus)
    try:
        translate(found, gpus)
        model = model_of(found, given, header.group(4) if header else "")
    except PlannerError:
        if waiting:  # what is open may be why
            refuse(found)
            found.questions += [] if found.dumped else _strangers(found)
            _open(found, given, gpus, early=True)
        raise
    _other_length(found, given)
    _low_masters(found)
    found.questions += [] if found.dumped else _strangers(found)
    _open(found, given, gpus)
    assert model is not None
    _dynamic(found)
    layout = _layout(found, model)
    degrees = layout["tp"] * layout["pp"] * layout["cp"]
    experts = layout.get("ep", 1) * layout.get("etp", 1) * layout["pp"]
    if gpus and gpus % experts and given.num_gpus is None and not found.dumped:
        ask(found.where, [_too_few(gpus, f"ep x etp x pp = {experts}")])
    length = found.number("seq_length") or found.number("encoder_seq_length") or None
    batch = found.number("global_batch_size")
    if not batch and gpus:
        batch = layout["micro_batch_size"] * gpus // degrees * found.number("gas", 1)
    if not batch:
        ask(found.where, [NEEDED["num_gpus"]])
    evenly = _evenly(found, layout)
    trainer = header.group(3) if header else trainer_of(found, model)
    unread, noise = _unread(found, model)
    rank, targets = adapters(found)
    return Reading(
        trainer=trainer, model=model, sequence_length=length,
        global_batch_size=batch or None, fields=layout, precision=precision_of(found), optimizer=optimizer_of(found),
        num_gpus=gpus, hardware=header.group(2) if header else None, unread=unread, noise=noise,
        notes=tuple(dict.fromkeys(found.notes)), lora_rank=rank, architecture={"vocab_size": found.rows} if found.rows else {},
        lora_targets=targets if rank else "all", frozen_weights="bf16" if rank else None, expert_imbalance=evenly,
    )  # fmt: skip


def _evenly(found: Arguments, layout: dict[str, int]) -> float | None:
    """Tokens of the busiest expert over the mean, where a capacity or a router of benchmarks says it; None = neither does."""
    padded = padded_experts(found.get(CAPACITY[0]), found.get(CAPACITY[1]), layout.get("ep", 1))
    for name in CAPACITY if padded is not None else ():
        del found[name]
    return padded or forced_balance(found.get("moe_router_force_load_balancing"))


def _other_length(found: Arguments, given: Given) -> None:
    """Asks how long sequences are where a fork has an argument of its own for it that says another length."""
    own = [one for one in found if OWN_LENGTH.fullmatch(one) and str(found[one]) != str(found.get("seq_length", found[one]))]
    if own and given.sequence_length is None:
        about = f"{found.spelled(own[0])} is {found[own[0]]}, and --seq-length {found['seq_length']}"
        found.questions.append(Question(name="--sequence-length S", about=about))


def _strategy(found: Arguments) -> None:
    """Asks what Megatron-FSDP shards where nothing says it: its default was nothing until March 2026, and is all since."""
    if has_fsdp(found) and not found.dumped and found.get("data_parallel_sharding_strategy") is None:
        about = "what Megatron-FSDP shards: by default nothing until March 2026, everything since"
        choices = ("no_shard", "optim_grads_params")
        found.questions.append(Question(name="data_parallel_sharding_strategy", about=about, choices=choices))


def _mixed_methods(found: Arguments) -> None:
    """Asks for one method of context parallelism where layers take turns, or one that is made of two."""
    said = found.get("cp_comm_type")
    kinds = sorted(set(said)) if isinstance(said, list) else [said]
    if found.get("context_parallel_size") in (None, "1") or found.dumped or (len(kinds) == 1 and "+" not in str(kinds[0])):
        return
    about = f"{', '.join(map(str, kinds))} are not modelled together; the nearest alone"
    choices = tuple(dict.fromkeys(one for kind in kinds for one in str(kind).split("+")))
    found.questions.append(Question(name="cp_comm_type", about=about, choices=choices))


def _other_method(found: Arguments) -> None:
    """Asks for one of Megatron's two ways to recompute where a fork's own is said."""
    said, full = found.get("recompute_method"), found.get("recompute_granularity") == "full"
    if full and said not in (None, False, *METHODS) and not (found.dumped or is_open(str(said))):
        about = f"{shown(said)} is a way of a fork; the nearest"
        found.questions.append(Question(name="recompute_method", about=about, choices=METHODS))


def _of_dense_layers(found: Arguments, model: ModelSpec | None) -> None:
    """Leaves out modules whose recompute repeats nothing in dense layers of Transformer Engine."""
    names = found.get("recompute_modules")
    other = any(found.get(one) not in (None, False, "0", "1") for one in ("num_experts", "moe_num_experts"))
    other = other or any("latent_attention" in one and found[one] for one in found)
    other = other or (model is not None and (model.is_moe or model.is_mla))
    if not isinstance(names, list) or other or found.get("transformer_impl") == "local":
        return
    left, still = of_dense(names)
    if still:
        found.notes.append(nothing_repeated(still))
        found["recompute_modules"] = left
        if not left and found.get("recompute_granularity") == "selective":
            del found["recompute_granularity"]


def _low_masters(found: Arguments) -> None:
    """Asks for the nearest master weights that a plan knows, with what that answer costs, and for 16 bits under fp8."""
    if (found.get("fp8") or found.get("fp4")) and not (found.dumped or found.get("bf16") or found.get("fp16")):
        about = "fp8 without it: weights stay in fp32, which is not modelled; true imports the job with weights in bf16"
        found.questions.append(Question(name="bf16", about=about, choices=("true",)))
    kind = str(found.get("main_params_dtype", "fp32"))
    if found.get("use_precision_aware_optimizer") and not found.dumped and STATE_TYPES.get(kind, kind) == "fp16":
        about = "master weights in fp16 are not modelled; in fp32 each that a rank holds takes 2 bytes more than it does"
        found.questions.append(Question(name="main_params_dtype", about=about, choices=("fp32",)))


def _strangers(found: Arguments) -> list[Question]:
    """What is asked about words that stand in no list and say by no word what they are: forks change layers, states and steps by
    such ones. What is asked or refused otherwise (sizes, lengths, optimizers) is not asked again."""
    about = "no argument of Megatron-LM known here, and it may change layers, memory or steps; false imports the job without it"
    shares = "layers share experts by its words, which no plan has; false imports the job with all of them in each of " \
        f"{found.get('num_layers')} layers: memory comes out too high by the weights, gradients and states of sets that are shared"
    for name in (one for one in unknown(found) if is_open(one)):  # --$DTYPE: what it is, a variable says
        for variable in roots(name):
            ask_for(found, name, (variable,), None)
    _other_method(found)
    own = strangers(found)
    quiet = labels(found) if own else ()
    asked = (name for name in own if name not in quiet)
    return [Question(name=name, about=shares if SHARES.match(name) else about, choices=("false",)) for name in asked]


def _dynamic(found: Arguments) -> None:
    """Reinforcement learning on Megatron-LM (slime): batches are as long as a GPU holds, and only the update is read."""
    most, length = found.number("max_tokens_per_gpu"), found.number("seq_length")
    if found.get("use_dynamic_batch_size") and most and length:
        fits = max(most * found.number("context_parallel_size", 1) // length, 1)
        found["micro_batch_size"] = str(fits)
        found.notes.append(f"micro batch {fits}: {most} tokens per GPU hold so many sequences of {length}")
    if found.get("rollout_batch_size") is not None:
        found.notes.append("the update of the trained model alone: no rollout, no other model in memory")


def _open(found: Arguments, given: Given, gpus: int | None, early: bool = False) -> None:
    """Raises OpenQuestionsError for all that is not known, GPUs included, and for GPUs that the degrees do not divide; ``early``:
    before the model was read, so that its vocabulary is asked for with the rest."""
    if found.get("micro_batch_size") is None and not (found.get("use_dynamic_batch_size") or found.settled(["micro_batch_size"])):
        found.questions.append(Question(name="--micro-batch-size M", about="sequences per forward pass"))
    questions = [*found.questions, *([NEEDED["num_gpus"]] if found.questions and not gpus else [])]
    length = given.sequence_length or found.get("seq_length") or found.get("encoder_seq_length")
    if questions and not (length or found.settled(["seq_length"])):
        questions.append(NEEDED["sequence_length"])
    degrees = math.prod(_degrees(found)) if gpus and all(str(found.get(one, 1)).isdigit() for one in DEGREES) else 1
    if gpus and gpus % degrees and given.num_gpus is None and not found.dumped:
        questions.append(_too_few(gpus, f"tp x pp x cp = {degrees}"))
    rows = found.get("patch_tokenizer_type") is None or any(found.get(one) for one in ("vocab_size", "padded_vocab_size"))
    asked = any(one.name == "vocab_size" for one in questions)
    if questions and given.model is None and not asked and rows_will_be_asked(found, early):
        about = "rows of the vocabulary: no argument and no tokenizer known here says them"
        questions.append(Question(name="vocab_size", about=about))
    if questions and not rows and given.model is None and all(one.name != "vocab_size" for one in questions):
        about = f"rows of the vocabulary: {found.get('patch_tokenizer_type')} reads the tokenizer of the weights that it loads"
        questions.append(Question(name="vocab_size", about=about))
    if questions:
        ask(found.where, questions)


def _too_few(gpus: int, degrees: str) -> Question:
    return Question(name="--gpus N", about=f"{gpus} by the file, which {degrees} does not divide")


def _unread(found: Arguments, model: ModelSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(arguments that a plan does not hold, with their values; names of those that change nothing)."""
    held, quiet, counted = known_arguments()
    matter = {name: found[name] for name, value in counted.items() if found.get(name, value) != value}
    said = instead_of()
    found.notes += [f"{_written(found, name, value)}: {said[name]}" for name, value in matter.items() if name in said]
    if found.dumped:
        return tuple(f"{name} = {value}" for name, value in matter.items()), ()
    noted = [name for name in found if any(one.startswith(f"{found.spelled(name)}:") for one in found.notes)]
    silent = [name for name in found if quiet.fullmatch(name) and not held.fullmatch(name) and name not in noted]
    unknown = {
        name: value for name, value in found.items()
        if not held.fullmatch(name) and not quiet.fullmatch(name) and name not in counted
        and not (name == NO_FUSION and model.expert_bias)
    }  # fmt: skip
    return tuple(_written(found, name, value) for name, value in {**matter, **unknown}.items()), tuple(silent)


def _written(found: Arguments, name: str, value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return found.spelled(name) + ("" if value is True else f" {text}")


# --------------------------------------------------------------------------------------------------------------- layout


def _degrees(found: Arguments) -> tuple[int, int, int]:
    """(tp, pp, cp); Ulysses of Megatron-DeepSpeed counts as cp."""
    tp, pp, cp, ulysses = (found.number(one, 1, least=1) for one in DEGREES)
    return tp, 1 if found.get("no_pipeline_parallel") else pp, ulysses if ulysses > 1 else cp


def _layout(found: Arguments, model: ModelSpec) -> dict[str, int]:
    tp, pp, cp = _degrees(found)
    method = found.get("cp_comm_type", ["p2p"])
    method = method[0] if isinstance(method, list) else str(method)
    if found.number("ds_sequence_parallel_size", 1) > 1:
        method = "a2a"
    if cp > 1 and method not in core_settings.CP_METHODS:
        raise PlannerError(f"{found.where}: cp_comm_type is {shown(method)}; a plan knows {', '.join(core_settings.CP_METHODS)}")
    layout = {
        "tp": tp, "pp": pp, "cp": cp, "micro_batch_size": found.number("micro_batch_size", 1, least=1),
        "sequence_parallel": int(bool(found.get("sequence_parallel")) and tp > 1), "zero": zero_of(found),
        "cp_method": int(core_settings.CP_METHODS[method]) if cp > 1 else 0,
        "order": int(Order.TP_CP_EP_PP_DP if found.get("use_tp_pp_dp_mapping") else Order.TP_CP_EP_DP_PP),
    }  # fmt: skip
    if model.is_moe:
        layout["ep"] = found.number("expert_model_parallel_size", 1, least=1)
        layout["etp"] = found.number("expert_tensor_parallel_size", tp, least=1)
    layout |= _stages(found, model, pp)
    layout["schedule"] = int(Schedule.INTERLEAVED if layout["vpp"] > 1 else Schedule.ONE_F_ONE_B)
    layout |= _recompute(found, model, layout)
    if found.get("optimizer_cpu_offload") or found.get("cpu_optimizer"):
        share = found.get("optimizer_offload_fraction", 1.0)
        layout["offload_optimizer"] = percent(share, f"{found.where}: optimizer_offload_fraction")
    if some := found.number("cpu_offloading_num_layers"):
        layout |= {"offload_activations": 1, "offload_layers": some}
    return layout | found.engine


def _stages(found: Arguments, model: ModelSpec, pp: int) -> dict[str, int]:
    """vpp and the layers of the first and the last stage, from whichever of Megatron's forms is used."""
    if pp == 1:
        return {"vpp": 1, "first_stage_layers": 0, "last_stage_layers": 0}
    counted = str(found.get("pp_partition_method") or "")
    if "embed" in counted.lower():
        found.notes.append(f"stages: {counted} counts embeddings as layers too; layers alone are spread here")
    written = found.get("pipeline_model_parallel_layout")
    if isinstance(written, str):
        return written_stages(written, model, pp, f"{found.where}: pipeline_model_parallel_layout {shown(written)}")
    embedding, loss = (bool(found.get(f"account_for_{end}_in_pipeline_split")) for end in ("embedding", "loss"))
    share = (model.num_layers + embedding + loss) // pp
    first = share - 1 if embedding else found.number("decoder_first_pipeline_num_layers")
    last = share - 1 if loss else found.number("decoder_last_pipeline_num_layers")
    vpp = found.number("num_virtual_stages_per_pipeline_rank") or found.number("virtual_pipeline_model_parallel_size")
    each = found.number("num_layers_per_virtual_pipeline_stage")
    return {"vpp": vpp or (share // each if each else 1), "first_stage_layers": first, "last_stage_layers": last}


def written_stages(text: str, model: ModelSpec, pp: int, where: str) -> dict[str, int]:
    """vpp and the layers of the first and the last stage by a pipeline_model_parallel_layout. Raises PlannerError."""
    chunks = chunk_layers(text)
    if len(chunks) % pp or sum(chunks) != model.num_layers:
        raise PlannerError(
            f"{where} has {len(chunks)} stages and {sum(chunks)} layers; the job has {pp} pipeline ranks and "
            f"{model.num_layers} layers"
        )
    return {"vpp": len(chunks) // pp, **stage_ends([sum(chunks[rank::pp]) for rank in range(pp)], where)}


def _recompute(found: Arguments, model: ModelSpec, layout: dict[str, int]) -> dict[str, int]:
    mode = "selective" if found.get("recompute_activations") else found.get("recompute_granularity")
    if mode is None and found.get("checkpoint_activations"):
        mode = "full"  # the name until 2021
    if mode is None:
        return {"recompute": int(Recompute.NONE)}
    if mode == "selective":
        names = found.get("recompute_modules") or ["core_attn"]
        names = [names] if isinstance(names, str) else names
        wrong = [name for name in names if name not in MODULES]
        if wrong:
            raise PlannerError(
                f"{found.where}: recompute_modules has {', '.join(wrong)}; a plan knows {', '.join(MODULES)}"
            )
        mask = 0
        for name in names:
            mask |= MODULES[name]
        return {"recompute": int(Recompute.SELECTIVE), "recompute_modules": mask}
    block = found.get("recompute_method") == "block"
    if block and str(found.get("recompute_num_layers")) == "0":
        return {"recompute": int(Recompute.NONE)}
    of_rank = found.pop("enable_recompute_layers_per_pp_rank", None)  # of MindSpeed
    layers = found.number("recompute_num_layers", 1) * (1 if of_rank else layout["vpp"])
    if not block and found.number("recompute_num_layers") > 1:
        found.notes += units_at_once(found, model, layout)
    most = -(-model.num_layers // layout["pp"])
    covered = block and layers < max(most, layout["first_stage_layers"])
    return {"recompute": int(Recompute.FULL), "recompute_layers": layers if covered else 0}
