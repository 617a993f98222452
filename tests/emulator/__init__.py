"""Run a kernel of openconv/cuda/kernels on the CPU, thread by thread, to check its arithmetic where there is no GPU."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from openconv.cuda import jit
from openconv.cuda.launch import TensorMap, WindowMap

HERE = Path(__file__).parent
REPLACED = (
    "common/convert.cuh",
    "common/async.cuh",
    "common/mma.cuh",
    "common/mma_types.cuh",
    "common/relu.cuh",
    "common/shared.cuh",
    "common/shared_boxes.cuh",
    "common/store_matrices.cuh",
    "common/wgmma.cuh",
    "common/wgmma_turned.cuh",
    "common/wgmma_batches.cuh",
    "common/bulk.cuh",
    "common/bulk_store.cuh",
    "common/bulk_ring.cuh",
    "common/bulk_windows.cuh",
    "common/bulk_cluster.cuh",
)
"""Files of PTX instructions, for which host.h has functions of its own."""


_FLAGS = (
    "-std=c++17", "-Og", "-w", "-fpermissive", "-shared", "-fPIC", "-fno-gnu-unique", "-fvisibility=hidden",
    "-U_FORTIFY_SOURCE",  # it takes a jump to another stack for an error
)  # fmt: skip


def _cluster(source: jit.Source) -> int:
    """The blocks of a cluster, along x: the constant ``cluster`` of a kernel's traits."""
    found = re.search(r"\bstatic constexpr int cluster = (\d+);", source.traits)
    return int(found[1]) if found else 1


@functools.cache
def compiled(source: jit.Source, name: str, arch: int = 900) -> ctypes.CDLL:
    """The kernel and a loop over its clusters as a shared library."""
    cluster = _cluster(source)
    assert 1 <= cluster <= 8, f"{name}: {cluster} blocks of a cluster; wanted 8 at most"
    generated = {"traits": source.traits} | dict.fromkeys(REPLACED, "")
    text = jit._inlined(jit.KERNELS / source.file, generated, set())
    text = re.sub(r"^#pragma unroll.*$", "", text, flags=re.MULTILINE)
    first, find = (f'#include "{HERE / "cluster.h"}"\n', "emulator::find_static();") if cluster > 1 else ("", "")
    whole = f"""{first}{text}
#line 1 "emulated"
static void body(const void* params) {{ {name}(*static_cast<const Params*>(params)); }}
extern "C" __attribute__((visibility("default"))) int params_size() {{ return sizeof(Params); }}
extern "C" __attribute__((visibility("default")))
bool run(const unsigned* grid, const unsigned* block, const void* params, unsigned shared) {{
    emulator::blocks = {cluster};
    {find}
    emulator::mark_behind(shared);
    emulator::body = body;
    emulator::given = params;
    gridDim = {{grid[0], grid[1], grid[2]}};
    blockDim = {{block[0], block[1], block[2]}};
    for (unsigned z = 0; z < grid[2]; ++z)
        for (unsigned y = 0; y < grid[1]; ++y)
            for (unsigned x = 0; x < grid[0]; x += {cluster}) {{
                blockIdx = {{x, y, z}};
                emulator::run_cluster(shared);
            }}
    std::vector<emulator::Fiber>().swap(emulator::fibers);  // stacks: 64 KB a thread, which other kernels can have
    return emulator::kept_behind(shared);
}}
"""
    header = _header(arch)
    library = _FOLDER / f"{_digest(whole, header.name)}.so"
    if not library.exists():
        _compile(library, "-include", str(header), f"-D__CUDA_ARCH__={arch}", text=whole)
    return ctypes.CDLL(str(library))


_FOLDER = Path(tempfile.gettempdir()) / "openconv-emulator"


@functools.cache
def _header(arch: int) -> Path:
    """host.h, and beside it what g++ makes of it beforehand: half of the time that a kernel takes to compile."""
    _FOLDER.mkdir(exist_ok=True)
    text = "".join(path.read_text() for path in sorted(HERE.glob("*.h")))
    header = _FOLDER / f"host-{_digest(text, str(HERE), str(arch))}.h"
    ready = header.with_suffix(".h.gch")
    if not ready.exists():
        _write(header, f'#include "{HERE / "host.h"}"\n')
        _compile(ready, "-x", "c++-header", str(header), f"-D__CUDA_ARCH__={arch}")
    return header


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]


def _write(path: Path, text: str) -> None:
    mine = path.with_suffix(f".{os.getpid()}")
    mine.write_text(text)
    mine.rename(path)


def _compile(made: Path, *arguments: str, text: str = "") -> None:
    """Run g++; several processes may make the same file, of which the last one stays."""
    mine = made.with_suffix(f".{os.getpid()}.part")
    source = ("-x", "c++", "-") if text else ()
    subprocess.run(["g++", *_FLAGS, *arguments, *source, "-o", str(mine)], input=text.encode() or None, check=True)
    mine.rename(made)


class _Layout(ctypes.Structure):
    """What a map says, as bulk.h reads it."""

    _fields_ = [
        ("address", ctypes.c_uint64), ("sizes", ctypes.c_int64 * 5), ("strides", ctypes.c_int64 * 5),
        ("box", ctypes.c_int * 5), ("lower", ctypes.c_int * 3), ("upper", ctypes.c_int * 3),
        ("steps", ctypes.c_int * 3), ("axes", ctypes.c_int), ("element", ctypes.c_int), ("swizzle", ctypes.c_int),
        ("windows", ctypes.c_int), ("rounds", ctypes.c_int),
    ]  # fmt: skip


