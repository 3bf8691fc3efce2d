"""Cluster files made of node lists, shown and drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hostile import HOSTILE, MARK, put, texts

from planner import api
from planner.cluster_file import read_cluster
from planner.commands.main import main
from planner.errors import PlannerError
from planner.questions.hardware.cluster_show import drawing, shown_cluster
from planner.questions.hardware.node_lists import cluster_of, hostlist, read_nodes

SINFO = """NODELIST GRES STATE
n001 gpu:a100:8(S:0-1) idle
n002 gpu:a100:8(S:0-1) mixed
n002 gpu:a100:8(S:0-1) mixed
n003 gpu:tesla_t4:4 allocated
n004 gpu:tesla_t4:4 drained*
login1 (null) idle
"""
SCONTROL = """NodeName=dgx001 Arch=x86_64 CoresPerSocket=56
   CPUAlloc=0 CPUEfctv=224 CPUTot=224 CPULoad=0.02
   Gres=gpu:nvidia_h100_80gb_hbm3:8(S:0-1)
   NodeAddr=dgx001 NodeHostName=dgx001 Version=23.11
   State=IDLE+PLANNED ThreadsPerCore=2

NodeName=old[05-08,10] Gres=gpu:v100-sxm2-32gb:4,nvme:1 State=IDLE
NodeName=old[1-4] Gres=gpu:v100-sxm2-32gb:4 State=IDLE+DRAIN
"""


def kube(name: str, product: str, gpus: int | str, **more: Any) -> dict[str, Any]:
    """One Node as kubectl prints it."""
    labels = {"nvidia.com/gpu.product": product, "topology.kubernetes.io/zone": more.pop("zone", "us-east1-b")}
    return {
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels | more.pop("labels", {})},
        "spec": more.pop("spec", {}),
        "status": {
            "allocatable": {"cpu": "96", "nvidia.com/gpu": str(gpus)},
            "conditions": [{"type": "Ready", "status": more.pop("ready", "True")}],
        },
    }  # fmt: skip


KUBE = {
    "apiVersion": "v1", "kind": "List",
    "items": [
        kube("a", "NVIDIA-A100-SXM4-80GB", 8), kube("b", "NVIDIA-A100-SXM4-80GB", 8), kube("c", "Tesla-T4", 4, zone="us-west1-a"),
        kube("d", "Tesla-T4", 4, zone="us-west1-a", labels={"cloud.google.com/gke-spot": "true"}),
        kube("e", "NVIDIA-A100-SXM4-80GB", 8, spec={"unschedulable": True}), kube("f", "NVIDIA-A100-SXM4-80GB", 8, ready="False"),
        kube("cpu", "", 0),
    ],
}  # fmt: skip


def made(tmp_path: Path, text: str, **hardware: str) -> Any:
    """What a list gives."""
    path = tmp_path / "nodes.txt"
    path.write_text(text)
    return cluster_of(path, {name.replace("bare", ""): one for name, one in hardware.items()})


def kinds(found: Any) -> list[tuple[str, str, int, int, str]]:
    return [(one.kind, one.hardware, one.count, one.gpus, one.site) for one in found.cluster.nodes]


def test_sinfo(tmp_path: Path) -> None:
    found = made(tmp_path, SINFO)
    assert kinds(found) == [("a100-sxm-80gb", "a100-sxm-80gb", 2, 8, "here"), ("t4", "t4", 1, 4, "here")]
    assert found.hosts == {"a100-sxm-80gb": ("n001", "n002"), "t4": ("n003",)}
    assert "GPUs called a100 are taken as a100-sxm-80gb; --hardware a100=PROFILE says otherwise" in found.notes
    assert (
        "left out, as they take no job (drained): n004" in found.notes
        and "1 node without a GPU left out" in found.notes
    )
    assert kinds(made(tmp_path, SINFO, a100="a100-sxm-40gb"))[0][1] == "a100-sxm-40gb"


def test_sinfo_without_headings() -> None:
    assert read_nodes(SINFO.split("\n", 1)[1], "nodes.txt") == read_nodes(SINFO, "nodes.txt")


def test_scontrol_and_slurm_conf(tmp_path: Path) -> None:
    found = made(tmp_path, SCONTROL)
    assert [one[1:4] for one in kinds(found)] == [("h100-sxm", 1, 8), ("v100-sxm2-32gb", 5, 4)]
    assert found.hosts["v100-sxm2-32gb"] == ("old05", "old06", "old07", "old08", "old10")
    assert "old1, old2, old3, old4" in " ".join(found.notes)
    rows = {
        "nodes": [
            {"name": "x1", "gres": "gpu:h100:8(S:0-1)", "state": ["IDLE"]},
            {"name": "x2", "gres": "gpu:h100:8", "state": ["DOWN", "DRAIN"]},
        ]
    }
    assert kinds(made(tmp_path, json.dumps(rows)))[0][1:4] == ("h100-sxm", 1, 8)


@pytest.mark.parametrize("form", [json.dumps, yaml.safe_dump])
def test_kubernetes(tmp_path: Path, form: Any) -> None:
    found = made(tmp_path, form(KUBE))
    assert kinds(found) == [
        ("a100-sxm-80gb", "a100-sxm-80gb", 2, 8, "us-east1-b"), ("t4", "t4", 1, 4, "us-west1-a"),
        ("t4 spot", "t4", 1, 4, "us-west1-a"),
    ]  # fmt: skip
    assert [one.spot for one in found.cluster.nodes] == [False, False, True]
    assert any("cordoned and not ready" in one and "e, f" in one for one in found.notes)
    assert any("zones have no links here" in one for one in found.notes)


def test_the_written_file_is_read_back(tmp_path: Path) -> None:
    found = made(tmp_path, SCONTROL)
    (tmp_path / "cluster.yaml").write_text(found.text())
    assert read_cluster(tmp_path / "cluster.yaml") == found.cluster
    assert "# v100-sxm2-32gb: old05, old06" in found.text()


def test_hostlists() -> None:
    assert hostlist("n[001-003,7],login1", "x") == ["n001", "n002", "n003", "n7", "login1"]
    assert hostlist("r[1-2]n[08-10]", "x") == ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]
    assert hostlist("alone", "x") == ["alone"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no node stands in it|not a node list"),
        ("hello world\n", "not a node list that is known; give the output of 'sinfo"),
        ("NODELIST STATE\nn1 idle\n", "sinfo says no GRES"),
        ("NODELIST GRES\nn1 gpu:8 idle\n", "has 3 cells under 2 headings"),
        ("NODELIST GRES\nn1 gpu:8\n", "do not say which GPU they have; name it with --hardware"),
        ("NODELIST GRES\nn1 gpu:a100:x\n", "is not gpu:TYPE:COUNT or gpu:COUNT"),
        ("NODELIST GRES\nn1 gpu:a100:4,gpu:v100:4\n", "GPUs of several types"),
        ("NODELIST GRES\nn1 gpu:quux9:8\n", "no profile is known for GPUs called 'quux9'; name one with --hardware quux9=PROFILE"),
        ("NODELIST GRES\nn1 gpu:/tmp/own.yaml:8\n", "no profile is known for GPUs called"),
        ("NODELIST GRES\nn1 (null)\n", "none of its 1 node has a GPU that takes a job"),
        ("NODELIST GRES\nn[1-99999999999999] gpu:t4:1\n", "names more than 262144 nodes"),
        ("NODELIST GRES\nn[1-9999][1-9999] gpu:t4:1\n", "names more than 262144 nodes"),
        ("NODELIST GRES\nn[a-b] gpu:t4:1\n", "is not a number or a range"),
        ('{"items": 3}', "not a node list that is known"),
        ('{"items": [{"kind": "Node"}]}', "no metadata.name"),
        (json.dumps({"items": [kube("a", "Tesla-T4", "-1")]}), "has '-1' GPUs, which is not a whole number"),
        (json.dumps({"items": [kube("a", "NVIDIA-A100-SXM4-80GB-MIG-1g.5gb", 7)]}), "no profile is known|name one with"),
        ("[1, 2", "JSON"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(PlannerError, match=sentence):
        made(tmp_path, text)


@pytest.mark.proof
@pytest.mark.parametrize(
    "data", [{"items": KUBE["items"][:1]}, {"nodes": [{"name": "x1", "gres": "gpu:h100:8", "state": ["IDLE"]}]}]
)
def test_hostile_texts_give_a_sentence_or_a_harmless_file(tmp_path: Path, monkeypatch: Any, data: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for place, _ in texts(data):
        for hostile in HOSTILE:
            try:
                text = json.dumps(put(data, place, hostile))
                (tmp_path / "nodes.txt").write_text(text)
                found = cluster_of(tmp_path / "nodes.txt")
            except (PlannerError, UnicodeEncodeError):
                continue
            written = yaml.safe_load(found.text())
            assert set(written) <= {"nodes", "links", "storage", "spares"} and written["nodes"]
    assert not (tmp_path / MARK).exists()
    for hostile in HOSTILE:
        for text in (f"NODELIST GRES\n{hostile} gpu:t4:4\n", f"NodeName={hostile} Gres=gpu:t4:4\n", hostile):
            try:
                read_nodes(text, "nodes.txt")
            except PlannerError as error:
                assert "\n" not in str(error)


# ------------------------------------------------------------------------------------------------ shown and drawn

CLUSTER = """nodes:
- {kind: a100, hardware: a100-sxm-80gb, count: 4, gpus: 8, site: us-east, price: 12 USD/h, mtbf: 900 h}
- {kind: t4, hardware: t4, count: 12, gpus: 4, site: us-west, slowdown: {node-5: 1.4}}
links:
- {between: [us-east, us-west], bandwidth: 5 Gb/s, latency: 35 ms, flows: 8, price: 0.02 USD/GB}
storage: {read: 20 GB/s, write: 10 GB/s}
spares: 1
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    return tmp_path / "cluster.yaml"


