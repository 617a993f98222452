"""cuda.igemm_sm90 on the GPU: layers of networks with several of its tiles, all that is fused, bits that repeat, random
problems.

The default search is small. To search for long, in processes that share the compiling::

    OPENCONV_FUZZ=5000 python -m pytest tests/gpu/test_igemm_sm90.py -n 14 -k any_problem
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from openconv.cuda.igemm import Igemm
from openconv.cuda.igemm_sm90 import IgemmSm90, _work, tiles
from openconv.plan import make_plan
from openconv.problem import DIRECTIONS, Problem
from openconv.reference import random_inputs
from openconv.select import Policy
from tests.support import (
    accepts,
    check_batch_invariance,
    check_determinism,
    check_engine,
    check_fused,
    core_of,
    make,
    problems,
    reference,
    run_engine,
    this_device,
    with_knobs,
)
from tests.test_fuzz import EXAMPLES

ENGINE = IgemmSm90()
PARTS = 28
LAYERS = (
    "n4 c64 h28 w28 k64 r3 s3 pad1",
    "n3 c128 h29 w27 k96 r3 s3 stride2 pad1",
    "n2 c256 h14 w14 k512 r1 s1",
    "n64 c256 h14 w14 k256 r3 s3 pad1",
    "n2 c64 h15 w15 k64 r3 s3 pad2 dil2",
    "n2 c72 h17 w19 k40 r5 s5 pad2:1,3:0",
    "n2 c128 h14 w14 k256 r3 s3 pad1 g2",
    "n2 c48 d6 h10 w9 k32 t3 r3 s3 pad1",
    "n2 c96 w333 k64 s7 stride2 pad2:4",
    "n1 c1024 h7 w7 k128 r3 s3 pad1",
    "n1 c8 h9 w9 k8 r3 s3 pad1",
)
TYPES = ("f16", "bf16", "f32 tf32", "f32 tf32x3", "i8*i8>i32", "i8*i8>f32", "f16*f16>f32", "e4m3*e4m3>f16",
         "e5m2*e4m3>f32")  # fmt: skip
FUSIONS = (
    "+bias+relu", "+bias+residual+relu", "+relu_backward(t.y)", "+add(t.a)+mul(t.b)+sub(c.c)", "stats",
    "+bias+residual stats",
)  # fmt: skip


@pytest.fixture(autouse=True)
def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("its copies and products are those of sm_90")


def problem_of(text: str, direction: str, dtype: str) -> Problem:
    dtype, _, precision = dtype.partition(" ")
    return make(f"{text} {precision}".strip(), direction, dtype, "nhwc")


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("dtype", ["f16", "f32 tf32x3"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_tiles_are_right(direction, dtype, at):
    """The best tiles by prediction, and some of the rest."""
    for text in LAYERS:
        problem = problem_of(text, direction, dtype)
        if not accepts(ENGINE, problem):
            continue
        core, device = core_of(problem), this_device()
        some = [*ENGINE.knobs(core, device)[:3], *list(tiles(core, device))[::9]]
        check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, some[at % len(some)]))


@pytest.mark.parametrize("fused", ["", "+bias+residual+relu"])
@pytest.mark.parametrize("dtype", ["f16", "f32 tf32x3"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_clusters_are_right(direction, dtype, fused):
    """Blocks that share the steps of a tile, of every size that there is."""
    if direction == "wgrad" and fused:
        pytest.skip("a filter gradient has no epilogue")
    for text in (LAYERS[1], LAYERS[2], LAYERS[4], LAYERS[6], LAYERS[7], LAYERS[9]):
        problem = problem_of(text, direction, dtype).with_(epilogue=fused)
        if not accepts(ENGINE, problem):
            continue
        some = [tile for tile in tiles(core_of(problem), this_device()) if tile.cluster > 1]
        for blocks in (2, 4, 8):
            of_so_many = [tile for tile in some if tile.cluster == blocks]
            for tile in of_so_many[:: max(1, len(of_so_many) // 3)]:
                candidate = with_knobs(ENGINE, problem, tile)
                check_engine(ENGINE, problem, candidate=candidate)
                one, other = (run_engine(ENGINE, problem, candidate=candidate).out for _ in range(2))
                assert torch.equal(one, other), f"other bits: [{tile}] of '{problem}'"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_types_are_right(direction, dtype):
    for text in LAYERS[::2]:
        problem = problem_of(text, direction, dtype)
        if accepts(ENGINE, problem):
            check_engine(ENGINE, problem)


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("dtype", ["f16", "f32 tf32x3"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_fused_is_right(direction, dtype, fusion):
    if direction == "dgrad" and "stats" in fusion:
        pytest.skip("statistics are of y")
    for text in (*LAYERS[:6], "n16 c64 h56 w56 k64 r3 s3 pad1"):
        problem = problem_of(f"{text} {fusion}", direction, dtype)
        for tile in ENGINE.knobs(problem, this_device())[:4]:
            check_fused(ENGINE, problem, tile, "cuda")


@pytest.mark.parametrize("dtype", ["f16", "f32 tf32x3"])
def test_bits_repeat_and_do_not_depend_on_the_batch(dtype):
    for text in LAYERS[:8:2]:
        for direction in ("fprop", "dgrad"):
            assert check_batch_invariance(ENGINE, problem_of(text, direction, dtype))
    if dtype == "f16":
        for text in LAYERS[:8:2]:
            check_determinism(ENGINE, problem_of(text, "wgrad", dtype))


@pytest.mark.parametrize("dtype", ["f16", "f32 tf32x3"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_all_tiles_without_splits_have_the_same_bits(direction, dtype):
    """The order of a sum hangs on the problem alone: rows, columns and halos may be exchanged for each other."""
    problem, device = problem_of("n8 c128 h28 w28 k128 r3 s3 pad1", direction, dtype), this_device()
    inputs, first = random_inputs(problem, device="cuda"), None
    for tile in list(tiles(problem, device))[::5]:
        if tile.splits * tile.cluster == 1:
            found = make_plan(problem, device, Policy(), with_knobs(ENGINE, problem, tile))(inputs.a, inputs.b, ())
            first = found if first is None else first
            assert torch.equal(found, first), tile


def test_a_block_may_have_just_48_kb():
    """Beyond what its kernel has by itself: more than a launch gives without being asked."""
    problem, device = Problem.parse("dgrad n3 c8 h2 w13 k8 r1 s3 dil1,3 f16 nhwc"), this_device()
    some = [tile for tile in tiles(problem, device) if _work(problem, tile).shared == 48 << 10]
    assert some
    for tile in some:
        check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, tile))


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_tf32x3_is_as_exact_as_f32(direction):
    """Within twice the error of the same sums in f32, of numbers of both signs and of one."""
    for text in (*LAYERS[:4], LAYERS[9]):
        for positive in (False, True):
            inputs, errors = random_inputs(problem_of(text, direction, "f32"), device="cuda"), []
            a, b = (each.abs() if positive else each for each in (inputs.a, inputs.b))
            for engine, precision in ((Igemm(), "ieee"), (ENGINE, "tf32x3")):
                problem = problem_of(text, direction, f"f32 {precision}")
                found = make_plan(problem, this_device(), Policy(engine=engine.name))(a, b, ())
                errors.append((found.cpu().double() - reference(problem, a.cpu(), b.cpu())).abs().max().item())
            assert errors[1] <= 2 * errors[0], (text, positive, errors)


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_tf32x3_keeps_what_is_infinite_and_what_is_large(direction):
    problem, device = problem_of("n2 c40 h9 w9 k40 r1 s1", direction, "f32 tf32x3"), this_device()
    inputs = random_inputs(problem, device="cuda")
    a, b = inputs.a, inputs.b
    a[0, 0, 0, 0], a[0, 0, 1, 1], a[0, 0, 2, 2], a[0, 1, 3, 3] = torch.inf, torch.nan, 3.4e38, -torch.inf
    b[:, :2] = b[:2] = 2.0**-10  # without low parts, which an infinity is not to be multiplied by
    a[0, 0, 3, 3], b[7, 7], b[6, 2], b[2, 6] = torch.inf, -torch.inf, 0, 0
    a[1, 2, 4, 4] = torch.inf
    wanted = reference(problem, a.cpu(), b.cpu())
    some = [tile for tile in tiles(problem, device) if tile.splits * tile.cluster == 1]
    for tile in (*some[::7], *ENGINE.knobs(problem, device)[:2]):
        found = make_plan(problem, device, Policy(), with_knobs(ENGINE, problem, tile))(a, b, ()).cpu()
        assert torch.equal(found.isnan(), wanted.isnan()), tile
        assert torch.equal(found.isinf(), wanted.isinf()), tile
        assert torch.equal(found[found.isinf()].double(), wanted[wanted.isinf()]), tile
        torch.testing.assert_close(found[0, :7, 2, 2], torch.full((7,), 3.4e38 * 2.0**-10))


@pytest.mark.parametrize("dtype", ["f16", "f32 tf32x3"])
def test_streams_do_not_meet(dtype):
    """Two hundred calls on four streams at once, all with the same bits."""
    problem, device = problem_of("n16 c128 h28 w28 k128 r3 s3 pad1 +bias+relu", "fprop", dtype), this_device()
    inputs = random_inputs(problem, device="cuda")
    plan = make_plan(problem, device, Policy(engine=ENGINE.name))
    wanted = plan(inputs.a, inputs.b, inputs.operands)
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(4)], []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(plan(inputs.a, inputs.b, inputs.operands))
    torch.cuda.synchronize()
    assert all(torch.equal(each, wanted) for each in found)


@st.composite
def multiplied(draw) -> Problem:
    """A problem with channels that make whole vectors."""
    direction = draw(st.sampled_from(DIRECTIONS))
    problem = draw(problems(directions=(direction,), groups=(1,)))
    dtype = draw(st.sampled_from(("f16", "f16", "bf16", "f32")))
    precision = draw(st.sampled_from(("tf32", "tf32x3"))) if dtype == "f32" else "ieee"
    groups = draw(st.sampled_from((1, 1, 1, 2)))
    sizes = (64, 128) if groups > 1 else (8, 24, 64, 72, 136, 200)
    fused = draw(st.sampled_from(("", "", "+bias+relu", "+bias+residual+leaky_relu(0.25)")))
    return problem.with_(
        c=draw(st.sampled_from(sizes)) * groups, k=draw(st.sampled_from(sizes)) * groups, groups=groups,
        dtypes=(dtype,) * 3, layouts=("nhwc",) * 3, precision=precision,
        epilogue=fused if direction != "wgrad" else "",
    )  # fmt: skip


@pytest.mark.parametrize("part", range(PARTS))
def test_right_on_any_problem(part):
    @seed(part)
    @settings(max_examples=max(1, EXAMPLES // PARTS), database=None)
    @given(multiplied(), st.integers(0, 999), st.integers(0, 9999))
    def search(problem, data, choice):
        if accepts(ENGINE, problem):
            some = list(tiles(core_of(problem), this_device()))
            check_engine(ENGINE, problem, data, candidate=with_knobs(ENGINE, problem, some[choice % len(some)]))

    search()
