"""Configurations of RL frameworks as RL plans: what is exported is read back, and files as people write them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from planner.errors import PlannerError
from planner.model import load_model
from planner.rl.export.rl_folder import export_rl
from planner.rl.readback.rl_found import RlSaid
from planner.rl.readback.rl_reading import framework_of, is_rl_configuration, read_rl
from planner.rl.rl_plan import RlPlan, load_rl_plan
from planner.trainers.reading.given import Given
from tests.rl_samples import rl_plan

WRITTEN = {
    "verl": "overrides.txt", "nemo-rl": "overrides.txt", "openrlhf": "arguments.txt", "slime": "arguments.txt",
    "areal": "areal.yaml", "prime-rl": "rl.toml", "trl": "grpo.yaml",
}  # fmt: skip
CASES = [(name, ahead) for name in WRITTEN for ahead in (None, 0, 1, 4) if (name, ahead) not in (("prime-rl", None), ("slime", 4))]
UNSAID = {"openrlhf": {"max_batch"}, "trl": {"max_batch", "tp", "replicas"}}
"""Fields of the rollout that a framework's file does not hold: TRL's server has its own command line."""


def read(path: Path, name: str | None = None, settings: dict[str, str] | None = None, **said: object) -> RlPlan:
    """The plan of a file."""
    usual = {"model": "qwen3-8b", "hardware": "h100-sxm", "answers": "mean=1200,p99=4096", "prompt_length": 512.0}
    return read_rl(path, RlSaid(**{**usual, **said}), Given(settings=settings or {}), name).plan  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "ahead"), CASES)
def test_what_is_exported_is_read_back(name, ahead, tmp_path):
    """Workload, pools, staleness, weight sync and both layouts."""
    plan = rl_plan(name, ahead, gpus=8, work={"reference": name not in ("prime-rl", "trl")})
    export_rl(plan, name, tmp_path / "run")
    settings = {}
    if name == "trl":
        settings = {"num_processes": str(plan.placement.train_gpus)}
        settings |= {} if ahead is None else {"server_gpus": "4", "max_prompt_length": "1024"}
    found = read(tmp_path / "run" / WRITTEN[name], f"rl:{name}", settings)
    assert found.workload == plan.workload
    assert found.placement == plan.placement and (found.trainer, found.engine) == (plan.trainer, plan.engine)
    assert found.layouts.actor == plan.layouts.actor
    for field, value in vars(plan.layouts.rollout).items():
        if field not in UNSAID.get(name, ()):
            assert vars(found.layouts.rollout)[field] == value, field


@pytest.mark.parametrize("recompute", [0, 2])
def test_recompute_of_prime_rl_is_read_back(recompute, tmp_path):
    """Its TOML says "None" for a section that is switched off."""
    plan = rl_plan("prime-rl", 1, gpus=8, work={"reference": False}, actor={"recompute": recompute})
    export_rl(plan, "prime-rl", tmp_path / "run")
    assert read(tmp_path / "run" / "rl.toml", "rl:prime-rl").layouts.actor.recompute == recompute


def test_hybrid_pools_of_verl_are_read_back(tmp_path):
    place = {"mode": "hybrid", "train_gpus": 8, "generate_gpus": 16, "partial": True}
    plan = rl_plan("verl", 1, gpus=16, place=place, rollout={"replicas": 8})
    export_rl(plan, "verl", tmp_path / "run")
    found = read(tmp_path / "run" / "overrides.txt", "rl:verl")
    assert found.placement == plan.placement and found.layouts == plan.layouts and found.gpus == 16


def test_scripts_with_files_that_are_not_there(tmp_path):
    """slime: an array of a sourced file stands behind a bare flag and behind a value; verl: the machine is asked for its device."""
    (tmp_path / "a.sh").write_text(
        'source "/root/models/x.sh"\npython3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate ${MODEL_ARGS[@]} '
        "--rollout-max-response-len 4096 --rollout-batch-size 32 --n-samples-per-prompt 8 --hf-checkpoint /root/Qwen3-8B "
        "--rollout-num-gpus-per-engine 2 ${OTHER[@]}\n"
    )
    found = read(tmp_path / "a.sh", "rl:slime")
    assert found.placement.mode == "colocated" and found.layouts.rollout.tp == 2
    (tmp_path / "b.sh").write_text(
        "DEVICE=${DEVICE:-$(probe)}\ncase $DEVICE in gpu) N=8;; npu) N=16;; esac\npython3 -m verl.trainer.main_ppo "
        "algorithm.adv_estimator=grpo data.max_prompt_length=512 data.max_response_length=4096 data.train_batch_size=64 "
        "actor_rollout_ref.rollout.n=1 trainer.n_gpus_per_node=$N actor_rollout_ref.model.path=Qwen/Qwen3-8B\n"
    )
    found = read(tmp_path / "b.sh", "rl:verl")
    assert (found.gpus, found.workload.algorithm, found.workload.samples) == (8, "reinforce++", 1)


def test_older_allocations_of_areal_and_experts_over_data_parallel_engines(tmp_path):
    export_rl(rl_plan("areal", 2, gpus=8), "areal", tmp_path / "run")
    text = (tmp_path / "run" / "areal.yaml").read_text()
    text = text.replace("backend: fsdp:d4", "eps_clip: 0.4", 1).replace("backend: sglang:d2p1t2", "agent: null", 1)
    (tmp_path / "old.yaml").write_text("allocation_mode: sglang.d2p1t2+d4\n" + text)
    found = read(tmp_path / "old.yaml", "rl:areal")
    assert (found.trainer, found.placement.train_gpus, found.placement.generate_gpus) == ("fsdp", 4, 4)
    words = "--actor-num-gpus-per-node 8 --rollout-max-response-len 4096 --rollout-batch-size 32 --rollout-num-gpus-per-engine 4 "
    words += "--n-samples-per-prompt 8 --sglang-ep-size 8 --hf-checkpoint /m/Qwen3-30B-A3B --num-experts 128 --colocate"
    (tmp_path / "c.sh").write_text(f"python3 train.py {words}\n")
    found = read(tmp_path / "c.sh", "rl:slime", model="qwen3-30b-a3b")
    assert (found.layouts.rollout.attn_dp, found.layouts.rollout.moe_tp, found.layouts.rollout.replicas) == (2, 1, 1)


def test_frameworks_are_known_by_what_stands_in_a_file(tmp_path):
    for name, file in WRITTEN.items():
        export_rl(rl_plan(name, 1, gpus=8), name, tmp_path / name)
        assert framework_of(tmp_path / name / file) == name
        only = name not in ("verl", "nemo-rl", "trl")
        assert is_rl_configuration(tmp_path / name / file, None) is only
        assert is_rl_configuration(tmp_path / name / file, f"rl:{name}")
    assert not is_rl_configuration(tmp_path / "verl" / "overrides.txt", "verl")


def test_a_script_of_verl(tmp_path):
    """Two GPUs of a node generate one step ahead of six that train."""
    (tmp_path / "run.sh").write_text(
        "NGPUS=8\nn_rollout=2\npython3 -m verl.experimental.one_step_off_policy.main_ppo algorithm.adv_estimator=grpo \\\n"
        "  data.train_batch_size=96 data.max_prompt_length=512 data.max_response_length=1024 \\\n"
        "  actor_rollout_ref.actor.fsdp_config.strategy=fsdp2 actor_rollout_ref.actor.use_kl_loss=True \\\n"
        "  actor_rollout_ref.actor.ppo_mini_batch_size=48 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\\n"
        "  actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.name=vllm \\\n"
        "  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\\n"
        "  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 trainer.nnodes=1 \\\n"
        "  trainer.n_gpus_per_node=$((NGPUS - n_rollout)) \\\n"
        "  rollout.nnodes=1 rollout.n_gpus_per_node=${n_rollout}\n"
    )
    found = read(tmp_path / "run.sh", "rl:verl", answers="mean=300")
    place, work = found.placement, found.workload
    assert (place.mode, place.train_gpus, place.generate_gpus, place.staleness, place.sync) == ("split", 6, 2, 1, "bucketed")
    assert (work.prompts, work.samples, work.train_batch, work.reference, work.max_length) == (96, 5, 240, True, 1536)
    assert int(found.layouts.actor.micro_batch_size) == 4 and found.memory_share == 0.6
    assert int(found.layouts.rollout.replicas) == 1 and found.prediction is None


def test_flags_of_openrlhf_of_both_generations(tmp_path):
    new = "--actor.num_nodes 1 --actor.num_gpus_per_node 4 --vllm.num_engines 4 --train.async_enable --train.async_queue_size 2"
    (tmp_path / "new.sh").write_text(
        f"python3 -m openrlhf.cli.train_ppo_ray {new} --data.max_len 4096 --rollout.max_new_tokens 3072 \\\n"
        "  --rollout.batch_size 128 \\\n"
        "  --rollout.n_samples_per_prompt 8 --train.batch_size 1024 --algo.advantage.estimator group_norm --ds.zero_stage 3 \\\n"
        "  --actor.model_name_or_path Qwen/Qwen3-8B\n"
    )
    found = read(tmp_path / "new.sh", model=None, answers="mean=900")
    assert found.workload.model.name == "qwen3-8b" and found.framework == "openrlhf@0.11.2"
    assert (found.placement.mode, found.placement.staleness, found.placement.generate_gpus) == ("split", 2, 4)
    assert (found.workload.answers.most <= 3072, found.workload.samples, found.workload.reference) == (True, 8, True)
    (tmp_path / "old.sh").write_text(
        "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --actor_num_nodes 1 --actor_num_gpus_per_node 8 \\\n"
        "  --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --colocate_all_models --prompt_max_len 1024 \\\n"
        "  --generate_max_len 2048 \\\n"
        "  --rollout_batch_size 256 --n_samples_per_prompt 4 --train_batch_size 256 --zero_stage 3 --pretrain x/Qwen3-8B \\\n"
        "  --micro_train_batch_size 2 --advantage_estimator rloo --init_kl_coef 0 --gradient_checkpointing\n"
    )
    found = read(tmp_path / "old.sh")
    assert found.framework == "openrlhf@0.9.9" and found.placement.mode == "colocated" and found.workload.algorithm == "rloo"
    assert (found.workload.updates, found.workload.max_length, found.workload.reference) == (4, 3072, False)
    assert (int(found.layouts.actor.micro_batch_size), int(found.layouts.rollout.replicas)) == (2, 4)


def test_arrays_of_a_script_of_slime(tmp_path):
    (tmp_path / "run.sh").write_text(
        "ROLLOUT=(\n  --rollout-batch-size 32\n  --n-samples-per-prompt 8\n  --rollout-max-response-len 8192\n"
        "  --global-batch-size 256\n)\n"
        "PERF=(\n  --tensor-model-parallel-size 2\n  --sequence-parallel\n  --use-dynamic-batch-size\n  --max-tokens-per-gpu 9216\n"
        "  --recompute-granularity full\n)\nray job submit --address=x \\\n  -- python3 train.py --actor-num-nodes 1 \\\n"
        "  --actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 2 ${ROLLOUT[@]} ${PERF[@]}\n"
    )
    found = read(tmp_path / "run.sh", gpus=None)
    assert (found.placement.mode, found.placement.train_gpus, found.trainer) == ("colocated", 8, "megatron")
    assert (int(found.layouts.actor.tp), int(found.layouts.actor.dp), int(found.layouts.actor.micro_batch_size)) == (2, 4, 1)
    assert (found.workload.train_batch, found.workload.prompts, found.workload.max_length) == (0, 32, 9216)


def test_allocations_of_areal(tmp_path):
    export_rl(rl_plan("areal", 4, gpus=32), "areal", tmp_path / "run")
    text = (tmp_path / "run" / "areal.yaml").read_text().replace("fsdp:d16", "megatron:(attn:d2p2t2c2|ffn:d2p2t1e4)")
    (tmp_path / "moe.yaml").write_text(text)
    found = read(tmp_path / "moe.yaml", model="qwen3-30b-a3b")
    actor = found.layouts.actor
    assert [int(one) for one in (actor.dp, actor.pp, actor.tp, actor.cp, actor.ep)] == [2, 2, 2, 2, 4]
    (tmp_path / "moe.yaml").write_text(text.replace("megatron:(", "mega("))
    with pytest.raises(PlannerError, match="it must be like fsdp:d4t2"):
        read(tmp_path / "moe.yaml")


def test_everything_that_is_missing_is_one_sentence(tmp_path):
    export_rl(rl_plan("openrlhf", 1, gpus=8), "openrlhf", tmp_path / "run")
    file = tmp_path / "run" / "arguments.txt"
    with pytest.raises(PlannerError, match=r"--model NAME .*--answers mean=M,p99=P"):
        read(file, model=None, answers=None)
    with pytest.raises(PlannerError, match="whose ratio that number does not keep"):
        read(file, gpus=7)
    assert read(file, gpus=32).placement.train_gpus == 16
    with pytest.raises(PlannerError, match="has no variable or setting of that name"):
        read(file, settings={"no.such": "1"})
    (tmp_path / "x.txt").write_text("hello\n")
    with pytest.raises(PlannerError, match="looks like no configuration of verl"):
        read(tmp_path / "x.txt")
    with pytest.raises(PlannerError, match="RL framework"):
        read(file, "rl:ray")
    file.write_text(file.read_text().replace("group_norm", "magic"))
    with pytest.raises(PlannerError, match="estimator is 'magic'; an RL plan knows cispo, dapo"):
        read(file)


def test_one_limit_for_prompt_and_answer(tmp_path):
    """NeMo RL gives answers the whole sequence unless it says more: the prompt has to be said."""
    export_rl(rl_plan("nemo-rl", 1, gpus=8), "nemo-rl", tmp_path / "run")
    file = tmp_path / "run" / "overrides.txt"
    file.write_text(file.read_text().replace("max_new_tokens=4096", "max_new_tokens=5120"))
    with pytest.raises(PlannerError, match="--input-tokens N"):
        read(file, prompt_length=None)
    found = read(file, prompt_length=1120.0)
    assert found.workload.answers.most <= 4000 and found.workload.max_length == 5120


def test_command_prices_what_is_read(run, tmp_path):
    export_rl(rl_plan("verl", 1, gpus=8), "verl", tmp_path / "run")
    file, out = tmp_path / "run" / "overrides.txt", tmp_path / "rl.yaml"
    words = ("--model", "qwen3-8b", "--hardware", "h100-sxm", "--answers", "mean=1200,p99=4096", "--input-tokens", "512")
    found = run("import", str(file), "--from", "rl:verl", *words, "--output", str(out))
    assert found.exit_code == 0, found.output
    plan = load_rl_plan(out)
    assert plan.prediction is not None and plan.prediction.step_s > 0
    assert dataclasses.replace(plan.placement) == rl_plan("verl", 1, gpus=8).placement
    assert run("export", str(out), "--to", "verl", "--output", str(tmp_path / "again")).exit_code == 0
    assert run("import", str(file), "--from", "rl:verl", "--rate", "5/s", *words).exit_code == 2
    assert run("import", str(file), "--from", "rl:verl", "--model", "qwen3-8b").exit_code == 2


@pytest.mark.parametrize("ahead", [None, 4])
def test_ppo_of_nemo_rl_is_read_back(ahead, tmp_path):
    plan = rl_plan("nemo-rl", ahead, work={"algorithm": "ppo", "critic": load_model("qwen3-8b"), "epochs": 2})
    export_rl(plan, "nemo-rl", tmp_path / "run")
    found = read(tmp_path / "run" / "overrides.txt", "rl:nemo-rl")
    assert (found.workload.algorithm, found.workload.epochs, found.workload.critic) == ("ppo", 2, load_model("qwen3-8b"))
    assert (found.placement, found.layouts.actor.tp) == (plan.placement, plan.layouts.actor.tp)


def test_states_that_stay_on_the_gpus_are_read_and_written(tmp_path):
    """verl says it by state, OpenRLHF of all; what the framework does by itself is no part of the plan."""
    for name, offload, line in (
        ("verl", ("optimizer", "reference"), "actor_rollout_ref.actor.fsdp_config.param_offload=False"),
        ("verl", None, "actor_rollout_ref.actor.fsdp_config.param_offload=True"),
        ("openrlhf", (), ""), ("openrlhf", None, "--ds.enable_sleep"),
    ):  # fmt: skip
        folder = tmp_path / f"{name}-{offload}"
        export_rl(rl_plan(name, None, gpus=8, offload=offload), name, folder)
        file = folder / ("overrides.txt" if name == "verl" else "arguments.txt")
        text = file.read_text()
        assert line in text.splitlines() or (not line and "--ds.enable_sleep" not in text)
        assert read(file, f"rl:{name}").offload == offload
