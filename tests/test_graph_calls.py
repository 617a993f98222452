"""Calls of a graph that are like the one before them, and calls that only look so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import openconv
from openconv import Graph
from openconv.graph import calls, program

pytestmark = pytest.mark.skipif(calls._Guards is None, reason="this PyTorch has no TensorGuards")


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors were looked at one by one, call by call."""
    found: list[int] = []
    real = program.signature

    def counted(values):
        found.append(len(values))
        return real(values)

    monkeypatch.setattr(calls, "signature", counted)
    return found


def known_to(graph: Graph) -> calls._Known:
    """What its last call left."""
    assert graph._runner._last is not None
    return graph._runner._last


def scaled(x: Tensor, v: Tensor) -> Graph:
    with Graph() as graph:
        graph.relu(graph.mul(graph.input(x, name="x"), graph.input(v, name="v"))).set_output()
    return graph


def inputs(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape), torch.randn(1, shape[1], 1, 1)


def same(got: Tensor, x: Tensor, v: Tensor) -> None:
    torch.testing.assert_close(got, (x * v).relu())


def test_calls_like_the_one_before_are_known(looked):
    x, v = inputs(2, 3, 4, 5)
    graph = scaled(x, v)
    same(graph(x, v), x, v)
    assert looked == [2]
    for _ in range(3):
        x, v = inputs(2, 3, 4, 5)
        same(graph(x, v), x, v)
        same(graph(x=x, v=v), x, v)
        same(graph({"v": v, "x": x}), x, v)
    with torch.no_grad():
        same(graph(x, v), x, v)
    assert looked == [2]


def test_other_sizes_and_strides_are_not_taken_for_the_same(looked):
    x, v = inputs(2, 3, 4, 5)
    graph = scaled(x, v)
    for shape in ((2, 3, 4, 5), (2, 3, 5, 4), (1, 3, 4, 5), (2, 3, 4, 5)):
        x, v = inputs(*shape)
        same(graph(x, v), x, v)
        last = x.to(memory_format=torch.channels_last)
        same(graph(last, v), x, v)
    assert looked == [2] * 8
    same(graph(last, v), x, v)
    assert looked == [2] * 8


def test_what_is_wrong_is_still_said():
    x, v = inputs(2, 3, 4, 5)
    graph = scaled(x, v)
    graph(x, v)
    with pytest.raises(RuntimeError, match=r"'x' is torch\.float64; wanted torch\.float32"):
        graph(x.double(), v)
    with pytest.raises(RuntimeError, match=r"'v' has shape .*; wanted 4 axes"):
        graph(x, v[0])
    with pytest.raises(TypeError, match="'v' is of type float; wanted a Tensor"):
        graph(x, 3.0)
    with pytest.raises(TypeError, match="was not given v"):
        graph(x)
    with pytest.raises(TypeError, match="was given 3 tensors; wanted 2"):
        graph(x, v, v)
    with pytest.raises(TypeError, match="was given 'v' twice"):
        graph(x, v, v=v)
    with pytest.raises(RuntimeError, match="is a lazy view; wanted a dense tensor"):
        graph(torch._neg_view(x), v)
    with pytest.raises(RuntimeError, match="'v' is on meta"):
        graph(x, v.to("meta"))
    same(graph(x, v), x, v)


def test_gradients_are_not_lost():
    x, v = inputs(2, 3, 4, 5)
    graph = scaled(x, v)
    assert not graph(x, v).requires_grad
    wanted = x.clone().requires_grad_()
    with torch.no_grad():
        for _ in range(2):
            assert not graph(wanted, v).requires_grad
    made = graph(wanted, v)
    assert "_Function" in made.grad_fn.name()  # torch's own steps would be tracked without it, kernels would not
    made.sum().backward()
    assert wanted.grad is not None
    torch.testing.assert_close(wanted.grad, ((x * v) > 0) * v)
    assert not graph(x, v).requires_grad
    assert graph(torch.nn.Parameter(x), v).requires_grad
    with pytest.raises(RuntimeError, match="out= was given and an input wants a gradient"):
        graph(wanted, v, out=torch.empty_like(x))


def test_parameters_without_gradients_are_known(looked):
    x, v = inputs(2, 3, 4, 5)
    graph, weights = scaled(x, v), torch.nn.Parameter(v)
    with torch.no_grad():
        for _ in range(3):
            same(graph(x, weights), x, v)
    assert looked == [2]
    with torch.inference_mode():  # tensors are told apart from there, too
        for _ in range(3):
            same(graph(x, weights), x, v)
    assert looked == [2, 2]


