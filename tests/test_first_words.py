"""Words that newcomers typed and that no list of flags, trainers or targets has."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import planner
from planner import library, units
from planner.commands.main import main
from planner.errors import PlannerError
from planner.model import load_model
from planner.trainers.targets import load_target

JOB = ("--model", "llama-8b", "--gpus", "8", "--hardware", "h100")


def printed(*words: str, code: int = 2) -> str:
    result = CliRunner().invoke(main, list(words), prog_name="plan")
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((*JOB, "--zero", "3"), "trainer megatron knows zero 0, 1, with a pipeline 0, 1; zero 3 is known to --trainer automodel, "),
        ((*JOB, "--lora-rank", "8", "--frozen-weights", "nf4"), "it knows bf16, fp8; nf4 is known to --trainer automodel, "),
        ((*JOB, "--trainer", "megatron,deepspeed"), "unknown trainer 'megatron,deepspeed'; one trainer at a time"),
        ((*JOB, "--flash-attention"), "Did you mean '--option'? Option of the trainer; may be repeated. [of its version] Like: "
                                      "--option attention_kernel=fa2"),
        ((*JOB, "--fsdp"), "Like: --trainer fsdp"),
        ((*JOB, "--zero-stage", "3"), "Did you mean '--zero'?"),
        (("--gpus", "8"), "Missing option '--model'. It is used like: plan --model llama-70b --gpus 8"),
        (("run", "p.yaml"), "Missing option '--to'. Exports, logs and checkpoints of the job lie here."),
        (("trainers", "mgatron"), "unknown trainer 'mgatron'; known, nearest first: megatron, "),
    ],
)  # fmt: skip
def test_sentences_name_what_was_meant(words: tuple[str, ...], sentence: str) -> None:
    assert sentence in printed(*words)


@pytest.mark.parametrize("flag", ["--budget", "--verbose", "--seed"])
def test_no_flag_is_named_that_shares_little_but_its_dashes(flag: str) -> None:
    """--budget is not --etp."""
    text = printed(*JOB, flag)
    assert f"No such option '{flag}'." in text and "Did you mean" not in text


def test_what_the_library_holds_is_asked_for_by_any_name() -> None:
    assert printed("hardware", "h100", code=0) == printed("hardware", "show", "h100-sxm", code=0)
    assert printed("hardware", "DGX H100", code=0) == printed("hardware", "h100", code=0)
    assert "Megatron-LM / Megatron Core" in printed("trainers", "mcore", code=0)
    some = printed("trainers", "megatron", code=0)
    assert "megatron-fsdp" in some and "torchtitan" not in some
    assert printed("version", code=0) == printed("--version", code=0)


def test_targets_have_the_other_names_of_their_trainers() -> None:
    assert load_target("Megatron-LM").name == load_target("mcore").name == "megatron"
    with pytest.raises(PlannerError, match=r"^slurm is a launcher: add --launcher slurm, and give --to a trainer"):
        load_target("slurm")
    with pytest.raises(PlannerError, match=r"^no target is called 'fsdp', which is a trainer; its plans are written for a"):
        load_target("huggingface")


@pytest.mark.parametrize("depth", [100, 30_000])
def test_nesting_is_one_sentence_whichever_parser_meets_it_first(depth: int) -> None:
    texts = {library.parse_yaml: "a: " + "[" * depth + "]" * depth, library.parse_json: '{"a":' * depth + "1" + "}" * depth}
    for read, text in texts.items():
        with pytest.raises(PlannerError, match=r"^it: nested deeper than 64 levels; no file of planner is$"):
            read(text, "it")


def test_tests_that_the_log_of_reviews_names_are_there() -> None:
    root = Path(__file__).parent.parent
    named = re.findall(r"`?\b(test_\w+)", (root / "docs/log/reviews.md").read_text())
    held = "\n".join(path.read_text() for path in (root / "tests").rglob("test_*.py"))
    missing = [name for name in named if f"def {name}(" not in held and not (root / "tests" / f"{name}.py").exists()]
    assert len(named) > 100 and not missing


def test_a_plan_is_no_configuration_to_import(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    planner.plan(model="llama-8b", gpus=8, hardware="h100-sxm")[0].save(path)
    assert "is a plan, as --output writes it, and a file of another kind is asked for here" in printed("import", str(path))


@pytest.mark.parametrize("address", ["https://huggingface.co/{}", "huggingface.co/{}/", "https://hf.co/{}/blob/main/config.json"])
def test_an_address_of_the_hub_is_its_repository(address: str) -> None:
    assert load_model(address.format("meta-llama/Llama-3.1-8B")) is load_model("llama-8b")


def test_a_version_that_is_newer_than_what_is_known_is_said() -> None:
    said = "megatron 0.19 (99 is newer than what is known)'s defaults"
    assert said in printed(*JOB, "--trainer", "megatron@99", "--top", "1", "--json", code=0)
    assert "megatron 0.12's defaults" in printed(*JOB, "--trainer", "megatron@0.12", "--top", "1", "--json", code=0)


def test_networks_are_called_by_their_ethernet() -> None:
    assert units.parse("10GbE", "bytes/s") == units.parse("10 Gb/s", "bytes/s")
