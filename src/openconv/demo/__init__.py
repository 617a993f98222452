"""The demonstration: filter a picture, check every engine, race against PyTorch, and leave a page to look at."""

from .run import run_demo

__all__ = ["run_demo"]
