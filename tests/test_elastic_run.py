"""plan run without processes that train: the loop on scripted attempts, numbers of GPUs, notices, flags, torn checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner.errors import PlannerError
from planner.lab.elastic import loop
from planner.lab.elastic.attempt import Attempt, Meeting, torchrun
from planner.lab.elastic.loop import Job, keep_training, why_failed
from planner.lab.elastic.notices import gpus_here, taken_away
from planner.lab.elastic.run_flags import ADAPTERS, Saving, adapter_of, command_line
from planner.lab.elastic.setting_up import Asked, Ready, between, set_up
from planner.lab.elastic.worlds import World
from planner.plan_file import Plan, load_plan

TINY = (
    "name: tiny\nnum_layers: 4\nhidden_size: 32\nnum_heads: 4\nnum_kv_heads: 2\nhead_dim: 8\nffn_size: 64\nvocab_size: 128\n"
    "max_sequence_length: 64\n"
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of a tiny model on 4 GPUs, FSDP."""
    import planner

    folder = tmp_path_factory.mktemp("plan")
    (folder / "tiny.yaml").write_text(TINY)
    found = planner.estimate(
        model=str(folder / "tiny.yaml"), gpus=4, trainer="torchtitan", hardware="h100-sxm", precision="fp32",
        sequence_length=32, global_batch_size=12, dp=4, zero=3, micro_batch_size=1,
    )  # fmt: skip
    found.save(folder / "plan.yaml")
    return folder / "plan.yaml"


# ------------------------------------------------------------------------------------------------ the loop


