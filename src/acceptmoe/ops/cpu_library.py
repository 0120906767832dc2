"""The C++ kernels for the CPU, compiled at first use into one shared library.

The sources lie in `ops/cpu/`. The library is built for the processor it runs on and kept in the
user's cache folder under a name made of everything that decides its content: sources, compiler,
flags, processor. It takes its threads from the OpenMP runtime that torch has loaded: two runtimes
in one process would be two pools of threads that fight for the same cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from acceptmoe.errors import InvalidArgumentError, KernelBuildError

SOURCES = Path(__file__).parent / "cpu"
COMPILERS = ("g++", "clang++")
# No -ffast-math: a NaN must stay one, and sums keep the order that makes results reproducible.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-Wno-psabi")
CACHE_VARIABLE = "ACCEPTMOE_CACHE"
COMPILER_VARIABLE = "CXX"
BUILD_TIMEOUT_S = 600
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `DType` in cpu/tensors.h
STATUS_OK, STATUS_BAD_ID, STATUS_NO_MEMORY = 0, 1, 2  # `Status` in cpu/tensors.h

_lock = threading.Lock()
_library: ctypes.CDLL | None = None


def load() -> ctypes.CDLL:
    """The library of all kernels in `ops/cpu/`; the first call on a machine compiles it.

    Raises `KernelBuildError` without a C++ compiler, or when it fails.
    """
    global _library
    with _lock:
        if _library is None:
            _library = ctypes.CDLL(str(build()))
        return _library


def build() -> Path:
    """The path of the compiled library, from the cache if it is there."""
    compiler = find_compiler()
    runtime = find_openmp_runtime()
    library = cache_folder() / f"libacceptmoe_cpu_{_fingerprint(compiler, runtime)}.so"
    if library.exists():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="build_", dir=library.parent)
    except OSError as error:
        raise KernelBuildError(
            f"the compiled kernels cannot be kept in {library.parent}: {error.strerror}; set "
            f"{CACHE_VARIABLE} to a folder that can be written to"
        ) from error
    with folder:
        unfinished = Path(folder.name) / library.name
        _compile(compiler, runtime, unfinished)
        # Renaming is atomic: another process or thread sees the whole library or none.
        os.replace(unfinished, library)
    return library


def find_compiler() -> tuple[str, ...]:
    """The command of the C++ compiler: $CXX, g++ or clang++.

    Raises `KernelBuildError` when there is none.
    """
    chosen = os.environ.get(COMPILER_VARIABLE, "").strip()
    if chosen:
        command = shlex.split(chosen)
        path = shutil.which(command[0])
        if path is None:
            raise KernelBuildError(
                f"{COMPILER_VARIABLE} is {chosen!r}, which is not a command here; it must be a C++ "
                f"compiler such as {' or '.join(COMPILERS)}, or be left unset"
            )
        return (path, *command[1:])
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return (path,)
    raise KernelBuildError(
        f"no C++ compiler found (looked for {', '.join(COMPILERS)}); the compiled kernels need "
        f"one. Install g++ (Debian: apt install g++), or name yours in {COMPILER_VARIABLE}, or "
        "leave experts=None"
    )


def find_openmp_runtime() -> str | None:
    """The path of the OpenMP library that torch has loaded, or None.

    Other packages may bring one of their own (scikit-learn does), so torch's folder goes first.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    paths = [Path("/" + line.partition("/")[2]) for line in maps.splitlines() if "/" in line]
    runtimes = [p for p in paths if p.name.startswith(("libgomp", "libiomp5", "libomp"))]
    torch_folder = Path(torch.__file__).parent
    runtimes.sort(key=lambda path: torch_folder not in path.parents)  # stable
    return str(runtimes[0]) if runtimes else None


def cache_folder() -> Path:
    """$ACCEPTMOE_CACHE, else `acceptmoe` in the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE, "").strip()
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "acceptmoe"


def pointer(tensor: Tensor | None) -> int | None:
    """The address of a contiguous tensor's first element; None stays None."""
    return None if tensor is None else tensor.data_ptr()


def check_tensors(**tensors: Tensor) -> None:
    """Raise `InvalidArgumentError` unless each has a dtype that the kernels read."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise InvalidArgumentError(
                f"{name} is in {tensor.dtype}; it must be in torch.float32, torch.bfloat16 or "
                "torch.float16"
            )


def check_weights(**tensors: Tensor | None) -> None:
    """Raise `InvalidArgumentError` unless each, where given, can be read in place."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    check_tensors(**given)
    for name, tensor in given.items():
        if not tensor.is_contiguous():
            raise InvalidArgumentError(
                f"{name} has the strides {tensor.stride()}; it must be contiguous, because it is "
                "read in place: give its .contiguous() copy"
            )


def check_status(status: int) -> None:
    """Raise for what a kernel can only find out while it runs."""
    if status == STATUS_BAD_ID:
        raise InvalidArgumentError(
            "ids names an expert that there is not; ids must be below the number of experts "
            "(below 0 for none)"
        )
    if status == STATUS_NO_MEMORY:
        raise MemoryError("no memory for the activations of an expert layer; use shorter prompts")


def _compile(compiler: tuple[str, ...], runtime: str | None, library: Path) -> None:
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    objects = [str(library.with_name(f"{Path(source).stem}.o")) for source in sources]
    compile_flags = (*FLAGS, *_openmp_flags(compiler))
    for source, compiled in zip(sources, objects, strict=True):
        _run(compiler, (*compile_flags, "-c", source, "-o", compiled))
    # Linked by path and without -fopenmp, which would add the compiler's own runtime.
    runtime_flags = [runtime] if runtime else ["-fopenmp"]
    _run(compiler, ("-shared", "-o", str(library), *objects, *runtime_flags))


def _openmp_flags(compiler: tuple[str, ...]) -> tuple[str, ...]:
    # Clang's pragmas call a runtime of its own, which torch need not have loaded; without the flag
    # it ignores them. Threads come from cpu/parallel.h either way.
    return () if "clang" in Path(compiler[0]).name else ("-fopenmp",)


def _run(compiler: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    command = [*compiler, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=BUILD_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(
            f"the C++ compiler could not be run ({error}); the command was {shlex.join(command)}"
        ) from error
    if done.returncode != 0:
        raise KernelBuildError(
            f"the C++ compiler failed with exit code {done.returncode}; it must be GCC 9 or Clang "
            f"12 or newer, name another one in {COMPILER_VARIABLE}. The command was "
            f"{shlex.join(command)} and it said:\n{done.stderr.strip()[-2000:]}"
        )


def _fingerprint(compiler: tuple[str, ...], runtime: str | None) -> str:
    parts = [*compiler, *FLAGS, *_openmp_flags(compiler), runtime or "", _processor()]
    parts += [_version(compiler), torch.__version__]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _version(compiler: tuple[str, ...]) -> str:
    done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout


def cpu_features() -> frozenset[str]:
    """The instruction sets of this processor, by their names in /proc/cpuinfo; empty elsewhere."""
    words = (line.partition(":") for line in _processor().splitlines())
    lists = (value.split() for name, _, value in words if name.strip() in ("flags", "Features"))
    return frozenset(feature for features in lists for feature in features)


@cache
def _processor() -> str:
    """What -march=native may read: a home folder can be shared by machines of several kinds."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    first = text.partition("\n\n")[0].splitlines()
    return "\n".join(line for line in first if line.startswith(names))
