"""NeMo-RL: the training part of its YAML, of SFT, DPO and the policy of reinforcement learning."""

import dataclasses
import re
from pathlib import Path

from planner.errors import PlannerError, shown
from planner.layout import CpMethod, Recompute
from planner.model import ModelSpec
from planner.trainer_options import spell
from planner.trainers.automodel.readback import by_parts
from planner.trainers.megatron.recompute_words import of_dense_layers, recompute
from planner.trainers.megatron_bridge.decisive import without_layers
from planner.trainers.reading.commands import launched
from planner.trainers.reading.configuration import Reading, batch_that_divides, reduced_last
from planner.trainers.reading.fine_tuning import adapter_targets, layers_beside, optimizer
from planner.trainers.reading.given import CONFIG_FILE, Given, Question, ask
from planner.trainers.reading.interpolation import extended, override, resolved
from planner.trainers.reading.megatron_degrees import degrees, states_on_the_host
from planner.trainers.reading.named_models import named_model
from planner.trainers.reading.settings import Settings, beside, parsed
from planner.trainers.reading.shell import shown_text
from planner.trainers.reading.values import not_priced, quotient

FP8 = {"blockwise": "fp8_block", "tensorwise": "fp8", "delayed": "fp8", "mxfp8": "mxfp8"}
PACKED = ("sequence_packing", "dynamic_batching")
"""Sections that fill micro batches by their tokens."""
READ_HERE = re.compile(
    r"policy\.(dtensor_cfg|megatron_cfg)\.(custom_parallel_plan|model_overrides.*|freeze_moe_router.*|use_linear_ce\w*"
    r"|defer_fp32_logits|automodel_kwargs.*|defer_fsdp_grad_sync|moe_parallelizer.*|freeze_config.*|mtp_\w+)|policy\.hf_config_overrides.*"
)
"""Of all other settings those are shown that may change time or memory of the step; generation is not part of the plan."""


FIRST = "dtensor_cfg.enabled is false: FSDP of a whole model, as NeMo-RL until 0.2 takes then; later ones refuse it"
OF_FIRST = (
    "enabled", "cpu_offload", "sequence_parallel", "activation_checkpointing", "tensor_parallel_size", "context_parallel_size",
    "custom_parallel_plan",
)
"""Words of dtensor_cfg as long as the first worker was there, until 2025-07."""
PROGRAM = r"\S*run_(?:sft|dpo|grpo|distillation)\w*\.py"
USUAL = {
    "run_sft.py": "sft.yaml", "run_dpo.py": "dpo.yaml", **dict.fromkeys(("run_grpo.py", "run_grpo_math.py"), "grpo_math_1B.yaml"),
}  # fmt: skip
"""What its programs read where their command names nothing.  [examples/run_sft.py, run_dpo.py, run_grpo.py]"""


def read(path: Path, said: Given) -> Reading:
    """The job of a file, or of a script that starts one with overrides. Raises PlannerError."""
    if path.suffix not in (".yaml", ".yml"):
        return _started(path, said)
    return parse(Settings(path, resolved(said.filled(extended(path, "a configuration of NeMo-RL"))), said=said), said.num_gpus)


def _started(path: Path, said: Given) -> Reading:
    """The job of a command: the file after --config, or the usual one beside its program, under its overrides."""
    found = launched(path, said, PROGRAM)
    program = shown_text(found.program)
    usual = f"{program.rpartition('/')[0]}/configs/{USUAL.get(program.rpartition('/')[2], '')}"
    name = said.setting(CONFIG_FILE) or str(found.settings.get("config") or usual)
    file = beside(path, name, (".yaml", ".yml"))
    if file is None:
        about = f"it names {shown(shown_text(name))}, which is not there; or import that file"
        ask(str(path), [Question(name=CONFIG_FILE, about=about, choices=("FILE",))])
    words = {key.lstrip("+~"): parsed(value) for key, _, value in (one.partition("=") for one in found.words if "=" in one)}
    data = override(extended(file, "a configuration of NeMo-RL"), words)
    reading = parse(Settings(path, resolved(said.filled(data)), said=said), said.num_gpus)
    return dataclasses.replace(reading, notes=(*reading.notes, *found.notes))


