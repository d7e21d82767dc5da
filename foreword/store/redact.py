"""What is shown of URLs and of what clients say about them: never a password, key or token."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import SplitResult, parse_qsl, urlsplit

from foreword.errors import StoreConfigError

HIDDEN: Final = "***"
ESCAPES: Final = "in a user name or password write / as %2F, ? as %3F, # as %23, : as %3A and @ as %40"
# Behind ? or &: clients repeat URLs, not their options.
_SECRET_OPTION: Final = re.compile(
    r"([?&][^=&\s]*(?:pass|secret|token|key|sig|credential)[^=&\s]*=)[^&\s]*", re.IGNORECASE
)
# Up to the last @ of a word, or of a line if a colon stands between: a password that was not percent-encoded may hold
# anything. A third slash begins a path, without a user before it.
_USER_INFO: Final = re.compile(r"://(?!/)(?:[^\s:/?#@]*:[^\n@]*)?\S*@")


def redacted(text: str, *secrets: str) -> str:
    """`text` (a URL, or a sentence that may repeat one) without user names, passwords and the values of options that look like
    secrets. `secrets` are hidden wherever they stand."""
    text = _USER_INFO.sub(f"://{HIDDEN}@", _SECRET_OPTION.sub(rf"\1{HIDDEN}", text))
    for secret in secrets:
        if secret:
            text = text.replace(secret, HIDDEN)
    return text


def split_url(url: str) -> SplitResult:
    """The parts of a store's URL. Raises StoreConfigError, also where a password that was not percent-encoded would be taken
    for something else: what stands before its ? or # reads as a port if it is a number."""
    try:
        parts = urlsplit(url)
    except ValueError:  # which repeats the host, and what stands before it
        raise StoreConfigError(f"{redacted(url)!r} is no URL: its host cannot be read") from None
    if parts.fragment:
        shown = redacted(url).partition("#")[0]
        raise StoreConfigError(f"{shown!r}: a # ends a URL; write one in a path or password as %23 ({ESCAPES})")
    if any("@" in key for key, _ in parse_qsl(parts.query, keep_blank_values=True)):
        raise StoreConfigError(f"{redacted(url)!r}: no option has an @ in its name; {ESCAPES}")
    return parts
