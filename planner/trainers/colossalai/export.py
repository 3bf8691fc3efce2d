"""Colossal-AI: arguments of HybridParallelPlugin or, with experts, MoeHybridParallelPlugin, and a script around them."""

from __future__ import annotations

import json
from typing import Any

from planner.layout import Order, Recompute, Schedule
from planner.trainers.bundle.model_config import config_text, family
from planner.trainers.bundle.target import ExportJob, Rendered, Setting, Target

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "gpt2", "opt")
"""Families with a policy for causal language models [shardformer/policies/auto_policy.py] that transformers itself defines."""
STYLES: dict[int, str] = {Schedule.ONE_F_ONE_B: "1f1b", Schedule.INTERLEAVED: "interleaved"}
ROWS = 64
"""make_vocab_size_divisible_by."""


def refusals(job: ExportJob) -> list[str]:
    """What the plugins refuse, run into, or change without saying so, with their rule."""
    return [*_degree_refusals(job), *_training_refusals(job)]


def _degree_refusals(job: ExportJob) -> list[str]:
    layout, model, found = job.layout, job.model, []
    tp, cp, pp, kv = int(layout.tp), int(layout.cp), int(layout.pp), job.model.num_kv_heads
    if int(layout.zero) > (1 if pp > 1 or model.is_moe else 2):
        rule = (
            "zero stage must be 0 or 1 with a pipeline"
            if pp > 1
            else "the MoE plugin turns 2 into 1"
            if model.is_moe
            else "0, 1 or 2"
        )
        found.append(f"zero {layout.zero} with pp {pp}: {rule} [hybrid_parallel_plugin.py]; use zero 1")
    if cp > 1 and tp > 1:
        found.append(
            f"cp {cp} with tp {tp}: the mesh is (dp, pp, tp, sp), sequence ranks are next to each other and tensor ranks apart, "
            "which is not what was priced; use one of them"
        )
    if cp > 1 and int(layout.sequence_parallel):
        found.append(
            "cp with sequence_parallel: one sequence_parallelism_mode at a time (all_to_all or split_gather); use tp 1"
        )
    if tp > 1 and kv % tp:
        found.append(
            f"tp {tp}: the policies assert that the {kv} key-value heads divide by it [policies/llama.py]; choose a divisor"
        )
    if cp > 1 and (model.num_heads % cp or kv % cp):
        found.append(
            f"cp {cp}: all_to_all deals {model.num_heads} heads and {kv} key-value heads to the ranks; choose a common divisor"
        )
    if model.is_moe and pp > 1 and (cp > 1 or int(layout.sequence_parallel)):
        found.append(
            "experts with pp and sequence parallelism: not implemented [policies/mixtral.py]; use pp 1 or tp 1"
        )
    if int(layout.order) == Order.TP_CP_DP_PP_EP:
        found.append(
            "rank order tp-cp-dp-pp-ep: experts lie next to tp in the mesh of the plugin; price with --order tp-cp-ep-dp-pp"
        )
    if int(layout.dp_shard) not in (0, int(layout.dp)):
        found.append(f"dp_shard {layout.dp_shard}: ZeRO shards over all {layout.dp} ranks; use 0")
    if family(model) not in FAMILIES:
        found.append(f"{model.name}: no policy of Shardformer for its layers; there are some for {', '.join(FAMILIES)}")
    return found


