"""doctor: what openconv finds on this machine, and what is wrong or missing.

Every check is a :class:`Finding`. Only ``broken`` ones stop openconv from working; ``missing`` ones name the command
that adds them.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .cpu import memory, runtime
from .cuda.jit import cache_folder
from .device import Device
from .plan import device_of
from .select import current_policy, version_of
from .select.database import stores
from .units import bytes_text, seconds_text

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Finding", "examine", "findings_rich", "healthy"]

OK, NOTE, MISSING, BROKEN = "ok", "note", "missing", "broken"


@dataclass(frozen=True)
class Finding:
    """One fact. ``status`` is ``ok``, ``note`` (works, may be slow), ``missing`` (optional) or ``broken`` (required);
    ``advice`` is what to do about it."""

    area: str
    what: str
    value: str
    status: str = OK
    advice: str = ""

    def to_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def examine() -> list[Finding]:
    """All findings, area by area."""
    areas: tuple[Callable[[], Iterator[Finding]], ...] = (_versions, _cpu, _cuda, _cache, _tuning, _optional, _trial)
    return [finding for area in areas for finding in area()]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[Finding]:
    from . import __version__

    yield Finding("versions", "openconv", __version__)
    yield Finding("versions", "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield Finding(
        "versions", "torch", f"{torch.__version__}, CPU kernels for {torch.backends.cpu.get_cpu_capability()}"
    )
    for package in ("numba", "numpy", "rich", "typer", "matplotlib", "pillow", "filelock"):
        found = _version(package)
        if found:
            yield Finding("versions", package, found)
        else:
            yield Finding("versions", package, "not installed", BROKEN, f"pip install {package}")


def _cpu() -> Iterator[Finding]:
    info = runtime.cpu_info()
    lanes = info.vector_bytes // 4
    yield Finding("CPU", "model", info.model)
    yield Finding("CPU", "vectors", f"{8 * info.vector_bytes} bits: {lanes} f32 values")
    threads = torch.get_num_threads()
    many = threads > info.cores
    yield Finding("CPU", "threads", f"{threads} of {info.cores} cores (torch.get_num_threads)", NOTE if many else OK,
                  f"torch.set_num_threads({info.cores})" if many else "")  # fmt: skip
    l3 = _level3()
    shared = f", {_binary(l3)} shared" if l3 else ""
    yield Finding("CPU", "caches", f"{_binary(info.l1_bytes)} and {_binary(info.l2_bytes)} per core{shared}")
    if runtime._openmp_team() is not None:
        yield Finding("CPU", "thread pool", f"torch's own OpenMP pool: {_openmp_library()}")
    else:
        yield Finding("CPU", "thread pool", "Python threads", NOTE,
                      "torch has no GOMP_parallel here: kernels run on threads of their own")  # fmt: skip
    yield _huge_pages()
    yield _kept_memory()


def _binary(size: int) -> str:
    """Caches come in powers of two."""
    return f"{size / (1 << 20):g} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _level3() -> int:
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
    except OSError:
        return 0
    match = re.fullmatch(r"(\d+)([KM]?)", text)
    return int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]] if match else 0


def _openmp_library() -> str:
    """The file name of the OpenMP library in this process."""
    try:
        names = re.findall(r"\S*/(lib(?:gomp|iomp5|omp)\S*\.so\S*)", Path("/proc/self/maps").read_text())
    except OSError:
        names = []
    return ", ".join(dict.fromkeys(names)) or "found through libtorch_cpu"


def _huge_pages() -> Finding:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return Finding("CPU", "huge pages", "not known on this system")
    mode = text.partition("[")[2].partition("]")[0]
    if mode in ("always", "madvise"):
        return Finding("CPU", "huge pages", f"{mode}: large results use them")
    return Finding("CPU", "huge pages", mode or "off", NOTE,
                   f"results of {_binary(memory.LARGE)} and more fault in small pages; as root: "
                   "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")  # fmt: skip


def _kept_memory() -> Finding:
    try:
        most = memory.most_kept_bytes()
    except ValueError as error:
        return Finding("CPU", "kept memory", str(error), BROKEN, "unset OPENCONV_KEEP_MB")
    return Finding("CPU", "kept memory", f"up to {most // 1_000_000} MB of freed results, for the next ones")


def _cuda() -> Iterator[Finding]:
    found = torch.cuda.is_available()
    driver = _driver()
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    if not torch.version.cuda and driver.status == OK:
        yield Finding(
            "CUDA", "torch", built, NOTE, "there is a driver: a torch with CUDA would use the GPU (pytorch.org)"
        )
    else:
        yield Finding("CUDA", "torch", built)
    yield driver
    if found:
        for index in range(torch.cuda.device_count()):
            props = torch.cuda.get_device_properties(index)
            detail = (
                f"sm_{props.major}{props.minor}, {props.multi_processor_count} SMs, {bytes_text(props.total_memory)}"
            )
            value = f"{props.name}, {detail}"
            if props.major * 10 + props.minor < 75:
                yield Finding("CUDA", f"device {index}", value, MISSING, "kernels are compiled for sm_75 and newer")
            else:
                yield Finding("CUDA", f"device {index}", value)
    else:
        yield Finding("CUDA", "devices", "none")
    core = _version("cuda-core")
    if core:
        yield Finding("CUDA", "cuda-core", core)
    else:
        yield Finding("CUDA", "cuda-core", "not installed", MISSING, "pip install 'openconv[cuda]'")
    nvrtc = _nvrtc()
    yield nvrtc
    if core and nvrtc.status == OK:
        yield _compiler()


def _driver() -> Finding:
    """The driver's library, and whether it is as new as the compiler: an older one does not load its kernels."""
    name = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return Finding("CUDA", "driver", f"{name} is not there", NOTE,
                       "everything runs on the CPU; with an NVIDIA GPU, install its driver")  # fmt: skip
    number = ctypes.c_int()
    if library.cuInit(0) or library.cuDriverGetVersion(ctypes.byref(number)):
        return Finding("CUDA", "driver", f"{name} is there but does not start", MISSING,
                       "is a GPU there, and visible (nvidia-smi, CUDA_VISIBLE_DEVICES, the container)?")  # fmt: skip
    have = number.value // 1000, number.value % 1000 // 10
    compiler = _version("nvidia-cuda-nvrtc") or ""
    wanted = int(compiler.split(".")[0]) if compiler[:1].isdigit() else have[0]
    if have[0] < wanted:
        return Finding("CUDA", "driver", f"for CUDA {have[0]}.{have[1]}", MISSING,
                       f"older than NVRTC {compiler}, whose kernels it does not load: update the driver, or "
                       f"pip install 'nvidia-cuda-nvrtc<{have[0] + 1}'")  # fmt: skip
    return Finding("CUDA", "driver", f"for CUDA {have[0]}.{have[1]}")


