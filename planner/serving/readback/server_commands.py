"""Commands that start a server, or a benchmark of one, with their settings under the engine's own long names."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError
from planner.record import record
from planner.serving.flags.engine_sources import Flags
from planner.serving.flags.flag_check import recorded
from planner.trainers.reading.given import Given
from planner.trainers.reading.settings import beside, parsed
from planner.trainers.reading.shell import evaluate, is_open, options, words_of
from planner.trainers.reading.shell.text import Word, gap
from planner.trainers.reading.values import read_text

FORM = (
    r"\bvllm\s+serve\b|vllm\.entrypoints|vllm/vllm-openai|sglang\.launch_server|\bsglang\s+serve\b|lmsysorg/sglang|\btrtllm-serve\b"
    r"|kind:\s*DynamoGraphDeployment|\bdynamo\.(vllm|sglang|trtllm)\b"
)
"""What stands in a file that starts a server."""
PROGRAMS = {"vllm": "vllm serve", "sglang": "sglang.launch_server", "trtllm": "trtllm-serve"}
BENCHES = {"vllm": "vllm bench serve", "sglang": "sglang.bench_serving"}
_VERSION = {
    "vllm": r"vllm(?:/vllm-openai:v?|==|\s+)(\d+\.\d+(?:\.\d+)?)",
    "sglang": r"sglang(?:[:/][\w/]*v|\[\w+\]==|==)(\d+\.\d+\.\d+(?:\.post\d+)?)",
    "trtllm": r"tensorrt[-_]llm(?:/release:|==)(\d+\.\d+(?:\.\d+)?(?:rc\d+)?)",
}
"""Versions in names of images and in lines of pip."""
_POSITIONAL = ("vllm", "trtllm")
"""Engines whose model stands behind the program without a flag."""
MOST_SERVERS = 4096


@record
class Server:
    """One command that starts an engine."""

    engine: str
    settings: dict[str, Any]
    """By the engine's long name without dashes and with underscores; an unknown value is a text with gaps."""
    role: str = ""
    """prefill or decode, where the command or the manifest says so."""
    copies: int = 1


@dataclass
class Found:
    """What a file starts."""

    servers: list[Server] = field(default_factory=list)
    bench: dict[str, Any] = field(default_factory=dict)
    """Settings of a benchmark in the same file, with ``engine`` whose client it is."""
    version: str = ""
    notes: list[str] = field(default_factory=list)


def find_servers(path: Path, said: Given) -> Found:
    """The servers that a script or a manifest starts. Raises PlannerError when there is none."""
    text = read_text(path)
    found = Found()
    if re.search(r"^[ \t]*+kind:\s*DynamoGraphDeployment", text, re.MULTILINE):
        _manifest(path, text, said, found)
    else:
        _script(path, text, said, found)
    if not found.servers:
        raise PlannerError(f"{path}: no command that starts vLLM, SGLang or TensorRT-LLM was found")
    engine = found.servers[0].engine
    if any(one.engine != engine for one in found.servers):
        raise PlannerError(
            f"{path}: it starts {', '.join(sorted({one.engine for one in found.servers}))}; import one engine at a time"
        )
    version = re.search(_VERSION[engine], text)
    found.version = found.version or (version[1] if version else "")
    found.servers = _merged(found.servers)
    return found


def _merged(servers: list[Server]) -> list[Server]:
    """Equal servers of one role as copies of one: addresses and ranks aside."""
    kept: dict[tuple[str, str], Server] = {}
    for one in servers:
        same = {key: value for key, value in one.settings.items() if key not in _OWN}
        key = one.role, json.dumps(same, sort_keys=True, default=str)
        before = kept.get(key)
        nodes = one.settings.get("nnodes")
        again = (
            before is not None
            and isinstance(nodes, int)
            and nodes > 1
            and one.settings.get("node_rank") not in (None, 0)
        )
        if before is None or not again:
            copies = one.copies + (before.copies if before else 0)
            kept[key] = Server(
                engine=one.engine, settings=one.settings, role=one.role, copies=min(copies, MOST_SERVERS)
            )
    return list(kept.values())


_OWN = (
    "port", "host", "node_rank", "master_addr", "master_port", "dist_init_addr", "headless", "data_parallel_start_rank", "seed",
    "disaggregation_bootstrap_port", "base_gpu_id", "served_model_name", "nccl_port",
)  # fmt: skip
"""Settings in which copies of one server differ."""


# ------------------------------------------------------------------------------------------------ scripts


