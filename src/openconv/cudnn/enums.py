"""The frontend's enumerations, and how its data types are called elsewhere in openconv and in torch."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from ..tensors import ALL_DTYPES
from .errors import cudnnGraphNotSupportedError

__all__ = [
    "as_data_type",
    "attention_implementation",
    "behavior_note",
    "build_plan_policy",
    "convolution_mode",
    "cuda_graph_retention",
    "data_type",
    "diagonal_alignment",
    "dtype_name",
    "heur_mode",
    "knob_type",
    "moe_grouped_matmul_mode",
    "norm_forward_phase",
    "numerical_note",
    "padding_mode",
    "reduction_mode",
    "resample_mode",
    "reshape_mode",
    "scalar_type",
    "tensor_reordering",
]


class data_type(Enum):
    """What the elements of a tensor are. Those without a counterpart here are known by name, and refused."""

    NOT_SET = 0
    FLOAT = 1
    DOUBLE = 2
    HALF = 3
    INT8 = 4
    INT32 = 5
    INT8x4 = 6
    UINT8 = 7
    UINT8x4 = 8
    INT8x32 = 9
    BFLOAT16 = 10
    INT64 = 11
    BOOLEAN = 12
    FP8_E4M3 = 13
    FP8_E5M2 = 14
    FAST_FLOAT_FOR_FP8 = 15
    FP8_E8M0 = 16
    FP4_E2M1 = 17
    INT4 = 18
    FP8_E5M3 = 19


class heur_mode(Enum):
    """Who proposes plans. All of them lead to the one list that openconv ranks."""

    A = 0
    B = 1
    FALLBACK = 2
    OPENSOURCE = 3


class build_plan_policy(Enum):
    """Whether the first plan that can be had is built, or all of them."""

    HEURISTICS_CHOICE = 0
    ALL = 1


class reduction_mode(Enum):
    """What a reduction makes of many values."""

    ADD = "add"
    MUL = "mul"
    MIN = "min"
    MAX = "max"
    AMAX = "amax"
    AVG = "avg"
    NORM1 = "norm1"
    NORM2 = "norm2"
    MUL_NO_ZEROS = "mul_no_zeros"


class norm_forward_phase(Enum):
    """Whether a normalisation is to leave statistics behind."""

    INFERENCE = 0
    TRAINING = 1


class convolution_mode(Enum):
    """Whether the filter is turned around first. Deep learning does not: CROSS_CORRELATION."""

    CONVOLUTION = 0
    CROSS_CORRELATION = 1


class reshape_mode(Enum):
    """VIEW_ONLY reads the same memory by other strides; LOGICAL keeps the order of elements."""

    VIEW_ONLY = 0
    LOGICAL = 1


class resample_mode(Enum):
    """How a window becomes one value."""

    MAXPOOL = "max"
    AVGPOOL_INCLUDE_PADDING = "avg"
    AVGPOOL_EXCLUDE_PADDING = "avg_exclude"
    BILINEAR = "bilinear"
    NEAREST = "nearest"


class padding_mode(Enum):
    """What lies around an image that is resampled."""

    ZERO_PAD = 0
    NEG_INF_PAD = 1
    EDGE_VAL_PAD = 2


class tensor_reordering(Enum):
    """Orders of elements that strides cannot tell; NONE alone is known here."""

    NONE = 0
    INT8x32 = 1
    F16x16 = 2
    F8_128x4 = 3


class scalar_type(Enum):
    """Whether a scalar is known when a graph is built."""

    RUNTIME_PARAM = 0
    COMPILE_TIME_CONST = 1


class numerical_note(Enum):
    """What may change the last bits of a plan's results."""

    TENSOR_CORE = 0
    DOWN_CONVERT_INPUTS = 1
    REDUCED_PRECISION_REDUCTION = 2
    FFT = 3
    NONDETERMINISTIC = 4
    WINOGRAD = 5
    WINOGRAD_TILE_4x4 = 6
    WINOGRAD_TILE_6x6 = 7
    WINOGRAD_TILE_13x13 = 8
    STRICT_NAN_PROP = 9


