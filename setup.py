"""Packages of the wheel: planner/ as it stands, and profiles/ as planner.profiles. Everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

folders = sorted({path.parent.relative_to(".") for path in Path("profiles").rglob("*.yaml")})
data = {f"planner.{'.'.join(folder.parts)}": folder.as_posix() for folder in folders}
setup(packages=[*find_packages(include=["planner", "planner.*"]), *data], package_dir=data)
