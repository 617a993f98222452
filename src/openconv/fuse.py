"""Batch normalisation and activations into the convolutions in front of them, for models in inference.

    bn(conv(x)) = conv'(x)    w' = w * s, b' = (b - mean) * s + beta    s = gamma / sqrt(var + eps)

Which module follows which is read from the data flow that ``torch.fx`` traces, not from names. A module that cannot be
traced is a box to what is around it, and each of its parts is traced by itself. The model is traced as a copy that
shares its parameters: whatever a forward does to its module beside computing happens to the copy.

A norm or an activation is taken where every call of it, in every trace, is the only use of the convolution's result.
It then becomes a ``torch.nn.Identity``, as the same object, so that it is one wherever it is held. Functions
(``F.relu(y)``, ``y.relu_()``), sums and modules that are called at several places are code of the model, which
``fuse_forward.py`` changes afterwards.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node, Tracer
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from .epilogue import Const, Epilogue

__all__ = [
    "ACTIVATIONS",
    "Fused",
    "Fusion",
    "Refused",
    "activation_text",
    "has_forward",
    "is_hooked",
    "plan_fusion",
]

_NORMS: dict[type, int] = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}
ACTIVATIONS: dict[type, Callable[[Any], str]] = {
    nn.ReLU: lambda m: "relu",
    nn.ReLU6: lambda m: "clamp(0,6)",
    nn.Hardtanh: lambda m: f"clamp({Const(m.min_val)},{Const(m.max_val)})",
    nn.LeakyReLU: lambda m: f"leaky_relu({Const(m.negative_slope)})",
    nn.ELU: lambda m: f"elu({Const(m.alpha)})",
    nn.Sigmoid: lambda m: "sigmoid",
    nn.Tanh: lambda m: "tanh",
    nn.SiLU: lambda m: "silu",
    nn.Hardswish: lambda m: "hardswish",
    nn.GELU: lambda m: "gelu_tanh" if m.approximate == "tanh" else "gelu",
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Fused:
    """A convolution that computes what was behind it: the names of a norm and of an activation, empty for none, and
    the activation as :func:`openconv.conv2d` takes it. A sum, or an activation that is no module, is told as ``add_ of
    layer1.0``: the function, and the module in whose forward it stood."""

    name: str
    norm: str = ""
    activation: str = ""
    function: str = ""
    sum: str = ""


@dataclass
class Fusion:
    """What is to be done to a model. Nothing is until :meth:`apply`."""

    fused: list[Fused] = field(default_factory=list)
    left: list[tuple[str, Module | str, str]] = field(default_factory=list)
    """Names, modules, and why they stay; of a function, the module in whose forward it stands, and its own name."""
    pooled: list[tuple[str, str]] = field(default_factory=list)
    """Max poolings in the code of modules, by the names of these, and of the functions."""
    _work: list[tuple[Any, Module | None, Module | None, str, Tensor | None, Tensor | None]] = field(
        default_factory=list
    )

    def add(self, names: dict[Module, str], conv: Any, norm: Any | None, activation: Module | None) -> None:
        """Take these along; what the convolution will hold is computed now."""
        function = "" if activation is None else activation_text(activation)
        weight, bias = (None, None) if norm is None else _folded(conv, norm)
        self._work.append((conv, norm, activation, function, weight, bias))
        behind, last = ("" if module is None else names[module] for module in (norm, activation))
        self.fused.append(Fused(names[conv], behind, last, function))

    def apply(self) -> None:
        """Change the modules. The convolutions are openconv's by now."""
        for conv, norm, activation, function, weight, bias in self._work:
            if norm is not None:
                conv.weight, conv.bias = weight, bias
                _vanish(norm)
            if activation is not None:
                conv.activation = function
                _vanish(activation)


def activation_text(activation: Module) -> str:
    """An activation as ``activation=`` takes it; ValueError where its numbers are none that it takes."""
    text = ACTIVATIONS[type(activation)](activation)
    Epilogue().activation(text)
    return text


