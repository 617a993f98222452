"""Problem: its text form, the facts derived from it, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openconv.epilogue import IDENTITY, Epilogue
from openconv.problem import DTYPE_BYTES, LAYOUTS, PRECISIONS, Problem, output_size
from openconv.tensors import DTYPES
from tests.support import PROBLEMS, cases, epilogues, problems, reference

BASE = {"n": 2, "c": 4, "k": 6, "spatial": (7, 9), "filter": (3, 3)}
THREE_DTYPES = st.tuples(*(st.sampled_from(sorted(DTYPE_BYTES)),) * 3)
THREE_LAYOUTS = st.tuples(*(st.sampled_from(LAYOUTS),) * 3)


def make(**fields):
    return Problem(**{**BASE, **fields})


# -- text --------------------------------------------------------------------------------------------------------


@given(problems(epilogues=epilogues()), THREE_DTYPES, THREE_LAYOUTS, st.sampled_from(PRECISIONS))
def test_text_parses_back_to_the_equal_problem(problem, dtypes, layouts, precision):
    problem = problem.with_(dtypes=dtypes, layouts=layouts, precision=precision)
    text = str(problem)
    again = Problem.parse(text)
    assert again == problem
    assert hash(again) == hash(problem)
    assert str(again) == text
    assert "\n" not in text


@pytest.mark.parametrize(
    "text, fields",
    [
        (
            "fprop n64 c64 h56 w56 k64 r3 s3 stride2 pad1 f16 nhwc +bias+relu",
            {"n": 64, "c": 64, "k": 64, "spatial": (56, 56), "filter": (3, 3), "stride": (2, 2),
             "padding": ((1, 1), (1, 1)), "dtypes": ("f16",) * 3, "layouts": ("nhwc",) * 3,
             "epilogue": Epilogue().bias().relu()},
        ),
        (
            "dgrad n1 c6 w9 k4 s3 stride2 pad0:1 dil3 g2 f64 nchw",
            {"direction": "dgrad", "n": 1, "c": 6, "k": 4, "spatial": (9,), "filter": (3,), "stride": (2,),
             "padding": ((0, 1),), "dilation": (3,), "groups": 2, "dtypes": ("f64",) * 3},
        ),
        (
            "wgrad n1 c2 d4 h5 w6 k3 t1 r2 s3 stride1,2,1 pad0,1:2,1 dil1,1,2 f16*f16>f32 nhwc*nchw>nhwc",
            {"direction": "wgrad", "n": 1, "c": 2, "k": 3, "spatial": (4, 5, 6), "filter": (1, 2, 3),
             "stride": (1, 2, 1), "padding": ((0, 0), (1, 2), (1, 1)), "dilation": (1, 1, 2),
             "dtypes": ("f16", "f16", "f32"), "layouts": ("nhwc", "nchw", "nhwc")},
        ),
        (
            "fprop n1 c1 h2 w2 k1 r1 s1 f32 nchw tf32x3",
            {"n": 1, "c": 1, "k": 1, "spatial": (2, 2), "filter": (1, 1), "precision": "tf32x3"},
        ),
    ],
    ids=["2d", "1d", "3d", "precision"],
)  # fmt: skip
def test_text_means_what_the_table_says(text, fields):
    assert Problem.parse(text) == Problem(**fields)
    assert str(Problem(**fields)) == text


def test_parse_takes_any_order_and_defaults():
    assert Problem.parse("fprop s3 pad1 w9 nchw k6 r3 h7 c4 n2") == make(padding=1)


@pytest.mark.parametrize(
    "text, named",
    [
        ("", "''"),
        ("conv n1 c1 w2 k1 s1", "'conv'"),
        ("fprop n1 c1 w2 k1 s1 stride-1", "'stride-1'"),
        ("fprop n1 c1 w2 k1 s1 q3", "'q3'"),
        ("fprop n1 c1 w2 k1 s1 f31", "'f31'"),
        ("fprop n1 c1 w2 k1 s1 f32*f32", "'f32*f32'"),
        ("fprop n1 c1 w2 k1 s1 f32*nchw>f32", "'f32*nchw>f32'"),
        ("fprop n1 n2 c1 w2 k1 s1", "n twice"),
        ("fprop n1 c1 w2 k1 s1 f32 f16", "dtypes twice"),
        ("fprop n1 c1 w2 k1 s1 pad1 pad2", "padding twice"),
        ("fprop n1 c1 w2 s1", "lacks k"),
        ("fprop n1 c1 k1 s1", "lacks w"),
        ("fprop n1 c1 h2 w2 k1 s1", "lacks r"),
        ("fprop n1 c1 w2 k1 r1 s1", "has r too many"),
        ("fprop n1 c1 d2 w2 k1 r1 s1", "lacks h"),
        ("fprop n1 c1 w2 k1 s1 stride1,2", "stride"),
        ("fprop n1 c1 w2 k1 s1 +nope", "nope"),
    ],
)
def test_parse_names_the_token_that_is_wrong(text, named):
    with pytest.raises(ValueError) as error:
        Problem.parse(text)
    assert named in str(error.value)
    assert text in str(error.value) or "+nope" in text or "stride1,2" in text


# -- one value or many -------------------------------------------------------------------------------------------


def test_one_value_stands_for_all():
    assert make(stride=2, padding=1, dilation=1, filter=3, dtypes="f16", layouts="nhwc") == make(
        stride=(2, 2), padding=((1, 1), (1, 1)), dilation=(1, 1), filter=(3, 3), dtypes=("f16",) * 3,
        layouts=("nhwc",) * 3,
    )  # fmt: skip
    assert make(padding=(1, 2)).padding == ((1, 1), (2, 2))
    assert make(padding=((1, 2),)).padding == ((1, 2), (1, 2))
    assert make(padding=[[0, 1], 2]).padding == ((0, 1), (2, 2))
    assert make(epilogue="+bias+relu").epilogue == Epilogue().bias().relu()


def test_lists_give_the_same_frozen_problem():
    problem = make(spatial=[7, 9], filter=[3, 3], stride=[1, 2], padding=[[0, 1], [2, 3]], dtypes=["f32", "f32", "f32"])
    assert problem == make(stride=(1, 2), padding=((0, 1), (2, 3)))
    assert hash(problem) == hash(make(stride=(1, 2), padding=((0, 1), (2, 3))))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Problem)])
def test_no_field_can_be_set(field):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(make(), field, None)


@given(problems(epilogues=epilogues()))
def test_equal_problems_hash_alike_and_survive_pickling(problem):
    same = dataclasses.replace(problem)
    assert same == problem
    assert len({same, problem}) == 1
    assert pickle.loads(pickle.dumps(problem)) == problem
    assert problem.with_(n=problem.n + 1) != problem
    assert problem.with_() == problem


# -- derived facts -----------------------------------------------------------------------------------------------


def positions(size, taps, stride, low, high, dilation):
    """Starts of all windows that lie within the padded axis, counted one by one."""
    reach = dilation * (taps - 1) + 1
    return [at for at in range(-low, size + high) if (at + low) % stride == 0 and at + reach <= size + high]


@given(*(st.integers(1, 9),) * 2, st.integers(1, 4), *(st.integers(0, 5),) * 2, st.integers(1, 3))
def test_output_size_counts_windows(size, taps, stride, low, high, dilation):
    if size + low + high >= dilation * (taps - 1) + 1:
        assert output_size(size, taps, stride, low, high, dilation) == len(
            positions(size, taps, stride, low, high, dilation)
        )
    else:
        assert output_size(size, taps, stride, low, high, dilation) <= 0


@pytest.mark.parametrize("problem", cases(), ids=str)
def test_shapes_are_those_of_the_reference(problem):
    """The three shapes agree with torch's convolution of tensors that have them."""
    forward = problem.with_(direction="fprop", epilogue=IDENTITY)
    y = reference(forward, torch.ones(problem.x_shape), torch.ones(problem.w_shape))
    assert tuple(y.shape) == problem.y_shape
    assert problem.out == problem.y_shape[2:]
    assert problem.rank == len(problem.out)
    shapes = {"fprop": problem.y_shape, "dgrad": problem.x_shape, "wgrad": problem.w_shape}
    assert problem.result_shape == shapes[problem.direction]
    assert problem.result_dtype == "f32"


