"""Image filters on picture files: read, convolve, write.

    y[p,q] = sum over r,s of  x[p - (R-1)//2 + r, q - (S-1)//2 + s] * w[r,s]

Each colour channel is an image of its own with one channel, in a batch: the problem that ``cpu.filter2d`` is made for.
An alpha channel goes through untouched. As in OpenCV's filter2D the kernel is not turned round. Files are read and
written by Pillow, which comes with matplotlib, and by :mod:`openconv.png16` where a PNG has 16 bits a channel.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .files import write_atomic
from .functional import conv2d
from .png16 import is_png16, read_png16, write_png16
from .problem import Problem

__all__ = [
    "BORDERS",
    "KERNELS",
    "FilterKernel",
    "Picture",
    "apply_kernel",
    "encode_picture",
    "filter_picture",
    "filter_problem",
    "make_kernel",
    "picture_format",
    "read_kernel",
    "read_picture",
    "write_picture",
]

Array = np.ndarray[Any, Any]
BORDERS = ("replicate", "zero")
_ENDINGS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}


# -- kernels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FilterKernel:
    """One filter or several, (filters, R, S). With ``magnitude`` the result is the root of the sum of their squares."""

    name: str
    weights: Array
    magnitude: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """(R, S)."""
        return self.weights.shape[1], self.weights.shape[2]


def _identity(n: int) -> Array:
    one = np.zeros((n, n))
    one[(n - 1) // 2, (n - 1) // 2] = 1
    return one


def _box(n: int) -> Array:
    return np.full((n, n), 1 / n**2)


def _gaussian(n: int) -> Array:
    sigma = 0.3 * ((n - 1) / 2 - 1) + 0.8
    line = np.exp(-((np.arange(n) - (n - 1) / 2) ** 2) / (2 * sigma**2))
    weights: Array = np.outer(line, line)
    return weights / weights.sum()


def _emboss(n: int) -> Array:
    """Light from the top left: weights grow along the diagonal."""
    slope = np.add.outer(np.arange(n), np.arange(n)) - (n - 1.0)
    weights: Array = _identity(n) + slope * 4 / max(slope[slope > 0].sum(), 1)
    return weights


def _sobel(n: int) -> Array:
    """Derivatives along both axes, smoothed across; a full step has magnitude one."""
    if n < 3:
        raise ValueError(f"sobel of size {n}; wanted 3 or more")
    smooth, inner = (np.poly1d([1.0, 1.0]) ** m for m in (n - 1, n - 3))
    slope = np.polymul(inner.coeffs, [-1.0, 0.0, 1.0])
    weights: Array = np.outer(smooth.coeffs, slope)
    weights = weights / weights[weights > 0].sum()
    return np.stack([weights, weights.T])


KERNELS: dict[str, tuple[Callable[[int], Array], int, str]] = {
    "identity": (_identity, 3, "the picture itself"),
    "box": (_box, 5, "mean of the neighbourhood"),
    "gaussian": (_gaussian, 5, "weighted mean, sigma = 0.3 ((N-1)/2 - 1) + 0.8"),
    "blur": (_gaussian, 15, "a wide gaussian"),
    "sharpen": (lambda n: 3 * _identity(n) - 2 * _gaussian(n), 5, "unsharp mask: 3 identity - 2 gaussian"),
    "edge": (lambda n: (_identity(n) - _box(n)) * 9, 3, "difference from the neighbourhood (Laplace)"),
    "emboss": (_emboss, 3, "relief, lit from the top left"),
    "sobel": (_sobel, 3, "magnitude of the gradient"),
}
"""Name: how to make it for a size, its usual size, what it does."""


def make_kernel(name: str, size: int | None = None) -> FilterKernel:
    """A kernel by its name, ``size`` taps a side, or its usual size. An even size reaches one tap further to the
    right and down."""
    if name not in KERNELS:
        raise ValueError(f"there is no kernel {name!r}; wanted one of {', '.join(KERNELS)}, or a file of numbers")
    make, usual, _ = KERNELS[name]
    if size is not None and not 1 <= size <= 1023:
        raise ValueError(f"size is {size}; wanted 1 to 1023 taps")
    weights = make(size or usual)
    return FilterKernel(name, weights if weights.ndim == 3 else weights[None], magnitude=name == "sobel")


def read_kernel(path: Path) -> FilterKernel:
    """A kernel from a file: ``.npy``, or text with one row of numbers a line (blanks or commas between them, ``#``
    before a remark)."""
    try:
        weights = np.load(path, allow_pickle=False) if path.suffix == ".npy" else _rows(path.read_text())
    except (OSError, EOFError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(f"kernel file {str(path)!r}: {reason}") from None
    if weights.ndim != 2 or weights.size == 0 or weights.dtype.kind not in "fiub":
        got = f"{weights.dtype} of shape {weights.shape}"
        raise ValueError(f"kernel file {str(path)!r} holds {got}; wanted a matrix of numbers")
    if not np.isfinite(weights).all():
        raise ValueError(f"kernel file {str(path)!r} holds a NaN or an infinity; wanted finite numbers")
    return FilterKernel(path.stem, weights.astype(np.float64)[None])


def _rows(text: str) -> Array:
    rows: list[list[float]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        try:
            rows.append([float(word) for word in words])
        except ValueError as error:
            raise ValueError(f"line {number}: {error}; wanted numbers") from None
        if len(rows[-1]) != len(rows[0]):
            raise ValueError(f"line {number} has {len(rows[-1])} numbers; wanted {len(rows[0])} as in the first row")
    if not rows:
        raise ValueError("no numbers in it; wanted rows of numbers")
    return np.array(rows)


# -- pictures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Picture:
    """``pixels`` (H, W, channels) of 8 or 16 bits; with ``alpha`` the last channel is opacity. ``profile`` is the
    colour profile that travels along."""

    pixels: Array
    alpha: bool = False
    profile: bytes | None = None

    @property
    def colours(self) -> int:
        """Channels without alpha."""
        return int(self.pixels.shape[2]) - self.alpha

    def __str__(self) -> str:
        height, width, _ = self.pixels.shape
        kind = {1: "grey", 3: "RGB"}[self.colours] + (" with alpha" if self.alpha else "")
        return f"{width} x {height}, {kind}, {8 * self.pixels.itemsize} bits"


def read_picture(path: Path) -> Picture:
    """A PNG or JPEG file: grey or RGB, with or without alpha. A JPEG is turned as its EXIF data say. ValueError and
    OSError name the file and what is wrong with it."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    content = path.read_bytes()
    try:
        with Image.open(io.BytesIO(content), formats=["PNG", "JPEG"]) as opened:
            profile = opened.info.get("icc_profile")
            if is_png16(content):
                pixels = read_png16(content)
                return Picture(pixels, pixels.shape[2] in (2, 4), profile)
            opened.load()
            image = ImageOps.exif_transpose(opened)
            clear = image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info
            grey = image.mode in ("1", "L", "LA", "La")
            image = image.convert(("LA" if clear else "L") if grey else ("RGBA" if clear else "RGB"))
    except UnidentifiedImageError:
        raise ValueError(f"{str(path)!r} is no PNG or JPEG image; wanted one of these") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from None
    pixels = np.asarray(image)
    return Picture(pixels.reshape(*pixels.shape[:2], -1), clear, profile)


