"""What an RL plan becomes for each framework: its settings from a template, the files and the words that start it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from planner import library
from planner.layout import Layout, Recompute
from planner.rl.export.framework_job import FrameworkJob
from planner.rl.export.rl_started import (
    HERE,
    MODEL,
    PROMPTS,
    RlTarget,
    Settings,
    Started,
    Variable,
    flag_words,
    settings_of,
    toml_text,
)
from planner.trainers.accelerate import export as accelerate
from planner.trainers.bundle.quoting import hydra_value, text_from
from planner.trainers.megatron import export as megatron
from planner.trainers.megatron.core_settings import environment as core_environment

FP8 = ("bf16", "fp8", "fp8_block")
"""The rollout's weights where the framework makes fp8 of the trainer's in blocks of 128 x 128 as it synchronises them."""


def _overrides(settings: Settings) -> str:
    return "".join(f"{name}={hydra_value(value)}\n" for name, value in settings.items())


def verl(job: FrameworkJob) -> Started:
    """Hydra overrides; the trainer, one-step-off or fully asynchronous program of verl."""
    mega = job.backend.name == "megatron"
    settings = settings_of(job, "verl.txt")
    usual = "ppo_megatron_trainer" if mega else "ppo_trainer"
    kind = job.offered.program.rpartition(".")[2]
    name = {"fully_async_main": f"fully_async_{usual}", "main_ppo": usual}[kind]
    if "one_step_off" in job.offered.program:
        name = f"one_step_off_{usual}"
    paths = ["actor_rollout_ref.model.path=$MODEL", "data.train_files=$TRAIN_FILES", "data.val_files=$TRAIN_FILES"]
    paths += ["trainer.default_local_dir=$here/checkpoints", "hydra.run.dir=$here/outputs"]
    paths += ["critic.model.path=$MODEL"] if job.work.critic else []
    return Started(
        settings=settings, files={"overrides.txt": _overrides(settings)},
        entry=("python", "-m", job.offered.program, f"--config-name={name}", "${overrides[@]}", *paths),
        prepare=("mapfile -t overrides < overrides.txt", 'here="$PWD"', *_beside_verl(job)),
        install=(f"pip install 'verl=={job.framework.version}' {job.engine.name}",),
        notes=(
            "Rewards are the user's: reward.custom_reward_function.path and name, or the data source of the prompts.",
            "Give MODEL and TRAIN_FILES as absolute paths, or MODEL as a hub name.",
        ),
    )  # fmt: skip


def _beside_verl(job: FrameworkJob) -> tuple[str, ...]:
    """Asynchronous configurations name verl's own by a path from the folder that holds it: file://verl/trainer/config."""
    find = "import os, verl; print(os.path.dirname(os.path.dirname(verl.__file__)))"
    look = "# Its asynchronous configurations look for verl/trainer/config."
    return () if job.offered.program == "verl.trainer.main_ppo" else (look, f'cd "$(python -c "{find}")"')


def verl_refusals(job: FrameworkJob) -> list[str]:
    """FSDP of verl has no tensor, pipeline or expert parallelism; its rollout no pipeline."""
    layout, found = job.layout, list[str]()
    if job.backend.name == "fsdp" and (layout.tp, layout.pp, layout.ep) != (1, 1, 1):
        degrees = f"tp {layout.tp}, pp {layout.pp}, ep {layout.ep}"
        found.append(f"{degrees}: verl's FSDP actor splits by data and Ulysses alone; use megatron")
    if job.rollout.pp > 1 and job.engine.name == "vllm":
        found.append(f"the rollout has pp {job.rollout.pp}: verl runs vLLM without a pipeline; plan a rollout with pp 1")
    if job.rollout.ep not in (1, job.rollout.tp * job.rollout.attn_dp):
        found.append(f"the rollout has ep {job.rollout.ep}: verl takes 1 or tp * dp, {job.rollout.tp * job.rollout.attn_dp} here")
    return found


