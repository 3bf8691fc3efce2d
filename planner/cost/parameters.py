"""Parameter counts by kind of weight, for one whole model: what tensor, pipeline and expert parallelism split later."""

from collections.abc import Sequence

from planner.linear_attention import LayerKind, LinearAttention
from planner.model import ModelSpec
from planner.record import record


@record
class ParameterCounts:
    """Parameters of one model without any parallelism.

    "Per layer" is the mean of the model's layers where these are of several kinds: some with linear attention, or without MLP.
    "Sharded" weights are those that tensor parallelism divides; "replicated" ones are whole on each of its ranks.
    """

    input_embedding: float
    """Token embedding, V h."""
    position_embedding: float
    """Learned positions and the norm after the embedding (BLOOM); replicated, on the first stage."""
    head: float
    """Output head, V h; 0 when it is tied to the input embedding."""
    final_norm: float
    """Norm before the head."""
    attention_sharded: float
    """Per layer: query, key, value and output weights and the biases that are split with them; those of linear attention."""
    attention_replicated: float
    """Per layer: all norms, the bias of the output projection, MLA's down projections and their norms."""
    key_value_weights: float
    """Per layer: the part of attention_sharded in key and value projections, repeated when tp > k; 0 with MLA."""
    mlp_sharded: float
    """Per dense layer: MLP weights and the biases that are split with them."""
    mlp_replicated: float
    """Per dense layer: bias of the down projection."""
    expert: float
    """One routed expert (times the part of the layers that have an MLP)."""
    shared_experts: float
    """Per MoE layer: all shared experts together."""
    router: float
    """Per MoE layer: router weights and bias, and projections to the width of routed experts; replicated."""
    mtp_sharded: float
    """Per multi-token-prediction module, next to its transformer layer: the projection of two joined states."""
    mtp_replicated: float
    """Per multi-token-prediction module: its norms."""
    vision: float = 0.0
    """Image encoder and projector; replicated, on the first stage."""

    @property
    def mtp(self) -> float:
        """Per multi-token-prediction module, next to its transformer layer."""
        return self.mtp_sharded + self.mtp_replicated


def count_parameters(model: ModelSpec, kinds: Sequence[LayerKind] = ()) -> ParameterCounts:
    """Parameters of each kind of weight; per layer as the mean of ``kinds`` of layers, by default all of the model.

    n = h for RMS norm, 2 h for layer norm (weight and bias).
    attention   h a d + 2 h k d + a d h, with biases a d + 2 k d (sharded) and h (output, replicated)
    MLA         q: h r_q + r_q a d (or h a d); kv: h (r_kv + d_rope) + r_kv a (d_nope + d_v); output a d_v h
                [DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C]
                a gate on the output adds h a d
    linear      see ``_linear_weights``
    MLP         3 h f gated, 2 h f not; each expert likewise with its own width
    router      h E, and 2 h l where experts work at a width of l  [Nemotron 3: LatentMoE]
    MTP         2 h h + 3 n: projection of two joined states, their two norms and the module's own final norm
                [DeepSeek-V3, arXiv 2412.19437, section 2.2]; embedding and head are shared with the main model.
    sinks       a per layer, split with the heads
    indexer     r_q a_i d_i + h d_i + 2 d_i + h a_i: queries, the key and its layer norm, weights of the heads; replicated, in
                those layers that have one, here at their mean  [DeepSeek-V3.2-Exp, inference/model.py, Indexer]
    Left out: score corrections of routers (E per layer), below 1e-6; norms over all heads instead of one (OLMo 2), below 5e-5.
    """
    h, v = float(model.hidden_size), float(model.vocab_size)
    norm = h if model.norm == "rmsnorm" else 2.0 * h
    bias, matrices = float(model.linear_bias), model.num_mlp_matrices
    kinds = kinds or model.layer_kinds
    attends, linear = (sum(one.share for one in kinds if one.mixer == name) for name in ("attention", "linear"))
    mlps = sum(one.share for one in kinds if one.mlp)
    attention, key_value, compressed = _attention_weights(model)
    own, own_whole = _linear_weights(model.hidden_size, model.linear) if model.linear else (0.0, 0.0)
    return ParameterCounts(
        input_embedding=v * h,
        position_embedding=model.num_position_embeddings * h + model.embedding_norm * norm,
        head=0.0 if model.tied_embeddings else v * h,
        final_norm=norm,
        attention_sharded=attends * (attention + model.attention_sinks * model.num_heads) + linear * own,
        attention_replicated=attends * (compressed + model.qk_norm * 2.0 * model.head_dim + bias * h)
        + linear * own_whole
        + indexer_parameters(model) * model.index_layers / model.num_layers
        + model.norms_per_layer * norm * (attends + linear + mlps) / 2.0,
        key_value_weights=attends * key_value,
        mlp_sharded=mlps * (matrices * h * model.ffn_size + bias * (matrices - 1) * model.ffn_size),
        mlp_replicated=mlps * bias * h,
        expert=mlps * _mlp(model, model.expert_ffn_size, 1, model.expert_bias, model.routed_size),
        shared_experts=mlps
        * _mlp(model, model.shared_expert_ffn_size, model.num_shared_experts, model.linear_bias, model.hidden_size),
        router=mlps * ((h + model.router_bias) * model.num_experts + 2.0 * h * model.expert_hidden_size),
        mtp_sharded=2.0 * h * h if model.mtp_layers else 0.0,
        mtp_replicated=3.0 * norm if model.mtp_layers else 0.0,
        vision=model.vision.parameters if model.vision else 0.0,
    )


