"""Text that cannot be encoded: the one place that makes it readable, for responses, labels and the log.

Python gives a byte of an argument or a file name that is no character in the locale's encoding as half a character (PEP 383),
which no encoder takes. Paths keep these: only so are they found again.
"""

from __future__ import annotations

import re
from typing import Final

# Halves of characters that stand for no byte, such as a client's.
_LONE: Final = re.compile("[\ud800-\udc7f\udd00-\udfff]")


def readable(text: str) -> str:
    """A text in which bytes of a name are what they are in UTF-8, and other halves of characters are U+FFFD."""
    if text.isascii():
        return text
    return _LONE.sub("\ufffd", text).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
