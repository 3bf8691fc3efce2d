"""The way of a model through a program, from its load to the trainer: the names that hold it in functions, and what is done with it
on the way that nobody here reads."""

import ast
import re
from collections.abc import Iterator, Sequence

from planner.errors import shown
from planner.trainers.reading.python_text import FAR, last_name
from planner.trainers.reading.running import Running

LOOKS = (
    r"_*(print|log|save|push|upload|export|count|show|report|describe|verify|check|assert|eval|generate|test|infer|predict|sample|get|is|has"
    r"|find|list|dump|debug|info|warn|inspect|estimate|summar|compute|load|write|track|watch|demo|chat|benchmark|measure|validate|collect"
    r"|calc|make|create|build|format|tokenize|num|train|fit|run|main|callback)(ing|ed|s|e|ize|uate|y|dir|dirs)?(_\w+|$)"
    r"|\w*(_params?|_parameters|_info|_stats?|_summary|_names?|_size|_memory|_randomness|_dtypes)"
)
"""Names of functions that look at a model, keep it, run it, or make something else for it."""
GIVES_BACK = re.compile(
    r"from_pretrained|getattr|get_peft_model|prepare(_model(_for_\w+)?)?|setup_chat_format|clone_chat_template|compile|for_training|for_inference"
    r"|merge_and_unload|unwrap_model|deepcopy|to|cuda|cpu|half|float|bfloat16|eval|train|smart_tokenizer_and_embedding_resize|get_base_model"
    r"|set_peft_model_state_dict|\w*Trainer|DDP|DistributedDataParallel|FSDP|FullyShardedDataParallel|PeftModel\w*"
    r"|offload_wrapper|initialize"
)
"""What gives a model back as it was, or as is read elsewhere."""
CALLS = re.compile(
    rf"{LOOKS}|{GIVES_BACK.pattern}|hasattr|getattr|isinstance|type|len|next|str|id|sum|filter|map|repr|dir|vars|bool|int|float|set|sorted|any"
    r"|all|min|max|enumerate|zip|tuple|dict|append|extend|update|join|exists|set_seed|set_z3_leaf_modules|super|partial|tensor|init(ialize_\w+)?|finish"
    r"|unload|range|\w+_like|__\w+__|patch_\w*tokenizer\w*|apply_liger_kernel_to_\w+|tqdm|sleep|clip_grad\w*|gather\w*|ref(erence)?_\w+|[A-Z]\w*"
)
"""Functions that change nothing which decides; what makes collators and callbacks."""
METHODS = re.compile(
    rf"{LOOKS}|{GIVES_BACK.pattern}|(named_)?(parameters|modules|children|buffers)|state_dict|enable_input_require_grads|tie_weights|unload"
    r"|gradient_checkpointing_(en|dis)able|resize_token_embeddings|set_\w*(embeddings|adapters?)|requires_grad_|apply|post_init|\w*init_weights"
    r"|\w*adapters?|register_\w+|to_\w*(file|string|dict)|fast_generate|sleep|zero_grad|forward|backward|step|n(um)?el(ement)?|size|dim|element_size|item|data_ptr|detach|clone|mean|norm|sum|std"
    r"|items|keys|values|split|lower|upper|replace|\w?strip|startswith|endswith|pop|update|copy|append|extend|join|encode|decode|setdefault"
    r"|(normal|zero|copy|fill|uniform|add|mul|div|xavier\w+|kaiming\w+)_|is_floating_point|(un)?squeeze|view|numpy|tolist|clear|_set_static_graph|all|any|max|min"
)
"""The same, of methods of a model, its parts, its weights and its name; what casts and freezes is read elsewhere."""
DECIDES_NOTHING = re.compile(
    r"use_cache|\w*(token|tokens|tokenizer)|pretraining_tp|is_parallelizable|model_parallel|state_dict|id2label|label2id|generation_config|dtype"
    r"|torch_dtype|hf_device_map|_\w*(ddp|split|keys)\w*|warnings_issued|requires_grad|grad|data|output_(router_logits|hidden_states|attentions)"
    r"|router_(aux_loss_coef|jitter_noise)|neftune_noise_alpha|problem_type|architectures|auto_map|model_type|do_sample|top_[pk]|temperature"
    r"|\w*(path|dir|name|label|id|device|template|processor|length|positions|position_embeddings|dropout|drop|pdrop|prob|eps|coef)s?|config"
    r"|floating_point_ops|is_loaded_in_\w+|_?is_\w+|quantization_\w+|gradient_checkpointing|return_dict|training|model_tags|peft_config|shape"
    r"|image_\w+|base_model|model|\w*weight|generate|initializer_range|rope_\w+|layer_types|args|logits"
)
"""Attributes of a model or of its configuration that decide nothing here, or are read elsewhere."""
PATCHES = re.compile(
    r"(?!.*(flash|liger|tokenizer))(replace|(monkey_?)?patch|swap|override)_\w*(attn|attention|llama|qwen|mistral|gemma|neox|forward|mlp"
    r"|norm|loss|moe)\w*"
)
"""Functions that change classes of a library, by their names: no memory where they bring flash attention."""
OF_LIBRARY = re.compile(
    r"(transformers|trl)\.(\w+\.)*modeling_(?!utils)\w+\.\w+(\.forward)?|\w+(Attention|MLP|ForCausalLM|Model|DecoderLayer)\.forward"
    r"|\w*Trainer\.compute_loss"
)
"""Parts of a library that programs put their own in the place of."""
THROUGH = re.compile(r"get_(base_model|\w*embeddings|submodule)|(named_)?(modules|parameters|children)|half|float|bfloat16|to|cuda")
"""Methods that give a model or parts of it."""
ROUNDS = 8
"""Names against the order of the text that are followed."""
MOST = 3
"""Of what is passed over that is named."""


