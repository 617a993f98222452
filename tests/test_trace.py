"""Traces say what the definition says: every product once, every result once, out of memory that holds it."""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import cache
from math import prod
from typing import Any

import numpy as np
import pytest

from openconv.cuda import igemm
from openconv.cuda.device import device_for
from openconv.cuda.im2col_gemm import _panel
from openconv.cuda.winograd import Chunk
from openconv.engine import engine_named, engines
from openconv.problem import DIRECTIONS, DTYPE_BYTES, Problem
from openconv.trace.model import Move, Trace, element, elements, products, spread, totals
from openconv.trace.tracers import TRACERS, reasons_against, search_space, trace_engine

DEVICE = device_for("sm_90a")
NARROW = replace(DEVICE, threads=2)  # blocks have several tiles each
_NONE = np.zeros(0, np.int64)
PLAIN = [name for name in TRACERS if name != "cuda.winograd"]

# Overhanging tiles, several of them, ends that differ, groups, one axis and two, images in a batch.
PROBLEMS = (
    "n1 c8 h6 w6 k8 r3 s3 pad1",
    "n2 c8 h5 w7 k8 r3 s2 stride2,1 pad0:1,2 dil1,2",
    "n1 c8 h9 w8 k8 r3 s3 stride2 pad1 g2",
    "n2 c8 h7 w7 k8 r3 s3 pad1 g8",
    "n1 c3 h6 w9 k5 r2 s3 pad1",
    "n2 c8 w13 k16 s3 pad1",
    "n1 c8 w11 k8 s5 stride2 pad2 dil2",
    "n1 c4 h4 w40 k8 r3 s3 pad1",
    "n1 c16 h5 w6 k24 r1 s1",
    "n1 c8 h8 w8 k8 r5 s5 pad2",
)
TALL = "n1 c2 h12 w40 k2 r3 s3 pad1"


def problems(seed: int, count: int) -> list[str]:
    """Random ones, as text without pass, dtype and layout."""
    rnd = random.Random(seed)
    found: list[str] = []
    while len(found) < count:
        rank, groups = rnd.choice((1, 2, 2)), rnd.choice((1, 1, 2, 4))
        c, k = groups * rnd.choice((1, 2, 4, 8)), groups * rnd.choice((1, 2, 8))
        sizes = "".join(f" {name}{rnd.randint(2, 9)}" for name in "hw"[-rank:])
        taps = "".join(f" {name}{rnd.choice((1, 2, 3, 5))}" for name in "rs"[-rank:])
        text = f"n{rnd.choice((1, 2))} c{c}{sizes} k{k}{taps} stride{rnd.choice((1, 1, 2, 3))}"
        text += f" pad{rnd.choice((0, 1, 2))} dil{rnd.choice((1, 1, 2))} g{groups}"
        try:
            Problem.parse(f"fprop {text}")
        except ValueError:
            continue
        found.append(text)
    return found


def traces(name: str, text: str, seed: int = 0) -> list[Trace]:
    """Of all passes that the engine takes, with the default knobs, and with others on a device of few blocks."""
    rnd, found = random.Random(f"{seed}{text}"), []
    for direction in DIRECTIONS:
        layout = rnd.choice(("nchw", "nhwc"))
        problem = Problem.parse(f"{direction} {text} f16 {layout}")
        if reasons_against(problem, name, DEVICE):
            continue
        space = search_space(problem, name, DEVICE)
        found.append(trace_engine(problem, name, DEVICE, space[0]))
        if len(space) > 1:
            found.append(trace_engine(problem, name, NARROW, rnd.choice(space[1:])))
    return found


