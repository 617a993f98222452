"""Short ways to make and keep graphs: a block, a decorator that builds, and one that remembers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from threading import RLock
from typing import Any, ParamSpec, TypeVar

from .enums import data_type, heur_mode
from .handles import Handle
from .pygraph import pygraph

__all__ = ["graph", "graph_cache", "jit"]

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def graph(
    handle: Handle | None = None,
    name: str = "cudnn_graph",
    io_data_type: Any = data_type.HALF,
    intermediate_data_type: Any = data_type.FLOAT,
    compute_data_type: Any = data_type.FLOAT,
    **options: Any,
) -> Iterator[tuple[pygraph, list[Any]]]:
    """A new graph, and an empty list for the tensors whose numbers are wanted."""
    types = {
        "io_data_type": io_data_type,
        "intermediate_data_type": intermediate_data_type,
        "compute_data_type": compute_data_type,
    }
    yield pygraph(name=name, handle=handle, **types, **options), []


def jit(
    heur_modes: Sequence[heur_mode] | heur_mode = heur_mode.A, **_: Any
) -> Callable[[Callable[P, Any]], Callable[P, tuple[pygraph, list[int]]]]:
    """Build the graph that a function returns. The function returns a graph and some of its tensors; what is decorated
    returns the graph, built, and their numbers."""
    modes = [heur_modes] if isinstance(heur_modes, heur_mode) else list(heur_modes)

    def decorate(function: Callable[P, Any]) -> Callable[P, tuple[pygraph, list[int]]]:
        @wraps(function)
        def built(*args: P.args, **kwargs: P.kwargs) -> tuple[pygraph, list[int]]:
            made, tensors = function(*args, **kwargs)
            if not made.get_execution_plan_count():
                made.build(modes)
            return made, [one.get_uid() for one in tensors]

        return built

    return decorate


def graph_cache(key_fn: Callable[..., Any], maxsize: int = 256) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Remember what a function returned, by ``key_fn`` of its arguments. The oldest of ``maxsize`` is forgotten."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        found: OrderedDict[Any, R] = OrderedDict()
        lock = RLock()

        @wraps(function)
        def remembered(*args: P.args, **kwargs: P.kwargs) -> R:
            key = key_fn(*args, **kwargs)
            with lock:
                if key not in found:
                    made = function(*args, **kwargs)
                    while len(found) >= max(maxsize, 1):
                        found.popitem(last=False)
                    found[key] = made
                return found[key]

        return remembered

    return decorate
