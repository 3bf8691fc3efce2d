"""Arguments of forks of Megatron-LM, of batch systems and of launchers: what they mean in a plan's words."""

from pathlib import Path
from typing import Any

import pytest

from planner.errors import PlannerError
from planner.layout import CpMethod, Module, Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given, OpenQuestionsError

SIZES = "--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 1 --bf16 "
SIZES += "--global-batch-size 64 --vocab-size 32000 --swiglu "


def script(tmp_path: Path, arguments: str, before: str = "torchrun --nproc_per_node 16", **given: Any) -> Reading:
    file = tmp_path / "train.sh"
    file.write_text(f"{before} pretrain_gpt.py {SIZES} {arguments}\n")
    return read(file, None, Given(**given))


def fields(found: Reading, *names: str) -> list[Any]:
    return [found.fields.get(name, 0) for name in names]


def test_layers_of_mindspeed_stages_are_counted_without_empty_ones(tmp_path: Path) -> None:
    found = script(tmp_path, "--pipeline-model-parallel-size 4 --noop-layers 15 --num-layers-per-virtual-pipeline-stage 2")
    assert found.model.num_layers == 15 and fields(found, "vpp", "first_stage_layers", "last_stage_layers") == [2, 4, 3]
    both = script(tmp_path, "--pipeline-model-parallel-size 4 --noop-layers 0,15")
    assert both.model.num_layers == 14 and fields(both, "vpp", "first_stage_layers", "last_stage_layers") == [1, 3, 3]
    listed = script(tmp_path, "--pipeline-model-parallel-size 4 --num-layer-list 3,4,4,5")
    assert fields(listed, "first_stage_layers", "last_stage_layers") == [3, 5]
    assert to_plan(listed, {"hardware": "h100-sxm"}).layout.last_stage_layers == 5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--noop-layers 16", "noop_layers is '16', which does not fit 16 layers on 4 stages"),
        ("--noop-layers last", "noop_layers is 'last'; whole numbers with commas are understood"),
        ("--noop-layers 0 --first-k-dense-replace 1", "noop_layers is '0', which does not fit"),
        ("--num-layer-list 4,4,4", "num_layer_list '4,4,4' is not 16 layers on 4 stages"),
        ("--num-layer-list 4,5,4,3", r"--num-layer-list gives the stages \[4, 5, 4, 3\] layers"),
        ("--reuse-fp32-param", r"--reuse-fp32-param decides memory .*--set reuse_fp32_param=false imports the job without"),
        ("--recompute-norm --recompute-granularity full", "--recompute-norm decides memory"),
        ("--mask-only --N 2 --M 4", "--mask-only decides memory"),
    ],
)
def test_what_mindspeed_says_and_a_plan_cannot_is_one_sentence(arguments: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match=says):
        script(tmp_path, f"--pipeline-model-parallel-size 4 {arguments}")


def test_memory_of_mindspeed_is_said_in_a_plans_words(tmp_path: Path) -> None:
    swapped = script(tmp_path, "--use-distributed-optimizer --swap-optimizer --reuse-fp32-param")
    assert fields(swapped, "zero", "offload_optimizer") == [1, 100] and swapped.unread == ()
    assert any("saves 2 / dp bytes per parameter" in note for note in swapped.notes)
    again = script(tmp_path, "--recompute-activation-function --recompute-norm")
    assert fields(again, "recompute", "recompute_modules") == [int(Recompute.SELECTIVE), int(Module.MLP_ACTIVATION | Module.NORM)]


def test_words_of_megatron_llama_and_of_yuan(tmp_path: Path) -> None:
    llama = script(tmp_path, "--overlapped-distributed-optimizer --causal-lm --RMSNorm")
    assert fields(llama, "zero") == [1] and not llama.model.tied_embeddings and llama.model.norm == "rmsnorm"
    assert "gradient_overlap=off" not in llama.trainer and llama.unread == ()
    stages = "--pipeline-model-parallel-size 4 --pipeline-model-parallel-method block --pipeline-model-parallel-blocks "
    assert fields(script(tmp_path, f"{stages} 3,4,4,5"), "first_stage_layers", "last_stage_layers") == [3, 5]
    with pytest.raises(PlannerError, match=r"--pipeline-model-parallel-blocks gives the stages \[4, 5, 4, 3\]"):
        script(tmp_path, f"{stages} 4,5,4,3")
    with pytest.raises(PlannerError, match="--use-lf-gate is an architecture that its sizes do not tell"):
        script(tmp_path, "--use-lf-gate")


