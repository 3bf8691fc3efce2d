"""The records that the facts of a trainer lie in: what is legal, stored, one kernel, sent, and what the host costs."""

from typing import Annotated, Any

from planner import library
from planner.errors import PlannerError
from planner.layout import MODULE_NAMES, NAMES
from planner.record import record
from planner.schema import Positive, Seconds, keys, one_of, within

WORDS: dict[str, dict[str, str]] = library.read_yaml(library.profiles_directory() / "trainer_words.yaml")
"""By fact: the names that its values are made of, and what each means."""
PASSES = ("norm", "elementwise", "rope", "loss")
HOST_FACTORS = ("tensor_parallel", "expert_overlap")
COPIES = ("gather", "reduce", "accumulate", "accumulate_in_pipeline", "offload")
GRAPHS = ("none", "layers", "layers_and_experts", "static_experts")


def _named(fact: str, name: str) -> Any:
    """Property: whether a set of names, such as ``offload``, holds one."""
    return property(lambda record: name in getattr(record, fact))


def _factor(fact: str, name: str) -> Any:
    """Property: one factor of a mapping, such as ``passes``; 1 where it is not named."""
    return property(lambda record: getattr(record, fact).get(name, 1.0))


@record
class FineTuning:
    """What a job of a trainer for fine-tuning is where its user does not say; nothing of a trainer that pre-trains as well."""

    sequence_length: Annotated[int, within(0)] = 0
    """Tokens that longer samples are cut to; 0 = it has no habit."""
    global_batch_size: Annotated[int, within(0)] = 0
    """Sequences per optimizer step on one GPU, accumulated ones counted."""
    lora_rank: Annotated[int, within(0)] = 0
    """Rank of the adapters that it trains unless told otherwise."""
    frozen_weights: str = ""
    """Dtype of the base under adapters, where that is not bf16."""
    optimizer: str = ""
    """Its optimizer, where that is not Adam."""
    tables: Annotated[str, one_of("", "fp32", "frozen")] = ""
    """Dtype of tables that are trained as a whole with adapters: fp32, that of the frozen table; empty = as PEFT has them."""
    pair_logits: Positive = 8.0
    """Bytes per logit alive at the peak of the loss of DPO."""
    objectives: frozenset[Annotated[str, one_of("dpo")]] = frozenset()
    """What it minimises in addition to the loss of the next token, of ``workload.OBJECTIVES``."""

    def tunes(self, lora_rank: int, objective: str) -> bool:
        """A job fine-tunes: it trains adapters, learns from preferences, or its trainer does nothing else."""
        return lora_rank > 0 or objective != "lm" or self.sequence_length > 0


