"""A test picture without a file: what filters change shows in gradients, edges, text, fine lines and noise."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["make_scene"]

Array = np.ndarray[Any, Any]


def make_scene(height: int = 1024, width: int = 2048) -> Array:
    """(height, width) grey levels of 8 bits: a zone plate, text, shapes, a star of lines and a strip of noise."""
    from PIL import Image, ImageDraw, ImageFont

    rows, columns = np.mgrid[0:height, 0:width]
    unit = height / 1024
    canvas = 60 + 110 * columns / width + 30 * np.sin(rows / height * np.pi)
    _zone_plate(canvas, rows, columns, (0.5 * height, 0.25 * width), 0.42 * height)
    _star(canvas, rows, columns, (0.68 * height, 0.86 * width), 0.24 * height)
    image = Image.fromarray(canvas.clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)

    def text(x: float, y: float, words: str, size: float, grey: int) -> None:
        draw.text((x * width, y * height), words, fill=grey, font=ImageFont.load_default(max(8, size * unit)))

    text(0.50, 0.08, "openconv", 108, 250)
    text(0.502, 0.26, "y = x * w", 84, 20)
    for line, size in enumerate((40, 30, 22, 16, 12)):
        text(0.502, 0.40 + 0.055 * line, "every kernel can be read", size, 245 - 30 * (line % 2))
    box = [0.76 * width, 0.08 * height, 0.84 * width, 0.24 * height]
    draw.rectangle(box, fill=235)
    draw.ellipse([0.87 * width, 0.08 * height, 0.95 * width, 0.24 * height], fill=25)
    triangle = [(0.76, 0.40), (0.80, 0.26), (0.84, 0.40)]
    draw.polygon([(x * width, y * height) for x, y in triangle], fill=90)
    for step in range(12):
        x = (0.87 + 0.008 * step) * width
        draw.line([x, 0.27 * height, x, 0.40 * height], fill=250, width=max(1, round((1 + step % 4) * unit)))
    scene = np.array(image).astype(np.float64)
    noise = np.random.default_rng(1).normal(0, 40, (height, width))
    strip = (rows > 0.74 * height) & (rows < 0.92 * height) & (columns > 0.50 * width) & (columns < 0.72 * width)
    scene[strip] += noise[strip]
    return scene.clip(0, 255).astype(np.uint8)


def _zone_plate(canvas: Array, rows: Array, columns: Array, centre: tuple[float, float], radius: float) -> None:
    """Rings whose frequency grows with the radius, up to an eighth of a cycle a pixel at the rim."""
    square = (rows - centre[0]) ** 2 + (columns - centre[1]) ** 2
    inside = square < radius**2
    canvas[inside] = 127.5 + 127.5 * np.cos(np.pi / 8 * square[inside] / radius)


def _star(canvas: Array, rows: Array, columns: Array, centre: tuple[float, float], radius: float) -> None:
    """Spokes that meet in the middle."""
    y, x = rows - centre[0], columns - centre[1]
    inside = y**2 + x**2 < radius**2
    canvas[inside] = np.where(np.sin(36 * np.arctan2(y, x))[inside] > 0, 240, 20)
