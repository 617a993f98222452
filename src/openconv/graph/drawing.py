"""The SVG drawing of a graph's explanation: :meth:`GraphExplanation.svg`.

Each kernel is a column of nodes in a box, with what only it reads beside it: a block. Blocks, inputs that several
kernels read or that one begins with, and outputs stand in layers, so that every line between them goes down. A line
that passes a layer has a place of its own in it. Lines inside a block that do not lead to the next node go round on
lanes at its right. Boxes cannot overlap: layers are stacked, and what is in a layer stands side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from ..units import bytes_text, seconds_text

if TYPE_CHECKING:
    from .explain import GraphExplanation, KernelReport, NodeReport

__all__ = ["cut", "draw"]

_FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
_GLYPH = 0.605
"""Width of a character over the size of its font."""
_TEXT, _SMALL = 12.0, 10.5
_NODE, _LEAF = 38.0, 32.0
_ROW = 14.0
"""Between two nodes of a block."""
_HEAD, _PAD, _LANE, _SIDE = 24.0, 10.0, 12.0, 26.0
_APART, _PASSING = 34.0, 16.0
"""Between two blocks of a layer, and beside a line that passes it."""
_PULL, _LITTLE = 0.08, 0.02
"""How much a place on the middle axis counts against a straight line between two kernels, and how much other lines."""
_MOST_LETTERS = 40

_FILLS = {
    "conv": ("#dbe9fb", "#5b8fd6"), "matmul": ("#e6defa", "#8b6fd0"), "tree": ("#dcf2e0", "#5aa86b"),
    "view": ("#f1f1f1", "#a8a8a8"), "resample": ("#fdebd3", "#d79a45"), "resample_backward": ("#fdebd3", "#d79a45"),
}  # fmt: skip
_OTHER = ("#faf3c8", "#b9a63c")
_INK, _FAINT, _LINE = "#1c2330", "#5a6372", "#3c4656"


def cut(text: str, most: int) -> str:
    """The text, or as much of it as fits into so many letters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def draw(told: GraphExplanation) -> str:
    """The drawing, as the text of an SVG file."""
    return _Drawing(told).svg()


def _wide(text: str, size: float) -> float:
    return len(text) * size * _GLYPH


@dataclass(eq=False)
class _Box:
    """A rectangle with lines of text; ``kind`` is node, input, constant or output."""

    kind: str
    lines: tuple[str, str]
    hint: str
    x: float = 0.0
    y: float = 0.0
    height: float = _NODE

    @property
    def width(self) -> float:
        least = 120.0 if self.kind == "node" else 70.0
        return max(least, _wide(self.lines[0], _TEXT) + 22, _wide(self.lines[1], _SMALL) + 22)


@dataclass(eq=False)
class _Leaf:
    """What only one block reads, at its left: beside the row of its first reader."""

    box: _Box
    rows: list[int]


@dataclass(eq=False)
class _Lane:
    """A value on its way down at the right of a block's nodes: from row ``start`` (-1: from above) to the rows that
    read it, and out below if ``leaves``."""

    name: str
    start: int
    rows: list[int]
    leaves: bool
    at: int = 0

    @property
    def end(self) -> int:
        return 1 << 30 if self.leaves else max(self.rows)


