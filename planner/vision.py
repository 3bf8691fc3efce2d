"""The image encoder of a multimodal model, a vision transformer over patches with a projector into the text model; how it is
read from a config.json, which refuses towers and other encoders that are not modelled, by name."""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from planner import library
from planner.errors import PlannerError
from planner.record import record
from planner.schema import check, plain_fields, value_of, within

Size = Annotated[int, within(1, 10**9)]
SizeOrNone = Annotated[int, within(0, 10**12)]
_SIZE = Annotated[int, within(0, 10**7)] | None
LARGEST_IMAGE = 4096
"""Patches of an image where the encoder takes any resolution: 896 x 896 at 14, 1,024 tokens of Qwen-VL."""
LIKE_SIGLIP = ("siglip_vision_model", "clip_vision_model", "internvl_vision", "pixtral", "llama4_vision_model")
"""Encoders with the names of fields of CLIP; the others are named after Qwen-VL's."""
_OLD_KEYS = {"depth": ("num_hidden_layers", "vt_num_hidden_layers"), "num_heads": ("num_attention_heads", "vt_num_attention_heads"),
             "hidden_size": ("vt_hidden_size",), "intermediate_size": ("vt_intermediate_size",)}  # fmt: skip
_SAME = {"qwen3_vl_moe": "qwen3_vl", "qwen3_5": "qwen3_vl", "qwen3_5_moe": "qwen3_vl", "moonvit": "kimi_k25"}
_PARENTS = {"gemma3": "siglip_vision_model", "llama4": "llama4_vision_model", "mistral3": "pixtral", "internvl": "internvl_vision",
            "llava": "clip_vision_model"}  # fmt: skip


