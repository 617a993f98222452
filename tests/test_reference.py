"""The float64 reference: against the definition written down once more, and its parts against the whole."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch

from openconv.problem import Problem
from openconv.reference import Inputs, Reference, error_of, expected, part_of, parts_of, random_inputs

LINES = (
    "fprop n5 c4 h9 w8 k6 r3 s2 stride2 pad1:2 g2 f32 nhwc",
    "dgrad n5 c4 h9 w8 k6 r3 s2 stride2 pad1:2,0 g2 f16",
    "wgrad n3 c4 h9 w8 k6 r3 s2 pad1:2 dil2 g2 bf16",
    "dgrad n3 c8 w9 k6 s3 pad1 complex64",
    "wgrad n2 c3 d5 h4 w6 k5 t2 r3 s2 pad1 f64",
    "fprop n3 c4 h5 w5 k9 r3 s3 pad1 f32 nchw +mul(c.gain)+residual+relu",
)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("most", [1e9, 1000, 200, 1])
def test_a_part_has_the_values_of_the_whole(line, most):
    problem = Problem.parse(line)
    inputs = random_inputs(problem)
    part = part_of(problem, most)
    whole, some = expected(problem, inputs)[part.result], expected(part.problem, part.inputs(inputs))
    assert some.numel() > 0
    torch.testing.assert_close(some, whole, rtol=1e-12, atol=1e-12)
    assert part.problem.macs <= problem.macs
    if most == 1e9:
        assert part.problem == problem


@pytest.mark.parametrize(
    "line",
    [
        "fprop n1 c1 h40 w12 k1 r7 s3 pad3,1 f32 nchw",
        "fprop n1 c2 h41 w9 k2 r3 s3 stride2 pad2:1 dil2 g2 f32 nhwc +bias+residual+relu",
        "fprop n1 c1 w100 k1 s5 stride3 pad4:0 f64 nchw",
        "fprop n1 c1 d9 h5 w5 k1 t3 r3 s3 pad1 f32 nchw",
        "fprop n1 c1 h1 w50 k1 r1 s3 f32 nchw",
        "dgrad n1 c1 h90 w12 k1 r7 s3 pad3,1 f32 nchw",
        "dgrad n1 c2 h91 w9 k2 r3 s3 stride2 pad2:1 dil2 g2 f32 nhwc +residual+relu",
        "dgrad n1 c1 w200 k1 s2 stride5 pad4:0 f64 nchw",
        "dgrad n1 c1 w203 k1 s1 stride5 f64 nchw",
        "dgrad n1 c1 d40 h5 w5 k1 t3 r3 s3 pad1 f32 nchw",
        "wgrad n1 c1 h20 w12 k1 r17 s3 pad8,1 f32 nchw",
        "wgrad n2 c2 h41 w9 k2 r17 s3 stride2,1 pad2:0,1 dil2,1 g2 f32 nhwc",
        "wgrad n1 c1 w100 k1 s40 stride3 pad4:0 f64 nchw",
    ],
)
def test_a_large_image_is_compared_by_its_first_and_last_rows(line):
    problem = Problem.parse(line)
    inputs = random_inputs(problem)
    whole = expected(problem, inputs)
    rows = whole.shape[2]
    parts = parts_of(problem, problem.macs / 8)
    assert len(parts) == (2 if rows > 1 or whole.ndim > 3 else 1)
    for part in parts:
        some = expected(part.problem, part.inputs(inputs))
        torch.testing.assert_close(some, whole[part.result], rtol=1e-12, atol=1e-12)
    assert sum(part.problem.macs for part in parts) <= problem.macs / 4
    for row in (0, rows - 1):  # a fault in either is seen
        faulty = whole.to(inputs.a.dtype)
        faulty[:, :, row] += 10
        assert Reference(problem, inputs, most_macs=problem.macs / 8).error(faulty) > 0.01


@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
def test_rows_that_are_still_too_many_are_cut_short(direction):
    problem = Problem.parse("fprop n1 c1 d3 h30 w30 k1 t3 r9 s9 pad1,4,4 f64 nchw").with_(direction=direction)
    inputs = random_inputs(problem)
    whole = expected(problem, inputs)
    parts = parts_of(problem, problem.macs / 300)
    assert len(parts) > 2
    assert sum(part.problem.macs for part in parts) <= problem.macs / 5
    for part in parts:
        some = expected(part.problem, part.inputs(inputs))
        torch.testing.assert_close(some, whole[part.result], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("line", ["fprop n1 c1 h4 w90 k1 r3 s3 pad9,1", "wgrad n1 c1 h1 w90 k1 r9 s3 pad4,1"])
def test_rows_that_hold_padding_alone_are_not_taken_by_themselves(line):
    problem = Problem.parse(line)
    inputs = random_inputs(problem)
    whole = expected(problem, inputs)
    for part in parts_of(problem, problem.macs / 8):
        some = expected(part.problem, part.inputs(inputs))
        torch.testing.assert_close(some, whole[part.result], rtol=1e-12, atol=1e-12)


def test_the_reference_is_the_definition():
    problem = Problem.parse("fprop n1 c2 h4 w5 k4 r2 s3 stride2,1 pad1:0,1:2 dil1,2 g2 f64")
    inputs = random_inputs(problem)
    x, w, wanted = inputs.a, inputs.b, torch.zeros(problem.y_shape, dtype=torch.float64)
    for k, p, q, r, s in product(range(4), *map(range, problem.out), range(2), range(3)):
        h, v = 2 * p - 1 + r, q - 1 + 2 * s
        if 0 <= h < 4 and 0 <= v < 5:
            wanted[0, k, p, q] += x[0, k // 2, h, v] * w[k, 0, r, s]
    torch.testing.assert_close(expected(problem, inputs), wanted)


@pytest.mark.parametrize("direction", ["dgrad", "wgrad"])
def test_the_backward_passes_are_its_gradients(direction):
    forward = Problem.parse("fprop n2 c4 h6 w5 k6 r3 s2 stride2,1 pad1:2,0:1 g2 f64")
    problem = forward.with_(direction=direction)
    given = random_inputs(problem)
    x, w = random_inputs(forward).a.requires_grad_(), random_inputs(forward).b.requires_grad_()
    one, other = (given.a, given.b) if direction == "wgrad" else (given.b, given.a)
    inputs = type(given)(one, w) if direction == "wgrad" else type(given)(x, one)
    wanted = torch.autograd.grad(expected(forward, inputs), w if direction == "wgrad" else x, other)[0]
    torch.testing.assert_close(expected(problem, given), wanted)


def test_integers_wrap_as_their_type_does():
    problem = Problem.parse("fprop n1 c64 w9 k2 s3 i8")
    inputs = random_inputs(problem)
    exact = expected(problem, inputs).round().long()
    assert int(exact.abs().max()) > 127 or error_of(problem, exact.to(torch.int8), inputs) == 0
    wrapped = exact.to(torch.int8)
    assert error_of(problem, wrapped, inputs) == 0
    wrapped.flatten()[3] += 1
    assert error_of(problem, wrapped, inputs) == 1


def test_half_precision_below_its_smallest_normal_number_is_no_error():
    problem = Problem.parse("dgrad n2 c64 h4 w4 k1 r4 s4 f16 nhwc")  # each result is a single product
    inputs = random_inputs(problem)
    small = dataclasses.replace(inputs, a=inputs.a * 1e-2, b=inputs.b * 1e-2)
    assert error_of(problem, expected(problem, small).half(), small) <= 1.001 * 2.0**-11
    assert error_of(problem, 2 * expected(problem, small).half(), small) > 0.1


def test_errors_of_what_is_no_plain_sum_are_shares_of_the_largest_size():
    """A corner of a padded image has few terms; a transform errs there as far as in the middle."""
    problem = Problem.parse("fprop n1 c1 h9 w9 k1 r5 s5 pad4 f64 nchw")
    inputs = random_inputs(problem)
    off = expected(problem, inputs)
    sizes = expected(problem, Inputs(inputs.a.abs(), inputs.b.abs()))
    off[0, 0, 0, 0] += 1e-3
    assert error_of(problem, off, inputs) == pytest.approx(1e-3 / float(sizes[0, 0, 0, 0]))
    assert error_of(problem, off, inputs, plain_sum=False) == pytest.approx(1e-3 / float(sizes.max()))
    off[0, 0, 6, 6] = torch.nan
    assert error_of(problem, off, inputs, plain_sum=False) == torch.inf


def test_the_largest_size_is_that_of_all_parts_which_are_compared():
    problem = Problem.parse("fprop n1 c1 h64 w8 k1 r3 s3 pad1 f64 nchw")
    inputs = random_inputs(problem)
    reference = Reference(problem, inputs, most_macs=problem.macs / 8)
    off = expected(problem, inputs)
    off[0, 0, 0, 0] += 1e-3
    sizes = expected(problem, Inputs(inputs.a.abs(), inputs.b.abs()))
    seen = torch.cat([sizes[part.result].flatten() for part in parts_of(problem, problem.macs / 8)])
    assert reference.error(off, plain_sum=False) == pytest.approx(1e-3 / float(seen.max()))
    assert reference.error(off, plain_sum=False) < reference.error(off)
