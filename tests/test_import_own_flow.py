"""What a program does to its model between its load and the trainer: read, or named in a note; what changes nothing is silent."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

PROGRAM = """import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
{above}
name = "meta-llama/Llama-3.1-8B"
model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16, attn_implementation="sdpa")
tokenizer = AutoTokenizer.from_pretrained(name)
{between}
more = dict(gradient_checkpointing=True, optim="adamw_torch")
args = TrainingArguments(output_dir="out", per_device_train_batch_size=2, bf16=True, **more)
tokens = tokenizer("text", truncation=True, max_length=2048)
trainer = Trainer(model=model, args=args, train_dataset=data)
{behind}
trainer.train()
"""
ADAPTERS = 'model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))\n'
NOT_READ = "not read: what"


def found(folder: Path, between: str = "", above: str = "", behind: str = "") -> Reading:
    """A program with lines above its load, between load and trainer, and behind the trainer."""
    text = PROGRAM.format(above=above, between=between, behind=behind)
    return read(written(folder, text, "train.py"), None, Given(num_gpus=1))


def passed_over(job: Reading) -> str:
    """The note about what is not read."""
    return "".join(one for one in job.notes if NOT_READ in one)


@pytest.mark.parametrize(
    ("between", "above"),
    [
        ("other = model\nother.to(torch.float32)", ""),
        ("model = cast(model)", "def cast(net):\n    return net.to(torch.float32)\n"),
        ("model = cast(model)", "def cast(net):\n    net.float()\n    return net\n"),
        ("cast(model)", "def cast(net):\n    for one in net.parameters():\n        one.data = one.data.float()\n"),
        ("for one in model.parameters():\n    if one.requires_grad:\n        one.data = one.data.to(torch.float32)", ""),
    ],
)
def test_a_cast_under_another_name_or_in_a_function_is_read(tmp_path: Path, between: str, above: str) -> None:
    assert found(tmp_path).precision == "bf16_true"
    assert (job := found(tmp_path, between, above)).precision == "bf16"
    assert passed_over(job) == ""


FLASH = "def forward(self, x):\n    return flash_attn_func(x)\ndef fast():\n    LlamaAttention.forward = forward\nfast()"


@pytest.mark.parametrize(("between", "above"), [
    ("watch.setattr(name='x', value=2)\nsetattr(**words)", ""), ("setattr(model, 'head', model.lm_head)", ""), ("", FLASH),
    ("apply_liger_kernel_to_llama(model=model)", ""),
])  # fmt: skip
def test_another_name_of_a_part_and_flash_attention_are_silent(tmp_path: Path, between: str, above: str) -> None:
    assert passed_over(found(tmp_path, between, above)) == ""


def test_a_cast_of_a_part_or_behind_adapters_is_not_one_of_the_model(tmp_path: Path) -> None:
    job = found(tmp_path, "model.lm_head = model.lm_head.float()")
    assert job.precision == "bf16_true"
    assert "'model.lm_head = model.lm_head.float()' (line 8) is not read" in passed_over(job)
    trained = "for one in model.parameters():\n    if one.requires_grad:\n        one.data = one.data.to(torch.float32)"
    assert (job := found(tmp_path, ADAPTERS + trained)).frozen_weights == "bf16"
    assert passed_over(job) == ""


@pytest.mark.parametrize(
    ("lines", "whole"),
    [
        ('for key, one in model.named_parameters():\n    if "lm_head" in key:\n        one.requires_grad = True', "head"),
        ("for one in model.get_input_embeddings().parameters():\n    one.requires_grad_(True)", "embedding"),
        ("model.get_input_embeddings().requires_grad_(True)\nmodel.get_output_embeddings().requires_grad_(True)", "both"),
        ('for key, one in model.named_parameters():\n    if "norm" in key:\n        one.requires_grad = True', "none"),
        ('for key, one in model.named_parameters():\n    if "lm_head" not in key:\n        one.requires_grad = True', "none"),
    ],
)
def test_tables_that_are_trained_beside_adapters_are_priced(tmp_path: Path, lines: str, whole: str) -> None:
    job = found(tmp_path, ADAPTERS + lines)
    assert (job.lora_rank, job.lora_whole) == (16, whole)


def test_weights_are_frozen_by_setattr_too(tmp_path: Path) -> None:
    job = found(tmp_path, 'for one in model.model.layers.parameters():\n    setattr(one, "requires_grad", False)')
    assert "requires_grad" in asked_for(job)


@pytest.mark.parametrize("line", ["trainer.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)",
                                  'trainer.optimizer_cls_and_kwargs = (torch.optim.SGD, {"lr": 1e-3})'])  # fmt: skip
def test_an_optimizer_that_is_set_on_the_trainer_is_read(tmp_path: Path, line: str) -> None:
    job = found(tmp_path, behind=line)
    assert (job.optimizer, job.unread) == ("sgd", ())


def test_a_model_that_compiles_itself_is_compiled(tmp_path: Path) -> None:
    assert "compile=on" in found(tmp_path, "model.compile()").trainer
    assert "compile=on" not in found(tmp_path, 'import re\npattern = re.compile("model")').trainer


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("prune_heads(model)", "'prune_heads(model)' (line 8)"),
        ("model = Wrapped(model)", "'Wrapped(model)' (line 8)"),
        ("model.prune_heads({0: [1]})", "'model.prune_heads()' (line 8)"),
        ("model.model.layers = model.model.layers[:8]", "'model.model.layers = model.model.layers[:8]' (line 8)"),
        ("del model.model.layers[8:]", "'del model.model.layers[8:]' (line 8)"),
        ("model.lm_head = Ours(model.lm_head)", "'model.lm_head = Ours(model.lm_head)' (line 8)"),
        ("for one in model.modules():\n    setattr(one, 'inner', Ours(one.inner))", '"setattr(one, \'inner\')" (line 9)'),
        ("model.config._attn_implementation = 'eager'", '"model.config._attn_implementation = \'eager\'" (line 8)'),
        ("replace_llama_attn()", "'replace_llama_attn()' (line 8)"),
        ("LlamaMLP.forward = ours", "'LlamaMLP.forward = ours' (line 8)"),
    ],
)
def test_what_is_done_to_a_model_that_nobody_reads_is_named(tmp_path: Path, line: str, named: str) -> None:
    said = f"{named} is not read: what it changes of the model or its step is not in the plan"
    assert passed_over(found(tmp_path, line)) == said


def test_a_loss_that_is_set_on_the_trainer_is_named_and_many_are_counted(tmp_path: Path) -> None:
    job = found(tmp_path, behind="trainer.compute_loss = ours")
    assert "'trainer.compute_loss = ours' (line 13) is not read" in passed_over(job)
    assert job.unread == ()
    four = "\n".join(f"change_{one}(model)" for one in "abcd")
    assert "'change_c(model)' (line 10) and 1 more are not read: what they change" in passed_over(found(tmp_path, four))


@pytest.mark.parametrize(
    "lines",
    [
        "model.config.use_cache = False\nmodel.config.pad_token_id = tokenizer.pad_token_id",
        "model.enable_input_require_grads()\nmodel.print_trainable_parameters()\nprint(model)",
        "tokenizer.add_special_tokens({'pad_token': '<pad>'})\nmodel.resize_token_embeddings(len(tokenizer))",
        "model.is_parallelizable = True\nmodel.model_parallel = True",
        "print(sum(one.numel() for one in model.parameters()), next(model.parameters()).device)",
        "collator = DataCollatorForSeq2Seq(tokenizer, model=model)\nsave_model(model, 'out')\nlog_dtypes(model)",
        "for one in model.modules():\n    if hasattr(one, 'dropout'):\n        setattr(one, 'dropout', 0.0)",
        "def shown(net):\n    for key, one in net.named_parameters():\n        print(key, one.shape)\n\nshown(model)",
        "replace_llama_attn_with_flash_attn()",
        "def never(net):\n    change(net)",
        ADAPTERS + "model.train()",
    ],
)
def test_what_changes_nothing_that_decides_is_silent(tmp_path: Path, lines: str) -> None:
    assert passed_over(found(tmp_path, lines)) == ""


def test_a_name_that_holds_the_name_of_the_model_before_is_not_the_model(tmp_path: Path) -> None:
    assert passed_over(found(tmp_path, above="model = 'meta-llama/Llama-3.1-8B'\nprepared_data(model)\nmodel.casefold()")) == ""


def test_what_stands_behind_the_training_is_silent(tmp_path: Path) -> None:
    assert passed_over(found(tmp_path, behind="trainer.train()\nmodel = merged(model)\nquantised(model)")) == ""


def test_a_function_of_the_project_that_is_given_the_model_is_followed(tmp_path: Path) -> None:
    written(tmp_path, "def settled(net):\n    net.float()\n    net.model.norm = Ours(net.model.norm)\n    return net\n", "parts.py")
    job = found(tmp_path, "model = settled(model)", "from parts import settled")
    assert job.precision == "bf16"
    assert passed_over(job).startswith("'net.model.norm = Ours(net.model.norm)' is not read")


def test_a_program_of_a_command_is_followed_too(tmp_path: Path) -> None:
    text = PROGRAM.format(above="from transformers import HfArgumentParser", between="prune_heads(model)", behind="")
    made = text[text.index("args = Trai") : text.index("tokens = ")]
    written(tmp_path, text.replace(made, "args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"), "train.py")
    run = "python train.py --per_device_train_batch_size 2 --bf16 --output_dir out --optim adamw_torch"
    job = read(written(tmp_path, run, "run.sh"), None, Given(num_gpus=1))
    assert "'prune_heads(model)' (line 8) is not read" in passed_over(job)


def test_many_names_and_functions_take_no_time(tmp_path: Path) -> None:
    """Names against the order of the text, functions that hand the model on, a long function under a name of the module."""
    names = "\n".join(f"m{i} = m{i + 1}" for i in range(2000)) + "\nm2000 = model"
    functions = "\n".join(f"def f{i}(net):\n    return f{i + 1}(net)" for i in range(600)) + "\ndef f600(net):\n    return net\n"
    long = "def g():\n" + "\n".join(f"    x{i} = model" for i in range(3000)) + "\n"
    assert passed_over(found(tmp_path, f"{names}\nmodel = f0(model)", functions + long)) == ""


@pytest.mark.parametrize("line", ["setattr(**words)", 'monkeypatch.setattr(name="x", value=2)', "setattr(*words)"])
def test_setattr_of_what_is_not_written_out_is_no_error(tmp_path: Path, line: str) -> None:
    assert found(tmp_path, line).lora_rank == 0
