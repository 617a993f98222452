"""Random problems through the planner, on the engine that the heuristic picks and on every other that accepts.

All passes, one to three axes, strides, dilations, asymmetric padding, groups, layouts, dtypes, epilogues and odd
sizes. Each example runs twice per engine: on random data within the bounds that :mod:`tests.support` derives, and on
small integers, exactly. A failure is shrunk to a small problem and ends with the command that repeats it.

The default is small and the same in every run. To search for long, elsewhere each time::

    OPENCONV_FUZZ=20000 python -m pytest tests/test_fuzz.py --hypothesis-profile random

``--hypothesis-seed=N`` with that profile repeats one such search.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openconv.epilogue import IDENTITY, Epilogue
from openconv.problem import LAYOUTS, Problem
from openconv.select import Policy, rank
from tests.support import EPILOGUES, check_plan, core_of, problems, this_device

EXAMPLES = int(os.environ.get("OPENCONV_FUZZ", "60"))

# What each kind of number can be asked for: an epilogue that compares knows no complex numbers, and one that squashes
# knows no integers. Sums of bytes wrap around, after which a comparison means little.
COMPLEX = ("+bias", "+scale+bias", "+residual", "+=mul(acc,acc)")
BYTES = ("+bias", "+bias+residual", "+mul(3)+sub(c.a)")
WHOLE = (*BYTES, "+bias+relu", "+=max(acc,t.floor)", "+clamp(-20,30)")
EPILOGUES_OF = {"complex64": COMPLEX, "i8": BYTES, "i32": WHOLE, "i64": WHOLE}


@st.composite
def fuzzed(draw, dtypes):
    """A problem in any combination of layouts, and with an epilogue one time in two."""
    problem = draw(problems(dtypes=dtypes))
    texts = EPILOGUES_OF.get(problem.dtypes[0], EPILOGUES)
    epilogue = draw(st.sampled_from(("",) * len(texts) + texts)) if problem.direction != "wgrad" else ""
    return problem.with_(layouts=tuple(draw(st.sampled_from(LAYOUTS)) for _ in range(3)), epilogue=epilogue)


def check_all_engines(problem: Problem, seed: int, strided: bool) -> None:
    accepted, _ = rank(core_of(problem), this_device(), Policy())
    for engine in (None, *(candidate.engine.name for candidate in accepted)):
        for integers in (False, True):
            check_plan(problem, seed, engine=engine, integers=integers, strided=strided)


@settings(max_examples=EXAMPLES)
@given(fuzzed(("f32",)), st.integers(0, 999), st.booleans())
def test_f32(problem, seed, strided):
    check_all_engines(problem, seed, strided)


@settings(max_examples=max(EXAMPLES // 2, 1))
@given(fuzzed(("f64", "f16", "bf16", "complex64")), st.integers(0, 999), st.booleans())
def test_other_floats(problem, seed, strided):
    check_all_engines(problem, seed, strided)


@settings(max_examples=max(EXAMPLES // 2, 1))
@given(fuzzed(("i64", "i32", "i8")), st.integers(0, 999), st.booleans())
def test_integers(problem, seed, strided):
    """Without an epilogue the data use the type's whole range, and sums wrap around."""
    check_all_engines(problem, seed, strided)


@pytest.mark.parametrize("epilogue", ["", "+bias+relu"])
@pytest.mark.parametrize("empty", ["n0 c3 h5 w6 k4", "n2 c0 h5 w6 k4", "n2 c3 h5 w6 k0", "n2 c3 h0 w6 k4"])
def test_empty_problems_give_sums_of_nothing(empty, epilogue):
    for direction in ("fprop", "dgrad", "wgrad"):
        text = f"{direction} {empty} r3 s3 pad2 f32 nhwc {epilogue if direction != 'wgrad' else ''}"
        check_plan(Problem.parse(text))


@pytest.mark.parametrize("text", ["+residual", "+max(t.b)", "+=sub(t.b,acc)", "+=mul(acc,add(t.b,acc))"])
def test_the_result_keeps_its_layout_whatever_the_operands_have(text):
    """Pointwise operators of torch follow the strides of their first argument."""
    for layout in LAYOUTS:
        check_plan(Problem.parse(f"fprop n2 c3 h4 w5 k4 r3 s3 f32 {layout} {text}"), strided=True)


def test_the_epilogues_that_are_fuzzed_parse():
    assert all(Epilogue.parse(text) != IDENTITY for text in (*EPILOGUES, *COMPLEX, *WHOLE))
