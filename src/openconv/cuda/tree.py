"""Trees on the GPU: pointwise expressions over tensors that broadcast, and reductions of such, each in one pass.

A kernel is generated for a :class:`~openconv.tree.Tree` and for how its tensors lie: how many axes are left once those
that lie alike are merged, and whether the elements of a unit are side by side. Sizes and strides are given at launch.
What is read and written bounds the time; ``kernels/tree.cu`` and ``kernels/tree_reduce.cu`` say who owns what.

A reduction has two stages unless its results alone fill the GPU: pieces of each, then ``kernels/tree_finish.cu`` joins
the pieces. The order of all sums depends on the sizes alone, and on no GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import ceil, gcd, prod

from ..device import Device
from ..epilogue import Const, Expr, Node, Operand
from ..problem import DTYPE_BYTES
from ..tree import Tree
from ..tree_layout import Axis, Layout, expressions, nodes
from . import jit, render
from .device import CudaDevice
from .divide import divisor
from .launch import Launch, pack

__all__ = ["TreeKernel", "seconds", "sources"]

_THREADS = 256
_BYTES = 16  # of one vector: the most that one instruction loads or stores
_IN_FLIGHT = 64  # bytes that a thread has under way where there is enough to do
_MOST_LOADED = 192  # bytes that a thread's loads may take of its registers
_BLOCKS = 528  # four for each of 132 multiprocessors, which fill them
_MOST_POINTERS = 31  # those of a launch
_MOST_SUMS = 32  # values that a thread of a reduction keeps
_LEAST_UNITS = 8  # of a thread, below which another piece saves less time than joining it takes
_TYPES = {name: name for name in ("f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8")} | {"bool": "flag"}
_SIZES = {name: DTYPE_BYTES.get(name, 1) for name in _TYPES}


class TreeKernel:
    """``kernel(inputs, results, reduced, workspace)``: a tree of tensors, all given as the addresses of their first
    elements.

    ``shape`` is the common shape; ``inputs`` and ``results`` are the strides of each tensor along all of its axes, in
    elements, 0 where an input broadcasts. Reductions run over ``axes``; a reduced tensor is contiguous over the axes
    that are kept, in their order. ``aligned``: all tensors start at multiples of 16 bytes."""

    def __init__(
        self, tree: Tree, device: CudaDevice, shape: Sequence[int], inputs: Sequence[Sequence[int]],
        results: Sequence[Sequence[int]], axes: Sequence[int] = (), aligned: bool = True,
    ) -> None:  # fmt: skip
        work = _Work(tree, shape, inputs, results, axes, aligned)
        self.workspace_bytes = work.workspace_bytes
        self._pass: Launch | None = None
        self._finish: Launch | None = None
        if work.passes:
            name = "tree_reduce" if work.tree.reductions else "tree"
            self._pass = Launch(work.source, name, device, work.grid, (_THREADS,), work.params)
        if work.finishes:
            grid, block = (ceil(work.results / 32), len(work.tree.reductions)), (32 * work.rows,)
            params = pack(1 + len(work.tree.reductions), (work.results, work.terms), (work.pieces,))
            self._finish = Launch(work.finish, "tree_finish", device, grid, block, params, follows=work.passes)
        self._parted = bool(work.tree.reductions)

    def __call__(
        self, inputs: Sequence[int], results: Sequence[int], reduced: Sequence[int] = (), workspace: int = 0
    ) -> None:  # fmt: skip
        if not self._parted:
            if self._pass is not None:
                self._pass(*inputs, *results, *reduced)
            return
        if self._pass is not None:
            self._pass(*inputs, *results, *reduced, workspace)
        if self._finish is not None:
            self._finish(workspace, *reduced)


def sources(
    tree: Tree, shape: Sequence[int], inputs: Sequence[Sequence[int]], results: Sequence[Sequence[int]],
    axes: Sequence[int] = (), aligned: bool = True,
) -> list[jit.Source]:  # fmt: skip
    """What :class:`TreeKernel` compiles."""
    work = _Work(tree, shape, inputs, results, axes, aligned)
    return [*([work.source] if work.passes else []), *([work.finish] if work.finishes else [])]


def seconds(
    tree: Tree, device: Device, shape: Sequence[int], inputs: Sequence[Sequence[int]],
    results: Sequence[Sequence[int]], axes: Sequence[int] = (),
) -> float:  # fmt: skip
    """Predicted time: all elements that there are, once, and what a launch takes."""
    work = _Work(tree, shape, inputs, results, axes, True)
    launches = work.passes + work.finishes
    return 2e-6 * launches + work.moved / (0.9 * device.bandwidth)


# -- how tensors lie ------------------------------------------------------------------------------------------------


def _two(value: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(0, value - 1).bit_length()


class _Work(Layout):
    """A tree and how its tensors lie, as the kernels take them."""

    def __init__(
        self, tree: Tree, shape: Sequence[int], inputs: Sequence[Sequence[int]], results: Sequence[Sequence[int]],
        axes: Sequence[int], aligned: bool,
    ) -> None:  # fmt: skip
        tensors = len(tree.inputs) + len(tree.results) + len(tree.reductions)
        if tensors + bool(tree.reductions) > _MOST_POINTERS:
            raise ValueError(f"a tree has {tensors} tensors; wanted at most {_MOST_POINTERS - bool(tree.reductions)}")
        super().__init__(tree, shape, inputs, results, axes, _TYPES)
        self.dtypes = (*self.tree.inputs, *(dtype for _, dtype in self.tree.results))
        self.aligned = aligned

    @property
    def passes(self) -> bool:
        """Whether there are elements to go through."""
        return not self.empty

    @property
    def finishes(self) -> bool:
        """Whether pieces are joined, or there are results of nothing."""
        return bool(self.tree.reductions) and self.results > 0 and (self.empty or self.pieces > 1)

    @cached_property
    def vector(self) -> int:
        """Elements of a unit."""
        *outer, inner = self.axes
        side = [at for at in range(self.tensors) if inner.strides[at] == 1]
        if not self.aligned or not side or inner.size == 1:
            return 1
        full = [at for at in range(self.tensors) if all(axis.strides[at] for axis in self.axes)]
        found = gcd(_BYTES // max(_SIZES[self.dtypes[at]] for at in full or side), inner.size)
        for at in side:
            found = gcd(found, *(axis.strides[at] for axis in outer))
        while len(self.tree.reductions) * found > _MOST_SUMS and found > 1:
            found //= 2
        return found

    @cached_property
    def classes(self) -> dict[tuple[int, ...], int]:
        """Strides along all axes, and the number of tensors' class that lie so."""
        found = dict.fromkeys(self._strides_of(at) for at in range(self.tensors))
        return {strides: number for number, strides in enumerate(found)}

    def _strides_of(self, tensor: int) -> tuple[int, ...]:
        return tuple(axis.strides[tensor] for axis in self.axes)

    @cached_property
    def kept(self) -> list[Axis]:
        return [axis for axis in self.axes if not axis.reduced] or [Axis(1, (0,) * (self.tensors + 1))]

    @cached_property
    def reduced(self) -> list[Axis]:
        return [axis for axis in self.axes if axis.reduced]

    @cached_property
    def across(self) -> bool:
        """Whether the elements of a unit are kept."""
        return not self.axes[-1].reduced

    @cached_property
    def kept_units(self) -> int:
        return prod(axis.size for axis in self.kept) // (self.vector if self.across else 1)

    @cached_property
    def reduced_units(self) -> int:
        return prod(axis.size for axis in self.reduced) // (1 if self.across else self.vector)

    @cached_property
    def columns(self) -> int:
        """Threads of a block's row in a reduction."""
        if not self.across:
            if self.reduced_units >= 1024 or (self.reduced_units >= 64 and self.kept_units < 8 * _BLOCKS):
                return _THREADS
            return min(32, _two(ceil(self.reduced_units / 4)))
        found = min(32, _two(self.kept_units))
        while found < min(_THREADS, self.kept_units) and 4 * (_THREADS // found) > self.reduced_units:
            found *= 2
        return found

    @cached_property
    def sharers(self) -> int:
        """Threads that go through one kept unit."""
        return _THREADS // self.columns if self.across else self.columns

    @cached_property
    def kept_blocks(self) -> int:
        return ceil(self.kept_units / (_THREADS // self.sharers))

    @cached_property
    def piece(self) -> int:
        """Reduced units of a piece."""
        if 2 * self.kept_blocks >= _BLOCKS:
            return self.reduced_units
        count = min(ceil(_BLOCKS / self.kept_blocks), self.reduced_units // (self.sharers * _LEAST_UNITS))
        return ceil(self.reduced_units / max(1, count) / self.sharers) * self.sharers

    @cached_property
    def pieces(self) -> int:
        return 0 if self.empty else ceil(self.reduced_units / self.piece)

    @property
    def workspace_bytes(self) -> int:
        if not self.finishes or self.empty:
            return 0
        return len(self.tree.reductions) * self.pieces * self.results * _SIZES[self.tree.compute]

    @cached_property
    def count(self) -> int:
        """Units of all."""
        return prod(axis.size for axis in self.axes) // self.vector

    @cached_property
    def fixed(self) -> list[int]:
        """Inputs that are the same for all units of a thread, and are read once."""
        across = self.reduced if self.tree.reductions else self.axes
        return [at for at in range(len(self.tree.inputs)) if not any(axis.strides[at] for axis in across)]

    @cached_property
    def units(self) -> int:
        """Units that a thread has under way: as many bytes as hide what memory takes, while all threads have some.
        Small inputs, which caches hold, count for the registers that they take."""
        loose = [at for at in range(len(self.tree.inputs)) if at not in self.fixed and self._lie(at) != "once"]
        size = {at: self.vector * _SIZES[self.dtypes[at]] for at in loose}
        every = prod(axis.size for axis in self.axes)
        stream, loaded = sum(size[at] for at in loose if 2 * self.distinct[at] > every), sum(size.values())
        found, most = 1, 8 if stream < 8 else 4
        shared = self.piece // self.sharers if self.tree.reductions else self.count // (_BLOCKS * _THREADS)
        while (
            2 * found <= min(most, shared) and 2 * found * stream <= _IN_FLIGHT and 2 * found * loaded <= _MOST_LOADED
        ):
            found *= 2
        return found

    @property
    def grid(self) -> tuple[int, ...]:
        if self.tree.reductions:
            return self.kept_blocks, self.pieces
        return (ceil(self.count / (_THREADS * self.units)),)

    # -- as C++ -----------------------------------------------------------------------------------------------------

    @property
    def params(self) -> bytes:
        step = [strides[-1] for strides in self.classes]
        if not self.tree.reductions:
            sizes, divisors = self._walked(self.axes, True)
            return pack(self.tensors, (self.count, *step, *sizes), divisors)
        kept, kept_divisors = self._walked(self.kept, self.across, True)
        reduced, reduced_divisors = self._walked(self.reduced, not self.across)
        apart = self.kept[-1].strides[-1] if self.across else 0
        wide = (self.kept_units, self.reduced_units, self.piece, self.results, self.terms, apart, *step)
        pointers = self.tensors + len(self.tree.reductions) + 1
        return pack(pointers, (*wide, *kept, *reduced), (*kept_divisors, *reduced_divisors))

    def _walked(self, axes: Sequence[Axis], unit: bool, places: bool = False) -> tuple[list[int], list[int]]:
        """``Strides`` of some axes, whose last is in units if ``unit``, and their divisors."""
        sizes = [axis.size for axis in axes]
        tensors = [next(at for at in range(self.tensors) if self._strides_of(at) == each) for each in self.classes]
        tensors += [self.tensors] * places
        rows = [[axis.strides[at] for at in tensors] for axis in axes]
        if unit:
            sizes[-1] //= self.vector
            rows[-1] = [stride * self.vector for stride in rows[-1]]
        divisors = [part for size in sizes for part in divisor(size if size < 2**31 else 1)]
        return [*sizes, *(stride for row in rows for stride in row)], divisors

    def _lie(self, tensor: int) -> str:
        stride = self.axes[-1].strides[tensor]
        if not stride and self.vector > 1:
            return "once"
        return "together" if self.vector == 1 or stride == 1 else "apart"

    @property
    def _constants(self) -> dict[str, int | bool | str]:
        last = [sum((axis.size - 1) * axis.strides[at] for axis in self.axes) for at in range(self.tensors + 1)]
        steps = max(self.kept_units, self.reduced_units) if self.tree.reductions else self.count
        return {
            "Sum": _sum_type(self.tree), "Index": "int" if max(last) < 2**31 else "i64",
            "Count": "int" if steps + 8 * _THREADS < 2**31 else "i64",
            "vector": self.vector, "units": self.units, "classes": len(self.classes),
        }  # fmt: skip

    @property
    def source(self) -> jit.Source:
        """The kernel that goes through all elements."""
        tree = self.tree
        constants = self._constants
        if not tree.reductions:
            constants |= {"axes": len(self.axes), "tensors": self.tensors}
            return jit.Source("tree.cu", _struct(constants, self._unit()))
        constants |= {
            "kept_axes": len(self.kept), "reduced_axes": len(self.reduced), "inputs": self.tensors,
            "reductions": len(tree.reductions), "across": self.across, "columns": self.columns,
            "direct": self.pieces == 1,
        }  # fmt: skip
        return jit.Source("tree_reduce.cu", _struct(constants, [*_reductions(tree), *self._unit()]))

    @property
    def rows(self) -> int:
        """Rows of a block that joins pieces."""
        return 32 if self.pieces > 32 else 8

    @property
    def finish(self) -> jit.Source:
        """The kernel that joins pieces."""
        constants: dict[str, int | bool | str] = {
            "Sum": _sum_type(self.tree), "rows": self.rows, "reductions": len(self.tree.reductions)
        }  # fmt: skip
        return jit.Source("tree_finish.cu", _struct(constants, _reductions(self.tree)))

    def _unit(self) -> list[str]:
        """``Fixed``, the inputs that are the same for all units of a thread, and ``Unit``, the others and the
        expressions."""
        tree, reduces = self.tree, bool(self.tree.reductions)
        used = {node for node in nodes(expressions(tree)) if isinstance(node, Operand)}
        fixed = [at for at in self.fixed if tree.leaves[at] in used]
        loose = [at for at, leaf in enumerate(tree.leaves) if leaf in used and at not in fixed]

        def values(at: int) -> str:
            lie = self._lie(at) if reduces or at not in fixed else "once"
            return f"Values<{_TYPES[self.dtypes[at]]}, vector, {lie}>"

        def where(at: int) -> str:
            number = self.classes[self._strides_of(at)]
            return f"pointers[{at}], at[{number}], step[{number}]"

        def reads(chosen: Sequence[int]) -> list[str]:
            return [f"        i{at}.read({where(at)});" for at in chosen]

        head = "    __device__ __forceinline__ void"
        places = "void* const* pointers, const Index* at, const i64* step"
        names = {leaf: f"{'fixed.' if at in fixed else ''}i{at}" for at, leaf in enumerate(tree.leaves)}
        lines, codes = _computed(expressions(tree), names)
        outputs = range(len(tree.inputs), self.tensors)
        for at, code in zip(outputs, codes, strict=False):
            lines.append(f"r{at}.set(i, {code});")
        for m, (each, code) in enumerate(zip(tree.reductions, codes[len(outputs) :], strict=True)):
            mode = f"reduce::{each.mode}"
            lines.append(f"sum[{m}][i] = {mode}::join(sum[{m}][i], {mode}::take({code}));")
        return [
            f"struct Fixed {{  // {tree}",
            *[f"    {values(at)} i{at};" for at in fixed],
            *(
                [f"{head} read({places}) {{", *reads(fixed), "    }"]
                if reduces
                else [
                    f"{head} read(void* const* pointers) {{",
                    *[f"        i{at}.read(pointers[{at}], 0, 0);" for at in fixed],
                    "    }",
                ]
            ),
            "};",
            "struct Unit {",
            *[f"    {values(at)} i{at};" for at in loose],
            f"{head} read({places}) {{",
            *reads(loose),
            "    }",
            f"{head} compute(const Fixed& fixed, {places}",
            f"{' ' * 12}{f', Sum (&sum)[{len(tree.reductions)}][vector]' if reduces else ''}) const {{",
            *[f"        {values(at)} r{at};" for at in outputs],
            "#pragma unroll",
            "        for (int i = 0; i < vector; ++i) {",
            *[f"            {line}" for line in lines],
            "        }",
            *[f"        r{at}.write({where(at)});" for at in outputs],
            "    }",
            "};",
        ]


def _sum_type(tree: Tree) -> str:
    return "double" if tree.compute == "f64" else "float"


def _struct(constants: Mapping[str, int | bool | str], members: Sequence[str]) -> str:
    lines = []
    for name, value in constants.items():
        if isinstance(value, str):
            lines.append(f"using {name} = {value};")
        else:
            kind, text = ("bool", str(value).lower()) if isinstance(value, bool) else ("int", str(value))
            lines.append(f"static constexpr {kind} {name} = {text};")
    body = "\n".join(f"    {line}" for line in (*lines, *members))
    return f"struct Traits {{\n{body}\n}};\n"


def _reductions(tree: Tree) -> list[str]:
    """The modes of reduction m, and how its results are stored. Every m is a constant once loops are unrolled."""
    modes = [f"reduce::{each.mode}" for each in tree.reductions]

    def chosen(head: str, bodies: Sequence[str]) -> list[str]:
        cases = [f"        if (m == {m}) return {body};" for m, body in enumerate(bodies[:-1])]
        return [f"    __device__ static __forceinline__ {head} {{", *cases, f"        return {bodies[-1]};", "    }"]

    stores = [
        f"void(static_cast<{kind}*>(to)[at] = Stored<{kind}, Sum>::of(value))"
        for kind in (_TYPES[each.dtype] for each in tree.reductions)
    ]
    return [
        "struct Reductions {",
        *chosen("Sum start(int m)", [f"{mode}::start<Sum>()" for mode in modes]),
        *chosen("Sum join(int m, Sum a, Sum b)", [f"{mode}::join(a, b)" for mode in modes]),
        *chosen("Sum finish(int m, Sum a, Sum terms)", [f"{mode}::finish(a, terms)" for mode in modes]),
        *chosen("void store(int m, void* to, i64 at, Sum value)", stores),
        "};",
    ]


def _computed(exprs: Sequence[Expr], names: Mapping[Operand, str]) -> tuple[list[str], list[str]]:
    """A line for each operation, however often its value is used, and the name of each expression's value."""
    values: dict[Expr, str] = {}
    lines: list[str] = []
    for node in nodes(exprs):
        if isinstance(node, Const):
            values[node] = render._number(node.value)
        elif isinstance(node, Operand):
            lines.append(f"const Sum v{len(lines)} = {names[node]}.template get<Sum>(i);  // {node}")
            values[node] = f"v{len(lines) - 1}"
        else:
            assert isinstance(node, Node)
            args = [values[arg] for arg in node.args] + [render._number(value) for value in node.params]
            kind = "<Sum>" if node.op in render._TEMPLATES else ""
            lines.append(f"const Sum v{len(lines)} = op::{node.op}{kind}({', '.join(args)});")
            values[node] = f"v{len(lines) - 1}"
    return lines, [values[expr] for expr in exprs]
