"""Scripts that start programs of their own on transformers' Trainer: their words, and what the programs take by themselves."""

from pathlib import Path
from typing import Any

import pytest

from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading, to_plan
from planner.trainers.reading.given import Given, OpenQuestionsError

PROGRAM = '''
from dataclasses import dataclass, field
import transformers
from own.options import Adapters

class Other:
    bits: int = 8

@dataclass
class Training(transformers.Seq2SeqTrainingArguments):
    optim: str = field(default="paged_adamw_32bit")
    gradient_checkpointing: bool = field(default=True, metadata={"help": "x"})
    cache_dir: str = None
    bits: int = 4

parser = transformers.HfArgumentParser((Training, Adapters))
'''
OPTIONS = '''
from dataclasses import dataclass, field
@dataclass
class Lengths:
    model_max_length: int = 512
@dataclass
class Adapters(Lengths):
    full_finetune: bool = False
    lora_r: int = 64
    double_quant: bool = True
    lora_modules: list = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj"])
    broken: str = field(default=open("/etc/passwd").read())
'''
WORDS = "--model_name_or_path meta-llama/Llama-2-7b-hf --bf16 True --per_device_train_batch_size 2"


def script(folder: Path, words: str, program: str = "train.py", **given: Any) -> Reading:
    (folder / "run.sh").write_text(f"torchrun --nproc_per_node 8 {program} {WORDS} {words}\n")
    return read(folder / "run.sh", None, Given(**given))


def beside(folder: Path) -> None:
    (folder / "train.py").write_text(PROGRAM)
    (folder / "own").mkdir(exist_ok=True)
    (folder / "own" / "options.py").write_text(OPTIONS)


def test_a_program_takes_the_defaults_of_its_dataclasses(tmp_path: Path) -> None:
    beside(tmp_path)
    found = script(tmp_path, "")
    assert (found.lora_rank, found.lora_targets, found.frozen_weights) == (64, "qkv", "nf4_dq")
    assert (found.sequence_length, found.optimizer, found.fields["recompute"]) == (512, "paged_adam", int(Recompute.FULL))
    assert found.unread == () and to_plan(found, {"hardware": "a100-sxm-80gb"}).layout.dp == 8
    said = script(tmp_path, "--lora_r 8 --model_max_length 2048 --gradient_checkpointing False --optim adamw_torch")
    assert (said.lora_rank, said.sequence_length, said.optimizer, said.fields["recompute"]) == (8, 2048, "adam", 0)
    whole = script(tmp_path, "--full_finetune True")
    assert (whole.lora_rank, whole.optimizer) == (0, "paged_adam")
    (tmp_path / "train.py").write_text("this is no program of Python")
    assert script(tmp_path, "--max_seq_length 1024").lora_rank == 0


