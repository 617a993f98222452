"""openconv: an open convolution engine for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import nn
from .cpu.memory import empty_cache
from .engine import UnsupportedProblem
from .epilogue import Epilogue
from .functional import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from .nn import convert, patch
from .problem import Problem
from .select import Policy, policy, tuning

if TYPE_CHECKING:
    from .explanation import Explanation, explain
    from .graph import Graph
    from .graph.trace import jit
    from .tuner import tune

__version__ = "0.1.0"

__all__ = [
    "Epilogue",
    "Explanation",
    "Graph",
    "Policy",
    "Problem",
    "UnsupportedProblem",
    "__version__",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "convert",
    "empty_cache",
    "explain",
    "jit",
    "nn",
    "patch",
    "policy",
    "tune",
    "tuning",
]

_LATE = {
    "Explanation": ".explanation", "explain": ".explanation", "tune": ".tuner", "Graph": ".graph",
    "jit": ".graph.trace",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """What a program that convolves does without is imported when it is first named."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(_LATE[name], __name__), name)
    return found
