"""What practice on pre-training showed before draw 39: None over recipes, recompute of MLPerf, states of nanotron, LitGPT."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError

NEMO = """
import nemo_run as run
from nemo.collections import llm
from nemo.collections.llm.recipes.precision.mixed_precision import bf16_with_fp8_mixed
recipe = llm.llama3_70b.pretrain_recipe(dir="/c", name="n", num_nodes=1, num_gpus_per_node=8)
recipe.trainer.strategy.tensor_model_parallel_size = 2
recipe.trainer.strategy.pipeline_model_parallel_size = 4
recipe.trainer.strategy.context_parallel_size = 1
recipe.data.global_batch_size = 16
"""


def test_none_takes_back_what_a_recipe_of_nemo_says(tmp_path: Path) -> None:
    line = "recipe.trainer.strategy.virtual_pipeline_model_parallel_size = None\n"
    assert read(written(tmp_path, NEMO, "a.py")).fields["vpp"] == 5
    assert read(written(tmp_path, NEMO + line, "b.py")).fields.get("vpp", 1) == 1
    under = f"import sys\n{NEMO}if len(sys.argv) > 1:\n    {line}"
    assert read(written(tmp_path, under, "c.py")).fields["vpp"] == 5  # only a condition says so


def test_a_word_of_the_precision_plugin_does_not_take_back_its_recipe(tmp_path: Path) -> None:
    eight = "recipe.trainer.plugins = bf16_with_fp8_mixed()\n"
    both = f"{eight}recipe.trainer.plugins.grad_reduce_in_fp32 = False\n"
    assert read(written(tmp_path, NEMO + eight, "a.py")).precision == "fp8"
    found = read(written(tmp_path, NEMO + both, "b.py"))
    trainer = "nemo+gradient_dtype=bf16+loss_fusion=native+fp8_param_gather=on+tp_overlap=off"
    assert (found.precision, found.trainer) == ("fp8", trainer)


MLPERF = """
export DGXNNODES=2
export DGXNGPU=8
export TP=1
export PP=1
export CP=2
export MBS=1
export MINIBS=1
export FP8=True
export FP8_PARAMS=True
"""


def test_recompute_of_mlperf_under_the_short_names_of_its_nemo_1(tmp_path: Path) -> None:
    path = "llama2_70b_lora/config_MI300X_2x8x1.sh"
    assert read(written(tmp_path, MLPERF, path)).fields["recompute"] == Recompute.NONE
    found = read(written(tmp_path, f"{MLPERF}export ACG=full && export ACM=block && export ACL=21\n", path))
    assert (found.fields["recompute"], found.fields["recompute_layers"]) == (Recompute.FULL, 21)


NANOTRON = """
parallelism: {dp: 4, tp: 1, pp: 2, pp_engine: 1f1b}
model:
  dtype: bfloat16
  model_config: {is_llama_config: true, hidden_size: 1024, num_hidden_layers: 8, num_attention_heads: 16, intermediate_size: 2816,
    vocab_size: 32000, rope_theta: 10000.0, _attn_implementation: flash_attention_2, z_loss_enabled: false}
optimizer: {zero_stage: 0, accumulate_grad_in_fp32: true, optimizer_factory: {name: adamW}}
tokens: {sequence_length: 1024, micro_batch_size: 4, batch_accumulation_per_replica: 16}
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("name: adamW", "name: lion", "optimizer_factory.name is 'lion'"),
        ("dtype: bfloat16", "dtype: float8", "model.dtype is 'float8'"),
    ],
)
def test_states_of_nanotron_that_no_plan_has_are_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(PlannerError, match=says):
        read(written(tmp_path, NANOTRON.replace(old, new), "a.yaml"))
    half = NANOTRON.replace("bfloat16", "float16").replace("in_fp32: true", "in_fp32: false")
    with pytest.raises(PlannerError, match="accumulate_grad_in_fp32 is false"):
        read(written(tmp_path, half, "a.yaml"))
    full = NANOTRON.replace("bfloat16", "float32").replace("in_fp32: true", "in_fp32: false")
    assert read(written(tmp_path, full, "a.yaml")).precision == "fp32"


