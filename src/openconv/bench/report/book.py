"""Numbers, tables and pictures in the texts of the tutorial and the guides, filled in from what was recorded.

A mark is a comment of HTML, which no reader of a page sees:

    cuDNN takes <!--= time("photo_3x3", "torch") -->144 us<!--/--> for it

    <!-- table: rungs("photo_3x3", "cuda.naive", "cuda.tiled") -->
    ...
    <!-- end -->

What stands between its ends is generated. ``fill`` makes it anew; ``python -m openconv.bench.report.book`` does so in
the files of the tutorial and the guides. A mark that asks for what nobody has recorded is an error that names it.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...files import write_atomic
from ...units import bytes_text, count_text, percent_text, seconds_text
from ..profiles import FILE_NAME as PROFILES
from ..profiles import read_profiles
from ..results import Record, read, results_folder
from .drawing import png
from .runs import DIRECTION_ORDER, Run, base_name, problem_of
from .tables import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["DEVICES", "Book", "Picture", "book_pages", "write_book"]

DEVICES = {"h200": "cuda-nvidia-h200", "cpu": "cpu-amd-epyc-avx2-2t"}
"""The machines that texts speak of, and their folders under benchmarks/results."""

_INLINE = re.compile(r"<!--= (.*?) -->.*?<!--/-->", re.DOTALL)
_BLOCK = re.compile(r"^<!-- (table|figure): (.*?) -->\n.*?^<!-- end -->$", re.DOTALL | re.MULTILINE)
_LEFT = re.compile(r"<!--(?:=| (?:table|figure): ).*")
_MARKED = ("time", "ratio", "bandwidth", "rate", "roofline", "predicted", "error", "chosen", "ceiling", "least")
_FIGURES = "figures"


@dataclass(frozen=True)
class Picture:
    """A picture that a text shows: a digest of the records in it, and how it is drawn."""

    digest: str
    draw: Callable[[], bytes]


@dataclass
class Book:
    """What was recorded under a folder of results, by the words of the marks, and the pictures that were asked for."""

    folder: Path
    pictures: dict[str, Picture] = field(default_factory=dict)

    # -- texts --------------------------------------------------------------------------------------------------------

    def fill(self, text: str, name: str = "text") -> str:
        """The text with every mark filled in; ValueError names the mark that cannot be."""

        def inline(found: re.Match[str]) -> str:
            return f"<!--= {found[1]} -->{self._call(found[1], _MARKED, name)}<!--/-->"

        def block(found: re.Match[str]) -> str:
            known = ("rungs", "profiled") if found[1] == "table" else ("bars", "rooflines")
            content = self._call(found[2], known, name)
            return f"<!-- {found[1]}: {found[2]} -->\n\n{content}\n\n<!-- end -->"

        filled = _BLOCK.sub(block, _INLINE.sub(inline, text))
        left = _LEFT.search(_BLOCK.sub("", _INLINE.sub("", text)))
        if left:
            raise ValueError(f"{name}: {left[0]!r} has no end; wanted '<!--/-->', or '<!-- end -->' on its own line")
        return filled

    def _call(self, text: str, known: Sequence[str], name: str) -> str:
        try:
            call = ast.parse(text, mode="eval").body
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in known:
                raise ValueError(f"wanted a call of one of {', '.join(known)}")
            arguments = [ast.literal_eval(value) for value in call.args]
            keywords = {str(given.arg): ast.literal_eval(given.value) for given in call.keywords}
            return str(getattr(self, call.func.id)(*arguments, **keywords))
        except (ValueError, TypeError, SyntaxError) as error:
            raise ValueError(f"{name}: {text}: {error}") from None

    # -- records ------------------------------------------------------------------------------------------------------

    def record(
        self, label: str, *, direction: str | None = None, on: str = "h200", suite: str = "ladder",
        batch: int | None = None,
    ) -> Record:  # fmt: skip
        """The one record of that name; of several passes the forward one, unless another is asked for."""
        found = [r for r in self._records(on, suite) if r.label == label and batch in (None, problem_of(r).n)]
        if len(found) > 1 or direction:
            found = [r for r in found if problem_of(r).direction == (direction or "fprop")]
        if len(found) != 1:
            wanted = f"{label!r}, {direction or 'fprop'}" + (f", batch {batch}" if batch else "")
            raise ValueError(f"suite {suite!r} has {len(found)} records of {wanted} on {on}; wanted one")
        return found[0]

    def _records(self, on: str, suite: str) -> list[Record]:
        if on not in DEVICES:
            raise ValueError(f"on is {on!r}; wanted one of {', '.join(DEVICES)}")
        path = self.folder / DEVICES[on] / f"{suite}.jsonl"
        if not path.exists():
            raise ValueError(f"suite {suite!r} was not recorded on {on}")
        return _read(path)

    def _seconds(self, record: Record, who: str) -> float:
        name = record.chosen if who == "chosen" else who
        if name not in record.seconds:
            why = record.notes.get(name) or ("it was wrong" if name in record.wrong else "it did not take part")
            raise ValueError(f"{name} has no time for '{record.problem}': {why}")
        return record.seconds[name]["median"]

    # -- marks in a sentence ------------------------------------------------------------------------------------------

    def time(self, label: str, who: str, **where: object) -> str:
        """``49.6 us``: the median time."""
        return seconds_text(self._seconds(self.record(label, **where), who))  # type: ignore[arg-type]

    def ratio(self, label: str, a: str, b: str, **where: object) -> str:
        """``3.2``: how many times as long ``a`` takes as ``b``."""
        record = self.record(label, **where)  # type: ignore[arg-type]
        return _times(self._seconds(record, a) / self._seconds(record, b))

    def bandwidth(self, label: str, who: str, **where: object) -> str:
        """``1.78 TB/s``: the bytes of x, w and y, each moved once, over the time."""
        record = self.record(label, **where)  # type: ignore[arg-type]
        return bytes_text(problem_of(record).min_bytes / self._seconds(record, who)) + "/s"

    def rate(self, label: str, who: str, **where: object) -> str:
        """``12.3 TFLOP/s``: two operations for each product of the definition, over the time."""
        record = self.record(label, **where)  # type: ignore[arg-type]
        return count_text(problem_of(record).flops / self._seconds(record, who), "FLOP/s")

    def roofline(self, label: str, who: str, **where: object) -> str:
        """``46 %``: the roofline's floor over the time."""
        record = self.record(label, **where)  # type: ignore[arg-type]
        self._seconds(record, who)
        return percent_text(record.roofline[record.chosen if who == "chosen" else who])

    def least(self, label: str, **where: object) -> str:
        """``30.2 us``: the roofline's floor itself, by the ceilings that were measured beside the times."""
        from ..ceilings import roofline_floor

        record = self.record(label, **where)  # type: ignore[arg-type]
        return seconds_text(roofline_floor(problem_of(record), record.ceilings))

    def predicted(self, label: str, who: str, **where: object) -> str:
        """``6.6 us``: what the engine's cost model had said."""
        record = self.record(label, **where)  # type: ignore[arg-type]
        name = record.chosen if who == "chosen" else who
        if name not in record.predicted:
            raise ValueError(f"nothing was predicted of {name} for '{record.problem}'")
        return seconds_text(record.predicted[name])

    def error(self, label: str, who: str, **where: object) -> str:
        """``2.5e-07``: the largest distance to float64 as a share of sum(|x|*|w|)."""
        record = self.record(label, **where)  # type: ignore[arg-type]
        name = record.chosen if who == "chosen" else who
        if name not in record.error:
            raise ValueError(f"{name} was not compared with float64 for '{record.problem}'")
        return f"{record.error[name]:.1e}"

    def chosen(self, label: str, **where: object) -> str:
        """The engine that openconv chose, without its knobs."""
        return base_name(self.record(label, **where).chosen)  # type: ignore[arg-type]

    def ceiling(self, name: str, *, on: str = "h200", suite: str | None = None) -> str:
        """``4.23 TB/s`` or ``53.1 TFLOP/s``: the highest that was measured while a suite was recorded."""
        suites = [suite] if suite else ["ladder", "ladder_f16"] if on == "h200" else ["ladder"]
        found = [r.ceilings[name] for one in suites for r in self._records(on, one) if name in r.ceilings]
        if not found:
            raise ValueError(f"ceiling {name!r} was not measured on {on}")
        return bytes_text(max(found)) + "/s" if name == "copy" else count_text(max(found), "FLOP/s")

    # -- tables and pictures ------------------------------------------------------------------------------------------

    def rungs(
        self, label: str, *engines: str, on: str = "h200", suite: str = "ladder", batch: int | None = None
    ) -> str:
        """A row an engine, PyTorch last: the times of the passes and how many times as fast as PyTorch each is. ``{}``
        in a label stands for the pass, where a suite has a label for each."""
        passes = self._passes(label, on, suite, batch)
        vendor = "oneDNN" if on == "cpu" else "cuDNN"
        peers = [name for name in ("torch", "torch_nchw") if any(name in r.seconds for r in passes.values())]
        titles = {"torch": f"PyTorch ({vendor})", "torch_nchw": f"PyTorch ({vendor}), nchw", "chosen": "as chosen"}
        rows = []
        for who in (*engines, *peers):
            cells = [self._cell(record, who) for record in passes.values()]
            if not any(cell != "-" for cell in cells):
                raise ValueError(f"{who} has no time in any pass of {label!r}")
            rows.append([titles.get(who, f"`{who}`"), *cells])
        return markdown_table([f"time (times as fast as {vendor})", *passes], rows)

    def _passes(self, label: str, on: str, suite: str, batch: int | None) -> dict[str, Record]:
        found = [
            r for r in self._records(on, suite)
            if r.label == label.replace("{}", problem_of(r).direction) and batch in (None, problem_of(r).n)
        ]  # fmt: skip
        passes = {problem_of(r).direction: r for r in found}
        if not passes or len(passes) != len(found):
            raise ValueError(f"suite {suite!r} has {len(found)} records of {label!r} on {on}; wanted one a pass")
        return dict(sorted(passes.items(), key=lambda item: DIRECTION_ORDER[item[0]]))

    def _cell(self, record: Record, who: str) -> str:
        took = record.seconds.get(record.chosen if who == "chosen" else who)
        if took is None:
            return "-"
        reference = record.seconds.get("torch")
        share = f" ({_times(reference['median'] / took['median'])})" if reference and who != "torch" else ""
        return seconds_text(took["median"]) + share

    def profiled(self, label: str, *engines: str, direction: str = "fprop", suite: str = "ladder") -> str:
        """A row for each kernel of the engines, with what Nsight Compute counted on the H200. What nobody has profiled
        is no error, as a profiler is not to be had everywhere: a sentence says how to make the record."""
        records = {
            r.engine: r
            for r in read_profiles(self.folder / DEVICES["h200"] / PROFILES)
            if (r.suite, r.label, r.problem.split()[0]) == (suite, label, direction)
        }
        rows = [
            [f"`{engine}`, {_kernel_name(kernel['name'])}", *(_counted(kernel, column) for column in _COUNTED)]
            for engine in engines if engine in records for kernel in records[engine].kernels
        ]  # fmt: skip
        parts = [markdown_table(["kernel", *_COUNTED], rows)] if rows else []
        if missing := [engine for engine in engines if engine not in records]:
            names = " ".join(f"--engine {engine}" for engine in missing)
            parts.append(
                f"Not recorded on the H200 yet; on a GPU, `openconv profile {suite}:{label} --direction {direction} "
                f"{names}` does it."
            )
        return "\n\n".join(parts)

    def bars(self, label: str, *engines: str, on: str = "h200", suite: str = "ladder", batch: int | None = None) -> str:
        """The same as :meth:`rungs` as a picture."""
        from .plots import draw_bars

        records = list(self._passes(label, on, suite, batch).values())
        who = hashlib.sha256(" ".join(engines).encode()).hexdigest()[:6]  # another choice of rungs is another picture
        name = f"{label}-{suite}-{on}-{who}.png"
        self._draw(name, records, engines, lambda: draw_bars(Run(DEVICES[on], records), engines))
        return f"![Times of {', '.join(engines)} and PyTorch for {label}]({_FIGURES}/{name})"

    def rooflines(self, *, on: str = "h200", suite: str = "ladder") -> str:
        """Every engine of a suite, in all passes, under the roofline of the machine."""
        from .plots import draw_rooflines

        records = self._records(on, suite)
        run = Run(DEVICES[on], records)
        name = f"rooflines-{suite}-{on}.png"
        self._draw(name, records, (), lambda: draw_rooflines(run))
        return f"![Every engine of the suite {suite} under the roofline of the {run.title}]({_FIGURES}/{name})"

    def _draw(self, name: str, records: Iterable[Record], engines: Sequence[str], draw: Callable[[], Figure]) -> None:
        lines = [record.to_json() for record in records]
        digest = hashlib.sha256("\n".join([*lines, *engines]).encode()).hexdigest()[:16]
        if name in self.pictures and self.pictures[name].digest != digest:
            raise ValueError(f"two pictures would be named {name!r}")
        self.pictures[name] = Picture(digest, lambda: png(draw(), digest))


