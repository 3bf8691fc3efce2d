"""The image encoder on the first stage: what its layers do for the images of one microbatch.

It is whole on every tensor and context parallel rank, which all encode the images of their microbatch, as Megatron-Bridge builds
it from transformers' own classes. Full recompute covers its layers, selective recompute none of them. Frozen it runs forward only
and keeps nothing. Left out: the copy of image tokens into the text, the head of SigLIP, unequal images.
[Megatron-Bridge, models/qwen_vl/modelling_qwen_vl, gemma_vl: self.visual is transformers' module on the first pipeline stage]
"""

import numpy as np

from planner.cost.layer.operators import REPEATED, Attention, Gemm, MemoryBound, Number, Operator, Shard
from planner.layout import Recompute
from planner.vision import VisionTower


def image_encoder(shard: Shard) -> list[Operator]:
    """Patch embedding, layers and projector, for the b x ``image_tokens`` image tokens of a microbatch.

    P = image tokens x patches per token. A layer: norms 2 x (2 P h_v), GEMMs P x 3 h_v x h_v, P x h_v x h_v, P x (G-1) f_v x h_v,
    P x h_v x f_v, attention 4 P s_v h_v FLOP with s_v the patches of an image or of a window, activation. Kept per layer without
    recompute: (8 h_v + G f_v) P values and 4 bytes per patch and head, with full recompute h_v P.
    """
    tower, workload = shard.model.vision, shard.workload
    if tower is None or not workload.image_tokens:
        return []
    tokens = shard.batch * float(workload.image_tokens)
    patches = tokens * tower.patches_per_token
    idle = not workload.trains_images
    layers, h, e, wide = float(tower.num_layers), float(tower.hidden_size), shard.element, float(shard.model.hidden_size)

    def linear(name: str, rows: Number, columns: float, depth: float, repeats: float, saved: Number = 0.0) -> Gemm:
        return Gemm(name=name, m=rows, n=columns, k=depth, low_precision=False, module=REPEATED, repeats=repeats,
                    forward_only=idle, saved=saved * repeats * e * (not idle), launches=(repeats, 2 * repeats))  # fmt: skip

    up = (tower.num_mlp_matrices - 1.0) * tower.ffn_size
    moved = patches * (up + tower.ffn_size) * e * layers
    passes = shard.trainer.kernels.norm_passes
    return [
        linear("vision_patches", patches, h, float(tower.patch_parameters) / h, 1.0),
        MemoryBound(name="vision_norms", kind="norm", forward=4 * patches * h * e * layers * passes, module=REPEATED,
                    backward=6 * patches * h * e * layers * passes, forward_only=idle,
                    saved=4 * patches * h * e * layers * (not idle), launches=(2 * layers, 4 * layers)),
        linear("vision_qkv", patches, 3 * h, h, layers, 3 * patches * h),
        *_attention(tower, shard, patches, idle),
        linear("vision_out", patches, h, h, layers),
        linear("vision_up", patches, up, h, layers, patches * up),
        MemoryBound(name="vision_activation", kind="elementwise", forward=moved, backward=1.5 * moved, forward_only=idle,
                    module=REPEATED, saved=patches * tower.ffn_size * e * layers * (not idle), launches=(layers, layers)),
        linear("vision_down", patches, h, float(tower.ffn_size), layers),
        linear("vision_projector", tokens, wide, float(tower.projector_parameters) / wide, 1.0),
    ]  # fmt: skip


def _attention(tower: VisionTower, shard: Shard, patches: Number, idle: bool) -> list[Attention]:
    """Full attention within images, and within windows in the layers that have them."""
    heads, h, e = float(tower.num_heads), float(tower.hidden_size), shard.element
    full = float(tower.num_full_layers or tower.num_layers)
    kinds = [("vision_attention", full, float(tower.patches_per_image))]
    if tower.window_patches:
        kinds.append(("vision_windows", tower.num_layers - full, float(tower.window_patches)))
    found = []
    for name, layers, length in kinds:
        size = np.minimum(patches / shard.batch, length)
        found.append(Attention(
            name=name, heads=heads, kv_heads=heads, documents=np.maximum(patches / shard.batch / size, 1.0),
            seq_q=size, seq_kv=size,
            head_dim=h / heads, repeats=layers, forward_only=idle, module=REPEATED, launches=(layers, 3.0 * layers),
            saved=patches * (h * e + 4.0 * heads) * layers * (not idle),
        ))  # fmt: skip
    return found


def kept_inputs(shard: Shard) -> Number:
    """Bytes of the inputs of the encoder's layers that full recompute keeps."""
    tower, workload = shard.model.vision, shard.workload
    if tower is None or not workload.image_tokens or not workload.trains_images:
        return 0.0
    patches = shard.batch * float(workload.image_tokens) * tower.patches_per_token
    full = np.asarray(shard.layout.recompute) == int(Recompute.FULL)
    return full * patches * tower.hidden_size * tower.num_layers * shard.element
