"""Encodes server-sent events (`dialects/answer_reader.py` reads them)."""

from __future__ import annotations

import json
from typing import Any, Final

from foreword.texts import readable

# The data of the last event of an OpenAI stream.
DONE: Final = b"[DONE]"


def encode(data: Any, name: str = "") -> bytes:
    """An event with JSON as its data. JSON contains no line breaks, so one `data:` line is enough."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = f"event: {name}\ndata: " if name else "data: "
    return utf8(f"{head}{text}\n\n")


def utf8(text: str) -> bytes:
    """A text as UTF-8, whatever it is."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return readable(text).encode()
