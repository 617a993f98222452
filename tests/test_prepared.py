"""What is made of filters is kept from the second call on, while the filters stay as they are."""

from __future__ import annotations

import gc

import pytest
import torch

from openconv import prepared as module
from openconv.prepared import forget, kept_bytes, prepared


class Maker:
    """Doubles the filters, and counts how often."""

    def __init__(self, w: torch.Tensor) -> None:
        self.w, self.count, self.spare = w, 0, torch.empty(w.shape)

    def __call__(self, key: str = "double") -> torch.Tensor:
        def make(out: torch.Tensor) -> None:
            self.count += 1
            torch.mul(self.w.detach(), 2, out=out)

        made = prepared(self.w, key, make, self.spare)
        assert torch.equal(made, self.w.detach() * 2)
        return made


@pytest.fixture(autouse=True)
def nothing_kept():
    forget()
    yield
    forget()


def test_made_twice_then_kept():
    maker = Maker(torch.randn(4, 3, 3, 3))
    assert maker() is maker.spare  # seen once: nothing is kept
    assert kept_bytes() == 0
    kept = maker()
    assert kept is not maker.spare
    assert kept_bytes() == kept.nbytes
    assert maker() is kept
    assert maker.count == 2


@pytest.mark.parametrize("parameter", [False, True])
def test_every_write_of_torch_is_seen(parameter):
    w = torch.randn(4, 3, 3, 3)
    maker = Maker(torch.nn.Parameter(w) if parameter else w)
    for change in range(3):
        for _ in range(3):
            maker()
        with torch.no_grad():
            maker.w.view(-1)[change + 1] += 1  # one number, through a view
    maker()
    assert maker.count == 7


def test_a_view_of_the_same_filters_finds_them():
    maker = Maker(torch.randn(4, 3, 3, 3))
    maker()
    kept = maker()
    maker.w = maker.w.detach()
    assert maker() is kept


def test_a_write_past_the_version_to_all_of_them_is_seen():
    """An average of weights that is updated through ``.data``, and evaluated now and then."""
    maker = Maker(torch.nn.Parameter(torch.randn(32, 16, 3, 3)))
    maker(), maker(), maker()
    maker.w.data.mul_(0.99)
    maker()
    assert maker.count == 3
    array = maker.w.detach().numpy()
    maker(), maker()
    array += 1
    maker()


def test_a_write_past_the_version_to_one_number_is_seen_in_small_filters():
    """How torch.autograd.gradcheck tries small changes."""
    maker = Maker(torch.nn.Parameter(torch.randn(16, 16, 3, 3)))
    maker(), maker(), maker()
    for at in (0, 7, 16 * 16 * 9 - 1):
        maker.w.data.view(-1)[at] += 1e-3
        maker()


def test_other_filters_in_the_same_memory_are_others():
    storage = torch.randn(4 * 27)
    maker = Maker(storage.view(4, 3, 3, 3))
    maker(), maker()
    address, replaced = maker.w.data_ptr(), torch.randn(4, 3, 3, 3)
    maker.w.data = replaced
    assert maker.w.data_ptr() != address
    maker()
    assert maker.count == 3


def test_freed_filters_free_what_was_made():
    maker = Maker(torch.randn(64, 3, 3, 3))
    maker(), maker()
    assert kept_bytes() > 0
    del maker
    gc.collect()
    assert kept_bytes() == 0


def test_two_things_made_of_the_same_filters():
    maker = Maker(torch.randn(4, 3, 3, 3))
    for key in ("a", "b", "a", "b", "a", "b"):
        maker(key)
    assert maker.count == 4


def test_no_more_than_the_limit_is_kept(monkeypatch):
    makers = [Maker(torch.randn(8, 8, 3, 3)) for _ in range(4)]
    monkeypatch.setattr(module, "LIMIT", 3 * makers[0].spare.nbytes)
    for maker in makers:
        maker(), maker()
    assert kept_bytes() == module.LIMIT
    makers[0]()
    assert makers[0].count == 3
    makers[3]()
    assert makers[3].count == 2


def test_never_kept_where_changes_cannot_be_seen():
    with torch.inference_mode():
        maker = Maker(torch.randn(4, 3, 3, 3))
        for _ in range(3):
            maker()
    assert maker.count == 3
    shared = Maker(torch.randn(4, 3, 3, 3).share_memory_())
    for _ in range(3):
        shared()
    assert shared.count == 3


def test_empty_cache_forgets():
    import openconv

    maker = Maker(torch.randn(4, 3, 3, 3))
    maker(), maker()
    openconv.empty_cache()
    assert kept_bytes() == 0