def test_layers_of_a_fork_of_nanotron_are_asked_with_the_model(tmp_path: Path) -> None:
    assert asked_for(read(written(tmp_path, NANOTRON, "a.yaml"))) == []
    own = NANOTRON.replace("z_loss_enabled: false", "memory_segment_length: 256")
    found = read(written(tmp_path, own, "a.yaml"))
    assert asked_for(found) == ["--model NAME"] and "memory_segment_length" in found.questions[0].about


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc_per_node=8 run_train.py --config-file configs/a.yaml",
        "srun torchrun --nproc_per_node 8 \\\n  $HOME/job/run_train_own.py \\\n  --config-file $HOME/job/configs/a.yaml",
        "CONFIG=configs/a.yaml\ntorchrun --nproc_per_node=8 ./run_train.py --config-file ${CONFIG}",
    ],
)
def test_a_script_that_starts_nanotron_is_its_file(tmp_path: Path, command: str) -> None:
    written(tmp_path, NANOTRON, "configs/a.yaml")
    found = read(written(tmp_path, f"#!/bin/bash\n{command}\n", "slurm/train.sh"))
    assert (found.trainer, found.num_gpus, found.fields["pp"], found.global_batch_size) == ("nanotron", 8, 2, 256)


def test_a_script_that_starts_nanotron_on_other_gpus_is_refused(tmp_path: Path) -> None:
    written(tmp_path, NANOTRON, "a.yaml")
    script = written(tmp_path, "torchrun --nproc_per_node=4 run_train.py --config-file a.yaml\n", "train.sh")
    with pytest.raises(PlannerError, match="= 8 GPUs, but its command starts 4"):
        read(script)


LITGPT = """
model_name: Llama-3.1-8B
precision:
train: {global_batch_size: 512, micro_batch_size: 1, max_seq_length: 4096, tie_embeddings: %s}
optimizer: AdamW
devices: 8
"""


def test_litgpt_without_a_precision_trains_over_fp32_masters(tmp_path: Path) -> None:
    found = read(written(tmp_path, LITGPT % "false", "a.yaml"))
    assert found.precision == "bf16" and found.model is not None and not found.model.tied_embeddings
    tied = read(written(tmp_path, LITGPT % "true", "a.yaml"))
    assert tied.model is not None and tied.model.tied_embeddings


def test_words_that_litgpt_does_not_have_are_asked_about(tmp_path: Path) -> None:
    file = written(tmp_path, f"{LITGPT % 'false'}oft_block_size: 256\n", "a.yaml")
    assert asked_for(read(file)) == ["oft_block_size"]
    assert asked_for(read(file, None, Given(settings={"oft_block_size": "false"}))) == []
    own = "model_config: {name: own, n_layer: 4, n_embd: 512, n_loops: 2}\n"
    sizes = read(written(tmp_path, f"{LITGPT % 'false'}{own}", "a.yaml"))
    assert sizes.model is None and "model_config" in (sizes.model_name or "")


def test_commands_of_litgpt(tmp_path: Path) -> None:
    written(tmp_path, LITGPT % "false", "a.yaml")
    script = "litgpt pretrain --config a.yaml --train.micro_batch_size 2\n"
    found = read(written(tmp_path, script, "pre.sh"))
    assert (found.num_gpus, found.fields["micro_batch_size"], found.fields["num_microbatches"]) == (8, 2, 32)
    script = "litgpt finetune_lora Qwen/Qwen3-8B --devices 1 --train.max_seq_length 2048 --lora_r 32 --precision bf16-true\n"
    found = read(written(tmp_path, f': "${{KEY:?not set}}"\n{script}', "lora.sh"))
    assert (found.lora_rank, found.sequence_length, found.precision, found.global_batch_size) == (32, 2048, "bf16_true", 16)
    with pytest.raises(PlannerError, match="litgpt pretrain_own is not modelled"):
        read(written(tmp_path, "litgpt pretrain_own --config a.yaml\n", "own.sh"))


def test_words_for_experts_of_deepspeed_say_nothing_of_dense_layers(tmp_path: Path) -> None:
    words = "--moe-train-capacity-factor 1.0 --moe-min-capacity 4 --disable-moe-token-dropping --moe-loss-coeff 0.01"
    script = (
        "deepspeed --num_gpus 8 pretrain_gpt.py --tensor-model-parallel-size 2 --num-layers 22 --hidden-size 2048 "
        "--num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 4 --global-batch-size 128 "
        f"--vocab-size 64000 --bf16 --deepspeed --zero-stage 1 --num-experts 1 {words}\n"
    )
    found = read(written(tmp_path, script, "a.sh"))
    assert asked_for(found) == [] and not [one for one in found.unread if "moe" in one]


