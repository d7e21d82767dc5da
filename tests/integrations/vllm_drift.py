"""Changes by a release of vLLM in all that Foreword uses of it, from the sources alone: `make drift OLD=... NEW=...`.

    python tests/integrations/vllm_drift.py OLD NEW

OLD and NEW are wheels (`pip download --no-deps vllm==0.33.0`) or environments. Nothing of vLLM is imported or installed. What
Foreword uses follows from its sources: names that it imports, members of these that it calls or wraps, hooks of vLLM's base
classes, and the attributes that it reads of the objects which vLLM hands to it (`HANDED`).

Of vLLM's base classes, KV cache specs and events every member is listed, marked where Foreword does not use it. Exit status 1
if something that Foreword uses is gone or has other parameters.
"""

from __future__ import annotations

import ast
import copy
import re
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

FOREWORD = Path(__file__).resolve().parents[2] / "foreword"
# Objects that vLLM hands to the connector, whose classes Foreword does not import.
HANDED = {
    "vllm.config.vllm": ("VllmConfig",),
    "vllm.config.model": ("ModelConfig",),
    "vllm.config.cache": ("CacheConfig",),
    "vllm.config.parallel": ("ParallelConfig",),
    "vllm.config.scheduler": ("SchedulerConfig",),
    "vllm.config.lora": ("LoRAConfig",),
    "vllm.config.load": ("LoadConfig",),
    "vllm.config.attention": ("AttentionConfig",),
    "vllm.config.multimodal": ("MultiModalConfig",),
    "vllm.config.kv_transfer": ("KVTransferConfig",),
    "vllm.config.kv_events": ("KVEventsConfig",),
    "vllm.config.ec_transfer": ("ECTransferConfig",),
    "vllm.lora.request": ("LoRARequest",),
    "vllm.multimodal.inputs": ("MultiModalFeatureSpec", "PlaceholderRange"),
    "vllm.v1.request": ("Request",),
    "vllm.v1.outputs": ("KVConnectorOutput",),
    "vllm.v1.core.block_pool": ("BlockPool",),
    "vllm.v1.core.kv_cache_manager": ("KVCacheBlocks",),
    "vllm.v1.core.sched.output": ("SchedulerOutput", "NewRequestData", "CachedRequestData"),
    "vllm.v1.kv_cache_interface": ("KVCacheConfig", "KVCacheGroupSpec", "KVCacheTensor", "UniformTypeKVCacheSpecs"),
    "vllm.v1.kv_offload.config": ("OffloadingConfig", "OffloadingGroupConfig", "OffloadingParallelConfig"),
    "vllm.engine.protocol": ("EngineClient",),
    "vllm.platforms.interface": ("Platform",),
}
# All fields and members of these count: a new one may ask for a decision.
WATCHED = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base": ("KVConnectorBase_V1", "SupportsHMA"),
    "vllm.distributed.ec_transfer.ec_connector.base": ("ECConnectorBase",),
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": ("KVConnectorStats", "KVConnectorPromMetrics"),
    "vllm.distributed.kv_events": ("BlockStored", "BlockRemoved", "AllBlocksCleared"),
    "vllm.v1.metrics.cache_hit_source": ("CacheHitSource",),
    "vllm.v1.request": ("RequestStatus",),
}
# All classes of this module, and their fields: what a KV cache group may be.
SPECS = "vllm.v1.kv_cache_interface"

Use = tuple[str, str, str]  # module, name, member; a member of "" is the name itself


class Package:
    """The sources of one vLLM. `where`: a wheel, an environment, its site-packages, or the package's own folder."""

    def __init__(self, where: Path) -> None:
        self._where = where
        self._archive = zipfile.ZipFile(where) if where.is_file() else None
        self._modules: dict[str, Module | None] = {}
        self._members: dict[int, dict[str, ast.stmt]] = {}
        if self._archive is None:
            places = [where, where / "vllm", *where.glob("lib/python3*/site-packages/vllm")]
            found = next((one for one in places if (one / "v1").is_dir() and (one / "__init__.py").exists()), None)
            if found is None:
                raise SystemExit(f"{where} has no vLLM")
            self._where = found

    @property
    def version(self) -> str:
        found = re.search(r"__version__ = version = '([^']+)'", self._source("vllm/_version.py") or "")
        return found[1] if found else self._where.name

    def _source(self, path: str) -> str | None:
        try:
            if self._archive is not None:
                return self._archive.read(path).decode()
            return (self._where.parent / path).read_text(encoding="utf-8")
        except (KeyError, FileNotFoundError, NotADirectoryError):
            return None

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            path = name.replace(".", "/")
            source = self._source(f"{path}.py")
            package = source is None
            source = self._source(f"{path}/__init__.py") if package else source
            self._modules[name] = None if source is None else Module(name, ast.parse(source), package)
        return self._modules[name]

    def find(self, module: str, name: str) -> Found | None:
        """Finds the definition of a module's name, wherever it stands."""
        for _ in range(8):
            there = self.module(module)
            if there is None:
                return None
            node = there.names.get(name)
            if isinstance(node, ast.ImportFrom):
                target = there.absolute(node)
                original = next(one.name for one in node.names if (one.asname or one.name) == name)
                if self.module(f"{target}.{original}") is not None and original not in self._names(target):
                    return Found(f"{target}.{original}", None)
                module, name = target, original
                continue
            if node is None:
                inner = f"{module}.{name}"
                return Found(inner, None) if self.module(inner) is not None else None
            return Found(module, node)
        return None

    def _names(self, module: str) -> dict[str, ast.stmt]:
        found = self.module(module)
        return {} if found is None else found.names

    def members(self, found: Found) -> dict[str, ast.stmt]:
        """Members of a class, its base classes' included, or of a module."""
        if found.node is None:
            return self._names(found.module)
        if not isinstance(found.node, ast.ClassDef):
            return {}
        if id(found.node) not in self._members:
            self._members[id(found.node)] = self._members_of(found, found.node)
        return self._members[id(found.node)]

    def _members_of(self, found: Found, node: ast.ClassDef) -> dict[str, ast.stmt]:
        members: dict[str, ast.stmt] = {}
        for base in node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            inner = self.find(found.module, name.id) if isinstance(name, ast.Name) else None
            if inner is not None and inner.node is not node:
                members |= self.members(inner)
        return members | own_members(node)