def _nvrtc() -> Finding:
    try:
        from cuda.bindings import nvrtc

        error, major, minor = nvrtc.nvrtcVersion()
    except Exception as error_:  # any failure of a foreign binary means the same
        reason = str(error_).splitlines()[0] if str(error_) else type(error_).__name__
        return Finding("CUDA", "NVRTC", f"not usable: {reason}", MISSING, "pip install 'openconv[cuda]'")
    if int(error):
        return Finding("CUDA", "NVRTC", f"error {int(error)}", MISSING, "pip install 'openconv[cuda]'")
    return Finding("CUDA", "NVRTC", f"{major}.{minor}")


def _compiler() -> Finding:
    """Whether a kernel compiles. Ours include no header but their own, so that NVRTC is all that is needed."""
    from .cuda.jit import compiles

    begun = time.perf_counter()
    try:
        compiles("sm_90a")
    except Exception as failure:  # whatever it is, it is what a first call would meet
        reason = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
        return Finding("CUDA", "kernels", f"do not compile: {reason}", MISSING, "pip install 'openconv[cuda]'")
    took = seconds_text(time.perf_counter() - begun)
    return Finding("CUDA", "kernels", f"compile (one took {took}); CUDA headers are not needed")


def _cache() -> Iterator[Finding]:
    for folder in (runtime.cache_directory(), cache_folder()):
        yield _cache_in(folder)


def _cache_in(folder: Path) -> Finding:
    try:
        sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    except OSError:
        sizes = []
    count = f"{len(sizes)} kernels, {bytes_text(sum(sizes))}" if sizes else "empty"
    if _writable(folder):
        return Finding("kernel cache", str(folder), f"{count}; writable")
    return Finding("kernel cache", str(folder), f"{count}; not writable", NOTE,
                   "every process compiles anew; set OPENCONV_CACHE_DIR to a folder of yours")  # fmt: skip


