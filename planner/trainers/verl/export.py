"""verl: Hydra overrides of its PPO trainer, with the plan on the actor: Megatron or FSDP2 below.

The plan prices the actor's update: forward and backward of ``ppo_mini_batch_size`` sequences. Generation and log
probabilities run on the same GPUs before it and were not priced.
"""

from __future__ import annotations

from typing import Any

from planner.layout import Recompute
from planner.trainers.accelerate import export as accelerate
from planner.trainers.bundle.serving import serving
from planner.trainers.bundle.target import ExportJob, Rendered, Setting, Target, library_trainer
from planner.trainers.megatron import core_settings as mcore

ACTOR = "actor_rollout_ref.actor"
OPTIMIZERS = {"adam": "adam", "adam_bf16": "adam", "sgd": "sgd"}
"""Names of Megatron's optimizers that verl passes on with plain settings."""
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
    found += accelerate.refusals(job)
    if batch % gpus:
        found.append(
            f"global batch {batch} on {gpus} GPUs: with FSDP verl wants a batch that divides by all GPUs "
            f"[utils/config.py: validate_config]; the nearest is {max(1, round(batch / gpus)) * gpus}"
        )
    if int(job.layout.zero) == 0 and int(job.layout.dp) > 1:
        found.append("zero 0: verl's FSDP engine always shards states; use zero 2 or 3")
    if work.precision not in ("bf16", "fp16"):
        found.append(f"precision {work.precision}: verl's FSDP engine computes in bfloat16 or float16; use bf16")
    if work.optimizer not in ("adam", "adam_8bit"):
        found.append(
            f"optimizer {work.optimizer}: verl's FSDP engine is exported with AdamW, whole or in 8 bits; use adam"
        )
    return found


def _megatron_refusals(job: ExportJob) -> list[str]:
    layout, work = job.layout, job.workload
    found = [one for one in mcore.refusals(job) if not one.startswith("lora_rank")]
    if int(layout.order) != 0:
        found.append("rank order: verl builds Megatron's default groups; price the plan with --order tp-cp-ep-dp-pp")
    if work.optimizer not in OPTIMIZERS:
        found.append(f"optimizer {work.optimizer}: exported to verl are {', '.join(OPTIMIZERS)}; use one of them")
    if work.precision not in ("bf16", "fp16", "fp8", "fp8_block", "mxfp8"):
        found.append(
            f"precision {work.precision}: McoreEngineConfig takes bfloat16 or float16, and fp8 on top of bf16; use bf16"
        )
    if int(layout.tp) > 1 and not int(layout.sequence_parallel):
        found.append(f"tp {layout.tp} without sequence_parallel: the plan must say true, which verl sets by default")
    replicas = int(layout.dp) * int(layout.micro_batch_size)
    if work.global_batch_size % replicas:
        found.append(
            f"global batch {work.global_batch_size} is no multiple of dp x micro batch = {replicas} [validate_config]"
        )
    return found


def overrides(job: ExportJob) -> list[str]:
    """Hydra overrides, one per line. A leading + adds a key to one of verl's free dictionaries."""
    work, rollout = job.workload, _rollout(job)
    answer = work.sequence_length // 2
    pairs: dict[str, Any] = {
        "trainer.nnodes": job.num_nodes,
        "trainer.n_gpus_per_node": job.gpus_per_node,
        "trainer.logger": "[console]",
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.critic_warmup": 0,
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "critic.enable": False,
        "data.train_batch_size": work.global_batch_size,
        "data.max_prompt_length": work.sequence_length - answer,
        "data.max_response_length": answer,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": 1,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": rollout,
        "actor_rollout_ref.rollout.pipeline_model_parallel_size": 1,
        "actor_rollout_ref.rollout.data_parallel_size": 1,
        "actor_rollout_ref.rollout.expert_parallel_size": 1,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": int(job.layout.micro_batch_size),
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": int(job.layout.micro_batch_size),
        f"{ACTOR}.use_dynamic_bsz": False,
        f"{ACTOR}.use_kl_loss": False,
        f"{ACTOR}.ppo_epochs": 1,
        f"{ACTOR}.ppo_mini_batch_size": work.global_batch_size,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": int(job.layout.micro_batch_size),
    }
    pairs |= _megatron_pairs(job) if _megatron(job) else _fsdp_pairs(job)
    return [f"{name}={_value(value)}" for name, value in pairs.items()]


def _value(value: Any) -> str:
    """A value in Hydra's grammar."""
    if value is None:
        return "null"
    return str(value) if not isinstance(value, list) else "[" + ",".join(map(str, value)) + "]"


def _rollout(job: ExportJob) -> int:
    """Tensor parallel degree of generation: the serving layout's, within a node."""
    one = serving(job)
    return one.tp if one and one.nodes == 1 else job.gpus_per_node


