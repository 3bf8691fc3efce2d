"""Programs of Megatron-Bridge under the options of their command."""

from pathlib import Path
from typing import Any

from import_files import asked_for, written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

PROGRAM = """
import argparse
from megatron.bridge.recipes.qwen import qwen3_8b_peft_config, qwen3_8b_sft_config
from megatron.bridge.training.finetune import finetune

def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-file")
    parser.add_argument("--mode", choices=["sft", "lora"], required=True)
    parser.add_argument("--tp", type=int, default=None)
    parser.add_argument("--global-batch-size", type=int, default=64)
    parser.add_argument("--no-sp", dest="sp", action="store_false")
    parser.add_argument("--lora-dim", type=int, default=16)
    return parser.parse_known_args()

def split(part, args):
    if args.tp is not None:
        part.tensor_model_parallel_size = args.tp
    part.sequence_parallel = args.sp

def main():
    args, words = options()
    if args.mode == "lora":
        cfg = qwen3_8b_peft_config(peft_scheme="lora")
        cfg.peft.dim = args.lora_dim
    else:
        cfg = qwen3_8b_sft_config()
    split(cfg.model, args)
    cfg.train.global_batch_size = args.global_batch_size
    train = cfg.train
    train.micro_batch_size = 2
    held, _ = create_omegaconf_dict_config(cfg)
    if args.config_file:
        held = OmegaConf.merge(held, OmegaConf.load(args.config_file))
    if words:
        held = parse_hydra_overrides(held, words)
    finetune(config=cfg, forward_step_func=step)

if __name__ == "__main__":
    main()
"""


def _values(found: Reading, *names: str) -> list[Any]:
    return [found.fields[one] if one in found.fields else getattr(found, one) for one in names]


def _started(folder: Path, words: str, program: str = PROGRAM, **settings: str) -> Reading:
    written(folder, program, "finetune.py")
    file = written(folder, f"TP=4\ntorchrun --nproc_per_node=8 finetune.py {words}\n", "run.sh")
    return read(file, None, Given(settings=settings))


def test_a_program_of_megatron_bridge_under_the_options_of_its_command(tmp_path: Path) -> None:
    written(tmp_path, "train: {train_iters: 9}\nmodel: {context_parallel_size: 2}\ndataset: {seq_length: 8192}\n", "conf/own.yaml")
    words = "--mode lora --config-file conf/own.yaml --tp $TP --global-batch 32 --no-sp train.micro_batch_size=1"
    found = _started(tmp_path, words)
    assert _values(found, "tp", "cp", "dp", "sequence_parallel", "micro_batch_size", "global_batch_size") == [4, 2, 1, 0, 1, 32]
    assert _values(found, "sequence_length", "lora_rank", "num_gpus") == [8192, 16, 8] and not found.questions
    found = _started(tmp_path, "--mode=sft")
    assert _values(found, "tp", "sequence_parallel", "micro_batch_size", "global_batch_size", "lora_rank") == [4, 1, 2, 64, 0]
    assert any("at their defaults: sp, global_batch_size" in one for one in found.notes)


def test_what_the_command_of_a_program_leaves_open_is_one_question(tmp_path: Path) -> None:
    assert asked_for(_started(tmp_path, "--tp 2")) == ["mode"]
    assert _started(tmp_path, "--tp 2", mode="lora").lora_rank == 16
    assert asked_for(_started(tmp_path, "--mode sft --config-file other.yaml")) == ["config_file"]


BUILT = """
from megatron.bridge import AutoBridge
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.config import ConfigContainer, TrainingConfig
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--size", default="8b")
parser.add_argument("--tp", type=int)
args = parser.parse_args()
NAMES = {"8b": "Qwen/Qwen3-8B", "14b": "Qwen/Qwen3-14B"}
model = AutoBridge.from_hf_pretrained(NAMES[args.size]).to_megatron_provider()
model.tensor_model_parallel_size = args.tp or 2
train = TrainingConfig(train_iters=10, global_batch_size=16, micro_batch_size=4)
train.micro_batch_size = 1
cfg = ConfigContainer(model=model, train=train, mixed_precision="bf16_mixed")
setattr(cfg.model, "seq_length", 4096)
cfg.model.pipeline_model_parallel_size = args.pp if False else cfg.model.pipeline_model_parallel_size
pretrain(cfg, step)
"""


def test_parts_that_a_program_changes_before_it_puts_them_together(tmp_path: Path) -> None:
    found = _started(tmp_path, "--size 14b", BUILT)
    assert found.model is not None and found.model.name == "qwen3-14b"
    assert _values(found, "tp", "dp", "micro_batch_size", "sequence_length") == [2, 4, 1, 4096]
    assert _started(tmp_path, "--tp 4", BUILT).fields["tp"] == 4


