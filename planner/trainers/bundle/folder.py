"""A plan as a folder that runs: the trainer's files, launch scripts, environment, the plan itself and a README."""

import hashlib
import os
import shutil
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from planner import library
from planner.cluster_file import ClusterFile
from planner.errors import PlannerError
from planner.record import record
from planner.rules import check, check_workload
from planner.trainers.bundle.launchers import equal_neighbours, launch
from planner.trainers.bundle.quoting import filled_text
from planner.trainers.bundle.target import ExportJob, Rendered, Target, in_range


@record
class ExportFiles:
    """Every file of an export, and what is said of them."""

    files: dict[str, str]
    """Name relative to the folder -> text."""
    notes: tuple[str, ...]
    """Differences between the plan and what runs, and what it still needs."""
    warnings: tuple[str, ...]
    """What the user has to know before it runs."""


@record
class NamedExport(ExportFiles):
    """Files whose settings are those that a program knows, as recorded or installed."""

    target: str
    checked: str
    """What the settings were held against."""


@record
class Bundle(ExportFiles):
    """Files of a trainer."""

    rendered: Rendered
    """What the trainer's module gave."""


def make_bundle(target: Target, job: ExportJob, launcher: str, cluster: ClusterFile | None = None) -> Bundle:
    """All files of one plan for one trainer and launcher. Raises PlannerError when the plan is not legal.

    ``cluster``: where a launcher that chooses places may start it.

    What the target refuses is not looked at here: planner.trainers.bundle.nearest turns it into an answer.
    """
    check_workload(job.workload, job.cluster, job.trainer)
    check(job.rules_job, job.layout)
    rendered = target.render(job)
    plan = library.dump_yaml(job.plan.to_dict())
    files = {**rendered.files, **launch(job, rendered, launcher, cluster), "plan.yaml": plan}
    listed = [name for name in files if name.endswith((".sh", ".sbatch")) and name not in ("environment.sh", "arguments.sh")]
    files["README.md"] = filled_text(
        job, "README.md.j2", target=target, rendered=rendered, files=files, scripts=listed, layers=job.layers_per_chunk(),
        parameters=equal_neighbours(job.parameters(rendered.vocab_rows)),
        plan_hash=hashlib.sha256(plan.encode()).hexdigest()[:12],
    )  # fmt: skip
    return Bundle(files=files, rendered=rendered, notes=tuple(rendered.notes), warnings=tuple(_version_warning(target)))


def write_bundle(bundle: ExportFiles, folder: Path, *, force: bool = False) -> None:
    """Write the folder whole or not at all: into a temporary one next to it, then renamed. Raises PlannerError.

    A folder that holds anything is replaced only with ``force``, and only when it is an export. Links are followed.
    """
    try:
        with library.uninterrupted():
            _replace(bundle, folder.resolve(), force)
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a null byte
        raise PlannerError(f"{folder}: cannot be written ({getattr(error, 'strerror', None) or error})") from error


def _replace(bundle: ExportFiles, folder: Path, force: bool) -> None:
    exists = folder.exists()
    if exists and not folder.is_dir():
        raise PlannerError(f"{folder} is a file; give --output the name of a folder")
    if exists and not force and any(folder.iterdir()):
        raise PlannerError(f"{folder} is not empty; choose another folder, or replace it with --force")
    if exists and any(folder.iterdir()) and not all((folder / name).is_file() for name in ("plan.yaml", "README.md")):
        raise PlannerError(f"{folder} is no export, with its plan.yaml and README.md: --force does not replace it; remove it first")
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name[:100]}.", dir=folder.parent))
        _fill(bundle, temporary)
        if exists:
            old = temporary.with_name(f"{temporary.name}.old")
            os.replace(folder, old)
            os.replace(temporary, folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(temporary, folder)
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)


def _fill(bundle: ExportFiles, folder: Path) -> None:
    """All files below one folder, with the permissions of ordinary files; scripts may be run."""
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    for name, text in bundle.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod((0o777 if text.startswith("#!") else 0o666) & ~umask)


def _version_warning(target: Target) -> list[str]:
    with suppress(metadata.PackageNotFoundError):
        version = metadata.version(target.package)
        if not in_range(version, target.versions):
            return [
                f"{target.package} {version} is installed here, but this export was checked against {target.versions}: "
                f"install a version of that range, or look at every setting"
            ]
    return []
