"""Programs with several trainings, lengths that variables and modules say, and models that a plan leaves a part out of."""

from pathlib import Path

import pytest

from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

HEAD = """
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from trl import SFTTrainer, SFTConfig
from peft import LoraConfig, get_peft_model
NAME = "meta-llama/Meta-Llama-3-8B"
"""
FIRST = """
def first(data):
    model = AutoModelForCausalLM.from_pretrained(NAME, torch_dtype="bfloat16")
{body}
    args = TrainingArguments(output_dir="a", per_device_train_batch_size=2, bf16=True)
    Trainer(model=model, args=args, train_dataset=data).train()
"""
SECOND = """
def second(data):
    model = AutoModelForCausalLM.from_pretrained("out", torch_dtype="float32")
    model.gradient_checkpointing_enable()
    model = get_peft_model(model, LoraConfig(r=64, target_modules=["q_proj", "v_proj"]))
    args = TrainingArguments(output_dir="b", per_device_train_batch_size=8, bf16=True)
    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.train()
"""
BOTH = """
def main():
    data = load()
    first(data)
    second(data)

main()
"""


def job(folder: Path, text: str, name: str = "train.py", **given: str) -> Reading:
    (folder / name).write_text(text)
    answers = {"fsdp": "no_shard", "loss_type": "nll", "gradient_checkpointing": "false", **given}
    return read(folder / name, None, Given(num_gpus=1, settings=answers))


def asked_of(file: Path, said: Given) -> dict[str, str]:
    found = read(file, None, said)
    return {one.name: one.about for one in (*found.questions, *said.questions)}


