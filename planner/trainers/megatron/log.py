"""Logs of Megatron-LM and what is built on it (Megatron-DeepSpeed too).

Format of megatron/training at main of 2025-10 and of v3 (2022), which differ in the time stamp, in 'throughput per GPU' and in
where the padded vocabulary stands:

    ------------------------ arguments ------------------------
      tensor_model_parallel_size ...................... 4                       arguments.py: two blanks, dots to column 48
    > padded vocab (size: 50257) with 431 dummy tokens (new size: 50688)
     [2025-11-14 10:20:15] iteration        2/      20 | consumed samples:         1024 | elapsed time per iteration (ms): 423291.1
       | throughput per GPU (TFLOP/s/GPU): 248.4 | learning rate: 1.466963E-04 | global batch size:   512 | ...     (one line)
    [Rank 0] (after 1 iterations) memory (MB) | allocated: 60348.25 | max allocated: 73751.57 | reserved: 90894.0
       | max reserved: 90894.0 | total device memory used: 93210.12                              (one line)

The line of memory is report_memory's: v1.0 says 'cached' instead of 'reserved' and has no rank, from v2.0 (2020) on it is as above
with all digits of a number, since 2026-01 with two; the device's memory comes with --log-device-memory-used only. MB are MiB.
The first data-parallel rank of every tensor and pipeline rank prints it, after the first two iterations and every
--log-memory-interval ones.
"""

import re
from typing import Any

from planner import units
from planner.trainers.reading.log_facts import Log, Step, lines, whole

WRITER = "Megatron-LM"
_ARGUMENT = re.compile(r"(?:^|[\s:\]])(\w+) \.{2,} ?(.*)$")
_STEP = re.compile(r"iteration\s+(\d+)\s*/\s*\d+ \|.*?elapsed time per iteration \(ms\):\s*([\d.]+)")
_BATCH = re.compile(r"g(?:lobal|loabl) batch size:\s*(\d+)")
_LOSS = re.compile(r"lm loss:\s*([\d.]+(?:E[+-]\d+)?)")
_MEMORY = re.compile(r"memory \(MB\) \|")
_PEAKS = {
    "allocated": re.compile(r"\| max allocated: ([\d.]+)"),
    "reserved": re.compile(r"\| max (?:reserved|cached): ([\d.]+)"),
    "device": re.compile(r"\| total device memory used: ([\d.]+)"),
}
_VOCABULARY = re.compile(r"padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d+)\)")
_FP8_NOTE = {"mxfp8": "MXFP8", "blockwise": "blockwise fp8"}


def matches(text: str) -> bool:
    """The text has lines of Megatron."""
    return "elapsed time per iteration (ms)" in text


def read(text: str) -> Log:
    """Steps, arguments and peak memory."""
    steps, arguments, peaks, padded = [], dict[str, str](), dict[str, float](), None
    for line in lines(text):
        if " .." in line and (match := _ARGUMENT.search(line)):
            arguments.setdefault(match.group(1), match.group(2).strip())
        elif "elapsed time per iteration" in line and (match := _STEP.search(line)):
            batch, loss = _BATCH.search(line), _LOSS.search(line)
            steps.append(
                Step(
                    number=int(match.group(1)),
                    seconds=float(match.group(2)) * units.parse("1 ms", "seconds"),
                    batch=int(batch.group(1)) if batch else None,
                    loss=float(loss.group(1)) if loss else None,
                )
            )
        elif _MEMORY.search(line):
            for kind, pattern in _PEAKS.items():
                if match := pattern.search(line):
                    peaks[kind] = max(peaks.get(kind, 0.0), float(match.group(1)) * units.MIB / units.GIB)
        elif match := _VOCABULARY.search(line):
            padded = int(match.group(1))
    log = Log(framework="megatron-lm core", steps=steps)
    kind = next((one for one in _PEAKS if peaks.get(one)), "")
    if kind:
        log.memory_gib, log.memory_kind = peaks.pop(kind), kind
        log.notes.append(
            {"allocated": "peak allocated GiB", "reserved": "reserved GiB", "device": "nvidia-smi GiB"}[kind]
        )
        log.other_memory_gib = {one: size for one, size in peaks.items() if size}
    if arguments:
        _arguments(log, arguments, padded)
    elif padded:
        log.facts["model.vocab"] = padded
    return log


def _flag(arguments: dict[str, str], name: str) -> bool | None:
    return {"True": True, "False": False}.get(arguments.get(name, ""))