def _megatron_pairs(job: ExportJob) -> dict[str, Any]:
    layout, work, engine = job.layout, job.workload, f"{ACTOR}.megatron"
    chunks = len(job.layers_per_chunk()[0])
    moe = job.model.is_moe
    return {
        f"{engine}.tensor_model_parallel_size": int(layout.tp),
        f"{engine}.pipeline_model_parallel_size": int(layout.pp),
        f"{engine}.virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        f"{engine}.context_parallel_size": int(layout.cp),
        f"{engine}.expert_model_parallel_size": int(layout.ep),
        f"{engine}.expert_tensor_parallel_size": int(layout.etp) if moe else None,
        f"{engine}.sequence_parallel": bool(layout.sequence_parallel),
        f"{engine}.use_distributed_optimizer": mcore.shards_states(job),
        f"{engine}.param_offload": False,
        f"{engine}.optimizer_offload": False,
        f"{engine}.use_mbridge": True,
        f"{engine}.vanilla_mbridge": False,
        f"{engine}.use_megatron_fsdp": False,
        f"{engine}.dtype": "float16" if work.precision == "fp16" else "bfloat16",
        f"+{engine}.override_ddp_config.grad_reduce_in_fp32": mcore.sums_in_fp32(job),
        f"+{engine}.override_ddp_config.overlap_grad_reduce": "gradients" in job.trainer.traffic.overlap,
        f"+{engine}.override_ddp_config.overlap_param_gather": mcore.shards_states(job)
        and "parameters" in job.trainer.traffic.overlap,
        **_transformer_pairs(job, f"{engine}.override_transformer_config"),
        **_optimizer_pairs(job),
        "actor_rollout_ref.model.mtp.enable": job.model.mtp_layers > 0,
        "actor_rollout_ref.model.mtp.enable_train": job.model.mtp_layers > 0,
        **({"actor_rollout_ref.model.lora.rank": work.lora_rank} if work.lora_rank else {}),
    }


