"""Graphs with the kernels of a GPU, on the CPU: fused convolutions and generated trees, one behind the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
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
from openconv.graph import GraphTensor, compiled, compiler, program
from openconv.plan import forget_plans
from openconv.select import current_policy
from tests.emulator import EmulatedLaunch
from tests.test_graph import GraphOps, TorchOps, follow, recipes

FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-1}


@pytest.fixture(autouse=True)
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """All that programs allocate, for results and for what lies between them: poisoned, so that what is not written
    shows."""
    found: list[Tensor] = []
    make = compiled.Maker.__call__

    def poisoned(self: compiled.Maker) -> Tensor:
        found.append(make(self))
        found[-1].untyped_storage().fill_(255)  # type: ignore[attr-defined]
        return found[-1]

    monkeypatch.setattr(compiled.Maker, "__call__", poisoned)
    return found


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
@given(recipes(), st.integers(0, 30), st.booleans())
def test_any_graph_is_what_torch_says(steps, wanted, fuse):
    torch.manual_seed(0)
    values = [rand(2, 3, 4, 5), rand(1, 3, 1, 1), rand(2, 3, 4, 5, layout="nhwc"), rand(3, 3, 3, 3) * 0.2]
    values = [value.double() for value in values]
    expected = follow(steps, list(values), TorchOps())
    at = wanted % len(expected)
    with Graph(fuse=fuse) as graph:
        inputs = [graph.input(value, name=f"x{at}") for at, value in enumerate(values)]
        follow(steps, list(inputs), GraphOps(graph))[at].set_output()
    got = graph({f"x{at}": value for at, value in enumerate(values)})
    torch.testing.assert_close(got, expected[at].expand(got.shape), rtol=1e-9, atol=1e-9)
    room = torch.full((graph.workspace_bytes(),), 255, dtype=torch.uint8)
    assert torch.equal(graph({f"x{at}": value for at, value in enumerate(values)}, workspace=room), got)


# -- steps on addresses ------------------------------------------------------------------------------------------------


def apart(build: Callable[..., Any], *tensors: Tensor, engine: str | None = None) -> Graph:
    """A graph whose nodes are a kernel each."""
    with Graph(policy=Policy(engine=engine) if engine else None, fuse=False, rewrites=()) as graph:
        made = build(graph, *(graph.input(tensor, name=f"x{at}") for at, tensor in enumerate(tensors)))
        for each in made if isinstance(made, list) else [made]:
            each.set_output()
    return graph


def same(got: Any, want: Any) -> None:
    for a, b in zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, list) else [want], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def moved(value: Tensor, elements: int) -> Tensor:
    """The same values and strides in memory that starts so many elements behind a multiple of 64 bytes."""
    room = torch.full((value.numel() + elements,), float("nan"), dtype=value.dtype)
    return room[elements:].as_strided(value.shape, value.stride()).copy_(value)


def on_tensors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The engines of steps that are run on tensors from now on."""
    found: list[str] = []
    finish = compiler.Compiler._finish

    def watch(self: compiler.Compiler, steps: list[compiled.Step]) -> compiled.Compiled:
        for step in steps:
            step.run = seen(step.engine, step.run)
        return finish(self, steps)

    def seen(engine: str, run: Callable[..., None]) -> Callable[..., None]:
        def noting(values: list[Any]) -> None:
            found.append(engine)
            run(values)

        return noting

    monkeypatch.setattr(compiler.Compiler, "_finish", watch)
    return found


def residual(g: Graph, x: GraphTensor, v: GraphTensor) -> GraphTensor:
    """The first sum lives over three other steps."""
    kept = g.add(x, v)
    y = g.relu(g.mul(g.neg(kept), v))
    return g.sub(g.sigmoid(y), kept)


def residual_of(x: Tensor, v: Tensor) -> Tensor:
    kept = x + v
    return ((-kept) * v).relu().sigmoid() - kept


def test_what_lies_between_kernels_is_one_allocation(allocated, monkeypatch):
    x, v = rand(2, 5, 6, 7), rand(1, 5, 1, 1)
    ran = on_tensors(monkeypatch)
    graph = apart(residual, x, v)
    same(graph(x, v), residual_of(x, v))
    assert [made.dtype for made in allocated] == [torch.uint8, torch.float32]
    assert allocated[0].numel() == graph.workspace_bytes()
    # Five tensors of 1680 bytes between six kernels: three are alive at once, the residual among them.
    assert [step.engine for step in graph.program().steps] == ["cuda.tree"] * 6
    assert graph.workspace_bytes() == 3 * 1792
    assert ran == []


