"""Rewrites on the CPU: right on all they take, whatever runs inside; what they cost, claim and tell."""

from __future__ import annotations

import math
import re
from functools import cache

import pytest
import torch
from hypothesis import given, settings

import openconv
from openconv.engine import code_digest, engine_named, engines
from openconv.plan import forget_plans, make_plan
from openconv.problem import DIRECTIONS, Problem
from openconv.rewrites import base, split
from openconv.rewrites.base import Rewrite, Rewritten
from openconv.select import Candidate, Policy, choose, rank
from tests.support import (
    LAYOUTS,
    PROBLEMS,
    Run,
    accepts,
    candidates,
    check_batch_invariance,
    check_determinism,
    check_engine,
    check_hidden_memory,
    check_locality,
    check_plan,
    check_workspace_limits,
    make,
    problems,
    refusal,
    run_engine,
    this_device,
    with_knobs,
)

WANTS = {"cpu.groups": "nhwc", "cpu.fold_columns": "nhwc"}  # a layout; others take both
PASSES = {"cpu.fold_columns": ("dgrad",)}  # others have all
REWRITES = [engine for engine in engines("cpu") if isinstance(engine, Rewrite)]
each_rewrite = pytest.mark.parametrize("engine", REWRITES, ids=[engine.name for engine in REWRITES])

# What the shared problems do not have: each rewrite with more than one way to go wrong.
MORE = {
    "cpu.phases": (
        "n2 c3 h14 w13 k4 r3 s3 pad2 dil2",  # 14 rows in equal phases, 13 columns in unequal ones
        "n1 c2 h23 w9 k3 r3 s2 pad5:1,0 dil4,1",  # a padding that dilation does not divide; one axis without dilation
        "n2 c2 h19 w20 k3 r3 s3 stride2,4 pad4 dil4,2",  # strides that divide the dilation, and the other way round
        "n1 c2 h22 w25 k2 r3 s2 stride3,4 pad3,1 dil2,6",  # that share nothing, or a part
        "n1 c2 w40 k2 s3 pad9:0 dil7 g2",
        "n1 c2 d9 h8 w7 k2 t2 r2 s3 pad1 dil3,2,2",
        "n1 c2 h6 w5 k3 r2 s2 pad3 dil4",  # more phases than results along an axis
        "n1 c2 h2 w12 k2 r2 s3 pad6,2 dil5,2",  # phases whose windows see padding alone
        "n2 c4 h12 w11 k6 r3 s3 pad2 dil2 g2 +bias",
        "n1 c2 h12 w11 k2 r2 s2 stride2 dil2 +bias",  # a dgrad with results that no phase has
    ),
    "cpu.as_2d": (
        "n2 c3 d1 h8 w9 k4 t1 r3 s3 pad0,1,1",
        "n2 c3 d5 h4 w6 k4 t3 r1 s1 pad1,0,0",
        "n2 c3 d5 h7 w6 k4 t1 r3 s3 pad0,1,1",
        "n1 c4 d6 h1 w5 k4 t3 r1 s3 pad1,0,1 g4 +bias",
        "n2 c3 d5 h6 w1 k2 t2 r3 s1",
    ),
    "cpu.groups": ("n2 c6 h8 w9 k4 r2 s3 stride2,3 g2", "n1 c6 h8 w8 k6 r2 s2 stride2 g3 +bias"),
    "cpu.fold_padding": (
        "n2 c3 h7 w9 k4 r2 s3 stride2,3 pad1,0:2",
        "n1 c4 h5 w6 k5 r1 s1 pad1:0,2 +bias",
        "n2 c2 w9 k3 s4 stride4 pad2:3",
        "n1 c2 h5 w6 k3 r1 s1 stride2 pad1:2",
    ),
    "cpu.fold_columns": (
        "n2 c3 h9 w12 k5 r3 s3 stride2 pad1",
        "n1 c3 h7 w14 k4 r7 s7 stride2 pad3",
        "n2 c2 h5 w18 k3 r2 s4 stride1,3 pad0,1:2",  # taps that three columns share unevenly
        "n1 c4 h6 w16 k6 r4 s4 stride4 pad0,2 +bias",
        "n1 c2 d3 h5 w8 k2 t2 r3 s3 stride2 pad1",
    ),
    "cpu.split": (
        "n3 c3 h13 w9 k4 r3 s3 pad1",
        "n1 c2 h17 w6 k3 r5 s2 stride2,1 pad3:1,0 dil2,1",
        "n2 c2 h20 w5 k3 r3 s3 stride3 pad2",
        "n1 c2 h21 w5 k2 r1 s1 stride2",  # rows of x between windows
        "n1 c1 h40 w11 k1 r7 s3 pad3,1 +bias",
        "n2 c2 w33 k2 s4 pad3:0 g2",
        "n1 c2 d9 h4 w5 k2 t3 r2 s2 pad1",
        "n1 c2 h3 w6 k2 r2 s2 pad9,0",  # bands of padding alone
    ),
}


