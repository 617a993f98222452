"""What a result should be: PyTorch in float64; and how far a result is from it.

    error = max over the results of  |got - wanted| / sum(|x| * |w|)

the unit of :attr:`openconv.engine.Traits.error_bound`: a share of the size of the terms that were added up, which does
not blow up where they cancel. A size below the smallest normal number of the result's dtype counts as that number:
further down f16 has steps, not digits. Large problems are compared on a :class:`Part` of their results.

Engines that are no plain sum (``Traits.plain_sum``: Winograd, FFT) mix the elements of a tile, so that a result whose
own terms are small errs as far as its neighbours do. Theirs is the same difference as a share of the largest size,

    error = max |got - wanted| / max sum(|x| * |w|)

which is never more than the first figure of the same result, and equal to it where all windows are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .engine import Traits
from .epilogue import IDENTITY, Epilogue
from .evaluate import before, evaluate
from .problem import Problem
from .tensors import DTYPES, to_layout

__all__ = ["Distance", "Inputs", "Part", "Reference", "allowed_error", "error_of", "expected", "part_of", "parts_of",
           "random_inputs"]  # fmt: skip

# Half a unit in the last place: what rounding a result to this dtype may add.
_ROUNDING = {"f32": 2.0**-24, "f64": 2.0**-53, "f16": 2.0**-11, "bf16": 2.0**-8, "complex32": 2.0**-11}


@dataclass(frozen=True)
class Inputs:
    """The two inputs of a pass (fprop: x, w; dgrad: dy, w; wgrad: x, dy), and the operands of its prologue and then of
    its epilogue, in their order."""

    a: Tensor
    b: Tensor
    operands: tuple[Tensor, ...] = ()


def random_inputs(problem: Problem, seed: int = 0, device: torch.device | str = "cpu") -> Inputs:
    """Normal values, or integers from -3 to 3, in the problem's dtypes and layouts. Operands lie in [-1, 1]: one that
    multiplies then enlarges no error. The values of a seed differ from device to device."""
    generator = torch.Generator(device).manual_seed(seed)

    def values(shape: Sequence[int], dtype: str, layout: str, *, unit: bool = False) -> Tensor:
        wanted = DTYPES[dtype]
        if wanted.is_complex:
            wide = torch.complex128 if dtype == "complex128" else torch.complex64
            made = torch.randn(shape, generator=generator, dtype=wide, device=device)
        elif wanted.is_floating_point:
            wide = torch.float64 if dtype == "f64" else torch.float32
            made = torch.randn(shape, generator=generator, dtype=wide, device=device)
            made = made.clamp_(-1, 1) if unit else made
        else:
            made = torch.randint(0 if dtype == "u8" else -3, 4, shape, generator=generator, device=device)
        return to_layout(made.to(wanted), layout)

    shapes = (problem.x_shape, problem.w_shape, problem.y_shape)
    first, second = {"fprop": (0, 1), "dgrad": (2, 1), "wgrad": (0, 2)}[problem.direction]
    sizes = {"channel": (problem.result_channels,), "tensor": problem.result_shape, "scalar": ()}
    layout = problem.layouts[problem.result]
    return Inputs(
        values(shapes[first], problem.dtypes[first], problem.layouts[first]),
        values(shapes[second], problem.dtypes[second], problem.layouts[second]),
        tuple(
            [
                values((problem.c,), "f64" if problem.dtypes[0] == "f64" else "f32", "nchw", unit=True)
                for _ in problem.prologue.operands
            ]
            + [
                values(sizes[o.kind], problem.result_dtype, layout if o.kind == "tensor" else "nchw", unit=True)
                for o in problem.epilogue.operands
            ]
        ),
    )


def _convolve(problem: Problem, a: Tensor, b: Tensor) -> Tensor:
    """The bare pass by PyTorch, in the dtype of its inputs. Padding is laid around x first: its ends may differ.
    PyTorch has no complex backward passes on the CPU, so that complex products are taken apart."""
    if a.is_complex():
        real = _convolve(problem, a.real, b.real) - _convolve(problem, a.imag, b.imag)
        imag = _convolve(problem, a.real, b.imag) + _convolve(problem, a.imag, b.real)
        return torch.complex(real, imag)
    low_high = [v for ends in reversed(problem.padding) for v in ends]
    none = [0] * problem.rank
    geometry = (problem.stride, none, problem.dilation, False, none, problem.groups)
    if problem.direction == "fprop":
        return torch.ops.aten.convolution.default(F.pad(a, low_high), b, None, *geometry)
    backward = torch.ops.aten.convolution_backward.default
    if problem.direction == "wgrad":
        like = a.new_empty(1).expand(problem.w_shape)
        return backward(b, F.pad(a, low_high), like, None, *geometry, [False, True, False])[1]
    padded = [size + sum(ends) for size, ends in zip(problem.spatial, problem.padding, strict=True)]
    like = a.new_empty(1).expand((problem.n, problem.c, *padded))
    dx: Tensor = backward(a, like, b, None, *geometry, [True, False, False])[0]
    return F.pad(dx, [-v for v in low_high])


def _wide(tensor: Tensor, place: torch.device | str = "cpu") -> Tensor:
    return tensor.to(place).to(torch.complex128 if tensor.is_complex() else torch.float64)


def expected(problem: Problem, inputs: Inputs, place: torch.device | str = "cpu") -> Tensor:
    """The result in float64 (complex128 for complex problems), epilogue included, computed at ``place``. A prologue is
    rounded to x's dtype, as engines do."""
    return all_expected(problem, inputs, place)[0]


