"""The products of the repository: which modules each has, and which products it may import. Floors go up: a product imports
those below it only."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

import foreword

ROOT = Path(foreword.__file__).parent

# What each product may import. All stand on the cache.
NEEDS = {
    "cache": (),
    "stores": ("cache",),
    "testing": ("cache",),
    "wire": ("cache",),
    "engines": ("cache",),
    "http": ("cache",),
    "vllm": ("cache", "wire", "http"),
    "route": ("cache", "wire", "http"),
    "serve": ("cache", "wire", "engines", "http", "route"),
    "lab": ("cache", "stores", "testing", "wire", "engines", "http", "vllm", "route", "serve"),
}
# Packages and modules of each product, without "foreword."; the longest name that fits counts. What none names is the cache's.
_MODULES = {
    "stores": ("store.redis", "store.object", "store.codecs"),
    "testing": ("conformance",),
    "wire": ("transfer",),
    "engines": (
        *("integrations.sglang", "integrations.llama_cpp", "integrations.transformers"),
        "integrations.model_identity",
    ),
    "http": ("tokens", "api", "dashboard", "observability", "process_config", "cli.flags"),
    "vllm": ("integrations.vllm", "integrations.vllm_middleware"),
    "route": ("router", "routing", "cli.route"),
    "serve": ("engine", "entrypoints", "server", "disaggregation", "cli.serve", "cli.prefix", "cli.doctor"),
    "lab": (
        *("sim", "referee", "cli.simulate", "cli.traffic", "cli.conform", "cli.chain", "cli.explain", "cli.probe"),
        *("cli.bill", "cli.demo", "cli.audit"),
    ),
}
_HOMES = {f"foreword.{name}": product for product, names in _MODULES.items() for name in names}

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
    """Which of these modules a source imports when it runs, also within functions."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield from (one for one in [whole if whole in modules else node.module] if one in modules)


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
