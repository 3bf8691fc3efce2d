"""``plan import``: what an export wrote, and what people wrote, read back as a plan by the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.plan import load_plan

FILES = {
    "megatron": ("megatron", "arguments.sh"),
    "torchtitan": ("torchtitan", "plan_config.py"),
    "deepspeed": ("deepspeed", "ds_config.json"),
    "nanotron": ("nanotron", "nanotron.yaml"),
}
FREE = {"zero", "order", "cp_method", "first_stage_layers", "last_stage_layers"}
"""Fields that a configuration of one degree does not say, and layers of end stages, which may be said in two ways."""


@pytest.mark.parametrize("target", FILES)
def test_export_then_import_is_the_same_plan(target, run, tmp_path):
    trainer, file = FILES[target]
    first, back, folder = tmp_path / "plan.yaml", tmp_path / "back.yaml", tmp_path / "run"
    assert run("--model", "llama-8b", "--gpus", "16", "--trainer", trainer, "--output", str(first)).exit_code == 0
    assert run("export", str(first), "--to", target, "--output", str(folder)).exit_code == 0
    said = ["--model", "llama-8b", "--gpus", "16", "--sequence-length", "8192"] if target != "megatron" else []
    result = run("import", str(folder / file), *said, "--output", str(back))
    assert result.exit_code == 0, result.output
    before, after = load_plan(first), load_plan(back)
    kept = {name for name in before.layout.to_dict() if name not in FREE}
    assert {n: before.layout.to_dict()[n] for n in kept} == {n: after.layout.to_dict()[n] for n in kept}
    assert after.workload.global_batch_size == before.workload.global_batch_size
    assert after.prediction.step_time_s == pytest.approx(before.prediction.step_time_s, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "a.json",
            "{",
            "looks like no configuration of megatron, torchtitan, deepspeed, nanotron; say which with --from",
        ),
        ("ds.json", '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}', "say it with --gpus"),
        ("a.sh", "--num-layers 4 --hidden-size 8", "is missing; without it there is no plan"),
    ],
)
def test_what_cannot_be_read_gets_a_sentence(name: str, text: str, says: str, run, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    result = run("import", str(tmp_path / name))
    assert result.exit_code == 2 and says in result.output and "Traceback" not in result.output
