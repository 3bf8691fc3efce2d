"""Loops that people write over torch's FSDP, FSDP2 and DDP and over DeepSpeed's engine: 'plan import loop.py' knew none of them."""

import json
import re
import time
from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.trainers.pytorch import FORM
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

FOREACH = "fsdp+optimizer_kernel=foreach"
"""Adam of torch that says no kernel."""
LOOP = """
import argparse, functools, torch, deepspeed
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy, CPUOffload, fully_shard
from torch.distributed.fsdp import MixedPrecisionPolicy, CPUOffloadPolicy
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import AutoModelForCausalLM, AutoTokenizer
parser = argparse.ArgumentParser()
parser.add_argument("--batch_size_per_device", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=8)
parser.add_argument("--ds_config")
args = parser.parse_args()
tokenizer = AutoTokenizer.from_pretrained("meta-llama/Llama-3.1-8B")
rows = [tokenizer(one, truncation=True, max_length=2048) for one in texts]
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", torch_dtype=torch.DTYPE)
policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
BEFORE
WRAP
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
loader = torch.utils.data.DataLoader(rows, batch_size=args.batch_size_per_device)
held_out = torch.utils.data.DataLoader(eval_rows, batch_size=64)
for step, batch in enumerate(loader):
    PASS
"""
PLAIN = """loss = model(**batch).loss.float()
    loss.backward()
    optimizer.step()"""
SUMMED = """loss = model(**batch).loss / args.accumulate
    loss.backward()
    if (step + 1) % args.accumulate == 0:
        optimizer.step()"""
LAYERED = "model = FSDP(model, auto_wrap_policy=policy, WORDS)"
MIXED = "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)"
ENGINE = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
          "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}  # fmt: skip


def looped(tmp_path: Path, wrap: str, words: str = "", passes: str = PLAIN, dtype: str = "bfloat16", before: str = "") -> Reading:
    """The reading of a loop that wraps its model so."""
    text = LOOP.replace("WRAP", wrap).replace("WORDS", words).replace("DTYPE", dtype).replace("PASS", passes)
    return read(written(tmp_path, text.replace("BEFORE", before), "loop.py"), None, Given(num_gpus=8))


@pytest.mark.parametrize(
    ("words", "dtype", "fields", "precision", "reduces"),
    [(MIXED, "float32", {"zero": 3, "micro_batch_size": 4, "num_microbatches": 1}, "bf16", "bf16"),
     (MIXED, "bfloat16", {"zero": 3}, "bf16_true", "bf16"),
     ("", "float32", {"zero": 3}, "fp32", ""),
     ("mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)", "float32", {}, "bf16", "fp32"),
     ("sharding_strategy=ShardingStrategy.SHARD_GRAD_OP", "bfloat16", {"zero": 2}, "bf16_true", "bf16"),
     ("sharding_strategy=ShardingStrategy.NO_SHARD", "bfloat16", {"zero": 0}, "bf16_true", "bf16"),
     ("cpu_offload=CPUOffload(offload_params=True)", "bfloat16", {"offload_parameters": 1}, "bf16_true", "bf16")],
)  # fmt: skip
def test_fsdp_says_how_it_splits(
    tmp_path: Path, words: str, dtype: str, fields: dict[str, int], precision: str, reduces: str
) -> None:
    """Weights of torch's own FSDP keep the dtype that they are loaded in, which accelerate brings to fp32."""
    found = looped(tmp_path, LAYERED, words, dtype=dtype)
    assert (asked_for(found), found.precision, found.sequence_length) == ([], precision, 2048)
    sent = f"+reduce_dtype={reduces}" * bool(reduces)
    assert fields.items() <= found.fields.items() and found.trainer == FOREACH + sent
    assert "one unit" not in " ".join(found.notes) and "FSDP, line" in " ".join(found.notes)


