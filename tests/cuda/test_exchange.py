"""cuda.exchange: filter gradients as forward convolutions whose channels are images, and the copies that it takes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from openconv.cuda import copied, exchange, jit
from openconv.cuda.device import device_for
from openconv.cuda.exchange import Exchange, _inside, _tensors
from openconv.cuda.exchanged import Exchanged, Matrices, exchanged, exchanged_back
from openconv.cuda.igemm_sm90 import tiles
from openconv.engine import code_digest, engine_named, engines
from openconv.plan import forget_plans, steps_of
from openconv.problem import Problem
from openconv.rewrites import base
from openconv.rewrites.base import Choice, Rewritten, allowed, settings_of
from openconv.select import Policy, choose
from tests.support import (
    accepts,
    candidates,
    check_determinism,
    check_engine,
    check_hidden_memory,
    check_locality,
    check_plan,
    check_workspace_limits,
    core_of,
    make,
    refusal,
    run_engine,
    sweep,
    this_device,
    with_knobs,
)

ENGINE = Exchange()
LAYER = "wgrad n32 c256 h14 w14 k256 r3 s3 pad1 f32 nhwc"
# Batch, C and K are what tensor cores of sm_90 take: channels, images and filters of the forward convolution.
SHAPES = (
    "n8 c16 h7 w9 k8 r3 s3 pad1",
    "n40 c8 h5 w6 k16 r3 s2 pad1",
    "n8 c24 h10 w9 k8 r3 s3 pad1 stride2",
    "n16 c8 h9 w11 k24 r2 s3 pad0:2,3:1 stride2,1 dil1,2",
    "n8 c8 h9 w10 k8 r1 s1 stride2",
    "n8 c8 h8 w11 k8 r1 s2 stride3 dil2",
    "n8 c16 h12 w13 k8 r3 s3 pad2 dil2",
    "n8 c8 h5 w4 k8 r3 s3 stride2 pad5,4",
    "n16 c8 w37 k16 s4 pad3:0",
    "n8 c8 w29 k8 s3 pad2:1 stride2 dil3",
    "n8 c8 d4 h5 w6 k8 t3 r3 s3 pad1",
    "n8 c8 d5 h4 w6 k16 t2 r1 s3 pad1,0,1 stride2",
)
# What they do not take, and other engines do.
ODD = ("n3 c5 h7 w6 k7 r3 s2 pad1,0:2 dil2,1", "n2 c3 w19 k5 s3 stride2", "n1 c1 d3 h4 w5 k1 t2 r2 s3 stride1,2,2 pad1")


def problem_of(text: str, layout: str = "nhwc", precision: str = "tf32") -> Problem:
    """As engines see it: tensors of one spatial axis have their channels first."""
    return core_of(make(f"{text} {precision}", "wgrad", "f32", layout))


def inside(problem: Problem, name: str):
    """The first candidate with this engine inside."""
    return next(c for c in candidates(ENGINE, problem) if c.knobs.inner[0].engine == name)


@pytest.mark.parametrize("at", sweep(range(len(SHAPES))))
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_right(at, layout):
    problem = problem_of(SHAPES[at], layout, ("tf32", "tf32x3")[(at + (layout == "nchw")) % 2])
    check_engine(ENGINE, problem, candidate=inside(problem, "cuda.igemm_sm90"))


@pytest.mark.parametrize("name", ["cuda.igemm", "cuda.naive"])
def test_right_with_others_inside(name):
    for at, text in enumerate((*ODD, SHAPES[3], SHAPES[9])):
        problem = problem_of(text, ("nhwc", "nchw", "nhwc*nchw>nhwc", "nchw*nhwc>nchw")[at % 4])
        check_engine(ENGINE, problem, candidate=inside(problem, name))


@pytest.mark.parametrize("kind", ["swapped", "splits", "cluster"])
def test_right_with_other_knobs(kind):
    """Pairs of both factors, sums in the workspace behind the copies, and sums of several blocks."""
    problem = problem_of(SHAPES[0], precision="tf32x3")
    some = tiles(_inside(problem), this_device())
    tile = next(each for each in some if int(getattr(each, kind)) > (kind != "swapped"))
    knobs = Rewritten(None, (Choice("cuda.igemm_sm90", tile),))
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, knobs))


@pytest.mark.parametrize("text", [*SHAPES, *ODD])
def test_the_forward_convolution_has_the_filter_as_its_result(text):
    problem = problem_of(text)
    inner = _inside(problem)
    assert (inner.n, inner.c, inner.k) == (problem.c, problem.n, problem.k)
    assert inner.out[-problem.rank :] == problem.filter
    assert inner.filter[-problem.rank :] == problem.out
    assert math.prod(inner.out) == math.prod(problem.filter)
    assert inner.macs == problem.macs
    assert set(inner.layouts) == {"nhwc"}
    assert all(kept <= size for kept, size in zip(inner.spatial[-problem.rank :], problem.spatial, strict=True))


def test_places_that_no_window_touches_are_left_out():
    assert _inside(problem_of("n8 c8 h56 w57 k8 r1 s1 stride2")).spatial == (55, 57)
    inner = _inside(problem_of("n8 c8 h56 w56 k8 r3 s3 stride2 pad1"))
    assert (inner.spatial, inner.padding) == ((56, 56), ((1, 0), (1, 0)))
    problem = problem_of("n8 c8 h9 w10 k8 r1 s1 stride2", "nchw")
    a, b, _ = run_inputs(problem)
    a[..., 9] = math.nan  # nobody reads the last column
    assert run_engine(ENGINE, problem, inputs=(a, b, ())).out.isfinite().all()


def run_inputs(problem: Problem):
    run = run_engine(ENGINE, problem)
    return run.a.clone(), run.b.clone(), ()


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_stays_where_it_belongs(value, precision):
    check_locality(ENGINE, problem_of(SHAPES[2], "nchw", precision), value=value)


def test_the_same_bits_again(monkeypatch):
    """Of the defaults: every tile is a kernel to compile."""
    problem = problem_of(SHAPES[1])
    some = list({c.knobs.inner[0].engine: c.knobs for c in reversed(list(candidates(ENGINE, problem)))}.values())
    monkeypatch.setattr(type(ENGINE), "knobs", lambda *_: some)
    check_determinism(ENGINE, problem)


def test_memory(monkeypatch):
    """The copies, each from a multiple of 256 bytes on, and what the engine inside wants; nothing besides."""
    problem = problem_of("n8 c16 h10 w9 k24 r3 s3 pad1 stride2", precision="tf32x3")
    inner = _inside(problem)
    assert inner.spatial == (10, 9)
    x, dy, dw = 4 * 8 * 16 * 10 * 9, 4 * 8 * 24 * 5 * 5, 4 * 24 * 16 * 9
    copies = sum(-(-size // 256) * 256 for size in (x, dy, dw))
    for candidate in candidates(ENGINE, problem):
        choice = candidate.knobs.inner[0]
        used = engine_named(choice.engine).workspace_bytes(inner, this_device(), choice.knobs)
        assert candidate.workspace == copies + used
    naive = inside(problem, "cuda.naive")
    assert naive.workspace == copies
    few = {c.workspace: c.knobs for c in candidates(ENGINE, problem)}  # a limit leads to one of these
    monkeypatch.setattr(type(ENGINE), "knobs", lambda *_: [*few.values()])
    led_to = check_workspace_limits(ENGINE, problem)
    assert led_to
    assert min(led_to) >= copies


@pytest.mark.slow
def test_nothing_else_is_allocated():
    """But for copies of tensors that begin amid 16 bytes, as those of the tests do."""
    problem = problem_of("n8 c64 h24 w24 k64 r3 s3 pad1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copied, "aligned", lambda tensor, _: tensor)
        check_hidden_memory(ENGINE, problem)


@pytest.mark.parametrize(
    "text, words",
    [
        ("fprop n8 c8 h8 w8 k8 r3 s3 f32 nhwc tf32", "the pass is fprop; wanted wgrad"),
        ("wgrad n8 c8 h8 w8 k8 r3 s3 f16 nhwc", "dtypes are f16*f16*f16; wanted f32"),
        ("wgrad n8 c8 h8 w8 k8 r3 s3 f32 nhwc", "precision is ieee; wanted tf32 or tf32x3"),
        ("wgrad n8 c16 h8 w8 k16 r3 s3 g2 f32 nhwc tf32", "groups are 2; wanted 1"),
        ("wgrad n0 c8 h8 w8 k8 r3 s3 f32 nhwc tf32", "a tensor is empty"),
        ("wgrad n8 c8 h2 w2 k8 r1 s1 stride8 pad3:0 f32 nhwc tf32", "wanted windows that see the image"),
        ("wgrad n8 c65536 h256 w256 k8 r3 s3 f32 nchw tf32", "a copy are 4294967296; wanted less than 2^31"),
    ],
)
def test_what_it_refuses(text, words):
    assert words in refusal(ENGINE, Problem.parse(text))


def test_asks_no_engine_before_it_takes_the_problem(monkeypatch):
    monkeypatch.setattr(base, "allowed", lambda *_: pytest.fail("an engine was asked"))
    for text in ("fprop n8 c8 h8 w9 k8 r3 s3 f32 nhwc tf32", "wgrad n8 c8 h8 w9 k8 r3 s3 f32 nhwc"):
        assert refusal(ENGINE, Problem.parse(text))


def test_refuses_where_no_engine_is_inside(monkeypatch):
    monkeypatch.setattr(base, "allowed", lambda *_: ())
    base._ranked.cache_clear()
    assert "its engine would be none" in refusal(ENGINE, problem_of(SHAPES[0]))
    base._ranked.cache_clear()


def test_knobs_are_engines_and_theirs():
    """The cheapest first, all of them different and found again in a second list."""
    problem, device = Problem.parse(f"{LAYER} tf32"), device_for("sm_90a")
    knobs = list(ENGINE.knobs(problem, device))
    names = list(dict.fromkeys(each.inner[0].engine for each in knobs))
    assert names[0] == "cuda.igemm_sm90"
    assert "cuda.igemm" in names
    assert ENGINE.name not in names
    costs = [ENGINE.cost(problem, device, each) for each in knobs[: len(names)]]
    assert costs == sorted(costs)
    texts = [str(each) for each in knobs]
    assert texts[0].startswith("by=cuda.igemm_sm90(pixels=")
    assert len(set(texts)) == len(texts)
    inner = _inside(problem)
    assert len(texts) == sum(
        1 for engine in allowed(device, ("exchange",)) for _ in settings_of(engine, inner, device, ("exchange",))
    )
    other = next(iter(ENGINE.knobs(problem.with_(n=64), device)))
    assert knobs[0].like(other)
    assert not knobs[0].like(knobs[1])


def test_is_chosen_by_itself():
    for precision in ("tf32", "tf32x3"):
        found = choose(Problem.parse(f"{LAYER} {precision}"), this_device(), Policy())
        assert found.engine.name == ENGINE.name
        assert found.traits.batch_invariant
        assert found.traits.deterministic
    forget_plans()
    check_plan(Problem.parse("wgrad n8 c8 h6 w7 k8 r3 s3 pad1 f32 nhwc*nchw>nchw tf32"), engine=ENGINE.name)


def test_the_matrix_product_that_it_is():
    """What can be relied on is what the engine inside says of as many terms."""
    problem = Problem.parse(f"{LAYER} tf32")
    first = next(candidates(ENGINE, problem))
    inner, choice = _inside(problem), first.knobs.inner[0]
    assert inner.gemm.k == problem.gemm.k == 32 * 14 * 14
    assert first.traits == replace(engine_named(choice.engine).traits(inner, choice.knobs), batch_invariant=True)


def test_what_is_said():
    problem, device = Problem.parse(f"{LAYER} tf32x3"), this_device()
    first = next(candidates(ENGINE, problem))
    steps = steps_of(problem, device, first)
    assert steps[0] == "copy x with batch and channels exchanged"
    assert steps[1] == "copy dy with batch and channels exchanged"
    assert "as pairs of tf32" in steps[2]
    text = "fprop n256 c32 h14 w14 k256 r14 s14 pad1 f32 nhwc tf32x3"
    assert steps[-1].startswith(f"run cuda.exchange: as '{text}', by cuda.igemm_sm90 [")
    assert steps[-1].endswith(", then copy dw with filters and channels exchanged")
    reasons = ENGINE.reasons(problem, device, first.knobs)
    assert f"on '{text}'" in reasons[0]
    assert "15.2 MB of copies" in reasons[0]
    assert "tiles on" in reasons[1]


def test_cost_is_the_engine_inside_and_the_copies():
    problem, device = Problem.parse(f"{LAYER} tf32"), device_for("sm_90a")
    knobs = next(iter(ENGINE.knobs(problem, device)))
    copied = 4 * (2 * 32 * 256 * 196 + 256 * 256 * 9)
    inner = engine_named("cuda.igemm_sm90").cost(_inside(problem), device, knobs.inner[0].knobs)
    wanted = 0.79 * (inner + 2 * 2e-6 + 2 * copied / (0.7 * device.bandwidth))
    assert ENGINE.cost(problem, device, knobs) == pytest.approx(wanted)


def test_kernels_are_the_copies_and_those_inside():
    problem, device = Problem.parse(f"{LAYER} tf32x3"), device_for("sm_90a")
    knobs = inside(problem, "cuda.igemm_sm90").knobs
    files = [source.file for source in ENGINE.sources(problem, device, knobs)]
    assert files[0] == "igemm_sm90.cu"
    assert files[-2:] == ["exchanged.cu"] * 2


def test_its_version_follows_the_copies():
    """Beside those of all engines, any of which may be inside."""
    assert ENGINE.version == engine_named("cuda.pad_channels").version
    assert code_digest(ENGINE.source) != code_digest(exchange.__file__.replace("exchange.py", "copied.py"))


# -- the copies ---------------------------------------------------------------------------------------------------

DTYPES = {2: torch.int16, 4: torch.int32}


def ran(copies: tuple[Matrices, ...], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The copies by one launch; nothing is written behind them."""
    size = tensors[0].element_size()
    made = [torch.full((each.elements + 8,), 77, dtype=DTYPES[size]) for each in copies]
    launch = Exchanged(copies, size).launch(device_for("sm_90a"))
    launch(*(each.data_ptr() for each in (*tensors, *made)))
    assert all((each[-8:] == 77).all() for each in made)
    return [each[:-8] for each in made]


