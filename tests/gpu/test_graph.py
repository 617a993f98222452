"""Graphs on a GPU: fused kernels, trees, pooling, gradients, capture, and the tutorial in both faces."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import openconv
import openconv.cudnn
from openconv.bench.graphs import (
    PATTERNS,
    Bottleneck,
    as_graph,
    graph_call,
    pattern_graph,
    pattern_inputs,
    resnet50,
    torch_call,
)  # fmt: skip
from openconv.epilogue import apply
from openconv.evaluate import evaluate_tree
from openconv.pool import Pool
from openconv.pooling import pool_backward, pool_forward, reference_backward, reference_forward
from openconv.problem import Problem
from openconv.tree import MODES, Reduction, Tree, leaf
from tests import cudnn_device, tutorial_cudnn, tutorial_graph

CUDA = torch.device("cuda")
LAYERS = (
    "fprop n4 c64 h14 w14 k64 r3 s3 pad1 f16 nhwc",
    "fprop n4 c64 h14 w14 k128 r1 s1 f16 nhwc",
    "fprop n2 c64 h15 w15 k32 r3 s3 stride2 pad1 bf16 nhwc",
    "fprop n2 c16 h9 w11 k24 r3 s3 pad1 f32 nhwc",
    "fprop n2 c16 h9 w11 k24 r3 s3 pad1 f32 nchw",
    "fprop n2 c3 h33 w31 k16 r7 s7 stride2 pad3 f16 nhwc",
)
SECTIONS = (
    "basic_forward", "parameters", "bias_and_activation", "data_gradient", "weight_gradient", "forward_and_backward",
    "filter_sizes", "depthwise", "transposed", "resnet_block", "resnet_training", "verification",
)  # fmt: skip


def near(got: torch.Tensor, wanted: torch.Tensor, eps: float) -> None:
    scale = wanted.double().abs().max().item() or 1.0
    assert torch.isfinite(got.double()).all()
    assert (got.double() - wanted.double()).abs().max().item() <= eps * scale


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_tutorial(section, dtype):
    getattr(tutorial_cudnn, section)(openconv.cudnn, CUDA, dtype)


@pytest.mark.parametrize("section", tutorial_graph.SECTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_tutorial_in_our_words(section, dtype):
    getattr(tutorial_graph, section)(CUDA, dtype)


@pytest.mark.parametrize("body", [*cudnn_device.ANYWHERE, *cudnn_device.ON_CUDA], ids=lambda body: str(body))
def test_the_frontend_on_a_gpu(body):
    run = body if callable(body) else getattr(cudnn_device, body)
    run(openconv.cudnn, CUDA, torch.float16)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("layer", LAYERS)
def test_patterns_fused_and_unfused(name, layer):
    pattern = PATTERNS[name]
    problem = pattern.problem(Problem.parse(layer))
    inputs = pattern_inputs(problem, device=CUDA)
    wide = replace(
        inputs, a=inputs.a.double(), b=inputs.b.double(), operands=tuple(v.double() for v in inputs.operands)
    )
    wanted = torch_call(pattern, problem, wide)()
    eps = {"f32": 2e-5, "bf16": 3e-2}.get(problem.dtypes[0], 4e-3)
    for fuse in (True, False):
        graph = pattern_graph(pattern, problem, inputs, fuse=fuse)
        made = graph_call(graph, pattern, inputs)()
        for got, want in zip(made if isinstance(made, tuple) else (made,), wanted, strict=True):
            near(got, want.reshape(got.shape), eps)


TREES = [
    Tree(("f16", "f16"), ((apply("relu_backward", leaf(0), leaf(1)), "f16"),)),
    Tree(("f32", "f32"), ((leaf(0) * leaf(1) + 1, "f32"), (apply("gelu", leaf(0)), "f16"))),
    Tree(("f64", "f64"), ((apply("softplus", leaf(0)) / leaf(1), "f64"),)),
    Tree(
        ("bf16", "f32"),
        ((apply("swish_backward", leaf(0), leaf(1)), "bf16"),),
        (Reduction("add", leaf(0), "f32"), Reduction("max", leaf(0) * leaf(1), "f32")),
    ),
]


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("shape", [(2, 8, 16, 16), (3, 5, 7, 9), (64, 64, 56, 56), (1, 1000)])
def test_trees(tree, shape):
    from openconv.cuda.device import cuda_device
    from openconv.cuda.tree import TreeKernel
    from openconv.tensors import ALL_DTYPES

    torch.manual_seed(0)
    channels = (1, shape[1], *(1,) * (len(shape) - 2))
    form = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    first = torch.randn(shape, device=CUDA).to(ALL_DTYPES[tree.inputs[0]]).contiguous(memory_format=form)
    for other in (shape, channels):
        second = (torch.rand(other, device=CUDA) + 0.5).to(ALL_DTYPES[tree.inputs[1]])
        second = second.contiguous(memory_format=form)
        axes = tuple(a for a in range(len(shape)) if a != 1) if tree.reductions else ()
        wanted, reduced = evaluate_tree(tree, [first, second], axes, shape)
        outs = [torch.full_like(w, torch.nan, memory_format=form) for w in wanted]
        sums = [torch.full_like(r, torch.nan) for r in reduced]
        strides = [first.stride(), second.stride() if other == shape else tuple(
            0 if size == 1 else step for size, step in zip(other, second.stride(), strict=True))]  # fmt: skip
        kernel = TreeKernel(tree, cuda_device(0), shape, strides, [o.stride() for o in outs], axes)
        room = torch.empty(max(kernel.workspace_bytes, 1), dtype=torch.uint8, device=CUDA)
        read, written, summed = ([t.data_ptr() for t in each] for each in ((first, second), outs, sums))
        kernel(read, written, summed, room.data_ptr())
        for got, want in zip((*outs, *sums), (*wanted, *reduced), strict=True):
            near(got, want, {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float64: 1e-12}.get(got.dtype, 2e-5))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axes", [(0, 2, 3), (1,), (0, 1, 2, 3), (2, 3), (0,)])
def test_reductions(mode, axes):
    torch.manual_seed(0)
    for shape, form in (((3, 6, 5, 7), torch.contiguous_format), ((4, 64, 14, 14), torch.channels_last)):
        x = (0.95 + 0.1 * torch.rand(shape, device=CUDA)).contiguous(memory_format=form)
        if mode in ("mul", "mul_no_zeros") and x.numel() > 1000:
            continue
        with openconv.Graph() as g:
            g.reduction(x, mode, axes)
        with openconv.Graph() as h:
            h.reduction(x.cpu(), mode, axes)
        near(g(x).cpu(), h(x.cpu()), 1e-4 if "mul" in mode else 1e-5)


@pytest.mark.parametrize("mode", ["max", "avg", "avg_exclude"])
@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("window,stride,padding", [(3, 2, 1), (2, 2, 0), (3, 1, ((0, 1), (1, 2))), (9, 4, 2)])
def test_pooling(mode, dtype, layout, window, stride, padding):
    torch.manual_seed(0)
    for n, c, h, w in ((2, 64, 28, 28), (3, 5, 17, 13)):
        rank = 2
        pads = padding if isinstance(padding, tuple) else ((padding, padding),) * rank
        pool = Pool(mode=mode, window=(window,) * rank, stride=(stride,) * rank, padding=pads, n=n, c=c,
                    spatial=(h, w), dtype=dtype, layout=layout)  # fmt: skip
        form = torch.channels_last if layout == "nhwc" else torch.contiguous_format
        kind = torch.float16 if dtype == "f16" else torch.float32
        x = torch.randn(n, c, h, w, dtype=kind).contiguous(memory_format=form)
        dy = torch.randn(pool.y_shape, dtype=kind).contiguous(memory_format=form)
        near(pool_forward(pool, x.to(CUDA)).cpu(), reference_forward(pool, x), 2e-3)
        near(pool_backward(pool, dy.to(CUDA), x.to(CUDA)).cpu(), reference_backward(pool, dy, x), 2e-3)


def block(g, x, w1, b1, scale, shift, w2, r):
    h = g.relu(g.bias(g.conv_fprop(x, w1, padding=1), b1))
    h = g.batchnorm(h, scale, shift)
    return g.relu(g.add(g.conv_fprop(g.relu(h.y), w2, padding=1), r)).set_output()


def block_inputs(device, dtype, form):
    torch.manual_seed(0)
    shapes = [(2, 8, 10, 10), (16, 8, 3, 3), (16,), (16,), (16,), (8, 16, 3, 3), (2, 8, 10, 10)]
    made = [torch.randn(s, dtype=torch.float64) / (s[1] * 3 if len(s) == 4 and s[2] == 3 else 1) for s in shapes]
    return [(m.to(memory_format=form) if m.dim() == 4 else m).to(device, dtype).detach().requires_grad_() for m in made]


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype,eps", [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.float16, 2e-2)])
def test_gradients(form, dtype, eps):
    here, there = block_inputs(CUDA, dtype, form), block_inputs("cpu", torch.float64, form)
    found = []
    for inputs in (here, there):
        with openconv.Graph() as g:
            block(g, *inputs)
        out = g(*inputs)
        out.square().sum().backward()
        found.append([out.detach().cpu(), *(each.grad.cpu() for each in inputs)])
    for got, wanted in zip(*found, strict=True):
        near(got, wanted, eps)


def test_a_gradient_takes_few_kernels():
    inputs = block_inputs(CUDA, torch.float16, torch.channels_last)
    with openconv.Graph() as g:
        block(g, *inputs)
    kernels = [k for k in g.backward().program("cuda").kernels if k.kind not in ("view",)]
    fused = [k for k in kernels if k.problem is not None and not k.problem.epilogue.is_identity]
    assert fused, "the slope of a ReLU is no epilogue of the gradient in front of it"


def test_bottleneck_and_network():
    torch.manual_seed(0)
    module = Bottleneck(64, 64).to(CUDA, torch.float16).eval()
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(2, 64, 14, 14, device=CUDA, dtype=torch.float16).to(memory_format=torch.channels_last)
    graph = as_graph(module, x)
    with torch.no_grad():
        near(graph(x), module.float()(x.float()), 1e-2)
    network = resnet50(2, "f16", CUDA)
    image = torch.randn(2, 3, 224, 224, device=CUDA, dtype=torch.float16).to(memory_format=torch.channels_last)
    with torch.no_grad():
        near(network.graph(image), network.module.float()(image.float()), 3e-2)
    assert len([k for k in network.graph.program("cuda").kernels if k.kind != "view"]) <= 60


def simple(x, w, b):
    with openconv.Graph() as g:
        g.relu(g.bias(g.conv_fprop(x, w, padding=1, name="conv"), b))
    return g


@pytest.fixture
def small():
    torch.manual_seed(0)
    x = torch.randn(4, 64, 14, 14, device=CUDA, dtype=torch.float16).to(memory_format=torch.channels_last)
    w = (torch.randn(64, 64, 3, 3, device=CUDA, dtype=torch.float16) / 24).to(memory_format=torch.channels_last)
    return x, w, torch.randn(64, device=CUDA, dtype=torch.float16)


def test_capture_and_replay(small):
    x, w, b = small
    g = simple(x, w, b)
    wanted = g(x, w, b).clone()
    run = g.capture(x, w, b)
    assert torch.equal(run(x, w, b), wanted)
    assert torch.equal(run(x * 2, w, b), g(x * 2, w, b))
    with pytest.raises(RuntimeError, match="captured was"):
        run(x[:2], w, b)


def test_within_a_capture_of_the_user(small):
    x, w, b = small
    g = simple(x, w, b)
    wanted = g(x, w, b)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        out = g(x, w, b)
    out.zero_()
    recorded.replay()
    assert torch.equal(out, wanted)


def test_places_and_batches(small):
    x, w, b = small
    g = simple(x, w, b)
    wanted = g(x, w, b)
    out = torch.full_like(wanted, torch.nan)
    assert g(x, w, b, out=out) is out
    assert torch.equal(out, wanted)
    other = torch.full((4, 64, 14, 14), torch.nan, device=CUDA, dtype=torch.float16)
    assert torch.equal(g(x, w, b, out=other), wanted)
    room = torch.full((max(g.workspace_bytes("cuda"), 16),), 255, dtype=torch.uint8, device=CUDA)
    assert torch.equal(g(x, w, b, workspace=room), wanted)
    for n in (1, 3, 9):
        more = torch.randn(n, 64, 14, 14, device=CUDA, dtype=torch.float16).to(memory_format=torch.channels_last)
        near(g(more, w, b), F.relu(F.conv2d(more.float(), w.float(), b.float(), padding=1)), 4e-3)
    shifted = torch.empty(x.numel() + 1, device=CUDA, dtype=torch.float16)[1:].as_strided(x.shape, x.stride())
    shifted.copy_(x)
    assert torch.equal(g(shifted, w, b), wanted)


def test_trees_at_odd_addresses():
    a = torch.randn(4097, device=CUDA, dtype=torch.float16)[1:]
    with openconv.Graph() as g:
        g.tanh(g.mul(a, 2.0))
    near(g(a), torch.tanh(a.float() * 2), 2e-3)


def test_many_threads_and_streams(small):
    x, w, b = small
    g = simple(x, w, b)
    wanted, failures = g(x, w, b), []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    if not torch.equal(g(x, w, b), wanted):
                        failures.append("another result")
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(8)]
    torch.cuda.synchronize()
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures


def test_plans_and_saving(small):
    x, w, b = small
    g = simple(x, w, b)
    wanted = g(x, w, b).float()
    plans = g.plans("cuda")
    assert len(plans) > 3
    for at in (1, 2, len(plans) - 1):
        g.choose(at, "cuda")
        near(g(x, w, b), wanted, 4e-3)
    tuned = g.autotune(x, w, b, seconds=2.0)
    assert tuned[0].measured is not None
    loaded = openconv.Graph.from_json(g.to_json())
    assert torch.equal(loaded(x, w, b), g(x, w, b))