@dataclass(eq=False)
class _Block:
    """Something in a layer: a kernel with its nodes, a single input or output, or the place where a line passes.

    ``tops`` and ``bottoms`` are where lines come and go, by the name of the tensor, from the block's left edge."""

    kernel: KernelReport | None = None
    nodes: list[_Box] = field(default_factory=list)
    leaves: list[_Leaf] = field(default_factory=list)
    lanes: list[_Lane] = field(default_factory=list)
    tops: dict[str, float] = field(default_factory=dict)
    bottoms: dict[str, float] = field(default_factory=dict)
    inner: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Left edge of the kernel's box, of its nodes' column, and of the first lane."""
    width: float = 2.0
    height: float = 0.0
    layer: int = 0
    x: float = 0.0
    y: float = 0.0
    order: float = 0.0

    @property
    def passes(self) -> bool:
        """Whether it is only the place of a line."""
        return not self.nodes


@dataclass(eq=False)
class _Line:
    """A tensor from one block to one in the next layer."""

    name: str
    source: _Block
    target: _Block
    label: str = ""


class _Drawing:
    def __init__(self, told: GraphExplanation) -> None:
        self.told = told
        self.tensors = {t.name: t for t in (*told.inputs, *told.constants, *told.outputs)}
        for kernel in told.kernels:
            self.tensors |= {t.name: t for t in (*kernel.inputs, *kernel.results)}
        self.outputs = {tensor.name for tensor in told.outputs}
        self.makers: dict[str, _Block] = {}
        self.readers: dict[str, list[_Block]] = {}
        self.lines: list[_Line] = []
        self.blocks = self._blocks()
        self.layers = self._layers()
        self._order()
        self._place()

    # -- blocks ---------------------------------------------------------------------------------------------------

    def _blocks(self) -> list[_Block]:
        told, inside = self.told, self._views_of_leaves()
        shown = [kernel for kernel in told.kernels if id(kernel) not in inside.values()]
        origins = {tensor.name: "input" for tensor in told.inputs} | {t.name: "constant" for t in told.constants}
        viewed = {
            kernel.results[0].name: kernel.inputs[0].name for kernel in told.kernels if id(kernel) in inside.values()
        }
        used: dict[str, int] = {}
        for kernel in shown:
            for name in {tensor.name for tensor in kernel.inputs}:
                used[name] = used.get(name, 0) + 1
        blocks: list[_Block] = []
        for kernel in shown:
            first = kernel.inputs[0].name if kernel.inputs else ""
            own = [
                name for name in dict.fromkeys(tensor.name for tensor in kernel.inputs)
                if (name in origins or name in viewed) and used[name] == 1 and name not in self.outputs
                and (name != first or origins.get(name) != "input")
            ]  # fmt: skip
            block = self._kernel_block(kernel, {name: self._leaf_box(name, origins, viewed) for name in own})
            blocks.append(block)
            for tensor in kernel.results:
                self.makers[tensor.name] = block
            for name in block.tops:
                self.readers.setdefault(name, []).append(block)
        read = [name for name in origins if name in self.readers or name in self.outputs]
        blocks += [self._single(self._leaf_box(name, origins, viewed), name, "bottoms") for name in read]
        for block in blocks[-len(read) :] if read else ():
            self.makers[next(iter(block.bottoms))] = block
        for tensor in told.outputs:
            made = self._single(_Box("output", (tensor.name, tensor.form), str(tensor)), tensor.name, "tops")
            self.readers.setdefault(tensor.name, []).append(made)
            blocks.append(made)
        return blocks

    def _views_of_leaves(self) -> dict[str, int]:
        """Views of inputs and constants that one kernel reads, by the name of their result: they are drawn with the
        input, since a vector's reshape is not worth a box of its own."""
        leaves = {tensor.name for tensor in (*self.told.inputs, *self.told.constants)}
        used: dict[str, int] = {}
        for kernel in self.told.kernels:
            for tensor in {tensor.name for tensor in kernel.inputs}:
                used[tensor] = used.get(tensor, 0) + 1
        found = {}
        for kernel in self.told.kernels:
            if kernel.kind != "view":
                continue
            source, result = kernel.inputs[0].name, kernel.results[0].name
            alone = used[source] == 1 and used.get(result) == 1 and not {source, result} & self.outputs
            if alone and source in leaves:
                found[result] = id(kernel)
        return found

    def _leaf_box(self, name: str, origins: dict[str, str], viewed: dict[str, str]) -> _Box:
        origin = viewed.get(name, name)
        tensor = self.tensors[origin]
        form = f"{tensor.form} as {self.tensors[name].shape}" if origin != name else tensor.form
        hint = f"{origins[origin]} {tensor}" + (f", as {self.tensors[name]}" if origin != name else "")
        return _Box(origins[origin], (cut(origin, 28), cut(form, _MOST_LETTERS)), hint, height=_LEAF)

    def _single(self, box: _Box, name: str, side: str) -> _Block:
        """A block of one input or output."""
        box.height = _LEAF
        block = _Block(nodes=[box], width=box.width, height=box.height)
        getattr(block, side)[name] = box.width / 2
        return block

    def _kernel_block(self, kernel: KernelReport, own: dict[str, _Box]) -> _Block:
        block = _Block(kernel)
        made_at: dict[str, int] = {}
        read_at: dict[str, list[int]] = {}
        for row, node in enumerate(kernel.nodes):
            block.nodes.append(_node_box(node))
            for name in dict.fromkeys(arg for arg in node.args if isinstance(arg, str)):
                read_at.setdefault(name, []).append(row)
            made_at |= {result.name: row for result in node.results}
        block.leaves = [_Leaf(box, read_at[name]) for name, box in own.items()]
        last = len(block.nodes) - 1
        stored = {tensor.name for tensor in kernel.results}
        column = max(box.width for box in block.nodes)
        tops: list[str] = []
        below: list[str] = []
        for name, rows in read_at.items():
            if name in own or name in made_at:
                continue
            if rows == [0]:
                tops.append(name)
            else:
                block.lanes.append(_Lane(name, -1, rows, False))
        for name, row in made_at.items():
            later = [each for each in read_at.get(name, ()) if each != row + 1]
            goes = name in stored and row != last
            if name in stored and row == last:
                below.append(name)
            if later or goes:
                block.lanes.append(_Lane(name, row, later, goes))
        lanes = _coloured(block.lanes)
        side = max((leaf.box.width for leaf in block.leaves), default=0.0)
        side += _SIDE if block.leaves else 0.0
        left_lanes = sum(len(leaf.rows) > 1 for leaf in block.leaves)
        head = max(_wide(text, _SMALL) for text in _head(kernel)) + _PAD
        # What comes in from above passes by the words at the left.
        passing = head + 10 + 12 * max(0, len(tops) - 1) if tops else 0.0
        column_at = side + max(_PAD + 10.0 * left_lanes, passing - column / 2)
        lane_at = column_at + column + _LANE
        right = lane_at + lanes * _LANE + (0.0 if lanes else _PAD - _LANE)
        right = max(right, side + head + _PAD)
        block.inner = side, column_at, lane_at
        block.width = right
        y = _HEAD + (_SMALL + 4) * (kernel.number is not None)
        for row, box in enumerate(block.nodes):
            beside = [leaf for leaf in block.leaves if leaf.rows[0] == row]
            tall = max(box.height, len(beside) * (_LEAF + 4) - 4)
            box.x, box.y = column_at + (column - box.width) / 2, y + (tall - box.height) / 2
            for at, leaf in enumerate(beside):
                leaf.box.x = side - _SIDE - leaf.box.width
                leaf.box.y = y + (tall - len(beside) * (_LEAF + 4) + 4) / 2 + at * (_LEAF + 4)
            y += tall + _ROW
        block.height = y - _ROW + _PAD
        for at, name in enumerate(tops):
            block.tops[name] = column_at + column / 2 + (at - (len(tops) - 1) / 2) * 24
        for at, name in enumerate(below):
            block.bottoms[name] = column_at + column / 2 + (at - (len(below) - 1) / 2) * 24
        for lane in block.lanes:
            x = lane_at + lane.at * _LANE
            if lane.start < 0:
                block.tops[lane.name] = x
            if lane.leaves:
                block.bottoms[lane.name] = x
        return block

    # -- layers -----------------------------------------------------------------------------------------------------

    def _layers(self) -> list[list[_Block]]:
        """Longest paths from the top; inputs stand right above their first reader. Lines that pass layers get a place
        in each, one for all readers of a tensor."""
        feeds: dict[_Block, list[_Block]] = {block: [] for block in self.blocks}
        for name, readers in self.readers.items():
            for reader in readers:
                if self.makers[name] is not reader:
                    feeds[reader].append(self.makers[name])
        waiting = dict(feeds)
        level: dict[_Block, int] = {}
        while waiting:
            ready = [block for block, before in waiting.items() if all(each in level for each in before)]
            assert ready, "kernels wait for each other"
            for block in ready:
                level[block] = max((level[each] + 1 for each in waiting.pop(block)), default=0)
        for name, maker in self.makers.items():
            if maker.kernel is None and name in self.readers:
                level[maker] = min(level[reader] for reader in self.readers[name]) - 1
        layers: list[list[_Block]] = [[] for _ in range(1 + max(level.values(), default=-1))]
        for block in self.blocks:
            block.layer = level[block]
            layers[block.layer].append(block)
        for name, readers in self.readers.items():
            maker = self.makers[name]
            label = self.tensors[name].form if maker.kernel is not None else ""
            passing = {maker.layer: maker}
            for layer in range(maker.layer + 1, max(reader.layer for reader in readers)):
                passed = _Block(tops={name: 1.0}, bottoms={name: 1.0}, layer=layer)
                layers[layer].append(passed)
                self.lines.append(_Line(name, passing[layer - 1], passed, label))
                passing[layer], label = passed, ""
            for reader in readers:
                self.lines.append(_Line(name, passing[reader.layer - 1], reader, label if reader.layer else ""))
                label = label if reader.layer - 1 > maker.layer else ""
        return layers

    def _order(self) -> None:
        """Sweeps down and up that put each block at the mean place of its neighbours; the order with the fewest
        crossings is kept."""
        above: dict[_Block, list[_Block]] = {}
        below: dict[_Block, list[_Block]] = {}
        for line in self.lines:
            above.setdefault(line.target, []).append(line.source)
            below.setdefault(line.source, []).append(line.target)
        self._number()
        best, kept = self._crossings(), [list(layer) for layer in self.layers]
        for sweep in range(12):
            if not best:
                break
            near = below if sweep % 2 else above
            for layer in reversed(self.layers) if sweep % 2 else self.layers:
                place = {
                    b: sum(n.order for n in near[b]) / len(near[b]) if b in near else b.order for b in layer
                }  # fmt: skip
                layer.sort(key=place.__getitem__)
                self._number([layer])
            found = self._crossings()
            if found < best:
                best, kept = found, [list(layer) for layer in self.layers]
        self.layers = kept
        self._number()

    def _number(self, layers: Sequence[list[_Block]] | None = None) -> None:
        for layer in self.layers if layers is None else layers:
            for at, block in enumerate(layer):
                block.order = (at + 0.5) / len(layer)

    def _crossings(self) -> int:
        found = 0
        by_layer: dict[int, list[tuple[float, float]]] = {}
        for line in self.lines:
            ends = _port(line, line.source.order, "bottoms"), _port(line, line.target.order, "tops")
            by_layer.setdefault(line.source.layer, []).append(ends)
        for ends_of in by_layer.values():
            for at, (a, b) in enumerate(ends_of):
                found += sum((a - c) * (b - d) < 0 for c, d in ends_of[:at])
        return found

    # -- places -------------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Across: each block as near to where its lines want it as its neighbours let it. Down: layer by layer."""
        for layer in self.layers:
            places = _packed(layer)
            for block, x in zip(layer, places, strict=True):
                block.x = x - (places[-1] + layer[-1].width) / 2
        wishes: dict[_Block, list[_Line]] = {}
        for line in self.lines:
            wishes.setdefault(line.target, []).append(line)
            wishes.setdefault(line.source, []).append(line)
        for sweep in range(25):
            for layer in reversed(self.layers) if sweep % 2 else self.layers:
                _spread_out(layer, [_wish(b, wishes.get(b, []), sweep % 2 == 0) for b in layer])
        for layer in self.layers:  # inputs over their readers, where the rest now stands
            _spread_out(layer, [_wish(b, wishes.get(b, []), False) if not b.tops else (b.x, 1e6) for b in layer])
        for line in reversed(self.lines):  # lines that almost are straight
            begin, end = _down(line)
            if line.source.passes and abs(end - begin) < _PASSING / 2:
                line.source.x += end - begin
        left = min((block.x for layer in self.layers for block in layer), default=0.0)
        for layer in self.layers:
            for block in layer:
                block.x += 24 - left
        self.width = 24 + max((b.x + b.width for layer in self.layers for b in layer), default=0.0)
        y = 0.0
        self.feet: list[float] = []
        for layer in self.layers:
            for block in layer:
                block.y = y
            lines = [line for line in self.lines if line.source.layer == layer[0].layer]
            far = max((abs(_down(line)[0] - _down(line)[1]) for line in lines), default=0.0)
            labels = max(
                (sum(line.source is block and bool(line.label) for line in lines) for block in layer), default=0
            )
            tall = max(block.height for block in layer)
            self.feet.append(y + tall + 13 * labels)
            y = self.feet[-1] + 28 + min(60.0, far * 0.08)
        self.height = y

    # -- SVG ----------------------------------------------------------------------------------------------------------

    def svg(self) -> str:
        told = self.told
        width = max(self.width, 900.0)
        head = [f"graph {told.name}"]
        for part in told.summary.split("; "):
            head += wrap(part, int((width - 48) / (_SMALL * _GLYPH)))
        top = 40 + 15.0 * (len(head) - 1) + 30
        height = top + self.height
        size, font = f'width="{width:.0f}" height="{height:.0f}"', f'font-family="{_FONT}" font-size="{_SMALL}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" {size} {font}>',
            f"<title>{escape(head[0])}</title>",
            f'<rect class="paper" width="{width:.0f}" height="{height:.0f}" rx="8" fill="#ffffff" stroke="#d5d9e0"/>',
            _said(24, 30, head[0], 15, _INK, bold=True),
        ]
        parts += [_said(24, 48 + 15 * at, text, _SMALL, _FAINT) for at, text in enumerate(head[1:])]
        parts += _legend(24, top - 26, {kernel.kind for kernel in told.kernels})
        parts.append(f'<g transform="translate({(width - self.width) / 2:.1f} {top:.1f})">')
        blocks = [block for layer in self.layers for block in layer]
        parts += [text for block in blocks for text in _kernel_svg(block)]
        parts += [text for block in blocks for text in _inside_svg(block)]
        parts += self._lines_svg()
        parts += [_box_svg(box, block) for block in blocks for box in (*block.nodes, *(le.box for le in block.leaves))]
        parts += self._labels_svg()
        return "\n".join([*parts, "</g>", "</svg>", ""])

    def _bottom(self, layer: int) -> float:
        return max(block.y + block.height for block in self.layers[layer])

    def _lines_svg(self) -> Iterator[str]:
        for line in self.lines:
            x0, x1 = _down(line)
            y0, y1 = line.source.y + line.source.height, line.target.y
            foot = self.feet[line.source.layer]
            middle = (foot + y1) / 2
            path = f"M{x0:.1f} {y0:.1f}V{foot:.1f}"
            path += f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
            passing = line.target.passes
            if passing:
                path += f"V{self.feet[line.target.layer]:.1f}"
            entry = 0.0 if passing else _entry(line.target, line.name)
            if entry:
                path += f"V{y1 + entry:.1f}"
            arrow = not passing and not any(
                lane.name == line.name and lane.start < 0 for lane in line.target.lanes
            )  # fmt: skip
            yield _path(path, 2.2, line.name)
            if arrow:
                yield _arrow(x1, y1 + entry, "down", 2.2)

    def _labels_svg(self) -> Iterator[str]:
        seen: dict[_Block, int] = {}
        for line in self.lines:
            if line.label:
                x0, _ = _down(line)
                at = seen.setdefault(line.source, 0)
                seen[line.source] += 1
                y = self._bottom(line.source.layer) + 11 + 13 * at
                yield _said(x0 - 5, y, line.label, 9.5, _FAINT, anchor="end", halo=True)