def random(shape: tuple[int, ...], size: int) -> torch.Tensor:
    return torch.randint(-30000, 30000, shape).to(DTYPES[size])


@pytest.mark.parametrize("size", DTYPES)
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize(
    "first, channels, sizes, kept",
    [
        (32, 64, (5, 7), (5, 7)), (33, 65, (3, 2), (3, 2)), (8, 128, (9,), (9,)), (1, 3, (4, 5), (4, 5)),
        (40, 6, (6, 7), (5, 6)), (6, 72, (3, 4, 5), (2, 4, 3)), (3, 5, (67,), (66,)), (64, 1, (3, 3), (3, 3)),
        (16, 2, (2, 5, 8), (2, 5, 4)), (100, 200, (1,), (1,)),
    ],
)  # fmt: skip
def test_every_element_is_copied(first, channels, sizes, kept, layout, size):
    given = random((first, channels, *sizes), size)
    lies = given if layout == "nchw" else given.movedim(1, -1).contiguous()
    (made,) = ran((exchanged(layout, first, channels, sizes, kept),), [lies])
    part = given[(slice(None), slice(None), *(slice(count) for count in kept))]
    assert torch.equal(made, part.movedim(0, -1).reshape(-1))


@pytest.mark.parametrize("size", DTYPES)
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize(
    "first, channels, sizes", [(64, 32, (3, 3)), (5, 7, (2, 3, 2)), (1, 40, (5,)), (66, 130, (1, 1))]
)
def test_results_are_copied_back(first, channels, sizes, layout, size):
    lies = random((first, *sizes, channels), size)
    (made,) = ran((exchanged_back(layout, first, channels, sizes),), [lies])
    whole = lies.movedim(-1, 0)  # channels, first, sizes
    wanted = whole if layout == "nchw" else whole.movedim(1, -1)
    assert torch.equal(made, wanted.reshape(-1))