CHOSEN = """
from megatron.bridge.training.pretrain import pretrain
import megatron.bridge.recipes as recipes
def get(args):
    if args.tiny:
        return recipes.llama32_1b_pretrain_config()
    return getattr(recipes, args.recipe)()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="llama3_8b_pretrain_config")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    cfg = get(args)
    if cfg.model.context_parallel_size > 1:
        cfg.train.global_batch_size = 2 * cfg.train.global_batch_size
    pretrain(cfg, step)
if __name__ == "__main__":
    main()
"""


def test_a_recipe_that_an_option_names(tmp_path: Path) -> None:
    found = _started(tmp_path, "--recipe qwen3_600m_pretrain_config", CHOSEN)
    assert found.model is not None and found.model.name == "qwen3-0.6b"
    small = _started(tmp_path, "--tiny", CHOSEN)
    assert small.model is not None and small.model.name == "llama-3.2-1b"


def test_a_program_that_is_not_there_asks_for_its_recipe(tmp_path: Path) -> None:
    text = "# megatron.bridge\ntorchrun --nproc_per_node=8 pretrain_qwen.py model.tensor_model_parallel_size=2\n"
    file = written(tmp_path, text, "go.sh")
    assert asked_for(read(file)) == ["recipe"]
    assert read(file, None, Given(settings={"recipe": "qwen3_8b_pretrain_config"})).fields["tp"] == 2


KEPT = """
import argparse
from megatron.bridge.recipes.llama import llama31_8b_sft_config
from megatron.bridge.training.finetune import finetune
from megatron.bridge.peft.lora import LoRA
class Runner:
    def __init__(self, args):
        self.args = args
        self.cfg = llama31_8b_sft_config()
        self.cfg.model.tensor_model_parallel_size = args.tp
    def setup(self):
        self.cfg.train.global_batch_size = self.args.gbs
        self.cfg.peft = LoRA(target_modules=["linear_qkv", "linear_proj"], dim=8) if self.args.lora else None
    def run(self):
        finetune(self.cfg, step)
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--gbs", type=int, default=32)
    parser.add_argument("--lora", action="store_true")
    runner = Runner(parser.parse_args())
    runner.setup()
    runner.run()
main()
"""


def test_a_configuration_that_an_object_keeps(tmp_path: Path) -> None:
    found = _started(tmp_path, "--tp 4 --lora", KEPT)
    assert found.model is not None and found.model.name == "llama-3.1-8b"
    assert _values(found, "tp", "global_batch_size", "lora_rank", "lora_targets") == [4, 32, 8, "attention"]
    assert _started(tmp_path, "", KEPT).lora_rank == 0


LOOPS = """
import os
from megatron.bridge.recipes.llama import llama31_8b_sft_config
from megatron.bridge.training.finetune import finetune
OVER = {"model": {"tensor_model_parallel_size": 4, "context_parallel_size": 2}, "train": {"global_batch_size": 16}}
cfg = llama31_8b_sft_config()
for section, values in OVER.items():
    for key, value in values.items():
        setattr(getattr(cfg, section), key, value)
cfg.train.micro_batch_size = int(os.environ.get("MBS", "2"))
MORE
finetune(cfg, step)
"""


def test_fields_that_a_loop_sets(tmp_path: Path) -> None:
    found = _started(tmp_path, "", LOOPS.replace("MORE", ""))
    assert _values(found, "tp", "cp", "global_batch_size", "micro_batch_size") == [4, 2, 16, 2]
    more = "for key, value in vars(args).items():\n    setattr(cfg.model, key, value)"
    found = _started(tmp_path, "", LOOPS.replace("MORE", more))
    assert any("sets by names that its text does not tell" in one for one in found.notes)


OWN_FILE = """
import argparse, yaml
from megatron.bridge.recipes.llama import llama31_8b_sft_config
from megatron.bridge.training.finetune import finetune
parser = argparse.ArgumentParser()
parser.add_argument("--config", required=True)
args = parser.parse_args()
own = yaml.safe_load(open(args.config))
cfg = llama31_8b_sft_config()
cfg.model.tensor_model_parallel_size = own["parallel"]["tp"]
cfg.train = TrainingConfig(global_batch_size=own["batch"]["whole"], micro_batch_size=own["batch"].get("micro", 1))
finetune(cfg, step)
"""


def test_a_file_of_a_form_of_its_own_that_a_program_reads(tmp_path: Path) -> None:
    written(tmp_path, "parallel: {tp: 4}\nbatch: {whole: 64, micro: 2}\n", "own.yaml")
    found = _started(tmp_path, "--config own.yaml", OWN_FILE)
    assert _values(found, "tp", "global_batch_size", "micro_batch_size") == [4, 64, 2] and not found.questions
    assert asked_for(_started(tmp_path, "--config other.yaml", OWN_FILE)) == ["config_file"]
