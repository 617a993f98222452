"""Pooling kernels, both passes: every mode, layout, dtype and number of axes against torch in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from openconv.cuda import jit
from openconv.cuda import pool as pool_module
from openconv.cuda.device import ARCHITECTURES, device_for
from openconv.cuda.pool import PoolBackward, PoolForward, seconds, sources
from openconv.pool import Pool
from openconv.pooling import reference_backward, reference_forward
from openconv.tensors import DTYPES

GPU = device_for("sm_90a")


def make(**fields: Any) -> Pool:
    """Also of one int for all axes."""
    return Pool(**fields)


POOLS = {
    "overlapping": make(mode="max", window=(3, 3), stride=(2, 2), padding=1, n=2, c=8, spatial=(9, 8)),
    "each-pixel": make(mode="max", window=(6, 7), stride=(1, 1), padding=((2, 3),), n=1, c=2, spatial=(8, 9)),
    "asymmetric": make(mode="max", window=(2, 4), stride=(1, 3), padding=((0, 1), (3, 1)), n=2, c=3, spatial=(6, 7)),
    "disjoint": make(mode="max", window=(2, 2), stride=(2, 2), n=2, c=16, spatial=(7, 9)),
    "gaps": make(mode="max", window=(2, 1), stride=(3, 4), padding=((1, 0), (0, 0)), n=1, c=5, spatial=(9, 10)),
    "line": make(mode="max", window=(4,), stride=(3,), padding=((1, 2),), n=3, c=4, spatial=(13,)),
    "volume": make(mode="max", window=(2, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1), n=1, c=4, spatial=(4, 6, 5)),
    "disjoint-volume": make(mode="max", window=2, stride=2, padding=((1, 0),), n=1, c=2, spatial=(3, 4, 5)),
    "many-places": make(mode="max", window=(9, 8), stride=(2, 3), padding=((4, 2), 3), n=1, c=8, spatial=(13, 12)),
    "all": make(mode="max", window=(9, 11), stride=(1, 1), n=3, c=8, spatial=(9, 11)),
    "more-than-a-byte": make(mode="max", window=(17, 19), stride=(5, 1), padding=((2, 8),), n=1, c=3, spatial=(20, 17)),
}
CASES = (
    # every mode in both layouts, and every dtype
    *("overlapping max nchw f16", "overlapping max nhwc f16", "overlapping avg nchw f64", "overlapping avg nhwc bf16"),
    *("overlapping avg_exclude nchw f32", "disjoint max nchw f32", "disjoint max nhwc bf16"),
    # loops, some of whose windows are all of the image
    *("many-places max nchw f32", "many-places max nhwc f16", "many-places avg_exclude nhwc f32"),
    *("all max nchw f32", "all max nhwc f16", "all avg_exclude nhwc f32", "more-than-a-byte max nchw f32"),
    # sizes, padding and strides of other kinds
    *(
        "each-pixel max nhwc f64",
        "each-pixel avg nchw f32",
        "asymmetric max nchw f32",
        "asymmetric avg_exclude nhwc f32",
    ),
    *("gaps max nchw f32", "line max nhwc f32", "volume max nhwc f32"),
    *("volume avg_exclude nchw bf16", "disjoint-volume max nchw f64"),
)


def held(pool: Pool, sizes: tuple[int, ...], shift: int = 0) -> Tensor:
    """A poisoned tensor in the pool's layout, as torch's indices have it; its memory starts ``shift`` elements late."""
    last = pool.layout == "nhwc"
    shape = (pool.n, *sizes, pool.c) if last else (pool.n, pool.c, *sizes)
    count = pool.n * pool.c * torch.Size(sizes).numel()
    memory = torch.full((count + shift,), torch.nan, dtype=DTYPES[pool.dtype])[shift:].view(shape)
    return memory.movedim(-1, 1) if last else memory


def check(pool: Pool, *, special: bool = False, shift: int = 0, **knobs: int) -> None:
    """Both passes. x has many equal values, and ``special`` ones: NaN and windows of nothing but -inf."""
    generator = torch.Generator().manual_seed(1)
    x, y, dy, dx = (held(pool, sizes, shift) for sizes in (pool.spatial, pool.out, pool.out, pool.spatial))
    x.copy_(torch.randint(-3, 4, pool.x_shape, generator=generator))
    dy.copy_(torch.randn(pool.y_shape, generator=generator))
    if special:
        pick = torch.rand(pool.x_shape, generator=generator)
        x[pick < 0.1] = torch.nan
        x[pick > 0.4] = -torch.inf
    PoolForward(pool, GPU, **knobs)(x.data_ptr(), y.data_ptr())
    backward = PoolBackward(pool, GPU, **knobs)
    workspace = torch.full((backward.workspace_bytes,), 113, dtype=torch.uint8)
    backward(dy.data_ptr(), x.data_ptr(), dx.data_ptr(), workspace.data_ptr())

    exact = replace(pool, dtype="f64")
    wanted_y = reference_forward(exact, x.double())
    wanted_dx = reference_backward(exact, dy.double(), x.double())
    if pool.mode == "max":
        torch.testing.assert_close(y.double(), wanted_y, rtol=0, atol=0, equal_nan=True)
    # f32 (f64) sums of as many as there are places; one rounding to the result's dtype.
    eps = torch.finfo(torch.float64 if pool.dtype == "f64" else torch.float32).eps
    close: dict[str, Any] = {
        "rtol": torch.finfo(x.dtype).eps / 2 + 4 * eps,
        "atol": 8 * pool.taps**0.5 * eps,
        "equal_nan": True,
    }
    torch.testing.assert_close(y.double(), wanted_y, **close)
    torch.testing.assert_close(dx.double(), wanted_dx, **close)


def named(case: str) -> Pool:
    name, mode, layout, dtype = case.split()
    return replace(POOLS[name], mode=mode, layout=layout, dtype=dtype)


@pytest.mark.parametrize("case", CASES)
def test_both_passes(case):
    """Ties too: the first of equal values is chosen."""
    check(named(case))


@pytest.mark.parametrize("case", [case for case in CASES if " max " in case])
def test_nan_and_minus_infinity(case):
    """The last NaN is chosen, and of a window of nothing but -inf the first place inside."""
    check(named(case), special=True)


@pytest.mark.parametrize("case, rows", [("max nhwc f16", 4), ("avg_exclude nchw f32", 2)])
def test_several_rows_of_a_thread(case, rows):
    """5 rows of y, whose windows share rows of x."""
    check(named(f"overlapping {case}"), rows=rows, special="max" in case)


@pytest.mark.parametrize("case, parts", [("max nhwc f16", 4), ("avg_exclude nhwc f32", 1)])
def test_several_threads_of_a_window(case, parts):
    check(named(f"many-places {case}"), parts=parts, special="max" in case)


@pytest.mark.parametrize("case", ["overlapping max nhwc f16", "disjoint max nhwc bf16", "overlapping avg nchw f64"])
def test_memory_that_no_vector_can_start_at(case):
    check(named(case), shift=1)


@pytest.mark.parametrize("case", ["overlapping avg nchw f64", "disjoint max nhwc bf16"])
def test_numbers_of_threads_beyond_31_bits(case, monkeypatch):
    """Small images by the arithmetic of many."""
    monkeypatch.setattr(pool_module, "_large", lambda pool: True)
    check(named(case))


def test_rows_are_chosen_where_windows_share_them():
    """Many images of 3x3 windows: several rows a thread; few: one, so that all multiprocessors have threads."""
    pool = make(mode="max", window=3, stride=2, padding=1, n=64, c=64, spatial=(112, 112), dtype="f16", layout="nhwc")
    assert "rows = 2;" in sources(pool, GPU)[0].traits
    assert "rows = 4;" in sources(replace(pool, layout="nchw"), GPU)[0].traits
    assert "rows = 1;" in sources(replace(pool, n=1), GPU)[0].traits
    assert "rows = 1;" in sources(replace(pool, window=(2, 2), stride=(2, 2)), GPU)[0].traits


def test_knobs_that_no_kernel_has():
    with pytest.raises(ValueError, match="rows is 3; wanted 1, or 2 or 4"):
        PoolForward(POOLS["overlapping"], GPU, rows=3)
    with pytest.raises(ValueError, match="parts is 4; wanted 1, or a power of two up to 32 of more than 64 places"):
        PoolBackward(POOLS["overlapping"], GPU, parts=4)


def test_same_bits_again():
    pool = replace(POOLS["overlapping"], dtype="f16", layout="nhwc")
    x, dy = torch.randn(pool.n, *pool.spatial, pool.c).half(), torch.randn(pool.n, *pool.out, pool.c).half()
    backward, results = PoolBackward(pool, GPU), []
    for _ in range(2):
        dx, workspace = torch.full_like(x, torch.nan), torch.empty(backward.workspace_bytes, dtype=torch.uint8)
        backward(dy.data_ptr(), x.data_ptr(), dx.data_ptr(), workspace.data_ptr())
        results.append(dx)
    assert torch.equal(*results)


def test_workspace():
    """A byte for each value of y where windows overlap, four where a byte is too few; none otherwise."""
    overlapping, more = POOLS["overlapping"], POOLS["more-than-a-byte"]
    assert PoolBackward(overlapping, GPU).workspace_bytes == 2 * 8 * 5 * 4
    assert PoolBackward(more, GPU).workspace_bytes == 4 * torch.Size(more.y_shape).numel()
    assert PoolBackward(POOLS["disjoint"], GPU).workspace_bytes == 0
    assert PoolBackward(replace(overlapping, mode="avg"), GPU).workspace_bytes == 0
    with pytest.raises(ValueError, match="workspace is at 0x0; wanted 320 bytes"):
        PoolBackward(overlapping, GPU)(256, 256, 256)


def test_no_images():
    pool = replace(POOLS["overlapping"], n=0)
    PoolForward(pool, GPU)(0, 0)
    PoolBackward(pool, GPU)(0, 0, 0)


def test_an_image_of_too_many_places():
    pool = make(mode="avg", window=2, stride=2, n=1, c=1, spatial=(2**16, 2**15))
    with pytest.raises(ValueError, match="plane has 2147483648 elements"):
        PoolForward(pool, GPU)


def test_seconds():
    pool = make(mode="max", window=3, stride=2, padding=1, n=64, c=64, spatial=(112, 112), dtype="f16", layout="nhwc")
    x, y = 64 * 64 * 112 * 112, 64 * 64 * 56 * 56
    moved = 0.9 * GPU.bandwidth
    assert seconds(pool, GPU) == pytest.approx(2e-6 + 2 * (x + y) / moved)
    assert seconds(pool, GPU, backward=True) == pytest.approx(4e-6 + (4 * x + 2 * y + 2 * y) / moved)
    assert seconds(replace(pool, mode="avg"), GPU, backward=True) == pytest.approx(2e-6 + 2 * (x + y) / moved)
    cells = replace(pool, window=(2, 2), padding=((0, 0), (0, 0)))
    assert seconds(cells, GPU, backward=True) == pytest.approx(2e-6 + (4 * x + 2 * y) / moved)


# The kernels that ask for the most registers: two rows, one after the other, loops, and a cell.
HEAVY = (
    make(mode="max", window=3, stride=2, padding=1, n=64, c=64, spatial=(112, 112), dtype="f16", layout="nhwc"),
    make(mode="max", window=2, stride=2, n=32, c=64, spatial=(8, 16, 16), dtype="bf16", layout="nhwc"),
    make(mode="avg_exclude", window=8, stride=3, n=32, c=64, spatial=(56, 56), dtype="f16", layout="nhwc"),
    make(mode="avg", window=9, stride=4, n=32, c=64, spatial=(56, 56), dtype="f64", layout="nchw"),
)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_spills(arch):
    """All of them for sm_90a; for the others the one that finds places, of the most registers, and another in turn."""
    every = [source for pool in HEAVY for source in sources(pool, device_for(arch))]
    one = (2 + ARCHITECTURES.index(arch)) % len(every)
    for source in every if arch == "sm_90a" else (every[1], every[one]):
        assert [found.spills for found in jit.usage(source, arch)] == [0], (source.file, source.traits)
