"""pygraph: the frontend's graph, recorded here and computed by :class:`openconv.Graph`.

Tensors may be given sizes, strides and types, or be made results, until the graph is planned. ``validate`` translates
what was recorded, planning ranks the plans of the translation, and running runs one of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..tensors import ALL_DTYPES
from . import buffers, cuda_graphs, serialize
from .enums import behavior_note, build_plan_policy, dtype_name, heur_mode, knob_type, numerical_note
from .errors import cudnnGraphNotSupportedError
from .handles import Handle, default_device, on_stream_of
from .lowering import Lowering
from .plans import Entry, Filters, entry_of, knob, ranked
from .record import tensor
from .recorder import Recorder

__all__ = ["pygraph"]

_MOST_TRANSLATIONS = 64


class pygraph(Recorder):
    """A graph of the cuDNN frontend.

    ``io_data_type`` is that of inputs and results none was set of, ``intermediate_data_type`` that of values on the
    way; without them both follow from what comes in. Whatever ``compute_data_type`` says, values are added up in f32
    (f64 of f64, i32 of integers). ``sm_count``, ``sm_version``, ``kernel_cache``, ``device_property`` and what is said
    of dynamic shapes and CUDA graphs are accepted and not needed.
    """

    def __init__(
        self,
        name: str = "graph",
        io_data_type: Any = None,
        intermediate_data_type: Any = None,
        compute_data_type: Any = None,
        handle: Handle | None = None,
        sm_count: int | None = None,
        sm_version: int | None = None,
        kernel_cache: Any = None,
        device_property: Any = None,
        is_dynamic_shape_enabled: bool = False,
        is_override_shape_enabled: bool = False,
        cuda_graph_retention: Any = None,
        *,
        is_cuda_graph_replay_expected: bool = False,
    ) -> None:
        if handle is not None and not isinstance(handle, Handle):
            raise TypeError(f"handle is {type(handle).__name__}; wanted one of cudnn.create_handle()")
        self._handle = handle
        self._empty()
        super().__init__(name, io_data_type, intermediate_data_type, compute_data_type)
        if self._compute is not None:
            dtype_name(self._compute)  # one that there is

    def _empty(self) -> None:
        self._lowered: dict[Any, Lowering] = {}
        self._entries: list[Entry] | None = None
        self._place: torch.device | None = None
        self._selected, self._pinned, self._built = 0, False, False
        self._filters = Filters()
        self._kept: dict[int, Any] = {}

    def _changed(self) -> None:
        self._lowered.clear()

    # -- building ---------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check the whole graph, what no result is made of included."""
        if not self._nodes:
            raise RuntimeError(f"graph {self.name!r} has no operations; wanted one at least")
        everything = Lowering(self.name, [], self._rules())
        for node in self._nodes:
            for one in node.outputs.values():
                if one is not None:
                    everything.place(one)
        self._translation()

    def build_operation_graph(self) -> None:
        """The same as :meth:`validate`."""
        self.validate()

    def create_execution_plans(self, heuristics: Sequence[heur_mode] | None = None) -> None:
        """Rank the plans. The graph can no longer change."""
        if self._entries is not None:
            raise RuntimeError(f"graph {self.name!r} was planned already; build another one, or select_plan()")
        self.validate()
        self._place = self._device
        self._entries, self._fixed = ranked(self._translation().graph.plans(self._device)), True
        if not self._entries:
            raise cudnnGraphNotSupportedError(f"graph {self.name!r}: no engine takes it on {self._device}")

    def create_execution_plan(self, engine_id: int, knobs: Mapping[Any, int] | None = None) -> pygraph:
        """Add a plan of this engine and these knobs behind the others."""
        every = self._every()
        entry = entry_of(every, engine_id, dict(knobs or {}))
        self._place = self._device
        self._entries, self._fixed = [*(self._entries or []), entry], True
        return self

    def _every(self) -> list[Entry]:
        """All plans there are, whether or not the graph was planned."""
        return ranked(self._translation().graph.plans(self._device))

    def check_support(self) -> None:
        """cudnnGraphNotSupportedError if what was deselected leaves no plan."""
        self._allowed()

    def build_plans(self, policy: build_plan_policy = build_plan_policy.HEURISTICS_CHOICE) -> None:
        """Compile the first plan that nothing excludes, or the one that was selected; all of them if ``policy`` is
        ALL."""
        if self._entries is None:
            self.create_execution_plans()
        allowed = self._allowed()
        if self._pinned:
            self._refuse(self._selected)
            allowed = [self._selected, *(index for index in allowed if index != self._selected)]
        fitting = (index for index in allowed if self._fits(index))
        first = next(fitting, None)
        if first is None or (self._pinned and first != self._selected):
            raise cudnnGraphNotSupportedError(
                f"graph {self.name!r}: every plan needs more than {self._filters.workspace} bytes of workspace"
            )
        self._selected, self._built = first, True
        if policy is build_plan_policy.ALL:
            list(fitting)

    def build(self, heuristics: Sequence[heur_mode] | None = None) -> None:
        """validate, plan and build."""
        if self._entries is None:
            self.create_execution_plans(heuristics)
        self.check_support()
        self.build_plans()

    def _allowed(self) -> list[int]:
        entries = self._planned("check_support")
        refusals = [self._filters.refusal(entry, self._narrow) for entry in entries]
        allowed = [index for index, refusal in enumerate(refusals) if refusal is None]
        if not allowed:
            lines = [f"{entry.name}: {refusal}" for entry, refusal in zip(entries, refusals, strict=True)]
            raise cudnnGraphNotSupportedError("\n  ".join([f"graph {self.name!r}: every plan is excluded", *lines]))
        return allowed

    def _fits(self, index: int) -> bool:
        """Whether a plan, compiled, stays within the workspace that is allowed: what it was ranked with is a guess."""
        need = self._bytes(index, {})
        return self._filters.workspace is None or need <= self._filters.workspace

    def _refuse(self, index: int) -> None:
        entry = self._planned("a plan")[index]
        refusal = self._filters.refusal(entry, self._narrow)
        if refusal is not None:
            raise ValueError(f"plan {index} ({entry.name}) is excluded: {refusal}")

    def _planned(self, what: str) -> list[Entry]:
        if self._entries is None:
            raise RuntimeError(f"{what}: graph {self.name!r} is not planned; wanted create_execution_plans() before")
        return self._entries

    def _at(self, index: int, what: str) -> Entry:
        entries = self._planned(what)
        if not 0 <= index < len(entries):
            raise IndexError(f"{what}: plan index is {index}; wanted 0 to {len(entries) - 1}")
        return entries[index]

    @property
    def _narrow(self) -> bool:
        """Whether tensor cores would multiply."""
        kinds = {place.dtype for place in self._translation().places.values()}
        return bool(kinds & {"f16", "bf16", "e4m3", "e5m2", "i8"}) or torch.backends.cuda.matmul.allow_tf32

    @property
    def _device(self) -> torch.device:
        """The device that the graph is planned for."""
        if self._place is not None:
            return self._place
        otherwise = self._handle.device if self._handle is not None else default_device()
        return buffers.device_of(list(self._bound.values()), otherwise)

    # -- plans ------------------------------------------------------------------------------------------------------

    def get_execution_plan_count(self) -> int:
        """How many plans there are; 0 before the graph is planned."""
        return len(self._entries or ())

    def get_engine_count(self) -> int:
        """How many engines there are: combinations of engines of openconv, one for each kernel."""
        return len({entry.engine for entry in self._every()})

    def get_knobs_for_engine(self, engine: int) -> list[knob]:
        """The knobs of an engine."""
        configs = [entry.config for entry in self._every() if entry.engine == engine]
        if not configs:
            raise ValueError(f"engine is {engine}; wanted 0 to {self.get_engine_count() - 1}")
        return [knob(knob_type.KERNEL_CFG, 0, max(configs))]

    def get_engine_and_knobs_at_index(self, index: int) -> tuple[int, dict[knob_type, int]]:
        """What :meth:`create_execution_plan` makes the plan of again."""
        entry = self._at(index, "get_engine_and_knobs_at_index")
        return entry.engine, entry.knobs

    def get_plan_name_at_index(self, index: int) -> str:
        """Engines of a plan, and which of those with the same it is."""
        return self._at(index, "get_plan_name_at_index").name

    def select_plan(self, index: int) -> pygraph:
        """Have this plan built and run, and no other."""
        self._at(index, "select_plan")
        self._selected, self._pinned, self._built = index, True, False
        return self

    def build_plan_at_index(self, index: int) -> pygraph:
        """Build a plan and have it run."""
        self._at(index, "build_plan_at_index")
        self._refuse(index)
        if not self._fits(index):
            raise cudnnGraphNotSupportedError(f"plan {index} needs {self._bytes(index, {})} bytes of workspace; "
                                              f"{self._filters.workspace} are allowed")  # fmt: skip
        self._selected, self._built = index, True
        return self

    def get_workspace_size(
        self, handle: Handle | None = None, override_uids: Any = None, override_shapes: Any = None,
        override_strides: Any = None,
    ) -> int:  # fmt: skip
        """Bytes of workspace that the built plan uses."""
        if not self._built:
            raise RuntimeError(f"get_workspace_size: graph {self.name!r} is not built; wanted build_plans() before")
        sizes = _overrides(override_uids, override_shapes, override_strides)
        return self._bytes(self._selected, sizes)

    def get_workspace_size_plan_at_index(
        self, index: int, handle: Handle | None = None, override_uids: Any = None, override_shapes: Any = None,
        override_strides: Any = None,
    ) -> int:  # fmt: skip
        """Bytes of workspace that a plan uses."""
        self._at(index, "get_workspace_size_plan_at_index")
        self._refuse(index)
        return self._bytes(index, _overrides(override_uids, override_shapes, override_strides))

    def _bytes(self, index: int, sizes: Mapping[int, Any]) -> int:
        entry = self._planned("get_workspace_size")[index]
        return int(self._translation(sizes=sizes, entry=entry).graph.workspace_bytes(self._device))

    def deselect_workspace_greater_than(self, workspace_limit: int) -> pygraph:
        """Exclude plans that need more bytes of workspace."""
        return self._filter(workspace=workspace_limit)

    def deselect_engines(self, engine_names: Sequence[str]) -> pygraph:
        """Exclude plans with one of these texts in their names."""
        self._filters.names.update(engine_names)
        return self._filter()

    def select_numeric_notes(self, notes: Sequence[numerical_note]) -> pygraph:
        """Exclude plans that lack one of the notes."""
        return self._filter(notes, True)

    def deselect_numeric_notes(self, notes: Sequence[numerical_note]) -> pygraph:
        """Exclude plans that carry one of the notes."""
        return self._filter(notes, False)

    def select_behavior_notes(self, notes: Sequence[behavior_note]) -> pygraph:
        """Exclude plans that lack one of the notes."""
        return self._filter(notes, True)

    def deselect_behavior_notes(self, notes: Sequence[behavior_note]) -> pygraph:
        """Exclude plans that carry one of the notes."""
        return self._filter(notes, False)

    def _filter(self, notes: Sequence[Any] = (), wanted: bool = True, workspace: int | None = None) -> pygraph:
        for note in notes:
            if not isinstance(note, numerical_note | behavior_note):
                raise TypeError(f"a note is {note!r}; wanted one of cudnn.numerical_note or cudnn.behavior_note")
        self._filters.notes += [(note, wanted) for note in notes]
        self._filters.workspace = self._filters.workspace if workspace is None else workspace
        if self._built and self._filters.refusal(self._planned("a filter")[self._selected], self._narrow):
            self._built = False  # what was built may no longer run
        return self

    def get_behavior_notes(self) -> list[behavior_note]:
        """The notes of the plan that runs."""
        return self.get_behavior_notes_for_plan_at_index(self._selected)

    def get_behavior_notes_for_plan_at_index(self, index: int) -> list[behavior_note]:
        """The notes of a plan."""
        found = self._at(index, "get_behavior_notes").behavior_notes()
        return sorted(found, key=lambda note: note.value)

    def get_numerical_notes_for_plan_at_index(self, index: int) -> list[numerical_note]:
        """The notes of a plan."""
        found = self._at(index, "get_numerical_notes").numerical_notes(self._narrow)
        return sorted(found, key=lambda note: note.value)

    # -- running ----------------------------------------------------------------------------------------------------

    def execute(
        self, tensor_dict: Any, workspace: Any = None, handle: Handle | None = None, override_uids: Any = None,
        override_shapes: Any = None, override_strides: Any = None, tensor_uids: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Compute, into buffers that were given for the results.

        ``tensor_dict`` has a buffer for each input and result, by tensor, number or name; with ``tensor_uids`` it is a
        list of buffers for these numbers. A buffer is a torch tensor, anything with DLPack, or an address; for a tensor
        that is passed by value it is a number or a tensor of one. Tensors that the graph was built with are used where
        no other is given.
        """
        if not self._built:
            self.build()
        sizes = _overrides(override_uids, override_shapes, override_strides)
        self._run(self._pack(tensor_dict, tensor_uids), workspace, handle, self._selected, sizes)

    def execute_plan_at_index(
        self, tensor_dict: Any, workspace: Any = None, index: int = 0, handle: Handle | None = None,
        override_uids: Any = None, override_shapes: Any = None, override_strides: Any = None,
        tensor_uids: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """:meth:`execute` with another plan."""
        self._at(index, "execute_plan_at_index")
        self._refuse(index)
        sizes = _overrides(override_uids, override_shapes, override_strides)
        self._run(self._pack(tensor_dict, tensor_uids), workspace, handle, index, sizes)

    def _pack(self, tensor_dict: Any, uids: Sequence[int] | None) -> dict[tensor, Any]:
        """Buffers by tensor."""
        if uids is not None:
            if len(uids) != len(tensor_dict) or len(set(uids)) != len(uids):
                raise ValueError(
                    f"tensor_uids are {list(uids)} for {len(tensor_dict)} buffers; wanted one number for each"
                )
            tensor_dict = dict(zip(uids, tensor_dict, strict=True))
        pack = {self._tensors[uid]: data for uid, data in self._bound.items()}
        for key, data in tensor_dict.items():
            if key is None:
                continue  # a result that is left out, as next_running_mean may be
            found = key if isinstance(key, tensor) else self.find_tensor(key)
            if found is None or found._owner is not self:
                raise ValueError(
                    f"{key!r} is no tensor of graph {self.name!r}; wanted a tensor of it, its uid or its name"
                )
            pack[found] = data
        return pack

    def _run(
        self, pack: Mapping[tensor, Any], workspace: Any, handle: Handle | None, index: int, sizes: Mapping[int, Any]
    ) -> None:
        device = self._running_on(pack, handle)
        with on_stream_of(self._handle if handle is None else handle, device), torch.no_grad():
            self._prepared(pack, workspace, index, sizes, device)()

    def _running_on(self, pack: Mapping[tensor, Any], handle: Handle | None) -> torch.device:
        handle = self._handle if handle is None else handle
        where = handle.device if isinstance(handle, Handle) else default_device()
        return buffers.device_of(list(pack.values()), where)

    def _prepared(
        self, pack: Mapping[tensor, Any], workspace: Any, index: int, sizes: Mapping[int, Any], device: torch.device
    ) -> Callable[[], None]:
        """All buffers as tensors, and what computes with them."""
        lowering = self._translation(self._numbers(pack), sizes, self._planned("execute")[index])
        values = {}
        for one, place in lowering.inputs.items():
            dtype, data = ALL_DTYPES[place.dtype], self._given(pack, one)
            values[place] = (
                buffers.scalar(data, one.get_name(), place.shape, dtype, device)
                if one.get_is_pass_by_value()
                else buffers.described(data, one.get_name(), place.shape, place.strides, dtype, device)
            )
        outputs = {}
        for one, place in lowering.outputs.items():
            stride = sizes.get(one.get_uid(), (None, one._stride))[1] or place.strides
            outputs[place] = buffers.described(
                self._given(pack, one), one.get_name(), place.shape, stride, ALL_DTYPES[place.dtype], device
            )
        space = self._workspace(workspace, index, sizes, device)

        def compute() -> None:
            lowering.graph.execute(values, outputs, space)

        return compute

    def _call(
        self, values: Mapping[tensor, Any], outs: Mapping[tensor, Any], handle: Handle | None, workspace: Any
    ) -> dict[tensor, Tensor]:
        """Results for values, in new tensors but for those in ``outs``. Sizes may be others than those recorded, as far
        as the graph holds for them."""
        device = self._running_on({**values, **outs}, handle)
        with on_stream_of(self._handle if handle is None else handle, device), torch.no_grad():
            lowering = self._translation(self._numbers(values), entry=self._planned("a call")[self._selected])
            given = {}
            for one, place in lowering.inputs.items():
                data, dtype = self._given(values, one), ALL_DTYPES[place.dtype]
                given[place] = (
                    buffers.scalar(data, one.get_name(), place.shape, dtype, device)
                    if one.get_is_pass_by_value()
                    else buffers.typed(data, one.get_name(), dtype)
                )
            into = {lowering.outputs[one]: buffers.typed(data, one.get_name(), None) for one, data in outs.items()}
            space = self._workspace(workspace, self._selected, {}, device)
            made = lowering.graph.execute(given, into or None, space)
            return {one: made[place.name] for one, place in lowering.outputs.items()}

    def _given(self, pack: Mapping[tensor, Any], one: tensor) -> Any:
        if pack.get(one) is None:
            raise ValueError(f"there is no buffer for tensor {one.get_name()!r} with uid {one.get_uid()}; wanted one")
        return pack[one]

    def _numbers(self, pack: Mapping[tensor, Any]) -> dict[int, float]:
        """Values of what is part of a translation."""
        return {
            one.get_uid(): float(buffers.number(self._given(pack, one), one.get_name()))
            for one in self._translation().baked
        }

    def _workspace(self, given: Any, index: int, sizes: Mapping[int, Any], device: torch.device) -> Tensor | None:
        """The caller's workspace as bytes. It is of the device that the graph was planned for; on another one, which
        needs another amount, torch's allocator is asked."""
        if given is None or device.type != self._device.type:
            return None
        need = self._bytes(index, sizes)
        if need == 0:
            return None
        if isinstance(given, int):
            return buffers.tensor_at(given, (need,), (1,), torch.uint8, device)
        data = given if isinstance(given, Tensor) else torch.from_dlpack(given)
        if not data.is_contiguous():
            raise ValueError(f"workspace has sizes {tuple(data.shape)} and strides {data.stride()}; wanted no gaps")
        return data.detach().reshape(-1).view(torch.uint8)

    def _translation(
        self,
        numbers: Mapping[int, float] | None = None,
        sizes: Mapping[int, Any] | None = None,
        entry: Entry | None = None,
    ) -> Lowering:
        """The graph for these numbers and sizes, using this plan; the last few are kept."""
        key = tuple(sorted((numbers or {}).items())), tuple(sorted((sizes or {}).items())), entry and entry.place
        found = self._lowered.pop(key, None)
        if found is None:
            found = Lowering(self.name, self.get_outputs(), self._rules(numbers, sizes))
            # Plans were ranked for the sizes that were recorded; others are planned by themselves.
            if entry is not None and entry.place and not sizes:
                found.graph.choose(entry.place, self._device)
        while len(self._lowered) >= _MOST_TRANSLATIONS:
            self._lowered.pop(next(iter(self._lowered)))
        self._lowered[key] = found
        return found

    # -- CUDA graphs ------------------------------------------------------------------------------------------------

    def populate_cuda_graph(self, handle: Handle | None, variant_pack: Any, workspace: Any, cuda_graph: Any) -> None:
        """Add the kernels of the built plan to a CUDA graph, an address, behind nothing. Buffers have to stay where
        they are for as long as it is launched."""
        launch, kept = self._recordable("populate_cuda_graph", handle, variant_pack, workspace)
        cuda_graphs.populate(int(cuda_graph), launch)
        self._kept[int(cuda_graph)] = kept

    def update_cuda_graph(self, handle: Handle | None, variant_pack: Any, workspace: Any, cuda_graph: Any) -> None:
        """Have the kernels of a CUDA graph that :meth:`populate_cuda_graph` filled, or of a copy of it, use other
        buffers."""
        launch, kept = self._recordable("update_cuda_graph", handle, variant_pack, workspace)
        cuda_graphs.update(int(cuda_graph), launch)
        self._kept[int(cuda_graph)] = kept

    def _recordable(
        self, what: str, handle: Handle | None, variant_pack: Any, workspace: Any
    ) -> tuple[Callable[[], None], Any]:
        """What launches the kernels, and the tensors that have to outlive it."""
        if not self._built:
            raise RuntimeError(f"{what}: graph {self.name!r} is not built; wanted build_plans() before")
        pack = self._pack(variant_pack, None)
        device = self._running_on(pack, handle)
        if device.type != "cuda":
            raise cudnnGraphNotSupportedError(f"{what}: the buffers are on {device}; CUDA graphs are of CUDA devices")
        need = self.get_workspace_size()
        if workspace is None and need:
            raise ValueError(f"{what}: workspace is None; wanted {need} bytes, which have to stay where they are")
        pool = torch.cuda.MemPool()  # what is allocated on the way stays with the recording, and is nobody else's
        with torch.no_grad():
            compute = self._prepared(pack, workspace, self._selected, {}, device)
        torch.cuda.synchronize(device)  # numbers that were passed by value have arrived

        def launch() -> None:
            with torch.no_grad(), torch.cuda.use_mem_pool(pool):
                compute()

        return launch, (compute, workspace, pool)

    # -- as bytes ---------------------------------------------------------------------------------------------------

    def serialize(self, *, as_bytes: bool = False, include_kernels: bool = True) -> list[int] | bytes:
        """The graph and the plan it runs with, as a list of byte values or as bytes. Kernels are kept elsewhere, in the
        cache of all that openconv compiles."""
        data = serialize.to_bytes(self)
        return data if as_bytes else list(data)

    def deserialize(self, *args: Any, enforce_precompiled: bool = False, **kwargs: Any) -> None:
        """Become the graph of :meth:`serialize`: ``deserialize(data)`` or ``deserialize(handle, data)``."""
        given = [*args, *(kwargs.pop(name) for name in ("handle_", "pyobj") if name in kwargs)]
        if kwargs or not 1 <= len(given) <= 3:
            raise TypeError(
                f"deserialize was given {len(given)} arguments and {sorted(kwargs)}; wanted (data) or (handle, data)"
            )
        handles = [each for each in given[:2] if isinstance(each, Handle) or each is None]
        data = next((each for each in given if isinstance(each, bytes | bytearray | str | list | tuple)), None)
        if data is None:
            raise TypeError("deserialize was given no data; wanted what serialize() returns")
        if self._nodes:
            raise RuntimeError(f"deserialize: graph {self.name!r} has operations; wanted an empty one")
        self._handle = next(iter(handles), None) or self._handle
        serialize.from_bytes(self, data)

    def key(self) -> int:
        """A number that graphs share which compute the same in the same way."""
        text = json.dumps(serialize.to_data(self), sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _overrides(uids: Any, shapes: Any, strides: Any) -> dict[int, tuple[tuple[int, ...], tuple[int, ...] | None]]:
    """Sizes and strides by uid, from the three lists of a call."""
    if not uids:
        return {}
    shapes, strides = shapes or [], strides or []
    if not len(uids) == len(shapes) == len(strides):
        raise ValueError(f"override_uids, override_shapes and override_strides have {len(uids)}, {len(shapes)} and "
                         f"{len(strides)} entries; wanted as many of each")  # fmt: skip
    return {
        uid: (tuple(dim), tuple(step) if step else None) for uid, dim, step in zip(uids, shapes, strides, strict=True)
    }
