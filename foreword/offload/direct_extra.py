"""Copies straight between a device and the memory tier (`store.direct`), a product of its own.

The package `foreword-direct` has them (`direct_tier.py`). It is imported where the setting asks for them; without it a
configuration that does is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from foreword.errors import ConfigError
from foreword.plugins import of_product

if TYPE_CHECKING:
    from foreword.offload.direct_interfaces import DirectExtra

_EXTRA: Final = "foreword.offload.direct_tier:DIRECT"


def direct_extra() -> DirectExtra:
    """The package. Raises ConfigError where it is not installed."""
    found: DirectExtra | None = of_product(_EXTRA)
    if found is None:
        raise ConfigError("store.direct needs the package foreword-direct: pip install 'foreword[direct]'")
    return found
