"""torchtitan, DeepSpeed, accelerate, nanotron and PyTorch alone: what is written, what is refused, what is read back."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from fresh import fresh
from samples import job as rules_job
from samples import legal_layouts

from planner.cluster import Cluster
from planner.errors import PlannerError
from planner.hardware import load_hardware
from planner.layout import CpMethod, Layout, Schedule
from planner.model import ModelSpec
from planner.plan_file import Plan
from planner.trainer import load_trainer
from planner.trainers.bundle.target import ExportJob
from planner.trainers.deepspeed.export import config as deepspeed_config
from planner.trainers.deepspeed.readback import KNOWN, QUIET
from planner.trainers.pytorch.export import settings
from planner.trainers.reading.given import Given
from planner.trainers.reading.values import uneven
from planner.trainers.targets import load_target
from planner.workload import Workload

HARDWARE = load_hardware("h100-sxm")
TINY: dict[str, Any] = {
    "name": "tiny", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 64,
    "vocab_size": 128, "max_sequence_length": 64,
}  # fmt: skip


def tiny(
    trainer: str, gpus: int, sizes: dict[str, Any] | None = None, work: dict[str, Any] | None = None, **fields: int
) -> ExportJob:
    """A small job; one layer more or another field away from what a trainer has."""
    model = ModelSpec(**TINY | (sizes or {}))
    workload = Workload(**{"model": model, "sequence_length": 32, "global_batch_size": 16} | (work or {}))
    plan = Plan(workload=workload, hardware="h100-sxm", num_gpus=gpus, trainer=trainer,
                layout=Layout(**fields), prediction=None)  # type: ignore[arg-type]  # fmt: skip
    return ExportJob(plan=plan, cluster=Cluster(hardware=HARDWARE, num_gpus=gpus), trainer=load_trainer(trainer))


def legal(name: str, trainer: str, gpus: int = 32, most: int = 120) -> list[ExportJob]:
    """Legal layouts of a small model, drawn from all with a fixed seed."""
    one, layouts = rules_job(name, trainer, gpus, batch=64), legal_layouts(name, trainer, gpus, 64, most)
    return [
        ExportJob(
            plan=Plan(workload=one.workload, hardware="h100-sxm", num_gpus=gpus, trainer=trainer,
                      layout=layouts.row(i), prediction=None),  # type: ignore[arg-type]
            cluster=one.cluster, trainer=one.trainer,
        )
        for i in range(len(layouts))
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ there and back


@pytest.mark.proof
@pytest.mark.parametrize(
    ("trainer", "file", "models"),
    [
        ("torchtitan", "plan_config.py", ("gqa", "moe")),
        ("deepspeed", "ds_config.json", ("gpt", "gqa", "moe", "window")),
        ("nanotron", "nanotron.yaml", ("gqa",)),
    ],
)
def test_export_then_import_is_the_identity(trainer: str, file: str, models: tuple[str, ...], tmp_path: Path) -> None:
    """On every legal layout, not on the best alone."""
    target, reader, compared = load_target(trainer), importlib.import_module(f"planner.trainers.{trainer}.readback"), 0
    for name in models:
        for job in legal(name, trainer):
            assert target.refusals(job) == [], (name, job.layout.to_dict())
            for path, text in target.render(job).files.items():
                (tmp_path / path).parent.mkdir(exist_ok=True)
                (tmp_path / path).write_text(text)
            found = reader.read(tmp_path / file, Given(num_gpus=job.cluster.num_gpus))
            back, layout = Layout(**found.fields), job.layout
            if (
                back.first_stage_layers != layout.first_stage_layers
                or back.last_stage_layers != layout.last_stage_layers
            ):
                same = ExportJob(
                    plan=Plan(**vars(job.plan) | {"layout": back}), cluster=job.cluster, trainer=job.trainer
                )
                assert same.virtual_stages() == job.virtual_stages()  # ends that are given, and equal to an even share
                layout = layout.replace(
                    first_stage_layers=back.first_stage_layers, last_stage_layers=back.last_stage_layers
                )
            assert back.to_dict() == layout.to_dict()
            assert (found.unread, found.num_gpus) == ((), 32)
            assert (found.sequence_length, found.global_batch_size) == (job.workload.sequence_length, 64)
            assert (found.precision, found.optimizer) == (job.workload.precision, job.workload.optimizer)
            compared += 1
    assert compared >= 120


def test_uneven_splits_have_words_or_a_sentence() -> None:
    assert uneven([8, 8, 8, 8]) == {}
    assert uneven([7, 9, 9, 7]) == {"first_stage_layers": 7, "last_stage_layers": 7}
    assert uneven([9, 9, 8, 6]) == {"last_stage_layers": 6}
    with pytest.raises(PlannerError, match="the others share the rest evenly"):
        uneven([8, 5, 9, 10])


UNKNOWN_SCHEDULE = """[parallelism]
data_parallel_shard_degree = 1
pipeline_parallel_degree = 2
pipeline_parallel_schedule = 'X'
[activation_checkpoint]
mode = 'none'
"""


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.py", "def f(:\n", "a.py: line 1: not Python"),
        ("a.py", "x = 1\n", "no ParallelismConfig"),
        ("a.py", "c = ParallelismConfig(tensor_parallel_degree=n * 2)", "tensor_parallel_degree is n * 2, which is computed"),
        ("a.toml", "[parallelism\n", "not a TOML file"),
        ("a.toml", UNKNOWN_SCHEDULE, "schedule is 'X'"),
        ("a.toml", "[parallelism]\ntensor_parallel_degree = 0\n", "tensor_parallel_degree is 0; it must be a whole number"),
        ("a.toml", "[activation_checkpoint]\nselective_ac_option='x'\n", "say --set activation_checkpoint.selective_ac_option=op"),
        ("a.json", "{", "a.json: line 1: not JSON"),
        ("a.sh", "torchrun train.py", "not a torchtitan configuration"),
    ],
)  # fmt: skip
def test_broken_torchtitan_files_are_one_sentence(name: str, text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PlannerError, match=re.escape(says)):
        importlib.import_module("planner.trainers.torchtitan.readback").read(tmp_path / name, Given())


def test_torchtitan_command_lines_and_old_files(tmp_path: Path) -> None:
    read = importlib.import_module("planner.trainers.torchtitan.readback").read
    (tmp_path / "run.sh").write_text(
        "torchrun -m torchtitan.train --module llama3 --config llama3_8b --parallelism.tensor_parallel_degree 4 \\\n"
        "  --parallelism.data-parallel-replicate-degree=2 --training.global_batch_size 64 --training.seq_len 8192 \\\n"
        "  --training.local_batch_size 1 --parallelism.new_knob 3 activation-checkpoint:full\n"
    )
    found = read(tmp_path / "run.sh", Given(num_gpus=32))
    values = Layout(**found.fields).to_dict()
    assert (values["tp"], values["dp"], values["dp_shard"], values["num_microbatches"]) == (4, 8, 4, 8)
    assert (values["recompute"], values["zero"], found.unread) == ("full", 3, ("parallelism.new_knob",))
    (tmp_path / "old.toml").write_text(
        "[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_schedule = '1F1B'\n"
        "[training]\nlocal_batch_size = 8\nseq_len = 4096\n[activation_checkpoint]\nmode = 'none'\n"
    )
    values = Layout(**read(tmp_path / "old.toml", Given(num_gpus=8)).fields).to_dict()
    assert (values["pp"], values["dp"], values["num_microbatches"], values["zero"]) == (4, 2, 8, 2)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}, "does not divide by"),
        ({"train_micro_batch_size_per_gpu": 2}, "say --gpus N (the number of GPUs does not follow from the batch keys)"),
        ({"zero_optimization": 3}, "zero_optimization is 3; it must be a mapping"),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
          "optimizer": {"type": "Lion"}}, "optimizer.type is Lion"),
        ({"train_batch_size": "8"}, "train_batch_size is '8'"),
    ],
)  # fmt: skip
def test_broken_deepspeed_files_are_one_sentence(data: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(data))
    with pytest.raises(PlannerError, match=re.escape(says)):
        importlib.import_module("planner.trainers.deepspeed.readback").read(tmp_path / "ds.json", Given())


def test_deepspeed_says_what_it_does_not_know(tmp_path: Path) -> None:
    data = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2,
            "aio": {}, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}  # fmt: skip
    (tmp_path / "ds.json").write_text(json.dumps(data))
    found = importlib.import_module("planner.trainers.deepspeed.readback").read(tmp_path / "ds.json", Given(num_gpus=8))
    assert found.unread == ("aio", "zero_optimization.zero_hpz_partition_size")
    assert (Layout(**found.fields).micro_batch_size, Layout(**found.fields).zero) == (2, 3)
    assert [one.name for one in found.questions] == ["gradient_checkpointing"]


# ------------------------------------------------------------------------------------------------ what is written


def test_torchtitan_module_is_python_and_names_every_layer_once() -> None:
    for job in [*legal("gqa", "torchtitan", most=40), *legal("moe", "torchtitan", most=40)]:
        tree = ast.parse(load_target("torchtitan").render(job).files["plan_config.py"])
        [stages] = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "STAGES"
        ]
        if job.layout.pp == 1:
            assert stages is None
        else:
            names = [name for stage in stages for name in stage]
            layers = [f"layers.{i}" for i in range(job.model.num_layers)]
            assert names == ["tok_embeddings", *layers, "norm", "lm_head"]
            assert len(stages) == job.layout.pp * job.layout.vpp


def test_deepspeed_writes_known_keys_and_the_batch_rule_holds() -> None:
    """DeepSpeed accepts unknown keys in silence, so we keep the list."""
    for job in [*legal("gqa", "deepspeed"), *legal("moe", "deepspeed")]:
        data = deepspeed_config(job)
        assert set(data) <= set(KNOWN + QUIET)
        world = job.cluster.num_gpus // data.get("sequence_parallel_size", 1)
        micro, steps = data["train_micro_batch_size_per_gpu"], data["gradient_accumulation_steps"]
        assert data.get("train_batch_size", micro * steps * world) == micro * steps * world
        assert ("train_batch_size" in data) == (job.layout.cp == 1)  # with Ulysses transformers would count otherwise
        assert data["bf16"]["enabled"] != data["fp16"]["enabled"]


def test_accelerate_writes_sizes_whose_product_is_the_world() -> None:
    for job in legal("gqa", "fsdp"):
        files = load_target("accelerate").render(job).files
        data, training = (
            yaml.safe_load(files["accelerate.yaml"]),
            json.loads(files["training.json"])["training_arguments"],
        )
        assert data["num_processes"] == 32 and data["num_machines"] == 4
        if job.layout.zero:
            sizes = [value for name, value in data["parallelism_config"].items() if name.endswith("_size")]
            product = 1
            for size in sizes:
                product *= size
            assert product == 32 and len(sizes) == 5
            assert data["fsdp_config"]["fsdp_reshard_after_forward"] == (job.layout.zero == 3)
        else:
            assert data["distributed_type"] == "MULTI_GPU" and "fsdp_config" not in data
        batch = training["per_device_train_batch_size"] * training["gradient_accumulation_steps"] * job.layout.dp
        assert batch == job.workload.global_batch_size


def test_ulysses_is_told_where_each_token_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's Ulysses ends at the first batch without ``position_ids``: smoke data and packed documents both have them."""
    job = tiny("deepspeed", 8, dp=4, cp=2, cp_method=CpMethod.A2A, num_microbatches=2)
    files = load_target("deepspeed").render(job).files
    assert json.loads(files["training.json"])["parallelism"]["sp_size"] == 2

    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(text)))}

    names = ("AutoConfig", "AutoModelForCausalLM", "Trainer", "TrainingArguments", "set_seed")
    tokenizer.eos_token_id = 9  # type: ignore[attr-defined]
    parts = SimpleNamespace(**dict.fromkeys(names), AutoTokenizer=SimpleNamespace(from_pretrained=lambda _: tokenizer))
    monkeypatch.setitem(sys.modules, "transformers", parts)
    documents = SimpleNamespace(load_dataset=lambda *_, **__: [{"text": "four"}, {"text": "more words"}])
    monkeypatch.setitem(sys.modules, "datasets", documents)
    script: dict[str, Any] = {"__name__": "train"}
    exec(compile(files["train.py"], "train.py", "exec"), script)
    for data in (script["Synthetic"](2, 8, 16, True)[0], next(iter(script["Packed"]("set", "words", 8, True)))):
        assert data["position_ids"].tolist() == list(range(8)) and len(data["input_ids"]) == 8
    assert "position_ids" not in script["Synthetic"](2, 8, 16, False)[0]