def _script(path: Path, text: str, said: Given, found: Found) -> None:
    text = re.sub(r"^([ \t]*)[!%](?=[A-Za-z])", r"\1", text, flags=re.MULTILINE)  # cells of notebooks
    script = evaluate(text, str(path), said.settings, path.parent)
    for name in said.settings:
        if re.search(rf"\b{re.escape(name)}\b", text):
            said.used.add(name)
    files = dict(script.documents)
    for command in script.commands:
        if any(one in ("pip", "pip3", "git", "echo", "pkill", "grep") for one in command.words[:2]):
            continue
        for server in _of_words(path, list(command.words), files):
            found.servers.append(server)
        found.bench = found.bench or _bench(command.words)


def _of_words(path: Path, words: list[str], files: Mapping[str, str]) -> Iterator[Server]:
    """The server that the words of one command start."""
    place = _program(words)
    if place is None:
        return
    engine, start = place
    settings = _settings(engine, words[start:])
    file = settings.pop("config", None) or settings.pop("extra_engine_args", None)
    if isinstance(file, str):
        settings |= _config(path, engine, file, files)
    yield Server(engine=engine, settings=settings, role=_role(settings), copies=1)


def _program(words: list[str]) -> tuple[str, int] | None:
    """(engine, number of the first word of its own); None where no server is started."""
    for i, word in enumerate(words):
        after = words[i + 1] if i + 1 < len(words) else ""
        name = word.rpartition("/")[2]
        if name == "vllm" and after == "serve":
            return "vllm", i + 2
        if word.startswith("vllm.entrypoints") or re.fullmatch(r"(?:[\w.-]+/)*vllm/vllm-openai(:\S*)?", word):
            return "vllm", i + 1
        if word == "sglang.launch_server" or (name == "sglang" and after == "serve"):
            return "sglang", i + (1 if word == "sglang.launch_server" else 2)
        if name == "trtllm-serve" and after not in ("disaggregated", "disaggregated_mpi_worker", "mm_embedding_serve"):
            return "trtllm", i + (2 if after == "serve" else 1)
        if (found := re.fullmatch(r"dynamo\.(vllm|sglang|trtllm)", word)) is not None:
            return found[1], i + 1
    return None


def _settings(engine: str, words: list[str]) -> dict[str, Any]:
    """Settings by long name; the model, where it stands without a flag."""
    known, after = recorded(engine)["programs"][PROGRAMS[engine]], list(words_of(words))
    found: dict[str, Any] = {}
    if engine in _POSITIONAL and after and not after[0].text.startswith("-"):
        found["model"] = after[0].text
        after = after[1:]
    return found | _named(engine, known, after)


def _named(engine: str, known: Flags, after: Iterable[Word]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, values, under in options(after):
        head, _, inner = name.partition(".")
        value: Any = True if not values else values[0] if len(values) == 1 else values
        read = gap(under) if under else _value(value)
        long, negated = _long_name(engine, known, head)
        if negated and read is True:
            read = False
        if inner:
            section = found.setdefault(long, {})
            if isinstance(section, dict):
                section[inner.replace("-", "_")] = read
        else:
            found[long] = read
    return found


def _long_name(engine: str, known: Flags, name: str) -> tuple[str, bool]:
    """The name that a setting goes by, and whether it is said with --no-."""
    for word in (f"--{name}", f"--{name.replace('_', '-')}", f"--{name.replace('-', '_')}", f"-{name}"):
        if word in known:
            return known[word].get("same", word).lstrip("-").replace("-", "_"), False
    begun = {known[one].get("same", one) for one in known if one.startswith(f"--{name}-")} if len(name) > 1 else set()
    if f"--{name}-size" in known or len(begun) == 1:  # argparse takes a beginning that is unique
        word = f"--{name}-size" if f"--{name}-size" in known else begun.pop()
        return known[word].get("same", word).lstrip("-").replace("-", "_"), False
    bare = name.removeprefix("no-")
    if bare != name and f"--{bare}" in known:
        return bare.replace("-", "_"), True
    return name.replace("-", "_"), False


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(one) for one in value]
    if not isinstance(value, str) or is_open(value):
        return value
    if value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    size = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", value)
    if size:
        return int(float(size[1]) * {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}[size[2]])
    return parsed(value)


def _role(settings: dict[str, Any]) -> str:
    """prefill or decode, by the engine's own words."""
    mode = settings.get("disaggregation_mode")
    if mode in ("prefill", "decode"):
        return str(mode)
    for role in ("prefill", "decode"):
        if settings.pop(f"is_{role}_worker", None):
            return role
    transfer = settings.get("kv_transfer_config")
    kind = transfer.get("kv_role") if isinstance(transfer, dict) else None
    return {"kv_producer": "prefill", "kv_consumer": "decode"}.get(str(kind), "")


