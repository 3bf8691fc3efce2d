"""Loops of people's own, as examples of libraries have them: passes, sections of an engine, questions without a way on."""

import json
from pathlib import Path

import pytest
from import_files import asked_for, written
from test_import_own_loops import ENGINE, ENGINE_PASS, ENGINED, LAYERED, MIXED, PLAIN, looped

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.given import Given

PASS = "loss = model(**batch).loss\n    loss.backward()"


@pytest.mark.parametrize(("passes", "steps"), [
    (f"{PLAIN}\n    if step % 100 == 0:\n        print(loss)\n        continue", 1),
    (f"if step % size != rank:\n        continue\n    {PLAIN}", 1),
    (f"{PLAIN}\n    if step % 50 == 0:\n        model.train()", 1),
    ("for one in range(1000):\n        model(**batch).loss.backward()\n        adam.step()", 1),
    (f"{PASS}\n    last = (step + 1) % 4 == 0\n    if last:\n        optimizer.step()", 4),
    (f"{PASS}\n    if (step + 1) % 4 != 0:\n        log()\n    else:\n        optimizer.step()", 4),
    (f"{PASS}\n    if (step + 1) % 4:\n        continue\n    optimizer.step()", 4),
    (f"accumulated_tokens = 3\n    {PLAIN}", 1),
])  # fmt: skip
def test_passes_are_counted_where_weights_are_updated(tmp_path: Path, passes: str, steps: int) -> None:
    """They were 100, 1000 and 1 of 4, without a word."""
    found = looped(tmp_path, LAYERED, MIXED, passes)
    assert (asked_for(found), found.fields["num_microbatches"]) == ([], steps)


@pytest.mark.parametrize(("config", "before", "asked"), [
    ("{**base, 'train_batch_size': 8}", "base = load()", ["deepspeed"]),
    ("config", f"config = {ENGINE!r}\nconfig['zero_optimization'] = made()", ["deepspeed"]),
    ("config", f"config = {ENGINE!r}\nconfig['zero_optimization']['offload_optimizer']['device'] = 'none'", []),
])  # fmt: skip
def test_sections_of_an_engine_are_not_lost(tmp_path: Path, config: str, before: str, asked: list[str]) -> None:
    """They were ZeRO 0 in fp32."""
    found = looped(tmp_path, ENGINED.replace("CONFIG", config), passes=ENGINE_PASS, before=before)
    assert asked_for(found) == asked and found.fields.get("offload_optimizer", 0) == 0


@pytest.mark.parametrize("section", ["'bf16': True", "'optimizer': 'adam'"])
def test_a_section_that_is_none_is_named(tmp_path: Path, section: str) -> None:
    config = f"{{'train_micro_batch_size_per_gpu': 2, {section}}}"
    with pytest.raises(PlannerError, match="it must be a section of settings"):
        looped(tmp_path, ENGINED.replace("CONFIG", config).replace(", optimizer=torch.optim.AdamW(model.parameters())", ""))


def test_keys_of_an_engine_that_change_nothing_are_silent(tmp_path: Path) -> None:
    config = {**ENGINE, "steps_per_print": 10, "tensorboard": {"enabled": True},
              "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": [{"patterns": ["q"]}]}},
              "hybrid_engine": {"enabled": False, "inference_tp_size": 1},
              "fp16": {"enabled": False, "loss_scale_window": 100}}  # fmt: skip
    found = looped(tmp_path, ENGINED.replace("CONFIG", repr(config)), passes=ENGINE_PASS)
    assert [one for one in found.unread if "deepspeed" in one] == []


LOADED = "loader = torch.utils.data.DataLoader(rows, batch_size=2)\n"
MESH = "mesh = init_device_mesh('cuda', SIZES, mesh_dim_names=('replicate', 'shard'))\nfully_shard(model, mesh=mesh)"


def test_a_mesh_of_unknown_sizes_is_a_note(tmp_path: Path) -> None:
    """No answer to the questions for its sizes met a plan."""
    found = looped(tmp_path, MESH.replace("SIZES", "(args.ds_config, groups())"))
    assert asked_for(found) == [] and "may shard in groups that it replicates" in " ".join(found.notes)
    with pytest.raises(PlannerError, match="has a mesh of replicate, shard: 3 x 2 are not 8 GPUs; say --gpus N"):
        looped(tmp_path, MESH.replace("SIZES", "(3, 2)"))
    with pytest.raises(PlannerError, match="has a mesh of dp over"):
        looped(tmp_path, MESH.replace("SIZES", "(2, 4)").replace("'replicate', 'shard'", "'dp',"))


def test_the_policy_that_is_given_counts(tmp_path: Path) -> None:
    policies = "half = MixedPrecision(param_dtype=torch.float16)\nours = MixedPrecision(param_dtype=torch.bfloat16)"
    assert looped(tmp_path, LAYERED, "mixed_precision=ours", dtype="float32", before=policies).precision == "bf16"


@pytest.mark.parametrize("line", ["ref_model = None", "kl_weight = 0", "state.rewards = 1"])
def test_names_that_hold_a_constant_are_no_other_step(tmp_path: Path, line: str) -> None:
    assert asked_for(looped(tmp_path, LAYERED, MIXED, before=line)) == []


