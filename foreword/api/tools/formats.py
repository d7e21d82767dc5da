"""How models write tool calls and reasoning: markers and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ToolFormat = Literal["hermes", "llama3_json", "mistral", "harmony", "qwen3_coder"]
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


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags around reasoning at the start of an answer."""

    open: str
    close: str


REASONING_TAGS: dict[ReasoningFormat, ReasoningTags] = {
    "think": ReasoningTags("<think>", "</think>"),
    "mistral_think": ReasoningTags("[THINK]", "[/THINK]"),
}
