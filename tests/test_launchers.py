"""Launch files: every node gets its place, every variable has its reason, schedulers get what they ask for."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from trainers.launch_files import started_words, strict
from trainers.plans import Wanted, found

from planner.cluster_file import ClusterFile, NodeKind
from planner.errors import PlannerError
from planner.layout import Order
from planner.trainers.bundle.folder import make_bundle, write_bundle
from planner.trainers.bundle.launchers import LAUNCHERS, gpus_of_last_node, launch, node_stages, torchrun
from planner.trainers.bundle.sky_places import infra_of
from planner.trainers.bundle.target import ExportJob
from planner.trainers.targets import load_target

ONE_NODE = Wanted(model="llama-3.1-8b", gpus=8, trainer="deepspeed", top=1)
MANY_NODES = Wanted(model="llama-3.1-70b", gpus=64, pins=(("pp", 4), ("tp", 4), ("cp", 1)), top=1)
RACK = Wanted(model="qwen3-32b", gpus=72, hardware="gb200-nvl72", batch=288, top=1, pins=(("tp", 1), ("pp", 1)))
HALF_NODE = Wanted(model="llama-3.1-8b", gpus=12, batch=384, trainer="fsdp", top=1)
CASES = {"deepspeed": ONE_NODE, "megatron": MANY_NODES, "accelerate": HALF_NODE, "vllm": RACK, "verl": MANY_NODES}


def job_of(wanted: Wanted) -> ExportJob:
    return ExportJob.of(found(wanted)[0])


def folder_of(tmp_path: Path, target: str, launcher: str) -> Path:
    write_bundle(make_bundle(load_target(target), job_of(CASES[target]), launcher), tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("target", CASES)
def test_every_script_is_bash(target: str, launcher: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, target, launcher)
    scripts = [path for path in folder.iterdir() if path.suffix in (".sh", ".sbatch")]
    assert {"run.sh", "smoke.sh", "environment.sh"} <= {path.name for path in scripts}
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("target", CASES)
def test_every_variable_has_its_reason(target: str, tmp_path: Path) -> None:
    lines = (folder_of(tmp_path, target, "torchrun") / "environment.sh").read_text().splitlines()
    names = [re.match(r"(?:# )?export (\w+)=", line) for line in lines]
    for number, name in enumerate(names):
        if name:
            assert lines[number - 1].startswith("# ") and len(lines[number - 1]) > 12, f"{name.group(1)} has no reason"
    assert not any("TORCH_NCCL_AVOID_RECORD_STREAMS" in line for line in lines)  # deprecated since torch 2.7


def test_nvlink_across_nodes_is_pinned_where_it_was_priced(tmp_path: Path) -> None:
    assert 'NCCL_MNNVL_ENABLE="1"' in (folder_of(tmp_path / "a", "vllm", "torchrun") / "environment.sh").read_text()
    assert "NCCL_MNNVL" not in (folder_of(tmp_path / "b", "megatron", "torchrun") / "environment.sh").read_text()


def test_one_node_needs_nothing(tmp_path: Path) -> None:
    words = started_words(folder_of(tmp_path, "deepspeed", "torchrun"), "smoke.sh", "torchrun", {"MODEL": "m"})
    assert words[:6] == ["--standalone", "--nnodes", "1", "--nproc-per-node", "8", "--max-restarts"]


def test_every_node_gets_its_rank_and_the_last_its_gpus(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "megatron", "torchrun")
    user = {name: "x" for name in ("MEGATRON_LM", "DATA_PATH", "TOKENIZER_MODEL")}
    with pytest.raises(RuntimeError, match="set NODE_RANK to the number of this node, 0 to 7"):
        started_words(folder, "smoke.sh", "torchrun", user)
    with pytest.raises(RuntimeError, match="set MASTER_ADDR to the address of node 0"):
        started_words(folder, "smoke.sh", "torchrun", {**user, "NODE_RANK": "3"})
    words = started_words(folder, "smoke.sh", "torchrun", {**user, "NODE_RANK": "3", "MASTER_ADDR": "host0"})
    given = dict(zip(words[:12:2], words[1:12:2], strict=True))
    assert given == {
        "--nnodes": "8", "--node-rank": "3", "--nproc-per-node": "8", "--rdzv-backend": "static",
        "--rdzv-endpoint": "host0:29500", "--max-restarts": "0",
    }  # fmt: skip
    half = job_of(HALF_NODE)
    assert (half.num_nodes, half.gpus_per_node, gpus_of_last_node(half)) == (2, 8, 4)
    assert 'if [ "$NODE_RANK" = 1 ]; then GPUS_PER_NODE=4; fi' in make_bundle(
        load_target("accelerate"), half, "torchrun"
    ).files["run.sh"]  # fmt: skip
    assert "static" in torchrun(half)


def test_hosts_get_the_ranks_of_their_lines(tmp_path: Path) -> None:
    """hosts.txt decides before SLURM or the shell does; without hosts in it nothing changes."""
    folder = folder_of(tmp_path, "megatron", "slurm")
    hosts = folder / "hosts.txt"
    said = hosts.read_text()
    assert all(line.startswith("#") for line in said.splitlines())
    assert "#   lines 1 to 2: pipeline stage 0" in said and "#   lines 7 to 8: pipeline stage 3" in said
    given = {
        **dict.fromkeys(("MEGATRON_LM", "DATA_PATH", "TOKENIZER_MODEL"), "x"),
        "NODE_RANK": "5",
        "MASTER_ADDR": "first",
    }

    def place() -> tuple[str, str]:
        words = started_words(folder, "smoke.sh", "torchrun", given)
        return words[words.index("--node-rank") + 1], words[words.index("--rdzv-endpoint") + 1]

    assert place() == ("5", "first:29500")
    names = [f"host{i}" for i in range(8)]
    here = os.uname().nodename
    hosts.write_text(said + "\n".join([*names[:3], f"  {here} # this one", *names[4:]]))
    assert place() == ("3", "host0:29500")
    hosts.write_text("\n".join(names))
    with pytest.raises(RuntimeError, match=f"hosts.txt does not name this host, {here}"):
        place()
    for wrong in (names[:7], [*names[:7], "host0"]):
        hosts.write_text("\n".join(wrong))
        with pytest.raises(RuntimeError, match="hosts.txt must name 8 different hosts"):
            place()


def test_a_host_order_is_written_where_it_helps() -> None:
    def files(target: str, wanted: Wanted, launcher: str) -> dict[str, str]:
        return make_bundle(load_target(target), job_of(wanted), launcher).files

    many = MANY_NODES
    assert (
        "hosts.txt" in files("megatron", many, "torchrun")
        and "`hosts.txt`" in files("megatron", many, "slurm")["README.md"]
    )
    assert "hosts.txt" not in files("deepspeed", ONE_NODE, "slurm")  # nothing to order
    assert "hosts.txt" not in files("megatron", many, "kubernetes")  # hosts are chosen when the job starts
    assert "hosts.txt" not in files("megatron", many, "skypilot")
    assert "hosts.txt" not in files("verl", many, "slurm")  # Ray orders them by address
    assert "hosts.txt" not in files("vllm", RACK, "slurm")
    racks = Wanted(model="qwen3-32b", gpus=144, hardware="gb200-nvl72", batch=288, top=1, pins=(("tp", 1), ("pp", 1)))
    assert "one NVLink domain in lines 1 to 18" in files("megatron", racks, "slurm")["hosts.txt"]


def test_stages_of_the_nodes_are_those_of_the_rank_order() -> None:
    job = job_of(MANY_NODES)
    assert node_stages(job) == [(2 * i, 2 * i + 1, f"pipeline stage {i}") for i in range(4)]
    inside = ExportJob(
        plan=job.plan.__class__(**{**vars(job.plan), "layout": job.layout.replace(order=int(Order.TP_CP_EP_PP_DP))}),
        cluster=job.cluster, trainer=job.trainer,
    )  # fmt: skip
    assert {stages for _, _, stages in node_stages(inside)} == {"pipeline stages 0 to 1", "pipeline stages 2 to 3"}


def test_slurm_asks_for_whole_nodes(tmp_path: Path) -> None:
    text = (folder_of(tmp_path, "megatron", "slurm") / "run.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.M))
    assert asked == {
        "job-name": "plan-llama-3-1-70b-64", "nodes": "8", "ntasks-per-node": "1", "gpus-per-node": "8", "exclusive": "",
        "mem": "0", "output": "%x-%j.log",
    }  # fmt: skip
    job = job_of(CASES["deepspeed"])
    on_cpu = dataclasses.replace(job.cluster, hardware=dataclasses.replace(job.cluster.hardware, arch="CPU"))
    files = launch(dataclasses.replace(job, cluster=on_cpu), load_target("deepspeed").render(job), "slurm")
    text = files["run.sbatch"]
    assert "#SBATCH --ntasks-per-node=1\n#SBATCH --exclusive" in text and "gpus" not in text


def test_schedulers_hear_of_host_memory() -> None:
    """States of 147.2 GiB per GPU on the host: 1178 GiB of a node of eight; without offload nothing is asked for."""
    job = job_of(CASES["megatron"])
    for each, said in ((147.2, 1178), (0.0, None)):
        told = dataclasses.replace(job.plan.prediction, host_memory_gib_per_gpu=each)
        one = dataclasses.replace(job, plan=dataclasses.replace(job.plan, prediction=told))
        rendered = load_target("megatron").render(one)
        pods = list(yaml.safe_load_all(launch(one, rendered, "kubernetes")["run.trainjob.yaml"]))[1]["spec"]["trainer"]
        asked = pods["resourcesPerNode"]["requests"]
        assert asked == {"nvidia.com/gpu": 8, **({"memory": f"{said}Gi"} if said else {})}
        task = yaml.safe_load(launch(one, rendered, "skypilot")["run.skypilot.yaml"])["resources"]
        assert task.get("memory") == (f"{said}+" if said else None)


def test_kubernetes_asks_for_the_network_by_the_clusters_name() -> None:
    for wanted, target, asked in ((MANY_NODES, "megatron", True), (ONE_NODE, "deepspeed", False)):
        job = job_of(wanted)
        text = launch(job, load_target(target).render(job), "kubernetes")["run.trainjob.yaml"]
        assert ("# that this cluster's device plugin gives them (kubectl describe node" in text) == asked
        assert list(yaml.safe_load_all(text))[1]["kind"] == "TrainJob"


def test_kubernetes_carries_the_files(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "megatron", "kubernetes")
    config, job = yaml.safe_load_all((folder / "run.trainjob.yaml").read_text())
    spec = job["spec"]
    assert (spec["trainer"]["numNodes"], spec["trainer"]["numProcPerNode"]) == (8, 8)
    assert spec["trainer"]["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 8}
    pod = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"][
        "template"
    ]
    items = pod["spec"]["volumes"][0]["configMap"]["items"]
    assert {one["path"]: config["data"][one["key"]] for one in items} == {
        one["path"]: (folder / one["path"]).read_text() for one in items
    }
    assert {"run.sh", "environment.sh"} <= {one["path"] for one in items}
    assert all(re.fullmatch(r"[\w.-]+", one["key"]) for one in items)
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", job["metadata"]["name"])


def test_skypilot_asks_for_what_the_user_must_say(tmp_path: Path) -> None:
    task = yaml.safe_load((folder_of(tmp_path, "verl", "skypilot") / "run.skypilot.yaml").read_text())
    assert task["resources"] == {"accelerators": "H100:8", "use_spot": False}
    assert (task["num_nodes"], task["envs"], task["workdir"]) == (8, {"MODEL": None}, ".")


def kind(name: str, site: str, **changes: object) -> NodeKind:
    return NodeKind(**{"kind": name, "hardware": "h100-sxm", "count": 8, "site": site, **changes})


def task_of(*kinds: NodeKind) -> tuple[str, dict[str, object]]:
    job = job_of(MANY_NODES)
    files = launch(job, load_target("megatron").render(job), "skypilot", ClusterFile(nodes=kinds))
    return files["run.skypilot.yaml"], yaml.safe_load(files["run.skypilot.yaml"])["resources"]


def test_skypilot_starts_in_any_region_of_a_cluster_file() -> None:
    text, asked = task_of(*map(kind, "bcd", ("us-central1-a", "eastus", "us-east-1")), kind("a", "us-east-1", spot=True))
    assert asked == {
        "accelerators": "H100:8",
        "any_of": [
            {"infra": "gcp/us-central1/us-central1-a", "use_spot": False}, {"infra": "azure/eastus", "use_spot": False},
            {"infra": "aws/us-east-1", "use_spot": False}, {"infra": "aws/us-east-1", "use_spot": True},
        ],
    }  # fmt: skip
    assert "sky jobs launch --env" in text  # spot nodes: the task is started again
    others = kind("small", "us-west-2", count=2), kind("old", "us-west-1", hardware="t4")
    text, asked = task_of(kind("a", "lambda/us-east-3"), *others)
    assert asked == {"accelerators": "H100:8", "infra": "lambda/us-east-3", "use_spot": False} and "sky launch --env" in text
    assert task_of(kind("a", "here"))[1] == {"accelerators": "H100:8", "use_spot": False}
    assert infra_of("ap-southeast-1b") == "aws/ap-southeast-1/ap-southeast-1b"
    assert infra_of("southeastasia") == "azure/southeastasia"
    assert infra_of("east") is infra_of("our cluster") is infra_of("a/b;c") is None


def test_places_that_skypilot_cannot_start_in_are_named() -> None:
    with pytest.raises(PlannerError, match="needs 8 nodes with 8 x h100-sxm, and the cluster has 2 nodes of 8 x h100-sxm"):
        task_of(kind("a", "us-east-1", count=2))
    with pytest.raises(PlannerError, match="regions of a cluster file are for --launcher skypilot"):
        job = job_of(MANY_NODES)
        launch(job, load_target("megatron").render(job), "slurm", ClusterFile(nodes=(kind("a", "x"),)))
    with pytest.raises(PlannerError, match="the site 'east' is no region that SkyPilot knows; name sites like us-east-1"):
        task_of(kind("a", "us-east-1"), kind("b", "east"))


def test_verl_starts_on_the_first_node_only(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "verl", "torchrun")
    place = {"MODEL": "/m", "MASTER_ADDR": "host0"}
    words = started_words(folder, "smoke.sh", "python", {**place, "NODE_RANK": "0"})
    assert words[:2] == ["-m", "verl.trainer.main_ppo"] and "actor_rollout_ref.model.path=/m" in words
    lines = (folder / "overrides.txt").read_text().splitlines()
    assert lines == words[3 : 3 + len(lines)]
    assert started_words(folder, "smoke.sh", "ray", {**place, "NODE_RANK": "2"})[:2] == [
        "start",
        "--address=host0:6379",
    ]


def test_strict_schemas_refuse_unknown_keys() -> None:
    schema = {
        "properties": {
            "a": {"type": "object", "properties": {"b": {}}},
            "c": {"additionalProperties": {"type": "string"}},
        }
    }
    closed = strict(schema)
    assert closed["additionalProperties"] is False and closed["properties"]["a"]["additionalProperties"] is False
    assert closed["properties"]["c"]["additionalProperties"] == {"type": "string"}


def test_ray_starts_the_script_on_every_node(tmp_path: Path) -> None:
    """One worker a node, with the GPUs that all of them have; the user's variables go along."""
    folder = folder_of(tmp_path, "megatron", "ray")
    for run in ("run", "smoke"):
        text = (folder / f"{run}.ray.py").read_text()
        tree = ast.parse(text)
        calls = {ast.unparse(one.func): one for one in ast.walk(tree) if isinstance(one, ast.Call)}
        asked = {word.arg: ast.unparse(word.value) for word in calls["ScalingConfig"].keywords}
        job = job_of(CASES["megatron"])
        assert asked["num_workers"] == str(job.num_nodes) and asked["placement_strategy"] == "'STRICT_SPREAD'"
        assert f"'GPU': {min(job.gpus_per_node, gpus_of_last_node(job))}" in asked["resources_per_worker"]
        assert f"'{run}.sh'" in ast.unparse(tree) and "'MEGATRON_LM'" in ast.unparse(tree)
        assert ("CUDA_VISIBLE_DEVICES" in text) == (job.gpus_per_node != gpus_of_last_node(job))
