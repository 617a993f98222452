"""Policy: what narrows and informs the choice of an engine, per call, for a block of code, or by the environment."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from ..problem import PRECISIONS

__all__ = ["DEFAULT", "TUNINGS", "Policy", "current_policy", "policy", "tuning", "under"]

ACCURACIES = ("default", "strict")
TUNINGS = ("heuristic", "measure", "off")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Policy:
    """Limits on the choice.

    ``engine``: a name, or several separated by commas of which the first that accepts is taken; None chooses by cost.
    ``precision``: how f32 products are formed (``ieee``, ``tf32``, ``tf32x3``); None is ``ieee``, also where
    ``torch.backends`` allows cuDNN tf32.
    ``accuracy``: ``strict`` leaves out engines whose results are not plain sums of products (Winograd, FFT).
    ``max_workspace``: bytes of scratch memory one call may use; None for no limit.
    ``batch_invariant``: the bits of one image's result must not depend on the batch it is in.
    ``deterministic``: the same call gives the same bits.
    ``tuning``: ``heuristic`` goes by the tuning database, then by its nearest neighbour, then by predictions, and times
    nothing; ``measure`` times the best candidates of a problem that the database does not know, once, and remembers;
    ``off`` goes by predictions alone. See :class:`tuning`.
    ``measure_seconds``: how long measuring one problem may take.
    """

    engine: str | None = None
    precision: str | None = None
    accuracy: str = "default"
    max_workspace: int | None = None
    batch_invariant: bool = False
    deterministic: bool = True
    tuning: str = "heuristic"
    measure_seconds: float = 0.5

    def __post_init__(self) -> None:
        if self.accuracy not in ACCURACIES:
            raise ValueError(f"accuracy is {self.accuracy!r}; wanted one of {', '.join(ACCURACIES)}")
        if self.precision is not None and self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}; wanted one of {', '.join(PRECISIONS)}")
        if self.engine is not None and not isinstance(self.engine, str):
            raise TypeError(f"engine is {self.engine!r}; wanted an engine's name such as 'cpu.naive'")
        if self.tuning not in TUNINGS:
            raise ValueError(f"tuning is {self.tuning!r}; wanted one of {', '.join(TUNINGS)}")
        if not isinstance(self.measure_seconds, int | float) or not 0 < self.measure_seconds < math.inf:
            raise ValueError(f"measure_seconds is {self.measure_seconds!r}; wanted a number of seconds > 0")
        limit = self.max_workspace
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
            raise ValueError(f"max_workspace is {self.max_workspace!r}; wanted a number of bytes >= 0")
        values = tuple(getattr(self, f.name) for f in fields(self))
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        hashed: int = self._hash  # type: ignore[attr-defined]  # counted once: a policy is part of every plan's key
        return hashed

    def __reduce__(self) -> tuple[Any, ...]:
        return Policy, tuple(getattr(self, f.name) for f in fields(self))  # another process hashes otherwise

    def but(self, **changes: Any) -> Policy:
        """This policy with those changes that are not None."""
        changes = {name: value for name, value in changes.items() if value is not None}
        return replace(self, **changes) if changes else self

    def __str__(self) -> str:
        """``key=value`` for all that differs from the default, separated by semicolons."""
        return ";".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """The policy that prints as ``text``."""
        if not text:
            return DEFAULT
        readers: dict[str, Any] = {"max_workspace": int, "batch_invariant": _flag, "deterministic": _flag,
                                   "measure_seconds": float}  # fmt: skip
        values: dict[str, Any] = {}
        for part in text.split(";"):
            name, _, value = part.partition("=")
            if name not in cls.__dataclass_fields__:
                raise ValueError(f"policy {text!r}: {name!r} is none of {', '.join(cls.__dataclass_fields__)}")
            values[name] = readers.get(name, str)(value)
        return cls(**values)

    def over(self, base: Policy) -> Policy:
        """This policy where it says something, ``base`` elsewhere."""
        if self == DEFAULT:
            return base
        said = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}
        return replace(base, **said)

    def for_backward(self) -> Policy:
        """The policy of a backward pass: an engine forced on the forward pass is preferred there, not required."""
        if self.engine is None or self.engine.endswith(","):
            return self
        return replace(self, engine=self.engine + ",")


def _flag(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(f"flag is {text!r}; wanted True or False")
    return text == "True"


DEFAULT = Policy()
# The environment is read once: a look at it costs as much as the rest of a plan's key.
_base = Policy(
    engine=os.environ.get("OPENCONV_ENGINE") or None, tuning=os.environ.get("OPENCONV_TUNING") or "heuristic"
)
_current: ContextVar[Policy | None] = ContextVar("openconv_policy", default=None)


def current_policy() -> Policy:
    """The policy in force: that of the innermost ``with openconv.policy(...)``, else that of the process:
    ``OPENCONV_ENGINE`` and ``OPENCONV_TUNING`` as they were when openconv was imported, and ``openconv.tuning``."""
    return _current.get() or _base


@contextmanager
def policy(**changes: Any) -> Iterator[Policy]:
    """Run a block under another policy: ``with openconv.policy(batch_invariant=True, max_workspace=2**20): ...``."""
    new = replace(current_policy(), **changes)
    token = _current.set(new)
    try:
        yield new
    finally:
        _current.reset(token)


def under(chosen: Policy, call: Callable[[], Value]) -> Callable[[], Value]:
    """The call, run under this policy each time; half a microsecond, less than a ``with`` statement."""

    def run() -> Value:
        before = _current.get()
        _current.set(chosen)
        try:
            return call()
        finally:
            _current.set(before)

    return run


class tuning:
    """What choices go by: ``openconv.tuning("measure")`` for the whole process, ``with openconv.tuning("off"):`` for a
    block of code.

    - ``"heuristic"``, the default, times nothing: the tuning database, then its nearest neighbour, then predictions.
    - ``"measure"`` times the candidates of each new problem at its first call, for ``seconds`` at most (half a second
      if not given), and remembers the result in the user's database. A step once begun, which may be a compilation, is
      finished. Nothing is timed while a CUDA graph is captured.
    - ``"off"`` leaves the database out: predictions alone.
    """

    def __init__(self, mode: str, *, seconds: float | None = None) -> None:
        global _base
        changes: dict[str, Any] = {"tuning": mode} | ({} if seconds is None else {"measure_seconds": seconds})
        self._process, self._block = _base, _current.get()
        self._inside = replace(self._block or self._process, **changes)
        _base = replace(_base, **changes)
        if self._block is not None:
            _current.set(self._inside)

    def __enter__(self) -> Policy:
        global _base
        _base = self._process  # the block alone is meant, in this thread
        _current.set(self._inside)
        return self._inside

    def __exit__(self, *failure: object) -> None:
        _current.set(self._block)
