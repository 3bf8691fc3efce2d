"""What verl's programs take where a command says nothing: the configuration of the verl that lies around a script."""

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, shown
from planner.trainers.reading.commands import Launch
from planner.trainers.reading.interpolation import override
from planner.trainers.reading.programs import program_file
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.settings import beside, file_settings, rooted
from planner.trainers.reading.values import read_text
from planner.trainers.verl.loading_dtype import MODEL_DTYPE, loaded

USUAL = (
    *(f"actor_rollout_ref.actor.megatron.{one}" for one in
      ("tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel")),
    *(f"actor_rollout_ref.{one}" for one in
      ("model.enable_gradient_checkpointing", "actor.ppo_mini_batch_size", "actor.ulysses_sequence_parallel_size", "rollout.n",
       "rollout.n_agent", "model.enable_activation_offload", "model.use_fused_kernels", "model.lora_rank",
       *(f"actor.{one}" for one in ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz",
                                    "ppo_max_token_len_per_gpu", "fsdp_config.fsdp_size", "fsdp_config.reshard_after_forward",
                                    "fsdp_config.offload_policy")))),
    "data.max_prompt_length", "data.max_response_length", "data.train_batch_size", "trainer.n_gpus_per_node", "trainer.nnodes",
)  # fmt: skip
"""Keys whose defaults are taken from the configuration of the verl around a script."""
CHECKPOINTING = "model.enable_gradient_checkpointing"
USUAL_SFT = (
    CHECKPOINTING, MODEL_DTYPE, "model.lora_rank", "data.train_batch_size", "data.max_length",
    "data.micro_batch_size_per_gpu", "data.micro_batch_size", "ulysses_sequence_parallel_size", "model.fsdp_config.cpu_offload",
    "model.fsdp_config.offload_params",
)  # fmt: skip
"""Those of its SFT trainer."""
OWN_SFT = (
    *USUAL_SFT, "model.target_modules", "model.use_liger", "model.partial_pretrain", "use_remove_padding",
)  # fmt: skip
"""Those that a configuration of a project's own decides too."""
TRAINER = "FSDPSFTTrainer"
"""Its SFT trainer."""
HYDRA = re.compile(r"@hydra\.main\(([^()]{1,400})\)")
NEWER = re.compile(
    r"[+~]*(trainer\.(resume_mode|resume_from_path|max_ckpt_to_keep|checkpoint\.[\w.]+|device)|data\.multiturn\.enable_thinking\w*)="
)
"""Words of its SFT trainer since 0.4.1.  [trainer/config/sft_trainer.yaml]"""
SHARED, EACH = "data.micro_batch_size", "data.micro_batch_size_per_gpu"
NOT_SHARED = f"{SHARED} is read by verl 0.1 alone, whose ranks share it; since 0.2 it is {EACH}, 4 where nothing is said, as here"
BEFORE = "model.enable_gradient_checkpointing is not said: true since verl 0.4.1, as here; before it nothing is recomputed"


def is_sft(found: Launch) -> bool:
    """Whether a command starts verl's SFT trainer, or a program around it, known by the weights that it names."""
    return "sft_trainer" in found.program or any(re.match(r"[+~]*model\.partial_pretrain=", one) for one in found.words)


def own_sft(path: Path, program: str) -> tuple[str, ...]:
    """A note on a program of a project whose trainer is a subclass of verl's SFT trainer; empty for another."""
    file = _program(path, program)
    tree = library.parse_python(read_text(file), str(file)) if file is not None else ast.Module([], [])
    made = [one for one in tree.body if isinstance(one, ast.ClassDef) and any(last_name(base) == TRAINER for base in one.bases)]
    if not made:
        return ()
    own = [inner.name for one in made for inner in one.body if isinstance(inner, ast.FunctionDef) and inner.name != "__init__"]
    changed = f", with {', '.join(own[:6])} of its own" if own else ""
    return (f"{program}: a subclass of verl's {TRAINER}{changed}: read as verl's, what it changes of the step is not in the plan",)


