"""Compile, cache and launch CPU kernels; what the machine is.

A kernel is a single-program, multiple-data function `void f(int64 block)`.  Every thread of a team runs the same
function on the same block of int64 words:

    word 0    ticket counter: the next tile to be computed
    word 1    counter of the threads that have entered: the index of a thread's scratch memory
    word 2..  the arguments: sizes, and addresses of tensors

Threads draw tiles from word 0 until none is left.  Which thread computes a tile, and how many threads there really
are, never shows in the result: an OpenMP runtime that grants fewer threads than asked for is no special case.

The team is the OpenMP pool that torch itself runs on, entered through `GOMP_parallel`: 1 to 3 us a launch while the
pool is hot.  A second pool beside it would make both spin against each other (measured: 1.6 times slower).  Where
torch has no such library, a Python thread pool runs the same machine code.

This module imports Numba and torch only inside the functions that need them, so that engines may ask for `cpu_info()`
when they predict costs.  Modules that hold kernels import Numba at their top and are imported by an engine's `build`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import json
import os
import platform
import re
import sys
import types
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import write_atomic

__all__ = [
    "ARGUMENTS_OFFSET",
    "THREADS_OFFSET",
    "TICKET_OFFSET",
    "CpuInfo",
    "Kernel",
    "cache_directory",
    "cpu_info",
    "kernel",
    "launch",
    "num_threads",
    "numbering",
]

TICKET_OFFSET = 0
THREADS_OFFSET = 8
ARGUMENTS_OFFSET = 16


# ---- compile and cache --------------------------------------------------------------------------------------


class Kernel:
    """Machine code of `void f(int64 block)`: an address to hand to a team, and a call for the present thread."""

    __slots__ = ("_function", "_library", "address", "call", "name")

    def __init__(self, function: Callable[[int], None]) -> None:
        self.name = function.__qualname__.replace(".<locals>", "")
        self._function = function
        self._library, self.address = _load_or_compile(function)  # the library owns the memory of the machine code
        self.call: Callable[[int], None] = ctypes.CFUNCTYPE(None, ctypes.c_int64)(self.address)

    def __repr__(self) -> str:
        return f"Kernel({self.name!r})"

    def assembly(self) -> str:
        """The assembly text, for reading the inner loop and for tests that look for spills; compiles anew."""
        from .compiler import assembly

        return assembly(self._function)


def kernel(function: Callable[[int], None]) -> Kernel:
    """Compile `function(block: int64) -> None`, or load it from the cache on disk.

    Usually decorates the inner function of a factory whose parameters are the constants of the kernel:

        @functools.cache
        def scale_kernel(T: type, L: int) -> Kernel:
            @kernel
            def scale(block): ...
            return scale

    Closure variables become compile-time constants and part of the cache key, so they must be plain values (bool, int,
    float, str, NumPy scalar classes, tuples of those) or `simd.inline` helpers that close over such values.  Floating
    point is IEEE: no reassociation, NaN and infinity propagate; only a product and a sum written as one expression may
    contract.
    """
    return Kernel(function)


def _load_or_compile(function: Callable[[int], None]) -> tuple[Any, int]:
    """The library that holds the machine code, and the kernel's address in it."""
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    with global_compiler_lock:
        codegen = cpu_target.target_context.codegen()
        path = _cache_path(function, codegen.magic_tuple())
        # Kernels of one name differ in their constants, and all of a process lie in one table of symbols.
        symbol = path.stem.replace("-", "_")
        code = _read_code(path)
        if code is None:
            code = _compile(function, symbol)
            _save(path, code)
        library = codegen.unserialize_library((symbol, "object", (code, _no_bitcode())))
        return library, codegen._engine.get_function_address(symbol)


def _compile(function: Callable[[int], None], symbol: str) -> bytes:
    from .compiler import machine_code

    return machine_code(function, symbol)


@functools.cache
def _no_bitcode() -> bytes:
    """What Numba wants beside object code, for inlining into others: nothing is."""
    from llvmlite import binding

    bitcode: bytes = binding.parse_assembly("").as_bitcode()
    return bitcode


