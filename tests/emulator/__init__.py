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
from openconv.cuda.launch import TensorMap

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
    "common/bulk.cuh",
    "common/bulk_store.cuh",
    "common/bulk_ring.cuh",
)
"""Files of PTX instructions, for which host.h has functions of its own."""


_FLAGS = (
    "-std=c++17", "-O1", "-w", "-fpermissive", "-shared", "-fPIC", "-fno-gnu-unique", "-fvisibility=hidden",
    "-U_FORTIFY_SOURCE",  # it takes a jump to another stack for an error
)  # fmt: skip


@functools.cache
def compiled(source: jit.Source, name: str, arch: int = 900) -> ctypes.CDLL:
    """The kernel and a loop over its blocks as a shared library."""
    generated = {"traits": source.traits} | dict.fromkeys(REPLACED, "")
    text = jit._inlined(jit.KERNELS / source.file, generated, set())
    text = re.sub(r"^#pragma unroll.*$", "", text, flags=re.MULTILINE)
    whole = f"""{text}
#line 1 "emulated"
static void body(const void* params) {{ {name}(*static_cast<const Params*>(params)); }}
extern "C" __attribute__((visibility("default"))) int params_size() {{ return sizeof(Params); }}
extern "C" __attribute__((visibility("default")))
bool run(const unsigned* grid, const unsigned* block, const void* params, unsigned shared) {{
    emulator::mark_behind(shared);
    emulator::body = body;
    emulator::given = params;
    gridDim = {{grid[0], grid[1], grid[2]}};
    blockDim = {{block[0], block[1], block[2]}};
    for (unsigned z = 0; z < grid[2]; ++z)
        for (unsigned y = 0; y < grid[1]; ++y)
            for (unsigned x = 0; x < grid[0]; ++x) {{
                blockIdx = {{x, y, z}};
                emulator::run_block();
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


class EmulatedLaunch:
    """Takes the place of :class:`openconv.cuda.launch.Launch`."""

    def __init__(
        self, source: jit.Source, name: str, device: object, grid: Sequence[int], block: Sequence[int], params: bytes,
        shared: int = 0, follows: bool = False, maps: Sequence[TensorMap] = (),
    ) -> None:  # fmt: skip
        self._library = compiled(source, name)
        self._library.run.restype = ctypes.c_bool
        self._name, self._shared, self._maps = name, shared, maps
        if maps:
            params += bytes(-len(params) % 64 + 128 * len(maps))
        wanted = self._library.params_size()
        assert -(-len(params) // 8) * 8 == wanted, f"{name}: Params has {wanted} bytes, {len(params)} are packed"
        self._params = bytearray(params)
        three = ctypes.c_uint * 3
        self._grid, self._block = three(*(*grid, 1, 1)[:3]), three(*(*block, 1, 1)[:3])

    def __call__(self, *pointers: int) -> None:
        for at, pointer in enumerate(pointers):
            self._params[8 * at : 8 * at + 8] = pointer.to_bytes(8, "little")
        for at, each in enumerate(self._maps):
            axes = len(each.sizes)
            filled = [(*values, *[0] * (most - len(values))) for values, most in (
                (each.sizes, 5), (each.strides, 4), (each.box, 5))]  # fmt: skip
            words = (pointers[each.pointer], axes | each.swizzle << 8, *filled[0], *filled[1], *filled[2])
            start = len(self._params) - 128 * (len(self._maps) - at)
            struct.pack_into("=16q", self._params, start, *words)
        buffer = ctypes.create_string_buffer(len(self._params) + 64)
        start = -ctypes.addressof(buffer) % 64  # maps are aligned to as much
        ctypes.memmove(ctypes.addressof(buffer) + start, bytes(self._params), len(self._params))
        within = self._library.run(self._grid, self._block, ctypes.byref(buffer, start), self._shared)
        assert within, f"{self._name} wrote behind the {self._shared} bytes of shared memory that it asked for"


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in which a result that is not written shows."""
    return torch.full(tuple(shape), float("nan") if dtype.is_floating_point else 113, dtype=dtype)
