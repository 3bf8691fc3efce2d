"""Megatron-LM's own code on an exported folder: arguments, validation, process groups, layers, parameters."""

import contextlib
import io
import os
import shlex
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner.trainers.bundle.target import GROUPS, ExportJob, group_of
from planner.trainers.checking import Checked, Request
from planner.trainers.checking.import_standins import modern_typing, pretend_gpu, pretend_ranks, settle_torch, stand_in
from planner.trainers.checking.started import own_words, started
from planner.trainers.megatron.core_settings import environment as core_environment
from planner.trainers.megatron.core_settings import fully_sharded, vocab_rows
from planner.trainers.megatron.core_settings import recompute as core_recompute
from planner.trainers.megatron.export import STRATEGIES

NEEDED = ("torch", "megatron.core", "megatron.training")
CAPABILITY = {"Volta": (7, 0), "Ampere": (8, 0), "Ada": (8, 9), "Hopper": (9, 0), "Blackwell": (10, 0)}
"""Compute capability by architecture: the validator's rules depend on it."""
MODEL_RANKS = 4
"""Pipeline stages whose model is built: first, last and some between."""
TE_VERSION = "2.17.0"
"""Transformer Engine's version that the validator sees: it asks for it, and cannot ask where no GPU is."""
NEED_KERNELS = {"--moe-permute-fusion"}
"""Arguments that a machine without Transformer Engine refuses; left out of the check, and only of the check."""
MODEL_ONLY = (
    "--transformer-impl", "local", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm", "--no-initialization",
)  # fmt: skip
"""Layers of plain torch in place of Transformer Engine's: as many parameters."""
DATA = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--train-iters", "10", "--lr", "1e-5")


