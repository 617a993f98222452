"""Modules, and two ways to bring openconv into a model that exists: ``convert`` its modules, or ``patch`` a block.

The modules are subclasses of torch's: they take the same arguments, have the same parameters and load the same state
dicts, and every ``isinstance`` test still holds. Beyond torch's arguments, convolutions take by keyword: ``activation``
fuses an activation behind the convolution; ``engine``, ``precision``, ``accuracy`` and ``max_workspace`` are handed to
:func:`openconv.conv2d` and its siblings, which explain them.

>>> layer = Conv2d(3, 8, 3, padding=1, activation="relu")
>>> layer(torch.ones(1, 3, 5, 5)).shape
torch.Size([1, 8, 5, 5])
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from . import functional, pooling
from .fuse import Fused, plan_fusion
from .fuse_forward import restore, rewrite_forwards
from .select import Policy

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Conversion",
    "Fused",
    "Left",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Patch",
    "Swapped",
    "convert",
    "patch",
]

# -- modules -----------------------------------------------------------------------------------------------------

_autocasting = torch._C._is_any_autocast_enabled
_LIMITS = ("engine", "precision", "accuracy", "max_workspace")


class _Options(torch.nn.modules.conv._ConvNd):
    """What openconv's modules have beyond torch's. The options are class attributes too, so that a module which was
    made by torch and then changed its class has them."""

    function: ClassVar[Callable[..., Tensor]]
    activation: str | None = None
    engine: str | None = None
    precision: str | None = None
    accuracy: str | None = None
    max_workspace: int | None = None

    def __init__(
        self, *args: Any, activation: str | None = None, engine: str | None = None, precision: str | None = None,
        accuracy: str | None = None, max_workspace: int | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        functional.check_activation(activation)
        Policy().but(engine=engine, precision=precision, accuracy=accuracy, max_workspace=max_workspace)
        super().__init__(*args, **kwargs)
        self.activation, self.engine, self.precision = activation, engine, precision
        self.accuracy, self.max_workspace = accuracy, max_workspace

    def _run(self, *args: Any, residual: Tensor | None, activation: str | None) -> Tensor:
        return type(self).function(
            *args, activation=self.activation if activation is None else activation, residual=residual,
            engine=self.engine, precision=self.precision, accuracy=self.accuracy, max_workspace=self.max_workspace,
        )  # fmt: skip

    def takes(self, input: Any, residual: Any) -> bool:
        """Whether ``residual`` is a plain tensor of the shape and dtype of the result on ``input``: conv(input) +
        residual is then ``self(input, residual=residual)``. It is asked at every call of a fused sum."""
        if type(residual) is not Tensor or type(input) is not Tensor or residual.dtype is not input.dtype:
            return False
        shape, rank = input.shape, len(self.kernel_size)
        if len(shape) not in (rank + 1, rank + 2) or _autocasting():
            return False
        return residual.shape == (*shape[: -rank - 1], self.out_channels, *self._sizes(shape[-rank:]))

    def _sizes(self, sizes: Sequence[int]) -> Sequence[int]:
        """The spatial sizes of the result."""
        raise NotImplementedError

    def _held(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias. As attributes they would be looked for, which takes half a microsecond each; what is no
        parameter any more, such as a parametrized weight, is."""
        held = self._parameters
        if "weight" in held and "bias" in held:
            return held["weight"], held["bias"]  # type: ignore[return-value]
        return self.weight, self.bias

    def extra_repr(self) -> str:
        given = {name: getattr(self, name) for name in ("activation", *_LIMITS)}
        own: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return ", ".join([own, *(f"{k}={v!r}" for k, v in given.items() if v is not None)])


