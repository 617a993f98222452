"""openconv: an open convolution engine for PyTorch."""

from . import nn
from .cpu.memory import empty_cache
from .engine import UnsupportedProblem
from .epilogue import Epilogue
from .explanation import Explanation, explain
from .functional import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from .nn import convert, patch
from .problem import Problem
from .select import Policy, policy, tuning
from .tuner import tune

__version__ = "0.1.0"

__all__ = [
    "Epilogue",
    "Explanation",
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
    "nn",
    "patch",
    "policy",
    "tune",
    "tuning",
]
