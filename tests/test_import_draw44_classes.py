"""Programs that derive the class of their model themselves: what it is loaded with, its loss, and tokens that they add."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

LAUNCH = """python train.py --model_name_or_path Qwen/Qwen3-0.6B --per_device_train_batch_size 2 --gradient_accumulation_steps 4 \\
  --bf16 --block_size 4096 --weights bfloat16 --output_dir out"""
PROGRAM = """from dataclasses import dataclass, field
import torch
from transformers import AutoTokenizer, HfArgumentParser, Qwen3ForCausalLM, Trainer, TrainingArguments
{imports}

@dataclass
class Ours:
    model_name_or_path: str = field(default=None)
    block_size: int = field(default=1024)
    weights: str = field(default="float32")
    use_liger: bool = field(default=True)

class Plain(Qwen3ForCausalLM):
    def forward(self, input_ids, labels=None, **kwargs):
        states = self.model(input_ids, **kwargs).last_hidden_state
        loss = picked(self.lm_head.weight, states, labels)
        return {{"loss": loss}}

class Own(Qwen3ForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        {made}

    def forward(self, input_ids, labels=None, **kwargs):
        {forward}

def main():
    ours, args = HfArgumentParser((Ours, TrainingArguments)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(ours.model_name_or_path)
{tokens}
    {load}
    Trainer(model=model, args=args, train_dataset=data).train()

main()
"""
OURS = {
    "imports": "from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss",
    "made": "self.head_loss = LigerFusedLinearCrossEntropyLoss()",
    "forward": "states = self.model(input_ids).last_hidden_state\n"
    "        loss = self.head_loss(self.lm_head.weight, states, labels)\n        return {'loss': loss}",
    "tokens": "",
    "load": "model = Own.from_pretrained(ours.model_name_or_path, torch_dtype=ours.weights, attn_implementation='sdpa')",
}


def found(folder: Path, launch: str = LAUNCH, settings: dict[str, str] | None = None, **parts: str) -> Reading:
    """A command and its program, with the user's answers."""
    written(folder, PROGRAM.format(**{**OURS, **parts}), "train.py")
    said = Given(num_gpus=1, settings=settings or {})
    return read(written(folder, launch, "run.sh"), None, said)


def test_a_class_derived_in_the_program_is_loaded_as_it_says(tmp_path: Path) -> None:
    job = found(tmp_path)
    assert (job.precision, "loss=fused_linear" in job.trainer, job.questions) == ("bf16_true", True, ())
    fp32 = found(tmp_path, LAUNCH.replace(" --weights bfloat16", ""))
    assert (fp32.precision, "loss=fused_linear" in fp32.trainer) == ("bf16", True)


@pytest.mark.parametrize("name", ["Own", "Derived"])
def test_a_class_of_another_module_too(tmp_path: Path, name: str) -> None:
    text = f"from transformers import LlamaForCausalLM\nclass {name}(LlamaForCausalLM):\n    pass\n"
    written(tmp_path, text, "models.py")
    load = OURS["load"].replace("Own.", "Derived.")
    if name == "Own":  # one that is not there, of a name that says nothing
        load = load.replace("Derived.", "Elsewhere.")
    job = found(tmp_path, imports="from models import Derived", made="pass", load=load)
    assert job.precision == "bf16_true"


def test_what_is_loaded_beside_a_model_is_none(tmp_path: Path) -> None:
    load = "vae = AutoencoderKL.from_pretrained('x', torch_dtype=torch.bfloat16)\n    model = build()"
    assert found(tmp_path, load=load).precision == "bf16"


def test_layers_that_it_adds_are_asked_for(tmp_path: Path) -> None:
    assert asked_for(found(tmp_path)) == []
    assert asked_for(found(tmp_path, made="self.gate = torch.nn.Linear(8, 8)")) == ["--model NAME"]


@pytest.mark.parametrize(
    ("forward", "fused", "noted"),
    [
        ("loss = linear_cross_entropy(states, self.lm_head.weight, labels)\n        return {'loss': loss}", True, False),
        ("loss = pieces(self.model(input_ids), self.lm_head.weight, labels)\n        return {'loss': loss}", False, True),
        ("out = super().forward(input_ids, labels=labels)\n        loss = out.loss * 2\n        return loss", False, False),
        ("logits = self.lm_head(self.model(input_ids))\n        loss = entropy(logits, labels)\n        return loss", False, False),
        ("loss = 0\n        for i in range(8):\n            loss = loss + ce(self.lm_head(h))\n        return loss", False, True),
        ("return super().forward(input_ids, labels=labels)", False, False),
    ],
)  # fmt: skip
def test_a_loss_of_its_own(tmp_path: Path, forward: str, fused: bool, noted: bool) -> None:
    job = found(tmp_path, made="pass", forward=forward)
    assert ("loss=fused_linear" in job.trainer) is fused
    assert any("computes the loss of its model itself: all scores are priced" in one for one in job.notes) is noted
    if noted:
        assert "loss=fused_linear" in found(tmp_path, made="pass", forward=forward, settings={"own_loss": "fused"}).trainer


def test_a_loss_of_its_trainer(tmp_path: Path) -> None:
    text = "\nclass Trains(Trainer):\n    def compute_loss(self, model, inputs):\n        return %s(model.lm_head.weight, inputs)\n"
    load = OURS["load"].replace("Own.", "Qwen3ForCausalLM.")
    parts = {"made": "pass", "forward": "return 0", "load": load}
    for loss, fused in (("LigerFusedLinearCrossEntropyLoss()", True), ("linear_cross_entropy", True), ("in_pieces", False)):
        written(tmp_path, PROGRAM.format(**{**OURS, **parts}).replace("\ndef main", text % loss + "\ndef main").replace(
            "    Trainer(", "    Trains("), "train.py")  # fmt: skip
        job = read(written(tmp_path, LAUNCH, "run.sh"), None, Given(num_gpus=1))
        assert ("loss=fused_linear" in job.trainer) is fused
        assert any("computes the loss of its model itself" in one for one in job.notes) is not fused


def test_a_switch_of_the_program_means_what_the_program_does(tmp_path: Path) -> None:
    choice = "if ours.use_liger:\n        model_class = Own\n    else:\n        model_class = Plain\n    "
    load = f"{choice}model = model_class.from_pretrained(ours.model_name_or_path, dtype='bfloat16')"
    assert "loss=fused_linear" in found(tmp_path, load=load).trainer
    off = found(tmp_path, f"{LAUNCH} --use_liger false", load=load)
    assert "loss=fused_linear" not in off.trainer
    assert any("computes the loss of its model itself" in one for one in off.notes)


def test_kernels_of_layers_alone_are_noted(tmp_path: Path) -> None:
    imports = f"{OURS['imports']}\napply_liger_kernel_to_qwen3(rope=False, swiglu=True, fused_linear_cross_entropy=False)"
    job = found(tmp_path, imports=imports)
    assert any(one.startswith("Liger's norms and SwiGLU: priced as those of torch") for one in job.notes)
    assert not any("liger" in one for one in job.unread)


@pytest.mark.parametrize(
    ("tokens", "count"),
    [
        ("    extra = ['<a>']\n    for i in range(4096):\n        extra.append(f'<{i}>')\n    tokenizer.add_tokens(extra)", 4097),
        ("    tokenizer.add_tokens([f'<{i}>' for i in range(2000)])", 2000),
        ("    tokenizer.add_special_tokens({'additional_special_tokens': [f'<{i}>' for i in range(1, 3001)]})", 3000),
        ("    tokenizer.add_tokens(read('words.txt'))", True),
        ("    tokenizer.add_special_tokens({'pad_token': '<pad>'})", 0),
        ("    tokenizer.add_tokens(['<a>', '<b>'])", 0),
    ],
)
def test_tokens_that_it_adds(tmp_path: Path, tokens: str, count: int) -> None:
    job = found(tmp_path, tokens=f"{tokens}\n", load=f"{OURS['load']}\n    model.resize_token_embeddings(len(tokenizer))")
    many = count is not True and count > 0
    assert job.architecture == ({"vocab_size": 151936 + count} if many else {})
    assert any(f"{count:,} of them tokens that the program adds" in one for one in job.notes) is many
    unknown = [one for one in job.notes if one.startswith("the program adds tokens and resizes the tables")]
    assert bool(unknown) is (count is True)
    assert all("too low by up to 0.12 GiB for each 1,000 of them; --set added_tokens=N" in one for one in unknown)
    assert not found(tmp_path, tokens=f"{tokens}\n").architecture  # the tables stay as they are
    said = {"added_tokens": "5000"}
    if unknown:
        load = f"{OURS['load']}\n    model.resize_token_embeddings(len(tokenizer))"
        assert found(tmp_path, tokens=f"{tokens}\n", load=load, settings=said).architecture == {"vocab_size": 156936}
