"""The framework's own configuration code on an exported folder, in a process of its own, where the framework is there.

verl: Hydra composes, its dataclasses are built and validate_config runs. OpenRLHF: its parser and the checks behind it, taken out
of train_ppo_ray.py, where they stand under ``__main__``. TRL: its parser with the configuration class. AReaL: its loader with
the dataclasses, the allocations and PPOTrainer's checks. Of checkouts, which the variables that the exports ask for name: NeMo
RL's overrides on grpo_math_1B.yaml, prime-rl's pydantic configuration, slime's parse_args with Megatron's below it. What is
not there is held against recorded names and types (known_names).
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from planner.rl.rl_plan import load_rl_plan
from planner.trainers.bundle.folder import NamedExport
from planner.trainers.bundle.model_config import model_config
from planner.trainers.checking import Checked, Request
from planner.trainers.checking.child import ask, installed
from planner.trainers.checking.import_standins import bare, hide, modern_typing, pretend_gpu, settle_torch, stand_in
from planner.trainers.reading.settings import parsed

NEEDED = {
    "verl": ("torch", "transformers", "verl", "hydra", "ray", "tensordict", "codetiming"),
    "openrlhf": ("openrlhf",),
    "trl": ("trl", "transformers", "accelerate"),
    "nemo-rl": ("hydra", "omegaconf"),
    "areal": ("areal", "torch", "hydra", "lark"),
    "prime-rl": ("pydantic", "verifiers", "renderers"),
    "slime": ("torch", "transformers", "megatron.training"),
}
"""Packages without which the framework's own code is not run."""
CHECKOUTS = {"nemo-rl": "NEMO_RL", "prime-rl": "PRIME_RL", "slime": "SLIME"}
"""Variable that names the checkout of what is on no package index."""


def missing(name: str) -> list[str]:
    """Packages and checkouts that the check of a framework lacks here."""
    found = [one for one in NEEDED[name] if not installed(one)]
    variable = CHECKOUTS.get(name, "")
    return found + ([f"${variable}"] if variable and not os.environ.get(variable) else [])


def check_export(made: NamedExport, folder: Path) -> Checked:
    """How far the framework's own code goes with an exported folder; names and types are checked in any case."""
    named = f"names and types of {made.checked}"
    if lacks := missing(made.target):
        why = f"{', '.join(lacks)} missing here"
        return Checked(target=made.target, level="name known", details=[named], missing=why)
    module = SimpleNamespace(__name__=__name__, NEEDED=NEEDED[made.target])
    answer = ask(made.target, module, [{"target": made.target, "folder": str(folder.resolve())}], {})[0]
    if answer.missing and not answer.level:
        return Checked(target=made.target, level="name known", details=[named], missing=answer.missing)
    return answer


def one(asked: Request, answer: Checked) -> None:
    """How far the framework goes with one folder."""
    CHECKS[asked["target"]](Path(asked["folder"]), answer)


def _verl(folder: Path, answer: Checked) -> None:
    settle_torch()
    stand_in("triton")
    hide("verl.workers.rollout.vllm_rollout")  # which asks for an installed engine
    import verl
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    script = (folder / "run.sh").read_text(encoding="utf-8")
    found, program = re.search(r"--config-name=(\w+)", script), re.search(r"-m (verl[\w.]+)", script)
    assert found and program, "run.sh names no configuration"
    words = (folder / "overrides.txt").read_text(encoding="utf-8").splitlines()
    words += ["actor_rollout_ref.model.path=model", "data.train_files=a.parquet", "data.val_files=a.parquet"]
    root = Path(verl.__file__ or "").parent
    config = root.joinpath(*program[1].split(".")[1:-1], "config")
    os.chdir(root.parent)  # asynchronous configurations name verl/trainer/config
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(config), version_base=None):
        composed = compose(config_name=found[1], overrides=words)
    answer.reached("parsed")
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    if "async_training" not in composed:  # whose batches come from a queue
        validate_config(composed, use_reference_policy=bool(composed.actor_rollout_ref.actor.use_kl_loss), use_critic=False)
    omega_conf_to_dataclass(composed.actor_rollout_ref.actor)
    omega_conf_to_dataclass(composed.actor_rollout_ref.rollout)
    answer.reached("validated")