@pytest.mark.parametrize(("passes", "loss"), [
    (PLAIN, ""), ("outputs = model(**batch)\n    loss = outputs.loss\n    loss.backward()\n    optimizer.step()", "loss=kept"),
    ("outputs = model(**batch)\n    outputs['loss'].backward()\n    optimizer.step()", "loss=kept"),
    ("of(batch).backward()\n    optimizer.step()\ndef of(batch):\n    out = model(**batch)\n    return out.loss", ""),
])  # fmt: skip
def test_outputs_that_a_loop_holds_keep_their_scores(tmp_path: Path, passes: str, loss: str) -> None:
    """A variable of the loop lives through the backward pass; one of a function is gone when that returns."""
    found = looped(tmp_path, LAYERED, MIXED, passes)
    assert ("loss=" in found.trainer) is bool(loss) and loss in found.trainer


@pytest.mark.parametrize(("passes", "off"), [
    (PLAIN, True), (f"with torch.autocast('cuda', dtype=torch.bfloat16):\n        pass\n    {PLAIN}", False),
])  # fmt: skip
def test_a_loop_without_autocast_leaves_layer_norms_as_they_are(tmp_path: Path, passes: str, off: bool) -> None:
    text = LOOP.replace("WRAP", LAYERED).replace("WORDS", MIXED).replace("DTYPE", "bfloat16").replace("PASS", passes)
    text = text.replace("meta-llama/Llama-3.1-8B", "EleutherAI/pythia-12b").replace("BEFORE", "")
    found = read(written(tmp_path, text, "loop.py"), None, Given(num_gpus=8))
    assert ("autocast=off" in found.trainer) is off
    assert "autocast" not in looped(tmp_path, LAYERED, MIXED).trainer


def test_a_model_of_one_unit_is_noted(tmp_path: Path) -> None:
    assert "as one unit: every GPU gathers all weights at once" in " ".join(looped(tmp_path, "model = FSDP(model)").notes)


@pytest.mark.parametrize(("passes", "steps", "last"), [
    (PLAIN, 1, False), (SUMMED, 8, False),
    (SUMMED.replace("loss.backward()", "with model.no_sync():\n        loss.backward()"), 8, True),
    (f"{PLAIN}\n    if step % 100 == 0:\n        print(loss)\n        continue", 1, False),
    (f"accumulated_tokens = 3\n    {PLAIN}\n    scheduler.step()", 1, False),
])  # fmt: skip
def test_passes_of_a_step(tmp_path: Path, passes: str, steps: int, last: bool) -> None:
    found = looped(tmp_path, LAYERED, MIXED, passes)
    assert (found.fields["num_microbatches"], "gradient_sync=last" in found.trainer) == (steps, last)


@pytest.mark.parametrize(("passes", "steps"), [
    (f"if step % world_size != rank:\n        continue\n    {PLAIN}", 1),
    (SUMMED.replace("== 0:", "== 0 or step == last:"), 8), (SUMMED.replace("== 0:", "!= 0:\n        log(loss)\n    else:"), 8),
    (SUMMED.replace("if (step + 1) % args.accumulate == 0:", "ends = (step + 1) % args.accumulate == 0\n    if ends:"), 8),
    (PLAIN.replace("optimizer.step()", "update(optimizer)\ndef update(it):\n    it.step()"), 1),
    ("for part in batch:\n        (model(**part).loss / 3).backward()\n    optimizer.step()", 3),
    ("for part in batch:\n        model(**part).loss.backward()\n        optimizer.step()", 1),
    ("for _ in range(args.accumulate):\n        model(**batch).loss.backward()\n    optimizer.step()", 8),
])  # fmt: skip
def test_passes_of_other_forms_are_counted_too(tmp_path: Path, passes: str, steps: int) -> None:
    """Some were read as the number of any condition or loop beside the step."""
    found = looped(tmp_path, LAYERED, MIXED, passes)
    assert (asked_for(found), found.fields["num_microbatches"]) == ([], steps)


@pytest.mark.parametrize("passes", ["loss = accumulated(model, batch)\n    loss.backward()", f"grad_accum_steps = 4\n    {PLAIN}"])
def test_passes_that_are_not_understood_are_asked_for(tmp_path: Path, passes: str) -> None:
    assert asked_for(looped(tmp_path, LAYERED, MIXED, passes)) == ["gradient_accumulation_steps"]


LAYERS = "words = {}\nwords['mp_policy'] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)\n" + (
    "for layer in model.modules():\n    if isinstance(layer, LlamaDecoderLayer):\n        fully_shard(layer, **words)\n"
)


