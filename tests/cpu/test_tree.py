"""Generated CPU kernels of trees: every operation, dtype, broadcast and reduction against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from llvmlite import ir
from torch import Tensor

import openconv
from openconv.cpu.device import cpu_device
from openconv.cpu.tree import CALLS, CALLS_OF_F64, DTYPES, TreeKernel, _Work, refusal, seconds, workspace_bytes
from openconv.cpu.tree_lanes import Lanes
from openconv.epilogue import OPS, Expr, apply
from openconv.evaluate import evaluate_tree
from openconv.tensors import ALL_DTYPES
from openconv.tree import MODES, Reduction, Tree, leaf

A, B, C = leaf(0), leaf(1), leaf(2)
Make = Callable[[Sequence[int], torch.dtype], Tensor]


def blank(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Contiguous, every byte 0xff: NaN in floats, and no bool."""
    made = torch.empty(tuple(shape), dtype=dtype)
    made.view(-1).view(torch.uint8).fill_(0xFF)
    return made


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
    tree: Tree, inputs: Sequence[Tensor], axes: Sequence[int] = (), make: Make = blank, threads: int = 2
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """What the kernel computes, of results made by ``make``."""
    shape = torch.broadcast_shapes(*(value.shape for value in inputs))
    strides = [
        [stride if given != 1 or size == 1 else 0 for stride, size, given in zip(
            value.expand(shape).stride(), shape, (1,) * (len(shape) - value.dim()) + tuple(value.shape), strict=True)]
        for value in inputs
    ]  # fmt: skip
    results = [make(shape, ALL_DTYPES[dtype]) for _, dtype in tree.results]
    kept = [1 if at in axes else size for at, size in enumerate(shape)]
    reduced = [blank(kept, ALL_DTYPES[each.dtype]) for each in tree.reductions]
    kernel = TreeKernel(tree, shape, strides, [each.stride() for each in results], axes, threads)
    margin = 64  # nothing is written behind the workspace
    workspace = torch.full((kernel.workspace_bytes + margin,), 255, dtype=torch.uint8)
    read, written, summed = ([each.data_ptr() for each in group] for group in (inputs, results, reduced))
    kernel(read, written, summed, workspace.data_ptr())
    assert bool((workspace[kernel.workspace_bytes :] == 255).all())
    return results, reduced


def check(
    tree: Tree, inputs: Sequence[Tensor], axes: Sequence[int] = (), make: Make = blank, rtol: float = 2e-6,
    atol: float = 2e-6,
) -> None:  # fmt: skip
    """Against the same tree of float64, rounded once; and one thread computes the same bits."""
    double = Tree(
        ("f64",) * len(inputs), tuple((expr, "f64") for expr, _ in tree.results),
        tuple(Reduction(each.mode, each.expr, "f64") for each in tree.reductions),
    )  # fmt: skip
    wanted = evaluate_tree(double, [value.double() for value in inputs], axes)
    found, alone = run(tree, inputs, axes, make), run(tree, inputs, axes, make, threads=1)
    dtypes = [[dtype for _, dtype in tree.results], [each.dtype for each in tree.reductions]]
    for group, others, references, names in zip(found, alone, wanted, dtypes, strict=True):
        for value, other, reference, name in zip(group, others, references, names, strict=True):
            dtype = ALL_DTYPES[name]
            dense = [each.contiguous().view(-1).view(torch.uint8) for each in (value, other)]
            assert torch.equal(*dense), f"{tree}: 1 and 2 threads differ"
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


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_every_operation(dtype):
    """On usual numbers, and on zeros, infinities, NaN and large ones."""
    tree = Tree((dtype,) * 3, tuple((applied(name, A, B, C), dtype) for name in NAMES))
    wide = ALL_DTYPES[dtype]
    usual = [randn(61, dtype=torch.float64, seed=seed).to(wide) for seed in (1, 2, 3)]
    usual[1][::5] = usual[0][::5]  # some are equal
    tolerance = 2e-5 if dtype == "f32" else 1e-12
    check(tree, usual, rtol=tolerance)
    for numbers in (SPECIAL, LARGE):
        values = torch.tensor(numbers, dtype=wide)
        pairs = torch.cartesian_prod(values, values)
        check(tree, [pairs[:, 0].clone(), pairs[:, 1].clone(), pairs[:, 0].flip(0)], rtol=tolerance)


