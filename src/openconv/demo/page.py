"""The page: one HTML file with everything in it, light or dark as the reader likes, and the plot as a picture."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

import numpy as np

from ..bench.results import Record, geometric_mean
from ..explanation import Explanation
from ..pictures import KERNELS, Picture
from ..units import ratio_text, seconds_text
from .checks import EngineCheck
from .filters import FilterResult

__all__ = ["NEXT_COMMANDS", "Findings", "draw_plot", "findings_json", "render_page"]


@dataclass(frozen=True, eq=False)
class Findings:
    """Everything the demonstration has found."""

    machine: str
    versions: str
    scene: Picture
    filters: Sequence[FilterResult]
    checks: Sequence[EngineCheck]
    records: Sequence[Record]
    explanation: Explanation
    failures: Sequence[str] = ()
    busy: str = ""
    layers: str = ""
    """What the layers of the race have in common."""

    @property
    def wrong(self) -> list[str]:
        """One line for each wrong result of any part."""
        filters = [f"{f.name}: off by {f.difference:.3g} grey levels" for f in self.filters if not f.right]
        checks = [f"{check.name}: {line}" for check in self.checks for line in check.wrong]
        races = [f"{name}: wrong on '{record.problem}'" for record in self.records for name in record.wrong]
        return [*filters, *checks, *races, *self.failures]


# -- the plot ---------------------------------------------------------------------------------------------------------

_LIGHT = {"text": "#1f2328", "grid": "#d0d7de", "fast": "#1a7f5a", "slow": "#bf5b17", "peer": "#57606a"}
_DARK = {"text": "#e6edf3", "grid": "#30363d", "fast": "#3fb98a", "slow": "#e0853d", "peer": "#9da7b1"}


def draw_plot(records: Sequence[Record], *, dark: bool = False) -> bytes:
    """A PNG: for each layer how many times faster than PyTorch the chosen engine was, on a logarithmic axis."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    shown = [(r, value) for r in records if (value := r.ratio("torch"))]
    colours = _DARK if dark else _LIGHT
    style = {"text.color": colours["text"], "axes.labelcolor": colours["text"], "xtick.color": colours["text"],
             "ytick.color": colours["text"], "font.size": 10, "font.family": "DejaVu Sans"}  # fmt: skip
    with rc_context(style):  # type: ignore[arg-type]
        figure = Figure(figsize=(9.6, 0.36 * len(shown) + 1.1), dpi=140, layout="constrained")
        axes = figure.subplots()
        ratios = [value for _, value in shown]
        places = np.arange(len(shown))[::-1]
        bars = [colours["fast" if value >= 1 else "slow"] for value in ratios]
        axes.barh(places, [value - 1 for value in ratios], left=1, color=bars, height=0.62)
        for place, (record, value) in zip(places, shown, strict=True):
            opencv = _over_torch(record, "opencv")
            text = f"{ratio_text(value)}  {record.chosen.partition('.')[2]}, {seconds_text(_seconds(record))}"
            text += f"; OpenCV {ratio_text(opencv)}" if opencv else ""
            where = (max(value, 1), place)
            axes.annotate(text, where, xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5)
        axes.axvline(1, color=colours["peer"], linewidth=1)
        axes.set_xscale("log")
        axes.set_xlim(0.8 * min([*ratios, 0.6]), 4 * max([*ratios, 2]))
        axes.set_yticks(places, [record.label for record, _ in shown])
        axes.set_xlabel("times as fast as PyTorch")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(axis="x", color=colours["grid"], linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        file = io.BytesIO()
        figure.savefig(file, format="png", transparent=dark, facecolor="none" if dark else "white")
    return file.getvalue()


def _seconds(record: Record) -> float:
    return record.seconds[record.chosen]["median"]


def _over_torch(record: Record, peer: str) -> float | None:
    times = record.seconds
    return times["torch"]["median"] / times[peer]["median"] if peer in times and "torch" in times else None


# -- HTML -------------------------------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --soft: #59636e; --line: #d8dee4; --back: #ffffff; --card: #f6f8fa;
        --good: #1a7f5a; --bad: #b5351c; --slow: #b3541a; --link: #0a5fb4; --bar: #1a7f5a33; --barslow: #bf5b1733; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --soft: #9da7b1; --line: #30363d; --back: #0d1117; --card: #161b22; --good: #3fb98a;
          --bad: #ff7b6b; --slow: #e0853d; --link: #6cb6ff; --bar: #3fb98a3d; --barslow: #e0853d3d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); line-height: 1.55;
       font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 48px 24px 80px; }