def _arguments(log: Log, arguments: dict[str, str], padded: int | None) -> None:
    """Facts from the dump of arguments."""

    def value(name: str) -> int | None:
        return whole(arguments.get(name, ""))

    deepspeed = _flag(arguments, "deepspeed")
    if deepspeed:
        log.framework = "megatron-deepspeed"
    grouped = _flag(arguments, "group_query_attention")
    experts = value("num_experts")
    latent = _flag(arguments, "multi_latent_attention")
    facts: dict[str, Any] = {
        "model.layers": value("num_layers"), "model.hidden": value("hidden_size"), "model.ffn": value("ffn_hidden_size"),
        "model.heads": value("num_attention_heads"),
        "model.kv_heads": value("num_query_groups") if grouped else value("num_attention_heads"),
        "model.head_dim": None if latent else value("kv_channels"), "model.seq": value("seq_length"),
        "model.vocab": value("padded_vocab_size") or padded or value("vocab_size"),
        "model.gated": _flag(arguments, "swiglu"), "model.attention": "mla" if latent else None,
        "parallel.gpus": value("world_size"), "parallel.tp": value("tensor_model_parallel_size"),
        "parallel.pp": value("pipeline_model_parallel_size"), "parallel.cp": value("context_parallel_size") or 1,
        "parallel.vpp": value("virtual_pipeline_model_parallel_size") or 1,
        "parallel.sp": _flag(arguments, "sequence_parallel"),
        "batch.micro": value("micro_batch_size"), "batch.global": value("global_batch_size"),
        "precision": _precision(arguments), "recompute": _recompute(arguments), "optimizer": arguments.get("optimizer"),
        "tp_overlap": _flag(arguments, "tp_comm_overlap"), "grad_overlap": _flag(arguments, "overlap_grad_reduce"),
    }  # fmt: skip
    sharded = _flag(arguments, "use_distributed_optimizer")
    facts["parallel.zero"] = value("zero_stage") if deepspeed else None if sharded is None else int(sharded)
    untied = _flag(arguments, "untie_embeddings_and_output_weights")
    facts["model.tied_embeddings"] = None if untied is None else not untied
    if experts:
        shared, width = value("moe_shared_expert_intermediate_size"), value("moe_ffn_hidden_size")
        facts |= {
            "model.experts": experts, "model.topk": value("moe_router_topk"), "model.moe_ffn": width,
            "model.shared_experts": round(shared / width) if shared and width else 0,
            "parallel.ep": value("expert_model_parallel_size") or 1, "parallel.etp": value("expert_tensor_parallel_size"),
        }  # fmt: skip
    if arguments.get("transformer_impl") == "local" and _flag(arguments, "use_flash_attn") is False:
        facts["flash_attention"] = False
    log.facts |= facts
    recipe = arguments.get("fp8_recipe", "")
    if facts["precision"] == "fp8" and recipe in _FP8_NOTE:
        log.notes.append(_FP8_NOTE[recipe])
    if _flag(arguments, "enable_cuda_graph") or _flag(arguments, "external_cuda_graph"):
        log.notes.append("CUDA graphs")
    if _flag(arguments, "moe_enable_deepep"):
        log.notes.append("DeepEP dispatcher")
    if _flag(arguments, "optimizer_cpu_offload"):
        log.notes.append("with optimizer offload")
    last = value("decoder_last_pipeline_num_layers")
    if last and last != facts["model.layers"]:
        log.notes.append(f"last stage has {last} layers")


def _precision(arguments: dict[str, str]) -> str | None:
    if arguments.get("fp8", "None") not in ("None", "False"):
        return "fp8"
    for name in ("bf16", "fp16"):
        if _flag(arguments, name):
            return name
    return "fp32" if "bf16" in arguments else None


def _recompute(arguments: dict[str, str]) -> str | None:
    """The text of a row: none, full, N layers full, or selective with its modules."""
    kind = arguments.get("recompute_granularity")
    if kind is None:
        return "full" if _flag(arguments, "checkpoint_activations") else None
    layers = whole(arguments.get("recompute_num_layers", ""))
    if kind == "full":
        return f"{layers} layers full" if arguments.get("recompute_method") == "block" and layers else "full"
    if kind != "selective":
        return "none"
    modules = re.findall(r"\w+", arguments.get("recompute_modules", "").replace("None", ""))
    return f"selective: {', '.join(modules)}" if modules and modules != ["core_attn"] else "selective"