def nemo_rl(job: FrameworkJob) -> Started:
    """Overrides of the shipped configuration of GRPO, of PPO where a value model is trained."""
    program, config = ("ppo", "ppo_math_1B" + "_megatron" * (job.backend.name == "megatron")) if job.work.critic else (
        "grpo", "grpo_math_1B")  # fmt: skip
    settings = settings_of(job, "nemo_rl.txt")
    slurm = ("On Slurm use ray.sub of the repository in place of run.sh's Ray cluster, with the same command.",)[: job.nodes - 1]
    return Started(
        settings=settings, files={"overrides.txt": _overrides(settings)},
        entry=(
            "uv", "run", "--project", "$NEMO_RL", "python", f"$NEMO_RL/examples/run_{program}.py", "--config",
            f"$NEMO_RL/examples/configs/{config}.yaml", "${overrides[@]}", "policy.model_name=$MODEL",
        ),
        prepare=("mapfile -t overrides < overrides.txt",),
        variables=(MODEL, ("NEMO_RL", None, "Checkout of NVIDIA-NeMo/RL, with submodules")),
        install=("git clone --recursive https://github.com/NVIDIA-NeMo/RL && export NEMO_RL=$PWD/RL",),
        notes=(f"Data and rewards are those of examples/configs/{config}.yaml: override data.* and env.*.", *slurm),
    )  # fmt: skip


def nemo_refusals(job: FrameworkJob) -> list[str]:
    """What its workers assert."""
    found = [f"vpp {job.layout.vpp}: NeMo RL has no virtual stages; plan with vpp 1"] if job.layout.vpp > 1 else []
    if job.backend.name == "fsdp" and job.layout.pp > 1:
        found.append(f"pp {job.layout.pp}: its DTensor workers have no pipeline; use megatron-bridge")
    if job.engine.name == "sglang" and not job.colocated:
        found.append("SGLang is for colocated runs alone there; plan with vllm")
    if job.work.critic is not None:
        if job.backend.name == "fsdp":
            found.append("value models of its DTensor workers pack no sequences, which the plan counts on; use --trainer megatron")
        if job.work.lora_rank:
            found.append("its PPO has no adapters; plan with --lora-rank 0")
        if job.work.critic != job.work.model:
            found.append("its value model is read from the policy's checkpoint; leave --critic out")
        if job.plan.placement.sync not in ("ipc", "bucketed"):
            found.append(f"weight sync {job.plan.placement.sync}: its PPO has the default one alone; plan with --sync bucketed")
    return found


def openrlhf(job: FrameworkJob) -> Started:
    """The command line of train_ppo_ray."""
    settings = settings_of(job, "openrlhf.txt")
    words = flag_words(settings)
    critic = ("--critic.model_name_or_path", "$MODEL") if job.work.critic else ()
    return Started(
        settings=settings, files={"arguments.txt": "\n".join(words) + "\n"},
        entry=(
            "python", "-m", "openrlhf.cli.train_ppo_ray", "${arguments[@]}", "--actor.model_name_or_path", "$MODEL", *critic,
            "--reward.remote_url", "$REWARD", "--data.prompt_dataset", "$TRAIN_FILES",
        ),
        prepare=("mapfile -t arguments < arguments.txt",),
        variables=(MODEL, PROMPTS, ("REWARD", None, "Python file with reward_func, or address of a reward server")),
        install=(f"pip install 'openrlhf[vllm]=={job.framework.version}'",),
    )  # fmt: skip


def openrlhf_refusals(job: FrameworkJob) -> list[str]:
    """DeepSpeed under OpenRLHF."""
    layout, rollout, found = job.layout, job.rollout, list[str]()
    if (layout.pp, layout.ep) != (1, 1):
        found.append(f"pp {layout.pp}, ep {layout.ep}: OpenRLHF trains with ZeRO, AutoTP and ring attention alone")
    if (rollout.pp, rollout.attn_dp) != (1, 1):
        found.append(f"the rollout has pp {rollout.pp}, dp {rollout.attn_dp}: its engines have tensor parallelism alone")
    return found


def trl(job: FrameworkJob) -> Started:
    """trl grpo under accelerate, or a script around the asynchronous trainer; vLLM beside it where it has GPUs of its own."""
    late = job.staleness > 0
    settings = settings_of(job, "trl_async.txt" if late else "trl.txt")
    config = accelerate.config(job.actor)
    nodes, gpus = job.train_pool
    place = ("--machine_rank", "$NODE_RANK", "--main_process_ip", "$MASTER_ADDR", "--main_process_port", "29500")
    launch = ("accelerate", "launch", "--config_file", "accelerate.yaml", *(place if nodes > 1 else ()))
    config |= {"num_machines": nodes, "num_processes": nodes * gpus}
    files = {"grpo.yaml": library.dump_yaml(settings), "accelerate.yaml": library.dump_yaml(config)}
    model: tuple[str, ...] = ("--model_name_or_path", "$MODEL", "--dataset_name", "$TRAIN_FILES")
    if job.work.lora_rank:
        model = (*model, "--use_peft", "--lora_r", str(job.work.lora_rank), "--lora_target_modules", "all-linear")
    if late:
        files["train_async.py"] = text_from(f"{HERE}/train_async.py.txt")
        entry = (*launch, "train_async.py", "--config", "grpo.yaml", *model, "--reward_funcs", "$REWARD")
    else:
        entry = (*launch, "-m", "trl.scripts.grpo", "--config", "grpo.yaml", *model, "--reward_funcs", "$REWARD")
    if not job.colocated:
        flag = "--vllm_server_base_url"
        entry = (*entry, flag, "http://$SERVER:8000")
    return Started(
        settings=settings, files=files, entry=entry, prepare=_server(job), ray=False,
        variables=(MODEL, PROMPTS, ("REWARD", "accuracy_reward", "Reward function of TRL, or a dotted name of one's own")),
        install=(f"pip install 'trl[vllm]=={job.framework.version}' accelerate",),
    )  # fmt: skip


