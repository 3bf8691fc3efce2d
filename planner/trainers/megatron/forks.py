"""Arguments of forks of Megatron-LM (MindSpeed-LLM, MegaBlocks, BigCode's, Megatron-DeepSpeed): what they mean in Megatron's own
words, and which of them decide memory or degrees and cannot be said in a plan."""

import re

from planner.errors import PlannerError, shown
from planner.trainers.megatron.arguments import Arguments, known_arguments
from planner.trainers.reading.fine_tuning import adapter_targets
from planner.trainers.reading.shell import is_open

RENAMED = {
    "moe_intermediate_size": "moe_ffn_hidden_size", "moe_num_experts": "num_experts", "moe_top_k": "moe_router_topk",
}  # fmt: skip
CP_ALGORITHMS = {"ulysses_cp_algo": "a2a", "megatron_cp_algo": "p2p", "kvallgather_cp_algo": "all_gather"}
"""--context-parallel-algo of MindSpeed -> Megatron's communication."""
NOT_PRICED = (
    "swap_optimizer", "swap_attention", "reuse_fp32_param", "num_layer_list", "noop_layers", "recompute_activation_function",
    "recompute_norm", "recompute_in_advance", "tp_2d", "moe_zero_memory", "moe_tp_extend_ep", "schedules_method", "kd",
    "num_layers_teacher", "mos", "peft_type", "moe_expert_model_parallelism", "moe_data_distributed",
    "expert_interval", "full_attention_interval", "num_zero_experts", "enable_dsa_indexer", "enable_mhc", "kv_compress",
    "use_ascend_mc2",
)  # fmt: skip
DECIDES = re.compile(
    r".*(offload|swap_|qlora|recompute|checkpoint_acti|parallel_size|parallelism|shard|zero_stage|freeze|frozen|teacher|"
    r"quantiz|_nf4|galore|num_experts|noop|layer_list).*"
)
"""Names of arguments that no list of this reader has, and that decide memory or degrees by their words."""
HARMLESS = re.compile(
    r".*(algo|save|(?<!off)load|print|log|path|dir|fusion|filter|export|debug|target_|alpha|dropout|rl_|rollout|sglang|vllm|"
    r"num_shards|per_tok).*"
)


def translate(found: Arguments) -> None:
    """Says arguments of forks in Megatron's words. Raises PlannerError for those that decide memory or degrees and have none."""
    if found.dumped:
        return
    for name, usual in RENAMED.items():
        if name in found:
            found.setdefault(usual, found.pop(name))
    _experts(found)
    algorithm = found.pop("context_parallel_algo", None)
    if algorithm is not None and found.number("context_parallel_size", 1) > 1:
        if str(algorithm) not in CP_ALGORITHMS:
            known = ", ".join(CP_ALGORITHMS)
            raise PlannerError(f"{found.where}: context_parallel_algo is {shown(algorithm)}; a plan knows {known}")
        found["cp_comm_type"] = [CP_ALGORITHMS[str(algorithm)]]
    if found.get("attention_head_type") == "multiquery":
        found |= {"group_query_attention": True, "num_query_groups": "1"}
    refuse(found)


def _experts(found: Arguments) -> None:
    """Leading dense layers and shared experts as MindSpeed-LLM counts them."""
    dense = found.pop("first_k_dense_replace", None)
    if dense is not None and found.get("num_experts") and not is_open(str(found.get("num_layers"))):
        first, layers = max(int(dense), 0) if re.fullmatch(r"-?\d{1,6}", str(dense)) else -1, found.number("num_layers")
        if first < 0 or str(found.get("moe_layer_freq", "1")) not in ("1", "-1") or first > layers:
            raise PlannerError(f"{found.where}: first_k_dense_replace is {shown(dense)}; a whole number of layers is understood")
        found["moe_layer_freq"] = f"([0]*{first}+[1]*{layers - first})" if 0 < first < layers else "1"
    if str(found.get("moe_layer_freq")) == "-1":
        found["moe_layer_freq"] = "1"
    shared = found.pop("n_shared_experts", None)
    if shared is not None and "moe_shared_expert_intermediate_size" not in found and found.get("num_experts"):
        width = found.number("moe_ffn_hidden_size") or found.number("ffn_hidden_size")
        found["n_shared_experts"] = shared
        found["moe_shared_expert_intermediate_size"] = str(found.number("n_shared_experts") * width)
        del found["n_shared_experts"]


def refuse(found: Arguments) -> None:
    """Raises PlannerError for what decides memory or degrees and is not priced, with the words that import the job without it."""
    held, quiet, counted = known_arguments()
    wrong = [
        name for name, value in found.items()
        if not (held.fullmatch(name) or quiet.fullmatch(name) or name in counted or value in (False, None, "0", "False", "false"))
        and (name in NOT_PRICED or (DECIDES.fullmatch(name) and not HARMLESS.fullmatch(name)))
    ]  # fmt: skip
    if wrong:
        names, sets = ", ".join(map(found.spelled, wrong)), " ".join(f"--set {name}=false" for name in wrong)
        decide = "decides memory or degrees and is" if len(wrong) == 1 else "decide memory or degrees and are"
        raise PlannerError(f"{found.where}: {names} {decide} not priced; {sets} imports the job without")


def adapters(found: Arguments) -> tuple[int, str]:
    """(rank, which linear layers) of LoRA as MindSpeed-LLM says it; rank 0 = none."""
    targets = found.get("lora_target_modules", [])
    return found.number("lora_r"), adapter_targets(targets if isinstance(targets, list) else [str(targets)])
