"""Megatron-LM: the arguments of ``pretrain_gpt.py``, grouped, every dimension written out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner import library
from planner.layout import NAMES, Order, Recompute, Schedule
from planner.trainer import Trainer
from planner.trainers.bundle.target import ExportJob, Rendered, Setting, Target
from planner.trainers.megatron import core_settings as mcore

Words = tuple[str, ...]
"""A flag and its values."""
SMOKE_STEPS = 10
"""Steps of the smoke run: past the first ones, which allocate."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Arguments that belong together."""

    title: str
    """What they say."""
    words: tuple[Words, ...]
    """Flags with their values, in order."""


def arguments(job: ExportJob) -> tuple[Group, ...]:
    """All arguments that follow from the plan; data, learning rate and checkpoints are the user's."""
    groups = (
        Group(title="Model", words=_model(job)),
        Group(title="Attention", words=_attention(job)),
        Group(title="Experts", words=_experts(job)),
        Group(title="Parallelism", words=_parallelism(job)),
        Group(title="Batch", words=_batch(job)),
        Group(title="Recompute", words=_recompute(job)),
        Group(title="Data parallel states and optimizer", words=_optimizer(job)),
        Group(title="Precision", words=_precision(job)),
        Group(title="Kernels that the plan was priced with", words=_kernels(job)),
    )
    return tuple(group for group in groups if group.words)


def _model(job: ExportJob) -> tuple[Words, ...]:
    m = job.model
    positions = "yarn" if m.scaled_rope else {"learned": "learned_absolute"}.get(m.position, m.position)
    reach = max(m.num_position_embeddings, m.max_sequence_length, job.workload.sequence_length)
    if m.position == "learned":
        reach = m.num_position_embeddings
    words: list[Words] = [
        ("--num-layers", str(m.num_layers)), ("--hidden-size", str(m.hidden_size)),
        ("--ffn-hidden-size", str(m.ffn_size)), ("--seq-length", str(job.workload.sequence_length)),
        ("--max-position-embeddings", str(reach)), ("--position-embedding-type", positions),
        ("--normalization", "RMSNorm" if m.norm == "rmsnorm" else "LayerNorm"),
        ("--padded-vocab-size", str(mcore.vocab_rows(job))), ("--vocab-size", str(m.vocab_size)),
        ("--hidden-dropout", "0.0"), ("--attention-dropout", "0.0"),
    ]  # fmt: skip
    if m.clamped_activation:  # gpt-oss: x sigmoid(1.702 x) of the clamped gate times the clamped rest plus one
        words += [("--quick-geglu",), ("--activation-func-clamp-value", "7.0"), ("--glu-linear-offset", "1.0")]
    elif _ACTIVATIONS.get((m.activation, m.gated)):
        words.append((_ACTIVATIONS[m.activation, m.gated],))
    words += [] if m.linear_bias else [("--disable-bias-linear",)]
    words += [("--add-qkv-bias",)] if m.qkv_bias else []
    words += [] if m.tied_embeddings else [("--untie-embeddings-and-output-weights",)]
    words += [("--mtp-num-layers", str(m.mtp_layers))] if m.mtp_layers else []
    return tuple(words)


_ACTIVATIONS = {
    ("silu", True): "--swiglu", ("gelu", True): "--quick-geglu", ("gelu", False): "", ("relu2", False): "--squared-relu",
}  # fmt: skip
"""(activation, gated) -> flag; GELU without gate is Megatron's default and has none."""


