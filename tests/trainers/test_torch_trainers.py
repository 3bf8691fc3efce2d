"""torchtitan's, DeepSpeed's, accelerate's and nanotron's own code on every exported plan, and on what we refuse.

A trainer that is not installed is skipped with NOT CHECKED; it never passes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from planner.layout import CpMethod, Layout
from planner.trainers.bundle.target import ExportJob
from planner.trainers.checking import Checked
from planner.trainers.checking.child import check_folder, check_many
from planner.trainers.targets import load_target
from tests.trainers.plans import Wanted, found, jobs

PACKAGES = {"torchtitan": "torchtitan", "deepspeed": "deepspeed", "accelerate": "trl", "nanotron": "nanotron"}
LEVELS = {"torchtitan": "groups built", "deepspeed": "validated", "accelerate": "validated", "nanotron": "validated"}


def installed(name: str) -> None:
    """Skip, loudly, where the package is missing."""
    if importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"NOT CHECKED: {PACKAGES[name]} is not installed")


def written(name: str, job: ExportJob, folder: Path) -> Path:
    """The trainer's files of one plan."""
    for path, text in load_target(name).render(job).files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def results(name: str, cases: list[ExportJob], folder: Path, **options: bool) -> list[Checked]:
    """The trainer's own code on many plans, in one process."""
    pairs = [(job, written(name, job, folder / str(i))) for i, job in enumerate(cases)]
    return check_many(name, pairs, **options)


def mine(name: str) -> list[ExportJob]:
    """Plans of the set that the target runs."""
    target = load_target(name)
    return [job for job in jobs() if job.plan.trainer in target.trainers and not target.refusals(job)]


@pytest.mark.parametrize("name", PACKAGES)
def test_every_plan_is_accepted(name: str, tmp_path: Path) -> None:
    installed(name)
    cases = mine(name)
    assert len(cases) >= 8
    for job, one in zip(cases, results(name, cases, tmp_path), strict=True):
        assert not one.problem and one.level, f"{job.model.name} {job.layout.to_dict()}: {one.text()}"
        reached = ("validated", "groups built") if name == "accelerate" else (LEVELS[name],)  # DDP needs no mesh
        assert one.level in reached and not one.missing, one.text()


def test_torchtitan_builds_the_models_with_the_planners_parameters(tmp_path: Path) -> None:
    installed("torchtitan")
    kinds = {job.model.name: job for job in mine("torchtitan") if job.model.num_layers <= 80}
    wanted = [
        Wanted(model=name, gpus=64, trainer="torchtitan", top=1)
        for name in ("qwen3-8b", "mixtral-8x7b", "deepseek-v2-lite")
    ]
    cases = [*kinds.values(), *(ExportJob.of(found(one)[0]) for one in wanted)]
    for one in results("torchtitan", cases, tmp_path, deep=True):
        assert one.level == "model built" and "parameters of the model as planned" in one.details, one.text()


def test_deepspeed_rejects_unknown_keys_of_the_top(tmp_path: Path) -> None:
    """Its own reader passes over them in silence, so the check compares with the names of its constants."""
    installed("deepspeed")
    job = mine("deepspeed")[0]
    folder = written("deepspeed", job, tmp_path)
    data = json.loads((folder / "ds_config.json").read_text())
    (folder / "ds_config.json").write_text(json.dumps({**data, "no_such_key": 1}))
    assert "no_such_key" in check_folder("deepspeed", job, folder).problem


def test_accelerate_rejects_unknown_keys_of_the_top(tmp_path: Path) -> None:
    installed("accelerate")
    job = mine("accelerate")[0]
    folder = written("accelerate", job, tmp_path)
    data = yaml.safe_load((folder / "accelerate.yaml").read_text())
    (folder / "accelerate.yaml").write_text(yaml.safe_dump({**data, "no_such_key": 1}))
    assert "no_such_key" in check_folder("accelerate", job, folder).problem


