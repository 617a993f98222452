"""The vector type against NumPy, and launches: tickets, threads, the cache on disk, large pages."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openconv.cpu import runtime
from openconv.cpu.runtime import kernel, launch
from openconv.cpu.simd import (
    add,
    argument,
    atomic_add,
    broadcast,
    enter_share,
    fill,
    fma,
    horizontal_sum,
    inline,
    lanes,
    load,
    load_block,
    load_clipped,
    load_even,
    load_scalar,
    maximum,
    minimum,
    mul,
    next_of_static,
    next_tile,
    pack,
    store,
    store_block,
    store_clipped,
    store_first,
    store_scalar,
    sub,
    thread_index,
    transpose,
    unpack,
    zero,
)

DTYPES = (np.float32, np.float64)


# ---- vectors ------------------------------------------------------------------------------------------------


@functools.cache
def arithmetic_kernel(T):
    STEP = lanes(T) * np.dtype(T).itemsize

    @kernel
    def arithmetic(block):
        x, out = argument(block, 0), argument(block, 1)
        a, b, c = load(T, x), load(T, x + STEP), load(T, x + 2 * STEP)
        store(out, fma(a, b, c))
        store(out + STEP, add(a, b) + c)
        store(out + 2 * STEP, sub(a, b) - c)
        store(out + 3 * STEP, mul(a, b) * c)
        store(out + 4 * STEP, maximum(a, b))
        store(out + 5 * STEP, minimum(a, b))
        store(out + 6 * STEP, broadcast(load_scalar(T, x)))
        store(out + 7 * STEP, zero(T))
        store_scalar(out + 8 * STEP, horizontal_sum(a))

    return arithmetic


@pytest.mark.parametrize("T", DTYPES)
def test_arithmetic(T):
    L = lanes(T)
    x = np.random.default_rng(0).standard_normal((3, L)).astype(T)
    out = np.full((9, L), np.nan, T)
    launch(arithmetic_kernel(T), (x.ctypes.data, out.ctypes.data), 1)
    a, b, c = x
    exact = a.astype(np.longdouble) * b + c  # 64 bits of mantissa: exact enough to tell one rounding from two
    assert np.abs(out[0] - exact).max() <= np.spacing(np.abs(exact).astype(T)).max() * 0.5001
    for row, want in enumerate((a + b + c, a - b - c, a * b * c, np.maximum(a, b), np.minimum(a, b)), start=1):
        np.testing.assert_array_equal(out[row], want)
    assert (out[6] == a[0]).all()
    assert (out[7] == 0).all()
    halves = a.copy()
    while len(halves) > 1:
        halves = halves[: len(halves) // 2] + halves[len(halves) // 2 :]
    assert out[8, 0] == halves[0]


@pytest.mark.parametrize("T", DTYPES)
def test_nan_and_infinity_travel(T):
    L = lanes(T)
    x = np.ones((3, L), T)
    x[0, 0], x[1, 1], x[2, 2], x[0, 3], x[1, 3] = np.nan, np.nan, np.inf, np.inf, 0
    out = np.zeros((9, L), T)
    launch(arithmetic_kernel(T), (x.ctypes.data, out.ctypes.data), 1)
    assert np.isnan(out[0, [0, 1, 3]]).all()
    assert np.isinf(out[0, 2])
    assert np.isnan(out[4, :2]).all()  # maximum and minimum, unlike C's fmax and fmin
    assert np.isnan(out[5, :2]).all()


@functools.cache
def memory_kernel(T):
    L, SIZE = lanes(T), np.dtype(T).itemsize

    @kernel
    def memory(block):
        x, out, n = argument(block, 0), argument(block, 1), argument(block, 2)
        row = 0
        for index in range(-L - 1, n + 2):
            store(out + row * L * SIZE, load_clipped(T, x, index, n))
            row += 1
        for index in range(-L - 1, n + 2):
            store_clipped(out + row * L * SIZE, index, L, broadcast(T(1)))
            row += 1
        store(out + row * L * SIZE, load_even(T, x))

    return memory


@pytest.mark.parametrize("T", DTYPES)
def test_memory(T):
    L = lanes(T)
    n = 2 * L - 1
    x = np.arange(1, n + 1).astype(T)  # load_even may not read beyond the last element it uses
    starts = range(-L - 1, n + 2)
    out = np.zeros((2 * len(starts) + 1, L), T)
    launch(memory_kernel(T), (x.ctypes.data, out.ctypes.data, n), 1)
    for row, start in enumerate(starts):
        inside = [(x[start + i] if 0 <= start + i < n else 0) for i in range(L)]
        np.testing.assert_array_equal(out[row], inside)
        stored = out[len(starts) + row]
        np.testing.assert_array_equal(stored, [float(start <= i < start + L) for i in range(L)])
    np.testing.assert_array_equal(out[-1], x[::2])


@functools.cache
def square_kernel(T):
    L, V = lanes(T), lanes(T) * np.dtype(T).itemsize

    @kernel
    def square(block):
        x, turned, first = argument(block, 0), argument(block, 1), argument(block, 2)
        rows = load_block(T, L, x, V)
        store_block(transpose(rows), turned, V)
        for count in range(L + 2):
            store_first(rows, first + count * L * V, V, count)

    return square


@pytest.mark.parametrize("T", DTYPES)
def test_squares(T):
    """Transposed, and the first vectors of one stored."""
    L = lanes(T)
    x = np.arange(1, L * L + 1).astype(T).reshape(L, L)
    turned, first = np.zeros((L, L), T), np.zeros((L + 2, L, L), T)
    launch(square_kernel(T), (x.ctypes.data, turned.ctypes.data, first.ctypes.data), 1)
    np.testing.assert_array_equal(turned, x.T)
    for count in range(L + 2):
        np.testing.assert_array_equal(first[count], np.where(np.arange(L)[:, None] < count, x, 0))


def test_a_vector_is_one_register_and_fma_one_instruction():
    assembly = arithmetic_kernel(np.float32).assembly()
    if runtime.cpu_info().vector_bytes * 8 // 32 == lanes(np.float32) and "vfmadd" in assembly:
        register = {64: "zmm", 32: "ymm"}[runtime.cpu_info().vector_bytes]
        assert any("vfmadd" in line and register in line for line in assembly.splitlines())


# ---- launches -----------------------------------------------------------------------------------------------


@kernel
def count(block):
    """visits[tile] += 1 for each tile drawn; per_thread[thread] += 1 likewise."""
    tiles, visits, per_thread = argument(block, 0), argument(block, 1), argument(block, 2)
    mine = per_thread + 8 * thread_index(block)
    tile = next_tile(block)
    while tile < tiles:
        atomic_add(visits + 8 * tile, 1)
        atomic_add(mine, 1)
        tile = next_tile(block)


def drawn(threads: int, tiles: int = 5000) -> tuple[np.ndarray, np.ndarray]:
    visits, per_thread = np.zeros(tiles, np.int64), np.zeros(threads, np.int64)
    launch(count, (tiles, visits.ctypes.data, per_thread.ctypes.data), threads)
    return visits, per_thread


@pytest.fixture(params=["openmp", "python"])
def team(request, monkeypatch):
    """torch's own OpenMP pool, and the pool that stands in for it."""
    found = runtime._openmp_team() if request.param == "openmp" else runtime._python_team
    if found is None:
        pytest.skip("torch is linked to no library that has GOMP_parallel")
    monkeypatch.setattr(runtime, "_team", found)


