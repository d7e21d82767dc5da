"""Where a model or a tokenizer is, as configured."""

from __future__ import annotations

import re
from pathlib import Path

from foreword.request_errors import ModelNotFound


def check_source(source: str, what: str) -> bool:
    """Whether it is a folder; otherwise it may be a name on the hub. Raises ModelNotFound if it can be neither."""
    if Path(source).expanduser().is_dir():
        return True
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source) is None:
        raise ModelNotFound(f"{source!r} is not a folder with {what}; give a folder, or a hub name such as owner/name")
    return False
