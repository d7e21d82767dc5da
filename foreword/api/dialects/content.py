"""Contents of messages, and cache control inside of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from foreword.api.dialects.decode import refuse
from foreword.api.request import CacheBreakpoint, Message, Tool

_TTLS: Final = {None: 300.0, "5m": 300.0, "1h": 3600.0}
_OPENAI_TTLS: Final = {"30m": 1800.0, "12h": 43_200.0}
DEFAULT_TTL: Final = "30m"
_MOST_BREAKPOINTS: Final = 4
# The Responses API tells input from output.
_TEXT_TYPES: Final = ("text", "input_text", "output_text")


class CacheMark(Struct):
    """Anthropic's `cache_control`, which others use in chat completions."""

    type: str
    ttl: str | None = None


class ExplicitBreakpoint(Struct):
    """OpenAI's `prompt_cache_breakpoint`."""

    mode: str | None = None
    ttl: str | None = None


class CacheOptions(Struct):
    """OpenAI's `prompt_cache_options`. With `comparison_response_id` the response says why its prompt was not cached."""

    mode: str | None = None
    ttl: str | None = None
    comparison_response_id: str | None = None


class Part(Struct, gc=False):
    type: str
    text: str | None = None
    refusal: str | None = None
    cache_control: CacheMark | None = None
    prompt_cache_breakpoint: ExplicitBreakpoint | None = None


def breakpoint_of(mark: CacheMark | None, path: str) -> CacheBreakpoint | None:
    """Raises BadRequest."""
    if mark is None:
        return None
    if mark.type != "ephemeral":
        raise refuse(f"{path}.cache_control.type", 'must be "ephemeral"')
    if mark.ttl not in _TTLS:
        raise refuse(f"{path}.cache_control.ttl", 'must be "5m" or "1h"')
    return CacheBreakpoint(_TTLS[mark.ttl])


def openai_ttl(ttl: str, path: str) -> float:
    """Seconds. Raises BadRequest."""
    if ttl not in _OPENAI_TTLS:
        raise refuse(f"{path}.ttl", 'must be "30m" or "12h"')
    return _OPENAI_TTLS[ttl]


def part_breakpoints(
    parts: Sequence[Part], path: str, options: CacheOptions | None
) -> Iterator[CacheBreakpoint | None]:
    """Of parts with a mark of either kind. Raises BadRequest."""
    for part in parts:
        yield breakpoint_of(part.cache_control, path)
        explicit = part.prompt_cache_breakpoint
        if explicit is not None:
            ttl = explicit.ttl or (options.ttl if options is not None else None) or DEFAULT_TTL
            yield CacheBreakpoint(openai_ttl(ttl, f"{path}.prompt_cache_breakpoint"))


def longest(breakpoints: Iterable[CacheBreakpoint | None]) -> CacheBreakpoint | None:
    """Of several breakpoints in one message, the one with the longest ttl."""
    return max((one for one in breakpoints if one is not None), key=lambda one: one.ttl, default=None)


def with_last_breakpoint(messages: Sequence[Message], mark: CacheBreakpoint | None) -> tuple[Message, ...]:
    """The messages, the last one with a breakpoint for the whole conversation, if there is one."""
    if mark is None or not messages:
        return tuple(messages)
    last = messages[-1]
    return (*messages[:-1], replace(last, breakpoint=longest((last.breakpoint, mark))))


def check_breakpoints(messages: Sequence[Message], tools: Sequence[Tool]) -> None:
    """Raises BadRequest for more breakpoints than Anthropic allows."""
    breakpoints = [one.breakpoint for one in messages] + [one.breakpoint for one in tools]
    count = len(breakpoints) - breakpoints.count(None)
    if count > _MOST_BREAKPOINTS:
        reason = f"cache_control: at most {_MOST_BREAKPOINTS} messages, blocks and tools may have it, not {count}"
        raise refuse("messages", reason)


def text_of(content: str | Sequence[Part], path: str) -> str:
    """Text, or parts that are all text. Raises BadRequest."""
    if isinstance(content, str):
        return content
    if not content:
        raise refuse(path, "must be a string or a list of text parts")
    return "".join(_part_text(part, path) for part in content)


def _part_text(part: Part, path: str) -> str:
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type not in _TEXT_TYPES:
        raise refuse(path, f"must be text; a part of type {part.type[:40]!r} is not supported")
    if part.text is None:
        raise refuse(path, 'must be made of parts like {"type": "text", "text": "..."}')
    return part.text