@record
class Legal:
    """Which jobs and layouts it can run."""

    tp: bool
    """Tensor parallelism exists."""
    schedules: tuple[Annotated[str, one_of(*NAMES["schedule"].values())], ...]
    """Pipeline schedules it can run; empty = no pipeline parallelism."""
    layer_split: Annotated[str, one_of(WORDS["layer_split"])]
    """How layers are split over pipeline stages, of ``WORDS``."""
    zero: tuple[Annotated[int, within(0, 3, says="zero levels from 0 to 3")], ...]
    """State sharding levels."""
    zero_with_pp: tuple[Annotated[int, within(0, 3, says="zero levels from 0 to 3")], ...]
    """State sharding levels that work with a pipeline."""
    allows: frozenset[Annotated[str, one_of(WORDS["allows"])]]
    """What works together; names of ``WORDS``."""
    hsdp: bool
    """States may be sharded over a part of the data parallel ranks."""
    cp_methods: tuple[Annotated[str, one_of(*NAMES["cp_method"].values())], ...]
    """Context parallel methods; empty = no context parallelism."""
    expert_parallel: Annotated[str, one_of("folded", "dp", "alone", "outside", "none")]
    """'folded' over tp * cp * dp, 'dp' inside the data parallel ranks, 'alone' the same without tp and cp, 'outside' like 'dp' but
    whole on every rank that has them, whatever zero shards, or 'none'."""
    etp: bool
    """Experts may have their own tensor parallel degree; else it is tp ('dp') or 1 ('folded')."""
    sequence_parallel: Annotated[str, one_of("optional", "usual", "always", "never")]
    """'optional', 'usual' (as optional, but plans without it are not searched), 'always' (whenever tp > 1) or 'never'."""
    recompute_modules: tuple[Annotated[str, one_of(*MODULE_NAMES.values())], ...]
    """Modules that selective recompute knows; searched one by one and together. Empty = it has full recompute alone."""
    recompute_layers: bool
    """Full recompute may cover a part of the layers of each stage."""
    offload: frozenset[Annotated[str, one_of(WORDS["offload"])]]
    """What may live in host memory; names of ``WORDS``."""
    sequence_divisor: Annotated[int, within(1)]
    """The sequence length must divide by this times cp when cp > 1 (2 = causal load balancing)."""
    precisions: tuple[str, ...]
    """Precisions it trains in; the first unless told otherwise."""
    fine_tuning: FineTuning
    """What it fine-tunes by default."""
    frozen_weights: tuple[Annotated[str, one_of(WORDS["frozen_weights"])], ...]
    """Dtypes that the base of adapters may have, of ``WORDS``."""

    def __post_init__(self) -> None:
        for name in ("zero", "precisions"):
            if not getattr(self, name):
                raise PlannerError(f"{name} is empty; a trainer has at least one")

    @property
    def pp(self) -> bool:
        """Pipeline parallelism exists."""
        return bool(self.schedules)

    @property
    def uneven_stages(self) -> bool:
        """The first and the last pipeline stage may have fewer layers than the others."""
        return self.layer_split.endswith("_or_ends")

    @property
    def drops_remainder(self) -> bool:
        """Layers that do not divide by the stages are refused."""
        return self.layer_split.startswith("equal")

    tp_with_cp = _named("allows", "tp_with_cp")
    tied_embeddings_with_pp = _named("allows", "tied_embeddings_with_pp")
    kv_replication = _named("allows", "kv_replication")
    tp_with_linear_attention = _named("allows", "tp_with_linear_attention")
    cp_with_linear_attention = _named("allows", "cp_with_linear_attention")
    any_microbatches = _named("allows", "any_microbatches")
    every_nth_layer = _named("allows", "every_nth_layer")
    offload_optimizer = _named("offload", "optimizer")
    offload_activations = _named("offload", "activations")
    offload_saved_tensors = _named("offload", "saved_tensors")
    offload_frozen_tables = _named("offload", "frozen_tables")
    offload_parameters = _named("offload", "parameters")
    offload_with_tp_and_ep = _named("offload", "optimizer_with_tp_and_ep")

    @property
    def partial_offload_level(self) -> int:
        """Lowest zero level at which a part of the optimizer states may live on the host."""
        return 0 if "optimizer_partly" in self.offload else 3

    @property
    def recompute(self) -> tuple[str, ...]:
        """Recompute modes."""
        return ("none", "selective", "full") if self.recompute_modules else ("none", "full")


@record
class Stored:
    """What is in memory, and how well that is known."""

    weight_bytes: float
    """Bytes per parameter of the resident weights."""
    weight_sharding_level: Annotated[int, within(0, 3)]
    """Lowest zero level at which resident weights are sharded: 3 in ZeRO, 1 in FSDP (which then gathers them)."""
    gradient_bytes: float
    """Bytes per parameter of the resident gradients."""
    fp16_gradient_bytes: tuple[float, float]
    """The same when training in fp16, whose gradients may be kept in half precision under the loss scale; and bytes per parameter
    of fp32 gradients that go with the optimizer states then."""
    gradients: Annotated[str, one_of(WORDS["gradients"])]
    """How gradients come (``cost.memory.peak_points``), of ``WORDS``."""
    optimizer_bytes: dict[str, float]
    """Bytes per parameter of optimizer states and master weights, of every optimizer that it has."""
    gathered_inputs: bool
    """Column-parallel layers save their gathered input (true) or its shard, gathered again for the backward pass."""
    dropout: bool
    """Dropout is used, and its masks are saved: of the model, or before adapters where those alone are trained."""
    loss: Annotated[str, one_of(WORDS["loss"])]
    """How head and loss run, of ``WORDS``."""
    logit_bytes: float
    """Bytes per logit alive at the peak of the loss: logits, their fp32 copy, softmax and gradient; of one piece where the loss
    is not ``full``."""
    whole_table_gradient: bool
    """The gradient of a vocabulary-parallel embedding is as large as the whole table on every rank until it is reduced."""
    weighted_experts: bool
    """Outputs of routed experts are kept for the gradient of the routing weights that multiply them."""
    recompute_stops_early: bool
    """Recompute stops when the last tensor that the backward pass needs is back: the down projection is not repeated."""
    fragmentation: float
    """Reserved over allocated memory, minus 1."""
    memory_error: Positive
    """Standard deviation of ln(measured / predicted peak memory)."""

    @property
    def gradients_on_demand(self) -> bool:
        """Gradients are made by the backward pass, unit by unit."""
        return self.gradients != "buffers"


