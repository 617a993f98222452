"""What graphs are measured on: patterns around one convolution, ResNet-50 as one graph, a chain of many small nodes.

A pattern is a convolution with what stands before and behind it in a network. The layer of a suite, with the pattern's
prologue, epilogue and statistics, is a :class:`~openconv.problem.Problem`, so that its inputs and its float64 reference
are those of any other; here it is built as a graph, and composed of torch's operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..graph import Graph, GraphTensor
from ..problem import Problem
from ..reference import Inputs, random_inputs
from ..tensors import DTYPES, empty, memory_format

__all__ = [
    "PATTERNS",
    "Bottleneck",
    "Network",
    "Pattern",
    "ResNet50",
    "as_graph",
    "chain",
    "graph_call",
    "kernel_count",
    "pattern_graph",
    "pattern_inputs",
    "resnet50",
    "torch_call",
]

_Results = tuple[GraphTensor, ...]


@dataclass(frozen=True)
class Pattern:
    """What is fused around a pass. ``names`` are those of the inputs: the two of the pass, then the operands.

    ``build`` adds the nodes to a graph and returns the results; ``eager`` is what a user of torch writes.
    """

    name: str
    title: str
    direction: str
    names: tuple[str, ...]
    build: Callable[[Graph, Problem, Sequence[GraphTensor]], _Results]
    eager: Callable[[Problem, Sequence[Tensor]], tuple[Tensor, ...]]
    epilogue: str = ""
    prologue: str = ""
    stats: bool = False

    def problem(self, layer: Problem) -> Problem:
        """The layer's pass with all that is fused."""
        fused: dict[str, Any] = {"epilogue": self.epilogue} if self.epilogue else {}
        fused |= {"prologue": self.prologue} if self.prologue else {}
        return layer.with_(direction=self.direction, stats=self.stats, **fused)


def _geometry(problem: Problem) -> dict[str, Any]:
    return {
        "padding": problem.padding, "stride": problem.stride, "dilation": problem.dilation, "groups": problem.groups,
    }  # fmt: skip


def _places(problem: Problem) -> tuple[Any, ...]:
    """Stride, padding, dilation and groups in torch's order; both ends of an axis are padded alike."""
    return problem.stride, [low for low, _ in problem.padding], problem.dilation, problem.groups


# -- the patterns as graphs --------------------------------------------------------------------------------------------


def _bias_relu(g: Graph, problem: Problem, given: Sequence[GraphTensor]) -> _Results:
    x, w, bias = given
    return (g.relu(g.bias(g.conv_fprop(x, w, **_geometry(problem)), bias)),)


def _bias_add_relu(g: Graph, problem: Problem, given: Sequence[GraphTensor]) -> _Results:
    x, w, bias, residual = given
    return (g.relu(g.add(g.bias(g.conv_fprop(x, w, **_geometry(problem)), bias), residual)),)


def _stats(g: Graph, problem: Problem, given: Sequence[GraphTensor]) -> _Results:
    x, w, scale, bias = given
    y = g.conv_fprop(g.relu(g.bias(g.scale(x, scale), bias)), w, **_geometry(problem))
    return (y, *g.genstats(y))


def _drelu(g: Graph, problem: Problem, given: Sequence[GraphTensor]) -> _Results:
    loss, w, image = given
    dx = g.conv_dgrad(w, loss, output_size=problem.spatial, **_geometry(problem))
    return (g.relu_backward(dx, image),)


def _wgrad(g: Graph, problem: Problem, given: Sequence[GraphTensor]) -> _Results:
    x, loss, scale, bias = given
    image = g.relu(g.bias(g.scale(x, scale), bias))
    return (g.conv_wgrad(image, loss, filter_size=problem.filter, **_geometry(problem)),)


# -- the patterns in torch ---------------------------------------------------------------------------------------------


