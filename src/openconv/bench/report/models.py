"""The table of whole models: torch as it is, its convolutions converted, and batch norms and activations fused."""

from __future__ import annotations

from collections.abc import Sequence

from ..models import ModelRecord
from .tables import markdown_table

__all__ = ["model_means", "model_row"]


def model_means(records: Sequence[ModelRecord]) -> list[str]:
    """A paragraph and a table; nothing of no records."""
    if not records:
        return []
    explanation = (
        "Whole models in inference, f32, on images of 224x224: `convert(model)` sends the convolutions through "
        "openconv and leaves the rest to torch; `fuse=True` folds batch norms into them and fuses activation modules. "
        "Torch is called eagerly. Ratios are its time over that of the converted model."
    )
    titles = ("model", "batch", "layout", "torch ms", "convert ms", "times faster", "fused ms", "times faster")
    rows = [[*model_row(each)] for each in records]
    for row in rows:
        row[5], row[7] = (f"**{row[at]}**" if row[at] else "" for at in (5, 7))
    return ["### Models", explanation, markdown_table(titles, rows, words=3)]


def model_row(record: ModelRecord) -> list[str]:
    """Model, batch, layout, torch's time, and for either conversion its time and how many times as fast that is; empty
    where it was not recorded."""
    cells = [record.model, str(record.batch), record.layout, _milli(record, "torch")]
    for who, ratio in (("openconv", record.ratio), ("fused", record.fused_ratio)):
        cells += [_milli(record, who), ""] if ratio is None else [_milli(record, who), f"{ratio:.2f}"]
    return cells


def _milli(record: ModelRecord, who: str) -> str:
    found = record.seconds.get(who)
    return "" if found is None else f"{found['median'] * 1e3:.1f}"