@record
class Casts:
    """Bytes that kernels move to quantise for one precision, per element."""

    inputs: float
    """Of the input and the output gradient of a linear layer: what norm and activation kernels do not write anyway. Copies for
    all three GEMMs included."""
    weights: float = 0.0
    """Of gathered weights, per microbatch, for both passes; none where they are quantised once per step or before they are
    gathered."""
    outputs: float = 0.0
    """Of the input and the weight gradient, to scale them after their GEMM."""
    kernels: float = 1.0
    """Kernels that quantise the rows of one expert, where experts run one after the other; 0: one kernel does those of all."""


@record
class Kernels:
    """What is one kernel, and what is many."""

    transformer_engine: bool
    """Layers come from Transformer Engine: norms are part of the linear layer behind them, and its rules hold."""
    attention: Annotated[str, one_of("flash", "unfused")]
    """'flash' (no score matrix in memory) or 'unfused' (batched GEMM, softmax, dropout, batched GEMM)."""
    attention_kernel: Annotated[str, one_of("best", "fa4", "fa2", "flash_attn", "fa1", "triton")]
    """'best' the device has, 'fa4' (of 2026, Blackwell), 'fa2', 'flash_attn' (the same at a clock of its own), 'fa1' (flash
    attention of 2022) or 'triton' (the same algorithm in Triton of 2023)."""
    unfused: frozenset[Annotated[str, one_of(WORDS["unfused"])]]
    """Operators that run as several plain kernels; names of ``WORDS``."""
    passes: Annotated[dict[str, Positive], keys(PASSES, required=False)]
    """Times that norms, element-wise operators (activation, dropout, residual), rotary embedding and loss read or write their
    tensor, over the minimum; 1 = one fused kernel, and what is not named."""
    fused_experts: bool
    """One kernel multiplies the rows of all experts, activates and quantises what it puts out, and so backward."""
    expert_dispatch: Annotated[str, one_of("alltoall", "deduplicated", "deepep")]
    """'alltoall' sends a token to every expert that it goes to, 'deduplicated' once per node and GPU (HybridEP); so does 'deepep'
    with few multiprocessors."""
    casts: dict[str, Casts]
    """What quantising costs, by precision."""
    fp8: frozenset[Annotated[str, one_of(WORDS["fp8"])]]
    """What else happens in fp8 and fp4; names of ``WORDS``."""
    tp_copies: bool
    """Tensor-parallel collectives over the second dimension of (batch, sequence, hidden) copy the whole tensor into or out of
    rank order, unless split and pipelined with their GEMM."""

    norm_passes = _factor("passes", "norm")
    elementwise_passes = _factor("passes", "elementwise")
    rope_passes = _factor("passes", "rope")
    loss_passes = _factor("passes", "loss")
    separate_projections = _named("unfused", "projections")

    def query_adapters(self, targets: str) -> float:
        """Times that an adapter's rank stands before query, key and value: once for each that it changes, but once for all where
        one adapter changes what one projection puts out.  [peft, tuners/lora; litgpt/lora.py, LoRAQKVLinear: lora_A]"""
        if not (self.separate_projections or "fused_qkv_adapters" in self.unfused):
            return 1.0
        return 2.0 if targets == "qv" else 3.0

    @property
    def linear_experts(self) -> bool:
        """Experts are linear layers, which adapters and quantisation find: not where plain torch holds all of them in one tensor.

        [peft, target_modules; transformers 5, integrations/moe.py]
        """
        return not self.separate_projections or bool({"grouped_gemm", "own_adapters", "linear_experts"} & self.unfused)

    quantised_tensors = _named("unfused", "quantised_experts")
    half_adapters = _named("unfused", "half_adapters")
    fp32_norms = _named("unfused", "fp32_norms")
    fp32_tables = _named("unfused", "fp32_tables")
    adapters_on_tensors = _named("unfused", "expert_adapters")
    fp32_experts = _named("unfused", "fp32_experts")

    @property
    def adapted_experts(self) -> bool:
        """Experts may have adapters, as layers or as tensors."""
        return self.linear_experts or self.adapters_on_tensors

    @property
    def quantised_experts(self) -> bool:
        """Experts lie in the bits of a frozen base."""
        return self.linear_experts or self.quantised_tensors

    @property
    def saved_norm_bytes(self) -> float:
        """Bytes per element of what an RMS norm saves of its input in half precision; a layer norm is one kernel, which saves 2."""
        return 6.0 if "norm" in self.unfused else 2.0

    @property
    def attention_dtype(self) -> str:
        """'fp8' where scores and values are multiplied in fp8 when training in fp8, else 'bf16'."""
        return "fp8" if "attention" in self.fp8 else "bf16"