def test_gpus_that_the_degrees_do_not_divide_are_asked_with_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    sizes = SIZES.replace("--vocab-size 32000", "--pipeline-model-parallel-size 16")
    file.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {sizes} --tokenizer-type Own\n")
    asked = r"vocab_size=.*; --gpus N \(8 by the file, which tp x pp x cp = 16 does not divide\)"
    with pytest.raises(OpenQuestionsError, match=asked):
        read(file, None, Given())


def test_trainings_under_a_condition_are_asked_for(tmp_path: Path) -> None:
    launch = "torchrun --nproc_per_node 8 pretrain_gpt.py"
    file = tmp_path / "train.sh"
    file.write_text(
        f'FP_TYPE=$1\nARGS="{SIZES}"\nif [ "$FP_TYPE" = "bf16" ]; then\n{launch} $ARGS\nelif [ "$FP_TYPE" = "te" ]; then\n'
        f'{launch} $ARGS --fp8-hybrid --transformer-impl transformer_engine\nelif [ "$FP_TYPE" = "msamp" ]; then\n'
        f"{launch} $ARGS --fp8-hybrid --transformer-impl transformer_engine --msamp\nelse\nexit 1\nfi\n"
    )
    with pytest.raises(OpenQuestionsError, match=r"--set FP_TYPE=bf16\|te\|msamp"):
        read(file, None, Given())
    assert [read(file, None, Given(settings={"FP_TYPE": one})).precision for one in ("bf16", "te")] == ["bf16", "fp8"]
    with pytest.raises(PlannerError, match="--msamp changes what states take on a GPU, which is not priced"):
        read(file, None, Given(settings={"FP_TYPE": "msamp"}))


def test_ranks_of_mpirun_and_a_fused_optimizer(tmp_path: Path) -> None:
    words = "--optimizer fusedadamw --tensor-model-parallel-size 2"
    found = script(tmp_path, words, before="mpirun --allow-run-as-root -n 8 python")
    assert (found.num_gpus, found.optimizer) == (8, "adam")


def test_experts_of_forks_are_dealt_to_ranks(tmp_path: Path) -> None:
    moe = "--num-experts 64 --moe-router-topk 2 --moe-ffn-hidden-size 512 --disable-bias-linear"
    whole = script(tmp_path, f"{moe} --tensor-model-parallel-size 4 --expert-model-parallel-size 4 --moe-tp-extend-ep")
    assert fields(whole, "tp", "ep", "etp") == [4, 16, 1]
    blocks = script(tmp_path, f"{moe} --moe-expert-model-parallelism --DDP-impl local")
    assert fields(blocks, "ep", "etp") == [16, 1] and blocks.trainer.startswith("megatron+")
    few = script(tmp_path, f"{moe.replace('64', '8')} --moe-expert-model-parallelism")
    assert fields(few, "ep", "etp") == [8, 2]
    with pytest.raises(PlannerError, match=r"say --gpus N \(how many GPUs run it\)$"):
        script(tmp_path, f"{moe} --moe-expert-model-parallelism", before="python")


def test_megatron_deepspeed_without_its_pipeline_is_deepspeed(tmp_path: Path) -> None:
    words = "--deepspeed --deepspeed_config ds.json --no-pipeline-parallel"
    ulysses = script(tmp_path, f"{words} --ds-sequence-parallel-size 4 --zero-stage 1")
    assert ulysses.trainer.startswith("deepspeed") and fields(ulysses, "cp", "zero") == [4, 1]
    assert fields(ulysses, "cp_method") == [int(CpMethod.A2A)]
    stage = script(tmp_path, f"{words} --zero-stage 3 --cpu-optimizer")
    assert stage.trainer.startswith("deepspeed") and fields(stage, "zero", "offload_optimizer") == [3, 100]
    assert to_plan(stage, {"hardware": "a100-sxm-80gb"}).layout.zero == 3
    assert script(tmp_path, f"{words} --zero-stage 1").trainer.startswith("megatron-deepspeed")


