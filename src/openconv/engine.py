"""The Engine contract, refusals, and the registry: one ordered list, the reference last.

An engine is one algorithm on one kind of device. It is stateless, and its file answers in this order: docstring
(idea, formula, when it wins and loses), ``name``, :meth:`~Engine.refusals`, :meth:`~Engine.traits`,
:meth:`~Engine.workspace_bytes`, :meth:`~Engine.knobs`, :meth:`~Engine.cost`, :meth:`~Engine.build`.

Adding an engine to the package is one file and one line in :data:`ENGINES`. A program adds one of its own by
:func:`register`:

    >>> @register
    ... class Box3x3(Engine): ...
"""

from __future__ import annotations

import hashlib
import inspect
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from .device import Device
from .problem import Problem

__all__ = [
    "ENGINES",
    "Engine",
    "Knobs",
    "Runner",
    "Traits",
    "UnsupportedProblem",
    "code_digest",
    "engine_named",
    "engines",
    "find_engine",
    "register",
    "unregister",
    "when_engines_change",
]

ENGINES = (
    "openconv.cpu.filter2d:Filter2d",
    "openconv.cpu.depthwise:Depthwise",
    "openconv.cpu.winograd:Winograd",
    "openconv.cpu.pixels:Pixels",
    "openconv.cpu.gemm_1x1:Gemm1x1",
    "openconv.cpu.direct:Direct",
    "openconv.cpu.fft:Fft",
    "openconv.cpu.im2col_gemm:Im2colGemm",
    "openconv.cpu.separable:Separable",
    "openconv.rewrites.as_2d:CpuAs2d",
    "openconv.rewrites.phases:CpuPhases",
    "openconv.rewrites.groups:CpuGroups",
    "openconv.rewrites.fold_padding:CpuFoldPadding",
    "openconv.rewrites.fold_columns:CpuFoldColumns",
    "openconv.rewrites.split:CpuSplit",
    "openconv.cpu.naive:Naive",
    "openconv.cuda.filter2d:Filter2d",
    "openconv.cuda.depthwise:Depthwise",
    "openconv.cuda.depthwise_mma:DepthwiseMma",
    "openconv.cuda.few_channels:FewChannels",
    "openconv.cuda.patch_rows:PatchRows",
    "openconv.cuda.patches:Patches",
    "openconv.cuda.pixels:Pixels",
    "openconv.cuda.igemm_groups:IgemmGroups",
    "openconv.cuda.igemm_sm90:IgemmSm90",
    "openconv.cuda.igemm:Igemm",
    "openconv.cuda.winograd:Winograd",
    "openconv.cuda.gemm_1x1:Gemm1x1",
    "openconv.cuda.tiled:Tiled",
    "openconv.cuda.fft:Fft",
    "openconv.cuda.im2col_gemm:Im2colGemm",
    "openconv.rewrites.as_2d:CudaAs2d",
    "openconv.rewrites.phases:CudaPhases",
    "openconv.rewrites.groups:CudaGroups",
    "openconv.rewrites.fold_padding:CudaFoldPadding",
    "openconv.cuda.pad_channels:PadChannels",
    "openconv.cuda.fold_columns:FoldColumns",
    "openconv.cuda.exchange:Exchange",
    "openconv.rewrites.split:CudaSplit",
    "openconv.cuda.naive:Naive",
)
"""Every engine as ``module:class``, imported at the first choice. Ties in predicted cost go to the earlier one; the
last of each device accepts every problem and needs no workspace."""

