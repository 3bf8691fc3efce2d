"""One reader for each framework: settings of its configuration into planner's words. Nothing of a configuration is run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from planner.errors import PlannerError, shown
from planner.layout import CpMethod, Recompute
from planner.rl.readback.rl_found import RlFound, Seen, micro_batch
from planner.rl.rl_framework import load_framework
from planner.rl.rl_layout import ASYNCHRONOUS
from planner.trainers.reading.given import Question
from planner.trainers.reading.megatron_degrees import degrees
from planner.trainers.reading.settings import Settings

ALGORITHMS = {
    "grpo": "grpo", "gae": "ppo", "ppo": "ppo", "rloo": "rloo", "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++", "group_norm": "grpo", "dr_grpo": "grpo", "gspo": "gspo",
    "reinforce": "reinforce++",
    "reinforce_baseline": "reinforce++", "dapo": "dapo", "cispo": "grpo", "gdpo": "grpo",
    "gpg": "grpo", "optimal_token_baseline": "grpo", "opd": "grpo", "grpo_passk": "grpo", "remax": "reinforce++",
}  # fmt: skip
"""Words for how advantages are made -> algorithm."""


def _algorithm(given: Settings, name: str, default: str) -> str:
    word = str(given.get(name, default)).strip("'\"").lower().replace("-", "_")
    if word not in ALGORITHMS:
        raise PlannerError(f"{given.where(name)} is {shown(word)}; an RL plan knows {', '.join(sorted(ALGORITHMS))}")
    return ALGORITHMS[word]


def _needed(given: Settings, name: str, about: str) -> int:
    """A whole number that has to be there: asked for where it is not."""
    found = given.number(name)
    if found is None:
        given.ask(Question(name=name, about=about))
    return found or 1


def _mega(part: Settings, core: Settings, etp: int = 1) -> dict[str, int]:
    """Fields of Layout under Megatron Core."""
    held = degrees(part, etp=etp)
    mode = str(core.get("recompute_granularity") or "none")
    recompute = {"full": Recompute.FULL, "selective": Recompute.SELECTIVE}.get(mode, Recompute.NONE)
    fields = {
        **held, "zero": int(part.flag("use_distributed_optimizer", True)), "recompute": int(recompute),
        "sequence_parallel": int(part.flag("sequence_parallel", True) and held["tp"] > 1),
    }  # fmt: skip
    return fields if held["ep"] > 1 else {name: one for name, one in fields.items() if name != "etp"}


def verl(given: Settings, program: str) -> RlFound:
    """Overrides or a composed configuration; ``program``: the module that is started, or the name of the configuration."""
    seen, framework = Seen(given), load_framework("verl")
    actor, rollout = given.section("actor_rollout_ref").section("actor"), given.section("actor_rollout_ref").section("rollout")
    model = given.section("actor_rollout_ref").section("model")
    limits = [_needed(given, f"data.max_{one}_length", "tokens") for one in ("prompt", "response")]
    mega = actor.get("strategy") == "megatron" or bool(actor.section("megatron").data) or "megatron" in program
    train = seen.size("trainer.nnodes") * seen.size("trainer.n_gpus_per_node", default=8)
    split = bool(given.section("rollout").data) or "off_policy" in program or "async" in program
    generate = seen.size("rollout.nnodes") * seen.size("rollout.n_gpus_per_node", default=8) if split else 0
    own = given.section("trainer").section("v1")
    separate = own.get("trainer_mode") == "separate_async"
    hybrid = separate and own.section("separate_async").section("hybrid_rollout").flag("enable_switch")
    if separate:
        generate = rollout.size("nnodes") * rollout.size("n_gpus_per_node", 8)
    late = separate or bool(given.section("async_training").data) or "fully_async" in program
    threshold = float(given.get("async_training.staleness_threshold", 0.1)) if late else 0.0
    threshold = float(own.section("sampler").get("max_off_policy_threshold", 8)) if separate else threshold
    ahead = max(round(threshold), 1) if threshold > 0 else 0
    partial = late and seen.flag("async_training.partial_rollout", default=True) and ahead > 0
    cp = max(actor.size("ulysses_sequence_parallel_size"), actor.section("fsdp_config").size("ulysses_sequence_parallel_size"))
    fields = _mega(actor.section("megatron"), actor.section("megatron").section("override_transformer_config")) if mega else {
        "cp": cp, "zero": 3 if actor.section("fsdp_config").flag("reshard_after_forward", True) else 2,
        "recompute": int(Recompute.FULL if model.flag("enable_gradient_checkpointing", True) else Recompute.NONE),
        **({"cp_method": int(CpMethod.A2A)} if cp > 1 else {}),
    }  # fmt: skip
    length = limits[0] + limits[1]
    if actor.flag("use_dynamic_bsz"):
        fields["micro_batch_size"] = micro_batch(actor.size("ppo_max_token_len_per_gpu", 16384) * fields.get("cp", 1), length)
    else:
        fields["micro_batch_size"] = actor.size("ppo_micro_batch_size_per_gpu", 1)
    samples, mini = rollout.size("n"), actor.size("ppo_mini_batch_size", 256)
    prompts = given.section("data").number("train_batch_size", least=0) or mini * seen.size("async_training.require_batches")
    backend = str(rollout.get("checkpoint_engine.backend", ""))
    return RlFound(
        given=given, framework=framework, trainer="megatron" if mega else "verl", model_name=model.label("path"), train_gpus=train,
        generate_gpus=generate, actor=fields, engine=str(rollout.get("name", "")), samples=samples, prompts=prompts,
        rollout={
            "tp": rollout.size("tensor_model_parallel_size", 2), "attn_dp": rollout.size("data_parallel_size"),
            "ep": rollout.size("expert_parallel_size"), "pp": rollout.size("pipeline_model_parallel_size"),
            "max_batch": rollout.size("max_num_seqs", framework.max_batch),
        },
        train_batch=min(mini, prompts) * samples, epochs=actor.size("ppo_epochs"), prompt_limit=limits[0], answer_limit=limits[1],
        staleness=ahead if late else int(split), partial=partial, hybrid=hybrid,
        sync={"nixl": "rdma", "mooncake": "rdma", "delta_sharded": "delta"}.get(backend, ""),
        algorithm=_verl_algorithm(given), reference=actor.flag("use_kl_loss") or given.flag("algorithm.use_kl_in_reward"),
        critic=_algorithm(given, "algorithm.adv_estimator", "gae") == "ppo", lora_rank=model.size("lora_rank", 0, 0),
        memory_share=seen.share("actor_rollout_ref.rollout.gpu_memory_utilization"), offload=_verl_offload(given, mega),
    )  # fmt: skip


def _verl_offload(given: Settings, mega: bool) -> tuple[str, ...]:
    """States of the actor and of the reference that go to the host; a critic's are taken to go with the actor's. FSDP puts a model
    that only runs forward there whatever is said (CPUOffloadPolicy)."""
    part, model = "megatron" if mega else "fsdp_config", given.section("actor_rollout_ref")
    actor, ref = model.section("actor").section(part), model.section("ref").section(part)
    said = (("weights", actor, "param"), ("optimizer", actor, "optimizer"), ("reference", ref, "param"))
    return tuple(state for state, where, name in said if where.flag(f"{name}_offload") or (state == "reference" and not mega))


def _verl_algorithm(given: Settings) -> str:
    if str(given.get("actor_rollout_ref.actor.policy_loss.loss_mode", "")) == "gspo":
        return "gspo"
    found = _algorithm(given, "algorithm.adv_estimator", "gae")
    return "dapo" if found == "grpo" and given.flag("algorithm.filter_groups.enable") else found


def nemo_rl(given: Settings, program: str) -> RlFound:
    """Its YAML, resolved, or the overrides of an export."""
    framework, policy, grpo = load_framework("nemo-rl"), given.section("policy"), given.section("grpo")
    values = not grpo.data and bool(given.section("ppo").data)
    grpo = given.section("ppo") if values else grpo
    core, native, generation = policy.section("megatron_cfg"), policy.section("dtensor_cfg"), policy.section("generation")
    mega = core.flag("enabled")
    colocated, own = generation.section("colocated"), generation.section("colocated").section("resources")
    nodes, each = given.size("cluster.num_nodes"), given.size("cluster.gpus_per_node")
    generate = 0
    if not colocated.flag("enabled", True):
        generate = (own.size("num_nodes") * each) if nodes > 1 else own.size("gpus_per_node")
    length = _needed(policy, "max_total_sequence_length", "tokens of prompt and answer")
    answer = min(generation.size("max_new_tokens", length), length - 1)
    ahead = grpo.section("async_ppo" if values else "async_grpo")
    fields = _mega(core, core) if mega else {
        "tp": native.size("tensor_parallel_size"), "cp": native.size("context_parallel_size"), "zero": 3,
        "recompute": int(Recompute.FULL if native.flag("activation_checkpointing") else Recompute.NONE),
        "sequence_parallel": int(native.flag("sequence_parallel")),
    }  # fmt: skip
    if mega:
        mode = str(core.get("recompute_granularity", "full")) if core.flag("activation_checkpointing") else "none"
        fields["recompute"] = int({"full": Recompute.FULL, "selective": Recompute.SELECTIVE}.get(mode, Recompute.NONE))
        fields |= {f"{one}_stage_layers": core.size(f"num_layers_in_{one}_pipeline_stage", 0, 0) for one in ("first", "last")}
    packing = policy.section("sequence_packing")
    tokens = packing.number("train_mb_tokens") if packing.flag("enabled") else None
    fields["micro_batch_size"] = micro_batch(tokens, length) if tokens else policy.size("train_micro_batch_size")
    engine = generation.section("vllm_cfg")
    batch = generation.section("vllm_kwargs").number("max_num_seqs")
    transport = str(generation.get("refit_transport", ""))
    return RlFound(
        given=given, framework=framework, trainer=framework.trainer if mega else "automodel", model_name=policy.label("model_name"),
        train_gpus=nodes * each - generate, generate_gpus=generate, actor=fields, engine=str(generation.get("backend", "vllm")),
        rollout={
            "tp": engine.size("tensor_parallel_size"), "pp": engine.size("pipeline_parallel_size"),
            "ep": engine.size("expert_parallel_size"), **({"max_batch": batch} if batch else {}),
        },
        prompts=_needed(grpo, "num_prompts_per_step", "prompts of a step"), samples=grpo.size("num_generations_per_prompt"),
        train_batch=policy.size("train_global_batch_size"), prompt_limit=max(length - answer, 1), answer_limit=answer,
        staleness=ahead.size("max_trajectory_age_steps") if ahead.flag("enabled") else 0,
        partial=ahead.flag("enabled") and ahead.flag("in_flight_weight_updates"),
        sync="reshard" if transport == "nccl_reshard" else "", memory_share=Seen(engine).share("gpu_memory_utilization"),
        critic=values, epochs=grpo.size("ppo_epochs") if values else 1,
        algorithm="ppo" if values else "dapo" if grpo.flag("use_dynamic_sampling")
        else "gspo" if given.flag("loss_fn.sequence_level_importance_ratios")
        else _algorithm(given, "grpo.adv_estimator.name", "grpo"),
        reference=float(given.get("loss_fn.reference_policy_kl_penalty", 0.01)) > 0,
        rollout_precision="fp8_block" if str(engine.get("precision", "")).startswith("fp8") else "bf16",
    )  # fmt: skip


def openrlhf(given: Settings, program: str) -> RlFound:
    """Flags with dots, and those with underscores of before 0.10."""
    seen = Seen(given)
    framework = load_framework("openrlhf" if any("." in one for one in given.data) else "openrlhf@0.9.9")
    train = seen.size("actor.num_nodes", "actor_num_nodes") * seen.size(
        "actor.num_gpus_per_node", "actor_num_gpus_per_node", default=8
    )
    engines = seen.size("vllm.num_engines", "vllm_num_engines", default=1)
    tp = seen.size("vllm.tensor_parallel_size", "vllm_tensor_parallel_size")
    late = seen.flag("train.async_enable", "async_train")
    colocated = seen.flag("train.colocate_all", "colocate_all_models") and not late
    length = seen.size("data.max_len", default=0) or seen.size("prompt_max_len", default=1024) + seen.size(
        "generate_max_len", default=1024
    )
    answer = min(seen.size("rollout.max_new_tokens", "generate_max_len", default=max(length // 2, 1)), length - 1)
    cp = seen.size("ds.ring_attn_size", "ring_attn_size")
    batch = seen.size("train.batch_size", "train_batch_size", default=128)
    dynamic = seen.flag("train.dynamic_batch_enable", "use_dynamic_batch")
    tokens = seen.size("train.max_tokens_per_gpu", "train_max_tokens_per_gpu", default=16192) * cp
    again = seen.flag("actor.gradient_checkpointing_enable", "gradient_checkpointing")
    one = seen.size("train.micro_batch_size", "micro_train_batch_size")
    name = "algo.advantage.estimator" if given.get("algo.advantage.estimator") is not None else "advantage_estimator"
    algorithm = _algorithm(given, name, "gae")
    fields = {
        "tp": seen.size("ds.tensor_parallel_size", "ds_tensor_parallel_size"), "cp": cp,
        "zero": given.number("ds.zero_stage", None, 0) or given.number("zero_stage", None, 0) or 2,
        "recompute": int(Recompute.FULL if again else Recompute.NONE),
        "micro_batch_size": micro_batch(tokens, length) if dynamic else one,
        "offload_optimizer": 100 * seen.flag("ds.adam_offload", "adam_offload"),
    }  # fmt: skip
    return RlFound(
        given=given, framework=framework, trainer="deepspeed", model_name=given.label("actor.model_name_or_path", "pretrain"),
        train_gpus=train, generate_gpus=0 if colocated else engines * tp, actor=fields, rollout={"tp": tp, "replicas": engines},
        prompts=seen.size("rollout.batch_size", "rollout_batch_size", default=1024),
        samples=seen.size("rollout.n_samples_per_prompt", "n_samples_per_prompt"), train_batch=batch,
        epochs=seen.size("train.max_epochs", "max_epochs"), prompt_limit=max(length - answer, 1), answer_limit=answer,
        staleness=seen.size("train.async_queue_size", "async_queue_size") if late else 0,
        partial=seen.flag("train.partial_rollout_enable", "partial_rollout"),
        algorithm="gspo" if given.get("actor.policy_loss_type") == "gspo" else algorithm,
        reference=float(seen.first("algo.kl.init_coef", "init_kl_coef", default=0.01)) > 0, critic=algorithm == "ppo",
        lora_rank=given.number("ds.lora.rank", 0, 0) or 0,
        memory_share=seen.share("vllm.gpu_memory_utilization", "vllm_gpu_memory_utilization") or framework.cache_share_alone,
        offload=tuple(framework.offloaded) if seen.flag("ds.enable_sleep", "deepspeed_enable_sleep") else (),
    )  # fmt: skip


def slime(given: Settings, program: str) -> RlFound:
    """Flags of train.py and train_async.py, Megatron's among them."""
    seen, framework = Seen(given), load_framework("slime")
    train = seen.size("actor_num_nodes") * seen.size("actor_num_gpus_per_node", default=8)
    colocated = seen.flag("colocate")
    answer = _needed(given, "rollout_max_response_len", "tokens of an answer at most")
    length = seen.size("rollout_max_context_len", default=0) or answer + seen.size("rollout_max_prompt_len", default=1024)
    fields = _mega(given, given, etp=given.size("tensor_model_parallel_size"))
    fields |= {"sequence_parallel": int(given.flag("sequence_parallel")), "zero": 1}
    tokens = seen.size("max_tokens_per_gpu", default=length) * fields["cp"]
    dynamic = seen.flag("use_dynamic_batch_size")
    fields["micro_batch_size"] = micro_batch(tokens, length) if dynamic else seen.size("micro_batch_size")
    late = "train_async" in program
    own = "fully_async" in str(given.get("rollout_function_path", ""))
    samples, prompts = seen.size("n_samples_per_prompt"), _needed(given, "rollout_batch_size", "prompts of a step")
    steps = seen.size("num_steps_per_rollout")
    mode, carrier = str(given.get("update_weight_mode", "full")), str(given.get("update_weight_transport", "nccl"))
    ranks = seen.size("rollout_num_gpus_per_engine")
    pp, dp = seen.size("sglang_pp_size", "sglang_pipeline_parallel_size"), seen.size("sglang_dp_size", "sglang_data_parallel_size")
    return RlFound(
        given=given, framework=framework, trainer="megatron", model_name=given.label("hf_checkpoint"), train_gpus=train,
        generate_gpus=0 if colocated else seen.size("rollout_num_gpus", default=train), actor=fields, engine="sglang",
        rollout={
            "tp": max(ranks // (pp * dp), 1), "pp": pp, "attn_dp": dp,
            "ep": seen.size("sglang_ep_size", "sglang_expert_parallel_size"),
            "max_batch": seen.size("sglang_max_running_requests", "sglang_server_concurrency", default=framework.max_batch),
        },
        prompts=prompts, samples=samples, train_batch=seen.size("global_batch_size", default=prompts * samples // steps),
        prompt_limit=max(length - answer, 1), answer_limit=answer, staleness=(2 if own else 1) if late else 0, partial=own and late,
        sync="delta" if mode == "delta" else "disk" if carrier == "disk" else "",
        algorithm=_algorithm(given, "advantage_estimator", "grpo"), reference=seen.flag("use_kl_loss"),
        critic=given.get("advantage_estimator") == "ppo", memory_share=seen.share("sglang_mem_fraction_static"),
    )  # fmt: skip


def areal(given: Settings, program: str) -> RlFound:
    """Its YAML; degrees stand in allocations like fsdp:d4t2."""
    framework, actor, rollout = load_framework("areal"), given.section("actor"), given.section("rollout")
    backend, held = _allocation(given, "actor")
    engine, serving = _allocation(given, "rollout")
    trainers = {one.name: one.trainer for one in framework.backends}
    if backend not in trainers:
        raise PlannerError(f"{actor.where('backend')} starts with {shown(backend)}; an RL plan knows {', '.join(trainers)}")
    length = given.section(engine).size("context_length" if engine == "sglang" else "max_model_len", 32768)
    answer = given.size("gconfig.max_new_tokens", 16384)
    prompt = given.section("train_dataset").size("max_length", max(min(length - answer, 1024), 1))
    tokens = actor.section("mb_spec").size("max_tokens_per_mb", prompt + answer) * held.get("c", 1)
    mega = backend == "megatron"
    recompute = Recompute.FULL if actor.flag("gradient_checkpointing") else Recompute.NONE
    ep = held.get("e", 1)
    fields = {
        "tp": held.get("t", 1), "pp": held.get("p", 1), "cp": held.get("c", 1), "ep": ep, "zero": 1 if mega else 3,
        "recompute": int(recompute), "micro_batch_size": micro_batch(tokens, prompt + answer),
        "vpp": actor.section("megatron").size("virtual_pipeline_parallel_size") if mega else 1,
    }  # fmt: skip
    train = held.get("d", 1) * held.get("t", 1) * held.get("p", 1) * held.get("c", 1)
    together = {str(one.section("scheduling_strategy").get("target", "")) for one in (actor, rollout)} & {"actor", "rollout"}
    prompts, samples = given.section("train_dataset").size("batch_size"), given.size("gconfig.n_samples")
    running, critic = rollout.number("max_concurrent_rollouts"), bool(given.section("critic").data)
    engines = serving.get("d", 1)
    batch = given.section(engine).number("max_running_requests" if engine == "sglang" else "max_num_seqs")
    batch = batch or (-(-running // engines) if running else 0)
    return RlFound(
        given=given, framework=framework, trainer=trainers[backend], model_name=actor.label("path"), train_gpus=train,
        generate_gpus=0 if together else engines * serving.get("t", 1) * serving.get("p", 1), actor=fields, engine=engine,
        rollout={"tp": serving.get("t", 1), "pp": serving.get("p", 1), "replicas": engines, "max_batch": batch},
        prompts=prompts, samples=samples, train_batch=prompts * samples // actor.size("ppo_n_minibatches"), prompt_limit=prompt,
        answer_limit=answer, staleness=min(rollout.number("max_head_offpolicyness", 0, 0) or 0, ASYNCHRONOUS),
        memory_share=Seen(given.section(engine)).share("mem_fraction_static", "gpu_memory_utilization"),
        partial=not together, sync="disk" if actor.get("weight_update_mode") == "disk" else "",
        algorithm="gspo" if actor.get("importance_sampling_level") == "sequence" else "ppo" if critic else "grpo",
        reference=float(actor.get("kl_ctl", 0.1)) > 0 and bool(given.section("ref").data), critic=critic,
    )  # fmt: skip


def _allocation(given: Settings, part: str) -> tuple[str, dict[str, int]]:
    """Back end and degrees of ``name:d4t2`` or ``megatron:(attn:d4p1t2|ffn:d1e8)``. Raises PlannerError."""
    text, mode = str(given.section(part).get("backend", "")), str(given.get("allocation_mode", ""))
    if not text and re.fullmatch(r"\w+[:.][\w:.]+\+[\w:.]+", mode):  # of before 1.0: engines, then the trainer, FSDP where unsaid
        engines, _, trainer = mode.replace(".", ":").partition("+")
        text = engines if part == "rollout" else trainer if ":" in trainer else f"fsdp:{trainer}"
    name, _, rest = text.partition(":")
    attention, _, experts = rest.strip("()").replace("attn:", "").partition("|")
    found = {letter: int(number) for letter, number in re.findall(r"([dptce])(\d{1,6})", attention)}
    found |= {letter: int(number) for letter, number in re.findall(r"(e)(\d{1,6})", experts)}
    if not re.fullmatch(r"[a-z]+:\(?(attn:)?([dptce]\d{1,6})+(\|ffn:([dpte]\d{1,6})+)?\)?", text):
        raise PlannerError(
            f"{given.path}: {part}.backend is {shown(text)}; it must be like fsdp:d4t2, or allocation_mode like sglang:d4+fsdp:d4"
        )
    return name, found


def prime_rl(given: Settings, program: str) -> RlFound:
    """Its TOML."""
    framework, place, vllm = load_framework("prime-rl"), given.section("deployment"), given.section("inference").section("vllm")
    orchestrator, model = given.section("orchestrator"), given.section("trainer").section("model")
    each = place.size("gpus_per_node", 8)
    if place.get("type") == "multi_node":
        train = place.size("num_train_nodes") * each
        generate = place.size("num_infer_nodes") * place.size("num_infer_replicas") * each
    else:
        train, generate = place.size("num_train_gpus"), place.size("num_infer_gpus")
    length = orchestrator.number("seq_len") or given.size("seq_len", 2048)
    answer = orchestrator.section("train").section("sampling").number("max_completion_tokens") or length - 1
    answer = min(answer, length - 1)
    ep = model.get("ep", 1)
    group = orchestrator.size("group_size")
    batch = _needed(orchestrator, "batch_size", "answers of a step")
    if batch % group:
        raise PlannerError(f"{orchestrator.where('batch_size')} {batch} does not divide by group_size {group}")
    recompute = Recompute.NONE
    if model.get("ac") != "None":  # what its TOML has for nothing; left out, layers are recomputed
        recompute = Recompute.SELECTIVE if model.section("ac").get("mode") == "selective" else Recompute.FULL
    tp = vllm.size("tensor_parallel_size")
    running = orchestrator.section("concurrency").number("max_inflight", 1024) or 1024
    kind = str(given.section("weight_broadcast").get("type", "nccl"))
    return RlFound(
        given=given, framework=framework, trainer=framework.trainer,
        model_name=given.section("model").label("name") or model.label("name"),
        train_gpus=train, generate_gpus=generate, engine="vllm",
        actor={
            "cp": model.size("cp"), "ep": ep if isinstance(ep, int) else 1,
            "zero": 3 if model.flag("reshard_after_forward", True) else 2,
            "recompute": int(recompute),
            "micro_batch_size": micro_batch(model.size("seq_len", length), length),
        },
        rollout={"tp": tp, "max_batch": max(running * tp // generate, 1)}, prompts=batch // group, samples=group,
        prompt_limit=length - answer,
        answer_limit=answer, staleness=orchestrator.number("max_off_policy_steps", 8, 0) or 0,
        partial=True, memory_share=Seen(vllm).share("gpu_memory_utilization"),
        sync={"filesystem": "disk", "nixl": "rdma"}.get(kind, ""),
    )  # fmt: skip


def trl(given: Settings, program: str) -> RlFound:
    """The YAML of trl grpo. The GPUs of the trainer stand in accelerate's file, so they are asked for."""
    framework = load_framework("trl")
    server = given.get("vllm_mode") == "server"
    late = given.get("max_staleness") is not None
    train = _needed(given, "num_processes", "GPUs that train: --set num_processes=N")
    generate = _needed(given, "server_gpus", "GPUs of the vLLM server: --set server_gpus=N") if server or late else 0
    samples, micro = given.size("num_generations", 8), given.size("per_device_train_batch_size", 8)
    each = micro * given.size("gradient_accumulation_steps") * train
    rounds = given.number("steps_per_generation") or given.size("gradient_accumulation_steps")
    answers = given.number("generation_batch_size") or micro * train * rounds
    if answers % samples:
        raise PlannerError(f"{given.path}: {answers} answers of a step do not divide by num_generations {samples}")
    answer = given.size("max_completion_length", 512)
    length = given.number("vllm_max_model_length") or answer + given.size("max_prompt_length", 512)
    return RlFound(
        given=given, framework=framework, trainer="trl", model_name=given.label("model_name_or_path"), train_gpus=train,
        generate_gpus=generate, engine="vllm", samples=samples, prompts=answers // samples, train_batch=each,
        actor={
            "zero": 3, "micro_batch_size": micro,
            "recompute": int(Recompute.FULL if given.flag("gradient_checkpointing", True) else Recompute.NONE),
        },
        rollout={"tp": given.size("vllm_tensor_parallel_size")}, epochs=given.size("num_iterations"),
        prompt_limit=max(length - answer, 1),
        answer_limit=answer, staleness=given.size("max_staleness") if late else 0, partial=late,
        algorithm="gspo" if given.get("importance_sampling_level") == "sequence" else "grpo",
        reference=float(given.get("beta", 0.0)) > 0, memory_share=Seen(given).share("vllm_gpu_memory_utilization"),
    )  # fmt: skip


READERS: Mapping[str, Callable[[Settings, str], RlFound]] = {
    "verl": verl, "nemo-rl": nemo_rl, "openrlhf": openrlhf, "slime": slime, "areal": areal, "prime-rl": prime_rl, "trl": trl,
}  # fmt: skip
"""Framework -> what reads its settings, given the program that is started."""