def _node_box(node: NodeReport) -> _Box:
    first = node.results[0]
    more = f" x{len(node.results)}" if len(node.results) > 1 else ""
    title = cut(f"{node.op} {node.details}".strip(), _MOST_LETTERS)
    name = "" if node.name == node.op else f"{cut(node.name, 22)} "
    hint = f"{', '.join(map(str, node.results))} = {node.call}"
    return _Box("node", (title, f"{name}{first.form}{more}"), hint)


def _head(kernel: KernelReport) -> tuple[str, ...]:
    """What stands over a kernel's nodes."""
    if kernel.number is None:
        return ("view",)
    return f"kernel {kernel.number}  {seconds_text(kernel.seconds)}", kernel.engine


def _coloured(lanes: list[_Lane]) -> int:
    """Give each lane a place such that those which run side by side are apart; how many places there are."""
    ends: list[int] = []
    for lane in sorted(lanes, key=lambda each: (each.start, each.end)):
        at = next((at for at, end in enumerate(ends) if end < lane.start), len(ends))
        ends[at : at + 1] = [lane.end]
        lane.at = at
    return len(ends)


def _port(line: _Line, order: float, side: str) -> float:
    """A place within a layer that tells lines of one block apart."""
    block = line.source if side == "bottoms" else line.target
    return order + 1e-3 * getattr(block, side)[line.name] / max(block.width, 1.0)


