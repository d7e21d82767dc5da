"""`foreword` in which a request with the header `x-fail` ends by an error that no code expects, with a text that divides lines.

python failing_command.py serve ...
"""

from __future__ import annotations

from typing import Any, Final

from foreword.api.front import Front
from foreword.cli import main as cli

# Quotes, each character at which some reader ends a line, half of a character, and a million more.
HOSTILE: Final = (
    'a "quoted" \\ error\n\r\x0b\x0c\x1c\x85\u2028\u2029\udc80{"level": "INFO"}\né' + "x" * 1_000_000 + " end"
)


def main() -> None:
    admit = Front.admit

    def failing(front: Front, call: Any, route: Any) -> None:
        if "x-fail" in call.headers:
            raise RuntimeError(HOSTILE)
        admit(front, call, route)

    Front.admit = failing  # type: ignore[method-assign,assignment]
    cli.main()


if __name__ == "__main__":
    main()