def cache_directory() -> Path:
    """Where compiled CPU kernels are kept: $OPENCONV_CACHE_DIR/cpu, or openconv/cpu in the user's cache directory."""
    root = os.environ.get("OPENCONV_CACHE_DIR")
    if root:
        return Path(root) / "cpu"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "openconv" / "cpu"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "openconv" / "cpu"


# One file per compiled kernel, named by a digest of everything that shapes its machine code.  Numba's own cache is not
# used, for three reasons.  Its key does not see edits in imported helper files; this one holds the text of every
# project module that the kernel's module reaches.  It keeps one index per function with numbered data files, which two
# processes can interleave so that a key points at the other's code; a file that is named by its key and moved into
# place cannot.  And it pickles; here a line of JSON stands before the object code.  A file that is damaged or somebody
# else's is not used.  Old files stay until the directory is deleted, which is always safe.


def _cache_path(function: Callable[..., Any], target: Any) -> Path:
    import llvmlite
    import numba

    parts: list[Any] = [numba.__version__, llvmlite.__version__, sys.version_info[:2], target]
    parts += [function.__qualname__, function.__code__.co_firstlineno]
    parts += sorted(_constants(function).items())
    parts += [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in _sources(function)]
    parts.append(os.environ.get("OPENCONV_LANE_BYTES"))
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    return cache_directory() / f"{function.__name__}-{digest}.bin"


def _read_code(path: Path) -> bytes | None:
    """What :func:`_save` wrote, or None if there is nothing to trust."""
    try:
        owner, content = path.stat().st_uid, path.read_bytes()
        head, _, code = content.partition(b"\n")
        foreign = hasattr(os, "getuid") and owner != os.getuid()
        if foreign or hashlib.sha256(code).hexdigest() != json.loads(head)["digest"]:
            return None
        return code
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _save(path: Path, code: bytes) -> None:
    head = {"digest": hashlib.sha256(code).hexdigest()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, json.dumps(head).encode() + b"\n" + code)
    except OSError:
        return  # a read-only home: the kernel works, and is compiled again next time


def _constants(function: Callable[..., Any]) -> dict[str, str]:
    """The closure variables of a kernel, printed; refuses any whose print would not say all that it is."""
    constants = inspect.getclosurevars(function).nonlocals
    for name, value in constants.items():
        if _print(value) is None:
            raise TypeError(
                f"kernel {function.__qualname__} closes over {name}, a {type(value).__name__}; closure variables are "
                "compile-time constants and must be plain values or helpers made from plain values"
            )
    return {name: str(_print(value)) for name, value in constants.items()}


def _print(value: Any) -> str | None:
    """A text that is equal for equal constants in every process, or None where there is no such text."""
    import numpy as np

    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, type) and issubclass(value, np.generic):
        return value.__name__
    if isinstance(value, tuple):
        items = [_print(item) for item in value]
        return None if None in items else f"({', '.join(map(str, items))})"
    if callable(helper := getattr(value, "py_func", None)):  # what simd.inline made of a function
        return f"{helper.__module__}.{helper.__qualname__}:{helper.__code__.co_firstlineno}{_constants(helper)}"
    return None


def _sources(function: Callable[..., Any]) -> list[Path]:
    """The compiler, the kernel's own file and every openconv file whose functions its module can reach, in a fixed
    order."""

    def reached(module: types.ModuleType) -> Iterator[types.ModuleType]:
        for value in list(vars(module).values()):
            name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            if isinstance(name, str) and name.startswith("openconv.") and name in sys.modules:
                yield sys.modules[name]

    pending = [sys.modules[function.__module__]]
    seen = {f"{__package__}.compiler": Path(__file__).with_name("compiler.py")}
    while pending:
        module = pending.pop()
        if module.__name__ not in seen and (file := getattr(module, "__file__", None)):
            seen[module.__name__] = Path(file)
            pending += reached(module)
    return [seen[name] for name in sorted(seen)]


