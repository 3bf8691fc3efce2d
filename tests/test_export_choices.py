"""Every optimizer, precision and recompute module of a trainer is written by each exporter that runs its plans, or refused."""

from __future__ import annotations

import dataclasses

import pytest
import yaml
from trainers.plans import Wanted, found

from planner import layout, library, workload
from planner.layout import Module, Recompute, module_mask
from planner.trainer import load_trainer
from planner.trainers import having
from planner.trainers.bundle import quoting
from planner.trainers.bundle.target import OF_PAIRS, ExportJob
from planner.trainers.targets import TARGETS, load_target

SERVERS = ("vllm", "sglang")
"""They serve the model: what it was trained with does not matter to them."""
PAIRS = [(name, trainer) for name in TARGETS if name not in SERVERS for trainer in load_target(name).trainers]


def wanted(trainer: str, gpus: int = 8, hardware: str = "b200-sxm") -> Wanted:
    """The search of a trainer, in the first precision that it has."""
    precision = load_trainer(trainer).legal.precisions[0]
    return Wanted(model="llama-3.1-8b", gpus=gpus, trainer=trainer, hardware=hardware, precision=precision, top=1)


def job_of(trainer: str, **work: str) -> ExportJob:
    """A plan of a trainer with another precision or optimizer, on devices that have every precision."""
    plan = found(wanted(trainer))[0]
    return ExportJob.of(dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, **work)))


def no_word(name: str, job: ExportJob, choice: str) -> bool:
    """The target says that it does not know a choice."""
    return any(
        one.startswith((f"optimizer {choice}: ", f"precision {choice}: ")) for one in load_target(name).refusals(job)
    )


@pytest.mark.parametrize(("name", "trainer"), PAIRS)
@pytest.mark.parametrize("field", ("optimizer", "precision"))
def test_choices_are_written_or_refused(name: str, trainer: str, field: str) -> None:
    """And no two of them are written as the same files."""
    written: dict[str, str] = {}
    facts = load_trainer(trainer)
    for choice in facts.optimizers if field == "optimizer" else facts.legal.precisions:
        job = job_of(trainer, **{field: choice})
        if no_word(name, job, choice):
            assert choice in getattr(having("export")[name], "NO_WORD", ()), (
                f"the exporter '{name}' has no word for the {field} {choice} of {trainer}.yaml: give it one, or say NO_WORD"
            )
            continue
        text = str(sorted(load_target(name).render(job).files.items()))
        assert text not in written, f"'{name}' writes {field} {choice} as it writes {written[text]}"
        written[text] = choice
    assert written


@pytest.mark.parametrize(("name", "trainer"), PAIRS)
@pytest.mark.parametrize(("field", "table"), (("optimizer", "OPTIMIZERS"), ("precision", "PRECISIONS")))
def test_what_no_exporter_knows_is_refused(
    name: str, trainer: str, field: str, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(getattr(workload, table), "made_up", "made up")
    assert no_word(name, job_of(trainer, **{field: "made_up"}), "made_up"), (
        f"the exporter '{name}' writes a {field} that it does not know"
    )


SAME_MODULES = {"maxtext": {"norm", "mlp_activation"}}
"""Modules that a target repeats anyway: what it writes does not say them."""


def job_with(trainer: str, mask: int) -> ExportJob:
    """A plan of a trainer with these modules recomputed, legal or not; 0 = none."""
    plan = found(wanted(trainer))[0]
    changed = plan.layout.replace(
        recompute=int(Recompute.SELECTIVE if mask else Recompute.NONE), recompute_modules=mask
    )
    return ExportJob.of(dataclasses.replace(plan, layout=changed.replace(recompute_layers=0)))


@pytest.mark.parametrize(("name", "trainer"), PAIRS)
def test_modules_are_written_or_refused(name: str, trainer: str) -> None:
    """And no two of them are written as the same files, nor as no recompute at all."""
    target = load_target(name)
    written = {str(sorted(target.render(job_with(trainer, 0)).files.items())): "none"}
    for module in load_trainer(trainer).legal.recompute_modules:
        job = job_with(trainer, module_mask([module]))
        if module in SAME_MODULES.get(name, ()) or any(one.startswith("recompute ") for one in target.refusals(job)):
            continue
        text = str(sorted(target.render(job).files.items()))
        assert text not in written, f"'{name}' writes recompute of {module} as it writes {written[text]}"
        written[text] = module


@pytest.mark.parametrize(("name", "trainer"), PAIRS)
def test_a_module_that_no_exporter_knows_is_refused(name: str, trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = 2 * max(Module)
    monkeypatch.setitem(layout.MODULE_NAMES, unknown, "made_up")  # type: ignore[call-overload]
    job = job_with(trainer, unknown)
    assert any(one.startswith("recompute ") for one in load_target(name).refusals(job)), (
        f"the exporter '{name}' leaves out a recompute module that it does not know"
    )


def test_every_trainer_with_a_target_is_looked_at() -> None:
    """The others have no export: what they name is asked of the trainer that the export is priced with."""
    assert {trainer for _, trainer in PAIRS} <= set(library.names("trainers"))
    assert {name for name, _ in PAIRS} == set(TARGETS) - set(SERVERS)


@pytest.mark.parametrize("name", TARGETS)
def test_every_refusal_names_what_exists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All conditions and sentences of the tables of refusals can be evaluated: here each of them is said."""
    read, said = quoting.template, []

    def always(trainer: str, file: str) -> str:
        text = read(trainer, file)
        if file != "refusals.yaml":
            return text
        said.extend(yaml.safe_load(text))
        return yaml.safe_dump({f"({when}) or true": sentence for when, sentence in yaml.safe_load(text).items()})

    target = load_target(name)
    trainer = target.trainers[0]
    job = ExportJob.of(found(wanted(trainer, 16, "h100-sxm"))[0])
    quoting._refusals.cache_clear()
    monkeypatch.setattr(quoting, "template", always)
    try:
        assert target.refusals(job) or not said
    finally:
        quoting._refusals.cache_clear()


@pytest.mark.parametrize("name", [*OF_PAIRS, "accelerate"])
def test_who_writes_preference_pairs_is_said_by_those_who_do_not(name: str) -> None:
    job = job_of("trl" if name == "accelerate" else name, objective="dpo")
    said = [one for one in load_target(name).refusals(job) if "objective dpo" in one]
    assert bool(said) == (name == "accelerate")
    assert all("or with --trainer axolotl or llama-factory or ms-swift" in one for one in said)