def test_of_two_trainings_in_functions_only_parts_of_the_first_count(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(HEAD + FIRST.format(body="") + SECOND + BOTH)
    found = read(tmp_path / "two.py", None, Given(num_gpus=1, sequence_length=512))
    assert (found.fields["micro_batch_size"], found.lora_rank, found.fields["recompute"]) == (2, 0, int(Recompute.NONE))
    assert any("the first is read (line 10), with what belongs to it" in one for one in found.notes)


def test_adapters_of_the_first_training_stay(tmp_path: Path) -> None:
    body = '    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))'
    swapped = BOTH.replace("first(data)", "x(data)").replace("second(data)", "first(data)").replace("x(data)", "second(data)")
    (tmp_path / "two.py").write_text(HEAD + SECOND.replace("def second", "def warm") + FIRST.format(body=body) + swapped)
    found = read(tmp_path / "two.py", None, Given(num_gpus=1, sequence_length=512))
    assert found.lora_rank == 64 and found.lora_targets == "qv" and found.fields["recompute"] == int(Recompute.FULL)


def test_weights_that_the_first_training_freezes_are_asked_about_beside_adapters_of_the_second(tmp_path: Path) -> None:
    body = "    for one in model.parameters():\n        one.requires_grad = False"
    (tmp_path / "two.py").write_text(HEAD + FIRST.format(body=body) + SECOND + BOTH)
    assert "requires_grad" in asked_of(tmp_path / "two.py", Given(num_gpus=1, sequence_length=512))


def test_what_a_module_does_behind_its_first_training_is_of_the_second(tmp_path: Path) -> None:
    flat = HEAD + "".join(
        line[4:] + "\n" for line in (FIRST.format(body="") + SECOND).splitlines() if line.startswith("    ")
    )  # fmt: skip
    (tmp_path / "flat.py").write_text(flat.replace("train_dataset=data", "train_dataset=load()"))
    found = read(tmp_path / "flat.py", None, Given(num_gpus=1, sequence_length=512))
    assert (found.fields["micro_batch_size"], found.lora_rank) == (2, 0)


ONE = HEAD + """{top}
model = AutoModelForCausalLM.from_pretrained(NAME, torch_dtype="bfloat16"{more})
args = SFTConfig(output_dir="a", per_device_train_batch_size=2, bf16=True)
SFTTrainer(model=model, args=args, train_dataset={data}, peft_config={adapters}).train()
{end}
"""


def one(top: str = "", data: str = "load()", end: str = "", more: str = "", adapters: str = "None") -> str:
    return ONE.format(top=top, data=data, end=end, more=more, adapters=adapters)


SHOWN = 'print(max_seq_length)\nname = f"run-{max_seq_length}"\nmodel.generate(max_length=max_seq_length)'


@pytest.mark.parametrize("end", ["", SHOWN])
def test_a_length_that_nothing_reads_is_none(tmp_path: Path, end: str) -> None:
    found = job(tmp_path, one(top="max_seq_length = 2048", end=end))
    assert found.sequence_length == 1024
    assert any("no length is said: sequences are cut at 1024 tokens, as TRL does by itself" in one for one in found.notes)


def test_a_length_that_is_read_counts_and_is_said(tmp_path: Path) -> None:
    found = job(tmp_path, one(top="max_seq_length = 2048\ndata = [row[:max_seq_length] for row in rows]"))
    assert found.sequence_length == 2048 and any("2048 tokens, as its variable max_seq_length says" in one for one in found.notes)


def test_a_module_that_makes_the_data_cuts_it(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(
        "def cut(row):\n    return tokenizer(row['text'], truncation=True, max_length=384)\n"
        "def get_rows():\n    return load_dataset('x').map(cut)\n"
    )
    found = job(tmp_path, one(top="from rows import get_rows", data="get_rows()"))
    assert found.sequence_length == 384 and any("at 384 tokens by the tokenizer in a module" in one for one in found.notes)


@pytest.mark.parametrize(("place", "asked"), [('{"": 0}', False), ('"cuda:0"', False), ('"auto"', True), ('{"": rank}', True)])
def test_a_model_on_one_gpu_by_its_number_is_a_job_of_one(tmp_path: Path, place: str, asked: bool) -> None:
    (tmp_path / "train.py").write_text(one(top="rank = int(os.environ.get('LOCAL_RANK', 0))", more=f", device_map={place}"))
    answers = Given(settings={"loss_type": "nll", "gradient_checkpointing": "false"})
    assert ("accelerate" in asked_of(tmp_path / "train.py", answers)) is asked
    assert read(tmp_path / "train.py", None, answers).num_gpus == (None if asked else 1)


def test_an_answer_that_is_asked_for_is_read(tmp_path: Path) -> None:
    text = """
from unsloth import FastLanguageModel
from trl import SFTTrainer, SFTConfig
parser.add_argument("--max-seq-length", type=int, default=None)
max_seq_length = args.max_seq_length or guess()
model, _ = FastLanguageModel.from_pretrained("meta-llama/Meta-Llama-3-8B", max_seq_length=max_seq_length)
model = FastLanguageModel.get_peft_model(model, r=16)
SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2, max_seq_length=max_seq_length)).train()
"""
    found = job(tmp_path, text, max_seq_length="768")
    assert found.sequence_length == 768 and not [one for one in found.unread if "max_seq_length" in one]


def recipe(folder: Path, text: str, gpus: int = 1) -> Reading:
    (folder / "a.yml").write_text(text)
    return read(folder / "a.yml", "axolotl", Given(num_gpus=gpus))


AXOLOTL = """
datasets: [{path: x}]
sequence_len: 512
micro_batch_size: 2
adapter: lora
lora_r: 8
"""


@pytest.mark.parametrize(("named", "whole"), [
    ("[embed_in, embed_out]", "both"), ("[embed_out]", "head"), ("[output]", "head"), ("[tok_embeddings, output]", "both"),
    ("[embed_tokens]", "embedding"),
])  # fmt: skip
def test_heads_of_other_models_are_heads(tmp_path: Path, named: str, whole: str) -> None:
    text = f"base_model: EleutherAI/pythia-1.4b-deduped\nlora_target_linear: true\nlora_modules_to_save: {named}\n"
    assert recipe(tmp_path, AXOLOTL + text).lora_whole == whole


@pytest.mark.parametrize(("named", "said"), [
    ("[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]", True),
    ("[q_proj, gate_proj, in_proj_qkvz, out_proj]", False),
])  # fmt: skip
def test_adapters_on_the_linear_attention_of_a_hybrid(tmp_path: Path, named: str, said: bool) -> None:
    notes = recipe(tmp_path, AXOLOTL + f"base_model: Qwen/Qwen3.5-27B\nlora_target_modules: {named}\n").notes
    assert any("48 layers of linear attention too, which none of the names says" in one for one in notes) is said


def test_all_linear_layers_of_a_hybrid_are_exact(tmp_path: Path) -> None:
    notes = recipe(tmp_path, AXOLOTL + "base_model: Qwen/Qwen3.5-27B\nlora_target_linear: true\n").notes
    assert not any("linear attention" in one for one in notes if "flash-linear-attention" not in one)


@pytest.mark.parametrize(("model", "said"), [("google/gemma-3-4b-it", True), ("google/gemma-3-1b-it", False)])
def test_an_image_encoder_that_is_not_priced_is_said(tmp_path: Path, model: str, said: bool) -> None:
    notes = recipe(tmp_path, AXOLOTL + f"base_model: {model}\nlora_target_linear: true\n").notes
    assert any("0.42 B weights beside its text model, is not priced" in one for one in notes) is said


def test_words_of_a_program_in_the_place_of_switches_are_asked_about_at_once(tmp_path: Path) -> None:
    text = "base_model: meta-llama/Meta-Llama-3-8B\nbf16: auto\nfp16: auto\nbfloat16: auto\nfloat16: auto\n"
    more = "load_in_4bit: auto\nsample_packing: auto\nflash_attention: auto\nload_in_8bit: mine\n"
    (tmp_path / "a.yml").write_text(AXOLOTL + text + more)
    asked = asked_of(tmp_path / "a.yml", Given(num_gpus=1))
    assert asked["load_in_4bit"] == "it is 'auto'" and asked["load_in_8bit"] == "it is 'mine'"
    assert not {"bf16", "fp16", "bfloat16", "float16"} & asked.keys()
    assert recipe(tmp_path, AXOLOTL + text).precision == "bf16"
