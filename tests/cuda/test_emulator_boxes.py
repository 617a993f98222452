"""The emulator itself: boxes, windows, products of a warpgroup, clusters of blocks, and waits that are missing."""

from __future__ import annotations

import faulthandler
import os
import signal
import warnings
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from openconv.cuda import jit
from openconv.cuda.group_product import product
from openconv.cuda.launch import TensorMap, WindowMap, pack
from tests.emulator import EmulatedLaunch

KERNELS = {
    # Boxes come and leave again, or are written as they lie in shared memory.
    "boxes.cu": """
#include "common/types.cuh"
#include "common/bulk_windows.cuh"
#include "common/shared.cuh"
#include "traits"
struct Params {
    const void* x;
    unsigned char* out;
    int bytes, at[5], way[3];
    bulk::Map from, to;
};
extern "C" __global__ void boxes(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(memory);
    __shared__ bulk::Barrier arrived;
    if (threadIdx.x == 0) {
        bulk::init(arrived, 1);
        bulk::expect(arrived, p.bytes);
        const int *at = p.at, *way = p.way;
        COPY
    }
    __syncthreads();
    if (WAITS) bulk::wait(arrived, 0);
    LEAVE
}
""",
    # Both operands are one piece of shared memory as it is given.
    "products.cu": """
#include "common/types.cuh"
#include "common/shared.cuh"
#include "common/wgmma_batches.cuh"
#include "traits"
struct Params {
    const unsigned char* image;
    SUM* out;
    int bytes, a, b, further_a, further_b, adds;
};
extern "C" __global__ void products(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(memory);
    for (int i = threadIdx.x; i < p.bytes; i += blockDim.x) memory[i] = p.image[i];
    __syncthreads();
    const u64 a = TURNED_A ? tensor::turned_descriptor(memory, p.further_a) : tensor::descriptor(memory);
    const u64 b = TURNED_B ? tensor::turned_descriptor(memory, p.further_b) : tensor::descriptor(memory);
    SUM sum[COUNT];
    for (int i = 0; i < COUNT; ++i) sum[i] = 3;
    tensor::group_begin();
    tensor::group_product(sum, tensor::along(a, p.a), tensor::along(b, p.b), p.adds);
    tensor::group_commit();
    tensor::group_left<LEFT>();
    tensor::group_done(sum);
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * 2;
    for (int i = 0; i < COUNT; ++i)
        p.out[(row + i / 2 % 2 * 8) * COUNT * 2 + i / 4 * 8 + column + i % 2] = sum[i];
    if (LEFT != 0 && ENDS) tensor::group_left<0>();
}
""",
    # Each block has a line of memory and what it writes itself, and writes what all blocks of its cluster have.
    "clusters.cu": """
#include "common/types.cuh"
#include "common/bulk_cluster.cuh"
#include "common/shared.cuh"
#include "traits"
struct Params {
    const uint4* x;
    uint4* out;
};
template <int Count>
__device__ __forceinline__ uint4* written() {
    __shared__ uint4 all[Count];
    return all;
}
extern "C" __global__ void clusters(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(memory);
    __shared__ bulk::Barrier arrived;
    constexpr int cluster = Traits::cluster;
    const int i = threadIdx.x, rank = bulk::cluster_rank();
    uint4 *const line = reinterpret_cast<uint4*>(memory), *const mine = written<64>();
    if (i == 0) {
        bulk::init(arrived, 1);
        bulk::expect(arrived, 1024);
        bulk::copy_line(line, p.x + 64 * blockIdx.x, 1024, arrived, 1 << rank);
    }
    for (int k = 0; k <= rank; ++k) __syncthreads();
    if (rank == 1 && i < 32) bulk::sync_first<32>();
    bulk::wait(arrived, 0);
    mine[i] = {blockIdx.x, unsigned(rank), unsigned(__shfl_sync(~0u, i, 5)), unsigned(i)};
    MEET
    for (int k = 1; k <= cluster; ++k) {
        const int peer = (rank + k) % cluster;
        uint4* const out = p.out + (blockIdx.x * cluster + peer) * 128 + i;
        out[0] = bulk::load_peer(line + i, peer);
        out[64] = bulk::load_peer(mine + i, peer);
    }
    LEAVE
}
""",
}
STORES = "if (threadIdx.x == 0) { bulk::store(memory, p.to, 0, 0, 0, 0); bulk::commit(); bulk::read_but<0>(); }"
RAW = "for (int i = threadIdx.x; i < p.bytes; i += blockDim.x) p.out[i] = memory[i];"


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "common").symlink_to(jit.KERNELS / "common")
    for name, text in KERNELS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(jit, "KERNELS", tmp_path)


