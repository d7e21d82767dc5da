"""How models write tool calls and reasoning: the class of formats of calls, markers and keys, and parts of the grammars that
force a model to call tools.

`parser.TOOL_FORMATS` has all formats of calls. Another package adds one as an entry point of the group
`foreword.tool_formats`, an instance of `ToolFormat` under its name (docs/guides/agents.md, "Tools").
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from foreword.api.request import Tool
from foreword.api.tools.reader import PieceCollector, Reading, TextReader, call_id
from foreword.tokens.reasoning_stops import ReasoningSpan

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
    """The grammar behind the first call where there may be several."""
    return f" ({separator} {call}){{0,{_MOST_CALLS - 1}}}" if parallel else ""


ReasoningFormat = Literal["think", "mistral_think"]

HERMES_OPEN = "<tool_call>"
HERMES_CLOSE = "</tool_call>"
HERMES_ARGUMENTS = "arguments"

LLAMA_TAG = "<|python_tag|>"
LLAMA_SEPARATOR = ";"
LLAMA_ARGUMENTS = "parameters"

MISTRAL_CALLS = "[TOOL_CALLS]"
MISTRAL_CALL_ID = "[CALL_ID]"
MISTRAL_ARGUMENTS = "[ARGS]"

HARMONY_START = "<|start|>"
HARMONY_CHANNEL = "<|channel|>"
HARMONY_CONSTRAIN = "<|constrain|>"
HARMONY_MESSAGE = "<|message|>"
HARMONY_END = "<|end|>"
HARMONY_CALL = "<|call|>"
HARMONY_RETURN = "<|return|>"
HARMONY_FUNCTIONS = "functions."

CODER_FUNCTION = "<function="
CODER_FUNCTION_CLOSE = "</function>"
CODER_PARAMETER = "<parameter="
CODER_PARAMETER_CLOSE = "</parameter>"


class ToolFormat:
    """How models of a family write tool calls. Subclasses implement `read`, and override what differs. Stateless.

    Attributes:
        whole_answer: it covers reasoning and text too, so it is also read where a request has no tools.
        reasoning: the part of the answer in which stop strings do not count, where it covers the whole answer.
        special_tokens: its markers are special tokens, which must stay in the text.
    """

    whole_answer: ClassVar[bool] = False
    reasoning: ClassVar[ReasoningSpan | None] = None
    special_tokens: ClassVar[bool] = False

    def detects(self, template: str, model_type: str) -> bool:
        """Whether a chat template, or a model of this type, writes calls so. Formats are asked in the order of their
        registration, those of packages last."""
        return False

    def read(self, reader: TextReader, pieces: PieceCollector, tools: Sequence[Tool]) -> Reading[None]:
        """Read the answer up to its end: calls and what stands between them. What is no call is given to `pieces` as text."""
        raise NotImplementedError

    def grammar(self, tools: Sequence[Tool], marker: Markers, parallel: bool) -> str | None:
        """Rules of an llguidance grammar: `calls` is one call of one of the tools, or with `parallel` several. None: calls
        cannot be forced. Raises BadRequest for a tool that the format cannot write."""
        return None

    def new_id(self) -> str:
        """A new id for a call."""
        return call_id()


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags around reasoning at the start of an answer."""

    open: str
    close: str
    special_tokens: bool = False


REASONING_TAGS: dict[ReasoningFormat, ReasoningTags] = {
    "think": ReasoningTags("<think>", "</think>"),
    "mistral_think": ReasoningTags("[THINK]", "[/THINK]", special_tokens=True),
}
