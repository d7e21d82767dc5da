"""Constructors of dataclasses, written out: mypyc compiles them, and not those that `dataclass` makes when a program starts."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

_ANY = "_Any"


def with_constructors(modules: Mapping[str, bytes]) -> dict[str, bytes]:
    """The sources of modules in which each dataclass without an `__init__` has the one that `dataclass` would make.

    The classes stay dataclasses, except that frozen ones are not protected from changes. The fields of a base class are known
    if it is in one of the modules.
    """
    trees = {path: ast.parse(source) for path, source in modules.items()}
    known = {node.name: node for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)}
    for tree in trees.values():
        for node in tree.body:
            options = _options(node) if isinstance(node, ast.ClassDef) else None
            if isinstance(node, ast.ClassDef) and options is not None and not _method(node, "__init__"):
                _thaw(options)
                node.body.append(_constructor(node, options, known))
        # After the import of annotations, which comes first and which a module with dataclasses has.
        place = next((i + 1 for i, node in enumerate(tree.body) if isinstance(node, ast.ImportFrom)), len(tree.body))
        tree.body.insert(place, ast.parse(f"from typing import Any as {_ANY}").body[0])
    return {path: ast.unparse(ast.fix_missing_locations(tree)).encode() for path, tree in trees.items()}


def _options(node: ast.ClassDef) -> list[ast.keyword] | None:
    """The arguments of a class's `@dataclass(...)`; None if it has no such decorator."""
    for one in node.decorator_list:
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id == "dataclass":
            return one.keywords
    return None


def _is_set(options: Iterable[ast.keyword], name: str, default: bool = False) -> bool:
    return next((ast.literal_eval(one.value) for one in options if one.arg == name), default)


def _method(node: ast.ClassDef, name: str) -> bool:
    return any(isinstance(one, ast.FunctionDef) and one.name == name for one in node.body)


def _thaw(options: list[ast.keyword]) -> None:
    """Without `frozen`, but with the hash of a frozen class: a type checker lets no constructor set a frozen field."""
    if _is_set(options, "frozen"):
        options[:] = [one for one in options if one.arg != "frozen"]
        if _is_set(options, "eq", True):
            options.append(ast.keyword("unsafe_hash", ast.Constant(True)))


def _constructor(node: ast.ClassDef, options: list[ast.keyword], known: Mapping[str, ast.ClassDef]) -> ast.stmt:
    inherited: dict[str, ast.AnnAssign] = {}
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in known and _options(known[base.id]) is not None:
            inherited |= {name: _from_afar(field, base.id) for name, field in _fields(known[base.id]).items()}
    own = _fields(node)
    parameters = ["self", *(["*"] if _is_set(options, "kw_only") else [])]
    lines = []
    for name, field in (inherited | own).items():
        kind = ast.unparse(field.annotation)
        factory, value = _keyword(field.value, "default_factory"), name
        if factory is not None:
            parameters.append(f"{name}: {kind} | None = None")
            value = f"{ast.unparse(factory)}() if {name} is None else {name}"
        else:
            parameters.append(f"{name}: {kind}" + (f" = {ast.unparse(field.value)}" if field.value else ""))
        lines.append(f"    self.{name} = {value}")
    if _method(node, "__post_init__"):
        lines.append("    self.__post_init__()")
    return ast.parse(f"def __init__({', '.join(parameters)}) -> None:\n" + "\n".join(lines)).body[0]


def _fields(node: ast.ClassDef) -> dict[str, ast.AnnAssign]:
    """The fields that the constructor sets from arguments, in order."""
    annotated = [one for one in node.body if isinstance(one, ast.AnnAssign) and _keyword(one.value, "init") is None]
    return {ast.unparse(one.target): one for one in annotated if "ClassVar" not in ast.unparse(one.annotation)}


def _from_afar(field: ast.AnnAssign, owner: str) -> ast.AnnAssign:
    """A field as another module can write it, which may not have the names that it is made of."""
    default = f" = {owner}.__dataclass_fields__[{ast.unparse(field.target)!r}].default" if field.value else ""
    found = ast.parse(f"{ast.unparse(field.target)}: {_ANY}{default}").body[0]
    assert isinstance(found, ast.AnnAssign)
    return found


def _keyword(value: ast.expr | None, name: str) -> ast.expr | None:
    """An argument of `field(...)`."""
    keywords = value.keywords if isinstance(value, ast.Call) and ast.unparse(value.func) == "field" else []
    return next((one.value for one in keywords if one.arg == name), None)
