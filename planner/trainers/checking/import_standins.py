"""Import-time stand-ins: what a trainer's parser imports but never calls on a machine without a GPU.

Only names on a declared list are replaced, never whatever happens to be missing, and only for the process that checks.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from planner.units import GIB


class Harmless:
    """Stands for any function, class, decorator or constant of a module that is not there."""

    def __call__(self, *_: Any, **__: Any) -> Harmless:
        return self

    def __getattr__(self, name: str) -> Harmless:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, _: Any) -> Harmless:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __or__(self, _: Any) -> Harmless:
        return self

    __ror__ = __or__

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (object,)


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Harmless()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the declared modules and everything below them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not f"{name}.".startswith(tuple(f"{one}." for one in self.names)):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__version__"] = "0.0.0"


def stand_in(*names: str) -> list[str]:
    """Make the named modules importable where they are not installed; returns those that were replaced."""
    missing = [name for name in names if name not in sys.modules and importlib.util.find_spec(name) is None]
    if missing:
        sys.meta_path.append(_Finder(missing))
    return missing


def bare(name: str, folder: str) -> None:
    """A package that is there without what its __init__.py imports: modules below it are found, and nothing else is run."""
    made = types.ModuleType(name)
    made.__path__ = [folder]
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = made


def hide(*names: str) -> None:
    """Stand-ins in place of the named modules although they are installed: parts of a trainer that the check does not need."""
    sys.meta_path.insert(0, _Finder(names))


def settle_torch() -> None:
    """Import the parts of torch that ask whether Triton is there, before a stand-in could seem to be it."""
    import torch._dynamo
    import torch._functorch.aot_autograd
    import torch._inductor.codecache
    import torch._inductor.runtime.hints
    import torch._inductor.runtime.triton_compat
    import torch._inductor.utils  # noqa: F401


def modern_typing() -> None:
    """``typing.override`` for sources of Python 3.12 on 3.11."""
    if not hasattr(typing, "override"):
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined, unused-ignore]


def pretend_gpu(major: int, minor: int) -> None:
    """torch answers questions about the GPU with a compute capability: an input of the check, as rules depend on it."""
    import torch

    answer = types.SimpleNamespace(
        major=major, minor=minor, name="pretended", total_memory=int(80 * GIB), multi_processor_count=132
    )
    torch.cuda.get_device_properties = lambda *_: answer
    torch.cuda.get_device_capability = lambda *_: (major, minor)


def pretend_ranks(rank: int, world: int) -> None:
    """This process is one rank of a world of any size; collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


def imported(folder: str) -> Any:
    """``train.py`` of a folder as a module."""
    sys.path.insert(0, folder)
    sys.modules.pop("train", None)
    importlib.invalidate_caches()
    try:
        return importlib.import_module("train")
    finally:
        sys.path.remove(folder)
