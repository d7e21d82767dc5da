"""How models write tool calls and reasoning: the class of formats of calls, markers and keys.

`parser.TOOL_FORMATS` has all formats of calls. Another package adds one as an entry point of the group
`foreword.tool_formats`, an instance of `ToolFormat` under its name (docs/guides/agents.md, "Tools").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from foreword.api.request import Tool
from foreword.api.tools.grammar import Markers
from foreword.api.tools.reader import PieceCollector, Reading, TextReader, call_id

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
        special_tokens: its markers are special tokens, which must stay in the text.
    """

    whole_answer: ClassVar[bool] = False
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
