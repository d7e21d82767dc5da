"""Formats that the generated text of a request must match, and how large they may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# Limits of a JSON schema, regular expression or grammar: characters, and levels of objects and arrays below the outermost.
MAX_FORMAT_CHARACTERS = 128 * 1024
MAX_FORMAT_DEPTH = 48
MAX_CHOICES = 4096


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The format that the generated text must match.

    Attributes:
        kind: `json_object` is any JSON object; `grammar` is in the Lark syntax of llguidance, or in EBNF.
        value: the JSON schema (a mapping), regular expression or grammar (texts), or the choices (a tuple of texts).
        strict: refuse a JSON schema with keywords that the mask cannot enforce; False ignores those keywords.
        complete: near `max_tokens`, choose tokens that end the text in time. False: the text may be cut anywhere.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: Mapping[str, Any] | bool | str | tuple[str, ...] | None = None
    strict: bool = True
    complete: bool = True
