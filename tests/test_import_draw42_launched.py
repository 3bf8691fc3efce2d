"""Programs of NeMo behind options and launchers: recipes that an option chooses, and commands whose output a variable takes."""

from pathlib import Path

import pytest
from import_files import written

from planner.trainers.reading import read
from planner.trainers.reading.given import Given, OpenQuestionsError

PROGRAM = """
import argparse
from nemo.collections import llm
from nemo.collections.llm.recipes.precision.mixed_precision import bf16_with_fp8_mixed, bf16_with_mxfp8_mixed
import nemo_run as run


def configure(args):
    if args.model == "llama31_8b":
        model = llm.llama31_8b
    elif args.model == "qwen3_30b_a3b":
        model = llm.qwen3_30b_a3b
    else:
        raise ValueError(args.model)
    recipe = model.pretrain_recipe(name="a", num_nodes=args.num_nodes, num_gpus_per_node=8)
    recipe.trainer.strategy.tensor_model_parallel_size = args.tp
    if args.fp8:
        if args.fp8_recipe == "delayed":
            recipe.trainer.plugins = bf16_with_fp8_mixed()
        else:
            recipe.trainer.plugins = bf16_with_mxfp8_mixed()
    return recipe


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-M", "--model", default="llama31_8b", choices=["llama31_8b", "qwen3_30b_a3b"])
    parser.add_argument("-N", "--num_nodes", type=int, default=1)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--fp8_recipe", default="delayed")
    args = parser.parse_args()
    run.run(configure(args), executor=run.LocalExecutor())
"""


def _model(file: Path, **settings: str) -> list[object]:
    found = read(file, None, Given(settings=settings))
    assert found.model is not None
    return [found.model.name, found.precision, found.fields["tp"], found.num_gpus]


def test_an_option_chooses_the_recipe_and_its_precision(tmp_path: Path) -> None:
    file = written(tmp_path, PROGRAM, "train.py")
    assert _model(file) == ["llama-3.1-8b", "bf16", 4, 8]
    assert _model(file, model="qwen3_30b_a3b", num_nodes="2") == ["qwen3-30b-a3b", "bf16", 4, 16]
    assert _model(file, fp8="true") == ["llama-3.1-8b", "fp8", 4, 8]
    assert _model(file, fp8="true", fp8_recipe="mxfp8") == ["llama-3.1-8b", "mxfp8", 4, 8]


def test_a_program_whose_output_a_variable_takes_is_started(tmp_path: Path) -> None:
    written(tmp_path, PROGRAM, "train.py")
    script = (
        "TP=2\nNODES=4\nid=$(srun -p defq --container-image nemo bash -c \\\n"
        '"python train.py \\\n    --model qwen3_30b_a3b --num_nodes ${NODES} \\\n    --tp ${TP} --fp8" | grep Job | tail -1)\n'
        "echo $id\nsbatch --requeue experiments/${id}/a.sh\n"
    )
    assert _model(written(tmp_path, script, "run.sh")) == ["qwen3-30b-a3b", "fp8", 2, 32]
    plain = 'gpus=$(python -c "import torch; print(torch.cuda.device_count())")\nid=$(date +%s)\n'
    assert _model(written(tmp_path, f"{plain}python train.py --tp 2\n", "run.sh"))[2] == 2


def test_a_recipe_that_nothing_chooses_is_asked_for(tmp_path: Path) -> None:
    file = written(tmp_path, PROGRAM.replace('default="llama31_8b", ', "required=True, "), "train.py")
    with pytest.raises(OpenQuestionsError, match=r"--set recipe=llama31_8b\|qwen3_30b_a3b"):
        read(file)
    assert _model(file, recipe="qwen3_30b_a3b")[0] == "qwen3-30b-a3b"
    assert _model(file, model="llama31_8b")[0] == "llama-3.1-8b"


OF_UNSLOTH = """
from dataclasses import dataclass, field
from transformers import AutoModelForCausalLM, HfArgumentParser
from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel


@dataclass
class ModelArguments:
    model_path: str = field(default="")
    peft_method: str = field(default="lora")


parser = HfArgumentParser((ModelArguments, SFTConfig))
model_args, config = parser.parse_args_into_dataclasses()
if model_args.peft_method == "lora":
    model, tokenizer = FastLanguageModel.from_pretrained(model_name=model_args.model_path, max_seq_length=2048, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(
        model, r=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], lora_dropout=0
    )
else:
    model = AutoModelForCausalLM.from_pretrained(model_args.model_path, torch_dtype="float32")
trainer = SFTTrainer(model=model, train_dataset=data, args=config)
trainer.train()
"""


def test_adapters_that_unsloth_makes_in_a_program_behind_a_script(tmp_path: Path) -> None:
    written(tmp_path, OF_UNSLOTH, "sft.py")
    words = "--per_device_train_batch_size 2 --max_length 2048 --bf16 true --peft_method lora"
    found = read(written(tmp_path, f"python sft.py --model_path Qwen/Qwen3-8B {words}\n", "run.sh"), None, Given(num_gpus=1))
    assert (found.lora_rank, found.lora_targets, found.frozen_weights) == (32, "all", "bf16")
