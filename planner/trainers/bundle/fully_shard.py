"""What torch's own fully_shard and pipelining have, for torchtitan and for the script without a framework."""

from planner.layout import NAMES, Schedule
from planner.model import ModelSpec
from planner.trainers.bundle.quoting import refused
from planner.trainers.bundle.target import ExportJob

SCHEDULES = {
    Schedule.GPIPE: "GPipe",
    Schedule.ONE_F_ONE_B: "1F1B",
    Schedule.INTERLEAVED: "Interleaved1F1B",
    Schedule.ZBV: "ZBVZeroBubble",
    Schedule.DUALPIPE_V: "DualPipeV",
}
"""Names of torch.distributed.pipelining, as parallelism.pipeline_parallel_schedule of torchtitan takes them too."""


def beyond_llama(model: ModelSpec, **more: bool) -> list[str]:
    """What a model has that Llama's decoder layers have not: RMS norms, rotary positions, SwiGLU, no biases.

    ``more``: further conditions by what they are called, with _ for blanks.
    """
    wrong = {
        f"norm {model.norm}": model.norm != "rmsnorm",
        f"position {model.position}": model.position != "rope",
        f"activation {model.activation}": model.activation != "silu" or not model.gated,
        "biases": model.linear_bias or model.expert_bias or model.router_bias,
        f"{model.norms_per_layer} norms per layer": model.norms_per_layer != 2,
        "attention parallel to the MLP": model.parallel_attention,
        "a norm after the embedding": model.embedding_norm,
        f"a sliding window of {model.window} tokens": model.num_windowed_layers > 0,
        "multi-token prediction": model.mtp_layers > 0,
        "attention sinks": model.attention_sinks,
        "sparse attention": model.is_sparse,
        "rotary positions on a part of each head": model.constants is not None and model.constants.rotary_fraction < 1,
        "an image encoder": model.vision is not None,
        f"layers of its own ({model.variant})": bool(model.variant),
        **{name.replace("_", " "): there for name, there in more.items()},
    }
    return [text for text, there in wrong.items() if there]


def shared_refusals(job: ExportJob) -> list[str]:
    """Sharding and schedules that torch itself does not have."""
    return refused(job, "bundle", schedules=[NAMES["schedule"][one] for one in SCHEDULES])