def _down(line: _Line) -> tuple[float, float]:
    """Where a line begins and ends across."""
    return line.source.x + line.source.bottoms[line.name], line.target.x + line.target.tops[line.name]


def _entry(block: _Block, name: str) -> float:
    """How far below the upper edge of a block a line ends: at its first node, unless a lane goes on from the edge."""
    return block.nodes[0].y if block.kernel is not None and not _on_lane(block, name) else 0.0


def _on_lane(block: _Block, name: str) -> bool:
    return any(lane.name == name and lane.start < 0 for lane in block.lanes)


def _wish(block: _Block, lines: Iterable[_Line], down: bool) -> tuple[float, float]:
    """Where a block would stand if its lines to the layer above (or below) were straight, and how much that counts:
    from kernel to kernel the most. All are drawn to a middle axis, or a chain would drift aside with each branch."""
    ports = block.tops if down else block.bottoms
    middle = next(iter(ports.values()), block.width / 2)
    weight = _PULL if block.kernel else 0.0
    total = -middle * weight
    for line in lines:
        if (line.target if down else line.source) is block:
            begin, end = _down(line)
            counts = 1.0 if line.source.kernel and line.target.kernel else _LITTLE
            total += counts * (block.x + (begin - end if down else end - begin))
            weight += counts
    return (total / weight, weight) if weight else (block.x, _LITTLE)


