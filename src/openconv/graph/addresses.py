"""Addressed: the steps of a program on addresses, where a kernel needs nothing else of its tensors.

A tensor of torch costs the host more than the launch that fills it. A step that is one kernel on addresses is therefore
run without: what lies between such steps is never a tensor, but a place in one piece of memory, the arena, which is
allocated at each call and goes back to torch when the call returns. On its stream torch hands the memory on to what
is enqueued behind. Places whose lives do not meet overlap.

Other steps take tensors as ever. Where the two kinds meet, the memory is a tensor, and its address is noted when it is
made. A view of a tensor is its address and an offset; no kernel has it made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import itemgetter, or_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .compiled import Step

__all__ = ["Addressed", "Direct", "Memory", "View"]

Values = list[Any]
_Pick = Callable[[list[int]], tuple[Any, ...]]
_data_ptr = Tensor.data_ptr


@dataclass(frozen=True)
class Direct:
    """``call`` with the addresses of slots, or of several slots as one tuple, that are multiples of ``alignment``."""

    call: Callable[..., None]
    pointers: tuple[int | tuple[int, ...], ...]
    alignment: int

    @property
    def slots(self) -> list[int]:
        return [slot for each in self.pointers for slot in (each if isinstance(each, tuple) else (each,))]


@dataclass(frozen=True)
class View:
    """``view(value)``: other sizes and strides from the same address on, which are nothing to who has the address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __call__(self, value: Tensor) -> Tensor:
        return value.as_strided(self.shape, self.strides)


@dataclass(frozen=True)
class Memory:
    """What the slots of a program are.

    ``constants`` are always there; ``kept`` holds the slots that outlive a call or are not its own: inputs, outputs,
    what outputs are views of, and constants. ``views`` has the slot and the offset in bytes of what a view is of;
    ``makers`` what allocates a result. ``pieces`` are offset and size in a workspace of all that is not kept;
    ``place`` gives so much for some of it alone, and the bytes of all."""

    inputs: int
    outputs: Sequence[int]
    constants: Mapping[int, Tensor]
    kept: frozenset[int]
    views: Mapping[int, tuple[int, int]]
    makers: Mapping[int, Callable[[], Tensor]]
    pieces: Mapping[int, tuple[int, int]]
    place: Callable[[Iterable[int]], tuple[Mapping[int, tuple[int, int]], int]]
    allocate: Callable[[int], Callable[[], Tensor]]


class Addressed:
    """``run(values, addresses, workspace)``, with the addresses of inputs from ``of``."""

    def __init__(self, steps: Sequence[Step], memory: Memory) -> None:
        chosen = {at: direct for at, step in enumerate(steps) if (direct := _taken(step, memory)) is not None}
        touched = _tensors(steps, chosen, memory)
        written = [
            slot for at in chosen for slot in (*steps[at].fills, steps[at].workspace)
            if slot is not None and slot not in touched and slot not in memory.kept
        ]  # fmt: skip
        self.direct = len(chosen)
        self.pieces = {slot: piece for slot, piece in memory.pieces.items() if slot not in set(written)}
        """Of a workspace: those that are tensors."""
        places, self.bytes = memory.place(written)
        self._arena = memory.allocate(self.bytes)
        used = {slot for direct in chosen.values() for slot in direct.slots}
        inside = [(slot, *_origin(slot, memory.views)) for slot in sorted(used) if slot >= memory.inputs]
        inside = [each for each in inside if each[1] in places]
        # The list of addresses: inputs, what lies in the arena, all else.
        rest = sorted(used - {slot for slot, _, _ in inside} - set(range(memory.inputs)))
        order = [*range(memory.inputs), *(slot for slot, _, _ in inside), *rest]
        self._at = {slot: at for at, slot in enumerate(order)}
        self._in_arena = [places[origin][0] + offset for _, origin, offset in inside]
        self._in_workspace = [memory.pieces[origin][0] + offset for _, origin, offset in inside]
        self._rest, self._shifted, noted = self._others(rest, memory)
        self._check(chosen, memory)
        self._work = self._segments(steps, chosen, touched, noted, memory)

    def _others(
        self, rest: Sequence[int], memory: Memory
    ) -> tuple[list[int], list[tuple[int, int, int]], dict[int, list[tuple[int, int]]]]:
        """The addresses that are known by now, views of inputs, and of each tensor that is yet to be made the places of
        its address and of its views'."""
        known, shifted = [0] * len(rest), []
        noted: dict[int, list[tuple[int, int]]] = {}
        for at, slot in enumerate(rest):
            origin, offset = _origin(slot, memory.views)
            if origin in memory.constants:
                known[at] = memory.constants[origin].data_ptr() + offset
            elif origin < memory.inputs:
                shifted.append((self._at[slot], origin, offset))
            else:
                noted.setdefault(origin, []).append((self._at[slot], offset))
        return known, shifted, noted

    def _check(self, chosen: Mapping[int, Direct], memory: Memory) -> None:
        """Which inputs and outputs start at multiples of how many bytes."""
        self._multiple = max((direct.alignment for direct in chosen.values()), default=1)
        strict = {
            _origin(slot, memory.views)[0] for direct in chosen.values() if direct.alignment > 1
            for slot in direct.slots
        }  # fmt: skip
        inputs = sorted(slot for slot in strict if slot < memory.inputs)
        self._checked = None if len(inputs) == memory.inputs else _picker(tuple(inputs))
        self._outputs = sorted({slot for slot in strict if slot in memory.kept} - set(inputs) - set(memory.constants))

    def _segments(
        self, steps: Sequence[Step], chosen: Mapping[int, Direct], touched: set[int],
        noted: Mapping[int, list[tuple[int, int]]], memory: Memory,
    ) -> list[tuple[list[_Work], list[tuple[Callable[..., None], _Pick]]]]:  # fmt: skip
        """Work on tensors, then launches, and so on."""
        found: list[tuple[list[_Work], list[tuple[Callable[..., None], _Pick]]]] = [([], [])]
        multiple = self._multiple
        for at, step in enumerate(steps):
            drop = [slot for slot in step.drop if slot in touched]
            if at in chosen:
                for slot in step.fills:
                    if slot in noted or slot in touched or slot in memory.kept:
                        found[-1][0].append(_made(slot, memory.makers[slot], noted.get(slot, ())))
                direct = chosen[at]
                places = tuple(
                    tuple(self._at[slot] for slot in each) if isinstance(each, tuple) else self._at[each]
                    for each in direct.pointers
                )
                found[-1][1].append((direct.call, _picker(places)))
                if drop:
                    found.append(([_dropped(drop)], []))
            elif step.engine != "view" or step.fills[0] in touched:
                if found[-1][1]:
                    found.append(([], []))
                found[-1][0].append(_ran(step.run))
                for slot in step.fills:
                    if slot in noted:
                        found[-1][0].append(_seen(slot, noted[slot], multiple))
                if drop:
                    found[-1][0].append(_dropped(drop))
        return found

    def of(self, inputs: Sequence[Tensor], values: Values) -> list[int] | None:
        """The addresses of inputs; None where one, or an output that is given, does not start where kernels want it."""
        found = list(map(_data_ptr, inputs))
        checked = found if self._checked is None else self._checked(found)
        if reduce(or_, checked, 0) % self._multiple:
            return None
        for slot in self._outputs:
            if values[slot] is not None and values[slot].data_ptr() % self._multiple:
                return None
        return found

    def run(self, values: Values, inputs: list[int], workspace: int | None) -> bool:
        """Run all steps; False, before any of them, where there is no memory in one piece. ``workspace`` is an address,
        None to have it allocated."""
        if workspace is not None:
            addresses = [*inputs, *[workspace + offset for offset in self._in_workspace], *self._rest]
        elif self.bytes:
            try:
                arena = self._arena()
            except torch.OutOfMemoryError:
                return False
            base = arena.data_ptr()
            addresses = [*inputs, *[base + offset for offset in self._in_arena], *self._rest]
        else:
            addresses = [*inputs, *self._rest]
        for at, origin, offset in self._shifted:
            addresses[at] = addresses[origin] + offset
        for work, launches in self._work:
            for each in work:
                each(values, addresses)
            for call, pick in launches:
                call(*pick(addresses))
        return True