def _openrlhf(folder: Path, answer: Checked) -> None:
    """The program's main block up to the start of training."""
    places = list(getattr(importlib.util.find_spec("openrlhf"), "submodule_search_locations", None) or [])
    tree = ast.parse((Path(places[0]) / "cli" / "train_ppo_ray.py").read_text(encoding="utf-8"))
    main = next(node for node in tree.body if isinstance(node, ast.If))
    bare("openrlhf", places[0])
    bare("openrlhf.utils", f"{places[0]}/utils")
    words = (folder / "arguments.txt").read_text(encoding="utf-8").splitlines()
    model = ["--actor.model_name_or_path", "model", "--data.prompt_dataset", "prompts.jsonl"]
    sys.argv = ["train_ppo_ray", *words, *model, "--reward.remote_url", "reward.py"]
    scope: dict[str, Any] = {}
    head = "import argparse\nfrom datetime import datetime\n"
    steps = [ast.unparse(node) for node in main.body if "train(args)" not in ast.unparse(node)]
    exec(compile(head + "\n".join(steps), "parser", "exec"), scope)
    given = scope["args"]
    answer.reached("validated")
    gpus = given.actor.num_nodes * given.actor.num_gpus_per_node
    if given.train.colocate_all and not given.train.async_enable:
        answer.same("GPUs of actor and engines", gpus, given.vllm.num_engines * given.vllm.tensor_parallel_size)


def _trl(folder: Path, answer: Checked) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    import yaml
    from transformers import HfArgumentParser

    late = (folder / "train_async.py").is_file()
    if late:
        from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig as Config
    else:
        from trl.trainer.grpo_config import GRPOConfig as Config
    data = yaml.safe_load((folder / "grpo.yaml").read_text(encoding="utf-8"))
    data |= {"bf16": False, "use_cpu": True, "output_dir": "out"}  # bf16 asks for a GPU
    HfArgumentParser(Config).parse_dict(data)
    answer.reached("parsed")


def _nemo_rl(folder: Path, answer: Checked) -> None:
    sys.path.insert(0, os.environ["NEMO_RL"])
    file = Path(os.environ["NEMO_RL"]) / "nemo_rl" / "utils" / "config.py"
    spec = importlib.util.spec_from_file_location("nemo_config", file)
    assert spec and spec.loader, f"{file} is not there"
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from omegaconf import OmegaConf

    module.register_omegaconf_resolvers()
    named = re.search(r"examples/configs/(\w+\.yaml)", (folder / "run.sh").read_text(encoding="utf-8"))
    assert named, "run.sh names no configuration"
    config = module.load_config(Path(os.environ["NEMO_RL"]) / "examples" / "configs" / named[1])
    words = (folder / "overrides.txt").read_text(encoding="utf-8").splitlines()
    OmegaConf.to_container(module.parse_hydra_overrides(config, [*words, "policy.model_name=model"]), resolve=True)
    answer.reached("parsed")


