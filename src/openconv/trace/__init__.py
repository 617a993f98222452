"""``openconv trace``: what an engine's blocks load, multiply and store, step by step, and a page that shows it."""

from .model import Trace, totals
from .tracers import TRACERS, trace_engine

__all__ = ["TRACERS", "Trace", "totals", "trace_engine"]