def test_scripts_are_python() -> None:
    job = tiny("fsdp", 8, dp=8, zero=3, num_microbatches=2)
    ast.parse(load_target("accelerate").render(job).files["train.py"])
    ast.parse(load_target("pytorch").render(job).files["train.py"])


# ------------------------------------------------------------------------------------------------ refusals


REFUSED: list[tuple[str, str, dict[str, Any], dict[str, Any], dict[str, int], str]] = [
    # target, trainer, sizes of the model, workload, layout, sentence
    ("torchtitan", "torchtitan", {"tied_embeddings": True}, {}, {"pp": 2, "dp": 4, "zero": 2}, "weight tying is not"),
    ("torchtitan", "torchtitan", {}, {}, {"tp": 4, "dp": 2, "zero": 2, "sequence_parallel": 1}, "the 2 key-value heads"),
    ("torchtitan", "torchtitan", {}, {}, {"dp": 8, "zero": 0}, "fully_shard always shards"),
    ("torchtitan", "torchtitan", {}, {}, {"pp": 2, "dp": 4, "zero": 2, "schedule": Schedule.ZB_H1}, "schedule zb_h1"),
    ("torchtitan", "torchtitan", {}, {}, {"pp": 2, "dp": 4, "vpp": 2, "zero": 3, "schedule": Schedule.ZBV}, "lose their gradient"),
    ("torchtitan", "torchtitan", {"norm": "layernorm"}, {}, {"dp": 8, "zero": 3}, "has norm layernorm"),
    ("torchtitan", "torchtitan", {}, {"optimizer": "muon"}, {"dp": 8, "zero": 3}, "optimizer muon"),
    ("torchtitan", "torchtitan", {}, {"precision": "fp16"}, {"dp": 8, "zero": 3}, "precision fp16"),
    ("torchtitan", "torchtitan", {}, {}, {"pp": 2, "dp": 1, "vpp": 2, "zero": 2, "schedule": Schedule.INTERLEAVED,
                                          "num_microbatches": 5}, "make 2 rounds"),
    ("deepspeed", "deepspeed", {}, {}, {"pp": 2, "dp": 4}, "builds PipelineModule(layers, num_stages=2"),
    ("deepspeed", "deepspeed", {}, {}, {"tp": 2, "cp": 2, "dp": 2, "cp_method": CpMethod.A2A}, "there is none of all three"),
    ("deepspeed", "deepspeed", {}, {}, {"cp": 2, "dp": 4}, "use cp_method a2a"),
    ("deepspeed", "deepspeed", {}, {}, {"dp": 8, "dp_shard": 4, "zero": 3}, "MiCS was removed"),
    ("deepspeed", "deepspeed", {}, {}, {"dp": 8, "zero": 2, "offload_optimizer": 50}, "with ZeRO 3 only"),
    ("deepspeed", "deepspeed", {}, {}, {"dp": 8, "zero": 0, "offload_optimizer": 100}, "use zero 1"),
    ("deepspeed", "deepspeed", {}, {"precision": "fp8"}, {"dp": 8}, "bf16, fp16 or fp32"),
    ("deepspeed", "deepspeed", {"num_experts": 8, "top_k": 2, "expert_ffn_size": 64, "norm": "layernorm"}, {},
     {"dp": 8, "ep": 8}, "none for tiny"),
    ("deepspeed", "deepspeed", {"num_experts": 8, "top_k": 2, "expert_ffn_size": 64}, {},
     {"tp": 2, "dp": 4, "etp": 2}, "expert_tensor_parallel_size is reserved"),
    ("accelerate", "fsdp", {}, {}, {"tp": 2, "dp": 4, "zero": 3}, "a plan of FSDP alone is data parallel only"),
    ("accelerate", "fsdp", {}, {}, {"dp": 8, "zero": 1}, "use 0, 2 or 3"),
    ("accelerate", "fsdp", {}, {}, {"dp": 8, "dp_shard": 1, "zero": 3}, "more than one rank"),
    ("accelerate", "fsdp", {}, {}, {"dp": 8, "zero": 3, "offload_optimizer": 100}, "plan for trainer deepspeed"),
    ("nanotron", "nanotron", {}, {}, {"tp": 4, "dp": 2}, "num_key_value_heads (2) must be >= tp"),
    ("nanotron", "nanotron", {}, {}, {"dp": 8, "zero": 3}, "zero_stage is 0 or 1"),
    ("nanotron", "nanotron", {}, {}, {"pp": 2, "dp": 4, "vpp": 2, "schedule": Schedule.INTERLEAVED}, "afab (gpipe) or 1f1b"),
    ("nanotron", "nanotron", {}, {}, {"pp": 2, "dp": 4, "first_stage_layers": 1}, "its own cost estimate"),
    ("nanotron", "nanotron", {"qk_norm": True}, {}, {"dp": 8}, "query and key norms"),
    ("torchtitan", "torchtitan", {}, {"sequence_length": 1536}, {"cp": 8, "zero": 3, "cp_method": CpMethod.ALLGATHER},
     "1536 tokens are not a multiple of cp 8 x 128, the blocks that FlexAttention's mask is shared out in"),
    ("torchtitan", "torchtitan", {}, {"sequence_length": 1536}, {"cp": 8, "zero": 3, "cp_method": CpMethod.ALLGATHER},
     "use 2048 tokens"),
    ("torchtitan", "torchtitan", {}, {"sequence_length": 8}, {"cp": 2, "tp": 4, "zero": 3, "sequence_parallel": 1},
     "8 tokens are not a multiple of 2 x cp 2 x tp 4"),
    ("pytorch", "torchtitan", {}, {}, {"cp": 2, "dp": 4, "zero": 3, "cp_method": CpMethod.ALLGATHER}, "no context parallelism"),
    ("pytorch", "torchtitan", {}, {"precision": "fp8"}, {"dp": 8, "zero": 3}, "bf16 or fp32"),
    ("pytorch", "torchtitan", {}, {}, {"pp": 2, "dp": 4, "vpp": 2, "zero": 3, "schedule": Schedule.DUALPIPE_V}, "lose their"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "trainer", "sizes", "work", "fields", "says"), REFUSED)
