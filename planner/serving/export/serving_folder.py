"""All files of one target of ``plan export`` for a serve plan, held against the engines' own flags before they are written."""

import importlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner import library
from planner.errors import PlannerError, UnknownNameError, listed
from planner.record import record
from planner.serving.chain_search import CUT_BY
from planner.serving.export import dynamo, llm_d
from planner.serving.export.bench_command import Bench, bench_of
from planner.serving.export.serve_job import FIRST_PORT, ROUTER_PORT, ModelNames, Place, ServeJob
from planner.serving.flags.flag_check import known_flags, recorded, wrong_keys, wrong_words
from planner.serving.serve_plan import LATENCIES, ServePlan
from planner.trainers.bundle.folder import NamedExport, write_bundle
from planner.trainers.bundle.quoting import shell_command, text_from, yaml_blocks

TARGETS = {
    "vllm": "vLLM (scripts)", "sglang": "SGLang (scripts)", "trtllm": "TensorRT-LLM (configuration and scripts)",
    "dynamo": "NVIDIA Dynamo (DynamoGraphDeployment)", "llm-d": "llm-d (values of its model service chart)",
}  # fmt: skip
"""Names after --to for a serve plan."""
_HERE = "planner.serving.export"
_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between tokens",
    "e2e": "whole request",
}
_KINDS = {"serve": "prompts and answers", "prefill": "prompts alone", "decode": "answers alone"}


def export_serving(plan: ServePlan, to: str, folder: Path, *, force: bool = False) -> NamedExport:
    """Write a serve plan for a target. Raises PlannerError when it cannot run there, or the folder cannot be written."""
    made = make_export(plan, to)
    write_bundle(made, folder, force=force)
    return made


def make_export(plan: ServePlan, to: str) -> NamedExport:
    """The files of a serve plan for a target. Raises PlannerError."""
    if to not in TARGETS:
        raise UnknownNameError("target of a serve plan", to, TARGETS)
    if to in ("vllm", "sglang", "trtllm") and to != plan.engine_name:
        others = listed([plan.engine_name, "dynamo", *(["llm-d"] if plan.engine_name == "vllm" else [])])
        raise PlannerError(
            f"the plan was priced for {plan.engine}, and {to} is another engine: export to {others}, or plan for {to}"
        )
    if plan.stages and (to not in CUT_BY or plan.engine_name not in CUT_BY):
        raise PlannerError(
            f"{to} starts engines on equal nodes, and the stages of this plan stand on {plan.hardware_text}; export to "
            f"{plan.engine_name}"
        )
    job, engine = ServeJob.of(plan), engine_module(plan.engine_name)
    problems = engine.refusals(job) + (llm_d.refusals(job) if to == "llm-d" else [])
    if problems:
        raise PlannerError(f"{to} cannot run this plan: {'; '.join(problems)}")
    made = {"dynamo": _dynamo, "llm-d": _llm_d}.get(to, _scripts)(job, engine)
    bench = bench_of(job)
    wrong = made.wrong + wrong_words(known_flags(_package(bench))[0], bench.checked, bench.words)
    if wrong:
        raise PlannerError(f"{made.checked} would refuse what was written: {'; '.join(wrong)}")
    notes = (*_notes(job, to), *bench.notes)
    common = {"plan": plan, "job": job, "pools": job.pools, "target": to, "title": TARGETS[to]}
    files = {
        **made.files,
        "environment.sh": text_from(f"{_HERE}/environment.sh.j2", variables=_variables(job)),
        "bench.sh": text_from(f"{_HERE}/bench.sh.j2", command=_command([*bench.program, *bench.words, "$@"])),
        "plan.yaml": library.dump_yaml(plan.to_dict()),
    }
    files["README.md"] = text_from(
        f"{_HERE}/README.serving.md.j2", **common, start=made.start, checked=made.checked, notes=notes,
        latencies=[(one, _TITLES[one]) for one in LATENCIES],
    )  # fmt: skip
    return NamedExport(target=to, files=files, notes=notes, warnings=tuple(_warnings(plan, to)), checked=made.checked)


