"""From kernel source to cubin: includes, messages, the cache on disk, and what the assembler says. No GPU is needed."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("cuda.core", reason="cuda-core is not installed")

from openconv.cuda import jit, render
from openconv.cuda.device import ARCHITECTURES, device_for
from openconv.cuda.naive import source
from openconv.problem import Problem

SOURCE = source(Problem.parse("fprop n1 c4 h8 w8 k4 r3 s3 f16 nhwc +bias+gelu"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENCONV_CACHE_DIR", str(tmp_path))
    return tmp_path / "cuda"


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1000]


def counted(monkeypatch) -> list[str]:
    """The compilations from now on."""
    seen: list[str] = []
    real = jit._compile

    def compile_(source, arch, **options):
        seen.append(arch)
        return real(source, arch, **options)

    monkeypatch.setattr(jit, "_compile", compile_)
    return seen


def test_a_kernel_is_compiled_once_and_then_read_from_disk(folder, monkeypatch):
    compiled = counted(monkeypatch)
    first = jit.cubin(SOURCE, "sm_90a")
    assert first[:4] == b"\x7fELF"
    assert jit.cubin(SOURCE, "sm_90a") == first
    assert compiled == ["sm_90a"]
    jit.cubin(SOURCE, "sm_80")
    other = source(Problem.parse("fprop n1 c4 h8 w8 k4 r3 s3 f16 nhwc +bias+relu"))
    jit.cubin(other, "sm_90a")
    assert compiled == ["sm_90a", "sm_80", "sm_90a"]


def test_sizes_do_not_make_another_kernel():
    assert source(Problem.parse("fprop n2 c8 h9 w7 k4 r5 s5 pad1 f16 nhwc +bias+gelu")) == SOURCE


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_damaged_entry_is_built_again(folder, monkeypatch, damage):
    good = jit.cubin(SOURCE, "sm_80")
    (entry,) = entries(folder)
    data = bytearray(entry.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    entry.write_bytes(b"" if damage == "empty" else bytes(data[: len(data) // 2] if damage == "truncate" else data))
    compiled = counted(monkeypatch)
    assert jit.cubin(SOURCE, "sm_80") == good
    assert compiled == ["sm_80"]
    assert jit.cubin(SOURCE, "sm_80") == good
    assert len(compiled) == 1
    (entry,) = entries(folder)
    stored = entry.read_bytes()
    assert hashlib.sha256(stored[32:]).digest() == stored[:32]


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="there are no such permissions here")
def test_the_folder_is_the_users_own(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    jit.cubin(SOURCE, "sm_80")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("OPENCONV_CACHE_DIR", str(blocked))
    assert jit.cubin(SOURCE, "sm_80")[:4] == b"\x7fELF"


def test_several_processes_fill_one_cache(folder):
    code = (
        "from openconv.cuda.naive import source; from openconv.cuda import jit; from openconv.problem import Problem;"
        "import hashlib; p = [Problem.parse(f'{d} n1 c4 h8 w8 k4 r3 s3 f16 nhwc') for d in ('fprop', 'dgrad')];"
        "print(*(hashlib.sha256(jit.cubin(source(q), 'sm_80')).hexdigest() for q in p))"
    )

    def run(_: int) -> str:
        return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    with ThreadPoolExecutor(3) as pool:
        seen = set(pool.map(run, range(3)))
    assert len(seen) == 1
    assert len(entries(folder)) == 2


def test_an_error_is_shown_at_the_kernels_own_line(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(jit, "KERNELS", tmp_path)
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "part.cuh").write_text("#pragma once\n__device__ int twice(int x) {\n    return 2 * y;\n}\n")
    (tmp_path / "bad.cu").write_text('// first\n#include "common/part.cuh"\n#include "traits"\n\nint* z = 1 +;\n')
    with pytest.raises(jit.CompileError) as raised:
        jit.cubin(jit.Source("bad.cu", "struct Traits {};\nint t = u;\n"), "sm_80")
    text = str(raised.value)
    assert text.startswith("bad.cu does not compile for sm_80:")
    for place in ("common/part.cuh(3)", "traits of bad.cu(2)", "bad.cu(5)"):
        assert place in text


def test_a_file_is_included_once(tmp_path, monkeypatch):
    monkeypatch.setattr(jit, "KERNELS", tmp_path)
    (tmp_path / "one.cuh").write_text("struct One {};\n")
    (tmp_path / "two.cuh").write_text('#include "one.cuh"\nstruct Two {};\n')
    (tmp_path / "both.cu").write_text('#include "one.cuh"\n#include "two.cuh"\nint x;\n')
    text = jit.Source("both.cu").text
    assert text.count("struct One") == 1
    assert text.endswith('#line 3 "both.cu"\nint x;\n')


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile_for_every_architecture(folder, arch):
    (found,) = jit.usage(SOURCE, arch)
    assert found.name == "naive"
    assert 16 <= found.registers <= 128
    assert found.spills == 0
    assert device_for(arch).capability == int(arch.strip("sm_a"))


def test_an_epilogue_is_rendered_with_its_own_constants():
    text = render.traits(Problem.parse("fprop n1 c4 h8 w8 k4 r3 s3 f32 nchw +leaky_relu(0.1)+clamp(-inf,6)"), {})
    assert "op::leaky_relu<Sum>(acc[i], Sum(0.1))" in text
    assert "Sum(6.0)" in text
    assert "using Index = int;" in text
    large = Problem.parse("fprop n64 c128 h513 w513 k128 r3 s3 stride2 bf16 nchw")
    assert "using Index = i64;" in render.traits(large, {})