@pytest.mark.usefixtures("team")
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_tile_is_drawn_once(threads):
    for _ in range(20):
        visits, per_thread = drawn(threads)
        assert (visits == 1).all()
        assert per_thread.sum() == len(visits)


@kernel
def count_shares(block):
    """visits[task] += 1 for each task, of one's own share or of a thread that is late."""
    tasks, threads, visits = argument(block, 0), argument(block, 1), argument(block, 2)
    number = thread_index(block)
    enter_share(block, 3, number)
    task, away = next_of_static(block, 3, threads, number, 0, tasks)
    while task >= 0:
        atomic_add(visits + 8 * task, 1)
        task, away = next_of_static(block, 3, threads, number, away, tasks)


@pytest.mark.usefixtures("team")
@pytest.mark.parametrize(("threads", "come"), [(1, 1), (2, 2), (7, 7), (7, 2), (3, 1)])
def test_every_share_is_done_once_whoever_comes(threads, come):
    for tasks in (1, 5, 500):
        for _ in range(5):
            visits = np.zeros(tasks, np.int64)
            launch(count_shares, (tasks, threads, visits.ctypes.data, *[0] * threads), come)
            assert (visits == 1).all()


@pytest.mark.usefixtures("team")
def test_launches_from_several_python_threads_do_not_meet():
    errors: list[str] = []

    def work() -> None:
        for _ in range(50):
            visits, per_thread = drawn(2, 300)
            if not ((visits == 1).all() and per_thread.sum() == 300):
                errors.append(f"{visits.min()} to {visits.max()} visits")

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors


