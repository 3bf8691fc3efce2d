"""Trainers that a program derives: what their methods keep beside the step of the library, and methods that are not understood."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

PROGRAM = """import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer, DPOConfig, DPOTrainer
{before}

class Own({base}):
{body}

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", torch_dtype=torch.float32)
args = {config}(per_device_train_batch_size=4, gradient_accumulation_steps=2, gradient_checkpointing=True, bf16=True,
    output_dir="out"{words})
{made}(model=model, args=args, train_dataset=data).train()
"""
LOSS = "    def compute_loss(self, model, inputs, return_outputs=False, **words):\n"
ONE_PASS = "        out = model(**inputs)\n"
CALLS_ABOVE = "        loss = super().compute_loss(model, inputs)\n"


def found(folder: Path, body: str, settings: dict[str, str] | None = None, **parts: str) -> Reading:
    """A program with a trainer of its own, on one GPU with sequences of 2048 tokens."""
    usual = {"base": "Trainer", "config": "TrainingArguments", "made": "Own", "before": "", "words": ""}
    written(folder, "transformers==4.56.0\ntrl==1.8.0\n", "requirements.txt")
    text = PROGRAM.format(**{**usual, **parts, "body": body})
    return read(written(folder, text, "train.py"), None, Given(num_gpus=1, sequence_length=2048, settings=settings or {}))


def told(job: Reading) -> list[str]:
    """Notes about methods of the program's own trainer."""
    return [one for one in job.notes if "Own" in one or "program's trainer" in one]


@pytest.mark.parametrize("body", [
    f"{LOSS}{CALLS_ABOVE}        self.log({{'loss': loss.item()}})\n        return loss * 0.5\n",
    f"{LOSS}{ONE_PASS}        return out.loss\n",
    f"{LOSS}        labels = inputs.pop('labels')\n{ONE_PASS}        return F.cross_entropy(out.logits.view(-1, 9), labels.view(-1))\n",
    "    def log(self, logs):\n        print(logs)\n",
    "    def prediction_step(self, model, inputs, *args):\n        return model(**inputs), model(**inputs)\n",
    "    def training_step(self, model, inputs, n=None):\n        loss = self.compute_loss(model, inputs)\n"
    "        self.accelerator.backward(loss)\n        return loss.detach()\n",
    "    def get_train_dataloader(self):\n        return DataLoader(self.train_dataset, batch_size=self._train_batch_size)\n",
    "    def _prepare_inputs(self, inputs):\n        return super()._prepare_inputs(inputs)\n",
    f"{LOSS}{CALLS_ABOVE}        with torch.no_grad():\n            self.log(dict(p=F.softmax(inputs['a'], -1)))\n        return loss\n",
])  # fmt: skip
def test_what_decides_nothing_is_quiet(tmp_path: Path, body: str) -> None:
    job = found(tmp_path, body)
    assert (told(job), asked_for(job)) == ([], [])


@pytest.mark.parametrize(("body", "where"), [
    (f"{LOSS}        return self.engine.step(inputs)\n", "Own.compute_loss (line 8)"),
    ("    def _inner_training_loop(self, *args, **words):\n        return go(self.model)\n", "Own._inner_training_loop (line 8)"),
    ("    def get_train_dataloader(self):\n        return DataLoader(self.train_dataset, batch_size=32)\n", "Own.get_train_dataloader"),
    ("    def create_accelerator_and_postprocess(self):\n        self.accelerator = ours(self.args)\n", "create_accelerator_and_post"),
    ("    def _wrap_model(self, model, *args):\n        return Sharded(model)\n", "Own._wrap_model (line 8)"),
])  # fmt: skip
def test_a_method_of_the_step_that_is_not_understood_is_named(tmp_path: Path, body: str, where: str) -> None:
    assert any(where in one and "no step that is known was found" in one for one in told(found(tmp_path, body)))


@pytest.mark.parametrize(("lines", "said"), [
    ("        g = torch.autograd.grad(loss, inputs['x'], create_graph=True)\n", "takes gradients of its own"),
    ("        loss = loss + sum((p - self.old[n]).pow(2).sum() for n, p in model.named_parameters())\n", "differences, up to 2.2 GiB"),
    ("        old = {n: p.detach().clone() for n, p in model.named_parameters()}\n", "keeps a copy of weights, up to 2.2 GiB"),
    ("        g = torch.cat([p.grad.view(-1) for p in model.parameters()])\n", "copies gradients, up to 2.2 GiB"),
    ("        texts = self.model.generate(inputs['input_ids'])\n", "generates text"),
    ("        model.layer.register_forward_hook(keep)\n", "sets hooks"),
    ("        loss = loss + helped(model)\n", "takes gradients of its own"),
])  # fmt: skip
def test_what_it_keeps_beside_the_step_is_told(tmp_path: Path, lines: str, said: str) -> None:
    helper = "def helped(model):\n    model.x.backward(retain_graph=True)\n    return 0\n"
    job = found(tmp_path, f"{LOSS}{CALLS_ABOVE}{lines}        return loss\n", before=helper)
    assert any(said in one and "Own.compute_loss" in one and "not in the plan" in one for one in told(job))