def _attention(job: ExportJob) -> tuple[Words, ...]:
    m = job.model
    words: list[Words] = [("--num-attention-heads", str(m.num_heads))]
    if m.is_mla:
        words += [("--multi-latent-attention",), ("--rope-type", "yarn"), ("--qk-layernorm",)]
        words += [("--q-lora-rank", str(m.q_lora_rank))] if m.q_lora_rank else []
        words += [
            ("--kv-lora-rank", str(m.kv_lora_rank)), ("--qk-head-dim", str(m.qk_nope_head_dim)),
            ("--qk-pos-emb-head-dim", str(m.qk_rope_head_dim)), ("--v-head-dim", str(m.v_head_dim)),
        ]  # fmt: skip
    else:
        words.append(("--kv-channels", str(m.head_dim)))
        words += [("--group-query-attention",), ("--num-query-groups", str(m.num_kv_heads))]
        words += [("--qk-layernorm",)] if m.qk_norm else []
    if m.window:
        words.append(("--window-size", f"{m.window},0"))
        if m.num_windowed_layers < m.num_layers:
            words.append(("--window-attn-skip-freq", window_pattern(m.num_layers, m.num_windowed_layers)))
    return tuple(words)


def window_pattern(layers: int, windowed: int) -> str:
    """1 for a layer with the window: as many as the model has, spread evenly, the full ones last of each run."""
    full = layers - windowed
    flags = [1 - int((layer + 1) * full // layers > layer * full // layers) for layer in range(layers)]
    return str(flags).replace(" ", "")


def _experts(job: ExportJob) -> tuple[Words, ...]:
    m, layout = job.model, job.layout
    if not m.is_moe:
        return ()
    words: list[Words] = [
        ("--num-experts", str(m.num_experts)), ("--moe-router-topk", str(m.top_k)),
        ("--moe-ffn-hidden-size", str(m.expert_ffn_size)), ("--moe-layer-freq", mcore.moe_layer_pattern(m)),
        ("--expert-model-parallel-size", str(layout.ep)), ("--expert-tensor-parallel-size", str(layout.etp)),
        ("--moe-grouped-gemm",), ("--moe-permute-fusion",), ("--moe-router-dtype", "fp32"),
        ("--moe-router-load-balancing-type", "aux_loss"), ("--moe-aux-loss-coeff", "0.001"),
    ]  # fmt: skip
    if m.shared_expert_ffn_size:
        words.append(("--moe-shared-expert-intermediate-size", str(m.shared_expert_ffn_size)))
    words += [("--moe-router-pre-softmax",)] if m.top_k == 1 else []
    backend = mcore.FLEX_BACKENDS.get(job.trainer.kernels.expert_dispatch)
    if backend:
        words += [("--moe-token-dispatcher-type", "flex"), ("--moe-flex-dispatcher-backend", backend)]
    else:
        words.append(("--moe-token-dispatcher-type", "alltoall"))
    return tuple(words)


def _parallelism(job: ExportJob) -> tuple[Words, ...]:
    layout = job.layout
    words: list[Words] = [
        ("--tensor-model-parallel-size", str(layout.tp)), ("--pipeline-model-parallel-size", str(layout.pp)),
        ("--context-parallel-size", str(layout.cp)),
    ]  # fmt: skip
    words += [("--sequence-parallel",)] if layout.sequence_parallel else []
    words += [("--cp-comm-type", mcore.CP_TYPES[int(layout.cp_method)])] if int(layout.cp) > 1 else []
    if int(layout.pp) > 1:
        words.append(("--pipeline-model-parallel-layout", mcore.pipeline_layout(job)))
    words += [("--use-tp-pp-dp-mapping",)] if int(layout.order) == Order.TP_CP_EP_PP_DP else []
    words += [("--tp-comm-overlap",)] if overlaps_tensor(job.trainer) and layout.sequence_parallel else []
    return tuple(words)


def overlaps_tensor(trainer: Trainer) -> bool:
    """The plan was priced with tensor-parallel collectives that run beside the GEMM they feed."""
    return "tp" in trainer.traffic.overlap


def _batch(job: ExportJob) -> tuple[Words, ...]:
    return (
        ("--micro-batch-size", str(job.layout.micro_batch_size)),
        ("--global-batch-size", str(job.workload.global_batch_size)),
    )


def _recompute(job: ExportJob) -> tuple[Words, ...]:
    mode = int(job.layout.recompute)
    if mode == Recompute.SELECTIVE:
        return (
            ("--recompute-granularity", "selective"),
            ("--recompute-modules", *mcore.recompute_modules(job)),
        )
    if mode == Recompute.FULL:
        layers = str(mcore.layers_to_recompute(job))
        return (
            ("--recompute-granularity", "full"),
            ("--recompute-method", "block"),
            ("--recompute-num-layers", layers),
        )
    return ()


def _optimizer(job: ExportJob) -> tuple[Words, ...]:
    layout, name = job.layout, job.workload.optimizer
    words: list[Words] = [("--optimizer", {"adam_bf16": "adam", "adam_8bit": "adam"}.get(name, name))]
    words += [("--use-distributed-optimizer",)] if mcore.shards_states(job) else []
    if int(layout.dp) * int(layout.cp) > 1 and "gradients" in job.trainer.traffic.overlap:
        words.append(("--overlap-grad-reduce",))
        if int(layout.zero) == 1 and "parameters" in job.trainer.traffic.overlap:
            words.append(("--overlap-param-gather",))
    if mcore.lean_optimizer(job):
        moments = {"adam_bf16": "bf16", "adam_8bit": "fp8"}.get(name, "fp32")
        words += [
            ("--use-precision-aware-optimizer",), ("--main-params-dtype", "fp32"),
            ("--main-grads-dtype", "fp32" if mcore.sums_in_fp32(job) else "bf16"),
            ("--exp-avg-dtype", moments), ("--exp-avg-sq-dtype", moments),
        ]  # fmt: skip
    if int(layout.offload_optimizer):
        words += [
            ("--optimizer-cpu-offload",),
            ("--optimizer-offload-fraction", f"{int(layout.offload_optimizer) / 100:g}"),
        ]
    words += [("--sgd-momentum", "0.9")] if name == "sgd" else []
    return tuple(words)


def _precision(job: ExportJob) -> tuple[Words, ...]:
    work = job.workload
    words: list[Words] = (
        [("--fp16",)] if work.precision == "fp16" else [("--bf16",)] if work.precision != "fp32" else []
    )
    if mcore.sums_in_fp32(job):
        words.append(("--accumulate-allreduce-grads-in-fp32",))
    elif work.precision != "fp16":
        words.append(("--grad-reduce-in-bf16",))
    form, recipe = mcore.precision_recipe(job)
    if recipe == "nvfp4":
        words += [("--fp4-format", form), ("--fp4-recipe", recipe)]
    elif recipe:
        words += [("--fp8-format", form), ("--fp8-recipe", recipe)]
    return tuple(words)


def _kernels(job: ExportJob) -> tuple[Words, ...]:
    return (
        ("--transformer-impl", "transformer_engine"), ("--attention-backend", mcore.attention_backend(job)),
        *((("--no-bias-dropout-fusion",),) if job.model.expert_bias else ()),  # TEGroupedMLP with biases asserts this
    )  # fmt: skip


def _refusals(job: ExportJob) -> list[str]:
    m, found = job.model, mcore.refusals(job)
    if (m.activation, m.gated) not in _ACTIVATIONS:
        found.append(
            f"{m.name} has {'gated ' if m.gated else ''}{m.activation}, for which Megatron-LM has no flag; use --to megatron-bridge"
        )
    if m.position == "learned" and job.workload.sequence_length > m.num_position_embeddings:
        found.append(
            f"sequences of {job.workload.sequence_length} tokens, but {m.name} learned {m.num_position_embeddings} positions "
            "(--max-position-embeddings); use shorter sequences"
        )
    if mcore.fused_loss(job):  # arguments.py: "disabled due to stability issues"
        found.append(
            f"loss_passes {job.trainer.kernels.loss_passes:g} of trainer {job.trainer.name}: "
            "the loss was priced as Transformer Engine's fused cross entropy, which Megatron-LM refuses; "
            "use --to megatron-bridge, or plan with trainer megatron"
        )
    schedule = int(job.layout.schedule)
    if schedule not in (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED):
        found.append(f"schedule {NAMES['schedule'][schedule]}: Megatron-LM runs 1f1b and interleaved_1f1b")
    return found


def shell_array(name: str, groups: Sequence[Group]) -> list[str]:
    """Lines of a bash array, one flag a line."""
    lines = [f"{name}=("]
    for group in groups:
        lines.append(f"    # {group.title}")
        lines += [f"    {' '.join([words[0], *map(shell_word, words[1:])])}" for words in group.words]
    return [*lines, ")"]


def shell_word(text: str) -> str:
    """Single quotes where bash would read more than text."""
    return text if text and all(letter.isalnum() or letter in "-_.,/:=+" for letter in text) else f"'{text}'"


def smoke_batch(job: ExportJob) -> int:
    """Sequences per step of a smoke run: two rounds of the pipeline, which is enough for the memory of its peak."""
    layout = job.layout
    rounds = min(int(layout.num_microbatches), 2 * int(layout.pp))
    return rounds * int(layout.micro_batch_size) * int(layout.dp)


def _smoke(job: ExportJob) -> tuple[Group, ...]:
    words: tuple[Words, ...] = (
        ("--mock-data",), ("--tokenizer-type", "NullTokenizer"), ("--train-iters", str(SMOKE_STEPS)),
        ("--global-batch-size", str(smoke_batch(job))), ("--eval-iters", "0"), ("--lr", "1e-5"),
        ("--log-interval", "1"), ("--log-throughput",), ("--seed", "1234"),
    )  # fmt: skip
    return (Group(title="Synthetic data, a few steps; the batch replaces the one above", words=words),)


def header(job: ExportJob) -> str:
    """What the arguments do not say, for ``plan import``."""
    plan = job.plan
    return f"# plan: {plan.num_gpus} GPUs, hardware {plan.hardware}, trainer {plan.trainer}, model {job.model.name}"


def _script(job: ExportJob) -> str:
    head = [
        "# shellcheck shell=bash disable=SC2034",
        "# Arguments of Megatron-LM's pretrain_gpt.py, sourced by the launch scripts.",
        header(job),
        "",
    ]
    return "\n".join([*head, *shell_array("ARGUMENTS", arguments(job)), "", *shell_array("SMOKE", _smoke(job))]) + "\n"


def _yaml(job: ExportJob) -> str:
    """The arguments as a mapping, in the form of Megatron-LM's own test recipes: ENV_VARS and MODEL_ARGS."""
    values = {words[0]: _value(words) for group in arguments(job) for words in group.words}
    variables = {name: one.value for name, one in mcore.environment(job).items()}
    document = {"ENV_VARS": variables, "MODEL_ARGS": values}
    head = (
        "# The arguments of arguments.sh as a mapping, in the form of Megatron-LM's test recipes; not for --yaml-cfg.\n"
    )
    return f"{head}{header(job)}\n{library.dump_yaml(document)}"


def _value(words: Words) -> bool | str:
    return True if len(words) == 1 else " ".join(words[1:])


def _render(job: ExportJob) -> Rendered:
    start = ("$MEGATRON_LM/pretrain_gpt.py", "${ARGUMENTS[@]}")
    entry = (
        *start, "--data-path", "${DATA_PATH:?set DATA_PATH to the prefix of a preprocessed data set}",
        "--tokenizer-type", "HuggingFaceTokenizer",
        "--tokenizer-model", "${TOKENIZER:?set TOKENIZER to a Hugging Face tokenizer}", "--split", "99,1,0",
        "--train-iters", "${TRAIN_ITERS}", "--lr", "${LEARNING_RATE}", "--lr-decay-style", "cosine",
        "--eval-interval", "1000", "--eval-iters", "10", "--log-interval", "1", "--log-throughput",
        "--save", "${CHECKPOINTS}", "--load", "${CHECKPOINTS}", "--save-interval", "1000", "--ckpt-format", "torch_dist",
    )  # fmt: skip
    variables = {
        "MEGATRON_LM": Setting(value=None, why="folder of a Megatron-LM checkout, for pretrain_gpt.py"),
        "TRAIN_ITERS": Setting(value="1000", why="Optimizer steps; the plan does not say how many."),
        "LEARNING_RATE": Setting(value="1e-4", why="Peak learning rate; it does not change time or memory."),
        "CHECKPOINTS": Setting(value="checkpoints", why="Folder of checkpoints, which load into any layout."),
    }
    return Rendered(
        files={"arguments.sh": _script(job), "arguments.yaml": _yaml(job)}, entry=entry, smoke=(*start, "${SMOKE[@]}"),
        prepare=(
            "# shellcheck disable=SC1091", "source ./arguments.sh",
            'export PYTHONPATH="$MEGATRON_LM${PYTHONPATH:+:$PYTHONPATH}"',
        ),
        environment=mcore.environment(job), variables=variables, notes=tuple(_notes(job)),
        vocab_rows=mcore.vocab_rows(job),
        install=("git clone --branch core_r0.19.0 https://github.com/NVIDIA/Megatron-LM && export MEGATRON_LM=$PWD/Megatron-LM",
                 "pip install --no-build-isolation 'transformer-engine[pytorch]' && pip install transformers"),
    )  # fmt: skip


def _notes(job: ExportJob) -> list[str]:
    m, layout = job.model, job.layout
    notes = [
        "run.sh also needs DATA_PATH (prefix of a data set of tools/preprocess_data.py) and TOKENIZER; smoke.sh neither.",
        "Rotary base, norm epsilon, initialisation and the router's score function keep Megatron's defaults: they change "
        "neither time nor memory; set them for your model.",
        "Gradient accumulation, rotary embedding, SwiGLU and softmax are fused by default; a --no-...-fusion flag makes the "
        "plan's times wrong.",
        "Hugging Face weights: Megatron-Bridge converts both ways; checkpoints of torch_dist load into any layout.",
        f"smoke.sh runs {SMOKE_STEPS} steps of {smoke_batch(job)} sequences instead of {job.workload.global_batch_size}: the peak "
        "of memory is the same, the step is shorter.",
    ]
    rows = mcore.vocab_rows(job)
    if rows != m.vocab_size:
        notes.append(f"The vocabulary of {m.vocab_size} is padded to {rows} rows, a multiple of 128 tp.")
    if m.activation == "gelu" and m.gated:
        notes.append("--quick-geglu is x sigmoid(1.702 x) in place of GELU: the same size and speed, other values.")
    if m.scaled_rope:
        notes.append(
            "--position-embedding-type yarn outside MLA needs megatron-core 0.19; set --rotary-scaling-factor for your model."
        )
    if m.window:
        notes.append(
            f"Which {m.num_windowed_layers} of {m.num_layers} layers have the window is not in the plan: they are spread evenly."
        )
    if job.workload.optimizer == "muon":
        notes.append("Muon needs the package emerging-optimizers; its states are sharded layer by layer.")
    if int(layout.dp) * int(layout.cp) == 1 and mcore.shards_states(job):
        notes.append(
            "--use-distributed-optimizer shards nothing here: the precision-aware and the host optimizer are part of it."
        )
    return notes


TARGET = Target(
    name="megatron", title="Megatron-LM (arguments of pretrain_gpt.py)", trainers=("megatron", "nemo"),
    versions=mcore.VERSIONS, package="megatron-core", level="model built", source=mcore.SOURCE,
    refusals=_refusals, render=_render, writes=("gradient_bytes", "gradient_reduce_bytes"),
)  # fmt: skip
