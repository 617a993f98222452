"""Convolution by Fourier transforms, tile by tile, through torch: what the FFT engines of all devices run.

For each block of filters: their spectra W (:func:`transform_filters`); then for each chunk of tiles: cut, transform,
multiply, transform back, and put the results where they belong. With f for a frequency, m for a tile of an image:

    fprop   Y[f,k,m]  = sum over c of  conj(W)[f,k,c] * X[f,c,m]
    dgrad   DX[f,c,m] = sum over k of  W[f,k,c] * DY[f,k,m]
    wgrad   DW[f,k,c] = sum over m of  conj(DY)[f,k,m] * X[f,c,m]

``matrix``: spectra are put in order with the frequency first, which makes each of these one batched matrix product.
``pointwise``: they stay as the transforms return them, with the frequency last, and are multiplied channel by channel.

Tiles are cut into the workspace, from any layout and dtype. What the library's transforms return it allocates itself:
their ``out=`` arguments only copy from there. :attr:`Form.reserve` counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from .engine import Runner
from .fft_tiles import Form, Run, runs

__all__ = ["build", "transform_filters"]


def build(form: Form) -> Runner:
    """The runner of a problem in tiles, on tensors of any device."""
    problem = form.problem
    direction, own, other = problem.direction, problem.c // problem.groups, problem.k // problem.groups
    real = torch.float64 if form.size == 8 else torch.float32
    sizes = [-(-count * form.size // 64) * 64 for count in form.regions.values()]
    low = [pad[0] for pad in problem.padding]
    backward = direction == "dgrad"
    start = [pad - reach for pad, reach in zip(low, form.reach, strict=True)] if backward else [-pad for pad in low]
    images_spread = problem.stride if backward else (1,) * problem.rank
    images_size = problem.out if backward else problem.spatial
    results_at = form.reach if backward else (0,) * problem.rank
    spread = (1,) * problem.rank if backward else problem.stride
    results_size = problem.spatial if backward else problem.out
    # What a chunk cuts and where it puts its results: the same for all channels and images.
    cuts = {
        box: [
            runs(images_size[a], images_spread[a], start[a], form.valid[a], form.tile[a], form.tile[a], box[a])
            for a in range(problem.rank)
        ]
        for _, box in form.chunks
    }
    puts = {
        box: [
            runs(results_size[a], spread[a], 0, form.valid[a], form.valid[a], form.tile[a], box[a])
            for a in range(problem.rank)
        ]
        for _, box in form.chunks
    }
    once = len(form.chunks) == 1

    def run(a: Tensor, b: Tensor, result: Tensor, workspace: Tensor, bias: Tensor | None) -> None:
        parts = workspace[: sum(sizes)].split(sizes)
        cut, images, filters, results, ordered = (part.view(real) for part in parts)
        x, w = (a, b) if direction != "wgrad" else (a, result)
        spectra: Tensor | None = None
        weights: Tensor | None = None
        for g, groups, o, channels in form.blocks:
            if o == 0:
                spectra = None  # those of other groups
            first, count = g * form.outs + o, groups * channels
            ks, cs = (slice(first, first + count), slice(0, own)) if not backward else (
                slice(g * other, (g + groups) * other), slice(o, o + channels)
            )  # fmt: skip
            block = w[ks, cs]
            weights = None  # before the next ones are there
            if not form.wgrad:
                weights = transform_filters(block, form, cut, filters)
            for at, (batch, box) in enumerate(form.chunks):
                if spectra is None or not once:
                    spectra = None  # before the next one is there
                    source = _planes(x, g * form.ins, groups * form.ins, batch)
                    spectra = _transform(source, cuts[box], box, form, cut, images)
                if weights is not None:
                    made = _multiply(weights, spectra, form, groups, backward, results)
                    target = _planes(result, first, count, batch)
                    _back(made, target, puts[box], results_at, box, form, ordered)
                    continue
                source = _planes(b, first, count, batch)
                errors = _transform(source, puts[box], box, form, cut, filters, conjugate=True)
                _accumulate(errors, spectra, form, groups, results, at == 0)
                del errors
            if form.wgrad:
                made = _rows(results, groups * channels * form.ins, form)
                _store(made, block, form, ordered)

    return run


# -- there ------------------------------------------------------------------------------------------------------------


def transform_filters(w: Tensor, form: Form, cut: Tensor, out: Tensor) -> Tensor:
    """The spectra of filters (k, c, taps), conjugate for a fprop: (frequencies, k * c) in ``out``, or for products
    channel by channel (k * c, frequencies). They depend on w and the tile alone."""
    rows, width = w.shape[0] * w.shape[1], w.shape[1]
    each = form.rows_of(rows)
    several = max(1, each // width)
    wide = min(width, each)
    made = out
    for k in range(0, w.shape[0], several):
        for c in range(0, width, wide):
            part = w[k : k + several, c : c + wide]
            count = part.shape[0] * part.shape[1]
            tiles = cut[: count * form.positions].view(*part.shape[:2], *form.tile)
            tiles.zero_()
            spaced = tiles
            for axis, (reach, step) in enumerate(zip(form.reach, form.problem.dilation, strict=True)):
                spaced = spaced[(slice(None),) * (2 + axis) + (slice(0, reach + 1, step),)]
            spaced.copy_(part)
            made = _spectra(tiles, form, out, rows, k * width + c, form.forward)
    return made


def _transform(
    source: Tensor, cuts: list[list[Run]], box: Sequence[range], form: Form, cut: Tensor, out: Tensor, *,
    conjugate: bool = False,
) -> Tensor:  # fmt: skip
    """The spectra of a chunk's tiles, of planes (channels, images, positions), in the order (channel, image, tile)."""
    channels, images = source.shape[:2]
    tiles = [len(axis) for axis in box]
    together = images
    for count in tiles:
        together *= count
    rows = channels * together
    several = max(1, form.rows_of(rows) // together)
    made = out
    for c in range(0, channels, several):
        part = source[c : c + several]
        count = part.shape[0] * together
        place = cut[: count * form.positions].view(part.shape[0], images, *tiles, *form.tile)
        _cut(part, cuts, place, box)
        made = _spectra(place, form, out, rows, c * together, conjugate)
    return made


def _spectra(tiles: Tensor, form: Form, out: Tensor, rows: int, first: int, conjugate: bool) -> Tensor:
    """Transform tiles: as they come, or as columns from ``first`` on of (frequencies, rows) in ``out``."""
    axes = tuple(range(-form.problem.rank, 0))
    made = torch.fft.rfftn(tiles, dim=axes).view(-1, form.frequencies)
    if conjugate:
        torch.conj_physical_(made)
    if form.pointwise:
        return made
    columns = torch.view_as_complex(out[: 2 * form.frequencies * rows].view(form.frequencies, rows, 2))
    columns[:, first : first + len(made)].copy_(made.t())
    return columns


def _planes(tensor: Tensor, first: int, count: int, batch: range) -> Tensor:
    """Channels and images of a tensor, channels first."""
    return tensor[batch.start : batch.stop, first : first + count].transpose(0, 1)


def _cut(source: Tensor, cuts: list[list[Run]], tiles: Tensor, box: Sequence[range]) -> None:
    """Fill tiles (channels, images, tiles, positions) from planes; what the planes do not have is zero."""
    for piece in product(*cuts):
        place = _at(tiles, piece, box)
        if not all(run.whole for run in piece):
            place.zero_()
        if all(run.length for run in piece):
            _within(place, piece).copy_(_windows(source, piece))


def _at(tiles: Tensor, piece: Sequence[Run], box: Sequence[range]) -> Tensor:
    """The tiles of a piece."""
    for axis, run in enumerate(piece):
        tiles = tiles.narrow(2 + axis, run.first - box[axis].start, run.count)
    return tiles


def _within(tiles: Tensor, piece: Sequence[Run], at: Sequence[int] | None = None) -> Tensor:
    """What of each tile a piece is about, from ``at`` on."""
    index: list[slice] = [slice(None)] * (2 + len(piece))
    for axis, run in enumerate(piece):
        first = run.offset + (at[axis] if at else 0)
        index.append(slice(first, first + (run.length - 1) * run.spacing + 1, run.spacing))
    return tiles[tuple(index)]


def _windows(planes: Tensor, piece: Sequence[Run]) -> Tensor:
    """What of each tile's positions the planes have, as a view (channels, images, tiles, positions)."""
    for axis, run in enumerate(piece):
        needed = (run.count - 1) * run.step + run.length
        planes = planes.narrow(2 + axis, run.source, needed).unfold(2 + axis, run.length, max(1, run.step))
    return planes


# -- multiply ---------------------------------------------------------------------------------------------------------


def _multiply(weights: Tensor, spectra: Tensor, form: Form, groups: int, backward: bool, out: Tensor) -> Tensor:
    """The spectra of results: (frequencies, rows), or (rows, frequencies) channel by channel."""
    ins, count = form.ins, form.frequencies
    if not form.pointwise:
        total = spectra.shape[1] // (groups * ins)
        outs = weights.shape[1] // (groups * ins)
        w = weights.view(count * groups, ins, outs).mT if backward else weights.view(count * groups, outs, ins)
        rows = groups * outs * total
        made = torch.view_as_complex(out[: 2 * count * rows].view(count * groups, outs, total, 2))
        torch.bmm(w, spectra.view(count * groups, ins, total), out=made)
        return made.view(count, rows)
    total = spectra.shape[0] // (groups * ins)
    outs = weights.shape[0] // (groups * ins)
    x = spectra.view(groups, 1, ins, total, count)
    # (groups, outs, ins, 1, frequencies)
    w = weights.view(groups, ins, outs, count).transpose(1, 2) if backward else weights.view(groups, outs, ins, count)
    w = w.unsqueeze(3)
    if form.in_place:
        return torch.mul(x[:, :, 0], w[:, :, 0], out=x[:, :, 0]).view(-1, count)
    rows = groups * outs * total
    made = torch.view_as_complex(out[: 2 * count * rows].view(groups, outs, total, count, 2))
    torch.mul(x[:, :, 0], w[:, :, 0], out=made)
    for c in range(1, ins):
        made.addcmul_(x[:, :, c], w[:, :, c])
    return made.view(rows, count)


def _accumulate(errors: Tensor, spectra: Tensor, form: Form, groups: int, out: Tensor, first: bool) -> None:
    """Add a chunk's products to the spectra of dw, or begin with them."""
    count, own = form.frequencies, form.ins
    if not form.pointwise:
        total = spectra.shape[1] // (groups * own)
        x, dy = spectra.view(count * groups, own, total), errors.view(count * groups, -1, total)
        rows = groups * own * dy.shape[1]
        made = torch.view_as_complex(out[: 2 * count * rows].view(count * groups, dy.shape[1], own, 2))
        if first:
            torch.bmm(dy, x.mT, out=made)
        else:
            torch.baddbmm(made, dy, x.mT, out=made)
        return
    total = spectra.shape[0] // (groups * own)
    x, dy = spectra.view(groups, 1, own, total, count), errors.view(groups, -1, 1, total, count)
    rows = groups * own * dy.shape[1]
    made = torch.view_as_complex(out[: 2 * count * rows].view(groups, dy.shape[1], own, count, 2))
    if form.in_place and first:
        torch.sum(dy.mul_(x), 3, out=made)
        return
    for at in range(total):
        if first and at == 0:
            torch.mul(dy[:, :, :, at], x[:, :, :, at], out=made)
        else:
            made.addcmul_(dy[:, :, :, at], x[:, :, :, at])


# -- back -------------------------------------------------------------------------------------------------------------


def _rows(out: Tensor, rows: int, form: Form) -> Tensor:
    """The spectra that lie in a region, in the order of :func:`_multiply`."""
    shape = (rows, form.frequencies) if form.pointwise else (form.frequencies, rows)
    return torch.view_as_complex(out[: 2 * form.frequencies * rows].view(*shape, 2))


def _inverse(spectra: Tensor, first: int, count: int, form: Form, ordered: Tensor) -> Tensor:
    """The positions of some rows."""
    if form.pointwise:
        part = spectra[first : first + count]
    else:
        part = torch.view_as_complex(ordered[: 2 * form.frequencies * count].view(count, form.frequencies, 2))
        part.copy_(spectra[:, first : first + count].t())
    axes = tuple(range(-form.problem.rank, 0))
    return torch.fft.irfftn(part.view(-1, *form.bins), s=form.tile, dim=axes)


def _back(
    spectra: Tensor, target: Tensor, puts: list[list[Run]], at: Sequence[int], box: Sequence[range], form: Form,
    ordered: Tensor,
) -> None:  # fmt: skip
    """Transform the results of a chunk back and put them into planes (channels, images, positions)."""
    channels, images = target.shape[:2]
    tiles = [len(axis) for axis in box]
    together = images
    for length in tiles:
        together *= length
    several = max(1, form.rows_of(channels * together) // together)
    for c in range(0, channels, several):
        part = target[c : c + several]
        made = _inverse(spectra, c * together, part.shape[0] * together, form, ordered)
        made = made.view(part.shape[0], images, *tiles, *form.tile)
        for piece in product(*puts):
            if all(run.length for run in piece):
                _windows(part, piece).copy_(_within(_at(made, piece, box), piece, at))
        del made


def _store(spectra: Tensor, dw: Tensor, form: Form, ordered: Tensor) -> None:
    """Transform the spectra of dw (k, c) back and put the taps into it."""
    width = dw.shape[1]
    each = form.rows_of(dw.shape[0] * width)
    several, wide = max(1, each // width), min(width, each)
    every = slice(None)
    taps = every, every, *(
        slice(0, reach + 1, step) for reach, step in zip(form.reach, form.problem.dilation, strict=True)
    )  # fmt: skip
    for k in range(0, dw.shape[0], several):
        for c in range(0, width, wide):
            part = dw[k : k + several, c : c + wide]
            made = _inverse(spectra, k * width + c, part.shape[0] * part.shape[1], form, ordered)
            part.copy_(made.view(*part.shape[:2], *form.tile)[taps])
            del made
