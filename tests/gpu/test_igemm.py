"""cuda.igemm on the GPU: layers of networks, every precision, bits that do not depend on the batch."""

from __future__ import annotations

import pytest

from openconv.cuda.igemm import Igemm
from openconv.problem import DIRECTIONS, Problem
from tests.support import (
    accepts,
    check_batch_invariance,
    check_determinism,
    check_engine,
    make,
    reference,
    run_engine,
)

LAYERS = (
    "n4 c64 h28 w28 k64 r3 s3 pad1",
    "n3 c128 h29 w27 k96 r3 s3 stride2 pad1",
    "n2 c256 h14 w14 k512 r1 s1",
    "n2 c6 h9 w8 k10 r3 s3 pad1",
    "n2 c64 h15 w15 k64 r3 s3 pad2 dil2",
    "n2 c3 h40 w40 k64 r7 s7 stride2 pad3",
    "n1 c209 h9 w11 k77 r3 s3 pad1",
    "n2 c64 h14 w14 k128 r3 s3 pad1 g4",
    "n2 c256 h8 w8 k256 r3 s3 pad1 g32",
    "n2 c48 d6 h10 w9 k32 t3 r3 s3 pad1",
    "n2 c40 h17 w19 k72 r5 s5 pad2",
    "n2 c96 w333 k64 s7 stride3 pad2:4",
    "n1 c1024 h7 w7 k128 r3 s3 pad1",
)
TYPES = ("f16", "bf16", "f32 ieee", "f32 tf32", "f32 tf32x3", "i8*i8>i32", "i8*i8>f32", "f16*f16>f32", "e4m3*e4m3>f16",
         "e4m3*e5m2>bf16", "e5m2*e4m3>f32", "e5m2*e5m2>f16")  # fmt: skip
ENGINE = Igemm()


def problem_of(text: str, direction: str, dtype: str, layout: str) -> Problem:
    dtype, _, precision = dtype.partition(" ")
    return make(f"{text} {precision}".strip(), direction, dtype, layout)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_layers_are_right(direction, dtype, layout):
    if "*" in dtype and direction != "fprop":
        pytest.skip("a forward pass")
    if dtype[0] == "e" and not accepts(ENGINE, problem_of(LAYERS[0], direction, dtype, layout)):
        pytest.skip("products of sm_89 and later")
    # Each is a kernel to compile: of the others some.
    whole = layout == "nhwc" and dtype in ("f16", "f32 ieee", "f32 tf32x3")
    for text in LAYERS if whole else LAYERS[::3]:
        check_engine(ENGINE, problem_of(text, direction, dtype, layout))


@pytest.mark.parametrize("dtype", ["f16", "f32 ieee", "f32 tf32x3"])
def test_bits_repeat_and_do_not_depend_on_the_batch(dtype):
    for text in LAYERS[:8:2]:
        for direction in ("fprop", "dgrad"):
            assert check_batch_invariance(ENGINE, problem_of(text, direction, dtype, "nhwc"))
        check_determinism(ENGINE, problem_of(text, "wgrad", dtype, "nhwc"))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_tf32x3_is_as_exact_as_f32(direction):
    """Within twice the error of the same sums in f32."""
    for text in LAYERS[:3]:
        errors = []
        for precision in ("ieee", "tf32x3"):
            run = run_engine(ENGINE, problem_of(text, direction, f"f32 {precision}", "nhwc"))
            errors.append((run.out.double() - reference(run.core, run.a, run.b)).abs().max().item())
        assert errors[1] <= 2 * errors[0], (text, errors)
