"""The architecture of a model: what a plan needs to know about it, and where it is read from."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from planner import library
from planner.errors import PlannerError, UnknownNameError, nearest_first
from planner.linear_attention import LayerKind, LinearAttention, disagreements, layer_kinds
from planner.model_constants import Constants, constants_of_preset
from planner.model_names import HUB_ADDRESS, aliases, preset_called, preset_of, quantised_as
from planner.record import record
from planner.schema import Name, Rule, Text, check, one_of, plain_fields, read, within
from planner.vision import VisionTower

POSITIONS = ("rope", "learned", "alibi", "none")
NORMS = ("rmsnorm", "layernorm")
ACTIVATIONS = ("silu", "gelu", "relu", "relu2")
Size = Annotated[int, within(1, 10**9)]
Layers = Annotated[int, within(1, 10_000)]
"""Ten times the deepest transformer that was trained [DeepNet, arXiv 2203.00555]; exports write a line for each."""
SizeOrNone = Annotated[int, within(0, 10**9)]
Parameters = Annotated[float, Rule(most=1e18, kept=True, says="a number of parameters")]


@record
class Transformer:
    """What every decoder-only transformer has."""

    name: Name
    """What the model is called in plans and reports."""
    num_layers: Layers
    """L: transformer layers, multi-token-prediction modules not counted."""
    hidden_size: Size
    """h: width of the residual stream."""
    num_heads: Size
    """a: query heads."""
    num_kv_heads: Size
    """k: key and value heads; equal to num_heads without grouped queries and with MLA."""
    head_dim: Size
    """d: width of one query or key head; with MLA qk_nope_head_dim + qk_rope_head_dim."""
    ffn_size: Size
    """f: width inside the MLP of a dense layer."""
    vocab_size: Size
    """V: rows of the embedding table as published, before any padding by a trainer."""
    max_sequence_length: Size
    """Longest sequence that the model was published for, tokens."""
    gated: bool = True
    """MLP of three matrices, down(act(gate(x)) * up(x)); False: two matrices, down(act(up(x)))."""
    activation: Annotated[str, one_of(ACTIVATIONS)] = "silu"
    """Non-linearity of the MLP: silu, gelu, relu or relu2 (squared)."""
    tied_embeddings: bool = False
    """The output head uses the input embedding table."""
    position: Annotated[str, one_of(POSITIONS)] = "rope"
    """How positions enter: rope, learned (a table), alibi or none."""
    num_position_embeddings: SizeOrNone = 0
    """Rows of the learned position table (OPT has two more than positions); 0 unless position is learned."""
    norm: Annotated[str, one_of(NORMS)] = "rmsnorm"
    """rmsnorm (a weight) or layernorm (a weight and a bias)."""
    norms_per_layer: Size = 2
    """Norms over the hidden size in one layer: 2; 4 in Gemma 2 and 3; 1 or 2 with parallel attention."""
    embedding_norm: bool = False
    """A norm right after the embedding (BLOOM)."""
    linear_bias: bool = False
    """All linear layers of attention, dense MLP and shared experts have biases."""
    qkv_bias: bool = False
    """Query, key and value projections have biases, whatever linear_bias says (Qwen 2)."""
    qk_norm: bool = False
    """A learned RMS norm of queries and of keys."""
    qk_norm_spans: Annotated[str, one_of(("head", "heads"))] = "head"
    """What that norm is over: each head (Qwen 3, Gemma 3), or all heads of the layer together (OLMo 2, MiniMax-M2)."""
    parallel_attention: bool = False
    """Attention and MLP read the same input and are added together (Falcon, GPT-NeoX)."""
    attention_gate: bool = False
    """Each value head's output is multiplied by a gate that the query projection puts out as well (Qwen3-Next)."""


@record
class LatentAttention:
    """Multi-head latent attention (MLA): keys and values are stored compressed."""

    q_lora_rank: SizeOrNone = 0
    """MLA: rank of the compressed query; 0 = queries are projected directly."""
    kv_lora_rank: SizeOrNone = 0
    """MLA: rank of the compressed keys and values; 0 = no MLA."""
    qk_nope_head_dim: SizeOrNone = 0
    """MLA: part of a query or key head without rotary positions."""
    qk_rope_head_dim: SizeOrNone = 0
    """MLA: part of a query or key head with rotary positions; this key part is shared by all heads."""
    v_head_dim: SizeOrNone = 0
    """MLA: width of one value head."""


