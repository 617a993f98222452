"""cpu.naive: the definition, in three loops over outputs and as many over the sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import numba
import numpy as np
from numba.core import types
from torch import Tensor

from ..device import Device
from ..engine import Engine, Runner, Traits
from ..problem import Problem
from ..tensors import DTYPES

__all__ = ["Naive"]


_KNOWN = ("f32", "f64", "i64", "i32", "i16", "i8", "u8")


class Naive(Engine):
    """The definition written down: each output sums its own products, one after the other.

        y[n,k,o,p,q]  = sum over c,t,r,s of  x[n, c, o*stride - pad + t*dilation, ...] * w[k, c, t, r, s]
        dx[n,c,d,h,w] = sum over k,t,r,s of  dy[n, k, (d + pad - t*dilation) / stride, ...] * w[k, c, t, r, s]
        dw[k,c,t,r,s] = sum over n,o,p,q of  dy[n, k, o, p, q] * x[n, c, o*stride - pad + t*dilation, ...]

    It takes every problem in every layout, adds in f64 (i64 for integers, which then wrap as their type does) and needs
    no workspace. It wins on problems of a few thousand products, where anything else costs more to start; otherwise it
    is what the other engines are compared with.
    """

    name = "cpu.naive"

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        unknown = [name for name in problem.dtypes if name not in _KNOWN]
        if unknown:
            yield f"dtype is {unknown[0]}; wanted {', '.join(_KNOWN)}, or one that is cast to these"

    def traits(self, problem: Problem, knobs: Any) -> Traits:
        # One rounding to the result's type behind a sum in f64: half a unit in the last place, and a little.
        eps = {"f32": 2.0**-23, "f64": problem.gemm.k * 2.0**-52}.get(problem.result_dtype, 0.0)
        return Traits(accumulator="f64" if eps else "i64", error_bound=eps)

    def cost(self, problem: Problem, device: Device, knobs: Any) -> float:
        # Measured on one core: 1.5 ns a product, a dependent f64 addition, and 8 ns around each row of taps (of wgrad,
        # whose rows are images, 2.5 ns a product); 60 ns around each result; 0.4 ms to start threads where they pay.
        threads = device.threads if problem.macs > 20_000 else 1  # as build has it
        product = 2.5e-9 if problem.direction == "wgrad" else 1.5e-9 + 8e-9 / problem.filter[-1]
        work = problem.macs * product + prod(problem.result_shape) * 60e-9
        return 12e-6 + work / threads + (400e-6 if threads > 1 else 0.0)

    def build(self, problem: Problem, device: Device, knobs: Any) -> Runner:
        kernel = _compiled(problem.direction, *(str(DTYPES[name]).removeprefix("torch.") for name in problem.dtypes))
        lead = (0,) * (3 - problem.rank)
        stride = np.array([1] * len(lead) + list(problem.stride), dtype=np.int64)
        dilation = np.array([1] * len(lead) + list(problem.dilation), dtype=np.int64)
        pad = np.array(list(lead) + [low for low, _ in problem.padding], dtype=np.int64)
        rows = prod(problem.result_shape[:2])
        threads = device.threads if problem.macs > 20_000 else 1
        zero = np.int64(0) if problem.result_dtype[0] in "iu" else np.float64(0)

        def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, bias: Tensor | None) -> None:
            arrays = [_five(tensor) for tensor in (a, b, out)]
            _split(lambda lo, hi: kernel(*arrays, stride, pad, dilation, problem.groups, zero, lo, hi), rows, threads)

        return run


@functools.cache
def _compiled(direction: str, *dtypes: str) -> Callable[..., None]:
    """The pass for arrays of any strides, compiled once for each combination of dtypes and kept on disk by Numba."""
    x, w, y = (types.Array(getattr(types, dtype), 5, "A") for dtype in dtypes)
    total = types.int64 if isinstance(y.dtype, types.Integer) else types.float64
    three = types.Array(types.int64, 1, "C")
    passes = {"fprop": (_fprop, (x, w, y)), "dgrad": (_dgrad, (y, w, x)), "wgrad": (_wgrad, (x, y, w))}
    function, arrays = passes[direction]
    signature = types.void(*arrays, three, three, three, types.int64, total, types.int64, types.int64)
    return numba.njit(signature, nogil=True, cache=True)(function)


def _five(tensor: Tensor) -> np.ndarray[Any, Any]:
    """As a NumPy array of five axes; the strides carry the layout."""
    array = tensor.detach().numpy()
    return array.reshape(array.shape[:2] + (1,) * (5 - array.ndim) + array.shape[2:])


def _split(work: Callable[[int, int], None], rows: int, threads: int) -> None:
    """``work(lo, hi)`` over ranges that cover the rows, one thread each; kernels run without the GIL."""
    if threads == 1:
        return work(0, rows)
    bounds = [rows * at // threads for at in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, bounds[:-1], bounds[1:]))
    return None


# Taps on the padding multiply a zero rather than being skipped, so that a NaN or infinite weight shows there too.


def _fprop(x, w, y, stride, pad, dilation, groups, zero, lo, hi):
    _, _, D, H, W = x.shape
    K, CG, T, R, S = w.shape
    _, _, O, P, Q = y.shape
    for row in range(lo, hi):
        n, k = row // K, row % K
        c0 = k // (K // groups) * CG
        for o in range(O):
            for p in range(P):
                for q in range(Q):
                    total = zero
                    for c in range(CG):
                        for t in range(T):
                            d = o * stride[0] - pad[0] + t * dilation[0]
                            for r in range(R):
                                h = p * stride[1] - pad[1] + r * dilation[1]
                                for s in range(S):
                                    v = q * stride[2] - pad[2] + s * dilation[2]
                                    inside = 0 <= d < D and 0 <= h < H and 0 <= v < W
                                    value = x[n, c0 + c, d, h, v] if inside else x.dtype.type(0)
                                    total += zero + value * (zero + w[k, c, t, r, s])
                    y[n, k, o, p, q] = y.dtype.type(total)


def _dgrad(dy, w, dx, stride, pad, dilation, groups, zero, lo, hi):
    _, C, D, H, W = dx.shape
    K, CG, T, R, S = w.shape
    _, _, O, P, Q = dy.shape
    KG = K // groups
    for row in range(lo, hi):
        n, c = row // C, row % C
        g, cg = c // CG, c % CG
        for d in range(D):
            for h in range(H):
                for v in range(W):
                    total = zero
                    for t in range(T):
                        o = d + pad[0] - t * dilation[0]
                        if o % stride[0] or not 0 <= o < O * stride[0]:
                            continue
                        for r in range(R):
                            p = h + pad[1] - r * dilation[1]
                            if p % stride[1] or not 0 <= p < P * stride[1]:
                                continue
                            for s in range(S):
                                q = v + pad[2] - s * dilation[2]
                                if q % stride[2] or not 0 <= q < Q * stride[2]:
                                    continue
                                for k in range(g * KG, g * KG + KG):
                                    value = dy[n, k, o // stride[0], p // stride[1], q // stride[2]]
                                    total += zero + value * (zero + w[k, cg, t, r, s])
                    dx[n, c, d, h, v] = dx.dtype.type(total)


def _wgrad(x, dy, dw, stride, pad, dilation, groups, zero, lo, hi):
    N, _, D, H, W = x.shape
    K, CG, T, R, S = dw.shape
    _, _, O, P, Q = dy.shape
    for row in range(lo, hi):
        k, c = row // CG, row % CG
        c0 = k // (K // groups) * CG
        for t in range(T):
            for r in range(R):
                for s in range(S):
                    total = zero
                    for n in range(N):
                        for o in range(O):
                            d = o * stride[0] - pad[0] + t * dilation[0]
                            for p in range(P):
                                h = p * stride[1] - pad[1] + r * dilation[1]
                                for q in range(Q):
                                    v = q * stride[2] - pad[2] + s * dilation[2]
                                    if 0 <= d < D and 0 <= h < H and 0 <= v < W:
                                        total += zero + x[n, c0 + c, d, h, v] * (zero + dy[n, k, o, p, q])
                    dw[k, c, t, r, s] = dw.dtype.type(total)
