"""Errors against float64 over the length of the sum: every engine that accepts, and torch, on small problems.

The problems are made for sums of 4 to 50,000 products with few results, so that float64 costs little: the channels that
are summed over grow, all others stay at 16. A filter gradient sums over pixels, so there the image grows instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..engine import engines
from ..files import write_atomic
from ..plan import device_of, lower, plan_for
from ..problem import Problem
from ..reference import Reference, allowed_error, random_inputs
from ..select import current_policy, rank
from ..tensors import DTYPES
from ..units import seconds_text
from .peers import NotTaken, peer_named
from .results import environment

__all__ = ["CHANNELS", "FILE_NAME", "ROUNDED", "ErrorLedger", "ErrorRecord", "computed_dtypes", "error_problems",
           "measure_errors", "read_errors", "terms_of"]  # fmt: skip

FILE_NAME = "errors.jsonl"
"""In the folder of a device, beside the files of suites."""
CHANNELS = (4, 16, 64, 256, 1024)
"""That are summed over, unless told otherwise."""
ROUNDED = "rounded"
"""The contestant that is float64 itself, rounded to the dtype of the result: no other can be nearer."""

_FEW = 16  # channels that are not summed over: a whole block of any engine
_SIDE = 12  # of an image whose channels are summed over; a line has as many pixels
# Taps, stride and dilation. The last two are for engines that take nothing else: patches, and taps that lie apart.
_FILTERS = (
    ((1, 1), 1, 1), ((3, 3), 1, 1), ((5, 5), 1, 1), ((7, 7), 1, 1), ((31,), 1, 1), ((4, 4), 4, 1), ((3, 3), 1, 2),
)  # fmt: skip
_DEPTHWISE = (3, 5, 7, 15, 31)


@dataclass(frozen=True)
class ErrorRecord:
    """One problem: how far each contestant is from float64.

    ``error`` holds ``rms`` and ``max`` as shares of the largest sum(|x|*|w|), and ``l2``, the norm of the difference
    over that of the result, of each engine, of torch, and of ``rounded``.
    """

    problem: str
    terms: float
    """Products in each sum, on average, those with padding included."""
    error: dict[str, dict[str, float]]
    allowed: dict[str, float] = field(default_factory=dict)
    """The most that each engine may be off: its own bound, and rounding to the result's dtype."""
    wrong: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    """Why an engine or torch took no part."""
    machine: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, line: str) -> ErrorRecord:
        """The record of a line; ValueError if it is none."""
        try:
            made = cls(**json.loads(line))
            Problem.parse(made.problem)
            if not made.terms > 0 or not all(each[kind] >= 0 for each in made.error.values() for kind in _KINDS):
                raise ValueError("terms are not above 0, or an error is negative")
            return made
        except (TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"not a record of errors: {error}") from None


_KINDS = ("rms", "max", "l2")