@record
class Experts:
    """Routed and shared experts (MoE)."""

    num_experts: SizeOrNone = 0
    """E: routed experts per MoE layer; 0 = dense model."""
    top_k: SizeOrNone = 0
    """K: routed experts that each token visits."""
    expert_ffn_size: SizeOrNone = 0
    """Width inside one routed expert."""
    num_shared_experts: SizeOrNone = 0
    """Experts per MoE layer that every token visits."""
    shared_expert_ffn_size: SizeOrNone = 0
    """Width inside all shared experts of a layer together."""
    num_dense_layers: SizeOrNone = 0
    """Leading layers of a MoE model that are dense."""
    moe_layer_interval: Size = 1
    """After the leading dense layers every n-th layer is MoE (Llama 4 Maverick: 2)."""
    expert_bias: bool = False
    """Linear layers of routed experts have biases (gpt-oss)."""
    expert_hidden_size: SizeOrNone = 0
    """Width that tokens are projected down to on their way to the routed experts and back from (Nemotron 3); 0 = none."""


@record
class SparseAttention:
    """DeepSeek sparse attention (DSA): an indexer scores all keys, and attention sees the best of them."""

    index_top_k: SizeOrNone = 0
    """Keys that a query attends to; 0 = all of them, no indexer."""
    index_heads: SizeOrNone = 0
    """Heads of the indexer."""
    index_head_dim: SizeOrNone = 0
    """Width of one of its heads; its key is shared by all heads."""
    index_layers: SizeOrNone = 0
    """Layers with an indexer of their own; the others attend to the keys that the layer before chose."""


