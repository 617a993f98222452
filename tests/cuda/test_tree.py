"""Generated kernels of trees, on the CPU: every operation, dtype, broadcast and reduction against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from openconv.cuda import jit
from openconv.cuda.device import ARCHITECTURES, device_for
from openconv.cuda.tree import TreeKernel, _Work, seconds, sources
from openconv.epilogue import OPS, Expr, apply
from openconv.evaluate import evaluate_tree
from openconv.tensors import ALL_DTYPES
from openconv.tree import MODES, Reduction, Tree, leaf
from tests.emulator import poisoned

DEVICE = device_for("sm_90a")
A, B, C = leaf(0), leaf(1), leaf(2)
Make = Callable[[Sequence[int], torch.dtype], Tensor]


def blank(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Poisoned and contiguous; of two-valued ones the bytes show what is not written."""
    return poisoned(shape, torch.uint8).view(torch.bool) if dtype is torch.bool else poisoned(shape, dtype)


def permuted(*order: int) -> Make:
    """Tensors whose axes lie in this order in memory."""

    def make(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        whole = blank([shape[at] for at in order], dtype)
        return whole.permute(*(order.index(at) for at in range(len(order))))

    return make


LAST = permuted(0, 2, 3, 1)


def like(make: Make, value: Tensor) -> Tensor:
    return make(value.shape, value.dtype).copy_(value)


def run(
    tree: Tree, inputs: Sequence[Tensor], axes: Sequence[int] = (), make: Make = blank, aligned: bool = True
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """What the kernel computes, of results made by ``make``."""
    shape = torch.broadcast_shapes(*(value.shape for value in inputs))
    wide = [value.expand(shape) for value in inputs]
    strides = [
        [stride if given != 1 or size == 1 else 0 for stride, size, given in zip(
            each.stride(), shape, (1,) * (len(shape) - value.dim()) + tuple(value.shape), strict=True)]
        for each, value in zip(wide, inputs, strict=True)
    ]  # fmt: skip
    results = [make(shape, ALL_DTYPES[dtype]) for _, dtype in tree.results]
    kept = [1 if at in axes else size for at, size in enumerate(shape)]
    reduced = [blank(kept, ALL_DTYPES[each.dtype]) for each in tree.reductions]
    kernel = TreeKernel(tree, DEVICE, shape, strides, [each.stride() for each in results], axes, aligned)
    margin = 64  # nothing is written behind the workspace
    workspace = torch.full((kernel.workspace_bytes + margin,), 255, dtype=torch.uint8)
    read, written, summed = ([each.data_ptr() for each in group] for group in (inputs, results, reduced))
    kernel(read, written, summed, workspace.data_ptr())
    assert bool((workspace[kernel.workspace_bytes :] == 255).all())
    return results, reduced


def check(
    tree: Tree, inputs: Sequence[Tensor], axes: Sequence[int] = (), make: Make = blank, aligned: bool = True,
    rtol: float = 2e-6, atol: float = 2e-6,
) -> None:  # fmt: skip
    """Against the same tree of float64, rounded once."""
    double = Tree(
        ("f64",) * len(inputs), tuple((expr, "f64") for expr, _ in tree.results),
        tuple(Reduction(each.mode, each.expr, "f64") for each in tree.reductions),
    )  # fmt: skip
    wanted = evaluate_tree(double, [value.double() for value in inputs], axes)
    found = run(tree, inputs, axes, make, aligned)
    dtypes = [[dtype for _, dtype in tree.results], [each.dtype for each in tree.reductions]]
    for group, references, names in zip(found, wanted, dtypes, strict=True):
        for value, reference, name in zip(group, references, names, strict=True):
            dtype = ALL_DTYPES[name]
            if dtype is torch.bool:
                assert torch.equal(value.contiguous().view(torch.uint8), (reference != 0).to(torch.uint8))
            elif not dtype.is_floating_point:
                assert torch.equal(value, reference.to(dtype)), f"{tree}"
            else:
                epsilon = torch.finfo(dtype).eps
                torch.testing.assert_close(
                    value.double(), reference.to(dtype).double(), rtol=max(rtol, epsilon), atol=atol, equal_nan=True,
                    msg=partial("{} {}: {}".format, tree, name),
                )  # fmt: skip


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0 if dtype in (torch.bool, torch.uint8) else -9, 10, shape, generator=generator).to(dtype)


# -- operations -----------------------------------------------------------------------------------------------------


SPECIAL = (0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 0.5, -2.25, 6.5, -1.75, math.inf, -math.inf, math.nan, 7.0, 1e-3, 2.5)
LARGE = (88.0, -100.0, 30.0, -30.0, 2.0, -0.5)  # what overflows on the way, times infinity, is no number in f32 alone


def applied(name: str, *values: Expr) -> Expr:
    params = {"clamp": (-0.5, 1.5), "clamp_backward": (-1.0, 0.5)}.get(name, tuple(0.7 for _ in OPS[name].params))
    return apply(name, *values[: OPS[name].values], params=params)


NAMES = sorted(OPS)


@pytest.mark.parametrize("names", [NAMES[at : at + 20] for at in range(0, len(NAMES), 20)], ids=lambda names: names[0])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_every_operation(names, dtype):
    """On usual numbers, and on zeros, infinities, NaN and large ones."""
    tree = Tree((dtype,) * 3, tuple((applied(name, A, B, C), dtype) for name in names))
    wide = ALL_DTYPES[dtype]
    usual = [randn(61, dtype=torch.float64, seed=seed).to(wide) for seed in (1, 2, 3)]
    usual[1][::5] = usual[0][::5]  # some are equal
    tolerance = 2e-5 if dtype == "f32" else 1e-12
    check(tree, usual, rtol=tolerance)
    for numbers in (SPECIAL, LARGE):
        values = torch.tensor(numbers, dtype=wide)
        check(tree, [values[:, None], values[None, :], values.flip(0)[:, None]], rtol=tolerance)


def test_every_operation_is_there():
    assert sorted(OPS) == NAMES
    assert sum(not op.basic for op in OPS.values()) > 30


def test_values_are_computed_once_however_often_they_are_used():
    expr: Expr = A
    for _ in range(8):  # 255 operations as a tree
        expr = apply("max", expr, expr)
    (source,) = sources(Tree(("f32",), ((expr, "f32"), (expr + 1, "f32"))), (8,), [(1,)], [(1,), (1,)])
    assert source.traits.count("op::max") == 8


# -- dtypes ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "i8", "u8", "i16", "i32", "i64", "bool"])
def test_every_dtype(dtype):
    """In and out, whole units and odd ends, with results and sums of its own dtype."""
    kind = ALL_DTYPES[dtype]
    # fmt: off
    tree = Tree((dtype, "f32"), ((A * B, dtype), (apply("cmp_gt", A, B), "bool")),
                (Reduction("max", A, dtype), Reduction("add", A, "f64" if dtype == "f64" else "f32")))
    # fmt: on
    for size in (64, 21):
        second = torch.full((), 2.0)
        check(tree, [randn(3, size, dtype=kind), second], (1,))
        check(Tree(tree.inputs, tree.results), [randn(3, size, dtype=kind), second])


def test_dtypes_in_one_tree():
    tree = Tree(
        ("f16", "bf16", "bool", "i8"),
        ((apply("select", C, A, B), "f32"), (A + leaf(3), "f16"), (A - B, "bf16"), (leaf(3) * 2, "i16")),
    )
    dtypes = [ALL_DTYPES[name] for name in tree.inputs]
    check(tree, [randn(5, 24, dtype=dtype, seed=at) for at, dtype in enumerate(dtypes)])


def test_a_bool_is_what_is_not_zero():
    (made,), _ = run(Tree(("f32",), ((A, "bool"),)), [torch.tensor([0.0, -0.0, 0.25, -3.0, math.nan])])
    assert made.view(torch.uint8).tolist() == [0, 0, 1, 1, 1]


def test_small_integers_wrap_around():
    values = torch.tensor([300.0, -3.7, 127.9, 128.0])
    (i8, u8), _ = run(Tree(("f32",), ((A, "i8"), (A, "u8"))), [values])
    assert i8.tolist() == [44, -3, 127, -128]
    assert u8.tolist() == [44, 253, 127, 128]


# -- broadcasting ---------------------------------------------------------------------------------------------------

FUSED = Tree(("f16", "f32", "f32"), ((apply("relu", A * B + C), "f16"),))


@pytest.mark.parametrize("make", [blank, LAST], ids=["nchw", "nhwc"])
@pytest.mark.parametrize(
    "second, third",
    [
        ((), (1,)),
        ((24, 1, 1), (24, 1, 1)),
        ((2, 24, 1, 1), (1, 24, 3, 4)),
        ((2, 1, 1, 1), (4,)),
        ((3, 1), (2, 1, 3, 4)),
        ((2, 24, 3, 4), ()),
    ],
)
def test_broadcasts(make, second, third):
    whole = like(make, randn(2, 24, 3, 4, dtype=torch.float16))
    rest = [randn(*shape, seed=at) for at, shape in enumerate((second, third))]
    check(FUSED, [whole, *(like(make, each) if each.dim() == 4 else each for each in rest)], make=make)


def test_usual_cases_have_few_axes():
    def axes(shape: Sequence[int], *strides: Sequence[int]) -> tuple[int, int]:
        work = _Work(FUSED, shape, strides, strides[:1], (), True)
        return len(work.axes), work.vector

    dense, last = (24 * 12, 12, 4, 1), (24 * 12, 1, 4 * 24, 24)
    assert axes((2, 24, 3, 4), dense, dense, dense) == (1, 4)
    assert axes((2, 24, 3, 4), last, last, last) == (1, 4)
    assert axes((2, 24, 3, 4), last, (0, 1, 0, 0), (0, 1, 0, 0)) == (2, 8)
    assert axes((2, 24, 3, 4), dense, (0, 1, 0, 0), (0, 0, 0, 0)) == (3, 4)
    assert axes((1, 24, 3, 4), dense, (0, 1, 0, 0), (0, 1, 0, 0)) == (2, 4)
    assert axes((2, 24, 3, 8), (576, 24, 8, 1), (24, 1, 0, 0), (24, 1, 0, 0)) == (2, 8)
    assert axes((2, 3, 7, 7), (147, 49, 7, 1), (0, 1, 0, 0), (0, 1, 0, 0)) == (3, 1)


def test_an_outer_product():
    check(Tree(("f32", "f32"), ((A * B, "f32"),)), [randn(17, 1), randn(1, 12)])
    check(Tree(("f32", "f32"), ((A * B, "f32"),), (Reduction("add", A * B, "f32"),)), [randn(17, 1), randn(12)], (0,))


def test_other_batches_need_no_other_kernel():
    def source(batch: int) -> jit.Source:
        strides = [(24 * 12, 1, 4 * 24, 24), (0, 1, 0, 0), (0, 1, 0, 0)]
        return sources(FUSED, (batch, 24, 3, 4), strides, strides[:1])[0]

    assert source(2) == source(3) == source(7)


@pytest.mark.parametrize(
    "shape", [(), (1,), (37,), (5, 8), (3, 1, 16), (2, 3, 4, 5), (2, 1, 3, 2, 8), (2, 3, 2, 2, 3, 4)]
)
def test_ranks(shape):
    check(Tree(("f32", "f32"), ((A - B, "f32"),)), [randn(*shape), randn(*shape[1:], seed=4)])


def test_transposed_sliced_and_with_gaps():
    whole = randn(8, 12, 20)
    inputs = [whole[::2, 1:9, 4:20], whole[4:, 4:12, :16].clone().transpose(0, 2).contiguous().transpose(0, 2),
              whole[:4, :8, 1:17]]  # fmt: skip
    memory = torch.full((4, 10, 48), torch.nan)

    def with_gaps(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return memory[:, 1:9, 8:40:2]

    tree = Tree(("f32",) * 3, ((A + B * C, "f32"),))
    check(tree, inputs, aligned=False)
    check(tree, inputs, make=with_gaps, aligned=False)
    written = torch.zeros_like(memory, dtype=torch.bool)
    written[:, 1:9, 8:40:2] = True
    assert torch.equal(memory.isnan(), ~written)


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_results_of_another_order(order):
    check(Tree(("f32", "f32"), ((A + B, "f32"),)), [randn(4, 6, 8), randn(6, 1)], make=permuted(*order))


def test_in_place():
    values = randn(3, 40)
    wanted = torch.relu(values + 1)
    tree = Tree(("f32",), ((apply("relu", A + 1), "f32"),))
    TreeKernel(tree, DEVICE, (3, 40), [(40, 1)], [(40, 1)])([values.data_ptr()], [values.data_ptr()])
    assert torch.equal(values, wanted)


def test_large_tensors_have_several_units_a_thread():
    """And end within a block."""
    tree = Tree(("i8", "i8"), ((apply("max", A, B), "i8"),))
    inputs = [torch.randint(-99, 99, (16, 275001), dtype=torch.int8) for _ in range(2)]
    assert _Work(tree, (16 * 275001,), [(1,), (1,)], [(1,)], (), True).units == 2
    assert torch.equal(run(tree, inputs)[0][0], torch.maximum(*inputs))


# -- reductions -----------------------------------------------------------------------------------------------------


SUMS = Tree(("f32", "f32"), (), tuple(Reduction(mode, A * B, "f32") for mode in MODES))


@pytest.mark.parametrize("axes", [(0, 2, 3), (1,), (2, 3), (0,), (0, 1, 2, 3), (0, 2), (1, 3), (3,)])
@pytest.mark.parametrize("make", [blank, LAST], ids=["nchw", "nhwc"])
def test_every_mode(make, axes):
    """Over channels, pixels, rows, everything and what lies between; some zeros, which products may leave out."""
    whole = like(make, randn(3, 8, 5, 4).sign() * (0.75 + randn(3, 8, 5, 4, seed=1).abs() / 4))
    whole[:, :, 3, 1:3] = 0
    check(SUMS, [whole, torch.full((8, 1, 1), 1.0625)], axes, rtol=1e-5)


@pytest.mark.parametrize("axes", [(1,), (0,)])
def test_nan_in_reductions(axes):
    values = randn(6, 8)
    values[2, 3] = math.nan
    values[4, 1] = math.inf
    check(SUMS, [values, torch.ones(())], axes, rtol=1e-5)


BOTH = Tree(
    ("f16", "f32"),
    ((apply("relu", A + B), "f16"),),
    (Reduction("add", apply("relu", A + B), "f32"), Reduction("norm2", A, "f32"), Reduction("avg", A, "f16")),
)


@pytest.mark.parametrize(
    "shape, axes, pieces",
    [
        ((64, 8, 33, 16), (0, 2, 3), (2, 15)),
        ((2, 40, 3, 5), (0, 2, 3), (1, 1)),
        ((3, 4, 129, 130), (2, 3), (4, 30)),
        ((2, 8, 200, 16), (0, 1, 2, 3), (3, 3)),
        ((128, 8, 80, 8), (0, 2, 3), (5, 40)),
    ],
)
@pytest.mark.parametrize("make", [blank, LAST], ids=["nchw", "nhwc"])
def test_results_and_reductions_in_one_pass(make, shape, axes, pieces):
    whole = like(make, randn(*shape, dtype=torch.float16))
    lie = [whole.stride(), (0, 1, 0, 0)]
    assert _Work(BOTH, shape, lie, lie[:1], axes, True).pieces == pieces[make is LAST]
    check(BOTH, [whole, randn(shape[1], 1, 1)], axes, make, rtol=1e-4, atol=1e-3)


def test_pieces_and_threads():
    """Few kept elements are cut into pieces that fill the GPU, many are done in one pass."""
    tree = Tree(("f16",), (), (Reduction("add", A, "f32"), Reduction("norm2", A, "f32")))

    def work(shape: Sequence[int], strides: Sequence[int], axes: Sequence[int]) -> tuple[bool, int, int, int]:
        found = _Work(tree, shape, [strides], [], axes, True)
        assert found.workspace_bytes == (0 if found.pieces == 1 else 8 * found.pieces * found.results)
        return found.across, found.vector, found.columns, found.kept_blocks * found.pieces

    last, first = (64 * 3136, 1, 56 * 64, 64), (64 * 3136, 3136, 56, 1)
    assert work((64, 64, 56, 56), last, (0, 2, 3)) == (True, 8, 8, 523)
    assert work((64, 64, 56, 56), first, (0, 2, 3)) == (False, 8, 256, 576)
    assert work((1 << 20, 64), (64, 1), (1,)) == (False, 8, 2, 8192)
    assert work((8, 1 << 20), (1 << 20, 1), (0,)) == (True, 8, 128, 1024)
    assert work((1 << 24,), (1,), (0,)) == (False, 8, 256, 512)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 12, 33, 120, 500])
