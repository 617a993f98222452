"""Sharpen an image that is larger than memory, tile by tile, with the result of filtering it whole.

A tile is read with a halo: the 3 pixels around it that a 7x7 filter sees. Only at the rim of the image does the filter
meet padding. Nothing of a tile's rim is ever stored, so that no seam shows. All weights are integers and no sum reaches
2^24, the first integer that f32 cannot count on from: every order of additions gives the same sums, and so every tiling
the same bytes. (accuracy="strict" leaves out Winograd and Fourier transforms, which compute with other numbers.)

Image and result are .npy files that are mapped into memory a row of tiles at a time. The result gets its name when it
is complete; Ctrl-C leaves nothing of it.

    python examples/filter_gigapixel.py                       # draws a small image and filters it
    python examples/filter_gigapixel.py --size 32768          # 1.07 gigapixels: two files of 1 GiB
    python examples/filter_gigapixel.py --image mine.npy      # an array of (rows, columns) bytes
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

import openconv

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
HALO, SUM = 3, 4096
BINOMIAL = torch.tensor([1.0, 6.0, 15.0, 20.0, 15.0, 6.0, 1.0])  # a blur, times 64


def sharpening() -> Tensor:
    """Twice the image less its blur, times 4096; their sizes add up to 11488, and 255 times that is under 2^22."""
    weights = -torch.outer(BINOMIAL, BINOMIAL)
    weights[HALO, HALO] += 2 * SUM
    return weights[None, None]


def sharpened(pixels: Bytes, weights: Tensor, pads: tuple[int, int, int, int]) -> Bytes:
    """The filter on pixels that have their halo, except where ``pads`` (left, right, top, bottom) makes up for it."""
    left, right, top, bottom = pads
    image = torch.from_numpy(np.array(pixels)).to(weights.device, torch.float32)
    image = torch.nn.functional.pad(image[None, None], (left, right, top, bottom), mode="replicate")
    sums = openconv.conv2d(image, weights, accuracy="strict", precision="ieee")[0, 0]
    return sums.add_(SUM // 2).div_(SUM).floor_().clamp_(0, 255).to(torch.uint8).cpu().numpy()


def cut(start: int, length: int, whole: int) -> tuple[slice, tuple[int, int]]:
    """Where a tile and its halo lie along an axis, and how much of the halo is missing at the two ends."""
    low, high = start - HALO, start + length + HALO
    return slice(max(low, 0), min(high, whole)), (max(-low, 0), max(high - whole, 0))


@contextmanager
def whole_file(path: Path, shape: tuple[int, int]) -> Iterator[Path]:
    """A new .npy of bytes beside its place, moved there when the block ends well and removed when it does not."""
    need, free = shape[0] * shape[1], shutil.disk_usage(path.parent).free
    if need > free:
        raise SystemExit(f"{path.name} needs {need:,} bytes; {path.parent} has {free:,} free: name another --out")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        np.lib.format.open_memmap(unfinished, mode="w+", dtype=np.uint8, shape=shape)  # zeros, which take no room yet
        yield unfinished
        unfinished.replace(path)
    except BaseException:  # Ctrl-C too
        unfinished.unlink(missing_ok=True)
        raise


def draw(path: Path, size: int, progress: Progress) -> None:
    """Rings with soft edges on a slope, with a little noise: what sharpening changes shows at the edges."""
    task = progress.add_task("drawing", total=(-(-size // 1024)) ** 2)
    with whole_file(path, (size, size)) as unfinished:
        for top in range(0, size, 1024):
            image = np.load(unfinished, mmap_mode="r+")
            for left in range(0, size, 1024):
                rows, columns = np.ogrid[top : min(top + 1024, size), left : min(left + 1024, size)]
                rings = 50 * np.tanh(6 * np.cos(np.hypot(rows - size / 3, columns - size / 2) / 15))
                noise = np.random.default_rng((top, left)).integers(-6, 7, rings.shape)
                grey = 120 + 60 * columns / size + rings + noise
                image[top : top + 1024, left : left + 1024] = grey.clip(0, 255)
                progress.advance(task)


def filter_file(source: Path, target: Path, tile: int, device: str, progress: Progress) -> None:
    """The sharpened image as a file, a tile at a time."""
    height, width = np.load(source, mmap_mode="r").shape
    weights = sharpening().to(device)
    task = progress.add_task("filtering", total=-(-height // tile) * -(-width // tile))
    with whole_file(target, (height, width)) as unfinished:
        for top in range(0, height, tile):
            # Mapped anew for each row of tiles: what is mapped once stays in memory as far as it was touched.
            image, result = np.load(source, mmap_mode="r"), np.load(unfinished, mmap_mode="r+")
            rows, (above, below) = cut(top, min(tile, height - top), height)
            for left in range(0, width, tile):
                columns, (before, behind) = cut(left, min(tile, width - left), width)
                done = sharpened(image[rows, columns], weights, (before, behind, above, below))
                result[top : top + tile, left : left + tile] = done
                progress.advance(task)


def mistakes(source: Path, target: Path, tile: int) -> tuple[int, int]:
    """Of a part around a corner where four tiles meet, filtered in one piece in float64 by torch: how many pixels
    differ, of how many."""
    image, result = np.load(source, mmap_mode="r"), np.load(target, mmap_mode="r")
    reach = min(tile, 512)
    corner = [min(tile, size) - (min(reach, size) + 1) // 2 for size in image.shape]
    (rows, (above, below)), (columns, (before, behind)) = (
        cut(at, min(reach, size - at), size) for at, size in zip(corner, image.shape, strict=True)
    )
    part = torch.from_numpy(np.array(image[rows, columns])).double()[None, None]
    part = torch.nn.functional.pad(part, (before, behind, above, below), mode="replicate")
    wanted = torch.nn.functional.conv2d(part, sharpening().double())[0, 0].add(SUM // 2).div(SUM).floor().clamp(0, 255)
    top, left = rows.start + HALO - above, columns.start + HALO - before
    found = result[top : top + wanted.shape[0], left : left + wanted.shape[1]]
    return int((torch.from_numpy(np.array(found)) != wanted).sum()), wanted.numel()


def main(
    size: Annotated[int, typer.Option(min=8, help="pixels along each side of the image that is drawn")] = 4096,
    tile: Annotated[int, typer.Option(min=8, help="pixels along each side of a tile")] = 2048,
    image: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="a .npy of bytes instead")] = None,
    out: Annotated[Path, typer.Option(help="folder for image, result and picture")] = Path("openconv-examples"),
    device: Annotated[str, typer.Option(help="where to filter: cpu or cuda")] = "cpu",
) -> None:
    """Draw an image, filter it in tiles, check the result."""
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    source, target = image or out / "gigapixel.npy", out / "gigapixel-sharp.npy"
    with Progress(console=console) as progress:
        if image is None:
            draw(source, size, progress)
        shape, dtype = (given := np.load(source, mmap_mode="r")).shape, given.dtype
        if len(shape) != 2 or dtype != np.uint8:
            raise SystemExit(f"{source} has shape {shape} of {dtype}; wanted (rows, columns) of uint8")
        start = time.perf_counter()
        filter_file(source, target, tile, device, progress)
        took = time.perf_counter() - start
    wrong, looked = mistakes(source, target, tile)
    pixels = shape[0] * shape[1]
    console.print(f"{shape[0]} x {shape[1]} in {took:.2f} s, {pixels / took / 1e6:.0f} megapixels a second")
    console.print(f"a tile needs {tile * tile * 4 * 3 / 2**20:.0f} MiB, a row of them {2 * tile * shape[1] / 2**20:.0f}"
                  f" MiB of mapped files; the two files have {2 * pixels / 2**20:.0f} MiB")  # fmt: skip
    console.print(f"where four tiles meet, {wrong} of {looked} pixels differ from one piece filtered in float64")
    part = slice(max(tile - 256, 0), tile + 256)
    crops = [np.load(path, mmap_mode="r")[part, part] for path in (source, target)]
    Image.fromarray(np.concatenate(crops, axis=1)).save(out / "filter_gigapixel.png")
    console.print(f"that part before and behind: {out / 'filter_gigapixel.png'}", soft_wrap=True)
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