@pytest.mark.parametrize(("wrap", "zero", "one"), [
    (f"{LAYERS}fully_shard(model, **words)", 3, False), ("fully_shard(model)", 3, True),
    (LAYERS.replace("**words", "**words, reshard_after_forward=False"), 2, False),
])  # fmt: skip
def test_fully_shard(tmp_path: Path, wrap: str, zero: int, one: bool) -> None:
    found = looped(tmp_path, wrap)
    assert (found.fields["zero"], "one unit" in " ".join(found.notes)) == (zero, one)
    assert one or found.trainer == f"{FOREACH}+reduce_dtype=fp32"


def test_a_mesh_of_groups_and_one_of_other_degrees(tmp_path: Path) -> None:
    mesh = "mesh = init_device_mesh('cuda', (4, 2), mesh_dim_names=('replicate', 'shard'))\nfully_shard(model, mesh=mesh)"
    assert looped(tmp_path, mesh).fields["dp_shard"] == 2
    found = looped(tmp_path, mesh.replace("init_device_mesh", "own_mesh"))
    assert asked_for(found) == [] and any("a mesh of unknown sizes: priced is one group" in one for one in found.notes)
    with pytest.raises(PlannerError, match="a mesh of dp, ep, whose degrees are not read; say its layout by flags: plan estimate"):
        looped(tmp_path, mesh.replace("'replicate', 'shard'", "'dp', 'ep'"))


@pytest.mark.parametrize(("words", "sentence"), [
    ("(3, 2), mesh_dim_names=('replicate', 'shard')", r"has a mesh of replicate, shard: 3 x 2 are not 8 GPUs; say --gpus N"),
    ("(2,), mesh_dim_names=('shard',)", "has a mesh of shard: 2 are not 8 GPUs"),
    ("(4, 2), mesh_dim_names=('dp',)", r"has a mesh of dp over \[4, 2\], which is not followed"),
    ("(4, 2), mesh_dim_names=('dp', 'dp')", "has a mesh of dp, dp over"),
    ("(4, 2), mesh_dim_names=NAMES", r"has a mesh of \$?\{?NAMES\}? over"),
    ("SIZES, mesh_dim_names=('replicate', 'shard')", "replicate, shard over .*SIZES.*, which is not followed"),
    ("(4, 2), mesh_dim_names=('replicate', 'tp')", "replicate, tp, whose degrees are not read"),
])  # fmt: skip
def test_meshes_that_are_not_followed_are_refused_with_their_numbers(tmp_path: Path, words: str, sentence: str) -> None:
    """Sizes that do not give the GPUs were taken, names of characters were listed, and one name of two was an IndexError."""
    with pytest.raises(PlannerError, match=sentence):
        looped(tmp_path, f"mesh = init_device_mesh('cuda', {words})\nfully_shard(model, mesh=mesh)")


CAST = """with torch.autocast('cuda', dtype=torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    optimizer.step()"""


@pytest.mark.parametrize(("passes", "dtype", "precision"), [
    (PLAIN, "bfloat16", "bf16_true"), (PLAIN, "float32", "fp32"), (CAST, "float32", "bf16"),
    (CAST.replace(", dtype=torch.bfloat16", ""), "float32", "fp16"),
])  # fmt: skip
def test_ddp_and_autocast(tmp_path: Path, passes: str, dtype: str, precision: str) -> None:
    found = looped(tmp_path, "model = DDP(model)", passes=passes, dtype=dtype)
    assert (asked_for(found), found.precision, found.fields["zero"]) == ([], precision, 0)


def test_autocast_over_fsdp_in_fp32_is_noted(tmp_path: Path) -> None:
    assert "autocast over weights in fp32" in " ".join(looped(tmp_path, LAYERED, "", CAST, "float32").notes)
    assert "autocast over weights" not in " ".join(looped(tmp_path, LAYERED, "", CAST).notes)


def test_passes_of_ddp_without_no_sync_are_noted(tmp_path: Path) -> None:
    assert "reduces gradients in every pass" in " ".join(looped(tmp_path, "model = DDP(model)", passes=SUMMED).notes)