def encode_picture(picture: Picture, kind: str = "PNG") -> bytes:
    """The bytes of a PNG or JPEG file."""
    from PIL import Image

    if kind == "JPEG" and (picture.alpha or picture.pixels.itemsize > 1):
        raise ValueError(f"a JPEG holds 8 bits and no alpha, the picture is {picture}; write a .png")
    if picture.pixels.itemsize > 1:
        return write_png16(picture.pixels, picture.profile)
    made = Image.fromarray(picture.pixels[..., 0] if picture.pixels.shape[2] == 1 else picture.pixels)
    file = io.BytesIO()
    made.save(file, kind, icc_profile=picture.profile, **({"quality": 95} if kind == "JPEG" else {}))
    return file.getvalue()


def write_picture(path: Path, picture: Picture) -> Path:
    """Write a PNG or JPEG, by the file's ending; the file is whole or not there."""
    return write_atomic(path, encode_picture(picture, picture_format(path)))


def picture_format(path: Path) -> str:
    """PNG or JPEG, by the file's ending; ValueError if it is neither."""
    kind = _ENDINGS.get(path.suffix.lower())
    if kind is None:
        raise ValueError(f"output file {str(path)!r} ends in {path.suffix!r}; wanted {', '.join(_ENDINGS)}")
    return kind


# -- filters ----------------------------------------------------------------------------------------------------------


def apply_kernel(images: Tensor, kernel: FilterKernel, border: str = "replicate") -> Tensor:
    """(N, 1, H, W) float to the same shape. ``border`` continues the edge pixels outwards, or puts zeros there."""
    if border not in BORDERS:
        raise ValueError(f"border is {border!r}; wanted one of {', '.join(BORDERS)}")
    weight = torch.from_numpy(kernel.weights).to(images.dtype).unsqueeze(1)
    low_r, low_s = ((taps - 1) // 2 for taps in kernel.size)
    if border == "replicate":
        high_r, high_s = kernel.size[0] - 1 - low_r, kernel.size[1] - 1 - low_s
        result = conv2d(F.pad(images, (low_s, high_s, low_r, high_r), mode="replicate"), weight)
    else:
        result = conv2d(images, weight, padding="same")
    return torch.linalg.vector_norm(result, dim=1, keepdim=True) if kernel.magnitude else result


def filter_problem(picture: Picture, kernel: FilterKernel, border: str = "replicate") -> Problem:
    """What :func:`filter_picture` computes: one image for each colour, padded beforehand if the border is continued."""
    height, width, _ = picture.pixels.shape
    ends = tuple(((taps - 1) // 2, taps - 1 - (taps - 1) // 2) for taps in kernel.size)
    laid = border == "replicate"
    return Problem(
        n=picture.colours, c=1, k=len(kernel.weights), filter=kernel.size, padding=((0, 0),) if laid else ends,
        spatial=tuple(size + sum(pad) * laid for size, pad in zip((height, width), ends, strict=True)),
    )  # fmt: skip


def filter_picture(picture: Picture, kernel: FilterKernel, border: str = "replicate") -> Picture:
    """The picture convolved with the kernel, rounded and clipped to its range; alpha as it was."""
    colours = np.moveaxis(picture.pixels[..., : picture.colours], 2, 0)[:, None]
    result = apply_kernel(torch.from_numpy(np.ascontiguousarray(colours, np.float32)), kernel, border)
    most = np.iinfo(picture.pixels.dtype).max
    values = np.moveaxis(result.round_().clamp_(0, most).numpy()[:, 0], 0, 2).astype(picture.pixels.dtype)
    return replace(picture, pixels=np.concatenate([values, picture.pixels[..., picture.colours :]], axis=2))
