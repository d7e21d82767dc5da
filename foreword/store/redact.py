"""What is shown of URLs and of what clients say about them: never a password, key or token."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import SplitResult, urlsplit

from foreword.errors import StoreConfigError

HIDDEN: Final = "***"
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
    """The parts of a store's URL. Raises StoreConfigError."""
    try:
        return urlsplit(url)
    except ValueError:  # which repeats the host, and what stands before it
        raise StoreConfigError(f"{redacted(url)!r} is no URL: its host cannot be read") from None
