"""Which framework a configuration belongs to, and its settings: YAML, TOML, a script with a command line, or words in a file."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from planner import library
from planner.errors import PlannerError, UnknownNameError
from planner.rl.export.known_names import recorded
from planner.rl.readback.rl_found import RlRead, RlSaid, to_rl_plan
from planner.rl.readback.rl_readers import READERS
from planner.rl.rl_answer import plan_of, request_of_plan
from planner.rl.rl_question import RlRequest
from planner.rl.rl_question import ask as ask_rl
from planner.rl.rl_search import price
from planner.trainers.reading.commands import launched
from planner.trainers.reading.given import Given, OpenQuestionsError, ask
from planner.trainers.reading.interpolation import extended, override, resolved
from planner.trainers.reading.settings import Settings, parsed
from planner.trainers.reading.shell import is_open
from planner.trainers.reading.values import read_text

FORMS = {
    "areal": r"max_head_offpolicyness|^gconfig\s*:", "prime-rl": r"^\[orchestrator|^\[\[orchestrator",
    "openrlhf": r"openrlhf\.cli\.train_ppo|^[ \t]*+--(vllm|rollout)\.\w+",
    "slime": r"--rollout-num-gpus|--n-samples-per-prompt|--rollout-batch-size",
    "verl": r"actor_rollout_ref", "nemo-rl": r"^grpo\s*:|^grpo\.num_prompts_per_step|run_grpo\.py",
    "trl": r"^num_generations\s*:",
}  # fmt: skip
"""Framework -> what stands in its configurations, in the order in which they are tried."""
PROGRAMS = {
    "verl": r"(verl|recipe)\.[\w.]+|\S*main_(\w+_)?ppo(\.py)?|\S*fully_async_main(\.py)?",
    "openrlhf": r"openrlhf\.cli\.train_ppo\w*|\S*train_ppo\w*\.py", "slime": r"\S*train(_async)?\.py",
}  # fmt: skip
"""Word that starts a run, in scripts."""
USUAL = {"DEVICE": "gpu"}
"""Variables of scripts that ask the machine, and what they find where a plan is for."""
HAS_READER = ("verl", "nemo-rl", "trl")
"""Frameworks whose configurations are read as the plan of a training where nothing else is asked for."""


def framework_of(path: Path) -> str:
    """The framework whose configuration a file is; '' = none that is known. Raises PlannerError where it cannot be read."""
    text = read_text(path)
    return next((name for name, form in FORMS.items() if re.search(form, text, re.MULTILINE)), "")


def is_rl_configuration(path: Path, name: str | None) -> bool:
    """Whether a file is read as an RL plan: by ``--from``, or as it is of a framework that trains by RL alone."""
    if name is not None:
        return name.removeprefix("rl:") in READERS and (name.startswith("rl:") or name not in HAS_READER)
    found = framework_of(path)
    return bool(found) and found not in HAS_READER


def read_rl(path: Path, said: RlSaid, given: Given, name: str | None = None) -> RlRead:
    """The RL plan of a configuration, not priced. Raises PlannerError with everything that is said nowhere."""
    framework = (name or "").removeprefix("rl:") or framework_of(path)
    if framework not in READERS:
        if name:
            raise UnknownNameError("RL framework", framework, READERS)
        raise PlannerError(f"{path}: looks like no configuration of {', '.join(READERS)}; say which with --from rl:NAME")
    try:
        settings, program = settings_of(path, framework, given)
        found = READERS[framework](settings, program)
    except OpenQuestionsError:
        raise
    except PlannerError:
        if given.questions:
            ask(str(path), given.questions)
        raise
    read = to_rl_plan(found, said, given)
    given.require_used(str(path))
    return read


def priced(read: RlRead) -> RlRead:
    """The plan with its prediction: placement and layouts exactly as the file says them. Raises PlannerError."""
    plan = read.plan
    question = ask_rl(request_of_plan(plan, RlRequest()))
    found = price(question.job, plan.placement, plan.layouts)
    made = plan_of(question, found, plan.why)
    return replace(read, plan=replace(made, gpus=plan.gpus, assumptions=plan.assumptions))


def settings_of(path: Path, framework: str, given: Given) -> tuple[Settings, str]:
    """The settings of a file, and the program that it starts. Raises PlannerError."""
    suffix = path.suffix.lower()
    if suffix in (".yaml", ".yml"):
        data = extended(path, f"a configuration of {framework}", known=("ppo_trainer", "ppo_megatron_trainer"))
        data = {key: value for key, value in data.items() if key != "hydra"}
        return Settings(path, resolved(given.filled(_local(data))), said=given), path.stem
    if suffix == ".toml":
        return Settings(path, given.filled(library.parse_toml(read_text(path), str(path))), said=given), path.stem
    if suffix == ".txt":
        words = [line for line in read_text(path).splitlines() if line.strip() and not line.startswith("#")]
        return Settings(path, given.filled(_of_words(words)), said=given), _program_beside(path)
    text = read_text(path)
    usual = {name: value for name, value in USUAL.items() if name not in given.settings and re.search(rf"\b{name}\b", text)}
    found = launched(path, replace(given, settings={**usual, **given.settings}), PROGRAMS.get(framework, r"\S+\.py"))
    bare = {name.lstrip("-").replace("-", "_") for name, kind in recorded(framework)["settings"].items() if kind == "flag"}
    found = replace(found, settings={name: _closed(value, name in bare) for name, value in found.settings.items()})
    overrides = {key.lstrip("+~"): parsed(value) for key, _, value in (one.partition("=") for one in found.words if "=" in one)}
    data = override(dict(found.settings), overrides) if framework in ("verl", "nemo-rl") else dict(found.settings)
    return Settings(path, resolved(given.filled(data)), said=given), f"{found.program} {found.settings.get('config_name', '')}"


def _closed(value: object, bare: bool) -> object:
    """Without arrays of a file that is not there, which a shell would put behind the value, or behind a flag that has none."""
    if isinstance(value, list):
        kept = [one for one in value if not (isinstance(one, str) and is_open(one))]
        return value if not kept or len(kept) == len(value) else kept[0] if len(kept) == 1 else kept
    return True if bare and isinstance(value, str) and is_open(value) else value


def _local(data: dict[str, object]) -> dict[str, object]:
    """Without references to the environment, which only the run knows: the last part of their name stands for them."""
    return {key: _open(value) for key, value in data.items()}


def _open(value: object) -> object:
    if isinstance(value, dict):
        return {key: _open(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_open(one) for one in value]
    return None if isinstance(value, str) and re.search(r"\$\{oc\.env:", value) else value


def _of_words(words: list[str]) -> dict[str, object]:
    """Flags with their values, or names with an equals sign, one word a line."""
    found: dict[str, object] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, mark, value = word.partition("=")
            name = name[2:].replace("-", "_")
            found[name] = parsed(value) if mark else True
        elif name:
            found[name] = parsed(word)
            name = ""
        elif "=" in word:
            key, _, value = word.partition("=")
            found = override(found, {key.lstrip("+~"): parsed(value)})
    return found


def _program_beside(path: Path) -> str:
    """The program in the launch script of an export, whose words the file holds."""
    script = path.parent / "run.sh"
    return read_text(script) if library.is_file(script) else ""
