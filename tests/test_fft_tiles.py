"""Tiles of Fourier transforms: sizes, what each of them holds, and knobs within limits."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openconv.cpu.device import cpu_device
from openconv.cpu.fft import Fft
from openconv.fft_tiles import Form, good_size, runs
from openconv.problem import DIRECTIONS
from openconv.rewrites.base import Wrapper
from openconv.select import Policy, choose, rank
from tests.support import make, problems


@given(st.integers(1, 5000))
def test_a_good_size_is_the_next_even_product_of_small_primes(least):
    def is_good(size):
        for prime in (2, 3, 5, 7):
            while size % prime == 0:
                size //= prime
        return size == 1

    found = good_size(least)
    assert found == next(size for size in range(max(2, least + least % 2), 2 * least + 3, 2) if is_good(size))


@given(
    st.integers(1, 40), st.integers(1, 4), st.integers(-20, 20), st.integers(1, 5), st.integers(1, 12),
    st.integers(0, 6), st.integers(1, 9),
)  # fmt: skip
def test_runs_hold_each_element_at_its_place(size, spread, start, blocks, more, first, count):
    advance, tile = blocks * spread, blocks * spread + more
    found = runs(size, spread, start, advance, tile, tile, range(first, first + count))
    assert [t for run in found for t in range(run.first, run.first + run.count)] == list(range(first, first + count))
    for run in found:
        for t in range(run.first, run.first + run.count):
            place = start + t * advance
            wanted = {e * spread - place: e for e in range(size) if place <= e * spread < place + tile}
            source = run.source + (t - run.first) * run.step
            got = {run.offset + i * run.spacing: source + i for i in range(run.length)}
            assert got == wanted
            assert run.whole == (len(got) == tile)


@given(problems(dtypes=("f32", "f64")))
def test_every_result_is_in_one_tile_and_each_block_is_done_once(problem):
    device = cpu_device(2)
    for knobs in Fft().knobs(problem, device):
        form = Form(problem, knobs)
        assert all(valid >= stride for valid, stride in zip(form.valid, problem.stride, strict=True))
        assert all(valid + reach <= tile for valid, reach, tile in zip(form.valid, form.reach, form.tile, strict=True))
        covered = [(n, t) for images, box in form.chunks for n in images for t in _cells(box)]
        assert len(covered) == len(set(covered)) == problem.n * prod(form.grid)
        assert all(count * valid >= e for count, valid, e in zip(form.grid, form.valid, form.extents, strict=True))
        assert len(form.chunks) == form.chunk_count
        assert len(form.blocks) == form.block_count
        channels = [(g + i, o + j) for g, groups, o, count in form.blocks for i in range(groups) for j in range(count)]
        assert sorted(channels) == [(g, o) for g in range(problem.groups) for o in range(form.outs)]
        assert all(len(box) <= 3 and prod(map(len, box)) <= knobs.tiles for _, box in form.chunks)


def _cells(box):
    cells: list[tuple[int, ...]] = [()]
    for axis in box:
        cells = [(*cell, t) for cell in cells for t in axis]
    return cells


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "text",
    [
        "n1 c64 w64000 k64 s1024",
        "n1 c1 h1000 w1000 k1 r131 s131 pad65",
        "n1 c3 h1000 w1000 k3 r131 s131 pad65 g3",
        "n1 c1 w80000 k1 s16000 pad15999:0",
        "n1 c1 w9000000 k1 s4096",
        "n1 c512 w100000 k512 s1024",
        "n64 c1 h4000 w4000 k1 r63 s63 pad31",
    ],
)
def test_memory_is_bounded_and_a_long_filter_chooses_it(direction, text):
    problem = make(text, direction)
    device = cpu_device(2)
    # Rewrites lead to it as well, and a filter that is a column times a row has a quicker way yet.
    chosen = next(c for c in rank(problem, device, Policy(tuning="off"))[0] if not isinstance(c.engine, Wrapper))
    assert chosen.engine.name == "cpu.fft"
    assert chosen.workspace <= 256 << 20
    less = choose(problem, device, Policy(tuning="off", engine="cpu.fft", max_workspace=chosen.workspace // 4))
    assert less.workspace <= chosen.workspace // 4


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "text",
    [
        "n1 c64 h56 w56 k64 r3 s3 pad1",
        "n8 c512 h7 w7 k512 r3 s3 pad1",
        "n1 c1 h1024 w2048 k1 r5 s5 pad2",
        "n1 c96 h56 w56 k96 r7 s7 pad3 g96",
        "n1 c512 w999 k512 s3 stride2",
        "n1 c64 h56 w56 k64 r1 s1",
        "n1 c3 h224 w224 k64 r7 s7 stride2 pad3",
        "n1 c512 w3999 k512 s3 pad128 dil128 g512",
    ],
)
def test_small_filters_do_not_choose_it(direction, text):
    assert choose(make(text, direction), cpu_device(2), Policy(tuning="off")).engine.name != "cpu.fft"
