"""NVIDIA Dynamo: a DynamoGraphDeployment with one component for each pool.

[ai-dynamo/dynamo 1.3: examples/backends/*/deploy/v1beta1]

The operator adds the words of a multi-node engine itself (ranks, addresses, headless nodes).
"""

from typing import Any

from planner import library
from planner.serving.export.serve_job import ModelNames, Pool, ServeJob

VERSION = "1.3.1"
"""Of Dynamo's images."""
ENGINES = {"vllm": "0.24", "sglang": "0.5.16", "trtllm": "1.3.0rc23"}
"""Versions of the engines in these images."""
IMAGES = {"vllm": "vllm-runtime", "sglang": "sglang-runtime", "trtllm": "tensorrtllm-runtime"}
SECRET = "hf-token-secret"
FOLDER = "/config"
"""Where the files of TensorRT-LLM are mounted."""
EVENTS = '{"publisher":"zmq","topic":"kv-events","endpoint":"tcp://*:20080","enable_kv_cache_events":true}'


def manifests(job: ServeJob, names: ModelNames, engine: Any) -> list[dict[str, Any]]:
    """Documents of one file: of TensorRT-LLM a ConfigMap first, then the deployment. ``engine``: module of the engine's words."""
    title, name = job.name_of("serve"), job.plan.engine_name
    image = f"nvcr.io/nvidia/ai-dynamo/{IMAGES[name]}:{VERSION}"
    frontend = {
        "name": "Frontend", "type": "frontend", "replicas": 1,
        "podTemplate": {"spec": {"containers": [{"name": "main", "image": image, "env": _routing(job)}]}},
    }  # fmt: skip
    workers = [_component(job, pool, names, engine, image) for pool in job.pools]
    deployment = {
        "apiVersion": "nvidia.com/v1beta1", "kind": "DynamoGraphDeployment", "metadata": {"name": title},
        "spec": {"backendFramework": name, "components": [frontend, *workers]},
    }  # fmt: skip
    if name != "trtllm":
        return [deployment]
    files = {f"{pool.name}.yaml": library.dump_yaml(engine.config(job, pool, names)) for pool in job.pools}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{title}-config"}, "data": files}
    return [config, deployment]


def _routing(job: ServeJob) -> list[dict[str, str]]:
    """The router looks at caches where prompts share beginnings; else requests go round."""
    return [{"name": "DYN_ROUTER_MODE", "value": "kv" if job.plan.traffic.prefix_hit else "round-robin"}]


def words(job: ServeJob, pool: Pool, names: ModelNames, engine: Any) -> list[str]:
    """Arguments of the worker: those of the engine, and Dynamo's own."""
    if job.plan.engine_name == "trtllm":
        found = ["--model-path", names.model, "--served-model-name", names.model]
        found += ["--extra-engine-args", f"{FOLDER}/{pool.name}.yaml"]
        return [*found, *(("--disaggregation-mode", pool.name) if job.disaggregated else ())]
    if job.plan.engine_name == "sglang":
        own = ["--disaggregation-bootstrap-port", "30001"] if job.disaggregated else []
        return ["--model-path", names.model, "--served-model-name", names.model, *engine.words(job, pool, names), *own]
    mode = ["--disaggregation-mode", pool.name] if job.disaggregated else []
    events = ["--kv-events-config", EVENTS] if job.plan.traffic.prefix_hit else []
    return ["--model", names.model, *engine.words(job, pool, names), *mode, *events]


def _component(job: ServeJob, pool: Pool, names: ModelNames, engine: Any, image: str) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "main", "image": image, "command": ["python3", "-m", f"dynamo.{job.plan.engine_name}"],
        "args": words(job, pool, names, engine), "envFrom": [{"secretRef": {"name": SECRET}}],
        "resources": {"limits": {"nvidia.com/gpu": str(pool.gpus_on_node)}},
    }  # fmt: skip
    spec: dict[str, Any] = {"containers": [container]}
    if job.plan.engine_name == "trtllm":
        container["volumeMounts"] = [{"name": "config", "mountPath": FOLDER, "readOnly": True}]
        spec["volumes"] = [{"name": "config", "configMap": {"name": f"{job.name_of('serve')}-config"}}]
    found: dict[str, Any] = {
        "name": {"serve": "Worker", "prefill": "PrefillWorker", "decode": "DecodeWorker"}[pool.name],
        "type": {"serve": "worker"}.get(pool.name, pool.name), "replicas": pool.engines, "podTemplate": {"spec": spec},
    }  # fmt: skip
    return {"multinode": {"nodeCount": pool.nodes}, **found} if pool.nodes > 1 else found
