"""Sums and activations that are code of a model, into the convolutions in front of them: the second half of ``fuse``.
Max poolings that are code become openconv's.

    relu(bn(conv(y)) + x)    becomes    conv'(y, residual=x, activation="relu")

``F.relu(y)``, ``y.relu_()``, one ReLU module that is called at three places, ``out += identity``: these stand in the
forward of a module, so it is the forward that changes. ``torch.fx`` traces it with the modules that it calls as boxes;
a call of a convolution takes along what is done to its result if nobody else uses that; the text that ``torch.fx``
writes of the changed graph is the new forward. The module stays the same object, of a class derived from its own.

The convolution may be at the end of a module that is called (``self.norm(self.conv(x))``, a Sequential). Then that
module's forward hands what follows on to it, as the argument ``openconv_then``, and nothing is called past anybody: a
hook that is registered later sees its module being called. Modules, parameters and options stay what they were, so that
taking the classes away undoes it all (:func:`restore`).

A convolution that takes a sum runs where the sum stood, behind what the other side is made by; what lies between must
not write to its input. Of what a trace cannot hold, a part is seen, and refused: blocks (``with``, ``try``), attributes
that are set, questions for types, tensors made on the way. Other decisions are settled by it: in training mode, after
an attribute of the module was set, and with other arguments than the required ones, a module runs its own forward.
"""

from __future__ import annotations

import copy
import copyreg
import dis
import functools
import gc
import inspect
import linecache
import operator
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node, Proxy, Tracer
from torch.nn import Module
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from . import pooling
from .epilogue import Const, Epilogue
from .evaluate import activate
from .fuse import ACTIVATIONS, Fused, Fusion, Refused, activation_text, has_forward, is_hooked

__all__ = ["Rewritten", "follow", "in_place", "restore", "rewrite_forwards"]

# -- what runs -------------------------------------------------------------------------------------------------------

_Then = tuple[str | None, str, Any]
"""What follows a call: an activation or None, ``add``, ``iadd`` or nothing, and the other side of that sum."""


def follow(module: Any, input: Any, then: _Then | None) -> Any:
    """activation(module(input) + residual): on the way, where the module can and the residual is like its result."""
    if then is None:
        return module(input)
    if isinstance(module, Rewritten):
        if module.opened:
            return module(input, openconv_then=then)  # type: ignore[operator]
    # A convolution, unless it was sent back to torch later, or given an activation by hand.
    elif (takes := getattr(module, "takes", None)) is not None and module.activation is None:
        activation, added, residual = then
        if not added:
            return module(input, activation=activation)
        if takes(input, residual):
            return module(input, residual=residual, activation=activation)
    return _finish(module(input), then)


def _finish(value: Any, then: _Then) -> Any:
    activation, added, residual = then
    if added:
        if added == "iadd":
            value += residual
        else:
            value = value + residual
    return activate(activation, value) if activation else value


def in_place(operation: str, value: Any, other: Any) -> Any:
    """``value += other`` and the like. As statements, which torch.fx would write, they give a number another value
    under its old name."""
    return getattr(operator, operation)(value, other)


class _Derived(type):
    """The class of the classes made here. A call of one makes an object of the class that it derives from, since a
    forward is that of one object: ``model[:2]`` of a Sequential is no part of its flow. Pickles hold that class too."""

    base: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.base(*args, **kwargs)


def _plain(base: type) -> type:
    return base


copyreg.pickle(_Derived, lambda cls: (_plain, (cls.base,)))  # type: ignore[arg-type, return-value]

# Attributes that torch sets by itself, none of which a forward goes by, other than ``training``, which is looked at.
_HARMLESS = ("training", "_compiled_call_impl", "_is_full_backward_hook")


class Rewritten:
    """What every class made here derives from beside a module's own. Who sets an attribute, or adds a module, may
    change what the forward would do: the module's own runs from then on."""

    base: ClassVar[Any]
    opened: ClassVar[bool]
    _own_forward = False

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name not in _HARMLESS:
            self.__dict__["_own_forward"] = True

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.__dict__["_own_forward"] = True

    def add_module(self, name: str, module: Module | None) -> None:
        """As of a Module."""
        self.base.add_module(self, name, module)
        self.__dict__["_own_forward"] = True


