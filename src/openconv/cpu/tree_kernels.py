"""Kernels of trees on the CPU: loops over tiles, rows and units, around a unit that is generated from the expressions.

A unit is one SIMD value of elements along the last axis, :data:`~.simd.LANE_BYTES` of what is computed in; the end of a
row is a unit of fewer lanes. The other axes are counted through as rows. Three kernels, which differ in the last axis:

    pointwise   no reductions
    along       it is reduced: a unit is joined lane by lane into registers, lanes into one at the end
    across      it is kept: each unit of a row has sums of its own, in memory that stays in the first-level cache

Reductions sum, multiply and compare in f64. Where a result has many terms they are cut into pieces, whose sums lie in
the workspace until a second launch joins them. Tiles and pieces follow from sizes alone, so that the number of threads
never shows in a result.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from .runtime import Kernel, kernel
from .simd import argument, next_tile, thread_index
from .tree_unit import (
    FINISH,
    FIRST,
    KEPT,
    PARTS,
    PIECES,
    ROWS,
    SLOT,
    TILE_KEPT,
    TILE_ROWS,
    TILE_WIDTH,
    TILES,
    WIDTH,
    WORKSPACE,
    Code,
    addresses,
    finish,
    folded,
    joined,
    known,
    lanes_of,
    nothing,
    origin,
    places,
    row_values,
    save,
    saved,
    unit,
    unit_joined,
)

__all__ = ["compiled"]


@cache
def compiled(code: Code) -> Kernel:
    """The kernel of a code, compiled or loaded."""
    make = {"pointwise": _pointwise_kernel, "along": _along_kernel, "across": _across_kernel}[code.kind]
    return make(known(code), lanes_of(code.tree))


def _pointwise_kernel(key: str, lanes: int) -> Kernel:
    KEY, L = key, lanes

    @kernel
    def tree_pointwise(block: Any) -> None:
        tiles, rows, width = argument(block, TILES), argument(block, ROWS), argument(block, WIDTH)
        tile_rows, tile_width, parts = argument(block, TILE_ROWS), argument(block, TILE_WIDTH), argument(block, PARTS)
        tile = next_tile(block)
        while tile < tiles:
            first = tile % parts * tile_width
            row, last = tile // parts * tile_rows, min(width, first + tile_width)
            end = min(rows, row + tile_rows)
            while row < end:
                at = addresses(KEY, block, places(KEY, 1, block, origin(KEY), row))
                fixed, column = row_values(KEY, at), first
                while column + L <= last:
                    unit(KEY, block, at, fixed, column, L)
                    column += L
                if column < last:
                    unit(KEY, block, at, fixed, column, last - column)
                row += 1
            tile = next_tile(block)

    return tree_pointwise


def _along_kernel(key: str, lanes: int) -> Kernel:
    """A tile is some kept places, or a piece of one: some rows, or a part of one."""
    KEY, L = key, lanes

    @kernel
    def tree_along(block: Any) -> None:
        tiles, all_kept, rows = argument(block, TILES), argument(block, KEPT), argument(block, ROWS)
        width, tile_kept, tile_rows = argument(block, WIDTH), argument(block, TILE_KEPT), argument(block, TILE_ROWS)
        tile_width, parts, pieces = argument(block, TILE_WIDTH), argument(block, PARTS), argument(block, PIECES)
        finishes, workspace, slot = argument(block, FINISH), argument(block, WORKSPACE), argument(block, SLOT)
        tile = next_tile(block)
        while tile < tiles:
            number = tile * pieces if finishes else tile
            kept = number // pieces * tile_kept
            end_kept, piece = min(all_kept, kept + tile_kept), number % pieces
            while kept < end_kept:
                start = places(KEY, 0, block, origin(KEY), kept)
                if finishes:
                    total = saved(workspace + kept * pieces * slot, folded(KEY, nothing(KEY)))
                    other = 1
                    while other < pieces:
                        total = joined(KEY, total, saved(workspace + (kept * pieces + other) * slot, total))
                        other += 1
                    finish(KEY, block, total, start[-1], 1)
                else:
                    sums, more, first = nothing(KEY), nothing(KEY), piece % parts * tile_width
                    row, last = piece // parts * tile_rows, min(width, first + tile_width)
                    end = min(rows, row + tile_rows)
                    while row < end:
                        at = addresses(KEY, block, places(KEY, 1, block, start, row))
                        fixed, column = row_values(KEY, at), first
                        while column + 2 * L <= last:  # two sums, so that neither waits for the other
                            sums = unit_joined(KEY, block, at, fixed, column, L, sums)
                            more = unit_joined(KEY, block, at, fixed, column + L, L, more)
                            column += 2 * L
                        while column < last:
                            sums = unit_joined(KEY, block, at, fixed, column, min(L, last - column), sums)
                            column += L
                        row += 1
                    sums = joined(KEY, sums, more)
                    if pieces > 1:
                        save(workspace + (kept * pieces + piece) * slot, folded(KEY, sums))
                    else:
                        finish(KEY, block, folded(KEY, sums), start[-1], 1)
                kept += 1
            tile = next_tile(block)

    return tree_along


def _across_kernel(key: str, lanes: int) -> Kernel:
    """A tile is some kept places, each with all rows, or a piece of one: a part of the row's width, and some rows."""
    KEY, L = key, lanes

    @kernel
    def tree_across(block: Any) -> None:
        tiles, all_kept, rows = argument(block, TILES), argument(block, KEPT), argument(block, ROWS)
        width, tile_kept, tile_rows = argument(block, WIDTH), argument(block, TILE_KEPT), argument(block, TILE_ROWS)
        tile_width, parts, pieces = argument(block, TILE_WIDTH), argument(block, PARTS), argument(block, PIECES)
        finishes, workspace, slot = argument(block, FINISH), argument(block, WORKSPACE), argument(block, SLOT)
        none = nothing(KEY)
        one = slot // ((tile_width + L - 1) // L)  # bytes of a unit's sums
        apart = argument(block, FIRST + len(origin(KEY)) - 1)
        own = workspace + thread_index(block) * slot
        tile = next_tile(block)
        while tile < tiles:
            number = tile * pieces if finishes else tile
            kept, piece = number // (parts * pieces) * tile_kept, number % pieces
            first, end_kept = number // pieces % parts * tile_width, min(all_kept, kept + tile_kept)
            last = min(width, first + tile_width)
            while kept < end_kept:
                start = places(KEY, 0, block, origin(KEY), kept)
                held = own
                if pieces > 1:
                    held = workspace + ((kept * parts + first // tile_width) * pieces + piece) * slot
                if finishes:
                    other = 1
                    while other < pieces:
                        column, here = first, held
                        while column < last:
                            save(here, joined(KEY, saved(here, none), saved(here + other * slot, none)))
                            column, here = column + L, here + one
                        other += 1
                else:
                    column, here = first, held
                    while column < last:
                        save(here, none)
                        column, here = column + L, here + one
                    row = piece * tile_rows
                    end = min(rows, row + tile_rows)
                    while row < end:
                        at = addresses(KEY, block, places(KEY, 1, block, start, row))
                        fixed, column, here = row_values(KEY, at), first, held
                        while column + L <= last:
                            save(here, unit_joined(KEY, block, at, fixed, column, L, saved(here, none)))
                            column, here = column + L, here + one
                        if column < last:
                            save(here, unit_joined(KEY, block, at, fixed, column, last - column, saved(here, none)))
                        row += 1
                if finishes or pieces == 1:
                    column, here = first, held
                    while column < last:
                        count = min(L, last - column)
                        finish(KEY, block, saved(here, none), start[-1] + column * apart, count)
                        column, here = column + L, here + one
                kept += 1
            tile = next_tile(block)

    return tree_across