@record
class Traffic:
    """How states travel, and what hides behind computation."""

    overlap: frozenset[Annotated[str, one_of(WORDS["overlap"])]]
    """Which communication hides behind computation; names of ``WORDS``."""
    gradient_reduce_bytes: float
    """Bytes per parameter on the wire when gradients are reduced."""
    bucket_parameters: Positive
    """Parameters per gradient bucket."""
    bucket_bytes: float
    """Bytes per parameter of buckets that gradients with replicas are copied into at ZeRO 0, and reduced from one by one (torch's
    DDP); 0 = gradients are reduced where they lie."""
    root_units: Annotated[int, within(0, 2)]
    """Units are gathered and reduced one by one (FSDP): embedding tables in the one that is gathered first and reduced last,
    1 = the embedding's own, 2 = the root's, which holds the head as well; 0 = buckets of ``bucket_parameters``."""
    zero1_all_reduces: bool
    """ZeRO 1 all-reduces whole gradients and drops what other ranks own, instead of an overlapped reduce-scatter; when the backward
    pass has ended, unless ``overlap`` names whole_gradients."""
    copy_bytes: Annotated[dict[str, float], keys(COPIES, required=False)]
    """Bytes per parameter that kernels move: to bring gathered weights into their places ('gather', each time), gradients into
    the buffer that is reduced ('reduce', each time); to add gradients to the accumulated ones ('accumulate', each microbatch;
    0 = inside the weight gradient's GEMM), and in a pipeline alone, where reductions wait for the last microbatch
    ('accumulate_in_pipeline'); and in host memory per offloaded parameter in addition to the update ('offload')."""

    def copied(self, name: str) -> float:
        """Of ``copy_bytes``; 0 where it is not named."""
        return self.copy_bytes.get(name, 0.0)


@record
class Host:
    """What the host costs."""

    host_time: Seconds
    """Seconds of host work per kernel launched."""
    host_factors: Annotated[dict[str, Positive], keys(HOST_FACTORS, required=False)]
    """Host work per kernel over that without: 'tensor_parallel' (every operation is dispatched through a distributed tensor),
    'expert_overlap' of their exchange (layers are cut into nodes, each with streams, events and a backward pass of its own)."""
    unit_host_time: Seconds
    """Seconds of host work in each pass around one layer whose sharded weights are gathered for it: hooks, the collectives and
    copies they launch, and what they free."""
    cuda_graphs: Annotated[str, one_of(GRAPHS)]
    """What is captured: 'none'; 'layers' without their routed experts; 'layers_and_experts', every expert with a fixed number of
    rows (full blocks of them: token drop and padding); 'static_experts' has such experts and captures nothing. The host launches
    one graph instead of many kernels."""
    step_overhead: Seconds
    """Seconds per optimizer step that are neither computation nor communication (data, logging, gradient norm)."""

    tensor_parallel_factor = _factor("host_factors", "tensor_parallel")
    expert_overlap_factor = _factor("host_factors", "expert_overlap")

    @property
    def graphs(self) -> bool:
        """Layers are captured."""
        return self.cuda_graphs.startswith("layers")

    @property
    def static_experts(self) -> bool:
        """Every expert has a fixed number of rows, and graphs hold experts too."""
        return self.cuda_graphs.endswith("experts")