def _folded(conv: Any, norm: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """The weight and bias of a convolution that normalises as well, rounded once."""
    with torch.no_grad():
        scale = (norm.running_var.double() + norm.eps).rsqrt()
        scale = scale if norm.weight is None else scale * norm.weight.double()
        offset = -norm.running_mean.double() if conv.bias is None else conv.bias.double() - norm.running_mean.double()
        bias = offset * scale if norm.bias is None else offset * scale + norm.bias.double()
        wide, taps = conv.weight.double(), (1,) * len(conv.kernel_size)
        if isinstance(conv, _ConvTransposeNd):  # (C, K/groups, taps), the filters of a group side by side
            c, k = wide.shape[0] // conv.groups, wide.shape[1]
            each = scale.view(conv.groups, 1, k).expand(-1, c, -1).reshape(-1, k, *taps)
        else:
            each = scale.view(-1, 1, *taps)
        weight = (wide * each).to(conv.weight.dtype)
        # A product keeps the order of memory where it is clear; a 1x1 filter has two readings, of which this is its.
        weight = torch.empty_strided(weight.shape, conv.weight.stride(), dtype=weight.dtype,
                                     device=weight.device).copy_(weight) if _dense(conv.weight) else weight  # fmt: skip
    trained = next((p for p in (conv.bias, norm.bias, conv.weight) if p is not None), conv.weight)
    return (
        nn.Parameter(weight, requires_grad=conv.weight.requires_grad),
        nn.Parameter(bias.to(conv.weight.dtype), requires_grad=trained.requires_grad),
    )


def _dense(tensor: Tensor) -> bool:
    """Whether the tensor fills its memory, each element at a place of its own."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() == extent


def _vanish(module: Module) -> None:
    """Make an Identity of a module: the same object, whoever holds it."""
    module._parameters.clear()
    module._buffers.clear()
    kept = vars(nn.Identity()).keys()
    for name in [name for name in vars(module) if name not in kept]:
        delattr(module, name)
    module.__class__ = nn.Identity


# -- tracing ---------------------------------------------------------------------------------------------------------


class _Boxes(Tracer):
    """A tracer that does not look into some modules, and remembers the innermost one whose forward failed and the
    parameters and buffers that were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes: set[Module] = set()
        self.failed: Module | None = None
        self.read: set[int] = set()

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if isinstance(attr_val, Tensor):
            self.read.add(id(attr_val))
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        own = isinstance(m, _ConvNd | _BatchNorm) or is_hooked(m) or m in self.boxes
        return own or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or m
            raise


@dataclass
class _Traces:
    """The calls of each module in each graph, the parameters and buffers that are used by themselves (their ids), and
    what could not be traced."""

    calls: dict[Module, list[list[Node]]] = field(default_factory=dict)
    called: dict[Node, Module] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)
    boxes: dict[Module, str] = field(default_factory=dict)

    def add(self, root: Module, graph: Graph) -> None:
        modules, calls = dict(root.named_modules()), dict[Module, list[Node]]()
        for node in graph.nodes:
            if node.op == "call_module":
                self.called[node] = modules[node.target]
                calls.setdefault(modules[node.target], []).append(node)
        for module, nodes in calls.items():
            self.calls.setdefault(module, []).append(nodes)

    def _passes(self, node: Node) -> bool:
        module = self.called.get(node)
        return type(module) is nn.Identity and not is_hooked(module) and "forward" not in vars(module)

    def source(self, node: Node) -> Node | None:
        """What made the first argument of a call, seen through identities."""
        given = node.args[0] if node.args else None
        while isinstance(given, Node) and self._passes(given) and given.args:
            given = given.args[0]
        return given if isinstance(given, Node) else None

    def users(self, node: Node) -> list[Node]:
        """Who uses the result of a call, seen through identities."""
        return [far for user in node.users for far in (self.users(user) if self._passes(user) else [user])]


def _trace(model: Module) -> _Traces:
    """The data flow of a model, and of the parts of those modules in it that cannot be traced."""
    traces, pending, seen = _Traces(), [model], set[Module]()
    while pending:
        root = pending.pop()
        if root in seen:
            continue
        seen.add(root)
        boxes: dict[Module, str] = {}
        while root not in boxes:
            failed, reason = _trace_root(root, boxes, traces)
            if failed is None:
                break
            boxes[failed] = reason
        traces.boxes |= boxes
        pending += [part for box in boxes for part in _parts(box)]
        if root not in boxes:
            pending += [m for m in root.modules() if m is not root and is_hooked(m) and any(m.children())]
    return traces


