"""openconv: an open convolution engine for PyTorch."""

from .engine import UnsupportedProblem
from .epilogue import Epilogue
from .functional import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from .problem import Problem
from .select import Policy, policy

__version__ = "0.1.0"

__all__ = [
    "Epilogue",
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
    "policy",
]