ENGINED = "model, _, _, _ = deepspeed.initialize(model=model, config=CONFIG, optimizer=torch.optim.AdamW(model.parameters()))"
ENGINE_PASS = "loss = model(**batch).loss\n    model.backward(loss)\n    model.step()"


@pytest.mark.parametrize("form", ["literal", "file", "open"])
def test_deepspeed_initialize(tmp_path: Path, form: str) -> None:
    """The batch of the loader counts before that of the JSON; the passes of a step are the engine's."""
    written(tmp_path, json.dumps(ENGINE), "ds.json")
    config = {"literal": repr(ENGINE), "file": "'ds.json'", "open": "args.ds_config"}[form]
    wrap = ENGINED.replace("CONFIG", config)
    found = looped(tmp_path, wrap, passes=ENGINE_PASS)
    wanted = {"zero": 3, "micro_batch_size": 4, "num_microbatches": 4, "offload_optimizer": 100}
    if form == "open":
        assert asked_for(found) == ["deepspeed"]
        return
    assert (asked_for(found), found.trainer, found.precision) == ([], "deepspeed", "bf16")
    assert wanted.items() <= found.fields.items()


def test_a_loader_of_the_engine_has_its_batch(tmp_path: Path) -> None:
    """training_data: the loader that stands in the program is not used."""
    wrap = ENGINED.replace("CONFIG", f"{ENGINE!r}, training_data=rows")
    assert looped(tmp_path, wrap, passes=ENGINE_PASS).fields["micro_batch_size"] == 2


def test_what_is_put_into_the_configuration_of_an_engine_counts(tmp_path: Path) -> None:
    """Of a file that is loaded too; the last key of each is asked for where its condition is not known."""
    written(tmp_path, json.dumps(ENGINE), "ds.json")
    put = "import json\nconfig = json.load(open('ds.json'))\nconfig['zero_optimization']['stage'] = 2\n"
    put += "config['gradient_accumulation_steps'] = 16"
    found = looped(tmp_path, ENGINED.replace("CONFIG", "config"), passes=ENGINE_PASS, before=put)
    assert (asked_for(found), found.fields["zero"], found.fields["num_microbatches"]) == ([], 2, 16)
    found = looped(tmp_path, ENGINED.replace("CONFIG", "config"), passes=ENGINE_PASS, before=f"{put}\nif here():\n    "
                   "config['zero_optimization']['stage'] = 3")  # fmt: skip
    assert [(one.name, one.choices) for one in found.questions] == [("stage", ("0", "1", "2", "3"))]
    found = read(tmp_path / "loop.py", None, Given(num_gpus=8, settings={"stage": "3"}))
    assert (asked_for(found), found.fields["zero"]) == ([], 3) and "stage" not in " ".join(found.unread)


@pytest.mark.parametrize(("before", "config"), [
    ("", f"{{**base(args), **{ENGINE!r}}}"), ("", "dict(base(args), train_batch_size=8)"),
    ("", "{'zero_optimization': {**of(args)}}"),
    (f"config = {ENGINE!r}\nconfig.update(base(args))", "config"),
    (f"config = {ENGINE!r}\nconfig['bf16'].update({{'enabled': False}})", "config"),
    (f"def own():\n    it = {ENGINE!r}\n    it['zero_optimization']['stage'] = 1\n    return it", "own()"),
    (f"def own():\n    return {{**base(), **{ENGINE!r}}}\nconfig = own()", "config"),
    (f"config = {ENGINE!r}\nconfig.setdefault('fp16', {{}})", "config"),
    (f"def grown(it):\n    it['zero_optimization'] = {{'stage': 1}}\nconfig = {ENGINE!r}\ngrown(config)", "config"),
    (f"config = {ENGINE!r}\nconfig['zero_optimization'] = here()", "config"),
    (f"config = {ENGINE!r}\nconfig['bf16']['enabled'] = here()", "config"),
    (f"config = {ENGINE!r}\nif here():\n    config['zero_optimization']['offload_param'] = {{'device': 'cpu'}}", "config"),
])  # fmt: skip
def test_a_configuration_of_an_engine_that_is_open_in_part_is_asked_for(tmp_path: Path, before: str, config: str) -> None:
    """What was spread or put into it and is not known was left out: ZeRO 0 in fp32, in silence."""
    found = looped(tmp_path, ENGINED.replace("CONFIG", config), passes=ENGINE_PASS, before=before)
    assert asked_for(found) == ["deepspeed"]
    file = written(tmp_path, json.dumps(ENGINE), "own.json")
    found = read(tmp_path / "loop.py", None, Given(num_gpus=8, settings={"deepspeed": str(file)}))
    assert (asked_for(found), found.fields["zero"], found.fields["num_microbatches"]) == ([], 3, 4)


