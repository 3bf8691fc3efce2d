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

from planner.trainers.reading.log_facts import Log, Settings, scan

WRITER, MARK = "Megatron-LM", "elapsed time per iteration (ms)"
_ARGUMENT = re.compile(r"(?:^|[\s:\]])(\w+) \.{2,} ?(.*)$")
_LINES = {
    "elapsed time per iteration": (
        re.compile(r"iteration\s+(?P<number>\d+)\s*/\s*\d+ \|.*?elapsed time per iteration \(ms\):\s*(?P<milliseconds>[\d.]+)"),
        re.compile(r"g(?:lobal|loabl) batch size:\s*(?P<batch>\d+)"),
        re.compile(r"lm loss:\s*(?P<loss>[\d.]+(?:E[+-]\d+)?)"),
    ),
    "memory (MB) |": (
        re.compile(r"\| max allocated: (?P<allocated>[\d.]+)"),
        re.compile(r"\| max (?:reserved|cached): (?P<reserved>[\d.]+)"),
        re.compile(r"\| total device memory used: (?P<device>[\d.]+)"),
    ),
}
_VOCABULARY = re.compile(r"padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d+)\)")
_FP8_NOTE = {"mxfp8": "MXFP8", "blockwise": "blockwise fp8"}


def read(text: str) -> Log:
    """Steps, arguments and peak memory."""
    log, arguments, padded = Log(framework="megatron-lm core", steps=[]), Settings(), None
    for line in scan(log, text, _LINES, unit="M"):
        if " .." in line and (match := _ARGUMENT.search(line)):
            arguments.setdefault(match.group(1), match.group(2).strip())
        elif match := _VOCABULARY.search(line):
            padded = int(match.group(1))
    log.facts["model.vocab"] = arguments.value("padded_vocab_size") or padded or arguments.value("vocab_size")
    if arguments:
        _arguments(log, arguments)
    return log


_FACTS = {
    "model.layers": "num_layers", "model.hidden": "hidden_size", "model.ffn": "ffn_hidden_size",
    "model.heads": "num_attention_heads", "model.seq": "seq_length", "model.gated": "swiglu", "parallel.gpus": "world_size",
    "parallel.tp": "tensor_model_parallel_size", "parallel.pp": "pipeline_model_parallel_size",
    "parallel.cp": "context_parallel_size", "parallel.vpp": "virtual_pipeline_model_parallel_size",
    "parallel.sp": "sequence_parallel", "batch.micro": "micro_batch_size", "batch.global": "global_batch_size",
    "tp_overlap": "tp_comm_overlap", "grad_overlap": "overlap_grad_reduce",
}  # fmt: skip
_EXPERT_FACTS = {
    "model.experts": "num_experts", "model.topk": "moe_router_topk", "model.moe_ffn": "moe_ffn_hidden_size",
    "parallel.ep": "expert_model_parallel_size", "parallel.etp": "expert_tensor_parallel_size",
}  # fmt: skip
_NOTES = {
    "enable_cuda_graph": "CUDA graphs", "external_cuda_graph": "CUDA graphs", "moe_enable_deepep": "DeepEP dispatcher",
    "optimizer_cpu_offload": "with optimizer offload",
}  # fmt: skip
"""What a row says in words, by the flag that turns it on."""


def _arguments(log: Log, arguments: Settings) -> None:
    """Facts from the dump of arguments."""
    facts, value = log.facts, arguments.value
    facts |= arguments.facts(_FACTS)
    facts |= {path: facts[path] or 1 for path in ("parallel.cp", "parallel.vpp")}
    facts |= {"precision": _precision(arguments), "recompute": _recompute(arguments), "optimizer": arguments.get("optimizer")}
    latent, grouped = value("multi_latent_attention"), value("group_query_attention")
    facts["model.kv_heads"] = value("num_query_groups") if grouped else facts["model.heads"]
    facts |= {"model.attention": "mla"} if latent else {"model.head_dim": value("kv_channels")}
    if value("deepspeed"):
        log.framework = "megatron-deepspeed"
    zero = value("zero_stage" if value("deepspeed") else "use_distributed_optimizer")
    facts["parallel.zero"] = None if zero is None else int(zero)
    if value("untie_embeddings_and_output_weights") is not None:
        facts["model.tied_embeddings"] = not value("untie_embeddings_and_output_weights")
    if value("num_experts"):
        facts |= arguments.facts(_EXPERT_FACTS)
        facts["parallel.ep"] = facts["parallel.ep"] or 1
        shared, width = value("moe_shared_expert_intermediate_size"), facts["model.moe_ffn"]
        facts["model.shared_experts"] = round(shared / width) if shared and width else 0
    if arguments.get("transformer_impl") == "local" and value("use_flash_attn") is False:
        facts["flash_attention"] = False
    recipe = arguments.get("fp8_recipe", "")
    if facts["precision"] == "fp8" and recipe in _FP8_NOTE:
        log.notes.append(_FP8_NOTE[recipe])
    log.notes += dict.fromkeys(note for name, note in _NOTES.items() if value(name))
    last = value("decoder_last_pipeline_num_layers")
    if last and last != facts["model.layers"]:
        log.notes.append(f"last stage has {last} layers")


def _precision(arguments: Settings) -> str | None:
    if arguments.get("fp8", "None") not in ("None", "False"):
        return "fp8"
    given = next((name for name in ("bf16", "fp16") if arguments.value(name)), None)
    return given or ("fp32" if "bf16" in arguments else None)


def _recompute(arguments: Settings) -> str | None:
    """The text of a row: none, full, N layers full, or selective with its modules."""
    kind = arguments.get("recompute_granularity")
    if kind is None:
        own = arguments.get("checkpoint_activations_granularity")  # of Habana's fork
        return own if own == "selective" else "full" if arguments.value("checkpoint_activations") else None
    layers = arguments.value("recompute_num_layers")
    if kind == "full":
        return f"{layers} layers full" if arguments.get("recompute_method") == "block" and layers else "full"
    if kind != "selective":
        return "none"
    modules = re.findall(r"\w+", arguments.get("recompute_modules", "").replace("None", ""))
    return f"selective: {', '.join(modules)}" if modules and modules != ["core_attn"] else "selective"