@cache
def definition(text: str) -> frozenset[tuple[int, int, int]]:
    """All products of a convolution, whichever pass adds them up, as elements of x, w and y."""
    problem = Problem.parse(f"fprop {text}")
    cg, kg, found = problem.c // problem.groups, problem.k // problem.groups, []
    for out in itertools.product(*map(range, problem.out)):
        for tap in itertools.product(*map(range, problem.filter)):
            x_place = w_place = y_place = 0
            inside = True
            for axis, (p, r) in enumerate(zip(out, tap)):
                h = p * problem.stride[axis] - problem.padding[axis][0] + r * problem.dilation[axis]
                inside &= 0 <= h < problem.spatial[axis]
                x_place = x_place * problem.spatial[axis] + h
                w_place = w_place * problem.filter[axis] + r
                y_place = y_place * problem.out[axis] + p
            for n, k, c in itertools.product(range(problem.n), range(problem.k), range(cg)) if inside else ():
                found.append((
                    (n * problem.c + k // kg * cg + c) * prod(problem.spatial) + x_place,
                    (k * cg + c) * prod(problem.filter) + w_place,
                    (n * problem.k + k) * prod(problem.out) + y_place,
                ))  # fmt: skip
    assert len(set(found)) == len(found)
    return frozenset(found)


def check_stores(trace: Trace) -> None:
    moved = [
        elements(trace, block, move)
        for block, step in trace.steps()
        for move in step.stores
        if move.tensor == trace.result
    ]
    stored = np.sort(np.concatenate(moved))
    assert np.array_equal(stored, np.arange(prod(trace.problem.result_shape))), f"{trace.problem} {trace.knobs}"


def check_products(trace: Trace, text: str) -> None:
    every = [products(trace.problem, block, step.terms) for block, step in trace.steps() if step.terms is not None]
    found = np.stack([np.concatenate(tensor) for tensor in zip(*every)])
    expected = np.array(sorted(definition(text))).T
    assert np.array_equal(found[:, np.lexsort(found[::-1])], expected), f"{trace.problem} {trace.knobs}"


def check_memory(trace: Trace) -> None:
    """What is multiplied lies in a slot of the block's shared memory, or comes to registers in the same step or the one
    before, or was written to a workspace by an earlier launch that had loaded it."""
    written = dict.fromkeys("xwy", _NONE)
    slots: dict[tuple[int, tuple[int, ...]], dict[str, tuple[str, Any]]] = {}
    kept: dict[str, Any] = {}
    previous = None
    for block, step in trace.steps():
        if (block.launch, block.index) != previous:
            kept, previous = {}, (block.launch, block.index)
        held = slots.setdefault((block.launch, block.index), {})
        for move in step.loads:
            there = elements(trace, block, move)
            if move.to == "shared":
                held[move.slot] = (move.tensor, there)
            elif move.tensor in "xwy":
                kept[move.tensor] = there
            else:  # a workspace, which holds what was loaded to write it
                tensor = "x" if move.tensor in ("columns", "the copy of x") else "y" if "dy" in move.tensor else "w"
                kept[tensor] = written[tensor]
        if any(move.tensor in trace.sizes for move in step.stores):
            for tensor, there in kept.items():
                written[tensor] = np.union1d(written[tensor], there)
        if step.terms is None:
            continue
        used = dict(zip("xwy", products(trace.problem, block, step.terms)))
        del used[trace.result]
        for tensor, index in used.items():
            lies = np.zeros(prod(getattr(trace.problem, f"{tensor}_shape")), bool)
            for there in (kept.get(tensor, _NONE), *(there for name, there in held.values() if name == tensor)):
                lies[there] = True
            assert lies[index].all(), f"{trace.problem} {trace.knobs}: {tensor} of '{step.text}'"


@pytest.mark.parametrize("name", PLAIN)
def test_every_product_once_and_every_result_once_out_of_what_was_loaded(name):
    seen = 0
    for text in (*PROBLEMS, *problems(3, 6)):
        for trace in traces(name, text):
            check_products(trace, text)
            check_stores(trace)
            check_memory(trace)
            seen += 1
    assert seen >= (16 if name == "cuda.igemm_sm90" else 30)


@pytest.mark.parametrize(
    "text", ["n3 c4 h6 w6 k4 r3 s3 pad1 g2", "n2 c6 h5 w7 k4 r2 s3 pad1 stride2", "n2 c4 w9 k4 s3"]
)
def test_columns_in_many_panels(text):
    for direction, layout, budget in itertools.product(DIRECTIONS, ("nchw", "nhwc"), (1, 300, 3000)):
        problem = Problem.parse(f"{direction} {text} f16 {layout}")
        trace = TRACERS["cuda.im2col_gemm"].trace(problem, DEVICE, _panel(problem, budget))
        check_products(trace, text)
        check_stores(trace)
        check_memory(trace)
        if direction != "dgrad":
            check_columns(trace)


def check_columns(trace: Trace) -> None:
    """What a product reads is what was written since the last one, each column once."""
    written: list[tuple[int, ...]] = []
    panels = 0
    for block, step in trace.steps():
        for moves in (step.loads, step.stores):
            for move in moves:
                if move.tensor != "columns":
                    continue
                values, there = spread(move.over(block))
                every = [np.broadcast_to(values[name], there.shape)[there].tolist() for name in sorted(values)]
                columns = list(zip(*every))
                if moves is step.stores:
                    written += columns
                    continue
                assert sorted(written) == sorted(columns), f"{trace.problem} {trace.knobs}"
                written, panels = [], panels + 1
    assert panels > 0
    assert written == []


def test_slots_are_filled_again_when_a_block_has_several_tiles():
    text, again = "n2 c128 h6 w5 k64 r3 s2 pad1", 0
    for direction in ("fprop", "dgrad"):
        problem = Problem.parse(f"{direction} {text} f16 nhwc")
        for knobs in search_space(problem, "cuda.igemm_sm90", NARROW):
            trace = trace_engine(problem, "cuda.igemm_sm90", NARROW, knobs)
            slots = Counter((block.index, move.slot) for block, step in trace.steps() for move in step.loads)
            again += max(slots.values()) > 2
            check_memory(trace)
            check_stores(trace)
    assert again >= 2


def test_steps_are_as_many_as_the_engine_counts():
    for text in PROBLEMS:
        for direction in DIRECTIONS:
            problem = Problem.parse(f"{direction} {text} f16 nhwc")
            for knobs in search_space(problem, "cuda.igemm", DEVICE)[:4]:
                trace = trace_engine(problem, "cuda.igemm", DEVICE, knobs)
                counts = [sum(step.terms is not None for step in block.steps) for block in trace.blocks]
                work = igemm._work(problem, knobs, True)
                assert max(counts) == -(-work.longest // knobs.splits), f"{problem} {knobs}"
                assert all(len(step.terms[0]) == knobs.depth for _, step in trace.steps() if step.terms)


# -- Winograd: a sum of transformed products is the plain sum ---------------------------------------------------------


def coefficients(trace: Trace) -> dict[tuple[int, ...], Fraction]:
    """With what factor each product of an element of x, w and dy or y goes into the result, by the transforms along
    each axis and the tiles that threads read and store."""
    problem = trace.problem
    found: dict[tuple[int, ...], Fraction] = {}
    matrices = trace.transforms
    assert matrices is not None
    at, g, bt = (
        [[[Fraction(value) for value in row] for row in one] for one in each]
        for each in (matrices.at, matrices.g, matrices.bt)
    )
    reads: dict[Any, Any] = {}
    seconds: dict[Any, Any] = {}
    writes: dict[Any, Any] = {}
    for block, step in trace.steps():
        if not trace.launches[block.launch].grid:
            continue
        for move in (*step.loads, *step.stores):
            if move.tensor not in ("x", "w", "y"):
                continue
            walks = move.over(block)
            values, there = spread(walks)
            index, inside = element(problem, move.tensor, values)
            index = np.where(inside & there, index, -1)
            ids, exists = spread(walks[:1])
            into = (
                writes if move in step.stores else (reads if step.stores[0].tensor == "transformed tiles" else seconds)
            )
            for position in np.flatnonzero(exists):
                # A tile's key: its image and corner, and its channel.
                key = {name: int(value[position]) for name, value in ids.items()}
                into[tuple(sorted(key.items()))] = index[position]
    corner = {"fprop": "opq", "dgrad": "dhw", "wgrad": "opq"}[problem.direction][-problem.rank :]

    def places(key: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
        values = dict(key)
        return tuple(values[name] for name in ("n", *corner))

    def factor(i: tuple[int, ...], j: tuple[int, ...], l: tuple[int, ...]) -> Fraction:
        found = Fraction(1)
        for axis in range(problem.rank):
            found *= sum(
                (at[axis][i[axis]][p] * g[axis][p][j[axis]] * bt[axis][p][l[axis]] for p in range(len(bt[axis]))),
                Fraction(0),
            )
        return found

    inner, outer = ("k", "c") if problem.direction == "dgrad" else ("c", "k")
    memo: dict[Any, Fraction] = {}
    for key, tile in reads.items():
        channel = dict(key)[inner]
        if problem.direction == "wgrad":
            partners = [(dict(k)["k"], v) for k, v in seconds.items() if places(k) == places(key)]
            pairs = [(v, writes[tuple(sorted({"k": k, "c": channel}.items()))]) for k, v in partners]
        else:
            targets = [(dict(k)[outer], v) for k, v in writes.items() if places(k) == places(key)]
            pairs = [(seconds[tuple(sorted({inner: channel, outer: o}.items()))], v) for o, v in targets]
        for second, result in pairs:
            if problem.direction == "dgrad":
                second = np.flip(second)
            for i, j, l in itertools.product(
                np.ndindex(result.shape), np.ndindex(second.shape), np.ndindex(tile.shape)
            ):
                if min(result[i], second[j], tile[l]) < 0:
                    continue
                if (i, j, l) not in memo:
                    memo[i, j, l] = factor(i, j, l)
                if value := memo[i, j, l]:
                    three = int(result[i]), int(second[j]), int(tile[l])
                    order = {"fprop": (2, 1, 0), "dgrad": (0, 1, 2), "wgrad": (2, 0, 1)}[problem.direction]
                    triple = tuple(three[at] for at in order)
                    found[triple] = found.get(triple, Fraction(0)) + value
    return {triple: value for triple, value in found.items() if value}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", ["n1 c2 h5 w6 k2 r3 s3 pad1", "n2 c2 w9 k3 s3 pad0:1", "n1 c1 h4 w7 k2 r3 s1 pad1,0"])
def test_winograd_comes_to_the_plain_sum(direction, text):
    for layout in ("nchw", "nhwc"):
        problem = Problem.parse(f"{direction} {text} f16 {layout}")
        trace = trace_engine(problem, "cuda.winograd", DEVICE)
        check_stores(trace)
        assert coefficients(trace) == dict.fromkeys(definition(text), 1)


def test_winograd_in_chunks():
    text = "n2 c2 h5 w6 k2 r3 s3 pad1"
    for direction, layout, tiles in [
        *itertools.product(DIRECTIONS, ["nhwc"], [4, 9]),
        *itertools.product(DIRECTIONS, ["nchw"], [9]),
    ]:
        problem = Problem.parse(f"{direction} {text} f16 {layout}")
        trace = trace_engine(problem, "cuda.winograd", DEVICE, Chunk(4, tiles))
        check_stores(trace)
        assert coefficients(trace) == dict.fromkeys(definition(text), 1)
    with pytest.raises(ValueError, match="cuts an image's 9 tiles"):
        trace_engine(Problem.parse(f"fprop {text} f16 nchw"), "cuda.winograd", DEVICE, Chunk(4, 4))


# -- the engines' own numbers -----------------------------------------------------------------------------------------


class Recorded:
    """In the place of a launch: keeps what it is given."""

    seen: list[tuple[Any, ...]]

    def __init__(self, source, name, device, grid, block, params, shared=0, *rest, **more):
        self.seen.append((name, tuple(grid), tuple(block), shared, source.file))


@pytest.mark.parametrize("name", TRACERS)
def test_grids_blocks_and_shared_memory_are_those_of_the_launches(name, monkeypatch):
    engines("cuda")
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("openconv.cuda.") and hasattr(module, "Launch"):
            monkeypatch.setattr(module, "Launch", Recorded)
    compared = 0
    for text in (*PROBLEMS, *problems(5, 10)):
        for direction, layout in itertools.product(DIRECTIONS, ("nchw", "nhwc")):
            problem = Problem.parse(f"{direction} {text} f16 {layout}")
            if reasons_against(problem, name, DEVICE):
                continue
            for knobs in search_space(problem, name, DEVICE)[:3]:
                Recorded.seen = []
                engine_named(name).build(problem, DEVICE, knobs)
                trace = trace_engine(problem, name, DEVICE, knobs)
                said = {
                    (launch.name, launch.grid, launch.block, launch.shared if name.startswith("cuda.igemm") else 0,
                     launch.source.rsplit("/", 1)[-1])
                    for launch in trace.launches if launch.grid
                }  # fmt: skip
                assert said == set(Recorded.seen), f"{problem} {knobs}"
                for launch in trace.launches:
                    at = trace.launches.index(launch)
                    own = {block.index for block in trace.blocks if block.launch == at and block.index}
                    if own:
                        assert own == set(np.ndindex(launch.grid)), f"{problem} {knobs}: {launch.name}"
                compared += 1
    assert compared >= 10


def test_the_last_knobs_of_the_search_space_are_traced_as_well():
    problem = Problem.parse(f"fprop {TALL} f16 nhwc")
    trace = trace_engine(problem, "cuda.tiled", DEVICE, "rows=1 filters=1")
    assert trace.knobs == "rows=1 filters=1"
    assert trace.launches[0].grid == (4, 2)  # two tiles of 8 rows down, two of 32 columns across; a filter each
    check_products(trace, TALL)


# -- what is counted --------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_elements_that_move():
    problem = Problem.parse("fprop n1 c2 h6 w6 k4 r3 s3 pad1 f32 nchw")
    naive = totals(trace_engine(problem, "cuda.naive", DEVICE))
    # 6 * 6 windows of 3 x 3 taps, of which 16 * 9 + 16 * 6 + 4 * 4 are inside of the image.
    inside = 4 * 4 * 9 + 4 * 4 * 6 + 4 * 4
    assert naive.products == inside * 2 * 4
    assert naive.loaded == {"x": 4 * inside * 2 * 4, "w": 4 * 36 * 9 * 2 * 4}
    assert naive.stored == {"y": 4 * 4 * 36}
    for direction in ("dgrad", "wgrad"):  # these skip what lies on the padding
        other = totals(trace_engine(problem.with_(direction=direction), "cuda.naive", DEVICE))
        assert other.products == naive.products
        assert set(other.loaded.values()) == {4 * naive.products}
    tiled = totals(trace_engine(problem, "cuda.tiled", DEVICE))
    assert tiled.products == naive.products
    assert tiled.loaded == {"x": 4 * 2 * 36, "w": 4 * 2 * 4 * 9}
    assert tiled.reuse > 20 * naive.reuse


@pytest.mark.parametrize("name", TRACERS)
def test_totals_are_the_sums_over_steps(name):
    trace = trace_engine(Problem.parse("fprop n1 c8 h8 w8 k8 r3 s3 pad1 f16 nhwc"), name, DEVICE)
    found = totals(trace)
    loaded: Counter[str] = Counter()
    for block, step in trace.steps():
        for move in step.loads:
            size = trace.sizes.get(move.tensor) or DTYPE_BYTES["f16"]
            loaded[move.tensor] += size * len(elements(trace, block, move))
    assert found.loaded == dict(loaded)
    assert found.products + found.points > 0
    assert found.stored["y"] == 2 * 8 * 64


def test_padding_is_brought_by_nothing():
    trace = trace_engine(Problem.parse("fprop n1 c1 h4 w4 k1 r3 s3 pad1 f32 nchw"), "cuda.tiled", DEVICE)
    block = trace.blocks[0]
    tile = block.steps[0].loads[0]
    assert isinstance(tile, Move)
    assert prod(len(walk) for walk in tile.over(block)) == 34 * 10
    assert len(elements(trace, block, tile)) == 16


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("fprop n1 c8 h6 w6 k8 r3 s3 f16 nhwc", "cuda.fft", "there is no trace of cuda.fft"),
        ("fprop n1 c8 h6 w6 k8 r3 s3 f16 nhwc", "cuda.nothing", "there is no engine 'cuda.nothing'"),
        ("fprop n1 c4 w9 k4 s3 f32", "cuda.tiled", "has 1 spatial axes"),
        ("dgrad n1 c4 h9 w9 k4 r3 s3 stride2 f32", "cuda.tiled", "stride is (2, 2)"),
        ("fprop n1 c8 h6 w6 k8 r1 s1 f16 nhwc", "cuda.igemm_sm90", "taps that share their input"),
        ("wgrad n1 c8 h6 w6 k8 r3 s3 f16 nhwc", "cuda.igemm_sm90", "lines with their halo are for fprop and dgrad"),
        ("fprop n1 c8 h6 w6 k8 r3 s3 f16 nhwc +relu", "cuda.igemm", "'+relu' is computed beside the products"),
        ("fprop n8 c64 h56 w56 k64 r3 s3 f16 nhwc", "cuda.igemm", "a trace takes up to"),
        ("fprop n0 c8 h6 w6 k8 r3 s3 f16 nhwc", "cuda.naive", "empty tensor"),
    ],
)
def test_what_cannot_be_traced_says_why(text, name, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        trace_engine(Problem.parse(text), name, DEVICE)


def test_unknown_knobs_name_those_there_are():
    problem = Problem.parse("fprop n1 c8 h6 w6 k8 r3 s3 f16 nhwc")
    with pytest.raises(ValueError, match=r"rows=9.*it has rows="):
        trace_engine(problem, "cuda.tiled", DEVICE, "rows=9")