def _writable(folder: Path) -> bool:
    """Whether files can be made there, or the folder itself can."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


_OPTIONAL = (
    ("cv2", "opencv-python-headless", "bench", "compare image filters with OpenCV"),
    ("scipy", "scipy", "bench", "compare with scipy"),
    ("cuda.core", "cuda-core", "cuda", "compile and run GPU kernels"),
)


def _tuning() -> Iterator[Finding]:
    """The databases that choices on this machine go by, and how much of them holds for the present engines."""
    yield Finding("tuning", "mode", f"{current_policy().tuning} (OPENCONV_TUNING, openconv.tuning)")
    if asked := current_policy().engine:
        which = "preferred" if asked.endswith(",") else "alone may run"
        yield Finding("tuning", "engine", f"{asked.rstrip(',')} {which} (OPENCONV_ENGINE)", NOTE,
                      "unset OPENCONV_ENGINE to have all engines considered")  # fmt: skip
    for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        yield from _databases(device_of(torch.device(kind)))


def _databases(device: Device) -> Iterator[Finding]:
    for layer, store in stores(device.key).items():
        entries = store.load().devices.get(device.key, {}).values()
        try:
            stale = sum(not entry.is_current(version_of) for entry in entries)
        except Exception:  # an engine that cannot be loaded is a finding of the trial's
            return
        value = f"{len(entries)} problems for '{device.key}'" + (f", {stale} of them out of date" if stale else "")
        yield Finding("tuning", f"{layer} database", value, NOTE if stale else OK,
                      "openconv tune measures them again" if stale else "")  # fmt: skip


def _optional() -> Iterator[Finding]:
    for module, package, extra, use in _OPTIONAL:
        found = _version(package) or ("installed" if _importable(module) else None)
        if found:
            yield Finding("optional", package, f"{found}: {use}")
        else:
            yield Finding("optional", package, f"not installed: {use}", MISSING, f"pip install 'openconv[{extra}]'")


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _trial() -> Iterator[Finding]:
    """One small convolution through every engine that takes it."""
    from .engine import engines
    from .plan import lower, make_plan
    from .problem import Problem
    from .reference import allowed_error, error_of, random_inputs
    from .select import Policy

    try:
        found = engines()
    except Exception as error:  # whatever keeps an engine from loading is the finding
        yield Finding("engines", "registry", f"{type(error).__name__}: {error}", BROKEN, "reinstall openconv")
        return
    lines = ("fprop n1 c4 h9 w9 k4 r3 s3 pad1", "fprop n1 c4 h9 w9 k4 r1 s1", "fprop n1 c4 h9 w9 k4 r3 s3 pad1 g4",
             "fprop n1 c8 h9 w9 k8 r7 s7 pad3 g8 f16 nhwc")  # fmt: skip
    for engine in found:
        if engine.device == "cuda" and not torch.cuda.is_available():
            continue
        place = torch.device(engine.device)
        device = device_of(place)
        taken = [p for p in map(Problem.parse, lines) if not any(engine.refusals(lower(p, device), device))]
        if not taken:
            yield Finding("engines", engine.name, "takes none of the trial problems")
            continue
        try:
            plan = make_plan(taken[0], device, Policy(engine=engine.name))
            inputs = random_inputs(taken[0], device=place)
            assert plan.candidate is not None
            plain = plan.candidate.traits.plain_sum
            error_ = error_of(taken[0], plan(inputs.a, inputs.b), inputs, plain_sum=plain)
            right = error_ <= allowed_error(taken[0], plan.candidate.traits)
            text = f"runs, error {error_:.0e}" if right else f"wrong result on '{taken[0]}': error {error_:.1e}"
            yield Finding(
                "engines", engine.name, text, OK if right else BROKEN, "" if right else "report it with this output"
            )
        except Exception as error:
            yield Finding("engines", engine.name, f"{type(error).__name__}: {error}", BROKEN, "reinstall openconv")


def findings_rich(findings: list[Finding]) -> RenderableType:
    """For a terminal: a mark, the fact, and the advice where there is some."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    marks: dict[str, tuple[str, str]] = {OK: ("ok", "green"), NOTE: ("note", "yellow"), MISSING: ("-", "yellow"),
                                         BROKEN: ("BROKEN", "bold red")}  # fmt: skip
    blocks: list[RenderableType] = []
    for area in dict.fromkeys(f.area for f in findings):
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True, min_width=6)
        grid.add_column(style="dim", overflow="fold")
        grid.add_column()
        for finding in (f for f in findings if f.area == area):
            advice: Any = Text(f"\n{finding.advice}", style="yellow") if finding.advice else ""
            grid.add_row(Text(*marks[finding.status]), finding.what, Text.assemble(finding.value, advice))
        blocks += [Text(area, style="bold"), Padding(grid, (0, 0, 1, 2))]
    return Group(*blocks)


def healthy(findings: list[Finding]) -> bool:
    """Whether nothing that is required is broken."""
    return not any(finding.status == BROKEN for finding in findings)
