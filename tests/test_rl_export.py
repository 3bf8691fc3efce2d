"""Exports of RL plans: every framework and placement starts what was planned, and unknown settings are never written."""

from __future__ import annotations

import dataclasses
import subprocess
import tomllib

import pytest
import yaml

from planner import library
from planner.errors import PlannerError
from planner.model import load_model
from planner.rl.export import known_names
from planner.rl.export.rl_folder import export_rl, make_export
from planner.rl.export.rl_started import flag_words, toml_text
from planner.rl.export.rl_targets import TARGETS
from planner.rl.rl_framework import framework_names
from planner.rl.rl_plan import load_rl_plan
from planner.serving.serving_layout import Precision
from planner.trainers.checking.started import started
from tests.rl_samples import rl_plan

PLACEMENTS = [
    *((name, None) for name in ("verl", "nemo-rl", "openrlhf", "trl", "slime", "areal")),
    *((name, ahead) for name in TARGETS for ahead in (1, 4)),
]


def settings(files: dict[str, str]) -> dict[str, str]:
    """name=value lines."""
    return dict(line.split("=", 1) for line in files["overrides.txt"].splitlines())


def flags(files: dict[str, str]) -> dict[str, str]:
    """Flags with the word behind them."""
    words = [*files["arguments.txt"].splitlines(), ""]
    return {one: words[place + 1] for place, one in enumerate(words) if one.startswith("--")}


def refused(plan, to, said):
    with pytest.raises(PlannerError, match=said):
        make_export(plan, to)


def test_every_framework_is_a_target():
    assert sorted(TARGETS) == framework_names()


@pytest.mark.parametrize(("name", "ahead"), PLACEMENTS)
def test_scripts_start_the_framework(name, ahead, tmp_path):
    """bash expands the script; what stands in place of the programs writes down what it gets."""
    made = export_rl(rl_plan(name, ahead, gpus=8), name, tmp_path / "run")
    assert "plan.yaml" in made.files and load_rl_plan(tmp_path / "run" / "plan.yaml") == rl_plan(name, ahead, gpus=8)
    program = {"nemo-rl": "uv", "prime-rl": "uv", "trl": "accelerate", "slime": "python3", "areal": "python3"}.get(name, "python")
    if name == "verl" and ahead is not None:
        program = "cat"  # python answers where verl lies
        text = (tmp_path / "run" / "run.sh").read_text().replace("exec python", "exec cat")
        (tmp_path / "run" / "run.sh").write_text(text.replace('cd "$(python', 'cd "$here" # '))
    words, _ = started(tmp_path / "run", "run.sh", program)
    said = " ".join(words)
    assert {
        "verl": "verl.", "nemo-rl": "run_grpo.py", "openrlhf": "openrlhf.cli.train_ppo_ray", "trl": "grpo.yaml", "slime": "train",
        "areal": "areal.yaml", "prime-rl": "rl.toml",
    }[name] in said  # fmt: skip
    if name == "verl":
        asked = {None: "verl.trainer.main_ppo", 1: "one_step_off_policy.main_ppo", 4: "fully_async_main"}[ahead]
        assert asked in said and "actor_rollout_ref.rollout.n=8" in words


