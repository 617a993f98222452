"""Numbers as people read them: three significant digits and a unit."""

from __future__ import annotations

__all__ = ["bytes_text", "count_text", "percent_text", "ratio_text", "seconds_text"]

_LARGE = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_TIMES = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def _digits(value: float) -> str:
    """Three significant digits without an exponent: 0.0123, 1.23, 12.3, 123, 1234."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:#.3g}".rstrip(".")


def count_text(value: float, unit: str = "") -> str:
    """``1.85 GFLOP`` from 1.85e9 and ``FLOP``; no decimals below one thousand."""
    prefix, scale = next(((p, s) for p, s in _LARGE if abs(value) >= s), ("", 1.0))
    number = _digits(value / scale) if prefix else f"{value:.0f}"
    return f"{number} {prefix}{unit}".strip()


def bytes_text(value: float) -> str:
    """``12.9 MB``: powers of ten, as in bandwidths."""
    return count_text(value, "B")


def seconds_text(value: float) -> str:
    """``1.23 s``, ``12.3 ms`` or ``4.56 us``."""
    unit, scale = next(((u, s) for u, s in _TIMES if value >= s), _TIMES[-1])
    return f"{_digits(value / scale)} {unit}"


def percent_text(value: float) -> str:
    """``87 %`` from 0.87; one decimal below ten per cent."""
    return f"{100 * value:.0f} %" if value >= 0.0995 else f"{100 * value:.1f} %"


def ratio_text(value: float) -> str:
    """``1.84x``: how many times."""
    return f"{value:.2f}x" if value < 9.995 else f"{value:.1f}x" if value < 99.95 else f"{value:.0f}x"