def _server(job: FrameworkJob) -> tuple[str, ...]:
    """Lines that start the server of the pool that generates: on its GPUs, or on its nodes."""
    if job.colocated:
        return ()
    rollout, gpus = job.rollout, job.rollout_pool[1]
    words = f"--tensor_parallel_size {rollout.tp} --data_parallel_size {rollout.replicas}"
    serve = f'trl vllm-serve --model "$MODEL" {words} --gpu_memory_utilization {job.cache_share:g}'
    serve += f" --max_model_len {job.work.max_length}"
    if job.staleness:
        words = f"--tensor-parallel-size {rollout.tp} --data-parallel-size {rollout.replicas}"
        transfer = json.dumps({"backend": "nccl"})
        serve = (
            f'VLLM_SERVER_DEV_MODE=1 vllm serve "$MODEL" {words} --gpu-memory-utilization {job.cache_share:g} '
            f"--max-model-len {job.work.max_length} --max-num-seqs {job.engine_batch} --logprobs-mode processed_logprobs "
            f"--weight-transfer-config '{transfer}'"
        )
    if job.nodes == 1:
        train = job.train_pool[1]
        first = ",".join(str(train + one) for one in range(gpus))
        mine = ",".join(map(str, range(train)))
        return (
            f"CUDA_VISIBLE_DEVICES={first} {serve} --port 8000 > server.log 2>&1 &",
            'server=$!; trap \'kill "$server" 2> /dev/null || true\' EXIT',
            f"export SERVER=localhost CUDA_VISIBLE_DEVICES={mine}",
        )  # fmt: skip
    return (
        f"# Node {job.train_pool[0]} generates.",
        f'if [ "$NODE_RANK" = {job.train_pool[0]} ]; then exec env {serve} --host 0.0.0.0 --port 8000; fi',
        ': "${SERVER:?set SERVER to the address of the node that generates}"',
    )  # fmt: skip


def trl_refusals(job: FrameworkJob) -> list[str]:
    """TRL under accelerate with FSDP2."""
    layout, rollout, found = job.layout, job.rollout, list[str]()
    if job.backend.name != "fsdp":
        found.append("plans of DeepSpeed are not exported to TRL; plan with --trainer trl")
    if (layout.tp, layout.pp, layout.ep) != (1, 1, 1):
        found.append(f"tp {layout.tp}, pp {layout.pp}, ep {layout.ep}: FSDP2 under accelerate splits data and sequences alone")
    if job.work.critic is not None:
        found.append("a value model is not trained by GRPOTrainer; plan with grpo")
    if job.work.lora_rank and job.staleness:
        found.append("adapters and generation that runs ahead are not exported together; plan with --staleness 0")
    if not job.colocated and job.rollout_pool[0] > 1:
        found.append(f"{job.rollout_pool[0]} nodes generate: TRL talks to one server, on one node")
    if (rollout.pp, rollout.attn_dp) != (1, 1):
        found.append(f"the rollout has pp {rollout.pp}, dp {rollout.attn_dp}: engines have tensor parallelism alone")
    if job.batch % (layout.micro_batch_size * layout.dp):
        each = f"micro batch {layout.micro_batch_size} times dp {layout.dp}"
        found.append(f"{job.batch} answers of an update are no multiple of {each}")
    return found