@pytest.mark.parametrize(
    ("head", "gpus"),
    [
        ("#PBS -l select=4:ncpus=64:ngpus=8", 32),
        ("#PBS -l nodes=2:gpus=4:ppn=1,walltime=01:00:00", 8),
        ("#PBS -l select=4:system=polaris", None),
        ("#SBATCH --nodes=4\n#SBATCH --gres=gpu:a100:8", 32),
    ],
)
def test_gpus_of_batch_systems(head: str, gpus: int | None, tmp_path: Path) -> None:
    found = script(tmp_path, "", before=f"#!/bin/bash\n{head}\nmpiexec --envall python")
    assert found.num_gpus == gpus


NANOTRON = """
parallelism: {{dp: 2, tp: 2, pp: 1, tp_mode: REDUCE_SCATTER, expert_parallel_size: {ranks}}}
tokens: {{sequence_length: 2048, micro_batch_size: 2, batch_accumulation_per_replica: 4}}
optimizer: {{zero_stage: 0}}
model:
  dtype: bfloat16
  model_config: {{{kind}: true, hidden_size: 512, intermediate_size: 2048, num_hidden_layers: 8, num_attention_heads: 8,
    num_key_value_heads: 8, vocab_size: 32000, max_position_embeddings: 2048, hidden_act: silu, rms_norm_eps: 1.0e-6,
    tie_word_embeddings: false, {more}}}
"""


def test_experts_of_nanotron_are_read_and_mamba_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"

    def nanotron(kind: str, more: str, ranks: int = 1) -> Reading:
        file.write_text(NANOTRON.format(kind=kind, more=more, ranks=ranks))
        return read(file, None, Given())

    llamoe = nanotron("is_llamoe_config", "moe_num_experts: 4, num_experts_per_tok: 1").model
    assert llamoe is not None and (llamoe.num_experts, llamoe.top_k, llamoe.expert_ffn_size) == (4, 1, 2048)
    shared = "moe_config: {num_experts: 8, top_k: 2, moe_intermediate_size: 256, enable_shared_expert: true}"
    found = nanotron("is_qwen2_config", shared)
    assert found.model is not None and not found.model.qkv_bias
    assert (found.model.num_experts, found.model.expert_ffn_size, found.model.shared_expert_ffn_size) == (8, 256, 5632)
    assert to_plan(found, {"hardware": "h100-sxm"}).layout.dp == 2
    with pytest.raises(PlannerError, match=r"parallelism.expert_parallel_size is 2, whose ranks compute the same tokens"):
        nanotron("is_qwen2_config", shared, 2)
    with pytest.raises(PlannerError, match="is_mamba_config: Mamba is not priced"):
        nanotron("is_mamba_config", "ssm_cfg: null")
    with pytest.raises(PlannerError, match=r"moe_config.layers is \[0, 2\]; only experts in all layers"):
        nanotron("is_qwen2_config", "moe_config: {layers: [0, 2]}")


PERFORMANCE = r"""
worker=$(cat <<- EOM
  python scripts/performance/custom_setup_experiment.py \
    --gpu {gpu} --model_family_name qwen --model_recipe_name {model} --num_gpus {gpus} --compute_dtype {dtype} \
    --expert_model_parallel_size 32 --pipeline_model_parallel_size 8 --virtual_pipeline_model_parallel_size 3 {more}
EOM
)
echo "$worker" > worker.sh
torchrun --nproc-per-node=4 --nnodes=64 --no-python bash worker.sh
"""