def restore(model: Module) -> None:
    """Give every module its own forward again."""
    for module in model.modules():
        if isinstance(module, Rewritten):
            module.__class__ = module.base
            vars(module).pop("_own_forward", None)


def _derive(base: type, inputs: int, opened: bool, source: str, known: dict[str, Any]) -> type:
    """A class whose forward is the text of a graph."""
    file = f"<openconv.fuse of {base.__module__}.{base.__qualname__}, {hash(source) & 0xFFFFFFFF:08x}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # for tracebacks
    space = dict(known)
    exec(compile(source, file, "exec"), space)
    flow, own = space["forward"], base.forward  # type: ignore[attr-defined]

    @functools.wraps(own)
    def forward(self: Any, *args: Any, openconv_then: _Then | None = None, **kwargs: Any) -> Any:
        if self.training or kwargs or len(args) != inputs or self._own_forward:
            result = own(self, *args, **kwargs)
            return result if openconv_then is None else _finish(result, openconv_then)
        return flow(self, *args) if openconv_then is None else flow(self, *args, openconv_then)

    body = {"forward": forward, "base": base, "opened": opened, "__module__": base.__module__,
            "__qualname__": base.__qualname__, "__doc__": base.__doc__}  # fmt: skip
    return _Derived(base.__name__, (Rewritten, base), body)


# -- tracing ---------------------------------------------------------------------------------------------------------


class _Value(Proxy):
    """A value of a trace that knows ``+=`` from ``+``."""


def _changing(operation: str) -> Callable[[Any, Any], Any]:
    def change(self: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", in_place, (operation, self, other), {})

    return change


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor",
              "ilshift", "irshift"):  # fmt: skip
    setattr(_Value, f"__{_name}__", _changing(_name))


class _Forward(Tracer):
    """Traces the forward of one module; all modules that it calls are boxes."""

    proxy_buffer_attributes = True

    def proxy(self, node: Node) -> Proxy:
        return _Value(node, self)

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        return True

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, dict | list | tuple) and type(a) not in (dict, list, tuple, torch.Size):
            if not hasattr(a, "_fields"):  # a dict of another kind would come out as a plain one
                raise Refused(f"it makes a {type(a).__name__}, which a trace does not hold")
        return super().create_arg(a)


_ASKED = frozenset({"isinstance", "issubclass", "type", "print", "time", "input"})
_ASKED_OF_ANY = frozenset({"is_tensor", "random", "is_grad_enabled", "is_autocast_enabled",
                           "is_inference_mode_enabled"})  # fmt: skip
_SETS = {"STORE_ATTR": "sets an attribute", "DELETE_ATTR": "deletes an attribute", "STORE_GLOBAL": "sets a global",
         "PUSH_EXC_INFO": "has a with or try block"}  # fmt: skip
_TORCH, _PYTHON, _HERE = (os.path.join(os.path.dirname(each), "") for each in (torch.__file__, os.__file__, __file__))
_SITES = tuple(os.path.join(sysconfig.get_paths()[each], "") for each in ("purelib", "platlib"))


def _is_library(code: CodeType) -> bool:
    """Code of torch, of Python or of this package, some of which runs whenever a tensor is freed."""
    file = code.co_filename
    return file.startswith((_TORCH, _HERE)) or (file.startswith(_PYTHON) and not file.startswith(_SITES))


def _unheld(code: CodeType) -> str:
    """What a function does that a trace would do once and for all; empty for nothing."""
    if _is_library(code):
        decorated = code.co_name in ("decorate_context", "decorate_autocast")
        return "its forward is under a decorator of torch's" if decorated else ""
    for step in dis.get_instructions(code):
        if step.opname in _SETS:
            return f"its forward {_SETS[step.opname]}"
        if step.argval in _ASKED_OF_ANY and step.opname.startswith("LOAD_") and step.opname != "LOAD_CONST":
            return f"its forward asks {step.argval}"
        if step.argval in _ASKED and step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            return f"its forward asks {step.argval}"
    return ""