# ---- launch -------------------------------------------------------------------------------------------------


def num_threads() -> int:
    """How many threads a kernel may use: torch's own setting."""
    import torch

    return torch.get_num_threads()


def launch(kernel: Kernel, args: Sequence[int], threads: int) -> None:
    """Run `kernel` on a team of at most `threads` threads and wait for it.

    The GIL is released meanwhile.  Each call packs its own block, so calls from several Python threads do not meet.
    """
    block = array("q", (0, 0, *args))
    address = block.buffer_info()[0]
    if threads <= 1:
        kernel.call(address)
    else:
        team = _team or _find_team()
        team(kernel.address, address, threads, 0)


def numbering(threads: int) -> int:
    """The address of a function that tells a thread of such a team its number, the same in every launch; 0 for none.

    The order in which threads enter is another each time. A thread that writes where it wrote before finds the memory
    in its own cache; what another core wrote last takes longer to get than from memory (`simd.thread_number`).
    """
    if threads <= 1 or (_team or _find_team()) is _python_team:
        return 0
    return _number_address()


@functools.cache
def _number_address() -> int:
    try:
        return ctypes.cast(_torch_library().omp_get_thread_num, ctypes.c_void_p).value or 0
    except (AttributeError, OSError):
        return 0


Team = Callable[[int, int, int, int], Any]
_team: Team | None = None


def _find_team() -> Team:
    global _team
    _team = _openmp_team() or _python_team
    return _team


def _openmp_team() -> Team | None:
    """`GOMP_parallel(function, data, threads, flags)` of the OpenMP library that torch is linked to, or None.

    Looking the name up through libtorch_cpu searches that library's own dependencies, so the answer is the very
    instance torch runs on, even if other packages have loaded copies of libgomp.  libiomp5 offers the name as well.
    """
    try:
        function = _torch_library().GOMP_parallel
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None
    return function


def _torch_library() -> ctypes.CDLL:
    import torch

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)


_pool: ThreadPoolExecutor | None = None
_CALL = ctypes.CFUNCTYPE(None, ctypes.c_int64)


def _python_team(function: int, data: int, threads: int, flags: int) -> None:
    """What GOMP_parallel does, with Python threads: the caller works along and then waits for the others."""
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="openconv")
    call = _CALL(function)
    helpers = [_pool.submit(call, data) for _ in range(threads - 1)]
    call(data)
    wait(helpers)


def _forget_pool() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)  # threads do not survive a fork


# ---- machine ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CpuInfo:
    """What the machine is.  `vector_bytes` is the widest register (64: AVX-512, 32: AVX2, 16: SSE or NEON)."""

    model: str
    cores: int
    vector_bytes: int
    l1_bytes: int
    l2_bytes: int


@functools.cache
def cpu_info() -> CpuInfo:
    """Read once from Linux's /proc and /sys; elsewhere the figures of a common desktop core."""
    text = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", text, re.MULTILINE)
    names = set(flags.group(1).split()) if flags else set()
    is_arm = platform.machine() in ("aarch64", "arm64")
    return CpuInfo(
        model=model.group(1).strip() if model else platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        vector_bytes=64 if "avx512f" in names else 16 if is_arm or (names and "avx2" not in names) else 32,
        l1_bytes=_cache_bytes(1) or 32 << 10,
        l2_bytes=_cache_bytes(2) or 512 << 10,
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _cache_bytes(level: int) -> int:
    """Size of the data cache of core 0 at a level, or 0 where the system does not say."""
    for index in range(8):
        folder = f"/sys/devices/system/cpu/cpu0/cache/index{index}"
        if _read(f"{folder}/level").strip() != str(level) or _read(f"{folder}/type").strip() == "Instruction":
            continue
        size = re.fullmatch(r"(\d+)([KM]?)", _read(f"{folder}/size").strip())
        if size:
            return int(size.group(1)) * {"": 1, "K": 1 << 10, "M": 1 << 20}[size.group(2)]
    return 0
