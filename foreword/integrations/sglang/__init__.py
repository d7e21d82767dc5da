"""A storage backend for SGLang's HiCache: `module_path` is `foreword.integrations.sglang`, `class_name` is `ForewordStorage`.

SGLang is imported when the class is asked for, not before. A SGLang that does not fit is refused then, in one sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from foreword.errors import ConfigError

if TYPE_CHECKING:
    from foreword.integrations.sglang.hicache import ForewordStorage

__all__ = ["ForewordStorage"]

TESTED: Final = "0.5.23"


def __getattr__(name: str) -> Any:
    if name != "ForewordStorage":
        raise AttributeError(f"module 'foreword.integrations.sglang' has no attribute {name!r}")
    import sglang.version

    version = sglang.version.__version__
    try:
        # Versions without it give pages of all tenants the same keys.
        from sglang.srt.mem_cache.utils import storage_namespace_seed  # noqa: F401

        from foreword.integrations.sglang.hicache import ForewordStorage
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "sglang":
            raise
        raise ConfigError(
            f"Foreword's backend for HiCache needs SGLang {TESTED}; this is {version}: {error}"
        ) from error
    return ForewordStorage