def all_expected(problem: Problem, inputs: Inputs, place: torch.device | str = "cpu") -> list[Tensor]:
    """:func:`expected`, and likewise the other results of the epilogue."""
    a, operands = _behind_prologue(problem, inputs)
    result = _convolve(problem, _wide(a, place), _wide(inputs.b, place))
    names = [operand.name for operand in problem.epilogue.operands]
    values = dict(zip(names, (_wide(operand, place) for operand in operands), strict=True))
    exprs = problem.epilogue.expr, *problem.epilogue.also
    return [evaluate(Epilogue(expr), result, values) for expr in exprs]


def _behind_prologue(problem: Problem, inputs: Inputs) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The first input as it is multiplied, and the operands of the epilogue."""
    count = len(problem.prologue.operands)
    return before(problem.prologue, inputs.a, inputs.operands[:count]), inputs.operands[count:]


class Reference:
    """The float64 results that others of the same inputs are measured against, on a :class:`Part` of a large problem,
    computed once at ``place``."""

    def __init__(
        self, problem: Problem, inputs: Inputs, *, most_macs: float = 2e8, place: torch.device | str = "cpu"
    ) -> None:
        self._place = place
        self._parts = []
        for part in parts_of(problem, most_macs):
            given = part.inputs(inputs)
            wanted, size = all_expected(part.problem, given, place), _sizes(part.problem, given, place)
            self._parts.append((part.result, wanted, size))

    def error(self, got: Tensor | Sequence[Tensor], *, plain_sum: bool = True) -> float:
        """The error of a result; infinity if it is not finite where it should be. Integers are compared as their type
        wraps, and their error is the largest difference. Of several results it is the largest; statistics are compared
        with those of the result as it is, as shares of the sizes of their terms. Without ``plain_sum`` it is a share of
        the largest size in the parts that are compared."""
        results = [got] if isinstance(got, Tensor) else list(got)
        largest = None if plain_sum else torch.stack([size.max() for _, _, size in self._parts]).max()
        errors = [
            self._error(result[where].to(self._place), wanted, size if largest is None else largest)
            for where, all_wanted, size in self._parts
            for result, wanted in zip(results, all_wanted, strict=False)
        ]
        if sums := results[len(self._parts[0][1]) :]:
            y = _wide(results[0], self._place)
            axes = (0, *range(2, y.dim()))
            for sum_, terms in zip(sums, (y, y.square()), strict=True):
                errors.append(self._error(sum_.to(self._place), terms.sum(axes), terms.abs().sum(axes)))
        return max(errors)

    def _error(self, got: Tensor, wanted: Tensor, size: Tensor) -> float:
        if not got.is_floating_point() and not got.is_complex():
            return float((wanted.round().to(torch.int64).to(got.dtype).long() - got.long()).abs().max())
        difference = (_wide(got, self._place) - wanted).abs()
        share = torch.where(difference == 0, 0.0, difference / size.clamp_min(torch.finfo(got.dtype).tiny))
        return float(share.nan_to_num(nan=torch.inf).max())

    def distance(self, got: Tensor) -> Distance:
        """How far the one result of a floating-point problem is from float64."""
        return self._distance([got[where].to(self._place) for where, _, _ in self._parts])

    def rounding(self, dtype: torch.dtype) -> Distance:
        """How far the float64 result itself is once it is rounded to a dtype: no result of that dtype is nearer."""
        return self._distance([wanted[0].to(dtype) for _, wanted, _ in self._parts])

    def _distance(self, got: Sequence[Tensor]) -> Distance:
        wanted = torch.cat([result[0].flatten() for _, result, _ in self._parts])
        off = (torch.cat([_wide(part, self._place).flatten() for part in got]) - wanted).abs()
        off = off.nan_to_num(nan=torch.inf)
        largest = max(float(size.max()) for _, _, size in self._parts)
        return Distance(
            float(off.square().mean().sqrt()) / largest, float(off.max()) / largest, float(off.norm() / wanted.norm())
        )


@dataclass(frozen=True)
class Distance:
    """How far a result is from float64 as a whole. ``rms`` and ``max`` of |got - wanted| are shares of the largest
    sum(|x| * |w|), and ``l2`` is the Euclidean norm of the difference over that of what was wanted. All are infinite
    where the result is not finite and should be."""

    rms: float
    max: float
    l2: float


def _sizes(problem: Problem, inputs: Inputs, place: torch.device | str) -> Tensor:
    """The size of the terms that each result adds up."""
    a, operands = _behind_prologue(problem, inputs)
    magnitudes = _wide(a, place).abs(), _wide(inputs.b, place).abs()
    size = _convolve(problem.with_(epilogue=IDENTITY), *magnitudes)
    for operand, value in zip(problem.epilogue.operands, operands, strict=True):
        channels = operand.kind == "channel"
        size = size + _wide(value.view(-1, *(1,) * problem.rank) if channels else value, place).abs()
    return size


def error_of(
    problem: Problem, got: Tensor | Sequence[Tensor], inputs: Inputs, *, most_macs: float = 2e8, plain_sum: bool = True
) -> float:  # fmt: skip
    """The error of one result: see :meth:`Reference.error`."""
    return Reference(problem, inputs, most_macs=most_macs).error(got, plain_sum=plain_sum)


def allowed_error(problem: Problem, traits: Traits) -> float:
    """The most that a correct run may show: the engine's bound, then the epilogue and the cast to the result's dtype.
    A prologue may round to the neighbour of what the reference rounds to.

    Complex products are sums of two real ones in each part, so that they may be off four times as far.
    """
    parts = 4 if problem.dtypes[0].startswith("complex") else 1
    wide = "f64" if problem.result_dtype in ("f64", "complex128") else "f32"
    epilogue = 4 * problem.epilogue.flops * _ROUNDING[wide]
    prologue = 0.0 if problem.prologue.is_identity else 2 * _ROUNDING[problem.dtypes[0]]
    return parts * traits.error_bound + prologue + epilogue + _ROUNDING.get(problem.result_dtype, 0.0)


@dataclass(frozen=True)
class Part:
    """A smaller problem whose results are some of the whole's, and where its tensors lie in those of the whole."""

    problem: Problem
    a: tuple[slice, ...]
    b: tuple[slice, ...]
    result: tuple[slice, ...]

    def inputs(self, whole: Inputs) -> Inputs:
        """The inputs of the part."""
        cuts = {"channel": self.result[1:2], "tensor": self.result, "scalar": ()}
        wanted = [self.a[1:2] for _ in self.problem.prologue.operands]
        wanted += [cuts[operand.kind] for operand in self.problem.epilogue.operands]
        operands = tuple(value[cut] for cut, value in zip(wanted, whole.operands, strict=True))
        return Inputs(whole.a[self.a], whole.b[self.b], operands)


