"""Words of verl's SFT trainer beside degrees: micro batches by tokens, its optimizer, and what of an engine decides memory.

[verl 0.6 to 0.9: trainer/config/sft_trainer_engine.yaml, workers/config/optimizer.py, workers/config/engine.py]
"""

import re
from pathlib import Path

from planner.errors import PlannerError, shown
from planner.trainers.reading.commands import Launch
from planner.trainers.reading.kernels import KERNELS
from planner.trainers.reading.settings import Settings
from planner.trainers.reading.values import not_priced, quotient, read_text

ADAM = re.compile(r"(?i)_?(fused|distributed)?_?adamw?")
IMPLEMENTED = ("torch.optim", "torch.optim.adamw", "transformer_engine.pytorch.optimizers.fused_adam")
"""Where an optimizer with fp32 moments comes from."""
STATES = re.compile(r"(exp_avg|exp_avg_sq|main_params|main_grads)_dtype")
DECIDES = re.compile(
    r"(engine|model)\.(.*\.)?(use_megatron_fsdp|qat\.enable|fp[48]|(param|reduce)_dtype|tiled_mlp\.enabled)"
    r" = (?!'?(False|null|None|no)\b)"
)
"""What of an engine and nobody reads decides memory, by its name and value."""
SLOW = re.compile(r"\.(attn_implementation|attention_backend) = '(eager|unfused|local)'")


OWN_KERNEL = re.compile(r"^[^#\n]*\battn_implementation[\"']?[ \t]*[=,:][ \t]*[\"'](\w+)[\"']", re.MULTILINE)
"""How a trainer names the kernel that it takes where nothing is said."""
ASKED = re.compile(r"\.get\([ \t\n]*[\"']attn_implementation[\"']")
"""And that model.attn_implementation says it."""
A2A_OF_FLASH = "Ulysses' all-to-all is done in flash attention alone, each rank attends to its own part: time comes out too long"


def own_kernel(program: Path | None, model: Settings, sp: int) -> tuple[str, tuple[str, ...]]:
    """(The kernel that a trainer beside a script takes where nothing overrides it, "" = verl's own; notes)."""
    text = read_text(program) if program is not None else ""
    found = OWN_KERNEL.search(text)
    if program is None or found is None or model.section("override_config").get("attn_implementation"):
        return "", ()
    word = str(model.get("attn_implementation") or found[1]) if ASKED.search(text) else found[1]
    if "flash" in word:
        return word, ()
    what = f"attention is {word[:40]}, as {program.name} of the tree takes it, and not verl's flash_attention_2"
    return word, (what, *[A2A_OF_FLASH] * (sp > 1))


def kernel(over: Settings, own: str = "") -> str:
    """Kernel of attention of its FSDP engines, which is flash attention 2 unless the model's own configuration is overridden, or a
    trainer of the tree takes ``own``.  [verl, workers/fsdp_workers.py, workers/config/model.py, trainer/fsdp_sft_trainer.py]"""
    word = str(over.get("attn_implementation") or own)
    return "best" if "flash_attention_3" in word else KERNELS.get(word, "fa2")


def by_tokens(found: Launch) -> bool:
    """Whether the program fills micro batches by tokens where nothing is said: the one over engines, since it is there.
    [verl 0.6, trainer/config/sft_trainer_engine.yaml]"""
    return re.search(r"(^|\.)sft_trainer(_ray)?$", found.program) is not None


def of_tokens(data: Settings, cp: int, dp: int, batch: int, usual: bool) -> tuple[int, tuple[str, ...]]:
    """Sequences per forward pass of the SFT trainer, and what was taken for what; ``dp``: ranks that share the micro batch of verl
    until 0.2, whose word has no _per_gpu, 0 = not known; ``usual``: micro batches are filled by tokens."""
    length, tokens = data.size("max_length", 1024), data.number("max_token_len_per_gpu")
    if not data.flag("use_dynamic_bsz", usual or tokens is not None):
        each, shared = data.number("micro_batch_size_per_gpu"), data.number("micro_batch_size")
        ranks = max(dp, 1)
        return each or (quotient(shared, ranks, f"{data.path}: micro_batch_size by the ranks that share it") if shared else 4), ()
    most, each = max((tokens or 8192) * cp // length, 1), batch // dp if dp else 0
    micro = max((one for one in range(1, min(most, each) + 1) if each % one == 0), default=most)
    return micro, (f"micro batches of up to {(tokens or 8192) * cp} tokens are read as {micro} sequences of {length} tokens",)


def require_adam(given: Settings) -> None:
    """Raises PlannerError for an optimizer or dtypes of its states that are not those of Adam in fp32."""
    part = given.section("optim")
    name, home = str(part.get("optimizer", "AdamW")), str(part.get("optimizer_impl", IMPLEMENTED[0]))
    if not ADAM.fullmatch(name) or home not in IMPLEMENTED:
        what = shown(name) if home in IMPLEMENTED else f"{shown(name)} of {shown(home)}"
        sets = "--set optim.optimizer=AdamW --set optim.optimizer_impl=torch.optim"
        raise PlannerError(f"{part.where('optimizer')} is {what}; {sets} imports the job with torch's")
    own = part.section("override_optimizer_config")
    for section in (part, own):
        for key, value in section.data.items():
            if STATES.fullmatch(str(key)) and str(value).removeprefix("torch.") not in ("float32", "fp32", "None"):
                raise PlannerError(f"{section.where(str(key))} is {shown(value)}: states of the optimizer in it are not priced; "
                                   f"--set {section.place}{key}=float32 imports the job without")  # fmt: skip


def require_priced(given: Settings) -> tuple[str, ...]:
    """Notes on attention. Raises PlannerError for what decides memory and is not read."""
    left = list(given.left())
    if wrong := [one.partition(" = ")[0] for one in left if DECIDES.match(one)]:
        raise not_priced(str(given.path), wrong, wrong)
    slow = [one.partition(" = ")[0] for one in left if SLOW.search(one)]
    return tuple(f"{one}: scores of attention are in memory, and priced as flash attention" for one in slow)
