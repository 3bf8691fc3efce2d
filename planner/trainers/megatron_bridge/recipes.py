"""Recipes of Megatron-Bridge as settings: what a Python function assigns, read from its syntax tree and never run."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from planner import library
from planner.trainers.megatron_bridge.effective import FIELDS, MIXED
from planner.trainers.reading.python_text import last_name
from planner.trainers.reading.shell.text import gap, is_open
from planner.trainers.reading.values import read_text

PACKAGE = "megatron.bridge.recipes."
COMMON: dict[str, dict[str, Any]] = {
    "_pretrain_common": {"train.global_batch_size": 32, "train.micro_batch_size": 2, "dataset.seq_length": 4096},
    "_sft_common": {
        "train.global_batch_size": 128, "train.micro_batch_size": 1, "dataset.seq_length": 2048, "ddp.overlap_grad_reduce": False,
    },
    "_peft_common": {
        "train.global_batch_size": 128, "train.micro_batch_size": 1, "dataset.seq_length": 2048, "ddp.overlap_grad_reduce": False,
        "peft": "lora", "peft.dim": 32,
    },
    "_sft_common_vlm": {
        "train.global_batch_size": 32, "train.micro_batch_size": 2, "dataset.seq_length": 4096, "ddp.overlap_grad_reduce": False,
    },
    "_peft_common_vlm": {
        "train.global_batch_size": 32, "train.micro_batch_size": 2, "dataset.seq_length": 4096, "ddp.overlap_grad_reduce": False,
        "peft": "lora", "peft.dim": 32,
    },
}  # fmt: skip
"""Where all recipes start.  [recipes/common.py]"""
SECTIONS = {
    **dict.fromkeys(("global_batch_size", "micro_batch_size"), "train"), "grad_reduce_in_fp32": "ddp", "use_megatron_fsdp": "ddp",
}  # fmt: skip
"""Sections of keywords of recipes; the others belong to the model."""
OLDER = {
    **{f"{one}_parallelism": f"model.{full}_parallel_size" for one, full in (
        ("tensor", "tensor_model"), ("pipeline", "pipeline_model"), ("virtual_pipeline", "virtual_pipeline_model"),
        ("context", "context"), ("expert", "expert_model"))},
    "sequence_parallelism": "model.sequence_parallel",
}  # fmt: skip
"""Keywords of the first recipes, which build a model of a class of their own.  [recipes of 2025]"""
UNSAID = ("train.global_batch_size", "train.micro_batch_size", "model.seq_length")
"""What a recipe says that is in a module that is not there."""
OF_A_PART = (
    *UNSAID, "optimizer.optimizer", "optimizer.use_precision_aware_optimizer", "optimizer.exp_avg_dtype", "ddp.grad_reduce_in_fp32",
)  # fmt: skip
"""What a function says that recipes of Megatron-Bridge share, like _moonlight_finetune_common, and that is not followed."""
BLOCKS = (ast.If, ast.For, ast.While, ast.Try, ast.With, ast.Match)
"""Statements whose parts run under conditions or several times."""
DECISIVE = (
    "model.hf", *(f"model.{one}_parallel_size" for one in (
        "tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model", "expert_tensor")),
    "model.sequence_parallel", "model.seq_length", "model.recompute_granularity", "model.recompute_method",
    "model.recompute_num_layers", "model.recompute_modules", "model.num_layers_in_first_pipeline_stage",
    "model.num_layers_in_last_pipeline_stage", "model.account_for_embedding_in_pipeline_split",
    "model.account_for_loss_in_pipeline_split", "model.pipeline_model_parallel_layout", "model.moe_token_dispatcher_type",
    "model.moe_flex_dispatcher_backend", "model.cuda_graph_impl", "model.cpu_offloading", "train.global_batch_size",
    "train.micro_batch_size", "dataset.seq_length", "mixed_precision", "ddp.grad_reduce_in_fp32", "ddp.use_megatron_fsdp",
    "ddp.overlap_grad_reduce", "ddp.use_distributed_optimizer", "ddp.data_parallel_sharding_strategy", "optimizer.optimizer",
    "optimizer.use_precision_aware_optimizer", "optimizer.exp_avg_dtype", "optimizer.optimizer_cpu_offload",
    "optimizer.optimizer_offload_fraction", "peft", "peft.dim", "peft.target_modules", "comm_overlap.tp_comm_overlap",
    "comm_overlap.overlap_moe_expert_parallel_comm", "model.fine_grained_activation_offloading", "model.moe_paged_stash",
    "model.cpu_offloading_num_layers", "model.cp_comm_type", "model.share_embeddings_and_output_weights",
    "model.cross_entropy_loss_fusion", "model.cross_entropy_fusion_impl", "model.mtp_num_layers", "model.window_size",
    "model.attention_backend", "model.attention_dropout", "model.hidden_dropout", "optimizer.main_params_dtype",
    "optimizer.exp_avg_sq_dtype", "dist.use_torch_fsdp2", *(f"{MIXED}.{one}" for one in FIELDS),
    "comm_overlap.overlap_grad_reduce", "optimizer.use_distributed_optimizer", "model.use_transformer_engine_op_fuser",
    "dataset.packed_sequence_size", "model.moe_router_force_load_balancing",
)  # fmt: skip
"""Settings that decide a plan."""

SIZES = re.compile(
    r"model\.(num_layers|hidden_size|ffn_hidden_size|num_attention_heads|num_query_groups|kv_channels|num_moe_experts"
    r"|moe_ffn_hidden_size|moe_router_topk|moe_shared_expert_intermediate_size|vocab_size|hybrid_(?!context_parallel)\w+|mamba_\w+)"
)
"""Settings that make another model of it."""


def published() -> Mapping[str, Mapping[str, Any]]:
    """Settings of the published recipes by their names."""
    data = library.read_yaml(Path(__file__).with_name("recipes.yaml"))
    aliases: Mapping[str, str] = data["aliases"]
    recipes: Mapping[str, Mapping[str, Any]] = data["recipes"]
    return {**recipes, **{alias: recipes[name] for alias, name in aliases.items() if name in recipes}}


def with_modules_beside(path: Path, tree: ast.Module, known: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """``known`` and the recipes of modules in the same folder that a module imports, as module.function; those of Megatron-Bridge
    itself that it imports, where the project holds it."""
    found = dict(known)
    imported = {name.name for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) for name in one.names}
    for name in sorted(imported):
        file = path.with_name(f"{name}.py")
        if file != path and library.is_file(file):
            module = library.parse_python(read_text(file), str(file))
            found |= {f"{name}.{one}": settings_of(module, one, known) for one in functions(module) if one.endswith("_config")}
    for node in (one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and (one.module or "").startswith(PACKAGE)):
        place = f"src/{(node.module or '').replace('.', '/')}.py"
        file = next((one / place for one in path.absolute().parents[:6] if library.is_file(one / place)), path)
        module = library.parse_python(read_text(file), str(file))
        own = [one for one in node.names if file != path and one.name.endswith("_config") and one.name in functions(module)]
        found |= {one.asname or one.name: settings_of(module, one.name, known) for one in own}
    return found


def functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Functions of a module by name."""
    return {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}


