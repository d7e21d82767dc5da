"""Which formats a model writes: by name, or from its chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from foreword.api.tools.coder_calls import Qwen3Coder
from foreword.api.tools.formats import REASONING_TAGS, ReasoningFormat, ToolFormat
from foreword.api.tools.harmony import Harmony
from foreword.api.tools.json_calls import Hermes, Llama3Json, Mistral
from foreword.errors import ConfigError
from foreword.plugins import Plugins

_BUILTIN: Final[dict[str, ToolFormat]] = {
    "harmony": Harmony(),
    "qwen3_coder": Qwen3Coder(),
    "hermes": Hermes(),
    "mistral": Mistral(),
    "llama3_json": Llama3Json(),
}
TOOL_FORMATS: Final = Plugins("foreword.tool_formats", "tool parser", ToolFormat, _BUILTIN)


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """How a model writes tool calls (a name in `TOOL_FORMATS`) and reasoning; None where it has neither."""

    tools: str | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def tool_format(self) -> ToolFormat | None:
        return None if self.tools is None else TOOL_FORMATS[self.tools]

    @property
    def special_tokens(self) -> bool:
        """Whether markers are special tokens, which must stay in the text."""
        form = self.tool_format
        return (form is not None and form.special_tokens) or (
            self.reasoning is not None and REASONING_TAGS[self.reasoning].special_tokens
        )


def formats_named(tools: str | None, reasoning: str | None) -> AnswerFormats:
    """The formats of these names. Raises ConfigError."""
    if reasoning is not None and reasoning not in REASONING_TAGS:
        raise ConfigError(f"unknown reasoning parser {reasoning!r}; known: {', '.join(REASONING_TAGS)}")
    if tools is not None:
        TOOL_FORMATS[tools]
    return AnswerFormats(tools, reasoning)


def detect(chat_template: str, model_type: str = "") -> AnswerFormats:
    """The formats that a chat template writes for earlier turns, which are the ones that the model writes."""
    found = (name for name in TOOL_FORMATS if TOOL_FORMATS[name].detects(chat_template, model_type))
    return AnswerFormats(next(found, None), _reasoning(chat_template))


def _reasoning(template: str) -> ReasoningFormat | None:
    return next((name for name, tags in REASONING_TAGS.items() if tags.close in template), None)


def opens_reasoning(prompt: str, reasoning: ReasoningFormat | None) -> bool:
    """Whether the rendered prompt ends inside the reasoning, so that the answer starts with it."""
    return reasoning is not None and prompt.rstrip().endswith(REASONING_TAGS[reasoning].open)