def test_rows_of_every_width(width):
    """Lanes that share a row, from one to a block."""
    check(
        Tree(("f32",), (), (Reduction("add", A, "f32"), Reduction("amax", A, "f32"))),
        [randn(37, width)],
        (1,),
        atol=1e-5,
    )


@pytest.mark.parametrize("rows", [2, 5, 31, 700])
def test_columns_of_every_height(rows):
    check(
        Tree(("f32",), (), (Reduction("avg", A, "f32"), Reduction("min", A, "f32"))),
        [randn(rows, 300)],
        (0,),
        atol=1e-5,
    )


def test_kept_axes_lie_elsewhere_in_the_result():
    """The last axis in memory is the first of those that are kept."""
    values = randn(6, 4, 5, 16).permute(3, 0, 2, 1)
    check(SUMS, [values, torch.ones(())], (2,), rtol=1e-5)
    check(SUMS, [values, torch.ones(())], (1, 3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axes", [(), (1,)])
def test_reductions_of_one_element(axes):
    check(SUMS, [torch.tensor([[[0.0, -2.0, 3.0]], [[1.0, math.nan, -0.5]]]), torch.ones(())], axes)


def test_reductions_of_nothing():
    modes = [mode for mode in MODES if mode not in ("min", "max", "amax")]
    tree = Tree(("f32",), ((A, "f32"),), tuple(Reduction(mode, A, "f32") for mode in modes))
    for shape, axes in (((3, 0, 2), (1,)), ((0,), (0,)), ((0, 3), (1,))):
        check(tree, [torch.empty(shape)], axes)
    for mode in ("min", "max", "amax"):
        with pytest.raises(ValueError, match="no elements"):
            run(Tree(("f32",), (), (Reduction(mode, A, "f32"),)), [torch.empty(3, 0)], (1,))


def test_the_same_bits_again():
    values = randn(40, 2000)
    tree = Tree(("f32",), (), (Reduction("add", A, "f32"),))
    first, second = (run(tree, [values], (0, 1))[1][0] for _ in range(2))
    assert torch.equal(first, second)


# -- offsets of eight bytes, refusals, costs, compilation -----------------------------------------------------------


def test_large_tensors_have_wide_offsets():
    """Without so much memory: what is compiled, and that the arithmetic of wide counts is right."""

    def types(tree: Tree, shape: Sequence[int], strides: Sequence[int], axes: Sequence[int] = ()) -> tuple[bool, bool]:
        text = sources(tree, shape, [strides], [strides] * len(tree.results), axes)[0].traits
        return "using Index = i64" in text, "using Count = i64" in text

    copy = Tree(("f16",), ((A, "f16"),))
    assert types(copy, (1 << 31,), (1,)) == (False, False)
    assert types(copy, (1 << 32,), (1,)) == (True, False)
    assert types(copy, ((1 << 31) + 1,), (1,)) == (True, True)
    total = Tree(("f16",), (), (Reduction("add", A, "f32"),))
    assert types(total, (1 << 32,), (1,), (0,)) == (True, False)


def test_wide_counts_compute_the_same(monkeypatch):
    constants = vars(_Work)["_constants"]
    wide = property(lambda self: constants.fget(self) | {"Index": "i64", "Count": "i64"})
    monkeypatch.setattr(_Work, "_constants", wide)
    check(FUSED, [randn(2, 24, 3, 4, dtype=torch.float16), randn(24, 1, 1), randn(4)])
    check(SUMS, [randn(3, 8, 5, 4), torch.ones(8, 1, 1)], (0, 2), rtol=1e-4, atol=1e-5)


def test_what_is_wrong_is_said():
    tree = Tree(("f32",), ((A, "f32"),))
    for shape, inputs, results, axes, message in (
        ((2, 3), [], [(3, 1)], (), "strides of 0 inputs are given; the tree has 1"),
        ((2, 3), [(1,)], [(3, 1)], (), "wanted 2 of them"),
        ((2, 3), [(3, 1)], [(3, -1)], (), "none below 0"),
        ((2, 3), [(3, 1)], [(0, 1)], (), "a place for each element"),
        ((2, 3), [(3, 1)], [(3, 1)], (2,), "axes are"),
        ((2, 3), [(3, 1)], [(3, 1)], (1, 1), "axes are"),
    ):
        with pytest.raises(ValueError, match=message):
            TreeKernel(tree, DEVICE, shape, inputs, results, axes)
    with pytest.raises(ValueError, match="dtype is 'e4m3'"):
        sources(Tree(("e4m3",), ((A, "f32"),)), (4,), [(1,)], [(1,)])
    with pytest.raises(ValueError, match="40 tensors"):
        sources(Tree(("f32",) * 39, ((A, "f32"),)), (4,), [(1,)] * 39, [(1,)])


def test_costs_follow_the_bytes():
    strides = [(24 * 12, 1, 4 * 24, 24), (0, 1, 0, 0), (0, 0, 0, 0)]
    moved = 2 * 2 * 2 * 24 * 12 + 4 * 24 + 4
    assert seconds(FUSED, DEVICE, (2, 24, 3, 4), strides, strides[:1]) == pytest.approx(
        2e-6 + moved / (0.9 * DEVICE.bandwidth), rel=1e-9
    )
    total = Tree(("f32",), (), (Reduction("add", A, "f32"),))
    large, small = (seconds(total, DEVICE, (n,), [(1,)], [], (0,)) for n in (1 << 24, 256))
    assert small < 2.1e-6
    assert large == pytest.approx(4e-6 + (4 << 24) / (0.9 * DEVICE.bandwidth), rel=1e-3)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_spills(arch):
    every = Tree(("f32", "f32", "f32"), tuple((applied(name, A, B, C), "f32") for name in NAMES[:20]))
    last, row = (64 * 3136, 1, 56 * 64, 64), (0, 1, 0, 0)
    first = (64 * 3136, 3136, 56, 1)
    backward = Tree(
        ("f16", "f16", "f32", "f32"), ((apply("relu_backward", A, B), "f16"),),
        (Reduction("add", apply("relu_backward", A, B), "f32"), Reduction("add", A * (B - C) * leaf(3), "f32")),
    )  # fmt: skip
    chosen = [
        *sources(FUSED, (64, 64, 56, 56), [last, row, row], [last]),
        *sources(backward, (64, 64, 56, 56), [last, last, row, row], [last], (0, 2, 3)),
        *sources(backward, (64, 64, 56, 56), [first, first, row, row], [first], (0, 2, 3)),
    ]
    if arch in ("sm_75", "sm_90a"):
        chosen += sources(every, (1 << 20,), [(1,)] * 3, [(1,)] * 20)
        chosen += sources(Tree(("i8",), ((A, "f64"), (A, "bool"))), (1 << 24,), [(1,)], [(1,)] * 2)
    for source in chosen:
        assert [found.spills for found in jit.usage(source, arch)] == [0], source.traits