def settings_of(tree: ast.Module, name: str, known: Mapping[str, Mapping[str, Any]], depth: int = 0) -> dict[str, Any]:
    """Settings that a function of a module leaves, by dotted names; ``known``: recipes that it may start from."""
    constants = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    typed = (one for one in tree.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.value)
    constants |= {ast.unparse(one.target): one.value for one in typed if one.value is not None}
    function = functions(tree)[name]
    names = [*function.args.args, *function.args.kwonlyargs]
    bare = len(function.args.args) - len(function.args.defaults)
    defaults = [*[None] * bare, *function.args.defaults, *function.args.kw_defaults]
    constants |= {one.arg: value for one, value in zip(names, defaults, strict=False) if value is not None}
    return _followed(function.body, tree, known, constants, depth)


def known_to(tree: ast.Module, known: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The recipes that are known, also as a script calls those that it imports."""
    return {**_parts(tree), **known, **{called: known[name] for called, name in imported(tree).items() if name in known}}


def imported(tree: ast.Module, kind: str = r"(?!default_)\w+_config") -> dict[str, str]:
    """Recipes that a script imports: what it calls them -> their names."""
    nodes = (one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and "bridge.recipes" in (one.module or ""))
    return {one.asname or one.name: one.name for node in nodes for one in node.names if re.fullmatch(kind, one.name)}


def _parts(tree: ast.Module) -> dict[str, dict[str, Any]]:
    """Functions that recipes share, where a script calls one by itself: what they say is asked for."""
    names = imported(tree, r"_\w+_common")
    return {called: {one: gap([one]) for one in OF_A_PART} for called, name in names.items() if name not in COMMON}


class Recipes:
    """The statements of a recipe or a program one by one: what they leave, by dotted names."""

    def __init__(self, known: Mapping[str, Mapping[str, Any]], tree: ast.Module | None = None, depth: int = 0) -> None:
        self.known, self.depth = known, depth
        self.tree = ast.Module([], []) if tree is None else tree
        self.constants: dict[str, ast.expr] = {}

    def step(self, node: ast.stmt, found: dict[str, Any]) -> None:
        """Adds to ``found`` what a statement leaves; what is set under conditions and in loops is asked for."""
        if isinstance(node, BLOCKS):
            for one in (one for one in ast.walk(node) if isinstance(one, ast.Assign)):
                place = self.place_of(one.targets[0]) if isinstance(one.targets[0], ast.Attribute) else None
                if place == "peft" and place in found:  # one of its kind, or an object in its place
                    continue
                if place is None or place not in DECISIVE:
                    continue
                value, off = _value(one.value, self.constants, place), place.startswith("model.") and place not in BY_THEMSELVES
                if value != found.get(place) and (value or not off or place in found):
                    found[place] = gap([place])
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            started = self._of_call(node.value)
            found |= {**started, **found}
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:  # a helper that changes it
            found |= self._of_call(node.value)
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            return
        target: ast.expr = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if re.fullmatch(r"self\.\w+", ast.unparse(target)) and isinstance(target, ast.Attribute) and target.attr not in PARTS:
            target = ast.Name(target.attr, ast.Store())  # a configuration that an object keeps
        if isinstance(target, ast.Name):
            if isinstance(node.value, ast.Call):
                started = self._of_call(node.value)
                held = found if last_name(node.value.func) == "ConfigContainer" else {}  # made of parts that were changed before
                found |= {**started, **{one: value for one, value in held.items() if one in started}}
            elif isinstance(node.value, ast.Dict):  # recommended_kwargs of older recipes
                found |= _keywords(_items(node.value), self.constants)
            self.constants[target.id] = node.value
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            held_dict = self.constants.get(target.value.id)
            if isinstance(held_dict, ast.Dict):
                self.constants[target.value.id] = ast.Dict([*held_dict.keys, target.slice], [*held_dict.values, node.value])
        elif isinstance(target, ast.Attribute) and (place := self.place_of(target)) is not None:
            if place == "model" and isinstance(node.value, ast.Call):
                found |= self._of_call(node.value)
            found |= _assigned(place, node.value, self.constants)

    def bind(self, function: ast.FunctionDef | ast.AsyncFunctionDef, call: ast.Call) -> None:
        """Names the parts of a configuration that a function is given as its parameters."""
        names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        given = [*zip(names, call.args, strict=False), *((one.arg or "", one.value) for one in call.keywords)]
        for name, value in given:
            if getattr(value, "id", "") != name:
                self.constants.pop(name, None)
                if isinstance(value, ast.Attribute | ast.Name):
                    self.constants[name] = value

    def place_of(self, node: ast.expr, deepest: int = 6) -> str | None:
        """The place of an attribute below the configuration: cfg.model.a, or a of what stands for cfg.model."""
        root, _, place = ast.unparse(node).partition(".") if isinstance(node, ast.Attribute | ast.Name) else ("", "", "")
        held, _, rest = place.partition(".")
        if root == "self" and held not in PARTS:  # self.cfg.model.a
            root, place = held, rest
        value = self.constants.get(root)
        section = ""
        if _is_provider(value):
            section = "model"
        elif isinstance(value, ast.Call):
            section = next((one for kind, one in CLASSES.items() if re.fullmatch(kind, last_name(value.func))), "")
        elif isinstance(value, ast.Attribute | ast.Name) and deepest:
            section = self.place_of(value, deepest - 1) or ""
        return ".".join(one for one in (section, place) if one) or None

    def _of_call(self, call: ast.Call) -> dict[str, Any]:
        return _started(call, self.tree, self.known, self.constants, self.depth)


BY_THEMSELVES = ("model.cross_entropy_loss_fusion", "model.share_embeddings_and_output_weights")
"""Settings of the model that may be on where nothing is said."""
PARTS = ("model", "train", "dataset", "ddp", "optimizer", "comm_overlap", "mixed_precision", "peft", "dist")
"""Sections of a configuration that are read."""
CLASSES = {
    "TrainingConfig": "train", "DistributedDataParallelConfig": "ddp", "OptimizerConfig": "optimizer", "LoRA": "peft",
    "CommOverlapConfig": "comm_overlap", r"\w*DatasetConfig": "dataset", "DistributedInitConfig": "dist",
    "MixedPrecisionConfig|bf16_mixed|fp16_mixed": "mixed_precision",
}  # fmt: skip
"""Classes of the sections of a configuration."""


def _followed(
    body: list[Any], tree: ast.Module, known: Mapping[str, Mapping[str, Any]], constants: Mapping[str, ast.expr], depth: int
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    recipes = Recipes(known, tree, depth)
    recipes.constants |= constants
    for node in body:
        recipes.step(node, found)
    return found


def _started(
    call: ast.Call, tree: ast.Module, known: Mapping[str, Mapping[str, Any]], constants: Mapping[str, ast.expr], depth: int
) -> dict[str, Any]:
    """Settings of the function that a recipe starts from, under the keywords that it is called with."""
    full = ast.unparse(call.func)
    name = full.rpartition(".")[2]
    keywords = _keywords(_given(call, constants), constants)
    if name == full and name in functions(tree) and depth < 6:
        return {**settings_of(tree, name, known, depth + 1), **keywords}
    if name == "ConfigContainer":
        parts = {key: value for one in call.keywords for key, value in _assigned(one.arg or "", one.value, constants).items()}
        return {**_container(call, constants), **parts}
    if "ModelProvider" in name and "." not in full:
        return {"model.hf": "", "model.tensor_model_parallel_size": 1, **keywords}
    if full in known or name in ("pretrain_config", "finetune_config"):
        return {**known.get(full, {one: gap([one]) for one in UNSAID}), **keywords}
    return {**COMMON.get(name, {}), **known.get(name, {}), **keywords} if name in COMMON or name in known else {}


def _container(call: ast.Call, constants: Mapping[str, ast.expr]) -> dict[str, Any]:
    """Defaults of the sections that a configuration is put together from, where they are not those of recipes."""
    parts = [(one.arg, one.value) for one in call.keywords]
    given = {name: constants.get(value.id, value) if isinstance(value, ast.Name) else value for name, value in parts}
    kinds = {name: last_name(value.func) for name, value in given.items() if isinstance(value, ast.Call)}
    found: dict[str, Any] = {}
    if "mixed_precision" not in given:
        found |= {"mixed_precision": None, "ddp.grad_reduce_in_fp32": False}
    if kinds.get("ddp") == "DistributedDataParallelConfig" or "ddp" not in given:
        found |= {"ddp.use_distributed_optimizer": False, "ddp.overlap_grad_reduce": False}
    if kinds.get("optimizer") == "OptimizerConfig" or "optimizer" not in given:
        found["optimizer.use_distributed_optimizer"] = False
    return found


def _given(call: ast.Call, constants: Mapping[str, ast.expr]) -> Iterator[tuple[str, ast.expr]]:
    """Keywords of a call, those of a dict that it is given as **name too."""
    for one in call.keywords:
        value = constants.get(one.value.id) if one.arg is None and isinstance(one.value, ast.Name) else one.value
        if one.arg is not None:
            yield one.arg, one.value
        elif isinstance(value, ast.Dict):
            yield from _items(value)


def _items(node: ast.Dict) -> Iterator[tuple[str, ast.expr]]:
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value, value


def _keywords(given: Any, constants: Mapping[str, ast.expr]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in given:
        if name == "hf_path":
            found["model.hf"] = _value(value, constants, "model.hf")
        elif name == "optimizer_type":
            found["optimizer.optimizer"] = _value(value, constants, "optimizer.optimizer")
        elif name in OLDER:
            found[OLDER[name]] = _value(value, constants, OLDER[name])
        elif f"model.{name}" in DECISIVE or SIZES.fullmatch(f"model.{name}") or name in SECTIONS:
            place = f"{SECTIONS.get(name, 'model')}.{name}"
            found[place] = _value(value, constants, place)
        elif name in ("peft", "peft_scheme", "precision_config", "mixed_precision"):
            found["mixed_precision" if "precision" in name else "peft"] = _value(value, constants, name)
    return found


def _is_provider(value: ast.expr | None) -> bool:
    """Whether a name holds the model of a recipe: its fields are those of the section model."""
    return isinstance(value, ast.Call) and ast.unparse(value.func).endswith((".to_megatron_provider", "ModelProvider"))


def _calls(value: ast.expr, constants: Mapping[str, ast.expr], depth: int = 0) -> Iterator[ast.Call]:
    """Calls that make a value, through the names that it is put together from."""
    for one in ast.walk(value):
        if isinstance(one, ast.Call):
            yield one
        elif isinstance(one, ast.Name) and one.id in constants and depth < 4:
            yield from _calls(constants[one.id], constants, depth + 1)


def _assigned(place: str, value: ast.expr, constants: Mapping[str, ast.expr]) -> dict[str, Any]:
    if isinstance(value, ast.Name):
        value = constants.get(value.id, value)
    if place == "model":
        for call in (one for one in _calls(value, constants) if one.args):
            if ast.unparse(call.func).endswith(("from_hf_pretrained", "from_hf_config")):
                degree = "model.tensor_model_parallel_size"  # 1 where nothing sets it  [models/gpt_provider.py]
                return {"model.hf": _value(call.args[0], constants, "model.hf"), degree: 1}
        return {}
    if isinstance(value, ast.Call) and place in ("mixed_precision", "peft", "comm_overlap", "ddp", "optimizer"):
        name = ast.unparse(value.func).rpartition(".")[2]
        inner = {f"{place}.{one.arg}": _value(one.value, constants, f"{place}.{one.arg}") for one in value.keywords if one.arg}
        first = _value(value.args[0], constants, place) if value.args else name
        text = first if name in ("get_mixed_precision_config", "default_peft_config", "_perf_precision") else name
        return {**({place: text} if place in ("mixed_precision", "peft") else {}), **inner}
    if isinstance(value, ast.Call) and place in ("train", "dataset"):
        named = {f"{place}.{(one.arg or '').replace('sequence_length', 'seq_length')}": one.value for one in value.keywords}
        return {name: _value(node, constants, name) for name, node in named.items() if name in DECISIVE}
    if place in ("dataset.seq_length", "dataset.sequence_length"):  # that of the model, as Megatron-Bridge insists
        return {one: _value(value, constants, one) for one in ("dataset.seq_length", "model.seq_length")}
    if place == "comm_overlap" and isinstance(value, ast.Constant) and value.value is None:
        return {"comm_overlap.tp_comm_overlap": None, "comm_overlap.overlap_moe_expert_parallel_comm": None}
    if place in DECISIVE:
        return {place: _value(value, constants, place)}
    known = re.fullmatch(r"(model|ddp|optimizer|comm_overlap|mixed_precision|peft|dist)\.\w+|dataset\.\w*pack\w*(\.\w+)?", place)
    plain = _value(value, constants, place)  # what no list names counts where its text says it
    return {} if known is None or (isinstance(plain, str) and is_open(plain)) else {place: plain}


def _value(node: ast.expr, constants: Mapping[str, ast.expr], place: str) -> Any:
    """A literal; a dtype of torch or a backend of attention by its name; anything else is asked for by the name of its place."""
    for _ in range(4):
        node = constants.get(node.id, node) if isinstance(node, ast.Name) else node
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("torch", "AttnBackend"):
        return node.attr
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return gap([place])