def test_the_policy_in_force_counts():
    x, w = torch.randn(1, 3, 6, 6), torch.randn(4, 3, 3, 3)
    with Graph() as graph:
        graph.conv_fprop(graph.input(x, name="x"), graph.input(w, name="w")).set_output()

    def ran() -> str:
        torch.testing.assert_close(graph(x, w), F.conv2d(x, w), rtol=1e-4, atol=1e-4)
        known = graph._runner._last
        assert known is not None
        return known.program.steps[0].engine

    first = ran()
    for engine in ("cpu.naive", "cpu.im2col_gemm", "cpu.naive"):
        with openconv.policy(engine=engine):
            assert [ran(), ran()] == [engine, engine]
    assert ran() == first


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_number_of_threads_counts(threads):
    x, v = inputs(2, 3, 4, 5)
    graph = scaled(x, v)
    for count in (1, 2, 1):
        torch.set_num_threads(count)
        for _ in range(2):
            same(graph(x, v), x, v)
            assert known_to(graph).program.device.threads == count


def test_a_tensor_given_twice(looked):
    x = torch.randn(2, 3, 4, 5)
    graph = scaled(x, x.clone())
    for _ in range(3):
        same(graph(x, x), x, x)
    assert looked == [2] * 3
    assert known_to(graph)._left == calls._MOST_LEARNED - 3


def test_it_gives_up_on_what_never_is_the_same(looked):
    x = torch.randn(2, 3, 4, 5)
    graph = scaled(x, x.clone())
    for _ in range(calls._MOST_LEARNED + 2):
        graph(x, x)
    assert known_to(graph)._left == 0
    assert len(looked) == calls._MOST_LEARNED + 2


def test_without_what_pytorch_checks_with(monkeypatch, looked):
    monkeypatch.setattr(calls, "_Guards", None)
    x, v = inputs(2, 3, 4, 5)
    graph = scaled(x, v)
    for _ in range(3):
        same(graph(x, v), x, v)
    assert looked == [2] * 3


def test_a_check_of_another_pytorch_is_done_without(monkeypatch):
    def other(*tensors: Tensor) -> None:
        """Takes no other arguments."""

    monkeypatch.setattr(calls, "_Guards", other)
    x, v = inputs(2, 3, 4, 5)
    graph = scaled(x, v)
    for _ in range(2):
        same(graph(x, v), x, v)


def test_threads_with_different_sizes_and_policies():
    graph = scaled(*inputs(2, 3, 4, 5))
    begin = threading.Barrier(4)

    def many(at: int) -> None:
        begin.wait()
        for round_ in range(50):
            x, v = inputs(1 + (at + round_) % 3, 3, 4, 5)
            with openconv.policy(batch_invariant=bool(round_ % 2)):
                same(graph(x, v), x, v)
            same(graph(x, v), x, v)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(many, range(4)))


def test_a_graph_of_constants_alone():
    x = torch.randn(2, 3)
    with Graph() as graph:
        graph.relu(graph.constant(x)).set_output()
    for _ in range(2):
        assert torch.equal(graph(), x.relu())


def test_a_program_counts_its_inputs():
    x, v = inputs(2, 3, 4, 5)
    with pytest.raises(ValueError, match="inputs are 1; wanted 2"):
        scaled(x, v).program().run([x])


def test_another_plan_is_chosen_while_threads_call():
    """A call runs one plan from its first step to its last."""
    x, w, v = torch.randn(2, 8, 9, 9), torch.randn(4, 8, 3, 3), torch.randn(4)
    with Graph() as graph:
        h = graph.relu(graph.bias(graph.conv_fprop(x, w, padding=1), v))
        graph.add(h, 1.0).set_output()
        graph.reduction(h, "add", axes=(2, 3)).set_output()
    y = torch.conv2d(x, w, v, padding=1).relu()
    stop = threading.Event()

    def call() -> int:
        count = 0
        while not stop.is_set() or not count:
            more, sums = graph(x, w, v)
            torch.testing.assert_close(more, y + 1.0, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(sums, y.sum((2, 3), keepdim=True), rtol=1e-3, atol=1e-3)
            count += 1
        return count

    plans = graph.plans()
    with ThreadPoolExecutor(3) as pool:
        calls_ = [pool.submit(call) for _ in range(3)]
        for at in range(12):
            graph.choose((len(plans) - 1) * (at % 2))  # the last is without fusion
        stop.set()
        assert all(each.result() for each in calls_)