class behavior_note(Enum):
    """What a plan does besides computing."""

    RUNTIME_COMPILATION = 0
    REQUIRES_FILTER_INT8x32_REORDER = 1
    REQUIRES_BIAS_INT8x32_REORDER = 2
    SUPPORTS_CUDA_GRAPH_NATIVE_API = 3
    CUBLASLT_DEPENDENCY = 4


class knob_type(Enum):
    """What can be tuned. Plans of openconv that use the same engines differ in KERNEL_CFG alone."""

    SPLIT_K = 0
    SWIZZLE = 1
    TILE_SIZE = 2
    EDGE = 3
    MULTIPLY = 4
    SPLIT_K_BUF = 5
    TILEK = 6
    STAGES = 7
    REDUCTION_MODE = 8
    SPLIT_K_SLC = 9
    IDX_MODE = 10
    SPECFILT = 11
    KERNEL_CFG = 12
    WORKSPACE = 13
    TILE_CGA_M = 14
    TILE_CGA_N = 15
    BLOCK_SIZE = 16
    OCCUPANCY = 17
    ARRAY_SIZE_PER_THREAD = 18
    SPLIT_COLS = 19
    TILE_ROWS = 20
    TILE_COLS = 21
    LOAD_SIZE = 22
    CTA_COUNT = 23
    STREAM_K = 24
    SPLIT_P_SLC = 25
    TILE_M = 26
    TILE_N = 27
    WARP_SPEC_CFG = 28


class diagonal_alignment(Enum):
    """Of attention, which is refused."""

    TOP_LEFT = 0
    BOTTOM_RIGHT = 1


class attention_implementation(Enum):
    """Of attention, which is refused."""

    AUTO = 0
    COMPOSITE = 1
    UNIFIED = 2


class moe_grouped_matmul_mode(Enum):
    """Of mixtures of experts, which are refused."""

    NONE = 0
    GATHER = 1
    SCATTER = 2
    COMBINE = 3


class cuda_graph_retention(Enum):
    """Accepted, and without a meaning here: a plan keeps nothing of the CUDA graphs it was recorded in."""

    PER_GRAPH = 0


_NAMES = {
    data_type.FLOAT: "f32", data_type.DOUBLE: "f64", data_type.HALF: "f16", data_type.BFLOAT16: "bf16",
    data_type.INT8: "i8", data_type.INT32: "i32", data_type.INT64: "i64", data_type.UINT8: "u8",
    data_type.BOOLEAN: "bool", data_type.FP8_E4M3: "e4m3", data_type.FP8_E5M2: "e5m2",
    data_type.FAST_FLOAT_FOR_FP8: "f32",
}  # fmt: skip
_OF_TORCH = {
    ALL_DTYPES[name]: kind for kind, name in _NAMES.items() if kind is not data_type.FAST_FLOAT_FOR_FP8
}  # fmt: skip


def as_data_type(value: Any) -> data_type | None:
    """The data type that was meant: one of the enumeration, one of torch's, or one of openconv's names. None and
    NOT_SET are None."""
    if value is None or value is data_type.NOT_SET:
        return None
    if isinstance(value, data_type):
        return value
    if isinstance(value, str):
        value = ALL_DTYPES.get(value, value)
    if isinstance(value, torch.dtype) and value in _OF_TORCH:
        return _OF_TORCH[value]
    if isinstance(value, torch.dtype):
        raise cudnnGraphNotSupportedError(f"data type is {value}; wanted one of {', '.join(map(str, _OF_TORCH))}")
    raise TypeError(f"data type is {value!r}; wanted one of cudnn.data_type or a torch.dtype")


def dtype_name(value: data_type) -> str:
    """openconv's name of a data type."""
    if value not in _NAMES:
        known = ", ".join(kind.name for kind in _NAMES)
        raise cudnnGraphNotSupportedError(f"data type is {value.name}; openconv computes with {known}")
    return _NAMES[value]
