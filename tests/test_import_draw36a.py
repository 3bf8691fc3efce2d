"""What import reads of pre-training since draw 36, with files of our own."""

from pathlib import Path

import pytest
from import_files import written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given, OpenQuestionsError

MODEL = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 "
    "--global-batch-size 64 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --bf16"
)
START = "torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py"
ROWS, MICRO = "--vocab-size 50304", "--micro-batch-size 2"


def _read(folder: Path, words: str, **settings: str) -> Reading:
    return read(written(folder, f"{START} {MODEL} {MICRO} {ROWS} {words}\n", "run.sh"), None, Given(settings=settings))


@pytest.mark.parametrize(
    "words",
    [
        "--outer-sync-steps 50 --outer-momentum 0.9", "--diloco-inner-steps 20", "--optimizer-kind sophia", "--use-muon",
        "--second-optimizer soap", "--low-lora-rank 8", "--weights-ema-decay 0.99", "--fp32-residual-connection",
        "--checkpoint-in-cpu",
    ],
)  # fmt: skip
def test_words_of_a_fork_that_decide_states_or_steps_are_refused(tmp_path: Path, words: str) -> None:
    with pytest.raises(PlannerError, match=f"{words.split()[0]}.* not priced"):
        _read(tmp_path, words)


@pytest.mark.parametrize("words", ["--optimizer-kind fused-adamw", "--override-opt_param-scheduler", "--use-wandb"])
def test_words_that_decide_nothing_are_left(tmp_path: Path, words: str) -> None:
    assert _read(tmp_path, words).num_gpus == 8


def test_activations_over_one_rank_of_tensor_parallelism_are_not_cut(tmp_path: Path) -> None:
    one = MODEL.replace("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 1")
    found = read(written(tmp_path, f"{START} {one} {MICRO} {ROWS} --partition-activations\n", "run.sh"), None, Given())
    assert found.fields["tp"] == 1


@pytest.mark.parametrize("words", ["--hidden-size-per-table 256", "--memory-size 4096", "--gate-dim 64", "--share-layers 2"])
def test_layers_of_a_fork_by_its_own_words_are_asked_for(tmp_path: Path, words: str) -> None:
    with pytest.raises(OpenQuestionsError, match=f"--model NAME .{words.split()[0]}"):
        to_plan(_read(tmp_path, words))
    assert read(tmp_path / "run.sh", None, Given(model="llama-2-7b")).num_gpus == 8


OWN = """import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from ours.attention import SlotAttention

def model_provider():
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention = ModuleSpec(module=SlotAttention, params={})
"""


def test_a_program_that_puts_its_own_attention_into_layers_is_asked_for(tmp_path: Path) -> None:
    written(tmp_path, OWN, "pretrain_slots.py")
    run = written(tmp_path, f"{START.replace('pretrain_gpt', 'pretrain_slots')} {MODEL} {MICRO} {ROWS} --swiglu\n", "run.sh")
    with pytest.raises(OpenQuestionsError, match="pretrain_slots.py builds layers that its arguments do not tell"):
        to_plan(read(run, None, Given()))
    written(tmp_path, OWN.replace("from ours.attention", "from megatron.core.transformer.attention"), "pretrain_slots.py")
    assert read(run, None, Given()).num_gpus == 8


def test_a_vocabulary_file_that_its_folder_counts_is_not_gpt2s(tmp_path: Path) -> None:
    words = "--vocab-file /data/words/48k/vocab.json --merge-file /data/words/48k/merges.txt"
    with pytest.raises(OpenQuestionsError, match="vocab_size=VALUE .*48k/vocab.json"):
        to_plan(read(written(tmp_path, f"{START} {MODEL} {MICRO} {words}\n", "run.sh"), None, Given()))


OLD = (
    "deepspeed --num_nodes 1 --num_gpus 8 pretrain_gpt2.py --model-parallel-size 1 --pipe-parallel-size 2 --num-layers 12 "
    "--hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 --batch-size 4 --gas 8 --fp16 "
    "--vocab-size 50304"
)


def test_words_of_the_first_megatron_with_a_pipeline_of_deepspeed(tmp_path: Path) -> None:
    found = read(written(tmp_path, OLD + "\n", "run.sh"), None, Given())
    assert (found.fields["pp"], found.fields["micro_batch_size"], found.global_batch_size) == (2, 4, 4 * 4 * 8)


def test_the_engines_file_lies_beside_the_script_that_finds_its_own_folder(tmp_path: Path) -> None:
    written(tmp_path, '{"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 1}}', "engine.json")
    head = 'script_path=$(realpath $0)\nscript_dir=$(dirname $script_path)\nconfig="$script_dir/engine.json"\n'
    run = written(tmp_path, f"{head}{OLD} --deepspeed --deepspeed_config ${{config}}\n", "run.sh")
    with pytest.raises(OpenQuestionsError, match="--micro-batch-size M .*says 16, --micro-batch-size 4"):
        to_plan(read(run, None, Given()))