def passed_over(script: Running, trainers: Sequence[ast.Call], read: re.Pattern[str]) -> tuple[str, ...]:
    """Note about what a program does to its model on the way to the first of some trainers that nobody reads; ``read``: words of a
    configuration that are asked about."""
    every = Flow(script, trainers[:1]).passed_over(read) if trainers else ()
    found = dict(sorted(every, key=lambda one: one[1] % FAR))
    if not found:
        return ()
    named = [shown(text) + (f" (line {line})" if line < FAR else "") for text, line in [*found.items()][:MOST]]
    more = f" and {len(found) - MOST} more" if len(found) > MOST else ""
    verb, them = ("is", "it changes") if len(found) == 1 else ("are", "they change")
    return (f"{', '.join(named)}{more} {verb} not read: what {them} of the model or its step is not in the plan",)


class Flow:
    """The names that hold the model of a trainer in the functions of a script, and parts of it; of a load, the model alone."""

    def __init__(self, script: Running, trainers: Sequence[ast.Call] = (), load: ast.Call | None = None) -> None:
        self.script = script
        self.nodes = [one for one in ast.walk(script.tree) if isinstance(one, ast.Assign | ast.Call | ast.Delete | ast.For)]
        self._bound: dict[str, set[str]] = {}
        puts = [one for one in self.nodes if isinstance(one, ast.Assign)]
        given = [next((word.value for word in one.keywords if word.arg == "model"), next(iter(one.args), None)) for one in trainers]
        given += [one.targets[0] for one in puts if load is not None and one.value is load]
        self.held = {self._place(one) for one in given if isinstance(one, ast.Name | ast.Attribute)}
        self.end = {script.home_of(one): one.lineno for one in trainers}
        self.trainers = {ast.unparse(one.targets[0]) for one in puts if one.value in trainers}
        loads = script.calls("from_pretrained", "from_config") if load is None else ()
        words = [*(word.value for one in loads for word in one.keywords if word.arg == "config"),
                 *(arg for one in loads for arg in one.args if last_name(one.func) == "from_config")]  # fmt: skip
        self.configs = {ast.unparse(one) for one in words}
        self.start = {script.home_of(one): one.lineno for one in reversed(loads)}  # before it a name holds that of the model
        self._back, before, rounds = load is None, -1, 0
        while before < len(self.held) and rounds < ROUNDS:
            before, rounds = len(self.held), rounds + 1
            for node in self.nodes:
                self._spread(node)

    def _place(self, node: ast.expr) -> tuple[str, str]:
        """(Function, name that holds the model in it)."""
        text = ast.unparse(node)
        return ("" if text.startswith("self.") else self.script.home_of(node), text)

    def holds(self, node: ast.AST) -> bool:
        """Whether a name or an attribute is the model itself, or a part of it that a name holds."""
        if not isinstance(node, ast.Name | ast.Attribute):
            return False
        own = self._place(node) in self.held
        return own or (isinstance(node, ast.Name) and ("", node.id) in self.held and not self._binds(node))

    def _is(self, node: ast.AST) -> bool:
        """Whether an expression is the model or a part of it."""
        while not self.holds(node) and isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
            if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Attribute) and THROUGH.fullmatch(node.func.attr)):
                return False
            node = node.func if isinstance(node, ast.Call) else node.value
        return self.holds(node)

    def _binds(self, node: ast.Name) -> bool:
        """Whether a function has a name of its own that the module has too."""
        home = self.script.home_of(node)
        if home not in self._bound:
            within = ast.walk(made) if (made := self.script.functions.get(home)) is not None else ()
            self._bound[home] = {getattr(one, "arg", getattr(one, "id", "")) for one in within
                                 if isinstance(one, ast.arg) or isinstance(getattr(one, "ctx", None), ast.Store)}  # fmt: skip
        return node.id in self._bound[home]

    def _spread(self, node: ast.AST) -> None:
        """Names that hold the model as others do: by assignments, loops, parameters and what functions give back."""
        made = self.script.functions.get(last_name(node.func)) if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and made is not None:
            names = [one.arg for one in (*made.args.posonlyargs, *made.args.args)]
            words = [(str(one.arg), one.value) for one in node.keywords]
            for name, value in (*zip(names[names[:1] == ["self"] :], node.args, strict=False), *words):
                if self.holds(value) or (self._back and isinstance(value, ast.Attribute) and self._is(value)):
                    self.held.add((made.name, name))
        if not isinstance(node, ast.Assign | ast.For):
            return
        target, value = (node.targets[0], node.value) if isinstance(node, ast.Assign) else (node.target, node.iter)
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        mine = next((i for i, one in enumerate(parts) if self.holds(one)), None) if self._back else None
        if mine is not None and isinstance(value, ast.Name | ast.Attribute):
            self.held.add(self._place(value))
        call = value if isinstance(value, ast.Call) else None
        made = self.script.functions.get(last_name(call.func)) if call is not None else None
        within = ast.walk(made) if made is not None else ()
        for back in [one.value for one in within if isinstance(one, ast.Return) and one.value is not None]:
            every = back.elts if isinstance(back, ast.Tuple) and len(back.elts) == len(parts) else [back]
            if mine is not None and len(every) > mine and isinstance(every[mine], ast.Name):
                self.held.add(self._place(every[mine]))
            self.held |= {self._place(to) for to, one in zip(parts, every, strict=False) if self.holds(one)}
        inner = call.args[0] if isinstance(node, ast.For) and call is not None and call.args else value
        if self.holds(inner) or (self._back and self._is(inner) and not DECIDES_NOTHING.fullmatch(last_name(inner))):
            self.held |= {self._place(one) for one in parts[-1:] if isinstance(one, ast.Name)}

    def passed_over(self, read: re.Pattern[str]) -> Iterator[tuple[str, int]]:
        """(Text, line) of what is done with the model before its trainer is made, or to that, and nobody reads."""
        for node in self.nodes:
            if isinstance(node, ast.Assign | ast.Call | ast.Delete):
                at = node.value if isinstance(node, ast.Assign) else node.targets[0] if isinstance(node, ast.Delete) else node
                home = self.script.home_of(at)
                before = node.lineno <= self.end.get(home, node.lineno)
                text = self._put(node, before, read) if isinstance(node, ast.Assign) else ""
                made = node.lineno >= self.start.get(home, 0)
                text = self._called(node, made) if isinstance(node, ast.Call) and before else text
                cut = isinstance(node, ast.Delete) and isinstance(at, ast.Subscript) and self._is(at)
                text = ast.unparse(node) if cut else text
                if text and self.script.may_run(at):
                    yield text, node.lineno

    def _put(self, node: ast.Assign, before: bool, read: re.Pattern[str]) -> str:
        """An assignment to a part of the model, to a class of a library, or of what something unknown makes of the model."""
        target, value = node.targets[0], node.value
        place = ast.unparse(target)
        text = f"{'.'.join(place.split('.')[-3:])} = {ast.unparse(value)[:30]}"
        if OF_LIBRARY.fullmatch(place) or (place.endswith(".compute_loss") and place.rpartition(".")[0] in self.trainers):
            made = self.script.functions.get(last_name(value))
            about = f"{text} {self.script.home_of(value)} {ast.unparse(made) if made is not None else ''}"
            return "" if re.search("flash|torch.compile", about) else text
        part = target.value if isinstance(target, ast.Attribute | ast.Subscript) and before and not self.holds(target) else None
        if part is not None and (self._is(part) or ast.unparse(part) in self.configs):
            name = last_name(target if isinstance(target, ast.Attribute) else part)
            plain = (isinstance(value, ast.Constant) and "config" not in place) or re.search(r"\blen\(|torch\.compile\(", text)
            return "" if plain or DECIDES_NOTHING.fullmatch(name) or read.fullmatch(name) else text
        if not (before and isinstance(value, ast.Call) and self.holds(target) and (given := self._given(value))):
            return ""
        name = last_name(value.func)
        return "" if name in self.script.functions or GIVES_BACK.fullmatch(name) else f"{name}({given})"

    def _called(self, node: ast.Call, made: bool) -> str:
        """A method of the model or of a part of it, or a function that is given it."""
        name = last_name(node.func)
        last = node.args[2] if name == "setattr" and len(node.args) > 2 else None  # a switch of a part, or another name of one
        plain = isinstance(last, ast.Constant) or (isinstance(last, ast.Attribute) and self.holds(node.args[0]) and self._is(last))
        if name in self.script.functions or not name or plain:
            return ""
        if isinstance(node.func, ast.Attribute) and self._is(node.func.value):
            return "" if METHODS.fullmatch(name) or not made else f"{ast.unparse(node.func)}()"
        given = self._given(node) if made else ""
        given = f"{given}, {ast.unparse(node.args[1])[:40]}" if given and last is not None else given
        return f"{name}({given})" if PATCHES.fullmatch(name) or (given and not CALLS.fullmatch(name)) else ""

    def _given(self, node: ast.Call) -> str:
        """What of the model a call is given."""
        given = [*node.args, *(one.value for one in node.keywords)]
        some = (one for one in given if isinstance(one, ast.Name | ast.Attribute | ast.Subscript) and self._is(one))
        mine = next((one for one in some if self.holds(one) or not DECIDES_NOTHING.fullmatch(last_name(one))), None)
        return ast.unparse(mine) if mine is not None else ""