def _trace_root(root: Module, boxes: dict[Module, str], traces: _Traces) -> tuple[Module | None, str]:
    """Add the graphs of one module, or tell which module in it could not be traced, and why."""
    if "forward" in vars(root):
        return root, "its forward was replaced on the instance"
    defaults = {
        name: each.default
        for name, each in inspect.signature(type(root).forward).parameters.items()
        if each.default is not inspect.Parameter.empty
    }
    graphs: list[Graph] = []
    found: tuple[Module | None, str] = None, ""
    # An argument that may be left out leads to one of two flows ("if skip is None"): both are looked at.
    for given in ({}, defaults) if defaults else ({},):
        tracer = _Boxes()
        try:
            twin = copy.deepcopy(root, {id(parameter): parameter for parameter in root.parameters()})
            real = dict(zip(twin.modules(), root.modules(), strict=True))
            tracer.boxes = {mine for mine, module in real.items() if module in boxes}
            graphs.append(tracer.trace(twin, given or None))
        except Exception as error:
            failed = None if tracer.failed is None else real.get(tracer.failed)
            if failed is None or failed in boxes:
                failed = root
                if hasattr(tracer, "graph"):  # what was called up to there is known
                    graphs.append(tracer.graph)
            first = (str(error).strip() or "no reason given").splitlines()[0]
            found = failed, f"could not be traced: {type(error).__name__}: {first}"
            if failed is not root:
                return found
            break
        finally:
            if tracer.read:
                pairs = zip((*twin.parameters(), *twin.buffers()), (*root.parameters(), *root.buffers()), strict=True)
                traces.read |= {id(value) for mine, value in pairs if id(mine) in tracer.read}
    for graph in graphs:
        traces.add(root, graph)
    return found


def _parts(box: Module) -> list[Module]:
    """The modules in a box that can be looked at by themselves: those with a forward of their own are called as a
    whole, by convention; a plain Sequential may be taken apart, unless the code of the box shows that it is called."""
    found: list[Module] = []
    for name, part in box.named_children():
        if not has_forward(part):  # a ModuleList or the like
            found += [each for each in part.children() if type(each) is not nn.Sequential and any(each.children())]
        elif any(part.children()) and (type(part) is not nn.Sequential or _is_called(box, name)):
            found.append(part)
    return found


def _is_called(box: Module, name: str) -> bool:
    """Whether the code of a module does nothing but call one of its children, as far as can be read."""
    try:
        own = type(box).__mro__[: type(box).__mro__.index(Module)]
        text = "\n".join(inspect.getsource(each) for each in own)
    except (OSError, TypeError):
        return False
    uses = re.findall(rf"\bself\.{name}\b\s*(\(|=[^=])?", text)
    hidden = re.search(r"getattr\(|\w*modules\b|children\(|parameters\(", text)
    return bool(uses) and all(uses) and hidden is None


def has_forward(module: Module) -> bool:
    """Whether a module can be called; a ModuleList cannot."""
    return type(module).forward is not Module.forward


def is_hooked(module: Module) -> bool:
    """Whether somebody looks on, or has a hand in, when a module is called."""
    return any(getattr(module, name, None) for name in _HOOKS)


# -- what can be fused -----------------------------------------------------------------------------------------------


class Refused(Exception):
    """Why something is not fused."""


def plan_fusion(model: Module, refusal: Callable[[Module], str]) -> Fusion:
    """What can be fused in a model; ``refusal`` says why a convolution cannot become openconv's, if so."""
    names = {module: name for name, module in model.named_modules()}
    look = _Look(_trace(model), names, refusal)
    fusion, norms, activations = Fusion(), dict[Module, Module](), dict[Module, Module]()
    for module in names:
        try:
            if isinstance(module, _BatchNorm):
                norms[look.before_norm(module)] = module
        except Refused as why:
            fusion.left.append((names[module], module, str(why)))
    folded = {norm: conv for conv, norm in norms.items()}
    for module in names:
        try:
            if type(module) in ACTIVATIONS and (conv := look.before_activation(module, folded)) is not None:
                activations[conv] = module
        except Refused as why:
            fusion.left.append((names[module], module, str(why)))
    for conv in names:
        if conv in norms or conv in activations:
            fusion.add(names, conv, norms.get(conv), activations.get(conv))
    boxes = [(names[box], box, why) for box, why in look.traces.boxes.items() if has_forward(box)]
    fusion.left[:0] = sorted(boxes, key=lambda each: each[0])
    return fusion


