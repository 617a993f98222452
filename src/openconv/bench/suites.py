"""Suites: text files of named problems under benchmarks/suites, with what is varied on each kind of device.

    # ResNet-50: the distinct convolutions of one 224x224 image.
    % cpu: batch 1 8; direction fprop dgrad wgrad
    % cuda: batch 64; direction fprop dgrad wgrad; dtype f16; layout nhwc
    conv1: fprop n1 c3 h224 w224 k64 r7 s7 stride2 pad3 f32 nchw

The first comment is the title. A ``%`` line names a kind of device and, separated by semicolons, what takes other
values there than the problem's own: batch, direction, dtype, layout. ``% cpu:`` alone keeps all of them. A device
without such a line is one that the suite is not meant for. Everything else is ``name: problem``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from ..problem import DIRECTIONS, DTYPE_BYTES, LAYOUTS, Problem

__all__ = ["DEVICES", "Suite", "Variation", "load_suite", "parse_suite", "suite_names", "suites_folder", "variants"]

DEVICES = ("cpu", "cuda")

_WORDS = {"direction": DIRECTIONS, "dtype": tuple(DTYPE_BYTES), "layout": LAYOUTS}
_KEYS = ("batch", *_WORDS)


@dataclass(frozen=True)
class Variation:
    """Values that take the place of a problem's own; an empty tuple keeps it."""

    batches: tuple[int, ...] = ()
    directions: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()

    def over(self, default: Variation) -> Variation:
        """What is given here, and the default's where nothing is."""
        return Variation(*(getattr(self, f.name) or getattr(default, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Suite:
    """Named problems, and what is varied by default on each kind of device that they are meant for."""

    name: str
    title: str
    problems: tuple[tuple[str, Problem], ...]
    varied: dict[str, Variation]


def suites_folder() -> Path:
    """benchmarks/suites of the checkout that this module is in, or below the present folder."""
    for base in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (base / "benchmarks" / "suites").is_dir():
            return base / "benchmarks" / "suites"
    raise FileNotFoundError("benchmarks/suites is not here; run from a checkout of openconv, or give problems as text")


def suite_names() -> list[str]:
    """The suites there are."""
    return sorted(path.stem for path in suites_folder().glob("*.txt"))


def load_suite(name: str) -> Suite:
    """The suite of that name; ValueError says that there is none, or which line is wrong."""
    if name not in suite_names():
        raise ValueError(f"there is no suite {name!r}; wanted one of {', '.join(suite_names())}, or a problem as text")
    return parse_suite(name, (suites_folder() / f"{name}.txt").read_text())


def parse_suite(name: str, text: str) -> Suite:
    """The suite that a file of this text holds; ValueError names the line that is wrong."""
    title = ""
    problems: dict[str, Problem] = {}
    varied: dict[str, Variation] = {}
    lines: dict[str | Problem, int] = {}

    def once(what: str, key: str | Problem, number: int) -> None:
        first = lines.setdefault(key, number)
        if first != number:
            raise ValueError(f"{what} stands in line {first} already; wanted each once")

    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        try:
            if line.startswith("#"):
                title = title or line.lstrip("# ")
            elif line.startswith("%"):
                device, variation = _variation(line[1:])
                once(f"device {device!r}", f"% {device}", number)
                varied[device] = variation
            elif line:
                label, problem = _problem(line)
                once(f"label {label!r}", label, number)
                once(f"the problem of {label!r}", problem, number)
                problems[label] = problem
        except ValueError as error:
            raise ValueError(f"{name}.txt, line {number}: {error}") from None
    return Suite(name, title, tuple(problems.items()), varied)


def _problem(line: str) -> tuple[str, Problem]:
    label, colon, text = line.partition(":")
    if not colon or not label.strip():
        raise ValueError(f"line is {line!r}; wanted 'name: problem'")
    return label.strip(), Problem.parse(text)


def _variation(line: str) -> tuple[str, Variation]:
    """Device and variation of what follows the percent sign."""
    device, colon, rest = (part.strip() for part in line.partition(":"))
    if not colon:
        raise ValueError(f"line is {line.strip()!r}; wanted '% device: key value ...; key value ...'")
    if device not in DEVICES:
        raise ValueError(f"device is {device!r}; wanted one of {', '.join(DEVICES)}")
    given: dict[str, tuple[str, ...]] = {}
    for part in filter(None, map(str.strip, rest.split(";"))):
        key, *values = part.split()
        if key not in _KEYS:
            raise ValueError(f"key is {key!r}; wanted one of {', '.join(_KEYS)}")
        if key in given:
            raise ValueError(f"{key} is given twice; wanted all its values behind one {key}")
        if not values or len(set(values)) != len(values):
            raise ValueError(f"values of {key} are {' '.join(values)!r}; wanted at least one, and each once")
        for value in values:
            if key == "batch" and not (value.isdecimal() and int(value) > 0):
                raise ValueError(f"batch is {value!r}; wanted an integer >= 1")
            if key != "batch" and value not in _WORDS[key]:
                raise ValueError(f"{key} is {value!r}; wanted one of {', '.join(_WORDS[key])}")
        given[key] = tuple(values)
    words = (given.get(key, ()) for key in _WORDS)
    return device, Variation(tuple(int(value) for value in given.get("batch", ())), *words)


def variants(problems: Iterable[tuple[str, Problem]], varied: Variation) -> Iterator[tuple[str, Problem]]:
    """Each problem with every wanted batch, direction, dtype and layout; each result once, under its first name.

    Left out is what does not apply. A problem with an epilogue keeps its own direction, as what is fused behind one
    pass belongs to no other. A problem of one axis is nchw, as PyTorch has no channels-last layout for it. A pass
    that has a line of its own, as a transposed layer beside its mirror image, is left to that line and its name.
    """
    problems = tuple(problems)
    own = {problem for _, problem in problems}
    seen: set[Problem] = set()
    for label, problem in problems:
        layouts_wanted = varied.layouts if problem.rank > 1 or not varied.layouts else ("nchw",)
        for n in varied.batches or (problem.n,):
            for direction in varied.directions or (problem.direction,):
                if direction != problem.direction and (
                    not problem.epilogue.is_identity or problem.is_fused or problem.with_(direction=direction) in own
                ):
                    continue
                for dtypes in [(name,) * 3 for name in varied.dtypes] or [problem.dtypes]:
                    for layouts in [(name,) * 3 for name in layouts_wanted] or [problem.layouts]:
                        variant = problem.with_(n=n, direction=direction, dtypes=dtypes, layouts=layouts)
                        if variant not in seen:
                            seen.add(variant)
                            yield label, variant