def test_the_performance_launcher_of_megatron_bridge_names_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "launcher.sh"

    def launched(more: str = "", gpus: int = 256, gpu: str = "gb200", dtype: str = "bf16", **given: Any) -> Reading:
        text = PERFORMANCE.format(more=more, gpus=gpus, gpu=gpu, dtype=dtype, model="qwen3_235b_a22b")
        file.write_text(text)
        return read(file, None, Given(**given))

    found = launched()
    assert (found.model.name, found.num_gpus, found.hardware) == ("qwen3-235b-a22b", 256, "gb200-nvl72")
    assert fields(found, "pp", "vpp", "ep", "first_stage_layers", "last_stage_layers") == [8, 3, 32, 11, 11]
    assert found.global_batch_size == 8192 and "expert_dispatch=hybridep" in found.trainer
    assert to_plan(found).layout.dp == 32
    again = launched("--recompute_modules moe_act,layernorm -gb 1024 --moe_flex_dispatcher_backend None -tp 2", dtype="fp8_cs")
    assert fields(again, "recompute_modules", "tp") == [int(Module.MLP_ACTIVATION | Module.NORM), 2]
    assert again.global_batch_size == 1024 and again.precision == "fp8" and "expert_dispatch=alltoall" in again.trainer
    with pytest.raises(OpenQuestionsError, match="sequences per step: the recipe of 256 GPUs is started on 512"):
        to_plan(launched(gpus=512))
    assert launched(gpus=512, global_batch_size=4096).num_gpus == 512
    with pytest.raises(OpenQuestionsError, match=r"recipe=qwen3_235b\S+ \('qwen3_\w+_256gpu_a100_bf16_config' is not"):
        to_plan(launched(gpu="a100"))
    with pytest.raises(PlannerError, match="--use_megatron_fsdp True: import its job as arguments of Megatron"):
        launched("--use_megatron_fsdp true")


@pytest.mark.parametrize(
    "text",
    ["sbatch <<EOF\n{command}\nEOF\n", "cat > job.sh <<'EOF'\n{command}\nEOF\nsbatch --nodes=2 job.sh\n",
     'echo "{command}" > job.sh\nsrun bash job.sh\n', "run() {{\n{command}\n}}\nrun\n"],
)  # fmt: skip
def test_a_script_that_a_script_writes_is_followed_where_it_is_started(text: str, tmp_path: Path) -> None:
    command = f"torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES} --tensor-model-parallel-size 2"
    (tmp_path / "start.sh").write_text(text.format(command=command))
    found = read(tmp_path / "start.sh", None, Given(num_gpus=16))
    assert fields(found, "tp") == [2]


def test_experts_of_a_megatron_without_an_argument_for_their_number_per_token(tmp_path: Path) -> None:
    words = "--num-experts 8 --optimizer adamw-bnb-8bit"
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "arguments.py").write_text("group.add_argument('--num-experts')")
    with pytest.raises(OpenQuestionsError, match=r"--set moe_router_topk=1\|2"):
        script(tmp_path, words)
    said = script(tmp_path, words, settings={"moe_router_topk": "1"})
    assert said.model.top_k == 1 and said.optimizer == "adam_8bit"
    (tmp_path / "megatron" / "arguments.py").write_text("group.add_argument('--moe-router-topk', default=2)")
    assert script(tmp_path, words).model.top_k == 2


def test_a_program_of_a_family_builds_what_its_arguments_do_not_say(tmp_path: Path) -> None:
    text = f"torchrun --nproc_per_node 8 pretrain_llama.py {SIZES.replace('--swiglu', '')}"
    (tmp_path / "train.sh").write_text(text)
    with pytest.raises(PlannerError, match=r"--model NAME \(pretrain_llama.py builds layers that its arguments do not tell"):
        read(tmp_path / "train.sh", None, Given())
    (tmp_path / "train.sh").write_text(f"{text} --swiglu")
    assert read(tmp_path / "train.sh", None, Given()).model.gated


def test_words_of_forks_for_gated_layers_and_an_untied_head(tmp_path: Path) -> None:
    words = "--glu-activation swiglu --use-rms-norm --no-tie-embed-logits"
    found = script(tmp_path, words).model
    assert found is not None and (found.gated, found.norm, found.tied_embeddings) == (True, "rmsnorm", False)
