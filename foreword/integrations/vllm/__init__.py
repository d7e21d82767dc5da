"""The vLLM KV connector: `kv_connector_module_path` is `foreword.integrations.vllm`.

`ForewordECConnector` keeps encoder outputs; `ForewordTier` is a secondary tier of vLLM's own offloading; `NamedPrefixes` is a
middleware. vLLM is imported when one of these classes is asked for, not before. A vLLM that does not fit is refused then, in
one sentence. What Foreword logs in a process of vLLM goes through vLLM's logger.
"""

from __future__ import annotations

import copy
import logging
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from foreword.integrations.vllm.connector import ForewordConnector
    from foreword.integrations.vllm_extras.encoder_cache import ForewordECConnector
    from foreword.integrations.vllm_offload.offload_tier import ForewordTier

__all__ = ["ForewordConnector", "ForewordECConnector", "ForewordTier", "NamedPrefixes"]

OLDEST: Final = (0, 31)
NEWEST_TESTED: Final = (0, 33)
_MODULES: Final = {
    "ForewordConnector": "vllm.connector",
    "ForewordECConnector": "vllm_extras.encoder_cache",
    "ForewordTier": "vllm_offload.offload_tier",
    "NamedPrefixes": "vllm_middleware.middleware",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'foreword.integrations.vllm' has no attribute {name!r}")
    from importlib import import_module

    version = _checked_version()
    try:
        return getattr(import_module(f"foreword.integrations.{_MODULES[name]}"), name)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ImportError) and (error.name or "").partition(".")[0] != "vllm":
            raise
        from foreword import __version__
        from foreword.errors import ConfigError

        raise ConfigError(
            f"Foreword {__version__} does not fit vLLM {version}: {error}; it was tested with vLLM {_text(OLDEST)} to "
            f"{_text(NEWEST_TESTED)}"
        ) from error


def _checked_version() -> str:
    """vLLM's version. Raises ConfigError if it is too old. It must come before any other import from vLLM, which may fail."""
    import vllm

    version = str(getattr(vllm, "__version__", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    # A build from sources may have a version like 0.1.dev1, which says nothing.
    if numbers is not None and "dev" not in version and tuple(map(int, numbers.groups())) < OLDEST:
        from foreword.errors import ConfigError

        raise ConfigError(f"Foreword's connector needs vLLM {_text(OLDEST)} or later; this is {version}")
    return version


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


class VllmHandler(logging.Handler):
    """Passes records of the logger `foreword` and those below it on to `vllm.foreword...`.

    vLLM's handler and level apply there: its lines have the time, the level and the process. The message gets the word that
    says where it is from.
    """

    def emit(self, record: logging.LogRecord) -> None:
        target = logging.getLogger(f"vllm.{record.name}")
        if target.isEnabledFor(record.levelno):
            passed, message = copy.copy(record), record.getMessage()
            passed.name, passed.args = target.name, ()
            passed.msg = message if message.startswith("Foreword") else f"Foreword: {message}"
            target.handle(passed)


def log_through_vllm() -> None:
    """Let vLLM's logger handle what Foreword logs, if it is set up and the logger `foreword` has no handler."""
    mine, theirs = logging.getLogger("foreword"), logging.getLogger("vllm")
    if theirs.handlers and not mine.handlers:
        mine.addHandler(VllmHandler())
        mine.setLevel(theirs.getEffectiveLevel())
        mine.propagate = False


log_through_vllm()