@pytest.mark.parametrize(("words", "unfused"), [("", True), ("--use-flash-attn-v2", False), ("--use-flash-attn-triton", False)])
def test_megatron_deepspeed_over_zero_2_has_scores_in_memory(tmp_path: Path, words: str, unfused: bool) -> None:
    script = (
        "deepspeed --num_gpus 8 pretrain_gpt.py --num-layers 22 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
        "--max-position-embeddings 2048 --micro-batch-size 4 --global-batch-size 128 --vocab-size 64000 --bf16 --deepspeed "
        f"--zero-stage 2 --no-pipeline-parallel {words}\n"
    )
    assert ("attention_kernel=unfused" in read(written(tmp_path, script, "a.sh")).trainer) is unfused


MINDSPEED = """
torchrun --nproc_per_node 8 --nnodes 2 posttrain_gpt.py --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 \\
  --expert-model-parallel-size 8 --num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 \\
  --seq-length 4096 --max-position-embeddings 163840 --micro-batch-size 1 --global-batch-size 64 --bf16 \\
  --padded-vocab-size 102400 \\
  --multi-head-latent-attention --qk-rope-head-dim 64 --qk-nope-head-dim 128 --kv-lora-rank 512 --v-head-dim 128 --swiglu \\
  --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights \\
  --num-experts 64 --moe-router-topk 6 --moe-intermediate-size 1408 --first-k-dense-replace 1 --n-shared-experts 2 \\
  --use-distributed-optimizer --use-flash-attn --topk-group 1 --routed-scaling-factor 1.0 --seq-aux --moe-permutation-async-comm \\
"""


def test_words_of_mindspeed_for_latent_attention_and_data(tmp_path: Path) -> None:
    words = "--stage sft --is-instruction-dataset --prompt-type deepseek2 --padded-samples"
    found = read(written(tmp_path, f"{MINDSPEED}  {words}\n", "a.sh"))
    assert asked_for(found) == [] and found.model is not None
    sizes = (found.model.kv_lora_rank, found.model.qk_nope_head_dim, found.model.qk_rope_head_dim, found.model.num_dense_layers)
    assert (found.model.name, sizes) == ("deepseek-v2-lite", (512, 128, 64, 1))


def test_a_stage_of_mindspeed_that_is_another_step_is_refused(tmp_path: Path) -> None:
    words = "--stage dpo --dpo-loss-type sigmoid --is-pairwise-dataset"
    with pytest.raises(PlannerError, match="--stage dpo trains with DPO"):
        read(written(tmp_path, f"{MINDSPEED}  {words}\n", "a.sh"))


def test_an_assignment_that_leads_to_another_does_not_fail(tmp_path: Path) -> None:
    script = "export LAYERS=4 && HIDDEN=512 && HEADS=8\n" + (
        "torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers $LAYERS --hidden-size $HIDDEN --num-attention-heads $HEADS "
        "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 8 --vocab-size 32000 --bf16\n"
    )
    found = read(written(tmp_path, script, "a.sh"))
    assert found.model is not None and (found.model.num_layers, found.model.hidden_size, found.model.num_heads) == (4, 512, 8)


@pytest.mark.parametrize("word", ["pp_layer_partition: [3, 4]", "moe_layer_recompute: true"])
def test_words_of_a_fork_of_nanotron_for_stages_and_recompute_are_refused(tmp_path: Path, word: str) -> None:
    own, name = NANOTRON.replace("pp_engine: 1f1b", f"pp_engine: 1f1b, {word}"), word.partition(":")[0]
    with pytest.raises(PlannerError, match=f"parallelism.{name} .*--set parallelism.{name}=null"):
        read(written(tmp_path, own, "a.yaml"))
    off = NANOTRON.replace("pp_engine: 1f1b", f"pp_engine: 1f1b, {name}: false")
    assert read(written(tmp_path, off, "a.yaml")).fields["pp"] == 2


BRIDGE = """
from megatron.bridge.recipes.qwen import %s
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.pretrain import pretrain

def main() -> None:
    config: ConfigContainer = %s()
    config.train.global_batch_size = 32
    pretrain(config=config, forward_step_func=forward_step)
"""


def test_a_recipe_in_an_annotated_assignment_and_under_another_name(tmp_path: Path) -> None:
    plain = BRIDGE % ("qwen3_8b_pretrain_config", "qwen3_8b_pretrain_config")
    other = BRIDGE % ("qwen3_8b_pretrain_config as pretrain_config", "pretrain_config")
    for text in (plain, other):
        found = read(written(tmp_path, text, "a.py"), None, Given(num_gpus=16))
        assert (found.model and found.model.name, found.global_batch_size) == ("qwen3-8b", 32)