@pytest.mark.parametrize("line", ["test_loader = torch.utils.data.DataLoader(more, batch_size=8)", "latest = 1"])
def test_loaders_are_told_apart_by_their_names(tmp_path: Path, line: str) -> None:
    wrap = "model = DDP(model)"
    found = looped(tmp_path, wrap, passes=PLAIN, before=line)
    assert (asked_for(found), found.fields["micro_batch_size"]) == ([], 4)
    assert not any("neither deepspeed nor fsdp" in one for one in found.notes)


def test_ranks_of_a_launcher_meet_a_switch(tmp_path: Path) -> None:
    ranks = "import os\nddp = int(os.environ.get('RANK', -1)) != -1"
    assert looped(tmp_path, "if ddp:\n    model = DDP(model)", before=ranks).fields["zero"] == 0


def test_a_command_is_told_what_its_loop_is(tmp_path: Path) -> None:
    """As the file alone is: refused where it splits by other degrees, with its notes else."""
    run = written(tmp_path, "torchrun --nproc_per_node 8 loop.py\n", "run.sh")
    looped(tmp_path, LAYERED, MIXED, before="model = Surrounded(model)")
    notes = " ".join(read(run, None, Given()).notes)
    assert "model is handed to Surrounded" in notes and "the training loop is the program's own" in notes
    text = (tmp_path / "loop.py").read_text().replace("Surrounded(model)", "parallelize_module(model)")
    written(tmp_path, text, "loop.py")
    with pytest.raises(PlannerError, match="splits the model by parallelize_module"):
        read(run, None, Given())


def test_a_trainer_of_the_projects_own_base_is_none_of_trl(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text("class BaseTrainer:\n    def fit(self):\n        pass\n")
    text = "from base import BaseTrainer\nfrom transformers import HfArgumentParser\nclass SFTTrainer(BaseTrainer):\n    pass\n"
    text += "args, = HfArgumentParser(Words).parse_args_into_dataclasses()\nSFTTrainer(model=model, args=args).train()\n"
    with pytest.raises(PlannerError, match="SFTTrainer is not the one of TRL or transformers"):
        read(written(tmp_path, text, "tune.py"), None, Given(num_gpus=8))


def test_adapters_that_options_leave_out_are_not_asked_for(tmp_path: Path) -> None:
    """A model that another module makes, and adapters under a rank that is 0."""
    text = "import argparse, deepspeed\nparser = argparse.ArgumentParser()\n"
    text += "parser.add_argument('--lora_dim', type=int, default=0)\n"
    text += f"args = parser.parse_args()\nmodel = made_elsewhere()\nif args.lora_dim > 0:\n    model = to_lora(model)\n{LOADED}"
    text += ENGINED.replace("CONFIG", repr(ENGINE)) + f"\nfor batch in loader:\n    {ENGINE_PASS}\n"
    found = read(written(tmp_path, text, "loop.py"), None, Given(num_gpus=8, model="llama-3-8b", sequence_length=512))
    assert "use_peft" not in asked_for(found)


def test_variables_in_the_place_of_an_engines_file_are_asked_for_alone(tmp_path: Path) -> None:
    """The file was asked for beside them."""
    looped(tmp_path, ENGINED.replace("config=CONFIG, ", "args=args, "), passes=ENGINE_PASS)
    run = "deepspeed --num_gpus 8 loop.py --deepspeed --deepspeed_config $WHERE/ds.json\n"
    found = read(written(tmp_path, run, "run.sh"), None, Given())
    assert "WHERE" in asked_for(found) and "deepspeed" not in asked_for(found)


def test_a_name_that_holds_a_trainer_is_one(tmp_path: Path) -> None:
    """A loop over accelerate beside it had its optimizer asked for."""
    text = "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\nfrom accelerate import Accelerator\n" + (
        "class Other:\n    def run(self):\n        Accelerator()\n        torch.optim.SGD(w), torch.optim.AdamW(w)\n"
        "Own = Trainer\nmodel = AutoModelForCausalLM.from_pretrained('Qwen/Qwen2.5-7B', torch_dtype='bfloat16')\n"
        "Own(model=model, args=TrainingArguments('out', per_device_train_batch_size=2, bf16=True)).train()\n"
    )
    written(tmp_path, text, "tune.py")
    found = read(written(tmp_path, "torchrun --nproc_per_node 8 tune.py --bf16 true\n", "run.sh"), None, Given())
    assert "optim" not in asked_for(found)


def test_a_file_of_an_engine_lies_beside_the_script_that_names_it(tmp_path: Path) -> None:
    """Its precision, batch and passes were asked for, as it does not lie beside the program."""
    (tmp_path / "runs").mkdir()
    written(tmp_path / "runs", json.dumps(ENGINE), "ds.json")
    looped(tmp_path, ENGINED.replace("config=CONFIG, ", "args=args, "), passes=ENGINE_PASS)
    run = "deepspeed --num_gpus 8 ../loop.py --deepspeed --deepspeed_config ds.json\n"
    found = read(written(tmp_path / "runs", run, "run.sh"), None, Given())
    assert (asked_for(found), found.precision, found.fields["zero"]) == ([], "bf16", 3)