def _required(forward: Any) -> list[str]:
    """The arguments that a call cannot leave out; all others are left at their defaults."""
    kinds = inspect.Parameter
    found = list(inspect.signature(forward).parameters.values())[1:]
    needed = [each for each in found if each.default is kinds.empty]
    if any(each.kind is kinds.KEYWORD_ONLY for each in needed):
        raise Refused("its forward wants an argument by keyword")
    return [each.name for each in needed if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]


def _held(module: Module) -> dict[str, Any]:
    """What a module holds: who changes it in its forward is found out."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if isinstance(value, dict):
            found[name] = [(key, id(each)) for key, each in value.items()]
        else:
            found[name] = [id(each) for each in value] if isinstance(value, list | set) else id(value)
    return found


def _trace(module: Module) -> tuple[Graph, int]:
    """The graph of a module's forward, and how many arguments it takes; Refused where that would not be all of it."""
    base = type(module)
    forward: Any = base.forward
    if module.training:
        raise Refused("it is in training mode")
    if "forward" in vars(module):
        raise Refused("its forward was replaced on the instance")
    if is_parametrized(module) or isinstance(module, LazyModuleMixin):
        raise Refused("it is parametrized" if is_parametrized(module) else "it does not know its sizes yet")
    if type(base) is not type or not inspect.isfunction(forward) or isinstance(module, torch.jit.ScriptModule):
        raise Refused("its class is none that can be derived from")
    if base.__call__ is not Module.__call__:
        raise Refused("it has a __call__ of its own")
    names = _required(forward)
    code: set[CodeType] = set()

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            code.add(frame.f_code)

    tracer, before = _Forward(), sys.getprofile()
    try:
        twin = copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
        given = "".join(f", {name}" for name in names)
        alone = eval(f"lambda self{given}: own(self{given})", {"own": forward})
        twin.__class__ = type(base.__name__, (base,), {"forward": alone})
        held, collecting = _held(twin), gc.isenabled()
        gc.disable()  # callbacks of the garbage collector are no part of the forward
        sys.setprofile(watch)
        try:
            graph = tracer.trace(twin)
        finally:
            sys.setprofile(before)
            if collecting:
                gc.enable()
    except Refused:
        raise
    except Exception as error:
        first = (str(error).strip() or "no reason given").splitlines()[0]
        raise Refused(f"could not be traced: {type(error).__name__}: {first}") from None
    for each in sorted(code, key=lambda each: (each.co_filename, each.co_firstlineno)):
        if why := _unheld(each):
            raise Refused(f"{why}, which a trace does not hold")
    for node in graph.nodes:
        node.type = None  # an annotation is code that would have to be found
        if node.op == "get_attr" and not _is_held(module, node.target):
            raise Refused("its forward makes tensors or uses some that are neither parameters nor buffers")
        if node.op == "call_module" and not isinstance(_part(module, node.target), Module):
            raise Refused(f"its forward calls {node.target}, which it makes itself")
    if held != _held(twin):
        raise Refused("its forward changes what it holds")
    return graph, len(names)


def _part(module: Module, path: str) -> Any:
    """A module, parameter or buffer in a module; None if it is not there."""
    *way, last = path.split(".")
    here: Any = module
    for name in way:
        here = here._modules.get(name) if isinstance(here, Module) else None
    if not isinstance(here, Module):
        return None
    return next((held[last] for held in (here._modules, here._parameters, here._buffers) if last in held), None)


def _is_held(module: Module, path: str) -> bool:
    return isinstance(_part(module, path), Tensor | Module)


# -- activations and sums as nodes -----------------------------------------------------------------------------------


def _clamp(low: Any, high: Any) -> str:
    low, high = -torch.inf if low is None else low, torch.inf if high is None else high
    if low > high:
        raise ValueError(f"its limits are {low} and {high}")
    return f"clamp({Const(low)},{Const(high)})"


