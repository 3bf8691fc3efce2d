"""llm-d: values of its model service chart, one section for each pool.

A router of the cluster's gateway stands before the pods; with each decode pod runs a proxy that sends prompts to a prefill pod.
[llm-d-incubation/llm-d-modelservice: values.yaml, examples/]
"""

from typing import Any

from planner.cost.parameters import total_parameters
from planner.serving.export.serve_job import ModelNames, Pool, ServeJob
from planner.serving.serving_layout import WEIGHT_BYTES
from planner.trainers.bundle.quoting import shell_command
from planner.units import GIB

IMAGE = "ghcr.io/llm-d/llm-d-cuda:v0.4.0"
BEHIND, DIRECT = 8200, 8000
"""Port of an engine behind the proxy, and of one without."""
_NIXL = [
    {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": "5600"},
]


def refusals(job: ServeJob) -> list[str]:
    """What the chart does not hold."""
    found = []
    if job.plan.engine_name != "vllm":
        found.append(
            f"llm-d's model service runs vLLM, and the plan is for {job.plan.engine}; plan with --engine vllm, or export to dynamo"
        )
    wide = [f"{pool.name} {pool.nodes}" for pool in job.pools if pool.nodes > 1]
    if wide and len({pool.nodes > 1 for pool in job.pools}) > 1:
        found.append(
            f"the chart puts both pools on several nodes or neither, and not only {', '.join(wide)}; choose alike"
        )
    return found


def values(job: ServeJob, names: ModelNames, engine: Any) -> dict[str, Any]:
    """The values file. ``engine``: module of the engine's words."""
    last, multinode = job.pools[-1], any(pool.nodes > 1 for pool in job.pools)
    label = job.name_of("serve")
    return {
        "multinode": multinode,
        "modelArtifacts": {
            "name": names.model, "uri": f"hf://{names.model}", "size": f"{_disk(job)}Gi", "authSecretName": "llm-d-hf-token",
            "labels": {"llm-d.ai/inference-serving": "true", "llm-d.ai/model": label},
        },
        "routing": {"servicePort": DIRECT, "proxy": {"enabled": job.disaggregated, "targetPort": BEHIND, "connector": "nixlv2"}},
        "decode": _section(job, last, names, engine, BEHIND if job.disaggregated else DIRECT),
        "prefill": _section(job, job.pools[0], names, engine, DIRECT) if job.disaggregated else {"create": False, "replicas": 0},
    }  # fmt: skip


def _disk(job: ServeJob) -> int:
    """GiB of a volume for the weights in 16 bits, a third more."""
    return max(round(total_parameters(job.plan.model, include_mtp=True) * WEIGHT_BYTES["bf16"] * 4 / 3 / GIB), 1)


def _section(job: ServeJob, pool: Pool, names: ModelNames, engine: Any, port: int) -> dict[str, Any]:
    one, words = pool.layout, [*engine.words(job, pool, names), "--port", str(port)]
    container: dict[str, Any] = {"name": "vllm", "image": IMAGE, "modelCommand": "vllmServe", "args": words}
    if pool.nodes > 1:
        nodes = [
            "--distributed-executor-backend",
            "mp",
            "--nnodes",
            str(pool.nodes),
            "--node-rank",
            "$LWS_WORKER_INDEX",
        ]
        nodes += ["--master-addr", "$LWS_LEADER_ADDRESS", "${headless[@]}"]
        if int(one.attn_dp) > 1:
            local = int(one.attn_dp) // pool.nodes
            nodes = [
                "--data-parallel-size-local",
                str(local),
                "--data-parallel-address",
                "$LWS_LEADER_ADDRESS",
                "${first[@]}",
            ]
            nodes += ["--data-parallel-rpc-port", "5555", "${headless[@]}"]
        script = (
            'headless=(); first=()\nif [ "$LWS_WORKER_INDEX" != 0 ]; then headless=(--headless); '
            f"first=(--data-parallel-start-rank $(( LWS_WORKER_INDEX * {max(int(one.attn_dp) // pool.nodes, 1)} ))); fi\n"
            f"exec {shell_command(['vllm', 'serve', names.model, *words, *nodes])}\n"
        )
        container |= {"modelCommand": "custom", "command": ["/bin/bash", "-c"], "args": [script]}
    container |= {
        "env": _NIXL if job.disaggregated else [], "mountModelVolume": True,
        "ports": [{"containerPort": port, "name": "metrics", "protocol": "TCP"}],
        "resources": {part: {"nvidia.com/gpu": str(pool.gpus_on_node)} for part in ("limits", "requests")},
    }  # fmt: skip
    local = max(int(one.attn_dp) // pool.nodes, 1)
    parallel = {"tensor": int(one.tp), "data": int(one.attn_dp), "dataLocal": local, "workers": pool.nodes}
    return {"create": True, "replicas": pool.engines, "parallelism": parallel, "containers": [container]}