def asks(job: ExportJob) -> dict[str, Any]:
    """Groups of a rank whose place in each is neither first nor last where they are large enough; layers per virtual stage,
    parameters per rank of some stages."""
    arch, rank = job.cluster.hardware.arch, int(job.layout.num_gpus) * 5 // 8
    # Without experts Megatron calls all ranks of a stage expert data parallel, whatever tp is; edp 0: degrees that do not divide.
    names = [name for name in GROUPS if getattr(job.layout, name) and (job.model.is_moe or name not in ("etp", "ep", "edp"))]
    ranks, pp = group_of(job.layout, "pp", 0), job.layout.pp
    counts = job.parameters(vocab_rows(job))
    built = sorted({0, pp - 1, pp // 2, min(1, pp - 1)})[:MODEL_RANKS]
    plain = not job.model.is_mla or job.model.q_lora_rank  # its query norm needs Transformer Engine
    return {
        "environment": {name: one.value for name, one in core_environment(job).items()}, "rank": rank,
        "capability": next((value for name, value in CAPABILITY.items() if arch.startswith(name)), (9, 0)),
        "groups": {name: group_of(job.layout, name, rank) for name in names}, "layers": job.layers_per_chunk(),
        "parameters": {ranks[stage]: counts[stage] for stage in built} if plain else {},
        "recompute": {name: _plain(value) for name, value in core_recompute(job).items()},
        "strategy": STRATEGIES.get(job.layout.zero) if fully_sharded(job) else None,
    }  # fmt: skip


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value


def prepare() -> None:
    """Once, before the first folder."""
    warnings.simplefilter("ignore")
    settle_torch()
    modern_typing()
    stand_in("triton")
    pretend_gpu(9, 0)
    import megatron.core.utils as utils
    from packaging.version import Version

    utils._te_version = Version(TE_VERSION)
    _read_help_once()


def _read_help_once() -> None:
    """Megatron parses its sources anew for the help texts of every parser, 9/10 of a case's time: remembered by class."""
    from functools import cache

    from megatron.training.argument_utils import ArgumentGroupFactory

    read = ArgumentGroupFactory._get_field_docstrings
    remembered = cache(lambda source: read(object.__new__(ArgumentGroupFactory), source))
    ArgumentGroupFactory._get_field_docstrings = lambda self, source: dict(remembered(source))


def one(asked: Request, answer: Checked) -> None:
    """How far the trainer goes with one folder; ``dump`` asks for what rank 0 prints of its arguments, ``deep`` for models."""
    in_place_of_rank(_check, asked, answer)


def in_place_of_rank(check: Callable[[Request, Checked], None], asked: Request, answer: Checked) -> None:
    """A check in the environment of a rank of the job, which is put back after it."""
    known = {"WORLD_SIZE": str(asked["world"]), "RANK": str(0 if asked.get("dump") else asked["rank"]), "LOCAL_RANK": "0"}
    before = dict(os.environ)
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update({**known, **asked["environment"]})
    try:
        pretend_gpu(*asked["capability"])
        check(asked, answer)
    finally:
        _forget()
        os.environ.clear()  # building a model leaves choices of kernels there
        os.environ.update(before)


def _check(asked: Request, answer: Checked) -> None:
    words, scripts = _arguments(Path(asked["folder"])), Path(asked["folder"], "run.sh").is_file()
    if scripts:
        _smoke(asked)
        words = _started(asked, "run.sh")
    args = parsed(words)
    answer.reached("parsed")
    config = as_planned(args, asked, answer)
    if asked.get("dump"):
        answer.details.append(_dump(args))
        return
    placed(args, config, asked, answer)
    if asked.get("deep") and asked["parameters"]:
        found = {rank: _parameters(words, int(rank), asked["world"]) for rank in asked["parameters"]}
        answer.same("parameters", found, asked["parameters"])
        answer.reached("model built")


def as_planned(args: Any, asked: Request, answer: Checked) -> Any:
    """What Megatron's validation makes of arguments is what was planned; the configuration of its layers."""
    said = {name: getattr(args, name, None) for name in asked["recompute"]}
    answer.same("recompute", said, asked["recompute"])
    config = validated(args)
    answer.same("sequence parallel", args.sequence_parallel, bool(asked["layout"]["sequence_parallel"]))
    answer.same("microbatches", _microbatches(args), asked["layout"]["num_microbatches"])
    if asked["strategy"] or args.use_megatron_fsdp:
        answer.same("sharding", _strategy(args), asked["strategy"])
    answer.reached("validated")
    return config


def placed(args: Any, config: Any, asked: Request, answer: Checked) -> None:
    """Megatron's process groups of one rank, and its layers per virtual stage, are those of the plan."""
    groups = _groups(args, asked["rank"], asked["world"])
    answer.same("groups", {name: groups[name] for name in asked["groups"]}, asked["groups"])
    chunks = args.virtual_pipeline_model_parallel_size
    layers = [
        [_layers(config, chunk, rank) for chunk in (range(chunks) if chunks else (None,))]
        for rank in range(args.pipeline_model_parallel_size)
    ]
    answer.same("layers", layers, asked["layers"])
    answer.reached("groups built")


def _arguments(folder: Path) -> list[str]:
    """The array ARGUMENTS, with data of its own."""
    words = shlex.split((folder / "arguments.sh").read_text(encoding="utf-8"), comments=True)
    start = words.index("ARGUMENTS=(") + 1
    return [*words[start : words.index(")", start)], *DATA]


def _started(asked: Request, script: str) -> list[str]:
    """Words that a script of the folder starts Megatron with, in the environment that it makes."""
    words, variables = started(Path(asked["folder"]), script)
    os.environ.update({name: variables[name] for name in asked["environment"] if name in variables})
    return own_words(words, "pretrain_gpt.py")


def _smoke(asked: Request) -> None:
    """The smoke run's own words are accepted too."""
    validated(parsed(_started(asked, "smoke.sh")))


def parsed(words: list[str]) -> Any:
    """Words as Megatron's own parser reads them. Raises ValueError."""
    from megatron.training.arguments import parse_args

    sys.argv = ["pretrain_gpt.py", *(word for word in words if word not in NEED_KERNELS), "--no-rope-fusion"]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return parse_args()
    except SystemExit as error:
        said = errors.getvalue().strip().splitlines()
        raise ValueError(said[-1] if said else "the parser refused the arguments") from error


def validated(args: Any) -> Any:
    """The configuration of the layers, after Megatron's validation of arguments, which changes them."""
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import validate_args

    validate_args(args)
    return core_transformer_config_from_args(args)


def _strategy(args: Any) -> str | None:
    """What the wrapper of the model shards; None without Megatron-FSDP."""
    from megatron.training.training import get_megatron_ddp_config

    config = get_megatron_ddp_config(args)
    return str(config.data_parallel_sharding_strategy) if config.use_megatron_fsdp else None


def _dump(args: Any) -> str:
    """The block of arguments at the head of a training log, as Megatron prints it."""
    from megatron.training import arguments

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        arguments._print_args("arguments", args)
    return text.getvalue()


def _microbatches(args: Any) -> int:
    from megatron.core import num_microbatches_calculator as calculator

    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(
        args.rank, args.rampup_batch_size, args.global_batch_size, args.micro_batch_size, args.data_parallel_size, False
    )
    return int(calculator.get_num_microbatches())


def _build_groups(args: Any, rank: int, world: int) -> Any:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    pretend_ranks(rank, world)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )  # fmt: skip
    return parallel_state


def _groups(args: Any, rank: int, world: int) -> dict[str, list[int]]:
    """Ranks of the groups of one rank."""
    import torch.distributed as dist

    state = _build_groups(args, rank, world)
    found = {
        "tp": state.get_tensor_model_parallel_group(), "cp": state.get_context_parallel_group(),
        "dp": state.get_data_parallel_group(), "pp": state.get_pipeline_model_parallel_group(),
        "etp": state.get_expert_tensor_parallel_group(), "ep": state.get_expert_model_parallel_group(),
        "edp": state.get_expert_data_parallel_group(),
    }  # fmt: skip
    return {name: sorted(dist.get_process_group_ranks(one)) for name, one in found.items()}


def _layers(config: Any, chunk: int | None, rank: int) -> int:
    """Layers of one virtual stage. With a layout Megatron's function asks it for this process's rank, whatever is given."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    if config.pipeline_model_parallel_layout is not None:
        return int(config.pipeline_model_parallel_layout.get_num_layers_to_build(vp_stage=chunk, pp_rank=rank))
    return int(get_num_layers_to_build(config, vp_stage=chunk, pp_rank=rank))


def _parameters(words: list[str], rank: int, world: int) -> int:
    """Parameters that Megatron's model gives to one rank, all its virtual stages together; on the meta device."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    words = [word for word in _weights_only(words) if word not in ("--moe-grouped-gemm", "--sequence-parallel")]
    args = parsed([*words, "--micro-batch-size", "1", "--global-batch-size", str(world), *MODEL_ONLY])
    config = validated(args)
    _build_groups(args, rank, world)

    def attention(self: Any, config: Any, *_: Any, **__: Any) -> None:
        """The plain core attention, whose constructor does not know MLA's head sizes: no weights but the sinks of its heads."""
        torch.nn.Module.__init__(self)
        if getattr(config, "softmax_type", "vanilla") == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.empty(config.num_attention_heads // config.tensor_model_parallel_size))

    DotProductAttention.__init__ = attention
    _duplicate_down_projections()
    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment, return-value, unused-ignore]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign, unused-ignore]
    torch.cuda.Stream = torch.cuda.Event = lambda *_, **__: None  # type: ignore[assignment, misc, unused-ignore]
    builder = GPTModelBuilder(gpt_config_from_args(args, config))
    chunks, total = args.virtual_pipeline_model_parallel_size, 0
    for chunk in range(chunks or 1):
        with torch.device("meta"):
            model = builder.build_model(
                ProcessGroupCollection.use_mpu_process_groups(), vp_stage=chunk if chunks else None
            )
        total += sum(parameter.numel() for parameter in model.parameters())
    return total