_COUNTED: dict[str, Callable[[dict[str, Any]], str]] = {
    "time": lambda k: seconds_text(k["seconds"]),
    "instructions of warps": lambda k: count_text(k["instructions"], ""),
    "from memory": lambda k: bytes_text(k["dram_read_bytes"]),
    "to memory": lambda k: bytes_text(k["dram_written_bytes"]),
    "sectors a load": lambda k: f"{k['load_sectors'] / k['load_requests']:.1f}",
    "hits in L1": lambda k: percent_text(k["l1_hit_percent"] / 100),
    "in L2": lambda k: percent_text(k["l2_hit_percent"] / 100),
    "occupancy": lambda k: percent_text(k["occupancy_percent"] / 100),
    "turns lost to banks": lambda k: count_text(k["bank_conflicts"], ""),
}
"""What a profile's table shows of a kernel, from its counters."""


def _counted(kernel: dict[str, Any], column: str) -> str:
    try:
        return _COUNTED[column](kernel).strip()
    except (KeyError, ZeroDivisionError):  # a counter that this kernel does not have: loads, of one that copies boxes
        return "-"


def _kernel_name(name: str) -> str:
    """``at::native::copy<...>(...)`` without what stands in brackets, and without where it is defined."""
    return name.partition("<")[0].partition("(")[0].split("::")[-1].removeprefix("void ").strip()