@pytest.mark.parametrize(
    ("words", "rank", "targets", "frozen"),
    [
        ("--use_peft_lora True --lora_r 8 --lora_target_modules all-linear --use_4bit_quantization True --use_nested_quant True",
         8, "all", "nf4_dq"),
        ("--use_peft True --lora_rank 8 --target_modules all --torch_dtype bfloat16", 8, "all", "bf16"),
        ("--lora_rank 64 --trainable q_proj,v_proj --load_in_kbits 8", 64, "qv", "int8"),
        ("--use_qlora 1 --quant_bit 4 --double_quant false --lora_r 8 --lora_target_modules all-linear", 8, "all", "nf4"),
        ("--use_lora True --quantization 4 --quantization_inference 8 --double_quant true --lora_r 8 --lora_target all", 8, "all",
         "nf4_dq"),
        ("--peft_config.r 4 --peft_config.target_modules q_proj --model_args.torch_dtype bfloat16", 4, "qv", "bf16"),
        ("--use_lora True --q_lora False --load_in_4bit False --lora_r 8 --lora_target all --torch_dtype bfloat16", 8, "all",
         "bf16"),
        ("--use_lora False --lora_r 8", 0, "all", None),
    ],
)  # fmt: skip
def test_words_for_adapters(words: str, rank: int, targets: str, frozen: str | None, tmp_path: Path) -> None:
    found = script(tmp_path, words)
    assert (found.lora_rank, found.lora_targets, found.frozen_weights) == (rank, targets, frozen)
    assert found.questions == () or found.questions[0].name == "accelerate"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--use_lisa 1", "use_lisa decides memory or degrees and is not priced; --set use_lisa=false imports the job without"),
        ("--use_customized_optim 1 --customized_optim dummy", "use_customized_optim, customized_optim decide memory"),
        ("--relora_steps 300", "relora_steps decides memory"),
        ("--force_auto_device_map true", "force_auto_device_map decides memory"),
        ("--medusa_num_heads 3", "medusa_num_heads decides memory"),
        ("--parallel_mode zigzag_ring_attn", "parallel_mode decides memory"),
        ("--tune_vision true", "tune_vision decides memory"),
        ("--model_name_or_path bert-base-uncased", "bert-base-uncased is no decoder: encoders and sequence-to-sequence models"),
        ("--spectrum_config_path 30percent.yaml", "spectrum_config_path decides memory or degrees and is not priced"),
    ],
)  # fmt: skip
def test_what_decides_memory_and_is_not_priced_is_refused(words: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match=says):
        script(tmp_path, words)
    settings = {one.split()[0]: "false" for one in words.split("--")[1:] if not one.startswith(("lora_r ", "use_lora "))}
    if "bert" not in words:
        assert script(tmp_path, words, settings=settings).model.name == "llama-2-7b"


def test_tables_trained_beside_adapters(tmp_path: Path) -> None:
    for whole, names in {"both": "embed_tokens,lm_head", "head": "lm_head", "embedding": "embed_tokens", "none": "score"}.items():
        assert script(tmp_path, f"--use_lora True --lora_r 8 --modules_to_save {names}").lora_whole == whole


def test_a_program_of_its_own_called_dpo_has_the_habits_of_what_it_imports(tmp_path: Path) -> None:
    length = "--model_max_length 512 --deepspeed zero2"
    known = script(tmp_path, length, "dpo.py")
    assert known.objective == "dpo" and known.fields["recompute"] == int(Recompute.FULL)
    (tmp_path / "dpo.py").write_text(PROGRAM.replace('default=True, metadata={"help": "x"}', "default=False"))
    own = script(tmp_path, length, "dpo.py")
    assert own.objective == "dpo" and own.fields["recompute"] == int(Recompute.NONE)
    (tmp_path / "dpo.py").write_text("from trl import DPOTrainer\nfrom transformers import TrainingArguments\n")
    assert script(tmp_path, length, "dpo.py").fields["recompute"] == int(Recompute.NONE)
    (tmp_path / "dpo.py").write_text("from trl import DPOConfig, DPOTrainer\n")
    assert script(tmp_path, length, "dpo.py").fields["recompute"] == int(Recompute.FULL)


