"""Options that start a script of OLMo-core, laid over what it configures; commands of shells and launchers."""

from pathlib import Path

import pytest
from import_files import written
from test_import_olmo_core import SCRIPT, USUAL

from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError

TORCHRUN = "torchrun --nproc-per-node=8 --nnodes=2 train.py train run1 cluster"


def _read(folder: Path, options: str = "", command: str = TORCHRUN, said: Given | None = None, **parts: str) -> Reading:
    written(folder, SCRIPT.format(**{**USUAL, **parts}), "train.py")
    return read(written(folder, f"#!/bin/bash\n{command} {options}\n", "job.sh"), None, said or Given())


@pytest.mark.parametrize(("option", "fields"), [
    ("", {"dp": 16, "micro_batch_size": 2, "num_microbatches": 4}),
    ("--train_module.rank_microbatch_size=$((4 * 2048))", {"micro_batch_size": 4, "num_microbatches": 2}),
    ("--train_module.rank_microbatch_size 8192", {"micro_batch_size": 4, "num_microbatches": 2}),
    ("--data_loader.global_batch_size=524288", {"num_microbatches": 8}),
    ('data_loader.global_batch_size="524288" train_module.rank_microbatch_size=8192', {"num_microbatches": 4}),
    ("--dataset.sequence_length=4096", {"micro_batch_size": 1 * 2, "num_microbatches": 2}),
    ("--train_module.dp_config.name=hsdp --train_module.dp_config.shard_degree=4", {"dp_shard": 4}),
    ("--train_module.tp_config.degree=2", {"tp": 2, "dp": 8}),
    ("--train_module.ac_config.mode=full", {"recompute": int(Recompute.FULL)}),
    ("--trainer.max_duration.value=10 --train_module.optim.lr=1e-3 --model.block.attention.backend=torch", {"dp": 16}),
    ("--launch.num_nodes=8", {"dp": 16}),  # the job runs where torchrun starts it
])  # fmt: skip
def test_options_over_the_program(tmp_path: Path, option: str, fields: dict[str, int]) -> None:
    assert fields.items() <= _read(tmp_path, option).fields.items()


def test_options_that_say_more_than_degrees(tmp_path: Path) -> None:
    assert _read(tmp_path, "--train_module.compile_model=false").trainer == "torchtitan+compile=off"
    assert _read(tmp_path, "--train_module.float8_config.enabled=true").precision == "fp8"
    model = _read(tmp_path, "--model.n_layers=8 --model.vocab_size=50304").model
    assert model is not None and (model.num_layers, model.vocab_size) == (8, 50304)
    with pytest.raises(PlannerError, match="moments in bf16"):
        _read(tmp_path, "--train_module.optim.dtype=bfloat16")
    with pytest.raises(PlannerError, match="--model NAME .*changed after it is made: model.block.attention.n_kv_heads"):
        _read(tmp_path, "--model.block.attention.n_kv_heads=4")
    notes = _read(tmp_path, "--train_module.rank_microbatch_size=8192").notes
    assert notes == ("train.py with --train_module.rank_microbatch_size=8192",)


@pytest.mark.parametrize(("command", "gpus"), [
    ("python -m olmo_core.launch.beaker --nodes 4 --gpus 8 -- train.py train run1 c", 32),
    ("python train.py train_single run1 c", 1),
    ("python train.py launch run1 c --launch.num_nodes=4", 32), ("torchrun --nproc-per-node=4 train.py train run1 c", 4),
])  # fmt: skip
def test_gpus_of_a_command(tmp_path: Path, command: str, gpus: int) -> None:
    assert _read(tmp_path, command=command).num_gpus == gpus


def test_what_a_command_leaves_open_is_one_message(tmp_path: Path) -> None:
    parts = {"command": "srun python train.py train run1 c", "options": "--train_module.rank_microbatch_size=$MICRO"}
    with pytest.raises(OpenQuestionsError) as caught:
        _read(tmp_path, **parts)
    assert [one.name for one in caught.value.questions] == ["MICRO", "--gpus N"]
    found = _read(tmp_path, **parts, said=Given(num_gpus=8, settings={"MICRO": "8192"}))
    assert (found.fields["micro_batch_size"], found.num_gpus) == (4, 8)
    own = _read(tmp_path, '"$@"')
    assert own.num_gpus == 16 and any("($@) are not in the plan" in one for one in own.notes)


def test_the_same_options_by_hand(tmp_path: Path) -> None:
    file = written(tmp_path, SCRIPT.format(**USUAL), "train.py")
    said = Given(settings={"train_module.rank_microbatch_size": "8192", "launch.num_nodes": "4"})
    found = read(file, None, said)
    assert (found.num_gpus, found.fields["micro_batch_size"]) == (32, 4)
    assert said.used >= said.settings.keys()


def test_attention_within_documents_is_said(tmp_path: Path) -> None:
    data = "generate = NumpyFSLDatasetConfig(generate_doc_lengths=True)"
    assert any("ends at documents" in one for one in _read(tmp_path, before=data).notes)


def test_a_ladder_of_olmo_core_is_no_program_of_transformers(tmp_path: Path) -> None:
    written(tmp_path, "class Trainer:\n    pass\n\ndef fit():\n    return Trainer(model)\n", "olmo_core/train.py")
    text = "from olmo_core.train import fit\nif __name__ == '__main__':\n    fit()\n"
    with pytest.raises(PlannerError, match="a program of OLMo-core, of whose programs this one is not read"):
        read(written(tmp_path, text, "ladder.py"))


def test_what_a_script_says_beside_its_degrees(tmp_path: Path) -> None:
    found = _read(tmp_path, more="tp_config=TransformerTensorParallelConfig(degree=2, enable_async=True),")
    assert found.fields["tp"] == 2 and "tp_overlap=on" in found.trainer
    found = _read(tmp_path, more="own_loss_chunks=8, label_ignore_index=-100,")
    assert found.unread == ("TransformerTrainModuleConfig.own_loss_chunks",)
    never = "name=DataParallelType.fsdp, param_dtype=DType.bfloat16, reshard_after_forward=False"
    assert _read(tmp_path, dp=never).fields["zero"] == 2
    for before, said in (("cb = BatchSizeSchedulerCallback(batch_sizes=[1])", "the configured one is priced"),
                         ("data = NumpyVSLDatasetConfig.glob('x')", "priced at the longest")):  # fmt: skip
        assert any(said in one for one in _read(tmp_path, before=before).notes)


def test_a_mode_and_a_factory_that_options_choose(tmp_path: Path) -> None:
    option = 'parser.add_argument("--{}")\n    '
    before = option.format('full_ac", action="store_true') + option.format('size", default="190M')
    before += 'table = {"190M": TransformerConfig.olmo2_190M, "1M": TransformerConfig.olmo2_1M}'
    more = "ac_config=TransformerActivationCheckpointingConfig(mode=Mode.full if args.full_ac else Mode.selected_modules),"
    parts = {"before": before, "more": more, "model": "None", "after": "model = table[args.size](vocab_size=50304)"}
    with pytest.raises(OpenQuestionsError, match=r"--set ac_config=full\|none .selected_modules"):
        _read(tmp_path, **parts)
    found = _read(tmp_path, "--full_ac --size 1M", **parts)
    assert found.fields["recompute"] == Recompute.FULL and found.model is not None and found.model.name == "olmo2_1M"
    assert _read(tmp_path, said=Given(settings={"ac_config": "none"}), **parts).fields["recompute"] == 0