Runner = Callable[..., None]
"""What an engine builds: ``run(a, b, out, workspace, bias)``.

``a`` and ``b`` are the two inputs of the pass (fprop: x, w; dgrad: dy, w; wgrad: x, dy), ``out`` the tensor to fill,
all in the layouts and dtypes of the problem that was built; ``workspace`` is a byte tensor of ``workspace_bytes`` or
None; ``bias`` is a vector over the result's channels or None, and is given to engines that set ``takes_bias`` only.
Engines that set ``takes_finish`` are chosen for the problem with its bias alone, built for the epilogue of a
:class:`~openconv.epilogue.Finish`, and given its residual, which lies as ``out`` does, behind the bias.
Engines that set ``takes_epilogue`` get in its place a tuple of the epilogue's operands, in its order, in the result's
dtype and those of its shape in its layout.

Of a problem that is fused further (``Problem.is_fused``), which engines that set ``takes_fusion`` alone are given, the
tuple begins with the prologue's vectors, of f32. Where there is more to fill, ``more`` follows it, a tuple of tensors:
other results of the epilogue, which lie as ``out`` does, and the two vectors of statistics, of f32.
"""


@dataclass(frozen=True)
class Knobs:
    """Tunable constants of an engine; engines subclass this with fields of their own."""

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in vars(self).items()) or "-"

    def like(self, other: Knobs) -> bool:
        """Whether what these of one problem take says something of the others, at the same place of the list of a
        neighbour."""
        return True


@dataclass(frozen=True)
class Traits:
    """What can be relied on.

    ``error_bound`` bounds the distance to float64 as a share of sum(|x|*|w|), the size of the terms added up.
    ``plain_sum`` says that each result is the sum of its products in some order, which Winograd and FFT give up.
    ``batch_invariant`` says that the bits of one image's result do not depend on the batch it is in.
    """

    accumulator: str
    error_bound: float
    deterministic: bool = True
    batch_invariant: bool = True
    plain_sum: bool = True


class Engine(ABC):
    """One algorithm on one kind of device."""

    name: ClassVar[str]
    """Permanent key such as ``cpu.depthwise``; never reused for something else."""
    device: ClassVar[str] = "cpu"
    """The kind of device it runs on."""
    takes_bias: ClassVar[bool] = False
    """Whether the runner adds a per-channel bias itself."""
    takes_finish: ClassVar[bool] = False
    """Whether the runner adds a residual and limits the result as it stores it (:class:`~openconv.epilogue.Finish`)."""
    takes_low: ClassVar[bool] = False
    """Whether the runner of a CPU's engine reads and writes f16 and bf16 by itself, computing in f32: its refusals,
    workspace and build then take problems of these dtypes, with the knobs of the same one in f32. It may need more
    workspace than there, which no policy limits, as it limits no casts."""
    takes_epilogue: ClassVar[bool] = False
    """Whether the runner computes any epilogue of a floating-point problem itself."""
    takes_fusion: ClassVar[bool] = False
    """Whether the runner computes prologues, other results of an epilogue and statistics itself."""
    proven: ClassVar[bool] = True
    """Whether its results and its predictions have been checked on a device of its kind; else it runs only where it is
    named."""
    by_values: ClassVar[bool] = False
    """Whether its time depends on what the filter holds, so that measuring it on random numbers says nothing."""

    @abstractmethod
    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        """One sentence for each unmet need, with the value seen; nothing if the problem is accepted."""

    @abstractmethod
    def traits(self, problem: Problem, knobs: Any) -> Traits:
        """What can be relied on when these knobs run this problem."""

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Any) -> int:
        """Scratch memory of one call, beyond inputs and result."""
        return 0

    def copies(self, problem: Problem, knobs: Any) -> tuple[str, ...]:
        """What the runner copies before it computes, one phrase each, for ``explain``."""
        return ()

    def knobs(self, problem: Problem, device: Device) -> Iterable[Any]:
        """The default first, then the search space."""
        return (Knobs(),)

    @abstractmethod
    def cost(self, problem: Problem, device: Device, knobs: Any) -> float:
        """Predicted seconds."""

    @abstractmethod
    def build(self, problem: Problem, device: Device, knobs: Any) -> Runner:
        """Compile for this problem; the runner may be called from several threads at once."""

    def told(self, problem: Problem, knobs: Any) -> str:
        """What a run consists of, for ``explain``, where its knobs alone do not say it."""
        return ""

    def reasons(self, problem: Problem, device: Device, knobs: Any) -> tuple[str, ...]:
        """How its prediction comes about, a sentence each, for ``explain``."""
        return ()

    @property
    def summary(self) -> str:
        """The first sentence of the engine's docstring."""
        return (inspect.getdoc(type(self)) or "").split("\n\n")[0].replace("\n", " ")

    @property
    def source(self) -> str:
        """The file to read; ``?`` for a class that was typed at a prompt."""
        try:
            return inspect.getsourcefile(type(self)) or "?"
        except (OSError, TypeError):
            return "?"

    @property
    def version(self) -> str:
        """A digest of the code that runs: its file and those beside it that it imports, without comments, docstrings
        and the cost model. A measured time holds for one version. A class without a file has one of its own in each
        process."""
        source = self.source
        return code_digest(source) if Path(source).is_file() else _typed_version(type(self))