def parse(given: Settings, num_gpus: int | None = None) -> Reading:
    """The job that settings describe. Raises PlannerError."""
    policy, cluster = given.section("policy"), given.section("cluster")
    if policy.get("model_name") is None or policy.get("train_global_batch_size") is None:
        raise PlannerError(f"{given.path}: policy.model_name or policy.train_global_batch_size is missing: no job of NeMo-RL")
    name = str(policy.get("model_name"))
    model, notes = named_model(name, given.path)
    core = policy.section("megatron_cfg")
    native = not core.flag("enabled")
    first = native and not policy.section("dtensor_cfg").flag("enabled", True)
    fields = _first(policy) if first else _native(policy.section("dtensor_cfg")) if native else _megatron(core)
    if given.get("rm") is not None:
        raise PlannerError(f"{given.path}: training of a reward model is not modelled; SFT, DPO and policies are")
    gpus = num_gpus or (cluster.size("gpus_per_node") * cluster.size("num_nodes") if cluster.data else None)
    colocated = policy.section("generation").section("colocated")
    own = colocated.section("resources")
    if num_gpus is None and gpus and not colocated.flag("enabled", True) and given.get("grpo") is not None:
        each = own.get("gpus_per_node")
        gpus = _left(cluster, own, each)
        notes += (f"generation has GPUs of its own: {gpus} train",)
    # Settings of DPO count pairs; its reference model waits on the host and is swapped in before the step.
    sequences = 2 if given.get("dpo") is not None else 1
    batch, micro = sequences * policy.size("train_global_batch_size"), sequences * policy.size("train_micro_batch_size")
    if sequences > 1:
        notes += ("pairs are read as two sequences each; the log probabilities of the reference model are not in the plan",)
    length = policy.number("max_total_sequence_length")
    tokens = next((found for one in PACKED if (found := _packed(policy.section(one)))), 0) if sequences == 1 else 0
    split = fields["tp"] * fields["cp"] * fields["pp"]
    dp = quotient(gpus, split, f"{given.path}: GPUs by the degrees") if gpus is not None else 1
    if tokens and length and tokens // length != micro:
        most = min(tokens // length, batch // dp, 4096)
        micro = max((one for one in range(1, most + 1) if batch % (one * dp) == 0), default=1)
        notes += (f"micro batches of up to {tokens} tokens (train_mb_tokens) are read as {micro} sequences of {length} tokens",)
    notes += (*_of_bins(policy), *((FIRST,) if first else ()))
    fields["micro_batch_size"] = micro
    if gpus is not None:
        question = batch_that_divides(batch, micro, dp)
        fields |= {"dp": dp} | ({"num_microbatches": batch // (micro * dp)} if question is None else {})
        if question is not None and given.said is not None and given.said.global_batch_size is None:
            given.ask(question)
        replicas = policy.section("dtensor_cfg").size("dp_replicate_size") if native else 1
        if replicas > 1:
            fields["dp_shard"] = quotient(dp, replicas, f"{given.path}: dp by dp_replicate_size")
    lora = policy.section("dtensor_cfg").section("lora_cfg") if native else core.section("peft")
    adapters = lora.flag("enabled")
    model, asked = _other_sizes(policy, core, native, model)
    known = model or (policy.said.spec() if policy.said is not None else None)
    notes += _by_parts(policy.section("dtensor_cfg"), fields, known) if native else of_dense_layers(core, fields, known)
    notes += (*_not_as_planned(core, native), *(_of_adapters(lora) if adapters else ()), *_of_both(policy, core, native, adapters))
    if given.get("grpo") is not None or given.get("distillation") is not None:
        notes += ("the step of the policy alone: generation, log probabilities and the reference model are not in the plan",)
    return reduced_last(Reading(
        trainer=_trainer(core, native, adapters, lora, known), fields=fields, questions=asked, model=model, model_name=name,
        num_gpus=gpus, global_batch_size=batch, sequence_length=length, precision=_precision(policy, core, native),
        optimizer=_optimizer(policy, core, native), lora_rank=lora.size("dim", 8) if adapters else 0,
        lora_targets=_targets(lora) if adapters else "all",
        frozen_weights="bf16" if adapters and not native else "fp32" if adapters else None,
        unread=tuple(one for one in given.left() if _matters(one, native)),
        notes=(*notes, *(_beside(lora) if adapters else ())),
    ), native and not first and policy.section("dtensor_cfg").flag("defer_fsdp_grad_sync", True))  # fmt: skip


def _other_sizes(
    policy: Settings, core: Settings, native: bool, model: ModelSpec | None
) -> tuple[ModelSpec | None, tuple[Question, ...]]:
    """The model with what is laid over its configuration, and what is asked where that makes another one of it."""
    over = dict(policy.section("hf_config_overrides").data)
    said = {f"model.{CONFIG.get(key, key)}": value for key, value in over.items()}
    if not native:
        said |= {f"model.{key}": value for key, value in core.section("model_overrides").data.items()}
    _, changed, questions, _ = without_layers(said, model, policy.said is not None and policy.said.model is not None)
    ahead = None if native else core.number("mtp_num_layers", None, 0)
    if changed is not None and ahead is not None and ahead != changed.mtp_layers:
        changed = dataclasses.replace(changed, mtp_layers=ahead, published_parameters=0.0)
    return changed, tuple(questions)


CONFIG = {
    "num_hidden_layers": "num_layers", "intermediate_size": "ffn_hidden_size", "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels", "num_experts": "num_moe_experts", "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
}  # fmt: skip
"""Names of sizes in the configurations of models, and in those of Megatron Core."""


def _not_as_planned(core: Settings, native: bool) -> tuple[str, ...]:
    """Notes about what the step does otherwise than the plan. Raises PlannerError for what no plan has."""
    if native:
        return ()
    core.section("distributed_data_parallel_config").get("use_custom_fsdp")  # which no version passes to Megatron Core
    refused = [core.where(name) for name in ("fine_grained_activation_offloading", "fp32_residual_connection") if core.flag(name)]
    if refused:
        names = [one.partition(": ")[2] for one in refused]
        raise not_priced(str(core.path), names, names)
    lean = [one for one in ("use_linear_ce_fusion_loss", "use_fused_linear_logprobs") if core.flag(one)]
    return (f"{lean[0]}: the logits of all tokens, which it does not write, are in the plan",) if lean else ()


def _by_parts(part: Settings, fields: dict[str, int], model: ModelSpec | None) -> tuple[str, ...]:
    """A note on what its workers over DTensor recompute.  [nemo_rl/models/dtensor/parallelize.py, since 0.4 norms and attention]"""
    if not part.flag("activation_checkpointing"):
        return ()
    first = "up to NeMo-RL 0.3 the MLP of a layer alone is recomputed, and all that attention keeps stays; since then "
    first = "" if part.flag("_v2") else first
    return by_parts(f"dtensor_cfg.activation_checkpointing: {first}", fields, model)


def _of_both(policy: Settings, core: Settings, native: bool, adapters: bool) -> tuple[str, ...]:
    """Notes about two engines that are on, and about weights of which Megatron Core keeps no copy in fp32: its distributed
    optimizer always has one, others where their own bf16 or fp16 is true.  [megatron/core/optimizer/__init__.py]"""
    if native:
        return ()
    notes, part = [], core.section("optimizer")
    if policy.section("dtensor_cfg").flag("enabled"):
        notes.append("dtensor_cfg and megatron_cfg are both enabled: NeMo-RL of 2025 takes Megatron, as here; later ones refuse it")
    low = str(policy.get("precision", "bfloat16")) in ("bfloat16", "float16")
    masters = part.flag("use_distributed_optimizer", True) or part.flag("bf16") or part.flag("fp16")
    if low and not masters and not adapters:
        notes.append(
            f"{part.place}bf16 is false without use_distributed_optimizer: it keeps no fp32 copy of the weights, which no "
            f"plan of 16-bit weights does without; the plan has one, 4 bytes a weight more, as {part.place}bf16=true would"
        )
    return tuple(notes)


def _of_adapters(lora: Settings) -> tuple[str, ...]:
    left_out = lora.get("exclude_modules")
    return (f"exclude_modules {shown(left_out)}: adapters are priced on them too",) if left_out else ()


def _packed(part: Settings) -> int:
    """Tokens of a micro batch that holds as many sequences as fit, where they are said as a number."""
    tokens = part.get("train_mb_tokens")
    return tokens if part.flag("enabled") and isinstance(tokens, int) else 0


def _of_bins(policy: Settings) -> tuple[str, ...]:
    """A note on a batch that counts samples where micro batches are filled by tokens. How many there are hangs on the data."""
    on = next((one for one in PACKED if policy.section(one).flag("enabled")), None)
    if on is None:
        return ()
    how = "the batch counts samples, and a micro batch is filled with them up to its tokens"
    priced = "shorter ones make fewer micro batches and attention ends with each, so time comes out too long"
    return (f"{on}: {how}; priced as samples of full length: {priced}",)


def _matters(setting: str, native: bool) -> bool:
    name = setting.split(" = ")[0]
    other = "megatron_cfg" if native else "dtensor_cfg"
    return READ_HERE.fullmatch(name) is not None and other not in name and not setting.endswith("= 'none'")


def _left(cluster: Settings, own: Settings, each: object) -> int:
    """GPUs that are left for training where generation has its own."""
    nodes, per_node = cluster.size("num_nodes"), cluster.size("gpus_per_node")
    taken = own.number("num_nodes")
    if taken and nodes > 1:
        return (nodes - taken) * per_node
    return nodes * (per_node - (own.size("gpus_per_node") if each else 0))


def _first(policy: Settings) -> dict[str, int]:
    """Fields of Layout under the first worker, over FSDP1.  [nemo_rl 0.2, models/policy/fsdp1_policy_worker.py]"""
    if (later := next((one for one in policy.section("dtensor_cfg").data if one not in OF_FIRST), None)) is not None:
        about = f"it is false, megatron_cfg is not enabled, and NeMo-RL with {shown_text(later)} does not start without either"
        policy.ask(Question(name="policy.dtensor_cfg.enabled", about=about, choices=("true",)))
    again, host = policy.flag("activation_checkpointing_enabled"), policy.flag("fsdp_offload_enabled")
    return {
        "tp": 1, "cp": 1, "ep": 1, "pp": 1, "zero": 3, "sequence_parallel": 0, "offload_parameters": int(host),
        "recompute": int(Recompute.FULL if again else Recompute.NONE),
    }  # fmt: skip


def _native(part: Settings) -> dict[str, int]:
    """Fields of Layout under FSDP2 of torch, with which NeMo-RL always keeps fp32 weights."""
    tp, cp, ep = (part.size(f"{name}_parallel_size") for name in ("tensor", "context", "expert"))
    return {
        "tp": tp, "cp": cp, "ep": ep, "pp": 1, "zero": 3, "offload_parameters": int(part.flag("cpu_offload")),
        "sequence_parallel": int(part.flag("sequence_parallel") and tp > 1),
        "recompute": int(Recompute.FULL if part.flag("activation_checkpointing") else Recompute.NONE),
        **({"cp_method": int(CpMethod.ALLGATHER)} if cp > 1 else {}),
    }  # fmt: skip


def _megatron(core: Settings) -> dict[str, int]:
    """Fields of Layout under Megatron Core."""
    optimizer, held = core.section("optimizer"), degrees(core)
    uneven = [f"{core.place}{one}" for one in ("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split",
              "account_for_loss_in_pipeline_split") if held["pp"] > 1 and core.get(one)]  # fmt: skip
    if uneven:
        raise not_priced(str(core.path), uneven, uneven)
    return {
        **held, "sequence_parallel": int(core.flag("sequence_parallel") and held["tp"] > 1),
        "zero": int(optimizer.flag("use_distributed_optimizer", True)), **_recompute(core),
        "first_stage_layers": core.size("num_layers_in_first_pipeline_stage", 0, 0),
        "last_stage_layers": core.size("num_layers_in_last_pipeline_stage", 0, 0), **states_on_the_host(optimizer, usual=0.0),
    }  # fmt: skip


def _recompute(core: Settings) -> dict[str, int]:
    if not core.flag("activation_checkpointing"):
        return {"recompute": int(Recompute.NONE)}
    return recompute(core, usual="full")


def _trainer(core: Settings, native: bool, adapters: bool, lora: Settings, model: ModelSpec | None) -> str:
    dropped = adapters and lora.above_zero("dropout")
    if native:
        return spell("automodel", {"compile": "off", **({"adapter_dropout": "on"} if dropped else {})})
    replicas = core.section("distributed_data_parallel_config")
    reduce = replicas.flag("grad_reduce_in_fp32")
    backend = "hybridep" if core.get("moe_flex_dispatcher_backend") == "hybridep" else "deepep"
    dispatch = backend if core.flag("moe_enable_deepep") or core.get("moe_token_dispatcher_type") == "flex" else "alltoall"
    # Its own loss: logits in fp32 4, log probabilities 4, softmax 4; native has 10.  [nemo_rl/distributed/model_utils.py]
    said = {"gradient_dtype": "fp32" if reduce else "bf16", "expert_dispatch": dispatch, "expert_overlap": "off",
            "loss_fusion": "native"}  # fmt: skip
    said |= {} if replicas.flag("overlap_grad_reduce", True) else {"gradient_overlap": "off"}
    if model is not None and model.is_moe and "moe_router_dtype" in core.data:  # unset: that of the layers
        said["router_dtype"] = "fp32" if str(core.get("moe_router_dtype")) in ("fp32", "fp64") else "bf16"
    low = core.section("fp8_cfg")
    if low.flag("enabled") and low.flag("fp8_param") and core.section("optimizer").flag("use_distributed_optimizer", True):
        said["fp8_param_gather"] = "on"
    said |= {"transformer_impl": "local"} if core.get("transformer_impl") == "local" else {}
    said |= {"attention_kernel": "unfused"} if core.get("attention_backend") in ("unfused", "local") else {}
    graphs = "none" if core.get("cuda_graph_impl", "none") == "none" else "layers"
    off = dict.fromkeys(("tp_overlap", "fused_experts", "fp8_attention"), "off")  # it sets none of them
    return spell("megatron-bridge", {**said, "cuda_graphs": graphs, **off})


def _precision(policy: Settings, core: Settings, native: bool) -> str:
    part = core.section("fp8_cfg")
    if not native and part.flag("enabled"):
        return str(part.choice("fp8_recipe", FP8, "blockwise"))
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(str(policy.get("precision", "bfloat16")), "bf16")


def _optimizer(policy: Settings, core: Settings, native: bool) -> str:
    if native:
        part = policy.section("optimizer")
        return optimizer(part, str(part.get("name", "AdamW")).rpartition(".")[2], "name")
    part = core.section("optimizer")
    return optimizer(part, part.get("optimizer", "adam"), "optimizer")


def _targets(lora: Settings) -> str:
    named = lora.get("target_modules")
    return "all" if lora.flag("match_all_linear") or not named else adapter_targets(named)


def _beside(lora: Settings) -> tuple[str, ...]:
    named = None if lora.flag("match_all_linear") else lora.get("target_modules")
    return layers_beside(named, adapter_targets(named)) if named else ()