def test_what_cannot_be_run_is_a_sentence(
    name: str, trainer: str, sizes: dict[str, Any], work: dict[str, Any], fields: dict[str, int], says: str
) -> None:
    found = load_target(name).refusals(tiny(trainer, 8, sizes, work, **fields))
    assert any(says in one for one in found), found


# ------------------------------------------------------------------------------------------------ PyTorch alone


FORKED = """
import os, runpy, sys
import torch.distributed.fsdp, torch.distributed.pipelining, torch.distributed.tensor.parallel
from tests.proofs.forked_ranks import free_port

folder, world, *words = sys.argv[1:]
os.chdir(folder)
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
ranks = []
for rank in range(int(world)):
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
        sys.exit(0)
sys.exit(int(any([os.waitpid(one, 0)[1] for one in ranks])))
"""
"""Several ranks of a script, with the variables that torchrun sets; torch is imported once, which takes longer than to train."""


def losses(job: ExportJob, folder: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step of the exported script on this machine's CPU: one rank by torchrun, several forked."""
    folder.mkdir()
    for name, text in load_target("pytorch").render(job).files.items():
        (folder / name).write_text(text)
    world, words = job.cluster.num_gpus, ["train.py", "--device", "cpu", "--steps", "3"]
    if world > 1:
        out = fresh(FORKED, str(folder), str(world), *words)
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--master-port", "29642", *words]
        for _ in range(3):  # torch 2.13 itself aborts after the last step in 2 of 90 runs on a busy machine
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
            if "terminate called without an active exception" not in done.stderr:
                break
        assert done.returncode == 0, done.stderr[-2000:]
        out = done.stdout
    assert sum("parameters" in line for line in out.splitlines()) == job.layout.pp
    return [(float(loss), float(norm)) for loss, norm in re.findall(r"^step \d+ loss (\S+) gradient (\S+) ", out, re.M)]


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="NOT RUN: torch, of the extra 'test', is not installed"
)
@pytest.mark.proof
def test_the_script_trains_like_one_process(tmp_path: Path) -> None:
    """tp 2 x pp 2 x dp 2 on 8 processes: the losses and gradient norms of one process, and they go down."""
    work = {"precision": "fp32", "global_batch_size": 8}
    split = {"tp": 2, "pp": 2, "dp": 2, "zero": 2, "micro_batch_size": 2, "num_microbatches": 2, "sequence_parallel": 1,
             "first_stage_layers": 1}  # fmt: skip
    eight = tiny("torchtitan", 8, {"num_layers": 3}, work, **split)
    one = tiny("torchtitan", 1, {"num_layers": 3}, work, zero=2, num_microbatches=2, micro_batch_size=4)
    assert load_target("pytorch").refusals(eight) == load_target("pytorch").refusals(one) == []
    assert [stage["layers"] for stage in settings(eight)["stages"]] == [[0], [1, 2]]
    many, alone = losses(eight, tmp_path / "eight"), losses(one, tmp_path / "one")
    assert len(many) == len(alone) == 3
    for (loss, norm), (expected, gradient) in zip(many, alone, strict=True):
        assert loss == pytest.approx(expected, rel=2e-6)
        assert norm == pytest.approx(gradient, rel=2e-5)
    assert many[-1][0] < many[0][0] - 0.01


def test_smoke_runs_of_torchtitan_begin_with_the_same_weights() -> None:
    """Two layouts of one model can be compared; the run itself keeps the seed of the user."""
    text = load_target("torchtitan").render(tiny("torchtitan", 8, dp=8)).files["plan_config.py"]
    whole, smoke = text.split("def smoke()")
    assert "config.debug.seed = 1" in smoke and "seed" not in whole
