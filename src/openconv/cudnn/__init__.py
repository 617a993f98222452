"""openconv under the names of the cuDNN frontend: ``import openconv.cudnn as cudnn`` is the one line that changes.

Graphs are recorded as the frontend's are and computed by :class:`openconv.Graph`, on CUDA devices and the CPU. What is
known by name and not computed raises :class:`cudnnGraphNotSupportedError`. docs/cudnn.md says what is the same and what
differs.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .. import __version__
from . import datatypes, wrapper
from .decorators import graph, graph_cache, jit
from .enums import (
    attention_implementation,
    behavior_note,
    build_plan_policy,
    convolution_mode,
    cuda_graph_retention,
    data_type,
    diagonal_alignment,
    heur_mode,
    knob_type,
    moe_grouped_matmul_mode,
    norm_forward_phase,
    numerical_note,
    padding_mode,
    reduction_mode,
    resample_mode,
    reshape_mode,
    scalar_type,
    tensor_reordering,
)
from .errors import cudnnGraphNotSupportedError
from .handles import Handle, create_handle, destroy_handle, get_stream, set_stream
from .plans import knob
from .pygraph import pygraph
from .record import Node, tensor
from .wrapper import Graph

Tensor = tensor
handle = Handle

__all__ = [
    "Graph",
    "Handle",
    "Node",
    "Tensor",
    "__version__",
    "attention_implementation",
    "backend_version",
    "backend_version_string",
    "behavior_note",
    "build_plan_policy",
    "convolution_mode",
    "create_device_properties",
    "create_handle",
    "create_kernel_cache",
    "cuda_graph_retention",
    "cudnnGraphNotSupportedError",
    "data_type",
    "datatypes",
    "destroy_handle",
    "diagonal_alignment",
    "get_last_error_string",
    "get_stream",
    "graph",
    "graph_cache",
    "handle",
    "heur_mode",
    "install",
    "jit",
    "knob",
    "knob_type",
    "moe_grouped_matmul_mode",
    "norm_forward_phase",
    "numerical_note",
    "padding_mode",
    "pygraph",
    "reduction_mode",
    "resample_mode",
    "reshape_mode",
    "scalar_type",
    "set_stream",
    "tensor",
    "tensor_reordering",
    "uninstall",
    "wrapper",
]

_IMITATED = (9, 19, 0)


def backend_version() -> int:
    """The version of cuDNN whose operations are imitated, as cuDNN counts: 91900 is 9.19.0. No cuDNN is called."""
    major, minor, patch = _IMITATED
    return major * 10000 + minor * 100 + patch


def backend_version_string() -> str:
    """:func:`backend_version` in words, with openconv's own version behind it."""
    return f"{'.'.join(map(str, _IMITATED))} (openconv {__version__})"


def get_last_error_string() -> str:
    """Always empty: what goes wrong is said by the exception."""
    return ""


def create_kernel_cache() -> object:
    """Something to give to ``pygraph(kernel_cache=...)``. All graphs share one cache of kernels, on disk."""
    return object()


def create_device_properties(*args: Any, **kwargs: Any) -> object:
    """Something to give to ``pygraph(device_property=...)``. Graphs are planned for the device of their handle."""
    return object()


_PARTS = {"cudnn": None, "cudnn.wrapper": "wrapper", "cudnn.datatypes": "datatypes"}


def install() -> ModuleType:
    """Have ``import cudnn`` find this module, in this process. RuntimeError if cuDNN's frontend was imported before."""
    own = sys.modules[__name__]
    found = sys.modules.get("cudnn")
    if found is not None and found is not own:
        raise RuntimeError(
            f"cudnn is {getattr(found, '__file__', None) or found!r} already; wanted install() before it is imported"
        )
    for name, part in _PARTS.items():
        sys.modules[name] = own if part is None else getattr(own, part)
    return own


def uninstall() -> None:
    """Undo :func:`install`: ``import cudnn`` finds what is installed under that name. Graphs that were made stay."""
    if sys.modules.get("cudnn") is sys.modules[__name__]:
        for name in _PARTS:
            sys.modules.pop(name, None)
