"""PNG with 16 bits a channel, which Pillow reads as 8 bits unless the image is grey.

A PNG file is a signature and chunks of (length, type, data, CRC). The image data are one zlib stream over all IDAT
chunks: for each row a byte that names its filter, then the row's bytes, each as its difference from a prediction out of
the bytes to the left (a), above (b) and above left (c).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numba
import numpy as np

__all__ = ["is_png16", "read_png16", "write_png16"]

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}
_TYPES = {channels: kind for kind, channels in _CHANNELS.items()}


def is_png16(content: bytes) -> bool:
    """Whether these are the bytes of a PNG with 16 bits a channel."""
    return content[:8] == _SIGNATURE and content[12:16] == b"IHDR" and content[24:25] == b"\x10"


def read_png16(content: bytes) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """(H, W, channels): grey, grey with alpha, RGB or RGBA. ValueError says what is wrong with the file."""
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", content[16:29])
    if depth != 16 or kind not in _CHANNELS:
        raise ValueError(
            f"a PNG of type {kind} with {depth} bits; wanted grey or RGB, with or without alpha, of 16 bits"
        )
    if interlaced:
        raise ValueError("an interlaced PNG of 16 bits; save it without interlacing")
    step = 2 * _CHANNELS[kind]
    size = height * (1 + width * step)
    data = b"".join(data for name, data in _chunks(content) if name == b"IDAT")
    try:
        rows = zlib.decompressobj().decompress(data, size)
    except zlib.error as error:
        raise ValueError(f"the PNG's image data are damaged ({error})") from None
    if len(rows) != size:
        raise ValueError(f"the PNG holds {len(rows)} bytes of image data; its header asks for {size}")
    table = np.frombuffer(rows, np.uint8).reshape(height, 1 + width * step).copy()
    if table[:, 0].max(initial=0) > 4:
        raise ValueError("the PNG's image data are damaged (unknown row filter)")
    _unfilter(table, step)
    return np.ascontiguousarray(table[:, 1:]).view(">u2").astype(np.uint16).reshape(height, width, -1)


def write_png16(pixels: np.ndarray[Any, np.dtype[np.uint16]], profile: bytes | None = None) -> bytes:
    """The bytes of a PNG of (H, W, channels); each row is stored as its difference from the one above."""
    height, width, channels = pixels.shape
    rows = pixels.astype(">u2").view(np.uint8).reshape(height, -1)
    table = np.full((height, 1 + rows.shape[1]), 2, np.uint8)
    table[:, 1:] = np.diff(rows, axis=0, prepend=np.zeros_like(rows[:1]))
    head = struct.pack(">IIBBBBB", width, height, 16, _TYPES[channels], 0, 0, 0)
    parts = [(b"IHDR", head)]
    parts += [(b"iCCP", b"profile\0\0" + zlib.compress(profile))] if profile else []
    parts += [(b"IDAT", zlib.compress(table.tobytes(), 6)), (b"IEND", b"")]
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )


def _chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = len(_SIGNATURE)
    while at + 12 <= len(content):
        (length,) = struct.unpack_from(">I", content, at)
        name, data = content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
        check = content[at + 8 + length : at + 12 + length]
        if len(check) < 4 or zlib.crc32(name + data) != int.from_bytes(check, "big"):
            raise ValueError(f"the PNG's {name.decode('latin-1')} chunk is damaged or cut off")
        yield name, data
        at += 12 + length


@numba.njit(cache=True)
def _unfilter(table, step):  # type: ignore[no-untyped-def]
    """Turn differences back into bytes, in place, row by row; column 0 names each row's filter."""
    height, width = table.shape
    for row in range(height):
        kind = table[row, 0]
        for at in range(1, width):
            a = int(table[row, at - step]) if at > step else 0
            b = int(table[row - 1, at]) if row > 0 else 0
            c = int(table[row - 1, at - step]) if row > 0 and at > step else 0
            guess = 0
            if kind == 1:
                guess = a
            elif kind == 2:
                guess = b
            elif kind == 3:
                guess = (a + b) // 2
            elif kind == 4:
                to_a, to_b, to_c = abs(b - c), abs(a - c), abs(a + b - 2 * c)
                guess = a if to_a <= to_b and to_a <= to_c else b if to_b <= to_c else c
            table[row, at] = (table[row, at] + guess) & 255