def _eager_bias_relu(problem: Problem, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x, w, bias = given
    return (F.conv2d(x, w, bias, *_places(problem)).relu_(),)


def _eager_bias_add_relu(problem: Problem, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x, w, bias, residual = given
    return (F.conv2d(x, w, bias, *_places(problem)).add_(residual).relu_(),)


def _eager_stats(problem: Problem, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x, w, scale, bias = given
    y = F.conv2d(torch.addcmul(bias, x, scale).relu_(), w, None, *_places(problem))
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    return y, wide.sum((0, 2, 3)), wide.square().sum((0, 2, 3))


def _backward(problem: Problem, loss: Tensor, x: Tensor, w: Tensor, at: int) -> Tensor:
    stride, padding, dilation, groups = _places(problem)
    wanted = [at == place for place in range(3)]
    found: Tensor = torch.ops.aten.convolution_backward.default(
        loss, x, w, None, stride, padding, dilation, False, [0] * problem.rank, groups, wanted
    )[at]
    return found


def _eager_drelu(problem: Problem, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    loss, w, image = given
    return (torch.ops.aten.threshold_backward.default(_backward(problem, loss, image, w, 0), image, 0),)


def _eager_wgrad(problem: Problem, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x, loss, scale, bias = given
    like = empty(problem.w_shape, x.dtype, problem.layouts[1], x.device)
    return (_backward(problem, loss, torch.addcmul(bias, x, scale).relu_(), like, 1),)


PATTERNS = {
    pattern.name: pattern
    for pattern in (
        Pattern("conv_bias_relu", "conv + bias + relu", "fprop", ("x", "w", "bias"),
                _bias_relu, _eager_bias_relu, epilogue="+bias+relu"),
        Pattern("conv_bias_add_relu", "conv + bias + add + relu", "fprop", ("x", "w", "bias", "residual"),
                _bias_add_relu, _eager_bias_add_relu, epilogue="+bias+residual+relu"),
        Pattern("scale_bias_relu_conv_stats", "scale + bias + relu + conv + genstats", "fprop",
                ("x", "w", "scale", "bias"), _stats, _eager_stats, prologue="+scale+bias+relu", stats=True),
        Pattern("dgrad_drelu", "dgrad + relu backward", "dgrad", ("dy", "w", "x"),
                _drelu, _eager_drelu, epilogue="+relu_backward(t.x)"),
        Pattern("scale_bias_relu_wgrad", "scale + bias + relu + wgrad", "wgrad", ("x", "dy", "scale", "bias"),
                _wgrad, _eager_wgrad, prologue="+scale+bias+relu"),
    )
}  # fmt: skip


def pattern_inputs(problem: Problem, seed: int = 0, device: torch.device | str = "cpu") -> Inputs:
    """Random inputs. The vectors of a prologue are f32 with values that the image's dtype has, too, in which some
    contestants want them. A scale lies in [0.5, 1] and a bias in [-0.5, 0.5]: of a channel that relu leaves next to
    nothing of, only the rounding of the steps before it would be compared."""
    made = random_inputs(problem, seed, device)
    count = len(problem.prologue.operands)
    vectors = []
    for operand, value in zip(problem.prologue.operands, made.operands, strict=False):
        placed = 0.75 + value / 4 if operand.name == "scale" else value / 2
        vectors.append(placed.to(made.a.dtype).to(value.dtype))
    return replace(made, operands=(*vectors, *made.operands[count:]))


def pattern_graph(pattern: Pattern, problem: Problem, inputs: Inputs, *, fuse: bool = True) -> Graph:
    """The graph of a pattern, whose inputs are like these tensors. Without ``fuse`` every node runs by
    itself, as it was written."""
    graph = Graph(pattern.name) if fuse else Graph(f"{pattern.name}_unfused", fuse=False, rewrites=())
    with graph:
        values = (inputs.a, inputs.b, *inputs.operands)
        given = [graph.input(value, name=name) for value, name in zip(values, pattern.names, strict=True)]
        for result in pattern.build(graph, problem, given):
            result.set_output(True)
    return graph


def graph_call(graph: Graph, pattern: Pattern, inputs: Inputs) -> partial[Any]:
    """A call of a pattern's graph on these inputs, which it wants in the order of their first use."""
    known = dict(zip(pattern.names, (inputs.a, inputs.b, *inputs.operands), strict=True))
    return partial(graph, *(known[tensor.name] for tensor in graph.inputs))


def torch_call(pattern: Pattern, problem: Problem, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """The pattern as torch runs it eagerly; vectors of a prologue are in the image's dtype and shape beforehand."""
    count = len(problem.prologue.operands)
    vectors = (value.to(inputs.a.dtype).view(1, -1, 1, 1) for value in inputs.operands[:count])
    given = (inputs.a, inputs.b, *vectors, *inputs.operands[count:])

    def call() -> tuple[Tensor, ...]:
        return pattern.eager(problem, given)

    return call


def kernel_count(graph: Graph, device: torch.device | str) -> int:
    """Kernels of a planned graph; views are none."""
    return sum(kernel.kind != "view" for kernel in graph.program(device).kernels)


# -- ResNet-50 ---------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """A convolution without a bias, and its batch normalisation."""

    def __init__(self, c: int, k: int, taps: int, stride: int = 1, gain: float = 1.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c, k, taps, stride, taps // 2, bias=False)
        self.norm = nn.BatchNorm2d(k)
        nn.init.kaiming_normal_(self.conv.weight, nonlinearity="relu")
        assert self.norm.running_mean is not None
        assert self.norm.running_var is not None
        with torch.no_grad():  # what a trained network could hold: nothing is 0 or 1 that a mistake could hide behind
            self.norm.weight.uniform_(0.75, 1.25).mul_(gain)
            self.norm.bias.normal_(0, 0.1)
            self.norm.running_mean.normal_(0, 0.1)
            self.norm.running_var.uniform_(0.75, 1.25)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.conv(x))
        return found

    def emit(self, g: Graph, x: GraphTensor) -> GraphTensor:
        """The same as nodes of a graph, its weights as constants."""
        norm, conv = self.norm, self.conv
        assert norm.running_mean is not None
        assert norm.running_var is not None
        inverse = (norm.running_var.float() + norm.eps).rsqrt()
        vectors = (norm.weight.float(), norm.bias.float(), norm.running_mean.float(), inverse)
        y = g.conv_fprop(x, g.constant(conv.weight), padding=conv.padding, stride=conv.stride)  # type: ignore[arg-type]
        return g.batchnorm_inference(y, *(g.constant(vector.detach()) for vector in vectors))


class Bottleneck(nn.Module):
    """relu(x' + expand(relu(mix(relu(reduce(x)))))): 1x1, 3x3 and 1x1, and x' the image or a 1x1 of it."""

    def __init__(self, c: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.reduce = Normed(c, width, 1)
        self.mix = Normed(width, width, 3, stride)
        self.expand = Normed(width, 4 * width, 1, gain=0.3)  # a small share each, so that sixteen sums do not grow
        self.shortcut = Normed(c, 4 * width, 1, stride) if stride != 1 or c != 4 * width else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(self.reduce(x).relu_()).relu_()
        kept = x if self.shortcut is None else self.shortcut(x)
        found: Tensor = self.expand(y).add_(kept).relu_()
        return found

    def emit(self, g: Graph, x: GraphTensor) -> GraphTensor:
        """The same as nodes of a graph."""
        y = g.relu(self.mix.emit(g, g.relu(self.reduce.emit(g, x))))
        kept = x if self.shortcut is None else self.shortcut.emit(g, x)
        return g.relu(g.add(self.expand.emit(g, y), kept))


class ResNet50(nn.Module):
    """ResNet-50 with the stride on the 3x3: a stem, 3 + 4 + 6 + 3 bottlenecks, a mean and a matrix product."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = Normed(3, 64, 7, 2)
        blocks, c = [], 64
        for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for at in range(count):
                blocks.append(Bottleneck(c, width, 2 if at == 0 and width > 64 else 1))
                c = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(c, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(F.max_pool2d(self.stem(x).relu_(), 3, 2, 1))
        found: Tensor = self.head(y.mean((2, 3)))
        return found

    def emit(self, g: Graph, x: GraphTensor) -> GraphTensor:
        """The same as nodes of a graph."""
        y = g.max_pool(g.relu(self.stem.emit(g, x)), 3, 2, 1)
        for block in self.blocks:
            assert isinstance(block, Bottleneck)
            y = block.emit(g, y)
        y = g.reduction(y, "avg", (2, 3), keepdims=False)
        y = g.matmul(y, g.constant(self.head.weight.t().contiguous()))
        return g.add(y, g.constant(self.head.bias))


class Network(NamedTuple):
    """A network as one graph of an image, its weights by name, and the torch module with the same weights."""

    graph: Graph
    weights: dict[str, Tensor]
    module: ResNet50


def resnet50(
    batch: int, dtype: str, device: torch.device | str, *, size: int = 224, layout: str = "nhwc", seed: int = 0
) -> Network:
    """ResNet-50 in inference with random weights, for images of ``size`` x ``size`` pixels."""
    with torch.random.fork_rng(devices=[]):  # on the CPU, so that a seed means the same weights everywhere
        torch.manual_seed(seed)
        made = ResNet50().eval().requires_grad_(False)
    made = made.to(device, DTYPES[dtype]).to(memory_format=memory_format(4, layout))  # type: ignore[call-overload]
    image = empty((batch, 3, size, size), DTYPES[dtype], layout, torch.device("meta"))
    return Network(as_graph(made, image), dict(made.state_dict()), made)


def as_graph(module: ResNet50 | Bottleneck | Normed, image: Tensor, *, fuse: bool = True) -> Graph:
    """A module as a graph of its image, which may be on the device meta: its sizes and layout alone count."""
    graph = Graph(type(module).__name__.lower(), **({} if fuse else {"fuse": False, "rewrites": ()}))  # type: ignore[arg-type]
    with graph:
        module.emit(graph, graph.input(image, name="image"))
    return graph


# -- many small nodes --------------------------------------------------------------------------------------------------


def chain(
    nodes: int = 100, *, c: int = 64, size: int = 14, batch: int = 1, dtype: str = "f16", held: bool = False
) -> Graph:
    """So many nodes in a row: convolution, batch normalisation, relu and the sum with what was before them, again and
    again. Weights and vectors are inputs, so that nothing is computed while it is planned, or constants if ``held``."""

    def weights(name: str, *shape: int) -> GraphTensor:
        if held:
            value = torch.rand(shape).mul_(0.1).to(DTYPES[dtype])
            return graph.constant(value.contiguous(memory_format=memory_format(len(shape), "nhwc")), name)
        strides = (9 * c, 1, 3 * c, c) if len(shape) == 4 else None
        return graph.input(shape=shape, dtype=dtype, strides=strides, name=name)

    graph = Graph(f"chain{nodes}")
    rows = (c * size * size, 1, c * size, c)
    with graph:
        x = graph.input(shape=(batch, c, size, size), dtype=dtype, strides=rows, name="image")
        kept = x
        for at in range(nodes):
            if at % 4 == 0:
                kept, x = x, graph.conv_fprop(x, weights(f"w{at}", c, c, 3, 3), padding=1)
            elif at % 4 == 1:
                x = graph.batchnorm_inference(x, *(weights(f"{name}{at}", c) for name in "sbmv"))
            elif at % 4 == 2:
                x = graph.relu(x)
            else:
                x = graph.add(x, kept)
    return graph
