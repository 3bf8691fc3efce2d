"""The framework's own configuration code on an exported folder, in a process of its own, where the framework is installed.

verl: Hydra composes, its dataclasses are built and validate_config runs. OpenRLHF: its parser, taken out of train_ppo_ray.py, where
it stands under ``__main__``. TRL: its parser with the configuration class. NeMo RL: its overrides on grpo_math_1B.yaml of a
checkout that $NEMO_RL names. Of the others names alone are checked (known_names).
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from planner.trainers.bundle.folder import NamedExport
from planner.trainers.checking import Checked, Request
from planner.trainers.checking.child import ask, installed
from planner.trainers.checking.import_standins import settle_torch, stand_in

NEEDED = {
    "verl": ("torch", "transformers", "verl", "hydra", "ray", "tensordict", "codetiming"),
    "openrlhf": ("openrlhf",),
    "trl": ("trl", "transformers", "accelerate"),
    "nemo-rl": ("hydra", "omegaconf"),
}
"""Packages without which the framework's own code is not run."""


def check_export(made: NamedExport, folder: Path) -> Checked:
    """How far the framework's own code goes with an exported folder; names are checked in any case."""
    named = f"names of {made.checked}"
    missing = [one for one in NEEDED.get(made.target, ()) if not installed(one)]
    if made.target == "nemo-rl" and not os.environ.get("NEMO_RL"):
        missing.append("$NEMO_RL")
    if made.target not in NEEDED or missing:
        why = f"{', '.join(missing)} missing here" if missing else "planner runs no parser of this framework"
        return Checked(target=made.target, level="name known", details=[named], missing=why)
    module = SimpleNamespace(__name__=__name__, NEEDED=NEEDED[made.target])
    answer = ask(made.target, module, [{"target": made.target, "folder": str(folder.resolve())}], {})[0]
    if answer.missing and not answer.level:
        return Checked(target=made.target, level="name known", details=[named], missing=answer.missing)
    return answer


def one(asked: Request, answer: Checked) -> None:
    """How far the framework goes with one folder."""
    {"verl": _verl, "openrlhf": _openrlhf, "trl": _trl, "nemo-rl": _nemo_rl}[asked["target"]](Path(asked["folder"]), answer)


def _verl(folder: Path, answer: Checked) -> None:
    settle_torch()
    stand_in("triton")
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
    """Statements of the program's main block up to parse_args."""
    root = importlib.util.find_spec("openrlhf")
    places = list(root.submodule_search_locations or []) if root else []
    tree = ast.parse((Path(places[0]) / "cli" / "train_ppo_ray.py").read_text(encoding="utf-8"))
    main = next(node for node in tree.body if isinstance(node, ast.If))
    stop = next(number for number, node in enumerate(main.body) if "parse_args" in ast.unparse(node))
    scope: dict[str, Any] = {}
    head = "import argparse\nfrom datetime import datetime\n"
    exec(compile(head + "\n".join(ast.unparse(node) for node in main.body[:stop]), "parser", "exec"), scope)
    words = (folder / "arguments.txt").read_text(encoding="utf-8").splitlines()
    given = vars(scope["parser"].parse_args([*words, "--actor.model_name_or_path", "model", "--reward.remote_url", "reward.py"]))
    answer.reached("parsed")
    gpus = given["actor.num_nodes"] * given["actor.num_gpus_per_node"]
    if given["train.colocate_all"] and not given["train.async_enable"]:
        answer.same("GPUs of actor and engines", gpus, given["vllm.num_engines"] * given["vllm.tensor_parallel_size"])
    if given["train.partial_rollout_enable"] and not given["train.async_enable"]:
        raise ValueError("--train.partial_rollout_enable requires --train.async_enable")


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
    config = module.load_config(Path(os.environ["NEMO_RL"]) / "examples" / "configs" / "grpo_math_1B.yaml")
    words = (folder / "overrides.txt").read_text(encoding="utf-8").splitlines()
    OmegaConf.to_container(module.parse_hydra_overrides(config, [*words, "policy.model_name=model"]), resolve=True)
    answer.reached("parsed")