class _Conv(_Options):
    def forward(self, input: Tensor, residual: Tensor | None = None, activation: str | None = None) -> Tensor:
        """activation(conv(input) + residual); ``activation``, where given, stands for the module's own."""
        if activation is None:  # what derives from this may have a _conv_forward without it
            return self._conv_forward(input, *self._held(), residual)
        return self._conv_forward(input, *self._held(), residual, activation)

    # The name torch's own modules have for it: what derives from them and replaces the weight calls this.
    def _conv_forward(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:  # fmt: skip
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            input, padding = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0
        return self._run(input, weight, bias, self.stride, padding, self.dilation, self.groups, residual=residual,
                         activation=activation)  # fmt: skip

    def _sizes(self, sizes: Sequence[int]) -> Sequence[int]:
        padding: Any = self.padding
        if padding == "same":  # with a stride of 1, or torch raises
            return sizes
        if padding == "valid":
            padding = (0,) * len(sizes)
        each = zip(sizes, padding, self.dilation, self.kernel_size, self.stride, strict=True)
        return [(n + 2 * p - d * (t - 1) - 1) // s + 1 for n, p, d, t, s in each]


class _ConvTranspose(_Options, torch.nn.modules.conv._ConvTransposeNd):
    def forward(
        self, input: Tensor, output_size: Sequence[int] | None = None, *, residual: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:  # fmt: skip
        """activation(conv_transpose(input) + residual); ``output_size`` settles the output padding, as in torch, and
        ``activation``, where given, stands for the module's own."""
        if self.padding_mode != "zeros":
            raise ValueError(f"padding_mode is {self.padding_mode!r}; a transposed convolution takes 'zeros' only")
        padding, axes = self.padding, len(self.kernel_size)
        fields: list[Any] = [input, output_size, self.stride, padding, self.kernel_size, axes, self.dilation]
        extra = self._output_padding(*fields)
        return self._run(input, self.weight, self.bias, self.stride, self.padding, tuple(extra), self.groups,
                         self.dilation, residual=residual, activation=activation)  # fmt: skip

    def _sizes(self, sizes: Sequence[int]) -> Sequence[int]:
        extra: Any = self.output_padding
        each = zip(sizes, self.padding, self.dilation, self.kernel_size, self.stride, extra, strict=True)
        return [(n - 1) * s - 2 * int(p) + d * (t - 1) + e + 1 for n, p, d, t, s, e in each]


class Conv1d(_Conv, torch.nn.Conv1d):
    """``torch.nn.Conv1d``, run by :func:`openconv.conv1d`."""

    function = staticmethod(functional.conv1d)


class Conv2d(_Conv, torch.nn.Conv2d):
    """``torch.nn.Conv2d``, run by :func:`openconv.conv2d`."""

    function = staticmethod(functional.conv2d)


class Conv3d(_Conv, torch.nn.Conv3d):
    """``torch.nn.Conv3d``, run by :func:`openconv.conv3d`."""

    function = staticmethod(functional.conv3d)


class ConvTranspose1d(_ConvTranspose, torch.nn.ConvTranspose1d):
    """``torch.nn.ConvTranspose1d``, run by :func:`openconv.conv_transpose1d`."""

    function = staticmethod(functional.conv_transpose1d)


class ConvTranspose2d(_ConvTranspose, torch.nn.ConvTranspose2d):
    """``torch.nn.ConvTranspose2d``, run by :func:`openconv.conv_transpose2d`."""

    function = staticmethod(functional.conv_transpose2d)


class ConvTranspose3d(_ConvTranspose, torch.nn.ConvTranspose3d):
    """``torch.nn.ConvTranspose3d``, run by :func:`openconv.conv_transpose3d`."""

    function = staticmethod(functional.conv_transpose3d)


class MaxPool1d(torch.nn.MaxPool1d):
    """``torch.nn.MaxPool1d``: on the CPU, where no gradient is wanted, by vectors and all threads; else torch's."""

    def forward(self, input: Tensor) -> Tensor:
        """The largest of each window."""
        return _pooled(self, pooling.max_pool1d, input)


class MaxPool2d(torch.nn.MaxPool2d):
    """``torch.nn.MaxPool2d``, as :class:`MaxPool1d`."""

    def forward(self, input: Tensor) -> Tensor:
        """The largest of each window."""
        return _pooled(self, pooling.max_pool2d, input)


class MaxPool3d(torch.nn.MaxPool3d):
    """``torch.nn.MaxPool3d``, as :class:`MaxPool1d`."""

    def forward(self, input: Tensor) -> Tensor:
        """The largest of each window."""
        return _pooled(self, pooling.max_pool3d, input)


def _pooled(module: Any, function: Callable[..., Any], input: Tensor) -> Any:
    return function(input, module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode,
                    module.return_indices)  # fmt: skip


# -- convert -----------------------------------------------------------------------------------------------------

_MODULES: tuple[type[_Options], ...] = (Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)
_OURS: dict[type, type] = {getattr(torch.nn, ours.__name__): ours for ours in _MODULES}
_TORCHS: dict[type, type] = {ours: torchs for torchs, ours in _OURS.items()}
_POOLS: dict[type, type] = {getattr(torch.nn, ours.__name__): ours for ours in (MaxPool1d, MaxPool2d, MaxPool3d)}
_TORCHS_POOLS: dict[type, type] = {ours: torchs for torchs, ours in _POOLS.items()}


@dataclass(frozen=True)
class Swapped:
    """A module that changed its class; ``name`` is empty for the model itself."""

    name: str
    module: str


@dataclass(frozen=True)
class Left(Swapped):
    """A convolution that stayed what it was, and why."""

    reason: str


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert` did to ``model``. Printing it lists every convolution, and with ``fuse`` what they compute
    beside themselves (``fused``), the max poolings that are openconv's now (``pooled``), and the norms, activations,
    sums and modules that stayed, and why (``unfused``)."""

    model: Module
    swapped: tuple[Swapped, ...]
    left: tuple[Left, ...]
    back: bool = False
    fused: tuple[Fused, ...] = ()
    unfused: tuple[Left, ...] = ()
    pooled: tuple[Swapped, ...] = ()

    def __str__(self) -> str:
        modules: tuple[Any, ...] = (*self.swapped, *self.left, *self.unfused, *self.pooled, *self.fused)
        names = [m.name for m in modules]
        width = max((len(name or "(model)") for name in names), default=0)
        whose = "torch" if self.back else "openconv"
        convolutions = _count(self.swapped, "convolution")
        lines = [f"{type(self.model).__name__}: {convolutions} swapped for {whose}'s, {len(self.left)} left"]
        lines += [f"  {m.name or '(model)':{width}}  {m.module}" for m in self.swapped]
        lines += ["left as they are:"] * bool(self.left)
        lines += [f"  {m.name or '(model)':{width}}  {m.module}: {m.reason}" for m in self.left]
        if self.fused:
            kinds = (("norm", "batch norm"), ("sum", "sum"), ("activation", "activation"))
            counts = (_count([m for m in self.fused if getattr(m, kind)], what) for kind, what in kinds)
            lines += [f"fused: {', '.join(counts)}"]
            for m in self.fused:
                *front, last = filter(None, (m.norm, m.sum, f"{m.activation} ({m.function})" * bool(m.activation)))
                lines += [f"  {m.name or '(model)':{width}}  with {', '.join(front)}{' and ' * bool(front)}{last}"]
        lines += [f"max pooling by {whose}'s:"] * bool(self.pooled)
        lines += [f"  {m.name or '(model)':{width}}  {m.module}" for m in self.pooled]
        lines += ["not fused:"] * bool(self.unfused)
        lines += [f"  {m.name or '(model)':{width}}  {m.module}: {m.reason}" for m in self.unfused]
        return "\n".join(lines)


def _count(modules: Sequence[Any], what: str) -> str:
    return f"{len(modules)} {what}{'s' * (len(modules) != 1)}"


def convert(
    model: Module, *, back: bool = False, fuse: bool = False, inplace: bool = True, engine: str | None = None,
    precision: str | None = None, accuracy: str | None = None, max_workspace: int | None = None,
) -> Conversion:  # fmt: skip
    """Send every convolution module of a model through openconv, or with ``back`` through torch again.

    A module changes its class and nothing else: it is the same object with the same parameters, hooks, buffers and
    parametrizations, so that optimizers and state dicts are not affected. Modules of exactly torch's six types are
    swapped; a lazy one follows when it learns its sizes. A subclass has code of its own and is left, which the report
    says; :func:`patch` reaches it. The limits, where given, are set on the modules that are swapped.

    ``fuse`` is for a model in eval mode that is to stay there. Each batch norm whose input is a convolution's result,
    of which nobody else makes use, is folded into the convolution's weight and bias, which are new parameters; an
    activation module behind it becomes the convolution's ``activation``. Both are ``torch.nn.Identity`` from then on:
    names of modules stay, the state dict loses the norms', and there is no way back. What follows what is read from the
    data flow as ``torch.fx`` traces it. A module that cannot be traced leaves its parts to be looked at one by one, and
    is taken to call those that have a forward as a whole. What has hooks or is parametrized, is called twice or has
    code of its own stays as it is; the report tells. RuntimeError if the model is in training mode.

    Then sums (``out += identity``) and activations that are code (``F.relu(y)``, ``y.relu_()``, one ReLU that is called
    at several places) are fused, of which a convolution's result, used by nobody else, is a side: conv(x, residual=...,
    activation=...). The module in whose forward they stand keeps its identity, names, hooks and state dict and gets a
    class derived from its own, whose forward is the traced one: what an attribute, a global or an argument left out
    decided is settled. Its own forward runs in training mode, with other arguments than the required ones, after an
    attribute of it was set, from a pickle, and after ``back`` or another ``fuse``. A residual of another shape or dtype
    is added by torch. What cannot be traced, or does things that a trace would lose (``with`` and ``try`` blocks,
    attributes that are set, ``isinstance``, ``print``), stays; the report tells that as well.

    Max poolings, modules of torch's classes and calls in a forward that was traced, become openconv's as well: on the
    CPU torch's takes as long as several convolutions.

    ``inplace=False`` converts a deep copy, to be found as ``model`` of the report::

        print(openconv.convert(model))
        fast = openconv.convert(model.eval(), fuse=True, inplace=False).model
    """
    if not isinstance(model, Module):
        raise TypeError(f"convert: model is of type {type(model).__name__}; wanted a torch.nn.Module")
    limits = {"engine": engine, "precision": precision, "accuracy": accuracy, "max_workspace": max_workspace}
    Policy().but(**limits)
    if fuse and back:
        raise ValueError("convert: fuse and back are both set; what is fused cannot go back: keep a copy of the model")
    if fuse and model.training:
        raise RuntimeError("convert: the model is in training mode; fuse wants one in eval mode: call model.eval()")
    model = model if inplace else copy.deepcopy(model)
    if fuse or back:
        restore(model)
    fusion = plan_fusion(model, lambda conv: _refusal(conv, back=_is_ours(conv))) if fuse else None
    swapped: list[Swapped] = []
    left: list[Left] = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.modules.conv._ConvNd) or _is_ours(module) is not back:
            continue
        text = f"{type(module).__name__}({module.extra_repr()})"
        reason = _swap(module, back)
        if reason:
            left.append(Left(name, text, reason))
            continue
        swapped.append(Swapped(name, text))
        for limit, value in limits.items():
            if value is not None and not back:
                setattr(module, limit, value)
    if fusion is None:
        pooled = _swap_pools(model, _TORCHS_POOLS) if back else []
        return Conversion(model, tuple(swapped), tuple(left), back, pooled=tuple(pooled))
    fusion.apply()
    rewrite_forwards(model, lambda conv: _code(conv, _TORCHS if _is_ours(conv) else _OURS), fusion)
    unfused = tuple(Left(name, _line(module), reason) for name, module, reason in fusion.left)
    pooled = [*(Swapped(name, function) for name, function in fusion.pooled), *_swap_pools(model, _POOLS)]
    return Conversion(model, tuple(swapped), tuple(left), back, tuple(fusion.fused), unfused, tuple(pooled))


def _swap_pools(model: Module, table: dict[type, type]) -> list[Swapped]:
    """Change the classes of max poolings; those with a forward of their own stay."""
    found = []
    for name, module in model.named_modules():
        if type(module) in table and "forward" not in vars(module):
            found.append(Swapped(name, _line(module)))
            module.__class__ = table[type(module)]
    return found


def _line(module: Module | str) -> str:
    """A module by its class, and its arguments where it has no parts; a function as it is told."""
    if isinstance(module, str):
        return module
    return f"{type(module).__name__}({'...' if any(module.children()) else module.extra_repr()})"


def _is_ours(module: Module) -> bool:
    lazily = isinstance(module, LazyModuleMixin) and module.cls_to_become in _TORCHS
    return lazily or isinstance(module, _Options)


def _own(module: Module) -> type:
    """The class of a module before it was parametrized: torch derives a class for each parametrized module."""
    return type(module).__bases__[0] if is_parametrized(module) else type(module)


def _refusal(module: Module, back: bool) -> str:
    """Why the module's class cannot change."""
    if reason := _code(module, _TORCHS if back else _OURS):
        return reason
    if back and isinstance(module, _Options) and module.activation is not None:
        return f"it fuses {module.activation!r}, which torch's {_own(module).__name__} cannot"
    return ""


def _code(module: Module, table: dict[type, type]) -> str:
    """Why a module is not exactly of one of these classes."""
    own = _own(module)
    if isinstance(module, LazyModuleMixin):
        return "" if module.cls_to_become in table else "a lazy convolution that openconv does not have"
    if own not in table:
        base = next((t for t in own.__mro__ if t in table), None)
        if base is None:
            return "a convolution that openconv does not have"
        forward = next(t for t in own.__mro__ if "forward" in vars(t) or "_conv_forward" in vars(t))
        code = "code of its own" if issubclass(base, forward) else "a forward of its own"
        return f"a subclass of {base.__module__.split('.')[0]}'s {base.__name__} with {code}"
    return "its forward was replaced on the instance" if "forward" in vars(module) else ""


def _swap(module: Module, back: bool) -> str:
    """Change the module's class; the reason if that cannot be."""
    if reason := _refusal(module, back):
        return reason
    table, own = _TORCHS if back else _OURS, _own(module)
    if isinstance(module, LazyModuleMixin):
        module.cls_to_become = table[module.cls_to_become]  # type: ignore[index]
        return ""
    if back:
        for option in ("activation", *_LIMITS):
            vars(module).pop(option, None)
    if is_parametrized(module):
        made = type(module)
        body = {name: value for name, value in vars(made).items() if name not in ("__dict__", "__weakref__")}
        module.__class__ = type(made.__name__, (table[own],), body)
    else:
        module.__class__ = table[own]
    return ""


# -- patch -------------------------------------------------------------------------------------------------------

_FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    getattr(F, name): getattr(functional, name) for name in functional.__all__
}  # fmt: skip


class Patch(TorchFunctionMode):
    """A block in which torch's convolution functions are openconv's. ``calls`` counts them by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = _FUNCTIONS.get(func)
        if ours is not None:
            self.calls[ours.__name__] += 1
        return (ours or func)(*args, **(kwargs or {}))

    def __str__(self) -> str:
        each = ", ".join(f"{count} {name}" for name, count in sorted(self.calls.items()))
        total = self.calls.total()
        return f"{total} call{'s' * (total != 1)} went through openconv" + (f": {each}" if each else "")


def patch() -> Patch:
    """Send every convolution that torch computes in a block through openconv, whoever calls it::

        with openconv.patch() as patched:
            loss = model(x).sum()
        print(patched)

    This covers ``torch.nn.functional.conv1d`` to ``conv_transpose3d``, the same functions as ``torch.conv1d`` and so
    on, and all modules that call them. Backward passes follow their forward passes, also outside of the block. Blocks
    nest, the innermost counts, and an exception leaves them as a return does. Other threads are not affected, nor are
    calls from C++, such as those of scripted modules.
    """
    return Patch()