_Text = Callable[..., str]
_FUNCTIONS: dict[Any, _Text] = {
    each: text
    for which, text in (
        ((F.relu, torch.relu, torch.relu_, "relu", "relu_"), lambda input, inplace=False: "relu"),
        ((F.relu6,), lambda input, inplace=False: "clamp(0,6)"),
        ((F.hardtanh, F.hardtanh_), lambda input, min_val=-1.0, max_val=1.0, inplace=False: _clamp(min_val, max_val)),
        ((torch.clamp, torch.clamp_, torch.clip, torch.clip_, "clamp", "clamp_", "clip", "clip_"),
         lambda input, min=None, max=None: _clamp(min, max)),
        ((torch.clamp_min, torch.clamp_min_, "clamp_min", "clamp_min_"), lambda input, min: _clamp(min, None)),
        ((torch.clamp_max, torch.clamp_max_, "clamp_max", "clamp_max_"), lambda input, max: _clamp(None, max)),
        ((F.leaky_relu, F.leaky_relu_),
         lambda input, negative_slope=0.01, inplace=False: f"leaky_relu({Const(negative_slope)})"),
        ((F.elu, F.elu_), lambda input, alpha=1.0, inplace=False: f"elu({Const(alpha)})"),
        ((torch.sigmoid, torch.sigmoid_, "sigmoid", "sigmoid_"), lambda input: "sigmoid"),
        ((torch.tanh, torch.tanh_, "tanh", "tanh_"), lambda input: "tanh"),
        ((F.silu,), lambda input, inplace=False: "silu"),
        ((F.hardswish,), lambda input, inplace=False: "hardswish"),
        ((F.gelu,), lambda input, approximate="none": "gelu_tanh" if approximate == "tanh" else "gelu"),
    )
    for each in which
}  # fmt: skip


_POOLS: dict[Any, Any] = {
    getattr(where, f"max_pool{rank}d"): getattr(pooling, f"max_pool{rank}d")
    for where in (F, torch)
    for rank in (1, 2, 3)
}


def _pool_of(node: Node) -> Any:
    """Our function for a max pooling; None if it is none."""
    try:
        return _POOLS.get(node.target) if node.op == "call_function" else None
    except TypeError:  # a target without a hash
        return None


def _function_of(node: Node) -> _Text | None:
    wanted = "call_method" if isinstance(node.target, str) else "call_function"
    try:
        return _FUNCTIONS.get(node.target) if node.op == wanted else None
    except TypeError:  # a target without a hash
        return None


def _is_in_place(node: Node) -> bool:
    """Whether a function or method writes to its first argument, going by its name."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return bool(node.kwargs.get("inplace")) or (name.endswith("_") and not name.endswith("__"))


def _sum_of(node: Node) -> tuple[Node, Node, str] | None:
    """The two sides of a sum of values, and ``iadd`` if it goes into the first, else ``add``."""
    added, given, more = "add", list(node.args), dict(node.kwargs)
    if node.op == "call_function" and node.target is in_place and given[0] == "iadd":
        added, given = "iadd", given[1:]
    elif node.op == "call_method" and node.target in ("add", "add_"):
        added = "iadd" if node.target == "add_" else "add"
    elif node.op != "call_function" or node.target not in (operator.add, torch.add):
        return None
    if "other" in more:
        given.append(more.pop("other"))
    if more.pop("alpha", 1) != 1 or more or len(given) != 2:
        return None
    first, second = given
    return (first, second, added) if isinstance(first, Node) and isinstance(second, Node) else None


def _told(node: Node) -> str:
    """A function or method by its name, as it stands in the code."""
    if node.target is in_place:
        return str(node.args[0])
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


# -- the patterns ----------------------------------------------------------------------------------------------------


@dataclass
class _Flow:
    """The graph of one module's forward, which changes step by step."""

    module: Module
    graph: Graph
    inputs: int
    changed: bool = False
    opened: bool = False

    def called(self, node: Node) -> Module | None:
        """The module that a node calls; a box that takes along what follows it, as well."""
        if node.op == "call_module":
            return _part(self.module, str(node.target))
        if node.op == "call_function" and node.target is follow:
            held = node.args[0]
            assert isinstance(held, Node)
            return _part(self.module, str(held.target))
        return None

    def passes(self, node: Node) -> bool:
        """An Identity, which a folded norm has become."""
        module = self.called(node) if node.op == "call_module" else None
        plain = type(module) is nn.Identity and not is_hooked(module) and "forward" not in vars(module)
        return plain and len(node.args) == 1 and not node.kwargs


_OUTSIDE = object()
"""Memory that a forward did not make: arguments, which may be one another, parameters, buffers."""