@record
class ModelSpec(Experts, LatentAttention, SparseAttention, Transformer):
    """A decoder-only transformer. Values are checked on construction; raises PlannerError naming field and value."""

    scaled_rope: bool = False
    """Cosines and sines of the rotary embedding carry a factor (YaRN's attention factor in gpt-oss)."""
    clamped_activation: bool = False
    """Gate and up are clamped before the activation (gpt-oss)."""
    router_bias: bool = False
    """The router has a bias (gpt-oss)."""
    attention_sinks: bool = False
    """A learned logit per head joins the softmax of attention (gpt-oss)."""
    window: SizeOrNone = 0
    """Sliding window in tokens; 0 = none."""
    chunked_attention: bool = False
    """The window is a chunk: tokens attend within their own chunk of that size (Llama 4)."""
    num_windowed_layers: SizeOrNone = 0
    """Layers that attend within the window; all others attend to the whole sequence."""
    linear: LinearAttention | None = None
    """Layers with linear attention instead of attention; none in a transformer."""
    mtp_layers: SizeOrNone = 0
    """Multi-token-prediction modules, each with one transformer layer of the last kind (DeepSeek V3)."""
    variant: str = ""
    """model_type of transformers where the layers differ from those that the other fields describe, in order or scaling."""
    quantised: str = ""
    """Format of the published weights where they are quantised (fp8, mxfp4, gptq of 4 bits); what is trained is not."""
    vision: VisionTower | None = None
    """Image encoder in front of the text model."""
    published_parameters: Parameters = 0.0
    """Parameters that the publisher states; 0 = not stated."""
    published_active_parameters: Parameters = 0.0
    """Parameters per token that the publisher of a MoE model states; 0 = not stated."""
    source: Text = ""
    """Where the values come from."""
    constants: Constants | None = field(default=None, compare=False)
    """What decides neither time nor memory, for exporters; None: not known."""

    def __post_init__(self) -> None:
        check(self)
        for problem in _disagreements(self):
            raise PlannerError(problem)

    @property
    def is_moe(self) -> bool:
        """Some layers have routed experts."""
        return self.num_experts > 0

    @property
    def is_mla(self) -> bool:
        """Multi-head latent attention: keys and values are stored compressed."""
        return self.kv_lora_rank > 0

    @property
    def is_sparse(self) -> bool:
        """Attention sees only the keys that an indexer chose."""
        return self.index_top_k > 0

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return (self.num_layers - self.num_dense_layers) // self.moe_layer_interval if self.is_moe else 0

    @property
    def num_plain_layers(self) -> int:
        """Layers with a dense MLP."""
        return self.num_layers - self.num_moe_layers

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention; all of them in a transformer."""
        return self.num_layers - (self.linear.num_layers + self.linear.num_mlp_layers if self.linear else 0)

    @property
    def num_full_attention_layers(self) -> int:
        """Layers whose attention sees the whole sequence."""
        return self.num_attention_layers - self.num_windowed_layers

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """What its layers are, and how many of all."""
        return layer_kinds(self.linear, self.num_layers)

    @property
    def layers_per_mtp(self) -> int:
        """Layers of one multi-token-prediction module: a mixer and an MLP, which are two where they alternate."""
        return 2 if self.linear and self.linear.num_mlp_layers else 1

    @property
    def routed_size(self) -> int:
        """Width of tokens at the routed experts."""
        return self.expert_hidden_size or self.hidden_size

    @property
    def query_gate_size(self) -> int:
        """Width of the gate on the output of attention."""
        return self.attention_output_size if self.attention_gate else 0

    @property
    def query_size(self) -> int:
        """Width of all query heads together, a d."""
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Width of all key heads together, k d (with MLA after decompression, a d)."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_head_size(self) -> int:
        """Width of one value head."""
        return self.v_head_dim if self.is_mla else self.head_dim

    @property
    def value_size(self) -> int:
        """Width of all value heads together, k d (with MLA after decompression, a v_head_dim)."""
        return self.num_kv_heads * self.value_head_size

    @property
    def attention_output_size(self) -> int:
        """Width that enters the output projection, a times the value head."""
        return self.num_heads * self.value_head_size

    @property
    def num_mlp_matrices(self) -> int:
        """Matrices of one MLP or expert: 3 when gated, else 2."""
        return 3 if self.gated else 2

    def is_moe_layer(self, index: int) -> bool:
        """Whether layer ``index`` (from 0) has routed experts."""
        after = index - self.num_dense_layers
        return self.is_moe and after >= 0 and after % self.moe_layer_interval == self.moe_layer_interval - 1


def _disagreements(m: ModelSpec) -> Iterator[str]:
    """Fields that do not agree with each other: heads, MLA, experts, windows."""
    if not m.name.strip():
        yield "name is empty; give the model a name"
    if m.num_heads % m.num_kv_heads:
        yield f"num_heads {m.num_heads} must be a multiple of num_kv_heads {m.num_kv_heads}"
    mla = (m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim)
    if not m.is_mla and any((*mla, m.q_lora_rank)):
        yield "MLA sizes are given but kv_lora_rank is 0; give it or drop them"
    if m.is_mla and not all(mla):
        yield f"kv_lora_rank {m.kv_lora_rank} (MLA) needs qk_nope_head_dim, qk_rope_head_dim and v_head_dim"
    if m.is_mla and m.num_kv_heads != m.num_heads:
        yield f"with MLA num_kv_heads must equal num_heads {m.num_heads}, not {m.num_kv_heads}"
    if m.is_mla and m.head_dim != sum(mla[:2]):
        yield f"with MLA head_dim {m.head_dim} must be qk_nope_head_dim + qk_rope_head_dim {sum(mla[:2])}"
    experts, shared = (m.top_k, m.expert_ffn_size), (m.num_shared_experts, m.shared_expert_ffn_size)
    if not m.is_moe and any((*experts, *shared, m.expert_hidden_size, m.num_dense_layers, m.moe_layer_interval - 1)):
        yield "expert sizes are given but num_experts is 0; give it or drop them"
    if m.is_moe and not all(experts):
        yield f"num_experts {m.num_experts} needs top_k and expert_ffn_size"
    if m.top_k > m.num_experts:
        yield f"top_k {m.top_k} is larger than num_experts {m.num_experts}"
    if any(shared) and not all(shared):
        yield f"num_shared_experts {shared[0]} and shared_expert_ffn_size {shared[1]} do not go together; give both or neither"
    if m.is_moe and m.num_moe_layers <= 0:
        dense = f"num_dense_layers {m.num_dense_layers} and moe_layer_interval {m.moe_layer_interval}"
        yield f"{dense} leave no MoE layer among {m.num_layers}"
    if m.linear:
        yield from disagreements(m.linear, m.num_layers)
    sparse = (m.index_top_k, m.index_heads, m.index_head_dim, m.index_layers)
    if any(sparse) and not (all(sparse) and m.is_mla and m.q_lora_rank):
        yield "sparse attention needs index_top_k, index_heads, index_head_dim, index_layers, and MLA with q_lora_rank"
    if m.index_layers > m.num_layers:
        yield f"index_layers {m.index_layers} is larger than num_layers {m.num_layers}"
    if m.chunked_attention and not m.window:
        yield "chunked_attention needs a window, the size of a chunk"
    if m.num_windowed_layers > m.num_attention_layers:
        yield f"num_windowed_layers {m.num_windowed_layers} is larger than num_layers {m.num_attention_layers}"
    if (m.window > 0) != (m.num_windowed_layers > 0):
        both = f"window {m.window} and num_windowed_layers {m.num_windowed_layers}"
        yield f"{both} do not go together; give both or neither"
    if (m.position == "learned") != (m.num_position_embeddings > 0):
        both = f"position {m.position} does not go with num_position_embeddings {m.num_position_embeddings}"
        yield f"{both}; learned positions need a number, all others 0"


def to_dict(model: ModelSpec) -> dict[str, Any]:
    """Plain data for YAML or JSON: the fields without a default, and those that differ from theirs."""
    return plain_fields(model)


def from_dict(data: object, *, where: str = "model") -> ModelSpec:
    """A model from plain data; ``to_dict`` backwards. Raises PlannerError on unknown, missing and impossible values."""
    return read(ModelSpec, data, where)


def from_hugging_face(config: Mapping[str, Any], *, name: str = "", source: str = "") -> ModelSpec:
    """A model from the content of a Hugging Face ``config.json``; a multimodal one with its image encoder.

    Raises PlannerError naming the architecture or the field that the planner does not understand.
    """
    from planner.hugging_face import translate  # here so that presets, by far the usual case, do not pay for it

    where = f"config.json of {name}" if name else "config.json"
    values = translate(config, where=where)
    said = "; ".join(one for one in (values.pop("source", ""), source) if one)
    return from_dict({"name": name or "custom", **values, "source": said}, where=where)


def load_model(name_or_path: str) -> ModelSpec:
    """A model by preset name or alias, YAML path, path of a config.json or its directory, or org/name on the hub.

    Raises UnknownNameError with the nearest names first, or PlannerError saying what is wrong with the file.
    """
    name = HUB_ADDRESS.sub(r"\1", name_or_path.strip())
    if len(name) > 2000 or any(len(part) > 200 for part in name.split("/")):  # longer than file systems take
        raise PlannerError(f"model '{name[:57]}...': the name is too long for a file and for a model")
    path = Path(name)
    if name.endswith((".yaml", ".yml")):
        path = library.find("models", str(path))
        return from_dict(library.read_yaml(path), where=str(path))
    if name.endswith(".json"):
        return _read_config(path, path.parent.name or path.stem)
    readable = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None and not name.startswith(".")
    if path.is_dir() and name and not (readable and "/" not in name and preset_called(name)):
        return _read_config(path / "config.json", path.resolve().name)
    if readable and (preset := preset_called(name)):
        return _read_preset(preset)
    copied = preset_of(name) if readable else None
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        try:
            return _read_hub(name)
        except PlannerError:
            if copied is None:
                raise
    if copied is not None:
        return replace(_read_preset(copied), quantised=quantised_as(name))
    if "/" in name:
        raise PlannerError(f"model '{name}': no such directory; give a preset, a YAML file, a config.json or org/name")
    raise UnknownNameError("model", name, [*library.names("models"), *aliases()])


@cache
def _read_preset(preset: str) -> ModelSpec:
    """A model of the library, read once: an import asks for a preset under every name that it finds."""
    found = library.profiles_directory() / "models" / f"{preset}.yaml"
    return from_dict({"constants": constants_of_preset(preset), **library.read_yaml(found)}, where=str(found))


def _read_config(path: Path, name: str) -> ModelSpec:
    """A model from a ``config.json`` on disk."""
    return from_hugging_face(library.parse_json(library.read_text(path), str(path)), name=name, source=str(path))


def _read_hub(name: str) -> ModelSpec:
    """A model from the Hugging Face hub; the library for it is optional and loaded only here."""
    try:
        from logging import ERROR, getLogger

        import huggingface_hub  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        nearest = nearest_first(name.rpartition("/")[2].lower(), library.names("models"))[:3]
        raise PlannerError(
            f"model '{name}' looks like a name on the Hugging Face hub, but huggingface_hub is not installed; install it, or give "
            f"the path of its config.json, or a preset (nearest: {', '.join(nearest)})"
        ) from None
    try:
        getLogger("huggingface_hub.utils._http").setLevel(ERROR)  # its retries are no news
        path = Path(huggingface_hub.hf_hub_download(name, "config.json"))
    except Exception as error:  # the hub's errors have no common base: network, missing, gated
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise PlannerError(f"model '{name}' cannot be read from the Hugging Face hub: {first}") from error
    return _read_config(path, name.rsplit("/", 1)[1].lower())