# What starts a line is looked for with the end of the line before, many times faster than with ^.
_PROSE = re.compile(r'\n\s*(?:""".*?"""|#[^\n]*)|\n    def cost\(.*?(?=\n    def )', re.DOTALL)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_BEYOND = ("launch", "jit", "device")  # what surrounds a CUDA kernel and does not change what it takes


@cache
def _typed_version(engine: type[Engine]) -> str:
    return secrets.token_hex(6)


@cache
def code_digest(source: str) -> str:
    """Digest of a module's code, of the modules beside it that it reaches, and of the CUDA files that these name."""
    texts: dict[str, str] = {}
    wanted = [Path(source)]
    while wanted:
        path = wanted.pop()
        if path.name in texts or not path.is_file():
            continue
        text = path.read_text()
        if path.suffix == ".py":
            text = f"\n{text}"
            names = re.findall(r"\n\s*from \.(\w+) import", text)
            for several in re.findall(r"\n\s*from \. import ([\w, ]+)", text):
                names += several.replace(" ", "").split(",")
            wanted += [path.parent / f"{name}.py" for name in names if name not in _BEYOND]
            wanted += [path.parent / "kernels" / name for name in re.findall(r'"(\w+\.cu)"', text)]
            lines = _PROSE.sub("\n", text)[1:].split("\n")
            texts[path.name] = "\n".join(
                [line.partition(" # ")[0].rstrip() if " # " in line else line for line in lines]
            )
        else:
            kernels = next(folder for folder in path.parents if folder.name == "kernels")
            wanted += [kernels / name for name in re.findall(r'#include "([^"]+)"', text)]
            texts[path.name] = _COMMENT.sub("", text)
    code = [(name, re.sub(r"\n\s*\n", "\n", texts[name])) for name in sorted(texts)]
    return hashlib.sha256(repr(code).encode()).hexdigest()[:12]


class UnsupportedProblem(RuntimeError):
    """No engine takes the problem under the given limits; ``refusals`` says why, engine by engine."""

    def __init__(self, problem: Problem, refusals: dict[str, list[str]]) -> None:
        self.problem, self.refusals = problem, refusals
        lines = [f"  {name}: {reason}" for name, reasons in refusals.items() for reason in reasons]
        super().__init__(f"no engine takes '{problem}':\n" + "\n".join(lines))


def engines(kind: str = "") -> tuple[Engine, ...]:
    """All engines, those of :func:`register` and then those of the package in their order, or those of one kind of
    device: a process that uses a GPU alone does not wait for what the CPU's are built with."""
    return _registry(kind, ENGINES, _registered)


