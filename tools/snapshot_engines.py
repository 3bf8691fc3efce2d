"""Records the flags of the serving engines, with types and choices, from the sources in their published packages.

\b
    pip download --no-deps vllm==0.33.0 && unzip vllm-0.33.0*.whl 'vllm/*.py' '*METADATA' -d vllm
    python tools/snapshot_engines.py vllm vllm/ > planner/serving/flags/vllm.json

Names: vllm, sglang, vllm-router, sglang-router, trtllm. What was recorded came from vllm 0.33.0, sglang 0.5.23, vllm-router 0.1.17
and sglang-router 0.3.2 on 2026-11-22. TensorRT-LLM has no wheel on the index: the classes that an export writes were read in
tensorrt_llm/llmapi/llm_args.py of its repository at commit 0004396, the words of trtllm-serve in its own reference of them
(tests/unittest/api_stability/references/trtllm_serve_cli.yaml at 029e223); give that file as the third argument.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import click
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from planner.serving.flags.flag_check import READERS

SOURCES = {"trtllm": ("1.3", "tensorrt_llm/llmapi/llm_args.py at commit 0004396, the classes that an export writes")}


def version(root: Path, package: str) -> str:
    """Version in the package's metadata."""
    files = [*root.glob(f"{package}-*.dist-info/METADATA")]
    found = re.search(r"^Version: (\S+)", files[0].read_text(encoding="utf-8"), re.M) if files else None
    if found is None:
        raise SystemExit(f"{root}: no metadata of {package}; unpack its wheel there")
    return found.group(1)


def click_flags(path: Path) -> dict[str, dict[str, Any]]:
    """Programs of trtllm-serve in its own reference of options."""
    kinds = {"int": "int", "float": "float"}
    programs: dict[str, dict[str, Any]] = {}
    for command, data in yaml.safe_load(path.read_text(encoding="utf-8"))["commands"].items():
        flags: dict[str, Any] = {}
        for option in data["options"].values():
            flag: dict[str, Any] = {"type": "flag" if option["is_flag"] else kinds.get(option["type"], "str")}
            if option["type"].startswith("Choice("):
                flag["choices"] = re.findall(r"'([^']*)'", option["type"])
            first, *rest = option["flags"]
            flags[first] = flag
            flags |= {word: {"same": first} for word in rest}
        programs["trtllm-serve" if command == "serve" else f"trtllm-serve {command}"] = flags
    return programs


@click.command(help=__doc__)
@click.argument("name", type=click.Choice(list(READERS)))
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("reference", required=False, type=click.Path(exists=True, path_type=Path))
def main(name: str, folder: Path, reference: Path | None) -> None:
    """Print the file."""
    package, reader = READERS[name]
    found = reader(folder)
    if reference:
        found["programs"] |= click_flags(reference)
    known, source = SOURCES.get(name, ("", "its wheel"))
    data = {"package": package, "version": known or version(folder, package), "source": source, **found}
    print("{")
    parts = [f'"{key}": {json.dumps(value)}' for key, value in data.items() if key not in ("programs", "classes")]
    for part in ("programs", "classes"):
        groups = [
            f'"{group}": {{\n' + ",\n".join(f"{json.dumps(key)}: {json.dumps(flag)}" for key, flag in sorted(flags.items())) + "\n}"
            for group, flags in data[part].items()
        ]
        parts.append(f'"{part}": {{\n' + ",\n".join(groups) + "\n}")
    print(",\n".join(parts))
    print("}")


if __name__ == "__main__":
    main()