def _command(words: Sequence[str]) -> str:
    """A command of bash: the program and what follows up to its first flag on one line, then a flag a line."""
    first = next((place for place, word in enumerate(words) if place and word.startswith("--")), len(words))
    return " \\\n    ".join([" ".join(map(_word, words[:first])), shell_command(words[first:])]).rstrip(" \\\n")


def _word(word: str) -> str:
    return shell_command([word])


def engine_module(name: str) -> Any:
    """The module with the words of an engine."""
    return importlib.import_module(f"{_HERE}.{name}_server")


@record
class _Made:
    files: dict[str, str]
    start: Sequence[str]
    """Lines of Markdown."""
    wrong: list[str]
    checked: str


def _scripts(job: ServeJob, engine: Any) -> _Made:
    """One script for each pool, one that starts all of a node, one for what stands before them."""
    record, checked = known_flags(job.plan.engine_name)
    files, wrong = {}, []
    for pool in job.pools:
        before, words = engine.command(job, pool)
        before = [*_cut(job), *before]
        what = (
            f"One engine for {_KINDS[pool.name]}: {pool.gpus} GPUs on {pool.nodes} node{'s' if pool.nodes > 1 else ''}."
        )
        files[f"{pool.name}.sh"] = text_from(
            f"{_HERE}/engine.sh.j2", what=what, pool=pool, before=before, command=_command(words), routed=job.routed,
            num_nodes=job.num_nodes,
        )  # fmt: skip
        wrong += wrong_words(record, engine.CHECKED, _own(words, engine.PROGRAM))
        if hasattr(engine, "config"):
            data = engine.config(job, pool, ModelNames())
            files[f"{pool.name}.config.yaml"] = library.dump_yaml(data)
            wrong += wrong_keys(record, f"{engine.CHECKED} --config", data)
    if job.num_engines == 1 and job.num_nodes == 1:
        return _Made(files=files, start=_start(job, engine, "bash serve.sh"), wrong=wrong, checked=checked)
    files["engines.txt"] = "# node pool GPUs port slot rank leader nodes\n" + "".join(
        _row(job, one) for one in job.places
    )
    files["run.sh"] = text_from(f"{_HERE}/run.sh.j2", num_nodes=job.num_nodes, routed=job.routed, stages=job.plan.stages)
    if job.num_nodes > 1:
        files["hosts.txt"] = f"# Addresses of the {job.num_nodes} nodes, one a line, in the order of NODE_RANK.\n" + "".join(
            f"# {line}\n" for line in _nodes_of_kinds(job)
        )
    if job.routed:
        words = engine.router(job)
        files["router.sh"] = text_from(
            f"{_HERE}/router.sh.j2", command=_command([*engine.ROUTER_PROGRAM, *words]), num_nodes=job.num_nodes,
            install=f"Install: {engine.ROUTER_INSTALL}", engine=job.plan.engine_name, disaggregated=job.disaggregated,
        )  # fmt: skip
        if engine.ROUTER:
            wrong += wrong_words(known_flags(engine.ROUTER)[0], engine.ROUTER, words)
    command = "bash run.sh" if job.num_nodes == 1 else f"NODE_RANK=0..{job.num_nodes - 1} bash run.sh   # on each node"
    return _Made(files=files, start=_start(job, engine, command), wrong=wrong, checked=checked)


def _cut(job: ServeJob) -> list[str]:
    """The layers of every stage, where they stand on several kinds."""
    layers = ",".join(str(one.layers) for one in job.plan.stages)
    return [f"export {CUT_BY[job.plan.engine_name]}={layers}"] if layers else []