@dataclass
class _Look:
    """The questions that are asked of the traces; a no is a Refused."""

    traces: _Traces
    names: dict[Module, str]
    refusal: Callable[[Module], str]

    def before_norm(self, norm: Any) -> Module:
        """The convolution that a norm can be folded into."""
        if type(norm) not in _NORMS and not isinstance(norm, LazyModuleMixin):
            raise Refused("it is none of torch's BatchNorm1d to 3d, but has code of its own")
        self._is_plain(norm, "it")
        if norm.training:
            raise Refused("it is in training mode")
        if norm.running_mean is None or norm.running_var is None or not norm.track_running_stats:
            raise Refused("it keeps no running statistics")
        found = self._sources(norm)
        for conv in found:
            if not isinstance(conv, _ConvNd):
                raise Refused(f"its input comes from {self._told(conv)}, not from a convolution")
        conv = self._only(found)
        self._is_free(conv)
        self._is_followed(conv, norm)
        rank, channels = len(conv.kernel_size), conv.out_channels
        if rank != _NORMS[type(norm)] or channels != norm.num_features:
            raise Refused(f"it is {norm}, and {self.names[conv]} has {rank} axes and {channels} channels")
        kinds = {(v.dtype, v.device) for v in (conv.weight, norm.running_mean, norm.weight) if v is not None}
        if len(kinds) > 1 or not conv.weight.is_floating_point():
            each = " and ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise Refused(f"it and {self.names[conv]} are {each}; wanted one floating-point dtype and device")
        return conv

    def before_activation(self, activation: Module, folded: dict[Module, Module]) -> Any | None:
        """The convolution that an activation can be fused into; None if there is none right before it."""
        if activation not in self.traces.calls:
            return None
        found = [node and self.traces.called.get(node) for node in self._source_nodes(activation)]
        if not any(isinstance(module, _ConvNd) or module in folded for module in found):
            return None
        self._is_plain(activation, "it")
        try:
            activation_text(activation)
        except ValueError as error:
            raise Refused(f"its numbers cannot be fused: {error}") from None
        before = self._only(self._sources(activation))
        conv = folded.get(before, before)
        if before is conv:
            self._is_free(conv)
        self._is_followed(before, activation)
        return conv

    def _is_plain(self, module: Module, what: str) -> None:
        """A module that its class describes, called once with one argument in each graph."""
        if isinstance(module, LazyModuleMixin):
            raise Refused(f"{what} does not know its sizes yet")
        if is_hooked(module):
            raise Refused(f"{what} has hooks")
        if is_parametrized(module):
            raise Refused(f"{what} is parametrized")
        if "forward" in vars(module):
            raise Refused(f"{what} has a forward that was replaced on the instance")
        held = (*module._parameters.values(), *module._buffers.values())
        if any(id(each) in self.traces.read for each in held if each is not None):
            raise Refused(f"{what} has a parameter that is used elsewhere too")
        for box in self.traces.boxes:
            if module in box.children():
                raise Refused(f"{what} is a part of {self._told(box)}, which could not be traced")
        if module not in self.traces.calls:
            raise Refused(f"no trace has a call of {what}")
        for nodes in self.traces.calls[module]:
            if len(nodes) > 1:
                raise Refused(f"{what} is called {len(nodes)} times")
            if len(nodes[0].args) != 1 or nodes[0].kwargs:
                raise Refused(f"{what} is called with more than one tensor")

    def _is_free(self, conv: Any) -> None:
        """A convolution that can take something along."""
        name = self.names[conv] or "the model"
        if getattr(conv, "activation", None) is not None:
            raise Refused(f"{name} has an activation")
        if why := self.refusal(conv):
            raise Refused(f"{name} is not converted: {why}")
        self._is_plain(conv, name)

    def _is_followed(self, module: Module, by: Module) -> None:
        """In each graph, the result of the one goes to the other and nowhere else."""
        for node in self._nodes(module):
            users = self.traces.users(node)
            if len(users) != 1 or self.traces.called.get(users[0]) is not by:
                others = [self._told(self.traces.called.get(user) or user) for user in users
                          if self.traces.called.get(user) is not by]  # fmt: skip
                raise Refused(f"the result of {self.names[module]} is used by {', '.join(others) or 'it twice'} too")

    def _nodes(self, module: Module) -> list[Node]:
        return [node for nodes in self.traces.calls.get(module, []) for node in nodes]

    def _source_nodes(self, module: Module) -> list[Node | None]:
        return [self.traces.source(node) for node in self._nodes(module)]

    def _sources(self, module: Module) -> list[Any]:
        """What each call of a module gets its argument from."""
        return [node and self.traces.called.get(node, node) for node in self._source_nodes(module)]

    def _only(self, modules: list[Any]) -> Any:
        if any(module is not modules[0] for module in modules):
            raise Refused(f"its input comes from {' or '.join(sorted({self._told(m) for m in modules}))}")
        return modules[0]

    def _told(self, source: Any) -> str:
        """A module by name, a function as it is called."""
        if isinstance(source, Module):
            return self.names[source] or "the model"
        if not isinstance(source, Node) or source.op in ("placeholder", "output"):
            return "the result" if isinstance(source, Node) and source.op == "output" else "outside"
        target = source.target
        return target if isinstance(target, str) else getattr(target, "__name__", str(target))