@record
class VisionTower:
    """Layers of full attention over the patches of an image; each token of the text model stands for some patches."""

    num_layers: Size
    """Layers."""
    hidden_size: Size
    """h_v: width of a patch."""
    num_heads: Size
    """Attention heads; queries, keys and values have h_v / heads each."""
    ffn_size: Size
    """f_v: width inside the MLP."""
    gated: bool = False
    """MLP of three matrices; False: two."""
    bias: bool = True
    """Linear layers have biases, norms are layer norms (two h_v each)."""
    patches_per_token: Size = 1
    """Patches that become one token of the text model."""
    patches_per_image: Size
    """Patches of an image that attend to each other; of any resolution: those of the largest usual image."""
    window_patches: SizeOrNone = 0
    """Patches that attend to each other in windowed layers; 0 = the whole image everywhere (Qwen2.5-VL: 64)."""
    num_full_layers: SizeOrNone = 0
    """Layers that attend to the whole image where others have windows."""
    patch_parameters: SizeOrNone = 0
    """Weights that map pixels to patches; each patch meets them once."""
    projector_parameters: SizeOrNone = 0
    """Weights between encoder and text model; each image token meets them once."""
    position_parameters: SizeOrNone = 0
    """Learned positions and what else is looked up or added."""

    def __post_init__(self) -> None:
        check(self)
        if self.hidden_size % self.num_heads:
            raise PlannerError(f"vision hidden_size {self.hidden_size} must be a multiple of its num_heads {self.num_heads}")
        if self.num_full_layers > self.num_layers:
            raise PlannerError(f"vision num_full_layers {self.num_full_layers} exceeds its num_layers {self.num_layers}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for YAML or JSON."""
        return plain_fields(self)

    @property
    def num_mlp_matrices(self) -> int:
        """Matrices of one MLP."""
        return 3 if self.gated else 2

    @property
    def layer_parameters(self) -> float:
        """One layer: 4 h_v^2 + G h_v f_v, two norms; with biases 5 h_v + (G - 1) f_v more."""
        h, f, matrices = float(self.hidden_size), float(self.ffn_size), self.num_mlp_matrices
        weights = 4 * h * h + matrices * h * f
        return weights + (2 * 2 * h + 5 * h + (matrices - 1) * f if self.bias else 2 * h)

    @property
    def parameters(self) -> float:
        """All of it, with patch embedding and projector."""
        outside = self.patch_parameters + self.projector_parameters + self.position_parameters
        return self.num_layers * self.layer_parameters + outside


@cache
def _towers() -> dict[str, dict[str, int]]:
    """Image encoders by model_type: the fields of vision_config with their defaults."""
    towers: dict[str, dict[str, int]] = library.read_yaml(library.profiles_directory() / "model_families.yaml")["towers"]
    return towers


def vision_tower(config: Mapping[str, Any], text_size: int, where: str) -> VisionTower | None:
    """The image encoder of a multimodal config.json; None where there is none. ``text_size``: h of the text model.

    Raises PlannerError that names an encoder which is not modelled.
    """
    for key in ("audio_config", "thinker_config", "speech_config"):
        if config.get(key):
            raise PlannerError(f"{where}: {key} is not modelled: plans are for text and images; give its text_config as a file")
    found = config.get("vision_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise PlannerError(f"{where}: vision_config must be a mapping")
    parent = str(config.get("model_type"))
    named = str(found.get("model_type") or _PARENTS.get(parent, parent)).removesuffix("_vision" if parent != "internvl" else "")
    kind = _SAME.get(named, named)
    if kind not in (towers := _towers()):
        text = f"the image encoder {named[:40]!r} in vision_config is not modelled"
        raise PlannerError(f"{where}: {text}; give its text_config as a config.json to plan the text model alone")
    size = {
        key: _first(found, (key, *_OLD_KEYS.get(key, ())), default, f"{where}: vision_config")
        for key, default in towers[kind].items()
    }
    try:
        if kind in LIKE_SIGLIP:
            return _like_siglip(kind, size, config, text_size, where)
        return _like_qwen(kind, size, found, text_size, where)
    except PlannerError as error:
        raise PlannerError(str(error) if str(error).startswith(where) else f"{where}: {error}") from error


def _first(found: Mapping[str, Any], keys: tuple[str, ...], default: int, where: str) -> int:
    """The first of the keys that has a value, at least 1."""
    given = (found.get(key) for key in keys)
    values = (value_of(_SIZE, one[0] if isinstance(one, list) and one else one, where, keys[0]) for one in given)
    return max(next((one for one in values if one is not None), default), 1)


def _merger(wide: int, out: int) -> int:
    """Two linear layers with biases, from ``wide`` to ``wide`` to ``out``."""
    return wide * wide + wide + wide * out + out


def _like_siglip(kind: str, s: dict[str, int], config: Mapping[str, Any], text: int, where: str) -> VisionTower:
    """Encoders of one resolution (SigLIP, CLIP, InternViT, Llama 4) and Pixtral, with the projector of the model around them."""
    h, patches = s["hidden_size"], (s["image_size"] // s["patch_size"]) ** 2
    per_image = patches if kind != "pixtral" else min(patches, LARGEST_IMAGE)
    merge = 1
    projector = h * text + text + text * text + text  # LLaVA: two linear layers
    if "mm_tokens_per_image" in config or config.get("model_type") == "gemma3":
        tokens = _first(config, ("mm_tokens_per_image",), 256, where)
        merge, projector = max(patches // tokens, 1), h * text + h
    elif kind == "internvl_vision":
        merge, projector = 4, 2 * 4 * h + 4 * h * text + text + text * text + text
    elif kind == "llama4_vision_model":
        inner, out = s["projector_input_dim"], s["projector_output_dim"]
        merge, projector = 4, s["intermediate_size"] * inner + inner * out + s["vision_output_dim"] * text
    elif kind == "pixtral" and config.get("model_type") != "llava":
        side = _first(config, ("spatial_merge_size",), 2, where)
        merge, projector = side * side, h + side * side * h * h + h * text + text * text
    plain = kind in ("pixtral", "llama4_vision_model")
    return VisionTower(
        num_layers=s["num_hidden_layers"], hidden_size=h, num_heads=s["num_attention_heads"], ffn_size=s["intermediate_size"],
        gated=kind == "pixtral", bias=kind != "pixtral", patches_per_token=merge, patches_per_image=max(per_image, 1),
        patch_parameters=3 * s["patch_size"] ** 2 * h + h * (not plain), projector_parameters=projector,
        position_parameters=0 if kind == "pixtral" else (patches + 1) * h,
    )  # fmt: skip


def _like_qwen(kind: str, s: dict[str, int], found: Mapping[str, Any], text: int, where: str) -> VisionTower:
    """Encoders of any resolution that join patches (Qwen-VL, MoonViT)."""
    h = s.get("embed_dim") or s["hidden_size"]
    ffn = s["mlp_ratio"] * h if kind == "qwen2_vl" else s["intermediate_size"]
    merge = s["spatial_merge_size"] ** 2
    keys = ("deepstack_visual_indexes", "fullatt_block_indexes")
    deep, full = (value_of(list[Any] | None, found.get(key), f"{where}: vision_config", key) for key in keys)
    deep = [8, 16, 24] if deep is None and kind == "qwen3_vl" and "qwen3_5" not in str(found.get("model_type")) else deep or []
    window = (s["window_size"] // s["patch_size"]) ** 2 if kind == "qwen2_5_vl" else 0
    full_layers = len([7, 15, 23, 31] if full is None else full) if window else 0
    return VisionTower(
        num_layers=s["depth"], hidden_size=h, num_heads=s["num_heads"], ffn_size=ffn, gated=kind == "qwen2_5_vl",
        patches_per_token=merge, patches_per_image=LARGEST_IMAGE, window_patches=window, num_full_layers=full_layers,
        patch_parameters=3 * s["temporal_patch_size"] * s["patch_size"] ** 2 * h + h * (kind in ("qwen3_vl", "kimi_k25")),
        projector_parameters=(1 + len(deep)) * _merger(merge * h, text) + 2 * h + len(deep) * 2 * merge * h,
        position_parameters=s.get("num_position_embeddings", 0) * h,
    )  # fmt: skip