def slime(job: FrameworkJob) -> Started:
    """The command line of train.py: its own flags, and Megatron's for the actor."""
    settings = settings_of(job, "slime.txt")
    groups = {title: words for title, words in megatron.arguments(job.actor).items() if title != "Batch"}
    core = [word for words in groups.values() for flags in words for word in flags] + ["--global-batch-size", str(job.batch)]
    own = flag_words(settings)
    disk, places = list[str](), list[Variable]()
    if job.plan.placement.sync in ("disk", "delta"):
        disk += ["--update-weight-disk-dir", "$SYNC_DIR"]
        places.append(("SYNC_DIR", None, "Folder that trainer and engines share, for weights"))
    if job.plan.placement.sync == "delta":
        disk += ["--update-weight-local-checkpoint-dir", "$SYNC_LOCAL"]
        places.append(("SYNC_LOCAL", None, "Local folder of each engine's host, for weights"))
    reference = ("--ref-load", "$REF_LOAD") if job.work.reference else ()
    return Started(
        settings=settings, files={"arguments.txt": "\n".join([*own, *core]) + "\n"},
        entry=(
            "python3", f"$SLIME/{job.offered.program}", "${arguments[@]}", "--hf-checkpoint", "$MODEL", "--load", "$REF_LOAD",
            *reference,
            "--prompt-data", "$TRAIN_FILES", "--input-key", "prompt", "--label-key", "label", "--apply-chat-template",
            "--rm-type", "$REWARD", "--num-rollout", "$NUM_ROLLOUT", *disk,
        ),
        prepare=(
            "mapfile -t arguments < arguments.txt", 'export PYTHONPATH="$MEGATRON:$SLIME:${PYTHONPATH:-}"',
            *(f"export {name}={one.value}" for name, one in core_environment(job.actor).items()),
        ),
        starts_ray=True,
        variables=(
            (*MODEL[:2], "Folder of the model in Hugging Face format, in fp8 blocks") if job.plan.layouts.rollout_precision.weights
            != "bf16" else MODEL,
            PROMPTS, ("SLIME", None, "Checkout of THUDM/slime"),
            ("MEGATRON", "/root/Megatron-LM", "Checkout of Megatron-LM: where slime's image has it"),
            ("REF_LOAD", None, "The model as a checkpoint of Megatron (tools/convert_hf_to_torch_dist.py)"),
            ("REWARD", "deepscaler", "Name of slime's reward"), ("NUM_ROLLOUT", "1000", "Steps"), *places,
        ),
        install=("docker pull slimerl/slime:latest",),
    )  # fmt: skip


def slime_refusals(job: FrameworkJob) -> list[str]:
    """What its Megatron actor does not train."""
    rank = job.work.lora_rank
    return [f"adapters of rank {rank}: slime trains every weight; leave --lora-rank out"] if rank else []


