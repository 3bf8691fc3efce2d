"""Programs that build the command of a Megatron training as lists of words."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

LAUNCHER = '''
import argparse, json, subprocess
def sizes(folder):
    config = json.load(open(folder + "/config.json"))
    return {"layers": config["num_hidden_layers"], "gated": config.get("gated")}
def command(args, arch):
    first = ["torchrun", f"--nproc_per_node={args.procs}", "pretrain_gpt.py"]
    model = ["--num-layers", str(arch["layers"]), "--normalization", "RMSNorm"]
    if arch["gated"]:
        model.append("--swiglu")
    flags = ["--tensor-model-parallel-size", str(args.tensor), "--micro-batch-size", str(args.micro), "--seq-length", "4096"]
    flags += ["--global-batch-size", str(args.batch), "--bf16"]
    if args.recompute:
        flags.extend(["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"])
    if args.sequence_parallel:
        flags.append("--sequence-parallel")
    return first + model + flags
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--procs", type=int, default=8)
    parser.add_argument("--tensor", type=int, default=4)
    parser.add_argument("--micro", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--sequence-parallel", action="store_true", default=True)
    args = parser.parse_args()
    subprocess.run(command(args, sizes("somewhere")), check=True)
main()
'''


def _read(tmp_path: Path, text: str, **settings: str) -> Reading:
    return read(written(tmp_path, text, "run.py"), None, Given(model="llama-3.1-8b", settings=settings))


def test_its_options_have_their_defaults(tmp_path: Path) -> None:
    found = _read(tmp_path, LAUNCHER)
    wanted = {"tp": 4, "micro_batch_size": 2, "recompute": 0, "sequence_parallel": True}
    assert {name: found.fields[name] for name in wanted} == wanted and not asked_for(found)
    assert (found.num_gpus, found.global_batch_size, found.sequence_length) == (8, 64, 4096)
    assert any(one.startswith("sizes that the program reads from a file (--num-layers)") for one in found.notes)
    assert any("options of the program at their defaults: procs, " in one for one in found.notes)


def test_an_option_is_said(tmp_path: Path) -> None:
    found = _read(tmp_path, LAUNCHER, tensor="2", recompute="true")
    assert (found.fields["tp"], found.fields["recompute"]) == (2, 2)


@pytest.mark.parametrize(("old", "new", "said"), [
    ("if args.recompute:", "if torch.cuda.device_count() > 4:", "a command of Megatron that is not followed here"),
    ('"--bf16"]', '"--bf16"]\n    more = {"--context-parallel-size": 2}', "put the command that it starts into a shell script"),
    ("subprocess.run(command(args, sizes(\"somewhere\")), check=True)", "print(command(args, {}))", "import the script or file"),
])  # fmt: skip
def test_what_is_not_followed_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = LAUNCHER.replace(old, new).replace("json, subprocess", "json" if "print" in new else "json, subprocess")
    with pytest.raises(PlannerError) as error:
        _read(tmp_path, text)
    assert said in str(error.value)
