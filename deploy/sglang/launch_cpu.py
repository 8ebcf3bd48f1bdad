"""Starts SGLang's server on a CPU that has none of its kernels (deploy/sglang/README.md).

    .venv-sglang/bin/python deploy/sglang/launch_cpu.py --device cpu --model-path DIR --port 30000 …

SGLang imports ``triton``, ``torchvision`` and ``sgl_kernel`` whatever the device. Where one is missing,
stand-ins are served whose names can be imported and used as decorators; ``sgl_kernel`` gets the one function
that the torch-native path on a CPU calls. SGLang's children import this file first, and so get the same.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

STAND_INS = ("triton", "torchvision", "sgl_kernel")


class StandIn:
    """Any name of a missing package: an attribute of it is another, and as a decorator it changes nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._name.startswith("sgl_kernel."):
            raise NotImplementedError(f"{self._name} is not there on a CPU without SGLang's kernels")
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType):
            return args[0]
        return self

    def __getattr__(self, name: str) -> Any:
        return _attribute(self._name, name)


class StandInModule(types.ModuleType):
    """A missing module, empty but for what is asked of it."""

    def __getattr__(self, name: str) -> Any:
        return _attribute(self.__name__, name)


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the missing packages; last in ``sys.meta_path``, so that a real one wins."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for a package of ``STAND_INS`` and everything below it."""
        if name.partition(".")[0] not in STAND_INS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """The stand-in."""
        return StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill in what must be real."""
        module.__version__ = "0.0.0"  # type: ignore[attr-defined]
        if module.__name__ == "sgl_kernel":
            module.assign_req_to_token_pool_cpu = assign_req_to_token_pool_cpu  # type: ignore[attr-defined]


def _attribute(owner: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"{owner} has no {name}")
    if owner.startswith("triton.runtime") and name in ("active", "get_current_device", "get_current_target"):
        raise RuntimeError("0 active drivers: there is no triton here")
    if name[0].isupper() and not name.isupper():
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None, "__module__": owner})
    return StandIn(f"{owner}.{name}")


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start: Any, end: Any, out_cache_loc: Any, pool_len: int
) -> None:
    """Copy each request's slice of ``out_cache_loc`` into ``req_to_token[request, start:end]``."""
    offset = 0
    for request, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        count = last - first
        req_to_token[request, first:last] = out_cache_loc[offset : offset + count].to(req_to_token.dtype)
        offset += count


def ignore_pinned_memory() -> None:
    """Let tensors be created without pinned memory, for which SGLang's adapters ask on every device."""
    import torch

    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign]
    for name in ("tensor", "empty", "zeros", "arange"):
        create = getattr(torch, name)
        setattr(torch, name, lambda *args, _create=create, pin_memory=False, **given: _create(*args, **given))
    if not torch.cuda.is_available():  # SGLang pins its buffer of chosen experts
        calls = dict.fromkeys(("cudaHostRegister", "cudaHostUnregister"), lambda *args: 0)
        torch.cuda.cudart = lambda: types.SimpleNamespace(**calls)


def install() -> None:
    """Serve the stand-ins from here on."""
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()  # remembered: transformers must not take the stand-in for the real one
    sys.meta_path.append(StandInFinder())
    ignore_pinned_memory()


install()

if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server  # type: ignore[import-not-found]
    from sglang.srt.server_args import prepare_server_args  # type: ignore[import-not-found]
    from sglang.srt.utils import kill_process_tree  # type: ignore[import-not-found]

    try:
        launch_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
