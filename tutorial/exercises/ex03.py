"""Exercise 3: how many blocks an SM holds, and how many turns a grid takes (chapter 3).

Grade it with `make exercise N=3`, or `python -m pytest tutorial/exercises/test_ex03.py`.

An SM of an H200 has room for 32 blocks, 64 warps, 65536 registers, of which each of its four schedulers has a quarter,
and 233472 bytes of shared memory. A block takes

    warps       one for each 32 threads, begun ones too
    registers   each warp 32 * `registers`, rounded up to a multiple of 256, all from one scheduler; a block's warps
                may go to any of them
    shared      its own bytes and 1024 more
"""

from __future__ import annotations


def blocks_per_sm(threads: int, registers: int, shared: int) -> int:
    """How many blocks of so many threads, with so many registers a thread and shared bytes a block, an SM holds; 0 if
    not even one."""
    raise NotImplementedError("your turn: each of the four limits allows so many blocks")


def occupancy(threads: int, registers: int, shared: int) -> float:
    """The share of an SM's 64 warps that are there."""
    raise NotImplementedError("your turn: warps of all blocks of an SM, over 64")


def turns(blocks: int, per_sm: int, sms: int = 132) -> tuple[int, float]:
    """How many turns a grid of equal blocks takes, and how full the GPU is over all of them, 1.0 if to the last.

    A turn is the time of a block. Each SM runs `per_sm` blocks at a time; the full ones count per_sm * sms.
    """
    raise NotImplementedError("your turn: round up, and set the blocks against the places of all turns")
