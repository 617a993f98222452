"""Kernels from source to cubin: rendered, compiled by NVRTC at first use, kept on disk.

A kernel is a file of ``kernels/`` and a generated struct ``Traits``, which holds its types, its knobs and its epilogue.
Our own ``#include`` lines are replaced by the files' text before compiling, so that the text alone says what is
compiled. It is the key of the cache, with the options, the architecture and NVRTC's version. ``#line`` directives keep
each message at the kernel's own file and line.

An entry on disk is a SHA-256 digest and the cubin: one that does not match its digest is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from .. import storage

__all__ = ["CompileError", "Missing", "Source", "Usage", "cache_folder", "compiles", "cubin", "kernel", "usage"]

KERNELS = Path(__file__).parent / "kernels"
_INCLUDE = re.compile(r'^[ \t]*#include "([^"]+)"[^\n]*$', re.MULTILINE)
_MOST_BYTES = 1 << 30
_lock = threading.Lock()
_DIGEST = 32


class CompileError(RuntimeError):
    """A kernel does not compile: NVRTC's messages, at the kernel's own file and line."""


class Missing(RuntimeError):
    """What compiling needs is not installed; the text says what and how to get it."""


@dataclass(frozen=True)
class Source:
    """A kernel file and the traits to compile it with: C++ text that goes where the file includes ``"traits"``. Unless
    it ``may_spill``, all of its kernels promise to keep their values in registers."""

    file: str
    traits: str = ""
    may_spill: bool = False

    @cached_property
    def text(self) -> str:
        """All of it, with our own includes in place."""
        return _inlined(KERNELS / self.file, {"traits": self.traits}, set())


def _inlined(path: Path, generated: Mapping[str, str], seen: set[str]) -> str:
    """The text of a file with our own includes replaced, each at its first use."""
    name = path.relative_to(KERNELS).as_posix()
    seen.add(name)

    def insert(found: re.Match[str]) -> str:
        wanted = found.group(1)
        after = text.count("\n", 0, found.end()) + 2
        if wanted in generated:
            body, at = generated[wanted], f"{wanted} of {name}"
        elif wanted in seen:
            return ""
        else:
            body, at = _inlined(KERNELS / wanted, generated, seen), ""
        start = f'#line 1 "{at}"\n' if at else ""
        return f'{start}{body}\n#line {after} "{name}"'

    text = path.read_text()
    return f'#line 1 "{name}"\n' + _INCLUDE.sub(insert, text)


# -- compiled -------------------------------------------------------------------------------------------------------


def cubin(source: Source, arch: str) -> bytes:
    """The machine code for an architecture such as ``sm_90a``: from disk, or compiled and put there."""
    key = _key(source, arch)
    store = _store()
    if store is not None and (found := _read(store, key)) is not None:
        return found
    made, _ = _compile(source, arch)
    _keep(key, made)
    return made


def _keep(key: bytes, made: bytes) -> None:
    store = _store()
    if store is not None:
        with contextlib.suppress(OSError):  # a full or read-only disk costs the next process its time, no more
            store[key] = hashlib.sha256(made).digest() + made


def _read(store: Any, key: bytes) -> bytes | None:
    """An entry that is whole; one that is not is removed."""
    try:
        found = store.get(key)
        if found is None:
            return None
        if len(found) > _DIGEST and hashlib.sha256(found[_DIGEST:]).digest() == found[:_DIGEST]:
            return bytes(found[_DIGEST:])
        del store[key]
    except (OSError, KeyError):
        pass
    return None


def _compile(source: Source, arch: str, *, verbose: bool = False) -> tuple[bytes, str]:
    """The cubin, and what the assembler said."""
    log = io.StringIO()
    program = _cuda_core().Program(source.text, "c++", options=_options(source, arch, verbose))
    try:
        made = program.compile("cubin", logs=log)
    except Exception as error:  # cuda.core's own type of error is not public
        if "compilation log" not in str(error):
            raise
        messages = str(error).partition("compilation log:")[2].strip("\x00 \n")
        raise CompileError(f"{source.file} does not compile for {arch}:\n{messages}") from None
    return bytes(made.code), log.getvalue()


def compiles(arch: str) -> None:
    """Compile a kernel of a few lines, past the cache; raises what is wrong."""
    options = _cuda_core().ProgramOptions(arch=arch, std="c++17")
    text = 'extern "C" __global__ void trial(float* out) { out[threadIdx.x] = 2.0f * out[threadIdx.x]; }'
    _cuda_core().Program(text, "c++", options=options).compile("cubin")


def _options(source: Source, arch: str, verbose: bool = False) -> Any:
    options = _cuda_core().ProgramOptions
    return options(name=source.file, arch=arch, std="c++17", lineinfo=True, ptxas_options=["-v"] if verbose else None)


def _key(source: Source, arch: str) -> bytes:
    from cuda.core.utils import make_program_cache_key

    found: bytes = make_program_cache_key(
        code=source.text, code_type="c++", options=_options(source, arch), target_type="cubin",
        extra_digest=b"openconv: digest and cubin",
    )  # fmt: skip
    return found


@cache
def _cuda_core() -> Any:
    with _lock:  # threads that import it at once find it half imported
        try:
            return import_module("cuda.core")
        except ImportError as error:
            raise Missing(f"{error}; GPU kernels are compiled with cuda-core: pip install 'openconv[cuda]'") from None


# -- on disk --------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``cuda`` in openconv's cache directory."""
    return storage.cache_root() / "cuda"


_stores: dict[Path, Any] = {}


def _store() -> Any:
    """The cache on disk; None where there can be none, or it would be another user's."""
    folder = cache_folder()
    with _lock:
        if folder not in _stores:
            _stores[folder] = _opened(folder)
        return _stores[folder]


def _opened(folder: Path) -> Any:
    from cuda.core.utils import FileStreamProgramCache

    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if hasattr(os, "getuid"):
            seen = folder.stat()
            if seen.st_uid != os.getuid():
                return None
            if stat.S_IMODE(seen.st_mode) & 0o077:
                folder.chmod(0o700)
        return FileStreamProgramCache(folder, max_size_bytes=_MOST_BYTES)
    except OSError:
        return None


# -- loaded ---------------------------------------------------------------------------------------------------------


@cache
def kernel(source: Source, arch: str, name: str) -> Any:
    """The function of that name, loaded: a ``cuda.core.Kernel`` that any context of this architecture can launch."""
    core = _cuda_core()
    return core.ObjectCode.from_cubin(cubin(source, arch), name=source.file).get_kernel(name)


# -- what the compiler made of it -----------------------------------------------------------------------------------

_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Usage:
    """What one kernel takes: registers a thread, static shared bytes a block, and bytes of registers that are spilled
    to memory and read back."""

    name: str
    registers: int
    shared: int
    spills: int


def usage(source: Source, arch: str) -> list[Usage]:
    """Compile, whether or not the cache has it, put it there, and read what the assembler says of each kernel."""
    made, log = _compile(source, arch, verbose=True)
    _keep(_key(source, arch), made)
    found = []
    for entry in _ENTRY.finditer(log):
        shared = re.search(r"(\d+) bytes smem", entry["rest"])
        spills = int(entry["stores"]) + int(entry["loads"])
        found.append(Usage(entry["name"], int(entry["registers"]), int(shared[1]) if shared else 0, spills))
    return found