def test_scores_that_it_takes_several_times_have_their_bytes(tmp_path: Path) -> None:
    body = f"{LOSS}{ONE_PASS}        p = F.log_softmax(out.logits, -1)\n        return out.loss + (p.exp() * p).sum()\n"
    assert any("several times" in one and "too low by up to 4.6 GiB" in one for one in told(found(tmp_path, body)))
    with_branches = body.replace("        p = ", "        if self.plain:\n            return out.loss\n        q = F.softmax(out.logits, -1)\n        p = ")
    assert any("too low by up to 9.3 GiB" in one for one in told(found(tmp_path, with_branches)))
    handed = f"{LOSS}{ONE_PASS}        return self.ours.loss(out.logits, inputs['labels'])\n"
    assert any("hands the scores to what is not read" in one for one in told(found(tmp_path, handed)))
    module = "class Focal(torch.nn.Module):\n    def forward(self, a, b):\n        return F.cross_entropy(a, b) * F.softmax(a, -1)\n"
    held = "    def __init__(self, *args, **words):\n        super().__init__(*args, **words)\n        self.ours = Focal()\n"
    job = found(tmp_path, held + handed.replace("ours.loss", "ours"), before=module)
    assert any("too low by up to 4.6 GiB" in one for one in told(job)) and not any("hands" in one for one in told(job))


def test_a_loss_over_the_scores_keeps_them_all(tmp_path: Path) -> None:
    body = f"{LOSS}        labels = inputs.pop('labels')\n{ONE_PASS}        return F.cross_entropy(out.logits.view(-1, 9), labels)\n"
    trl = {"base": "SFTTrainer", "config": "SFTConfig", "words": ", max_length=2048"}
    kept = found(tmp_path, body, **trl)
    assert "loss=kept" in kept.trainer and not any("pieces" in one for one in kept.notes)
    assert "loss=kept" not in found(tmp_path, f"{LOSS}{CALLS_ABOVE}        return loss\n", **trl).trainer
    fused = found(tmp_path, body, words=", use_liger_kernel=True")
    assert "fused_linear" not in fused.trainer
    assert "fused_linear" in found(tmp_path, "    pass\n", words=", use_liger_kernel=True").trainer
    handed = found(tmp_path, "    pass\n", made="from_ours = dict(compute_loss_func=ours)\nOwn", words=", use_liger_kernel=True")
    assert "fused_linear" in handed.trainer


def test_a_function_for_the_loss_takes_all_scores(tmp_path: Path) -> None:
    written(tmp_path, "transformers==4.56.0\ntrl==1.8.0\n", "requirements.txt")
    text = PROGRAM.format(base="SFTTrainer", config="SFTConfig", made="SFTTrainer", before="", words="", body="    pass\n")
    path = written(tmp_path, text.replace("args=args,", "args=args, compute_loss_func=ours,"), "train.py")
    assert "loss=kept" in read(path, None, Given(num_gpus=1, sequence_length=2048)).trainer


def test_classes_are_followed_through_others_and_other_names(tmp_path: Path) -> None:
    twice = f"class Between(Ours):\n{LOSS}        return model(**inputs).loss + model(**inputs).loss\n"
    imports = "from transformers import Trainer as Ours\n"
    assert asked_for(found(tmp_path, "    pass\n", base="Between", before=imports + twice)) == ["compute_loss"]
    again = f"{LOSS}{ONE_PASS}        return out.loss\n"
    assert asked_for(found(tmp_path, again, base="Between", before=imports + twice)) == []
    deep = "    def helped(self, model, inputs):\n        return self.inner(model, inputs) + self.inner(model, inputs)\n"
    deep += "    def inner(self, model, inputs):\n        return model(**inputs).loss\n"
    assert asked_for(found(tmp_path, f"{LOSS}        return self.helped(model, inputs)\n{deep}")) == ["compute_loss"]


def test_the_pass_of_the_reference_is_that_of_dpo(tmp_path: Path) -> None:
    body = """    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        new = self.concatenated_forward(model, batch)
        with torch.no_grad():
            old = self.concatenated_forward(self.model, batch)
        return new - old, {}

    def concatenated_forward(self, model, batch):
        return model(**batch).logits
"""
    job = found(tmp_path, body, base="DPOTrainer", config="DPOConfig", words=", max_length=1024")
    assert (job.objective, asked_for(job)) == ("dpo", [])
    third = body.replace("        return new", "        more = self.concatenated_forward(model, batch)\n        return new")
    assert asked_for(found(tmp_path, third, base="DPOTrainer", config="DPOConfig", words=", max_length=1024")) == [
        "get_batch_loss_metrics"
    ]
    text = PROGRAM.format(base="DPOTrainer", config="DPOConfig", made="Own", before="", words="", body="    pass\n")
    written(tmp_path, text.replace('DPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2, gradient_checkpointing=True, bf16=True,\n    output_dir="out")', "HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()[0]"), "go.py")
    run = "python go.py --per_device_train_batch_size 2 --bf16 --gradient_checkpointing --output_dir out --max_length 512\n"
    assert read(written(tmp_path, run, "run.sh"), None, Given(num_gpus=1, sequence_length=512)).objective == "dpo"


def test_an_optimizer_beside_its_scheduler_is_read(tmp_path: Path) -> None:
    body = "    def create_optimizer_and_scheduler(self, num_training_steps):\n        self.optimizer = torch.optim.SGD(self.model.parameters())\n"
    assert found(tmp_path, body).optimizer != found(tmp_path, "    pass\n").optimizer
