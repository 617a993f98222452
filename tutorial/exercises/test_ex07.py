"""Grades exercise 7: columns against torch's, products within a limit of bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

FORBIDDEN = ("unfold", "fold", "conv2d", "conv1d", "conv3d")


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """torch's own ways are closed while the answer runs; the fixture opens them for the grader."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        pytest.fail("torch's own convolutions and unfold are out of bounds here", pytrace=False)

    for name in FORBIDDEN:
        monkeypatch.setattr(F, name, refused)
        if hasattr(torch, name):
            monkeypatch.setattr(torch, name, refused)
    return monkeypatch.undo


def problems(count: int) -> Iterator[dict[str, Any]]:
    choose = random.Random(7)
    while count:
        N, C, K = choose.randint(1, 3), choose.randint(1, 4), choose.randint(1, 5)
        size = choose.randint(1, 12), choose.randint(1, 12)
        taps, stride, dilation = ((choose.randint(1, 3), choose.randint(1, 3)) for _ in range(3))
        padding = choose.randint(0, 2), choose.randint(0, 2)
        out = [
            (length + 2 * pad - gap * (tap - 1) - 1) // step + 1
            for length, pad, gap, tap, step in zip(size, padding, dilation, taps, stride, strict=True)
        ]
        if min(out) > 0:
            count -= 1
            yield {
                "x": torch.randn(N, C, *size, dtype=torch.float64),
                "w": torch.randn(K, C, *taps, dtype=torch.float64),
                "dy": torch.randn(N, K, *out, dtype=torch.float64),
                "how": (stride, padding, dilation),
                "taps": taps,
                "pixels": out[0] * out[1],
                "column": C * taps[0] * taps[1] * 8,
            }


def told(problem: dict[str, Any]) -> str:
    stride, padding, dilation = problem["how"]
    shapes = f"x {tuple(problem['x'].shape)}, w {tuple(problem['w'].shape)}"
    return f"{shapes}, stride {stride}, padding {padding}, dilation {dilation}"


def columns_of(problem: dict[str, Any], n: int) -> torch.Tensor:
    """All columns of an image, as torch makes them."""
    stride, padding, dilation = problem["how"]
    return F.unfold(problem["x"][n : n + 1], problem["taps"], dilation, padding, stride)[0]


def same(got: Any, wanted: torch.Tensor, what: str) -> None:
    if not isinstance(got, torch.Tensor) or got.shape != wanted.shape:
        pytest.fail(f"{what}: got {getattr(got, 'shape', got)}; wanted {tuple(wanted.shape)}", pytrace=False)
    if not torch.allclose(got, wanted):
        off = int((got - wanted).abs().argmax())
        pytest.fail(f"{what}: element {off} is {got.flatten()[off]}; wanted {wanted.flatten()[off]}", pytrace=False)


def test_columns(answer: ModuleType, by_hand: Callable[[], None]) -> None:
    choose, made = random.Random(77), []
    for problem in problems(40):
        first = choose.randrange(problem["pixels"])
        count = choose.randint(1, problem["pixels"] - first)
        got = answer.im2col(problem["x"][0], problem["taps"], *problem["how"], first, count)
        made.append((problem, first, count, got))
    by_hand()
    for problem, first, count, got in made:
        what = f"im2col of pixels {first} ... {first + count - 1}, {told(problem)}"
        same(got, columns_of(problem, 0)[:, first : first + count], what)


def test_pixels_of_a_panel(answer: ModuleType) -> None:
    for limit, channels, taps, size, wanted in [
        (1 << 20, 64, (3, 3), 4, 455),
        (2304, 64, (3, 3), 4, 1),
        (4607, 64, (3, 3), 4, 1),
        (4608, 64, (3, 3), 4, 2),
        (100, 1, (1, 1), 2, 50),
    ]:
        got = answer.pixels_of(limit, channels, taps, size)
        if got != wanted:
            pytest.fail(f"pixels_of({limit}, {channels}, {taps}, {size}) is {got}; wanted {wanted}", pytrace=False)
    with pytest.raises(ValueError, match="2304"):
        answer.pixels_of(2303, 64, (3, 3), 4)


def within(answer: ModuleType, monkeypatch: pytest.MonkeyPatch, problem: dict[str, Any], limit: int) -> list[int]:
    """Bytes of the columns of each call of im2col from now on, which may not be more than the limit."""
    seen: list[int] = []
    own = answer.im2col

    def counted(*args: Any, **kwargs: Any) -> Any:
        columns = own(*args, **kwargs)
        seen.append(columns.numel() * columns.element_size())
        if seen[-1] > limit:
            pytest.fail(f"columns take {seen[-1]} bytes; the limit is {limit} ({told(problem)})", pytrace=False)
        return columns

    monkeypatch.setattr(answer, "im2col", counted)
    return seen


@pytest.mark.parametrize("what", ["convolve", "filter_gradient"])
def test_products_within_a_limit(answer: ModuleType, by_hand: Callable[[], None], what: str) -> None:
    choose, made = random.Random(777), []
    for problem in problems(30):
        most = choose.randint(1, problem["pixels"] + 2)
        limit = most * problem["column"] + choose.randrange(problem["column"])
        with pytest.MonkeyPatch.context() as patch:
            seen = within(answer, patch, problem, limit)
            if what == "convolve":
                got = answer.convolve(problem["x"], problem["w"], *problem["how"], limit)
            else:
                got = answer.filter_gradient(problem["x"], problem["dy"], problem["taps"], *problem["how"], limit)
        fewest = len(problem["x"]) * -(-problem["pixels"] // most)
        made.append((problem, limit, got, len(seen), fewest))
    by_hand()
    for problem, limit, got, calls, fewest in made:
        stride, padding, dilation = problem["how"]
        x, w = problem["x"].requires_grad_(), problem["w"].requires_grad_()
        y = F.conv2d(x, w, None, stride, padding, dilation)
        wanted = y if what == "convolve" else torch.autograd.grad(y, w, problem["dy"])[0]
        same(got, wanted.detach(), f"{what} within {limit} bytes, {told(problem)}")
        if calls != fewest:
            pytest.fail(f"{what} made {calls} panels; {fewest} hold all pixels of all images ({told(problem)})",
                        pytrace=False)  # fmt: skip
