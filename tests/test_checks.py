"""The tests' own tools: the reference against the definition in plain Python, and every check against an engine that
breaks what it guards."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch

from openconv.cpu.naive import Naive
from openconv.engine import Traits
from openconv.epilogue import IDENTITY
from openconv.evaluate import evaluate
from openconv.problem import DIRECTIONS, Problem
from tests import support
from tests.support import EPILOGUES, bounds, cases, make, reference, tensors, tolerance

TINY = (
    "3x3-unpadded", "stride-leaves-a-rest", "padding-beyond-image", "pixel-3x3", "filter-beyond-image", "1x1-padded",
    "groups-of-one-filter", "1d-stride", "patches-3d",
)  # fmt: skip


def products(problem):
    """(index into x, index into w, index into y) of every product, from the formula in the Problem's docstring."""
    taps = list(itertools.product(*map(range, problem.filter)))
    outputs = list(itertools.product(*map(range, problem.out)))
    axes = list(zip(problem.stride, problem.padding, problem.dilation, strict=True))
    cg, kg = problem.c // problem.groups, problem.k // problem.groups
    for n, k, c in itertools.product(range(problem.n), range(problem.k), range(cg)):
        for p, r in itertools.product(outputs, taps):
            at = [q * stride - pad[0] + s * dil for q, s, (stride, pad, dil) in zip(p, r, axes, strict=True)]
            if all(0 <= a < size for a, size in zip(at, problem.spatial, strict=True)):
                yield (n, k // kg * cg + c, *at), (k, c, *r), (n, k, *p)


@pytest.mark.parametrize("problem", cases(TINY, dtypes=["i64"]), ids=str)
def test_reference_is_the_definition(problem):
    a, b, _ = tensors(problem, 3)
    wanted = torch.zeros(problem.result_shape, dtype=torch.int64)
    first, second = {"fprop": (0, 1), "dgrad": (2, 1), "wgrad": (0, 2)}[problem.direction]
    x, y = a.tolist(), b.tolist()

    def pick(nested, index):
        for i in index:
            nested = nested[i]
        return nested

    for places in products(problem):
        wanted[places[problem.result]] += pick(x, places[first]) * pick(y, places[second])
    assert torch.equal(reference(problem, a, b), wanted)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_complex_reference_is_linear_in_both_parts(direction):
    problem = make("n1 c2 h5 w4 k2 r3 s2 pad1", direction, "complex128")
    a, b, _ = tensors(problem)
    assert torch.allclose(reference(problem, a * 1j, b), reference(problem, a, b) * 1j)
    assert torch.allclose(reference(problem, a, b * 1j), reference(problem, a, b) * 1j)
    real = problem.with_(dtypes="f64")
    assert torch.allclose(reference(problem, a.real + 0j, b.real + 0j).real, reference(real, a.real, b.real))


def test_tensors_are_what_the_problem_says():
    problem = Problem.parse("fprop n2 c3 h4 w5 k6 r3 s3 pad1 f16*f16>f32 nhwc*nchw>nhwc +bias+residual+mul(s.a)")
    x, w, (bias, residual, gain) = tensors(problem, 5)
    assert [t.dtype for t in (x, w, bias, residual)] == [torch.float16, torch.float16, torch.float32, torch.float32]
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert w.is_contiguous()
    assert [tuple(t.shape) for t in (bias, residual, gain)] == [(6,), (2, 6, 4, 5), ()]
    for integers in (False, True):
        for value in (*tensors(problem, 5, integers=integers)[:2], *tensors(problem, 5, integers=integers)[2]):
            assert (value != 0).all()
            assert not integers or (value == value.round()).all()
    assert torch.equal(tensors(problem, 5)[0], x)
    assert not torch.equal(tensors(problem, 6)[0], x)


def test_bounds_hold_for_torch_itself_and_are_tight():
    """torch's own f32 convolution and epilogue keep the bounds; an accumulator of bf16 does not."""
    for epilogue in ("", *EPILOGUES):
        problem = make(f"n2 c8 h9 w9 k4 r3 s3 pad1 {epilogue}")
        x, w, operands = tensors(problem)
        plain = problem.with_(epilogue=IDENTITY)
        total = torch.nn.functional.conv2d(x, w, padding=1)
        values = dict(zip([o.name for o in problem.epilogue.operands], operands, strict=True))
        out = evaluate(problem.epilogue, total, values)
        support.assert_right(problem, out, x, w, operands)
        rough = torch.nn.functional.conv2d(x.bfloat16(), w.bfloat16(), padding=1).float()
        with pytest.raises(AssertionError, match="elements are wrong"):
            support.assert_right(plain, rough, x, w)
        limit = bounds(problem, x, w, operands)
        assert limit.shape == out.shape
        assert (limit < 1e-2).all()


def test_tolerance_grows_with_the_reduction_and_the_unit():
    short, long = make("n1 c1 h4 w4 k1 r1 s1"), make("n1 c100 h4 w4 k1 r3 s3")
    assert tolerance(short) < tolerance(long) < 1e-3
    assert tolerance(long) == pytest.approx(900 * 2.0**-24, rel=0.01)
    assert tolerance(long.with_(dtypes="f64")) < 1e-12
    assert tolerance(long.with_(precision="tf32")) > tolerance(long) + 2.0**-11
    assert tolerance(long.with_(dtypes="i32")) == 0


# -- engines that break one thing --------------------------------------------------------------------------------

PROBLEM = make("n3 c4 h6 w7 k4 r3 s3 pad1 g2")


class Broken(Naive):
    """Runs cpu.naive, then harms what it is told to."""

    workspace = 0

    def __init__(self, harm, claim=None, workspace=0):
        self.harm, self.claim, self.workspace = harm, claim, workspace

    def traits(self, problem, knobs):
        return self.claim or super().traits(problem, knobs)

    def workspace_bytes(self, problem, device, knobs):
        return self.workspace

    def build(self, problem, device, knobs):
        run = super().build(problem, device, knobs)

        def harmed(a, b, out, workspace, bias):
            run(a, b, out, workspace, bias)
            self.harm(a=a, b=b, out=out, workspace=workspace, problem=problem, device=device)

        return harmed


def beyond(tensor, offset):
    """The element so far behind the end of a dense tensor, or before its start."""
    at = tensor.storage_offset() + (offset if offset < 0 else tensor.numel() + offset)
    return tensor.as_strided((1,), (1,), at)


@pytest.mark.parametrize(
    "harm, message",
    [
        (lambda out, **_: out[-1, -1, -1, -1].fill_(math.nan), "1 of 504 elements are wrong"),
        (lambda out, **_: out[0, 0, 0, 0].mul_(1.001), "1 of 504 elements are wrong"),
        (lambda out, **_: out[0, 0, 0, 0].mul_(1 + 2e-6), "wrong|claimed"),
        (lambda out, **_: beyond(out, 0).fill_(1), "wrote beyond its result"),
        (lambda out, **_: beyond(out, -1).fill_(1), "wrote beyond its result"),
        (lambda workspace, **_: beyond(workspace, 0).fill_(1), "wrote beyond its workspace"),
        (lambda workspace, **_: beyond(workspace, -1).fill_(1), "wrote beyond its workspace"),
        (lambda a, **_: a.mul_(2), "changed an input"),
        (lambda b, **_: b[0].zero_(), "changed an input"),
        (lambda a, out, **_: out.add_(beyond(a, 0)), "elements are wrong"),
        (lambda workspace, out, **_: out.add_(workspace.view(torch.float32)[0]), "elements are wrong"),
    ],
    ids=["nan", "error", "small-error", "after-out", "before-out", "after-workspace", "before-workspace", "changes-a",
         "changes-b", "reads-beyond", "reads-workspace"],
)  # fmt: skip
def test_check_engine_notices(harm, message):
    support.check_engine(Naive(), PROBLEM)
    with pytest.raises(AssertionError, match=message) as error:
        support.check_engine(Broken(harm, workspace=64), PROBLEM)
    assert f"tests.support '{PROBLEM}' --seed 0" in str(error.value)


def test_exact_data_notices_what_the_tolerance_allows():
    with pytest.raises(AssertionError, match="integer data"):
        support.check_engine(Broken(lambda out, **_: out.mul_(1 + 2.0**-23), Traits("f32", 1e-6)), PROBLEM)


def test_a_claimed_error_is_held_to():
    with pytest.raises(AssertionError, match="claimed 1e-12"):
        support.check_engine(Broken(lambda **_: None, Traits("f64", 1e-12)), PROBLEM)


def test_check_determinism_notices():
    calls = itertools.count()
    with pytest.raises(AssertionError, match="other bits"):
        support.check_determinism(Broken(lambda out, **_: out.add_(next(calls))), PROBLEM)


def test_check_thread_independence_notices():
    with pytest.raises(AssertionError, match="threads"):
        support.check_thread_independence(Broken(lambda out, device, **_: out.add_(device.threads)), PROBLEM)


def test_check_batch_invariance_notices(monkeypatch):
    harm = lambda out, problem, **_: out.mul_(1 + 1e-6 * problem.n)  # noqa: E731
    honest, lying = Broken(harm, Traits("f64", 1e-6, batch_invariant=False)), Broken(harm)
    for engine in (honest, lying):
        for module in ("openconv.engine", "openconv.select.choose"):
            monkeypatch.setattr(sys.modules[module], "engines", lambda *_, engine=engine: (engine,))
        if engine is honest:
            assert not support.check_batch_invariance(engine, PROBLEM)
        else:
            with pytest.raises(AssertionError, match="alone"):
                support.check_batch_invariance(engine, PROBLEM)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_check_locality_notices(direction):
    problem = PROBLEM.with_(direction=direction)

    def spread(out, **_):
        out.add_(out.sum() * 0)

    with pytest.raises(AssertionError, match="have no part"):
        support.check_locality(Broken(spread), problem)
    with pytest.raises(AssertionError, match="miss the"):
        support.check_locality(Broken(lambda out, **_: out.copy_(out.nan_to_num(0, 0, 0))), problem)


def test_check_hidden_memory_notices():
    large = make("n2 c4 h40 w40 k4 r3 s3")
    with pytest.raises(AssertionError, match="besides its workspace"):
        support.check_hidden_memory(Broken(lambda out, **_: out.clone()), large)
    with pytest.raises(AssertionError, match="besides its workspace"):
        support.check_hidden_memory(Broken(lambda out, **_: out.numpy().copy()), large)