def usual(path: Path, found: Launch, words: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Defaults of the verl that lies around the script, which differ between versions: tp 4 and no recompute in those of 2024;
    what stands over the command's words; and notes. A verl that does not know the command's keys is not the one that it starts."""
    tuned = is_sft(found)
    program = _program(path, found.program)
    file, own = _configuration(path, found, tuned, program)
    data = file_settings(file, "a configuration of verl") if file and tuned == ("sft" in f"{found.program}{file.stem}") else {}
    notes: tuple[str, ...] = ()
    if tuned and data and (strange := _strange(data, found.words)) is not None:
        data, notes = {}, (f"{strange} is no key of the verl around, whose defaults are not taken",)
    if own and data and file is not None:
        notes = (f"its program reads {file.name}, which is taken under its command",)
    place = str(found.settings.get("config_path") or "")
    if tuned and place and not own and not place.rstrip("/").endswith("trainer/config"):
        notes = (*notes, f"its configuration in {shown(place)} is not there: verl's own is taken under its command")
    known: dict[str, Any] = {}
    if own and _named(found):
        known = {key: value for key, value in data.items() if key not in ("defaults", "hydra")}
    for place in (OWN_SFT if own else USUAL_SFT) if tuned else USUAL:
        inner: Any = data
        for key in place.split("."):
            inner = inner.get(key) if isinstance(inner, dict) else None
        if isinstance(inner, bool | int) or ((own or place == MODEL_DTYPE) and isinstance(inner, str | list)):
            known = override(known, {place: inner})
    if tuned and not data and SHARED in words and EACH not in words:
        known, notes = override(known, {EACH: 4}), (*notes, NOT_SHARED)
    stands: dict[str, Any] = {}
    if tuned and data:
        stands, said = loaded(program, words, data)
        notes = (*notes, *said)
    open_still = tuned and "fsdp_sft_trainer" in found.program and CHECKPOINTING not in " ".join(found.words) and not known
    return known, stands, (*notes, *((BEFORE,) if open_still and not any(map(NEWER.match, found.words)) else ()))


def _named(found: Launch) -> bool:
    """Whether a command names a configuration of its own."""
    return not found.settings.keys().isdisjoint(("config_name", "config_path"))


def _configuration(path: Path, found: Launch, tuned: bool, program: Path | None) -> tuple[Path | None, bool]:
    """The file of defaults, and whether the program that lies there names one of its own.  [hydra.main]"""
    name = "ppo_trainer" if not tuned else "sft_trainer_engine" if found.program.endswith(".sft_trainer") else "sft_trainer"
    named = str(found.settings.get("config_name") or name).removesuffix(".yaml")
    package = found.program.partition(".")[0] if tuned and re.fullmatch(r"\w+(\.\w+)+", found.program) else "verl"
    parents = path.resolve().parents[:8]
    if tuned and _named(found):
        folder = rooted(str(found.settings.get("config_path") or ""))
        file = beside(path, f"{folder}/{named}.yaml" if folder else f"{named}.yaml", (".yaml",))
        if file is None and named != name:
            raise PlannerError(f"{path}: it names the configuration {shown(named)}, which is not there; import that file")
        if file is not None:
            return file, True
    written = HYDRA.search(read_text(program)) if program is not None else None
    said = dict(re.findall(r"config_(name|path)\s*=\s*[\"']([^\"'\n]{1,200})[\"']", written[1])) if written else {}
    own = tuned and "config_name" not in found.settings and said.get("name", name).removesuffix(".yaml") != name
    named = said["name"].removesuffix(".yaml") if own else named
    if not re.fullmatch(r"[\w-]{1,80}", named):
        return None, False
    ways = (package, f"{package}/{package}", "verl", "verl/verl")
    folders = [one / way / "trainer" / "config" for one in parents for way in ways]
    if program is not None and "path" in said and ".." not in Path(said["path"]).parts:
        folders = [program.parent / said["path"], *(one / said["path"] for one in parents), *folders]
    return next((file for one in folders if (file := one / f"{named}.yaml").is_file()), None), own


def _program(path: Path, program: str) -> Path | None:
    """The program's file: near the script, or where a path of somebody's machine ends."""
    if (near := program_file(path, program)) is not None:
        return near
    parts = Path(program if program.endswith(".py") else f"{program.replace('.', '/')}.py").parts
    ends = [Path(*parts[start:]) for start in range(len(parts) - 1) if ".." not in parts and not Path(*parts[start:]).is_absolute()]
    return next((file for one in path.resolve().parents[:8] for end in ends[:12] if (file := one / end).is_file()), None)


def _strange(data: Mapping[str, Any], words: Iterable[str]) -> str | None:
    """A key of a command that a whole configuration lacks, so that hydra would refuse it."""
    if not {"data", "model", "optim", "trainer"} <= data.keys():
        return None
    for key in (one.partition("=")[0] for one in words if re.match(r"(data|model|optim)\.[\w.]+=", one)):
        inner: Any = data
        for part in key.split("."):
            if not isinstance(inner, Mapping):
                break
            if part not in inner:
                return key
            inner = inner[part]
    return None
