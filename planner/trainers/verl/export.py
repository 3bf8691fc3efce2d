"""verl: Hydra overrides of its PPO trainer, with the plan on the actor: Megatron or FSDP2 below.

The plan prices the actor's update: forward and backward of ``ppo_mini_batch_size`` sequences. Generation and log
probabilities run on the same GPUs before it and were not priced.
"""

from typing import Any

from planner.layout import Recompute
from planner.trainers.accelerate import export as accelerate
from planner.trainers.bundle.quoting import Expression, filled, filled_yaml, hydra_value
from planner.trainers.bundle.run_file import run_of
from planner.trainers.bundle.serving import serving
from planner.trainers.bundle.target import ExportJob, Rendered, library_trainer, unknown_choices
from planner.trainers.megatron import core_settings as mcore
from planner.trainers.megatron.core_refusals import refusals as core_refusals

ACTOR = "actor_rollout_ref.actor"
OPTIMIZERS = ("adam", "adam_bf16", "sgd")
"""Megatron's optimizers that verl passes on with plain settings."""
PRECISIONS = ("bf16", "fp16", "fp8", "fp8_block", "mxfp8")
"""McoreEngineConfig takes bfloat16 or float16, and fp8 on top of bf16."""
FSDP_OPTIMIZERS = {"adam": ("AdamW", "torch.optim"), "adam_8bit": ("_AdamW8bit", "torchao.optim")}
"""Optimizer -> optim.optimizer and optim.optimizer_impl of verl's FSDP engine."""
RAY_PORT = 6379


def _megatron(job: ExportJob) -> bool:
    return library_trainer(job.plan.trainer) == "megatron"


def refusals(job: ExportJob) -> list[str]:
    """What verl or the back end below it cannot run, with its rule."""
    work, found = job.workload, []
    gpus, batch = job.cluster.num_gpus, work.global_batch_size
    if job.num_nodes > 1 and gpus % job.gpus_per_node:
        found.append(
            f"{gpus} GPUs on nodes of {job.gpus_per_node}: verl counts trainer.nnodes x trainer.n_gpus_per_node, equal on all; "
            "plan for whole nodes"
        )
    if work.sequence_length < 2:
        found.append(
            f"a sequence of {work.sequence_length} token has no room for prompt and answer; plan for longer ones"
        )
    if _megatron(job):
        return found + _megatron_refusals(job)
    found += unknown_choices(job, "verl's FSDP engine", FSDP_OPTIMIZERS, ("bf16", "fp16"))
    found += [one for one in accelerate.refusals(job) if not one.startswith(("optimizer ", "precision "))]
    if batch % gpus:
        found.append(
            f"global batch {batch} on {gpus} GPUs: with FSDP verl wants a batch that divides by all GPUs "
            f"[utils/config.py: validate_config]; the nearest is {max(1, round(batch / gpus)) * gpus}"
        )
    if job.layout.zero == 0 and job.layout.dp > 1:
        found.append("zero 0: verl's FSDP engine always shards states; use zero 2 or 3")
    return found


def _megatron_refusals(job: ExportJob) -> list[str]:
    layout, work = job.layout, job.workload
    found = [one for one in core_refusals(job, "verl", OPTIMIZERS, PRECISIONS) if not one.startswith("lora_rank")]
    if layout.order != 0:
        found.append("rank order: verl builds Megatron's default groups; price the plan with --order tp-cp-ep-dp-pp")
    if layout.tp > 1 and not layout.sequence_parallel:
        found.append(f"tp {layout.tp} without sequence_parallel: the plan must say true, which verl sets by default")
    replicas = layout.dp * layout.micro_batch_size
    if work.global_batch_size % replicas:
        found.append(
            f"global batch {work.global_batch_size} is no multiple of dp x micro batch = {replicas} [validate_config]"
        )
    return found


def overrides(job: ExportJob) -> list[str]:
    """Hydra overrides, one per line. A leading + adds a key to one of verl's free dictionaries."""
    length = job.workload.sequence_length
    pairs: dict[str, Any] = filled_yaml(
        job, "verl", "overrides.txt", prompt=length - length // 2, answer=length // 2, rollout=_rollout(job)
    )
    pairs |= _megatron_pairs(job) if _megatron(job) else _fsdp_pairs(job)
    return [f"{name}={hydra_value(value)}" for name, value in pairs.items()]


def _rollout(job: ExportJob) -> int:
    """Tensor parallel degree of generation: the serving layout's, within a node."""
    one = serving(job)
    return one.tp if one and one.nodes == 1 else job.gpus_per_node