def test_polynomials_are_right_to_the_last_places():
    """e^x, e^x - 1, tanh, ln, ln(1 + e^x) and erf over all of their range, in units of f32's last place."""
    x = torch.cat([torch.linspace(-105, 90, 40001), torch.logspace(-30, 1.9, 20001), -torch.logspace(-30, 1.9, 20001)])
    names = ("exp", "elu", "tanh", "softplus", "erf", "sigmoid")
    exprs = [apply(name, A, params=(1.0,) if OPS[name].params else ()) for name in names]
    tree = Tree(("f32",), tuple((expr, "f32") for expr in (*exprs, apply("log", apply("abs", A)))))
    found, _ = run(tree, [x])
    double = x.double()
    wanted = [double.exp(), torch.where(double > 0, double, double.expm1()), double.tanh(),
              double.clamp(min=0) + (-double.abs()).exp().log1p(), torch.erf(double), double.sigmoid(),
              double.abs().log()]  # fmt: skip
    for name, value, reference in zip((*names, "log"), found, wanted, strict=True):
        finite = reference.abs() < torch.finfo(torch.float32).max
        smallest = 1.0 if name == "sigmoid" else 2.0**-23  # it is 0 where e^-x overflows, as torch has it
        place = (reference.abs() * 2.0**-23).clamp(min=smallest * 2.0**-126)
        places = ((value.double() - reference).abs() / place)[finite].max().item()
        assert places < 4, f"{name} is {places:.1f} places off"
        assert value[~finite].isinf().all()


def test_numbers_below_the_normal_ones():
    values = torch.tensor([1e-40, 3e-45, 1.17549435e-38])
    tree = Tree(("f32",), ((apply("log", A), "f32"), (apply("exp", A * 0.0 - 100.0), "f32")))
    (logs, small), _ = run(tree, [values])
    torch.testing.assert_close(logs.double(), values.double().log(), rtol=1e-6, atol=0)
    assert small.tolist() == [torch.tensor(-100.0).exp().item()] * 3


@pytest.mark.parametrize("wide", [False, True])
def test_what_calls_the_c_library(wide):
    """And is left to torch for that."""
    found = set()
    for name, op in OPS.items():
        module = ir.Module()
        kind = ir.VectorType(ir.DoubleType() if wide else ir.FloatType(), 4)
        function = ir.Function(module, ir.FunctionType(kind, [kind] * op.values), "unit")
        builder = ir.IRBuilder(function.append_basic_block())
        builder.ret(Lanes(builder, 4, wide).emit(name, function.args, [0.7] * len(op.params)))
        if any(not each.name.startswith("llvm.") for each in module.functions if each is not function):
            found.add(name)
    assert found == (CALLS | CALLS_OF_F64 if wide else CALLS)


# -- dtypes ---------------------------------------------------------------------------------------------------------


def test_every_dtype_of_f32():
    """In and out, whole units and odd ends, with results and sums of its own dtype."""
    names = [name for name in DTYPES if name not in ("f64", "i32", "i64")]
    total = len(names)
    tree = Tree(
        (*names, "f32"), tuple((leaf(at) * leaf(total), name) for at, name in enumerate(names)),
        (*(Reduction("max", leaf(at), name) for at, name in enumerate(names)),
         *(Reduction("add", leaf(at), "f32") for at in range(total))),
    )  # fmt: skip
    for size in (64, 21, 5):
        inputs = [randn(3, size, dtype=ALL_DTYPES[name], seed=at) for at, name in enumerate(names)]
        check(tree, [*inputs, torch.full((), 2.0)], (1,))
        check(tree, [*inputs, torch.full((), 2.0)], (0,))


def test_every_dtype_of_f64():
    """Every pair of an input's dtype and a result's."""
    results = tuple((leaf(at) * 3 - leaf(at + 1), name) for at in range(0, 10, 2) for name in DTYPES)
    values = [randn(61, dtype=ALL_DTYPES[name], seed=at) for at, name in enumerate(DTYPES)]
    values = [value.abs() if value.dtype.is_floating_point else value for value in values]
    double = evaluate_tree(Tree(DTYPES, results), values)[0]
    for (expr, name), value, wanted in zip(results, run(Tree(DTYPES, results), values)[0], double, strict=True):
        if name not in ("f16", "bf16", "u8"):
            assert torch.equal(value, wanted), (str(expr), name)
        elif name != "u8":
            torch.testing.assert_close(value, wanted, rtol=torch.finfo(wanted.dtype).eps, atol=0)
        else:
            assert torch.equal(value, wanted.to(torch.int32).to(torch.uint8)), str(expr)