def _packed(layer: list[_Block]) -> list[float]:
    """Left edges of blocks that stand as close as they may."""
    places = [0.0]
    for block, other in pairwise(layer):
        places.append(places[-1] + block.width + (_PASSING if block.passes or other.passes else _APART))
    return places


def _spread_out(layer: list[_Block], wishes: list[tuple[float, float]]) -> None:
    """The places nearest to the wishes, by squares, at which blocks keep their order and distance: wishes less what the
    blocks before take must not fall, so runs that do are joined at their mean."""
    offsets = _packed(layer)
    runs: list[tuple[float, float, int]] = []
    for offset, (wish, weight) in zip(offsets, wishes, strict=True):
        mean, count = wish - offset, 1
        while runs and runs[-1][0] > mean:
            other, more, many = runs.pop()
            mean = (mean * weight + other * more) / (weight + more)
            weight, count = weight + more, count + many
        runs.append((mean, weight, count))
    places = [mean for mean, _, count in runs for _ in range(count)]
    for block, offset, place in zip(layer, offsets, places, strict=True):
        block.x = place + offset


# -- SVG of the parts -------------------------------------------------------------------------------------------------


def _said(
    x: float, y: float, text: str, size: float, colour: str, *, bold: bool = False, anchor: str = "start",
    halo: bool = False,
) -> str:  # fmt: skip
    more = ' font-weight="600"' if bold else ""
    more += f' text-anchor="{anchor}"' if anchor != "start" else ""
    more += ' paint-order="stroke" stroke="#ffffff" stroke-width="3"' if halo else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}"{more}>{escape(text)}</text>'