@pytest.mark.parametrize("name", PROBLEMS)
def test_counts_by_enumeration(name):
    """Products, bytes and the implicit matrix product, against loops over every index."""
    (problem,) = cases([name], directions=["fprop"], dtypes=["f16*f16>f32"])
    windows = [
        positions(*axis[:3], *axis[3], axis[4])
        for axis in zip(problem.spatial, problem.filter, problem.stride, problem.padding, problem.dilation, strict=True)
    ]
    outputs = list(itertools.product(range(problem.n), range(problem.k), *windows))
    terms = list(itertools.product(range(problem.c // problem.groups), *map(range, problem.filter)))
    assert problem.macs == len(outputs) * len(terms)
    vectors = len(problem.epilogue.operands)
    assert problem.flops == 2 * problem.macs + len(outputs) * vectors  # one addition for a bias
    tensors = 2 * math.prod(problem.x_shape) + 2 * math.prod(problem.w_shape) + 4 * len(outputs)
    assert problem.min_bytes == tensors + 4 * problem.k * vectors
    assert problem.intensity == problem.flops / problem.min_bytes

    gemm = problem.gemm
    assert gemm.batch == problem.groups
    assert (gemm.m, gemm.n, gemm.k) == (len(outputs) // problem.k, problem.k // problem.groups, len(terms))
    assert gemm.m * gemm.n * gemm.k * gemm.batch == problem.macs
    wgrad = problem.with_(direction="wgrad", epilogue=IDENTITY).gemm
    assert (wgrad.m, wgrad.n, wgrad.k) == (gemm.n, gemm.k, gemm.m)
    assert wgrad.m * wgrad.n * wgrad.k * wgrad.batch == problem.macs
    dgrad = problem.with_(direction="dgrad").gemm
    images = problem.n * math.prod(problem.spatial)
    taps = math.prod(problem.filter)
    assert dgrad == (images, problem.c // problem.groups, problem.k // problem.groups * taps, problem.groups)


def test_epilogue_counts_towards_flops_and_bytes():
    problem = make(epilogue="+bias+residual+mul(s.gain)+relu")
    result = math.prod(problem.y_shape)
    assert problem.flops == 2 * problem.macs + 4 * result
    assert problem.min_bytes == make().min_bytes + 4 * (problem.k + result + 1)


@pytest.mark.parametrize(
    "direction, result, channels, dtype", [("fprop", 2, 6, "f32"), ("dgrad", 0, 4, "f16"), ("wgrad", 1, 6, "bf16")]
)
def test_result_is_the_tensor_that_the_pass_computes(direction, result, channels, dtype):
    problem = make(direction=direction, dtypes=("f16", "bf16", "f32"))
    assert (problem.result, problem.result_channels, problem.result_dtype) == (result, channels, dtype)


@pytest.mark.parametrize(
    "fields, depthwise",
    [
        ({"c": 4, "k": 4, "groups": 4}, True),
        ({"c": 4, "k": 12, "groups": 4}, True),
        ({"c": 1, "k": 1}, True),
        ({"c": 4, "k": 4, "groups": 2}, False),
        ({"c": 4, "k": 4}, False),
    ],
)
def test_depthwise(fields, depthwise):
    assert make(**fields).is_depthwise == depthwise


@pytest.mark.parametrize(
    "fields, empty",
    [({}, False), ({"n": 0}, True), ({"c": 0}, True), ({"k": 0}, True), ({"spatial": (0, 9), "padding": 2}, True)],
)
def test_empty(fields, empty):
    assert make(**fields).is_empty == empty


def test_every_dtype_has_its_size():
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == DTYPE_BYTES


# -- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"direction": "backward"}, ["direction", "'backward'", "fprop, dgrad, wgrad"]),
        ({"precision": "fast"}, ["precision", "'fast'", "ieee, tf32, tf32x3"]),
        ({"n": -1}, ["n is -1", ">= 0"]),
        ({"n": 2.0}, ["n is 2.0", "integers"]),
        ({"n": True}, ["n is True", "integers"]),
        ({"c": -4}, ["c is -4"]),
        ({"k": -6}, ["k is -6"]),
        ({"spatial": (-1, 9)}, ["spatial is (-1, 9)"]),
        ({"spatial": ()}, ["()", "1, 2 or 3"]),
        ({"spatial": (5, 5, 5, 5)}, ["(5, 5, 5, 5)", "1, 2 or 3"]),
        ({"filter": (3, 0)}, ["filter is (3, 0)", ">= 1"]),
        ({"filter": (3, 3, 3)}, ["filter is (3, 3, 3)", "one value or 2"]),
        ({"stride": 0}, ["stride is (0, 0)", ">= 1"]),
        ({"stride": (1, 1, 1)}, ["stride is (1, 1, 1)", "one value or 2"]),
        ({"stride": 1.5}, ["stride is (1.5, 1.5)"]),
        ({"dilation": -1}, ["dilation is (-1, -1)", ">= 1"]),
        ({"padding": -1}, ["padding is ((-1, -1), (-1, -1))", ">= 0"]),
        ({"padding": ((1, 2, 3), 0)}, ["padding", "(1, 2, 3)", "(low, high)"]),
        ({"padding": (1, 1, 1)}, ["padding is (1, 1, 1)", "one value or 2"]),
        ({"groups": 0}, ["groups is 0", ">= 1"]),
        ({"groups": 3, "k": 6}, ["C is 4", "multiple of groups = 3"]),
        ({"groups": 4}, ["K is 6", "multiple of groups = 4"]),
        ({"dtypes": "float32"}, ["dtype is 'float32'", "f32"]),
        ({"dtypes": ("f32", "f32")}, ["dtype is ('f32', 'f32')", "three"]),
        ({"layouts": "hwcn"}, ["layout is 'hwcn'", "nchw, nhwc"]),
        ({"filter": (8, 3)}, ["axis 0", "is 7", "reach of 8"]),
        ({"filter": (3, 4), "dilation": (1, 4), "padding": (0, 1)}, ["axis 1", "is 11", "reach of 13"]),
        ({"spatial": (0, 9)}, ["axis 0", "is 0", "reach of 3"]),
        ({"direction": "wgrad", "epilogue": "+bias"}, ["epilogue of a wgrad", "+bias"]),
        ({"epilogue": "+bais"}, ["bais"]),
    ],
)
def test_refusals_name_the_value_seen(fields, words):
    with pytest.raises(ValueError) as error:
        make(**fields)
    for word in words:
        assert word in str(error.value)
