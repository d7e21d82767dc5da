"""Redact user names, passwords, keys and tokens in URLs and in error messages of client libraries."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import SplitResult, parse_qsl, urlsplit

from foreword.errors import StoreConfigError

HIDDEN: Final = "***"
ESCAPES: Final = "in a user name or password write / as %2F, ? as %3F, # as %23, : as %3A and @ as %40"
# After ? or &: clients repeat URLs, not their options.
_SECRET_OPTION: Final = re.compile(
    r"([?&][^=&\s]*(?:pass|secret|token|key|sig|credential)[^=&\s]*=)[^&\s]*", re.IGNORECASE
)
# Up to the last @ of a word, or of a line if there is a colon before it: a password that was not percent-encoded may contain
# anything. After three slashes comes a path, and there is no user name.
_USER_INFO: Final = re.compile(r"://(?!/)(?:[^\s:/?#@]*:[^\n@]*)?\S*@")


def redacted(text: str, *secrets: str) -> str:
    """Replace user names, passwords and the values of secret options in `text`, a URL or a message that may contain one.

    `secrets` are replaced wherever they occur.
    """
    text = _USER_INFO.sub(f"://{HIDDEN}@", _SECRET_OPTION.sub(rf"\1{HIDDEN}", text))
    for secret in secrets:
        if secret:
            text = text.replace(secret, HIDDEN)
    return text


def split_url(url: str) -> SplitResult:
    """Split a store URL. Raises StoreConfigError, also if a password that was not percent-encoded would be misread.

    Example: in `redis://me:12?34@host` the password would be read as port 12 and a query.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # its message repeats the host and the password
        raise StoreConfigError(f"{redacted(url)!r} is not a URL: its host cannot be read") from None
    if parts.fragment:
        shown = redacted(url).partition("#")[0]
        raise StoreConfigError(f"{shown!r}: a # ends a URL; write one in a path or password as %23 ({ESCAPES})")
    if any("@" in key for key, _ in parse_qsl(parts.query, keep_blank_values=True)):
        raise StoreConfigError(f"{redacted(url)!r}: no option has an @ in its name; {ESCAPES}")
    return parts