def test_a_residual_network_of_convolutions(monkeypatch):
    ran = on_tensors(monkeypatch)
    x, first = rand(1, 8, 5, 6, layout="nhwc"), 0.2 * rand(8, 8, 3, 3, layout="nhwc")
    second, bias = 0.2 * rand(8, 8, 1, 1, layout="nhwc"), rand(8)

    def make(g: Graph, x: GraphTensor, w: GraphTensor) -> GraphTensor:
        y = x
        for _ in range(3):
            kept, y = y, g.relu(g.bias(g.conv_fprop(y, w, padding=1), g.constant(bias)))
            y = g.relu(g.add(g.conv_fprop(y, g.constant(second)), kept))
        return y

    def want(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            y = F.conv2d(F.conv2d(x, w, bias.double(), padding=1).relu(), second.double())
            x = (y + x).relu()
        return x

    engines = check(make, want, x, first, engine="cuda.igemm")
    assert engines == ["cuda.igemm"] * 6
    assert ran == []


def test_outputs_and_workspace_of_the_callers(allocated, monkeypatch):
    ran = on_tensors(monkeypatch)
    x, v = rand(2, 5, 6, 7), rand(1, 5, 1, 1)
    graph = apart(residual, x, v)
    size = graph.workspace_bytes()
    for start in (0, 1, 16):
        room, out = torch.full((size + 64,), 255, dtype=torch.uint8), torch.full_like(x, float("nan"))
        allocated.clear()
        made = graph(x, v, out=out, workspace=room[start : start + size + (16 if start % 16 else 0)])
        assert made is out
        same(made, residual_of(x, v))
        assert allocated == []
        assert room[:start].eq(255).all()
        assert room[start + size + 16 :].eq(255).all()
        assert not room[start : start + size].eq(255).all()
    with pytest.raises(RuntimeError, match=f"workspace has {size - 1} bytes"):
        graph(x, v, workspace=torch.empty(size - 1, dtype=torch.uint8))
    other = torch.empty_like(x).to(memory_format=torch.channels_last)  # lies otherwise: it is copied to in the end
    assert graph(x, v, out=other) is other
    same(other, residual_of(x, v))
    assert ran == []


@pytest.mark.parametrize("which", ["input", "output"])
def test_what_starts_elsewhere_is_run_on_tensors(which, monkeypatch):
    ran = on_tensors(monkeypatch)
    x, v = rand(2, 5, 6, 7), rand(1, 5, 1, 1)
    graph = apart(residual, x, v)
    want = residual_of(x, v)
    if which == "input":
        same(graph(moved(x, 1), v), want)
    else:
        same(graph(x, v, out=moved(torch.full_like(x, float("nan")), 3)), want)
    assert ran == ["cuda.tree"] * 6
    ran.clear()
    same(graph(moved(x, 4), v), want)  # 16 bytes on
    assert ran == []


def test_a_constant_that_starts_elsewhere(monkeypatch):
    ran = on_tensors(monkeypatch)
    x, w = rand(1, 8, 5, 5, layout="nhwc"), 0.2 * rand(8, 8, 1, 1)
    image = moved(rand(1, 8, 5, 5, layout="nhwc"), 1)
    graph = apart(lambda g, x: g.add(g.conv_fprop(g.relu(x), g.constant(w)), g.constant(image)), x, engine="cuda.igemm")
    same(graph(x), F.conv2d(x.relu(), w) + image)
    assert ran == ["cuda.tree"]  # the last sum alone


def test_outputs_that_later_kernels_read():
    x, v = rand(2, 5, 6, 7), rand(1, 5, 1, 1)

    def make(g: Graph, x: GraphTensor, v: GraphTensor) -> list[GraphTensor]:
        y = g.add(x, v)
        z = g.relu(g.neg(y))
        return [z, y, g.reduction(g.mul(z, y), "add", (0, 2, 3))]

    graph = apart(make, x, v)
    y = x + v
    z = (-y).relu()
    want = [z, y, (z * y).sum((0, 2, 3), True)]
    same(graph(x, v), want)
    outs = [torch.full_like(each, float("nan")) for each in want]
    same(graph(x, v, out=[None, outs[1], outs[2]]), want)
    same(tuple(outs[1:]), want[1:])
    room = torch.full((graph.workspace_bytes(),), 255, dtype=torch.uint8)
    same(graph(x, v, out=outs, workspace=room), want)


def test_kernels_before_between_and_behind_steps_of_torch(allocated, monkeypatch):
    ran = on_tensors(monkeypatch)
    x, v = rand(2, 5, 6, 7), rand(1, 5, 1, 1)

    def make(g: Graph, x: GraphTensor, v: GraphTensor) -> GraphTensor:
        a = g.relu(g.add(x, v))
        b = g.concatenate([a, g.neg(g.mul(a, a))], 1)
        c = g.sigmoid(g.neg(b))
        return g.sub(
            g.concatenate([c, g.abs(g.neg(c))], 0), g.slice(g.concatenate([b, b], 0), (0, 0, 0, 0), (4, 10, 6, 7))
        )

    def want(x: Tensor, v: Tensor) -> Tensor:
        a = (x + v).relu()
        b = torch.cat([a, -(a * a)], 1)
        c = (-b).sigmoid()
        return torch.cat([c, c.neg().abs()], 0) - torch.cat([b, b], 0)

    graph = apart(make, x, v)
    same(graph(x, v), want(x, v))
    assert ran == ["torch"] * 3
    room = torch.full((graph.workspace_bytes(),), 255, dtype=torch.uint8)
    allocated.clear()
    same(graph(x, v, workspace=room), want(x, v))
    assert [made.shape for made in allocated] == [(4, 10, 6, 7)]


def test_views_are_addresses(monkeypatch):
    ran = on_tensors(monkeypatch)
    x = rand(8, 8)

    def make(g: Graph, x: GraphTensor) -> list[GraphTensor]:
        y = g.neg(x)
        turned = g.reshape(g.slice(g.transpose(y, (1, 0)), (4, 0), (8, 8)), (4, 8))
        rows = g.relu(g.slice(g.slice(y, (2, 0), (8, 8)), (2, 0), (6, 8)))  # from 128 bytes on
        given = g.abs(g.slice(x, (4, 0), (8, 8)))
        return [g.add(rows, given), g.exp(turned)]

    graph = apart(make, x)
    y = -x
    same(graph(x), [y[4:].relu() + x[4:].abs(), y.t()[4:].exp()])
    assert ran == []
    odd = apart(lambda g, x: g.relu(g.slice(g.neg(x), (0, 1), (8, 7))), x)  # from 4 bytes on
    same(odd(x), y[:, 1:7].relu())
    assert ran == ["view", "cuda.tree"]


def test_an_output_that_is_a_view_of_what_kernels_read():
    x = rand(8, 8)

    def make(g: Graph, x: GraphTensor) -> list[GraphTensor]:
        y = g.neg(x)
        return [g.reshape(y, (4, 16)), g.relu(g.exp(y))]

    graph = apart(make, x)
    same(graph(x), [(-x).view(4, 16), (-x).exp()])
    room, out = torch.full((graph.workspace_bytes(),), 255, dtype=torch.uint8), torch.full((4, 16), float("nan"))
    same(graph(x, out=[out, None], workspace=room), [(-x).view(4, 16), (-x).exp()])


def test_a_reduction_with_scratch_memory(allocated):
    x = rand(1, 2, 300, 300)

    def make(g: Graph, x: GraphTensor) -> GraphTensor:
        y = g.neg(x)
        return g.relu(g.sub(y, g.reduction(y, "avg", (0, 2, 3))))

    graph = apart(make, x)
    pieces = [step.workspace_bytes for step in graph.program().steps]
    assert max(pieces) > 0
    same(graph(x), (x.mean((0, 2, 3), True) - x).relu())
    assert [made.dtype for made in allocated] == [torch.uint8, torch.float32]


def test_threads_have_memory_of_their_own(monkeypatch):
    graph = apart(residual, rand(2, 5, 6, 7), rand(1, 5, 1, 1))
    given = [(rand(2, 5, 6, 7), rand(1, 5, 1, 1)) for _ in range(4)]
    graph(*given[0])
    lock, run = threading.Lock(), EmulatedLaunch.__call__
    order: list[int] = []

    def in_turn(self: EmulatedLaunch, *pointers: int) -> None:
        with lock:  # the emulator runs one kernel at a time
            order.append(threading.get_ident())
            run(self, *pointers)
        time.sleep(0.002)

    monkeypatch.setattr(EmulatedLaunch, "__call__", in_turn)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda values: graph(*values), given))
    for got, values in zip(made, given, strict=True):
        same(got, residual_of(*values))
    assert sum(a != b for a, b in pairwise(order)) > 4, "the calls did not run at the same time"


def test_without_memory_in_one_piece_tensors_are_made_one_by_one(monkeypatch):
    ran = on_tensors(monkeypatch)
    x, v = rand(2, 5, 6, 7), rand(1, 5, 1, 1)
    graph = apart(residual, x, v)
    make = compiled.Maker.__call__

    def short(self: compiled.Maker) -> Tensor:
        if self.dtype is torch.uint8:
            raise torch.OutOfMemoryError("no memory")
        return make(self)

    monkeypatch.setattr(compiled.Maker, "__call__", short)
    same(graph(x, v), residual_of(x, v))
    assert ran == ["cuda.tree"] * 6


def test_another_plan_has_its_own_addresses():
    x, v = rand(2, 5, 6, 7), rand(1, 5, 1, 1)
    with Graph() as graph:
        y = graph.reduction(residual(graph, graph.input(x, name="x"), graph.input(v, name="v")), "max", (2, 3))
        graph.neg(y).set_output()
    want = -residual_of(x, v).amax((2, 3), True)
    for at in range(len(graph.plans())):
        graph.choose(at)
        same(graph(x, v), want)
