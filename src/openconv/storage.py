"""Where openconv keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_root"]


def cache_root() -> Path:
    """$OPENCONV_CACHE_DIR, or openconv in the user's cache directory."""
    root = os.environ.get("OPENCONV_CACHE_DIR")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "openconv"