@pytest.fixture(autouse=True)
def _all_sizes(monkeypatch):
    """Small problems are split as well; choices with the usual limit are forgotten before and after."""

    def forget():
        base._ranked.cache_clear()
        forget_plans()

    forget()
    monkeypatch.setattr(split, "LEAST", 1)
    yield
    forget()


@cache
def texts(name: str) -> tuple[str, ...]:
    return *PROBLEMS.values(), *MORE[name]


def taken(engine, directions=DIRECTIONS, dtypes=("f32",), layouts=("nchw",), every=1):
    found = [
        make(text, direction, dtype, layout)
        for text in texts(engine.name)
        for direction in directions
        for dtype in dtypes
        for layout in (layouts if " h" in text else layouts[:1])
    ]
    kept = [problem for problem in found if accepts(engine, problem)]
    return kept[::every]


# -- right ------------------------------------------------------------------------------------------------------------


@each_rewrite
def test_takes_all_that_it_is_made_for(engine):
    direction = PASSES.get(engine.name, DIRECTIONS)[0]
    named = set(MORE[engine.name])
    layouts = ("nchw", "nhwc") if engine.name in ("cpu.groups", "cpu.as_2d") else (WANTS.get(engine.name, "nchw"),)
    found = {text for text in named for v in layouts if accepts(engine, make(text, direction, layout=v))}
    beyond = {"n1 c2 h3 w6 k2 r2 s2 pad9,0"}
    assert len(named - found) <= len(beyond) or engine.name == "cpu.groups", named - found


@each_rewrite
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_on_every_problem(engine, direction):
    problems_ = taken(engine, (direction,), ("f32",), ("nchw", "nhwc"))
    assert bool(problems_) == (direction in PASSES.get(engine.name, DIRECTIONS))
    for problem in problems_[:: 3 if engine.name == "cpu.split" else 1]:  # it takes them all
        check_engine(engine, problem)


@pytest.mark.slow
@each_rewrite
def test_right_in_other_layouts_and_dtypes(engine):
    often = 2 if engine.name == "cpu.split" else 1  # it takes them all
    for problem in taken(engine, DIRECTIONS, ("f32",), LAYOUTS[2:], every=3 * often):
        check_engine(engine, problem)
    for problem in taken(engine, DIRECTIONS, ("f64", "i32"), ("nchw", "nhwc"), every=7 * often):
        check_engine(engine, problem)


@pytest.mark.slow
@each_rewrite
def test_right_whatever_runs_inside(engine):
    """Every way with every engine; the other knobs of these have tests of their own."""
    for text in MORE[engine.name][:4]:
        for direction in DIRECTIONS:
            problem = make(text, direction, layout=WANTS.get(engine.name, "nchw"))
            if accepts(engine, problem):
                different: dict[object, Candidate] = {}
                for candidate in candidates(engine, problem):
                    different.setdefault((candidate.knobs.way, candidate.knobs.inner[0].engine), candidate)
                for candidate in different.values():
                    check_engine(engine, problem, candidate=candidate)


@given(problems(dtypes=("f32", "f64", "i8")))
@settings(max_examples=60)
def test_right_on_random_problems(problem):
    for engine in REWRITES:
        if accepts(engine, problem):
            check_engine(engine, problem)


@each_rewrite
def test_plans_with_epilogues_and_casts_are_right(engine):
    for problem in taken(engine, ("fprop", "dgrad"), ("f32", "bf16", "complex64"), ("nchw", "nhwc"), every=9):
        check_plan(problem, engine=engine.name)
        if problem.epilogue.is_identity and not problem.dtypes[0].startswith("complex"):
            check_plan(Problem.parse(f"{problem} +bias+residual+leaky_relu(0.2)"), engine=engine.name, strided=True)


# -- what can be relied on --------------------------------------------------------------------------------------------