def test_rounding_flags_and_wrapping():
    """Ties of f16 and bf16 go to even, infinities and NaN stay; a bool is what is not 0; small integers wrap."""
    values = torch.tensor([0.0, -0.0, 0.25, 300.0, -3.7, 127.9, 128.0, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8,
                           1 + 3 * 2**-8, 65520.0, 3.4e38, math.inf, -math.inf, math.nan])  # fmt: skip
    tree = Tree(("f32",), tuple((A, name) for name in ("f16", "bf16", "bool", "i8", "u8")))
    (f16, bf16, flags, i8, u8), _ = run(tree, [values])
    torch.testing.assert_close(f16, values.half(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(bf16, values.bfloat16(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(flags.view(torch.uint8), (values != 0).to(torch.uint8))
    assert i8[3:7].tolist() == [44, -3, 127, -128]
    assert u8[3:7].tolist() == [44, 253, 127, 128]


# -- broadcasting ---------------------------------------------------------------------------------------------------

FUSED = Tree(("f16", "f32", "f32"), ((apply("relu", A * B + C), "f16"),))


@pytest.mark.parametrize(
    "make, second, third",
    [
        (blank, (), (1,)),
        (LAST, (24, 1, 1), (24, 1, 1)),
        (blank, (2, 24, 1, 1), (1, 24, 3, 5)),
        (LAST, (2, 1, 1, 1), (5,)),
        (blank, (3, 1), (2, 1, 3, 5)),
        (LAST, (2, 24, 3, 5), ()),
    ],
)
def test_broadcasts(make, second, third):
    whole = like(make, randn(2, 24, 3, 5, dtype=torch.float16))
    rest = [randn(*shape, seed=at) for at, shape in enumerate((second, third))]
    check(FUSED, [whole, *(like(make, each) if each.dim() == 4 else each for each in rest)], make=make)


def test_usual_cases_have_few_axes():
    def lie(shape: Sequence[int], *strides: Sequence[int]) -> tuple[int, int]:
        work = _Work(FUSED, shape, strides, strides[:1], (), 2)
        return work.rows, work.width

    dense, last = (24 * 12, 12, 4, 1), (24 * 12, 1, 4 * 24, 24)
    assert lie((2, 24, 3, 4), dense, dense, dense) == (1, 576)
    assert lie((2, 24, 3, 4), last, last, last) == (1, 576)
    assert lie((2, 24, 3, 4), last, (0, 1, 0, 0), (0, 1, 0, 0)) == (24, 24)
    assert lie((2, 24, 3, 4), dense, (0, 1, 0, 0), (0, 0, 0, 0)) == (48, 12)


def test_other_sizes_need_no_other_kernel():
    def code(batch: int) -> object:
        strides = [(24 * 12, 1, 4 * 24, 24), (0, 1, 0, 0), (0, 1, 0, 0)]
        return _Work(FUSED, (batch, 24, 3, 4), strides, strides[:1], (), 2).code

    assert code(2) == code(3) == code(700)


def test_what_is_the_same_in_a_row_is_computed_once():
    """Of a batch normalisation, all but the product and the sum with x."""
    scale = B * apply("rsqrt", C + 1e-5)
    tree = Tree(("f32",) * 3, ((A * scale + scale * 2, "f32"),))
    work = _Work(tree, (2, 8, 40), [(320, 40, 1), (0, 1, 0), (0, 1, 0)], [(320, 40, 1)], (), 1)
    assert work.code.fixed == [scale, scale * 2]
    check(tree, [randn(2, 8, 40), randn(8, 1), randn(8, 1, seed=3).abs()])


@pytest.mark.parametrize("shape", [(), (1,), (37,), (5, 8), (2, 1, 3, 2, 8), (2, 3, 2, 2, 3, 4)])
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
    check(tree, inputs)
    check(tree, inputs, make=with_gaps)
    written = torch.zeros_like(memory, dtype=torch.bool)
    written[:, 1:9, 8:40:2] = True
    assert torch.equal(memory.isnan(), ~written)


def test_one_layout_to_another():
    """Tiles of both, and odd ends of them."""
    check(Tree(("f32", "f32"), ((A + B, "f32"),)), [randn(2, 150, 11, 13), randn(150, 1, 1)], make=LAST)


def test_expanded_inputs():
    check(Tree(("f32", "f32"), ((A * B, "f32"),)), [randn(17, 1).expand(17, 12), randn(1, 12).expand(17, 12)])


def test_in_place():
    values = randn(3, 47)
    wanted = torch.relu(values + 1)
    tree = Tree(("f32",), ((apply("relu", A + 1), "f32"),))
    TreeKernel(tree, (3, 47), [(47, 1)], [(47, 1)], (), 2)([values.data_ptr()], [values.data_ptr()])
    assert torch.equal(values, wanted)


def test_nothing_beside_a_result_is_written():
    """Before and behind rows whose ends fill no unit."""
    memory = torch.full((5, 80), 7.0)
    rows = memory[1:4, 20:57]
    tree = Tree(("f32",), ((A * 0, "f32"), (A * 0, "i8")))
    small = torch.full((5, 80), 7, dtype=torch.int8)
    kernel = TreeKernel(tree, (3, 37), [(37, 1)], [(80, 1), (80, 1)], (), 2)
    kernel([randn(3, 37).data_ptr()], [rows.data_ptr(), small[1:4, 20:57].data_ptr()])
    assert int((memory == 7).sum()) == int((small == 7).sum()) == 400 - 3 * 37


# -- reductions -----------------------------------------------------------------------------------------------------


SUMS = Tree(("f32", "f32"), (), tuple(Reduction(mode, A * B, "f32") for mode in MODES))


@pytest.mark.parametrize("axes", [(0, 2, 3), (1,), (2, 3), (0,), (0, 1, 2, 3), (0, 2), (1, 3)])
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
    "make, shape, axes, pieces",
    [
        (blank, (32, 3, 65, 65), (0, 2, 3), 5),
        (blank, (2, 40, 3, 5), (0, 2, 3), 1),
        (blank, (1, 4, 257, 260), (2, 3), 3),
        (LAST, (16, 24, 50, 50), (0, 2, 3), 30),
        (LAST, (2, 40, 3, 5), (0, 2, 3), 1),
        (LAST, (3, 800, 19, 19), (2, 3), 8),
    ],
)
def test_results_and_reductions_in_one_pass(make, shape, axes, pieces):
    whole = like(make, randn(*shape, dtype=torch.float16))
    lie = [whole.stride(), (0, 1, 0, 0)]
    assert _Work(BOTH, shape, lie, lie[:1], axes, 2).pieces == pieces
    check(BOTH, [whole, randn(shape[1], 1, 1)], axes, make)


@pytest.mark.parametrize("axes", [(1,), (0,)])
def test_every_width(axes):
    tree = Tree(("f32",), (), (Reduction("add", A, "f32"), Reduction("amax", A, "f32")))
    for width in (1, 2, 3, 7, 8, 15, 16, 17, 33, 500):
        check(tree, [randn(37, width)], axes)


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


@pytest.mark.parametrize("axes, terms", [((0, 1), 10_000_000), ((0,), 1_250_000)])
def test_millions_of_terms(axes, terms):
    """Rounded once: 0.1 added up in f32 alone would be off in the third place."""
    tree = Tree(("f32",), (), (Reduction("add", A, "f32"), Reduction("avg", A, "f32")))
    values = torch.full((1_250_000, 8), 0.1)
    _, (total, mean) = run(tree, [values], axes)
    assert set(total.flatten().tolist()) == {(values[0, 0].double() * terms).float().item()}
    assert set(mean.flatten().tolist()) == {values[0, 0].item()}


# -- refusals, costs, graphs ------------------------------------------------------------------------------------------


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
            TreeKernel(tree, shape, inputs, results, axes)
    with pytest.raises(ValueError, match="dtype is 'e4m3'"):
        TreeKernel(Tree(("e4m3",), ((A, "f32"),)), (4,), [(1,)], [(1,)])


def test_costs_follow_the_bytes():
    device = cpu_device(2)
    strides = [(24 * 12, 1, 4 * 24, 24), (0, 1, 0, 0), (0, 0, 0, 0)]
    moved = 2 * 2 * 2 * 24 * 12 + 4 * 24 + 4
    assert seconds(FUSED, device, (2, 24, 3, 4), strides, strides[:1]) == pytest.approx(
        5e-6 + moved / (0.9 * device.bandwidth), rel=1e-9
    )


BIG = (4, 8, 32, 32)
DENSE = (8192, 1024, 32, 1)


@pytest.mark.parametrize(
    "tree, shape, axes, reason",
    [
        (Tree(("e4m3",), ((A + 1, "f32"),)), BIG, (), "dtype is e4m3"),
        (Tree(("f32",), ((apply("relu", A + 1), "f32"),)), (4, 4, 32, 31), (), "there are 15872 elements"),
        (Tree(("f32",), ((apply("sin", A) + 1, "f32"),)), BIG, (), "sin in f32 calls the C library"),
        (Tree(("f64",), ((apply("exp", A) + 1, "f64"),)), BIG, (), "exp in f64 calls the C library"),
        (Tree(("f32",), ((apply("relu", A), "f32"),)), BIG, (), "it is one operation"),
        (Tree(("f32",), (), (Reduction("add", A, "f32"),)), BIG, (2, 3), "it is one operation"),
        (Tree(("f32",), ((A, "f16"),)), BIG, (), "nothing is computed"),
        (Tree(("f16",), (), (Reduction("add", A, "f32"),)), (2048, 1, 1, 8), (3,), "results have 8 terms"),
        (Tree(("f32",), ((apply("exp", A) + 1, "f32"),)), BIG, (), None),
        (Tree(("f32",), ((apply("tanh", A), "f32"),)), BIG, (), None),
        (Tree(("f16",), ((apply("relu", A), "f16"),)), BIG, (), None),
        (Tree(("f32",), (), (Reduction("add", A, "f32"), Reduction("norm2", A, "f32"))), BIG, (0, 2, 3), None),
    ],
)
def test_what_is_left_to_torch(tree, shape, axes, reason):
    strides = torch.empty(shape, device="meta").stride()
    found = refusal(tree, shape, [strides], [strides] * len(tree.results), axes)
    assert found is None if reason is None else found is not None and found.startswith(reason)


def test_graphs_run_on_it_and_say_so():
    """A block of a network in training: a tree with broadcasting and a residual, one with sums, and a small one."""
    with openconv.Graph("trees") as g:
        x, z = (g.input(shape=BIG, dtype="f32", name=name) for name in "xz")
        scale, bias = (g.input(shape=(1, 8, 1, 1), dtype="f32", name=name) for name in ("scale", "bias"))
        y = g.relu(g.add(g.add(g.mul(x, scale), bias), z)).set_output()
        g.reduction(g.mul(y, z), "add", (0, 2, 3)).set_output()
        g.exp(g.mul(scale, bias)).set_output()
    explained = g.explain()
    kernels = {kernel.engine: kernel for kernel in explained.kernels}
    assert set(kernels) == {"cpu.tree", "torch"}
    fused, small = kernels["cpu.tree"], kernels["torch"]
    assert fused.seconds == pytest.approx(5e-6 + fused.moved / (0.9 * cpu_device(torch.get_num_threads()).bandwidth))
    assert small.refusal.startswith("there are 8 elements")
    assert "why torch: there are 8 elements" in str(explained)
    values = [randn(*BIG), randn(*BIG, seed=1), randn(1, 8, 1, 1), randn(1, 8, 1, 1, seed=2)]
    x_, z_, scale_, bias_ = values
    wanted = torch.relu(x_ * scale_ + bias_ + z_)
    found = g(x_, scale_, bias_, z_)
    torch.testing.assert_close(found[0], wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1], (wanted * z_).sum((0, 2, 3), keepdim=True), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found[2], torch.exp(scale_ * bias_))
    assert g.workspace_bytes() == g.explain().workspace


def test_workspace_is_known_before_a_kernel_is_compiled():
    tree = Tree(("f32",), (), (Reduction("add", A, "f32"), Reduction("max", A, "f32")))
    last = (131072, 1, 4096, 128)
    assert workspace_bytes(tree, (8, 128, 32, 32), [last], [], (0, 2, 3), 2) == 32 * 128 * 2 * 8
    assert workspace_bytes(tree, (8, 128, 2, 2), [(512, 1, 256, 128)], [], (0, 2, 3), 3) == 3 * 128 * 2 * 8
    assert workspace_bytes(tree, (8, 128), [(128, 1)], [], (1,), 2) == 0