@dataclass
class _Rewriter:
    """All modules of a model, those inside before those around them."""

    names: dict[Module, str]
    refusal: Callable[[Module], str]
    flows: dict[Module, _Flow] = field(default_factory=dict)
    failed: dict[Module, str] = field(default_factory=dict)
    fused: list[Fused] = field(default_factory=list)
    left: list[tuple[str, Any, str]] = field(default_factory=list)
    pooled: list[tuple[str, str]] = field(default_factory=list)
    calls: dict[Module, list[bool]] = field(default_factory=dict)
    """Of each activation module, its calls, and whether they were fused."""

    def run(self) -> None:
        """Find the patterns and change the graphs; no module is changed."""
        for module in reversed(self.names):
            if not any(module.children()) or not has_forward(module):
                continue
            try:
                self.flows[module] = flow = _Flow(module, *_trace(module))
            except Refused as why:
                self.failed[module] = str(why)
                continue
            self._look(flow)

    def classes(self) -> list[tuple[Module, type]]:
        """The modules to change, and the classes that they are to have; equal ones are one."""
        made: dict[Any, type] = {}
        found: list[tuple[Module, type]] = []
        for module, flow in self.flows.items():
            if flow.changed:
                code = flow.graph.python_code(root_module="self")
                key = type(module), code.src
                if key not in made:
                    made[key] = _derive(type(module), flow.inputs, flow.opened, code.src, code.globals)
                found.append((module, made[key]))
        return found

    def unfused(self, module: Module) -> bool:
        """Whether a module that could not be traced may have had something to fuse: it holds a convolution, or what
        ends in one."""
        parts = [each for part in module.children() for each in ([part] if has_forward(part) else part.children())]
        return any(isinstance(part, _ConvNd) or (part in self.flows and self._ends(part)) for part in parts)

    def _ends(self, module: Module) -> bool:
        try:
            return self._end(module) is not None
        except Refused:
            return True

    # -- one module

    def _look(self, flow: _Flow) -> None:
        # What is written in place goes on under its old name in the code; under the new one it has one use.
        for node in list(flow.graph.nodes):
            target = node.args[0] if node.args else None
            known = _function_of(node) or (node.op == "call_method" and node.target == "add_")
            if known and _is_in_place(node) and isinstance(target, Node):
                for user in _after(node):
                    user.replace_input_with(target, node)
        for node in list(flow.graph.nodes):
            module = flow.called(node) if node.op == "call_module" else None
            if type(module) in ACTIVATIONS:
                self.calls.setdefault(module, []).append(False)  # type: ignore[arg-type]
        for node in list(flow.graph.nodes):
            if (sides := _sum_of(node)) is not None:
                self._attempt(flow, node, self._fuse_sum, *sides)
        for node in list(flow.graph.nodes):
            if self._is_activation(flow, node):
                self._attempt(flow, node, self._fuse_activation)
        for node in flow.graph.nodes:
            if (ours := _pool_of(node)) is not None:
                self.pooled.append((self.names[flow.module], f"{_told(node)}()"))
                node.target, flow.changed = ours, True

    def _attempt(self, flow: _Flow, node: Node, fuse: Callable[..., None], *args: Any) -> None:
        """Fuse a node, or note why it stays."""
        try:
            fuse(flow, node, *args)
        except Refused as why:
            self._leave(flow, node, why)

    def _leave(self, flow: _Flow, node: Node, why: Refused) -> None:
        module = flow.called(node)
        if module is None:
            self.left.append((self.names[flow.module], f"{_told(node)}()", str(why)))
        else:
            self.left.append((self.names[module], module, str(why)))

    def _is_activation(self, flow: _Flow, node: Node) -> bool:
        if node.op == "call_module":
            return type(flow.called(node)) in ACTIVATIONS
        return _function_of(node) is not None

    def _activation(self, flow: _Flow, node: Node) -> str:
        """The activation that a node computes of its first argument, as ``activation=`` takes it."""
        if (module := flow.called(node)) is not None:
            if is_hooked(module):
                raise Refused("it has hooks")
            if "forward" in vars(module):
                raise Refused("it has a forward that was replaced on the instance")
        try:
            if module is not None:
                if len(node.args) != 1 or node.kwargs:
                    raise Refused("it is called with more than one tensor")
                return activation_text(module)
            function = _function_of(node)
            assert function is not None
            text = function(*node.args, **node.kwargs)
            Epilogue().activation(text)
        except (TypeError, ValueError) as error:  # numbers that are none, or too many of them
            raise Refused(f"its numbers cannot be fused: {error}") from None
        return text

    def _fuse_activation(self, flow: _Flow, node: Node) -> None:
        given = node.args[0] if node.args else None
        if not isinstance(given, Node) or (found := self._call(flow, given, node)) is None:
            return
        call, chain, conv = found
        text = self._activation(flow, node)
        self._note(conv, flow, "", node, text)
        _erase(flow, node, self._put(flow, call, chain, call, (text, "", None)))

    def _fuse_sum(self, flow: _Flow, node: Node, first: Node, second: Node, added: str) -> None:
        order = {each: at for at, each in enumerate(flow.graph.nodes)}
        sides = [first] if added == "iadd" else sorted({first, second}, key=lambda each: -order[each])
        refusal: Refused | None = None
        for side in sides:
            try:
                found = self._call(flow, side, node)
                if found is None:
                    continue
                if first is second:
                    raise Refused(f"the result of {self._name(flow, found[0])} is added to itself")
                self._can_move(flow, found[0], found[1], node)
            except Refused as why:
                refusal = refusal or why
                continue
            self._put_sum(flow, node, second if side is first else first, added, *found)
            return
        if refusal is None and added == "iadd" and self._call(flow, second, node) is not None:
            refusal = Refused("it goes into a tensor that is no convolution's result")
        if refusal is not None:
            raise refusal

    def _put_sum(self, flow: _Flow, node: Node, other: Node, added: str, call: Node, chain: list[Node],
                 conv: Module) -> None:  # fmt: skip
        last, text, users = None, "", list(node.users)
        if len(users) == 1 and self._is_activation(flow, users[0]) and users[0].args[:1] == (node,):
            try:
                last, text = users[0], self._activation(flow, users[0])
            except Refused as why:
                self._leave(flow, users[0], why)
                last = None
        self._note(conv, flow, f"{_told(node)} of {self.names[flow.module] or 'the model'}", last, text)
        value = self._put(flow, call, chain, node, (text or None, added, other))
        _erase(flow, node, value)
        if last is not None:
            _erase(flow, last, value)

    def _note(self, conv: Module, flow: _Flow, added: str, activation: Node | None, text: str) -> None:
        told = ""
        if activation is not None:
            module = flow.called(activation)
            told = f"{_told(activation)} of {self.names[flow.module] or 'the model'}"
            if module is not None:
                told = self.names[module]
                self.calls[module][self.calls[module].index(False)] = True
        self.fused.append(Fused(self.names[conv], "", told, text, added))

    def _put(self, flow: _Flow, call: Node, chain: Sequence[Node], at: Node, then: Any) -> Node:
        """Have a call compute what follows, at another place, with the identities behind it; its value there."""
        module = flow.called(call)
        assert module is not None
        self._open(module)
        with flow.graph.inserting_before(at):
            held = flow.graph.create_node("get_attr", call.target)
            made = flow.graph.call_function(follow, (held, call.args[0], then))
        if at is not call:
            for node in reversed(chain):
                at.prepend(node)
        call.replace_all_uses_with(made)
        flow.graph.erase_node(call)
        flow.changed = True
        return chain[0] if chain else made

    # -- the convolution in front

    def _call(self, flow: _Flow, value: Node, by: Node) -> tuple[Node, list[Node], Module] | None:
        """The call whose result a value is, the identities between from the last to the first, and the convolution
        that computes it; None if there is none. Refused if it cannot take anything along."""
        chain: list[Node] = []
        used = [value]
        while flow.passes(value):
            chain.append(value)
            given = value.args[0]
            if not isinstance(given, Node):
                return None
            value = given
            used.append(value)
        module = flow.called(value) if value.op == "call_module" else None
        if module is None or (conv := self._end(module)) is None:
            return None
        name = self._name(flow, value)
        for node in used:
            others = [user for user in node.users if user is not by and user not in chain]
            if others:
                told = ", ".join(self._told_user(flow, user) for user in others)
                raise Refused(f"the result of {name} is used by {told} too")
        if len(value.args) != 1 or value.kwargs or not isinstance(value.args[0], Node):
            raise Refused(f"{name} is called with more than one tensor")
        return value, chain, conv

    def _end(self, module: Module) -> Module | None:
        """The convolution whose result is a module's; None if there is none. Refused if it is not to be touched."""
        name = self.names[module] or "the model"
        if isinstance(module, _ConvNd):
            if is_hooked(module):
                raise Refused(f"{name} has hooks")
            if isinstance(module, LazyModuleMixin):
                raise Refused(f"{name} does not know its sizes yet")
            if getattr(module, "activation", None) is not None:
                return None
            if why := self.refusal(module):
                raise Refused(f"{name} is not converted: {why}")
            return module
        flow = self.flows.get(module)
        if flow is None or flow.inputs != 1:
            return None
        found = self._last(flow)
        if found is not None and is_hooked(module):
            raise Refused(f"{name} has hooks")
        return None if found is None else found[2]

    def _last(self, flow: _Flow) -> tuple[Node, list[Node], Module] | None:
        """The call whose result a flow ends with."""
        output = next(iter(reversed(flow.graph.nodes)))
        value = output.args[0]
        if flow.opened:
            return next((node, [], conv) for node in flow.graph.nodes if node.target is follow and node.op ==
                        "call_function" and isinstance(node.args[2], Node)
                        and (conv := self._end(flow.called(node))) is not None)  # type: ignore[arg-type]  # fmt: skip
        return self._call(flow, value, output) if isinstance(value, Node) else None

    def _open(self, module: Module) -> None:
        """Have a module hand on what follows it to the convolution that it ends with."""
        flow = self.flows.get(module)
        if flow is None or flow.opened:
            return
        found = self._last(flow)
        assert found is not None
        call, chain, _ = found
        flow.opened = True
        last = [node for node in flow.graph.nodes if node.op == "placeholder"][-1]
        with flow.graph.inserting_after(last):
            then = flow.graph.create_node("placeholder", "openconv_then", (None,))
        self._put(flow, call, chain, call, then)

    def _name(self, flow: _Flow, node: Node) -> str:
        module = flow.called(node)
        assert module is not None
        return self.names[module]

    def _told_user(self, flow: _Flow, user: Node) -> str:
        module = flow.called(user)
        if module is not None:
            return self.names[module]
        return "the result" if user.op == "output" else _told(user)

    # -- who writes where

    def _can_move(self, flow: _Flow, call: Node, chain: list[Node], to: Node) -> None:
        """Refuse if a call would see or give other values behind the nodes between."""
        between: list[Node] = []
        node = call.next
        while node is not to:
            if node not in chain and node.op not in ("placeholder", "get_attr"):
                between.append(node)
            node = node.next
        if not between:
            return
        roots = self._roots(flow)
        module = flow.called(call)
        name = self._name(flow, call)
        if module in self.flows and self._writes_outside(self.flows[module]):
            raise Refused(f"{name} may write to its input, so that it cannot run behind {_told(between[0])}")
        given = roots[call.args[0]]  # type: ignore[index]
        for node in between:
            if self._writes(flow, node, roots) & given:
                told = self._told_user(flow, node)
                raise Refused(f"{told} runs before it and may write to the input of {name}, which would run behind it")

    def _roots(self, flow: _Flow) -> dict[Node, set[Any]]:
        """The memory that each value may lie in: its own, or that of others."""
        roots: dict[Node, set[Any]] = {}
        for node in flow.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                roots[node] = {_OUTSIDE}
            elif self._is_new(flow, node):
                roots[node] = {node}
            else:
                roots[node] = {node}.union(*(roots[each] for each in node.all_input_nodes))
        return roots

    def _is_new(self, flow: _Flow, node: Node) -> bool:
        """Whether a node's result lies in memory of its own."""
        module = flow.called(node)
        if module is not None:
            if is_hooked(module):
                return False
            if type(module) in ACTIVATIONS:
                return not getattr(module, "inplace", False)
            return self._is_convolution(module) or (module in self.flows and self._gives_new(self.flows[module]))
        if _function_of(node) is not None:
            return not _is_in_place(node)
        return (sides := _sum_of(node)) is not None and sides[2] == "add"

    def _is_convolution(self, module: Module) -> bool:
        return isinstance(module, _ConvNd) and not is_hooked(module) and not self.refusal(module)

    def _gives_new(self, flow: _Flow) -> bool:
        output = next(iter(reversed(flow.graph.nodes)))
        return isinstance(output.args[0], Node) and _OUTSIDE not in self._roots(flow)[output.args[0]]

    def _writes_outside(self, flow: _Flow) -> bool:
        roots = self._roots(flow)
        return any(_OUTSIDE in self._writes(flow, node, roots) for node in flow.graph.nodes)

    def _writes(self, flow: _Flow, node: Node, roots: dict[Node, set[Any]]) -> set[Any]:
        """The memory that a node may write to."""
        everything = set[Any]().union(*(roots[each] for each in node.all_input_nodes))
        if node.op in ("placeholder", "get_attr", "output"):
            return set()
        module = flow.called(node)
        if module is not None:
            if self._is_convolution(module):
                return set()
            if module in self.flows and not is_hooked(module):
                return everything | {_OUTSIDE} if self._writes_outside(self.flows[module]) else set()
            known = type(module).__module__.startswith(("torch.nn.", "openconv.nn")) and not any(module.children())
            if known and not is_hooked(module) and not module.training and "forward" not in vars(module):
                return everything if getattr(module, "inplace", False) else set()
            return everything | {_OUTSIDE}
        if node.op == "call_method":
            return everything if _is_in_place(node) or node.kwargs.get("out") is not None else set()
        where = (getattr(node.target, "__module__", None) or "torch").split(".")[0]
        if where not in ("torch", "_operator", "operator", "builtins", "math", "openconv"):
            return everything | {_OUTSIDE}
        changes = node.target is in_place or _is_in_place(node) or node.kwargs.get("out") is not None
        return everything if changes else set()


