"""Policy: what narrows the choice of an engine, given per call, for a block of code, or by the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any

from ..problem import PRECISIONS

__all__ = ["DEFAULT", "Policy", "current_policy", "policy"]

ACCURACIES = ("default", "strict")


@dataclass(frozen=True)
class Policy:
    """Limits on the choice.

    ``engine``: a name, or several separated by commas of which the first that accepts is taken; None chooses by cost.
    ``precision``: how f32 products are formed (``ieee``, ``tf32``, ``tf32x3``); None follows PyTorch's own setting.
    ``accuracy``: ``strict`` leaves out engines whose results are not plain sums of products (Winograd, FFT).
    ``max_workspace``: bytes of scratch memory one call may use; None for no limit.
    ``batch_invariant``: the bits of one image's result must not depend on the batch it is in.
    ``deterministic``: the same call gives the same bits.
    """

    engine: str | None = None
    precision: str | None = None
    accuracy: str = "default"
    max_workspace: int | None = None
    batch_invariant: bool = False
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.accuracy not in ACCURACIES:
            raise ValueError(f"accuracy is {self.accuracy!r}; wanted one of {', '.join(ACCURACIES)}")
        if self.precision is not None and self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}; wanted one of {', '.join(PRECISIONS)}")
        if self.engine is not None and not isinstance(self.engine, str):
            raise TypeError(f"engine is {self.engine!r}; wanted an engine's name such as 'cpu.naive'")
        limit = self.max_workspace
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
            raise ValueError(f"max_workspace is {self.max_workspace!r}; wanted a number of bytes >= 0")

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
        readers: dict[str, Any] = {"max_workspace": int, "batch_invariant": _flag, "deterministic": _flag}
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
_AT_START = Policy(engine=os.environ.get("OPENCONV_ENGINE") or None)
_current: ContextVar[Policy] = ContextVar("openconv_policy", default=_AT_START)


def current_policy() -> Policy:
    """The policy in force: that of the innermost ``with openconv.policy(...)``, else ``OPENCONV_ENGINE`` as it was when
    openconv was imported."""
    return _current.get()


@contextmanager
def policy(**changes: Any) -> Iterator[Policy]:
    """Run a block under another policy: ``with openconv.policy(batch_invariant=True, max_workspace=2**20): ...``."""
    new = replace(current_policy(), **changes)
    token = _current.set(new)
    try:
        yield new
    finally:
        _current.reset(token)
