"""Stands in for what needs a GPU when Megatron-LM's own code is run on a CPU."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
import typing
from typing import Any
from unittest import mock

import torch
import typing_extensions

TRANSFORMER_ENGINE = "2.17.0"


class _Anything(types.ModuleType):
    """A module in which every name exists."""

    __path__: typing.ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        value = type(name, (), {"__init__": lambda self, *a, **k: None}) if name[:1].isupper() else mock.MagicMock()
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages that need a GPU to install."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not any(name == own or name.startswith(own + ".") for own in self.names):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Anything(spec.name)
        module.__version__ = TRANSFORMER_ENGINE  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def pretend_packages(*names: str) -> None:
    """Let these packages import as modules that have every name."""
    sys.meta_path.append(_Finder(names))


def pretend_engine() -> None:
    """Transformer Engine by its version and optimizer alone, so that Megatron-LM builds its own layers."""
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        module = types.ModuleType(name)
        module.__path__ = []
        module.__version__ = TRANSFORMER_ENGINE  # type: ignore[attr-defined]
        sys.modules[name] = module
    module.FusedAdam = _Adam  # type: ignore[attr-defined]


class _Adam:
    """The parameters of FusedAdam that Megatron-LM looks for."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        master_weight_dtype: Any = None,
        exp_avg_dtype: Any = None,
        exp_avg_sq_dtype: Any = None,
        use_decoupled_grad: bool = False,
    ) -> None:
        pass


def pretend_gpu(capability: float) -> None:
    """A GPU of this compute capability, as far as Megatron-LM asks."""
    major, minor = int(capability), round(10 * (capability % 1))
    torch.cuda.get_device_capability = lambda *a, **k: (major, minor)
    shape = types.SimpleNamespace(
        major=major, minor=minor, total_memory=80 << 30, multi_processor_count=132, name="gpu"
    )
    torch.cuda.get_device_properties = lambda *a, **k: shape
    torch.cuda.current_device = lambda: 0


def pretend_rank(world: int) -> None:
    """The first process of a run of this size, in torch's fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(min(world, 8))}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29599"}
    torch.distributed.init_process_group("fake", rank=0, world_size=world, store=FakeStore())


def newer_typing() -> None:
    """typing.override for Python 3.11."""
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
