"""The ranked plans of a graph as the frontend numbers them, and what excludes some of them.

A plan of :class:`openconv.Graph` is a list of kernels. Plans with the same engines are one engine to the frontend, with
one knob, KERNEL_CFG, that counts them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .enums import behavior_note, knob_type, numerical_note
from .errors import cudnnGraphNotSupportedError

__all__ = ["Entry", "Filters", "knob", "ranked"]

_SCALAR = ("cuda.naive", "cuda.tiled", "cuda.filter2d", "cuda.depthwise")
_BLAS = ("cuda.im2col_gemm", "matmul")


@dataclass(frozen=True)
class knob:
    """What values a knob takes."""

    type: knob_type
    min_value: int
    max_value: int
    stride: int = 1


@dataclass(frozen=True)
class Entry:
    """One plan: its place in the list of the graph it is of, the engine and the knobs by the frontend's numbers."""

    place: int
    engine: int
    config: int
    plan: Any

    @property
    def name(self) -> str:
        """The engines, and which of the plans that use them it is."""
        return f"{'+'.join(self.plan.engines) or 'none'}[KERNEL_CFG={self.config}]"

    @property
    def knobs(self) -> dict[knob_type, int]:
        """What :meth:`pygraph.create_execution_plan` makes it of again."""
        return {knob_type.KERNEL_CFG: self.config}

    def numerical_notes(self, narrow: bool) -> set[numerical_note]:
        """``narrow`` says that the graph has values that tensor cores multiply."""
        convolutions = [name for name in self.plan.engines if name.startswith("cuda.") and name not in _SCALAR]
        return {numerical_note.TENSOR_CORE} if narrow and convolutions else set()

    def behavior_notes(self) -> set[behavior_note]:
        """Kernels are compiled when they are first needed, and can be recorded in CUDA graphs."""
        if not any(name.startswith("cuda") for name in self.plan.engines):
            return {behavior_note.RUNTIME_COMPILATION}
        found = {behavior_note.RUNTIME_COMPILATION, behavior_note.SUPPORTS_CUDA_GRAPH_NATIVE_API}
        return found | ({behavior_note.CUBLASLT_DEPENDENCY} if set(self.plan.engines) & set(_BLAS) else set())


@dataclass
class Filters:
    """What excludes plans. The list itself stays as it is, so that numbers of plans do."""

    names: set[str] = field(default_factory=set)
    workspace: int | None = None
    notes: list[tuple[numerical_note | behavior_note, bool]] = field(default_factory=list)

    def refusal(self, entry: Entry, narrow: bool) -> str | None:
        """Why a plan is excluded; None if it is not."""
        named = next((name for name in sorted(self.names) if name in entry.name), None)
        if named is not None:
            return f"deselect_engines() named {named!r}"
        if self.workspace is not None and entry.plan.workspace_bytes > self.workspace:
            return f"it needs {entry.plan.workspace_bytes} bytes of workspace; {self.workspace} are allowed"
        carried = entry.numerical_notes(narrow) | entry.behavior_notes()
        for note, wanted in self.notes:
            if (note in carried) != wanted:
                return f"it {'lacks' if wanted else 'carries'} the note {note.name}"
        return None


def ranked(plans: list[Any]) -> list[Entry]:
    """Entries of plans in their order; engines are numbered as they come."""
    engines: dict[tuple[str, ...], int] = {}
    counts: dict[int, int] = {}
    found = []
    for place, plan in enumerate(plans):
        engine = engines.setdefault(tuple(plan.engines), len(engines))
        counts[engine] = counts.get(engine, -1) + 1
        found.append(Entry(place, engine, counts[engine], plan))
    return found


def entry_of(entries: list[Entry], engine: int, knobs: dict[Any, int] | None) -> Entry:
    """The plan of an engine with these knobs."""
    unknown = [each for each in knobs or {} if each is not knob_type.KERNEL_CFG]
    if unknown:
        raise cudnnGraphNotSupportedError(
            f"knobs are {', '.join(map(str, unknown))}; plans of openconv have {knob_type.KERNEL_CFG}"
        )
    config = (knobs or {}).get(knob_type.KERNEL_CFG, 0)
    for entry in entries:
        if (entry.engine, entry.config) == (engine, config):
            return entry
    engines = max((entry.engine for entry in entries), default=-1) + 1
    raise ValueError(f"there is no plan of engine {engine} with KERNEL_CFG {config}; wanted one of {engines} engines")
