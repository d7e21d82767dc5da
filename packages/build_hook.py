"""Puts the files of one product into its wheel: the modules that products.toml names, with what lies beside them, and the
compiled kernels of its sources (hatch_build.py has those of all products in one wheel).

The sources of all products lie in one folder, `foreword/`, so that a checkout is one package; wheels of several products put
their files into one folder again.
"""

from __future__ import annotations

import importlib.util
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).parent
SOURCES = HERE.parent / "foreword"
_LEFT_OUT = {"__pycache__"}


def homes() -> dict[str, str]:
    """The product of each package and module that products.toml names."""
    table = tomllib.loads((HERE / "products.toml").read_text(encoding="utf-8"))
    return {name: product for product, settings in table.items() for name in settings["modules"]}


def product_of(path: Path, known: dict[str, str]) -> str:
    """The product of a file, given as a path below `foreword/`."""
    parts = [*path.parts[:-1], path.name.removesuffix(".py")]
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((known[name] for name in names if name in known), "cache")


def files_of(product: str) -> list[Path]:
    """Paths below `foreword/` of all files of a product."""
    known = homes()
    found = (path.relative_to(SOURCES) for path in sorted(SOURCES.rglob("*")) if path.is_file())
    return [path for path in found if not _LEFT_OUT & {*path.parts} and product_of(path, known) == product]


class ProductFiles(BuildHookInterface[Any]):
    """The build hook. The product is the name of the folder that is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files of the wheel, and compile its libraries."""
        product = Path(self.root).name
        files = files_of(product)
        for path in files:
            build_data["force_include"][str(SOURCES / path)] = f"foreword/{path}"
        self._folder = tempfile.TemporaryDirectory()
        build = _kernels_of_all()
        build.add_libraries(SOURCES, Path(self._folder.name), build_data, lambda source: source in files)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the libraries, which are in the wheel now."""
        self._folder.cleanup()


def _kernels_of_all() -> Any:
    """The build hook of a wheel with all products."""
    spec = importlib.util.spec_from_file_location("hatch_build", HERE.parent / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
