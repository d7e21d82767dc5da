"""C++ sources of the package as compiled libraries: from the wheel, which brings them for some instruction sets
(hatch_build.py), or compiled with the system's C++ compiler, once per user, source, compiler and processor."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

# Paths in the package. The first file of each library is compiled, the others are included.
_KERNELS = ("kernels.cpp", "decoder.h", "attention.h", "product.h", "sampling.h", "threads.h", "vectors.h")
SOURCES = tuple(f"engine/kernels/{name}" for name in _KERNELS)
UNIT_SOURCES = ("offload/units.cpp",)
FILE_SOURCES = ("store/disk/files.cpp",)
LIBRARIES = (SOURCES, UNIT_SOURCES, FILE_SOURCES)
# A compiler that may fuse a product and a sum does so in one copy of a function and not in another, and results differ: the
# kernels say where (`fused`).
COMMON_FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-w")
FLAGS = (*COMMON_FLAGS, "-march=native")
COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Variant:
    """An instruction set for which a wheel brings compiled kernels. `needs` are flags of /proc/cpuinfo."""

    name: str
    machine: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_AVX2 = frozenset(["avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"])
_AVX512 = _AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
# The widest first.
SHIPPED = (
    Variant("avx512-bf16", "x86_64", ("-march=x86-64-v4", "-mavx512bf16"), _AVX512 | {"avx512_bf16"}),
    Variant("avx512", "x86_64", ("-march=x86-64-v4",), _AVX512),
    Variant("avx2", "x86_64", ("-march=x86-64-v3",), _AVX2),
    Variant("neon", "aarch64", ("-march=armv8-a",), frozenset()),
)
SHIPPED_FOLDER = "compiled_libraries"


class CannotBuild(Exception):
    """A library cannot be compiled or loaded. The message says why, and what would help."""


def library(flags: Sequence[str] = FLAGS, names: Sequence[str] = SOURCES) -> Path:
    """Path of the compiled sources, of which the first is compiled. That of the wheel, unless `$CXX` or other flags ask for
    another; else they are compiled if there is no copy. Raises CannotBuild."""
    shipped = shipped_library(names) if flags == FLAGS and not os.environ.get("CXX") else None
    if shipped is not None:
        return shipped
    compiler, sources = _compiler(), _sources(names)
    path = _path(compiler, flags, sources)
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
            for name, source in sources.items():
                (Path(folder) / Path(name).name).write_bytes(source)
            made = Path(folder) / "kernels.so"
            _run([*compiler, *flags, "-o", str(made), str(Path(folder) / Path(names[0]).name)])
            # Another process that compiles at the same time makes the same file; the last rename wins.
            made.replace(path)
    except OSError as error:
        raise CannotBuild(
            f"cannot write to {path.parent} ({error.strerror}); set XDG_CACHE_HOME to a writable folder"
        ) from error
    return path


@cache
def function(names: Sequence[str], symbol: str, result: Any, arguments: Sequence[Any]) -> Callable[..., Any]:
    """A function of a library, compiled at its first use on a machine; `result` and `arguments` are types of ctypes. A call
    releases the interpreter lock. Raises CannotBuild."""
    path = library(names=names)
    try:
        found = getattr(ctypes.CDLL(str(path)), symbol)
    except (OSError, AttributeError) as error:
        raise CannotBuild(f"{path} cannot be used: {error}") from error
    found.restype, found.argtypes = result, arguments
    return cast("Callable[..., Any]", found)


def shipped_library(names: Sequence[str] = SOURCES) -> Path | None:
    """The library that the wheel brings for this processor, of exactly these sources; None if there is none."""
    folder = Path(__file__).parent / SHIPPED_FOLDER
    if not folder.is_dir():
        return None
    has = processor_flags()
    fitting = (one for one in SHIPPED if one.machine == platform.machine() and one.needs <= has)
    paths = (folder / shipped_name(one, names) for one in fitting)
    return next((path for path in paths if path.exists()), None)


def shipped_name(variant: Variant, names: Sequence[str]) -> str:
    """File name of a library in the wheel: with a hash of the sources, so that a changed source is never served by it."""
    digest = hashlib.sha256(" ".join(variant.flags).encode())
    for name in names:
        source = (Path(__file__).parent / name).read_bytes()
        digest.update(len(source).to_bytes(8, "little") + source)
    return f"{Path(names[0]).stem}-{variant.name}-{digest.hexdigest()[:24]}.so"


def is_compiled() -> bool:
    """Whether there is a compiled copy. Raises CannotBuild."""
    if shipped_library() is not None and not os.environ.get("CXX"):
        return True
    return _path(_compiler(), FLAGS, _sources(SOURCES)).exists()


def _sources(names: Sequence[str]) -> dict[str, bytes]:
    return {name: (files("foreword") / name).read_bytes() for name in names}


def _path(compiler: list[str], flags: Sequence[str], sources: dict[str, bytes]) -> Path:
    return cache_folder() / f"kernels-{_digest([*compiler, *flags], compiler, sources)}.so"


def cache_folder() -> Path:
    """Folder of compiled kernels: `$XDG_CACHE_HOME/foreword`, by default `~/.cache/foreword`."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(named) if Path(named).is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        raise CannotBuild("there is no home directory for the compiled kernels; set XDG_CACHE_HOME") from error
    return base / "foreword"


def _compiler() -> list[str]:
    """`$CXX`, or the first usual compiler that exists. Raises CannotBuild."""
    wanted = os.environ.get("CXX", "").split()
    if wanted:
        found = shutil.which(wanted[0])
        if found is None:
            raise CannotBuild(f"CXX names {wanted[0]}, which does not exist")
        return [found, *wanted[1:]]
    for name in COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return [found]
    raise CannotBuild("there is no C++ compiler (looked for c++, g++ and clang++); install one, such as g++")


def _digest(command: list[str], compiler: list[str], sources: dict[str, bytes]) -> str:
    """A hash of all that the compiled file depends on: machines that share a home directory have one file each."""
    parts = [" ".join(command).encode(), _run([*compiler, "--version"]).encode(), processor().encode()]
    digest = hashlib.sha256()
    for part in [*parts, *sources.values()]:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


def processor_flags() -> frozenset[str]:
    """Instruction sets of the processor, by Linux's names; none where they are not known."""
    return frozenset(processor_field("flags", "Features").split())


def processor_field(*names: str) -> str:
    """The first value of a field of `/proc/cpuinfo` that has one of these names; empty where it is not known."""
    fields = (line.partition(":") for line in system_lines("/proc/cpuinfo"))
    return next((value.strip() for name, _, value in fields if name.strip() in names), "")


def system_lines(path: str) -> list[str]:
    """The lines of a file of the system; none if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def processor() -> str:
    """Architecture and instruction sets."""
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    named = sorted({line for line in system_lines("/proc/cpuinfo") if line.split("\t")[0].strip(" :") in wanted})
    return "\n".join([platform.machine(), platform.processor(), *named])


def _run(command: list[str]) -> str:
    """Standard output of a command. Raises CannotBuild with the compiler's first error line."""
    # The seconds of processor hold for what it starts, too, and if this process is killed meanwhile.
    limited = ["/bin/sh", "-c", f'ulimit -t {_SECONDS}; exec "$@"', "sh", *command]
    try:
        done = subprocess.run(limited, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise CannotBuild(f"{command[0]} cannot compile them: {said.strip() or f'exit status {done.returncode}'}")
    return done.stdout
