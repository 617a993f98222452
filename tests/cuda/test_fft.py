"""cuda.fft: the code of cpu.fft with the types, blocks and limits of a GPU, here on the CPU's tensors."""

from __future__ import annotations

import pytest
import torch

from openconv.cuda.device import device_for
from openconv.cuda.fft import Fft
from openconv.engine import UnsupportedProblem
from openconv.problem import DIRECTIONS
from openconv.select import Policy, choose
from tests.support import (
    LAYOUTS,
    PROBLEMS,
    candidates,
    cases,
    check_engine,
    check_knobs,
    check_plan,
    check_workspace_limits,
    make,
    refusal,
    this_device,
    threads,
)

ENGINE = Fft()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_on_every_problem(direction, dtype):
    names = list(PROBLEMS)[:: 1 if dtype == "f32" else 4]
    for problem in cases(names, [direction], [dtype], LAYOUTS[:2]):
        check_engine(ENGINE, problem.with_(epilogue=""))


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@threads(1)  # the smallest blocks are thousands of calls, for each of which a team would wake
def test_right_with_all_knobs(direction, dtype):
    for text in ("n2 c6 w700 k4 s65 pad64:0 g2", "n2 c3 h30 w34 k5 r9 s7 stride2,1 pad4,3"):
        check_knobs(ENGINE, make(text, direction, dtype))


@pytest.mark.parametrize("epilogue", ["+bias", "+bias+relu", "+scale+bias+silu"])
def test_an_epilogue_runs_behind_it(epilogue):
    for dtype in ("f32", "f16"):
        for direction in ("fprop", "dgrad"):
            check_plan(make(f"{PROBLEMS['1d-long']} {epilogue}", direction, dtype), engine=ENGINE.name)


def test_it_is_chosen_for_long_filters_and_never_under_strict_accuracy():
    problem = make("n1 c64 w64000 k64 s1024")
    assert choose(problem, this_device(), Policy(tuning="off")).engine.name == ENGINE.name
    assert choose(problem, this_device(), Policy(tuning="off", accuracy="strict")).engine.name != ENGINE.name
    with pytest.raises(UnsupportedProblem, match="accuracy is strict"):
        choose(problem, this_device(), Policy(engine=ENGINE.name, accuracy="strict"))


def test_refusals_name_the_value_seen():
    assert "i32" in refusal(ENGINE, make(PROBLEMS["3x3"], dtype="i32"))
    assert "f16, f16, f32" in refusal(ENGINE, make(PROBLEMS["3x3"], dtype="f16*f16>f32"))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert "'high'" in refusal(ENGINE, make(PROBLEMS["3x3"]))
        assert not refusal(ENGINE, make(PROBLEMS["3x3"], dtype="f64"))
        assert not refusal(ENGINE, make(PROBLEMS["depthwise"]))  # no matrix product in it
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_limit_on_the_workspace_is_kept(direction):
    used = check_workspace_limits(ENGINE, make("n2 c8 h40 w44 k6 r11 s9 pad5,4", direction))
    assert used[-1] <= used[0] // 8


def test_memory_is_bounded_and_long_filters_are_predicted_to_win():
    device = device_for("sm_90a")
    for text in ("n1 c64 w64000 k64 s1024", "n1 c1 h4000 w4000 k1 r63 s63 pad31", "n8 c1024 w100000 k1024 s1024"):
        problem = make(text)
        first = next(candidates(ENGINE, problem))
        assert first.workspace <= 1 << 30
        assert choose(problem, device, Policy(tuning="off")).cost == first.cost
    small = make("n64 c64 h56 w56 k64 r3 s3 pad1")
    assert next(candidates(ENGINE, small)).cost > choose(small, device, Policy(tuning="off")).cost