def test_trainings_under_a_condition_and_files_that_the_script_writes(tmp_path: Path) -> None:
    words = f"--deepspeed zero2 --max_length 512 {WORDS}"
    (tmp_path / "run.sh").write_text(
        f"if [ $MODE == long ]; then\ntorchrun --nproc_per_node 8 train.py {words} --gradient_checkpointing True\nelse\n"
        f"torchrun --nproc_per_node 8 train.py {words}\nfi\n"
    )
    with pytest.raises(OpenQuestionsError, match="--set MODE=long .*which of the 2 trainings of the script it starts"):
        read(tmp_path / "run.sh", None, Given())
    answered = read(tmp_path / "run.sh", None, Given(settings={"MODE": "long"}))
    assert answered.fields["recompute"] == int(Recompute.FULL)
    (tmp_path / "run.sh").write_text(
        "gpus=0,1,2,3\nn=$(echo \"${gpus}\" | awk -F, '{print NF}')\ncat <<EOT > dpo.yaml\n"
        "model_name_or_path: meta-llama/Llama-2-7b-hf\nmax_length: $((1024 * 2))\nmax_prompt_length: 512\nbf16: true\nEOT\n"
        "accelerate launch --num_processes $n --use_deepspeed --deepspeed_config_file gone.json run_dpo.py dpo.yaml\n"
    )
    with pytest.raises(OpenQuestionsError, match=r"--set deepspeed=zero3\|.*'gone.json' is not beside it"):
        to_plan(read(tmp_path / "run.sh", None, Given()), {"hardware": "h100-sxm"})
    written = read(tmp_path / "run.sh", None, Given(settings={"deepspeed": "zero3"}))
    assert (written.objective, written.sequence_length, written.num_gpus) == ("dpo", 2048, 4)
    (tmp_path / "simpo.yaml").write_text("model_name_or_path: meta-llama/Llama-2-7b-hf\nbeta: 2.0\ngamma_beta_ratio: 0.5\n")
    with pytest.raises(PlannerError, match="SIMPO is not modelled"):
        read(tmp_path / "simpo.yaml", "trl", Given())


def test_a_configuration_of_accelerate_that_a_variable_names_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"accelerate launch --config_file $1 train.py {WORDS} --max_length 512\n")
    found = read(tmp_path / "run.sh", None, Given(num_gpus=8))
    assert [one.name for one in found.questions] == ["accelerate"] and "or say --set deepspeed=zero3" in found.questions[0].about
    answered = read(tmp_path / "run.sh", None, Given(num_gpus=8, settings={"deepspeed": "zero2"}))
    assert (answered.fields["zero"], answered.questions) == (2, ())


def test_the_vocabulary_of_nemo_is_overridden_or_asked_for(tmp_path: Path) -> None:
    text = (
        "run:\n  name: own_14b\ntrainer: {num_nodes: 2, devices: 8, precision: bf16}\nmodel:\n  micro_batch_size: 1\n"
        "  global_batch_size: 32\n  tensor_model_parallel_size: 2\n  encoder_seq_length: 4096\n  num_layers: 40\n"
        "  hidden_size: 5120\n  ffn_hidden_size: 13696\n  num_attention_heads: 40\n  activation: fast-swiglu\n"
    )
    (tmp_path / "own_14b.yaml").write_text(text)
    with pytest.raises(OpenQuestionsError, match="--set vocab_size=VALUE"):
        read(tmp_path / "own_14b.yaml", None, Given())
    assert read(tmp_path / "own_14b.yaml", None, Given(settings={"vocab_size": "152064"})).model.vocab_size == 152064
    (tmp_path / "own_14b.yaml").write_text(f"{text}  override_vocab_size: 151936\n")
    assert read(tmp_path / "own_14b.yaml", None, Given()).model.vocab_size == 151936


VERL = """
actor_rollout_ref.model.path=Qwen/Qwen2.5-7B data.train_batch_size=16 actor_rollout_ref.rollout.n=8 data.max_prompt_length=512
actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 data.max_response_length=512
"""


def test_an_update_of_verl_has_no_more_than_one_round_of_generation(tmp_path: Path) -> None:
    for program, batch in (("-m verl.trainer.main_ppo", 16 * 8), ("-m own.main_own_ppo", 256 * 8), ("main_ppo.py", 16 * 8)):
        (tmp_path / "run.sh").write_text(f"python3 {program} {VERL.strip().replace(chr(10), ' ')}\n")
        assert read(tmp_path / "run.sh", None, Given()).global_batch_size == batch
    (tmp_path / "grpo.yaml").write_text(
        "defaults:\n  - ppo_trainer\nactor_rollout_ref:\n  model: {path: Qwen/Qwen2.5-7B}\n"
        "  actor: {ppo_mini_batch_size: 16, ppo_micro_batch_size_per_gpu: 2}\ndata: {train_files: a}\n"
        "trainer: {n_gpus_per_node: 4, nnodes: 1}\n"
    )
    asked = read(tmp_path / "grpo.yaml", None, Given()).questions
    assert [one.name for one in asked] == ["data.max_prompt_length", "data.max_response_length"]
    lengths = {"data.max_prompt_length": "1024", "data.max_response_length": "1024"}
    assert read(tmp_path / "grpo.yaml", None, Given(settings=lengths)).sequence_length == 2048
    (tmp_path / "sft.yaml").write_text("training_config:\n  engine: {_target_: verl.trainer.Engine}\n")
    with pytest.raises(PlannerError, match="no section actor_rollout_ref"):
        read(tmp_path / "sft.yaml", "verl", Given())


