"""Serve plans as files: what ``plan export``, ``plan import``, ``plan validate`` and ``plan doctor`` do with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.api.results import Answer, Exported, File

if TYPE_CHECKING:
    from planner.api.serving_calls import ServePlan
    from planner.questions.calibrate.serving_fit import ServingFit
    from planner.serving.measure.plan_comparison import Comparison
    from planner.serving.readback.serve_reading import ServeRead


def export_file(plan: File, to: str, output: File, *, force: bool = False) -> Exported:
    """Write a serve plan as a folder for an engine, Dynamo or llm-d. Raises PlannerError."""
    from planner.serving.export.serving_folder import check_text, export_serving
    from planner.serving.serve_plan import load_serve_plan

    read = load_serve_plan(Path(plan))
    made = export_serving(read, to, Path(output), force=force)
    return Exported.of(read, to, output, made, lambda: check_text(made))


def is_server_file(path: File, format: str | None = None) -> bool:
    """Whether a file starts a server: by ``--from``, else by what stands in it. Raises PlannerError where it cannot be read."""
    from planner.serving.readback.serve_reading import starts_servers
    from planner.trainers import SERVERS

    return format in SERVERS if format else starts_servers(Path(path))


def import_server(
    file: File, *, settings: Mapping[str, str] | Sequence[str] = (), **said: Any
) -> tuple[ServePlan, ServeRead]:
    """A command line, script or manifest that starts a server as a serve plan, priced, and what was not taken over.

    Keywords: model, hardware, gpus, engine, and as for ``plan serve`` input, output, concurrency, rate. Raises PlannerError
    with everything that decides time or memory and is said nowhere.
    """
    from planner.api.serving_calls import ServePlan
    from planner.serving.plan_pricing import priced
    from planner.serving.readback.serve_reading import ServeSaid, read_serving
    from planner.serving.serving_inputs import read_concurrency, read_lengths, read_rate
    from planner.trainers.reading.given import Given, parse_settings

    readers: dict[str, Callable[[Any], Any]] = {
        "input": partial(read_lengths, what="--input-tokens"), "output": partial(read_lengths, what="--output-tokens"),
        "concurrency": read_concurrency, "rate": read_rate,
    }  # fmt: skip
    stated = {name: readers[name](one) if name in readers and one is not None else one for name, one in said.items()}
    read = read_serving(Path(file), ServeSaid(**stated), Given(settings=parse_settings(settings)))
    return ServePlan(priced(read.plan)), read


def validate_server(
    plan: File,
    *,
    url: str,
    output: File | None = None,
    limit: str | float = 600.0,
    progress: Callable[[str], None] = lambda _: None,
    **asked: Any,
) -> Answer[Comparison]:
    """Drive a running OpenAI-compatible server with the load of a serve plan, and compare measured with predicted.

    ``limit``: seconds of the whole run, or '10min'; ``output``: JSON with the names of vllm bench serve. Further keywords:
    served_model, the server's name for the model; requests, how many (None = by the load); warmup, requests before them. Ctrl-C
    ends the run early, with what was measured by then. Raises PlannerError when nothing was answered.
    """
    from planner.keywords import require_known
    from planner.library import require_folder, write_whole
    from planner.questions.measured.show import print_comparison
    from planner.serving.measure.bench_files import result_of, written
    from planner.serving.measure.load_driver import Drive, drive
    from planner.serving.measure.plan_comparison import compare_with
    from planner.serving.measure.stream_client import Address
    from planner.serving.serve_plan import load_serve_plan
    from planner.units import parse

    require_known("validate_server", asked, ("served_model", "requests", "warmup"))
    found, path = load_serve_plan(Path(plan)), None if output is None else Path(output)
    require_folder(path)
    most = parse(limit, "seconds", what="--limit", like="90s") if isinstance(limit, str) else float(limit)
    driven = Drive(
        address=Address.of(url), traffic=found.traffic, vocabulary=found.model.vocab_size, model=asked.get("served_model"),
        count=asked.get("requests"), limit=most, warmup=asked.get("warmup", 2), progress=progress,
    )  # fmt: skip
    run = drive(driven)
    result = result_of(run, driven)
    if path is not None:
        write_whole(path, written(result, run, driven, found))
    return Answer(compare_with(found, result), print_comparison)


def doctor_server(plan: File, measured: File) -> Answer[Comparison]:
    """A benchmark compared with a serve plan: the largest deviations, and what would explain them. Raises PlannerError.

    ``measured``: JSON of vllm bench serve, sglang.bench_serving, InferenceX or plan validate."""
    from planner.questions.measured.show import print_comparison
    from planner.serving.measure.bench_files import read_bench
    from planner.serving.measure.plan_comparison import compare_with
    from planner.serving.serve_plan import load_serve_plan

    found = load_serve_plan(Path(plan))
    return Answer(compare_with(found, read_bench(Path(measured), found.num_gpus)), print_comparison)


def calibrate_server(runs: Sequence[tuple[File, File]], *, output: File) -> Answer[ServingFit]:
    """Correct the host times of an engine with benchmarks of one's own servers and write them to ``output``, an engine file.

    ``runs``: serve plans with the JSON of their benchmarks, two or more. Raises PlannerError, and then nothing is written.
    """
    from planner.questions.calibrate.serving_fit import fit_serving, read_served, write_engine
    from planner.questions.calibrate.serving_show import print_serving_fit

    found = fit_serving(read_served([(Path(plan), Path(bench)) for plan, bench in runs]))
    write_engine(found, Path(output))
    return Answer(found, print_serving_fit)