def test_torchtitan_rejects_unknown_keys(tmp_path: Path) -> None:
    installed("torchtitan")
    job = mine("torchtitan")[0]
    folder = written("torchtitan", job, tmp_path)
    text = (folder / "plan_config.py").read_text()
    (folder / "plan_config.py").write_text(re.sub(r"tensor_parallel_degree=", "tensor_degree=", text))
    assert "tensor_degree" in check_folder("torchtitan", job, folder).problem


def tiny_plan(trainer: str, num_gpus: int, **layout: int) -> ExportJob:
    """Two layers of a Llama with a vocabulary of 128, in fp32 without sharding."""
    plan = found(Wanted(model="llama-3.1-8b", gpus=8, trainer=trainer, top=1))[0]
    small = dataclasses.replace(
        plan.workload.model, name="tiny", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=64,
        vocab_size=128, max_sequence_length=64, published_parameters=0.0,
    )  # fmt: skip
    work = plan.workload.replace(model=small, sequence_length=32, global_batch_size=2, precision="fp32")
    kept = plan.layout.replace(dp=1, tp=1, cp=1, micro_batch_size=1, num_microbatches=2, zero=0, recompute=0, dp_shard=0)
    return ExportJob.of(dataclasses.replace(plan, workload=work, layout=kept.replace(**layout), num_gpus=num_gpus))


def ran(folder: Path, *words: str, start: tuple[str, ...] = ()) -> str:
    """What train.py of the folder prints on the CPU."""
    command = [*(start or (sys.executable,)), "train.py", "--settings", "training.json", "--model", "./model", "--cpu", *words]
    variables = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False, env=variables
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_transformers_script_runs_on_cpu(tmp_path: Path) -> None:
    """train.py of the accelerate export, five steps of a tiny Llama in one process."""
    installed("accelerate")
    folder = written("accelerate", tiny_plan("fsdp", 1), tmp_path)
    assert len(re.findall(r"'loss': ", ran(folder, "--smoke"))) == 5


def test_ulysses_trains_as_one_process(tmp_path: Path) -> None:
    """DeepSpeed with cp 2 on two processes: batches come through its UlyssesSPDataLoaderAdapter, loss and gradient are those of
    one process; TRL's trainer takes the same folder."""
    installed("deepspeed")
    folders = [tmp_path / name for name in ("one", "two")]
    for folder, layout in zip(folders, ({"cp": 1, "zero": 2}, {"cp": 2, "cp_method": CpMethod.A2A, "zero": 2}), strict=True):
        written("deepspeed", tiny_plan("deepspeed", layout["cp"], **layout), folder)
        write_texts(folder)
    data = ("--deepspeed", "ds_config.json", "--dataset", "data", "--tokenizer", "tokenizer", "--steps", "3")
    runs = []
    for processes, folder in enumerate(folders, 1):
        begins = str(Path(__file__).with_name("deepspeed_on_cpu.py"))
        start = ("torchrun", "--standalone", "--nproc-per-node", str(processes), begins)
        runs.append(re.findall(r"'train_loss': '([\d.]+)'", ran(folder, *data, start=start)))
    assert runs[0] and set(runs[0]) == set(runs[1])
    assert "'train_loss'" in ran(folders[1], *data, "--sft", start=start)


@pytest.mark.proof
def test_the_pytorch_script_is_checked_and_each_sabotage_is_seen(tmp_path: Path) -> None:
    """Groups, stages and parameters of the script, without a trainer beside torch."""
    plan = found(Wanted(model="llama-3.1-8b", gpus=8, trainer="torchtitan", pins=(("tp", 2), ("pp", 2)), top=1))[0]
    job = ExportJob.of(plan)
    whole = json.loads((written("pytorch", job, tmp_path / "run") / "plan.json").read_text())
    changes = {
        "": {}, "zero": {"zero": 5 - job.layout.zero}, "layers": {"stages": whole["stages"][:-1]},
        "global batch": {"num_microbatches": 3}, "tp": {"tp": 1}, "parameters": {"model": {**whole["model"], "ffn_size": 64}},
    }  # fmt: skip
    folders = [written("pytorch", job, tmp_path / f"changed {name}") for name in changes]
    for folder, change in zip(folders, changes.values(), strict=True):
        (folder / "plan.json").write_text(json.dumps({**whole, **change}))
    untouched, *others = check_many("pytorch", [(job, folder) for folder in folders])
    assert untouched.level == "model built" and not untouched.problem and not untouched.missing, untouched.text()
    assert all(name in one.problem for name, one in zip([*changes][1:], others, strict=True))