def areal(job: FrameworkJob) -> Started:
    """Its YAML, with the example program around GRPO."""
    rollout, apart = job.rollout, job.plan.placement.critic_gpus
    critic = job.layout.replace(dp=apart // (job.layout.tp * job.layout.pp * job.layout.cp)) if apart else job.layout
    engines = f"{job.engine.name}:d{rollout.replicas * rollout.attn_dp}p{rollout.pp}t{rollout.tp}"
    settings = settings_of(
        job, "areal.txt", actor_allocation=_allocation(job, job.layout), rollout_allocation=engines,
        critic_allocation=_allocation(job, critic),
    )  # fmt: skip
    kinds = (
        ("TRAIN_NODES", None, f"Slurm nodes of {job.hardware.name}, as sbatch --nodelist takes them"),
        ("GENERATE_NODES", None, f"Slurm nodes of {job.generate_hardware.name}"),
    ) if job.two_kinds else ()  # fmt: skip
    return Started(
        settings=settings, files={"areal.yaml": library.dump_yaml(settings)}, ray=not job.two_kinds, once=job.two_kinds,
        entry=("python3", f"$AREAL/{job.offered.program}", "--config", "areal.yaml"),
        variables=(
            MODEL, ("DATASET", "openai/gsm8k", "Prompts with answers: a data set that AReaL knows"),
            ("AREAL", None, "Checkout of inclusionAI/AReaL"), *kinds,
        ),
        install=("git clone https://github.com/inclusionAI/AReaL && pip install -e AReaL",),
        notes=("Start it once, on a machine that submits Slurm jobs.",) if job.two_kinds else (),
    )  # fmt: skip


def _allocation(job: FrameworkJob, layout: Layout) -> str:
    """Back end and degrees in AReaL's words."""
    letters = {"d": layout.dp, "p": layout.pp, "t": layout.tp, "c": layout.cp, "e": layout.ep}
    actor = "".join(f"{letter}{size}" for letter, size in letters.items() if size > 1 or letter == "d")
    if layout.ep > 1:
        attention = f"d{layout.dp}p{layout.pp}t{layout.tp}c{layout.cp}"
        actor = f"(attn:{attention}|ffn:d{layout.edp}p{layout.pp}t{layout.etp}e{layout.ep})"
    return f"{job.backend.name}:{actor}"


def areal_refusals(job: FrameworkJob) -> list[str]:
    """What its allocations cannot say."""
    layout, work, apart, found = job.layout, job.work, job.plan.placement.critic_gpus, list[str]()
    if job.backend.name == "fsdp" and (layout.pp, layout.ep) != (1, 1):
        found.append(f"pp {layout.pp}, ep {layout.ep}: AReaL's FSDP has data, tensor and context parallelism; use megatron")
    if apart % (layout.tp * layout.pp * layout.cp):
        found.append(f"{apart} GPUs of the critic are no multiple of the actor's tp * pp * cp, whose layout it has")
    if work.lora_rank and job.plan.placement.sync != "disk":
        found.append("adapters travel over disk there (gsm8k_grpo_lora.yaml): plan with --sync disk")
    if work.lora_rank and job.backend.name == "megatron" and job.engine.name == "sglang":
        found.append("adapters under Megatron need vLLM there; plan with --engine vllm")
    if job.two_kinds and int(job.hardware.gpus_per_node) != int(job.generate_hardware.gpus_per_node):
        found.append("cluster.n_gpus_per_node is one number for both kinds of nodes")
    return found


def prime_rl(job: FrameworkJob) -> Started:
    """Its TOML."""
    name = job.work.model.name
    settings = settings_of(job, "prime_rl.txt", hub=name)
    settings["model"]["name"] = "MODEL"
    return Started(
        settings=settings, files={"rl.toml": toml_text(settings)},
        entry=("uv", "run", "--project", "$PRIME_RL", "rl", "@", "rl.toml", "--model.name", "$MODEL"), ray=False, once=True,
        variables=(MODEL, ("PRIME_RL", None, "Checkout of PrimeIntellect-ai/prime-rl")),
        install=("git clone --recursive https://github.com/PrimeIntellect-ai/prime-rl && export PRIME_RL=$PWD/prime-rl",),
        notes=(
            "The environment is math-env: put the user's into orchestrator.train.source.",
            *(("It submits itself to Slurm, which it needs for more than one node: start it once.",) if job.nodes > 1 else ()),
        ),
    )  # fmt: skip


def prime_refusals(job: FrameworkJob) -> list[str]:
    """FSDP2 of prime-rl."""
    layout, found = job.layout, list[str]()
    if (layout.tp, layout.pp) != (1, 1):
        found.append(f"tp {layout.tp}, pp {layout.pp}: prime-rl trains with FSDP2, context and expert parallelism alone")
    if layout.recompute == Recompute.SELECTIVE:
        found.append("selective recompute has other modules there; plan with full or none")
    if job.batch != job.work.trained:
        found.append(f"updates of {job.batch} of {job.work.trained} answers: prime-rl makes one of all; leave train_batch out")
    if job.work.lora_rank and job.plan.placement.sync != "disk":
        found.append("adapters travel over the file system there (trainer.validate_lora_broadcast): plan with --sync disk")
    if job.rollout.pp > 1:
        found.append(f"the rollout has pp {job.rollout.pp}: its servers have tensor and data parallelism")
    return found


TARGETS: Mapping[str, RlTarget] = {
    "verl": RlTarget(title="verl (Hydra overrides)", render=verl, refusals=verl_refusals, weights=FP8, caches=("bf16", "fp8")),
    "nemo-rl": RlTarget(
        title="NeMo RL (overrides of its GRPO configuration)", render=nemo_rl, refusals=nemo_refusals, weights=FP8,
        caches=("bf16", "fp8"),
    ),
    "openrlhf": RlTarget(title="OpenRLHF (command line)", render=openrlhf, refusals=openrlhf_refusals),
    "trl": RlTarget(title="TRL (GRPO under accelerate)", render=trl, refusals=trl_refusals, kinds=True),
    "slime": RlTarget(
        title="slime (command line, Megatron and SGLang)", render=slime, refusals=slime_refusals, weights=FP8,
        caches=("bf16", "fp8"),
    ),
    "areal": RlTarget(title="AReaL (YAML)", render=areal, refusals=areal_refusals, kinds=True, caches=("bf16", "fp8")),
    "prime-rl": RlTarget(title="prime-rl (TOML)", render=prime_rl, refusals=prime_refusals),
}  # fmt: skip
"""Names after --to for an RL plan."""