def test_question_and_answer_are_one_sequence_and_a_model_has_many_names(tmp_path: Path) -> None:
    found = script(tmp_path, "--max_source_length 1024 --max_target_length 512")
    assert found.sequence_length == 1536
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc_per_node 8 train.py --per_device_train_batch_size 2 --use_gradient_checkpointing True --max_length 512 "
        "--model_path $HUB/models--meta-llama--Llama-2-7b-hf/snapshots/0123abc\n"
    )
    other = read(tmp_path / "run.sh", None, Given())
    assert other.model.name == "llama-2-7b" and other.fields["recompute"] == int(Recompute.FULL)


def test_flags_of_torchtitan_go_over_the_file_that_they_name(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "llama3_8b.toml").write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\nseq_len = 8192\n[parallelism]\n'
        'tensor_parallel_degree = 2\n[activation_checkpoint]\nmode = "full"\n[optimizer]\nname = "AdamW"\n'
    )
    file = tmp_path / "run.sh"
    file.write_text('if [[ $GPU == h100 ]]; then\n  if [[ $MANY == 64 ]]; then DP=64; else DP=8; fi\nelse DP=-1; fi\n'
                    "torchrun -m torchtitan.train --job.config_file=$HOME/conf/llama3_8b.toml --training.dataset_path=$DATA "
                    "--parallelism.data_parallel_shard_degree=$DP --training.local_batch_size 4 $MORE\n")  # fmt: skip
    with pytest.raises(OpenQuestionsError) as caught:
        read(file, None, Given())
    assert [one.name for one in caught.value.questions] == ["GPU", "MANY"]
    found = read(file, None, Given(settings={"GPU": "h100", "MANY": "64", "MORE": "--activation_checkpoint.mode none"}))
    assert found.model.name == "llama-3.1-8b" and found.num_gpus == 128
    names = ("tp", "dp", "micro_batch_size", "recompute")
    assert [found.fields[name] for name in names] == [2, 64, 4, 0] and found.sequence_length == 8192
    file.write_text("torchrun -m torchtitan.train --job.config_file=other.toml\n")
    with pytest.raises(PlannerError, match="it names 'other.toml', which is not there"):
        read(file, None, Given())


def test_a_byte_pair_encoding_of_its_own_leaves_the_vocabulary_open(tmp_path: Path) -> None:
    sizes = "--num-layers 24 --hidden-size 1088 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 1 --bf16 "
    text = f"torchrun --nproc_per_node 8 pretrain_gpt.py {sizes} --global-batch-size 8 --tokenizer-type GPT2BPETokenizer "
    text += "--vocab-file "
    (tmp_path / "own.sh").write_text(text + "/data/nordic_tokenizer_131072/vocab.json")
    with pytest.raises(OpenQuestionsError, match=r"'nordic_tokenizer_131072/vocab.json' is a tokenizer that is not read"):
        read(tmp_path / "own.sh", None, Given())
    (tmp_path / "own.sh").write_text(text + "/data/gpt2/vocab.json")
    assert read(tmp_path / "own.sh", None, Given()).model.vocab_size == 50257


