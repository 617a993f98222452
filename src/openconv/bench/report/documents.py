"""The generated parts of README.md and the pages of results, from what was recorded.

Generated parts of README.md stand between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; everything else is left
as it is. docs/results.md, the pages in docs/results and the pictures beside them are generated as a whole. A picture
holds a digest of the records that it shows.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ...cpu.memory import LARGE
from ...files import write_atomic
from ..errors import ErrorRecord
from ..graphs_results import FILE_NAME, GraphRecord, read_graphs
from ..models import FILE_NAME as MODELS
from ..models import ModelRecord, read_models
from ..results import Record, results_folder
from .drawing import png
from .errors import by_figure, draw_errors
from .graphs import graph_details, graph_means
from .models import model_means
from .runs import DIRECTION_ORDER, Run, grouped, load, problem_of
from .tables import Ratios, baseline, choices, details, heuristic_loss, passes, summary
from .winners import draw_winners, map_records

__all__ = ["main", "picture_sources", "render", "replace_part", "write_documents"]


REPORT = "<!-- site: [The page with plots and filters](report/report.html) of all records. -->"
"""What the site shows and a Markdown viewer does not: `make docs` puts the page beside the site's own."""


def replace_part(text: str, name: str, content: str) -> str:
    """The text with a generated part replaced; ValueError if it has no such part."""
    pattern = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
    if not re.search(pattern, text, re.DOTALL):
        raise ValueError(f"there is no part '<!-- begin {name} -->' ... '<!-- end {name} -->'")
    return re.sub(pattern, lambda m: f"{m[1]}\n{content}\n\n{m[2]}", text, flags=re.DOTALL)


def render(root: Path | None = None) -> dict[Path, str]:
    """The generated files of a checkout, and what should stand in them."""
    from ...support import support_markdown

    root = root or results_folder().parents[1]
    folder = root / "benchmarks" / "results"
    runs = _recorded(folder)
    readme = replace_part((root / "README.md").read_text(), "engines", support_markdown().rstrip())
    readme = replace_part(readme, "results", _short(runs))
    graphs = {run.name: read_graphs(folder / run.name / FILE_NAME) for run in runs}
    pages = {root / "docs" / "results" / f"{run.name}.md": _machine_page(run, graphs[run.name]) for run in runs}
    models = {run.name: read_models(folder / run.name / MODELS) for run in runs}
    return {root / "README.md": readme, root / "docs" / "results.md": _overview(runs, graphs, models), **pages}


def _recorded(folder: Path) -> list[Run]:
    """The machines of a folder of results that have timed something."""
    return [run for run in load([folder]) if run.records]


def picture_sources(run: Run) -> dict[str, str]:
    """The pictures of a machine in docs/results, by name, with a digest of the records that each shows."""

    def digest(lines: Iterable[str]) -> str:
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    shown: dict[str, Sequence[Record | ErrorRecord]] = {"map": map_records(run), **by_figure(run.errors)}
    return {
        f"{run.name}-{kind}.png": digest(record.to_json() for record in records)
        for kind, records in shown.items()
        if records
    }


def _pictures(run: Run) -> dict[str, bytes]:
    """The pictures of a machine in docs/results: which engine wins where, and errors against float64."""
    figures = {"map": draw_winners(run)} | draw_errors(run.errors, run.title)
    drawn = {f"{run.name}-{kind}.png": figure for kind, figure in figures.items() if figure is not None}
    return {name: png(drawn[name], source) for name, source in picture_sources(run).items()}


def write_documents(root: Path | None = None) -> dict[Path, bool]:
    """Rewrite the generated files and remove pages of folders that are gone; says for each file if it changed."""
    root = root or results_folder().parents[1]
    pages = root / "docs" / "results"
    wanted: dict[Path, bytes] = {path: text.encode() for path, text in render(root).items()}
    for run in _recorded(root / "benchmarks" / "results"):
        wanted |= {pages / name: picture for name, picture in _pictures(run).items()}
    changed = {}
    for path, content in wanted.items():
        changed[path] = not path.exists() or path.read_bytes() != content
        if changed[path]:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content)
    for stale in {*pages.glob("*.md"), *pages.glob("*.png")} - set(wanted):
        stale.unlink()
        changed[stale] = True
    return changed


def main() -> int:
    """Rewrite the generated files; prints which of them changed. 1 if a text asks for what nobody has recorded."""
    from .book import write_book

    root = results_folder().parents[1]
    try:
        done = {**write_documents(root), **write_book(root)}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path, changed in done.items():
        print(f"{path.name}: {'unchanged' if not changed else 'rewritten' if path.exists() else 'removed'}")
    return 0


# -- README.md --------------------------------------------------------------------------------------------------------


