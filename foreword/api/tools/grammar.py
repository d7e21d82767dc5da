"""Parts of the grammars that force a model to call tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from foreword.api.request import Tool

# The id of a token in the model's vocabulary, None if the text is no token.
TokenId = Callable[[str], int | None]

# One space, or a new line with its indent: a model could fill its budget with more.
_WHITESPACE: Final = r"( |\n[ \t]{0,32})?"
# Calls of one answer.
_MOST_CALLS: Final = 16


class Markers:
    """Markers as grammars name them: by the text, or by the special token that has this text."""

    def __init__(self, token_id: TokenId) -> None:
        self._token_id = token_id

    def __call__(self, marker: str) -> str:
        token = self._token_id(marker)
        text = json.dumps(marker)
        return text if token is None else f"({text} | <[{token}]>)"


def json_rule(schema: Any, *, strict: bool) -> str:
    """A schema inside of a grammar. Options of the compiler are the engine's, not the client's."""
    own = {name: value for name, value in schema.items() if name != "x-guidance"} if isinstance(schema, Mapping) else {}
    options = {"whitespace_pattern": _WHITESPACE, "lenient": not strict}
    return "%json " + json.dumps({"x-guidance": options, **(own or {"type": "object"})})


def call_objects(tools: Sequence[Tool], key: str) -> str:
    """The rule `call`: one of the tools as a JSON object, its arguments under `key`."""
    names = " | ".join(f"call_{number}" for number in range(len(tools)))
    lines = [f"call: {names}"]
    for number, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
        lines.append(f'call_{number}: {head} arguments_{number} "}}"')
        lines.append(f"arguments_{number}: {json_rule(tool.parameters, strict=tool.strict)}")
    return "\n".join(lines)


def more_calls(separator: str, call: str, parallel: bool) -> str:
    """What follows the first call where there may be several."""
    return f" ({separator} {call}){{0,{_MOST_CALLS - 1}}}" if parallel else ""
