"""explain of graphs: numbers that agree with the program, text that says why, and a picture without overlaps."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from typing import Any

import pytest
import torch

import openconv
from openconv.graph.fusion import dtype_bytes

SVG = "{http://www.w3.org/2000/svg}"
LAST = torch.channels_last


def made(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    value = torch.zeros(shape, dtype=dtype)
    return value.to(memory_format=LAST) if len(shape) == 4 else value


def block(constants: bool = False, channels: int = 16, size: int = 10, **options: Any) -> openconv.Graph:
    """Two convolutions with bias and relu, around which the image is added."""
    with openconv.Graph("block", **options) as g:
        x = y = g.input(made(2, channels, size, size), name="x")
        for at in (1, 2):
            weight, bias = made(channels, channels, 3, 3), made(channels)
            hold = g.constant if constants else g.input
            y = g.conv_fprop(y, hold(weight, name=f"w{at}"), padding=1, name=f"conv{at}")
            y = g.bias(y, hold(bias, name=f"b{at}"), name=f"bias{at}")
            y = g.relu(y if at == 1 else g.add(y, x, name="sum"), name=f"relu{at}")
    return g


def training() -> openconv.Graph:
    """Batch normalisation with running values, several outputs, pooling and another tree."""
    scale, bias, mean, variance = (torch.ones(32) for _ in range(4))
    with openconv.Graph("training") as g:
        y = g.conv_fprop(g.input(made(4, 16, 12, 12), name="x"), g.input(made(32, 16, 3, 3), name="w"), stride=2)
        normal = g.batchnorm(y, scale, bias, mean, variance)
        kept = g.relu(normal.y).set_output()
        for value in normal[1:]:
            assert value is not None
            value.set_output()
        g.swish(g.max_pool(kept, 3, 2, 1)).set_output()
    return g


def shuffled() -> openconv.Graph:
    """A transpose that has to be copied, an input that is an output, sums that skip nodes."""
    with openconv.Graph("shuffled") as g:
        x = g.input(shape=(4, 6, 8), dtype="f32", name="x")
        turned = g.reshape(g.transpose(x, (2, 1, 0)), (8, 24))
        low = g.sigmoid(turned)
        y = g.mul(g.add(g.exp(low), low), turned)
        g.reduction(y, "max", 1).set_output()
        g.matmul(y, g.constant(torch.zeros(24, 5))).set_output()
        x.set_output()
    return g


def inlined() -> openconv.Graph:
    """A product of two vectors that the kernels of both its readers compute by themselves."""
    with openconv.Graph("inlined") as g:
        x, z = (g.input(shape=(4, 32, 8, size), dtype="f32", name=f"x{size}") for size in (8, 16))
        factor = g.mul(*(g.input(shape=(1, 32, 1, 1), dtype="f32", name=name) for name in "ab"), name="factor")
        g.relu(g.mul(x, factor)).set_output()
        g.mul(z, factor).set_output()
    return g


def resnet(dtype: torch.dtype = torch.float16) -> openconv.Graph:
    """ResNet-50 for inference, 176 nodes."""
    with openconv.Graph("resnet50") as g:

        def conv(x: Any, k: int, taps: int, stride: int, name: str, relu: bool = True) -> Any:
            weight = g.constant(made(k, x.shape[1], taps, taps, dtype=dtype), name=f"{name}.weight")
            y = g.conv_fprop(x, weight, padding=taps // 2, stride=stride, name=name)
            y = g.batchnorm_inference(y, *(g.constant(torch.ones(k)) for _ in range(4)), name=f"{name}.bn")
            return g.relu(y, name=f"{name}.relu") if relu else y

        y = g.max_pool(conv(g.input(made(2, 3, 224, 224, dtype=dtype), name="image"), 64, 7, 2, "stem"), 3, 2, 1)
        for stage, (count, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
            for at in range(count):
                name, stride = f"layer{stage}.{at}", 2 if stage > 1 and at == 0 else 1
                z = conv(conv(y, width, 1, 1, f"{name}.conv1"), width, 3, stride, f"{name}.conv2")
                z = conv(z, 4 * width, 1, 1, f"{name}.conv3", False)
                y = conv(y, 4 * width, 1, stride, f"{name}.down", False) if at == 0 else y
                y = g.relu(g.add(z, y), name=f"{name}.out")
        y = g.reshape(g.reduction(y, "avg", (2, 3)), (2, 2048))
        g.add(g.matmul(y, g.constant(made(2048, 1000, dtype=dtype))), g.constant(made(1000, dtype=dtype)))
    return g


GRAPHS = {
    "block": block,
    "constants": lambda: block(True),
    "training": training,
    "shuffled": shuffled,
    "inlined": inlined,
}


@pytest.fixture(params=GRAPHS)
def graph(request: Any) -> openconv.Graph:
    return GRAPHS[request.param]()


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_kernels_engines_and_workspace_are_those_of_the_program(graph):
    told = graph.explain()
    engines = graph.plans()[0].engines  # the copies come last
    assert [kernel.engine for kernel in told.launched] + ["torch"] * len(told.copies) == engines
    assert [kernel.number for kernel in told.launched] == list(range(len(told.launched)))
    assert graph.explain().workspace == graph.workspace_bytes()  # of what is compiled now
    if not told.copies:
        assert told.workspace == graph.workspace_bytes()  # and of what was foretold


def test_every_node_after_rewrites_is_in_a_kernel(graph):
    told = graph.explain("cuda")
    shown = {node.name for kernel in told.kernels for node in kernel.nodes}
    assert shown == {node.name for node in graph.program("cuda").flow.nodes}


def test_a_node_that_several_kernels_compute_is_shown_in_each():
    told = inlined().explain("cuda")
    assert [sum(node.name == "factor" for node in kernel.nodes) for kernel in told.launched] == [1, 1]
    assert not any("factor" in {tensor.name for tensor in kernel.results} for kernel in told.kernels)


def test_bytes_count_each_tensor_of_a_kernel_once():
    graph = block()
    told = graph.explain("cuda")
    image, weight, vector = 2 * 16 * 10 * 10 * 2, 16 * 16 * 9 * 2, 16 * 2
    assert [kernel.moved for kernel in told.launched] == [2 * image + weight + vector, 3 * image + weight + vector]
    assert told.moved == sum(kernel.moved for kernel in told.launched)
    # Apart: two convolutions, two biases, a sum of two tensors and two relus.
    assert told.unfused_moved == 2 * (2 * image + weight) + 2 * (2 * image + vector) + 3 * image + 2 * 2 * image
    assert (told.nodes, len(told.launched), told.unfused_kernels) == (9, 2, 7)
    assert told.seconds < told.unfused_seconds


def test_a_tensor_that_is_read_twice_counts_once():
    with openconv.Graph() as graph:
        graph.matmul(*[graph.input(shape=(8, 8), dtype="f32", name="a")] * 2)
    assert graph.explain().moved == 2 * 64 * 4


def test_what_is_stored_is_what_kernels_exchange(graph):
    told = graph.explain("cuda")
    read = {tensor.name for kernel in told.kernels for tensor in kernel.inputs} | {t.name for t in told.outputs}
    for kernel in told.kernels:
        written = {tensor.name for tensor in kernel.results}
        for node in kernel.nodes:
            for result, stored in zip(node.results, node.stored, strict=True):
                assert stored == (result.name in written), f"{result.name} of {node.name}"
                assert not stored or result.name in read
                assert result.bytes == dtype_bytes(result.dtype) * torch.Size(result.shape).numel()


def test_a_choice_of_another_plan_is_told():
    graph = block()
    plan = next(plan for plan in graph.plans()[1:] if plan.choices)
    graph.choose(plan.index)
    at, engine, knobs = plan.choices[-1]
    told = graph.explain().kernels[at]
    assert (told.engine, told.knobs or "-") == (engine, knobs)


def test_fusion_switched_off_is_told():
    told = block(fuse=False).explain()
    assert "fusion is off" in told.summary
    assert len(told.launched) == told.unfused_kernels == 7
    assert told.moved == told.unfused_moved


# -- a GPU that is not here -------------------------------------------------------------------------------------------


def test_a_gpu_is_explained_without_compiling(graph, monkeypatch):
    from openconv.cuda import jit

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("explain compiled a kernel")

    for name in ("cubin", "kernel", "_compile"):
        monkeypatch.setattr(jit, name, refuse)
    told = graph.explain("cuda")
    assert graph.program("cuda")._compiled is None
    assert told.device.kind == "cuda"
    assert all(kernel.engine.startswith(("cuda.", "torch")) for kernel in told.launched)
    assert all(kernel.seconds > 0 for kernel in told.launched)
    assert str(told)
    assert told.svg()


# -- text -------------------------------------------------------------------------------------------------------------


def test_the_text_says_what_and_why(graph):
    told = graph.explain("cuda")
    text = str(told)
    assert text.splitlines()[0] == f"graph {graph.name!r}: {told.summary}"
    assert f"{len(graph.nodes)} nodes -> {len(told.launched)} kernel" in told.summary
    assert "unfused" in told.summary
    assert "saved" in told.summary
    assert told.device.name in told.summary
    flat = " ".join(text.split())
    for kernel in told.launched:
        assert kernel.engine in text
        for note in kernel.notes:
            assert " ".join(note.split()) in flat
    for tensor in (*told.inputs, *told.outputs):
        assert str(tensor) in text
    assert all(len(line) <= 120 for line in text.splitlines()[1:] if " = " not in line)


def test_the_picture_in_letters_has_each_node_in_its_kernel():
    lines = block().explain("cuda").picture().splitlines()
    begins = [at for at, line in enumerate(lines) if line.strip().startswith("┌")]
    assert len(begins) == 2
    for begin, names in zip(begins, (["conv1", "bias1", "relu1"], ["conv2", "bias2", "sum", "relu2"]), strict=True):
        inside = lines[begin + 1 : begin + 1 + len(names)]
        assert [line.split()[2] for line in inside] == names
        assert [line.strip()[0] for line in inside] == ["│"] * (len(names) - 1) + ["└"]
        assert [line.split()[1] for line in inside] == ["○"] * (len(names) - 1) + ["●"]
    assert "add(bias2, x)" in next(line for line in lines if "sum =" in line)


def test_rewrites_done_and_switched_off_are_told():
    def small(**options: Any) -> openconv.Graph:
        with openconv.Graph("small", **options) as g:
            y = g.conv_fprop(g.input(made(1, 8, 4, 4), name="x"), g.constant(made(8, 8, 3, 3)), name="conv")
            g.batchnorm_inference(y, *(g.constant(torch.ones(8)) for _ in range(4)), name="normal")
        return g

    on, off = small().explain(), small(rewrites=["fold_constants"]).explain()
    assert any(sentence.startswith("normal: its scale is in the weights of conv") for sentence in on.rewrites)
    assert on.switched_off == ()
    assert "fold_batchnorm" in off.switched_off
    assert "off: fold_batchnorm: " in str(off)
    assert not any(sentence.startswith("normal") for sentence in off.rewrites)


def test_an_output_that_is_an_input_is_told_as_a_copy():
    told = shuffled().explain()
    assert told.copies == ("x is copied: it is an input",)
    assert told.copies[0] in str(told)
    assert "copy" in {kernel.kind for kernel in told.launched}


def test_a_graph_may_grow_after_it_was_explained():
    graph, x = openconv.Graph(), torch.randn(2, 3)
    y = graph.relu(x)
    assert graph.explain().nodes == 1
    graph.exp(y)
    assert [node.op for node in graph.explain().kernels[0].nodes] == ["relu", "exp"]
    assert torch.equal(graph(x), x.relu().exp())


def test_a_graph_of_nothing_is_refused():
    with pytest.raises(RuntimeError, match="has no nodes"):
        openconv.Graph("empty").explain()


# -- files ------------------------------------------------------------------------------------------------------------


def test_files_by_their_ending(tmp_path):
    told = training().explain("cuda")
    assert told.save(tmp_path / "a.txt").read_text() == f"{told}\n"
    assert told.save(str(tmp_path / "a.SVG")).read_text() == told.svg()
    read = json.loads(told.save(tmp_path / "a.json").read_text())
    assert read["moved"] == told.moved
    assert [kernel["engine"] for kernel in read["kernels"]] == [kernel.engine for kernel in told.kernels]
    with pytest.raises(ValueError, match=r"ends in '\.png'; wanted \.svg, \.txt, \.json"):
        told.save(tmp_path / "a.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.SVG", "a.json", "a.txt"]


def test_notebooks_show_the_drawing_and_the_text():
    told = block().explain()
    assert told._repr_svg_() == told.svg()
    html = told._repr_html_()
    assert told.svg() in html
    assert "nodes -&gt; " in html


# -- the drawing ------------------------------------------------------------------------------------------------------


Rect = tuple[float, float, float, float]


def rectangles(root: ElementTree.Element, *kinds: str) -> list[Rect]:
    found = []
    for rect in root.iter(f"{SVG}rect"):
        if rect.get("class") in kinds:
            x, y, w, h = (float(rect.get(name, "nan")) for name in ("x", "y", "width", "height"))
            found.append((x, y, x + w, y + h))
    return found


def overlap(a: Rect, b: Rect) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def check_drawing(told: Any) -> None:
    """Valid XML in which no two boxes overlap, each node lies in one kernel, and all is on the paper."""
    root = ElementTree.fromstring(told.svg())
    kernels, nodes = rectangles(root, "kernel"), rectangles(root, "node")
    leaves = rectangles(root, "input", "constant", "output")
    for group in (kernels, nodes, kernels + leaves):
        for a, b in combinations(group, 2):
            assert not overlap(a, b), f"{a} and {b} overlap"
    for node in nodes:
        around = [k for k in kernels if k[0] <= node[0] and k[1] <= node[1] and node[2] <= k[2] and node[3] <= k[3]]
        assert len(around) == 1, f"{node} is in {len(around)} kernels"
    hidden = len([kernel for kernel in told.kernels if kernel.kind == "view"])
    total = sum(len(kernel.nodes) for kernel in told.kernels)
    assert total - hidden <= len(nodes) <= total  # a vector's reshape is drawn with the vector
    assert len(rectangles(root, "output")) == len(told.outputs)
    width, height = float(root.get("width", "nan")), float(root.get("height", "nan"))
    moved = next(str(each.get("transform")) for each in root.iter(f"{SVG}g") if each.get("transform"))
    dx, dy = map(float, moved.removeprefix("translate(").rstrip(")").split())
    for x0, y0, x1, y1 in kernels + leaves:
        assert x0 + dx >= 0
        assert y0 + dy >= 0
        assert x1 + dx <= width
        assert y1 + dy <= height


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_boxes_do_not_overlap(graph, device):
    check_drawing(graph.explain(device))


def test_thick_lines_are_tensors_in_memory_and_thin_ones_are_not():
    told = block().explain("cuda")
    root = ElementTree.fromstring(told.svg())
    lines: dict[str, set[str]] = {"stored": set(), "fused": set()}
    for path in root.iter(f"{SVG}path"):
        if path.get("class") in lines:
            lines[str(path.get("class"))].add(path.findtext(f"{SVG}title") or "")
    assert lines["fused"] == {"conv1", "bias1", "conv2", "bias2", "sum"}
    assert lines["stored"] == {"x", "w1", "b1", "w2", "b2", "relu1", "relu2"}
    labels = [text.text for text in root.iter(f"{SVG}text") if text.get("paint-order")]
    assert labels == ["f16[2, 16, 10, 10]"] * 2  # between the kernels, and to the output


def test_names_are_escaped():
    with openconv.Graph('a <b> & "c"') as graph:
        x = graph.input(shape=(2, 3), dtype="f32", name="<x> & 'y'")
        graph.relu(x, name='r"<]]>')
    root = ElementTree.fromstring(graph.explain().svg())
    said = {text.text for text in root.iter(f"{SVG}text")}
    assert {'graph a <b> & "c"', "<x> & 'y'"} <= said


def test_a_whole_network_is_tall_not_wide():
    graph = resnet()
    told = graph.explain("cuda")
    assert told.nodes == len(graph.nodes) == 176
    assert len(told.launched) < 80
    check_drawing(told)
    root = ElementTree.fromstring(told.svg())
    assert float(root.get("width", "inf")) < 1600
    assert float(root.get("height", "0")) > 5000
