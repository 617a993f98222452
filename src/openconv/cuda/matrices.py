"""What the GPU engines that multiply by cuBLAS share: what torch's products take, their error and their time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, prod

import torch
from torch import Tensor

from ..cpu.matrices import Region, filter_matrix
from ..problem import DTYPE_BYTES, Problem
from .device import CudaDevice

__all__ = [
    "Region", "accumulate", "accumulator", "filter_rows", "flat", "gemm_seconds", "multiply", "product_refusals",
    "products", "split", "store_filter_rows", "sum_error",
]  # fmt: skip

DTYPES = ("f16", "bf16", "f32", "f64")
_MIXED = "dtype_out" in torch.ops.aten.bmm.overloads()
_UNIT = {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 2.0**-24, "f64": 2.0**-53}


def product_refusals(problem: Problem) -> Iterator[str]:
    """torch.mm takes one floating-point type, and forms f32 products as a setting of the whole process says."""
    if problem.dtypes[0] not in DTYPES or len(set(problem.dtypes)) > 1:
        yield f"dtypes are {', '.join(problem.dtypes)}; the matrix product takes {', '.join(DTYPES)} throughout"
    if problem.layouts[0] != problem.layouts[2]:
        yield f"layouts of x and y are {problem.layouts[0]} and {problem.layouts[2]}; wanted one layout for both"
    if problem.dtypes[0] == "f32":
        # We read the setting and leave it alone: it belongs to the user, and other threads multiply by it. A plan that
        # was made before the user changed it multiplies by the new one, as torch.mm does everywhere else.
        setting = torch.get_float32_matmul_precision()
        if problem.precision == "tf32" and setting == "highest":
            yield "precision is tf32; torch.get_float32_matmul_precision() is 'highest', which keeps cuBLAS to ieee"
        if problem.precision != "tf32" and setting != "highest":
            yield f"precision is {problem.precision}; torch.get_float32_matmul_precision() is {setting!r}, which rounds"


def accumulator(problem: Problem) -> str:
    """What a product is summed in."""
    return "f64" if problem.result_dtype == "f64" else "f32"


def sum_error(problem: Problem, *, wide: bool) -> float:
    """Bound on the error of a product as a share of sum(|x|*|w|), without the last rounding to the result's dtype.

    A product with a ``wide`` result of f32 is summed in f32 throughout. With one of f16 or bf16 cuBLAS may split the
    sum into parts in the dtype of the result and add them up in it, since torch allows it unless told otherwise
    (``torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction``): four roundings stand for the parts and
    their sums.
    """
    dtype = problem.result_dtype
    unit = _UNIT["f64"] if dtype == "f64" else _UNIT["f32"]
    error = (problem.gemm.k + 1) * unit
    if dtype == "f32" and problem.precision == "tf32":
        error += 2.0**-10  # 10 bits of each factor
    return error if wide or dtype in ("f32", "f64") else error + 4 * _UNIT[dtype]


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a * b, in batches. Of f16 and bf16 the result may be f32: the sums as they are, unrounded."""
    if a.dtype == out.dtype:
        torch.bmm(a, b, out=out)
    elif a.is_cuda and _MIXED:
        torch.bmm(a, b, out_dtype=out.dtype, out=out)
    else:  # torch has mixed products since 2.8, on GPUs only; the emulator's tensors are on the CPU
        torch.bmm(a.to(out.dtype), b.to(out.dtype), out=out)


def accumulate(a: Tensor, b: Tensor, out: Tensor, part: Tensor, *, first: bool) -> None:
    """out = a * b, or out += a * b where there is a sum already. Sums in f32 of f16 and bf16 go through ``part``."""
    if first:
        multiply(a, b, out)
    elif a.dtype == out.dtype:
        torch.baddbmm(out, a, b, out=out)
    else:
        multiply(a, b, part)
        out.add_(part)


def products(direction: str, xs: Tensor, weights: Tensor, ys: Tensor, parts: Tensor, *, first: bool) -> None:
    """The pass's own product y = w * x in every image and group: xs is (images, G, depth, pixels), weights is
    (G, K/G, depth) and ys is (images, G, K/G, pixels). dw is added to unless it is the ``first``; images that are
    apart have a part of it each."""
    images, groups = xs.shape[:2]
    if direction == "wgrad" and images == 1:
        accumulate(ys[0], xs[0].transpose(1, 2), weights, parts.view(-1, *weights.shape[1:]), first=first)
    elif direction == "wgrad":
        each = parts.view(images, *weights.shape)
        for n, g in _batches(images, groups):
            multiply(ys[n, g], xs[n, g].transpose(1, 2), each[n, g])
        torch.sum(each, 0, out=weights)
    else:
        source, target = (xs, ys) if direction == "fprop" else (ys, xs)
        filters = (weights if direction == "fprop" else weights.transpose(1, 2)).expand(images, -1, -1, -1)
        for n, g in _batches(images, groups):
            multiply(filters[n, g], source[n, g], target[n, g])