def part_of(problem: Problem, most_macs: float) -> Part:
    """Images, then groups, then channels are left out until a float64 reference costs about ``most_macs`` products.
    What stays is spread evenly and holds the last of each, where tiles are ragged."""
    every = slice(None)
    c, k = problem.c // problem.groups, problem.k // problem.groups
    excess = problem.macs / most_macs
    images, n = every, problem.n
    if problem.direction != "wgrad" and excess > 1:
        images, n = _spread(n, excess)
        excess *= n / problem.n
    groups = max(1, round(problem.groups / max(excess, 1)))
    excess *= groups / problem.groups
    x_channels, y_channels = slice(problem.c - groups * c, None), slice(problem.k - groups * k, None)
    w_channels, dx_channels = every, x_channels
    if groups == 1 and excess > 1 and problem.direction == "dgrad":
        w_channels, c = _spread(c, excess)
        dx_channels = slice(x_channels.start + w_channels.start, None, w_channels.step)
    elif groups == 1 and excess > 1:
        within, k = _spread(k, excess)
        y_channels = slice(y_channels.start + within.start, None, within.step)
    smaller = problem.with_(n=n, c=c * groups, k=k * groups, groups=groups)
    if problem.direction == "fprop":
        return Part(smaller, (images, x_channels), (y_channels,), (images, y_channels))
    if problem.direction == "wgrad":
        return Part(smaller, (every, x_channels), (every, y_channels), (y_channels,))
    return Part(smaller, (images, y_channels), (y_channels, w_channels), (images, dx_channels))