def test_what_is_put_deep_into_the_configuration_of_an_engine_counts(tmp_path: Path) -> None:
    put = f"config = {ENGINE!r}\nconfig['zero_optimization']['offload_optimizer']['device'] = 'none'"
    found = looped(tmp_path, ENGINED.replace("CONFIG", "config"), passes=ENGINE_PASS, before=put)
    assert (asked_for(found), found.fields.get("offload_optimizer", 0)) == ([], 0)


@pytest.mark.parametrize(("config", "sentence"), [
    ({"bf16": True}, "bf16 of DeepSpeed is True; it must be a section of settings"),
    ({"zero_optimization": [3]}, "zero_optimization of DeepSpeed is .*; it must be a section"),
    ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, "train_batch_size by the GPUs .*: 8 does not divide by 16"),
    ({**ENGINE, "train_batch_size": 128}, "train_batch_size is 128, but 2 x 4 x 8 are 64"),
])  # fmt: skip
def test_a_configuration_that_deepspeed_does_not_take_is_refused(tmp_path: Path, config: dict[str, object], sentence: str) -> None:
    """An AttributeError, and numbers that were rounded."""
    with pytest.raises(PlannerError, match=sentence):
        looped(tmp_path, ENGINED.replace("CONFIG", repr(config)), passes=ENGINE_PASS)


def test_an_engine_without_half_precision_computes_in_fp32(tmp_path: Path) -> None:
    """[runtime/engine.py: _configure_distributed_model: self.module.float()]"""
    found = looped(tmp_path, ENGINED.replace("CONFIG", "{'train_micro_batch_size_per_gpu': 2, 'zero_optimization': {'stage': 1}}"))
    assert (found.precision, found.fields["zero"]) == ("fp32", 1)


@pytest.mark.parametrize(
    ("before", "wrap", "sentence"),
    [("ref_model = load()", "model = DDP(model)", r"\(DDP, line \d+\) runs other models or another step beside it \(ref_model\)"),
     ("model = parallelize_module(model)", "model = DDP(model)", "splits the model by parallelize_module"),
     ("", "if args.ds_config:\n    model = DDP(model)", "DDP runs under args.ds_config, .* do not meet: say --set ds_config=VALUE"),
     ("accelerator = Accelerator()", "model = DDP(model)", "a loop over accelerate; import the command that starts it")],
)  # fmt: skip
def test_what_is_not_read_is_named(tmp_path: Path, before: str, wrap: str, sentence: str) -> None:
    with pytest.raises(PlannerError, match=sentence):
        looped(tmp_path, wrap, before=before)


def test_what_the_model_is_handed_to_is_noted(tmp_path: Path) -> None:
    """Of a command too, which had neither note and none of the refusals."""
    found = looped(tmp_path, "model = DDP(model)", before="model = Surrounded(model)")
    command = written(tmp_path, "torchrun --nproc_per_node 8 loop.py\n", "run.sh")
    for one in (found, read(command, None, Given())):
        assert "model is handed to Surrounded" in " ".join(one.notes) and "loop is the program's own (DDP" in " ".join(one.notes)
    written(tmp_path, (tmp_path / "loop.py").read_text().replace("Surrounded(model)", "parallelize_module(model)"), "loop.py")
    with pytest.raises(PlannerError, match="splits the model by parallelize_module"):
        read(command, None, Given())


