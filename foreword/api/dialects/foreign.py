"""Reads requests that this server would refuse and another engine may know: what a router needs of them.

The refusal names a field. It is made simpler or left out until the rest is understood. Of what is not text, such as images, a
digest remains: equal parts are equal texts.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from foreword.api.dialects.decode import Limits, TooMany
from foreword.api.request import ClientBody, GenerateRequest
from foreword.errors import BadRequest

# A router acts on these itself.
_NEEDED: Final = frozenset(
    ("model", "stream", "stream_options", "n", "prefix", "cache_salt", "priority", "return_token_ids", "thread")
)
_CONVERSATIONS: Final = frozenset(("messages", "input", "system"))
# Types of parts, items and tools that all dialects here know.
_KNOWN: Final = frozenset(
    ("text", "input_text", "output_text", "refusal", "thinking", "redacted_thinking", "reasoning", "summary_text")
) | frozenset(
    ("reasoning_text", "message", "tool_use", "tool_result", "function_call", "function_call_output", "function", "custom")
)  # fmt: skip
_MOST: Final = 8
_BOOLEANS: Final = {
    **dict.fromkeys(("1", "1.0", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "0.0", "-0.0", "off", "f", "false", "n", "no"), False),
}


def read_foreign(
    parse: Callable[[bytes, Limits], GenerateRequest], body: ClientBody, limits: Limits, refusal: BadRequest
) -> GenerateRequest:
    """Read a body that `parse` has refused. Raises BadRequest if the router cannot do without what is wrong."""
    fields: dict[str, Any] = dict(body.fields)
    error, refused = refusal, set[str]()
    for _ in range(_MOST):
        name = error.param
        if name in _NEEDED and (name in refused or not _read_laxly(fields, name)):
            raise error
        try:
            if name not in _NEEDED and not _simplify(fields, name, again=name in refused):
                break
            return replace(parse(msgspec.json.encode(fields), limits), refusal=refusal)
        except TooMany:
            raise
        except BadRequest as found:
            error = found
        except RecursionError:
            break
        refused.add(str(name))
    raise refusal


def _read_laxly(fields: dict[str, Any], name: str | None) -> bool:
    """Read a boolean or a number as pydantic does, by which other servers read. Whether it can be one."""
    if name is None or name not in fields:
        return False
    value = _decoded(fields[name])
    if name == "stream_options" and isinstance(value, dict):
        fields[name] = {key: _BOOLEANS.get(str(one).lower(), one) for key, one in value.items()} or None
        return True
    found: object = _BOOLEANS.get(str(value).lower()) if name in ("stream", "return_token_ids") else None
    if name == "n" and isinstance(value, str) and value.isdecimal():
        found = int(value[:9])
    elif name == "n" and value is True:
        found = 1
    if found is not None:
        fields[name] = found
    return found is not None


def _simplify(fields: dict[str, Any], name: str | None, *, again: bool) -> bool:
    """Make a field simpler, or leave it out. Whether there is one."""
    given = "prompt_embeds" if name == "prompt" and "prompt_embeds" in fields else name
    if given is None or given not in fields:
        return False
    value = fields.pop(given)
    value = _decoded(value) if isinstance(value, msgspec.Raw) else value
    if name == "prompt" and not again and isinstance(value, list | str):
        several = isinstance(value, list) and all(isinstance(one, list | str) for one in value)
        fields["prompt"] = [*map(_digest, value)] if several else _digest(value)
    if name == "tools" and not again:
        known = ("function", "custom")
        tools = (one for one in value if isinstance(one, dict)) if isinstance(value, list) else ()
        fields[name] = [one for one in tools if one.get("type", "function") in known]
    elif name in _CONVERSATIONS and not again:
        fields[name] = _simpler(value, "message")
    elif name in ("messages", "input") and isinstance(value, list):
        fields[name] = [{"role": "user", "content": msgspec.json.encode(one).decode()} for one in value]
    return True


def _decoded(raw: msgspec.Raw) -> Any:
    """A field; None for numbers that are too large and for too many levels."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None


def _simpler(value: Any, place: str = "part") -> Any:
    """A conversation in which everything of an unknown type is a text with its digest."""
    if isinstance(value, list):
        return [_simpler(one, place) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if not isinstance(kind, str) or kind in _KNOWN:
        return {name: _simpler(one) for name, one in value.items()}
    text = f"[{kind} {_digest(value)}]"
    return {"role": "user", "content": text} if place == "message" else {"type": "text", "text": text}


def _digest(value: Any) -> str:
    return blake2b(msgspec.json.encode(value), digest_size=16).hexdigest()
