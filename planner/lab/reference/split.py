"""What the torch model needs to know of a plan: sizes, degrees and stages as plain values; and what it cannot run."""


from planner.errors import PlannerError
from planner.layout import NAMES, SPLIT_BACKWARD, CpMethod, Layout, Module, Order, Recompute, Schedule
from planner.model import ModelSpec
from planner.record import record
from planner.trainer import Trainer
from planner.trainers.bundle import fully_shard, target
from planner.workload import Workload

SCHEDULES = dict(sorted({**fully_shard.SCHEDULES, Schedule.ZB_H1: "InterleavedZeroBubble"}.items()))
"""Names of torch.distributed.pipelining."""
EIGHT_BITS = ("fp8", "fp8_row", "fp8_block", "mxfp8")
"""Precisions whose linear layers multiply values of 8 bits; ``eight_bits.RECIPES``."""
KERNELS = ("fp8", "fp8_row")
"""Of them those whose products are a kernel of a GPU here; others are emulated, and all are on a processor."""
LIKE_TORCH = ("torchtitan", "fsdp")
"""Code bases of trainers whose memory the torch model has: fp32 shards, gathered in half precision."""


@record
class Stage:
    """One virtual stage."""

    rank: int
    """Pipeline rank that holds it."""
    layers: tuple[int, ...]
    """Numbers of its layers, from 0."""


