"""What stands under conditions, in loops and in functions that nothing calls, in configurations written in Python."""

from pathlib import Path

import pytest
from import_files import NEMO_RL, asked_for, written

from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.given import Given

BRIDGE = '''
import os
from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _sft_common

def _number(name, usual):
    """A variable of the environment."""
    return int(os.environ.get(name, str(usual)))

def my_sft_config():
    overlap = os.environ.get("OVERLAP", "on").lower() == "on"
    pp = _number("STAGES", 4)
    cfg = _sft_common()
    cfg.model = AutoBridge.from_hf_pretrained("Qwen/Qwen3-30B-A3B").to_megatron_provider(load_weights=False)
    part = cfg.model
    cfg.model.seq_length = 4096
    cfg.dataset.seq_length = 4096
    part.tensor_model_parallel_size = _number("TENSORS", 2)
    part.pipeline_model_parallel_size = pp
    part.expert_model_parallel_size = 4
    part.expert_tensor_parallel_size = 1
    cfg.train.global_batch_size = _number("BATCH", 64)
    cfg.train.micro_batch_size = 1
    for one in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        if hasattr(part, one):
            setattr(part, one, False)
    if overlap and pp > 1:
        part.virtual_pipeline_model_parallel_size = 3
        part.recompute_granularity = None
    else:
        part.recompute_granularity = "full"
        part.recompute_method = "uniform"
        part.recompute_num_layers = 1
    for one in (getattr(cfg, "comm_overlap", None), part):
        if one is None:
            continue
        one.overlap_moe_expert_parallel_comm = overlap
    apply_flex_dispatcher_backend(cfg.model, "deepep")
    return cfg
'''


def test_a_recipe_of_megatron_bridge_is_followed_through_conditions_and_loops(tmp_path: Path) -> None:
    found = read(written(tmp_path, BRIDGE, "my_sft.py"), "megatron-bridge", Given(num_gpus=16))
    assert [found.fields[one] for one in ("tp", "pp", "vpp", "ep", "num_microbatches")] == [2, 4, 3, 4, 32]
    assert found.fields["recompute"] == 0
    assert "expert_dispatch=deepep+expert_overlap=on" in found.trainer
    assert asked_for(found) == []
    assert "variables of the environment at their defaults: OVERLAP, STAGES, TENSORS, BATCH" in found.notes


def test_a_variable_that_is_said_takes_the_other_branch(tmp_path: Path) -> None:
    said = Given(num_gpus=16, settings={"OVERLAP": "off", "STAGES": "2"})
    found = read(written(tmp_path, BRIDGE, "my_sft.py"), "megatron-bridge", said)
    assert found.fields["pp"] == 2
    assert found.fields.get("vpp", 1) == 1
    assert found.fields["recompute"] > 0


def test_what_hangs_on_a_condition_that_is_not_known_is_asked_for(tmp_path: Path) -> None:
    text = BRIDGE.replace("if overlap and pp > 1:", "if torch.cuda.get_device_properties(0).major > 9:")
    asked = asked_for(read(written(tmp_path, text, "my_sft.py"), "megatron-bridge", Given(num_gpus=16)))
    assert "model.virtual_pipeline_model_parallel_size" in asked
    assert "model.recompute_granularity" in asked


def test_a_precision_that_is_not_known_is_asked_for_by_its_name(tmp_path: Path) -> None:
    text = BRIDGE.replace("my_sft_config()", "my_sft_config(kind)")
    text = text.replace("    return cfg", "    cfg.mixed_precision = get_mixed_precision_config(kind)\n    return cfg")
    assert asked_for(read(written(tmp_path, text, "my_sft.py"), "megatron-bridge", Given(num_gpus=16))) == ["mixed_precision"]


def test_what_a_module_beside_sets_under_conditions_is_asked_for(tmp_path: Path) -> None:
    written(tmp_path, """
from megatron.bridge.recipes.qwen import qwen3_8b_sft_config

def base_config():
    cfg = qwen3_8b_sft_config()
    if small():
        cfg.train.micro_batch_size = 4
    return cfg
""", "shared.py")
    path = written(tmp_path, "import shared\nfrom . import shared\ncfg = shared.base_config()\nfinetune(cfg, step)\n", "train.py")
    found = read(path, "megatron-bridge", Given(num_gpus=16))
    assert "train.micro_batch_size" in asked_for(found)


def test_what_a_program_changes_behind_its_own_recipe_counts(tmp_path: Path) -> None:
    text = BRIDGE + """
def main():
    cfg = my_sft_config()
    cfg.train.micro_batch_size = 2
    finetune(config=cfg, forward_step_func=step)

if __name__ == "__main__":
    main()
"""
    found = read(written(tmp_path, text, "my_sft.py"), "megatron-bridge", Given(num_gpus=16))
    assert (found.fields["micro_batch_size"], found.fields["num_microbatches"]) == (2, 16)