@pytest.mark.slow
@each_rewrite
def test_same_bits_every_time(engine):
    step = {"cpu.split": 44, "cpu.phases": 22}.get(engine.name, 11)  # these take nearly all, each a kernel or two
    for problem in taken(engine, layouts=(WANTS.get(engine.name, "nchw"),), every=step):
        check_determinism(engine, problem)


@each_rewrite
def test_batch_invariant_where_it_says_so(engine):
    claims = [
        check_batch_invariance(engine, problem)
        for text in BATCHES[engine.name]
        for direction in ("fprop", "dgrad")
        if accepts(engine, problem := make(text, direction, layout=WANTS.get(engine.name, "nchw")))
    ]
    assert any(claims) == (engine.name != "cpu.split")  # whose pieces, and engines inside, follow the batch


@each_rewrite
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_infinity_and_nan_stay_where_they_belong(engine, value):
    for problem in taken(engine, layouts=("nchw", "nhwc"), every=4):
        if next(candidates(engine, problem)).traits.plain_sum:  # transforms inside spread it over their tiles
            check_locality(engine, problem, value=value)


@each_rewrite
def test_a_limit_on_the_workspace_is_kept(engine):
    for problem in taken(engine, layouts=("nchw", "nhwc"), every=9):
        check_workspace_limits(engine, problem)


BATCHES = {
    "cpu.phases": ("n4 c5 h14 w13 k4 r3 s3 pad2 dil2", "n3 c24 h16 w16 k16 r3 s3 pad2 dil2", "n4 c4 w40 k4 s3 dil3 g4"),
    "cpu.as_2d": ("n4 c4 d1 h9 w12 k4 t1 r3 s3 pad0,1,1", "n3 c4 d6 h4 w6 k4 t3 r1 s1 pad1,0,0"),
    "cpu.groups": ("n4 c16 h8 w8 k32 r2 s2 stride2 g2", "n3 c3 h16 w16 k3 r3 s3 pad1 g3"),
    "cpu.fold_padding": ("n4 c8 h14 w14 k16 r4 s4 stride4 pad1", "n3 c8 h6 w6 k16 r1 s1 pad1"),
    "cpu.fold_columns": ("n4 c3 h9 w12 k5 r3 s3 stride2 pad1",),
    "cpu.split": (
        "n4 c4 h16 w16 k4 r3 s3 pad1",
        "n3 c16 h16 w16 k16 r3 s3 pad1",
        "n3 c8 h12 w12 k8 r3 s3 stride2 pad1 g8",
    ),
}

LARGE = {
    "cpu.phases": "n2 c4 h70 w66 k4 r3 s3 pad2 dil2",
    "cpu.as_2d": "n2 c4 d1 h70 w66 k4 t1 r3 s3 pad0,1,1",
    "cpu.groups": "n2 c8 h64 w64 k8 r4 s4 stride4 g2",
    "cpu.fold_padding": "n2 c4 h62 w62 k8 r4 s4 stride4 pad1",
    "cpu.fold_columns": "n2 c3 h70 w64 k8 r3 s3 stride2 pad1",
    "cpu.split": "n2 c4 h70 w66 k4 r3 s3 pad1",
}


@each_rewrite
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_workspace_is_all_the_memory_it_takes(engine, layout):
    tried = 0
    for direction in DIRECTIONS:
        problem = make(LARGE[engine.name], direction, layout=layout)
        if accepts(engine, problem):
            check_hidden_memory(engine, problem)
            tried += 1
    assert tried or layout != WANTS.get(engine.name, layout) or (engine.name, layout) == ("cpu.as_2d", "nhwc")


