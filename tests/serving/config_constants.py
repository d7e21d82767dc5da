"""Constants of the configuration with other values, for tests that would wait for minutes or that a slow machine would end.

A constant is a parameter of its section's constructor, and its default is there alone. Among the arguments of a command a test
writes it `router.health_timeout=5`.

python config_constants.py SECTION.NAME=VALUE ... PROGRAM ARGUMENT ...
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, get_type_hints

_WORD = re.compile(r"([a-z]+)\.([a-z_]+)=(.+)")


@contextmanager
def constants(kind: type[Any], **values: Any) -> Iterator[None]:
    """Let sections of a class that are made in this block have these constants."""
    defaults = kind.__init__.__kwdefaults__  # type: ignore[misc]
    before = {name: defaults[name] for name in values}
    defaults.update(values)
    try:
        yield
    finally:
        defaults.update(before)


def taken(kind: type[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Take the constants of a section out of options."""
    return {name: options.pop(name) for name in kind.__init__.__kwdefaults__ if name in options}  # type: ignore[misc]


@contextmanager
def named_constants(given: Sequence[str]) -> Iterator[None]:
    """Let sections have constants that are written as among arguments."""
    from foreword.configuration import Config

    kinds = get_type_hints(Config)
    with ExitStack() as stack:
        for section, name, value in (match.groups() for match in map(_WORD.fullmatch, given) if match):
            kind = kinds[section]
            made = type(kind.__init__.__kwdefaults__[name])
            stack.enter_context(constants(kind, **{name: made(value)}))
        yield


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The constants among the arguments of a command, and its own arguments."""
    given = [one for one in arguments if _WORD.fullmatch(one)]
    return given, [one for one in arguments if one not in given]


def main() -> None:
    number = next(at for at, one in enumerate(sys.argv) if at and not _WORD.fullmatch(one))
    given, sys.argv[:] = sys.argv[1:number], sys.argv[number:]
    with named_constants(given):
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