# -- which steps, which slots -----------------------------------------------------------------------------------------


def _origin(slot: int, views: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    """What a view is of in the end, and its offset in bytes."""
    offset = 0
    while slot in views:
        slot, more = views[slot]
        offset += more
    return slot, offset


def _taken(step: Step, memory: Memory) -> Direct | None:
    """The step on addresses, if what is known of them by now suits its kernel."""
    direct = step.direct
    if direct is None:
        return None
    for slot in direct.slots:
        origin, offset = _origin(slot, memory.views)
        held = memory.constants.get(origin)
        if (offset + (0 if held is None else held.data_ptr())) % direct.alignment:
            return None
    return direct


def _tensors(steps: Sequence[Step], chosen: Mapping[int, Direct], memory: Memory) -> set[int]:
    """Slots that are tensors: those of steps that take such, and outputs. A view is made for these alone."""
    touched = set(memory.outputs)
    for at in reversed(range(len(steps))):
        step = steps[at]
        if at in chosen or (step.engine == "view" and step.fills[0] not in touched):
            continue
        touched |= {*step.takes, *step.fills} | ({step.workspace} if step.workspace is not None else set())
    return touched


# -- work on tensors --------------------------------------------------------------------------------------------------

_Work = Callable[[Values, list[int]], None]


def _ran(run: Callable[[Values], None]) -> _Work:
    return lambda values, addresses: run(values)


def _made(slot: int, make: Callable[[], Tensor], places: Sequence[tuple[int, int]]) -> _Work:
    """A tensor for a result, unless it is there."""

    def work(values: Values, addresses: list[int]) -> None:
        value = values[slot]
        if value is None:
            value = values[slot] = make()
        start = value.data_ptr()
        for at, offset in places:
            addresses[at] = start + offset

    return work


def _seen(slot: int, places: Sequence[tuple[int, int]], multiple: int) -> _Work:
    """The address of a tensor that a step has made, copied where kernels want another start."""

    def work(values: Values, addresses: list[int]) -> None:
        value = values[slot]
        if value.data_ptr() % multiple:
            value = values[slot] = value.clone()
        start = value.data_ptr()
        for at, offset in places:
            addresses[at] = start + offset

    return work


def _dropped(slots: Sequence[int]) -> _Work:
    def work(values: Values, addresses: list[int]) -> None:
        for slot in slots:
            values[slot] = None

    return work


def _picker(places: tuple[int | tuple[int, ...], ...]) -> _Pick:
    """The addresses at these places, as a tuple; of a tuple of places, as a tuple in it."""
    flat = [place for place in places if isinstance(place, int)]
    if len(flat) == len(places):
        if len(flat) > 1:
            return itemgetter(*flat)
        return (lambda addresses: (addresses[flat[0]],)) if flat else (lambda addresses: ())
    parts = [_picker(place) if isinstance(place, tuple) else itemgetter(place) for place in places]
    if len(parts) == 3:
        one, two, three = parts
        return lambda addresses: (one(addresses), two(addresses), three(addresses))
    return lambda addresses: tuple([part(addresses) for part in parts])