def _path(path: str, width: float, name: str) -> str:
    kind = "stored" if width > 2 else "fused"
    shown = f"<title>{escape(name)}</title>"
    return f'<path class="{kind}" d="{path}" fill="none" stroke="{_LINE}" stroke-width="{width}">{shown}</path>'


def _arrow(x: float, y: float, way: str, width: float) -> str:
    size = 3.0 + width
    ends = {"down": (-size / 2, -size, size, 0, -size / 2, size), "left": (size, -size / 2, 0, size, -size, -size / 2),
            "right": (-size, -size / 2, 0, size, size, -size / 2)}[way]  # fmt: skip
    a, b, c, d, e, f = ends
    return f'<path class="arrow" d="M{x:.1f} {y:.1f}l{a} {b}l{c} {d}l{e} {f}z" fill="{_LINE}"/>'


def _kernel_svg(block: _Block) -> Iterator[str]:
    """The coloured box of a kernel and what stands over its nodes."""
    kernel = block.kernel
    if kernel is None:
        return
    fill, line = _FILLS.get(kernel.kind, _OTHER)
    left = block.x + block.inner[0]
    dashes = ' stroke-dasharray="4 3"' if kernel.number is None else ""
    cost = f"{kernel.computes}: {bytes_text(kernel.moved)}"
    hint = "\n".join(
        [cost, kernel.text, *([f"[{kernel.knobs}]"] if kernel.knobs else []), *kernel.steps, *kernel.notes]
    )
    yield (
        f'<rect class="kernel" x="{left:.1f}" y="{block.y:.1f}" width="{block.width - block.inner[0]:.1f}" '
        f'height="{block.height:.1f}" rx="8" fill="{fill}" stroke="{line}"{dashes}><title>{escape(hint)}</title></rect>'
    )
    for at, text in enumerate(_head(kernel)):
        yield _said(left + _PAD, block.y + 15 + 14 * at, text, _SMALL, _INK if at == 0 else _FAINT, bold=at == 0)