def test_an_empty_operand_makes_a_test_of_one_bracket_false(tmp_path: Path) -> None:
    text = 'SPLIT=${SPLIT:-}\nARGS="--swiglu"\nif [ $SPLIT -eq 1 ]; then\n  ARGS="$ARGS --moe-extended-tp"\nfi\n'
    found = read(written(tmp_path, f"{text}{START} {MODEL} {MICRO} {ROWS} $ARGS\n", "run.sh"), None, Given())
    assert found.model is not None and found.model.gated


def test_a_sourced_file_is_found_by_the_end_of_its_path(tmp_path: Path) -> None:
    written(tmp_path, f"SIZES=({MODEL} {MICRO} {ROWS})\n", "config/dense/small.sh")
    run = written(tmp_path, f'source /home/someone/project/config/dense/small.sh\n{START} "${{SIZES[@]}}"\n', "scripts/start.sh")
    found = read(run, None, Given())
    assert (found.fields["tp"], found.num_gpus, found.global_batch_size) == (2, 8, 64)


def test_recompute_of_expert_layers_under_its_first_name(tmp_path: Path) -> None:
    experts = "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
    now = _read(tmp_path, f"{experts} --recompute-granularity selective --recompute-modules core_attn moe")
    then = _read(tmp_path, f"{experts} --moe-layer-recompute")
    assert then.fields == now.fields


def test_a_script_that_another_one_starts_is_found_in_a_folder_beside(tmp_path: Path) -> None:
    words = "-n $((DP * 2)) -x A=1 -x B=2 -x C=3 -x D=4 python pretrain_gpt.py"
    inner = f"DP=${{DP:-1}}\nmpirun {words} {MODEL} {MICRO} {ROWS} $FLAGS\n"
    written(tmp_path, inner, "megatron/examples/small/start.sh")
    run = written(tmp_path, "DP=4 \\\nFLAGS=--swiglu \\\n/home/someone/megatron-1/examples/small/start.sh\n", "jobs/small_dp4.sh")
    found = read(run, None, Given())
    assert (found.num_gpus, found.fields["tp"], found.model is not None and found.model.gated) == (8, 2, True)


def test_a_comparison_with_nothing_is_a_test_for_emptiness(tmp_path: Path) -> None:
    text = 'OUT=$1\nSTAGES=$2\nif [ "$STAGES" == "" ]; then\n  STAGES=2\nfi\nif [ "$OUT" != "" ]; then\n  STAGES=4\nfi\n'
    words = MODEL.replace("--pipeline-model-parallel-size 1", "--pipeline-model-parallel-size $STAGES")
    assert read(written(tmp_path, f"{text}{START} {words} {MICRO} {ROWS}\n", "run.sh"), None, Given()).fields["pp"] == 2


def test_layers_by_a_spec_of_the_projects_own_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(OpenQuestionsError, match="--model NAME .--spec"):
        to_plan(_read(tmp_path, "--spec ours.layers.slots slot_layer_spec"))
    assert _read(tmp_path, "--spec megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_local_spec").num_gpus == 8


def test_settings_of_a_program_of_its_own_are_none_of_axolotl(tmp_path: Path) -> None:
    text = "base_model: Qwen/Qwen2.5-7B\nmicro_batch_size: 2\ngrad_accum: 8\nmax_length: 1024\ntarget_modules: [q_proj]\n"
    with pytest.raises(PlannerError, match="max_length, grad_accum, target_modules: no setting of axolotl"):
        read(written(tmp_path, text, "lora.yaml"), None, Given())


def test_a_tokenizers_file_in_a_folder_is_no_name_on_the_hub(tmp_path: Path) -> None:
    sizes = MODEL.replace("--hidden-size 768", "--hidden-size 4096").replace("--num-layers 12", "--num-layers 32")
    words = f"{sizes.replace('attention-heads 12', 'attention-heads 32')} --ffn-hidden-size 11008 --swiglu --normalization RMSNorm "
    words += "--untie-embeddings-and-output-weights --tokenizer-type Llama2Tokenizer --tokenizer-model work/tokenizer.model"
    words += " --disable-bias-linear --position-embedding-type rope"
    found = read(written(tmp_path, f"{START} {MICRO} {words}\n", "run.sh"), None, Given())
    assert found.model is not None and found.model.vocab_size == 32000


def test_a_loop_over_the_places_of_arrays_asks_which_round_is_meant(tmp_path: Path) -> None:
    text = "widths=(768 1536)\nfor i in ${!widths[@]}; do\n  W=${widths[$i]}\n  RUN\ndone\n"
    text = text.replace("RUN", f"{START} {MODEL} {MICRO} {ROWS}".replace("--hidden-size 768", "--hidden-size $W"))
    file = written(tmp_path, text, "run.sh")
    with pytest.raises(OpenQuestionsError, match=r"--set i=0\|1 \(--hidden-size\)"):
        to_plan(read(file, None, Given()))
    found = read(file, None, Given(settings={"i": "1"}))
    assert found.model is not None and found.model.hidden_size == 1536


