"""Loading a model without torch's compiler, distributed packages and symbolic shapes.

Transformers' model classes mark functions for the compiler, and import it for that: a second or more of a start and 100 MB,
which an engine that compiles nothing never uses. And they are built of tensors without data, for whose dtypes and shapes torch
imports sympy, half a second and 30 MB more, only to see that no number is a symbol.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
# Questions that torch asks of sizes, answered for numbers: none of them is a symbol.
_OF_NUMBERS: dict[str, dict[str, Any]] = {
    "sympy": {"Basic": type("Symbol", (), {})},
    "torch.fx.experimental.symbolic_shapes": {
        **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious"), bool),
        **dict.fromkeys(("guard_int", "guarding_hint_or_throw"), int),
        "statically_known_true": bool,
        "has_guarding_hint": lambda number: True,
        "is_nested_int": lambda number: False,
        "free_unbacked_symbols": lambda numbers: set(),
        "sym_eq": operator.eq,
        "sym_not": operator.not_,
        "sym_and": lambda *terms: all(terms),
        "sym_or": lambda *terms: any(terms),
    },
}


class _StandIn(ModuleType):
    """In the place of a module. A decorator of the compiler leaves its function as it is; what else is asked of it is the
    module's, which is imported then."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module = self.__name__
        if module in _OF_NUMBERS:
            return _OF_NUMBERS[module].get(name) or getattr(_imported(module), name)

        def stand_in(function: Any = None, *arguments: Any, **named: Any) -> Any:
            if module == _COMPILER:
                return (lambda marked: marked) if function is None else function
            given = arguments if function is None else (function, *arguments)
            return getattr(_imported(module), name)(*given, **named)

        return stand_in


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        left_out = name in _OF_NUMBERS or f"{name}.".startswith(f"{_COMPILER}.")
        return ModuleSpec(name, self, is_package=True) if left_out else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def _imported(name: str) -> ModuleType:
    """The module itself."""
    _restore()
    return importlib.import_module(name)


def _restore() -> None:
    """From now on all modules are imported as usual."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
        del sys.modules[name]
        parent, _, last = name.rpartition(".")
        if parent in sys.modules:
            vars(sys.modules[parent]).pop(last, None)


@contextlib.contextmanager
def _unlimited_caches() -> Iterator[None]:
    """Functions that are decorated inside with a bare `lru_cache` keep all results. Transformers reads the sources of its 400
    folders of models twice, a third of a second each, since the cache of what it found has 128 entries."""
    limited: Any = functools.lru_cache

    def unlimited(maxsize: Any = 128, typed: bool = False) -> Any:
        return limited(None)(maxsize) if callable(maxsize) else limited(maxsize, typed)

    functools.lru_cache = unlimited
    try:
        yield
    finally:
        functools.lru_cache = limited


@contextlib.contextmanager
def without_compiler() -> Iterator[bool]:
    """Where Transformers' model classes are imported for the first time inside, they bring neither torch's compiler nor its
    distributed packages: Transformers takes this build of torch as one without them, from now on. What a thread imports of the
    compiler in the meantime has no effect. Only for a process that does nothing but serve a model; on a GPU all is as usual.
    Yields whether the compiler is left out."""
    import torch

    known_already = _COMPILER in sys.modules or "transformers.modeling_utils" in sys.modules
    if known_already or torch.cuda.is_available():
        yield False
        return
    import torch.distributed

    with _unlimited_caches():
        import transformers.utils.import_utils as known

    available = torch.distributed.is_available
    sys.meta_path.insert(0, _Finder())
    try:
        torch.distributed.is_available = lambda: False
        known.is_torch_distributed_available()  # which it remembers
        yield True
    finally:
        torch.distributed.is_available = available
        if any(isinstance(finder, _Finder) for finder in sys.meta_path):
            _restore()