def _short(runs: Sequence[Run]) -> str:
    """The machine of each kind with most records; the others as links."""
    kinds = sorted({run.kind for run in runs})
    shown = [max((run for run in runs if run.kind == kind), key=lambda run: len(run.records)) for kind in kinds]
    parts = [part for run in shown for part in _short_machine(run)]
    others = [f"[{run.title}](docs/results/{run.name}.md)" for run in runs if not any(run is one for one in shown)]
    if others:
        parts.append("Also measured:\n\n" + "\n".join(f"- {link}" for link in others))
    return "\n\n".join(parts)


def _short_machine(run: Run) -> list[str]:
    parts = [f"**{run.title}**, against {run.reference}; [every layer](docs/results/{run.name}.md)"]
    if table := passes(run, run.reference):
        parts += [table, *_against_others(run)]
    if table := baseline(run):
        parts += [_baseline_text(run), table]
    return parts


def _against_others(run: Run) -> list[str]:
    """A sentence for each peer besides the reference that takes but some of the problems."""
    sentences = []
    for peer in run.peers[1:]:
        found = []
        for suite, records in sorted(grouped(run.chosen, lambda r: r.suite).items()):
            if ratios := Ratios.of(r.ratio(peer) for r in records):
                slower = f", {ratios.slower} of {ratios.count} slower"
                found.append(f"{suite} **{ratios.mean:.2f}** ({ratios.worst:.2f} to {ratios.best:.2f}{slower})")
        if found:
            sentences.append(f"Against {peer}: {'; '.join(found)}.")
    return sentences


def _baseline_text(run: Run) -> str:
    return (
        f"Baseline, where openconv has no engine yet: what the peers take for all layers of a suite, and what share of "
        f"the roofline (the least time by the measured ceilings) {run.reference} reaches."
    )


# -- docs -------------------------------------------------------------------------------------------------------------


def _overview(
    runs: Sequence[Run], graphs: Mapping[str, Sequence[GraphRecord]], models: Mapping[str, Sequence[ModelRecord]]
) -> str:
    """docs/results.md: for each machine the means, how good the choices were, and models and graphs where some are
    recorded."""
    explanation = (
        "Generated from `benchmarks/results` by `make docs`; `openconv report` makes plots and a page with filters of "
        "the same records. Ratios are the other library's time over ours, both in one process: above 1 openconv is "
        "faster. Times are medians of repeated calls, each of which allocates its result: on a CPU, openconv's results "
        f"of {LARGE >> 20} MiB and more (12 when Intel CPUs were recorded) then lie in memory that an earlier one has "
        "left, while torch asks for new "
        'pages. The first of its size does not: see "every result on new memory".'
    )
    parts = ["# Results", explanation, REPORT]
    for run in runs:
        parts += [
            f"## {run.title}",
            f"Every layer, losses included: [{run.name}](results/{run.name}.md).",
            *_picture_links(run),
            *_means(run),
            *model_means(models[run.name]),
            *graph_means(graphs[run.name]),
        ]
    return "\n\n".join(parts) + "\n"


def _picture_links(run: Run) -> list[str]:
    """The pictures of a machine, each behind a sentence that says how to read it."""
    texts = {
        "map": "Which engine is the fastest, by filter size and channels, with images of 2^18 elements (suite `map`). "
        f"Numbers say how many times as fast as {run.reference} it is.",
        "errors": "How far each engine is from float64, over the length of its sums: lines are means over problems "
        "with sums about as long, faint marks the problems.",
    }
    parts = []
    for name in picture_sources(run):
        kind = name.removeprefix(f"{run.name}-").removesuffix(".png")
        parts += [texts[kind.partition("-")[0]], f"![{kind}, {run.title}](results/{name})"]
    return parts


def _means(run: Run) -> list[str]:
    """The tables and paragraphs of a machine, those that have something to say."""
    parts = [summary(run)] if run.chosen else []
    parts += [choices(run.records), heuristic_loss(run.records)]
    if table := baseline(run, by_type=True):
        parts += [_baseline_text(run), table]
    return [part for part in parts if part]


def _machine_page(run: Run, graphs: Sequence[GraphRecord]) -> str:
    """docs/results/<folder>.md: every layer of every suite, and of every pattern of a graph."""
    explanation = (
        "`us` is the median time of the engine that openconv chose. For each peer: its time, and in brackets that time "
        "over ours, in bold where openconv is slower. `regret` is the time of the chosen engine over that of the "
        "fastest one. Generated by `make docs`."
    )
    parts = [f"# {run.title}", explanation]
    for suite, records in grouped(run.records, lambda r: r.suite).items():
        for direction in sorted({problem_of(r).direction for r in records}, key=DIRECTION_ORDER.__getitem__):
            group = [r for r in records if problem_of(r).direction == direction]
            parts += [f"## {suite}, {direction}", details(run, group)]
    parts += graph_details(graphs)
    return "\n\n".join(parts) + "\n"