def test_the_team_is_the_one_that_torch_runs_on():
    """Two pools would spin against each other. The function must lie in a library that libtorch_cpu itself asks for."""
    team: Any = runtime._openmp_team()
    if sys.platform != "linux" or team is None:
        pytest.skip("no GOMP_parallel behind torch")
    address = ctypes.cast(team, ctypes.c_void_p).value
    assert address is not None
    found = None
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(v, 16) for v in line.split()[0].split("-"))
        if start <= address < end:
            found = Path(line.split()[-1])
    assert found is not None
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        assert text.find(found.name.encode()) >= 0


def test_threads_follow_torch():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert runtime.num_threads() == 3
    finally:
        torch.set_num_threads(before)


# ---- compiling ----------------------------------------------------------------------------------------------


@inline
def plus_one(value):
    return value + 1


def add_kernel(amount):
    @kernel
    def add_amount(block):
        place = argument(block, 0)
        store_scalar(place, plus_one(load_scalar(np.int64, place)) + amount)

    return add_amount


def added(amount):
    value = np.zeros(1, np.int64)
    launch(add_kernel(amount), (value.ctypes.data,), 1)
    return int(value[0])


def test_a_constant_of_the_closure_is_part_of_the_key(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENCONV_CACHE_DIR", str(tmp_path))
    assert [added(5), added(7), added(5)] == [6, 8, 6]
    assert len(list((tmp_path / "cpu").iterdir())) == 2


def test_a_damaged_file_is_compiled_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENCONV_CACHE_DIR", str(tmp_path))
    assert added(5) == 6
    (file,) = (tmp_path / "cpu").iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:100], whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(damaged)
        assert added(5) == 6
        assert len(file.read_bytes()) == len(whole)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("OPENCONV_CACHE_DIR", str(tmp_path / "file"))
    assert added(5) == 6


def test_editing_a_helper_file_changes_the_key(tmp_path, monkeypatch):
    """Numba's own cache looks at the kernel's file alone."""
    monkeypatch.setenv("OPENCONV_CACHE_DIR", str(tmp_path / "cache"))
    package = tmp_path / "openconv_example"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "kernels.py").write_text(
        "from openconv.cpu.runtime import kernel\n"
        "from openconv.cpu.simd import argument, store_scalar\n"
        "from . import helper\n"
        "helper.__name__ = 'openconv.example_helper'\n"
        "import sys; sys.modules['openconv.example_helper'] = helper\n"
        "@kernel\n"
        "def put(block):\n"
        "    store_scalar(argument(block, 0), helper.answer())\n"
    )
    script = (
        "import numpy as np\n"
        "from openconv.cpu.runtime import launch\n"
        "from openconv_example.kernels import put\n"
        "value = np.zeros(1, np.int64)\n"
        "launch(put, (value.ctypes.data,), 1)\n"
        "print(value[0])\n"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    for answer in (41, 42):
        (package / "helper.py").write_text(
            f"from openconv.cpu.simd import inline\n@inline\ndef answer():\n    return {answer}\n"
        )
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == str(answer), done.stderr


def test_numba_compiles_for_others_as_before(tmp_path, monkeypatch):
    """While a kernel is compiled Numba makes parts of what it compiles, its own functions among them; a caller of those
    outside of kernels gets machine code."""
    import numba

    monkeypatch.setenv("OPENCONV_CACHE_DIR", str(tmp_path))

    @kernel
    def nearest(block):
        place = argument(block, 0)
        store_scalar(place, np.int64(round(load_scalar(np.float64, place + 8))) + max(1, 2, 3))

    value = np.array([0.0, 2.6])
    launch(nearest, (value.ctypes.data,), 1)
    assert value.view(np.int64)[0] == 6
    found = numba.njit(lambda v: round(v) + max(1, 2, 3))
    assert found(2.6) == 6


def test_a_closure_over_anything_else_is_refused():
    table = np.arange(3)
    with pytest.raises(TypeError, match="table, a ndarray"):

        @kernel
        def look_up(block):
            store_scalar(argument(block, 0), table[1])


def test_importing_openconv_does_not_import_numba():
    script = "import sys, openconv, openconv.cpu.runtime; print('numba' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_blocks_of_registers_unpack_to_what_was_packed():
    from llvmlite import ir

    function = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), []), "f")
    builder = ir.IRBuilder(function.append_basic_block())
    values = [ir.Constant(ir.VectorType(ir.FloatType(), 8), None)] * 3
    assert len(unpack(builder, pack(builder, values))) == 3
    assert fill.__doc__ is not None


# ---- machine ------------------------------------------------------------------------------------------------


def test_the_machine_is_described():
    info = runtime.cpu_info()
    assert info is runtime.cpu_info()
    assert info.model
    assert info.cores >= 1
    assert info.vector_bytes in (16, 32, 64)
    assert 4 << 10 <= info.l1_bytes <= info.l2_bytes