@dataclass(frozen=True)
class Found:
    """The definition of a name; `node` is None for a module."""

    module: str
    node: ast.stmt | None


@dataclass
class Module:
    """A module's sources, and what its names are."""

    name: str
    tree: ast.Module
    package: bool

    @cached_property
    def names(self) -> dict[str, ast.stmt]:
        found: dict[str, ast.stmt] = {}
        for node in _statements(self.tree.body):
            for name in _named(node):
                found[name] = node
        return found

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module that an import names."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + self.package]
        return ".".join([*parts, *([node.module] if node.module else [])])


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, also those that depend on something."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def _named(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (one.asname or one.name for one in node.names)


def own_members(node: ast.ClassDef) -> dict[str, ast.stmt]:
    """Methods, fields, and what methods assign to `self`."""
    found: dict[str, ast.stmt] = {}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assign | ast.AnnAssign):
            for target in inner.targets if isinstance(inner, ast.Assign) else [inner.target]:
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                ):
                    found[target.attr] = inner
    for statement in _statements(node.body):
        for name in _named(statement):
            found[name] = statement
    return found


# Names of vLLM that Foreword uses


@dataclass
class Uses:
    """Parts of vLLM that Foreword uses, and the files that use them.

    Attributes:
        names: imported names and their members, methods that are wrapped included.
        hooks: by base class, the methods that Foreword's classes override.
        attributes: names of attributes that the connector reads of anything.
    """

    names: dict[Use, set[str]] = field(default_factory=dict)
    hooks: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)

    def add(self, module: str, name: str, member: str, file: str) -> None:
        self.names.setdefault((module, name, member), set()).add(file)


