"""A made nvidia-smi and a made torch: what a machine with GPUs would answer, on one that has none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

H100 = ("NVIDIA H100 80GB HBM3", 81559)
"""Name and MiB as nvidia-smi gives them."""


def row(name: str, mib: int, *, mig: str = "Disabled", driver: str = "580.65.06") -> str:
    """One line of the answer to the query of ``detect.asked_driver``."""
    return f"{name}, {mib}, {mig}, {driver}"


class MadeGpus:
    """A machine whose nvidia-smi, torch and device files are made."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        (folder / "bin").mkdir()
        (folder / "python" / "torch").mkdir(parents=True)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
        monkeypatch.setenv("PYTHONPATH", str(folder / "python"))
        for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
            monkeypatch.delenv(variable, raising=False)
        for module in ("planner.detect", "planner.lab.launch.gpus"):
            monkeypatch.setattr(f"{module}.which", shutil.which)
        self.files()
        self.torch([])

    def nvidia_smi(self, *rows: str, sleep: float = 0.0, code: int = 0) -> None:
        """The tool prints these lines after so many seconds and ends with a code."""
        tool = self.folder / "bin" / "nvidia-smi"
        text = "\n".join(rows)
        tool.write_text(f"#!/bin/sh\nsleep {sleep}\ncat <<'END'\n{text}\nEND\nexit {code}\n")
        tool.chmod(0o755)

    def answers(self, *rules: tuple[str, str]) -> None:
        """The tool prints a text by the pattern that its arguments match."""
        cases = "\n".join(f"{pattern}) cat <<'END'\n{text}\nEND\n;;" for pattern, text in rules)
        tool = self.folder / "bin" / "nvidia-smi"
        tool.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}\nesac\n')
        tool.chmod(0o755)

    def files(self, *names: str) -> None:
        """Files that the kernel's driver has made, like nvidia0."""
        (self.folder / "dev").mkdir(exist_ok=True)
        for name in names:
            (self.folder / "dev" / name).touch()
        patterns = {kind: f"{self.folder}/dev/{name}" for kind, name in (("nvidia", "nvidia[0-9]*"), ("amd", "kfd"))}
        self.monkeypatch.setattr("planner.detect.NODES", patterns)
        self.monkeypatch.setattr("planner.lab.launch.gpus.NODES", patterns)

    def torch(
        self, gpus: list[tuple[str, int]], *, version: str = "2.13.0", cuda: str | None = "13.0", error: str = "No CUDA GPUs"
    ) -> None:
        """A torch that sees GPUs of these names and MiB."""
        said: dict[str, Any] = {"gpus": gpus, "version": version, "cuda": cuda, "error": error}
        (self.folder / "python" / "torch" / "__init__.py").write_text(
            f"import json, types\nsaid = json.loads({json.dumps(json.dumps(said))})\n"
            "__version__ = said['version']\nversion = types.SimpleNamespace(cuda=said['cuda'], hip=None)\n"
            "def card(i):\n    name, mib = said['gpus'][i]\n"
            "    return types.SimpleNamespace(name=name, total_memory=mib * 2**20)\n"
            "def init():\n    raise RuntimeError(said['error'])\n"
            "cuda = types.SimpleNamespace(device_count=lambda: len(said['gpus']), get_device_properties=card, init=init)\n"
        )
        (self.folder / "python" / "torch" / "distributed.py").touch()