def test_views_are_not_copied():
    """One and three axes are two; bands and images whose memory lies together are used where they are."""
    for engine, text, layout in (
        ("cpu.as_2d", "n2 c4 d1 h9 w9 k4 t1 r3 s3 pad0,1,1", "nchw"),
        ("cpu.split", "n4 c3 h12 w9 k4 r3 s3 pad1", "nchw"),
        ("cpu.split", "n1 c1 h32 w9 k1 r3 s3 pad1", "nchw"),
        ("cpu.split", "n1 c3 h32 w9 k4 r3 s3 pad1", "nhwc"),
    ):
        rewrite = engine_named(engine)
        problem = make(text, layout=layout)
        assert isinstance(rewrite, Rewrite)
        for knobs in rewrite.knobs(problem, this_device()):
            if knobs.inner[0].engine == "cpu.naive" and not (problem.n > 1 and knobs.way and knobs.way.bands > 1):
                assert rewrite.workspace_bytes(problem, this_device(), knobs) == 0, knobs
                assert not rewrite.copies(problem, knobs), knobs


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_split_gives_the_same_bits_where_order_does_not_follow_the_place(direction, layout):
    rewrite, checked = engine_named("cpu.split"), set()
    for text in (*MORE["cpu.split"], "n2 c4 h19 w11 k4 r3 s3 pad1 g4"):
        problem = make(text.partition("+")[0], direction, layout=layout)
        if not accepts(rewrite, problem):
            continue
        for candidate in candidates(rewrite, problem):
            inner = candidate.knobs.inner[0]
            if inner.engine in ("cpu.naive", "cpu.filter2d", "cpu.depthwise"):
                whole = run_engine(engine_named(inner.engine), problem)
                parts = run_engine(rewrite, problem, candidate=candidate)
                assert torch.equal(whole.out, parts.out), f"{candidate.knobs}: {whole.where}"
                checked.add((inner.engine, candidate.knobs.way.bands > 1))
    wanted = {("cpu.naive", True), ("cpu.naive", False)}
    if layout == "nchw":
        wanted |= {("cpu.filter2d", True), ("cpu.filter2d", False), ("cpu.depthwise", True)}
    assert checked >= wanted