_MAP_MARK = int.from_bytes(b"ensormap", "little")


def _layout(given: TensorMap | WindowMap) -> _Layout:
    """All but the address, held to what the driver takes."""
    axes, windows = len(given.sizes), isinstance(given, WindowMap)
    assert (3 if windows else 1) <= axes <= 5, f"{given}: {axes} axes"
    assert all(0 < size <= 1 << 32 for size in given.sizes), f"{given}: sizes"
    assert len(given.strides) == axes - 1, f"{given}: a stride for each axis but the first"
    assert all(0 <= stride < 1 << 40 and stride % 16 == 0 for stride in given.strides), (
        f"{given}: strides are not multiples of 16 bytes below 2**40"
    )
    assert given.element in (1, 2, 4), f"{given}: {given.element} bytes of an element"
    assert given.swizzle in (32, 64, 128), f"{given}: swizzle is {given.swizzle}"
    row = given.box[0] * given.element
    assert row % 16 == 0, f"{given}: {row} bytes of a box's row; wanted a multiple of 16"
    assert row <= given.swizzle, f"{given}: {row} bytes of a box's row; wanted as many as are swizzled at most"
    assert len(given.box) == (2 if windows else axes), f"{given}: a box of {len(given.box)} axes"
    most = (256, 1024) if windows else (256,) * axes
    assert all(0 < size <= limit for size, limit in zip(given.box, most, strict=True)), (
        f"{given}: a box of more than {most}"
    )
    assert given.element == 4 or not given.rounds, f"{given}: rounds elements of {given.element} bytes"
    layout = _Layout(axes=axes, element=given.element, swizzle=given.swizzle, windows=windows, rounds=given.rounds)
    layout.sizes[:axes], layout.strides[:axes] = given.sizes, (given.element, *given.strides)
    layout.box[: len(given.box)] = given.box
    if isinstance(given, WindowMap):
        spatial, far = axes - 2, {3: 1 << 15, 4: 1 << 7, 5: 1 << 4}[axes]
        assert len(given.lower) == len(given.upper) == len(given.steps) == spatial, f"{given}: {spatial} axes of images"
        assert all(-far <= corner < far for corner in (*given.lower, *given.upper)), (
            f"{given}: corners are not from {-far} to {far - 1}"
        )
        assert all(1 <= step <= 8 for step in given.steps), f"{given}: steps are not from 1 to 8"
        layout.lower[:spatial], layout.upper[:spatial] = given.lower, given.upper
        layout.steps[:spatial] = given.steps
    return layout


class EmulatedLaunch:
    """Takes the place of :class:`openconv.cuda.launch.Launch`."""

    def __init__(
        self, source: jit.Source, name: str, device: object, grid: Sequence[int], block: Sequence[int], params: bytes,
        shared: int = 0, follows: bool = False, maps: Sequence[TensorMap | WindowMap] = (),
        cluster: int | None = None,
    ) -> None:  # fmt: skip
        self._library = compiled(source, name)
        self._library.run.restype = ctypes.c_bool
        self._name, self._shared, self._maps = name, shared, [(each, _layout(each)) for each in maps]
        if maps:
            params += bytes(-len(params) % 64 + 128 * len(maps))
        wanted = self._library.params_size()
        assert -(-len(params) // 8) * 8 == wanted, f"{name}: Params has {wanted} bytes, {len(params)} are packed"
        self._params = bytearray(params)
        three = ctypes.c_uint * 3
        given, cluster = cluster, _cluster(source)
        assert given in (None, cluster), f"{name}: launched in clusters of {given}, compiled for {cluster}"
        assert grid[0] % cluster == 0, f"{name}: a grid of {grid[0]} blocks is not whole clusters of {cluster}"
        self._grid, self._block = three(*(*grid, 1, 1)[:3]), three(*(*block, 1, 1)[:3])

    def __call__(self, *pointers: int) -> None:
        for at, pointer in enumerate(pointers):
            self._params[8 * at : 8 * at + 8] = pointer.to_bytes(8, "little")
        for at, (each, layout) in enumerate(self._maps):
            layout.address = pointers[each.pointer]
            assert layout.address % 16 == 0, f"{each}: its first byte is not at a multiple of 16"
            start = len(self._params) - 128 * (len(self._maps) - at)
            struct.pack_into("=2Q", self._params, start, ctypes.addressof(layout), _MAP_MARK)
        buffer = ctypes.create_string_buffer(len(self._params) + 64)
        start = -ctypes.addressof(buffer) % 64  # maps are aligned to as much
        ctypes.memmove(ctypes.addressof(buffer) + start, bytes(self._params), len(self._params))
        within = self._library.run(self._grid, self._block, ctypes.byref(buffer, start), self._shared)
        assert within, f"{self._name} wrote behind the {self._shared} bytes of shared memory that it asked for"


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in which a result that is not written shows."""
    return torch.full(tuple(shape), float("nan") if dtype.is_floating_point else 113, dtype=dtype)