def _inside_svg(block: _Block) -> Iterator[str]:
    """The lines inside a block: from node to node, from what stands at its left, and along its lanes."""
    kernel = block.kernel
    if kernel is None:
        return
    x, y = block.x, block.y
    side, column, lane_at = block.inner
    for row, (box, node) in enumerate(zip(block.nodes[1:], kernel.nodes[1:], strict=True)):
        upper = block.nodes[row]
        for result, stored in zip(kernel.nodes[row].results, kernel.nodes[row].stored, strict=True):
            if result.name in node.args:
                middle, width = x + upper.x + upper.width / 2, 2.2 if stored else 1.0
                yield _path(f"M{middle:.1f} {y + upper.y + upper.height:.1f}V{y + box.y:.1f}", width, result.name)
                yield _arrow(middle, y + box.y, "down", width)
    turn = 0
    for leaf in block.leaves:
        box, first = leaf.box, block.nodes[leaf.rows[0]]
        height = y + min(max(box.y + box.height / 2, first.y + 5), first.y + first.height - 5)
        start, from_y = x + box.x + box.width, y + box.y + box.height / 2
        bend = x + side - _SIDE / 2
        yield _path(f"M{start:.1f} {from_y:.1f}H{bend:.1f}V{height:.1f}H{x + first.x:.1f}", 2.2, box.lines[0])
        yield _arrow(x + first.x, height, "right", 2.2)
        if len(leaf.rows) > 1:
            lane = x + column - 8 - 10.0 * turn
            turn += 1
            for row in leaf.rows[1:]:
                other = block.nodes[row]
                at = y + other.y + other.height / 2 - 6
                yield _path(f"M{lane:.1f} {height:.1f}V{at:.1f}H{x + other.x:.1f}", 2.2, box.lines[0])
                yield _arrow(x + other.x, at, "right", 2.2)
    taps: dict[int, int] = {}

    def tap(row: int) -> float:
        """A height at the right of a node that no other line has, as long as there are few."""
        taps[row] = taps.get(row, 0) + 1
        return y + block.nodes[row].y + 6 + 7 * ((taps[row] - 1) % 4)

    for lane_ in sorted(block.lanes, key=lambda each: each.at):
        at = x + lane_at + lane_.at * _LANE
        stored = lane_.start < 0 or lane_.leaves
        width = 2.2 if stored else 1.0
        begin = y
        if lane_.start >= 0:
            source = block.nodes[lane_.start]
            begin = tap(lane_.start)
            yield _path(f"M{x + source.x + source.width:.1f} {begin:.1f}H{at:.1f}", width, lane_.name)
        ends = []
        for row in lane_.rows:
            box, height = block.nodes[row], tap(row)
            ends.append(height)
            yield _path(f"M{at:.1f} {height:.1f}H{x + box.x + box.width:.1f}", width, lane_.name)
            yield _arrow(x + box.x + box.width, height, "left", width)
        end = y + block.height if lane_.leaves else max(ends)
        yield _path(f"M{at:.1f} {begin:.1f}V{end:.1f}", width, lane_.name)