def test_a_limit_of_memory_leads_to_bands():
    """A dense layer whose quickest engine needs more than the limit: its own smaller panels or bands, never more."""
    problem = make("n1 c8 h64 w64 k8 r3 s3 pad1")
    rewrite = engine_named("cpu.split")
    whole = choose(problem, this_device(), Policy(engine="cpu.split"))
    halves = choose(problem, this_device(), Policy(engine="cpu.split", max_workspace=whole.workspace // 4))
    assert halves.workspace <= whole.workspace // 4
    assert halves.knobs.way.bands >= whole.knobs.way.bands
    assert halves.knobs != whole.knobs
    check_engine(rewrite, problem, candidate=halves)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, text, words",
    [
        (
            "cpu.phases",
            "n1 c2 h9 w9 k2 r3 s3",
            "dilation is (1, 1) of a filter (3, 3); wanted more than 1 between taps",
        ),
        ("cpu.phases", "n1 c2 h9 w9 k2 r1 s3 dil3,1", "dilation is (3, 1) of a filter (1, 3)"),
        ("cpu.phases", "n1 c2 h40 w40 k2 r3 s3 dil9", "phases are 81; wanted at most 64"),
        ("cpu.as_2d", "n1 c2 h9 w9 k2 r3 s3", "rank is 2"),
        ("cpu.as_2d", "n1 c2 d9 h9 w9 k2 t3 r3 s3", "filter is (3, 3, 3) on (9, 9, 9)"),
        ("cpu.groups", "n1 c2 h9 w9 k2 r3 s3", "groups is 1; wanted 2 to 64"),
        ("cpu.groups", "n1 c128 h9 w9 k128 r3 s3 g128", "groups is 128; wanted 2 to 64"),
        ("cpu.groups", "n1 c4 h9 w9 k4 r3 s3 g2", "its engine would be none"),
        ("cpu.fold_padding", "n1 c2 h9 w9 k2 r3 s3", "padding is ((0, 0), (0, 0)); wanted some"),
        ("cpu.fold_padding", "n1 c2 h9 w9 k2 r3 s3 pad1", "wanted an engine that refuses it and nothing else"),
        ("cpu.split", "n1 c2 h1 w1 k2 r1 s1", "wanted several images or rows"),
        ("cpu.fold_columns", "n1 c3 h8 w8 k4 r3 s3 pad1", "C is 3 and the stride 1; wanted a stride and at most 16"),
        ("cpu.fold_columns", "n1 c16 h8 w8 k4 r3 s3 stride2", "C is 16 and the stride 2"),
        ("cpu.fold_columns", "n1 c3 h8 w8 k4 r3 s3 stride2", "layout is nchw; columns lie side by side in nhwc"),
        ("cpu.fold_columns", "n1 c3 h8 w9 k4 r3 s3 stride2", "W is 9; wanted a multiple of the stride, 2"),
        ("cpu.fold_columns", "n1 c3 h8 w8 k4 r1 s1 stride2", "S is 1; wanted a tap for each of 2 columns"),
    ],
)
def test_refusals_name_the_value_seen(name, text, words):
    assert words in refusal(engine_named(name), make(text, PASSES.get(name, DIRECTIONS)[0]))


def test_only_gradients_of_images_fold_columns():
    problem = make("n1 c3 h8 w8 k4 r3 s3 stride2", "wgrad", layout="nhwc")
    assert "direction is wgrad; lanes are channels of x in dgrad alone" in refusal(
        engine_named("cpu.fold_columns"), problem
    )


def test_small_problems_are_not_split(monkeypatch):
    monkeypatch.setattr(split, "LEAST", 1 << 24)
    assert "has 25088 elements; wanted at least 16777216" in refusal(
        engine_named("cpu.split"), make("n2 c4 h56 w56 k4 r3 s3 pad1")
    )


# -- what is inside ---------------------------------------------------------------------------------------------------


def nested(knobs: Rewritten) -> list[str]:
    """The engines one in the other."""
    inner = knobs.inner[0]
    return [inner.engine, *(nested(inner.knobs) if isinstance(inner.knobs, Rewritten) else [])]


def test_rewrites_run_in_each_other_and_end():
    problem = make("n1 c4 d1 h20 w20 k4 t1 r3 s3 pad0,2,2 dil1,2,2 g2")
    found = set()
    for engine in REWRITES:
        if accepts(engine, problem):
            for candidate in candidates(engine, problem):
                chain = [engine.name, *nested(candidate.knobs)]
                assert len(set(chain)) == len(chain)
                assert sum(isinstance(engine_named(name), Rewrite) for name in chain) <= base.DEPTH
                found.add(tuple(chain[:-1]))
                check_engine(engine, problem, candidate=candidate)
    assert ("cpu.phases", "cpu.as_2d") in found


def test_the_cost_is_that_of_what_is_inside_and_of_copies():
    problem = make("n2 c4 h64 w64 k4 r3 s3 pad2 dil2")
    engine = engine_named("cpu.phases")
    assert isinstance(engine, Rewrite)
    for candidate in candidates(engine, problem):
        work = engine.work(problem, None)
        inner = engine_named(candidate.knobs.inner[0].engine)
        alone = inner.cost(work.problems[0], this_device(), candidate.knobs.inner[0].knobs)
        moved = 2 * 4 * (math.prod(problem.x_shape) + math.prod(problem.y_shape))
        assert candidate.cost >= alone + moved / this_device().bandwidth + base.CALL["cpu"]
    best = next(iter(engine.knobs(problem, this_device())))
    assert all(
        candidate.cost >= engine.cost(problem, this_device(), best)
        for candidate in list(candidates(engine, problem))[:3]
    )


def test_traits_are_those_of_what_is_inside(monkeypatch):
    """An engine inside that is no plain sum leaves the rewrite out of strict accuracy, and another takes its place."""
    import dataclasses

    from openconv.cpu.filter2d import Filter2d

    problem = make("n2 c2 h20 w20 k2 r3 s3 pad2 dil2")
    best = choose(problem, this_device(), Policy(engine="cpu.phases"))
    assert best.knobs.inner[0].engine == "cpu.filter2d"
    traits = Filter2d.traits
    mixed = lambda self, *given: dataclasses.replace(traits(self, *given), plain_sum=False, error_bound=1e-3)  # noqa: E731
    monkeypatch.setattr(Filter2d, "traits", mixed)
    base._ranked.cache_clear()
    usual = choose(problem, this_device(), Policy(engine="cpu.phases"))
    assert (usual.traits.plain_sum, usual.traits.error_bound) == (False, 1e-3)
    strict = choose(problem, this_device(), Policy(engine="cpu.phases", accuracy="strict"))
    assert strict.traits.plain_sum
    assert strict.knobs.inner[0].engine != "cpu.filter2d"


def test_a_change_of_any_engine_is_a_change_of_the_version(monkeypatch):
    engine = engine_named("cpu.phases")
    before = engine.version
    monkeypatch.setattr(base, "code_digest", lambda source: code_digest(source) + "+" * source.endswith("depthwise.py"))
    base._version.cache_clear()
    assert engine.version != before
    monkeypatch.undo()
    base._version.cache_clear()
    assert engine.version == before


def test_knobs_have_one_text_each():
    for engine in REWRITES:
        for problem in taken(engine, every=13):
            found: dict[str, Rewritten] = {}
            for candidate in candidates(engine, problem):
                assert "\n" not in str(candidate.knobs)
                assert " at 0x" not in str(candidate.knobs)
                other = found.setdefault(str(candidate.knobs), candidate.knobs)
                assert (other.way, other.inner[0]) == (candidate.knobs.way, candidate.knobs.inner[0])


# -- explain and tuning -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, text, steps",
    [
        ("cpu.split", "n1 c2 h64 w9 k4 r3 s3 pad1 +bias+relu",
         ["copy x for cpu.*",
          r"run cpu.split: 2 bands of 32 rows, each by cpu\.\w+ \[.*\], y then copied to its place.*"]),
        ("cpu.split", "n4 c2 h8 w9 k4 r3 s3 pad1", [r"run cpu.split: 2 pieces of 2 images, each by cpu\.\w+ \[.*\]"]),
        ("cpu.phases", "n2 c4 h16 w16 k4 r3 s3 pad2 dil2",
         ["copy x for cpu.*, 8.19 kB",
          r"run cpu.phases: 4 phases of dilation \(2, 2\), 8x8 pixels each, as images of a batch, by cpu\..*"]),
        ("cpu.as_2d", "n2 c2 d1 h9 w9 k2 t1 r3 s3",
         [r"run cpu.as_2d: without axis 0, which has one pixel, by cpu\..*"]),
        ("cpu.fold_padding", "n2 c3 h6 w6 k4 r4 s4 stride4 pad1",
         ["copy x for cpu.gemm_1x1, 864 B",
          r"run cpu.fold_padding: padding \(\(1, 1\), \(1, 1\)\) written out to 8x8 pixels, by .*"]),
    ],
)  # fmt: skip
def test_explain_tells_what_runs_inside(name, text, steps):
    told = openconv.explain(make(text), engine=name)
    assert len(told.steps) >= len(steps)
    for step, wanted in zip(told.steps, steps, strict=False):
        assert re.fullmatch(wanted, step), step
    assert told.winner is not None
    assert re.match(r".* for (one call|\d+ calls) of cpu\..* for .* of copies", told.winner.reasons[0])
    assert name in str(told)


