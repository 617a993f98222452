"""Graphs as JSON: they come back as they were, with their constants and plans, and a wrong text is refused."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import openconv
from openconv import Graph
from openconv.cuda.device import device_for
from openconv.select import version_of


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


def example(fmt: torch.memory_format = torch.contiguous_format) -> tuple[Graph, list[torch.Tensor], torch.Tensor]:
    """conv + bias + residual + clamp, with a constant filter, a number and an infinite parameter."""
    x = rand(2, 4, 9, 8).to(memory_format=fmt)
    weight, bias, residual = rand(6, 4, 3, 3).to(memory_format=fmt), rand(6), rand(2, 6, 9, 8).to(memory_format=fmt)
    with Graph(
        "example", policy=openconv.Policy(accuracy="strict"), rewrites=("fold_constants", "drop_moves")
    ) as graph:
        image = graph.input(x, name="image")
        y = graph.conv_fprop(image, graph.constant(weight, "weight"), padding=(1, (2, 0)), name="conv")
        y = graph.bias(y, bias) * 0.5
        y = graph.clamp(graph.add(y, residual), 0.0, math.inf, name="limited")
        y.set_output().set_name("y")
        graph.reduction(y, "max", axes=(2, 3)).set_output()
    padded = F.pad(x, (2, 0, 1, 1))
    want = ((F.conv2d(padded, weight, bias)) * 0.5 + residual).clamp(min=0)
    return graph, [x, bias, residual], want


@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last])
def test_a_graph_comes_back(fmt):
    graph, inputs, want = example(fmt)
    before = graph(*inputs)
    again = Graph.from_json(graph.to_json())
    assert repr(again) == repr(graph)
    assert (again.name, again.policy, again.rewrites, again.fuse) == (
        graph.name, graph.policy, graph.rewrites, graph.fuse,
    )  # fmt: skip
    assert [t.strides for t in again.inputs] == [t.strides for t in graph.inputs]
    after = again(*inputs)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
    torch.testing.assert_close(after[0], want, rtol=1e-4, atol=1e-4)
    assert again.to_json() == graph.to_json()
    with pytest.raises(RuntimeError, match="is closed"):
        again.relu(again.inputs[0])


def test_a_graph_that_was_never_called_comes_back():
    graph, inputs, _ = example()
    text = graph.to_json()
    assert json.loads(text)["plans"] == {}
    again = Graph.from_json(text)
    for a, b in zip(graph(*inputs), again(*inputs), strict=True):
        assert torch.equal(a, b)


def test_files(tmp_path):
    graph, inputs, _ = example()
    path = graph.save(tmp_path / "graph.json")
    again = Graph.load(path)
    assert torch.equal(again(*inputs)[0], graph(*inputs)[0])


def test_every_kind_of_node_comes_back():
    x, w = rand(2, 4, 8, 8, dtype=torch.float64), rand(4, 4, 3, 3, dtype=torch.float64)
    a, b, c, d = vectors = [rand(4, dtype=torch.float64).abs() for _ in range(4)]
    with Graph() as graph:
        y = graph.conv_fprop(x, w, padding=1)
        norm = graph.batchnorm(y, a, b, c, d)
        outs = [*norm, *graph.batchnorm_backward(y, x, vectors[0], norm.mean, norm.inv_variance), *graph.genstats(x)]
        outs.append(graph.batchnorm_inference(y, *vectors))
        outs.append(graph.conv_dgrad(w, y, padding=1, stride=2, output_size=(16, 15)))
        outs.append(graph.conv_wgrad(x, y, padding=1, filter_size=3))
        outs.append(graph.matmul(x, x))
        outs.append(graph.resample_backward(graph.max_pool(x, 2), x, "max", 2))
        outs.append(graph.concatenate([x, graph.slice(x, (0, 1, 0, 0), (2, 3, None, 8), (1, 1, 1, 1))], 1))
        outs.append(graph.transpose(graph.reshape(x, (2, -1, 8)), (2, 0, 1)))
        outs.append(graph.cast(graph.cmp_gt(x, 0.0), "i8"))
        outs.append(graph.gen_index(x, 2))
        outs.append(graph.select(graph.cmp_gt(x, -math.inf), x, math.inf))
        outs.append(graph.identity(graph.relu(x).set_dtype("f32")).set_layout("nhwc"))
        outs.append(graph.avg_pool(x, (3, 2), 1, ((1, 0), 1)))
        for out in outs:
            assert out is not None
            out.set_output()
    again = Graph.from_json(graph.to_json())
    assert repr(again) == repr(graph)
    values = {"input_0": x, "input_1": w, **{f"input_{at + 2}": v for at, v in enumerate(vectors)}}
    for one, other, tensor in zip(graph(values), again(values), graph.outputs, strict=True):
        assert torch.equal(one, other), tensor
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16", "i64", "i8", "u8", "bool", "e4m3"])
def test_constants_keep_their_bytes(dtype):
    from openconv.tensors import ALL_DTYPES

    value = (10 * rand(3, 4)).to(ALL_DTYPES[dtype])
    with Graph() as graph:
        graph.concatenate([graph.constant(value)], 0)
    again = Graph.from_json(graph.to_json())
    assert torch.equal(again.flow.constants[0].value.view(torch.uint8), value.view(torch.uint8))  # type: ignore[union-attr]


def test_constants_keep_their_layout_but_no_gaps():
    with Graph() as graph:
        dense = graph.constant(rand(2, 3, 4, 5).to(memory_format=torch.channels_last))
        cut = graph.constant(rand(9, 9)[:3, ::2])
        spread = graph.constant(torch.tensor(2.0).expand(1000, 1000))
        empty = graph.constant(rand(0, 3))
        for each in (dense, cut, spread, empty):
            graph.relu(each).set_output()
    text = graph.to_json()
    assert len(text) < 10_000
    given = [tensor.value for tensor in (dense, cut, spread, empty) if tensor.value is not None]
    values = [tensor.value for tensor in Graph.from_json(text).flow.constants if tensor.value is not None]
    assert len(values) == 4
    for value, wanted in zip(values, given, strict=True):
        assert torch.equal(value, wanted)
    assert values[0].stride() == given[0].stride()
    assert values[1].is_contiguous()
    assert values[2].untyped_storage().nbytes() == 4


# -- plans ------------------------------------------------------------------------------------------------------------


def chosen() -> tuple[Graph, list[torch.Tensor]]:
    """A graph that runs another plan than the first."""
    x, w = rand(1, 4, 8, 8), rand(4, 4, 3, 3)
    with Graph() as graph:
        graph.relu(graph.conv_fprop(x, w, padding=1))
    graph(x, w)
    other = next(plan for plan in graph.plans() if plan.index and plan.fused)
    graph.choose(other.index)
    return graph, [x, w]


def test_the_chosen_plan_is_taken_over():
    graph, inputs = chosen()
    first = Graph.from_json(Graph.from_json(graph.to_json()).to_json())  # twice, the second without a call
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = Graph.from_json(first.to_json())
        again(*inputs)
    assert again.plans()[0].engines == graph.program().current().engines
    assert again.plans()[0].knobs == graph.program().current().knobs
    fresh = Graph.from_json(graph.to_json())
    fresh._chosen = {}
    assert fresh.plans()[0].text != again.plans()[0].text


def test_a_plan_without_fusion_is_taken_over():
    graph, inputs = chosen()
    apart = next(plan for plan in graph.plans() if not plan.fused)
    graph.choose(apart.index)
    again = Graph.from_json(graph.to_json())
    assert len(again.program().kernels) == 2
    assert torch.equal(again(*inputs), graph(*inputs))


def changed(text: str, *path: Any, to: Any) -> str:
    """The text with something else at a place."""
    data = json.loads(text)
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return json.dumps(data)


@pytest.mark.parametrize("what", ["engine", "openconv"])
def test_a_plan_of_another_version_is_made_anew_with_one_warning(what):
    graph, inputs = chosen()
    data = json.loads(graph.to_json())
    (key,) = data["plans"]
    plan = data["plans"][key]
    if what == "engine":
        (name,) = plan["versions"]
        assert plan["versions"][name] == version_of(name)
        plan["versions"][name] = "another"
        match = f"another {name}"
    else:
        plan["openconv"] = "0.0.1"
        match = "openconv 0.0.1, this is"
    data["plans"][key + " more"] = plan
    with pytest.warns(UserWarning, match=match) as seen:
        again = Graph.from_json(json.dumps(data))
    assert len(seen) == 1
    assert "planned anew" in str(seen[0].message)
    assert again._chosen == {}
    torch.testing.assert_close(again(*inputs), graph(*inputs))


def test_plans_of_other_devices_are_kept_silently():
    graph, inputs = chosen()
    data = json.loads(graph.to_json())
    (key,) = data["plans"]
    there = f"{device_for('sm_90a').key} | {key.partition(' | ')[2]}"
    data["plans"][there] = {
        "fused": True, "kernels": [["cuda.igemm_sm90", "tile=1"]], "openconv": "0.0.1",
        "versions": {"cuda.igemm_sm90": "another"},
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = Graph.from_json(json.dumps(data))
    again(*inputs)
    assert json.loads(again.to_json())["plans"] == data["plans"]


# -- what is refused --------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "format": (("format",), 2, "graph: format is 2; wanted 1"),
    "name": (("name",), 3, "graph: name is 3; wanted str"),
    "fuse": (("fuse",), 1, "graph: fuse is 1; wanted bool"),
    "rewrites": (("rewrites",), ["all"], "rewrites: 'all'; wanted some of fold_batchnorm"),
    "policy": (("policy",), "speed=9", "policy: policy 'speed=9': 'speed' is none of"),
    "inputs": (("inputs", 0), 7, r"inputs\[0\]: is int; wanted an object"),
    "shape": (("inputs", 0, "shape"), [2, -1], r"inputs\[0\]: shape is \[2, -1\]; wanted integers >= 0"),
    "strides": (("inputs", 0, "strides"), [1], r"inputs\[0\]: strides are \(1,\) of shape"),
    "dtype": (("inputs", 0, "dtype"), "f8", r"inputs\[0\]: dtype is 'f8'; wanted one of f64"),
    "same names": (("inputs", 1, "name"), "image", r"inputs\[1\]: the graph has a tensor 'image' already"),
    "data": (("constants", 0, "data"), "AAA*", r"constants\[0\]: data is no base64"),
    "short data": (("constants", 0, "data"), "AAAA", r"constants\[0\]: data has 3 bytes; wanted 864"),
    "bytes": (("constants", 0, "shape"), [6, 4, 3, 2], r"constants\[0\]: data has 864 bytes; .* wants 576"),
    "op": (("nodes", 0, "op"), "fold", r"nodes\[0\]: fold: there is no operation 'fold'"),
    "argument": (("nodes", 0, "args", 0), "y", r"nodes\[0\] \(conv\): args\[0\] is 'y'; wanted the name of a tensor"),
    "number": (("nodes", 0, "args", 0), {"number": "x"}, r"args\[0\] is 'x'; wanted int or float"),
    "missing attribute": (("nodes", 0, "attrs"), {}, r"nodes\[0\]: conv_fprop: an attribute .* is missing"),
    "attribute": (("nodes", 0, "attrs", "stride"), 0, r"nodes\[0\]: conv_fprop: conv: stride is 0; wanted integers"),
    "results": (("nodes", 0, "results"), ["a", "b"], r"nodes\[0\]: results are \['a', 'b'\]; conv_fprop has 1"),
    "result's name": (("nodes", 1, "results"), ["conv"], r"nodes\[1\]: the graph has a tensor 'conv' already"),
    "stored": (("nodes", 0, "stored"), {"0": "f8"}, r"nodes\[0\]: stored has '0': 'f8'"),
    "layouts": (("nodes", 0, "layouts"), {"3": "nhwc"}, r"nodes\[0\]: layouts has '3': 'nhwc'; wanted the number"),
    "outputs": (("outputs",), ["z"], r"outputs\[0\] is 'z'; wanted the name of a tensor"),
    "no outputs": (("outputs",), [], "outputs: there are none"),
    "plans": (("plans",), [], r"graph: plans is \[\]; wanted dict"),
    "a plan": (("plans",), {"cpu | x": {"fused": True}}, r"plans\['cpu \| x'\]: has no 'kernels'"),
    "a kernel": (("plans",), {"a": {"fused": True, "kernels": [[1, 2]]}}, r"kernels\[0\] is \[1, 2\]; wanted null or"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_text_says_what_and_where(name):
    path, value, match = WRONG[name]
    text = example()[0].to_json()
    with pytest.raises(ValueError, match=match):
        Graph.from_json(changed(text, *path, to=value))


def test_no_json_and_what_is_missing():
    with pytest.raises(ValueError, match="graph: the text is no JSON"):
        Graph.from_json("{")
    with pytest.raises(ValueError, match="graph: is list; wanted an object"):
        Graph.from_json("[]")
    text = example()[0].to_json()
    for name in json.loads(text):
        data = json.loads(text)
        del data[name]
        with pytest.raises(ValueError, match=f"graph: has no '{name}'; wanted one"):
            Graph.from_json(json.dumps(data))