h1 { font-size: 2.4rem; margin: 0 0 4px; letter-spacing: -0.02em; }
h2 { font-size: 1.45rem; margin: 56px 0 8px; letter-spacing: -0.01em; }
p { margin: 8px 0 16px; max-width: 76ch; }
.lead { font-size: 1.12rem; color: var(--soft); }
.machine { color: var(--soft); font-size: .9rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: 16px; margin: 28px 0 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 16px 20px; }
.card b { display: block; font-size: 1.9rem; line-height: 1.2; letter-spacing: -0.02em; }
.card.good b { color: var(--good); } .card.bad b { color: var(--bad); } .card.less b { color: var(--slow); }
.card span { color: var(--soft); font-size: .92rem; }
.gallery { display: grid; gap: 20px; margin: 16px 0;
           grid-template-columns: repeat(auto-fill, minmax(min(400px, 100%), 1fr)); }
figure { margin: 0; } figure img { width: 100%; display: block; border-radius: 10px; border: 1px solid var(--line); }
figcaption { font-size: .92rem; color: var(--soft); padding: 6px 2px; } figcaption b { color: var(--text); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; margin: 8px 0 16px; }
th { text-align: left; font-weight: 600; white-space: nowrap; color: var(--soft); padding: 6px 10px;
     border-bottom: 1px solid var(--line); }
