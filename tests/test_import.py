"""``plan import``: what an export wrote, and what people wrote, read back as a plan by the command."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from trainers.plans import Wanted, found

from planner.errors import PlannerError
from planner.plan_file import load_plan
from planner.trainers.bundle.target import ExportJob
from planner.trainers.reading import read
from planner.trainers.reading.configuration import to_plan
from planner.trainers.reading.given import Given
from planner.trainers.targets import load_target

FILES = {
    "megatron": ("megatron", "arguments.sh"),
    "torchtitan": ("torchtitan", "plan_config.py"),
    "deepspeed": ("deepspeed", "ds_config.json"),
    "nanotron": ("nanotron", "nanotron.yaml"),
}
FREE = {"zero", "order", "cp_method", "first_stage_layers", "last_stage_layers"}
"""Fields that a configuration of one degree does not say, and layers of end stages, which may be said in two ways."""


HOST = {
    "megatron": ("--offload-activations", "--offload-layers", "8", "--sequence-length", "8192", "--tp", "4"),
    "torchtitan": ("--offload-parameters",),
    "deepspeed": ("--offload-parameters", "--recompute", "full"),
}
"""What may wait in host memory."""


@pytest.mark.parametrize(("target", "pins"), [*((one, ()) for one in FILES), *HOST.items()])
def test_export_then_import_is_the_same_plan(target, pins, run, tmp_path):
    trainer, file = FILES[target]
    first, back, folder = tmp_path / "plan.yaml", tmp_path / "back.yaml", tmp_path / "run"
    assert run("--model", "llama-8b", "--gpus", "16", "--trainer", trainer, *pins, "--output", str(first)).exit_code == 0
    assert run("export", str(first), "--to", target, "--output", str(folder)).exit_code == 0
    said = ["--model", "llama-8b", "--gpus", "16", "--sequence-length", "8192"] if target != "megatron" else []
    result = run("import", str(folder / file), *said, "--output", str(back))
    assert result.exit_code == 0, result.output
    before, after = load_plan(first), load_plan(back)
    kept = {name for name in before.layout.to_dict() if name not in FREE}
    assert {n: before.layout.to_dict()[n] for n in kept} == {n: after.layout.to_dict()[n] for n in kept}
    assert after.workload.global_batch_size == before.workload.global_batch_size
    assert after.prediction.step_time_s == pytest.approx(before.prediction.step_time_s, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "a.json",
            "{",
            "looks like no configuration of ",
        ),
        (
            "ds.json", '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}',
            "say --gpus N (the number of GPUs does not follow from the batch keys: they share 8 micro batches)",
        ),
        ("a.sh", "--num-layers 4 --hidden-size 8", "without it there is no plan: --num-attention-heads is missing"),
    ],
)
def test_what_cannot_be_read_gets_a_sentence(name: str, text: str, says: str, run, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    result = run("import", str(tmp_path / name))
    assert result.exit_code == 2 and says in result.output and "Traceback" not in result.output


# ------------------------------------------------------------------------------------------------ a training log

LOG = Path(__file__).parent / "trainers" / "megatron-0.19.2-arguments.log"
"""What Megatron-LM 0.19.2 printed of its arguments for Llama 3.1 70B on 64 GPUs: its own _print_args, after its validation."""


@pytest.mark.parametrize("label", ("", "0: ", "[default0]:", "2026-11-20 09:12:44 node17: "))
def test_a_training_log_is_a_plan(label: str, run, tmp_path: Path) -> None:
    """The head of a log as launchers label its lines, among lines of other programs."""
    around = "NCCL INFO Bootstrap: Using eth0\n", "[2026-11-20 09:13:02] iteration 1/ 10 | loss: 1.2\n"
    log, out = tmp_path / "slurm-1234.log", tmp_path / "plan.yaml"
    log.write_text(around[0] + "".join(f"{label}{line}\n" for line in LOG.read_text().splitlines()) + around[1])
    result = run("import", str(log), "--hardware", "h100-sxm", "--output", str(out))
    assert result.exit_code == 0, result.output
    plan = load_plan(out)
    layout, work = plan.layout.to_dict(), plan.workload
    assert (work.model.name, plan.num_gpus, work.sequence_length) == ("llama-3.1-70b", 64, 8192)
    said = {name: int(re.search(rf"^  {name} \.+ (\d+)$", LOG.read_text(), re.M)[1]) for name in (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "micro_batch_size",
        "data_parallel_size", "global_batch_size")}  # fmt: skip
    assert [layout[name] for name in ("tp", "pp", "cp", "micro_batch_size", "dp")] == list(said.values())[:5]
    assert work.global_batch_size == said["global_batch_size"]
    assert (layout["first_stage_layers"], layout["last_stage_layers"]) == (19, 19)  # Et*19|(t*21|)*2t*19L


# ------------------------------------------------------------------------------------------------ whatever a file holds


WEIRD = (
    "0",
    "-1",
    "1e400",
    "9" * 30,
    "1.5",
    "true",
    "null",
    "'x'",
    "[1, 2]",
    "{}",
    "nan",
    "",
    "\x00",
    "9" * 5000,
    "[[[[",
    "2**100",
)


def broken(generator: random.Random, text: str) -> bytes:
    """A file with something wrong in it: cut, a number or a word replaced, a line lost or twice, a strange sign, noise."""
    lines, kind = text.splitlines(keepends=True), generator.randrange(8)
    if kind == 0:
        return bytes(generator.randrange(256) for _ in range(200))
    if kind in (1, 2):
        place = generator.randrange(len(text) + 1)
        return (text[:place] if kind == 1 else text[place:]).encode()
    if kind in (3, 4):
        one = generator.choice(list(re.finditer(r"\d+" if kind == 3 else r"[\w.]+", text)))
        return (text[: one.start()] + generator.choice(WEIRD) + text[one.end() :]).encode()
    if kind == 5:
        place = generator.randrange(len(text))
        return (text[:place] + generator.choice("\0\t\n\"'(){}:\u2028") + text[place + 1 :]).encode()
    row = generator.randrange(len(lines))
    lines[row : row + 1] = [] if kind == 6 else [lines[row], generator.choice(lines)]
    return "".join(lines).encode()


@pytest.mark.proof
def test_a_broken_file_is_one_sentence(tmp_path: Path) -> None:
    """A plan or a PlannerError, short and on one line, whatever stands in the file."""
    moe = found(Wanted(model="gpt-oss-20b", gpus=8))[0]
    files = {"megatron": {"arguments.sh": load_target("megatron").render(ExportJob.of(moe)).files["arguments.sh"]}}
    files["megatron"]["train.log"] = LOG.read_text()
    for target in ("torchtitan", "deepspeed", "nanotron"):
        job = ExportJob.of(found(Wanted(model="llama-3.1-8b", gpus=16, trainer=target, top=1))[0])
        files[target] = {FILES[target][1]: load_target(target).render(job).files[FILES[target][1]]}
    generator, refused, read_in = random.Random(6), 0, 0
    said = {"model": "llama-3.1-8b", "num_gpus": 16, "hardware": "h100-sxm", "sequence_length": 4096}
    for _ in range(400):
        target = generator.choice(list(files))
        name = generator.choice(list(files[target]))
        (tmp_path / name).write_bytes(broken(generator, files[target][name]))
        try:
            reading = read(tmp_path / name, target if generator.random() < 0.5 else None, Given(num_gpus=16))
            if read_in % 4 == 0:  # pricing takes most of the time
                to_plan(reading, said)
            read_in += 1
        except PlannerError as error:
            refused += 1
            text = str(error).replace(str(tmp_path), "")
            assert "\n" not in text and 10 < len(text) < 700, text
    assert refused >= 100 and read_in >= 50


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.sh", "--num-layers 5000 --hidden-size 8 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1 "
                 "--global-batch-size 8", "--num-layers is 5000; it must be a whole number from 1 to 4096"),
        ("a.sh", "--num-layers 4 --hidden-size 8 --num-attention-heads 0 --seq-length 8 --micro-batch-size 1 "
                 "--global-batch-size 8", "--num-attention-heads is 0"),
        ("ds.json", '{"train_batch_size": ' + "9" * 5000 + "}", "JSON that cannot be read"),
        ("ds.json", '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}, "train_micro_batch_size_per_gpu": 1, '
         '"train_batch_size": 16, "gradient_accumulation_steps": 1}', "offloads to nvme, which is not modelled"),
        ("ds.json", '{"train_batch_size": 16, "zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": "half"}}}',
         "offload_optimizer.ratio is 'half'; it must be a number from 0 to 1"),
        ("empty.log", "", "looks like no configuration"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be(name: str, text: str, says: str, run, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    result = run("import", str(tmp_path / name), "--gpus", "16")
    assert result.exit_code == 2 and says in " ".join(result.output.split()) and "Traceback" not in result.output
