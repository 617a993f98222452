"""Graphs with the kernels of a GPU, on the CPU: fused convolutions and generated trees, one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import openconv.cuda.tree  # noqa: F401  # before launches are sent to the emulator
from openconv import Graph, Policy
from openconv.cuda.device import device_for
from openconv.graph import GraphTensor, program
from openconv.plan import forget_plans
from openconv.select import current_policy
from tests.test_graph import GraphOps, TorchOps, follow, recipes

FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-1}


@pytest.fixture(autouse=True)
def planned_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs of tensors on the CPU are planned for a GPU."""
    device = device_for("sm_90a")
    monkeypatch.setattr(program, "device_of", lambda place: device)
    # A call compares the device that it was planned for with the CPU's threads.
    monkeypatch.setattr("openconv.graph.calls.Caller._stale", lambda self, found: found.policy != _limits(self.graph))
    forget_plans()
    yield
    forget_plans()


def _limits(graph: Graph) -> Policy:
    return (graph.policy or Policy()).over(current_policy())


def rand(*shape: int, dtype: torch.dtype = torch.float32, layout: str = "nchw") -> Tensor:
    made = torch.randn(*shape, dtype=dtype)
    return made.to(memory_format=FORMATS[layout]) if len(shape) == 4 else made


def check(make: Callable[..., Any], want: Callable[..., Any], *tensors: Tensor, engine: str | None = None) -> list[str]:
    """The graph's results against torch in f64; the engines of its kernels."""
    with Graph(policy=Policy(engine=engine) if engine else None) as graph:
        made = make(graph, *(graph.input(tensor, name=f"x{at}") for at, tensor in enumerate(tensors)))
        for each in made if isinstance(made, list) else [made]:
            each.set_output()
    values = {f"x{at}": tensor for at, tensor in enumerate(tensors)}
    expected = want(*(tensor.double() for tensor in tensors))
    found = graph(values)
    results = found if isinstance(found, tuple) else (found,)
    limit = LIMITS[tensors[0].dtype]
    for got, right in zip(results, expected if isinstance(expected, list) else [expected], strict=True):
        torch.testing.assert_close(got.double(), right, rtol=limit, atol=limit)
    room = torch.full((graph.workspace_bytes() + 16,), 255, dtype=torch.uint8)
    again = graph(values, workspace=room)
    for a, b in zip(results, again if isinstance(again, tuple) else (again,), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
    return [step.engine for step in graph.program().steps if step.engine != "view"]


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_pointwise_and_reductions(dtype, layout):
    x, y, v = rand(2, 5, 6, 7, dtype=dtype, layout=layout), rand(2, 5, 6, 7, dtype=dtype), rand(1, 5, 1, 1, dtype=dtype)

    def make(g: Graph, x: GraphTensor, y: GraphTensor, v: GraphTensor) -> list[GraphTensor]:
        z = g.relu(g.add(g.mul(x, v), y))
        return [z, g.reduction(z, "add", (2, 3)), g.reduction(g.sigmoid(z), "max", (0, 2, 3), keepdims=False)]

    def want(x: Tensor, y: Tensor, v: Tensor) -> list[Tensor]:
        z = (x * v + y).relu()
        return [z, z.sum((2, 3), True), z.sigmoid().amax((0, 2, 3))]

    engines = check(make, want, x, y, v)
    assert set(engines) == {"cuda.tree"}


def test_softmax_and_views():
    x = rand(3, 4, 10)

    def make(g: Graph, x: GraphTensor) -> GraphTensor:
        rows = g.reshape(g.transpose(x, (1, 0, 2)), (12, 10))
        raised = g.exp(g.sub(rows, g.reduction(rows, "max", 1)))
        return g.slice(g.div(raised, g.reduction(raised, "add", 1)), (1, 0), (12, 10), (2, 3))

    check(make, lambda x: x.transpose(0, 1).reshape(12, 10).softmax(1)[1::2, ::3], x)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_batchnorm_in_training(layout):
    x, scale, bias = rand(2, 4, 6, 5, layout=layout), rand(4), rand(4)
    mean, variance = rand(4), rand(4).abs()

    def make(g: Graph, *values: GraphTensor) -> list[GraphTensor]:
        x, scale, bias, mean, variance = values
        made = g.batchnorm(x, scale, bias, mean, variance, momentum=0.2)
        assert made.running_mean is not None
        assert made.running_variance is not None
        return [g.relu(made.y), made.running_mean, made.running_variance]

    def want(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> list[Tensor]:
        kept = mean.clone(), variance.clone()
        y = F.batch_norm(x, *kept, scale, bias, True, 0.2).relu()
        return [y, *kept]

    engines = check(make, want, x, scale, bias, mean, variance)
    assert set(engines) == {"cuda.tree"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_fused_convolution(dtype):
    x, w = rand(1, 8, 6, 6, dtype=dtype, layout="nhwc"), 0.2 * rand(16, 8, 3, 3, dtype=dtype, layout="nhwc")
    b, r = rand(16, dtype=dtype), rand(1, 16, 6, 6, dtype=dtype, layout="nhwc")
    engines = check(
        lambda g, x, w, b, r: g.relu(g.add(g.bias(g.conv_fprop(x, w, padding=1), b), r)),
        lambda x, w, b, r: (F.conv2d(x, w, b, padding=1) + r).relu(), x, w, b, r, engine="cuda.igemm",
    )  # fmt: skip
    assert engines == ["cuda.igemm"]


def test_a_convolution_with_statistics_and_what_is_behind_it():
    x, w = rand(2, 8, 6, 6, dtype=torch.float16, layout="nhwc"), rand(16, 8, 3, 3, dtype=torch.float16, layout="nhwc")
    w, v, scale, bias = 0.2 * w, 0.2 * rand(8, 16, 1, 1, dtype=torch.float16, layout="nhwc"), rand(16), rand(16)

    def make(g: Graph, x: GraphTensor, w: GraphTensor, s: GraphTensor, b: GraphTensor, v: GraphTensor) -> GraphTensor:
        return g.conv_fprop(g.relu(g.batchnorm(g.conv_fprop(x, w, padding=1), s, b).y), v)

    def want(x: Tensor, w: Tensor, s: Tensor, b: Tensor, v: Tensor) -> Tensor:
        return F.conv2d(F.batch_norm(F.conv2d(x, w, padding=1), None, None, s, b, True).relu(), v)

    engines = check(make, want, x, w, scale, bias, v, engine="cuda.igemm")
    assert engines[0] == engines[-1] == "cuda.igemm"
    assert set(engines[1:-1]) == {"cuda.tree"}


def test_a_matrix_product_with_an_epilogue():
    a, b, c = rand(12, 16, dtype=torch.float16), 0.2 * rand(16, 24, dtype=torch.float16), rand(24, dtype=torch.float16)
    engines = check(
        lambda g, a, b, c: g.relu(g.add(g.matmul(a, b), c)), lambda a, b, c: (a @ b + c).relu(), a, b, c,
        engine="cuda.igemm",
    )  # fmt: skip
    assert engines == ["cuda.igemm"]


@settings(max_examples=25)
@given(recipes(), st.integers(0, 30))
def test_any_graph_is_what_torch_says(steps, wanted):
    torch.manual_seed(0)
    values = [rand(2, 3, 4, 5), rand(1, 3, 1, 1), rand(2, 3, 4, 5, layout="nhwc"), rand(3, 3, 3, 3) * 0.2]
    values = [value.double() for value in values]
    expected = follow(steps, list(values), TorchOps())
    at = wanted % len(expected)
    with Graph() as graph:
        inputs = [graph.input(value, name=f"x{at}") for at, value in enumerate(values)]
        follow(steps, list(inputs), GraphOps(graph))[at].set_output()
    got = graph({f"x{at}": value for at, value in enumerate(values)})
    torch.testing.assert_close(got, expected[at].expand(got.shape), rtol=1e-9, atol=1e-9)
