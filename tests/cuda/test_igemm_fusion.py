"""cuda.igemm with prologues, several results and statistics, checked on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from openconv import engine
from openconv.cuda import jit
from openconv.cuda.device import device_for
from openconv.cuda.igemm import Igemm, Tile
from openconv.plan import Plan, forget_plans, lower, make_plan, steps_of
from openconv.problem import Problem
from openconv.reference import allowed_error, error_of, random_inputs
from openconv.select import Policy, rank
from openconv.tensors import DTYPES, empty, in_layout
from tests.support import _bits, _embed, _poison, this_device, with_knobs

ENGINE = Igemm()
SMALL = Tile(32, 64, 1, 2, 32, 3)
NARROW = Tile(64, 32, 2, 1, 32, 4)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """cuda.igemm is among the engines."""
    entry = "openconv.cuda.igemm:Igemm"
    if entry not in engine.ENGINES:
        monkeypatch.setattr(engine, "ENGINES", (*engine.ENGINES, entry))
    forget_plans()
    yield
    forget_plans()


def planned(text: str, knobs: Tile) -> Plan:
    problem = Problem.parse(text)
    plan = make_plan(problem, this_device(), Policy(), with_knobs(ENGINE, problem, knobs))
    assert plan.core.is_fused
    assert plan.core.fusion == problem.fusion
    return plan


def check(text: str, knobs: Tile = SMALL, seed: int = 0) -> None:
    """Right on normal values, and the same bits again."""
    plan = planned(text, knobs)
    problem = plan.problem
    inputs = random_inputs(problem, seed)
    made, again = (plan(inputs.a, inputs.b, inputs.operands) for _ in range(2))
    results = [made] if isinstance(made, torch.Tensor) else list(made)
    assert len(results) == 1 + len(problem.epilogue.also) + 2 * problem.stats
    for result in results[: 1 + len(problem.epilogue.also)]:
        assert result.dtype == DTYPES[problem.result_dtype]
        assert in_layout(result, problem.layouts[problem.result])
    assert plan.candidate is not None
    error, allowed = error_of(problem, made, inputs), allowed_error(problem, plan.candidate.traits)
    assert error <= allowed, f"off by {error:.3g}, allowed {allowed:.3g}: {text} [{knobs}]"
    repeated: list[Any] = [again] if isinstance(again, torch.Tensor) else list(again)
    assert all(torch.equal(one, other) for one, other in zip(results, repeated, strict=True))


def test_a_prologue_looks_at_windows_when_boxes_come():
    text, knobs = (
        "fprop n2 c24 h9 w7 k40 r3 s3 pad1 f16 nhwc x+scale+bias+relu +bias+residual+relu",
        Tile(64, 64, 2, 2, 32, 3),
    )
    traits = ENGINE.sources(Problem.parse(text), device_for("sm_90a"), knobs)[0].traits
    assert "boxed = true;" in traits
    assert "shares = false;" in traits
    check(text, knobs)


@pytest.mark.parametrize("direction", ["fprop", "wgrad"])
@pytest.mark.parametrize(
    "text",
    [
        "n2 c32 h7 w6 k24 r3 s3 pad1 f16 nhwc x+scale+bias+relu",
        "n1 c40 h6 w9 k16 r3 s3 stride2 pad1 bf16 nchw x+bias",
        "n2 c3 h9 w8 k8 r3 s3 stride2,1 pad2 f16 nhwc x+scale+bias+relu",
        "n1 c18 h5 w6 k12 r3 s2 pad1 dil2 g2 f16 nhwc x+scale+relu",
        "n2 c36 h5 w5 k8 r3 s3 pad1 f32 nhwc tf32 x+scale+bias",
        "n1 c9 w17 k8 s5 pad2 f32 nchw tf32 x+bias+relu",
    ],
)
def test_a_prologue_is_part_of_the_kernel(text, direction):
    check(f"{direction} {text}")


@pytest.mark.parametrize("direction", ["fprop", "wgrad"])
def test_a_prologue_with_many_steps_stages_and_splits(direction):
    text = f"{direction} n3 c64 h9 w9 k32 r3 s3 pad1 f16 nhwc x+scale+bias+relu"
    check(text, NARROW)
    check(text, replace(NARROW, splits=3))


def test_padding_stays_zero_behind_a_prologue():
    plan = planned("fprop n1 c32 h3 w3 k8 r3 s3 pad1 f16 nhwc x+bias", SMALL)
    x, w = (
        torch.zeros(shape).half().contiguous(memory_format=torch.channels_last)
        for shape in ((1, 32, 3, 3), (8, 32, 3, 3))
    )
    y = plan(x, w.fill_(1), (torch.ones(32),))
    assert y[0, 0].tolist() == [[128, 192, 128], [192, 288, 192], [128, 192, 128]]


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize(
    "text",
    [
        "fprop n2 c16 h5 w6 k24 r3 s3 pad1 f16 {} +bias+keep+relu",
        "fprop n1 c8 h5 w7 k21 r3 s3 pad1 g1 f16*f16>f32 {} +keep+bias+residual+keep+relu stats",
        "dgrad n1 c24 h7 w6 k8 r3 s3 stride2 pad1 g2 bf16 {} +=mul(acc,sigmoid(acc))+keep(add(acc,c.bias))",
    ],
)
def test_other_results_are_stored_too(text, layout):
    check(text.format(f"nhwc*nhwc>{layout}" if "f32" in text else layout))


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize(
    "text, knobs",
    [
        ("n3 c16 h7 w5 k40 r3 s3 pad1 f16", SMALL),
        ("n2 c8 h9 w7 k15 r3 s3 pad1 bf16", NARROW),
        ("n2 c8 h6 w7 k36 r1 s1 g2 f32 tf32", SMALL),
    ],
)
def test_statistics_are_those_of_the_stored_result(text, knobs, layout):
    check(f"fprop {text} {layout} +bias stats", knobs)


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_nothing_is_written_beyond_the_results(layout):
    problem = Problem.parse(f"fprop n1 c8 h5 w7 k13 r3 s3 pad1 f16 {layout} x+bias +bias+keep+relu stats")
    inputs = random_inputs(problem)
    y = empty(problem.result_shape, torch.float16, layout, torch.device("cpu"))
    size = ENGINE.workspace_bytes(problem, this_device(), SMALL)
    likes = [y, y, torch.empty(13), torch.empty(13), torch.empty(size, dtype=torch.uint8)]
    places, margins = zip(*(_embed(like, shift=at == 1) for at, like in enumerate(likes)), strict=True)
    given = [_embed(value, shift=1)[0].copy_(value) for value in (inputs.a, inputs.b, *inputs.operands)]
    runner = ENGINE.build(problem, this_device(), SMALL)
    runner(given[0], given[1], places[0], places[4], tuple(given[2:]), places[1:4])
    assert error_of(problem, places[:4], inputs) <= allowed_error(problem, ENGINE.traits(problem, SMALL))
    for margin in (each for pair in margins for each in pair):
        assert torch.equal(_bits(margin), _bits(_poison(torch.empty_like(margin))))


def test_everything_at_once():
    check(
        "fprop n2 c32 h9 w7 k40 r3 s3 pad1 f16 nhwc x+scale+bias+relu +bias+keep+relu stats", Tile(64, 256, 1, 4, 32, 3)
    )


def test_the_plan_chooses_it_and_says_so():
    problem, device = (
        Problem.parse("fprop n8 c64 h28 w28 k64 r3 s3 pad1 f16 nhwc x+relu +bias+keep+relu stats"),
        this_device(),
    )
    accepted, refused = rank(lower(problem, device), device, Policy(tuning="off"))
    assert [candidate.engine.name for candidate in accepted] == ["cuda.igemm"]
    # cuda.pixels takes such problems, of 1x1 filters, and cuda.igemm_sm90 those without a prologue.
    own = ("is fused", "filter is (3, 3)", "stands before the products", "not proven")
    assert all(any(word in refusal.reasons[0] for word in own) for refusal in refused)
    assert steps_of(problem, device, accepted[0]) == (
        f"run cuda.igemm [{accepted[0].knobs}] with x+relu +bias+keep+relu stats",
    )
    assert all(tile.splits == 1 for tile in ENGINE.knobs(problem, device))
    assert accepted[0].workspace == 8 * 64 * -(-8 * 28 * 28 // accepted[0].knobs.rows)
    wide = problem.with_(dtypes="f64")
    assert not lower(wide, device).is_fused
    small = Policy(max_workspace=0, engine="cuda.igemm", tuning="off")
    assert not lower(problem, device, small).is_fused
    candidate = rank(lower(problem, device, small), device, small)[0][0]
    assert steps_of(problem, device, candidate, small)[0] == "compute x+relu with torch"
    assert make_plan(problem, device, small).steps == steps_of(problem, device, candidate, small)


def test_what_is_not_computed_is_refused():
    problem = Problem.parse("fprop n1 c8 h5 w5 k8 r3 s3 f16 nhwc stats")
    with pytest.raises(ValueError, match="splits is 2 for 'stats'; wanted 1"):
        ENGINE.build(problem, this_device(), replace(SMALL, splits=2))
    integers = problem.with_(dtypes=("i8", "i8", "i32"), stats=False, epilogue="+keep+relu")
    assert "results of i32" in "\n".join(ENGINE.refusals(integers, this_device()))


def test_no_spills():
    for arch in ("sm_80", "sm_90a"):
        device = device_for(arch)
        for direction, rest in (("fprop", "x+scale+bias+relu +bias+keep+relu stats"), ("wgrad", "x+scale+bias+relu")):
            problem = Problem.parse(f"{direction} n16 c64 h56 w56 k64 r3 s3 pad1 f16 nhwc {rest}")
            tile = next(iter(ENGINE.knobs(problem, device)))
            for source in ENGINE.sources(problem, device, tile):
                assert not any(found.spills for found in jit.usage(source, arch)), (arch, tile)