def swizzled(rows: Tensor) -> Tensor:
    """Rows of 128 bytes as they lie in shared memory, and back."""
    pieces = rows.view(-1, 8, 16)
    turned = torch.arange(8)[None] ^ (torch.arange(len(pieces)) % 8)[:, None]
    return pieces[torch.arange(len(pieces))[:, None], turned].reshape(-1, 128)


def boxes(
    x: Tensor, out: Tensor, count: int, at: tuple[int, ...], way: tuple[int, ...],
    maps: tuple[TensorMap | WindowMap, ...], copy: str, leave: str, waits: bool = True,
) -> None:  # fmt: skip
    numbers = (count, *at, *[0] * (5 - len(at)), *way, *[0] * (3 - len(way)))
    traits = "".join(f"#define {name} {text}\n" for name, text in (
        ("COPY", copy), ("LEAVE", leave), ("WAITS", int(waits))))  # fmt: skip
    EmulatedLaunch(jit.Source("boxes.cu", traits), "boxes", None, (1,), (64,), pack(2, (), numbers), count, maps=maps)(
        x.data_ptr(), out.data_ptr()
    )


def strides_of(x: Tensor) -> tuple[int, ...]:
    """As maps have them, of a tensor whose channels lie side by side."""
    return tuple(x.element_size() * stride for stride in reversed(x.stride()[:-1]))


# -- boxes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32])
@pytest.mark.parametrize("at", [(0, 0, 0, 0), (16, 1, 2, 1), (-16, -2, 3, 0), (40, 3, -1, 1)])
def test_a_box_comes_and_leaves(dtype, at):
    element = dtype.itemsize
    channels = 64 // element  # of a box whose rows are swizzled as 64 bytes
    x = torch.randint(-100, 100, (2, 5, 4, 48)).to(dtype)
    out = torch.full((1, 3, 3, channels + 16), 7).to(dtype)
    box, sizes = (channels, 2, 3, 1), tuple(reversed(x.shape))
    maps = (
        TensorMap(0, sizes, strides_of(x), box, 64, element),
        TensorMap(1, (channels - 8, 2, 2, 1), strides_of(out), box, 64, element),
    )
    copy = "bulk::copy(memory, p.from, arrived, at[0], at[1], at[2], at[3]);"
    boxes(x, out, prod(box) * element, at, (), maps, copy, STORES)
    wide = torch.zeros(4, 15, 14, 248, dtype=dtype)
    wide[:2, 5:10, 5:9, 100:148] = x
    c, w, h, n = at
    wanted = torch.full_like(out, 7)
    wanted[0, :2, :2, : channels - 8] = wide[n, 5 + h : 7 + h, 5 + w : 7 + w, 100 + c : 100 + c + channels - 8]
    assert torch.equal(out, wanted)


def test_a_box_is_not_there_before_somebody_waits():
    x, out = torch.zeros(8, 64, dtype=torch.float16), torch.zeros(1024, dtype=torch.uint8)
    maps = (TensorMap(0, (64, 8), (128,), (64, 8), 128),) * 2
    boxes(
        x,
        out,
        1024,
        (),
        (),
        maps,
        "bulk::copy(memory, p.from, arrived, 1, 0, 0);",
        RAW + "bulk::wait(arrived, 0);",
        False,
    )
    assert (out == 255).all()


# -- windows ----------------------------------------------------------------------------------------------------------

# Sizes W, H, D; lower and upper corners, steps, the way to the tap; the first pixel.
WINDOWS = (
    ((9,), (-1,), (-1,), (1,), (2,), 0),
    ((9,), (-2,), (1,), (3,), (300,), 2),
    ((7, 6), (-1, -1), (-1, -1), (1, 1), (2, 0), 3),
    ((7, 6), (-1, -1), (-1, -1), (2, 2), (1, 2), 5),
    ((8, 5), (-3, 0), (-4, 2), (2, 3), (6, 1), 1),  # dilated, and more padding on one side
    ((5, 5), (2, 1), (0, -1), (1, 1), (0, 0), 8),
    ((4, 5, 3), (-1, 0, -2), (-1, -2, 0), (1, 2, 1), (2, 2, 1), 7),
    ((6, 4, 4), (-1, -1, -1), (-1, -1, -1), (2, 2, 2), (1, 2, 0), 4),
)


