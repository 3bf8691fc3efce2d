"""``plan reshape --run``: the engine of a checkpoint's own trainer writes it in another split, then every tensor is checked."""

import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from planner.errors import PlannerError
from planner.lab.elastic import checkpoint_folder as formats
from planner.lab.elastic.attempt import SETTINGS
from planner.lab.elastic.checkpoint_folder import CheckpointFolder, recognise
from planner.lab.launch.torchrun import cause, need_torch, run_watched
from planner.plan_file import Plan
from planner.record import record
from planner.trainers.bundle.folder import make_bundle, write_bundle
from planner.trainers.bundle.nearest import require_expressible
from planner.trainers.bundle.target import ExportJob
from planner.trainers.pytorch.good_checkpoints import marker
from planner.trainers.targets import load_target

MOST_RANKS = 64
"""Processes of one machine that reshard."""


@record
class Resharded:
    """A checkpoint in another split, checked."""

    old: CheckpointFolder
    """What was read."""
    new: CheckpointFolder
    """What was written."""
    tensors: int
    """Tensors of which name, shape, dtype, every value and the sum are those of before."""
    values: int
    """Their numbers."""
    total: float
    """Their sum."""


def reshard(checkpoint: Path, plan: Plan, to: Path, say: Callable[[str], object], limit: float = 3600.0) -> Resharded:
    """Writes the newest whole checkpoint of a folder to ``to`` in the split of a plan, on the processors of this machine, within
    ``limit`` seconds, and checks it. Raises PlannerError where the format needs none, where another tool does it (its command is
    said), and where a tensor is not the same afterwards."""
    old = recognise(checkpoint)
    if old.problem:
        raise PlannerError(f"{old.path} is torn: {old.problem}; give a whole checkpoint")
    if old.kind != formats.DCP or marker(old.path) is None:
        raise PlannerError(elsewhere(old, plan, to))
    need_torch("plan reshape --run")
    if plan.num_gpus > MOST_RANKS:
        raise PlannerError(
            f"{plan.num_gpus} processes on one machine are too many (at most {MOST_RANKS}); it loads into any split as it is: "
            f"plan run PLAN --checkpoints {shlex.quote(str(checkpoint))} --to run"
        )
    target, job = load_target("pytorch"), ExportJob.of(plan)
    require_expressible(target, job, Path("plan.yaml"))
    double = any(one.dtype == "float64" for name, one in old.tensors.items() if name.startswith("model."))
    with tempfile.TemporaryDirectory(prefix="plan-reshape-") as name:
        folder = Path(name) / "run"
        write_bundle(make_bundle(target, job, "torchrun"), folder)
        words = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={plan.num_gpus}", "--max-restarts=0",
            "train.py", "--device", "cpu", "--reshard", os.fspath(old.path.parent.resolve()),
            "--checkpoint", os.fspath(to.resolve()), *(["--double"] if double else []),
        ]  # fmt: skip
        say(f"torch.distributed.checkpoint: {plan.num_gpus} processes load {old.path} and save it in their split")
        deadline = time.monotonic() + limit
        ended = run_watched(words, lambda _: deadline, folder=folder, environment={**SETTINGS, **os.environ})
    if ended.interrupted:
        raise KeyboardInterrupt
    if ended.code or ended.hung:
        why = f"not done within {limit:g} s" if ended.hung else cause(ended.text) or f"exit code {ended.code}"
        raise PlannerError(f"{old.path} was not resharded: {why}")
    return checked(old, recognise(to))


def checked(old: CheckpointFolder, new: CheckpointFolder) -> Resharded:
    """Both, where every tensor is the same. Raises PlannerError with those that are not."""
    from planner.lab.elastic.same_tensors import compare

    found = compare(old.path, new.path)
    if found.differences:
        more = f" and {len(found.differences) - 3} more" if len(found.differences) > 3 else ""
        raise PlannerError(f"{new.path} is not {old.path}: {'; '.join(found.differences[:3])}{more}")
    return Resharded(old=old, new=new, tensors=found.tensors, values=found.values, total=found.sums[1])


def elsewhere(old: CheckpointFolder, plan: Plan, to: Path) -> str:
    """What reshards a checkpoint of another trainer, as a sentence with the command."""
    layout, path = plan.layout, shlex.quote(str(old.path))
    parent = shlex.quote(str(old.path.parent))
    if old.kind in (formats.MEGATRON, formats.DCP, formats.SAFETENSORS):
        how = {formats.MEGATRON: f"start Megatron-LM with the new split and --load {parent} --ckpt-format torch_dist",
               formats.DCP: f"start its trainer with the new split; torchtitan: --checkpoint.enable --checkpoint.folder {parent}",
               formats.SAFETENSORS: "every trainer reads its tensors by name"}[old.kind]  # fmt: skip
        return f"{path} ({old.kind}) loads into any split as it is, nothing is to be rewritten: {how}"
    if old.kind == formats.MEGATRON_TORCH:
        command = (
            "python $MEGATRON_LM/tools/checkpoint/convert.py --model-type GPT --loader mcore --saver mcore "
            f"--load-dir {parent} --save-dir {shlex.quote(str(to))} --target-tensor-parallel-size {int(layout.tp)} "
            f"--target-pipeline-parallel-size {int(layout.pp)}"
        )
    elif old.kind == formats.UNIVERSAL:
        return f"{path} is universal: DeepSpeed loads it into any split with \"checkpoint\": {{\"load_universal\": true}}"
    else:
        command = f"python -m deepspeed.checkpoint.ds_to_universal --input_folder {path} --output_folder {shlex.quote(str(to))}"
    package = "deepspeed" if old.kind == formats.DEEPSPEED else "megatron"
    there = find_spec(package) is not None
    return f"{path} ({old.kind}) is converted by its own tool{'' if there else f' ({package} is not installed here)'}: {command}"

