"""Why a prompt was not cached, in the words of OpenAI's and Anthropic's own diagnostics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_NO_MISS: Final = ("all_cached", "new_text")
_TOOLS: Final = ("tools_reordered", "tools_changed")
_SYSTEM: Final = ("system_prompt_changed", "prefix_changed")
_MESSAGES: Final = ("volatile_line", "json_reordered", "reasoning_changed", "compacted", "message_edited")
_SETTINGS: Final = ("template_changed", "salt_changed")


def for_messages(report: Any) -> dict[str, Any] | None:
    """Anthropic's `diagnostics`; None if everything was cached that could be."""
    cause, lost = _cause(report)
    if cause in _NO_MISS:
        return None
    if cause == "new_conversation":
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    kind = _message_kind(cause, report)
    tokens = {} if kind == "unavailable" else {"cache_missed_input_tokens": lost}
    return {"cache_miss_reason": {"type": kind, **tokens}}


def _message_kind(cause: str, report: Any) -> str:
    if cause in _TOOLS:
        return "tools_changed"
    if cause in _SYSTEM or (cause in _MESSAGES and str(report.get("where", "")).startswith("system")):
        return "system_changed"
    if cause in _MESSAGES:
        return "messages_changed"
    return "model_changed" if cause == "model_changed" else "unavailable"


def for_responses(report: Any) -> dict[str, Any]:
    """OpenAI's `prompt_cache_diagnostics`."""
    cause, lost = _cause(report)
    if cause in _NO_MISS:
        return {"type": "cache_hit"}
    if cause == "new_conversation":
        return {"type": "comparison_response_not_found"}
    reason = _response_reason(cause)
    return {"type": "cache_miss", "reason": reason, "cache_missed_tokens": lost} if reason else {"type": "unavailable"}


def _response_reason(cause: str) -> str | None:
    if cause in _TOOLS:
        return "tools_changed"
    if cause == "compacted":
        return "context_compacted"
    if cause == "model_changed":
        return "model_changed"
    return "input_changed" if cause in (*_SYSTEM, *_MESSAGES, *_SETTINGS) else None


def _cause(report: Any) -> tuple[str, int]:
    """The cause and the tokens it cost, of a cache report as JSON."""
    if not isinstance(report, Mapping):
        return "", 0
    lost = report.get("tokens_lost")
    return str(report.get("cause", "")), lost if isinstance(lost, int) else 0