def _times(value: float) -> str:
    """``0.0015``, ``0.12``, ``1.84``, ``11.3`` or ``120``."""
    return (
        f"{value:.2g}"
        if value < 0.0995
        else f"{value:.2f}"
        if value < 9.995
        else f"{value:.1f}"
        if value < 99.95
        else f"{value:.0f}"
    )


@cache
def _read(path: Path) -> list[Record]:
    return read(path)


# -- the files --------------------------------------------------------------------------------------------------------


def book_pages(root: Path) -> list[Path]:
    """The texts that have marks: the chapters of the tutorial, and the guides."""
    return [*sorted((root / "tutorial").glob("*.md")), *sorted((root / "docs" / "guides").glob("*.md"))]


def write_book(root: Path, pages: Iterable[Path] = ()) -> dict[Path, bool]:
    """Fill in the marks of these pages, of all if none is named, and draw their pictures; says which files changed."""
    chosen = [path.resolve() for path in pages] or book_pages(root)
    changed = {}
    for page in chosen:
        book = Book(root / "benchmarks" / "results")
        before = page.read_text()
        text = book.fill(before, page.name)
        changed[page] = text != before
        if changed[page]:
            write_atomic(page, text)
        for name, picture in book.pictures.items():
            path = page.parent / _FIGURES / name
            changed[path] = not path.exists() or picture.digest.encode() not in path.read_bytes()
            if changed[path]:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, picture.draw())
    return changed


def main(pages: Sequence[str]) -> int:
    """Fill in the pages that are named, or all; prints which files changed. 1 if a mark cannot be filled."""
    root = results_folder().parents[1]
    try:
        for path, changed in write_book(root, map(Path, pages)).items():
            print(f"{path.name}: {'rewritten' if changed else 'unchanged'}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