def _erase(flow: _Flow, node: Node, value: Node) -> None:
    """Take out a node whose result is a value by now."""
    node.replace_all_uses_with(value)
    flow.graph.erase_node(node)


def _after(node: Node) -> Iterator[Node]:
    """The users of what a node writes to that come behind it."""
    target = node.args[0]
    assert isinstance(target, Node)
    later, users = node.next, set(target.users)
    found = []
    while later.op != "root":
        if later in users:
            found.append(later)
        later = later.next
    return iter(found)


# -- the call --------------------------------------------------------------------------------------------------------


def rewrite_forwards(model: Module, refusal: Callable[[Module], str], fusion: Fusion) -> None:
    """Fuse the sums and activations of a model whose modules are fused, and add to the report of that."""
    rewriter = _Rewriter({module: name for name, module in model.named_modules()}, refusal)
    rewriter.run()
    for module, made in rewriter.classes():
        module.__class__ = made
    fusion.pooled += rewriter.pooled
    _report(rewriter, fusion)


def _report(rewriter: _Rewriter, fusion: Fusion) -> None:
    """Join what was fused of a convolution; leave out what was refused at first and fused now."""
    for new in rewriter.fused:
        at = next((at for at, old in enumerate(fusion.fused) if old.name == new.name
                   and not (old.activation or old.sum)), None)  # fmt: skip
        if at is None:
            fusion.fused.append(new)
        else:
            fusion.fused[at] = replace(new, norm=fusion.fused[at].norm)
    places = {name: at for at, name in enumerate(rewriter.names.values())}
    fusion.fused.sort(key=lambda each: places[each.name])
    left: list[tuple[str, Any, str]] = []
    later = {module: reason for _, module, reason in rewriter.left if isinstance(module, Module)}
    for name, module, reason in fusion.left:
        done = rewriter.calls.get(module, []) if isinstance(module, Module) else []
        if any(done) and all(done):
            continue
        if any(done):
            reason += f", {sum(done)} of them fused" + (f": {later[module]}" if module in later else "")
        left.append((name, module, reason))
    known = {module for _, module, _ in left}
    left += [each for each in rewriter.left if each[1] not in known]
    for module, reason in rewriter.failed.items():
        if module not in known and rewriter.unfused(module):
            left.append((rewriter.names[module], module, reason))
    fusion.left[:] = left
