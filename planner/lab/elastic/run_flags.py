"""How the trainers that ``plan run`` knows are started from an exported folder, and which of their own flags save and load."""

import math
import os
import re
import shlex
from collections.abc import Callable, Sequence
from itertools import pairwise

from planner.errors import PlannerError, listed
from planner.record import record
from planner.trainers.bundle.quoting import shell_command


@record
class Saving:
    """What the checkpoint flags of a trainer are made of."""

    folder: str
    """Where checkpoints lie."""
    interval: float
    """Seconds between two saves."""
    steps: int
    """Steps between two saves, where that was asked for; 0 = by time."""
    step_time: float
    """Predicted seconds of a step."""
    keep: int
    """Whole checkpoints that stay."""
    timeout: float
    """Seconds that ranks wait for each other."""
    sharded: bool = False
    """Megatron-FSDP: its checkpoints have a format of their own, which the plan's arguments name."""

    @property
    def every(self) -> int:
        """Steps between two saves, for trainers that count steps alone."""
        return self.steps or max(1, math.floor(self.interval / self.step_time))


@record
class Adapter:
    """A trainer as ``plan run`` starts it."""

    target: str
    """Its target of ``plan export``."""
    layout: dict[str, str | None]
    """Words that take the split from the exported folder, with their values; None = it has none."""
    variables: Callable[[Sequence[str]], dict[str, str]]
    """Variables of the exported folder that a command says: name -> value."""
    saving: Callable[[Saving], dict[str, str | None]]
    """Its flags for checkpoints with their values; None = a switch."""
    step: re.Pattern[str]
    """A line that says that a step is done; its first group is the number."""
    stops: bool
    """It saves and ends in order on SIGTERM."""
    reshards_data: bool
    """Its data position is of the job, not of each data-parallel rank."""
    forgets: bool = True
    """It removes older checkpoints itself."""
    cuda: str = ""
    """Its name where its training loop runs on CUDA GPUs alone."""


def _pytorch(one: Saving) -> dict[str, str | None]:
    every, seconds = (str(one.steps), "0") if one.steps else ("0", f"{one.interval:.6g}")
    return {"--checkpoint": one.folder, "--every": every, "--interval": seconds, "--keep": str(one.keep),
            "--timeout": f"{one.timeout:.6g}"}  # fmt: skip


def _megatron(one: Saving) -> dict[str, str | None]:
    form = {} if one.sharded else {"--ckpt-format": "torch_dist", "--dist-ckpt-optim-fully-reshardable": None}
    # Without its persistent worker it saves at once; its other strategy, nvrx, needs nvidia-resiliency-ext.
    return {"--save": one.folder, "--load": one.folder, "--save-interval": str(one.every), **form,
            "--async-save": None, "--use-persistent-ckpt-worker": None, "--async-strategy": "mcore",
            "--exit-signal-handler": None, "--distributed-timeout-minutes": str(math.ceil(one.timeout / 60))}  # fmt: skip


def _torchtitan(one: Saving) -> dict[str, str | None]:
    return {"--checkpoint.enable": None, "--checkpoint.folder": one.folder, "--checkpoint.interval": str(one.every),
            "--checkpoint.async_mode": "async", "--checkpoint.keep_latest_k": str(max(one.keep, 2))}  # fmt: skip


def _assets(command: Sequence[str]) -> dict[str, str]:
    """The tokenizer's folder, where the command names it."""
    flag = "--hf_assets_path"
    said = [after for one, after in pairwise(command) if one == flag]
    said += [one.removeprefix(f"{flag}=") for one in command if one.startswith(f"{flag}=")]
    return {"HF_ASSETS": os.path.abspath(said[-1])} if said else {}


ADAPTERS = {
    one.target: one
    for one in (
        Adapter(
            target="pytorch", layout={"--plan": "plan.json"}, variables=lambda _: {}, saving=_pytorch,
            step=re.compile(r"^step (\d+) loss"), stops=True, reshards_data=True,
        ),
        # consumed_train_samples of the checkpoint gives the data position  [Megatron-LM, training/checkpointing.py]; without a GPU
        # it ends with "Megatron requires CUDA."  [training/initialize.py, initialize_megatron]
        Adapter(
            target="megatron", layout={"${ARGUMENTS[@]}": None}, saving=_megatron,
            variables=lambda command: {"MEGATRON_LM": os.path.dirname(command[0])} if command else {},
            step=re.compile(r"iteration\s+(\d+)\s*/"), stops=True, reshards_data=True, forgets=False,
            cuda="Megatron-LM",
        ),
        # no handler of SIGTERM; colours in its logs; "dataloader resharding is not supported yet"  [torchtitan,
        # components/dataloader.py]
        Adapter(
            target="torchtitan", saving=_torchtitan, variables=_assets,
            layout={"--module": "plan_config", "--config": "plan", "--hf_assets_path": "$HF_ASSETS"},
            step=re.compile(r"(?:\b|\d+m)step:\s*(\d+)"), stops=False, reshards_data=False,
        ),
    )
}  # fmt: skip
"""Target -> how it is started.  [flags: Megatron-LM core_r0.19, training/arguments.py; torchtitan 0.3, config]"""


def adapter_of(command: Sequence[str], trainer: str, target: str | None = None) -> Adapter:
    """The adapter of a command, of a target that is named, or of the trainer of the plan. Raises PlannerError."""
    if target is not None:
        return ADAPTERS[target]
    if not command:
        return ADAPTERS.get(trainer if trainer != "torchtitan" else "pytorch", ADAPTERS["pytorch"])
    words = [os.path.basename(one) for one in command[:2]]
    if words[0] in ("torchrun", "python", "python3", "srun", "bash", "sh", "accelerate", "deepspeed", "mpirun"):
        raise PlannerError(
            f"the command begins with {words[0]}: plan run starts torchrun itself; give the program that it starts, with its "
            "arguments: -- train.py --steps 1000"
        )
    if command[0] == "-m" and words[-1].startswith("torchtitan"):
        return ADAPTERS["torchtitan"]
    if words[0].startswith("pretrain_"):
        return ADAPTERS["megatron"]
    if words[0] == "train.py":
        return ADAPTERS["pytorch"]
    raise PlannerError(
        f"the command {command[0]} is of no trainer that plan run knows: train.py (its own PyTorch script), pretrain_*.py of "
        f"Megatron-LM, -m torchtitan.train; say with --target ({listed(list(ADAPTERS))}) whose flags it takes"
    )


def command_line(adapter: Adapter, command: Sequence[str], entry: Sequence[str], saving: Saving) -> str:
    """A line of bash: the program, the words that take the split from the exported folder and name its variables, the flags
    for checkpoints, the user's own words as they are. A flag that the user gives stays as given. Without a command the
    ``entry`` of the export takes the place of the program and its words."""
    names = 2 if command[:1] == ("-m",) else 1
    program, rest = command[:names], command[names:]
    given = {one.split("=")[0] for one in rest}

    def words(flags: dict[str, str | None]) -> list[str]:
        return [word for flag, value in flags.items() if flag not in given for word in (flag, value) if word is not None]

    own = adapter.saving(saving)
    more = words(own)
    if not command:
        kept = [one for before, one in pairwise(("", *entry)) if one not in own and own.get(before) is None]
        return f"{shell_command(tuple(kept))} {shlex.join(more)}"
    return f"{shlex.join(program)} {shell_command(tuple(words(adapter.layout)))} {shlex.join([*more, *rest])}"