def _training_refusals(job: ExportJob) -> list[str]:
    layout, work, found = job.layout, job.workload, []
    pp, microbatches = int(layout.pp), int(layout.num_microbatches)
    if pp > 1 and int(layout.schedule) not in STYLES:
        found.append(
            "the schedule is none of pp_style 1f1b and interleaved (zbv needs a table of its own); use one of them"
        )
    if int(layout.schedule) == Schedule.INTERLEAVED and microbatches % pp:
        found.append(
            f"{microbatches} microbatches on {pp} stages: the interleaved schedule asserts that they divide [interleaved_pp.py]; "
            f"the nearest is {max(1, round(microbatches / pp)) * pp}"
        )
    if int(layout.recompute) == Recompute.SELECTIVE or int(layout.recompute_layers):
        found.append(
            "recompute of modules or of a part of the layers: exported is gradient checkpointing of all layers; use full or none"
        )
    if int(layout.offload_optimizer) or int(layout.offload_activations):
        found.append("offload: cpu_offload keeps all states on the host, which was not priced; plan without offload")
    if work.precision not in ("bf16", "fp16", "fp32"):
        found.append(f"precision {work.precision}: the plugin's precision is bf16, fp16 or fp32; use bf16")
    if work.optimizer not in OPTIMIZERS:
        found.append(f"optimizer {work.optimizer}: exported are {', '.join(OPTIMIZERS)}; use adam")
    if work.lora_rank:
        found.append(f"lora_rank {work.lora_rank}: the plugin's LoRA is not exported; plan without --lora-rank")
    return found


OPTIMIZERS = ("adam", "sgd")


def plugin(job: ExportJob) -> dict[str, Any]:
    """Arguments of the plugin, every one that the plan decides and those whose defaults would change it."""
    layout, model = job.layout, job.model
    pp, cp, split = int(layout.pp), int(layout.cp), bool(layout.sequence_parallel)
    stages = [len(layers) for _, _, layers in job.virtual_stages()]
    data: dict[str, Any] = {
        "tp_size": int(layout.tp),
        "pp_size": pp,
        "sp_size": cp if cp > 1 else 1,
        "enable_sequence_parallelism": cp > 1 or split,
        "sequence_parallelism_mode": "all_to_all" if cp > 1 else "split_gather" if split else None,
        "zero_stage": int(layout.zero),
        "precision": job.workload.precision,
        "num_microbatches": int(layout.num_microbatches) if pp > 1 else None,
        "pp_style": STYLES.get(int(layout.schedule), "1f1b"),
        "num_model_chunks": len(stages) // pp,
        "num_layers_per_stage": stages if pp > 1 else None,
        "enable_flash_attention": True,
        "enable_fused_normalization": True,
        "enable_jit_fused": False,
        "parallel_output": True,
        "overlap_communication": int(layout.zero) > 0 and not model.is_moe,
        "overlap_p2p": "pipeline" in job.trainer.traffic.overlap,
        "make_vocab_size_divisible_by": ROWS,
        "initial_scale": 65536,
        "max_norm": 1.0,
    }
    outside = int(layout.order) == Order.TP_CP_EP_PP_DP
    return (
        {**data, "ep_size": int(layout.ep), "moe_dp_outside": outside}
        if model.is_moe
        else {**data, "dp_outside": outside}
    )