def test_a_recipe_that_nobody_knows_is_one_question(tmp_path: Path) -> None:
    file = written(tmp_path, BRIDGE % ("qwen3_9b_pretrain_config as pretrain_config", "pretrain_config"), "a.py")
    with pytest.raises(PlannerError, match=r"--set recipe=.*'qwen3_9b_pretrain_config' is not among.*--gpus N"):
        read(file)
    found = read(file, None, Given(num_gpus=16, settings={"recipe": "qwen3_8b_pretrain_config"}))
    assert (found.model and found.model.name, found.global_batch_size) == ("qwen3-8b", 32)


def test_nanotron_with_norms_of_queries_and_keys_is_qwen_3(tmp_path: Path) -> None:
    sizes = "is_llama_config: true, hidden_size: 1024, num_hidden_layers: 8, num_attention_heads: 16, intermediate_size: 2816"
    qwen = "is_qwen2_config: true, _use_qk_norm: true, hidden_size: 5120, num_hidden_layers: 40, num_attention_heads: 40"
    own = f"{qwen}, head_dim: 128, num_key_value_heads: 8, intermediate_size: 17408, max_position_embeddings: 40960"
    text = NANOTRON.replace(sizes, f"{own}, rms_norm_eps: 1.0e-06").replace("10000.0", "1000000.0").replace("32000", "151936")
    found = read(written(tmp_path, text, "a.yaml"))
    assert found.model is not None and found.model.name == "qwen3-14b" and asked_for(found) == []


TITAN = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
%s
[training]
local_batch_size = 2
seq_len = 2048
[parallelism]
data_parallel_shard_degree = 8
[activation_checkpoint]
mode = "full"
"""


@pytest.mark.parametrize("word", ["swap_optimizer", "early_step_in_backward"])
def test_switches_of_torchtitans_optimizer_that_decide_memory_are_refused(tmp_path: Path, word: str) -> None:
    file = written(tmp_path, TITAN % f"{word} = true\nswap_optimizer_times = 16", "a.toml")
    with pytest.raises(PlannerError, match=f"optimizer.{word} decides memory.*--set optimizer.{word}=false"):
        read(file)
    assert read(file, None, Given(settings={f"optimizer.{word}": "false"})).num_gpus == 8


def test_gradients_that_wait_for_the_backward_pass(tmp_path: Path) -> None:
    late = BRIDGE % ("qwen3_8b_pretrain_config", "qwen3_8b_pretrain_config")
    for value, off in (("False", True), ("True", False)):
        text = late.replace("config.train.global_batch_size = 32", f"config.ddp.overlap_grad_reduce = {value}")
        found = read(written(tmp_path, text, "a.py"), None, Given(num_gpus=16))
        assert ("gradient_overlap=off" in found.trainer) is off


def _bridge(tmp_path: Path, line: str) -> Reading:
    late = BRIDGE % ("qwen3_8b_pretrain_config", "qwen3_8b_pretrain_config")
    text = late.replace("config.train.global_batch_size = 32", f"config.{line}")
    return read(written(tmp_path, text, "a.py"), None, Given(num_gpus=16))


@pytest.mark.parametrize(("line", "word"), [
    ("model.cross_entropy_loss_fusion = False", "loss_fusion=off"), ("model.attention_dropout = 0.1", "dropout=on"),
    ("model.attention_backend = AttnBackend.unfused", "attention_kernel=unfused"),
])  # fmt: skip
def test_words_of_a_program_of_megatron_bridge_that_decide_time(tmp_path: Path, line: str, word: str) -> None:
    assert word in _bridge(tmp_path, line).trainer
    for usual in ("cross_entropy_loss_fusion = True", "hidden_dropout = 0.0", "attention_backend = AttnBackend.flash"):
        assert word not in _bridge(tmp_path, f"model.{usual}").trainer


def test_layers_and_states_of_a_program_of_megatron_bridge(tmp_path: Path) -> None:
    further = _bridge(tmp_path, "model.mtp_num_layers = 1").model
    assert further is not None and further.mtp_layers == 1
    assert asked_for(_bridge(tmp_path, "model.window_size = (128, 0)")) == ["--model NAME"]
    aware = "optimizer.use_precision_aware_optimizer = True\n    config.optimizer."
    assert asked_for(_bridge(tmp_path, f"{aware}main_params_dtype = torch.float16")) == ["optimizer.main_params_dtype"]
    for line, why in (
        ("dist.use_torch_fsdp2 = True", "--set dist.use_torch_fsdp2=false"),
        (f"{aware}exp_avg_sq_dtype = torch.bfloat16", "moments in fp32 and bf16"),
    ):
        with pytest.raises(PlannerError, match=why):
            _bridge(tmp_path, line)


RL = """
policy:
  {model_name: Qwen/Qwen3-8B, train_global_batch_size: 64, train_micro_batch_size: 1, max_total_sequence_length: 4096, %s}