NEMO = """
import argparse
import nemo_run as run
from nemo.collections import llm

def other(gpus):
    return run.Partial(
        llm.finetune, model=run.Config(llm.HFAutoModelForCausalLM, model_name="google/gemma-2-2b-it"),
        trainer=run.Config(Trainer, devices=gpus, strategy="ddp", accumulate_grad_batches=10),
        data=run.Config(llm.MockDataModule, seq_length=512, micro_batch_size=4, global_batch_size=512),
    )

def recipe(args):
    kind = getattr(llm, args.kind)
    found = kind.finetune_recipe(name="a", num_nodes=1, num_gpus_per_node=8, peft_scheme=None)
    found.data = run.Config(llm.SquadDataModule, seq_length=4096, micro_batch_size=1, global_batch_size=64)
    return found

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="llama3_8b")
    args = parser.parse_args()
    run.run(recipe(args))

if __name__ == "__main__":
    main()
"""


def test_functions_of_a_nemo_program_that_nothing_calls_do_not_count(tmp_path: Path) -> None:
    found = read(written(tmp_path, NEMO, "train.py"), "nemo", Given())
    assert found.model is not None and found.model.name == "llama-3-8b"
    assert (found.sequence_length, found.global_batch_size, found.fields["micro_batch_size"]) == (4096, 64, 1)
    assert any("recipe llama3_8b" in one for one in found.notes)


def test_a_recipe_of_nemo_that_an_option_names(tmp_path: Path) -> None:
    path = written(tmp_path, NEMO.replace('default="llama3_8b"', "required=True"), "train.py")
    with pytest.raises(PlannerError, match="--set kind="):
        read(path, "nemo", Given())
    found = read(path, "nemo", Given(settings={"kind": "llama3_70b"}))
    assert found.model is not None and found.model.name == "llama-3-70b"


def test_a_model_of_transformers_in_nemo_is_refused_by_its_class(tmp_path: Path) -> None:
    path = written(tmp_path, NEMO.replace("run.run(recipe(args))", "run.run(other(8))"), "train.py")
    with pytest.raises(PlannerError, match="HFAutoModelForCausalLM is a model of transformers under a strategy of Lightning"):
        read(path, "nemo", Given())


@pytest.mark.parametrize(
    ("name", "recompute", "sentence"),
    [
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", Recompute.NONE, "the plan recomputes nothing: memory comes out too high"),
        ("nvidia/Nemotron-H-8B-Base-8K", Recompute.FULL, "blocks of attention keep all that they compute"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", Recompute.FULL, "whose linear attention is not called self_attn"),
        ("mistralai/Mixtral-8x7B-v0.1", Recompute.FULL, "experts in a module that is not called mlp"),
        ("Qwen/Qwen3-8B", Recompute.FULL, "four inputs of a layer are kept and the plan has one"),
    ],
)  # fmt: skip
def test_what_automodel_recomputes_goes_by_the_kind_of_layers(tmp_path: Path, name: str, recompute: int, sentence: str) -> None:
    rl = NEMO_RL.replace("Qwen/Qwen3-8B", name) + "  dtensor_cfg: {_v2: true, enabled: true, activation_checkpointing: true}\n"
    own = f"""recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {{global_batch_size: 64, local_batch_size: 1}}
model: {{_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: {name}}}
packed_sequence: {{packed_sequence_size: 4096}}
distributed: {{strategy: fsdp2, activation_checkpointing: true}}
"""
    for text in (rl, own):
        found = read(written(tmp_path, text), None, Given(num_gpus=8))
        assert found.fields["recompute"] == recompute
        assert sentence in " ".join(found.notes)


def test_the_buckets_of_torchs_data_parallelism_are_said(tmp_path: Path) -> None:
    words = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 --fp16 "
    words += "--micro-batch-size 4 --global-batch-size 64 --vocab-size 50257 --checkpoint-activations"
    for kind, says in (("torch", True), ("local", False)):
        text = f"torchrun --nproc_per_node 8 pretrain_gpt.py {words} --DDP-impl {kind}\n"
        found = read(written(tmp_path, text, "train.sh"), None, Given())
        assert ("a second copy of the gradients in their type" in " ".join(found.notes)) is says
        assert ("DDP_impl" in found.noise) is not says


VERL = """
PYTHONPATH=src torchrun --nproc_per_node=4 -m mine.my_sft_trainer data.train_files=a.parquet data.train_batch_size=32 \\
    data.micro_batch_size_per_gpu=2 data.max_length=4096 model.partial_pretrain=Qwen/Qwen2.5-1.5B \\
    model.enable_gradient_checkpointing=True trainer.total_epochs=1 +check.samples=10
"""
SUBCLASS = """
from verl.trainer.fsdp_sft_trainer import FSDPSFTTrainer

class Mine(FSDPSFTTrainer):
    def fit(self):
        pass
"""


def test_a_subclass_of_verls_sft_trainer_is_read_as_that(tmp_path: Path) -> None:
    path = written(tmp_path / "scripts" / "run", VERL, "sft.sh")
    file = written(tmp_path / "src" / "mine", SUBCLASS, "my_sft_trainer.py")
    found = read(path, None, Given())
    assert (found.num_gpus, found.sequence_length, found.global_batch_size) == (4, 4096, 32)
    assert [found.fields[one] for one in ("micro_batch_size", "num_microbatches", "zero")] == [2, 4, 3]
    assert "a subclass of verl's FSDPSFTTrainer, with fit of its own" in " ".join(found.notes)
    file.write_text(SUBCLASS.replace("(FSDPSFTTrainer)", ""))
    with pytest.raises(PlannerError, match="no program of verl"):
        read(path, "verl", Given())