def _batches(images: int, groups: int) -> Iterator[tuple[slice | int, slice | int]]:
    """All pairs of an image and a group, in as few batches as one stride each allows."""
    if groups <= images:
        yield from ((slice(None), g) for g in range(groups))
    else:
        yield from ((n, slice(None)) for n in range(images))


def filter_rows(w: Tensor, problem: Problem, depth: int, spare: Tensor) -> Tensor:
    """The filters as (G, K/G, depth), taps behind channels in nchw and before them in nhwc: a view of ``w`` where its
    memory is in the order of the images, else ``spare``, which a wgrad fills itself. Rows that are longer than a filter
    end in zeros."""
    if not spare.numel():
        return filter_matrix(w, problem, problem.layouts[0], spare, fill=False)
    matrix = spare.view(problem.groups, problem.k // problem.groups, depth)
    if problem.direction != "wgrad":
        ordered, length = _ordered(w, problem), prod(problem.w_shape[1:])
        rows = spare.view(problem.k, depth)
        if depth != length:
            rows[:, length:].zero_()
        rows[:, :length].unflatten(1, ordered.shape[1:]).copy_(ordered)
    return matrix


def store_filter_rows(matrix: Tensor, w: Tensor, problem: Problem) -> None:
    """Write back what :func:`filter_rows` gave for a result, where it is not the result's own memory."""
    if matrix.data_ptr() != w.data_ptr():
        ordered = _ordered(w, problem)
        rows = matrix.flatten(0, 1)[:, : prod(problem.w_shape[1:])]
        ordered.copy_(rows.unflatten(1, ordered.shape[1:]))


def _ordered(w: Tensor, problem: Problem) -> Tensor:
    """The filters with their axes in the order of the images' memory."""
    return w.movedim(1, -1) if problem.layouts[0] == "nhwc" else w


def split(workspace: Tensor | None, regions: Sequence[Region], dtype: torch.dtype) -> list[Tensor]:
    """The workspace as one flat tensor per region: of f32 if its elements have four bytes, else of the dtype."""
    if workspace is None:
        return [torch.empty(0, dtype=dtype) for _ in regions]
    parts = workspace.split([region.bytes for region in regions])
    types = (torch.float32 if region.size == 4 else dtype for region in regions)
    return [p.view(t)[: region.elements] for p, t, region in zip(parts, types, regions, strict=True)]


def flat(tensor: Tensor) -> Tensor:
    """The memory of a tensor without gaps, in its own order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def gemm_seconds(
    problem: Problem, device: CudaDevice, m: int, n: int, k: int, batch: int = 1, *, aligned: bool = True
) -> float:
    """Predicted time of ``batch`` products (m x k) * (k x n): tiles of 128 x 128 in waves over the multiprocessors, or
    the matrices through memory, whichever is longer. Where tiles are few the sum is split. ``aligned`` says whether all
    rows start at multiples of 16 bytes; f16 and bf16 take about twice as long where they do not."""
    dtype = problem.result_dtype
    rate = {"f64": device.double_flops, "f32": device.flops}.get(dtype, device.half_flops)
    if dtype == "f32" and problem.precision == "tf32":
        rate = device.half_flops / 2
    tiles = ceil(m / 128) * ceil(n / 128) * batch
    splits = max(1, min(device.threads // tiles, k // 512))
    waves = ceil(tiles * splits / device.threads)
    # Short sums leave the start and the end of a tile uncovered: some 256 products deep.
    arithmetic = waves * 2.0 * 128 * 128 * (ceil(k / splits) + 256) / (rate / device.threads)
    if dtype in ("f16", "bf16") and not aligned:
        arithmetic *= 2
    moved = batch * (m * k + k * n + m * n) * DTYPE_BYTES[dtype]
    if min(m, n) < 8:  # a matrix times a vector, by kernels that are made for matrices
        moved *= 4
    return 3e-6 + max(arithmetic, moved / (0.85 * device.bandwidth))
