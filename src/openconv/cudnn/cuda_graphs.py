"""Kernels of a plan in a CUDA graph that somebody else made and instantiates.

A capture of one stream makes a chain of nodes. It is recorded straight into the graph; to update one, the chain is
recorded aside and its nodes' parameters are taken over, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .errors import cudnnGraphNotSupportedError

__all__ = ["populate", "update"]


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise cudnnGraphNotSupportedError(
            "CUDA graphs are reached through cuda.bindings, which is not installed: pip install 'openconv[cuda]'"
        ) from None
    return driver


def _checked(result: tuple[Any, ...]) -> Any:
    """What a function of the driver returns behind its status."""
    driver = _driver()
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the CUDA driver says {driver.CUresult(result[0]).name}")
    return result[1:] if len(result) > 2 else result[1] if len(result) == 2 else None


def populate(graph: int, launch: Callable[[], None]) -> None:
    """Record what ``launch`` puts on torch's current stream into the graph."""
    driver = _driver()
    stream = torch.cuda.Stream()
    handle = driver.CUstream(stream.cuda_stream)
    # Relaxed: a kernel that is compiled now is loaded now, which stricter modes forbid.
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with torch.cuda.stream(stream):
        _checked(driver.cuStreamBeginCaptureToGraph(handle, driver.CUgraph(graph), None, None, 0, mode))
        try:
            launch()
        finally:
            ended = driver.cuStreamEndCapture(handle)
    _checked(ended)


def update(graph: int, launch: Callable[[], None]) -> None:
    """Have the nodes of a graph do what ``launch`` does, which has to be the same kernels."""
    driver = _driver()
    aside = _checked(driver.cuGraphCreate(0))
    try:
        populate(int(aside), launch)
        old, new = _chain(driver, driver.CUgraph(graph)), _chain(driver, aside)
        kinds = [[_checked(driver.cuGraphNodeGetType(node)) for node in nodes] for nodes in (old, new)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"the CUDA graph has {len(old)} node(s) and the plan {len(new)}, or of other kinds; "
                             "wanted a graph that populate_cuda_graph() of this plan filled")  # fmt: skip
        for kind, target, source in zip(kinds[0], old, new, strict=True):
            _take_over(driver, kind, target, source)
    finally:
        _checked(driver.cuGraphDestroy(aside))


def _chain(driver: Any, graph: Any) -> list[Any]:
    """The nodes of a graph in the order in which they run, one after the other."""
    count = _checked(driver.cuGraphGetNodes(graph, 0))[1]
    nodes = list(_checked(driver.cuGraphGetNodes(graph, count))[0]) if count else []
    follower: dict[int, list[int]] = {}
    led: set[int] = set()
    for node in nodes:
        many = _checked(driver.cuGraphNodeGetDependentNodes(node, 0))[-1]
        after = _checked(driver.cuGraphNodeGetDependentNodes(node, many))[0] if many else []
        for each in after:
            follower.setdefault(int(node), []).append(int(each))
            led.add(int(each))
    at = [int(node) for node in nodes if int(node) not in led]
    places = {int(node): node for node in nodes}
    found = []
    while at:
        if len(at) > 1:
            raise cudnnGraphNotSupportedError("the CUDA graph branches; wanted one that populate_cuda_graph() filled")
        found.append(places[at[0]])
        at = follower.get(at[0], [])
    return found


def _take_over(driver: Any, kind: Any, target: Any, source: Any) -> None:
    kinds = driver.CUgraphNodeType
    if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
        _checked(driver.cuGraphKernelNodeSetParams(target, _checked(driver.cuGraphKernelNodeGetParams(source))))
    elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET:
        _checked(driver.cuGraphMemsetNodeSetParams(target, _checked(driver.cuGraphMemsetNodeGetParams(source))))
    elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
        _checked(driver.cuGraphMemcpyNodeSetParams(target, _checked(driver.cuGraphMemcpyNodeGetParams(source))))
    else:
        raise cudnnGraphNotSupportedError(
            f"the CUDA graph has a node of {kind}; openconv records kernels, fills and copies"
        )
