"""Suites: text files of named Problem lines under benchmarks/suites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..problem import Problem

__all__ = ["load_suite", "suite_names", "suites_folder", "variants"]


def suites_folder() -> Path:
    """benchmarks/suites of the checkout that this module is in, or below the present folder."""
    for base in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (base / "benchmarks" / "suites").is_dir():
            return base / "benchmarks" / "suites"
    raise FileNotFoundError("benchmarks/suites is not here; run from a checkout of openconv, or give problems as text")


def suite_names() -> list[str]:
    """The suites there are."""
    return sorted(path.stem for path in suites_folder().glob("*.txt"))


def load_suite(name: str) -> list[tuple[str, Problem]]:
    """The named problems of a suite; ValueError says which line is wrong."""
    path = suites_folder() / f"{name}.txt"
    if not path.is_file():
        raise ValueError(f"there is no suite {name!r}; wanted one of {', '.join(suite_names())}, or a problem as text")
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        label, colon, text = line.partition(":")
        try:
            if not colon:
                raise ValueError("wanted 'name: problem'")
            found.append((label.strip(), Problem.parse(text)))
        except ValueError as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from None
    return found


def variants(
    problems: Sequence[tuple[str, Problem]], batches: Sequence[int], directions: Sequence[str], layouts: Sequence[str],
    dtypes: Sequence[str],
) -> Iterator[tuple[str, Problem]]:  # fmt: skip
    """Each problem with every wanted batch, direction, layout and dtype; an empty list keeps the problem's own."""
    for label, problem in problems:
        for n in batches or [problem.n]:
            for direction in directions or [problem.direction]:
                for layout in [(name,) * 3 for name in layouts] or [problem.layouts]:
                    for dtype in [(name,) * 3 for name in dtypes] or [problem.dtypes]:
                        yield label, problem.with_(n=n, direction=direction, layouts=layout, dtypes=dtype)