def _nodes_of_kinds(job: ServeJob) -> list[str]:
    """Which nodes are of which kind: those of the first stages first."""
    found = list[str]()
    for run in job.stages_by_kind:
        ranks = {number for number, stage in enumerate(job.plan.stages) if stage.kind == run[0].kind}
        held = {one.rank for one in job.places if one.rank * job.gpus_of_rank // int(job.plan.layout.tp) in ranks}
        nodes = sorted({one.node for one in job.places if one.rank in held})
        layers = ", ".join(str(stage.layers) for stage in run)
        named = f"nodes {nodes[0]} to {nodes[-1]}" if len(nodes) > 1 else f"node {nodes[0]}"
        found.append(f"{named}: {run[0].kind} ({run[0].hardware}), stages of {layers} layers")
    return found


def _row(job: ServeJob, one: Place) -> str:
    """A line of engines.txt."""
    pool = next(pool for pool in job.pools if pool.name == one.pool)
    gpus = ",".join(str(one.first_gpu + number) for number in range(one.gpus))
    port = FIRST_PORT + one.slot if job.routed else ROUTER_PORT
    return f"{one.node} {one.pool} {gpus} {port} {one.slot} {one.rank} {one.leader} {pool.nodes}\n"


def _own(words: Sequence[str], program: Sequence[str]) -> list[str]:
    """Words behind the engine's program, which MPI may stand before."""
    words = list(words)
    first = next(place for place in range(len(words)) if words[place : place + len(program)] == list(program))
    return words[first + len(program) :]


def _start(job: ServeJob, engine: Any, command: str) -> list[str]:
    version = job.engine.version
    pin = f"=={version}" if version.count(".") > 1 or not version[-1].isdigit() else f"=={version}.*"
    lines = ["```sh", engine.INSTALL.format(pin=pin), *([engine.ROUTER_INSTALL] if job.routed else []), "```", ""]
    if job.num_nodes > 1:
        lines += [f"Write the addresses of the {job.num_nodes} nodes into `hosts.txt`, then:", ""]
    return [
        *lines,
        "```sh",
        command,
        "```",
        "",
        "Requests go to port 8000; `environment.sh` holds the model and its variables.",
    ]


def _literal(job: ServeJob) -> ModelNames:
    """Names for manifests, which know no variables."""
    quantization = ("--quantization", job.quantization) if job.quantization else ()
    return ModelNames(model=job.hub_name or "SET-THE-MODEL", draft="SET-THE-DRAFT-MODEL", quantization=quantization)


def _dynamo(job: ServeJob, engine: Any) -> _Made:
    job, names = replace(job, software=dynamo.ENGINES[job.plan.engine_name]), _literal(job)
    record, checked = known_flags(job.plan.engine_name)
    wrong = []
    for pool in job.pools:
        if hasattr(engine, "config"):
            wrong += wrong_keys(record, f"{engine.CHECKED} --config", engine.config(job, pool, names))
        else:
            wrong += wrong_words(record, engine.CHECKED, engine.words(job, pool, names))
    text = "---\n".join(yaml_blocks(one) for one in dynamo.manifests(job, names, engine))
    version, inside = dynamo.VERSION, dynamo.ENGINES[job.plan.engine_name]
    head = f"# Dynamo {version}, whose image holds {job.plan.engine_name} {inside}. Submit: kubectl apply -f deployment.yaml\n"
    start = [
        f"A cluster with the operator of Dynamo {version}, and a secret `{dynamo.SECRET}` with HF_TOKEN:", "",
        "```sh", "kubectl apply -f deployment.yaml", "```",
    ]  # fmt: skip
    return _Made(files={"deployment.yaml": head + text}, start=start, wrong=wrong, checked=checked)


def _llm_d(job: ServeJob, engine: Any) -> _Made:
    names = _literal(job)
    record, checked = known_flags("vllm")
    wrong = [one for pool in job.pools for one in wrong_words(record, engine.CHECKED, engine.words(job, pool, names))]
    head = "# Values of the chart llm-d-modelservice.\n"
    start = [
        "A cluster with llm-d's gateway and router, and a secret `llm-d-hf-token` with HF_TOKEN:", "", "```sh",
        "helm repo add llm-d-modelservice https://llm-d-incubation.github.io/llm-d-modelservice/",
        f"helm install {job.name_of('serve')} llm-d-modelservice/llm-d-modelservice -f values.yaml", "```",
    ]  # fmt: skip
    files = {"values.yaml": head + yaml_blocks(llm_d.values(job, names, engine))}
    return _Made(files=files, start=start, wrong=wrong, checked=checked)


def _package(bench: Bench) -> str:
    return "sglang" if bench.checked.startswith("sglang") else "vllm"


def _variables(job: ServeJob) -> list[tuple[str, str | None, str]]:
    """Name, default and reason of what the user may set."""
    weights = job.plan.precision.experts or job.plan.precision.weights
    found: list[tuple[str, str | None, str]] = [
        (
            "MODEL",
            job.hub_name,
            f"Model in Hugging Face format with {weights} weights: a folder, or a name on the hub.",
        ),
        (
            "QUANTIZATION",
            job.quantization,
            "How weights are quantised while they are loaded; empty = as the checkpoint says.",
        ),
    ]
    if job.speculation is not None and job.speculation.draft_parameters > 0 and not job.own_draft:
        size = f"{job.speculation.draft_parameters:.3g}"
        found.append(("DRAFT_MODEL", None, f"Draft model of {size} parameters for the same vocabulary."))
    return found


def _notes(job: ServeJob, to: str) -> list[str]:
    """What the files cannot say in their own words."""
    plan, notes = job.plan, [f"{line[0].upper()}{line[1:]}." for line in _nodes_of_kinds(job)]
    idle = plan.gpus - plan.num_gpus
    if idle:
        notes.append(f"{idle} of the {plan.gpus} GPUs are left over and stay idle.")
    if job.hub_name is None:
        where = "in environment.sh" if to in ("vllm", "sglang", "trtllm") else "in place of SET-THE-MODEL"
        kind = f"{plan.model.name} with {plan.precision.weights} weights"
        notes.append(f"Give a checkpoint of {kind} {where}: none is known to be published.")
    if job.quantization and plan.engine_name == "trtllm":
        notes.append(
            "TensorRT-LLM reads fp8 from the checkpoint: give MODEL one that was quantised, by ModelOpt for instance."
        )
    if any(int(pool.layout.ep) > 1 and pool.nodes > 1 for pool in job.pools):
        flags = {"vllm": "--all2all-backend deepep_low_latency", "sglang": "--moe-a2a-backend deepep"}
        flag = flags.get(plan.engine_name)
        more = f": with DeepEP installed, add {flag} to the words of the script" if flag else ""
        notes.append(f"Experts lie on several nodes and exchange tokens through the engine's default kernels{more}.")
    if job.disaggregated and to in ("vllm", "sglang", "trtllm"):
        notes.append(
            "Caches go from prefill to decode engines through NIXL: UCX must see the network cards (UCX_NET_DEVICES)."
        )
    return notes


def _warnings(plan: ServePlan, to: str) -> list[str]:
    """Versions that the flags were not read of."""
    record = recorded(plan.engine_name)["version"]
    asked = ServeJob.of(plan).software
    found = []
    if plan.prediction is not None and not plan.prediction.fits:
        found.append("by the plan's own prediction this does not start, or holds no request: its memory does not suffice")
    if asked and not _same(asked, record):
        found.append(f"the plan is for {plan.engine}, and the flags were read of {record}: look at them again")
    inside = dynamo.ENGINES[plan.engine_name]
    if to == "dynamo" and not _same(asked or record, inside):
        found.append(
            f"Dynamo {dynamo.VERSION} holds {plan.engine_name} {inside}, and the plan was priced for {asked or record}"
        )
    return found


def _same(version: str, other: str) -> bool:
    """Versions agree as far as both say."""
    parts = [re.findall(r"\d+", one)[:2] for one in (version, other)]
    short = min(map(len, parts))
    return parts[0][:short] == parts[1][:short]


def check_text(made: NamedExport) -> str:
    """What --check prints; what an engine would refuse is never written."""
    return (
        f"check: reached 'name known': names, types and choices of {made.checked}; not further: planner runs no engine"
    )