def _transformer_pairs(job: ExportJob, where: str) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig, which Megatron-Bridge sets on its model provider."""
    layout, mode = job.layout, int(job.layout.recompute)
    pairs: dict[str, Any] = {
        f"{where}.attention_backend": mcore.attention_backend(job),
        f"{where}.recompute_granularity": {Recompute.FULL: "full", Recompute.SELECTIVE: "selective"}.get(
            Recompute(mode)
        ),
        f"{where}.recompute_modules": mcore.recompute_modules(job) if mode == Recompute.SELECTIVE else None,
        f"{where}.recompute_method": "block" if mode == Recompute.FULL else None,
        f"{where}.recompute_num_layers": mcore.layers_to_recompute(job) if mode == Recompute.FULL else None,
    }
    if int(layout.pp) > 1:
        pairs[f"+{where}.pipeline_model_parallel_layout"] = f"'{mcore.pipeline_layout(job)}'"
    if int(layout.cp) > 1:
        pairs[f"+{where}.cp_comm_type"] = mcore.CP_TYPES[int(layout.cp_method)]
    form, recipe = mcore.precision_recipe(job)
    if form:
        pairs |= {f"+{where}.fp8": form, f"+{where}.fp8_recipe": recipe}
    if job.model.is_moe:
        pairs[f"+{where}.moe_grouped_gemm"] = True
    return pairs


def _optimizer_pairs(job: ExportJob) -> dict[str, Any]:
    """Moments, and states on the host: Megatron's CPU optimizer, not verl's optimizer_offload, which moves them back to step."""
    optim, work, share = f"{ACTOR}.optim", job.workload, int(job.layout.offload_optimizer)
    lean = mcore.lean_optimizer(job)
    moments = "bf16" if work.optimizer == "adam_bf16" else "fp32"
    pairs: dict[str, Any] = {
        f"{optim}.optimizer": OPTIMIZERS[work.optimizer], f"{optim}.use_precision_aware_optimizer": lean,
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
    layout, work, engine = job.layout, job.workload, f"{ACTOR}.fsdp_config"
    shard = int(layout.shard)
    pairs: dict[str, Any] = {
        f"{ACTOR}.strategy": "fsdp2",
        "actor_rollout_ref.ref.strategy": "fsdp2",
        f"{engine}.fsdp_size": -1 if shard == int(layout.dp) else shard,
        f"{engine}.reshard_after_forward": int(layout.zero) == 3,
        f"{engine}.param_offload": False,
        f"{engine}.optimizer_offload": False,
        f"{engine}.offload_policy": False,
        f"{engine}.forward_prefetch": "parameters" in job.trainer.traffic.overlap,
        f"{engine}.model_dtype": "fp32",
        f"{engine}.dtype": "float16" if work.precision == "fp16" else "bfloat16",
        f"{engine}.ulysses_sequence_parallel_size": 1,
        "actor_rollout_ref.model.enable_gradient_checkpointing": int(layout.recompute) == Recompute.FULL,
        "actor_rollout_ref.model.enable_activation_offload": bool(layout.offload_activations),
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.lora_rank": work.lora_rank,
    }
    if work.optimizer == "adam_8bit":
        pairs |= {f"{ACTOR}.optim.optimizer": "_AdamW8bit", f"{ACTOR}.optim.optimizer_impl": "torchao.optim"}
    else:
        pairs |= {f"{ACTOR}.optim.optimizer": "AdamW", f"{ACTOR}.optim.optimizer_impl": "torch.optim"}
    return pairs


def render(job: ExportJob) -> Rendered:
    """The overrides in a file, a Ray cluster over the nodes, the trainer on the first of them."""
    name = "ppo_megatron_trainer" if _megatron(job) else "ppo_trainer"
    common = ("python", "-m", "verl.trainer.main_ppo", f"--config-name={name}", "${overrides[@]}")
    words = (*common, "actor_rollout_ref.model.path=$MODEL")
    smoke = ("trainer.total_training_steps=2", "trainer.save_freq=-1", "trainer.resume_mode=disable")
    return Rendered(
        files={
            "overrides.txt": "\n".join(overrides(job)) + "\n",
            "make_prompts.py": _PROMPTS.format(rows=2 * job.workload.global_batch_size),
        },
        entry=(*words, "data.train_files=$TRAIN_FILES", "data.val_files=$TRAIN_FILES"),
        smoke=(*words, "data.train_files=prompts.parquet", "data.val_files=prompts.parquet", *smoke),
        prepare=_prepare(job),
        start="once",
        keeps_ranks=False,
        environment=mcore.environment(job) if _megatron(job) else {},
        variables={
            "MODEL": Setting(value=None, why="Folder or hub name of the model in Hugging Face format."),
            "TRAIN_FILES": Setting(
                value="prompts.parquet", why="Parquet file of prompts with rewards; prompts.parquet is made up here."
            ),
        },
        notes=(
            "The plan priced the actor's update, sequences of the full length: generation, rewards and log probabilities come on "
            "top, and their memory (KV cache, weights of the rollout) stays within rollout.gpu_memory_utilization.",
            "Half of the sequence is prompt and half answer; one answer per prompt (rollout.n): with n answers divide "
            "data.train_batch_size and ppo_mini_batch_size by n to keep the batch.",
            f"Generation has its own layout: tensor parallel {_rollout(job)}.",
        ),
        install=(
            f"pip install 'verl{TARGET.versions}' vllm",
            *(("pip install megatron-bridge megatron-core",) if _megatron(job) else ()),
        ),
    )  # fmt: skip


def _prepare(job: ExportJob) -> tuple[str, ...]:
    lines = [
        "mapfile -t overrides < overrides.txt",
        "# Random prompts for the smoke run, written once.",
        "[ -f prompts.parquet ] || python make_prompts.py",
    ]
    if job.num_nodes > 1:
        lines += [
            "# One Ray cluster over all nodes; the first one drives, the others serve until it ends.",
            'if [ "$NODE_RANK" = 0 ]; then',
            f'    ray start --head --node-ip-address="$MASTER_ADDR" --port={RAY_PORT} --num-gpus="$GPUS_PER_NODE"',
            "else",
            f'    exec ray start --address="$MASTER_ADDR:{RAY_PORT}" --num-gpus="$GPUS_PER_NODE" --block',
            "fi",
        ]
    return tuple(lines)


_PROMPTS = '''"""Writes prompts.parquet: made-up sums with their answers, in the columns that verl reads."""

import os
import random

import pandas

generator, rows = random.Random(0), []
for number in range({rows}):
    a, b = generator.randrange(1000), generator.randrange(1000)
    rows.append({{
        "data_source": "openai/gsm8k",
        "prompt": [{{"role": "user", "content": f"What is {{a}} + {{b}}? End with #### and the number."}}],
        "ability": "math",
        "reward_model": {{"style": "rule", "ground_truth": str(a + b)}},
        "extra_info": {{"split": "train", "index": number}},
    }})
temporary = f".prompts.{{os.getpid()}}.parquet"
pandas.DataFrame(rows).to_parquet(temporary)
os.replace(temporary, "prompts.parquet")
'''

TARGET = Target(
    name="verl",
    title="verl (Hydra overrides, Megatron or FSDP2 actor)",
    trainers=("megatron", "fsdp"),
    versions=">=0.9.1,<0.10",
    package="verl",
    level="validated",
    source="verl 0.9.1: trainer/config, workers/config/engine.py, workers/config/actor.py, utils/config.py",
    refusals=refusals,
    render=render,
)