def _config(path: Path, engine: str, name: str, files: Mapping[str, str]) -> dict[str, Any]:
    """Settings of the YAML file that a command names: in the folder of the script, or written by it."""
    if name in files:
        data = library.parse_yaml(files[name], f"{path}: {name}")
    else:
        there = beside(path, name)
        if there is None:
            raise PlannerError(f"{path}: it names {name}, which is not there; put it next to the script")
        data = library.read_yaml(there)
    return {str(key).replace("-", "_"): value for key, value in data.items()}


def _bench(words: list[str]) -> dict[str, Any]:
    """Settings of a benchmark's command; {} of any other."""
    text = " ".join(words[:8])
    for engine, form in (
        ("vllm", r"\bvllm bench serve\b|benchmark_serving\.py"),
        ("sglang", r"sglang\.(bench_serving|benchmark\.serving)"),
    ):
        if re.search(form, text):
            start = (
                next(i for i, word in enumerate(words) if word.startswith("--"))
                if any(w.startswith("--") for w in words)
                else len(words)
            )
            return {
                "engine": engine,
                **_named(engine, recorded(engine)["programs"][BENCHES[engine]], words_of(words[start:])),
            }
    return {}


# ------------------------------------------------------------------------------------------------ manifests


def _manifest(path: Path, text: str, said: Given, found: Found) -> None:
    """Workers of a DynamoGraphDeployment, in both of its forms (components and services)."""
    from planner.serving.export.dynamo import ENGINES, VERSION

    parts = re.split(r"^---[ \t]*(?:#.*)?$", text, flags=re.MULTILINE)
    documents = [library.parse_yaml(one, str(path)) for one in parts if re.search(r"^[^#\s]", one, re.MULTILINE)]
    files = {
        str(name): str(body)
        for one in documents if one.get("kind") == "ConfigMap" and isinstance(one.get("data"), dict)
        for name, body in one["data"].items()
    }  # fmt: skip
    for graph in (one for one in documents if one.get("kind") == "DynamoGraphDeployment"):
        spec = graph.get("spec")
        for name, part in _components(spec if isinstance(spec, dict) else {}):
            server = _worker(path, name, part, files)
            if server is not None:
                found.servers.append(server)
    image = re.search(r"ai-dynamo/(?:vllm|sglang|tensorrtllm)-runtime:(\d+\.\d+)", text)
    if image and found.servers and VERSION.startswith(image[1]):
        found.version = ENGINES[found.servers[0].engine]


def _components(spec: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    listed, named = spec.get("components"), spec.get("services")
    for one in listed if isinstance(listed, list) else ():
        if isinstance(one, dict):
            yield str(one.get("name", "")), one
    for name, one in named.items() if isinstance(named, dict) else ():
        if isinstance(one, dict):
            yield str(name), one


def _worker(path: Path, name: str, part: Mapping[str, Any], files: Mapping[str, str]) -> Server | None:
    container = _container(part)
    texts = [str(one) for key in ("command", "args") for one in _list(container.get(key))]
    words = texts if len(texts) > 3 else [word for one in texts for word in one.split()]
    place = _program(words)
    if place is None:
        return None
    settings = _settings(place[0], words[place[1] :])
    file = settings.pop("extra_engine_args", None) or settings.pop("config", None)
    if isinstance(file, str):
        settings |= _config(
            path, place[0], file.rpartition("/")[2] if file.rpartition("/")[2] in files else file, files
        )
    kinds = [str(part.get(key, "")) for key in ("type", "subComponentType", "componentType")]
    role = _role(settings) or next((one for one in kinds if one in ("prefill", "decode")), "")
    role = role or next((one for one in ("prefill", "decode") if one in name.lower() and place[0] != "vllm"), "")
    copies = part.get("replicas", 1)
    return Server(
        engine=place[0],
        settings=settings,
        role=role,
        copies=copies if isinstance(copies, int) and 0 < copies < 10**6 else 1,
    )


def _container(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """The main container of a component."""
    old = part.get("extraPodSpec")
    if isinstance(old, dict) and isinstance(old.get("mainContainer"), dict):
        found: Mapping[str, Any] = old["mainContainer"]
        return found
    pod = part.get("podTemplate")
    spec = pod.get("spec") if isinstance(pod, dict) else None
    containers = spec.get("containers") if isinstance(spec, dict) else None
    return next((one for one in _list(containers) if isinstance(one, dict)), {})


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if isinstance(value, str) else []