def _areal(folder: Path, answer: Checked) -> None:
    """load_expr_config up to the object, then what PPOTrainer's constructor asks of it before it makes anything."""
    settle_torch()
    root = Path((getattr(importlib.util.find_spec("areal"), "submodule_search_locations", None) or [""])[0])
    for name in ("areal", "areal.api", "areal.engine", "areal.engine.fsdp_utils", "areal.utils"):
        bare(name, str(root.joinpath(*name.split(".")[1:])))
    hide("areal.infra")  # its launchers import every engine
    stand_in("numba", "etcd3", "colorlog", "uvloop", "ray", "triton")
    os.environ |= {"MODEL": "model", "DATASET": "openai/gsm8k", "TRAIN_NODES": "a1", "GENERATE_NODES": "b1"}
    import areal.api.cli_args as cli
    from areal.api.alloc_mode import ModelAllocation
    from omegaconf import OmegaConf

    data = cli.parse_cli_args(["--config", str(folder / "areal.yaml")])[0]
    config = OmegaConf.to_object(cli.to_structured_cfg(data, cli.GRPOConfig))
    answer.reached("parsed")
    tree = ast.parse((root / "trainer" / "rl_trainer.py").read_text(encoding="utf-8"))
    trainer = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "PPOTrainer")
    kept = [
        node for node in trainer.body
        if isinstance(node, ast.FunctionDef) and node.name in ("_validate_cfg", "_is_colocation", "_is_actor_rollout_colocated")
    ]  # fmt: skip
    first = next(node for node in trainer.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    asks = [ast.unparse(node) for node in first.body if re.match(r"self\.(_should|\w+_alloc|_validate)", ast.unparse(node))]
    scope = {**vars(cli), "ModelAllocation": ModelAllocation}
    future = ast.parse("from __future__ import annotations").body
    trainer.body, trainer.bases, trainer.decorator_list = [*kept], [], []
    exec(compile(ast.Module([*future, trainer], []), "trainer", "exec"), scope)
    made = scope["PPOTrainer"]()
    made.config = config
    exec("\n".join(asks), {**scope, "self": made, "config": config})
    place = load_rl_plan(folder / "plan.yaml").placement
    answer.reached("validated")
    answer.same("GPUs that train", made.actor_alloc.world_size, place.train_gpus)
    if config.critic is not None:
        critic = ModelAllocation.from_str(config.critic.backend, name="critic").world_size
        answer.same("GPUs of the critic", critic, place.critic_gpus or place.train_gpus)


def _prime_rl(folder: Path, answer: Checked) -> None:
    """RLConfig by its own command line; its environment stands for one that the user installs."""
    checkout = Path(os.environ["PRIME_RL"])
    sys.path.insert(0, str(checkout / "packages" / "prime-rl-configs" / "src"))
    import verifiers.v1 as vf

    module = types.ModuleType("math_env")
    module.__dict__["MathTaskset"] = type("MathTaskset", (vf.Taskset,), {"__module__": "math_env"})
    module.__dict__["__all__"] = ["MathTaskset"]
    sys.modules["math_env"] = module
    from prime_rl.configs.rl import RLConfig
    from prime_rl.utils.config import cli

    config = cli(RLConfig, args=["@", str(folder / "rl.toml"), "--model.name", "Qwen/Qwen3-8B"])
    answer.reached("validated")
    plan = load_rl_plan(folder / "plan.yaml")
    asked, work, place = config.deployment, plan.workload, plan.placement
    if asked.type == "multi_node":
        train, out = asked.num_train_nodes, asked.num_infer_nodes * asked.num_infer_replicas
        answer.same("GPUs that train", train * asked.gpus_per_node, place.train_gpus)
        answer.same("GPUs that generate", out * asked.gpus_per_node, place.generate_gpus)
    else:
        answer.same("GPUs of both pools", (asked.num_train_gpus, asked.num_infer_gpus), (place.train_gpus, place.generate_gpus))
    answer.same("answers of a step", config.orchestrator.batch_size, work.trained)
    answer.same("recompute", config.trainer.model.ac is not None, int(plan.layouts.actor.recompute) > 0)


def _slime(folder: Path, answer: Checked) -> None:
    """parse_args of slime: its flags, the checks on them, then Megatron's parser and validate_args with the actor's world."""
    settle_torch()
    modern_typing()
    checkout = os.environ["SLIME"]
    sys.path.insert(0, checkout)
    bare("slime.backends.megatron_utils", f"{checkout}/slime/backends/megatron_utils")  # which patches the running trainer
    absent = stand_in("triton", "sglang", "sglang_router", "ray", "httpx", "uvicorn", "wandb", "aiohttp")
    pretend_gpu(9, 0)
    plan = load_rl_plan(folder / "plan.yaml")
    for name, value in re.findall(r"^export (\w+)=(\w+)$", (folder / "run.sh").read_text(encoding="utf-8"), re.MULTILINE):
        os.environ[name] = value
    out = folder / "hugging-face"
    out.mkdir(exist_ok=True)
    (out / "config.json").write_text(json.dumps(model_config(plan.workload.model)), encoding="utf-8")
    words = (folder / "arguments.txt").read_text(encoding="utf-8").splitlines()
    places = ["--hf-checkpoint", str(out), "--load", str(out), "--ref-load", str(out), "--prompt-data", "a", "--num-rollout", "9"]
    disk = ["--update-weight-disk-dir", str(out)]
    disk += ["--update-weight-local-checkpoint-dir", str(out)] if plan.placement.sync == "delta" else []
    sys.argv = ["train.py", *words, *places, *disk]
    import slime.utils.arguments as own

    if "sglang" in absent:  # whose server has the flags behind --sglang-: their values as they stand
        given = dict.fromkeys(("dp_size", "pp_size", "ep_size", "moe_dp_size"), 1) | {
            one.removeprefix("--sglang-").replace("-", "_"): parsed(words[place + 1]) for place, one in enumerate(words[:-1])
            if one.startswith("--sglang-") and not words[place + 1].startswith("--")
        }  # fmt: skip
        flags = {one.removeprefix("--").replace("-", "_"): True for one in words if one.startswith("--sglang-enable")}
        own.sglang_parse_args = lambda: SimpleNamespace(**{f"sglang_{name}": value for name, value in given.items()}, **flags)
    args = own.parse_args()
    answer.reached("validated")
    place = plan.placement
    answer.same("GPUs that train", args.actor_num_nodes * args.actor_num_gpus_per_node, place.train_gpus)
    answer.same("GPUs that generate", args.rollout_num_gpus, place.generate_gpus)
    answer.same("data parallel", args.data_parallel_size, int(plan.layouts.actor.dp))


CHECKS: dict[str, Callable[[Path, Checked], None]] = {
    "verl": _verl, "openrlhf": _openrlhf, "trl": _trl, "nemo-rl": _nemo_rl, "areal": _areal, "prime-rl": _prime_rl, "slime": _slime,
}  # fmt: skip
"""Framework -> what runs its code."""
