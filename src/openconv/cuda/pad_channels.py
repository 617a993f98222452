"""cuda.pad_channels: channels rounded up with zeros, for engines that copy and multiply whole vectors of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod

from ..device import Device
from ..engine import Engine
from ..problem import DTYPE_BYTES, Problem
from ..rewrites.base import Rewritten, refuses
from .copied import Copied, Move, Moves
from .padded import MOST, Padded

__all__ = ["PadChannels"]

_NAMES = ("x", "w", "y")
_MULTIPLIED = ("f16", "bf16", "e4m3", "e5m2", "i8")  # by tensor cores, and f32 as tf32


class PadChannels(Copied):
    """45 channels computed as 48: what does not have a multiple of 16 bytes of them is copied with zeros behind.

        x'[pixel, c] = x[pixel, c] for c < C, else 0        likewise w, and y is cut off again

    Products with zeros add nothing. It is for engines that refuse such channels, those with the boxes and products of
    Hopper among them, and wins where these beat the others by more than the copies of what is padded.
    """

    name = "cuda.pad_channels"
    device = "cuda"
    takes_epilogue = True

    def needs(self, problem: Problem, device: Device) -> Iterator[str]:
        padded = _padded(problem)
        if padded == (problem.c, problem.k):
            yield f"C is {problem.c} and K {problem.k}; wanted one that is no multiple of {_unit(problem)}"
            return
        if problem.groups > 1:
            yield f"groups is {problem.groups}; wanted 1, whose channels lie together"
            return
        dtype = problem.dtypes[0]
        if dtype not in _MULTIPLIED and (dtype != "f32" or problem.precision == "ieee"):
            yield f"dtypes are {'*'.join(problem.dtypes)}; wanted what tensor cores multiply"
        if problem.is_empty:
            yield "a tensor is empty"
            return
        inner = problem.with_(c=padded[0], k=padded[1])
        for at, name in enumerate(("x", "w", "y")):
            outer, shape = ((p.x_shape, p.w_shape, p.y_shape)[at] for p in (problem, inner))
            if outer == shape:
                continue
            if problem.layouts[at] != "nhwc":
                yield f"layout of {name} is {problem.layouts[at]}; wanted nhwc, where channels lie together"
            if prod(shape) >= MOST:
                yield f"{name} has {prod(shape)} elements once padded; wanted under {MOST}"

    def wants(self, engine: Engine, problem: Problem, device: Device) -> bool:
        return refuses(engine, problem, device)

    def cost(self, problem: Problem, device: Device, knobs: Rewritten) -> float:
        # As 186 times of an H200 have it: copies are found in the second-level cache, and few channels of a result take
        # longer than igemm_sm90's model says.
        computing, copying = self._seconds(problem, device, knobs)
        narrow = self.inside(problem).result_channels <= 8 and knobs.inner[0].engine == "cuda.igemm_sm90"
        longer = {"fprop": 1.4, "dgrad": 2.0}.get(problem.direction, 1.0) if narrow else 1.0
        return longer * computing + 0.65 * copying

    def inside(self, problem: Problem, way: None = None) -> Problem:
        c, k = _padded(problem)
        return problem.with_(c=c, k=k)

    def moves(self, problem: Problem, way: None = None) -> Moves:
        return _moves(self, problem)

    def tell(self, problem: Problem, knobs: Rewritten) -> str:
        c, k = _padded(problem)
        return f"{problem.c} by {problem.k} channels as {c} by {k}"


def _unit(problem: Problem) -> int:
    """Channels of 16 bytes; 8 of f32 as well, which is what engines ask for."""
    return 16 // min(2, DTYPE_BYTES[problem.dtypes[0]])


def _padded(problem: Problem) -> tuple[int, int]:
    unit = _unit(problem)
    return -(-problem.c // unit) * unit, -(-problem.k // unit) * unit


@lru_cache(maxsize=256)
def _moves(rewrite: PadChannels, problem: Problem) -> Moves:
    inner = rewrite.inside(problem)

    def rows(p: Problem, at: int) -> tuple[int, int]:
        """Rows of a tensor, and their length."""
        counts = p.n * prod(p.spatial), p.k * prod(p.filter), p.n * prod(p.out)
        return counts[at], p.k if at == 2 else p.c

    def padded(at: int) -> Padded | None:
        mine, whole, size = rows(inner, at), rows(problem, at), DTYPE_BYTES[problem.dtypes[at]]
        return None if mine == whole else Padded(*whole, *mine, size)

    result = problem.result
    channels, wide = problem.result_channels, inner.result_channels
    named: list[tuple[str, Padded | None]] = [(_NAMES[at], padded(at)) for at in problem.inputs]
    for operand in problem.epilogue.operands:
        one = Padded(1, channels, 1, wide, DTYPE_BYTES[problem.result_dtype]) if channels != wide else None
        kinds = {"channel": one, "tensor": padded(result), "scalar": None}
        named.append((operand.name, kinds[operand.kind]))
    there = [Move(copy, (at,), (_told(name, copy),)) for at, (name, copy) in enumerate(named) if copy]
    if (cut := padded(result)) is None:
        return Moves(tuple(there), None)
    back = Padded(cut.to_rows, cut.to_length, cut.rows, cut.length, cut.size)
    return Moves(tuple(there), Move(back, (-1,), (_told(_NAMES[result], back),)))


def _told(name: str, copy: Padded) -> str:
    return f"copy {name}, {copy.rows}x{copy.length} as {copy.to_rows}x{copy.to_length}"