@record
class Split:
    """A model and how it is split; plain values that travel to other processes."""

    model: ModelSpec
    """The architecture."""
    sequence_length: int
    """Tokens per sequence, all context-parallel ranks together."""
    micro_batch_size: int = 1
    """Sequences per microbatch."""
    num_microbatches: int = 1
    """Microbatches per step and replica."""
    tp: int = 1
    """Tensor parallel degree, with sequence parallelism."""
    pp: int = 1
    """Pipeline parallel degree."""
    dp: int = 1
    """Data parallel degree."""
    cp: int = 1
    """Context parallel degree, keys and values gathered."""
    ep: int = 1
    """Expert parallel degree over the ranks of tp, cp and dp_shard."""
    dp_shard: int = 1
    """Data parallel ranks that share states."""
    zero: int = 2
    """0 replicated, 1 sharded and reduced once per step, 2 for every microbatch, 3 weights gathered layer by layer."""
    one_root: bool = False
    """Embedding, norm and head in one unit of FSDP, the root's, which is gathered until its backward pass; else in two."""
    keeps_outputs: bool = False
    """The loop holds logits until the backward pass has ended."""
    schedule: str = "1F1B"
    """Name of torch.distributed.pipelining."""
    stages: tuple[Stage, ...] = ()
    """Virtual stages in the order that the data passes them."""
    recompute: str = "none"
    """none, selective (attention and every second matrix product are kept) or full."""
    precision: str = "fp32"
    """bf16 (fp32 shards, gradients reduced in fp32), fp32 or fp64."""
    linear: str = ""
    """Of ``eight_bits.RECIPES``, how linear layers get operands in 8 bits; none = as all else."""
    scale_block: int = 0
    """Values that share a scale where the recipe has blocks; 0 = as many as it says."""
    optimizer: str = "sgd"
    """sgd or adam."""
    fused: bool = False
    """Norms, activations, rotary embedding and loss are one operator each, as compiled code has them; else plain torch."""
    balanced: bool = False
    """Every expert gets the same number of tokens, whatever the router says: for ranks without neighbours."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    learning_rate: float = 0.1
    """Of either optimizer."""
    attention: str = "best"
    """Kernel that attention is priced as, the trainer's ``attention_kernel``."""
    host_states: int = 0
    """Percent of the optimizer states in host memory, where their update runs."""

    @property
    def world(self) -> int:
        """Processes."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def global_batch_size(self) -> int:
        """Sequences per step."""
        return self.micro_batch_size * self.num_microbatches * self.dp

    @property
    def local_tokens(self) -> int:
        """Tokens of one sequence between layers on one rank."""
        return self.sequence_length // self.cp // self.tp

    def stages_of(self, rank: int) -> list[int]:
        """Numbers of the virtual stages of a pipeline rank."""
        return [i for i, stage in enumerate(self.stages) if stage.rank == rank]


def virtual_stages(num_layers: int, layout: Layout) -> tuple[Stage, ...]:
    """Virtual stages of a layout in the order that the data passes them."""
    found = target.virtual_stages(target.layers_per_chunk(num_layers, layout), layout)
    return tuple(Stage(rank=rank, layers=tuple(layers)) for rank, _, layers in found)


def split_of(workload: Workload, trainer: Trainer, layout: Layout) -> Split:
    """What the torch model runs for a plan. Raises PlannerError with the first thing that it has not."""
    reasons = refusals(workload, layout)
    if reasons:
        raise PlannerError(reasons[0])
    return Split(
        model=workload.model, sequence_length=workload.sequence_length,
        micro_batch_size=int(layout.micro_batch_size), num_microbatches=int(layout.num_microbatches),
        tp=int(layout.tp), pp=int(layout.pp), dp=int(layout.dp), cp=int(layout.cp), ep=int(layout.ep),
        dp_shard=int(layout.shard), zero=int(layout.zero), one_root=trainer.traffic.root_units > 1,
        keeps_outputs=trainer.stored.loss == "kept",
        schedule=SCHEDULES[Schedule(int(layout.schedule))],
        stages=virtual_stages(workload.model.num_layers, layout), recompute=NAMES["recompute"][Recompute(int(layout.recompute))],
        precision="bf16" if workload.precision in EIGHT_BITS else workload.precision,
        linear=workload.precision if workload.precision in EIGHT_BITS else "",
        optimizer=workload.optimizer, fused="swiglu" not in trainer.kernels.unfused,
        learning_rate=3e-4, attention=trainer.kernels.attention_kernel, host_states=int(layout.offload_optimizer),
    )  # fmt: skip


def refusals(work: Workload, layout: Layout) -> list[str]:
    """What the torch model has not, or what runs and is silently wrong: a sentence each, with the remedy."""
    model = work.model
    missing = {
        "ALiBi positions": model.position == "alibi",
        f"{model.norms_per_layer} norms per layer": model.norms_per_layer != 2,
        "parallel attention": model.parallel_attention,
        "a norm after the embedding": model.embedding_norm,
        "sliding windows": model.num_windowed_layers > 0,
        "sparse attention": model.is_sparse,
        "linear attention": model.linear is not None,
        "attention sinks": model.attention_sinks,
        "an image encoder": model.vision is not None,
        f"layers of its own ({model.variant})": bool(model.variant),
        "biases of experts or router": model.expert_bias or model.router_bias,
        "clamped activations": model.clamped_activation,
        "a rotary embedding with a factor": model.scaled_rope,
        "biases with MLA": model.is_mla and (model.linear_bias or model.qkv_bias or model.qk_norm),
    }
    reasons = (
        *((found, f"{model.name} has {what}, which the torch model of `plan validate` has not; validate a model without")
          for what, found in missing.items()),
        (work.precision not in ("bf16", "fp32", *EIGHT_BITS),
         f"precision {work.precision}: the torch model computes in bf16, fp32 or {', '.join(EIGHT_BITS)}; plan with one of them"),
        (work.optimizer not in ("adam", "sgd"),
         f"optimizer {work.optimizer}: the torch model has adam and sgd; plan with one of them"),
        (work.lora_rank, f"lora_rank {work.lora_rank}: the torch model trains every weight; plan without adapters"),
        (work.objective != "lm", f"objective {work.objective}: the torch model predicts the next token; plan with objective lm"),
        (work.document_length,
         f"document_length {work.document_length}: the torch model has one document per sequence; leave it out"),
        *_of_layout(model, layout),
    )  # fmt: skip
    return [sentence for wrong, sentence in reasons if wrong]


def _of_layout(model: ModelSpec, layout: Layout) -> tuple[tuple[object, str], ...]:
    """Pairs: whether it is so, and the sentence."""
    tp, pp, cp, ep, zero, shard = (int(getattr(layout, name)) for name in ("tp", "pp", "cp", "ep", "zero", "shard"))
    schedule, recompute = Schedule(int(layout.schedule)), int(layout.recompute)
    name, known = NAMES["schedule"][schedule], ", ".join(NAMES["schedule"][int(one)] for one in SCHEDULES)
    return (
        (tp > 1 and not int(layout.sequence_parallel),
         f"tp {tp} without sequence parallelism: the torch model always splits the norms too; add it"),
        (not model.is_mla and model.num_kv_heads % tp,
         f"tp {tp} must divide the {model.num_kv_heads} key-value heads [ColwiseParallel]; use a divisor"),
        (cp > 1 and int(layout.cp_method) != CpMethod.ALLGATHER,
         f"cp_method {NAMES['cp_method'][int(layout.cp_method)]}: the torch model gathers keys and values; use allgather"),
        (int(layout.etp) > 1,
         f"etp {layout.etp}: experts of the torch model are whole on their rank; use etp 1 and a larger ep"),
        (model.is_moe and shard * cp * tp % ep,
         f"ep {ep} must divide dp_shard {shard} x cp {cp} x tp {tp}, whose ranks hold the experts"),
        (pp > 1 and model.tied_embeddings,
         f"{model.name} ties its embeddings: with pp {pp} they lie on two ranks whose gradients nothing adds; use pp 1"),
        (schedule not in SCHEDULES, f"schedule {name}: torch.distributed.pipelining has {known}; use one of them"),
        (pp > 1 and schedule in SPLIT_BACKWARD and zero == 3,
         f"schedule {name} with zero 3: weights that FSDP frees between the two halves of the backward pass lose their "
         "gradient, without an error [measured, torch 2.13]; use zero 2"),
        (model.is_moe and pp > 1 and zero == 3 and recompute == Recompute.SELECTIVE,
         f"zero 3 with selective recompute of experts and pp {pp}: FSDP gathers them anew when a layer is repeated, which torch's "
         "checkpoint takes for another computation [torch 2.13]; use zero 2, or full or no recompute"),
        (int(layout.order) != Order.TP_CP_EP_DP_PP,
         f"order {NAMES['order'][int(layout.order)]}: the torch model has tp-cp-ep-dp-pp; use it"),
        (recompute == Recompute.SELECTIVE and int(layout.recompute_modules) != Module.EVERY_SECOND_MATMUL,
         "selective recompute by module: the torch model has every_second_matmul; use it, or full or none"),
        (int(layout.recompute_layers),
         f"recompute_layers {layout.recompute_layers}: the torch model recomputes all layers or none; use 0"),
        (bool(layout.offload_activations or layout.offload_parameters),
         "offload of weights or activations: the torch model keeps both on the GPU; plan without, or with offload_optimizer"),
    )  # fmt: skip
