"""cuda.filter2d: filters that are an outer product run as two passes, and only those, checked on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from openconv.cuda import jit
from openconv.cuda.device import ARCHITECTURES, device_for
from openconv.cuda.filter2d import Filter2d, Filter2dKnobs
from openconv.problem import Problem
from openconv.reference import Inputs, Reference, allowed_error, random_inputs
from openconv.tensors import DTYPES, empty, to_layout
from tests.support import candidates, run_engine, this_device

ENGINE = Filter2d()
KNOBS = Filter2dKnobs(staged=True, rows=4, across=16, threads=64, separable=True)
PLAIN = Filter2dKnobs(staged=True, rows=4, across=16, threads=64)
NINE = "n1 c1 h19 w27 k1 r9 s9 pad4"


class Call:
    """A built call and the memory it runs in; ``flags`` says which channels took two passes."""

    def __init__(self, text: str, knobs: Filter2dKnobs = KNOBS) -> None:
        self.problem, self.knobs = Problem.parse(text), knobs
        size = ENGINE.workspace_bytes(self.problem, this_device(), knobs)
        self.workspace = torch.full((size,), 255, dtype=torch.uint8) if size else None
        self.runner = ENGINE.build(self.problem, this_device(), knobs)
        self.given = random_inputs(self.problem)

    def __call__(self, filter_: Tensor, image: Tensor | None = None) -> Tensor:
        """The result, over poisoned memory."""
        problem = self.problem
        a = self.given.a if image is None else image
        b = to_layout(filter_.to(DTYPES[problem.dtypes[1]]).expand(problem.w_shape).contiguous(), problem.layouts[1])
        self.inputs = Inputs(a, b, self.given.operands)
        dtype = DTYPES[problem.result_dtype]
        out = empty(problem.result_shape, dtype, problem.layouts[problem.result], torch.device("cpu"))
        out.fill_(math.nan if dtype.is_floating_point else 113)
        self.runner(a, b, out, self.workspace, self.given.operands)
        return out

    @property
    def flags(self) -> list[int]:
        assert self.workspace is not None
        return self.workspace.view(torch.int32).view(self.problem.c, -1)[:, 64].tolist()

    def check(self, filter_: Tensor, flags: list[int]) -> Tensor:
        """Within the stated error of float64, on the path that is expected."""
        out = self(filter_)
        assert self.flags == flags
        error = Reference(self.problem, self.inputs).error(out)
        allowed = allowed_error(self.problem, ENGINE.traits(self.problem, self.knobs))
        assert error <= allowed, f"'{self.problem}': error {error:.3g}, allowed {allowed:.3g}"
        return out


def gaussian(rows: int, columns: int | None = None, sigma: float = 2.0) -> Tensor:
    """Normalised, in float64."""
    lines = [torch.arange(taps, dtype=torch.float64) - (taps - 1) / 2 for taps in (rows, columns or rows)]
    one, other = (torch.exp(-line.square() / (2 * sigma**2)) for line in lines)
    return torch.outer(one / one.sum(), other / other.sum())


def binomial(taps: int) -> Tensor:
    return torch.tensor([math.comb(taps - 1, k) for k in range(taps)], dtype=torch.float64)


def sobel(taps: int) -> Tensor:
    """Smooth down, differences along: the middle column is 0."""
    difference = torch.nn.functional.conv1d(
        binomial(taps - 2).view(1, 1, -1), torch.tensor([[[1.0, 0.0, -1.0]]], dtype=torch.float64), padding=2
    ).flatten()
    return torch.outer(binomial(taps), difference)


# -- which filters ----------------------------------------------------------------------------------------------------


def test_separable_filters_are_found():
    call = Call(f"fprop {NINE}")
    random = torch.Generator().manual_seed(0)
    some = [torch.randn(9, generator=random, dtype=torch.float64) for _ in range(2)]
    sparse = torch.outer(some[0], some[1])
    sparse[2] = sparse[:, 5] = 0
    single = torch.zeros(9, 9)
    single[3, 7] = -0.3
    for filter_ in (
        torch.full((9, 9), 1 / 81),
        gaussian(9),
        gaussian(9, sigma=1.0).float().double() * 1e-20,
        gaussian(9).float() * -3e20,
        sobel(9),
        sobel(9).T / 4096,
        torch.outer(some[0], some[1]),
        torch.outer(some[0].float(), some[1].float()),
        sparse,
        single,
    ):
        call.check(filter_, [1])


def test_other_filters_run_as_they_did():
    """The bits of the kernel that does not look."""
    call, plain = Call(f"fprop {NINE}"), Call(f"fprop {NINE}", PLAIN)
    random = torch.Generator().manual_seed(0)
    corner = torch.zeros(9, 9)
    corner[0, 0] = corner[8, 8] = 1
    hole = torch.ones(9, 9)
    hole[4, 4] = 0
    whole = torch.outer(torch.tensor([3.0, 5, 7, 3, 5, 7, 3, 5, 7]), torch.full((9,), 3.0))
    whole[:, 4] = 5  # 5/3 of each row: factors of whole numbers would be rounded
    for filter_ in (torch.randn(9, 9, generator=random), gaussian(9) + torch.eye(9) * 1e-3, corner, hole, whole):
        call.check(filter_, [0])
        assert torch.equal(call(filter_), plain(filter_))
    zeros = call(torch.zeros(9, 9))
    assert not zeros.any()


def test_one_tap_makes_the_difference():
    call = Call(f"fprop {NINE}")
    exact = torch.outer(binomial(9), binomial(9)) / 3  # the same rounding for all taps of a kind
    for at in ((0, 0), (4, 4), (8, 3)):
        for size, flag in ((2.0**-23, 1), (2.0**-19, 0), (-(2.0**-19), 0)):
            filter_ = exact.clone()
            filter_[at] *= 1 + size
            call.check(filter_, [flag])


def test_whole_numbers_stay_exact():
    call, random = Call(f"fprop {NINE}"), torch.Generator().manual_seed(0)
    image = torch.randint(-9, 10, call.given.a.shape, generator=random).float()
    for filter_ in (torch.ones(9, 9), sobel(9), torch.outer(binomial(9), torch.arange(1.0, 10))):
        out = call(filter_, image)
        assert call.flags == [1]
        wanted = torch.nn.functional.conv2d(image.double(), filter_.double().view(1, 1, 9, 9), padding=4)
        assert torch.equal(out.double(), wanted)


def test_rounded_taps():
    """In f16 a box and a binomial filter are what they were; a Gaussian is no outer product any more."""
    for dtype in ("f16", "bf16"):
        call = Call(f"fprop {NINE} {dtype}")
        call.check(torch.full((9, 9), 1 / 81), [1])
        few = torch.outer(torch.tensor([1.0, 2, 3, 4, 5, 4, 3, 2, 1]), torch.tensor([1.0, 1, 2, 2, 3, 2, 2, 1, 1])) / 64
        call.check(few, [1])
        call.check(gaussian(9), [0])


def test_bytes():
    call = Call(f"fprop {NINE} u8")
    few = torch.outer(torch.tensor([1, 2, 3, 4, 5, 4, 3, 2, 1]), torch.tensor([2, 4, 6, 8, 10, 8, 6, 4, 50]))
    for filter_, flag in ((torch.full((9, 9), 255), 1), (few, 1), (few + torch.eye(9, dtype=torch.int64), 0)):
        call.check(filter_, [flag])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_filters_of_no_numbers(value):
    call, plain = Call(f"fprop {NINE}"), Call(f"fprop {NINE}", PLAIN)
    filter_ = gaussian(9).float()
    for at in ((0, 0), (4, 4)):
        filter_[at] = value
        out = call(filter_)
        assert call.flags == [0]
        assert torch.equal(out.nan_to_num(7, 8, 9), plain(filter_).nan_to_num(7, 8, 9))


def test_extreme_filters():
    """Factors that overflow or have no digits left are none; what is found stays within the error."""
    call = Call(f"fprop {NINE}")
    line = torch.logspace(-18, 18, 9, dtype=torch.float64)
    call.check(torch.outer(line, line.flip(0)), [1])
    call(torch.outer(line, line))  # from 1e-36 to 1e36
    subnormal = gaussian(9, sigma=0.7).float() * 1e-30
    out = call(subnormal)
    assert (out - call.given.a.new_tensor(0)).abs().max() < 1e-28
    assert call.flags == [0]


# -- which results ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "knobs"),
    [
        ("fprop n2 c1 h37 w70 k1 r9 s13 pad1:6,0:9", KNOBS),  # several tiles, of which the last hang over
        ("dgrad n1 c1 h37 w70 k1 r13 s9 pad2:0,7:1", KNOBS),
        ("fprop n1 c1 h40 w36 k1 r31 s31 pad15", Filter2dKnobs(True, 8, 32, 128, True)),
        ("fprop n1 c1 h35 w40 k1 r10 s12 pad5", Filter2dKnobs(True, 8, 8, 64, True)),
        ("dgrad n1 c1 h35 w140 k1 r15 s15 pad7 bf16", Filter2dKnobs(True, 16, 32, 64, True)),
    ],
)
def test_any_size_and_padding(text, knobs):
    problem = Problem.parse(text)
    rows, columns = problem.filter
    ramp = torch.outer(torch.arange(1.0, rows + 1), torch.arange(1.0, columns + 1) / 32)  # as it is, in every dtype
    call = Call(text, knobs)
    call.check(ramp, [1])
    odd = ramp.clone()
    odd[rows - 1, 0] = 0.125
    call.check(odd, [0])


@pytest.mark.parametrize(
    "text",
    [
        "fprop n2 c3 h19 w24 k3 r9 s9 pad4 g3 nchw +bias+residual+relu",
        "dgrad n2 c3 h17 w21 k3 r9 s9 pad4 g3 nhwc +scale",
    ],
)
def test_each_channel_for_itself(text):
    call = Call(text)
    filter_ = gaussian(9).repeat(3, 1, 1, 1)
    filter_[1, 0, 2, 2] *= 1.01
    filter_[2, 0] = torch.outer(torch.arange(1.0, 10), torch.arange(9.0, 0, -1))
    call.check(filter_, [1, 0, 1])
    call.check(filter_.flip(0), [1, 0, 1])
    call.check(filter_.roll(1, 0), [1, 1, 0])


def test_the_filter_of_each_call_counts():
    call = Call(f"fprop {NINE}")
    other = torch.randn(9, 9, generator=torch.Generator().manual_seed(0))
    first = call.check(gaussian(9), [1])
    call.check(other, [0])
    call.check(gaussian(9).T * 2, [1])
    assert torch.equal(call.check(gaussian(9), [1]), first)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_infinities_and_nans_stay_where_they_belong(direction, value):
    call = Call(f"{direction} {NINE}")
    filter_ = gaussian(9).float()
    filter_[3] = filter_[:, 0] = 0
    for at in ((0, 0), (9, 13), (18, 26), (4, 26)):
        image = call.given.a.clone()
        image[0, 0][at] = value
        hit = ~torch.isfinite(call(filter_, image)[0, 0])
        assert call.flags == [1]
        touched = torch.zeros(19, 27, dtype=torch.bool)
        touched[max(at[0] - 4, 0) : at[0] + 5, max(at[1] - 4, 0) : at[1] + 5] = True
        assert torch.equal(hit, touched)


def test_large_values_overflow_no_sooner():
    call = Call(f"fprop {NINE}")
    image = torch.full_like(call.given.a, 3e38)
    out = call(torch.full((9, 9), 2.0**-7), image)
    assert call.flags == [1]
    assert torch.isfinite(out).all()


# -- when -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "looks"),
    [
        ("fprop n1 c1 h4000 w4000 k1 r9 s9 pad4", True),
        ("dgrad n1 c1 h4000 w4000 k1 r15 s15 pad7 f16", True),
        ("fprop n1 c3 h1080 w1920 k3 r31 s31 pad15 g3 nhwc", True),
        ("fprop n64 c1 h224 w224 k1 r9 s9 pad4", False),
        ("fprop n1 c1 h4000 w4000 k1 r7 s7 pad3", False),
        ("fprop n1 c1 h4000 w4000 k1 r1 s31 pad0,15", False),
        ("wgrad n1 c1 h4000 w4000 k1 r15 s15 pad7", False),
    ],
)
def test_large_filters_of_large_images(text, looks):
    problem = Problem.parse(text)
    found = list(candidates(ENGINE, problem))
    default = found[0]
    assert getattr(default.knobs, "separable", False) == looks
    if looks:
        assert default.workspace == 272 * problem.c
        assert all(c.knobs.separable for c in found if c.knobs.staged)
        assert default.cost - ENGINE.cost(problem, this_device(), PLAIN) < 3e-6
    for candidate in found:
        if problem.direction != "wgrad" and candidate.traits.batch_invariant:
            assert candidate.knobs.separable == looks
    batch = next(candidates(ENGINE, problem.with_(n=256)))
    assert getattr(batch.knobs, "separable", False) == looks


def test_the_same_bits_in_any_batch():
    problem = Problem.parse("fprop n3 c1 h19 w27 k1 r9 s9 pad4")
    filter_ = gaussian(9).float().view(1, 1, 9, 9)
    candidate = next(c for c in candidates(ENGINE, problem) if c.knobs.separable)
    whole = run_engine(ENGINE, problem, candidate=candidate, inputs=(random_inputs(problem).a, filter_, ()))
    for first in range(3):
        part = (whole.a[first : first + 1].clone(), filter_, ())
        alone = run_engine(ENGINE, problem.with_(n=1), candidate=candidate, inputs=part)
        assert torch.equal(alone.out, whole.out[first : first + 1])


@pytest.mark.parametrize("arch", [ARCHITECTURES[0], "sm_80", "sm_90a", ARCHITECTURES[-1]])
def test_stays_in_registers(arch):
    """And takes hardly more of them than the kernel without: a filter of full rank must not pay for the others."""
    problem, device = Problem.parse("fprop n1 c1 h4000 w4000 k1 r15 s15 pad7"), device_for(arch)
    plain, both, factors = (
        jit.usage(source, arch)[0]
        for looks in (False, True)
        for source in ENGINE.sources(problem, device, Filter2dKnobs(True, 8, 32, 128, looks))
    )
    assert plain.spills == both.spills == factors.spills == 0
    assert both.registers <= plain.registers + 8
    assert both.shared == plain.shared