class Scripted:
    """An attempt that prints what a script says, a list of lines per look; a number is its exit code."""

    def __init__(self, *script: Any, after_ask: Any = ("stopped at step 9", 0)) -> None:
        self.script, self.after_ask, self.asked, self.ended = list(script), list(after_ask), False, False
        self.code: int | None = None

    def lines(self) -> list[str]:
        found = []
        while self.script and not isinstance(self.script[0], int):
            found.append(self.script.pop(0))
        if self.script:
            self.code = self.script.pop(0)
        return found

    def ask(self) -> None:
        self.asked, self.script = True, self.after_ask

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def started(plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the loop on scripted attempts: (exit code or sentence, lines, numbers of GPUs of the attempts, attempts)."""
    monkeypatch.setattr(loop, "AGAIN", 0.0)
    monkeypatch.setattr(loop, "LOOK", 0.0)
    one = load_plan(plan)

    def start(*groups: Scripted, **more: Any) -> tuple[Any, list[str], list[int]]:
        waiting, gpus, lines = list(groups), [], []

        def launch(count: int, _: Path) -> Scripted:
            gpus.append(count)
            return waiting.pop(0)

        worlds = {count: World(plan=one, changed="") for count in more.pop("worlds", (4, 3))}
        job = Job(**{  # type: ignore[arg-type]
            "worlds": worlds, "start": tmp_path, "folder": tmp_path, "adapter": ADAPTERS["pytorch"], "gpus": lambda: 4,
            "launch": launch, "grace": 0.3, "first": 0.5, "silence": 0.5, **more,
        })  # fmt: skip
        try:
            code: Any = keep_training(job, lines.append)
        except PlannerError as error:
            code = str(error)
        assert all(group.ended for group in groups if group not in waiting)
        history = json.loads((tmp_path / "history.json").read_text())
        assert [one["gpus"] for one in history[len(history) - len(gpus) :]] == gpus
        return code, lines, gpus

    return start


STEP = "step {} loss 4.1 gradient 1.0 seconds 0.1"


def test_a_job_that_finishes(started: Any) -> None:
    code, lines, gpus = started(Scripted(STEP.format(1), STEP.format(2), "finished at step 2", 0))
    assert (code, gpus, lines[-1]) == (0, [4], "finished at step 2")


def test_failures_go_on_while_there_is_progress_and_end_where_there_is_none(started: Any) -> None:
    failing = [Scripted(STEP.format(number), "ValueError: no", 1) for number in range(1, 6)]
    code, _, gpus = started(*failing, Scripted("finished at step 9", 0), restarts=1)
    assert (code, len(gpus)) == (0, 6)
    code, _, gpus = started(*(Scripted(STEP.format(5), "ValueError: no", 1) for _ in range(3)), restarts=1)
    assert len(gpus) == 2 and "2 attempts in a row failed without a step further than 5" in code
    code, _, _ = started(*(Scripted("RuntimeError: always", 1) for _ in range(3)), restarts=2)
    assert code.startswith("3 attempts in a row failed without a step further than 0; the last: RuntimeError: always; its log: ")


def test_a_command_that_does_not_start_ends_at_once(started: Any) -> None:
    said = "train.py: error: unrecognized arguments: --bogus\nE1123 10:09:00.66 7 torch/distributed/elastic/x.py:1] failed\n"
    root = "Root Cause (first observed failure):\n[0]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : 2 (pid: 7)\n"
    code, _, gpus = started(Scripted(*said.splitlines(), *root.splitlines(), 1), Scripted("finished at step 1", 0))
    assert code.startswith("the command does not start: train.py: error: unrecognized arguments: --bogus; its log: ")
    assert len(gpus) == 1


def test_a_newer_checkpoint_is_progress_where_another_node_prints_the_steps(started: Any) -> None:
    failing = [Scripted("RuntimeError: lost", 1) for _ in range(4)]
    saved = iter([0, 4, 8, 12, 16])
    code, _, gpus = started(*failing, Scripted("finished at step 9", 0), restarts=1, saved=lambda: next(saved))
    assert (code, len(gpus)) == (0, 5)


def test_another_number_of_gpus_is_taken_after_a_save(started: Any) -> None:
    here = iter([4, 3, 3, 3, 4])  # before the first, while it runs, before the second, while it runs, ...
    code, lines, gpus = started(
        Scripted(STEP.format(9)), Scripted(STEP.format(12)), Scripted("finished at step 20", 0),
        gpus=lambda: next(here, 4), watched=True, first=5.0, silence=5.0, grace=5.0,
    )  # fmt: skip
    assert (code, gpus) == (0, [4, 3, 4])
    assert any("3 GPUs are there now, it had 4: saving" in line for line in lines)


def test_the_largest_world_that_fits_and_none(started: Any) -> None:
    _, _, gpus = started(Scripted("finished at step 1", 0), gpus=lambda: 7, worlds=(3, 5, 8))
    assert gpus == [5]


def test_too_few_gpus_are_a_sentence(plan: Path, tmp_path: Path) -> None:
    worlds = {4: World(plan=load_plan(plan), changed="")}
    job = Job(worlds=worlds, start=tmp_path, folder=tmp_path, adapter=ADAPTERS["pytorch"], gpus=lambda: 2)
    with pytest.raises(PlannerError, match="2 GPUs are left here, and the smallest plan needs 4"):
        keep_training(job, print)


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM"), (signal.SIGUSR1, 143, "SIGUSR1")]
)
def test_signals_save_and_stop(started: Any, number: int, code: int, word: str) -> None:
    class Told(Scripted):
        def lines(self) -> list[str]:
            if not self.asked:
                os.kill(os.getpid(), number)
            return super().lines()

    found, lines, _ = started(Told(STEP.format(9)))
    assert found == code
    assert f"{word}: saving, at most 0.3 s" in lines[-3]
    assert lines[-1] == f"{word}: stopped after step 9; start the same command again to go on"


def test_a_notice_saves_and_what_does_not_save_in_time_is_ended(started: Any) -> None:
    group = Scripted(STEP.format(9), after_ask=())
    began = time.monotonic()
    code, lines, _ = started(group, notice=lambda: "spot instance")
    assert time.monotonic() - began < 10
    assert (code, group.asked) == (143, True)
    assert "notice: spot instance; not saved within 0.3 s" in lines[-1]


def test_steps_do_not_put_off_the_end_of_the_grace(started: Any) -> None:
    class Deaf(Scripted):
        def lines(self) -> list[str]:
            return [STEP.format(7)]

    began = time.monotonic()
    code, lines, _ = started(Deaf(), notice=lambda: "spot instance", silence=60.0)
    assert code == 143 and time.monotonic() - began < 10 and "not saved within 0.3 s" in lines[-1]


def test_silence_is_a_failure(started: Any) -> None:
    code, lines, gpus = started(Scripted(STEP.format(1)), Scripted("finished at step 2", 0))
    assert (code, gpus) == (0, [4, 4])
    assert any("hung: no step for" in line for line in lines)


def test_storage_that_is_full_is_not_tried_again(started: Any) -> None:
    words = "checkpoints cannot be written to /x (OSError: full): the run ends, the last whole one is of step 4; free space"
    code, _, gpus = started(Scripted(STEP.format(5), words, 1))
    assert (code, gpus) == (words, [4])


def test_causes_in_words() -> None:
    torch = "Root Cause (first observed failure):\n[0]:\n  rank      : 2 (local_rank: 2)\n  exitcode  : -9 (pid: 7)\n"
    assert why_failed(torch, 1) == "rank 2 was ended by SIGKILL"
    assert why_failed(torch.replace("-9", "1") + "ValueError: no\n", 1) == "ValueError: no"
    assert why_failed("", -9) == "torchrun was ended by SIGKILL"
    assert why_failed("", 7) == "exit code 7"
    lost = "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection\n"
    assert why_failed(f"Traceback\n{lost}", 1) == "the node that keeps the rendezvous does not answer"
    peer = "RuntimeError: [x/pair.cc:537] Read error [::1]:7: Connection reset by peer"
    assert why_failed(f"[rank0]: {peer}\n", 1) == f"a rank has lost another one: [rank0]: {peer}"
    said = "line 5: DATA: set DATA\nE1123 10:09:00.66 7 torch/distributed/elastic/x.py:1] failed\n" + torch.replace("-9", "1")
    assert why_failed(f"{said}torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n", 1) == "line 5: DATA: set DATA"


def test_what_a_killed_plan_run_left_is_ended_before_the_next_attempt(tmp_path: Path) -> None:
    first = Attempt(["bash", "-c", "echo here; exec sleep 60"], tmp_path / "attempt-1.log")
    while not first.lines():  # until the kernel shows its environment
        time.sleep(0.01)
    second = Attempt(["bash", "-c", "echo hello; exit 3"], tmp_path / "attempt-2.log")
    assert first.process.wait(timeout=10) == -signal.SIGKILL
    second.process.wait(timeout=10)
    assert (second.lines(), second.code) == (["hello"], 3)
    second.end()


# ------------------------------------------------------------------------------------------------ what is there


def test_numbers_of_gpus(tmp_path: Path) -> None:
    (tmp_path / "world").write_text("3\n")
    ask = gpus_here(str(tmp_path / "world"), 8)
    assert ask() == 3
    (tmp_path / "world").write_text("many")
    assert ask() == 3  # the last answer
    (tmp_path / "world").write_text("99")
    assert ask() == 8
    assert gpus_here("echo 5", 8)() == 5
    for source in ("false", "echo nothing", "no-such-command"):
        with pytest.raises(PlannerError, match="--world .* it must be a file with the number of GPUs"):
            gpus_here(source, 8)()


def test_notices(tmp_path: Path) -> None:
    file = tmp_path / "notice"
    ask = taken_away(str(file), 0.0)
    assert ask() == ""
    file.write_text("at 12:00")
    assert (ask(), taken_away("true", 0.0)(), taken_away("false", 0.0)()) == ("at 12:00", "a notice has come", "")
    assert taken_away(None, 0.0)() == ""


@pytest.mark.parametrize("text", ["4:2", "x", "0:4", "1:2:3", ":"])
def test_ranges_that_are_none(text: str) -> None:
    with pytest.raises(PlannerError, match="--gpus"):
        between(text, "--gpus", (1, 1))


# ------------------------------------------------------------------------------------------------ flags of trainers


def saving(**changes: Any) -> Saving:
    """Every 100 s, steps of 3 s."""
    values: dict[str, Any] = {"folder": "/c", "interval": 100.0, "steps": 0, "step_time": 3.0, "keep": 2, "timeout": 600.0}
    return Saving(**values | changes)


def test_commands_of_trainers() -> None:
    own = command_line(ADAPTERS["pytorch"], ("train.py", "--data", "my file", "--keep", "5"), (), saving())
    assert own == ("train.py --plan plan.json --checkpoint /c --every 0 --interval 100 --timeout 600 --data 'my file' --keep 5")
    theirs = command_line(ADAPTERS["megatron"], ("/m/pretrain_gpt.py", "--data-path", "x"), (), saving(steps=7))
    assert theirs.startswith('/m/pretrain_gpt.py "${ARGUMENTS[@]}" --save /c --load /c --save-interval 7 --ckpt-format torch_dist')
    assert "--async-save --use-persistent-ckpt-worker --async-strategy mcore --exit-signal-handler" in theirs
    assert theirs.endswith("--data-path x") and "torch_dist" not in command_line(ADAPTERS["megatron"], (), (), saving(sharded=True))
    titan = command_line(ADAPTERS["torchtitan"], ("-m", "torchtitan.train"), (), saving())
    assert "--checkpoint.interval 33 --checkpoint.async_mode async --checkpoint.keep_latest_k 2" in titan
    assert command_line(ADAPTERS["pytorch"], (), ("train.py", "$DATA"), saving()).split()[:3] == ["train.py", "\\", '"$DATA"']


def test_the_split_is_the_folders_unless_it_is_given() -> None:
    titan = command_line(ADAPTERS["torchtitan"], ("m.py", "--config", "smoke", "--hf_assets_path=x"), (), saving())
    assert titan.startswith("m.py --module plan_config --checkpoint.enable") and titan.endswith("--config smoke --hf_assets_path=x")
    assert ADAPTERS["torchtitan"].variables(("mine.py", "--hf_assets_path=/x")) == {"HF_ASSETS": "/x"}
    assert ADAPTERS["megatron"].variables(("/m/pretrain_gpt.py",)) == {"MEGATRON_LM": "/m"}
    found = ADAPTERS["torchtitan"].step.search("[titan] - INFO - \x1b[31mstep: 12  \x1b[32mloss: 5.5")
    assert found and found[1] == "12"


def test_which_trainer_a_command_is_of() -> None:
    titan = ("-m", "torchtitan.train")
    for command, target in ((("train.py",), "pytorch"), (("/x/pretrain_gpt.py",), "megatron"), (titan, "torchtitan")):
        assert adapter_of(command, "megatron").target == target
    assert (adapter_of((), "megatron").target, adapter_of((), "torchtitan").target) == ("megatron", "pytorch")
    assert adapter_of(("mine.py",), "megatron", "megatron").target == "megatron"
    with pytest.raises(PlannerError, match="plan run starts torchrun itself"):
        adapter_of(("torchrun", "train.py"), "torchtitan")
    with pytest.raises(PlannerError, match="of no trainer that plan run knows"):
        adapter_of(("mine.py",), "torchtitan")


def test_torchrun_of_one_node_and_of_several() -> None:
    one = torchrun(Meeting(), 4, Path("start.sh"), 60.0)
    assert one[one.index("--nnodes") + 1] == "1:1" and one[one.index("--max-restarts") + 1] == "0"
    nodes = Meeting(least=6, most=8, endpoint="a:1", conf="read_timeout=7,is_host=0")
    several = torchrun(nodes, 8, Path("worker.sh"), 60.0)
    assert several[several.index("--nnodes") + 1] == "6:8" and several[several.index("--max-restarts") + 1] == "0"
    assert several[-3:] == ["--no-python", "bash", "worker.sh"]
    # pytorch/pytorch#135712: the store of the agent keeps addresses of ranks that are gone
    assert nodes.settings == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} and Meeting().settings == {}
    assert (nodes.answers, Meeting().answers) == (7.0, 60.0)


# ------------------------------------------------------------------------------------------------ the command


def test_every_world_is_exported(run: Any, plan: Path, tmp_path: Path) -> None:
    result = run("run", str(plan), "--to", str(tmp_path / "job"), "--gpus", "2:4", "--print-commands", "--interval", "90s",
                 "--", "train.py", "--device", "cpu", "--steps", "7")  # fmt: skip
    assert result.exit_code == 0, result.output
    batches = set()
    for gpus in (2, 3, 4):
        folder = tmp_path / "job" / "worlds" / f"gpus-{gpus}"
        one: Plan = load_plan(folder / "plan.yaml")
        assert one.num_gpus == gpus and (folder / "train.py").is_file() and (folder / "saves.py").is_file()
        batches.add(one.workload.global_batch_size)
        assert "--interval 90 --keep 2 --timeout 600 --device cpu --steps 7" in (folder / "rank.sh").read_text()
        assert f"{gpus} GPUs: tp " in result.output
    assert batches == {12}
    assert load_plan(tmp_path / "job" / "worlds" / "gpus-4" / "plan.yaml").layout.to_dict() == load_plan(plan).layout.to_dict()
    assert "torchrun --nnodes 1:1 --nproc-per-node 4 --rdzv-backend c10d" in result.output


def test_the_interval_is_that_of_resilience(run: Any, plan: Path, tmp_path: Path) -> None:
    import planner

    result = run("run", str(plan), "--to", str(tmp_path / "job"), "--gpus", "4", "--mtbf", "100h", "--print-commands")
    expected = planner.resilience(plan, mtbf="100h").to_dict()["checkpoint"]["interval_s"]
    found = float((tmp_path / "job/worlds/gpus-4/rank.sh").read_text().partition("--interval ")[2].split()[0])
    assert found == pytest.approx(expected, rel=1e-5)
    assert "Daly's for a failure of the job every 100 h" in result.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nnodes", "1:2"], "say where the nodes meet, --rdzv-endpoint HOST:PORT"),
        (["--gpus", "1:200"], "200 plans are too many"),
        (["--nnodes", "1:2", "--gpus", "4", "--rdzv-endpoint", "a:1"], "--gpus is for one node"),
        (["--every", "10", "--interval", "5min"], "--interval and --every both say when to save"),
        (["--grace", "60"], "--grace: '60' has no unit"),
        (["--", "no/pretrain_x.py"], "there is no such file"),
        (["--", "mine.py"], "of no trainer that plan run knows"),
        (["--gpus", "7"], "no number of GPUs has a plan"),
    ],
)
def test_wrong_input_is_one_sentence(run: Any, plan: Path, tmp_path: Path, words: list[str], says: str) -> None:
    result = run("run", str(plan), "--to", str(tmp_path / "job"), *words)
    assert result.exit_code == 2 and says in " ".join(result.output.split()), result.output


def test_a_folder_of_another_job_is_refused(run: Any, plan: Path, tmp_path: Path) -> None:
    words = ["--to", str(tmp_path / "job"), "--gpus", "4", "--print-commands"]
    assert run("run", str(plan), *words).exit_code == 0
    other = load_plan(plan)
    dataclasses.replace(other, workload=other.workload.replace(sequence_length=64)).save(tmp_path / "other.yaml")
    assert run("run", str(tmp_path / "other.yaml"), *words).exit_code == 0  # nothing has begun
    (tmp_path / "job" / "checkpoints" / "step-00000004").mkdir()
    result = run("run", str(plan), *words)
    assert result.exit_code == 2, result.output
    assert "another job, whose plan has another sequence length; choose another --to" in " ".join(result.output.split())


def test_a_variable_that_is_needed_is_asked_for(plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ASSETS", raising=False)

    def ready(*words: str) -> Any:
        return set_up(Asked(plan=load_plan(plan), command=("-m", "torchtitan.train", *words), folder=tmp_path, counts="4"), print)

    with pytest.raises(PlannerError, match=r"HF_ASSETS \(folder with the tokenizer .*\) is not set"), ready().alone():
        pass
    with ready("--hf_assets_path", "x").alone():
        assert f"export HF_ASSETS={os.path.abspath('x')}" in (tmp_path / "worlds/gpus-4/rank.sh").read_text()


@pytest.mark.parametrize("there", [False, True])
def test_a_program_that_needs_cuda_is_not_started_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """One sentence before the start, in place of attempts that end with an assertion of each rank."""
    monkeypatch.setattr("planner.lab.elastic.setting_up.ask_torch", lambda *_: [there])
    job: Any = SimpleNamespace(folder=tmp_path)
    ready = Ready(job=job, ranks=1, cuda=ADAPTERS["megatron"].cuda)
    refused = contextlib.nullcontext() if there else pytest.raises(PlannerError, match="Megatron-LM trains on CUDA GPUs alone")
    with refused, ready.alone():
        pass
    with Ready(job=job, ranks=1, cuda=ADAPTERS["pytorch"].cuda).alone():
        pass


def test_nodes_go_on_only_where_every_number_has_a_plan(run: Any, plan: Path, tmp_path: Path) -> None:
    nodes = ["--nnodes", "1:4", "--nproc-per-node", "1", "--rdzv-endpoint", "a:1"]
    words = ["--to", str(tmp_path / "job"), *nodes, "--print-commands", "--", "-m", "torchtitan.train"]
    result = run("run", str(plan), *words)
    assert result.exit_code == 0, result.output
    assert "torchrun --nnodes 4:4" in result.output  # torchtitan keeps dp 4
    assert "reads its data on with the same dp only" in result.output
