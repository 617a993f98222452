"""What is raised where a graph cannot be computed."""

from __future__ import annotations

__all__ = ["cudnnGraphNotSupportedError"]


class cudnnGraphNotSupportedError(RuntimeError):
    """The graph, an operation, a data type or an option is known by name and not computed here."""
