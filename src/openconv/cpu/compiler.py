"""What Numba and LLVM do for a kernel, each thing once: `machine_code`, the object file of a kernel and its helpers.

Left to itself, Numba makes a library of every function that a kernel calls: each is optimised, linked with what it
calls in turn, optimised twice more as a whole, and compiled to machine code with an entry for Python, before its caller
links it and begins again. Helpers of kernels (`simd.inline`) are called by nothing but kernels and end up inside them.
So they stay as the front end leaves them (`_Part`); the kernel links them all, LLVM inlines them first, and its passes
and its code generator run once, over one function. What that came to is in docs/kernels.md.

Numba has no public way to say this. What is relied on: `CPUContext._internal_codegen`, the library class of a code
generator, and the methods of that class which are replaced here.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import binding as llvm
from numba.core import types
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler import CompilerBase
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager
from numba.core.registry import cpu_target
from numba.core.typed_passes import (
    AnnotateTypes,
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.untyped_passes import (
    DeadBranchPrune,
    FixupArgs,
    GenericRewrites,
    IRProcessing,
    ReconstructSSA,
    TranslateByteCode,
)

__all__ = ["HELPER", "Pipeline", "assembly", "machine_code"]

_OPTIONS: dict[str, Any] = {
    "boundscheck": False,
    "error_model": "numpy",
    "fastmath": {"contract"},
    "no_cpython_wrapper": True,
    "_nrt": False,  # no arrays, no reference counts
}

#: How Numba compiles the helpers of kernels.
HELPER: dict[str, Any] = {**_OPTIONS, "forceinline": True, "no_cfunc_wrapper": True}


# ---- the front end ---------------------------------------------------------------------------------------------------


class Pipeline(CompilerBase):
    """Numba's passes for kernels, without those for arrays, generators, closures and objects: 10% of the front end."""

    def define_pipelines(self) -> list[PassManager]:
        manager = PassManager("kernel")
        passes: tuple[Any, ...] = (
            TranslateByteCode,
            FixupArgs,
            IRProcessing,
            DeadBranchPrune,  # constants of a closure decide what there is to compile
            GenericRewrites,  # t[0] of a tuple is a register, t[i] would be a search
            ReconstructSSA,
            DeadBranchPrune,
            NopythonTypeInference,
            PreLowerStripPhis,
            IRLegalization,
            AnnotateTypes,
            NativeLowering,
            NoPythonBackend,
        )
        for each in passes:
            manager.add_pass(each, each.name())
        manager.finalize()
        return [manager]


_answers: dict[Any, Any] = {}


def _remembering(ask: Callable[..., Any]) -> Callable[..., Any]:
    """`resolve_function_type` with a memory. Numba asks each of an operator's dozens of templates at every place where
    two integers are added: a quarter of the time that compiling takes. Keys keep the functions alive, on which Numba
    notes what it found."""

    def resolve(function: Any, args: Any, kws: Any) -> Any:
        if kws or not isinstance(function, types.Function | types.Dispatcher):
            return ask(function, args, kws)
        key = function, tuple(args)
        answer = _answers.get(key)
        if answer is None:
            answer = ask(function, args, kws)
            if answer is not None:
                _answers[key] = answer
        return answer

    return resolve


class _Part(JITCodeLibrary):
    """What the front end made of one function: not optimised, not compiled, not linked with what it calls."""

    _whole: Any = None

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        self._raise_if_finalized()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """None: helpers cannot be called from Python."""
        return 0

    def linked(self) -> Any:
        """A module of this function and all that it calls, however deep."""
        module, seen, pending = self._final_module.clone(), set(), list(self._linking_libraries)
        while pending:  # callers before what they call: a function that nothing asks for yet would be left out
            library = pending.pop()
            if library in seen:
                continue
            seen.add(library)
            if isinstance(library, _Part):
                module.link_in(super(_Part, library)._get_module_for_linking(), preserve=True)
                pending += library._linking_libraries
            else:
                module.link_in(library._get_module_for_linking(), preserve=True)
        return module

    def _get_module_for_linking(self) -> Any:
        """For Numba: functions of its own that it compiled on behalf of a kernel may be asked for by other code."""
        if self._whole is None:
            self._whole = self.linked()
            for function in self._whole.functions:
                if not function.is_declaration and function.linkage == llvm.Linkage.external:
                    function.linkage = llvm.Linkage.linkonce_odr
        return self._whole


class _Codegen(JITCPUCodegen):
    """A code generator for the same target as Numba's own, whose libraries are parts."""

    _library_class = _Part

    def set_env(self, env_name: str, env: Any) -> None:
        """Environments hold Python objects; kernels have none."""


_codegen: _Codegen | None = None


@contextmanager
def _front_end() -> Iterator[_Codegen]:
    """Numba makes parts meanwhile. The caller holds its lock.

    The garbage collector waits: with torch imported it walks a million objects again and again, a fifth of the time.
    """
    global _codegen
    context, typing = cpu_target.target_context, cpu_target.typing_context
    context.refresh()
    if _codegen is None:
        _codegen = _Codegen("openconv")
    usual, collecting = context._internal_codegen, gc.isenabled()
    gc.disable()
    context._internal_codegen = _codegen
    typing.resolve_function_type = _remembering(typing.resolve_function_type)
    try:
        yield _codegen
    finally:
        context._internal_codegen = usual
        del typing.resolve_function_type  # the instance's, in front of the class's
        if collecting:
            gc.enable()


# ---- LLVM ------------------------------------------------------------------------------------------------------------


def _optimised(function: Callable[[int], None], symbol: str) -> tuple[Any, Any]:
    """The module of a kernel, optimised, and the machine to compile it for."""
    with _front_end() as codegen:
        result = CFunc(function, ((types.int64,), types.void), {}, {**_OPTIONS, "nopython": True}, Pipeline)
        made = result._compile_uncached()
        module, machine = made.library.linked(), codegen._tm
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration:
            value.linkage = llvm.Linkage.internal
    entry = module.get_function(made.fndesc.llvm_cfunc_wrapper_name)
    entry.linkage, entry.name = llvm.Linkage.external, symbol
    # Level 0 inlines what must be inlined, and does nothing else: helpers are optimised where they are called, not
    # before. Kernels are vectors already: LLVM's vectorisers find nothing to do in them.
    for level in (0, 3):
        options = llvm.create_pipeline_tuning_options(level)
        options.loop_vectorization = options.slp_vectorization = False
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(module, builder)
    missing = [f.name for f in module.functions if f.is_declaration and f.name.startswith("_ZN")]
    if missing:
        raise RuntimeError(f"kernel {function.__qualname__} calls {', '.join(missing)}, which were not linked")
    module.verify()
    return module, machine


def machine_code(function: Callable[[int], None], symbol: str) -> bytes:
    """An object file that holds `void symbol(int64)` and needs nothing but the C library."""
    with global_compiler_lock:
        module, machine = _optimised(function, symbol)
        code: bytes = machine.emit_object(module)
        return code


def assembly(function: Callable[[int], None]) -> str:
    """The same as text."""
    with global_compiler_lock:
        module, machine = _optimised(function, "kernel")
        text: str = machine.emit_assembly(module)
        return text