def test_a_cluster_file_is_shown_with_its_drawing(cluster: Path) -> None:
    done = CliRunner().invoke(main, ["hardware", "show", str(cluster)])
    assert done.exit_code == 0, done.output
    for text in (
        "16 nodes, 80 GPUs, 2 sites",
        "us-east",
        "node-5",
        "1.4 times as long",
        "... 6 more",
        "0.02 USD/GB",
        "1 spare node",
    ):
        assert text in done.output
    assert done.output.count("■") == 4 * 8 + 6 * 4
    data = json.loads(CliRunner().invoke(main, ["hardware", "show", str(cluster), "--json"]).stdout)
    assert data["kinds"][1]["slowdown"] == {"node-5": 1.4} and data["links"][0]["bytes_per_s"] == 5e9 / 8
    assert data["kinds"][0]["usd_per_gpu_hour"] == 1.5 and data["gpus"] == 80
    assert data == shown_cluster(read_cluster(cluster))


def test_kinds_without_a_link_are_said(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("nodes:\n- {kind: a, hardware: h100, count: 1}\n- {kind: b, hardware: t4, count: 1}\n")
    data = shown_cluster(read_cluster(path))
    assert data["notes"] == ["a to b: no link is given; the slower of their networks is taken"]
    assert drawing(data)


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_cluster_file_is_drawn(cluster: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    picture = cluster.with_suffix(f".{ending}")
    done = CliRunner().invoke(main, ["hardware", "show", str(cluster), "--output", str(picture), "--json"])
    assert done.exit_code == 0, done.output
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG") if ending == "png" else b"<svg" in data
    api.plot_profile(cluster, picture)
    with pytest.raises(PlannerError, match=r"ends in \.png"):
        api.plot_profile(cluster, cluster.with_suffix(".gif"))


def test_the_command_writes_a_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "nodes.json").write_text(json.dumps(KUBE))
    output = tmp_path / "made.yaml"
    done = CliRunner().invoke(main, ["hardware", "cluster", str(tmp_path / "nodes.json"), "--output", str(output)])
    assert done.exit_code == 0, done.output
    assert read_cluster(output).num_gpus == 24
    (tmp_path / "n.txt").write_text("NODELIST GRES\nn[1-2] gpu:4\n")
    done = CliRunner().invoke(main, ["hardware", "cluster", str(tmp_path / "n.txt"), "--hardware", "l40s", "--json"])
    assert json.loads(done.stdout)["cluster"]["nodes"][0]["hardware"] == "l40s"
    assert CliRunner().invoke(main, ["hardware", "cluster", str(tmp_path / "n.txt")]).exit_code == 2
    done = CliRunner().invoke(main, ["hardware", "cluster", str(tmp_path / "n.txt"), "--hardware", "a100=l40s"])
    assert done.exit_code == 2 and "has no GPUs called 'a100'" in done.stderr  # it would change nothing, in silence
