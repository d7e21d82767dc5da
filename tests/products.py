"""The products of the repository: which modules and tests each has, and which products it may import. Floors go up: a product
imports those below it only.

python tests/products.py                 prints the names of all products, one a line
python tests/products.py stores          prints the files of tests of a product, but for those that read a checkout's sources
python tests/products.py stores --needs  prints the products that must be there for them: itself, what it needs, what the
                                         processes of its tests use, and the contracts, which all tests need
"""

from __future__ import annotations

import ast
import functools
import sys
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

import foreword

ROOT = Path(foreword.__file__).parent
TESTS = Path(__file__).parent

TABLE: dict[str, dict[str, list[str]]] = tomllib.loads(
    (Path(__file__).parents[1] / "packages" / "products.toml").read_text(encoding="utf-8")
)
# The imports that each product may have.
NEEDS = {name: tuple(settings["needs"]) for name, settings in TABLE.items()}
_HOMES = {f"foreword.{name}": product for product, settings in TABLE.items() for name in settings["modules"]}

Trees = dict[str, tuple[Path, ast.Module]]


@functools.cache
def package() -> Trees:
    """Every module of the package: its file, and its source as a tree."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = [ROOT.name, *path.relative_to(ROOT).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = (path, ast.parse(path.read_text(encoding="utf-8")))
    return found


def product_of(module: str) -> str:
    """The product that a module belongs to."""
    name = module
    while name not in _HOMES and "." in name:
        name = name.rpartition(".")[0]
    return _HOMES.get(name, "cache")


def above(product: str) -> list[str]:
    """A product, and all that import it."""
    return [name for name, needs in NEEDS.items() if name == product or product in needs]


def imported(tree: ast.AST, modules: Collection[str]) -> Iterator[str]:
    """Modules among these that a source imports when it runs, also within functions."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield from (one for one in [whole if whole in modules else node.module] if one in modules)
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            todo += node.orelse
        else:  # only statements have imports below them
            for name in ("body", "orelse", "handlers", "finalbody", "cases"):
                below = getattr(node, name, ())
                todo += below if isinstance(below, list) else ()


def imports(module: str) -> Iterator[str]:
    """Modules of the package that a module of it imports when it runs, also within functions."""
    return imported(package()[module][1], package())


def closure(*starts: str) -> set[str]:
    """All modules that these packages and modules can import, themselves included."""
    modules = package()
    todo = [name for name in modules if f"{name}.".startswith(tuple(f"{start}." for start in starts))]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name and name not in seen:
            seen.add(name)
            todo += [*imports(name), name.rpartition(".")[0]]
    return seen


def lines(modules: Collection[str]) -> int:
    """Lines of these modules' files."""
    return sum(len(package()[name][0].read_text(encoding="utf-8").splitlines()) for name in modules)


def upward() -> list[str]:
    """Imports of products that the importing product may not import."""
    found = []
    for module in package():
        mine = product_of(module)
        for name in imports(module):
            theirs = product_of(name)
            if theirs != mine and theirs not in NEEDS[mine]:
                found.append(f"{mine} imports {theirs}: {module} -> {name}")
    return sorted(set(found))


def sizes() -> dict[str, int]:
    """Lines of each product."""
    found: dict[str, int] = defaultdict(int)
    for module in package():
        found[product_of(module)] += lines([module])
    return dict(found)


# Tests


@functools.cache
def _sources() -> dict[str, tuple[Path, ast.Module]]:
    """Every file of the tests: its path below `tests/`, and its source as a tree."""
    return {
        path.stem: (path.relative_to(TESTS), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(TESTS.rglob("*.py"))
    }


@functools.cache
def _uses(name: str) -> tuple[frozenset[str], frozenset[str]]:
    """Helpers that a file of tests imports, and products."""
    tree = _sources()[name][1]
    return frozenset(imported(tree, _sources())), frozenset(map(product_of, imported(tree, package())))


def _imported_by(test: str) -> set[str]:
    """Products that a file of tests imports, also by the helpers that it imports."""
    todo, seen, found = [test], set[str](), set[str]()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            helpers, products = _uses(name)
            todo += helpers
            found |= products
    return found


@functools.cache
def home_of(test: str) -> str:
    """The product of a file of tests, given as its name without `.py`."""
    path = _sources()[test][0]
    # Contracts are a requirement of everybody's tests.
    used = _imported_by(test) - {"testing"}
    named = {name for name in NEEDS if any(path.match(one) for one in TABLE[name].get("tests", []))}
    return next((name for name in NEEDS if used | named <= {name, *NEEDS[name]}), list(NEEDS)[-1])


def tests_of(product: str) -> list[Path]:
    """Files of tests of a product, below `tests/`."""
    return [path for name, (path, _) in _sources().items() if name.startswith("test_") and home_of(name) == product]


def reads_checkout(test: Path) -> bool:
    """Whether a file of tests, below `tests/`, reads the package's sources in the checkout, so that wheels alone do not do."""
    return any(test.match(one) for settings in TABLE.values() for one in settings.get("checkout", []))


def concerned(products: Collection[str]) -> set[str]:
    """Names of the files of tests that a change of these products may break: their own, and those of products above them."""
    found = {name for product in products for name in above(product)}
    return {name for name in _sources() if name.startswith("test_") and home_of(name) in found}


if __name__ == "__main__":
    match sys.argv[1:]:
        case [name, "--needs"]:
            print(*sorted({name, "testing", *NEEDS[name], *TABLE[name].get("beside", [])}), sep="\n")
        case [name]:
            print(*(path for path in tests_of(name) if not reads_checkout(path)), sep="\n")
        case _:
            print(*NEEDS, sep="\n")
