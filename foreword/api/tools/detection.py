"""Which formats a model writes: by name, or from its chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast, get_args

from foreword.api.tools.formats import (
    CODER_FUNCTION,
    HARMONY_CHANNEL,
    HERMES_OPEN,
    LLAMA_TAG,
    MISTRAL_CALLS,
    REASONING_TAGS,
    ReasoningFormat,
    ToolFormat,
)
from foreword.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """How a model writes tool calls and reasoning; None where it has neither. Harmony includes its reasoning."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None


def formats_named(tools: str | None, reasoning: str | None) -> AnswerFormats:
    """The formats of these names."""
    return AnswerFormats(
        cast("ToolFormat | None", _known(tools, get_args(ToolFormat), "tool parser")),
        cast("ReasoningFormat | None", _known(reasoning, get_args(ReasoningFormat), "reasoning parser")),
    )


def _known(name: str | None, names: tuple[str, ...], what: str) -> str | None:
    if name is not None and name not in names:
        raise ConfigError(f"unknown {what} {name!r}; known: {', '.join(names)}")
    return name


def detect(chat_template: str, model_type: str = "") -> AnswerFormats:
    """The formats that a chat template writes for earlier turns, which are the ones that the model writes."""
    return AnswerFormats(_tools(chat_template, model_type), _reasoning(chat_template))


def _tools(template: str, model_type: str) -> ToolFormat | None:
    if HARMONY_CHANNEL in template or model_type == "gpt_oss":
        return "harmony"
    if CODER_FUNCTION in template:
        return "qwen3_coder"
    if HERMES_OPEN in template and "<arg_key>" not in template:
        return "hermes"
    if MISTRAL_CALLS in template or (not template and model_type.startswith(("mistral", "ministral"))):
        return "mistral"
    return "llama3_json" if LLAMA_TAG in template or _asks_for_parameters(template) else None


def _asks_for_parameters(template: str) -> bool:
    return '"parameters":' in template and "<|start_header_id|>" in template


def _reasoning(template: str) -> ReasoningFormat | None:
    return next((name for name, tags in REASONING_TAGS.items() if tags.close in template), None)


def opens_reasoning(prompt: str, reasoning: ReasoningFormat | None) -> bool:
    """Whether the rendered prompt ends inside the reasoning, so that the answer starts with it."""
    return reasoning is not None and prompt.rstrip().endswith(REASONING_TAGS[reasoning].open)
