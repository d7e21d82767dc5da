"""A command of `foreword` that notes which keys of its configuration it reads, and where: a line `section.key FILE` for each.

What checks or copies all keys alike reads none: the checks of a section when it is made, and `dataclasses`.

python config_reads.py OUT serve ...
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from pathlib import Path
from typing import Any, TextIO, get_type_hints

from foreword.cli import main as cli
from foreword.configuration import Config

_COPIES = (dataclasses.__file__, "<string>")


def note_reads(section: str, kind: type[Any], out: TextIO) -> None:
    """Let the objects of a section note reads of their keys from now on."""
    names = {item.name for item in dataclasses.fields(kind)}
    check, making = kind.__post_init__, threading.local()
    noted: set[tuple[str, str]] = set()

    def checked(self: Any) -> None:
        making.depth = getattr(making, "depth", 0) + 1
        try:
            check(self)
        finally:
            making.depth -= 1

    def read(self: Any, name: str) -> Any:
        if name in names and not getattr(making, "depth", 0):
            file = sys._getframe(1).f_code.co_filename
            if file not in _COPIES and (name, file) not in noted:
                noted.add((name, file))
                out.write(f"{section}.{name} {file}\n")
        return object.__getattribute__(self, name)

    kind.__post_init__ = checked
    kind.__getattribute__ = read  # type: ignore[method-assign]


def main() -> None:
    with Path(sys.argv.pop(1)).open("a", buffering=1, encoding="utf-8") as out:
        for section, kind in get_type_hints(Config).items():
            note_reads(section, kind, out)
        cli.main()


if __name__ == "__main__":
    main()
