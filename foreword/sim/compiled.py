"""The modules that a simulation spends its time in, compiled with mypyc: the same code, about twice as fast.

A copy of their sources is compiled once per user, source, Python and mypyc, into the folder of the compiled kernels. They are
imported from there only if nothing has imported them yet, so `use_compiled` comes first in a process.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Final

from foreword.engine.kernels.build import CannotBuild, cache_folder
from foreword.sim import constructors

# Without engine.request: a simulated sequence stands in for the tuple of a `Request`, and compiled code checks types.
MODULES: Final = (
    *(f"blocks.{name}" for name in ("common_prefixes", "free_list", "keys", "pool", "prefix_cache", "runs")),
    *(f"engine.{name}" for name in ("scheduler", "sequence")),
    *(f"routing.{name}" for name in ("costs", "directory", "estimated_directory", "fleet", "load", "placement")),
    *(f"routing.{name}" for name in ("prefix_popularity", "queue", "sessions", "shortlist")),
    *(f"sim.{name}" for name in ("costs", "decoding", "prefill", "replica", "run", "stores", "tokens", "trace")),
)
_SUFFIX: Final = importlib.machinery.EXTENSION_SUFFIXES[0]
_SECONDS: Final = 900
# Without fused multiply-add, which some processors use by default and CPython does not: results are the same.
_FLAGS: Final = "-O2 -g0 -ffp-contract=off"
_SETUP: Final = """
import sys
from mypyc.build import mypycify
from setuptools import setup
options = ["--follow-imports=silent", "--ignore-missing-imports", "--no-error-summary"]
extensions = mypycify([*options, *sys.argv.pop().split()], opt_level="3", debug_level="0")
setup(name="foreword-compiled", packages=[], ext_modules=extensions)
"""


class _Finder(importlib.machinery.PathFinder):
    """Finds the compiled modules. The others are found as before."""

    folder = ""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        file = Path(cls.folder, *fullname.split(".")).with_name(fullname.rpartition(".")[2] + _SUFFIX)
        return importlib.util.spec_from_file_location(fullname, file) if file.exists() else None


def is_used() -> bool:
    """Whether this process imports the compiled modules."""
    return _Finder in sys.meta_path


def use_compiled(report: Callable[[str], None] | None = None) -> bool:
    """Import the compiled modules in this process, whatever imports them later. False if one is imported already.

    They are compiled if there is no compiled copy, see `compiled_folder`.
    """
    if not is_used():
        if any(f"foreword.{name}" in sys.modules for name in MODULES):
            return False
        _Finder.folder = str(compiled_folder(report))
        sys.meta_path.insert(0, _Finder)
    return True


def compiled_folder(report: Callable[[str], None] | None = None) -> Path:
    """The compiled modules. If there is no copy, they are compiled, which takes about a minute.

    `report` gets a line when the compiler starts. Raises CannotBuild if they cannot be compiled.
    """
    sources = _sources()
    folder = cache_folder() / f"simulator-{_digest(sources)}"
    if not folder.exists():
        if report is not None:
            report("compiling the simulator with mypyc, which takes a minute and is done once")
        _build(sources, folder)
    return folder


def _sources() -> dict[str, bytes]:
    """The modules, and the packages that they are in, by path."""
    root = files("foreword")
    paths = [name.replace(".", "/") + ".py" for name in MODULES]
    packages = sorted({path.rpartition("/")[0] + "/__init__.py" for path in paths})
    return {path: root.joinpath(path).read_bytes() for path in [*paths, *packages]}


def _digest(sources: dict[str, bytes]) -> str:
    """A hash of all that the compiled files depend on."""
    made_by = (_SETUP, _FLAGS, inspect.getsource(constructors), _mypyc_version(), sys.version, sysconfig.get_platform())
    digest = hashlib.sha256(repr(made_by).encode())
    for path, source in sources.items():
        digest.update(f"{path} {len(source)} ".encode() + source)
    return digest.hexdigest()[:24]


def _mypyc_version() -> str:
    try:
        from mypy.version import __version__
    except ImportError as error:
        raise CannotBuild("mypyc is not installed: pip install 'foreword[simulator]'") from error
    return __version__


def _build(sources: dict[str, bytes], folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="build-") as made:
            work = Path(made, "work")
            for path, source in constructors.with_constructors(sources).items():
                file = work / "foreword" / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(source)
            (work / "foreword" / "__init__.py").touch()
            _compile(work)
            found = Path(made, "found")
            for file in work.glob(f"**/*{_SUFFIX}"):
                if "build" not in file.relative_to(work).parts:
                    target = found / file.relative_to(work)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(file, target)
            try:
                found.rename(folder)
            except OSError:
                if not folder.exists():  # else another process has compiled them at the same time
                    raise
    except OSError as error:
        raise CannotBuild(f"cannot write to {folder.parent}: {error.strerror}") from error


def _compile(work: Path) -> None:
    paths = " ".join(f"foreword/{name.replace('.', '/')}.py" for name in MODULES)
    command = [sys.executable, "-c", _SETUP, "build_ext", "--inplace", paths]
    try:
        done = subprocess.run(
            command,
            cwd=work,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
            env=os.environ | {"CFLAGS": _FLAGS},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"mypyc does not run: {error}") from error
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()]
        raise CannotBuild(f"mypyc cannot compile the simulator: {lines[0] if lines else done.stderr.strip()[-200:]}")