def uses(package: Path = FOREWORD) -> Uses:
    """Read Foreword's sources."""
    found = Uses()
    for path in sorted(package.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        connector = bool({"vllm", "vllm_extras", "vllm_offload"} & {*path.relative_to(package).parts})
        if "vllm" not in source and not connector:
            continue
        tree = ast.parse(source)
        bound: dict[str, tuple[str, str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm" and not node.level:
                for one in node.names:
                    bound[one.asname or one.name] = (str(node.module), one.name)
                    found.add(str(node.module), one.name, "", path.name)
        for node in ast.walk(tree):
            read = _read(node) if connector or bound else None
            if read is not None:
                owner, name = read
                if connector and not name.startswith("__"):
                    found.attributes.add(name)
                if isinstance(owner, ast.Name) and owner.id in bound:
                    found.add(*bound[owner.id], name, path.name)
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    if isinstance(base, ast.Name) and base.id in bound:
                        found.hooks.setdefault(bound[base.id], set()).update(own_members(node))
            wraps = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id
            if (
                isinstance(node, ast.Call)
                and wraps in ("follow_engine", "follow_engines")
                and path.name != "weights.py"
            ):
                method = node.args[1]
                assert isinstance(method, ast.Constant), f"{path.name}: {wraps} needs a literal"
                found.add("vllm.v1.engine.core", "EngineCore", str(method.value), path.name)
    return found


def _read(node: ast.AST) -> tuple[ast.expr, str] | None:
    """`owner.name`, or `getattr(owner, "name", ...)`."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or len(node.args) < 2:
        return None
    name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
    return (node.args[0], name) if node.func.id in ("getattr", "hasattr") and isinstance(name, str) else None


# Comparing


def _parameters(node: ast.stmt) -> str | None:
    """Names, kinds and defaults of parameters, without types; None if it is no function."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    bare = ast.parse(f"def f({ast.unparse(node.args)}): ...").body[0]
    assert isinstance(bare, ast.FunctionDef)
    for inner in ast.walk(bare.args):
        if isinstance(inner, ast.arg):
            inner.annotation = None
    return f"({ast.unparse(bare.args)})"


def _code(node: ast.stmt) -> str:
    """The code of a definition, without its description and types."""
    node = copy.deepcopy(node)
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and ast.get_docstring(inner) is not None
        ):
            inner.body = inner.body[1:] or [ast.Pass()]
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            inner.returns = None
        if isinstance(inner, ast.arg):
            inner.annotation = None
    return ast.unparse(node)


@dataclass(frozen=True)
class Change:
    """A line of the report: what happened ("gone", "parameters", "new", "inside") to what, who uses it ("" for no user), and
    details."""

    kind: str
    what: str
    user: str
    detail: str = ""

    @property
    def matters(self) -> bool:
        return self.kind in ("gone", "parameters") and bool(self.user)

    def __str__(self) -> str:
        parts = (f"{self.kind:<10}", self.what, self.detail, f"({self.user or 'not used'})")
        return " ".join(filter(None, parts))


class Drift:
    """Compares two vLLMs."""

    def __init__(self, old: Package, new: Package, used: Uses) -> None:
        self._old, self._new, self._used = old, new, used
        self._changes: dict[str, Change] = {}
        self.compared = 0

    def run(self) -> list[Change]:
        """All changes, the gravest first."""
        for (module, name, member), files in self._used.names.items():
            self._compare(module, name, member, ", ".join(sorted(files)))
        for module, names in HANDED.items():
            for name in names:
                known = self._old.find(module, name)
                for member in {"", *(self._used.attributes & set(self._old.members(known) if known else ()))}:
                    self._compare(module, name, member, "read")
        for module, names in WATCHED.items():
            for name in names:
                self._watch(module, name)
        old, new = self._old.module(SPECS), self._new.module(SPECS)
        for name in {**(old.names if old else {}), **(new.names if new else {})}:
            if any(one and isinstance(one.names.get(name), ast.ClassDef) for one in (old, new)):
                self._watch(SPECS, name)
        order = ("gone", "parameters", "new", "inside")
        return sorted(
            self._changes.values(), key=lambda one: (not one.matters, order.index(one.kind), not one.user, one.what)
        )

    def _note(self, kind: str, what: str, user: str, detail: str = "") -> None:
        self._changes.setdefault(what, Change(kind, what, user, detail))

    def _compare(self, module: str, name: str, member: str, user: str) -> None:
        """A name, or a member of one, that Foreword uses."""
        what = ".".join(filter(None, (module, name, member)))
        before, after = self._node(self._old, module, name, member), self._node(self._new, module, name, member)
        self.compared += 1
        if before is None:
            return  # Foreword uses it with other versions
        if after is None:
            self._note("gone", what, user)
        elif isinstance(before, ast.stmt) and isinstance(after, ast.stmt) and not isinstance(before, ast.ClassDef):
            self._compare_nodes(what, before, after, user)

    def _compare_nodes(self, what: str, before: ast.stmt, after: ast.stmt, user: str) -> None:
        old, new = _parameters(before), _parameters(after)
        if old != new:
            self._note("parameters", what, user, f"{old or 'no function'} -> {new or 'no function'}")
        elif _code(before) != _code(after):
            self._note("inside", what, user)

    def _node(self, package: Package, module: str, name: str, member: str) -> ast.stmt | bool | None:
        """A definition; True for a module; None if there is none."""
        found = package.find(module, name)
        if found is None or not member:
            return None if found is None else found.node or True
        return package.members(found).get(member)

    def _watch(self, module: str, name: str) -> None:
        """A class of which every member of its own counts."""
        before, after = self._old.find(module, name), self._new.find(module, name)
        imported = (module, name, "") in self._used.names
        if before is None or after is None:
            if before is not after:
                self._note("new" if before is None else "gone", f"{module}.{name}", "imported" if imported else "")
            return
        old, new = (own_members(one.node) if isinstance(one.node, ast.ClassDef) else {} for one in (before, after))
        self.compared += len(old)
        own = [*old, *new]  # what a class inherits is listed with its base class
        hooks = self._used.hooks.get((module, name), set())
        old, new = {**self._old.members(before), **old}, {**self._new.members(after), **new}
        for member in dict.fromkeys(own):
            what = f"{module}.{name}.{member}"
            user = "overridden" if member in hooks else "read" if member in self._used.attributes else ""
            if member not in old:
                self._note("new", what, user, _parameters(new[member]) or "")
            elif member not in new:
                self._note("gone", what, user)
            else:
                self._compare_nodes(what, old[member], new[member], user)


def main(old: str, new: str) -> int:
    started = time.monotonic()
    before, after = Package(Path(old)), Package(Path(new))
    drift = Drift(before, after, uses())
    found = drift.run()
    print(*found, sep="\n")
    print(
        f"\nvLLM {before.version} -> {after.version}: {drift.compared} definitions compared in "
        f"{time.monotonic() - started:.1f} s, {len(found)} differ; {sum(one.matters for one in found)} that Foreword uses are "
        "gone or have other parameters"
    )
    return int(any(one.matters for one in found))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
