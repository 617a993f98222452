"""Large results: right whatever their memory held before, and never shared with one that is still alive."""

from __future__ import annotations

import copy
import io
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import openconv
from openconv.cpu import memory
from openconv.cpu.memory import LARGE, kept_bytes, large_tensor

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux alone has the mappings")

SIDE = 1800  # of an f32 image above LARGE
COUNT = LARGE // 4


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch):
    monkeypatch.delenv("OPENCONV_KEEP_MB", raising=False)
    openconv.empty_cache()
    yield
    openconv.empty_cache()


def vector(count: int = COUNT) -> torch.Tensor:
    return large_tensor((count,), (1,), torch.float32)


def test_a_result_is_right_on_memory_that_held_another():
    x, w = torch.randn(1, 1, SIDE, SIDE), torch.randn(1, 1, 3, 3)
    wanted = F.conv2d(x, w, padding=1)
    first = openconv.conv2d(x, w, padding=1)
    address = first.data_ptr()
    torch.testing.assert_close(first, wanted)
    first.fill_(torch.nan)
    del first
    again = openconv.conv2d(x, w, padding=1)
    assert again.data_ptr() == address
    assert address % (2 << 20) == 0
    torch.testing.assert_close(again, wanted)


def test_strides_and_dtype_are_as_asked():
    shape, strides = (2, 8, 600, 601), (8 * 600 * 601, 1, 8 * 601, 8)
    got = large_tensor(shape, strides, torch.float64)
    assert got.shape == shape
    assert got.dtype == torch.float64
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert got.untyped_storage().nbytes() == got.numel() * 8
    assert not got._is_view()


@pytest.mark.parametrize(
    "alias",
    [
        lambda t: t[5:9],
        lambda t: t.numpy(),
        lambda t: t.untyped_storage(),
        lambda t: memoryview(t.numpy()),
        lambda t: torch.from_dlpack(t),
        lambda t: t.requires_grad_().square(),  # saves t for its backward pass
    ],
    ids=["view", "numpy", "storage", "memoryview", "dlpack", "autograd"],
)
def test_memory_waits_for_its_last_user(alias):
    tensor = vector()
    address = tensor.data_ptr()
    held = alias(tensor)
    del tensor
    assert kept_bytes() == 0
    other = vector()
    assert other.data_ptr() != address
    del held
    assert kept_bytes() > 0
    assert vector().data_ptr() == address


@pytest.mark.parametrize(("count", "fits"), [(4 * COUNT, False), (3 * COUNT, True), (2 * COUNT, True), (COUNT, False)])
def test_a_block_serves_results_down_to_half_its_size(count, fits):
    block = vector(3 * COUNT)
    address = block.data_ptr()
    del block
    assert kept_bytes() == 3 * LARGE + (2 << 20)
    tensor = vector(count)
    assert (tensor.data_ptr() == address) is fits
    assert (kept_bytes() == 0) is fits
    assert tensor.untyped_storage().nbytes() == 4 * count


def test_of_several_blocks_the_smallest_that_fits_is_taken():
    large, small = vector(2 * COUNT), vector(COUNT)
    address = small.data_ptr()
    del small, large
    assert vector(COUNT).data_ptr() == address


def test_what_is_kept_is_bounded(monkeypatch):
    vectors = [vector() for _ in range(60)]
    last = vectors[-1].data_ptr()
    while vectors:
        vectors.pop(0)
        assert kept_bytes() <= 256e6
    assert kept_bytes() > 256e6 - 2 * LARGE
    assert vector().data_ptr() == last  # the oldest went first
    openconv.empty_cache()
    assert kept_bytes() == 0
    monkeypatch.setenv("OPENCONV_KEEP_MB", "0")
    vector()
    assert kept_bytes() == 0


def test_of_what_waits_the_oldest_is_lent_to_the_system():
    vectors = [vector() for _ in range(30)]
    newest = vectors[-1].data_ptr()
    while vectors:
        vectors.pop(0).fill_(1)
    marks = [block.lent for block in memory._kept]
    held = sum(len(block.mapping) for block in memory._kept if not block.lent)
    assert marks == sorted(marks, reverse=True)
    assert (64 << 20) - 2 * LARGE < held <= 64 << 20
    again = vector()
    assert again.data_ptr() == newest


def test_workspaces_are_lent_from_call_to_call(monkeypatch):
    first = memory.borrow(1000)
    assert memory.borrow(1000).data_ptr() != first.data_ptr()  # while it is in use
    memory.give_back(first)
    assert memory.borrow(500) is first
    memory.give_back(first)
    larger = memory.borrow(5 << 20)
    assert larger.numel() >= 5 << 20
    memory.give_back(larger)
    openconv.empty_cache()
    monkeypatch.setenv("OPENCONV_KEEP_MB", "0")
    memory.give_back(memory.borrow(1000))
    assert not memory._scratch


def test_a_limit_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("OPENCONV_KEEP_MB", "lots")
    with pytest.raises(ValueError, match="OPENCONV_KEEP_MB is 'lots'; wanted a whole number of megabytes"):
        vector()


def test_a_result_that_does_not_fit_is_refused_as_torch_does():
    count = 1 << 50
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.empty(count)
    vector()
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        vector(count)
    assert kept_bytes() == 0  # room was made first


def test_threads_never_get_the_same_memory():
    def fill(number: int) -> bool:
        for _ in range(10):
            tensor = vector().fill_(number)
            if not bool((tensor == number).all()):
                return False
            del tensor
        return True

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(fill, range(6)))


def test_tensors_can_be_saved_copied_and_shared():
    tensor = vector().fill_(3)
    file = io.BytesIO()
    torch.save(tensor, file)
    assert file.tell() < LARGE + 10_000
    file.seek(0)
    for other in (torch.load(file), copy.deepcopy(tensor), tensor.share_memory_()):
        assert float(other.double().sum()) == 3 * COUNT


def test_gradients_of_a_large_result():
    x = torch.randn(1, 1, SIDE, SIDE, requires_grad=True)
    w = torch.randn(1, 1, 3, 3, requires_grad=True)
    for _ in range(2):
        got = torch.autograd.grad(openconv.conv2d(x, w, padding=1).sin().mean(), (x, w))
        wanted = torch.autograd.grad(F.conv2d(x, w, padding=1).sin().mean(), (x, w))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_starts_with_nothing_kept():
    vector()
    assert kept_bytes() > 0
    child = os.fork()
    if child == 0:
        os._exit(kept_bytes() > 0)
    assert os.waitpid(child, 0)[1] == 0