@pytest.mark.parametrize("name", [one for one in TARGETS if one != "trl"])
def test_scripts_of_several_nodes_are_bash(name, tmp_path):
    made = export_rl(rl_plan(name, 1, gpus=32), name, tmp_path / "run")
    done = subprocess.run(["bash", "-n", "run.sh"], cwd=tmp_path / "run", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ("NODE_RANK" in made.files["run.sh"]) == (name != "prime-rl")  # which submits itself to Slurm


def test_verl_pools_and_batches():
    found = settings(make_export(rl_plan("verl", 1, gpus=32), "verl").files)
    assert (found["trainer.nnodes"], found["rollout.nnodes"], found["trainer.n_gpus_per_node"]) == ("2", "2", "8")
    assert (found["data.train_batch_size"], found["actor_rollout_ref.rollout.n"]) == ("64", "8")
    assert found["actor_rollout_ref.actor.ppo_mini_batch_size"] == "64"
    assert (found["data.max_prompt_length"], found["data.max_response_length"]) == ("1024", "4096")
    assert found["actor_rollout_ref.actor.fsdp_config.param_offload"] == "False"
    later = settings(make_export(rl_plan("verl", 4, gpus=32, work={"train_batch": 256}), "verl").files)
    assert (later["async_training.staleness_threshold"], later["async_training.require_batches"]) == ("4", "2")
    together = settings(make_export(rl_plan("verl", None, gpus=16, trainer="megatron"), "verl").files)
    assert together["actor_rollout_ref.actor.megatron.tensor_model_parallel_size"] == "2"
    assert together["actor_rollout_ref.actor.megatron.param_offload"] == "True"
    assert "rollout.nnodes" not in together


def test_nemo_rl_gives_generation_its_nodes():
    found = settings(make_export(rl_plan("nemo-rl", 2, gpus=32), "nemo-rl").files)
    assert found["policy.generation.colocated.resources.num_nodes"] == "2"
    assert (found["cluster.num_nodes"], found["grpo.async_grpo.max_trajectory_age_steps"]) == ("4", "2")
    assert found["policy.generation.colocated.enabled"] == "False" and found["policy.megatron_cfg.enabled"] == "True"
    sharded = settings(make_export(rl_plan("nemo-rl", None, trainer="automodel"), "nemo-rl").files)
    assert sharded["policy.dtensor_cfg.enabled"] == "True"


def test_command_lines():
    found = flags(make_export(rl_plan("openrlhf", None, gpus=8), "openrlhf").files)
    assert found["--vllm.num_engines"] == "4" and "--train.colocate_all" in found and "--vllm.enable_sleep" in found
    found = flags(make_export(rl_plan("openrlhf", 2, gpus=16), "openrlhf").files)
    assert found["--train.async_queue_size"] == "2" and "--train.partial_rollout_enable" in found
    found = flags(make_export(rl_plan("slime", 1, gpus=32), "slime").files)
    assert (found["--actor-num-nodes"], found["--rollout-num-gpus"], found["--tensor-model-parallel-size"]) == ("2", "16", "2")
    assert found["--global-batch-size"] == "512" and "--micro-batch-size" not in found and "--colocate" not in found


def test_files_of_areal_trl_and_prime_rl():
    found = yaml.safe_load(make_export(rl_plan("areal", 4, gpus=32), "areal").files["areal.yaml"])
    assert found["actor"]["backend"] == "fsdp:d16" and found["rollout"]["backend"] == "sglang:d8p1t2"
    assert found["rollout"]["max_head_offpolicyness"] == 4
    found = tomllib.loads(make_export(rl_plan("prime-rl", 4, gpus=32), "prime-rl").files["rl.toml"])
    assert found["deployment"] == {
        "type": "multi_node", "gpus_per_node": 8, "num_train_nodes": 2, "num_infer_nodes": 1, "num_infer_replicas": 2,
    }  # fmt: skip
    assert found["orchestrator"]["max_off_policy_steps"] == 4 and found["orchestrator"]["group_size"] == 8
    made = make_export(rl_plan("trl", 0, gpus=8), "trl")
    found = yaml.safe_load(made.files["grpo.yaml"])
    assert found["vllm_mode"] == "server" and found["gradient_accumulation_steps"] == 128
    assert "CUDA_VISIBLE_DEVICES=4,5,6,7 trl vllm-serve" in made.files["run.sh"]


def test_what_a_framework_cannot_run_is_a_sentence():
    refused(rl_plan(), "megatron", "target of an RL plan")
    refused(rl_plan("verl", 1), "prime-rl", "runs plans of trainer prime-rl, and this one was priced for verl")
    refused(rl_plan("verl", 1, actor={"tp": 2, "dp": 4}), "verl", "splits by data and Ulysses alone")
    refused(rl_plan("verl", 1, gpus=24), "verl", "12 GPUs train, which are no whole nodes of 8")
    refused(rl_plan("trl", 0, gpus=32), "trl", "2 nodes generate: TRL talks to one server")
    refused(rl_plan("prime-rl", 1, work={"algorithm": "ppo"}), "prime-rl", "algorithm ppo has no word there")
    refused(rl_plan("openrlhf", 1, rollout={"pp": 2}), "openrlhf", "the rollout has pp 2")
    refused(rl_plan("nemo-rl", 1, engine="sglang@0.5"), "nemo-rl", "SGLang is for colocated runs alone")
    plan = rl_plan("verl", 1)
    place = dataclasses.replace(plan.placement, sync="disk")
    refused(dataclasses.replace(plan, placement=place), "verl", "weight sync disk is none of")


VALUES = {"algorithm": "ppo", "critic": load_model("qwen3-8b")}


def test_critics_of_their_own_pool():
    plan = rl_plan("openrlhf", 0, gpus=48, work=VALUES, place={"critic_gpus": 16})
    found = flags(make_export(plan, "openrlhf").files)
    assert (found["--critic.num_nodes"], found["--critic.num_gpus_per_node"]) == ("2", "8") and "--train.colocate_all" not in found
    assert "--train.colocate_all" in flags(make_export(rl_plan("openrlhf", 2, work=VALUES), "openrlhf").files)
    plan = rl_plan("areal", 2, gpus=24, work=VALUES, place={"critic_gpus": 8})
    config = yaml.safe_load(make_export(plan, "areal").files["areal.yaml"])
    assert config["critic"]["backend"] == "fsdp:d8" and "scheduling_strategy" not in config["critic"]
    for name, ahead, more, said in (
        ("verl", 1, {"critic_gpus": 8}, "a split critic is trained on the actor's GPUs"),
        ("openrlhf", 0, {}, "a split critic is trained on a pool of its own"),
        ("trl", 0, {}, "a split critic is trained nowhere: plan with grpo"),
    ):  # fmt: skip
        with pytest.raises(PlannerError, match=said):
            make_export(rl_plan(name, ahead, gpus=24 if more else 16, work=VALUES, place=more), name)


def test_pools_of_two_kinds():
    """TRL's server is on nodes of its own; AReaL's Slurm jobs name theirs; Ray of the others does not tell kinds apart."""
    made = make_export(rl_plan("trl", 0, generate_hardware="l40s"), "trl")
    assert 'if [ "$NODE_RANK" = 1 ]; then exec env trl vllm-serve' in made.files["run.sh"]
    config = yaml.safe_load(make_export(rl_plan("areal", 2, generate_hardware="l40s"), "areal").files["areal.yaml"])
    nodes = [config[part]["scheduling_spec"][0]["nodelist"] for part in ("actor", "rollout")]
    assert nodes == ["${oc.env:TRAIN_NODES}", "${oc.env:GENERATE_NODES}"] and config["scheduler"]["type"] == "slurm"
    with pytest.raises(PlannerError, match="h100-sxm trains and l40s generates: .* trl or areal do"):
        make_export(rl_plan("verl", 1, generate_hardware="l40s"), "verl")


def test_hybrid_pools_of_verl():
    place = {"mode": "hybrid", "train_gpus": 8, "generate_gpus": 16, "partial": True}
    found = settings(make_export(rl_plan("verl", 2, gpus=16, place=place, rollout={"replicas": 8}), "verl").files)
    assert found["trainer.v1.trainer_mode"] == "separate_async" and found["data.train_batch_size"] == "64"
    assert (found["actor_rollout_ref.rollout.nnodes"], found["trainer.nnodes"]) == ("1", "1")
    assert found["trainer.v1.separate_async.hybrid_rollout.enable_switch"] == "True" and "rollout.nnodes" not in found
    assert found["actor_rollout_ref.actor.fsdp_config.param_offload"] == "True", "its engines share the trainer's GPUs"


@pytest.mark.parametrize(("trainer", "part"), [("verl", "fsdp"), ("megatron", "megatron")])
def test_critics_of_verl_leave_the_gpus_as_the_actor_does(trainer, part):
    """The plan counts on it: their states are half of what lies beside the engine."""
    work = {"algorithm": "ppo", "critic": load_model("qwen3-8b"), "samples": 8}
    for ahead, moved in ((None, "True"), (1, "False")):
        found = settings(make_export(rl_plan("verl", ahead, work=work, trainer=trainer), "verl").files)
        assert found[f"critic.{part}.param_offload"] == found[f"critic.{part}.optimizer_offload"] == moved


def test_adapters_and_formats_are_written_or_refused():
    rank = {"lora_rank": 16}
    found = settings(make_export(rl_plan("nemo-rl", 1, work=rank), "nemo-rl").files)
    assert found["policy.megatron_cfg.peft.dim"] == "16"
    assert "lora_r" in make_export(rl_plan("trl", 0, gpus=8, work=rank), "trl").files["run.sh"]
    config = yaml.safe_load(make_export(rl_plan("areal", 2, work=rank, place={"sync": "disk"}), "areal").files["areal.yaml"])
    assert config["actor"]["lora_rank"] == config["sglang"]["max_lora_rank"] == 16 and config["rollout"]["use_lora"]
    config = tomllib.loads(make_export(rl_plan("prime-rl", 2, work=rank, place={"sync": "disk"}), "prime-rl").files["rl.toml"])
    assert config["trainer"]["model"]["lora"] == {"rank": 16} and config["trainer"]["model"]["ac_offloading"] == "None"
    for name, said in (("slime", "slime trains every weight"), ("areal", "--sync disk"), ("prime-rl", "--sync disk")):
        with pytest.raises(PlannerError, match=said):
            make_export(rl_plan(name, 2, work=rank), name)
    plan = rl_plan("verl", 1)
    plan = dataclasses.replace(plan, layouts=dataclasses.replace(plan.layouts, rollout_precision=Precision(weights="fp8_block")))
    assert settings(make_export(plan, "verl").files)["actor_rollout_ref.rollout.quantization"] == "fp8"
    plan = dataclasses.replace(rl_plan("openrlhf", 1), layouts=plan.layouts)
    with pytest.raises(PlannerError, match="the rollout's weights are fp8_block: its rollout takes bf16; plan with --weights bf16"):
        make_export(plan, "openrlhf")


def test_slime_sets_what_its_parser_asks_for():
    """parse_args refuses tensor parallelism without CUDA_DEVICE_MAX_CONNECTIONS, and REINFORCE++ without normalized advantages."""
    made = make_export(rl_plan("slime", 1, work={"algorithm": "reinforce++"}), "slime")
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in made.files["run.sh"] and "--normalize-advantages" in flags(made.files)


def test_values_are_held_against_types_and_choices():
    have = {"a": "int", "b": "Literal[nccl, disk] | None", "c": "bool", "d": "list[str]", "e": "float", "f": "flag", "g": "Path"}
    right = {"a": 2, "b": "disk", "c": True, "d": ["x"], "e": 1, "f": True, "g": "x"}
    assert known_names.wrong("x", right, have) == [] and known_names.wrong("x", {"b": None, "a": "${other.a}"}, have) == []
    for name, value in {"a": 1.5, "b": "fax", "c": 1, "d": "x", "e": "1", "f": 3}.items():
        assert known_names.wrong("x", {name: value}, have) == [f"x takes {have[name]} for {name}, not {value!r}"]
    assert known_names.wrong("x", {"c": None}, have) == ["x takes bool for c, not None"]


def test_settings_that_do_not_exist_are_never_written(monkeypatch):
    data = known_names.recorded("verl")
    shorter = {name: kind for name, kind in data["settings"].items() if name != "actor_rollout_ref.rollout.n"}
    monkeypatch.setattr(known_names, "recorded", lambda name: {**data, "settings": shorter})
    with pytest.raises(PlannerError, match=r"would refuse what was written: verl has no setting \S+rollout.n; nearest"):
        make_export(rl_plan(), "verl")


def test_names_through_free_mappings_and_classes():
    have = {"a": "mapping", "a.b": "int", "free": "dict", "gone": "NoneType"}
    assert known_names.wrong("x", {"a.b": 1, "free.any.thing": 1, "+a.c": 2, "+gone.x": 1}, have) == []
    assert known_names.wrong("x", {"a.c": 1, "+a.b": 1}, have) == [
        "x has no setting a.c; nearest: a.b", "x has no setting +a.b; nearest: a.b"
    ]  # fmt: skip


def test_classes_of_a_configuration_are_followed(tmp_path):
    (tmp_path / "c.py").write_text(
        "class Inner:\n    x: int = 1\nclass Base:\n    seed: int = 0\nUnion = Annotated[Inner | None, 1]\n"
        "class Root(Base):\n    one: 'Inner'\n    two: Union = None\n    free: dict[str, int] = {}\n"
    )
    assert set(dict(known_names.nested([tmp_path / "c.py"], "Root"))) == {"seed", "one", "one.x", "two", "two.x", "free"}


def test_choices_and_types_are_read_from_source(tmp_path):
    (tmp_path / "a.py").write_text(
        "p.add_argument('--x', type=int)\np.add_argument('--y', choices=['a', 'b'])\np.add_argument('--z', action='store_true')\n"
        "p.add_argument('--many', nargs='+')\n"
    )
    flags_ = known_names.typed_flags(tmp_path / "a.py")
    assert flags_ == {"--x": "int", "--y": "Literal[a, b]", "--z": "flag", "--many": "value"}
    (tmp_path / "c.py").write_text("class C:\n    m: str = field(metadata={'choices': ['disk', None]})\n")
    assert dict(known_names.nested([tmp_path / "c.py"], "C")) == {"m": "Literal[disk] | None"}


def test_toml_and_flags():
    data = {"a": 1, "b": {"c": "x\"y", "d": {"e": True}}, "f": [{"g": 1, "h": {"i": 2}}, {"g": 2}], "none": None}
    assert tomllib.loads(toml_text(data)) == {key: one for key, one in data.items() if key != "none"}
    assert flag_words({"--a": True, "--b": False, "--c": None, "--d": 3, "--e": [1, 2]}) == ["--a", "--d", "3", "--e", "1", "2"]


def test_commands(run, tmp_path):
    plan = tmp_path / "rl.yaml"
    rl_plan("openrlhf", 1).save(plan)
    found = run("export", str(plan), "--to", "openrlhf", "--output", str(tmp_path / "out"), "--check")
    assert found.exit_code == 0 and "names and types of openrlhf 0.11.2 as recorded" in found.output
    assert "was not priced" in found.output
    assert run("export", str(plan), "--to", "openrlhf", "--output", str(tmp_path / "out")).exit_code == 2
    assert run("export", str(plan), "--to", "nemo-rl", "--output", str(tmp_path / "b")).exit_code == 2
    assert run("export", str(plan), "--to", "verl", "--output", str(tmp_path / "c"), "--launcher", "slurm").exit_code == 2
    library.write_whole(tmp_path / "bad.yaml", "planner_rl_plan: 1\n")
    assert run("export", str(tmp_path / "bad.yaml"), "--to", "verl", "--output", str(tmp_path / "c")).exit_code == 2


@pytest.mark.parametrize("ahead", [None, 1, 4])
def test_value_models_of_nemo_rl_are_started_by_its_ppo(ahead, tmp_path):
    """Both models get the plan's degrees, by names of its PPO configuration alone."""
    ppo = {"algorithm": "ppo", "critic": load_model("qwen3-8b"), "epochs": 2}
    made = export_rl(rl_plan("nemo-rl", ahead, work=ppo), "nemo-rl", tmp_path / "run")
    found = settings(made.files)
    assert "examples/run_ppo.py" in made.files["run.sh"] and "configs/ppo_math_1B_megatron.yaml" in made.files["run.sh"]
    for part in ("policy", "value"):
        assert found[f"{part}.megatron_cfg.tensor_model_parallel_size"] == "2"
        assert found[f"{part}.sequence_packing.enabled"] == "True"
    assert found["ppo.async_ppo.enabled"] == str(ahead is not None) and not any(name.startswith("grpo.") for name in found)
    assert (found["ppo.ppo_epochs"], found["ppo.adv_estimator.name"]) == ("2", "gae")


def test_what_ppo_of_nemo_rl_cannot_is_said():
    ppo = {"algorithm": "ppo", "critic": load_model("qwen3-8b")}
    refused(rl_plan("nemo-rl", 1, work=ppo, trainer="automodel"), "nemo-rl", "--trainer megatron")
    refused(rl_plan("nemo-rl", 1, work=ppo, place={"sync": "reshard"}), "nemo-rl", "plan with --sync bucketed")
    refused(rl_plan("nemo-rl", 1, work={**ppo, "lora_rank": 8}), "nemo-rl", "plan with --lora-rank 0")
    pairs = rl_plan("nemo-rl", None, work={"algorithm": "dpo", "samples": 2})
    refused(pairs, "nemo-rl", "plan --objective dpo plans that and exports it")