def test_a_process_among_several_is_one_of_them(tmp_path: Path) -> None:
    """RANK is set where there are several GPUs, and an option local_rank given: both were refused."""
    wrap = "import os\nddp = int(os.environ.get('RANK', -1)) != -1\nif ddp:\n    model = DDP(model)"
    assert looped(tmp_path, wrap).fields["zero"] == 0
    option = "parser.add_argument('--local_rank', type=int, default=-1)\nargs = parser.parse_args()"
    assert looped(tmp_path, "if args.local_rank != -1:\n    model = DDP(model)", before=option).fields["zero"] == 0
    found = read(written(tmp_path, "torchrun --nproc_per_node 8 loop.py\n", "run.sh"), None, Given())
    assert (asked_for(found), found.fields["micro_batch_size"]) == ([], 4)


@pytest.mark.parametrize("loader", ["eval_loader = torch.utils.data.DataLoader(rows2, batch_size=1)",
                                    "test = torch.utils.data.DataLoader(rows2, batch_size=1)"])  # fmt: skip
def test_loaders_of_other_data_are_told_by_what_they_are_of(tmp_path: Path, loader: str) -> None:
    """A word of what rows are put together by is none of data."""
    looped(tmp_path, LAYERED, MIXED, before=loader)
    text = (tmp_path / "loop.py").read_text().replace("(rows, ", "(latest, collate_fn=valid_only, ")
    found = read(written(tmp_path, text, "loop.py"), None, Given(num_gpus=8))
    assert (asked_for(found), found.fields["micro_batch_size"]) == ([], 4)


def test_empty_lines_cost_nothing(tmp_path: Path) -> None:
    """They took seconds, of every program."""
    looped(tmp_path, LAYERED, MIXED)
    text = (tmp_path / "loop.py").read_text().replace("BEFORE", "") + "\n" * 30_000
    start = time.perf_counter()
    assert re.search(FORM[1], "\n" * 30_000, re.MULTILINE) is None and re.search(FORM[1], text, re.MULTILINE) is not None
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("call", ["apply_activation_checkpointing(model, check_fn=is_layer)", "own.apply_checkpointing(model)"])
def test_checkpointing_by_torch(tmp_path: Path, call: str) -> None:
    assert looped(tmp_path, LAYERED, before=call).fields["recompute"] == 2


def test_a_command_starts_such_a_loop(tmp_path: Path) -> None:
    """How it splits and what it computes in were asked for."""
    looped(tmp_path, LAYERED, MIXED, SUMMED, "float32")
    found = read(written(tmp_path, "torchrun --nproc_per_node 8 loop.py --accumulate 2\n", "run.sh"), None, Given())
    assert (asked_for(found), found.precision, found.fields["zero"]) == ([], "bf16", 3)
    assert (found.fields["micro_batch_size"], found.fields["num_microbatches"]) == (4, 2)


def test_a_command_hands_its_options_to_the_configuration_of_an_engine(tmp_path: Path) -> None:
    """Its precision was asked for, and its passes were those of nobody."""
    config = "{'train_micro_batch_size_per_gpu': 2, 'bf16': {'enabled': True}, 'zero_optimization': {'stage': args.zero_stage}}"
    more = 'parser.add_argument("--zero_stage", type=int, default=0)\nparser = deepspeed.add_config_arguments(parser)\nargs ='
    looped(tmp_path, ENGINED.replace("CONFIG", config), passes=ENGINE_PASS)
    written(tmp_path, (tmp_path / "loop.py").read_text().replace("args =", more), "loop.py")
    found = read(written(tmp_path, "deepspeed --num_gpus 8 loop.py --deepspeed --zero_stage 3\n", "run.sh"), None, Given())
    assert (asked_for(found), found.precision, found.fields["zero"], found.fields["micro_batch_size"]) == ([], "bf16", 3, 4)


def test_a_trainer_goes_before_its_wrapper(tmp_path: Path) -> None:
    """A file with a trainer stays that of its reader."""
    text = "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n" + (
        "model = DDP(AutoModelForCausalLM.from_pretrained('Qwen/Qwen2.5-7B', torch_dtype='bfloat16'))\n"
        "Trainer(model=model, args=TrainingArguments('out', per_device_train_batch_size=2, bf16=True)).train()\n"
    )
    found = read(written(tmp_path, text, "tune.py"), None, Given(num_gpus=8, settings={"fsdp": "no_shard"}))
    assert found.fields["micro_batch_size"] == 2 and "the training loop" not in " ".join(found.notes)