def read_errors(path: Path) -> list[ErrorRecord]:
    """The records of a file, none if it is not there; ValueError names the line that is damaged."""
    found = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), 1):
        if line.strip():
            try:
                found.append(ErrorRecord.from_json(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    return found


class ErrorLedger:
    """The file while errors are measured: each record replaces that of the same problem, and the file is whole after
    each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records = {record.problem: record for record in read_errors(path)}

    def add(self, record: ErrorRecord) -> None:
        """Write it down."""
        self._records[record.problem] = record
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, "".join(each.to_json() + "\n" for each in self._records.values()))


# -- the problems -----------------------------------------------------------------------------------------------------


def error_problems(channels: Sequence[int], directions: Iterable[str], dtypes: Iterable[str]) -> Iterator[Problem]:
    """Dense filters of 1x1 to 7x7 and of 31 taps over so many channels, patches of 4x4 and dilated 3x3 ones, then
    depthwise ones, in every pass and dtype. A filter gradient has sixteen pixels for each channel that another pass
    would sum over."""
    directions = tuple(directions)
    for dtype in dtypes:
        for direction in directions:
            for taps, stride, dilation in _FILTERS:
                for count in channels:
                    yield _dense(direction, dtype, taps, count, stride, dilation)
            if direction == "wgrad":
                for count in channels:
                    yield _depthwise(direction, dtype, 3, _pixels(count))
            else:
                for taps_a_side in _DEPTHWISE:
                    yield _depthwise(direction, dtype, taps_a_side, 2 * _SIDE)


def _pixels(channels: int) -> int:
    """Of the side of an image with about 16 pixels a channel, four at least: one patch."""
    return max(4, math.isqrt(16 * channels))


def _dense(
    direction: str, dtype: str, taps: tuple[int, ...], channels: int, stride: int = 1, dilation: int = 1
) -> Problem:  # fmt: skip
    side = _pixels(channels) if direction == "wgrad" else _SIDE
    pad = dilation * (taps[0] // 2) if stride == 1 else 0
    return Problem(
        direction=direction, n=1,
        c=channels if direction == "fprop" else _FEW, k=channels if direction == "dgrad" else _FEW,
        spatial=(side,) * 2 if len(taps) == 2 else (side**2,), filter=taps, stride=(stride,) * len(taps),
        dilation=(dilation,) * len(taps), padding=((pad, pad),) * len(taps), dtypes=(dtype,) * 3,
    )  # fmt: skip


def _depthwise(direction: str, dtype: str, taps: int, side: int) -> Problem:
    return Problem(
        direction=direction, n=1, c=_FEW, k=_FEW, groups=_FEW, spatial=(side,) * 2, filter=(taps,) * 2,
        padding=((taps // 2, taps // 2),) * 2, dtypes=(dtype,) * 3,
    )  # fmt: skip


def terms_of(problem: Problem) -> float:
    """Products in each sum, on average, those with padding included."""
    return problem.macs / math.prod(problem.result_shape)


def computed_dtypes(place: torch.device) -> list[str]:
    """f32, and f16 and bf16 where products are formed in them rather than in f32 behind a cast."""
    device = device_of(place)

    def computed(dtype: str) -> bool:
        problem = _dense("fprop", dtype, (1, 1), _FEW)
        return lower(problem, device).dtypes == problem.dtypes

    return [dtype for dtype in ("f32", "f16", "bf16") if computed(dtype)]


# -- measured ---------------------------------------------------------------------------------------------------------


def measure_errors(
    problem: Problem, place: torch.device, *, only: Sequence[str] = (), longest: float = 2.0, command: str = ""
) -> ErrorRecord:
    """Run every engine that accepts, with its default knobs, and torch, and compare them with float64. Left out is what
    is predicted to take longer than so many seconds; and an engine that is not proven, unless it is named."""
    device, policy = device_of(place), current_policy()
    core = lower(problem, device)
    error: dict[str, dict[str, float]] = {}
    allowed: dict[str, float] = {}
    notes: dict[str, str] = {}
    with torch.no_grad():
        inputs = random_inputs(problem, device=place)
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):  # no search for the reference
            reference = Reference(problem, inputs, place=place)
        for engine in engines(device.kind):
            if engine.name not in only if only else not engine.proven:
                continue
            alone = policy.but(engine=engine.name, tuning="off")
            accepted, _ = rank(core, device, alone)
            if not accepted:
                continue
            if accepted[0].cost > longest:
                notes[engine.name] = f"predicted {seconds_text(accepted[0].cost)}; at most {longest:g} s are waited for"
                continue
            got = plan_for(problem, device, alone)(inputs.a, inputs.b, inputs.operands)
            error[engine.name] = asdict(reference.distance(got))
            allowed[engine.name] = allowed_error(problem, accepted[0].traits)
        peer = peer_named("torch")
        if (reason := peer.refusal(problem, place)) is None:
            try:
                ready = peer.prepare(problem, [inputs])
                error[peer.name] = asdict(reference.distance(ready.result(ready.calls[0]())))
            except (NotTaken, RuntimeError) as failure:
                reason = " ".join(str(failure).split())[:300]
        if reason:
            notes[peer.name] = reason
        error[ROUNDED] = asdict(reference.rounding(DTYPES[problem.result_dtype]))
    wrong = [name for name, most in allowed.items() if not error[name]["max"] <= most]
    return ErrorRecord(str(problem), terms_of(problem), error, allowed, wrong, notes, environment(place, command))
