"""Loading a model without torch's compiler and distributed packages.

Transformers' model classes mark functions for the compiler, and import it for that: a second or more of a start and 100 MB,
which an engine that compiles nothing never uses.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"


class _StandIn(ModuleType):
    """In the place of a module of the compiler. A decorator leaves its function as it is; what is called of a module below it
    is that module's, which is imported then."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        module = self.__name__

        def stand_in(function: Any = None, *arguments: Any, **named: Any) -> Any:
            if module == _COMPILER:
                return (lambda marked: marked) if function is None else function
            _restore()
            given = arguments if function is None else (function, *arguments)
            return getattr(importlib.import_module(module), name)(*given, **named)

        return stand_in


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if f"{name}.".startswith(f"{_COMPILER}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def _restore() -> None:
    """The next import of the compiler is that of torch's."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
        del sys.modules[name]
    vars(sys.modules["torch"]).pop("_dynamo", None)


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
