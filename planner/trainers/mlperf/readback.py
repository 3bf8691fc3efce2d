"""NVIDIA's MLPerf config_*.sh: variables of the parallel degrees, which NeMo runs on Megatron Core.

Names as the READMEs and run_and_time.sh of mlcommons/training_results_v4.1 and v5.0 give them; the rules of the benchmarks
(sequence length, LoRA rank 16 on attention) are those of mlcommons/training_policies.
"""

import dataclasses
import re
from pathlib import Path

from planner.model import load_model
from planner.trainer_options import spell
from planner.trainers.megatron.arguments import Arguments, take_settings
from planner.trainers.megatron.readback import reading_of
from planner.trainers.mlperf import rounds, systems, words
from planner.trainers.mlperf.words import true
from planner.trainers.reading.configuration import NEEDED, Reading
from planner.trainers.reading.given import Given, Question, ask
from planner.trainers.reading.shell import Script, evaluate, is_open, roots
from planner.trainers.reading.values import read_text, whole_number
from planner.units import GIB

BENCHMARKS = {
    r"llama31_405b|llama3\.1.405b": ("llama-3.1-405b", 8192), r"llama31_8b": ("llama-3.1-8b", 8192),
    r"llama2_70b|lora": ("llama-2-70b", 8192), r"gpt3|large_language_model": ("gpt3-175b", 2048),
}  # fmt: skip
"""Part of the path -> model and tokens per sequence of the benchmark."""
SIZES = {"405b": r"llama31_405b", "175b": r"gpt3", "530b": "", "8b": r"llama31_8b"}
NAMES = {
    "TENSOR_MODEL_PARALLEL": "tensor_model_parallel_size", "PIPELINE_MODEL_PARALLEL": "pipeline_model_parallel_size",
    "CONTEXT_PARALLEL": "context_parallel_size", "INTERLEAVED_PIPELINE": "num_virtual_stages_per_pipeline_rank",
    "MICRO_BATCH_SIZE": "micro_batch_size", "MBS": "micro_batch_size", "EXPERT_MODEL_PARALLEL": "expert_model_parallel_size",
    "EXPERT_PARALLEL": "expert_model_parallel_size",
    "TP": "tensor_model_parallel_size", "PP": "pipeline_model_parallel_size", "CP": "context_parallel_size",
    "VP": "num_virtual_stages_per_pipeline_rank",
}  # fmt: skip
FLAGS = {
    "TP_COMM_OVERLAP": "tp_comm_overlap", "ASYM_PP_EMBED": "account_for_embedding_in_pipeline_split",
    "ASYM_PP_LOSS": "account_for_loss_in_pipeline_split", "OVERLAP_GRAD_REDUCE": "overlap_grad_reduce",
    "FP8_PARAMS": "fp8_param_gather", "FP8_PARAM_GATHER": "fp8_param_gather", "TP_PP_DP_MAPPING": "use_tp_pp_dp_mapping",
    "FP4": "fp4", "FSDP": "use_torch_fsdp2", "MCORE_CUDA_GRAPH": "enable_cuda_graph", "LAYER_CUDA_GRAPH": "external_cuda_graph",
    "FULL_CUDA_GRAPH": "enable_cuda_graph", "AMORTIZED_CG": "enable_cuda_graph",
}  # fmt: skip
TEXTS = {
    "RECOMPUTE_GRANULARITY": "recompute_granularity", "RECOMPUTE_METHOD": "recompute_method",
    "RECOMPUTE_NUM_LAYERS": "recompute_num_layers", "ACT_CKPT_GRANULARITY": "recompute_granularity",
    "ACT_CKPT_METHOD": "recompute_method", "ACT_CKPT_NUM_LAYERS": "recompute_num_layers",
    "ACG": "recompute_granularity", "ACM": "recompute_method", "ACL": "recompute_num_layers",
    "CPU_OFFLOADING_NUM_LAYERS": "cpu_offloading_num_layers", "CUDA_GRAPH_IMPLEMENTATION": "cuda_graph_impl",
    "CP_COMM_TYPE": "cp_comm_type", "RECOMPUTE_MODULES": "recompute_modules",
}  # fmt: skip
"""Variables whose texts are the arguments, where they say something."""
FROZEN = ("FP8_PARAMS", "FP8_PARAM_GATHER", "FP4_PARAM")
"""Whether the frozen weights lie in the low precision: until 5.0, and since."""
CONF = re.compile(r"^ *(\w+): *\"?\$\{oc\.decode:\$\{oc\.env:([A-Z][A-Z0-9_]*)(?:,([^${}]*))?\}\}", re.MULTILINE)
"""A key of the implementation's YAML, the variable that decides it, and what it is where that is unset."""
OTHER_NAMES = {"NNODES": "DGXNNODES", "GPUS_PER_NODE": "DGXNGPU", "SIZE": "MODEL_SIZE"}
"""AMD's names for NVIDIA's."""
RANK = 16