def parts_of(problem: Problem, most_macs: float) -> list[Part]:
    """:func:`part_of`; of a part that still costs over twice as much, such as a big image with a big filter, the first
    and last rows of the result, which hold both paddings, then the first and last columns of those."""
    parts = [part_of(problem, most_macs)]
    for axis, count in enumerate(problem.result_shape[2:]):
        excess = sum(part.problem.macs for part in parts) / most_macs
        if excess <= 2 or count < 2:
            continue
        band = max(1, min(count // 2, int(count / excess / 2)))
        ends = (0, band), (count - band, count)
        cut = [_cut(part, axis, *rows) for part in parts for rows in ends]
        parts = [part for part in cut if part] if all(cut) else parts
    return parts


def _cut(part: Part, axis: int, start: int, stop: int) -> Part | None:
    """A part cut down to some rows of its result along an axis, and to what of its inputs they need. None if all that
    they need is padding."""
    problem = part.problem
    if problem.direction == "dgrad":
        return _cut_gradient(part, axis, start, stop)
    # Output row p reads x at p * stride - low + r * dilation, from filter row r.
    (low, _), size, stride, dilation = (
        problem.padding[axis], problem.spatial[axis], problem.stride[axis], problem.dilation[axis],
    )  # fmt: skip
    wgrad = problem.direction == "wgrad"
    outputs, taps = (problem.out[axis], stop - start) if wgrad else (stop - start, problem.filter[axis])
    first = start * (dilation if wgrad else stride) - low
    last = first + (outputs - 1) * stride + (taps - 1) * dilation
    rows = slice(max(first, 0), min(last, size - 1) + 1)
    if rows.start >= rows.stop:
        return None
    smaller = problem.with_(
        spatial=_put(problem.spatial, axis, rows.stop - rows.start),
        padding=_put(problem.padding, axis, (max(-first, 0), max(last - size + 1, 0))),
        filter=_put(problem.filter, axis, taps),
    )
    return Part(smaller, _along(part.a, axis, rows), part.b, _along(part.result, axis, slice(start, stop)))


def _cut_gradient(part: Part, axis: int, start: int, stop: int) -> Part:
    """Some rows of dx, and the rows of dy whose windows reach them."""
    problem = part.problem
    (low, _), stride = problem.padding[axis], problem.stride[axis]
    reach = problem.dilation[axis] * (problem.filter[axis] - 1)
    end = problem.out[axis] - 1
    first = min(max(0, -((reach - start - low) // stride)), (start + low) // stride, end)
    last = min((stop - 1 + low) // stride, end)
    smaller = problem.with_(
        spatial=_put(problem.spatial, axis, stop - start),
        padding=_put(
            problem.padding, axis, (start + low - first * stride, max(0, last * stride + reach + 1 - stop - low))
        ),
    )
    rows = slice(first, last + 1)
    return Part(smaller, _along(part.a, axis, rows), part.b, _along(part.result, axis, slice(start, stop)))


_T = TypeVar("_T")


def _put(values: tuple[_T, ...], axis: int, value: _T) -> tuple[_T, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def _along(cut: tuple[slice, ...], axis: int, rows: slice) -> tuple[slice, ...]:
    """A cut of images and channels, or of the axes before this one too, with some rows of this axis."""
    return (*cut, *(slice(None),) * (2 + axis - len(cut)), rows)


def _spread(count: int, excess: float) -> tuple[slice, int]:
    """About count/excess indices, evenly spread, the last among them."""
    step = min(ceil(excess), count)
    indices = range((count - 1) % step, count, step)
    return slice(indices.start, None, step), len(indices)