def test_a_configuration_of_a_projects_own_module_must_be_there(tmp_path: Path) -> None:
    words = "torchrun --nproc_per_node=4 -m torchtitan.train --module slots --config slots_400m --training.local_batch_size 2 "
    words += "--training.seq_len 2048 --parallelism.data_parallel_shard_degree 4"
    with pytest.raises(PlannerError, match="slots_400m of slots, whose config_registry.py is not there"):
        read(written(tmp_path, words + "\n", "run.sh"), None, Given())
    told = read(written(tmp_path, words + " --activation_checkpoint.mode none\n", "run.sh"), None, Given(model="llama-3-8b"))
    assert (told.num_gpus or 4, told.fields["recompute"]) == (4, 0)


@pytest.mark.parametrize(("counted", "asked"), [("1 1 $MOST", ""), ("2 2 6", "batch=2|4|6"), ("3", "batch=1|2|3")])
def test_what_seq_counts_is_a_list_like_one_that_is_written(tmp_path: Path, counted: str, asked: str) -> None:
    words = f"{START} {MODEL} {ROWS} --micro-batch-size $batch"
    words = words.replace("--global-batch-size 64", "--global-batch-size $((batch * 8))")
    file = written(tmp_path, f"MOST=1\nfor batch in $(seq {counted}); do\n  {words}\ndone\n", "run.sh")
    found = None
    if asked:
        with pytest.raises(OpenQuestionsError) as error:
            to_plan(read(file, None, Given()))
        assert f"--set {asked} (--global-batch-size, --micro-batch-size)" in str(error.value)
        found = read(file, None, Given(settings={"batch": "2"}))
    found = found or read(file, None, Given())
    assert found.global_batch_size == 8 * found.fields["micro_batch_size"]


def test_a_loop_over_what_a_command_writes_is_asked_by_its_variable(tmp_path: Path) -> None:
    loop = f"for m in $(list_batches --all); do\n  {START} {MODEL} {ROWS} --micro-batch-size $m\ndone\n"
    file = written(tmp_path, loop, "run.sh")
    with pytest.raises(OpenQuestionsError, match="--set m=VALUE .--micro-batch-size"):
        to_plan(read(file, None, Given()))


@pytest.mark.parametrize("words", ["--mtp-num-layers 1 --mtp-steps 2", "--moe-capacity-bins-num 10"])
def test_heads_that_run_several_times_and_binned_experts_are_refused(tmp_path: Path, words: str) -> None:
    with pytest.raises(PlannerError, match=f"{words.split()[-2]}.* not priced"):
        _read(tmp_path, words)


def test_a_switch_of_a_model_of_its_own_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(OpenQuestionsError, match="--model NAME .--is-slot-model"):
        to_plan(_read(tmp_path, "--is-slot-model"))


@pytest.mark.parametrize("name", ["our_llama_16k_v2/merged_tokenizer_sp/our_llama.model", "llama_extended/tokenizer.model"])
def test_a_llama_tokenizer_with_rows_added_is_not_llamas(tmp_path: Path, name: str) -> None:
    words = f"{START} {MODEL} {MICRO} --tokenizer-type Llama2Tokenizer --tokenizer-model /data/{name}\n"
    with pytest.raises(OpenQuestionsError, match="--set vocab_size=VALUE"):
        to_plan(read(written(tmp_path, words, "run.sh"), None, Given()))


def test_an_adapter_on_the_head_does_not_train_the_head(tmp_path: Path) -> None:
    text = """
from transformers import AutoModelForCausalLM, TrainingArguments, Trainer
from peft import LoraConfig, get_peft_model
model = AutoModelForCausalLM.from_pretrained("mistralai/Mistral-7B-v0.1")
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"]))
args = TrainingArguments(output_dir="out", per_device_train_batch_size=2, bf16=True, max_steps=10)
Trainer(model=model, args=args, train_dataset=data).train()
"""
    found = read(written(tmp_path, text, "tune.py"), None, Given(settings={"deepspeed": "zero2", "max_length": "512"}))
    assert (found.lora_whole, found.lora_targets, found.lora_rank) == ("none", "qv", 4)
    assert any("adapters on 'lm_head' are not priced" in one for one in found.notes)


def test_a_word_that_no_list_has_is_asked_about(tmp_path: Path) -> None:
    """What a fork means by it nobody here knows; before, it was only listed as not read, beside a plan without it."""
    with pytest.raises(OpenQuestionsError, match=r"--set blend_depth=false .no argument of Megatron-LM known here") as said:
        _read(tmp_path, "--blend-depth 3 --next-tockens 0 --torch-profile --plain-switch")
    assert [one.name for one in said.value.questions] == ["blend_depth", "plain_switch"]
    without = {"blend_depth": "false", "plain_switch": "false"}
    found = _read(tmp_path, "--blend-depth 3 --next-tockens 8 --torch-profile --plain-switch", **without)
    assert found.unread == ("--next-tockens 8", "--torch-profile") and found.num_gpus == 8
