"""Rewrites around CUDA engines, whose kernels run on the CPU: copies, views, epilogues and what is inside."""

from __future__ import annotations

import math

import pytest
import torch

import openconv
from openconv.cuda.compile import variants
from openconv.cuda.copied import Copied
from openconv.cuda.device import device_for
from openconv.engine import engine_named, engines
from openconv.plan import forget_plans
from openconv.problem import DIRECTIONS, Problem
from openconv.rewrites import base, split
from openconv.rewrites.base import Rewrite
from openconv.select import Policy, choose, rank
from tests.support import (
    accepts,
    candidates,
    check_batch_invariance,
    check_determinism,
    check_engine,
    check_locality,
    check_plan,
    make,
    refusal,
    run_engine,
    this_device,
    with_knobs,
)

# Those that copy with kernels of their own have files of their own here.
REWRITES = [engine for engine in engines("cuda") if isinstance(engine, Rewrite) and not isinstance(engine, Copied)]
each_rewrite = pytest.mark.parametrize("engine", REWRITES, ids=[engine.name for engine in REWRITES])

TAKEN = {
    "cuda.phases": (
        ("n2 c3 h9 w8 k4 r3 s3 pad2 dil2", "nchw"),
        ("n1 c2 h12 w9 k2 r3 s2 stride2,1 pad3:1,0 dil4,1", "nhwc"),
    ),
    "cuda.as_2d": (("n2 c4 d1 h8 w6 k4 t1 r3 s3 pad0,1,1 g4", "nchw"), ("n1 c3 d3 h6 w5 k4 t1 r3 s3 pad0,1,1", "nhwc")),
    "cuda.groups": (("n2 c6 h8 w8 k4 r3 s3 pad1 g2", "nchw"), ("n1 c4 h6 w6 k4 r2 s2 stride2 g2", "nhwc")),
    "cuda.fold_padding": (("n2 c3 h6 w6 k4 r4 s4 stride4 pad1", "nchw"), ("n1 c4 h3 w4 k5 r1 s1 pad1,0:2", "nhwc")),
    "cuda.split": (("n3 c2 h6 w5 k3 r3 s3 pad1", "nchw"), ("n1 c2 h13 w6 k2 r3 s3 stride2 pad1", "nhwc")),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _all_sizes(monkeypatch):
    def forget():
        base._ranked.cache_clear()
        forget_plans()

    forget()
    monkeypatch.setattr(split, "LEAST", 1)
    yield
    forget()


def naive_inside(engine, problem):
    """The rewrite with cuda.naive inside, whose kernels compile soonest; else with its default."""
    found = [c for c in candidates(engine, problem) if c.knobs.inner[0].engine == "cuda.naive"]
    return found[0] if found else next(candidates(engine, problem))


@each_rewrite
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_with_the_default_inside(engine, direction):
    tried = 0
    for text, layout in TAKEN[engine.name]:
        problem = make(text, direction, layout=layout)
        if accepts(engine, problem):
            check_engine(engine, problem)
            tried += 1
    assert tried


@each_rewrite
@pytest.mark.parametrize("dtype", ["f16", "f64", "i32"])
def test_right_in_other_dtypes(engine, dtype):
    for text, layout in TAKEN[engine.name]:
        for direction in DIRECTIONS:
            problem = make(text, direction, dtype, layout)
            if accepts(engine, problem):
                check_engine(engine, problem, candidate=naive_inside(engine, problem))


@each_rewrite
@pytest.mark.parametrize("epilogue", ["+bias+residual+relu", "+=mul(acc,s.gain)"])
def test_epilogues_go_inside_with_their_operands(engine, epilogue):
    """Vectors of a group's channels, and the part of a tensor that belongs to the part of the result."""
    for direction in ("fprop", "dgrad"):
        for text, layout in TAKEN[engine.name]:
            problem = Problem.parse(f"{direction} {text} f32 {layout} {epilogue}")
            if accepts(engine, problem):
                check_plan(problem, engine=engine.name)
                check_engine(engine, problem, candidate=naive_inside(engine, problem))


def test_results_between_parts_have_no_epilogue():
    """A dgrad of stride 2 and dilation 2 has rows that no phase fills."""
    problem = make("n1 c2 h12 w11 k2 r2 s2 stride2 dil2 +bias", "dgrad")
    assert "epilogue is +bias; wanted none" in refusal(engine_named("cuda.phases"), problem)
    check_engine(engine_named("cuda.phases"), problem.with_(epilogue=""))


def test_sums_of_parts_want_f32():
    problem = make("n1 c2 h9 w9 k2 r3 s3 pad2 dil2", "wgrad", "f16")
    assert "dtype of dw is f16; sums of several parts want f32" in refusal(engine_named("cuda.phases"), problem)
    even = make("n1 c2 h8 w8 k2 r3 s3 pad2 dil2", "wgrad", "f16")
    assert accepts(engine_named("cuda.phases"), even)


@pytest.mark.slow
@each_rewrite
def test_what_can_be_relied_on(engine):
    text, layout = TAKEN[engine.name][0]
    problem = make(text, layout=layout)
    check_determinism(engine, problem.with_(n=1))
    for value in (math.inf, math.nan):
        check_locality(engine, problem, value=value)


def test_phases_are_batch_invariant_where_they_say_so():
    assert check_batch_invariance(engine_named("cuda.phases"), make("n3 c2 h8 w8 k2 r3 s3 pad2 dil2"))


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_split_gives_the_same_bits(direction):
    engine, naive = engine_named("cuda.split"), engine_named("cuda.naive")
    for text, layout in (*TAKEN["cuda.split"], ("n1 c1 h17 w9 k1 r5 s5 pad2", "nchw")):
        problem = make(text, direction, layout=layout)
        whole = run_engine(naive, problem)
        for candidate in candidates(engine, problem):
            if candidate.knobs.inner[0].engine == "cuda.naive":
                parts = run_engine(engine, problem, candidate=candidate)
                assert torch.equal(whole.out, parts.out), f"{candidate.knobs}: {whole.where}"


@pytest.mark.parametrize(
    "text",
    [
        "n1 c3 h50000 w50000 k4 r3 s3 pad1",
        "n200000 c8 h112 w112 k8 r3 s3 pad1",
        "n1 c1 h100000 w100000 k1 r3 s3 pad1",
    ],
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_tensors_of_more_than_2_31_elements_are_split(text, direction, monkeypatch):
    """For engines that count to 2^31: as many pieces as it takes, which together are the whole."""
    monkeypatch.setattr(split, "LEAST", 1 << 24)
    problem, device = make(text, direction, dtype="f32", layout="nhwc"), this_device()
    engine = engine_named("cuda.split")
    assert isinstance(engine, Rewrite)
    assert max(math.prod(problem.x_shape), math.prod(problem.y_shape)) >= 2**31
    alone = {candidate.engine.name for candidate in rank(problem, device, Policy())[0]}
    ranked = base._ranked(engine, problem, device, (), engines("cuda"))
    inner = {knobs.inner[0].engine for knobs in ranked}
    assert "cuda.igemm" in inner - alone
    work = engine.work(problem, ranked[0].way)
    assert all(max(math.prod(p.x_shape), math.prod(p.y_shape)) < 2**31 for p in work.problems)
    if direction != "wgrad":
        pieces = [piece for part in work.parts for piece in part.pieces[problem.result] or ()]
        assert sum(piece.elements for piece in pieces) == math.prod(problem.result_shape)


def test_they_run_where_they_are_named_alone():
    problem = make("n2 c3 h9 w8 k4 r3 s3 pad2 dil2")
    usual, refused = rank(problem, this_device(), Policy())
    assert not any(isinstance(c.engine, Rewrite) for c in usual)
    assert any(r.engine.name == "cuda.phases" and "runs only where it is named" in r.reasons[0] for r in refused)
    named = choose(problem, this_device(), Policy(engine="cuda.phases"))
    assert engine_named(named.knobs.inner[0].engine).proven
    told = openconv.explain(problem, device="cuda", engine="cuda.phases")
    assert any(step.startswith("run cuda.phases: 4 phases of dilation (2, 2), ") for step in told.steps)


def test_kernels_are_those_of_what_is_inside():
    problem = make("n8 c64 h56 w56 k64 r3 s3 pad2 dil2", dtype="f16", layout="nhwc")
    assert not any(variant.engine == "cuda.phases" for variant in variants([problem], ["sm_90a"]))
    device = device_for("sm_90a")
    knobs = next(iter(engine_named("cuda.phases").knobs(problem, device)))
    made = with_knobs(engine_named("cuda.phases"), problem, knobs)
    inner = engine_named(knobs.inner[0].engine)
    assert isinstance(made.engine, Rewrite)
    work = made.engine.work(problem, None)
    assert made.engine.sources(problem, device, knobs) == inner.sources(  # type: ignore[attr-defined]
        work.problems[0], device, knobs.inner[0].knobs
    )