def _megatron_pairs(job: ExportJob) -> dict[str, Any]:
    layout, work, overlap = job.layout, job.workload, job.trainer.traffic.overlap
    chunks, shards = len(job.layers_per_chunk()[0]), mcore.shards_states(job)
    pairs: dict[str, Any] = filled_yaml(
        job, "verl", "megatron.txt", chunks=chunks if chunks > 1 else None, expert=layout.etp if job.model.is_moe else None,
        split=bool(layout.sequence_parallel), sharded=shards, dtype="float16" if work.precision == "fp16" else "bfloat16",
        wide=mcore.sums_in_fp32(job), reduce="gradients" in overlap, gather=shards and "parameters" in overlap,
    )  # fmt: skip
    modules = job.model.mtp_layers > 0
    return {
        **pairs, **_transformer_pairs(job, f"{ACTOR}.megatron.override_transformer_config"), **_optimizer_pairs(job),
        "actor_rollout_ref.model.mtp.enable": modules, "actor_rollout_ref.model.mtp.enable_train": modules,
        **({"actor_rollout_ref.model.lora.rank": work.lora_rank} if work.lora_rank else {}),
    }  # fmt: skip


def _transformer_pairs(job: ExportJob, where: str) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig, which Megatron-Bridge sets on its model provider."""
    layout = job.layout
    none = dict.fromkeys(("recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers"))
    own = {"attention_backend": mcore.attention_backend(job), **none, **mcore.recompute(job)}
    pairs: dict[str, Any] = {f"{where}.{name}": value for name, value in own.items()}
    if layout.pp > 1:
        pairs[f"+{where}.pipeline_model_parallel_layout"] = f"'{mcore.pipeline_layout(job)}'"
    if layout.cp > 1:
        pairs[f"+{where}.cp_comm_type"] = mcore.CP_TYPES[layout.cp_method]
    form, recipe = mcore.precision_recipe(job)
    if form:
        pairs |= {f"+{where}.fp8": form, f"+{where}.fp8_recipe": recipe}
    if job.model.is_moe:
        pairs[f"+{where}.moe_grouped_gemm"] = True
    return pairs


def _optimizer_pairs(job: ExportJob) -> dict[str, Any]:
    """Moments, and states on the host: Megatron's CPU optimizer, not verl's optimizer_offload, which moves them back to step."""
    optim, work, share = f"{ACTOR}.optim", job.workload, job.layout.offload_optimizer
    lean = mcore.lean_optimizer(job)
    name, moments = mcore.OPTIMIZERS[work.optimizer]
    pairs: dict[str, Any] = {
        f"{optim}.optimizer": name, f"{optim}.use_precision_aware_optimizer": lean,
        f"{optim}.main_grads_dtype": "fp32", f"{optim}.exp_avg_dtype": moments, f"{optim}.exp_avg_sq_dtype": moments,
    }  # fmt: skip
    if share:
        more = f"+{optim}.override_optimizer_config"
        pairs |= {
            f"{more}.optimizer_cpu_offload": True, f"{more}.optimizer_offload_fraction": share / 100,
            f"{more}.overlap_cpu_optimizer_d2h_h2d": True,
        }  # fmt: skip
    return pairs


def _fsdp_pairs(job: ExportJob) -> dict[str, Any]:
    layout, work = job.layout, job.workload
    optimizer, package = FSDP_OPTIMIZERS[work.optimizer]
    found: dict[str, Any] = filled_yaml(
        job, "verl", "fsdp.txt", size=-1 if job.shard == layout.dp else job.shard, reshard=layout.zero == 3,
        prefetch="parameters" in job.trainer.traffic.overlap, dtype="float16" if work.precision == "fp16" else "bfloat16",
        recompute=layout.recompute == Recompute.FULL, offload=bool(layout.offload_activations), optimizer=optimizer,
        package=package,
    )  # fmt: skip
    return found


def render(job: ExportJob) -> Rendered:
    """The overrides in a file, a Ray cluster over the nodes, the trainer on the first of them."""
    files = {
        "overrides.txt": "\n".join(overrides(job)) + "\n",
        "make_prompts.py": filled("verl", "make_prompts.txt", rows=str(2 * job.workload.global_batch_size)),
    }
    more: dict[str, Any] = {"prepare": _cluster() if job.num_nodes > 1 else ()}
    if _megatron(job):
        more |= {"environment": mcore.environment(job), "install": ("pip install megatron-bridge megatron-core",)}
    name = Expression("ppo_megatron_trainer" if _megatron(job) else "ppo_trainer")
    return run_of(job, "verl", files, more, config=name, rollout=_rollout(job))


def _cluster() -> tuple[str, ...]:
    return (
        "# One Ray cluster over all nodes; the first one drives, the others serve until it ends.",
        'if [ "$NODE_RANK" = 0 ]; then',
        f'    ray start --head --node-ip-address="$MASTER_ADDR" --port={RAY_PORT} --num-gpus="$GPUS_PER_NODE"',
        "else",
        f'    exec ray start --address="$MASTER_ADDR:{RAY_PORT}" --num-gpus="$GPUS_PER_NODE" --block',
        "fi",
    )