OWN = '''
parser.add_argument("--batch_size", type=int, default=1)
parser.add_argument("--use_lora", action="store_true")
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--bf16", action="store_true", default=True)
args = parser.parse_args()
def adapted(model):
    return get_peft_model(model, LoraConfig(r=args.rank, target_modules=["q_proj", "k_proj", "v_proj"]))
if args.use_lora:
    model = AutoModelForCausalLM.from_pretrained(args.model, quantization_config=BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_use_double_quant=True), torch_dtype=torch.bfloat16)
    model = adapted(model)
else:
    model = LlamaForCausalLM.from_pretrained(args.model)
training = TrainingArguments(per_device_train_batch_size=args.batch_size, gradient_accumulation_steps=4, bf16=args.bf16)
'''
OWN_WORDS = "--per_device_train_batch_size 8 --micro_train_batch_size 2 --total_max_len 512 --deepspeed zero2"
STARTS = "torchrun --nproc_per_node 8 own.py --model meta-llama/Llama-2-7b-hf --model_max_length 1024 --deepspeed zero2 "


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--batch_size 2", (2, 4, "bf16", 0, "all", None)),
        ("--batch_size 2 --use_lora --rank 64", (2, 4, "bf16", 64, "qkv", "nf4_dq")),
    ],
)
def test_a_program_says_what_it_does_with_the_options_of_its_command(words: str, found: tuple[Any, ...], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "run.sh").write_text(STARTS + words)
    reading = read(tmp_path / "run.sh", None, Given())
    fields = reading.fields
    assert found == (fields["micro_batch_size"], fields["num_microbatches"], reading.precision, reading.lora_rank,
                     reading.lora_targets, reading.frozen_weights)  # fmt: skip
    assert reading.unread == () and reading.model is not None and reading.model.name == "llama-2-7b"


@pytest.mark.parametrize("model", ["model=model", "model=self.engine.model", "**taken(model)"])
def test_a_script_that_is_given_its_model_leaves_the_dtype_open(model: str, tmp_path: Path) -> None:
    text = f"def tune(self, model):\n    SFTTrainer({model}, args=TrainingArguments(per_device_train_batch_size=2))"
    (tmp_path / "own.py").write_text(text)
    assert "torch_dtype" in [one.name for one in read(tmp_path / "own.py", None, Given(num_gpus=1)).questions]


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        ("--deepspeed $(date)/own.json", "--set deepspeed=VALUE"),
        ("--deepspeed zero2 --train_batch_size 2", "--set per_device_train_batch_size=VALUE .its program calls"),
        ("--per_device_train_batch_size 2 --deepspeed zero2 --accumulation_steps 8", "--set gradient_accumulation_steps=VALUE"),
    ],
)
def test_words_that_a_program_has_of_its_own_are_asked_for(words: str, asks: str, tmp_path: Path) -> None:
    (tmp_path / "sft.py").write_text("trainer = OwnTrainer(model)")
    (tmp_path / "run.sh").write_text(STARTS.replace("own.py", "sft.py").replace("--deepspeed zero2", words))
    with pytest.raises(OpenQuestionsError, match=asks):
        to_plan(read(tmp_path / "run.sh", None, Given()))


def test_a_supervised_program_in_a_folder_called_dpo_and_pieces_of_a_batch(tmp_path: Path) -> None:
    folder = tmp_path / "src" / "dpo"
    folder.mkdir(parents=True)
    (folder / "sft.py").write_text("trainer = Trainer(model)")
    (tmp_path / "run.sh").write_text(f"torchrun --nproc_per_node 8 ${{ROOT}}/src/dpo/sft.py {WORDS} {OWN_WORDS}")
    found = read(tmp_path / "run.sh", None, Given())
    assert (found.objective, found.sequence_length) == ("lm", 512)
    assert (found.fields["micro_batch_size"], found.fields["num_microbatches"]) == (2, 4)


