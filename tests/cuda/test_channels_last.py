"""Copies of tensors with their channels last: images, filters whose taps are few, whatever ends within a tile."""

from __future__ import annotations

import pytest
import torch

from openconv.cuda.channels_last import Turn
from openconv.cuda.device import device_for

DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@pytest.mark.parametrize("size", DTYPES)
@pytest.mark.parametrize(
    "images, channels, pixels",
    [(2, 72, 63), (3, 3, 70), (1, 9, 515), (2, 31, 130), (2, 8, 64), (1, 2, 4100), (2, 64, 9), (1, 130, 200)],
)
def test_every_element_is_copied(images, channels, pixels, size):
    given = torch.randint(-100, 100, (images, channels, pixels)).to(DTYPES[size])
    made = torch.zeros(images, pixels, channels, dtype=DTYPES[size])
    turn = Turn("x", images, channels, pixels, size)
    turn.launch(device_for("sm_90a"))(given.data_ptr(), made.data_ptr())
    assert torch.equal(made, given.movedim(1, 2))
    assert turn.tile[0] * turn.tile[1] <= 4096 + 64 * 64