sft: {max_num_steps: 10}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""


def test_nemo_rl_turns_no_overlap_of_tensor_parallel_layers_on(tmp_path: Path) -> None:
    text = RL % "megatron_cfg: {enabled: true, tensor_model_parallel_size: 4, sequence_parallel: true}"
    assert "tp_overlap=off" in read(written(tmp_path, text, "sft.yaml")).trainer


def test_a_precision_that_deepspeed_turns_off_is_asked(tmp_path: Path) -> None:
    script = (
        "cat <<EOT > ds.json\n{\"zero_optimization\": {\"stage\": 1}, \"bf16\": {\"enabled\": false}}\nEOT\n"
        "deepspeed --num_gpus 8 pretrain_gpt.py --num-layers 22 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
        "--max-position-embeddings 2048 --micro-batch-size 4 --global-batch-size 128 --vocab-size 64000 --bf16 --deepspeed "
        "--deepspeed_config ds.json\n"
    )
    file = written(tmp_path, script, "a.sh")
    with pytest.raises(OpenQuestionsError, match="--set bf16=true"):
        read(file)
    for value, precision in (("true", "bf16"), ("false", "fp32")):
        found = read(file, None, Given(settings={"bf16": value}))
        assert (asked_for(found), found.precision) == ([], precision)


@pytest.mark.parametrize(("spec", "asked"), [
    ("gpt_layer_specs get_gpt_layer_local_spec", False), ("gpt_layer_specs get_gpt_layer_ring_spec", True),
    ("olmo_layer_specs olmo_layer_spec", True),
])  # fmt: skip
def test_layers_of_a_forks_own_spec_are_asked(tmp_path: Path, spec: str, asked: bool) -> None:
    script = (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 2048 "
        "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 128 --bf16 --vocab-size 50304 "
        f"--tensor-model-parallel-size 1 --spec megatron.core.models.gpt.{spec} --moe-token-drop-policy probs\n"
    )
    file = written(tmp_path, script, "a.sh")
    if asked:
        with pytest.raises(OpenQuestionsError, match="--model NAME .--spec is an architecture"):
            read(file)
    assert asked_for(read(file, None, Given(model="pythia-410m" if asked else None))) == []


@pytest.mark.parametrize(("line", "name"), [
    ("fsdp = 'megatron'", "strategy.fsdp"), ("ddp.use_custom_fsdp = True", "ddp.use_custom_fsdp"),
])  # fmt: skip
def test_weights_that_a_strategy_of_nemo_hands_to_an_fsdp_are_refused(tmp_path: Path, line: str, name: str) -> None:
    script = (
        "import nemo_run as run\nfrom nemo.collections import llm\n"
        "recipe = llm.llama3_8b.pretrain_recipe(name='x', num_nodes=2, num_gpus_per_node=8)\n"
        f"recipe.trainer.strategy.{line}\nrun.run(recipe, executor=run.LocalExecutor(ntasks_per_node=8))\n"
    )
    file = written(tmp_path, script, "a.py")
    with pytest.raises(PlannerError, match=f"--set {name}=false"):
        read(file)
    assert read(file, None, Given(settings={name: "false"})).num_gpus == 16


def test_a_section_of_adapters_that_torchtitan_does_not_have_is_refused(tmp_path: Path) -> None:
    text = TITAN % ""
    with pytest.raises(PlannerError, match="lora decides memory.*--set lora=false"):
        read(written(tmp_path, f"{text}[lora]\nrank = 8\n", "a.toml"))
    assert read(written(tmp_path, f"{text}[lora]\nenable = false\n[notes]\nrank = 8\n", "b.toml")).num_gpus == 8


@pytest.mark.parametrize(("section", "micro"), [
    ("dynamic_batching: {enabled: true, train_mb_tokens: 16384}", 4),
    ("sequence_packing: {enabled: true, train_mb_tokens: 12288}", 2),
    ("sequence_packing: {enabled: false, train_mb_tokens: 16384}", 1),
    ("dynamic_batching: {enabled: true, train_mb_tokens: '${mul:a,b}'}", 1),
])
def test_micro_batches_that_nemo_rl_fills_by_tokens(tmp_path: Path, section: str, micro: int) -> None:
    text = RL % f"dtensor_cfg: {{enabled: true, tensor_parallel_size: 2}}, {section}"
    found = read(written(tmp_path, text, "sft.yaml"))
    assert (found.fields["micro_batch_size"], found.fields["num_microbatches"]) == (micro, 16 // micro)