@pytest.mark.parametrize("sizes", [((40, 12, 6), (40, 72, 3)), ((2, 5, 9), (2, 64, 1)), ((36, 4, 2), (36, 2, 4))])
def test_two_in_one_launch(sizes):
    given = [random((n, pixels, c), 4) for n, c, pixels in sizes]
    copies = tuple(exchanged("nhwc", n, c, (pixels,), (pixels,)) for n, c, pixels in sizes)
    for made, tensor in zip(ran(copies, given), given, strict=True):
        assert torch.equal(made, tensor.movedim(0, -1).movedim(1, 0).reshape(-1))


def test_steps_beyond_an_int():
    """Of tensors that nobody has here."""
    x = _tensors(problem_of("n64 c1024 h224 w224 k8 r3 s3 pad1"))[0]
    assert x.elements > 2**31 > x.largest
    assert max(x.rows * x.row, x.columns * x.column) == x.elements
    assert Exchanged((x,), 4).params


def banks(lanes: list[int], words: int) -> int:
    """The most lanes that want different words of one bank."""
    found: dict[int, set[int]] = {}
    for lane in lanes:
        for word in range(lane, lane + words):
            found.setdefault(word % 32, set()).add(word)
    return max(map(len, found.values()))


@pytest.mark.parametrize("size", DTYPES)
def test_shared_memory_has_no_conflicts(size):
    """As exchanged.cu places what a warp stores and collects."""
    vector, per_word = 16 // size, 4 // size

    def word(a: int, c: int) -> int:
        return (a * 64 + ((c // vector) ^ (a // vector)) * vector + c % vector) // per_word

    wide, high = 64 // vector, 32 // vector
    for start in range(0, 32 * wide, 8):  # of 16 bytes a thread, eight threads at a time
        assert banks([word(i // wide, i % wide * vector) for i in range(start, start + 8)], 4) == 1
    for start, k in itertools.product(range(0, 64 * high, 32), range(vector)):
        assert banks([word(i % high * vector + k, i // high) for i in range(start, start + 32)], 1) == 1


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_compiles_well(layout):
    """Without spills, and in few registers: copies want many warps."""
    problem, device = Problem.parse(f"{LAYER} tf32".replace("nhwc", layout)), device_for("sm_90a")
    knobs = next(iter(ENGINE.knobs(problem, device)))
    for source in set(ENGINE.sources(problem, device, knobs)):
        for found in jit.usage(source, "sm_90a"):
            assert found.spills == 0
            assert source.file != "exchanged.cu" or found.registers <= 40


def test_it_is_registered_before_split():
    names = [engine.name for engine in engines("cuda")]
    assert names.index("cuda.fold_padding") < names.index(ENGINE.name) < names.index("cuda.split")
    assert accepts(ENGINE, problem_of(SHAPES[0]))
    assert with_knobs(ENGINE, problem_of(ODD[0]), inside(problem_of(ODD[0]), "cuda.igemm").knobs).workspace
