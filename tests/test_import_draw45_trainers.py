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

model = {loads}.from_pretrained("Qwen/Qwen3-0.6B", torch_dtype=torch.float32{precision})
{around}
args = {config}(per_device_train_batch_size=4, gradient_accumulation_steps=2, gradient_checkpointing=True, bf16=True,
    output_dir="out"{words})
Own(model=model, args=args, train_dataset=data{handed}).train()
"""
ONE_PASS, ABOVE = "out = model(**inputs)", "loss = super().compute_loss(model, inputs)"
SFT = {"base": "SFTTrainer", "config": "SFTConfig", "words": ", max_length=2048"}
LEAN = {**SFT, "precision": ", load_in_4bit=False"}
DPO = {"base": "DPOTrainer", "config": "DPOConfig", "words": ", max_length=1024"}
POPPED = "labels = inputs.pop('labels')"


def method(head: str, *lines: str) -> str:
    """A method of a class."""
    return f"    def {head}:\n" + "".join(f"        {one}\n" for one in lines)


def loss(*lines: str) -> str:
    """The one that computes the loss."""
    return method("compute_loss(self, model, inputs, return_outputs=False, **words)", *lines)


def found(folder: Path, body: str, **parts: str) -> Reading:
    """A program with a trainer of its own, on one GPU with sequences of 2048 tokens."""
    usual = {"base": "Trainer", "config": "TrainingArguments", "loads": "AutoModelForCausalLM"}
    parts = {**usual, "before": "", "words": "", "handed": "", "precision": "", "around": "", **parts}
    written(folder, "transformers==4.56.0\ntrl==1.8.0\n", "requirements.txt")
    path = written(folder, PROGRAM.format(**parts, body=body), "train.py")
    return read(path, None, Given(num_gpus=1, sequence_length=2048))


def told(job: Reading) -> list[str]:
    """Notes about methods of the program's own trainer."""
    return [one for one in job.notes if "Own" in one or "program's trainer" in one]


@pytest.mark.parametrize("body", [
    loss(ABOVE, "self.log({'loss': loss.item()})", "return loss * 0.5"),
    loss(ONE_PASS, "return out.loss"),
    loss(POPPED, ONE_PASS, "return F.cross_entropy(out.logits.view(-1, 9), labels.view(-1))"),
    method("log(self, logs)", "print(logs)"),
    method("prediction_step(self, model, inputs, *args)", "return model(**inputs), model(**inputs)"),
    method("training_step(self, model, inputs, n=None)", "loss = self.compute_loss(model, inputs)",
           "self.accelerator.backward(loss)", "return loss.detach()"),
    method("get_train_dataloader(self)", "return DataLoader(self.train_dataset, batch_size=self._train_batch_size)"),
    method("_prepare_inputs(self, inputs)", "return super()._prepare_inputs(inputs)"),
    loss(ABOVE, "with torch.no_grad():", "    n = sum(p.norm() for p in model.parameters())", "return loss"),
    loss(ABOVE, "with torch.no_grad():", "    self.log(dict(p=F.softmax(inputs['a'], -1)))", "return loss"),
])  # fmt: skip
def test_what_decides_nothing_is_quiet(tmp_path: Path, body: str) -> None:
    job = found(tmp_path, body)
    assert (told(job), asked_for(job)) == ([], [])


@pytest.mark.parametrize(("body", "where"), [
    (loss("return self.engine.step(inputs)"), "Own.compute_loss (line 8)"),
    (method("_inner_training_loop(self, *args, **words)", "return go(self.model)"), "Own._inner_training_loop (line 8)"),
    (method("get_train_dataloader(self)", "return DataLoader(self.data, batch_size=32)"), "Own.get_train_dataloader (line 8)"),
    (method("create_accelerator_and_postprocess(self)", "self.accelerator = ours()"), "Own.create_accelerator_and_postprocess"),
    (method("_wrap_model(self, model, *args)", "return Sharded(model)"), "Own._wrap_model (line 8)"),
])  # fmt: skip
def test_a_method_of_the_step_that_is_not_understood_is_named(tmp_path: Path, body: str, where: str) -> None:
    assert any(where in one and "no step that is known was found" in one for one in told(found(tmp_path, body)))


@pytest.mark.parametrize(("line", "said"), [
    ("g = torch.autograd.grad(loss, inputs['x'], create_graph=True)", "takes gradients of its own"),
    ("loss += sum((p - self.old[n]).pow(2).sum() for n, p in model.named_parameters())", "differences, up to 2.2 GiB"),
    ("old = {n: p.detach().clone() for n, p in model.named_parameters()}", "keeps a copy of weights, up to 2.2 GiB"),
    ("g = torch.cat([p.grad.view(-1) for p in model.parameters()])", "copies gradients, up to 2.2 GiB"),
    ("texts = self.model.generate(inputs['input_ids'])", "generates text"),
    ("model.layer.register_forward_hook(keep)", "sets hooks"),
    ("loss = loss + helped(model)", "takes gradients of its own"),
])  # fmt: skip
def test_what_it_keeps_beside_the_step_is_told(tmp_path: Path, line: str, said: str) -> None:
    helper = "def helped(model):\n    model.x.backward(retain_graph=True)\n    return 0\n"
    job = found(tmp_path, loss(ABOVE, line, "return loss"), before=helper)
    assert any(said in one and "Own.compute_loss" in one and "not in the plan" in one for one in told(job))