@lru_cache(maxsize=32)
def _registry(kind: str, shipped: tuple[str, ...], registered: tuple[Engine, ...]) -> tuple[Engine, ...]:
    """Keyed by all that it follows from, so that no thread can leave the list of before behind."""

    def wanted(entry: str) -> bool:
        module = entry.removeprefix("openconv.")
        return not kind or module == entry or module.startswith((f"{kind}.", "rewrites."))

    found = [*registered, *(_load(entry) for entry in shipped if wanted(entry))]
    return tuple(engine for engine in found if kind in ("", engine.device))


@cache
def _load(entry: str) -> Engine:
    module, _, name = entry.partition(":")
    made: Engine = getattr(import_module(module), name)()
    return made


def engine_named(name: str) -> Engine:
    """The engine with this key; ValueError lists those there are."""
    found = find_engine(name)
    if found is None:
        raise ValueError(f"there is no engine {name!r}; wanted one of {', '.join(e.name for e in engines())}")
    return found


def find_engine(name: str) -> Engine | None:
    """The engine with this key, or None. Keys start with the kind of device."""
    for kind in (name.partition(".")[0], ""):  # those of other devices are imported only if it is none of its own
        for engine in engines(kind):
            if engine.name == name:
                return engine
    return None


# -- engines of other programs ----------------------------------------------------------------------------------------

_Class = TypeVar("_Class", bound=type[Engine])
_lock = threading.Lock()
_registered: tuple[Engine, ...] = ()
_watchers: list[Callable[[], None]] = []


def register(engine: _Class) -> _Class:
    """Have an engine of your own take part in every choice from now on, in this process; also a decorator.

    The class needs no arguments, and a name that starts with its device: ``cpu.box3x3``. It is ranked by its predicted
    and measured times as any other; of equal predictions its own goes first. All plans are made anew, except for those
    of graphs that ran already. A class of the same module and name takes the place of the one before it, so that a cell
    of a notebook can run twice; another class under a name that is taken is a ValueError.
    """
    global _registered
    if not (inspect.isclass(engine) and issubclass(engine, Engine)):
        raise TypeError(f"register: got {engine!r:.80}; wanted a subclass of openconv.engine.Engine, the class itself")
    if inspect.isabstract(engine):
        missing = ", ".join(sorted(engine.__abstractmethods__))
        raise TypeError(f"register: {engine.__qualname__} lacks {missing}; class Engine says what each returns")
    name, device = getattr(engine, "name", None), engine.device
    if device not in ("cpu", "cuda"):
        raise ValueError(f"register: {engine.__qualname__}.device is {device!r}; wanted 'cpu' or 'cuda'")
    if not isinstance(name, str) or not re.fullmatch(rf"{device}\.[a-z]\w*", name):
        wanted = f"a text such as '{device}.{engine.__name__.lower()}', its device before the dot"
        raise ValueError(f"register: {engine.__qualname__}.name is {name!r}; wanted {wanted}")
    with _lock:
        same = find_engine(name)
        if same is not None and not (same in _registered and _same_place(type(same), engine)):
            where = f"{type(same).__module__}.{type(same).__qualname__}"
            raise ValueError(f"register: the name {name!r} is taken by {where}; give the engine another one")
        code_digest.cache_clear()  # the file may have changed since it was read
        _registered = (*(e for e in _registered if e is not same), engine())
    _changed()
    return engine


def unregister(name: str) -> None:
    """Take an engine of :func:`register` out of all choices to come; ValueError where there is none of this name."""
    global _registered
    with _lock:
        left = tuple(engine for engine in _registered if engine.name != name)
        if len(left) == len(_registered):
            there = ", ".join(engine.name for engine in _registered) or "none"
            raise ValueError(f"unregister: {name!r} was not registered; registered now: {there}")
        _registered = left
    _changed()


def when_engines_change(forget: Callable[[], None]) -> None:
    """Have something called after each :func:`register` and :func:`unregister`: what keeps choices forgets them."""
    _watchers.append(forget)


def _same_place(one: type[Engine], other: type[Engine]) -> bool:
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def _changed() -> None:
    for forget in _watchers:
        forget()