@pytest.mark.parametrize(
    ("program", "asks"),
    [
        ("if len(somewhere) > 1:\n    model = get_peft_model(model, LoraConfig(r=8))", r"--set use_peft=true\|false"),
        ("model = PeftModel.from_pretrained(model, 'adapters', is_trainable=True)", "--set lora_r=VALUE"),
        ("print('a loop of its own')", "--set per_device_train_batch_size=VALUE"),
        ("steps = total // batch\nif ddp:\n    steps = steps // world\nargs = TrainingArguments(\n"
         "    per_device_train_batch_size=4, gradient_accumulation_steps=steps)", "--set .*(steps|total)=VALUE"),
        ("first = TrainingArguments('x')\nargs = TrainingArguments(per_device_train_batch_size=sizes['a'])",
         "--set a=VALUE .of per_device"),
        ("model = FullyShardedDataParallel(model)", r"--set bf16=true\|false .whether its own loop"),
        ("", r"--set lora_r=VALUE \(rank of the adapters of train_lora.py\)"),
    ],
)
def test_what_a_program_leaves_open_is_asked(program: str, asks: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"{program}\n")
    (tmp_path / "run.sh").write_text(STARTS if program else STARTS.replace("own.py", "train_lora.py"))
    with pytest.raises(OpenQuestionsError, match=asks):
        to_plan(read(tmp_path / "run.sh", None, Given()))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("torchrun --nproc_per_node 8 -m run-own {words} \\ \n  --deepspeed zero2 \\\t\n  --use_peft false", (2, "fp32")),
        ('CMD="own.py {words} --deepspeed zero2"\nexport LAUNCHER="torchrun --nproc_per_node 8"', (2, "fp32")),
        ('for ip in a b; do\n  ssh $ip eval "cd x && torchrun --nproc_per_node 8 own.py {words} --deepspeed zero2 1>>log" &\ndone',
         (2, "fp32")),
        ("own-cli prepare {words}\nown-cli sft {words} --per_device_train_batch_size 4 --deepspeed zero2", (2, "fp32")),
        ("accelerate launch --num_processes 8 --mixed_precision bf16 --use_deepspeed --deepspeed_config_file ds/z3.conf "
         "own.py {words}", (3, "bf16")),
        ("accelerate launch --num_processes 8 --mixed_precision bf16 --use_deepspeed --deepspeed_config_file not/there.conf "
         "own.py {words}", (1, "bf16")),
    ],
)  # fmt: skip
def test_how_people_write_commands(text: str, found: tuple[int, str], tmp_path: Path) -> None:
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "z3.conf").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}')
    words = "--model_name_or_path meta-llama/Llama-2-7b-hf --batch_size_per_gpu 4 --model_max_length 1024"
    (tmp_path / "run.sh").write_text(text.format(words=words))
    settings = {"deepspeed": "zero1"} if "not/there" in text else {}
    reading = read(tmp_path / "run.sh", None, Given(num_gpus=8, settings=settings))
    assert (reading.fields["zero"], reading.precision, reading.fields["micro_batch_size"]) == (*found, 4)


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("model = get_peft_model(model, DoraConfig(r=8))", "DoraConfig is not modelled; all weights, LoRA and QLoRA are"),
        ("trainer = get_it(RLOOTrainer(model))", "RLOO is not modelled; supervised fine-tuning and DPO are"),
        ("model = get_it(LlamaForSequenceClassification.from_pretrained(x))", "ForSequenceClassification is no language model"),
        ("model = get_reft_model(model, ReftConfig())", "(get_reft_model|ReftConfig) is not modelled"),
        ("trainer = OwnTrainerForCausalLM(model, args)", "OwnTrainerForCausalLM is not a trainer of TRL or transformers"),
    ],
)
def test_what_trains_something_else_is_refused(program: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"args = TrainingArguments(per_device_train_batch_size=1)\n{program}\n")
    if "Classification" not in program:
        with pytest.raises(PlannerError, match=says):
            read(tmp_path / "own.py", None, Given())
    (tmp_path / "run.sh").write_text(STARTS)
    if "get_" in program:
        with pytest.raises(PlannerError, match=says):
            read(tmp_path / "run.sh", None, Given())