def indexer_parameters(model: ModelSpec) -> float:
    """One indexer of sparse attention, r_q a_i d_i + h d_i + 2 d_i + h a_i; 0 without."""
    heads, width, h = float(model.index_heads), float(model.index_head_dim), float(model.hidden_size)
    return model.q_lora_rank * heads * width + h * width + 2.0 * width + h * heads


def _mlp(model: ModelSpec, width: float, number: int, bias: bool, outer: int) -> float:
    """Parameters of ``number`` MLPs with the joint width ``width`` between vectors of ``outer``; 0 when there is none."""
    h, matrices = float(outer), model.num_mlp_matrices
    return matrices * h * width + bias * ((matrices - 1) * width + number * h)


def _linear_weights(hidden_size: int, m: LinearAttention) -> tuple[float, float]:
    """Weights of one linear-attention mixer: sharded by heads, and replicated.

    K, V widths of all keys and values, H value heads, w taps of the convolution, r the rank of low-rank gates.
    Mamba-2          h (2 V + 2 K + H) + (2 K + V) (w + 1) + 3 H + V + V h       z x B C dt; A, D, dt bias; gated norm; output
    gated delta net  h (2 K + 2 V + 2 H) + (2 K + V) w + 2 H + V h,  d           q k v z b a; A, dt bias; norm of a head; output
    Kimi             h (2 K + V + H) + (2 K + V) w + r (G + V) + H + G + V h,  2 h r + d        G = H d_k, the decay of each channel
    [mamba_ssm, mamba2.py; transformers, modeling_qwen3_next.py; fla, layers/kda.py]
    """
    h, v, heads = float(hidden_size), m.value_size, m.value_heads
    weights = h * m.input_size + m.conv_size * m.conv_kernel + v * h
    if m.kind == "mamba2":
        return weights + m.conv_size + 3.0 * heads + v, 0.0
    if m.kind == "gated_delta_net":
        return weights + 2.0 * heads, float(m.value_head_dim)
    low_rank = m.gate_rank * float(m.decay_size + v)
    return weights + low_rank + heads + m.decay_size, 2.0 * h * m.gate_rank + m.value_head_dim


def _attention_weights(model: ModelSpec) -> tuple[float, float, float]:
    """Per layer: sharded weights and biases, the key and value part of them, replicated down projections (MLA)."""
    h, q, k, v = float(model.hidden_size), model.query_size, model.key_size, model.value_size
    if model.is_mla:
        rank_q, rank_kv = model.q_lora_rank, model.kv_lora_rank
        nope, rope = model.qk_nope_head_dim, model.qk_rope_head_dim
        query = rank_q * q if rank_q else h * q
        down = (h + 1.0) * rank_q + h * (rank_kv + rope) + rank_kv  # the ones are the norms of the compressed states
        bias = model.linear_bias or model.qkv_bias
        down += bias * (rank_q + rank_kv + rope)
        up = rank_kv * model.num_heads * float(nope + model.v_head_dim)
        return query + up + model.attention_output_size * h + bias * (0 if rank_q else q), 0.0, down
    bias = model.linear_bias or model.qkv_bias
    key_value = (h + bias) * (k + v)
    return (h + bias) * (q + model.query_gate_size) + key_value + model.attention_output_size * h, key_value, 0.0


def total_parameters(model: ModelSpec, include_mtp: bool = False) -> float:
    """All parameters of the model, with the multi-token-prediction modules when asked: each repeats the last layer's kind.

    Of a hybrid it repeats as many mean layers as make a mixer and an MLP.

    N = embeddings + head + final norm + L attention + L_dense MLP + L_moe (E expert + shared + router)
    """
    counts = count_parameters(model)
    attention = counts.attention_sharded + counts.attention_replicated
    dense = attention + counts.mlp_sharded + counts.mlp_replicated
    sparse = attention + model.num_experts * counts.expert + counts.shared_experts + counts.router
    total = counts.input_embedding + counts.position_embedding + counts.head + counts.final_norm + counts.vision
    total += model.num_plain_layers * dense + model.num_moe_layers * sparse
    last = sparse if model.is_moe_layer(model.num_layers - 1) else dense
    return total + include_mtp * model.mtp_layers * (counts.mtp + model.layers_per_mtp * last)


def active_parameters(model: ModelSpec, input_embedding: bool = True) -> float:
    """Parameters that one token meets: of each MoE layer's E routed experts only K.

    N_active = N - L_moe (E - K) expert

    Publishers differ on the embedding. Mixtral and Qwen count both tables (the default here); OpenAI and DeepSeek V3
    leave out the input embedding, which is looked up and not multiplied: ``input_embedding=False``. A tied table is
    always counted, as it is multiplied in the head. Multi-token-prediction modules and image encoders are not counted.
    """
    counts = count_parameters(model)
    idle = model.num_moe_layers * (model.num_experts - model.top_k) * counts.expert
    looked_up = 0.0 if input_embedding or model.tied_embeddings else counts.input_embedding
    return total_parameters(model) - idle - looked_up - counts.vision