def test_patches_are_told_to_be_a_matrix_product():
    told = openconv.explain("fprop n8 c3 h224 w224 k64 r16 s16 stride16 f32 nchw", engine="cpu.gemm_1x1")
    words = " ".join(str(told).split())
    assert "steps by its own size (patch embedding), read as a plain matrix product" in words


def test_tuning_measures_and_remembers_what_is_inside(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENCONV_TUNING_FILE", str(tmp_path / "tuning.json"))
    problem = Problem.parse("fprop n2 c3 h16 w16 k4 r3 s3 pad2 dil2 f32 nchw")
    with openconv.policy(engine="cpu.phases"), openconv.tuning("measure", seconds=0.5):
        x, w = torch.randn(problem.x_shape), torch.randn(problem.w_shape)
        out = openconv.conv2d(x, w, padding=2, dilation=2)
    torch.testing.assert_close(out, torch.nn.functional.conv2d(x, w, padding=2, dilation=2), atol=1e-5, rtol=1e-5)
    text = (tmp_path / "tuning.json").read_text()
    assert text.count('"engine": "cpu.phases"') >= 2
    assert '"knobs": "by=cpu.' in text
    found = choose(problem, this_device(), Policy(engine="cpu.phases"))
    assert found.source == "database"
    # A neighbour's times count for the same engine inside alone.
    near = choose(problem.with_(n=3), this_device(), Policy(engine="cpu.phases"))
    assert near.source == "neighbour"
    accepted, _ = rank(problem.with_(n=3), this_device(), Policy())
    assert any(c.engine.name == "cpu.phases" for c in accepted)


def test_runs_from_several_threads_at_once():
    from concurrent.futures import ThreadPoolExecutor

    problem = make("n2 c3 h30 w30 k4 r3 s3 pad2 dil2")
    plan = make_plan(problem, this_device(), Policy(engine="cpu.phases"))
    inputs = [(torch.randn(problem.x_shape), torch.randn(problem.w_shape)) for _ in range(8)]
    alone = [plan(*given) for given in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda given: plan(*given), inputs))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_an_engine_named_inside_needs_no_default():
    """Any engine of the registry may be inside, with knobs that are not its own first."""
    problem = make("n2 c3 h16 w16 k4 r3 s3 pad2 dil2")
    engine = engine_named("cpu.phases")
    seen = {candidate.knobs.inner[0].engine for candidate in candidates(engine, problem)}
    assert {"cpu.filter2d", "cpu.im2col_gemm", "cpu.naive"} <= seen
    last = list(candidates(engine, problem))[-1]
    assert isinstance(last, Candidate)
    assert Run(engine, problem, candidate=with_knobs(engine, problem, last.knobs)).candidate.knobs == last.knobs