def test_what_is_around_the_model_is_told(tmp_path: Path) -> None:
    made = f"class Around(torch.nn.Module):\n{method('forward(self, **words)', 'return self.inner(**words)')}"
    job = found(tmp_path, "    pass\n", before=made, around="model = Around(model)")
    assert "Around (line 5) is around the model, with a pass of its own: not in the plan" in job.notes
    assert not any("Around" in one for one in found(tmp_path, "    pass\n", before=made).notes)


def test_scores_that_it_takes_several_times_have_their_bytes(tmp_path: Path) -> None:
    lines = ("p = F.log_softmax(out.logits, -1)", "return out.loss + (p.exp() * p).sum()")
    notes = told(found(tmp_path, loss(ONE_PASS, *lines)))
    assert any("several times" in one and "too low by up to 4.6 GiB" in one for one in notes)
    more = ("if self.plain:", "    return out.loss", "q = F.softmax(out.logits, -1)")
    assert any("too low by up to 9.3 GiB" in one for one in told(found(tmp_path, loss(ONE_PASS, *more, *lines))))
    handed = loss(ONE_PASS, "return self.ours.loss(out.logits, inputs['labels'])")
    assert any("hands the scores to what is not read" in one for one in told(found(tmp_path, handed)))
    module = "class Focal(torch.nn.Module):\n" + method("forward(self, a, b)", "return F.cross_entropy(a, b) * F.softmax(a, -1)")
    held = method("__init__(self, *args, **words)", "super().__init__(*args, **words)", "self.ours = Focal()")
    job = found(tmp_path, held + handed.replace("ours.loss", "ours"), before=module)
    assert any("too low by up to 4.6 GiB" in one for one in told(job)) and not any("hands" in one for one in told(job))


def test_a_loss_over_the_scores_keeps_them_all(tmp_path: Path) -> None:
    body = loss(POPPED, ONE_PASS, "return F.cross_entropy(out.logits.view(-1, 9), labels)")
    kept = found(tmp_path, body, **SFT)
    assert "loss=full" in kept.trainer and not any("pieces" in one for one in kept.notes)
    assert "loss=full" not in found(tmp_path, loss(ABOVE, "return loss"), **SFT).trainer
    assert "fused_linear" not in found(tmp_path, body, words=", use_liger_kernel=True").trainer
    assert "fused_linear" in found(tmp_path, "    pass\n", words=", use_liger_kernel=True").trainer
    lean = found(tmp_path, body, before="from unsloth import FastLanguageModel\n", loads="FastLanguageModel", **LEAN)
    assert any("unsloth's takes in pieces" in one and "too low by up to 11.6 GiB" in one for one in told(lean))


def test_a_function_for_the_loss_takes_all_scores(tmp_path: Path) -> None:
    assert "loss=full" in found(tmp_path, "    pass\n", handed=", compute_loss_func=ours", **SFT).trainer
    assert "loss=full" not in found(tmp_path, "    pass\n", handed=", compute_loss_func=None", **SFT).trainer


def test_classes_are_followed_through_others_and_other_names(tmp_path: Path) -> None:
    twice = "class Between(Ours):\n" + loss("return model(**inputs).loss + model(**inputs).loss")
    above = {"base": "Between", "before": f"from transformers import Trainer as Ours\n{twice}"}
    assert asked_for(found(tmp_path, "    pass\n", **above)) == ["compute_loss"]
    assert asked_for(found(tmp_path, loss(ONE_PASS, "return out.loss"), **above)) == []
    deep = method("helped(self, model, inputs)", "return self.inner(model, inputs) + self.inner(model, inputs)")
    deep += method("inner(self, model, inputs)", "return model(**inputs).loss")
    assert asked_for(found(tmp_path, loss("return self.helped(model, inputs)") + deep)) == ["compute_loss"]


def test_the_pass_of_the_reference_is_that_of_dpo(tmp_path: Path) -> None:
    policy, reference = "new = self.concatenated_forward(model, batch)", "    old = self.concatenated_forward(self.model, batch)"
    step = (policy, "with torch.no_grad():", reference, "return new - old, {}")
    head, forward = "get_batch_loss_metrics(self, model, batch)", "concatenated_forward(self, model, batch)"
    plain, whole = (method(forward, f"return model(**batch).logits{one}") for one in ("", ".log_softmax(-1)"))
    job = found(tmp_path, method(head, *step) + plain, **DPO)
    assert (job.objective, asked_for(job), told(job)) == ("dpo", [], [])
    notes = told(found(tmp_path, method(head, *step) + whole, **DPO))
    assert any("Own.concatenated_forward (line 13) takes log probabilities of all scores at once" in one for one in notes)
    assert asked_for(found(tmp_path, method(head, policy, *step) + plain, **DPO)) == ["get_batch_loss_metrics"]


def test_a_command_trains_pairs_by_the_class_that_its_program_derives(tmp_path: Path) -> None:
    found(tmp_path, "    pass\n", **DPO)
    text = (tmp_path / "train.py").read_text()
    start, end = text.index("DPOConfig(per"), text.index('"out"')
    parsed = "HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()[0]"
    written(tmp_path, text[:start] + parsed + text[text.index("\n", end):], "go.py")
    run = "python go.py --per_device_train_batch_size 2 --bf16 --gradient_checkpointing --output_dir out --max_length 512\n"
    assert read(written(tmp_path, run, "run.sh"), None, Given(num_gpus=1, sequence_length=512)).objective == "dpo"


def test_an_optimizer_beside_its_scheduler_is_read(tmp_path: Path) -> None:
    body = method("create_optimizer_and_scheduler(self, n)", "self.optimizer = torch.optim.SGD(self.model.parameters())")
    assert found(tmp_path, body).optimizer != found(tmp_path, "    pass\n").optimizer