@pytest.mark.parametrize(
    ("dtype", "c"), [(torch.float16, 0), (torch.float16, 40), (torch.int8, 64), (torch.float32, 16)]
)
@pytest.mark.parametrize(("sizes", "lower", "upper", "steps", "way", "begin"), WINDOWS)
def test_windows(sizes, lower, upper, steps, way, begin, dtype, c):
    images, channels, element, pixels, spatial = 3, 80, dtype.itemsize, 37, len(sizes)
    x = torch.randint(-100, 100, (images, *reversed(sizes), channels)).to(dtype)
    # All windows of all images, from the tensor with zeros around it.
    margin, per_row = 400, 128 // element
    counts = [
        (size - 1 + high - low) // step + 1 for size, low, high, step in zip(sizes, lower, upper, steps, strict=True)
    ]
    all_windows = x
    for axis in range(spatial):
        at = torch.arange(counts[axis]) * steps[axis] + lower[axis] + way[axis]
        dim = spatial - axis
        zeros = torch.zeros_like(all_windows.narrow(dim, 0, 1)).expand(
            *[margin if i == dim else size for i, size in enumerate(all_windows.shape)]
        )
        all_windows = torch.cat([zeros, all_windows, zeros], dim).index_select(dim, at + margin)
    rows = all_windows.reshape(-1, channels)
    rows = torch.cat([rows, torch.zeros(pixels, channels, dtype=dtype)])
    rows = torch.cat([rows, torch.zeros(len(rows), per_row, dtype=dtype)], 1)
    places, rest = [], begin
    for count, low, step in zip(counts, lower, steps, strict=True):
        places.append(rest % count * step + low)
        rest //= count
    out = torch.zeros(pixels * 128, dtype=torch.uint8)
    map_ = WindowMap(0, (channels, *sizes, images), strides_of(x), (per_row, pixels), lower, upper, steps, 128, element)
    arguments = [f"at[{i}]" for i in range(spatial + 2)] + [f"way[{i}]" for i in range(spatial)]
    copy = f"bulk::copy_windows(memory, p.from, arrived, {', '.join(arguments)});"
    boxes(x, out, pixels * 128, (c, *places, rest), way, (map_, map_), copy, RAW)
    found = swizzled(out.view(-1, 128)).view(dtype)
    assert torch.equal(found, rows[begin : begin + pixels, c : c + per_row])


# -- products ---------------------------------------------------------------------------------------------------------

TYPES = {
    "f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2, "i8": torch.int8,
}  # fmt: skip


