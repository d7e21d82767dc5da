"""Budgets of the package: what a user of one product imports, and names that stand twice.

They make growth and dispersion visible. Lower them after deletions; a change that needs more says why.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import pytest

import foreword

pytestmark = pytest.mark.extended
ROOT = Path(foreword.__file__).parent
PRODUCTS = {"vLLM connector": "foreword.integrations.vllm", "router": "foreword.router"}

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


def repeated(named: Iterable[tuple[str, str]]) -> set[str]:
    """Names that stand in more than one place."""
    places: dict[str, set[str]] = defaultdict(set)
    for name, place in named:
        places[name].add(place)
    return {name for name, found in places.items() if len(found) > 1}


def class_names() -> set[str]:
    """Public classes that stand in two modules."""
    return repeated(
        (node.name, module)
        for module, (_, tree) in package().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


def file_names() -> set[str]:
    """Files that stand in two packages."""
    paths = (path for path, _ in package().values())
    return repeated((path.name, str(path.parent)) for path in paths if path.name != "__init__.py")


def imports(module: str) -> Iterator[str]:
    """Modules of the package that one imports when it runs, also within functions."""
    modules = package()
    todo: list[ast.AST] = [modules[module][1]]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{module}: imports name the whole module"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield from (one for one in [whole if whole in modules else node.module] if one in modules)


def closure(product: str) -> int:
    """Lines of all that a product can import, its own modules included."""
    modules = package()
    todo = [name for name in modules if f"{name}.".startswith(f"{product}.")]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name and name not in seen:
            seen.add(name)
            todo += [*imports(name), name.rpartition(".")[0]]
    return sum(len(modules[name][0].read_text(encoding="utf-8").splitlines()) for name in seen)


@pytest.mark.parametrize(
    ("what", "count", "budget"),
    [
        ("public classes in two modules", class_names, 2),
        ("files in two packages", file_names, 10),
        ("lines that the vLLM connector imports", lambda: closure(PRODUCTS["vLLM connector"]), 33_000),
        ("lines that the router imports", lambda: closure(PRODUCTS["router"]), 24_700),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_budgets(what: str, count: Callable[[], int | Collection[str]], budget: int) -> None:
    """The package is within its budgets."""
    found = count()
    number = found if isinstance(found, int) else len(found)
    names = "" if isinstance(found, int) else f": {', '.join(sorted(found))}"
    assert number <= budget, f"{number} {what}, the budget is {budget}{names}"


def test_counters() -> None:
    """The counters see what they count: this package has lazy imports, and names that stand once."""
    assert "foreword.store.disk.disk_store" in set(imports("foreword.store.builtin"))
    assert "PrefixCache" not in class_names()
    assert "prefix_cache.py" not in file_names()
    assert repeated([("a", "x"), ("a", "y"), ("b", "x"), ("b", "x")]) == {"a"}


@pytest.mark.parametrize("name", foreword.__all__)
def test_public_names(name: str) -> None:
    """Each name that the package offers can be imported."""
    assert getattr(foreword, name).__name__ == name


def test_records_have_kinds() -> None:
    """No code writes or reads records in stores without a kind."""
    calls = {"put_record", "get_record", "delete_record", "read_records"}
    for module, (_, tree) in package().items():
        if not module.startswith(("foreword.store", "foreword.conformance", "foreword.prefixes.erasure")):
            used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            assert not used & calls, module


def test_tasks_have_an_owner() -> None:
    """No other module begins a task than `foreword.tasks`, which looks at its error, and those that wait for it themselves."""
    waiting = {"prefixes.prefix_service", "server.migration", "server.generate_api", "router.replica_audit"}
    waiting |= {"router.gateway.exchange", "store.object.bucket", "entrypoints.async_engine", "tasks"}
    begin = {
        module.removeprefix("foreword.")
        for module, (_, tree) in package().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("create_task", "ensure_future")
    }
    assert begin <= waiting, "use foreword.tasks"


def test_only_one_module_prepares_types() -> None:
    """No other module of the package gives msgspec a type to decode."""
    found = []
    for name, (path, tree) in package().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or name == "foreword.decoders":
                continue
            called = ast.unparse(node.func)
            typed = called.startswith("msgspec.") and (
                (called.endswith(".decode") and (len(node.args) > 1 or any(one.arg == "type" for one in node.keywords)))
                or (called.endswith("Decoder") and (node.args or node.keywords))
                or called == "msgspec.convert"
            )
            found += [f"{path}:{node.lineno}: {called}"] if typed else []
    assert not found, "use foreword.decoders"