def read(path: Path, given: Given) -> Reading:
    """The job of a configuration; scripts that it reads are followed where they lie in its folder. Raises PlannerError."""
    script = evaluate(read_text(path), str(path), given.settings, path.parent)
    arguments = {*NAMES, *FLAGS, *TEXTS, *FROZEN}
    given.used.update(given.settings.keys() & (script.variables.mentioned | arguments | {*words.READ, "DGXNGPU", "MINIBS"}))
    values = {name: text for name in script.variables.values if (text := script.variables.text(name)) is not None}
    for name, usual in OTHER_NAMES.items():
        if name in values:
            values.setdefault(usual, values[name])
    conf = _conf(path)
    values = values if script.missing else _as_read(values, conf)
    if "CPU_OFFLOADING" in values and not true(values["CPU_OFFLOADING"]):
        values.pop("CPU_OFFLOADING_NUM_LAYERS", None)
    words.check_recipe(str(path), values)
    place = next((one for one in BENCHMARKS if SIZES.get(values.get("MODEL_SIZE", "").lower()) in one.split("|")), "")
    place = place or next((one for one in BENCHMARKS if re.search(one, str(path.absolute()), re.IGNORECASE)), "")
    model, length = BENCHMARKS.get(place, ("", 0))
    lora = true(values.get("LORA")) or "lora" in place
    length = words.length(values) or length
    said = given if given.model or not model else dataclasses.replace(given, model=words.with_layers(values, load_model(model)))
    if lora and not values.keys() & set(FROZEN):
        values |= {key.upper(): values.get(name, usual) for key, name, usual in conf if key == "fp8_params"}
    strangers = words.strangers(values, words.handed_on(script), arguments)
    sizes = words.other_sizes(values, said.spec()) if said.model and given.model is None else []
    questions = [*_questions(script, values, said, length, lora), *words.questions(values, strangers, lora), *sizes]
    staged = values.get("PIPELINE_MODEL_PARALLEL", "1") not in ("", "1")
    if staged and not lora and not (conf and not script.missing) and not values.keys() & {"INTERLEAVED_PIPELINE", "VP"}:
        about = "virtual stages of a rank; 12 in the YAML of NVIDIA's implementations where it is not set"
        questions.append(Question(name="INTERLEAVED_PIPELINE", about=about))
    unknown = [name for name in (*NAMES, *TEXTS) if is_open(values.get(name, ""))]
    questions += [Question(name=one, about=name) for name in unknown for one in roots(values[name]) or [name]]
    found = _arguments(path, values, lora, bool(staged))
    nodes, each = values.get("DGXNNODES", ""), values.get("DGXNGPU", "") or _named(path)
    known = all(re.fullmatch(r"\d{1,6}", one) for one in (nodes, each))
    found.num_gpus = int(nodes) * int(each) if known else None
    if (gpus := given.num_gpus or found.num_gpus) is None:
        questions.append(Question(name="DGXNGPU", about="GPUs of a node", choices=("8", "4")))
    if questions:
        ask(str(path), [*questions, *systems.hardware(path, values, each)[2]])
    assert gpus is not None
    degrees = found.number("tensor_model_parallel_size", 1) * found.number("pipeline_model_parallel_size", 1)
    replicas = max(gpus // (degrees * found.number("context_parallel_size", 1)), 1)
    whole = values["GBS"] if "GBS" in values else str(whole_number(int(values["MINIBS"]), f"{path}: MINIBS") * replicas)
    found |= {"seq_length": str(length or given.sequence_length), "global_batch_size": whole}
    mapped = found.number("context_parallel_size", 1) > 1 and found.pop("use_tp_pp_dp_mapping", None)
    take_settings(found, given)
    reading = _noted(_on(reading_of(found, said), *systems.hardware(path, values, each)), values, script, place, bool(mapped))
    reading = dataclasses.replace(reading, unread=(*reading.unread, *words.unread(values, strangers, lora)))
    if not lora:
        on = {"fp8_attention": "on"} if words.fp8_attention(values) else {}
        return rounds.on_version(dataclasses.replace(reading, trainer=spell(reading.trainer, on)), path)
    frozen = "fp8" if any(true(values.get(name)) for name in FROZEN[:2]) else "bf16"
    frozen = "nvfp4" if words.frozen_in_four_bits(values) else frozen
    unread = tuple(one for one in reading.unread if "fp8-param" not in one)
    rank = values.get("LORA_DIM", "")
    reading = dataclasses.replace(
        reading, trainer=_of_adapters(reading, values), lora_rank=int(rank) if re.fullmatch(r"\d{1,4}", rank) else RANK,
        lora_targets="attention", frozen_weights=frozen, unread=unread,
    )  # fmt: skip
    return rounds.on_version(reading, path)


def _noted(reading: Reading, values: dict[str, str], script: Script, place: str, mapped: bool) -> Reading:
    """The reading with what was taken for what."""
    notes = ["TP_PP_DP_MAPPING with context parallelism is priced in the usual order of ranks"] if mapped else []
    notes += [f"model and sequence length: those of the benchmark {place.split('|')[0]}"] if place else []
    notes += [f"scripts that it reads and that are not here: {', '.join(script.missing)}"] if script.missing else []
    if "gpt3" in place and (spec := reading.model) is not None:  # whose optimizer is that of Apex  [nemo, megatron_base_model.py]
        more = 2.0 * (spec.vocab_size / reading.fields["tp"] + spec.num_position_embeddings) * spec.hidden_size
        what = f"memory comes out too low by some {more / GIB:.1f} GiB on the first stage"
        notes.append(f"rows of the vocabulary are padded to 128 x TP, and gradients of embeddings are in fp32: {what}")
    notes = [*reading.notes, *notes, *words.notes(values, reading.model)]
    return dataclasses.replace(reading, notes=tuple(notes))


def _on(reading: Reading, hardware: str | None, notes: tuple[str, ...], questions: tuple[Question, ...]) -> Reading:
    """The reading on a card, or with the question which one it is."""
    notes, questions = (*reading.notes, *notes), (*reading.questions, *questions)
    return dataclasses.replace(reading, hardware=hardware, notes=notes, questions=questions)


def _arguments(path: Path, values: dict[str, str], lora: bool, staged: bool) -> Arguments:
    """What the variables say in Megatron's words; ``staged``: the job has a pipeline."""
    found = _switches(path, values, lora)
    for name, argument in NAMES.items():
        if re.fullmatch(r"\d{1,6}", values.get(name, "")):
            found[argument] = values[name]
    if not staged or found.get("num_virtual_stages_per_pipeline_rank") in ("0", "1"):
        found.pop("num_virtual_stages_per_pipeline_rank", None)
    found.setdefault("micro_batch_size", "1")
    found |= {argument: True for name, argument in FLAGS.items() if true(values.get(name)) and not (lora and name in FROZEN)}
    found |= {
        argument: values[name] for name, argument in TEXTS.items()
        if values.get(name, "").lower() not in ("", "null", "none", "0")
    }  # fmt: skip
    if isinstance(modules := found.get("recompute_modules"), str):
        found["recompute_modules"] = re.findall(r"\w+", modules)
    return found


def _conf(path: Path) -> list[tuple[str, str, str]]:
    """What the YAML of the implementation, conf/custom.yaml or conf/megatron_gpt_peft_tuning_config.yaml, takes of variables, where
    it lies next to the configuration or above it."""
    for folder in (path.absolute().parent, *path.absolute().parents[1:3]):
        for place in ("conf", "src/conf"):
            for file in sorted((folder / place).glob("*.yaml"))[:20]:
                text = read_text(file)
                if "tensor_model_parallel_size" in text and "oc.env" in text:
                    return [(key, name, usual.strip().strip("'\"")) for key, name, usual in CONF.findall(text)]
    return []


def _as_read(values: dict[str, str], conf: list[tuple[str, str, str]]) -> dict[str, str]:
    """Variables with what the YAML takes where they are unset, without the older name of one that it reads by its newer one."""
    read = {name for _, name, _ in conf}
    void = {*words.EIGHT_BITS} - read if read & {*words.EIGHT_BITS} else set()
    usual = {name: text for _, name, text in conf if text not in ("", "null")}
    return {name: text for name, text in (usual | values).items() if name not in void}


def _of_adapters(reading: Reading, values: dict[str, str]) -> str:
    """NeMo with what the benchmark of adapters runs with: dropout next to them, attention in fp8, graphs, and without the overlap
    of tensor parallelism unless it is said."""
    options = {}
    if values.get("LORA_DROPOUT", "0.1").strip("0.") != "":
        options["adapter_dropout"] = "on"
    if words.fp8_attention(values):
        options["fp8_attention"] = "on"
    options |= {name: value for name, value in (("cuda_graphs", "layers"), ("gradient_overlap", "off"))
                if f"{name}={value}" in reading.trainer}  # fmt: skip
    if reading.fields["tp"] > 1 and not true(values.get("TP_COMM_OVERLAP")):
        options["tp_overlap"] = "off"
    return spell("nemo", options)


def _switches(path: Path, values: dict[str, str], lora: bool) -> Arguments:
    """What every configuration of the benchmarks runs with, and what its variables turn on and off."""
    found = Arguments(str(path))
    found |= {"bf16": True, "use_distributed_optimizer": True, "sequence_parallel": True, "hidden_dropout": "0.0",
              "attention_dropout": "0.1" if lora else "0.0", "overlap_grad_reduce": True, "grad_reduce_in_bf16": True}  # fmt: skip
    if true(values.get("FP8")):
        found |= {"fp8": "hybrid", **({"fp8_recipe": values["FP8_RECIPE"]} if values.get("FP8_RECIPE") else {})}
    if true(values.get("FP8")) and values.get("FP8_RECIPE") == "mxfp8" and true(values.get("NVTE_CUTEDSL_FUSED_GROUPED_MLP")):
        found["use_transformer_engine_op_fuser"] = values.get("USE_TE_OPS", "True").lower() not in words.NONE
    if not lora and values.get("CE_FUSION_IMPL") == "te" and true(values.get("CROSS_ENTROPY_LOSS_FUSION", "True")):
        found |= {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    for argument, names in words.SWITCHED_OFF.items():
        if any(values.get(name, "").lower() in ("false", "0") for name in names):
            del found[argument]
    off = {values.get(name, "False" if lora else "").lower() for name in (("SP",) if lora else ("SEQ_PARALLEL", "SP"))}
    if off & {"false", "0"}:  # the benchmark of adapters has it where SP says so, the others unless they say no
        del found["sequence_parallel"]
    return found


def _questions(script: Script, values: dict[str, str], said: Given, length: int, lora: bool) -> list[Question]:
    found = [] if said.model else [NEEDED["model"]]
    if not length and said.sequence_length is None:
        found.append(NEEDED["sequence_length"])
    if not re.fullmatch(r"\d{1,6}", values.get("GBS", values.get("MINIBS", ""))):
        found.append(Question(name="MINIBS", about="sequences per step and replica"))
    if not values.keys() & {"FP8", "FP4"}:
        about = f"precision, which {script.missing[0]} sets" if script.missing else "precision: fp8, else bf16"
        found.append(Question(name="FP8", about=about, choices=("True", "False")))
    if lora and not values.keys() & FROZEN and true(values.get("FP8", "True")):
        found.append(
            Question(name="FP8_PARAMS", about="whether the frozen weights lie in fp8", choices=("True", "False"))
        )
    return found


def _named(path: Path) -> str:
    """GPUs of a node by the file's name: config_DGXH100_64x8x128x4x8.sh has 64 nodes of 8, config_H200x8_NODEx64.sh too."""
    found = re.search(rf"(?:_\d+|(?:{systems.GPUS}))x(\d)(?=x|_)", path.name)
    return found[1] if found else ""

