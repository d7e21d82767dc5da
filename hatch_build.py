"""Puts compiled kernels into the wheel: one library for each instruction set of `SHIPPED` in foreword/compiled_code.py.

With them an installed Foreword needs no compiler. The libraries do not depend on Python's or torch's ABI, so one wheel serves
all versions of Python; its tag says which glibc it needs. Without a compiler, or on another system, the wheel is pure Python,
and the kernels are compiled at the first start. `FOREWORD_WHEEL_CXX` names another compiler, such as
aarch64-linux-gnu-g++, or is `none`.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path("foreword")


class CompiledKernels(BuildHookInterface[Any]):
    """The build hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and add the libraries to the wheel. An editable install compiles when it runs."""
        self._folder = tempfile.TemporaryDirectory()
        if version != "editable":
            add_libraries(Path(self.root) / PACKAGE, Path(self._folder.name), build_data)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the libraries, which are in the wheel now."""
        self._folder.cleanup()


def add_libraries(
    package: Path, folder: Path, build_data: dict[str, Any], wanted: Callable[[Path], bool] = lambda source: True
) -> None:
    """Compile the libraries whose source, a path below the package, is wanted, and add them to a wheel.

    Without a compiler, or on another system, nothing is added. Raises RuntimeError if the named compiler does not exist.
    """
    named = os.environ.get("FOREWORD_WHEEL_CXX", "")
    compiler = None if named == "none" else shutil.which(named or "c++")
    if named not in ("", "none") and compiler is None:
        raise RuntimeError(f"FOREWORD_WHEEL_CXX names {named}, which does not exist")
    if compiler is None or platform.system() != "Linux":
        return
    target = subprocess.check_output([compiler, "-dumpmachine"], text=True).partition("-")[0]
    build = _load(package / "compiled_code.py")
    made: list[Path] = []
    for variant in (one for one in build.SHIPPED if one.machine == target):
        for names in (one for one in build.LIBRARIES if wanted(Path(one[0]))):
            path = folder / build.shipped_name(variant, names)
            command = [compiler, *build.COMMON_FLAGS, *variant.flags, "-o", str(path), str(package / names[0])]
            subprocess.run(command, check=True)
            build_data["force_include"][str(path)] = str(PACKAGE / build.SHIPPED_FOLDER / path.name)
            made.append(path)
    if made:
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{'_'.join(map(str, _glibc(made)))}_{target}"


def _load(path: Path) -> Any:
    """A module of the package without the package, whose dependencies are not in the environment of the build."""
    spec = importlib.util.spec_from_file_location("compiled_code", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look for their module there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _glibc(libraries: list[Path]) -> tuple[int, int]:
    """The newest version of glibc that a library asks for; at least 2.17, the first with a tag."""
    found = [(2, 17)]
    for path in libraries:
        found += [(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", path.read_bytes())]
    return max(found)