def products(first, second, columns, image, given, turned=(False, False), left=0, ends=1) -> Tensor:
    kind, dtype = ("int", torch.int32) if first == "i8" else ("float", torch.float32)
    out = torch.zeros(64, columns, dtype=dtype)
    defined = {"SUM": kind, "COUNT": columns // 2, "LEFT": left, "ENDS": ends}
    defined |= {"TURNED_A": int(turned[0]), "TURNED_B": int(turned[1])}
    traits = "".join(f"#define {name} {value}\n" for name, value in defined.items())
    traits += product(columns, first, second, turned_first=turned[0], turned_second=turned[1])
    params = pack(2, (), (image.numel(), *given))
    EmulatedLaunch(jit.Source("products.cu", traits), "products", None, (1,), (128,), params, image.numel())(
        image.data_ptr(), out.data_ptr()
    )
    return out


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randint(-100, 100, shape, dtype=torch.int8) if dtype == torch.int8 else torch.randn(shape).to(dtype)


def bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def value(name: str, x: Tensor) -> Tensor:
    if name == "tf32":
        x = (x.view(torch.int32) & -(1 << 13)).view(torch.float32)
    return x.double()


@pytest.mark.parametrize("adds", [0, 1])
@pytest.mark.parametrize(("first", "second"), [(name, name) for name in TYPES] + [("e4m3", "e5m2")])
@pytest.mark.parametrize(("columns", "shift", "k"), [(16, 0, 0), (48, 3, 2), (64, 13, 3)])
def test_a_product(first, second, columns, shift, k, adds):
    size = TYPES[first].itemsize
    a, b = random(TYPES[first], 64, 128 // size), random(TYPES[second], 80, 128 // size)
    image = swizzled(torch.cat([bytes_of(a), bytes_of(b)])).contiguous()
    begin, depth = k * 32 // size, 32 // size
    given = (32 * k, 64 * 128 + 128 * shift + 32 * k, 0, 0, adds)
    found = products(first, second, columns, image, given)
    wanted = (
        value(first, a)[:, begin : begin + depth] @ value(second, b)[shift : shift + columns, begin : begin + depth].T
    )
    assert torch.allclose(found.double(), wanted + 3 * adds, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("turned", [(True, False), (False, True), (True, True)])
def test_a_product_of_what_lies_across(turned):
    columns, k = 128, 1  # the second 16 of 32 deep, and two pieces of 64 columns
    a, b = random(torch.bfloat16, 64, 64), random(torch.bfloat16, 128, 64)
    across = b.T[:32].reshape(32, 2, 64).transpose(0, 1).reshape(64, 64)
    parts = [a.T.contiguous() if turned[0] else a, across if turned[1] else b]
    image = swizzled(torch.cat([bytes_of(part) for part in parts])).contiguous()
    given = (2048 * k if turned[0] else 32 * k, 8192 + (2048 * k if turned[1] else 32 * k), 8192, 4096, 0)
    found = products("bf16", "bf16", columns, image, given, turned)
    wanted = a.double()[:, 16:32] @ b.double()[:, 16:32].T
    assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-4)


def test_sums_are_not_there_before_their_batch_is_waited_for():
    image = torch.zeros(128 * 128, dtype=torch.uint8)
    assert (products("f16", "f16", 16, image, (0, 64 * 128, 0, 0, 0), left=1) == 3).all()


# -- clusters ---------------------------------------------------------------------------------------------------------

MEET = "bulk::cluster_release(); bulk::cluster_wait();"


def clusters(cluster: int, meet: str = MEET, leave: str = MEET, blocks: int = 0) -> tuple[Tensor, Tensor]:
    """Two clusters, or so many blocks: what each block has found in all blocks of its cluster, and should have."""
    blocks = blocks or 2 * cluster
    x = torch.randint(1 << 20, (blocks, 64, 4), dtype=torch.int32)
    out = torch.zeros(blocks, cluster, 2, 64, 4, dtype=torch.int32)
    traits = f"#define MEET {meet}\n#define LEAVE {leave}\n"
    traits += f"struct Traits {{\n    static constexpr int cluster = {cluster};\n}};\n"
    EmulatedLaunch(jit.Source("clusters.cu", traits), "clusters", None, (blocks,), (64,), pack(2), 1024)(
        x.data_ptr(), out.data_ptr()
    )
    block, thread = torch.arange(blocks)[:, None].expand(-1, 64), torch.arange(64).expand(blocks, -1)
    lane = thread // 32 * 32 + 5
    wanted = torch.stack([x, torch.stack([block, block % cluster, lane, thread], -1).int()], 1)
    return out, wanted.view(-1, 1, cluster, 2, 64, 4).expand(-1, cluster, -1, -1, -1, -1).reshape(out.shape)


@pytest.mark.parametrize("leave", [MEET, "if (i >= 32) return;" + MEET])  # who has ended need not come
@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_blocks_of_a_cluster_read_each_other(cluster, leave):
    found, wanted = clusters(cluster, leave=leave)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("meet", ["", "bulk::cluster_arrive();", "__syncthreads();"])
@pytest.mark.parametrize("cluster", [2, 4])
def test_blocks_that_do_not_wait_for_each_other(cluster, meet):
    leave = "bulk::cluster_wait();" + MEET if "arrive" in meet else MEET
    found, wanted = clusters(cluster, meet, leave)
    wrong = (found != wanted).unflatten(0, (2, cluster))
    assert wrong[..., 0, :, :].any((1, 2, 3, 4)).all(), "lines, in both clusters"
    assert wrong[..., 1, :, :].any((1, 2, 3, 4)).all(), "what blocks write, in both clusters"
    assert (found[found != wanted] == -1).all()


def test_shared_memory_is_overrun_in_one_block_of_a_cluster():
    with pytest.raises(AssertionError, match="wrote behind"):
        clusters(2, leave="if (rank == 1) memory[1024] = 0;" + MEET)


def test_a_grid_is_whole_clusters():
    with pytest.raises(AssertionError, match="a grid of 6 blocks is not whole clusters of 4"):
        clusters(4, blocks=6)


# -- what ends a run --------------------------------------------------------------------------------------------------


def fails(capfd: pytest.CaptureFixture[str], run) -> str:
    """What the emulator says before it aborts: a process of its own runs that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads, which the child does without
        child = os.fork()
    if child == 0:
        faulthandler.disable()
        run()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGABRT
    return capfd.readouterr().err


def one_box(copy: str, leave: str, waits: bool = True, at: tuple[int, ...] = (), way: tuple[int, ...] = ()) -> None:
    x, out = torch.zeros(2, 4, 8, 64, dtype=torch.float16), torch.zeros(4096, dtype=torch.uint8)
    tiled = TensorMap(0, (64, 8, 4, 2), strides_of(x), (64, 4, 2, 1), 128)
    walked = WindowMap(0, (64, 8, 4, 2), strides_of(x), (64, 8), (-1, -1), (-1, -1), (2, 1))
    boxes(x, out, 1024, at, way, (tiled, walked), copy, leave, waits)


BOX = "bulk::copy(memory, p.from, arrived, 0, 0, 0, 0);"
WALK = "bulk::copy_windows(memory, p.to, arrived, at[0], at[1], at[2], at[3], way[0], way[1]);"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((BOX, "", False), "a box that nobody waited for"),
        ((BOX + BOX, ""), "two boxes come to the same place"),
        ((BOX, "if (threadIdx.x == 0) bulk::store(memory, p.from, 0, 0, 0, 0);"), "nobody waited until it was read"),
        (
            (BOX, "if (threadIdx.x == 0) { bulk::store(memory, p.from, 0, 0, 0, 0); bulk::read_but<0>(); }"),
            "nobody waited until it was read",  # it belongs to no batch
        ),
        ((BOX.replace("p.from", "p.to"), ""), "is of the other kind"),
        ((WALK, "", True, (0, 0, -1, 0)), "begins where no window does"),
        ((WALK, "", True, (0, 9, -1, 0)), "begins where no window does"),
        ((WALK, "", True, (0, 1, -1, 0), (256, 0)), "too far"),
        ((BOX + "bulk::arrive(arrived);", ""), "more arrivals"),
    ],
)
def test_boxes_that_are_wrong(capfd, arguments, message):
    assert message in fails(capfd, lambda: one_box(*arguments))


def test_products_that_nobody_waits_for(capfd):
    image = torch.zeros(128 * 128, dtype=torch.uint8)
    given = (0, 64 * 128, 0, 0, 0)
    said = fails(capfd, lambda: products("f16", "f16", 16, image, given, left=1, ends=0))
    assert "products that nobody waited for" in said


@pytest.mark.parametrize(
    ("meet", "leave", "message"),
    [
        ("bulk::cluster_release();" + MEET, MEET, "arrives at its cluster twice"),
        ("bulk::cluster_wait();", MEET, "has not arrived"),
        ("if (rank == 1) bulk::wait(arrived, 1);" + MEET, MEET, "phase does not end"),
        (MEET, "", "has ended"),
        (MEET + "bulk::load_peer(memory, cluster);", MEET, "no block of this rank"),
        (MEET + "bulk::load_peer(memory + 8, 1 - rank);", MEET, "not aligned"),
        (MEET + "alignas(16) int own[4]; bulk::load_peer(own, 1 - rank);", MEET, "not in shared memory"),
        ("bulk::arrive(arrived, 1 - rank);", MEET, "an arrival at another block"),
        ("if (i == 0) bulk::copy_line(line, p.x, 1024, arrived, 3);", MEET, "a copy for other blocks"),
        ("if (i == 0) bulk::copy_line(line, p.x, 1024, arrived, 1 << rank);", MEET, "a box that nobody waited for"),
    ],
)
def test_clusters_that_are_wrong(capfd, meet, leave, message):
    assert message in fails(capfd, lambda: clusters(2, meet, leave))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"strides": (130, 1040)}, "multiples of 16 bytes"),
        ({"box": (64, 2000)}, "more than"),
        ({"box": (128, 8)}, "at most"),
        ({"box": (60, 8)}, "multiple of 16"),
        ({"steps": (9,)}, "steps"),
        ({"lower": (-40000,)}, "corners"),
    ],
)
def test_maps_that_no_driver_takes(changed, message):
    good = {"pointer": 0, "sizes": (64, 8, 2), "strides": (128, 1024), "box": (64, 8)}
    good |= {"lower": (0,), "upper": (0,), "steps": (1,)}
    x, out = torch.zeros(1024, dtype=torch.float16), torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(AssertionError, match=message):
        boxes(x, out, 1024, (), (), (WindowMap(**(good | changed)),) * 2, "", RAW, False)