def render(job: ExportJob) -> Rendered:
    """plan.json with the arguments, model/config.json with the sizes, train.py."""
    layout, work = job.layout, job.workload
    settings = {
        "plugin": plugin(job), "moe": job.model.is_moe, "micro_batch_size": int(layout.micro_batch_size),
        "num_microbatches": int(layout.num_microbatches), "sequence_length": work.sequence_length,
        "recompute": int(layout.recompute) == Recompute.FULL, "optimizer": work.optimizer,
    }  # fmt: skip
    rows = ROWS * int(layout.tp)
    return Rendered(
        files={
            "plan.json": json.dumps(settings, indent=2) + "\n",
            "model/config.json": config_text(job.model) or "",
            "train.py": _TRAIN,
        },
        entry=("train.py", "--steps", "$STEPS", "--data", "$DATA", "--output", "$OUTPUT"),
        smoke=("train.py", "--steps", "3", "--data", ""),
        environment={
            "CUDA_DEVICE_MAX_CONNECTIONS": Setting(
                value="1", why="Communication is issued in program order, as Colossal-AI's own launch scripts do."
            )
        },
        variables={
            "STEPS": Setting(value="1000", why="Optimizer steps."),
            "DATA": Setting(value="", why="NumPy file of token numbers, one row per sequence; empty: random tokens."),
            "OUTPUT": Setting(value="output", why="Folder of the checkpoint."),
        },
        notes=(
            "Colossal-AI 0.5.0 asks for torch <= 2.5.1 and transformers 4.51.3: use an environment of its own.",
            "Priced with the profile colossalai, for which no published run is known: expect the wide interval of the table.",
        ),
        vocab_rows=-(-job.model.vocab_size // rows) * rows,
        install=(f"pip install 'colossalai{TARGET.versions}' 'torch<=2.5.1' flash-attn",),
    )


_TRAIN = '''"""Trains the model of model/config.json with the plugin arguments of plan.json."""

import argparse
import json
import time

import colossalai
import numpy
import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin, MoeHybridParallelPlugin
from colossalai.lazy import LazyInitContext
from colossalai.nn.optimizer import HybridAdam
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--data", default="", help="NumPy file of token numbers; empty: random ones")
parser.add_argument("--output", default="", help="folder of the checkpoint; empty: none")
options = parser.parse_args()

colossalai.launch_from_torch()
with open("plan.json", encoding="utf-8") as stream:
    plan = json.load(stream)
make = MoeHybridParallelPlugin if plan["moe"] else HybridParallelPlugin
plugin = make(**plan["plugin"])
booster = Booster(plugin=plugin)
config = AutoConfig.from_pretrained("model")
config.use_cache = False
dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[plan["plugin"]["precision"]]
with LazyInitContext(default_device=torch.device("cuda", torch.cuda.current_device())):
    model = AutoModelForCausalLM.from_config(config, torch_dtype=dtype)
if plan["recompute"]:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
weights = model.parameters()
optimizer = HybridAdam(weights, lr=3e-4) if plan["optimizer"] == "adam" else torch.optim.SGD(weights, lr=3e-4, momentum=0.9)
model, optimizer, *_ = booster.boost(model, optimizer)
counted = sum(weight.numel() for weight in model.parameters())
print(f"rank {torch.distributed.get_rank()}: {counted:,} parameters", flush=True)

pipeline = plan["plugin"]["pp_size"] > 1
replica, replicas = torch.distributed.get_rank(plugin.dp_group), torch.distributed.get_world_size(plugin.dp_group)
local = plan["micro_batch_size"] * plan["num_microbatches"]
texts = numpy.load(options.data, mmap_mode="r") if options.data else None
generator = torch.Generator().manual_seed(replica)


def batch(step, first, number):
    """Token numbers of some of this replica's sequences."""
    if texts is None:
        tokens = torch.randint(config.vocab_size, (number, plan["sequence_length"]), generator=generator)
    else:
        start = ((step * replicas + replica) * local + first) % (len(texts) - number + 1)
        tokens = torch.from_numpy(numpy.ascontiguousarray(texts[start : start + number]).astype("int64"))
    tokens = tokens.cuda()
    return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


for step in range(options.steps):
    began = time.perf_counter()
    if pipeline:
        data = iter([batch(step, 0, local)])
        found = booster.execute_pipeline(data, model, lambda out, _: out.loss, optimizer, return_loss=True)
        loss = found["loss"]
    else:
        total = 0.0
        for micro in range(plan["num_microbatches"]):
            out = model(**batch(step, micro * plan["micro_batch_size"], plan["micro_batch_size"]))
            part = out.loss / plan["num_microbatches"]
            if micro + 1 < plan["num_microbatches"]:
                with booster.no_sync(model, optimizer):
                    booster.backward(part, optimizer)
            else:
                booster.backward(part, optimizer)
            total += part.item()
        loss = total
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    if loss is not None and replica == 0:
        used = torch.cuda.max_memory_allocated() / 2**30
        print(f"step {step}: loss {float(loss):.4f}, {time.perf_counter() - began:.3f} s, {used:.1f} GiB", flush=True)
if options.output:
    booster.save_model(model, options.output, shard=True)
'''

TARGET = Target(
    name="colossalai",
    title="Colossal-AI (plugin arguments and a script)",
    trainers=("colossalai",),
    versions=">=0.5,<0.6",
    package="colossalai",
    level="name known",
    source="colossalai 0.5.0: booster/plugin/hybrid_parallel_plugin.py, pipeline/stage_manager.py, shardformer/policies",
    refusals=refusals,
    render=render,
)