def _duplicate_down_projections() -> None:
    """MLA's down projections whole on every tensor-parallel rank, as in the specification with Transformer Engine
    (backend.linear(), parallel_mode 'duplicated'); the plain one splits them."""
    import torch
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import multi_latent_attention as mla

    if getattr(mla.TELinear, "planner", False):
        return

    class Duplicated(torch.nn.Linear):  # type: ignore[misc, unused-ignore]
        planner = True

        def __init__(self, inputs: int, outputs: int, *, bias: bool = False, **_: Any) -> None:
            super().__init__(inputs, outputs, bias=bias)

    original = specs.get_gpt_layer_local_submodules

    def with_duplicated(*some: Any, **more: Any) -> Any:
        found = original(*some, **more)
        inside = getattr(found.self_attention, "submodules", None)
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if hasattr(inside, name):
                setattr(inside, name, Duplicated)
        return found

    mla.TELinear, specs.get_gpt_layer_local_submodules = Duplicated, with_duplicated


def _weights_only(words: list[str]) -> list[str]:
    """Recompute and precision do not change parameters, and some need kernels; nor does context parallelism, whose ranks
    then count as data parallel ones: tensor, pipeline and expert groups stay the same."""
    kept, inside = [], False
    for word in words:
        if word.startswith("--"):
            inside = word.startswith(
                ("--recompute-", "--fp8-", "--fp4-", "--context-parallel-", "--cp-", "--attention-backend")
            )
        if not inside:
            kept.append(word)
    return kept


def _forget() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    with contextlib.suppress(Exception):
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