td { border-bottom: 1px solid var(--line); padding: 7px 10px; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td small { color: var(--soft); }
td.bar { min-width: 130px; font-variant-numeric: tabular-nums; white-space: nowrap; }
.fast { color: var(--good); font-weight: 600; } .slow { color: var(--slow); font-weight: 600; }
.wrong { color: var(--bad); font-weight: 700; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .86em; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 18px 20px; overflow-x: auto;
      line-height: 1.4; font-size: .78rem; }
.plot { width: 100%; display: block; margin: 16px 0; }
footer { margin-top: 64px; padding-top: 16px; border-top: 1px solid var(--line); color: var(--soft); }
"""


def render_page(found: Findings) -> str:
    """The whole page."""
    parts = [_head(found), _gallery(found), _checks(found), _race(found), _why(found), _next()]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>openconv demo</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _card(number: str, text: str, kind: str) -> str:
    return f'<div class="card {kind}"><b>{escape(number)}</b><span>{escape(text)}</span></div>'


def _mean_card(value: float | None, text: str) -> str:
    return _card(ratio_text(value), text, "good" if value >= 1 else "less") if value else ""


def _head(found: Findings) -> str:
    runs = sum(check.taken for check in found.checks)
    wrong = found.wrong
    verdict = _card(f"{len(wrong)} wrong", f"of {runs} results checked against float64", "bad" if wrong else "good")
    chosen = [record.ratio("torch") for record in found.records]
    cards = [
        verdict,
        _mean_card(geometric_mean(f.ratio("torch") for f in found.filters), "PyTorch's speed on the picture filters"),
        _mean_card(geometric_mean(f.ratio("opencv") for f in found.filters), "OpenCV's speed on the picture filters"),
        _mean_card(geometric_mean(chosen), f"PyTorch's speed on {len(found.records)} layers, geometric mean"),
    ]
    busy = f'<p class="slow">{escape(found.busy)}</p>\n' if found.busy else ""
    listed = "".join(f"<li>{escape(line)}</li>" for line in wrong[:20])
    return (
        "<header>\n<h1>openconv</h1>\n"
        '<p class="lead">An open convolution engine for PyTorch. This page was made on this machine just now: pictures '
        "that were filtered, results that were checked, times that were measured. Losses are shown like wins.</p>\n"
        f'<p class="machine">{escape(found.machine)}<br>{escape(found.versions)}</p>\n'
        f'{busy}<div class="cards">{"".join(cards)}</div>\n'
        f"{f'<ul class=wrong>{listed}</ul>' if wrong else ''}</header>"
    )


def _data(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _thumbnail(picture: Picture, width: int = 1024) -> str:
    """A JPEG of at most this width, as an address that holds the picture itself."""
    from PIL import Image

    image = Image.fromarray(picture.pixels[..., 0])
    if image.width > width:
        image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=88)
    return _data(file.getvalue(), "jpeg")


def _figure(picture: Picture, name: str, text: str, file: str) -> str:
    """A picture that leads to its file in full size, which lies next to the page."""
    caption = f"<figcaption><b>{escape(name)}</b> {escape(text)}</figcaption>"
    image = f'<img src="{_thumbnail(picture)}" alt="{escape(name)}: {escape(text)}">'
    return f'<figure><a href="{escape(file)}">{image}</a>{caption}</figure>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int]) -> str:
    """``numbers`` are the columns that are aligned to the right; cells that start with ``<td`` stay as they are."""
    side = [' class="n"' if at in numbers else "" for at in range(len(head))]
    first = "".join(f"<th{side[at]}>{escape(text)}</th>" for at, text in enumerate(head))
    lines = [
        "<tr>" + "".join(c if c.startswith("<td") else f"<td{side[at]}>{c}</td>" for at, c in enumerate(row)) + "</tr>"
        for row in rows
    ]
    return f'<div class="scroll"><table><thead><tr>{first}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _ratio_cell(value: float | None, most: float) -> str:
    """A ratio with a bar behind it, as long as its logarithm's share of the largest one's."""
    if value is None:
        return '<td class="bar"></td>'
    share = min(1.0, abs(math.log(value)) / math.log(max(most, 1.5))) * 100
    kind, colour = ("fast", "--bar") if value >= 1 else ("slow", "--barslow")
    fill = f"background: linear-gradient(90deg, var({colour}) {share:.0f}%, transparent {share:.0f}%)"
    return f'<td class="bar" style="{fill}"><span class="{kind}">{ratio_text(value)}</span></td>'


def _gallery(found: Findings) -> str:
    figures = [_figure(found.scene, "the scene", f"{found.scene}, drawn by the demonstration", "scene.png")]
    figures += [
        _figure(f.picture, f"{f.name} {f.size} x {f.size}", KERNELS[f.name][2], f"{f.name}.png") for f in found.filters
    ]
    peers = [peer for peer in ("torch", "opencv") if any(peer in f.seconds for f in found.filters)]
    names = {"torch": "PyTorch", "opencv": "OpenCV"}
    most = max((v for f in found.filters for p in peers if (v := f.ratio(p))), default=2.0)
    rows = [
        [
            f"<b>{f.name}</b> {f.size} x {f.size}",
            seconds_text(f.seconds["openconv"]),
            *(seconds_text(f.seconds[p]) for p in peers),
            *(_ratio_cell(f.ratio(p), most) for p in peers),
            f'<span class="{"" if f.right else "wrong"}">{f.difference:.1e}</span>',
        ]
        for f in found.filters
    ]
    head = [
        "filter",
        "openconv",
        *(names[p] for p in peers),
        *(f"times {names[p]}" for p in peers),
        "off by, grey levels",
    ]
    numbers = [*range(1, 2 + len(peers)), len(head) - 1]
    return (
        "<section>\n<h2>Pictures</h2>\n<p>A filter is a convolution with one channel in and one out, in f32. A matrix "
        "product has nothing to work on here, so openconv has an engine of its own for it: <code>cpu.filter2d</code> "
        "keeps a block of output rows in vector registers. All contestants filter the same picture, in turn; the last "
        "column is the largest distance from the same filter in float64.</p>\n"
        f'<div class="gallery">{"".join(figures)}</div>\n{_table(head, rows, numbers)}\n</section>'
    )


def _checks(found: Findings) -> str:
    rows = []
    for check in found.checks:
        if check.wrong:
            verdict = f'<span class="wrong">{len(check.wrong)} wrong</span><br><small>{escape(check.wrong[0])}</small>'
        else:
            verdict = '<span class="fast">right</span>' if check.taken else "nothing to check"
        name = f"<b>{escape(check.name)}</b><br><small>{escape(check.summary)}</small>"
        worst = f"{100 * check.worst:.0f} %" if math.isfinite(check.worst) else "not finite"
        rows.append([name, str(check.taken), str(check.refused), worst if check.taken else "-", verdict])
    table = _table(["engine", "results checked", "refused", "worst error, of its bound", "verdict"], rows, [1, 2, 3])
    return (
        "<section>\n<h2>Right</h2>\n<p>Every engine ran every small problem that it takes, over forward and both "
        "backward passes, one to three axes, both layouts and several dtypes, against PyTorch in float64. An engine "
        f"states a bound on its own error; a result beyond it is wrong.</p>\n{table}\n</section>"
    )


def _race(found: Findings) -> str:
    peers = [peer for peer in ("torch", "opencv") if any(peer in r.seconds for r in found.records)]
    names = {"torch": "PyTorch", "opencv": "OpenCV"}
    most = max((value for r in found.records if (value := r.ratio("torch"))), default=2.0)
    rows = []
    for record in found.records:
        label = f"{escape(record.label)}<br><small><code>{escape(record.problem)}</code></small>"
        if record.chosen in record.wrong:
            rows.append([label, f'<span class="wrong">{record.chosen} is wrong</span>', "", *[""] * (len(peers) + 2)])
            continue
        others = ", ".join(
            f"{name.partition('.')[2]} {seconds_text(record.seconds[name]['median'])}"
            for name in record.engines
            if name != record.chosen
        )
        rows.append(
            [
                label,
                f"<b>{record.chosen.partition('.')[2]}</b><br><small>{others}</small>",
                seconds_text(_seconds(record)),
                *(seconds_text(record.seconds[p]["median"]) if p in record.seconds else "" for p in peers),
                _ratio_cell(record.ratio("torch"), most),
            ]
        )
    head = ["layer", "engine chosen, others", "openconv", *(names[p] for p in peers), "times PyTorch"]
    light, dark = (_data(draw_plot(found.records, dark=d), "png") for d in (False, True))
    plot = (
        f'<picture><source srcset="{dark}" media="(prefers-color-scheme: dark)">'
        f'<img class="plot" src="{light}" alt="Speed of each layer relative to PyTorch"></picture>'
    )
    return (
        f"<section>\n<h2>Fast</h2>\n<p>{escape(found.layers.capitalize())}. Every engine that takes a layer was first "
        "verified, then "
        "all of them and PyTorch took turns; times are medians. The engine in bold is the one that openconv chose "
        f"without timing anything, by predicted cost.</p>\n{plot}\n"
        f"{_table(head, rows, [2, *range(3, 3 + len(peers))])}\n</section>"
    )


def _why(found: Findings) -> str:
    return (
        "<section>\n<h2>Explained</h2>\n<p><code>openconv.explain(...)</code> answers for any call: what runs, step by "
        "step, what lost and by how much, what refused and why.</p>\n"
        f"<pre>{escape(str(found.explanation))}</pre>\n</section>"
    )


NEXT_COMMANDS: tuple[tuple[str, str], ...] = (
    ('openconv explain "fprop n8 c64 h56 w56 k64 r3 s3 pad1" --measure', "which engine, why, how fast, how exact"),
    ("openconv filter photo.jpg --kernel sobel -o edges.png", "a filter on a picture of yours"),
    ("openconv engines", "what each engine takes and needs"),
    ("openconv doctor", "this machine and installation"),
)
"""What to run after the demonstration, and what it shows."""


def _next() -> str:
    lines = "\n".join(f"{command:<72}# {text}" for command, text in NEXT_COMMANDS)
    calls = ['y = openconv.conv2d(x, w, padding=1, activation="relu")', "print(openconv.explain(x, w, padding=1))"]
    code = "\n".join(["import openconv", "", *calls])
    return (
        f"<section>\n<h2>Next</h2>\n<pre>{escape(lines)}</pre>\n<pre>{escape(code)}</pre>\n</section>\n"
        "<footer>Made by <code>openconv demo</code>. The pictures in full size lie next to this page.</footer>"
    )


def findings_json(found: Findings) -> dict[str, Any]:
    """The figures behind the page, for JSON."""
    return {
        "machine": found.machine,
        "versions": found.versions,
        "filters": [
            {"name": f.name, "size": f.size, "seconds": f.seconds, "difference": f.difference} for f in found.filters
        ],
        "checks": [asdict(check) for check in found.checks],
        "layers": [asdict(record) for record in found.records],
        "wrong": found.wrong,
        "busy": found.busy,
    }