_SHAPES = {
    "node": ("#ffffff", "#7c8798", 5.0), "input": ("#eef1f5", "#4c5a70", 16.0), "constant": ("#f3ece4", "#8d7454", 0.0),
    "output": ("#2f3b4e", "#2f3b4e", 16.0),
}  # fmt: skip


def _box_svg(box: _Box, block: _Block) -> str:
    fill, line, radius = _SHAPES[box.kind]
    x, y = block.x + box.x, block.y + box.y
    ink, faint = (_INK, _FAINT) if box.kind != "output" else ("#ffffff", "#d5dbe5")
    middle = x + box.width / 2
    return "".join(
        [
            f'<g class="{box.kind}"><title>{escape(box.hint)}</title>',
            f'<rect class="{box.kind}" x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" ',
            f'rx="{radius}" fill="{fill}" stroke="{line}"/>',
            _said(middle, y + box.height / 2 - 2, box.lines[0], _TEXT if box.kind == "node" else _SMALL + 0.5, ink,
                  bold=True, anchor="middle"),
            _said(middle, y + box.height / 2 + 11, box.lines[1], _SMALL, faint, anchor="middle"),
            "</g>",
        ]
    )  # fmt: skip


def _legend(x: float, y: float, kinds: set[str]) -> Iterator[str]:
    """What shapes, lines and those colours mean that are there."""
    for kind in ("input", "constant", "output"):
        fill, line, radius = _SHAPES[kind]
        yield f'<rect x="{x}" y="{y}" width="22" height="12" rx="{min(radius, 6)}" fill="{fill}" stroke="{line}"/>'
        yield _said(x + 28, y + 10, kind, _SMALL, _FAINT)
        x += 40 + _wide(kind, _SMALL)
    for text, width in (("in memory", 2.2), ("inside its kernel", 1.0)):
        yield f'<path d="M{x} {y + 6}h22" stroke="{_LINE}" stroke-width="{width}"/>'
        yield _said(x + 28, y + 10, text, _SMALL, _FAINT)
        x += 40 + _wide(text, _SMALL)
    named = {
        "conv": "convolution",
        "matmul": "matrix product",
        "tree": "pointwise",
        "resample": "pooling",
        "view": "view",
    }
    for kind in (kind for kind in named if kind in kinds):
        fill, line = _FILLS[kind]
        yield f'<rect x="{x}" y="{y}" width="12" height="12" rx="3" fill="{fill}" stroke="{line}"/>'
        yield _said(x + 18, y + 10, named[kind], _SMALL, _FAINT)
        x += 30 + _wide(named[kind], _SMALL)