def test_the_pytorch_script_stretches_positions_as_transformers_does(tmp_path: Path) -> None:
    installed("accelerate")
    import runpy

    import torch
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plan = found(Wanted(model="llama-3.1-8b", gpus=8, trainer="torchtitan", top=1))[0]
    folder = written("pytorch", ExportJob.of(plan), tmp_path / "script")
    script, model = runpy.run_path(str(folder / "train.py")), json.loads((folder / "plan.json").read_text())["model"]
    rates = script["Attention"](model).rates(torch.device("cpu"))
    plan = found(Wanted(model="llama-3.1-8b", gpus=8, trainer="fsdp", top=1))[0]
    config = AutoConfig.from_pretrained(written("accelerate", ExportJob.of(plan), tmp_path / "hub") / "model")
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert config.rms_norm_eps == model["norm_eps"] and torch.allclose(rates, theirs, rtol=1e-6)


def write_texts(folder: Path) -> None:
    """A data set of numbers and a tokenizer that knows them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0, "<pad>": 1, **{str(number): number + 2 for number in range(100)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    whole.save_pretrained(folder / "tokenizer")
    (folder / "data").mkdir()
    texts = (" ".join(str(7 * i * j % 100) for j in range(5 + i % 50)) for i in range(64))
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def test_plan_validate_runs_torchtitan_and_reads_its_log(tmp_path: Path) -> None:
    """The exported plan of two processes in torchtitan's own training loop, on the CPU: see torchtitan_on_cpu.py for what is
    replaced. Its log is the real one."""
    installed("torchtitan")
    import shlex
    import shutil

    from planner.lab.run.learn import learned
    from planner.lab.run.trainer_run import TrainerRun, run_trainer

    launcher = shutil.which("torchrun")
    if launcher is None:
        pytest.skip("NOT CHECKED: torchrun is not on the PATH")
    plan = found(Wanted(model="llama-3.1-8b", gpus=8, trainer="torchtitan", top=1))[0]
    small = dataclasses.replace(
        plan.workload.model, name="tiny", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=128,
        vocab_size=256, max_sequence_length=128, published_parameters=0.0,
    )  # fmt: skip
    work = plan.workload.replace(model=small, sequence_length=64, global_batch_size=4, precision="fp32")
    layout = Layout(dp=2, num_microbatches=2, zero=3)
    tiny = dataclasses.replace(plan, workload=work, layout=layout, num_gpus=2)
    words = [
        launcher, "--standalone", "--nproc-per-node", "2", str(Path(__file__).with_name("torchtitan_on_cpu.py")),
        "--module", "plan_config", "--config", "smoke", "--training.steps", "7", "--compile.no-enable",
        "--parallelism.spmd_backend", "partial_dtensor",
    ]  # fmt: skip
    command = f"env PYTHONPATH=.:{os.environ.get('PYTHONPATH', '')} OMP_NUM_THREADS=1 {shlex.join(words)}"
    asked = TrainerRun(trainer="torchtitan", steps=5, command=command, warm_up=2, keep_log=tmp_path / "train.log")
    result = run_trainer(tiny, tmp_path / "plan.yaml", asked)
    text = (tmp_path / "train.log").read_text()
    assert result["outcome"] == "completed", f"{result['failure']} {text[-3000:]}"
    assert result["steps"] == {"warm": 2, "measured": 5} and "dp_shard=2, cp=1, tp=1, ep=1" in text
    [step] = result["times"]
    tokens = result["rates"]["tokens_per_second"]["measured"]
    assert 0 < step["measured_seconds"] < 60 and tokens * step["measured_seconds"] == pytest.approx(4 * 64)
    assert result["ranks"][0]["memory"][0]["what"] == "reserved" and len(result["rates"]["loss"]) == 2
    assert result["device"]["kind"] == "cpu" and "it ran on CPUs" in learned(tiny, result)["no_run"]
